"""Layers kernel by kernel: what every kind of layer computes, keeps and holds on one rank, written
out by hand.

A model with no two sizes alike stands for all: a size that is taken for another one shows in some
kernel.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hand_kernels import (
    BATCH,
    FFN,
    HEADS,
    KV,
    PLAIN,
    RANKS,
    TOKENS,
    D,
    H,
    Kernel,
    Rank,
    S,
    linear,
    listed,
    pointwise,
    retraced,
    weight_gradients,
)

from perfmodel.spec import Job, Transformer
from perfmodel.spec.parts import (
    AdaLN,
    DeltaNet,
    Experts,
    LatentAttention,
    Mamba,
    SelectiveScan,
    ShortConv,
)
from perfmodel.workload import BlockOps, Shard, blocks


class ByHand(NamedTuple):
    """A sub-layer without its norm and residual addition."""

    forward: list[Kernel]
    kept_bytes: float
    """For backward, without the input of the norm."""
    params: int
    backward: list[Kernel] | None = None
    """Gradients of inputs; None: the forward's kernels in reverse."""


def attention(rank: Rank, kv_heads: int, d_qk: int = D, d_v: int = D) -> Kernel:
    return ("flash_attention", BATCH, rank.heads, kv_heads, S, S, d_qk, d_v)


def layer_of(net: Transformer, rank: Rank = RANKS[0], **job: Any) -> BlockOps:
    shard = Shard(tp=rank.tp, sequence_parallel=rank.sequence_parallel, micro_batch=BATCH)
    made = blocks(net, Job(global_batch=BATCH, seq_len=S, **job), shard)
    return next(block for block, _ in made if block.is_layer)


# --- attention
# -----------------------------------------------------------------------------------------


def _grouped_queries(rank: Rank) -> ByHand:
    """Ainslie et al., arXiv 2305.13245: fewer heads of keys and values than of queries."""
    queries, keys = rank.heads * D, rank.kv_heads * D
    return ByHand(
        forward=[
            linear(TOKENS, queries + 2 * keys, H),
            attention(rank, rank.kv_heads),
            linear(TOKENS, H, queries),
        ],
        # input, queries, keys and values, a statistic of 4 bytes per query and head, the result
        kept_bytes=2 * (rank.rows * H + TOKENS * (queries + 2 * keys) + TOKENS * queries)
        + 4 * TOKENS * rank.heads,
        params=H * (queries + 2 * keys) + queries * H,
    )


def _inserted(
    by_hand: ByHand, place: int, *kernels: Kernel, kept_bytes: float = 0.0, params: int = 0
) -> ByHand:
    """The sub-layer with further kernels at a place."""
    forward = [*by_hand.forward[:place], *kernels, *by_hand.forward[place:]]
    return ByHand(forward, by_hand.kept_bytes + kept_bytes, by_hand.params + params)


def _rotated(rank: Rank, name: str = "rope") -> ByHand:
    """RoFormer, arXiv 2104.09864: queries and keys are rotated, which keeps nothing."""
    width = (rank.heads + rank.kv_heads) * D
    return _inserted(_grouped_queries(rank), 1, pointwise(name, TOKENS, width))


def _normed_by_head(rank: Rank) -> ByHand:
    """Qwen3: a norm of every head, with a scale of a head's size for queries and for keys."""
    heads = (rank.heads, rank.kv_heads)
    norms = [pointwise("layer_norm", TOKENS * n, D) for n in heads]
    return _inserted(
        _grouped_queries(rank), 1, *norms, kept_bytes=2 * TOKENS * sum(heads) * D, params=2 * D
    )


def _normed_at_once(rank: Rank) -> ByHand:
    """OLMo 2, arXiv 2501.00656: a norm over all heads of a rank."""
    heads = (rank.heads, rank.kv_heads)
    norms = [pointwise("layer_norm", TOKENS, n * D) for n in heads]
    width = sum(heads) * D
    return _inserted(_grouped_queries(rank), 1, *norms, kept_bytes=2 * TOKENS * width, params=width)


def _normed_before_output(rank: Rank) -> ByHand:
    """BitNet b1.58, arXiv 2504.12285, section 2: a norm of attention's result, which keeps its
    input as fused attention does."""
    width = rank.heads * D
    norm = pointwise("layer_norm", TOKENS, width)
    return _inserted(_grouped_queries(rank), 2, norm, kept_bytes=2 * TOKENS * width, params=width)


def _gated(rank: Rank) -> ByHand:
    """Qwen3-Next: the query projection makes a gate as wide as the queries, by whose sigmoid the
    result is multiplied; kept are the gate, with the queries, and the result before."""
    queries, keys = rank.heads * D, rank.kv_heads * D
    plain = _inserted(
        _grouped_queries(rank),
        2,
        pointwise("silu_mul", TOKENS, queries, 2),
        kept_bytes=2 * 2 * TOKENS * queries,
        params=H * queries,
    )
    return plain._replace(forward=[linear(TOKENS, 2 * queries + 2 * keys, H), *plain.forward[1:]])


def _gated_by_head(rank: Rank) -> ByHand:
    """Step 3.5: a gate for every head comes with queries, keys and values."""
    queries, keys = rank.heads * D, rank.kv_heads * D
    plain = _inserted(
        _grouped_queries(rank),
        2,
        pointwise("silu_mul", TOKENS, queries, 2),
        kept_bytes=2 * TOKENS * (rank.heads + queries),
        params=H * rank.heads,
    )
    return plain._replace(
        forward=[linear(TOKENS, queries + rank.heads + 2 * keys, H), *plain.forward[1:]]
    )


NARROW = 7
"""Elements of a head's values, fewer than of its queries and keys."""


def _narrow_values(rank: Rank) -> ByHand:
    """MiMo-V2: values, and what attention gives, are narrower than queries and keys."""
    queries, keys, values = rank.heads * D, rank.kv_heads * D, rank.kv_heads * NARROW
    result = rank.heads * NARROW
    return ByHand(
        forward=[
            linear(TOKENS, queries + keys + values, H),
            attention(rank, rank.kv_heads, D, NARROW),
            linear(TOKENS, H, result),
        ],
        kept_bytes=2 * (rank.rows * H + TOKENS * (queries + keys + values + result))
        + 4 * TOKENS * rank.heads,
        params=H * (queries + keys + values) + result * H,
    )


def _keys_as_values(rank: Rank) -> ByHand:
    """Gemma 4: one projection makes keys and values, so that the product of columns is narrower."""
    queries, keys = rank.heads * D, rank.kv_heads * D
    plain = _grouped_queries(rank)
    return ByHand(
        forward=[linear(TOKENS, queries + keys, H), *plain.forward[1:]],
        kept_bytes=plain.kept_bytes - 2 * TOKENS * keys,
        params=plain.params - H * keys,
    )


def _copied_into_place(rank: Rank) -> ByHand:
    """nanotron: queries, keys and values are copied at once, then keys and values twice more."""
    keys = 2 * rank.kv_heads * D
    widths = (rank.heads * D + keys, keys, keys)
    return _inserted(
        _grouped_queries(rank), 1, *(pointwise("mul_scalar", TOKENS, width) for width in widths)
    )


NOPE, ROPE, VALUES, Q_RANK, KV_RANK = 6, 4, 10, 18, 14


