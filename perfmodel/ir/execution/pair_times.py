"""Times of events from measurements on two ranks (DistSim, section 4.2): kernels, and transfers
between any number.

A call of n ranks takes `count(n) * alpha + sent(n) * beta`: the latency of every message that a
rank sends one after another, and all their bytes through its link. For a ring that is DistSim's 2
(n - 1) / n, with the latencies beside the bytes. Part of both the rank computes (it copies messages
and adds them up), which ranks that share a core do one after another; the rest it waits. Both
alternate message by message: while a rank waits for one, others use its core. After a pause a link
may let some bytes through at once (its token bucket has filled), which shortens the call by up to a
credit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.display import Report, shorten_reprs
from perfmodel.errors import NoDataError, PerfModelError, UnknownNameError
from perfmodel.ir import Function
from perfmodel.ir.execution._run import Backend, session_class
from perfmodel.ir.execution._simulate import simulate_on_cores
from perfmodel.ir.execution._structure import program_structure
from perfmodel.ir.execution.events import Kernel, RankEvent, Transfer, rank_events
from perfmodel.measure.ranks import Host, RankGroup
from perfmodel.spec import Cluster
from perfmodel.timeline import Timeline


class Messages(NamedTuple):
    """Messages that one rank sends in one call."""

    count: int
    share: float
    """Size of each, as a share of the operand."""

    @property
    def sent(self) -> float:
        """Bytes of all messages together, as a share of the operand."""
        return self.count * self.share


def messages(kind: str, ranks: int) -> Messages:
    """Messages that each rank sends in turn by gloo's algorithms, for operands of S bytes.

    - all_reduce: a ring, 2 (n - 1) messages of S / n;
    - all_gather: a ring, n - 1 messages of S;
    - all_to_all: n - 1 messages of S / n, to each of the others;
    - send: one message of S.

    Raises:
        UnknownNameError: for a collective without an algorithm.
    """
    if kind not in _ALGORITHMS:
        raise UnknownNameError("collective between processes", kind, _ALGORITHMS)
    return _ALGORITHMS[kind](ranks)


# A send carries its whole operand in one message; the others follow the ring or pairwise exchange
# of gloo.
_ALGORITHMS: Final = {
    "send": lambda n: Messages(1, 1.0),
    "all_reduce": lambda n: Messages(2 * (n - 1), 1 / n),
    "all_gather": lambda n: Messages(n - 1, 1.0),
    "all_to_all": lambda n: Messages(n - 1, 1 / n),
}


PAIR: Final = 2
TINY_BYTES: Final = 64
"""Size of a message whose time is the latency."""
_POINTS_PER_DECADE: Final = 3
_KERNEL_ROUNDS: Final = 30
_TRANSFER_ROUNDS: Final = 7
_ROW: Final = 3

Link = tuple[str, bool]
"""Kind of a transfer, and whether it leaves the host."""


class EventTime(NamedTuple):
    """Time of an event on one rank."""

    core_s: float
    """Seconds in which it needs its core."""
    network_s: float = 0.0
    """Seconds that it then waits for messages on a link without idle time."""
    credit_s: float = 0.0
    """Seconds by which the wait may be shorter if the link was idle for as long before."""
    messages: int = 1
    """Messages that it sends one after another, among which core and network seconds divide."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Seconds of a call between two ranks by the size of its operand."""

    bytes: Float[np.ndarray, " points"]
    time_s: Float[np.ndarray, " points"]
    """Times of calls that follow a pause."""
    steady_s: Float[np.ndarray, " points"]
    """Times of calls that directly follow other calls."""
    core_s: Float[np.ndarray, " points"]
    """Seconds of such a call in which a rank needs its core: to copy messages and to add them
    up."""

    def scaled(self, operand_bytes: float, pair: Messages, group: Messages) -> EventTime:
        """Time of a call whose ranks send `group`'s messages, where two ranks sent `pair`'s."""
        duration_s = self._scaled_s(self.steady_s, self.time_s[0], operand_bytes, pair, group)
        core_s = self._scaled_s(self.core_s, self.core_s[0], operand_bytes, pair, group)
        return EventTime(core_s, max(0.0, duration_s - core_s), self.credit_s, group.count)

    def _scaled_s(
        self,
        points_s: Float[np.ndarray, " points"],
        tiny_s: float,
        operand_bytes: float,
        pair: Messages,
        group: Messages,
    ) -> float:
        """Seconds of a collective at the measured sizes, scaled from a pair of ranks to a group."""
        # On two ranks the measured curve is the answer; for more, its latency and slope are scaled
        # by gloo's algorithm: latency grows with the messages in a row, the rest with the bytes
        # sent.
        slope = self._s_per_byte(points_s)
        if group == pair:
            beyond = max(0.0, operand_bytes - self.bytes[-1])
            return float(np.interp(operand_bytes, self.bytes, points_s) + beyond * slope)
        return group.count / pair.count * tiny_s + group.sent / pair.sent * operand_bytes * slope

    def _s_per_byte(self, points_s: Float[np.ndarray, " points"]) -> float:
        """Seconds per further byte of operand: the median over the larger half of the sizes."""
        # The larger sizes, because in small messages the latency hides the slope.
        half = len(self.bytes) // 2
        return max(
            0.0,
            float(np.median((points_s[half:] - points_s[0]) / (self.bytes[half:] - self.bytes[0]))),
        )

    @property
    def credit_s(self) -> float:
        """Seconds that a pause before a call saves: median over the larger half of the sizes."""
        # A token bucket fills while the link is idle and then lets a burst through: a fixed number
        # of seconds per call, clearest at the larger sizes. Noise may make it negative.
        half = len(self.bytes) // 2
        return max(0.0, float(np.median((self.steady_s - self.time_s)[half:])))


