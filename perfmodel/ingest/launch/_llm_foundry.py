"""llm-foundry's YAML (`scripts/train/yamls` of mosaicml/llm-foundry; FSDP settings of Composer)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._adapters import adapter_modules, peft_fields
from perfmodel.ingest.launch._entries import as_list
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._table import (
    FLAG,
    NUMBER,
    OPTIMIZER,
    TEXT,
    WHOLE,
    BadValue,
    Fields,
    Rule,
    key,
    read_only,
    stated_value,
    words,
)

STRATEGIES: Final = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "_HYBRID_SHARD_ZERO2": 2,
}
"""ZeRO stages by torch's names of sharding strategies."""
_NAMED: Final = ("model.pretrained_model_name_or_path", "model.pretrained_model_name")
"""Keys that name a model of Hugging Face, the second for BERT."""
_BUILT_BY_SIZES: Final = (
    "mpt_causal_lm",
    "hf_causal_lm",
    "hf_prefix_lm",
    "hf_t5",
    "fmapi_causal_lm",
    "openai_causal_lm",
)
"""Words of `model.name` that are no name of a model: of programs, and of MPT, whose sizes other
keys state."""
_ATTENTION: Final = {"flash": True, "triton": True, "flex": True, "torch": False}


def _model(settings: Mapping[str, Any]) -> Fields:
    """MPT's own sizes, or a model of Hugging Face by name."""
    kind = settings.get("model.name", "mpt_causal_lm")
    names = [name for name in _NAMED if name in settings]
    if kind != "mpt_causal_lm" and names:
        return {"model": TEXT.read(settings[names[0]])}
    # Forks register models under names of their own, which the catalog has or a user looks for.
    if kind not in _BUILT_BY_SIZES:
        return {"model": TEXT.read(kind)}
    # Without its three sizes a model of MPT has none of the others either.
    sizes = ("model.n_layers", "model.d_model", "model.n_heads")
    if not all(name in settings for name in sizes):
        return {}
    layers, hidden, heads = (WHOLE.read(settings[name]) for name in sizes)
    fields: Fields = {
        "model.layers": layers,
        "model.hidden": hidden,
        "model.heads": heads,
        "model.dropout": False,
    }
    fields["model.ffn_hidden"] = round(
        hidden * NUMBER.read(settings.get("model.expansion_ratio", 4))
    )
    # MPT's positions are learned unless a switch says otherwise, and ALiBi counts more than rotary
    # ones.
    if settings.get("model.attn_config.alibi"):
        fields["model.positions"] = "alibi"
    elif settings.get("model.attn_config.rope"):
        fields["model.positions"] = "rope"
    elif settings.get("model.learned_pos_emb") is False:
        fields["model.positions"] = "none"
    kv_heads = settings.get("model.attn_config.kv_n_heads")
    if (
        kv_heads is not None
        or settings.get("model.attn_config.attn_type") == "multiquery_attention"
    ):
        fields["model.kv_heads"] = WHOLE.read(kv_heads or 1)
    fields["model.bias"] = not settings.get("model.no_bias", False)
    fields["model.tied_embeddings"] = FLAG.read(settings.get("model.tie_word_embeddings", True))
    if "rms" in str(settings.get("model.norm_type", "")):
        fields["model.norm"] = "rms_norm"
    attention = settings.get("model.attn_config.attn_type", _KINDS_OF_ATTENTION[0])
    if attention not in _KINDS_OF_ATTENTION:
        fields["doubt.attention"] = (
            f"the model may be wrong: attn_type {attention} is predicted as plain attention"
        )
    window = settings.get("model.attn_config.sliding_window_size", -1)
    if window != -1:
        fields["model.window"] = WHOLE.read(window)
    function = settings.get("model.ffn_config.ffn_act_fn.name", "gelu")
    fields["model.activation"] = words(_ACTIVATIONS).read(function)
    ffn_hidden = settings.get("model.ffn_config.ffn_hidden_size")
    if ffn_hidden is not None:
        fields["model.ffn_hidden"] = WHOLE.read(ffn_hidden)
    # `expansion_ratio` is the older notation; a stated size replaces it.
    kind = settings.get("model.ffn_config.ffn_type", "mptmlp")
    if kind in _MIXTURES:
        fields["experts.count"] = WHOLE.read(settings.get("model.ffn_config.moe_num_experts", 1))
        fields["experts.topk"] = WHOLE.read(settings.get("model.ffn_config.moe_top_k", 1))
        fields["experts.ffn_hidden"] = fields["model.ffn_hidden"]
    fields["model.gated_ffn"] = kind in _GATED or bool(
        settings.get("model.ffn_config.mlp_type") == "glu"
    )
    return fields