def _latent(rank: Rank, q_rank: int) -> ByHand:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: queries, and keys and values, through compressed
    ones.

    The products that compress run on a rank's rows; those that expand on all tokens. Keys of all
    heads share their rotated part, which a kernel appends.
    """
    heads, rows = rank.heads, rank.rows
    query = heads * (NOPE + ROPE)
    if q_rank:
        queries = [
            linear(rows, q_rank, H),
            pointwise("layer_norm", rows, q_rank),
            linear(TOKENS, query, q_rank),
        ]
        query_params = H * q_rank + q_rank + q_rank * query
    else:
        queries, query_params = [linear(TOKENS, query, H)], H * query
    expanded = heads * (NOPE + VALUES)
    keys_and_values = [
        linear(rows, KV_RANK + ROPE, H),
        pointwise("layer_norm", rows, KV_RANK),
        linear(TOKENS, expanded, KV_RANK),
        pointwise("rope", TOKENS, (heads + 1) * ROPE),
        pointwise("add", TOKENS, heads * (NOPE + ROPE)),
    ]
    # the input once; inputs of norms and of the products behind them; queries, keys and values as
    # attention takes them; its result and statistics
    kept = rows * (H + 2 * q_rank + 2 * KV_RANK) + TOKENS * (
        query + heads * (NOPE + ROPE + VALUES) + heads * VALUES
    )
    return ByHand(
        forward=[
            *queries,
            *keys_and_values,
            attention(rank, heads, NOPE + ROPE, VALUES),
            linear(TOKENS, H, heads * VALUES),
        ],
        kept_bytes=2 * kept + 4 * TOKENS * heads,
        params=query_params
        + H * (KV_RANK + ROPE)
        + KV_RANK
        + KV_RANK * expanded
        + heads * VALUES * H,
    )


def _latent_model(q_rank: int) -> dict[str, Any]:
    latent = LatentAttention(
        q_lora_rank=q_rank,
        kv_lora_rank=KV_RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUES,
    )
    return {"mixers": "*", "latent_attention": latent, "kv_heads": HEADS, "positions": "rope"}


# --- feed-forwards
# ---------------------------------------------------------------------------------------


def _feed_forward(
    kernels: list[tuple[str, int]], kept: int, *, gated: bool = False
) -> Callable[[Rank], ByHand]:
    """Two products around an activation, which keeps so many tensors of the inner size."""

    def by_hand(rank: Rank) -> ByHand:
        inner = FFN // rank.tp
        wide = 2 * inner if gated else inner
        between = [pointwise(name, TOKENS, inner, inputs) for name, inputs in kernels]
        return ByHand(
            forward=[linear(TOKENS, wide, H), *between, linear(TOKENS, H, inner)],
            kept_bytes=2 * (rank.rows * H + kept * TOKENS * inner + TOKENS * inner),
            params=H * wide + inner * H,
        )

    return by_hand


def _normed_activations(rank: Rank) -> ByHand:
    """BitNet b1.58: a norm of what the activation gives."""
    inner = FFN // rank.tp
    plain = _feed_forward([("silu_mul", 2)], 2, gated=True)(rank)
    return _inserted(
        plain,
        2,
        pointwise("layer_norm", TOKENS, inner),
        kept_bytes=2 * TOKENS * inner,
        params=inner,
    )


_GELU_WRITTEN_OUT = [
    ("pow_scalar", 1),
    ("mul_scalar", 1),
    ("add", 2),
    ("mul_scalar", 1),
    ("tanh", 1),
    ("add_scalar", 1),
    ("mul_scalar", 1),
    ("mul", 2),
]
"""0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), a kernel per sign."""


# --- mixers of hybrids
# -----------------------------------------------------------------------------------

STATE, GROUPS, M_HEADS, M_D, CHUNK = 16, 2, 6, 8, 32


def _mamba(rank: Rank, *, normed: bool = True) -> ByHand:
    """Mamba-2, arXiv 2405.21060: gate, convolved channels and a step per head from one product."""
    heads, groups = M_HEADS // rank.tp, GROUPS // rank.tp
    inner, sides = heads * M_D, groups * STATE
    convolved = inner + 2 * sides
    # the last chunk of 48 tokens is padded to a whole one
    padded = BATCH * 2 * CHUNK
    products = CHUNK * (sides + inner) + 2 * inner * STATE
    states, scores = inner * STATE / CHUNK, groups * CHUNK
    forward_bytes = 2 * (3 * inner + 4 * sides) + 4 * (3 * states + 2 * scores)
    backward_bytes = 2 * (11 * inner + 14 * sides) + 4 * (8.5 * states + 7 * scores)
    norms = [pointwise("layer_norm", TOKENS, inner)] if normed else []
    after = [pointwise("silu_mul", TOKENS, inner, 2), *norms, linear(TOKENS, H, inner)]
    before = [linear(TOKENS, inner + convolved + heads, H), pointwise("silu", TOKENS, convolved)]
    return ByHand(
        forward=[*before, ("state_space", padded, products, round(forward_bytes)), *after],
        # the convolution is computed again in backward
        backward=[
            *retraced(after),
            ("state_space", padded, products, round(backward_bytes)),
            pointwise("silu", TOKENS, convolved),
            *retraced(before),
        ],
        kept_bytes=2
        * (rank.rows * H + TOKENS * (inner + convolved + heads + convolved + inner + inner)),
        # with a filter and a bias per channel; decay, step and skip of each head
        params=H * (inner + convolved + heads)
        + convolved * (4 + 1)
        + 3 * heads
        + inner * normed
        + inner * H,
    )


SCANNED, STEP_RANK = 56, 22


def _selective_scan(rank: Rank, *, normed: bool) -> ByHand:
    """The first Mamba, arXiv 2312.00752, section 3: steps come from a narrow projection."""
    inner, projected = SCANNED // rank.tp, STEP_RANK + 2 * STATE
    norms = [pointwise("norm", TOKENS, projected)] if normed else []
    before = [linear(TOKENS, 2 * inner, H), pointwise("silu", TOKENS, inner)]
    steps = [linear(TOKENS, projected, inner), *norms, linear(TOKENS, inner, STEP_RANK)]
    products = 2 * inner * STATE
    return ByHand(
        forward=[
            *before,
            *steps,
            ("selective_scan", TOKENS, products, 2 * (5 * inner + 2 * STATE)),
            linear(TOKENS, H, inner),
        ],
        backward=[
            linear(TOKENS, inner, H),
            ("selective_scan", TOKENS, products, 2 * (12 * inner + 8 * STATE)),
            *retraced(steps),
            pointwise("silu", TOKENS, inner),
            *retraced(before),
        ],
        # input and output of the first product, what the convolution and the two projections take,
        # what the last takes
        kept_bytes=2 * (rank.rows * H + TOKENS * (2 * inner + inner + inner + STEP_RANK + inner)),
        params=H * 2 * inner
        + inner * (4 + 1)
        + inner * projected
        + projected * normed
        + STEP_RANK * inner
        + inner
        + inner * (STATE + 1)
        + inner * H,
    )


def _short_convolution(rank: Rank) -> ByHand:
    """LFM2, arXiv 2511.23404: two gates and a value from one product."""
    inner = H // rank.tp
    between = [pointwise("silu_mul", TOKENS, inner, 2), pointwise("silu", TOKENS, inner)]
    return ByHand(
        forward=[linear(TOKENS, 3 * inner, H), *between, linear(TOKENS, H, inner)],
        kept_bytes=2 * (rank.rows * H + TOKENS * (3 * inner + inner + inner)),
        params=H * 3 * inner + 3 * inner + inner * H,
    )


NET = DeltaNet(heads=4, key_heads=2, head_dim=10, key_dim=6, chunk=32)


def _delta_net(rank: Rank) -> ByHand:
    """Gated delta rule, arXiv 2412.06464, section 3.3, by chunks; the last one is padded."""
    heads, keys = NET.heads // rank.tp, NET.key_heads // rank.tp * NET.key_dim
    values = heads * NET.head_dim
    convolved = values + 2 * keys
    k, v, c, padded = NET.key_dim, NET.head_dim, CHUNK, BATCH * 2 * CHUNK
    # keys with keys, the inverse, what it makes of keys and values, scores, their product with
    # values, the state twice, and what is added to it
    per_chunk = (
        c * c * k + c * c * c + c * c * k + c * c * v + c * c * k + c * c * v + 3 * c * k * v
    )
    forward_bytes = 2 * (7 * k + 6 * v + 6 * c + 2 * k * v / c)
    backward_bytes = 2 * (20 * k + 15 * v + 2 * c + 4 * k * v / c)

    def rule(per_head: float) -> Kernel:
        return ("delta_rule", padded, heads * per_chunk // c, heads * round(per_head))

    before = [
        linear(TOKENS, convolved + values + 2 * heads, H),
        pointwise("silu", TOKENS, convolved),
        pointwise("norm", TOKENS, 2 * keys),
    ]
    after = [
        pointwise("layer_norm", TOKENS, values),
        pointwise("silu_mul", TOKENS, values, 2),
        linear(TOKENS, H, values),
    ]
    return ByHand(
        forward=[*before, rule(forward_bytes), *after],
        backward=[*retraced(after), rule(backward_bytes), *retraced(before)],
        kept_bytes=2
        * (rank.rows * H + TOKENS * (convolved + values + 2 * heads + convolved + values + values)),
        # a filter per channel, decay and step of each head, a norm of a head's size
        params=H * (convolved + values + 2 * heads)
        + 4 * convolved
        + 2 * heads
        + NET.head_dim
        + values * H,
    )


def _channel_decays(rank: Rank) -> ByHand:
    """Kimi Delta Attention with full projections, arXiv 2510.26692: a decay for every element of a
    key, which is read and whose gradient is written as often as the key is."""
    plain, heads = _delta_net(rank), NET.heads // rank.tp
    more = heads * (NET.key_dim - 1)
    convolved, values = plain.forward[1][2], heads * NET.head_dim
    wider = linear(TOKENS, convolved + values + 2 * heads + more, H)

    def rule(kernel: Kernel, reads: int) -> Kernel:
        *known, moved = kernel
        return (*known, moved + heads * 2 * reads * NET.key_dim)

    assert plain.backward is not None
    forward = [
        wider,
        *(rule(kernel, 7) if kernel[0] == "delta_rule" else kernel for kernel in plain.forward[1:]),
    ]
    rules = [
        rule(kernel, 20) if kernel[0] == "delta_rule" else kernel for kernel in plain.backward[:-1]
    ]
    return ByHand(
        forward=forward,
        backward=[*rules, *retraced([wider])],
        kept_bytes=plain.kept_bytes + 2 * TOKENS * more,
        # what is added to each decay before its softplus
        params=plain.params + H * more + more,
    )


def _linear_attention(rank: Rank) -> ByHand:
    """Lightning attention, arXiv 2501.08313: activated queries, keys and values, fixed decays, one
    norm over all heads, a gate; kernels as of flash-linear-attention's simple_gla."""
    heads = NET.heads // rank.tp
    k, v, c, padded = NET.key_dim, NET.head_dim, CHUNK, BATCH * 2 * CHUNK
    values, convolved = heads * v, heads * v + 2 * (NET.key_heads // rank.tp) * k
    per_chunk = c * c * k + c * c * v + 2 * c * k * v

    def rule(elements: float) -> Kernel:
        return ("linear_attention", padded, heads * per_chunk // c, heads * round(2 * elements))

    before = [linear(TOKENS, convolved + values, H), pointwise("silu", TOKENS, convolved)]
    after = [
        pointwise("layer_norm", TOKENS, values),
        pointwise("silu_mul", TOKENS, values, 2),
        linear(TOKENS, H, values),
    ]
    forward_rule = rule(3 * k + 3 * v + 2 * k * v / c)
    backward_rule = rule(8 * k + 6 * v + 10 * k * v / c)
    return ByHand(
        forward=[*before, forward_rule, *after],
        backward=[*retraced(after), backward_rule, *retraced(before)],
        kept_bytes=2 * (rank.rows * H + TOKENS * (2 * convolved + 3 * values)),
        params=H * (convolved + values) + values + values * H,
    )


# --- all of them
# -----------------------------------------------------------------------------------------

EAGER = {"fused_kernels": False}
GATED = {"mixers": "-", "gated_ffn": True, "activation": "silu"}
LAYERS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[Rank], ByHand]]] = {
    "grouped queries": ({"mixers": "*"}, {}, _grouped_queries),
    "rotated": ({"mixers": "*", "positions": "rope"}, {}, _rotated),
    "rotated by several kernels": (
        {"mixers": "*", "positions": "rope"},
        {"eager_kernels": ("rope",)},
        lambda rank: _rotated(rank, "rope_unfused"),
    ),
    "normed by head": ({"mixers": "*", "qk_norm": True}, {}, _normed_by_head),
    "normed at once": (
        {"mixers": "*", "qk_norm": True, "qk_norm_of_all_heads": True},
        {},
        _normed_at_once,
    ),
    "normed before output": ({"mixers": "*", "sub_norms": True}, {}, _normed_before_output),
    "normed activations": (
        {**GATED, "activation": "relu2", "sub_norms": True},
        {},
        _normed_activations,
    ),
    "gated attention": ({"mixers": "*", "attention_gate": True}, {}, _gated),
    "gated by head": ({"mixers": "*", "head_gate": True}, {}, _gated_by_head),
    "narrow values": ({"mixers": "*", "value_dim": NARROW}, {}, _narrow_values),
    "keys as values": ({"mixers": "*", "keys_as_values": True}, {}, _keys_as_values),
    "copied into place": (
        {"mixers": "*"},
        {"eager_kernels": ("attention_layout",)},
        _copied_into_place,
    ),
    "latent": (_latent_model(0), {}, lambda rank: _latent(rank, 0)),
    "latent queries too": (_latent_model(Q_RANK), {}, lambda rank: _latent(rank, Q_RANK)),
    "gelu": ({"mixers": "-"}, {}, _feed_forward([("gelu", 1)], 1)),
    "gelu written out": (
        {"mixers": "-"},
        {"eager_kernels": ("gelu_formula",)},
        _feed_forward(_GELU_WRITTEN_OUT, 4),
    ),
    "relu": ({"mixers": "-", "activation": "relu"}, {}, _feed_forward([("relu", 1)], 0)),
    "squared relu": ({"mixers": "-", "activation": "relu2"}, {}, _feed_forward([("relu", 1)], 1)),
    "squared relu by two kernels": (
        {"mixers": "-", "activation": "relu2"},
        {"eager_kernels": ("activation",)},
        _feed_forward([("relu", 1), ("mul", 1)], 1),
    ),
    "gated": (GATED, {}, _feed_forward([("silu_mul", 2)], 2, gated=True)),
    "gated by two kernels": (
        GATED,
        {"eager_kernels": ("activation",)},
        _feed_forward([("silu", 1), ("mul", 2)], 3, gated=True),
    ),
    "cut and gated": (
        {**GATED, "clamped_glu": True},
        {},
        _feed_forward([("silu_mul", 2)], 2, gated=True),
    ),
    "mamba": (
        {
            "mixers": "M",
            "mamba": Mamba(heads=M_HEADS, head_dim=M_D, state=STATE, groups=GROUPS, chunk=CHUNK),
        },
        {},
        _mamba,
    ),
    "mamba without a norm": (
        {
            "mixers": "M",
            "mamba": Mamba(
                heads=M_HEADS,
                head_dim=M_D,
                state=STATE,
                groups=GROUPS,
                chunk=CHUNK,
                gated_norm=False,
            ),
        },
        {},
        lambda rank: _mamba(rank, normed=False),
    ),
    "selective scan": (
        {
            "mixers": "S",
            "selective_scan": SelectiveScan(inner=SCANNED, state=STATE, step_rank=STEP_RANK),
        },
        {},
        lambda rank: _selective_scan(rank, normed=False),
    ),
    "normed selective scan": (
        {
            "mixers": "S",
            "selective_scan": SelectiveScan(
                inner=SCANNED, state=STATE, step_rank=STEP_RANK, inner_norms=True
            ),
        },
        {},
        lambda rank: _selective_scan(rank, normed=True),
    ),
    "short convolution": (
        {"mixers": "C", "short_conv": ShortConv(kernel=3)},
        {},
        _short_convolution,
    ),
    "delta net": ({"mixers": "L", "delta_net": NET}, {}, _delta_net),
    "linear attention": (
        {
            "mixers": "L",
            "delta_net": replace(
                NET, conv_kernel=0, delta_rule=False, fixed_decays=True, norm_of_all_heads=True
            ),
        },
        {},
        _linear_attention,
    ),
    "channel decays": (
        {"mixers": "L", "delta_net": replace(NET, channel_decays=True)},
        {},
        _channel_decays,
    ),
}


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_a_norm_its_kernels_and_a_sum(name: str, rank: Rank) -> None:
    fields, job, oracle = LAYERS[name]
    by_hand, layer = oracle(rank), layer_of(replace(PLAIN, **fields), rank, **job)
    norm, summed = pointwise("layer_norm", rank.rows, H), pointwise("add", rank.rows, H, 2)
    assert listed(layer.forward) == [norm, *by_hand.forward, summed]
    backward = retraced(by_hand.forward) if by_hand.backward is None else by_hand.backward
    assert listed(layer.backward_input) == [summed, *backward, norm]
    assert listed(layer.backward_weight) == weight_gradients(by_hand.forward)
    assert layer.activation_bytes.none == 2 * rank.rows * H + by_hand.kept_bytes
    assert layer.activation_bytes.full == 2 * rank.rows * H
    assert layer.params == H + by_hand.params


