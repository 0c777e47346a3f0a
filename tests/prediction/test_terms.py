"""Terms of the physics, switched off one by one."""

from dataclasses import replace
from typing import Any

import pytest

from perfmodel import catalog
from perfmodel.errors import UnknownNameError
from perfmodel.prediction import (
    STEP_TERMS,
    Site,
    StepProblem,
    explain,
    step_problem,
    step_times_s,
    without,
)
from perfmodel.spec import Framework, Job, Layout
from perfmodel.spec.parts import Experts

NAMES = [term.name for term in STEP_TERMS]
LOADED = Framework(
    host_op_s=3e-4,
    kernel_gap_s=5e-6,
    attention="flash-1",
    blocking_sends=True,
    tp_overlap_loss=0.3,
    dp_overlap_loss=0.3,
    straggling=0.02,
    step_overhead_s=0.02,
    collective_skew_s=2e-5,
    checks_collectives="always",
    forward_bookkeeping=20,
    grouped_launch_s=1e-4,
    partition_copy_s=1e-5,
)
"""Every term at once."""
LAYOUT = Layout(tp=4, pp=2, dp=8, ep=4, zero=1, tp_overlap=True, sequence_parallel=True)


def loaded(cluster: str = "aws-p5", micro_batches: int = 8) -> StepProblem:
    device_and_network = catalog.cluster(cluster)
    levels = tuple(replace(level, contention=0.2) for level in device_and_network.levels)
    job = Job(
        global_batch=8 * micro_batches,
        seq_len=2048,
        eager_kernels=("norm", "activation", "residual"),
        expert_imbalance=1.5,
        dtype="fp8",
        fp8_recipe="current",
        all_reduce_gradients=True,
        blocking_launches=True,
        row_kernels="by_reduction",
    )
    site = Site(sustained=(("Ampere", 0.15), ("Hopper", 0.15)))
    machine = replace(device_and_network, levels=levels)
    model = replace(catalog.model("gpt3-6.7b"), experts=Experts(count=8, topk=2, ffn_hidden=4096))
    return step_problem(model, machine, job, framework=LOADED, site=site)


def step_s(problem: StepProblem, layout: Layout = LAYOUT) -> float:
    return float(step_times_s(problem, [layout])[0])


HOST = "waiting for the host"
OF_HOSTS = (
    HOST,
    "hosts that check collectives",
    "bookkeeping of the host",
    "expert products launched one by one",
    "hosts that wait for every kernel",
)
SHOWN: dict[str, dict[str, Any]] = {
    "modules recomputed": {"recompute": "selective"},
    "gradients reduced on all ranks": {"overlap_grad_reduce": False},
    "weight shards copied one by one": {"zero": 3, "overlap_param_gather": False},
    "updates by the host": {"offload_states": "optimizer"},
}
"""What a layout has to have for a term to show."""
SHOWN_ON = {"products that nobody tuned": "MI300X"}
"""The device that a term shows on, where it is not every one."""


@pytest.mark.parametrize("name", NAMES)
def test_every_term_makes_a_step_longer(name: str) -> None:
    """Beside all others, but where a step waits for its host nothing on the device makes it
    longer."""
    problem = loaded() if name in OF_HOSTS else without(loaded(), OF_HOSTS)
    if name in SHOWN_ON:
        problem = replace(
            problem, cluster=replace(problem.cluster, device=catalog.device(SHOWN_ON[name]))
        )
    layout = LAYOUT.replace(**SHOWN.get(name, {}))
    assert step_s(without(problem, [name]), layout) < step_s(problem, layout) * (1 - 1e-6)


def test_terms_off_are_off_in_any_order_and_once() -> None:
    problem = loaded()
    one = without(problem, NAMES)
    assert one == without(problem, NAMES[::-1]) == without(one, NAMES)
    assert all(without(one, [name]) == one for name in NAMES)
    assert not one.framework.costs_steps
    assert one.framework.host.issue_s == 0


def test_without_terms_a_step_is_its_kernels_and_collectives() -> None:
    parts = explain(without(loaded(), NAMES), LAYOUT).breakdown_s
    assert parts["kernel_launch_gaps"] == 0
    assert "stragglers" not in parts
    assert "quantising" not in parts
    assert "step_overhead" not in parts


@pytest.mark.parametrize("framework", catalog.frameworks())
def test_no_framework_costs_anything_beyond_the_terms(framework: str) -> None:
    """A cost of a framework that no term switches off would be told by nothing."""
    for version in catalog.framework_versions(framework):
        bare = without(replace(loaded(), framework=version), NAMES).framework
        assert (bare.host.issue_s, bare.host.kernel_gap_s, bare.communication.tp_overlap_loss) == (
            0,
            0,
            0,
        )
        assert not bare.costs_steps


def test_an_unknown_term_is_named() -> None:
    with pytest.raises(UnknownNameError, match="unknown term 'clock'"):
        without(loaded(), ["clock"])
