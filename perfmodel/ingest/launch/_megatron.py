"""Argument lists and shell scripts of Megatron-LM and Megatron-Core
(`megatron/training/arguments.py`, its --help)."""

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, Final

from perfmodel.ingest.launch._arguments import LAUNCHING, SCRIPT
from perfmodel.ingest.launch._deepspeed import stage_as_it_runs
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._format import LaunchFormat, undefined
from perfmodel.ingest.launch._megatron_forks import FORKS
from perfmodel.ingest.launch._megatron_model import KEYS_OF_DEEPSPEED, MODEL, argument, of_deepspeed
from perfmodel.ingest.launch._megatron_names import HARMLESS, SWITCHES
from perfmodel.ingest.launch._megatron_settings import (
    LIMITS,
    METHOD_RULE,
    chunk_settings,
    context_rule,
    dispatch_rules,
    graph_rule,
    modules_rule,
    nodes_of,
    offloaded_layers_rule,
    partition_rule,
    pipeline_layout_rule,
    recompute_of,
    recompute_rule,
    require_no_pipeline,
    strategy_of_zero,
    zero_of,
)
from perfmodel.ingest.launch._table import (
    OPTIMIZER,
    SWITCH,
    WHOLE_OR_NONE,
    Fields,
    Rule,
    degree,
    key,
    read_only,
    words,
    write_only,
)
from perfmodel.ingest.launch.shell import NUMBERED, gpus_per_node

SCHEDULED: Final = (*NUMBERED, "gres-gpus")
"""Entries for numbers requested from a scheduler, `sbatch-NAME`."""


def scheduled_settings(job: Mapping[str, int]) -> dict[str, int]:
    """Numbers that a job requests from its scheduler, as the settings that `world_of` reads."""
    return {f"sbatch-{name}": number for name, number in job.items() if name in SCHEDULED}


def world_of(settings: Mapping[str, Any]) -> Fields:
    """Devices of the job: from the launcher (torchrun, DeepSpeed's, Accelerate's), else from the
    scheduler."""
    # The program that starts the processes knows their number best: first torchrun's and
    # DeepSpeed's flags per node, then launchers that count all processes, and last the job's
    # request to its scheduler.
    scheduled = {}
    for name in SCHEDULED:
        if str(settings.get(f"sbatch-{name}", "")).isdecimal():
            scheduled[name] = int(settings[f"sbatch-{name}"])
    for name in ("nnodes", "num-nodes"):
        # One node would be a silent guess: scripts leave it to the cluster because there are
        # several.
        if undefined(settings.get(name)) and "nodes" not in scheduled:
            unknown = f"the number of devices is not known: {name} is {settings[name]}, which the script does not define"
            return {"note.devices": f"{unknown}; give --devices"}
    nodes = _number(settings, "nnodes", "num-nodes") or scheduled.get("nodes")
    per_node = _number(settings, "nproc-per-node", "num-gpus")
    # A hostfile lists the nodes; it lies on the cluster, so that one node is all that can be said.
    if per_node is not None and nodes is None and settings.get("hostfile"):
        hostfile = settings["hostfile"]
        guess = (
            f"devices={per_node} is a guess: the nodes are listed in {hostfile}, which perfmodel does not read; "
            "give --devices"
        )
        return {"devices": per_node, "note.devices": guess}
    if per_node is not None:
        return {"devices": (nodes or 1) * per_node}
    processes = _number(settings, "num-processes", "worker-num")
    if processes is not None:
        return {"devices": processes}
    # Without a launcher the scheduler starts a process for every device, unless it starts one alone
    # on each node.
    if scheduled.get("ntasks", 1) > (nodes or 1):
        return {"devices": scheduled["ntasks"]}
    tasks = scheduled.get("ntasks-per-node", 1)
    if tasks > 1:
        return {"devices": (nodes or 1) * tasks}
    gpus = gpus_per_node(scheduled)
    if gpus is not None:
        return {"devices": (nodes or 1) * gpus}
    if "ntasks-per-node" in scheduled or "ntasks" in scheduled:
        guess = "one device per node is a guess from the number of tasks; give --devices"
        return {"devices": nodes or 1, "note.devices": guess}
    return {}


def _number(settings: Mapping[str, Any], *names: str) -> int | None:
    """The first of several arguments that is a number; for a range of nodes (`1:4`) its largest."""
    for name in names:
        match = re.fullmatch(r"(?:\d+:)?(\d+)", str(settings.get(name, "")))
        if match:
            return int(match[1])
    return None