@pytest.mark.parametrize("name", LAYERS)
def test_gathered_inputs_that_are_kept_are_kept_whole(name: str) -> None:
    """Of every product of columns, under sequence parallelism (`Job.keep_gathered`)."""
    fields, job, _ = LAYERS[name]
    net, rank = replace(PLAIN, **fields), RANKS[-1]
    usual, kept = (layer_of(net, rank, keep_gathered=on, **job) for on in (False, True))
    gathered = sum(comm.bytes for comm in usual.forward_comm if comm.collective == "all_gather")
    assert gathered > 0
    assert kept.activation_bytes.none - usual.activation_bytes.none == gathered * (1 - 1 / rank.tp)
    again = Counter(comm.collective for comm in usual.backward_comm)
    once = Counter(comm.collective for comm in kept.backward_comm)
    assert again - once == Counter(
        comm.collective for comm in usual.forward_comm if comm.collective == "all_gather"
    )
    assert kept.forward_comm == usual.forward_comm


@pytest.mark.parametrize("name", LAYERS)
def test_ranks_send_what_their_products_take_and_give(name: str) -> None:
    """Megatron, arXiv 1909.08053, section 3: the result of a product of rows is summed, and so is
    the gradient of what a product of columns takes; with sequence parallelism (arXiv 2205.05198,
    section 4.2.2) inputs are gathered and results scattered, and the input once more for the weight
    gradient."""
    fields, job, oracle = LAYERS[name]
    products = [kernel for kernel in oracle(Rank(2)).forward if kernel[0] == "linear"]
    result = 2 * TOKENS * H
    # products of columns are those whose input is whole on every rank, and which run on all tokens
    compressed = {"latent": [H, KV_RANK], "latent queries too": [Q_RANK, KV_RANK]}
    taken = [2 * TOKENS * width for width in compressed.get(name, [H])]
    assert products[-1] == linear(TOKENS, H, products[-1][-1])

    def sent(comms: Any) -> Counter[tuple[str, float]]:
        return Counter((comm.collective, comm.bytes) for comm in comms for _ in range(comm.count))

    net = replace(PLAIN, **fields)
    plain, scattered = (layer_of(net, rank, **job) for rank in RANKS[1:])
    gathers = Counter([("all_gather", n_bytes) for n_bytes in taken])
    assert sent(plain.forward_comm) == {("all_reduce", result): 1}
    assert sent(plain.backward_comm) == Counter([("all_reduce", n_bytes) for n_bytes in taken])
    assert sent(scattered.forward_comm) == gathers + Counter([("reduce_scatter", result)])
    sums = Counter([("reduce_scatter", n_bytes) for n_bytes in taken])
    assert sent(scattered.backward_comm) == gathers + Counter([("all_gather", result)]) + sums


