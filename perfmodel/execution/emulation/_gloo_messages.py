"""The messages of gloo's TCP transport (gloo/transport/tcp), spoken by one end without the library.

Every message is a header of six 64-bit numbers (bytes in all, what it is, slot, offset, bytes of data, offset) and its
data. A transfer takes three: the receiver says that it is ready, the sender says that it will send, and the data
follow once both have. Slots tell operations apart: the first byte is the kind of collective, the next four its number
(gloo/types.h); what a script sends by itself has its tag as slot.
"""

import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

HEADER: Final = struct.Struct("<6Q")
BUFFER, DATA, SEND_READY, RECV_READY = range(4)
"""What a message is; the first is of gloo's older algorithms, which torch does not call."""
KINDS: Final = (
    "send_recv", "gather", "all_gather", "reduce", "all_reduce", "scatter", "broadcast", "barrier", "all_to_all",
)  # fmt: skip
_ADDRESS: Final = struct.Struct("<H2s4s120xq")
"""A `sockaddr_storage` of IPv4 and a sequence number."""
_LOWEST: Final = bytes(4)
"""Of two addresses the library connects to the lower one, and this is below all; it reaches the same host."""
_SEQUENCE: Final = struct.Struct("<q")
_MOST_AT_ONCE: Final = 1 << 22
_SOCKET_BYTES: Final = 1 << 23


class Header(NamedTuple):
    """Of one message."""

    what: int
    slot: int
    nbytes: int
    """Of data: that follow, or that are to."""


def kind_of(slot: int) -> str:
    """Kind of collective that a slot belongs to."""
    prefix = slot >> 56
    return KINDS[prefix] if prefix < len(KINDS) else f"kind {prefix}"


def rank_info(port: int, sequences: range) -> bytes:
    """What a rank publishes: name of its host, where it listens, and by what number each other rank calls there."""
    name = b"emulated"
    address = _ADDRESS.pack(socket.AF_INET, struct.pack(">H", port), _LOWEST, -1)
    numbers = b"".join(map(_SEQUENCE.pack, sequences))
    return struct.pack("<Q", len(name)) + name + struct.pack("<Q", len(address)) + address + numbers


def called_as(connected: socket.socket) -> int:
    """The number that a rank sends first on a new connection."""
    number = connected.recv(_SEQUENCE.size, socket.MSG_WAITALL)
    return _SEQUENCE.unpack(number)[0] if len(number) == _SEQUENCE.size else -1


class Connection:
    """One end of a pair of ranks; never blocks."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
        self.socket = connected
        self._head = memoryview(bytearray(HEADER.size))
        self._into, self._at, self._left = self._head, 0, HEADER.size
        self._header: Header | None = None
        self._out: deque[memoryview] = deque()

    @property
    def sending(self) -> bool:
        """Whether something waits until the socket takes more."""
        return bool(self._out)

    def receive(self, place: Callable[[Header], memoryview], arrived: Callable[[Header], None]) -> bool:
        """Take what has come, up to some MiB.

        Args:
            place: where the data of a message go; what is longer is written over itself.
            arrived: told of every message that is there as a whole.

        Returns:
            Whether the other end is still there.
        """
        taken = 0
        while taken < _MOST_AT_ONCE:
            try:
                got = self.socket.recv_into(self._into[self._at : self._at + self._left])
            except BlockingIOError:
                return True
            except ConnectionError:
                return False
            if got == 0:
                return False
            taken += got
            self._at, self._left = self._at + got, self._left - got
            if self._left:
                self._at %= len(self._into)
                continue
            header = self._header
            if header is None:
                _, what, slot, _, nbytes, _ = HEADER.unpack(self._head)
                header = Header(what, slot, nbytes)
                if what == DATA and nbytes:
                    self._header, self._into, self._at, self._left = header, place(header), 0, nbytes
                    continue
            self._header, self._into, self._at, self._left = None, self._head, 0, HEADER.size
            arrived(header)
        return True

    def send(self, what: int, slot: int, nbytes: int, data: memoryview | None = None) -> None:
        """Put a message on the wire, at once as far as the socket takes it."""
        follows = nbytes if data is not None else 0
        self._out.append(memoryview(HEADER.pack(HEADER.size + follows, what, slot, 0, nbytes, 0)))
        if data is not None and nbytes:
            self._out.append(data[:nbytes])
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it."""
        while self._out:
            try:
                sent = self.socket.sendmsg(list(self._out)[:8])
            except BlockingIOError:
                return
            except ConnectionError:
                self._out.clear()
                return
            while self._out and sent >= len(self._out[0]):
                sent -= len(self._out.popleft())
            if sent:
                self._out[0] = self._out[0][sent:]
