"""One table from the ops of ONNX (`Add`) and ATen (`add.Tensor`) to those of the IR: an op is one entry.

A rule takes a `Call` and returns the item of its output, or a list of several. ONNX's inputs and ATen's arguments are
read by position, so that one rule often serves both; what ONNX keeps in an attribute is read by that name first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from perfmodel.importers._dtypes import Array
from perfmodel.importers._emitter import CannotMapError, Emitter, Item, Known, Ref, collapsed
from perfmodel.importers._program_rules import mapped
from perfmodel.program.ir.models import cross_entropy

_ABSENT: Final = object()
_MOST_COPIES: Final = 64
"""Of a tensor that is repeated along an axis by joining it to itself."""
_LOWEST: Final = {"fp64": -1.7e308, "fp32": -3.4e38, "bf16": -3.3e38, "fp16": -65504.0}
"""What stands for minus infinity in masks: times 0 it is 0."""


@dataclass(frozen=True)
class Call:
    """A node of a foreign graph."""

    d: Emitter
    args: tuple[Any, ...]
    attributes: Mapping[str, Any]

    def has(self, position: int) -> bool:
        """Whether an operand is given."""
        return position < len(self.args) and self.args[position] is not None

    def item(self, position: int) -> Item:
        """An operand, numbers as known values."""
        value = self.args[position] if self.has(position) else None
        if value is None:
            raise CannotMapError(f"operand {position} is missing")
        return value if isinstance(value, (Known, Ref)) else Known(np.asarray(value))

    def ref(self, position: int) -> Ref:
        """An operand as a value of the program."""
        return self.as_ref(self.item(position))

    def as_ref(self, item: Item) -> Ref:
        """A known item written down, in the element type of the call's other operands."""
        if isinstance(item, Ref):
            return item
        if not isinstance(item, Known):
            raise CannotMapError("depends on what is missing")
        if item.array.dtype.kind in "iub":
            raise CannotMapError("the IR computes no integers")
        return self.d.literal(np.clip(item.array, _LOWEST[self.dtype], None), self.dtype)

    @property
    def dtype(self) -> str:
        """Element type of the operands that are values of the program."""
        flat = [i for a in self.args for i in (a if isinstance(a, list) else [a]) if isinstance(i, Ref)]
        kinds = [self.d.builder.types[i.name].dtype for i in flat]
        return next((k for k in kinds if not k.startswith("int")), kinds[0])

    def shape(self, item: Item) -> tuple[int, ...]:
        return self.d.shape(item) if isinstance(item, Ref) else np.shape(item.array)  # pyright: ignore

    def value(self, name: str, position: int, default: Any = _ABSENT) -> Any:
        """A plain value: ONNX's attribute of a name, or the known operand at a position."""
        if name in self.attributes:
            return self.attributes[name]
        found = self.args[position] if 0 <= position < len(self.args) else None
        if isinstance(found, Known):
            found = found.array.tolist()
        if isinstance(found, Ref):
            raise CannotMapError(f"{name} depends on data; give its value")
        if found is None and default is _ABSENT:
            raise CannotMapError(f"{name} is not given")
        return default if found is None else found

    def op(self, op: str, *refs: Ref, **attributes: Any) -> Ref:
        return self.d.op(op, *refs, **attributes)

    def scaled(self, ref: Ref, factor: float) -> Ref:
        return ref if factor == 1 else self.op("scale", ref, factor=float(factor))


Rule = Callable[[Call], Any]


# --- element-wise ---------------------------------------------------------------------------------------


def _like(primitive: str) -> Rule:
    """As the JAX primitive that takes the same operands."""

    def rule(c: Call) -> Item:
        items = [c.item(k) for k in range(len(c.args)) if c.args[k] is not None]
        return _primitive(c, primitive, *items)

    return rule


