"""Element-wise ops with NumPy's broadcasting, and their gradients."""

from dataclasses import replace
from math import pi

import numpy as np

from perfmodel.ir._instruction import INTEGER_DTYPES, Instruction, RuleError, Shape, Tensor
from perfmodel.ir.op_definition import (
    REPLICATED,
    Emitter,
    FoldRule,
    GradientRule,
    InferRule,
    Names,
    OpDefinition,
    Partial,
    PartialRule,
    Sharded,
    Sharding,
    ShardingDecision,
    ShardingQuery,
    Tensors,
    Values,
    memory_bound,
    operands,
    require_gradient_of,
    required,
    required_dtype,
    sums_pass,
    table,
)


def broadcast(shapes: list[Shape]) -> Shape:
    """Common shape of right-aligned shapes; raises `RuleError` if they do not fit."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise RuleError(f"shapes {' and '.join(map(str, shapes))} cannot be broadcast") from None


def same_dtype(inputs: Tensors) -> None:
    """Raise `RuleError` unless all operands have one dtype."""
    dtypes = {tensor.dtype for tensor in inputs}
    if len(dtypes) > 1:
        raise RuleError(f"operands must share one dtype, got {' and '.join(sorted(dtypes))}")


def elementwise(count: int) -> InferRule:
    """Type rule of an element-wise op of `count` operands."""

    def infer(inputs: Tensors, attributes: Values) -> Tensors:
        operands(count, inputs)
        same_dtype(inputs)
        return (inputs[0].with_shape(broadcast([tensor.shape for tensor in inputs])),)

    return infer


def gradient_of_operands(infer: InferRule) -> InferRule:
    """Return the type rule of an op's gradients with respect to its operands, if `infer` is the
    rule of the op. The operands and the gradient with respect to its result are the inputs."""

    def infer_gradient(inputs: Tensors, attributes: Values) -> Tensors:
        same_dtype(inputs)
        (out,) = infer(inputs[:-1], attributes)
        require_gradient_of(out, inputs[-1])
        return inputs[:-1]

    return infer_gradient


def shard_elementwise(query: ShardingQuery) -> ShardingDecision:
    """Shard all operands along the same axis, except broadcast ones."""
    # The first operand that is sharded, along an axis that it does not broadcast, decides the axis
    # of the result. Axes are counted from the right, as broadcasting aligns them.
    out = query.outputs[0]
    for tensor, spread in zip(query.operands, query.shardings, strict=True):
        if isinstance(spread, Sharded) and tensor.shape[spread.axis] > 1:
            axis = spread.axis + out.rank - tensor.rank
            inputs = tuple(_aligned(t, axis, out) for t in query.operands)
            return ShardingDecision(inputs, (Sharded(axis),) * len(query.outputs))
    return query.replicated()


def _aligned(tensor: Tensor, axis: int, out: Tensor) -> Sharding:
    """Sharding of an operand that is broadcast to `out` sharded along `axis`."""
    # An operand that is broadcast along the axis has nothing to cut there: each part needs all of
    # it.
    own_axis = axis - (out.rank - tensor.rank)
    return Sharded(own_axis) if own_axis >= 0 and tensor.shape[own_axis] > 1 else REPLICATED


def _linear_in(*places: int) -> PartialRule:
    """Partial rule of products and quotients: a sum times a replicated value stays a sum.

    Where the other operand broadcasts the sum, completing it first moves less.
    """

    def rule(query: ShardingQuery) -> ShardingDecision | None:
        for place in places:
            summed = query.shardings[place]
            factor = query.shardings[1 - place]
            as_large = query.operands[place].shape == query.outputs[0].shape
            if summed == Partial("sum") and factor == REPLICATED and as_large:
                return ShardingDecision(query.shardings, (Partial("sum"),))
        return None

    return rule


def unbroadcast(emitter: Emitter, gradient: str, operand: str) -> str:
    """Sums a gradient over the axes along which its operand was broadcast."""
    # Broadcasting repeats an operand, so the gradient is the sum over the repetitions: over leading
    # axes that the operand lacks, and over those in which it has size 1.
    have, want = emitter.types[gradient].shape, emitter.types[operand].shape
    lead = len(have) - len(want)
    if lead:
        gradient = emitter.op("sum", gradient, axes=tuple(range(lead)))
        have = have[lead:]
    axes = tuple(i for i, (h, w) in enumerate(zip(have, want, strict=True)) if h != w)
    return emitter.op("sum", gradient, axes=axes, keep=True) if axes else gradient


def _sub_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    minuend, subtrahend = instruction.inputs
    d_minuend = unbroadcast(emitter, dy, minuend)
    d_subtrahend = emitter.op("scale", unbroadcast(emitter, dy, subtrahend), factor=-1.0)
    return d_minuend, d_subtrahend


def _mul_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    first, second = instruction.inputs
    d_first = unbroadcast(emitter, emitter.op("mul", dy, second), first)
    d_second = unbroadcast(emitter, emitter.op("mul", dy, first), second)
    return d_first, d_second


def _div_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of a quotient."""
    numerator, denominator = instruction.inputs
    # d(n / d) = dn / d - (n / d) / d dd: the second term reuses the first and the forward result.
    d_numerator = emitter.op("div", dy, denominator)
    d_denominator = emitter.op(
        "scale", emitter.op("mul", d_numerator, instruction.outputs[0]), factor=-1.0
    )
    d_numerator = unbroadcast(emitter, d_numerator, numerator)
    return d_numerator, unbroadcast(emitter, d_denominator, denominator)