@dataclass(frozen=True, eq=False)
class PairTimes:
    """Times of kernels and transfers that two ranks measured."""

    kernels_s: Mapping[Kernel, float]
    transfers: Mapping[Link, Curve]
    core_factor: float = 1.0
    """Slowdown of work on cores between messages, relative to its measurement; fitted to whole
    programs."""

    def time(self, event: RankEvent) -> EventTime:
        """Time of an event on each of its ranks.

        Raises:
            NoDataError: no similar event was measured.
        """
        if isinstance(event, Kernel):
            if event not in self.kernels_s:
                raise NoDataError(
                    f"kernel {event.instruction.op} of {list(map(str, event.inputs))} was not measured"
                )
            return EventTime(self.core_factor * self.kernels_s[event])
        link = (event.kind, event.across_hosts)
        if link not in self.transfers:
            reach = "between hosts" if event.across_hosts else "within a host"
            raise NoDataError(f"{event.kind} {reach} was not measured")

        # Concurrent transfers share the links.
        curve = self.transfers[link]
        alone = curve.scaled(
            event.bytes * event.concurrent,
            messages(event.kind, PAIR),
            messages(event.kind, event.ranks),
        )
        return alone._replace(core_s=self.core_factor * alone.core_s)


def measure_pair(
    events: Sequence[RankEvent],
    hosts: Sequence[Host] = (),
    progress: Report = lambda *_: None,
    backend: Backend = "jax",
) -> PairTimes:
    """Measure the kernels and transfer curves of a set of events on two ranks.

    Both ranks run the kernels at the same time and all kernels in turn, so that each finds the
    caches as it would in a program rather than as it left them itself.

    Args:
        events: events of any number of programs, as `rank_events` returns them.
        hosts: two of them, where events leave their host.
        progress: called with (what is measured, how many, of how many).
        backend: library of the kernels and collectives.

    Raises:
        PerfModelError: transfers between hosts without two hosts.
        CalibrationError: a rank failed.
    """
    # DistSim's economy: events are few however large the program, and two ranks suffice to measure
    # all of them.
    kernels = list(dict.fromkeys(e for e in events if isinstance(e, Kernel)))
    transfers = [e for e in events if isinstance(e, Transfer)]
    across = any(e.across_hosts for e in transfers)
    if across and len(hosts) < PAIR:
        raise PerfModelError("transfers between hosts need measurements on two hosts; give hosts=")
    session = session_class(backend, events=True)
    curves: dict[Link, Curve] = {}
    kernels_s: dict[Kernel, float] = {}
    # A group of ranks per reach: both on one host, or one on each of two. Kernels are timed where
    # the program would run.
    for across_hosts in dict.fromkeys((across, *(e.across_hosts for e in transfers))):
        reach_transfers = [e for e in transfers if e.across_hosts == across_hosts]
        with RankGroup(PAIR, session, hosts[:PAIR] if across_hosts else hosts[:1]) as group:
            for kind in sorted({e.kind for e in reach_transfers}):
                progress(f"{kind} {'between hosts' if across_hosts else 'within a host'}", 0, 0)
                curves[kind, across_hosts] = _curve(
                    group, [e for e in reach_transfers if e.kind == kind]
                )
            if across_hosts == across:
                progress("kernels", 0, len(kernels))
                kernels_s = _kernels_s(group, kernels)
    return PairTimes(kernels_s, curves)


