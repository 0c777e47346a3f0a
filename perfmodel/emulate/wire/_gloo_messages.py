"""The message protocol of gloo's TCP transport (gloo/transport/tcp), without the library.

Every message is a header of six 64-bit numbers (bytes in all, what it is, slot, offset, bytes of
data, offset) and its data. A transfer takes three: the receiver says that it is ready, the sender
says that it will send, and the data follow once both have. Slots tell operations apart: the first
byte is the kind of collective, the next four its number (gloo/types.h); what a script sends by
itself has its tag as slot.
"""

import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

# Memory layout of gloo's `Op` preamble, little-endian as it is sent.
HEADER: Final = struct.Struct("<6Q")
_, DATA, SEND_READY, RECV_READY = range(4)
"""Kinds of messages; the first is of gloo's older algorithms, which torch does not call."""
KINDS: Final = (
    *("send_recv", "gather", "all_gather", "reduce", "all_reduce", "scatter", "broadcast"),
    *("barrier", "all_to_all"),
)
_ADDRESS: Final = struct.Struct("<H2s4s120xq")
"""A `sockaddr_storage` of IPv4 and a sequence number."""
ABOVE_LOOPBACK: Final = "127.255.255.254"
"""A loopback address that is higher than usual ones, and free on Linux. Gloo connects from the
higher of two addresses to the lower one: a rank at this address connects to whatever listens on
this host."""
_SEQUENCE: Final = struct.Struct("<q")
_MOST_AT_ONCE: Final = 1 << 22
_MOST_PARTS: Final = 64
_BOX_BYTES: Final = 1 << 13
"""Size of the receive buffer, which takes many small messages at once; the rest of a long one is
received directly into its place."""
_SOCKET_BYTES: Final = 1 << 23


class Header(NamedTuple):
    """Header of one message."""

    what: int
    slot: int
    nbytes: int
    """Bytes of data that follow this header, or that are announced by it."""


def kind_of(slot: int) -> str:
    """Kind of collective that a slot belongs to."""
    prefix = slot >> 56
    return KINDS[prefix] if prefix < len(KINDS) else f"kind {prefix}"


def number_of(slot: int) -> int:
    """Number of the collective in its group; the tag of a script's own message."""
    # Layout of a slot: 8 bits of kind, 32 of number, 24 of what the algorithm counts within the
    # collective.
    return slot >> 24 & 0xFFFFFFFF if slot >> 56 else slot


def connects_to(host: str, peer: str) -> bool:
    """Whether gloo on one IPv4 address connects to the other (else it waits to be connected to)."""
    return socket.inet_aton(peer) < socket.inet_aton(host)


def rank_info(host: str, port: int, sequences: range) -> bytes:
    """Return a rank's published address: host name, listening address, and connection numbers."""
    # As gloo serialises it: strings with their length before them, then a sequence number for each
    # rank that may call.
    name = b"emulated"
    address = _ADDRESS.pack(socket.AF_INET, struct.pack(">H", port), socket.inet_aton(host), -1)
    numbers = b"".join(map(_SEQUENCE.pack, sequences))
    return struct.pack("<Q", len(name)) + name + struct.pack("<Q", len(address)) + address + numbers


def called_as(connected: socket.socket) -> int:
    """The number that a rank sends first on a new connection."""
    number = connected.recv(_SEQUENCE.size, socket.MSG_WAITALL)
    return _SEQUENCE.unpack(number)[0] if len(number) == _SEQUENCE.size else -1


def without_delay(connected: socket.socket) -> socket.socket:
    """Configure a connection for messages: it never blocks or delays."""
    connected.setblocking(False)
    # Headers are small and must not wait to be joined with others (Nagle); data want large buffers.
    if connected.family == socket.AF_INET:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connected.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BYTES)
    return connected


@dataclass(eq=False, slots=True)
class Incoming:
    """Data of one incoming message, which may be forwarded before all of it has arrived."""

    data: memoryview
    nbytes: int
    """Bytes of the message; if there are more than `data` can hold, they overwrite one another."""
    arrived: int = 0

    @property
    def complete(self) -> bool:
        """Whether the message is complete."""
        return self.arrived == self.nbytes

    def room(self) -> memoryview:
        """Return the buffer for the next bytes."""
        write_at = self.arrived % len(self.data)
        return self.data[write_at : write_at + self.nbytes - self.arrived]


