"""JAX primitives in the ops of the IR. Where the IR lacks a function it is composed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log, prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from perfmodel.ir.importers._emitter import (
    CannotMapError,
    Emitter,
    IndexCheck,
    Item,
    Known,
    Ref,
    Shifted,
    collapsed,
)
from perfmodel.ir.importers._graph import Array

Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class Equation:
    """An equation of a jaxpr, in the form that rules take."""

    parameters: Parameters
    items: Sequence[Item]
    """Operands of the equation."""
    arrays: Sequence[Array]
    """Types of the operands."""
    out: Array
    """Type of the result."""


def mapped(
    name: str,
    emitter: Emitter,
    parameters: Parameters,
    items: Sequence[Item],
    arrays: Sequence[Array],
    out: Array,
    *,
    integer: bool,
) -> Item:
    """The value of an equation's only output. Indices are taken to be in range.

    Args:
        items: operands, at least one of which is not known.
        arrays: types of the arrays.
        integer: whether the operands are integers.

    Raises:
        CannotMapError: no op does it.
    """
    # JAX guards every look-up (negative indices wrap, others are clamped or filled). Indices are
    # taken to be in range, so guards are recognised and dropped instead of being mapped.
    if name in ("lt", "gt", "le", "ge", "eq", "ne", "and", "or", "not", "reduce_and", "is_finite"):
        return _check(name, items, integer)
    if name == "select_n":
        return _select(emitter, items, arrays, out)
    checks = [item for item in items if isinstance(item, IndexCheck)]
    if checks and name in ("broadcast_in_dim", "reshape"):
        return checks[0]
    if integer and name == "clamp" and isinstance(items[1], Ref):
        return items[1]
    if integer and name in _BINARY:
        # Index plus axis size: the wrapped index of a guard, which is never chosen.
        if name == "add":
            return Shifted()
        raise CannotMapError("the IR cannot compute integers")
    if name in _BINARY:
        return _BINARY[name](emitter, items[0], items[1], out)
    x = _first_reference(items)
    if name in _UNARY:
        return _UNARY[name](emitter, x, out)
    if name in _OTHERS:
        return _OTHERS[name](emitter, Equation(parameters, items, arrays, out))
    raise CannotMapError("the IR has no such op")


# --- element-wise
# --------------------------------------------------------------------------------------


def _ref(emitter: Emitter, item: Item, out: Array) -> Ref:
    if isinstance(item, Ref):
        return item
    if isinstance(item, Known):
        return emitter.constant(item.array, out.dtype)
    raise CannotMapError("the IR cannot compute integers")


def _scalar(item: Item) -> float | None:
    """The value of a known operand whose elements are all equal."""
    if not isinstance(item, Known):
        return None
    # Scalars arrive broadcast to the shape of what they meet.
    small = collapsed(item.array)
    return float(small) if small.ndim == 0 else None


def _add(emitter: Emitter, a: Item, b: Item, out: Array) -> Ref:
    return emitter.op("add", _ref(emitter, a, out), _ref(emitter, b, out))


def _sub(emitter: Emitter, a: Item, b: Item, out: Array) -> Ref:
    return emitter.op("sub", _ref(emitter, a, out), _ref(emitter, b, out))


def _mul(emitter: Emitter, a: Item, b: Item, out: Array) -> Ref:
    """Translate a product, which is a scale if one operand is a known number."""
    # A product with a number is scaled, which costs less than reading a second operand.
    for x, y in ((a, b), (b, a)):
        factor = _scalar(x)
        if factor is not None and isinstance(y, Ref):
            return emitter.op("scale", y, factor=factor)
    return emitter.op("mul", _ref(emitter, a, out), _ref(emitter, b, out))


def _div(emitter: Emitter, a: Item, b: Item, out: Array) -> Ref:
    divisor = _scalar(b)
    if divisor is not None and isinstance(a, Ref):
        return emitter.op("scale", a, factor=1.0 / divisor)
    return emitter.op("div", _ref(emitter, a, out), _ref(emitter, b, out))


def _max(emitter: Emitter, a: Item, b: Item, out: Array) -> Ref:
    """max(a, b) = relu(a - b) + b."""
    # The IR has no maximum of two tensors; relu has a gradient and shards like any element-wise op.
    for x, y in ((a, b), (b, a)):
        bound = _scalar(x)
        if bound is None or not isinstance(y, Ref):
            continue
        if bound == -np.inf:
            return y
        if bound == 0:
            return emitter.op("relu", y)
        return _max_by_relu(emitter, y, x, out)
    return _max_by_relu(emitter, a, b, out)


def _max_by_relu(emitter: Emitter, a: Item, b: Item, out: Array) -> Ref:
    return _add(emitter, emitter.op("relu", _sub(emitter, a, b, out)), b, out)


def _min(emitter: Emitter, a: Item, b: Item, out: Array) -> Ref:
    """min(a, b) = b - relu(b - a)."""
    return _sub(emitter, b, emitter.op("relu", _sub(emitter, b, a, out)), out)


def _abs(emitter: Emitter, x: Ref, out: Array) -> Ref:
    return emitter.op(
        "add", emitter.op("relu", x), emitter.op("relu", emitter.op("scale", x, factor=-1.0))
    )


def _stop_gradient(emitter: Emitter, x: Ref, out: Array) -> Ref:
    # A softmax's maximum may be kept out of the gradient, because it cancels. For anything else
    # stopping it changes the derivative, which the IR could not express.
    if emitter.differentiable and not x.unstopped:
        raise CannotMapError("stop_gradient is supported only for maxima")
    return replace(x, unstopped=False)


def _integer_pow(emitter: Emitter, eqn: Equation) -> Ref:
    """Translate a power with a whole exponent to products."""
    x = _first_reference(eqn.items)
    exponent = int(eqn.parameters["y"])
    power = x
    for _ in range(abs(exponent) - 1):
        power = emitter.op("mul", power, x)
    return power if exponent > 0 else _div(emitter, Known.of(1.0), power, eqn.out)


# --- checks and choices
# --------------------------------------------------------------------------------


def _check(name: str, items: Sequence[Item], integer: bool) -> IndexCheck:
    """Comparisons of indices with their bounds, and of maxima with infinity."""
    # Maxima are checked for infinity (`is_finite`) before they are subtracted; in a program they
    # are finite.
    checked = all(isinstance(item, (IndexCheck, Known)) for item in items)
    finite = name == "is_finite" and isinstance(items[0], Ref) and items[0].unstopped
    bounded = integer and name in ("ge", "le") and isinstance(items[1], Known)
    if finite or bounded or (checked and name in ("and", "reduce_and")):
        return IndexCheck("valid")
    if integer and name == "lt" and _scalar(items[1]) == 0:
        return IndexCheck("negative")
    raise CannotMapError("the IR has no comparisons")


def _select(emitter: Emitter, items: Sequence[Item], arrays: Sequence[Array], out: Array) -> Item:
    """A choice by a known mask is a sum with masked terms; by an index check it is not a choice."""
    predicate, *cases = items
    if isinstance(predicate, IndexCheck):
        return cases[0] if predicate.kind == "negative" else cases[1]
    if not isinstance(predicate, Known) or len(cases) != 2:
        raise CannotMapError("a selection that depends on data")
    # Infinity times zero is not a number, so masked-out elements of constants are set to zero
    # instead.
    mask = predicate.array.astype(float)
    terms = []
    for case, weight in zip(cases, (1 - mask, mask), strict=True):
        if isinstance(case, Known):
            value = np.where(weight > 0, case.array, 0.0)
            terms.append(Known(np.broadcast_to(value, out.shape)))
        else:
            terms.append(_mul(emitter, case, Known(weight), out))
    if all(isinstance(term, Known) for term in terms):
        return Known(terms[0].array + terms[1].array)  # pyright: ignore[reportAttributeAccessIssue]
    return _add(emitter, terms[0], terms[1], out)


# --- shapes, sums, products, look-ups
# ------------------------------------------------------------------


def _reshape(emitter: Emitter, eqn: Equation) -> Ref:
    """Reshape a value, which stays small if it is broadcast and only axes of size 1 move."""
    x = _first_reference(eqn.items)
    shape = eqn.out.shape
    stored = emitter.shape(x)
    full = eqn.arrays[0].shape
    if stored == full:
        return emitter.reshape(x, shape)

    # A broadcast value is stored with size 1 along some axes. A reshape that only moves axes of
    # size 1 keeps it that small; any other needs it in full.
    moves_only_ones = [n for n in full if n != 1] == [n for n in shape if n != 1]
    if len(stored) != len(full) or not moves_only_ones:
        return emitter.reshape(emitter.materialised(x, eqn.arrays[0]), shape)
    stored_sizes = iter([size for size, n in zip(stored, full, strict=True) if n != 1])
    return emitter.reshape(x, [1 if n == 1 else next(stored_sizes) for n in shape])


def _broadcast(emitter: Emitter, eqn: Equation) -> Ref:
    """Put the axes of a broadcast in place; the ops that use the value broadcast it."""
    x = _first_reference(eqn.items)
    shape = [1] * len(eqn.out.shape)
    for axis, size in zip(eqn.parameters["broadcast_dimensions"], emitter.shape(x), strict=True):
        shape[axis] = size
    return emitter.reshape(x, shape)


def _transpose(emitter: Emitter, eqn: Equation) -> Ref:
    return emitter.transpose(_first_reference(eqn.items), eqn.parameters["permutation"])


def _reduce_sum(emitter: Emitter, eqn: Equation) -> Ref:
    """Sum over axes, of which broadcast ones only multiply."""
    x = _first_reference(eqn.items)
    stored = emitter.shape(x)
    full = eqn.arrays[0].shape
    axes = tuple(int(axis) for axis in eqn.parameters["axes"])
    total = emitter.op("sum", x, axes=axes, keep=True)
    summed = emitter.reshape(total, [size for axis, size in enumerate(stored) if axis not in axes])

    # Summing a broadcast axis multiplies by how often the value was repeated.
    repeats = prod(full[axis] // stored[axis] for axis in axes)
    return summed if repeats == 1 else emitter.op("scale", summed, factor=float(repeats))


def _reduce_max(emitter: Emitter, eqn: Equation) -> Ref:
    """Translate a maximum over axes."""
    x = _first_reference(eqn.items)
    if tuple(eqn.parameters["axes"]) != (len(eqn.arrays[0].shape) - 1,):
        raise CannotMapError("a maximum along an axis other than the last")
    top = emitter.op("row_max", emitter.materialised(x, eqn.arrays[0]))
    return replace(emitter.reshape(top, eqn.out.shape), unstopped=True)


def _argmax(emitter: Emitter, eqn: Equation) -> Ref:
    """Index of the largest entry along one axis, or of the smallest if the value is negated."""
    x = _first_reference(eqn.items)
    (axis,) = eqn.parameters["axes"]
    rank = len(eqn.arrays[0].shape)
    order = [k for k in range(rank) if k != axis] + [axis]
    rows = emitter.transpose(emitter.materialised(x, eqn.arrays[0]), order)
    return emitter.op("argmax", rows)


def _argmin(emitter: Emitter, eqn: Equation) -> Ref:
    negated = emitter.op("scale", _first_reference(eqn.items), factor=-1.0)
    return _argmax(emitter, replace(eqn, items=(negated,)))


def _dot(emitter: Emitter, eqn: Equation) -> Ref:
    """Axes in the order batch, m, k and batch, k, n; a matrix on the right takes any leading axes
    on the left."""
    a, b = _in_full(emitter, eqn)
    shape_a, shape_b = eqn.arrays[0].shape, eqn.arrays[1].shape

    # `dot_general` takes axes in any order; the IR's `matmul` wants (batch, m, k) and (batch, k,
    # n).
    (contract_a, contract_b), (batch_a, batch_b) = eqn.parameters["dimension_numbers"]
    rows = [axis for axis in range(len(shape_a)) if axis not in (*contract_a, *batch_a)]
    columns = [axis for axis in range(len(shape_b)) if axis not in (*contract_b, *batch_b)]
    batch = tuple(shape_a[axis] for axis in batch_a)
    row_sizes = tuple(shape_a[axis] for axis in rows)
    size_k = prod(shape_a[axis] for axis in contract_a)
    size_n = prod(shape_b[axis] for axis in columns)

    # Without a batch the rows may keep their axes.
    if batch or not row_sizes:
        row_sizes = (prod(row_sizes),)
    a = emitter.transpose(a, (*batch_a, *rows, *contract_a))
    a = emitter.reshape(a, (*batch, *row_sizes, size_k))

    # A right operand that is contracted along its last axis is read transposed instead of being
    # copied.
    if tuple(contract_b) == (len(shape_b) - 1,) and len(columns) == 1:
        b = emitter.transpose(b, (*batch_b, *columns, *contract_b))
        product = emitter.op("matmul", a, b, transpose_b=True)
    else:
        b = emitter.transpose(b, (*batch_b, *contract_b, *columns))
        product = emitter.op("matmul", a, emitter.reshape(b, (*batch, size_k, size_n)))
    # Products of short floats may be wanted in longer ones (`preferred_element_type`).
    return emitter.cast(emitter.reshape(product, eqn.out.shape), eqn.out.dtype)


def _gather(emitter: Emitter, eqn: Equation) -> Ref:
    """Rows of a matrix (`embedding`), or one element of every row (`pick`)."""
    x = _first_reference(eqn.items)
    indices = eqn.items[1]
    shape = eqn.arrays[0].shape
    slice_sizes = tuple(eqn.parameters["slice_sizes"])

    # Slices as large as the tensor, from its start, are the tensor: JAX takes the only element of
    # an axis so.
    if _scalar(indices) == 0 and slice_sizes == shape:
        return emitter.reshape(x, eqn.out.shape)
    if isinstance(indices, Known):
        indices = emitter.literal(indices.array, "int32")
    if not isinstance(indices, Ref):
        raise CannotMapError("indices that are checks")

    # A slice of every index is a row of a matrix, whose axis of size 1 is dropped.
    numbers = eqn.parameters["dimension_numbers"]
    takes_rows = len(shape) == 2 and slice_sizes == (1, shape[1])
    if takes_rows and tuple(numbers.collapsed_slice_dims) == (0,):
        return emitter.op("embedding", x, emitter.reshape(indices, eqn.out.shape[:-1]))

    # Or one element of the last axis, for every place along all others.
    last_axis = len(shape) - 1
    outer_axes = list(range(last_axis))
    batch_axes = list(getattr(numbers, "operand_batching_dims", ()))
    if (
        prod(slice_sizes) == 1
        and batch_axes == outer_axes
        and tuple(numbers.start_index_map) == (last_axis,)
    ):
        rows = emitter.materialised(x, eqn.arrays[0])
        elements = emitter.op("pick", rows, emitter.reshape(indices, shape[:-1]))
        return emitter.reshape(elements, eqn.out.shape)
    raise CannotMapError("a gather that takes neither whole rows nor one element per row")


def _concatenate(emitter: Emitter, eqn: Equation) -> Ref:
    return emitter.op("concat", *_in_full(emitter, eqn), axis=eqn.parameters["dimension"])


def _in_full(emitter: Emitter, eqn: Equation) -> list[Ref]:
    """The operands in their full shapes, without implicit broadcasting."""
    refs = []
    for item, array in zip(eqn.items, eqn.arrays, strict=True):
        refs.append(emitter.materialised(_ref(emitter, item, array), array))
    return refs


def _first_reference(items: Sequence[Item]) -> Ref:
    x = items[0]
    if not isinstance(x, Ref):
        raise CannotMapError("the first operand is a constant")
    return x


_BINARY: Final[Mapping[str, Callable[..., Ref]]] = MappingProxyType(
    {"add": _add, "add_any": _add, "sub": _sub, "mul": _mul, "div": _div, "max": _max, "min": _min}
)
_UNARY: Final[Mapping[str, Callable[[Emitter, Ref, Array], Ref]]] = MappingProxyType(
    {
        "neg": lambda emitter, x, out: emitter.op("scale", x, factor=-1.0),
        "exp": lambda emitter, x, out: emitter.op("exp", x),
        "exp2": lambda emitter, x, out: emitter.op("exp", emitter.op("scale", x, factor=log(2.0))),
        "expm1": lambda emitter, x, out: _sub(emitter, emitter.op("exp", x), Known.of(1.0), out),
        "log": lambda emitter, x, out: emitter.op("log", x),
        "log1p": lambda emitter, x, out: emitter.op("log", _add(emitter, x, Known.of(1.0), out)),
        "sqrt": lambda emitter, x, out: emitter.op("sqrt", x),
        "rsqrt": lambda emitter, x, out: _div(emitter, Known.of(1.0), emitter.op("sqrt", x), out),
        "square": lambda emitter, x, out: emitter.op("mul", x, x),
        "tanh": lambda emitter, x, out: emitter.op("tanh", x),
        "logistic": lambda emitter, x, out: emitter.op("sigmoid", x),
        "erf": lambda emitter, x, out: emitter.op("erf", x),
        "abs": _abs,
        "stop_gradient": _stop_gradient,
        "copy": lambda emitter, x, out: x,
        "optimization_barrier": lambda emitter, x, out: x,
    }
)
_OTHERS: Final[Mapping[str, Callable[[Emitter, Equation], Ref]]] = MappingProxyType(
    {
        "integer_pow": _integer_pow,
        "reshape": _reshape,
        "squeeze": _reshape,
        "expand_dims": _reshape,
        "broadcast_in_dim": _broadcast,
        "transpose": _transpose,
        "reduce_sum": _reduce_sum,
        "reduce_max": _reduce_max,
        "argmax": _argmax,
        "argmin": _argmin,
        "dot_general": _dot,
        "gather": _gather,
        "concatenate": _concatenate,
    }
)
