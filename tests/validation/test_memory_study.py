"""The study of peak memory: errors by group, Brier scores and reliability by hand."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory import (
    brier_over_sources,
    brier_score,
    memory_errors,
    memory_page,
    reliability_table,
    says_all_of_memory,
    spread_rows,
    unlikely_lines,
)


def runs_table(
    sources: list[str],
    measured: list[float],
    peaks: list[float],
    likely: list[float],
    ran: list[bool],
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "case_id": [f"run-{place}" for place in range(len(sources))],
            "source": sources,
            "framework": "software",
            "says_all": [True] + [False] * (len(sources) - 1),
            "measured_bytes": measured,
            "peak_bytes": peaks,
            "fits_probability": likely,
            "ran": ran,
        }
    )


TABLE = runs_table(
    ["a", "a", "b"], [10.0, 10.0, 20.0], [11.0, 9.0, 30.0], [1.0, 0.05, 0.5], [True, True, False]
)


def test_errors_of_a_group_are_means_of_its_rows():
    errors = memory_errors(TABLE)
    assert errors.loc[("a", "software")].tolist() == pytest.approx([2, 0.1, 0.0])
    assert errors.loc[("b", "software")].tolist() == pytest.approx([1, 0.5, 0.5])


def test_brier_scores_by_hand():
    squared = [0.0, 0.95**2, 0.25]
    assert brier_score(TABLE) == pytest.approx(sum(squared) / 3)
    assert brier_over_sources(TABLE) == pytest.approx((sum(squared[:2]) / 2 + squared[2]) / 2)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=30))
def test_every_run_is_in_one_range_and_a_certain_truth_scores_best(rows):
    likely, ran = [told for told, _ in rows], [came for _, came in rows]
    ones = [1.0] * len(rows)
    table = runs_table(["a"] * len(rows), ones, ones, likely, ran)
    certain = table.assign(fits_probability=table["ran"].astype(float))
    assert brier_score(certain) == 0 <= brier_score(table) <= 1
    lines = reliability_table(table).splitlines()[2:]
    assert sum(int(line.split("|")[2]) for line in lines) == len(rows)


def test_the_page_names_runs_that_ran_against_the_odds_and_weighs_groups_alike():
    page = memory_page(TABLE)
    assert page.splitlines()[-1] == "- run-1 (0.050): not known"
    assert "run-0" not in page
    # Only rows that ran are compared: the group of source b has none.
    assert "10.0 % (1 groups, 2 rows)" in page
    assert "10.0 % (1 groups, 1 rows)" in page


@pytest.mark.parametrize(
    ("assumed", "says_all"),
    [
        ("", True),
        ("dp_overlap (-2% to +4%)", True),
        ("dp_overlap (-2% to +4%), network", True),
        ("dp_overlap, micro_batch", False),
        ("recompute (-9% to +14%), dp_overlap", False),
        ("seq_len", False),
        (
            "network, memory: predicted to need 90 GiB (99 including allocator losses) of 80 GiB, although it fitted",
            True,
        ),
    ],
)
def test_a_run_says_all_of_its_memory_if_only_choices_of_time_are_open(
    assumed: str, says_all: bool
) -> None:
    assert says_all_of_memory(assumed) == says_all


def test_known_reasons_stand_beside_runs():
    unlikely = TABLE.assign(case_id="p3-fsdp2022-1t").iloc[:1]
    (lines,) = unlikely_lines(unlikely)
    assert "waited on the host" in lines
    assert unlikely_lines(unlikely.iloc[:0]) == []


@given(st.integers(1, 40), st.integers(1, 50))
def test_rows_of_a_source_are_spread_from_its_first_to_its_last(most, rows):
    runs = pd.DataFrame({"case_id": np.arange(rows), "source": "a"})
    chosen = spread_rows(runs, most)["case_id"].tolist()
    assert len(chosen) == min(most, rows)
    assert chosen == sorted(set(chosen))
    assert chosen[0] == 0
    assert most == 1 or chosen[-1] == rows - 1
