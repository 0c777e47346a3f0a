"""A part whose tensor units are slower than its die's takes longer by its arithmetic, and by
nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.catalog import device
from perfmodel.cost import EventTimes, KernelModel, slowed_unit_seconds
from perfmodel.ops import Attention, Gemm, MemoryBound
from perfmodel.prediction.sites import Adjustment

H20 = device("H20-96GB")
WHOLE_UNITS = 148 / 989.5 * 132 * 1830 / (78 * 1980)
"""Rate of an H20's tensor unit in a clock over that of an H100's."""
SIZES = st.sampled_from([1024, 2048, 4096, 8192, 16384])
DTYPES = st.sampled_from(["bf16", "fp8"])


@given(SIZES, SIZES, SIZES, DTYPES)
def test_products_come_closer_to_a_peak_that_only_tensor_units_lower(m, n, k, dtype):
    product = Gemm(dtype=dtype, m=m, n=n, k=k)
    seconds = KernelModel.load().times(H20, [product]).time_s[0]
    nominal = product.flops / H20.flops_per_s(dtype)
    extra = slowed_unit_seconds(H20, [product])[0]
    # never beyond the peak, and what is lost beside arithmetic is what the die loses on as many
    # multiprocessors
    assert nominal <= seconds * (1 + 1e-9)
    assert extra == pytest.approx(nominal * (1 - WHOLE_UNITS), rel=0.01)
    assert seconds > extra


@pytest.mark.parametrize(
    "op",
    [
        Gemm(m=8192, n=8192, k=8192),
        Gemm(dtype="fp8", m=8192, n=8192, k=8192),
        Attention(
            batch=1,
            heads=32,
            kv_heads=8,
            seq_q=8192,
            seq_kv=8192,
            head_dim=128,
            head_dim_v=128,
            causal=True,
        ),
    ],
)
def test_large_kernels_reach_nearly_all_of_a_slowed_peak(op):
    shares = []
    for name in ("H100-SXM5-80GB", "H20-96GB"):
        part = device(name)
        seconds = KernelModel.load().times(part, [op]).time_s[0]
        shares.append(op.flops / part.flops_per_s(op.dtype) / seconds)
    lost_whole, lost_slowed = (1 / share - 1 for share in shares)
    assert lost_slowed < 0.5 * lost_whole


def test_whole_parts_and_kernels_of_the_memory_lose_nothing():
    ops = [Gemm(m=4096, n=4096, k=4096), MemoryBound(op="layer_norm", rows=8192, hidden=4096)]
    for name in ("H100-SXM5-80GB", "A100-SXM4-80GB", "B200-SXM-180GB", "V100-SXM2-32GB", "TPU-v5e"):
        assert not slowed_unit_seconds(device(name), ops).any(), name
    of_product, of_norm = slowed_unit_seconds(H20, ops)
    assert of_product > 0 == of_norm


@given(st.floats(0.2, 3.0), st.floats(0.0, 1.0))
def test_what_a_site_makes_wait_does_not_scale_the_arithmetic(factor, share):
    ops = [Gemm(m=4096, n=4096, k=4096)]
    times = EventTimes.of_rows([(2e-3, 1e-3, 3e-3, "learned")])
    site = Adjustment(device="H20-96GB", values=(("gemm", float(np.log(factor))),))
    moved = site.times(ops, times, np.zeros(1), np.array([share * 2e-3]))
    assert moved.time_s[0] == pytest.approx(2e-3 * (share + factor * (1 - share)))
