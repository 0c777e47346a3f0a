"""Overlap within blocks on one device, and the duration of each phase.

Arithmetic on arrays alone, NumPy's or JAX's: the same statement prices layouts and is
differentiated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.display import shorten_reprs
from perfmodel.ops import Gemm, Op
from perfmodel.prediction.phases import N_PHASES, Phase
from perfmodel.spec import Device, Framework

_IN_BACKWARD: Final = np.arange(N_PHASES) == Phase.BACKWARD_INPUT


class BlockEvents(NamedTuple):
    """Events of a shard's blocks, not yet timed, with everything that overlap and waits depend
    on."""

    counts: Float[Any, "blocks phases ops"]
    """How often each event occurs in every phase of every block."""
    kernel: Bool[Any, " ops"]
    """Events that are kernels, not collectives."""
    attention: Bool[Any, " ops"]
    """Kernels of attention."""
    ring_product: Bool[Any, " ops"]
    """Products that `tp_overlap` can cut into slices: all but those of experts
    (`ring_products`)."""
    in_rings: Bool[Any, " ops"]
    """Collectives that `tp_overlap` can cut into ring steps: tensor parallelism's, which products
    depend on."""
    layers: Bool[Any, " blocks"]
    """Blocks to which `tp_overlap` applies: all but embedding and head."""
    overlappable: Bool[Any, " ops"]
    """Collectives that can overlap with neighbouring kernels, as in `ShardBlocks.overlappable`."""
    beside_attention: Bool[Any, " ops"]
    """Collectives that can overlap only with attention kernels."""
    follows: Bool[Any, " ops"]
    """Collectives that follow another one after only a few short kernels."""
    launches: Float[Any, "blocks phases"]
    """Events launched by themselves, in every phase of every block."""
    issued: Float[Any, "blocks phases"]
    """Operators that the host issues for every phase of every block."""
    beyond_operators_s: Float[Any, "blocks phases"]
    """Host seconds for checks of collectives, and for launching the products of a group one by
    one."""
    lateness: Float[Any, " ops"]
    """Lateness of a collective's last rank relative to the mean rank, in spreads; 0 for kernels."""
    arrival_spread_s: Float[Any, ""]
    """Spread of the times at which hosts let ranks reach a collective."""
    kernel_spread: Float[Any, ""]
    """Spread of the ranks' times for the kernels between two collectives, relative to these."""
    lost: Float[Any, " ops"]
    """Share of the overlapped time that each kernel loses to a collective (`lost_shares`)."""
    sm_share: Float[Any, ""]
    """Share of the device's multiprocessors that a collective holds (`collective_sm_share`)."""
    ring_steps: int
    """Number of parts into which `tp_overlap` cuts each collective that kernels depend on; 1
    without it."""
    lost_in_ring: Float[Any, ""]
    """Share of a collective's hidden time that still lengthens the step
    (`Framework.tp_overlap_loss`)."""
    copies: Bool[Any, ""]
    """Whether copy engines drive the ring steps, which slow no kernel."""
    waits: Bool[Any, ""]
    """Whether the host waits for every kernel before it issues the next."""


class PairedPhases(NamedTuple):
    """Phase times of a pass that overlaps with another one."""

    phase_s: Float[Any, "blocks phases"]
    """Seconds of every phase."""
    collective_s: Float[Any, "blocks phases"]
    """Seconds by which collectives outlast the kernels of both passes together."""
    slowed_s: Float[Any, "blocks phases"]
    """Slowdown of each phase's kernels by overlapping collectives, in seconds."""
    gap_s: Float[Any, "blocks phases"]
    """Idle time between kernels, as in `PhaseTimes.gap_s`."""


