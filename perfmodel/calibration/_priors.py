"""What is known of the parameters before any run: the kernel tables, and how far one can trust them.

Every prior is normal around what the tables say (0), or a profile (`Correction`). Its width comes from the tables'
own 90 % intervals: an interval tells how wrong one kernel may be, and what n kernels of a family have in common is
known sqrt(n) times better, so that a handful of runs does not outweigh thousands of kernels.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log, sqrt
from pathlib import Path
from typing import Final

import numpy as np

from perfmodel.calibration._corrections import Correction
from perfmodel.cost.learn import measured_kinds, rows_from_ops
from perfmodel.ops import Collective, Op
from perfmodel.prediction import (
    FASTER,
    GAUSS_90,
    HOST_FACTORS,
    KERNEL_FACTORS,
    LOSSES,
    SLOWER,
    StepProblem,
    bundles,
    event_classes,
    factors_of,
)
from perfmodel.spec import Layout

CONTEXT: Final = 0.03
"""Standard deviation of what sets all kernels of a family in a step apart from the same kernels timed alone (clocks
under sustained load, warm or cold caches): the most that any number of kernels can teach."""
COMMON: Final = 100.0
"""Kernels from which the family's common error is known twice as well as one kernel's (n / COMMON more in variance)."""
WIDTHS: Final = {
    "host_op_s": log(2) / GAUSS_90, "kernel_gap_s": log(3) / GAUSS_90,
    "tp_overlap_loss": 0.2, "dp_overlap_loss": 0.2, "straggling": 0.01, "step_overhead_s": 0.05,
}  # fmt: skip
"""Of what no table holds: frameworks differ by a factor of 2 in host time and of 3 in gaps; GPUs of one make differ by
a per cent in speed (Sinha et al., SC22: mostly 1 to 2 %); an overlapped collective may cost its neighbours some
tenths of its time; loaders and loggers take some 10 ms."""
AMPLITUDE: Final = log((1 + SLOWER) / (1 - FASTER)) / 2 / GAUSS_90 / sqrt(2)
NOISE: Final = AMPLITUDE
"""Standard deviations of log(measured / predicted) before any run, of what like runs share and of what they do not:
together the interval that predictions carry without runs."""


@dataclass(frozen=True)
class Prior:
    """A normal prior around 0."""

    name: str
    sd: float
    measured: int | None
    """Kernels of this device behind it; None for what no kernel table measures."""
    half_width: float
    """Log half-width of the 90 % intervals of the events that the parameter moves, 0 if it moves none."""
    centre: float = 0.0
    """0 is what the tables say; elsewhere where a profile moved it."""

    @property
    def lowest(self) -> float:
        """Losses are never negative."""
        return 0.0 if self.name in LOSSES else -np.inf


def corrected(known: Sequence[Prior], profiled: Sequence[Correction]) -> list[Prior]:
    """Priors after a profile, which has measured what tables only let expect and so takes their place; parameters that
    no run moves come from the profile alone."""
    by_name = {found.name: found for found in profiled}
    moved = [
        replace(p, centre=max(by_name[p.name].value, p.lowest), sd=by_name[p.name].sd) if p.name in by_name else p
        for p in known
    ]
    others = [found for name, found in by_name.items() if name not in {p.name for p in known}]
    return moved + [Prior(found.name, found.sd, None, 0.0, found.value) for found in others]


def priors(models: Iterable[tuple[StepProblem, Sequence[Layout]]], base: Path | None, device: str) -> list[Prior]:
    """Priors of every parameter that moves an event of the runs, and of the host costs and losses."""
    weight: dict[str, float] = defaultdict(float)
    spread: dict[str, float] = defaultdict(float)
    dtypes: dict[str, set[str]] = defaultdict(set)
    for model, layouts in models:
        for op, seconds, half in _events(model, layouts):
            for name in dict.fromkeys(factors_of(op)):
                weight[name] += seconds
                spread[name] += seconds * half
            if not isinstance(op, Collective):
                dtypes[factors_of(op)[0]] |= {kind.dtype for kind in rows_from_ops([op]).kinds}
    half_width = {name: spread[name] / weight[name] for name in weight if weight[name] > 0}
    found = []
    for name, half in half_width.items():
        if name in KERNEL_FACTORS:
            n = _measured(base, device, name, dtypes[name])
            found.append(Prior(name, sqrt(CONTEXT**2 + (half / GAUSS_90) ** 2 / (1 + n / COMMON)), n, half))
        else:
            found.append(Prior(name, max(CONTEXT, half / GAUSS_90), None, half))
    found += [Prior(name, WIDTHS[name], None, 0.0) for name in (*HOST_FACTORS, *LOSSES)]
    return found


def _measured(base: Path | None, device: str, name: str, dtypes: set[str]) -> int:
    """Kernels of the device, in the dtypes that the runs use, that a factor stands against."""
    kinds = measured_kinds(base, device, "gemm" if name == "bmm" else name)
    return sum(n for kind, n in kinds.items() if kind.dtype in dtypes and (kind.op == "bmm") == (name == "bmm"))


def _events(model: StepProblem, layouts: Sequence[Layout]) -> Iterable[tuple[Op, float, float]]:
    """(event, its seconds in one pass of every block or one step, log half-width of its interval)."""
    for bundle in bundles(model, layouts):
        for table, between in zip(bundle.tables, event_classes(model, bundle), strict=True):
            counted = (
                (table.ops, table.times, np.einsum("bpo,b->o", table.counts, np.array(table.repeats, float))),
                (between.ops, between.times, np.ones(len(between.ops))),
            )
            for ops, times, count in counted:
                half = np.log(np.maximum(times.hi_s, 1e-12) / np.maximum(times.lo_s, 1e-12)) / 2
                yield from zip(ops, (count * times.time_s).tolist(), half.tolist(), strict=True)
