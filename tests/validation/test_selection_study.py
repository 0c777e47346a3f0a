"""The study of active selection on a small table of our own, and its cases on the public ones."""

from pathlib import Path

import numpy as np
import pytest
from active_selection import _as_good, selection_report
from studies import selection_study as study_module
from studies.selection_study import Case, Entry, grids, within
from studies.selection_study import study as selection_study
from studies.selection_tables import halved_backward, training_case

from perfmodel import catalog
from perfmodel.cost import roofline_seconds
from perfmodel.ops import Gemm
from perfmodel.prediction import step_problem
from perfmodel.spec import Job, Layout, Mlp

CLUSTER = catalog.cluster("dgx-a100")
SIZES = [2**e for e in range(8, 15)]
ROWS = [Gemm(m=m, n=n, k=k, dtype="fp16") for m in SIZES for n in SIZES for k in SIZES]
SECONDS = roofline_seconds(CLUSTER.device, ROWS) * np.exp(
    [0.3 + 0.02 * np.log2(op.m) for op in ROWS]
)
TABLE = dict(zip(ROWS, SECONDS.tolist(), strict=True))


def forward(op) -> Entry | None:
    return Entry(op, 1.0) if op in TABLE else None


def small_case() -> Case:
    layouts = []
    for hidden, batch in ((1024, 1024), (4096, 4096)):
        model = Mlp(name=f"stack-{hidden}", layers=4, hidden=hidden)
        job = Job(global_batch=4 * batch, seq_len=1, dtype="fp16", mode="inference")
        layouts.append((step_problem(model, CLUSTER, job), Layout(micro_batch=batch, dp=2)))
    return Case(CLUSTER.device, tuple(layouts), TABLE, forward)


def test_backward_of_a_layer_is_one_row_half_to_each_product():
    # forward C[m, n] = A[m, k] B[k, n]
    whole = Gemm(m=64, n=32, k=16, pass_="bwd")
    assert halved_backward(Gemm(m=64, n=16, k=32, pass_="dgrad")) == Entry(whole, 0.5)
    assert halved_backward(Gemm(m=32, n=16, k=64, pass_="wgrad", accumulate=True)) == Entry(
        whole, 0.5
    )
    assert halved_backward(Gemm(m=64, n=32, k=16)) == Entry(Gemm(m=64, n=32, k=16), 1.0)
    assert halved_backward(Gemm(op="bmm", m=64, n=32, k=16)) is None


def test_grids_span_what_is_needed():
    needed = [Gemm(m=256, n=512, k=512), Gemm(m=4096, n=4096, k=512)]
    inside = within(ROWS, needed)
    assert {op.k for op in inside} == {512}  # pyright: ignore
    assert {op.m for op in inside} == {256, 512, 1024, 2048, 4096}  # pyright: ignore
    coarse, finer, *_ = grids(inside, needed)
    assert {(op.m, op.n) for op in coarse} == {(256, 512), (256, 4096), (4096, 512), (4096, 4096)}  # pyright: ignore
    assert set(coarse) < set(finer)


def test_strategies_end_at_the_truth_where_they_may_measure_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(study_module, "MOST", 12)
    monkeypatch.setattr(study_module, "LEVELS", (2, 3))
    case = small_case()
    assert len(case.needed()) == 2
    points = selection_study(case, exclude_needed=False, seed=0)
    assert [p.measurements for p in points["ours"]] == [0, 4, 8, 12]
    # the two shapes that the steps need come first
    assert points["ours"][1].error < 1e-6
    assert points["ours"][0].error == points["random"][0].error > 0.2
    out = selection_study(case, exclude_needed=True, seed=0)
    assert 0 < out["ours"][-1].error < 0.05
    runs = [{"run": ["training", "box", "mlp", 0, False], "points": points}]
    report = selection_report(runs)
    assert "training, box" in report
    assert "kept out" not in report.split("## ")[1]


def test_as_good_means_as_good_from_there_on():
    points, error = np.array([0.0, 4, 8, 12]), np.array([0.3, 0.01, 0.05, 0.02])
    assert _as_good(points, error, 0.02) == 12
    assert _as_good(points, error, 0.05) == 4
    assert _as_good(points, error, 0.01) is None


@pytest.mark.shared
def test_every_studied_event_of_a_case_stands_in_the_table(data_dir: Path):
    case = training_case(data_dir, "GH200-96GB", 4096, 0)
    assert len(case.layouts) == 6
    needed = case.needed()
    assert len(needed) > 20
    assert all(op in case.table for op in needed)
    share = case.steps(lambda ops: np.array([case.table[op] for op in ops])).shares.sum(axis=1)
    assert share.min() > 0.35  # one of the six waits for the host half of its step
    assert share.mean() > 0.6
