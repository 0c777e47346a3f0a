"""Kernels of a step over numbers of samples: as long at least for twice as many, and twice as long
at most."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.cost import EventTimes, KernelModel, MonotoneGrid, growing
from perfmodel.ops import Attention, Collective, Gemm, KernelOp, MemoryBound, Op
from perfmodel.spec import Device

LOG_S = st.lists(st.floats(-12.0, 3.0), min_size=1, max_size=12).map(np.array)
TWICE = np.log(2.0)


@st.composite
def times(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of times, and which of them were measured."""
    log_s = draw(LOG_S)
    return log_s, np.array(draw(st.lists(st.booleans(), min_size=len(log_s), max_size=len(log_s))))


@settings(max_examples=200)
@given(times())
def test_times_grow_by_nothing_at_least_and_by_half_at_most(
    of: tuple[np.ndarray, np.ndarray],
) -> None:
    steps = np.diff(growing(*of))
    assert (steps >= -1e-9).all()
    assert (steps <= TWICE + 1e-9).all()


@settings(max_examples=100)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.data())
def test_times_over_several_axes_grow_so_along_each(shape: list[int], data: st.DataObject) -> None:
    """Those that were measured stay where they grow so among themselves: whatever all ways from one
    to another add."""
    n = int(np.prod(shape))
    log_s = np.array(data.draw(st.lists(st.floats(-12.0, 3.0), min_size=n, max_size=n))).reshape(
        shape
    )
    measured = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))).reshape(shape)
    found = growing(log_s, measured)
    for axis in range(len(shape)):
        steps = np.diff(found, axis=axis)
        assert (steps >= -1e-9).all()
        assert (steps <= TWICE + 1e-9).all()
    np.testing.assert_allclose(growing(found, measured), found, atol=1e-9)
    changed = np.where(measured, found, log_s)
    np.testing.assert_allclose(growing(changed, measured)[measured], found[measured], atol=1e-9)


@settings(max_examples=50)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_bounds_over_several_axes_are_those_of_all_pairs(
    rows: int, columns: int, data: st.DataObject
) -> None:
    """Each kernel takes at most what any other leaves it, half as long as one of twice the work at
    least."""
    log_s = np.array(
        data.draw(st.lists(st.floats(-9.0, 3.0), min_size=rows * columns, max_size=rows * columns))
    )
    at = np.array(list(np.ndindex(rows, columns)))
    more = TWICE * np.maximum(at[:, None] - at[None], 0).sum(axis=2)
    least, most = (log_s - more.T).max(axis=1), (log_s + more).min(axis=1)
    grid = log_s.reshape(rows, columns)
    found = growing(grid, np.zeros_like(grid, bool))
    np.testing.assert_allclose(found.ravel(), (least + most) / 2, atol=1e-9)


@settings(max_examples=100)
@given(st.floats(-9.0, 0.0), st.lists(st.floats(0.0, 0.69), max_size=11), st.data())
def test_what_was_measured_stays_where_measurements_grow_so(
    first: float, steps: list[float], data: st.DataObject
) -> None:
    """Whatever was learned of the sizes between them; and times that all grow so are left as they
    are."""
    log_s = first + np.cumsum([0.0, *steps])
    n = len(log_s)
    measured = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    np.testing.assert_allclose(growing(log_s, measured), log_s, atol=1e-9)
    learned = np.array(data.draw(st.lists(st.floats(-12.0, 3.0), min_size=n, max_size=n)))
    found = growing(np.where(measured, log_s, learned), measured)
    np.testing.assert_allclose(found[measured], log_s[measured], atol=1e-9)


