"""Blocks of models of every kind under every optional feature, kept in `known_blocks.csv`.

For each model: its parameters, the FLOPs of its step and the bytes of its cache; then every block's kernels,
collectives and bytes on one rank, as it is and with one field of the job, of the shard or of the model changed. A
change that is meant to move them is followed by

    PYTHONPATH=tests python tests/workload/known_blocks.py
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from optional_features import other_values
from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.ops import KernelOp
from perfmodel.spec import Job, Layout, Model, Transformer
from perfmodel.workload import BlockOps, Comm, Shard, blocks, layer_cache_bytes, parameters, step_flops

TABLE = Path(__file__).with_suffix(".csv")
MODELS = {
    "llama3-8b": 4,
    "gpt3-1.3b": 2,
    "mixtral-8x7b": 2,
    "deepseek-v3-mtp": 6,
    "gpt-oss-20b": 4,
    "gemma-2-9b": 4,
    "command-r-35b": 2,
    "nemotron-h-8b": 0,
    "qwen3-next-80b-a3b": 0,
    "codestral-mamba-7b": 0,
    "t5-v1.1-base": 0,
    "bert-large": 4,
    "vit-l-16": 4,
    "dit-l-2": 4,
    "resnet-50": 0,
    "vgg-16": 0,
    "mlp-1b": 0,
}
"""Models, and how many layers are left of each; 0: all."""
VARIED = ("llama3-8b", "deepseek-v3-mtp", "mixtral-8x7b")
"""Models that are tried with every change."""
COMBINED = 12
"""Variants of each model with several changes at once."""
LAYOUT = Layout(tp=2, sequence_parallel=True, micro_batch=2)
JOB = Job(global_batch=8, seq_len=1024)
SHAPES = ("tp", "cp", "cp_kind", "cp_balanced", "ep", "etp", "micro_batch", "sequence_parallel", "ep_overlap")
"""Fields of a layout that shapes depend on."""


def changes_of(model: Model) -> Iterator[tuple[str, str, Any]]:
    """Every change of one field: of which record, its name, its value."""
    for name, value in other_values(LAYOUT):
        if name in SHAPES:
            yield "layout", name, value
    for name, value in other_values(JOB):
        yield "job", name, value
    yield "job", "dtype", "fp32"
    yield "job", "dtype", "fp8"
    if isinstance(model, Transformer):
        for name, value in other_values(model):
            yield "model", name, value


def figures(model: Model, layout: Layout, job: Job) -> dict[str, float]:
    """Figures of a model, and of every block of it on one rank, without those that are 0."""
    found: dict[str, float] = {}
    for group in (parameters(model), step_flops(model, job)):
        found |= {field.name: float(getattr(group, field.name)) for field in fields(group)}
    if isinstance(model, Transformer):
        found["cache"] = sum(layer_cache_bytes(model, layout.tp, 1000, 2.0))
    for i, (block, count) in enumerate(blocks(model, job, Shard.of(layout))):
        found[f"{i}.blocks"] = count
        found |= {f"{i}.{name}": value for name, value in _block_figures(block)}
    return {name: value for name, value in found.items() if value}


def _block_figures(block: BlockOps) -> Iterator[tuple[str, float]]:
    """FLOPs, bytes and number of the kernels of each phase, bytes and number of its collectives, and all sizes."""
    for field in fields(block):
        value = getattr(block, field.name)
        if isinstance(value, (int, float)):
            yield field.name, float(value)
        elif field.name == "activation_bytes":
            yield from ((f"keeps.{mode.name}", getattr(value, mode.name)) for mode in fields(value))
        elif field.name.endswith("_comm"):
            yield from _comm_figures(field.name, value)
        elif isinstance(value, tuple):
            yield from _kernel_figures(field.name, value)


def _kernel_figures(phase: str, kernels: Sequence[tuple[KernelOp, int]]) -> Iterator[tuple[str, float]]:
    yield f"{phase}.kernels", float(sum(count for _, count in kernels))
    yield f"{phase}.flops", sum(op.flops * count for op, count in kernels)
    yield f"{phase}.bytes", float(sum(op.bytes * count for op, count in kernels))


def _comm_figures(phase: str, comms: Sequence[Comm]) -> Iterator[tuple[str, float]]:
    yield f"{phase}.bytes", sum(comm.bytes * comm.count for comm in comms)
    yield f"{phase}.number", float(sum(comm.count for comm in comms))
    yield f"{phase}.overlap", sum(comm.bytes * comm.count for comm in comms if comm.overlappable)
    yield f"{phase}.beside", sum(comm.bytes * comm.count for comm in comms if comm.beside_attention)
    yield f"{phase}.follows", sum(comm.bytes * comm.count for comm in comms if comm.follows)


def cases() -> Iterator[StoredCase]:
    """Figures of every model and of its possible variants."""
    for name, layers in MODELS.items():
        model: Any = catalog.model(name)
        if layers:
            model = replace(model, layers=layers)
        layout = LAYOUT if isinstance(model, Transformer) else Layout(micro_batch=2)
        yield StoredCase(name, name, figures(model, layout, JOB))
        changes = list(dict.fromkeys(changes_of(model)))
        if name in VARIED:
            for change in changes:
                yield from _case(name, model, layout, [change])
        generator = random.Random(name)
        for _ in range(COMBINED):
            yield from _case(name, model, layout, generator.sample(changes, 3))


def _case(base: str, model: Any, layout: Layout, changes: Sequence[tuple[str, str, Any]]) -> Iterator[StoredCase]:
    """The figures of a variant, where it is possible."""
    records: dict[str, Any] = {"model": model, "layout": layout, "job": JOB}
    try:
        for record, name, value in changes:
            records[record] = records[record].replace(**{name: value})
        found = figures(**records)
    except PerfModelError:
        return
    yield StoredCase(base, ", ".join(f"{name}={value}" for _, name, value in changes), found)


if __name__ == "__main__":
    write_cases(TABLE, cases())
