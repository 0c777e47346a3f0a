"""nanotron's YAML (`nanotron/config/config.py`, `docs/` of huggingface/nanotron)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._layer_patterns import expert_fields
from perfmodel.ingest.launch._model import LLAMA_LAYERS
from perfmodel.ingest.launch._table import (
    FLAG,
    OPTIMIZER,
    WHOLE,
    WHOLE_OR_NONE,
    Fields,
    Rule,
    accumulated,
    key,
    read_only,
    words,
)

_CONFIG: Final = "model.model_config."
_MIXTURE: Final = "model.model_config.moe_config."
_EXPERT_AXIS: Final = "parallelism.expert_parallel_size"


def _accumulation(fields: Fields) -> Mapping[str, Any]:
    passes = accumulated(fields, "nanotron states micro-batches per replica")
    return {"tokens.batch_accumulation_per_replica": passes}


def _replicas(settings: Mapping[str, Any]) -> Fields:
    """Replicas: experts have a separate axis of the mesh (`nanotron/parallel/context.py`), so that
    the world is dp * tp
    * pp * ep, and for other layers the ranks of that axis are replicas."""
    experts = WHOLE.read(settings.get(_EXPERT_AXIS, 1))
    fields: Fields = {"ep": experts}
    if "parallelism.dp" in settings:
        fields["dp"] = WHOLE.read(settings["parallelism.dp"]) * experts
    # With ALL_REDUCE every rank of tensor parallelism holds all tokens, and layouts dispatch shards
    # of them to experts.
    whole_inputs = settings.get("parallelism.tp_mode") == "ALL_REDUCE"
    if experts > 1 and whole_inputs and WHOLE.read(settings.get("parallelism.tp", 1)) > 1:
        fields["sequence_parallel"] = True
        fields["note.experts"] = (
            "experts with tp_mode ALL_REDUCE are predicted as with REDUCE_SCATTER"
        )
    return fields


def _write_replicas(fields: Fields) -> Mapping[str, Any]:
    if fields["dp"] % fields["ep"]:
        raise LaunchFileError(
            f"ep={fields['ep']}: nanotron spreads experts over replicas; use an ep that divides dp"
        )
    if fields["ep"] > 1 and fields["tp"] > 1 and not fields["sequence_parallel"]:
        raise LaunchFileError(
            "sequence_parallel=false: with ep > 1 and tp > 1 every rank would send the same tokens; use "
            "sequence_parallel=true"
        )
    values = {"parallelism.dp": fields["dp"] // fields["ep"]}
    return values | ({_EXPERT_AXIS: fields["ep"]} if fields["ep"] > 1 else {})


def _zero(fields: Fields) -> Mapping[str, Any]:
    if fields["zero"] > 1:
        raise LaunchFileError(
            f"zero={fields['zero']}: nanotron shards optimizer states only; use zero=0 or 1"
        )
    return {"optimizer.zero_stage": fields["zero"]}


_HAS_SHARED_EXPERT: Final = f"{_MIXTURE}enable_shared_expert"
_SHARED: Final = (
    _HAS_SHARED_EXPERT,
    f"{_MIXTURE}shared_expert_intermediate_size",
    f"{_CONFIG}intermediate_size",
)


def _shared_expert(settings: Mapping[str, Any]) -> Fields:
    """An expert that all tokens pass, behind a gate (`src/nanotron/nn/moe.py` `Qwen2MoELayer`)."""
    if settings.get(_HAS_SHARED_EXPERT) is not True:
        return {}
    stated = [settings[name] for name in _SHARED[1:] if settings.get(name) is not None]
    if not stated:
        return {
            "doubt.experts": "the model may be wrong: enable_shared_expert states no size, so no "
            "shared expert is predicted"
        }
    return {"experts.shared_ffn_hidden": WHOLE.read(stated[0]), "experts.shared_gate": True}


_LAYERS_WITH_EXPERTS: Final = f"{_MIXTURE}layers"
_LAYER_COUNT: Final = f"{_CONFIG}num_hidden_layers"
_EXPERT_LAYERS: Final = (_LAYERS_WITH_EXPERTS, _LAYER_COUNT)


def _layers_with_experts(settings: Mapping[str, Any]) -> Fields:
    """Numbers of the layers that have experts; -1 stands for all of them."""
    listed = settings.get(_LAYERS_WITH_EXPERTS)
    if not isinstance(listed, list) or -1 in listed or _LAYER_COUNT not in settings:
        return {}
    return expert_fields([layer in listed for layer in range(WHOLE.read(settings[_LAYER_COUNT]))])


_IS_STARCODER: Final = f"{_CONFIG}is_starcoder2_config"
_HIDDEN: Final = f"{_CONFIG}hidden_size"
_INNER: Final = f"{_CONFIG}intermediate_size"
_HAS_GROUPS: Final = f"{_CONFIG}grouped_query"
_KV_HEADS: Final = f"{_CONFIG}num_kv_heads"
_STARCODER: Final = (
    _IS_STARCODER,
    _HIDDEN,
    _INNER,
    _HAS_GROUPS,
    _KV_HEADS,
)


def _starcoder(settings: Mapping[str, Any]) -> Fields:
    """Starcoder2's layers (`Starcoder2Config`): GELU without a gate, layer norms, biases, and few
    heads of keys."""
    if settings.get(_IS_STARCODER) is not True:
        return {}
    has_groups = settings.get(_HAS_GROUPS) is True
    fields: Fields = {
        "model.gated_ffn": False,
        "model.activation": "gelu",
        "model.norm": "layer_norm",
        "model.bias": True,
        "model.dropout": True,
        "model.kv_heads": WHOLE.read(settings[_KV_HEADS]) if has_groups else 1,
        "doubt.model": "the model may be wrong: the head of Starcoder2 is predicted with weights "
        "of its own",
    }
    if settings.get(_INNER) is None and _HIDDEN in settings:
        fields["model.ffn_hidden"] = 4 * WHOLE.read(settings[_HIDDEN])
    return fields


_ACTIVATIONS: Final = words({"silu": "silu", "gelu": "gelu", "relu": "relu"})
_IS_XGLM: Final = f"{_CONFIG}sinusoidal_position_embedding"
_ACTIVATION_NAME: Final = f"{_CONFIG}activation_function"
_EXPERTS_ARE_GATED: Final = f"{_CONFIG}moe_glu"
_XGLM: Final = (
    _IS_XGLM,
    _ACTIVATION_NAME,
    _EXPERTS_ARE_GATED,
)


def _xglm(settings: Mapping[str, Any]) -> Fields:
    """XGLM's layers of a fork: positions from a formula, layer norms, biases, and feed-forwards
    without a gate."""
    if settings.get(_IS_XGLM) is not True:
        return {}
    return {
        "model.positions": "none",
        "model.norm": "layer_norm",
        "model.bias": True,
        "model.dropout": True,
        "model.gated_ffn": FLAG.read(settings.get(_EXPERTS_ARE_GATED, False)),
        "model.activation": words({"silu": "silu", "gelu": "gelu", "relu": "relu"}).read(
            settings.get(_ACTIVATION_NAME, "gelu")
        ),
    }


NANOTRON: Final = LaunchFormat(
    name="nanotron",
    syntax="yaml",
    frameworks=("nanotron",),
    marks=("parallelism.pp_engine", "parallelism.tp_mode", "tokens.batch_accumulation_per_replica"),
    table=(
        # Degrees and schedule (src/nanotron/config/parallelism_config.py, whose "conservative
        # defaults" count where a file is silent). dp is stated, so that no file needs --devices.
        key("parallelism.tp", "tp"),
        key("parallelism.pp", "pp"),
        key("parallelism.context_parallel_size", "cp", default=1),
        key(
            "parallelism.pp_engine",
            "schedule",
            words({"1f1b": "1f1b", "afab": "gpipe"}),
            default="gpipe",
        ),
        key(
            "parallelism.tp_mode",
            "sequence_parallel",
            words({"REDUCE_SCATTER": True, "ALL_REDUCE": False}),
            default=False,
        ),
        # after the mode of tensor parallelism, which experts may change
        Rule(
            keys=("parallelism.dp", _EXPERT_AXIS, "parallelism.tp", "parallelism.tp_mode"),
            read=_replicas,
            write=_write_replicas,
        ),
        # Overlap of tensor parallelism with its products, and recompute of whole layers.
        key("parallelism.tp_linear_async_communication", "tp_overlap", FLAG, default=False),
        key("parallelism.recompute_layer", "recompute", words({True: "full", False: "none"})),
        # Batches: the global batch follows from micro-batch, accumulation and dp.
        key("tokens.micro_batch_size", "micro_batch"),
        key("tokens.batch_accumulation_per_replica", "grad_accum", default=1, write=_accumulation),
        key("tokens.sequence_length", "seq_len"),
        # Optimizer states and their sharding.
        key("optimizer.zero_stage", "zero", WHOLE_OR_NONE, write=_zero),
        read_only("optimizer.optimizer_factory.name", "optimizer", OPTIMIZER),
        key(
            "optimizer.accumulate_grad_in_fp32", "grad_dtype", words({True: "fp32", False: "bf16"})
        ),
        key(
            "model.dtype",
            "dtype",
            words(
                {
                    "bfloat16": "bf16",
                    "float16": "fp16",
                    "float32": "fp32",
                    "fp8": "fp8",
                    "float8": "fp8",
                }
            ),
            default="bf16",
        ),
        # LLaMA's sizes under Hugging Face's names (src/nanotron/config/models_config.py).
        key(f"{_CONFIG}num_hidden_layers", "model.layers"),
        key(f"{_CONFIG}hidden_size", "model.hidden"),
        key(f"{_CONFIG}intermediate_size", "model.ffn_hidden"),
        key(f"{_CONFIG}num_attention_heads", "model.heads"),
        key(f"{_CONFIG}num_key_value_heads", "model.kv_heads"),
        key(f"{_CONFIG}vocab_size", "model.vocab"),
        key(f"{_CONFIG}max_position_embeddings", "model.seq_len"),
        key(f"{_CONFIG}tie_word_embeddings", "model.tied_embeddings", FLAG, default=False),
        read_only(f"{_CONFIG}head_dim", "model.head_dim"),
        read_only(f"{_CONFIG}use_qk_norm", "model.qk_norm", FLAG),
        key(f"{_CONFIG}attention_bias", "model.qkv_bias", FLAG),
        key(f"{_CONFIG}hidden_act", "model.activation", _ACTIVATIONS),
        # forks of 2024 have them beside the other sizes
        key(
            f"{_MIXTURE}num_experts",
            "experts.count",
            also=(f"{_CONFIG}moe_num_experts", f"{_CONFIG}num_experts"),
        ),
        key(
            f"{_MIXTURE}top_k",
            "experts.topk",
            also=(f"{_CONFIG}num_experts_per_tok", f"{_CONFIG}num_experts_per_token"),
        ),
        key(f"{_MIXTURE}moe_intermediate_size", "experts.ffn_hidden"),
        Rule(keys=_SHARED, read=_shared_expert),
        Rule(keys=_EXPERT_LAYERS, read=_layers_with_experts),
        Rule(keys=_STARCODER, read=_starcoder),
        Rule(keys=_XGLM, read=_xglm),
        read_only(f"{_CONFIG}sliding_window_size", "model.window"),
    ),
    always=LLAMA_LAYERS,
    harmless=(
        # Tables without settings of a step.
        "checkpoints.*",
        "data_stages",
        "data_stages.*",
        "data.*",
        "general.*",
        "lighteval",
        "lighteval.*",
        "logging.*",
        "metrics_logging",
        "metrics_logging.*",
        "optimizer.*",
        "profiler",
        "profiler.*",
        "tokenizer.*",
        "s3_upload",
        # Lengths of the run, and constants of the model.
        "tokens.train_steps",
        "tokens.val_check_interval",
        "tokens.limit_*",
        "model.init_method.*",
        "model.ddp_bucket_cap_mb",
        "model.make_vocab_size_divisible_by",
        "model.model_config.bos_token_id",
        "model.model_config.eos_token_id",
        "model.model_config.pad_token_id",
        "model.model_config.initializer_range",
        "model.model_config.is_*_config",
        "model.model_config.rms_norm_eps",
        "model.model_config.rope_*",
        "model.model_config.use_cache",
        "model.model_config.pretraining_tp",
        "model.model_config.flex_attention_mask",
        "model.model_config.log_attn_probs",
        "model.model_config.attention_dropout",
        "model.model_config.moe_config.token_dispatcher_type",
        "model.model_config.z_loss_*",
        "parallelism.moe_layer_recompute",
        "parallelism.tp_recompute_allgather",
        "model.model_config._*",
    ),
    limits={
        "vpp": "it has no virtual stages",
        "schedule": "its engines are 1f1b and afab (gpipe)",
        "recompute": "it recomputes whole layers or none",
        "recompute_full_layers": "it recomputes all layers in the same way",
        "overlap_grad_reduce": "it always overlaps gradient reductions with the backward pass",
        "overlap_param_gather": "it always overlaps weight gathers with the step",
        "partition": "it balances the stages itself",
        "offload": "it has no key for activations in host memory",
        "order": "its ranks are numbered tp, cp, dp, pp",
    },
)
