"""Layers of Megatron-Core other than attention: Mamba-2 of its hybrids, and gated delta nets
(`megatron/core/ssm`)."""

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

from perfmodel.ingest.launch._arguments import SCRIPT
from perfmodel.ingest.launch._entries import as_list
from perfmodel.ingest.launch._layer_patterns import hybrid_layers, layer_list
from perfmodel.ingest.launch._table import NUMBER, WHOLE, BadValue, Fields
from perfmodel.spec.parts import SelectiveScan

HYBRID: Final = (
    "hybrid-override-pattern",
    "hybrid-layer-pattern",
    "hybrid-attention-ratio",
    "hybrid-mlp-ratio",
    "is-hybrid-model",
    SCRIPT,
    "spec",
    "num-layers",
    "hidden-size",
    "mamba-state-dim",
    "mamba-head-dim",
    "mamba-num-groups",
    "mamba-num-heads",
    "num-attention-heads",
)
_PLAIN_SPECS: Final = (
    "qwen3_spec",
    "qwen3_next",
    "qwen3_5",
    "deepseek_spec",
    "gpt_layer_specs",
    "llama",
)
"""Specifications of layers that other arguments describe completely."""


def hybrid_fields(arguments: Mapping[str, Any]) -> Fields:
    """Models of `pretrain_mamba.py`: layers of Mamba-2, attention and feed-forwards."""
    # Whether layers are hybrid is decided by the program (`pretrain_mamba.py`)
    # or the specification of layers, not by a flag.
    program = PurePosixPath(str(arguments.get(SCRIPT, ""))).name
    spec = " ".join(map(str, as_list(arguments.get("spec", ""))))
    if (
        "mamba" not in program
        and "mamba" not in spec
        and not any(name.startswith("hybrid") for name in arguments)
    ):
        if not spec or any(known in spec for known in _PLAIN_SPECS):
            return {}
        return {
            "doubt.spec": f"the model may be wrong: --spec {spec} defines its layers, and perfmodel does not read it"
        }
    if "hidden-size" not in arguments:
        return {}
    pattern = arguments.get("hybrid-override-pattern", arguments.get("hybrid-layer-pattern"))
    if pattern is not None:
        # Behind a slash stand modules that predict further tokens; bars only divide stages.
        letters = str(pattern).split("/")[0].replace("|", "")
        layers = WHOLE.read(arguments.get("num-layers", len(letters)))
        if layers != len(letters):
            raise BadValue(
                f"must name every layer, or Megatron stops; got {len(letters)}, and --num-layers {layers}"
            )
    elif "num-layers" in arguments:
        attention_ratio = NUMBER.read(arguments.get("hybrid-attention-ratio", 0.0))
        mlp_ratio = NUMBER.read(arguments.get("hybrid-mlp-ratio", 0.0))
        letters = hybrid_layers(WHOLE.read(arguments["num-layers"]), attention_ratio, mlp_ratio)
    else:
        return {}
    if set(letters) - set("M*-E"):
        raise BadValue(f"can have only layers M, *, - and E; got {pattern!r}")
    fields: Fields = {"model.layers": len(letters), "model.mixers": letters}
    # Without attention no heads need be stated, but a model has to have some.
    if "*" not in letters:
        fields["model.heads"] = WHOLE.read(arguments.get("num-attention-heads", 1))
    if "M" in letters:
        # Defaults of Mamba-2 in Megatron-Core (megatron/core/ssm/mamba_mixer.py): twice the hidden
        # size in heads of 64, 128 states, 8 groups.
        head_dim = WHOLE.read(arguments.get("mamba-head-dim", 64))
        heads = WHOLE.read(
            arguments.get("mamba-num-heads", 2 * WHOLE.read(arguments["hidden-size"]) // head_dim)
        )
        fields |= {
            "mamba.heads": heads,
            "mamba.head_dim": head_dim,
            "mamba.state": WHOLE.read(arguments.get("mamba-state-dim", 128)),
            "mamba.groups": WHOLE.read(arguments.get("mamba-num-groups", 8)),
        }
    return fields


_DELTA_SIZES: Final = {
    "linear-num-value-heads": ("delta.heads", 32),
    "linear-num-key-heads": ("delta.key_heads", 16),
    "linear-value-head-dim": ("delta.head_dim", 128),
    "linear-key-head-dim": ("delta.key_dim", 128),
    "linear-conv-kernel-dim": ("delta.conv_kernel", 4),
}
"""Arguments for the sizes of gated delta nets, with their fields and defaults
(megatron/core/transformer/transformer_config.py)."""
_VARIANTS: Final = ("experimental-attention-variant", "linear-attention-type")
_EVERY: Final = "linear-attention-freq"
DELTA_NETS: Final = (*_VARIANTS, _EVERY, *_DELTA_SIZES)
"""Arguments of gated delta nets."""


def delta_net_fields(arguments: Mapping[str, Any], has_experts: Sequence[bool]) -> Fields:
    """Fields of a model in which most layers have a gated delta net in place of attention.

    Args:
        arguments: arguments of `DELTA_NETS`, the program and the number of layers.
        has_experts: whether each layer has experts.
    """
    variants = [arguments[name] for name in _VARIANTS if arguments.get(name) is not None]
    if variants and variants[0] != "gated_delta_net":
        return {
            "doubt.variant": f"the model may be wrong: {variants[0]} attention is predicted as plain attention"
        }
    if not any(name in arguments for name in DELTA_NETS):
        return {}
    has_sizes = any(name in arguments for name in (*_VARIANTS, *_DELTA_SIZES))
    if _EVERY not in arguments or not has_sizes:
        stated = next(name for name in DELTA_NETS if name in arguments)
        return {
            "doubt.variant": f"the model may be wrong: --{stated} is only a part of what defines its layers"
        }
    # An integer counts to the attention that ends each group; a list has a 1 for every delta net
    # (megatron/core/models/gpt/experimental_attention_variant_module_specs.py).
    value = arguments[_EVERY]
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value).strip()
    if text.isdigit():
        period = WHOLE.read(text)
        attends = [(layer + 1) % period == 0 for layer in range(len(has_experts))]
    else:
        attends = [number == 0 for number in layer_list(text)]
    if len(attends) != len(has_experts):
        raise BadValue(
            f"describes {len(attends)} layers, but the model has {len(has_experts)}; got {value!r}"
        )
    by_layer = []
    for is_attention, with_experts in zip(attends, has_experts, strict=True):
        by_layer.append(("*" if is_attention else "L") + ("E" if with_experts else "-"))
    fields: Fields = {"model.mixers": _shortest_period(by_layer)}
    for name, (field, default) in _DELTA_SIZES.items():
        fields[field] = WHOLE.read(arguments.get(name, default))
    return fields


