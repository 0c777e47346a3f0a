"""Shell scripts as trees: a parser of what launch scripts are written in (POSIX shell, and of bash arrays, `[[`, `((`).

The parser only divides text. It expands nothing and runs nothing: `perfmodel.ingest.launch._shell` walks the tree.
"""

import re
from collections.abc import Callable
from typing import Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch._shell_tree import (
    DECLARING,
    JOINED,
    AndOr,
    Assignment,
    Calculation,
    Case,
    CountingFor,
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
    Simple,
    Test,
    While,
    lines_in,
)

_NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)(?:\[([^\]\n]*)\])?(\+?)=")
_ELEMENT: Final = re.compile(r"\[([^\]\n]*)\]=")
_REDIRECTION: Final = re.compile(r"(?:\d+|\{\w+\})?(<<<|<<-|<<|<>|<&|>>|>&|>\||<(?!\()|>(?!\()|&>>|&>)")
_FUNCTION: Final = re.compile(r"(?:function\s+)?([\w.:-]+)[ \t]*\([ \t]*\)|function\s+([\w.:-]+)")
_PLAIN: Final = re.compile(r"[^\s;&|()<>\\'\"$`]+")
"""Characters that mean themselves outside quotes."""
_PLAIN_QUOTED: Final = re.compile(r"[^\"$`\\]+")
"""The same inside double quotes."""
_QUOTED: Final = re.compile(r"'[^']*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
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
"""Levels of nesting, beyond which a text is no launch script."""


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
    parser = _Parser(text.replace("\r\n", "\n"), place, line, counts=counts)
    tree = parser.sequence(())
    parser.require_end()
    return tree


def parse_word(text: str, place: str, line: int, *, quoted: bool) -> RawWord:
    """A text as one word, whatever blanks are in it: the default of a parameter, the text of a here-document."""
    parser = _Parser(text, place, line)
    parser.in_text(quoted)
    return RawWord(tuple(parser.parts), line)


class _Parser:
    """One pass over a text by recursive descent; a method each for what the grammar has."""

    def __init__(self, text: str, place: str, line: int, *, counts: bool = True) -> None:
        self.text, self.place = text, place
        self.only_line = None if counts else line
        self.line = line
        self.at = 0
        self.depth = 0
        self.pending: list[HereText] = []
        """Here-documents whose text begins on the next line."""
        self.parts: list[Part] = []
        """Of the word that is being read."""

    @property
    def line(self) -> int:
        """The line that is being read."""
        return self.counted_line if self.only_line is None else self.only_line

    @line.setter
    def line(self, line: int) -> None:
        self.counted_line = line

    # What separates commands and words.

    def char(self) -> str:
        return self.text[self.at : self.at + 1]

    def blanks(self) -> None:
        """Pass over blanks, continued lines and comments, up to a word, an operator or the end of a line."""
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

    def newlines(self) -> None:
        """Pass over ends of lines and blanks, and read the here-documents that begin there."""
        self.blanks()
        while self.char() == "\n":
            self.at, self.line = self.at + 1, self.line + 1
            for here in self.pending:
                self.here_text(here)
            self.pending.clear()
            self.blanks()

    def here_text(self, here: HereText) -> None:
        end = re.compile(rf"^\s*{re.escape(here.delimiter)}[ \t]*$", re.MULTILINE).search(self.text, self.at)
        if end is None:
            raise broken(self.place, here.line, f"the here-document is never closed; add its {here.delimiter}")
        here.text, here.line = self.text[self.at : end.start()], self.line
        self.line += self.text.count("\n", self.at, end.end() + 1)
        self.at = min(len(self.text), end.end() + 1)

    def reserved(self) -> str:
        """The reserved word that stands here, if one does."""
        match = _RESERVED.match(self.text, self.at)
        return match[1] if match else ""

    def require_end(self) -> None:
        word = self.reserved()
        if word in _CLOSERS:
            raise broken(self.place, self.line, f"{word!r} without {_CLOSERS[word]!r}; mend the script")
        if self.at < len(self.text):
            raise broken(self.place, self.line, f"{self.char()!r} closes nothing here; mend the script")

    def expect(self, word: str, opened_by: str, opened: int) -> None:
        self.newlines()
        while self.char() in (";", "&") and word == "do":
            self.at += 1
            self.newlines()
        if self.reserved() != word and not (word in "()" and self.char() == word):
            raise broken(self.place, opened, f"{opened_by!r} is opened here and never closed; add its {word!r}")
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
            if self.at >= len(self.text) or self.char() == ")" or self.text.startswith((";;", ";&"), self.at):
                break
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
        first, others = self.pipeline(), []
        while True:
            self.blanks()
            operator = self.text[self.at : self.at + 2]
            if operator not in ("&&", "||"):
                return AndOr(first, tuple(others))
            self.at += 2
            self.newlines()
            others.append((operator, self.pipeline()))

    def pipeline(self) -> Pipeline:
        negated = False
        self.blanks()
        while self.reserved() in ("!", "time"):
            negated ^= self.reserved() == "!"
            self.at += len(self.reserved())
            self.blanks()
        commands = [self.command()]
        while True:
            self.blanks()
            if self.char() != "|" or self.text.startswith("||", self.at):
                return Pipeline(tuple(commands), negated)
            self.at += 2 if self.text.startswith("|&", self.at) else 1
            self.newlines()
            commands.append(self.command())

    # Commands.

    def command(self) -> Node:
        line, word = self.line, self.reserved()
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
        if self.text.startswith("((", self.at) and (calculation := self.calculation(line)):
            return calculation
        if self.char() == "(":
            return self.redirected(self.group(line))
        if word in blocks:
            return self.redirected(blocks[word](line))
        if (match := _FUNCTION.match(self.text, self.at)) is not None:
            self.line += match[0].count("\n")
            self.at = match.end()
            self.newlines()
            return Function(match[1] or match[2], self.command())
        return self.simple()

    def redirected(self, node: Node) -> Node:
        """A block whose redirections, which change nothing that matters here, have been passed over."""
        self.blanks()
        while match := _REDIRECTION.match(self.text, self.at):
            self.redirection(match)
            self.blanks()
        return node

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
        kind = self.reserved()
        self.at += len(kind)
        self.blanks()
        if self.text.startswith("((", self.at):
            self.enclosed("(", ")")
            return CountingFor(self.body(kind, line), line)
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise broken(self.place, line, f"{kind!r} has no variable; mend the script")
        self.at = match.end()
        self.newlines()
        words = None
        if self.reserved() == "in":
            self.at += len("in")
            words = self.words_of_line()
        body = self.body(kind, line)
        return CountingFor(body, line) if kind == "select" else For(match[0], words, body, line)

    def words_of_line(self) -> tuple[RawWord, ...]:
        words: list[RawWord] = []
        self.blanks()
        while self.char() not in ("", "\n", ";", "&", "|"):
            words.append(self.word())
            self.blanks()
        return tuple(words)

    def case_block(self, line: int) -> Case:
        self.at += len("case")
        self.blanks()
        subject = self.word()
        self.expect("in", "case", line)
        clauses: list[tuple[tuple[RawWord, ...], Sequence]] = []
        self.newlines()
        while self.reserved() != "esac":
            if self.at >= len(self.text):
                raise broken(self.place, line, "'case' is opened here and never closed; add its 'esac'")
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
                raise broken(self.place, self.line, "a pattern of 'case' has no ')'; mend the script")
            self.at += 1
            body = self.sequence(("esac",))
            clauses.append((tuple(patterns), body))
            while self.char() in (";", "&"):
                self.at += 1
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
        self.at += 2
        words: list[RawWord] = []
        while True:
            self.newlines()
            if self.at >= len(self.text):
                raise broken(self.place, line, "'[[' is opened here and never closed; add its ']]'")
            if re.match(r"\]\](?![\w\]])", self.text[self.at : self.at + 3]):
                self.at += 2
                return Test(tuple(words), line)
            operator = re.match(r"&&|\|\||[()<>|&;]", self.text[self.at : self.at + 2])
            if operator:
                words.append(RawWord((Part("text", operator[0], False, self.line),), self.line))
                self.at += len(operator[0])
            else:
                words.append(self.word())

    def calculation(self, line: int) -> Calculation | None:
        """`((...))`; None where the parentheses are those of subshells."""
        before, before_line = self.at, self.line
        inside = self.enclosed("(", ")")
        if inside.endswith("))"):
            return Calculation(inside[2:-2], line)
        self.at, self.line = before, before_line
        return None

    def simple(self) -> Simple:
        line = self.line
        assignments: list[Assignment] = []
        words: list[RawWord] = []
        here, output = None, None
        declares = False
        while True:
            self.blanks()
            redirection = _REDIRECTION.match(self.text, self.at)
            if redirection:
                target = self.redirection(redirection)
                here = target if isinstance(target, HereText) else here
                output = target if isinstance(target, RawWord) and ">" in redirection[1] else output
                continue
            if self.char() in ("", "\n", ";", "&", "|", ")"):
                break
            assignment = _ASSIGNMENT.match(self.text, self.at)
            of_array = assignment is not None and self.text.startswith("(", assignment.end())
            if assignment and (declares or not words or of_array):
                assignments.append(self.assignment(assignment))
                continue
            words.append(self.word())
            first = words[0].parts
            declares = len(first) == 1 and first[0].kind == "text" and first[0].text in DECLARING
        return Simple(tuple(assignments), tuple(words), here, output, line)

    def redirection(self, match: re.Match[str]) -> HereText | RawWord | None:
        """Pass over a redirection; the text of a here-document, or the file."""
        self.at = match.end()
        self.blanks()
        if match[1] == "<<<":
            return HereText("", False, word=self.word(), line=self.line)
        if match[1].startswith("<<"):
            delimiter = re.compile(r"\\?(['\"]?)([^\s'\";&|<>()]+)\1").match(self.text, self.at)
            if delimiter is None:
                raise broken(self.place, self.line, "a here-document has no end word; mend the script")
            literal = bool(delimiter[1]) or delimiter[0].startswith("\\")
            here = HereText(delimiter[2], literal, line=self.line)
            self.at = delimiter.end()
            self.pending.append(here)
            return here
        if self.char() in ("", "\n", ";", "|", ")"):
            return None
        return self.word()

    def assignment(self, match: re.Match[str]) -> Assignment:
        line = self.line
        self.at = match.end()
        name, index, plus = match[1], match[2], bool(match[3])
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

    # Words.

    def word(self, *, empty: bool = False) -> RawWord:
        """The word that begins here: everything up to a blank or an operator outside quotes."""
        outer, self.parts = self.parts, []
        line = self.line
        while self.at < len(self.text):
            char = self.char()
            if char.isspace() or char in ";&|)" or (char in "<>" and not self.text.startswith("(", self.at + 1)):
                break
            if char == "(" and not self.parts:
                # No word of shell begins so; lists of arguments have such values, as in `--moe-layer-freq ([1]*4)`.
                self.literal(self.enclosed("(", ")"))
            elif char == "(":
                if re.compile(r"\(\s*\)").match(self.text, self.at):
                    break
                self.literal(self.enclosed("(", ")"))
            elif char in "<>":
                self.at += 1
                self.parts.append(Part("output", self.enclosed("(", ")")[1:-1], False, self.line))
            else:
                self.piece(char)
        parts, self.parts = tuple(self.parts), outer
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
        """One step through a word outside quotes."""
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
        elif char == "$" and self.text[self.at + 1 : self.at + 2] in ("'", '"'):
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
            raise broken(self.place, self.line, "a quote is opened here and never closed; add its '")
        self.literal(self.text[self.at + 1 : end], quoted=True)
        self.line += lines_in(self.text[self.at : end])
        self.at = end + 1

    def double_quoted(self) -> None:
        opened = self.line
        self.literal("", quoted=True)
        self.at += 1
        while self.at < len(self.text):
            if self.char() == '"':
                self.at += 1
                return
            self.quoted_piece()
        raise broken(self.place, opened, 'a quote is opened here and never closed; add its "')

    def quoted_piece(self) -> None:
        """One step through a text in double quotes, or a here-document."""
        char, following = self.char(), self.text[self.at + 1 : self.at + 2]
        if char == "$":
            self.dollar(quoted=True)
        elif char == "`":
            self.backticks(quoted=True)
        elif char == "\\" and following and following in '\\"$`':
            self.literal(following, quoted=True)
            self.at += 2
        elif char == "\\" and following == "\n":
            # A continued line is joined. Between words it stays a blank, so that lines can be counted later.
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
        """What stands after a `$`."""
        line = self.line
        self.at += 1
        if self.char() == "(":
            inside = self.enclosed("(", ")")
            if inside.startswith("((") and inside.endswith("))"):
                self.parts.append(Part("arithmetic", inside[2:-2], quoted, line))
            else:
                self.parts.append(Part("output", inside[1:-1], quoted, line))
        elif self.char() == "{":
            self.parts.append(Part("parameter", self.enclosed("{", "}")[1:-1], quoted, line))
        elif (match := _NAME.match(self.text, self.at)) is not None:
            self.at = match.end()
            self.parts.append(Part("parameter", match[0], quoted, line))
        else:
            self.literal("$", quoted)

    def backticks(self, *, quoted: bool) -> None:
        line, end = self.line, self.text.find("`", self.at + 1)
        if end < 0:
            raise broken(self.place, line, "a ` is opened here and never closed; add its `")
        self.parts.append(Part("output", self.text[self.at + 1 : end], quoted, line))
        self.line += self.text.count("\n", self.at, end)
        self.at = end + 1

    def enclosed(self, opening: str, closing: str) -> str:
        """The text from the bracket here through the one that closes it, quotes in it skipped; moves behind it."""
        start, opened, depth = self.at, self.line, 0
        while self.at < len(self.text):
            char = self.char()
            if char == "\\":
                self.line += self.text[self.at + 1 : self.at + 2] == "\n"
                self.at += 2
                continue
            quoted = _QUOTED.match(self.text, self.at) if opening == "(" else None
            if quoted:
                self.line += quoted[0].count("\n")
                self.at = quoted.end()
                continue
            depth += (char == opening) - (char == closing)
            self.line += lines_in(char)
            self.at += 1
            if depth == 0:
                return self.text[start : self.at]
        message = f"a `{opening}` is opened here and never closed; add its `{closing}`"
        raise broken(self.place, opened, message)