_ACTIVATIONS: Final = {"gelu": "gelu", "silu": "silu", "relu": "relu"}
_KINDS_OF_ATTENTION: Final = (
    "multihead_attention",
    "grouped_query_attention",
    "multiquery_attention",
)
_MIXTURES: Final = ("mb_moe", "mb_dmoe", "torch_dmoe")
_GATED: Final = ("mptglu", "te_ln_glu")
"""Kinds of feed-forward (`llmfoundry/models/layers/ffn.py`): experts in every layer, with a
gate."""


_PEFT: Final = "model.peft_config."


def _adapters(settings: Mapping[str, Any]) -> Fields:
    """LoRA by the peft library (`peft_config`): all other weights are frozen."""
    options = {name.removeprefix(_PEFT): value for name, value in settings.items()}
    rank = WHOLE.read(options.get("r", 8))
    fields = {"frozen": True, "adapter_rank": rank} | adapter_modules(options.get("target_modules"))
    return fields | peft_fields(options)


def _write_model(fields: Fields) -> Mapping[str, Any]:
    """Keys of LLM Foundry's `model` for an MPT model."""
    if "model.layers" not in fields:
        return {}
    # MPT has no key for the inner size: its ratio to the hidden size says it, and need not be
    # whole.
    hidden, heads = fields["model.hidden"], fields["model.heads"]
    values: dict[str, Any] = {
        "model.name": "mpt_causal_lm",
        "model.d_model": hidden,
        "model.n_heads": heads,
        "model.n_layers": fields["model.layers"],
        "model.expansion_ratio": fields["model.ffn_hidden"] / hidden,
        "model.no_bias": not fields["model.bias"],
    }
    if fields["model.kv_heads"] != heads:
        values |= {
            "model.attn_config.attn_type": "grouped_query_attention",
            "model.attn_config.kv_n_heads": fields["model.kv_heads"],
        }
    positions = fields["model.positions"]
    if positions in ("alibi", "rope"):
        values[f"model.attn_config.{positions}"] = True
    return values


def sharding(value: Any) -> Fields:
    """The ZeRO stage that a sharding strategy of torch's FSDP stands for."""
    fields: Fields = {"zero": words(STRATEGIES).read(value)}
    # Torch shards within a node and copies across nodes, unless a script makes groups of its own.
    if "HYBRID" in str(value).upper():
        fields["shard_ranks"] = "node"
    return fields


def _mesh(settings: Mapping[str, Any]) -> Fields:
    """Composer's mesh of devices: sharding ranks, preceded by their copies if there are two
    dimensions."""
    sizes = as_list(stated_value(settings))
    if len(sizes) > 2:
        raise BadValue(f"must have one or two dimensions, got {sizes!r}")
    return {"replicate": WHOLE.read(sizes[0])} if len(sizes) == 2 else {}


def stage_of_resharding(reshards: Any) -> int:
    """The ZeRO stage of torch's FSDP2, which has no named strategies.

    Weights that are not sharded again after forward stay gathered for backward, as in stage 2.

    Args:
        reshards: whether they are (`reshard_after_forward`); None where a file does not say it.
    """
    return 3 if reshards is None or FLAG.read(reshards) else 2


def fsdp_offload(zero: int, on_host: bool) -> Fields:
    """States that torch's `CPUOffload` keeps on the host.

    It moves all of them; weights that stay gathered after forward (`zero` 2) are on the device too.
    """
    if not on_host:
        return {}
    return {"offload_states": "weights" if zero == 3 else "optimizer"}


def offloads_to_host(fields: Fields) -> bool:
    """Whether torch's FSDP offloads the states that the fields name.

    Raises:
        LaunchFileError: it cannot.
    """
    place = fields["offload_states"]
    # CPUOffload is one switch for all sharded states, which depend on the ZeRO stage.
    if place != "none" and {"offload_states": place} != fsdp_offload(fields["zero"], on_host=True):
        raise LaunchFileError(
            f"offload_states={place}: FSDP offloads weights and optimizer with zero=3, and only the optimizer "
            "with zero=2; choose the matching one"
        )
    return place != "none"


def strategy(fields: Fields) -> str:
    """Torch's name for the sharding strategy of a layout.

    Raises:
        LaunchFileError: the layout has none.
    """
    # Torch makes hybrid groups of one node unless a script gives it others.
    hybrid = fields["replicate"] > 1
    if hybrid and fields["dp"] // fields["replicate"] != fields["devices_per_node"]:
        raise LaunchFileError("replicate: the file can shard over all replicas or within a node")
    names = (
        name
        for name, stage in STRATEGIES.items()
        if stage == fields["zero"] and ("HYBRID" in name) == hybrid
    )
    name = next(names, None)
    if name is None:
        raise LaunchFileError("zero=1: FSDP also shards gradients and weights; use zero=0, 2 or 3")
    return name


