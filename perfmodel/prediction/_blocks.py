"""Times of a model's blocks on one device: the bottom of DistSim's hierarchy (section 4.3).

A block (embedding, layer, head) of one shard is a handful of deduplicated events; its phases are
dot products of event counts and event times. Everything above works on these few numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.cost import EventTimes
from perfmodel.ops import Attention, KernelOp, Op
from perfmodel.prediction._phases import N_PHASES, RECOMPUTE_MODES, Phase
from perfmodel.prediction._placement import Network
from perfmodel.prediction._stages import is_layer
from perfmodel.spec import Framework, Job
from perfmodel.workload import BlockOps, Comm


@dataclass(frozen=True, eq=False)
class ShardBlocks:
    """Counted events, parameters and bytes of all block kinds of one shard, before events are timed."""

    blocks: tuple[BlockOps, ...]
    repeats: tuple[int, ...]
    """How often each block occurs, in model order."""
    ops: tuple[Op, ...]
    """Distinct events of the shard."""
    groups: tuple[str, ...]
    """Process group of each event that is a collective, "" for kernels."""
    counts: Float[np.ndarray, "blocks phases ops"]
    overlappable: Bool[np.ndarray, " ops"]
    """Collectives that are independent of the kernels beside them."""
    beside_attention: Bool[np.ndarray, " ops"]
    """Collectives that can run beside attention kernels, and no others."""

    @cached_property
    def layers(self) -> Bool[np.ndarray, " blocks"]:
        """Which blocks are layers, that is, can be recomputed."""
        return np.array([is_layer(block) for block in self.blocks])

    @cached_property
    def kinds(self) -> tuple[tuple[bool, int], ...]:
        """(is a layer, repeats) in model order: what a division into stages depends on."""
        return tuple(zip(self.layers.tolist(), self.repeats, strict=True))

    @property
    def pairs(self) -> list[tuple[BlockOps, int]]:
        """(block, repeats) in model order."""
        return list(zip(self.blocks, self.repeats, strict=True))

    def dense_params(self, pipelined: bool) -> Float[np.ndarray, " blocks"]:
        """Dense parameters that one device holds of each block.

        A tied head holds its own copy of the embedding only where the two are on different stages.
        """
        tied = [b.tied_params if pipelined else 0 for b in self.blocks]
        return np.array([b.params - b.expert_params for b in self.blocks], float) + np.array(tied, float)

    @cached_property
    def expert_params(self) -> Float[np.ndarray, " blocks"]:
        """Expert parameters that one device holds of each block."""
        return np.array([b.expert_params for b in self.blocks], float)

    @cached_property
    def activation_bytes(self) -> Float[np.ndarray, "blocks modes"]:
        """Bytes saved for backward per micro-batch under each of `RECOMPUTE_MODES`."""
        return np.array([[getattr(b.activation_bytes, mode) for mode in RECOMPUTE_MODES] for b in self.blocks], float)

    @cached_property
    def workspace_bytes(self) -> Float[np.ndarray, " blocks"]:
        return np.array([b.workspace_bytes for b in self.blocks], float)

    @property
    def tied_params(self) -> int:
        """Parameters that first and last stage share."""
        return max(b.tied_params for b in self.blocks)


@dataclass(frozen=True, eq=False)
class BlockTimes(ShardBlocks):
    """Event counts and phase times of all block kinds of one shard."""

    times: EventTimes
    gap_s: Float[np.ndarray, "blocks phases"]
    """Idle time between kernels, and launch-bound excess over the kernels' own time."""
    exposed: Float[np.ndarray, " ops"]
    """Share of each event's time that is not hidden behind others (1 for kernels)."""
    ring_steps: int
    """Parts that `tp_overlap` cuts collectives into that depend on the kernels beside them; 1 for none."""

    @cached_property
    def event_s(self) -> Float[np.ndarray, "blocks phases ops"]:
        """Exposed seconds of every event in every phase."""
        return self.counts * (self.times.time_s * self.exposed)

    @cached_property
    def phase_s(self) -> Float[np.ndarray, "blocks phases"]:
        """Seconds of every phase of every block."""
        return self.event_s.sum(axis=2) + self.gap_s

    @cached_property
    def overlapped_phase_s(self) -> Float[np.ndarray, "blocks phases"]:
        """Seconds of every phase where the pass runs beside another: collectives hide behind compute, or
        compute behind them (DeepSeek-V3, section 3.2.1; both passes of a pair taken to be alike)."""
        collective_s = self.event_s[:, :, [group != "" for group in self.groups]].sum(axis=2)
        return np.maximum(self.phase_s - collective_s, collective_s)


