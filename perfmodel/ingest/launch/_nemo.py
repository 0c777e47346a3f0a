"""YAML of NeMo (`megatron_gpt_config.yaml`) and of Megatron-Bridge (`ConfigContainer`):
Megatron-Core's settings under the names of its configuration classes."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._arguments import SCRIPT
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._finetuning import Adapters
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._layer_patterns import kind_by_name
from perfmodel.ingest.launch._megatron_hybrids import hybrid_fields
from perfmodel.ingest.launch._megatron_settings import (
    LIMITS,
    chunk_settings,
    context_rule,
    dispatch_rules,
    dropout_rule,
    graph_rule,
    latent_rules,
    mixture_rules,
    modules_rule,
    nodes_of,
    offloaded_layers_rule,
    partition_rule,
    pipeline_layout_rule,
    recompute_rule,
    require_no_pipeline,
    strategy_of_zero,
    zero_of,
)
from perfmodel.ingest.launch._nemo_encoders import encoder_rules
from perfmodel.ingest.launch._nemo_tuning import TUNING_RULES
from perfmodel.ingest.launch._precision_recipes import PRECISION_RULE
from perfmodel.ingest.launch._table import (
    FLAG,
    OPTIMIZER,
    SOME,
    SWITCH,
    WHOLE,
    Fields,
    Rule,
    Values,
    degree,
    key,
    read_only,
    stated_value,
    words,
)
from perfmodel.ingest.launch._tokenizers import vocabulary_rule

_PRECISIONS: Final = {
    "bf16_mixed": "bf16",
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "bf16-true": "bf16",
    "fp16_mixed": "fp16",
    "16-mixed": "fp16",
    "16": "fp16",
    16: "fp16",
    "fp16": "fp16",
    "16-true": "fp16",
    "32": "fp32",
    32: "fp32",
    "32-true": "fp32",
}
_TRUE_16_BITS: Final = ("bf16-true", "16-true")
"""Precisions of Lightning that keep weights only in 16 bits."""
_ACTIVATIONS: Final = {
    "gelu": ("gelu", False),
    "swiglu": ("silu", True),
    "fast-swiglu": ("silu", True),
    "geglu": ("gelu", True),
    "fast-geglu": ("gelu", True),
    "reglu": ("relu", True),
    "fast-reglu": ("relu", True),
    "squared-relu": ("relu2", False),
    "relu": ("relu", False),
    "silu": ("silu", False),
}
"""`activation` of NeMo 1 (nemo/collections/nlp/modules/common/megatron/mlp.py) -> function, and
whether it is gated."""
_LIMITS: Final = LIMITS | {
    "schedule": "Megatron-Core runs 1f1b, and interleaved 1f1b with vpp > 1",
    "offload": "the file has no key for all activations in host memory",
    "order": "ranks are numbered tp-cp-ep-dp-pp",
}


def _name(field: str) -> str:
    """The key of a field of Megatron-Core's configuration."""
    return f"model.{field}"


_MODEL: Final = (
    # Degrees (megatron/core/model_parallel_config.py). All of them are stated per job, and dp
    # follows from the devices.
    key("model.tensor_model_parallel_size", "tp", default=1),
    key("model.pipeline_model_parallel_size", "pp", default=1),
    key("model.context_parallel_size", "cp", default=1),
    key("model.expert_model_parallel_size", "ep", default=1),
    key("model.expert_tensor_parallel_size", "etp"),
    context_rule("model.cp_comm_type"),
    # Settings of Megatron-Core that its command line has too: one rule for both notations.
    *dispatch_rules(_name),
    graph_rule(_name),
    offloaded_layers_rule(_name, switch=True),
    key("model.sequence_parallel", "sequence_parallel", FLAG),
    partition_rule(
        ("model.num_layers_in_first_pipeline_stage", "model.num_layers_in_last_pipeline_stage"),
        "model.num_layers",
        "model.pipeline_model_parallel_size",
    ),
    pipeline_layout_rule(
        "model.pipeline_model_parallel_layout", "model.pipeline_model_parallel_size"
    ),
    # Sizes (megatron/core/transformer/transformer_config.py).
    key("model.num_layers", "model.layers"),
    key("model.hidden_size", "model.hidden"),
    key("model.num_attention_heads", "model.heads"),
    key("model.num_query_groups", "model.kv_heads"),
    key("model.ffn_hidden_size", "model.ffn_hidden"),
    key("model.kv_channels", "model.head_dim"),
    dropout_rule("model.hidden_dropout", "model.attention_dropout"),
    *mixture_rules(_name, "num_moe_experts"),
    key("model.qk_layernorm", "model.qk_norm", FLAG),
    key("model.mtp_num_layers", "model.mtp_layers", SOME),
    # NeMo 1 calls it `qkv_bias` (megatron_qwen2_config.yaml).
    key("model.add_qkv_bias", "model.qkv_bias", FLAG, also=("model.qkv_bias",)),
)
"""Rules for keys that both have: parallelism and architecture, by the names of Megatron-Core's
`TransformerConfig`."""


