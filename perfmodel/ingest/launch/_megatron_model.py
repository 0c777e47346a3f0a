"""Architectures in arguments of Megatron-LM and its forks (network size arguments of
`megatron/training/arguments.py`, Megatron-DeepSpeed's `megatron/arguments.py`, MindSpeed-LLM's
`mindspeed_llm/training/arguments.py`)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._arguments import SCRIPT
from perfmodel.ingest.launch._entries import as_list
from perfmodel.ingest.launch._layer_patterns import expert_fields, expert_layers
from perfmodel.ingest.launch._megatron_hybrids import (
    DELTA_NETS,
    HYBRID,
    KINDS,
    delta_net_fields,
    hybrid_fields,
    listed_layers,
)
from perfmodel.ingest.launch._megatron_programs import PROGRAM_KEYS, kind_of_model
from perfmodel.ingest.launch._megatron_settings import dropout_rule, latent_rules, mixture_rules
from perfmodel.ingest.launch._model import LATENT_DEFAULTS
from perfmodel.ingest.launch._table import (
    NUMBER,
    PRESENT,
    SOME,
    SWITCH,
    TEXT,
    WHOLE,
    WHOLE_OR_NONE,
    BadValue,
    Fields,
    Rule,
    key,
    read_only,
    words,
)
from perfmodel.ingest.launch._tokenizers import vocabulary_rule

_GATES: Final = {
    "swiglu": "silu",
    "use-fused-swiglu": "silu",
    "quick-geglu": "silu",
    "geglu": "gelu",
}
"""Switches of gated feed-forwards and the activation of the gate; the quick GELU is a sigmoid, as
SiLU is."""
_GATES_BY_NAME: Final = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu", "liglu": "relu"}
"""Values of `--glu-activation`; `liglu`, which has no activation at all, is taken as the cheapest
one."""
_FEED_FORWARD: Final = (
    "ffn-hidden-size",
    *_GATES,
    "glu-activation",
    "squared-relu",
    "hidden-size",
    "multiple-of",
    "hidden-dim-multiplier",
)


def _feed_forward(arguments: Mapping[str, Any]) -> Fields:
    gates = [activation for name, activation in _GATES.items() if arguments.get(name) is True]
    if "glu-activation" in arguments:
        gates.append(words(_GATES_BY_NAME).read(arguments["glu-activation"]))
    fields: Fields = {"model.gated_ffn": bool(gates)}
    if gates:
        fields["model.activation"] = gates[-1]
    elif arguments.get("squared-relu"):
        fields["model.activation"] = "relu2"
    if "ffn-hidden-size" in arguments:
        fields["model.ffn_hidden"] = WHOLE.read(arguments["ffn-hidden-size"])
    elif arguments.get("swiglu") is True and "hidden-size" in arguments:
        fields["model.ffn_hidden"] = _gated_size_of(arguments)
    return fields


def _gated_size_of(arguments: Mapping[str, Any]) -> int:
    """The size of a gated feed-forward that has about as many weights as an ungated one of four
    hidden sizes: two thirds of that.

    Megatron-LM rounds it down to a multiple of 64, FlagScale's Megatron-LM up to one of
    `--multiple-of`.
    """
    size = int(4 * WHOLE.read(arguments["hidden-size"]) * 2 / 3)
    if "multiple-of" not in arguments:
        return size // 64 * 64
    multiple = WHOLE.read(arguments["multiple-of"])
    size = int(size * NUMBER.read(arguments.get("hidden-dim-multiplier", 1)))
    return -(-size // multiple) * multiple


def _write_feed_forward(fields: Fields) -> Mapping[str, Any]:
    # Megatron-LM itself has no other gates than these.
    kind = fields.get("model.activation")
    flags = {
        "swiglu": True if kind == "silu" else None,
        "squared-relu": True if kind == "relu2" else None,
    }
    return {"ffn-hidden-size": fields.get("model.ffn_hidden")} | flags


def _heads(arguments: Mapping[str, Any]) -> Fields:
    if "num-key-value-heads" in arguments:  # Megatron-DeepSpeed
        return {"model.kv_heads": WHOLE.read(arguments["num-key-value-heads"])}
    # Without the switch Megatron ignores the number of groups.
    if "num-query-groups" in arguments and arguments.get("group-query-attention"):
        return {"model.kv_heads": WHOLE.read(arguments["num-query-groups"])}
    if "num-query-groups" in arguments and "group-query-attention" not in arguments:
        groups = WHOLE.read(arguments["num-query-groups"])
        if str(groups) != str(arguments.get("num-attention-heads")):
            return {
                "note.groups": f"num-query-groups {groups} has no effect, because group-query-attention is not set"
            }
    return {}


def _write_heads(fields: Fields) -> Mapping[str, Any]:
    if fields.get("model.kv_heads") == fields.get("model.heads") or "latent.kv_lora_rank" in fields:
        return {}
    return {"group-query-attention": True, "num-query-groups": fields["model.kv_heads"]}


_POSITIONS: Final = {
    "learned_absolute": "learned",
    "absolute": "learned",
    "rope": "rope",
    "rotary": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "deepseek4": "rope",
    "none": "none",
    "relative": "relative",
    "alibi": "alibi",
}
_POSITION_SWITCHES: Final = {
    "use-rotary-position-embeddings": "rope",
    "use-alibi-position-embeddings": "alibi",
    "no-position-embedding": "none",
    "no-pos-emb": "none",
}


def _positions(arguments: Mapping[str, Any]) -> Fields:
    # The switches are older than `--position-embedding-type` and stand beside it in scripts of both
    # generations: "none" only switches the learned table off, so that a type may say more.
    kinds = [meaning for name, meaning in _POSITION_SWITCHES.items() if arguments.get(name)]
    kind = kinds[0] if kinds else None
    if "position-embedding-type" in arguments and kind in (None, "none"):
        kind = words(_POSITIONS).read(arguments["position-embedding-type"])
    if kind is None:
        return {}
    fields: Fields = {"model.positions": kind}
    if kind == "alibi":
        fields["note.positions"] = "ALiBi costs no time, because the attention kernel adds its bias"
    return fields


def _write_positions(fields: Fields) -> Mapping[str, Any]:
    kind = fields.get("model.positions")
    return {"position-embedding-type": "learned_absolute" if kind == "learned" else kind}


def _layers(arguments: Mapping[str, Any]) -> Fields:
    """Layers of the stack; MindSpeed's number includes idle layers."""
    if "num-layers" not in arguments:
        return {}
    return {
        "model.layers": WHOLE.read(arguments["num-layers"])
        - len(idle_layers(arguments.get("noop-layers")))
    }


