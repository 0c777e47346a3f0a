"""Compares clusters: the best layout of a job on each, with its time, cost and energy."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Unpack

from perfmodel import catalog
from perfmodel.display import Report, frame_html, shorten_reprs, shows_progress
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.planning.goodput import Reliability
from perfmodel.planning.layouts import SearchOptions, SearchSpace, Tariff, search
from perfmodel.planning.training_run import TrainingRun, training_run
from perfmodel.prediction import Prediction
from perfmodel.spec import Cluster, Framework, Job, Model, Problem
from perfmodel.spec.keywords import JobKeywords
from perfmodel.units import MIN_FIT, number_of

if TYPE_CHECKING:
    import pandas as pd

ORDERS: Final = MappingProxyType({"cost": "cheapest", "time": "fastest", "energy": "least energy"})
"""Figures that clusters may be ordered by, each with the words for the cluster that then comes
first."""


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """A cluster with the job's best layout on it."""

    prediction: Prediction
    """Step time, memory and explanation of the layout."""
    run: TrainingRun
    """Days, money and energy."""

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the whole cluster, without failures."""
        return self.prediction.tokens_per_s_per_device * self.prediction.devices

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        p = self.prediction
        return {
            "cluster": p.cluster,
            "devices": p.devices,
            "layout": p.layout_notation,
            "step_time_s": p.step_time_s,
            "step_time_lo_s": p.step_time_lo_s,
            "step_time_hi_s": p.step_time_hi_s,
            "tokens_per_s": self.tokens_per_s,
            "mfu": p.mfu,
            "memory_needed_bytes": p.memory_needed_bytes,
            "memory_capacity_bytes": p.memory_capacity_bytes,
            "fits_probability": p.fits_probability,
            "provenance": p.provenance,
        } | self.run.to_dict()


@dataclass(frozen=True, kw_only=True)
class ClusterComparison:
    """The clusters that can run the job, best first, and the reasons why others cannot."""

    model: str
    global_batch: int
    seq_len: int
    by: str
    """The figure that the clusters are ordered by, one of `ORDERS`."""
    plans: tuple[ClusterPlan, ...]
    impossible: dict[str, str]
    """Cluster and devices -> why the job cannot run there."""
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "model": self.model,
            "global_batch": self.global_batch,
            "seq_len": self.seq_len,
            "by": self.by,
            "clusters": [plan.to_dict() for plan in self.plans],
            "impossible": self.impossible,
            "seconds": self.seconds,
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per cluster, with the keys of `ClusterPlan.to_dict` that hold a single value."""
        import pandas as pd

        rows = []
        for plan in self.plans:
            row = plan.to_dict()
            for name in ("provenance", "goodput"):
                row.pop(name, None)
            rows.append(row | {"goodput": plan.run.goodput.fraction})
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def compare_clusters(
    model: Model | str,
    clusters: Iterable[Cluster | str],
    *,
    devices: int | Sequence[int] | None = None,
    by: str = "cost",
    tokens: float | None = None,
    prices: Mapping[str, float] | None = None,
    pue: float = 1.0,
    reliability: Reliability | None = None,
    calibration: Path | str | None = None,
    progress: Report | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
    **of_job: Unpack[JobKeywords],
) -> ClusterComparison:
    """Find a job's best layout on each cluster, and its time, cost and energy of training.

        compare_clusters("llama3-70b", ["h100", "b200:512"], devices=1024, global_batch=1024)

    Args:
        model: catalog name, file, or `Model`.
        clusters, devices: as `clusters_named` takes them.
        by, tokens, prices, pue, reliability, calibration, progress: as for `compare_problems`.
        global_batch, seq_len, dtype, job, framework, of_job: as in `problem`.

    Raises:
        PerfModelError: as `clusters_named`, `catalog.problem` and `compare_problems`.
    """
    problems = []
    for cluster, count in clusters_named(clusters, devices):
        problem = catalog.problem(
            model,
            cluster,
            global_batch=global_batch,
            seq_len=seq_len,
            dtype=dtype,
            devices=count,
            job=job,
            framework=framework,
            **of_job,
        )
        problems.append(problem)
    return compare_problems(
        problems,
        by=by,
        tokens=tokens,
        prices=prices,
        pue=pue,
        reliability=reliability,
        calibration=calibration,
        progress=progress,
    )


