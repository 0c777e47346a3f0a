"""Products of a device that no table times reach what its best product is known to."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.catalog import device
from perfmodel.cost import KernelModel
from perfmodel.errors import PerfModelError
from perfmodel.ops import Gemm, MemoryBound

GAUDI = device("Gaudi2")
SIZES = (256, 1024, 4096, 8192, 16384)


@pytest.mark.parametrize("name", ["Gaudi2", "MI325X", "MI350X", "MI355X"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_best_product_reaches_its_share_and_others_gain_as_much(name, dtype):
    products = [Gemm(dtype=dtype, m=size, n=size, k=size) for size in SIZES]
    model, told = KernelModel.load(), device(name)
    reached = model.times(told, products).time_s
    plain = model.times(replace(told, reached_share=None), products).time_s
    rates = np.array([op.flops for op in products]) / reached
    best = told.reached_share * getattr(told.peak, dtype)
    if dtype == "bf16":
        assert rates.max() == pytest.approx(best, rel=1e-6)
        assert np.ptp(plain / reached) < 1e-6
    else:  # in 8 bits no product takes less than half of what it takes in 16
        assert 0.9 * best < rates.max() <= best * (1 + 1e-6)
    assert (plain > reached).all()


def test_what_is_no_product_is_as_it_was_and_a_low_share_slows_nothing():
    model, norm = KernelModel.load(), MemoryBound(op="layer_norm", rows=4096, hidden=4096)
    slow, plain = (replace(GAUDI, reached_share=share) for share in (0.1, None))
    for op in (norm, Gemm(m=4096, n=4096, k=4096)):
        assert model.times(slow, [op]).time_s[0] == pytest.approx(
            model.times(plain, [op]).time_s[0]
        )


@pytest.mark.parametrize("share", [0.0, 1.2])
def test_shares_are_of_the_peak(share):
    with pytest.raises(PerfModelError, match="reached_share"):
        replace(GAUDI, reached_share=share)
