"""Spans of the script's thread in an iteration: work, waits, and sharing of its core."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from perfmodel.emulate.runs._run import EmulatedRun, RankRun
from perfmodel.ingest import MeasuredTrace
from perfmodel.ingest.profiles import Activity, ActivityKind, trace_of

if TYPE_CHECKING:
    import pandas as pd

Phase = Literal["forward", "backward", "optimizer"]
_PHASE_AFTER: Final[Mapping[str, Phase]] = {"backward": "backward", "backward_end": "optimizer"}
"""Phase that begins at a mark."""
_BEHIND_S: Final = 1e-3
"""A pass that ends within this time after the last collective in progress counts as having waited
for it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A span of work of the thread; times are relative to the iteration's start."""

    start_s: float
    end_s: float
    phase: Phase
    after: tuple[int, ...]
    """Positions of the calls that it had to wait for."""
    issues: int
    """Position of the call that it makes at its end; -1 for none."""


@dataclass(frozen=True, eq=False)
class Iteration:
    """One iteration of one rank."""

    number: int
    time_s: float
    spans: tuple[Span, ...]
    calls: "pd.DataFrame"
    """The iteration's collectives in the order of their calls; times count from its start."""


def iteration(rank: RankRun, number: int) -> Iteration:
    """Cut iteration `number` (from 1) of a rank at its calls and waits.

    DistributedDataParallel waits without a call by the script: at the end of the backward pass, for
    all collectives that this pass has issued. The wait begins when the thread's own work is done.
    """
    # Iteration n lies between the ends of steps n - 1 and n; all times count from its start.
    first = rank.ends.iloc[number - 1]
    last = rank.ends.iloc[number]
    begin_s = float(first.wall_s)
    time_s = float(last.wall_s - first.wall_s)
    calls: Any = (
        rank.collectives[rank.collectives.iteration == number].reset_index(drop=True).copy()
    )
    for name in ("issued_s", "start_s", "end_s", "wait_start_s", "wait_end_s"):
        calls[name] = calls[name] - begin_s
    marks: Any = rank.marks[(rank.marks.wall_s > first.wall_s) & (rank.marks.wall_s <= last.wall_s)]
    # Calls, waits and marks in the order of time cut the iteration into spans.
    cutter = _Cutter(calls, float(first.thread_s))
    moments: list[tuple[float, Callable[[], None]]] = []
    for mark in marks.itertuples():
        mark_s = float(mark.wall_s) - begin_s
        moments.append((mark_s, partial(cutter.mark, mark_s, str(mark.name), float(mark.thread_s))))
    for place, call in enumerate(calls.itertuples()):
        moments.append((float(call.issued_s), partial(cutter.call, float(call.issued_s), place)))
        if call.wait_end_s > 0:
            moments.append(
                (float(call.wait_start_s), partial(cutter.wait, float(call.wait_start_s), place))
            )
    for _, cut in sorted(moments, key=lambda moment: moment[0]):
        cut()
    return Iteration(number, time_s, cutter.end(time_s), calls)