def _write_world(fields: Fields) -> Mapping[str, Any]:
    nodes, per_node = nodes_of(fields)
    return {"nproc-per-node": per_node, "nnodes": nodes}


def _zero(settings: Mapping[str, Any]) -> Fields:
    # bf16 is passed on, since DeepSpeed's bf16 optimizer shards another stage
    # than the one asked for. Megatron-DeepSpeed.
    if "zero-stage" in settings:
        return stage_as_it_runs(
            WHOLE_OR_NONE.read(settings["zero-stage"]), "bf16" if settings.get("bf16") else ""
        )
    # The element type is a key of this rule because of DeepSpeed. By itself it does not imply
    # sharding.
    if not set(settings) - {"bf16"}:
        return {}
    # PyTorch's fully_shard, which Megatron-Core applies to gradients and weights alike.
    if settings.get("use-torch-fsdp2"):
        return {"zero": 3}
    sharded = any(settings.get(name) for name in ("use-megatron-fsdp", "use-custom-fsdp"))
    distributed = settings.get("use-distributed-optimizer") is True
    return zero_of(sharded, distributed, settings.get("data-parallel-sharding-strategy"))


def _write_zero(fields: Fields) -> Mapping[str, Any]:
    require_no_pipeline(fields)
    if fields["zero"] < 2:
        return {"use-distributed-optimizer": True if fields["zero"] else None}
    return {
        "use-distributed-optimizer": True,
        "use-megatron-fsdp": True,
        "data-parallel-sharding-strategy": strategy_of_zero(fields["zero"]),
    }


_RECOMPUTE: Final = ("recompute-granularity", "recompute-method", "recompute-num-layers")
_RECOMPUTE_BEFORE_CORE: Final = ("checkpoint-activations", "activations-checkpoint-method")
_BEFORE_CORE: Final = (
    *_RECOMPUTE_BEFORE_CORE,
    "use-legacy-models",
    "use-flash-attn",
    "model-parallel-size",
    "batch-size",
    "DDP-impl",
    "no-contiguous-buffers-in-local-ddp",
)
"""Arguments that only the generations before Core have, or that select their layers."""
_OF_CORE: Final = (
    "use-mcore-models",
    "context-parallel-size",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "multi-latent-attention",
    "mtp-num-layers",
    "attention-backend",
    "use-dist-ckpt",
    "ckpt-format",
    "use-megatron-fsdp",
    "use-custom-fsdp",
    "use-torch-fsdp2",
    "overlap-moe-expert-parallel-comm",
    "cuda-graph-impl",
    "moe-*",
)
"""Arguments (patterns) that only Core has, or that select its layers."""
_OF_TRANSFORMER_ENGINE: Final = ("tp-comm-overlap*", "fp8-format", "fp8-recipe", "fp8-param-gather")
"""Arguments (patterns) that need the layers of Transformer Engine, which Core has by default."""
_OLD_RECOMPUTE: Final = (
    *_RECOMPUTE_BEFORE_CORE,
    "recompute-activations",
    "activations-checkpoint-granularity",
)
"""Names of recompute arguments in earlier versions, some of which Core still accepts."""


def _recompute(settings: Mapping[str, Any]) -> Fields:
    # `--recompute-activations` is a short form of selective, and `--checkpoint-activations` that of
    # full recompute before Core; a method without a granularity is of that time too.
    if settings.get("recompute-activations"):
        return {"recompute": "selective"}
    if settings.get("checkpoint-activations") or (
        "activations-checkpoint-method" in settings
        and "activations-checkpoint-granularity" not in settings
    ):
        return {"recompute": "full"}
    granularity = settings.get(
        "recompute-granularity", settings.get("activations-checkpoint-granularity")
    )
    method = settings.get("recompute-method", settings.get("activations-checkpoint-method"))
    return recompute_of(granularity, method, settings.get("recompute-num-layers"))


def _dtype(settings: Mapping[str, Any]) -> Fields:
    # With FP8 products the other tensors are in 16 bits, so that `--bf16` stands beside it and is
    # no second answer.
    if settings.get("fp8-format") or settings.get("fp8-hybrid"):
        return {"dtype": "fp8"}
    return {"dtype": next((name for name in ("bf16", "fp16") if settings.get(name)), "fp32")}


