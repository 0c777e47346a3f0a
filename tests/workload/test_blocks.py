"""Shapes, kernels, errors and speed of the blocks."""

import gzip
from dataclasses import replace

import pytest

from perfmodel.catalog import model, models
from perfmodel.errors import LayoutError
from perfmodel.ops import MemoryBound
from perfmodel.spec import ConvNet, Job, Layout, Transformer
from perfmodel.workload import BlockOps, Shard, blocks, is_cast, optimizer_op


def shapes(block, phase="forward"):
    return [
        (op.m, op.n, op.k)
        for op, _ in getattr(block, phase)
        if op.family == "gemm" and op.op == "linear"
    ]


def layer_of(name, job=None, **shard):
    net = model(name)
    job = job or Job(global_batch=1, seq_len=net.seq_len)
    return next(b for b, _ in blocks(net, job, Shard(**shard)) if "layer" in b.name)


def test_megatron_shapes_of_gpt3_on_eight_devices():
    block = layer_of("gpt3-175b", tp=8, micro_batch=2)
    n, h = 2 * 2048, 12288
    assert shapes(block) == [
        (n, 3 * h // 8, h),
        (n, h, h // 8),
        (n, 4 * h // 8, h),
        (n, h, 4 * h // 8),
    ]
    assert shapes(block, "backward_input") == [(m, k, n) for m, n, k in reversed(shapes(block))]
    assert shapes(block, "backward_weight") == [(n, k, m) for m, n, k in reversed(shapes(block))]
    assert all(op.accumulate for op, _ in block.backward_weight)


def test_grouped_queries_shrink_the_projection_and_replicate_when_few():
    h, d = 8192, 128
    assert shapes(layer_of("llama3-70b", tp=8))[0] == (8192, (8 + 2) * d, h)
    assert shapes(layer_of("llama3-70b", tp=16))[0] == (8192, (4 + 2) * d, h)


def test_vocabulary_is_padded_for_even_shards():
    head = blocks(model("gpt2-345m"), Job(global_batch=1, seq_len=1024), Shard(tp=8))[-1][0]
    assert shapes(head) == [(1024, 51200 // 8, 1024)]


def test_embeddings_may_be_products_with_one_hot_rows():
    net = model("gpt3-125m")
    job = Job(global_batch=4, seq_len=2048)
    looked_up, product = (
        blocks(net, replace(job, eager_kernels=kinds), Shard(micro_batch=4))[0][0]
        for kinds in ((), ("one_hot_lookup",))
    )
    tokens, h, vocab = 4 * 2048, net.hidden, 50_304
    assert shapes(looked_up) == []
    # words and positions; of a one-hot row nobody takes a gradient
    assert shapes(product) == [(tokens, h, vocab), (tokens, h, 2048)]
    assert shapes(product, "backward_weight") == [(h, 2048, tokens), (h, vocab, tokens)]
    assert shapes(product, "backward_input") == []
    assert product.params == looked_up.params
    assert product.activation_bytes == looked_up.activation_bytes
    # each is written before it is multiplied
    memory = [(op.rows, op.hidden) for op, _ in product.forward if op.family == "memory"]
    assert [shape for shape in memory if shape[1] != h] == [(tokens, vocab), (tokens, 2048)]


def test_latent_attention_projections():
    block = layer_of("deepseek-v3")
    s, h = 4096, 7168
    assert shapes(block)[:5] == [
        (s, 1536, h),
        (s, 128 * 192, 1536),
        (s, 576, h),
        (s, 128 * 256, 512),
        (s, h, 128 * 128),
    ]
    attention = next(op for op, _ in block.forward if op.family == "attention")
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.head_dim_v) == (
        128,
        128,
        192,
        128,
    )


def test_materialised_attention_is_two_batched_products_around_a_softmax():
    job = Job(global_batch=1, seq_len=2048, dtype="fp16", flash_attention=False)
    names = [op.op for op, _ in layer_of("gpt3-175b", job, tp=8).forward]
    assert names == [
        "layer_norm",
        "linear",
        "bmm",
        "scale_mask_softmax",
        "dropout",
        "bmm",
        "linear",
        "bias_dropout_add",
        "layer_norm",
        "linear",
        "bias_gelu",
        "linear",
        "bias_dropout_add",
    ]
    eager = Job(
        global_batch=1, seq_len=2048, dtype="fp16", flash_attention=False, fused_kernels=False
    )
    assert len(layer_of("gpt3-175b", eager, tp=8).forward) > len(names)


def _unfused_scores(name: str) -> tuple[list[str], list[str]]:
    """Names of element-wise kernels on scores, forward and backward, of the first layer that
    attends."""
    net = model(name)
    job = Job(global_batch=8, seq_len=net.seq_len, dtype="fp32", flash_attention=False)
    layer = next(
        block for block, _ in blocks(net, job, Shard(micro_batch=2)) if "layer" in block.name
    )
    keys = net.seq_len

    def names(kernels) -> list[str]:
        return [
            op.op
            for op, _ in kernels
            if isinstance(op, MemoryBound) and op.hidden == keys != net.hidden
        ]

    return names(layer.forward), names(layer.backward_input)


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        (
            "gpt2-1.5b",
            ["mul_scalar", "masked_fill", "softmax"],
            ["softmax", "masked_fill", "mul_scalar"],
        ),
        ("bert-large", ["mul_scalar", "add", "softmax"], ["softmax", "mul_scalar"]),
        ("vit-l-16", ["mul_scalar", "softmax"], ["softmax", "mul_scalar"]),
        ("t5-11b", ["add", "softmax"], ["softmax", "add"]),
    ],
)
def test_only_decoders_fill_the_gradient_of_masked_scores(name, forward, backward):
    """Encoders add their mask, images have none, and T5 adds positions to scores that it does not
    scale."""
    there, back = _unfused_scores(name)
    assert [kernel for kernel in there if kernel != "dropout"] == forward
    assert [kernel for kernel in back if kernel != "dropout"] == backward


@pytest.mark.parametrize(
    "name", ["bert-large", "gpt2-1.5b", "vit-l-16", "mixtral-8x7b", "resnet-50"]
)
@pytest.mark.parametrize("flash", [True, False])
def test_every_product_of_a_tf32_job_runs_in_tf32(name, flash):
    """The head, batched products of scores, routers and adapters too; what is no product is in
    fp32."""
    net = model(name)
    job = Job(global_batch=8, seq_len=net.seq_len, dtype="tf32", flash_attention=flash)
    for block, _ in blocks(net, job, Shard()):
        for kernels in (block.forward, block.backward_input, block.backward_weight):
            for op, _ in kernels:
                is_product = op.is_matmul or op.uses_matrix_units
                assert op.dtype == ("tf32" if is_product else "fp32"), op


def test_selective_recompute_repeats_the_attention_core():
    job = Job(global_batch=1, seq_len=2048, flash_attention=False)
    names = [op.op for op, _ in layer_of("gpt3-175b", job).recompute_selective]
    assert names == ["bmm", "scale_mask_softmax", "dropout", "bmm"]
    fused = layer_of("llama2-7b")
    assert [op.op for op, _ in fused.recompute_selective] == ["flash_attention"]
    assert fused.recompute_full == fused.forward


def test_fp8_products_quantise_their_inputs_and_leave_the_rest_in_16_bit():
    block = layer_of("llama3-8b", Job(global_batch=1, seq_len=4096, dtype="fp8"))
    kinds = {(op.op, op.dtype) for op, _ in block.forward}
    assert {
        ("linear", "fp8"),
        ("quantize_fp8_static", "bf16"),
        ("flash_attention", "bf16"),
    } <= kinds


def test_inputs_of_swiglu_in_8_bits_are_half_the_bytes_for_two_casts():
    job = Job(global_batch=1, seq_len=4096, dtype="fp8")
    plain, narrow = (
        layer_of("llama3-8b", replace(job, fp8_activation_inputs=on)) for on in (False, True)
    )
    assert plain.activation_bytes.none - narrow.activation_bytes.none == 4096 * 2 * 14336
    for phase, further in (("forward", 1), ("backward_input", 1), ("backward_weight", 0)):
        casts = [sum(n for op, n in getattr(one, phase) if is_cast(op)) for one in (plain, narrow)]
        assert casts[1] - casts[0] == further
    # nothing else than fused SwiGLU can
    for name, other in (
        ("gpt3-175b", job),
        ("llama3-8b", replace(job, eager_kernels=("activation",))),
    ):
        assert layer_of(name, other) == layer_of(name, replace(other, fp8_activation_inputs=True))


@pytest.mark.parametrize(
    ("job", "per_token"),
    [
        # norms' inputs; queries, keys and values; attention's result and statistics; the inputs of
        # SwiGLU
        ({}, 2 * 2 * 4096 + 2 * 6144 + 2 * 4096 + 4 * 32 + 2 * 2 * 14336),
        ({"dtype": "fp8"}, 2 * 2 * 4096 + 2 * 6144 + 2 * 4096 + 4 * 32 + 2 * 2 * 14336),
        (
            {"dtype": "fp8", "fp8_attention": True},
            2 * 2 * 4096 + 6144 + 4096 + 4 * 32 + 2 * 2 * 14336,
        ),
        # an adapter's input as it was dropped from, and the mask, of both projections
        (
            {"adapter_rank": 16},
            2 * 2 * 4096 + 2 * 6144 + 2 * 4096 + 4 * 32 + 2 * 2 * 14336 + 2 * 3 * 4096,
        ),
    ],
)
def test_a_frozen_layer_keeps_what_gradients_of_its_inputs_need(job, per_token):
    layer = layer_of("llama3-8b", Job(global_batch=1, seq_len=8192, frozen=True, **job))
    assert layer.activation_bytes.none == 8192 * per_token


def test_attention_in_8_bits_keeps_8_bits():
    job = Job(global_batch=1, seq_len=4096, dtype="fp8")
    plain, narrow = (layer_of("llama3-8b", replace(job, fp8_attention=on)) for on in (False, True))
    # half of queries, keys and values; its result beside the copy that the output projection keeps
    assert plain.activation_bytes.none - narrow.activation_bytes.none == 4096 * (6144 - 4096)


@pytest.mark.parametrize("dtype", ["fp8", "fp4"])
def test_attention_in_8_bits_casts_what_it_takes_and_gives(dtype):
    job = Job(global_batch=1, seq_len=4096, dtype=dtype)
    plain, narrow = (layer_of("llama3-8b", replace(job, fp8_attention=on)) for on in (False, True))
    assert {op.dtype for op, _ in narrow.forward if op.family == "attention"} == {"fp8"}
    for phase, further in (("forward", 2), ("backward_input", 2), ("backward_weight", 0)):
        casts = [sum(n for op, n in getattr(one, phase) if is_cast(op)) for one in (plain, narrow)]
        assert casts[1] - casts[0] == further
    for wrong in ({"dtype": "bf16"}, {"flash_attention": False}):
        with pytest.raises(LayoutError, match="fp8_attention"):
            replace(job, fp8_attention=True, **wrong)


def quantised_bytes(recipe: str) -> float:
    """What a layer's forward and backward move to quantise operands."""
    block = layer_of("llama3-8b", Job(global_batch=1, seq_len=4096, dtype="fp8", fp8_recipe=recipe))
    kernels = (*block.forward, *block.backward_input, *block.backward_weight)
    return sum(count * op.bytes for op, count in kernels if op.op == "quantize_fp8_static")


def test_recipes_differ_by_what_quantising_moves():
    plain, delayed, current, rowwise = map(quantised_bytes, ("", "delayed", "current", "rowwise"))
    assert delayed == pytest.approx(plain * 4 / 3, rel=1e-3)
    assert current == pytest.approx(plain * 6 / 3, rel=1e-3)
    assert (
        delayed < quantised_bytes("mxfp8") < quantised_bytes("nvfp4") < quantised_bytes("blockwise")
    )
    # weights too, for each micro-batch
    assert rowwise > plain * 5 / 3


@pytest.mark.parametrize("name", ["llama3-8b", "gpt3-6.7b"])
def test_weight_gradients_of_16_bits_are_not_quantised(name):
    """torchao float8/config.py, LW_AXISWISE_WITH_GW_HP."""
    job = Job(global_batch=1, seq_len=4096, dtype="fp8", fp8_recipe="rowwise")
    narrow, wide = (
        layer_of(name, replace(job, fp8_recipe=r)) for r in ("rowwise", "rowwise_with_gw_hp")
    )
    # Scales of rows multiply both gradients after their products, unless the weight gradient has 16
    # bits.
    input_gradients = [entry for entry in narrow.backward_input if entry[0].op != "mul_scalar"]
    assert (wide.forward, list(wide.backward_input)) == (narrow.forward, input_gradients)
    assert any(is_cast(op) for op, _ in narrow.backward_weight)
    assert not any(is_cast(op) for op, _ in wide.backward_weight)
    products = [
        [(op, n) for op, n in one.backward_weight if op.family == "gemm"] for one in (narrow, wide)
    ]
    assert [(replace(op, dtype="bf16"), n) for op, n in products[0]] == products[1]
    # the weight gradient's operand is kept in 16 bits either way
    assert wide.activation_bytes == narrow.activation_bytes


def test_the_head_stays_in_16_bits():
    job = Job(global_batch=1, seq_len=4096, dtype="fp8")
    (head,) = (b for b, _ in blocks(model("llama3-8b"), job, Shard()) if b.name == "head")
    products = {
        op.dtype
        for op, _ in (*head.forward, *head.backward_input, *head.backward_weight)
        if op.family == "gemm"
    }
    assert products == {"bf16"}


def test_an_unknown_recipe_is_refused():
    with pytest.raises(LayoutError, match="fp8_recipe must be delayed"):
        Job(global_batch=1, seq_len=8, fp8_recipe="hybrid")  # pyright: ignore[reportArgumentType]


def test_experts_run_as_grouped_products_and_as_one_fused_kernel_in_inference():
    block = layer_of("mixtral-8x7b", Job(global_batch=1, seq_len=4096, mode="inference"), ep=8)
    (moe,) = (op for op, _ in block.forward if op.family == "moe")
    assert (moe.tokens, moe.topk, moe.experts, moe.moe_ep) == (4096 * 8, 2, 8, 8)
    block = layer_of("mixtral-8x7b", ep=8)
    forward = [op for op, _ in block.forward if op.op == "grouped_linear"]
    grouped = [op for op, _ in block.backward_weight if op.op == "grouped_linear"]
    assert [(op.groups, op.m, op.n, op.k) for op in forward] == [
        (1, 8192, 28672, 4096),
        (1, 8192, 4096, 14336),
    ]
    assert [(op.groups, op.m, op.n, op.k) for op in grouped] == [
        (1, 8192, 4096, 14336),
        (1, 8192, 28672, 4096),
    ]


def test_encoder_decoder_layers_differ_by_cross_attention():
    parts = {
        b.name: b for b, _ in blocks(model("t5-large"), Job(global_batch=1, seq_len=512), Shard())
    }
    heads = 1024
    assert shapes(parts["encoder_layer"])[0] == (512, 3 * heads, 1024)
    assert (512, 2 * heads, 1024) in shapes(parts["decoder_layer"])
    assert len(parts["decoder_layer"].forward) > len(parts["encoder_layer"].forward)


def test_every_second_layer_of_gpt_oss_attends_in_full():
    net = model("gpt-oss-20b")
    parts = blocks(net, Job(global_batch=1, seq_len=4096), Shard())
    windows = [op.window for b, _ in parts for op, _ in b.forward if op.family == "attention"]
    assert windows == [128, 0] * 12


def test_residual_units_repeat():
    parts = blocks(model("resnet-50"), Job(global_batch=32, seq_len=1), Shard(micro_batch=32))
    repeats = {b.name: n for b, n in parts}
    assert [repeats[f"conv_{g}_rest"] for g in (2, 3, 4, 5)] == [2, 3, 5, 2]
    assert parts[0][0].boundary_bytes == 32 * 64 * 112 * 112 * 2


def test_a_softmax_in_fp32_moves_scores_through_casts_of_their_own():
    """Per score 28 bytes forward (2 casts of 6, a mask and a softmax of 8) and 36 backward, instead
    of fused 4 and 6; products and fp32 jobs are as without, and the fp32 result is kept for the
    softmax's gradient."""
    net, shard = model("gpt2-117m"), Shard(micro_batch=4)
    job = Job(global_batch=4, seq_len=1024, dtype="fp16", flash_attention=False)

    def layer(**changes):
        return blocks(net, replace(job, **changes), shard)[1][0]

    def score_bytes(kernels) -> float:
        of_scores = [(op, n) for op, n in kernels if op.family == "memory" and op.hidden == 1024]
        return sum(n * op.bytes for op, n in of_scores if op.op != "dropout")

    scores = 4 * 12 * 1024 * 1024
    fused, wide = layer(), layer(eager_kernels=("wide_softmax",))
    assert shapes(fused) == shapes(wide)
    assert score_bytes(fused.forward) == 4 * scores
    assert score_bytes(wide.forward) == 28 * scores
    assert score_bytes(wide.backward_input) == 36 * scores
    assert wide.activation_bytes.none - fused.activation_bytes.none == pytest.approx(4 * scores)
    assert layer(dtype="fp32", eager_kernels=("wide_softmax",)) == layer(dtype="fp32")


def test_a_loss_with_its_gradient_passes_over_the_logits_once():
    """Backward has no kernel of the loss, the logits are streamed in one kernel, and kept once in
    their own type."""
    net, shard = model("gpt2-117m"), Shard(micro_batch=4)
    apart, together = (
        blocks(net, Job(global_batch=4, seq_len=1024, loss_with_gradient=value), shard)[-1][0]
        for value in (False, True)
    )
    logits = 4 * 1024 * next(op.hidden for op, _ in apart.forward if op.op == "cross_entropy")

    def element_wise(kernels) -> list:
        return [op for op, n in kernels for _ in range(n) if op.family == "memory"]

    backward = len(element_wise(apart.backward_input)) - len(element_wise(together.backward_input))
    assert backward == 1
    assert len(element_wise(apart.forward)) == len(element_wise(together.forward))
    # Two reads and a write, as long as the four passes of a sum of three tensors.
    assert max(op.bytes for op in element_wise(together.forward)) == 4 * 2 * logits
    saved_bytes = apart.activation_bytes.none - together.activation_bytes.none
    assert saved_bytes == pytest.approx(2 * logits)
    assert together.workspace_bytes < apart.workspace_bytes


@pytest.mark.parametrize(("name", "tp"), [("llama3-8b", 1), ("llama3-8b", 2), ("gpt3-6.7b", 1)])
def test_checkpoints_of_operators_keep_half_of_the_products_and_attention(name, tp):
    """They repeat the other half, everything element-wise and no attention; what they keep lies
    between the rest."""
    sequence, net = 2048, model(name)
    job = Job(global_batch=1, seq_len=sequence, recompute_modules=("second_products",))
    layer = layer_of(name, job, tp=tp)

    def flops(kernels, kind) -> float:
        return sum(op.flops * n for op, n in kernels if op.family == kind)

    assert flops(layer.recompute_selective, "gemm") == pytest.approx(
        flops(layer.forward, "gemm") / 2
    )
    assert flops(layer.recompute_selective, "attention") == 0
    assert flops(layer.recompute_selective, "memory") == pytest.approx(
        flops(layer.forward, "memory")
    )
    kept = layer.activation_bytes
    assert kept.full < kept.selective < kept.none
    widths = (net.heads + 2 * net.kv_heads) * net.head_dim + net.hidden * tp * 2
    widths += net.ffn_hidden * (2 if net.block.gated_ffn else 1)
    products_bytes = 2 * sequence * widths / tp / 2
    attention_bytes = 2 * sequence * net.heads * net.head_dim / tp
    assert kept.selective - kept.full == pytest.approx(products_bytes + attention_bytes)


def test_narrow_logits_are_kept_once_in_their_own_type():
    """No fp32 copy is kept, nor a buffer for the gradient; kernels stay the same."""
    net, shard = model("gpt2-117m"), Shard(micro_batch=4)
    wide, narrow = (
        blocks(net, Job(global_batch=4, seq_len=1024, narrow_logits=value), shard)[-1][0]
        for value in (False, True)
    )
    logits = 4 * 1024 * next(op.hidden for op, _ in wide.forward if op.op == "cross_entropy")
    assert wide.activation_bytes.none - narrow.activation_bytes.none == pytest.approx(2 * logits)
    assert wide.workspace_bytes - narrow.workspace_bytes == pytest.approx(2 * logits)
    assert (narrow.forward, narrow.backward_input) == (wide.forward, wide.backward_input)
    # tensors of 32 bits have nothing narrower
    full = [
        blocks(net, Job(global_batch=4, seq_len=1024, dtype="fp32", narrow_logits=value), shard)[
            -1
        ][0]
        for value in (False, True)
    ]
    assert full[0].activation_bytes.none == full[1].activation_bytes.none


@pytest.mark.parametrize(
    "name", ["llama3-8b", "mixtral-8x7b", "gpt3-1.3b", "t5-v1.1-base", "t5-base"]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_that_overwrite_gate_and_value_are_no_new_tensor(name: str, tp: int) -> None:
    """The workspace is smaller by one tensor of the activation's size, where there is a gate;
    nothing else changes."""
    net = model(name)
    assert isinstance(net, Transformer)
    shard = Shard(tp=tp, sequence_parallel=tp > 1)
    job = Job(global_batch=4, seq_len=1024)
    plain, in_place = (
        [block for block, _ in blocks(net, replace(job, in_place_activation=on), shard)]
        for on in (False, True)
    )
    for before, after in zip(plain, in_place, strict=True):
        assert replace(before, workspace_bytes=0.0) == replace(after, workspace_bytes=0.0)
        saved = before.workspace_bytes - after.workspace_bytes
        is_gated = before.is_layer and net.block.gated_ffn
        assert (saved > 0) == is_gated
        # Two tensors of that size were there before, of the activation's input and of its result.
        assert not is_gated or before.workspace_bytes > 2 * saved


@pytest.mark.parametrize("tp", [1, 2])
def test_a_chunked_loss_never_has_more_logits_than_hidden_states(tp):
    """It keeps the gradient of the hidden states instead, and passes over as much."""
    net, shard = model("llama3-8b"), Shard(micro_batch=1, tp=tp)
    together, chunked = (
        blocks(
            net,
            Job(global_batch=4, seq_len=4096, loss_with_gradient=True, chunked_loss=value),
            shard,
        )[-1][0]
        for value in (False, True)
    )
    hidden, logits = 2 * 4096 * net.hidden, 2 * 4096 * net.vocab / tp
    assert together.activation_bytes.none - chunked.activation_bytes.none == pytest.approx(
        logits - hidden
    )
    # Besides a chunk's logits there is its weight gradient, in 16 bits and in fp32.
    assert 0 < chunked.workspace_bytes - (2 + 4) * net.vocab / tp * net.hidden <= hidden
    assert chunked.forward == together.forward


def test_a_fused_batch_norm_takes_in_what_follows_it():
    """No sum, no ReLU and none of their traffic is left; products, weights and what is kept
    stay."""
    own, fused = (
        blocks(
            model("resnet-50"),
            Job(global_batch=8, seq_len=1, fused_batch_norm=value),
            Shard(micro_batch=8),
        )
        for value in (False, True)
    )

    def names(parts) -> list[str]:
        return [
            op.op for block, n in parts for op, count in block.forward for _ in range(n * count)
        ]

    left = [name for name in names(own) if name not in ("add", "relu")]
    assert names(fused) == left
    assert {"add", "relu"} <= set(names(own))
    for (alone, n), (together, m) in zip(own, fused, strict=True):
        assert (n, alone.params, alone.activation_bytes) == (
            m,
            together.params,
            together.activation_bytes,
        )


def test_batch_norms_of_channels_last_images_move_three_and_five_tensors():
    """In 16 bits alone; everything but the norms stays."""

    def unit(dtype: str, channels_last: bool):
        job = Job(global_batch=8, seq_len=1, dtype=dtype, channels_last=channels_last)
        return blocks(model("resnet-50"), job, Shard(micro_batch=8))[0][0]

    def norm_bytes(block, kernels) -> float:
        moved = sum(n * op.bytes for op, n in kernels if op.family == "memory" and op.op != "relu")
        return moved / (8 * 64 * 112 * 112 * 2)

    plain, last = unit("fp16", False), unit("fp16", True)
    assert (norm_bytes(plain, plain.forward), norm_bytes(plain, plain.backward_input)) == (2, 3)
    assert (norm_bytes(last, last.forward), norm_bytes(last, last.backward_input)) == (3, 5)
    assert (last.params, last.activation_bytes) == (plain.params, plain.activation_bytes)
    assert unit("fp32", True) == unit("fp32", False)


@pytest.mark.parametrize(
    ("name", "shard", "message"),
    [
        (
            "gpt3-175b",
            {"tp": 5},
            r"96 attention heads are not divisible by tp=5; choose tp among 1, 2, 3, 4, 6",
        ),
        ("llama3-70b", {"tp": 64, "micro_batch": 1}, None),
        ("llama2-34b", {"tp": 3}, r"64 attention heads are not divisible by tp=3"),
        ("gpt3-175b", {"cp": 3}, r"sequence length 2048 is not divisible by 3 \(cp\)"),
        ("bert-large", {"cp": 3}, r"sequence length 512 is not divisible by 3 \(cp\)"),
        (
            "mixtral-8x7b",
            {"ep": 3},
            r"8 experts are not divisible by ep=3; choose ep among 1, 2, 4, 8",
        ),
        ("mixtral-8x7b", {"ep": 2, "tp": 2}, r"need sequence_parallel=true"),
        ("resnet-50", {"tp": 2}, r"tp=2 must be 1 for a convolutional network"),
        ("mlp-1b", {"tp": 3}, r"hidden=8192 is not divisible by tp=3"),
        ("mlp-1b", {"cp": 2}, r"cp=2 and ep=1 must be 1"),
    ],
)
def test_a_shard_that_does_not_divide_is_refused_with_a_remedy(name, shard, message):
    net = model(name)
    job = Job(global_batch=1, seq_len=net.seq_len)
    if message is None:
        blocks(net, job, Shard(**shard))
    else:
        with pytest.raises(LayoutError, match=message):
            blocks(net, job, Shard(**shard))


def test_causal_context_parallelism_gives_each_rank_two_chunks():
    blocks(model("gpt3-175b"), Job(global_batch=1, seq_len=1028), Shard(cp=2))
    with pytest.raises(LayoutError, match=r"1026 is not divisible by 4 \(2\*cp\)"):
        blocks(model("gpt3-175b"), Job(global_batch=1, seq_len=1026), Shard(cp=2))


def test_sequence_parallelism_needs_a_divisible_sequence():
    with pytest.raises(
        LayoutError, match=r"1004 is not divisible by 8 \(tp\*cp of sequence_parallel\)"
    ):
        blocks(
            model("gpt3-175b"),
            Job(global_batch=1, seq_len=1004),
            Shard(tp=8, sequence_parallel=True),
        )


def test_context_parallelism_needs_flash_attention():
    with pytest.raises(LayoutError, match="needs flash attention"):
        blocks(
            model("gpt3-175b"),
            Job(global_batch=1, seq_len=2048, flash_attention=False),
            Shard(cp=2),
        )


@pytest.mark.parametrize("bad", [{"tp": 0}, {"micro_batch": -1}, {"tp": 4, "etp": 0}])
def test_a_shard_checks_itself(bad):
    with pytest.raises(LayoutError):
        Shard(**bad)


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_every_model_builds_in_every_mode(name, flash, fused):
    net = model(name)
    job = Job(
        global_batch=2, seq_len=min(net.seq_len, 512), flash_attention=flash, fused_kernels=fused
    )
    parts = blocks(net, job, Shard(micro_batch=2))
    assert hash(parts)
    for block, n in parts:
        assert n >= 1
        assert block.params >= block.expert_params >= 0
        held = block.activation_bytes
        assert held.none >= held.selective >= 0
        if isinstance(net, Transformer):
            assert held.selective >= held.full
        assert all(op.bytes > 0 and count > 0 for op, count in block.forward)
    if isinstance(net, ConvNet):
        assert len(parts) >= 10


def test_kernel_names_are_those_of_the_measurement_tables(data_dir):
    measured = set()
    for path in data_dir.glob("*/*.csv.gz"):
        with gzip.open(path, "rt") as file:
            header = file.readline().rstrip("\n").split(",")
            if "op" in header:
                where = header.index("op")
                measured |= {line.split(",", where + 1)[where] for line in file}
    named = set()
    for name in models():
        net = model(name)
        for flash, fused in ((True, True), (False, True), (False, False)):
            job = Job(global_batch=1, seq_len=64, flash_attention=flash, fused_kernels=fused)
            for block, _ in blocks(net, job, Shard()):
                named |= {
                    op.op
                    for op, _ in (*block.forward, *block.backward_input, *block.backward_weight)
                }
    # the tables have neither a fused cross entropy nor recurrences by chunks or by scans
    unmeasured = {"cross_entropy", "state_space", "delta_rule", "selective_scan"}
    assert named - measured == unmeasured


def test_a_shard_is_what_a_layout_divides():
    layout = Layout(tp=4, cp=2, dp=4, ep=8, pp=3, micro_batch=5, sequence_parallel=True)
    assert Shard.of(layout) == Shard(tp=4, cp=2, ep=8, micro_batch=5, sequence_parallel=True)


def test_optimizer_traffic():
    mixed = Job(global_batch=1, seq_len=1)
    # gradient 4, states 12 + 12, weight 2, clipping 12
    assert optimizer_op(1000, mixed).bytes == 42 * 1000
    assert optimizer_op(1000, Job(global_batch=1, seq_len=1, dtype="fp32")).bytes == 28 * 1000
    # of fp16 a gradient is also copied to fp32, and rid of the loss scale there: 2 + 4 and 4 + 4
    assert (
        optimizer_op(1000, Job(global_batch=1, seq_len=1, dtype="fp16")).bytes
        == (42 + 6 + 8) * 1000
    )
    sgd = Job(global_batch=1, seq_len=1, optimizer="sgd", grad_dtype="bf16")
    assert optimizer_op(1000, sgd).bytes == (2 + 16 + 2) * 1000


def test_inputs_of_activations_are_cut_by_kernels_of_their_own_where_nothing_fuses_that() -> None:
    """Megatron-Core's two clamps and their concatenation; with `moe_act` recomputed only what they
    cut is kept."""
    net = model("gpt-oss-120b")
    job = Job(global_batch=4, seq_len=4096, dtype="bf16", recompute_modules=("moe_act",))
    whole, cut = (
        blocks(net, replace(job, eager_kernels=kinds), Shard(ep=64)) for kinds in ((), ("clamp",))
    )
    (one, other) = (max((b for b, _ in of), key=lambda b: b.expert_params) for of in (whole, cut))
    rows, wide = 4096 * 4, 2 * 2880

    def kernels(block: BlockOps, phase: str) -> dict[tuple[str, int], int]:
        found = [
            (op, n)
            for op, n in getattr(block, phase)
            if isinstance(op, MemoryBound) and op.rows == rows
        ]
        return {(op.op, op.hidden): n for op, n in found if op.op in ("relu", "mul_scalar")}

    for phase in ("forward", "backward_input", "recompute_selective"):
        assert kernels(other, phase) == {("relu", 2880): 2, ("mul_scalar", wide): 1}
        assert not kernels(one, phase)
    kept = [
        (block.activation_bytes.none, block.activation_bytes.selective) for block in (one, other)
    ]
    assert kept[1][0] - kept[0][0] == 2 * rows * wide / 2 * 2
    assert kept[1][1] == kept[0][1]
    joined, plain = (
        replace(job, eager_kernels=kinds, fused_experts=True) for kinds in (("clamp",), ())
    )
    assert blocks(net, joined, Shard(ep=64)) == blocks(net, plain, Shard(ep=64))


@pytest.mark.parametrize(("dtype", "casts"), [("bf16", 1), ("fp8", 1), ("fp32", 0)])
def test_a_loss_of_several_operators_makes_narrow_logits_wide_and_back(dtype, casts):
    job = Job(global_batch=1, seq_len=1024, dtype=dtype)
    fused, apart = (
        blocks(model("llama3-8b"), replace(job, eager_kernels=kinds), Shard())[-1][0]
        for kinds in ((), ("cross_entropy",))
    )
    for phase in ("forward", "backward_input"):
        wide = [
            (op, n) for op, n in getattr(apart, phase) if op.op == "add" and op.hidden == 128256
        ]
        assert sum(n for _, n in wide) == casts
        # it reads 2 bytes and writes 4, or the other way round
        assert all(op.bytes == 6 * 1024 * 128256 for op, _ in wide)
        assert not [op for op, _ in getattr(fused, phase) if op.op == "add" and op.hidden == 128256]


FORWARD_KERNELS_OF_BACKWARD = {"add", "mul_scalar", "quantize_fp8_static", "silu"}
"""Sums of gradients, an adapter's scale, casts of operands, and what Mamba's fused kernel computes
again."""


@pytest.mark.parametrize(
    "name",
    [
        "gpt3-1.3b",
        "llama3-8b",
        "mixtral-8x7b",
        "deepseek-v2-lite",
        "bert-large",
        "t5-base",
        "gemma-2b",
        "dit-b-2",
        "nemotron-3-nano",
        "gpt-oss-20b",
        "resnet-50",
        "mlp-1b",
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"flash_attention": False},
        {"dtype": "fp8", "fp8_recipe": "current"},
        {"frozen": True, "adapter_rank": 8},
    ],
)
def test_kernels_of_backward_are_those_of_gradients_and_all_others_are_not(name, fields):
    net = model(name)
    if "adapter_rank" in fields and (
        not isinstance(net, Transformer) or net.decoder_layers or net.norms.adaln
    ):
        fields = {"frozen": True}
    job = Job(global_batch=1, seq_len=net.seq_len, **fields)
    for shard in (Shard(), Shard(tp=2, sequence_parallel=True)):
        if isinstance(net, ConvNet) and shard.tp > 1:
            continue
        for block, _ in blocks(net, job, shard):
            for phase in ("forward", "recompute_selective", "recompute_full"):
                assert {op.pass_ for op, _ in getattr(block, phase)} <= {"fwd"}, (block.name, phase)
            again = {op.op for op, _ in block.backward_input if op.pass_ == "fwd"}
            assert again <= FORWARD_KERNELS_OF_BACKWARD, block.name
            assert "fwd" not in {op.pass_ for op, _ in block.backward_weight}, block.name


@pytest.mark.parametrize(
    ("name", "fills"), [("llama3-8b", 1), ("gpt3-1.3b", 1), ("deepseek-v2-lite", 0)]
)
def test_servers_fill_their_cache_with_the_keys_and_values_of_prompts(name, fills):
    """A kernel writes those of a prompt; of single tokens the one that reads the cache does, of
    latent attention the projection. Training has no cache."""
    net = model(name)
    prompt = Job(global_batch=1, seq_len=1024, mode="inference")
    token = replace(prompt, seq_len=1, cached_tokens=1024)
    for tp in (1, 2):
        for job, expected in ((prompt, fills), (token, 0), (replace(prompt, mode="train"), 0)):
            block = layer_of(name, job, tp=tp)
            written = [op for op, _ in block.forward if op.op == "fill_cache"]
            assert len(written) == expected
            for op in written:
                assert (op.rows, op.hidden) == (1024, net.kv_heads // tp * 2 * net.head_dim)


@pytest.mark.parametrize("seq_len", [1024, 4096])
@pytest.mark.parametrize("tp", [1, 2])
def test_attention_keeps_as_many_statistics_however_few_keys_it_sees(seq_len, tp):
    """One of 4 bytes per query and head: of all keys, of a window and of chunks."""
    plain = replace(model("llama3-8b"), window=0)
    job = Job(global_batch=1, seq_len=seq_len)
    saved = set()
    for net in (plain, replace(plain, window=512), replace(plain, window=512, chunked_window=True)):
        layers = blocks(net, job, Shard(tp=tp))
        saved.add(next(b.activation_bytes.none for b, _ in layers if b.is_layer))
    assert len(saved) == 1
