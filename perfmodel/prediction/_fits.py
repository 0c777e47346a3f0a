"""Memory of a layout's ranks, independent of times: whether it fits, and the figures that the
framework's reports and nvidia-smi would show."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.prediction._compose import LayoutBatch, layout_batches
from perfmodel.prediction._memory import CATEGORIES, MemoryBatch, rank_memory
from perfmodel.prediction._memory_inputs import RankBlocks, Sharding, communicators
from perfmodel.prediction._node_kinds import kind_of_ranks
from perfmodel.prediction._prediction import MemoryAccount, StageMemory
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import program_live
from perfmodel.prediction._zero import checkpoint_bytes
from perfmodel.prediction.blocks import shard_events
from perfmodel.schedule import weight_versions
from perfmodel.schedule.memory import LiveState
from perfmodel.spec import Device, Layout, Transformer
from perfmodel.spec.framework_facts import MemoryCounter
from perfmodel.units import GIB

_SHARDING_STAGE: Final = {"weights": 3, "gradients": 2, "optimizer": 1}
"""First ZeRO stage that shards a category."""


def bundle_memory(problem: StepProblem, batch: LayoutBatch) -> MemoryBatch:
    """Memory of a batch's layouts."""
    return _batch_memory(problem, batch, program_live(problem.setting, batch.spec))


def _batch_memory(problem: StepProblem, batch: LayoutBatch, live: LiveState) -> MemoryBatch:
    """Memory of a batch's layouts, whose program keeps `live` alive on every rank."""
    # Each kind of nodes as if all ranks were on it, and then every rank from its own kind.
    if problem.kinds:
        kind_of_rank = kind_of_ranks(problem, batch.layouts[0])
        memory_on_kind = {}
        for kind in np.unique(kind_of_rank).tolist():
            memory_on_kind[kind] = _batch_memory(problem.kinds[kind], batch, live)
        return _on_ranks(memory_on_kind, kind_of_rank)
    setting = problem.setting
    ranks = RankBlocks.of(batch.program.counts.sum(axis=1), batch.program.full.sum(axis=1), live)
    return rank_memory(ranks, batch.bytes, Sharding.of(batch.layouts, setting.job), setting)


def _on_ranks(
    memory_on_kind: Mapping[int, MemoryBatch], kind_of_rank: Int[np.ndarray, " ranks"]
) -> MemoryBatch:
    """Memory of ranks on several kinds of nodes, from that of all ranks on each kind."""

    def chosen(name: str) -> Float[np.ndarray, "layouts ranks"]:
        bytes_on_kind = {}
        for kind, memory in memory_on_kind.items():
            bytes_on_kind[kind] = np.broadcast_to(getattr(memory, name), memory.total.shape)
        columns = [bytes_on_kind[kind][:, rank] for rank, kind in enumerate(kind_of_rank.tolist())]
        return np.stack(columns, axis=1)

    return MemoryBatch(**{name: chosen(name) for name in CATEGORIES})


def rank_devices(problem: StepProblem, layout: Layout) -> tuple[Device, ...]:
    """The device of each pipeline rank, for a layout with its kinds of nodes filled in."""
    if not problem.kinds:
        return (problem.cluster.device,) * layout.pp
    return tuple(
        problem.kinds[kind].cluster.device for kind in kind_of_ranks(problem, layout).tolist()
    )


def usable_of_ranks(problem: StepProblem, layout: Layout) -> Float[np.ndarray, " ranks"]:
    """Memory that a layout may use on the device of each pipeline rank."""
    devices = rank_devices(problem, layout)
    return np.array(
        [problem.framework.memory.usable_bytes(device.memory_bytes) for device in devices]
    )


def fitting(problem: StepProblem, layouts: Sequence[Layout]) -> Bool[np.ndarray, " layouts"]:
    """Whether each layout fits into memory on the device of each rank.

    Raises:
        LayoutError: the model does not divide as a layout asks.
    """
    fits = np.zeros(len(layouts), bool)
    for batch in layout_batches(problem, layouts):
        usable = usable_of_ranks(problem, batch.layouts[0])
        fits[list(batch.lanes)] = (bundle_memory(problem, batch).total <= usable).all(axis=-1)
    return fits


