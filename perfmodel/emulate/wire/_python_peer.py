"""The emulated ranks' message loop in Python.

Groups, connections and the log are here for both message loops: this one in Python, and the one in
C (`_compiled_peer`), which does the same for small messages in less time.
"""

import json
import os
import select
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from hmac import compare_digest
from itertools import count
from typing import Any, ClassVar, Final, NamedTuple

from perfmodel.emulate._clock import come_first, fine_timers
from perfmodel.emulate.environment import Conditions, EmulationError, Orders
from perfmodel.emulate.wire._gloo_messages import (
    DATA,
    RECV_READY,
    SEND_READY,
    Connection,
    Header,
    Incoming,
    called_as,
    kind_of,
    number_of,
)
from perfmodel.emulate.wire._operations import (
    NEVER_S,
    Calls,
    Links,
    Message,
    Network,
    Operation,
    Pair,
)
from perfmodel.emulate.wire._wire import CLOCK, CONNECTED, OPERATION_COLUMNS

_SCRAP_BYTES: Final = 1 << 22
_JOIN_S: Final = 10.0
_JOIN_BYTES: Final = 1 << 24
"""Largest size of a line that names the members of a group."""
_MOST_OPERATIONS: Final = 64
"""Most operations of a group that are remembered; older ones have ended."""


@dataclass(eq=False, slots=True)
class Group:
    """One process group of one real rank."""

    name: str
    members: tuple[int, ...]
    place: int
    conditions: Conditions
    """Conditions of the real rank, which all of its groups share, as its links."""
    links: Links
    source: int
    """Rank whose data the emulated ranks receive in a ring: this one, or the last of the following
    real ranks."""
    operations: dict[int, Operation] = field(default_factory=dict)
    """Operations by slot, the newest last."""
    ends: "dict[int, _Endpoint]" = field(default_factory=dict)
    """Endpoints of connections by position of the emulated rank."""

    @property
    def rank(self) -> int:
        """Number of the real rank that this peer answers."""
        return self.members[self.place]


class _Entry(NamedTuple):
    """A pair of an operation that may have something to send or to receive."""

    end: "_Endpoint"
    operation: Operation
    pair: Pair


@dataclass(eq=False, slots=True)
class _Endpoint:
    """A connection, and the emulated rank and group that it stands for."""

    connection: Connection
    group: Group
    peer: int


