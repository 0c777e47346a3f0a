"""Formulas over named quantities for objectives and constraints, evaluated on intervals."""

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.display import shorten_reprs
from perfmodel.errors import PerfModelError, UnknownNameError, plain_text


@dataclass(frozen=True, eq=False)
class Interval:
    """All values between two ends, which may be infinite; element by element.

    The interval that an operation returns contains its result for all values inside the operands
    (Moore, Interval Analysis, 1966, fundamental theorem). Bounds of any formula are therefore
    sound.
    """

    lo: Float[np.ndarray, "*shape"]
    hi: Float[np.ndarray, "*shape"]

    @classmethod
    def exactly(cls, value: Float[np.ndarray, "*shape"] | float) -> "Interval":
        """The interval of a single value."""
        array = np.asarray(value, float)
        return cls(array, array)

    def __neg__(self) -> "Interval":
        return Interval(-self.hi, -self.lo)

    def __add__(self, right: "Interval") -> "Interval":
        return Interval(self.lo + right.lo, self.hi + right.hi)

    def __sub__(self, right: "Interval") -> "Interval":
        return self + (-right)

    def __mul__(self, right: "Interval") -> "Interval":
        # The extremes of a product lie at the ends of both factors.
        products = [_times(a, b) for a, b in product((self.lo, self.hi), (right.lo, right.hi))]
        ends = np.broadcast_arrays(*products)
        return Interval(np.minimum.reduce(ends), np.maximum.reduce(ends))

    def __truediv__(self, right: "Interval") -> "Interval":
        """Divide by another interval."""
        # The quotient by an interval that holds 0 may be anything.
        holds_zero = (right.lo <= 0) & (right.hi >= 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = self * Interval(1 / right.hi, 1 / right.lo)
        return Interval(
            np.where(holds_zero, -np.inf, quotient.lo),
            np.where(holds_zero, np.inf, quotient.hi),
        )

    def __pow__(self, power: float) -> "Interval":
        """Raise to a constant power; fractional powers need values of at least 0."""
        if power != int(power):
            return _monotone(np.maximum(self.lo, 0.0), np.maximum(self.hi, 0.0), lambda x: x**power)
        if power < 0:
            return Interval.exactly(1.0) / self**-power
        ends = _monotone(self.lo, self.hi, lambda x: x**power)

        # An even power of an interval about 0 has its least value at 0, not at an end.
        spans_zero = (self.lo < 0) & (self.hi > 0) & (power % 2 == 0) & (power > 0)
        return Interval(np.where(spans_zero, 0.0, ends.lo), ends.hi)

    def minimum(self, right: "Interval") -> "Interval":
        """The elementwise minimum of two intervals."""
        return Interval(np.minimum(self.lo, right.lo), np.minimum(self.hi, right.hi))

    def maximum(self, right: "Interval") -> "Interval":
        """The elementwise maximum of two intervals."""
        return Interval(np.maximum(self.lo, right.lo), np.maximum(self.hi, right.hi))

    def can_be(self, sign: str, right: "Interval") -> Bool[np.ndarray, "*shape"]:
        """Whether a comparison (`<`, `<=`, `>`, `>=`, `==`) holds for some of the values."""
        # a > b is b < a.
        if sign in (">", ">="):
            return right.can_be(sign.replace(">", "<"), self)
        if sign == "==":
            return (self.lo <= right.hi) & (right.lo <= self.hi)
        return self.lo < right.hi if sign == "<" else self.lo <= right.hi


Quantity = Callable[[str], Interval]
"""A function that gives the value of a quantity by its name."""

_SIGNS: Final = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}
_OPERATORS: Final = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_WANTED: Final = "numbers, names, + - * / **, min(a, b) and max(a, b)"


@dataclass(frozen=True)
class Expression:
    """A parsed formula that is safe to evaluate."""

    text: str
    tree: ast.expr = field(compare=False)
    """Parsed text. Formulas are compared by their text, because nodes are never equal."""

    @classmethod
    def parse(cls, text: str, names: Iterable[str]) -> "Expression":
        """Parse arithmetic over names and numbers: `+ - * / **` (constant power), `min`, `max`.

        Raises:
            PerfModelError: anything else; the message says what.
            UnknownNameError: a name that is none of `names`, with the nearest that is.
        """
        return cls(text.strip(), _checked(_parsed(text), text, tuple(names)))

    @property
    def names(self) -> frozenset[str]:
        """Quantities that the formula needs."""
        return frozenset(
            node.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name) and node.id not in ("min", "max")
        )

    def __call__(self, quantity: Quantity) -> Interval:
        """The interval that the formula's value lies in."""
        return _value(self.tree, quantity)


