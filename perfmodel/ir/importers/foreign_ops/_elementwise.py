"""Element-wise ops of ONNX and ATen, and those that pass a value on."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref
from perfmodel.ir.importers._graph import Array
from perfmodel.ir.importers._program_rules import mapped
from perfmodel.ir.importers.foreign_ops._call import LOWEST, Call, Rule, primitive, spelled


def _like(name: str) -> Rule:
    """As the JAX primitive that takes the same operands."""

    def rule(c: Call) -> Item:
        items = [c.item(k) for k in range(len(c.args)) if c.args[k] is not None]
        return primitive(c, name, *items)

    return rule


def _weighted(name: str) -> Rule:
    """a + alpha b."""

    def rule(c: Call) -> Item:
        b, alpha = c.item(1), c.value("alpha", 2, 1)
        if alpha != 1:
            b = Known(b.array * alpha) if isinstance(b, Known) else c.scaled(c.as_ref(b), alpha)
        return primitive(c, name, c.item(0), b)

    return rule


def _power(c: Call) -> Item:
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
    x: Item = c.ref(0)
    for name, position, primitive_name in (("min", 1, "max"), ("max", 2, "min")):
        bound = c.value(name, position, None)
        if bound is not None:
            x = primitive(c, primitive_name, x, Known.of(bound, float))
    return x


def _same(c: Call) -> Item:
    """Casts too: types are settled on entry, one element type of floats, integers as int32."""
    return c.item(0)


def _where(c: Call, condition: int = 0, yes: int = 1, no: int = 2) -> Item:
    which = c.item(condition)
    if not isinstance(which, Known):
        raise CannotMapError("a choice by data; give the value of the input that the mask comes from")
    cases = [_finite(c, c.item(k)) for k in (no, yes)]
    out = Array(c.dtype, np.broadcast_shapes(*(c.shape(i) for i in (which, *cases))), 4)
    return mapped("select_n", c.d, {}, [which, *cases], [out] * 3, out, integer=False)


def _finite(c: Call, item: Item) -> Item:
    return Known(np.clip(item.array, LOWEST[c.dtype], None)) if isinstance(item, Known) else item


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
        **spelled("Cast", "CastLike", "_to_copy", "to.dtype", "to.device", "to.dtype_layout", "type_as", rule=_same),
        **spelled("Where", "where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar", rule=_where),
        **spelled("masked_fill.Scalar", "masked_fill.Tensor", rule=lambda c: _where(c, 1, 2, 0)),
    }
)
"""Rules by name of the op."""
