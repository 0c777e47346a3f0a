"""Files of GPT-NeoX, read as arguments of Megatron-DeepSpeed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entries, Entry, Source
from perfmodel.ingest.launch._megatron_hybrids import KINDS
from perfmodel.ingest.launch._megatron_model import GATED_SIZE, OFFLOADED_WEIGHTS, PLAIN_NORMS
from perfmodel.ingest.launch._megatron_yaml import (
    argument_name,
    as_switches,
    value_with_defaults,
)
from perfmodel.ingest.launch._model import gated_width

_ONLY: Final = (
    "pipe-parallel-size",
    "no-weight-tying",
    "pos-emb",
    "gpt-j-residual",
    "attention-config",
)
_NAMES: Final = {
    "pipe-parallel-size": "pipeline-model-parallel-size",
    "train-micro-batch-size-per-gpu": "micro-batch-size",
    "train-batch-size": "global-batch-size",
    "gas": "gradient-accumulation-steps",
    "zero-optimization.stage": "zero-stage",
    "optimizer.type": "optimizer",
    "no-weight-tying": "untie-embeddings-and-output-weights",
    "pos-emb": "position-embedding-type",
    "intermediate-size": "ffn-hidden-size",
    "num-kv-heads": "num-key-value-heads",
    "moe-num-experts": "num-experts",
    "moe-top-k": "moe-router-topk",
    "moe-expert-interval": "expert-interval",
    "global-num-gpus": "num-processes",
}
"""Keys of GPT-NeoX (`configs/neox_arguments.md`), with the corresponding arguments of
Megatron-DeepSpeed."""
_NORMS: Final = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "te_rmsnorm": "RMSNorm",
    "te_layernorm": "LayerNorm",
    "non_parametric_layernorm": "LayerNorm",
}
_POSITIONS: Final = {"sinusoidal": "none", "rpe": "relative", "none": "none"}
_GATES: Final = ("swiglu", "geglu", "reglu")
_HARMLESS: Final = (
    "zero-optimization.",
    "optimizer.params.",
    "fp16.",
    "bf16.",
    "scheduler.",
    "activation",
    "mlp-type",
    "norm",
    "precision",
    "attention-config",
    "gpt-j-residual",
    "init-method",
    "output-layer-init-method",
    "steps-per-print",
    "wall-clock-breakdown",
    "rotary-pct",
    "rotary-emb-base",
    "scaled-",
    "data-types.",
    "checkpoint-num-layers",
    "synchronize-each-layer",
    "partition-activations",
    "te-",
    "use-bias-in-",
    "mlp-multiple-of",
    "rope-fusion",
    "layernorm-fusion",
    "rmsnorm-fusion",
    "gradient-clipping",
    "zero-allow-untested-optimizer",
    "keep-last-n-checkpoints",
    "checkpoint-factor",
    "checkpoint-scale",
    "extra-save-iters",
    "checkpoint.",
    "output-layer-parallelism",
)
"""Prefixes of keys that affect neither time nor memory, or that are read here."""


def neox_arguments(source: Source) -> Source | None:
    """A GPT-NeoX file's entries as arguments of Megatron-DeepSpeed; None for other files."""
    return replace(source, entries=_from_neox(source.entries)) if _is_neox(source.entries) else None


def _is_neox(entries: Entries) -> bool:
    """Whether a file is GPT-NeoX's: it has a model together with DeepSpeed's keys, or keys that
    only GPT-NeoX has."""
    names = {argument_name(key.partition(".")[0]) for key in entries}
    if "num-layers" not in names:
        return False
    return bool(names & set(_ONLY)) or bool(
        names & {"train-micro-batch-size-per-gpu", "zero-optimization"}
    )