def _primitive(c: Call, primitive: str, *items: Item) -> Item:
    if any(isinstance(i, Ref) and c.d.builder.types[i.name].dtype.startswith("int") for i in items):
        raise CannotMapError("the IR computes no integers; give the value of the input that they come from")
    out = Array(c.dtype, (), 4)
    floats = [Known(np.asarray(i.array, float)) if isinstance(i, Known) else i for i in items]
    return mapped(primitive, c.d, {}, floats, [Array(c.dtype, c.shape(i), 4) for i in items], out, integer=False)


def _weighted(primitive: str) -> Rule:
    """a + alpha b."""

    def rule(c: Call) -> Item:
        b, alpha = c.item(1), c.value("alpha", 2, 1)
        if alpha != 1:
            b = Known(b.array * alpha) if isinstance(b, Known) else c.scaled(c.as_ref(b), alpha)
        return _primitive(c, primitive, c.item(0), b)

    return rule


def _power(c: Call) -> Item:
    x, exponent = c.ref(0), float(np.asarray(c.value("", 1)))
    if exponent in (0.5, -0.5):
        return _primitive(c, "sqrt" if exponent > 0 else "rsqrt", x)
    if not exponent.is_integer() or not 0 < abs(exponent) <= 8:
        raise CannotMapError(f"a power of {exponent:g}")
    return mapped("integer_pow", c.d, {"y": exponent}, [x], [], Array(c.dtype, (), 4), integer=False)


def _gelu(c: Call) -> Ref:
    approximate = c.value("approximate", 1, "none")
    if approximate in ("tanh", b"tanh"):
        return c.op("gelu", c.ref(0))
    return c.op("gelu", c.ref(0), exact=True)


def _silu(c: Call) -> Ref:
    return c.op("mul", c.ref(0), c.op("sigmoid", c.ref(0)))


def _clip(c: Call) -> Item:
    x: Item = c.ref(0)
    for name, position, primitive in (("min", 1, "max"), ("max", 2, "min")):
        bound = c.value(name, position, None)
        if bound is not None:
            x = _primitive(c, primitive, x, Known(np.asarray(bound, float)))
    return x


def _same(c: Call) -> Item:
    return c.item(0)


def _cast(c: Call) -> Item:
    return c.item(0)  # types are settled on entry: one element type of floats, integers as int32


def _where(c: Call, condition: int = 0, yes: int = 1, no: int = 2) -> Item:
    which = c.item(condition)
    if not isinstance(which, Known):
        raise CannotMapError("a choice by data; give the value of the input that the mask comes from")
    cases = [_finite(c, c.item(k)) for k in (no, yes)]
    out = Array(c.dtype, np.broadcast_shapes(*(c.shape(i) for i in (which, *cases))), 4)
    return mapped("select_n", c.d, {}, [which, *cases], [out] * 3, out, integer=False)


def _finite(c: Call, item: Item) -> Item:
    return Known(np.clip(item.array, _LOWEST[c.dtype], None)) if isinstance(item, Known) else item


# --- shapes ---------------------------------------------------------------------------------------------


def _axes(values: Any, rank: int) -> tuple[int, ...]:
    return tuple(int(a) % rank for a in np.atleast_1d(values).tolist())


def _reshape(c: Call) -> Ref:
    x, wanted = c.ref(0), [int(n) for n in np.atleast_1d(c.value("shape", 1))]
    have = c.shape(x)
    if 0 in wanted and not c.attributes.get("allowzero"):
        wanted = [have[k] if n == 0 else n for k, n in enumerate(wanted)]
    return c.d.reshape(x, _whole_shape(wanted, prod(have)))


def _whole_shape(wanted: Sequence[int], n_elements: int) -> list[int]:
    known = prod(n for n in wanted if n != -1)
    return [n_elements // known if n == -1 else n for n in wanted]


def _flatten(c: Call) -> Ref:
    """ONNX: into two axes; ATen: axes start to end into one."""
    x = c.ref(0)
    shape = c.shape(x)
    if len(c.args) > 1:
        start, end = (int(c.value("", k)) % len(shape) for k in (1, 2))
        return c.d.reshape(x, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))
    axis = int(c.attributes.get("axis", 1))
    return c.d.reshape(x, (prod(shape[:axis]), prod(shape[axis:])))


