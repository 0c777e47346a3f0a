"""Validation and cache keys of `ProgramSpec`."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_build import specs

from perfmodel.errors import LayoutError, UnknownNameError
from perfmodel.program import ProgramSpec

BASE = {"stages": 2, "micro_batches": 4}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": 0}, "stages must be a whole number of at least 1, got 0"),
        ({"micro_batches": 1.5}, "micro_batches must be a whole number"),
        ({"segments": True}, "segments must be a whole number"),
        ({"prefetch": 0}, "use param_gather='layer_serial'"),
        ({"sends": "rdma"}, "sends must be one of lag, op, blocking; got 'rdma'"),
        ({"grad_reduce": "late"}, "grad_reduce must be one of none, end, overlap"),
        ({"param_gather": "zero3"}, "param_gather must be one of"),
        ({"reduce_every_micro_batch": True}, "set grad_reduce to 'overlap' or 'end'"),
        ({"forward_only": True, "grad_reduce": "end"}, "set grad_reduce='none'"),
        ({"schedule": "forward", "param_gather": "step"}, "use param_gather='none' or 'layer'"),
    ],
)
def test_bad_values_name_the_remedy(changes: dict, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        ProgramSpec(**BASE | changes)


def test_unknown_schedule_suggests() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean .*'gpipe'"):
        ProgramSpec(**BASE, schedule="gpip")


def test_1f1b_with_chunks_is_refused_when_built() -> None:
    with pytest.raises(LayoutError, match="schedule=interleaved"):
        ProgramSpec(**BASE, chunks=2).build_schedule()


@given(specs(), specs(), st.booleans())
def test_keys_are_equal_exactly_for_equal_specs(
    one: ProgramSpec, other: ProgramSpec, same: bool
) -> None:
    other = replace(one) if same else other
    assert (one.key() == other.key()) == (one == other)
    assert (hash(one) == hash(other)) >= (one == other)


def test_key_is_stable() -> None:
    """Caches on disk rely on it."""
    assert ProgramSpec(**BASE).key() == (
        "schedule=1f1b;stages=2;micro_batches=4;chunks=1;steps=1;offload=False;"
        "forward_only=False;sends=lag;"
        "grad_reduce=none;reduce_every_micro_batch=False;param_gather=none;prefetch=1;segments=1;"
        "combines_passes=False;tied_embedding=False;optimizer=True;grad_norm_barrier=True;digest="
    )
