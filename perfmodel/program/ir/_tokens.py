"""The text form cut into tokens."""

import re
from typing import NamedTuple

from perfmodel.errors import PerfModelError

_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r]+|//[^\n]*)|(?P<newline>\n)|(?P<value>%[\w.'~-]+)|(?P<function>@(?=[A-Za-z_])[\w.]+)
    |(?P<number>-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|inf|nan)(?![\w]))|(?P<word>[A-Za-z_]\w*)|(?P<string>"[^"\n]*")
    |(?P<mark>[(){}\[\],:=|@])""",
    re.VERBOSE,
)


class Token(NamedTuple):
    """A piece of text of one kind: value, function, number, word, string, mark or end."""

    kind: str
    text: str
    line: int


def tokens(text: str) -> list[Token]:
    """All tokens, closed by one of kind `end`; comments (`//`) are skipped.

    Raises:
        PerfModelError: a character that starts no token.
    """
    found: list[Token] = []
    at, line = 0, 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise PerfModelError(f"program text, line {line}: {text[at]!r} means nothing here")
        kind = str(match.lastgroup)
        if kind == "newline":
            line += 1
        elif kind != "skip":
            found.append(Token(kind, match.group(), line))
        at = match.end()
    found.append(Token("end", "", line))
    return found
