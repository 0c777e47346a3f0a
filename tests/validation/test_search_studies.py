"""Searches of papers: published figures typed in."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pytest
import search
from studies import search_distir as distir
from studies.search_rank import USUAL, rank
from studies.tables import markdown_table

from perfmodel import catalog
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.planning.layouts import enumerate_layouts
from perfmodel.prediction import evaluate, step_problem
from perfmodel.prediction.memory import peak_memory
from perfmodel.spec import Framework, Job, Layout, Problem
from perfmodel.validation import Case

ROOT = Path(__file__).parents[2]


def _layouts(batch: int, mode: Literal["train", "inference"], schedule: str) -> list[Layout]:
    """What `search` tries of DistIR's space."""
    job = Job(global_batch=batch, seq_len=1, mode=mode, dtype="fp16")
    model, cluster = catalog.model("mlp-1b"), catalog.cluster(distir.CLUSTER)
    problem = Problem(model=model, cluster=cluster, job=job, devices=distir.DEVICES)
    every = enumerate_layouts(distir.space(job, schedule), problem, Counter())
    counts = [(job.num_microbatches(layout), layout) for layout in every]
    return [
        layout
        for count, layout in counts
        if count in (distir.MICRO_BATCHES if layout.pp > 1 else (1,))
    ]


@pytest.mark.parametrize("batch", [16384, 131072])
def test_distir_has_as_many_layouts_as_the_paper(batch):
    """DistIR, arXiv 2111.05426, table 1: 75 layouts of a batch."""
    layouts = _layouts(batch, "train", "1f1b")
    assert len(layouts) == len(set(layouts)) == 75
    assert all(lay.devices == 16 for lay in layouts)


def test_distir_counts_inference_layouts_as_the_paper():
    """Table 1: 1,035 layouts over all batches (some are too small for 128 micro-batches)."""
    assert sum(len(_layouts(batch, "inference", "gpipe")) for batch in distir.BATCHES) == 1035


@pytest.mark.parametrize(
    ("model", "batch"), [("mlp-1b", 128), ("mlp-17b", 4096), ("mlp-103b", 1024)]
)
def test_distir_rows_of_table_2(model, batch):
    found = distir.training_search(model, batch)
    assert distir.name(found.layouts[0], batch) == distir.TRAINING[model][batch]


def test_the_page_of_distir_counts_rows_as_its_two_tables_do():
    """One statement for programs and layouts: what `docs/systems/distir.md` says is what both pages
    print."""
    programs, layouts = (
        (ROOT / "validate" / name).read_text() for name in ("distir.md", "search.md")
    )
    inference = programs.split("## Table 3")[1].split("## Table 4")[0]
    in_rows = [line.split(" | ")[4] for line in inference.splitlines() if line.startswith("| gpt2")]
    counts = [
        re.search(r"(\d+) of 27 rows", programs),
        re.search(r"\*\*(\d+) of 27\*\* rows", layouts),
        re.search(r"\*\*(\d+) of 3\*\*", layouts),
    ]
    through_programs, through_layouts, inferred = (found.group(1) for found in counts if found)
    page = " ".join((ROOT / "docs" / "systems" / "distir.md").read_text().split())
    assert len(in_rows) == 3
    assert (
        f"Through programs ({{doc}}`/accuracy/distir`), {through_programs} of the 27 rows of table 2 and "
        f"{in_rows.count('yes')} of the 3 rows of table 3 are reproduced; through layouts "
        f"({{doc}}`/accuracy/search`), {through_layouts} and {inferred}."
    ) in page


def test_a_row_that_does_not_fit_is_not_held():
    found = distir.training_search("mlp-103b", 128)
    row = distir._compare(found, 128, "16/1/1/1")
    assert not row["held"]
    assert np.isinf(row["paper's/ours"])


def test_ranked_layouts_are_in_order_and_leave_out_what_does_not_divide():
    model, cluster = catalog.model("mlp-1b"), catalog.cluster("dgx-2")
    job = Job(global_batch=4096, seq_len=1, dtype="fp16")
    space = replace(USUAL, tp=(1, 3, 4), pp=(1, 2, 16), micro_batch=(64, 100))
    found = rank(model, cluster, job, 16, space, constraints=["micro_batches >= 2"])
    degrees = {(lay.tp, lay.pp, lay.dp, lay.micro_batch) for lay in found.layouts}
    assert degrees == {(1, 1, 16, 64), (1, 2, 8, 64), (1, 16, 1, 64), (4, 1, 4, 64), (4, 2, 2, 64)}
    np.testing.assert_allclose(
        found.step_s, evaluate(step_problem(model, cluster, job), found.layouts).step_time_s
    )
    assert (np.diff(found.step_s) >= 0).all()
    assert found.place(found.layouts[1]) == 1
    assert found.place(Layout(dp=3)) is None
    assert found.only([False, True, False, False, False]).layouts == found.layouts[1:2]
    with pytest.raises(LayoutError, match="is possible"):
        rank(model, cluster, job, 16, replace(space, tp=(3,)))


def test_blocking_sends_lengthen_pipelines_only():
    model, cluster, job = (
        catalog.model("mlp-17b"),
        catalog.cluster("dgx-2"),
        Job(global_batch=4096, seq_len=1, dtype="fp16"),
    )
    layouts = [Layout(pp=4, micro_batch=64, dp=1), Layout(tp=4, micro_batch=4096)]
    free, held = (
        evaluate(
            step_problem(model, cluster, job, None, Framework(blocking_sends=b)), layouts
        ).step_time_s
        for b in (False, True)
    )
    assert held[0] > free[0] * (1 + 1e-5)
    assert held[1] == free[1]


def test_plain_sgd_keeps_no_states():
    model, cluster = catalog.model("mlp-1b"), catalog.cluster("dgx-2")
    peaks = []
    for optimizer in ("plain-sgd", "sgd", "adam"):
        job = Job(global_batch=16, seq_len=1, dtype="fp16", grad_dtype="fp16", optimizer=optimizer)
        peaks.append(peak_memory(step_problem(model, cluster, job), [Layout()])[0][0])
    parameters = 16 * 8192**2
    assert np.allclose(np.diff(peaks), [8 * parameters, 4 * parameters], rtol=0.01)


def test_megatron_searches_transformers_only():
    job = Job(global_batch=8, seq_len=1)
    case = Case(
        "row 1",
        catalog.model("resnet50"),
        catalog.cluster("dgx-a100"),
        job,
        Layout(dp=8),
        catalog.framework("generic"),
    )
    with pytest.raises(
        PerfModelError, match="row 1: Megatron-LM trains transformers, resnet-50 is none"
    ):
        search.megatron_search(case)


@pytest.mark.slow
def test_megatron_layouts_are_in_the_space_searched(data_dir):
    table = search.megatron_table(data_dir)
    assert len(table) == 10
    assert table["all, rank"].notna().all()
    assert (table["rule, of"] <= table["all, of"]).all()
    assert np.median(np.abs(table["predicted_s"] / table["measured_s"] - 1)) < 0.10


def test_markdown_says_what_a_cell_is():
    text = markdown_table(
        pd.DataFrame({"a": [1.23456, np.inf], "b": [True, False], "c": ["x", None]})
    )
    assert text.splitlines()[2:] == ["| 1.235 | yes | x |", "| does not fit | **no** | - |"]
