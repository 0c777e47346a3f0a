"""Lines that commands print: in a window, what continues a line is indented below it."""

import ast
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from _outputs import pages, shown_on
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.display import new_console, say

CLI = Path(__file__).parents[2] / "perfmodel" / "cli"
COLUMNS = 80
COPIED = re.compile(r"(next|wrote|measure first|\s*it shows whether): |\s+[+-] ")
"""Beginnings of lines that are copied, or read by programs, and never broken."""
FILES = ("perfmodel hook", "perfmodel samples")
"""Commands that print the content of a file."""


def printed(line: str, width: int, *, by_console: bool) -> list[str]:
    """Lines that a window of this width shows."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setenv("COLUMNS", str(width))
        if by_console:
            new_console().print(line, markup=False)
        else:
            say(line)
    return out.getvalue().splitlines()


@given(
    indent=st.integers(0, 4),
    words=st.lists(st.text("ab-=/", min_size=1, max_size=30), min_size=1, max_size=12),
    width=st.integers(20, 80),
    by_console=st.booleans(),
)
def test_further_lines_are_indented_below_their_first(
    indent: int, words: list[str], width: int, by_console: bool
) -> None:
    first, *further = printed(" " * indent + " ".join(words), width, by_console=by_console)
    assert " ".join([first, *further]).split() == words
    assert len(first) - len(first.lstrip()) == indent
    assert all(len(piece) - len(piece.lstrip()) == indent + 2 for piece in further)
    assert all(len(piece) <= width or len(piece.split()) == 1 for piece in (first, *further))


def test_a_file_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line = " ".join(["word"] * 100)
    with redirect_stdout(io.StringIO()) as out:
        say(line)
        new_console().print(line)
    assert out.getvalue().splitlines() == [line, line]


def test_commands_print_by_functions_that_know_the_window() -> None:
    """`print` would leave the breaking of long lines to the terminal, in the middle of words."""
    by_themselves = [
        f"{path.name}:{node.lineno}"
        for path in sorted(CLI.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not by_themselves


def test_no_printed_line_on_a_page_leaves_the_window() -> None:
    """Only what is copied is longer: commands, files, and lines that end in a layout."""
    outputs = [
        (page.name, shown.output)
        for page in pages()
        for shown in shown_on(page)
        if not shown.command.startswith(FILES)
    ]
    long = [
        f"{name}: {line}"
        for name, output in outputs
        for line in output.splitlines()
        if len(line) > COLUMNS and not COPIED.match(line) and len(line.split()[-1]) < 30
    ]
    assert not long
    assert len(outputs) > 10


def test_one_of_something_is_in_the_singular() -> None:
    wrong = [
        f"{page.name}: {phrase}"
        for page in pages()
        for shown in shown_on(page)
        for phrase in re.findall(
            r"(?<![\d.,=])1 (?:rows|runs|devices|layouts|nodes|steps)\b", shown.output
        )
    ]
    assert not wrong
