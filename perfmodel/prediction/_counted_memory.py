"""Peak memory as the counters of allocators and drivers show it."""

from collections.abc import Sequence
from typing import Final, get_args

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


def counted_memory(problem: StepProblem, layout: Layout, stages: Sequence[StageMemory]) -> dict[str, float]:
    """Peak bytes by counter (`perfmodel.spec.MemoryCounter`), on the rank that the framework reports.

    Args:
        stages: memory of every pipeline rank of the layout.
    """
    framework = problem.framework
    outputs = output_bytes(problem, layout) if framework.keeps_outputs else 0.0
    watched = stages[: 1 if framework.reports_first_stage else None]
    transient = [stage.activations + stage.buffers - framework.context_bytes + outputs for stage in watched]
    settled = [stage.weights + stage.gradients + stage.optimizer for stage in watched]
    found: dict[str, float] = {}
    for counter in get_args(MemoryCounter):
        least = framework.context_bytes if counter == "device" else workspace_bytes(problem.cluster.device)
        whole = counter == "allocated" or framework.planned_memory
        share = 0.0 if whole else FRAGMENTATION / (1 - FRAGMENTATION)
        peak = max(held + (1 + share) * moving for held, moving in zip(settled, transient, strict=True))
        found[counter] = least + peak
    return found


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
