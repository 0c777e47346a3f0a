"""FLOPs against published formulas and between the closed form and the blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.catalog import model, models
from perfmodel.spec import Job, Transformer
from perfmodel.workload import Shard, blocks, matmul_flops, padded_vocab, step_flops


def forward_flops(parts):
    return sum(matmul_flops(block.forward) * n for block, n in parts)


@pytest.mark.parametrize("name", ["gpt-1.7b", "gpt-39.1b", "gpt3-175b", "gpt-1t"])
def test_megatron_equation_3(name):
    """SC21 equation 3, which includes full recomputation: 96 B s l h^2 (1 + s/6h + V/16lh)."""
    gpt, batch = model(name), 512
    s, n, h, v = gpt.seq_len, gpt.layers, gpt.hidden, gpt.vocab
    flops = step_flops(gpt, Job(global_batch=batch, seq_len=s))
    assert flops.hardware("full") == pytest.approx(
        96 * batch * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h))
    )
    assert flops.total == pytest.approx(
        72 * batch * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    )


def test_selective_recompute_repeats_the_attention_core():
    """4 B s^2 h per layer."""
    gpt, batch = model("gpt-22b"), 4
    flops = step_flops(gpt, Job(global_batch=batch, seq_len=gpt.seq_len))
    again = flops.hardware("selective") - flops.hardware("none")
    assert again == 4 * batch * gpt.seq_len**2 * gpt.hidden * gpt.layers


def test_megatron_equation_3_from_the_blocks_with_recomputation():
    gpt = model("gpt-7.5b")
    s, n, h, v = gpt.seq_len, gpt.layers, gpt.hidden, gpt.vocab
    job = Job(global_batch=1, seq_len=s, flash_attention=False)
    total = sum(
        count
        * sum(map(matmul_flops, (b.forward, b.backward_input, b.backward_weight, b.recompute_full)))
        for b, count in blocks(gpt, job, Shard())
    )
    assert total == pytest.approx(96 * s * n * h**2 * (1 + s / (6 * h) + v / (16 * n * h)))


def test_palm_rule_of_six():
    """6 N per token and 12 l h s for attention, PaLM appendix B (without embedding table)."""
    gpt = model("gpt3-175b")
    flops = step_flops(gpt, Job(global_batch=1, seq_len=2048))
    matmul_params = 12 * gpt.layers * gpt.hidden**2 + gpt.vocab * gpt.hidden
    assert flops.total == pytest.approx(
        2048 * (6 * matmul_params + 12 * gpt.layers * gpt.hidden * 2048)
    )


@pytest.mark.parametrize("name", models())
def test_blocks_sum_to_the_closed_form(name):
    """Flash attention computes visible pairs only; padding of the vocabulary comes on top."""
    net = model(name)
    flops = step_flops(net, Job(global_batch=1, seq_len=net.seq_len))
    built = forward_flops(blocks(net, Job(global_batch=1, seq_len=net.seq_len), Shard()))
    pad = 0.0
    if isinstance(net, Transformer) and not net.inputs.patches:
        s = net.decoder_seq_len or net.seq_len
        narrow = net.inputs.narrow_embedding
        pad = (
            2.0
            * s
            * (narrow.width if narrow else net.hidden)
            * (padded_vocab(net.vocab, 1) - net.vocab)
        )
        if net.attention.window:  # an op counts a sliding window as a full rectangle
            pad += built - pad - flops.total_causal / 3
            assert pad / built < 0.05
    whole_rows = 0.01 if getattr(net, "experts", None) else 1e-6  # every expert has equally many
    assert built == pytest.approx(flops.total_causal / 3 + pad, rel=whole_rows)


@pytest.mark.parametrize("seq_len", [128, 512])
def test_a_head_may_see_the_masked_tokens_alone(seq_len):
    """20 of 128 and 80 of 512; the closed form agrees, and a model that is not masked has nothing
    to leave out."""
    bert, gpt = model("bert-large"), model("gpt3-1.3b")
    every, masked = (
        Job(global_batch=2, seq_len=seq_len, masked_head=only) for only in (False, True)
    )
    shard = Shard(micro_batch=2)
    of_every, of_masked = (blocks(bert, job, shard) for job in (every, masked))
    saved = forward_flops(of_every) - forward_flops(of_masked)
    left_out = 2 * seq_len * (1 - 20 / 128)
    assert saved == 2 * left_out * bert.hidden * (bert.hidden + padded_vocab(bert.vocab, 1))
    closed = step_flops(bert, every).total - step_flops(bert, masked).total
    assert closed == pytest.approx(3 * 2 * left_out * bert.hidden * (bert.hidden + bert.vocab))
    assert of_masked[-1][0].activation_bytes.none < of_every[-1][0].activation_bytes.none
    assert of_masked[-1][0].params == of_every[-1][0].params
    assert blocks(gpt, every, shard) == blocks(gpt, masked, shard)


@pytest.mark.parametrize("name", ["gpt3-1.3b", "llama3-8b", "t5-large", "bert-large", "mlp-1b"])
def test_backward_is_twice_forward(name):
    net = model(name)
    for block, _ in blocks(
        net, Job(global_batch=1, seq_len=net.seq_len, flash_attention=False), Shard()
    ):
        backward = matmul_flops(block.backward_input) + matmul_flops(block.backward_weight)
        assert backward == 2 * matmul_flops(block.forward)


def test_flash_backward_repeats_the_scores():
    layer = blocks(model("gpt3-1.3b"), Job(global_batch=1, seq_len=2048), Shard())[1][0]
    fwd = next(op for op, _ in layer.forward if op.family == "attention")
    bwd = next(op for op, _ in layer.backward_input if op.family == "attention")
    assert bwd.flops == 2.5 * fwd.flops


def test_first_convolution_needs_no_input_gradient():
    parts = blocks(model("resnet-50"), Job(global_batch=8, seq_len=1), Shard(micro_batch=8))
    assert matmul_flops(parts[0][0].backward_input) == 0
    for block, _ in parts[1:]:
        assert matmul_flops(block.backward_input) == matmul_flops(block.forward)


transformers = st.builds(
    lambda heads, group, d, layers, ffn, gated, s, causal: Transformer(
        name="t",
        layers=layers,
        hidden=8 * heads * d,
        heads=8 * heads * group,
        kv_heads=8 * heads,
        head_dim=d,
        ffn_hidden=8 * ffn,
        vocab=1024,
        seq_len=64 * s,
        gated_ffn=gated,
        causal=causal,
    ),
    st.integers(1, 3),
    st.sampled_from([1, 2]),
    st.sampled_from([16, 64]),
    st.integers(1, 4),
    st.integers(1, 64),
    st.booleans(),
    st.integers(1, 4),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(
    net=transformers,
    t=st.sampled_from([1, 2, 4, 8]),
    sp=st.booleans(),
    flash=st.booleans(),
    mb=st.integers(1, 3),
)
def test_tensor_parallel_shards_sum_to_the_whole(net, t, sp, flash, mb):
    job = Job(global_batch=mb, seq_len=net.seq_len, flash_attention=flash)
    whole = blocks(net, job, Shard(micro_batch=mb))
    parts = blocks(net, job, Shard(micro_batch=mb, tp=t, sequence_parallel=sp))
    for (one, n), (shard, m) in zip(whole, parts, strict=True):
        assert (one.name, n) == (shard.name, m)
        for phase in (
            "forward",
            "backward_input",
            "backward_weight",
            "recompute_selective",
            "recompute_full",
        ):
            assert t * matmul_flops(getattr(shard, phase)) == pytest.approx(
                matmul_flops(getattr(one, phase))
            )


@settings(max_examples=30, deadline=None)
@given(net=transformers, cp=st.sampled_from([2, 4, 8]))
def test_context_parallel_ranks_share_visible_pairs_evenly(net, cp):
    job = Job(global_batch=1, seq_len=net.seq_len)
    whole, part = blocks(net, job, Shard()), blocks(net, job, Shard(cp=cp))
    for (one, _), (rank, _) in zip(whole, part, strict=True):
        assert cp * matmul_flops(rank.forward) == pytest.approx(matmul_flops(one.forward))


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("etp", [None, 1])
def test_expert_work_is_the_same_on_every_rank(ep, tp, etp):
    net = model("mixtral-8x7b")
    job = Job(global_batch=1, seq_len=4096)
    whole = blocks(net, job, Shard())[1][0]
    shard = blocks(net, job, Shard(ep=ep, tp=tp, etp=etp, sequence_parallel=True))[1][0]
    assert tp * matmul_flops(shard.forward) == pytest.approx(matmul_flops(whole.forward))
    assert tp * matmul_flops(shard.backward_weight) == pytest.approx(
        matmul_flops(whole.backward_weight)
    )


def test_inference_counts_forward_only():
    net = model("llama2-7b")
    job = Job(global_batch=2, seq_len=4096, mode="inference")
    flops = step_flops(net, job)
    assert flops.total == flops.forward == flops.hardware("full")


TRAINED_PARTS = {
    "everything": {},
    "all but the embedding": {"frozen_embedding": True},
    "nothing": {"frozen": True},
    "adapters": {"frozen": True, "adapter_rank": 16},
    "wider adapters": {"frozen": True, "adapter_rank": 64},
}


@pytest.mark.parametrize("part", TRAINED_PARTS)
@pytest.mark.parametrize(
    "name",
    [
        "gpt3-1.3b",
        "llama3-8b",
        "bert-large",
        "t5-large",
        "mixtral-8x7b",
        "deepseek-v3-mtp",
        "vit-l-16",
        "mlp-1b",
    ],
)
def test_a_step_is_forward_input_gradients_and_weight_gradients_of_what_is_trained(name, part):
    """Against the blocks, counted product by product; adapters keep their weight gradients beside
    their input's."""
    net = model(name)
    job = Job(global_batch=1, seq_len=net.seq_len, flash_attention=False, **TRAINED_PARTS[part])
    computed = 0.0
    for block, repeats in blocks(net, job, Shard()):
        passes = [block.forward, block.backward_input]
        if not job.fine_tuning.frozen:
            passes.append(block.backward_weight)
        computed += repeats * sum(map(matmul_flops, passes))
    padding = 0.0
    if isinstance(net, Transformer) and not net.inputs.patches:
        rows = (net.decoder_seq_len or net.seq_len) * (1 + net.mtp.mtp_layers)
        head_is_frozen = job.fine_tuning.frozen or (
            job.fine_tuning.frozen_embedding and net.head.tied_embeddings
        )
        padding = (
            (2 if head_is_frozen else 3)
            * 2.0
            * rows
            * net.hidden
            * (padded_vocab(net.vocab, 1) - net.vocab)
        )
    # every expert has equally many rows
    tolerance = 0.01 if getattr(net, "experts", None) else 1e-6
    if isinstance(net, Transformer) and net.inputs.patches:
        tolerance = 2e-3  # the patches' own gradient is counted, by convention, and not computed
    assert step_flops(net, job).total + padding == pytest.approx(computed, rel=tolerance)


