"""Costs of all possible stages against the layouts that have them; bounds against steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.cost import EventTimes
from perfmodel.errors import LayoutError
from perfmodel.ops import Collective
from perfmodel.prediction import evaluate, layout_batches, pass_times, step_problem
from perfmodel.prediction.composition import stage_costs
from perfmodel.prediction.grids import lower_bounds_s
from perfmodel.prediction.memory import bundle_memory, peak_memory
from perfmodel.schedule import schedule_names
from perfmodel.spec import Cluster, Job, Layout

PARTITIONS = ((8, 8, 8, 8), (11, 9, 7, 5), (0, 12, 12, 8), (10, 11, 11, 0))


@pytest.fixture(scope="module")
def problem():
    job = Job(global_batch=32, seq_len=4096, flash_attention=False)
    return step_problem(catalog.model("llama3-8b"), catalog.cluster("dgx-a100"), job)


@pytest.mark.parametrize(
    "text",
    [
        "tp=2,pp=4,dp=2",
        "tp=2,pp=4,dp=2,zero=3",
        "tp=1,pp=4,dp=1,recompute=selective,schedule=gpipe",
    ],
)
def test_stages_cost_what_they_cost_in_a_layout(problem, text: str) -> None:
    layout = Layout.parse(text)
    costs = stage_costs(problem, layout)
    usable = problem.cluster.device.memory_bytes * (1 - problem.framework.memory.memory_margin)
    recomputed = 0
    for sizes in PARTITIONS:
        end = np.cumsum(sizes)
        at = np.arange(4), end - sizes, end
        full = costs.full_layers[at]
        if not np.isfinite(costs.forward_s[at]).all():
            continue
        uneven = layout.replace(partition=sizes, recompute_full_layers=tuple(full.tolist()))
        assert peak_memory(problem, [uneven])[0][0] <= usable * (1 + 1e-9)
        times = pass_times(problem, uneven)
        assert costs.forward_s[at] == pytest.approx(times.forward_s)
        assert costs.backward_s[at] == pytest.approx(
            times.backward_input_s + times.backward_weight_s
        )
        for stage in np.flatnonzero(full).tolist():  # one layer less would not fit
            recomputed += 1
            less = full - (np.arange(4) == stage)
            (batch,) = layout_batches(
                problem, [uneven.replace(recompute_full_layers=tuple(less.tolist()))]
            )
            memory = bundle_memory(problem, batch)
            peak = (
                memory.weights
                + memory.gradients
                + memory.optimizer
                + memory.activations
                + memory.buffers
            )
            assert peak[0, stage] > usable * (1 - 1e-9)
    assert recomputed or "schedule" not in text


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("tp=2,pp=4", "1f1b"),
        ("pp=4,dp=2,zero=3,recompute=selective", "gpipe"),
        ("pp=4,dp=2", "pipedream"),
    ],
)
@pytest.mark.parametrize("full", [False, True])
def test_a_stage_fits_where_a_layout_that_has_it_does(text: str, schedule: str, full: bool) -> None:
    """On a device that is a millionth smaller than it needs it does not, as it stands or with all
    layers recomputed."""
    small = replace(catalog.model("gpt3-1.3b"), layers=12)
    layout = Layout.parse(text).replace(schedule=schedule)
    cluster, job = catalog.cluster("dgx-a100"), Job(global_batch=32, seq_len=1024)

    def problem_with(memory_bytes: float):
        return step_problem(
            small, replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes)), job
        )

    usable_share = 1 - problem_with(80e9).framework.memory.memory_margin
    for sizes in ((1, 6, 4, 1), (2, 3, 2, 5)):
        uneven = layout.replace(partition=sizes, recompute_full_layers=sizes if full else None)
        (batch,) = layout_batches(problem_with(80e9), [uneven])
        memory = bundle_memory(problem_with(80e9), batch)
        needed = (
            memory.weights
            + memory.gradients
            + memory.optimizer
            + memory.activations
            + memory.buffers
        )
        start = 0
        for stage, size in enumerate(sizes):
            at = stage, start, start + size
            for scale, fits in ((1 - 1e-6, False), (1 + 1e-6, True)):
                limited = problem_with(needed[0, stage] / usable_share * scale)
                costs = stage_costs(limited, layout, recompute_to_fit=full)
                assert np.isfinite(costs.forward_s[at]) == fits, (sizes, stage)
                if full and fits:
                    assert costs.full_layers[at] == size
            start += size


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages_hold_layers_or_an_end_of_the_model_and_divide_all_of_it(stages: int) -> None:
    small = replace(catalog.model("gpt3-125m"), layers=6)
    problem = step_problem(small, catalog.cluster("dgx-a100"), Job(global_batch=12, seq_len=1024))
    costs = stage_costs(problem, Layout(pp=stages))
    cuts = range(7)
    for stage, start, end in product(range(stages), cuts, cuts):
        is_first, is_last = stage == 0, stage == stages - 1
        possible = start < end or (start == end and (is_first or is_last))
        possible &= start == 0 or not is_first
        possible &= end == 6 or not is_last
        for seconds in (costs.forward_s, costs.backward_s):
            assert np.isfinite(seconds[stage, start, end]) == possible, (stage, start, end)
        assert costs.full_layers[stage, start, end] == 0


def test_stages_that_do_not_fit_cost_infinitely_much(problem) -> None:
    layout = Layout.parse("tp=1,pp=4,dp=1,schedule=gpipe")
    assert not np.isfinite(stage_costs(problem, layout, recompute_to_fit=False).forward_s[1, 8, 16])
    assert np.isfinite(stage_costs(problem, layout).forward_s[1, 8, 16])


@dataclass(frozen=True)
class Constant:
    """Prices of collectives that all take as long."""

    seconds: float

    def times(self, cluster: Cluster, ops: Sequence[Collective], /) -> EventTimes:
        time_s = np.full(len(ops), self.seconds)
        return EventTimes(time_s, time_s, time_s, ("measured",) * len(ops))


@pytest.mark.parametrize("text", ["tp=2,pp=4,dp=1", "tp=1,pp=4,dp=2,recompute=selective"])
def test_a_stage_sends_to_another_kind_of_nodes_where_that_is_faster(problem, text: str) -> None:
    """Both ways, from all stages but the last."""
    layout = Layout.parse(text)
    sends_s = stage_costs(problem, layout).sends_s
    assert (sends_s[:-1] > 0).all()
    assert not sends_s[-1].any()
    for times_as_long in (0.1, 0.999, 3.0):
        link_s = float(sends_s[0].min()) / 2 * times_as_long
        linked = stage_costs(problem, layout, link=replace(problem, collectives=Constant(link_s)))
        np.testing.assert_allclose(linked.sends_s[:-1], np.minimum(sends_s[:-1], 2 * link_s))
        assert not linked.sends_s[-1].any()


def test_a_stage_next_to_another_kind_may_lie_at_any_distance(problem) -> None:
    """Two stages in a node of eight devices: one boundary lies inside a node, the next between two.
    Beside a link of another kind the one that costs less counts."""
    sends_s = stage_costs(problem, Layout(tp=4, pp=4)).sends_s
    inside_s, between_s = sends_s[0], sends_s[1]
    assert (inside_s < between_s).all()
    np.testing.assert_allclose(sends_s[2], inside_s)
    slow = replace(problem, collectives=Constant(10.0))
    linked = stage_costs(problem, Layout(tp=4, pp=4), link=slow)
    np.testing.assert_allclose(linked.sends_s[:-1], np.broadcast_to(inside_s, (3, len(inside_s))))


def test_schedules_of_several_stages_per_rank_are_refused(problem) -> None:
    with pytest.raises(LayoutError, match="one plain stage per rank"):
        stage_costs(problem, Layout(pp=4, vpp=2))


def test_no_schedule_beats_its_lower_bound(problem) -> None:
    for name in schedule_names():
        if name == "forward":  # inference's, which has no backward to bound
            continue
        layout = Layout(tp=2, pp=4, schedule=name)
        try:
            (step_s,) = evaluate(problem, [layout]).step_time_s
        except LayoutError:
            continue
        assert lower_bounds_s(problem, [layout])[0] <= step_s * (1 + 1e-5), name
