"""Diffusion transformers that read text: layers by hand, parameters, products, and who holds
what."""

from dataclasses import replace
from typing import Any

import pytest
from hand_kernels import BATCH, FFN, HEADS, KV, RANKS, D, H, Kernel, Rank, linear, listed, pointwise

from perfmodel import predict, search
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.spec import Job, Transformer
from perfmodel.spec.parts import AdaLN, Patches, TextCondition
from perfmodel.workload import (
    BlockOps,
    Shard,
    blocks,
    matmul_flops,
    parameter_count,
    parameters,
    step_flops,
    undivided,
)

IMAGE, TEXT, WIDTH, POOLED, FREQUENCIES = 64, 24, 28, 36, 30
"""Tokens of image and text, elements of a token of text, of the pooled text and of a time step."""
PATCHES = Patches(image_size=16, patch_size=2, channels=4, out_channels=6)
ACROSS: dict[str, Any] = {
    "mixers": "*X- ",
    "adaln": AdaLN(frequencies=FREQUENCIES, shared=True),
    "text_condition": TextCondition(tokens=TEXT, width=WIDTH, projections=2, cross_norm=True),
    "qk_norm": True,
    "qk_norm_of_all_heads": True,
}
STREAMS: dict[str, Any] = {
    "adaln": AdaLN(frequencies=FREQUENCIES, guidance=True),
    "text_condition": TextCondition(tokens=TEXT, width=WIDTH, pooled=POOLED),
    "qk_norm": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "cross-attention": ACROSS,
    "cross-attention without norms": ACROSS
    | {
        "text_condition": TextCondition(tokens=TEXT, width=WIDTH),
        "qk_norm": False,
        "norm": "rms_norm",
    },
    "cross-attention with a product a layer": ACROSS | {"adaln": AdaLN(classes=5)},
    "two streams": STREAMS | {"mixers": "DDD"},
    "two streams, of which the text ends": STREAMS | {"mixers": "DDO", "qk_norm": False},
    "two streams, then one": STREAMS | {"mixers": "DNN"},
    "one stream with a gate": STREAMS
    | {"mixers": "DNN", "gated_ffn": True, "bias": False, "positions": "none"},
    "a normed text": STREAMS
    | {
        "mixers": "DDD",
        "text_condition": TextCondition(tokens=TEXT, width=WIDTH, input_norm=True),
        "adaln": AdaLN(shared=True),
    },
}
JOB = Job(global_batch=BATCH, seq_len=IMAGE)


def diffusion(**fields: Any) -> Transformer:
    """A model with no two sizes alike."""
    sizes: dict[str, Any] = {
        "name": "diffusion",
        "layers": 3,
        "hidden": H,
        "heads": HEADS,
        "kv_heads": KV,
        "head_dim": D,
        "ffn_hidden": FFN,
        "vocab": 0,
        "seq_len": IMAGE,
        "causal": False,
        "dropout": False,
        "tied_embeddings": False,
        "positions": "rope",
        "patches": PATCHES,
    }
    return Transformer(**(sizes | fields))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Transformer:
    return diffusion(**MODELS[request.param])


def products(model: Transformer, shard: Shard, job: Job = JOB) -> float:
    return sum(
        matmul_flops(block.forward) * repeats for block, repeats in blocks(model, job, shard)
    )


# --- layers by hand


def layer_of(net: Transformer, rank: Rank, **job: Any) -> BlockOps:
    shard = Shard(tp=rank.tp, sequence_parallel=rank.sequence_parallel, micro_batch=BATCH)
    made = blocks(net, replace(JOB, **job), shard)
    return next(block for block, _ in made if block.is_layer)


