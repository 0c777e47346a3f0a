"""Layouts: notation, defaults, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.spec import Job, Layout

degrees = st.integers(1, 64)


@given(
    degrees,
    degrees,
    degrees,
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from(["none", "selective", "full"]),
    st.booleans(),
)
def test_text_round_trips(tp, pp, dp, zero, recompute, overlap):
    layout = Layout(tp=tp, pp=pp, dp=dp, zero=zero, recompute=recompute, overlap_grad_reduce=overlap)
    assert Layout.parse(str(layout)) == layout
    assert layout.devices == tp * pp * dp


def test_distsim_notation():
    assert Layout.parse("8M16P1D") == Layout(tp=8, pp=16, dp=1)
    assert Layout.parse("2m4p1d,zero=1,micro_batch=4") == Layout(tp=2, pp=4, zero=1, micro_batch=4)


def test_virtual_stages_imply_the_interleaved_schedule():
    assert Layout(pp=4, vpp=2).schedule == "interleaved"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("tp=eight", LayoutError, "whole number"),
        ("tp=0", LayoutError, "at least 1"),
        ("tp", LayoutError, "key=value"),
        ("tpp=8", UnknownNameError, "did you mean"),
        ("zero=4", LayoutError, "zero"),
        ("recompute=some", LayoutError, "recompute"),
        ("sequence_parallel=maybe", LayoutError, "true or false"),
        ("dp=6,ep=4", LayoutError, "ep=4 must divide"),
        ("vpp=2", LayoutError, "pp > 1"),
        ("tp=8,tp=4", LayoutError, "tp is given twice"),
        ("8M1P1D,pp=2", LayoutError, "pp is given twice"),
        (" ", LayoutError, "it is empty"),
    ],
)
def test_refusals_name_the_value(text, error, message):
    with pytest.raises(error, match=message):
        Layout.parse(text)


def test_batch_that_does_not_divide_names_the_nearest():
    job = Job(global_batch=100, seq_len=8)
    with pytest.raises(LayoutError, match="nearest that is: 96"):
        job.num_microbatches(Layout(dp=8, micro_batch=2))
    assert job.num_microbatches(Layout(dp=5, micro_batch=4)) == 5
    with pytest.raises(PerfModelError):
        Job(global_batch=0, seq_len=8)
