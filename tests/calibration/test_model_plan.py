from pathlib import Path

import pytest

from perfmodel import catalog
from perfmodel.calibration import model_plan, plan_report
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.measure import read_plan, write_plan
from perfmodel.ops import Collective
from perfmodel.prediction import event_shares, step_problem
from perfmodel.spec import Job, Layout, Mlp

JOB = Job(global_batch=32, seq_len=1, dtype="fp32")
MLP = Mlp(name="stack", layers=4, hidden=64)
CLUSTER = catalog.cluster("dgx-a100")
LAYOUTS = [
    Layout(dp=4, micro_batch=2),
    Layout(tp=2, dp=2, micro_batch=2),
    Layout(tp=2, pp=2, dp=2, micro_batch=2),
]


def test_events_are_those_of_the_steps_each_once():
    plan = model_plan(MLP, CLUSTER, JOB, LAYOUTS)
    problem = step_problem(MLP, CLUSTER, JOB)
    events = {op for layout in LAYOUTS for op in event_shares(problem, layout).ops}
    kernels = {op for op in events if not isinstance(op, Collective)}
    assert set(plan.plan.kernels) == kernels - set(plan.unmeasured)
    assert len(set(plan.plan.collectives)) == len(plan.plan.collectives)
    assert sum(cost.new for cost in plan.layouts) == len(plan.plan.kernels) + len(
        plan.plan.collectives
    )


def test_a_layout_again_needs_no_measurement():
    once, twice = model_plan(MLP, CLUSTER, JOB, LAYOUTS), model_plan(MLP, CLUSTER, JOB, LAYOUTS * 2)
    assert once.plan == twice.plan
    assert all(
        cost.new == 0 and cost.measure_device_s == (0, 0) for cost in twice.layouts[len(LAYOUTS) :]
    )
    assert twice.run_device_s == pytest.approx(2 * once.run_device_s)
    assert twice.relative_scale == pytest.approx(once.relative_scale / 2)


def test_executions_count_every_kernel_on_every_device():
    """Per device, micro-batch and layer: one product forward, two backward, and their ReLUs; then
    the updates."""
    (share,) = [event_shares(step_problem(MLP, CLUSTER, JOB), Layout(dp=4, micro_batch=2))]
    micro_batches, layers, devices = 32 // (4 * 2), 4, 4
    products = sum(
        n for op, n in zip(share.ops, share.executions, strict=True) if op.family == "gemm"
    )
    assert products == 3 * layers * micro_batches * devices
    pipelined = event_shares(step_problem(MLP, CLUSTER, JOB), Layout(pp=2, dp=2, micro_batch=2))
    products = sum(
        n for op, n in zip(pipelined.ops, pipelined.executions, strict=True) if op.family == "gemm"
    )
    assert products == 3 * layers * (32 // (2 * 2)) * 2  # each device holds half of the layers
    sends = sum(
        n
        for op, n in zip(pipelined.ops, pipelined.executions, strict=True)
        if op.family == "send_recv"
    )
    assert sends == 2 * (32 // (2 * 2)) * 2


def test_saving_is_what_the_layouts_cost(tmp_path: Path):
    plan = model_plan(MLP, CLUSTER, JOB, LAYOUTS, iterations=10)
    d = plan.to_dict()
    assert d["run_device_s"] == pytest.approx(
        sum(c.layout.devices * c.step_time_s * 10 for c in plan.layouts)
    )
    assert d["measure_device_s"] <= d["measure_device_most_s"]
    assert d["saving"] == pytest.approx(1 - d["measure_device_s"] / d["run_device_s"])
    assert len(plan.to_frame()) == len(d["per_layout"]) == len(LAYOUTS)
    assert "DistSim" in plan_report(plan)
    write_plan(tmp_path / "plan.toml", plan.plan)
    assert read_plan(tmp_path / "plan.toml") == plan.plan


def test_distsim_search_has_less_redundancy_than_the_paper_needs():
    """Section 6: 15 layouts of 16 devices; table 3 states 0.1296 for its own events."""
    layouts = [
        f"{tp}M{pp}P{16 // tp // pp}D"
        for tp in (1, 2, 4, 8, 16)
        for pp in (1, 2, 4, 8, 16)
        if tp * pp <= 16
    ]
    plan = model_plan(
        "bert-exlarge", "a10x4", Job(global_batch=16, seq_len=512, dtype="fp16"), layouts
    )
    assert len(plan.layouts) == 15
    assert 0.01 < plan.relative_scale < 0.13
    assert all(op.num_ranks > 8 or op.num_nodes > 2 for op in plan.extrapolated)
    assert all(op.num_nodes <= 2 for op in plan.plan.collectives)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "model", ["gpt3-6.7b", "bert-large", "t5-11b", "llama3-8b", "mixtral-8x7b"]
)
def test_every_event_of_a_step_has_a_collector(model: str, dtype: str):
    """Dropout, bias and activation, rotation, cross entropy, mixed-precision Adam: nothing stays
    unmeasured."""
    layouts = ["tp=2,pp=2,dp=2,sequence_parallel=true", "dp=8,zero=1,recompute=full", "dp=8"]
    plan = model_plan(model, CLUSTER, Job(global_batch=8, seq_len=512, dtype=dtype), layouts)
    assert plan.unmeasured == {}
    assert {"optimizer", "memory", "gemm", "attention"} <= {op.family for op in plan.plan.kernels}


def test_with_one_node_what_passes_between_nodes_stays_predicted():
    job = Job(global_batch=64, seq_len=512)
    plan = model_plan("gpt2-345m", CLUSTER, job, [Layout(tp=8, pp=2)], nodes=1)
    assert all(op.num_nodes == 1 for op in plan.plan.collectives)
    assert any("only one node is available" in reason for reason in plan.unmeasured.values())
    assert 0 < plan.unmeasured_share < 1


def test_what_makes_no_sense_is_refused():
    with pytest.raises(PerfModelError, match="no layout given"):
        model_plan(MLP, CLUSTER, JOB, [])
    with pytest.raises(UnknownNameError, match="gpt9"):
        model_plan("gpt9", CLUSTER, JOB, LAYOUTS)
    with pytest.raises(PerfModelError, match="iterations"):
        model_plan(MLP, CLUSTER, JOB, LAYOUTS, iterations=0)
    with pytest.raises(PerfModelError, match="divisible"):
        model_plan(MLP, CLUSTER, JOB, [Layout(dp=3)])
