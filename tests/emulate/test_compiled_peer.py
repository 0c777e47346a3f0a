"""The message loop in C answers as the one in Python does: the same data, log and errors, message
by message."""

import json
import random
import select
import shutil
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from perfmodel.emulate import Network, PeerPlace
from perfmodel.emulate.environment import Orders
from perfmodel.emulate.wire import (
    DATA,
    HEADER,
    KEPT_BYTES,
    KINDS,
    PEER,
    RECV_READY,
    RETURNS_OWN,
    SEND_READY,
    Connection,
    Header,
    Incoming,
    PeerProcess,
    compiled_loop,
    join,
    peers,
    plain,
)

needs_compiler = pytest.mark.skipif(compiled_loop() is None, reason="no C compiler, or not Linux")
BOTH_WAYS = ("all_reduce", "all_gather", "all_to_all")
"""Kinds in which the real rank sends to, and receives from, an emulated one."""


def slot_of(kind: str, number: int) -> int:
    return KINDS.index(kind) << 56 | number << 24


@dataclass
class Rank:
    """A real rank: gloo's handshake with every emulated rank of one group."""

    connections: dict[int, Connection]
    offers: dict[tuple[int, int], list[bytes]] = field(default_factory=dict)
    """Data that wait for their receiver, by peer and slot."""
    grants: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Receivers that are ready for data which have not been offered yet, by peer and slot."""
    ahead: int = 0
    """Messages whose receiver was ready before they were offered."""
    buffers: dict[int, bytearray] = field(default_factory=dict)
    received: list[tuple[int, int, bytes]] = field(default_factory=list)
    sent: int = 0

    @classmethod
    def joined(cls, orders: Orders, members: tuple[int, ...]) -> "Rank":
        joined = join(orders, members)
        place, connections = members.index(orders.rank), {}
        for peer, member in enumerate(members):
            if member not in orders.real_ranks:
                connected = socket.create_connection((joined.peer_host, joined.port))
                connected.sendall(struct.pack("<q", joined.base + peer * len(members) + place))
                connections[peer] = Connection(connected)
        return cls(connections)

    def say(self, peer: int, what: int, slot: int, nbytes: int, data: bytes | None = None) -> None:
        view = None if data is None else memoryview(data)
        self.connections[peer].send(what, slot, nbytes, view)
        self.connections[peer].flush()

    def offer(self, peer: int, slot: int, data: bytes) -> None:
        """Announce data, and send them at once if their receiver is known to be ready (gloo:
        `Pair::send`)."""
        self.say(peer, SEND_READY, slot, len(data))
        if self.grants[peer, slot]:
            self.grants[peer, slot] -= 1
            self.ahead += 1
            self.say(peer, DATA, slot, len(data), data)
        else:
            self.offers.setdefault((peer, slot), []).append(data)

    def write(self, peer: int, content: bytes) -> None:
        """Write bytes by hand, however long it takes."""
        connected = self.connections[peer].socket
        connected.setblocking(True)
        connected.sendall(content)
        connected.setblocking(False)

    def serve(self, until: int) -> None:
        """Exchange messages until so many have been received, and all that was offered has left."""
        sockets = {connection.socket: peer for peer, connection in self.connections.items()}
        while (
            len(self.received) < until
            or any(self.offers.values())
            or any(c.sending for c in self.connections.values())
        ):
            writers = [c.socket for c in self.connections.values() if c.sending]
            readable, writable, _ = select.select(list(sockets), writers, [], 20.0)
            assert readable or writable, "the emulated ranks do not answer"
            for ready in writable:
                self.connections[sockets[ready]].flush()
            for ready in readable:
                peer = sockets[ready]
                assert self.connections[peer].receive(
                    lambda header, peer=peer: self._place(peer, header),
                    lambda header, peer=peer: self._arrived(peer, header),
                )

    def _place(self, peer: int, header: Header) -> Incoming:
        self.buffers[peer] = bytearray(header.nbytes)
        return Incoming(memoryview(self.buffers[peer]), header.nbytes)

    def _arrived(self, peer: int, header: Header) -> None:
        if header.what == DATA:
            self.received.append((peer, header.slot, bytes(self.buffers.pop(peer, b""))))
        elif header.what == RECV_READY:
            waiting = self.offers.get((peer, header.slot))
            if waiting:
                data = waiting.pop(0)
                self.say(peer, DATA, header.slot, len(data), data)
            else:
                self.grants[peer, header.slot] += 1


def answered(
    tmp_path: Path, compiled: bool, network: Network, seed: int
) -> tuple[list, list[dict], bool]:
    """What a rank receives in a hundred collectives of random kinds and sizes, and what the
    emulated ranks note."""
    draw, data_of = random.Random(seed), np.random.default_rng(seed)
    orders = Orders(address="", rank=1, world_size=5, real_ranks=(1,), out=str(tmp_path))
    with peers(orders, network, PeerPlace(compiled=compiled)) as emulated:
        rank = Rank.joined(emulated.orders, (0, 1, 2, 3, 4))
        expected = 0
        for number in range(100):
            kind = draw.choice([*BOTH_WAYS, "broadcast", "scatter", "gather", "barrier"])
            slot = slot_of(kind, number)
            nbytes = draw.choice([0, 4, 1000, 70_000, 300_000]) if number else KEPT_BYTES + 8
            steps = [(peer, what) for peer in rank.connections for what in (RECV_READY, SEND_READY)]
            if kind not in BOTH_WAYS:
                steps = [
                    (draw.choice(list(rank.connections)), draw.choice([RECV_READY, SEND_READY]))
                ]
            draw.shuffle(steps)
            data = data_of.bytes(nbytes)
            for peer, what in steps:
                if what == SEND_READY:
                    # a ring passes the same data on; an all-to-all has other data for every rank
                    rank.offer(peer, slot, data_of.bytes(nbytes) if kind == "all_to_all" else data)
                else:
                    expected += 1
                    rank.say(peer, what, slot, nbytes)
            rank.serve(expected)
        for connection in rank.connections.values():
            connection.socket.close()
        emulated.end()
    noted = json.loads((tmp_path / PEER).read_text())
    return sorted(rank.received), noted["operations"], noted["compiled"]


def determined(received: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
    """What does not depend on which message came first: data that are the rank's own
    (`Operation`)."""
    waits = [KINDS.index(kind) for kind in RETURNS_OWN]
    return [
        (peer, slot, data)
        for peer, slot, data in received
        if slot >> 56 in waits and len(data) <= KEPT_BYTES
    ]


@needs_compiler
@pytest.mark.parametrize("network", [Network(), Network(1e-4, 1e9)])
def test_both_loops_answer_alike(tmp_path: Path, network: Network) -> None:
    (own, operations, compiled), (same, same_operations, not_compiled) = (
        answered(tmp_path, compiled, network, seed=3) for compiled in (True, False)
    )
    assert (compiled, not_compiled) == (True, False)
    assert determined(own) == determined(same)
    assert max(len(data) for _, _, data in determined(own)) == 300_000
    assert all(any(data) for _, _, data in determined(own) if len(data) >= 1000)
    assert [(p, s, len(d)) for p, s, d in own] == [(p, s, len(d)) for p, s, d in same]
    assert len(operations) == 100
    facts = ("rank", "group", "ranks", "sequence", "kind", "in_bytes", "out_bytes", "messages")
    assert [[row[name] for name in facts] for row in operations] == [
        [row[name] for name in facts] for row in same_operations
    ]
    for row in operations:
        assert row["first_s"] <= row["begin_s"] <= row["last_s"] + network.latency_s


def rings(tmp_path: Path, compiled: bool, seed: int) -> tuple[Rank, list[list[object]]]:
    """A rank after ninety pairs of steps of three rings, as training repeats them, now and then
    with other ones.

    Of a pair, gloo's two threads may begin the second first.
    """
    draw = random.Random(seed)
    usual = [("all_reduce", 1000), ("all_gather", 70_000), ("all_gather", 300_000)]
    orders = Orders(address="", rank=1, world_size=3, real_ranks=(1,), out=str(tmp_path))
    with peers(orders, Network(), PeerPlace(compiled=compiled)) as emulated:
        rank = Rank.joined(emulated.orders, (0, 1, 2))
        for first in range(0, 180, 2):
            pair = [usual[number % 3] for number in (first, first + 1)]
            if draw.random() < 0.1:
                pair[0] = draw.choice([("all_reduce", 8), ("all_gather", 1000), ("broadcast", 4)])
            numbered = [*zip((first, first + 1), pair, strict=True)]
            if draw.random() < 0.2:
                numbered.reverse()
            for number, (kind, nbytes) in numbered:
                slot = slot_of(kind, number)
                for part in range(2):
                    data = bytes([number, part]) * (nbytes // 2)
                    rank.say(0, RECV_READY, slot, nbytes)
                    if kind != "broadcast":
                        rank.offer(2, slot, data)
            rank.serve(2 * (first + 2))
        for connection in rank.connections.values():
            connection.socket.close()
        emulated.end()
    facts = ("sequence", "kind", "in_bytes", "out_bytes", "messages")
    operations = json.loads((tmp_path / PEER).read_text())["operations"]
    return rank, sorted([row[name] for name in facts] for row in operations)


@needs_compiler
@pytest.mark.parametrize("seed", range(4))
def test_what_repeats_is_granted_ahead_and_nothing_else_changes(tmp_path: Path, seed: int) -> None:
    (own, operations), (same, same_operations) = (
        rings(tmp_path, compiled, seed) for compiled in (True, False)
    )
    assert same.ahead == 0
    # Of 360 messages; what was foreseen wrongly, or began in another order, is granted as it is
    # announced.
    assert 100 < own.ahead < 360
    assert determined(sorted(own.received)) == determined(sorted(same.received))
    assert [(p, s, len(d)) for p, s, d in sorted(own.received)] == [
        (p, s, len(d)) for p, s, d in sorted(same.received)
    ]
    assert operations == same_operations


@needs_compiler
def test_an_operation_that_has_begun_is_not_granted_ahead(tmp_path: Path) -> None:
    """Two operations announced at once, the second of which was foreseen: it is granted once, as it
    is offered."""
    kinds = [("all_reduce", 1000), ("all_gather", 1000), ("broadcast", 4)]
    orders = Orders(address="", rank=1, world_size=3, real_ranks=(1,), out=str(tmp_path))
    with peers(orders, Network(), PeerPlace()) as emulated:
        rank = Rank.joined(emulated.orders, (0, 1, 2))

        def call(numbers: Iterable[int]) -> None:
            """Ask for all of the operations' messages first, then offer the others."""
            called = [(slot_of(kinds[n % 3][0], n), *kinds[n % 3]) for n in numbers]
            for slot, _, nbytes in called:
                rank.say(0, RECV_READY, slot, nbytes)
            for slot, kind, nbytes in called:
                if kind == "all_reduce":
                    rank.serve(len(rank.received) + 1)
                if kind != "broadcast":
                    rank.offer(2, slot, bytes(nbytes))

        # often enough for each to be foreseen
        for number in range(18):
            call([number])
            rank.serve(number + 1)
        assert rank.ahead > 0
        rank.grants.clear()
        call([18, 19])
        rank.serve(20)
        call([20])
        rank.serve(21)
        assert not any(rank.grants.values())
        for connection in rank.connections.values():
            connection.socket.close()
        emulated.end()


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("kind", RETURNS_OWN)
def test_own_data_are_passed_on_while_they_come(tmp_path: Path, compiled: bool, kind: str) -> None:
    """On a slow link an answer neither waits for the whole of the rank's message nor is zeros."""
    orders = Orders(address="", rank=0, world_size=3, real_ranks=(0,), out=str(tmp_path))
    slot, nbytes = slot_of(kind, 0), 1 << 20
    data = np.random.default_rng(0).bytes(nbytes)
    with peers(orders, Network(), PeerPlace(compiled=compiled)) as emulated:
        rank = Rank.joined(emulated.orders, (0, 1, 2))
        # Around a ring data go to one neighbour and come from the other.
        to, source = (1, 2) if kind == "all_gather" else (1, 1)
        rank.say(source, RECV_READY, slot, nbytes)
        rank.say(to, SEND_READY, slot, nbytes)
        granted: list[Header] = []
        answer = Incoming(memoryview(bytearray(nbytes)), nbytes)
        while RECV_READY not in [header.what for header in granted]:
            assert select.select([rank.connections[to].socket], [], [], 20.0)[0]
            assert rank.connections[to].receive(lambda header: answer, granted.append)
        # Half of the data by hand, as on a link that takes its time.
        message = HEADER.pack(HEADER.size + nbytes, DATA, slot, 0, nbytes, 0) + data
        half = HEADER.size + nbytes // 2
        rank.write(to, message[:half])
        while answer.arrived < nbytes // 2:
            assert select.select([rank.connections[source].socket], [], [], 20.0)[0], (
                "no answer before the whole"
            )
            assert rank.connections[source].receive(lambda header: answer, granted.append)
        assert answer.arrived == nbytes // 2
        assert bytes(answer.data[: nbytes // 2]) == data[: nbytes // 2]
        rank.write(to, message[half:])
        while not answer.complete:
            assert select.select([rank.connections[source].socket], [], [], 20.0)[0]
            assert rank.connections[source].receive(lambda header: answer, granted.append)
        assert bytes(answer.data) == data
        for connection in rank.connections.values():
            connection.socket.close()
        emulated.end()


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
def test_real_ranks_beside_each_other_are_answered_in_a_ring(
    tmp_path: Path, compiled: bool
) -> None:
    """Rank 0 sends to rank 1, which is real: what it gets are the data that rank 1 sends to the
    emulated rank 2."""
    orders = Orders(address="", rank=0, world_size=4, real_ranks=(0, 1), out=str(tmp_path))
    slot, data = slot_of("all_gather", 0), b"of rank one"
    with peers(orders, Network(), PeerPlace(compiled=compiled)) as emulated:
        ranks = [
            Rank.joined(Orders(**{**vars(emulated.orders), "rank": rank}), (0, 1, 2, 3))
            for rank in (0, 1)
        ]
        ranks[0].say(3, RECV_READY, slot, len(data))
        ranks[1].offer(2, slot, data)
        ranks[1].serve(0)
        ranks[0].serve(1)
        assert ranks[0].received == [(3, slot, data)]
        for rank in ranks:
            for connection in rank.connections.values():
                connection.socket.close()
        emulated.end()


def failure(tmp_path: Path, compiled: bool, real_ranks: tuple[int, ...]) -> str:
    """Why the emulated ranks end: data that nobody asked for, or two real ranks that disagree."""
    orders = Orders(address="", rank=0, world_size=3, real_ranks=real_ranks, out=str(tmp_path))
    with ExitStack() as stack:
        emulated: PeerProcess = stack.enter_context(
            peers(orders, Network(), PeerPlace(compiled=compiled))
        )
        ranks = []
        for rank in real_ranks:
            of_rank = Orders(**{**vars(emulated.orders), "rank": rank})
            ranks.append(Rank.joined(of_rank, (0, 1, 2)))
            for connection in ranks[-1].connections.values():
                stack.callback(connection.socket.close)
        if len(ranks) == 1:
            ranks[0].say(1, DATA, slot_of("all_reduce", 0), 4, b"data")
        else:
            ranks[0].say(1, RECV_READY, slot_of("all_reduce", 0), 4)
            emulated_place = next(iter(ranks[1].connections))
            ranks[1].say(emulated_place, RECV_READY, slot_of("broadcast", 0), 4)
        emulated.process.wait(timeout=20.0)
        return emulated.failure


@needs_compiler
def test_both_loops_end_with_the_same_words(tmp_path: Path) -> None:
    own, same = (failure(tmp_path, compiled, (0,)) for compiled in (True, False))
    assert own == same
    assert (
        own == "rank 0: group 0,1,2: all_reduce: message 0 to place 1, of 4 bytes, was not expected"
    )
    told = {failure(tmp_path, compiled, (0, 2)) for compiled in (True, False)}
    assert all("call #0 of group 0,1,2 is" in text for text in told)


def test_without_a_compiler_messages_are_answered_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compiled_loop() is None


@needs_compiler
def test_code_is_not_loaded_from_a_folder_that_others_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path))
    assert compiled_loop() is not None
    (tmp_path / "peer").chmod(0o777)
    assert compiled_loop() is None


def test_conditions_are_kept_by_the_loop_in_python() -> None:
    usual = Orders(address="", rank=0, world_size=2, real_ranks=(0,), out="")
    assert plain(usual)
    for changed in (
        {"straggler": 1.2},
        {"jitter": 0.1},
        {"delays_s": {"barrier": 1.0}},
        {"fail_rank": 1},
    ):
        assert not plain(Orders(**{**vars(usual), **changed}))
