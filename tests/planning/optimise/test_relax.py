"""Relaxations against closed forms; rounding, limits, certificates, and what they refuse."""

from functools import lru_cache
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies.chain_relaxation import optimise_chain
from studies.optimise_tables import random_chain
from studies.optimisers import OPTIMISERS, anneal, run_optimiser

from perfmodel import catalog
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.planning.optimise import (
    Box,
    Choices,
    Relaxation,
    Run,
    Shares,
    WholeShares,
    choose_method,
    convex_bound,
    design_hardware,
    relax,
    split_bandwidth,
)
from perfmodel.prediction import evaluate, step_problem
from perfmodel.program import Kind, ProgramSpec, build
from perfmodel.spec import Job, Layout
from perfmodel.timeline import CompiledStructure, compile_structure

HOPS = 4


@lru_cache
def one_micro_batch() -> CompiledStructure:
    """Its step is the sum of all passes and transfers."""
    return compile_structure(build(ProgramSpec(stages=HOPS + 1, micro_batches=1, optimizer=False)))


def chain_of_transfers(volume: np.ndarray) -> Relaxation:
    """One second per hop each way and unit share, times its volume; passes take no time."""
    structure = one_micro_batch().structure
    hop = structure.class_stage - (structure.class_kind == Kind.SEND_BACKWARD)
    sends = np.isin(structure.class_kind, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
    constants = {
        "volume": np.where(sends, volume[np.minimum(hop, HOPS - 1)], 0.0),
        "hop": np.where(sends, hop, 0),
    }
    return Relaxation({"x": Shares(HOPS, 1.0)}, one_micro_batch(), inverse_shares, constants)


def inverse_shares(values):
    return values["volume"] / values["x"][values["hop"]]


@pytest.mark.parametrize("volume", [[1.0, 4.0, 9.0, 16.0], [1.0, 1.0, 1.0, 1.0]])
def test_serial_transfers_share_by_the_root_of_their_volume(volume: list[float]) -> None:
    """min of sum v / x with sum x = 1 is (sum sqrt v)^2, at x as sqrt v (Cauchy-Schwarz)."""
    roots = np.sqrt(volume)
    problem = chain_of_transfers(np.array(volume))
    found = relax(problem, n_starts=2, steps=300)
    best = 2 * roots.sum() ** 2
    assert found.feasible
    assert found.value == pytest.approx(best, rel=1e-3)
    assert found.values["x"] == pytest.approx(roots / roots.sum(), abs=0.01)
    bounded = convex_bound(problem, found.values)
    assert best * (1 - 5e-3) <= bounded.lower_bound <= best * (1 + 1e-6)
    far = convex_bound(problem, {"x": np.array([0.7, 0.1, 0.1, 0.1])}, rounds=1)
    assert far.lower_bound <= best  # from anywhere it is a bound


def test_bound_without_a_solution_of_the_linear_program_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = {"x": np.full(HOPS, 1 / HOPS)}
    monkeypatch.setattr("scipy.optimize.linprog", lambda *_, **__: SimpleNamespace(status=4))
    bounded = convex_bound(chain_of_transfers(np.ones(HOPS)), good)
    assert bounded.lower_bound == 0.0
    assert bounded.values["x"].tolist() == good["x"].tolist()


def chosen(values):
    seconds = values["seconds"] @ values["mode"].T  # (places,)
    return jnp.where(values["forward"], seconds[jnp.minimum(values["place"], 4)], 0.0)


def too_many_bytes(values):
    return jnp.array([(values["mode"] @ values["bytes"]).sum() / 3.0 - 1])


def test_choices_keep_the_limit() -> None:
    """Five places take a fast mode of one byte or a slow one of none; three bytes are allowed."""
    structure = one_micro_batch().structure
    constants = {
        "seconds": np.array([1.0, 2.0]),
        "bytes": np.array([1.0, 0.0]),
        "place": structure.class_stage,
        "forward": structure.class_kind == Kind.FORWARD,
    }
    problem = Relaxation(
        {"mode": Choices(5, 2)}, one_micro_batch(), chosen, constants, limits=too_many_bytes
    )
    found = relax(problem, steps=300)
    assert found.feasible
    assert found.value == pytest.approx(3 * 1.0 + 2 * 2.0)
    with pytest.raises(PerfModelError, match="no further limits"):
        convex_bound(problem, found.values)


@given(st.integers(1, 12), st.integers(0, 3), st.integers(0, 40), st.integers(0, 10**6))
def test_whole_shares_keep_total_and_least(n: int, least: int, more: int, seed: int) -> None:
    variable = WholeShares(n, n * least + more, least)
    free = np.random.default_rng(seed).normal(0, 3, n).astype(np.float32)
    parts = variable.rounded(free)
    relaxed = np.asarray(variable.relaxed(jnp.asarray(free), jnp.asarray(1.0)))
    assert parts.sum() == variable.total
    assert (parts >= least).all()
    assert np.abs(np.cumsum(parts - relaxed)).max() <= 0.51


def test_boxes_stay_inside() -> None:
    for box in (Box((3,), 0.5, 2.0), Box((3,), 0.5, 2.0, log=True)):
        ends = np.asarray(box.relaxed(jnp.array([-50.0, 0.0, 50.0]), jnp.asarray(1.0)))
        assert ends[[0, 2]] == pytest.approx([0.5, 2.0])
        assert ends[1] == pytest.approx(1.25 if not box.log else 1.0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Box((2,), 1.0, 1.0), "low must be below high"),
        (lambda: Box((2,), 0.0, 1.0, log=True), "above 0"),
        (lambda: Shares(4, 1.0, 0.3), "do not fit"),
        (lambda: WholeShares(4, 3, 1), "do not fit"),
    ],
)
def test_impossible_variables_are_refused(make, words: str) -> None:
    with pytest.raises(PerfModelError, match=words):
        make()


