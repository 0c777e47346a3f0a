"""Scripts to emulate, real and emulated runs of them, and how they compare; kinds of runs of which
one at a time is awake, in short turns.

The speed of a shared machine drifts by several per cent within a minute. What is compared is awake
within seconds.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import catalog
from perfmodel.emulate import (
    EmulatedRun,
    Emulation,
    EmulationError,
    Prices,
    PriceTable,
    emulate,
    read_run,
)
from perfmodel.errors import PerfModelError
from perfmodel.measure import usable_cores
from perfmodel.measure.timing import wait_until_quiet

SCRIPTS = Path(__file__).parents[1] / "emulated_scripts"
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Memory is kept once it was taken, in all runs alike: whether gloo's buffers are taken anew for
every call depends on what a process did before, and makes large messages up to half slower or
not."""
KINDS = ("real", "both", "each")
QUIET = 0.1
"""Share of the cores that other work may take before a turn begins."""
PATIENCE_S = 600.0
"""Usual seconds for which the turns of one script wait for a quiet machine."""
NOISE_OF_CLAIMS = 0.01
"""Largest noise of the real runs beside which an error of a few per cent says something of the
emulation."""
LEAST = 30
"""Fewest iterations of each kind that are compared."""
QUANTILE = 0.25
"""The quantile of iterations that is compared. What else the machine does only lengthens an
iteration, so the quicker ones tell more of the run and less of the machine than their median."""


def script(name: str, *arguments: object, **options: object) -> tuple[str, ...]:
    """The command of one of the emulated scripts, with environment variables that override
    `MALLOC`."""
    variables = [f"{key}={value}" for key, value in (MALLOC | options).items()]
    return ("env", *variables, sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, arguments))


def data_file(out: Path, name: str) -> Path:
    """Path of a measured table, beside the reports."""
    return out / "emulation_data" / f"{name}.csv"


def prices_of(out: Path, name: str = "prices") -> PriceTable:
    """Read a table of prices that was measured before."""
    return PriceTable.read(data_file(out, name))


def priced(table: PriceTable) -> Prices:
    """The times and core seconds in a table of prices."""
    return Prices(catalog.cluster("localhost"), table.time_s, table)


def run_real(command: Sequence[str], world_size: int, **more: Any) -> EmulatedRun:
    """Run all ranks of a world, each on a core of its own while there are enough."""
    return emulate(
        Emulation(
            command=tuple(command),
            world_size=world_size,
            real_ranks=tuple(range(world_size)),
            cores=usable_cores(),
            **more,
        )
    )


def run_emulated(
    command: Sequence[str], world_size: int, table: PriceTable, **more: Any
) -> EmulatedRun:
    """Run rank 0 alone in the emulator, on the first core."""
    conditions = table.conditions | more.pop("conditions", {})
    prices = priced(table)
    return emulate(
        Emulation(
            command=tuple(command),
            world_size=world_size,
            prices=prices,
            cores=usable_cores()[:1],
            conditions=conditions,
            **more,
        )
    )


def blocks_in_turn(
    real: Emulation, emulated: Emulation, command: Callable[..., tuple[str, ...]]
) -> pd.DataFrame:
    """Run two worlds beside each other; one makes a block of calls while the other waits.

    Args:
        real: world without a command.
        emulated: likewise.
        command: of a world (`emulated_scripts/blocks.py`), from its file of results, the pipe that
            it waits at and the one to which it passes the turn.

    Returns:
        collective, bytes, block, real_s and emulated_s (seconds of a call), a row for each block.
    """
    worlds = {"real": real, "emulated": emulated}
    tables: dict[str, pd.DataFrame] = {}
    with TemporaryDirectory(prefix="perfmodel-") as folder, ThreadPoolExecutor() as threads:
        pipes = [Path(folder) / name for name in worlds]
        for pipe in pipes:
            os.mkfifo(pipe)
        # The first turn is the real world's; the pipe keeps it until its rank looks there.
        first = os.open(pipes[0], os.O_RDWR)
        os.write(first, b"1")
        runs = {}
        for (name, world), (wait, send) in zip(worlds.items(), (pipes, pipes[::-1]), strict=True):
            out = Path(folder) / f"{name}.json"
            runs[name] = (
                out,
                threads.submit(emulate, replace(world, command=command(out, wait, send))),
            )
        for name, (out, run) in runs.items():
            run.result()
            columns = ["collective", "bytes", "block", f"{name}_s"]
            tables[name] = pd.DataFrame(json.loads(out.read_text()), columns=columns)
        os.close(first)
    return tables["real"].merge(tables["emulated"])


