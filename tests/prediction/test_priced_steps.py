"""Corrections of prices by hand: kernels of known seconds, and what a step makes of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.cost import EventTimes
from perfmodel.ops import Attention, Gemm, KernelOp
from perfmodel.prediction import EAGER, Site, StepProblem, block_times, priced_events, step_problem
from perfmodel.prediction.grids import LayoutGrid, price_grids
from perfmodel.prediction.phases import Phase, Variant
from perfmodel.session import Session
from perfmodel.spec import Device, Job, Layout
from perfmodel.workload import is_cast

LLAMA = replace(catalog.model("llama3-8b"), layers=2)
ALONE = Site(sustained=(), power_limited=False)
"""A site whose clocks are those of kernels timed alone."""
FREE_HOST = EAGER.replace(host_op_s=0.0, kernel_gap_s=0.0)


class Seconds:
    """Kernels that take what a function says of them."""

    def __init__(self, seconds_of: Callable[[KernelOp], float]) -> None:
        self.seconds_of = seconds_of

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        seconds = np.array([self.seconds_of(op) for op in ops], float)
        return EventTimes(seconds, seconds, seconds, ("measured",) * len(ops))


def problem_of(
    seconds_of: Callable[[KernelOp], float], cluster: str = "dgx-h100", **job: Any
) -> StepProblem:
    work = Job(**({"global_batch": 8, "seq_len": 1024} | job))
    problem = step_problem(LLAMA, catalog.cluster(cluster), work, None, FREE_HOST, ALONE)
    return problem.repriced(Seconds(seconds_of), problem.collectives)


GRIDS = [
    LayoutGrid.of(Layout.parse(text))
    for text in (
        "tp=2,dp=4",
        "tp=2,pp=2,dp=2,micro_batch=2",
        "tp=4,dp=2,zero=1,tp_overlap=true",
        "dp=8,zero=3,recompute=full",
    )
]


def work_s(op: KernelOp) -> float:
    """Seconds of a device of 100 TFLOP/s and 1 TB/s."""
    return op.flops / 1e14 + op.bytes / 1e12


def test_grids_priced_together_have_the_bounds_of_each_alone() -> None:
    with Session():
        together = [cost.bound_s.item() for cost in price_grids(problem_of(work_s), GRIDS)]
    alone = []
    for grid in GRIDS:
        with Session():
            (cost,) = price_grids(problem_of(work_s), [grid])
            alone.append(cost.bound_s.item())
    assert together == alone
    assert len(set(together)) == len(GRIDS)


def test_kernels_of_all_grids_are_priced_at_once() -> None:
    """Their prices are handed on to the bounds, which ask for no kernel again."""
    batches: list[int] = []

    class Counted(Seconds):
        def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
            if ops:
                batches.append(len(ops))
            return super().times(device, ops)

    with Session():
        problem = problem_of(work_s)
        assert [*price_grids(problem.repriced(Counted(work_s), problem.collectives), GRIDS)]
    assert len(batches) == 1


NARROW_S, WIDE_S, TINY_S = 2e-3, 3e-3, 1e-9


@pytest.mark.parametrize("cast_s", [1e-5, 0.9e-3, 1.1e-3, 2e-3, 0.5])
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_operands_are_cast_as_far_as_no_phase_takes_longer_than_in_16_bits(
    cast_s: float, mode: str
) -> None:
    """Forward a cast before each product: these pay where they take no longer than the product
    gains, and else for the share of operands with which they do. Backward has two products for each
    cast."""

    def seconds_of(op: KernelOp) -> float:
        if is_cast(op):
            return cast_s
        if isinstance(op, Gemm):
            return NARROW_S if op.dtype == "fp8" else WIDE_S
        return TINY_S

    narrow = problem_of(seconds_of, dtype="fp8", fp8_recipe="delayed", mode=mode)
    wide = problem_of(seconds_of, dtype="bf16", mode=mode)
    table, in_16_bits = (block_times(problem, Layout(dp=8)) for problem in (narrow, wide))
    casts = np.array([is_cast(op) for op in table.ops])
    share = min(1.0, (WIDE_S - NARROW_S) / cast_s)
    # as near as halving comes to it, and never above
    (found,) = set(table.launched[casts].tolist())
    assert share - 2.0**-12 <= found <= share
    np.testing.assert_allclose(table.times.time_s[casts], table.launched[casts] * cast_s)
    (layer,) = np.flatnonzero(table.layers).tolist()
    products = 4
    forward_s = table.phase_s[layer, Phase.FORWARD]
    assert forward_s == pytest.approx(products * (NARROW_S + found * cast_s), rel=1e-5)
    assert forward_s <= in_16_bits.phase_s[layer, Phase.FORWARD] * (1 + 1e-6)
    if mode == "train":
        both = [Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT]
        backward_s = table.phase_s[layer, both].sum()
        assert backward_s == pytest.approx(products * (2 * NARROW_S + found * cast_s), rel=1e-5)
        assert backward_s <= in_16_bits.phase_s[layer, both].sum() * (1 + 1e-6)


@pytest.mark.parametrize("products", ["fp8", "fp4"])
def test_casts_of_attention_in_8_bits_pay_by_what_attention_gains(products: str) -> None:
    """Beside products of 4 bits too, and where recomputation repeats attention without products."""

    def seconds_of(op: KernelOp) -> float:
        if is_cast(op):
            return 1e-5
        if isinstance(op, (Attention, Gemm)):
            return NARROW_S if op.dtype in ("fp8", "fp4") else WIDE_S
        return TINY_S

    recipe = "mxfp8" if products == "fp8" else "nvfp4"
    job: dict[str, Any] = {"dtype": products, "fp8_recipe": recipe, "fp8_attention": True}
    problem = problem_of(seconds_of, "dgx-b200", flash_attention=True, **job)
    table = block_times(problem, Layout(dp=8))
    casts = np.array([is_cast(op) for op in table.ops])
    np.testing.assert_array_equal(table.launched[casts], 1.0)


@pytest.mark.parametrize(("whole_s", "part_s"), [(8e-3, 1e-4), (8e-3, 5e-3), (1e-4, 1e-4)])
def test_parts_of_an_attention_take_no_less_than_their_share_of_it(
    whole_s: float, part_s: float
) -> None:
    """By FLOPs: of a ring over two ranks, own keys under the mask, and half a square."""

    def seconds_of(op: KernelOp) -> float:
        if isinstance(op, Attention):
            return whole_s if op.seq_q == op.seq_kv == 1024 else part_s
        return TINY_S

    problem = problem_of(seconds_of)
    table = block_times(problem, Layout(cp=2, dp=4))
    whole_flops = {
        op.pass_: op.flops
        for op in block_times(problem, Layout(dp=8)).ops
        if isinstance(op, Attention)
    }
    parts = [
        (op, time_s) for op, time_s in zip(table.ops, table.times.time_s.tolist(), strict=True)
    ]
    of_attention = [(op, time_s) for op, time_s in parts if isinstance(op, Attention)]
    assert len(of_attention) == 4
    for op, time_s in of_attention:
        share = op.flops / whole_flops[op.pass_]
        assert share == pytest.approx(0.25, rel=0.01)
        assert time_s == pytest.approx(max(part_s, share * whole_s))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_an_older_clock_slows_what_runs_on_tensor_units(dtype: str) -> None:
    """By the factor that runs of its architecture show, in every type that such units have."""
    product = Gemm(m=1024, n=1024, k=1024, dtype=dtype)
    problem = problem_of(lambda op: 1e-3)
    slower = replace(problem, site=replace(ALONE, sustained=(("Hopper", 0.2),)))
    (time_s,) = priced_events(slower, [product]).time_s.tolist()
    assert time_s == pytest.approx(1e-3 * (np.exp(0.2) if dtype == "bf16" else 1.0))
    (alone_s,) = priced_events(problem, [product]).time_s.tolist()
    assert alone_s == pytest.approx(1e-3)


@pytest.mark.parametrize("span", [1, 2])
def test_passes_of_several_micro_batches_are_those_of_a_larger_one(span: int) -> None:
    problem = problem_of(lambda op: op.flops / 1e14 + 1e-6)
    layout = Layout(tp=2, dp=4)
    together = block_times(problem, layout, Variant(span=span))
    larger = block_times(problem, layout.replace(micro_batch=span))
    np.testing.assert_array_equal(together.phase_s, larger.phase_s)
    assert together.ops == larger.ops