def test_bandwidth_of_a_real_step() -> None:
    model = catalog.model("gpt3-6.7b")
    problem = step_problem(model, catalog.cluster("v100-100g"), Job(global_batch=16, seq_len=2048))
    found = split_bandwidth(problem, Layout.parse("pp=4,dp=2"))
    assert sum(found.links.values()) == pytest.approx(len(found.links), rel=1e-4)
    assert found.step_time_s < found.equal_s
    assert found.equal_s == pytest.approx(
        evaluate(problem, [Layout.parse("pp=4,dp=2")]).step_time_s[0], rel=1e-5
    )
    assert found.certificate.lower_bound_s <= found.step_time_s
    assert found.gap < 0.02
    for text, words in (
        ("pp=1", "fewer than two links"),
        ("pp=4,schedule=pipedream", "only for synchronous schedules"),
    ):
        with pytest.raises(LayoutError, match=words):
            split_bandwidth(problem, Layout.parse(text))


def test_hardware_for_a_budget() -> None:
    model = catalog.model("gpt3-6.7b")
    problem = step_problem(model, catalog.cluster("dgx-a100"), Job(global_batch=64, seq_len=2048))
    runs = [Run(problem, Layout.parse("tp=4,pp=2,dp=2"))]
    prices = {"compute_rate": 1.0, "memory_bandwidth": 1.0}
    found = design_hardware(runs, prices, budget=3.0)
    assert found.cost <= 3.0 * (1 + 1e-6)
    assert found.step_s[0] <= found.even_s[0] < found.before_s[0]
    assert found.to_dict()["multiples"].keys() == prices.keys()
    with pytest.raises(PerfModelError, match="budget at least"):
        design_hardware(runs, prices, budget=0.1)
    with pytest.raises(PerfModelError, match="at least one run"):
        design_hardware([], prices, budget=1.0)


@pytest.mark.slow
def test_joint_cuts_and_bandwidth_beat_each_alone() -> None:
    chain = random_chain(0, layers=24, stages=6, micro_batches=8, transfer=4.0)
    found = optimise_chain(chain)
    alone_s = chain.improved([cuts.partition for cuts in chain.exact()[:8]])[1]
    assert found.step_s < alone_s
    assert found.links.sum() == pytest.approx(5, rel=1e-4)
    assert sum(found.partition) == 24
    assert found.certificate.lower_bound_s <= found.step_s
    durations = chain.durations_s([found.partition], found.links)[0]
    assert chain.program.structure.n_classes == len(durations)
    assert anneal(chain, 0.2) >= found.certificate.lower_bound_s


@pytest.mark.parametrize("name", OPTIMISERS)
def test_other_optimisers_run_to_the_target(name: str) -> None:
    if name == "CMA-ES":
        pytest.importorskip("cma")
    volume = np.array([1.0, 4.0, 9.0, 16.0])
    best = 2 * np.sqrt(volume).sum() ** 2
    seconds, value = run_optimiser(name, chain_of_transfers(volume), best * 1.01, 20.0)
    assert value <= best * 1.01
    assert 0 < seconds < 20


def test_methods_and_their_reasons() -> None:
    assert choose_method(combinations=2000).method == "enumerate"
    assert choose_method(contiguous=True).method == "dynamic programming"
    assert choose_method(continuous=50).method == "relax"
    assert choose_method(contiguous=True, continuous=50).method == "relax and descend"
    assert choose_method(combinations=10**12).method == "relax and descend"
    assert "2,000" in str(choose_method(combinations=2000))
