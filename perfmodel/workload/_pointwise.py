"""Norms, activations, residual additions and rotary embeddings.

Kernel names are those of the measurement tables' `op` column, so that calibrated models know them.
A fused RMS norm moves what a fused layer norm moves and is named, and timed, like one.
"""

from dataclasses import replace
from typing import Final

from perfmodel.spec import AdapterModule, Transformer
from perfmodel.workload._linear import adapters, column_linear, linear, row_linear
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import (
    Piece,
    between_casts,
    joined,
    memory,
    moving,
    pointwise,
    recomputed,
)
from perfmodel.workload._quantisation import QUANTISING, activation_quantises


def norm(model: Transformer, local: ShardSizes) -> Piece:
    """Layer or RMS norm over the hidden size; saves its input, or the tensors that its operators
    need (`small_norm`)."""
    return replace(small_norm(model, local, local.norm_tokens, local.hidden), reads_result=True)


def norm_params(model: Transformer, size: int) -> int:
    """Parameters of a norm over `size` elements: a scale each, and a shift each for layer norms
    with biases."""
    # Conditioning gives both itself.
    if model.norms.adaln or not model.norms.norm_parameters:
        return 0
    return unconditioned_norm_params(model, size)


def head_norm_params(model: Transformer, size: int) -> int:
    """Parameters of a norm over `size` elements of queries or keys."""
    # Diffusion transformers have RMS norms there, which conditioning does not reach.
    return size if model.norms.adaln else norm_params(model, size)


def unconditioned_norm_params(model: Transformer, size: int) -> int:
    """Parameters of a norm over `size` elements that is not conditioned on anything."""
    shifted = model.block.bias if model.norms.norm_bias is None else model.norms.norm_bias
    return size * (2 if model.norms.norm == "layer_norm" and shifted else 1)


def residual(model: Transformer, local: ShardSizes) -> Piece:
    """Bias, dropout and residual addition after a row-parallel product; keeps the dropout mask."""
    rows, hidden = local.norm_tokens, local.hidden
    fused = local.job.kernels.fuses("residual")
    backward = []
    if not model.block.dropout:
        ops = [("add", 2)] if fused or not model.block.bias else [("add", 1), ("add", 2)]
    elif fused:
        ops = [("bias_dropout_add", 2)]
        backward.append(memory(local.precision, "bias_dropout_add", rows, hidden, 2, backward=True))
    else:
        ops = [("dropout", 1), ("add", 2)]
        if model.block.bias:
            ops.insert(0, ("add", 1))
        backward.append(memory(local.precision, "dropout", rows, hidden, backward=True))

    # Backward also sums the gradients of the two branches.
    forward = [memory(local.precision, op, rows, hidden, n_inputs) for op, n_inputs in ops]
    return Piece(
        forward=tuple(forward),
        backward_input=(memory(local.precision, "add", rows, hidden, 2), *backward),
        saved_bytes=float(rows * hidden) if model.block.dropout else 0.0,
    )


_GELU_FORMULA: Final = (
    ("pow_scalar", 1),
    ("mul_scalar", 1),
    ("add", 2),
    ("mul_scalar", 1),
    ("tanh", 1),
    ("add_scalar", 1),
    ("mul_scalar", 1),
    ("mul", 2),
)
_GELU_FORMULA_KEEPS: Final = 4
"""0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) as in transformers before 4.0
(`activations.gelu_new`), which saves x, the tanh and both factors of the last product."""


def sub_layer(model: Transformer, local: ShardSizes, mixer: list[Piece]) -> list[Piece]:
    """A sub-layer with its norms and residual addition."""
    return [
        *sub_layer_input(model, local, mixer[0].input_bytes),
        *mixer,
        *sub_layer_output(model, local),
    ]


def sub_layer_input(
    model: Transformer, local: ShardSizes, input_bytes: float, *, vectors: int = 3
) -> list[Piece]:
    """The norm before a sub-layer, and its conditioning.

    Args:
        input_bytes: bytes of its input that the sub-layer keeps.
        vectors: conditioning vectors that are made here.
    """
    # A recomputed norm keeps its input, and the mixer need not keep the norm's output.
    pieces: list[Piece] = []
    if model.norms.norm_at != "output":
        pieces = recomputed("layernorm", [norm(model, local)], [input_bytes])

    # Conditioning scales and shifts the norm's result and gates the sum: products of one row per
    # sequence, and passes over the tokens.
    if model.norms.adaln:
        pieces += conditioning(model, local, vectors, [("mul", 2), ("add", 2)])
    return pieces