@settings(max_examples=100)
@given(times(), st.data())
def test_what_is_never_slower_and_at_most_so_much_faster_stays_so(
    of: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    log_s, measured = of
    gains = np.array(
        data.draw(st.lists(st.floats(0.0, TWICE), min_size=len(log_s), max_size=len(log_s)))
    )
    gained = growing(log_s, measured) - growing(log_s - gains, measured)
    assert (gained >= -1e-9).all()
    assert (gained <= TWICE + 1e-9).all()


def in_steps_s(ops: Sequence[KernelOp], on: Device) -> dict[Op, float]:
    """Seconds of kernels and all that they are compared with, of which none was measured."""
    every = MonotoneGrid.of(ops)
    alone = KernelModel.load().times(on, [op for op in every.ops if not isinstance(op, Collective)])
    found = every.times(replace(alone, provenance=("learned",) * len(every.ops)))
    return dict(zip(every.ops, found.time_s.tolist(), strict=True))


def unit(every: MonotoneGrid) -> EventTimes:
    """As if all took a second."""
    ones = np.ones(len(every.ops))
    return EventTimes(ones, ones, ones, ("learned",) * len(ones))


OPS = (
    Gemm(m=384, n=4096, k=1024),
    Gemm(m=4096, n=1024, k=512, pass_="wgrad", accumulate=True),
    Gemm(op="bmm", m=512, n=512, k=64, batch=16),
    Gemm(op="grouped_linear", m=256, n=2048, k=1024, groups=4),
    Gemm(op="grouped_linear", m=2, n=1408, k=704, groups=64),
    Attention(batch=2, heads=16, kv_heads=16, seq_q=1024, seq_kv=1024, head_dim=64),
)


@pytest.mark.parametrize("device", ["V100-SXM2-32GB", "A100-SXM4-80GB", "TPU-v4"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.label)
def test_a_kernel_of_twice_the_samples_takes_up_to_twice_as_long(
    op: Gemm | Attention, device: str
) -> None:
    on, name = catalog.device(device), op.samples
    dtype = "bf16" if "bf16" in on.dtypes else "fp16"
    sizes = [replace(op, dtype=dtype, **{name: getattr(op, name) * 2**i}) for i in range(9)]
    in_step_s = in_steps_s(sizes, on)
    ratios = [in_step_s[b] / in_step_s[a] for a, b in pairwise(sizes)]
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 2 + 1e-9


@pytest.mark.parametrize("kv_heads", [1, 4, 16])
@pytest.mark.parametrize("device", ["V100-SXM2-32GB", "A100-SXM4-80GB", "H100", "TPU-v4"])
def test_attention_of_twice_the_heads_takes_up_to_twice_as_long(device: str, kv_heads: int) -> None:
    on = catalog.device(device)
    dtype = "bf16" if "bf16" in on.dtypes else "fp16"
    least = 16 // kv_heads
    of_heads = {"seq_q": 1024, "seq_kv": 1024, "head_dim": 64, "dtype": dtype, "batch": 2}
    sizes = [
        Attention(heads=n, kv_heads=n // least, **of_heads) for n in (16 << i for i in range(4))
    ]
    in_step_s = in_steps_s(sizes, on)
    ratios = [in_step_s[b] / in_step_s[a] for a, b in pairwise(sizes)]
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 2 + 1e-9


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (96, 8), (128, 128), (129, 129), (256, 256), (384, 6), (512, 1)]
)
@pytest.mark.parametrize("batch", [1, 96, 1024, 4095, 8192])
def test_attention_of_any_sizes_is_among_those_it_is_compared_with(
    batch: int, heads: int, kv_heads: int
) -> None:
    """But of more sequences than are compared, of which odd ones grow as they are and others in
    proportion."""
    op = Attention(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=128, seq_kv=128, head_dim=64)
    every = MonotoneGrid.of([op])
    assert op in every.ops
    assert every.times(unit(every)).time_s[every.ops.index(op)] == pytest.approx(
        1.0 if batch <= 1024 or batch % 2 else batch / 1024
    )


@pytest.mark.parametrize("side", ["n", "k"])
@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("P100-SXM2-16GB", "fp64"),
        ("A100-SXM4-80GB", "fp64"),
        ("A100-SXM4-80GB", "tf32"),
        ("P4", "fp32"),
        ("T4", "fp32"),
        ("P100-SXM2-16GB", "fp32"),
        ("P4", "int8"),
    ],
)
def test_a_product_of_half_the_columns_takes_half_as_long_at_least(
    side: str, device: str, dtype: str
) -> None:
    """Where few were measured: else half of it on twice the devices would be a gain."""
    sizes = [
        Gemm(dtype=dtype, m=2048, **({"n": 3072, "k": 3072} | {side: 192 << i})) for i in range(10)
    ]
    in_step_s = in_steps_s(sizes, catalog.device(device))
    ratios = [in_step_s[b] / in_step_s[a] for a, b in pairwise(sizes)]
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 2 + 1e-9


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
def test_whoever_asks_for_other_sizes_is_told_the_same(dtype: str) -> None:
    on, op = catalog.device("V100-SXM2-32GB"), Gemm(dtype=dtype, m=1536, n=4096, k=1024)
    others = [
        replace(op, m=3072),
        replace(op, n=512),
        replace(op, n=64),
        replace(op, k=32768),
        replace(op, m=8),
    ]
    found = [in_steps_s(ops, on)[op] for ops in ([op], [op, *others], [*others, op])]
    assert found[0] == found[1] == found[2]


def test_collectives_and_element_wise_kernels_are_left_as_they_are() -> None:
    reduction = Collective(collective="all_reduce", bytes=1e6, num_ranks=8, ranks_per_node=8)
    every = MonotoneGrid.of([reduction, MemoryBound(op="add", rows=4096, hidden=1024)])
    assert len(every.ops) == 2
    assert every.times(unit(every)).time_s.tolist() == [1.0, 1.0]


def test_sizes_that_do_not_fill_a_tile_change_nothing_of_those_that_do() -> None:
    on, op = (
        catalog.device("A100-SXM4-80GB"),
        Gemm(op="grouped_linear", dtype="tf32", m=64, n=1408, k=704, groups=128),
    )
    assert in_steps_s([op], on)[op] == in_steps_s([replace(op, m=8), op], on)[op]
