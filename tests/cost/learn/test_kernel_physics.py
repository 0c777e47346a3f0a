"""The vectorised formulas against the ops' own, and NumPy against JAX."""

from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.catalog import device
from perfmodel.cost import KernelModel
from perfmodel.cost.learn import kernel_physics
from perfmodel.cost.learn.parameters import join_floor, kernel_share_of_time
from perfmodel.cost.learn.rows import machine_of, rows_from_ops, rows_from_table, shape_with_flags
from perfmodel.cost.learn.stack import Figures
from perfmodel.ingest import clean_kernels
from perfmodel.ops import (
    FAMILIES,
    Attention,
    Convolution,
    Embedding,
    Gemm,
    KernelOp,
    MemoryBound,
    MoE,
    OptimizerStep,
    Physics,
)
from perfmodel.ops.physics import Machine, cached_share, compute_seconds, memory_seconds

FIGURES = Figures.of(device("A100-SXM4-80GB"))
SIZE = st.integers(1, 4096)
DTYPES = st.sampled_from(["bf16", "fp16", "fp32", "tf32", "fp64", "fp8", "int8"])

gemms = st.builds(
    Gemm,
    op=st.sampled_from(["linear", "bmm", "grouped_linear"]),
    m=SIZE,
    n=SIZE,
    k=SIZE,
    batch=st.integers(1, 64),
    groups=st.integers(1, 16),
    dtype=DTYPES,
    accumulate=st.booleans(),
    pass_=st.sampled_from(["fwd", "bwd", "dgrad", "wgrad", "bwd_one_gemm"]),
)
attentions = st.builds(
    Attention,
    batch=SIZE,
    heads=st.sampled_from([8, 16, 32]),
    kv_heads=st.sampled_from([1, 4, 8]),
    seq_q=st.one_of(SIZE, st.just(1)),
    seq_kv=st.one_of(SIZE, st.just(1)),
    head_dim=st.sampled_from([64, 128]),
    head_dim_v=st.sampled_from([0, 64, 512]),
    causal=st.booleans(),
    window=st.one_of(st.just(0), SIZE),
    dtype=DTYPES,
    phase=st.sampled_from(["training", "prefill", "decode"]),
    pass_=st.sampled_from(["fwd", "bwd"]),
)
memory = st.builds(
    MemoryBound,
    op=st.sampled_from(["gelu", "layer_norm", "never_heard_of"]),
    rows=SIZE,
    hidden=SIZE,
    n_inputs=st.integers(1, 4),
    dtype=DTYPES,
    pass_=st.sampled_from(["fwd", "bwd"]),
)
embeddings = st.builds(
    Embedding,
    tokens=SIZE,
    hidden=SIZE,
    vocab=SIZE,
    dtype=DTYPES,
    pass_=st.sampled_from(["fwd", "bwd"]),
)
optimisers = st.builds(
    OptimizerStep,
    n_params=st.integers(1, 10**10),
    tensors=SIZE,
    bytes_per_param=st.floats(2, 40),
    dtype=DTYPES,
)
convolutions = st.builds(
    Convolution,
    batch=st.integers(1, 64),
    c_in=SIZE,
    h_in=st.integers(8, 64),
    w_in=st.integers(8, 64),
    c_out=SIZE,
    k_h=st.integers(1, 7),
    k_w=st.integers(1, 7),
    stride_h=st.integers(1, 3),
    stride_w=st.integers(1, 3),
    pad_h=st.integers(0, 3),
    pad_w=st.integers(0, 3),
    groups=st.sampled_from([1, 2, 4]),
    dtype=DTYPES,
    pass_=st.sampled_from(["fwd", "bwd", "dgrad", "wgrad"]),
)
experts = st.builds(
    MoE,
    op=st.sampled_from(["moe", "moe_ffn", "moe_nongated"]),
    tokens=SIZE,
    hidden=SIZE,
    inter=SIZE,
    topk=st.integers(1, 8),
    experts=st.sampled_from([1, 2, 8, 64, 256]),
    moe_tp=st.sampled_from([1, 2, 8]),
    moe_ep=st.sampled_from([1, 2, 8]),
    distribution=st.sampled_from(["balanced", "power_law_1.2"]),
    dtype=DTYPES,
    pass_=st.sampled_from(["fwd", "bwd"]),
)


@given(st.one_of(gemms, attentions, memory, embeddings, optimisers, convolutions, experts))
@settings(max_examples=150, deadline=None)
def test_flops_and_bytes_equal_those_of_the_op(op: KernelOp) -> None:
    physics, _ = kernel_physics(FIGURES, rows_from_ops([op]))
    np.testing.assert_allclose(physics.bytes, op.bytes, rtol=1e-12)
    np.testing.assert_allclose(physics.flops, op.flops, rtol=1e-12)


