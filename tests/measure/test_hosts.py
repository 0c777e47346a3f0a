"""Hosts emulated by network namespaces, and the switch that delays what they send."""

import os
import socket
import threading
import time
from multiprocessing import Pipe

import numpy as np
import pytest

from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.measure.ranks import EmulatedHosts, RankGroup, forward, unavailable
from perfmodel.measure.timing import NoMeter
from perfmodel.ops import Collective

needs_hosts = pytest.mark.skipif(
    bool(unavailable()), reason=f"hosts cannot be emulated here: {unavailable()}"
)
BYTES = 262144
BANDWIDTH_BYTES_PER_S = 2.5e7


def all_reduce(ranks_per_node: int) -> Collective:
    return Collective(
        collective="all_reduce",
        bytes=BYTES,
        num_ranks=4,
        ranks_per_node=ranks_per_node,
        dtype="fp32",
    )


@needs_hosts
def test_ranks_on_emulated_hosts_reduce_through_the_shaped_link():
    with (
        EmulatedHosts(2, BANDWIDTH_BYTES_PER_S) as cluster,
        RankGroup(4, hosts=cluster.hosts) as group,
    ):
        group.load(all_reduce(2))
        expected = sum(np.arange(BYTES // 4) % 1024 + rank for rank in range(4))
        for value in group.values():
            np.testing.assert_array_equal(value, expected)
        # no rank can have the sum before half of the buffer has left each host
        assert group.sample(2, NoMeter()).call_s > BYTES / 2 / BANDWIDTH_BYTES_PER_S * 0.8
        with pytest.raises(PerfModelError, match="ranks_per_node = 2"):
            group.load(all_reduce(4))


@needs_hosts
def test_the_latency_of_a_link_is_paid_by_every_message():
    latency_s = 0.02
    with EmulatedHosts(2, 1e9, latency_s) as cluster, RankGroup(2, hosts=cluster.hosts) as group:
        group.load(
            Collective(
                collective="send_recv", bytes=64, num_ranks=2, ranks_per_node=1, dtype="fp32"
            )
        )
        assert group.sample(1, NoMeter()).call_s > latency_s


@needs_hosts
def test_hosts_leave_nothing_behind():
    with EmulatedHosts(2, 1e8) as cluster:
        names = [host.namespace for host in cluster.hosts]
        assert set(names) <= set(os.listdir("/var/run/netns"))
    assert not set(names) & set(os.listdir("/var/run/netns"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1e8), "got 1"),
        ((2, -1.0), "bandwidth"),
        ((2, float("nan")), "bandwidth"),
        ((2, 1e8, 2.0), "latency_s"),
    ],
)
def test_impossible_hosts_are_refused(arguments: tuple[float, ...], message: str):
    with pytest.raises(PerfModelError, match=message):
        EmulatedHosts(*arguments)  # pyright: ignore[reportArgumentType]


def test_hosts_need_rights_and_tools(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CalibrationError, match="root"), EmulatedHosts(2, 1e8):
        pass


def test_ranks_must_divide_over_hosts():
    with pytest.raises(PerfModelError, match="are not divisible"):
        RankGroup(3, hosts=EmulatedHosts(2, 1e8).hosts)


def frame(receiver: int, sender: int, text: bytes) -> bytes:
    return bytes([2, 0, 0, 0, 0, receiver]) + bytes([2, 0, 0, 0, 0, sender]) + text


def test_the_switch_learns_ports_keeps_order_and_delays():
    latency_s = 0.03
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    ours, theirs = Pipe()
    worker = threading.Thread(
        target=forward, args=(theirs, [inner.fileno() for _, inner in pairs], latency_s)
    )
    worker.start()
    try:
        hosts = [outer for outer, _ in pairs]
        for host in hosts:
            host.settimeout(10)
        start_s = time.monotonic()
        hosts[0].send(frame(1, 0, b"unknown receiver"))
        assert hosts[1].recv(100).endswith(b"unknown receiver")
        assert time.monotonic() - start_s >= latency_s
        assert hosts[2].recv(100).endswith(b"unknown receiver")
        hosts[1].send(frame(0, 1, b"first"))
        hosts[1].send(frame(0, 1, b"second"))
        assert [hosts[0].recv(100)[12:] for _ in range(2)] == [b"first", b"second"]
        # the answer made host 1 known, and only it gets what is for it
        hosts[0].send(frame(1, 0, b"known receiver"))
        assert hosts[1].recv(100).endswith(b"known receiver")
        hosts[2].setblocking(False)
        with pytest.raises(BlockingIOError):
            hosts[2].recv(100)
    finally:
        ours.send("stop")
        worker.join(10)
        for pair in pairs:
            for end in pair:
                end.close()
