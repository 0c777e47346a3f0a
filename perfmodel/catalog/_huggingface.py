"""Hugging Face `config.json` files as models."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Experts, LatentAttention, Transformer

Config = Mapping[str, Any]


def read_config(path: Path) -> Transformer:
    """The model that a `config.json` describes, by its `model_type`.

    Raises:
        PerfModelError: if the file is not JSON, or a key that the family needs is missing.
        UnknownNameError: for a `model_type` of none of the supported families.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PerfModelError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise PerfModelError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise PerfModelError(f"{path}: must hold one JSON object")
    return from_config(config, where=str(path))


def from_config(config: Config, *, where: str = "config.json") -> Transformer:
    """The model that a parsed configuration describes; see `read_config`."""
    family = config.get("model_type")
    if not isinstance(family, str):
        raise PerfModelError(f"{where}: model_type: missing; it names the family")
    if family not in _FAMILIES:
        raise UnknownNameError("Hugging Face model_type", family, _FAMILIES)
    name = config.get("_name_or_path") or f"{family}-{where}"
    try:
        fields = _FAMILIES[family](config)
    except KeyError as error:
        raise PerfModelError(f"{where}: {error.args[0]}: missing, needed for model_type {family!r}") from None
    return Transformer(name=str(name), source=f"Hugging Face configuration {where}", **fields)


def _gpt2(c: Config) -> dict[str, Any]:
    h, a = c["n_embd"], c["n_head"]
    return _common(c, c["n_layer"], h, a, c.get("n_inner") or 4 * h, c.get("n_positions", 1024)) | {
        "activation": _activation(c.get("activation_function", "gelu")),
        "tied_embeddings": c.get("tie_word_embeddings", True),
        "dropout": c.get("resid_pdrop", 0.1) > 0,
    }


def _gpt_neox(c: Config) -> dict[str, Any]:
    return _llama_sizes(c) | {
        "activation": _activation(c.get("hidden_act", "gelu")),
        "positions": "rope",
        "tied_embeddings": c.get("tie_word_embeddings", False),
        "dropout": c.get("hidden_dropout", 0.0) > 0,
    }


def _gptj(c: Config) -> dict[str, Any]:
    """Its attention projections have no biases; the few that remain (feed-forward, head) are left out."""
    h, a = c["n_embd"], c["n_head"]
    return _common(c, c["n_layer"], h, a, c.get("n_inner") or 4 * h, c.get("n_positions", 2048)) | {
        "positions": "rope", "tied_embeddings": c.get("tie_word_embeddings", False), "bias": False,
        "dropout": c.get("resid_pdrop", 0.0) > 0,
    }  # fmt: skip


def _opt(c: Config) -> dict[str, Any]:
    h, a = c["hidden_size"], c["num_attention_heads"]
    sizes = _common(c, c["num_hidden_layers"], h, a, c["ffn_dim"], c.get("max_position_embeddings", 2048))
    return sizes | {
        "activation": _activation(c.get("activation_function", "relu")),
        "tied_embeddings": c.get("tie_word_embeddings", True),
        "bias": c.get("enable_bias", True),
        "dropout": c.get("dropout", 0.1) > 0,
    }


def _bloom(c: Config) -> dict[str, Any]:
    h = c.get("hidden_size") or c["n_embed"]
    a = c.get("n_head") or c["num_attention_heads"]
    layers = c.get("n_layer") or c["num_hidden_layers"]
    return _common(c, layers, h, a, 4 * h, c.get("seq_length", 2048)) | {
        "positions": "alibi", "dropout": c.get("hidden_dropout", 0.0) > 0,
    }  # fmt: skip


def _bert(c: Config) -> dict[str, Any]:
    h, a = c["hidden_size"], c["num_attention_heads"]
    sizes = _common(c, c["num_hidden_layers"], h, a, c["intermediate_size"], c.get("max_position_embeddings", 512))
    return sizes | {
        "activation": _activation(c.get("hidden_act", "gelu")),
        "causal": False,
        "token_types": c.get("type_vocab_size", 2),
        "pooler_and_mlm_head": True,
        "dropout": c.get("hidden_dropout_prob", 0.1) > 0,
    }


def _t5(c: Config) -> dict[str, Any]:
    projection = c.get("feed_forward_proj", "relu")
    return {
        "layers": c["num_layers"],
        "decoder_layers": c.get("num_decoder_layers") or c["num_layers"],
        "hidden": c["d_model"],
        "heads": c["num_heads"],
        "kv_heads": c["num_heads"],
        "head_dim": c["d_kv"],
        "ffn_hidden": c["d_ff"],
        "vocab": c["vocab_size"],
        "seq_len": c.get("n_positions", 512),
        "gated_ffn": projection.startswith("gated"),
        "activation": _activation(projection.removeprefix("gated-")),
        "norm": "rms_norm",
        "positions": "relative",
        "bias": False,
        "tied_embeddings": c.get("tie_word_embeddings", True),
        "dropout": c.get("dropout_rate", 0.1) > 0,
    }


def _llama(c: Config) -> dict[str, Any]:
    """LLaMA, Mistral: RMS norm, rotary positions, gated feed-forward, no biases."""
    return _llama_sizes(c) | {
        "activation": _activation(c.get("hidden_act", "silu")),
        "gated_ffn": True,
        "norm": "rms_norm",
        "positions": "rope",
        "bias": False,
        "qkv_bias": c.get("attention_bias", False),
        "dropout": False,
        "tied_embeddings": c.get("tie_word_embeddings", False),
        "window": (c.get("sliding_window") or 0) if c.get("use_sliding_window", True) else 0,
    }