def rank_checkpoint_bytes(problem: StepProblem, layout: Layout) -> Float[np.ndarray, " ranks"]:
    """Bytes of distinct weights and optimizer states on the devices of each pipeline rank.

    Together they are `checkpoint_bytes` of the model.

    Raises:
        LayoutError: the model does not divide as the layout asks.
    """
    (batch,) = layout_batches(problem, [layout])
    blocks = batch.tables[0]
    spec = batch.spec

    # Parameters of whole blocks. Those that every tensor-parallel rank holds (norms) count once,
    # which the shards do not tell, unless the model is cut into the same blocks without sharding.
    params = (
        layout.tp * blocks.dense_params(layout.pp > 1)
        + layout.ep * layout.expert_tp * blocks.expert_params
    )
    unsharded = shard_events(problem.setting, Layout())
    if unsharded.kinds == blocks.kinds:
        params = unsharded.dense_params(layout.pp > 1) + unsharded.expert_params

    # If several ranks hold a stage, each writes its part of it.
    stage_params = batch.program.counts.sum(axis=1) @ params
    ranks_of_stage = np.bincount(spec.stage_map.ravel(), minlength=spec.n_stages)
    rank_params = (stage_params / ranks_of_stage)[spec.stage_map].sum(axis=1)
    return rank_params / rank_params.sum() * checkpoint_bytes(problem.model, problem.job)


def version_difference(problem: StepProblem, layout: Layout) -> int:
    """Weight staleness in updates, counted from 1 for synchronous pipelines: the number of
    mini-batches in flight (TiMePReSt, section 4.4)."""
    (batch,) = layout_batches(problem, [layout])
    spec = batch.spec
    if spec.steps == 1:
        return 1
    versions = weight_versions(spec.build_schedule(), spec.scheduler.weights)
    return max(1, int(versions.steady_difference.max()))


def peak_memory(
    problem: StepProblem, layouts: Sequence[Layout]
) -> tuple[Float[np.ndarray, " layouts"], list[str]]:
    """Peak bytes of each layout, and their largest category."""
    peak = np.zeros(len(layouts))
    largest = [""] * len(layouts)
    for batch in layout_batches(problem, layouts):
        memory = bundle_memory(problem, batch)
        peak[list(batch.lanes)] = memory.peak
        for lane, category in zip(batch.lanes, memory.largest.tolist(), strict=True):
            largest[lane] = CATEGORIES[category]
    return peak, largest


def stage_memory(
    problem: StepProblem, batch: LayoutBatch, live: LiveState
) -> tuple[StageMemory, ...]:
    """Memory of every pipeline rank of a batch's first layout.

    Args:
        live: activations and weights that the batch's program keeps alive (`program_live`).
    """
    memory = _batch_memory(problem, batch, live)
    by_category = {}
    for name in CATEGORIES:
        by_category[name] = np.broadcast_to(getattr(memory, name), memory.total.shape)[0].tolist()
    stages = []
    for rank in range(memory.total.shape[-1]):
        stages.append(
            StageMemory(**{name: rank_bytes[rank] for name, rank_bytes in by_category.items()})
        )
    return tuple(stages)


class StepMemory(NamedTuple):
    """Memory of a layout's ranks, and whether it fits."""

    account: MemoryAccount
    """Needed and reported memory of every rank."""
    reasons: tuple[str, ...]
    """Reasons why it does not fit; empty if it does."""
    fits_probability: float
    """Probability that the fullest rank fits into its device."""


