"""Values of expressions in a Python script that is followed symbolically (`python_script`)."""

import ast
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.ingest.launch import _python_arguments as command_line
from perfmodel.ingest.launch._python_builtins import formatted
from perfmodel.ingest.launch._python_values import (
    MISSING,
    PLAIN,
    Choice,
    Class,
    Function,
    Method,
    Scope,
    ScriptObject,
    Symbol,
    Unknown,
    calculated,
    compared,
    element,
    elements_of,
    expression_text,
    is_known,
    truth,
)


class Expressions(ABC):
    """Finds values of expressions; statements and calls of the script's functions are left to a
    subclass."""

    def __init__(
        self,
        place: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
    ) -> None:
        self.place = place
        self.arguments = arguments
        self.variables = variables

    @abstractmethod
    def count_step(self, node: ast.AST) -> None:
        """Refuse a script that does too much."""

    @abstractmethod
    def write(self, container: Any, key: Any, value: Any) -> None:
        """Put a value into names, attributes or a dictionary; `key` None replaces the content of a
        list."""

    @abstractmethod
    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        """Give a value to a name, an attribute or an element."""

    @abstractmethod
    def call_value(self, node: ast.Call, scope: Scope) -> Any:
        """The result of a call; `MISSING` if it is not known."""

    @abstractmethod
    def made_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope
    ) -> Function:
        """A function of the script."""

    # --- expressions
    # --------------------------------------------------------------------------------

    def value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression, or `Unknown`."""
        self.count_step(node)
        value = self._value(node, scope)
        return Unknown(expression_text(node)) if value is MISSING else value

    def _value(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an expression, by its kind of syntax."""
        match node:
            case ast.Constant():
                return node.value if isinstance(node.value, PLAIN) else MISSING
            case ast.Name():
                value = scope.find(node.id)
                return Symbol(node.id) if value is MISSING else value
            case ast.Attribute():
                return self.attribute(self.value(node.value, scope), node.attr)
            case ast.List() | ast.Tuple() | ast.Set():
                elements = self.elements(node.elts, scope)
                return tuple(elements) if isinstance(node, ast.Tuple) else elements
            case ast.Dict():
                return self._dictionary(node, scope)
            case ast.Subscript():
                return self._subscript(self.value(node.value, scope), self.value(node.slice, scope))
            case ast.Slice():
                bounds = [
                    part and self.value(part, scope) for part in (node.lower, node.upper, node.step)
                ]
                return slice(*bounds) if is_known(bounds) else MISSING
            case ast.Call():
                return self.call_value(node, scope)
            case ast.JoinedStr():
                return self._text(node, scope)
            case ast.NamedExpr():
                value = self.value(node.value, scope)
                self.assign(node.target, value, scope)
                return value
            case ast.Lambda():
                return self.made_function(node, scope)
            case ast.Starred():
                return self.value(node.value, scope)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehension(node, scope)
            case _:
                return self._operation(node, scope)

    def _operation(self, node: ast.expr, scope: Scope) -> Any:
        """The value of an operator's expression."""
        match node:
            case ast.BoolOp():
                return self._connected(node, scope)
            case ast.UnaryOp(op=ast.Not()):
                outcome = truth(self.value(node.operand, scope))
                return MISSING if outcome is None else not outcome
            case ast.UnaryOp(op=ast.USub()):
                operand = self.value(node.operand, scope)
                return -operand if isinstance(operand, (int, float)) else MISSING
            case ast.BinOp():
                return calculated(
                    node.op, self.value(node.left, scope), self.value(node.right, scope)
                )
            case ast.Compare():
                return self._compared(node, scope)
            case ast.IfExp():
                outcome = truth(self.value(node.test, scope))
                if outcome is None:
                    either = (self.value(node.body, scope), self.value(node.orelse, scope))
                    return Choice(either, expression_text(node.test), node.lineno)
                return self.value(node.body if outcome else node.orelse, scope)
            case _:
                return MISSING

    def _connected(self, node: ast.BoolOp, scope: Scope) -> Any:
        """Evaluate `a and b or c`, as far as the known operands decide it."""
        stops = isinstance(node.op, ast.Or)
        value: Any = MISSING
        is_undecided = False
        for part in node.values:
            value = self.value(part, scope)
            outcome = truth(value)
            if outcome is stops:
                # A later part may decide the truth of all, though not the value: `unknown or True`.
                return Unknown(expression_text(node), stops) if is_undecided else value
            is_undecided = is_undecided or outcome is None
        return MISSING if is_undecided else value

    def _compared(self, node: ast.Compare, scope: Scope) -> Any:
        left = self.value(node.left, scope)
        for kind, part in zip(node.ops, node.comparators, strict=True):
            right = self.value(part, scope)
            outcome = compared(kind, left, right)
            if outcome is not True:
                return MISSING if outcome is None else outcome
            left = right
        return True

    def elements(self, nodes: Sequence[ast.expr], scope: Scope) -> list[Any]:
        elements: list[Any] = []
        for node in nodes:
            value = self.value(node, scope)
            spread = elements_of(value) if isinstance(node, ast.Starred) else None
            if spread is None:
                elements.append(value)
            else:
                elements += spread
        return elements

    def _dictionary(self, node: ast.Dict, scope: Scope) -> Any:
        entries: dict[Any, Any] = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            value = self.value(value_node, scope)
            if key_node is None:
                # `{**other}`: without the other's keys nothing is known of the whole.
                if not isinstance(value, dict):
                    return MISSING
                entries |= value
                continue
            key = self.value(key_node, scope)
            if isinstance(key, (*PLAIN, Symbol)) or (isinstance(key, tuple) and is_known(key)):
                entries[key] = value
        return entries

    def _text(self, node: ast.JoinedStr, scope: Scope) -> Any:
        texts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                texts.append(str(part.value))
                continue
            if not isinstance(part, ast.FormattedValue):
                return MISSING
            if isinstance(part.format_spec, ast.JoinedStr):
                specification = self._text(part.format_spec, scope)
            else:
                specification = ""
            text = formatted(
                self.value(part.value, scope),
                specification if specification is not MISSING else "?",
            )
            if text is None:
                return MISSING
            texts.append(text)
        return "".join(texts)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, scope: Scope
    ) -> Any:
        inner = Scope({}, scope)
        results: list[Any] = []
        if not self._collect(node, node.generators, inner, results):
            return MISSING
        return dict(results) if isinstance(node, ast.DictComp) else results

    def _collect(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        loops: Sequence[ast.comprehension],
        scope: Scope,
        results: list[Any],
    ) -> bool:
        """Append the elements of a comprehension; False if a loop or condition is not known."""
        if not loops:
            if not isinstance(node, ast.DictComp):
                results.append(self.value(node.elt, scope))
                return True
            key = self.value(node.key, scope)
            results.append((key, self.value(node.value, scope)))
            return isinstance(key, PLAIN)
        values = elements_of(self.value(loops[0].iter, scope))
        for value in values or []:
            self.assign(loops[0].target, value, scope)
            outcomes = [truth(self.value(test, scope)) for test in loops[0].ifs]
            if None in outcomes:
                return False
            if all(outcomes) and not self._collect(node, loops[1:], scope, results):
                return False
        return values is not None

    def delete(self, target: ast.expr, scope: Scope) -> None:
        """Take away a name, an attribute or an element."""
        match target:
            case ast.Name():
                self.write(scope.outer_names.get(target.id, scope).names, target.id, MISSING)
            case ast.Attribute():
                owner = self.value(target.value, scope)
                if isinstance(owner, ScriptObject):
                    self.write(owner.fields, target.attr, MISSING)
            case ast.Subscript():
                container = self.value(target.value, scope)
                key = self.value(target.slice, scope)
                if isinstance(container, dict) and is_known(key):
                    self.write(container, key, MISSING)
                elif (
                    isinstance(container, list)
                    and isinstance(key, int)
                    and element(container, key) is not MISSING
                ):
                    position = key % len(container)
                    self.write(container, None, [*container[:position], *container[position + 1 :]])
            case _:
                pass

    # --- attributes and elements
    # --------------------------------------------------------------------

    def attribute(self, owner: Any, name: str) -> Any:
        """The value of `owner.name`."""
        match owner:
            case Symbol():
                return Symbol(f"{owner.path}.{name}")
            case ScriptObject() if name == "__dict__":
                return owner.fields
            case ScriptObject():
                value = owner.part(name)
                return bound_method(value, owner)
            case Class():
                return owner.names.get(name, MISSING)
            case Choice():
                attributes = [
                    MISSING if value is MISSING else self.attribute(value, name)
                    for value in owner.values
                ]
                return Choice(tuple(attributes), owner.condition, owner.line)
            case Unknown():
                return Unknown(f"{owner.text}.{name}")
            case _:
                return Method(owner, name)

    def _subscript(self, owner: Any, key: Any) -> Any:
        if owner == Symbol("os.environ"):
            return command_line.environment_variable(key, self.variables, MISSING)
        if owner == Symbol("sys.argv") and isinstance(key, int):
            return element([self.place, *self.arguments], key)
        # Annotations such as `list[int]`, and classes behind a subscript, keep their name.
        return owner if isinstance(owner, Symbol) else element(owner, key)

    def fits(self, pattern: ast.pattern, subject: Any, scope: Scope) -> bool | None:
        """Whether a value matches the pattern of a `case`; None if that is not known."""
        match pattern:
            case ast.MatchValue():
                return compared(ast.Eq(), subject, self.value(pattern.value, scope))
            case ast.MatchSingleton():
                return compared(ast.Is(), subject, pattern.value)
            case ast.MatchOr():
                outcomes = [self.fits(inner, subject, scope) for inner in pattern.patterns]
                if True in outcomes:
                    return True
                return None if None in outcomes else False
            case ast.MatchAs(pattern=None):
                if pattern.name is not None:
                    self.write(scope.names, pattern.name, subject)
                return True
            case _:
                return None


def bound_method(value: Any, owner: ScriptObject) -> Any:
    """A function of an object's class as its method."""
    if isinstance(value, Function) and value.owner is None and value.scope.parent is not None:
        return Function(value.node, value.scope, owner, value.defaults)
    return value
