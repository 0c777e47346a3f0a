"""The emulated ranks' part in a collective, against all ranks' messages one by one; and gloo's
messages themselves."""

import socket
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.emulate import EmulationError, Network, PeerPlace
from perfmodel.emulate.environment import Orders
from perfmodel.emulate.wire import (
    DATA,
    KINDS,
    NEVER_S,
    RECV_READY,
    SEND_READY,
    Calls,
    Connection,
    Header,
    Incoming,
    Links,
    Message,
    Operation,
    connects_to,
    peers,
    ring_source,
)

LATENCY_S = 1.0
Round = tuple[int | None, int | None]
"""Whom a rank sends to and whom it receives from."""


def ring(n: int, rank: int) -> list[Round]:
    """gloo's all-reduce: two segments to a chunk, twice around."""
    return [((rank - 1) % n, (rank + 1) % n)] * (2 * 2 * (n - 1))


def halving_doubling(n: int, rank: int) -> list[Round]:
    distances = [1 << i for i in range(n.bit_length() - 1)]
    return [(rank ^ d, rank ^ d) for d in (*distances, *reversed(distances))]


def dissemination(n: int, rank: int) -> list[Round]:
    return [((rank + (1 << i)) % n, (rank - (1 << i)) % n) for i in range((n - 1).bit_length())]


def tree(n: int, rank: int, root: int) -> list[Round]:
    place, rounds, mask = (rank - root) % n, list[Round](), (1 << (n - 1).bit_length()) - 1
    for i in range((n - 1).bit_length()):
        mask ^= 1 << i
        other = place ^ (1 << i)
        if not place & mask and other < n:
            other = (other + root) % n
            rounds.append((None, other) if place >> i & 1 else (other, None))
    return rounds


def all_ranks(programs: Sequence[list[Round]], window: int) -> list[float]:
    """When each rank is done: every message of every rank, until nothing changes.

    A rank posts round k when rounds up to k - window are done. Data leave when the sender has
    posted and has heard that the receiver has.
    """
    posted = [[0.0] * len(program) for program in programs]

    def done_s(rank: int, k: int) -> float:
        to, source = programs[rank][k]
        times_s = [posted[rank][k]]
        if source is not None:
            mine = sum(other == source for _, other in programs[rank][:k])
            their = [j for j, (dst, _) in enumerate(programs[source]) if dst == rank][mine]
            times_s.append(max(posted[source][their], posted[rank][k] + LATENCY_S) + LATENCY_S)
        if to is not None:
            mine = sum(other == to for other, _ in programs[rank][:k])
            their = [j for j, (_, src) in enumerate(programs[to]) if src == rank][mine]
            times_s.append(max(posted[rank][k], posted[to][their] + LATENCY_S))
        return max(times_s)

    changed = True
    while changed:
        changed = False
        for rank, program in enumerate(programs):
            for k in range(len(program)):
                # a receive is waited for; a tree's sends are not
                ready_s = max(
                    (done_s(rank, j) for j in range(k - window + 1) if waits(program, j)),
                    default=0.0,
                )
                if ready_s > posted[rank][k]:
                    posted[rank][k], changed = ready_s, True
    return [
        max((done_s(r, k) for k in range(len(p)) if waits(p, k)), default=0.0)
        for r, p in enumerate(programs)
    ]


def waits(program: list[Round], k: int) -> bool:
    return program[k][1] is not None


