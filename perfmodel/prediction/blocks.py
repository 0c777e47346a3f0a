"""A model's blocks on one device, counted and timed: the lowest level of DistSim's hierarchy
(section 4.3).

A block (embedding, layer, head) of one shard is a handful of deduplicated events; its phases are
dot products of event counts and event times. Everything above works on these few numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.catalog import exchange_library
from perfmodel.cost import EventTimes
from perfmodel.display import shorten_reprs
from perfmodel.errors import LayoutError, Reason
from perfmodel.ops import Attention, Collective, Gemm, Op
from perfmodel.prediction._problem import Setting, session_cached
from perfmodel.prediction.overlap import (
    CHANNELS,
    BlockEvents,
    PhaseTimes,
    collective_sm_share,
    lost_shares,
)
from perfmodel.prediction.phases import N_PHASES, RECOMPUTE_MODES, Phase
from perfmodel.prediction.placement import BLOCK_GROUPS, Network, Placement
from perfmodel.spec import DIMENSIONS, Device, Framework, Job, Layout
from perfmodel.spec.notation import PerRank
from perfmodel.workload import BlockOps, Shard, is_cast
from perfmodel.workload import blocks as workload_blocks

GRAPH_OPERATORS: Final = 3
"""Operators of a layer's pass that is replayed from a graph: a copy of its input, the launch, and
the node of autograd (Megatron-Core 0.12 megatron/core/transformer/cuda_graphs.py
_CudagraphRecordNode, _CudagraphReplayNode; Transformer Engine's make_graphed_callables). The replay
itself takes the host no longer than one operator does."""
COLLECTIVE_CHECK_S: Final = 0.22e-3
"""Host time per rank that a check of a collective between hosts adds to it: torch's
`ProcessGroupWrapper` lets every rank report to the first, which answers each in turn, and passes
two records around the ring of ranks, all over TCP. Measured with two processes on one EPYC host,
torch 2.13: 0.44 ms a call more than without."""


@dataclass(frozen=True, eq=False)
class ShardBlocks:
    """Counted events, parameters and bytes of all kinds of blocks of one shard, not yet timed."""

    blocks: tuple[BlockOps, ...]
    """Distinct blocks, in model order."""
    repeats: tuple[int, ...]
    """How often each block occurs, in model order."""
    ops: tuple[Op, ...]
    """Distinct events of the shard."""
    groups: tuple[str, ...]
    """Process group of each event that is a collective, "" for kernels."""
    counts: Float[np.ndarray, "blocks phases ops"]
    """How often each event occurs in every phase of every block."""
    overlappable: Bool[np.ndarray, " ops"]
    """Collectives that are independent of neighbouring kernels and can overlap with them."""
    beside_attention: Bool[np.ndarray, " ops"]
    """Collectives that can overlap only with attention kernels."""
    follows: Bool[np.ndarray, " ops"]
    """Collectives that follow another one after only a few short kernels
    (`perfmodel.workload.Comm`)."""
    launched: Float[np.ndarray, " ops"]
    """Share of each event that is launched as a separate kernel: 1 except for casts that are part
    of their product's operator (`casting`)."""
    further_launches: Float[np.ndarray, " ops"]
    """Number of kernel launches of a grouped product beyond the first (`_further_launches`)."""
    layers: Bool[np.ndarray, " blocks"]
    """Whether each block is a layer; only layers can be recomputed."""
    kinds: tuple[tuple[bool, int], ...]
    """For each block in model order, whether it is a layer and how often it occurs; this determines
    the stages."""
    expert_params: Float[np.ndarray, " blocks"]
    """Expert parameters per device of each block."""
    shared_params: Float[np.ndarray, " blocks"]
    """Parameters that each block shares with an earlier one (`BlockOps.shared_params`)."""
    shares_with: Int[np.ndarray, " blocks"]
    """Place of that earlier block."""
    activation_bytes: Float[np.ndarray, "blocks modes"]
    """Bytes saved for backward per micro-batch under each of `RECOMPUTE_MODES`."""
    workspace_bytes: Float[np.ndarray, " blocks"]
    """Workspace bytes of each block while it runs."""

    @property
    def pairs(self) -> list[tuple[BlockOps, int]]:
        """Each block with the number of its occurrences, in model order."""
        return list(zip(self.blocks, self.repeats, strict=True))

    def dense_params(self, pipelined: bool) -> Float[np.ndarray, " blocks"]:
        """Parameters per device of each block, outside routed experts."""
        # A tied head holds its own copy of the embedding only where the two are on different
        # stages.
        tied = [block.tied_params if pipelined else 0 for block in self.blocks]
        dense = [block.params - block.expert_params for block in self.blocks]
        return np.array(dense, float) + np.array(tied, float)

    def frozen_params(self, pipelined: bool, job: Job) -> Float[np.ndarray, " blocks"]:
        """Frozen parameters among `dense_params`."""
        tied = [
            block.tied_params if pipelined and job.fine_tuning.frozen_embedding else 0
            for block in self.blocks
        ]
        return np.array([block.frozen_params for block in self.blocks], float) + np.array(
            tied, float
        )

    def casting(self, share: Float[np.ndarray, " ops"], job: Job) -> "ShardBlocks":
        """Return the blocks with only a share of the casts launched as kernels."""
        cast = np.array([is_cast(op) for op in self.ops], bool)
        launched = np.where(cast, self.launched * share, self.launched)
        further_launches = []
        for op, cast_share in zip(self.ops, share.tolist(), strict=True):
            further_launches.append(_further_launches(op, job, cast_share))
        return replace(self, launched=launched, further_launches=np.array(further_launches))

    @property
    def alone(self) -> "ShardBlocks":
        """The blocks without overlap with another micro-batch."""
        exchanges_experts = np.array([group == "ep" for group in self.groups], bool)
        exchanged = self.overlappable & exchanges_experts
        if not exchanged.any():
            return self
        return replace(self, overlappable=self.overlappable & ~exchanged)

    @property
    def in_order(self) -> "ShardBlocks":
        """The blocks with their tensor-parallel collectives in sequence with kernels, none
        overlapped with weight gradients."""
        is_tensor_parallel = np.array([group == "tp" for group in self.groups], bool)
        return replace(self, overlappable=self.overlappable & ~is_tensor_parallel)

    @property
    def tied_params(self) -> int:
        """Parameters that first and last stage share."""
        return max(b.tied_params for b in self.blocks)


@dataclass(frozen=True, eq=False)
class BlockTimes(ShardBlocks, PhaseTimes):
    """Event counts and phase times of all kinds of blocks of one shard."""

    times: EventTimes
    """Seconds of each event, with interval and provenance."""
    clock_slowdown: Float[np.ndarray, " ops"]
    """Time of each event at the clock of a training step relative to that timed alone."""
    slowdown_of_runs: Float[np.ndarray, " ops"]
    """Time of each event corrected by measured runs, relative to that without runs."""


def count_events(
    blocks: Sequence[tuple[BlockOps, int]], networks: Mapping[str, Network], job: Job
) -> ShardBlocks:
    """Count and deduplicate the events of `blocks`, with process groups on `networks`."""
    # Equal ops are one event unless they overlap with other kernels. DistSim (section 4.1) times
    # each event once.
    events: dict[_Event, int] = {}
    entries: list[tuple[int, int, int, float]] = []
    for number, (block, _) in enumerate(blocks):
        for phase, event, count in _events_of_block(block, networks, job):
            entries.append((number, phase, events.setdefault(event, len(events)), count))

    counts = np.zeros((len(blocks), N_PHASES, len(events)))
    rows = np.array(entries).reshape(-1, 4)
    np.add.at(counts, tuple(rows[:, :3].astype(int).T), rows[:, 3])
    ops = tuple(event.op for event in events)
    expert_params = np.array([block.expert_params for block, _ in blocks], float)
    further_launches = np.zeros(len(ops))
    if expert_params.any():
        further_launches = np.array([_further_launches(op, job) for op in ops])
    saved_bytes = []
    for block, _ in blocks:
        saved_bytes.append([getattr(block.activation_bytes, mode) for mode in RECOMPUTE_MODES])
    return ShardBlocks(
        blocks=tuple(block for block, _ in blocks),
        repeats=tuple(repeats for _, repeats in blocks),
        ops=ops,
        groups=tuple(event.group for event in events),
        counts=counts,
        overlappable=np.array([event.overlappable for event in events], bool),
        beside_attention=np.array([event.beside_attention for event in events], bool),
        follows=np.array([event.follows for event in events], bool),
        launched=np.array([bool(job.narrow.fp8_recipe) or not is_cast(op) for op in ops], float),
        further_launches=further_launches,
        layers=np.array([block.is_layer for block, _ in blocks]),
        kinds=tuple((block.is_layer, repeats) for block, repeats in blocks),
        expert_params=expert_params,
        shared_params=np.array([block.shared_params for block, _ in blocks], float),
        shares_with=np.array([block.shares_with for block, _ in blocks], int),
        activation_bytes=np.array(saved_bytes, float),
        workspace_bytes=np.array([block.workspace_bytes for block, _ in blocks], float),
    )


class _Event(NamedTuple):
    """A kernel, or a collective of one process group with the kernels that it may overlap with
    (`perfmodel.workload.Comm`)."""

    op: Op
    group: str = ""
    overlappable: bool = False
    beside_attention: bool = False
    follows: bool = False


def _events_of_block(
    block: BlockOps, networks: Mapping[str, Network], job: Job
) -> Iterator[tuple[Phase, _Event, float]]:
    """Kernels and collectives of a block, phase by phase, with how often they occur."""
    phases = (
        (Phase.FORWARD, block.forward, block.forward_comm),
        (Phase.BACKWARD_INPUT, block.backward_input, block.backward_comm),
        (Phase.BACKWARD_WEIGHT, block.backward_weight, ()),
        (Phase.RECOMPUTE_SELECTIVE, block.recompute_selective, block.recompute_selective_comm),
        (Phase.RECOMPUTE_FULL, block.recompute_full, block.recompute_full_comm),
    )
    for phase, kernels_of_phase, comms in phases:
        # Frozen weights have no gradients.
        if job.fine_tuning.frozen and phase == Phase.BACKWARD_WEIGHT:
            continue
        for op, count in kernels_of_phase:
            yield phase, _Event(op), count
        for comm in comms:
            network = networks[comm.group]
            if network.ranks <= 1:
                continue
            op = network.collective(
                comm.collective, comm.bytes, job.dtype, comm.choice, comm.exchange
            )
            event = _Event(op, comm.group, comm.overlappable, comm.beside_attention, comm.follows)
            yield phase, event, comm.count


def _further_launches(op: Op, job: Job, share: float = 1.0) -> float:
    """Number of kernel launches of a grouped product beyond the first; 0 for all other ops.

    Args:
        share: share of the operands that are cast to 8 or 4 bits.
    """
    if not isinstance(op, Gemm) or not op.grouped:
        return 0.0
    # Every expert's product is launched by itself, and with it what casts the expert's operand: one
    # kernel, or two where a maximum is found first (Transformer Engine 2
    # pytorch/module/grouped_linear.py: `split_quantize`, `general_grouped_gemm` on several
    # streams).
    narrow = bool(job.narrow.fp8_recipe) and op.dtype == job.dtype and op.pass_ != "wgrad"
    casts = narrow * (2 if job.narrow.fp8_recipe in ("current", "nvfp4") else 1)
    return (1.0 + share * casts) * op.groups - 1.0


def block_events(
    blocks: ShardBlocks,
    framework: Framework,
    device: Device,
    ring_steps: int,
    kernel_spread: float = 0.0,
    checked: bool = False,
) -> BlockEvents:
    """The events of blocks as arrays.

    Args:
        ring_steps: see `BlockEvents.ring_steps`.
        kernel_spread: spread of the ranks' times for the same kernels, relative to these.
        checked: hosts agree on each collective before they issue it
            (`Framework.checks_collectives`).
    """
    kernel = np.array([group == "" for group in blocks.groups], bool)
    is_tensor_parallel = np.array([group == "tp" for group in blocks.groups], bool)
    ranks = np.array([op.num_ranks if isinstance(op, Collective) else 1 for op in blocks.ops])

    # A collective waits for the last of n ranks, which is sqrt(2 ln n) spreads late: the mean of
    # the largest of n normal draws, to first order.
    lateness = np.sqrt(2 * np.log(ranks))

    # Host time beyond that of operators: agreeing on collectives, and launching a group's products
    # one by one (none where the host is taken to issue in no time).
    check_s = np.where(kernel, 0.0, COLLECTIVE_CHECK_S * ranks) * checked
    launch_s = framework.host.grouped_launch_s * (framework.host.issue_s > 0)

    sm_share = _sm_share(blocks, framework, device)

    # Kernels that `tp_overlap` can cut into slices: products but those of experts (Transformer
    # Engine pytorch/module/grouped_linear.py: "GroupedLinear doesn't support Userbuffer overlap").
    ring_products = np.array([isinstance(op, Gemm) for op in blocks.ops], bool)
    if blocks.expert_params.any():
        ring_products &= ~_products_of_experts(blocks)
    return BlockEvents(
        counts=blocks.counts,
        kernel=kernel,
        attention=np.array([isinstance(op, Attention) for op in blocks.ops], bool),
        ring_product=ring_products,
        in_rings=is_tensor_parallel
        & ~(blocks.overlappable | blocks.beside_attention | blocks.follows),
        overlappable=blocks.overlappable,
        beside_attention=blocks.beside_attention,
        follows=blocks.follows,
        layers=blocks.layers,
        launches=blocks.counts @ blocks.launched,
        issued=_issued(blocks, framework),
        beyond_operators_s=blocks.counts @ (check_s + launch_s * blocks.further_launches),
        lateness=lateness,
        arrival_spread_s=np.float64(framework.communication.collective_skew_s),
        kernel_spread=np.float64(kernel_spread),
        lost=lost_shares(blocks.ops, device, sm_share),
        sm_share=sm_share,
        ring_steps=ring_steps,
        lost_in_ring=framework.communication.tp_overlap_loss,
        copies=framework.communication.tp_overlap_copies and ring_steps > 1,
        waits=framework.host.execution == "blocking",
    )


def _sm_share(blocks: ShardBlocks, framework: Framework, device: Device) -> float:
    """Share of the multiprocessors that hidden collectives of blocks hold
    (`collective_sm_share`)."""
    # Libraries that exchange experts' tokens state the multiprocessors that they hold; other
    # collectives start as many thread blocks as NCCL does.
    channels = 0
    for op, hides in zip(blocks.ops, blocks.overlappable, strict=True):
        if hides and isinstance(op, Collective) and op.exchange:
            channels = max(channels, exchange_library(op.exchange.dispatcher).multiprocessors)
    return collective_sm_share(
        device, framework, channels or CHANNELS, library_states_channels=channels > 0
    )


def _issued(blocks: ShardBlocks, framework: Framework) -> Float[np.ndarray, "blocks phases"]:
    """Operators that the host issues for every phase."""
    issued = blocks.counts @ blocks.launched

    # Layers issue operators beyond the kernels that are counted (sums over masks, partial sums),
    # which take the host's time and next to none of the device's. Routing adds histograms, sorts
    # and sizes of what ranks exchange.
    issued[blocks.layers, Phase.FORWARD] += framework.host.forward_bookkeeping
    issued[blocks.layers, Phase.BACKWARD_INPUT] += framework.host.backward_bookkeeping
    experts = blocks.expert_params > 0
    issued[experts, Phase.FORWARD] += framework.host.routing_forward_bookkeeping
    issued[experts, Phase.BACKWARD_INPUT] += framework.host.routing_backward_bookkeeping
    issued[experts, Phase.RECOMPUTE_FULL] += framework.host.routing_forward_bookkeeping

    # A graph of a layer is launched as a whole: the host issues only kernels outside of it.
    if framework.host.execution == "layer_graphs":
        issued[blocks.layers] = (blocks.counts @ _outside_graphs(blocks))[blocks.layers]
        issued[blocks.layers, Phase.FORWARD] += GRAPH_OPERATORS
        issued[blocks.layers, Phase.BACKWARD_INPUT] += GRAPH_OPERATORS
    return issued


def _outside_graphs(blocks: ShardBlocks) -> Float[np.ndarray, " ops"]:
    """Mark (by 1) the operators that the host issues outside graphs of layers: products of experts,
    whose sizes it must know first, and the dispatch and combine of their tokens."""
    # Megatron-Core megatron/core/transformer/cuda_graphs.py: of a layer of experts that drops no
    # tokens the graphs hold attention, router and preparation. Layers that drop tokens are taken
    # alike.
    exchanges = np.array([group in ("ep", "etp") for group in blocks.groups])
    return (_products_of_experts(blocks) | exchanges).astype(float)


def _products_of_experts(blocks: ShardBlocks) -> Bool[np.ndarray, " ops"]:
    """Mark the events that are products of experts."""
    return np.array([isinstance(op, Gemm) and op.grouped for op in blocks.ops], bool)


# --- the shard of a layout
# --------------------------------------------------------------------------------
#
# Passes may also compute several micro-batches at once, or one slice of a sequence. Every function
# is kept by the part of a layout that it depends on, so that the thousands of layouts of a search
# share a few hundred shards.


def sliced_job(job: Job, slices: int, index: int = 0) -> Job:
    """The job on one slice of the sequence; its causal attention also covers the earlier slices.

    Raises:
        LayoutError: the sequence does not divide.
    """
    if slices > 1 and job.varied_lengths:
        raise LayoutError(
            "sequence slices need sequences of equal length; leave mean_tokens out", Reason.SLICES
        )
    if job.seq_len % slices:
        raise LayoutError(
            f"sequence length {job.seq_len} is not divisible by {slices} slices", Reason.SLICES
        )
    tokens = job.seq_len // slices
    return replace(job, seq_len=tokens, cached_tokens=index * tokens) if slices > 1 else job


@dataclass(frozen=True)
class PlacedShard:
    """Everything that determines the events of a layout's blocks."""

    shard: Shard
    """Part of every block that one device computes."""
    networks: tuple[Network, ...]
    """Networks that the groups of `BLOCK_GROUPS` use."""


def placed_shard(setting: Setting, layout: Layout) -> PlacedShard:
    """The shard of a layout, and where its process groups lie."""
    return PlacedShard(Shard.of(layout), _networks(setting, ranks_of(setting, layout)))


def ranks_of(setting: Setting, layout: Layout) -> Layout:
    """A layout with only the fields that determine the numbering of ranks."""
    return _ranks(setting, layout.order, layout.degrees, layout.kinds)


@session_cached
def _ranks(setting: Setting, order: str, degrees: tuple[int, ...], kinds: PerRank) -> Layout:
    """Return one object for all layouts with the same numbering of ranks, because it is a key of
    caches."""
    degree_of_dimension: dict[str, Any] = {}
    for dimension, degree in zip(DIMENSIONS, degrees, strict=True):
        degree_of_dimension[dimension.key] = degree
    return Layout(order=order, kinds=kinds, **degree_of_dimension)


@session_cached
def _networks(setting: Setting, ranks: Layout) -> tuple[Network, ...]:
    """Networks of `BLOCK_GROUPS`."""
    return tuple(Placement.of(group, ranks).on_network(setting.cluster) for group in BLOCK_GROUPS)


@session_cached
def shard_blocks(
    setting: Setting, shard: Shard, slices: int, index: int = 0
) -> Sequence[tuple[BlockOps, int]]:
    """Blocks of the model on a shard with their counts, for one of `slices` slices of the sequence.

    Raises:
        LayoutError: the sequence does not divide.
    """
    return workload_blocks(setting.model, sliced_job(setting.job, slices, index), shard)


@session_cached
def placed_events(setting: Setting, placed: PlacedShard, slices: int, index: int) -> ShardBlocks:
    """Counted events of a shard's blocks, for one of `slices` slices of the sequence."""
    blocks_of_shard = shard_blocks(setting, placed.shard, slices, index)
    networks: dict[str, Network] = dict(zip(BLOCK_GROUPS, placed.networks, strict=True))
    return count_events(blocks_of_shard, networks, setting.job)


def shard_events(setting: Setting, layout: Layout, slices: int = 1, index: int = 0) -> ShardBlocks:
    """Counted events of the blocks of a layout's shard.

    Raises:
        LayoutError: the model or the sequence does not divide.
    """
    return placed_events(setting, placed_shard(setting, layout), slices, index)


shorten_reprs(__name__)