# --- operands of 8 and 4 bits
# --------------------------------------------------------------------------------

CAST = "quantize_fp8_static"
"""The measured cast, which reads 2 bytes and writes one; others are as many more rows of it as they
move more."""
READ, WRITTEN, TRANSPOSED, MAXIMUM = 2, 1, 1, 2
"""Bytes of a cast per element: what it reads and writes, a transposed copy for the weight gradient,
and a pass before that finds the tensor's maximum."""
MOVED = {
    "": READ + WRITTEN,
    "delayed": READ + WRITTEN + TRANSPOSED,
    "current": MAXIMUM + READ + WRITTEN + TRANSPOSED,
    "tensorwise": MAXIMUM + READ + WRITTEN,
    "rowwise": MAXIMUM + READ + WRITTEN,
    "rowwise_with_gw_hp": MAXIMUM + READ + WRITTEN,
    "aqt": MAXIMUM + READ + WRITTEN,
}
EACH_PRODUCT = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "aqt")
"""Recipes that cast both operands of every product, weights too; the others keep a narrow weight,
and a transposed copy of what they cast."""


def casts(kernels: Any) -> list[tuple[int, int]]:
    return [(rows, width) for name, rows, width, *_ in listed(kernels) if name == CAST]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("recipe", MOVED)