def _write_dtype(fields: Fields) -> Mapping[str, Any]:
    dtype = fields.get("dtype")
    if dtype == "fp8":
        return {"bf16": True, "fp8-format": "hybrid"}
    return {dtype: True} if dtype in ("bf16", "fp16") else {}


def _write_chunks(fields: Fields) -> Mapping[str, Any]:
    layers, chunks = chunk_settings(fields)
    return {
        "num-layers-per-virtual-pipeline-stage": layers,
        "num-virtual-stages-per-pipeline-rank": chunks,
    }


_FLASH: Final = (
    "use-flash-attn",
    "use-flash-attn-v1",
    "use-flash-attn-v2",
    "use-flash-attn-triton",
    "use-flash-attn-builder",
)


def _attention(settings: Mapping[str, Any]) -> Fields:
    if "attention-backend" in settings:
        # Core's `auto`, `fused` and `flash` all run one fused kernel; they differ in the library
        # that it comes from.
        return {"flash_attention": settings["attention-backend"] not in ("unfused", "local")}
    # Before `--attention-backend`, Transformer Engine chose a fused kernel by itself, and only the
    # local layers needed to be asked for one. Megatron-DeepSpeed has no others.
    is_requested = any(settings.get(name) for name in _FLASH)
    is_local = of_deepspeed(settings) or settings.get("transformer-impl") == "local"
    return {"flash_attention": is_requested or not is_local}


def _write_attention(fields: Fields) -> Mapping[str, Any]:
    """Arguments for attention that is not the default: fused by Transformer Engine in Core, unfused
    before it."""
    fused = fields.get("flash_attention")
    framework = fields.get("framework")
    if framework == "megatron-core":
        return {"attention-backend": "unfused"} if fused is False else {}
    local = {"transformer-impl": "local"} if framework == "megatron-lm" else {}
    return local | ({"use-flash-attn": True} if fused else {})


def _framework(fields: Fields, entries: Entries) -> str:
    """The generation of a script: before Core if it selects the older layers and nothing selects
    Core's.

    `--use-flash-attn` is of both: Core takes it, and ignores it where Transformer Engine has an
    attention of its own.
    """
    # The most particular signs first: DeepSpeed's flags, then flags that choose
    # layers, then flags that only one generation has.
    if of_deepspeed(entries):
        return "megatron-deepspeed"
    implementation = entries["transformer-impl"].value if "transformer-impl" in entries else None
    is_set = [
        name for name, entry in entries.items() if entry.value not in (False, "False", "false")
    ]
    if "use-legacy-models" in is_set:
        return "megatron-lm"
    core_flags = _OF_CORE if implementation == "local" else (*_OF_CORE, *_OF_TRANSFORMER_ENGINE)
    has_core_setting = any(
        fnmatchcase(name, pattern) for name, pattern in product(is_set, core_flags)
    )
    if implementation not in (None, "local") or has_core_setting:
        return "megatron-core"
    is_older = implementation == "local" or any(name in is_set for name in _BEFORE_CORE)
    return "megatron-lm" if is_older else "megatron-core"


_FP8_RECIPES: Final = {
    "delayed": "delayed",
    "tensorwise": "current",
    "mxfp8": "mxfp8",
    "blockwise": "blockwise",
}