def idle_layers(value: Any) -> set[int]:
    """Layer numbers in MindSpeed's `--noop-layers` (`61,62,63`), counted from 0."""
    parts = value if isinstance(value, list) else str(value or "").split(",")
    texts = [str(part).strip() for part in parts if str(part).strip()]
    if not all(text.isdecimal() for text in texts):
        raise BadValue(f"must be numbers of layers separated by commas, got {value!r}")
    return {int(text) for text in texts}


_OF_DEEPSPEED: Final = ("deepspeed", "deepspeed-config")
KEYS_OF_DEEPSPEED: Final = (
    *_OF_DEEPSPEED,
    "moe-expert-parallel-size",
    "expert-interval",
    "ds-sequence-parallel-size",
)
"""Arguments that only Megatron-DeepSpeed has."""
EXPERT_LAYERS: Final = (
    "moe-layer-freq",
    "first-k-dense-replace",
    "num-layers",
    "noop-layers",
    "num-experts",
    "hybrid-override-pattern",
    *KEYS_OF_DEEPSPEED,
)


def _layers_with_experts(arguments: Mapping[str, Any]) -> Fields:
    """Layers with experts, as Megatron-Core, MindSpeed or Megatron-DeepSpeed state them."""
    if "hybrid-override-pattern" in arguments or _count_experts(arguments.get("num-experts")) <= 1:
        return {}
    # Megatron-DeepSpeed has experts in every second layer by default (`--expert-interval 2`),
    # Megatron-Core in all.
    if "first-k-dense-replace" not in arguments and "moe-layer-freq" not in arguments:
        if of_deepspeed(arguments):
            return {
                "experts.first_dense_layers": 0,
                "experts.every": WHOLE.read(arguments.get("expert-interval", 2)),
            }
        return {}
    dense = _first_dense(arguments)
    frequency = arguments.get("moe-layer-freq", 1)
    if "num-layers" not in arguments:
        # The model is given elsewhere; write only settings that do not depend on its layers.
        return {"experts.first_dense_layers": dense} if str(frequency) in ("1", "-1") else {}
    return expert_fields(_has_experts(arguments))