def step_memory(problem: StepProblem, batch: LayoutBatch, live: LiveState) -> StepMemory:
    """Memory of a batch's first layout, and whether it fits.

    Args:
        live: activations and weights that the batch's program keeps alive (`program_live`).
    """
    layout = batch.layouts[0]
    stages = stage_memory(problem, batch, live)

    # With different devices, the rank that fills the largest share of its device decides.
    usable = usable_of_ranks(problem, layout)
    binding = max(range(len(stages)), key=lambda rank: stages[rank].peak / usable[rank])

    # Memory as every counter shows it; the needed memory where the framework reports none.
    by_counter = counted_stages(problem, layout, stages, get_args(MemoryCounter))
    counter = problem.framework.memory.memory_counter
    n_reported = reported_stages(problem, layout)
    peak_of_counter = {}
    for name, counted in by_counter.items():
        peak_of_counter[name] = max(stage.peak for stage in counted[:n_reported])
    account = MemoryAccount(
        per_stage=stages if counter is None else by_counter[counter],
        needed_per_stage=stages,
        capacity_bytes=rank_devices(problem, layout)[binding].memory_bytes,
        needed_bytes=stages[binding].peak,
        counted_bytes=peak_of_counter,
        reported_stages=n_reported,
        saved_bytes_per_stage=tuple(batch.saved_bytes[0].tolist()),
    )
    reasons = (
        ()
        if stages[binding].peak <= usable[binding]
        else fit_reasons(layout, stages, usable, binding)
    )
    fullest_share = _largest_share(problem, layout, by_counter["device"])
    return StepMemory(account, reasons, _probability(problem, fullest_share))


def needed_memory(problem: StepProblem, layout: Layout) -> tuple[StageMemory, ...]:
    """Memory that each pipeline rank of a layout needs.

    Raises:
        LayoutError: the model does not divide as the layout asks.
    """
    (batch,) = layout_batches(problem, [layout])
    return stage_memory(problem, batch, program_live(problem.setting, batch.spec))


def fit_reasons(
    layout: Layout,
    memory: Sequence[StageMemory],
    usable_bytes: Float[np.ndarray, " ranks"],
    fullest_rank: int,
) -> tuple[str, ...]:
    """Reason why a layout does not fit: the fullest rank, its largest part, and a remedy.

    Args:
        usable_bytes: usable memory of every rank.
        fullest_rank: the rank that fits least.
    """
    usable = usable_bytes[fullest_rank]
    by_category = {
        name: n_bytes for name, n_bytes in memory[fullest_rank].to_dict().items() if name != "peak"
    }
    largest = max(by_category, key=by_category.__getitem__)
    return (
        f"out of memory: pipeline rank {fullest_rank} needs {memory[fullest_rank].peak / GIB:.1f} GiB "
        f"of {usable / GIB:.1f} GiB usable; "
        f"the largest part, {largest}, takes {by_category[largest] / GIB:.1f} GiB ({_remedy(layout, largest)})",
    )


def _remedy(layout: Layout, category: str) -> str:
    """Advice to shrink a category of memory by settings that the layout does not have yet."""
    if category == "activations":
        remedies = [
            ("recompute=full", layout.recompute != "full"),
            ("a smaller micro_batch", layout.micro_batch > 1),
            ("sequence_parallel=true", layout.tp > 1 and not layout.sequence_parallel),
            ("a larger tp", True),
            ("a larger cp", True),
        ]
    elif category in _SHARDING_STAGE:
        stage = _SHARDING_STAGE[category]
        remedies = [
            (f"zero={stage}" + (" or higher" if stage < 3 else ""), layout.zero < stage),
            ("a smaller replicate", layout.zero >= stage and layout.replicate > 1),
            ("a larger tp or pp", True),
            ("offload_states=optimizer", layout.offload_states == "none"),
        ]
    else:
        remedies = [("a smaller micro_batch", layout.micro_batch > 1), ("a larger tp", True)]
    *others, last = [remedy for remedy, applies in remedies if applies]
    return f"use {', '.join(others)} or {last}" if others else f"use {last}"


