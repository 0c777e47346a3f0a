"""What is fixed while layouts vary, and where the session keeps what follows from it.

Each function of a stage that is worth keeping takes a record of here and whatever else it depends on, so that its
results are found again by exactly that: a function of a `Setting` cannot see a price.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from perfmodel.cost import CollectiveModel, KernelModel, PricesCollectives, PricesKernels
from perfmodel.cost.learn import WeightFiles, weight_files
from perfmodel.prediction._adjustment import Adjustment, adjustments
from perfmodel.prediction._population import SitePrior
from perfmodel.prediction._site import EAGER, Site
from perfmodel.session import Cache, current_session
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem
from perfmodel.workload import step_flops

_MOST_KEPT: Final = 100_000
"""Results of one record, of all stages together."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What decides which events a layout has, but not how long they take."""

    model: Model
    cluster: Cluster
    job: Job
    framework: Framework

    @cached_property
    def _hash(self) -> int:
        return hash((self.model, self.cluster, self.job, self.framework))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProblem:
    """A step whose layouts are predicted: model, job and cluster with their cost models.

    Problems are equal where all is, cost models being compared by identity.
    """

    model: Model
    job: Job
    cluster: Cluster
    kernels: PricesKernels = field(repr=False)
    collectives: PricesCollectives = field(repr=False)
    framework: Framework = field(default_factory=Framework)
    """Software, with its host costs before `adjustment`."""
    site: Site = field(default_factory=Site)
    adjustment: Adjustment | None = None
    """What measured runs said, on top of the cost models: the user's own, or those of the published record."""
    kinds: tuple["StepProblem", ...] = ()
    """The same step on each kind of nodes alone, where the cluster has several: all is priced by these."""

    @cached_property
    def setting(self) -> Setting:
        """The part without prices."""
        return Setting(model=self.model, cluster=self.cluster, job=self.job, framework=self.framework)

    @cached_property
    def unadjusted(self) -> "StepProblem":
        """The part without what runs said."""
        return self if self.adjustment is None else self.adjusted(None)

    @cached_property
    def links(self) -> tuple["StepProblem", ...]:
        """For each of `kinds`, what joins it to the others: its own network, unless the cluster says what does."""
        if self.cluster.between is None:
            return self.kinds
        return tuple(
            replace(one, cluster=replace(one.cluster, levels=(self.cluster.between,), max_devices=None))
            for one in self.kinds
        )

    @cached_property
    def host(self) -> Framework:
        """Host costs as the runs have them."""
        framework = self.framework.running(self.job, self.model)
        return framework if self.adjustment is None else self.adjustment.framework(framework)

    @cached_property
    def site_prior(self) -> SitePrior:
        """What is believed of the site's runs before any of them."""
        return self.site.site_prior(self.framework, self.cluster.device, self.model)

    @cached_property
    def flops(self) -> float:
        """Model FLOPs of a step (`step_flops`)."""
        return step_flops(self.model, self.job).total

    def notation(self, layout: Layout) -> str:
        """The layout in the notation of the framework, which reads this very layout back for this model."""
        return self.framework.notation(layout, self.model)

    @property
    def usable_bytes(self) -> float:
        """Memory of a device that a layout may take; of the largest where there are several kinds."""
        if self.kinds:
            return max(one.usable_bytes for one in self.kinds)
        return self.framework.usable_bytes(self.cluster.device.memory_bytes)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        # Cost models hold whole tables and are told apart by identity. The problem keeps them alive, so no identity
        # is given to another model while the problem is in use as a key.
        return self.setting, id(self.kernels), id(self.collectives), self.site, self.adjustment, self.kinds

    @cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StepProblem) and self._key == other._key)

    def __reduce__(self) -> tuple[Callable[..., "StepProblem"], tuple[Any, ...]]:
        return _problem, tuple(getattr(self, one.name) for one in fields(self))

    def repriced(self, kernels: PricesKernels, collectives: PricesCollectives) -> "StepProblem":
        """The same step at other prices."""
        kinds = tuple(one.repriced(kernels, collectives) for one in self.kinds)
        return replace(self, kernels=kernels, collectives=collectives, kinds=kinds)

    def adjusted(self, adjustment: Adjustment | None) -> "StepProblem":
        """The same step with other parameters of runs."""
        return replace(self, adjustment=adjustment)


def _problem(*values: Any) -> StepProblem:
    return StepProblem(**dict(zip((one.name for one in fields(StepProblem)), values, strict=True)))


def step_problem(
    model: Model,
    cluster: Cluster,
    job: Job,
    calibration: Path | WeightFiles | None = None,
    framework: Framework = EAGER,
    site: Site | None = None,
) -> StepProblem:
    """The problem of a model, cluster and job, one object in a session for equal arguments.

    Args:
        calibration: a directory, as it is now, or weights as they were at some moment.

    Raises:
        CalibrationError: `calibration` holds unreadable weights or parameters of runs.
    """
    site = site or Site()
    weights = calibration if isinstance(calibration, WeightFiles) else weight_files(calibration)
    session = current_session()
    of_device = session.cost_models.get_or_compute((adjustments, weights), lambda: adjustments(weights))
    kinds = tuple(step_problem(model, kind, job, weights, framework, site) for kind in cluster.kinds)
    return session.problems.get_or_compute(
        (model, cluster, job, framework, site, weights),
        lambda: StepProblem(
            model=model,
            job=job,
            cluster=cluster,
            kernels=KernelModel.of(weights),
            collectives=CollectiveModel.of(weights),
            framework=framework,
            site=site,
            adjustment=of_device.get(cluster.device.name) or site.expected(framework, cluster.device),
            kinds=kinds,
        ),
    )


def step_problem_of(
    problem: Problem, calibration: Path | str | WeightFiles | None = None, site: Site | None = None
) -> StepProblem:
    """`step_problem` of a problem as users state it."""
    path = Path(calibration) if isinstance(calibration, str) else calibration
    return step_problem(problem.model, problem.cluster, problem.job, path, problem.framework, site)


Record = TypeVar("Record", Setting, StepProblem)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def store_of(record: Setting | StepProblem) -> Cache:
    """What the session keeps of a setting or problem."""
    return current_session().parts.get_or_compute(record, partial(Cache, _MOST_KEPT))


def session_cached(
    function: Callable[Concatenate[Record, Arguments], Result],
) -> Callable[Concatenate[Record, Arguments], Result]:
    """Have the session keep the results of a function of a setting or problem and further hashable arguments.

    A result follows from the arguments alone, positional and by keyword, and must not be changed.
    """

    @wraps(function)
    def cached(record: Record, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        key = (function, args, *sorted(kwargs.items()))
        return store_of(record).get_or_compute(key, partial(function, record, *args, **kwargs))

    return cached
