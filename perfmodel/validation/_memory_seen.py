"""Predicted peak memory as a source's counter sees it."""

from perfmodel.prediction import Framework, Prediction
from perfmodel.spec import Device, Transformer
from perfmodel.validation._case_rows import Case
from perfmodel.validation._memory_facts import Counter, memory_facts

FRAGMENTATION = 0.15
"""Share of reserved bytes that holds no tensor, assumed: as much as GMLake takes off torch's caching allocator's
fragmentation, in the mean over eight language models (Guo et al. 2024, arXiv 2401.08156, abstract), which says nothing
of what is left. Weights, gradients and optimizer states are allocated once and fit their segments; activations and
workspaces of many sizes leave the holes."""
_WORKSPACES = 2
"""Handles of cuBLAS, one of the thread that runs forward and one of autograd's."""
_WORKSPACE_BYTES = {"Hopper": 32 * 2**20, "Blackwell": 32 * 2**20}
_OLDER_WORKSPACE_BYTES = 8.125 * 2**20
"""What torch allocates for each handle, by architecture (its notes on CUDA semantics, cuBLAS workspaces)."""


def counter_of(source: str, memory_kind: str) -> Counter:
    """What a memory figure counts, by the framework's reports or the words of the table."""
    stated = memory_facts(source).counter
    if stated is not None:
        return stated
    if "reserved" in memory_kind:
        return "reserved"
    return "allocated" if "torch" in memory_kind or "allocated" in memory_kind else "device"


def seen_bytes(prediction: Prediction, case: Case, framework: Framework, source: str, memory_kind: str) -> float:
    """Peak memory as a source's counter sees it, on the rank that it watches."""
    counter, facts = counter_of(source, memory_kind), memory_facts(source)
    stages = prediction.memory_per_stage[: 1 if facts.first_rank else None]
    least = framework.context_bytes if counter == "device" else workspace_bytes(case.cluster.device)
    share = 0.0 if counter == "allocated" or facts.planned else FRAGMENTATION / (1 - FRAGMENTATION)
    outputs = output_bytes(case) if facts.keeps_outputs else 0.0
    transient = [stage.activations + stage.buffers - framework.context_bytes + outputs for stage in stages]
    settled = [stage.weights + stage.gradients + stage.optimizer for stage in stages]
    return least + max(held + (1 + share) * moving for held, moving in zip(settled, transient, strict=True))


def workspace_bytes(device: Device) -> float:
    """Library buffers that torch's allocator holds, and so its counters."""
    return _WORKSPACES * _WORKSPACE_BYTES.get(device.architecture, _OLDER_WORKSPACE_BYTES)


def output_bytes(case: Case) -> float:
    """16-bit outputs of the first stage for all micro-batches in flight under 1F1B."""
    model, layout = case.model, case.layout
    if layout.pp == 1 or not isinstance(model, Transformer):
        return 0.0
    tokens = layout.micro_batch * case.job.seq_len / (layout.tp if layout.sequence_parallel else 1)
    return 2.0 * tokens * model.hidden * min(layout.pp, case.job.num_microbatches(layout))
