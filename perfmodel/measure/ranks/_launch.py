"""Processes of a launch: who they are, and how they find and authenticate each other.

Torchrun, mpirun and srun start one command many times and number the copies.
"""

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Final, Self

from perfmodel.errors import CalibrationError
from perfmodel.units import plural

LAUNCHERS: Final = (
    ("torchrun", "RANK", "WORLD_SIZE"),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("srun", "SLURM_PROCID", "SLURM_NTASKS"),
)
"""Launchers with the variables that they set: a process's number and how many there are."""
NODE: Final = "PERFMODEL_NODE"
"""Variable that names the node if its host name is not unique."""
_OTHERS: Final = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "RANK",
    "WORLD_SIZE",
)
"""Variables by which frameworks join a launcher's group, in addition to those that begin with
`_PREFIXES`."""
_PREFIXES: Final = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "SLURM_")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process among those that a launcher started."""

    launcher: str
    """Launcher that started the processes."""
    index: int
    """Number of the process: process 0 measures, the others follow its requests."""
    count: int
    """Number of processes."""
    node: str
    """Name of the node that it runs on."""
    host: str | None = None
    """Address at which the others reach process 0; none: found through the folder of the tables."""
    port: int | None = None
    """Port of process 0; none: any that is free."""


def find_launch(
    environ: Mapping[str, str] = os.environ,
    *,
    process: int | None = None,
    processes: int | None = None,
    coordinator: str | None = None,
) -> Launch | None:
    """This process's rank in the launch, by arguments or the launcher's environment.

    Args:
        process: number of this process.
        processes: number of processes; goes with `process`.
        coordinator: `HOST:PORT` at which process 0 is to be reached.

    Raises:
        CalibrationError: for numbers that contradict each other.
    """
    # The command line overrides the launcher.
    host, port = _host_and_port(coordinator)
    if (process is None) != (processes is None):
        raise CalibrationError("calibrate: give both --process I and --processes N")
    if process is not None and processes is not None:
        launcher, index, count = "--process", process, processes
    else:
        # Inside a batch job the batch system's variables are there too: the first launcher that
        # fits counts.
        launchers = [names for names in LAUNCHERS if environ.keys() >= {*names[1:]}]
        if not launchers:
            return None
        launcher, number, total = launchers[0]
        try:
            index = int(environ[number])
            count = int(environ[total])
        except ValueError:
            raise CalibrationError(
                f"{number}={environ[number]!r} and {total}={environ[total]!r}: these must be the number of a "
                "process and their count; start with torchrun, mpirun or srun, or give --process I --processes N"
            ) from None

        # torchrun states where the first node is; mpirun and srun do not.
        if launcher == "torchrun" and host is None:
            host = environ.get("MASTER_ADDR")
    if not 0 <= index < count:
        raise CalibrationError(
            f"{launcher}: process {index} of {count}; processes are numbered from 0 to {count - 1}"
        )
    node = environ.get(NODE) or socket.gethostname()
    return Launch(launcher=launcher, index=index, count=count, node=node, host=host, port=port)


def forget_launcher() -> None:
    """Remove the launcher's environment variables, so that frameworks do not join its group."""
    for name in list(os.environ):
        if name in _OTHERS or name.startswith(_PREFIXES):
            del os.environ[name]


def _host_and_port(coordinator: str | None) -> tuple[str | None, int | None]:
    """The parts of `HOST:PORT`; both None if not given."""
    if coordinator is None:
        return None, None
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise CalibrationError(
            f"--coordinator {coordinator}: must be HOST:PORT, such as node-a:29600"
        )
    return host, int(port)


KEY: Final = "PERFMODEL_LAUNCH_KEY"
"""Variable with the secret that all processes share; without it, process 0 makes one and writes it
into the folder."""
NAME: Final = ".launch.json"
"""File in the folder of the tables that leads to process 0."""
MIN_KEY: Final = 16
"""Least number of characters of a secret."""
MOST_WAITING: Final = 64
"""Most connections that wait to be accepted; the system refuses more."""
MOST_TURNED_AWAY: Final = 100
"""Number of connections without the secret after which process 0 gives up."""
HANDSHAKE_S: Final = 10
"""Seconds in which the other end has to prove that it knows the secret."""
KEEPALIVE_S: Final = 60
"""Seconds of silence after which the system checks whether the other end is still connected."""


@dataclass(frozen=True)
class Meeting:
    """Address of process 0, and the shared secret."""

    host: str
    port: int
    key: str


def made_meeting(launch: Launch) -> Meeting:
    """Return the address on which process 0 will wait; port 0 means any free port."""
    key = _key_of_environment() or secrets.token_hex(32)
    return Meeting(launch.host or socket.gethostname(), launch.port or 0, key)


