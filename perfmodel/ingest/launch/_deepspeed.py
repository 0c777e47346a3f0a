"""DeepSpeed's JSON (`ds_config.json`; deepspeed.ai, DeepSpeed configuration JSON)."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.ingest.launch._entries import AUTO
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._table import (
    FLAG,
    NUMBER,
    WHOLE,
    WHOLE_OR_NONE,
    BadValue,
    Fields,
    Rule,
    key,
    named_optimizer,
    words,
)

DEVICES: Final = {"none": False, "cpu": True, "nvme": True}
"""Places for offloaded states -> whether the place is off the device."""
_WRITTEN: Final = {"adam": "Adam", "adamw": "Adam", "lion": "Lion", "muon": "Muon", "sgd": "SGD"}
_OFFLOADS: Final = (
    "zero_optimization.offload_optimizer.device",
    "zero_optimization.offload_param.device",
)
_SHARDS: Final = "zero_optimization.mics_shard_size"
_HALVES: Final = {
    "bf16.enabled": "bf16",
    "bfloat16.enabled": "bf16",
    "fp16.enabled": "fp16",
    "amp.enabled": "fp16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "amp": "fp16",
}
"""Keys that turn 16-bit training on, with the element type; the short keys need only `true` or
`auto`."""
_ZERO_STAGE: Final = "zero_optimization.stage"
_OVERLAP: Final = "zero_optimization.overlap_comm"
_STAGE: Final = (
    _ZERO_STAGE,
    _OVERLAP,
    "zero_optimization.stage3_prefetch_bucket_size",
)


def stage_as_it_runs(stage: int, dtype: str) -> Fields:
    """ZeRO stage that really runs: with bf16 and no ZeRO, DeepSpeed's optimizer shards its states
    and accumulates gradients in fp32 (DeepSpeed runtime/engine.py `_do_optimizer_sanity_check` and
    `get_data_types`, runtime/bf16_optimizer.py)."""
    if stage > 0 or dtype != "bf16":
        return {"zero": stage}
    return {
        "zero": 1,
        "grad_dtype": "fp32",
        "note.bf16_optimizer": "zero=1, because DeepSpeed's BF16 optimizer shards optimizer states even without ZeRO",
    }


def _half(settings: Mapping[str, Any]) -> tuple[str, str]:
    """Element type of a file, and a remark if it is a guess.

    Hugging Face's Trainer replaces `auto` by its own --bf16 and --fp16. So a file with `auto` for
    one type means that type, and a file with `auto` for both means the newer one.
    """
    left_open: dict[str, str] = {}
    for name, value in settings.items():
        if value == AUTO:
            left_open.setdefault(_HALVES[name], name)
        elif FLAG.read(value):
            return _HALVES[name], ""
    if not left_open:
        return "fp32", ""
    dtype = "bf16" if "bf16" in left_open else "fp16"
    named = " and ".join(left_open.values())
    return (
        dtype,
        f"dtype={dtype}, because {named} {'are' if len(left_open) > 1 else 'is'} set to auto; --dtype sets another",
    )


def _dtype(settings: Mapping[str, Any]) -> Fields:
    dtype, remark = _half(settings)
    return {"dtype": dtype} | ({"note.dtype": remark} if remark else {})


def _write_dtype(fields: Fields) -> Mapping[str, Any]:
    dtype = fields.get("dtype")
    return {f"{dtype}.enabled": True} if dtype in ("bf16", "fp16") else {}


def _overlap(settings: Mapping[str, Any]) -> Fields:
    """Overlap of reductions, by default only under stage 3; weights are then prefetched unless the
    bucket is empty."""
    stage = WHOLE_OR_NONE.read(settings.get("zero_optimization.stage", 0))
    dtype, _ = _half({name: value for name, value in settings.items() if name in _HALVES})
    fields = stage_as_it_runs(stage, dtype)
    # `overlap_comm_valid` of deepspeed/runtime/zero/config.py: the default is True under stage 3
    # alone.
    if stage == 3 or "zero_optimization.overlap_comm" in settings:
        fields["overlap_grad_reduce"] = FLAG.read(
            settings.get("zero_optimization.overlap_comm", True)
        )
    if stage == 3:
        fields["overlap_param_gather"] = (
            settings.get("zero_optimization.stage3_prefetch_bucket_size", 1) != 0
        )
    return fields


def _write_overlap(fields: Fields) -> Mapping[str, Any]:
    stage = fields["zero"]
    values = {
        "zero_optimization.stage": stage,
        "zero_optimization.overlap_comm": fields["overlap_grad_reduce"],
    }
    if stage == 3 and not fields["overlap_param_gather"]:
        values["zero_optimization.stage3_prefetch_bucket_size"] = 0
    return values


def offloaded_states(weights: bool, optimizer: bool, stage: int = 3) -> Fields:
    """States that are offloaded; weights are offloaded only together with the optimizer's states,
    and only where stage 3 shards them (`deepspeed/runtime/zero/config.py`, `offload_param`)."""
    if weights and stage == 3:
        return {"offload_states": "weights"}
    return {"offload_states": "optimizer"} if optimizer else {}


def _offload(settings: Mapping[str, Any]) -> Fields:
    """Model states that DeepSpeed keeps in host memory, or on NVMe, which is read as host
    memory."""
    fields: Fields = {}
    optimizer, weights = (words(DEVICES).read(settings.get(name, "none")) for name in _OFFLOADS)
    stage = WHOLE_OR_NONE.read(settings.get(_STAGE[0], 0))
    fields |= offloaded_states(weights, optimizer, stage)
    if "nvme" in settings.values():
        fields["note.nvme"] = "states on NVMe are predicted as if they were in host memory"
    return fields


_SHARE_ON_HOST: Final = "zero_optimization.offload_optimizer.ratio"


def _partial_offload(settings: Mapping[str, Any]) -> Fields:
    """Twin-Flow (deepspeed.ai, ZeRO-Offload++): the optimizer updates a share of the weights on the
    device."""
    share = NUMBER.read(settings[_SHARE_ON_HOST])
    if share >= 1:
        return {}
    return {
        "doubt.offload": (
            f"memory may be wrong: offload_optimizer.ratio={share:g} leaves {1 - share:.0%} of the optimizer's states "
            "on the device, but the prediction puts all on the host"
        )
    }


_OLD_OFFLOADS: Final = ("zero_optimization.cpu_offload", "zero_optimization.cpu_offload_params")


def _old_offload(settings: Mapping[str, Any]) -> Fields:
    """Model states on the host, in the notation before DeepSpeed 0.4, which is still accepted."""
    optimizer, weights = (FLAG.read(settings.get(name, False)) for name in _OLD_OFFLOADS)
    stage = WHOLE_OR_NONE.read(settings.get(_STAGE[0], 0))
    return offloaded_states(weights, optimizer, stage)


_NARROW: Final = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
"""Keys that keep the master weights and gradients, and the optimizer's moments, in 16 bits."""


