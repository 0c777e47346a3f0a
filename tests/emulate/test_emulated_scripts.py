"""Unmodified scripts as ranks of emulated worlds; skipped where torch is not installed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel import catalog
from perfmodel.emulate import (
    Emulation,
    EmulationError,
    Prices,
    emulate,
    emulated_curve,
    measured_trace,
    replay,
    typical,
)
from perfmodel.emulate.environment import DELAYED, delayed_as
from perfmodel.ingest import read_trace
from perfmodel.ingest.profiles.chrome import write_measured_trace

pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
SCRIPTS = Path(__file__).parent / "scripts"
PRICE_S = 1e-4
PRICES = Prices(catalog.cluster("dgx-a100"), lambda op: PRICE_S)
LONG_S = 0.3
"""More than emulating a call is ever found to take, on a machine that is busy with other tests."""
LATE_S = 0.02


def emulation(
    script: str, *arguments: str, world_size: int = 6, real: tuple[int, ...] = (0,), **more
) -> Emulation:
    command = (
        "env",
        f"REAL={','.join(map(str, real))}",
        sys.executable,
        str(SCRIPTS / script),
        *arguments,
    )
    return Emulation(
        command=command,
        world_size=world_size,
        real_ranks=real,
        prices=PRICES,
        ranks_per_node=8,
        **{"timeout_s": 300.0, **more},
    )


@pytest.mark.slow
@pytest.mark.parametrize("real", [(3,), (0, 2)])
def test_collectives_leave_what_they_should_and_take_as_long_as_they_should(
    real: tuple[int, ...],
) -> None:
    """Every kind delayed by another time, so that no delay can stand for another's or be taken for
    overhead."""
    # The script sleeps through all delays one after another. Short ones do where nothing else keeps
    # the machine busy.
    for long_s in (LONG_S / 3, LONG_S):
        delays_s = {kind: long_s + 0.02 * n for n, kind in enumerate(DELAYED)}
        run = emulate(emulation("collectives.py", real=real, conditions={"delays_s": delays_s}))
        overhead_s = max(rank.overhead_s for rank in run.ranks)
        if overhead_s < long_s:
            break
    assert overhead_s < long_s
    assert [rank.rank for rank in run.ranks] == list(real)
    calls = run.collectives()
    assert {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
        "send",
        "recv",
        "barrier",
    } == set(calls.kind)
    stated_s = PRICE_S + calls.kind.map(lambda kind: delays_s[delayed_as(kind)])
    assert calls.delay_s.to_numpy() == pytest.approx(stated_s.to_numpy())
    assert (calls.end_s - calls.issued_s - stated_s).min() > -overhead_s - LATE_S


def test_every_method_of_a_process_group_is_emulated_or_refused() -> None:
    """By whatever name torch calls it, now or before 2.13."""
    import torch.distributed as dist

    from perfmodel.emulate.rank import EmulatedGroup

    harmless = (
        "BackendType",
        "CUSTOM",
        "GLOO",
        "MPI",
        "NCCL",
        "UCC",
        "UNDEFINED",
        "XCCL",
        "bound_device_id",
        "boxed",
        "get_group_store",
        "group_desc",
        "name",
        "rank",
        "set_timeout",
        "size",
        "unbox",
        "use_pg_for_symm_mem_rendezvous",
    )
    offered = {name for name in vars(dist.ProcessGroup) if not name.startswith("_")} - {*harmless}
    assert offered <= {*vars(EmulatedGroup)}
    for before, now in (
        ("_allgather_base", "all_gather_single"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("alltoall_base", "all_to_all_single"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    ):
        assert getattr(EmulatedGroup, before) is getattr(EmulatedGroup, now)


@pytest.mark.slow
@pytest.mark.parametrize(("first_s", "last_s"), [(LONG_S, 2 * LONG_S), (LONG_S, 0.0)])
def test_a_sweep_takes_the_delays_that_it_names(first_s: float, last_s: float) -> None:
    """Two reductions, one after the other: an iteration takes at least twice the delay, wherever
    the sweep begins."""
    delays_s, every = (first_s, last_s), 4
    conditions = {"swept": "all_reduce", "sweep_s": delays_s, "sweep_every": every}
    run = emulate(emulation("steps.py", str(4 * every + 1), conditions=conditions))
    curve = emulated_curve(run, "all_reduce", delays_s, every)
    (overhead_s,) = (rank.overhead_s for rank in run.ranks)
    assert overhead_s < LONG_S / 2
    for delay_s, emulated_s, predicted_s in zip(
        delays_s, curve.emulated_s, curve.predicted_s, strict=True
    ):
        assert min(emulated_s, predicted_s) > 2 * (delay_s - overhead_s - LATE_S)
    grown_s = 2 * (last_s - first_s)
    assert curve.emulated_s[1] - curve.emulated_s[0] == pytest.approx(grown_s, rel=0.3)
    # a reduction cannot take less than nothing, to which what emulating takes, taken off, may bring
    # it
    assert curve.predicted_s[1] - curve.predicted_s[0] == pytest.approx(
        grown_s, abs=2 * overhead_s + LATE_S
    )
    assert curve.felt == 2


@pytest.mark.slow
def test_delays_and_stragglers_are_no_overhead() -> None:
    """What is taken off every call is what emulating it takes on a cluster that is as it is."""
    run = emulate(emulation("steps.py", "2", conditions={"straggler": 1000.0, "jitter": 1.5}))
    calls = run.collectives()
    assert calls.delay_s.to_numpy() == pytest.approx(PRICE_S)
    assert (calls.start_s > calls.issued_s + 0.1).any()  # the first of a step, after some computing


def test_calls_on_a_gpu_begin_behind_their_streams_kernels() -> None:
    calls = emulate(emulation("device.py")).collectives()
    assert (calls.start_s - calls.issued_s).min() >= 0.5


def test_tensors_say_which_device_they_are_on() -> None:
    from perfmodel.emulate.rank import device_module

    assert device_module("float32") is device_module("sparse float32") is None
    assert device_module("cuda float32").__name__ == "torch.cuda"


@pytest.mark.parametrize("call", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_the_call_at_which_a_rank_dies_is_counted_among_the_scripts_own(
    call: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two to a step."""
    conditions = {"fail_rank": 3, "fail_call": call}
    with pytest.raises(
        EmulationError, match=f"all_reduce #{call - 1} of group 0: emulated rank 3 failed"
    ):
        emulate(emulation("steps.py", "9", conditions=conditions))
    assert capfd.readouterr().err.count("step done") == call // 2