@dataclass(frozen=True, eq=False)
class PhaseTimes:
    """Phases of blocks, broken down into parts."""

    events: BlockEvents
    """Events of the blocks."""
    time_s: Float[Any, " ops"]
    """Seconds of each event."""
    between_s: Float[Any, "blocks phases"]
    """Idle time between kernels."""
    issuing_s: Float[Any, "blocks phases"]
    """Seconds that the host needs to issue every phase."""
    exposed: Float[Any, "blocks phases ops"]
    """Share of each event's time that is not hidden behind others (1 for kernels)."""
    slowing: Float[Any, "blocks phases ops"]
    """Additional time of the kernels that hide a collective, as a share of the collective's time
    (`lost_shares`)."""
    waiting_s: Float[Any, "blocks phases"]
    """Seconds that collectives wait for the slowest of their ranks."""

    @cached_property
    def event_s(self) -> Float[Any, "blocks phases ops"]:
        """Exposed seconds of every event in every phase."""
        return self.events.counts * self.time_s * self.exposed

    @cached_property
    def slowing_s(self) -> Float[Any, "blocks phases ops"]:
        """Slowdown of kernels caused by the collectives that overlap with them, in seconds per
        collective."""
        return self.events.counts * self.time_s * self.slowing

    @cached_property
    def slowed_s(self) -> Float[Any, "blocks phases"]:
        """Slowdown of each phase's kernels by overlapping collectives, in seconds."""
        return self.slowing_s.sum(axis=2)

    @cached_property
    def busy_s(self) -> Float[Any, "blocks phases"]:
        """Seconds of each phase without gaps: kernels and their slowdown, exposed collectives, and
        waits."""
        return self.event_s.sum(axis=2) + self.slowed_s + self.waiting_s

    @cached_property
    def gap_s(self) -> Float[Any, "blocks phases"]:
        """Idle time between kernels, or the extra time that the host needs to issue them; hosts
        continue while collectives wait for the slowest rank. If hosts wait for every kernel, the
        whole issue time."""
        xp = self.event_s.__array_namespace__()
        return xp.maximum(
            self.between_s, self.issuing_s - xp.where(self.events.waits, 0.0, self.busy_s)
        )

    @cached_property
    def phase_s(self) -> Float[Any, "blocks phases"]:
        """Seconds of every phase of every block."""
        return self.busy_s + self.gap_s

    @cached_property
    def collective_s(self) -> Float[Any, "blocks phases"]:
        """Exposed seconds of collectives in each phase."""
        return (self.event_s * ~self.events.kernel).sum(axis=2)

    @cached_property
    def paired(self) -> "PairedPhases":
        """Seconds of every phase in a pass that runs beside another: the collectives of each pass
        hide behind the other's compute, or the reverse (DeepSeek-V3, section 3.2.1), and one host
        issues both.

        Both passes of a pair are taken to be alike, so that the phases of one stand for half of the
        pair.
        """
        xp = self.event_s.__array_namespace__()
        sm_share, collective_s = self.events.sm_share, self.collective_s

        # Collectives that hide inside a phase slow kernels at most as much as those that hide
        # behind the other pass, because in a pair no product has its wave to itself. So ring steps
        # never make a pair longer.
        hidden_s = self.events.counts * self.time_s * (1 - self.exposed)
        slowed_s = xp.minimum(self.slowing_s, sm_share * hidden_s).sum(axis=2)
        compute_s = self.busy_s - self.slowed_s - collective_s + slowed_s + self.between_s

        # While compute of one pass and collectives of the other run, the collectives hold some of
        # the multiprocessors.
        pair_slowed_s = sm_share * xp.minimum(compute_s, collective_s)
        exposed_s = xp.maximum(collective_s - compute_s, 0.0)

        # The host issues a phase while the device works on earlier kernels, unless it waits for
        # every kernel.
        meanwhile_s = xp.where(
            self.events.waits, self.between_s, compute_s + exposed_s + pair_slowed_s
        )
        issued_late_s = xp.maximum(self.issuing_s - meanwhile_s, 0.0)
        phase_s = compute_s + exposed_s + pair_slowed_s + issued_late_s
        return PairedPhases(
            phase_s, exposed_s, slowed_s + pair_slowed_s, self.between_s + issued_late_s
        )

    def exposed_share(self, paired: bool) -> Float[Any, "blocks phases"]:
        """Exposed share of every phase: 1, or for a pass that overlaps with another one the share
        that `paired` leaves."""
        if not paired:
            return np.ones_like(self.phase_s)
        return self.paired.phase_s / np.maximum(self.phase_s, 1e-300)


