"""YAML of NeMo 1 (`megatron_gpt_config.yaml`)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._arguments import SCRIPT
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._layer_patterns import kind_by_name
from perfmodel.ingest.launch._megatron_config import CONFIG_LIMITS, MODEL_RULES, POSITIONS
from perfmodel.ingest.launch._megatron_hybrids import hybrid_fields
from perfmodel.ingest.launch._megatron_settings import (
    nodes_of,
    recompute_rule,
    require_no_pipeline,
    zero_of,
)
from perfmodel.ingest.launch._nemo_encoders import encoder_rules
from perfmodel.ingest.launch._nemo_tuning import TUNING_RULES
from perfmodel.ingest.launch._table import (
    FLAG,
    WHOLE,
    Fields,
    Rule,
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
    # x * sigmoid(1.702 x), which costs as much as the exact function.
    "quick-gelu": ("gelu", False),
    "quick-geglu": ("gelu", True),
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


_STRATEGIES: Final = {"full": 3, "hybrid": 3, "grad": 2}
"""Strategies of NeMo's FSDP (documentation, parallelisms: `fsdp_sharding_strategy`) -> ZeRO
stage."""
_ZERO: Final = ("model.optim.name", "model.fsdp", "model.fsdp_sharding_strategy")


def _nemo_zero(settings: Mapping[str, Any]) -> Fields:
    # Without FSDP its strategy means nothing.
    optimizer, sharded, strategy = (settings.get(name) for name in _ZERO)
    if optimizer is None and sharded is None:
        return {}
    if sharded and strategy is not None:
        fields: Fields = {"zero": words(_STRATEGIES).read(strategy)}
        return fields | ({"shard_ranks": "node"} if strategy == "hybrid" else {})
    # In NeMo 1 the name of the optimizer chooses its sharding.
    return zero_of(bool(sharded), optimizer in _SHARDED_OPTIMIZERS, None)


def _write_nemo_zero(fields: Fields) -> Mapping[str, Any]:
    require_no_pipeline(fields)
    if fields["zero"] == 1:
        return {"model.optim.name": _SHARDED_OPTIMIZERS[0]}
    values: dict[str, Any] = {"model.optim.name": "fused_adam"}
    if fields["zero"] > 1:
        values["model.fsdp"] = True
        # Left out, NeMo shards everything.
        values["model.fsdp_sharding_strategy"] = "grad" if fields["zero"] == 2 else None
    else:
        values["model.fsdp"] = None
    return values


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
        *MODEL_RULES,
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
        Rule(keys=_ZERO, read=_nemo_zero, write=_write_nemo_zero),
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
        key("model.position_embedding_type", "model.positions", words(POSITIONS)),
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
    limits=CONFIG_LIMITS,
)
