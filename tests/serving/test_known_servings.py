"""Servers of every kind are predicted as they were when the table was last written."""

from typing import Any

import pytest
from known_servings import TABLE, at_constant_rates, cases
from stored_figures import moved_figures

from perfmodel.serving import serve

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/serving/known_servings.py` and review it"


def test_servers_are_those_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"


@pytest.mark.parametrize("per_replica", [1, 2, 3, 6])
@pytest.mark.parametrize("limit", ["ttft", "tpot"])
def test_the_largest_batch_is_that_whose_time_is_the_limit(limit: str, per_replica: int) -> None:
    requests: dict[str, Any] = {"prompt_tokens": 3000, "output_tokens": 100}
    server: Any = ("llama3-8b", "dgx-h100", "dp=2")
    with at_constant_rates():
        exact = serve(*server, batch=2 * per_replica, **requests)
        limit_s = getattr(exact, f"{limit}_s") * (1 + 1e-9)
        largest = serve(*server, **{f"{limit}_limit_s": limit_s}, **requests)
    assert largest.requests.batch == 2 * per_replica