def sub_layer_output(model: Transformer, local: ShardSizes) -> list[Piece]:
    """The norm behind a sub-layer, the gate of its conditioning and the residual addition."""
    pieces = [norm(model, local)] if model.norms.norm_at != "input" else []
    if model.norms.adaln:
        pieces.append(_pass(local, [("mul", 2)]))
    return [*pieces, residual(model, local)]


def side_by_side(
    model: Transformer,
    local: ShardSizes,
    attention: list[Piece],
    feed_forward: list[Piece],
    *,
    one_norm: bool,
) -> list[Piece]:
    """Parallel attention and feed-forward (or mixer) on one input, with a joint residual addition
    (`Transformer.parallel_blocks`, `Transformer.parallel_mixers`).

    Args:
        one_norm: both take what the same norm gives.
    """
    *attention_pieces, attention_output = attention
    *feed_forward_pieces, feed_forward_output = feed_forward

    # One norm for both, whose output is gathered once and kept once, or a second one of the same
    # input, which the first keeps.
    first_norm = recomputed("layernorm", [norm(model, local)], [attention[0].input_bytes])
    second_norm: list[Piece] = []
    if not one_norm:
        without_input = replace(norm(model, local), saved_bytes=0.0)
        second_norm = recomputed("layernorm", [without_input], [feed_forward[0].input_bytes])

    # Results of tensor-parallel ranks are added before they are reduced, once for both (gpt-neox
    # megatron/model/transformer.py `ParallelTransformerLayer`, `gpt_j_residual`; MegaScale, arXiv
    # 2402.15627, figure 3). So is the gradient of a single norm's result; gpt-neox reduces the
    # gradient of each product, and with two norms there is no other gradient.
    gradient_rows = local.tokens if one_norm else local.norm_tokens
    summed = Piece(
        forward=(memory(local.precision, "add", local.tokens, local.hidden, 2),),
        backward_input=(memory(local.precision, "add", gradient_rows, local.hidden, 2),),
    )

    # Biases and dropout come with the residual addition, once. The two output products end the
    # layer, so that recompute that stops early repeats neither.
    return [
        *first_norm,
        *attention_pieces,
        *second_norm,
        *feed_forward_pieces,
        joined(attention_output, feed_forward_output),
        summed,
        residual(model, local),
    ]


def beside_experts(
    model: Transformer, local: ShardSizes, attention: list[Piece], experts: list[Piece]
) -> list[Piece]:
    """Attention and experts on the output of one norm, and a joint residual addition
    (`Transformer.parallel_blocks`)."""
    # Experts return tokens to their ranks by collectives of their own, so that each branch is
    # reduced by itself.
    first_norm = recomputed("layernorm", [norm(model, local)], [attention[0].input_bytes])
    sum_of_branches = memory(local.precision, "add", local.norm_tokens, local.hidden, 2)
    summed = Piece(forward=(sum_of_branches,), backward_input=(sum_of_branches,))
    return [*first_norm, *attention, *experts, summed, residual(model, local)]


def conditioning(
    model: Transformer, local: ShardSizes, vectors: int, ops: list[tuple[str, int]]
) -> list[Piece]:
    """Computation of conditioning vectors by SiLU and a product, and their application."""
    rows, hidden = local.shard.micro_batch, local.hidden

    # Where one product makes the vectors of all layers, each layer adds learned ones to them.
    if model.norms.adaln and model.norms.adaln.shared:
        width = vectors * hidden
        learned = pointwise(local.precision, [("add", 2)], rows, width, params=width)
        return [learned, _pass(local, ops)]
    modulations = linear(local.precision, rows, vectors * hidden, hidden, bias=vectors * hidden)
    silu = pointwise(local.precision, [("silu", 1)], rows, hidden)
    return [silu, modulations, _pass(local, ops)]


def _pass(local: ShardSizes, ops: list[tuple[str, int]]) -> Piece:
    """Kernels over all hidden activations; the input is kept."""
    return pointwise(
        local.precision, ops, local.norm_tokens, local.hidden, saved_bytes=local.norm_bytes
    )


def gate(local: ShardSizes) -> list[tuple[str, int]]:
    """Kernels that multiply a tensor by the sigmoid of another."""
    return [("silu_mul", 2)] if local.job.kernels.fuses("activation") else [("silu", 1), ("mul", 2)]


