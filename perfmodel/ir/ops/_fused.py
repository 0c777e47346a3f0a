"""Fused kernels: layer norm, softmax, self-attention over joint queries, keys and values, and
weight updates by gradient descent and Adam (Kingma and Ba 2015, algorithm 1).

Attention takes the parts of a sequence, in order: the queries of the last meet the keys and values
of all. Of one part it is that of a whole sequence.
"""

from dataclasses import replace

from perfmodel.ir._instruction import Instruction, RuleError
from perfmodel.ir.op_definition import (
    REPLICATED,
    Emitter,
    Names,
    OpDefinition,
    Partial,
    Sharded,
    ShardingDecision,
    ShardingQuery,
    Tensors,
    Values,
    WorkRule,
    kernel_dtype,
    memory_bound,
    operands,
    required,
    table,
)
from perfmodel.ir.ops._elementwise import gradient_of_operands, same_dtype
from perfmodel.ops import Attention, Op


def _layer_norm(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a layer norm over the last axis, with gain and bias."""
    operands(3, inputs)
    same_dtype(inputs)
    x, gain, bias = inputs
    if x.rank < 1 or gain.shape != x.shape[-1:] or bias.shape != gain.shape:
        raise RuleError(
            f"gain and bias must have shape {x.shape[-1:]}, got {gain.shape} and {bias.shape}"
        )
    return (x,)


def _layer_norm_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of a layer norm: one op gives the gradients of all three operands."""
    x, gain, bias = instruction.inputs
    return emitter.emit(
        "layer_norm_grad",
        (x, gain, dy),
        (f"grad_{x}", f"grad_{gain}", f"grad_{bias}"),
        instruction.attributes,
    )


def _layer_norm_grad(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a layer norm's gradients, one per operand."""
    operands(3, inputs)
    same_dtype(inputs)
    x, gain, dy = inputs
    if gain.shape != x.shape[-1:] or dy.shape != x.shape:
        raise RuleError(f"the gradient must have shape {x.shape} and the gain {x.shape[-1:]}")
    return x, gain, gain


def _row_axis(query: ShardingQuery, *candidates: int) -> int | None:
    """An axis other than the last along which one of the operands is sharded."""
    # Mean and variance are taken along the last axis, which therefore cannot be sharded; rows are
    # independent.
    rank = query.operands[0].rank
    axes = [query.sharded_axis(i) for i in candidates]
    return next((a for a in axes if a is not None and a < rank - 1), None)


def _shard_layer_norm(query: ShardingQuery) -> ShardingDecision:
    axis = _row_axis(query, 0)
    if axis is None:
        return query.replicated()
    return ShardingDecision((Sharded(axis), REPLICATED, REPLICATED), (Sharded(axis),))


def _shard_layer_norm_grad(query: ShardingQuery) -> ShardingDecision:
    axis = _row_axis(query, 0, 2)
    if axis is None:
        return query.replicated()
    # Gain and bias are shared by all rows, so each part has a partial sum of their gradients.
    rows = Sharded(axis)
    return ShardingDecision((rows, REPLICATED, rows), (rows, Partial("sum"), Partial("sum")))


def _softmax(inputs: Tensors, attributes: Values) -> Tensors:
    operands(1, inputs)
    return inputs


def _softmax_grad(inputs: Tensors, attributes: Values) -> Tensors:
    operands(2, inputs)
    same_dtype(inputs)
    return inputs[:1]


def _shard_rows(query: ShardingQuery) -> ShardingDecision:
    # Each row of a softmax needs its own maximum and sum; a sharded last axis is gathered first.
    last = query.operands[0].rank - 1
    return query.all_along_one_axis(lambda axis: axis < last)


def _attention(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of an attention, whose operands are parts of one sequence in order."""
    operands(max(1, len(inputs)), inputs)
    same_dtype(inputs)
    *_, qkv = inputs
    # Heads hold query, key and value side by side ([..., head, (q, k, v), size]), so that a slice
    # of the width by heads is a smaller attention (Megatron-LM, Shoeybi et al. 2019, section 3).
    heads = required(attributes, "heads", int)
    if qkv.rank != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        raise RuleError(
            f"a tensor [batch, sequence, {heads} heads * 3 * head size] is needed, got {qkv.shape}"
        )
    if any(part.rank != 3 or part.shape[::2] != qkv.shape[::2] for part in inputs):
        shapes = ", ".join(str(part.shape) for part in inputs)
        raise RuleError(f"parts of a sequence must agree in batch and width, got {shapes}")
    return (qkv.with_shape((*qkv.shape[:2], qkv.shape[2] // 3)),)


def _attention_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of an attention: one op gives the gradients of all parts."""
    return emitter.emit(
        "attention_grad",
        (*instruction.inputs, dy),
        tuple(f"grad_{name}" for name in instruction.inputs),
        instruction.attributes,
    )


def _shard_attention(query: ShardingQuery) -> ShardingDecision:
    """Spread attention by sequences, or by heads."""
    axes = [query.sharded_axis(i) for i in range(len(query.operands))]
    heads = query.attributes["heads"]
    # A slice of the width that cuts through a head would split a dot product.
    if 2 in axes and heads % query.parts == 0:
        spread = Sharded(2)
        change = (("heads", heads // query.parts),)
    elif 0 in axes:
        spread = Sharded(0)
        change = ()
    else:
        return query.replicated()
    return ShardingDecision((spread,) * len(axes), (spread,) * len(query.outputs), change)


def _attention_work(backward: bool) -> WorkRule:
    """The rule for the kernel of fused attention, forward or backward."""

    def work(inputs: Tensors, outputs: Tensors, attributes: Values) -> tuple[Op, ...]:
        # The backward's last operand is the gradient of the result.
        parts = inputs[: len(inputs) - backward]
        batch, seq, width = parts[-1].shape
        heads = attributes["heads"]
        kernel = Attention(
            op="flash_attention",
            dtype=kernel_dtype(inputs[0]),
            batch=batch,
            heads=heads,
            kv_heads=heads,
            seq_q=seq,
            seq_kv=sum(part.shape[1] for part in parts),
            head_dim=width // (3 * heads),
            causal=bool(attributes.get("causal")),
            pass_="bwd" if backward else "fwd",
        )
        return (kernel,)

    return work


def _same_shape(inputs: Tensors) -> None:
    if len({(tensor.dtype, tensor.shape) for tensor in inputs}) > 1:
        raise RuleError("weight, gradient and moments must share dtype and shape")


def _sgd(inputs: Tensors, attributes: Values) -> Tensors:
    """Weight and gradient to the new weight."""
    operands(2, inputs)
    _same_shape(inputs)
    required(attributes, "rate", float)
    return inputs[:1]


def _adam(inputs: Tensors, attributes: Values) -> Tensors:
    """Weight, gradient, first and second moment to the new weight and moments."""
    operands(4, inputs)
    _same_shape(inputs)
    for name in ("rate", "beta1", "beta2", "epsilon"):
        required(attributes, name, float)
    if required(attributes, "step", int) < 1:
        raise RuleError("steps count from 1")
    return inputs[0], inputs[2], inputs[3]


def _streams(op: str, tensors: int) -> WorkRule:
    """Work rule of one kernel per weight, which reads and writes tensors of its size."""

    def work(inputs: Tensors, outputs: Tensors, attributes: Values) -> tuple[Op, ...]:
        (kernel,) = memory_bound(op)(inputs, outputs, attributes)
        return (replace(kernel, n_inputs=tensors - 1),)

    return work


FUSED = table(
    OpDefinition(
        name="layer_norm",
        infer=_layer_norm,
        work=memory_bound("layer_norm"),
        gradient=_layer_norm_gradient,
        shard=_shard_layer_norm,
    ),
    OpDefinition(
        name="layer_norm_grad",
        infer=_layer_norm_grad,
        work=memory_bound("layer_norm", backward=True),
        shard=_shard_layer_norm_grad,
    ),
    OpDefinition(
        name="softmax",
        infer=_softmax,
        work=memory_bound("softmax"),
        shard=_shard_rows,
        gradient=lambda emitter, instruction, dy: (
            emitter.op("softmax_grad", instruction.outputs[0], dy),
        ),
    ),
    OpDefinition(
        name="softmax_grad",
        infer=_softmax_grad,
        work=memory_bound("softmax", backward=True),
        shard=_shard_rows,
    ),
    OpDefinition(
        name="attention",
        infer=_attention,
        work=_attention_work(backward=False),
        gradient=_attention_gradient,
        shard=_shard_attention,
    ),
    OpDefinition(
        name="attention_grad",
        infer=gradient_of_operands(_attention),
        work=_attention_work(backward=True),
        shard=_shard_attention,
    ),
    # `sgd` streams weight and gradient in and the weight out; `adam` streams weight, gradient and
    # two moments in and weight and moments out. a sharded operand (the optimizer's state, under
    # ZeRO) has every operand sharded like it
    OpDefinition(
        name="sgd", infer=_sgd, work=_streams("sgd", 3), shard=ShardingQuery.all_along_one_axis
    ),
    OpDefinition(
        name="adam", infer=_adam, work=_streams("adam", 7), shard=ShardingQuery.all_along_one_axis
    ),
)