def time_phases(
    events: BlockEvents,
    time_s: Float[Any, " ops"],
    issue_s: Float[Any, ""],
    kernel_gap_s: Float[Any, ""],
) -> PhaseTimes:
    """The phases of blocks whose events take `time_s`.

    A phase takes the time that its device is busy (slowed kernels and exposed collectives, with the
    gaps between them), or as long as the host needs to issue it, whichever is longer.

    Args:
        events: events of the blocks.
        time_s: seconds of every event; its array namespace is that of the result.
        issue_s: host time to issue an operator (`Framework.issue_s`).
        kernel_gap_s: idle time after every kernel.
    """
    xp = time_s.__array_namespace__()
    counts = events.counts
    kernels_s = counts * time_s * events.kernel
    gaps_s = events.launches * kernel_gap_s
    issuing_s = events.issued * issue_s + events.beyond_operators_s

    # Beside the collectives of a phase run its own kernels. In backward also those of the weight
    # gradients, which are issued with the input gradients and have no collectives of their own.
    weights_s = kernels_s[:, Phase.BACKWARD_WEIGHT]
    overlappable_s = kernels_s + _IN_BACKWARD[:, None] * weights_s[:, None]

    # A device that waits for its host in weight gradients leaves collectives time as well.
    idle_s = xp.maximum(gaps_s, issuing_s - kernels_s.sum(axis=2))[:, Phase.BACKWARD_WEIGHT]
    free_s = overlappable_s.sum(axis=2) + _IN_BACKWARD * idle_s[:, None]
    hidden = _hidden(events, time_s, overlappable_s, free_s)
    exposed = 1 - hidden * (1 - events.lost_in_ring)

    # A hidden collective holds multiprocessors, unless copy engines drive its ring steps. Kernels
    # beside it run longer, but a hidden collective costs no more than an exposed one.
    lost = _ratio(overlappable_s @ events.lost, free_s)
    synchronising = ~events.overlappable & ~events.beside_attention
    slowing = xp.where(synchronising & events.copies, 0.0, hidden * lost[:, :, None])
    slowing = xp.minimum(slowing, 1 - exposed)

    # Ranks wait for one another before a collective that their next kernels depend on. Where it
    # follows another one closely, they have just met. The last of n ranks is sqrt(2 ln n) spreads
    # late.
    meets = synchronising & ~events.follows
    meetings = (events.counts * (meets & ~events.kernel)).sum(axis=2)
    lateness = events.counts @ (events.lateness * meets)

    # Hosts add a time for each collective. Devices of one kind differ in speed, so ranks drift
    # further apart the longer they compute between meetings. All collectives of a phase together
    # therefore wait for a share of its kernels' time, however many they are. Short kernels between
    # many collectives do not make ranks wait long.
    computed_s = overlappable_s.sum(axis=2)
    waiting_s = events.arrival_spread_s * lateness + events.kernel_spread * computed_s * _ratio(
        lateness, meetings
    )
    return PhaseTimes(events, time_s, gaps_s, issuing_s, exposed, slowing, waiting_s)


def _hidden(
    events: BlockEvents,
    time_s: Float[Any, " ops"],
    overlappable_s: Float[Any, "blocks phases ops"],
    free_s: Float[Any, "blocks phases"],
) -> Float[Any, "blocks phases ops"]:
    """Share of each event's time, in every phase of every block, that is hidden behind concurrent
    kernels.

    Args:
        overlappable_s: seconds of the kernels beside the collectives of a phase.
        free_s: seconds of all of these, with those that the device waits for the host in weight
            gradients.
    """
    xp = time_s.__array_namespace__()
    seconds = events.counts * time_s
    hidden = xp.zeros_like(seconds)

    # Context parallelism's collectives hide behind attention alone. An overlappable one is
    # independent of the kernels of its phase and hides as far as these last: hidden = min(1,
    # compute / communication). Ring steps of tensor parallelism depend on the products beside them,
    # which limits their share (`_ring_shares`).
    attention_s = (overlappable_s * events.attention).sum(axis=2)
    groups = [(events.beside_attention, attention_s, 1.0), (events.overlappable, free_s, 1.0)]
    # Kinds of which there are none are left out. JAX's traced arrays cannot be asked.
    groups = [group for group in groups if not isinstance(group[0], np.ndarray) or group[0].any()]
    if events.ring_steps > 1:
        groups.append((events.in_rings, free_s, _ring_shares(events, time_s)))

    # No kernel hides two collectives at once: each kind, in this order, hides behind the kernels
    # that earlier kinds leave free, so that longer kernels never make a phase shorter.
    for is_of_group, behind_s, most_hidden in groups:
        comm_s = (seconds * is_of_group).sum(axis=2)
        share = xp.minimum(most_hidden, _ratio(xp.minimum(behind_s, free_s), comm_s))
        hidden = xp.where(is_of_group, share[:, :, None], hidden)
        free_s = xp.maximum(free_s - share * comm_s, 0.0)
    return hidden


def _ring_shares(events: BlockEvents, time_s: Float[Any, " ops"]) -> Float[Any, "blocks phases"]:
    """Largest share of the collectives of every phase that `tp_overlap` can hide.

    Each is cut into n ring steps that feed, or are fed by, slices of a product of its own, of which
    all but one can hide: (1 - 1/n) min(1, product / collective).
    """
    xp = time_s.__array_namespace__()
    n = xp.ceil((events.counts * events.in_rings).sum(axis=2))[:, :, None]
    each_s = _ratio((events.counts * (time_s * events.in_rings)).sum(axis=2)[:, :, None], n)

    # Each of a phase's n collectives hides behind one product of the phase (Transformer Engine
    # pytorch/module/base.py `add_ub`: a buffer for every pair), behind the n longest where there
    # are more products. A product long enough to hide the gather before it does not help the sum
    # after a narrow one.
    by_length = xp.argsort(-time_s)
    ranked = xp.floor(events.counts * events.ring_product)[:, :, by_length]
    in_rings = xp.clip(n - (xp.cumsum(ranked, axis=2) - ranked), 0.0, ranked)
    hidden_of_pair = xp.minimum(1.0, _ratio(time_s[by_length], each_s))

    # Outside layers nothing is cut: Megatron-Core's output layer is its own `ColumnParallelLinear`,
    # not Transformer Engine's (megatron/core/models/gpt/gpt_model.py `output_layer`).
    most_in_rings = (1 - 1 / events.ring_steps) * events.layers[:, None]
    return most_in_rings * _ratio((in_rings * hidden_of_pair).sum(axis=2), n[:, :, 0])