class Peer:
    """Serves real ranks until stopped."""

    compiled: ClassVar[bool] = False
    """Whether messages are answered in C."""

    def __init__(self, orders: Orders, network: Network) -> None:
        # Two ports: one for the library's connections, one where real ranks announce the groups
        # that they form.
        self._orders = orders
        self._network = network
        self._selector: Any = selectors.DefaultSelector()
        address = orders.wire.rpartition(":")[0]
        self._listener = socket.create_server((address, 0), backlog=1024)
        self._join_listener = socket.create_server((address, 0), backlog=64)
        self._calls = Calls()
        for listener, act in ((self._listener, self._accept), (self._join_listener, self._join)):
            self._selector.register(listener, selectors.EVENT_READ, act)
        self._expected: dict[int, tuple[Group, int]] = {}
        self._bases: dict[tuple[str, tuple[int, ...]], int] = {}
        self._next_base = 0
        self._waiting: dict[tuple[str, tuple[int, ...]], list[socket.socket]] = {}
        self._reals: dict[int, tuple[Conditions, Links]] = {}
        self._groups: list[Group] = []
        # Operations that can act now are in a queue, later ones in a heap: NeuronaBox polls its
        # operations in turn (section 2.2), here only those with something to do.
        self._runnable: deque[_Entry] = deque()
        self._due: list[tuple[float, int, _Entry]] = []
        self._numbers = count()
        self._stalled: set[_Endpoint] = set()
        self._scrap = memoryview(bytearray(_SCRAP_BYTES))
        self._zeros = memoryview(b"")
        self._log: list[dict[str, Any]] = []
        self._ended = False

    @property
    def port(self) -> int:
        """Port at which real ranks announce the groups that they form."""
        return self._join_listener.getsockname()[1]

    def serve(self) -> None:
        """Serve the real ranks until standard input closes.

        Raises:
            EmulationError: a message that does not belong, or an emulated rank that is to die.
        """
        fine_timers()
        if self._orders.pinned:
            come_first([0])
        self._control_descriptors()
        while not self._ended:
            # First everything that has come, then everything that is due, then messages in turn.
            for key, events in self._next_events():
                if isinstance(key.data, _Endpoint):
                    self._exchange(key.data, events)
                else:
                    key.data()
            now_s = time.perf_counter()
            while self._due and self._due[0][0] <= now_s:
                self._enqueue(heappop(self._due)[2])
            self._take_turns()

    def log(self) -> list[dict[str, Any]]:
        """All operations so far."""
        for group in self._groups:
            while group.operations:
                self._log_oldest(group)
        return self._log

    def _control_descriptors(self) -> tuple[int, ...]:
        """Descriptors by which ranks form groups and connect, and by which this process receives
        the request to end."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._end)
        return self._listener.fileno(), self._join_listener.fileno(), sys.stdin.fileno()

    def _end(self) -> None:
        self._ended = not os.read(sys.stdin.fileno(), 1)

    def _next_events(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until data arrive or the next message is due; return the events."""
        if not self._due:
            return self._selector.select()
        # The selector's own patience is in whole milliseconds, which is too coarse for latencies.
        left_s = max(0.0, self._due[0][0] - time.perf_counter())
        select.select([self._selector], [], [], left_s)
        return self._selector.select(0)

    def _take_turns(self) -> None:
        """Send or grant one message of every operation in turn, for as long as there are any."""
        # Round robin over operations, one message each: NeuronaBox's fairness between streams
        # (section 2.2).
        turn = self._runnable
        woken = set[_Endpoint]()
        now_s = 0.0
        while turn:
            end, operation, pair = entry = turn.popleft()
            now_s = time.perf_counter()
            granted_s = operation.try_receive(end.peer, pair, now_s)
            sent_s = operation.try_send(end.peer, pair, now_s, self._zeros_of)
            if granted_s <= now_s and operation.kind == "all_gather":
                # One neighbour receives what the other sends.
                self._enqueue_ring(end.group, operation.slot)
            again_s = min(granted_s, sent_s)
            if again_s <= now_s:
                turn.append(entry)
                woken.add(end)
                continue
            pair.in_turn = False
            if again_s < NEVER_S:
                heappush(self._due, (again_s, next(self._numbers), entry))
        # Messages of a round are flushed together, one system call per connection.
        for end in woken:
            end.group.conditions.together(now_s)
            end.connection.flush()
            self._watch(end)

    def _enqueue(self, entry: _Entry) -> None:
        """Each pair of an operation has one place in the line."""
        if not entry.pair.in_turn:
            entry.pair.in_turn = True
            self._runnable.append(entry)

    def _enqueue_ring(self, group: Group, slot: int) -> None:
        """Queue the pairs of a ring that send to any real rank of a group."""
        for ring in self._groups:
            operation = ring.operations.get(slot)
            if operation is None or (ring.name, ring.members) != (group.name, group.members):
                continue
            for peer, pair in operation.pairs.items():
                end = ring.ends.get(peer)
                if end is not None:
                    self._enqueue(_Entry(end, operation, pair))

    def _zeros_of(self, nbytes: int) -> memoryview:
        """Return a view of `nbytes` zeros."""
        if nbytes > len(self._zeros):
            self._zeros = memoryview(bytearray(nbytes))
        return self._zeros

    def _exchange(self, end: _Endpoint, events: int) -> None:
        """Receive and send what a connection is ready for; forget it once it is closed."""
        if events & selectors.EVENT_WRITE:
            end.connection.flush()
        place = partial(self._place, end)
        arrived = partial(self._arrived, end)
        if events & selectors.EVENT_READ and not end.connection.receive(place, arrived):
            self._selector.unregister(end.connection.socket)
            del end.group.ends[end.peer]
            end.connection.socket.close()
            self._stalled.discard(end)
            return
        self._watch(end)
        # The received data may be what other operations wait to pass on.
        for waiting in [*self._stalled]:
            waiting.connection.flush()
            self._watch(waiting)

    def _watch(self, end: _Endpoint) -> None:
        """Watch a socket for writing as long as data are queued for it."""
        # The connection has gone meanwhile.
        if end.peer not in end.group.ends:
            return
        # A socket can nearly always take more, so asking for that all the time would spin.
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if end.connection.sending else 0)
        key = self._selector.get_map().get(end.connection.socket.fileno())
        # A system call, so only on a change.
        if key is not None and key.events != events:
            self._selector.modify(end.connection.socket, events, end)
        if end.connection.stalled:
            self._stalled.add(end)
        else:
            self._stalled.discard(end)

    def _place(self, end: _Endpoint, header: Header) -> Incoming:
        """Return the place for a message's data."""
        operation = self._operation(end, header)
        operation.pair(end.peer, end.connection)
        return operation.place_for(end.peer, header.nbytes, self._scrap)

    def _arrived(self, end: _Endpoint, header: Header) -> None:
        """Pass a message to its operation."""
        # gloo's handshake: both sides announce, then the data follow.
        operation = self._operation(end, header)
        now_s = time.perf_counter()
        pair = operation.pair(end.peer, end.connection)
        if header.what == RECV_READY:
            pair.asked.append(Message(header.nbytes, now_s))
        elif header.what == SEND_READY:
            pair.offered.append(Message(header.nbytes, now_s))
        elif header.what == DATA:
            wrong = operation.arrive(end.peer, header.nbytes, now_s)
            if wrong:
                raise EmulationError(f"rank {end.group.rank}: group {end.group.name}: {wrong}")
        else:
            raise EmulationError(
                f"rank {end.group.rank}: {header} is of an older protocol of gloo; update torch"
            )
        self._enqueue(_Entry(end, operation, pair))

    def _operation(self, end: _Endpoint, header: Header) -> Operation:
        """Return the operation that a message belongs to; its first message begins it."""
        group = end.group
        operation = group.operations.get(header.slot)
        if operation is not None:
            return operation
        # The first message of a slot begins its operation; the slot's bits say which collective it
        # is.
        kind = kind_of(header.slot)
        now_s = time.perf_counter()
        conditions = group.conditions
        wrong = self._calls.disagreement(group.name, group.rank, number_of(header.slot), kind)
        if wrong:
            raise EmulationError(wrong)
        conditions.check_alive(group.members, f"rank {group.rank}: {kind} of group {group.name}")
        # Emulated ranks arrive together with the real one, except for delays of a what-if.
        late_s = conditions.late_s(now_s, len(group.members) - 1) + conditions.extra_s(kind, 0)
        slot = header.slot
        begin_s = now_s + late_s
        operation = Operation(
            slot,
            len(group.members),
            group.place,
            begin_s,
            self._network,
            group.links,
            lambda: self._operation_of_rank(group, group.source, slot),
        )
        operation.first_s = operation.last_s = now_s
        group.operations[header.slot] = operation
        if len(group.operations) > _MOST_OPERATIONS:
            self._log_oldest(group)
        return operation

    def _operation_of_rank(self, group: Group, rank: int, slot: int) -> Operation | None:
        """The operation of another real rank of the same group; None before its first message."""
        for ring in self._groups:
            if (ring.name, ring.members, ring.rank) == (group.name, group.members, rank):
                return ring.operations.get(slot)
        return None

    def _log_oldest(self, group: Group) -> None:
        """Forget the oldest operation of a group, after adding its row to the log."""
        # Operations of a group begin in order, so the first is the oldest.
        operation = group.operations.pop(next(iter(group.operations)))
        self._log.append(operation_row(group, operation))

    def _join(self) -> None:
        """Handle a real rank's announcement of a group: answer with the other ranks' addresses."""
        connected, _ = self._join_listener.accept()
        # A stranger that connects to the port must neither delay the ranks nor learn anything.
        connected.settimeout(_JOIN_S)
        with connected, connected.makefile("rw") as line:
            try:
                key, request, *details = json.loads(line.readline(_JOIN_BYTES))
            except (OSError, ValueError, TypeError):
                return
            if not isinstance(key, str) or not compare_digest(key, self._orders.wire_key):
                return
            if request == CLOCK:
                line.write(json.dumps(time.perf_counter()) + "\n")
                return
            # Numbers by which ranks call are unique per (group, caller, callee), so a connection is
            # known by its first message.
            rank, name, listed = details
            members = tuple(listed)
            if request == CONNECTED:
                self._wait_for_others(connected, name, members)
                return
            if (name, members) not in self._bases:
                self._bases[name, members] = self._next_base
                self._next_base += len(members) ** 2
            base = self._bases[name, members]
            place = members.index(rank)
            conditions, links = self._reals.setdefault(rank, (Conditions(self._orders), Links()))
            source = ring_source(members, self._orders.real_ranks, place)
            group = Group(name, members, place, conditions, links, source)
            self._formed(group)
            for peer, member in enumerate(members):
                if member not in self._orders.real_ranks:
                    self._expected[base + peer * len(members) + place] = group, peer
            line.write(json.dumps([self._listener.getsockname()[1], base]) + "\n")

    def _wait_for_others(
        self, connected: socket.socket, name: str, members: tuple[int, ...]
    ) -> None:
        """Answer all real ranks of a group when the last of them is connected to all others."""
        # The caller closes its own descriptor of the connection.
        waiting = self._waiting.setdefault((name, members), [])
        waiting.append(connected.dup())
        if len(waiting) < len({*members} & {*self._orders.real_ranks}):
            return
        del self._waiting[name, members]
        for rank_connected in waiting:
            # The process that watches the ranks reports a rank that has ended.
            with rank_connected, suppress(OSError):
                rank_connected.sendall(b"true\n")

    def _accept(self) -> None:
        connected, _ = self._listener.accept()
        # A caller with an unknown number does not belong to this run.
        number = called_as(connected)
        if number not in self._expected:
            connected.close()
            return
        self._connected(connected, *self._expected.pop(number))

    def _formed(self, group: Group) -> None:
        """A real rank has formed a group."""
        self._groups.append(group)

    def _connected(self, connected: socket.socket, group: Group, peer: int) -> None:
        """A real rank has connected to an emulated one, by its place in the group."""
        end = group.ends[peer] = _Endpoint(Connection(connected), group, peer)
        self._selector.register(connected, selectors.EVENT_READ, end)


def ring_source(members: tuple[int, ...], real_ranks: Collection[int], place: int) -> int:
    """Rank whose data reach the emulated ranks of a ring that a real rank is part of.

    Ranks of a ring send to the next one, so real ranks beside each other send nothing to emulated
    ones but for the last of them.
    """
    size = len(members)
    for step in range(size):
        if members[(place + step + 1) % size] not in real_ranks:
            return members[(place + step) % size]
    return members[place]


def operation_row(group: Group, operation: Any) -> dict[str, Any]:
    """The log's row of an operation, from the message loop in either language."""
    row = (
        group.rank,
        group.name,
        len(group.members),
        number_of(operation.slot),
        kind_of(operation.slot),
        operation.in_bytes,
        operation.out_bytes,
        operation.messages,
        operation.first_s,
        operation.begin_s,
        operation.last_s,
    )
    return dict(zip(OPERATION_COLUMNS, row, strict=True))
