"""Pages of the site that are made from other files: notebooks, reports, the reference."""

import argparse
import ast
import hashlib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
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


def collect() -> None:
    """Write the folders of `MADE`; files that would stay the same keep their times, others of before go."""
    pages = {HERE / folder / path.name: path.read_bytes() for folder, path in _copied()}
    pages |= {HERE / page: (HERE.parent / report).read_bytes() for report, page in _RENAMED.items()}
    reference = HERE / "reference"
    pages[reference / "commands.md"] = _commands(parser()).encode()
    pages[reference / "names.md"] = names_page().encode()
    for name in ("perfmodel", *_facades("perfmodel")):
        pages[reference / f"{name}.rst"] = _facade_page(name).encode()
    for folder in MADE:
        (HERE / folder).mkdir(exist_ok=True)
        for path in {path for path in (HERE / folder).iterdir() if path.is_file()} - set(pages):
            path.unlink()
    for path, content in pages.items():
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def fingerprint() -> str:
    """Changes with every file of the package: results of notebooks are kept for as long as it does not."""
    sources = (path for path in sorted((HERE.parent / "perfmodel").rglob("*")) if path.is_file())
    kept = (path.read_bytes() for path in sources if path.suffix != ".pyc")
    return hashlib.sha256(b"".join(kept)).hexdigest()[:16]


def _copied() -> Iterator[tuple[str, Path]]:
    for pattern, folder in _COPIES.items():
        for path in HERE.parent.glob(pattern):
            yield folder, path


def _commands(top: argparse.ArgumentParser) -> str:
    return "# Commands\n\n" + "\n".join(
        f"## {one.prog}\n\n```text\n{one.format_help().strip()}\n```\n" for one in parsers(top)
    )


def _facades(package: str) -> Iterator[str]:
    """Public packages below `package`, without the command line, which has a page of its own."""
    for found in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if not found.name.rpartition(".")[2].startswith("_") and found.name != "perfmodel.cli":
            yield found.name
            if found.ispkg:
                yield from _facades(found.name)


def _facade_page(name: str) -> str:
    module = importlib.import_module(name)
    lines = [name, "=" * len(name), "", f".. automodule:: {name}", "   :no-index:", ""]
    for public, (home, original) in sorted(_exports(name).items()):
        if name == "perfmodel":  # its names are documented where they live
            facade = ".".join(part for part in home.split(".") if not part.startswith("_"))
            lines.append(f"* `perfmodel.{public}` is :doc:`{facade}`'s ``{original}``")
        else:
            lines += _entry(f"{name}.{public}", getattr(module, public), home, original)
    return "\n".join(lines) + "\n"


def _exports(name: str) -> dict[str, tuple[str, str]]:
    """What a facade imports from the project, or defines itself: name -> (its module, its name there)."""
    tree = ast.parse(inspect.getsource(importlib.import_module(name)))
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("perfmodel"):
            found |= {alias.asname: (str(node.module), alias.name) for alias in node.names if alias.asname}
            if name == "perfmodel":
                public = {alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names}
                found |= {one: home for one, home in public.items() if one in dir(sys.modules[name])}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_") and name != "perfmodel":
            found[node.name] = (name, node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            found[node.target.id] = (name, node.target.id)
    return found


def _entry(path: str, value: object, home: str, original: str) -> list[str]:
    if inspect.ismodule(value):
        return []
    if inspect.isclass(value):
        return [f".. autoclass:: {path}", "   :members:", ""]
    if inspect.isroutine(value) or hasattr(value, "__wrapped__"):
        return [f".. autofunction:: {path}", ""]
    text = ModuleAnalyzer.for_module(home).find_attr_docs().get(("", original), [])
    return [f".. py:data:: {path}", "", *(f"   {line}" for line in text), ""]
