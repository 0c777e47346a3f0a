"""Model FLOPs of small models against products counted one by one: no formula of the package is
used."""

from typing import Any

import pytest

from perfmodel.spec import ConvLayer, ConvNet, Job, Mlp
from perfmodel.spec import Transformer as Model
from perfmodel.spec.parts import (
    AdaLN,
    DeltaNet,
    Experts,
    LatentAttention,
    Mamba,
    NarrowEmbedding,
    Patches,
    SelectiveScan,
    ShortConv,
    Spectrogram,
    WindowHeads,
)
from perfmodel.workload import step_flops

BATCH, S, H, HEADS, KV, D, FFN, VOCAB, LAYERS = 3, 48, 40, 4, 2, 12, 72, 131, 2
WIDTH = HEADS * D
QKV = H * WIDTH + 2 * H * KV * D
"""Elements of the projections to queries, keys and values."""
OUT = WIDTH * H
ATTENTION = QKV + OUT
DENSE = 2 * H * FFN


def tiny(**fields: Any) -> Model:
    """A model with no two sizes alike."""
    sizes = {
        "name": "tiny",
        "layers": LAYERS,
        "hidden": H,
        "heads": HEADS,
        "kv_heads": KV,
        "head_dim": D,
        "ffn_hidden": FFN,
        "vocab": VOCAB,
        "seq_len": S,
    }
    return Model(**(sizes | fields))


def flops_of(model: Any, seq_len: int = S, **fields: Any):
    return step_flops(model, Job(global_batch=BATCH, seq_len=seq_len, **fields))


def pairs(queries: int, visible) -> int:
    """Pairs of a query and a key that it sees, one by one."""
    return sum(bool(visible(query, key)) for query in range(queries) for key in range(queries))


def causal(query: int, key: int) -> bool:
    return key <= query


def test_a_decoder_by_its_products() -> None:
    flops = flops_of(tiny())
    assert flops.layers_forward == 2 * BATCH * S * LAYERS * (ATTENTION + DENSE)
    assert flops.head_forward == 2 * BATCH * S * H * VOCAB
    assert flops.attention_forward == 2 * BATCH * LAYERS * S * S * 2 * WIDTH
    assert flops.attention_causal_forward == 2 * BATCH * LAYERS * pairs(S, causal) * 2 * WIDTH
    assert flops.forward == flops.layers_forward + flops.head_forward + flops.attention_forward
    assert flops.total == 3 * flops.forward
    hidden_pairs = flops.attention_forward - flops.attention_causal_forward
    assert flops.total_causal == pytest.approx(3 * (flops.forward - hidden_pairs))


def test_inference_passes_once_and_repeats_nothing() -> None:
    flops = flops_of(tiny(), mode="inference")
    assert flops.total == flops.forward
    assert all(
        flops.hardware(recompute) == flops.total for recompute in ("none", "selective", "full")
    )


def test_full_recompute_repeats_layers_and_not_the_head() -> None:
    flops = flops_of(tiny())
    assert flops.hardware("none") == flops.total
    assert flops.hardware("full") == flops.total + flops.layers_forward + flops.attention_forward


def test_gated_feed_forwards_have_three_products() -> None:
    more = flops_of(tiny(gated_ffn=True)).layers_forward - flops_of(tiny()).layers_forward
    assert more == 2 * BATCH * S * LAYERS * H * FFN


def test_a_gate_of_attention_is_as_wide_as_the_queries() -> None:
    more = flops_of(tiny(attention_gate=True)).layers_forward - flops_of(tiny()).layers_forward
    assert more == 2 * BATCH * S * LAYERS * H * WIDTH


def test_a_gate_of_each_head_is_one_element() -> None:
    more = flops_of(tiny(head_gate=True)).layers_forward - flops_of(tiny()).layers_forward
    assert more == 2 * BATCH * S * LAYERS * H * HEADS


