"""Mutation testing: change one formula of the package at random and see whether the tests of its
room fail.

    python tests/mutants.py --count 100 --seed 1 --out out/mutants.csv
    python tests/mutants.py --rooms memory units --count 10 --seed 7
    python tests/mutants.py --count 100 --seed 1 --out out/mutants.csv --resume

`mutants.toml` names the rooms, the files of each and the tests that watch over them. Mutants are
drawn by a seed: first a room, each in turn, then a kind of change, then a place. Each is written
into a scratch copy of the repository, never into the working tree, and the tests of its room run
there until the first of them fails.

A mutant that the tests run through without a failure has survived: either a truth that no test
states, or a change that no caller can see. The tests have a minute of processor time, which other
work on the machine does not use up. A run that was stopped goes on with `--resume`; after new
tests, `--again` judges what survived.
"""

import argparse
import csv
import importlib
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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from formula_changes import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
ROOMS = Path(__file__).with_suffix(".toml")
LIMIT_S = 60.0
"""Seconds of processor time after which the tests of a room are stopped."""
WALL_LIMIT_S = 600.0
"""The same on the clock, for machines that do other work at the same time."""

PYTEST_OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-rfE", "-m", "not slow")


@dataclass(frozen=True)
class Room:
    """Files of the package, and the tests that watch over them."""

    name: str
    tests_of_file: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Verdict:
    """What the tests of its room said of a mutant."""

    outcome: str
    """`caught`, `caught: ran on` (past the limit of processor time, of which the unchanged tests
    need half at most), `SURVIVED`, or `undecided` (past a limit)."""
    seconds: float
    """Of processor time, with the processes that the tests started and waited for."""
    test: str
    """The first test that failed."""

    @property
    def is_caught(self) -> bool:
        """Whether the mutant was noticed."""
        return self.outcome.startswith("caught")


def read_rooms(path: Path = ROOMS) -> list[Room]:
    """The rooms of a table; files may be patterns."""
    rooms: list[Room] = []
    for name, entries in tomllib.loads(path.read_text()).items():
        tests_of_file: dict[str, tuple[str, ...]] = {}
        for entry in entries:
            for pattern in entry["files"]:
                for file in sorted(ROOT.glob(pattern)):
                    tests_of_file[str(file.relative_to(ROOT))] = tuple(entry["tests"])
        rooms.append(Room(name, tests_of_file))
    return rooms


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


# --- what the tests say of them
# ------------------------------------------------------------------------


class Scratch:
    """A copy of the repository in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unchanged: dict[tuple[str, ...], Verdict] = {}
        listed = subprocess.run(
            ["git", "ls-files", "-z", "-c", "-o", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def write(self, file: str, source: bytes) -> None:
        """Replace a file and forget what it was compiled to, which may have been in the same
        second."""
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
            verdict = self.run(tests)
        finally:
            self.write(mutant.file, source)
        if verdict.outcome == "caught: ran on" and self.unchanged(tests).seconds > LIMIT_S / 2:
            # These tests need most of their time without any change, and say nothing by taking
            # longer.
            return Verdict("undecided", verdict.seconds, "")
        if (
            verdict.is_caught
            and verdict.test
            and "::" not in verdict.test
            and self.run(tests).outcome != "SURVIVED"
        ):
            # No test failed, but none could be imported: of the package as it is neither, so the
            # machine is at fault.
            raise SystemExit(f"the tests cannot run at all: {verdict.test}")
        return verdict

    def unchanged(self, tests: Sequence[str]) -> Verdict:
        """Outcome of the tests on the unchanged package."""
        key = tuple(tests)
        if key not in self._unchanged:
            self._unchanged[key] = self.run(tests)
        return self._unchanged[key]

    def run(self, tests: Sequence[str]) -> Verdict:
        """Run tests in the copy until the first failure, or until the limit of time."""
        with tempfile.TemporaryFile("w+") as output:
            # a fork has what is slow to import already, of which nothing is of the package itself
            child = os.fork()
            if child == 0:
                self._run_in_child(tests, output.fileno())
            status, seconds = _exit_status(child, time.monotonic() + WALL_LIMIT_S)
            output.seek(0)
            lines = output.read().splitlines()
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


def _exit_status(child: int, deadline: float) -> tuple[int | None, float]:
    """Exit code and processor seconds of a process; negative where a signal ended it, None where it
    had to be ended."""
    try:
        while time.monotonic() < deadline:
            ended, status, usage = os.wait4(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            time.sleep(0.05)
    except BaseException:
        _end(child)
        raise
    return None, _end(child)


def _end(child: int) -> float:
    """End a process and those that it started, and return its processor seconds."""
    os.killpg(child, signal.SIGKILL)
    _, _, usage = os.wait4(child, 0)
    return usage.ru_utime + usage.ru_stime


def _import_what_is_slow() -> None:
    """Libraries that the tests of most rooms use, with threads and caches as a scratch copy needs
    them."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault(
        "JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / "mutants-xla")
    )
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    for name in ("jax.numpy", "pandas", "scipy.optimize", "scipy.special", "scipy.stats"):
        importlib.import_module(name)