class Stream:
    """Kernels of one stream of tokens on a rank."""

    def __init__(self, tokens: int, rank: Rank) -> None:
        self.rank, self.tokens = rank, BATCH * tokens
        self.rows = self.tokens // rank.tp if rank.sequence_parallel else self.tokens

    def norm(self) -> list[Kernel]:
        return [pointwise("layer_norm", self.rows, H)]

    def modulated(self, vectors: int) -> list[Kernel]:
        """Scale and shift, made of the conditions with the gate where there is one."""
        made = [pointwise("silu", BATCH, H), linear(BATCH, vectors * H, H)]
        return [*made, *self.scaled_and_shifted()]

    def scaled_and_shifted(self) -> list[Kernel]:
        return [pointwise("mul", self.rows, H, 2), pointwise("add", self.rows, H, 2)]

    def gated_sum(self) -> list[Kernel]:
        return [pointwise("mul", self.rows, H, 2), *self.summed()]

    def summed(self) -> list[Kernel]:
        return [pointwise("add", self.rows, H, 2)]

    def projections(self) -> list[Kernel]:
        rank = self.rank
        width = (rank.heads + 2 * rank.kv_heads) * D
        return [linear(self.tokens, width, H), *self.head_norms()]

    def head_norms(self) -> list[Kernel]:
        rank = self.rank
        heads = (rank.heads, rank.kv_heads)
        return [pointwise("layer_norm", self.tokens * number, D) for number in heads]

    def output(self) -> list[Kernel]:
        return [linear(self.tokens, H, self.rank.heads * D)]

    def feed_forward(self) -> list[Kernel]:
        inner = FFN // self.rank.tp
        return [
            linear(self.tokens, inner, H),
            pointwise("bias_gelu", self.tokens, inner),
            linear(self.tokens, H, inner),
        ]

    def rotation(self) -> list[Kernel]:
        return [pointwise("rope", self.tokens, (self.rank.heads + self.rank.kv_heads) * D)]


def attention(rank: Rank, queries: int, keys: int) -> Kernel:
    return ("flash_attention", BATCH, rank.heads, rank.kv_heads, queries, keys, D, D)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("letter", ["D", "O"])
def test_two_streams_meet_in_one_attention(rank: Rank, letter: str) -> None:
    """Stable Diffusion 3, arXiv 2403.03206, section 4, figure 2; of text that ends only queries,
    keys and values are made (diffusers models/attention.py `JointTransformerBlock`,
    `context_pre_only`)."""
    text, image, both = Stream(TEXT, rank), Stream(IMAGE, rank), Stream(TEXT + IMAGE, rank)
    ends = letter == "O"
    joined = pointwise("mul_scalar", both.tokens, (rank.heads + 2 * rank.kv_heads) * D)
    expected = [*text.norm(), *text.modulated(2 if ends else 3), *text.projections()]
    expected += [*image.norm(), *image.modulated(3), *image.projections()]
    expected += [joined, *both.rotation(), attention(rank, TEXT + IMAGE, TEXT + IMAGE)]
    for stream in (image,) if ends else (text, image):
        expected += [*stream.output(), *stream.gated_sum()]
        expected += [*stream.norm(), *stream.modulated(3), *stream.feed_forward()]
        expected += stream.gated_sum()
    layer = layer_of(diffusion(**STREAMS, layers=1, mixers=f"{letter} "), rank)
    assert listed(layer.forward) == expected


@pytest.mark.parametrize("rank", RANKS)
def test_one_stream_ends_with_one_product(rank: Rank) -> None:
    """FLUX.1 (flux/modules/layers.py `SingleStreamBlock`): one norm and one modulation of three
    vectors for attention and feed-forward, whose results pass one product together."""
    both = Stream(TEXT + IMAGE, rank)
    first, activated, _ = both.feed_forward()
    results = rank.heads * D + FFN // rank.tp
    layer = layer_of(diffusion(**STREAMS, layers=1, mixers="N "), rank)
    assert listed(layer.forward) == [
        *both.norm(),
        *both.modulated(3),
        *both.projections(),
        first,
        *both.rotation(),
        attention(rank, TEXT + IMAGE, TEXT + IMAGE),
        activated,
        pointwise("mul_scalar", both.tokens, results),
        linear(both.tokens, H, results),
        *both.gated_sum(),
    ]