def _require_compared(prices: Mapping[str, float], clusters: Sequence[Cluster]) -> None:
    """Raise `UnknownNameError` for a price of something that is not compared."""
    # Such a price is a slip of the pen, which would otherwise change nothing and go unseen.
    for key in prices:
        if not any(_is_of(key, cluster) for cluster in clusters):
            raise UnknownNameError(
                "cluster or device of a price", key, [cluster.name for cluster in clusters]
            )


def _price_of(cluster: Cluster, prices: Mapping[str, float]) -> float | None:
    """The first price that names the cluster or its device; None, the catalog's, if none does."""
    return next((price for key, price in prices.items() if _is_of(key, cluster)), None)


@shows_progress("compare-clusters")
def compare_problems(
    problems: Sequence[Problem],
    *,
    by: str = "cost",
    tokens: float | None = None,
    prices: Mapping[str, float] | None = None,
    pue: float = 1.0,
    reliability: Reliability | None = None,
    space: Callable[[Problem], SearchSpace] | None = None,
    calibration: Path | str | None = None,
    strict: bool = False,
    min_fit: float = MIN_FIT,
    progress: Report | None = None,
) -> ClusterComparison:
    """Find the best layout of each problem (one job on several clusters), and the time, cost and
    energy of training with it.

    Args:
        problems: problems with numbers of devices.
        by: one of `ORDERS`; clusters of unknown price or power come last.
        tokens: number of tokens to train on.
        prices: US dollars per device and hour in place of the catalog's, by name of a cluster or
            device.
        pue: power usage effectiveness of the sites.
        reliability: failure rates of devices; those of published runs if not given.
        space: tells which layouts to try; `default_space` if not given.
        calibration, strict, min_fit, progress: as for `search`; the layout of a cluster is the
            recommended one.

    Raises:
        LayoutError: no cluster can run the job; says why of each.
        UnknownNameError: an unknown order, or a price of something that is not compared.
    """
    if by not in ORDERS:
        raise UnknownNameError("order of clusters", by, ORDERS)
    started = time.perf_counter()

    _require_compared(prices or {}, [problem.cluster for problem in problems])
    plans = []
    impossible = {}
    for done, problem in enumerate(problems):
        cluster = problem.cluster
        if progress:
            progress(f"search {cluster.name}", done, len(problems))
        # A cluster that cannot run the job is listed with the reason (such as an element type that
        # the device lacks). The others are compared by the whole run, each with its own layout.
        try:
            prediction = _recommended(
                problem, space, SearchOptions(strict=strict, min_fit=min_fit), calibration
            )
        except PerfModelError as error:
            impossible[f"{cluster.name}:{problem.devices}"] = str(error)
            continue
        price = _price_of(cluster, prices or {})
        run = training_run(
            prediction,
            problem,
            tariff=Tariff(price_per_device_hour=price, tokens=tokens),
            reliability=reliability,
            pue=pue,
            calibration=calibration,
        )
        plans.append(ClusterPlan(prediction=prediction, run=run))
    if not plans:
        raise LayoutError("; ".join(f"{name}: {why}" for name, why in impossible.items()))
    first = plans[0].prediction
    return ClusterComparison(
        model=first.model,
        global_batch=first.global_batch,
        seq_len=first.seq_len,
        by=by,
        plans=tuple(sorted(plans, key=lambda plan: _rank(plan, by))),
        impossible=impossible,
        seconds=time.perf_counter() - started,
    )


