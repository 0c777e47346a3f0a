"""Real ranks whose gloo exchanges its messages with one process for all others; skipped where torch is missing."""

import sys
from pathlib import Path

import pytest

from perfmodel.emulate import Emulation, EmulationError, Network, measured_trace
from perfmodel.emulate import emulate as emulate
from perfmodel.errors import PerfModelError

pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
SCRIPTS = Path(__file__).parent / "scripts"
DELAY_S, LATENCY_S = 0.2, 0.01


def emulation(script: str, *arguments: str, **more) -> Emulation:
    return Emulation(
        command=(sys.executable, str(SCRIPTS / script), *arguments), timeout_s=300.0, quiet=True,
        **{"world_size": 6, "wire": Network(LATENCY_S), **more},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return emulate(emulation("wire.py", conditions={"delays_s": {"all_reduce": DELAY_S}}))


def test_every_collective_is_answered_on_the_wire(run) -> None:
    calls = run.collectives()
    assert {*calls.kind} == {"all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "gather", "scatter",
                             "send_recv", "barrier"}  # fmt: skip
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
    reductions = calls[(calls.kind == "all_reduce") & (calls.bytes > 100)]  # of one number there are fewer segments
    # segments go two at a time, there and back, ten times around
    assert times_s[reductions.index].min() > DELAY_S + 10 * LATENCY_S
    assert reductions.delay_s.to_numpy() == pytest.approx(DELAY_S)
    barriers = calls[calls.kind == "barrier"]
    assert (barriers["ranks"] == 2).any()
    assert (times_s[barriers.index] < DELAY_S + 10 * LATENCY_S).any()
    # side by side: one begins before another ends
    assert (reductions.issued_s.to_numpy()[1:] < reductions.end_s.to_numpy()[:-1]).any()


def test_several_real_ranks_talk_to_each_other_themselves() -> None:
    """And each with the emulated ones: rank 2 in the middle of a pipeline, before an emulated stage."""
    run = emulate(emulation("stages.py", real_ranks=(0, 2), wire=Network()))
    calls = run.collectives()
    assert {*calls[calls["rank"] == 0].kind} == {"all_gather", "all_reduce", "broadcast"}
    assert (calls[calls["rank"] == 2].kind == "send_recv").any()
    assert (run.iterations().groupby("rank").iteration.max() == 3).all()


@pytest.mark.slow
def test_ddp_goes_by_a_rank_that_has_a_model() -> None:
    with pytest.raises(EmulationError, match="rank 1: the script ended"):
        emulate(emulation("stages.py", real_ranks=(1,), wire=Network()))


def test_an_emulated_rank_that_dies_is_named() -> None:
    with pytest.raises(EmulationError, match=r"emulated ranks: .*group 0,1,2: emulated rank 2 has failed"):
        emulate(emulation("steps.py", "9", world_size=3, conditions={"fail_rank": 2, "fail_call": 3}))


@pytest.mark.parametrize("conditions", [{"apart": True}, {"swept": "all_reduce", "sweep_s": (0.0,)}])
def test_what_the_wire_cannot_do_is_refused(conditions: dict) -> None:
    with pytest.raises(PerfModelError, match="leave --sweep and --apart out"):
        emulation("steps.py", conditions=conditions)
