"""The collective and the number of ranks of a run, from the two bandwidths that nccl-tests prints.

nccl-tests multiplies the algorithm bandwidth (bytes over time) by a factor to get the bus bandwidth
(doc/PERFORMANCE.md of nccl-tests): 2 (n - 1) / n for an all-reduce among n ranks, (n - 1) / n for
an all-gather, a reduce-scatter or an all-to-all, 1 for a broadcast, a reduce or a send-receive. The
factor is thus a fingerprint of both, which also tells where a log has lost lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

BUS_FACTORS: Final = {
    "all_reduce": (2.0, 1.0),
    "all_gather": (1.0, 1.0),
    "reduce_scatter": (1.0, 1.0),
    "alltoall": (1.0, 1.0),
    "broadcast": (1.0, 0.0),
    "reduce": (1.0, 0.0),
    "sendrecv": (1.0, 0.0),
}
"""Numbers a and b of the factor a (1 - b / n) of each test among n ranks."""
_DIGIT: Final = 0.005
"""Bandwidths are printed to two decimals."""
_MOST_ROUNDING: Final = 0.02
"""Relative error of a factor above which a line is ignored."""


@dataclass(frozen=True)
class BandwidthRatio:
    """Ratio of bus to algorithm bandwidth on one line, within the rounding of its digits."""

    ratio: float
    rounding: float
    """Largest distance of the true factor from the ratio."""

    def allows(self, test: str, ranks: int) -> bool:
        """Whether the ratio fits this test on this number of ranks; true for tests whose factor is
        unknown."""
        if test not in BUS_FACTORS:
            return True
        scale, by_ranks = BUS_FACTORS[test]
        return abs(scale * (1 - by_ranks / ranks) - self.ratio) <= self.rounding

    def ranks(self, test: str) -> int | None:
        """Number of ranks at which a test has this ratio; None if the ratio does not depend on it,
        or if no number or several fit."""
        scale, by_ranks = BUS_FACTORS.get(test, (1.0, 0.0))
        # a (1 - b / n) = ratio solved for n. For many ranks the factor hardly
        # changes: neighbours fit too, and then it does not tell.
        missing = 1 - self.ratio / scale
        if not by_ranks or missing <= self.rounding / scale:
            return None
        nearest = round(1 / missing)
        fitting = [
            ranks
            for ranks in (nearest - 1, nearest, nearest + 1)
            if ranks > 1 and self.allows(test, ranks)
        ]
        return fitting[0] if len(fitting) == 1 else None

    def tests(self, redop: str, root: str | None, ranks: int | None) -> list[str]:
        """Tests that fit this ratio and the reduction and root printed on the line.

        Args:
            redop: the reduction, empty or `none` for tests that reduce nothing.
            root: -1 for tests without one; None where the log has no such column.
            ranks: number of ranks, if known.
        """
        reduces = redop not in ("", "none")
        has_root = None if root is None else root not in ("", "-1", "N/A")
        fitting = []
        for test in BUS_FACTORS:
            if reduces != (test in ("all_reduce", "reduce_scatter", "reduce")):
                continue
            if has_root is not None and has_root != (test in ("broadcast", "reduce")):
                continue
            if ranks is not None and not self.allows(test, ranks):
                continue
            # Without a number of ranks the factor must determine one, or be that of a test with a
            # constant factor.
            if ranks is None and BUS_FACTORS[test][1] and self.ranks(test) is None:
                continue
            if ranks is None and not BUS_FACTORS[test][1] and not self.allows(test, 2):
                continue
            fitting.append(test)
        return fitting


def clearest_ratio(bandwidths: Sequence[tuple[float, float]]) -> BandwidthRatio | None:
    """The most precise ratio among pairs of (algorithm, bus) bandwidth in GB/s; None if all are too
    small to tell."""
    if not bandwidths:
        return None
    # Rounding is the same for all lines, so that the fastest one has the most significant digits.
    algorithm, bus = max(bandwidths)
    if algorithm <= 0 or bus <= 0:
        return None
    ratio = bus / algorithm
    rounding = ratio * (_DIGIT / algorithm + _DIGIT / bus)
    return BandwidthRatio(ratio, rounding) if rounding <= _MOST_ROUNDING * ratio else None
