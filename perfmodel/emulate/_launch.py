"""Starts, watches and ends the real ranks of an emulated world, and reads their records."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from perfmodel.emulate._prices import Prices
from perfmodel.emulate.environment import VARIABLE, EmulationError, Environment, Orders
from perfmodel.emulate.runs import (
    RECORDED_CALLS,
    RECORDER_VARIABLE,
    EmulatedRun,
    disagreement,
    read_run,
    record_of,
)
from perfmodel.emulate.wire import PEER, Network, PeerPlace, PeerProcess, peers
from perfmodel.errors import PerfModelError
from perfmodel.measure.ranks import Host, free_port
from perfmodel.processes import supervised

_LOOK_S: Final = 0.05
_GRACE_S: Final = 2.0
_START_S: Final = 600.0
"""Seconds that a rank may take to import its libraries, during which it reports nothing."""
_INJECTED: Final = Path(__file__).parent / "inject"


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """A script and its emulated world."""

    command: tuple[str, ...]
    """Command as from a shell, `("python", "train.py", ...)`."""
    world_size: int
    ranks_per_node: int = 1
    real_ranks: tuple[int, ...] = (0,)
    prices: Prices | None = None
    """Prices of the emulated cluster, by which ranks answer their own calls; None: messages are
    really sent."""
    wire: Network | None = None
    """Network to the ranks that are not real, for which one process answers messages; None: all
    ranks are real."""
    peer: PeerPlace = field(default_factory=PeerPlace)
    """Place where that process runs."""
    conditions: Mapping[str, object] = field(default_factory=dict)
    """What-if conditions, by field of `Orders`."""
    cores: tuple[int, ...] = ()
    """Core of each real rank, in turn, on which threads of its collectives have priority; empty:
    any core."""
    hosts: tuple[Host, ...] = ()
    """Emulated hosts of the real ranks, one each; empty for this one."""
    timeout_s: float = 300.0
    """Seconds for which a rank may be silent, or wait for another."""
    quiet: bool = False
    """Whether the script's output is dropped."""

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise PerfModelError(f"emulate: --world-size must be at least 2, got {self.world_size}")
        wrong = [rank for rank in self.real_ranks if not 0 <= rank < self.world_size]
        if wrong or not self.real_ranks or len(set(self.real_ranks)) < len(self.real_ranks):
            raise PerfModelError(
                f"emulate: real ranks must be distinct and within 0 to {self.world_size - 1}, got "
                f"{', '.join(map(str, self.real_ranks))}"
            )
        if self.wire is not None and self.prices is not None:
            raise PerfModelError(
                "emulate: collective times come either from prices or from the wire; give only one"
            )
        if self.wire is not None and self.hosts and len(set(self.hosts)) > 1:
            raise PerfModelError(
                "emulate: real ranks on the wire must share a host; give them the same emulated host"
            )
        conditions = self.conditions
        if self.wire is not None and (conditions.get("swept") or conditions.get("apart")):
            raise PerfModelError(
                "emulate: --wire cannot be combined with --sweep or --apart; leave these out"
            )
        if self.prices is not None:
            self.prices.cluster.require(self.world_size, "the emulated world")
        if not self.command:
            raise PerfModelError("emulate: no command; give it after --, as in: -- python train.py")
        if shutil.which(self.command[0]) is None:
            raise PerfModelError(f"emulate: command {self.command[0]!r} not found")
        if not self.timeout_s > 0:
            raise PerfModelError(f"emulate: the timeout must be positive, got {self.timeout_s}")


def emulate(emulation: Emulation, out: Path | None = None) -> EmulatedRun:
    """Run the script to its end as the real ranks of its emulated world.

    Args:
        emulation: the script, its world and its conditions.
        out: folder for what the ranks record; by default a temporary one that goes when it has been
            read.

    Raises:
        EmulationError: ranks that disagree, wait for one another or ask for what is not emulated, a
            rank that is silent for too long or whose script fails.
        PerfModelError: a call that the prices do not know.
    """
    with ExitStack() as stack:
        # Notes of an earlier run in the same folder would be read as this one's.
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perfmodel-")))
        folder = work if out is None else out
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (
            *folder.glob("rank*.json"),
            *folder.glob("rank*.waiting"),
            *folder.glob(PEER),
        ):
            stale.unlink()
        # Either prices (calls are answered inside the ranks) or a wire (messages go to the peer
        # process), or neither: all real.
        environment = None
        if emulation.prices is not None:
            environment = Environment(str(work / "environment"), emulation.prices)
            stack.callback(environment.close)
        orders = Orders(
            address=str(work / "environment") if environment else "",
            rank=0,
            world_size=emulation.world_size,
            real_ranks=emulation.real_ranks,
            out=str(folder),
            pinned=bool(emulation.cores),
            **emulation.conditions,  # pyright: ignore[reportArgumentType]
        )
        port = free_port()
        peer_process = None
        if emulation.wire is not None:
            # The peer process keeps to the next core after those of the real ranks.
            cores = emulation.cores
            core = cores[len(emulation.real_ranks) % len(cores)] if cores else None
            with _on_core(core):
                peer_process = stack.enter_context(peers(orders, emulation.wire, emulation.peer))
            orders = peer_process.orders
        # Registered for ending before the first is started, so that none survives an error.
        processes: dict[int, subprocess.Popen[bytes]] = {}
        stack.callback(_end, processes)
        for number, rank in enumerate(emulation.real_ranks):
            processes[rank] = _start(
                emulation, replace(orders, rank=rank), number, port, _errors_of(work, rank)
            )
        _watch(emulation, processes, environment, work, folder, peer_process)
        if peer_process is not None:
            peer_process.end()
        return read_run(folder)


