"""The roofline's constants, and the floor below which no kernel may be predicted."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.cost import KernelModel, roofline_seconds
from perfmodel.ops import Attention, Gemm, KernelOp, MemoryBound
from perfmodel.spec import Device

LAUNCH_S, COMPUTE_SHARE, MEMORY_SHARE = 4e-6, 0.65, 0.75
H100 = catalog.device("H100-SXM5-80GB")
SIZES = (256, 1024, 4096, 8192, 32768)


def roofline_of(op: KernelOp, device: Device = H100) -> float:
    return roofline_seconds(device, [op]).item()


def by_hand(op: KernelOp, device: Device = H100) -> float:
    """4 us to launch, and a smooth maximum of arithmetic at 65 % and traffic at 75 % of the nominal
    rates."""
    compute_s = op.flops / (COMPUTE_SHARE * device.flops_per_s(op.dtype))
    memory_s = op.bytes / (MEMORY_SHARE * device.memory_bandwidth_bytes_per_s)
    return LAUNCH_S + (compute_s**3 + memory_s**3) ** (1 / 3)


def test_an_empty_kernel_takes_its_launch() -> None:
    assert roofline_of(MemoryBound(op="add", rows=1, hidden=1, n_inputs=2)) == pytest.approx(
        LAUNCH_S, rel=1e-3
    )


@pytest.mark.parametrize("size", [4096, 16384])
@pytest.mark.parametrize("dtype", ["bf16", "fp8", "fp16"])
def test_products_of_whole_waves_take_their_flops_and_bytes(size: int, dtype: str) -> None:
    even = replace(H100, compute_units=128)  # tiles of large powers of two fill every wave
    op = Gemm(dtype=dtype, m=size, n=size, k=size)
    assert roofline_of(op, even) == pytest.approx(by_hand(op, even))


def test_narrow_products_are_bound_by_their_traffic() -> None:
    op = Gemm(m=128, n=2**20, k=8)
    assert op.bytes / H100.memory_bandwidth_bytes_per_s > op.flops / H100.flops_per_s("bf16")
    assert roofline_of(op) == pytest.approx(by_hand(op), rel=0.05)


def test_attention_that_nobody_measured_is_that_of_the_roofline() -> None:
    op = Attention(
        dtype="fp32", batch=4, heads=32, kv_heads=32, seq_q=4096, seq_kv=4096, head_dim=128
    )
    times = KernelModel.load().times(H100, [op])
    assert times.provenance == ("analytical",)
    assert times.time_s.item() == pytest.approx(roofline_of(op))
    np.testing.assert_allclose(
        [times.lo_s.item(), times.hi_s.item()], times.time_s.item() * np.exp([-0.6, 0.6])
    )


HELD_BY_THE_FLOOR = (
    # products in fp64 that were measured on other devices, whose peak is far higher
    ("B200-SXM-180GB", "fp64", None),
    ("B300-SXM", "fp64", None),
    # devices without a table, told that their best product reaches its peak
    ("A30", "bf16", 1.0),
    ("A40", "tf32", 1.0),
    ("Gaudi2", "bf16", 1.0),
    ("Trainium2", "fp8", 1.0),
)


def test_no_product_takes_less_than_its_flops_at_the_nominal_rate() -> None:
    least_shares = []
    for name, dtype, reached_share in HELD_BY_THE_FLOOR:
        device = replace(catalog.device(name), reached_share=reached_share)
        ops = [
            Gemm(dtype=dtype, m=m, n=n, k=k)
            for m, n, k in product(SIZES, (1024, 8192), (1024, 4096, 8192))
        ]
        least_s = np.array([op.flops for op in ops]) / device.flops_per_s(dtype)
        least_shares.append(float((KernelModel.load().times(device, ops).time_s / least_s).min()))
    assert min(least_shares) == pytest.approx(1.0)
    # the floor is what holds them: without it they would take less
    assert sum(share < 1 + 1e-6 for share in least_shares) >= len(least_shares) // 2


@pytest.mark.parametrize("dtype", ["fp4", "int8"])
def test_element_types_that_nobody_measured_take_no_less_than_their_nominal_rate(
    dtype: str,
) -> None:
    for name in ("B200-SXM-180GB", "H100-SXM5-80GB", "A100-SXM4-80GB"):
        device = catalog.device(name)
        if dtype not in device.dtypes:
            continue
        ops = [Gemm(dtype=dtype, m=m, n=n, k=k) for m, n, k in product(SIZES, SIZES, (4096, 16384))]
        least_s = np.array([op.flops for op in ops]) / device.flops_per_s(dtype)
        assert (KernelModel.load().times(device, ops).time_s >= least_s * (1 - 1e-9)).all()