def _with_input(op: str) -> GradientRule:
    """Gradient rule that applies `op` to operand and gradient, with the same attributes."""
    return lambda emitter, instruction, dy: emitter.emit(
        op, (instruction.inputs[0], dy), (op,), instruction.attributes
    )


def _sqrt_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """dy / (2 y)."""
    return (emitter.op("scale", emitter.op("div", dy, instruction.outputs[0]), factor=0.5),)


def _tanh_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """dy (1 - y^2)."""
    (y,) = instruction.outputs
    return (emitter.op("sub", dy, emitter.op("mul", emitter.op("mul", dy, y), y)),)


def _sigmoid_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """dy y (1 - y)."""
    (y,) = instruction.outputs
    part = emitter.op("mul", dy, y)
    return (emitter.op("sub", part, emitter.op("mul", part, y)),)


def _erf_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """dy 2 / sqrt(pi) exp(-x^2)."""
    (x,) = instruction.inputs
    bell = emitter.op("exp", emitter.op("scale", emitter.op("mul", x, x), factor=-1.0))
    return (emitter.op("mul", dy, emitter.op("scale", bell, factor=2 / pi**0.5)),)


def _scale(inputs: Tensors, attributes: Values) -> Tensors:
    required(attributes, "factor", (int, float))
    return elementwise(1)(inputs, attributes)


def _cast(inputs: Tensors, attributes: Values) -> Tensors:
    operands(1, inputs)
    return (replace(inputs[0], dtype=required_dtype(attributes), value=None),)


def _cast_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """The gradient in the operand's own element type; integers have none."""
    dtype = emitter.types[instruction.inputs[0]].dtype
    return (None,) if dtype in INTEGER_DTYPES else (emitter.op("cast", dy, dtype=dtype),)


def _unequal(inputs: Tensors, attributes: Values) -> Tensors:
    """1 where an integer differs from `value`, else 0."""
    operands(1, inputs)
    _require_integers(inputs[0])
    required(attributes, "value", int)
    return (replace(inputs[0], value=None),)


def _running_sum(inputs: Tensors, attributes: Values) -> Tensors:
    """Sums of all integers up to each along `axis`, itself included."""
    operands(1, inputs)
    _require_integers(inputs[0])
    axis = required(attributes, "axis", int)
    if not 0 <= axis < inputs[0].rank:
        raise RuleError(f"axis={axis} is not an axis of a tensor of {inputs[0].rank} dimensions")
    return (replace(inputs[0], value=None),)


def _require_integers(tensor: Tensor) -> None:
    if tensor.dtype not in INTEGER_DTYPES:
        raise RuleError(f"integers are needed, got {tensor.dtype}")


def _shard_running_sum(query: ShardingQuery) -> ShardingDecision:
    # Each sum needs all before it, so that only the other axes may be cut.
    axis = query.sharded_axis(0)
    if axis is None or axis == query.attributes["axis"]:
        return query.replicated()
    return ShardingDecision((Sharded(axis),), (Sharded(axis),))


def _sum(inputs: Tensors, attributes: Values) -> Tensors:
    """Type of a sum over axes."""
    operands(1, inputs)
    (x,) = inputs
    axes = required(attributes, "axes", tuple)
    # Negative axes are resolved by importers, so that rules may compare axes as they are.
    are_axes = all(isinstance(axis, int) and 0 <= axis < x.rank for axis in axes)
    if not are_axes or len(set(axes)) < len(axes):
        raise RuleError(f"axes={axes} are not distinct axes of a tensor of {x.rank} dimensions")
    shape = []
    for axis, size in enumerate(x.shape):
        if axis not in axes:
            shape.append(size)
        elif attributes.get("keep"):
            shape.append(1)
    return (x.with_shape(shape),)


def _sum_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of a sum: every summand gets the gradient of the sum."""
    (x,) = instruction.inputs
    axes = instruction.attribute("axes")
    removes_leading_axes = sorted(axes) == list(range(len(axes)))
    if not instruction.attribute("keep") and emitter.types[dy].rank and not removes_leading_axes:
        # Broadcasting aligns axes at the right. Where axes other than the first were removed, they
        # are put back with size 1.
        with_summed_axes = tuple(
            1 if a in axes else n for a, n in enumerate(emitter.types[x].shape)
        )
        dy = emitter.op("reshape", dy, shape=with_summed_axes)
    return (emitter.op("broadcast_like", dy, x),)


def _shard_sum(query: ShardingQuery) -> ShardingDecision:
    """Sharding rule of a sum: along kept axes, or as partial sums along summed ones."""
    axes = query.attributes["axes"]
    axis = query.sharded_axis(0)
    if axis is None:
        return query.replicated()
    # A sum over the sharded axis is left partial: its parts' sums add up to it.
    if axis in axes:
        return ShardingDecision((Sharded(axis),), (Partial("sum"),))
    # Axes that the sum removes move the sharded one to the left.
    shift = 0 if query.attributes.get("keep") else sum(a < axis for a in axes)
    return ShardingDecision((Sharded(axis),), (Sharded(axis - shift),))


def _broadcast_like(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a broadcast to the shape of a second operand."""
    operands(2, inputs)
    x, template = inputs
    if broadcast([x.shape, template.shape]) != template.shape:
        raise RuleError(f"shape {x.shape} cannot be broadcast to {template.shape}")
    return (x.with_shape(template.shape),)


