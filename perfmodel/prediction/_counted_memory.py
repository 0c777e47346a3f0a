"""Peak memory as the counters of allocators and drivers show it: what a framework's own report says, and nvidia-smi."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, get_args

from perfmodel.prediction._fits import rank_devices
from perfmodel.prediction._memory import communicators
from perfmodel.prediction._prediction import StageMemory
from perfmodel.prediction._problem import StepProblem
from perfmodel.spec import Device, Layout, MemoryCounter, Transformer

FRAGMENTATION: Final = 0.15
"""Share of reserved bytes that holds no tensor, assumed: as much as GMLake takes off torch's caching allocator's
fragmentation, in the mean over eight language models (Guo et al. 2024, arXiv 2401.08156, abstract), which says nothing
of what is left. Weights, gradients and optimizer states are allocated once and fit their segments; activations and
workspaces of many sizes leave the holes."""
_WORKSPACES: Final = 2
"""Handles of cuBLAS, one of the thread that runs forward and one of autograd's."""
_WORKSPACE_BYTES: Final = {"Hopper": 32 * 2**20, "Blackwell": 32 * 2**20}
_OLDER_WORKSPACE_BYTES: Final = 8.125 * 2**20
"""What torch allocates for each handle, by architecture (its notes on CUDA semantics, cuBLAS workspaces)."""


def reported_stages(problem: StepProblem, layout: Layout, stages: Sequence[StageMemory]) -> tuple[StageMemory, ...]:
    """Memory of every pipeline rank as the framework's own reports count it; as it is needed where it has none."""
    counter = problem.framework.memory_counter
    return tuple(stages) if counter is None else counted_stages(problem, layout, stages, counter)


def counted_stages(
    problem: StepProblem, layout: Layout, stages: Sequence[StageMemory], counter: MemoryCounter
) -> tuple[StageMemory, ...]:
    """Memory of pipeline ranks as a counter shows it.

    Args:
        stages: what every pipeline rank needs: tensors, and the context in `buffers`.
    """
    framework = problem.framework
    outputs = output_bytes(problem, layout) if framework.keeps_outputs else 0.0
    workspaces = [workspace_bytes(device) for device in rank_devices(problem, layout)]
    context = framework.context_bytes + framework.communicator_bytes * communicators(layout)
    holes = counter not in ("allocated", "resting") and not framework.planned_memory
    share = FRAGMENTATION / (1 - FRAGMENTATION) if holes else 0.0
    found = []
    for stage, workspace in zip(stages, workspaces[: len(stages)], strict=True):
        unmoved = context if counter == "device" else workspace
        moving = stage.buffers - context + outputs
        counted = replace(stage, buffers=moving + unmoved, allocator=share * (stage.activations + moving))
        found.append(replace(counted, activations=0.0, buffers=workspace) if counter == "resting" else counted)
    return tuple(found)


def counted_memory(problem: StepProblem, layout: Layout, stages: Sequence[StageMemory]) -> dict[str, float]:
    """Peak bytes by counter (`perfmodel.spec.MemoryCounter`), on the rank that the framework reports.

    Args:
        stages: what every pipeline rank of the layout needs.
    """
    watched = stages[:1] if problem.framework.reports_first_stage else stages
    counters: tuple[MemoryCounter, ...] = get_args(MemoryCounter)
    return {name: max(s.peak for s in counted_stages(problem, layout, watched, name)) for name in counters}


def workspace_bytes(device: Device) -> float:
    """Library buffers that torch's allocator holds, and so its counters."""
    return _WORKSPACES * _WORKSPACE_BYTES.get(device.architecture, _OLDER_WORKSPACE_BYTES)


def output_bytes(problem: StepProblem, layout: Layout) -> float:
    """16-bit outputs of the first stage for all micro-batches in flight under 1F1B."""
    model = problem.model
    if layout.pp == 1 or not isinstance(model, Transformer):
        return 0.0
    tokens = layout.micro_batch * problem.job.seq_len / (layout.tp if layout.effective_sequence_parallel else 1)
    return 2.0 * tokens * model.hidden * min(layout.pp, problem.job.num_microbatches(layout))
