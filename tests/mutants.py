"""Mutation testing: change one formula of the package at random and see whether the tests of its room fail.

    python tests/mutants.py --count 100 --seed 1 --out out/mutants.csv
    python tests/mutants.py --rooms memory units --count 10 --seed 7

`mutants.toml` names the rooms, the files of each and the tests that watch over them. Mutants are drawn by a seed: first
a room, each in turn, then a kind of change, then a place. Each is written into a scratch copy of the repository, never
into the working tree, and the tests of its room run there until the first of them fails.

A mutant that the tests run through without a failure has survived: either a truth that no test states, or a change that
no caller can see. What nobody can see is excluded by the rules of `_is_invisible`, not by hand.
"""

import argparse
import ast
import csv
import importlib.util
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = Path(__file__).with_suffix(".toml")
LIMIT_S = 60.0
"""Seconds of processor time after which the tests of a room are stopped."""
WALL_LIMIT_S = 600.0
"""The same on the clock, for machines that do other work at the same time."""

PYTEST_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", "-m", "not slow")

SWAPPED_NAMES = (
    ("tp", "pp"),
    ("dp", "cp"),
    ("ep", "edp"),
    ("forward", "backward"),
    ("intra_node", "inter_node"),
    ("lo_s", "hi_s"),
    ("weights", "gradients"),
    ("latency_s", "time_s"),
    ("heads", "kv_heads"),
    ("hidden", "ffn_hidden"),
    ("seq_len", "global_batch"),
    ("dtype", "grad_dtype"),
    ("stages", "micro_batches"),
    ("first", "last"),
    ("m", "n"),
)
SWAPPED_CALLS = (("min", "max"), ("minimum", "maximum"), ("floor", "ceil"), ("argmin", "argmax"), ("any", "all"))
SWAPPED_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
OPPOSITE_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
SHIFTED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}

GUARDS = (1e-9, 1e15)
"""Smaller and larger constants keep divisions and logarithms finite: what they are exactly says nothing."""
INVISIBLE_KEYWORDS = (
    "strict",
    "copy",
    "maxsize",
    "frozen",
    "eq",
    "kw_only",
    "slots",
    "repr",
    "digits",
    "stacklevel",
    "title",
)
INVISIBLE_CALLS = ("round", "warn", "lru_cache", "report_progress", "cast", "astype")
HAS_TORCH = importlib.util.find_spec("torch") is not None
INVISIBLE_NAMES = ("cache", "progress", "tolerance", "rounding", "chunk_bytes")
"""Assignments and functions with these in their names decide how fast an answer comes, or how it is shown."""


@dataclass(frozen=True)
class Room:
    """Files of the package, and the tests that watch over them."""

    name: str
    tests_of_file: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Mutant:
    """One change of one expression."""

    room: str
    file: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    """Of the expression in the file, in bytes."""
    end: int


@dataclass(frozen=True)
class Verdict:
    """What the tests of its room said of a mutant."""

    outcome: str
    """`caught`, `caught: ran on` (past the limit of processor time), `SURVIVED`, or `undecided` (past the limit on the
    clock)."""
    seconds: float
    test: str
    """The first test that failed."""

    @property
    def is_caught(self) -> bool:
        """Whether the mutant was noticed."""
        return self.outcome.startswith("caught")


def read_rooms(path: Path = ROOMS) -> list[Room]:
    """The rooms of a table; files may be patterns."""
    rooms = []
    for name, entries in tomllib.loads(path.read_text()).items():
        tests_of_file = {}
        for entry in entries:
            for pattern in entry["files"]:
                for file in sorted(ROOT.glob(pattern)):
                    tests_of_file[str(file.relative_to(ROOT))] = tuple(entry["tests"])
        rooms.append(Room(name, tests_of_file))
    return rooms


# --- which changes there are ---------------------------------------------------------------------------


