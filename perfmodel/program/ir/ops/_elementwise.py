"""Element-wise ops with NumPy's broadcasting, and sums that undo it."""

from collections.abc import Mapping
from math import pi
from typing import Any

import numpy as np

from perfmodel.program.ir._instruction import Instruction, RuleError, Shape, Tensor
from perfmodel.program.ir._op import (
    REPLICATED,
    Answer,
    Emitter,
    GradientRule,
    InferRule,
    Names,
    OpDefinition,
    Partial,
    Question,
    Sharded,
    Sharding,
    memory_bound,
    operands,
    require_gradient_of,
    required,
    sums_pass,
    table,
)


def broadcast(shapes: list[Shape]) -> Shape:
    """Joint shape of right-aligned shapes; raises `RuleError` where they do not fit."""
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise RuleError(f"shapes {' and '.join(map(str, shapes))} do not broadcast") from None


def same_dtype(given: tuple[Tensor, ...]) -> None:
    """Raise `RuleError` unless all operands have one dtype."""
    dtypes = {tensor.dtype for tensor in given}
    if len(dtypes) > 1:
        raise RuleError(f"operands must share one dtype, got {' and '.join(sorted(dtypes))}")


def elementwise(count: int) -> InferRule:
    """Type rule of an element-wise op of `count` operands."""

    def infer(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        operands(count, given)
        same_dtype(given)
        return (given[0].with_shape(broadcast([tensor.shape for tensor in given])),)

    return infer


def gradient_of_operands(infer: InferRule) -> InferRule:
    """Type rule of the gradients by all operands of an op with the rule `infer`, given these and the gradient by the
    result."""

    def infer_gradient(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        same_dtype(given)
        (out,) = infer(given[:-1], attributes)
        require_gradient_of(out, given[-1])
        return given[:-1]

    return infer_gradient


def shard_elementwise(question: Question) -> Answer:
    """All operands sliced alike, where they are not broadcast."""
    out = question.outputs[0]
    for tensor, spread in zip(question.operands, question.shardings, strict=True):
        if isinstance(spread, Sharded) and tensor.shape[spread.axis] > 1:
            axis = spread.axis + out.rank - tensor.rank
            inputs = tuple(_aligned(t, axis, out) for t in question.operands)
            return Answer(inputs, (Sharded(axis),) * len(question.outputs))
    return question.replicated()


def _aligned(tensor: Tensor, axis: int, out: Tensor) -> Sharding:
    """Sharding of an operand that is broadcast to `out` sharded along `axis`."""
    own = axis - (out.rank - tensor.rank)
    return Sharded(own) if own >= 0 and tensor.shape[own] > 1 else REPLICATED


def unbroadcast(b: Emitter, gradient: str, like: str) -> str:
    """Sums a gradient over the axes along which its operand was broadcast."""
    have, want = b.types[gradient].shape, b.types[like].shape
    lead = len(have) - len(want)
    if lead:
        gradient = b.op("sum", gradient, axes=tuple(range(lead)))
        have = have[lead:]
    axes = tuple(i for i, (h, w) in enumerate(zip(have, want, strict=True)) if h != w)
    return b.op("sum", gradient, axes=axes, keep=True) if axes else gradient


def _sub_gradient(b: Emitter, i: Instruction, dy: str) -> Names:
    left, right = i.inputs
    return unbroadcast(b, dy, left), b.op("scale", unbroadcast(b, dy, right), factor=-1.0)


def _mul_gradient(b: Emitter, i: Instruction, dy: str) -> Names:
    left, right = i.inputs
    return unbroadcast(b, b.op("mul", dy, right), left), unbroadcast(b, b.op("mul", dy, left), right)


def _div_gradient(b: Emitter, i: Instruction, dy: str) -> Names:
    left, right = i.inputs
    d_left = b.op("div", dy, right)
    d_right = b.op("scale", b.op("mul", d_left, i.outputs[0]), factor=-1.0)
    return unbroadcast(b, d_left, left), unbroadcast(b, d_right, right)


def _with_input(op: str) -> GradientRule:
    """Gradient rule that applies `op` to the operand and the gradient, under the same attributes."""
    return lambda b, i, dy: b.emit(op, (i.inputs[0], dy), (op,), i.attributes)


def _tanh_gradient(b: Emitter, i: Instruction, dy: str) -> Names:
    """dy (1 - y^2)."""
    (y,) = i.outputs
    return (b.op("sub", dy, b.op("mul", b.op("mul", dy, y), y)),)


def _sigmoid_gradient(b: Emitter, i: Instruction, dy: str) -> Names:
    """dy y (1 - y)."""
    (y,) = i.outputs
    part = b.op("mul", dy, y)
    return (b.op("sub", part, b.op("mul", part, y)),)


def _erf_gradient(b: Emitter, i: Instruction, dy: str) -> Names:
    """dy 2 / sqrt(pi) exp(-x^2)."""
    (x,) = i.inputs
    bell = b.op("exp", b.op("scale", b.op("mul", x, x), factor=-1.0))
    return (b.op("mul", dy, b.op("scale", bell, factor=2 / pi**0.5)),)


def _scale(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    required(attributes, "factor", (int, float))
    return elementwise(1)(given, attributes)


def _sum(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    operands(1, given)
    (x,) = given
    axes = required(attributes, "axes", tuple)
    if any(not isinstance(a, int) or not 0 <= a < x.rank for a in axes) or len(set(axes)) < len(axes):
        raise RuleError(f"axes={axes} are not distinct axes of a tensor of {x.rank} dimensions")
    kept = [(1 if i in axes else n) for i, n in enumerate(x.shape) if attributes.get("keep") or i not in axes]
    return (x.with_shape(kept),)


def _sum_gradient(b: Emitter, i: Instruction, dy: str) -> Names:
    (x,) = i.inputs
    axes = i.attribute("axes")
    if not i.attribute("keep") and b.types[dy].rank and sorted(axes) != list(range(len(axes))):
        # the axes that stay must stand where broadcasting aligns them: last
        kept = tuple(1 if a in axes else n for a, n in enumerate(b.types[x].shape))
        dy = b.op("reshape", dy, shape=kept)
    return (b.op("broadcast_like", dy, x),)


def _shard_sum(question: Question) -> Answer:
    axes, axis = question.attributes["axes"], question.sharded_axis(0)
    if axis is None:
        return question.replicated()
    if axis in axes:
        return Answer((Sharded(axis),), (Partial("sum"),))
    shift = 0 if question.attributes.get("keep") else sum(a < axis for a in axes)
    return Answer((Sharded(axis),), (Sharded(axis - shift),))


def _broadcast_like(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    operands(2, given)
    x, like = given
    if broadcast([x.shape, like.shape]) != like.shape:
        raise RuleError(f"shape {x.shape} does not broadcast to {like.shape}")
    return (x.with_shape(like.shape),)


def _lends_shape(question: Question) -> Answer | None:
    """`like` only lends its shape, so that a partial one serves as it is."""
    like = question.shardings[1]
    return Answer((REPLICATED, like), (REPLICATED,)) if isinstance(like, Partial) else None


ELEMENTWISE = table(
    OpDefinition(
        name="add",
        infer=elementwise(2),
        work=memory_bound("add"),
        shard=shard_elementwise,
        partial=sums_pass,
        gradient=lambda b, i, dy: tuple(unbroadcast(b, dy, name) for name in i.inputs),
        fold=lambda x, _: x[0] + x[1],
    ),
    OpDefinition(
        name="sub",
        infer=elementwise(2),
        work=memory_bound("sub"),
        shard=shard_elementwise,
        partial=sums_pass,
        gradient=_sub_gradient,
        fold=lambda x, _: x[0] - x[1],
    ),
    OpDefinition(
        name="mul",
        infer=elementwise(2),
        work=memory_bound("mul"),
        shard=shard_elementwise,
        gradient=_mul_gradient,
        fold=lambda x, _: x[0] * x[1],
    ),
    OpDefinition(
        name="div", infer=elementwise(2), work=memory_bound("div"), shard=shard_elementwise, gradient=_div_gradient
    ),
    OpDefinition(
        name="scale",
        infer=_scale,
        work=memory_bound("mul_scalar"),
        shard=shard_elementwise,
        partial=sums_pass,
        gradient=lambda b, i, dy: (b.op("scale", dy, factor=i.attribute("factor")),),
    ),
    OpDefinition(
        name="exp",
        infer=elementwise(1),
        work=memory_bound("exp"),
        shard=shard_elementwise,
        gradient=lambda b, i, dy: (b.op("mul", dy, i.outputs[0]),),
    ),
    OpDefinition(
        name="log",
        infer=elementwise(1),
        work=memory_bound("log"),
        shard=shard_elementwise,
        gradient=lambda b, i, dy: (b.op("div", dy, i.inputs[0]),),
    ),
    OpDefinition(
        name="sqrt",
        infer=elementwise(1),
        work=memory_bound("sqrt"),
        shard=shard_elementwise,
        gradient=lambda b, i, dy: (b.op("scale", b.op("div", dy, i.outputs[0]), factor=0.5),),
    ),
    OpDefinition(
        name="tanh", infer=elementwise(1), work=memory_bound("tanh"), shard=shard_elementwise, gradient=_tanh_gradient
    ),
    OpDefinition(
        name="sigmoid",
        infer=elementwise(1),
        work=memory_bound("sigmoid"),
        shard=shard_elementwise,
        gradient=_sigmoid_gradient,
    ),
    OpDefinition(
        name="erf", infer=elementwise(1), work=memory_bound("erf"), shard=shard_elementwise, gradient=_erf_gradient
    ),
    OpDefinition(
        name="relu",
        infer=elementwise(1),
        work=memory_bound("relu"),
        shard=shard_elementwise,
        gradient=_with_input("relu_grad"),
    ),
    OpDefinition(
        name="relu_grad", infer=elementwise(2), work=memory_bound("relu", backward=True), shard=shard_elementwise
    ),
    # by tanh, or by erf with attribute `exact`
    OpDefinition(
        name="gelu",
        infer=elementwise(1),
        work=memory_bound("gelu"),
        shard=shard_elementwise,
        gradient=_with_input("gelu_grad"),
    ),
    OpDefinition(
        name="gelu_grad", infer=elementwise(2), work=memory_bound("gelu", backward=True), shard=shard_elementwise
    ),
    OpDefinition(
        name="sum", infer=_sum, work=memory_bound("sum"), gradient=_sum_gradient, shard=_shard_sum, partial=sums_pass
    ),
    OpDefinition(
        name="broadcast_like",
        infer=_broadcast_like,
        work=memory_bound("copy"),
        shard=shard_elementwise,
        partial=_lends_shape,
        gradient=lambda b, i, dy: (unbroadcast(b, dy, i.inputs[0]), None),
    ),
    # `add` of gradients of several micro-batches: transforms know it by name
    OpDefinition(
        name="accumulate", infer=elementwise(2), work=memory_bound("add"), shard=shard_elementwise, partial=sums_pass
    ),
)
