"""Formulas over named quantities, as users write them for objectives and constraints."""

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.planning.layouts._intervals import Interval

Quantity = Callable[[str], Interval]
"""Value of a quantity by its name."""

_SIGNS: Final = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}
_OPERATORS: Final = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_WANTED: Final = "numbers, names, + - * / **, min(a, b) and max(a, b)"


@dataclass(frozen=True)
class Expression:
    """A formula that has been read and found harmless."""

    text: str
    tree: ast.expr = field(compare=False)
    """Of the text, which alone tells formulas apart: nodes are never equal."""

    @classmethod
    def parse(cls, text: str, names: Iterable[str]) -> "Expression":
        """Read arithmetic over some names: numbers, `+ - * / **` (constant power), `min` and `max`.

        Raises:
            PerfModelError: anything else; the message says what.
            UnknownNameError: a name that is none of `names`, with the nearest that is.
        """
        return cls(text.strip(), _checked(_parsed(text), text, tuple(names)))

    @property
    def names(self) -> frozenset[str]:
        """Quantities that the formula needs."""
        return frozenset(
            node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name) and node.id not in ("min", "max")
        )

    def __call__(self, quantity: Quantity) -> Interval:
        """Between which values the formula lies."""
        return _value(self.tree, quantity)


@dataclass(frozen=True)
class Constraint:
    """A comparison that layouts have to satisfy, such as `memory_bytes < 70e9`."""

    text: str
    left: Expression
    sign: str
    right: Expression

    @classmethod
    def parse(cls, text: str, names: Iterable[str]) -> "Constraint":
        """Read `formula SIGN formula` with one of `< <= > >= ==`.

        Raises:
            PerfModelError, UnknownNameError: as `Expression.parse`.
        """
        tree, known = _parsed(text), tuple(names)
        if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in _SIGNS:
            raise PerfModelError(
                f"constraint {text!r} is not one comparison; write it like 'step_time_s < 2' (signs: < <= > >= ==), "
                "and several as several constraints"
            )
        left, right = (_checked(side, text, known) for side in (tree.left, tree.comparators[0]))
        return cls(
            " ".join(text.split()),
            Expression(ast.unparse(left), left),
            _SIGNS[type(tree.ops[0])],
            Expression(ast.unparse(right), right),
        )

    @property
    def names(self) -> frozenset[str]:
        """Quantities that the comparison needs."""
        return self.left.names | self.right.names

    def __call__(self, quantity: Quantity) -> "Interval":
        """Left minus right side: below 0 where `<` holds."""
        return self.left(quantity) - self.right(quantity)

    def __str__(self) -> str:
        return self.text


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise PerfModelError(f"{text!r} cannot be read as a formula; it may have {_WANTED}") from None


def _checked(node: ast.expr, text: str, names: tuple[str, ...]) -> ast.expr:
    """The node, if it and all below it are of the language."""
    match node:
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
    raise PerfModelError(f"{ast.unparse(node)!r} in {text!r} is not understood; a formula may have {_WANTED}")


def _constant(node: ast.expr) -> float | None:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -float(value)
    return None


def _value(node: ast.expr, quantity: Quantity) -> Interval:
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
            a, b = _value(left, quantity), _value(right, quantity)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
            return a / b
        case ast.Call(func=ast.Name(id=name), args=arguments):
            first, *rest = (_value(argument, quantity) for argument in arguments)
            for other in rest:
                first = first.least(other) if name == "min" else first.most(other)
            return first
    raise AssertionError(ast.dump(node))  # `_checked` lets nothing else pass