def test_work_of_windows_and_of_few_tokens_over_many_experts() -> None:
    """A decoded token reads the keys of its window; a few tokens read the weights of the experts
    that they hit."""
    short, window = (
        Attention(
            batch=8,
            heads=32,
            kv_heads=8,
            seq_q=1,
            seq_kv=kv,
            head_dim=128,
            window=w,
            phase="decode",
        )
        for kv, w in ((1024, 0), (8192, 1024))
    )
    assert short.bytes == window.bytes
    one = MoE(tokens=1, hidden=4096, inter=14336, topk=1, experts=256)
    assert one.bytes == pytest.approx((3 * 4096 * 14336 + 2 * 4096 + 3 * 14336) * 2)
    gated = MoE(tokens=4096, hidden=4096, inter=14336, topk=2, experts=8)
    plain = replace(gated, op="moe_nongated")
    assert plain.flops == pytest.approx(2 / 3 * gated.flops)


@given(sequences=st.integers(1, 64), keys=st.integers(1, 4096))
def test_decoding_sequences_beside_a_prompt_count_from_none_on(sequences: int, keys: int) -> None:
    """Rows of tables state them; a kernel without any is that of the prompt alone, in everything
    that is told of it."""
    op = Attention(batch=1, heads=32, kv_heads=8, seq_q=512, seq_kv=512, head_dim=128)
    row = {
        "device": "A100-SXM4-80GB",
        "op_family": "attention",
        "source": "",
        "software": "",
        "pass": "fwd",
    }
    sizes = ("op", "dtype", "batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim")
    row |= {name: getattr(op, name) for name in sizes}
    beside = {"mixed_n_decode": sequences, "mixed_kv_decode": keys}
    columns = [
        row | {"time_us": 1.0, "causal": 1, "phase": "prefill"} | more for more in ({}, beside)
    ]
    rows, _ = rows_from_table(clean_kernels(pd.DataFrame(columns)), "attention")
    features = np.stack(kernel_physics(FIGURES, rows)[0].features)
    together = sequences * keys
    added = {
        np.log2(1 + sequences),
        np.log2(1 + keys),
        np.log2(1 + together),
        together / (together + 512),
    }
    moved = {*np.round(features[:, 1] - features[:, 0], 6)}
    assert {*np.round([*added], 6)} <= moved


def test_wave_quantisation_counts_whole_waves() -> None:
    """109 tiles on 108 multiprocessors cost twice what 108 do (closed form)."""
    one = [Gemm(m=128 * 108, n=128, k=8192), Gemm(m=128 * 109, n=128, k=8192)]
    physics, machine = kernel_physics(FIGURES, rows_from_ops(one))
    assert np.all(machine.units == 108)
    assert physics.quantised_flops[0] == physics.flops[0]
    assert physics.quantised_flops[1] > 1.05 * physics.flops[1]
    assert np.all(physics.quantised_flops >= physics.flops)


def physics_on_a100(op: KernelOp) -> Physics:
    return kernel_physics(FIGURES, rows_from_ops([op]))[0]


MOST_PADDING = {"gemm": 4, "conv": 4, "moe": 8, "attention": 64 * 10}
"""How many times its FLOPs a kernel keeps a device busy at most: few tiles are split over idle
multiprocessors; of attention the tile is of 64 queries, and a tenth of a wave is filled at
least."""


@given(st.one_of(gemms, attentions, convolutions, experts))
@settings(max_examples=200)
def test_padding_costs_something_and_not_everything(op: KernelOp) -> None:
    physics = physics_on_a100(op)
    padded = float(np.squeeze(physics.quantised_flops / physics.flops))
    assert 1 - 1e-12 <= padded <= MOST_PADDING[op.family] * (1 + 1e-12)


FULL = {
    "batch": 27,
    "heads": 32,
    "kv_heads": 1,
    "head_dim": 64,
    "causal": False,
    "seq_q": 1024,
    "seq_kv": 1024,
}
"""Attention of 27 * 32 * 8 = 64 * 108 blocks of 128 queries: whole tiles, and whole waves."""