def count_events(blocks: Sequence[tuple[BlockOps, int]], networks: Mapping[str, Network], job: Job) -> ShardBlocks:
    """Count and deduplicate the events of `blocks`, whose process groups lie on `networks`."""
    index: dict[tuple[Op, str, bool, bool], int] = {}
    entries: list[tuple[int, int, int, float]] = []

    def add(block: int, phase: Phase, op: Op, count: float, comm: Comm | None = None) -> None:
        key = (op, comm.group, comm.overlappable, comm.beside_attention) if comm else (op, "", False, False)
        where = index.setdefault(key, len(index))
        entries.append((block, phase, where, count))

    for b, (block, _) in enumerate(blocks):
        for phase, kernels_of_phase, comms in _phases(block):
            if job.frozen and phase == Phase.BACKWARD_WEIGHT:
                continue
            for op, count in kernels_of_phase:
                add(b, phase, op, count)
            for comm in comms:
                network = networks[comm.group]
                if network.ranks > 1:
                    event = network.collective(comm.collective, comm.bytes, job.dtype, comm.choice)
                    add(b, phase, event, comm.count, comm)

    counts = np.zeros((len(blocks), N_PHASES, len(index)))
    rows = np.array(entries).reshape(-1, 4)
    np.add.at(counts, tuple(rows[:, :3].astype(int).T), rows[:, 3])
    return ShardBlocks(
        blocks=tuple(b for b, _ in blocks),
        repeats=tuple(n for _, n in blocks),
        ops=tuple(op for op, *_ in index),
        groups=tuple(group for _, group, *_ in index),
        counts=counts,
        overlappable=np.array([flag for *_, flag, _ in index], bool),
        beside_attention=np.array([flag for *_, flag in index], bool),
    )


def time_blocks(blocks: ShardBlocks, times: EventTimes, framework: Framework, ring_steps: int) -> BlockTimes:
    """The times of blocks whose events take `times`; see `BlockTimes.ring_steps`."""
    gap_s, exposed = _idle_and_exposed(blocks, times, ring_steps, framework)
    return BlockTimes(
        **{f.name: getattr(blocks, f.name) for f in fields(blocks)},
        times=times,
        gap_s=gap_s,
        exposed=exposed,
        ring_steps=ring_steps,
    )


def _phases(block: BlockOps) -> tuple[tuple[Phase, tuple[tuple[KernelOp, int], ...], tuple[Comm, ...]], ...]:
    return (
        (Phase.FORWARD, block.forward, block.forward_comm),
        (Phase.BACKWARD_INPUT, block.backward_input, block.backward_comm),
        (Phase.BACKWARD_WEIGHT, block.backward_weight, ()),
        (Phase.RECOMPUTE_SELECTIVE, block.recompute_selective, block.recompute_selective_comm),
        (Phase.RECOMPUTE_FULL, block.recompute_full, block.recompute_full_comm),
    )


def _idle_and_exposed(
    blocks: ShardBlocks, times: EventTimes, ring_steps: int, framework: Framework
) -> tuple[Float[np.ndarray, "blocks phases"], Float[np.ndarray, " ops"]]:
    """`gap_s` and `exposed` of a table whose events take so long."""
    launches, busy_s = blocks.counts.sum(axis=2), blocks.counts @ times.time_s
    issued = launches.copy()
    issued[blocks.layers, Phase.FORWARD] += framework.forward_bookkeeping
    issued[blocks.layers, Phase.BACKWARD_INPUT] += framework.backward_bookkeeping
    # the device waits for the host where launching takes longer than what is launched runs
    gap_s = np.maximum(launches * framework.kernel_gap_s, issued * framework.issue_s - busy_s)
    is_kernel = np.array([group == "" for group in blocks.groups], bool)
    exposed = _exposed(blocks, times.time_s, is_kernel, ring_steps)
    return gap_s, exposed + framework.tp_overlap_loss * (1 - exposed)


def _exposed(
    blocks: ShardBlocks, time_s: Float[np.ndarray, " ops"], is_kernel: Bool[np.ndarray, " ops"], ring_steps: int
) -> Float[np.ndarray, " ops"]:
    """Share of each event's time that cannot hide behind the kernels beside it.

    An overlappable collective is independent of the kernels of its phase (in backward also of the weight
    gradients) and hides as far as these last: exposed = max(0, 1 - compute / communication); context parallelism's
    hides behind attention alone. Under `tp_overlap` the others are cut into n = tp ring steps that feed, or are fed by,
    slices of a product, of which all but one can hide: exposed = max(1/n, 1 - compute (1 - 1/n) / communication).
    """
    exposed = np.ones(len(time_s))
    seconds = blocks.counts * time_s
    attention = np.array([isinstance(op, Attention) for op in blocks.ops], bool)
    others = ~is_kernel & ~blocks.overlappable & ~blocks.beside_attention
    for group, beside, first in (
        (blocks.overlappable, is_kernel, 0.0), (blocks.beside_attention, attention, 0.0),
        (others, is_kernel, 1 / ring_steps),
    ):  # fmt: skip
        if not group.any() or first == 1:
            continue
        compute_s = seconds[:, :, beside].sum(axis=2)
        compute_s[:, Phase.BACKWARD_INPUT] += compute_s[:, Phase.BACKWARD_WEIGHT]
        comm_s = seconds[:, :, group].sum(axis=2)
        used = comm_s > 0
        share = np.maximum(1 - compute_s[used] * (1 - first) / comm_s[used], first)
        # one share per event: that of the phases where it weighs most
        exposed[group] = np.average(share, weights=comm_s[used])
    return exposed
