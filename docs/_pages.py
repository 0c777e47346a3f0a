"""Pages of the site that are made from other files: notebooks, reports, the reference."""

import argparse
import ast
import hashlib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path

from _names import names_page
from sphinx.pycode import ModuleAnalyzer

from perfmodel.cli import parser, parsers

HERE = Path(__file__).parent
MADE = ("notebooks", "accuracy", "reference")
_COPIES = {"notebooks/*.ipynb": "notebooks", "validate/*.md": "accuracy"}
_RENAMED = {
    "training/report.md": "accuracy/kernels.md",
    "validate/blind/README.md": "accuracy/blind.md",
    "training/kinds_left_out.md": "accuracy/kinds_left_out.md",
    "training/collectives_report.md": "accuracy/collectives.md",
}
_HELPERS_OF_DOORS = ("perfmodel._lazy", "perfmodel.display._repr")
"""Modules whose functions a door calls and does not offer."""


def collect() -> None:
    """Write the folders of `MADE`; files that would stay the same keep their times, others of
    before go."""
    # Everything first in memory, so that only what differs is written: Sphinx reads pages anew by
    # their times.
    pages = {HERE / folder / path.name: path.read_bytes() for folder, path in _copied()}
    pages |= {HERE / page: (HERE.parent / report).read_bytes() for report, page in _RENAMED.items()}
    reference = HERE / "reference"
    pages[reference / "commands.md"] = _commands(parser()).encode()
    pages[reference / "names.md"] = names_page().encode()
    doors = ["perfmodel", *_doors("perfmodel")]
    documented_at = _documented_at(doors)
    for door in doors:
        pages[reference / f"{door}.rst"] = _door_page(door, documented_at).encode()
    for folder in MADE:
        (HERE / folder).mkdir(exist_ok=True)
        # Pages of files that are gone would stay in the site.
        for path in {path for path in (HERE / folder).iterdir() if path.is_file()} - set(pages):
            path.unlink()
    for path, content in pages.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def fingerprint() -> str:
    """Changes with every file of the package: results of notebooks are kept for as long as it does
    not."""
    files = (path for path in sorted((HERE.parent / "perfmodel").rglob("*")) if path.is_file())
    sources = (path.read_bytes() for path in files if path.suffix != ".pyc")
    return hashlib.sha256(b"".join(sources)).hexdigest()[:16]


def _copied() -> Iterator[tuple[str, Path]]:
    """Yield the folder of the site and the file of each page that is copied as it is."""
    for pattern, folder in _COPIES.items():
        for path in HERE.parent.glob(pattern):
            yield folder, path


def _commands(top: argparse.ArgumentParser) -> str:
    """The page of all commands with their help."""
    sections = []
    for command in parsers(top):
        sections.append(f"## {command.prog}\n\n```text\n{command.format_help().strip()}\n```\n")
    return "# Commands\n\n" + "\n".join(sections)


@dataclass(frozen=True)
class PublicName:
    """A name that a door has, and where its value is defined."""

    door: str
    name: str
    home: str
    """Module in which the value is defined."""
    original: str
    """Its name there."""


def _doors(package: str) -> Iterator[str]:
    """Public modules below `package`, without the command line, which has a page of its own."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if not module.name.rpartition(".")[2].startswith("_") and module.name != "perfmodel.cli":
            yield module.name
            if module.ispkg:
                yield from _doors(module.name)


def _public_names(door: str) -> Iterator[PublicName]:
    """Names that a module offers: those it defines and, if it is a package, those it imports from
    the modules below it."""
    top_level = _statements(door)
    is_package = hasattr(importlib.import_module(door), "__path__")
    for node in top_level:
        # A package's door imports to offer; what a module imports is for its own use.
        if is_package and isinstance(node, ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        for name in names:
            home, original = _definition(door, name)
            if (
                not name.startswith("_")
                and home not in _HELPERS_OF_DOORS
                and home.startswith("perfmodel")
            ):
                yield PublicName(door, name, home, original)


def _statements(module: str) -> list[ast.stmt]:
    """Statements of a module, with those of its `if TYPE_CHECKING`."""
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    blocks = [
        statement.body if isinstance(statement, ast.If) else [statement] for statement in body
    ]
    return list(chain.from_iterable(blocks))


def _definition(module: str, name: str) -> tuple[str, str]:
    """The module that defines what `module` calls `name`, and its name there: imports are
    followed."""
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    source = str(node.module)
                    return (
                        _definition(source, alias.name)
                        if source.startswith("perfmodel")
                        else (source, alias.name)
                    )
    return module, name


def _documented_at(doors: Iterable[str]) -> dict[tuple[str, str], PublicName]:
    """The one door that documents each value: that of its home where this has the name, else the
    first in the alphabet.

    Sphinx refuses two descriptions of one object.
    """
    chosen: dict[tuple[str, str], PublicName] = {}
    # The package's own door comes last, for it has names of all others.
    for door in sorted(doors, key=lambda door: (door == "perfmodel", door)):
        for public in _public_names(door):
            value = (public.home, public.original)
            if value not in chosen or door == _public_prefix(public.home):
                chosen[value] = public
    return chosen


def _public_prefix(module: str) -> str:
    """The door in front of a module: its path up to the first private part."""
    return ".".join(takewhile(lambda part: not part.startswith("_"), module.split(".")))


def _door_page(door: str, documented_at: Mapping[tuple[str, str], PublicName]) -> str:
    """The page of a door: its names, and where those are documented that another door has too."""
    lines = [door, "=" * len(door), "", f".. automodule:: {door}", "   :no-index:", ""]
    elsewhere = []
    for public in sorted(_public_names(door), key=lambda public: public.name):
        place = documented_at[public.home, public.original]
        if place == public:
            lines += _entry(public)
        else:
            elsewhere.append(
                f"* ``{door}.{public.name}`` is :doc:`{place.door}`'s ``{place.name}``"
            )
    return "\n".join([*lines, *elsewhere]) + "\n"


def _entry(public: PublicName) -> list[str]:
    """The directive that documents a name; none for modules, and for what needs a package that is
    not installed."""
    try:
        value = getattr(importlib.import_module(public.door), public.name)
    except ImportError:
        return []
    path = f"{public.door}.{public.name}"
    if inspect.ismodule(value):
        return []
    if inspect.isclass(value):
        return [f".. autoclass:: {path}", "   :members:", ""]
    if inspect.isroutine(value) or hasattr(value, "__wrapped__"):
        return [f".. autofunction:: {path}", ""]
    # A value has no docstring of its own: it stands in the source below it.
    text = ModuleAnalyzer.for_module(public.home).find_attr_docs().get(("", public.original), [])
    return [f".. py:data:: {path}", "", *(f"   {line}" for line in escaped(text)), ""]


def escaped(lines: Sequence[str]) -> list[str]:
    """Plain text with `code` as reStructuredText: all else that this would read as markup is
    escaped."""
    # Every second part was between backquotes.
    parts = re.split(r"`([^`]+)`", "\n".join(lines))
    parts[::2] = [re.sub(r"([\\*|_])", r"\\\1", part) for part in parts[::2]]
    # an escaped space ends markup where a letter follows, and is not shown
    parts[1::2] = [rf"\ ``{part}``\ " for part in parts[1::2]]
    return "".join(parts).split("\n")
