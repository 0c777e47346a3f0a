"""YAML of NeMo RL (`examples/configs` of NVIDIA-NeMo/RL): the training half of fine-tuning,
preference tuning and reinforcement, on PyTorch's FSDP2 (`policy.dtensor_cfg`) or Megatron-Core
(`policy.megatron_cfg`)."""

from collections.abc import Mapping
from itertools import product
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._finetuning import Adapters, is_on, optimizer_fields, padding_note
from perfmodel.ingest.launch._format import LaunchFormat, patterns
from perfmodel.ingest.launch._llm_foundry import fsdp_offload
from perfmodel.ingest.launch._table import TEXT, WHOLE, Fields, Rule, read_only, words

_FSDP: Final = "policy.dtensor_cfg."
_MEGATRON: Final = "policy.megatron_cfg."
_IS_MEGATRON: Final = f"{_MEGATRON}enabled"
_MODEL: Final = "policy.model_name"


def _limits(*objectives: str) -> tuple[str, ...]:
    """Keys for the length of a run, of which every objective's block has one; they identify the
    objective."""
    return tuple(
        f"{objective}.{limit}"
        for objective, limit in product(objectives, ("max_num_steps", "max_num_epochs"))
    )


_OBJECTIVES: Final = _limits("grpo", "dpo", "rm", "distillation", "ppo", "async_grpo")
_PAIRS: Final = _limits("dpo", "rm")
"""Such keys of objectives whose samples are pairs of sequences."""


def _world(settings: Mapping[str, Any]) -> Fields:
    nodes = WHOLE.read(settings.get("cluster.num_nodes", 1))
    return {"devices": nodes * WHOLE.read(settings.get("cluster.gpus_per_node", 1)), "nodes": nodes}


_FSDP_KEYS: Final = (
    f"{_FSDP}tensor_parallel_size",
    f"{_FSDP}context_parallel_size",
    f"{_FSDP}expert_parallel_size",
    f"{_FSDP}sequence_parallel",
    f"{_FSDP}activation_checkpointing",
    f"{_FSDP}cpu_offload",
)
_MEGATRON_KEYS: Final = (
    f"{_MEGATRON}tensor_model_parallel_size",
    f"{_MEGATRON}pipeline_model_parallel_size",
    f"{_MEGATRON}context_parallel_size",
    f"{_MEGATRON}expert_model_parallel_size",
    f"{_MEGATRON}expert_tensor_parallel_size",
    f"{_MEGATRON}num_layers_in_first_pipeline_stage",
    f"{_MEGATRON}num_layers_in_last_pipeline_stage",
    f"{_MEGATRON}sequence_parallel",
    f"{_MEGATRON}activation_checkpointing",
    f"{_MEGATRON}optimizer.use_distributed_optimizer",
    f"{_MEGATRON}optimizer.optimizer_cpu_offload",
    f"{_MEGATRON}distributed_data_parallel_config.grad_reduce_in_fp32",
    f"{_MEGATRON}distributed_data_parallel_config.overlap_grad_reduce",
    f"{_MEGATRON}distributed_data_parallel_config.overlap_param_gather",
)


def _layout(settings: Mapping[str, Any]) -> Fields:
    """Layout and memory of the backend that the file enables; the other backend's block may be
    present but unused."""
    if is_on(settings.get(_IS_MEGATRON)):
        return _megatron(settings)
    # Weights, gradients and states are sharded over all data-parallel ranks
    # (nemo_rl/models/policy).
    fields: Fields = {
        "zero": 3,
        "sequence_parallel": is_on(settings.get(f"{_FSDP}sequence_parallel")),
    }
    for name, field in (("tensor", "tp"), ("context", "cp"), ("expert", "ep")):
        fields[field] = WHOLE.read(settings.get(f"{_FSDP}{name}_parallel_size", 1))
    fields["recompute"] = (
        "full" if is_on(settings.get(f"{_FSDP}activation_checkpointing")) else "none"
    )
    return fields | fsdp_offload(3, is_on(settings.get(f"{_FSDP}cpu_offload")))


def _megatron(settings: Mapping[str, Any]) -> Fields:
    """Layout and memory of the Megatron backend."""

    def degree(name: str) -> int:
        return WHOLE.read(settings.get(f"{_MEGATRON}{name}", 1))

    # Checkpointing there means `recompute_granularity="full"` (nemo_rl/models/megatron/setup.py).
    checkpoints = is_on(settings.get(f"{_MEGATRON}activation_checkpointing"))
    fields: Fields = {
        "tp": degree("tensor_model_parallel_size"),
        "pp": degree("pipeline_model_parallel_size"),
        "cp": degree("context_parallel_size"),
        "ep": degree("expert_model_parallel_size"),
        "sequence_parallel": is_on(settings.get(f"{_MEGATRON}sequence_parallel")),
        "recompute": "full" if checkpoints else "none",
        "zero": int(is_on(settings.get(f"{_MEGATRON}optimizer.use_distributed_optimizer", True))),
    }
    if fields["ep"] > 1:
        fields["etp"] = degree("expert_tensor_parallel_size")
    ddp = f"{_MEGATRON}distributed_data_parallel_config."
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        if f"{ddp}{name}" in settings:
            fields[name] = is_on(settings[f"{ddp}{name}"])
    if f"{ddp}grad_reduce_in_fp32" in settings:
        fields["grad_dtype"] = "fp32" if is_on(settings[f"{ddp}grad_reduce_in_fp32"]) else "bf16"
    if is_on(settings.get(f"{_MEGATRON}optimizer.optimizer_cpu_offload")):
        fields["offload_states"] = "optimizer"
    uneven = [
        name
        for name in ("first", "last")
        if settings.get(f"{_MEGATRON}num_layers_in_{name}_pipeline_stage")
    ]
    if uneven:
        fields["doubt.stages"] = (
            f"the layout may be wrong: num_layers_in_{uneven[0]}_pipeline_stage makes stages unequal, but equal ones "
            "are predicted"
        )
    return fields


