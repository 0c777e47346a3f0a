"""Kernels of a step over numbers of samples: as long at least for twice as many, and twice as long at most."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.cost import KernelModel, growth, with_sizes
from perfmodel.cost._growth import growing
from perfmodel.ops import Attention, Collective, Gemm, MemoryBound, Op
from perfmodel.spec import Device

LOG_S = st.lists(st.floats(-12.0, 3.0), min_size=1, max_size=12).map(np.array)
TWICE = np.log(2.0)


def grown(log_s: np.ndarray, measured: np.ndarray) -> np.ndarray:
    """`growing` of samples that double."""
    return growing(log_s, measured, np.arange(len(log_s))[:, None])


@st.composite
def times(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of times, and which of them were measured."""
    log_s = draw(LOG_S)
    return log_s, np.array(draw(st.lists(st.booleans(), min_size=len(log_s), max_size=len(log_s))))


@settings(max_examples=200)
@given(times())
def test_times_grow_by_nothing_at_least_and_by_half_at_most(of: tuple[np.ndarray, np.ndarray]) -> None:
    steps = np.diff(grown(*of))
    assert (steps >= -1e-9).all()
    assert (steps <= TWICE + 1e-9).all()


@settings(max_examples=100)
@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_times_over_samples_and_heads_grow_so_along_both(samples: int, heads: int, data: st.DataObject) -> None:
    """Those that were measured stay where they grow so among themselves: whatever both ways from one to another add."""
    octaves = np.array(list(product(range(samples), range(heads))))
    n = len(octaves)
    log_s = np.array(data.draw(st.lists(st.floats(-12.0, 3.0), min_size=n, max_size=n)))
    measured = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    found = growing(log_s, measured, octaves)
    for axis in (0, 1):
        steps = np.diff(found.reshape(samples, heads), axis=axis)
        assert (steps >= -1e-9).all()
        assert (steps <= TWICE + 1e-9).all()
    np.testing.assert_allclose(growing(found, measured, octaves), found, atol=1e-9)
    changed = np.where(measured, found, log_s)
    np.testing.assert_allclose(growing(changed, measured, octaves)[measured], found[measured], atol=1e-9)


@settings(max_examples=100)
@given(st.floats(-9.0, 0.0), st.lists(st.floats(0.0, 0.69), max_size=11), st.data())
def test_what_was_measured_stays_where_measurements_grow_so(
    first: float, steps: list[float], data: st.DataObject
) -> None:
    """Whatever was learned of the sizes between them; and times that all grow so are left as they are."""
    log_s = first + np.cumsum([0.0, *steps])
    n = len(log_s)
    measured = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    np.testing.assert_allclose(grown(log_s, measured), log_s, atol=1e-9)
    learned = np.array(data.draw(st.lists(st.floats(-12.0, 3.0), min_size=n, max_size=n)))
    found = grown(np.where(measured, log_s, learned), measured)
    np.testing.assert_allclose(found[measured], log_s[measured], atol=1e-9)


@settings(max_examples=100)
@given(times(), st.data())
def test_what_is_never_slower_and_at_most_so_much_faster_stays_so(
    of: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    log_s, measured = of
    gains = np.array(data.draw(st.lists(st.floats(0.0, TWICE), min_size=len(log_s), max_size=len(log_s))))
    gained = grown(log_s, measured) - grown(log_s - gains, measured)
    assert (gained >= -1e-9).all()
    assert (gained <= TWICE + 1e-9).all()


def alone_s(ops: Sequence[Op], on: Device) -> np.ndarray:
    return KernelModel.load().times(on, [op for op in ops if not isinstance(op, Collective)]).time_s


OPS = (
    Gemm(m=384, n=4096, k=1024), Gemm(m=4096, n=1024, k=512, pass_="wgrad", accumulate=True),
    Gemm(op="bmm", m=512, n=512, k=64, batch=16), Gemm(op="grouped_linear", m=256, n=2048, k=1024, groups=4),
    Gemm(op="grouped_linear", m=2, n=1408, k=704, groups=64),
    Attention(batch=2, heads=16, kv_heads=16, seq_q=1024, seq_kv=1024, head_dim=64),
)  # fmt: skip


@pytest.mark.parametrize("device", ["V100-SXM2-32GB", "A100-SXM4-80GB", "TPU-v4"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.label)
def test_a_kernel_of_twice_the_samples_takes_up_to_twice_as_long(op: Gemm | Attention, device: str) -> None:
    on, name = catalog.device(device), op.samples
    dtype = "bf16" if "bf16" in on.dtypes else "fp16"
    sizes = [replace(op, dtype=dtype, **{name: getattr(op, name) * 2**i}) for i in range(9)]
    every = with_sizes(sizes)
    own_s = alone_s(every, on)
    in_step_s = dict(zip(every, own_s * growth(every, own_s, [False] * len(every)), strict=True))
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
    sizes = [Attention(heads=n, kv_heads=n // least, **of_heads) for n in (16 << i for i in range(4))]
    every = with_sizes(sizes)
    own_s = alone_s(every, on)
    in_step_s = dict(zip(every, own_s * growth(every, own_s, [False] * len(every)), strict=True))
    ratios = [in_step_s[b] / in_step_s[a] for a, b in pairwise(sizes)]
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 2 + 1e-9


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (96, 8), (128, 128), (129, 129), (256, 256), (384, 6), (512, 1)]
)
@pytest.mark.parametrize("batch", [1, 96, 1024, 4095, 8192])
def test_attention_of_any_sizes_is_among_those_it_is_compared_with(batch: int, heads: int, kv_heads: int) -> None:
    """But of more sequences than are compared, of which odd ones grow as they are and others in proportion."""
    op = Attention(batch=batch, heads=heads, kv_heads=kv_heads, seq_q=128, seq_kv=128, head_dim=64)
    every = with_sizes([op])
    assert op in every
    grown = growth(every, np.ones(len(every)), [False] * len(every))
    assert grown[every.index(op)] == pytest.approx(1.0 if batch <= 1024 or batch % 2 else batch / 1024)


def test_whoever_asks_for_other_sizes_is_told_the_same() -> None:
    on, op = catalog.device("V100-SXM2-32GB"), Gemm(dtype="fp16", m=1536, n=4096, k=1024)
    found = []
    for ops in ([op], [op, replace(op, m=3072), replace(op, n=512)]):
        every = with_sizes(ops)
        found.append(growth(every, alone_s(every, on), [False] * len(every))[every.index(op)])
    assert found[0] == found[1]


def test_collectives_and_element_wise_kernels_are_left_as_they_are() -> None:
    reduction = Collective(collective="all_reduce", bytes=1e6, num_ranks=8, ranks_per_node=8)
    ops = with_sizes([reduction, MemoryBound(op="add", rows=4096, hidden=1024)])
    assert len(ops) == 2
    assert growth(ops, np.array([1.0, 2.0]), [False] * 2).tolist() == [1.0, 1.0]


def test_sizes_that_do_not_fill_a_tile_change_nothing_of_those_that_do() -> None:
    on, op = catalog.device("A100-SXM4-80GB"), Gemm(op="grouped_linear", dtype="tf32", m=64, n=1408, k=704, groups=128)
    found = []
    for ops in ([op], [replace(op, m=8), op]):
        every = with_sizes(ops)
        found.append(growth(every, alone_s(every, on), [False] * len(every))[every.index(op)])
    assert found[0] == found[1]