def _zero(fields: Fields) -> Mapping[str, Any]:
    return {"fsdp_config.sharding_strategy": strategy(fields)}


def _batch_of_device(settings: Mapping[str, Any]) -> Fields:
    if "device_train_batch_size" not in settings or "global_train_batch_size" in settings:
        return {}
    per_device = WHOLE.read(settings["device_train_batch_size"])
    devices = settings.get("compute.gpus")
    if devices is None:
        return {"device_batch": per_device}
    return {"global_batch": per_device * WHOLE.read(devices)}


LLM_FOUNDRY: Final = LaunchFormat(
    name="llm-foundry",
    syntax="yaml",
    frameworks=("llm-foundry",),
    marks=(
        "global_train_batch_size",
        "device_train_microbatch_size",
        "parameters.global_train_batch_size",
    ),
    table=(
        # `compute` is the block of MosaicML's platform; a file for Composer's own launcher does not
        # have it.
        key("compute.gpus", "devices"),
        # Composer divides the global batch by the ranks and accumulates what exceeds the
        # micro-batch.
        key("global_train_batch_size", "global_batch"),
        key("device_train_microbatch_size", "micro_batch"),
        read_only("device_train_grad_accum", "grad_accum"),
        # Composer's other way to state the batch: sequences of a device per step.
        Rule(
            keys=("device_train_batch_size", "compute.gpus", "global_train_batch_size"),
            read=_batch_of_device,
            fields=("global_batch",),
        ),
        key("max_seq_len", "seq_len", also=("model.max_seq_len",)),
        key(
            "precision",
            "dtype",
            # Composer's words, and those of 2022 without `amp_`.
            words(
                {
                    "amp_bf16": "bf16",
                    "amp_fp16": "fp16",
                    "fp32": "fp32",
                    "amp_fp8": "fp8",
                    "bf16": "bf16",
                    "fp16": "fp16",
                    "amp": "fp16",
                }
            ),
            default="bf16",
        ),
        # FSDP settings (composer/distributed/mosaic_parallelism.py, earlier
        # composer/trainer/mosaic_fsdp_utils.py).
        Rule(keys=("fsdp_config.device_mesh",), read=_mesh, fields=("replicate",)),
        Rule(
            keys=("fsdp_config.sharding_strategy",),
            write=_zero,
            read=lambda settings: sharding(stated_value(settings)),
        ),
        read_only("optimizer.name", "optimizer", OPTIMIZER),
        # Composer keeps activations unless a file asks otherwise; llm-foundry's own files of 3B and
        # more ask for it.
        key(
            "fsdp_config.activation_checkpointing",
            "recompute",
            words({True: "full", False: "none"}),
            default="none",
        ),
        key("fsdp_config.activation_cpu_offload", "offload", FLAG, default=False),
        key(
            # `get_mixed_precision`: DEFAULT casts weights and reduces in fp32, PURE reduces in the
            # type of the products, and FULL casts nothing by itself.
            "fsdp_config.mixed_precision",
            "grad_dtype",
            words({"PURE": "bf16", "DEFAULT": "fp32", "FULL": "fp32"}),
            default="fp32",
        ),
        # The model: MPT's own sizes, or one of Hugging Face by name.
        key("tp_config.tensor_parallel_degree", "tp", default=1),
        key("model.attn_config.attn_impl", "flash_attention", words(_ATTENTION)),
        Rule(
            keys=(
                "model.name",
                *_NAMED,
                "model.learned_pos_emb",
                "model.d_model",
                "model.n_heads",
                "model.n_layers",
                "model.expansion_ratio",
                "model.no_bias",
                "model.attn_config.alibi",
                "model.attn_config.rope",
                "model.attn_config.kv_n_heads",
                "model.attn_config.attn_type",
                "model.ffn_config.ffn_type",
                "model.ffn_config.ffn_hidden_size",
                "model.ffn_config.moe_num_experts",
                "model.ffn_config.moe_top_k",
                "model.ffn_config.mlp_type",
                "model.ffn_config.ffn_act_fn.name",
                "model.norm_type",
                "model.tie_word_embeddings",
                "model.attn_config.sliding_window_size",
            ),
            read=_model,
            write=_write_model,
        ),
        Rule(
            keys=(
                f"{_PEFT}peft_type",
                f"{_PEFT}r",
                f"{_PEFT}target_modules",
                f"{_PEFT}use_dora",
                f"{_PEFT}modules_to_save",
                f"{_PEFT}layers_to_transform",
            ),
            fields=("adapter_rank",),
            read=_adapters,
        ),
        key("model.vocab_size", "model.vocab", default=50368),
    ),
    always={"overlap_grad_reduce": True, "overlap_param_gather": True},
    harmless=(
        # Places, names and data of a run.
        "variables.*",
        "data_local",
        "data_remote",
        "run_name",
        "name",
        "image",
        "integrations",
        "command",
        "compute.*",
        "tokenizer.*",
        "train_loader.*",
        "eval_loader.*",
        # Numbers of optimizer and evaluation, logs and checkpoints.
        "scheduler.*",
        "optimizer.*",
        "algorithms.*",
        "max_duration",
        "eval_*",
        "global_seed",
        "seed",
        "device_eval_batch_size",
        "progress_bar",
        "log_*",
        "console_log_interval",
        "callbacks.*",
        "loggers.*",
        "save_*",
        "load_*",
        "autoresume",
        "dist_timeout",
        "python_log_level",
        # Only referred to, and names of modules and losses.
        "model_name",
        "model.fc_type",
        "model.loss_fn",
        "model.fuse_norm_attn_norm",
        "accumulate_train_batch_on_tokens",
        # Settings of FSDP that every run has alike.
        "fsdp_config.limit_all_gathers",
        "fsdp_config.backward_prefetch",
        "fsdp_config.forward_prefetch",
        "fsdp_config.activation_checkpointing_reentrant",
        "fsdp_config.state_dict_type",
        "fsdp_config.verbose",
        "fsdp_config.sharded_ckpt_prefix_dir",
        "fsdp_config.sync_module_states",
        "fsdp_config.use_orig_params",
        "fsdp_config.keep_low_precision_grads",
        # Constants and checkpoints of the model.
        "tp_config.strategy",
        "model.ffn_config.ffn_act_fn.*",
        "model.init_*",
        "model.emb_*",
        "model.use_auth_token",
        "model.convert_to",
        "model.trust_remote_code",
        "model.use_train_metrics",
        "model.should_save_peft_only",
        "fsdp_config.load_monolith_rank0_only",
        "accumulate_train_batch_on_tokens",
        "metadata.*",
        "model.pretrained",
        # Keys of the named model's configuration that change neither its matrices nor its
        # attention; others are named as unread.
        "model.config_overrides.max_position_embeddings",
        "model.config_overrides.max_seq_len",
        "model.config_overrides.attn_config.attn_impl",
        "model.config_overrides.attn_config.attn_uses_sequence_id",
        "model.config_overrides.attn_config.rope_*",
        "model.config_overrides.rope_*",
        "model.config_overrides.use_cache",
        "model.config_overrides.*dropout",
        "model.config_overrides.*pdrop",
        "model.config_overrides.*_token_id",
        "model.config_overrides.init*",
        "model.use_flash_attention_2",
        "expandable_segments",
        "model.attn_config.clip_qkv",
        "model.attn_config.attn_pdrop",
        "model.attn_config.rope_*",
        "icl_*",
        "model.ffn_config.moe_*",
        "model.ffn_config.uniform_expert_assignment",
        "model.ffn_config.mlp_impl",
        "model.peft_config.lora_*",
        "model.peft_config.task_type",
        "model.peft_config.bias",
        "model.peft_config.use_rslora",
        "model.peft_config.inference_mode",
        "model.peft_config.fan_in_fan_out",
        "model.peft_config.init_lora_weights",
        "model.peft_config.base_model_name_or_path",
        "model.peft_config.revision",
        "model.attn_config.qk_ln",
        "model.attn_config.softmax_scale",
        "model.resid_pdrop",
        "tags",
    ),
    limits={
        "pp": "it has no pipeline",
        "cp": "it has no context parallelism",
        "ep": "this file does not distribute experts",
        "vpp": "it has no pipeline",
        "schedule": "it has no pipeline",
        "sequence_parallel": "it does not shard norms",
        "recompute": "FSDP recomputes whole blocks or none",
        "recompute_full_layers": "it recomputes all blocks in the same way",
        "overlap_grad_reduce": "FSDP always overlaps gradient reductions with the backward pass",
        "overlap_param_gather": "FSDP always prefetches",
        "tp_overlap": "its files have no key for this setting",
        "order": "its files have no key for this setting",
        "partition": "it has no pipeline",
        "replicate": "it shards over all replicas or within a node",
        "prefetch": "its files have no key for this setting",
        "offload_states": "Composer does not offload states",
    },
)
