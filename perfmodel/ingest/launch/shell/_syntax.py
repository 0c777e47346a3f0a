"""Parses shell scripts into trees: the part of POSIX shell and bash (arrays, `[[`, `((`) that
launch scripts use.

The parser only divides text. It expands nothing and runs nothing: `_script` walks the tree.
"""

import re
from collections.abc import Callable
from typing import Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch.shell._plain_commands import REDIRECTION, PlainCommandParser
from perfmodel.ingest.launch.shell._tree import (
    AndOr,
    Calculation,
    Case,
    Clause,
    CountingFor,
    Fed,
    For,
    Function,
    Group,
    HereText,
    If,
    Node,
    Part,
    Pipeline,
    RawWord,
    Sequence,
    Test,
    While,
)
from perfmodel.ingest.launch.shell._words import NAME

_FUNCTION: Final = re.compile(r"(?:function\s+)?([\w.:-]+)[ \t]*\([ \t]*\)|function\s+([\w.:-]+)")
_RESERVED: Final = re.compile(
    r"(then|elif|else|fi|do|done|esac|\}|if|while|until|for|case|select|\{|\[\[|!|time|in)(?![\w=.+-])"
)
_CLOSERS: Final = {
    "then": "if",
    "elif": "if",
    "else": "if",
    "fi": "if",
    "do": "for",
    "done": "for",
    "esac": "case",
    "}": "{",
}
DEEPEST: Final = 60
"""Deepest nesting of a launch script."""


def parse(text: str, place: str, line: int = 1, *, counts: bool = True) -> Sequence:
    """The tree of a script.

    Args:
        text: the script, or a part of it.
        place: path of the file, for messages.
        line: number of the text's first line.
        counts: whether lines are counted; otherwise all stand on the one line that brought them in.

    Raises:
        LaunchFileError: a quote, bracket or block that is never closed.
    """
    # Scripts edited on Windows have ends of lines that would stick to the last word of each line.
    parser = _Parser(text.replace("\r\n", "\n"), place, line, counts=counts)
    tree = parser.sequence(())
    parser.require_end()
    return tree