class Server:
    """Context manager: process 0's listening socket, and the file that leads to it."""

    def __init__(self, meeting: Meeting, folder: Path) -> None:
        self._meeting = meeting
        self._path = folder / NAME
        self._started_s, self._turned_away = time.monotonic(), 0

    def __enter__(self) -> Self:
        # The file is written once the socket listens, so that whoever finds it is not refused.
        try:
            address = listening_address(self._meeting.host)
            self._socket = socket.create_server((address, self._meeting.port), backlog=MOST_WAITING)
        except OSError as error:
            raise CalibrationError(
                f"{self._meeting.host}:{self._meeting.port} cannot be listened on: {error.strerror or error}; give an "
                "address of this node as --coordinator HOST:PORT"
            ) from None
        _write_private(self._path, replace(self._meeting, port=self._socket.getsockname()[1]))
        return self

    def __exit__(self, *exception: object) -> None:
        self._path.unlink(missing_ok=True)
        self._socket.close()

    def accept(self, missing: Sequence[int], launch: Launch, timeout_s: float) -> Connection:
        """Accept the next process that knows the secret."""
        while True:
            left_s = self._started_s + timeout_s - time.monotonic()
            try:
                self._socket.settimeout(max(left_s, 1e-3))
                peer, _ = self._socket.accept()
            except TimeoutError:
                if self._turned_away:
                    turned = f"; {self._turned_away} connections used another secret"
                else:
                    turned = ""
                raise CalibrationError(
                    f"{_processes_text(missing)} of {launch.count} did not connect to {self._meeting.host} within "
                    f"{timeout_s:g} s{turned}; check that all were started with this --out and can reach this node"
                ) from None
            connection = _authenticated(peer, self._meeting.key, first=True)
            if connection is not None:
                return connection

            # A stranger must not guess secrets for ever.
            self._turned_away += 1
            if self._turned_away >= MOST_TURNED_AWAY:
                raise CalibrationError(
                    f"{self._turned_away} connections to {self._meeting.host} used a wrong secret; check that "
                    f"{KEY} is the same on all nodes and that only these can reach the port"
                )


def listening_address(host: str) -> str:
    """The one address of this node that process 0 listens on; empty, for all addresses, if the host
    name does not determine one.

    Many systems have their own name stand for a loopback address that other nodes cannot reach.
    """
    address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    named_loopback = host == "localhost" or host.startswith("127.")
    return "" if str(address).startswith("127.") and not named_loopback else str(address)


def join(launch: Launch, folder: Path, timeout_s: float) -> tuple[Connection, str]:
    """Connect to process 0; also return the address by which it reaches this process.

    Raises:
        CalibrationError: if it cannot be found or reached in time, or has another secret.
    """
    # Processes start in any order, so what fails is tried again until the time is up.
    deadline_s = time.monotonic() + timeout_s
    while True:
        address_tried = str(folder / NAME)
        try:
            meeting = _read(launch, folder)
            address_tried = f"{meeting.host}:{meeting.port}"
            peer = socket.create_connection((meeting.host, meeting.port), timeout=HANDSHAKE_S)
            address = peer.getsockname()[0]
            connection = _authenticated(peer, meeting.key, first=False)
            if connection is not None:
                return connection, address
            trouble = (
                f"{address_tried} has another secret; check that {KEY} is the same on all nodes"
            )
        # Process 0 has not come yet.
        except FileNotFoundError:
            trouble = (
                f"{folder} has no {NAME}; check that all nodes share this folder, or give --coordinator HOST:PORT "
                f"and {KEY}"
            )
        except OSError as error:
            trouble = f"{address_tried}: {error.strerror or error}"
        if time.monotonic() > deadline_s:
            raise CalibrationError(
                f"process {launch.index} on {launch.node} could not connect to process 0 within {timeout_s:g} "
                f"s: {trouble}"
            )
        time.sleep(0.2)


def _read(launch: Launch, folder: Path) -> Meeting:
    """Return the address on which process 0 waits, from the flags if given, else from the file."""
    # Nodes without a shared folder get everything by arguments and environment.
    key = _key_of_environment()
    if key and launch.host and launch.port:
        return Meeting(launch.host, launch.port, key)
    meeting = Meeting(**json.loads((folder / NAME).read_text()))
    return replace(
        meeting,
        host=launch.host or meeting.host,
        port=launch.port or meeting.port,
        key=key or meeting.key,
    )


def _key_of_environment() -> str | None:
    """The secret that all processes were started with, if they were."""
    # Whoever can connect and knows the secret can have code run here: objects are sent pickled.
    key = os.environ.get(KEY)
    if key is not None and len(key) < MIN_KEY:
        raise CalibrationError(
            f"{KEY} has {len(key)} characters; give at least {MIN_KEY} that nobody can guess"
        )
    return key


def _write_private(path: Path, meeting: Meeting) -> None:
    """Write a meeting atomically, readable only by this user."""
    # Made with its permissions, as changing them afterwards would leave a moment in which others
    # can read it.
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(asdict(meeting), file)
    new.replace(path)


def _authenticated(peer: socket.socket, key: str, *, first: bool) -> Connection | None:
    """A connection whose other end proved, before anything is unpickled, to know the secret."""
    with peer:
        # A node that loses power says no goodbye, so that the system has to look for it.
        peer.setblocking(True)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)

        # Each end challenges the other, process 0 first. Whoever is silent meanwhile is given up.
        _set_patience(peer, HANDSHAKE_S)
        connection = Connection(os.dup(peer.fileno()))
        steps = [deliver_challenge, answer_challenge]
        if not first:
            steps.reverse()
        try:
            for step in steps:
                step(connection, key.encode())
            _set_patience(peer, 0)
        except (EOFError, OSError, AuthenticationError):
            connection.close()
            return None
    return connection


def _set_patience(peer: socket.socket, seconds: int) -> None:
    """Make reads of a socket fail after a number of seconds without a byte; 0: never."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def _processes_text(missing: Sequence[int]) -> str:
    """Processes by their numbers, for messages."""
    return f"{plural('process', len(missing))} {', '.join(map(str, missing))}"