def test_keys_as_values_save_one_projection() -> None:
    less = flops_of(tiny()).layers_forward - flops_of(tiny(keys_as_values=True)).layers_forward
    assert less == 2 * BATCH * S * LAYERS * H * KV * D


def test_narrow_values_narrow_their_projection_the_context_and_the_output() -> None:
    narrow = 5
    flops = flops_of(tiny(value_dim=narrow))
    attention = H * (HEADS * D + KV * D + KV * narrow) + HEADS * narrow * H
    assert flops.layers_forward == 2 * BATCH * S * LAYERS * (attention + DENSE)
    assert flops.attention_forward == 2 * BATCH * LAYERS * S * S * HEADS * (D + narrow)


def test_attention_in_the_window_has_its_own_heads() -> None:
    window, heads, kv, d, d_v = 5, 6, 3, 8, 4
    in_window = WindowHeads(heads=heads, kv_heads=kv, head_dim=d, value_dim=d_v)
    flops = flops_of(tiny(layers=3, window=window, full_attention_every=3, window_heads=in_window))
    projections = H * (heads * d + kv * d + kv * d_v) + heads * d_v * H
    assert flops.layers_forward == 2 * BATCH * S * (2 * projections + ATTENTION + 3 * DENSE)
    seen = pairs(S, lambda query, key: query - window < key <= query)
    assert flops.attention_causal_forward == (
        2 * BATCH * (2 * seen * heads * (d + d_v) + pairs(S, causal) * 2 * WIDTH)
    )


@pytest.mark.parametrize("window", [1, 5, S - 1, S, S + 1])
def test_a_sliding_window_shows_so_many_keys(window: int) -> None:
    """Of a window w of s tokens: w (w + 1) / 2 pairs of the first queries, and w of every later
    one."""
    flops = flops_of(tiny(window=window))
    seen = pairs(S, lambda query, key: query - window < key <= query)
    assert flops.attention_causal_forward == 2 * BATCH * LAYERS * seen * 2 * WIDTH
    assert flops.attention_forward == 2 * BATCH * LAYERS * S * S * 2 * WIDTH