def test_operands_are_cast_before_their_products(recipe: str, frozen: bool) -> None:
    dtype = "int8" if recipe == "aqt" else "fp8"
    layer = layer_of(replace(PLAIN, mixers="-"), dtype=dtype, fp8_recipe=recipe, frozen=frozen)
    moved = MOVED[recipe] - TRANSPOSED * (frozen and recipe in ("delayed", "current"))

    def cast(rows: int, width: int, n_bytes: float = moved) -> tuple[int, int]:
        return (round(rows * n_bytes / (READ + WRITTEN)), width)

    # AQT rounds gradients by numbers of 4 bytes, which are written and read
    rounded = moved + 8 * (recipe == "aqt")
    each = recipe in EACH_PRODUCT
    weights = [[cast(FFN, H)], [cast(H, FFN)]] if each else [[], []]
    assert casts(layer.forward) == [cast(TOKENS, H), *weights[0], cast(TOKENS, FFN), *weights[1]]
    gradients = [cast(TOKENS, H, rounded), cast(TOKENS, FFN, rounded)]
    assert casts(layer.backward_input) == [gradients[0], *weights[1], gradients[1], *weights[0]]
    again = each and recipe != "rowwise_with_gw_hp"
    once_more = gradients
    # A gradient with one scale is cast once for both of its products, and written transposed as
    # well.
    if recipe == "tensorwise":
        rows = round(TOKENS * TRANSPOSED / moved)
        once_more = [cast(rows, H), cast(rows, FFN)]
    of_weights = [cast(TOKENS, FFN), once_more[0], cast(TOKENS, H), once_more[1]] if again else []
    assert casts(layer.backward_weight) == of_weights
    products = {
        op.dtype for op, _ in (*layer.forward, *layer.backward_input) if op.family == "gemm"
    }
    assert products == {dtype}
    in_16_bits = recipe == "rowwise_with_gw_hp"
    wide = {op.dtype for op, _ in layer.backward_weight if op.family == "gemm"}
    assert wide == {"bf16" if in_16_bits else dtype}

    # inputs of both products are kept in 8 bits, or as they were where the weight gradient casts
    # them anew
    element = 2 if each else 1
    kept = 2 * TOKENS * H + 2 * TOKENS * FFN + (0 if frozen else element * TOKENS * (H + FFN))
    assert layer.activation_bytes.none == kept


@pytest.mark.parametrize("recipe", MOVED)
def test_gradients_of_products_with_scales_of_rows_are_multiplied_by_them_afterwards(
    recipe: str,
) -> None:
    dtype = "int8" if recipe == "aqt" else "fp8"
    layer = layer_of(replace(PLAIN, mixers="-"), dtype=dtype, fp8_recipe=recipe)

    def rescaled(kernels: Any) -> list[tuple[int, int]]:
        return [(rows, width) for name, rows, width, *_ in listed(kernels) if name == "mul_scalar"]

    is_rescaled = recipe == "rowwise"
    assert rescaled(layer.forward) == []
    assert rescaled(layer.backward_input) == ([(TOKENS, FFN), (TOKENS, H)] if is_rescaled else [])
    assert rescaled(layer.backward_weight) == ([(H, FFN), (FFN, H)] if is_rescaled else [])


@pytest.mark.parametrize(
    ("dtype", "recipe", "bits"),
    [
        ("bf16", "", 16),
        ("fp8", "", 16),
        ("fp8", "delayed", 8),
        ("fp8", "current", 8),
        # a scale of 32 bits for 128 elements, of 8 for 32, and of 8 for 16 of 4 bits
        ("fp8", "blockwise", 8 + 32 / 128),
        ("fp8", "mxfp8", 8 + 8 / 32),
        ("fp4", "nvfp4", 4 + 8 / 16),
        ("fp8", "tensorwise", 16),
        ("fp8", "rowwise", 16),
    ],
)
def test_operands_are_gathered_as_they_are_cast_with_their_scales(
    dtype: str, recipe: str, bits: float
) -> None:
    layer = layer_of(replace(PLAIN, mixers="-"), RANKS[-1], dtype=dtype, fp8_recipe=recipe)
    forward, result_gradient, *again = [
        comm.bytes
        for comm in (*layer.forward_comm, *layer.backward_comm)
        if comm.collective == "all_gather"
    ]
    assert forward == result_gradient == TOKENS * H * bits / 8
    assert again == [forward]
    scattered = [
        comm.bytes
        for comm in (*layer.forward_comm, *layer.backward_comm)
        if "scatter" in comm.collective
    ]
    assert scattered == [2 * TOKENS * H] * 2


@pytest.mark.parametrize(("base", "bits"), [("nf4", 4 + 8 / 64 + 32 / (64 * 256)), ("int8", 8)])
def test_stored_weights_are_widened_before_every_product(base: str, bits: float) -> None:
    """QLoRA, arXiv 2305.14314, section 3: forward and backward read the narrow weight and write it
    in 16 bits."""
    layer = layer_of(replace(PLAIN, mixers="-"), frozen=True, base_weights=base)
    share = (bits / 8 + 2) / 4
    first, second = (
        pointwise("mul_scalar", round(FFN * share), H),
        pointwise("mul_scalar", round(H * share), FFN),
    )
    for kernels, expected in (
        (layer.forward, [first, second]),
        (layer.backward_input, [second, first]),
    ):
        assert [kernel for kernel in listed(kernels) if kernel[0] == "mul_scalar"] == expected


@pytest.mark.parametrize("rank", RANKS)
def test_attention_in_8_bits_is_cast_before_and_after(rank: Rank) -> None:
    """Queries, keys and values in, the result out, and their gradients the other way: nothing is
    transposed."""
    layer = layer_of(replace(PLAIN, mixers="*"), rank, dtype="fp8", fp8_attention=True)
    queries = rank.heads * D
    operands, result = (TOKENS, queries + 2 * rank.kv_heads * D), (TOKENS, queries)
    width = queries + 2 * rank.kv_heads * D
    assert casts(layer.forward) == [(TOKENS, H), operands, result, (TOKENS, queries)]
    assert casts(layer.backward_input) == [(TOKENS, H), result, operands, (TOKENS, width)]


# --- context parallelism
# ---------------------------------------------------------------------------------------

CP = 4


def _ring_layer(**fields: Any) -> BlockOps:
    kind = fields.pop("cp_kind", "ring")
    balanced = fields.pop("cp_balanced", True)
    shard = Shard(cp=CP, cp_kind=kind, cp_balanced=balanced, micro_batch=BATCH)
    net = replace(PLAIN, mixers=fields.pop("mixers", "*"), window=fields.pop("window", 0))
    made = blocks(net, Job(global_batch=BATCH, seq_len=S, **fields), shard)
    return next(block for block, _ in made if block.is_layer)


def cores(kernels: Any) -> list[tuple[int, int, int, int, bool, int]]:
    """Attention kernels by queries, keys, heads of both, mask and window."""
    return [
        (op.seq_q, op.seq_kv, op.heads, op.kv_heads, op.causal, op.window)
        for op, count in kernels
        if op.family == "attention"
        for _ in range(count)
    ]


