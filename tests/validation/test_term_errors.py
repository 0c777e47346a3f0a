"""Errors with a term switched off, and means over groups of sources."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from published_rows import SMALL_GPT
from studies.bars import group_means

from perfmodel.prediction import Site
from perfmodel.validation import EVERY_TERM, Case, predict_cases, term_errors

HOT = Site(sustained=(("Ampere", 0.2),), power_limited=False)
COOL = Site(sustained=(), power_limited=False)
CLOCK = "clock under load"


def runs(measured_by: Site) -> pd.DataFrame:
    """Runs of two sources that took exactly what is predicted at a site."""
    rows = [
        SMALL_GPT
        | {
            "case_id": f"{source}-{tp}",
            "source": source,
            "framework": "megatron-lm@2022",
            "tp": tp,
            "dp": 8 // tp,
            "micro_batch": 4,
            "zero_stage": 0,
            "sequence_parallel": 0,
            "flash_attention": 0,
            "measured_iter_time_s": 1.0,
        }
        for source, tp in (("a", 1), ("a", 2), ("b", 1))
    ]
    table = pd.DataFrame(rows)
    table["measured_iter_time_s"] = predict_cases(table, site_of=lambda _: measured_by)[
        "predicted_iter_time_s"
    ]
    return table


def errors_by_term(table: pd.DataFrame, site: Site) -> dict[str, Any]:
    """Errors of runs that are all predicted at one site."""
    cases: dict[int, Case] = {}

    def keep(place: int, case: Case, _prediction: object) -> None:
        cases[place] = case

    predicted = predict_cases(table, site_of=lambda _: site, keep=keep)
    times_s = predicted["predicted_iter_time_s"].to_numpy(float)
    return term_errors(table, cases, times_s, site_of=lambda _: site)


def test_a_term_that_the_runs_have_is_missed_without_it() -> None:
    found = errors_by_term(runs(measured_by=HOT), HOT)
    assert {name: of["n"] for name, of in found["sources"].items()} == {"a": 2, "b": 1}
    for of in [*found["sources"].values(), found["over_sources"]]:
        assert (of["mean_ape"], of["bias"]) == pytest.approx((0.0, 0.0))
        without = of["without"]
        assert without[CLOCK]["mean_ape"] == pytest.approx(-without[CLOCK]["bias"])
        assert without[CLOCK]["mean_ape"] == pytest.approx(without[CLOCK]["adds"])
        assert 0.05 < without[CLOCK]["adds"] < 1 - np.exp(-0.2)
        assert without["overhead of a step"] == pytest.approx(
            {"mean_ape": 0.0, "bias": 0.0, "adds": 0.0}
        )
        assert without[EVERY_TERM]["adds"] >= without[CLOCK]["adds"]


def test_a_term_that_the_runs_lack_is_better_off() -> None:
    found = errors_by_term(runs(measured_by=COOL), HOT)["over_sources"]
    assert found["bias"] > 0.05
    assert found["without"][CLOCK]["mean_ape"] == pytest.approx(0.0)


def test_runs_without_a_case_do_not_count() -> None:
    table, predicted_s = runs(measured_by=HOT), np.ones(3)
    assert term_errors(table, {}, predicted_s, site_of=lambda _: HOT)["sources"] == {}


def test_sources_count_the_same() -> None:
    table = runs(measured_by=HOT)
    table.loc[table["source"] == "b", "measured_iter_time_s"] *= 2
    found = errors_by_term(table, HOT)["over_sources"]
    assert found["mean_ape"] == pytest.approx(0.25)


def test_what_cannot_be_predicted_is_left_out() -> None:
    table = runs(measured_by=HOT)
    table["device"] = "abacus"
    assert errors_by_term(table, HOT)["sources"] == {}


def test_means_over_groups_of_sources() -> None:
    frame = pd.DataFrame(
        {
            "source": ["MLPerf Training v9", "a", "a", "b"],
            "device": ["H100-SXM5-80GB", "GB200", "A100", "H100"],
            "family": ["llama", "moe", "llama", "llama"],
            "cp": [None, 1, 2, 4],
            "measured_s": [1.0, 1.0, 1.0, np.nan],
            "predicted_iter_time_s": [1.4, 1.2, 0.9, 7.0],
        }
    )
    found = group_means(frame)
    assert found["every source"] | {"to_reach": 0} == pytest.approx(
        {
            "sources": 2,
            "n": 3,
            "statistic": "mean error",
            "error": 0.275,
            "by_row": 0.7 / 3,
            "bias": 0.225,
            "to_reach": 0,
        }
    )
    assert (
        found["every source but the logs of MLPerf"]["error"],
        found["GB200"]["error"],
    ) == pytest.approx((0.15, 0.2))
    assert (
        found["mixtures of experts"]["n"],
        found["context parallelism"]["n"],
        "H200" in found,
    ) == (1, 1, False)
    assert found["context parallelism"]["error"] == pytest.approx(0.1)
    assert found["median source"]["error"] == pytest.approx(0.225)
