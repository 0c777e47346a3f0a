"""Element-wise ops of ONNX and ATen, and ops that return their operand."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir import INTEGER_DTYPES
from perfmodel.ir.importers._emitter import CannotMapError, IndexCheck, Item, Known, Ref
from perfmodel.ir.importers._graph import Array
from perfmodel.ir.importers._program_rules import mapped
from perfmodel.ir.importers.foreign_ops._call import (
    Call,
    ForeignOp,
    Rule,
    foreign_ops,
    graph_dtype,
    primitive,
    promoted,
)

_OF_DATA: Final = "a comparison of data; give the value of the input that it comes from"


def _as_primitive(name: str) -> Rule:
    """Return the rule of an op that equals a JAX primitive of the same operands."""

    def rule(call: Call) -> Item:
        return primitive(
            call, name, *(call.item(operand) for operand in call.operands if call.has(operand))
        )

    return rule


def _extreme(name: str) -> Rule:
    """Return the rule of a maximum or minimum of any number of operands."""

    def rule(call: Call) -> Item:
        return primitive(call, name, *call.operands["values"])

    return rule


def _weighted(name: str) -> Rule:
    """Return the rule of a sum or difference whose second operand ATen scales by `alpha`."""

    def rule(call: Call) -> Item:
        # ATen's `add` and `sub` scale their second operand; ONNX's have no such factor.
        b = call.item("b")
        alpha = call.value("alpha", 1)
        if alpha != 1:
            if isinstance(b, Known):
                b = Known(b.array * alpha)
            else:
                b = call.scaled(call.as_ref(b), alpha)
        return primitive(call, name, call.item("a"), b)

    return rule


def _power(call: Call) -> Item:
    """Translate a power with a whole exponent, or a (reciprocal) square root."""
    # Roots have ops; small whole powers are products; the IR has no general power.
    x = call.ref("x")
    exponent = float(np.asarray(call.value("exponent")))
    if exponent in (0.5, -0.5):
        return primitive(call, "sqrt" if exponent > 0 else "rsqrt", x)
    if not exponent.is_integer() or not 0 < abs(exponent) <= 8:
        raise CannotMapError(f"a power of {exponent:g}")
    out = Array(call.dtype, (), 4)
    return mapped("integer_pow", call.emitter, {"y": exponent}, [x], [], out, integer=False)


def _square(call: Call) -> Item:
    x = call.ref("x")
    return primitive(call, "mul", x, x)


def _relu(call: Call) -> Ref:
    return call.op("relu", call.ref("x"))


def _reciprocal(call: Call) -> Item:
    return primitive(call, "div", Known.of(1.0), call.ref("x"))


def _gelu(call: Call) -> Ref:
    if call.value("approximate", "none") in ("tanh", b"tanh"):
        return call.op("gelu", call.ref("x"))
    return call.op("gelu", call.ref("x"), exact=True)


def _silu(call: Call) -> Ref:
    x = call.ref("x")
    return call.op("mul", x, call.op("sigmoid", x))


def _clip(call: Call) -> Item:
    """Translate a clip to one or two bounds."""
    # A clip is a maximum with the lower bound, then a minimum with the upper one.
    x: Item = call.ref("x")
    lower = call.value("min", None)
    upper = call.value("max", None)
    if lower is not None:
        x = primitive(call, "max", x, Known.of(lower, float))
    if upper is not None:
        x = primitive(call, "min", x, Known.of(upper, float))
    return x


def _identity(call: Call) -> Item:
    return call.item("x")


def _copied(call: Call) -> Item:
    """The value of the second operand, which replaces the first."""
    return call.item("source")


def _cast(call: Call) -> Item:
    """Cast to the stated element type; integers become int32, checks stay as they are."""
    x = call.item("x")
    if not isinstance(x, Ref):
        return x
    return call.emitter.cast(x, graph_dtype(call.attributes["to_dtype"]))


def _cast_like(call: Call) -> Item:
    """Cast to the element type of another operand."""
    x = call.item("x")
    target = call.item("target")
    if not isinstance(x, Ref):
        return x
    if isinstance(target, Known):
        dtype = graph_dtype(str(target.array.dtype))
    else:
        dtype = call.emitter.dtype(call.as_ref(target))
    return call.emitter.cast(x, dtype)


def _where(call: Call) -> Item:
    return _chosen(call, call.item("condition"), call.item("if_true"), call.item("if_false"))


def _masked_fill(call: Call) -> Item:
    return _chosen(call, call.item("mask"), call.item("value"), call.item("x"))


def _chosen(call: Call, condition: Item, if_true: Item, if_false: Item) -> Item:
    """The elements of one of two values, chosen by a condition."""
    # A choice by a mask that is known is arithmetic; by a guard of indices it is settled; by data
    # it cannot be written.
    if isinstance(condition, IndexCheck):
        return if_false if condition.kind == "negative" else if_true
    if not isinstance(condition, Known):
        raise CannotMapError(
            "a selection by data; give the value of the input that the mask comes from"
        )

    # JAX's `select_n` counts its cases from false to true.
    cases = promoted(call, (if_false, if_true))
    finite_cases = [call.finite(case) if isinstance(case, Known) else case for case in cases]
    dtypes = [call.emitter.dtype(case) for case in finite_cases if isinstance(case, Ref)]
    operands = [condition, *finite_cases]
    shape = np.broadcast_shapes(*(call.shape(operand) for operand in operands))
    out = Array(dtypes[0] if dtypes else call.dtype, shape, 4)
    return mapped("select_n", call.emitter, {}, operands, [out] * 3, out, integer=False)


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
"""Outcome of comparing an index with a negative number, and whether it is the same for 0: indices
are in range."""


def _compared(name: str) -> Rule:
    """Comparison of an index with a number; only equality is supported, because others would be
    choices by data."""

    def rule(call: Call) -> IndexCheck | Ref:
        x = call.item("x")
        bound = call.item("bound")
        kind, with_zero = _NEVER_BELOW_0[name]
        if not isinstance(x, Ref) or call.emitter.dtype(x) not in INTEGER_DTYPES:
            raise CannotMapError(_OF_DATA)
        if isinstance(bound, Known) and bound.array.size:
            largest = float(np.max(bound.array))
            if largest < 0 or (with_zero and largest == 0):
                return IndexCheck(kind)  # pyright: ignore[reportArgumentType]
            # Which tokens are padding: 0 and 1, from which models count positions.
            if name in ("eq", "ne") and bound.array.size == 1:
                unequal = call.op("unequal", x, value=int(largest))
                return unequal if name == "ne" else call.op("unequal", unequal, value=1)
        raise CannotMapError(_OF_DATA)

    return rule


def _never(call: Call) -> IndexCheck:
    """Tests for infinity and NaN, which are always false because masks are finite in programs."""
    return IndexCheck("negative")


def _not(call: Call) -> IndexCheck:
    x = call.item("x")
    if not isinstance(x, IndexCheck):
        raise CannotMapError(_OF_DATA)
    return IndexCheck("valid" if x.kind == "negative" else "negative")


def _logical_not(call: Call) -> IndexCheck | Ref:
    """Negation of a check, or of integers, where 0 is false and all others are true."""
    x = call.item("x")
    if isinstance(x, Ref) and call.emitter.dtype(x) in INTEGER_DTYPES:
        return call.op("unequal", call.op("unequal", x, value=0), value=1)
    return _not(call)


def _running_sum(call: Call) -> Ref:
    """Sums of integers along an axis, each up to its element."""
    x = call.ref("x")
    if (
        call.emitter.dtype(x) not in INTEGER_DTYPES
        or call.value("exclusive", 0)
        or call.value("reverse", 0)
    ):
        raise CannotMapError("a running sum of floats, or one that leaves its last element out")
    return call.op("running_sum", x, axis=call.axis(call.rank(x)))


def _logical(name: str) -> Rule:
    """Conjunction or disjunction of checks, and of known booleans."""
    # A false operand decides a conjunction, a true one a disjunction; a neutral one leaves the
    # other.
    if name == "and":
        neutral, decides = "valid", "negative"
    else:
        neutral, decides = "negative", "valid"

    def rule(call: Call) -> Item:
        items = [call.item("a"), call.item("b")]
        if any(isinstance(item, Ref) for item in items):
            raise CannotMapError(_OF_DATA)
        for item in items:
            if isinstance(item, IndexCheck) and item.kind == decides:
                return item
        for item in items:
            if not isinstance(item, IndexCheck):
                return item
        return IndexCheck(neutral)

    return rule


_OF_ONE_OPERAND: Final = {
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
_OF_TWO_OPERANDS: Final = {
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "mul.Tensor": "mul",
    "div.Tensor": "div",
    "mul_.Tensor": "mul",
    "div_.Tensor": "div",
    "maximum": "max",
    "minimum": "min",
}
"""JAX primitive by name of the op."""
_COMPARISONS_OF_ONNX: Final = {
    "Equal": "eq",
    "Less": "lt",
    "LessOrEqual": "le",
    "GreaterOrEqual": "ge",
    "Greater": "gt",
}


def _in_jax() -> dict[str, ForeignOp]:
    """Ops that equal a JAX primitive of the same operands."""
    ops = {}
    for name, jax_name in _OF_ONE_OPERAND.items():
        ops |= foreign_ops(f"{name}(x)", rule=_as_primitive(jax_name))
    for name, jax_name in _OF_TWO_OPERANDS.items():
        ops |= foreign_ops(f"{name}(a, b)", rule=_as_primitive(jax_name))
    return ops


def _comparisons() -> dict[str, ForeignOp]:
    """Comparisons of an index with a number."""
    ops = {}
    for name in _NEVER_BELOW_0:
        signatures = [f"{name}{overload}(x, bound)" for overload in ("", ".Scalar", ".Tensor")]
        ops |= foreign_ops(*signatures, rule=_compared(name))
    for onnx_name, name in _COMPARISONS_OF_ONNX.items():
        ops |= foreign_ops(f"{onnx_name}(x, bound)", rule=_compared(name))
    return ops


ELEMENTWISE: Final[Mapping[str, ForeignOp]] = MappingProxyType(
    {
        **_in_jax(),
        **foreign_ops("Max(*values)", rule=_extreme("max")),
        **foreign_ops("Min(*values)", rule=_extreme("min")),
        **foreign_ops("Relu(x)", "relu(x)", "relu_(x)", rule=_relu),
        **foreign_ops("add.Tensor(a, b, alpha)", "add_.Tensor(a, b, alpha)", rule=_weighted("add")),
        **foreign_ops("sub.Tensor(a, b, alpha)", rule=_weighted("sub")),
        **foreign_ops("Reciprocal(x)", "reciprocal(x)", rule=_reciprocal),
        **foreign_ops("Pow(x, exponent)", "pow.Tensor_Scalar(x, exponent)", rule=_power),
        **foreign_ops("square(x)", rule=_square),
        **foreign_ops("Gelu(x)", "gelu(x, approximate)", rule=_gelu),
        **foreign_ops("silu(x)", "Swish(x)", "silu_(x)", rule=_silu),
        **foreign_ops("Clip(x, min, max)", "clamp(x, min, max)", rule=_clip),
        **foreign_ops(
            "Identity(x)",
            "Dropout(x)",
            "clone(x)",
            "contiguous(x)",
            "detach(x)",
            "alias(x)",
            "dropout(x)",
            "lift_fresh_copy(x)",
            "detach_(x)",
            rule=_identity,
        ),
        **foreign_ops(
            "copy(x, source)", "copy_(x, source)", "fill.Tensor(x, source)", rule=_copied
        ),
        **foreign_ops("CastLike(x, target)", rule=_cast_like),
        **foreign_ops(
            "Cast(x)",
            "_to_copy(x)",
            "to.dtype(x)",
            "to.device(x)",
            "to.dtype_layout(x)",
            "type_as(x)",
            rule=_cast,
        ),
        **_comparisons(),
        **foreign_ops("IsNaN(x)", "IsInf(x)", "isnan(x)", "isinf(x)", rule=_never),
        **foreign_ops("Not(x)", "logical_not(x)", rule=_logical_not),
        **foreign_ops("bitwise_not(x)", rule=_not),
        **foreign_ops("CumSum(x, axis)", "cumsum(x, axis)", rule=_running_sum),
        **foreign_ops(
            "And(a, b)",
            "logical_and(a, b)",
            "__and__.Tensor(a, b)",
            "bitwise_and.Tensor(a, b)",
            rule=_logical("and"),
        ),
        **foreign_ops(
            "Or(a, b)",
            "logical_or(a, b)",
            "__or__.Tensor(a, b)",
            "bitwise_or.Tensor(a, b)",
            rule=_logical("or"),
        ),
        **foreign_ops(
            "Where(condition, if_true, if_false)",
            "where.self(condition, if_true, if_false)",
            "where.ScalarOther(condition, if_true, if_false)",
            "where.ScalarSelf(condition, if_true, if_false)",
            "where.Scalar(condition, if_true, if_false)",
            rule=_where,
        ),
        **foreign_ops(
            "masked_fill.Scalar(x, mask, value)",
            "masked_fill.Tensor(x, mask, value)",
            rule=_masked_fill,
        ),
    }
)
"""Ops by name."""
