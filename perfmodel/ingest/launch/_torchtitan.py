"""torchtitan's TOML (`torchtitan/config/job_config.py`), of 2024 (`[experimental]`) to 2025."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._llm_foundry import fsdp_offload, offloads_to_host
from perfmodel.ingest.launch._model import catalog_model, shape
from perfmodel.ingest.launch._table import (
    FLAG,
    TEXT,
    WHOLE,
    BadValue,
    Fields,
    Rule,
    key,
    layers_per_stage,
    read_only,
    stated_value,
    words,
)
from perfmodel.ingest.launch._torchtitan_precision import (
    FLOAT8_OPTIONS,
    FLOAT8_SWITCHES,
    PLAIN_OPTIMIZER,
    RECOMPUTE,
    dtype_of,
    early_step,
    optimizer_of,
    recompute_of,
    write_dtype,
    write_recompute,
)
from perfmodel.spec.notation import schedule_and_drains

SCHEDULES: Final = {
    "1F1B": ("1f1b", 1),
    "GPipe": ("gpipe", 1),
    "Interleaved1F1B": ("interleaved", 2),
    "LoopedBFS": ("breadth-first", 2),
    "ZBVZeroBubble": ("zb-v", 1),
    "DualPipeV": ("dualpipe-v", 1),
}
"""Names in `torch.distributed.pipelining` -> perfmodel's names, with the default number of virtual
stages."""
_FAMILIES: Final = {
    "llama3": "llama3-",
    "deepseek_v3": "deepseek-v3-",
    "qwen3": "qwen3-",
    "llama2": "llama2-",
    "gpt_oss": "gpt-oss-",
}
_FLAVORS: Final = {
    ("llama3", "405B"): "llama3.1-405b",
    ("llama3", "1B"): "llama3.2-1b",
    ("llama3", "3B"): "llama3.2-3b",
    ("llama3", "debugmodel"): "torchtitan-debugmodel",
    ("llama4", "17bx16e"): "llama-4-scout",
    ("llama4", "17bx128e"): "llama-4-maverick",
    # the sizes of its smaller flavors are those of DeepSeek-V2
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
}
"""Flavors whose name in the catalog is not family and size."""
_TITAN: Final = "parallelism."
_ON_HOST: Final = "training.enable_cpu_offload"
_ONE_DEGREE: Final = "training.data_parallel_degree"
_ONE_TYPE: Final = "training.data_parallel_type"
"""What that degree of 2024 was of: `fsdp`, the default, or `ddp`."""


def _model(settings: Mapping[str, Any]) -> Fields:
    # A file names its model by family and flavor; sizes stand in torchtitan's own code
    # (`models/*/__init__.py`).
    family = TEXT.read(settings.get("model.name", "llama3"))
    # A file around torchtitan's settings (Primus) has a whole name instead.
    if settings.get("model.flavor") == "":
        return {"model": family}
    flavor = TEXT.read(settings.get("model.flavor", "debugmodel"))
    known = _FLAVORS.get((family, flavor))
    name = known or _FAMILIES.get(family, f"{family}-") + flavor
    if known is not None or family in _FAMILIES or catalog_model(name) is None:
        return {"model": name}
    doubt = f"the model may be wrong: torchtitan has no family {family}, so flavor {flavor} is predicted as {name}"
    return {"model": name, "doubt.model": doubt}


def _write_model(fields: Fields) -> Mapping[str, Any]:
    name = fields.get("named")
    # By its sizes first, since a model of the catalog may be a flavor under another name.
    expected = shape(catalog_model(name)) if name else None
    if name is None or expected is None:
        return {}
    for (family, flavor), known in _FLAVORS.items():
        if shape(catalog_model(known)) == expected:
            return {"model.name": family, "model.flavor": flavor}
    for family, start in _FAMILIES.items():
        if name.startswith(start):
            return {"model.name": family, "model.flavor": name.removeprefix(start).upper()}
    return {}


def _stated(settings: Mapping[str, Any], name: str, otherwise: Any) -> Any:
    """A setting of parallelism, whose section was different in 2024."""
    keys = (f"{section}.{name}" for section in ("parallelism", "training", "experimental"))
    return next((settings[key] for key in keys if key in settings), otherwise)


def _data(settings: Mapping[str, Any]) -> Fields:
    """Data parallelism: replicas times shards. Weights are gathered again for backward unless a
    pipeline keeps them or the file says so."""
    # Until August 2024 there was one degree, that of FSDP.
    shards = _stated(settings, "data_parallel_shard_degree", settings.get(_ONE_DEGREE, -1))
    copies = _stated(settings, "data_parallel_replicate_degree", 1)
    # -1 takes the ranks that the other degrees leave over: dp then follows from the number of
    # devices.
    if isinstance(shards, bool) or not isinstance(shards, int) or shards == 0 or shards < -1:
        raise BadValue(f"must be -1 (all that are left) or a degree, got {shards!r}")
    copies = WHOLE.read(copies)
    fields: Fields = {"dp": copies * shards, "replicate": 1} if shards > 0 else {"replicate": 1}
    if words({"fsdp": False, "ddp": True}).read(settings.get(_ONE_TYPE, "fsdp")):
        return fields | {"zero": 0}
    # FSDP shards over context ranks too: without these, one shard is none.
    if shards == 1 and _stated(settings, "context_parallel_degree", 1) == 1:
        return fields | {"zero": 0}
    # By default a pipeline keeps the gathered weights, as it needs them again for every
    # micro-batch.
    no_pipeline = _stated(settings, "pipeline_parallel_degree", 1) == 1
    choices = words({"default": no_pipeline, "always": True, "never": False})
    reshards = choices.read(settings.get("parallelism.fsdp_reshard_after_forward", "default"))
    zero = 3 if reshards else 2
    on_host = FLAG.read(settings.get(_ON_HOST, False))
    return fields | {"zero": zero, "replicate": copies} | fsdp_offload(zero, on_host)


def _write_data(fields: Fields) -> Mapping[str, Any]:
    """Keys of torchtitan's data parallelism for a layout."""
    # torchtitan replicates by DDP or shards all by FSDP
    # (torchtitan/models/llama3/infra/parallelize.py).
    if fields["zero"] == 1:
        raise LaunchFileError(
            "zero=1: torchtitan's FSDP also shards gradients and weights; use zero=0, 2 or 3"
        )
    if fields["zero"] == 0:
        if fields["dp"] * fields["cp"] > 1 and any(fields[name] > 1 for name in ("tp", "pp", "cp")):
            raise LaunchFileError(
                "zero=0: torchtitan's DDP cannot be combined with other parallelism; use zero=2 or 3"
            )
        return {
            "parallelism.data_parallel_replicate_degree": fields["dp"],
            "parallelism.data_parallel_shard_degree": 1,
        }
    return {
        "parallelism.data_parallel_replicate_degree": fields["replicate"],
        "parallelism.data_parallel_shard_degree": fields["dp"] // fields["replicate"],
        "parallelism.fsdp_reshard_after_forward": "always" if fields["zero"] == 3 else "never",
        **({_ON_HOST: True} if offloads_to_host(fields) else {}),
    }


