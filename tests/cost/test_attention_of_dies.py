"""Attention of training kernels on H200, GB200 and GB300 beside what was measured, and what others
are not told."""

from dataclasses import replace

import pytest

from perfmodel.catalog import device
from perfmodel.cost import KernelModel
from perfmodel.ops import Attention

ATTENTION = Attention(batch=2, heads=64, kv_heads=8, seq_q=8192, seq_kv=8192, head_dim=128)


def attention_s(name: str, **shape: object) -> float:
    op = Attention(**{"batch": 2, "heads": 64, "kv_heads": 8, "head_dim": 128, **shape})  # pyright: ignore[reportArgumentType]
    return float(KernelModel.load().times(device(name), [op]).time_s[0])


@pytest.mark.parametrize(
    ("name", "seq", "shape", "measured_us"),
    [
        ("GB200", 8192, {}, 1397),
        ("GB200", 32_768, {}, 21_692),
        ("GB200", 8192, {"causal": False}, 2483),
        ("GB200", 32_768, {"pass_": "bwd"}, 71_756),
        (
            "GB200",
            4096,
            {"heads": 128, "kv_heads": 128, "head_dim": 192, "head_dim_v": 128, "causal": False},
            1650,
        ),
        ("GB200", 32_760, {"batch": 1, "heads": 40, "kv_heads": 40, "causal": False}, 13_191),
        ("H200", 16_384, {"batch": 1}, 6531),
        ("H200", 8192, {"batch": 1, "causal": False}, 3182),
        ("H200", 8192, {"batch": 1, "causal": False, "pass_": "bwd"}, 9262),
        (
            "GB200",
            16_384,
            {"heads": 128, "kv_heads": 128, "head_dim": 192, "head_dim_v": 128},
            13_103,
        ),
        (
            "H200",
            8192,
            {"batch": 1, "heads": 128, "kv_heads": 128, "head_dim": 192, "head_dim_v": 128},
            4278,
        ),
        ("GB300", 8192, {}, 1166),
        ("GB300", 32_768, {}, 17_249),
        ("GB300", 16_384, {"causal": False}, 8330),
        ("GB300", 8192, {"pass_": "bwd"}, 3872),
        ("GB300", 32_768, {"dtype": "fp8"}, 11_552),
        ("GB300", 8192, {"dtype": "fp8", "pass_": "bwd"}, 3191),
        ("GB300", 8192, {"heads": 128, "kv_heads": 128, "head_dim": 192, "head_dim_v": 128}, 2851),
        (
            "GB300",
            8192,
            {"heads": 128, "kv_heads": 128, "head_dim": 192, "head_dim_v": 128, "dtype": "fp8"},
            1706,
        ),
    ],
)
def test_forward_and_backward(
    name: str, seq: int, shape: dict[str, object], measured_us: float
) -> None:
    """NVIDIA/cudnn-frontend 1.19.0 and 1.21.1, benchmark/sdpa_benchmark_training; GB300: 1.31.0,
    attention_training."""
    assert attention_s(name, seq_q=seq, seq_kv=seq, **shape) == pytest.approx(
        measured_us * 1e-6, rel=0.15
    )


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["H100", "H200", "B200", "GB300"])
@pytest.mark.parametrize("head", [{}, {"head_dim": 192, "head_dim_v": 128}])
def test_half_the_bits_take_half_to_all_of_the_time(
    name: str, pass_: str, head: dict[str, object]
) -> None:
    half_s, narrow_s = (
        attention_s(name, seq_q=8192, seq_kv=8192, pass_=pass_, dtype=dtype, **head)
        for dtype in ("bf16", "fp8")
    )
    assert half_s / 2 <= narrow_s <= half_s


def test_longer_queries_cost_their_flops() -> None:
    shape = {"seq_q": 8192, "seq_kv": 8192, "heads": 128, "kv_heads": 128}
    equal_s, longer_s = (
        attention_s("GB200", **shape, head_dim=head, head_dim_v=128) for head in (128, 192)
    )
    assert longer_s == pytest.approx(1.25 * equal_s)