def _start(
    emulation: Emulation, orders: Orders, number: int, port: int, errors: Path
) -> "subprocess.Popen[bytes]":
    """Start the process of a real rank, with the environment that torchrun would give it."""
    # The variables that torchrun sets; scripts read them.
    local = orders.rank % emulation.ranks_per_node
    host = emulation.hosts[number] if emulation.hosts else None
    master = emulation.hosts[0].address if emulation.hosts else "127.0.0.1"
    names = {
        "RANK": orders.rank,
        "WORLD_SIZE": orders.world_size,
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": min(emulation.ranks_per_node, orders.world_size),
        "GROUP_RANK": orders.rank // emulation.ranks_per_node,
        "MASTER_ADDR": master,
        "MASTER_PORT": port,
        VARIABLE: orders.to_json(),
    }
    # `sitecustomize` of the injected folder is imported by the interpreter before the script, so
    # the script stays as it is.
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(
        filter(None, [str(_INJECTED), os.environ.get("PYTHONPATH", ""), package])
    )
    cores = emulation.cores
    core = cores[number % len(cores)] if cores else None
    # Standard output is the report's, so scripts print to standard error.
    sink = subprocess.DEVNULL if emulation.quiet else 2
    command = emulation.command
    # An emulated host is a network namespace that the process enters first.
    if host is not None:
        command = (
            sys.executable,
            "-m",
            f"{__package__}._on_host",
            host.namespace,
            host.address,
            *command,
        )
    with _on_core(core), errors.open("wb") as error_file:
        return subprocess.Popen(
            supervised(command),
            env={
                RECORDER_VARIABLE: str(RECORDED_CALLS),
                **os.environ,
                **{name: str(value) for name, value in names.items()},
                "PYTHONPATH": path,
            },
            stdout=sink,
            stderr=error_file if emulation.quiet else None,
            start_new_session=True,
        )


@contextmanager
def _on_core(core: int | None) -> Iterator[None]:
    """Context in which started processes are pinned to a core; None pins nothing."""
    if core is None:
        yield
        return
    # Children inherit the affinity of the thread that starts them.
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _watch(
    emulation: Emulation,
    processes: "Mapping[int, subprocess.Popen[bytes]]",
    environment: Environment | None,
    work: Path,
    folder: Path,
    peer_process: PeerProcess | None,
) -> None:
    """Watch the ranks until all have ended successfully; raise an error for the first that fails.

    A signal that ends a process after its script (its record is written by then) ends nothing of
    the script's: threads of the library that outlive the interpreter abort so, now and then.
    """
    last_progress: dict[int, tuple[str, float]] = {}
    clock_s = 0.0
    before_s = time.monotonic()
    while True:
        now_s = time.monotonic()
        # After a longer pause everything was suspended, the ranks too, so it does not count as
        # their silence.
        clock_s += min(now_s - before_s, 20 * _LOOK_S)
        before_s = now_s
        codes = {rank: process.poll() for rank, process in processes.items()}
        # Deadlocks are looked for before silence: they have the better reason.
        if environment is not None:
            environment.clock_s = clock_s
            ended = {rank for rank, code in codes.items() if code is not None}
            stuck = environment.stuck(emulation.timeout_s, ended)
            if stuck:
                environment.fail(stuck)
            if environment.failure:
                raise EmulationError(environment.failure)
        if peer_process is not None and peer_process.failed:
            raise EmulationError(f"emulated ranks: {peer_process.failure}")
        # Ranks that disagree may end each other by errors of their library, which say less.
        different = disagreement(folder, emulation.real_ranks)
        if different:
            raise EmulationError(different)
        for rank, code in codes.items():
            progress = _printed(folder, rank)
            # The rank's last call says where in the script it was.
            if code and (code > 0 or not record_of(folder, rank).exists()):
                last_line = _last_line(_errors_of(work, rank))
                last_call = progress or "no call of torch.distributed"
                raise EmulationError(
                    f"rank {rank}: the script ended with status {code}, after {last_call}{last_line}"
                )
            before, since_s = last_progress.get(rank, (None, 0.0))
            if progress != before:
                last_progress[rank] = progress, clock_s
                continue
            # A rank that reports no new call or iteration is stuck outside of any collective.
            longest_s = emulation.timeout_s if progress else _START_S
            if code is None and clock_s - since_s > longest_s:
                raise EmulationError(
                    f"rank {rank}: no call for {clock_s - since_s:.0f} s after {progress or 'its start'}; raise "
                    "--timeout if the rank is still working"
                )
        if all(code is not None for code in codes.values()):
            return
        time.sleep(_LOOK_S)


def _errors_of(work: Path, rank: int) -> Path:
    return work / f"rank{rank}.errors"


def _last_line(errors: Path) -> str:
    """Return the last line of errors of a quiet rank; empty if its output was shown."""
    lines = errors.read_text(errors="replace").split("\n")
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def _printed(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}.progress"
    return path.read_text(errors="replace").rstrip() if path.exists() else ""


def _end(processes: "Mapping[int, subprocess.Popen[bytes]]") -> None:
    """End processes with what they started: the group of each."""
    # First a chance to end by themselves, then by force; scripts may have started data loaders,
    # hence groups.
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, sign)
        end_s = time.monotonic() + _GRACE_S
        while any(p.poll() is None for p in processes.values()) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)