@pytest.mark.parametrize("window", [0, 5, S // CP, S])
@pytest.mark.parametrize(
    ("kind", "balanced"),
    [
        ("ring", True),
        ("ring", False),
        ("gathered_ring", True),
        ("all_gather", True),
        ("all_gather", False),
    ],
)
def test_ranks_attend_step_by_step(kind: str, balanced: bool, window: int) -> None:
    """Ring attention, arXiv 2310.01889, balanced: a rank's own keys under the mask, then of every
    other rank half a square; unbalanced, the last rank sees all. Gathered, a rank's early and late
    chunk run one by one: of the first rank, the first chunk of 2 cp, and the last one, which sees
    all keys. A window as long as the keys hides nothing."""
    layer = _ring_layer(
        cp_kind=kind, cp_balanced=balanced, window=window, mixers="W" if window else "*"
    )
    own, chunk = S // CP, S // CP // 2

    def seen(queries: int, keys: int, causal: bool) -> tuple[int, int, int, int, bool, int]:
        return (queries, keys, HEADS, KV, causal, window if window < keys else 0)

    if kind == "all_gather":
        expected = (
            [seen(chunk, chunk, True), seen(chunk, S, True)] if balanced else [seen(own, S, True)]
        )
    else:
        others = chunk if balanced else own
        expected = [seen(own, own, True)] + [seen(own, others, False)] * (CP - 1)
    assert cores(layer.forward) == expected
    assert cores(layer.backward_input) == expected[::-1]


@pytest.mark.parametrize("window", [0, 5])
def test_exchanged_heads_attend_to_whole_sequences(window: int) -> None:
    """DeepSpeed Ulysses, arXiv 2309.14509: a cp-th of the heads, at least one of keys and
    values."""
    layer = _ring_layer(cp_kind="ulysses", window=window, mixers="W" if window else "*")
    assert cores(layer.forward) == [(S, S, HEADS // CP, 1, True, window)]


@pytest.mark.parametrize("eager", [False, True])
def test_results_of_a_ring_are_merged_step_by_step(eager: bool) -> None:
    """Each step's result is rescaled and added to those before; so are gradients of queries, and of
    keys and values as they pass: by one kernel, or in fp32 by a conversion, two differences and a
    product."""
    layer = _ring_layer(eager_kernels=("attention_merge",) if eager else ())
    alone = _ring_layer(cp_kind="all_gather")
    rows, queries, keys = BATCH * S // CP, HEADS * D, 2 * KV * D
    names = [("mul_scalar", 1), ("add", 2), ("mul", 2), ("add", 2)] if eager else [("add", 2)]
    merges = [pointwise(name, rows, queries, inputs) for name, inputs in names] * (CP - 1)
    gradients = [pointwise("add", rows, queries, 2), pointwise("add", rows, keys, 2)] * (CP - 1)
    for kernels, others, expected in (
        (layer.forward, alone.forward, merges),
        (layer.backward_input, alone.backward_input, gradients),
    ):
        added = Counter(listed(kernels)) - Counter(listed(others))
        added = Counter(
            {kernel: count for kernel, count in added.items() if kernel[0] != "flash_attention"}
        )
        assert added == Counter(expected)
        wide = [op for op, _ in kernels if op.family == "memory" and op.dtype == "fp32"]
        assert bool(wide) == eager


# --- what lies between sub-layers
# --------------------------------------------------------------------------


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("fields", "job", "forward", "backward"),
    [
        ({}, {}, [("add", 2)], [("add", 2)]),
        ({}, EAGER, [("add", 2)], [("add", 2)]),
        ({"bias": True}, {}, [("add", 2)], [("add", 2)]),
        ({"bias": True}, EAGER, [("add", 1), ("add", 2)], [("add", 2)]),
        ({"dropout": True}, {}, [("bias_dropout_add", 2)], [("add", 2), ("bias_dropout_add", 2)]),
        ({"dropout": True}, EAGER, [("dropout", 1), ("add", 2)], [("add", 2), ("dropout", 1)]),
        (
            {"dropout": True, "bias": True},
            EAGER,
            [("add", 1), ("dropout", 1), ("add", 2)],
            [("add", 2), ("dropout", 1)],
        ),
    ],
)
def test_a_sub_layer_ends_with_bias_dropout_and_sum(
    fields, job, forward, backward, rank: Rank
) -> None:
    """Gradients of both branches are summed, and go back through the dropout, of which a mask of a
    byte is kept."""
    layer = layer_of(replace(PLAIN, mixers="-", **fields), rank, **job)
    ends = [pointwise(name, rank.rows, H, inputs) for name, inputs in forward]
    assert listed(layer.forward)[-len(ends) :] == ends
    begins = [pointwise(name, rank.rows, H, inputs) for name, inputs in backward]
    assert listed(layer.backward_input)[: len(begins)] == begins
    without = layer_of(replace(PLAIN, mixers="-", **{**fields, "dropout": False}), rank, **job)
    masks = rank.rows * H * ("dropout" in fields)
    assert layer.activation_bytes.none - without.activation_bytes.none == masks


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("eager", [False, True])
def test_biases_are_a_vector_per_product_and_norm(eager: bool, rank: Rank) -> None:
    """Of columns a rank has its part, of rows the whole; layer norms have a shift, RMS norms
    none."""
    job = EAGER if eager else {}
    plain, biased = (
        layer_of(replace(PLAIN, mixers="-", bias=on), rank, **job) for on in (False, True)
    )
    assert biased.params - plain.params == H + FFN // rank.tp + H
    rms = layer_of(replace(PLAIN, mixers="-", bias=True, norm="rms_norm"), rank, **job)
    assert biased.params - rms.params == H
    shiftless = layer_of(replace(PLAIN, mixers="-", bias=True, norm_bias=False), rank, **job)
    assert shiftless.params == rms.params
    inner = FFN // rank.tp
    names = [("add", 1), ("gelu", 1)] if eager else [("bias_gelu", 1)]
    between = [
        kernel for kernel in listed(biased.forward) if kernel[2] == inner and kernel[0] != "linear"
    ]
    assert between == [pointwise(name, TOKENS, inner, inputs) for name, inputs in names]


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        # queries, keys and values; the result's is whole on every rank
        ({"bias": True}, lambda rank: (rank.heads + 2 * rank.kv_heads) * D + H + H),
        ({"qkv_bias": True}, lambda rank: (rank.heads + 2 * rank.kv_heads) * D),
        (
            {"bias": True, "unbiased_projections": ("key",)},
            lambda rank: (rank.heads + rank.kv_heads) * D + 2 * H,
        ),
        (
            {"bias": True, "unbiased_projections": ("query", "value")},
            lambda rank: rank.kv_heads * D + 2 * H,
        ),
        ({"output_bias": True}, lambda rank: H),
        ({"attention_sinks": True}, lambda rank: rank.heads),
    ],
)
@pytest.mark.parametrize("rank", RANKS)
def test_attention_has_biases_and_sinks_of_the_heads_of_a_rank(fields, more, rank: Rank) -> None:
    plain = layer_of(replace(PLAIN, mixers="*"), rank)
    changed = layer_of(replace(PLAIN, mixers="*", **fields), rank)
    assert changed.params - plain.params == more(rank)
    assert changed.activation_bytes == plain.activation_bytes


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("norm_at", "before", "after"), [("input", 1, 0), ("output", 0, 1), ("both", 1, 1)]
)
def test_norms_stand_before_or_after_a_sub_layer(
    norm_at: str, before: int, after: int, rank: Rank
) -> None:
    """Each keeps its input and holds a scale (OLMo 2, arXiv 2501.00656; Gemma 2)."""
    layer = layer_of(replace(PLAIN, mixers="-", norm_at=norm_at), rank)
    kernels = [kernel[0] for kernel in listed(layer.forward)]
    assert kernels == ["layer_norm"] * before + ["linear", "gelu", "linear"] + [
        "layer_norm"
    ] * after + ["add"]
    plain = layer_of(replace(PLAIN, mixers="-"), rank)
    norms = before + after - 1
    assert layer.params - plain.params == norms * H
    assert layer.activation_bytes.none - plain.activation_bytes.none == norms * 2 * rank.rows * H


