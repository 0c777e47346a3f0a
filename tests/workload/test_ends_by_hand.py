"""Embeddings and heads kernel by kernel: what the first and the last block compute, keep, send and
hold, by hand."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hand_kernels import (
    BATCH,
    FFN,
    HEADS,
    PLAIN,
    RANKS,
    TOKENS,
    VOCAB,
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
from perfmodel.spec.parts import AdaLN, NarrowEmbedding, Patches, Spectrogram
from perfmodel.workload import BlockOps, Shard, blocks

PADDED = 256
"""The vocabulary of 131 words as a multiple of 128 on each rank."""
WIDTH = 24
"""Of a narrow table of tokens."""


def blocks_of(
    net: Transformer, rank: Rank = RANKS[0], *, seq_len: int = S, **job: Any
) -> tuple[tuple[BlockOps, int], ...]:
    shard = Shard(tp=rank.tp, sequence_parallel=rank.sequence_parallel, micro_batch=BATCH)
    return blocks(net, Job(global_batch=BATCH, seq_len=seq_len, **job), shard)


def embedding_of(net: Transformer, rank: Rank = RANKS[0], **job: Any) -> BlockOps:
    return blocks_of(net, rank, **job)[0][0]


def head_of(net: Transformer, rank: Rank = RANKS[0], **job: Any) -> BlockOps:
    return blocks_of(net, rank, **job)[-1][0]


def sent(comms: Any) -> Counter[tuple[str, float]]:
    return Counter((comm.collective, comm.bytes) for comm in comms for _ in range(comm.count))


def lookup(rows: int, width: int, entries: int) -> Kernel:
    return ("embedding", rows, width, entries)


def added(rows: int, width: int) -> Kernel:
    return pointwise("add", rows, width, 2)


# --- embeddings
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("fields", "rows_of_tables"),
    [
        ({}, []),
        ({"positions": "rope"}, []),
        ({"positions": "learned"}, [S]),
        ({"positions": "learned", "position_offset": 2}, [S + 2]),
        ({"positions": "learned", "longest_seq_len": 100}, [100]),
        ({"positions": "learned", "longest_seq_len": 100, "position_offset": 2}, [102]),
        ({"positions": "learned", "token_types": 5}, [S, 5]),
    ],
)
def test_tables_are_looked_up_and_added(
    fields: dict[str, Any], rows_of_tables: list[int], rank: Rank
) -> None:
    """Tokens in the rank's part of the vocabulary, for all tokens; others in whole tables, for the
    tokens that the rank goes on with. Only tables have gradients."""
    net = replace(PLAIN, **fields)
    embedding = embedding_of(net, rank)
    tables = [lookup(TOKENS, H, PADDED // rank.tp)]
    kernels = [*tables]
    for entries in rows_of_tables:
        tables.append(lookup(rank.rows, H, entries))
        kernels += [tables[-1], added(rank.rows, H)]
    assert listed(embedding.forward) == kernels
    assert listed(embedding.backward_weight) == tables[::-1]
    assert embedding.backward_input == ()
    assert embedding.params == H * (PADDED // rank.tp + sum(rows_of_tables))
    assert embedding.activation_bytes.none == embedding.activation_bytes.full == 0
    assert embedding.workspace_bytes == 2 * TOKENS * H

    # all ranks but one give zeros for a token
    hidden = 2 * TOKENS * H
    there = {1: {}, 2: {("all_reduce", hidden): 1}}[rank.tp]
    back: dict[Any, int] = {}
    if rank.sequence_parallel:
        there, back = {("reduce_scatter", hidden): 1}, {("all_gather", hidden): 1}
    assert (sent(embedding.forward_comm), sent(embedding.backward_comm)) == (there, back)
    assert embedding.boundary_bytes == hidden / rank.tp


def test_a_job_of_longer_sequences_has_more_positions() -> None:
    """Its sequence is the longest that the table has to serve."""
    net = replace(PLAIN, positions="learned", position_offset=2)
    longer = embedding_of(net, seq_len=2 * S)
    assert longer.params == H * (PADDED + 2 * S + 2)
    assert embedding_of(net, seq_len=S // 2).params == H * (PADDED + S + 2)


@pytest.mark.parametrize("rank", RANKS)
def test_relative_positions_are_a_bias_of_each_bucket_and_head(rank: Rank) -> None:
    """T5, arXiv 1910.10683, section 2.1: 32 buckets."""
    plain, relative = (
        embedding_of(replace(PLAIN, positions=kind), rank) for kind in ("none", "relative")
    )
    assert relative.params - plain.params == 32 * rank.heads
    assert relative.forward == plain.forward


@pytest.mark.parametrize("rank", RANKS)
def test_embeddings_may_be_normed_and_dropped(rank: Rank) -> None:
    """A norm keeps its input, a dropout a mask of one byte."""
    plain = embedding_of(PLAIN, rank)
    both = embedding_of(replace(PLAIN, embedding_norm=True, dropout=True), rank)
    after = [pointwise("layer_norm", rank.rows, H), pointwise("dropout", rank.rows, H)]
    assert listed(both.forward) == [*listed(plain.forward), *after]
    assert listed(both.backward_input) == after[::-1]
    assert both.activation_bytes.none == 2 * rank.rows * H + rank.rows * H
    assert both.params - plain.params == H


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("all_tables", [False, True])
def test_narrow_tables_are_widened_by_a_product(all_tables: bool, bias: bool, rank: Rank) -> None:
    """Of tokens alone (OPT-350M), or of positions too, behind whose sum and norm the product then
    stands (ELECTRA)."""
    narrow = NarrowEmbedding(width=WIDTH, all_tables=all_tables, bias=bias)
    net = replace(PLAIN, positions="learned", embedding_norm=True, narrow_embedding=narrow)
    embedding = embedding_of(net, rank)
    words, product = lookup(TOKENS, WIDTH, PADDED // rank.tp), linear(rank.rows, H, WIDTH)
    table = WIDTH if all_tables else H
    others = [
        lookup(rank.rows, table, S),
        added(rank.rows, table),
        pointwise("layer_norm", rank.rows, table),
    ]
    kernels = [words, *others, product] if all_tables else [words, product, *others]
    assert listed(embedding.forward) == kernels
    tables = PADDED // rank.tp * WIDTH + S * table + table
    assert embedding.params == tables + WIDTH * H + H * bias
    assert embedding.activation_bytes.none == 2 * rank.rows * (WIDTH + table)
    assert embedding.workspace_bytes == 2 * TOKENS * H
    words_bytes = 2 * TOKENS * WIDTH
    if rank.sequence_parallel:
        assert sent(embedding.forward_comm) == {("reduce_scatter", words_bytes): 1}
    elif rank.tp > 1:
        assert sent(embedding.forward_comm) == {("all_reduce", words_bytes): 1}


@pytest.mark.parametrize("class_tokens", [0, 1])
@pytest.mark.parametrize("positions", ["learned", "none"])
@pytest.mark.parametrize("rank", [Rank(), Rank(2)])
def test_patches_are_rows_of_a_product(class_tokens: int, positions: str, rank: Rank) -> None:
    """ViT, arXiv 2010.11929, section 3.1: of images nobody needs a gradient; classes come from one
    token per image."""
    patches = Patches(image_size=28, patch_size=4, channels=3, class_tokens=class_tokens)
    net = replace(
        PLAIN, causal=False, patches=patches, positions=positions, seq_len=patches.tokens, vocab=9
    )
    made = blocks_of(net, rank, seq_len=patches.tokens)
    embedding, head = made[0][0], made[-1][0]
    rows, pixels = BATCH * patches.tokens, 4 * 4 * 3
    assert patches.tokens == 49 + class_tokens
    projection = linear(rows, H, pixels)
    assert listed(embedding.forward) == [projection, added(rows, H)]
    assert listed(embedding.backward_input) == [added(rows, H)]
    assert listed(embedding.backward_weight) == weight_gradients([projection])
    positions_held = patches.tokens * H if positions == "learned" else 0
    assert embedding.params == (pixels + 1 + class_tokens) * H + positions_held
    assert embedding.activation_bytes.none == 2 * rows * pixels

    norm, classes = (
        pointwise("layer_norm", rows, H),
        [linear(BATCH, 9, H), pointwise("softmax", BATCH, 9, 2)],
    )
    assert listed(head.forward) == [norm, *classes]
    assert listed(head.backward_input) == [*retraced(classes), norm]
    assert head.params == H + (H + 1) * 9
    assert head.activation_bytes.none == 2 * rows * H + 2 * BATCH * H + 4 * BATCH * 9
    assert embedding.forward_comm == head.forward_comm == ()


def test_an_encoder_of_images_without_classes_ends_with_its_norm() -> None:
    patches = Patches(image_size=28, patch_size=4)
    net = replace(PLAIN, causal=False, patches=patches, seq_len=patches.tokens, vocab=0)
    head = blocks_of(net, seq_len=patches.tokens)[-1][0]
    assert listed(head.forward) == [pointwise("layer_norm", BATCH * 49, H)]


def test_diffusion_predicts_patches_and_conditions_both_ends() -> None:
    """DiT, arXiv 2212.09748, section 3.2: a time step passes two products, a class a table with a
    row for none; the head scales and shifts its norm by two vectors."""
    patches = Patches(image_size=16, patch_size=2, channels=4, out_channels=8)
    adaln = AdaLN(classes=10, frequencies=30)
    net = replace(
        PLAIN, causal=False, patches=patches, adaln=adaln, seq_len=patches.tokens, vocab=0
    )
    made = blocks_of(net, seq_len=patches.tokens)
    embedding, head = made[0][0], made[-1][0]
    rows, pixels, predicted = BATCH * 64, 2 * 2 * 4, 2 * 2 * 8
    time_step = [linear(BATCH, H, 30), pointwise("silu", BATCH, H), linear(BATCH, H, H)]
    assert listed(embedding.forward) == [
        linear(rows, H, pixels),
        added(rows, H),
        *time_step,
        lookup(BATCH, H, 11),
    ]
    assert embedding.params == (pixels + 1) * H + (30 + 1) * H + (H + 1) * H + 11 * H
    assert listed(head.forward) == [
        pointwise("layer_norm", rows, H),
        pointwise("silu", BATCH, H),
        linear(BATCH, 2 * H, H),
        pointwise("mul", rows, H, 2),
        added(rows, H),
        linear(rows, predicted, H),
        pointwise("sub", rows, predicted, 2),
    ]
    assert head.params == 2 * (H * H + H) + (H + 1) * predicted
    # inputs of the norm, of what is scaled and of the last product; the prediction in 32 bits; what
    # vectors are made of
    assert head.activation_bytes.none == 2 * 3 * rows * H + 4 * rows * predicted + 2 * BATCH * H


def test_two_convolutions_make_tokens_of_instants() -> None:
    """Whisper, arXiv 2212.04356, section 2.2: the first sees every instant, the second leaves one
    token of several."""
    kernel, stride, channels = 5, 4, 18
    spectrogram = Spectrogram(channels=channels, kernel=kernel, stride=stride)
    net = replace(PLAIN, decoder_layers=1, spectrogram=spectrogram, kv_heads=HEADS)
    embedding, (decoder_embedding, *_) = (
        blocks_of(net)[0][0],
        [block for block, _ in blocks_of(net) if block.name == "decoder_embedding"],
    )
    instants = TOKENS * stride
    first, second = linear(instants, H, kernel * channels), linear(TOKENS, H, kernel * H)
    gelus = [pointwise("gelu", instants, H), pointwise("gelu", TOKENS, H)]
    assert listed(embedding.forward) == [first, gelus[0], second, gelus[1]]
    assert listed(embedding.backward_input) == [gelus[1], *retraced([second]), gelus[0]]
    assert listed(embedding.backward_weight) == weight_gradients([first, second])
    assert embedding.params == kernel * channels * H + H + kernel * H * H + H
    # inputs of products and of activations
    kept = instants * kernel * channels + instants * H + TOKENS * kernel * H + TOKENS * H
    assert embedding.activation_bytes.none == 2 * kept
    # words go to the decoder alone, which then has the only table of them
    assert lookup(TOKENS, H, PADDED) in listed(decoder_embedding.forward)
    assert decoder_embedding.params == PADDED * H + H
    assert decoder_embedding.tied_params == 0


# --- heads
# -----------------------------------------------------------------------------------------------


def _loss(rank: Rank, name: str = "cross_entropy") -> Kernel:
    return pointwise(name, TOKENS, PADDED // rank.tp)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_head_is_a_norm_a_product_and_a_loss(tied: bool, rank: Rank) -> None:
    """Korthikanti et al., arXiv 2205.05198, section 4.3: inputs of norm and product are kept, and
    logits in 32 bits. Ranks reduce a maximum, the target's logit and a sum for every token."""
    head = head_of(replace(PLAIN, tied_embeddings=tied), rank)
    words, norm = PADDED // rank.tp, pointwise("layer_norm", rank.rows, H)
    product = linear(TOKENS, words, H)
    assert listed(head.forward) == [norm, product, _loss(rank)]
    assert listed(head.backward_input) == [_loss(rank), *retraced([product]), norm]
    assert listed(head.backward_weight) == weight_gradients([product])
    assert head.params == H + (0 if tied else H * words)
    assert head.tied_params == (H * words if tied else 0)
    assert head.activation_bytes.none == 2 * 2 * rank.rows * H + 4 * TOKENS * words
    assert head.workspace_bytes == 2 * TOKENS * words

    hidden, statistics = 2 * TOKENS * H, 4 * TOKENS
    there: Counter[tuple[str, float]] = Counter()
    back: Counter[tuple[str, float]] = Counter()
    if rank.tp > 1:
        there[("all_reduce", statistics)] = 3
        back[("all_reduce", hidden)] = 1
    if rank.sequence_parallel:
        there[("all_gather", hidden)] = 1
        back = Counter({("all_gather", hidden): 1, ("reduce_scatter", hidden): 1})
    assert (sent(head.forward_comm), sent(head.backward_comm)) == (there, back)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("job", "kept", "held"),
    [
        # bytes per logit: kept from forward to backward, and for a time
        ({}, 4, lambda tp: 2),
        ({"eager_kernels": ("cross_entropy",)}, 4, lambda tp: 2 + 4),
        ({"eager_kernels": ("loss_gradient",)}, 4, lambda tp: 2 * (2 if tp == 1 else 3)),
        (
            {"eager_kernels": ("cross_entropy", "loss_gradient")},
            4,
            lambda tp: 4 * (2 if tp == 1 else 3),
        ),
        ({"narrow_logits": True}, 2, lambda tp: 0),
        # Apex's kernel saves what it reads, and makes a tensor of the gradient.
        ({"saves_narrow_logits": True}, 2, lambda tp: 2),
        ({"loss_with_gradient": True}, 2, lambda tp: 0),
    ],
)
def test_bytes_of_logits_by_the_loss(job: dict[str, Any], kept: int, held: Any, rank: Rank) -> None:
    """torch holds log-probabilities, the gradient of the chosen ones, and that of all; between
    ranks one more."""
    head = head_of(PLAIN, rank, **job)
    logits = TOKENS * PADDED // rank.tp
    assert head.activation_bytes.none == 2 * 2 * rank.rows * H + kept * logits
    assert head.workspace_bytes == held(rank.tp) * logits


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("vocab", [20, VOCAB, 1000])
def test_a_chunked_loss_has_parts_of_the_tokens(vocab: int, rank: Rank) -> None:
    """Liger: as many as the vocabulary has hidden sizes; it keeps the gradient of hidden states,
    not logits."""
    head = head_of(replace(PLAIN, vocab=vocab), rank, chunked_loss=True)
    padded = -(-vocab // (128 * rank.tp)) * 128 * rank.tp
    parts = -(-padded // H)
    chunk_logits = 2 * TOKENS * padded / rank.tp / parts
    # The weight gradient of a chunk, as its product gives it and in fp32.
    assert head.workspace_bytes == pytest.approx(chunk_logits + (2 + 4) * H * padded / rank.tp)
    for added_in_place in ({"narrow_logits": True}, {"frozen": True}):
        alone = head_of(replace(PLAIN, vocab=vocab), rank, chunked_loss=True, **added_in_place)
        assert alone.workspace_bytes == pytest.approx(chunk_logits)
    assert head.activation_bytes.none == 2 * (2 * rank.rows + TOKENS) * H
    assert listed(head.forward)[-1] == pointwise("add", TOKENS, padded // rank.tp, 3)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("chunked", [False, True])
def test_capped_logits_keep_their_tanh(chunked: bool, rank: Rank) -> None:
    """Gemma 2: a kernel each way, and another tensor of the logits' type; of a chunked loss one of
    its parts."""
    plain, capped = (
        head_of(replace(PLAIN, logit_softcap=on), rank, chunked_loss=chunked)
        for on in (False, True)
    )
    words = PADDED // rank.tp
    assert Counter(listed(capped.forward)) - Counter(listed(plain.forward)) == {
        pointwise("tanh", TOKENS, words): 1
    }
    more = capped.activation_bytes.none - plain.activation_bytes.none
    parts = -(-PADDED // H) if chunked else 1
    assert more == pytest.approx(2 * TOKENS * words / parts)


@pytest.mark.parametrize("rank", RANKS)
def test_gathered_logits_are_those_of_the_whole_vocabulary(rank: Rank) -> None:
    head = head_of(PLAIN, rank, gathered_logits=True)
    assert listed(head.forward)[-1] == pointwise("cross_entropy", TOKENS, PADDED)
    assert head.activation_bytes.none == 2 * 2 * rank.rows * H + 4 * TOKENS * PADDED
    assert head.workspace_bytes == 2 * TOKENS * PADDED
    forward = sent(head.forward_comm)
    assert forward[("all_gather", 2 * TOKENS * PADDED)] == (rank.tp > 1)
    assert ("all_reduce", 4 * TOKENS) not in forward


@pytest.mark.parametrize("rank", [Rank(), Rank(2)])
def test_the_head_of_masked_models_transforms_before_the_vocabulary_and_pools(rank: Rank) -> None:
    """BERT, arXiv 1810.04805: a product with GELU and norm, a bias per word; a dense layer with
    tanh over the first token of a sequence, and two classes of the next sentence, which RoBERTa
    does not have."""
    bert = replace(PLAIN, causal=False, pooler_and_mlm_head=True, tied_embeddings=True)
    head, without = (head_of(replace(bert, pooler=on), rank) for on in (True, False))
    words = PADDED // rank.tp
    norm = pointwise("layer_norm", TOKENS, H)
    transform = [linear(TOKENS, H, H), pointwise("gelu", TOKENS, H), norm]
    pooled = [linear(BATCH, H, H), pointwise("tanh", BATCH, H), linear(BATCH, 2, H)]
    words_and_loss = [linear(TOKENS, words, H), _loss(rank)]
    assert listed(head.forward) == [norm, *pooled, *transform, *words_and_loss]
    assert listed(without.forward) == [norm, *transform, *words_and_loss]
    assert head.params - without.params == H * H + H + 2 * H + 2
    assert without.params == H + H * H + H + H + words
    assert head.activation_bytes.none - without.activation_bytes.none == 2 * 3 * BATCH * H
    assert without.activation_bytes.none == 2 * 5 * TOKENS * H + 4 * TOKENS * words


@pytest.mark.parametrize("bias", [False, True])
def test_a_narrow_table_has_a_narrow_head(bias: bool) -> None:
    """What is compared with its rows is made as narrow by a product (OPT-350M)."""
    narrow = NarrowEmbedding(width=WIDTH, bias=bias)
    for tied in (False, True):
        head = head_of(replace(PLAIN, narrow_embedding=narrow, tied_embeddings=tied))
        norm, products = (
            pointwise("layer_norm", TOKENS, H),
            [linear(TOKENS, WIDTH, H), linear(TOKENS, PADDED, WIDTH)],
        )
        assert listed(head.forward) == [norm, *products, _loss(RANKS[0])]
        assert head.params == H + H * WIDTH + WIDTH * bias + (0 if tied else WIDTH * PADDED)
        assert head.tied_params == (WIDTH * PADDED if tied else 0)
        assert head.activation_bytes.none == 2 * TOKENS * (2 * H + WIDTH) + 4 * TOKENS * PADDED


@pytest.mark.parametrize("rank", RANKS)
def test_heads_of_labels_give_two_numbers_for_a_token_or_a_sequence(rank: Rank) -> None:
    """Hugging Face `BertForQuestionAnswering` and `BertForSequenceClassification`, whose pooled
    first token passes a dense layer with tanh."""
    norm = pointwise("layer_norm", rank.rows, H)
    tokens, sequences = (
        head_of(PLAIN, rank, head=kind) for kind in ("token_labels", "sequence_label")
    )
    labels = [linear(rank.rows, 2, H), pointwise("softmax", rank.rows, 2)]
    assert listed(tokens.forward) == [norm, *labels]
    assert tokens.params == H + 2 * H + 2
    assert tokens.activation_bytes.none == 2 * 2 * rank.rows * H + 4 * rank.rows * 2
    pooled = [
        linear(BATCH, H, H),
        pointwise("tanh", BATCH, H),
        linear(BATCH, 2, H),
        pointwise("softmax", BATCH, 2),
    ]
    assert listed(sequences.forward) == [norm, *pooled]
    assert sequences.params == H + H * H + H + 2 * H + 2
    # inputs of the norm, of both products and of tanh
    assert sequences.activation_bytes.none == 2 * rank.rows * H + 2 * 3 * BATCH * H + 4 * BATCH * 2
    for head in (tokens, sequences):
        assert (head.workspace_bytes, head.forward_comm, head.tied_params) == (0, (), 0)
        assert listed(head.backward_input) == retraced(listed(head.forward))


def test_a_model_may_end_without_a_norm() -> None:
    head = head_of(replace(PLAIN, final_norm=False))
    assert listed(head.forward) == [linear(TOKENS, PADDED, H), _loss(RANKS[0])]
    assert head.params == H * PADDED


@pytest.mark.parametrize("rank", RANKS)
def test_servers_compute_logits_and_no_loss(rank: Rank) -> None:
    head = head_of(PLAIN, rank, mode="inference")
    assert listed(head.forward) == [
        pointwise("layer_norm", rank.rows, H),
        linear(TOKENS, PADDED // rank.tp, H),
    ]
    assert ("all_reduce", 4.0 * TOKENS) not in sent(head.forward_comm)


def test_a_frozen_table_has_no_gradient_and_neither_has_a_head_that_is_tied_to_it() -> None:
    for tied in (False, True):
        net = replace(PLAIN, tied_embeddings=tied, positions="learned")
        made = blocks_of(net, frozen_embedding=True)
        embedding, head = made[0][0], made[-1][0]
        assert embedding.backward_weight == ()
        assert embedding.frozen_params == embedding.params
        assert len(head.backward_weight) == (0 if tied else 1)
        trained = head_of(net)
        # without a weight gradient the product's input need not be kept
        assert trained.activation_bytes.none - head.activation_bytes.none == (
            2 * TOKENS * H if tied else 0
        )


# --- further tokens, shared weights, wider gradients
# ----------------------------------------------------------


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_module_for_a_further_token_joins_two_hidden_states(tied: bool, rank: Rank) -> None:
    """DeepSeek-V3, arXiv 2412.19437, section 2.2: the token's embedding and the layers' output,
    each normed, are made one by a product; a layer and the head follow, whose table it uses."""
    net = replace(PLAIN, mtp_layers=1, tied_embeddings=tied)
    made = blocks_of(net, rank)
    further = next(block for block, _ in made if block.name == "further_token_head")
    layer = next(block for block, _ in made if block.is_layer)
    norm, words = pointwise("layer_norm", rank.rows, H), PADDED // rank.tp
    joined = linear(TOKENS, H // rank.tp, 2 * H)
    assert listed(further.forward) == [
        lookup(TOKENS, H, words),
        norm,
        norm,
        joined,
        *listed(layer.forward),
        *listed(head_of(net, rank).forward),
    ]
    assert further.params == 2 * H + 2 * H * H // rank.tp + layer.params + H
    assert further.tied_params == (0 if tied else H * words)
    kept = layer.activation_bytes.none + head_of(net, rank).activation_bytes.none
    assert further.activation_bytes.none == kept + 2 * 2 * rank.rows * H + 2 * rank.rows * 2 * H
    assert further.workspace_bytes == head_of(net, rank).workspace_bytes


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_layers_of_a_group_use_the_weights_of_its_first(groups: int) -> None:
    """ALBERT, arXiv 1909.11942, section 3.1."""
    net = replace(PLAIN, layers=6, layer_groups=groups)
    layers = [block for block, count in blocks_of(net) if block.is_layer for _ in range(count)]
    assert len(layers) == 6
    size = 6 // groups
    for place, layer in enumerate(layers):
        held, shared = (
            (layer.params, layer.shared_params)
            if place % size == 0
            else (layer.shared_params, layer.params)
        )
        assert held == layers[0].params > 0
        assert shared == 0


@pytest.mark.parametrize("parallel_blocks", ["none", "one_norm", "two_norms"])
def test_narrow_gradients_are_added_to_wide_ones_by_a_kernel_for_every_weight(
    parallel_blocks: str,
) -> None:
    """A weight's gradient is read in 2 bytes, its sum read and written in 4: 10 of the 12 bytes of
    an fp32 addition. Four products and their norms in a layer; a table, and a head, are one
    weight."""
    net = replace(PLAIN, parallel_blocks=parallel_blocks, tied_embeddings=True)
    plain, added_up = (blocks_of(net, half_gradients=on, dtype="fp16") for on in (False, True))
    for (without, _), (block, _) in zip(plain, added_up, strict=True):
        (*products, (kernel, count)) = block.backward_weight
        assert listed(products) == listed(without.backward_weight)
        weights = 1
        if block.is_layer:
            weights = 5 if parallel_blocks == "one_norm" else 6
        assert (kernel.op, kernel.dtype, count) == ("add", "fp32", weights)
        # up to a row of each
        expected = 10 * (block.params + block.tied_params)
        assert abs(count * kernel.bytes - expected) <= count * 12 * H
        # products then give their gradients in 16 bits
        assert not any(getattr(op, "accumulate", False) for op, _ in products)
    assert blocks_of(net, half_gradients=True, dtype="fp16", grad_dtype="fp16") == blocks_of(
        net, dtype="fp16", grad_dtype="fp16"
    )
    assert blocks_of(net, half_gradients=True, mode="inference") == blocks_of(net, mode="inference")


# --- encoders and decoders
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("rank", RANKS)
def test_the_last_block_sends_nothing_on(mode: str, rank: Rank) -> None:
    *others, (last, _) = blocks_of(PLAIN, rank, mode=mode)
    assert last.boundary_bytes == 0
    assert all(block.boundary_bytes >= 1 for block, _ in others)


@pytest.mark.parametrize("decoder_s", [0, 32])
@pytest.mark.parametrize("rank", RANKS)
def test_decoders_attend_to_what_the_encoder_gives(decoder_s: int, rank: Rank) -> None:
    """T5, arXiv 1910.10683, section 2.1: queries of the decoder's tokens, keys and values of the
    encoder's, whose input is kept once for all layers, by the decoder's embedding; every stage
    passes it on."""
    net = replace(
        PLAIN, decoder_layers=2, decoder_seq_len=decoder_s, kv_heads=HEADS, tied_embeddings=True
    )
    parts = {block.name: (block, count) for block, count in blocks_of(net, rank)}
    (encoder, encoders), (decoder, decoders) = parts["encoder_layer"], parts["decoder_layer"]
    assert (encoders, decoders) == (1, 2)
    embedding = parts["decoder_embedding"][0]
    out = BATCH * (decoder_s or S)
    rows = out // rank.tp if rank.sequence_parallel else out
    d = 12
    heads, ffn = rank.heads * d, FFN // rank.tp
    norm, residual = pointwise("layer_norm", rows, H), added(rows, H)

    def attends(queries: int, keys: int) -> Kernel:
        return ("flash_attention", BATCH, rank.heads, rank.heads, queries, keys, d, d)

    length = decoder_s or S
    assert listed(decoder.forward) == [
        norm,
        linear(out, 3 * heads, H),
        attends(length, length),
        linear(out, H, heads),
        residual,
        norm,
        linear(out, heads, H),
        linear(TOKENS, 2 * heads, H),
        attends(length, S),
        linear(out, H, heads),
        residual,
        norm,
        linear(out, ffn, H),
        pointwise("gelu", out, ffn),
        linear(out, H, ffn),
        residual,
    ]
    assert [op.causal for op, _ in decoder.forward if op.family == "attention"] == [True, False]
    assert [op.causal for op, _ in encoder.forward if op.family == "attention"] == [False]
    own = 2 * (2 * rows * H + 3 * out * heads + out * heads) + 4 * out * rank.heads
    cross = (
        2 * (2 * rows * H + out * heads + 2 * TOKENS * heads + out * heads) + 4 * out * rank.heads
    )
    feed_forward = 2 * (2 * rows * H + 2 * out * ffn)
    assert decoder.activation_bytes.none == own + cross + feed_forward
    assert decoder.params - encoder.params == H + 4 * H * heads

    # the encoder's last norm rides with the decoder's embedding, which also keeps what all layers
    # read
    words = PADDED // rank.tp
    assert listed(embedding.forward) == [
        pointwise("layer_norm", rank.rows, H),
        lookup(out, H, words),
    ]
    assert (embedding.params, embedding.tied_params) == (H, H * words)
    assert embedding.activation_bytes.none == 2 * 2 * rank.rows * H
    passed_on = 2 * (out + TOKENS) * H
    assert decoder.boundary_bytes == embedding.boundary_bytes == passed_on / rank.tp
    assert encoder.boundary_bytes == 2 * TOKENS * H / rank.tp
    for layer, tokens in ((encoder, TOKENS), (decoder, out)):
        assert layer.workspace_bytes == 2 * tokens * H + 2 * 2 * tokens * max(ffn, H)
