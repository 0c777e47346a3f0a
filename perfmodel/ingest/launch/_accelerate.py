"""Accelerate's YAML (`accelerate config`; docs of huggingface/accelerate): FSDP, DeepSpeed,
Megatron-LM or DDP."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._deepspeed import (
    DEEPSPEED,
    DEVICES,
    offloaded_states,
    stage_as_it_runs,
)
from perfmodel.ingest.launch._entries import (
    AUTO,
    Entries,
    Entry,
    Neighbours,
    Source,
    included_entries,
)
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._llm_foundry import (
    fsdp_offload,
    offloads_to_host,
    sharding,
    stage_of_resharding,
    strategy,
)
from perfmodel.ingest.launch._read_entries import read_json
from perfmodel.ingest.launch._table import FLAG, WHOLE, WHOLE_OR_NONE, Fields, Rule, key, words

_NUMBERS: Final = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
"""Strategies by their number, starting at 1."""
_HALVES: Final = ("bf16.enabled", "fp16.enabled")
"""DeepSpeed keys that turn 16-bit training on."""
_FRAMEWORKS: Final = {"FSDP": "fsdp", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron-lm"}
_KIND: Final = "distributed_type"
_HOST: Final = "fsdp_config.fsdp_offload_params"
_FSDP_STRATEGY: Final = "fsdp_config.fsdp_sharding_strategy"
_FSDP_RESHARDS: Final = "fsdp_config.fsdp_reshard_after_forward"
_ZERO_STAGE: Final = "deepspeed_config.zero_stage"
_SHARDED_OPTIMIZER: Final = "megatron_lm_config.megatron_lm_use_distributed_optimizer"
_ZERO: Final = (
    _KIND,
    _FSDP_STRATEGY,
    _FSDP_RESHARDS,
    _ZERO_STAGE,
    _SHARDED_OPTIMIZER,
    _HOST,
)
_DEGREES: Final = "parallelism_config.parallelism_config_"
"""Prefix of the degrees of parallelism."""
_REPLICATE: Final = f"{_DEGREES}dp_replicate_size"
_SHARD: Final = f"{_DEGREES}dp_shard_size"
_COPIES: Final = (_REPLICATE, _SHARD)
"""Number of sharding groups, and of replicas within each."""
_CONTEXT_SIZE: Final = f"{_DEGREES}cp_size"
_SEQUENCE_SIZE: Final = f"{_DEGREES}sp_size"
_CONTEXT_EXCHANGE: Final = f"{_DEGREES}cp_comm_strategy"
_CONTEXT: Final = (
    _CONTEXT_SIZE,
    _SEQUENCE_SIZE,
    f"{_DEGREES}sp_backend",
    _CONTEXT_EXCHANGE,
)
DEEPSPEED_FILE: Final = "deepspeed_config.deepspeed_config_file"
"""The key of a separate DeepSpeed file, which then determines ZeRO, precision and batches."""
_DTYPE: Final = "mixed_precision"
_OFFLOADS: Final = (
    "deepspeed_config.offload_param_device",
    "deepspeed_config.offload_optimizer_device",
)


def _zero(settings: Mapping[str, Any]) -> Fields:
    """ZeRO stage, copies and offload of the engine that the file chooses."""
    if not set(settings) - {_DTYPE}:
        return {}
    # One file configures four engines, and the kind says whose block counts;
    # blocks of others may stand beside it unused.
    kind = settings.get(_KIND)
    if kind == "DEEPSPEED":
        stage = settings.get(_ZERO_STAGE)
        stage = WHOLE_OR_NONE.read(2 if stage is None else stage)
        return stage_as_it_runs(stage, settings.get(_DTYPE, ""))
    if kind == "MEGATRON_LM":
        return {"zero": int(bool(settings.get(_SHARDED_OPTIMIZER)))}
    if kind != "FSDP":
        return {"zero": 0}
    fields = _sharded(settings.get(_FSDP_STRATEGY), settings.get(_FSDP_RESHARDS))
    copies = _degree(settings, _REPLICATE)
    if copies > 1:
        # The file's own groups, instead of those of a node.
        fields.pop("shard_ranks", None)
        if _degree(settings, _SHARD) == 1:
            return {"zero": 0}
        fields["replicate"] = copies
    if fields["zero"]:
        fields |= fsdp_offload(fields["zero"], FLAG.read(settings.get(_HOST) or False))
    return fields


def _sharded(by_name: Any, reshards: Any) -> Fields:
    """Return the ZeRO stage of FSDP, from the name of its strategy or from whether weights are
    resharded after the forward pass (FSDP2)."""
    is_switch = isinstance(reshards, bool) or str(reshards).lower() in ("true", "false")
    if by_name is None and (reshards is None or is_switch):
        return {"zero": stage_of_resharding(reshards)}
    name = reshards if by_name is None else by_name
    # `accelerate config` once wrote the number of a menu's line, counted from 1.
    number = int(name) if str(name).isdecimal() else 0
    strategy_name = _NUMBERS[number - 1] if 0 < number <= len(_NUMBERS) else name
    return sharding(strategy_name)


def _degree(settings: Mapping[str, Any], name: str) -> int:
    """A degree; 1 if the file does not state it."""
    return WHOLE.read(settings.get(name, 1))


def _context(settings: Mapping[str, Any]) -> Fields:
    """Ranks that share a sequence: by blocks of keys and values, or by heads (DeepSpeed's
    Ulysses)."""
    # `sp_size` is DeepSpeed's Ulysses, `cp_size` PyTorch's context parallelism.
    ranks = _degree(settings, _CONTEXT_SIZE)
    by_heads = _degree(settings, _SEQUENCE_SIZE)
    if by_heads > 1:
        return {"cp": ranks * by_heads, "cp_kind": "ulysses"}
    fields: Fields = {"cp": ranks}
    exchanged = settings.get(_CONTEXT_EXCHANGE)
    if ranks > 1 and exchanged is not None:
        fields["cp_kind"] = words({"allgather": "all_gather", "alltoall": "ring"}).read(exchanged)
    return fields


def _no_file(settings: Mapping[str, Any]) -> Fields:
    """A doubt about a missing DeepSpeed file; nearly all such files train in 16 bits."""
    if DEEPSPEED_FILE not in settings:
        return {}
    missing = f"deepspeed_config_file {settings[DEEPSPEED_FILE]} was not found in the same folder"
    fields: Fields = {
        "doubt.deepspeed": f"the layout, the precision and memory may be wrong: {missing}"
    }
    if _DTYPE not in settings:
        fields |= {
            "dtype": "bf16",
            "note.dtype": f"dtype=bf16 is assumed, because {missing}; --dtype sets another",
        }
    return fields


def _write_zero(fields: Fields) -> Mapping[str, Any]:
    # Of the four engines only FSDP is written, because DeepSpeed's and Megatron's own files are
    # more complete than Accelerate's blocks for them.
    refused = [
        name for name in ("tp", "pp") if fields[name] > 1 and name not in fields["by_script"]
    ]
    if refused:
        raise LaunchFileError(
            "tp and pp: this file is written for FSDP, which has neither; use tp=1,pp=1"
        )
    if fields["zero"] == 0:
        return {_KIND: "MULTI_GPU"}
    return {
        _KIND: "FSDP",
        _FSDP_STRATEGY: strategy(fields),
        **({_HOST: True} if offloads_to_host(fields) else {}),
    }


_STAGE: Final = "deepspeed_config.zero_stage"


def _offload(settings: Mapping[str, Any]) -> Fields:
    """Model states that DeepSpeed keeps on the host."""
    weights, optimizer = (words(DEVICES).read(settings.get(name, "none")) for name in _OFFLOADS)
    # Accelerate's default is stage 2 (`DeepSpeedPlugin`).
    stage = WHOLE_OR_NONE.read(settings.get(_STAGE, 2))
    return offloaded_states(weights, optimizer, stage)


def _write_recompute(fields: Fields) -> Mapping[str, Any]:
    if fields["zero"] == 0 and fields["recompute"] != "none":
        raise LaunchFileError(
            "recompute: without FSDP the training script decides on recomputation; use recompute=none"
        )
    if fields["zero"]:
        return {"fsdp_config.fsdp_activation_checkpointing": fields["recompute"] == "full"}
    return {}


def _recompute(settings: Mapping[str, Any]) -> Fields:
    if settings.get("megatron_lm_config.megatron_lm_recompute_activations"):
        return {"recompute": "selective"}
    checkpoints = settings.get("fsdp_config.fsdp_activation_checkpointing") is True
    return {"recompute": "full" if checkpoints else "none"}


def _framework(fields: Fields, entries: Entries) -> str:
    kind = entries[_KIND].value if _KIND in entries else None
    return _FRAMEWORKS.get(kind if isinstance(kind, str) else "", "pytorch")


def _is_single(kind: Any) -> bool:
    """Whether a value of `distributed_type` starts a single process; YAML reads a bare `NO` as
    false."""
    return kind is False or str(kind).upper() == "NO"


_WORLD: Final = (
    key("num_processes", "devices"),
    # Without a kind of distribution one process is started, however many the file counts
    # (`accelerate/commands/launch.py`, `simple_launcher`).
    Rule(
        keys=(_KIND,), read=lambda settings: {"devices": 1} if _is_single(settings[_KIND]) else {}
    ),
    Rule(
        keys=("machine_rank",), read=lambda settings: {}, write=lambda fields: {"machine_rank": 0}
    ),
    Rule(
        keys=("num_machines",),
        read=lambda settings: {"nodes": WHOLE.read(settings["num_machines"])},
        write=lambda fields: {
            "num_machines": max(1, fields["devices"] // fields["devices_per_node"])
        },
    ),
)

ACCELERATE: Final = LaunchFormat(
    name="accelerate",
    syntax="yaml",
    frameworks=("fsdp", "fsdp-compile", "pytorch"),
    marks=(_KIND, "num_processes"),
    framework=_framework,
    table=(
        *_WORLD,
        # One of four engines decides what is sharded and where states are kept.
        Rule(keys=(*_ZERO, _DTYPE, *_COPIES), read=_zero, write=_write_zero),
        Rule(keys=(*_OFFLOADS, _STAGE), read=_offload),
        key(
            _DTYPE,
            "dtype",
            words({"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "fp8"}),
            default="fp32",
        ),
        Rule(keys=(DEEPSPEED_FILE, _DTYPE), read=_no_file),
        Rule(
            keys=(
                "fsdp_config.fsdp_activation_checkpointing",
                "megatron_lm_config.megatron_lm_recompute_activations",
            ),
            read=_recompute,
            write=_write_recompute,
        ),
        key(
            "gradient_accumulation_steps",
            "grad_accum",
            also=(
                "deepspeed_config.gradient_accumulation_steps",
                "megatron_lm_config.megatron_lm_num_micro_batches",
            ),
        ),
        key(
            "megatron_lm_config.megatron_lm_tp_degree",
            "tp",
            also=("parallelism_config.parallelism_config_tp_size", "tp_config.tp_size"),
            default=1,
        ),
        key("megatron_lm_config.megatron_lm_pp_degree", "pp", default=1),
        key("megatron_lm_config.megatron_lm_sequence_parallelism", "sequence_parallel", FLAG),
        Rule(
            keys=_CONTEXT,
            read=_context,
            write=lambda fields: {_CONTEXT_SIZE: fields["cp"]},
            defaults={"cp": 1},
        ),
    ),
    elsewhere=("micro_batch",),
    harmless=(
        # Where and how processes are started.
        "compute_environment",
        "debug",
        "downcast_bf16",
        "enable_cpu_affinity",
        "main_*",
        "rdzv_*",
        "same_network",
        "tpu_*",
        "use_cpu",
        "gpu_ids",
        "commands",
        "command_file",
        # How modules are wrapped and loaded: units of FSDP are layers in any case.
        "fsdp_config.fsdp_auto_wrap_policy",
        "fsdp_config.fsdp_backward_prefetch*",
        "fsdp_config.fsdp_cpu_ram_efficient_loading",
        "fsdp_config.fsdp_version",
        "fsdp_config.fsdp_forward_prefetch",
        "fsdp_config.fsdp_state_dict_type",
        "fsdp_config.fsdp_sync_module_states",
        "fsdp_config.fsdp_use_orig_params",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        # Starting and checkpoints of the other engines.
        "deepspeed_config.zero3_*",
        "deepspeed_config.gradient_clipping",
        "deepspeed_config.deepspeed_multinode_launcher",
        "deepspeed_config.deepspeed_hostfile",
        "deepspeed_config.deepspeed_inclusion_filter",
        "deepspeed_config.deepspeed_exclusion_filter",
        "megatron_lm_config.megatron_lm_gradient_clipping",
        "parallelism_config.parallelism_config_sp_*",
    ),
    in_script={
        "tp": (
            "shard the layers in the training script (torch.distributed.tensor.parallel.parallelize_module, or "
            "from_pretrained(tp_plan=...)) before FSDP wraps them"
        ),
        "pp": "cut the model into stages in the training script (torch.distributed.pipelining)",
    },
    limits={
        "cp": "context parallelism is set up in the training script",
        "ep": "it does not distribute experts",
        "vpp": "FSDP has no pipeline",
        "schedule": "FSDP has no pipeline",
        "recompute": "FSDP recomputes whole blocks or none",
        "recompute_full_layers": "it recomputes all blocks in the same way",
        "offload": "it does not offload activations",
        "overlap_grad_reduce": "FSDP always overlaps gradient reductions with the backward pass",
        "overlap_param_gather": "FSDP always prefetches",
        "order": "its files have no key for this setting",
        "partition": "FSDP has no pipeline",
        "tp_overlap": "FSDP has no tp",
        "sequence_parallel": "FSDP has no tp",
        "prefetch": "FSDP prefetches exactly one block ahead",
        "replicate": "it shards over all replicas or within a node",
    },
)

ACCELERATE_AND_DEEPSPEED: Final = replace(
    DEEPSPEED,
    name=ACCELERATE.name,
    syntax="yaml",
    table=(
        *DEEPSPEED.table,
        *_WORLD,
        Rule(keys=_CONTEXT, read=_context),
        Rule(keys=(_KIND,), read=lambda settings: {}),
    ),
    harmless=(*DEEPSPEED.harmless, *ACCELERATE.harmless, "deepspeed_config.*", _DTYPE),
)
"""Format of an Accelerate file that names a DeepSpeed file: the first states the processes, the
second all else."""


def with_deepspeed_file(source: Source, folder: Path) -> tuple[Source, LaunchFormat]:
    """Add the entries of the DeepSpeed file that an Accelerate file names, if it is in the same
    folder."""
    # Accelerate refuses a file of DeepSpeed's beside its own block of it, so that the two never
    # contradict.
    named = source.entries.get(DEEPSPEED_FILE)
    if named is None or not isinstance(named.value, str):
        return source, ACCELERATE
    file = Neighbours(folder).find(named.value)
    if file is None:
        return source, ACCELERATE
    file_entries = included_entries(
        read_json(file.text, str(file.path)).entries, file.path, named.line
    )
    merged = dict(source.entries)
    for key_of_file, entry in file_entries.items():
        # Accelerate's own keys fill in what DeepSpeed's file leaves open.
        if entry.value != AUTO or key_of_file not in merged:
            merged[key_of_file] = entry
    return replace(source, entries=_with_precision(merged)), ACCELERATE_AND_DEEPSPEED


def _with_precision(merged: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries with Accelerate's `mixed_precision` where DeepSpeed's file leaves the precision
    open."""
    dtype = merged.get(_DTYPE)
    open_types = [name for name, entry in merged.items() if name in _HALVES and entry.value == AUTO]
    if dtype is None or not open_types:
        return dict(merged)
    entries = {name: entry for name, entry in merged.items() if name not in open_types}
    return entries | {
        name: replace(merged[name], value=name.startswith(str(dtype.value))) for name in open_types
    }