def activation(model: Transformer, local: ShardSizes, rows: int, width: int) -> Piece:
    """The feed-forward's nonlinearity over `rows` x `width`; keeps its inputs."""
    name = model.block.activation
    fused = local.job.kernels.fuses("activation")

    # Gate and value kept in 8 bits, by a cast after the kernel and another before it in backward
    # (Megatron-Core 0.7 core/fusions/fused_bias_swiglu.py `SwiGLUFunction`).
    if (
        local.job.narrow.fp8_activation_inputs
        and model.block.gated_ffn
        and name == "silu"
        and fused
    ):
        cast = memory(local.precision, QUANTISING, rows, 2 * width)
        swiglu = pointwise(
            local.precision, [("silu_mul", 2)], rows, width, saved_bytes=2.0 * rows * width
        )
        return replace(
            swiglu, forward=(*swiglu.forward, cast), backward_input=(cast, *swiglu.backward_input)
        )

    # A gated unit has two inputs, gate and value; fused, it moves the same bytes whatever its
    # function and is named after the measured one. Eager kernels also keep the activated gate.
    inputs = 1
    if model.block.gated_ffn:
        ops = [("silu_mul", 2)] if fused else [(name, 1), ("mul", 2)]
        inputs = 2 if fused else 3
    # ReLU's gradient is taken of its output, which the next product keeps; a square's gradient
    # needs its root.
    elif name in ("relu", "relu2"):
        ops = [("relu", 1)]
        inputs = int(name == "relu2")
        if name == "relu2" and not fused:
            ops.append(("mul", 1))
    elif name == "gelu" and "gelu_formula" in local.job.kernels.eager_kernels:
        ops = list(_GELU_FORMULA)
        inputs = _GELU_FORMULA_KEEPS
    elif name == "gelu" and model.block.bias and fused:
        ops = [("bias_gelu", 1)]
    else:
        ops = [("add", 1), (name, 1)] if model.block.bias else [(name, 1)]
    tensor = float(rows) * width * local.act_bytes
    nonlinearity = pointwise(local.precision, ops, rows, width, saved_bytes=inputs * tensor)

    # Inputs are cut by kernels of their own, unless what joins experts' products has an activation
    # that cuts them (Transformer Engine pytorch/ops/basic/swiglu.py, `ScaledClampedQGeGLU`).
    is_cut = model.block.gated_ffn and model.block.clamped_glu
    if is_cut and not local.job.kernels.fuses("clamp") and not local.job.experts.fused_experts:
        return joined(_clamp(local, rows, width), nonlinearity)
    return nonlinearity


def _clamp(local: ShardSizes, rows: int, width: int) -> Piece:
    """Gate and value clamped by a kernel each, like ReLU, and copied into one tensor again.

    Keeps both as they were (Megatron-Core megatron/core/fusions/fused_bias_geglu.py,
    `weighted_bias_quick_geglu_impl`).
    """
    cut = pointwise(local.precision, [("relu", 1)] * 2, rows, width)
    copied = pointwise(local.precision, [("mul_scalar", 1)], rows, 2 * width)
    return replace(joined(cut, copied), saved_bytes=2.0 * rows * width * local.act_bytes)


def feed_forward(model: Transformer, local: ShardSizes, *, own_input: bool = True) -> list[Piece]:
    """Column-parallel product (gate and value in one), activation, row-parallel product.

    Args:
        own_input: False where attention has the same input, and gathers and keeps it.
    """
    job, bias = local.job, model.block.bias
    width = local.ffn * model.inner_projections
    narrow = job.kernels.operation_fuser and activation_quantises(local)
    has_adapters = job.fine_tuning.adapter_rank > 0
    first_product = column_linear(
        local,
        width,
        local.hidden,
        bias=bias,
        narrow_gradient=narrow,
        kept_input=own_input,
        communicates=own_input,
        shares_input=has_adapters and local.adapts("linear_fc1", "up_proj", "gate_proj"),
    )
    first_adapters: list[Piece] = []
    last_adapters: list[Piece] = []
    if has_adapters:
        outputs = inner_outputs(model, local.ffn)
        first_adapters = adapters(local, list(outputs.items()), local.hidden)
        last_adapters = adapters(
            local, [("linear_fc2", local.hidden)], local.ffn, row_parallel=True
        )
    normed = [sub_norm(model, local, local.ffn)] if model.norms.sub_norms else []
    pieces = [
        first_product,
        *first_adapters,
        *recomputed("mlp_act", [activation(model, local, local.tokens, local.ffn)]),
        *normed,
        *last_adapters,
        row_linear(local, local.hidden, local.ffn, bias=bias, narrow_input=narrow),
    ]

    # Recompute may end before the last product, because backward does not need its output.
    *inner_pieces, last = recomputed("mlp", pieces)
    if job.activations.stops_recompute:
        work = [replace(work, forward=(), forward_comm=()) for work in last.recomputed_work]
        last = replace(last, recomputed_work=tuple(work))
    return [*inner_pieces, last]