def _from_neox(entries: Entries) -> dict[str, Entry]:
    """The entries of a file of GPT-NeoX as arguments of Megatron-DeepSpeed."""
    # GPT-NeoX is Megatron on DeepSpeed under other names. Names are translated first, then settings
    # whose values mean something else than in Megatron.
    stated = {
        key.replace("_", "-"): replace(entry, value=value_with_defaults(entry.value))
        for key, entry in entries.items()
    }
    lines = {name: entry.line for name, entry in stated.items()}
    values = {name: entry.value for name, entry in stated.items()}
    arguments: dict[str, Entry] = {"deepspeed": Entry(True, 0)}
    for name, entry in stated.items():
        if name.startswith(_HARMLESS) and name not in _NAMES:
            continue
        arguments[_NAMES.get(name, name)] = entry

    def say(name: str, value: Any, because: str) -> None:
        arguments[name] = Entry(value, lines.get(because, 0))

    # A pipeline of no stages is none; a model without any runs outside of DeepSpeed's pipeline
    # engine.
    if values.get("pipe-parallel-size") == 0:
        say("pipeline-model-parallel-size", 1, "pipe-parallel-size")
    precision = str(values.get("precision", "")).lower()
    # NeoX says the precision in a word of its own, or leaves it to DeepSpeed's tables.
    if precision in ("bfloat16", "bf16") or values.get("bf16.enabled") is True:
        say("bf16", True, "precision")
    elif precision in ("fp16", "half") or values.get("fp16.enabled") is True:
        half = "bf16" if values.get("fp16.type") == "bfloat16" else "fp16"
        say(half, True, "fp16.enabled")
    if "norm" in values:
        say("normalization", _NORMS.get(values["norm"], values["norm"]), "norm")
        if "non_parametric" in str(values["norm"]):
            say(PLAIN_NORMS, True, "norm")
    # `none` is a kind of positions here, and not a key that is left out.
    position = next(
        (str(entry.value) for key, entry in entries.items() if argument_name(key) == "pos-emb"),
        None,
    )
    if position in _POSITIONS:
        say("position-embedding-type", _POSITIONS[position], "pos-emb")
    # `[[["flash"], 32]]`: kinds of attention and on how many layers; one that is fused speaks for
    # all. Without the key it is `global`, whose scores are written to memory.
    if any("flash" in str(part) for part in _flattened(values.get("attention-config"))):
        say("use-flash-attn", True, "attention-config")
    elif values.get("te-mha") is not True:
        say("attention-backend", "unfused", "attention-config")
    if values.get("attention-config"):
        say(KINDS, values["attention-config"], "attention-config")
    # Attention and feed-forward side by side, on one norm where they share it (`gpt_j_tied`).
    if values.get("gpt-j-residual") is True:
        tied = values.get("gpt-j-tied") is True
        say("parallel-blocks", "one_norm" if tied else "two_norms", "gpt-j-residual")
    _add_offload(values, say)
    _add_transformer_engine(values, say)
    if values.get("use-bias-in-attn-linear") is False:
        say("disable-bias-linear", True, "use-bias-in-attn-linear")
    _add_gate(values, say)
    return as_switches(arguments)


def _add_offload(values: Mapping[str, Any], say: Callable[[str, Any, str], None]) -> None:
    """Add states on the host, in DeepSpeed's older or newer notation."""
    zero = "zero-optimization."
    devices = {
        key: values.get(f"{zero}{key}.device") for key in ("offload-optimizer", "offload-param")
    }
    # Only stage 3 shards weights, and can keep them elsewhere.
    on_host = values.get(f"{zero}cpu-offload-params") is True or devices["offload-param"] in (
        "cpu",
        "nvme",
    )
    if on_host and values.get(f"{zero}stage") == 3:
        say(OFFLOADED_WEIGHTS, True, f"{zero}cpu-offload-params")
    elif values.get(f"{zero}cpu-offload") is True or devices["offload-optimizer"] in (
        "cpu",
        "nvme",
    ):
        say("cpu-optimizer", True, f"{zero}cpu-offload")


_TE_LAYERS: Final = ("te-columnparallel", "te-rowparallel", "te-layernorm-mlp", "te-mha")
"""Switches for layers that Transformer Engine runs instead of GPT-NeoX."""


def _add_transformer_engine(
    values: Mapping[str, Any], say: Callable[[str, Any, str], None]
) -> None:
    """Add 8-bit products, which only Transformer Engine's layers have."""
    has_engine_layers = any(values.get(name) is True for name in _TE_LAYERS)
    if values.get("te-fp8-format") is not None and has_engine_layers:
        say("fp8-format", values["te-fp8-format"], "te-fp8-format")


def _add_gate(values: Mapping[str, Any], say: Callable[[str, Any, str], None]) -> None:
    """Add the feed-forward of LLaMA: a gate, and two thirds of the size, rounded up
    (`megatron/model/transformer.py`)."""
    activation = str(values.get("activation", "")).lower()
    gate = "swiglu" if values.get("mlp-type") == "llama" else activation
    if gate not in _GATES:
        return
    if gate == "reglu":
        say("glu-activation", "reglu", "activation")
    else:
        say(gate, True, "activation")
    hidden = values.get("hidden-size")
    if "intermediate-size" not in values and isinstance(hidden, int):
        say("ffn-hidden-size", gated_width(hidden), "activation")
    elif values.get("mlp-type") != "llama":
        # `ParallelMLP` divides a stated size by three, as if it were that of an ungated
        # feed-forward; forks and converted checkpoints take it as it stands.
        say(GATED_SIZE, values.get("intermediate-size"), "intermediate-size")


def _flattened(value: Any) -> list[Any]:
    """The values in lists of lists."""
    if not isinstance(value, list):
        return [value]
    parts: list[Any] = []
    for part in value:
        parts += _flattened(part)
    return parts
