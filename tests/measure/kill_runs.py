"""Runs `perfmodel calibrate` in processes of its own and kills them:
`python kill_runs.py FOLDER KILLS SEED`.

Kills come from outside after a random time, and from inside at a random one of the steps that
write: before or after it, or within it, a line half written. Before those, one folder sees a kill
at each of `AIMS`. Prints what was seen as JSON.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

from fake_backend import PLAN, ROWS, FakeBackend, call_s, install, measured

import perfmodel.cli
from perfmodel.ingest.tables import read_table
from perfmodel.measure import read_plan
from perfmodel.measure.tables import PartialFile, Record, card_path, point_key, read_card, row_key

AIMS = (
    "before .kernels.csv.partial",
    "after .kernels.csv.partial",
    "in row 1",
    "before kernels.csv",
    "after kernels.csv",
    "after kernels.card.json",
)
"""Before or after a file is put in place, and in the midst of a row."""
LONGEST_S = 0.25
"""A run from start to end, forked with everything imported, takes about half of this."""
known: dict[Path, frozenset[str]] = {}
"""Rows of the folder in use that need not be measured again."""


def main(folder: Path, kills: int, seed: int) -> None:
    # children shall not spend their time on imports
    import_module("perfmodel.cli._main")
    draw = random.Random(seed)
    seen: Counter[str] = Counter()
    campaign = 0
    while sum(count for stage, count in seen.items() if stage != "ended by itself") < kills:
        campaign += 1
        out = folder / f"run{campaign}"
        out.mkdir()
        (out / "plan.toml").write_text(PLAN)
        for phase in ("first run", "disturbed rows again"):
            if phase != "first run":
                (out / "quiet").touch()
            for aim in AIMS if campaign == 1 else ():
                killed_or_done(out, phase, seen, lambda aim=aim: kill_aimed(aim))
            while killed_or_done(out, phase, seen, *random_kill(draw)):
                pass
    json.dump({"campaigns": campaign, "stages": seen}, sys.stdout)


def killed_or_done(
    out: Path,
    phase: str,
    seen: Counter[str],
    arm: Callable[[], None] = lambda: None,
    wait_s: float = 60.0,
) -> bool:
    """One run into a folder, which is checked after it; whether it was killed before its end."""
    global known
    begun = len(measured(out / "log"))
    killed = one_run(out, arm, wait_s)
    again = known.get(out, frozenset()).intersection(measured(out / "log")[begun:])
    assert not again, f"measured before the kill, and again: {again}"
    known = {out: check(out)}
    if not killed:
        check_finished(out)
    outcome = "ended by itself"
    if killed:
        outcome = f"{phase}: {stage(out, fresh=len(measured(out / 'log')) == begun)}"
    seen[outcome] += 1
    return killed


def random_kill(draw: random.Random) -> tuple[Callable[[], None], float]:
    """A function that arms the child process, and the seconds to wait for the child's end."""
    if draw.random() < 0.5:
        return lambda: None, draw.uniform(0, LONGEST_S)
    write = draw.randrange(1, draw.choice((12, 50)))
    share = draw.random()
    return lambda: kill_at(write, share), 60.0


def one_run(out: Path, arm: Callable[[], None], wait_s: float) -> bool:
    """Fork a run; returns whether it was killed before its end."""
    child = os.fork()
    if child == 0:
        arm()
        os._exit(calibrate(out))
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, f"exit status {status}"
            return status != 0
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] != 0


def calibrate(out: Path) -> int:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    install(FakeBackend(out / "log"))
    status = perfmodel.cli.main(["calibrate", "--plan", str(out / "plan.toml"), "--out", str(out)])
    if status:
        os.abort()
    return status


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(write: int, share: float) -> None:
    """Kill this process at its n-th write: before it, after it, or in the middle of a line.

    Args:
        write: number of the write, counted from 1.
        share: share of the write that is done. Writes that cannot be divided are left undone below
            one half.
    """
    writes = count(1)

    def hooked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            is_last = next(writes) == write
            if is_last and share < 0.5:
                die()
            result = function(*arguments, **named)
            if is_last:
                die()
            return result

        return call

    for name in ("replace", "fsync", "chmod", "unlink"):
        setattr(os, name, hooked(getattr(os, name)))
    tear(lambda: next(writes) == write, share)


def kill_aimed(aim: str) -> None:
    """Kill this process at one of `AIMS`."""
    when, _, what = aim.partition(" ")
    if when == "in":
        rows = count(1)
        tear(lambda: f"row {next(rows)}" == what, 0.5)
        return
    replace = os.replace

    def replaced(source: Any, target: Any) -> None:
        if when == "before" and Path(target).name == what:
            die()
        replace(source, target)
        if Path(target).name == what:
            die()

    os.replace = replaced


def tear(now: Callable[[], bool], share: float) -> None:
    """Kill this process when it appends a row and `now()` is true, with this share of the line
    written."""
    append = PartialFile.append

    def torn(partial: PartialFile, record: Record) -> None:
        if now():
            with partial.path.open("a") as file:
                file.write(record.line()[: int(share * len(record.line()))])
            die()
        append(partial, record)

    PartialFile.append = torn


def check(out: Path) -> frozenset[str]:
    """Check that the files in a folder are complete; returns the keys of rows that need not be
    measured again."""
    table = out / "kernels.csv"
    if table.exists():
        assert len(read_table(table)) == ROWS
    if card_path(table).exists():
        json.loads(card_path(table).read_text())
    records = PartialFile(out / ".kernels.csv.partial", {}).read(any_header=True)
    if records is None:
        if table.exists():
            read_card(table)
        return frozenset()
    clean = {record.key for record in records if record.row["interference"] == 0}
    attempts = Counter(record.key for record in records if not record.earlier)
    return frozenset(clean | {key for key, count in attempts.items() if count == 2})


def check_finished(out: Path) -> None:
    """Every row of the plan once, with its own time, and nothing else in the folder."""
    points = read_plan(out / "plan.toml").kernel_points
    rows = read_table(out / "kernels.csv").to_dict("records")
    assert [row_key(row) for row in rows] == [point_key(point) for point in points]
    assert [row["time_us"] for row in rows] == [1e6 * call_s(point.op) for point in points]
    read_card(out / "kernels.csv")
    assert {p.name for p in out.iterdir()} - {"quiet"} == {
        "kernels.csv",
        "kernels.card.json",
        "plan.toml",
        "log",
    }


def stage(out: Path, *, fresh: bool) -> str:
    """The stage that the killed run had reached, by the files that it left; `fresh` if it measured
    nothing."""
    table = out / "kernels.csv"
    partial = PartialFile(out / ".kernels.csv.partial", {})
    records = partial.read(any_header=True)
    if records is None:
        return "nothing written" if fresh else "all but giving up the lock"
    if table.exists() and table.stat().st_mtime_ns > partial.path.stat().st_mtime_ns:
        try:
            read_card(table)
        except ValueError:
            return "table without its card"
        return "table and card, partial file still there"
    return "no row yet" if all(record.earlier for record in records) else "rows"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