@pytest.mark.parametrize("rank", RANKS)
def test_cross_attention_is_not_modulated(rank: Rank) -> None:
    """Wan 2.1 (wan/modules/model.py `WanAttentionBlock`): vectors of self-attention and of the
    feed-forward are learned and added to those that all layers share; cross-attention has a norm of
    its own, and norms of queries and keys over all heads."""
    text, image = Stream(TEXT, rank), Stream(IMAGE, rank)
    queries, keys = rank.heads * D, rank.kv_heads * D

    def of_all_heads(*widths: tuple[int, int]) -> list[Kernel]:
        return [pointwise("layer_norm", tokens, width) for tokens, width in widths]

    added = [pointwise("add", BATCH, 3 * H, 2), *image.scaled_and_shifted()]
    layer = layer_of(diffusion(**ACROSS), rank)
    assert listed(layer.forward) == [
        *image.norm(),
        *added,
        linear(image.tokens, queries + 2 * keys, H),
        *of_all_heads((image.tokens, queries), (image.tokens, keys)),
        *image.rotation(),
        attention(rank, IMAGE, IMAGE),
        *image.output(),
        *image.gated_sum(),
        *image.norm(),
        linear(image.tokens, queries, H),
        linear(text.tokens, 2 * keys, H),
        *of_all_heads((image.tokens, queries), (text.tokens, keys)),
        attention(rank, IMAGE, TEXT),
        *image.output(),
        *image.summed(),
        *image.norm(),
        *added,
        *image.feed_forward(),
        *image.gated_sum(),
    ]


# --- parameters and products


@pytest.mark.parametrize("letters", ["DDD", "DDO", "DNN"])
def test_parameters_of_streams_in_closed_form(letters: str) -> None:
    """Two streams: norms of queries and keys, biases, six vectors for each; the last text without
    output, feed-forward, and four of its vectors. One stream: three vectors, and one bias behind
    the last product."""
    qkv, out = (HEADS + 2 * KV) * D * (H + 1), HEADS * D * H + H
    ffn, modulation = 2 * H * FFN + FFN + H, H * H + H
    stream = qkv + out + ffn + 6 * modulation + 2 * D
    by_letter = {
        "D": 2 * stream,
        "O": 2 * stream - out - ffn - 4 * modulation,
        "N": qkv + out + ffn - H + 3 * modulation + 2 * D,
    }
    conditions = 2 * (FREQUENCIES * H + H + H * H + H) + POOLED * H + H + H * H + H
    ends = 16 * H + H + (H + 1) * 24 + 2 * modulation + WIDTH * H + H
    model = diffusion(**STREAMS, mixers=letters)
    assert (
        parameter_count(model) == sum(by_letter[letter] for letter in letters) + conditions + ends
    )


def test_parameters_of_cross_attention_in_closed_form() -> None:
    queries, keys = HEADS * D, KV * D
    attention = (queries + 2 * keys) * (H + 1) + queries * H + H + queries + keys
    layer = 2 * attention + 2 * H * FFN + FFN + H + 6 * H + 2 * H
    conditions = FREQUENCIES * H + H + 7 * (H * H + H)
    ends = 16 * H + H + (H + 1) * 24 + 2 * H + WIDTH * H + H + H * H + H
    assert parameter_count(diffusion(**ACROSS)) == 3 * layer + conditions + ends


def test_blocks_hold_the_parameters_of_the_closed_form(model: Transformer) -> None:
    held = sum(block.params * repeats for block, repeats in blocks(model, JOB, Shard()))
    assert held == parameters(model).total


