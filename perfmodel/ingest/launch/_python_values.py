"""Values of Python scripts that are followed without being executed, and operations on them.

A script that is followed may be a stranger's: every operation has a bound, so that no text, number
or list can fill the memory. An operation on anything but known plain data has an unknown value.
"""

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from perfmodel.ingest.launch._entries import broken

LARGEST: Final = 1e15
"""Largest accepted number; larger ones occur in no training run, and their products would fill the
memory."""
_HIGHEST_POWER: Final = 64
"""Highest accepted exponent; larger powers are not sizes and would fill the memory."""
MOST_ELEMENTS: Final = 10_000
"""Most elements of a list, characters of a text and rounds of a loop."""
_SHOWN: Final = 80
"""Most characters of an expression in a message."""


@dataclass(frozen=True)
class Symbol:
    """Something from outside the script: a module, a class or a function, by its full name."""

    path: str


@dataclass(frozen=True)
class Unknown:
    """A value that the script alone does not tell."""

    text: str
    """The expression that it comes from."""
    truth: bool | None = None
    """Whether it surely counts as true, as `asked() or True` does, or as false."""


@dataclass(frozen=True)
class Choice:
    """A value that depends on a condition which the script alone does not decide."""

    values: tuple[Any, ...]
    """A value for each outcome of the condition; `MISSING` where nothing is assigned."""
    condition: str
    line: int

    def doubt(self, subject: str, name: str, shown: Callable[[Any], object]) -> str:
        """The sentence that a setting may be wrong, because only its last value is read.

        Args:
            subject: the part of the prediction that depends on the setting.
            name: name of the setting.
            shown: how a value is shown.
        """
        texts = [str(shown(value)) for value in self.values]
        alternatives = " or ".join(dict.fromkeys(texts[:-1]))
        return (
            f"{subject} may be wrong: {name} is {alternatives} if {self.condition} (line {self.line}), which the "
            f"script alone does not decide; perfmodel assumes {texts[-1]}"
        )


@dataclass(eq=False)
class ScriptObject:
    """An object made by a call from outside the script, or a part of such an object."""

    maker: str
    """Full name of the called function or class; empty for a part that the script only changes."""
    positional: list[Any] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, and attributes that were assigned or read."""
    lines: dict[str, int] = field(default_factory=dict)
    """Lines of the fields, from 1."""
    line: int = 0
    elements: list[Any] = field(default_factory=list)
    """Values that were appended to it."""
    owner: "ScriptObject | None" = None
    """The object whose method made it, or that it is a part of."""
    label: str = ""
    """How the script comes to it, for messages."""

    def part(self, name: str) -> Any:
        """An attribute; a new part if nothing is known of it."""
        label = self.label or (f"{self.maker}(...)" if self.maker else "")
        return self.fields.setdefault(
            name, ScriptObject("", owner=self, label=f"{label}.{name}".strip("."))
        )

    @property
    def is_unknown(self) -> bool:
        """Whether it is a result of which nothing but its origin is known, and no object of a
        class."""
        return (
            not self.fields
            and not self.elements
            and not self.maker.rpartition(".")[2][:1].isupper()
        )

    @property
    def text(self) -> str:
        """Its origin, for messages."""
        return self.label or f"{self.maker}(...)"


@dataclass(eq=False)
class Scope:
    """Names of a module, function or comprehension."""

    names: dict[str, Any]
    parent: "Scope | None" = None
    outer_names: dict[str, "Scope"] = field(default_factory=dict)
    """Names that `global` or `nonlocal` declares, and whose they are."""

    def find(self, name: str) -> Any:
        """The value of a name here or further out; `MISSING` if it has none."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return MISSING

    def declare_outer(self, names: Iterable[str], *, of_module: bool) -> None:
        """Take names from further out: those of the module, or of the nearest function that has
        them."""
        for name in names:
            scope = self
            while scope.parent is not None and (
                of_module or scope is self or name not in scope.names
            ):
                scope = scope.parent
            self.outer_names[name] = scope


@dataclass(eq=False)
class Function:
    """A function of the script."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    owner: Any = None
    """The object of which it is a method."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values of its arguments, by their names."""

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "lambda")


@dataclass(eq=False)
class Class:
    """A class of the script."""

    name: str
    bases: list[Any]
    names: dict[str, Any]
    lines: dict[str, int]
    order: list[str]
    """Annotated attributes in their order, which a dataclass takes as positional arguments."""


@dataclass(eq=False)
class Method:
    """A method of plain data or of an outside object, before it is called."""

    owner: Any
    name: str


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING: Final = _Missing()
"""Stands for a value that was never assigned."""
PLAIN: Final = (int, float, str, bool, type(None))


def expression_text(node: ast.AST) -> str:
    """An expression on one line, shortened."""
    # A loop comes by the same expression many times, and writing it out costs more than following
    # it.
    text = getattr(node, "text_on_one_line", None)
    if text is None:
        text = " ".join(ast.unparse(node).split())
        text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        node.text_on_one_line = text  # pyright: ignore[reportAttributeAccessIssue]
    return text


def is_known(value: Any) -> bool:
    """Whether a value is plain data that may be compared and calculated with."""
    budget = MOST_ELEMENTS
    pending = [value]
    # Lists may share parts, so that walking a small file's list can take forever: hence the budget.
    while pending:
        budget -= 1
        inner = pending.pop()
        if budget < 0 or len(pending) > MOST_ELEMENTS:
            return False
        if isinstance(inner, (list, tuple, set)):
            pending.extend(inner)
        elif isinstance(inner, dict):
            pending.extend(inner.keys())
            pending.extend(inner.values())
        elif not isinstance(inner, (*PLAIN, range, Symbol)):
            return False
    return True