def _lends_shape(query: ShardingQuery) -> ShardingDecision | None:
    """Partial rule of ops that only use the shape of `like`, which may therefore be partial."""
    # Only its shape matters, so its values need not be completed.
    template = query.shardings[1]
    if not isinstance(template, Partial):
        return None
    return ShardingDecision((REPLICATED, template), (REPLICATED,))


def _pointwise(
    name: str,
    infer: InferRule,
    *,
    kernel: str = "",
    backward: bool = False,
    gradient: GradientRule | None = None,
    partial: PartialRule | None = None,
    fold: FoldRule | None = None,
) -> OpDefinition:
    """Define an op that works element by element: one streaming kernel, sliced as its operands are.

    Args:
        name: name of the op.
        infer: type rule of the op.
        kernel: name under which its kernel is timed; by default the op's own.
        backward: whether the kernel is that of a backward pass.
        gradient, partial, fold: as in `OpDefinition`.
    """
    return OpDefinition(
        name=name,
        infer=infer,
        work=memory_bound(kernel or name, backward),
        shard=shard_elementwise,
        gradient=gradient,
        partial=partial,
        fold=fold,
    )


UNARY = elementwise(1)
BINARY = elementwise(2)

# Exponentials, roots and activations are not linear: they have no `partial` rule, so that a partial
# sum is completed before them. Gradients of named kernels (`relu_grad`) are ops of their own, since
# frameworks fuse them.
ELEMENTWISE = table(
    _pointwise(
        "add",
        BINARY,
        gradient=lambda emitter, instruction, dy: tuple(
            unbroadcast(emitter, dy, name) for name in instruction.inputs
        ),
        partial=sums_pass,
        fold=lambda x, _: x[0] + x[1],
    ),
    _pointwise(
        "sub", BINARY, gradient=_sub_gradient, partial=sums_pass, fold=lambda x, _: x[0] - x[1]
    ),
    _pointwise(
        "mul",
        BINARY,
        gradient=_mul_gradient,
        partial=_linear_in(0, 1),
        fold=lambda x, _: x[0] * x[1],
    ),
    _pointwise("div", BINARY, gradient=_div_gradient, partial=_linear_in(0)),
    _pointwise(
        "scale",
        _scale,
        kernel="mul_scalar",
        gradient=lambda emitter, instruction, dy: (
            emitter.op("scale", dy, factor=instruction.attribute("factor")),
        ),
        partial=sums_pass,
    ),
    _pointwise(
        "exp",
        UNARY,
        gradient=lambda emitter, instruction, dy: (emitter.op("mul", dy, instruction.outputs[0]),),
    ),
    _pointwise(
        "log",
        UNARY,
        gradient=lambda emitter, instruction, dy: (emitter.op("div", dy, instruction.inputs[0]),),
    ),
    _pointwise("sqrt", UNARY, gradient=_sqrt_gradient),
    _pointwise("tanh", UNARY, gradient=_tanh_gradient),
    _pointwise("sigmoid", UNARY, gradient=_sigmoid_gradient),
    _pointwise("erf", UNARY, gradient=_erf_gradient),
    _pointwise("relu", UNARY, gradient=_with_input("relu_grad")),
    _pointwise("relu_grad", BINARY, kernel="relu", backward=True),
    # by tanh, or by erf with attribute `exact`
    _pointwise("gelu", UNARY, gradient=_with_input("gelu_grad")),
    _pointwise("gelu_grad", BINARY, kernel="gelu", backward=True),
    OpDefinition(
        name="sum",
        infer=_sum,
        work=memory_bound("sum"),
        gradient=_sum_gradient,
        shard=_shard_sum,
        partial=sums_pass,
    ),
    _pointwise(
        "broadcast_like",
        _broadcast_like,
        kernel="copy",
        gradient=lambda emitter, instruction, dy: (
            unbroadcast(emitter, dy, instruction.inputs[0]),
            None,
        ),
        partial=_lends_shape,
    ),
    # of integers, which have no gradient: positions that padding is left out of
    _pointwise("unequal", _unequal, kernel="copy"),
    OpDefinition(
        name="running_sum", infer=_running_sum, work=memory_bound("copy"), shard=_shard_running_sum
    ),
    # to another element type
    _pointwise("cast", _cast, kernel="copy", gradient=_cast_gradient, partial=sums_pass),
    # `add` of gradients of several micro-batches: transforms know it by name
    _pointwise("accumulate", BINARY, kernel="add", partial=sums_pass),
)
