"""Whether intervals are wide where errors are large: reliability by decile of width, and scores."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float
from studies.tables import percent, rows_table

DECILES = 10


@dataclass(frozen=True, kw_only=True)
class WidthDecile:
    """A tenth of the runs, by the width of their intervals."""

    n: int
    ratio: float
    """Upper end of the interval over its lower, the median of the runs."""
    error: float
    """Median relative error."""
    error_90: float
    """Nine tenths of the errors are below."""
    inside: float


def width_deciles(
    measured_s: Float[np.ndarray, " runs"],
    predicted_s: Float[np.ndarray, " runs"],
    lo_s: Float[np.ndarray, " runs"],
    hi_s: Float[np.ndarray, " runs"],
) -> list[WidthDecile]:
    """Tenths of the runs, from the narrowest intervals to the widest; only predicted and timed runs
    count."""
    counted = (
        np.isfinite(measured_s) & np.isfinite(predicted_s) & np.isfinite(lo_s) & np.isfinite(hi_s)
    )
    frame = pd.DataFrame(
        {
            "ratio": (hi_s / lo_s)[counted],
            "error": np.abs(predicted_s / measured_s - 1)[counted],
            "inside": ((lo_s <= measured_s) & (measured_s <= hi_s))[counted],
        }
    ).sort_values("ratio", kind="stable")
    deciles = []
    # Tenths of equal number, whatever the widths are.
    for places in np.array_split(np.arange(len(frame)), DECILES):
        if len(places):
            part = frame.iloc[places]
            deciles.append(
                WidthDecile(
                    n=len(part),
                    ratio=float(part["ratio"].median()),
                    error=float(part["error"].median()),
                    error_90=float(part["error"].quantile(0.9)),
                    inside=float(part["inside"].mean()),
                )
            )
    return deciles


def deciles_table(deciles: list[WidthDecile]) -> str:
    """Format the deciles as Markdown."""
    rows = [
        (
            number,
            decile.n,
            f"{decile.ratio:.2f}",
            percent(decile.error),
            percent(decile.error_90),
            percent(decile.inside),
        )
        for number, decile in enumerate(deciles, 1)
    ]
    return rows_table(
        ("tenth by width", "runs", "ends apart", "median error", "nine tenths below", "inside"),
        rows,
    )


def interval_score(
    source: np.ndarray,
    log_error: Float[np.ndarray, " runs"],
    lower: Float[np.ndarray, " runs"],
    upper: Float[np.ndarray, " runs"],
) -> float:
    """Interval score of log step times at 90 % (Gneiting and Raftery, JASA 102, 2007, equation 43),
    mean over sources.

    Args:
        source: of every run.
        log_error: log(measured / predicted).
        lower: of the interval's lower end, log(end / predicted).
        upper: of its upper end.
    """
    # An interval is punished by its width, and twenty times (2 / 10 %) as much by how far it
    # misses.
    outside = np.maximum(lower - log_error, 0) + np.maximum(log_error - upper, 0)
    score = upper - lower + 20 * outside
    return float(pd.Series(score).groupby(source).mean().mean())


def interval_scores(
    source: np.ndarray,
    measured_s: Float[np.ndarray, " runs"],
    predicted_s: Float[np.ndarray, " runs"],
    lo_s: Float[np.ndarray, " runs"],
    hi_s: Float[np.ndarray, " runs"],
) -> dict[str, float]:
    """`ours`; and `fixed`, of the one factor above and below our predictions that scores best on
    the same runs, which is told what ours is not, with its ends `fixed_ratio` apart."""
    with np.errstate(divide="ignore", invalid="ignore"):
        log_error = np.log(measured_s / predicted_s)
        lower = np.log(lo_s / predicted_s)
        upper = np.log(hi_s / predicted_s)
    counted = np.isfinite(log_error) & np.isfinite(lower) & np.isfinite(upper)
    log_error, lower, upper = log_error[counted], lower[counted], upper[counted]
    sources = np.asarray(source, str)[counted]
    # Intervals of one width for all runs, from 5 % to three times either way, by trial.
    half_widths = np.linspace(0.05, 1.2, 231)
    # The best is chosen with these very runs in view: a bar that is hard to beat.
    scores = [
        interval_score(sources, log_error, np.full_like(lower, -half), np.full_like(upper, half))
        for half in half_widths
    ]
    best = int(np.argmin(scores))
    return {
        "ours": interval_score(sources, log_error, lower, upper),
        "fixed": float(scores[best]),
        "fixed_ratio": float(np.exp(2 * half_widths[best])),
    }
