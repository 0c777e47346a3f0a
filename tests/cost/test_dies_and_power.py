"""Devices of one die, and what power limits leave of them: laws that hold by construction."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perfmodel.catalog import device
from perfmodel.cost import KernelModel, sustained_seconds, sustained_share, under_load
from perfmodel.ops import Attention, Gemm, KernelOp, MemoryBound
from perfmodel.spec import Device

MEASURED = ("A100-SXM4-80GB", "H100-SXM5-80GB", "H200-SXM-141GB", "B200-SXM-180GB", "GB300-NVL72")
sizes = st.sampled_from([64, 512, 1000, 2048, 4096, 5120, 14336])
products = st.builds(
    Gemm,
    m=sizes,
    n=sizes,
    k=sizes,
    pass_=st.sampled_from(["fwd", "dgrad", "wgrad"]),
    dtype=st.just("bf16"),
)
attentions = st.builds(
    Attention,
    batch=st.just(1),
    heads=st.sampled_from([8, 32]),
    kv_heads=st.just(8),
    seq_q=st.just(4096),
    seq_kv=st.just(4096),
    head_dim=st.sampled_from([64, 128, 192]),
    pass_=st.sampled_from(["fwd", "bwd"]),
)
rowwise = st.builds(
    MemoryBound,
    op=st.sampled_from(["layer_norm", "gelu", "rope", "add", "quantize_fp8_static"]),
    rows=sizes,
    hidden=sizes,
    pass_=st.sampled_from(["fwd", "bwd"]),
)
kernels = st.lists(st.one_of(products, attentions, rowwise), min_size=1, max_size=8)


def times_s(at: Device, ops: list[KernelOp]) -> np.ndarray:
    return KernelModel.load().times(at, ops).time_s


def with_more(at: Device, by: float, what: str) -> Device:
    if what == "bandwidth":
        return replace(at, memory_bandwidth_bytes_per_s=by * at.memory_bandwidth_bytes_per_s)
    if what == "clock":
        return replace(at, clock_hz=by * at.clock_hz)
    rates = {name: by * rate for name in at.dtypes if (rate := getattr(at.peak, name)) is not None}
    return replace(at, peak=replace(at.peak, **rates))


@given(
    kernels,
    st.sampled_from(MEASURED),
    st.floats(1.01, 3.0),
    st.sampled_from(["bandwidth", "peak", "clock"]),
)
@example(
    [Attention(batch=1, heads=8, kv_heads=8, seq_q=4096, seq_kv=4096, head_dim=64)],
    "GB300-NVL72",
    2.0,
    "clock",
)
@settings(max_examples=60, deadline=None)
def test_more_of_any_rate_makes_no_kernel_slower(
    ops: list[KernelOp], name: str, by: float, what: str
) -> None:
    before_s, after_s = times_s(device(name), ops), times_s(with_more(device(name), by, what), ops)
    assert (after_s <= before_s * (1 + 1e-9)).all()
    assert (after_s >= before_s / by * (1 - 1e-9)).all()


@given(kernels)
@settings(max_examples=30, deadline=None)
def test_equal_dies_with_faster_memory_are_faster(ops: list[KernelOp]) -> None:
    h100_s, gh200_s, h200_s = (
        times_s(device(name), ops) for name in ("H100", "GH200-96GB", "H200")
    )
    assert (h200_s <= h100_s * (1 + 1e-9)).all()
    assert (gh200_s <= h100_s * (1 + 1e-9)).all()
    assert (h200_s >= h100_s * 3350 / 4800 * (1 - 1e-9)).all()


def test_large_products_of_one_die_take_the_same_at_equal_peaks() -> None:
    op: list[KernelOp] = [Gemm(m=8192, n=8192, k=8192), Gemm(m=8192, n=8192, k=8192, dtype="fp8")]
    h100_s, others_s = (
        times_s(device("H100"), op),
        [times_s(device(name), op) for name in ("H200", "GH200")],
    )
    for other_s in others_s:
        assert other_s == pytest.approx(h100_s, rel=2e-3)
    assert times_s(device("B300"), op) == pytest.approx(times_s(device("B200"), op), rel=1e-6)
    assert times_s(device("GB200"), op) == pytest.approx(
        times_s(device("B200"), op) * 2250 / 2500, rel=5e-3
    )


@given(products, st.sampled_from(MEASURED), st.floats(250.0, 2000.0), st.floats(1.01, 2.0))
@settings(max_examples=60, deadline=None)
def test_energy_of_a_product_fits_the_limit(
    op: Gemm, name: str, power_w: float, more: float
) -> None:
    at, hotter = (replace(device(name), power_w=w) for w in (power_w, more * power_w))
    least_s, hotter_s = sustained_seconds(at, [op])[0], sustained_seconds(hotter, [op])[0]
    assert 0 < hotter_s < least_s
    eight = sustained_seconds(at, [replace(op, dtype="fp8")])[0]
    assert least_s / 2 * (1 - 1e-9) <= eight <= least_s


def test_what_is_not_known_to_be_limited_is_not() -> None:
    op, a100 = Gemm(m=8192, n=8192, k=8192), device("A100-SXM4-80GB")
    for at in (device("L40S"), replace(a100, power_w=None), replace(a100, idle_power_w=None)):
        assert sustained_seconds(at, [op]).tolist() == [0.0]
        assert under_load(at, [op], np.array([1e-3])).tolist() == [1.0]
    others = [MemoryBound(op="gelu", rows=8192, hidden=8192), replace(op, dtype="fp32")]
    assert sustained_seconds(a100, others).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "power_w", "dtype", "size", "measured"),
    [
        ("A100-SXM4-80GB", None, "bf16", 8192, 257e12),
        ("H200", None, "fp8", 8192, 1269e12),
        ("H200", None, "fp8", 16384, 1305e12),
        ("GB200", None, "fp8", 8192, 2782e12),
        ("GB200", None, "fp8", 16384, 2820e12),
        ("GB300", None, "fp8", 8192, 3286e12),
        ("GB300", None, "fp8", 16384, 3309e12),
        ("GB300", 500.0, "bf16", 8192, 617e12),
        ("MI300X", None, "bf16", 8192, 668e12),
        ("MI325X", None, "bf16", 8192, 785e12),
    ],
)
def test_published_rates_under_load(
    name: str, power_w: float | None, dtype: str, size: int, measured: float
) -> None:
    """Rates of thonking.ai, 2024 (A100); of the Azure AI benchmarking guide, 10,000 products
    before, random operands (H200, GB200, GB300); of facebookexperimental/triton, pull request 2023
    (500 W); of stas00/ml-engineering, compute/accelerator/benchmarks, 100 of the best product of a
    search (MI300X, MI325X)."""
    at, op = device(name), Gemm(m=size, n=size, k=size, dtype=dtype)
    at = at if power_w is None else replace(at, power_w=power_w)
    assert op.flops / sustained_seconds(at, [op])[0] == pytest.approx(measured, rel=0.04)


hot_kernels = st.lists(st.one_of(products, attentions), min_size=1, max_size=6)
cool = MemoryBound(op="add", rows=64, hidden=64, pass_="fwd")


def step_s(at: Device, ops: list[KernelOp], counts: np.ndarray, alone_s: np.ndarray) -> float:
    """Seconds of the kernels of a step."""
    share = sustained_share(at, ops, counts, alone_s)
    return float(counts @ (alone_s * under_load(at, ops, alone_s, share)))


@given(products, st.sampled_from(MEASURED), st.floats(150.0, 2000.0), st.integers(1, 100))
@settings(max_examples=60, deadline=None)
def test_a_step_of_one_product_takes_the_sustained_time_of_that_product(
    op: Gemm, name: str, power_w: float, count: int
) -> None:
    at = replace(device(name), power_w=power_w)
    alone_s = times_s(at, [op])
    alone_and_sustained_s = alone_s * under_load(at, [op], alone_s)
    step = step_s(at, [op], np.array([float(count)]), alone_s)
    assert step == pytest.approx(count * alone_and_sustained_s[0], rel=1e-6)


@given(hot_kernels, st.sampled_from(MEASURED), st.floats(150.0, 2000.0), st.floats(1.01, 10.0))
@settings(max_examples=60, deadline=None)
def test_kernels_that_take_little_power_let_the_others_run_faster(
    ops: list[KernelOp], name: str, power_w: float, more: float
) -> None:
    at = replace(device(name), power_w=power_w)
    alone_s = np.append(times_s(at, ops), 1e-3)
    counts = np.ones(len(alone_s))
    before = sustained_share(at, [*ops, cool], counts, alone_s)
    alone_s[-1] *= more
    after = sustained_share(at, [*ops, cool], counts, alone_s)
    assert 0 <= after <= before <= 1
    assert after < before or after == 0 or before == 1


@given(
    hot_kernels,
    st.sampled_from(MEASURED),
    st.floats(150.0, 2000.0),
    st.floats(0.1, 1.0),
    st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_faster_kernels_lengthen_no_step(
    ops: list[KernelOp], name: str, power_w: float, factor: float, all_kernels: bool
) -> None:
    at = replace(device(name), power_w=power_w)
    alone_s = np.append(times_s(at, ops), 1e-3)
    counts = np.ones(len(alone_s))
    faster_s = alone_s * factor
    if not all_kernels:
        faster_s[-1] = alone_s[-1]
    mix = [*ops, cool]
    assert step_s(at, mix, counts, faster_s) <= step_s(at, mix, counts, alone_s) * (1 + 1e-6)


@given(products, attentions, st.sampled_from(MEASURED), st.floats(150.0, 2000.0))
@settings(max_examples=60, deadline=None)
def test_attention_pays_for_no_products(
    op: Gemm, attention: Attention, name: str, power_w: float
) -> None:
    at = replace(device(name), power_w=power_w)
    alone_s = times_s(at, [op, attention])
    alone = sustained_share(at, [op], np.ones(1), alone_s[:1])
    assert sustained_share(at, [op, attention], np.ones(2), alone_s) >= alone - 1e-9


def test_shares_of_steps_that_nothing_limits() -> None:
    op, a100 = Gemm(m=8192, n=8192, k=8192), device("A100-SXM4-80GB")
    for at in (device("L40S"), replace(a100, power_w=None), replace(a100, idle_power_w=None)):
        assert step_s(at, [op], np.ones(1), np.array([1e-3])) == 1e-3
    assert step_s(a100, [cool], np.ones(1), np.array([1e-3])) == 1e-3
