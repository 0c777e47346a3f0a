"""Step problems: everything that is fixed while layouts vary, with the session's caches.

A function worth caching takes one of two records and all else that it depends on as arguments. Its
results are cached by exactly these arguments (`session_cached`), or item by item where it works on
many at once (`session_cached_each`). A `Setting` has no prices, so that events and memory, which
follow from it alone, are shared by all problems that differ in prices: hundreds while runs are
fitted.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from perfmodel.cost import CollectiveModel, KernelModel, PricesCollectives, PricesKernels
from perfmodel.cost.learn import WeightFiles, measured_loads, measured_sm_share, weight_files
from perfmodel.prediction.sites import EAGER, Adjustment, Site, SitePrior, adjustments
from perfmodel.session import Cache, current_session
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem
from perfmodel.workload import step_flops

_MOST_KEPT: Final = 100_000
"""Most results cached for one record, over all stages together."""
_MOST_ITEMS: Final = 200_000
"""Most results cached for one record by each function of many items."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The records that determine which events a layout has, but not their times."""

    model: Model
    cluster: Cluster
    job: Job
    framework: Framework
    """Software, before any adjustment."""

    @classmethod
    def of(cls, model: Model, cluster: Cluster, job: Job, framework: Framework) -> "Setting":
        """The setting of a step without network rates, so that machines with other rates share all
        events."""
        levels = [
            replace(level, bandwidth_bytes_per_s=1.0, latency_s=1.0) for level in cluster.levels
        ]
        return cls(
            model=model,
            cluster=replace(cluster, levels=tuple(levels)),
            job=job,
            framework=framework,
        )

    @cached_property
    def _hash(self) -> int:
        return hash((self.model, self.cluster, self.job, self.framework))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProblem:
    """A step to predict under many layouts: model, job and cluster with their cost models.

    Problems are equal where all fields are, cost models being compared by identity.
    """

    model: Model
    job: Job
    cluster: Cluster
    kernels: PricesKernels = field(repr=False)
    """Cost model of kernels."""
    collectives: PricesCollectives = field(repr=False)
    """Cost model of collectives."""
    framework: Framework = field(default_factory=Framework)
    """Software, with its host costs before `adjustment`."""
    site: Site = field(default_factory=Site)
    """Fitted constants of the site, which correct predictions."""
    adjustment: Adjustment | None = None
    """Correction of the cost models by measured runs: the user's own, or those of the published
    record."""
    kinds: tuple["StepProblem", ...] = ()
    """This step on each kind of nodes alone, where the cluster has several: everything is priced by
    these."""

    @cached_property
    def setting(self) -> Setting:
        """The part that does not depend on prices."""
        return Setting.of(self.model, self.cluster, self.job, self.framework)

    @cached_property
    def unadjusted(self) -> "StepProblem":
        """The problem without corrections by measured runs."""
        return self if self.adjustment is None else self.adjusted(None)

    @cached_property
    def links(self) -> tuple["StepProblem", ...]:
        """For each of `kinds`, the network that joins it to the others: the cluster's `between`,
        else its own."""
        if self.cluster.between is None:
            return self.kinds
        links = []
        for kind in self.kinds:
            joined_by = replace(kind.cluster, levels=(self.cluster.between,), max_devices=None)
            links.append(replace(kind, cluster=joined_by))
        return tuple(links)

    @cached_property
    def adjusted_framework(self) -> Framework:
        """The framework adapted to this job, with parameters fitted to runs."""
        framework = self.framework.running(self.job, self.model)
        return framework if self.adjustment is None else self.adjustment.framework(framework)

    @cached_property
    def site_prior(self) -> SitePrior:
        """Prior of the site's runs."""
        return self.site.site_prior(self.framework, self.cluster.device, self.model)

    @cached_property
    def flops(self) -> float:
        """Model FLOPs of a step (`step_flops`)."""
        return step_flops(self.model, self.job).total

    def notation(self, layout: Layout) -> str:
        """The layout's notation, from which the framework reads the same layout for this
        model."""
        # Found by trying every default of the framework in turn.
        return store_of(self.setting).get_or_compute(
            (Framework.notation, layout), lambda: self.framework.notation(layout, self.model)
        )

    @property
    def usable_bytes(self) -> float:
        """Device memory that a layout may use, on the largest kind of device."""
        if self.kinds:
            return max(kind.usable_bytes for kind in self.kinds)
        return self.framework.memory.usable_bytes(self.cluster.device.memory_bytes)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        # Cost models hold large tables and are compared by identity. The problem keeps them alive,
        # so that no identity is given to another model while the problem is in use as a key.
        parts = self.setting, self.cluster, self.site, self.adjustment, self.kinds
        return parts, id(self.kernels), id(self.collectives)

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StepProblem) and self._key == other._key)

    def __reduce__(self) -> tuple[Callable[..., "StepProblem"], tuple[Any, ...]]:
        # Hashes and cached properties stay behind: identities of cost models mean nothing in
        # another process.
        return _problem, tuple(getattr(self, field.name) for field in fields(self))

    def repriced(self, kernels: PricesKernels, collectives: PricesCollectives) -> "StepProblem":
        """This step with other cost models."""
        kinds = tuple(kind.repriced(kernels, collectives) for kind in self.kinds)
        return replace(self, kernels=kernels, collectives=collectives, kinds=kinds)

    def adjusted(self, adjustment: Adjustment | None) -> "StepProblem":
        """This step with other corrections by measured runs."""
        return replace(self, adjustment=adjustment)


