"""Ranks on several nodes: process 0 measures, the others are agents that run ranks for it.

Agents find process 0 through a file in the folder of the tables, which all nodes share: its address
and a secret made for this launch. Without a shared folder both are given (`--coordinator`,
`PERFMODEL_LAUNCH_KEY`). Each keeps one connection, on which process 0 sends orders:
`("start", place, session)` a rank, `("ask", request)` it something, `("end", grace_s)` it,
`("port",)` for a free port, and `("leave", why)`; a rank's answers come back as they are.
"""

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from perfmodel.catalog.this_machine import usable_cores
from perfmodel.errors import CalibrationError
from perfmodel.measure.ranks._launch import Launch, Server, join, made_meeting
from perfmodel.measure.ranks._rank import Place, RankProcess, RankSession, free_port
from perfmodel.measure.tables import collector_sha256, software
from perfmodel.ops import Collective
from perfmodel.units import plural

ORDER_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Hello:
    """A process's introduction on connecting."""

    index: int
    count: int
    """Number of processes that its launcher started."""
    node: str
    """Name of the process's node."""
    address: str
    """Address at which other processes reach it."""
    cores: tuple[int, ...]
    """Processor cores that the process may use."""
    versions: Mapping[str, str]
    """Versions of the software that measures there."""

    def __str__(self) -> str:
        return f"process {self.index} on {self.node}"


class Agent:
    """Process 0's connection to an agent; from `start` to `end` it is the agent's rank."""

    gone = "ended unexpectedly; see its messages on standard error there"

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self._connection = connection
        self.hello = hello

    def fileno(self) -> int:
        """Handle for `multiprocessing.connection.wait`."""
        return self._connection.fileno()

    def free_port(self) -> int:
        """A free port on the agent's node."""
        # Only that node knows what is free there. A rank is not running yet, so that the next
        # answer is this one.
        try:
            self._connection.send(("port",))
            if self._connection.poll(ORDER_TIMEOUT_S):
                return self._connection.recv()[1]
        except (EOFError, OSError):
            pass
        raise CalibrationError(f"{self.hello} does not answer; check that it still runs")

    def start(self, place: Place, session: type[RankSession]) -> None:
        """Start a rank on the machine of this agent."""
        self._connection.send(("start", place, session))

    def send(self, request: tuple[Any, ...]) -> None:
        """Send the rank a request; raises `OSError` if the agent has ended."""
        self._connection.send(("ask", request))

    def recv(self) -> tuple[str, Any]:
        """Receive the next answer; raises `EOFError` or `OSError` if the agent has ended."""
        return self._connection.recv()

    def end(self, grace_s: float) -> None:
        """End the rank after a grace period; pending answers are dropped."""
        # Answers of the rank that are still under way come before the one that it has ended.
        with suppress(EOFError, OSError):
            self._connection.send(("end", grace_s))
            while self._connection.poll(grace_s + ORDER_TIMEOUT_S):
                if self._connection.recv()[0] == "ended":
                    return
        # The connection is out of step, so its next use reports that the rank is gone.
        self._connection.close()

    def leave(self, why: str | None) -> None:
        """Tell the agent that it may end."""
        with suppress(OSError):
            self._connection.send(("leave", why))
        self._connection.close()


@contextmanager
def gathered(launch: Launch, folder: Path, timeout_s: float) -> Iterator[tuple[Agent, ...]]:
    """Context with all processes of the launch as agents, this one (process 0) first; they are
    released at the end.

    Raises:
        CalibrationError: if one does not come in time, two have one number, or their software
            differs.
    """
    # Process 0 is an agent of its own, so that all ranks are started in the same way.
    meeting = made_meeting(launch)
    ours, theirs = Pipe()
    local_agent = threading.Thread(target=serve_orders, args=(theirs,), daemon=True)
    local_agent.start()
    agents = {0: Agent(ours, _hello(launch, meeting.host))}
    try:
        with Server(meeting, folder) as server:
            _accept_all(server, agents, launch, timeout_s)
        yield tuple(agents[index] for index in range(launch.count))

    # Every agent gets the reason for the end, so that its log contains it.
    except BaseException as error:
        for agent in agents.values():
            agent.leave(f"process 0 stopped: {error or 'interrupted'}")
        raise
    for agent in agents.values():
        agent.leave(None)
    local_agent.join(ORDER_TIMEOUT_S)


def serve_agent(launch: Launch, folder: Path, timeout_s: float) -> None:
    """Serve as an agent until released.

    Raises:
        CalibrationError: if process 0 cannot be found, goes away, or stops for a cause, which is
            named.
    """
    # Orders end by being sent home, or because process 0 has died.
    connection, address = join(launch, folder, timeout_s)
    try:
        connection.send(_hello(launch, address))
        why = serve_orders(connection)
    except (EOFError, OSError):
        why = "process 0 ended unexpectedly; see its messages on standard error there"
    if why is not None:
        raise CalibrationError(f"process {launch.index} on {launch.node}: {why}")


