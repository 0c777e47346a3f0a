"""Real ranks whose gloo exchanges its messages with one process for all others; skipped where torch
is missing."""

import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel.emulate import Emulation, EmulationError, Network, PeerPlace, measured_trace
from perfmodel.emulate import emulate as emulate
from perfmodel.emulate.environment import Orders
from perfmodel.emulate.wire import clock_ahead_s, peers, wait_for_real_ranks
from perfmodel.errors import PerfModelError
from perfmodel.measure.ranks import EmulatedHosts, unavailable

pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
SCRIPTS = Path(__file__).parent / "scripts"
DELAY_S, LATENCY_S = 0.2, 0.01
_SSH = ("ssh", "-o", "BatchMode=yes", "elsewhere", "python3", "-m", "perfmodel.emulate.wire._peer")


def emulation(script: str, *arguments: str, **more) -> Emulation:
    return Emulation(
        command=(sys.executable, str(SCRIPTS / script), *arguments),
        timeout_s=300.0,
        quiet=True,
        **{"world_size": 6, "wire": Network(LATENCY_S), **more},
    )


@pytest.fixture(scope="module")
def run():
    return emulate(emulation("wire.py", conditions={"delays_s": {"all_reduce": DELAY_S}}))


def test_every_collective_is_answered_on_the_wire(run) -> None:
    calls = run.collectives()
    assert {*calls.kind} == {
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send_recv",
        "barrier",
    }
    assert run.peer is not None
    # a ring of six passes five sixths of 4 MiB twice in each direction
    assert calls.bytes.max() == pytest.approx(2 * 5 / 6 * (1 << 22), rel=0.01)
    assert run.peer.nbytes > 2 * calls.bytes.max()
    assert run.peer.cpu_s < run.peer.wall_s
    assert len(run.iterations()) == 2
    assert measured_trace(run).n > 0


def test_messages_take_their_hops_and_operations_their_delay(run) -> None:
    calls = run.collectives()
    times_s = calls.end_s - calls.issued_s
    # of one number there are fewer segments
    reductions = calls[(calls.kind == "all_reduce") & (calls.bytes > 100)]
    # segments go two at a time, there and back, ten times around
    assert times_s[reductions.index].min() > DELAY_S + 10 * LATENCY_S
    assert reductions.delay_s.to_numpy() == pytest.approx(DELAY_S)
    barriers = calls[calls.kind == "barrier"]
    assert (barriers["ranks"] == 2).any()
    assert (times_s[barriers.index] < DELAY_S + 10 * LATENCY_S).any()
    # side by side: one begins before another ends
    assert (reductions.issued_s.to_numpy()[1:] < reductions.end_s.to_numpy()[:-1]).any()


@pytest.mark.slow
def test_several_real_ranks_talk_to_each_other_themselves() -> None:
    """And each with the emulated ones: rank 2 in the middle of a pipeline, before an emulated
    stage."""
    run = emulate(emulation("stages.py", real_ranks=(0, 2), wire=Network()))
    calls = run.collectives()
    assert {*calls[calls["rank"] == 0].kind} == {"all_gather", "all_reduce", "broadcast"}
    assert (calls[calls["rank"] == 2].kind == "send_recv").any()
    assert (run.iterations().groupby("rank").iteration.max() == 3).all()


@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_real_ranks_beside_each_other_find_sizes_that_fit(compiled: bool) -> None:
    """In a ring the first of two real neighbours sends nothing to emulated ranks, which answer it
    all the same."""
    place = PeerPlace(compiled=compiled)
    run = emulate(
        emulation("neighbours.py", world_size=4, real_ranks=(0, 1), wire=Network(), peer=place)
    )
    assert (run.collectives().kind == "all_gather").sum() >= 2 * 2 * 2


@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_the_emulated_ranks_may_be_behind_a_link_of_their_own() -> None:
    """Twenty megabytes a second: what a rank sends takes its bytes over the bandwidth, whatever the
    machine."""
    bandwidth_bytes_per_s = 20e6
    with EmulatedHosts(2, bandwidth_bytes_per_s) as emulated:
        peer_host, real_host = emulated.hosts
        place = PeerPlace.on_host(peer_host)
        # the script checks what is in its buffers after every collective
        run = emulate(emulation("wire.py", wire=Network(), peer=place, hosts=(real_host,)))
    calls = run.collectives()
    largest = calls.loc[calls.bytes.idxmax()]
    assert largest.end_s - largest.issued_s > 0.8 * largest.bytes / bandwidth_bytes_per_s


LINGERS = "import subprocess, sys, time; subprocess.run(sys.argv[1:]); time.sleep(60)"


@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param((), marks=pytest.mark.slow, id="peer ends too"),
        pytest.param((sys.executable, "-c", LINGERS), id="ranks end before the peer"),
    ],
)
def test_real_ranks_that_disagree_are_told_at_once(wrapper: tuple[str, ...]) -> None:
    begin_s = time.monotonic()
    place = PeerPlace(command=(*wrapper, *PeerPlace().command))
    with pytest.raises(
        EmulationError,
        match=r"call #\d+ of group 0,1,2,3 is (broadcast|all_reduce) on rank \d, but",
    ):
        emulate(
            emulation("disagree.py", world_size=4, real_ranks=(0, 2), wire=Network(), peer=place)
        )
    assert time.monotonic() - begin_s < 100.0