def mutants_of(room: str, file: str, folder: Path = ROOT) -> list[Mutant]:
    """Every change of one file below a folder that a caller could see."""
    source = (folder / file).read_bytes()
    starts_of_lines = [0]
    for line in source.splitlines(keepends=True):
        starts_of_lines.append(starts_of_lines[-1] + len(line))
    mutants = []
    for node in _visible_nodes(ast.parse(source)):
        for kind, after in _changes(node):
            start = starts_of_lines[node.lineno - 1] + node.col_offset
            end = starts_of_lines[node.end_lineno - 1] + node.end_col_offset
            before = " ".join(source[start:end].decode().split())
            mutants.append(Mutant(room, file, node.lineno, kind, before, after, start, end))
    return mutants


def _visible_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but for those below an invisible one."""
    for child in _children(tree):
        if not _is_invisible(child):
            yield child
            yield from _visible_nodes(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below a node, without annotations of types and decorators."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _is_invisible(node: ast.AST) -> bool:
    """Whether no caller sees a change: docstrings, messages, imports, guards, caches, progress, rounding for people."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.keyword(arg=str(name)):
            return name in INVISIBLE_KEYWORDS
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in INVISIBLE_CALLS or name.endswith(("Error", "Warning"))
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return _names_speed_or_looks(name)
        case ast.Assign(targets=[ast.Name(id=name)]):
            return _names_speed_or_looks(name)
        case ast.Constant(value=float(value)):
            return value != 0 and not GUARDS[0] < abs(value) < GUARDS[1]
        case ast.Compare(comparators=[ast.Constant(value=str())]):
            return "__name__" in ast.unparse(node)
    return False


def _names_speed_or_looks(name: str) -> bool:
    lowered = name.lower()
    if "torch" in lowered and not HAS_TORCH:
        return True  # nothing here can run it
    return lowered in ("__repr__", "__str__", "__all__") or any(part in lowered for part in INVISIBLE_NAMES)


