"""Arithmetic, patterns and conditions of the shell; a condition is true, false or unknown."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

_COMPARES: Final[Mapping[str, Callable[[int, int], bool]]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_COMPARISONS: Final[Mapping[type, Callable[[int, int], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
}
_FILE_TESTS: Final = (
    "-a",
    "-b",
    "-c",
    "-d",
    "-e",
    "-f",
    "-h",
    "-L",
    "-p",
    "-r",
    "-s",
    "-S",
    "-w",
    "-x",
    "-t",
    "-O",
)
_LARGEST: Final = 2**63
"""Whole numbers of a shell have 64 bits."""


def _divide(a: int, b: int) -> int:
    """Quotient rounded towards zero, as in C."""
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _power(a: int, b: int) -> int:
    if not 0 <= b < 64:
        raise ValueError("beyond 64 bits")
    return a**b


def _shifted(a: int, b: int) -> int:
    if not 0 <= b < 64:
        raise ValueError("beyond 64 bits")
    return a << b


_BINARY: Final[Mapping[type, Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: _divide,
    ast.Mod: lambda a, b: a - b * _divide(a, b),
    ast.Pow: _power,
    ast.LShift: _shifted,
    ast.RShift: lambda a, b: a >> min(b, 64),
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: Final[Mapping[type, Callable[[int], int]]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: lambda a: int(not a),
    ast.Invert: operator.invert,
}


def calculate(text: str) -> int | None:
    """The value of a whole-number expression without variables; None if it is not one."""
    # Syntax of C that differs from Python is rewritten; the tree of Python's parser is then
    # evaluated node by node, so that nothing but arithmetic can run.
    condition = re.fullmatch(r"([^?]+)\?([^:?]+):(.+)", text.strip(), re.DOTALL)
    if condition:
        chosen = calculate(condition[1])
        if chosen is None:
            return None
        return calculate(condition[2] if chosen else condition[3])
    python = text.replace("&&", " and ").replace("||", " or ")
    python = re.sub(r"!(?!=)", " not ", python)
    # Numbers that begin with 0 are octal, and those with a base are written `16#ff`.
    python = re.sub(r"\b0(\d+)\b", r"0o\1", python)
    python = re.sub(r"\b(\d+)#(\w+)", _in_base, python)
    try:
        value = _value(ast.parse(" ".join(python.split()), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if abs(value) < _LARGEST else None


def _in_base(match: re.Match[str]) -> str:
    try:
        return str(int(match[2], int(match[1])))
    except ValueError:
        return "?"


def _value(node: ast.AST) -> int:
    """The value of an arithmetic expression."""
    # A shell calculates with 64-bit integers; all other expressions of Python are refused.
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        value = _BINARY[type(node.op)](_value(node.left), _value(node.right))
        if abs(value) >= _LARGEST:
            raise ValueError("beyond 64 bits")
        return value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        return int(_COMPARISONS[type(node.ops[0])](_value(node.left), _value(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [_value(operand) != 0 for operand in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError("no whole number")


def trimmed(value: str, mark: str, pattern: str) -> str:
    """Expand `${value#pattern}`, `##`, `%` or `%%`: remove the shortest or longest match at the
    start or end."""
    longest = len(mark) == 2
    # Both signs negate a class of characters in the shell.
    pattern = pattern.replace("[^", "[!")
    ends = range(len(value) + 1)
    if mark[0] == "#":
        # Patterns of the shell are not greedy or lazy by themselves: all lengths are tried, and the
        # sign chooses.
        matches = [end for end in ends if fnmatchcase(value[:end], pattern)]
        if not matches:
            return value
        end = max(matches) if longest else min(matches)
        return value[end:]
    matches = [start for start in ends if fnmatchcase(value[start:], pattern)]
    if not matches:
        return value
    start = min(matches) if longest else max(matches)
    return value[:start]


def replaced(value: str, pattern: str, replacement: str, *, everywhere: bool) -> str:
    """Expand `${value/pattern/replacement}`: replace the first match of a pattern, or all
    matches."""
    anchor = pattern[:1] if pattern[:1] in ("#", "%") else ""
    expression = _expression(pattern.removeprefix(anchor))
    if anchor:
        expression = f"^{expression}" if anchor == "#" else f"{expression}$"
    if not expression:
        return value
    # A function, as backslashes of a text would mean groups.
    return re.sub(expression, lambda match: replacement, value, count=0 if everywhere else 1)


_PART_OF_PATTERN: Final = re.compile(r"\*|\?|\[([!^]?)(\]?[^\]]*)\]|.", re.DOTALL)


def _expression(pattern: str) -> str:
    """A pattern of the shell as a regular expression."""

    def translated(match: re.Match[str]) -> str:
        if match[2]:
            characters = match[2].replace("\\", "\\\\").replace("^", "\\^").replace("[", "\\[")
            return f"[{'^' if match[1] else ''}{characters}]"
        return {"*": ".*", "?": "."}.get(match[0], re.escape(match[0]))

    return _PART_OF_PATTERN.sub(translated, pattern)


class Condition:
    """Evaluates `[ ... ]` and `[[ ... ]]` to True, False, or None if the script does not determine
    it."""

    def __init__(
        self,
        tokens: Sequence[str],
        *,
        double: bool,
        exists: Callable[[str], bool | None],
        is_set: Callable[[str], bool],
    ) -> None:
        self.tokens = list(tokens)
        self.double = double
        """Whether it is `[[`, in which the right side of `==` is a pattern."""
        self.exists = exists
        """Function that returns whether a file exists; None if unknown."""
        self.is_set = is_set
        """Function that returns whether a variable or an element of an array has a value."""
        self.matched: tuple[str, ...] | None = None
        """Match of the last `=~` and its groups, as in `BASH_REMATCH`; None without a match."""

    def value(self) -> bool | None:
        if not self.tokens:
            return False
        # Tokens that are left over mean an operator that is not known, and then the value is not
        # known either.
        value = self._either()
        return value if not self.tokens else None

    def _either(self) -> bool | None:
        value = self._conjunction()
        while self._take("||", "-o"):
            right = self._conjunction()
            # Three-valued logic: an unknown side decides only if the other one does not.
            if value or right:
                value = True
            elif None in (value, right):
                value = None
            else:
                value = False
        return value

    def _conjunction(self) -> bool | None:
        value = self._single_test()
        while self._take("&&", "-a"):
            right = self._single_test()
            if value is False or right is False:
                value = False
            elif None in (value, right):
                value = None
            else:
                value = True
        return value

    def _take(self, *operators: str) -> bool:
        if self.tokens and self.tokens[0] in operators:
            del self.tokens[0]
            return True
        return False

    def _single_test(self) -> bool | None:
        """Evaluate one of the tests that `-a` and `-o` join; None if it is not known."""
        # POSIX decides by the number of words: `[ ! = x ]` compares, though it begins with `!`.
        if len(self.tokens) >= 3 and self._is_binary(self.tokens[1]):
            lhs, sign, rhs = self.tokens[:3]
            del self.tokens[:3]
            return self._compared(lhs, sign, rhs)
        if self._take("!"):
            value = self._single_test()
            return None if value is None else not value
        if len(self.tokens) > 1 and self._take("("):
            value = self._either()
            self._take(")")
            return value
        if len(self.tokens) >= 2 and re.fullmatch(r"-[a-zA-Z]", self.tokens[0]):
            sign, operand = self.tokens[:2]
            del self.tokens[:2]
            return self._unary_test(sign, operand)
        if not self.tokens:
            return None
        word = self.tokens.pop(0)
        return None if unknown(word) else bool(word)

    @staticmethod
    def _is_binary(word: str) -> bool:
        return word in ("=", "==", "!=", "=~", "<", ">") or word in _COMPARES

    def _unary_test(self, sign: str, operand: str) -> bool | None:
        if sign in _FILE_TESTS:
            return self.exists(operand)
        if unknown(operand):
            return None
        if sign == "-v":
            return self.is_set(operand)
        if sign in ("-z", "-n"):
            return bool(operand) is (sign == "-n")
        return None

    def _compared(self, lhs: str, sign: str, rhs: str) -> bool | None:
        """Compare two operands by an operator of `test`; None if a side is not known."""
        if unknown(lhs) or unknown(rhs):
            return None
        if sign in _COMPARES:
            # In `[[`, arithmetic is evaluated; an empty side counts as 0.
            numbers = [calculate(side) if side.strip() else 0 for side in (lhs, rhs)]
            if numbers[0] is None or numbers[1] is None or (not self.double and "" in (lhs, rhs)):
                return None
            return _COMPARES[sign](numbers[0], numbers[1])
        if sign == "=~":
            try:
                match = re.search(rhs, lhs)
            except re.error:
                return None
            self.matched = () if match is None else (match[0], *match.groups(""))
            return match is not None
        if sign in ("<", ">"):
            return lhs < rhs if sign == "<" else lhs > rhs
        equal = fnmatchcase(lhs, rhs) if self.double else lhs == rhs
        return equal is (sign != "!=")


def unknown(text: Any) -> bool:
    """Whether a text contains parts that could not be expanded."""
    return "${" in text or "$(" in text
