"""What is searched: a job on devices of a cluster, over a space of layouts; and its layouts, priced."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from perfmodel.errors import LayoutError
from perfmodel.layout_search._candidates import Candidates, gather
from perfmodel.layout_search._enumerate import enumerate_grids
from perfmodel.layout_search._space import Space
from perfmodel.prediction import Framework, StepModel, price_grids, step_model
from perfmodel.spec import Cluster, Job, Model
from perfmodel.what_if import Scenario, model_in_scenario

Progress = Callable[[str, int, int], None]
"""Called with (what is done, how many, of how many)."""
Context = tuple[Model, Cluster, Job, Path | None, Framework, Scenario]
"""Arguments of `model_of`."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One job to be laid out."""

    model: Model
    cluster: Cluster
    job: Job
    devices: int
    """At most so many, if the space says `fewer_devices`."""
    space: Space
    calibration: Path | None
    framework: Framework
    scenario: Scenario = field(default_factory=Scenario)
    """In which the machine is another one; memory is the cluster's."""

    @property
    def context(self) -> Context:
        """What the step model follows from; picklable."""
        return self.model, self.cluster, self.job, self.calibration, self.framework, self.scenario

    @property
    def fixed(self) -> StepModel:
        """The step model, kept for later calls."""
        return model_of(self.context)

    @property
    def usable_bytes(self) -> float:
        """Memory of a device that a layout may take."""
        return self.cluster.device.memory_bytes * (1 - self.fixed.framework.memory_margin)

    def in_scenario(self, scenario: Scenario) -> "Question":
        """The same on the machine as a scenario has it."""
        n_bytes = scenario.device(self.cluster.device).memory_bytes
        rest = tuple(setting for setting in scenario.settings if setting.name != "memory_bytes")
        changed = self if n_bytes == self.cluster.device.memory_bytes else self.with_memory(n_bytes)
        return replace(changed, scenario=Scenario(rest))

    def with_memory(self, n_bytes: float) -> "Question":
        """The same with so much memory on every device."""
        return replace(self, cluster=replace(self.cluster, device=replace(self.cluster.device, memory_bytes=n_bytes)))


@lru_cache(maxsize=64)
def _in_scenario(context: Context) -> StepModel:
    return model_in_scenario(step_model(*context[:5]), context[5])


def model_of(context: Context) -> StepModel:
    """The step model of a context, kept for later calls with the same."""
    return _in_scenario(context) if context[5].settings else step_model(*context[:5])


def price(question: Question, rejected: Counter[str], report: Progress = lambda *_: None) -> Candidates:
    """Memory and bounds of all layouts of a question.

    Args:
        question: what to lay out.
        rejected: gets the number of combinations that cannot run or do not fit, by reason.
        report: told what is being done.

    Raises:
        LayoutError: no layout is possible at all (the message counts the reasons).
    """
    grids = list(
        enumerate_grids(
            question.space, question.model, question.cluster, question.job, question.devices, rejected
        )
    )  # fmt: skip
    if not grids:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in rejected.most_common())
        raise LayoutError(f"no layout of {question.model.name} is possible on {question.devices} devices: {reasons}")

    def reported(costs):
        for done, cost in enumerate(costs, 1):
            report("price", done, len(grids))
            yield cost

    return gather(reported(price_grids(question.fixed, grids)), question.usable_bytes, rejected)