_SCHEDULE_NAME: Final = "parallelism.pipeline_parallel_schedule"
_LAYERS_PER_STAGE: Final = "parallelism.pipeline_parallel_layers_per_stage"
_SCHEDULE: Final = (
    _SCHEDULE_NAME,
    _LAYERS_PER_STAGE,
    "training.pipeline_parallel_schedule",
    "experimental.pipeline_parallel_schedule",
)


def _schedule(settings: Mapping[str, Any]) -> Fields:
    schedule, chunks = words(SCHEDULES).read(
        _stated(settings, "pipeline_parallel_schedule", "1F1B")
    )
    fields: Fields = {"schedule": schedule, "vpp": chunks}
    # Schedules of one stage per rank ignore the layers per stage.
    if chunks > 1 and _LAYERS_PER_STAGE in settings:
        fields["layers_per_chunk"] = WHOLE.read(settings[_LAYERS_PER_STAGE])
    return fields


def _write_schedule(fields: Fields) -> Mapping[str, Any]:
    if fields["pp"] == 1:
        return {}
    one_run, _ = schedule_and_drains(fields["schedule"])
    names = [name for name, (schedule, _) in SCHEDULES.items() if schedule == one_run]
    name = names[0] if names else None
    if name is None:
        raise LaunchFileError(
            f"schedule={fields['schedule']}: torchtitan has {', '.join(SCHEDULES)}; use one of them"
        )
    # A schedule takes its own number of virtual stages where the file does not say how many layers
    # each has.
    if fields["vpp"] in (1, SCHEDULES[name][1]):
        return {_SCHEDULE_NAME: name}
    layers_per_chunk = layers_per_stage(
        fields, f"vpp={fields['vpp']}: torchtitan", "use another vpp"
    )
    return {_SCHEDULE_NAME: name, _LAYERS_PER_STAGE: layers_per_chunk}


