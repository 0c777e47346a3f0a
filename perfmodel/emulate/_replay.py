"""Replays an emulated iteration on the timeline, to predict other delays and slack.

Also a curve of iteration time against a delay, emulated and predicted, and how much of the delay is
hidden."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.display import frame_html
from perfmodel.emulate.environment import EmulationError, delayed_as
from perfmodel.emulate.runs import EmulatedRun, Iteration, User, done_at_s, own_s, typical, users_of
from perfmodel.program import N_STREAMS, Kind, Stream, Structure
from perfmodel.timeline import CompiledStructure, compile_structure, makespan, makespan_and_grad

if TYPE_CHECKING:
    import pandas as pd


_PHASES: Final = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD, "optimizer": Kind.OPTIMIZER}
_BISECTIONS: Final = 40


@dataclass(frozen=True, eq=False)
class Replay:
    """An iteration as a structure: one class per span of the script's thread and per collective."""

    structure: Structure
    durations_s: Float[np.ndarray, " classes"]
    """Seconds of each class; those of a span exclude the time that collectives took from its
    core."""
    kinds: tuple[str, ...]
    """Kind of collective of each class, empty for spans."""
    core_s: Float[np.ndarray, " classes"]
    """Processor time of each collective, spread over its duration; it has priority over the
    thread's own work."""
    stated_s: Float[np.ndarray, " classes"]
    """Seconds that the prices state for each collective; the calling thread may use a part of the
    collective's duration."""

    @cached_property
    def _compiled(self) -> CompiledStructure:
        return compile_structure(self.structure)

    def is_of_kind(self, kind: str) -> Float[np.ndarray, " classes"]:
        """Mark the collectives of a kind (`send_recv`: both sides of messages)."""
        return np.array([float(bool(k) and kind in (k, delayed_as(k))) for k in self.kinds])

    def time_s(self, kind: str = "", delay_s: float = 0.0) -> float:
        """Iteration time with a delay added to every collective of a kind."""
        return float(makespan(self._compiled, self._delayed_s(kind, delay_s)))

    def calls_felt(self, kind: str, delay_s: float = 0.0) -> float:
        """Number of a kind's collectives on the critical path, by gradient."""
        _, grad = makespan_and_grad(self._compiled, self._delayed_s(kind, delay_s))
        return float(grad @ self.is_of_kind(kind))

    def _delayed_s(self, kind: str, delay_s: float) -> Float[np.ndarray, " classes"]:
        """Durations under a delay: spans grow by the processor time of overlapping collectives."""
        # Op by op, because the share of the core that a span loses depends on the collectives under
        # way by then. A recorded span includes what collectives took of its core. Under a delay
        # others are under way, so spans are recomputed before the critical path is.
        spans = self.structure
        durations_s = np.maximum(0.0, self.durations_s + self.is_of_kind(kind) * delay_s)
        ends_s = np.zeros(spans.n_ops)
        users = []
        for op, (duration_class, before) in enumerate(zip(spans.duration, spans.pred, strict=True)):
            start_s = float(max((ends_s[b] for b in before if b >= 0), default=0.0))
            if self.kinds[duration_class]:
                ends_s[op] = start_s + durations_s[duration_class]
                users.append(User(start_s, float(ends_s[op]), float(self.core_s[duration_class])))
            else:
                ends_s[op] = done_at_s(start_s, float(durations_s[duration_class]), users)
                # Class 0 is that of joins, which take no time.
                if duration_class:
                    durations_s[duration_class] = ends_s[op] - start_s
        return durations_s

    def slack_s(self, kind: str) -> float:
        """Largest delay that brings no further collectives of the kind onto the critical path.

        Bisection on the gradient, which only grows with the delay: the iteration is a maximum of
        sums.
        """
        # The derivative of the iteration with respect to the delay counts the collectives of the
        # kind on the critical path.
        first = self.calls_felt(kind)
        low_s = 0.0
        high_s = max(self.time_s(), 1e-6)
        if self.calls_felt(kind, high_s) <= first:
            return high_s
        for _ in range(_BISECTIONS):
            middle_s = (low_s + high_s) / 2
            if self.calls_felt(kind, middle_s) <= first:
                low_s, high_s = (middle_s, high_s)
            else:
                low_s, high_s = (low_s, middle_s)
        return low_s


