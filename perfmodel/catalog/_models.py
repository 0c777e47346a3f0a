"""Models by name, from a Hugging Face `config.json`, or from a TOML file."""

from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perfmodel.catalog._convnets import convnets
from perfmodel.catalog._huggingface import read_config
from perfmodel.catalog._toml import checked, index, package_tables, read_toml, resolve
from perfmodel.errors import PerfModelError
from perfmodel.spec import ConvNet, Mlp, Model, Transformer


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
