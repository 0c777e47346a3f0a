"""Constants of a kernel moved to a device that it was not timed on."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from perfmodel.cost.learn._parameters import Parameters
from perfmodel.cost.learn._plan import Term
from perfmodel.cost.learn._stack import Figures, Stack
from perfmodel.ops import KernelKind

_BOUND: Final = 0.40
"""Share of the bandwidth from which a kernel is taken to be limited by it."""
_UNBOUND: Final = 0.15
"""Share at which it is taken to be limited by what multiprocessors issue."""
_FOLLOWS_ISSUE: Final = 0.75
"""How far the slowest kernels follow the issue rate; the rest is bandwidth (log scale)."""


def term_constants(
    params: Parameters, stacks: Sequence[Stack], groups: Sequence[tuple[int, KernelKind]], terms: Sequence[Term]
) -> Parameters:
    """`params` with the base constants of each term [T] in place of those of the groups [G].

    A term on its donor's own device keeps the donor's constants. On another device
    - the launch floor is the mean of the source's floors for the kind: hosts set it, not devices;
    - an op of several unfused kernels keeps its share of the bandwidth where bandwidth limits it; a smaller
      share scales so that the time follows clock and multiprocessors instead, which can be compared
      between devices of one vendor only. Fused kernels keep it: they were seen to follow the bandwidth.
    """
    index = {group: i for i, group in enumerate(groups)}
    of_source: dict[tuple[str, KernelKind], list[int]] = {}
    for (stack, kind), i in index.items():
        of_source.setdefault((stacks[stack].source, kind), []).append(i)
    at = np.array([index[(term.stack, term.kind)] for term in terms])
    log_memory, log_floor = params.log_memory[at], params.log_floor_s[at].copy()
    for i, term in enumerate(terms):
        donor = stacks[term.stack]
        if donor.figures == term.figures:
            continue
        if "unfused" in term.kind.op and donor.figures.vendor == term.figures.vendor:
            log_memory[i] += _unbound(log_memory[i]) * _issue_over_bandwidth(donor.figures, term.figures)
        if donor.host_launch:
            log_floor[i] = params.log_floor_s[of_source[donor.source, term.kind]].mean()
    return params._replace(
        log_fixed_s=params.log_fixed_s[at], log_compute=params.log_compute[at],
        log_memory=log_memory, log_floor_s=log_floor,
    )  # fmt: skip


def _unbound(log_share: float) -> float:
    place = (np.log(_BOUND) - log_share) / np.log(_BOUND / _UNBOUND)
    return _FOLLOWS_ISSUE * float(np.clip(place, 0.0, 1.0))


def _issue_over_bandwidth(donor: Figures, asked: Figures) -> float:
    """Log growth of the issue rate over that of the bandwidth from one device to another."""
    issue = asked.units * asked.clock / (donor.units * donor.clock)
    return float(np.log(issue / (asked.bandwidth / donor.bandwidth)))
