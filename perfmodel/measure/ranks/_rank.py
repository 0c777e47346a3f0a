"""One rank of a process group, its process on this machine and the pipe to it.

A rank does what its session can do, when told to. `RankGroup` starts it.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Self

from perfmodel.measure.ranks._hosts import Host
from perfmodel.measure.ranks._launch import forget_launcher
from perfmodel.measure.timing import Meter, Reading
from perfmodel.ops import Collective
from perfmodel.ops.programs import JAX_DTYPES
from perfmodel.processes import end_with_spawner
from perfmodel.units import dtype_bytes


@dataclass(frozen=True)
class Place:
    """A process's rank, group and core."""

    rank: int
    """Number of the rank in its group."""
    num_ranks: int
    """Number of ranks in the group."""
    coordinator: str
    """`host:port` at which rank 0 brings the group together."""
    core: int | None = None
    """Core that the process is pinned to."""
    host: Host | None = None
    """Emulated host to move to."""
    local_rank: int = 0
    """Number of the rank among those of its node."""
    device: int | None = None
    """GPU of the rank among those visible to it; None: the one of its local rank."""

    def on_one_of(self, cores: Sequence[int]) -> Self:
        """Assign a core; ranks share cores if there are too few."""
        return replace(self, core=cores[self.local_rank % len(cores)])


def serve(pipe: Connection, place: Place, session_type: "type[RankSession]") -> None:
    """Join the group and answer requests until told to stop.

    A request is a tuple of a method of the session and its arguments, as `("run", calls)`, or
    `("stop",)`; an answer is `("ok", value)` or `("error", text)`.
    """
    # Set up the process before any framework is imported. gloo announces itself on standard output,
    # which belongs to the parent's result.
    end_with_spawner()
    forget_launcher()
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if place.core is not None:
        os.sched_setaffinity(0, {place.core})
    try:
        if place.host is not None:
            place.host.enter()
        session = session_type(place)
    except Exception as error:
        pipe.send(("error", f"could not join the group: {error}"))
        return
    pipe.send(("ok", None))

    # A request that fails is answered, and the rank goes on; whoever asked decides.
    for name, *arguments in iter(lambda: _receive(pipe), None):
        try:
            pipe.send(("ok", getattr(session, name)(*arguments)))
        except Exception as error:
            pipe.send(("error", f"{name} failed: {error}"))
    session.leave()


def _receive(pipe: Connection) -> tuple[Any, ...] | None:
    """The next request; None if the rank is told to stop or its parent has ended."""
    try:
        request = pipe.recv()
    except EOFError:
        return None
    return None if request[0] == "stop" else request


class RankSession:
    """A rank's session; `RankGroup.ask` calls methods of its subclasses by name."""

    def __init__(self, place: Place) -> None:
        # One thread per rank, set before JAX is imported.
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
        )
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            place.coordinator, place.num_ranks, place.rank, initialization_timeout=60
        )
        self.rank = place.rank

    def own_s(self) -> float:
        """Processor time of this rank so far."""
        return time.process_time()

    def reading(self, meter: Meter) -> Reading:
        """Reading of a meter on this rank's node."""
        return meter.read(self.own_s())

    def leave(self) -> None:
        """Leave the group; nothing can be asked after this."""
        import jax

        jax.distributed.shutdown()


Span = tuple[float, float]
"""Start and end of a call, in seconds on its rank's clock."""


def spans(calls: int, call: Callable[[], object]) -> list[Span]:
    """Start and end of each of `calls` calls, after a call that synchronises the ranks."""
    call()
    clock_s = [time.perf_counter()]
    for _ in range(calls):
        call()
        clock_s.append(time.perf_counter())
    return list(pairwise(clock_s))