def in_turn(
    kinds: Mapping[str, Sequence[Emulation]],
    *,
    turn_s: float,
    total_s: float,
    start_s: float,
    patience_s: float = 0.0,
) -> pd.DataFrame:
    """Start all runs, then wake one kind after another until the time is up. Scripts are cut off,
    so that they should be long.

    No run is awake between turns. So whatever is busy then is other work, and the next turn waits
    for its end.

    Args:
        kinds: what is awake together, by name; the slowest run of it is what counts.
        turn_s: for which one is awake.
        total_s: of all turns, without the waiting.
        start_s: for which each is awake at first, and on a busy machine until it trains.
        patience_s: for which turns wait for a quiet machine at most, all together; afterwards they
            run anyway.

    Returns:
        Iterations on the slowest of their ranks, as of `EmulatedRun.iterations`, with kind, turn,
        waited_s (before the turn, until the machine was quiet) and stolen (core seconds per second
        of the turn that the hypervisor or other processes took); whole ones, without the first of
        every turn.
    """
    # What a shell starts in the background ignores interrupts, by which runs are ended.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with TemporaryDirectory(prefix="perfmodel-") as folder:
        runs: dict[str, list[_Run]] = {name: [] for name in kinds}
        turns = {name: _Turns() for name in kinds}
        try:
            # A rank measures at its start what emulating a call takes, which a busy core would
            # lengthen: runs start one after another, and sleep until their turn.
            for name, together in kinds.items():
                for number, emulation in enumerate(together):
                    run = _Run(emulation, Path(folder) / f"{name}{number}")
                    runs[name].append(run)
                    run.wait_until_it_trains(start_s)
                    run.send(signal.SIGSTOP)
            order = list(kinds)
            awake_s = 0.0
            while awake_s < total_s:
                for name in order:
                    waited_s = wait_until_quiet(QUIET, patience_s)
                    patience_s -= waited_s
                    if waited_s:
                        _print_wait(name, waited_s, patience_s)
                    turns[name].take(runs[name], turn_s, waited_s)
                    awake_s += turn_s
                # There and back: a drift that goes one way meets all kinds alike.
                order.reverse()
        finally:
            for run in chain(*runs.values()):
                run.end()
        tables = []
        for name in kinds:
            iterations = read_run(runs[name][0].out).iterations()
            if not len(iterations):
                raise PerfModelError(
                    f"{name}: the script did not train within {start_s:g} s of its start; give it longer"
                )
            tables.append(_awake(iterations, turns[name]).assign(kind=name))
    table = pd.concat(tables, ignore_index=True)
    # The slowest rank of an iteration counts: the others wait for it.
    return table.sort_values("time_s").groupby(["kind", "turn", "iteration"], as_index=False).last()


def _print_wait(name: str, waited_s: float, patience_s: float) -> None:
    """Print how long a turn waited for a quiet machine, and how much patience is left."""
    outlook = "runs on a busy machine now"
    if patience_s > 0:
        outlook = f"{patience_s:.0f} s of patience left"
    print(f"{name}: waited {waited_s:.0f} s for a quiet machine, {outlook}", file=sys.stderr)


