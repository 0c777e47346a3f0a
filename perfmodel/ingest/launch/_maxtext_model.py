"""Models in MaxText's keys (`configs/models/*.yml` and `configs/base.yml` of
AI-Hypercomputer/maxtext)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._model import catalog_model
from perfmodel.ingest.launch._table import (
    NUMBER,
    TEXT,
    WHOLE,
    BadValue,
    Fields,
    Rule,
    Values,
    key,
    read_only,
    stated_value,
    words,
)
from perfmodel.spec import Model

_CATALOG_NAMES: Final = {
    "deepseek2-16b": "deepseek-v2-lite",
    "deepseek2-236b": "deepseek-v2",
    "deepseek3-671b": "deepseek-v3",
    "kimi-k2-1t": "kimi-k2",
    "llama3.3-70b": "llama3-70b",
    "llama4-17b-16e": "llama-4-scout",
    "llama4-17b-128e": "llama-4-maverick",
    "phi4": "phi-4",
}
"""MaxText's names of models that have another name in the catalog."""


_OVERRIDDEN: Final = (
    "base_emb_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_mlp_dim",
    "base_num_decoder_layers",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "base_moe_mlp_dim",
    "vocab_size",
)
"""Sizes that `override_model_config` takes from the command line instead of from the model that is
named."""


_LEAST_OF_ITS_OWN: Final = 3
"""Sizes that differ from those of `base.yml` in the file of a model; every file based on `base.yml`
has its sizes too."""


def _named_sizes(settings: Mapping[str, Any]) -> Fields:
    """The model that a file or a command names, and doubts about sizes beside the name."""
    name: str = TEXT.read(settings["model_name"])
    if name == "default":
        return {}
    catalog_name: str = _CATALOG_NAMES.get(name, name)
    model = catalog_model(catalog_name)
    stated = {size: settings[size] for size in _SIZES if size in settings}
    changed = [size for size, value in stated.items() if value not in (-1, 0, _SIZES[size])]
    # The file of a model that the catalog lacks names it and states all of its sizes
    # (`configs/models/olmo3_32b.yml`).
    if model is None and len(stated) == len(_SIZES) and len(changed) >= _LEAST_OF_ITS_OWN:
        return {}
    fields: Fields = {"model": catalog_name}
    if settings.get("override_model_config") is True:
        overridden = [size for size in _OVERRIDDEN if size in settings]
        if overridden:
            fields["doubt.override"] = (
                f"the model may be wrong: override_model_config changes {', '.join(overridden)} of {name}, which the "
                "prediction ignores"
            )
        return fields
    # Sizes of the named model replace those of the file (`pyconfig.py`, `update_model_vars`), which
    # nobody who writes them expects.
    contradicting = [size for size in changed if not _has_size(model, size, stated[size])]
    if model is not None and contradicting:
        fields["doubt.override"] = (
            f"the model may be wrong: the file states {', '.join(contradicting)} beside model_name {name}; MaxText takes "
            f"the sizes of {name} without override_model_config, and so does the prediction"
        )
    return fields


def _has_size(model: Model | None, size: str, value: Any) -> bool:
    """Whether a model has a size that a file states; blocks of gemma2 are two layers."""
    own = getattr(model, _FIELDS[size].removeprefix("model."), None)
    return value == own or (size == "base_num_decoder_layers" and own == 2 * value)


def _activations(settings: Mapping[str, Any]) -> Fields:
    # The first name is the gate's function, a second one (`linear`) the value that it multiplies.
    names = stated_value(settings)
    if not isinstance(names, list) or not names:
        raise BadValue(f"must be a list like [silu, linear], got {names!r}")
    # The gate of GPT-OSS is a sigmoid times its input, as SiLU is.
    kind = words({"silu": "silu", "gelu": "gelu", "relu": "relu", "sigmoid": "silu"}).read(names[0])
    return {"model.activation": kind, "model.gated_ffn": len(names) > 1}


def _write_activations(fields: Fields) -> Mapping[str, Any]:
    if "model.activation" not in fields:
        return {}
    return {
        "mlp_activations": [fields["model.activation"]] + ["linear"] * fields["model.gated_ffn"]
    }


def _size(settings: Mapping[str, Any], name: str, default: int) -> int:
    """A size that -1 or 0 leaves to its default, as `base.yml` writes it."""
    value = settings.get(name)
    return default if value in (None, -1, 0) else WHOLE.read(value)


_SIZES: Final = {
    "base_num_decoder_layers": 16,
    "base_emb_dim": 2048,
    "base_num_query_heads": 16,
    "base_num_kv_heads": 16,
    "base_mlp_dim": 7168,
    "head_dim": 128,
}
"""Sizes of the model in `base.yml`, on which every command and file is based."""
_FIELDS: Final = {
    "base_num_decoder_layers": "model.layers",
    "base_emb_dim": "model.hidden",
    "base_num_query_heads": "model.heads",
    "base_num_kv_heads": "model.kv_heads",
    "base_mlp_dim": "model.ffn_hidden",
    "head_dim": "model.head_dim",
}
_SCALE: Final = "global_parameter_scale"
_DEFAULTS: Final = {_FIELDS[name]: size for name, size in _SIZES.items()}