def test_norms_may_have_no_parameters() -> None:
    """OLMo 1, arXiv 2402.00838, section 2.1."""
    plain, bare = (layer_of(replace(PLAIN, mixers="*", norm_parameters=on)) for on in (True, False))
    assert plain.params - bare.params == H
    assert bare.forward == plain.forward


@pytest.mark.parametrize("rank", RANKS)
def test_conditioning_makes_three_vectors_per_sequence_and_passes_over_tokens(rank: Rank) -> None:
    """DiT, arXiv 2212.09748, section 3.2: scale and shift of what the norm gives, a gate of what is
    added."""
    fields: dict[str, Any] = {"mixers": "-", "causal": False}
    plain = layer_of(replace(PLAIN, **fields), rank)
    layer = layer_of(replace(PLAIN, adaln=AdaLN(classes=10), **fields), rank)
    added = Counter(listed(layer.forward)) - Counter(listed(plain.forward))
    assert added == Counter(
        [
            pointwise("silu", BATCH, H),
            linear(BATCH, 3 * H, H),
            pointwise("mul", rank.rows, H, 2),
            pointwise("add", rank.rows, H, 2),
            pointwise("mul", rank.rows, H, 2),
        ]
    )
    # norms have no scale of their own; what is scaled and what is gated is kept, and what the
    # vectors are made of
    assert layer.params - plain.params == 3 * H * H + 3 * H - H
    assert layer.activation_bytes.none - plain.activation_bytes.none == 2 * (
        2 * rank.rows * H + BATCH * H
    )


