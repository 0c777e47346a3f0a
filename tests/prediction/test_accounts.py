"""Where a step's time goes: disjoint parts that add up, one bubble, and no interval below the
kernels."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from thinned import one_in

import perfmodel as pm
from perfmodel import catalog
from perfmodel.cost import EventTimes, PricesKernels
from perfmodel.errors import LayoutError
from perfmodel.ops import KernelOp
from perfmodel.planning.layouts import search
from perfmodel.planning.what_if import whatif
from perfmodel.prediction import (
    EAGER,
    Prediction,
    Site,
    StepProblem,
    durations,
    evaluate,
    explain,
    layout_batches,
    prepared,
    step_problem,
    step_times_s,
)
from perfmodel.prediction.sites import NEUTRAL, Adjustment
from perfmodel.program import Kind
from perfmodel.schedule import schedule_names
from perfmodel.session import Session
from perfmodel.spec import Device, Job, Layout
from perfmodel.timeline import times

NAMES = [
    *(name for name in schedule_names() if name != "forward"),
    "chimera:4",
    "seq1f1b:4",
    "nf1b:1",
    "nf1b:8",
]
MODELS = (
    ("gpt3-6.7b", "dgx-a100", 2048),
    ("mixtral-8x7b", "dgx-h100", 2048),
    ("deepseek-v2-lite", "dgx-h100", 2048),
    ("bert-large", "dgx-a100", 512),
    ("resnet-50", "dgx-a100", 1),
    ("mlp-1b", "dgx-a100", 1),
)
FRAMEWORKS = (
    EAGER,
    EAGER.replace(dp_overlap_loss=0.3, straggling=0.02, step_overhead_s=0.01, tp_overlap_loss=0.2),
    EAGER.replace(blocking_sends=True),
)
KERNELS = ("forward", "backward", "recompute", "optimizer")


@cache
def model(of: int, framework: int, global_batch: int, mode: str = "train") -> StepProblem:
    name, cluster, seq_len = MODELS[of]
    job = Job(global_batch=global_batch, seq_len=seq_len, mode=mode)  # pyright: ignore[reportArgumentType]
    return step_problem(
        catalog.model(name), catalog.cluster(cluster), job, framework=FRAMEWORKS[framework]
    )


def assert_sound(p: Prediction) -> None:
    step_s, parts = p.step_time_s, p.breakdown_s
    assert min(parts.values()) >= 0, parts
    assert sum(parts.values()) == pytest.approx(step_s, rel=1e-9)
    assert p.bubble_fraction == parts["bubble"] / step_s
    assert p.layout.pp > 1 or parts["bubble"] < 1e-9 * step_s
    kernels_s = sum(parts.get(name, 0.0) for name in KERNELS)
    # on average, or on the busiest rank at their least
    assert 0.1 * kernels_s < p.time_account.kernels_alone_s <= p.step_time_lo_s
    assert p.step_time_lo_s <= step_s <= p.step_time_hi_s
    assert 0 < p.time_account.busy_fraction <= 1 + 1e-9


layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4, 8]),
    dp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 1, 2]),
    ep=st.sampled_from([1, 1, 2]),
    vpp=st.sampled_from([1, 1, 2]),
    micro_batch=st.sampled_from([1, 2]),
    schedule=st.sampled_from(NAMES),
    zero=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    offload=st.booleans(),
    sequence_parallel=st.booleans(),
    tp_overlap=st.booleans(),
    overlap_grad_reduce=st.booleans(),
    overlap_param_gather=st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(
    of=st.integers(0, len(MODELS) - 1),
    framework=st.integers(0, 2),
    rounds=st.sampled_from([1, 2, 8, 16]),
    inference=st.sampled_from([False, False, False, True]),
    data=st.data(),
)
def test_parts_of_any_layout_add_up(
    of: int, framework: int, rounds: int, inference: bool, data
) -> None:
    try:
        layout = data.draw(layouts)
        mode = "inference" if inference else "train"
        p = explain(model(of, framework, layout.dp * layout.micro_batch * rounds, mode), layout)
    except LayoutError:
        assume(False)
    else:
        assert_sound(p)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("framework", range(len(FRAMEWORKS)))
@pytest.mark.parametrize("name", one_in(2, NAMES))
def test_parts_of_every_schedule_add_up(name: str, framework: int, offload: bool) -> None:
    p = explain(
        model(0, framework, 32), Layout(tp=2, pp=4, dp=2, zero=1, schedule=name, offload=offload)
    )
    assert_sound(p)
    assert p.breakdown_s["bubble"] > 0 or name not in ("gpipe", "1f1b", "gems", "dualpipe")
    assert ("host_copies_exposed" in p.breakdown_s) == offload


@pytest.mark.parametrize("like", [-0.3, 0.3])
def test_what_runs_showed_makes_no_part_negative(like: float, monkeypatch) -> None:
    """Runs that were faster than all parameters say shorten every part; slower ones add one."""
    problem, layout = model(0, 1, 32), Layout(tp=2, pp=4, dp=2, zero=1, schedule="dualpipe")
    usual = explain(problem, layout)
    for module in ("_compose", "_account"):
        monkeypatch.setattr(
            f"perfmodel.prediction.{module}.step_factors",
            lambda problem, lay: (
                problem.adjusted_framework.communication.slowest_of(lay.devices),
                np.exp(like),
            ),
        )
    with Session():
        moved = explain(problem, layout)
    assert_sound(moved)
    own_s = FRAMEWORKS[1].host.step_overhead_s
    assert moved.step_time_s - own_s == pytest.approx((usual.step_time_s - own_s) * np.exp(like))
    kept = np.exp(min(like, 0))
    assert moved.breakdown_s["forward"] == pytest.approx(usual.breakdown_s["forward"] * kept)
    assert (moved.breakdown_s["beyond_all_parameters"] > 0) == (like > 0)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "zb-h1", "seq1f1b", "chimera"])
def test_the_bubble_is_idle_time_without_any_communication(name: str) -> None:
    """By start and end of every op, reductions, gathers and transfers taken away."""
    # nothing slows the passes
    serial = {
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
    }
    problem, layout = model(0, 0, 32), Layout(pp=4, dp=2, zero=1, schedule=name, **serial)
    (batch,) = layout_batches(problem, [layout])
    program, durations_s = prepared(batch.spec), durations(problem, batch)[0]
    kind = program.structure.class_kind
    computes = np.isin(kind, (*range(Kind.FORWARD, Kind.SEND_FORWARD), Kind.OPTIMIZER))
    alone = times(program.compiled, np.where(computes, durations_s, 0.0))
    idle_s = alone.makespan_s - alone.device_busy_s().mean()
    p = explain(problem, layout)
    assert p.breakdown_s["bubble"] == pytest.approx(idle_s, rel=1e-9)
    busy = {name for name in p.breakdown_s if not name.endswith(("exposed", "bubble"))}
    assert sum(p.breakdown_s[name] for name in busy) == pytest.approx(
        alone.device_busy_s().mean(), rel=1e-9
    )


def test_collectives_of_pairs_show_what_outlasts_the_kernels() -> None:
    """DualPipe hides tensor-parallel communication behind the other pass of a pair, and nothing
    else."""
    shown = {
        name: explain(model(0, 0, 32), Layout(tp=8, pp=4, schedule=name)).breakdown_s
        for name in ("1f1b", "dualpipe")
    }
    assert shown["dualpipe"]["forward"] == pytest.approx(shown["1f1b"]["forward"])
    assert shown["dualpipe"]["backward"] == pytest.approx(shown["1f1b"]["backward"])
    comm = "tensor_parallel_communication"
    assert shown["dualpipe"][comm] < 0.9 * shown["1f1b"][comm]


def test_no_step_of_a_stream_is_shorter_than_its_busiest_rank() -> None:
    """The last rank sets the pace while the pipeline fills, the first in the long run."""
    problem = model(2, 1, 2)
    layout = Layout(
        tp=8, pp=2, micro_batch=2, schedule="pipedream", recompute="full", sequence_parallel=True
    )
    p = explain(problem, layout)
    assert_sound(p)
    assert evaluate(problem, [layout]).step_time_s[0] == pytest.approx(p.step_time_s, rel=1e-4)
    assert step_times_s(problem, [layout])[0] == pytest.approx(p.step_time_s)
    assert sum(event.time_s for event in p.critical_path) == pytest.approx(p.step_time_s, rel=1e-6)


class Certain:
    """Kernels' prices without any doubt."""

    def __init__(self, prices: PricesKernels) -> None:
        self.prices = prices

    def times(self, device: Device, ops: Sequence[KernelOp], /) -> EventTimes:
        found = self.prices.times(device, ops)
        return replace(found, lo_s=found.time_s, hi_s=found.time_s)


