"""Unequal micro-batches and gradient buckets: against the structures and minima that they
generalise."""

import numpy as np
import pytest
from constant_rates import Rates

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.planning.optimise import (
    BucketResult,
    Grouping,
    MicroBatchResult,
    by_micro_batch,
    launchable_buckets,
    size_buckets,
    size_micro_batches,
)
from perfmodel.prediction import StepProblem, durations, evaluate, layout_batches, step_problem
from perfmodel.program import ProgramSpec, build
from perfmodel.session import Session
from perfmodel.spec import Job, Layout
from perfmodel.timeline import makespan, times

Sizes = tuple[tuple[int, ...], ...]


@pytest.fixture(scope="module")
def problem() -> StepProblem:
    return step_problem(
        catalog.model("gpt2-345m"),
        catalog.cluster("v100-100g"),
        Job(global_batch=32, seq_len=512, dtype="fp16"),
    )


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_classes_by_micro_batch_are_the_same_program(schedule: str) -> None:
    spec = ProgramSpec(
        schedule=schedule, stages=3, micro_batches=5, grad_reduce="overlap", segments=2
    )
    structure = build(spec)
    refined, old, micro_batch = by_micro_batch(structure)
    rng = np.random.default_rng(0)
    durations = rng.uniform(1, 2, structure.n_classes)
    same = times(refined, durations[old])
    assert same.end_s == pytest.approx(times(structure, durations).end_s)
    assert (refined.class_kind == structure.class_kind[old]).all()
    slower = times(refined, np.where(micro_batch == 0, 2.0, 1.0) * durations[old])
    assert slower.makespan_s > same.makespan_s


def test_small_micro_batches_fill_and_drain(problem: StepProblem) -> None:
    found = size_micro_batches(problem, Layout.parse("pp=4,micro_batch=4"))
    assert sum(found.sizes) == 32
    assert len(found.sizes) == 8
    assert found.step_time_s < min(found.uniform_s, found.best_uniform_s)
    assert found.sizes[0] < max(found.sizes) > found.sizes[-1]
    assert found.uniform_s == pytest.approx(
        evaluate(problem, [Layout.parse("pp=4,micro_batch=4")]).step_time_s[0], rel=1e-5
    )
    assert found.to_dict()["sizes"] == found.sizes
    for text in (
        "pp=4,micro_batch=32",
        "pp=4,schedule=pipedream",
        "pp=4,micro_batch=4,schedule=chimera-doubling",
    ):
        with pytest.raises(LayoutError, match="only with several micro-batches"):
            size_micro_batches(problem, Layout.parse(text))


def test_buckets_that_a_prediction_assumes_take_as_long(problem: StepProblem) -> None:
    layout = Layout.parse("pp=2,dp=4")
    (batch,) = layout_batches(problem, [layout])
    grouping = Grouping(problem, batch, batch.spec.segments)
    assert grouping.durations(grouping.equal) == pytest.approx(durations(problem, batch)[0])


def test_each_choice_of_buckets_has_durations_of_its_own(problem: StepProblem) -> None:
    """Also where another was asked for before."""
    (batch,) = layout_batches(problem, [Layout.parse("dp=16")])
    grouping = Grouping(problem, batch, 2)
    even, uneven = grouping.durations(((12, 12),)), grouping.durations(((4, 20),))
    assert np.abs(uneven - even).max() > 0.1 * even.max()
    with Session():
        assert np.array_equal(grouping.durations(((4, 20),)), uneven)


def test_buckets_are_never_worse_than_equal_ones(problem: StepProblem) -> None:
    layout = Layout.parse("dp=16")
    found = size_buckets(problem, layout, numbers=(1, 2, 4))
    assert found.step_time_s <= found.given_s
    assert [sum(of_stage) for of_stage in found.buckets] == [24]
    (batch,) = layout_batches(problem, [layout])
    every = Grouping(problem, batch, 2)
    alone = min(
        float(makespan(every.prepared.compiled, every.durations(((24 - k, k),)))) for k in range(24)
    )
    assert size_buckets(problem, layout, numbers=(2,)).step_time_s <= min(alone, found.given_s) * (
        1 + 1e-6
    )
    for text in ("dp=1", "dp=16,zero=3", "dp=16,overlap_grad_reduce=false"):
        with pytest.raises(LayoutError, match="no overlapped"):
            size_buckets(problem, Layout.parse(text))


@pytest.mark.parametrize("numbers", [(1,), (1, 2, 4, 8)])
def test_buckets_are_never_worse_than_those_of_a_prediction(
    problem: StepProblem, numbers: tuple[int, ...]
) -> None:
    """Also where many small buckets are best, and few are looked at."""
    layout = Layout.parse("dp=16")
    found = size_buckets(problem.repriced(Rates(), Rates()), layout, numbers=numbers)
    assert found.step_time_s <= found.given_s * (1 + 1e-9)
    assert found.gain >= -1e-9


@pytest.mark.parametrize("text", ["dp=16", "pp=2,dp=4", "pp=5,dp=2"])
def test_buckets_of_one_size_are_the_best_of_all_that_a_framework_may_fill(
    problem: StepProblem, text: str
) -> None:
    """From a stage's last layer on, so that its first bucket has what is left."""
    layout = Layout.parse(text)
    (batch,) = layout_batches(problem, [layout])
    layers = [sum(of_stage) for of_stage in Grouping(problem, batch, 1).equal]
    step_s: dict[Sizes, float] = {}
    for size in range(1, max(layers) + 1):
        number = len(range(0, max(layers), size))
        if number > 8:
            continue
        buckets = tuple(filled_buckets(n, size, number) for n in layers)
        step_s[buckets] = float(Grouping(problem, batch, number).step_s([buckets])[0])
    found = launchable_buckets(problem, layout)
    assert [sum(of_stage) for of_stage in found.buckets] == layers
    assert found.step_time_s <= min(step_s.values()) * (1 + 1e-6)
    assert max(map(len, found.buckets)) > 8 or found.step_time_s == pytest.approx(
        step_s[found.buckets], rel=1e-6
    )
    assert found.not_launchable == ""


def filled_buckets(layers: int, size: int, number: int) -> tuple[int, ...]:
    """Layers of each bucket in model order, counted one by one from the last layer of a stage to
    its first."""
    buckets = [0]
    for _ in range(layers):
        if buckets[0] == size:
            buckets.insert(0, 0)
        buckets[0] += 1
    return (*buckets, *[0] * (number - len(buckets)))


@pytest.mark.parametrize(
    ("buckets", "launchable"),
    [
        (((4, 4, 4), (4, 4, 4)), True),
        (((1, 4, 4), (2, 4, 4)), True),
        (((5, 4, 4), (4, 4, 4)), False),
        (((4, 3, 4), (4, 4, 4)), False),
        (((12,), (10,)), True),
    ],
)
def test_buckets_that_frameworks_fill_are_of_one_size_but_the_last(buckets, launchable: bool):
    result = BucketResult(buckets, 1.0, 1.0, 1, 0.0)
    assert (result.not_launchable == "") == launchable
    assert result.to_dict()["not_launchable"] == result.not_launchable


@pytest.mark.parametrize(("sizes", "launchable"), [((2, 2, 2), True), ((1, 2, 3), False)])
def test_micro_batches_that_frameworks_run_are_of_one_size(
    sizes: tuple[int, ...], launchable: bool
):
    result = MicroBatchResult(sizes, 1.0, 1.0, 1.0, 2, 1, 0.0)
    assert (result.not_launchable == "") == launchable
