"""Element types that nobody measured run at the share of the roofline that the nearest measured one
reaches."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from perfmodel import catalog, predict
from perfmodel.cost import KernelModel
from perfmodel.errors import PerfModelError
from perfmodel.ops import Attention, Convolution, Gemm
from perfmodel.spec import Job

SHAPE = {"m": 8192, "n": 8192, "k": 8192}


@pytest.mark.parametrize(
    ("device", "dtype", "near"),
    [("GB200", "fp4", "fp8"), ("H100", "int8", "fp8"), ("TPU-v5p", "int8", "bf16")],
)
def test_a_large_product_gains_what_the_peak_does(device, dtype, near):
    device = catalog.device(device)
    own, measured = (
        KernelModel.load().times(device, [Gemm(dtype=name, **SHAPE)]) for name in (dtype, near)
    )
    gain = device.peak.flops_per_s(dtype) / device.peak.flops_per_s(near)
    assert own.time_s[0] == pytest.approx(measured.time_s[0] / gain, rel=0.05)
    assert own.provenance == ("extrapolated",)
    assert np.log(own.hi_s[0] / own.lo_s[0]) == pytest.approx(1.2)


@pytest.mark.parametrize("pass_", ["fwd", "dgrad", "wgrad"])
@pytest.mark.parametrize("device", ["H100", "GB200", "B300", "L40S", "MI300X", "TPU-v5p"])
def test_half_the_bits_take_half_to_all_of_the_time(device, pass_):
    device = catalog.device(device)
    for size in (256, 1024, 4096, 8192):
        shape = {"m": 8192, "n": size, "k": size, "pass_": pass_}
        types = [name for name in ("fp4", "fp8", "bf16") if name in device.dtypes]
        times_s = (
            KernelModel.load().times(device, [Gemm(dtype=name, **shape) for name in types]).time_s
        )
        for narrow_s, wide_s in itertools.pairwise(times_s):
            assert wide_s / 2 * (1 - 1e-9) <= narrow_s <= wide_s * (1 + 1e-9)


@pytest.mark.parametrize("device", ["V100-SXM2-32GB", "A100", "H100", "RTX-4090"])
def test_a_convolution_of_16_bits_takes_no_longer_than_one_of_32(device):
    """Its operands may run on the ordinary cores too, as those of three channels do (the first
    layer of ResNets)."""
    layers = [
        {
            "c_in": 3,
            "h_in": 224,
            "w_in": 224,
            "c_out": 64,
            "k_h": 7,
            "k_w": 7,
            "stride_h": 2,
            "stride_w": 2,
            "pad_h": 3,
        },
        {
            "c_in": 64,
            "h_in": 56,
            "w_in": 56,
            "c_out": 64,
            "k_h": 3,
            "k_w": 3,
            "pad_h": 1,
            "pad_w": 1,
        },
        {"c_in": 1024, "h_in": 14, "w_in": 14, "c_out": 256, "k_h": 1, "k_w": 1},
    ]
    for pass_ in ("fwd", "dgrad", "wgrad"):
        half, single = (
            KernelModel.load().times(
                catalog.device(device),
                [Convolution(dtype=dtype, batch=256, pass_=pass_, **layer) for layer in layers],
            )
            for dtype in ("fp16", "fp32")
        )
        for half_s, known, single_s in zip(
            half.time_s, half.provenance, single.time_s, strict=True
        ):
            assert known == "measured" or half_s <= single_s * (1 + 1e-9)


def test_a_device_without_the_type_refuses_it():
    def run(cluster, dtype):
        return predict(
            "gpt3-1.3b",
            cluster,
            "tp=8",
            global_batch=8,
            job=Job(global_batch=8, seq_len=2048, dtype=dtype),
        )

    with pytest.raises(PerfModelError, match="has no fp4"):
        run("dgx-h100", "fp4")
    # collectives that set the pace take as long in both types, but for the last digit
    narrow_s, wide_s = (run("hgx-b200", dtype).step_time_s for dtype in ("fp4", "fp8"))
    assert narrow_s <= wide_s * (1 + 1e-9)


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize(
    "device",
    ["V100-SXM2-32GB", "A100", "H100", "B200", "MI100", "MI300X", "RTX-4090", "TPU-v6e", "Gaudi3"],
)
def test_nothing_that_was_not_measured_is_faster_than_its_peak(device, pass_):
    device = catalog.device(device)
    for dtype in (
        name for name in ("fp32", "tf32", "bf16", "fp16", "fp8") if name in device.dtypes
    ):
        shapes = [(2048, 4096, 8192), (32_768, 1024, 1024), (32_768, 8192, 4096)]
        ops = [
            Gemm(dtype=dtype, m=m, n=n, k=k, pass_={"bwd": "dgrad"}.get(pass_, pass_))
            for m, n, k in shapes
        ]
        ops += [
            Attention(
                dtype=dtype,
                batch=2,
                heads=16,
                kv_heads=16,
                seq_q=n,
                seq_kv=n,
                head_dim=128,
                pass_=pass_,
            )
            for n in (1024, 4096, 16_384)
        ]
        times = KernelModel.load().times(device, ops)
        for op, time_s, known in zip(ops, times.time_s, times.provenance, strict=True):
            assert known == "measured" or time_s >= op.flops / device.flops_per_s(dtype) * (
                1 - 1e-4
            ), (dtype, op)


@pytest.mark.parametrize(
    "device", ["V100-SXM2-32GB", "A100", "H100", "GB200", "MI300X", "TPU-v4", "TPU-v6e", "Gaudi2"]
)
def test_scores_left_out_by_a_mask_cost_nothing(device):
    device = catalog.device(device)
    dtype = "bf16" if "bf16" in device.dtypes else "fp16"
    shape = {"dtype": dtype, "heads": 32, "kv_heads": 8, "head_dim": 128}
    for batch, n, pass_ in itertools.product((1, 4), (1024, 8192), ("fwd", "bwd")):
        both = [
            Attention(batch=batch, seq_q=n, seq_kv=n, causal=causal, pass_=pass_, **shape)
            for causal in (True, False)
        ]
        causal_s, full_s = KernelModel.load().times(device, both).time_s
        assert causal_s <= full_s * (1 + 1e-6), (both[0], causal_s / full_s)


@pytest.mark.parametrize("device", ["V100-SXM2-32GB", "A100", "H100", "GB200", "MI300X", "Gaudi2"])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_a_long_causal_sequence_takes_half_of_all_scores(device, pass_):
    """The longer, the closer: tiles that the mask cuts, and the wait for the last of them, are
    fewer."""
    device = catalog.device(device)
    dtype = "bf16" if "bf16" in device.dtypes else "fp16"
    shape = {"dtype": dtype, "heads": 8, "kv_heads": 8, "head_dim": 128, "batch": 1, "pass_": pass_}
    for n in (16_384, 65_536, 262_144, 1_048_576):
        both = [Attention(seq_q=n, seq_kv=n, causal=causal, **shape) for causal in (True, False)]
        causal_s, full_s = KernelModel.load().times(device, both).time_s
        cut, last = 512 / n, device.compute_units * 512 / (8 * n)
        assert causal_s <= full_s * min(1.0, 0.5 + cut / 2 + last) * 1.001, (n, causal_s / full_s)


@pytest.mark.parametrize(
    "device", ["P100-SXM2-16GB", "V100-SXM2-32GB", "A100-SXM4-40GB", "H100", "B300", "MI300X"]
)
def test_attention_of_wide_elements_is_never_slower_for_a_higher_rate(device):
    """And no faster than in proportion."""
    device, times = catalog.device(device), 1.4
    peak = {name: rate and rate * times for name, rate in vars(device.peak).items()}
    faster = [
        replace(device, memory_bandwidth_bytes_per_s=times * device.memory_bandwidth_bytes_per_s),
        replace(device, peak=replace(device.peak, **peak)),
    ]
    wide = [name for name in ("fp32", "tf32") if name in device.dtypes]
    ops = [
        Attention(
            dtype=dtype,
            batch=2,
            heads=16,
            kv_heads=16,
            seq_q=n,
            seq_kv=n,
            head_dim=128,
            pass_=pass_,
        )
        for dtype, n, pass_ in itertools.product(wide, (128, 512, 2048), ("fwd", "bwd"))
    ]
    before_s = KernelModel.load().times(device, ops).time_s
    for other in faster:
        gain = before_s / KernelModel.load().times(other, ops).time_s
        assert gain.min() >= 1 - 1e-4
        assert gain.max() <= times * (1 + 1e-4)


def test_what_was_measured_of_a_device_stays_so_where_its_figures_change():
    """As of one that the tables name, so of one whose figures are those of another: kernels in a
    step are bounded by the measured ones, which are the same."""
    ops = [Gemm(dtype="fp32", m=2048 << i, n=5120, k=3456) for i in range(5)]
    for name in ("V100-SXM2-32GB", "A100-SXM4-40GB", "A100-SXM4-80GB"):
        device = catalog.device(name)
        faster = replace(
            device, memory_bandwidth_bytes_per_s=2 * device.memory_bandwidth_bytes_per_s
        )
        own, other = (KernelModel.load().times(one, ops).provenance for one in (device, faster))
        assert own == other
