"""Attention of training kernels on H200 and GB200 beside what was measured, and what is not said of other devices."""

import pytest

from perfmodel.catalog import device
from perfmodel.cost import KernelModel
from perfmodel.ops import Attention


def attention_s(name: str, **shape: object) -> float:
    op = Attention(**{"batch": 2, "heads": 64, "kv_heads": 8, "head_dim": 128, **shape})  # pyright: ignore[reportArgumentType]
    return float(KernelModel.load().times(device(name), [op]).time_s[0])


@pytest.mark.parametrize(("name", "seq", "shape", "measured_us"), [
    ("GB200", 8192, {}, 1397), ("GB200", 32_768, {}, 21_692), ("GB200", 8192, {"causal": False}, 2483),
    ("GB200", 32_768, {"pass_": "bwd"}, 71_756), ("H200", 16_384, {"batch": 1}, 6531),
    ("GB200", 16_384, {"heads": 128, "kv_heads": 128, "head_dim": 192, "head_dim_v": 128}, 13_103),
    ("H200", 8192, {"batch": 1, "heads": 128, "kv_heads": 128, "head_dim": 192, "head_dim_v": 128}, 4278),
])  # fmt: skip
def test_forward_and_backward(name: str, seq: int, shape: dict[str, object], measured_us: float) -> None:
    """NVIDIA/cudnn-frontend 1.19.0 and 1.21.1, benchmark/sdpa_benchmark_training."""
    assert attention_s(name, seq_q=seq, seq_kv=seq, **shape) == pytest.approx(measured_us * 1e-6, rel=0.15)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["H100", "H200", "B200", "GB300"])
@pytest.mark.parametrize("head", [{}, {"head_dim": 192, "head_dim_v": 128}])
def test_half_the_bits_take_half_to_all_of_the_time(name: str, pass_: str, head: dict[str, object]) -> None:
    half_s, narrow_s = (
        attention_s(name, seq_q=8192, seq_kv=8192, pass_=pass_, dtype=dtype, **head) for dtype in ("bf16", "fp8")
    )
    assert half_s / 2 <= narrow_s <= half_s


def test_longer_queries_cost_their_flops() -> None:
    shape = {"seq_q": 8192, "seq_kv": 8192, "heads": 128, "kv_heads": 128}
    equal_s, longer_s = (attention_s("GB200", **shape, head_dim=head, head_dim_v=128) for head in (128, 192))
    assert longer_s == pytest.approx(1.25 * equal_s)
