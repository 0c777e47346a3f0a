"""Models by name, from a Hugging Face `config.json`, or from a TOML file."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from perfmodel.catalog._convnets import convnets
from perfmodel.catalog._hf_families import FAMILIES, PARTS
from perfmodel.catalog._toml import checked, index, package_tables, parsed, read_toml, resolve
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import ConvNet, Mlp, Model, Transformer

Config = Mapping[str, Any]
LONGEST_ASSUMED: Final = 8192
"""Tokens per sequence that are taken at most where a configuration says only how many its positions allow: models are
pre-trained on less (Llama 3 on 8,192 of 131,072, arXiv 2407.21783, section 3.4)."""

IN_TOML: Final = (
    "any other transformer is described in a TOML file (docs/howto/add_a_model.md), such as --model mine.toml with "
    "layers = 32, hidden = 4096, heads = 32, kv_heads = 8, ffn_hidden = 14336, vocab = 128256, seq_len = 4096"
)


def model(name_or_path: str | Path | Model) -> Model:
    """A model by catalog name or alias, from a `.toml` file, or from a Hugging Face `config.json`
    (or the folder that holds it); a model is itself.

    A TOML file has a `name`, a `kind` (`transformer`, the default, `mlp` or `convnet`) and the
    fields of `perfmodel.spec.Transformer`, `Mlp` or `ConvNet`.

    Raises:
        UnknownNameError: for a name that is neither in the catalog nor a file.
        PerfModelError: for a file with missing, unknown or malformed keys; lists all of them.
    """
    if isinstance(name_or_path, Model):
        return name_or_path
    path = Path(name_or_path)
    if path.suffix == ".json":
        return read_config(path)
    if (path / "config.json").is_file():
        return read_config(path / "config.json")
    if path.suffix == ".toml":
        data = read_toml(path)
        return model_from_toml({"name": path.stem} | data, str(path))
    table, names = _catalog()
    return resolve("model", str(name_or_path), names, table)


def models() -> tuple[str, ...]:
    """Names of all models in the catalog."""
    return tuple(sorted(_catalog()[0]))


def model_from_toml(data: dict[str, Any], where: str) -> Model:
    """A model from a parsed TOML table.

    Raises:
        PerfModelError: naming `where` and every key that is missing, unknown or malformed.
    """
    data = dict(data)
    kind = data.pop("kind", "transformer")
    match kind:
        case "transformer":
            return checked(Transformer, _with_defaults(data), where)
        case "mlp":
            return checked(Mlp, data, where)
        case "convnet":
            return checked(ConvNet, data, where)
    raise PerfModelError(f"{where}: kind: must be transformer, mlp or convnet, got {kind!r}")


def _with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """Fill in what follows from the rest: all heads have keys, heads split the hidden size, 4x inner size."""
    hidden, heads = data.get("hidden"), data.get("heads")
    out = dict(data)
    if isinstance(heads, int):
        out.setdefault("kv_heads", heads)
    if isinstance(hidden, int):
        out.setdefault("ffn_hidden", 4 * hidden)
        if isinstance(heads, int) and heads > 0:
            out.setdefault("head_dim", hidden // heads)
    return out


@cache
def _catalog() -> tuple[MappingProxyType[str, Model], MappingProxyType[str, str]]:
    table: dict[str, Model] = {}
    for file, content in package_tables("models").items():
        for name, entry in content["models"].items():
            table[name] = model_from_toml(content.get("defaults", {}) | {"name": name} | entry, f"{file} [{name}]")
    table |= {net.name: net for net in convnets()}
    names = index((m.name, m.aliases) for m in table.values())
    return MappingProxyType(table), MappingProxyType(names)


def read_config(path: Path) -> Transformer:
    """The model that a `config.json` describes, by its `model_type`.

    Raises:
        PerfModelError: if the file is not JSON, or keys that the family needs are missing or malformed; lists all.
        UnknownNameError: for a `model_type` of none of the supported families.
    """
    config = parsed(path, json.loads, "JSON")
    if not isinstance(config, dict):
        raise PerfModelError(f"{path}: must hold one JSON object")
    return from_config(config, where=str(path))


def from_config(config: Config, *, where: str = "config.json") -> Transformer:
    """The model that a parsed configuration describes; see `read_config`."""
    family, name = config.get("model_type", config.get("_class_name")), config.get("_name_or_path")
    if not isinstance(family, str):
        raise PerfModelError(f"{where}: model_type: missing; it names the family")
    if family in PARTS:
        part, family = PARTS[family]
        described = config.get(part)
        if not isinstance(described, dict):
            raise PerfModelError(f"{where}: {part}: missing; it describes the model")
        config, family = described, described.get("model_type", family)
    if family not in FAMILIES:
        raise UnknownNameError("Hugging Face model_type", family, FAMILIES, remedy=IN_TOML)
    kind = FAMILIES[family]
    fields = checked(kind, _stated(config, getattr(kind, "ALIASES", {})), f"{where}, model_type {family!r}")
    try:
        return Transformer(
            name=name if isinstance(name, str) and name else f"{family}-{where}",
            source=f"Hugging Face configuration {where}",
            **_with_assumed_length(fields.fields()),
        )
    except PerfModelError as error:
        raise PerfModelError(f"{where}: {error}") from None


def _stated(config: Config, aliases: Mapping[str, str]) -> dict[str, Any]:
    """The configuration without its nulls, under the names that the family's schema knows."""
    plain = {key: value for key, value in config.items() if value is not None}
    if isinstance(plain.get("attn_config"), dict):
        plain["attn_config"] = _stated(plain["attn_config"], {})
    return {aliases[key]: value for key, value in plain.items() if key in aliases} | plain


def _with_assumed_length(fields: dict[str, Any]) -> dict[str, Any]:
    longest = fields["seq_len"]
    if longest <= LONGEST_ASSUMED:
        return fields
    return fields | {"seq_len": LONGEST_ASSUMED, "longest_seq_len": longest}
