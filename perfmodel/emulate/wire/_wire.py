"""Starts and ends the process of the emulated ranks, and connects real ranks to it by gloo."""

import json
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from perfmodel.emulate.environment import EmulationError, Orders
from perfmodel.emulate.wire._gloo_messages import ABOVE_LOOPBACK, connects_to, rank_info
from perfmodel.emulate.wire._operations import Network
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.measure.ranks import Host

PEER: Final = "peer.json"
"""File for the record of the process of the emulated ranks."""
OPERATION_COLUMNS: Final = (
    *("rank", "group", "ranks", "sequence", "kind", "in_bytes", "out_bytes", "messages"),
    *("first_s", "begin_s", "last_s"),
)
TIMEOUT: Final = timedelta(minutes=30)
"""Default timeout of groups, as in torch."""
_END_S: Final = 20.0
JOIN, CONNECTED, CLOCK = "join", "connected", "clock"
"""Requests to the process of the emulated ranks."""
_CLOCK_ROUNDS: Final = 20
_TIMES: Final = ("first_s", "begin_s", "last_s")


def on_the_wire(c10d: Any, orders: Orders, members: Callable[[], tuple[int, ...]]) -> type:
    """Make a gloo process group of torch that reaches emulated ranks at the peer process.

    All else is the library's own: it connects to them and sends them its messages. Tensors on a GPU
    it stages through the host itself; a script that asks for NCCL, whose messages nobody but NCCL
    answers, gets gloo too.

    Args:
        c10d: `torch.distributed.distributed_c10d`.
        orders: orders of this rank.
        members: members of the group that is being made.
    """
    library: Any = c10d.ProcessGroupGloo

    class OnTheWire(library):
        def __init__(
            self, store: Any, place: int, size: int, timeout: timedelta | None = None
        ) -> None:
            # The library asks the store where its peers listen. For emulated ranks the answer is
            # written there beforehand: they all listen at the peer process and differ by number.
            ranks = members()
            joined = join(orders, ranks)
            store = c10d.PrefixStore("wire", store)
            for peer, rank in enumerate(ranks):
                if rank not in orders.real_ranks:
                    # the key that gloo gives a rank of its first device
                    first = joined.base + peer * size
                    store.set(
                        f"0/{peer}",
                        rank_info(joined.peer_host, joined.port, range(first, first + size)),
                    )
            # A device with an address that gloo takes for the higher one, so that it connects
            # instead of waiting (`ABOVE_LOOPBACK`).
            options = library._Options()
            options._devices = [library.create_device(hostname=joined.host)]
            options._timeout = timeout or TIMEOUT
            super().__init__(store, place, size, options)
            # Emulated ranks answer a real rank alone, which may finish its collectives and end
            # before another real rank has found its place; that one would then fail for a closed
            # connection.
            wait_for_real_ranks(orders, ranks)

    return OnTheWire


def check_first_ranks(dist: Any, orders: Orders) -> None:
    """Refuse DDP if the first rank of a group is emulated, because DDP takes parameters and bucket
    order from that rank.

    Args:
        dist: `torch.distributed`.
        orders: orders of this rank.
    """
    # DDP calls this first, with the process group.
    check = dist._verify_params_across_processes

    def checked(group: Any, *rest: Any) -> None:
        first = dist.get_process_group_ranks(group)[0]
        if first not in orders.real_ranks:
            raise EmulationError(
                f"rank {orders.rank}: DistributedDataParallel takes its parameters from rank {first}, the first "
                f"of its group, which is emulated and has no model; make it real with --real-ranks {first}"
            )
        check(group, *rest)

    dist._verify_params_across_processes = checked


@dataclass(frozen=True)
class Joined:
    """Addresses at which a real rank finds the emulated ranks of a group."""

    host: str
    """This rank's address, from which its library connects."""
    peer_host: str
    port: int
    base: int
    """First of the connection numbers of the group; each rank has as many of them as the group has
    ranks."""


