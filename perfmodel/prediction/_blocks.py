"""Times of a model's blocks on one device: the bottom of DistSim's hierarchy (section 4.3).

A block (embedding, layer, head) of one shard is a handful of deduplicated events; its phases are
dot products of event counts and event times. Everything above works on these few numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.cost import EventTimes
from perfmodel.ops import Attention, Collective, Gemm, KernelOp, Op
from perfmodel.prediction._contention import held_share, lost_shares
from perfmodel.prediction._phases import N_PHASES, RECOMPUTE_MODES, Phase
from perfmodel.prediction._placement import Network
from perfmodel.prediction._stages import is_layer
from perfmodel.spec import Device, Framework, Job
from perfmodel.workload import BlockOps, Comm, is_cast

GRAPH_OPERATORS: Final = 3
"""Operators of a layer's pass that is replayed from a graph: a copy of its input, the launch, and the node of autograd
(Megatron-Core 0.12 megatron/core/transformer/cuda_graphs.py _CudagraphRecordNode, _CudagraphReplayNode; Transformer
Engine's make_graphed_callables). The replay itself takes the host no longer than one operator does."""
COLLECTIVE_CHECK_S: Final = 0.22e-3
"""Host time by which hosts that agree on a collective first hold it up, per rank: torch's `ProcessGroupWrapper` lets
every rank report to the first, which answers each in turn, and passes two records around the ring of ranks, all over
TCP. Measured with two processes on one EPYC host, torch 2.13: 0.44 ms a call more than without."""


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
    launched: Bool[np.ndarray, " ops"]
    """Events launched by themselves: all but casts that no recipe makes kernels of their own, which are part of their
    products' operators."""

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

    def frozen_params(self, pipelined: bool, job: Job) -> Float[np.ndarray, " blocks"]:
        """The part of `dense_params` that has no gradients though the rest has."""
        tied = [b.tied_params if pipelined and job.frozen_embedding else 0 for b in self.blocks]
        return np.array([b.frozen_params for b in self.blocks], float) + np.array(tied, float)

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
    exposed: Float[np.ndarray, "blocks phases ops"]
    """Share of each event's time that is not hidden behind others (1 for kernels)."""
    slowing: Float[np.ndarray, "blocks phases ops"]
    """Share of each collective's time by which the kernels that hide it run longer (`_contention`)."""
    waiting_s: Float[np.ndarray, "blocks phases"]
    """What collectives wait for the slowest of their ranks."""
    held: float
    """Share of the device's multiprocessors that a collective holds (`held_share`)."""
    ring_steps: int
    """Parts that `tp_overlap` cuts collectives into that depend on the kernels beside them; 1 for none."""

    @cached_property
    def event_s(self) -> Float[np.ndarray, "blocks phases ops"]:
        """Exposed seconds of every event in every phase."""
        return self.counts * self.times.time_s * self.exposed

    @cached_property
    def slowing_s(self) -> Float[np.ndarray, "blocks phases ops"]:
        """By how much the collectives of every phase make the kernels that hide them run longer."""
        return self.counts * self.times.time_s * self.slowing

    @cached_property
    def slowed_s(self) -> Float[np.ndarray, "blocks phases"]:
        """By how much the kernels of every phase run longer beside the collectives that they hide."""
        return self.slowing_s.sum(axis=2)

    @cached_property
    def phase_s(self) -> Float[np.ndarray, "blocks phases"]:
        """Seconds of every phase of every block."""
        return self.event_s.sum(axis=2) + self.slowed_s + self.waiting_s + self.gap_s

    @cached_property
    def collective_s(self) -> Float[np.ndarray, "blocks phases"]:
        """Seconds of the collectives that show in every phase."""
        return self.event_s[:, :, [group != "" for group in self.groups]].sum(axis=2)

    @cached_property
    def pair_slowed_s(self) -> Float[np.ndarray, "blocks phases"]:
        """By how much the kernels of a pair of passes run longer beside the collectives of the other."""
        return self.held * np.minimum(self.phase_s - self.collective_s, self.collective_s)

    @cached_property
    def overlapped_phase_s(self) -> Float[np.ndarray, "blocks phases"]:
        """Seconds of every phase where the pass runs beside another: collectives hide behind compute, or
        compute behind them (DeepSeek-V3, section 3.2.1; both passes of a pair taken to be alike)."""
        return np.maximum(self.phase_s - self.collective_s, self.collective_s) + self.pair_slowed_s


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
        launched=np.array([bool(job.fp8_recipe) or not is_cast(op) for op, *_ in index], bool),
    )