COLUMNS = ("room", "file", "line", "kind", "before", "after", "outcome", "seconds", "test")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rooms", nargs="*", help="names in mutants.toml; all of them by default")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--part",
        default="1/1",
        metavar="I/N",
        help="of the mutants drawn, every Nth from the Ith on",
    )
    parser.add_argument(
        "--places",
        type=int,
        nargs="*",
        metavar="N",
        help="of the mutants drawn, these (from --list)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the verdicts of the table `--out`; judge the rest",
    )
    parser.add_argument(
        "--again", action="store_true", help="the same, but judge what survived or was undecided"
    )
    parser.add_argument("--next", type=int, metavar="N", help="judge at most so many more")
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests without any change first"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "out" / "mutants.csv", help="a table of all verdicts"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the mutants without running any test"
    )
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the scratch copy goes too

    rooms = {
        room.name: room
        for room in read_rooms()
        if not arguments.rooms or room.name in arguments.rooms
    }
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        # the working tree may change meanwhile: all is of the copy
        scratch = Scratch(Path(folder))
        mutants = draw(list(rooms.values()), arguments.count, arguments.seed, scratch.folder)
        place_of = {mutant: place for place, mutant in enumerate(mutants)}
        if arguments.places:
            mutants = [mutants[place] for place in arguments.places]
        part, parts = map(int, arguments.part.split("/"))
        mutants = mutants[part - 1 :: parts]
        known: dict[Mutant, Verdict] = {}
        if (arguments.resume or arguments.again) and arguments.out.exists():
            known = _known_verdicts(arguments.out, mutants)
        if arguments.again:
            known = {mutant: verdict for mutant, verdict in known.items() if verdict.is_caught}
        left = [mutant for mutant in mutants if mutant not in known][: arguments.next]
        if arguments.list:
            for m in left:
                place = place_of[m]
                print(
                    f"{place:3} {m.room:<12} {m.kind:<15} {m.file}:{m.line}: {m.before}  ->  {m.after}"
                )
            return
        _import_what_is_slow()
        if not arguments.trust:
            _check_unchanged(
                scratch, dict.fromkeys(rooms[m.room].tests_of_file[m.file] for m in left)
            )
        verdicts = _judge_all(scratch, left, known, rooms, arguments.out)
    print(_summary(verdicts, arguments.seed))


def _known_verdicts(table: Path, mutants: Sequence[Mutant]) -> dict[Mutant, Verdict]:
    """Verdicts that a table has on mutants, which it knows by their file and text: lines move with
    other changes."""
    with table.open(newline="") as file:
        row_of = {(row["file"], row["before"], row["after"]): row for row in csv.DictReader(file)}
    verdicts: dict[Mutant, Verdict] = {}
    for mutant in mutants:
        row = row_of.get((mutant.file, mutant.before, mutant.after))
        if row is not None:
            verdicts[mutant] = Verdict(row["outcome"], float(row["seconds"]), row["test"])
    return verdicts


def _check_unchanged(scratch: Scratch, all_tests: Iterable[tuple[str, ...]]) -> None:
    """Exit unless the tests pass without any change."""
    for tests in all_tests:
        verdict = scratch.unchanged(tests)
        print(f"{verdict.seconds:4.0f} s without any change: {' '.join(tests)}", flush=True)
        if verdict.outcome != "SURVIVED":
            raise SystemExit(f"they fail without any change, or take too long: {verdict.test}")


def _judge_all(
    scratch: Scratch,
    left: Sequence[Mutant],
    known: dict[Mutant, Verdict],
    rooms: dict[str, Room],
    out: Path,
) -> dict[Mutant, Verdict]:
    """Known verdicts and those on the mutants left, each printed and written to a table as soon as
    it is there."""
    verdicts: dict[Mutant, Verdict] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        # What is known is on disk before anything else is judged: another stop loses nothing.
        for m in [*known, *left]:
            verdict = (
                known[m] if m in known else scratch.judge(m, rooms[m.room].tests_of_file[m.file])
            )
            verdicts[m] = verdict
            changed = [m.room, m.file, m.line, m.kind, m.before, m.after]
            writer.writerow([*changed, verdict.outcome, round(verdict.seconds), verdict.test])
            file.flush()
            if m in known:
                continue
            place = f"{m.kind:<15} {m.file}:{m.line}"
            print(
                f"{verdict.outcome:<14} {verdict.seconds:4.0f} s  {m.room:<12} {place}", flush=True
            )
            if not verdict.is_caught:
                print(f"    {m.before}\n    {m.after}", flush=True)
    return verdicts


def _summary(verdicts: dict[Mutant, Verdict], seed: int) -> str:
    """Table of the mutants caught in every room."""
    caught_of_room: dict[str, list[bool]] = {}
    for mutant, verdict in verdicts.items():
        caught_of_room.setdefault(mutant.room, []).append(verdict.is_caught)
    lines = [
        f"{room:<14} {sum(caught)} of {len(caught)}" for room, caught in caught_of_room.items()
    ]
    caught = sum(verdict.is_caught for verdict in verdicts.values())
    return "\n".join([*lines, f"{caught} of {len(verdicts)} mutants caught, seed {seed}"])


if __name__ == "__main__":
    main()
