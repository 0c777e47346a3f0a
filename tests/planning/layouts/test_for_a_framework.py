"""A search for a framework tries exactly what the framework can run, and says what it would gain
beyond."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.errors import LayoutError, Reason
from perfmodel.planning.layouts import (
    SearchSpace,
    default_space,
    enumerate_grids,
    enumerate_layouts,
    restrict,
    search,
    with_options,
)
from perfmodel.spec import Framework

NO_PIPELINED_ZERO = Framework(
    name="ours",
    schedules=("1f1b",),
    zero_stages=(0, 1, 2, 3),
    zero_stages_in_pipelines=(0,),
    virtual_stages=False,
)


@pytest.mark.parametrize("name", [*catalog.frameworks(), "oneflow@2021"])
def test_a_framework_s_space_is_the_whole_one_without_what_it_cannot_run(case, name):
    rejected = Counter()
    of = case.replace(framework=catalog.framework(name))
    framework = of.framework
    space = restrict(with_options(default_space(of), "offload", of.cluster), "micro_batch=1")
    own = list(enumerate_layouts(space, of, rejected))
    every = list(enumerate_layouts(replace(space, any_framework=True), of, Counter()))
    expected = {layout for layout in every if not framework.cannot_run(layout)}
    # what it cannot hide is tried as it runs it
    expected = {
        lay if framework.communication.hides(lay.zero, lay.tp) else _exposed(lay)
        for lay in expected
    }
    assert set(own) == expected
    assert len(own) == len(set(own))
    counted = {str(why) for why in rejected if why.reason is Reason.FRAMEWORK}
    assert bool(counted) == (len(own) < len(every))
    assert all(why.startswith(f"{framework.label} cannot run ") for why in counted)


def _exposed(layout):
    return layout.replace(overlap_grad_reduce=False, overlap_param_gather=False)


def test_what_would_be_gained_beyond_a_framework_is_the_best_of_all(case):
    of = case.replace(framework=NO_PIPELINED_ZERO)
    space = restrict(default_space(of), "pp=4,micro_batch=1")
    own = search(of, space=space, top=1)
    every = search(of, space=replace(space, any_framework=True), top=1)
    best, beyond = own.layouts[0], own.beyond
    assert not NO_PIPELINED_ZERO.cannot_run(best.layout)
    assert own.framework == "ours"
    assert every.beyond is None
    assert beyond.layout == every.layouts[0].layout
    assert beyond.step_time_s == pytest.approx(every.layouts[0].step_time_s, rel=1e-4)
    assert beyond.gain == pytest.approx(1 - beyond.step_time_s / best.step_time_s, rel=1e-3)
    assert beyond.cannot_run == NO_PIPELINED_ZERO.cannot_run(beyond.layout) != ()
    assert own.to_dict()["beyond_framework"]["layout"] == NO_PIPELINED_ZERO.notation(
        beyond.layout, case.model
    )


def test_nothing_is_offered_beyond_a_framework_that_can_run_the_best(case):
    plain = search(case, space=restrict(default_space(case), "pp=1,tp=2"), top=1)
    assert plain.beyond is None
    assert plain.to_dict()["framework"] == "generic"
    of = case.replace(framework=NO_PIPELINED_ZERO)
    assert search(of, space=restrict(default_space(of), "pp=1"), top=1).beyond is None


def test_a_space_in_which_a_framework_runs_nothing_names_it(case):
    of = case.replace(framework=NO_PIPELINED_ZERO)
    with pytest.raises(
        LayoutError, match=r"ours cannot run zero=1 in a pipeline.*another framework than ours"
    ):
        search(of, space=restrict(default_space(of), "pp=2,tp=2,zero=1"))


def test_context_and_expert_parallelism_are_laid_out_as_the_framework_runs_them():
    problem = catalog.problem(
        "mixtral-8x7b", "dgx-h100", global_batch=16, seq_len=32768, devices=16
    )
    own = Framework(name="own", cp_kind="all_gather", cp_balanced=False, ep_overlap=True)
    space = SearchSpace(
        tp=(1,),
        pp=(1,),
        cp=(1, 2),
        ep=(1, 8),
        vpp=(1,),
        micro_batch=(1,),
        schedule=("1f1b",),
        zero=(1,),
        recompute=("none",),
    )
    grids = list(enumerate_grids(space, replace(problem, framework=own), Counter()))
    assert {(g.degrees.cp, g.degrees.ep) for g in grids} == {(1, 1), (1, 8), (2, 1), (2, 8)}
    for grid in grids:
        for layout in grid.layouts():
            kind = ("all_gather", False) if layout.cp > 1 else ("ring", True)
            assert (layout.cp_kind, layout.cp_balanced) == kind
            assert layout.overlap.ep_overlap == (layout.ep > 1)


def test_command(capsys):
    command = [
        "search",
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--devices",
        "8",
        "--global-batch",
        "16",
        "--framework",
        "nanotron",
        "--fix",
        "pp=2",
        "--top",
        "1",
    ]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    label = catalog.framework("nanotron").label
    assert told["framework"] == label
    assert any(why.startswith(f"{label} cannot run") for why in told["rejected"])
    assert {"layout", "objective_value", "step_time_s", "gain", "cannot_run"} == set(
        told["beyond_framework"]
    )
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"layouts that {label} can run" in out
    assert f"if {label} could run every layout: " in out