@dataclass(frozen=True)
class Constraint:
    """A comparison that layouts have to satisfy, such as `memory_bytes < 70e9`."""

    text: str
    lhs: Expression
    sign: str
    rhs: Expression

    @classmethod
    def parse(cls, text: str, names: Iterable[str]) -> "Constraint":
        """Read `formula SIGN formula` with one of `< <= > >= ==`.

        Raises:
            PerfModelError, UnknownNameError: as `Expression.parse`.
        """
        # Python's own parser reads formulas and constraints. `_checked` then lets pass only the
        # nodes of our small language, so that nothing is ever evaluated by Python.
        tree = _parsed(text)
        known = tuple(names)
        if (
            not isinstance(tree, ast.Compare)
            or len(tree.ops) != 1
            or type(tree.ops[0]) not in _SIGNS
        ):
            raise PerfModelError(
                f"constraint {text!r} is not a single comparison; write 'step_time_s < 2' (signs: < <= > >= ==), "
                "and give several constraints separately"
            )
        lhs = _checked(tree.left, text, known)
        rhs = _checked(tree.comparators[0], text, known)
        return cls(
            " ".join(text.split()),
            Expression(ast.unparse(lhs), lhs),
            _SIGNS[type(tree.ops[0])],
            Expression(ast.unparse(rhs), rhs),
        )

    @property
    def names(self) -> frozenset[str]:
        """Quantities that the comparison needs."""
        return self.lhs.names | self.rhs.names

    def __str__(self) -> str:
        return plain_text(self.text)


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise PerfModelError(f"{text!r} is not a valid formula; it may have {_WANTED}") from None


def _checked(node: ast.expr, text: str, names: tuple[str, ...]) -> ast.expr:
    """Return the node after checking that it and all nodes below it belong to the language."""
    match node:
        # `bool` is an `int` in Python and would pass as a number below.
        case ast.Constant(value=bool()):
            pass
        case ast.Constant(value=int() | float()):
            return node
        case ast.Name(id=name):
            if name not in names:
                raise UnknownNameError(f"quantity in {text!r}:", name, names)
            return node
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=inner):
            _checked(inner, text, names)
            return node
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            if _constant(right) is not None:
                _checked(left, text, names)
                return node
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            _checked(left, text, names)
            _checked(right, text, names)
            return node
        case ast.Call(func=ast.Name(id="min" | "max"), args=[_, _, *_] as arguments, keywords=[]):
            for argument in arguments:
                _checked(argument, text, names)
            return node
    raise PerfModelError(
        f"{ast.unparse(node)!r} in {text!r} is not allowed; a formula may have {_WANTED}"
    )


def _constant(node: ast.expr) -> float | None:
    """The number that a node stands for; None if it is not a number."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -float(value)
    return None


def _value(node: ast.expr, quantity: Quantity) -> Interval:
    """Evaluate a checked formula by interval arithmetic, on the quantities' intervals."""
    # Interval arithmetic: bounds of quantities become bounds of the formula, by which a search may
    # leave layouts out.
    match node:
        case ast.Constant(value=int() | float() as value):
            return Interval.exactly(float(value))
        case ast.Name(id=name):
            return quantity(name)
        case ast.UnaryOp(op=op, operand=inner):
            return -_value(inner, quantity) if isinstance(op, ast.USub) else _value(inner, quantity)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _value(left, quantity) ** (_constant(right) or 0.0)
        case ast.BinOp(left=left, op=op, right=right):
            a = _value(left, quantity)
            b = _value(right, quantity)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
            return a / b
        case ast.Call(func=ast.Name(id=name), args=arguments):
            first, *further = (_value(argument, quantity) for argument in arguments)
            for argument in further:
                first = first.minimum(argument) if name == "min" else first.maximum(argument)
            return first
    raise AssertionError(ast.dump(node))  # `_checked` lets nothing else pass


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of two ends of intervals, where 0 times infinity is 0."""
    with np.errstate(invalid="ignore"):
        # 0 times infinity is NaN in floating point. Here an infinite end stands for arbitrarily
        # large finite values, whose product with 0 is 0.
        return np.where((a == 0) | (b == 0), 0.0, a * b)


def _monotone(
    lo: np.ndarray, hi: np.ndarray, function: Callable[[np.ndarray], np.ndarray]
) -> Interval:
    with np.errstate(divide="ignore", over="ignore"):
        ends = function(lo), function(hi)
    return Interval(np.minimum(*ends), np.maximum(*ends))


shorten_reprs(__name__)