def join(orders: Orders, members: tuple[int, ...]) -> Joined:
    """Announce a new group to the emulated ranks.

    Raises:
        EmulationError: they are gone, or gloo would wait for them to connect.
    """
    (data_port, base), host = _ask_peer(orders, JOIN, members)
    peer_host = orders.wire.rpartition(":")[0]
    if is_loopback(peer_host):
        host = ABOVE_LOOPBACK
    if not connects_to(host, peer_host):
        raise EmulationError(
            f"rank {orders.rank}: the emulated ranks' address {peer_host} must be lower than this host's {host}, "
            "because gloo connects to the lower one; start the run on the other host, or give that host a "
            "second, lower address"
        )
    return Joined(host, peer_host, data_port, base)


def wait_for_real_ranks(orders: Orders, members: tuple[int, ...]) -> None:
    """Wait until every real rank of a group has connected to all others.

    Raises:
        EmulationError: the emulated ranks are gone.
    """
    _ask_peer(orders, CONNECTED, members)


def _ask_peer(orders: Orders, request: str, members: tuple[int, ...]) -> tuple[Any, str]:
    """Send the emulated ranks a request about a group.

    Returns:
        Their answer, and the address by which this host reaches them, which the library will use
        too.

    Raises:
        EmulationError: they are gone.
    """
    # A group goes by its members' ranks, which every rank spells alike.
    name = ",".join(map(str, members))
    peer_host, _, port = orders.wire.rpartition(":")
    try:
        with socket.create_connection((peer_host, int(port))) as connected:
            host = connected.getsockname()[0]
            with connected.makefile("rw") as line:
                line.write(
                    json.dumps([orders.wire_key, request, orders.rank, name, members]) + "\n"
                )
                line.flush()
                return json.loads(line.readline()), host
    except (OSError, ValueError) as error:
        raise EmulationError(
            f"rank {orders.rank}: the connection to the emulated ranks was lost ({error})"
        ) from None


def is_loopback(address: str) -> bool:
    """Whether an IPv4 address is local to this host."""
    return address.startswith("127.")


@dataclass(frozen=True, kw_only=True)
class PeerPlace:
    """Place where the process of the emulated ranks runs."""

    address: str = "127.0.0.1"
    """IPv4 address at which real ranks reach it."""
    command: tuple[str, ...] = (sys.executable, str(Path(__file__).with_name("_peer.py")))
    """Command that starts the peer process, with a prefix if it runs on another host."""
    name: str = ""
    """Host as the user named it; empty: this one."""
    other_clock: bool = False
    """Whether that host has another clock than this one."""
    compiled: bool = True
    """Whether messages may be answered in C if the loop can be built on that host."""

    @classmethod
    def named(cls, host: str) -> Self:
        """On the host of a name or address, `USER@HOST` too: this one, else by ssh.

        Raises:
            PerfModelError: a host that is not known.
        """
        try:
            addresses = socket.getaddrinfo(
                host.rpartition("@")[2], None, socket.AF_INET, socket.SOCK_STREAM
            )
        except OSError as error:
            raise PerfModelError(
                f"emulate: --peer {host}: {error.strerror or error}; name a host or an address"
            ) from None
        address = str(addresses[0][4][0])
        # Another host is reached by ssh without a terminal; its clock is not this one's.
        if is_loopback(address):
            return cls(address=address, name=host)
        shell = (
            "ssh",
            "-o",
            "BatchMode=yes",
            host,
            "python3",
            "-m",
            "perfmodel.emulate.wire._peer",
        )
        return cls(address=address, command=shell, name=host, other_clock=True)

    @classmethod
    def on_host(cls, host: "Host") -> Self:
        """On an emulated host."""
        start = (sys.executable, "-m", "perfmodel.emulate._on_host", host.namespace, host.address)
        return cls(address=host.address, command=(*start, *cls().command), name=host.address)