def _scales(scale: int) -> dict[str, int]:
    """Factors of the sizes of a model that is enlarged as a whole (`pyconfig.py`,
    `get_individual_scales`): heads and feed-forward double first, then the width, then the
    layers."""
    if scale < 1 or scale & (scale - 1):
        raise BadValue(f"must be a power of 2, got {scale!r}")
    base, remaining = divmod(scale.bit_length() - 1, 3)
    wide = 2 ** (base + (remaining > 0))
    return {
        "base_num_decoder_layers": 2**base,
        "base_emb_dim": 2 ** (base + (remaining > 1)),
        "base_num_query_heads": wide,
        "base_num_kv_heads": wide,
        "base_mlp_dim": wide,
        "base_moe_mlp_dim": wide,
    }


def _sizes(settings: Mapping[str, Any]) -> Fields:
    """Sizes of the stack; a block of gemma2 is two layers, one of attention in a window and one in
    full."""
    scale = WHOLE.read(settings.get(_SCALE, 1))
    factors = _scales(scale)
    fields: Fields = {}
    for name, field in _FIELDS.items():
        # Older files count query heads and those of keys together.
        default = settings.get("base_num_heads") if name.endswith("_heads") else None
        stated = settings.get(name, default)
        # Unstated values are those of `base.yml`, unless a scale enlarges them too.
        if stated is not None or scale > 1:
            size = _SIZES[name] if stated is None else stated
            fields[field] = factors.get(name, 1) * WHOLE.read(size)
    if settings.get("decoder_block") == "gemma2" and "model.layers" in fields:
        fields["model.layers"] *= 2
    return fields


def _old_feed_forward(settings: Mapping[str, Any]) -> Fields:
    if "base_num_heads" not in settings or "mlp_activations" in settings:
        return {}
    return {
        "doubt.feed_forward": "the model may be wrong: base_num_heads belongs to old versions of "
        "MaxText, which did not always gate feed-forwards; the prediction gates them, so state "
        "mlp_activations"
    }


def _write_sizes(fields: Fields) -> Mapping[str, Any]:
    return {name: fields.get(field) for name, field in _FIELDS.items()}


def _old_scale(settings: Mapping[str, Any]) -> Fields:
    if settings["scale"] in (0, 1):
        return {}
    return {
        "doubt.scale": f"the model may be wrong: perfmodel ignores scale {settings['scale']}, "
        "which enlarges it"
    }


_PLAIN_BLOCKS: Final = (
    "default",
    "llama2",
    "mistral",
    "mixtral",
    "gemma",
    "simple",
    "simple_mlp",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "deepseek",
)
"""Kinds of blocks that other keys describe completely."""
_WINDOW: Final = "sliding_window_size"


def _block(settings: Mapping[str, Any]) -> Fields:
    """Fields that follow from the kind of block (`layers/decoders.py` and the module of each
    kind)."""
    # Much of a model is not a key of MaxText but stands in the code of its block.
    kind = TEXT.read(settings.get("decoder_block", "llama2"))
    if kind in _PLAIN_BLOCKS:
        window = _size(settings, _WINDOW, 0)
        if window and settings.get("attention_type") == "local_sliding":
            return {"model.window": window}
        return {}
    # Norms before and after each sub-layer, and a window in every second or in five of six layers.
    if kind == "gemma2":
        return {
            "model.window": _size(settings, _WINDOW, 4096),
            "model.full_attention_every": 2,
            "model.norm_at": "both",
        }
    if kind == "gemma3":
        return {
            "model.window": _size(settings, _WINDOW, 1024),
            "model.full_attention_every": 6,
            "model.norm_at": "both",
            "model.qk_norm": True,
        }
    # MaxText/layers/gpt3.py: the only block with layer norms, learned positions and biases.
    if kind == "gpt3":
        return {"model.norm": "layer_norm", "model.positions": "learned", "model.bias": True}
    if kind == "gpt_oss":
        return {
            "model.window": _size(settings, _WINDOW, 128),
            "model.full_attention_every": _size(settings, "inhomogeneous_layer_cycle_interval", 2),
            "model.attention_sinks": True,
            "model.clamped_glu": True,
            "model.bias": True,
            "experts.router_bias": True,
        }
    # Norms behind the sub-layers, one scale for every element of queries and keys, and full
    # attention in the last layer of each cycle.
    if kind == "olmo3":
        return {
            "model.window": _size(settings, _WINDOW, 4096),
            "model.full_attention_every": _size(settings, "inhomogeneous_layer_cycle_interval", 4),
            "model.norm_at": "output",
            "model.qk_norm": True,
            "model.qk_norm_of_all_heads": True,
        }
    # Chunked attention, except in every n-th layer, which has no rotary positions either.
    if kind == "llama4":
        fields: Fields = {}
        chunk = _size(settings, "chunk_attn_window_size", 0)
        if chunk:
            fields["model.window"] = chunk
            fields["model.chunked_window"] = True
            fields["model.full_attention_every"] = _size(settings, "nope_layer_interval", 4)
        return fields
    return {
        "doubt.block": f"the model may be wrong: perfmodel does not know decoder_block {kind} and reads only its sizes"
    }


