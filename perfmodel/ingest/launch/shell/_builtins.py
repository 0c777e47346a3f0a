"""Commands that are a part of the shell: assignments, conditions, arguments and the files that a
script names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch.shell import _tree as tree
from perfmodel.ingest.launch.shell._expansion import (
    Expander,
    divided_at,
    next_index,
    unset_as_empty,
    with_braces,
)
from perfmodel.ingest.launch.shell._output import as_lines
from perfmodel.ingest.launch.shell._state import State, Value, Word
from perfmodel.ingest.launch.shell._values import Condition, calculate, unknown

LONGEST_VALUE: Final = 500_000
"""Most characters of a variable in a launch script (`A=$A$A` doubles it)."""


class Builtins(Expander):
    """Commands that the shell runs itself; a method takes a command and its expanded words, and
    returns its status."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.captured_output: list[str] | None = None
        """Texts that commands have written so far inside `$(...)`; None outside."""
        self.folder = "."
        """Folder in which a command inside `$(...)` runs."""
        self.streams: list[list[str] | None] = []
        """For every block that reads a text, the lines that are left of it; None where nobody knows
        the text."""
        self.locals: list[dict[str, Value | None]] = []
        """For every running function, the outer values of its local variables."""

    @contextmanager
    def restoring(self, names: Sequence[str]) -> Iterator[None]:
        before = {name: self.state.variables.get(name) for name in names}
        try:
            yield
        finally:
            self.restore(before)

    def restore(self, before: Mapping[str, Value | None]) -> None:
        for name, value in before.items():
            if value is None:
                self.state.variables.pop(name, None)
            else:
                self.state.variables[name] = value

    def declare(self, node: tree.Simple, argv: Sequence[Word]) -> bool:
        """Run `declare`, `typeset`, `local`, `export` or `readonly`."""
        # The outer value of a local variable is kept from the first declaration, to be put back
        # when the function ends.
        declares = bool(argv) and argv[0].text in ("declare", "typeset", "local")
        is_global = any(re.fullmatch(r"-[a-zA-Z]*g[a-zA-Z]*", word.text) for word in argv[1:])
        if self.locals and declares and not is_global:
            self._make_local(node, argv)
        if declares and any(re.fullmatch(r"-[a-zA-Z]*n[a-zA-Z]*", word.text) for word in argv[1:]):
            # `declare -n A=B` makes A another name of B.
            for assignment in node.assignments:
                self.state.references[assignment.name] = (
                    self.joined(assignment.value).text if assignment.value else ""
                )
            return True
        for assignment in node.assignments if declares else ():
            self.state.references.pop(assignment.name, None)
        self.assign(node.assignments)
        for word in argv[1:]:
            # `export $VARIABLES` may hold whole assignments.
            name, sign, value = word.text.partition("=")
            if sign and name.isidentifier():
                self.state.variables[name] = {"0": Word(value, word.line)}
        return True

    def _make_local(self, node: tree.Simple, argv: Sequence[Word]) -> None:
        """Keep the outer values of the variables that a function declares, with a value or
        without."""
        bare_names = [word.text for word in argv[1:] if word.text.isidentifier()]
        for name in [*bare_names, *(assignment.name for assignment in node.assignments)]:
            if name not in self.locals[-1]:
                self.locals[-1][name] = self.state.variables.get(name)
                if name in bare_names:
                    self.state.variables.pop(name, None)

    def assign(self, assignments: Sequence[tree.Assignment]) -> None:
        """Set variables: plain ones, elements of arrays, or whole arrays, anew or appended to."""
        for assignment in assignments:
            name = self.state.references.get(assignment.name, assignment.name)
            before = self.state.variables.get(name, {})
            if assignment.elements is not None:
                value = self._array(assignment.elements, before if assignment.appends else {})
            else:
                value = self._with_word(assignment, name, before)
            if sum(len(word.text) for word in value.values()) > LONGEST_VALUE:
                raise broken(
                    self.state.place,
                    assignment.line,
                    f"{name} grows too large; this is not a launch script",
                )
            self.state.variables[name] = value

    def _array(self, elements: Sequence[tuple[str | None, tree.RawWord]], before: Value) -> Value:
        """An array's value with further elements: each at its index, or behind the last."""
        value = dict(before)
        following = next_index(value)
        for index, raw in elements:
            if index is not None:
                position = self.index(index)
                value[position] = self.joined(raw)
                # Elements without an index go on behind the one before them, which need not be the
                # last.
                following = next_index({position: value[position]})
                continue
            # One word of the script may become many: `$HOSTS`, `{1..8}`.
            for word in with_braces(self.expand(raw)):
                value[following] = word
                following = str(int(following) + 1)
        return value

    def _with_word(self, assignment: tree.Assignment, name: str, before: Value) -> Value:
        """A variable's value after a plain assignment, or one to an element."""
        word = self.joined(assignment.value) if assignment.value else Word("", assignment.line)
        # A reference to the variable in its own first value is empty.
        word = Word(word.text.replace(f"${{{name}}}", ""), word.line)
        position = "0" if assignment.index is None else self.index(assignment.index)
        if assignment.appends and position in before:
            word = Word(before[position].text + word.text, before[position].line)
        return {position: word} if assignment.index is None else {**before, position: word}

    def old_test(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        texts: list[str] = []
        for raw in node.raw_words[1:]:
            texts += self.condition_texts(raw)
        if texts and texts[-1] == "]":
            texts.pop()
        return Condition(texts, double=False, exists=self.exists, is_set=self.is_set).value()

    def condition_of(self, node: tree.Test) -> bool | None:
        texts = []
        is_pattern = False
        for raw in node.raw_words:
            texts.append(self.pattern(raw) if is_pattern else self.condition_text(raw))
            # The right side of a comparison is a pattern.
            is_pattern = bool(raw.parts) and raw.parts[0].text in ("==", "=", "!=")
        condition = Condition(texts, double=True, exists=self.exists, is_set=self.is_set)
        value = condition.value()
        if condition.matched is not None:
            groups = enumerate(condition.matched)
            self.state.variables["BASH_REMATCH"] = {str(i): Word(text, 0) for i, text in groups}
        return value

    def condition_texts(self, raw: tree.RawWord) -> list[str]:
        """Words of a condition; unset variables are empty."""
        return [unset_as_empty(word.text) for word in self.expand(raw)]

    def condition_text(self, raw: tree.RawWord) -> str:
        return unset_as_empty(self.joined(raw).text)

    def pattern(self, raw: tree.RawWord) -> str:
        """A pattern, in which quoted characters stand for themselves."""
        text = ""
        for part in raw.parts:
            piece = self.joined(tree.RawWord((part,), raw.line)).text
            if part.quoted:
                text += re.sub(r"([*?\[])", r"[\1]", piece)
            else:
                text += piece
        return unset_as_empty(text)

    def is_set(self, reference: str) -> bool:
        """Whether a variable, or the element of an array (`NAME[2]`), has a value, even an empty
        one (`[[ -v NAME ]]`)."""
        match = re.fullmatch(r"(\w+)(?:\[(.+)\])?", reference)
        elements = self.stated(match[1], 0) if match else None
        if match is None or elements is None:
            return False
        if match[2] in ("@", "*"):
            return bool(elements)
        # The name alone stands for the first element.
        return (self.index(match[2]) if match[2] else "0") in elements

    def exists(self, name: str) -> bool | None:
        """Whether a file exists, which is known only for files in the script's folder and for those
        that it writes."""
        if unknown(name) or not name:
            return None
        local_file = self.beside(name)
        if Path(name).name in self.state.files or (local_file is not None and local_file.exists()):
            return True
        return None

    def set_arguments(self, node: tree.Simple, argv: list[Word]) -> bool:
        # `set -- a b` replaces the arguments; `set -euo pipefail` sets options of the shell.
        texts = [word.text for word in argv]
        if "--" in texts:
            self.state.arguments = argv[texts.index("--") + 1 :]
        elif len(argv) > 1 and not texts[1].startswith(("-", "+")):
            self.state.arguments = argv[1:]
        return True

    def shift(self, node: tree.Simple, argv: list[Word]) -> bool:
        number = calculate(argv[1].text) if len(argv) > 1 else 1
        if number is None or not 0 <= number <= len(self.state.arguments):
            return False
        del self.state.arguments[:number]
        return True

    def unset(self, node: tree.Simple, argv: list[Word]) -> bool:
        for word in argv[1:]:
            # A copy: the same elements may still be the value that a subshell puts back.
            element = re.fullmatch(r"(\w+)\[(.+)\]", word.text)
            if element and element[1] in self.state.variables:
                value = dict(self.state.variables[element[1]])
                value.pop(self.index(element[2]), None)
                self.state.variables[element[1]] = value
            else:
                self.state.variables.pop(word.text, None)
        return True

    def let(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        values = [self.arithmetic(word.text, node.line) for word in argv[1:]]
        return None if None in values else bool(values and values[-1])

    def read(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        """Run `read`: variables take the words of the next line."""
        names = [word.text for word in argv[1:] if word.text.isidentifier()]
        # Only text that the script itself holds can be read; standard input is nobody's.
        if not names:
            return None
        is_last = False
        if node.here is None:
            line = self.next_line(argv)
            if line is None:
                return None
            # A line that ends without an end of line is read, but ends a loop.
            text = line.removesuffix("\n")
            is_last = not line.endswith("\n")
        else:
            here_text = self.known_text(node.here)
            if here_text is None:
                return None
            text = here_text.strip("\n")
        characters = self.separators()
        if any(re.match(r"-[A-Za-z]*a", word.text) for word in argv[1:]):
            elements = divided_at(text, characters)
            self.state.variables[names[-1]] = {
                str(i): Word(piece, node.line, unknown(text)) for i, piece in enumerate(elements)
            }
            return not is_last
        # The last name takes what is left; names without a piece are empty.
        values = [*divided_at(text, characters, len(names)), *[""] * len(names)]
        for name, value in zip(names, values, strict=False):
            self.state.variables[name] = {
                "0": Word(value, node.line if node.here is None else node.here.line)
            }
        return not is_last

    def next_line(self, argv: Sequence[Word]) -> str | None:
        """The next line of the text that the block around reads, empty at its end; None if nobody
        knows it."""
        lines = self.streams[-1] if self.streams else None
        # Options that read from another descriptor, or up to another character.
        if lines is None or any(re.match(r"-[A-Za-z]*[dnNut]", word.text) for word in argv[1:]):
            return None
        return lines.pop(0) if lines else ""

    @contextmanager
    def reading(self, text: str | None) -> Iterator[None]:
        """A block that reads a text; None for one that nobody knows."""
        # Not `splitlines`, which knows more ends of lines than the shell does.
        self.streams.append(None if text is None else re.findall(r"[^\n]*\n|[^\n]+", text))
        try:
            yield
        finally:
            self.streams.pop()

    def known_text(self, here_text: tree.HereText) -> str | None:
        """A text to be read; None for the output of an unknown program, but not for a text with
        unset variables."""
        text = self.text_of(here_text)
        return None if here_text.is_output and unknown(text) else text

    def lines_of(self, here_text: tree.HereText) -> str | None:
        """A text as a block reads it, in whole lines; None if nobody knows it."""
        text = self.known_text(here_text)
        return None if text is None else as_lines(here_text, text)

    def text_for(self, node: tree.Fed) -> str | None:
        """The text that a block reads; None if nobody knows it."""
        if node.here is not None:
            return self.lines_of(node.here)
        name = self.joined(node.file).text if node.file is not None else ""
        return None if unknown(name) else self.script_beside(name)

    def map_file(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        """Run `mapfile -t LINES < <(command)`, which makes every line an element of an array."""
        if node.here is None:
            return None
        here_text = self.known_text(node.here)
        if here_text is None:
            return None
        text = here_text.rstrip("\n")
        names = [word.text for word in argv[1:] if word.text.isidentifier()]
        lines = text.split("\n") if text else []
        self.state.variables[names[-1] if names else "MAPFILE"] = {
            str(i): Word(line, node.line) for i, line in enumerate(lines)
        }
        return True

    def getopts(self, node: tree.Simple, argv: list[Word]) -> bool | None:
        """Run `getopts`, which reads the next option of the script's arguments.

        Scripts call it in a loop, as in `while getopts "n:g:" option`.
        """
        if len(argv) < 3:
            return None
        # The position of the next option is a variable of the script, OPTIND,
        # so that the loop around needs no state here.
        options = argv[1].text
        option_variable = argv[2].text
        arguments = self.state.arguments
        position = int(self.value_of("OPTIND", "1"))
        if position > len(arguments) or not re.match(r"-\w", arguments[position - 1].text):
            return False
        letter = arguments[position - 1].text[1]
        value = arguments[position - 1].text[2:]
        position += 1
        # A value may also be the next argument: `-n 8` for `-n8`.
        takes_value = f"{letter}:" in options
        if takes_value and not value and position <= len(arguments):
            value = arguments[position - 1].text
            position += 1
        results = {option_variable: letter, "OPTARG": value, "OPTIND": str(position)}
        for variable, text in results.items():
            self.state.variables[variable] = {"0": Word(text, node.line)}
        return True

    def value_of(self, name: str, default: str) -> str:
        value = self.state.variables.get(name)
        return (
            value["0"].text if value and "0" in value and value["0"].text.isdecimal() else default
        )

    def change_folder(self, node: tree.Simple, argv: list[Word]) -> bool:
        if self.captured_output is not None:
            # Options (`cd -P`) and the `--` that ends them are not a folder.
            folders = [word.text for word in argv[1:] if not re.fullmatch(r"--|-[LPe]+", word.text)]
            self.folder = str(PurePosixPath(self.folder, folders[0])) if folders else "~"
        return True

    def beside(self, name: str) -> Path | None:
        """The file of this name in the script's folder, its parent or below; None for files
        elsewhere."""
        if not name or self.state.place in ("", "-"):
            return None
        # A stranger's script must not make this program read files elsewhere on the machine.
        folder = Path(self.state.place).parent
        outermost = folder.resolve().parent
        # A part that is not known may be the folder itself, as in
        # `$(git rev-parse --show-toplevel)/sizes.sh`.
        known = re.sub(r"^.*[})]/", "", name) if unknown(name) else name
        try:
            for candidate in (Path(known), folder / known):
                inside = outermost in candidate.resolve().parents
                if inside and candidate.is_file():
                    return candidate
        except (OSError, ValueError, RuntimeError):
            return None
        return None

    def script_beside(self, name: str) -> str | None:
        """The text of a script that this one writes, or that is in the same folder."""
        written = self.state.files.get(Path(name).name)
        if written is not None:
            return written
        path = self.beside(name)
        try:
            if path is None or path.stat().st_size > LONGEST_VALUE:
                return None
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return None
