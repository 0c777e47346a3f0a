"""Runs of several kinds beside one another, of which one at a time is awake, in short turns.

The speed of a shared machine drifts by several per cent within a minute. What is compared is awake within seconds.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd

from perfmodel.emulation import EmulatedRun, Emulation, EmulationError, emulate, read_run
from perfmodel.errors import PerfModelError


@dataclass(frozen=True)
class InTurn:
    """What each kind of run did while it was awake."""

    runs: Mapping[str, EmulatedRun]
    iterations: pd.DataFrame
    """As `EmulatedRun.iterations`, with kind and turn; whole ones, without the first of every turn."""


def in_turn(
    kinds: Mapping[str, Emulation], *, turn_s: float, total_s: float, start_s: float, slowest: bool = True
) -> InTurn:
    """Start all runs, then wake one after another until the time is up; scripts are cut off, so let them be long.

    Args:
        kinds: what to run, by name.
        turn_s: for which one is awake.
        total_s: of all turns.
        start_s: for which all are awake at first, until they train.
        slowest: of each iteration the slowest rank alone.
    """
    with TemporaryDirectory(prefix="perfmodel-") as folder:
        found = {name: _Run(kind, Path(folder) / name) for name, kind in kinds.items()}
        try:
            time.sleep(start_s)
            for run in found.values():
                run.send(signal.SIGSTOP)
            order, end_s = list(found.values()), time.perf_counter() + total_s
            while time.perf_counter() < end_s:
                for run in order:
                    run.turn(turn_s)
                order.reverse()
        finally:
            for run in found.values():
                run.end()
        runs = {name: read_run(run.out) for name, run in found.items()}
    tables = [_awake(runs[name].iterations(), run).assign(kind=name) for name, run in found.items()]
    table = pd.concat(tables, ignore_index=True)
    if slowest:
        table = table.sort_values("time_s").groupby(["kind", "turn", "iteration"], as_index=False).last()
    return InTurn(runs, table)


class _Run:
    def __init__(self, emulation: Emulation, out: Path) -> None:
        self.out, self.awake_s, self.stolen_s = out, list[tuple[float, float]](), list[float]()
        before = _children()
        self._thread = threading.Thread(target=self._emulate, args=(replace(emulation, timeout_s=1e6),))
        self._thread.start()
        while len(started := _children() - before) < len(emulation.real_ranks) and self._thread.is_alive():
            time.sleep(0.01)
        self._groups = started

    def _emulate(self, emulation: Emulation) -> None:
        with suppress(EmulationError):  # that the script was interrupted
            emulate(emulation, self.out)

    def send(self, sign: int) -> None:
        for group in self._groups:
            with suppress(ProcessLookupError):
                os.killpg(group, sign)

    def turn(self, turn_s: float) -> None:
        if not self._thread.is_alive():
            raise PerfModelError(f"{self.out.name}: the script ended before its turns did; give it more iterations")
        begin_s, stolen_s = time.perf_counter(), _stolen_s()
        self.send(signal.SIGCONT)
        time.sleep(turn_s)
        self.send(signal.SIGSTOP)
        self.awake_s.append((begin_s, time.perf_counter()))
        self.stolen_s.append(_stolen_s() - stolen_s)

    def end(self) -> None:
        """Interrupted as from the keyboard, a script leaves what it recorded."""
        self.send(signal.SIGINT)
        self.send(signal.SIGCONT)
        self._thread.join()


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
    return found


def _stolen_s() -> float:
    """Core seconds so far that the hypervisor gave to other machines (proc(5): stat)."""
    return int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")


def _awake(table: Any, run: _Run) -> pd.DataFrame:
    """Iterations within a turn, whose first is cold."""
    parts = []
    for turn, ((begin_s, end_s), stolen_s) in enumerate(zip(run.awake_s, run.stolen_s, strict=True)):
        inside = table[(table.start_s > begin_s) & (table.start_s + table.time_s < end_s)]
        first = inside.groupby("rank").iteration.transform("min")
        parts.append(inside[inside.iteration > first].assign(turn=turn, stolen=stolen_s / (end_s - begin_s)))
    return pd.concat(parts, ignore_index=True)