_BATCHES: Final = ("policy.train_global_batch_size", "policy.train_micro_batch_size")


def _batches(settings: Mapping[str, Any]) -> Fields:
    """Batches, which count samples; a preference sample is two sequences."""
    if not any(name in settings for name in _BATCHES):
        return {}
    sequences_per_sample = 2 if any(name in settings for name in _PAIRS) else 1
    fields = {}
    for name, field in zip(_BATCHES, ("global_batch", "micro_batch"), strict=True):
        if name in settings:
            fields[field] = sequences_per_sample * WHOLE.read(settings[name])
    return fields


_PRECISIONS: Final = words({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})
_FP8: Final = f"{_MEGATRON}fp8_cfg.enabled"


def _dtype(settings: Mapping[str, Any]) -> Fields:
    if is_on(settings.get(_IS_MEGATRON)) and is_on(settings.get(_FP8)):
        return {"dtype": "fp8"}
    if "policy.precision" in settings:
        return {"dtype": _PRECISIONS.read(settings["policy.precision"])}
    return {}


def _adapter_keys(block: str) -> tuple[str, ...]:
    names = ("enabled", "dim", "target_modules", "match_all_linear", "dropout")
    return tuple(f"{block}{name}" for name in names)


_FSDP_LORA: Final = f"{_FSDP}lora_cfg."
_MEGATRON_LORA: Final = f"{_MEGATRON}peft."
_LORA: Final = (_FSDP_LORA, _MEGATRON_LORA)


def _adapters(settings: Mapping[str, Any]) -> Fields:
    block = _LORA[1 if is_on(settings.get(_IS_MEGATRON)) else 0]
    if not is_on(settings.get(f"{block}enabled")):
        return {}
    targets = settings.get(f"{block}target_modules") or None
    if targets is None or is_on(settings.get(f"{block}match_all_linear")):
        targets = "all-linear"
    return Adapters(
        rank=settings.get(f"{block}dim", 8),
        targets=targets,
        dropout=settings.get(f"{block}dropout", 0),
    ).fields


def _objective(settings: Mapping[str, Any]) -> Fields:
    name = next(iter(settings)).partition(".")[0]
    return {
        "doubt.stage": (
            f"the training method may be wrong: {name} runs further models or passes, but only the policy's training step "
            "is predicted"
        )
    }


def _packing(settings: Mapping[str, Any]) -> Fields:
    is_packed = any(
        is_on(settings.get(f"policy.{name}.enabled"))
        for name in ("sequence_packing", "dynamic_batching")
    )
    return padding_note("max_total_sequence_length", is_packed)


def _framework(fields: Fields, entries: Entries) -> str:
    enabled = entries.get(_IS_MEGATRON)
    return "megatron-core" if enabled is not None and is_on(enabled.value) else "fsdp"


NEMO_RL: Final = LaunchFormat(
    name="nemo-rl",
    syntax="yaml",
    frameworks=("nemo-rl",),
    framework=_framework,
    marks=(f"{_FSDP}*", f"{_MEGATRON}*", "policy.train_global_batch_size"),
    table=(
        Rule(keys=("cluster.gpus_per_node", "cluster.num_nodes"), read=_world, fields=("devices",)),
        read_only(_MODEL, "model", TEXT),
        Rule(keys=(*_BATCHES, *_PAIRS), read=_batches, fields=("global_batch", "micro_batch")),
        read_only("policy.max_total_sequence_length", "seq_len"),
        Rule(
            keys=("policy.precision", _IS_MEGATRON, _FP8),
            read=_dtype,
            fields=("dtype",),
            defaults={"dtype": "bf16"},
        ),
        Rule(keys=(_IS_MEGATRON, *_FSDP_KEYS, *_MEGATRON_KEYS, f"{_FSDP}enabled"), read=_layout),
        Rule(
            keys=(_IS_MEGATRON, *_adapter_keys(_FSDP_LORA), *_adapter_keys(_MEGATRON_LORA)),
            read=_adapters,
            fields=("adapter_rank",),
        ),
        Rule(
            keys=("policy.optimizer.name", f"{_MEGATRON}optimizer.optimizer"),
            fields=("optimizer",),
            read=lambda settings: optimizer_fields(next(iter(settings.values()))),
        ),
        Rule(keys=_OBJECTIVES, read=_objective),
        Rule(
            keys=("policy.sequence_packing.enabled", "policy.dynamic_batching.enabled", _MODEL),
            read=_packing,
        ),
    ),
    harmless=patterns(
        "sft.* grpo.* dpo.* rm.* ppo.* distillation.* async_grpo.* loss_fn.* data.* env.* logger.* checkpointing.*",
        "policy.tokenizer.* policy.generation.* policy.optimizer.* policy.scheduler* policy.dynamic_batching.*",
        "policy.sequence_packing.* policy.max_grad_norm policy.make_sequence_length_divisible_by",
        "policy.logprob_batch_size policy.generation_batch_size policy.offload_optimizer_for_logprob",
        "policy.logprob_chunk_size policy.hf_config_overrides.* policy.refit_buffer_size_gb cluster.* teacher.*",
        "policy.dtensor_cfg._v2 policy.dtensor_cfg.env_vars.* policy.dtensor_cfg.custom_parallel_plan",
        "policy.dtensor_cfg.clear_cache_every_n_steps policy.dtensor_cfg.automodel_kwargs*",
        "policy.dtensor_cfg.lora_cfg.*",
        "policy.megatron_cfg.* reward_model.* defaults",
    ),
)