@pytest.mark.parametrize("name", NAMES)
def test_no_interval_ends_below_the_kernels(name: str) -> None:
    """However wide it is; where kernels are certain it ends no lower than their own times, on the
    busiest rank."""
    problem = model(0, 0, 32)
    wide = replace(NEUTRAL, common={**NEUTRAL.common, "noise": 0.5})
    site = Site(sustained=(), power_limited=False, population=wide)
    doubtful, certain = (
        replace(problem, kernels=kernels, site=site)
        for kernels in (problem.kernels, Certain(problem.kernels))
    )
    layout = Layout(tp=2, pp=4, dp=2, zero=1, schedule=name)
    p, sure = explain(doubtful, layout), explain(certain, layout)
    for one in (p, sure):
        assert_sound(one)
        assert one.step_time_hi_s > 1.5 * one.step_time_s
    assert sure.step_time_s == pytest.approx(p.step_time_s)
    assert p.time_account.kernels_alone_s < sure.time_account.kernels_alone_s
    of_mean_rank_s = sum(sure.breakdown_s[name] for name in KERNELS)
    assert of_mean_rank_s * (1 - 1e-9) <= sure.time_account.kernels_alone_s <= sure.step_time_lo_s


def test_kernels_alone_are_those_of_the_clock_at_which_they_were_timed() -> None:
    problem, layout = model(0, 0, 32), Layout(tp=2, pp=4, dp=2)
    hot = replace(problem, site=Site(sustained=(("Ampere", 0.2),)))
    cool = replace(problem, site=Site(sustained=(), power_limited=False))
    slow, fast = explain(hot, layout), explain(cool, layout)
    assert slow.step_time_s > 1.05 * fast.step_time_s
    assert slow.time_account.kernels_alone_s == pytest.approx(fast.time_account.kernels_alone_s)
    for name in KERNELS:
        assert slow.breakdown_s[name] == pytest.approx(fast.breakdown_s[name])
    assert fast.breakdown_s["clock_under_load"] == 0
    products_s = sum(
        event.time_s
        for event in slow.critical_path
        if event.event.startswith(("linear", "attention"))
    )
    assert slow.breakdown_s["clock_under_load"] > 0.5 * (1 - np.exp(-0.2)) * products_s


