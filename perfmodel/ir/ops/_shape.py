"""Ops that create, split, join and reshape tensors, and shape arithmetic of imported graphs."""

from math import prod
from typing import Any

import numpy as np

from perfmodel.ir._instruction import Instruction, RuleError, Shape, Tensor, shape_of_constant
from perfmodel.ir.op_definition import (
    Emitter,
    FoldRule,
    GradientRule,
    InferRule,
    Names,
    OpDefinition,
    PartialRule,
    Sharded,
    ShardingDecision,
    ShardingQuery,
    Tensors,
    Values,
    WorkRule,
    axis_of,
    free,
    memory_bound,
    operands,
    required,
    required_dtype,
    sums_pass,
    table,
)
from perfmodel.ir.ops._elementwise import same_dtype


def _constant(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a constant, whose value is an attribute."""
    operands(0, inputs)
    dtype = required_dtype(attributes)
    value = required(attributes, "value", (int, float, tuple))
    try:
        shape = shape_of_constant(value)
    except ValueError as error:
        raise RuleError(str(error)) from None
    return (Tensor(dtype, shape, attributes.get("device", 0), value),)


def _shape(inputs: Tensors, attributes: Values) -> Tensors:
    operands(1, inputs)
    (x,) = inputs
    # Known contents from unknown operands: this is where shape arithmetic starts (DistIR, figure
    # 4).
    return (Tensor("int64", (x.rank,), x.device, x.shape),)


def _reshape(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a reshape to a shape given as attribute or as known second operand."""
    # ONNX computes the shape to reshape to (DistIR, figure 4); its contents must have been folded
    # by now.
    if len(inputs) == 2:
        target = inputs[1].value
        if target is None:
            raise RuleError("the target shape is not known; give the values that it depends on")
    else:
        operands(1, inputs)
        target = required(attributes, "shape", tuple)
    return (inputs[0].with_shape(_resolved(inputs[0].shape, target)),)


def _resolved(shape: Shape, target: Any) -> Shape:
    """`target` with its -1 replaced by the remaining size."""
    # ONNX and PyTorch let one size be inferred, written -1.
    known = prod(n for n in target if n != -1)
    if list(target).count(-1) == 1 and known and prod(shape) % known == 0:
        target = tuple(prod(shape) // known if n == -1 else n for n in target)
    if prod(target) != prod(shape) or min(target, default=1) < 1:
        raise RuleError(f"shape {shape} cannot be reshaped to {tuple(target)}")
    return tuple(target)


def _reshape_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    dx = emitter.op("reshape", dy, shape=emitter.types[instruction.inputs[0]].shape)
    return (dx, *((None,) * (len(instruction.inputs) - 1)))


def _shard_reshape(query: ShardingQuery) -> ShardingDecision:
    """Sharding rule of a reshape: the outermost of merged or split axes stays sharded."""
    axis = query.sharded_axis(0)
    x, *dynamic = query.operands
    if axis is None or dynamic:
        return query.replicated()
    # Reshaping keeps the order of elements. Slices of the sharded axis stay slices only if the same
    # elements stand before it and its outermost factor divides, as when heads and head size are
    # merged or split.
    new, parts = query.outputs[0].shape, query.parts
    before = prod(x.shape[:axis])
    # The sharded axis is found again where as many elements stand before it.
    for out, n in enumerate(new):
        if prod(new[:out]) == before and n % parts == 0 and n > 1:
            change = (("shape", (*new[:out], n // parts, *new[out + 1 :])),)
            return ShardingDecision((Sharded(axis),), (Sharded(out),), change)
    return query.replicated()


def _transpose(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a permutation of axes."""
    operands(1, inputs)
    (x,) = inputs
    order = required(attributes, "permutation", tuple)
    if sorted(order) != list(range(x.rank)):
        raise RuleError(f"permutation={order} is not a permutation of {x.rank} axes")
    return (x.with_shape([x.shape[i] for i in order]),)


def _transpose_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    order = tuple(int(k) for k in np.argsort(instruction.attribute("permutation")))
    return (emitter.op("transpose", dy, permutation=order),)


def _shard_transpose(query: ShardingQuery) -> ShardingDecision:
    """Sharding rule of a transpose: the sharded axis moves with the others."""
    axis = query.sharded_axis(0)
    if axis is None:
        return query.replicated()
    return ShardingDecision(
        (Sharded(axis),), (Sharded(query.attributes["permutation"].index(axis)),)
    )


def _split(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a split into equal parts along an axis."""
    operands(1, inputs)
    (x,) = inputs
    axis = axis_of(attributes, "axis", x.rank)
    parts = required(attributes, "parts", int)
    if parts < 1 or x.shape[axis] % parts:
        raise RuleError(
            f"{x.shape[axis]} elements of axis {axis} are not divisible into {parts} equal parts"
        )
    return (x.with_size(axis, x.shape[axis] // parts),) * parts


def _split_gradient(emitter: Emitter, instruction: Instruction, *gradients: str | None) -> Names:
    """Gradient rule of a split: the parts' gradients are joined."""
    # Results that nothing uses have no gradient; zeros (scaled, so that they lie on the same
    # device) take their place.
    known = next(dy for dy in gradients if dy)
    filled = [dy or emitter.op("scale", known, factor=0.0) for dy in gradients]
    return (emitter.op("concat", *filled, axis=instruction.attribute("axis")),)


def _concat(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a join along an axis."""
    if not inputs:
        raise RuleError("at least one operand is needed")
    same_dtype(inputs)
    x = inputs[0]
    axis = axis_of(attributes, "axis", x.rank)
    other_sizes = {(*t.shape[:axis], *t.shape[axis + 1 :]) for t in inputs}
    if len(other_sizes) > 1:
        raise RuleError(
            f"shapes {', '.join(str(t.shape) for t in inputs)} differ in axes other than {axis}"
        )
    size = sum(t.shape[axis] for t in inputs)
    return (x.with_size(axis, size),)


def _concat_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of a join: each operand gets its slice."""
    axis = axis_of(dict(instruction.attributes), "axis", emitter.types[dy].rank)
    pieces: list[str | None] = []
    # The gradient of joined tensors is cut where they were joined.
    start = 0
    for name in instruction.inputs:
        stop = start + emitter.types[name].shape[axis]
        pieces.append(emitter.op("slice", dy, axis=axis, start=start, stop=stop))
        start = stop
    return tuple(pieces)


def _slice(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a slice of an axis."""
    operands(1, inputs)
    (x,) = inputs
    axis = axis_of(attributes, "axis", x.rank)
    start = required(attributes, "start", int)
    stop = required(attributes, "stop", int)
    if not 0 <= start < stop <= x.shape[axis]:
        raise RuleError(
            f"{start}..{stop} is not a range of the {x.shape[axis]} elements of axis {axis}"
        )
    return (x.with_size(axis, stop - start),)


def _slice_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient of a slice: zeros outside of it."""
    (x,) = instruction.inputs
    axis = axis_of(dict(instruction.attributes), "axis", emitter.types[x].rank)
    # Elements that the slice left out do not influence the result.
    before = instruction.attribute("start")
    after = emitter.types[x].shape[axis] - instruction.attribute("stop")
    return (
        emitter.op("pad", dy, axis=axis, before=before, after=after) if before or after else dy,
    )


def _pad(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a padding of an axis with a constant."""
    operands(1, inputs)
    (x,) = inputs
    axis = axis_of(attributes, "axis", x.rank)
    before = required(attributes, "before", int)
    after = required(attributes, "after", int)
    if before < 0 or after < 0:
        raise RuleError(
            f"before={before} and after={after} must not be negative; use a slice to cut"
        )
    if not isinstance(attributes.get("value", 0), (int, float)):
        raise RuleError(f"value must be a number, got {attributes['value']!r}")
    return (x.with_size(axis, before + x.shape[axis] + after),)


def _pad_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of a padding: the padding is cut off."""
    (x,) = instruction.inputs
    axis = axis_of(dict(instruction.attributes), "axis", emitter.types[x].rank)
    start = instruction.attribute("before")
    return (
        emitter.op("slice", dy, axis=axis, start=start, stop=start + emitter.types[x].shape[axis]),
    )


def _zeros_pass(query: ShardingQuery) -> ShardingDecision | None:
    """Partial rule of padding: partial sums may be padded by zeros only, because other values would
    be summed too."""
    return None if query.attributes.get("value", 0) else sums_pass(query)


def _shard_beside_axis(query: ShardingQuery) -> ShardingDecision:
    """Sharding rule: any sharding except along the op's own axis."""
    own_axis = axis_of(query.attributes, "axis", query.operands[0].rank)
    return query.all_along_one_axis(lambda axis: axis != own_axis)


def _take(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of taking the elements of an axis whose numbers an operand holds."""
    operands(2, inputs)
    x, index = inputs
    axis = axis_of(attributes, "axis", x.rank)
    if not index.dtype.startswith("int"):
        raise RuleError(f"indices must be integers, got {index.dtype}")
    return (x.with_shape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])),)


def _unsqueeze(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of an insertion of axes of size 1."""
    operands(1, inputs)
    (x,) = inputs
    axes = required(attributes, "axes", tuple)
    rank = x.rank + len(axes)
    if any(not 0 <= a < rank for a in axes):
        raise RuleError(f"axes={axes} are not axes of a tensor of {rank} dimensions")
    # New axes of size 1 stand at `axes` of the result; the operand's own fill the others in order.
    remaining = iter(x.shape)
    return (x.with_shape([1 if i in axes else next(remaining) for i in range(rank)]),)


def _along_axis(
    name: str,
    infer: InferRule,
    gradient: GradientRule,
    *,
    work: WorkRule,
    partial: PartialRule = sums_pass,
    fold: FoldRule | None = None,
) -> OpDefinition:
    """Define an op that cuts or joins along `axis`: linear, sharded along any other axis."""
    return OpDefinition(
        name=name,
        infer=infer,
        work=work,
        gradient=gradient,
        shard=_shard_beside_axis,
        partial=partial,
        fold=fold,
    )


# `free` ops are views in frameworks: they change strides, not memory. Those that move elements are
# timed as copies.
SHAPE = table(
    OpDefinition(name="constant", infer=_constant, work=free),
    OpDefinition(name="shape", infer=_shape, work=free),
    OpDefinition(
        name="reshape",
        infer=_reshape,
        work=free,
        gradient=_reshape_gradient,
        shard=_shard_reshape,
        partial=sums_pass,
        fold=lambda x, a: x[0].reshape(a["shape"] if len(x) == 1 else x[1]),
    ),
    OpDefinition(
        name="transpose",
        infer=_transpose,
        work=memory_bound("copy"),
        gradient=_transpose_gradient,
        shard=_shard_transpose,
        partial=sums_pass,
    ),
    _along_axis("split", _split, _split_gradient, work=free),
    _along_axis(
        "concat",
        _concat,
        _concat_gradient,
        work=memory_bound("copy"),
        fold=lambda x, a: np.concatenate(x, a["axis"]),
    ),
    _along_axis("slice", _slice, _slice_gradient, work=free),
    # further elements of one `value` (0) `before` and `after` those of an axis
    _along_axis("pad", _pad, _pad_gradient, work=memory_bound("copy"), partial=_zeros_pass),
    OpDefinition(
        name="take",
        infer=_take,
        work=memory_bound("copy"),
        fold=lambda x, a: np.take(x[0], x[1], axis=a["axis"]),
    ),
    OpDefinition(
        name="unsqueeze",
        infer=_unsqueeze,
        work=free,
        fold=lambda x, a: np.expand_dims(x[0], a["axes"]),
    ),
)
