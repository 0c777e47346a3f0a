"""A small search that the tests of this folder share."""

from dataclasses import dataclass

import pytest

from perfmodel import catalog
from perfmodel.prediction import StepModel, step_model
from perfmodel.spec import Cluster, Job, Model


@dataclass(frozen=True)
class Case:
    """What to lay out on what."""

    model: Model
    cluster: Cluster
    job: Job
    devices: int

    @property
    def fixed(self) -> StepModel:
        return step_model(self.model, self.cluster, self.job)


@pytest.fixture(scope="session")
def case() -> Case:
    return Case(catalog.model("gpt3-1.3b"), catalog.cluster("dgx-a100"), Job(global_batch=16, seq_len=2048), 8)
