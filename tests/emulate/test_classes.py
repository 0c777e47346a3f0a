"""Ranks that are alike, by their programs and by what scripts hold and send."""

import sys
from pathlib import Path

import pytest

from perfmodel import catalog
from perfmodel.emulate import (
    Classes,
    Emulation,
    Network,
    classes_of_program,
    classes_of_script,
    run_classes,
)
from perfmodel.errors import PerfModelError
from perfmodel.ir.distribute import Degrees, distribute, on_one_stream
from perfmodel.ir.models import mlp, training_step

STAGES = Path(__file__).parent / "scripts" / "stages.py"


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        (Degrees(data=4), [(0, 1, 2, 3)]),
        (Degrees(tensor=2, data=2), [(0, 1, 2, 3)]),
        (Degrees(pipeline=2, data=2, micro_batches=2), [(0, 1), (2, 3)]),
        (Degrees(pipeline=4, micro_batches=2), [(0,), (1, 2), (3,)]),
    ],
)
def test_ranks_of_a_program_are_alike_within_a_stage(
    degrees: Degrees, expected: list[tuple[int, ...]]
) -> None:
    program = on_one_stream(distribute(training_step(mlp(8, (8, 8, 8, 8, 8))), degrees))
    found = classes_of_program(program)
    assert list(found.ranks) == expected


def test_representatives_take_turns() -> None:
    classes = Classes(((0, 1), (2, 5), (3, 4)))
    assert classes.representatives == (0, 2, 3)
    assert classes.turns(2) == [(0, 2), (3,)]
    with pytest.raises(PerfModelError, match="at least 1 rank"):
        classes.turns(0)


@pytest.mark.slow
def test_a_scripts_stages_are_found_and_run_one_rank_each() -> None:
    """Scouted three ranks at once; first, middle and last stage differ, their replicas do not."""
    pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
    emulation = Emulation(
        command=(sys.executable, str(STAGES)), world_size=6, wire=Network(), quiet=True
    )
    classes = classes_of_script(emulation, catalog.cluster("localhost"), at_once=3)
    assert classes.ranks == ((0, 1), (2, 3), (4, 5))
    (run,) = run_classes(emulation, classes, at_once=3)
    assert [rank.rank for rank in run.ranks] == [0, 2, 4]
    assert all(len(rank.iterations()) == 3 for rank in run.ranks)
    assert len(run.ranks[1].parameters) == 4
