"""How hard each room of the package is to read: figures to look at beside those of other codebases
(`make reading`).

None of them is a limit. Each points at a habit: a line that packs several thoughts, a name that
could stand for anything, a record that nobody can hold in mind.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
VAGUE_NAMES = frozenset(
    (
        *(
            "found",
            "one",
            "own",
            "of",
            "told",
            "held",
            "kept",
            "given",
            "mine",
            "some",
            "other",
            "others",
            "whole",
        ),
        *("like", "left", "dealt", "words", "to", "where", "by", "per"),
    )
)
DOOR_HELPERS = frozenset(("lazy_names", "shorten_reprs"))


@dataclass
class Figures:
    """Counts over the modules of a folder."""

    code_lines: int = 0
    characters: int = 0
    """Of code lines, without indentation."""
    comment_lines: int = 0
    nested_comprehensions: int = 0
    unformatted: int = 0
    """Statements that the formatter is told to skip."""
    vague_names: int = 0
    widest_record: int = 0
    largest_facade: int = 0
    """Names that the `__init__.py` of a folder offers from modules of its package."""

    def row(self, name: str) -> str:
        """A row of the table."""
        code_lines = max(1, self.code_lines)
        cells = [
            name,
            f"{self.code_lines:,}",
            f"{self.characters / code_lines:.1f}",
            f"{100 * self.comment_lines / code_lines:.1f}",
            str(self.nested_comprehensions),
            str(self.unformatted),
            f"{self.vague_names:,}",
            str(self.widest_record),
            str(self.largest_facade),
        ]
        return f"| {' | '.join(cells)} |"


HEAD = """\
| room | code lines | characters per line | comments per 100 | nested comprehensions | `fmt: skip` | vague names \
| widest record | largest facade |
|---|--:|--:|--:|--:|--:|--:|--:|--:|"""


def figures_of(folder: Path) -> Figures:
    """The figures of all modules below a folder."""
    figures = Figures()
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        _count_lines(figures, text, tree)
        _count_nodes(figures, tree)
        if path.name == "__init__.py":
            figures.largest_facade = max(figures.largest_facade, _names_offered(path, tree))
    return figures


def _names_offered(door: Path, tree: ast.Module) -> int:
    """Number of names that a door imports from its package; helpers that the door itself calls
    (`lazy_names`, `shorten_reprs`) and names of other libraries are none that it offers."""
    count = 0
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        is_of_package = node.level > 0 or (node.module or "").partition(".")[0] in door.parts
        names = [alias for alias in node.names if alias.name not in DOOR_HELPERS]
        count += is_of_package * len(names)
    return count


def _count_lines(figures: Figures, text: str, tree: ast.Module) -> None:
    lines = text.splitlines()
    comments = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        figures.unformatted += "fmt: skip" in token.string
        row = token.start[0]
        if lines[row - 1].lstrip().startswith("#"):
            comments.add(row)
    docstrings = _docstring_lines(tree)
    for row, line in enumerate(lines, 1):
        if line.strip() and row not in comments and row not in docstrings:
            figures.code_lines += 1
            figures.characters += len(line.strip())
    figures.comment_lines += len(comments)


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of bare strings: docstrings of modules, classes, functions and fields."""
    rows: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for statement in body:
            is_string = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            if is_string and isinstance(statement.value.value, str):
                rows.update(range(statement.lineno, statement.end_lineno + 1))
    return rows


def _count_nodes(figures: Figures, tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            inside = any(
                isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node
            )
            figures.nested_comprehensions += inside or len(node.generators) > 1
        elif isinstance(node, FUNCTIONS):
            arguments = (*node.args.args, *node.args.kwonlyargs)
            figures.vague_names += sum(argument.arg in VAGUE_NAMES for argument in arguments)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            figures.vague_names += node.id in VAGUE_NAMES
        elif isinstance(node, ast.ClassDef):
            fields = sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
            figures.widest_record = max(figures.widest_record, fields)


def rooms_of(package: Path) -> list[Path]:
    """Folders of a package that hold modules."""
    return sorted(folder for folder in package.iterdir() if (folder / "__init__.py").is_file())


if __name__ == "__main__":
    packages = [Path(argument) for argument in sys.argv[1:]] or [
        Path(__file__).parents[1] / "perfmodel"
    ]
    print(HEAD)
    for package in packages:
        print(figures_of(package).row(package.name))
        for room in rooms_of(package):
            print(figures_of(room).row(f"`{room.name}`"))