@pytest.mark.parametrize(
    "job",
    [
        {},
        {"frozen": True, "adapter_rank": 3},
        {"recompute_modules": ("mlp",)},
        {"recompute_modules": ("core_attn", "mlp")},
    ],
)
def test_blocks_multiply_what_the_closed_form_counts(model: Transformer, job: Any) -> None:
    """In the forward pass and where selective recomputation repeats it, with adapters too."""
    changed = JOB.replace(**job)
    flops, shard = step_flops(model, changed), Shard(micro_batch=BATCH)
    assert products(model, shard, changed) == pytest.approx(flops.forward, rel=1e-9)
    repeated = sum(
        matmul_flops(block.recompute_selective) * repeats
        for block, repeats in blocks(model, changed, shard)
    )
    assert repeated == pytest.approx(flops.selective_forward, rel=1e-9)


def test_streams_attend_to_all_tokens_and_cross_attention_to_the_text() -> None:
    joint, pair = (IMAGE + TEXT) ** 2, 2 * HEADS * D
    streams = step_flops(diffusion(**STREAMS, mixers="DDO"), JOB)
    assert streams.attention_forward == 2 * BATCH * 3 * joint * pair
    across = step_flops(diffusion(**ACROSS), JOB)
    assert across.attention_forward == 2 * BATCH * 3 * (IMAGE + TEXT) * IMAGE * pair
    assert across.attention_causal_forward == across.attention_forward


# --- ranks


@pytest.mark.parametrize(
    "shard",
    [
        Shard(tp=2, sequence_parallel=True),
        Shard(cp=2),
        Shard(cp=2, cp_kind="ulysses"),
        Shard(tp=2, cp=2, sequence_parallel=True),
    ],
)
def test_ranks_share_out_products(model: Transformer, shard: Shard) -> None:
    """All but the products of a row per image, and under context parallelism the text's of
    cross-attention."""
    whole, part = products(model, Shard()), products(model, shard)
    n_ranks = shard.tp * shard.cp
    conditions = 2.0 * (40 * H * H + 3 * POOLED * H)
    text = 2.0 * TEXT * (WIDTH * H + 7 * H * H) if "X" in model.hybrid.mixers else 0.0
    assert whole / n_ranks <= part * (1 + 1e-9)
    assert part <= whole / n_ranks + conditions + text


def test_context_parallel_ranks_exchange_keys_of_streams_and_none_of_the_text() -> None:
    """Keys and values of the image's part and of the text's part go round together; keys and values
    of cross-attention are made on every rank."""
    keys_and_values = 2 * KV * D * 2
    streams = diffusion(**STREAMS, mixers="DDD")
    across = diffusion(**ACROSS)
    for net, tokens in ((streams, IMAGE + TEXT), (across, IMAGE)):
        layer = next(b for b, _ in blocks(net, JOB, Shard(cp=2, micro_batch=BATCH)) if b.is_layer)
        (sent,) = layer.forward_comm
        assert sent.bytes * sent.count == BATCH * tokens / 2 * keys_and_values


def test_parts_of_an_attention_belong_to_that_over_both_streams() -> None:
    for fields, lengths in (
        (STREAMS | {"mixers": "DDD"}, {(IMAGE + TEXT, IMAGE + TEXT)}),
        (ACROSS, {(IMAGE, IMAGE), (IMAGE, TEXT)}),
    ):
        net = diffusion(**fields)
        for cp in (1, 2):
            layer = next(b for b, _ in blocks(net, JOB, Shard(cp=cp)) if b.is_layer)
            wholes = [undivided(net, JOB, op) for op, _ in layer.forward]
            found = {(whole.seq_q, whole.seq_kv) for whole in wholes if whole is not None}
            assert found == (lengths if cp > 1 else set())


@pytest.mark.parametrize("rank", RANKS)
def test_stages_send_the_text_on(model: Transformer, rank: Rank) -> None:
    """As hidden states: of two streams or one it changes in every layer, for cross-attention all
    layers need it."""
    sent = 2 * BATCH * (IMAGE + TEXT) * H / rank.tp
    shard = Shard(tp=rank.tp, sequence_parallel=rank.sequence_parallel, micro_batch=BATCH)
    *cut, _ = blocks(model, JOB, shard)
    assert {block.boundary_bytes for block, _ in cut} == {sent}


