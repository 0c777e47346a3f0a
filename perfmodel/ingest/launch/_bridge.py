"""YAML of Megatron-Bridge (`ConfigContainer`)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._finetuning import Adapters
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._megatron_config import (
    CONFIG_LIMITS,
    MODEL_RULES,
    POSITIONS,
    model_key,
)
from perfmodel.ingest.launch._megatron_settings import (
    chunk_settings,
    latent_rules,
    modules_rule,
    recompute_rule,
    require_no_pipeline,
    strategy_of_zero,
    zero_of,
)
from perfmodel.ingest.launch._precision_recipes import PRECISION_RULE
from perfmodel.ingest.launch._table import (
    FLAG,
    OPTIMIZER,
    SWITCH,
    Fields,
    Rule,
    Values,
    degree,
    key,
    words,
)
from perfmodel.ingest.launch._tokenizers import vocabulary_rule


def _bridge_zero(settings: Mapping[str, Any]) -> Fields:
    sharded = any(
        settings.get(name) for name in ("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp")
    )
    # PyTorch's own FSDP goes before Megatron's settings, which it does not look at.
    if settings.get("dist.use_torch_fsdp2"):
        return {"zero": 3}
    # The setting stands twice, and Megatron-Bridge syncs one to the other; its
    # recipes shard optimizer states by default.
    by_optimizer = settings.get("optimizer.use_distributed_optimizer", True)
    distributed = settings.get("ddp.use_distributed_optimizer", by_optimizer)
    return zero_of(sharded, bool(distributed), settings.get("ddp.data_parallel_sharding_strategy"))


def _write_bridge_zero(fields: Fields) -> Mapping[str, Any]:
    require_no_pipeline(fields)
    settings: dict[str, Any] = {"ddp.use_distributed_optimizer": fields["zero"] >= 1}
    if fields["zero"] >= 2:
        settings["dist.use_megatron_fsdp"] = True
        settings["ddp.data_parallel_sharding_strategy"] = strategy_of_zero(fields["zero"])
    return settings


def _bridge_chunks(fields: Fields) -> Mapping[str, Any]:
    # Here the key is the number of chunks in either case.
    layers, chunks = chunk_settings(fields)
    return {"model.virtual_pipeline_model_parallel_size": fields["vpp"] if layers else chunks}


_PEFT: Final = ("peft.dim", "peft.target_modules", "peft.dropout", "peft.alpha")


def _bridge_adapters(settings: Mapping[str, Any]) -> Fields:
    """LoRA of `megatron/bridge/peft/lora.py`, on all products of attention and feed-forward unless
    some are named."""
    return Adapters(
        rank=settings.get("peft.dim", 32),
        targets=settings.get(
            "peft.target_modules", ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
        ),
        dropout=settings.get("peft.dropout"),
    ).fields


_BRIDGE_ACTIVATIONS: Final = {
    "silu": "silu",
    "gelu": "gelu",
    "quick_gelu": "gelu",
    "fast_gelu": "gelu",
    "squared_relu": "relu2",
    "relu": "relu",
}


def _read_function(value: Any) -> Any:
    return words(_BRIDGE_ACTIVATIONS).read(str(value).rpartition(".")[2])


def _write_function(kind: Any) -> str | None:
    name = words(_BRIDGE_ACTIVATIONS).write(kind)
    return name and f"torch.nn.functional.{name}"


_FUNCTION: Final = Values(_read_function, _write_function)
"""An activation by the name of the function (`torch.nn.functional.silu`)."""
BRIDGE: Final = LaunchFormat(
    name="megatron-bridge",
    syntax="yaml",
    frameworks=("megatron-bridge", "megatron-core"),
    marks=(
        "train.global_batch_size",
        "train.micro_batch_size",
        "train.train_iters",
        "ddp.*",
        "dist.use_megatron_fsdp",
    ),
    table=(
        *MODEL_RULES,
        # `train` holds the batches, `dataset` may repeat the length of the sequences.
        key("model.virtual_pipeline_model_parallel_size", "vpp", default=1, write=_bridge_chunks),
        key("train.micro_batch_size", "micro_batch"),
        key("train.global_batch_size", "global_batch"),
        key("model.seq_length", "seq_len", also=("dataset.sequence_length", "dataset.seq_length")),
        Rule(
            keys=(
                "ddp.use_distributed_optimizer",
                "optimizer.use_distributed_optimizer",
                "dist.use_megatron_fsdp",
                "ddp.use_megatron_fsdp",
                "dist.use_torch_fsdp2",
                "ddp.data_parallel_sharding_strategy",
            ),
            read=_bridge_zero,
            write=_write_bridge_zero,
        ),
        # Overlap is asked of the data parallelism (`ddp`), or of `comm_overlap`, which sets it
        # there and in the model (src/megatron/bridge/training/comm_overlap.py).
        key("ddp.overlap_grad_reduce", "overlap_grad_reduce", FLAG),
        key(
            "ddp.overlap_param_gather",
            "overlap_param_gather",
            FLAG,
            also=("comm_overlap.overlap_param_gather",),
        ),
        degree("ddp.num_distributed_optimizer_instances", "replicate"),
        key("comm_overlap.tp_comm_overlap", "tp_overlap", FLAG, also=("model.tp_comm_overlap",)),
        key(
            "comm_overlap.overlap_moe_expert_parallel_comm",
            "ep_overlap",
            SWITCH,
            also=("model.overlap_moe_expert_parallel_comm",),
        ),
        Rule(keys=_PEFT, read=_bridge_adapters, fields=("adapter_rank",)),
        # Recompute as in Megatron-Core's configuration.
        recompute_rule(
            ("model.recompute_granularity", "model.recompute_method", "model.recompute_num_layers")
        ),
        modules_rule("model.recompute_modules", list),
        key("optimizer.optimizer", "optimizer", OPTIMIZER),
        PRECISION_RULE,
        key(
            "ddp.grad_reduce_in_fp32",
            "grad_dtype",
            words({True: "fp32", False: "bf16"}),
            also=("mixed_precision.grad_reduce_in_fp32",),
        ),
        key(
            "model.attention_backend",
            "flash_attention",
            words({"auto": True, "flash": True, "fused": True, "unfused": False, "local": False}),
        ),
        # The model: functions are named where Megatron's command line has a flag for each kind.
        key("model.gated_linear_unit", "model.gated_ffn", FLAG),
        key("model.activation_func", "model.activation", _FUNCTION),
        key("model.activation_func_fp8_input_store", "fp8_activation_inputs", FLAG),
        key("model.use_transformer_engine_op_fuser", "operation_fuser", FLAG),
        key(
            "model.normalization",
            "model.norm",
            words({"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}),
        ),
        key("model.position_embedding_type", "model.positions", words(POSITIONS)),
        key("model.share_embeddings_and_output_weights", "model.tied_embeddings", FLAG),
        key("model.add_bias_linear", "model.bias", FLAG),
        vocabulary_rule(
            "model.vocab_size",
            ("model.vocab_size", "tokenizer.vocab_size"),
            ("tokenizer.tokenizer_type",),
            ("tokenizer.tokenizer_model", "tokenizer.hf_tokenizer_path", "tokenizer.vocab_file"),
        ),
        *latent_rules(model_key),
    ),
    harmless=(
        # Tables without settings of a step: seeds, learning rates, data, logs, checkpoints, health
        # of nodes.
        "rng.*",
        "train.*",
        "scheduler.*",
        "optimizer.*",
        "dataset.*",
        "logger.*",
        "checkpoint.*",
        "tokenizer.*",
        "profiling.*",
        "validation.*",
        "rerun_state_machine.*",
        "straggler.*",
        "nvrx_straggler.*",
        "ft.*",
        "dist.*",
        "inprocess_restart.*",
        # Checks and buckets of gradients, which overlap in either case.
        "ddp.check_for_*",
        "ddp.average_in_collective",
        "ddp.bucket_size",
        "*_target_",
        "model.rotary_*",
        "model.layernorm_epsilon",
        "model.init_method*",
        "model.make_vocab_size_divisible_by",
        "model.init_model_with_meta_device",
        "model.seq_len_interpolation_factor",
        "model.masked_softmax_fusion",
        "model.bias_*_fusion",
        "model.gradient_accumulation_fusion",
        "model.apply_rope_fusion",
        "model.deallocate_*",
        "model.*_dtype",
        "model.should_pad_vocab",
        "model.moe_router_*",
        "model.moe_aux_loss_coeff",
        "mixed_precision.*",
        "model.cross_entropy_*",
        "model.bf16",
        "model.fp16",
    ),
    limits=CONFIG_LIMITS,
)