def time_blocks(
    blocks: ShardBlocks,
    times: EventTimes,
    framework: Framework,
    device: Device,
    ring_steps: int,
    spread_s: float = 0.0,
    checked: bool = False,
) -> BlockTimes:
    """The times of blocks whose events take `times`.

    A phase takes what its device is busy, kernels that are slowed and collectives that show, with the gaps between
    them; or as long as the host needs to issue it, whichever is longer.

    Args:
        ring_steps: see `BlockTimes.ring_steps`.
        spread_s: of the times at which ranks reach a collective, which waits for the last of n, spread sqrt(2 ln n)
            late (mean of the largest of n normal draws, to first order).
        checked: hosts agree on each collective before they issue it (`Framework.checks_collectives`).
    """
    is_kernel = np.array([group == "" for group in blocks.groups], bool)
    kernels_s = blocks.counts * times.time_s * is_kernel
    launches, issuing_s = blocks.counts @ blocks.launched, _issuing_s(blocks, framework)
    ranks = np.array([op.num_ranks if isinstance(op, Collective) else 1 for op in blocks.ops])
    if checked:
        issuing_s += blocks.counts @ np.where(is_kernel, 0.0, COLLECTIVE_CHECK_S * ranks)
    beside_s = _beside(kernels_s)
    # weight gradients have no collectives of their own
    idle_s = np.maximum(launches * framework.kernel_gap_s, issuing_s - kernels_s.sum(axis=2))[:, Phase.BACKWARD_WEIGHT]
    free_s = beside_s.sum(axis=2)
    free_s[:, Phase.BACKWARD_INPUT] += idle_s
    hidden = _hidden(blocks, times.time_s, beside_s, free_s, ring_steps)
    held = held_share(device, framework)
    lost = beside_s @ lost_shares(blocks.ops, device, held) / np.maximum(free_s, 1e-300)
    slowing = hidden * lost[:, :, None]
    synchronising = ~blocks.overlappable & ~blocks.beside_attention
    if framework.tp_overlap_copies and ring_steps > 1:
        slowing[:, :, synchronising] = 0.0
    exposed = 1 - hidden * (1 - framework.tp_overlap_loss)
    # together no more than not to hide it would cost
    slowing = np.minimum(slowing, 1 - exposed)
    waiting_s = blocks.counts @ np.where(synchronising, spread_s * np.sqrt(2 * np.log(ranks)), 0.0)
    busy_s = (blocks.counts * times.time_s * (exposed + slowing)).sum(axis=2)
    return BlockTimes(
        **{f.name: getattr(blocks, f.name) for f in fields(blocks)},
        times=times,
        gap_s=np.maximum(launches * framework.kernel_gap_s, issuing_s - busy_s),
        exposed=exposed,
        slowing=slowing,
        waiting_s=waiting_s,
        held=held,
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


def _issuing_s(blocks: ShardBlocks, framework: Framework) -> Float[np.ndarray, "blocks phases"]:
    """How long the host needs to issue every phase."""
    issued = blocks.counts @ blocks.launched
    issued[blocks.layers, Phase.FORWARD] += framework.forward_bookkeeping
    issued[blocks.layers, Phase.BACKWARD_INPUT] += framework.backward_bookkeeping
    experts = blocks.expert_params > 0
    issued[experts, Phase.FORWARD] += framework.routing_forward_bookkeeping
    issued[experts, Phase.BACKWARD_INPUT] += framework.routing_backward_bookkeeping
    issued[experts, Phase.RECOMPUTE_FULL] += framework.routing_forward_bookkeeping
    if framework.execution == "layer_graphs":
        issued[blocks.layers] = 0.0
        issued[blocks.layers, Phase.FORWARD] = issued[blocks.layers, Phase.BACKWARD_INPUT] = GRAPH_OPERATORS
    return issued * framework.issue_s


def _beside(kernels_s: Float[np.ndarray, "blocks phases ops"]) -> Float[np.ndarray, "blocks phases ops"]:
    """Seconds of the kernels that run beside the collectives of a phase: its own; in backward also those of the weight
    gradients."""
    beside_s = kernels_s.copy()
    beside_s[:, Phase.BACKWARD_INPUT] += kernels_s[:, Phase.BACKWARD_WEIGHT]
    return beside_s


def _hidden(
    blocks: ShardBlocks,
    time_s: Float[np.ndarray, " ops"],
    beside_s: Float[np.ndarray, "blocks phases ops"],
    free_s: Float[np.ndarray, "blocks phases"],
    ring_steps: int,
) -> Float[np.ndarray, "blocks phases ops"]:
    """Share of each event's time, in every phase of every block, that hides behind the kernels beside it.

    Context parallelism's collectives hide behind attention alone. An overlappable one is independent of the kernels of
    its phase and hides as far as these last: hidden = min(1, compute / communication). For the others see
    `_ring_shares`. No kernel hides two at once: each kind, in this order, hides behind what the ones before it leave,
    so that longer kernels never make a phase shorter.

    Args:
        beside_s: of the kernels beside the collectives of a phase.
        free_s: what those take together, with what the device waits for the host in weight gradients.
    """
    hidden = np.zeros(blocks.counts.shape)
    seconds = blocks.counts * time_s
    is_kernel = np.array([group == "" for group in blocks.groups], bool)
    attention_s = beside_s[:, :, [isinstance(op, Attention) for op in blocks.ops]].sum(axis=2)
    others = ~is_kernel & ~blocks.overlappable & ~blocks.beside_attention
    for group, behind_s, most in (
        (blocks.beside_attention, attention_s, 1.0), (blocks.overlappable, free_s, 1.0),
        (others, free_s, _ring_shares(blocks, time_s, others, ring_steps)),
    ):  # fmt: skip
        comm_s = seconds[:, :, group].sum(axis=2)
        share = np.minimum(most, np.minimum(behind_s, free_s) / np.maximum(comm_s, 1e-300))
        hidden[:, :, group] = share[:, :, None]
        free_s = np.maximum(free_s - share * comm_s, 0.0)
    return hidden


def _ring_shares(
    blocks: ShardBlocks, time_s: Float[np.ndarray, " ops"], others: Bool[np.ndarray, " ops"], ring_steps: int
) -> Float[np.ndarray, "blocks phases"]:
    """Share of the collectives of every phase that hides under `tp_overlap`, where each is cut into n ring steps that
    feed, or are fed by, slices of a product of its own, of which all but one can hide: (1 - 1/n) min(1, product /
    collective).

    Each of a phase's collectives has one product of the phase (Transformer Engine pytorch/module/base.py `add_ub`: a
    buffer for every pair), the longest ones where there are more: what is long enough to hide the gather before a wide
    product does nothing for the sum after a narrow one.
    """
    shares = np.zeros(blocks.counts.shape[:2])
    products = np.array([isinstance(op, Gemm) for op in blocks.ops], bool)
    for at in np.argwhere(blocks.counts[:, :, others].any(axis=2)) if ring_steps > 1 else ():
        counts = blocks.counts[tuple(at)]
        n = int(np.ceil(counts[others].sum()))
        each_s = max(counts[others] @ time_s[others] / n, 1e-300)
        longest_s = np.sort(np.repeat(time_s[products], counts[products].astype(int)))[::-1][:n]
        shares[tuple(at)] = (1 - 1 / ring_steps) * np.minimum(1.0, longest_s / each_s).sum() / n
    return shares
