"""Real processes exchange data through torch.distributed's gloo."""

from collections.abc import Iterator

import numpy as np
import pytest
from test_collectives import RANKS, buffers, collective

from perfmodel.measure import RankGroup, StoppingRule
from perfmodel.measure._backend import collective_row, transport_of
from perfmodel.ops import CollectiveKind

pytest.importorskip("torch", reason="torch is not installed (extra: torch)")


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    with RankGroup(RANKS, transport_of("torch").session) as group:
        yield group


@pytest.mark.parametrize("size", [8, 4096])
def test_every_rank_ends_with_the_right_numbers(group: RankGroup, size: int):
    def result(kind: CollectiveKind) -> tuple[list[np.ndarray], list[np.ndarray]]:
        op = collective(kind, size)
        group.load(op)
        group.ask("run", 2)
        return buffers(op), group.values()

    held, values = result("all_reduce")
    assert all(np.array_equal(v, held[0] + held[1]) for v in values)
    held, values = result("all_gather")
    assert all(np.array_equal(v, np.concatenate(held)) for v in values)
    held, values = result("reduce_scatter")
    assert np.array_equal(np.concatenate(values), held[0] + held[1])
    held, values = result("all_to_all")
    halves = [np.split(h, 2) for h in held]
    assert all(np.array_equal(v, np.concatenate([halves[0][r], halves[1][r]])) for r, v in enumerate(values))
    held, values = result("send_recv")
    assert all(np.array_equal(v, held[rank - 1]) for rank, v in enumerate(values))


def test_a_collective_becomes_a_row(group: RankGroup):
    rule = StoppingRule(half_width=0.5, min_repeats=2, max_repeats=2, max_s=1.0, interference_limit=0.99)
    transport = transport_of("torch")
    row = collective_row(group, collective("all_reduce", 4096), "cpu", rule, transport.meter(), transport, "veth")
    assert (row["algorithm"], row["interconnect"]) == ("gloo", "veth")
    assert row["software"].startswith("torch")
    assert row["software"].endswith("-gloo")
    assert row["time_us"] > 0
