"""Words of shell scripts: quotes, variables and outputs of commands in one word, read character by
character.

A word is not expanded here: it becomes a `RawWord`, a sequence of parts that are text, a parameter
(`$NAME`), arithmetic (`$((...))`) or the output of a command (`$(...)`).
"""

import re
from typing import Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch.shell._tree import JOINED, Part, RawWord, lines_in

NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
"""Name of a variable, or of a special parameter (`$1`, `$@`)."""
_PLAIN: Final = re.compile(r"[^\s;&|()<>\\'\"$`]+")
"""Characters that mean themselves outside quotes."""
_PLAIN_QUOTED: Final = re.compile(r"[^\"$`\\]+")
"""Characters that mean themselves inside double quotes."""
_QUOTED: Final = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_HERE: Final = re.compile(
    r"(?<!<)<<(?!<)-?[ \t]*\\?(['\"]?)([A-Za-z_]\w*)\1[^\n]*\n(?:.*?\n)??[ \t]*\2(?=[ \t]*(?:\n|\Z))",
    re.DOTALL,
)
"""A here-document, from the mark before its end word to this word on a line of its own."""


def parse_word(text: str, place: str, line: int, *, quoted: bool) -> RawWord:
    """A text as one word, including its blanks: the default of a parameter, the text of a
    here-document."""
    parser = WordParser(text, place, line)
    parser.in_text(quoted)
    return RawWord(tuple(parser.parts), line)


_ESCAPED: Final = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_SIGNS: Final = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"'}
"""Signs behind a backslash in `$'...'`; others, such as numbers of characters, stay as they are
written."""


