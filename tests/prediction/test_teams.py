"""Teams that measured published sources, and what is left out with them."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.prediction.sites import fit_without
from perfmodel.prediction.sites.constants import (
    is_competition,
    reports_a_problem,
    share_a_team,
    source_of_submitter,
    team_key,
    team_patterns,
    teams_of,
)
from perfmodel.validation import source_of_run
from perfmodel.validation.rows import read_tables

NVIDIA = (
    "NVIDIA NeMo performance summary",
    "NeMo framework launcher README",
    "Megatron-LM SC21 Table 1",
    "Korthikanti et al. 2022 Table 5",
    "Megatron-Core README H100 weak scaling",
    "Megatron-MoE-ModelZoo",
    "NVIDIA DGX Cloud benchmarking recipes",
    "NVIDIA JAX-Toolbox Pax README",
    "MLPerf Training v5.0 (NVIDIA)",
    "MLPerf Training v3.1 (Azure+NVIDIA)",
)


@pytest.mark.parametrize("source", NVIDIA)
def test_all_that_a_team_measured_is_its_own(source: str) -> None:
    assert all(share_a_team(source, other) for other in NVIDIA)
    assert not share_a_team(source, "Megatron-DeepSpeed rebase page")
    assert not share_a_team(source, "Megatron-LM issues")  # of its users
    assert not share_a_team(source, "")


def test_submitters_whose_other_sources_are_known_are_told_apart() -> None:
    round_ = "MLPerf Training v5.0"
    assert source_of_submitter(round_, "NVIDIA") == f"{round_} (NVIDIA)"
    assert source_of_submitter(round_, "Dell") == round_
    assert source_of_submitter(round_, "") == round_
    assert source_of_submitter("nobody's runs", "NVIDIA") == "nobody's runs"
    # those of one round know one another, and those of one submitter too
    assert share_a_team(f"{round_} (NVIDIA)", round_)
    assert share_a_team(f"{round_} (Google)", "MaxText README performance tables")
    assert not share_a_team(f"{round_} (Google)", NVIDIA[0])


def test_submitters_are_read_from_the_address_of_a_submission() -> None:
    row: dict[str, Any] = {
        "source": "MLPerf Training v3.1",
        "url_or_repo": "github mlcommons/training_results_v3.1@d062:Azure+NVIDIA/results/ND_H100_v5/gpt3 ; more",
    }
    assert source_of_run(row) == "MLPerf Training v3.1 (Azure+NVIDIA)"
    assert source_of_run(row | {"url_or_repo": None}) == "MLPerf Training v3.1"
    assert source_of_run(row | {"submitter": "Google"}) == "MLPerf Training v3.1 (Google)"


def test_a_source_that_nobody_listed_is_its_own_team() -> None:
    assert teams_of("our lab's runs") == {"our lab's runs"}
    assert share_a_team("our lab's runs", "Our lab's runs")


def test_patterns_are_reached_and_their_teams_can_be_joined() -> None:
    patterns = list(team_patterns())
    for at, pattern in enumerate(patterns):
        example = pattern.replace("*", "")
        assert teams_of(example) == team_patterns()[pattern], (
            f"{pattern} is hidden by {patterns[:at]}"
        )
        assert not any("+" in team for team in team_patterns()[pattern])


def test_what_is_fitted_without_a_source_is_without_all_its_teams() -> None:
    fits = ("", "mlperf", "mlperf+nvidia", "nvidia")
    assert fit_without("", fits) == ""
    assert fit_without("NVIDIA NeMo performance summary", fits) == "nvidia"
    assert fit_without("MLPerf Training v5.0 (NVIDIA)", fits) == "mlperf+nvidia"
    # Google has no other source among these runs, so that the round alone has to be left out
    assert fit_without("MLPerf Training v5.0 (Google)", fits) == "mlperf"
    assert fit_without("our lab's runs", fits) == ""
    with pytest.raises(PerfModelError, match="mlperf and nvidia"):
        fit_without("MLPerf Training v5.0 (NVIDIA)", ("", "mlperf", "nvidia"))


def test_every_published_source_is_listed(data_dir: Path) -> None:
    files = [
        file
        for folder in ("published", "published2")
        for file in sorted((data_dir / folder).glob("*.csv"))
    ]
    runs: pd.DataFrame = read_tables(files)[0]
    unlisted = {source for source in runs["source"] if teams_of(source) == {source.lower()}}
    assert not unlisted
    keys = {team_key(source_of_run(row)) for row in runs.to_dict("records")}
    assert {"mlperf", "mlperf+nvidia", "google+mlperf", "nvidia"} <= keys


def test_threads_about_problems_are_told_from_reports_of_speed() -> None:
    assert reports_a_problem("Megatron-LM issues")
    assert reports_a_problem("llm-foundry issue 1153")
    assert not reports_a_problem("MLPerf Training v5.1")
    assert not reports_a_problem("")


def test_rounds_of_a_benchmark_are_competitions_whoever_submits() -> None:
    assert is_competition("MLPerf Training v5.1")
    assert is_competition("MLPerf Training v5.0 (NVIDIA)")
    assert not is_competition("NVIDIA NeMo performance summary")
    assert not is_competition("")
