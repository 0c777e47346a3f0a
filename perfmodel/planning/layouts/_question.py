"""What is searched: a job on devices of a cluster, over a space of layouts; and the words for it, as Python, the
command line and job files have them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Unpack

from perfmodel import catalog
from perfmodel.cost import PricesKernels
from perfmodel.cost.learn import WeightFiles, weight_files
from perfmodel.errors import CalibrationError, PerfModelError, UnknownNameError
from perfmodel.planning.layouts._quantities import Tariff
from perfmodel.planning.layouts._space import (
    SearchSpace,
    default_space,
    restrict,
    with_options,
    with_schedules,
)
from perfmodel.planning.what_if import Scenario, model_in_scenario
from perfmodel.prediction import StepProblem, step_problem_of
from perfmodel.session import current_session
from perfmodel.spec import Cluster, Framework, Job, JobKeywords, Layout, Model, Problem, partition_by_cost
from perfmodel.units import MIN_FIT


class SearchKeywords(JobKeywords, total=False):
    """Keywords of `search` beside those of the problem, for editors and type checkers; `tests/spec/test_keywords.py`
    holds them to the fields of `SpaceWords`, `SearchOptions` and `Tariff`."""

    fix: str
    schedules: str | Sequence[str]
    vary: str | Sequence[str]
    fewer_devices: bool
    method: str
    objective: str | None
    constraints: Sequence[str]
    robust: str
    batches: Sequence[int]
    top: int
    distinct: bool
    every: bool
    min_fit: float
    strict: bool
    workers: int
    dask: str
    resume: Path | str | None
    price_per_device_hour: float | None
    power_w: float | None
    idle_power_w: float | None
    tokens: float | None


class Context(NamedTuple):
    """Everything that a step model follows from, in a form that processes can send to one another (`model_of`)."""

    problem: Problem
    calibration: Path | None
    """Directory of the weights; None for those that the package has."""
    scenario: Scenario
    """Changes of the machine."""
    kernels: PricesKernels | None
    """Prices of kernels instead of the calibration's."""
    digest: str
    """Digest of the calibration's weights."""