def test_full_recompute_keeps_both_streams() -> None:
    layer = layer_of(diffusion(**STREAMS, mixers="DDD"), RANKS[0])
    assert layer.activation_bytes.full == 2 * BATCH * (IMAGE + TEXT) * H
    across = layer_of(diffusion(**ACROSS), RANKS[0])
    assert across.activation_bytes.full == 2 * BATCH * IMAGE * H


# --- refusals and predictions


@pytest.mark.parametrize(
    ("shard", "reason"),
    [
        (Shard(ep=2), "has no experts"),
        (Shard(cp=16), "number of text tokens 24 is not divisible by 16"),
        (Shard(tp=3), "not divisible by tp=3"),
    ],
)
def test_layouts_that_cannot_divide_streams_are_refused(shard: Shard, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        blocks(diffusion(**STREAMS, mixers="DDD"), JOB, shard)


def test_varied_lengths_are_refused(model: Transformer) -> None:
    with pytest.raises(LayoutError, match="leave mean_tokens out"):
        blocks(model, JOB.replace(mean_tokens=32), Shard())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (STREAMS | {"mixers": "*-D"}, "D, O and N are layers by themselves"),
        (STREAMS | {"mixers": "NDD"}, "D before an O at the end or before N"),
        (STREAMS | {"mixers": "DON"}, "D before an O at the end or before N"),
        (STREAMS | {"mixers": "DOO"}, "D before an O at the end or before N"),
        (STREAMS | {"mixers": "DDD", "text_condition": None}, "give text_condition if mixers has"),
        (STREAMS, "give text_condition if mixers has one of X, D, O, N"),
        (ACROSS | {"adaln": None}, "text_condition needs patches and adaln"),
        (ACROSS | {"window": 8, "mixers": "WX- "}, "cannot be combined with window"),
    ],
)
def test_layers_that_do_not_fit_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(PerfModelError, match=reason):
        diffusion(**fields)


@pytest.mark.parametrize("name", ["cross-attention", "two streams, then one"])
def test_models_are_predicted_and_searched(name: str) -> None:
    model = diffusion(**MODELS[name])
    for layout in ("dp=8,zero=3", "pp=3,tp=2,sequence_parallel=true", "cp=2,dp=4"):
        prediction = predict(model, "dgx-h100", layout, global_batch=16, seq_len=IMAGE)
        assert 0 < prediction.step_time_s < 10
    found = search(model, "dgx-h100", global_batch=16, seq_len=IMAGE, devices=8)
    assert found.best is not None


# --- patches of videos


def test_patches_of_a_video_go_through_frames() -> None:
    """Wan 2.1: 81 frames of 1280 x 720 are 21 latents of 160 x 90, and 75,600 patches of 2 x 2."""
    video = Patches(image_size=90, image_width=160, frames=21, patch_size=2, channels=16)
    assert video.tokens == 21 * 45 * 80 == 75_600
    assert video.elements == 2 * 2 * 16
    deep = replace(video, frames=20, patch_frames=4, out_channels=3)
    assert (deep.tokens, deep.elements) == (5 * 45 * 80, 4 * 2 * 2 * 16)
    assert deep.out_elements == 4 * 2 * 2 * 3
    for wrong in ({"image_width": 1}, {"frames": 2, "patch_frames": 4}, {"image_size": 1}):
        with pytest.raises(PerfModelError, match="exceeds"):
            replace(video, **wrong)


def test_more_text_costs_more_of_everything(model: Transformer) -> None:
    """Kernels, products and what is kept; not parameters."""
    text = model.inputs.text_condition
    assert text is not None
    more = model.replace(text_condition=replace(text, tokens=2 * TEXT))
    assert parameter_count(more) == parameter_count(model)
    assert step_flops(more, JOB).forward > step_flops(model, JOB).forward
    kept_bytes = []
    for net in (model, more):
        made = blocks(net, JOB, Shard())
        kept_bytes.append(sum(block.activation_bytes.none * repeats for block, repeats in made))
    assert kept_bytes[1] > kept_bytes[0]
