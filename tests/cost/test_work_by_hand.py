"""FLOPs and bytes of kernels of every family against loops over what they compute and move."""

from math import exp

import pytest

from perfmodel.ops import (
    NUMBERS,
    Attention,
    Collective,
    Convolution,
    Embedding,
    Gemm,
    MemoryBound,
    MoE,
    OptimizerStep,
    Recurrence,
    family_with_bmm,
)


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2), ("fp8", 1)])
@pytest.mark.parametrize("pass_", ["fwd", "dgrad", "wgrad"])
def test_a_product_reads_both_operands_and_writes_its_result(dtype: str, size: int, pass_) -> None:
    op = Gemm(dtype=dtype, m=30, n=50, k=70, pass_=pass_)
    assert op.flops == 2 * 30 * 50 * 70
    assert op.bytes == (30 * 70 + 70 * 50 + 30 * 50) * size


def test_products_of_a_batch_and_of_groups_add_up() -> None:
    one = Gemm(m=30, n=50, k=70)
    for op in (
        Gemm(op="bmm", m=30, n=50, k=70, batch=6),
        Gemm(op="grouped_linear", m=30, n=50, k=70, groups=6),
    ):
        assert (op.flops, op.bytes) == (6 * one.flops, 6 * one.bytes)


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_an_accumulated_weight_gradient_reads_and_writes_its_sum_in_fp32(
    dtype: str, size: int
) -> None:
    """In place of a result written once in the narrow type."""
    op = Gemm(dtype=dtype, m=30, n=50, k=70, pass_="wgrad", accumulate=True)
    assert op.bytes == (30 * 70 + 70 * 50) * size + 30 * 50 * (4 + 4)


def test_both_gradients_are_two_products_of_which_the_weight_s_accumulates() -> None:
    forward, both = (Gemm(m=30, n=50, k=70, pass_=name) for name in ("fwd", "bwd"))
    assert (both.flops, both.bytes) == (2 * forward.flops, 2 * forward.bytes)
    added = Gemm(m=30, n=50, k=70, pass_="bwd", accumulate=True)
    weights = 70 * 50
    assert added.bytes == both.bytes - weights * 2 + weights * (4 + 4)


def visible_pairs(queries: int, keys: int, causal: bool, window: int) -> int:
    """The last query stands at the last key."""
    pairs = 0
    for query in range(queries):
        at = keys - queries + query
        for key in range(keys):
            seen = key <= at if causal else True
            pairs += seen and (not window or key > at - window)
    return pairs


def attention(queries: int, keys: int, **fields) -> Attention:
    shape = {
        "batch": 3,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 16,
        "seq_q": queries,
        "seq_kv": keys,
    }
    return Attention(**(shape | fields))