def _recommended(
    problem: Problem,
    space: Callable[[Problem], SearchSpace] | None,
    options: SearchOptions,
    calibration: Path | str | None,
) -> Prediction:
    """The layout that a search recommends.

    Raises:
        PerfModelError: the cluster cannot run the job.
        KeyboardInterrupt: the search was interrupted.
    """
    result = search(
        problem, space=space, options=options, calibration=calibration, progress=lambda *_: None
    )
    # A comparison of half-searched clusters would mislead, so that an interrupt of one search
    # interrupts the whole.
    if not result.complete:
        raise KeyboardInterrupt(f"{problem.cluster.name}: {result.certificate}")
    if not result.layouts:
        raise LayoutError(str(result.impossible))
    return result.first_to_try


def _rank(plan: ClusterPlan, order: str) -> tuple[float, float]:
    """Sort key: the requested figure (infinite if unknown), then the time for the same work."""
    # Failures cost time too, so that a cluster is as fast as the tokens that it keeps.
    run = plan.run
    slowness = 1 / (plan.tokens_per_s * plan.run.goodput.fraction)
    figures = {
        "cost": run.usd_per_million_tokens,
        "time": slowness,
        "energy": run.energy_per_million_tokens_j,
    }
    figure = figures[order]
    return (float("inf") if figure is None else figure, slowness)


def clusters_named(
    clusters: Iterable[Cluster | str], devices: int | Sequence[int] | None = None
) -> list[tuple[Cluster, int]]:
    """Look up clusters and their numbers of devices.

    Args:
        clusters: catalog names, TOML files, names of devices (of which the reference system is
            taken), or `Cluster` objects; `NAME:N` says how many devices.
        devices: number of devices of clusters that do not state one; several numbers are all tried.

    Raises:
        UnknownNameError: neither a cluster nor a device.
        PerfModelError: no cluster, one whose number of devices is not stated, or one that is named
            twice.
    """
    # A cluster's own number of devices comes before those for all clusters.
    general = (devices,) if isinstance(devices, int) else tuple(devices or ())
    named: list[tuple[Cluster, int]] = []
    for named_cluster in clusters:
        counts = general
        if isinstance(named_cluster, str):
            name, count = split_count(named_cluster)
            counts = general if count is None else (count,)
            named_cluster = catalog.cluster(name)
        if not counts:
            raise PerfModelError(
                f"the number of devices of {named_cluster.name} is missing; give --devices N (devices=), or "
                f"{named_cluster.name}:N"
            )
        named += [(named_cluster, count) for count in counts]
    if not named:
        raise PerfModelError("no cluster is named; give at least one, such as dgx-h100 or h100")
    counted = Counter((cluster.name, count) for cluster, count in named)
    (name, count), times = counted.most_common(1)[0]
    if times > 1:
        raise PerfModelError(
            f"{name} with {number_of(count, 'device')} is named {times} times; name each cluster and number of devices "
            "once"
        )
    return named


def split_count(text: str) -> tuple[str, int | None]:
    """The name of a cluster, and the number of its devices if it is `NAME:N`.

    Raises:
        PerfModelError: something else than a number after the colon.
    """
    name, _, count = text.strip().rpartition(":")
    if name and count.isdecimal():
        return name.strip(), int(count)
    # A colon may also be a part of a file's path.
    if name and not count.endswith(".toml"):
        raise PerfModelError(
            f"cluster {text.strip()!r}: no number of devices after the colon; write {name}:256"
        )
    return text.strip(), None


def _is_of(key: str, cluster: Cluster) -> bool:
    """Whether a price has the name of a cluster or of its device, and so applies to it."""
    if key.lower() == cluster.name.lower():
        return True

    # Names of the catalog have aliases (h100, H100, dgx-h100), so that objects are compared, not
    # names.
    for find, candidate in ((catalog.cluster, cluster), (catalog.device, cluster.device)):
        try:
            if find(key) == candidate:
                return True
        except UnknownNameError:
            pass
    return False


shorten_reprs(__name__)
