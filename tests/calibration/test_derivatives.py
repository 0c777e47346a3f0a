"""Derivatives through the timeline against finite differences; adjusted models against models made
anew."""

from copy import copy
from dataclasses import replace

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.prediction import evaluate, step_derivatives, step_problem, step_times_s
from perfmodel.prediction.composition import layout_coordinates
from perfmodel.prediction.grids import lower_bounds_s
from perfmodel.prediction.sites import PARAMETERS, Adjustment, FittedRuns
from perfmodel.prediction.sites.known_runs import LayoutKernel
from perfmodel.spec import Job, Layout

LAYOUTS = [
    Layout.parse(text)
    for text in (
        "tp=2,pp=2,dp=16,zero=1",
        "tp=1,pp=4,dp=16,zero=3",
        "tp=4,pp=1,dp=8,tp_overlap=true,sequence_parallel=true",
        "tp=1,pp=4,dp=4,schedule=zb-h1",
        "tp=1,pp=4,dp=4,schedule=pipedream-2bw",
    )
]
HERE = Adjustment(
    device="A100-SXM4-80GB",
    values=(
        ("gemm", 0.1),
        ("inter_node.alpha", -0.2),
        ("straggling", 0.01),
        ("dp_overlap_loss", 0.1),
    ),
)
_STEP = 1e-4


@pytest.fixture(scope="module")
def problem():
    model = catalog.model("gpt3-1.3b")
    return step_problem(
        model, catalog.cluster("dgx-a100"), Job(global_batch=512, seq_len=model.seq_len)
    )


def test_derivatives_are_those_of_finite_differences(problem) -> None:
    found = step_derivatives(problem.adjusted(HERE), LAYOUTS, PARAMETERS)
    assert np.allclose(found.step_s, step_times_s(problem.adjusted(HERE), LAYOUTS), rtol=1e-12)
    # seconds are those of one operator or collective: a larger step goes beyond what hides them
    steps = {name: 1e-7 if name.endswith("_s") else _STEP for name in PARAMETERS}
    slopes = [
        (
            step_times_s(problem.adjusted(HERE.moved(name, step)), LAYOUTS)
            - step_times_s(problem.adjusted(HERE.moved(name, -step)), LAYOUTS)
        )
        / (2 * step)
        for name, step in steps.items()
    ]
    assert np.allclose(found.by_parameter, np.array(slopes).T, rtol=2e-3, atol=1e-5)
    moved = {
        name for i, name in enumerate(PARAMETERS) if np.abs(found.by_parameter[:, i]).max() > 1e-6
    }
    assert {
        "gemm",
        "memory",
        "optimizer",
        "host_op_s",
        "step_overhead_s",
        "inter_node.send_recv.beta",
    } <= moved


def test_adjusted_is_what_a_fresh_model_gives(problem) -> None:
    """Shared structures and retimed tables against a model that never saw other parameters."""
    fresh = replace(problem, kernels=copy(problem.kernels), adjustment=HERE)  # shares no prices
    assert np.allclose(
        step_times_s(problem.adjusted(HERE), LAYOUTS), step_times_s(fresh, LAYOUTS), rtol=1e-12
    )
    back = problem.adjusted(HERE).adjusted(None)
    assert np.allclose(step_times_s(back, LAYOUTS), step_times_s(problem, LAYOUTS), rtol=1e-12)
    assert np.allclose(
        evaluate(problem.adjusted(HERE), LAYOUTS).step_time_s,
        step_times_s(fresh, LAYOUTS),
        rtol=1e-4,
    )


def test_bounds_stay_bounds_where_runs_were_faster(problem) -> None:
    where = tuple(layout_coordinates(problem.setting, layout) for layout in LAYOUTS)
    like = LayoutKernel(amplitude=0.1, length_scale=2.0, nugget=0.0)
    near = FittedRuns(
        at=where,
        slopes=((),) * len(where),
        error=(-0.3,) * len(where),
        weight=(1.0,) * len(where),
        covariance=(),
        layout_kernel=like,
        noise=1e-3,
        scatter=(0.0, 0.0),
        noise_inflation=1.0,
        coverage_factor=1.0,
    )
    model = problem.adjusted(replace(HERE, runs=near))
    assert np.allclose(
        step_times_s(model, LAYOUTS),
        np.exp(-0.3) * step_times_s(problem.adjusted(HERE), LAYOUTS),
        rtol=1e-3,
    )
    assert (lower_bounds_s(model, LAYOUTS[:3]) <= step_times_s(model, LAYOUTS[:3])).all()
    apart = np.array([where[0], tuple(x + 20 for x in where[0])])
    spread = near.joint(np.zeros((2, 0)), apart, np.zeros((2, 0)))[0]
    assert spread[0, 0] < 0.01 * spread[1, 1]


def test_parameters_are_what_they_say(problem) -> None:
    def step_s(**values: float) -> np.ndarray:
        return step_times_s(problem.adjusted(replace(HERE, values=tuple(values.items()))), LAYOUTS)

    plain = step_s()
    assert np.allclose(step_s(step_overhead_s=0.5), plain + 0.5, rtol=1e-9)
    ranks = np.array([layout.devices for layout in LAYOUTS])
    assert np.allclose(
        step_s(straggling=0.02), plain * np.exp(0.02 * np.sqrt(2 * np.log(ranks))), rtol=1e-9
    )
    lost = step_s(dp_overlap_loss=1.0)
    assert (lost >= plain - 1e-12).all()
    assert lost[1] > plain[1] * 1.02  # ZeRO 3 hides gathers behind every pass
    assert step_s(tp_overlap_loss=1.0)[2] > plain[2]