class Wire:
    """A connection that keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def send(self, what: int, slot: int, nbytes: int, data: Any = None) -> None:
        self.sent.append((what, nbytes))


def one_rank(
    program: list[Round], window: int, kind: str, size: int, place: int, network: Network
) -> float:
    """When the real rank is done whose messages an operation answers."""
    operation = Operation(KINDS.index(kind) << 56, size, place, 0.0, network, Links())
    done_s: list[float] = []
    for k, (to, source) in enumerate(program):
        posted_s = max(
            (d for d, j in zip(done_s, range(k - window + 1), strict=False) if waits(program, j)),
            default=0,
        )
        times_s = [posted_s]
        if source is not None:
            pair = operation.pair(source, Wire())  # pyright: ignore[reportArgumentType]
            pair.asked.append(Message(8, posted_s))
            due_s = operation.try_send(source, pair, posted_s, lambda n: memoryview(bytes(n)))
            times_s.append(due_s)
            assert operation.try_send(source, pair, due_s, lambda n: memoryview(bytes(n))) == due_s
        if to is not None:
            pair = operation.pair(to, Wire())  # pyright: ignore[reportArgumentType]
            pair.offered.append(Message(8, posted_s))
            due_s = operation.try_receive(to, pair, posted_s)
            times_s.append(due_s)
            assert operation.try_receive(to, pair, due_s) == due_s
            assert operation.arrive(to, 8, due_s) == ""
        done_s.append(max(times_s))
    return max((d for k, d in enumerate(done_s) if waits(program, k)), default=0.0)


@pytest.mark.parametrize(
    ("kind", "program", "window", "sizes"),
    [
        ("all_reduce", ring, 2, (2, 3, 5, 8)),
        ("all_reduce", halving_doubling, 1, (2, 4, 8)),
        ("barrier", dissemination, 1, (2, 3, 5, 8)),
    ],
)
def test_one_real_rank_is_done_when_it_would_be_among_real_ones(
    kind: str, program: Any, window: int, sizes: tuple[int, ...]
) -> None:
    for n in sizes:
        expected_s = all_ranks([program(n, rank) for rank in range(n)], window)
        for place in range(n):
            found_s = one_rank(program(n, place), window, kind, n, place, Network(LATENCY_S))
            assert found_s == pytest.approx(expected_s[place]), (kind, n, place)


def test_a_tree_reaches_a_rank_with_the_last_of_its_step() -> None:
    """From which rank a message comes tells the step; not whether others of it were reached
    earlier."""
    n, root = 8, 3
    expected_s = all_ranks([tree(n, rank, root) for rank in range(n)], 1)
    for place in range(n):
        found_s = one_rank(tree(n, place, root), 1, "broadcast", n, place, Network(LATENCY_S))
        step = ((place - root) % n).bit_length()
        latest_s = max(expected_s[(root + v) % n] for v in range(n) if v.bit_length() == step)
        assert found_s == pytest.approx(latest_s), place


def test_messages_share_the_real_ranks_links() -> None:
    """A scatter's root serves others first; what one link carries comes one after another."""
    operation = Operation(
        KINDS.index("scatter") << 56, 4, 2, 0.0, Network(0.0, 10.0), links := Links()
    )
    pair = operation.pair(0, Wire())  # pyright: ignore[reportArgumentType]
    pair.asked += [Message(10, 0.0), Message(10, 0.0)]
    zeros = lambda n: memoryview(bytes(n))  # noqa: E731
    assert operation.try_send(0, pair, 0.0, zeros) == pytest.approx(2.0)  # rank 1 first
    assert operation.try_send(0, pair, 2.0, zeros) == 2.0
    assert operation.try_send(0, pair, 2.0, zeros) == pytest.approx(3.0)
    assert links.in_s == pytest.approx(2.0)
    assert pair.sent == 0b1
    assert operation.try_receive(0, pair, 9.0) == NEVER_S


def test_a_message_that_was_not_expected_is_refused() -> None:
    operation = Operation(KINDS.index("all_reduce") << 56, 2, 0, 0.0, Network(), Links())
    pair = operation.pair(1, Wire())  # pyright: ignore[reportArgumentType]
    pair.offered.append(Message(8, 0.0))
    assert "message 0 to place 1, of 8 bytes, was not expected" in operation.arrive(1, 8, 0.0)
    operation.try_receive(1, pair, 0.0)
    assert "of 9 bytes, was not expected" in operation.arrive(1, 9, 0.0)
    assert operation.arrive(1, 8, 0.0) == ""
    assert pair.arrived == 0b1


def come(operation: Operation, peer: int, data: bytes) -> None:
    """The data of a message that was granted come as a whole."""
    if data:
        place = operation.place_for(peer, len(data), memoryview(bytearray(64)))
        place.room()[:] = data
        place.arrived += len(data)
    assert operation.arrive(peer, len(data), 0.0) == ""