def _unflatten(c: Call) -> Ref:
    x = c.ref(0)
    shape, (axis,) = c.shape(x), _axes(c.value("", 1), len(c.shape(x)))
    return c.d.reshape(x, (*shape[:axis], *_whole_shape(c.value("", 2), shape[axis]), *shape[axis + 1 :]))


def _squeeze(c: Call) -> Ref:
    x = c.ref(0)
    shape = c.shape(x)
    given = c.value("axes", 1, None)
    axes = range(len(shape)) if given is None else _axes(given, len(shape))
    return c.d.reshape(x, [n for k, n in enumerate(shape) if n != 1 or k not in axes])


def _unsqueeze(c: Call) -> Ref:
    x, given = c.ref(0), np.atleast_1d(c.value("axes", 1))
    rank = len(c.shape(x)) + len(given)
    rest, axes = iter(c.shape(x)), _axes(given, rank)
    return c.d.reshape(x, [1 if k in axes else next(rest) for k in range(rank)])


def _permute(c: Call) -> Ref:
    x = c.ref(0)
    rank = len(c.shape(x))
    return c.d.transpose(x, _axes(c.value("perm", 1, range(rank)[::-1]), rank))


def _swap(c: Call, first: int | None = None, second: int | None = None) -> Ref:
    x = c.ref(0)
    order = list(range(len(c.shape(x))))
    i, j = (int(c.value("", k)) if axis is None else axis for k, axis in ((1, first), (2, second)))
    order[i], order[j] = order[j], order[i]
    return c.d.transpose(x, order)


def _expand(c: Call) -> Ref:
    x = c.ref(0)
    wanted = [int(n) for n in np.atleast_1d(c.value("shape", 1))]
    have = (1,) * (len(wanted) - len(c.shape(x))) + c.shape(x)
    x = c.d.reshape(x, have)
    for axis, (n, size) in enumerate(zip(wanted, have, strict=True)):
        if size == 1 and n > 1:
            if n > _MOST_COPIES:
                raise CannotMapError(f"a broadcast to {n} copies would have to be stored")
            x = c.op("concat", *[x] * n, axis=axis)
    return x


def _concat(c: Call) -> Ref:
    """ONNX: any number of inputs; ATen: a list, then the axis. Empty parts (caches before the first token) go."""
    parts, axis = (c.args[0], c.value("", 1, 0)) if isinstance(c.args[0], list) else (c.args, c.attributes["axis"])
    refs = [c.as_ref(p) for p in parts if not (isinstance(p, Known) and p.array.size == 0)]
    (axis,) = _axes(axis, len(c.shape(refs[0])))
    return refs[0] if len(refs) == 1 else c.op("concat", *refs, axis=axis)


def _stack(c: Call) -> Ref:
    refs = [c.as_ref(p) for p in c.args[0]]
    shape = c.shape(refs[0])
    (axis,) = _axes(c.value("", 1, 0), len(shape) + 1)
    return c.op("concat", *(c.d.reshape(r, (*shape[:axis], 1, *shape[axis:])) for r in refs), axis=axis)


def _cut(c: Call, x: Ref, axis: int, sizes: Sequence[int]) -> list[Ref]:
    if len(set(sizes)) == 1:
        with c.d.builder.tagged(phase="forward", layer=x.layer):
            hints = (f"{x.name}_part",) * len(sizes)
            names = c.d.builder.emit("split", (x.name,), hints, (("axis", axis), ("parts", len(sizes))))
        return [Ref(name, x.layer) for name in names]
    stops = np.cumsum(sizes).tolist()
    return [_range(c, x, axis, stop - n, stop) for n, stop in zip(sizes, stops, strict=True)]


def _range(c: Call, x: Ref, axis: int, start: int, stop: int) -> Ref:
    return x if stop - start == c.shape(x)[axis] else c.op("slice", x, axis=axis, start=start, stop=stop)