_BLOCK: Final = (
    "decoder_block",
    _WINDOW,
    "attention_type",
    "inhomogeneous_layer_cycle_interval",
    "chunk_attn_window_size",
    "nope_layer_interval",
    "trainable_position_size",
    "attention_sink",
    "mlp_bias",
    "use_post_attn_norm",
    "use_post_ffw_norm",
    "routed_bias",
    "layers_to_repeat",
    "mlp_activations_limit",
)
_LATENT_SIZES: Final = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Sizes of latent attention in `base.yml`, except the rank of queries, which is 0."""


def _latent(settings: Mapping[str, Any]) -> Fields:
    """Latent attention; its sizes are in every file based on `base.yml` but apply only if it is
    selected."""
    if settings.get("attention_type") != "mla":
        return {}
    fields: Fields = {
        f"latent.{name}": _size(settings, name, default) for name, default in _LATENT_SIZES.items()
    }
    return fields | {"latent.q_lora_rank": _size(settings, "q_lora_rank", 0)}


_EXPERT_KEYS: Final = (
    "num_experts",
    "num_experts_per_tok",
    "base_moe_mlp_dim",
    "base_moe_dim",
    "base_mlp_dim",
    "shared_experts",
    "first_num_dense_layers",
    "interleave_moe_layer_step",
    "n_routing_groups",
    "topk_routing_group",
    "global_parameter_scale",
)


def _experts(settings: Mapping[str, Any]) -> Fields:
    """A mixture of experts; one expert is a dense feed-forward."""
    count = _size(settings, "num_experts", 1)
    if count == 1:
        return {}
    fields: Fields = {
        "experts.count": count,
        "experts.topk": _size(settings, "num_experts_per_tok", 1),
    }
    # The key was renamed; without either, experts are as wide as the dense feed-forward of
    # base.yml.
    width = _size(
        settings,
        "base_moe_mlp_dim",
        _size(settings, "base_moe_dim", _size(settings, "base_mlp_dim", 7168)),
    )
    width *= _scales(WHOLE.read(settings.get(_SCALE, 1)))["base_moe_mlp_dim"]
    fields["experts.ffn_hidden"] = width
    shared = _size(settings, "shared_experts", 0)
    if shared:
        fields["experts.shared_ffn_hidden"] = shared * width
    fields["experts.first_dense_layers"] = _size(settings, "first_num_dense_layers", 0)
    fields["experts.every"] = _size(settings, "interleave_moe_layer_step", 1)
    # Only experts of the best groups are routed to (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    groups = _size(settings, "n_routing_groups", 1)
    if groups > 1:
        fields |= {
            "experts.groups": groups,
            "experts.groups_kept": _size(settings, "topk_routing_group", groups),
        }
    return fields


def _write_experts(fields: Fields) -> Mapping[str, Any]:
    written = {
        "num_experts": fields.get("experts.count"),
        "num_experts_per_tok": fields.get("experts.topk"),
        "base_moe_mlp_dim": fields.get("experts.ffn_hidden"),
        "first_num_dense_layers": fields.get("experts.first_dense_layers") or None,
    }
    period = fields.get("experts.every", 1)
    if period > 1:
        written["interleave_moe_layer_step"] = period
    return written


_CAP: Final = Values(lambda value: NUMBER.read(value) > 0)
"""A limit of logits; 0 means none."""
MODEL: Final = (
    Rule(
        keys=("model_name", "override_model_config", *_OVERRIDDEN),
        read=lambda settings: _named_sizes(settings) if "model_name" in settings else {},
    ),
    Rule(
        keys=(*_SIZES, "base_num_heads", "decoder_block", _SCALE),
        read=_sizes,
        write=_write_sizes,
        optional=("decoder_block",),
        defaults=_DEFAULTS,
        fields=("model.",),
    ),
    Rule(keys=("scale",), read=_old_scale),
    Rule(keys=("base_num_heads", "mlp_activations"), read=_old_feed_forward),
    Rule(keys=("mlp_activations",), read=_activations, write=_write_activations),
    key("vocab_size", "model.vocab", default=32000),
    key(
        "logits_via_embedding",
        "model.tied_embeddings",
        words({True: True, False: False}),
        default=False,
    ),
    key("attention_bias", "model.qkv_bias", words({True: True, False: False})),
    key("use_qk_norm", "model.qk_norm", words({True: True, False: False})),
    read_only("attn_logits_soft_cap", "model.attention_softcap", _CAP),
    read_only("final_logits_soft_cap", "model.logit_softcap", _CAP),
    Rule(keys=_EXPERT_KEYS, read=_experts, write=_write_experts),
    Rule(keys=_BLOCK, read=_block),
    Rule(keys=("attention_type", "q_lora_rank", *_LATENT_SIZES), read=_latent),
)
"""Rules for the keys of the model. If several set one field, the last one counts."""
