"""Commands on the pages with what they print.

python docs/_outputs.py

A block of a page that is marked `console` begins with `$ perfmodel ...`, and goes on with what that
prints at 80 columns. The commands of a page run one after another in one folder, which holds the
files of `perfmodel samples` and those that the page shows before (blocks that begin with
`# NAME.toml`). A command that ends in `| head -5` shows the first five lines of its output, one
that ends in `| tail -5` the last five. Run as a script this renews what has changed;
`tests/test_docs.py` fails where a page is stale. What a page leaves out stands as `...`.
"""

import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from perfmodel.cli import main as command
from perfmodel.cli import samples
from perfmodel.display import with_hanging_indent

HERE = Path(__file__).parent
MADE = ("accuracy", "notebooks", "reference")
"""Folders that `_pages.py` makes."""
_BLOCK = re.compile(r"^```(?P<language>[^`\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*)\n(?P<output>.*)", re.DOTALL)
_PART = re.compile(r"\s*\| (?P<end>head|tail) -(?P<lines>\d+)$")
_FILE = re.compile(r"# (?P<name>\w+\.(?:toml|csv|py|txt|sh|ya?ml|json))\n")
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_TAKEN = re.compile(r",\s+in\s+\d[\d,]*(?:\.\d+)?\s+(?:ms|s|min)\b")
TOLERANCE = 0.01
"""Relative difference of a number that is none: other machines round otherwise."""


@dataclass(frozen=True)
class Shown:
    """A command on a page and what the page says that it prints."""

    page: Path
    command: str
    output: str
    place: int
    """Number of the command on its page, from 0."""

    def printed(self) -> str:
        """The current output of the command, with its errors."""
        return printed_on(self.page)[self.place]


def pages() -> list[Path]:
    """All pages that are written by hand."""
    return [path for path in sorted(HERE.rglob("*.md")) if path.parent.name not in MADE]


def shown_on(page: Path) -> Iterator[Shown]:
    """Commands of a page whose output it shows."""
    place = 0
    for block in _BLOCK.finditer(page.read_text()):
        if block["language"] == "console":
            match = _COMMAND.fullmatch(block["body"])
            assert match is not None, f"{page}: a console block begins with a command"
            yield Shown(page, match["command"], match["output"], place)
            place += 1


@cache
def printed_on(page: Path) -> list[str]:
    """Run the commands of a page in one folder, in its order; returns what each prints."""
    printed = []
    with TemporaryDirectory() as folder, chdir(folder), _window_of(80):
        for name, text in samples().items():
            Path(name).write_text(text)
        for block in _BLOCK.finditer(page.read_text()):
            write_named_file(block["body"])
            if block["language"] == "console":
                match = _COMMAND.fullmatch(block["body"])
                assert match is not None, f"{page}: a console block begins with a command"
                printed.append(_printed(match["command"]))
    return printed


def write_named_file(block: str) -> bool:
    """Write the file that a block shows, if its first line names one; whether it does."""
    named = _FILE.match(block)
    if named is None:
        return False
    # JSON has no comments.
    is_json = named["name"].endswith(".json")
    Path(named["name"]).write_text(block[named.end() :] if is_json else block)
    return True


def arguments_of(command_line: str) -> list[str]:
    """Arguments of a command line of perfmodel, without a pipe, a redirection or comments."""
    words = shlex.split(command_line.replace("\\\n", " "), comments=True)
    assert words[0] == "perfmodel", f"{command_line}: only commands of perfmodel are run"
    ends = [words.index(sign) for sign in ("|", ">") if sign in words]
    return words[1 : min(ends, default=None)]


def _printed(command_line: str) -> str:
    """Standard error of a command line, and the part of its standard output that it asks for."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        command(arguments_of(command_line))
    lines = out.getvalue().splitlines()
    if part := _PART.search(command_line):
        n = int(part["lines"])
        lines = lines[:n] if part["end"] == "head" else lines[-n:]
    # A window breaks notes and errors, which are lines of their own where they are piped.
    columns = shutil.get_terminal_size().columns
    notes = [
        with_hanging_indent(line, columns) if line.startswith("perfmodel: ") else line
        for line in err.getvalue().splitlines()
    ]
    return "".join(f"{line.rstrip()}\n" for line in (*notes, *lines))


@contextmanager
def _window_of(columns: int) -> Iterator[None]:
    """Let commands print as in a window of this width."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before


def is_current(shown: str, printed: str) -> bool:
    """Whether a page shows what is printed: the same words, and numbers but for rounding; `...`
    stands for anything, and how long a command took is not compared."""
    shown = _TAKEN.sub(", in a while", shown)
    printed = _TAKEN.sub(", in a while", printed)
    # First the words, with every number as 0: spaces move where numbers have more digits.
    shown_words = _NUMBER.sub("0", shown).split()
    pattern = r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*?") for word in shown_words)
    if re.fullmatch(rf"\s*{pattern}\s*", _NUMBER.sub("0", printed), re.DOTALL) is None:
        return False
    if "..." in shown:  # which number stands for which is open
        return True
    pairs = zip(_numbers(shown), _numbers(printed), strict=True)
    return all(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) for a, b in pairs)


def _without_numbers(text: str) -> str:
    return _NUMBER.sub("0", text)


def _numbers(text: str) -> list[float]:
    """All numbers of a text, in order."""
    return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]


def renew(page: Path) -> bool:
    """Write what commands print now into a page where it is stale; whether anything was."""
    text = before = page.read_text()
    for shown in shown_on(page):
        printed = shown.printed()
        # Lines may be broken elsewhere on another machine, but a page shows how they are broken.
        is_same = "..." in shown.output or _without_numbers(shown.output) == _without_numbers(
            printed
        )
        if not is_same or not is_current(shown.output, printed):
            # The marker and the command stay: only what follows is renewed.
            old = f"```console\n$ {shown.command}\n{shown.output}```"
            text = text.replace(old, f"```console\n$ {shown.command}\n{printed}```")
    page.write_text(text)
    return text != before


if __name__ == "__main__":
    stale = [page for page in pages() if renew(page)]
    sys.stdout.write(
        "".join(f"{page.relative_to(HERE)}: renewed\n" for page in stale)
        or "every page is current\n"
    )