def _split(c: Call) -> list[Ref]:
    """ONNX: sizes or `num_outputs`; ATen: sizes, or the size of each part."""
    x = c.ref(0)
    axis = int(c.value("axis", 2, 0)) % len(c.shape(x))
    n = c.shape(x)[axis]
    sizes = c.value("split", 1, None)
    if sizes is None or "num_outputs" in c.attributes:
        sizes = -(-n // int(c.attributes["num_outputs"]))
    if isinstance(sizes, int):
        sizes = [min(sizes, n - k) for k in range(0, n, sizes)]
    return _cut(c, x, axis, sizes)


def _chunk(c: Call) -> list[Ref]:
    x = c.ref(0)
    axis = int(c.value("", 2, 0)) % len(c.shape(x))
    n = c.shape(x)[axis]
    size = -(-n // int(c.value("", 1)))
    return _cut(c, x, axis, [min(size, n - k) for k in range(0, n, size)])


def _slice(c: Call) -> Ref:
    """ONNX: starts, ends, axes, steps; ATen: axis, start, end, step."""
    x = c.ref(0)
    rank = len(c.shape(x))
    if isinstance(c.args[1], Known) or "starts" in c.attributes:
        starts = np.atleast_1d(c.value("starts", 1)).tolist()
        stops = np.atleast_1d(c.value("ends", 2)).tolist()
        axes = _axes(c.value("axes", 3, list(range(len(starts)))), rank)
        steps = np.atleast_1d(c.value("steps", 4, [1] * len(starts))).tolist()
    else:
        axes, starts, stops, steps = (
            [c.value("", k, default)] for k, default in ((1, 0), (2, 0), (3, np.iinfo(np.int64).max), (4, 1))
        )
    for axis, start, stop, step in zip(_axes(axes, rank), starts, stops, steps, strict=True):
        if step != 1:
            raise CannotMapError(f"a slice with step {step}")
        first, last, _ = slice(start, stop).indices(c.shape(x)[axis])
        x = _range(c, x, axis, first, last)
    return x


def _select(c: Call) -> Ref:
    x = c.ref(0)
    shape = c.shape(x)
    axis, index = int(c.value("", 1)) % len(shape), int(c.value("", 2))
    index %= shape[axis]
    cut = _range(c, x, axis, index, index + 1)
    return c.d.reshape(cut, (*shape[:axis], *shape[axis + 1 :]))


def _gather(c: Call) -> Ref:
    """Rows of a table, or one element of an axis."""
    x, ids = c.ref(0), c.item(1)
    axis = int(c.attributes.get("axis", 0)) % len(c.shape(x))
    if isinstance(ids, Known) and ids.array.size == 1:
        index = int(ids.array.reshape(())) % c.shape(x)[axis]
        shape = c.shape(x)
        cut = _range(c, x, axis, index, index + 1)
        return c.d.reshape(cut, (*shape[:axis], *ids.array.shape, *shape[axis + 1 :]))
    if axis or len(c.shape(x)) != 2:
        raise CannotMapError("neither rows of a matrix nor one element of an axis")
    return _rows(c, x, ids)


def _rows(c: Call, table: Ref, ids: Item) -> Ref:
    if not isinstance(ids, Known):
        return c.op("embedding", table, c.ref(1))
    small = collapsed(ids.array)  # positions that are the same for all samples are looked up once
    known = small if small.ndim else ids.array
    flat = known.ravel()
    if (np.diff(flat) == 1).all():
        cut = _range(c, table, 0, int(flat[0]), int(flat[-1]) + 1)
        return c.d.reshape(cut, (*known.shape, c.shape(table)[1]))
    return c.op("embedding", table, c.d.literal(known, "int32"))


# --- products, reductions, rows -------------------------------------------------------------------------


def _matmul(c: Call) -> Ref:
    return _product(c, c.ref(0), c.ref(1))


def _product(c: Call, a: Ref, b: Ref, **transposed: bool) -> Ref:
    """With leading axes of the smaller operand repeated or merged, as the IR's `matmul` wants them."""
    left, right = c.shape(a), c.shape(b)
    if len(left) == 1:
        return c.d.reshape(_product(c, c.d.reshape(a, (1, *left)), b), (*right[:-2], right[-1]))
    if len(right) == 1:
        return c.d.reshape(_product(c, a, c.d.reshape(b, (*right, 1))), left[:-1])
    if len(right) > 2 and left[:-2] != right[:-2]:
        raise CannotMapError(f"batches {left[:-2]} and {right[:-2]} differ; expand them first")
    return c.op("matmul", a, b, **transposed)


def _linear(c: Call) -> Item:
    y = _product(c, c.ref(0), c.ref(1), transpose_b=True)
    return c.op("add", y, c.ref(2)) if c.has(2) else y


def _gemm(c: Call) -> Item:
    transposed = {n: True for n, flag in (("transpose_a", "transA"), ("transpose_b", "transB"))
                  if c.attributes.get(flag)}  # fmt: skip
    y = c.scaled(_product(c, c.ref(0), c.ref(1), **transposed), c.attributes.get("alpha", 1.0))
    return c.op("add", y, c.scaled(c.ref(2), c.attributes.get("beta", 1.0))) if c.has(2) else y


def _addmm(c: Call) -> Item:
    y = c.scaled(_product(c, c.ref(1), c.ref(2)), c.value("", 4, 1))
    return c.op("add", y, c.scaled(c.ref(0), c.value("", 3, 1)))


def _sum(c: Call, mean: bool = False, keep: int = 1) -> Ref:
    """ONNX keeps summed axes unless told otherwise, ATen does not."""
    x = c.ref(0)
    rank = len(c.shape(x))
    given = c.value("axes", 1, None)
    axes = tuple(range(rank)) if given is None or given == [] else _axes(given, rank)
    total = c.op("sum", x, axes=axes, keep=bool(c.value("keepdims", 2, keep)))
    return c.scaled(total, 1.0 / prod(c.shape(x)[a] for a in axes)) if mean else total


def _softmax(c: Call) -> Ref:
    return _over_last(c, c.ref(0), int(c.value("axis", 1, -1)), lambda x: c.op("softmax", x))


def _log_softmax(c: Call) -> Ref:
    return _over_last(c, c.ref(0), int(c.value("axis", 1, -1)), lambda x: c.op("log", c.op("softmax", x)))


def _over_last(c: Call, x: Ref, axis: int, function: Callable[[Ref], Ref]) -> Ref:
    rank = len(c.shape(x))
    if axis % rank == rank - 1:
        return function(x)
    order = [k for k in range(rank) if k != axis % rank] + [axis % rank]
    return c.d.transpose(function(c.d.transpose(x, order)), np.argsort(order).tolist())


def _layer_norm(c: Call, gain: int = 1, shift: int = 2, epsilon: tuple[str, int] = ("epsilon", -1)) -> Ref:
    x = c.ref(0)
    size = c.shape(x)[-1:]
    if "axis" in c.attributes and c.attributes["axis"] not in (-1, len(c.shape(x)) - 1):
        raise CannotMapError("a norm over several axes")
    if c.has(gain) and c.shape(c.item(gain)) != size:
        raise CannotMapError("a norm over several axes")
    ones = [c.ref(k) if c.has(k) else c.d.literal(np.full(size, v), c.dtype) for k, v in ((gain, 1.0), (shift, 0.0))]
    return c.op("layer_norm", x, *ones, epsilon=float(c.value(*epsilon, 1e-5)))


def _rms_norm(c: Call, gain: int = 1, epsilon: tuple[str, int] = ("epsilon", -1), default: float = 1e-5) -> Item:
    x = c.ref(0)
    square = c.op("sum", c.op("mul", x, x), axes=(len(c.shape(x)) - 1,), keep=True)
    shifted = _primitive(c, "add", c.scaled(square, 1 / c.shape(x)[-1]), Known(np.asarray(c.value(*epsilon, default))))
    y = c.op("div", x, c.op("sqrt", c.as_ref(shifted)))
    return c.op("mul", y, c.ref(gain)) if c.has(gain) else y


def _attention(c: Call) -> Ref:
    """ATen's scaled_dot_product_attention of [batch, heads, sequence, size]: the IR's fused kernel where it can be."""
    q, k, v = (c.ref(i) for i in range(3))
    causal, size = bool(c.value("", 5, False)), c.shape(q)[-1]
    scale = c.value("", 6, None) or size**-0.5
    groups = c.shape(q)[1] // c.shape(k)[1] if len(c.shape(q)) == 4 else 1
    if groups > 1:
        k, v = (_repeat_heads(c, x, groups) for x in (k, v))
    plain = not c.has(3) and scale == size**-0.5
    if plain and len(c.shape(q)) == 4 and c.shape(q) == c.shape(k) == c.shape(v):
        batch, heads, seq, _ = c.shape(q)
        joint = c.op("concat", *(c.d.transpose(x, (0, 2, 1, 3)) for x in (q, k, v)), axis=3)
        context = c.op("attention", c.d.reshape(joint, (batch, seq, 3 * heads * size)), heads=heads, causal=causal)
        return c.d.transpose(c.d.reshape(context, (batch, seq, heads, size)), (0, 2, 1, 3))
    scores = c.scaled(c.op("matmul", q, k, transpose_b=True), scale)
    mask = c.item(3) if c.has(3) else None
    if causal:
        mask = Known(np.tril(np.ones(c.shape(scores)[-2:], bool)))
    if isinstance(mask, Known) and mask.array.dtype == bool:
        mask = Known(np.where(mask.array, 0.0, _LOWEST[c.dtype]))
    if mask is not None:
        scores = c.op("add", scores, c.as_ref(mask))
    return _product(c, c.op("softmax", scores), v)


def _repeat_heads(c: Call, x: Ref, groups: int) -> Ref:
    batch, heads, *rest = c.shape(x)
    single = c.d.reshape(x, (batch, heads, 1, *rest))
    return c.d.reshape(c.op("concat", *[single] * groups, axis=2), (batch, heads * groups, *rest))


# --- losses ---------------------------------------------------------------------------------------------


def _cross_entropy(c: Call) -> Ref:
    """Mean over all labels; ATen's and ONNX's classes of more than two axes stand in axis 1."""
    logits, labels = c.ref(0), c.ref(1)
    rank = len(c.shape(logits))
    if c.has(2) or c.value("reduction", 3, 1) not in (1, b"mean", "mean"):
        raise CannotMapError("weighted classes, or another reduction than the mean")
    logits = c.d.transpose(logits, (0, *range(2, rank), 1)) if rank > 2 else logits
    with c.d.builder.tagged(phase="forward", layer=logits.layer):
        return replace(logits, name=cross_entropy(c.d.builder, logits.name, labels.name))


def _mse(c: Call) -> Ref:
    error = c.op("sub", c.ref(0), c.ref(1))
    total = c.op("sum", c.op("mul", error, error), axes=tuple(range(len(c.shape(error)))))
    if c.value("reduction", 2, 1) != 1:
        raise CannotMapError("another reduction than the mean")
    return c.scaled(total, 1 / prod(c.shape(error)))


def _aten_sum(mean: bool) -> Rule:
    return lambda c: _sum(c, mean, keep=0)


def _spelled(*names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


_BINARY: Final = {"Sub": "sub", "Mul": "mul", "Div": "div", "Max": "max", "Min": "min", "mul.Tensor": "mul",
                  "div.Tensor": "div", "maximum": "max", "minimum": "min", "Add": "add"}  # fmt: skip
_UNARY: Final = {
    "Relu": "relu", "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Tanh": "tanh", "Sigmoid": "logistic", "Erf": "erf",
    "Neg": "neg", "Abs": "abs", "relu": "relu", "relu_": "relu", "exp": "exp", "log": "log", "sqrt": "sqrt",
    "rsqrt": "rsqrt", "tanh": "tanh", "sigmoid": "logistic", "erf": "erf", "neg": "neg", "abs": "abs",
}  # fmt: skip

FOREIGN_OPS: Final[Mapping[str, Rule]] = MappingProxyType({
    **{name: _like(primitive) for name, primitive in {**_BINARY, **_UNARY}.items() if primitive != "relu"},
    **_spelled("Relu", "relu", "relu_", rule=lambda c: c.op("relu", c.ref(0))),
    **_spelled("add.Tensor", "add_.Tensor", rule=_weighted("add")),
    "sub.Tensor": _weighted("sub"),
    **_spelled("Reciprocal", "reciprocal", rule=lambda c: _primitive(c, "div", Known(np.asarray(1.0)), c.ref(0))),
    **_spelled("Pow", "pow.Tensor_Scalar", rule=_power),
    **_spelled("Gelu", "gelu", rule=_gelu),
    **_spelled("silu", "Swish", "silu_", rule=_silu),
    **_spelled("Clip", "clamp", rule=_clip),
    **_spelled("Identity", "Dropout", "clone", "contiguous", "detach", "alias", "dropout", "lift_fresh_copy",
               "detach_", rule=_same),
    **_spelled("Cast", "CastLike", "_to_copy", "to.dtype", "to.device", "to.dtype_layout", "type_as", rule=_cast),
    **_spelled("Where", "where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", rule=_where),
    **_spelled("masked_fill.Scalar", "masked_fill.Tensor", rule=lambda c: _where(c, 1, 2, 0)),
    **_spelled("Reshape", "view", "reshape", "_unsafe_view", rule=_reshape),
    **_spelled("Flatten", "flatten.using_ints", rule=_flatten),
    "unflatten.int": _unflatten,
    **_spelled("Squeeze", "squeeze.dim", "squeeze.dims", "squeeze", rule=_squeeze),
    **_spelled("Unsqueeze", "unsqueeze", rule=_unsqueeze),
    **_spelled("Transpose", "permute", rule=_permute),
    "transpose.int": _swap,
    **_spelled("t", "numpy_T", rule=lambda c: _swap(c, 0, 1)),
    "mT": lambda c: _swap(c, -2, -1),
    **_spelled("Expand", "expand", rule=_expand),
    **_spelled("Concat", "cat", rule=_concat),
    "stack": _stack,
    **_spelled("Split", "split.Tensor", "split_with_sizes", "split.sizes", rule=_split),
    "chunk": _chunk,
    **_spelled("Slice", "slice.Tensor", rule=_slice),
    "select.int": _select,
    "Gather": _gather,
    "embedding": lambda c: _rows(c, c.ref(0), c.item(1)),
    **_spelled("MatMul", "matmul", "mm", "bmm", rule=_matmul),
    "linear": _linear,
    "Gemm": _gemm,
    "addmm": _addmm,
    "ReduceSum": _sum,
    "ReduceMean": lambda c: _sum(c, mean=True),
    **_spelled("sum", "sum.dim_IntList", rule=_aten_sum(mean=False)),
    **_spelled("mean", "mean.dim", rule=_aten_sum(mean=True)),
    **_spelled("Softmax", "softmax.int", "_softmax", rule=_softmax),
    **_spelled("LogSoftmax", "log_softmax.int", "_log_softmax", rule=_log_softmax),
    "LayerNormalization": _layer_norm,
    "layer_norm": lambda c: _layer_norm(c, 2, 3, ("", 4)),
    "RMSNormalization": _rms_norm,
    "rms_norm": lambda c: _rms_norm(c, 2, ("", 3), float(np.finfo(np.float32).eps)),  # torch's default
    "scaled_dot_product_attention": _attention,
    **_spelled("SoftmaxCrossEntropyLoss", "cross_entropy_loss", rule=_cross_entropy),
    "mse_loss": _mse,
})  # fmt: skip
"""Rule of each op; ATen's default overload is named by the op alone."""