def test_a_filled_wave_of_whole_query_tiles_wastes_nothing_and_a_query_more_costs_a_tile() -> None:
    full = physics_on_a100(Attention(**FULL))
    assert full.quantised_flops == full.flops
    more = physics_on_a100(Attention(**FULL | {"seq_q": 1025, "batch": 3 * 27}))
    # 9 blocks of 128 queries a head make whole waves too, 17 tiles of 64 cover 1,025 queries
    assert more.quantised_flops == pytest.approx(more.flops * 17 * 64 / 1025)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_decoding_reads_keys_once_for_as_many_heads_as_a_tile_packs(kv_heads: int) -> None:
    """32 heads of queries share a read of their keys; with one more each head reads them itself, on
    vector lanes."""
    shape = {
        "batch": 64,
        "kv_heads": kv_heads,
        "seq_q": 1,
        "seq_kv": 4096,
        "head_dim": 128,
        "phase": "decode",
    }
    packed, beyond = (physics_on_a100(Attention(**shape, heads=n * kv_heads)) for n in (32, 33))
    # half of the FLOPs go by vector lanes, and each block costs what starting it does: one per head
    # that reads
    block = (packed.vector_ops - packed.flops / 2) / (64 * kv_heads)
    assert block > 0
    assert beyond.vector_ops == pytest.approx(8 * beyond.flops / 2 + block * 64 * 33 * kv_heads)


IMAGE = {
    "batch": 5,
    "c_in": 100,
    "h_in": 27,
    "w_in": 34,
    "c_out": 72,
    "k_h": 3,
    "k_w": 3,
    "pad_h": 1,
    "pad_w": 1,
}


def assert_among(expected: list[float], features: list[np.ndarray]) -> None:
    """Each expected value is one of the features, as often as it is expected."""
    values = sorted(float(np.squeeze(feature)) for feature in features)
    for value in expected:
        place = min(range(len(values)), key=lambda i: abs(values[i] - value))
        assert values.pop(place) == pytest.approx(value, rel=1e-9)


def test_channels_fill_a_share_of_their_tiles() -> None:
    """100 channels are 13 tiles of 8, 4 of 32, 2 of 64, 1 of 128; 72 are 9, 3, 2 and 1."""
    in_shares = [100 / (13 * 8), 100 / (4 * 32), 100 / (2 * 64), 100 / 128]
    out_shares = [72 / (9 * 8), 72 / (3 * 32), 72 / (2 * 64), 72 / 128]
    assert_among(in_shares + out_shares, physics_on_a100(Convolution(**IMAGE)).features)


