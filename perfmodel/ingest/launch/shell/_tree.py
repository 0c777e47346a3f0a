"""The tree of a launch script, as the parser returns it, before anything is expanded."""

import re
from dataclasses import dataclass
from typing import Final, Literal

JOINED: Final = "\v"
"""A blank that replaces a continued line inside quotes, so that lines can still be counted."""
HELD: Final = "\x01"
"""A blank in text that could not be expanded; words are not split at it."""
DECLARING: Final = ("export", "local", "declare", "readonly", "typeset")
"""Commands whose arguments are assignments."""
READING: Final = ("read", "mapfile", "readarray")
"""Commands that read input into variables."""


@dataclass(frozen=True)
class Part:
    """A piece of a word that is expanded independently of the rest."""

    kind: Literal["text", "parameter", "arithmetic", "output"]
    """`text` stands for itself; `parameter` is the inside of `${...}`, `arithmetic` of `$((...))`,
    `output` of `$(...)`."""
    text: str
    quoted: bool
    line: int

    @property
    def written(self) -> str:
        """The piece as written in the script, for text that cannot be expanded; it stays one
        word."""
        # Blanks inside `$(git rev-parse HEAD)` divide no word, because the command's output is
        # unknown.
        form = {"text": "{}", "parameter": "${{{}}}", "arithmetic": "$(({}))", "output": "$({})"}[
            self.kind
        ]
        return form.format(re.sub(r"\s", HELD, self.text))


@dataclass(frozen=True)
class RawWord:
    """A word before expansion."""

    parts: tuple[Part, ...]
    line: int

    @property
    def is_output(self) -> bool:
        """Whether the word is the output of a command and nothing else, such as `<(...)`."""
        return len(self.parts) == 1 and self.parts[0].kind == "output"


@dataclass(frozen=True)
class Assignment:
    """`name=value`, `name+=value`, `name[index]=value` or `name=(elements)`."""

    name: str
    index: str | None
    appends: bool
    value: RawWord | None
    elements: tuple[tuple[str | None, RawWord], ...] | None
    """Elements of an array: the index of each, where one is written, and its word."""
    line: int


@dataclass
class HereText:
    """Text that follows `<<` or `<<<`."""

    delimiter: str
    literal: bool
    """Whether nothing in it is expanded (`<<'EOF'`)."""
    text: str = ""
    word: RawWord | None = None
    """The word after `<<<`; None for a here-document."""
    line: int = 0

    @property
    def is_output(self) -> bool:
        """Whether the text is the output of a command."""
        return self.word is not None and self.word.is_output


@dataclass(frozen=True)
class Simple:
    """Assignments, or a command with its arguments."""

    assignments: tuple[Assignment, ...]
    """Assignments before the command; for `export` and similar commands also those after it."""
    raw_words: tuple[RawWord, ...]
    here: HereText | None
    output: RawWord | None
    """The file that the output goes to."""
    appends: bool
    """The output is added to the end of this file (`>>`)."""
    line: int


@dataclass(frozen=True)
class Test:
    """`[[ ... ]]`: the words between, not yet expanded."""

    raw_words: tuple[RawWord, ...]
    line: int


@dataclass(frozen=True)
class Calculation:
    """An arithmetic command, `(( ... ))`."""

    text: str
    line: int


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`, the status of the last negated by a leading `!`."""

    commands: "tuple[Node, ...]"
    negated: bool


@dataclass(frozen=True)
class AndOr:
    """A pipeline and those that run after it if it succeeds (`&&`) or fails (`||`)."""

    first: Pipeline
    rest: tuple[tuple[str, Pipeline], ...]


@dataclass(frozen=True)
class Sequence:
    """Commands one after the other."""

    items: tuple[AndOr, ...]


@dataclass(frozen=True)
class If:
    """Conditions with the commands that run if they hold, and the commands that run if none
    does."""

    branches: tuple[tuple[Sequence, Sequence], ...]
    otherwise: Sequence | None
    line: int


@dataclass(frozen=True)
class While:
    """`while` and `until` loops."""

    condition: Sequence
    body: Sequence
    until: bool
    line: int


@dataclass(frozen=True)
class For:
    """`for name in WORDS`; without words over the script's own arguments."""

    name: str
    raw_words: tuple[RawWord, ...] | None
    body: Sequence
    line: int


@dataclass(frozen=True)
class CountingFor:
    """`for ((start; condition; step))`, and `select`, which has no header and is not followed."""

    header: tuple[str, str, str] | None
    """The three expressions; an empty condition holds."""
    body: Sequence
    line: int


@dataclass(frozen=True)
class Case:
    """A word, and the commands that run if it matches patterns."""

    subject: RawWord
    clauses: tuple["Clause", ...]
    line: int


@dataclass(frozen=True)
class Clause:
    """The commands of a `case` for some patterns."""

    patterns: tuple[RawWord, ...]
    body: Sequence
    end: str
    """What ends it: `;;` leaves the `case`, `;&` goes on with the next clause whatever its patterns
    are, and `;;&` tries those of the next clauses."""


@dataclass(frozen=True)
class Function:
    """The definition of a function."""

    name: str
    body: "Node"


@dataclass(frozen=True)
class Group:
    """Commands in braces or, as a `subshell` that changes no variables outside, in parentheses."""

    body: Sequence
    subshell: bool


@dataclass(frozen=True)
class Fed:
    """A block that reads a text: that of a here-document (`done <<EOF`), or of a file
    (`done < runs.txt`)."""

    block: "Node"
    here: HereText | None
    file: RawWord | None


Node = Simple | Test | Calculation | If | While | For | CountingFor | Case | Function | Group | Fed


def lines_in(text: str) -> int:
    """Number of line ends in a text, including those joined by a backslash."""
    return text.count("\n") + text.count(JOINED)