@dataclass(eq=False, slots=True)
class _Outgoing:
    """A header, or data, queued for sending."""

    data: memoryview
    source: Incoming | None = None
    """Incoming message that provides the data; None if the data are complete."""
    sent: int = 0

    def ready(self) -> memoryview:
        """Return the bytes that can be sent now."""
        arrived = (
            len(self.data) if self.source is None else min(self.source.arrived, len(self.data))
        )
        return self.data[self.sent : arrived]


class Connection:
    """One end of a pair of ranks; never blocks."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = without_delay(connected)
        self._box, self._have = memoryview(bytearray(_BOX_BYTES)), 0
        # The message whose data are coming, until all are there.
        self._header = Header(0, 0, 0)
        self._incoming: Incoming | None = None
        self._out: list[_Outgoing] = []

    @property
    def sending(self) -> bool:
        """Whether data wait until the socket accepts more."""
        return bool(self._out) and bool(self._out[0].ready())

    @property
    def stalled(self) -> bool:
        """Whether queued data wait for more of a message that is being forwarded."""
        return bool(self._out) and not self._out[0].ready()

    def receive(
        self, place: Callable[[Header], Incoming], arrived: Callable[[Header], None]
    ) -> bool:
        """Receive available data, up to some MiB.

        Args:
            place: buffer for the data of a message.
            arrived: called with every complete message.

        Returns:
            Whether the other end is still there.
        """
        read_bytes = 0
        try:
            # Bounded, so that one busy connection does not starve the others.
            while read_bytes < _MOST_AT_ONCE:
                got = self._receive_next(place, arrived)
                if got == 0:
                    return False
                read_bytes += got
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        return True

    def _receive_next(
        self, place: Callable[[Header], Incoming], arrived: Callable[[Header], None]
    ) -> int:
        """Read once from the socket; returns the number of bytes."""
        # Two states: in the middle of a long message, whose rest goes straight to its place, or
        # between messages.
        incoming = self._incoming
        if incoming is None:
            got = self.socket.recv_into(self._box[self._have :])
            self._have += got
            self._open(place, arrived)
            return got
        got = self.socket.recv_into(incoming.room())
        incoming.arrived += got
        if incoming.complete:
            self._incoming = None
            arrived(self._header)
        return got

    def _open(self, place: Callable[[Header], Incoming], arrived: Callable[[Header], None]) -> None:
        """Take whole messages out of the receive buffer, and the available data of the last one."""
        box = self._box
        at = 0
        have = self._have
        # Many messages are headers alone; one read may bring dozens.
        while have - at >= HEADER.size:
            _, kind, slot, _, nbytes, _ = HEADER.unpack_from(box, at)
            at += HEADER.size
            header = Header(kind, slot, nbytes)
            if kind == DATA and nbytes:
                incoming = place(header)
                available = min(nbytes, have - at)
                incoming.room()[:available] = box[at : at + available]
                incoming.arrived += available
                at += available
                if not incoming.complete:
                    self._header = header
                    self._incoming = incoming
                    break
            arrived(header)
        # A header that is cut off waits at the front of the box for the rest.
        remaining = have - at
        box[:remaining] = box[at:have]
        self._have = remaining

    def send(
        self, kind: int, slot: int, nbytes: int, data: memoryview | Incoming | None = None
    ) -> None:
        """Queue a message for `flush`; data that have not arrived yet are sent as they arrive."""
        data_bytes = 0 if data is None else nbytes
        self._out.append(
            _Outgoing(memoryview(HEADER.pack(HEADER.size + data_bytes, kind, slot, 0, nbytes, 0)))
        )
        if data is None or not nbytes:
            return
        if isinstance(data, Incoming):
            self._out.append(_Outgoing(data.data[:nbytes], None if data.complete else data))
        else:
            self._out.append(_Outgoing(data[:nbytes]))

    def flush(self) -> None:
        """Send queued messages whose data have arrived, as many as the socket accepts."""
        out = self._out
        while self.sending:
            # Nothing overtakes data that have not come.
            parts = []
            for item in out[:_MOST_PARTS]:
                parts.append(item.ready())
                if item.sent + len(parts[-1]) < len(item.data):
                    break
            try:
                # Header and data leave in one system call without being copied together.
                sent = self.socket.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError:  # the other end has gone
                out.clear()
                return
            done = 0
            for item, part in zip(out, parts, strict=False):
                written = min(sent, len(part))
                item.sent += written
                sent -= written
                if item.sent < len(item.data):
                    break
                done += 1
            del out[:done]
