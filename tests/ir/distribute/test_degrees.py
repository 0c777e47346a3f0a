"""Layouts of the predictor as degrees of programs."""

import pytest
from distribute_cases import BATCH, program

from perfmodel.errors import LayoutError
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.spec import Layout


def test_a_layout_s_devices_and_micro_batches() -> None:
    layout = Layout.parse(
        "tp=2,pp=2,dp=4,micro_batch=2,zero=2,recompute=full,sequence_parallel=true,schedule=gpipe"
    )
    degrees = Degrees.of(layout, BATCH)
    assert degrees.n_devices == layout.devices
    assert degrees.micro_batches == BATCH // (4 * 2)
    assert degrees == Degrees(
        data=4,
        tensor=2,
        pipeline=2,
        micro_batches=2,
        zero=2,
        checkpoint=True,
        sequence_parallel=True,
        schedule="gpipe",
    )
    assert distribute(program("transformer"), degrees).n_devices == 16


def test_experts_are_shared_out_among_data_ranks() -> None:
    degrees = Degrees.of(Layout(dp=4, ep=2), BATCH)
    assert (degrees.data, degrees.expert) == (2, 2)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(cp=2), "neither context"),
        (Layout(dp=3), "16 is not divisible"),
        (Layout(tp=2, etp=1), "leave etp out"),
    ],
)
def test_what_no_transform_does_is_named(layout: Layout, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        Degrees.of(layout, BATCH)


@pytest.mark.parametrize(
    "name", ["data", "tensor", "pipeline", "expert", "micro_batches", "chunks"]
)
@pytest.mark.parametrize("value", [0, 1.5, True])
def test_degrees_are_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(
        LayoutError, match=f"{name} must be a whole number of at least 1, got {value}"
    ):
        Degrees(**{name: value})  # pyright: ignore[reportArgumentType]