def _optimizer(settings: Mapping[str, Any]) -> Fields:
    """The optimizer; optimizers that keep only master weights in 16 bits are not supported."""
    fields = named_optimizer(settings["optimizer.type"]) if "optimizer.type" in settings else {}
    masters, moments = (FLAG.read(settings.get(name, False)) for name in _NARROW)
    if not masters:
        return fields
    # Masters and gradients are then bf16 (deepspeed/runtime/precision_config.py); with Adam's
    # moments in bf16 too, everything that is kept of a weight takes 2 bytes.
    fields["grad_dtype"] = "bf16"
    if moments and fields.get("optimizer", "adam") in ("adam", "adamw"):
        fields["optimizer"] = "adam16bit"
    else:
        fields["doubt.masters"] = (
            "memory may be wrong: the file keeps master weights in 16 bits, but the prediction counts fp32"
        )
    return fields


def _write_optimizer(fields: Fields) -> Mapping[str, Any]:
    optimizer = fields.get("optimizer")
    if optimizer == "adam16bit" and fields.get("grad_dtype") == "bf16":
        return {"optimizer.type": "Adam"} | dict.fromkeys(_NARROW, True)
    return {"optimizer.type": None if optimizer is None else _WRITTEN.get(optimizer)}


_NARROW_MASTERS: Final = "fp16.fp16_master_weights_and_grads"


def _narrow_masters(settings: Mapping[str, Any]) -> Fields:
    if not FLAG.read(settings[_NARROW_MASTERS]):
        return {}
    return {
        "doubt.masters": (
            "memory may be wrong: fp16_master_weights_and_grads keeps master weights and gradients in 16 bits, but "
            "the prediction counts fp32"
        )
    }


_AUTOCAST: Final = "torch_autocast.enabled"
_AUTOCAST_DTYPE: Final = "torch_autocast.dtype"