def _nemo_world(settings: Mapping[str, Any]) -> Fields:
    # Lightning also takes "auto" or a list of indices here, which do not state the devices of a
    # job.
    per_node = settings.get("trainer.devices")
    if not isinstance(per_node, int):
        return {}
    return {"devices": per_node * WHOLE.read(settings.get("trainer.num_nodes", 1))}


def _write_nemo_world(fields: Fields) -> Mapping[str, Any]:
    nodes, per_node = nodes_of(fields)
    return {"trainer.devices": per_node, "trainer.num_nodes": nodes}


_SHARDED_OPTIMIZERS: Final = ("distributed_fused_adam", "mcore_distributed_optim")


def _nemo_zero(settings: Mapping[str, Any]) -> Fields:
    # In NeMo 1 the name of the optimizer chooses its sharding.
    return zero_of(
        bool(settings.get("model.fsdp")),
        settings.get("model.optim.name") in _SHARDED_OPTIMIZERS,
        None,
    )


def _write_nemo_zero(fields: Fields) -> Mapping[str, Any]:
    require_no_pipeline(fields)
    if fields["zero"] in (0, 3):
        return {"model.optim.name": "fused_adam", "model.fsdp": True if fields["zero"] else None}
    return {"model.optim.name": _SHARDED_OPTIMIZERS[0] if fields["zero"] == 1 else None}


def _nemo_dtype(settings: Mapping[str, Any]) -> Fields:
    precision = settings.get("trainer.precision")
    fields: Fields = {"optimizer": "adam16bit"} if precision in _TRUE_16_BITS else {}
    # FP8 is a switch of Transformer Engine beside Lightning's precision, which stays that of all
    # other tensors.
    if settings.get("model.fp8"):
        return fields | {"dtype": "fp8"}
    return fields if precision is None else fields | {"dtype": words(_PRECISIONS).read(precision)}


def _write_nemo_dtype(fields: Fields) -> Mapping[str, Any]:
    dtype = fields.get("dtype", "")
    name = {"bf16": "bf16", "fp16": 16, "fp32": 32, "fp8": "bf16"}.get(dtype)
    return {"trainer.precision": name, "model.fp8": True if dtype == "fp8" else None}


def _activation(settings: Mapping[str, Any]) -> Fields:
    kind, gated = words(_ACTIVATIONS).read(stated_value(settings))
    return {"model.activation": kind, "model.gated_ffn": gated}


def _write_activation(fields: Fields) -> Mapping[str, Any]:
    activation = (fields.get("model.activation"), fields.get("model.gated_ffn"))
    return {"model.activation": words(_ACTIVATIONS).write(activation)}


_POSITIONS: Final = {
    "learned_absolute": "learned",
    "rope": "rope",
    "alibi": "alibi",
    "none": "none",
}


def _generation(fields: Fields, entries: Entries) -> str:
    """Framework of a configuration: NeMo 1, on Megatron-Core if it says so."""
    if "model.mcore_gpt" in entries and entries["model.mcore_gpt"].value is True:
        return "nemo@2024"
    return "nemo@2023"


_HYBRID: Final = {
    "model.hybrid_override_pattern": "hybrid-override-pattern",
    "model.ngroups_mamba": "mamba-num-groups",
    "model.num_layers": "num-layers",
    "model.hidden_size": "hidden-size",
    "model.num_attention_heads": "num-attention-heads",
}
"""Keys of NeMo's Mamba models (`megatron_mamba_config.yaml`), with Megatron's arguments for
them."""


def _hybrid(settings: Mapping[str, Any]) -> Fields:
    """Stacks of Mamba-2; without a pattern all layers are Mamba-2."""
    if not settings.keys() & {"model.hybrid_override_pattern", "model.ngroups_mamba"}:
        return {}
    arguments = {_HYBRID[name]: value for name, value in settings.items()}
    return hybrid_fields(arguments | {SCRIPT: "pretrain_mamba.py"})


