"""Kernels that move tensors: norms beside what was measured, and no kernel faster than memory."""

import numpy as np
import pandas as pd
import pytest

from perfmodel.catalog import device
from perfmodel.cost import KernelModel
from perfmodel.ops import MemoryBound, Pass

ELEMENT_WISE = (
    "add",
    "silu_mul",
    "mul_scalar",
    "rope",
    "gelu",
    "dropout",
    "cross_entropy",
    "layer_norm",
)


@pytest.mark.parametrize(
    ("name", "pass_", "rows", "hidden", "measured_us"),
    [
        ("H200-SXM-141GB", "fwd", 16_384, 4096, 72.0),
        ("H200-SXM-141GB", "bwd", 8192, 8192, 114.0),
        ("GB200", "fwd", 8192, 8192, 45.0),
        ("GB200", "bwd", 8192, 8192, 77.0),
        ("GB200", "fwd", 2048, 4096, 9.0),
    ],
)
def test_fused_norms(name: str, pass_: Pass, rows: int, hidden: int, measured_us: float) -> None:
    """cuDNN's RMS norms (NVIDIA/cudnn-frontend 1.19.0, benchmark/norms); a layer norm moves as
    much."""
    ops = [
        MemoryBound(op=op, rows=rows, hidden=hidden, pass_=pass_)
        for op in ("rms_norm", "layer_norm")
    ]
    rms_s, layer_s = KernelModel.load().times(device(name), ops).time_s
    assert rms_s == layer_s == pytest.approx(measured_us * 1e-6, rel=0.15)


def test_backward_of_norms_depends_on_whose_it_is() -> None:
    row = {
        "op_family": "memory",
        "op": "rms_norm",
        "dtype": "bf16",
        "rows": 8192,
        "hidden": 8192,
        "n_inputs": 1,
    }
    softwares = ("cudnn;cudnn-1.19.0", "torch_compile;cudnn-1.19.0", "pytorch;cudnn-1.19.0")
    table = pd.DataFrame(
        [
            row | {"source": "lab", "software": s, "device": "GB200", "pass": "bwd", "time_us": 1.0}
            for s in softwares
        ]
    )
    times_s = KernelModel.load().table_times(table).time_s
    assert times_s == pytest.approx([77e-6, 163e-6, 177e-6], rel=0.2)


@pytest.mark.parametrize("name", ["A100", "H100", "H200", "B200", "GB200"])
def test_long_streams_are_no_faster_than_memory(name: str) -> None:
    at = device(name)
    ops = [
        MemoryBound(
            op=op,
            rows=16_384,
            hidden=16_384,
            n_inputs=2 if op in ("add", "silu_mul") else 1,
            pass_=pass_,
        )
        for op in ELEMENT_WISE
        for pass_ in ("fwd", "bwd")
    ]
    least_s = np.array([op.bytes - at.l2_bytes for op in ops]) / at.memory_bandwidth_bytes_per_s
    assert (KernelModel.load().times(at, ops).time_s > least_s).all()
