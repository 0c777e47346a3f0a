"""A process group for collectives, on this host or on agents' hosts."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, Final, Self

import numpy as np
from jaxtyping import Float

from perfmodel.catalog.this_machine import usable_cores
from perfmodel.errors import CalibrationError, PerfModelError, UnknownNameError
from perfmodel.measure.ranks._agents import Agent
from perfmodel.measure.ranks._hosts import Host
from perfmodel.measure.ranks._rank import (
    CollectiveSession,
    Place,
    RankProcess,
    RankSession,
    free_port,
)
from perfmodel.measure.timing import MachineMeter, Meter, Reading, Sample
from perfmodel.ops import Collective, KernelOp
from perfmodel.ops.programs import JAX_DTYPES
from perfmodel.units import dtype_bytes, plural

MEASURED_COLLECTIVES: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_recv",
)
START_TIMEOUT_S: Final = 90.0
"""Seconds in which a rank has to join its group: it imports its framework first."""
ANSWER_TIMEOUT_S: Final = 120.0
"""Seconds in which a rank has to answer a request."""
MAX_RANKS: Final = 64
"""Most ranks on one host."""
TWO_SIDES: Final = 2


class RankGroup:
    """Context manager over `num_ranks` processes, rank r pinned to core r modulo the usable cores.

    Each process runs a session; by default one of collectives, which `load`, `sample` and `values`
    use.

    Args:
        hosts: hosts of the ranks, which are shared out evenly in order; none: all run on this host.
        agents: instead, one per rank in their order (`members`).

    Raises:
        PerfModelError: for fewer than 2 or more than 64 ranks, or ranks that the hosts cannot share
            out.
        CalibrationError: if a rank fails, dies or does not answer in time; the message names it,
            and the group is of no further use.
    """

    def __init__(
        self,
        num_ranks: int,
        session: type[RankSession] = CollectiveSession,
        hosts: Sequence[Host] = (),
        agents: Sequence[Agent] = (),
    ) -> None:
        # How many ranks one host can run does not limit those of several nodes.
        if num_ranks < 2 or not agents:
            check_group(num_ranks)
        nodes = [agent.hello.node for agent in agents]
        self._num_nodes = max(1, len(hosts), len(set(nodes)))
        if num_ranks % self._num_nodes:
            raise PerfModelError(f"{num_ranks} ranks are not divisible by {self._num_nodes} hosts")
        self.num_ranks = num_ranks
        self.ranks_per_node = num_ranks // self._num_nodes
        self._session, self._hosts, self._agents = session, tuple(hosts), tuple(agents)
        self._members: list[RankProcess | Agent] = []
        self._of_two_sides = False

    def __enter__(self) -> Self:
        # Rank 0 brings the group together, at a free port of its own node.
        try:
            if self._agents:
                coordinator = f"{self._agents[0].hello.address}:{self._agents[0].free_port()}"
            else:
                coordinator = (
                    f"{self._hosts[0].address if self._hosts else '127.0.0.1'}:{free_port()}"
                )
            for rank in range(self.num_ranks):
                self._members.append(self._start(rank, coordinator))
            self._answers(START_TIMEOUT_S)
        except BaseException:
            self._end(grace_s=0.0)
            raise
        return self

    def _start(self, rank: int, coordinator: str) -> RankProcess | Agent:
        """Start a rank at its agent, or as a process of this machine."""
        # An agent picks a core of its node itself.
        if self._agents:
            agent = self._agents[rank]
            place = Place(rank, self.num_ranks, coordinator, local_rank=rank % self.ranks_per_node)
            try:
                agent.start(place, self._session)
            except OSError:
                raise CalibrationError(_gone(rank, agent)) from None
            return agent
        host = self._hosts[rank // self.ranks_per_node] if self._hosts else None
        place = Place(rank, self.num_ranks, coordinator, host=host, local_rank=rank)
        return RankProcess(place.on_one_of(usable_cores()), self._session)

    def __exit__(self, *exception: object) -> None:
        # Ranks that are already gone need no message.
        for member in self._members:
            with suppress(OSError):
                member.send(("stop",))
        self._end(grace_s=10.0 if exception[0] is None else 1.0)

    def load(self, op: Collective) -> None:
        """Make `op` the collective that `sample` and `values` run."""
        # A transfer between two ranks has a sender and a receiver, whose times are told apart
        # (`transfer_time_s`).
        check_collective(op, self._num_nodes)
        n_asked = op.num_ranks * op.concurrent
        if n_asked != self.num_ranks:
            raise PerfModelError(
                f"the group has {self.num_ranks} ranks, but {op.collective} needs {n_asked}"
            )
        self.ask("load", op)
        self._of_two_sides = op.collective == "send_recv" and n_asked == TWO_SIDES

    def sample(self, calls: int, meter: Meter) -> Sample:
        """Run `calls` calls on all ranks.

        The slowest rank's time counts. A message between two ranks takes as long as on the side
        that waits less (`transfer_time_s`).
        """
        before = self._readings(meter)
        spans_of_ranks = self.ask("run", calls)
        after = self._readings(meter)

        # Clocks of ranks are never compared: each span is a difference on one of them.
        if self._of_two_sides:
            wall_s = float(transfer_time_s(*spans_of_ranks).sum())
        else:
            wall_s = max(spans[-1][1] - spans[0][0] for spans in spans_of_ranks)

        # The most disturbed node counts, since a collective waits for all.
        shares = []
        for node_meter, node_before, node_after in zip(
            self._meters(meter), before, after, strict=True
        ):
            shares.append(node_meter.interference(node_before, node_after))
        return Sample(calls, wall_s, max(shares))

    def sample_kernel(
        self, op: KernelOp, calls: int, collectives: int, meter: Meter
    ) -> tuple[Sample, bool]:
        """Run calls of a kernel on all ranks while a number of the loaded collectives run.

        The slowest rank's time counts. The result also says whether the collectives outlasted the
        kernel on every rank.
        """
        before = self._readings(meter)
        answers = self.ask("time_kernel", op, calls, collectives)
        after = self._readings(meter)
        wall_s = max(seconds for seconds, _ in answers)
        shares = []
        for node_meter, node_before, node_after in zip(
            self._meters(meter), before, after, strict=True
        ):
            shares.append(node_meter.interference(node_before, node_after))
        return Sample(calls, wall_s, max(shares)), all(outlasted for _, outlasted in answers)

    def _readings(self, meter: Meter) -> list[Reading]:
        """A reading per node: its cores, and the processor time of its ranks."""
        if not self._agents:
            return [meter.read(sum(self.ask("own_s")))]
        arguments: list[tuple[Meter]] = []
        for node_meter in self._meters(meter):
            arguments += [(node_meter,)] * self.ranks_per_node
        readings = self.ask_each("reading", arguments)

        # Ranks of a node read the same cores, but each its own processor time.
        node_readings = []
        for first in range(0, self.num_ranks, self.ranks_per_node):
            on_node = readings[first : first + self.ranks_per_node]
            own_s = sum(reading.own_s for reading in on_node)
            node_readings.append(replace(on_node[0], own_s=own_s))
        return node_readings

    def _meters(self, meter: Meter) -> list[Meter]:
        """The meter of each node: it watches the cores that the node's ranks may use."""
        # Counters of the system tell of one machine alone. Other meters are alike everywhere.
        if not (self._agents and isinstance(meter, MachineMeter)):
            return [meter] * (self._num_nodes if self._agents else 1)
        meters: list[Meter] = []
        for first in range(0, self.num_ranks, self.ranks_per_node):
            cores: set[int] = set()
            for agent in self._agents[first : first + self.ranks_per_node]:
                cores.update(agent.hello.cores)
            meters.append(replace(meter, cores=tuple(sorted(cores))))
        return meters

    def values(self) -> list[np.ndarray]:
        """Result of the loaded collective, one float64 array per rank."""
        return self.ask("values")

    def ask(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of each rank's session; return one answer per rank."""
        return self.ask_each(name, [arguments] * self.num_ranks)

    def ask_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of each rank's session, rank r with `arguments[r]`; return the answers."""
        if not self._members:
            raise CalibrationError("the group of ranks is not running; enter its context again")
        for rank, member in enumerate(self._members):
            try:
                member.send((name, *arguments[rank]))
            except OSError:
                self._end(grace_s=0.0)
                raise CalibrationError(_gone(rank, member)) from None
        return self._answers(ANSWER_TIMEOUT_S)

    def _answers(self, timeout_s: float) -> list[Any]:
        """One answer per rank; a failure ends the group, as others may wait for that rank."""
        try:
            return self._collect(time.monotonic() + timeout_s)
        except CalibrationError:
            self._end(grace_s=0.0)
            raise

    def _collect(self, deadline_s: float) -> list[Any]:
        """One answer per rank, as they come; `CalibrationError` if one fails or is late."""
        values: dict[int, Any] = {}
        while len(values) < self.num_ranks:
            waiting = {
                member.fileno(): rank
                for rank, member in enumerate(self._members)
                if rank not in values
            }
            ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                rank = min(waiting.values())
                raise CalibrationError(
                    f"{_name(rank, self._members[rank])} does not answer; check whether the machine is overloaded"
                )
            # A rank that fails or dies ends the measurement at once, whatever the others are
            # waiting for.
            for handle, rank in waiting.items():
                if handle not in ready:
                    continue
                member = self._members[rank]
                try:
                    status, value = member.recv()
                except (EOFError, OSError):
                    raise CalibrationError(_gone(rank, member)) from None
                if status != "ok":
                    raise CalibrationError(f"{_name(rank, member)}: {value}")
                values[rank] = value
        return [values[rank] for rank in range(self.num_ranks)]

    def _end(self, grace_s: float) -> None:
        """End all ranks, each after a grace period."""
        for member in self._members:
            member.end(grace_s)
        self._members = []


def check_group(num_ranks: int) -> None:
    """Raise `PerfModelError` unless this host can run a group of this many processes."""
    if not 2 <= num_ranks <= MAX_RANKS:
        raise PerfModelError(
            f"a collective needs 2 to {MAX_RANKS} ranks on one host, got {num_ranks}"
        )


def check_collective(op: Collective, hosts: int = 1) -> None:
    """Raise `PerfModelError` unless processes on this many hosts can run `op` exactly as asked."""
    if op.collective not in MEASURED_COLLECTIVES:
        raise UnknownNameError("collective to measure", op.collective, MEASURED_COLLECTIVES)
    if op.dtype not in JAX_DTYPES:
        raise UnknownNameError("dtype to measure", op.dtype, JAX_DTYPES)
    if op.num_nodes != hosts:
        raise PerfModelError(
            f"{op.num_ranks} ranks on {hosts} {plural('host', hosts)} have ranks_per_node = "
            f"{op.num_ranks // hosts}, not {op.ranks_per_node}; to use several hosts, start perfmodel with a "
            "launcher and --launched"
        )
    # Every rank has a part of whole elements.
    unit = dtype_bytes(op.dtype) * op.num_ranks
    if op.bytes < unit or op.bytes % unit:
        raise PerfModelError(
            f"{op.collective} of {op.bytes:g} bytes is not divisible into {op.dtype} elements over {op.num_ranks} "
            f"ranks; use a multiple of {unit}"
        )


def _gone(rank: int, member: RankProcess | Agent) -> str:
    """A sentence that a rank has ended, and where its last output is."""
    return f"{_name(rank, member)} {member.gone}"


def _name(rank: int, member: RankProcess | Agent) -> str:
    """Name of a rank for messages, with its process and node if it runs elsewhere."""
    return f"rank {rank}{f' ({member.hello})' if isinstance(member, Agent) else ''}"


def transfer_time_s(
    send_s: Float[np.ndarray, "calls 2"], receive_s: Float[np.ndarray, "calls 2"]
) -> Float[np.ndarray, " calls"]:
    """Seconds of every point-to-point transfer: the shorter of its send and receive call.

    A transfer begins when the later of the two calls is launched and ends when both return, so that
    the call that was launched first contains its waiting for the other; the shorter holds the
    transfer alone (DistSim section 4.2, after dPRO). Each side's clock is read for its own calls
    only: the clocks need not agree. If both sides send and receive at once, as neighbouring stages
    of 1F1B do, each call is both a send and a receive.

    Args:
        send_s: start and end of every send call on the sender's clock.
        receive_s: start and end of the receive call of the same transfer on the receiver's clock.

    Raises:
        CalibrationError: for sides with different numbers of calls, or a call that ends before it
            starts.
    """
    # Lists come from two ranks, whose calls have to match one by one.
    send_s = np.asarray(send_s, float)
    receive_s = np.asarray(receive_s, float)
    if send_s.shape != receive_s.shape or send_s.ndim != 2 or send_s.shape[1] != 2:
        raise CalibrationError(
            "send and receive calls must be two equal lists of (start, end); "
            f"got shapes {send_s.shape} and {receive_s.shape}"
        )
    call_s = np.stack([send_s[:, 1] - send_s[:, 0], receive_s[:, 1] - receive_s[:, 0]])
    if not (call_s >= 0).all():
        raise CalibrationError(
            "a send or receive call ends before it starts; use one clock for both ends"
        )
    return call_s.min(axis=0)