class _Parser(PlainCommandParser):
    """One pass over a text by recursive descent; a method for each rule of the grammar."""

    def __init__(self, text: str, place: str, line: int, *, counts: bool = True) -> None:
        super().__init__(text, place, line, counts=counts)
        self.depth = 0
        """Current depth of nested blocks."""

    # Separators of commands.

    def reserved(self) -> str:
        """The reserved word at this position; empty if there is none."""
        match = _RESERVED.match(self.text, self.at)
        return match[1] if match else ""

    def require_end(self) -> None:
        word = self.reserved()
        if word in _CLOSERS:
            raise broken(
                self.place, self.line, f"{word!r} without {_CLOSERS[word]!r}; fix the script"
            )
        if self.at < len(self.text):
            raise broken(
                self.place, self.line, f"{self.char()!r} closes nothing here; fix the script"
            )

    def expect(self, word: str, opened_by: str, opened: int) -> None:
        self.newlines()
        # `for i in 1 2; do` and `while true; do` have a separator before the word.
        while self.char() in (";", "&") and word == "do":
            self.at += 1
            self.newlines()
        if self.reserved() != word and not (word in "()" and self.char() == word):
            raise broken(
                self.place,
                opened,
                f"{opened_by!r} is opened here and never closed; add its {word!r}",
            )
        self.at += len(word)

    # Lists of commands.

    def sequence(self, closers: tuple[str, ...]) -> Sequence:
        """Commands up to one of the closing words, or to the end."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise broken(self.place, self.line, "nested too deeply to be a launch script")
        items: list[AndOr] = []
        while True:
            self.newlines()
            if (
                self.at >= len(self.text)
                or self.char() == ")"
                or self.text.startswith((";;", ";&"), self.at)
            ):
                break
            # A background command (`&`) is just one more command, because nothing is run here.
            if self.char() in ";&" and not self.text.startswith("&>", self.at):
                self.at += 1
                continue
            if self.reserved() in closers or self.reserved() in _CLOSERS:
                break
            before = self.at
            items.append(self.and_or())
            if self.at == before:  # a stray operator
                self.at += 1
        self.depth -= 1
        return Sequence(tuple(items))

    def and_or(self) -> AndOr:
        first = self.pipeline()
        further = []
        while True:
            self.blanks()
            # `&&` and `||` bind equally and from the left, unlike those of C.
            operator = self.text[self.at : self.at + 2]
            if operator not in ("&&", "||"):
                return AndOr(first, tuple(further))
            self.at += 2
            self.newlines()
            further.append((operator, self.pipeline()))

    def pipeline(self) -> Pipeline:
        """Parse `! a | b | c`."""
        negated = False
        self.blanks()
        while self.reserved() in ("!", "time"):
            # `! ! command` is the command itself.
            negated ^= self.reserved() == "!"
            self.at += len(self.reserved())
            self.blanks()
        commands = [self.command()]
        while True:
            self.blanks()
            if self.char() != "|" or self.text.startswith("||", self.at):
                return Pipeline(tuple(commands), negated)
            if self.text.startswith("|&", self.at):
                self.at += 2
            else:
                self.at += 1
            self.newlines()
            commands.append(self.command())

    # Commands.

    def command(self) -> Node:
        """The block, function or plain command that begins here."""
        line = self.line
        word = self.reserved()
        blocks: dict[str, Callable[[int], Node]] = {
            "if": self.if_block,
            "while": self.while_loop,
            "until": self.while_loop,
            "for": self.for_loop,
            "select": self.for_loop,
            "case": self.case_block,
            "{": self.group,
            "[[": self.test,
        }
        # `((` is tried first: it is arithmetic if it closes with `))`, and two subshells otherwise.
        if self.text.startswith("((", self.at):
            calculation = self.calculation(line)
            if calculation is not None:
                return calculation
        if self.char() == "(":
            return self.redirected(self.group(line))
        if word in blocks:
            return self.redirected(blocks[word](line))
        # Only a following `()` or the word `function` tells a definition from a command of this
        # name.
        header = _FUNCTION.match(self.text, self.at)
        if header is not None:
            self.line += header[0].count("\n")
            self.at = header.end()
            self.newlines()
            return Function(header[1] or header[2], self.command())
        return self.simple()

    def redirected(self, node: Node) -> Node:
        """A block with the text that it reads; other redirections change nothing that matters
        here."""
        self.blanks()
        redirection = REDIRECTION.match(self.text, self.at)
        fed = None
        while redirection:
            target = self.redirection(redirection)
            # A number in front is that of another descriptor.
            if target is not None and redirection[0] in ("<", "<<", "<<-", "<<<"):
                fed = self.fed(node, target)
            self.blanks()
            redirection = REDIRECTION.match(self.text, self.at)
        return node if fed is None else fed

    def fed(self, node: Node, target: HereText | RawWord) -> Fed:
        if isinstance(target, HereText):
            return Fed(node, target, None)
        if target.is_output:
            return Fed(node, HereText("", literal=False, word=target, line=self.line), None)
        return Fed(node, None, target)

    def if_block(self, line: int) -> If:
        branches: list[tuple[Sequence, Sequence]] = []
        otherwise = None
        while self.reserved() in ("if", "elif"):
            self.at += len(self.reserved())
            condition = self.sequence(("then",))
            self.expect("then", "if", line)
            branches.append((condition, self.sequence(("elif", "else", "fi"))))
        if self.reserved() == "else":
            self.at += len("else")
            otherwise = self.sequence(("fi",))
        self.expect("fi", "if", line)
        return If(tuple(branches), otherwise, line)

    def while_loop(self, line: int) -> While:
        kind = self.reserved()
        self.at += len(kind)
        condition = self.sequence(("do",))
        return While(condition, self.body(kind, line), kind == "until", line)

    def body(self, kind: str, line: int) -> Sequence:
        self.expect("do", kind, line)
        body = self.sequence(("done",))
        self.expect("done", kind, line)
        return body

    def for_loop(self, line: int) -> For | CountingFor:
        """Parse `for NAME in WORDS` or `for ((start; condition; step))` with its body."""
        kind = self.reserved()
        self.at += len(kind)
        self.blanks()
        if self.text.startswith("((", self.at):
            header = self.enclosed("(", ")")[2:-2].split(";")
            expressions = (header[0], header[1], header[2]) if len(header) == 3 else None
            return CountingFor(expressions, self.body(kind, line), line)
        match = NAME.match(self.text, self.at)
        if match is None:
            raise broken(self.place, line, f"{kind!r} names no variable; fix the script")
        self.at = match.end()
        self.newlines()
        raw_words = None
        if self.reserved() == "in":
            self.at += len("in")
            raw_words = self.words_of_line()
        body = self.body(kind, line)
        # `select` asks a person, so that nobody knows how often it runs.
        if kind == "select":
            return CountingFor(None, body, line)
        return For(match[0], raw_words, body, line)

    def words_of_line(self) -> tuple[RawWord, ...]:
        raw_words: list[RawWord] = []
        self.blanks()
        while self.char() not in ("", "\n", ";", "&", "|"):
            raw_words.append(self.word())
            self.blanks()
        return tuple(raw_words)

    def case_block(self, line: int) -> Case:
        """Parse `case WORD in PATTERNS) ... ;; esac`."""
        self.at += len("case")
        self.blanks()
        subject = self.word()
        self.expect("in", "case", line)
        clauses: list[Clause] = []
        self.newlines()
        while self.reserved() != "esac":
            if self.at >= len(self.text):
                raise broken(
                    self.place, line, "'case' is opened here and never closed; add its 'esac'"
                )
            if self.char() == "(":
                self.at += 1
            patterns = [self.word()]
            self.blanks()
            while self.char() == "|":
                self.at += 1
                self.blanks()
                patterns.append(self.word())
                self.blanks()
            if self.char() != ")":
                raise broken(
                    self.place, self.line, "a pattern of 'case' has no ')'; fix the script"
                )
            self.at += 1
            body = self.sequence(("esac",))
            begin = self.at
            while self.char() in (";", "&"):
                self.at += 1
            clauses.append(Clause(tuple(patterns), body, self.text[begin : self.at]))
            self.newlines()
        self.at += len("esac")
        return Case(subject, tuple(clauses), line)

    def group(self, line: int) -> Group:
        opening = self.char()
        self.at += 1
        body = self.sequence(("}",) if opening == "{" else ())
        self.expect("}" if opening == "{" else ")", opening, line)
        return Group(body, subshell=opening == "(")

    def test(self, line: int) -> Test:
        """Parse `[[ ... ]]`."""
        self.at += 2
        raw_words: list[RawWord] = []
        while True:
            self.newlines()
            if self.at >= len(self.text):
                raise broken(self.place, line, "'[[' is opened here and never closed; add its ']]'")
            # `]]` ends the test only as a word of its own: `${A[${B[0]}]}` has these characters
            # too.
            if re.match(r"\]\](?![\w\]])", self.text[self.at : self.at + 3]):
                self.at += 2
                return Test(tuple(raw_words), line)
            operator = re.match(r"&&|\|\||[()<>|&;]", self.text[self.at : self.at + 2])
            # Behind `=~` a bracket begins a group of the expression.
            is_expression = (
                bool(raw_words and raw_words[-1].parts) and raw_words[-1].parts[0].text == "=~"
            )
            if operator and not (is_expression and operator[0] == "("):
                raw_words.append(
                    RawWord((Part("text", operator[0], quoted=False, line=self.line),), self.line)
                )
                self.at += len(operator[0])
            else:
                raw_words.append(self.word())

    def calculation(self, line: int) -> Calculation | None:
        """Parse `((...))`; None if the parentheses belong to subshells."""
        # If it turns out to be subshells, the parser goes back and reads it again.
        before, before_line = self.at, self.line
        inside = self.enclosed("(", ")")
        if inside.endswith("))"):
            return Calculation(inside[2:-2], line)
        self.at = before
        self.line = before_line
        return None