@pytest.mark.parametrize("rank", RANKS)
def test_a_layer_works_in_its_widest_tensor_twice_and_in_its_hidden_state(rank: Rank) -> None:
    """Input and output gradient of the feed-forward, and the gradient of the hidden state; what is
    sent on is a hidden state, of which a rank sends its part."""
    layer = layer_of(replace(PLAIN, mixers="-"), rank)
    assert layer.workspace_bytes == 2 * TOKENS * H + 2 * 2 * TOKENS * max(FFN // rank.tp, H)
    assert layer.boundary_bytes == 2 * TOKENS * H / rank.tp


# --- experts
# -----------------------------------------------------------------------------------------------

EXPERTS, TOPK, INNER, SHARED = 8, 3, 20, 28


class Sharing(NamedTuple):
    """How experts are divided."""

    ep: int
    rank: Rank = RANKS[0]
    etp: int | None = None

    @property
    def copies(self) -> int:
        """Copies of tokens that reach a rank's experts where all are equally busy."""
        sharing = self.rank.tp if self.etp is None else self.etp
        return self.rank.rows * TOPK * (sharing if self.rank.sequence_parallel else 1)

    @property
    def inner(self) -> int:
        return INNER // (self.rank.tp if self.etp is None else self.etp)


def grouped(sharing: Sharing, columns: int, inner: int) -> Kernel:
    experts = EXPERTS // sharing.ep
    return ("grouped_linear", 1, experts, sharing.copies // experts, columns, inner)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("latent", [0, 16])
@pytest.mark.parametrize(
    "sharing",
    [
        Sharing(1),
        Sharing(4),
        Sharing(8),
        Sharing(1, RANKS[1]),
        Sharing(4, RANKS[2]),
        Sharing(4, RANKS[2], etp=1),
    ],
)
def test_a_layer_of_experts_routes_copies_and_computes(
    sharing: Sharing, latent: int, gated: bool
) -> None:
    """Megatron-Core's all-to-all dispatcher: tokens are copied per chosen expert, sorted by local
    expert where they arrive, and added up again; shared experts are a feed-forward beside."""
    rank = sharing.rank
    experts = Experts(
        count=EXPERTS, topk=TOPK, ffn_hidden=INNER, shared_ffn_hidden=SHARED, latent=latent
    )
    net = replace(
        PLAIN, mixers="E", experts=experts, gated_ffn=gated, activation="silu" if gated else "gelu"
    )
    shard = Shard(
        tp=rank.tp,
        sequence_parallel=rank.sequence_parallel,
        ep=sharing.ep,
        etp=sharing.etp,
        micro_batch=BATCH,
    )
    made = blocks(net, Job(global_batch=BATCH, seq_len=S), shard)
    layer = next(block for block, _ in made if block.is_layer)

    width, rows, copies = latent or H, rank.rows, sharing.copies
    projections, activation, inputs = (2, "silu_mul", 2) if gated else (1, "gelu", 1)
    wide, shared = projections * sharing.inner, SHARED // rank.tp
    sorts = sharing.ep > 1 and sharing.ep < EXPERTS
    by_expert = [pointwise("add", copies, width)] if sorts else []
    copied, summed = pointwise("add", rows * TOPK, width), pointwise("add", rows, width, TOPK)
    products = [
        grouped(sharing, wide, width),
        pointwise(activation, copies, sharing.inner, inputs),
        grouped(sharing, width, sharing.inner),
    ]
    beside = [
        linear(TOKENS, projections * shared, H),
        pointwise(activation, TOKENS, shared, inputs),
        linear(TOKENS, H, shared),
    ]
    routed = [linear(rows, EXPERTS, H), pointwise("softmax", rows, EXPERTS)]
    to_latent = [linear(rows, latent, H)] if latent else []
    from_latent = [linear(rows, H, latent)] if latent else []
    norm, residual = pointwise("layer_norm", rows, H), pointwise("add", rows, H, 2)
    assert listed(layer.forward) == [
        norm,
        *routed,
        *to_latent,
        copied,
        *by_expert,
        *products,
        *by_expert,
        summed,
        *from_latent,
        *beside,
        residual,
    ]
    assert listed(layer.backward_input) == [
        residual,
        *retraced(beside),
        *retraced(from_latent),
        copied,
        *by_expert,
        *reversed(products),
        *by_expert,
        summed,
        *retraced(to_latent),
        *retraced(routed),
        norm,
    ]
    local = EXPERTS // sharing.ep
    assert layer.expert_params == local * width * (wide + sharing.inner)
    others = H + H * EXPERTS + 2 * H * latent + H * (projections + 1) * shared
    assert layer.params == layer.expert_params + others

    # inputs of the norm and of the router, and its probabilities in 32 bits; dispatched tokens,
    # input and output of both activations; results before they are weighed; inputs of what leads to
    # the latent size and back
    kept = 2 * rows * H + 2 * rows * H + 4 * rows * EXPERTS
    kept += 2 * copies * (width + (projections + 1) * sharing.inner)
    kept += 2 * rows * TOPK * width
    kept += 2 * TOKENS * (projections + 1) * shared
    kept += 2 * rows * (H + latent) if latent else 0
    assert layer.activation_bytes.none == kept

    # a rank sends each copy, both ways; experts that ranks share have theirs gathered and reduced
    sent = 2 * rows * TOPK * width
    exchanged = [comm.bytes for comm in layer.forward_comm if comm.group == "ep"]
    assert exchanged == ([sent, sent] if sharing.ep > 1 else [])
    gathered = [(comm.collective, comm.bytes) for comm in layer.forward_comm if comm.group == "etp"]
    shares = rank.sequence_parallel and sharing.etp is None
    assert gathered == (
        [("all_gather", 2 * copies * width), ("reduce_scatter", 2 * copies * width)]
        if shares
        else []
    )


@pytest.mark.parametrize("load", [1.0, 2.0])
@pytest.mark.parametrize("dispatcher", ["alltoall", "deepep", "hybridep"])
def test_libraries_send_a_token_once_and_copy_it_where_it_arrives(
    dispatcher: str, load: float
) -> None:
    """An all-to-all sends a copy per chosen expert, and sorts what arrives; DeepEP copies what
    arrives, and adds it up there. The busiest rank sends and computes so many times as much."""
    net = replace(PLAIN, mixers="E", experts=Experts(count=EXPERTS, topk=TOPK, ffn_hidden=INNER))
    shard = Shard(ep=4, micro_batch=BATCH)
    job = Job(global_batch=BATCH, seq_len=S, expert_dispatcher=dispatcher, expert_imbalance=load)  # pyright: ignore[reportArgumentType]
    layer = next(block for block, _ in blocks(net, job, shard) if block.is_layer)
    arrived = round(TOKENS * TOPK * load)
    copied, by_expert = pointwise("add", TOKENS * TOPK, H), pointwise("add", arrived, H)
    summed = pointwise("add", TOKENS, H, TOPK)
    added = Counter(kernel for kernel in listed(layer.forward) if kernel[0] == "add")
    added -= Counter([pointwise("add", TOKENS, H, 2)])
    once = dispatcher != "alltoall"
    assert added == Counter(
        [by_expert, by_expert] if once else [copied, by_expert, by_expert, summed]
    )
    assert [
        kernel[3] * kernel[2] for kernel in listed(layer.forward) if kernel[0] == "grouped_linear"
    ] == [arrived] * 2
    sent = 2 * TOKENS * H * (1 if once else TOPK) * load
    exchanges = [comm for comm in (*layer.forward_comm, *layer.backward_comm) if comm.group == "ep"]
    assert [comm.bytes for comm in exchanges] == [sent] * 4
    assert all(
        (comm.choice is not None) == (comm.exchange is not None) == once for comm in exchanges
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_servers_run_experts_in_one_kernel(tp: int) -> None:
    """Gated ones, which were measured so. Ranks of tensor parallelism that hold all tokens each run
    their own experts on those that chose them, and add up what all give."""
    experts = Experts(count=EXPERTS, topk=TOPK, ffn_hidden=INNER)
    net = replace(PLAIN, mixers="E", experts=experts, gated_ffn=True, activation="silu")
    job = Job(global_batch=BATCH, seq_len=S, mode="inference")
    shard = Shard(tp=tp, ep=tp, etp=1, micro_batch=BATCH)
    layer = next(block for block, _ in blocks(net, job, shard) if block.is_layer)
    (kernel,) = (op for op, _ in layer.forward if op.family == "moe")
    sizes = (kernel.hidden, kernel.inter, kernel.topk, kernel.experts, kernel.moe_tp, kernel.moe_ep)
    assert sizes == (H, INNER, TOPK, EXPERTS, 1, tp)
    assert kernel.tokens == TOKENS
    assert not [kernel for kernel in listed(layer.forward) if kernel[0] == "grouped_linear"]
    assert [(comm.collective, comm.bytes) for comm in layer.forward_comm] == (
        [("all_reduce", 2.0 * TOKENS * H)] if tp > 1 else []
    )


def test_output_biases_of_experts_are_weighed_expert_by_expert() -> None:
    """Megatron-Core's `TEGroupedMLP._apply_bias`: two passes of one input and one of two in fp32,
    and one back in 16 bits; gradients of bias and weights are sums of products that are written
    out."""
    experts = Experts(count=EXPERTS, topk=TOPK, ffn_hidden=INNER)
    plain, biased = (
        layer_of(replace(PLAIN, mixers="E", experts=experts, bias=on)) for on in (False, True)
    )
    rows = TOKENS * TOPK

    def passes(kernels: Any) -> Counter[tuple[str, int, str]]:
        found: Counter[tuple[str, int, str]] = Counter()
        for op, count in kernels:
            if op.family == "memory" and op.op == "add" and (op.rows, op.hidden) == (rows, H):
                found[op.dtype, op.n_inputs, op.pass_] += count
        return found

    forward = {("fp32", 1, "fwd"): 2, ("fp32", 2, "fwd"): 1, ("bf16", 1, "fwd"): 1}
    assert passes(biased.forward) - passes(plain.forward) == forward
    backward = {("bf16", 1, "bwd"): 2, ("fp32", 1, "bwd"): 3}
    assert passes(biased.backward_input) - passes(plain.backward_input) == backward
    assert biased.expert_params - plain.expert_params == EXPERTS * (INNER + H)


def test_a_gate_of_shared_experts_multiplies_their_result() -> None:
    """Qwen2-MoE: a product of one column, as wide as the hidden state, whose sigmoid the result is
    multiplied by."""
    experts = Experts(count=EXPERTS, topk=TOPK, ffn_hidden=INNER, shared_ffn_hidden=SHARED)
    plain, gated = (
        layer_of(replace(PLAIN, mixers="E", experts=replace(experts, shared_gate=on)))
        for on in (False, True)
    )
    more = Counter(listed(gated.forward)) - Counter(listed(plain.forward))
    assert more == {pointwise("silu_mul", TOKENS, H, 2): 1}
    assert gated.params - plain.params == H
    assert gated.activation_bytes.none - plain.activation_bytes.none == 2 * TOKENS * H
    biased = layer_of(replace(PLAIN, mixers="E", experts=replace(experts, router_bias=True)))
    assert biased.params - plain.params == EXPERTS


def test_weights_inside_experts_spare_their_results() -> None:
    """Megatron-Core since 0.12: the router's weights multiply the activation."""
    net = replace(PLAIN, mixers="E", experts=Experts(count=EXPERTS, topk=TOPK, ffn_hidden=INNER))
    outside, inside = (layer_of(net, weighted_experts=on) for on in (False, True))
    assert outside.activation_bytes.none - inside.activation_bytes.none == 2 * TOKENS * TOPK * H


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("q_rank", [0, Q_RANK])
@pytest.mark.parametrize("rank", RANKS)
def test_latent_attention_has_keys_of_every_head_whatever_heads_of_keys_are_stated(
    rank: Rank, q_rank: int, gated: bool
) -> None:
    """DeepSeek-V2, arXiv 2405.04434, section 2.1: keys and values of all heads come from the
    compressed ones."""
    net = replace(PLAIN, **_latent_model(q_rank), head_gate=gated)
    layer, grouped = (layer_of(replace(net, kv_heads=heads), rank) for heads in (HEADS, HEADS // 2))
    assert grouped == layer