def test_lora_counts_two_passes_of_frozen_products_and_three_of_the_rest():
    """2 + 2 of 6 N per token, 12 l h s for attention, and 6 per element of A and B."""
    net, rank, s = model("llama3-8b"), 16, 8192
    flops = step_flops(net, Job(global_batch=1, seq_len=s, frozen=True, adapter_rank=rank))
    h, kv = net.hidden, net.kv_heads * net.head_dim
    weights = net.layers * (2 * h * h + 2 * h * kv + 3 * h * net.ffn_hidden) + net.vocab * h
    adapters = net.layers * rank * ((h + h + 2 * kv) + (h + h))
    assert flops.total == pytest.approx(s * (4 * weights + 12 * net.layers * h * s + 6 * adapters))
    served = step_flops(
        net, Job(global_batch=1, seq_len=s, frozen=True, adapter_rank=rank, mode="inference")
    )
    assert served.total == pytest.approx(s * (2 * weights + 4 * net.layers * h * s + 2 * adapters))


@pytest.mark.parametrize("name", models())
def test_freezing_takes_weight_gradients_only(name):
    """Between two and three times forward: two where every product has a weight, more where
    attention has none."""
    net = model(name)
    job = {"global_batch": 1, "seq_len": net.seq_len}
    trained, frozen = step_flops(net, Job(**job)), step_flops(net, Job(**job, frozen=True))
    assert trained.forward == frozen.forward
    assert 2 * frozen.forward + frozen.attention_forward <= frozen.total * (1 + 1e-9)
    assert frozen.total < trained.total == 3 * trained.forward