@pytest.mark.parametrize(
    ("head", "dtype", "pass_", "measured"),
    [
        ((128, 128), "bf16", "fwd", 0.78),
        ((128, 128), "bf16", "bwd", 0.90),
        ((128, 128), "fp8", "fwd", 0.70),
        ((128, 128), "fp8", "bwd", 0.83),
        ((192, 128), "bf16", "fwd", 0.83),
        ((192, 128), "bf16", "bwd", 0.90),
        ((192, 128), "fp8", "fwd", 0.74),
        ((192, 128), "fp8", "bwd", 0.80),
    ],
)
def test_twice_the_exponentials(
    head: tuple[int, int], dtype: str, pass_: str, measured: float
) -> None:
    """GB300 beside GB200: medians of NVIDIA/cudnn-frontend 1.31.0, attention_training, 4k to 32k
    tokens, both masks."""
    shape = {
        "seq_q": 8192,
        "seq_kv": 8192,
        "head_dim": head[0],
        "head_dim_v": head[1],
        "dtype": dtype,
        "pass_": pass_,
    }
    ratio = attention_s("GB300", **shape) / attention_s("GB200", **shape)
    assert ratio == pytest.approx(measured, rel=0.08)
    # FLOPs of a pair of query and key, in exponentials of a GB200: 8,192 FLOPs beside 16 of them in
    # a clock, in 16 bits
    products = 2 * sum(head) * (2.5 if pass_ == "bwd" else 1) / (512 if dtype == "bf16" else 1024)
    assert ratio == pytest.approx((products + 1 / 2) / (products + 1), rel=0.02)


def test_a_window_has_no_more_to_gain() -> None:
    shape = {"seq_q": 8192, "seq_kv": 8192, "window": 128, "head_dim": 64, "kv_heads": 64}
    assert attention_s("GB300", **shape) == pytest.approx(attention_s("GB200", **shape))


@pytest.mark.parametrize(("name", "measured"), [("H200", 3.55), ("GB200", 2.26), ("GB300", 2.39)])
def test_backward_over_forward_of_a_window(name: str, measured: float) -> None:
    """NVIDIA/cudnn-frontend 1.31.0, attention_training, gpt_oss, 8k tokens."""
    shape = {
        "seq_q": 8192,
        "seq_kv": 8192,
        "window": 128,
        "head_dim": 64,
        "heads": 128,
        "kv_heads": 128,
    }
    over = attention_s(name, **shape, pass_="bwd") / attention_s(name, **shape)
    assert over == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", ["H100", "H200", "B200", "GB300"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("kv_heads", [8, 64])
def test_the_edge_of_a_causal_mask(name: str, dtype: str, kv_heads: int) -> None:
    """A causal mask saves less than half of the time, by tiles of its edge that matter ever less;
    and no mask makes attention faster, whoever shares keys."""
    seqs = (256, 512, 640, 1024, 2048, 4096, 8192, 16_384, 32_768)
    full_s, causal_s = (
        [
            attention_s(name, seq_q=n, seq_kv=n, causal=causal, dtype=dtype, kv_heads=kv_heads)
            for n in seqs
        ]
        for causal in (False, True)
    )
    from_1k = full_s[seqs.index(1024) :]
    assert from_1k == sorted(from_1k)
    over_half = [2 * causal / full for causal, full in zip(causal_s, full_s, strict=True)]
    assert all(1.0 <= ratio <= 2.0 for ratio in over_half)
    long = over_half[seqs.index(2048) :]
    assert long == sorted(long, reverse=True)
    assert long == pytest.approx(
        [1 + 640 / n for n in (2048, 4096, 8192, 16_384, 32_768)], rel=0.06
    )


@pytest.mark.parametrize("name", ["H200", "GB200"])
def test_wide_windows_have_the_backward_of_none(name: str) -> None:
    """The ratio of backward to forward changes steadily from windows of one tile to none; H200 with
    1,024 tokens: 2.94 (NVIDIA/cudnn-frontend 1.19.0)."""
    shape = {"seq_q": 16_384, "seq_kv": 16_384, "head_dim": 64}
    windows = (128, 256, 1024, 4096, 0)
    ratios = [
        attention_s(name, **shape, window=window, pass_="bwd")
        / attention_s(name, **shape, window=window)
        for window in windows
    ]
    falls = name == "H200"
    assert ratios == sorted(ratios, reverse=falls)
    if falls:
        assert ratios[windows.index(1024)] == pytest.approx(2.94, rel=0.06)


def test_more_exponentials_never_take_longer() -> None:
    plain = device("GB200")
    times_s = [
        float(
            KernelModel.load()
            .times(replace(plain, exponentials_per_clock=n), [ATTENTION])
            .time_s[0]
        )
        for n in (8, 16, 32, 64)
    ]
    assert times_s == sorted(times_s, reverse=True)
