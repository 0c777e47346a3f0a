"""Commands on the pages with what they print.

python docs/_outputs.py

A block of a page that is marked `console` begins with `$ perfmodel ...`, and goes on with what that
prints at 80 columns in a folder that holds the files of `perfmodel samples`. Run as a script this
renews what has changed; `tests/test_docs.py` fails where a page is stale. What a page leaves out
stands as `...`.
"""

import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from perfmodel.cli import main as command
from perfmodel.cli import samples

HERE = Path(__file__).parent
MADE = ("accuracy", "notebooks", "reference")
"""Folders that `_pages.py` makes."""
_BLOCK = re.compile(
    r"^```console\n\$ (?P<command>(?:[^\n]*\\\n)*[^\n]*\n)(?P<output>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
TOLERANCE = 0.01
"""Relative difference of a number that is none: other machines round otherwise."""


@dataclass(frozen=True)
class Shown:
    """A command on a page and what the page says that it prints."""

    page: Path
    command: str
    output: str

    def printed(self) -> str:
        """What the command prints now, errors too."""
        program, *arguments = shlex.split(self.command.replace("\\\n", " "))
        assert program == "perfmodel", (
            f"{self.page}: a console block shows a command of perfmodel, not {program}"
        )

        # The width of pages, whatever the terminal's is; and the files that pages speak of.
        before = os.environ.get("COLUMNS")
        os.environ["COLUMNS"] = "80"
        try:
            with TemporaryDirectory() as folder, chdir(folder):
                for name, text in samples().items():
                    Path(name).write_text(text)
                with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
                    command(arguments)
        finally:
            if before is None:
                del os.environ["COLUMNS"]
            else:
                os.environ["COLUMNS"] = before
        return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def pages() -> list[Path]:
    """All pages that are written by hand."""
    return [path for path in sorted(HERE.rglob("*.md")) if path.parent.name not in MADE]


def shown_on(page: Path) -> Iterator[Shown]:
    """Commands of a page whose output it shows."""
    for block in _BLOCK.finditer(page.read_text()):
        yield Shown(page, block["command"].strip(), block["output"])


def is_current(shown: str, printed: str) -> bool:
    """Whether a page shows what is printed: the same words, and numbers but for rounding; `...`
    stands for anything."""
    # First the words, with every number as 0: spaces move where numbers have more digits.
    shown_words = _NUMBER.sub("0", shown).split()
    pattern = r"\s+".join(re.escape(word).replace(r"\.\.\.", ".*?") for word in shown_words)
    if re.fullmatch(rf"\s*{pattern}\s*", _NUMBER.sub("0", printed), re.DOTALL) is None:
        return False
    if "..." in shown:  # which number stands for which is open
        return True
    pairs = zip(_numbers(shown), _numbers(printed), strict=True)
    return all(abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) for a, b in pairs)


def _numbers(text: str) -> list[float]:
    """All numbers of a text, in order."""
    return [float(number.replace(",", "")) for number in _NUMBER.findall(text)]


def renew(page: Path) -> bool:
    """Write what commands print now into a page where it is stale; whether anything was."""
    text = before = page.read_text()
    for shown in shown_on(page):
        printed = shown.printed()
        if not is_current(shown.output, printed):
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