NEMO: Final = LaunchFormat(
    name="nemo",
    syntax="yaml",
    frameworks=("nemo",),
    framework=_generation,
    marks=("model.encoder_seq_length", "trainer.num_nodes", "model.megatron_amp_O2"),
    table=(
        # NeMo 1 runs on Lightning, whose trainer states the devices; everything of Megatron's
        # stands under `model`.
        Rule(
            keys=("trainer.devices", "trainer.num_nodes"), read=_nemo_world, write=_write_nemo_world
        ),
        *_MODEL,
        # Batches and lengths. The pipeline's chunks are a number here, not
        # layers per chunk as on Megatron's command line.
        key("model.virtual_pipeline_model_parallel_size", "vpp", default=1),
        key("model.micro_batch_size", "micro_batch"),
        key("model.global_batch_size", "global_batch"),
        key(
            "model.encoder_seq_length",
            "seq_len",
            also=("model.seq_length", "model.data.seq_length"),
        ),
        *TUNING_RULES,
        # Data parallelism and overlap. Apex's distributed Adam and Megatron-Core's both shard
        # optimizer states.
        Rule(keys=("model.optim.name", "model.fsdp"), read=_nemo_zero, write=_write_nemo_zero),
        key("model.optim.overlap_grad_sync", "overlap_grad_reduce", FLAG),
        key("model.optim.overlap_param_sync", "overlap_param_gather", FLAG),
        key("model.ub_tp_comm_overlap", "tp_overlap", FLAG),
        # Recompute kept the names that Megatron-LM had before Core.
        recompute_rule(
            (
                "model.activations_checkpoint_granularity",
                "model.activations_checkpoint_method",
                "model.activations_checkpoint_num_layers",
            )
        ),
        # Precision and kernels.
        Rule(keys=("trainer.precision", "model.fp8"), read=_nemo_dtype, write=_write_nemo_dtype),
        key("model.use_flash_attention", "flash_attention", FLAG),
        # The model, as far as NeMo calls it otherwise than Megatron-Core does.
        Rule(keys=("model.activation",), read=_activation, write=_write_activation),
        key(
            "model.normalization",
            "model.norm",
            words({"layernorm": "layer_norm", "layernorm1p": "layer_norm", "rmsnorm": "rms_norm"}),
        ),
        key("model.position_embedding_type", "model.positions", words(_POSITIONS)),
        key("model.share_embeddings_and_output_weights", "model.tied_embeddings", FLAG),
        # Models of 2024 on Megatron-Core have its words.
        key("model.bias", "model.bias", FLAG, also=("model.add_bias_linear",)),
        read_only("model.gated_linear_unit", "model.gated_ffn", FLAG),
        Rule(keys=("name", "model.hybrid_override_pattern"), read=kind_by_name),
        Rule(keys=tuple(_HYBRID), read=_hybrid, optional=("model.hybrid_override_pattern",)),
        *encoder_rules(_ACTIVATIONS),
        vocabulary_rule(
            "model.tokenizer.vocab_size",
            ("model.override_vocab_size", "model.tokenizer.vocab_size", "model.vocab_size"),
            ("model.tokenizer.library",),
            ("model.tokenizer.type", "model.tokenizer.model", "model.tokenizer.vocab_file"),
        ),
    ),
    harmless=(
        # Names, places and logs of a run, and everything of Lightning's trainer but its devices and
        # precision.
        "name",
        "restore_from_path",
        "trainer.*",
        "exp_manager.*",
        "run.*",
        "hydra.*",
        # Numbers of initialisation, data and optimizer: they change no shape.
        "model.init_method_std",
        "model.use_scaled_init_method",
        "model.tokenizer.*",
        "model.data.*",
        "model.peft.*",
        "model.restore_from_path",
        "model.optim.*",
        "model.nsys_profile.*",
        # Constants and checkpoints of the model.
        "model.layernorm_epsilon",
        "model.resume_from_checkpoint",
        "model.max_position_embeddings",
        "model.seed",
        "model.make_vocab_size_divisible_by",
        "model.pre_process",
        "model.post_process",
        # Switches of kernels that every run of this generation has alike.
        "model.native_amp_*",
        "model.hysteresis",
        "model.megatron_amp_O2",
        "model.grad_*",
        "model.mcore_gpt",
        "model.use_cpu_initialization",
        "model.onnx_safe",
        "model.apex_*",
        "model.gradient_as_bucket_view",
        "model.apply_query_key_layer_scaling",
        "model.fp8_*",
        "model.transformer_engine",
        "model.persist_layer_norm",
        "model.rotary_*",
        "model.gc_interval",
        "model.gradient_accumulation_fusion",
        "model.transformer_block_type",
        "model.openai_gelu",
        "model.do_layer_norm*",
        "model.normalize_attention_scores",
        "model.headscale",
        "model.attention_type",
        "model.precision",
        "model.batch_p2p_comm",
        "model.bias_*_fusion",
        "model.masked_softmax_fusion",
        "model.rampup_batch_size",
    ),
    limits=_LIMITS | {"zero": "NeMo has only zero=1 (optimizer states) and zero=3 (FSDP)"},
)


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
        *_MODEL,
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
        key("model.position_embedding_type", "model.positions", words(_POSITIONS)),
        key("model.share_embeddings_and_output_weights", "model.tied_embeddings", FLAG),
        key("model.add_bias_linear", "model.bias", FLAG),
        vocabulary_rule(
            "model.vocab_size",
            ("model.vocab_size", "tokenizer.vocab_size"),
            ("tokenizer.tokenizer_type",),
            ("tokenizer.tokenizer_model", "tokenizer.hf_tokenizer_path", "tokenizer.vocab_file"),
        ),
        *latent_rules(_name),
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
    limits=_LIMITS,
)
