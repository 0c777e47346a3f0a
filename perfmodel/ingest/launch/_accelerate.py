"""Accelerate's YAML (`accelerate config`; docs of huggingface/accelerate): FSDP, DeepSpeed, Megatron-LM or DDP."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._deepspeed import DEVICES, stage_as_it_runs
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._llm_foundry import fsdp_offload, offloads_to_host, sharding, strategy
from perfmodel.ingest.launch._table import FLAG, WHOLE, WHOLE_OR_NONE, Fields, Rule, key, words

_NUMBERS: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""Strategies by their number, from 1 on."""
_FRAMEWORKS: Final = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron-lm"}
_KIND: Final = "distributed_type"
_HOST: Final = "fsdp_config.fsdp_offload_params"
_ZERO: Final = (
    _KIND, "fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward",
    "deepspeed_config.zero_stage", "megatron_lm_config.megatron_lm_use_distributed_optimizer", _HOST,
)  # fmt: skip
_DTYPE: Final = "mixed_precision"
_OFFLOADS: Final = ("deepspeed_config.offload_param_device", "deepspeed_config.offload_optimizer_device")


def _zero(found: Mapping[str, Any]) -> Fields:
    if not set(found) - {_DTYPE}:
        return {}
    kind, by_name, again, stage, distributed, on_host = (found.get(name) for name in _ZERO)
    if kind == "DEEPSPEED":
        return stage_as_it_runs(WHOLE_OR_NONE.read(2 if stage is None else stage), found.get(_DTYPE, ""))
    if kind == "MEGATRON_LM":
        return {"zero": int(bool(distributed))}
    if kind != "FSDP":
        return {"zero": 0}
    says: Fields = {"zero": 3 if again is None or FLAG.read(again) else 2}
    if by_name is not None:
        number = int(by_name) if str(by_name).isdecimal() else 0
        says = sharding(_NUMBERS[number - 1] if 0 < number <= len(_NUMBERS) else by_name)
    return says | (fsdp_offload(says["zero"], FLAG.read(on_host or False)) if says["zero"] else {})


def _write_zero(fields: Fields) -> Mapping[str, Any]:
    if any(fields[name] > 1 for name in ("tp", "pp")):
        raise LaunchFileError("tp and pp: this file is written for FSDP, which has neither; take tp=1,pp=1")
    if fields["zero"] == 0:
        return {_KIND: "MULTI_GPU"}
    return {_KIND: "FSDP", _ZERO[1]: strategy(fields), **({_HOST: True} if offloads_to_host(fields) else {})}


def _offload(found: Mapping[str, Any]) -> Fields:
    """DeepSpeed's states on the host."""
    weights, optimizer = (words(DEVICES).read(found.get(name, "none")) for name in _OFFLOADS)
    return {"offload_states": "weights" if weights else "optimizer"} if weights or optimizer else {}


def _write_recompute(fields: Fields) -> Mapping[str, Any]:
    if fields["zero"] == 0 and fields["recompute"] != "none":
        raise LaunchFileError("recompute without FSDP: the training script decides on it; take recompute=none")
    return {"fsdp_config.fsdp_activation_checkpointing": fields["recompute"] == "full"} if fields["zero"] else {}


def _recompute(found: Mapping[str, Any]) -> Fields:
    if found.get("megatron_lm_config.megatron_lm_recompute_activations"):
        return {"recompute": "selective"}
    return {"recompute": "full" if found.get("fsdp_config.fsdp_activation_checkpointing") is True else "none"}


def _framework(fields: Fields, entries: Entries) -> str:
    kind = entries[_KIND].value if _KIND in entries else None
    return _FRAMEWORKS.get(kind if isinstance(kind, str) else "", "pytorch")


ACCELERATE: Final = LaunchFormat(
    name="accelerate",
    syntax="yaml",
    frameworks=("fsdp", "fsdp-compile", "pytorch"),
    marks=(_KIND, "num_processes"),
    framework=_framework,
    table=(
        key("num_processes", "devices"),
        Rule(keys=("machine_rank",), read=lambda found: {}, write=lambda fields: {"machine_rank": 0}),
        Rule(keys=("num_machines",), read=lambda found: {"nodes": WHOLE.read(found["num_machines"])},
             write=lambda fields: {"num_machines": max(1, fields["devices"] // fields["devices_per_node"])}),
        Rule(keys=(*_ZERO, _DTYPE), read=_zero, write=_write_zero),
        Rule(keys=_OFFLOADS, read=_offload),
        key(_DTYPE, "dtype", words({"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "fp8"}),
            default="fp32"),
        Rule(keys=("fsdp_config.fsdp_activation_checkpointing", "megatron_lm_config.megatron_lm_recompute_activations"),
             read=_recompute, write=_write_recompute),
        key("gradient_accumulation_steps", "grad_accum",
            also=("deepspeed_config.gradient_accumulation_steps", "megatron_lm_config.megatron_lm_num_micro_batches")),
        key("megatron_lm_config.megatron_lm_tp_degree", "tp", also=("parallelism_config.parallelism_config_tp_size",),
            default=1),
        key("megatron_lm_config.megatron_lm_pp_degree", "pp", default=1),
        key("megatron_lm_config.megatron_lm_sequence_parallelism", "sequence_parallel", FLAG),
        key("parallelism_config.parallelism_config_cp_size", "cp", default=1),
    ),
    elsewhere=("micro_batch",),
    harmless=(
        "compute_environment", "debug", "downcast_bf16", "enable_cpu_affinity", "main_*", "rdzv_*", "same_network",
        "tpu_*", "use_cpu", "gpu_ids", "commands", "command_file", "fsdp_config.fsdp_auto_wrap_policy",
        "fsdp_config.fsdp_backward_prefetch*", "fsdp_config.fsdp_cpu_ram_efficient_loading", "fsdp_config.fsdp_version",
        "fsdp_config.fsdp_forward_prefetch", "fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_sync_module_states",
        "fsdp_config.fsdp_use_orig_params", "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "deepspeed_config.zero3_*", "deepspeed_config.gradient_clipping",
        "deepspeed_config.deepspeed_multinode_launcher",
        "megatron_lm_config.megatron_lm_gradient_clipping", "parallelism_config.parallelism_config_dp_*",
    ),
    limits={
        "cp": "context parallelism is set up in the training script", "ep": "it spreads no experts",
        "vpp": "FSDP has no pipeline",
        "schedule": "FSDP has no pipeline", "recompute": "FSDP recomputes whole blocks or none",
        "recompute_full_layers": "it recomputes every block alike", "offload": "it keeps activations on the device",
        "overlap_grad_reduce": "FSDP always reduces beside backward", "overlap_param_gather": "FSDP always prefetches",
        "order": "it has no key for it", "partition": "FSDP has no pipeline", "tp_overlap": "FSDP has no tp",
        "sequence_parallel": "FSDP has no tp", "prefetch": "FSDP gathers one block ahead",
        "replicate": "it shards over all replicas or over those of a node",
    },
)  # fmt: skip
