"""Shell scripts as far as launch scripts need them: variables, arrays, conditions on them, the words of commands."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfmodel.ingest.launch._entries import broken
from perfmodel.ingest.launch._shell_commands import (
    ASSIGNMENT,
    State,
    Word,
    active,
    arithmetic,
    parameter,
    pieces,
    run_command,
)

_NAME: Final = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]")
_SBATCH: Final = re.compile(r"^#SBATCH\s+(?:--([\w-]+)[= ]|-N\s*)\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What a script runs."""

    commands: tuple[tuple[Word, ...], ...]
    notes: tuple[str, ...]
    """Parts that were left out, one sentence each."""
    from_environment: tuple[str, ...]
    """Numbers that the script takes from variables of the environment: `NAME=VALUE`."""
    scheduler: Mapping[str, int]
    """Numbers of `#SBATCH` lines by the name of the option (`nodes`, `gpus-per-node`)."""


def run_script(text: str, where: str, environment: Mapping[str, str]) -> Script:
    """Commands of a script with their variables expanded.

    Assignments, arrays, `${NAME:-default}`, `$((arithmetic))` and conditions on variables are followed; loops, cases
    and the output of commands are not.

    Raises:
        LaunchFileError: a quote, bracket or array that is never closed.
    """
    scheduler = {name or "nodes": int(number) for name, number in _SBATCH.findall(text)}
    state = State(where, environment, _expanded)
    if "nodes" in scheduler:
        for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
            state.variables[name] = [Word(str(scheduler["nodes"]), 0)]
    _Reader(text, state).read()
    taken = tuple(f"{name}={value}" for name, value in state.taken.items() if value.isdecimal())
    return Script(commands=tuple(state.commands), notes=tuple(state.notes), from_environment=taken, scheduler=scheduler)