class _Cutter:
    """Cuts an iteration into spans of its thread, moment by moment."""

    def __init__(self, calls: Any, thread_s: float) -> None:
        """
        Args:
            calls: collectives of the iteration.
            thread_s: processor time of the thread at its start.
        """
        self._calls, self._users = calls, users_of(calls)
        self._spans: list[Span] = []
        self._waited = set(np.flatnonzero(calls.wait_end_s > 0).tolist())
        """Calls that the script waits for explicitly, or is known to have waited for."""
        self._phase: Phase = "forward"
        # Start of the span under way, and the calls that it comes after.
        self._start_s = 0.0
        self._after = ()
        # A moment at which the processor time of the thread is known.
        self._known_s = 0.0
        self._known_thread_s = thread_s

    def call(self, moment_s: float, place: int) -> None:
        """Cut where the thread issues a collective: a span ends with that."""
        self._close(moment_s, issues=place)
        self._start_s, self._after = max(self._start_s, moment_s), ()
        self._known_s, self._known_thread_s = moment_s, float(self._calls.thread_s[place])

    def wait(self, moment_s: float, place: int) -> None:
        """Cut where the thread waits for a collective: the next span comes after that one."""
        self._close(moment_s)
        self._start_s = max(self._start_s, float(self._calls.wait_end_s[place]))
        self._after = (place,)
        # The thread does not work while it waits.
        self._known_thread_s += max(0.0, moment_s - self._known_s)
        self._known_s = self._start_s

    def mark(self, moment_s: float, name: str, thread_s: float) -> None:
        """Cut at a mark, where the phase may change."""
        # DistributedDataParallel waits inside backward, where no call of the script shows it: it
        # waited for all calls that are pending at the end of backward.
        pending = self._pending(moment_s) if name == "backward_end" else []
        if pending:
            self._backward_end(moment_s, thread_s, pending)
        else:
            if moment_s > self._start_s or self._after:
                self._close(moment_s)
            self._start_s = moment_s
            self._after = ()
        if name in _PHASE_AFTER:
            self._phase = _PHASE_AFTER[name]

    def end(self, time_s: float) -> tuple[Span, ...]:
        """Close the last span at the end of the iteration; return all spans."""
        if self._after or time_s > self._start_s:
            self._spans.append(Span(self._start_s, time_s, self._phase, self._after, -1))
        return tuple(self._spans)

    def _backward_end(self, moment_s: float, thread_s: float, pending: list[int]) -> None:
        """Cut at the end of a backward pass that has waited for calls."""
        done_s = float(self._calls.end_s[pending].max())
        end_s = moment_s
        # Where backward ends right behind the last collective, it has waited for that: its work was
        # done when the thread had had its processor time.
        if moment_s - done_s < _BEHIND_S:
            worked_s = thread_s - self._known_thread_s
            end_s = min(done_s, max(self._start_s, done_at_s(self._known_s, worked_s, self._users)))
        self._waited.update(pending)
        if end_s > self._start_s or self._after:
            self._close(end_s)
        # Time after the last completed call counts towards the next span.
        self._start_s, self._after = max(self._start_s, min(moment_s, done_s)), tuple(pending)
        if moment_s - self._start_s >= _BEHIND_S:
            self._start_s = moment_s

    def _pending(self, moment_s: float) -> list[int]:
        """Return the calls made up to a moment that were not waited for yet."""
        made = np.flatnonzero(self._calls.issued_s <= moment_s).tolist()
        return [place for place in made if place not in self._waited]

    def _close(self, moment_s: float, issues: int = -1) -> None:
        """End the current span."""
        end_s = max(self._start_s, moment_s)
        self._spans.append(Span(self._start_s, end_s, self._phase, self._after, issues))


