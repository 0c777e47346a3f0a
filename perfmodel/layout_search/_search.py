"""Search: score every layout that can run and explain the best."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from perfmodel import catalog
from perfmodel.errors import LayoutError, UnknownNameError
from perfmodel.layout_search._space import Space, default_space, enumerate_layouts
from perfmodel.prediction import EAGER, Framework, Prediction, StepModel, explain, step_model
from perfmodel.spec import Cluster, Job, Layout, Model

if TYPE_CHECKING:
    import pandas as pd

METHODS = ("enumerate", "auto")
"""`auto` takes what is right for the space; discrete layouts are enumerated, which is exact."""
Progress = Callable[[str, int, int], None]
"""Called with (what is done, how many, of how many)."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Ranked layouts and the account of all others."""

    evaluated: int
    """Layouts scored by full schedule evaluation."""
    feasible: int
    """Layouts that fit into memory; those not evaluated have a lower bound above the best found."""
    seconds: float
    layouts: tuple[Prediction, ...]
    """The best, fastest first."""
    rejected: dict[str, int]
    """Reason -> number of combinations."""
    step_time_s: np.ndarray
    """Step times of all evaluated layouts, ascending."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are part of the command-line contract."""
        return {
            "evaluated": self.evaluated,
            "feasible": self.feasible,
            "seconds": self.seconds,
            "layouts": [p.to_dict() for p in self.layouts],
            "rejected": self.rejected,
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per ranked layout."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "layout": str(p.layout), "step_time_s": p.step_time_s, "lo_s": p.step_time_lo_s,
                    "hi_s": p.step_time_hi_s, "mfu": p.mfu, "bubble_fraction": p.bubble_fraction,
                    "peak_bytes": p.memory.peak, "tokens_per_s_per_device": p.tokens_per_s_per_device,
                }
                for p in self.layouts
            ]
        )  # fmt: skip

    def _repr_html_(self) -> str:
        return self.to_frame().to_html(index=False, float_format=lambda v: f"{v:.4g}")


def search(
    model: Model | str,
    cluster: Cluster | str,
    *,
    devices: int,
    global_batch: int,
    seq_len: int | None = None,
    method: str = "enumerate",
    top: int = 10,
    job: Job | None = None,
    space: Space | None = None,
    calibration: Path | str | None = None,
    framework: Framework | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> SearchResult:
    """Rank the layouts of `model` on `devices` devices of `cluster` by predicted step time.

    Raises:
        LayoutError: if no layout is possible at all (the message counts the reasons).
        UnknownNameError: for an unknown model, cluster or method.
    """
    if method not in METHODS:
        raise UnknownNameError("search method", method, METHODS)
    started = time.perf_counter()
    model = catalog.model(model) if isinstance(model, str) else model
    cluster = catalog.cluster(cluster) if isinstance(cluster, str) else cluster
    job = job or Job(global_batch=global_batch, seq_len=seq_len or model.seq_len)
    path = Path(calibration) if calibration is not None else None
    fixed = step_model(model, cluster, job, path, framework or EAGER)
    rejected: Counter[str] = Counter()
    space = space or default_space(model, cluster, job, devices)
    candidates = list(enumerate_layouts(space, model, cluster, job, devices, rejected))
    if not candidates:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in rejected.most_common())
        raise LayoutError(f"no layout of {model.name} is possible on {devices} devices: {reasons}")
    return rank(fixed, candidates, rejected, top, started, progress, strict)


def rank(
    fixed: StepModel,
    candidates: list[Layout],
    rejected: Counter[str],
    top: int,
    started: float,
    progress: Progress | None,
    strict: bool = False,
) -> SearchResult:
    """Drop what does not fit, evaluate the rest exactly, explain the best `top`."""
    report = progress or (lambda *_: None)
    report("memory", 0, len(candidates))
    peak, largest = fixed.peak_memory(candidates)
    usable = fixed.cluster.device.memory_bytes * (1 - fixed.framework.memory_margin)
    fits = peak <= usable
    for part, count in Counter(np.asarray(largest)[~fits].tolist()).items():
        rejected[f"out of memory, mostly {part}"] += count
    feasible = [layout for layout, ok in zip(candidates, fits.tolist(), strict=True) if ok]
    step_s, scored = _evaluate(fixed, feasible, top, report)
    if scored < len(feasible):
        rejected["cannot be among the best: compute alone takes longer"] += len(feasible) - scored
    order = np.argsort(step_s, kind="stable")[:scored]
    report("explain", 0, min(top, len(feasible)))
    best = [explain(fixed, feasible[i], strict=strict) for i in order[:top].tolist()]
    best.sort(key=lambda p: p.step_time_s)
    report("done", len(feasible), len(feasible))
    return SearchResult(
        evaluated=scored,
        feasible=len(feasible),
        seconds=time.perf_counter() - started,
        layouts=tuple(best),
        rejected=dict(rejected.most_common()),
        step_time_s=step_s[order],
    )


FIRST_BATCH = 4096
"""Layouts evaluated at least, most promising first, before bounds may end the search."""


def _evaluate(
    fixed: StepModel, feasible: list[Layout], top: int, report: Progress
) -> tuple[Float[np.ndarray, " feasible"], int]:
    """Step times, infinite where a lower bound rules the layout out of the best `top`; and how many were scored."""
    step_s = np.full(len(feasible), np.inf)
    bound_s = fixed.lower_bound_s(feasible)
    order = np.argsort(bound_s, kind="stable")
    done = 0
    while done < len(feasible):
        kth_s = np.partition(step_s, top - 1)[top - 1] if top <= done else np.inf
        # the evaluation is single precision: leave room for its rounding
        if done and bound_s[order[done]] > kth_s * (1 + 1e-4):
            break
        part = order[done : done + FIRST_BATCH]
        step_s[part] = fixed.evaluate([feasible[i] for i in part.tolist()]).step_time_s
        done += len(part)
        report("evaluate", done, len(feasible))
    return step_s, done
