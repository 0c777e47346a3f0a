"""Architectures in arguments of Megatron-LM (network size arguments of `megatron/training/arguments.py`)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._megatron_settings import dropout_rule, latent_rules, mixture_rules
from perfmodel.ingest.launch._table import (
    SOME,
    SWITCH,
    TEXT,
    WHOLE,
    WHOLE_OR_NONE,
    BadValue,
    Fields,
    Rule,
    key,
    words,
    write_only,
)

TOKENIZERS: Final = {
    "GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "SentencePieceTokenizer": 32000, "Llama3Tokenizer": 128256,
    "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996,
}  # fmt: skip
"""Words that tokenizers know whose name says it."""


def _feed_forward(found: Mapping[str, Any]) -> Fields:
    gated = found.get("swiglu") is True
    says: Fields = {"model.gated_ffn": gated}
    if gated or found.get("squared-relu"):
        says["model.activation"] = "silu" if gated else "relu2"
    if "ffn-hidden-size" in found:
        says["model.ffn_hidden"] = WHOLE.read(found["ffn-hidden-size"])
    elif gated and "hidden-size" in found:
        # two thirds of four times the hidden size, in multiples of 64
        says["model.ffn_hidden"] = int(4 * WHOLE.read(found["hidden-size"]) * 2 / 3) // 64 * 64
    return says


def _write_feed_forward(fields: Fields) -> Mapping[str, Any]:
    kind = fields.get("model.activation")
    flags = {"swiglu": True if kind == "silu" else None, "squared-relu": True if kind == "relu2" else None}
    return {"ffn-hidden-size": fields.get("model.ffn_hidden")} | flags


def _heads(found: Mapping[str, Any]) -> Fields:
    if "num-query-groups" in found and found.get("group-query-attention"):
        return {"model.kv_heads": WHOLE.read(found["num-query-groups"])}
    return {}


def _write_heads(fields: Fields) -> Mapping[str, Any]:
    if fields.get("model.kv_heads") == fields.get("model.heads") or "latent.kv_lora_rank" in fields:
        return {}
    return {"group-query-attention": True, "num-query-groups": fields["model.kv_heads"]}


def _positions(found: Mapping[str, Any]) -> Fields:
    kinds = {"learned_absolute": "learned", "rope": "rope", "none": "none", "relative": "relative", "yarn": "rope"}
    if found.get("use-rotary-position-embeddings"):
        return {"model.positions": "rope"}
    return {"model.positions": words(kinds).read(found["position-embedding-type"])} if found else {}


def _write_positions(fields: Fields) -> Mapping[str, Any]:
    kind = fields.get("model.positions")
    return {"position-embedding-type": "learned_absolute" if kind == "learned" else kind}


def _vocabulary(found: Mapping[str, Any]) -> Fields:
    if "vocab-size" in found:
        return {"model.vocab": WHOLE.read(found["vocab-size"])}
    name = TEXT.read(found["tokenizer-type"])
    return {"model.vocab": TOKENIZERS[name]} if name in TOKENIZERS else {}


def _dense_layers(found: Mapping[str, Any]) -> Fields:
    """`([0]*3+[1]*58)`: the leading layers that keep a dense feed-forward."""
    text = str(found["moe-layer-freq"]).replace(" ", "").strip("()'\"")
    parts = text.split("+")
    if text == "1":
        return {"experts.first_dense_layers": 0}
    if len(parts) == 2 and parts[0].startswith("[0]*") and parts[1].startswith("[1]*"):
        return {"experts.first_dense_layers": WHOLE_OR_NONE.read(parts[0][4:])}
    raise BadValue(f"must be 1 or like ([0]*3+[1]*58), dense layers first; got {text!r}")


def _write_dense_layers(fields: Fields) -> Mapping[str, Any]:
    dense = fields.get("experts.first_dense_layers", 0)
    return {"moe-layer-freq": f"([0]*{dense}+[1]*{fields['model.layers'] - dense})"} if dense else {}


def argument(name: str) -> str:
    """The argument of a field of Megatron-Core's configuration."""
    return name.replace("_", "-")


MODEL: Final = (
    key("num-layers", "model.layers"),
    key("hidden-size", "model.hidden"),
    key("num-attention-heads", "model.heads"),
    Rule(keys=("group-query-attention", "num-query-groups"), read=_heads, write=_write_heads),
    key("kv-channels", "model.head_dim"),
    Rule(keys=("ffn-hidden-size", "swiglu", "squared-relu", "hidden-size"), read=_feed_forward,
         write=_write_feed_forward),
    key("normalization", "model.norm", words({"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"})),
    Rule(keys=("position-embedding-type", "use-rotary-position-embeddings"), read=_positions, write=_write_positions),
    key("untie-embeddings-and-output-weights", "model.tied_embeddings", words({True: False})),
    key("disable-bias-linear", "model.bias", words({True: False})),
    key("mtp-num-layers", "model.mtp_layers", SOME),
    key("add-qkv-bias", "model.qkv_bias", SWITCH),
    key("qk-layernorm", "model.qk_norm", SWITCH),
    dropout_rule("hidden-dropout", "attention-dropout"),
    Rule(keys=("vocab-size", "tokenizer-type"), read=_vocabulary,
         write=lambda fields: {"vocab-size": fields.get("model.vocab")},
         defaults={"model.vocab": 50257}),
    *mixture_rules(argument, "num_experts"),
    Rule(keys=("moe-layer-freq",), read=_dense_layers, write=_write_dense_layers),
    *latent_rules(argument),
    write_only("multi-latent-attention", lambda fields: True if "latent.kv_lora_rank" in fields else None),
)  # fmt: skip
"""Rules of all arguments that say the model."""