Space = SearchSpace | Callable[[Problem], SearchSpace]
"""A space, or a function that tells it for a problem."""
METHODS: Final = ("enumerate", "relax", "auto")
"""How layouts are looked for."""
ORDERS: Final = ("regret", "upper", "best")
"""Robust orders: by expected regret, by the upper end of the 90 % interval, by the probability to be the best."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The objective of a search, how far it looks, and how much it reports."""

    method: str = "enumerate"
    """`enumerate` (even stages, exact), `auto` (then uneven stages and recompute by stage for the layouts that a bound
    promises a gain for, by dynamic programming), or `relax` (these cuts by relaxation, rounding and local search). The
    result says what was done and why."""
    objective: str | None = None
    """One of `OBJECTIVES`, or a formula over `QUANTITIES` to be minimised; by default `step_time`, of several batches
    `tokens_per_s`."""
    constraints: Sequence[str] = ()
    """Comparisons of such formulas that layouts must satisfy, such as `"memory_bytes < 70e9"`."""
    tariff: Tariff | None = None
    """Prices, powers, and tokens to train on, where they are not the catalog's."""
    robust: str = ""
    """Order by one of `ORDERS` instead, among the best, as predictions may err; see `Robustness`."""
    batches: Sequence[int] = ()
    """Global batches to try one after the other, and to rank together, instead of the problem's own."""
    top: int = 10
    """Layouts to rank."""
    distinct: bool = True
    """Whether, of layouts that differ only in what they recompute or offload or in idle options, to rank the best
    alone (`Candidates.distinct`)."""
    every: bool = False
    """Evaluate every layout that fits, though its bound rules it out (`SearchResult.ranking`)."""
    min_fit: float = MIN_FIT
    """Probability of fitting into memory that a layout needs to be recommended."""
    strict: bool = False
    """Refuse to extrapolate beyond the measurements."""
    workers: int = 1
    """Processes that evaluate."""
    dask: str = ""
    """Address of a Dask scheduler whose workers evaluate instead."""
    resume: Path | str | None = None
    """File that keeps what was evaluated; if it is there, the search goes on from it."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UnknownNameError("search method", self.method, METHODS)
        if self.robust and self.robust not in ORDERS:
            raise UnknownNameError("robust order", self.robust, ORDERS)
        if not 0 <= self.min_fit < 1:
            raise PerfModelError(f"search: min_fit must be a probability from 0 to below 1, got {self.min_fit}")
        if self.top < 1:
            raise PerfModelError(f"search: top must be at least 1 layout, got {self.top}")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A problem to be laid out, over which layouts, priced how."""

    problem: Problem
    space: SearchSpace
    calibration: Path | None = None
    scenario: Scenario = field(default_factory=Scenario)
    """Changes of the machine, but for its memory, which the cluster has."""
    kernels: PricesKernels | None = None
    """Prices of kernels instead of the calibration's."""

    @property
    def devices(self) -> int:
        """Number of devices to lay out on; at most so many, if the space says `fewer_devices`."""
        return self.problem.require_devices()

    @property
    def context(self) -> Context:
        """Everything that the step model follows from."""
        return Context(
            problem=self.problem,
            calibration=self.calibration,
            scenario=self.scenario,
            kernels=self.kernels,
            digest=self.weights.digest,
        )

    @cached_property
    def weights(self) -> WeightFiles:
        """The calibration's weights as they were when they were first asked for."""
        return weight_files(self.calibration)

    @property
    def step_problem(self) -> StepProblem:
        """The step model, kept for later calls."""
        return _model(self.context, self.weights)

    def as_run(self, layout: Layout) -> Layout:
        """The layout with the pipeline stages that the framework cuts by itself, where it does.

        Candidates have stages as even as can be.
        """
        # Enumeration knows even stages only. A framework such as nanotron cuts stages by cost;
        # its layouts are timed with that cut.
        framework = self.problem.framework
        if not framework.launch.stages_by_cost or self.space.any_framework or layout.partition is not None:
            return layout
        return layout.replace(partition=partition_by_cost(self.problem.model, layout.pp))

    def of(self, **changes: Any) -> "Question":
        """The question of a problem with some fields changed, as `Problem.replace` takes them."""
        return replace(self, problem=self.problem.replace(**changes))

    @property
    def beyond_framework(self) -> "Question":
        """The question over all layouts, those that the framework cannot run included."""
        return replace(self, space=replace(self.space, any_framework=True))

    def in_scenario(self, scenario: Scenario) -> "Question":
        """The question on the machine as a scenario has it."""
        # Memory is a fact of the cluster, which the search needs before it prices anything. All
        # other settings change prices, and stay with the scenario.
        device = self.problem.cluster.device
        n_bytes = scenario.device(device).memory_bytes
        rest = tuple(setting for setting in scenario.settings if setting.name != "memory_bytes")
        changed = self if n_bytes == device.memory_bytes else self.with_memory(n_bytes)
        return replace(changed, scenario=Scenario(rest))

    def with_memory(self, n_bytes: float) -> "Question":
        """The question with so much memory on every device."""

        def holding(cluster: Cluster) -> Cluster:
            device = replace(cluster.device, memory_bytes=n_bytes)
            return replace(cluster, device=device, kinds=tuple(map(holding, cluster.kinds)))

        return self.of(cluster=holding(self.problem.cluster))


def ask(
    model: Problem | Model | str,
    cluster: Cluster | str | None = None,
    *,
    space: Space | None = None,
    calibration: Path | str | None = None,
    settings: Sequence[str] = (),
    kernels: PricesKernels | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
    **of_job: Unpack[JobKeywords],
) -> Question:
    """The question that the arguments of `search` ask.

    Args:
        model, cluster: a problem, or a model and a cluster.
        global_batch, seq_len, dtype, devices, job, framework, of_job: as `catalog.problem` takes them; `devices` are
            needed.
        space, calibration, settings, kernels: as for `search`.

    Raises:
        PerfModelError: no devices, and as `search`.
    """
    problem = catalog.problem(
        model,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        dtype=dtype,
        devices=devices,
        job=job,
        framework=framework,
        **of_job,
    )

    # A search derives dp from the devices, so that it cannot do without their number.
    problem.require_devices()
    if settings:
        problem.cluster.require_one_kind()
    if space is None:
        space = default_space(problem)
    question = Question(
        problem=problem,
        space=space if isinstance(space, SearchSpace) else space(problem),
        calibration=Path(calibration) if calibration is not None else None,
        kernels=kernels,
    )
    return question.in_scenario(Scenario.parse(settings))