@pytest.mark.parametrize("chunk", [1, 7, S // 2, S, S + 1])
def test_a_chunked_window_shows_the_keys_before_in_the_same_chunk(chunk: int) -> None:
    flops = flops_of(tiny(window=chunk, chunked_window=True))
    seen = pairs(S, lambda query, key: key <= query and key // chunk == query // chunk)
    assert flops.attention_causal_forward == 2 * BATCH * LAYERS * seen * 2 * WIDTH


def test_every_nth_layer_attends_in_full() -> None:
    window = 5
    flops = flops_of(tiny(layers=3, window=window, full_attention_every=3))
    seen = 2 * pairs(S, lambda query, key: query - window < key <= query) + pairs(S, causal)
    assert flops.attention_causal_forward == 2 * BATCH * seen * 2 * WIDTH


def test_without_a_mask_all_pairs_are_visible() -> None:
    flops = flops_of(tiny(causal=False))
    assert flops.attention_causal_forward == flops.attention_forward
    assert flops.total_causal == flops.total


@pytest.mark.parametrize("decoder_s", [0, 20, 60])
def test_cross_attention_joins_two_lengths(decoder_s: int) -> None:
    """The decoder makes queries and outputs of its own tokens, keys and values of the encoder's."""
    decoders, s_out = 3, decoder_s or S
    flops = flops_of(tiny(decoder_layers=decoders, decoder_seq_len=decoder_s, kv_heads=HEADS))
    square = H * WIDTH
    encoder = LAYERS * S * (4 * square + DENSE)
    decoder = decoders * (s_out * (4 * square + DENSE) + s_out * 2 * square + S * 2 * square)
    assert flops.layers_forward == 2 * BATCH * (encoder + decoder)
    assert flops.head_forward == 2 * BATCH * s_out * H * VOCAB
    full = LAYERS * S * S + decoders * (s_out * s_out + s_out * S)
    assert flops.attention_forward == 2 * BATCH * full * 2 * WIDTH
    seen = LAYERS * S * S + decoders * (pairs(s_out, causal) + s_out * S)
    assert flops.attention_causal_forward == 2 * BATCH * seen * 2 * WIDTH


EXPERTS = Experts(count=8, topk=3, ffn_hidden=20, shared_ffn_hidden=28)
ROUTED = 2 * H * 20
SHARED = 2 * H * 28
ROUTER = H * 8


def test_a_token_visits_its_experts_the_shared_one_and_the_router() -> None:
    flops = flops_of(tiny(experts=EXPERTS))
    assert flops.layers_forward == 2 * BATCH * S * LAYERS * (
        ATTENTION + 3 * ROUTED + SHARED + ROUTER
    )


def test_experts_on_a_latent_vector_are_narrower_between_two_projections() -> None:
    latent = Experts(count=8, topk=3, ffn_hidden=20, latent=16)
    flops = flops_of(tiny(experts=latent))
    moe = 3 * 2 * 16 * 20 + ROUTER + 2 * H * 16
    assert flops.layers_forward == 2 * BATCH * S * LAYERS * (ATTENTION + moe)


def test_some_layers_stay_dense() -> None:
    flops = flops_of(
        tiny(
            layers=4, experts=Experts(count=8, topk=3, ffn_hidden=20, first_dense_layers=1, every=3)
        )
    )
    assert flops.layers_forward == 2 * BATCH * S * (4 * ATTENTION + 3 * DENSE + 3 * ROUTED + ROUTER)


LATENT = LatentAttention(
    q_lora_rank=18, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8
)


@pytest.mark.parametrize("q_rank", [0, 18])
def test_latent_attention_by_its_projections(q_rank: int) -> None:
    latent = LatentAttention(
        q_lora_rank=q_rank, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8
    )
    flops = flops_of(tiny(kv_heads=HEADS, latent_attention=latent))
    query = H * q_rank + q_rank * HEADS * (6 + 4) if q_rank else H * HEADS * (6 + 4)
    key_value = H * (10 + 4) + 10 * HEADS * (6 + 8)
    assert flops.layers_forward == 2 * BATCH * S * LAYERS * (
        query + key_value + HEADS * 8 * H + DENSE
    )
    assert flops.attention_forward == 2 * BATCH * LAYERS * S * S * HEADS * (6 + 4 + 8)


CORE = 2 * BATCH * LAYERS * S * S * 2 * WIDTH


@pytest.mark.parametrize(
    ("fields", "modules", "repeated"),
    [
        ({}, ("core_attn",), CORE),
        ({}, (), 0),
        ({}, ("mlp",), 2 * BATCH * S * LAYERS * DENSE),
        ({}, ("core_attn", "mlp"), CORE + 2 * BATCH * S * LAYERS * DENSE),
        ({"experts": EXPERTS}, ("mlp",), 0),
        ({"experts": EXPERTS}, ("shared_experts",), 2 * BATCH * S * LAYERS * SHARED),
        ({"experts": EXPERTS}, ("moe",), 2 * BATCH * S * LAYERS * (3 * ROUTED + SHARED + ROUTER)),
        (
            {"experts": EXPERTS},
            ("moe", "shared_experts"),
            2 * BATCH * S * LAYERS * (3 * ROUTED + SHARED + ROUTER),
        ),
        ({}, ("moe", "shared_experts"), 0),
        ({}, ("mla_up_proj",), 0),
        (
            {"kv_heads": HEADS, "latent_attention": LATENT},
            ("mla_up_proj",),
            2 * BATCH * S * LAYERS * HEADS * (18 * (6 + 4) + 10 * (6 + 8)),
        ),
        (
            {"kv_heads": HEADS, "latent_attention": LATENT, "window": 5},
            ("mla_up_proj",),
            2 * BATCH * S * LAYERS * HEADS * (18 * (6 + 4) + 10 * (6 + 8)),
        ),
    ],
)
def test_selective_recompute_repeats_its_modules(
    fields: dict, modules: tuple[str, ...], repeated: int
) -> None:
    flops = flops_of(tiny(**fields), recompute_modules=modules)
    assert flops.hardware("selective") - flops.hardware("none") == pytest.approx(repeated)


def test_a_further_token_takes_a_layer_a_projection_and_the_head_once_more() -> None:
    plain, further = flops_of(tiny()), flops_of(tiny(mtp_layers=2))
    layer = ATTENTION + DENSE
    assert further.layers_forward - plain.layers_forward == 2 * BATCH * S * 2 * (layer + 2 * H * H)
    assert further.head_forward == 3 * plain.head_forward
    assert further.attention_forward == plain.attention_forward * (LAYERS + 2) / LAYERS


@pytest.mark.parametrize("masked_head", [False, True])
def test_a_masked_language_model_transforms_and_pools(masked_head: bool) -> None:
    """20 of 128 tokens are masked; the pooler and the two classes of the next sentence see one
    token of each."""
    bert = tiny(seq_len=128, causal=False, pooler_and_mlm_head=True)
    flops = flops_of(bert, 128, masked_head=masked_head)
    seen = 20 if masked_head else 128
    assert flops.head_forward == 2 * BATCH * (seen * H * VOCAB + seen * H * H + H * H + 2 * H)
    decoder = flops_of(tiny(seq_len=128), 128, masked_head=masked_head)
    assert decoder.head_forward == 2 * BATCH * 128 * H * VOCAB


def test_patches_are_projected_in_and_classes_out() -> None:
    patches = Patches(image_size=28, patch_size=4, channels=3)
    flops = flops_of(tiny(causal=False, positions="none", patches=patches), patches.tokens)
    assert patches.tokens == 49
    assert flops.head_forward == 2 * BATCH * (49 * H * 4 * 4 * 3 + H * VOCAB)


def test_diffusion_predicts_every_pixel_and_conditions_every_sub_layer() -> None:
    patches, adaln = (
        Patches(image_size=16, patch_size=2, channels=4, out_channels=8),
        AdaLN(classes=10, frequencies=30),
    )
    tokens = patches.tokens
    model = tiny(causal=False, vocab=0, positions="none", patches=patches, adaln=adaln)
    flops = flops_of(model, tokens)
    pixels = tokens * H * 2 * 2 * 4 + tokens * H * 2 * 2 * 8
    time_step = 30 * H + H * H
    assert flops.head_forward == 2 * BATCH * (pixels + time_step + 2 * H * H)
    per_image = LAYERS * 2 * 3 * H * H
    assert flops.layers_forward == 2 * BATCH * (tokens * LAYERS * (ATTENTION + DENSE) + per_image)


def test_hybrids_by_their_sub_layers() -> None:
    mamba = Mamba(heads=6, head_dim=8, state=16, groups=2, chunk=32)
    inner, state = 6 * 8, 2 * 16
    projections = H * (2 * inner + 2 * state + 6) + inner * H
    products = 32 * (state + inner) + 2 * inner * 16
    flops = flops_of(tiny(layers=4, mixers="M-*M", mamba=mamba))
    assert flops.layers_forward == 2 * BATCH * S * (
        2 * (projections + products) + DENSE + ATTENTION
    )
    assert flops.attention_forward == 2 * BATCH * S * S * 2 * WIDTH


def test_gated_delta_nets_project_queries_keys_values_gates_and_steps() -> None:
    """Gated delta rule, arXiv 2412.06464, section 3.3: in a chunk of C tokens keys with keys, the
    inverse of what they make, that with keys and with values, scores, scores with values, the state
    with queries and with keys, and what is added to it; of a frozen model all of these keep both
    gradients."""
    net = DeltaNet(heads=4, key_heads=2, head_dim=8, key_dim=6, chunk=16)
    values, keys, k, v, c = 4 * 8, 2 * 6, 6, 8, 16
    projections = H * (values + 2 * keys + values + 2 * 4) + values * H
    of_chunk = (
        c * c * k
        + c * c * c
        + c * c * k
        + c * c * v
        + c * c * k
        + c * c * v
        + c * v * k
        + c * v * k
        + k * v * c
    )
    rule = 4 * of_chunk / c
    flops = flops_of(tiny(layers=2, mixers="L- *-", delta_net=net))
    assert flops.layers_forward == 2 * BATCH * S * (projections + rule + ATTENTION + 2 * DENSE)
    frozen = flops_of(tiny(layers=2, mixers="L- *-", delta_net=net), frozen=True)
    weights_alone = flops.layers_forward + flops.head_forward - 2 * BATCH * S * rule
    assert flops.total - frozen.total == pytest.approx(weights_alone)


def test_scans_and_short_convolutions_by_their_projections() -> None:
    """A selective scan (arXiv 2312.00752) updates its state and reads it, a product each per
    channel and element."""
    scan = SelectiveScan(inner=56, state=16, step_rank=22)
    projections = H * 2 * 56 + 56 * (22 + 2 * 16) + 22 * 56 + 56 * H
    flops = flops_of(tiny(layers=2, mixers="S*", selective_scan=scan))
    assert flops.layers_forward == 2 * BATCH * S * (projections + 2 * 56 * 16 + ATTENTION)
    conv = flops_of(tiny(layers=2, mixers="C*", short_conv=ShortConv(kernel=3)))
    assert conv.layers_forward == 2 * BATCH * S * (H * 3 * H + H * H + ATTENTION)


@pytest.mark.parametrize("tied", [True, False])
def test_a_narrow_table_is_joined_to_the_layers_by_two_products(tied: bool) -> None:
    narrow = NarrowEmbedding(width=24)
    flops = flops_of(tiny(narrow_embedding=narrow, tied_embeddings=tied))
    assert flops.head_forward == 2 * BATCH * S * (24 * H + H * 24 + 24 * VOCAB)
    frozen = flops_of(tiny(narrow_embedding=narrow, tied_embeddings=tied), frozen_embedding=True)
    assert flops.total - frozen.total == (2 * BATCH * S * 24 * VOCAB if tied else 0)


def test_heads_of_labels_have_two_columns() -> None:
    """Of every token; or of every sequence, whose first token passes a dense layer before."""
    tokens, sequences = (flops_of(tiny(), head=head) for head in ("token_labels", "sequence_label"))
    assert tokens.head_forward == 2 * BATCH * S * H * 2
    assert sequences.head_forward == 2 * BATCH * (H * H + H * 2)
    assert tokens.layers_forward == flops_of(tiny()).layers_forward
    frozen = flops_of(tiny(), head="token_labels", frozen_embedding=True)
    assert frozen.total == tokens.total


def test_convolutions_over_time_make_tokens_of_a_spectrogram() -> None:
    """Whisper, arXiv 2212.04356, section 2.2: the first sees every instant, the second one window
    per token."""
    spectrogram = Spectrogram(channels=18, kernel=5, stride=4)
    fields: dict[str, Any] = {"decoder_layers": 1, "kv_heads": HEADS, "decoder_seq_len": 20}
    plain, spoken = flops_of(tiny(**fields)), flops_of(tiny(spectrogram=spectrogram, **fields))
    assert spoken.head_forward - plain.head_forward == 2 * BATCH * S * (4 * 5 * 18 * H + 5 * H * H)


@pytest.mark.parametrize(("mean", "square"), [(24.0, 24.0**2), (24.0, 900.0), (None, 30.0**2)])
def test_sequences_of_varied_lengths_attend_by_their_second_moment(
    mean: float | None, square: float
) -> None:
    """Products by the mean of their lengths, pairs by the mean of their squares: causal ones are s
    (s + 1) / 2 of equal documents whose lengths add up to the same in either."""
    lengths = {"rms_tokens": square**0.5} | ({} if mean is None else {"mean_tokens": mean})
    tokens = S if mean is None else mean
    flops = flops_of(tiny(), **lengths)
    assert flops.layers_forward == pytest.approx(2 * BATCH * tokens * LAYERS * (ATTENTION + DENSE))
    assert flops.head_forward == pytest.approx(2 * BATCH * tokens * H * VOCAB)
    assert flops.attention_forward == pytest.approx(2 * BATCH * LAYERS * square * 2 * WIDTH)
    document = square / tokens
    visible = tokens / document * document * (document + 1) / 2
    assert flops.attention_causal_forward == pytest.approx(2 * BATCH * LAYERS * visible * 2 * WIDTH)


def test_checkpoints_of_operators_repeat_half_of_the_products_and_all_of_the_routed_experts() -> (
    None
):
    """torchtitan keeps every second product and the result of attention; products of experts are
    not on its list."""
    modules = ("second_products",)
    dense, routed = (
        flops_of(tiny(**fields), recompute_modules=modules) for fields in ({}, {"experts": EXPERTS})
    )
    assert (
        dense.hardware("selective") - dense.total
        == 2 * BATCH * S * LAYERS * (ATTENTION + DENSE) / 2
    )
    others = (ATTENTION + SHARED + ROUTER) / 2
    assert routed.hardware("selective") - routed.total == 2 * BATCH * S * LAYERS * (
        others + 3 * ROUTED
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_stacks_without_attention_repeat_their_layers_in_full_or_nothing(recompute: str) -> None:
    """To the last operation, of however few there are: nothing of theirs belongs to selective
    recompute or adapters."""
    job = Job(global_batch=1, seq_len=1)
    conv = ConvLayer(name="conv", op="conv", c_in=1, size_in=1, c_out=1)
    for model in (Mlp(name="mlp", layers=1, hidden=1), ConvNet(name="net", stack=(conv,))):
        flops = step_flops(model, job)
        assert flops.total == flops.total_causal == 3 * flops.forward
        assert flops.forward == flops.layers_forward + flops.head_forward
        repeated = flops.layers_forward if recompute == "full" else 0.0
        assert flops.hardware(recompute) == flops.total + repeated


def test_stacks_of_dense_layers_and_of_convolutions() -> None:
    mlp = flops_of(Mlp(name="mlp", layers=5, hidden=64), 1)
    assert mlp.forward == mlp.layers_forward == 2 * BATCH * 5 * 64 * 64
    stack = (
        ConvLayer(name="conv", op="conv", c_in=3, size_in=32, c_out=16, kernel=5, stride=2, pad=1),
        ConvLayer(name="pool", op="max_pool", c_in=16, size_in=15, c_out=16, kernel=3),
        ConvLayer(name="dense", op="linear", c_in=16, size_in=13, c_out=10),
    )
    net = flops_of(ConvNet(name="net", stack=stack), 1)
    assert net.layers_forward == 2 * BATCH * 15 * 15 * 5 * 5 * 3 * 16
    assert net.head_forward == 2 * BATCH * 13 * 13 * 16 * 10


RANK = 5
QKV_WIDTH = WIDTH + 2 * KV * D


@pytest.mark.parametrize(
    ("fields", "products"),
    [
        # beside the joined projection of queries, keys and values, and beside that of the output
        ({}, S * LAYERS * ((H + QKV_WIDTH) + (WIDTH + H))),
        ({"attention_gate": True}, S * LAYERS * ((H + QKV_WIDTH + WIDTH) + (WIDTH + H))),
        ({"head_gate": True}, S * LAYERS * ((H + QKV_WIDTH + HEADS) + (WIDTH + H))),
        ({"keys_as_values": True}, S * LAYERS * ((H + QKV_WIDTH - KV * D) + (WIDTH + H))),
        # beside the output alone
        ({"kv_heads": HEADS, "latent_attention": LATENT}, S * LAYERS * (HEADS * 8 + H)),
        (
            {"kv_heads": HEADS, "decoder_layers": 3, "decoder_seq_len": 20},
            S * LAYERS * (H + 3 * WIDTH + WIDTH + H)
            + 20 * 3 * ((H + 3 * WIDTH + WIDTH + H) + (WIDTH + H)),
        ),
    ],
)
def test_adapters_stand_beside_the_projections_of_attention(fields: dict, products: int) -> None:
    plain, adapted = (
        flops_of(tiny(**fields), frozen=True, adapter_rank=rank) for rank in (0, RANK)
    )
    more = 2 * BATCH * RANK * products
    assert adapted.adapters_forward == more
    assert adapted.forward - plain.forward == pytest.approx(more)
    assert adapted.total - plain.total == pytest.approx(3 * more)
    repeated = adapted.hardware("full") - adapted.total
    assert repeated == pytest.approx(plain.layers_forward + plain.attention_forward + more)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("decoders", [0, 3])
def test_adapters_stand_beside_the_named_products(decoders: int, gated: bool) -> None:
    """Each has as many columns as its rank on either side; layers of experts have none in their
    half."""
    sides = {
        "linear_qkv": H + QKV_WIDTH,
        "q_proj": H + WIDTH,
        "k_proj": H + KV * D,
        "v_proj": H + KV * D,
        "linear_proj": WIDTH + H,
        "linear_fc1": H + FFN * (2 if gated else 1),
        "gate_proj": (H + FFN) * gated,
        "up_proj": H + FFN,
        "linear_fc2": FFN + H,
    }
    fields: dict[str, Any] = {"gated_ffn": gated}
    if decoders:
        fields |= {"decoder_layers": decoders, "decoder_seq_len": 20}
    for module, side in sides.items():
        job = {"frozen": True, "adapter_rank": RANK, "adapter_modules": (module,)}
        # a decoder layer has two attentions' outputs, and all else once
        in_decoder = 20 * decoders * side * (2 if module == "linear_proj" else 1)
        assert flops_of(tiny(**fields), **job).adapters_forward == 2 * BATCH * RANK * (
            S * LAYERS * side + in_decoder
        )
        if not decoders and module in ("linear_fc1", "up_proj", "gate_proj", "linear_fc2"):
            assert flops_of(tiny(experts=EXPERTS, **fields), **job).adapters_forward == 0


def test_frozen_weights_have_no_gradients_and_scores_have_both() -> None:
    plain, frozen = flops_of(tiny()), flops_of(tiny(), frozen=True)
    assert frozen.forward == plain.forward
    assert (
        frozen.total
        == 2 * (plain.layers_forward + plain.head_forward) + 3 * plain.attention_forward
    )
    masked = plain.attention_forward - plain.attention_causal_forward
    assert frozen.total_causal == pytest.approx(frozen.total - 3 * masked)


@pytest.mark.parametrize(("tied", "saved"), [(True, 1), (False, 0)])
def test_a_frozen_table_saves_the_gradient_of_the_head_that_is_tied_to_it(
    tied: bool, saved: int
) -> None:
    plain, frozen = (
        flops_of(tiny(tied_embeddings=tied), frozen_embedding=on) for on in (False, True)
    )
    assert plain.total - frozen.total == saved * 2 * BATCH * S * H * VOCAB


def test_products_of_two_activations_keep_both_gradients() -> None:
    mamba = Mamba(heads=6, head_dim=8, state=16, groups=2, chunk=32)
    plain, frozen = (
        flops_of(tiny(layers=2, mixers="M-", mamba=mamba), frozen=on) for on in (False, True)
    )
    products = 32 * (2 * 16 + 48) + 2 * 48 * 16
    assert (
        plain.total - frozen.total
        == plain.layers_forward + plain.head_forward - 2 * BATCH * S * products
    )


def test_chunks_of_a_window_that_is_none_limit_nothing() -> None:
    assert flops_of(tiny(chunked_window=True)) == flops_of(tiny())
