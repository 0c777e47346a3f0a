"""Parses one plain command of a shell script: its assignments, words and redirections."""

import re
from dataclasses import dataclass
from typing import Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch.shell._tree import (
    DECLARING,
    READING,
    Assignment,
    HereText,
    Part,
    RawWord,
    Simple,
)
from perfmodel.ingest.launch.shell._words import WordParser

_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
_ELEMENT: Final = re.compile(r"\[([^\]\n]*)\]=")
REDIRECTION: Final = re.compile(
    r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>>|>&|>\||<(?!\()|>(?!\()|&>>|&>)"
)
_COUNTING: Final = ("wc", "sort", "uniq", "head")
"""Commands whose output follows from the lines that they read."""


@dataclass
class _Redirected:
    """Input and output of a plain command."""

    here: HereText | None = None
    """The text that the command reads."""
    output: RawWord | None = None
    """The file that the command writes."""
    appends: bool = False
    """Whether the output is added to the file's text."""


class PlainCommandParser(WordParser):
    """Reads plain commands, and the here-documents behind them."""

    def __init__(self, text: str, place: str, line: int, *, counts: bool = True) -> None:
        super().__init__(text, place, line, counts=counts)
        self.pending: list[HereText] = []
        """Here-documents whose text begins on the next line."""

    def newlines(self) -> None:
        """Skip line ends and blanks, and read the here-documents that begin there."""
        self.blanks()
        while self.char() == "\n":
            self.at, self.line = self.at + 1, self.line + 1
            for here in self.pending:
                self.here_text(here)
            self.pending.clear()
            self.blanks()

    def here_text(self, here: HereText) -> None:
        """Read the lines of a here-document up to its end word."""
        # `<<-EOF` allows tabs before the end word. An indented one is taken for
        # the end of `<<EOF` too, which the shell would only warn about.
        end = re.compile(rf"^[ \t]*{re.escape(here.delimiter)}[ \t]*$", re.MULTILINE).search(
            self.text, self.at
        )
        if end is None:
            raise broken(
                self.place,
                here.line,
                f"the here-document is never closed; add its {here.delimiter}",
            )
        here.text, here.line = self.text[self.at : end.start()], self.line
        self.line += self.text.count("\n", self.at, end.end() + 1)
        self.at = min(len(self.text), end.end() + 1)

    def simple(self) -> Simple:
        """A plain command up to its end: assignments, words and redirections in any order."""
        line = self.line
        assignments: list[Assignment] = []
        raw_words: list[RawWord] = []
        redirected = _Redirected()
        declares = False
        while True:
            self.blanks()
            redirection = REDIRECTION.match(self.text, self.at)
            if redirection:
                self.redirect(redirection, raw_words, redirected)
                continue
            if self.char() in ("", "\n", ";", "&", "|", ")"):
                break
            # `NAME=value` is an assignment before the command's name or behind `export`; behind
            # another command it is an argument. An array, `NAME=(`, can be no argument, so that it
            # always is an assignment.
            assignment = _ASSIGNMENT.match(self.text, self.at)
            is_array = assignment is not None and self.text.startswith("(", assignment.end())
            if assignment and (declares or not raw_words or is_array):
                assignments.append(self.assignment(assignment))
                continue
            raw_words.append(self.word())
            program = raw_words[0].parts
            is_plain_text = len(program) == 1 and program[0].kind == "text"
            declares = is_plain_text and program[0].text in DECLARING
        return Simple(
            tuple(assignments),
            tuple(raw_words),
            redirected.here,
            redirected.output,
            redirected.appends,
            line,
        )

    def redirect(
        self, match: re.Match[str], raw_words: list[RawWord], redirected: "_Redirected"
    ) -> None:
        """Note the input or output that a redirection gives the command of these words."""
        target = self.redirection(match)
        if isinstance(target, HereText):
            redirected.here = target
            return
        if target is None:
            return

        # `wc -l < hosts` writes what `cat hosts | wc -l` does.
        if match[0] == "<" and _is_plain(raw_words, _COUNTING):
            file = self.text[match.end() : self.at].strip()
            catenated = Part("output", f"cat {file}", quoted=False, line=self.line)
            word = RawWord((catenated,), self.line)
            redirected.here = HereText("", literal=False, word=word, line=self.line)
            return
        # `read A B < <(command)`, as if the text stood behind `<<<`.
        if match[1] == "<" and target.is_output and _is_plain(raw_words, READING):
            redirected.here = HereText("", literal=False, word=target, line=self.line)
        # Output to descriptor 2 consists of messages.
        if ">" in match[1] and not match[0].startswith("2"):
            redirected.output = target
            redirected.appends = match[1] == ">>"

    def redirection(self, match: re.Match[str]) -> HereText | RawWord | None:
        """Skip a redirection, and return the text of a here-document or the file."""
        self.at = match.end()
        self.blanks()
        if match[1] == "<<<":
            return HereText("", literal=False, word=self.word(), line=self.line)
        if match[1].startswith("<<"):
            delimiter = re.compile(r"\\?(['\"]?)([^\s'\";&|<>()]+)\1").match(self.text, self.at)
            if delimiter is None:
                raise broken(
                    self.place, self.line, "a here-document has no end word; fix the script"
                )
            # Quotes around the end word keep the shell from expanding the text: `<<'EOF'`.
            literal = bool(delimiter[1]) or delimiter[0].startswith("\\")
            here = HereText(delimiter[2], literal, line=self.line)
            self.at = delimiter.end()
            self.pending.append(here)
            return here
        # A descriptor alone, as in `2>&1`, names no file.
        if self.char() in ("", "\n", ";", "|", ")"):
            return None
        return self.word()

    def assignment(self, match: re.Match[str]) -> Assignment:
        """Parse the value of `NAME=`, a word or an array in brackets."""
        line = self.line
        self.at = match.end()
        name = match[1]
        index = match[2]
        plus = bool(match[3])
        if self.char() != "(":
            return Assignment(name, index, plus, self.word(empty=True), None, line)
        self.at += 1
        elements: list[tuple[str | None, RawWord]] = []
        while True:
            self.newlines()
            if self.at >= len(self.text):
                raise broken(self.place, line, f"the array {name} is never closed; add its `)`")
            if self.char() == ")":
                self.at += 1
                return Assignment(name, index, plus, None, tuple(elements), line)
            element = _ELEMENT.match(self.text, self.at)
            if element:
                self.at = element.end()
            before = self.at
            word = self.word(empty=element is not None)
            elements.append((element[1] if element else None, word))
            if self.at == before and not element:  # an operator, which no array can hold
                self.at += 1


def _is_plain(raw_words: list[RawWord], names: tuple[str, ...]) -> bool:
    """Whether a command is one of these."""
    if not raw_words:
        return False
    parts = raw_words[0].parts
    return len(parts) == 1 and parts[0].text in names
