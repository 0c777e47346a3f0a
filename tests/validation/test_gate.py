"""The gate on accuracy, and a fast subset of the published record held against it."""

import json
from pathlib import Path

import pytest
from gate import figures, worse
from prepared_runs import prepared

from perfmodel.validation.rows import read_tables

ROOT = Path(__file__).parents[2]


def report(error: float, n: int = 10, memory: float = 0.1) -> dict:
    return {"one": {"n": n, "mean_ape": error, "memory": {"n": 3, "mean_ape": memory}}}


def test_equal_or_better_passes() -> None:
    assert worse(report(0.1), report(0.1)) == []
    assert worse(report(0.1), report(0.05)) == []


def test_small_growth_passes_and_larger_fails() -> None:
    assert worse(report(0.02), report(0.0249)) == []
    assert worse(report(0.02), report(0.026)) == ["one, step time: mean error 2.6%, 2.0% before"]
    assert worse(report(0.40), report(0.415)) == []
    assert len(worse(report(0.40), report(0.43))) == 1


def test_memory_and_lost_rows_are_held_too() -> None:
    assert "peak memory" in worse(report(0.1), report(0.1, memory=0.2))[0]
    assert "9 rows predicted" in worse(report(0.1), report(0.01, n=9))[0]
    assert "no longer predicted" in worse(report(0.1), {})[0]


@pytest.mark.shared
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_no_source_of_the_subset_is_less_accurate_than_committed(
    data_dir: Path, tmp_path: Path, every: int
) -> None:
    before = json.loads((ROOT / "validate" / "gate.json").read_text())
    runs, _ = read_tables(prepared(sorted((data_dir / "published").glob("*.csv")), tmp_path))
    runs = runs[runs["case_id"].isin(before["runs"])]
    assert len(runs) == len(before["runs"])
    held = {
        source: before["cases"]["sources"][source]
        for source in sorted(before["cases"]["sources"])[::every]
    }
    assert worse(held, figures(runs[runs["source"].isin(held)].reset_index(drop=True))) == []
