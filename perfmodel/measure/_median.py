"""Distribution-free confidence interval of a median."""

from collections.abc import Sequence
from statistics import median

from perfmodel.errors import PerfModelError


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Confidence interval of the median of independent values, between two of their order statistics.

    The number of values below the true median is binomial(n, 1/2) whatever the distribution, so
    [x_(j+1), x_(n-j)] covers it with probability 1 - 2 P(B <= j) (order statistics counted from one);
    the largest j that keeps `confidence` is taken. Le Boudec, Performance Evaluation of Computer and
    Communication Systems, theorem 2.1; recommended for timings by Hoefler and Belli, SC15, section 3.2.

    Returns:
        (low, high), or `None` where no such interval exists (fewer than 6 values at 95 %).

    Raises:
        PerfModelError: if `confidence` is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise PerfModelError(f"confidence must lie between 0 and 1, got {confidence!r}")
    n = len(values)
    # whole numbers: 2^n outgrows floating point
    below, ways, cut = 0, 1, -1
    while cut + 1 < n / 2:
        below += ways
        if 2 * below / (1 << n) > 1 - confidence:
            break
        cut += 1
        ways = ways * (n - cut) // (cut + 1)
    if cut < 0:
        return None
    ordered = sorted(values)
    return ordered[cut], ordered[n - 1 - cut]


def relative_half_width(values: Sequence[float], confidence: float = 0.95) -> float:
    """Half the width of the median's interval over the median; infinite where there is no interval."""
    interval = median_interval(values, confidence)
    if interval is None:
        return float("inf")
    return (interval[1] - interval[0]) / 2 / median(values)