def replay(iteration: Iteration) -> Replay:
    """Build a replay: spans in sequence with their waits, and collectives lane by lane."""
    # The thread is a chain of spans; each call hangs off the span that makes it and off the call
    # before it in its lane.
    ops = _Ops()
    thread = -1
    calls = {}
    last_of_lane: dict[tuple[str, str], int] = {}
    lanes = dict.fromkeys(zip(iteration.calls.group, iteration.calls.lane, strict=True))
    stream = {lane: n for n, lane in enumerate(lanes)}
    users = users_of(iteration.calls)
    for span in iteration.spans:
        before = ops.after([thread, *(calls[place] for place in span.after if place in calls)])
        # A span's work is that of its own thread, without the share of the core that collectives
        # took.
        work_s = max(0.0, own_s(span.start_s, span.end_s, users))
        thread = ops.add(_Op(work_s, _PHASES[span.phase], int(Stream.COMPUTE), before))
        if span.issues >= 0:
            call = iteration.calls.iloc[span.issues]
            lane = call.group, call.lane
            # The first call of a lane may begin late for other reasons than the lane's order, and
            # keeps that.
            at_once_s = max(0.0, float(call.end_s - max(call.start_s, call.issued_s)))
            late_s = (
                max(0.0, float(call.start_s - call.issued_s)) if lane not in last_of_lane else 0.0
            )
            place = ops.add(
                _Op(
                    at_once_s + late_s,
                    Kind.GRAD_REDUCE,
                    stream[lane] * N_STREAMS + Stream.DATA_COMM,
                    ops.after([thread, last_of_lane.get(lane, -1)]),
                    call.kind,
                    min(float(call.core_s), at_once_s),
                    float(call.delay_s),
                )
            )
            last_of_lane[lane] = calls[span.issues] = place
    return ops.finished(thread)


class _Op(NamedTuple):
    """An op of a structure that is being built; each op has its own class."""

    time_s: float
    kind: Kind
    stream: int
    pred: list[int]
    collective: str = ""
    core_s: float = 0.0
    stated_s: float = 0.0


class _Ops:
    """A structure that is being built."""

    def __init__(self) -> None:
        self._ops: list[_Op] = []

    def add(self, op: _Op) -> int:
        """An op that takes time, by its number."""
        self._ops.append(op)
        return len(self._ops) - 1

    def after(self, before: Sequence[int]) -> list[int]:
        """Replace any number of predecessors by at most two ops; numbers below 0 mean none."""
        ops = [op for op in dict.fromkeys(before) if op >= 0]
        # A structure's ops have at most two predecessors; joins of no duration make a tree of more.
        while len(ops) > 2:
            ops = [*ops[2:], self.add(_Op(0.0, Kind.ZERO, -1, ops[:2]))]
        return ops

    def finished(self, thread: int) -> Replay:
        """Add an operation that ends a thread, and return all operations."""
        ops = [*self._ops, _Op(0.0, Kind.ZERO, -1, [thread])]
        n = len(ops)
        pred = np.full((n, 2), -1)
        for number, op in enumerate(ops):
            pred[number, : len(op.pred)] = op.pred

        # Every op that takes time is a class of its own; class 0 takes none.
        kinds: Any = np.array([op.kind for op in ops])
        classes = np.where(kinds == Kind.ZERO, 0, np.arange(n) + 1)
        zeros = np.zeros(n + 1, np.int64)
        structure = Structure(
            duration=classes,
            pred=pred,
            lag=np.zeros((n, 2), np.int64),
            stream=np.array([op.stream for op in ops]),
            micro_batch=np.full(n, -1),
            class_kind=np.array([Kind.ZERO, *kinds]),
            class_stage=zeros,
            class_segment=zeros,
            alloc=np.zeros(n, np.int64),
            free=np.zeros(n, np.int64),
            devices=1 + max(op.stream for op in ops) // N_STREAMS,
        )
        times_s = np.array([(0.0, 0.0, 0.0), *((op.time_s, op.core_s, op.stated_s) for op in ops)])
        kinds_of_collectives = ("", *(op.collective for op in ops))
        return Replay(structure, times_s[:, 0], kinds_of_collectives, times_s[:, 1], times_s[:, 2])


_LEAST: Final = 3
"""Least number of iterations of a point of the curve."""