def _first_dense(arguments: Mapping[str, Any]) -> int:
    """Layers without experts in front of the others; MindSpeed writes -1 for none of them."""
    dense = arguments.get("first-k-dense-replace", 0)
    return 0 if str(dense) == "-1" else WHOLE_OR_NONE.read(dense)


def _has_experts(arguments: Mapping[str, Any]) -> list[bool]:
    """Whether each layer that is not idle has experts, in a model with experts."""
    dense = _first_dense(arguments)
    pattern = expert_layers(arguments.get("moe-layer-freq", 1), WHOLE.read(arguments["num-layers"]))
    idle = idle_layers(arguments.get("noop-layers"))
    return [has_experts and i >= dense for i, has_experts in enumerate(pattern) if i not in idle]


def _delta_nets(arguments: Mapping[str, Any]) -> Fields:
    """Gated delta nets in place of most attentions, before a feed-forward or experts."""
    if "num-layers" not in arguments:
        return {}
    several = _count_experts(arguments.get("num-experts")) > 1
    layers = WHOLE.read(arguments["num-layers"])
    return delta_net_fields(arguments, _has_experts(arguments) if several else [False] * layers)


def of_deepspeed(arguments: Mapping[str, Any]) -> bool:
    """Whether the arguments are for Megatron-DeepSpeed."""
    return any(name in arguments for name in KEYS_OF_DEEPSPEED)


def _count_experts(value: Any) -> int:
    """Experts of a layer; if layers differ, as in Megatron-DeepSpeed, the mean of those with more
    than one."""
    counts = [WHOLE.read(number) for number in as_list(value) if number is not None]
    several = [count for count in counts if count > 1]
    return round(sum(several) / len(several)) if several else max(counts, default=0)


def _write_dense_layers(fields: Fields) -> Mapping[str, Any]:
    dense = fields.get("experts.first_dense_layers", 0)
    period = fields.get("experts.every", 1)
    if not dense and period == 1:
        return {}
    # Megatron evaluates this expression of lists: dense layers, whole groups, and dense layers that
    # fill no group.
    groups, remainder = divmod(fields["model.layers"] - dense, period)
    parts = [f"[0]*{dense}"] if dense else []
    parts.append(f"([0]*{period - 1}+[1]*1)*{groups}" if period > 1 else f"[1]*{groups}")
    if remainder:
        parts += [f"[0]*{remainder}"]
    return {"moe-layer-freq": f"({'+'.join(parts)})"}


def _experts(arguments: Mapping[str, Any]) -> Fields:
    """Number of experts, experts per token, and size of the experts that all tokens pass."""
    count = _count_experts(arguments.get("num-experts"))
    fields: Fields = {"experts.count": count} if count else {}
    if "topk" in arguments or "moe-router-topk" in arguments:
        fields["experts.topk"] = WHOLE.read(arguments.get("moe-router-topk", arguments.get("topk")))
    # Defaults of `--topk` in Megatron-DeepSpeed and `--moe-router-topk` in Megatron-Core.
    elif count > 1:
        fields["experts.topk"] = 1 if of_deepspeed(arguments) else 2
    if len(set(as_list(arguments.get("num-experts"))) - {"1"}) > 1:
        numbers = ", ".join(map(str, as_list(arguments["num-experts"])))
        fields["doubt.experts"] = (
            f"the model may be wrong: its layers have {numbers} experts, but the prediction has {count} in each"
        )
    if "moe-intermediate-size" in arguments:
        fields["experts.ffn_hidden"] = WHOLE.read(arguments["moe-intermediate-size"])
    if arguments.get("mlp-type") == "residual" and "hidden-size" in arguments:
        # Every token passes a dense feed-forward too (DeepSpeed-MoE, arXiv 2201.05596, section
        # 4.1).
        dense = arguments.get("ffn-hidden-size", 4 * WHOLE.read(arguments["hidden-size"]))
        fields["experts.shared_ffn_hidden"] = WHOLE.read(dense)
    # MindSpeed counts shared experts, which are as large as routed ones; Megatron-Core states their
    # total size.
    shared = WHOLE_OR_NONE.read(arguments.get("n-shared-experts", 0))
    if shared:
        sizes = ("moe-intermediate-size", "moe-ffn-hidden-size", "ffn-hidden-size")
        stated = [arguments[name] for name in sizes if arguments.get(name) is not None]
        if not stated:
            raise BadValue(
                f"needs the size of an expert, --moe-ffn-hidden-size; got {arguments['n-shared-experts']!r}"
            )
        fields["experts.shared_ffn_hidden"] = shared * WHOLE.read(stated[0])
    return fields


