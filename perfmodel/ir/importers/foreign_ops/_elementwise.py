"""Element-wise ops of ONNX and ATen, and those that pass a value on."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir import INTEGER_DTYPES
from perfmodel.ir.importers._emitter import CannotMapError, IndexCheck, Item, Known, Ref
from perfmodel.ir.importers._graph import Array
from perfmodel.ir.importers._program_rules import mapped
from perfmodel.ir.importers.foreign_ops._call import Call, Rule, graph_dtype, primitive, promoted, spelled


def _like(name: str) -> Rule:
    """Return the rule of an op that a JAX primitive of the same operands does."""

    def rule(c: Call) -> Item:
        items = [c.item(k) for k in range(len(c.args)) if c.args[k] is not None]
        return primitive(c, name, *items)

    return rule


def _weighted(name: str) -> Rule:
    """a + alpha b."""

    def rule(c: Call) -> Item:
        # ATen's `add` and `sub` scale their second operand; ONNX's have no third, so alpha is 1.
        b, alpha = c.item(1), c.value("alpha", 2, 1)
        if alpha != 1:
            b = Known(b.array * alpha) if isinstance(b, Known) else c.scaled(c.as_ref(b), alpha)
        return primitive(c, name, c.item(0), b)

    return rule


def _power(c: Call) -> Item:
    # Roots have ops; small whole powers are products; the IR has no general power.
    x, exponent = c.ref(0), float(np.asarray(c.value("", 1)))
    if exponent in (0.5, -0.5):
        return primitive(c, "sqrt" if exponent > 0 else "rsqrt", x)
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
    # A clip is a maximum with the lower bound, then a minimum with the upper one.
    x: Item = c.ref(0)
    for name, position, primitive_name in (("min", 1, "max"), ("max", 2, "min")):
        bound = c.value(name, position, None)
        if bound is not None:
            x = primitive(c, primitive_name, x, Known.of(bound, float))
    return x


def _same(c: Call) -> Item:
    return c.item(0)


def _cast(c: Call) -> Item:
    """Cast to the element type that the reader states; all integers are int32, and a check stays what it is."""
    x = c.item(0)
    return c.d.cast(x, graph_dtype(c.attributes["to_dtype"])) if isinstance(x, Ref) else x


def _cast_like(c: Call) -> Item:
    x, like = c.item(0), c.item(1)
    if not isinstance(x, Ref):
        return x
    is_known = isinstance(like, Known)
    return c.d.cast(x, graph_dtype(str(like.array.dtype)) if is_known else c.d.dtype(c.as_ref(like)))


def _where(c: Call, condition: int = 0, yes: int = 1, no: int = 2) -> Item:
    # A choice by a mask that is known is arithmetic; by a guard of indices it is settled; by data it cannot be
    # written.
    which = c.item(condition)
    if isinstance(which, IndexCheck):
        return c.item(no if which.kind == "negative" else yes)
    if not isinstance(which, Known):
        raise CannotMapError("a selection by data; give the value of the input that the mask comes from")
    cases = [c.finite(item) if isinstance(item, Known) else item for item in promoted(c, (c.item(no), c.item(yes)))]
    dtype = next((c.d.dtype(item) for item in cases if isinstance(item, Ref)), c.dtype)
    out = Array(dtype, np.broadcast_shapes(*(c.shape(i) for i in (which, *cases))), 4)
    return mapped("select_n", c.d, {}, [which, *cases], [out] * 3, out, integer=False)


_NEVER_BELOW_0: Final[Mapping[str, tuple[str, bool]]] = MappingProxyType(
    {
        "eq": ("negative", False),
        "ne": ("valid", False),
        "lt": ("negative", True),
        "le": ("negative", False),
        "ge": ("valid", True),
        "gt": ("valid", False),
    }
)
"""Outcome of comparing an index with a negative number, and whether it is the same for 0: indices are in range."""


def _compared(name: str) -> Rule:
    """Comparison of an index with a number; any other comparison of data would be a choice by data."""

    def rule(c: Call) -> IndexCheck:
        x, bound = c.item(0), c.item(1)
        kind, with_zero = _NEVER_BELOW_0[name]
        is_index = isinstance(x, Ref) and c.d.dtype(x) in INTEGER_DTYPES
        if is_index and isinstance(bound, Known) and bound.array.size:
            largest = float(np.max(bound.array))
            if largest < 0 or (with_zero and largest == 0):
                return IndexCheck(kind)  # pyright: ignore[reportArgumentType]
        raise CannotMapError("a comparison of data; give the value of the input that it comes from")

    return rule


def _never(c: Call) -> IndexCheck:
    """Programs compute no infinities and nothing that is not a number, as masks are finite in them."""
    return IndexCheck("negative")


def _not(c: Call) -> IndexCheck:
    x = c.item(0)
    if not isinstance(x, IndexCheck):
        raise CannotMapError("a comparison of data; give the value of the input that it comes from")
    return IndexCheck("valid" if x.kind == "negative" else "negative")


def _both(name: str) -> Rule:
    """Conjunction or disjunction of checks, and of known booleans."""
    # A false operand decides a conjunction, a true one a disjunction; a neutral one leaves the other.
    neutral, decides = ("valid", "negative") if name == "and" else ("negative", "valid")

    def rule(c: Call) -> Item:
        items = [c.item(0), c.item(1)]
        if any(isinstance(item, Ref) for item in items):
            raise CannotMapError("a comparison of data; give the value of the input that it comes from")
        checks = [item for item in items if isinstance(item, IndexCheck)]
        settled = next((item for item in checks if item.kind == decides), None)
        return settled or next((item for item in items if item not in checks), IndexCheck(neutral))

    return rule


_AS_IN_JAX: Final = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "Max": "max",
    "Min": "min",
    "mul.Tensor": "mul",
    "div.Tensor": "div",
    "maximum": "max",
    "minimum": "min",
    "Exp": "exp",
    "Log": "log",
    "Sqrt": "sqrt",
    "Tanh": "tanh",
    "Sigmoid": "logistic",
    "Erf": "erf",
    "Neg": "neg",
    "Abs": "abs",
    "exp": "exp",
    "log": "log",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "tanh": "tanh",
    "sigmoid": "logistic",
    "erf": "erf",
    "neg": "neg",
    "abs": "abs",
}
"""JAX primitive by name of the op."""


_COMPARISONS_OF_ONNX: Final = {
    "Equal": "eq",
    "Less": "lt",
    "LessOrEqual": "le",
    "GreaterOrEqual": "ge",
    "Greater": "gt",
}

ELEMENTWISE: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        **{name: _like(jax_name) for name, jax_name in _AS_IN_JAX.items()},
        **spelled("Relu", "relu", "relu_", rule=lambda c: c.op("relu", c.ref(0))),
        **spelled("add.Tensor", "add_.Tensor", rule=_weighted("add")),
        "sub.Tensor": _weighted("sub"),
        **spelled("Reciprocal", "reciprocal", rule=lambda c: primitive(c, "div", Known.of(1.0), c.ref(0))),
        **spelled("Pow", "pow.Tensor_Scalar", rule=_power),
        **spelled("Gelu", "gelu", rule=_gelu),
        **spelled("silu", "Swish", "silu_", rule=_silu),
        **spelled("Clip", "clamp", rule=_clip),
        **spelled(
            "Identity",
            "Dropout",
            "clone",
            "contiguous",
            "detach",
            "alias",
            "dropout",
            "lift_fresh_copy",
            "detach_",
            rule=_same,
        ),
        # the value of the second operand, which takes the place of the first
        **spelled("copy", "copy_", "fill.Tensor", rule=lambda c: c.item(1)),
        "CastLike": _cast_like,
        **spelled("Cast", "_to_copy", "to.dtype", "to.device", "to.dtype_layout", "type_as", rule=_cast),
        **{name: _compared(name) for name in _NEVER_BELOW_0},
        **{f"{name}.Scalar": _compared(name) for name in _NEVER_BELOW_0},
        **{f"{name}.Tensor": _compared(name) for name in _NEVER_BELOW_0},
        **{onnx_name: _compared(name) for onnx_name, name in _COMPARISONS_OF_ONNX.items()},
        **spelled("IsNaN", "IsInf", "isnan", "isinf", rule=_never),
        **spelled("Not", "logical_not", "bitwise_not", rule=_not),
        **spelled("And", "logical_and", "__and__.Tensor", "bitwise_and.Tensor", rule=_both("and")),
        **spelled("Or", "logical_or", "__or__.Tensor", "bitwise_or.Tensor", rule=_both("or")),
        **spelled("Where", "where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", rule=_where),
        **spelled("masked_fill.Scalar", "masked_fill.Tensor", rule=lambda c: _where(c, 1, 2, 0)),
    }
)
"""Rules by name of the op."""