KINDS: Final = "<kinds of layers>"
"""The entry of GPT-NeoX's list of layers: kinds of attention, and how often they follow one
another."""
_FULL_ATTENTION: Final = ("global", "flash")


def listed_layers(arguments: Mapping[str, Any]) -> Fields:
    """Layers of GPT-NeoX that it lists by kind, as `[[["mamba", "flash"], 12]]`.

    The first Mamba stands alone in its layer, with the sizes of its paper
    (`megatron/model/mamba/mamba.py`); other kinds than it and full attention are a doubt.
    """
    kinds: list[str] = []
    for entry in as_list(arguments[KINDS]):
        repeated, times = entry if isinstance(entry, list) and len(entry) == 2 else (entry, 1)
        # "all" stands for as many layers as there are.
        kinds += [str(kind) for kind in as_list(repeated)] * (
            times if isinstance(times, int) else 1
        )
    unread = sorted(set(kinds) - {"mamba", *_FULL_ATTENTION})
    if unread:
        return {
            "doubt.layers": f"the model may be wrong: attention_config has layers of {', '.join(unread)}, but the "
            "prediction has attention over all tokens in their place"
        }
    if "mamba" not in kinds or "hidden-size" not in arguments:
        return {}
    hidden = WHOLE.read(arguments["hidden-size"])
    layers = ["S" if kind == "mamba" else "*-" for kind in kinds]
    missing = WHOLE.read(arguments.get("num-layers", len(layers))) // len(layers)
    return {
        "model.mixers": _shortest_period(layers * max(1, missing)),
        "model.selective_scan": SelectiveScan(
            inner=2 * hidden, state=16, step_rank=-(-hidden // 16)
        ),
    }


def _shortest_period(by_layer: Sequence[str]) -> str:
    """The shortest value of `Transformer.mixers` that describes these sub-layers of each layer."""
    layers = list(by_layer)
    periods = [n for n in range(1, len(layers) + 1) if len(layers) % n == 0]
    period = next(n for n in periods if layers == layers[:n] * (len(layers) // n))
    # The blank at the end marks a single word as one layer.
    return " ".join(layers[:period]) + " "