def _changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Kinds of changes of an expression, each with what stands in its place."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if not (_is_text(left) or _is_text(right)):
            is_product = isinstance(op, ast.Mult | ast.Div)
            if (other := SWAPPED_OPERATORS.get(type(op))) and not (is_product and _is_one(right)):
                yield "operator", _text(ast.BinOp(left, other(), right))
            if isinstance(op, ast.Add | ast.Sub):
                yield "term dropped", _text(left)
            if isinstance(op, ast.Add):
                yield "term dropped", _text(right)
            if is_product:
                yield "factor of two", f"(2 * {_text(node)})"
            if is_product and not _is_one(right):
                yield "factor dropped", _text(left)
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "sign", _text(operand)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            yield "negation", _text(operand)
        case ast.BoolOp(op=op, values=values):
            yield "and or", _text(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if other := OPPOSITE_COMPARISONS.get(type(op)):
                yield "comparison", _text(ast.Compare(left, [other()], [right]))
            # of numbers that are counted, the boundary matters too; nothing lies on a boundary of 0 seconds or bytes
            counts = [
                side.value for side in (left, right) if isinstance(side, ast.Constant) and type(side.value) is int
            ]
            if any(counts) and (other := SHIFTED_COMPARISONS.get(type(op))):
                yield "boundary", _text(ast.Compare(left, [other()], [right]))
        case ast.Call(func=ast.Name() | ast.Attribute() as called, args=args, keywords=keywords) if args:
            name = called.id if isinstance(called, ast.Name) else called.attr
            for other in _partners(name, SWAPPED_CALLS):
                yield "min for max", _text(ast.Call(_renamed(called, other), args, keywords))
        case ast.Attribute(attr=name, ctx=ast.Load()):
            for other in _partners(name, SWAPPED_NAMES):
                yield "name", _text(_renamed(node, other))
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield "off by one", str(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", "0.5" if value == 0 else repr(2 * value)


def _is_one(node: ast.AST) -> bool:
    """Whether a factor is 1: dividing by it is multiplying by it (numbers are made floats so)."""
    return isinstance(node, ast.Constant) and node.value == 1 and type(node.value) is not bool


def _is_text(node: ast.AST) -> bool:
    """Whether a sum or product with this operand joins texts or lists."""
    if isinstance(node, ast.Tuple | ast.List | ast.ListComp | ast.JoinedStr | ast.Dict):
        return True
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _partners(name: str, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """What a name is taken for by mistake."""
    return [b if name == a else a for a, b in pairs if name in (a, b)]


def _renamed(node: ast.Name | ast.Attribute, name: str) -> ast.expr:
    return ast.Name(name) if isinstance(node, ast.Name) else ast.Attribute(node.value, name)


def _text(node: ast.expr) -> str:
    """Of an expression, in brackets where it needs them."""
    text = ast.unparse(node)
    return text if isinstance(node, ast.Constant | ast.Name | ast.Attribute | ast.Call) else f"({text})"


def draw(rooms: Sequence[Room], count: int, seed: int, folder: Path = ROOT) -> list[Mutant]:
    """So many different mutants of the package below a folder, the rooms in turn."""
    generator = random.Random(seed)
    by_kind: dict[str, dict[str, list[Mutant]]] = {}
    for room in rooms:
        kinds = by_kind.setdefault(room.name, {})
        for file in room.tests_of_file:
            for mutant in mutants_of(room.name, file, folder):
                kinds.setdefault(mutant.kind, []).append(mutant)
    drawn = []
    for i in range(count):
        kinds = by_kind[rooms[i % len(rooms)].name]
        kind = generator.choice(sorted(kinds))
        places = kinds[kind]
        drawn.append(places.pop(generator.randrange(len(places))))
        if not places:
            del kinds[kind]
    return drawn


# --- what the tests say of them ------------------------------------------------------------------------


class Scratch:
    """A copy of the repository in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"], cwd=ROOT, check=True,
                                capture_output=True, text=True).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def write(self, file: str, source: bytes) -> None:
        """Replace a file and forget what it was compiled to, which may have been in the same second."""
        path = self.folder / file
        path.write_bytes(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()

    def judge(self, mutant: Mutant, tests: Sequence[str]) -> Verdict:
        """Run tests on a mutant until the first failure."""
        source = (self.folder / mutant.file).read_bytes()
        changed = source[: mutant.start] + mutant.after.encode() + source[mutant.end :]
        self.write(mutant.file, changed)
        try:
            return self.run(tests)
        finally:
            self.write(mutant.file, source)

    def run(self, tests: Sequence[str]) -> Verdict:
        """Run tests in the copy until the first failure, or until the limit of time."""
        began = time.monotonic()
        with tempfile.TemporaryFile("w+") as output:
            # a fork has what is slow to import already, of which nothing is of the package itself
            child = os.fork()
            if child == 0:
                self._run_in_child(tests, output.fileno())
            status = _exit_status(child, began + WALL_LIMIT_S)
            output.seek(0)
            lines = output.read().splitlines()
        seconds = time.monotonic() - began
        if status is None:
            return Verdict("undecided", seconds, "")
        if status == 0:
            return Verdict("SURVIVED", seconds, "")
        if status < 0:
            return Verdict("caught: ran on", seconds, "")
        failed = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return Verdict("caught", seconds, failed[0] if failed else "; ".join(lines[-3:]))

    def _run_in_child(self, tests: Sequence[str], output: int) -> NoReturn:
        """Run pytest in this process, which ends with its exit code."""
        status = 1
        try:
            os.setsid()
            os.nice(5)
            resource.setrlimit(resource.RLIMIT_CPU, (int(LIMIT_S), int(LIMIT_S) + 5))
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(self.folder)
            os.environ["PYTHONPATH"] = str(self.folder)
            os.environ["PERFMODEL_CACHE"] = str(self.folder / "cache")
            sys.path[0] = str(self.folder)
            status = int(pytest.main([*PYTEST_OPTIONS, *tests]))
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            sys.stdout.flush()
            os._exit(status)


def _exit_status(child: int, deadline: float) -> int | None:
    """Exit code of a process, negative where a signal ended it; None where it had to be ended."""
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
    except BaseException:
        _end(child)
        raise
    _end(child)
    return None


def _end(child: int) -> None:
    """End a process and those that it started."""
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _import_what_is_slow() -> None:
    """Libraries that the tests of most rooms use, with threads and caches as a scratch copy needs them."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "mutants-xla"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    for name in ("jax.numpy", "pandas", "scipy.optimize", "scipy.special", "scipy.stats"):
        importlib.import_module(name)


COLUMNS = ("room", "file", "line", "kind", "before", "after", "outcome", "seconds", "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="*", help="names in mutants.toml; all of them by default")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", default="1/1", metavar="I/N", help="of the mutants drawn, every Nth from the Ith on")
    parser.add_argument("--places", type=int, nargs="*", metavar="N", help="of the mutants drawn, these (from --list)")
    parser.add_argument(
        "--again", type=Path, metavar="CSV", help="of the mutants drawn, those that this table has alive"
    )
    parser.add_argument("--trust", action="store_true", help="do not run the tests without any change first")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants.csv", help="a table of all verdicts")
    parser.add_argument("--list", action="store_true", help="print the mutants without running any test")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the scratch copy goes too

    rooms = {room.name: room for room in read_rooms() if not arguments.rooms or room.name in arguments.rooms}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        # the working tree may change meanwhile: all is of the copy
        scratch = Scratch(Path(folder))
        mutants = draw(list(rooms.values()), arguments.count, arguments.seed, scratch.folder)
        place_of = {mutant: place for place, mutant in enumerate(mutants)}
        if arguments.places:
            mutants = [mutants[place] for place in arguments.places]
        part, parts = map(int, arguments.part.split("/"))
        mutants = mutants[part - 1 :: parts]
        if arguments.again:
            alive = _alive(arguments.again)
            mutants = [m for m in mutants if (m.file, m.before, m.after) in alive]
        if arguments.list:
            for m in mutants:
                place = place_of[m]
                print(f"{place:3} {m.room:<12} {m.kind:<15} {m.file}:{m.line}: {m.before}  ->  {m.after}")
            return
        _import_what_is_slow()
        if not arguments.trust:
            _check_unchanged(scratch, dict.fromkeys(rooms[m.room].tests_of_file[m.file] for m in mutants))
        verdicts = _judge_all(scratch, mutants, rooms, arguments.out)
    print(_summary(mutants, verdicts, arguments.seed))


def _alive(table: Path) -> set[tuple[str, str, str]]:
    """Mutants of a table that were not caught."""
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["outcome"].startswith("caught")]
    return {(row["file"], row["before"], row["after"]) for row in rows}


def _check_unchanged(scratch: Scratch, all_tests: Iterable[tuple[str, ...]]) -> None:
    """Exit unless the tests pass without any change."""
    for tests in all_tests:
        verdict = scratch.run(tests)
        print(f"{verdict.seconds:4.0f} s without any change: {' '.join(tests)}", flush=True)
        if verdict.outcome != "SURVIVED":
            raise SystemExit(f"they fail without any change, or take too long: {verdict.test}")


def _judge_all(scratch: Scratch, mutants: Sequence[Mutant], rooms: dict[str, Room], out: Path) -> list[Verdict]:
    """The verdict on every mutant, printed and written to a table as soon as it is known."""
    verdicts = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for m in mutants:
            verdict = scratch.judge(m, rooms[m.room].tests_of_file[m.file])
            verdicts.append(verdict)
            changed = [m.room, m.file, m.line, m.kind, m.before, m.after]
            writer.writerow([*changed, verdict.outcome, round(verdict.seconds), verdict.test])
            file.flush()
            place = f"{m.kind:<15} {m.file}:{m.line}"
            print(f"{verdict.outcome:<14} {verdict.seconds:4.0f} s  {m.room:<12} {place}", flush=True)
            if not verdict.is_caught:
                print(f"    {m.before}\n    {m.after}", flush=True)
    return verdicts


def _summary(mutants: Sequence[Mutant], verdicts: Sequence[Verdict], seed: int) -> str:
    """How many mutants of every room were caught."""
    caught_of_room: dict[str, list[bool]] = {}
    for mutant, verdict in zip(mutants, verdicts, strict=True):
        caught_of_room.setdefault(mutant.room, []).append(verdict.is_caught)
    lines = [f"{room:<14} {sum(caught)} of {len(caught)}" for room, caught in caught_of_room.items()]
    caught = sum(verdict.is_caught for verdict in verdicts)
    return "\n".join([*lines, f"{caught} of {len(verdicts)} mutants caught, seed {seed}"])


if __name__ == "__main__":
    main()
