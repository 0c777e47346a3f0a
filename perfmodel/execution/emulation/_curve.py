"""Iteration time against a delay, emulated and predicted; how much of the delay is hidden."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.display import frame_html
from perfmodel.execution.emulation._orders import EmulationError
from perfmodel.execution.emulation._replay import replay
from perfmodel.execution.emulation._run import EmulatedRun
from perfmodel.execution.emulation._spans import typical

if TYPE_CHECKING:
    import pandas as pd

_LEAST: Final = 3
"""Iterations that a point of the curve needs."""


@dataclass(frozen=True, kw_only=True)
class EmulatedCurve:
    """One value of the delay after another was set while the script ran, in turn, so that drifts cancel."""

    collective: str
    delays_s: tuple[float, ...]
    emulated_s: tuple[float, ...]
    """Median iteration at each delay."""
    spread_s: tuple[float, ...]
    """Half the distance between the quartiles."""
    iterations: tuple[int, ...]
    """That each median is of."""
    predicted_s: tuple[float, ...]
    """By the timeline of one iteration at the first delay."""
    felt: float
    """Collectives of the kind on the critical path at the first delay, by the timeline's gradient."""
    felt_at_most: float
    """At the last delay."""
    hidden_s: float
    """Delay of each collective, beyond the first, up to which no more of them are felt."""

    @property
    def errors(self) -> Float[np.ndarray, " delays"]:
        """Predicted over emulated, less 1."""
        return np.array(self.predicted_s) / np.array(self.emulated_s) - 1

    @property
    def knees_s(self) -> tuple[float, float]:
        """Where two straight lines that fit best meet: emulated, predicted."""
        return _knee(self.delays_s, self.emulated_s), _knee(self.delays_s, self.predicted_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        emulated_s, predicted_s = self.knees_s
        return asdict(self) | {
            "errors": self.errors.tolist(), "emulated_knee_s": emulated_s, "predicted_knee_s": predicted_s,
        }  # fmt: skip

    def to_frame(self) -> "pd.DataFrame":
        """One row per delay."""
        import pandas as pd

        names = ("delays_s", "emulated_s", "spread_s", "iterations", "predicted_s")
        return pd.DataFrame({name: getattr(self, name) for name in names})

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def emulated_curve(run: EmulatedRun, collective: str, delays_s: Sequence[float], every: int) -> EmulatedCurve:
    """The curve of a run whose delay changed every `every` iterations; the first of each stay is left out.

    Raises:
        EmulationError: too few iterations for the delays.
    """
    table: Any = run.iterations()
    needed = every * len(delays_s) * 2
    steady: Any = (
        table[(table.iteration >= every * len(delays_s)) & (table.iteration % every > 0)] if len(table) else table
    )
    point = steady.iteration // every % len(delays_s) if len(steady) else np.array([])
    counts = np.bincount(np.asarray(point, int), minlength=len(delays_s))
    if counts.min() < _LEAST:
        raise EmulationError(
            f"sweep: {len(table)} iterations are too few for {len(delays_s)} delays of {every} iterations each; "
            f"let the script make at least {max(needed, every * len(delays_s) * (1 + _LEAST // max(1, every - 1)))}"
        )
    worst = steady.assign(point=point).groupby(["iteration", "point"], as_index=False).time_s.max()
    groups = worst.groupby("point").time_s
    first = steady[(point == 0) & (steady["rank"] == run.ranks[0].rank)].iteration.to_numpy()
    found = replay(typical(run.ranks[0], first))
    beyond = [delay - delays_s[0] for delay in delays_s]
    return EmulatedCurve(
        collective=collective,
        delays_s=tuple(delays_s),
        emulated_s=tuple(groups.median().tolist()),
        spread_s=tuple(((groups.quantile(0.75) - groups.quantile(0.25)) / 2).tolist()),
        iterations=tuple(groups.count().tolist()),
        predicted_s=tuple(found.time_s(collective, delay) for delay in beyond),
        felt=found.felt(collective),
        felt_at_most=found.felt(collective, beyond[-1]),
        hidden_s=found.slack_s(collective),
    )


def _knee(x: Sequence[float], y: Sequence[float]) -> float:
    """Least squares of a continuous line with one break; NaN for fewer than four points."""
    if len(x) < 4:
        return float("nan")
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    best = (np.inf, float("nan"))
    for knee in np.linspace(xs[1], xs[-2], 200):
        basis = np.stack([np.ones_like(xs), xs, np.maximum(0.0, xs - knee)], axis=1)
        coefficients, *_ = np.linalg.lstsq(basis, ys, rcond=None)
        best = min(best, (float(((basis @ coefficients - ys) ** 2).sum()), float(knee)))
    return best[1]