def _qwen2(c: Config) -> dict[str, Any]:
    return _llama({"use_sliding_window": False} | dict(c)) | {"qkv_bias": True}


def _qwen3(c: Config) -> dict[str, Any]:
    return _llama({"use_sliding_window": False} | dict(c)) | {"qk_norm": True}


def _mixtral(c: Config) -> dict[str, Any]:
    experts = Experts(count=c["num_local_experts"], topk=c["num_experts_per_tok"], ffn_hidden=c["intermediate_size"])
    return _llama(c) | {"experts": experts}


def _qwen3_moe(c: Config) -> dict[str, Any]:
    experts = Experts(count=c["num_experts"], topk=c["num_experts_per_tok"], ffn_hidden=c["moe_intermediate_size"])
    return _qwen3(c) | {"experts": experts}


def _gpt_oss(c: Config) -> dict[str, Any]:
    """Attention sinks are left out; every second layer attends in full."""
    experts = Experts(count=c["num_local_experts"], topk=c["num_experts_per_tok"], ffn_hidden=c["intermediate_size"])
    return _llama(c) | {"experts": experts, "bias": True, "full_attention_every": 2}


def _qwen2_moe(c: Config) -> dict[str, Any]:
    experts = Experts(
        count=c["num_experts"], topk=c["num_experts_per_tok"], ffn_hidden=c["moe_intermediate_size"],
        shared_ffn_hidden=c.get("shared_expert_intermediate_size", 0),
    )  # fmt: skip
    return _qwen2(c) | {"experts": experts}


def _deepseek(c: Config) -> dict[str, Any]:
    """DeepSeek-V2 and V3: multi-head latent attention and mixture of experts."""
    latent = LatentAttention(
        q_lora_rank=c.get("q_lora_rank") or 0,
        kv_lora_rank=c["kv_lora_rank"],
        qk_nope_head_dim=c["qk_nope_head_dim"],
        qk_rope_head_dim=c["qk_rope_head_dim"],
        v_head_dim=c["v_head_dim"],
    )
    width = c["moe_intermediate_size"]
    experts = Experts(
        count=c["n_routed_experts"],
        topk=c["num_experts_per_tok"],
        ffn_hidden=width,
        shared_ffn_hidden=width * (c.get("n_shared_experts") or 0),
        first_dense_layers=c.get("first_k_dense_replace", 0),
    )
    sizes = {"head_dim": c["v_head_dim"], "num_key_value_heads": c["num_attention_heads"]}
    return _llama(dict(c) | sizes) | {"latent_attention": latent, "experts": experts}


def _mpt(c: Config) -> dict[str, Any]:
    h = c["d_model"]
    attention = c.get("attn_config") or {}
    a = c["n_heads"]
    sizes = _common(c, c["n_layers"], h, a, c.get("expansion_ratio", 4) * h, c.get("max_seq_len", 2048))
    return sizes | {
        "kv_heads": attention.get("kv_n_heads") or (1 if attention.get("attn_type") == "multiquery_attention" else a),
        "positions": "alibi" if attention.get("alibi") else "rope" if attention.get("rope") else "learned",
        "bias": not c.get("no_bias", False),
        "dropout": c.get("resid_pdrop", 0.0) > 0,
    }  # fmt: skip


def _falcon(c: Config) -> dict[str, Any]:
    h, a = c["hidden_size"], c["num_attention_heads"]
    kv = c.get("num_kv_heads") or a
    if not c.get("new_decoder_architecture", False):
        kv = 1 if c.get("multi_query", True) else a
    sizes = _common(c, c["num_hidden_layers"], h, a, c.get("ffn_hidden_size") or 4 * h, 2048)
    return sizes | {
        "kv_heads": kv, "positions": "alibi" if c.get("alibi") else "rope", "bias": c.get("bias", False),
        "dropout": c.get("hidden_dropout", 0.0) > 0,
    }  # fmt: skip


_FAMILIES: Mapping[str, Callable[[Config], dict[str, Any]]] = {
    "gpt2": _gpt2, "gpt_neox": _gpt_neox, "gptj": _gptj, "opt": _opt, "bloom": _bloom, "bert": _bert, "t5": _t5,
    "mt5": _t5, "llama": _llama, "mistral": _llama, "mixtral": _mixtral, "qwen2": _qwen2, "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3, "qwen3_moe": _qwen3_moe, "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "mpt": _mpt,
    "gpt_oss": _gpt_oss, "falcon": _falcon,
}  # fmt: skip


def _common(c: Config, layers: int, hidden: int, heads: int, ffn: int, seq_len: int) -> dict[str, Any]:
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": hidden // heads,
        "ffn_hidden": ffn, "vocab": c["vocab_size"], "seq_len": seq_len,
    }  # fmt: skip


def _llama_sizes(c: Config) -> dict[str, Any]:
    h, a = c["hidden_size"], c["num_attention_heads"]
    sizes = _common(c, c["num_hidden_layers"], h, a, c["intermediate_size"], c.get("max_position_embeddings", 2048))
    return sizes | {
        "kv_heads": c.get("num_key_value_heads") or a,
        "head_dim": c.get("head_dim") or h // a,
    }


def _activation(name: str) -> str:
    for known in ("gelu", "silu", "relu"):
        if known in name or (known == "silu" and name == "swish"):
            return known
    raise PerfModelError(f"activation {name!r} is not known; known: gelu, silu, relu")