def test_an_all_gather_returns_the_real_ranks_own_data() -> None:
    operation = Operation(KINDS.index("all_gather") << 56, 3, 0, 0.0, Network(), Links())
    left, right = (operation.pair(peer, Wire()) for peer in (2, 1))  # pyright: ignore[reportArgumentType]
    left.asked.append(Message(4, 0.0))
    # sizes must be its own
    assert operation.try_send(2, left, 0.0, lambda n: memoryview(bytes(n))) == NEVER_S
    right.offered.append(Message(4, 0.0))
    operation.try_receive(1, right, 0.0)
    sent: list[Any] = []
    left.connection.send = lambda what, slot, n, data=None: sent.append(data)  # type: ignore[method-assign]
    # Granted, its own data are certain to come: they go on as they come.
    assert operation.try_send(2, left, 0.0, lambda n: memoryview(bytes(n))) == 0.0
    come(operation, 1, b"mine")
    announced, data = sent
    assert announced is None
    assert data.complete
    assert bytes(data.data) == b"mine"


def test_real_ranks_beside_each_other_get_the_data_of_the_last_of_them() -> None:
    """Ranks 0 and 1 of four: what 0 sends in a ring goes to 1, so that emulated ranks have the data
    of 1 alone."""
    assert [ring_source((0, 1, 2, 3), (0, 1), place) for place in (0, 1)] == [1, 1]
    assert [ring_source((4, 5, 6, 7), (7, 4), place) for place in (0, 3)] == [4, 4]
    assert ring_source((0, 2, 4), (0, 4), 2) == 0
    assert ring_source((3, 5), (3, 5), 1) == 5
    slot = KINDS.index("all_gather") << 56
    last = Operation(slot, 4, 1, 0.0, Network(), Links())
    begun: list[Operation] = []
    first = Operation(slot, 4, 0, 0.0, Network(), Links(), lambda: begun[0] if begun else None)
    left = first.pair(3, Wire())  # pyright: ignore[reportArgumentType]
    left.asked.append(Message(4, 0.0))
    zeros = lambda n: memoryview(bytes(n))  # noqa: E731
    assert first.try_send(3, left, 0.0, zeros) == NEVER_S
    begun.append(last)
    assert first.try_send(3, left, 0.0, zeros) == NEVER_S
    right = last.pair(2, Wire())  # pyright: ignore[reportArgumentType]
    right.offered.append(Message(4, 0.0))
    last.try_receive(2, right, 0.0)
    assert first.try_send(3, left, 0.0, zeros) == 0.0


@settings(max_examples=60)
@given(
    size=st.integers(2, 7),
    place=st.integers(0, 6),
    nbytes=st.integers(0, 40),
    sent_bytes=st.none() | st.integers(0, 40),
    order=st.randoms(use_true_random=False),
)
def test_an_all_to_all_returns_own_data_however_late_they_come(
    size, place, nbytes, sent_bytes, order
) -> None:
    """Announcements and data come in any order that gloo allows; sizes may differ in the two
    directions."""
    place %= size
    sent_bytes = nbytes if sent_bytes is None else sent_bytes
    operation = Operation(KINDS.index("all_to_all") << 56, size, place, 0.0, Network(), Links())
    peers_of_rank = [peer for peer in range(size) if peer != place]
    answers: dict[int, list[Any]] = {peer: [] for peer in peers_of_rank}
    # per peer: what the real rank has yet to do, in two independent chains
    pending = [(peer, ["ask"]) for peer in peers_of_rank] + [
        (peer, ["offer", "data"]) for peer in peers_of_rank
    ]
    while pending:
        peer, steps = chain = order.choice(pending)
        wire = Wire()
        wire.send = lambda what, slot, n, data=None, peer=peer: (  # type: ignore[method-assign]
            answers[peer].append(data) if what == DATA and data is not None else None
        )
        pair = operation.pair(peer, wire)  # pyright: ignore[reportArgumentType]
        what = steps.pop(0)
        if what == "ask":
            pair.asked.append(Message(nbytes, 0.0))
        elif what == "offer":
            pair.offered.append(Message(sent_bytes, 0.0))
            assert operation.try_receive(peer, pair, 0.0) == 0.0
        else:
            come(operation, peer, bytes([peer + 1]) * sent_bytes)
        if not steps:
            pending.remove(chain)
        operation.try_send(peer, pair, 0.0, lambda n: memoryview(bytes(n)))
    for peer in peers_of_rank:
        own = bytes([peer + 1]) * nbytes if sent_bytes == nbytes else bytes(nbytes)
        (answer,) = answers[peer]
        assert bytes(answer.data if isinstance(answer, Incoming) else answer) == own


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 50_000), min_size=1, max_size=4),
    share=st.floats(0.0, 1.0),
)
def test_data_are_passed_on_as_they_come_and_nothing_overtakes_them(
    sizes: list[int], share: float
) -> None:
    """What follows a message that is still coming waits; what has come of it leaves at once."""
    one, other = socket.socketpair()
    with one, other:
        sender, receiver = Connection(one), Connection(other)
        contents = [bytes([k + 1]) * size for k, size in enumerate(sizes)]
        sources = [Incoming(memoryview(bytearray(content)), len(content)) for content in contents]
        places: list[Incoming] = []
        came: list[Header] = []

        def place(header: Header) -> Incoming:
            places.append(Incoming(memoryview(bytearray(header.nbytes)), header.nbytes))
            return places[-1]

        def exchange() -> None:
            for _ in range(20):
                sender.flush()
                assert receiver.receive(place, came.append)

        for k, source in enumerate(sources):
            sender.send(SEND_READY, k, source.nbytes)
            sender.send(DATA, k, source.nbytes, source)
        for source in sources:
            source.arrived = int(share * source.nbytes)
            exchange()
            assert not sender.sending
            coming = [i for i, other in enumerate(sources) if not other.complete]
            assert sender.stalled == bool(coming)
            if coming:
                assert len(came) == 2 * coming[0] + 1
                there_bytes = sum(there.arrived for there in places)
                assert there_bytes == sum(sizes[: coming[0]]) + sources[coming[0]].arrived
            source.arrived = source.nbytes
        exchange()
        assert len(came) == 2 * len(sizes)
        assert not sender.sending
        assert not sender.stalled
        assert [bytes(there.data) for there in places] == [
            content for content in contents if content
        ]


