"""Unmodified scripts as ranks of emulated worlds; skipped where torch is not installed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from perfmodel import catalog
from perfmodel.emulation import Emulation, EmulationError, Prices, emulate, measured_trace, replay, typical
from perfmodel.readers import read_trace, write_measured_trace

pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
SCRIPTS = Path(__file__).parent / "scripts"
PRICES = Prices(catalog.cluster("dgx-a100"), lambda op: 1e-4)


def emulation(script: str, *arguments: str, world_size: int = 6, real: tuple[int, ...] = (0,), **more) -> Emulation:
    command = ("env", f"REAL={','.join(map(str, real))}", sys.executable, str(SCRIPTS / script), *arguments)
    return Emulation(
        command=command, world_size=world_size, real_ranks=real, prices=PRICES, ranks_per_node=8,
        **{"timeout_s": 300.0, **more},
    )  # fmt: skip


@pytest.mark.parametrize("real", [(3,), (0, 2)])
def test_collectives_leave_what_they_should(real: tuple[int, ...]) -> None:
    run = emulate(emulation("collectives.py", real=real))
    assert [rank.rank for rank in run.ranks] == list(real)
    calls = run.collectives()
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter",
            "send", "recv", "barrier"} == set(calls.kind)  # fmt: skip
    assert (calls.end_s >= calls.start_s + 1e-9).all()


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
    assert found.felt("all_gather") > 0
    assert found.time_s("all_gather", 0.01) == pytest.approx(found.time_s() + 0.01 * found.felt("all_gather"), rel=0.2)
    trace = measured_trace(run)
    write_measured_trace(trace, tmp_path / "trace.json", "emulation")
    again = read_trace("perfmodel", [tmp_path / "trace.json"])
    assert (again.n, again.names) == (trace.n, trace.names)


def test_pipeline_whose_stages_are_all_real() -> None:
    run = emulate(emulation("pipeline.py", world_size=2, real=(0, 1)))
    assert {"send", "recv"} <= set(run.collectives().kind)
    assert len(run.iterations()) == 4


def test_real_ranks_apart_wait_for_one_another_and_for_the_model_alone() -> None:
    prices = Prices(catalog.cluster("dgx-a100"), lambda op: 0.05)
    orders = emulation("apart.py", world_size=2, real=(0, 1), conditions={"apart": True})
    calls = emulate(replace(orders, prices=prices)).collectives()
    reduction = calls[calls.kind == "all_reduce"].set_index("rank")
    late_s = reduction.issued_s[1] - reduction.issued_s[0]
    assert late_s > 0.1
    assert (reduction.start_s >= reduction.issued_s[1]).all()
    taken_s = reduction.end_s - reduction.issued_s[1]
    assert taken_s.between(0.03, 0.5).all()  # what emulating takes by itself is taken off
    assert ((calls.end_s - calls.start_s) > 0.03).all()


def test_real_ranks_apart_have_no_objects_for_each_other() -> None:
    with pytest.raises(EmulationError, match=r"rank 0: broadcast_object_list from rank 1, .*leave --apart out"):
        emulate(emulation("wrong.py", "objects", world_size=2, real=(0, 1), quiet=True, conditions={"apart": True}))


@pytest.mark.parametrize(
    ("case", "real", "message"),
    [
        ("size", (0, 1), r"call #0 of group 0: rank \d calls all_reduce of \d+ bytes of float32 \(sum\), but rank \d"),
        ("left", (0, 1), "deadlock: rank 0 waits in all_reduce.*rank 1 has ended"),
        ("sparse", (0,), "rank 0: call #0 of group 0: not emulated: all_reduce of a sparse tensor"),
        ("objects", (0,), "rank 0: broadcast_object_list from rank 1, which is emulated"),
        ("raises", (0,), "rank 0: the script ended with status 1, after rank 0: barrier #0 of group 0"),
        ("no group", (0,), "without joining a process group"),
    ],
)
def test_what_cannot_go_on_says_who_and_where(case: str, real: tuple[int, ...], message: str) -> None:
    with pytest.raises(EmulationError, match=message):
        emulate(emulation("wrong.py", case, world_size=4, real=real, quiet=True))


def test_silence_after_joining_has_an_end() -> None:
    with pytest.raises(EmulationError, match=r"rank 0: silent for \d+ s after joining its world"):
        emulate(emulation("wrong.py", "silent", world_size=4, timeout_s=3.0, quiet=True))


def test_rank_that_dies() -> None:
    with pytest.raises(EmulationError, match="all_reduce #2 of group 0: emulated rank 3 has failed"):
        emulate(emulation("wrong.py", "calls", quiet=True, conditions={"fail_rank": 3, "fail_call": 3}))
