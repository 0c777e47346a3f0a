"""What commands of shell scripts do: assignments, conditions, parameters and arithmetic."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from perfmodel.ingest.launch._entries import broken

ASSIGNMENT: Final = re.compile(r"^([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_PARAMETER: Final = re.compile(r"^([A-Za-z_]\w*|[0-9@*]+)(\[[@*0-9]+\])?(?:(:?[-=+?])(.*))?$", re.DOTALL)
_DECLARES: Final = ("export", "local", "declare", "readonly", "typeset")
_LOOPS: Final = {"for": "done", "while": "done", "until": "done", "case": "esac", "select": "done"}
_COMPARES: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip
_ARITHMETIC: Final[dict[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


@dataclass(frozen=True)
class Word:
    """A word of a command after expansion; what could not be expanded is in it as it was written."""

    text: str
    line: int


@dataclass
class State:
    where: str
    environment: Mapping[str, str]
    expanded: "Callable[[str, State, int], list[Word]]"
    """A default (`${NAME:-default}`), first met on a line, with the variables in it."""
    variables: dict[str, list[Word]] = field(default_factory=dict)
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)
    branches: list[tuple[bool | None, bool]] = field(default_factory=list)
    """Of every open `if`: whether this branch runs, and whether one of its branches has."""
    loops: list[str] = field(default_factory=list)
    """Words that close the loops and cases whose bodies are being left out."""
    last: bool | None = True
    """Success of the last command."""


def pieces(word: Word) -> list[Word]:
    """Words of a text, each with its line."""
    found = re.finditer(r"\S+", word.text)
    return [Word(piece[0], word.line + word.text.count("\n", 0, piece.start())) for piece in found]


def active(state: State) -> bool:
    """Whether what is read now runs: no branch that is not taken, no loop."""
    return not state.loops and all(taken for taken, _ in state.branches)


def run_command(state: State, words: list[Word], runs: bool) -> None:
    """Do what a command does to the state; commands that are programs are listed in it."""
    head = words[0].text
    if head in _LOOPS and not state.loops:
        state.notes.append(f"line {words[0].line}: the body of {head!r} is not followed")
    if head in _LOOPS:
        state.loops.append(_LOOPS[head])
        return
    if state.loops:
        if any(word.text == state.loops[-1] for word in words):
            state.loops.pop()
        return
    if head in ("then", "do", "{", "}", "function", "!", "time", "exec", "eval"):
        if words[1:]:
            run_command(state, words[1:], runs)
        return
    if head in ("if", "elif", "else", "fi"):
        _branch(state, head, words)
        return
    if not active(state) or not runs:
        return
    if head in ("[", "[["):
        state.last = _test(words[1:])
        return
    if head in _DECLARES:
        words = [word for word in words[1:] if not word.text.startswith("-")]
    while words and (match := ASSIGNMENT.match(words[0].text)):
        value = Word(words[0].text[match.end() :], words[0].line)
        before = state.variables.get(match[1], []) if match[2] else []
        state.variables[match[1]] = [Word("".join(word.text for word in (*before, value)), value.line)]
        words = words[1:]
    state.last = True
    if words and head not in _DECLARES:
        state.commands.append(tuple(_spread(words)))


def _spread(words: list[Word]) -> list[Word]:
    """Words, with those that hold a whole command (`bash -c "torchrun ..."`) taken apart."""
    found: list[Word] = []
    for word in words:
        found += pieces(word) if re.search(r"\s--", word.text) else [word]
    return found


def _branch(state: State, head: str, words: list[Word]) -> None:
    if head == "if":
        taken = _test(words[2:]) if len(words) > 1 and words[1].text in ("[", "[[") else None
        if taken is None and active(state):
            state.notes.append(f"line {words[0].line}: the condition cannot be judged; its branches are left out")
        state.branches.append((taken, taken is not False))
        return
    if not state.branches:
        raise broken(state.where, words[0].line, f"{head!r} without an 'if'; mend the script")
    _, done = state.branches.pop()
    if head == "fi":
        return
    taken = not done if head == "else" else not done and _test(words[2:])
    state.branches.append((taken, done or taken is not False))


def _test(words: list[Word]) -> bool | None:
    """Whether the condition of `[ ... ]` holds; None where that cannot be said."""
    parts = [word.text for word in words]
    while parts and parts[-1] in ("]", "]]"):
        parts.pop()
    if any("${" in part or "$(" in part for part in parts):
        # a variable that is not set is empty
        parts = ["" if re.fullmatch(r"\$\{\w+\}", part) else part for part in parts]
        if any("$" in part for part in parts):
            return None
    if parts and parts[0] == "!":
        inner = _test([Word(part, 0) for part in parts[1:]])
        return None if inner is None else not inner
    if len(parts) == 1:
        return bool(parts[0])
    if len(parts) == 2 and parts[0] in ("-z", "-n"):
        return bool(parts[1]) is (parts[0] == "-n")
    if len(parts) == 3 and parts[1] in ("=", "==", "!="):
        return (parts[0] == parts[2]) is (parts[1] != "!=")
    if len(parts) == 3 and parts[1] in _COMPARES and all(re.fullmatch(r"-?\d+", parts[i]) for i in (0, 2)):
        return _COMPARES[parts[1]](int(parts[0]), int(parts[2]))
    return None


def parameter(text: str, state: State, line: int) -> list[Word] | None:
    """What `${text}` stands for; None where nothing says."""
    if length := re.fullmatch(r"#([A-Za-z_]\w*)\[[@*]\]", text):
        return [Word(str(len(state.variables.get(length[1], []))), line)]
    match = _PARAMETER.match(text)
    if match is None:
        return None
    name, index, condition, other = match.groups()
    if name in ("@", "*"):
        return []
    value = state.variables.get(name)
    if value is None and name in state.environment:
        state.taken[name] = state.environment[name]
        value = [Word(state.environment[name], line)]
    if condition and condition[-1] == "+":
        return state.expanded(other, state, line) if value and any(word.text for word in value) else []
    if (value is None or ((condition or "").startswith(":") and not any(word.text for word in value))) and condition:
        if condition[-1] == "?":
            return None
        value = state.expanded(other, state, line)
        if condition[-1] == "=":
            state.variables[name] = value
    if value is None:
        return None
    if index and index[1:-1].isdecimal():
        return value[int(index[1:-1]) :][:1]
    return value if index else value[:1]


def arithmetic(text: str, state: State) -> int | None:
    """The value of `$((text))`; None where it is not of whole numbers."""

    def name(match: re.Match[str]) -> str:
        value = parameter(match[1] or match[2], state, 0)
        return value[0].text if value and re.fullmatch(r"-?\d+", value[0].text) else "?"

    plain = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?|\$\{([^}]*)\}", name, text)

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        raise ValueError("no whole number")

    try:
        return value(ast.parse(plain.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
        return None