@pytest.mark.parametrize(
    ("kernel", "saved"), [(3, {2: 36 / 16, 4: 144 / 36}), (5, {2: 100 / 36, 4: 400 / 64})]
)
def test_transforms_of_filled_tiles_save_what_their_authors_say(
    kernel: int, saved: dict[int, float]
) -> None:
    """F(2 x 2, 3 x 3) has 16 products for 36, F(4 x 4, 3 x 3) 36 for 144 (Lavin and Gray, section
    4.1)."""
    image = IMAGE | {
        "batch": 32,
        "h_in": 24,
        "w_in": 32,
        "c_out": 128,
        "k_h": kernel,
        "k_w": kernel,
    }
    op = Convolution(**image | {"pad_h": kernel // 2, "pad_w": kernel // 2}, dtype="fp16")
    physics, machine = kernel_physics(FIGURES, rows_from_ops([op]))
    expected = []
    for tile, saving in saved.items():
        points, tiles = (tile + kernel - 1) ** 2, 32 * (24 // tile) * (32 // tile)
        moved_bytes = points * (tiles * (100 + 128) + 100 * 128) * 2 * 2
        blocks = tiles / 32 * 128 / 64 / 108
        expected += [np.log2(op.flops / saving / machine.peak[0] * 1e6)]
        expected += [
            np.log2(moved_bytes / machine.bandwidth[0] * 1e6),
            np.log2(blocks),
            blocks / np.ceil(blocks),
            1.0,
        ]
    assert_among(expected, physics.features)


def test_transforms_pad_images_to_whole_tiles() -> None:
    """27 x 34 pixels are 14 x 17 tiles of 2, 7 x 9 of 4; 5 images make 1,190 and 315 of them, and
    38 and 10 blocks."""
    op = Convolution(**IMAGE, dtype="fp16")
    physics, machine = kernel_physics(FIGURES, rows_from_ops([op]))
    expected = [27 * 34 / (14 * 17 * 4), 27 * 34 / (7 * 9 * 16)]
    for points, blocks_of_tiles in ((16, 38), (36, 10)):
        fused_flops = 2 * points * (blocks_of_tiles * 32) * (2 * 64) * 100
        expected += [
            np.log2(fused_flops / machine.peak[0] * 1e6),
            np.log2(blocks_of_tiles * 2 / 108),
        ]
    assert_among(expected, physics.features)


@pytest.mark.parametrize(
    "op",
    [
        Gemm(m=100, n=200, k=300),
        Attention(batch=2, heads=8, kv_heads=8, seq_q=300, seq_kv=300, head_dim=64),
        MemoryBound(op="gelu", rows=100, hidden=77),
        Embedding(tokens=9, hidden=64, vocab=100),
        OptimizerStep(n_params=10**6),
        Convolution(batch=2, c_in=3, h_in=32, w_in=32, c_out=8, k_h=3, k_w=3),
        MoE(tokens=64, hidden=512, inter=1024, topk=2, experts=8),
    ],
    ids=lambda op: op.family,
)
def test_numpy_and_jax_agree(op: KernelOp) -> None:
    rows = rows_from_ops([op, op])
    machine = machine_of([FIGURES], np.zeros(2, int), rows.dtypes)
    shape = shape_with_flags(rows)
    ours = FAMILIES[op.family].physics(np, shape, machine)
    with jax.enable_x64(True):
        theirs = FAMILIES[op.family].physics(jax.numpy, shape, machine)
    for a, b in zip(ours.features + ours.axes, theirs.features + theirs.axes, strict=True):
        np.testing.assert_allclose(
            np.broadcast_to(a, 2), np.broadcast_to(b, 2), rtol=1e-6, atol=1e-6
        )
    assert len(ours.axes) == len(FAMILIES[op.family].axes)


def test_traffic_within_the_cache_runs_at_its_rate() -> None:
    machine = Machine(
        np.float64(1e14), np.float64(1e12), np.float64(100), np.float64(4e7), np.float64(1e9)
    )
    small, large = 4e4, 4e10
    for moved, rate in ((small, 100 * 1e9 * 38), (large, 1e12)):
        physics = Physics(1.0, 1.0, moved, [], [], 0.0, cached_share(moved, machine))
        assert memory_seconds(np, physics, machine) == pytest.approx(moved / rate, rel=1e-3)


def test_vector_work_does_not_depend_on_the_tensor_peak() -> None:
    slow = Machine(
        np.float64(1e14), np.float64(1e12), np.float64(100), np.float64(4e7), np.float64(1e9)
    )
    physics = Physics(1.0, 0.0, 1.0, [], [], vector_ops=128e9)
    assert compute_seconds(np, physics, slow) == pytest.approx(0.01)
    assert compute_seconds(np, physics, slow._replace(peak=np.float64(1e15))) == pytest.approx(0.01)


def test_keys_of_a_whole_batch_become_those_of_one_sequence() -> None:
    """llmservingsim's decode rows on vllm: 64 keys over 4 sequences are 16 each and the token's
    own; over 128, none."""
    columns = {
        "source": "llmservingsim",
        "software": "vllm",
        "op": "flash_attention",
        "dtype": "bf16",
        "phase": "decode",
        "batch": [1, 4, 128],
        "heads": 32,
        "kv_heads": 8,
        "seq_q": 1,
        "seq_kv": 64,
        "head_dim": 128,
        "head_dim_v": 128,
        "causal": 1,
        "window": 0,
        "pass": "fwd",
    }
    rows, complete = rows_from_table(clean_kernels(pd.DataFrame(columns)), "attention")
    assert complete.all()
    assert rows.shape["seq_kv"].tolist() == [64, 17, 1]
    other, _ = rows_from_table(
        clean_kernels(pd.DataFrame(columns | {"software": "vllm-0.19.0"})), "attention"
    )
    assert other.shape["seq_kv"].tolist() == [64, 64, 64]


def test_a_time_behind_the_launch_tells_nothing_of_the_kernel() -> None:
    floor = np.log(100e-6)
    slope = jax.grad(lambda kernel: join_floor(jax.numpy, kernel, floor))
    for kernel_s in (1e-6, 60e-6, 100e-6, 150e-6, 1e-3):
        told = kernel_share_of_time(np, np.log(kernel_s), floor)
        assert told == pytest.approx(float(slope(np.log(kernel_s))), abs=1e-5)
    assert kernel_share_of_time(np, np.log(30e-6), floor) < 1e-4
    # timed without the host
    assert kernel_share_of_time(np, np.log(1e-6), np.log(1e-9)) == pytest.approx(1.0)


def test_fused_kernels_take_no_longer_than_their_parts() -> None:
    a100, kernels = device("A100-SXM4-80GB"), KernelModel.load()
    for rows, hidden in ((2048, 4096), (2048, 16384), (8192, 16384), (4096, 12288)):
        for direction in ("fwd", "bwd"):
            ops = [
                MemoryBound(op=op, rows=rows, hidden=hidden, pass_=direction)
                for op in ("bias_gelu", "gelu", "add")
            ]
            fused, gelu, add = kernels.times(a100, ops).time_s
            assert fused < 1.05 * (gelu + add), (rows, hidden, direction)