_EXPERTS: Final = (
    "num-experts",
    "topk",
    "moe-router-topk",
    "n-shared-experts",
    "moe-intermediate-size",
    "moe-ffn-hidden-size",
    "ffn-hidden-size",
    "mlp-type",
    "hidden-size",
    *KEYS_OF_DEEPSPEED,
)


def _latent(arguments: Mapping[str, Any]) -> Fields:
    """Latent attention, with Megatron-Core's default sizes."""
    is_requested = any(
        arguments.get(name) is True
        for name in ("multi-latent-attention", "multi-head-latent-attention")
    )
    if not is_requested:
        return {}
    return {f"latent.{name}": size for name, size in LATENT_DEFAULTS.items()}


def _window(arguments: Mapping[str, Any]) -> Fields:
    """Sliding-window attention of Megatron-Core (`127,0`: tokens before and after) or MindSpeed."""
    value = arguments.get("window-size", arguments.get("sliding-window"))
    if value is None:
        return {}
    parts = value if isinstance(value, list) else str(value).strip("()").split(",")
    if str(parts[0]).strip() == "-1":  # no window
        return {}
    before = WHOLE_OR_NONE.read(str(parts[0]).strip())
    # Core's pair counts the tokens beside the query's own, MindSpeed's number all of them.
    fields: Fields = {"model.window": before + 1 if "window-size" in arguments else before}
    period = arguments.get("window-attn-skip-freq")
    if period is not None and str(period).isdecimal():
        fields["model.full_attention_every"] = WHOLE.read(period)
    elif period is not None:
        raise BadValue(
            f"must be a whole number n (every n-th layer has full attention); got {period!r}"
        )
    return fields


_NORMS_BEHIND: Final = ("post-self-attn-layernorm", "post-mlp-layernorm")
"""Arguments of slime for norms behind attention and feed-forward, beside those before."""


def _norm_ends(arguments: Mapping[str, Any]) -> Fields:
    both_ends = stated(arguments, "post-norm") or all(
        stated(arguments, name) for name in _NORMS_BEHIND
    )
    return {"model.norm_at": "both"} if both_ends else {}


def stated(arguments: Mapping[str, Any], name: str) -> bool:
    """Whether an argument without a value is set."""
    return arguments.get(name) in (True, "true", "True")


def argument(name: str) -> str:
    """The command-line argument for a field of Megatron-Core's configuration."""
    return name.replace("_", "-")


PLAIN_NORMS: Final = "<norms without parameters>"
"""The entry of norms that have no parameters, for which Megatron has no argument."""
OFFLOADED_WEIGHTS: Final = "<offloaded weights>"
"""The entry of weights that DeepSpeed keeps on the host together with the optimizer's states."""
GATED_SIZE: Final = "<gated size>"
"""The entry of a feed-forward's size that versions of GPT-NeoX read differently."""


def _gated_size(arguments: Mapping[str, Any]) -> Fields:
    size = arguments[GATED_SIZE]
    return {
        "doubt.gated_size": f"the model may be wrong: intermediate_size {size} is taken as the width of the gated "
        "feed-forward, but some versions of GPT-NeoX divide it by three"
    }