def _autocast(settings: Mapping[str, Any]) -> Fields:
    """The dtype of products under PyTorch's autocast (`runtime/torch_autocast.py` of DeepSpeed).

    Weights, gradients and states stay in fp32. They take 16 bytes per element, as in mixed
    precision.
    """
    if not FLAG.read(settings.get(_AUTOCAST, False)):
        return {}
    stated = settings.get(_AUTOCAST_DTYPE, "bfloat16")
    dtype = words({"bfloat16": "bf16", "float16": "fp16"}).read(stated)
    return {
        "dtype": dtype,
        "note.dtype": f"torch_autocast is predicted as mixed precision in {dtype}; its weights and gradients are fp32",
    }


_BUCKETS: Final = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
)
_USUAL_BUCKET: Final = 500_000_000
"""Default elements of a bucket."""


def _buckets(settings: Mapping[str, Any]) -> Fields:
    """Buffers of the sizes that a file states: one of gradients, or two where reductions overlap
    with backward, and below stage 3 one of weights (`runtime/zero/stage_1_and_2.py`,
    `runtime/zero/stage3.py`)."""
    if not any(name in settings for name in _BUCKETS):
        return {}
    stage = WHOLE_OR_NONE.read(settings.get(_ZERO_STAGE, 0))
    if stage == 0:
        return {}
    reduced, gathered = (NUMBER.read(settings.get(name, _USUAL_BUCKET)) for name in _BUCKETS)
    if reduced < 0 or gathered < 0:
        raise BadValue(f"must be at least 0, got {min(reduced, gathered):g}")
    dtype, _ = _half({name: value for name, value in settings.items() if name in _HALVES})
    if stage == 3:
        # Weights of stage 3 are gathered parameter by parameter, not into a bucket.
        elements = reduced
    else:
        overlaps = FLAG.read(settings.get(_OVERLAP, False))
        # A bucket fills while the one before it is being reduced.
        elements = (2 if overlaps else 1) * reduced + gathered
    return {"bucket_bytes": elements * (4.0 if dtype == "fp32" else 2.0)}


_SEQUENCE: Final = "sequence_parallel_size"
"""Ranks that share a sequence by heads (DeepSpeed 0.17,
`runtime/sequence_parallel/ulysses_sp.py`)."""


def _sequence(settings: Mapping[str, Any]) -> Fields:
    ranks = WHOLE.read(settings[_SEQUENCE])
    return {"cp": ranks, "cp_kind": "ulysses"} if ranks > 1 else {}


_SECONDARY_RANKS: Final = "zero_optimization.zero_hpz_partition_size"
_SECONDARY: Final = (
    _SECONDARY_RANKS,
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_quantized_nontrainable_weights",
)
"""Keys of ZeRO++."""


def _secondary(settings: Mapping[str, Any]) -> Fields:
    """Secondary shards of ZeRO++, and a doubt about its quantised messages."""
    fields: Fields = {}
    # hpZ keeps a second 16-bit copy of the weights, sharded over the ranks of a node (ZeRO++, arXiv
    # 2306.10209).
    ranks = WHOLE_OR_NONE.read(settings.get(_SECONDARY_RANKS, 1))
    if ranks > 1:
        fields["secondary_shards"] = ranks
    quantized = [name.rpartition(".")[2] for name in _SECONDARY[1:] if settings.get(name) is True]
    if quantized:
        fields["doubt.quantized"] = (
            f"the layout may be wrong: {' and '.join(quantized)} communicates fewer than the 16 bits per "
            "element that are predicted"
        )
    return fields


def _write_offload(fields: Fields) -> Mapping[str, Any]:
    # DeepSpeed offloads weights only together with the optimizer: each choice adds a key to the one
    # before.
    n_keys = {"none": 0, "optimizer": 1, "weights": 2}
    return dict.fromkeys(_OFFLOADS[: n_keys[fields["offload_states"]]], "cpu")


def _shards(settings: Mapping[str, Any]) -> Fields:
    """Ranks of a sharding group in MiCS (deepspeed/runtime/zero/mics.py); -1 if all ranks form one
    group."""
    ranks = settings[_SHARDS]
    return {} if ranks == -1 else {"shard_ranks": WHOLE.read(ranks)}