class CollectiveSession(RankSession):
    """Runs the one collective that is loaded."""

    def load(self, op: Collective) -> None:
        """Compile the collective and fill this rank's buffer: element i is i mod 1024, plus the
        rank."""
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        # Groups that run at once are the rows of one mesh; the collective runs along its columns.
        devices = np.array(jax.devices())[np.array(groups_at_once(op))]
        mesh = jax.sharding.Mesh(devices, ("group", "rank"))
        spec = PartitionSpec(("group", "rank"))
        count = local_elements(op)
        local = (np.arange(count) % 1024 + self.rank).astype(jax.numpy.dtype(JAX_DTYPES[op.dtype]))
        self._buffer = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), local)
        mapped = jax.shard_map(
            _operation(op), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        self._function = jax.jit(mapped)

    def run(self, calls: int) -> list[Span]:
        """Start and end of each of `calls` calls, after a call that synchronises the ranks."""
        import jax

        return spans(calls, lambda: jax.block_until_ready(self._function(self._buffer)))

    def values(self) -> Any:
        """This rank's part of the result, as a NumPy array."""
        import numpy as np

        return np.asarray(self._function(self._buffer).addressable_shards[0].data, np.float64)


def groups_at_once(op: Collective) -> list[list[int]]:
    """Ranks of every group that runs a collective at the same time, in the order of the group.

    Ranks count through one node after another. On each node the groups stand beside one another, as
    many ranks of each as `ranks_per_node`, so that all of them share the node's links.
    """
    on_node = op.ranks_per_node * op.concurrent
    groups = []
    for group in range(op.concurrent):
        first = group * op.ranks_per_node
        ranks = []
        for member in range(op.num_ranks):
            node, place = divmod(member, op.ranks_per_node)
            ranks.append(node * on_node + first + place)
        groups.append(ranks)
    return groups


def local_elements(op: Collective) -> int:
    """Elements of one rank's input so that the collective moves `op.bytes` as nccl-tests counts."""
    # nccl-tests counts the bytes of a gather's output, and of every other collective's input.
    elements = int(op.bytes) // dtype_bytes(op.dtype)
    return elements // op.num_ranks if op.collective == "all_gather" else elements


def _operation(op: Collective) -> Any:
    """The collective as a function of one rank's array inside `shard_map`."""
    from jax import lax

    # Every rank sends to the next and receives from the one before, as nccl-tests' sendrecv does.
    ring = [(i, (i + 1) % op.num_ranks) for i in range(op.num_ranks)]
    operations = {
        "all_reduce": partial(lax.psum, axis_name="rank"),
        "all_gather": partial(lax.all_gather, axis_name="rank", tiled=True),
        "reduce_scatter": partial(lax.psum_scatter, axis_name="rank", tiled=True),
        "all_to_all": partial(
            lax.all_to_all, axis_name="rank", split_axis=0, concat_axis=0, tiled=True
        ),
        "send_recv": partial(lax.ppermute, axis_name="rank", perm=ring),
    }
    return operations[op.collective]


class RankProcess:
    """A rank's process, started at once; it serves requests of `send` (see `serve`)."""

    gone = "ended unexpectedly; see its messages on standard error"

    def __init__(self, place: Place, session: type[RankSession]) -> None:
        # A fresh interpreter per rank: JAX's threads do not survive a fork.
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, place, session), daemon=True)
        self.process.start()
        theirs.close()

    def fileno(self) -> int:
        """Handle for `multiprocessing.connection.wait`, readable when there is an answer or the
        rank has ended."""
        return self._pipe.fileno()

    def send(self, request: tuple[Any, ...]) -> None:
        """Send a request; raises `OSError` if the rank has ended."""
        self._pipe.send(request)

    def recv(self) -> tuple[str, Any]:
        """Receive the next answer; raises `EOFError` or `OSError` if the rank has ended."""
        return self._pipe.recv()

    def end(self, grace_s: float) -> None:
        """Wait for the rank to end, then end it by force."""
        # A rank stuck in a collective does not heed a polite signal.
        self.process.join(grace_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self._pipe.close()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]
