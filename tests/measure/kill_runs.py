"""Runs `perfmodel calibrate` in processes of its own and kills them: `python kill_runs.py FOLDER KILLS SEED`.

Kills come from outside after a random time, and from inside at a random one of the steps that write: before or after
it, or within it, a line half written. Prints what was seen as JSON.
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
from pathlib import Path
from typing import Any

from fake_backend import PLAN, ROWS, FakeBackend, call_s, install, measured

import perfmodel.cli
from perfmodel.io import read_table
from perfmodel.measure import card_path, read_card, read_plan
from perfmodel.measure._partial import PartialFile, Record
from perfmodel.measure._rows import point_key, row_key

LONGEST_S = 0.25
"""A run from start to end, forked with everything imported, takes about half of this."""


def main(folder: Path, kills: int, seed: int) -> None:
    import_module("perfmodel.cli._commands")  # children shall not spend their time on imports
    draw = random.Random(seed)
    seen: Counter[str] = Counter()
    campaign = 0
    while sum(count for stage, count in seen.items() if stage != "ended by itself") < kills:
        campaign += 1
        out = folder / f"run{campaign}"
        out.mkdir()
        (out / "plan.toml").write_text(PLAN)
        for phase in ("first run", "disturbed rows again"):
            until_finished(out, phase, draw, seen)
    json.dump({"campaigns": campaign, "stages": seen}, sys.stdout)


def until_finished(out: Path, phase: str, draw: random.Random, seen: Counter[str]) -> None:
    """Kill runs into one folder until one comes to its end; checks the folder after each."""
    final: frozenset[str] = frozenset()
    while True:
        begun = len(measured(out / "log"))
        killed = one_run(out, draw)
        again = final.intersection(measured(out / "log")[begun:])
        assert not again, f"measured before the kill, and again: {again}"
        final = check(out)
        if not killed:
            check_finished(out)
            seen["ended by itself"] += 1
            return
        seen[f"{phase}: {stage(out, fresh=len(measured(out / 'log')) == begun)}"] += 1


def one_run(out: Path, draw: random.Random) -> bool:
    """Fork a run; whether it was killed before its end."""
    if draw.random() < 0.5:
        wait_s, step = draw.uniform(0, LONGEST_S), None
    else:
        wait_s, step = 60.0, draw.randrange(1, draw.choice((12, 50)))
    how = draw.random()
    child = os.fork()
    if child == 0:
        if step is not None:
            kill_at(step, how)
        os._exit(calibrate(out))
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0 or os.WIFSIGNALED(status), f"exit status {status}"
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


def kill_at(step: int, how: float) -> None:
    """Kill this process at the given one of its writing steps: before it, after it, or in the middle of a line."""
    count = 0

    def hooked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == step and how < 0.5:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*arguments, **named)
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def torn(partial: PartialFile, record: Record) -> None:
        nonlocal count
        count += 1
        if count == step:
            with partial.path.open("a") as file:
                file.write(record.line()[: int(how * len(record.line()))])
            os.kill(os.getpid(), signal.SIGKILL)
        append(partial, record)

    append = PartialFile.append
    PartialFile.append = torn
    for name in ("replace", "fsync", "chmod", "unlink"):
        setattr(os, name, hooked(getattr(os, name)))


def check(out: Path) -> frozenset[str]:
    """Whatever is there is whole; the keys of rows that need not be measured again."""
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
    assert {p.name for p in out.iterdir()} == {"kernels.csv", "kernels.card.json", "plan.toml", "log"}


def stage(out: Path, *, fresh: bool) -> str:
    """How far the killed run had come, by what it left; `fresh` if it measured nothing."""
    table, partial = out / "kernels.csv", PartialFile(out / ".kernels.csv.partial", {})
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