class _Reader:
    """One pass over a script; commands run as soon as they end."""

    def __init__(self, text: str, state: State) -> None:
        self.text, self.state = text, state
        self.at, self.line, self.start = 0, 1, 1
        self.words: list[Word] = []
        self.buffer: list[str] = []
        self.begun = False
        """A word is open, though it may be empty (`""`)."""
        self.array: tuple[str, str, int, list[Word]] | None = None
        """Name, `+` or nothing, line and outer words of the array that is being read."""
        self.drop_next = False
        """The next word is the target of a redirection."""
        self.joined = ""
        """`&&` or `||` before the command."""

    def read(self) -> None:
        while self.at < len(self.text):
            self.step(self.text[self.at])
        if self.array is not None:
            raise broken(self.state.where, self.array[2], f"the array {self.array[0]} is never closed; add its `)`")
        self.end_command()

    def step(self, char: str) -> None:
        text, at = self.text, self.at
        if char == "\\":
            newline = text[at + 1 : at + 3] == "\r\n"
            if newline or text[at + 1 : at + 2] == "\n":
                self.line += 1
            else:
                self.put(text[at + 1 : at + 2])
            self.at += 3 if newline else 2
        elif char == "#" and not self.begun:
            end = text.find("\n", at)
            self.at = len(text) if end < 0 else end
        elif char == "\n":
            self.end_word()
            if self.array is None:
                self.end_command()
            self.line, self.at = self.line + 1, at + 1
        elif char.isspace():
            self.end_word()
            self.at += 1
        elif char == "'":
            self.quoted_plainly()
        elif char == '"':
            self.quoted()
        elif char == "$":
            self.expand(quoted=False)
        elif char == "`":
            self.put(self.enclosed("`", "`", at))
        elif char in "<>":
            self.redirect(char)
        elif char in ";&|":
            self.end_word()
            twice = text[at : at + 2] in ("&&", "||")
            self.end_command(text[at : at + 2] if twice else "")
            self.at += 2 if twice else 1
        elif char == "(":
            match = ASSIGNMENT.match("".join(self.buffer))
            if match and match.end() == len("".join(self.buffer)) and self.array is None:
                self.array = (match[1], match[2], self.line, self.words)
                self.buffer, self.begun, self.words = [], False, []
            else:
                self.end_word()
            self.at += 1
        elif char == ")":
            self.end_word()
            if self.array is not None:
                name, plus, _, outer = self.array
                if active(self.state):
                    before = self.state.variables.get(name, []) if plus else []
                    self.state.variables[name] = [*before, *self.words]
                self.words, self.array = outer, None
            self.at += 1
        else:
            self.put(char)
            self.at += 1

    def put(self, text: str) -> None:
        if not self.begun:
            self.start = self.line
        self.buffer.append(text)
        self.begun = True

    def end_word(self) -> None:
        if self.begun and not self.drop_next:
            self.words.append(Word("".join(self.buffer), self.start))
        if self.begun:
            self.drop_next = False
        self.buffer, self.begun = [], False

    def end_command(self, joined: str = "") -> None:
        self.end_word()
        words, self.words, self.drop_next = self.words, [], False
        if words:
            runs = self.joined == "" or self.state.last is (self.joined == "&&")
            run_command(self.state, words, runs)
        self.joined = joined

    def redirect(self, char: str) -> None:
        """Redirections and here-documents are no words of the command."""
        text = self.text
        if "".join(self.buffer).isdecimal():
            self.buffer, self.begun = [], False
        self.end_word()
        here = re.compile(r"<<-?\s*(['\"]?)(\w+)\1[^\n]*\n").match(text, self.at)
        if here:
            end = re.compile(rf"^\s*{here[2]}\s*$", re.MULTILINE).search(text, here.end())
            if end is None:
                raise broken(self.state.where, self.line, f"the here-document is never closed; add its {here[2]}")
            self.line += text.count("\n", self.at, end.end())
            self.at = end.end()
            return
        while self.at < len(text) and text[self.at] in "<>&":
            self.at += 1
        self.drop_next = True

    def quoted_plainly(self) -> None:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise broken(self.state.where, self.line, "a quote is opened here and never closed; add its '")
        self.put(self.text[self.at + 1 : end])
        self.line += self.text.count("\n", self.at, end)
        self.at = end + 1

    def quoted(self) -> None:
        opened = self.line
        self.put("")
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return
            if char == "$":
                self.expand(quoted=True)
                continue
            if char == "\\" and self.at + 1 < len(self.text) and self.text[self.at + 1] in '\\"$`\n':
                escaped = self.text[self.at + 1]
                # a continuation stays a space: it lies between words, and counts the lines of what follows
                self.put(escaped)
                self.line += escaped == "\n"
                self.at += 2
                continue
            self.line += char == "\n"
            self.put(char)
            self.at += 1
        raise broken(self.state.where, opened, 'a quote is opened here and never closed; add its "')

    def enclosed(self, opening: str, closing: str, at: int) -> str:
        """The text from `at` through the bracket that closes; moves behind it."""
        depth, end = 0, at
        while end < len(self.text):
            if self.text[end] == closing and (depth == 1 or (opening == closing and end > at)):
                found = self.text[at : end + 1]
                self.line += found.count("\n")
                self.at = end + 1
                return found
            depth += (self.text[end] == opening) - (self.text[end] == closing)
            end += 1
        raise broken(self.state.where, self.line, f"a `{opening}` is opened here and never closed; add its `{closing}`")

    def expand(self, *, quoted: bool) -> None:
        """What stands after a `$`."""
        text, start = self.text, self.at
        if text.startswith("$(", start):
            self.at += 1
            raw = "$" + self.enclosed("(", ")", start + 1)
            value = arithmetic(raw[3:-2], self.state) if raw.startswith("$((") else None
            self.add([Word(raw if value is None else str(value), self.line)], quoted, split=value is not None)
        elif text.startswith("${", start):
            self.at += 1
            raw = "$" + self.enclosed("{", "}", start + 1)
            found = parameter(raw[2:-1], self.state, self.line)
            self.add([Word(raw, self.line)] if found is None else found, quoted, split=found is not None)
        else:
            match = _NAME.match(text, start + 1)
            if match is None:
                self.put("$")
                self.at += 1
                return
            self.at = match.end()
            found = parameter(match[0], self.state, self.line)
            raw = "${" + match[0] + "}"
            self.add([Word(raw, self.line)] if found is None else found, quoted, split=found is not None)

    def add(self, values: list[Word], quoted: bool, *, split: bool) -> None:
        """Values go into the open word; several, and unquoted ones with spaces, are words of their own."""
        if not quoted and split:
            values = [part for word in values for part in pieces(word)]
        if not values:
            self.begun = any(self.buffer)
            return
        for i, word in enumerate(values):
            if i:
                self.end_word()
            self.put(word.text)
            if len(values) > 1:
                # where a word of several was written says more than where all are used
                self.start = word.line


def _expanded(text: str, state: State, line: int) -> list[Word]:
    """A default as one word, with the variables in it."""
    inner = State(state.where, state.environment, _expanded, state.variables)
    reader = _Reader(f'"{text}"' if '"' not in text else text, inner)
    reader.line = line
    while reader.at < len(reader.text):
        reader.step(reader.text[reader.at])
    reader.end_word()
    state.taken |= inner.taken
    return [Word(" ".join(word.text for word in reader.words), line)]