def inner_outputs(model: Transformer, inner: int) -> dict[AdapterModule, int]:
    """Output elements of the product to `inner` elements of a feed-forward, and of its parts,
    beside each of which an adapter may stand."""
    outputs: dict[AdapterModule, int] = {
        "linear_fc1": inner * model.inner_projections,
        "up_proj": inner,
    }
    if model.block.gated_ffn:
        outputs["gate_proj"] = inner
    return outputs


def rotary(local: ShardSizes, width: int) -> Piece:
    """Rotation of `width` query and key elements per token; its gradient is a rotation back."""
    name = "rope" if local.job.kernels.fuses("rope") else "rope_unfused"
    return pointwise(local.precision, [(name, 1)], local.tokens, width, saved_bytes=0.0)


def attention_layout(model: Transformer, local: ShardSizes) -> list[Piece]:
    """Copies of queries, keys and values into the attention kernel's layout, and of gradients
    back."""
    # All at once, then keys and values twice more, once to join them and once to interleave them
    # (nanotron).
    queries = local.heads * model.head_dim
    keys_and_values = local.kv_heads * (model.head_dim + model.value_dim)
    widths = (queries + keys_and_values, keys_and_values, keys_and_values)
    return [
        pointwise(local.precision, [("mul_scalar", 1)], local.tokens, width) for width in widths
    ]


def small_norm(model: Transformer, local: ShardSizes, rows: int, size: int) -> Piece:
    """Norm over a compressed activation of `size` elements; keeps its input, or what each of its
    operators needs."""
    # An RMS norm of several operators works on an fp32 copy, of which the mean of squares and the
    # scaling need the same tensor; the product with the weight needs the scaled one, made as wide
    # as the input again (Transformers 4 modeling_llama.py `LlamaRMSNorm`; torchtune
    # modules/rms_norm.py). The input itself is not kept.
    is_layer_norm = model.norms.norm == "layer_norm"
    fused = local.job.kernels.fuses("norm") or is_layer_norm
    precision = local.precision.of_norms if is_layer_norm else local.precision
    kept_bytes = precision.act_bytes if fused else 4 + local.act_bytes
    in_one_kernel = pointwise(
        precision,
        [("layer_norm" if fused else "rms_norm_unfused", 1)],
        rows,
        size,
        params=norm_params(model, size),
        saved_bytes=float(rows * size * kept_bytes),
    )
    if is_layer_norm and local.precision.wide_norms:
        before, in_fp32, after = between_casts(local.precision, rows, size, [in_one_kernel])
        return joined(joined(before, in_fp32), after)
    if not fused or local.job.kernels.row_kernels != "by_reduction":
        return in_one_kernel

    # A mean, where there is one, and a mean of squares read the input before the kernel that
    # normalises it. Backward reads the input and the gradient for the sums over rows, and once more
    # for those over columns that scales need.
    reductions = 2 if model.norms.norm == "layer_norm" else 1
    sums = moving(local.precision, rows, size, reductions * local.act_bytes)
    gradient_sums = moving(local.precision, rows, size, 4 * local.act_bytes)
    return replace(
        in_one_kernel,
        forward=(sums, *in_one_kernel.forward),
        backward_input=(gradient_sums, *in_one_kernel.backward_input),
    )


def head_norm(model: Transformer, local: ShardSizes, *, own_keys: bool = True) -> list[Piece]:
    """Norm of queries and of keys, by head or of all at once, by the kernel of every other norm;
    keeps its input.

    Args:
        own_keys: False where keys are those of an earlier layer, which has normalised them.
    """
    rows = local.tokens
    pieces = [query_or_key_norm(model, local, rows, local.heads)]
    if own_keys:
        pieces.append(query_or_key_norm(model, local, rows, local.kv_heads))
    return pieces


def query_or_key_norm(model: Transformer, local: ShardSizes, rows: int, heads: int) -> Piece:
    """Norm of the queries, or of the keys, of so many heads of `rows` tokens."""
    size = model.head_dim
    if model.attention.qk_norm_of_all_heads:
        size *= heads
    else:
        rows *= heads
    return replace(small_norm(model, local, rows, size), params=head_norm_params(model, size))


def sub_norm(model: Transformer, local: ShardSizes, size: int) -> Piece:
    """Norm of the `size` elements on this device that the last product of attention or of a
    feed-forward takes."""
    # Over all of them, also where tensor parallelism divides them: the sums that ranks then
    # exchange are a number a token, and are left out.
    return small_norm(model, local, local.tokens, size)


def attention_gate(local: ShardSizes, width: int) -> Piece:
    """The sigmoid of a gate times attention's result; keeps both (the gate together with the
    queries)."""
    kept_bytes = float(local.tokens * width * local.act_bytes)
    return pointwise(local.precision, gate(local), local.tokens, width, saved_bytes=kept_bytes)