def model_of(context: Context) -> StepProblem:
    """The step model of a context, kept for later calls with the same.

    Raises:
        CalibrationError: the calibration holds other weights than when the search began.
    """
    return _model(context, weight_files(context.calibration))


def _model(context: Context, weights: WeightFiles) -> StepProblem:
    """Return the step model of a context on weights that have been read already."""
    # Workers open the weights themselves. Other weights there than here would mix two models in
    # one ranking.
    if weights.digest != context.digest:
        raise CalibrationError(f"{context.calibration}: its weights changed while the search ran; start it again")
    step_problem = step_problem_of(context.problem, weights)
    scenario = context.scenario
    kernels = context.kernels
    if kernels is None and not scenario.settings:
        return step_problem

    def changed() -> StepProblem:
        priced = step_problem if kernels is None else step_problem.repriced(kernels, step_problem.collectives)
        return model_in_scenario(priced, scenario) if scenario.settings else priced

    # The session remembers prices by step problem, so that equal questions share one.
    return current_session().problems.get_or_compute((step_problem, scenario, kernels), changed)


@dataclass(frozen=True, kw_only=True)
class SpaceWords:
    """Words for the space of layouts that is searched, where no `SearchSpace` says it."""

    fix: str = ""
    """Dimensions that are fixed, in the notation of layouts, such as `tp=8,zero=1`."""
    schedules: str | Sequence[str] = ""
    """Names of pipeline schedules, or `all` that flush."""
    vary: str | Sequence[str] = ""
    """Options that are varied too: names of `OPTIONS`, or `all`."""
    fewer_devices: bool = False
    """Layouts may leave some of the devices unused."""

    def __call__(self, problem: Problem) -> SearchSpace:
        """The space for a problem.

        Raises:
            LayoutError, UnknownNameError: as `restrict`, `with_schedules` and `with_options`.
        """
        every = default_space(problem, fewer_devices=self.fewer_devices)
        every = with_options(every, _listed(self.vary), problem.cluster)
        return restrict(with_schedules(every, _listed(self.schedules)), self.fix)


def _listed(names: str | Sequence[str]) -> str:
    return names if isinstance(names, str) else ",".join(names)


def _search_words() -> dict[str, type]:
    """Names of the fields of a search, and the record that has each."""
    homes = {}
    for record in (SpaceWords, SearchOptions, Tariff):
        for name in [item.name for item in fields(record)]:
            if name != "tariff":
                homes[name] = record
    return homes


SEARCH_WORDS: Final = MappingProxyType(_search_words())
"""Everything that can be said of a search, and the record that has it as a field."""


def file_words(file: catalog.JobFile) -> dict[str, Any]:
    """The settings as `[search]` of a job file writes them.

    Raises:
        PerfModelError: a word that there is not, or a value that it cannot have; names the file.
    """
    place, stated = f"{file.place} [search]", {}
    for word, value in file.search.items():
        stated |= catalog.checked_fields(SEARCH_WORDS.get(word, SearchOptions), {word: value}, place, SEARCH_WORDS)
    return stated


def worded(
    keywords: Mapping[str, Any], options: SearchOptions | None, space: Space | None
) -> tuple[SearchOptions, Space | None, dict[str, Any]]:
    """Options and space with the fields that `keywords` set, and the keywords that are left for the problem.

    Raises:
        PerfModelError: a space beside keywords of one, or what the records refuse.
    """
    # Sort the keywords by the record that has them as a field. A record given beside them
    # supplies the rest.
    by_record: dict[type, dict[str, Any]] = {home: {} for home in SEARCH_WORDS.values()}
    for word, value in keywords.items():
        if word in SEARCH_WORDS:
            by_record[SEARCH_WORDS[word]][word] = value
    keywords = dict(keywords)
    options = replace(options or SearchOptions(), **by_record[SearchOptions])
    # Words of a tariff change fields of one that is given as a record.
    if "tariff" in keywords:
        options = replace(options, tariff=keywords.pop("tariff"))
    if by_record[Tariff]:
        options = replace(options, tariff=replace(options.tariff or Tariff(), **by_record[Tariff]))
    if by_record[SpaceWords]:
        if space is not None:
            raise PerfModelError(
                f"search: a space is whole: leave out {', '.join(by_record[SpaceWords])}, or the space"
            )
        space = SpaceWords(**by_record[SpaceWords])
    return (
        options,
        space,
        {word: value for word, value in keywords.items() if word not in SEARCH_WORDS},
    )