@pytest.mark.parametrize(("queries", "keys"), [(32, 32), (1, 40), (16, 48)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_multiplies_scores_and_values_of_visible_pairs(
    queries: int, keys: int, causal: bool
) -> None:
    op = attention(queries, keys, causal=causal)
    pairs = visible_pairs(queries, keys, causal, 0)
    assert op.flops == 2 * 3 * 8 * pairs * (16 + 16)
    assert op.bytes == 3 * (8 * queries + 2 * keys) * (16 + 16) * 2
    wider_values = attention(queries, keys, causal=causal, head_dim_v=24)
    assert wider_values.flops == 2 * 3 * 8 * pairs * (16 + 24)
    assert wider_values.bytes == 3 * (8 * queries + 2 * keys) * (16 + 24) * 2


def test_backward_of_attention_has_five_products_for_two() -> None:
    forward, backward = attention(32, 32), attention(32, 32, pass_="bwd")
    assert (backward.flops, backward.bytes) == (2.5 * forward.flops, 2.5 * forward.bytes)


@pytest.mark.parametrize("window", [4, 31, 32, 33])
def test_a_sliding_window_bounds_what_queries_see_and_read(window: int) -> None:
    """As a rectangle: a window's worth of keys for every query, and never more than the mask
    shows."""
    op, full = attention(32, 32, window=window), attention(32, 32)
    pairs = min(32 * window, 32 * 33 // 2) if window < 32 else 32 * 33 // 2
    assert op.flops == 2 * 3 * 8 * pairs * (16 + 16)
    assert op.bytes == full.bytes
    generated, all_keys = attention(1, 320, window=window), attention(1, 320)
    assert generated.flops == all_keys.flops * window / 320
    assert generated.bytes == 3 * (8 * 1 + 2 * window) * (16 + 16) * 2


def test_decoding_sequences_beside_a_prompt_add_a_query_each() -> None:
    """Rows of tables state them: three sequences of 500 tokens share the kernel of a prompt."""
    op = attention(32, 32)
    alone, mixed = (
        op.work(NUMBERS, op.shape() | beside)
        for beside in ({}, {"mixed_n_decode": 3, "mixed_kv_decode": 500})
    )
    assert mixed.flops - alone.flops == 2 * 8 * 3 * 500 * (16 + 16)
    assert mixed.bytes - alone.bytes == (8 * 3 + 2 * 3 * 500) * (16 + 16) * 2


def test_batched_products_are_a_family_of_their_own_to_runs() -> None:
    ops = (
        Gemm(m=1, n=1, k=1),
        Gemm(op="bmm", m=1, n=1, k=1),
        Gemm(op="grouped_linear", m=1, n=1, k=1),
        attention(1, 1),
    )
    assert [family_with_bmm(op) for op in ops] == ["gemm", "bmm", "gemm", "attention"]


def test_element_wise_kernels_move_inputs_and_output() -> None:
    for n_inputs in (1, 2, 3):
        forward, backward = (
            MemoryBound(op="add", rows=6, hidden=10, n_inputs=n_inputs, pass_=name)
            for name in ("fwd", "bwd")
        )
        assert (forward.flops, forward.bytes) == (60, 60 * (n_inputs + 1) * 2)
        assert (backward.flops, backward.bytes) == (60, 60 * (n_inputs + 2) * 2)


def test_embeddings_move_rows_and_not_the_table() -> None:
    forward, backward = (
        Embedding(tokens=6, hidden=10, vocab=1000, pass_=name) for name in ("fwd", "bwd")
    )
    assert (forward.flops, forward.bytes) == (60, 60 * 2 * 2)
    assert (backward.flops, backward.bytes) == (60, 60 * 3 * 2)


def test_updates_move_what_they_say_per_parameter() -> None:
    op = OptimizerStep(n_params=1000, bytes_per_param=42.0)
    assert (op.flops, op.bytes) == (12 * 1000, 42 * 1000)


@pytest.mark.parametrize(
    ("pad", "stride", "kernel", "groups"), [(0, 1, 1, 1), (1, 1, 3, 1), (3, 2, 7, 1), (1, 2, 3, 4)]
)
def test_convolutions_multiply_every_place_of_their_kernel(
    pad: int, stride: int, kernel: int, groups: int
) -> None:
    height, width, c_in, c_out, batch = 20, 14, 8, 12, 2
    fields = {
        "batch": batch,
        "c_in": c_in,
        "h_in": height,
        "w_in": width,
        "c_out": c_out,
        "groups": groups,
    }
    square = {
        "k_h": kernel,
        "k_w": kernel,
        "stride_h": stride,
        "stride_w": stride,
        "pad_h": pad,
        "pad_w": pad,
    }
    op = Convolution(**fields, **square)
    rows, columns = (len(range(-pad, size + pad - kernel + 1, stride)) for size in (height, width))
    assert (op.h_out, op.w_out) == (rows, columns)
    weights = c_out * (c_in // groups) * kernel * kernel
    assert op.flops == 2 * batch * rows * columns * weights
    image, result = batch * c_in * height * width, batch * c_out * rows * columns
    assert op.bytes == (image + weights + result) * 4
    both = Convolution(**fields, **square, pass_="bwd")
    assert (both.flops, both.bytes) == (2 * op.flops, 2 * op.bytes)


def test_convolutions_that_are_no_squares() -> None:
    op = Convolution(
        batch=2,
        c_in=8,
        h_in=20,
        w_in=14,
        c_out=12,
        k_h=5,
        k_w=3,
        stride_h=3,
        stride_w=2,
        pad_h=2,
        pad_w=0,
    )
    assert (op.h_out, op.w_out) == (len(range(-2, 20 + 2 - 5 + 1, 3)), len(range(0, 14 - 3 + 1, 2)))
    assert op.flops == 2 * 2 * op.h_out * op.w_out * 12 * 8 * 5 * 3


@pytest.mark.parametrize(("name", "products"), [("moe", 3), ("moe_nongated", 2)])
@pytest.mark.parametrize(("tokens", "ranks"), [(4096, 1), (4096, 4), (1, 4)])
def test_experts_read_the_weights_of_those_that_are_hit(
    name: str, products: int, tokens: int, ranks: int
) -> None:
    op = MoE(
        op=name, tokens=tokens, hidden=32, inter=48, topk=2, experts=16, moe_ep=ranks, moe_tp=2
    )
    copies, inner, local = tokens * 2 / ranks, 48 / 2, 16 / ranks
    assert op.flops == pytest.approx(2 * products * copies * 32 * inner)
    hit = max(min(local, local * (1 - exp(-copies / local)) + 1e-3), 1.0)
    weights = products * hit * 32 * inner
    assert op.bytes == pytest.approx((weights + copies * (2 * 32 + 3 * inner)) * 2)
    both = MoE(
        op=name,
        tokens=tokens,
        hidden=32,
        inter=48,
        topk=2,
        experts=16,
        moe_ep=ranks,
        moe_tp=2,
        pass_="bwd",
    )
    assert (both.flops, both.bytes) == pytest.approx((2 * op.flops, 2 * op.bytes))


def test_recurrences_multiply_and_move_per_token() -> None:
    forward, backward = (
        Recurrence(
            op="state_space", tokens=64, products_per_token=100, bytes_per_token=30, pass_=name
        )
        for name in ("fwd", "bwd")
    )
    assert (forward.flops, forward.bytes) == (2 * 64 * 100, 64 * 30)
    assert (backward.flops, backward.bytes) == (2 * 2 * 64 * 100, 64 * 30)


def test_kernels_are_called_by_their_shape() -> None:
    assert Gemm(m=3, n=5, k=7).label == "linear 3x5x7 fwd"
    assert (
        Gemm(op="grouped_linear", m=3, n=5, k=7, groups=6, pass_="wgrad").label
        == "grouped_linear 6x3x5x7 wgrad"
    )
    assert Gemm(op="bmm", m=3, n=5, k=7, batch=2).label == "bmm 2x3x5x7 fwd"
    assert attention(32, 48).label == "attention b3 h8/2 q32 kv48 d16 fwd"


@pytest.mark.parametrize("ranks_per_node", [1, 3, 8])
def test_a_collective_lies_on_the_nodes_that_hold_its_ranks(ranks_per_node: int) -> None:
    """Also where the last node holds fewer of them than the others."""
    for num_ranks in range(max(2, ranks_per_node), 18):
        op = Collective(
            collective="all_reduce", bytes=1e6, num_ranks=num_ranks, ranks_per_node=ranks_per_node
        )
        nodes = {rank // ranks_per_node for rank in range(num_ranks)}
        assert op.num_nodes == len(nodes)
        place = "intra-node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        assert op.label == f"all_reduce 1 MB x{num_ranks} ({place})"