def test_messages_arrive_whole_however_the_socket_cuts_them() -> None:
    one, other = socket.socketpair()
    with one, other:
        sender, receiver = Connection(one), Connection(other)
        long = bytes(range(256)) * 4096
        came: list[Header] = []
        data = Incoming(memoryview(bytearray(len(long))), len(long))
        sender.send(RECV_READY, 7, 5)
        sender.send(SEND_READY, 7, len(long))
        sender.send(DATA, 7, len(long), memoryview(long))
        sender.send(DATA, 7, 0, memoryview(b""))
        while len(came) < 4:
            sender.flush()
            assert receiver.receive(lambda header: data, came.append)
        assert [(h.what, h.nbytes) for h in came] == [
            (RECV_READY, 5),
            (SEND_READY, len(long)),
            (DATA, len(long)),
            (DATA, 0),
        ]
        assert bytes(data.data) == long
        one.close()
        assert not receiver.receive(lambda header: data, came.append)


@settings(max_examples=40)
@given(
    kinds=st.lists(
        st.sampled_from(["all_reduce", "broadcast", "barrier"]), min_size=1, max_size=20
    ),
    wrong=st.integers(0, 19),
    order=st.randoms(use_true_random=False),
)
def test_ranks_that_disagree_are_told_at_the_first_call_that_differs(
    kinds, wrong: int, order
) -> None:
    calls = Calls()
    others = ["gather" if number == wrong else kind for number, kind in enumerate(kinds)]
    pending = {0: list(enumerate(kinds)), 1: list(enumerate(others))}
    said = []
    while any(pending.values()):
        rank = order.choice([rank for rank, left in pending.items() if left])
        number, kind = pending[rank].pop(0)
        if text := calls.disagreement("0,1,2", rank, number, kind):
            said.append(text)
    assert [f"call #{wrong} of group 0,1,2" in text for text in said] == [True] * (
        wrong < len(kinds)
    )


def test_tags_of_messages_are_no_numbers_of_calls() -> None:
    calls = Calls()
    assert not calls.disagreement("0,1", 0, 3, "send_recv")
    assert not calls.disagreement("0,1", 1, 3, "all_reduce")


@given(host=st.ip_addresses(v=4), peer=st.ip_addresses(v=4))
def test_gloo_connects_to_the_lower_address(host, peer) -> None:
    assert connects_to(str(host), str(peer)) == (peer < host)


def test_emulated_ranks_whose_command_is_missing_are_named() -> None:
    orders = Orders(address="", rank=0, world_size=2, real_ranks=(0,), out="")
    with (
        pytest.raises(EmulationError, match="no-such-command must be installed"),
        peers(orders, Network(), PeerPlace(command=("no-such-command",))),
    ):
        pass