@pytest.mark.parametrize("log_factor", [-0.3, 0.0, 0.3])
def test_what_runs_show_of_kernels_has_a_part_of_its_own(log_factor: float) -> None:
    """Kernels that runs show to be slower leave every other part of theirs as it was; faster ones
    shorten it."""
    problem, layout = model(0, 0, 32), Layout(tp=2, pp=4, dp=2)
    hot = replace(problem, site=Site(sustained=(("Ampere", 0.2),))).adjusted(None)
    device = hot.cluster.device.name
    families = ("gemm", "attention", "memory", "embedding")
    moved = hot.adjusted(
        Adjustment(device=device, values=tuple((name, log_factor) for name in families))
    )
    before, after = explain(hot, layout).breakdown_s, explain(moved, layout).breakdown_s
    assert "kernels_slower_in_runs" not in before
    assert ("kernels_slower_in_runs" in after) == (log_factor > 0)
    parts = ("forward", "backward", "recompute", "clock_under_load")
    kernels_s = sum(before[name] for name in parts)
    assert sum(after[name] for name in parts) == pytest.approx(
        kernels_s * min(1.0, np.exp(log_factor))
    )
    if log_factor >= 0:
        for name in parts:
            assert after[name] == pytest.approx(before[name])
        slower_s = after.get("kernels_slower_in_runs", 0.0)
        assert slower_s == pytest.approx(kernels_s * (np.exp(log_factor) - 1))