def _accept_all(server: Server, agents: dict[int, Agent], launch: Launch, timeout_s: float) -> None:
    """Wait until an agent of every number has come, and add them to `agents`."""
    while len(agents) < launch.count:
        missing = sorted(set(range(launch.count)) - set(agents))
        connection = server.accept(missing, launch, timeout_s)
        # One that came and went is still missing.
        try:
            agent = Agent(connection, connection.recv())
        except (EOFError, OSError):
            continue
        try:
            _check(agent.hello, agents)
        except CalibrationError as error:
            agent.leave(str(error))
            raise
        agents[agent.hello.index] = agent


def serve_orders(connection: Connection) -> str | None:
    """Serve requests until released; returns the cause if it ends early."""
    cores = usable_cores()
    rank: RankProcess | None = None
    try:
        while True:
            ready, *_ = wait([connection, rank.fileno()] if rank else [connection])
            if rank is not None and ready is not connection:
                rank = _pass_answer_on(connection, rank)
                continue
            # Process 0 gives an order. A rank that died meanwhile says so when its pipe is read.
            order, *arguments = connection.recv()
            if order == "leave":
                return arguments[0]
            rank = _obey(connection, rank, order, arguments, cores)
    finally:
        if rank is not None:
            rank.end(0.0)


def _pass_answer_on(connection: Connection, rank: RankProcess) -> RankProcess | None:
    """Send the rank's answer to process 0, or that it is gone; returns the rank that is left."""
    try:
        connection.send(rank.recv())
    except EOFError:
        connection.send(("error", rank.gone))
        rank.end(0.0)
        return None
    return rank


def _obey(
    connection: Connection,
    rank: RankProcess | None,
    order: str,
    arguments: Sequence[Any],
    cores: Sequence[int],
) -> RankProcess | None:
    """Carry out an order of process 0; returns the rank that runs afterwards, if any."""
    match order:
        case "start":
            place, session = arguments
            return RankProcess(replace(place.on_one_of(cores), device=_only_gpu()), session)
        case "port":
            connection.send(("ok", free_port()))
        case "ask" if rank is not None:
            with suppress(OSError):
                rank.send(*arguments)
        case "end":
            if rank is not None:
                rank.end(*arguments)
            connection.send(("ended", None))
            return None
    return rank


def members(agents: Sequence[Agent], op: Collective) -> list[Agent]:
    """The agents that run a collective, in rank order; empty if local processes do.

    Raises:
        CalibrationError: where there are too few processes or nodes.
    """
    if not agents:
        return []
    nodes: dict[str, list[Agent]] = {}
    for agent in agents:
        nodes.setdefault(agent.hello.node, []).append(agent)

    # The ranks of all groups on each of as many nodes as it takes, of those with enough processes.
    per_node = op.ranks_per_node * op.concurrent
    wide = [on_node for on_node in nodes.values() if len(on_node) >= per_node]
    if len(wide) < op.num_nodes or op.num_ranks % op.ranks_per_node:
        started_text = ", ".join(f"{len(on_node)} on {node}" for node, on_node in nodes.items())
        raise CalibrationError(
            f"{op.collective} over {op.num_ranks} ranks, {op.ranks_per_node} per node, needs {op.num_nodes} "
            f"{plural('node', op.num_nodes)} with {per_node} started "
            f"{plural('process', per_node)} each; there are {started_text}"
        )
    taking_part: list[Agent] = []
    for on_node in wide[: op.num_nodes]:
        taking_part += on_node[:per_node]
    return taking_part


def _only_gpu() -> int | None:
    """Index of the process's GPU if the launcher gives every process its own; else None."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return 0 if visible and "," not in visible else None


def _hello(launch: Launch, address: str) -> Hello:
    """Return this process's description of itself."""
    packages = ("jax", "jaxlib", "torch", "numpy", "perfmodel")
    versions = {**software(packages), "measuring code": collector_sha256()}
    return Hello(launch.index, launch.count, launch.node, address, usable_cores(), versions)


def _check(new: Hello, agents: Mapping[int, Agent]) -> None:
    """Raise `CalibrationError` unless a process of the launch measures as process 0 does."""
    # Rows of one table are measured alike: by the same software and code on every node.
    first = agents[0].hello
    if new.count != first.count:
        raise CalibrationError(
            f"{new} was started as one of {new.count} processes, but process 0 as one of {first.count}; start all "
            "with the same number"
        )
    if new.index in agents:
        raise CalibrationError(
            f"two processes have number {new.index}, on {agents[new.index].hello.node} and {new.node}"
        )
    for name in sorted({*new.versions, *first.versions}):
        theirs = new.versions.get(name, "none")
        ours = first.versions.get(name, "none")
        if theirs != ours:
            raise CalibrationError(
                f"{new} has {name} {theirs[:20]}, but process 0 on {first.node} has {ours[:20]}; install the "
                "same version"
            )