FRAGMENTATION: Final = 0.15
"""Share of reserved bytes that holds no tensor, assumed: as much as GMLake takes off torch's
caching allocator's fragmentation, in the mean over eight language models (Guo et al. 2024, arXiv
2401.08156, abstract), which says nothing of what is left. Weights, gradients and optimizer states
are allocated once and fit their segments; activations and workspaces of many sizes leave the
holes."""
_WORKSPACES: Final = 2
"""Handles of cuBLAS, one of the thread that runs forward and one of autograd's."""
_WORKSPACE_BYTES: Final = {"Hopper": 32 * 2**20, "Blackwell": 32 * 2**20}
"""Bytes that torch allocates for each handle, by architecture (its notes on CUDA semantics, cuBLAS
workspaces)."""
_OLDER_WORKSPACE_BYTES: Final = 8.125 * 2**20
"""Bytes that torch allocates for each handle on older architectures."""


class _BesideTensors(NamedTuple):
    """Bytes that counters of memory show, or not, besides the tensors that a step needs."""

    context_bytes: float
    """Context of the driver and communicators, which `StageMemory.buffers` has."""
    outputs_bytes: float
    """Outputs that the framework keeps."""
    received_bytes: list[float]
    """Buffers of every pipeline rank that stay from step to step, for what it receives."""
    workspace_bytes: list[float]
    """Workspaces of libraries in the allocator of every pipeline rank."""

    @classmethod
    def of(cls, problem: StepProblem, layout: Layout) -> "_BesideTensors":
        """What a framework holds under a layout."""
        memory = problem.framework.memory
        received_bytes = [0.0] * layout.pp
        if memory.receives_apart:
            received_bytes = receive_buffer_bytes(problem, layout).tolist()
        return cls(
            context_bytes=memory.context_bytes + memory.communicator_bytes * communicators(layout),
            outputs_bytes=output_bytes(problem, layout) if memory.keeps_outputs else 0.0,
            received_bytes=received_bytes,
            workspace_bytes=[workspace_bytes(device) for device in rank_devices(problem, layout)],
        )


def counted_stages(
    problem: StepProblem,
    layout: Layout,
    stages: Sequence[StageMemory],
    counters: Sequence[MemoryCounter],
) -> dict[MemoryCounter, tuple[StageMemory, ...]]:
    """Memory of pipeline ranks as each of some counters shows it.

    Args:
        stages: memory of every pipeline rank: tensors, and the context in `buffers`.
    """
    beside = _BesideTensors.of(problem, layout)
    is_planned = problem.framework.memory.planned_memory
    by_counter: dict[MemoryCounter, tuple[StageMemory, ...]] = {}
    for counter in counters:
        # Holes between tensors are reserved, not allocated; programs whose memory is planned have
        # none.
        has_holes = counter in ("reserved", "device") and not is_planned
        hole_share = FRAGMENTATION / (1 - FRAGMENTATION) if has_holes else 0.0
        counted_of_ranks = []
        for rank, stage in enumerate(stages):
            # The driver (nvidia-smi) counts the context, torch's allocator the libraries'
            # workspaces. Receive buffers stay from step to step.
            is_device = counter == "device"
            permanent = beside.context_bytes if is_device else beside.workspace_bytes[rank]
            permanent += beside.received_bytes[rank]
            transient = stage.buffers - beside.context_bytes + beside.outputs_bytes
            # Between steps no activation is alive.
            is_resting = counter == "resting"
            counted = StageMemory(
                weights=stage.weights,
                gradients=stage.gradients,
                optimizer=stage.optimizer,
                activations=0.0 if is_resting else stage.activations,
                buffers=permanent if is_resting else transient + permanent,
                allocator=hole_share * (stage.activations + transient),
            )
            counted_of_ranks.append(counted)
        by_counter[counter] = tuple(counted_of_ranks)
    return by_counter


def fullness(problem: StepProblem, layout: Layout, stages: Sequence[StageMemory]) -> float:
    """The largest share of device memory that nvidia-smi would show for a pipeline rank; may exceed
    1."""
    by_counter = counted_stages(problem, layout, stages, ["device"])
    return _largest_share(problem, layout, by_counter["device"])


