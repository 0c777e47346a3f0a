"""Dynamic programs over cuts against all cuts one by one."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies.optimise_tables import random_chain

from perfmodel.errors import PerfModelError
from perfmodel.planning.optimise import NothingFitsError, least_critical_path, least_sum_plus_max


def random_tables(seed: int, kinds: int, stages: int, layers: int) -> np.ndarray:
    """Costs without any structure, a fifth of them impossible."""
    rng = np.random.default_rng(seed)
    table = rng.uniform(1, 10, (kinds, stages, layers + 1, layers + 1))
    cut = np.arange(layers + 1)
    return np.where((cut[:, None] < cut) & (rng.random(table.shape) > 0.2), table, np.inf)


def every_way(supply: tuple[int, ...], stages: int, layers: int):
    """Index arrays of all cuts and orders of kinds."""
    kinds = sorted(set(permutations([k for k, n in enumerate(supply) for _ in range(n)])))
    for inner in combinations(range(1, layers), stages - 1):
        cuts = np.array([0, *inner, layers])
        for order in kinds:
            yield np.array(order), np.arange(stages), cuts[:-1], cuts[1:]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(2,), (3,), (4,), (1, 1), (2, 1), (1, 1, 1)]),
    st.integers(4, 7),
)
def test_least_costs_equal_those_of_all_cuts(
    seed: int, supply: tuple[int, ...], layers: int
) -> None:
    stages = sum(supply)
    added, largest = (random_tables(seed + i, len(supply), stages, layers) for i in range(2))
    ways = [(added[at], largest[at]) for at in every_way(supply, stages, layers)]
    best = min(a.sum() + b.max() for a, b in ways)
    path = min(
        max(b[r] + a[:r].sum() for r in range(stages)) + (0 if np.isfinite(a[-1]) else np.inf)
        for a, b in ways
    )
    assert least_critical_path(largest, added, supply) == pytest.approx(path)
    if not np.isfinite(best):
        with pytest.raises(NothingFitsError):
            least_sum_plus_max(added, largest, supply)
        return
    found = least_sum_plus_max(added, largest, supply)
    assert found[0].value == pytest.approx(best)
    for cuts in found:  # every point of the front is a cut with these costs
        end = np.cumsum(cuts.partition)
        at = np.array(cuts.kinds), np.arange(stages), end - cuts.partition, end
        assert added[at].sum() == pytest.approx(cuts.sum)
        assert largest[at].max() == pytest.approx(cuts.max)
        assert [cuts.kinds.count(k) for k in range(len(supply))] == list(supply)


def test_chain_equals_brute_force() -> None:
    for seed in range(5):
        chain = random_chain(seed, layers=9, stages=4, micro_batches=5)
        assert chain.exact()[0].value == pytest.approx(chain.brute_force(), rel=1e-12)


def test_closed_form_is_gpipes_makespan() -> None:
    """Backwards twice as long as forwards on every layer: both slowest stages are the same one."""
    chain = random_chain(3, layers=24, stages=4, micro_batches=6)
    plain = type(chain)(
        **{
            name: getattr(chain, name)
            for name in ("forward_s", "state_bytes", "in_flight", "slowness", "boundary_s")
        },
        backward_s=chain.backward_s[:1],
        saved_bytes=chain.saved_bytes[:1] * 0,
        micro_batches=6,
        schedule="gpipe",
        capacity_bytes=chain.capacity_bytes * 10,
    )
    best = plain.exact()[0]
    assert plain.step_s([best.partition])[0] == pytest.approx(best.value, rel=1e-5)


@pytest.mark.parametrize(
    "supply",
    [(1, 1), (2, 2), (3,), (1, 1, 1), (4, -1)],
    ids=["fewer", "more", "one", "three", "none"],
)
def test_supply_must_add_up(supply: tuple[int, ...]) -> None:
    """Devices of two kinds, as many as stages."""
    with pytest.raises(PerfModelError, match="of 2 kinds for 3 stages"):
        least_sum_plus_max(*[random_tables(0, 2, 3, 5)] * 2, supply=supply)
