"""The gradient of the step time by event against finite differences."""

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.cost import EventTimes, MonotoneGrid
from perfmodel.ops import Op
from perfmodel.prediction import (
    Site,
    evaluate,
    event_shares,
    layout_batches,
    prepared,
    step_problem,
)
from perfmodel.session import Session
from perfmodel.spec import Job, Layout, Mlp

FREE = Site(power_limited=False, skew=0.0)
"""Where the power limit binds, a kernel that is slower alone takes as long as before."""


@dataclass(frozen=True)
class Slower:
    """Prices with one op slower by a factor, at every number of samples: in a step these bound one
    another."""

    prices: object
    slow: Op
    factor: float

    def times(self, where, ops) -> EventTimes:
        t = self.prices.times(where, ops)  # pyright: ignore
        slow = set(MonotoneGrid.of([self.slow]).ops)
        factor = np.array([self.factor if op in slow else 1.0 for op in ops])
        return EventTimes(t.time_s * factor, t.lo_s, t.hi_s, t.provenance)


@pytest.mark.parametrize(
    "text", ["tp=2,pp=2,dp=2,micro_batch=2", "tp=4,pp=1,dp=2,zero=1,recompute=selective"]
)
def test_shares_are_the_gradient(text: str):
    model, cluster = catalog.model("gpt3-6.7b"), catalog.cluster("dgx-a100")
    problem, layout = (
        step_problem(model, cluster, Job(global_batch=32, seq_len=2048), site=FREE),
        Layout.parse(text),
    )
    share = event_shares(problem, layout)
    assert share.critical_s.sum() + share.gap_s == pytest.approx(share.step_time_s, rel=1e-5)
    largest = np.argsort(-share.critical_s)[:4].tolist()
    for i in largest:
        step = 1e-3
        slower = problem.repriced(
            Slower(problem.kernels, share.ops[i], 1 + step),
            Slower(problem.collectives, share.ops[i], 1 + step),
        )
        difference_s = event_shares(slower, layout).step_time_s - share.step_time_s
        assert difference_s / step == pytest.approx(share.critical_s[i], rel=2e-2)


def test_repriced_shares_structures_and_no_prices():
    model, cluster = catalog.model("gpt3-6.7b"), catalog.cluster("dgx-a100")
    problem, layout = (
        step_problem(model, cluster, Job(global_batch=32, seq_len=2048)),
        Layout(tp=2, pp=2, dp=2),
    )
    before = event_shares(problem, layout)
    again = problem.repriced(problem.kernels, problem.collectives)
    (first,), (second,) = layout_batches(problem, [layout]), layout_batches(again, [layout])
    assert prepared(first.spec) is prepared(second.spec)
    assert event_shares(again, layout).step_time_s == before.step_time_s
    op = before.ops[int(np.argmax(before.critical_s))]
    assert event_shares(
        again.repriced(Slower(problem.kernels, op, 2.0), problem.collectives), layout
    ).step_time_s > (1.05 * before.step_time_s)
    assert event_shares(problem, layout).step_time_s == before.step_time_s


def test_layouts_whose_blocks_differ_do_not_share_them():
    """A split stack of linear layers comes in pairs of layers, an unsplit one layer by layer."""
    model, cluster = Mlp(name="stack", layers=4, hidden=512), catalog.cluster("dgx-a100")
    job, split, whole = (
        Job(global_batch=32, seq_len=1, dtype="fp32"),
        Layout(tp=2, dp=2),
        Layout(dp=2),
    )
    alone = []
    for layout in (split, whole):
        with Session():
            alone.append(event_shares(step_problem(model, cluster, job), layout).step_time_s)
    for order in ((split, whole), (whole, split)):
        with Session():
            problem = step_problem(model, cluster, job)
            times_s = {layout: event_shares(problem, layout).step_time_s for layout in order}
            assert [times_s[split], times_s[whole]] == alone
            assert evaluate(problem, [split, whole]).step_time_s == pytest.approx(alone)


def test_layouts_composed_together_take_what_each_takes_alone():
    model, cluster = catalog.model("gpt3-6.7b"), catalog.cluster("dgx-a100")
    problem = step_problem(model, cluster, Job(global_batch=32, seq_len=2048))
    choices = product((1, 2, 4), (0, 2, 3), ("1f1b", "zb-h1", "pipedream"), ("none", "full"))
    layouts = [
        Layout(
            tp=2, pp=4, dp=2, micro_batch=size, zero=zero, schedule=schedule, recompute=recompute
        )
        for size, zero, schedule, recompute in choices
    ]
    programs = [batch.program for batch in layout_batches(problem, layouts)]
    assert len({program.canonical for program in programs}) < len(programs)
    together_s = evaluate(problem, layouts).step_time_s
    for layout, step_s in zip(layouts, together_s, strict=True):
        with Session():
            assert evaluate(problem, [layout]).step_time_s == pytest.approx(step_s, rel=1e-5)
