"""What only inference has: rooflines of decoding, narrow weights, one-shot all-reduces."""

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.cost import CollectiveModel, EventTimes, KernelModel, inference_times
from perfmodel.ops import LATENT_DECODE, Attention, Collective, Gemm, Op

CLUSTER = catalog.cluster("dgx-h100")
DEVICE = CLUSTER.device


def times(*ops: Op, stored_bytes: float = 2.0) -> EventTimes:
    return inference_times(
        ops, [stored_bytes] * len(ops), CLUSTER, KernelModel.load(), CollectiveModel.load()
    )


def latent(batch: int, tokens: int, heads: int = 128) -> Attention:
    return Attention(
        batch=batch,
        heads=heads,
        kv_heads=1,
        seq_q=1,
        seq_kv=tokens,
        head_dim=576,
        head_dim_v=512,
        phase=LATENT_DECODE,
    )


def test_compressed_cache_is_read_once_for_all_heads():
    """Few heads: 0.9 of the bandwidth for 576 elements a token; many: 0.67 of the peak for 2 * 128
    * (576 + 512) operations a token (FlashMLA's two rates)."""
    few, many = times(latent(256, 16384, heads=16), latent(256, 16384)).time_s
    cache_bytes = 256 * 16384 * 576 * 2
    assert few == pytest.approx(cache_bytes / (0.9 * DEVICE.memory_bandwidth_bytes_per_s), rel=0.01)
    assert many == pytest.approx(
        256 * 16384 * 2 * 128 * 1088 / (0.67 * DEVICE.peak.flops_per_s("bf16")), rel=0.1
    )


def test_weights_are_read_from_memory_not_from_the_cache_of_the_benchmark():
    # 16 MiB of weights, which H100's L2 cache holds
    product = Gemm(dtype="fp8", m=1, n=4096, k=4096)
    least_s = 4096 * 4096 / DEVICE.memory_bandwidth_bytes_per_s
    assert times(product, stored_bytes=1.0).time_s[0] >= least_s


def test_narrow_weights_gain_where_memory_is_the_bound():
    small, large = Gemm(m=8, n=8192, k=8192), Gemm(m=8192, n=8192, k=8192)
    wide, narrow = times(small, large).time_s, times(small, large, stored_bytes=0.5).time_s
    assert 0.25 < narrow[0] / wide[0] < 0.5
    assert narrow[1] / wide[1] == pytest.approx(1.0, abs=0.02)


def test_small_sums_take_one_shot_and_large_ones_do_not():
    sums = [
        Collective(collective="all_reduce", bytes=float(2**i), num_ranks=8, ranks_per_node=8)
        for i in range(8, 30)
    ]
    found = times(*sums).time_s
    alone = CollectiveModel.load().times(CLUSTER, sums).time_s
    assert found[0] < 6e-6 < alone[0]
    assert found[-1] == alone[-1]
    assert (found <= alone).all()
    assert (np.diff(found) >= 0).all()


def test_sums_between_nodes_are_no_one_shots():
    op = Collective(collective="all_reduce", bytes=1024.0, num_ranks=16, ranks_per_node=8, level=1)
    assert times(op).time_s[0] == CollectiveModel.load().times(CLUSTER, [op]).time_s[0]