def _kernels_s(group: RankGroup, kernels: Sequence[Kernel]) -> dict[Kernel, float]:
    """Median over the rounds of the mean of both ranks."""
    group.ask("load_kernels", kernels)
    # The mean over ranks that compute at the same time, as they do in a program; the median drops
    # rounds disturbed by others.
    rounds = [group.ask("time_round") for _ in range(_KERNEL_ROUNDS)]
    return dict(zip(kernels, np.median(np.mean(rounds, axis=1), axis=0).tolist(), strict=True))


def _curve(group: RankGroup, events: Sequence[Transfer]) -> Curve:
    """Times from a tiny message to the events' largest, a few sizes per factor of ten."""
    largest = max(TINY_BYTES, *(event.bytes * event.concurrent for event in events))
    points = 2 + int(np.ceil(_POINTS_PER_DECADE * np.log10(largest / TINY_BYTES)))
    # Multiples of eight bytes, so that elements of every type fill each size. Transfers that share
    # a link are as if their bytes were one message, hence sizes up to their sum.
    grid = np.unique(np.ceil(np.geomspace(TINY_BYTES, largest, points) / 8) * 8)
    example = events[0]
    measured = [_transfer_s(group, example.kind, example.dtype, size) for size in grid.tolist()]
    times_s = np.array([call_s for call_s, _ in measured])
    work_s = np.array([core_s for _, core_s in measured])
    # The first call of a row follows the pause between rounds and spends the link's credit; the
    # later ones are steady.
    return Curve(grid, times_s[:, 0], times_s[:, 1:].mean(axis=1), work_s[:, 1:].mean(axis=1))


def _transfer_s(
    group: RankGroup, kind: str, dtype: str, operand_bytes: float
) -> tuple[list[float], list[float]]:
    """Time a row of calls after a pause; return medians of each call's seconds, and on a core.

    The shorter side of a message counts, as the longer one waits (DistSim, section 4.2), and of all
    others the slowest rank.
    """
    group.ask("load_transfer", Transfer(kind, operand_bytes, dtype, PAIR, False), _ROW)
    rounds = np.array([group.ask("time_work_round") for _ in range(_TRANSFER_ROUNDS)])
    calls, work = rounds[..., 0], rounds[..., 1]
    pair_s = calls.min(axis=1) if kind == "send" else calls.max(axis=1)
    return np.median(pair_s, axis=0).tolist(), np.median(work.mean(axis=1), axis=0).tolist()


def predict_ranks(
    function: Function, cluster: Cluster, pair: PairTimes, cores: Sequence[int]
) -> Timeline:
    """The timeline of a program on real ranks.

    Args:
        function: a distributed program.
        cluster: cluster whose nodes the ranks fill in order.
        pair: measured on two ranks.
        cores: core of each rank.

    Raises:
        NoDataError: the program has an event that the two ranks did not measure.
    """
    # The structure says what waits for what; cores and links are contended for in time, which only
    # a simulation shows.
    prepared = program_structure(function, cluster)
    structure, instruction = prepared.structure, prepared.instruction
    # Joins are instruction -1, the last of these times, and take none.
    times_s = np.array(
        [*(pair.time(event) for event in rank_events(function, cluster)), EventTime(0.0)]
    )
    core_s, network_s, credit_s, messages = times_s[instruction].T
    return simulate_on_cores(structure, core_s, network_s, credit_s, messages.astype(int), cores)


shorten_reprs(__name__)
