"""One collective on the emulated ranks' side: received messages, and when others may be sent.

Of an operation's graph of messages only those between real and emulated ranks are on the wire
(NeuronaBox, section 2.2). All ranks run one program and begin it together, so the emulated ranks
are always as far as the real one: when it is ready for its k-th message of a ring, a
halving-doubling exchange, a barrier or an all-to-all, the other side is just about to send it. In a
tree or a scatter ranks differ: messages that emulated ranks must exchange first are counted in
steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from perfmodel.emulate.wire._gloo_messages import (
    DATA,
    RECV_READY,
    SEND_READY,
    Connection,
    Incoming,
    kind_of,
)

NEVER_S: Final = float("inf")
KEPT_BYTES: Final = 1 << 22
"""Largest message whose data are remembered; for longer ones zeros are sent."""
RETURNS_OWN: Final = ("all_gather", "all_to_all")
"""Kinds in which the real rank receives copies of its own data, so that exchanged sizes are
consistent."""


@dataclass(frozen=True)
class Network:
    """Latency and bandwidth between two ranks, in addition to this machine's own wire."""

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")


class Predecessors(NamedTuple):
    """Messages that must pass among emulated ranks before one is sent to the real rank."""

    steps: int
    """Number of messages one after another, up to those to the last rank that is reached in the
    same step."""
    queued: int
    """Number of messages that leave the same sender earlier."""


def predecessors(kind: str, size: int, place: int, peer: int) -> Predecessors:
    """Messages that precede one from `peer` to the rank at `place` in a group of `size`.

    A binomial tree's edge to the rank 2^i further on is used in step i; a scatter's root serves
    ranks in order.
    """
    # Ring, exchange, barrier and all-to-all are alike for all ranks: nothing has to happen first
    # among emulated ones.
    ahead = (place - peer) % size
    if kind == "broadcast":
        return Predecessors(ahead.bit_length() - 1, 0)
    if kind == "scatter":
        return Predecessors(0, place - (peer < place))
    return Predecessors(0, 0)


class Message(NamedTuple):
    """A message as the real rank announced it."""

    nbytes: int
    announced_s: float


@dataclass(slots=True)
class Pair:
    """Messages of one operation between a real and an emulated rank; bit k: k-th message."""

    connection: Connection
    asked: list[Message] = field(default_factory=list)
    """Messages that the real rank is ready to receive."""
    offered: list[Message] = field(default_factory=list)
    """Messages that it will send."""
    sent: int = 0
    granted: int = 0
    arrived: int = 0
    places: dict[int, Incoming] = field(default_factory=dict)
    """Buffers, by number, of the granted messages that are kept."""
    in_turn: bool = False
    """Whether it is queued for processing."""


@dataclass(slots=True)
class Links:
    """Times until which a real rank's links are busy, in each direction, for all operations."""

    in_s: float = 0.0
    out_s: float = 0.0


# NeuronaBox's bitmaps (section 2.2) as Python integers, which have as many bits as needed.
def first_clear(bits: int) -> int:
    """Place of the lowest bit that is not set."""
    return (~bits & (bits + 1)).bit_length() - 1


_MOST_CALLS: Final = 1024
"""Most calls of a group that are remembered; all real ranks have already made older ones."""


class Calls:
    """Kinds of the collectives that real ranks have begun, by group and number."""

    def __init__(self) -> None:
        self._by_group: dict[str, dict[int, tuple[int, str]]] = {}

    def disagreement(self, group: str, rank: int, number: int, kind: str) -> str:
        """Record a real rank's call; return a description of the conflict if another real rank made
        a different call.

        Ranks that disagree wait for each other's messages for as long as the library has patience.
        """
        if kind == "send_recv":  # whose number is a tag
            return ""
        # The first rank to make a call sets the parameters that the others must match.
        calls = self._by_group.setdefault(group, {})
        first_rank, first_kind = calls.setdefault(number, (rank, kind))
        if len(calls) > _MOST_CALLS:
            del calls[next(iter(calls))]
        if kind == first_kind:
            return ""
        return f"call #{number} of group {group} is {kind} on rank {rank}, but {first_kind} on rank {first_rank}"


Zeros = Callable[[int], memoryview]
"""Returns a view of the requested number of zero bytes."""


