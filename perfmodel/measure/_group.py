"""A group of local processes joined by JAX's gloo collectives."""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Final, Self

import numpy as np

from perfmodel.errors import CalibrationError, PerfModelError, UnknownNameError
from perfmodel.measure._harness import Sample
from perfmodel.measure._hosts import Host
from perfmodel.measure._meter import Meter, usable_cores
from perfmodel.measure._programs import JAX_DTYPES
from perfmodel.measure._rank import CollectiveSession, Place, RankSession, serve
from perfmodel.spec import Collective
from perfmodel.units import dtype_bytes

MEASURED_COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
START_TIMEOUT_S: Final = 90.0
ANSWER_TIMEOUT_S: Final = 120.0
MAX_RANKS: Final = 64


class RankGroup:
    """Context manager over `num_ranks` processes, rank r pinned to core r modulo the usable cores.

    Each process runs a session; by default one of collectives, which `load`, `sample` and `values` use.

    Args:
        hosts: where the ranks run, equally many on each, next to one another; none: all on this host.

    Raises:
        PerfModelError: for fewer than 2 or more than 64 ranks, or ranks that the hosts cannot share out.
        CalibrationError: if a rank fails, dies or does not answer in time; the message names it, and
            the group is of no further use.
    """

    def __init__(
        self, num_ranks: int, session: type[RankSession] = CollectiveSession, hosts: Sequence[Host] = ()
    ) -> None:
        if not 2 <= num_ranks <= MAX_RANKS:
            raise PerfModelError(f"a collective needs 2 to {MAX_RANKS} ranks on one host, got {num_ranks}")
        if hosts and num_ranks % len(hosts):
            raise PerfModelError(f"{num_ranks} ranks do not divide over {len(hosts)} hosts")
        self.num_ranks = num_ranks
        self.ranks_per_node = num_ranks // max(1, len(hosts))
        self._session, self._hosts = session, tuple(hosts)
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def __enter__(self) -> Self:
        # a fresh interpreter per rank: JAX's threads do not survive a fork
        context = get_context("spawn")
        cores = usable_cores()
        coordinator = f"{self._hosts[0].address if self._hosts else '127.0.0.1'}:{_free_port()}"
        try:
            for rank in range(self.num_ranks):
                ours, theirs = context.Pipe()
                host = self._hosts[rank // self.ranks_per_node] if self._hosts else None
                where = Place(rank, self.num_ranks, coordinator, cores[rank % len(cores)], host)
                arguments = (theirs, where, self._session)
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
            self._answers(START_TIMEOUT_S)
        except BaseException:
            self._end(grace_s=0.0)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(("stop",))
        self._end(grace_s=10.0 if exception[0] is None else 1.0)

    def load(self, op: Collective) -> None:
        """Make `op` the collective that `sample` and `values` run."""
        check_collective(op, max(1, len(self._hosts)))
        if op.num_ranks != self.num_ranks:
            raise PerfModelError(f"the group has {self.num_ranks} ranks, {op.collective} asks for {op.num_ranks}")
        self.ask("load", op)

    def sample(self, calls: int, meter: Meter) -> Sample:
        """Run `calls` calls on all ranks; the slowest rank's time counts."""
        before = meter.read(sum(self.ask("own_s")))
        wall_s = max(self.ask("run", calls))
        after = meter.read(sum(self.ask("own_s")))
        return Sample(calls, wall_s, meter.interference(before, after))

    def values(self) -> list[np.ndarray]:
        """Result of the loaded collective, one float64 array per rank."""
        return self.ask("values")

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank's session with the same arguments; returns one answer per rank."""
        return self.ask_each(name, [arguments] * self.num_ranks)

    def ask_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every rank's session, rank r with `arguments[r]`; returns one answer per rank."""
        if not self._pipes:
            raise CalibrationError("the group of ranks is not running; enter it anew")
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send((name, *arguments[rank]))
            except OSError:
                self._end(grace_s=0.0)
                raise CalibrationError(_died(rank)) from None
        return self._answers(ANSWER_TIMEOUT_S)

    def _answers(self, timeout_s: float) -> list[Any]:
        """One answer per rank; the first failure ends the group, as the others may wait for that rank."""
        try:
            return self._collect(time.monotonic() + timeout_s)
        except CalibrationError:
            self._end(grace_s=0.0)
            raise

    def _collect(self, deadline_s: float) -> list[Any]:
        values: dict[int, Any] = {}
        while len(values) < self.num_ranks:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in values}
            ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise CalibrationError(f"rank {min(waiting.values())} does not answer; is the machine overloaded?")
            for pipe, rank in waiting.items():
                if pipe not in ready:
                    continue
                try:
                    status, value = pipe.recv()
                except (EOFError, OSError):
                    raise CalibrationError(_died(rank)) from None
                if status != "ok":
                    raise CalibrationError(f"rank {rank}: {value}")
                values[rank] = value
        return [values[rank] for rank in range(self.num_ranks)]

    def _end(self, grace_s: float) -> None:
        for process in self._processes:
            process.join(grace_s)
            if process.is_alive():
                # a rank stuck in a collective does not heed a polite signal
                process.kill()
                process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


def check_collective(op: Collective, hosts: int = 1) -> None:
    """Raise `PerfModelError` unless processes on this many hosts can run `op` exactly as asked."""
    if op.collective not in MEASURED_COLLECTIVES:
        raise UnknownNameError("collective to measure", op.collective, MEASURED_COLLECTIVES)
    if op.dtype not in JAX_DTYPES:
        raise UnknownNameError("dtype to measure", op.dtype, JAX_DTYPES)
    if op.num_nodes != hosts:
        raise PerfModelError(
            f"{op.num_ranks} ranks on {hosts} host{'s' * (hosts > 1)} have ranks_per_node = {op.num_ranks // hosts}, "
            f"not {op.ranks_per_node}"
        )
    unit = dtype_bytes(op.dtype) * op.num_ranks
    if op.bytes < unit or op.bytes % unit:
        raise PerfModelError(
            f"{op.collective} of {op.bytes:g} bytes does not split into {op.dtype} over {op.num_ranks} ranks; "
            f"use a multiple of {unit}"
        )


def _died(rank: int) -> str:
    return f"rank {rank} died; its last words are on standard error"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
