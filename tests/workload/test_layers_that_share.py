"""Layers of RWKV, of Zamba, of small Gemmas and of indexed attention: parameters, products, and who
holds what."""

from dataclasses import replace
from typing import Any

import pytest
from models_of_parts import (
    COMPRESSED_KEYS,
    FFN,
    HEADS,
    LATENT,
    MAMBA,
    MODELS_OF_PARTS,
    PLAIN,
    RWKV_7,
    TOKENS,
    VOCAB,
    ZAMBA,
    D,
    H,
)

from perfmodel import predict
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.spec import Job, Transformer
from perfmodel.spec.parts import Experts, HyperConnections, Indexer, SharedBlock, TimeMix
from perfmodel.workload import Shard, blocks, matmul_flops, parameters, step_flops

JOB = Job(global_batch=4, seq_len=TOKENS)


@pytest.fixture(params=MODELS_OF_PARTS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return replace(PLAIN, **MODELS_OF_PARTS[request.param])


def held(model: Transformer, shard: Shard) -> int:
    return sum(block.params * repeats for block, repeats in blocks(model, JOB, shard))


def products(model: Transformer, shard: Shard) -> float:
    return sum(
        matmul_flops(block.forward) * repeats for block, repeats in blocks(model, JOB, shard)
    )


def test_blocks_hold_the_parameters_of_the_closed_form(model: Transformer) -> None:
    assert held(model, Shard()) == parameters(model).total


def test_blocks_multiply_what_the_closed_form_counts(model: Transformer) -> None:
    """A window is a full rectangle in an operation; in the closed form only visible pairs count,
    and no projection of a table of distances, which no token goes through."""
    # Attention to compressed keys needs a window: one that holds the sequence is none.
    whole = replace(
        model,
        window=TOKENS if model.hybrid.compressed_attention else 0,
        window_heads=None,
        mixers=model.hybrid.mixers.replace("W", "*").replace("V", "Q"),
    )
    flops = step_flops(whole, replace(JOB, global_batch=1))
    # What indexers score is not masked as attention is.
    beside = sum(word.count("I") for word in whole.stack) * 2 * 16 * TOKENS * (TOKENS - 1)
    if parts := whole.hybrid.compressed_attention:
        keys = TOKENS // parts.sparse_rate
        n_indexed = sum(word.count("F") for word in whole.stack)
        beside += n_indexed * parts.index_heads * parts.index_dim * keys * TOKENS
    if distances := whole.attention.distances:
        beside += whole.layers * len(distances.projections) * 2 * distances.rows * H * HEADS * D
    assert products(whole, Shard()) == pytest.approx(
        flops.total_causal / 3 + beside, rel=1e-6, abs=flops.forward / 3
    )
    assert products(whole, Shard()) == pytest.approx(
        flops.forward - flops.attention_forward + flops.attention_causal_forward + beside, rel=1e-6
    )


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_share_out_products(model: Transformer, tp: int) -> None:
    """All but what is replicated: projections to narrow sizes, indexers, and the last projection of
    shared blocks."""
    if model.kv_heads % tp and tp % model.kv_heads:
        pytest.skip("heads do not divide")
    whole, part = products(model, Shard()), products(model, Shard(tp=tp, sequence_parallel=True))
    assert whole / tp <= part * (1 + 1e-9) < 0.75 * whole


def test_every_model_is_predicted_on_a_pipeline(model: Transformer) -> None:
    for layout in ("dp=8", "tp=2,dp=4,sequence_parallel=true", "pp=2,dp=4"):
        prediction = predict(
            replace(model, vocab=1024), "dgx-h100", layout, global_batch=16, seq_len=TOKENS
        )
        assert 0 < prediction.step_time_s < 10
        assert prediction.memory.weights > 0


def test_time_mixing_and_channel_mixing_by_hand() -> None:
    model = replace(PLAIN, **MODELS_OF_PARTS["rwkv"])
    inner = 80
    mixing = 4 * H * inner + 3 * H + 2 * inner
    channels = 2 * H * FFN + H * H + 2 * H
    per_layer = mixing + channels + 2 * H
    assert parameters(model).total == 6 * per_layer + VOCAB * H + H
    assert parameters(model).mamba == 6 * (mixing + channels)
    with pytest.raises(LayoutError, match="time mixing cannot be split along the sequence"):
        blocks(model, JOB, Shard(cp=2))


def test_time_mixing_with_matrices_as_states_by_hand() -> None:
    """RWKV-6 (arXiv 2404.05892, section 4): five mixtures of the token and the one before it, whose
    shares are made of a sixth through few elements; decays made through few elements too."""
    model = replace(PLAIN, **MODELS_OF_PARTS["rwkv 6"])
    inner, keys, mix, decay = 64, 32, 4, 8
    mixtures = 6 * H + H * 5 * mix + 5 * mix * H
    projections = 2 * H * keys + 3 * H * inner
    decays = H * decay + decay * keys + keys
    bonus, norm_of_heads = keys, 2 * inner
    mixing = mixtures + projections + decays + bonus + norm_of_heads
    channels = 2 * H * FFN + H * H + 2 * H
    assert parameters(model).total == 6 * (mixing + channels + 2 * H) + VOCAB * H + H
    # In a chunk of C tokens of a head: scores, scores with values, receptances with the state, and
    # what is added to it.
    c, k, v = 16, keys // 4, inner // 4
    state = 4 * (c * c * k + c * c * v + 2 * c * k * v) / c
    weights = mixing - 6 * H - 2 * keys - norm_of_heads + channels - 2 * H
    flops = step_flops(model, JOB).layers_forward
    assert flops == 2 * JOB.global_batch * TOKENS * 6 * (weights + state)


def test_the_first_layer_of_rwkv_7_adds_no_values_of_another() -> None:
    """RWKV-7 (arXiv 2503.14456, section 4): rates, decays, gates and shares of the first layer's
    values are made through few elements; channel mixing has no receptance."""
    model = replace(PLAIN, **MODELS_OF_PARTS["rwkv 7"])
    inner, gate, decay, rate, value = 64, 12, 8, 10, 6
    narrow = (gate + decay + rate) * (H + inner)
    # decays, rates, two scales of keys, and a bonus
    mixing = 6 * H + 4 * H * inner + narrow + 5 * inner + 2 * inner
    adding = value * (H + inner) + inner
    channels = 2 * H * FFN + H
    total = 6 * (mixing + channels + 2 * H) + 5 * adding + VOCAB * H + H
    assert parameters(model).total == total
    c, d = 16, 16
    # Scores of four pairs, the inverse, five products of triangular matrices with keys or values,
    # and four with the state.
    state = 4 * (4 * c * c * d + c**3 + 5 * c * c * d + 4 * c * d * d) / c
    weights = 6 * (4 * H * inner + narrow + 2 * H * FFN) + 5 * value * (H + inner)
    flops = step_flops(model, JOB).layers_forward
    assert flops == 2 * JOB.global_batch * TOKENS * (weights + 6 * state)


def test_stages_of_rwkv_7_pass_the_first_values_on() -> None:
    model = replace(PLAIN, **MODELS_OF_PARTS["rwkv 7"])
    others = replace(model.hybrid.time_mix, value_rank=0)
    without = replace(model, mixers="RK ", time_mix=others)
    sent, plain = (blocks(net, JOB, Shard())[1][0].boundary_bytes for net in (model, without))
    assert sent - plain == 2 * TOKENS * 64


def test_mlstm_by_hand() -> None:
    """xLSTM (arXiv 2405.04517, section 2.3): queries and keys, values and an output gate, an input
    and a forget gate with a bias for each head, and a scale for each value."""
    model = replace(PLAIN, **MODELS_OF_PARTS["mlstm"])
    keys, values = HEADS * 8, HEADS * D
    mixer = H * (2 * keys + 2 * values + 2 * HEADS) + 2 * HEADS + values + values * H
    per_layer = mixer + 3 * H * FFN + 2 * H
    assert parameters(model).total == 6 * per_layer + VOCAB * H + H


def test_attention_to_compressed_keys_by_hand() -> None:
    """DeepSeek-V4 (transformers models/deepseek_v4/modeling_deepseek_v4.py): two layers of each
    kind, eight heads of sixteen elements that share one key."""
    model = replace(PLAIN, **MODELS_OF_PARTS["compressed keys"])
    heads, rank, groups, out, index, heads_of_index = 8, 24, 4, 12, 8, 2
    queries = H * rank + rank + rank * heads * D
    result = heads * D * out + groups * out * H + heads
    window = queries + H * D + D + result
    # A token takes part in two sparse keys, the indexer's too, with a weight for every element.
    sparse = 2 * H * 2 * D + 4 * 2 * D + D
    indexer = 2 * H * 2 * index + 4 * 2 * index + index
    indexer += rank * heads_of_index * index + H * heads_of_index
    heavy = 2 * H * D + 16 * D + D
    streams = 15 * 3 * H + 15 + 3
    experts = 8 * 3 * H * 32 + 3 * H * 32 + 8 * H
    layers = 6 * (window + experts + 2 * H + 2 * streams) + 2 * (sparse + indexer + heavy)
    head = 9 * H + 3 + 1
    assert parameters(model).total == layers + head + VOCAB * H + H

    # Of 128 tokens each sees 16, 8 of 32 sparse keys and 8 heavy ones, fewer where there are not
    # yet so many.
    def pairs(n_keys: int, per_key: int, most: int) -> int:
        return sum(min((token // per_key), n_keys, most) for token in range(1, TOKENS + 1))

    in_window = 6 * (16 * 17 // 2 + (TOKENS - 16) * 16)
    flops = step_flops(model, JOB)
    scores = 2 * TOKENS * 32 * heads_of_index * index / 2
    compressed = 2 * (pairs(32, 4, 8) + pairs(8, 16, 8))
    by_hand = 2 * JOB.global_batch * ((in_window + compressed) * heads * 2 * D + scores)
    assert flops.attention_causal_forward == pytest.approx(by_hand, rel=0.02)
    with pytest.raises(LayoutError, match="cannot be split along the sequence"):
        blocks(model, JOB, Shard(cp=2))


def test_streams_are_passed_on_between_stages() -> None:
    model = replace(PLAIN, **MODELS_OF_PARTS["compressed keys"])
    without = replace(model, mixers="YE FE GE ", hyper_connections=None)
    sent, plain = (blocks(net, JOB, Shard())[1][0].boundary_bytes for net in (model, without))
    assert sent == 3 * plain
    at_input, alone = (blocks(net, JOB, Shard())[0][0].boundary_bytes for net in (model, without))
    assert at_input == 3 * alone


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_shared_blocks_are_held_once(copies: int) -> None:
    """Three layers use them; whatever is beside them each layer has of its own."""
    model = replace(PLAIN, **ZAMBA, shared_block=SharedBlock(copies=copies))
    shared = 2 * H * 3 * HEADS * D + HEADS * D * H + 3 * H * FFN + 2 * H + H
    without = replace(model, mixers="M" * 6, shared_block=None)
    assert parameters(model).total - parameters(without).total == copies * shared + 3 * H * H
    layers = [
        (block, repeats) for block, repeats in blocks(model, JOB, Shard()) if "shared" in block.name
    ]
    assert sum(block.shared_params * repeats for block, repeats in layers) == (3 - copies) * shared


def test_a_stage_without_the_owner_holds_one_copy_of_a_shared_block() -> None:
    """Layers 1, 2 and 4 of six use one block; the last two stages of three have to hold what the
    first one has."""
    model = replace(PLAIN, **ZAMBA, shared_block=SharedBlock(), vocab=1024)
    alone = replace(model, shared_block=SharedBlock(copies=3))
    layout = "pp=3,dp=1,micro_batch=1"
    shared, owned = (
        predict(net, "dgx-h100", layout, global_batch=4, seq_len=TOKENS) for net in (model, alone)
    )
    # With a copy a layer no stage has more than with one block for all, as each has one such layer.
    assert shared.memory.weights == owned.memory.weights
    both = replace(
        PLAIN, mixers="M AM AM M M M ", mamba=MAMBA, shared_block=SharedBlock(), vocab=1024
    )
    two = replace(both, shared_block=SharedBlock(copies=2))
    layout = "pp=2,dp=1,micro_batch=1"
    one_copy, two_copies = (
        predict(net, "dgx-h100", layout, global_batch=4, seq_len=TOKENS) for net in (both, two)
    )
    assert one_copy.memory.weights < two_copies.memory.weights


def test_an_indexer_has_gradients_of_its_weights_alone() -> None:
    model = replace(PLAIN, **MODELS_OF_PARTS["indexer"])
    without = replace(model, mixers="*- ", indexer=None)
    weights = 24 * 2 * 16 + H * (16 + 2)
    counted, plain = step_flops(model, JOB), step_flops(without, JOB)
    tokens = JOB.global_batch * TOKENS
    # Two of six layers have one.
    dense = 2 * tokens * 2 * weights
    assert counted.layers_forward - plain.layers_forward == dense
    scores = 2 * JOB.global_batch * 2 * TOKENS * TOKENS * 2 * 16
    assert counted.attention_forward - plain.attention_forward == scores
    assert counted.total - plain.total == 2 * dense + 3 * scores
    assert parameters(model).total - parameters(without).total == 2 * (weights + 2 * 16)


def test_keys_of_an_earlier_layer_are_not_projected_again() -> None:
    model = replace(PLAIN, **MODELS_OF_PARTS["small gemma"])
    own = replace(model, mixers="W-P W-P *-P W-P W-P *-P")
    in_window, full = H * 2 * 2 * 8 + 8, H * 2 * 2 * D + D
    assert parameters(own).total - parameters(model).total == 2 * in_window + full


def test_embeddings_of_the_layers_are_one_table() -> None:
    model = replace(PLAIN, **MODELS_OF_PARTS["small gemma"])
    words = model.hybrid.mixers.replace("P", "")
    without = replace(model, mixers=words, layer_embedding=None)
    table, projection, norm = 384 * 6 * 8, H * 6 * 8, 8
    in_layers = 6 * (2 * H * 8 + H)
    assert (
        parameters(model).total - parameters(without).total == table + projection + norm + in_layers
    )
    step = step_flops(model, JOB).layers_forward - step_flops(without, JOB).layers_forward
    assert step == 2 * JOB.global_batch * TOKENS * 6 * 3 * H * 8


def test_layers_of_different_sizes_are_those_sizes() -> None:
    model = replace(PLAIN, **MODELS_OF_PARTS["layers that differ"])
    inner = 96 + 32 + 64 + 32 + 128
    assert parameters(model).feed_forward == 3 * H * inner
    widths = [block.name for block, _ in blocks(model, JOB, Shard()) if block.is_layer]
    assert len(widths) == 6
    adapted = replace(
        JOB, frozen=True, adapter_rank=4, adapter_modules=("linear_fc1", "linear_fc2")
    )
    adapters = step_flops(model, adapted).adapters_forward
    # Five feed-forwards: h + 2 f for gate and value together, f + h for the last product.
    assert adapters == 2 * JOB.global_batch * TOKENS * 4 * (5 * 2 * H + 3 * inner)
    with pytest.raises(LayoutError, match="ffn_hidden=32 is not divisible by tp=64"):
        blocks(replace(model, heads=64, kv_heads=64), JOB, Shard(tp=64))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"mixers": "I- ", "indexer": Indexer(heads=2, head_dim=8), "latent_attention": LATENT},
            r"right before a \*",
        ),
        ({"mixers": "I*- ", "indexer": Indexer(heads=2, head_dim=8)}, "latent_attention"),
        ({"mixers": "*- ", "ffn_sizes": (96, 96)}, "each of 6 layers, got 2"),
        ({"mixers": "*- ", "ffn_sizes": (96,) * 5 + (0,)}, r"ffn_sizes\[5\]"),
        ({"mixers": "V- "}, "needs window for V"),
        ({"mixers": "R- "}, "give time_mix"),
        ({"mixers": "L- "}, "give delta_net"),
        ({"mixers": "RK TK ", "time_mix": TimeMix(inner=64, heads=4)}, "a value_rank"),
        ({"mixers": "TK ", "time_mix": RWKV_7}, "with an R before the first"),
        ({"mixers": "Y- ", "window": 8, "compressed_attention": COMPRESSED_KEYS}, "kv_heads=1"),
        (
            {"mixers": "Y- ", "kv_heads": 1, "compressed_attention": COMPRESSED_KEYS},
            "needs window for Y",
        ),
        (
            {"mixers": "H*-- ", "hyper_connections": HyperConnections(count=2)},
            "an H in mixers right before each",
        ),
        ({"mixers": "RK ", "time_mix": RWKV_7}, "a value_rank if mixers has a T"),
        ({"mixers": "*- ", "shared_block": SharedBlock()}, "shared_block"),
        ({"mixers": "Q- ", "latent_attention": LATENT}, "Q and V"),
        (
            {
                "mixers": "*E ",
                "experts": Experts(count=4, topk=2, ffn_hidden=32),
                "shortcut_experts": True,
            },
            "right behind a -",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(PerfModelError, match=named):
        replace(PLAIN, **fields)


def test_idle_experts_are_rows_of_the_router() -> None:
    model = replace(PLAIN, **MODELS_OF_PARTS["shortcut"])
    without = replace(model, experts=Experts(count=8, topk=2, ffn_hidden=32))
    assert parameters(model).total - parameters(without).total == 6 * H * 4
    apart = replace(model, shortcut_experts=False)
    assert parameters(apart).total - parameters(model).total == 6 * H
    assert products(apart, Shard()) == products(model, Shard())