def _problem(*values: Any) -> StepProblem:
    """A problem from the values of all fields, in their order."""
    names = [field.name for field in fields(StepProblem)]
    return StepProblem(**dict(zip(names, values, strict=True)))


def step_problem(
    model: Model,
    cluster: Cluster,
    job: Job,
    calibration: Path | WeightFiles | None = None,
    framework: Framework = EAGER,
    site: Site | None = None,
) -> StepProblem:
    """The problem of a model, cluster and job (cached in the session).

    Args:
        calibration: a directory, as it is now, or weights as they were at some moment.

    Raises:
        CalibrationError: `calibration` holds unreadable weights or parameters of runs.
    """
    session = current_session()
    site = site or Site()
    weights = calibration if isinstance(calibration, WeightFiles) else weight_files(calibration)

    def compute() -> StepProblem:
        kernels = KernelModel.of(weights)
        collectives = CollectiveModel.of(weights)
        measured_cluster, measured_site, adjustment = cluster, site, None

        # Facts that the user's own calibration has about the device: its runs, its clock under
        # load, and the share that collectives occupy.
        if weights.content is not None:
            device, models = cluster.device, session.cost_models
            of_devices = models.get_or_compute((adjustments, weights), lambda: adjustments(weights))
            adjustment = of_devices.get(device.name)
            loads = models.get_or_compute(
                (measured_loads, weights), lambda: measured_loads(weights)
            )
            if loads:
                measured_site = replace(site, loads=loads)
            share = measured_sm_share(weights, device.name)
            if share is not None:
                measured_cluster = replace(
                    cluster, device=replace(device, collective_sm_share=share)
                )
        return StepProblem(
            model=model,
            job=job,
            cluster=measured_cluster,
            kernels=kernels,
            collectives=collectives,
            framework=framework,
            site=measured_site,
            # Without runs on the device it is the median site of the published record.
            adjustment=adjustment or site.expected(framework, cluster.device),
            kinds=tuple(
                step_problem(model, kind, job, weights, framework, site) for kind in cluster.kinds
            ),
        )

    return session.problems.get_or_compute((model, cluster, job, framework, site, weights), compute)


def step_problem_of(
    problem: Problem, calibration: Path | str | WeightFiles | None = None, site: Site | None = None
) -> StepProblem:
    """Make the `StepProblem` of a `Problem`."""
    path = Path(calibration) if isinstance(calibration, str) else calibration
    return step_problem(problem.model, problem.cluster, problem.job, path, problem.framework, site)


Record = TypeVar("Record", Setting, StepProblem)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Item = TypeVar("Item", bound=Hashable)


def store_of(record: Setting | StepProblem) -> Cache:
    """The session's cache of a setting or problem."""
    return current_session().parts.get_or_compute(record, partial(Cache, _MOST_KEPT))


def session_cached(
    function: Callable[Concatenate[Record, Arguments], Result],
) -> Callable[Concatenate[Record, Arguments], Result]:
    """Decorator that caches a function of a setting or problem, and further hashable arguments, in
    the session.

    A result must follow from the arguments alone, positional and by keyword, and must not be
    changed.
    """

    @wraps(function)
    def cached(record: Record, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        key = (function, args, *sorted(kwargs.items()))
        return store_of(record).get_or_compute(key, partial(function, record, *args, **kwargs))

    return cached


def session_cached_each(
    function: Callable[[Record, list[Item]], Iterable[tuple[Item, Result]]],
) -> Callable[[Record, Sequence[Item]], list[Result]]:
    """Decorator that caches a function of a setting or problem and of many items, item by item.

    The function gets the items that are new, each once, and gives results with the items that they
    are of, those of other items too where it has them. A result must follow from record and item
    alone, and must not be changed.
    """

    @wraps(function)
    def cached(record: Record, items: Sequence[Item]) -> list[Result]:
        results = store_of(record).get_or_compute(function, partial(Cache, _MOST_ITEMS))
        return results.get_or_compute_each(items, partial(function, record))

    return cached
