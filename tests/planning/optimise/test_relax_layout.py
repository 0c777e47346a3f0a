"""Relaxation of what a launch states: never slower, within what may be stated, and exact at what is
whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.planning.optimise import WholeShares, launchable_buckets
from perfmodel.planning.optimise.launches import (
    LaunchChoices,
    changed_once,
    exact_steps_s,
    relax_layout,
    relaxed_layouts,
    rounded_layout,
    shares_of_stages,
)
from perfmodel.prediction import evaluate, step_problem
from perfmodel.spec import Job, Layout

PROBLEM = step_problem(
    catalog.model("gpt3-125m"), catalog.cluster("dgx-a100"), Job(global_batch=8, seq_len=1024)
)
SIZES = (1, 2)


@pytest.fixture(
    scope="module",
    params=[pytest.param(True, marks=pytest.mark.slow), False],
    ids=["by stage", "one number"],
)
def refined(request):
    """12 layers on 5 stages: no even cut is balanced."""
    layout, choices = (
        Layout.parse("pp=5,micro_batch=2"),
        LaunchChoices(SIZES, by_stage=request.param),
    )
    return layout, choices, relax_layout(PROBLEM, layout, choices)


def test_it_is_never_slower_and_states_what_a_launch_can(refined) -> None:
    layout, choices, result = refined
    best = result.layout
    assert result.given_s == pytest.approx(evaluate(PROBLEM, [layout]).step_time_s[0], rel=1e-5)
    assert result.step_time_s < 0.99 * result.given_s
    assert result.certificate.lower_bound_s <= result.step_time_s * (1 + 1e-6)
    assert sum(best.partition) == 12
    assert best.micro_batch in SIZES
    assert (
        best.replace(partition=None, recompute="none", recompute_full_layers=None, micro_batch=2)
        == layout
    )
    if not choices.by_stage:
        assert len(best.recompute_full_layers or ()) <= 1
        assert best.recompute == "none" or best.recompute_full_layers is None


def test_no_single_change_improves_the_result(refined) -> None:
    _, choices, result = refined
    near = list(changed_once(result.layout, choices, trains=True))
    assert {layout.micro_batch for layout in near} == set(SIZES)
    assert exact_steps_s(PROBLEM, near).min() >= result.step_time_s * (1 - 1e-6)


@pytest.mark.parametrize("text", ["pp=1", "pp=4,schedule=pipedream"])
def test_what_has_no_cuts_or_no_flush_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="no pipeline stages to divide unevenly"):
        relaxed_layouts(PROBLEM, Layout.parse(text), LaunchChoices(SIZES))


def test_layers_that_recompute_are_rounded_up_and_fit_their_stage() -> None:
    base = Layout.parse("pp=3,recompute=none")
    values = {
        "layers": np.array([5, 4, 3]),
        "recompute": np.array([0.0, 0.3, 1.0]),
        "micro_batch": np.array([2.9]),
    }
    by_stage = rounded_layout(base, values, (1, 2, 4), LaunchChoices((1, 2, 4)))
    assert (by_stage.partition, by_stage.recompute_full_layers) == ((5, 4, 3), (0, 2, 3))
    assert by_stage.micro_batch == 4  # nearer than 2 in the logarithm
    values["recompute"] = np.array([0.5])
    assert rounded_layout(
        base, values, (1, 2, 4), LaunchChoices((1,), by_stage=False)
    ).recompute_full_layers == (3,)


@pytest.mark.parametrize("level", range(4))
def test_shares_of_stages_have_a_slope_however_the_compiler_rounds(level: int) -> None:
    """XLA's lowest level computes the softmax twice, rounded differently: its greatest part then
    equals no part."""
    cuts = WholeShares(5, 12, least=1)

    def shares(free: jax.Array) -> jax.Array:
        return shares_of_stages(jnp.asarray(0.5), cuts.relaxed(free, jnp.asarray(1.0))).sum()

    options = {"xla_backend_optimization_level": level}
    slopes = jax.jit(jax.vmap(jax.grad(shares)), compiler_options=options)
    assert np.isfinite(slopes(jax.random.normal(jax.random.key(0), (1024, 5)))).all()


@pytest.mark.parametrize(
    ("text", "layers"),
    [("pp=3,dp=2,partition=6-6-0", [6, 6, 0]), ("pp=2,dp=2,partition=0-12", [0, 12])],
)
def test_a_stage_without_layers_has_no_buckets(text: str, layers: list[int]) -> None:
    result = launchable_buckets(PROBLEM, Layout.parse(text))
    assert [sum(of_stage) for of_stage in result.buckets] == layers
    assert len({len(of_stage) for of_stage in result.buckets}) == 1
    assert result.step_time_s < 1.001 * result.given_s


def test_buckets_of_one_size_are_what_frameworks_fill() -> None:
    layout = Layout.parse("pp=2,dp=2")
    result = launchable_buckets(PROBLEM, layout)
    assert result.not_launchable == ""
    assert [sum(of_stage) for of_stage in result.buckets] == [6, 6]
    # a bucket per layer, which predictions assume, is one of those that are tried
    assert result.step_time_s <= result.given_s * (1 + 1e-6)
    assert result.gain >= -1e-6
    with pytest.raises(LayoutError, match="no overlapped gradient reductions"):
        launchable_buckets(PROBLEM, Layout.parse("pp=2"))
