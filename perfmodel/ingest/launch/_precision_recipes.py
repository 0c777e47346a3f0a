"""Mixed precisions of NeMo 2 and Megatron-Bridge by name
(`megatron/bridge/training/mixed_precision.py`)."""

import re
from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._table import BadValue, Fields, Rule, stated_value

_RECIPES: Final = (
    ("nvfp4", "fp4", "nvfp4"),
    ("mxfp8|fp8_?mx", "fp8", "mxfp8"),
    ("subchannel|blockwise|fp8_?sc", "fp8", "blockwise"),
    ("current|tensorwise|fp8_?cs", "fp8", "current"),
    ("delayed|hybrid|fp8_?ds", "fp8", "delayed"),
    ("fp8", "fp8", ""),
)
"""Patterns in the names of precisions narrower than 16 bits, with the element type and the recipe
of each."""
_HALVES: Final = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "16-mixed": "fp16",
    "16": "fp16",
    "fp32": "fp32",
    "32": "fp32",
    "32-true": "fp32",
}
_WRITTEN: Final = {
    ("bf16", ""): "bf16_mixed",
    ("fp16", ""): "fp16_mixed",
    ("fp32", ""): "32",
    ("fp8", "delayed"): "bf16_with_fp8_delayed_scaling_mixed",
    ("fp8", "mxfp8"): "bf16_with_mxfp8_mixed",
    ("fp8", "blockwise"): "bf16_with_fp8_subchannel_scaling_mixed",
    ("fp4", "nvfp4"): "bf16_with_nvfp4_mixed",
}
_USUAL_FP8: Final = "bf16_with_fp8_current_scaling_mixed"


def precision_of(name: str) -> Fields:
    """Fields of a precision by its name, such as `bf16_mixed` or `bf16_with_mxfp8_mixed`; empty if
    it says none."""
    plain = name.lower()
    for pattern, dtype, recipe in _RECIPES:
        if re.search(pattern, plain):
            return {"dtype": dtype} | ({"fp8_recipe": recipe} if recipe else {})
    half = _HALVES.get(plain) or next(
        (half for word, half in _HALVES.items() if plain.startswith(word)), None
    )
    return {} if half is None else {"dtype": half}


def _read(settings: Mapping[str, Any]) -> Fields:
    name = stated_value(settings)
    fields = precision_of(str(name))
    if not fields:
        raise BadValue(
            f"must name a precision, such as bf16_mixed or bf16_with_mxfp8_mixed; got {name!r}"
        )
    return fields


def _write(fields: Fields) -> Mapping[str, Any]:
    dtype = str(fields.get("dtype"))
    recipe = str(fields.get("fp8_recipe") or "")
    name = _WRITTEN.get((dtype, recipe), _WRITTEN.get((dtype, "")))
    return {"mixed_precision": _USUAL_FP8 if name is None and dtype == "fp8" else name}


PRECISION_RULE: Final = Rule(keys=("mixed_precision",), read=_read, write=_write, fields=("dtype",))
"""The rule for the name of a precision, which sets the switches of model and gradients."""
