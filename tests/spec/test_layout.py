"""Layouts: notation, defaults, refusals."""

import re

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
    layout = Layout(
        tp=tp, pp=pp, dp=dp, zero=zero, recompute=recompute, overlap_grad_reduce=overlap
    )
    assert Layout.parse(str(layout)) == layout
    assert layout.devices == tp * pp * dp


def test_distsim_notation():
    assert Layout.parse("8M16P1D") == Layout(tp=8, pp=16, dp=1)
    assert Layout.parse("2m4p1d,zero=1,micro_batch=4") == Layout(tp=2, pp=4, zero=1, micro_batch=4)


@given(
    st.builds(
        Layout,
        tp=degrees,
        pp=st.integers(2, 64),
        dp=degrees,
        vpp=st.integers(1, 4),
        sequence_parallel=st.booleans(),
        schedule=st.sampled_from(["1f1b", "gpipe", "interleaved", "breadth-first", "zb-h1"]),
        zero=st.integers(0, 3),
        recompute=st.sampled_from(["none", "selective", "full"]),
        offload=st.booleans(),
        tp_overlap=st.booleans(),
    )
)
def test_a_layout_keeps_what_it_is_given_and_says_what_runs_otherwise(layout):
    given = layout.values()
    assert Layout(**given) == layout == Layout.parse(str(layout))
    assert Layout.parse(str(layout)).values() == given
    runs_as_given = all(form == given[name] for name, form in layout.forms.items())
    assert runs_as_given == (not layout.remarks)
    canonical = layout.canonical
    assert canonical.canonical == canonical
    assert not canonical.remarks


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("TP=8,Pipeline_Parallel_Size=4,schedule=DAPPLE", "tp=8,pp=4"),
        ("tensor_parallel=8,zero_stage=1,micro-batch-size=2", "tp=8,zero=1,micro_batch=2"),
        ("pp=4,partition=6,6,7,5,recompute=Full", "pp=4,partition=6-6-7-5,recompute=full"),
        ("pp=2,schedule=TiMePReSt", "pp=2,schedule=nf1b"),
        ("pp=2,schedule=Chimera:4", "pp=2,schedule=chimera:4"),
        ("pp=2,schedule=file:Some/Path", "pp=2,schedule=file:Some/Path"),
    ],
)
def test_long_names_and_names_of_papers_are_understood_in_any_case(said, meant):
    assert Layout.parse(said) == Layout.parse(meant)


def test_a_schedule_s_alias_is_what_it_stands_for():
    assert Layout(pp=2, schedule="DAPPLE").effective_schedule == "1f1b"
    assert Layout(pp=2, schedule="DAPPLE").canonical == Layout(pp=2)
    assert Layout(pp=2, vpp=2, schedule="1F1B").effective_schedule == "interleaved"


def test_experts_ranks_are_written_and_read():
    layout = Layout.parse("tp=4,dp=2,ep=8,etp=1")
    assert (layout.etp, layout.expert_tp, layout.edp) == (1, 1, 1)
    assert layout.label == "tp=4,pp=1,dp=2,ep=8,etp=1"
    assert Layout.parse(str(layout)) == layout
    assert Layout(tp=4, etp=4).canonical == Layout(tp=4)


def test_virtual_stages_of_1f1b_run_interleaved():
    layout = Layout(pp=4, vpp=2)
    assert (layout.schedule, layout.effective_schedule) == ("1f1b", "interleaved")
    assert layout.remarks == ("schedule=1f1b with vpp=2 runs as schedule=interleaved",)


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("tp", [1, 8])
def test_the_contract_s_notation_works_for_all_values_that_mean_something(vpp, tp):
    text = (
        f"tp={tp},pp=16,dp=8,cp=1,ep=1,vpp={vpp},micro_batch=1,schedule=1f1b,zero=1,recompute=selective,"
        "sequence_parallel=true"
    )
    layout = Layout.parse(text)
    assert (layout.vpp, layout.schedule, layout.sequence_parallel) == (vpp, "1f1b", True)
    assert len(layout.remarks) == (vpp > 1) + (tp == 1)


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
        (" ", LayoutError, "text is empty"),
        ("fsdp=8", LayoutError, "dp=8,zero=3"),
        ("tp=8,Tensor-Parallel=4", LayoutError, "tp is given twice"),
        ("pp=2,partition=6,x", LayoutError, "'x' is neither key=value"),
    ],
)
def test_refusals_name_the_value(text, error, message):
    with pytest.raises(error, match=message):
        Layout.parse(text)


