"""A small search that the tests of this folder share."""

from dataclasses import dataclass

import pytest

from perfmodel import catalog
from perfmodel.prediction import StepProblem, step_problem
from perfmodel.spec import Job, Problem


@dataclass(frozen=True, kw_only=True)
class Case(Problem):
    """A problem, also with its prices."""

    devices: int = 8

    @property
    def step_problem(self) -> StepProblem:
        return step_problem(self.model, self.cluster, self.job)


@pytest.fixture(scope="session")
def case() -> Case:
    model = catalog.model("gpt3-1.3b")
    cluster = catalog.cluster("dgx-a100")
    return Case(model=model, cluster=cluster, job=Job(global_batch=16, seq_len=2048))