NAMED_MODEL: Final = "<model>"
"""The entry of the model's own name, where a configuration of a model is named instead of its
sizes."""
_PARALLEL_BLOCKS: Final = words({"none": "none", "one_norm": "one_norm", "two_norms": "two_norms"})
_SINKS: Final = {"vanilla": False, "off-by-one": False, "learnable": True}
MODEL: Final = (
    Rule(
        keys=("num-layers", "noop-layers"),
        read=_layers,
        fields=("model.layers",),
        write=lambda fields: {"num-layers": fields.get("model.layers")},
    ),
    key("hidden-size", "model.hidden"),
    key("num-attention-heads", "model.heads"),
    Rule(
        keys=(
            "group-query-attention",
            "num-query-groups",
            "num-key-value-heads",
            "num-attention-heads",
        ),
        read=_heads,
        write=_write_heads,
    ),
    key("kv-channels", "model.head_dim"),
    Rule(keys=_FEED_FORWARD, read=_feed_forward, write=_write_feed_forward),
    key("normalization", "model.norm", words({"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"})),
    Rule(keys=("post-norm", *_NORMS_BEHIND), read=_norm_ends),
    Rule(
        keys=("position-embedding-type", *_POSITION_SWITCHES),
        read=_positions,
        write=_write_positions,
    ),
    key("untie-embeddings-and-output-weights", "model.tied_embeddings", words({True: False})),
    key("disable-bias-linear", "model.bias", words({True: False})),
    key("mtp-num-layers", "model.mtp_layers", SOME, also=("num-nextn-predict-layers",)),
    key("add-qkv-bias", "model.qkv_bias", SWITCH),
    key("qk-layernorm", "model.qk_norm", SWITCH),
    read_only("attention-output-gate", "model.attention_gate", SWITCH),
    read_only("use-gated-attention", "model.attention_gate", SWITCH),
    read_only("softmax-type", "model.attention_sinks", words(_SINKS)),
    read_only("activation-func-clamp-value", "model.clamped_glu", PRESENT),
    read_only("attn-logit-softcapping", "model.attention_softcap", PRESENT),
    read_only("output-logit-softcapping", "model.logit_softcap", PRESENT),
    Rule(keys=("window-size", "window-attn-skip-freq", "sliding-window"), read=_window),
    dropout_rule("hidden-dropout", "attention-dropout"),
    vocabulary_rule(
        "vocab-size",
        ("padded-vocab-size", "pad-vocab-size-to", "vocab-size"),
        ("tokenizer-type", "patch-tokenizer-type"),
        (
            "tokenizer-model",
            "tokenizer-name-or-path",
            "tokenizer-path",
            "hf-tokenizer-path",
            "vocab-file",
        ),
        ("vocab-extra-ids",),
    ),
    *mixture_rules(argument, "num_experts")[2:],
    Rule(
        keys=_EXPERTS,
        read=_experts,
        optional=_OF_DEEPSPEED,
        write=lambda fields: {
            "num-experts": fields.get("experts.count"),
            "moe-router-topk": fields.get("experts.topk"),
        },
    ),
    key("shared-expert-gate", "experts.shared_gate", SWITCH, also=("moe-shared-expert-gate",)),
    key("moe-latent-size", "experts.latent", SOME),
    Rule(
        keys=EXPERT_LAYERS,
        read=_layers_with_experts,
        write=_write_dense_layers,
        optional=_OF_DEEPSPEED,
    ),
    Rule(
        keys=("multi-latent-attention", "multi-head-latent-attention"),
        read=_latent,
        write=lambda fields: {
            "multi-latent-attention": True if "latent.kv_lora_rank" in fields else None
        },
    ),
    *latent_rules(argument),
    read_only("qk-nope-head-dim", "latent.qk_nope_head_dim"),
    read_only("qk-rope-head-dim", "latent.qk_rope_head_dim"),
    read_only("parallel-blocks", "model.parallel_blocks", _PARALLEL_BLOCKS),
    read_only(PLAIN_NORMS, "model.norm_parameters", words({True: False})),
    Rule(keys=(GATED_SIZE,), read=_gated_size),
    read_only(NAMED_MODEL, "model", TEXT),
    Rule(keys=PROGRAM_KEYS, read=kind_of_model, optional=(SCRIPT, "spec")),
    Rule(
        keys=(KINDS, "hidden-size", "num-layers"),
        read=lambda arguments: listed_layers(arguments) if KINDS in arguments else {},
    ),
    Rule(keys=HYBRID, read=hybrid_fields, optional=(SCRIPT, "spec")),
    Rule(keys=(*DELTA_NETS, *EXPERT_LAYERS), read=_delta_nets, optional=(*_OF_DEEPSPEED, "spec")),
)
"""Rules for all arguments of the model. If several set one field, the last one counts."""
