"""Follows the statements of a Python script, with all branches of undecided conditions."""

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch._python_branches import Branch, Exit, Stopped, Write
from perfmodel.ingest.launch._python_calls import Calls
from perfmodel.ingest.launch._python_values import (
    MISSING,
    Choice,
    Class,
    Function,
    Scope,
    ScriptObject,
    Symbol,
    Unknown,
    elements_of,
    expression_text,
    is_same,
    parsed_module,
    truth,
)

MOST_STEPS: Final = 60_000
"""Most statements and expressions that are followed in one script."""
_MOST_ROUNDS: Final = 1_000
"""Most rounds of a `while` loop; longer ones wait for something."""
_MOST_CALLS: Final = 40
"""Most calls inside one another."""


class Follower(Calls):
    """Follows statements; values of expressions are those of `Calls`."""

    def __init__(
        self,
        place: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        fields_of: Callable[[str, list[Any], dict[str, Any]], Mapping[str, Any]],
        module_text: Callable[[str], str | None],
        result_of: Callable[[str], Any],
    ) -> None:
        super().__init__(place, arguments, variables, fields_of, result_of)
        self.module_text = module_text
        self.modules: dict[str, Scope | None] = {}
        self.journal: dict[tuple[int, Any], Write] | None = None
        self.depth = 0
        self.steps = 0
        self.was_called: set[int] = set()
        self.open_returns: list[list[Choice]] = []

    def guarded(self, run: Callable[[], Any]) -> Any:
        """Follow a part of the script. An error in it is reported as an error of the file."""
        try:
            return run()
        except Stopped as error:
            # Scripts also end regularly, by `sys.exit`.
            if str(error):
                message = f"the script stops here: {error}; give the arguments that it needs"
                raise broken(self.place, error.line, message) from None
            return None
        except RecursionError:
            raise broken(self.place, 0, "nested too deeply; this is not a launch file") from None

    # --- writes, which open branches undo
    # -----------------------------------------------------------

    def write(self, container: Any, key: Any, value: Any) -> None:
        """Put a value into names, attributes or a dictionary, `MISSING` to remove it; `key` None
        replaces a list."""
        if self.journal is not None:
            before = list(container) if key is None else container.get(key, MISSING)
            write = Write(container, key, before)
            self.journal.setdefault(write.slot, write)
        Write(container, key, None).put(value)

    @property
    def is_open(self) -> bool:
        return self.journal is not None

    def count_step(self, node: ast.AST) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            line = getattr(node, "lineno", 0)
            raise broken(
                self.place,
                line,
                "the script does too much to be followed; give --model, --layout and so on",
            )

    def _open(
        self, branches: Sequence[Callable[[], Exit | None]], condition: ast.AST | str, line: int
    ) -> Exit | None:
        """Follow each outcome of a condition that is not decided, and leave open what they do not
        agree on."""
        outcomes: list[Branch] = []
        for follow_branch in branches:
            branch = Branch()
            outer, self.journal = self.journal, branch.writes
            try:
                branch.exit = follow_branch()
            except Stopped as error:
                branch.stopped = error
            finally:
                self.journal = outer
            for slot, write in branch.writes.items():
                branch.after[slot] = write.now
                write.put(write.before)
            outcomes.append(branch)
        # A script that runs does not come to an error: then the other outcome is certain.
        running = [branch for branch in outcomes if branch.stopped is None]
        text = condition if isinstance(condition, str) else expression_text(condition)
        if not running and outcomes[0].stopped is not None:
            raise outcomes[0].stopped
        self._merge(running, text, line)
        exits = [branch.exit for branch in running]
        if all(exit is not None and exit.kind == "return" for exit in exits):
            values = tuple(exit.value for exit in exits if exit is not None)
            return Exit("return", self._either(values, text, line))
        for exit in exits:
            # The rest of the function is followed as if it had not returned here.
            if exit is not None and exit.kind == "return" and self.open_returns:
                self.open_returns[-1].append(Choice((exit.value,), text, line))
        return running[0].exit if len(running) == 1 else None

    def _merge(self, branches: Sequence[Branch], condition: str, line: int) -> None:
        writes: dict[tuple[int, Any], Write] = {}
        for branch in branches:
            writes |= branch.writes
        for slot, write in writes.items():
            values = tuple(branch.after.get(slot, write.before) for branch in branches)
            if write.key is None:
                # If a list differs in length between outcomes, the longer one is used.
                self.write(write.container, None, max(values, key=len))
            else:
                merged = self._either(values, condition, line)
                if merged is not MISSING:
                    self.write(write.container, write.key, merged)

    @staticmethod
    def _either(values: tuple[Any, ...], condition: str, line: int) -> Any:
        if all(is_same(value, values[0]) for value in values[1:]):
            return values[0]
        return Choice(values, condition, line)

    # --- statements
    # ---------------------------------------------------------------------------------

    def block(self, statements: Sequence[ast.stmt], scope: Scope) -> Exit | None:
        for statement in statements:
            ended = self._statement(statement, scope)
            if ended is not None:
                return ended
        return None

    def _statement(self, node: ast.stmt, scope: Scope) -> Exit | None:
        """Run one statement; returns how it leaves its block, None if it goes on."""
        self.count_step(node)
        match node:
            case ast.Expr():
                self.value(node.value, scope)
                self._end(node.value, scope)
            case ast.Assign():
                value = self.value(node.value, scope)
                for target in node.targets:
                    self.assign(target, value, scope)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, self.value(node.value, scope), scope)
            case ast.AugAssign():
                # `batch_size *= 2` is followed as `batch_size = batch_size * 2`.
                result = ast.copy_location(ast.BinOp(node.target, node.op, node.value), node)
                self.assign(node.target, self.value(result, scope), scope)
            case ast.If():
                return self._if(node, scope)
            case ast.For():
                return self._for(node, scope)
            case ast.While():
                return self._while(node, scope)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.write(scope.names, node.name, self.made_function(node, scope))
            case ast.ClassDef():
                self.write(scope.names, node.name, self.made_class(node, scope))
            case ast.Import() | ast.ImportFrom():
                self._import(node, scope)
            case ast.Return():
                return Exit("return", None if node.value is None else self.value(node.value, scope))
            case ast.Raise():
                raise Stopped(self._reason(node, scope), node.lineno)
            case ast.Break():
                return Exit("break")
            case ast.Continue():
                return Exit("continue")
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.value(item.context_expr, scope)
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, value, scope)
                return self.block(node.body, scope)
            case ast.Try():
                return self._try(node, scope)
            case ast.Match():
                return self._match(node, scope)
            case ast.Global() | ast.Nonlocal():
                scope.declare_outer(node.names, of_module=isinstance(node, ast.Global))
            case ast.Delete():
                for target in node.targets:
                    self.delete(target, scope)
            case _:
                pass
        return None

    def _reason(self, node: ast.Raise, scope: Scope) -> str:
        """The message of an error that a script raises."""
        if isinstance(node.exc, ast.Call) and node.exc.args:
            message = self.value(node.exc.args[0], scope)
            if isinstance(message, str):
                return message
        return expression_text(node)

    def _end(self, node: ast.expr, scope: Scope) -> None:
        """End the script at `sys.exit(...)`."""
        if isinstance(node, ast.Call) and self.value(node.func, scope) in _EXITS:
            raise Stopped("", node.lineno)

    def assign(self, target: ast.expr, value: Any, scope: Scope) -> None:
        """Assign a value to a name, an attribute, an element or a tuple of these."""
        match target:
            case ast.Name():
                self.write(scope.outer_names.get(target.id, scope).names, target.id, value)
            case ast.Attribute():
                owner = self.value(target.value, scope)
                for instance in _owners(owner):
                    self.write(instance.fields, target.attr, value)
                    instance.lines[target.attr] = target.lineno
                if isinstance(owner, Class):
                    self.write(owner.names, target.attr, value)
            case ast.Subscript():
                container = self.value(target.value, scope)
                key = self.value(target.slice, scope)
                if isinstance(container, dict) and isinstance(key, (str, int, tuple)):
                    self.write(container, key, value)
                elif (
                    isinstance(container, list)
                    and isinstance(key, int)
                    and -len(container) <= key < len(container)
                ):
                    changed = list(container)
                    changed[key] = value
                    self.write(container, None, changed)
            case ast.Tuple() | ast.List():
                self._unpack(target.elts, value, scope)
            case ast.Starred():
                self.assign(target.value, Unknown(expression_text(target)), scope)
            case _:
                pass

    def _unpack(self, targets: Sequence[ast.expr], value: Any, scope: Scope) -> None:
        values = elements_of(value)
        has_rest = any(isinstance(target, ast.Starred) for target in targets)
        for i, target in enumerate(targets):
            is_known = values is not None and len(values) == len(targets) and not has_rest
            self.assign(
                target,
                values[i] if is_known and values else Unknown(expression_text(target)),
                scope,
            )

    def _if(self, node: ast.If, scope: Scope) -> Exit | None:
        outcome = truth(self.value(node.test, scope))
        if outcome is not None:
            return self.block(node.body if outcome else node.orelse, scope)
        branches = [lambda: self.block(node.body, scope), lambda: self.block(node.orelse, scope)]
        return self._open(branches, node.test, node.lineno)

    def _for(self, node: ast.For, scope: Scope) -> Exit | None:
        """Run a loop: every turn over known values, otherwise one turn that may not happen."""
        values = elements_of(self.value(node.iter, scope))
        if values is None:

            def once() -> Exit | None:
                self.assign(node.target, Unknown(expression_text(node.target)), scope)
                return _within_loop(self.block(node.body, scope))

            return self._open(
                [once, lambda: None], f"for {expression_text(node.iter)}", node.lineno
            )
        for value in values:
            self.assign(node.target, value, scope)
            ended = self.block(node.body, scope)
            if ended is not None and ended.kind == "break":
                return None
            if ended is not None and ended.kind != "continue":
                return ended
        return self.block(node.orelse, scope)

    def _while(self, node: ast.While, scope: Scope) -> Exit | None:
        for _ in range(_MOST_ROUNDS):
            outcome = truth(self.value(node.test, scope))
            if outcome is False:
                return self.block(node.orelse, scope)
            if outcome is None:
                branches = [lambda: _within_loop(self.block(node.body, scope)), lambda: None]
                return self._open(branches, node.test, node.lineno)
            ended = self.block(node.body, scope)
            if ended is not None and ended.kind == "break":
                return None
            if ended is not None and ended.kind != "continue":
                return ended
        return None

    def _try(self, node: ast.Try, scope: Scope) -> Exit | None:
        try:
            ended = self.block(node.body, scope) or self.block(node.orelse, scope)
        except Stopped:
            if not node.handlers:
                raise
            ended = self.block(node.handlers[0].body, scope)
        return self.block(node.finalbody, scope) or ended

    def _match(self, node: ast.Match, scope: Scope) -> Exit | None:
        subject = self.value(node.subject, scope)
        branches: list[Callable[[], Exit | None]] = []
        for case in node.cases:
            fits = self.fits(case.pattern, subject, scope)
            if case.guard is not None and fits is not False:
                fits = None if fits is None else truth(self.value(case.guard, scope))
            if fits and not branches:
                return self.block(case.body, scope)
            if fits is not False:
                branches.append(lambda body=case.body: self.block(body, scope))
        return (
            self._open([*branches, lambda: None], node.subject, node.lineno) if branches else None
        )

    def _import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> None:
        """Define the names that an import brings in."""
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` names `a`.
                name = alias.asname or alias.name.partition(".")[0]
                full_name = alias.name if alias.asname else name
                self.write(scope.names, name, self._module_value(full_name) or Symbol(full_name))
            return
        module = "." * node.level + (node.module or "")
        inside = self._module(module)
        for alias in node.names:
            if alias.name == "*":
                for name, value in (inside.names if inside is not None else {}).items():
                    self.write(scope.names, name, value)
                continue
            value = inside.names.get(alias.name, MISSING) if inside is not None else MISSING
            if value is MISSING:
                full_name = f"{module}.{alias.name}" if node.module else f"{module}{alias.name}"
                value = self._module_value(full_name) or Symbol(full_name.lstrip("."))
            self.write(scope.names, alias.asname or alias.name, value)

    def _module_value(self, name: str) -> ScriptObject | None:
        """A module of the script's own as an object with its names; None for those from outside."""
        scope = self._module(name)
        return None if scope is None else ScriptObject("module", fields=scope.names)

    def _module(self, name: str) -> Scope | None:
        """Names of a module of the script's own; None for those from outside."""
        if name not in self.modules:
            self.modules[name] = None
            text = self.module_text(name)
            if text is not None:
                scope = Scope({"__name__": name})
                self.block(parsed_module(text, name).body, scope)
                self.modules[name] = scope
        return self.modules[name]

    # --- calls of the script's own functions
    # --------------------------------------------------------

    def call_function(
        self, function: Function, positional: Sequence[Any], keywords: Mapping[str, Any]
    ) -> Any:
        """The result of a function that a script defines."""
        node = function.node
        self.was_called.add(id(node))
        if self.depth >= _MOST_CALLS:
            return Unknown(f"{function.name}(...)")
        scope = Scope(self.bound(function, positional, keywords), function.scope)
        if isinstance(node, ast.Lambda):
            return self.value(node.body, scope)
        with self._deeper():
            ended = self.block(node.body, scope)
            opened = self.open_returns[-1]
        value = ended.value if ended is not None and ended.kind == "return" else None
        for early in reversed(opened):
            value = self._either((early.values[0], value), early.condition, early.line)
        return value

    def follow_handed(self, function: Function) -> None:
        """Follow a function that is passed to code outside the script, which may call it with
        anything."""
        if id(function.node) in self.was_called or self.depth >= _MOST_CALLS:
            return

        def called_once() -> None:
            self.call_function(function, [], {})

        self._open([called_once, lambda: None], function.name, 0)

    @contextmanager
    def _deeper(self) -> Iterator[None]:
        self.depth += 1
        self.open_returns.append([])
        try:
            yield
        finally:
            self.depth -= 1
            self.open_returns.pop()


_EXITS: Final = (Symbol("sys.exit"), Symbol("exit"), Symbol("quit"))


def _within_loop(ended: Exit | None) -> Exit | None:
    """Return how a loop ends by how one of its rounds ended: `break` and `continue` do not leave
    the code around it."""
    return None if ended is not None and ended.kind in ("break", "continue") else ended


def _owners(value: Any) -> list[ScriptObject]:
    """Objects whose attribute an assignment may set: several, if it depends on an undecided
    condition."""
    possible = value.values if isinstance(value, Choice) else (value,)
    return [owner for owner in possible if isinstance(owner, ScriptObject)]