def test_sharded_training_in_a_large_world(tmp_path: Path) -> None:
    run = emulate(emulation("sharded.py", world_size=1024), tmp_path)
    (rank,) = run.ranks
    assert set(rank.collectives.ranks) >= {4, 256}
    table = run.iterations()
    assert len(table) == 3  # of the first optimizer's four steps
    assert (table.time_s > 0).all()
    assert table.overlap.between(0, 1).all()
    assert run.to_dict()["training_memory_bytes"] > 0
    found = replay(typical(rank, table.iteration.to_numpy()))
    assert found.calls_felt("all_gather") > 0
    # a delay may bring more of them onto the critical path, and moves when they take of the
    # thread's core
    felt, gathers, core_s = (
        found.calls_felt("all_gather"),
        found.is_of_kind("all_gather").sum(),
        found.core_s.sum(),
    )
    grown_s = found.time_s("all_gather", 0.01) - found.time_s()
    assert 0.01 * felt - core_s <= grown_s <= 0.01 * gathers + core_s
    trace = measured_trace(run)
    write_measured_trace(trace, tmp_path / "trace.json", "emulation")
    again = read_trace("perfmodel", [tmp_path / "trace.json"])
    assert (again.n, again.names) == (trace.n, trace.names)


@pytest.mark.slow
def test_pipeline_whose_stages_are_all_real() -> None:
    run = emulate(emulation("pipeline.py", world_size=2, real=(0, 1)))
    assert {"send", "recv"} <= set(run.collectives().kind)
    assert len(run.iterations()) == 4


@pytest.mark.slow
def test_real_ranks_apart_wait_for_one_another_and_for_the_model_alone() -> None:
    prices = Prices(catalog.cluster("dgx-a100"), lambda op: LONG_S)
    orders = emulation("apart.py", world_size=2, real=(0, 1), conditions={"apart": True})
    run = emulate(replace(orders, prices=prices))
    calls, least_s = run.collectives(), LONG_S - max(rank.overhead_s for rank in run.ranks) - LATE_S
    reduction = calls[calls.kind == "all_reduce"].set_index("rank")
    last_s = reduction.issued_s.max()  # of the one that sleeps, unless the other begins later still
    assert (reduction.start_s >= last_s).all()
    taken_s = reduction.end_s - last_s
    assert taken_s.between(
        least_s, 10 * LONG_S
    ).all()  # what emulating takes by itself is taken off
    assert ((calls.end_s - calls.start_s) > least_s).all()


@pytest.mark.slow
def test_real_ranks_apart_have_no_objects_for_each_other() -> None:
    with pytest.raises(
        EmulationError, match=r"rank 0: broadcast_object_list from rank 1, .*by --apart"
    ):
        emulate(
            emulation(
                "wrong.py",
                "objects",
                world_size=2,
                real=(0, 1),
                quiet=True,
                conditions={"apart": True},
            )
        )


@pytest.mark.parametrize(
    ("case", "real", "message"),
    [
        (
            "size",
            (0, 1),
            r"call #0 of group 0: rank \d calls all_reduce of \d+ bytes of float32 \(sum\), but rank \d",
        ),
        pytest.param(
            "left",
            (0, 1),
            "deadlock: rank 0 waits in all_reduce.*rank 1 has ended",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sparse",
            (0,),
            "rank 0: call #0 of group 0: not emulated: all_reduce of a sparse tensor",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "objects",
            (0,),
            "rank 0: broadcast_object_list from rank 1, which is emulated",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "raises",
            (0,),
            "rank 0: the script ended with status 1, after rank 0: barrier #0 of group 0.*ValueError: no data",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "aborts", (0,), "rank 0: the script ended with status -6, after", marks=pytest.mark.slow
        ),
        ("no group", (0,), "without initialising torch.distributed"),
    ],
)
def test_what_cannot_go_on_says_who_and_where(
    case: str, real: tuple[int, ...], message: str
) -> None:
    with pytest.raises(EmulationError, match=message):
        emulate(emulation("wrong.py", case, world_size=4, real=real, quiet=True))


@pytest.mark.slow
def test_what_a_library_does_after_the_script_has_ended_is_no_failure_of_it() -> None:
    run = emulate(emulation("wrong.py", "aborts after its end", world_size=4, quiet=True))
    assert run.ranks


@pytest.mark.slow
def test_silence_after_joining_has_an_end() -> None:
    with pytest.raises(EmulationError, match=r"rank 0: no call for \d+ s after joining its world"):
        emulate(emulation("wrong.py", "silent", world_size=4, timeout_s=3.0, quiet=True))