def typical(rank: RankRun, numbers: np.ndarray) -> Iteration:
    """The iteration of median length among `numbers`."""
    ends_s = rank.ends.wall_s.to_numpy()
    spans_s = np.diff(ends_s)[numbers - 1]
    return iteration(rank, int(numbers[np.argsort(spans_s)[(len(numbers) - 1) // 2]]))


class User(NamedTuple):
    """A collective in progress."""

    start_s: float
    end_s: float
    core_s: float
    """Its processor time, spread over its duration."""


def users_of(calls: "pd.DataFrame") -> list[User]:
    """Convert recorded calls to the intervals in which collectives used the core."""
    rows: Any = calls.itertuples()
    return [User(max(row.start_s, row.issued_s), row.end_s, row.core_s) for row in rows]


def own_s(start_s: float, end_s: float, users: Sequence[User]) -> float:
    """Core seconds in an interval that the core's users leave free; the inverse of `done_at_s`."""
    return sum(
        (high - low) * _free_share(low, users)
        for low, high in pairwise(_moments_s(start_s, end_s, users))
    )


def done_at_s(start_s: float, work_s: float, users: Sequence[User]) -> float:
    """Return when work that begins at `start_s` ends, if it has only the share of the core that
    `users` leave free."""
    # The share of the core is constant between two moments, so work is done piece by piece.
    *moments_s, _ = _moments_s(start_s, float("inf"), users)
    for low_s, high_s in pairwise(moments_s):
        share = _free_share(low_s, users)
        if share > 0 and (high_s - low_s) * share >= work_s:
            return low_s + work_s / share
        work_s -= (high_s - low_s) * share
    # After the last moment nobody else uses the core.
    return moments_s[-1] + work_s


def _moments_s(low_s: float, high_s: float, users: Sequence[User]) -> list[float]:
    """The limits, and the moments between them at which the share of the core changes."""
    moments_s = {low_s, high_s}
    for start_s, end_s, _ in users:
        moments_s.update(moment_s for moment_s in (start_s, end_s) if low_s < moment_s < high_s)
    return sorted(moments_s)


def _free_share(moment_s: float, users: Sequence[User]) -> float:
    """Share of a core that its users leave to the script's thread at a moment."""
    # Several collectives may want more than the whole core; the thread then gets nothing.
    taken_share = sum(
        core_s / (end_s - start_s)
        for start_s, end_s, core_s in users
        if start_s <= moment_s < end_s
    )
    return max(0.0, 1.0 - taken_share)


_GATHERS: Final = {"forward": "param_gather", "backward": "param_gather_backward"}


def measured_trace(run: EmulatedRun, steps: int = 10) -> MeasuredTrace:
    """Return the trace of each real rank's last iterations: stream 0 shows the script, and every
    further stream the collectives of one communicator.

    Args:
        run: the recorded run.
        steps: iterations, at most.

    Raises:
        TableError: no iteration was recorded.
    """
    activities = []
    for device, rank in enumerate(run.ranks):
        ends_s = rank.ends.wall_s.to_numpy()
        lanes: dict[tuple[str, str], int] = {}
        for number in range(max(1, len(ends_s) - steps), len(ends_s)):
            recorded = iteration(rank, number)
            begin_s = float(ends_s[number - 1])
            activities += _work(recorded, device, begin_s)
            activities += _collectives(recorded, device, begin_s, lanes)
    return trace_of(activities, "emulation")


def _work(recorded: Iteration, device: int, begin_s: float) -> Iterator[Activity]:
    """The script's work in an iteration that begins at `begin_s`, on stream 0."""
    for span in recorded.spans:
        if span.end_s > span.start_s:
            yield Activity(
                device,
                0,
                begin_s + span.start_s,
                begin_s + span.end_s,
                span.phase,
                ActivityKind.COMPUTE,
                span.phase,
                0,
                step=recorded.number,
            )


def _collectives(
    recorded: Iteration, device: int, begin_s: float, lanes: dict[tuple[str, str], int]
) -> Iterator[Activity]:
    """The collectives of an iteration that begins at `begin_s`; new communicators get the next
    stream in `lanes`."""
    # A collective belongs to the phase in which it was issued.
    phase_of = {span.issues: span.phase for span in recorded.spans}
    rows: Any = recorded.calls.itertuples()
    for place, call in enumerate(rows):
        stream = lanes.setdefault((call.group, call.lane), 1 + len(lanes))
        name = f"{call.kind} {call.bytes} bytes, {call.ranks} ranks, group {call.group} #{call.sequence}"
        yield Activity(
            device,
            stream,
            begin_s + call.start_s,
            begin_s + max(call.start_s, call.end_s),
            name,
            ActivityKind.COMMUNICATION,
            _phase(call.kind, phase_of.get(place, "forward")),
            0,
            step=recorded.number,
        )


def _phase(kind: str, phase: str) -> str:
    # Names of the timeline's kinds, so that measured and predicted traces are drawn alike.
    if kind in ("send", "recv"):
        return "send_backward" if phase == "backward" else "send_forward"
    if kind in ("all_reduce", "reduce_scatter") and phase == "backward":
        return "grad_reduce"
    return _GATHERS.get(phase, "") if kind == "all_gather" else ""