@dataclass(eq=False)
class PeerProcess:
    """The process that stands for all emulated ranks."""

    process: "subprocess.Popen[str]"
    orders: Orders
    """Orders of real ranks, with the address at which it answers."""
    ahead_s: float
    """Seconds by which its clock is ahead of this host's."""

    @property
    def failed(self) -> bool:
        """Whether the process has ended, or is ending, before it was told to."""
        # It prints its reason before its connections close. Ranks fail only then, and some of them
        # before this process ends, so a look here after a rank has failed shows which came first.
        if self.process.poll() is not None or self.process.stdout is None:
            return True
        return bool(select.select([self.process.stdout], [], [], 0.0)[0])

    def end(self) -> None:
        """End the process; before it ends, it writes its record to the orders' folder (`PEER`)."""
        # Closing its standard input tells it to end; it then prints its records.
        text, _ = self.process.communicate(timeout=_END_S)
        noted = json.loads(text)
        for operation in noted["operations"]:
            operation |= {name: operation[name] - self.ahead_s for name in _TIMES}
        (Path(self.orders.out) / PEER).write_text(json.dumps(noted))

    @property
    def failure(self) -> str:
        """The reason why the process ends."""
        text = self.process.stdout.readline() if self.process.stdout is not None else ""
        try:
            return json.loads(text)["failure"]
        except (ValueError, KeyError):
            return "the process of the emulated ranks ended"


def clock_ahead_s(orders: Orders) -> float:
    """Seconds by which the peer's clock is ahead, by the fastest of several round trips.

    A round's error is at most half of what it took (Cristian's algorithm).

    Raises:
        EmulationError: the peer cannot be reached.
    """
    peer_host, _, port = orders.wire.rpartition(":")
    fastest_s = float("inf")
    ahead_s = 0.0
    for _ in range(_CLOCK_ROUNDS):
        try:
            with (
                socket.create_connection((peer_host, int(port)), _END_S) as connected,
                connected.makefile("rw") as line,
            ):
                sent_s = time.perf_counter()
                line.write(json.dumps([orders.wire_key, CLOCK]) + "\n")
                line.flush()
                there_s = float(json.loads(line.readline()))
                back_s = time.perf_counter()
        except (OSError, ValueError) as error:
            raise EmulationError(
                f"emulate: the emulated ranks started, but {orders.wire} cannot be reached ({error}); check for "
                "a firewall between the hosts"
            ) from None
        # The clock was read somewhere between sending and the answer: in the middle, with an error
        # of at most half the round.
        if back_s - sent_s < fastest_s:
            fastest_s = back_s - sent_s
            ahead_s = there_s - (sent_s + back_s) / 2
    return ahead_s


def _started(place: PeerPlace) -> "subprocess.Popen[str]":
    """Start the process of the emulated ranks, its standard input and output joined to this one."""
    try:
        return subprocess.Popen(
            place.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise EmulationError(
            f"emulate: the process of the emulated ranks cannot be started ({error}); {place.command[0]} must be "
            "installed here"
        ) from None


def _reply(process: "subprocess.Popen[str]", line: str) -> str:
    """Send the process a line; return its answer, empty if it has ended."""
    if process.stdin is None or process.stdout is None:
        raise EmulationError(
            "emulate: the process of the emulated ranks has no pipes; start it with `peers`"
        )
    # A process that has ended already shows by its empty answer.
    with suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process.stdout.readline()


@contextmanager
def peers(orders: Orders, network: Network, place: PeerPlace) -> Iterator[PeerProcess]:
    """Context of the emulated ranks' process, from start until its record is read.

    Raises:
        EmulationError: their process does not start.
    """
    # A secret per run, since the port is open to whoever reaches the host.
    orders = replace(orders, wire=f"{place.address}:0", wire_key=secrets.token_hex(16))
    fields: Mapping[str, Any] = {
        **json.loads(orders.to_json()),
        "network": asdict(network),
        "compiled": place.compiled,
    }
    process = _started(place)
    try:
        ready, _, port = _reply(process, json.dumps(fields)).partition(" ")
        if ready != "ready":
            at_host = f" on {place.name}" if place.name else ""
            raise EmulationError(
                f"emulate: the process of the emulated ranks did not start{at_host}; see its messages on "
                "standard error. Another host needs ssh without a password and perfmodel installed for its "
                "python3"
            )
        orders = replace(orders, wire=f"{place.address}:{int(port)}")
        ahead_s = clock_ahead_s(orders) if place.other_clock else 0.0
        yield PeerProcess(process, orders, ahead_s)
    finally:
        process.kill()
        process.wait()
        for stream in filter(None, (process.stdin, process.stdout)):
            stream.close()