def compared_in_turn(table: pd.DataFrame) -> dict[str, Any]:
    """Compare lower quartiles over the iterations of undisturbed turns, as long as there are enough
    of these."""
    # The quietest turns that together have enough iterations of each kind.
    quiet: Any = table
    for most_stolen in (0.03, 0.06, 0.1, 0.2, 2.0):
        quiet = table[table.stolen <= most_stolen]
        if quiet.groupby("kind").size().reindex(KINDS).fillna(0).min() >= LEAST:
            break
    parts = ["forward_s", "backward_s", "optimizer_s"]
    typical_s: Any = quiet.groupby("kind")[["time_s", *parts]].quantile(QUANTILE)
    errors = typical_s / typical_s.loc["real"] - 1

    # Two halves of the real turns differ by noise alone. They are drawn from both directions of
    # the order in which kinds take turns, hence fours.
    real: Any = quiet[quiet.kind == "real"]
    halves = [float(real[real.turn % 4 // 2 == half].time_s.quantile(QUANTILE)) for half in (0, 1)]

    figures: dict[str, Any] = {f"{kind}_s": float(typical_s.time_s[kind]) for kind in KINDS}
    for kind in KINDS[1:]:
        figures[f"{kind}_error"] = float(errors.time_s[kind])
    figures |= {
        "noise": abs(halves[0] / halves[1] - 1),
        "iterations": int(quiet.groupby("kind").size().min()),
        "turns": int(quiet.groupby("kind").turn.nunique().min()),
        "stolen_at_most": float(quiet.stolen.max()),
    }
    for part in parts:
        figures[f"{part}_error"] = float(errors[part]["both"])
    # Turns of earlier runs, which are read from a file, did not wait.
    if "waited_s" in table and table.waited_s.notna().all():
        figures["waited_s"] = float(table.groupby(["kind", "turn"]).waited_s.first().sum())
    return figures


def compared(real: Sequence[np.ndarray], emulated: Sequence[np.ndarray]) -> dict[str, Any]:
    """Compare medians over all iterations, and of each launch."""
    # Iterations of all launches count alike.
    real_s = float(np.median(np.concatenate(real)))
    emulated_s = float(np.median(np.concatenate(emulated)))
    by_launch = [float(np.median(s)) for s in real]
    return {
        "real_s": real_s,
        "emulated_s": emulated_s,
        "error": emulated_s / real_s - 1,
        "noise": (max(by_launch) - min(by_launch)) / real_s,
        "iterations": sum(map(len, real)),
        "real_launches_s": by_launch,
        "emulated_launches_s": [float(np.median(s)) for s in emulated],
    }


@contextmanager
def at_once() -> Iterator[bool]:
    """Context in which started processes run ahead of all other work, if the system allows it.

    For a minute or two: meanwhile nothing else gets more than what they leave (sched(7):
    `SCHED_FIFO`).

    Yields:
        Whether the system allowed it.
    """
    # Processes inherit the policy of the thread that starts them, and so do threads.
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def come_before_others() -> None:
    """Let ranks that are started from now on run before other work, as far as the system allows."""

    def watch() -> None:
        """Raise the sessions of ranks as they appear."""
        # This process answers emulated ranks and gives out turns: it may not wait for them.
        done = {os.getpid()}
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text("-20")
        while True:
            for group in _children() - done:
                with suppress(OSError):  # of the whole session (sched(7): autogroup)
                    Path(f"/proc/{group}/autogroup").write_text("-20")
                done.add(group)
            time.sleep(0.2)

    threading.Thread(target=watch, daemon=True).start()


def judged(error: float, noise: float, bar: float) -> str:
    """Verdict on whether an error is within its bar, where the noise of real runs allows one."""
    if noise > NOISE_OF_CLAIMS:
        return "too noisy"
    return "yes" if abs(error) <= bar else "no"


def claims(judgements: Sequence[str], bar: float) -> str:
    """Text on how many errors are within their bar, counting only those that noise allows to
    judge."""
    judgeable = [judgement for judgement in judgements if judgement != "too noisy"]
    within = f"{judgeable.count('yes')} of the {len(judgeable)} whose noise is at most {NOISE_OF_CLAIMS:.0%} within {bar:.0%}"
    noisy = len(judgements) - len(judgeable)
    if not noisy:
        return within
    others = "the other" if noisy == 1 else f"the {noisy} others"
    return f"{within}; nothing is claimed of {others}"


def waited_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sentence on how long runs waited for a quiet machine."""
    if not all("waited_s" in row for row in rows):
        return "Some of them ran before turns waited for a quiet machine."
    return f"Turns waited {sum(row['waited_s'] for row in rows):.0f} s in all for a quiet machine."


class _Turns:
    """The intervals in which runs were awake."""

    def __init__(self) -> None:
        self.awake_s: list[tuple[float, float]] = []
        """Begin and end of every turn."""
        self.stolen_s: list[float] = []
        """Core seconds of every turn that others took."""
        self.waited_s: list[float] = []

    def take(self, runs: "Sequence[_Run]", turn_s: float, waited_s: float) -> None:
        """Wake some runs for a turn and put them to sleep again."""
        for run in runs:
            run.check()
        groups = set[int]().union(*(run.groups for run in runs))
        begin_s = time.perf_counter()
        stolen_s = _used_by_others_s(groups)
        _send(signal.SIGCONT, runs)
        time.sleep(turn_s)
        _send(signal.SIGSTOP, runs)
        self.awake_s.append((begin_s, time.perf_counter()))
        self.stolen_s.append(_used_by_others_s(groups) - stolen_s)
        self.waited_s.append(waited_s)


def _send(sign: int, *kinds: "Sequence[_Run]") -> None:
    """Send a signal to all ranks of some runs."""
    for run in chain(*kinds):
        run.send(sign)


class _Run:
    """A run in a thread, whose ranks can be put to sleep and woken."""

    def __init__(self, emulation: Emulation, out: Path) -> None:
        self.out = out
        # Sessions of its ranks are known by being new: runs are started one after another.
        before = _children()
        self._thread = threading.Thread(
            target=self._emulate, args=(replace(emulation, timeout_s=1e6),)
        )
        self._thread.start()
        processes = len(emulation.real_ranks) + (emulation.wire is not None)
        while len(started := _children() - before) < processes and self._thread.is_alive():
            time.sleep(0.01)
        self.groups = started

    def _emulate(self, emulation: Emulation) -> None:
        """Run until the script ends or is interrupted."""
        with suppress(EmulationError):  # that the script was interrupted
            emulate(emulation, self.out)

    def send(self, sign: int) -> None:
        """Send a signal to the sessions of its ranks."""
        for group in self.groups:
            with suppress(ProcessLookupError):
                os.killpg(group, sign)

    def wait_until_it_trains(self, start_s: float) -> None:
        """Wait for the usual time of a start, and on a busy machine until an iteration ended.

        Raises:
            PerfModelError: its script has ended.
        """
        time.sleep(start_s)
        # Ranks write down what they did last, so the end of an iteration is seen for a moment only.
        while not self._has_just_finished_an_iteration():
            self.check()
            time.sleep(0.01)

    def _has_just_finished_an_iteration(self) -> bool:
        progress = [path.read_text(errors="replace") for path in self.out.glob("rank*.progress")]
        return any(text.startswith("finished iteration") for text in progress)

    def check(self) -> None:
        """Raise `PerfModelError` if the script has ended."""
        if not self._thread.is_alive():
            raise PerfModelError(
                f"{self.out.name}: the script ended before its turns did; give it more iterations"
            )

    def end(self) -> None:
        """Interrupt the script as from the keyboard; it then writes what it recorded."""
        self.send(signal.SIGINT)
        self.send(signal.SIGCONT)
        self._thread.join()


def _children() -> set[int]:
    """Processes that this one started (proc(5))."""
    children = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == os.getpid():
                children.add(int(stat.parent.name))
    return children


def _used_by_others_s(groups: set[int]) -> float:
    """Core seconds so far of all processes but ours, and of the hypervisor's other machines
    (proc(5))."""
    # The order of proc(5); idle and waiting for disks are no use of a core.
    user, nice, system, _, _, irq, soft, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    total = user + nice + system + irq + soft + steal
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # A process may end meanwhile. Ranks run below a supervisor, in its session.
        with suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) in groups or int(stat.parent.name) == os.getpid():
                total -= int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _awake(table: Any, turns: _Turns) -> pd.DataFrame:
    """Complete iterations within a turn, without its first one, which is cold."""
    parts = []
    for turn, (begin_s, end_s) in enumerate(turns.awake_s):
        inside = table[(table.start_s > begin_s) & (table.start_s + table.time_s < end_s)]
        first = inside.groupby("rank").iteration.transform("min")
        # As core seconds per second, turns of any length compare.
        stolen = turns.stolen_s[turn] / (end_s - begin_s)
        warm = inside[inside.iteration > first]
        parts.append(warm.assign(turn=turn, stolen=stolen, waited_s=turns.waited_s[turn]))
    return pd.concat(parts, ignore_index=True)