class Operation:
    """One collective of one group, or the messages of one tag."""

    def __init__(
        self,
        slot: int,
        size: int,
        place: int,
        begin_s: float,
        network: Network,
        links: Links,
        source: "Callable[[], Operation | None] | None" = None,
    ) -> None:
        """
        Args:
            slot: slot of its messages.
            size: ranks of the group.
            place: index of the real rank in the group.
            begin_s: time at which the emulated ranks begin it.
            network: network to the emulated ranks.
            links: links of the real rank.
            source: the same operation of the real rank whose data reach the emulated ones, None
                before its first message; by default this one.
        """
        self.slot = slot
        self.kind = kind_of(slot)
        self.size = size
        self.place = place
        self.begin_s = begin_s
        self._network = network
        self._links = links
        self.pairs: dict[int, Pair] = {}
        self._source = source or (lambda: self)
        self._kept: dict[tuple[int, int], Incoming] = {}
        self.first_s = self.last_s = 0.0
        self.in_bytes = self.out_bytes = self.messages = 0

    def pair(self, peer: int, connection: Connection) -> Pair:
        """The pair with one emulated rank, begun with its first message."""
        pair = self.pairs.get(peer)
        if pair is None:
            pair = self.pairs[peer] = Pair(connection)
        return pair

    def place_for(self, peer: int, nbytes: int, scrap: memoryview) -> Incoming:
        """Return the buffer for the data of the real rank's next message."""
        pair = self.pairs[peer]
        place = pair.places.pop(first_clear(pair.arrived), None)
        # Data that are not needed later still need a buffer; data of another size are refused on
        # arrival.
        if place is None or place.nbytes != nbytes:
            return Incoming(scrap, nbytes)
        return place

    def arrive(self, peer: int, nbytes: int, now_s: float) -> str:
        """Record a message's data; return a description of the fault, or an empty text."""
        pair = self.pairs[peer]
        # Try Receive of NeuronaBox: a message counts if it is the one that was expected, else an
        # error is reported.
        number = first_clear(pair.arrived)
        if not (pair.granted >> number & 1) or pair.offered[number].nbytes != nbytes:
            return f"{self.kind}: message {number} to place {peer}, of {nbytes} bytes, was not expected"
        pair.arrived |= 1 << number
        self.in_bytes += nbytes
        self.messages += 1
        self.last_s = now_s
        return ""

    def try_send(self, peer: int, pair: Pair, now_s: float, zeros: Zeros) -> float:
        """Send the next message whose predecessors have passed.

        Returns:
            When to look again: now, if a message was sent; `NEVER_S` if there is nothing until more
            arrives.
        """
        # Try Send of NeuronaBox: the next unsent message goes once its predecessors have been sent
        # or received.
        number = first_clear(pair.sent)
        if number >= len(pair.asked):
            return NEVER_S
        nbytes, asked_s = pair.asked[number]
        data = self._data(peer, number, nbytes, zeros)
        if data is None:
            return NEVER_S
        ahead = predecessors(self.kind, self.size, self.place, peer)
        network = self._network
        links = self._links
        takes_s = nbytes / network.bytes_per_s
        # All receivers have said by then that they are ready, which takes one latency to the first
        # sender.
        there_s = self.begin_s + (ahead.steps + bool(ahead.steps)) * network.latency_s
        there_s += (ahead.steps + ahead.queued) * takes_s
        # The data come a latency after both the sender has them and the receiver's readiness has
        # reached it.
        due_s = (
            max(max(there_s, asked_s + network.latency_s) + network.latency_s, links.in_s) + takes_s
        )
        if due_s > now_s:
            return due_s
        # The real rank's link carries one message at a time.
        links.in_s = due_s
        pair.sent |= 1 << number
        self.out_bytes += nbytes
        self.messages += 1
        self.last_s = now_s
        # gloo wants an announcement before data.
        pair.connection.send(SEND_READY, self.slot, nbytes)
        pair.connection.send(DATA, self.slot, nbytes, data)
        return now_s

    def try_receive(self, peer: int, pair: Pair, now_s: float) -> float:
        """Let the real rank send its next message; returns as `try_send`."""
        # The receiver's readiness, which lets the real rank's library send, takes a latency to
        # reach it.
        number = first_clear(pair.granted)
        if number >= len(pair.offered):
            return NEVER_S
        nbytes, offered_s = pair.offered[number]
        network, links = self._network, self._links
        due_s = max(max(offered_s, self.begin_s) + network.latency_s, links.out_s)
        if due_s > now_s:
            return due_s
        links.out_s = due_s + nbytes / network.bytes_per_s
        pair.granted |= 1 << number
        self._remember(peer, pair, number, nbytes)
        pair.connection.send(RECV_READY, self.slot, nbytes)
        return now_s

    def _remember(self, peer: int, pair: Pair, number: int, nbytes: int) -> None:
        """Make the buffer of a granted message, if it is the first of its key."""
        # The first is the real rank's own; later messages of a ring have come from other ranks.
        key = self._key(peer, number, nbytes)
        if key in self._kept:
            return
        is_kept = nbytes <= KEPT_BYTES
        place = self._kept[key] = Incoming(memoryview(bytearray(nbytes if is_kept else 0)), nbytes)
        if is_kept:
            pair.places[number] = place

    def _key(self, peer: int, number: int, nbytes: int) -> tuple[int, int]:
        """Key of the data that belong to a message to or from the real rank: a part and a size.

        Parts are the halves of an all-gather (allgather.cc sends them in turn) and the peers of an
        all-to-all; of other kinds any data of the right size will do.
        """
        if self.kind == "all_gather":
            return number % 2, 0
        return (peer, 0) if self.kind == "all_to_all" else (0, nbytes)

    def _data(
        self, peer: int, number: int, nbytes: int, zeros: Zeros
    ) -> memoryview | Incoming | None:
        """Return the real rank's own data of the right size, whose magnitudes are realistic.

        None until it is certain that data which must be its own will come. From then on they are
        sent on as they come: a copy of the whole would go out later than the emulated ranks' own
        data, which have always been there.
        """
        key = self._key(peer, number, nbytes)
        if self.kind not in RETURNS_OWN or nbytes > KEPT_BYTES:
            data = self._kept.get(key)
            return zeros(nbytes) if data is None or not data.complete else data
        # gloo exchanges one message each way with every rank, an empty one too (alltoallv.cc), and
        # passes an all-gather's on in a ring. Half of the time it asks before it offers its own, so
        # a missing offer does not show that the peer is not ready.
        source = self._source()
        data = None if source is None else source._kept.get(key)
        if data is None:
            return None
        return data if data.nbytes == nbytes else zeros(nbytes)
