"""Hugging Face `config.json` files as models."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perfmodel.catalog._hf_families import FAMILIES, PARTS
from perfmodel.catalog._toml import checked
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Transformer

Config = Mapping[str, Any]
LONGEST_ASSUMED: Final = 8192
"""Tokens per sequence that are taken at most where a configuration says only how many its positions allow: models are
pre-trained on less (Llama 3 on 8,192 of 131,072, arXiv 2407.21783, section 3.4)."""

IN_TOML: Final = (
    "any other transformer is described in a TOML file (docs/howto/add_a_model.md), such as --model mine.toml with "
    "layers = 32, hidden = 4096, heads = 32, kv_heads = 8, ffn_hidden = 14336, vocab = 128256, seq_len = 4096"
)


def read_config(path: Path) -> Transformer:
    """The model that a `config.json` describes, by its `model_type`.

    Raises:
        PerfModelError: if the file is not JSON, or keys that the family needs are missing or malformed; lists all.
        UnknownNameError: for a `model_type` of none of the supported families.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PerfModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise PerfModelError(f"{path}: not valid JSON: {error}") from None
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
