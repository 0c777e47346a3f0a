"""Calls in a Python script that is followed symbolically (`python_script`): of the script's own
functions and classes, of functions of Python's library that settings come from, and of foreign
ones, which are recorded."""

import ast
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.ingest.launch import _python_arguments as command_line
from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch._python_builtins import called, method_result
from perfmodel.ingest.launch._python_expressions import Expressions, bound_method
from perfmodel.ingest.launch._python_values import (
    MISSING,
    Class,
    Function,
    Method,
    Scope,
    ScriptObject,
    Symbol,
    Unknown,
    copied,
    element,
    elements_of,
    expression_text,
    instances_in,
    is_known,
)


@dataclass(frozen=True)
class Call:
    """A call of code from outside the script."""

    path: str
    """Full name of the called function; for a method, preceded by the name of the function that
    made its object."""
    made: Any
    instances: tuple[ScriptObject, ...]
    """Objects among its arguments; the object of a method is not one."""
    line: int
    text: str
    is_certain: bool
    """Whether it runs on every branch of undecided conditions."""


class Calls(Expressions):
    """Finds results of calls; the statements of functions are left to a subclass."""

    def __init__(
        self,
        place: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        fields_of: Callable[[str, list[Any], dict[str, Any]], Mapping[str, Any]],
        result_of: Callable[[str], Any],
    ) -> None:
        super().__init__(place, arguments, variables)
        self.fields_of = fields_of
        self.result_of = result_of
        self.calls: list[Call] = []
        self.options: dict[int, list[command_line.Option]] = {}
        """Declared arguments of parsers, by the parsers' identities."""
        self.usual: dict[int, dict[str, Any]] = {}
        """What `set_defaults` of these parsers says."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether a branch is followed whose condition is not decided."""

    @abstractmethod
    def block(self, statements: Sequence[ast.stmt], scope: Scope) -> object:
        """Run statements; returns how they leave their block, None if they run to its end."""

    @abstractmethod
    def follow_handed(self, function: Function) -> None:
        """Follow a function of the script that is passed to code outside it."""

    @abstractmethod
    def call_function(
        self, function: Function, positional: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Any:
        """The result of a function of the script."""

    def made_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope
    ) -> Function:
        """A function of the script, with the values of its defaults as they are where it is
        defined."""
        defaults: dict[str, Any] = {}
        positional = [*node.args.posonlyargs, *node.args.args]
        for argument, default in zip(
            reversed(positional), reversed(node.args.defaults), strict=False
        ):
            defaults[argument.arg] = self.value(default, scope)
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            if default is not None:
                defaults[argument.arg] = self.value(default, scope)
        return Function(node, scope, defaults=defaults)

    def bound(
        self, function: Function, positional: Sequence[Any], keywords: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Arguments of a function by their names."""
        arguments = function.node.args
        # A method gets its object as the first argument.
        if function.owner is not None:
            positional = [function.owner, *positional]
        names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
        values: dict[str, Any] = dict(zip(names, positional, strict=False))
        if arguments.vararg is not None:
            values[arguments.vararg.arg] = list(positional[len(names) :])
        known = {*names, *(argument.arg for argument in arguments.kwonlyargs)}
        values |= {name: value for name, value in keywords.items() if name in known}
        if arguments.kwarg is not None:
            values[arguments.kwarg.arg] = {
                name: value for name, value in keywords.items() if name not in known
            }
        for name in known:
            values.setdefault(name, function.defaults.get(name, Unknown(name)))
        return values

    def call_value(self, node: ast.Call, scope: Scope) -> Any:
        """The value of a call expression."""
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value, scope)
            function = self._method(owner, node.func.attr)
        else:
            function = self.value(node.func, scope)
        positional = self.elements(node.args, scope)
        keywords: dict[str, Any] = {}
        for word in node.keywords:
            value = self.value(word.value, scope)
            if word.arg is not None:
                keywords[word.arg] = value
            elif isinstance(value, dict):
                keywords |= {name: inner for name, inner in value.items() if isinstance(name, str)}
            else:
                keywords["**"] = Unknown(expression_text(word.value))
        return self.call(function, positional, keywords, node)

    def call(
        self, function: Any, positional: list[Any], keywords: dict[str, Any], node: ast.Call
    ) -> Any:
        """The result of a call."""
        match function:
            case Function():
                return self.call_function(function, positional, keywords)
            case Class():
                return self._instance(function, positional, keywords, node.lineno)
            case Method():
                return self._method_call(function, positional, keywords, node)
            case ScriptObject(maker="functools.partial"):
                stated = {name: value for name, value in function.fields.items() if name != "**"}
                return self.call(
                    function.positional[0],
                    function.positional[1:] + positional,
                    stated | keywords,
                    node,
                )
            case Symbol():
                return self._outside(function.path, positional, keywords, node)
            case _:
                if isinstance(function, ScriptObject):
                    path = function.maker
                else:
                    path = expression_text(node.func)
                made = ScriptObject(
                    f"{path}.__call__", positional, dict(keywords), line=node.lineno
                )
                self._record(made.maker, made, positional, keywords, node)
                return MISSING

    def _method(self, owner: Any, name: str) -> Any:
        """The function or record that `owner.name(...)` calls."""
        if isinstance(owner, ScriptObject):
            value = owner.fields.get(name, MISSING)
            is_own = isinstance(value, (Function, Class)) or (
                isinstance(value, ScriptObject) and bool(value.maker)
            )
            return bound_method(value, owner) if is_own else Method(owner, name)
        return self.attribute(owner, name)

    def _instance(
        self, made: Class, positional: list[Any], keywords: dict[str, Any], line: int
    ) -> Any:
        """An object of a class of the script; it is called as the class from outside that it
        extends."""
        base: Any = made
        while isinstance(base, Class):
            base = base.bases[0] if base.bases else Symbol(made.name)
        maker = base.path if isinstance(base, Symbol) else made.name
        instance = ScriptObject(maker, positional, dict(made.names), dict(made.lines), line)
        initialise = made.names.get("__init__")
        if isinstance(initialise, Function):
            method = Function(initialise.node, initialise.scope, instance, initialise.defaults)
            self.call_function(method, positional, keywords)
            return instance
        for name, value in (*zip(made.order, positional, strict=False), *keywords.items()):
            self.write(instance.fields, name, value)
            instance.lines[name] = line
        return instance

    def _method_call(
        self, method: Method, positional: list[Any], keywords: dict[str, Any], node: ast.Call
    ) -> Any:
        owner, name = method.owner, method.name
        if isinstance(owner, ScriptObject):
            return self._call_of_object(owner, name, positional, keywords, node)
        changed = self._changed(owner, name, positional, keywords)
        return method_result(owner, name, positional, keywords) if changed is MISSING else changed

    def _changed(
        self, owner: Any, name: str, positional: list[Any], keywords: dict[str, Any]
    ) -> Any:
        """The result of a method that changes a list or dictionary; `MISSING` for other methods."""
        if isinstance(owner, list):
            return self._list_changed(owner, name, positional)
        if isinstance(owner, dict) and name == "update":
            entries = positional[0] if positional and isinstance(positional[0], dict) else {}
            for key, value in (entries | keywords).items():
                self.write(owner, key, value)
            return None
        if (
            isinstance(owner, dict)
            and name in ("pop", "setdefault")
            and positional
            and is_known(positional[0])
        ):
            usual = positional[1] if len(positional) > 1 else None
            value = element(owner, positional[0])
            if name == "setdefault" and value is MISSING:
                self.write(owner, positional[0], usual)
            if name == "pop" and value is not MISSING:
                self.write(owner, positional[0], MISSING)
            return usual if value is MISSING else value
        return MISSING

    def _list_changed(self, owner: list[Any], name: str, positional: list[Any]) -> Any:
        """The result of a method that changes a list; `MISSING` for other methods."""
        changed = list(owner)
        result = None
        match name, positional:
            case "append", [value]:
                changed.append(value)
            case "extend", [values]:
                changed += elements_of(values) or []
            case "insert", [int(position), value]:
                changed.insert(position, value)
            case "pop", [] if owner:
                result = changed.pop()
            case "pop", [int(position)] if -len(owner) <= position < len(owner):
                result = changed.pop(position)
            case "remove", [value] if value in owner:
                changed.remove(value)
            case "clear", []:
                changed.clear()
            case "reverse", []:
                changed.reverse()
            case _:
                return MISSING
        self.write(owner, None, changed)
        return result

    def _call_of_object(
        self,
        owner: ScriptObject,
        name: str,
        positional: list[Any],
        keywords: dict[str, Any],
        node: ast.Call,
    ) -> Any:
        """The result of a method of an object from outside."""
        if owner.maker == command_line.PARSER:
            return self._parser_result(owner, name, positional, keywords, node)
        if name in ("append", "extend", "insert") and positional:
            added = elements_of(positional[0]) if name == "extend" else [positional[-1]]
            self.write(owner.elements, None, [*owner.elements, *(added or [])])
            return None
        if name in ("copy", "clone") and not positional:
            return copied(owner)
        made = ScriptObject(
            f"{owner.maker}.{name}", positional, dict(keywords), line=node.lineno, owner=owner
        )
        self._record(made.maker, made, positional, keywords, node)
        return made

    def _parser_result(
        self,
        parser: ScriptObject,
        name: str,
        positional: list[Any],
        keywords: dict[str, Any],
        node: ast.Call,
    ) -> Any:
        """The result of a method of an `argparse` parser."""
        if name in command_line.GROUPS:
            return parser
        options = self.options.setdefault(id(parser), [])
        if name == "add_argument":
            declared = command_line.option(positional, keywords)
            if declared is not None:
                options.append(declared)
            return None
        if name == "set_defaults":
            self.usual.setdefault(id(parser), {}).update(keywords)
            return None
        if name not in ("parse_args", "parse_known_args"):
            return MISSING
        argv = self.arguments
        if positional and isinstance(positional[0], list):
            argv = positional[0]

        def convert(kind: Any, word: str) -> Any:
            return self.call(kind, [word], {}, node)

        try:
            values, rest = command_line.parsed(options, [str(word) for word in argv], convert)
        except ValueError as error:
            raise broken(
                self.place, node.lineno, f"the script refuses its arguments: {error}"
            ) from None
        namespace = ScriptObject(
            command_line.NAMESPACE, [], values | self.usual.get(id(parser), {}), line=node.lineno
        )
        return namespace if name == "parse_args" else (namespace, rest)

    def _outside(
        self, path: str, positional: list[Any], keywords: dict[str, Any], node: ast.Call
    ) -> Any:
        """The result of a function or class from outside the script."""
        library_result = self._library_result(path, positional, keywords)
        if library_result is not None:
            return library_result.value
        for value in (called(path, positional, keywords), self.result_of(path)):
            if value is not MISSING:
                return value
        # Arguments that only set attributes are taken out of the keywords.
        attributes = self.fields_of(path, positional, keywords)
        made = ScriptObject(
            path, positional, dict(keywords), dict.fromkeys(keywords, node.lineno), node.lineno
        )
        for name, inner in attributes.items():
            *parts, last = name.split(".") if not isinstance(inner, tuple) else [name]
            owner = made
            for part in parts:
                owner = owner.part(part)
            if isinstance(owner, ScriptObject):
                owner.fields.setdefault(last, inner)
        self._record(path, made, positional, keywords, node)
        return made

    def _library_result(
        self, path: str, positional: list[Any], keywords: dict[str, Any]
    ) -> "_Result | None":
        """The result of a function of Python's library that settings come from; None for others."""
        if path in ("os.environ.get", "os.getenv") and positional:
            usual = positional[1] if len(positional) > 1 else keywords.get("default")
            return _Result(command_line.environment_variable(positional[0], self.variables, usual))
        if path in ("copy.deepcopy", "copy.copy", "deepcopy") and positional:
            return _Result(copied(positional[0]))
        if path == "dataclasses.replace" and positional and isinstance(positional[0], ScriptObject):
            twin = copied(positional[0])
            twin.fields |= keywords
            return _Result(twin)
        if path == "vars" and positional and isinstance(positional[0], ScriptObject):
            return _Result(positional[0].fields)
        if path == "getattr" and len(positional) > 1 and isinstance(positional[1], str):
            return _Result(self._got(positional))
        if path == "setattr" and len(positional) == 3 and isinstance(positional[1], str):
            if isinstance(positional[0], ScriptObject):
                self.write(positional[0].fields, positional[1], positional[2])
            return _Result(None)
        return None

    def _got(self, positional: list[Any]) -> Any:
        """Evaluate `getattr(owner, name, default)`."""
        owner, name = positional[0], positional[1]
        if isinstance(owner, ScriptObject) and name not in owner.fields and len(positional) > 2:
            return positional[2] if owner.maker == command_line.NAMESPACE else Unknown(name)
        return self.attribute(owner, name)

    def _record(
        self,
        path: str,
        made: Any,
        positional: list[Any],
        keywords: Mapping[str, Any],
        node: ast.Call,
    ) -> None:
        """Keep a call of code from outside with the objects that it gets."""
        instances: list[ScriptObject] = []
        for argument in (*positional, *keywords.values()):
            instances += instances_in(argument)
            if isinstance(argument, Function):
                self.follow_handed(argument)
        self.calls.append(
            Call(path, made, tuple(instances), node.lineno, expression_text(node), not self.is_open)
        )

    def made_class(self, node: ast.ClassDef, scope: Scope) -> Class:
        """The class that a `class` statement defines."""
        inner = Scope({}, scope)
        bases = [self.value(base, scope) for base in node.bases]
        order: list[str] = []
        lines: dict[str, int] = {}
        for base in bases:
            if isinstance(base, Class):
                inner.names |= base.names
                lines |= base.lines
                order += base.order
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if statement.target.id not in order:
                    order.append(statement.target.id)
                lines[statement.target.id] = statement.lineno
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                lines[statement.targets[0].id] = statement.lineno
        self.block(node.body, inner)
        return Class(node.name, bases, inner.names, lines, order)


@dataclass(frozen=True)
class _Result:
    """A result that may be any value."""

    value: Any