def _write_shards(fields: Fields) -> Mapping[str, Any]:
    copies = fields["replicate"]
    return {} if copies == 1 else {_SHARDS: fields["dp"] // copies}


def _accumulation(fields: Fields) -> Mapping[str, Any]:
    total = fields.get("global_batch")
    if not total or total % (fields["micro_batch"] * fields["dp"]):
        return {}
    return {"gradient_accumulation_steps": total // (fields["micro_batch"] * fields["dp"])}


DEEPSPEED: Final = LaunchFormat(
    name="deepspeed",
    syntax="json",
    frameworks=("deepspeed",),
    marks=(
        "zero_optimization.*",
        "zero_optimization",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
    ),
    table=(
        # Any two of batch, micro-batch and accumulation determine the third
        # (deepspeed/runtime/config.py, `_set_batch_related_parameters`).
        key("train_batch_size", "global_batch"),
        key("train_micro_batch_size_per_gpu", "micro_batch"),
        key("gradient_accumulation_steps", "grad_accum", default=1, write=_accumulation),
        key("tensor_parallel.autotp_size", "tp", default=1),
        Rule(keys=(_SEQUENCE,), read=_sequence, fields=("cp",)),
        # ZeRO (deepspeed/runtime/zero/config.py): stage and overlap, states off the device, ZeRO++,
        # buffers, MiCS.
        Rule(
            keys=(*_STAGE, *_HALVES), read=_overlap, write=_write_overlap, auto_keys=tuple(_HALVES)
        ),
        Rule(keys=(*_OLD_OFFLOADS, _STAGE[0]), read=_old_offload),
        Rule(keys=(*_OFFLOADS, _STAGE[0]), read=_offload, write=_write_offload),
        Rule(keys=(_SHARE_ON_HOST,), read=_partial_offload),
        Rule(keys=_SECONDARY, read=_secondary),
        Rule(
            keys=(*_BUCKETS, _ZERO_STAGE, _OVERLAP, *_HALVES),
            read=_buckets,
            auto_keys=tuple(_HALVES),
        ),
        Rule(keys=(_SHARDS,), read=_shards, write=_write_shards),
        Rule(
            keys=tuple(_HALVES),
            read=_dtype,
            write=_write_dtype,
            defaults={"dtype": "fp32"},
            auto_keys=tuple(_HALVES),
        ),
        # Gradients are added up in the type of the weights unless `data_types` says another.
        key(
            "data_types.grad_accum_dtype",
            "grad_dtype",
            words({"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}),
        ),
        Rule(keys=("optimizer.type", *_NARROW), read=_optimizer, write=_write_optimizer),
        Rule(keys=(_NARROW_MASTERS,), read=_narrow_masters),
        Rule(keys=(_AUTOCAST, _AUTOCAST_DTYPE), read=_autocast, fields=("dtype",)),
    ),
    harmless=(
        # Numbers of optimizer and loss scaling.
        "optimizer.params.*",
        "scheduler.*",
        "steps_per_print",
        "wall_clock_breakdown",
        "gradient_clipping",
        "prescale_gradients",
        "gradient_predivide_factor",
        # Not all of them: a misspelt switch (`enable`) leaves the precision open.
        "fp16.*loss_scale*",
        "fp16.*scale_power",
        "fp16.hysteresis",
        "fp16.consecutive_hysteresis",
        "fp16.auto_cast",
        "fp16.opt_level",
        "bf16.immediate_grad_update",
        "bf16.check_grad_overflow",
        "amp.*",
        "zero_allow_untested_optimizer",
        # Logs and profilers.
        "dump_state",
        "tensorboard.*",
        "wandb.*",
        "csv_monitor.*",
        "comet.*",
        "flops_profiler.*",
        "comms_logger.*",
        # Buffers of ZeRO that cost memory.
        "zero_optimization.contiguous_gradients",
        "zero_optimization.sub_group_size",
        "zero_optimization.reduce_scatter",
        "zero_optimization.stage3_max_*",
        "zero_optimization.allgather_partitions",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.offload_*",
        "checkpoint.*",
        "aio.*",
        "seed",
        "zero_force_ds_cpu_optimizer",
    ),
    limits={
        "dtype": "it states bf16, fp16 or fp32",
        "pp": "a DeepSpeed pipeline is built in the training script, not in this file",
        "cp": "sequence parallelism is built in the training script, not in this file",
        "ep": "expert groups are built in the training script, not in this file",
        "vpp": "it has no virtual stages",
        "zero": "its BF16 optimizer always shards optimizer states; use dtype=fp16 to avoid that",
        "recompute": "the training script decides on activation checkpointing",
        "recompute_full_layers": "the training script decides on activation checkpointing",
        "sequence_parallel": "AutoTP does not shard norms",
        "overlap_param_gather": "prefetching can only be set with ZeRO stage 3",
        "prefetch": "it prefetches a number of parameters, not of layers",
    },
    in_script={
        "recompute": (
            "switch activation checkpointing on in the training script (gradient_checkpointing_enable(), or "
            "--gradient_checkpointing of Hugging Face's Trainer)"
        ),
        "pp": "build the model as a deepspeed.pipe.PipelineModule of this many stages in the training script",
        "ep": "build expert layers as deepspeed.moe.layer.MoE with this ep_size in the training script",
    },
)