def test_batch_that_does_not_divide_names_the_nearest():
    job = Job(global_batch=100, seq_len=8)
    with pytest.raises(LayoutError, match="nearest multiple is 96"):
        job.num_microbatches(Layout(dp=8, micro_batch=2))
    assert job.num_microbatches(Layout(dp=5, micro_batch=4)) == 5
    with pytest.raises(PerfModelError):
        Job(global_batch=0, seq_len=8)


IDLE = {
    "dp=8,schedule=zb-v": "schedule=zb-v has no effect with pp=1",
    "dp=8,schedule=gpipe": "schedule=gpipe has no effect with pp=1",
    "dp=8,partition=12": "partition=12 has no effect with pp=1",
    "dp=8,replicate=2": "replicate=2 has no effect with zero=0",
    "dp=8,zero=1,prefetch=2": "prefetch=2 has no effect without zero=3",
    "dp=8,zero=3,prefetch=2,overlap_param_gather=false": "prefetch=2 has no effect without zero=3",
    "dp=8,sequence_parallel=true": "sequence_parallel=true has no effect with tp=1",
    "dp=8,tp_overlap=true": "tp_overlap=true has no effect with tp=1",
    "dp=8,cp_kind=ulysses": "cp_kind=ulysses has no effect with cp=1",
    "dp=8,cp_balanced=false": "cp_balanced=false has no effect with cp=1",
    "dp=8,ep_overlap=true": "ep_overlap=true has no effect with ep=1",
}


@pytest.mark.parametrize("text", IDLE)
def test_settings_without_effect_are_told(text: str) -> None:
    (remark,) = Layout.parse(text).remarks
    assert remark.startswith(IDLE[text])


@pytest.mark.parametrize(
    "text",
    [
        "dp=8",
        "tp=2,dp=4,sequence_parallel=true,tp_overlap=true",
        "pp=4,schedule=zb-v",
        "pp=4,partition=3-3-3-3",
        "dp=8,zero=1,replicate=2",
        "dp=8,zero=3,prefetch=2",
        "cp=2,dp=4,cp_kind=ulysses",
        "cp=2,dp=4,cp_balanced=false",
        "dp=8,ep=2,ep_overlap=true",
    ],
)
def test_settings_with_effect_are_not(text: str) -> None:
    assert Layout.parse(text).remarks == ()


def test_whatever_runs_as_if_it_were_not_said_is_told() -> None:
    """Every field whose form that runs is another one (`Layout.forms`) has a remark."""
    for text in IDLE:
        layout = Layout.parse(text)
        changed = {name for name, form in layout.forms.items() if form != layout.value(name)}
        assert all(
            any(remark.startswith(f"{name}=") for remark in layout.remarks) for name in changed
        )


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6))
def test_many_equal_stages_are_written_by_their_number(runs: list[tuple[int, int]]) -> None:
    stages: tuple[int, ...] = ()
    for value, count in runs:
        stages += (value,) * count
    layout = Layout(pp=len(stages), partition=stages if len(stages) > 1 else None)
    assert Layout.parse(layout.label) == layout
    # No number of layers is written five times in a row.
    assert not re.search(r"(?<!\d)([1-9]\d*)(-\1){4,}(?!\d)", layout.label)


@pytest.mark.parametrize("text", ["3x", "x3", "3x0", "3x99999999", "3x2x2"])
def test_a_number_of_stages_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="partition must be a whole number per stage"):
        Layout.parse(f"pp=2,partition={text}")