_LOCAL_BATCH: Final = "training.local_batch_size"
_GLOBAL_BATCH: Final = "training.global_batch_size"
_PIECE_BATCH: Final = "parallelism.pipeline_parallel_microbatch_size"
_OLD_LOCAL_BATCH: Final = "training.batch_size"
_BATCH: Final = (
    _LOCAL_BATCH,
    _GLOBAL_BATCH,
    _PIECE_BATCH,
    _OLD_LOCAL_BATCH,
)
_ACCUMULATED: Final = "training.gradient_accumulation_steps"
"""Key of forks and launchers (torchft's); torchtitan itself states the global batch."""
_OLD_STAGES: Final = "experimental.pipeline_parallel_degree"
_OLD_SCHEDULE: Final = "experimental.pipeline_parallel_schedule"
_PIECES: Final = (
    "experimental.pipeline_parallel_microbatches",
    "parallelism.pipeline_parallel_microbatches",
    _OLD_STAGES,
    _OLD_SCHEDULE,
)


def _batch(settings: Mapping[str, Any]) -> Fields:
    """Batches of a replica and of a step, and the micro-batches of a pipeline.

    A pipeline has a size of micro-batches since 2025; before, it had their number, by default that
    of all stages (config_manager.py of December 2024).
    """
    fields: Fields = {
        "local_batch": WHOLE.read(settings.get(_LOCAL_BATCH, settings.get(_OLD_LOCAL_BATCH, 8)))
    }
    if settings.get(_GLOBAL_BATCH, -1) != -1:
        fields["global_batch"] = WHOLE.read(settings[_GLOBAL_BATCH])
    elif _ACCUMULATED in settings:
        fields["grad_accum"] = WHOLE.read(settings[_ACCUMULATED])
    if _PIECE_BATCH in settings:
        fields["pipeline_micro_batch"] = WHOLE.read(settings[_PIECE_BATCH])
        return fields
    micro_batches = _pieces(settings)
    if micro_batches > 1:
        if fields["local_batch"] % micro_batches:
            raise BadValue(
                f"a local batch of {fields['local_batch']} cannot be divided into {micro_batches} equal micro-batches"
            )
        fields["pipeline_micro_batch"] = fields["local_batch"] // micro_batches
    return fields


def _pieces(settings: Mapping[str, Any]) -> int:
    """Micro-batches of a local batch in the pipeline, if the file states their number; else 0."""
    stated = next((settings[name] for name in _PIECES[:2] if name in settings), None)
    if stated is not None:
        return WHOLE.read(stated)
    stages = WHOLE.read(
        settings.get(_OLD_STAGES, settings.get("training.pipeline_parallel_degree", 1))
    )
    if stages <= 1:
        return 0
    _, chunks = words(SCHEDULES).read(settings.get(_OLD_SCHEDULE, "1F1B"))
    return stages * chunks