def _largest_share(problem: StepProblem, layout: Layout, counted: Sequence[StageMemory]) -> float:
    """The largest share of its device's memory that a pipeline rank takes."""
    on_devices = zip(counted, rank_devices(problem, layout), strict=True)
    return max(stage.peak / device.memory_bytes for stage, device in on_devices)


def fit_probability(problem: StepProblem, layout: Layout, stages: Sequence[StageMemory]) -> float:
    """Probability that the fullest rank fits into its device, by the memory that nvidia-smi would
    show."""
    return _probability(problem, fullness(problem, layout, stages))


def _probability(problem: StepProblem, fullest_share: float) -> float:
    """Probability that a rank fits into its device of which it is told to take this share."""
    return problem.site.memory_spread().probability(fullest_share, 1.0)


def fit_probabilities(problem: StepProblem, layouts: Sequence[Layout]) -> list[float]:
    """Probability that each layout fits into memory, as in `explain`.

    Raises:
        LayoutError: the model does not divide as a layout asks.
    """
    probabilities = []
    for layout in layouts:
        (batch,) = layout_batches(problem, [layout])
        stages = stage_memory(problem, batch, program_live(problem.setting, batch.spec))
        probabilities.append(fit_probability(problem, batch.layouts[0], stages))
    return probabilities


def reported_stages(problem: StepProblem, layout: Layout) -> int:
    """Number of pipeline ranks, from the first, covered by the framework's memory reports
    (`Framework.reported_ranks`)."""
    reported = problem.framework.memory.reported_ranks
    if reported == "fullest":
        return layout.pp
    if reported == "first_rank":
        return 1
    # The stages that have a device in the first node.
    devices_of_stage = layout.devices // layout.pp
    return min(layout.pp, -(-problem.cluster.devices_per_node // devices_of_stage))


def workspace_bytes(device: Device) -> float:
    """Library buffers counted by torch's allocator."""
    return _WORKSPACES * _WORKSPACE_BYTES.get(device.architecture, _OLDER_WORKSPACE_BYTES)


def output_bytes(problem: StepProblem, layout: Layout) -> float:
    """16-bit outputs of the first stage for all micro-batches in flight under 1F1B."""
    return boundary_bytes(problem, layout) * min(layout.pp, problem.job.num_microbatches(layout))


def boundary_bytes(problem: StepProblem, layout: Layout) -> float:
    """Bytes of the 16-bit tensor that a stage sends to the next one for each micro-batch; 0 without
    a pipeline."""
    model = problem.model
    if layout.pp == 1 or not isinstance(model, Transformer):
        return 0.0
    tokens = layout.micro_batch * problem.job.tokens_per_sequence / layout.cp
    tokens /= layout.tp if layout.effective_sequence_parallel else 1
    return 2.0 * tokens * model.hidden


def receive_buffer_bytes(problem: StepProblem, layout: Layout) -> Float[np.ndarray, " ranks"]:
    """Bytes of the buffers that each pipeline rank receives into, beside the inputs of
    micro-batches in flight, which are counted among activations.

    torch makes them before the first step, one for each micro-batch of a step: for the input of
    every stage but the first, and for the gradient of the output of every stage but the last
    (PyTorch 2.13 torch/distributed/pipelining/stage.py, `_setup_forward_recv_info` and
    `_create_grad_recv_info`).
    """
    (batch,) = layout_batches(problem, [layout])
    live = program_live(problem.setting, batch.spec)
    micro_batches = problem.job.num_microbatches(layout)
    inputs_apart = np.where(live.stage > 0, np.maximum(micro_batches - live.activations, 0.0), 0.0)
    gradients = np.where(live.stage < batch.spec.n_stages - 1, micro_batches, 0.0)
    return boundary_bytes(problem, layout) * (inputs_apart + gradients).sum(axis=1)