def _ratio(part: Any, total: Any) -> Any:
    """`part / total`, 0 where the total is 0."""
    xp = total.__array_namespace__()
    is_positive = total > 0
    # The inner `where` keeps derivatives finite: JAX differentiates the branch that is not taken,
    # too.
    return xp.where(is_positive, part / xp.where(is_positive, total, 1.0), 0.0)


# --- kernels beside a collective
# -----------------------------------------------------------------------
#
# A collective that hides behind kernels holds a thread block per channel, each on a multiprocessor,
# for as long as it lasts. Kernels of many waves then run at (SM - held) / SM of their speed; a
# product of one wave that no longer fits takes two. So overlap costs a share of the time that it
# hides: less than no overlap, but never nothing.
#
# Measured, an H100 with 24 blocks of an all-gather beside products of 132 tiles: 1.70 times as long
# (NVIDIA developer forum, thread 337991); an H800 whose expert exchange holds 20 of 132
# multiprocessors: 1.06 to 1.26, median 1.15, over kernels of element-wise work
# (deepseek-ai/profile-data, train trace; `contention` among the public measurements), where 132 /
# 112 is 1.18; over whole steps 1.19 (arXiv:2507.03114).

CHANNELS: Final = 24
"""Thread blocks of a collective inside a node: what NCCL starts among NVLink devices (the
all-gather above; its own limit is 32)."""
CHANNELS_OF_STATES: Final = 16
"""Thread blocks of reductions and gathers of model states: between nodes NCCL starts two for each
of eight NICs; inside one NVLink SHARP takes as many ("NVLS should not need more than 16 channels to
get peak BW", NCCL src/init.cc; NVIDIA/nccl issue 1041). So the same exchange over more nodes slows
no less than inside one."""
TILE: Final = (128, 256)
"""Rows and columns of a product that a thread block computes: cuBLAS' largest tile on tensor
cores."""
ONE_WAVE_LOST: Final = 0.5
"""Share of the overlapped time that a product loses because it takes two waves instead of one."""
MOST_HELD: Final = 0.25
"""Largest share of a small device's multiprocessors that a collective occupies, because fewer
channels are started there. Assumed."""
_WITH_MULTIPROCESSORS: Final = ("NVIDIA", "AMD")
"""Vendors whose collectives are kernels on the multiprocessors."""


def collective_sm_share(
    device: Device,
    framework: Framework,
    channels: int = CHANNELS,
    *,
    library_states_channels: bool = False,
) -> float:
    """Share of a device's multiprocessors that a collective occupies with its thread blocks.

    Where kernels beside collectives were measured (`Device.collective_sm_share`), it is the share
    by which they slow down.

    Args:
        channels: thread blocks that the collective starts.
        library_states_channels: the collective is one of another library than those that are
            measured.
    """
    if not framework.communication.contends:
        return 0.0
    if device.collective_sm_share is not None and not library_states_channels:
        return device.collective_sm_share
    # Separate engines drive the links of TPUs. CPUs, which have no rate in fp16, have no
    # multiprocessors to hold.
    if device.vendor not in _WITH_MULTIPROCESSORS or device.peak.fp16 is None:
        return 0.0
    return min(channels / device.compute_units, MOST_HELD)


def lost_shares(ops: Sequence[Op], device: Device, sm_share: float) -> Float[np.ndarray, " ops"]:
    """Relative slowdown of each kernel while it overlaps with a collective; undefined for
    collectives.

    Args:
        sm_share: share of the multiprocessors that the collective occupies (`collective_sm_share`),
            0 without
        contention.
    """
    if not sm_share:
        return np.zeros(len(ops))
    # A product whose tiles fill the whole device needs a second wave if the collective takes part
    # of it.
    free = round(device.compute_units * (1 - sm_share))
    fits_no_more = [
        isinstance(op, Gemm) and free < _tiles(op) <= device.compute_units for op in ops
    ]
    return np.where(fits_no_more, max(sm_share, ONE_WAVE_LOST), sm_share)


def _tiles(op: Gemm) -> int:
    return op.batch * op.groups * -(-op.m // TILE[0]) * -(-op.n // TILE[1])


shorten_reprs(__name__)