@pytest.mark.parametrize(
    ("more", "source"),
    [
        ({"world_size": 4, "wire": Network()}, 0),
        pytest.param({"world_size": 4, "wire": Network()}, 1, marks=pytest.mark.slow),
        pytest.param({"world_size": 2, "wire": None}, 0, marks=pytest.mark.slow),
        ({"world_size": 2, "wire": None}, 1),
    ],
)
def test_real_ranks_by_themselves_that_disagree_are_told_too(more: dict, source: int) -> None:
    """Nobody sees the messages of a group whose members are all real; the source of a broadcast
    waits for nobody."""
    begin_s = time.monotonic()
    kinds = r"is (broadcast|all_reduce) on rank [01], but (broadcast|all_reduce) on rank [01]"
    with pytest.raises(EmulationError, match=rf"call #\d+ of group \w+ {kinds}"):
        emulate(emulation("disagree_alone.py", str(source), real_ranks=(0, 1), **more))
    assert time.monotonic() - begin_s < 60.0


@pytest.mark.slow
def test_a_real_rank_that_is_only_late_disagrees_with_nobody() -> None:
    """Rank 1 comes two seconds after rank 0, which waits meanwhile."""
    run = emulate(emulation("late.py", "2.0", world_size=2, real_ranks=(0, 1), wire=None))
    assert len(run.ranks) == 2


def test_a_host_that_is_not_known_is_named() -> None:
    with pytest.raises(PerfModelError, match=r"--peer nobody@no\.such\.host\.invalid"):
        PeerPlace.named("nobody@no.such.host.invalid")


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux lets anybody take any loopback address"
)
def test_another_host_is_reached_by_ssh_and_its_clock_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nwhile [ "$1" != python3 ]; do shift; done\nshift\nexec {sys.executable} "$@"\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place = replace(PeerPlace.named("127.0.0.2"), command=_SSH, other_clock=True)
    run = emulate(emulation("steps.py", "4", world_size=4, wire=Network(), peer=place))
    assert run.peer is not None
    assert run.peer.messages > 0
    assert run.iterations().iteration.max() >= 3
    calls, ends_s = run.collectives(), run.ranks[0].ends.wall_s
    assert calls.issued_s.between(ends_s.min() - 5, ends_s.max() + 5).all()


def test_nobody_without_the_key_is_answered(tmp_path: Path) -> None:
    orders = Orders(address="", rank=0, world_size=2, real_ranks=(0,), out=str(tmp_path))
    with peers(orders, Network(), PeerPlace()) as emulated:
        assert abs(clock_ahead_s(emulated.orders)) < 0.1
        with pytest.raises(EmulationError, match="cannot be reached"):
            clock_ahead_s(replace(emulated.orders, wire_key="wrong"))
        emulated.end()


@pytest.mark.parametrize("compiled", [True, False])
def test_no_real_rank_begins_before_all_of_its_group_have_connected(
    compiled: bool, tmp_path: Path
) -> None:
    """Else one could finish with the emulated ranks alone, and end while another is still
    connecting to it."""
    real_ranks, members = (0, 2, 3), (0, 1, 2, 3)
    orders = Orders(address="", rank=0, world_size=4, real_ranks=real_ranks, out=str(tmp_path))
    with (
        peers(orders, Network(), PeerPlace(compiled=compiled)) as emulated,
        ThreadPoolExecutor() as ranks,
    ):

        def connected(rank: int, group: tuple[int, ...] = members) -> Future[None]:
            return ranks.submit(wait_for_real_ranks, replace(emulated.orders, rank=rank), group)

        # a group that is made twice waits twice
        for _ in range(2):
            early = [connected(0), connected(3)]
            # another group of the same ranks has nothing to do with it
            connected(0, (0, 1)).result(timeout=10.0)
            assert not wait(early, timeout=0.3).done
            for answer in [*early, connected(2)]:
                answer.result(timeout=10.0)
        emulated.end()


@pytest.mark.slow
def test_ddp_goes_by_a_rank_that_has_a_model() -> None:
    with pytest.raises(EmulationError, match="rank 1: the script ended"):
        emulate(emulation("stages.py", real_ranks=(1,), wire=Network()))


def test_an_emulated_rank_that_dies_is_named() -> None:
    with pytest.raises(
        EmulationError, match=r"emulated ranks: .*group 0,1,2: emulated rank 2 failed"
    ):
        emulate(
            emulation("steps.py", "9", world_size=3, conditions={"fail_rank": 2, "fail_call": 3})
        )


@pytest.mark.parametrize(
    "conditions", [{"apart": True}, {"swept": "all_reduce", "sweep_s": (0.0,)}]
)
def test_what_the_wire_cannot_do_is_refused(conditions: dict) -> None:
    with pytest.raises(PerfModelError, match="cannot be combined with --sweep or --apart"):
        emulation("steps.py", conditions=conditions)
