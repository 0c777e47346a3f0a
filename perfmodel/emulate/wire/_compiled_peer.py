"""The emulated ranks' message loop in C (`_peer_loop.c`), which answers small messages as fast as
real ranks do.

It is built once per machine, where Linux and a C compiler are; elsewhere `_python_peer` does the
same work. Groups, connections and the log stay in Python.
"""

import ctypes
import hashlib
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from perfmodel.emulate._clock import come_first, fine_timers
from perfmodel.emulate.environment import EmulationError, Orders
from perfmodel.emulate.wire._gloo_messages import kind_of, number_of, without_delay
from perfmodel.emulate.wire._operations import Network
from perfmodel.emulate.wire._python_peer import Group, Peer, operation_row
from perfmodel.session import cache_folder

SOURCE: Final = Path(__file__).with_name("_peer_loop.c")
_FLAGS: Final = ("-O2", "-shared", "-fPIC")
_COMPILERS: Final = ("cc", "gcc", "clang")
_BUILD_S: Final = 60.0
_TEXT_BYTES: Final = 256

_Begin = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_int, ctypes.c_uint64, ctypes.c_double)
"""Function of a group's number, a slot and the current time that returns when the emulated ranks
reach an operation."""


class _Row(ctypes.Structure):
    """An operation in the log, like `row` in the C code."""

    _fields_ = [
        ("group", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("slot", ctypes.c_uint64),
        ("in_bytes", ctypes.c_int64),
        ("out_bytes", ctypes.c_int64),
        ("messages", ctypes.c_int64),
        ("first_s", ctypes.c_double),
        ("begin_s", ctypes.c_double),
        ("last_s", ctypes.c_double),
    ]


def plain(orders: Orders) -> bool:
    """Whether the C loop suffices: every emulated rank is on time, and none dies."""
    on_time = orders.straggler == 1.0 and not orders.jitter and not orders.delays_s
    return on_time and not orders.swept and orders.fail_rank < 0


def compiled_loop() -> ctypes.CDLL | None:
    """Load the C loop, and build it first if necessary; None if it cannot be built here."""
    # The loop is written for epoll and for headers in the order of this machine's bytes.
    compiler = next(
        filter(None, map(shutil.which, (os.environ.get("CC") or "cc", *_COMPILERS))), None
    )
    if sys.platform != "linux" or sys.byteorder != "little" or compiler is None:
        return None
    source = SOURCE.read_bytes()
    name = hashlib.sha256(source + " ".join((compiler, *_FLAGS)).encode()).hexdigest()[:32]
    built = cache_folder("peer") / f"{name}.so"
    try:
        # Code is only loaded from a folder that nobody else can write to.
        built.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = built.parent.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return None
        if not built.exists():
            _build(compiler, built)
        return _declared(ctypes.CDLL(str(built)))
    except (OSError, subprocess.SubprocessError):
        return None


def _build(compiler: str, built: Path) -> None:
    """Compile to another file name first, so that no process loads half a file."""
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        target = Path(folder) / built.name
        command = [compiler, *_FLAGS, "-o", str(target), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_S)
        target.replace(built)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """The library with the types of its functions."""
    number, real, handle = ctypes.c_int, ctypes.c_double, ctypes.c_void_p
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "peer_new": (handle, (real, real, _Begin)),
        "peer_watch": (number, (handle, number)),
        "peer_group": (number, (handle, number, number, number, number, number, number)),
        "peer_connection": (number, (handle, number, number, number)),
        "peer_serve": (number, (handle,)),
        "peer_failure": (number, (handle, ctypes.c_char_p, number)),
        "peer_finish": (number, (handle,)),
        "peer_rows": (None, (handle, ctypes.POINTER(_Row))),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library


class CompiledPeer(Peer):
    """Serves real ranks as `Peer` does, messages in C; for `plain` orders alone."""

    compiled = True

    def __init__(self, orders: Orders, network: Network, library: ctypes.CDLL) -> None:
        super().__init__(orders, network)
        self._library = library
        # The callback must live as long as the loop that calls it.
        self._begin_callback = _Begin(self._begin_s)
        self._loop = library.peer_new(network.latency_s, network.bytes_per_s, self._begin_callback)
        self._wrong = ""

    def serve(self) -> None:
        """Serve all connections until the real ranks have ended."""
        fine_timers()
        if self._orders.pinned:
            come_first([0])
        for descriptor in self._control_descriptors():
            if self._library.peer_watch(self._loop, descriptor):
                raise EmulationError(
                    f"emulate: the emulated ranks cannot watch descriptor {descriptor}"
                )
        while not self._ended:
            # The loop comes back when a rank announces a group, connects, or when all is over.
            if self._library.peer_serve(self._loop):
                raise EmulationError(self._failure())
            for key, _ in self._selector.select(0):
                key.data()

    def log(self) -> list[dict[str, Any]]:
        rows = (_Row * self._library.peer_finish(self._loop))()
        self._library.peer_rows(self._loop, rows)
        return [operation_row(self._groups[row.group], row) for row in rows]

    def _formed(self, group: Group) -> None:
        super()._formed(group)
        link = [*self._reals].index(group.rank)
        real = len({*group.members} & {*self._orders.real_ranks})
        # Groups of several real ranks with the same members are one ring.
        ring = min(
            i
            for i, known_group in enumerate(self._groups)
            if (known_group.name, known_group.members) == (group.name, group.members)
        )
        source = group.members.index(group.source)
        self._library.peer_group(
            self._loop, len(group.members), group.place, link, int(real > 1), ring, source
        )

    def _connected(self, connected: socket.socket, group: Group, peer: int) -> None:
        without_delay(connected)
        self._library.peer_connection(
            self._loop, connected.detach(), self._groups.index(group), peer
        )

    def _begin_s(self, group_number: int, slot: int, now_s: float) -> float:
        """Called by the loop when several real ranks must agree on a call."""
        group = self._groups[group_number]
        self._wrong = self._calls.disagreement(
            group.name, group.rank, number_of(slot), kind_of(slot)
        )
        return math.nan if self._wrong else now_s

    def _failure(self) -> str:
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        group = self._groups[self._library.peer_failure(self._loop, text, _TEXT_BYTES)]
        return self._wrong or f"rank {group.rank}: group {group.name}: {text.value.decode()}"
