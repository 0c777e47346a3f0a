"""Element types that nobody measured run at the share of the roofline that the nearest measured one reaches."""

import itertools

import numpy as np
import pytest

from perfmodel import catalog, predict
from perfmodel.cost import KernelModel
from perfmodel.errors import PerfModelError
from perfmodel.ops import Gemm
from perfmodel.spec import Job

SHAPE = {"m": 8192, "n": 8192, "k": 8192}


@pytest.mark.parametrize(
    ("device", "dtype", "near"), [("GB200", "fp4", "fp8"), ("H100", "int8", "fp8"), ("TPU-v5p", "int8", "bf16")]
)
def test_a_large_product_gains_what_the_peak_does(device, dtype, near):
    device = catalog.device(device)
    own, measured = (KernelModel.load().times(device, [Gemm(dtype=name, **SHAPE)]) for name in (dtype, near))
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
        times_s = KernelModel.load().times(device, [Gemm(dtype=name, **shape) for name in types]).time_s
        for narrow_s, wide_s in itertools.pairwise(times_s):
            assert wide_s / 2 * (1 - 1e-9) <= narrow_s <= wide_s * (1 + 1e-9)


def test_a_device_without_the_type_refuses_it():
    def run(cluster, dtype):
        return predict("gpt3-1.3b", cluster, "tp=8", global_batch=8, job=Job(global_batch=8, seq_len=2048, dtype=dtype))

    with pytest.raises(PerfModelError, match="has no fp4"):
        run("dgx-h100", "fp4")
    assert run("hgx-b200", "fp4").step_time_s <= run("hgx-b200", "fp8").step_time_s
