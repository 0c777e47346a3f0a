"""Products of 8 and 4 bits and in TF32, against a benchmark that none of them was fitted to, and
laws of them."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from perfmodel.catalog import device
from perfmodel.cost import KernelModel, under_load
from perfmodel.ops import Convolution, Gemm
from perfmodel.spec import Device

TOKENS, HIDDEN, INNER = 15_872, 4096, 16_384


def layer(dtype: str) -> Iterator[Gemm]:
    """The twelve products of a layer of Transformer Engine's `benchmark_gemm.py`."""
    for n, k in ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)):
        yield Gemm(dtype=dtype, m=TOKENS, n=n, k=k)
        yield Gemm(dtype=dtype, m=TOKENS, n=k, k=n, pass_="dgrad")
        yield Gemm(dtype=dtype, m=n, n=k, k=TOKENS, pass_="wgrad")


def alone_s(at: Device, ops: list[Gemm]) -> np.ndarray:
    return KernelModel.load().times(at, ops).time_s


@pytest.mark.parametrize(
    ("name", "dtype", "measured_ms"),
    [
        ("B300", "bf16", 13.102),
        ("B300", "fp8", 6.812),
        ("B300", "fp4", 3.764),
        ("H200-NVL-141GB", "bf16", 31.968),
        ("H200-NVL-141GB", "fp8", 16.785),
    ],
)
def test_products_of_a_layer_slow_down_to_the_limit(
    name: str, dtype: str, measured_ms: float
) -> None:
    """Operands quantised before, 100 times in a row, which takes 0.1 s and less on B300: on the way
    from the clock of a kernel alone to that of the limit (Transformer Engine 2,
    docs/examples/gemm_profiling)."""
    at, ops = device(name), list(layer(dtype))
    times_s = alone_s(at, ops)
    held_ms = 1e3 * sum(times_s * under_load(at, ops, times_s))
    assert 1e3 * sum(times_s) < measured_ms < 1.03 * held_ms
    assert held_ms == pytest.approx(measured_ms, rel=0.03 if "H200" in name else 0.2)


def test_rows_of_a_source_hold_what_it_timed() -> None:
    """Serving stacks quantise the operand too: their rows take longer than the product, by no more
    than half of it."""
    op = Gemm(dtype="fp8", m=8192, n=8192, k=8192)
    row = {
        "op_family": "gemm",
        "op": "linear",
        "dtype": "fp8",
        "m": 8192,
        "n": 8192,
        "k": 8192,
        "pass": "fwd",
    }
    table = pd.DataFrame(
        [
            row
            | {
                "source": "aiconfigurator",
                "software": "trtllm-1.3.0rc20",
                "device": name,
                "time_us": 1.0,
            }
            for name in ("H100", "B300", "GB300")
        ]
    )
    timed_s = KernelModel.load().table_times(table).time_s
    product_s = np.concatenate([alone_s(device(name), [op]) for name in table["device"]])
    assert (product_s < timed_s).all()
    assert (timed_s < 1.5 * product_s).all()


@pytest.mark.parametrize("name", ["H100", "H200", "GB200", "B300"])
@pytest.mark.parametrize("what", ["memory_bandwidth_bytes_per_s", "clock_hz"])
def test_more_of_any_rate_makes_no_narrow_product_slower(name: str, what: str) -> None:
    ops = [
        replace(op, m=m)
        for dtype in ("fp8", "fp4")
        for op in layer(dtype)
        for m in (64, 2048, 16_384)
    ]
    at = device(name)
    ops = [op for op in ops if op.dtype in at.dtypes]
    faster = replace(at, **{what: 1.5 * getattr(at, what)})
    assert (alone_s(faster, ops) <= alone_s(at, ops) * (1 + 1e-9)).all()


@pytest.mark.parametrize(
    "name", ["RTX-3090", "RTX-5090", "MI100", "MI300X", "A100-SXM4-80GB", "H100-SXM5-80GB"]
)
def test_tf32_is_allowed_and_never_slower(name: str) -> None:
    """Where it multiplies no faster, libraries take fp32."""
    ops = [*layer("tf32"), *(Gemm(dtype="tf32", m=m, n=1024, k=512) for m in (16, 256, 4096))]
    assert (
        alone_s(device(name), ops)
        <= alone_s(device(name), [replace(op, dtype="fp32") for op in ops])
    ).all()


CONVOLUTION_SHAPES = (
    {"batch": 256, "c_in": 64, "h_in": 56, "w_in": 56, "c_out": 256, "k_h": 1, "k_w": 1},
    {
        "batch": 64,
        "c_in": 256,
        "h_in": 28,
        "w_in": 28,
        "c_out": 256,
        "k_h": 3,
        "k_w": 3,
        "pad_h": 1,
        "pad_w": 1,
    },
    {
        "batch": 128,
        "c_in": 512,
        "h_in": 14,
        "w_in": 14,
        "c_out": 1024,
        "k_h": 1,
        "k_w": 1,
        "stride_h": 2,
        "stride_w": 2,
    },
)


@pytest.mark.parametrize("pass_", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("name", ["A100-SXM4-80GB", "RTX-3090", "H100-SXM5-80GB"])
def test_tf32_takes_no_longer_than_16_bits_at_its_rate_and_bytes(name: str, pass_: str) -> None:
    """Of batched products and convolutions as of plain products: the same tensor cores run both."""
    on = device(name)
    longest = max(2.0, on.flops_per_s("fp16") / on.flops_per_s("tf32"))
    ops = [Convolution(dtype="tf32", pass_=pass_, **shape) for shape in CONVOLUTION_SHAPES]
    ops += [Gemm(op="bmm", dtype="tf32", batch=2048, m=128, n=64, k=128, pass_=pass_)]
    in_16 = [replace(op, dtype="fp16") for op in ops]
    assert (alone_s(on, ops) <= alone_s(on, in_16) * longest * (1 + 1e-9)).all()
