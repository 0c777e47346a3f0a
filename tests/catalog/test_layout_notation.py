"""Layouts written down and read back: by `str`, and in the notation of every framework of the
catalog."""

from typing import Any, get_args

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.spec import ContextParallel, Framework, Layout, Recompute, StateOffload

MODELS = ("llama3-8b", "gpt3-175b", "mixtral-8x7b", "resnet50")
FRAMEWORKS = [
    version for name in catalog.frameworks() for version in catalog.framework_versions(name)
]
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "gpipe", "chimera:4")
ORDERS = (Layout.order, "tp-cp-pp-ep-dp", "tp-pp-cp-ep-dp")

degrees = st.sampled_from((1, 2, 4, 8))
per_stage = st.integers(0, 9)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout that can be made, of up to 8 stages."""
    pp = draw(degrees)
    fields: dict[str, Any] = {
        "tp": draw(degrees),
        "pp": pp,
        "dp": draw(degrees),
        "cp": draw(degrees),
        "cp_kind": draw(st.sampled_from(get_args(ContextParallel))),
        "cp_balanced": draw(st.booleans()),
        "ep": draw(degrees),
        "etp": draw(st.sampled_from((None, 1, 2))),
        "vpp": draw(st.sampled_from((1, 2))) if pp > 1 else 1,
        "micro_batch": draw(st.sampled_from((1, 2, 16))),
        "schedule": draw(st.sampled_from(SCHEDULES)),
        "zero": draw(st.sampled_from((0, 1, 2, 3))),
        "recompute": draw(st.sampled_from(get_args(Recompute))),
        "sequence_parallel": draw(st.booleans()),
        "overlap_grad_reduce": draw(st.booleans()),
        "overlap_param_gather": draw(st.booleans()),
        "tp_overlap": draw(st.booleans()),
        "ep_overlap": draw(st.booleans()),
        "offload": draw(st.booleans()),
        "replicate": draw(st.sampled_from((1, 2))),
        "prefetch": draw(st.sampled_from((1, 3))),
        "offload_states": draw(st.sampled_from(get_args(StateOffload))),
        "order": draw(st.sampled_from(ORDERS)),
        "partition": draw(st.none() | st.tuples(*[per_stage] * pp)),
        "recompute_full_layers": draw(
            st.none() | st.tuples(per_stage) | st.tuples(*[per_stage] * pp)
        ),
        "kinds": draw(st.none() | st.tuples(*[st.sampled_from(("fast", "slow.2"))] * pp)),
    }
    if draw(st.booleans()):
        fields |= {"pp": 1, "vpp": 1, "schedule": "1f1b", "recompute": "none", "offload": False}
        fields |= {
            "recompute_full_layers": None,
            "partition": None,
            "kinds": None,
            "offload_layers": 3,
        }
    try:
        return Layout(**fields)
    except LayoutError:
        assume(False)
        raise


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts(),
    framework=st.sampled_from(FRAMEWORKS),
    model=st.none() | st.sampled_from(MODELS),
)
def test_every_framework_reads_a_layouts_text_as_that_layout(
    layout: Layout, framework: Framework, model: str | None
):
    read_as = catalog.model(model) if model else None
    assert framework.layout(str(layout), read_as)[0] == layout


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts(),
    framework=st.sampled_from(FRAMEWORKS),
    model=st.none() | st.sampled_from(MODELS),
)
def test_every_framework_reads_its_own_notation_as_the_layout_written(
    layout: Layout, framework: Framework, model: str | None
):
    written_for = catalog.model(model) if model else None
    text = framework.notation(layout, written_for)
    assert framework.layout(text, written_for)[0] == layout
    assert len(text) <= len(str(layout))


@settings(max_examples=60, deadline=None)
@given(layout=layouts())
def test_the_notation_without_a_framework_is_read_without_one(layout: Layout):
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(layout.label) == layout


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.label)
@pytest.mark.parametrize("model", MODELS)
def test_what_a_framework_fills_in_can_be_said_otherwise(framework: Framework, model: str):
    """The layout that a short text means, and the same with every setting of a framework as
    `generic` has it."""
    read_as = catalog.model(model)
    for text in ("dp=8", "tp=2,pp=4,dp=1", "tp=2,cp=2,dp=2,ep=2", "pp=2,dp=2,recompute=selective"):
        for layout in (framework.layout(text, read_as)[0], Layout.parse(text)):
            assert framework.layout(framework.notation(layout, read_as), read_as)[0] == layout


def test_long_partitions_are_written_whole():
    layout = Layout(pp=128, partition=tuple(range(1, 129)), kinds=("fast", "slow") * 64)
    for framework in FRAMEWORKS:
        assert framework.layout(framework.notation(layout))[0] == layout


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("pp=4,partition=none", "pp=4"),
        ("pp=4,kinds=none", "pp=4"),
        ("tp=4,etp=none", "tp=4"),
        ("dp=4,recompute=selective,recompute_full_layers=none", "dp=4,recompute=selective"),
    ],
)
def test_what_is_left_open_can_be_said(text: str, plain: str):
    assert Layout.parse(text) == Layout.parse(plain)


def test_even_stages_can_be_said_where_a_framework_cuts_by_cost():
    nanotron, model = catalog.framework("nanotron"), catalog.model("llama3-8b")
    assert nanotron.layout("pp=4,dp=2", model)[0].partition is not None
    assert nanotron.layout("pp=4,dp=2,partition=none", model)[0].partition is None
    assert "partition=none" in nanotron.notation(Layout(pp=4, dp=2), model)