_TABLE: Final = (
    Rule(
        keys=(*LAUNCHING, *(f"sbatch-{name}" for name in SCHEDULED)),
        read=world_of,
        write=_write_world,
        fields=("devices",),
        optional=("hostfile",),
    ),
    key("tensor-model-parallel-size", "tp", default=1, also=("model-parallel-size",)),
    key("pipeline-model-parallel-size", "pp", default=1),
    degree("context-parallel-size", "cp"),
    degree("expert-model-parallel-size", "ep"),
    key("expert-tensor-parallel-size", "etp"),
    context_rule("cp-comm-type"),
    key("overlap-moe-expert-parallel-comm", "ep_overlap", SWITCH, also=("moe-fb-overlap",)),
    *dispatch_rules(argument),
    graph_rule(argument),
    key("num-layers-per-virtual-pipeline-stage", "layers_per_chunk", write=_write_chunks),
    read_only("num-virtual-stages-per-pipeline-rank", "vpp"),
    key("micro-batch-size", "micro_batch", also=("batch-size",)),
    key("global-batch-size", "global_batch"),
    read_only("gradient-accumulation-steps", "grad_accum"),
    key("seq-length", "seq_len"),
    write_only("max-position-embeddings", lambda fields: fields.get("seq_len") or None),
    Rule(
        keys=(
            "use-distributed-optimizer",
            "use-megatron-fsdp",
            "use-custom-fsdp",
            "use-torch-fsdp2",
            "zero-stage",
            "data-parallel-sharding-strategy",
            "bf16",
        ),
        read=_zero,
        write=_write_zero,
    ),
    replace(recompute_rule(_RECOMPUTE), keys=(*_RECOMPUTE, *_OLD_RECOMPUTE), read=_recompute),
    modules_rule("recompute-modules", " ".join),
    offloaded_layers_rule(argument, switch=False),
    read_only("fp8-param-gather", "fp8_params", SWITCH),
    key("sequence-parallel", "sequence_parallel", SWITCH),
    key("overlap-grad-reduce", "overlap_grad_reduce", SWITCH),
    key("overlap-param-gather", "overlap_param_gather", SWITCH),
    degree("num-distributed-optimizer-instances", "replicate"),
    key("tp-comm-overlap", "tp_overlap", SWITCH),
    partition_rule(
        ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
        "num-layers",
        "pipeline-model-parallel-size",
    ),
    pipeline_layout_rule("pipeline-model-parallel-layout", "pipeline-model-parallel-size"),
    METHOD_RULE,
    key("use-tp-pp-dp-mapping", "order", words({True: "tp-cp-pp-ep-dp"})),
    Rule(
        keys=("bf16", "fp16", "fp8-format", "fp8-hybrid"),
        read=_dtype,
        write=_write_dtype,
        defaults={"dtype": "fp32"},
    ),
    Rule(
        keys=("attention-backend", *_FLASH, "transformer-impl", *KEYS_OF_DEEPSPEED),
        read=_attention,
        write=_write_attention,
    ),
    read_only("fp8-recipe", "fp8_recipe", words(_FP8_RECIPES)),
    read_only("use-transformer-engine-op-fuser", "operation_fuser", SWITCH),
    key("grad-reduce-in-bf16", "grad_dtype", words({True: "bf16"})),
    key("accumulate-allreduce-grads-in-fp32", "grad_dtype", words({True: "fp32"})),
    key("optimizer", "optimizer", OPTIMIZER),
    # Forks that are started by MPI.
    read_only("world-size", "devices"),
    *FORKS,
    *(replace(rule, fields=rule.fields or ("model.",)) for rule in MODEL),
)

MEGATRON: Final = LaunchFormat(
    name="megatron",
    syntax="arguments",
    switches=SWITCHES,
    frameworks=("megatron-core", "megatron-lm", "megatron-deepspeed"),
    marks=(
        "tensor-model-parallel-size",
        "pipeline-model-parallel-size",
        "num-attention-heads",
        "micro-batch-size",
    ),
    table=_TABLE,
    framework=_framework,
    harmless=HARMLESS,
    limits=LIMITS
    | {
        "schedule": "Megatron runs 1f1b, and interleaved 1f1b with vpp > 1",
        "offload": "it has no flag for all activations in host memory",
        "order": "ranks are numbered tp-cp-ep-dp-pp or, with --use-tp-pp-dp-mapping, tp-cp-ep-pp-dp",
    },
)

_OF_OTHERS_TOO: Final = "micro-batch-size"
"""A mark that programs of every kind have."""
_SIGNS: Final = frozenset(
    (
        "global-batch-size",
        "seq-length",
        "num-layers",
        "hidden-size",
        "train-iters",
        "train-samples",
        "sequence-parallel",
        "recompute-granularity",
        "context-parallel-size",
        "expert-model-parallel-size",
        "use-distributed-optimizer",
        "use-mcore-models",
    )
)
"""Further arguments that tell Megatron from programs that only have a micro-batch as it does."""


def is_of_megatron(entries: Entries) -> bool:
    """Whether arguments are Megatron's: more than a size of micro-batches, which other programs
    have too."""
    if not MEGATRON.recognises(entries):
        return False
    marks = set(MEGATRON.marks) & set(entries)
    program = entries.get(SCRIPT)
    is_named = program is not None and "megatron" in str(program.value).lower()
    return marks != {_OF_OTHERS_TOO} or is_named or bool(_SIGNS & set(entries))
