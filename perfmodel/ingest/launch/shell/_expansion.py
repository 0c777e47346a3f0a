"""Expansion of the words of a launch script: variables, arithmetic and the output of a few
commands."""

import re
from collections.abc import Iterable
from typing import Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch.shell import _syntax as syntax
from perfmodel.ingest.launch.shell import _tree as tree
from perfmodel.ingest.launch.shell._state import State, Value, Word
from perfmodel.ingest.launch.shell._values import calculate, replaced, trimmed, unknown
from perfmodel.ingest.launch.shell._words import parse_word

MOST_EXPANDED: Final = 2_000_000
"""Most characters of all words of a script after expansion."""
_WORD_CHARS: Final = 10
"""Additional characters counted for every word, so that empty words are bounded too."""
_LONGEST_INDEX: Final = 18
MOST_TURNS: Final = 2_000
"""Most iterations of a loop that are followed."""
_PARAMETER: Final = re.compile(r"(!?)([A-Za-z_]\w*|\d+|[@*#?!$-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)
_SLICE: Final = re.compile(r":(?![-=+?])([^:]*)(?::(.*))?", re.DOTALL)
"""`:start` or `:start:size` behind a name; `:-`, `:=` and the like begin a default."""
_REPLACEMENT: Final = re.compile(r"/(/?)((?:\\.|\$\{[^}]*\}|[^/\\])*)(?:/(.*))?", re.DOTALL)
"""`/pattern/replacement` behind a name, with a second slash in front where all matches are
replaced; a slash behind a backslash is one of the pattern."""
_COUNTED_FIRST: Final = re.compile(r"\s*(\+\+|--)([A-Za-z_]\w*)\s*")
_ASSIGNED: Final = re.compile(
    r"\s*([A-Za-z_]\w*)\s*(\+\+|--|(?:[-+*/%]|<<|>>)?=(?!=))\s*(.*)", re.DOTALL
)


class Expander:
    """Expands the words of a script with the variables that it has set so far."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.depth = 0
        """Current depth of nested functions, scripts and expressions."""

    def joined(self, raw: tree.RawWord) -> Word:
        """Expand a word that is not split at blanks: the value of an assignment."""
        texts = []
        for part in raw.parts:
            values = self.values(part)
            separator = self.separator() if _is_joined(part) else " "
            texts.append(
                part.written if values is None else separator.join(word.text for word in values)
            )
        return Word("".join(texts), raw.line)

    def separators(self) -> str:
        """Characters at which words are divided (IFS)."""
        separators = self.state.variables.get("IFS", {}).get("0")
        return _BLANKS if separators is None else separators.text

    def separator(self) -> str:
        """Separator of the elements of an array that are written as one word: the first character
        of IFS."""
        return self.separators()[:1]

    def divided(self, word: Word) -> list[Word]:
        """Words that a value without quotes becomes."""
        separators = self.separators()
        if separators == _BLANKS:
            return pieces(word)
        return [Word(piece, word.line) for piece in divided_at(word.text, separators)]

    def expand(self, raw: tree.RawWord) -> list[Word]:
        """Expand a word to words: unquoted values are split at blanks, arrays into their
        elements."""
        expanded: list[Word] = []
        # A word is built from its parts; a part with several values closes the word with its first
        # value and begins another with its last (`-x"${A[@]}"y` becomes `-xa`, `b`, `cy`). `begun`
        # tells an empty word (`""`) from none.
        text = ""
        line = raw.line
        begun = False
        is_uncounted = False
        for part in raw.parts:
            if part.kind == "text":
                text = text + part.text
                begun = True
                continue
            values = self.values(part)
            if values is None:
                text = text + part.written
                begun = True
                is_uncounted = is_uncounted or not part.quoted
                continue
            is_uncounted = is_uncounted or (
                not part.quoted and any(unknown(value.text) for value in values)
            )
            if not part.quoted:
                divided: list[Word] = []
                for value in values:
                    divided += self.divided(value)
                values = divided
            elif len(values) > 1 and _is_joined(part):
                values = [
                    Word(self.separator().join(value.text for value in values), values[0].line)
                ]
            elif not values and (_is_joined(part) or not _is_list(part)):
                begun = True
            for i, value in enumerate(values):
                if i:
                    expanded.append(Word(text, line, is_uncounted))
                    text = ""
                if len(values) > 1:
                    # Where a word of several was written says more than where all are used.
                    line = value.line
                text = text + value.text
                begun = True
        if begun:
            expanded.append(Word(text, line, is_uncounted))
        return expanded

    def expanded(self, raw_words: Iterable[tree.RawWord]) -> list[Word]:
        """The words that several words become."""
        expanded: list[Word] = []
        for raw in raw_words:
            expanded += self.expand(raw)
        return expanded

    def values(self, part: tree.Part) -> list[Word] | None:
        """Values of a part: several of an array; None if they are not known."""
        values = self._values(part)
        # Variables made of variables double at every line.
        self.state.expanded_chars += sum(len(word.text) + _WORD_CHARS for word in values or ())
        if self.state.expanded_chars > MOST_EXPANDED:
            message = f"the script's variables expand to more than {MOST_EXPANDED:,} characters; write their values"
            raise broken(self.state.place, part.line, message)
        return values

    def _values(self, part: tree.Part) -> list[Word] | None:
        if part.kind == "text":
            return [Word(part.text, part.line)]
        if part.kind == "arithmetic":
            number = self.arithmetic(part.text, part.line)
            return None if number is None else [Word(str(number), part.line)]
        if part.kind == "output":
            text = self.output(part)
            return None if text is None else [Word(text, part.line)]
        return self.parameter(part.text, part.line)

    def output(self, part: tree.Part) -> str | None:
        """Text that a command writes; None if it is not known."""
        raise NotImplementedError

    def variable(self, name: str) -> str | None:
        """The value of a plain variable."""
        values = self.parameter(name, 0)
        return values[0].text if values else None

    def stated(self, name: str, line: int) -> Value | None:
        """The elements of a variable, which the environment may set; None if it is unset."""
        # Special parameters first; then what the script has set, which hides the environment.
        if name in ("@", "*"):
            return {str(i): word for i, word in enumerate(self.state.arguments)}
        if name == "#":
            if any(word.is_uncounted for word in self.state.arguments):
                return None
            return {"0": Word(str(len(self.state.arguments)), line)}
        if name == "0" or (name == "BASH_SOURCE" and "BASH_SOURCE" not in self.state.variables):
            return {"0": Word(self.state.name if name == "0" else self.state.place, line)}
        if name.isdecimal():
            number = int(name)
            if number <= len(self.state.arguments):
                return {"0": self.state.arguments[number - 1]}
            return None
        name = self.state.references.get(name, name)
        if name in self.state.variables:
            return self.state.variables[name]
        if name in self.state.environment:
            self.state.taken[name] = self.state.environment[name]
            return {"0": Word(self.state.environment[name], line)}
        return None

    def parameter(self, text: str, line: int) -> list[Word] | None:
        """Values of `${text}`: several of an array; None if they are not known."""
        # `${#NAME}` is a length; `$#` alone the number of arguments.
        if text.startswith("#") and len(text) > 1:
            return self.length(text[1:], line)
        match = _PARAMETER.fullmatch(text)
        if match is None:
            return None
        indirect, name, index, change = match.groups()
        # `${!PREFIX@}` lists names of variables: only the running shell knows all of them.
        if indirect and change.startswith(("@", "*")):
            return None
        # `${!A[@]}` are the keys of an array.
        if indirect and index in ("@", "*"):
            return [Word(key, line) for key in self.stated(name, line) or {}]
        if indirect:
            # `${!NAME}` is the variable whose name NAME holds.
            target = self.stated(name, line)
            if target and "0" in target:
                return self.parameter(target["0"].text + change, line)
            return None
        value = self.stated(name, line)
        several = index in ("@", "*") or name in ("@", "*")
        if value is None:
            selected = None
        elif several:
            selected = _ordered(value)
        else:
            element = "0" if index is None else self.index(index)
            # Negative indices count from the end, as in bash since 4.3.
            if element.startswith("-") and element[1:].isdecimal():
                element = str(len(value) - int(element[1:]))
            selected = [value[element]] if element in value else None
        if not change:
            return selected
        return self.changed(name, selected, change, line, several)

    def index(self, text: str) -> str:
        """The index of an array's element: a number, or the key of an associative array."""
        word = self.joined(parse_word(text.strip("\"'"), self.state.place, 0, quoted=True))
        number = self.arithmetic(word.text, 0) if not word.text.isidentifier() else None
        return word.text if number is None else str(number)

    def length(self, text: str, line: int) -> list[Word] | None:
        """Expand `${#text}` to the number of characters or elements; None if it is not known."""
        match = re.fullmatch(r"([A-Za-z_]\w*|[@*])(\[[@*]\])?", text)
        if match is None:
            return None
        stated = self.stated(match[1], line)
        value = stated or {}
        is_array = bool(match[2]) or match[1] in "@*"
        # A loop or a program whose output nobody knows may have filled an array that the script
        # never empties.
        if is_array and (stated is None or any(word.is_uncounted for word in value.values())):
            return None
        plain_text = value["0"].text if "0" in value else ""
        if not is_array and unknown(plain_text):
            return None
        size = len(value) if is_array else len(plain_text)
        return [Word(str(size), line)]

    def changed(
        self, name: str, values: list[Word] | None, change: str, line: int, several: bool
    ) -> list[Word] | None:
        """A parameter with a default, a removed part or another modification (`${NAME:-default}`,
        `${NAME%.sh}`)."""
        # POSIX: `-` default, `=` default that is kept, `+` replacement, `?`
        # error; with a colon an empty value counts as unset.
        condition = re.match(r"(:?)([-=+?])(.*)", change, re.DOTALL)
        if condition:
            colon, sign, operand = condition.groups()
            # A list without elements is not set.
            is_set = bool(values) and (not colon or any(word.text for word in values))
            if sign == "+":
                return [self.default(operand, line)] if is_set else []
            if is_set and values is not None:
                return values
            if sign == "?":
                return None
            default = self.default(operand, line)
            if sign == "=":
                self.state.variables[name] = {"0": default}
            return [default]
        if values is None:
            return None
        part = _SLICE.fullmatch(change)
        if part:
            start = self.arithmetic(part[1], line)
            size = None if part[2] is None else self.arithmetic(part[2], line)
            if start is None or (part[2] is not None and size is None):
                return None
            if not several:
                return [Word(_slice(word.text, start, size), word.line) for word in values]
            if name in "@*" and start > 0:
                # Arguments are counted from 1, elements of arrays from 0.
                start -= 1
            return [] if start < -len(values) else values[start:][:size]
        return [Word(self.altered(word.text, change, line), word.line) for word in values]

    def altered(self, text: str, change: str, line: int) -> str:
        """Apply the change of `${name<change>}` to the variable's text: trim, replace, or turn into
        other case."""
        # A pattern is tried at every position of the text, so that long texts are left alone.
        operand = re.match(r"(##|#|%%|%)(.*)", change, re.DOTALL)
        if operand:
            if len(text) < 2000:
                return trimmed(text, operand[1], self.default(operand[2], line).text)
            return text
        replacement = _REPLACEMENT.fullmatch(change)
        if replacement:
            pattern, new_text = (
                self.default(part or "", line).text for part in replacement.groups()[1:]
            )
            return replaced(text, pattern, new_text, everywhere=bool(replacement[1]))
        if change in ("^^", ",,", "^", ","):
            if change in ("^^", ",,"):
                return text.upper() if change == "^^" else text.lower()
            return (text[:1].upper() if change == "^" else text[:1].lower()) + text[1:]
        return text

    def default(self, text: str, line: int) -> Word:
        """The text after `:-` and similar operators, with its variables expanded."""
        raw = parse_word(text, self.state.place, line, quoted=False)
        return Word(self.joined(raw).text, line)

    def arithmetic(self, text: str, line: int) -> int | None:
        """The value of `$((text))`, after its assignments; None if unknown."""
        self.depth += 1
        try:
            if self.depth > syntax.DEEPEST:
                return None
            # Python's parser knows no assignments inside expressions: counting and assigning are
            # taken apart here.
            counted = _COUNTED_FIRST.fullmatch(text)
            if counted:
                self.assigned(counted[2], counted[1], "", line)
                return self.arithmetic(counted[2], line)
            assigned = _ASSIGNED.fullmatch(text)
            if assigned:
                return self.assigned(assigned[1], assigned[2], assigned[3], line)
            # First `$NAME` and `$(...)`, then bare names, which arithmetic allows too.
            raw = parse_word(text.strip('"'), self.state.place, line, quoted=True)
            plain = self.joined(raw).text
            if unknown(plain):
                return None
            # The digits of `16#ff` are not a name.
            names = r"(?<!#)\b[A-Za-z_]\w*(\[[^\]]*\])?"
            return calculate(re.sub(names, lambda match: self.number(match[0], line), plain))
        finally:
            self.depth -= 1

    def number(self, name: str, line: int) -> str:
        """The value of a variable in an expression, which may be an expression itself."""
        values = self.parameter(name, line)
        text = values[0].text if values else ""
        value = None
        if re.fullmatch(r"\s*-?\d+\s*", text):
            value = calculate(text)
        elif text:
            value = self.arithmetic(text, line)
        elif values:
            value = 0
        return "?" if value is None else f"({value})"

    def assigned(self, name: str, sign: str, expression: str, line: int) -> int | None:
        # `i++` counts and has the value from before, as in C; a value that is not known makes the
        # variable unknown.
        before = self.arithmetic(name, line)
        if sign == "=":
            after = self.arithmetic(expression, line)
        elif before is None:
            after = None
        elif sign == "++":
            after = before + 1
        elif sign == "--":
            after = before - 1
        else:
            after = self.arithmetic(f"{before} {sign[:-1]} ({expression})", line)
        if after is not None:
            self.state.variables[name] = {"0": Word(str(after), line)}
        else:
            self.state.variables.pop(name, None)
        return before if sign in ("++", "--") else after

    def text_of(self, here_text: tree.HereText) -> str:
        if here_text.word is not None:
            return self.joined(here_text.word).text
        if here_text.literal:
            return here_text.text
        return self.joined(
            parse_word(here_text.text, self.state.place, here_text.line, quoted=True)
        ).text


def pieces(word: Word) -> list[Word]:
    """Words of a text, each with its line."""
    divided: list[Word] = []
    # Continued lines inside a variable are marked by `JOINED`: each piece can still say on which
    # line it was written.
    line, before = word.line, 0
    for match in re.finditer(r"\S+", word.text):
        line += tree.lines_in(word.text[before : match.start()])
        before = match.start()
        divided.append(Word(match[0], line))
    return divided


def _slice(text: str, start: int, size: int | None) -> str:
    """Evaluate `${text:start:size}`: negative numbers count from the end of the text, and nothing
    lies before its start."""
    if start < -len(text):
        return ""
    return text[start:size] if size is not None and size < 0 else text[start:][:size]


def _is_list(part: tree.Part) -> bool:
    """Whether a part stands for any number of words, also when it is quoted (`"$@"`,
    `"${A[@]}"`)."""
    return part.kind == "parameter" and (
        part.text in ("@", "*") or "[@]" in part.text or "[*]" in part.text
    )


def _is_joined(part: tree.Part) -> bool:
    """Whether a part stands for all elements as one word when it is quoted (`"$*"`,
    `"${A[*]}"`)."""
    return part.kind == "parameter" and (part.text == "*" or "[*]" in part.text)


def shown(text: str) -> str:
    """A text as it was written, without the marks that keep words together and count lines."""
    return text.replace(tree.JOINED, "").replace(tree.HELD, " ")


def unset_as_empty(text: str) -> str:
    """A text with unset variables replaced by empty strings, as in the shell."""
    return re.sub(r"\$\{(\w+)(\[[^\]]*\])?\}", "", text.replace(tree.JOINED, ""))


def next_index(value: Value) -> str:
    numbers = [int(index) for index in value if index.isdecimal() and len(index) < _LONGEST_INDEX]
    return str(max(numbers, default=-1) + 1)


def _ordered(value: Value) -> list[Word]:
    """Elements of an array, sorted by index, or in order of assignment if indices are not
    numbers."""
    if all(index.isdecimal() for index in value):
        return [value[index] for index in sorted(value, key=int)]
    return list(value.values())


def with_braces(argv: list[Word]) -> list[Word]:
    """Words with `{1..8}` written out."""
    written: list[Word] = []
    for word in argv:
        match = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", word.text)
        if match is None or abs(int(match[3]) - int(match[2])) > MOST_TURNS:
            written.append(word)
            continue
        first = int(match[2])
        last = int(match[3])
        step = 1 if last >= first else -1
        written += [
            Word(f"{match[1]}{i}{match[4]}", word.line) for i in range(first, last + step, step)
        ]
    return written


_BLANKS: Final = " \t\n"
"""Characters that divide words where IFS is not set."""


def divided_at(text: str, separators: str, most: int = 0) -> list[str]:
    """Pieces of a text that `read`, or a variable without quotes, becomes.

    Args:
        text: the text to divide.
        separators: characters of IFS: blanks among them divide together, and the others each for
            itself.
        most: number of pieces, the last of which keeps its separators; 0 for as many as there are.
    """
    if not separators:
        return [text] if text else []
    blanks = "".join(character for character in separators if character in _BLANKS)
    marks = "".join(character for character in separators if character not in _BLANKS)
    text = text.strip(blanks) if blanks else text
    if not text:
        return []
    around = f"[{re.escape(blanks)}]*" if blanks else ""
    options = [f"{around}[{re.escape(marks)}]{around}"] if marks else []
    options += [f"[{re.escape(blanks)}]+"] if blanks else []
    pieces = re.split("|".join(options), text, maxsplit=max(0, most - 1)) if most != 1 else [text]
    # A mark at the end closes the last piece and opens none.
    if not most:
        return pieces if pieces[-1] else pieces[:-1]
    further_pieces = divided_at(pieces[-1], separators)
    return [*pieces[:-1], *further_pieces] if len(further_pieces) < 2 else pieces