class WordParser:
    """A position in a text, and the words that begin there."""

    def __init__(self, text: str, place: str, line: int, *, counts: bool = True) -> None:
        self.text = text
        self.place = place
        self.only_line = None if counts else line
        self.line = line
        self.at = 0
        self.parts: list[Part] = []
        """Parts of the word that is being read."""

    @property
    def line(self) -> int:
        """The line that is being read."""
        return self.counted_line if self.only_line is None else self.only_line

    @line.setter
    def line(self, line: int) -> None:
        self.counted_line = line

    def char(self) -> str:
        return self.text[self.at : self.at + 1]

    def blanks(self) -> None:
        """Skip blanks, continued lines and comments, up to a word, an operator or the end of a
        line."""
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at):
                self.at, self.line = self.at + 2, self.line + 1
            elif self.char() == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif self.char() != "\n" and self.char().isspace():
                self.line += self.char() == JOINED
                self.at += 1
            else:
                return

    def word(self, *, empty: bool = False) -> RawWord:
        """The word that begins here: everything up to a blank or an operator outside quotes."""
        # A word may begin inside another, in the default of a parameter: the outer one waits.
        outer, self.parts = self.parts, []
        line = self.line
        while self.at < len(self.text):
            char = self.char()
            if (
                char.isspace()
                or char in ";&|)"
                or (char in "<>" and not self.text.startswith("(", self.at + 1))
            ):
                break
            if char == "(" and not self.parts:
                # No word of shell begins so; lists of arguments have such values, as in
                # `--moe-layer-freq ([1]*4)`.
                self.literal(self.enclosed("(", ")"))
            elif char == "(":
                # `name()` defines a function; other brackets inside a word belong to it, as in a
                # list of layers.
                if re.compile(r"\(\s*\)").match(self.text, self.at):
                    break
                self.literal(self.enclosed("(", ")"))
            # `<(command)` is a file with the command's output.
            elif char in "<>":
                self.at += 1
                self.parts.append(
                    Part("output", self.enclosed("(", ")")[1:-1], quoted=False, line=self.line)
                )
            else:
                self.piece(char)
        parts, self.parts = tuple(self.parts), outer
        # A character that begins no word must be passed over, or the parser would stand still.
        if not parts and not empty and self.at < len(self.text) and self.char() not in "\n;&|)":
            self.at += 1
        return RawWord(parts, line)

    def literal(self, text: str, quoted: bool = False) -> None:
        """Add text that stands for itself to the word."""
        last = self.parts[-1] if self.parts else None
        if last is not None and last.kind == "text" and last.quoted == quoted:
            self.parts[-1] = Part("text", last.text + text, quoted, last.line)
        else:
            self.parts.append(Part("text", text, quoted, self.line))

    def piece(self, char: str) -> None:
        """Read one piece of a word outside quotes."""
        if char == "\\":
            following = self.text[self.at + 1 : self.at + 2]
            if following == "\n":
                self.line += 1
            else:
                self.literal(following, quoted=True)
            self.at += 2
        elif char == "'":
            self.single_quoted()
        elif char == '"':
            self.double_quoted()
        elif self.text.startswith("$'", self.at):
            self.escaped()
        # `$"..."` is a text to translate, read like the plain one.
        elif self.text.startswith('$"', self.at):
            self.at += 1
        elif char == "$":
            self.dollar(quoted=False)
        elif char == "`":
            self.backticks(quoted=False)
        else:
            run = _PLAIN.match(self.text, self.at)
            text = run[0] if run else char
            self.literal(text)
            self.at += len(text)

    def single_quoted(self) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise broken(
                self.place, self.line, "a quote is opened here and never closed; add its '"
            )
        self.literal(self.text[self.at + 1 : end], quoted=True)
        self.line += lines_in(self.text[self.at : end])
        self.at = end + 1

    def escaped(self) -> None:
        """`$'...'`, in which a backslash begins a sign, as in `IFS=$'\\n'`."""
        match = _ESCAPED.match(self.text, self.at)
        if match is None:
            raise broken(
                self.place, self.line, "a quote is opened here and never closed; add its '"
            )
        self.literal(
            re.sub(r"\\(.)", lambda sign: _SIGNS.get(sign[1], sign[0]), match[1]), quoted=True
        )
        self.line += lines_in(match[0])
        self.at = match.end()

    def double_quoted(self) -> None:
        opened = self.line
        self.at += 1
        # `""` is a word too, an empty one; `"$@"` is none where there are no arguments.
        if self.char() == '"':
            self.literal("", quoted=True)
        while self.at < len(self.text):
            if self.char() == '"':
                self.at += 1
                return
            self.quoted_piece()
        raise broken(self.place, opened, 'a quote is opened here and never closed; add its "')

    def quoted_piece(self) -> None:
        """Read one piece of a text in double quotes, or of a here-document."""
        char = self.char()
        following = self.text[self.at + 1 : self.at + 2]
        if char == "$":
            self.dollar(quoted=True)
        elif char == "`":
            self.backticks(quoted=True)
        elif char == "\\" and following and following in '\\"$`':
            self.literal(following, quoted=True)
            self.at += 2
        elif char == "\\" and following == "\n":
            # A continued line is joined. Between words it stays a blank, so that lines can be
            # counted later.
            around = self.text[self.at - 1 : self.at] + self.text[self.at + 2 : self.at + 3]
            if re.search(r"[\s\"]", around):
                self.literal(JOINED, quoted=True)
            self.at, self.line = self.at + 2, self.line + 1
        else:
            run = _PLAIN_QUOTED.match(self.text, self.at)
            text = run[0] if run else char
            self.literal(text, quoted=True)
            self.line += lines_in(text)
            self.at += len(text)

    def in_text(self, quoted: bool) -> None:
        """Read all of the text as one word."""
        while self.at < len(self.text):
            char = self.char()
            if quoted and char != '"':
                self.quoted_piece()
            elif quoted:
                self.literal(char, quoted=True)
                self.at += 1
            else:
                newline = char == "\n"
                self.piece(char)
                self.line += newline

    def dollar(self, *, quoted: bool) -> None:
        """Read the part that begins with the `$` here."""
        line = self.line
        self.at += 1
        if self.char() == "(":
            inside = self.enclosed("(", ")")
            # `$((2 + 3))` calculates, `$( (cd there; pwd) )` runs: only brackets that stand
            # together mean arithmetic.
            if inside.startswith("((") and inside.endswith("))"):
                self.parts.append(Part("arithmetic", inside[2:-2], quoted, line))
            else:
                self.parts.append(Part("output", _read_file(inside[1:-1]), quoted, line))
        elif self.char() == "{":
            self.parts.append(Part("parameter", self.enclosed("{", "}")[1:-1], quoted, line))
        else:
            name = NAME.match(self.text, self.at)
            if name is None:
                self.literal("$", quoted)
                return
            self.at = name.end()
            self.parts.append(Part("parameter", name[0], quoted, line))

    def backticks(self, *, quoted: bool) -> None:
        line = self.line
        end = self.text.find("`", self.at + 1)
        if end < 0:
            raise broken(self.place, line, "a ` is opened here and never closed; add its `")
        command = _read_file(self.text[self.at + 1 : end])
        self.parts.append(Part("output", command, quoted, line))
        self.line += self.text.count("\n", self.at, end)
        self.at = end + 1

    def enclosed(self, opening: str, closing: str) -> str:
        """The text from the bracket at this position to its closing one, skipping quotes; moves
        past it."""
        start = self.at
        opened = self.line
        depth = 0
        while self.at < len(self.text):
            char = self.char()
            if char == "\\":
                self.line += self.text[self.at + 1 : self.at + 2] == "\n"
                self.at += 2
                continue
            # A bracket in quotes closes nothing. Inside `${...}` quotes may be unbalanced
            # (`${NAME#'}`), so that they count there as plain characters.
            quoted = _QUOTED.match(self.text, self.at) if opening == "(" else None
            if quoted:
                self.line += quoted[0].count("\n")
                self.at = quoted.end()
                continue
            # Quotes and brackets in a here-document are plain characters too. In `((1 << N))` none
            # begins.
            if opening == "(" and self.text[start : start + 2] != "((":
                here = _HERE.match(self.text, self.at)
            else:
                here = None
            if here:
                self.line += here[0].count("\n")
                self.at = here.end()
                continue
            depth += (char == opening) - (char == closing)
            self.line += lines_in(char)
            self.at += 1
            if depth == 0:
                return self.text[start : self.at]
        message = f"a `{opening}` is opened here and never closed; add its `{closing}`"
        raise broken(self.place, opened, message)


def _read_file(command: str) -> str:
    """A command whose output is wanted; bash takes `<FILE` alone for `cat FILE`."""
    return re.sub(r"^\s*<(?![<(])", "cat ", command)
