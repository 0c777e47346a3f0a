"""The question that a search answers: a job, devices of a cluster, and a space of layouts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from perfmodel import catalog
from perfmodel.cost import PricesKernels
from perfmodel.cost.learn import WeightFiles, weight_files
from perfmodel.display import shorten_reprs
from perfmodel.errors import CalibrationError
from perfmodel.planning.layouts._space import SearchSpace, Space, default_space
from perfmodel.planning.what_if import Scenario, model_in_scenario
from perfmodel.prediction import StepProblem, step_problem_of
from perfmodel.session import current_session
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem, partition_by_cost
from perfmodel.spec.keywords import JobKeywords


class Context(NamedTuple):
    """Everything that determines a step model, in a picklable form (`model_of`)."""

    problem: Problem
    calibration: Path | None
    """Directory of the weights; None for the shipped weights."""
    scenario: Scenario
    """Changes of the machine."""
    kernels: PricesKernels | None
    """Prices of kernels instead of the calibration's."""
    digest: str
    """Digest of the calibration's weights."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A problem, the layouts to search, and their tariff."""

    problem: Problem
    space: SearchSpace
    calibration: Path | None = None
    scenario: Scenario = field(default_factory=Scenario)
    """Changes of the machine, except its memory, which is a property of the cluster."""
    kernels: PricesKernels | None = None
    """Prices of kernels instead of the calibration's."""

    @property
    def devices(self) -> int:
        """Number of devices; an upper limit if the space has `fewer_devices`."""
        return self.problem.require_devices()

    @property
    def context(self) -> Context:
        """Everything that determines the step model."""
        return Context(
            problem=self.problem,
            calibration=self.calibration,
            scenario=self.scenario,
            kernels=self.kernels,
            digest=self.weights.digest,
        )

    @cached_property
    def weights(self) -> WeightFiles:
        """The calibration's weights, read on first use."""
        return weight_files(self.calibration)

    @property
    def step_problem(self) -> StepProblem:
        """The step model (cached)."""
        return _model(self.context, self.weights)

    def as_run(self, layout: Layout) -> Layout:
        """The layout with the pipeline stages that the framework chooses itself, if it does.

        Candidates have stages as even as can be.
        """
        # Enumeration knows even stages only. A framework such as nanotron cuts stages by cost;
        # its layouts are timed with that cut.
        framework = self.problem.framework
        if (
            not framework.launch.stages_by_cost
            or self.space.any_framework
            or layout.partition is not None
        ):
            return layout
        return layout.replace(partition=partition_by_cost(self.problem.model, layout.pp))

    def with_problem(self, **changes: Any) -> "Question":
        """The question with some fields of its problem changed, as in `Problem.replace`."""
        return replace(self, problem=self.problem.replace(**changes))

    @property
    def beyond_framework(self) -> "Question":
        """The question over all layouts, including those that the framework cannot run."""
        return replace(self, space=replace(self.space, any_framework=True))

    def in_scenario(self, scenario: Scenario) -> "Question":
        """The question on the machine of a scenario."""
        # Memory is a fact of the cluster, which the search needs before it prices anything. All
        # other settings change prices, and stay with the scenario.
        device = self.problem.cluster.device
        n_bytes = scenario.device(device).memory_bytes
        other_settings = tuple(
            setting for setting in scenario.settings if setting.name != "memory_bytes"
        )
        question = self if n_bytes == device.memory_bytes else self.with_memory(n_bytes)
        return replace(question, scenario=Scenario(other_settings))

    def with_memory(self, n_bytes: float) -> "Question":
        """The question with another device memory."""

        def holding(cluster: Cluster) -> Cluster:
            device = replace(cluster.device, memory_bytes=n_bytes)
            return replace(cluster, device=device, kinds=tuple(map(holding, cluster.kinds)))

        return self.with_problem(cluster=holding(self.problem.cluster))


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
    """Build a question from the arguments of `search`.

    Args:
        model, cluster: a problem, or a model and a cluster.
        global_batch, seq_len, dtype, devices, job, framework, of_job: as `catalog.problem` takes
            them; `devices` are needed.
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
    """The step model of a context (cached).

    Raises:
        CalibrationError: the calibration holds other weights than when the search began.
    """
    return _model(context, weight_files(context.calibration))


def _model(context: Context, weights: WeightFiles) -> StepProblem:
    """Return the step model of a context on weights that have been read already."""
    # Workers open the weights themselves. Other weights there than here would mix two models in
    # one ranking.
    if weights.digest != context.digest:
        raise CalibrationError(
            f"{context.calibration}: its weights changed while the search ran; start it again"
        )
    step_problem = step_problem_of(context.problem, weights)
    scenario = context.scenario
    kernels = context.kernels
    if kernels is None and not scenario.settings:
        return step_problem

    def changed() -> StepProblem:
        if kernels is None:
            priced = step_problem
        else:
            priced = step_problem.repriced(kernels, step_problem.collectives)
        return model_in_scenario(priced, scenario) if scenario.settings else priced

    # The session remembers prices by step problem, so that equal questions share one.
    return current_session().problems.get_or_compute((step_problem, scenario, kernels), changed)


shorten_reprs(__name__)
