"""Kernel times from the shipped weights: sane, ordered, cached, fast."""

import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.catalog import device, devices
from perfmodel.cost import KernelModel
from perfmodel.cost.learn import weight_files
from perfmodel.ops import (
    Attention,
    Convolution,
    Embedding,
    Gemm,
    KernelOp,
    MemoryBound,
    MoE,
    OptimizerStep,
)

EVERY_FAMILY: tuple[KernelOp, ...] = (
    Gemm(m=4096, n=4096, k=4096),
    Gemm(m=4096, n=4096, k=4096, pass_="dgrad"),
    Gemm(m=4096, n=4096, k=4096, pass_="wgrad", accumulate=True),
    Gemm(op="bmm", m=2048, n=2048, k=128, batch=32),
    Gemm(op="grouped_linear", m=512, n=4096, k=1024, groups=8),
    Gemm(m=4096, n=4096, k=4096, dtype="fp8"),
    Gemm(m=4096, n=4096, k=4096, dtype="fp32"),
    Attention(batch=2, heads=32, kv_heads=8, seq_q=2048, seq_kv=2048, head_dim=128),
    Attention(batch=2, heads=32, kv_heads=8, seq_q=2048, seq_kv=2048, head_dim=128, pass_="bwd"),
    Attention(batch=64, heads=32, kv_heads=8, seq_q=1, seq_kv=4096, head_dim=128),
    MemoryBound(op="layer_norm", rows=4096, hidden=4096),
    MemoryBound(op="rms_norm", rows=4096, hidden=4096, pass_="bwd"),
    MemoryBound(op="no_such_kernel", rows=4096, hidden=4096, n_inputs=3),
    Embedding(tokens=4096, hidden=4096, vocab=32000),
    Embedding(tokens=4096, hidden=4096, vocab=32000, pass_="bwd"),
    OptimizerStep(n_params=10**8, tensors=50),
    Convolution(batch=32, c_in=64, h_in=56, w_in=56, c_out=64, k_h=3, k_w=3, pad_h=1, pad_w=1),
    MoE(tokens=4096, hidden=4096, inter=14336, topk=2, experts=8),
)


@pytest.fixture(scope="module")
def model() -> KernelModel:
    return KernelModel.load()


@pytest.mark.parametrize("name", sorted(devices()))
def test_every_device_has_a_time_for_every_family(model: KernelModel, name: str) -> None:
    times = model.times(device(name), EVERY_FAMILY)
    assert np.isfinite(times.time_s).all()
    assert (times.time_s > 5e-7).all()
    assert (times.lo_s <= times.time_s).all()
    assert (times.time_s <= times.hi_s).all()
    assert set(times.provenance) <= {"measured", "learned", "extrapolated", "analytical"}


def test_provenance_tells_measured_from_transferred(model: KernelModel) -> None:
    ops = [EVERY_FAMILY[0]]
    assert model.times(device("H100"), ops).provenance == ("measured",)
    assert model.times(device("H200-SXM-141GB"), ops).provenance == ("learned",)
    assert model.times(device("MI250"), ops).provenance == ("extrapolated",)
    huge = [Gemm(m=2**20, n=2**17, k=2**17)]
    assert model.times(device("H100"), huge).provenance == ("extrapolated",)


def test_rates_stay_below_the_peak(model: KernelModel) -> None:
    for name in ("A100-SXM4-80GB", "H100", "B200", "V100"):
        d = device(name)
        op = Gemm(m=8192, n=8192, k=8192)
        rate = op.flops / model.times(d, [op]).time_s[0] / d.peak.flops_per_s("bf16")
        assert 0.4 < rate < 1.02, name


def test_backward_attention_costs_more_than_forward(model: KernelModel) -> None:
    for name in ("A100-SXM4-80GB", "H100", "B200"):
        forward, backward = model.times(device(name), EVERY_FAMILY[7:9]).time_s
        assert 1.5 < backward / forward < 5.0, name


def test_interval_of_an_unmeasured_device_is_wider(model: KernelModel) -> None:
    op = [EVERY_FAMILY[0]]
    measured, other = model.times(device("H100"), op), model.times(device("MI250"), op)
    assert np.log(other.hi_s / other.lo_s) > np.log(measured.hi_s / measured.lo_s)


@given(st.lists(st.sampled_from(EVERY_FAMILY), min_size=1, max_size=30))
@settings(max_examples=25, deadline=None)
def test_a_time_does_not_depend_on_the_batch(ops: list[KernelOp]) -> None:
    fresh = KernelModel(weight_files(None))
    together = fresh.times(device("A100-SXM4-80GB"), ops)
    alone = [KernelModel.load().times(device("A100-SXM4-80GB"), [op]).time_s[0] for op in ops]
    assert together.time_s.tolist() == alone


def test_software_is_a_choice(model: KernelModel) -> None:
    op = [Gemm(m=512, n=4096, k=4096)]
    times = {
        s: model.times(device("H100"), op, software=s).time_s[0]
        for s in (None, "trtllm-1.3.0rc20", "vidur")
    }
    assert len(set(times.values())) == 3


def test_no_ops_no_times(model: KernelModel) -> None:
    assert model.times(device("H100"), []).time_s.shape == (0,)


def test_calibrations_are_loaded_once() -> None:
    assert KernelModel.load() is KernelModel.load(None)


def test_three_thousand_new_ops_are_a_matter_of_milliseconds(model: KernelModel) -> None:
    """The budget is 30 ms on a quiet core; shared test machines get ten times that."""
    d = device("A100-SXM4-80GB")
    model.times(d, EVERY_FAMILY)
    best = np.inf
    for trial in range(3):
        rng = np.random.default_rng(trial)
        sizes = rng.integers(64, 8192, (1000, 3)).tolist()
        ops: list[KernelOp] = [Gemm(m=m, n=n, k=k) for m, n, k in sizes]
        ops += [MemoryBound(op="gelu", rows=m, hidden=n) for m, n, _ in sizes]
        ops += [Embedding(tokens=m, hidden=n, vocab=10 * k) for m, n, k in sizes]
        start = time.process_time()
        model.times(d, ops)
        best = min(best, time.process_time() - start)
    assert best < 0.3


def test_predicting_does_not_import_jax() -> None:
    code = (
        "import sys\nfrom perfmodel.catalog import device\nfrom perfmodel.cost import KernelModel\n"
        "from perfmodel.ops import Gemm\nKernelModel.load().times(device('H100'), [Gemm(m=64, n=64, k=64)])\n"
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