@dataclass(frozen=True, kw_only=True)
class EmulatedCurve:
    """Iteration time against the delay of a collective, emulated and predicted.

    The delays were set in turn while the script ran, so that drifts of the machine cancel.
    """

    collective: str
    delays_s: tuple[float, ...]
    emulated_s: tuple[float, ...]
    """Median iteration at each delay."""
    spread_s: tuple[float, ...]
    """Half the distance between the quartiles."""
    iterations: tuple[int, ...]
    """Number of iterations behind each median."""
    predicted_s: tuple[float, ...]
    """Seconds predicted from the timeline of one iteration at the first delay."""
    felt: float
    """Collectives of the kind on the critical path at the first delay, by the timeline's
    gradient."""
    felt_at_most: float
    """Collectives of the kind on the critical path at the last delay."""
    hidden_s: float
    """Largest delay, in addition to the first, that puts no further collectives on the critical
    path."""

    @property
    def errors(self) -> Float[np.ndarray, " delays"]:
        """Predicted over emulated time, minus 1."""
        return np.array(self.predicted_s) / np.array(self.emulated_s) - 1

    @property
    def knees_s(self) -> tuple[float, float]:
        """Knee of the best two-line fit of each curve: emulated, predicted."""
        return _knee(self.delays_s, self.emulated_s), _knee(self.delays_s, self.predicted_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        emulated_s, predicted_s = self.knees_s
        return asdict(self) | {
            "errors": self.errors.tolist(),
            "emulated_knee_s": emulated_s,
            "predicted_knee_s": predicted_s,
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per delay."""
        import pandas as pd

        names = ("delays_s", "emulated_s", "spread_s", "iterations", "predicted_s")
        return pd.DataFrame({name: getattr(self, name) for name in names})

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def emulated_curve(
    run: EmulatedRun, collective: str, delays_s: Sequence[float], iterations_per_delay: int
) -> EmulatedCurve:
    """The curve of a run whose delay changed every `iterations_per_delay` iterations.

    The first iteration of each delay is left out.

    Raises:
        EmulationError: too few iterations for the delays.
    """
    # Delays took turns while the script ran: one table has all points, and slow drifts of the
    # machine hit all alike.
    table: Any = run.iterations()
    # The first round of delays warms up, and the first iteration of each stay still has the delay
    # before.
    iterations_per_round = iterations_per_delay * len(delays_s)
    needed = 2 * iterations_per_round
    steady: Any = table
    if len(table):
        is_warm = table.iteration >= iterations_per_round
        has_new_delay = table.iteration % iterations_per_delay > 0
        steady = table[is_warm & has_new_delay]
    point: Any = np.array([])
    if len(steady):
        point = steady.iteration // iterations_per_delay % len(delays_s)
    counts = np.bincount(np.asarray(point, int), minlength=len(delays_s))
    if counts.min() < _LEAST:
        # After the warm-up, every round gives all iterations of a delay but one.
        further_rounds = _LEAST // max(1, iterations_per_delay - 1)
        raise EmulationError(
            f"sweep: {len(table)} iterations are too few for {len(delays_s)} delays of {iterations_per_delay} "
            "iterations each; the script must run at least "
            f"{max(needed, iterations_per_round * (1 + further_rounds))}"
        )
    # A step lasts until its slowest rank is done.
    worst = steady.assign(point=point).groupby(["iteration", "point"], as_index=False).time_s.max()
    groups = worst.groupby("point").time_s
    first = steady[(point == 0) & (steady["rank"] == run.ranks[0].rank)].iteration.to_numpy()
    replayed = replay(typical(run.ranks[0], first))
    added_delays_s = [delay_s - delays_s[0] for delay_s in delays_s]
    return EmulatedCurve(
        collective=collective,
        delays_s=tuple(delays_s),
        emulated_s=tuple(groups.median().tolist()),
        spread_s=tuple(((groups.quantile(0.75) - groups.quantile(0.25)) / 2).tolist()),
        iterations=tuple(groups.count().tolist()),
        predicted_s=tuple(replayed.time_s(collective, delay_s) for delay_s in added_delays_s),
        felt=replayed.calls_felt(collective),
        felt_at_most=replayed.calls_felt(collective, added_delays_s[-1]),
        hidden_s=replayed.slack_s(collective),
    )


def _knee(x: Sequence[float], y: Sequence[float]) -> float:
    """Least squares of a continuous line with one break; NaN for fewer than four points."""
    if len(x) < 4:
        return float("nan")
    xs = np.asarray(x, float)
    ys = np.asarray(y, float)
    best = (np.inf, float("nan"))
    # Flat while the delay is hidden behind computation, then rising (NeuronaBox, figure 4): a line
    # with one break, by grid search over the break, since the rest is linear least squares.
    for knee in np.linspace(xs[1], xs[-2], 200):
        basis = np.stack([np.ones_like(xs), xs, np.maximum(0.0, xs - knee)], axis=1)
        coefficients, *_ = np.linalg.lstsq(basis, ys, rcond=None)
        best = min(best, (float(((basis @ coefficients - ys) ** 2).sum()), float(knee)))
    return best[1]