def _write_batch(fields: Fields) -> Mapping[str, Any]:
    total = fields.get("global_batch")
    if fields["pp"] == 1:
        return {_LOCAL_BATCH: fields["micro_batch"], _GLOBAL_BATCH: total or -1}
    if not total:
        raise LaunchFileError(
            "pp > 1: torchtitan states the batch per replica, so the global batch must be given too"
        )
    # Gradients are accumulated over several runs through the pipeline, each of a local batch.
    _, drains = schedule_and_drains(fields["schedule"])
    return {
        _LOCAL_BATCH: total // (fields["dp"] * drains),
        _GLOBAL_BATCH: total,
        _PIECE_BATCH: fields["micro_batch"],
    }


_ROTATION_METHOD: Final = f"{_TITAN}context_parallel_rotate_method"
_ROTATE: Final = (
    _ROTATION_METHOD,
    "experimental.context_parallel_rotate_method",
)
_ROTATION: Final = words({"allgather": "gathered_ring", "alltoall": "ring"})


_COMPILE_SWITCH: Final = "compile.enable"
_COMPILE: Final = (_COMPILE_SWITCH, "training.compile")
_COMPILED: Final = "torchtitan-compile"


def _generation(fields: Fields, entries: Entries) -> str:
    """Framework version of a file: in 2024 degrees were under `[training]` and `[experimental]`."""
    # The two generations differ in defaults of kernels and overlap, and the place of the degrees in
    # a file shows its generation.
    old_keys = (
        "training.tensor_parallel_degree",
        "training.data_parallel_degree",
        "training.pipeline_parallel_degree",
    )
    old = any(name.startswith("experimental.") or name in old_keys for name in entries)
    compiled = any(entries[name].value is True for name in _COMPILE if name in entries)
    name = _COMPILED if compiled else "torchtitan"
    return f"{name}@2024" if old else name


def _compiles(settings: Mapping[str, Any]) -> Fields:
    """Compilation, which only determines the framework (`_generation`)."""
    for value in settings.values():
        FLAG.read(value)
    return {}


def _write_rotation(fields: Fields) -> Mapping[str, Any]:
    """Settings for a rotation method other than the default, all-gather."""
    if fields["cp"] > 1 and fields["cp_kind"] == "ring":
        return {_ROTATION_METHOD: "alltoall"}
    return {}