def test_what_if_and_search_keep_the_same_accounts() -> None:
    found = search("gpt3-1.3b", "dgx-a100", devices=16, global_batch=64, top=5)
    for p in found.layouts:
        assert_sound(p)
    slow = ["slow_rank=1", "slow_factor=2x"]
    for schedule in ("1f1b", "pipedream", "zb-h2"):
        layout = f"pp=4,dp=2,schedule={schedule}"
        changed = whatif("gpt3-1.3b", "dgx-a100", layout, slow, global_batch=16)
        p = pm.predict("gpt3-1.3b", "dgx-a100", layout, global_batch=16)
        assert changed.before_s == pytest.approx(p.step_time_s)
        # at least as long as twice what a rank runs on average
        assert changed.after_s > 1.6 * sum(p.breakdown_s[name] for name in KERNELS)


@pytest.mark.parametrize("model_name", ["resnet-50", "vit-l-16", "llama2-7b"])
def test_a_step_takes_as_long_as_the_slower_of_input_and_computation(model_name):
    """A loader that brings enough changes nothing; one that does not sets the pace, exactly."""
    net, cluster = catalog.model(model_name), catalog.cluster("dgx-a100")
    layout = Layout(dp=8, micro_batch=4)

    def found(rate):
        job = Job(global_batch=64, seq_len=net.seq_len, input_samples_per_s=rate)
        problem = step_problem(net, cluster, job)
        return problem, explain(problem, layout)

    _, free = found(None)
    fast_rate, slow_rate = 64 / free.step_time_s * 10, 64 / free.step_time_s / 3
    _, fast = found(fast_rate)
    assert fast.step_time_s == free.step_time_s
    assert fast.breakdown_s["waiting_for_input"] == 0
    problem, slow = found(slow_rate)
    assert slow.step_time_s == pytest.approx(64 / slow_rate)
    assert evaluate(problem, [layout]).step_time_s[0] == pytest.approx(slow.step_time_s, rel=1e-5)
    assert slow.breakdown_s["waiting_for_input"] == pytest.approx(
        slow.step_time_s - free.step_time_s
    )
    assert sum(event.time_s for event in slow.critical_path) == pytest.approx(
        slow.step_time_s, rel=1e-6
    )
    for prediction in (fast, slow):
        assert_sound(prediction)
    with pytest.raises(LayoutError, match="input_samples_per_s"):
        Job(global_batch=64, seq_len=1, input_samples_per_s=0)


@settings(deadline=None, max_examples=5)
@given(generation_s=st.floats(0.01, 1e4), rate=st.sampled_from([None, 8.0]))
def test_seconds_of_generation_are_added_to_whatever_the_training_takes(generation_s, rate):
    model, cluster = catalog.model("gpt2-345m"), catalog.cluster("dgx-a100")
    layout = Layout(dp=8, micro_batch=4)

    def with_generation(seconds):
        fields = {"input_samples_per_s": rate, "generation_s": seconds}
        problem = step_problem(model, cluster, Job(global_batch=64, seq_len=1024, **fields))
        return problem, explain(problem, layout)

    _, training = with_generation(0.0)
    problem, both = with_generation(generation_s)
    assert both.step_time_s == pytest.approx(training.step_time_s + generation_s)
    for bound in ("step_time_lo_s", "step_time_hi_s"):
        assert getattr(both, bound) == pytest.approx(getattr(training, bound) + generation_s)
    assert both.breakdown_s == training.breakdown_s | {"generation": generation_s}
    assert evaluate(problem, [layout]).step_time_s[0] == pytest.approx(both.step_time_s, rel=1e-5)
    assert both.to_dict()["memory_bytes"] == training.to_dict()["memory_bytes"]
    assert both.time_account.busy_fraction >= training.time_account.busy_fraction
    assert_sound(both)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_generation_takes_a_number_of_seconds(seconds):
    with pytest.raises(LayoutError, match="generation_s"):
        Job(global_batch=64, seq_len=1, generation_s=seconds)
