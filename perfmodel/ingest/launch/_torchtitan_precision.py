"""Precision, optimizer states and recomputation in torchtitan's TOML."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._table import FLAG, WHOLE, Fields, named_optimizer, words

_DTYPES: Final = words({"bfloat16": "bf16", "float32": "fp32"})


FLOAT8_SWITCHES: Final = (
    "float8.enable_float8_linear",
    "training.enable_float8_linear",
    "primus_turbo.use_turbo_float8_linear",
    "primus_turbo.use_turbo_mx_linear",
)
"""Switches for 8-bit products: those of 2024, before model converters existed, and those of
Primus."""


FLOAT8_OPTIONS: Final = (
    "float8.enable_fsdp_float8_all_gather",
    "float8.recipe_name",
    "mx.recipe_name",
    "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "quantize.linear.float8.recipe_name",
    "quantize.linear.mx.recipe_name",
    "quantize.dense.mx.recipe_name",
)
"""Options of 8-bit products, which count only where a converter turns them on."""


def early_step(settings: Mapping[str, Any]) -> Fields:
    if settings["optimizer.early_step_in_backward"] is not True:
        return {}
    return {
        "doubt.gradients": "memory may be wrong: early_step_in_backward frees gradients inside the backward pass, but "
        "the prediction keeps them until the step"
    }


PLAIN_OPTIMIZER: Final = (
    "lr",
    "eps",
    "beta*",
    "weight_decay",
    "implementation",
    "fused",
    "foreach",
    "scheduler*",
)
"""Settings of the optimizer that change neither its states nor its kernels."""


def optimizer_of(settings: Mapping[str, Any]) -> Fields:
    name = settings.get("optimizer.name", "AdamW")
    # The type in which weights are kept, and with them optimizer states.
    if settings.get("training.dtype") == "bfloat16" and name in ("Adam", "AdamW"):
        return {"optimizer": "adam16bit"}
    return named_optimizer(name) if "optimizer.name" in settings else {}


def dtype_of(settings: Mapping[str, Any]) -> Fields:
    converters = settings.get("model.converters", [])
    # Flags of a command line give a text with commas, files of TOML a list.
    names = converters if isinstance(converters, list) else str(converters).split(",")
    if any("nvfp4" in str(name).lower() for name in names):
        return {"dtype": "fp4"}
    # Three generations of switches: a key of its own, converters by short names, and converters by
    # path.
    converted = any(
        name in ("float8", "mx", "quantize.linear.float8", "quantize.linear.mx") for name in names
    )
    switched = any(FLAG.read(settings[name]) for name in FLOAT8_SWITCHES if name in settings)
    if converted or switched or settings.get("training.fp8_linear") not in (None, "", False):
        return {"dtype": "fp8"}
    name = settings.get("training.mixed_precision_param")
    fields = {} if name is None else {"dtype": _DTYPES.read(name)}
    sections = [key.rpartition(".")[0] for key in FLOAT8_OPTIONS if settings.get(key)]
    if sections:
        fields["note.float8"] = (
            f"products in 16 bits: the file sets options of {sections[0]}, but no converter in model.converters "
            "turns it on"
        )
    return fields


def write_dtype(fields: Fields) -> Mapping[str, Any]:
    if fields.get("dtype") == "fp8":
        return {"model.converters": ["float8"]}
    return {"training.mixed_precision_param": _DTYPES.write(fields.get("dtype"))}


_RECOMPUTE_MODE: Final = "activation_checkpoint.mode"
SELECTIVE_OPTION: Final = "activation_checkpoint.selective_ac_option"
BY_OPERATOR: Final = "op"
"""The option of selective recompute that repeats operators in every layer."""
RECOMPUTE: Final = (_RECOMPUTE_MODE, SELECTIVE_OPTION)


def recompute_of(settings: Mapping[str, Any]) -> Fields:
    """Recompute of all layers, of every n-th layer in full, or (`op`) of all operators except every
    second product."""
    fields: Fields = {}
    if _RECOMPUTE_MODE in settings:
        modes = words({"none": "none", "selective": "selective", "full": "full"})
        fields["recompute"] = modes.read(settings[_RECOMPUTE_MODE])
    if str(settings.get(SELECTIVE_OPTION, "")).isdecimal():
        fields["selective_every"] = WHOLE.read(settings[SELECTIVE_OPTION])
    elif settings.get(SELECTIVE_OPTION) == BY_OPERATOR:
        fields["selective_every"] = 0
    return fields


def write_recompute(fields: Fields) -> Mapping[str, Any]:
    """Settings of activation checkpointing that state the fields' recompute."""
    full_layers = fields.get("recompute_full_layers")
    layers_per_stage = fields.get("layers", 0) / (fields["pp"] * fields["vpp"])
    if full_layers and layers_per_stage and len(set(full_layers)) == 1:
        # Every n-th layer of a stage is repeated as a whole: the n whose count comes out at the
        # layout's number.
        for period in range(2, 1 + int(layers_per_stage)):
            if max(1, round(layers_per_stage / period)) == full_layers[0]:
                return {_RECOMPUTE_MODE: "selective", SELECTIVE_OPTION: str(period)}
        return {}
    if fields["recompute"] == "selective":
        return {_RECOMPUTE_MODE: "selective", SELECTIVE_OPTION: BY_OPERATOR}
    return {_RECOMPUTE_MODE: fields["recompute"]}