TORCHTITAN: Final = LaunchFormat(
    name="torchtitan",
    syntax="toml",
    frameworks=("torchtitan", _COMPILED),
    framework=_generation,
    marks=(
        "model.flavor",
        "parallelism.*",
        "training.local_batch_size",
        "activation_checkpoint.mode",
    ),
    table=(
        # torchtitan/config/job_config.py has all of these with a docstring each; `also` are their
        # names before it.
        Rule(keys=("model.name", "model.flavor"), read=_model, write=_write_model),
        key(
            f"{_TITAN}tensor_parallel_degree",
            "tp",
            default=1,
            also=("training.tensor_parallel_degree",),
        ),
        key(
            f"{_TITAN}pipeline_parallel_degree",
            "pp",
            default=1,
            also=("experimental.pipeline_parallel_degree", "training.pipeline_parallel_degree"),
        ),
        key(
            f"{_TITAN}context_parallel_degree",
            "cp",
            default=1,
            also=("experimental.context_parallel_degree", "training.context_parallel_degree"),
        ),
        Rule(
            keys=_ROTATE,
            write=_write_rotation,
            read=lambda settings: {"cp_kind": _ROTATION.read(stated_value(settings))},
        ),
        key(f"{_TITAN}expert_parallel_degree", "ep", default=1),
        key(f"{_TITAN}expert_tensor_parallel_degree", "etp"),
        Rule(
            keys=(
                "parallelism.data_parallel_shard_degree",
                "parallelism.data_parallel_replicate_degree",
                "training.data_parallel_shard_degree",
                "training.data_parallel_replicate_degree",
                _ONE_DEGREE,
                _ONE_TYPE,
                "experimental.data_parallel_shard_degree",
                "experimental.data_parallel_replicate_degree",
                "training.pipeline_parallel_degree",
                "parallelism.fsdp_reshard_after_forward",
                _ON_HOST,
                "parallelism.pipeline_parallel_degree",
                "experimental.pipeline_parallel_degree",
                "parallelism.context_parallel_degree",
                "training.context_parallel_degree",
                "experimental.context_parallel_degree",
            ),
            read=_data,
            write=_write_data,
        ),
        Rule(keys=_SCHEDULE, read=_schedule, write=_write_schedule, defaults={"schedule": "1f1b"}),
        Rule(
            keys=_COMPILE,
            read=_compiles,
            write=lambda fields: (
                {_COMPILE_SWITCH: True} if fields.get("framework") == _COMPILED else {}
            ),
        ),
        Rule(
            keys=(*_BATCH, *_PIECES, _ACCUMULATED, "training.pipeline_parallel_degree"),
            read=_batch,
            write=_write_batch,
            defaults={"local_batch": 8, "pipeline_micro_batch": 1},
        ),
        key("training.seq_len", "seq_len", default=2048),
        Rule(
            keys=(
                "training.mixed_precision_param",
                "model.converters",
                "training.fp8_linear",
                *FLOAT8_SWITCHES,
                *FLOAT8_OPTIONS,
            ),
            read=dtype_of,
            write=write_dtype,
            defaults={"dtype": "bf16"},
        ),
        # fully_shard reduces gradients in this type, whatever the type of the products.
        read_only(
            "training.mixed_precision_reduce",
            "grad_dtype",
            words({"float32": "fp32", "bfloat16": "bf16"}),
        ),
        Rule(
            keys=("lora.rank", "lora.alpha"),
            fields=("adapter_rank",),
            read=lambda settings: {
                "frozen": True,
                "adapter_rank": WHOLE.read(settings.get("lora.rank", 8)),
            },
        ),
        # `selective_ac_option` is "2" where nobody sets it (torchtitan config/job_config.py).
        Rule(
            keys=RECOMPUTE,
            read=recompute_of,
            write=write_recompute,
            defaults={"selective_every": 2},
        ),
        Rule(keys=("optimizer.name", "training.dtype"), read=optimizer_of, fields=("optimizer",)),
        Rule(keys=("optimizer.early_step_in_backward",), read=early_step),
        # No key of torchtitan's own: `_hook_file` writes it for configurations whose loss is a
        # class.
        read_only("loss.chunked", "chunked_loss", FLAG),
        key(
            f"{_TITAN}enable_async_tensor_parallel",
            "tp_overlap",
            FLAG,
            also=("experimental.enable_async_tensor_parallel",),
        ),
    ),
    always={"sequence_parallel": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    harmless=(
        # Tables without settings of a step: logs, learning rates, checkpoints, timeouts, and
        # recipes of quantized products.
        "job.*",
        "profiling.*",
        "metrics.*",
        *(f"optimizer.{name}" for name in PLAIN_OPTIMIZER),
        "lr_scheduler.*",
        "checkpoint.*",
        "comm.*",
        "validation.*",
        "memory_estimation.*",
        "float8.*",
        "mx.*",
        "quantize.*",
        # Data, lengths of the run and seeds.
        "training.dataset*",
        "training.max_norm",
        "training.steps",
        "training.warmup_steps",
        "training.seed",
        "training.deterministic",
        "training.gc_*",
        "model.hf_assets_path",
        "model.norm_type",
        "model.tokenizer_path",
        "model.print_after_conversion",
        "experimental.custom_*",
        "parallelism.disable_loss_parallel",
        "debug.*",
        "activation_checkpoint.early_stop",
        "compile.*",
    ),
    limits={
        "dtype": "it trains in bf16, fp32 or fp8",
        "sequence_parallel": "its tensor parallelism always shards norms",
        "overlap_grad_reduce": "FSDP and DDP always overlap gradient reductions with the backward pass",
        "overlap_param_gather": "FSDP always prefetches",
        "vpp": "only looped schedules have virtual stages",
        "recompute_full_layers": "it recomputes every n-th layer",
        "partition": "it has no key for the layers of each stage",
        "offload": "it has no key for activations in host memory",
        "prefetch": "FSDP prefetches exactly one block ahead",
        "order": "its mesh order is fixed: tp innermost, then cp, dp, pp",
    },
)