def is_same(left: Any, right: Any) -> bool:
    """Whether two values are surely the same."""
    if left is right:
        return True
    return is_known(left) and is_known(right) and type(left) is type(right) and left == right


def truth(value: Any) -> bool | None:
    """Whether a value counts as true; None if that is not known."""
    if isinstance(value, (Function, Class)):
        return True
    if isinstance(value, Unknown):
        return value.truth
    if isinstance(value, ScriptObject):
        # A made object is true; of a part of one nothing is known.
        return True if value.maker.rpartition(".")[2][:1].isupper() else None
    if isinstance(value, (list, tuple, dict, set, range, str)):
        return len(value) > 0
    return bool(value) if isinstance(value, PLAIN) else None


def parsed_module(text: str, place: str) -> ast.Module:
    """The syntax tree of a Python file, which is not executed.

    Raises:
        LaunchFileError: the text is not Python.
    """
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise broken(
            place, error.lineno or 0, f"not valid Python: {error.msg}; fix this line"
        ) from None
    except (RecursionError, ValueError, MemoryError):
        raise broken(
            place, 0, "not valid Python, or nested too deeply; this is not a launch file"
        ) from None


def elements_of(value: Any) -> list[Any] | None:
    """The elements that a loop over a value goes through; None if that is not known."""
    if isinstance(value, (list, tuple, set, dict, str, range)) and len(value) <= MOST_ELEMENTS:
        return list(value)
    return None


_OPERATORS: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def calculated(kind: ast.operator, left: Any, right: Any) -> Any:
    """A sum, product, quotient or power of plain data; `MISSING` if it is not known."""
    both = (left, right)
    if all(isinstance(side, (int, float)) for side in both):
        return calculated_number(kind, left, right)
    if isinstance(kind, ast.BitOr) and all(isinstance(side, dict) for side in both):
        return left | right
    # Texts and lists are joined, and repeated within bounds.
    if (
        isinstance(kind, ast.Add)
        and type(left) is type(right)
        and isinstance(left, (str, list, tuple))
    ):
        return left + right if len(left) + len(right) <= MOST_ELEMENTS else MISSING
    if isinstance(kind, ast.Mult):
        several, times = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(several, (str, list, tuple)) and isinstance(times, int):
            return several * times if 0 <= len(several) * times <= MOST_ELEMENTS else MISSING
    return MISSING


def calculated_number(
    kind: ast.operator, left: float, right: float, highest_power: int = _HIGHEST_POWER
) -> float | _Missing:
    """A sum, product, quotient or power of two numbers; `MISSING` if it is not known, or too large
    for any size."""
    calculate = _OPERATORS.get(type(kind))
    is_too_large = any(abs(side) >= LARGEST for side in (left, right))
    is_large_power = isinstance(kind, ast.Pow) and not 0 <= right <= highest_power
    if calculate is None or is_too_large or is_large_power:
        return MISSING
    return guarded(calculate, left, right)


_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], Any]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}


def compared(kind: ast.cmpop, left: Any, right: Any) -> bool | None:
    """The outcome of a comparison; None if it is not known."""
    # An object is never None.
    if (
        isinstance(kind, (ast.Is, ast.IsNot))
        and right is None
        and truth(left)
        and not isinstance(left, PLAIN)
    ):
        return isinstance(kind, ast.IsNot)
    if not (is_known(left) and is_known(right)):
        return None
    outcome = guarded(_COMPARISONS[type(kind)], left, right)
    return outcome if isinstance(outcome, bool) else None


def element(container: Any, key: Any) -> Any:
    """An element of a list or dictionary; `MISSING` if it is not known."""
    if isinstance(container, dict):
        return container.get(key, MISSING) if is_known(key) and is_hashable(key) else MISSING
    if isinstance(container, (list, tuple, str, range)) and isinstance(key, (int, slice)):
        return guarded(operator.getitem, container, key)
    return MISSING


def is_hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def guarded(calculate: Callable[..., Any], *operands: Any) -> Any:
    """The result of a calculation; `MISSING` if it fails."""
    try:
        return calculate(*operands)
    except (ArithmeticError, TypeError, ValueError, LookupError, RecursionError):
        return MISSING


def copied(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """A deep copy of plain data and objects of the script."""
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, ScriptObject):
        twin = ScriptObject(
            value.maker, line=value.line, lines=dict(value.lines), label=value.label
        )
        copies[id(value)] = twin
        twin.positional = copied(value.positional, copies)
        twin.fields = copied(value.fields, copies)
        twin.elements = copied(value.elements, copies)
        return twin
    if isinstance(value, dict):
        twin_dict: dict[Any, Any] = {}
        copies[id(value)] = twin_dict
        twin_dict |= {key: copied(inner, copies) for key, inner in value.items()}
        return twin_dict
    if isinstance(value, list):
        twin_list: list[Any] = []
        copies[id(value)] = twin_list
        twin_list += [copied(inner, copies) for inner in value]
        return twin_list
    return value


def instances_in(value: Any) -> Iterator[ScriptObject]:
    """Objects that a value is or directly holds."""
    if isinstance(value, ScriptObject):
        yield value
    elif isinstance(value, (list, tuple)):
        yield from (inner for inner in value if isinstance(inner, ScriptObject))
    elif isinstance(value, Choice):
        yield from (inner for inner in value.values if isinstance(inner, ScriptObject))
