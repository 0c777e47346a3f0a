"""Searches lay out context and expert parallelism as the framework runs it."""

from collections import Counter
from dataclasses import replace

from perfmodel import catalog
from perfmodel.planning.layouts import SearchSpace, enumerate_grids
from perfmodel.spec import Framework


def test_grids_have_the_kinds_of_the_framework():
    problem = catalog.problem("mixtral-8x7b", "dgx-h100", global_batch=16, seq_len=32768, devices=16)
    own = Framework(name="own", cp_kind="all_gather", cp_balanced=False, ep_overlap=True)
    space = SearchSpace(
        tp=(1,), pp=(1,), cp=(1, 2), ep=(1, 8), vpp=(1,), micro_batch=(1,), schedule=("1f1b",), zero=(1,),
        recompute=("none",),
    )  # fmt: skip
    grids = list(enumerate_grids(space, replace(problem, framework=own), Counter()))
    assert {(g.degrees.cp, g.degrees.ep) for g in grids} == {(1, 1), (1, 8), (2, 1), (2, 8)}
    for grid in grids:
        for layout in grid.layouts():
            kind = ("all_gather", False) if layout.cp > 1 else ("ring", True)
            assert (layout.cp_kind, layout.cp_balanced) == kind
            assert layout.ep_overlap == (layout.ep > 1)
