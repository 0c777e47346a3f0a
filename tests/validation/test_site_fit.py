"""Constants of an unknown site: clocks under load from runs, half-widths of intervals from
residuals of others."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
import pytest

from perfmodel.catalog import device, framework
from perfmodel.cli import main
from perfmodel.files import CHECKSUMS_FILE, checksum_lines
from perfmodel.prediction import Site, step_problem, step_times_s
from perfmodel.prediction.sites import CLASSES, NEUTRAL, Seen, SitePopulation, key, population
from perfmodel.spec import Framework
from perfmodel.validation import fit_sustained, read_case
from perfmodel.validation.population import (
    PopulationFit,
    Score,
    SiteRuns,
    State,
    fit_population,
    posterior,
)

ROW = {
    "source": "our lab",
    "framework": "megatron-lm@2022",
    "model": "gpt-22B",
    "family": "gpt",
    "params_b": 22.1,
    "layers": 48,
    "hidden": 6144,
    "heads": 64,
    "ffn_hidden": 24576,
    "vocab": 51200,
    "seq_len": 2048,
    "device": "V100-SXM2-32GB",
    "n_devices": 8,
    "devices_per_node": 8,
    "dtype": "fp16",
    "tp": 8,
    "pp": 1,
    "dp": 1,
    "num_microbatches": 1,
    "zero_stage": 0,
    "recompute": "full",
    "sequence_parallel": 0,
    "flash_attention": 0,
    "status": "ok",
}
SLOWER = 0.2
"""Log by which products of these runs take longer than alone."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs as predicted with slower products, of a source that says all and one that does not."""
    rows = []
    for source in ("our lab", "their recipes"):
        for batch in (2, 4, 8):
            row = ROW | {
                "case_id": f"{source} {batch}",
                "source": source,
                "micro_batch": batch,
                "global_batch": batch,
            }
            case = read_case(row)
            site = Site(sustained=(("Volta", SLOWER),), population=NEUTRAL)
            model = step_problem(case.model, case.cluster, case.job, None, case.framework, site)
            rows.append(
                row | {"measured_iter_time_s": float(step_times_s(model, [case.layout])[0])}
            )
    path = tmp_path / "runs.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


@pytest.mark.slow
def test_slower_products_of_runs_are_found_again(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set before it is deleted, so that what the command sets is undone after the test.
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    argv = [
        "fit",
        "--sites",
        str(runs),
        "--unstated",
        "their",
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    assert main(argv) == 0
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"
    report = json.loads(capsys.readouterr().out)
    assert list(report["sustained"]) == ["Volta"]
    # a share of the step, so that the log is of first order
    assert report["sustained"]["Volta"] == {"our lab": pytest.approx(SLOWER, abs=0.02)}
    assert json.loads((tmp_path / "out" / "sustained.json").read_text()) == report["sustained"]
    assert json.loads((tmp_path / "out" / "population.json").read_text()) == report["population"]
    assert (tmp_path / "out" / CHECKSUMS_FILE).read_text() == checksum_lines(tmp_path / "out")
    assert set(report["population"]) == {"", "our lab", "their recipes"}
    assert "| our lab | 3 |" in (tmp_path / "out" / "population.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("status", [None, ""])
def test_runs_without_a_status_ended_well(
    runs: Path, tmp_path: Path, status: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user's table may lack the column, or leave its cells empty."""
    table = pd.read_csv(runs)
    changed = table.drop(columns="status") if status is None else table.assign(status=status)
    changed.to_csv(runs, index=False)
    assert main(["fit", "--sites", str(runs), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["sustained"]["Volta"]) == set(table["source"])


def test_runs_say_nothing_of_products_whose_power_is_known(runs: Path) -> None:
    table = pd.read_csv(runs)
    assert list(fit_sustained(table)) == ["Volta"]
    assert fit_sustained(table.assign(device="A100-SXM4-80GB")) == {}


@pytest.fixture(scope="module")
def drawn_runs() -> SiteRuns:
    """Of four sources and two frameworks, which have something in common beside what is a site's
    own."""
    rng, of, each = np.random.default_rng(0), 4, 6
    source = np.repeat(np.arange(of), each)
    shares = rng.dirichlet(np.ones(len(CLASSES)), of * each)
    common = np.array([0.0, 0.2])[source % 2]
    site = 0.05 * rng.standard_normal((of, 1))[source, 0]
    noise = 0.02 * rng.standard_normal(of * each)
    named = np.array([f"s{at} lab" for at in source])
    return SiteRuns(
        log=common + site + noise,
        log_undone=common + site + noise,
        looked_at=np.zeros(len(source), bool),
        shares=shares,
        degrees=np.zeros((len(source), 3)),
        events=np.zeros(len(source)),
        at=rng.standard_normal((len(source), 8)) * 20,
        layout=np.arange(len(source)),
        open_deviation=np.zeros(len(source)),
        contradictions=np.zeros(len(source)),
        labels={
            "framework": np.array([f"f{at % 2}" for at in source]),
            "architecture": np.full(len(source), "X"),
            "source": named,
            "group": named,
            "year": np.array([str(2020 + at % 2) for at in source]),
            "model_kind": np.full(len(source), "decoder"),
        },
    )


@pytest.fixture(scope="module")
def fitted(drawn_runs: SiteRuns) -> PopulationFit:
    return fit_population(drawn_runs)


def test_factors_of_frameworks_and_spreads_of_sites_are_found_again(
    drawn_runs: SiteRuns, fitted: PopulationFit
) -> None:
    """And the interval of a source left out holds nine tenths of its runs."""
    runs, source, fit = drawn_runs, drawn_runs.levels["source"], fitted
    means = [np.mean(fit.parameters[""]["of"][key(f"f{at}", "X")]["mean"]) for at in range(2)]
    # two sources each: drawn towards what all have in common
    assert -0.05 < means[0] < means[1] < 0.22
    inside = []
    for at in range(len(source)):
        told = fit.parameters[str(runs.labels["group"][at])]
        site_prior = SitePopulation(
            told["common"], told["of"], Seen.from_dict(told["seen"])
        ).site_prior(Framework(name=str(runs.labels["framework"][at])), device("V100-SXM2-32GB"))
        half = site_prior.half_width(dict(zip(CLASSES, runs.shares[at].tolist(), strict=True)))
        inside.append(abs(runs.log[at] - runs.shares[at] @ site_prior.mean) < half)
    assert 0.8 < np.mean(inside) <= 1.0
    assert fit.score.sources.tolist() == sorted(set(runs.labels["source"].tolist()))


@pytest.mark.slow
def test_what_holds_without_a_group_never_saw_its_runs(
    drawn_runs: SiteRuns, fitted: PopulationFit
) -> None:
    """Not even by the variances: whatever they measured."""
    other = replace(
        drawn_runs, log=drawn_runs.log + np.where(drawn_runs.labels["group"] == "s1 lab", 0.5, 0.0)
    )
    before, after = fitted.parameters, fit_population(other).parameters

    def learned(fit: dict[str, dict[str, Any]], group: str) -> np.ndarray:
        told = fit[group]
        common = [told["common"][name] for name in ("events", "near", "length", "layout", "noise")]
        return np.concatenate(
            [common, *(told["of"]["|X"][name] for name in ("mean", "covariance"))]
        )

    # what runs weigh that are not seen is not quite nothing, for the inverse of a covariance
    np.testing.assert_allclose(learned(after, "s1 lab"), learned(before, "s1 lab"), atol=5e-4)
    assert np.abs(learned(after, "s2 lab") - learned(before, "s2 lab")).max() > 0.05


@pytest.mark.parametrize("off", [0.6, -0.6])
def test_a_source_that_lies_far_off_as_a_whole_says_little_of_what_it_shares(
    drawn_runs: SiteRuns, off: float
) -> None:
    """Its runs agree with one another: their level is unusual, and neither their scatter nor any
    single one of them."""
    is_off = drawn_runs.labels["source"] == "s3 lab"
    runs = replace(drawn_runs, log=drawn_runs.log + np.where(is_off, off, 0.0))
    with jax.enable_x64(True):
        score = Score(runs)
        state = score.scaled(score.scaled(score.start()))

    place = score.sources.tolist().index("s3 lab")
    assert state.level_scale[place] > 8
    assert np.delete(state.level_scale, place).max() < 4
    assert state.scale[place] < 2
    assert state.weight[is_off].min() > 0.5

    def log_factor(of_runs: SiteRuns, at_state: State) -> float:
        everything = np.ones(len(of_runs.log), bool)
        return float(
            np.mean(
                posterior(of_runs, score, at_state, everything, {("f1", "X")})["of"][
                    key("f1", "X")
                ]["mean"]
            )
        )

    # A normal level would let the source pull its framework along.
    before = log_factor(drawn_runs, score.start())
    normal = replace(state, level_scale=np.ones(len(score.sources)))
    assert abs(log_factor(runs, state) - before) < 0.5 * abs(log_factor(runs, normal) - before)


def test_a_source_is_left_out_with_its_group():
    assert population("vTrain validation measurements") is not population()
    nemo, bridge = (
        population(f"NVIDIA {name} performance summary") for name in ("NeMo", "Megatron-Bridge")
    )
    assert nemo.posteriors == bridge.posteriors != population().posteriors
    assert population("nobody's runs").posteriors == population().posteriors


def test_physics_alone_is_the_median_of_no_framework():
    h100 = device("H100-SXM5-80GB")
    assert Site().expected(Framework(), h100) is None
    assert not Site().site_prior(Framework(), h100).mean.any()
    known, anybody = (Site().site_prior(framework(name), h100) for name in ("nemo", "generic"))
    assert known.mean.any()
    assert np.diag(known.covariance).sum() < np.diag(anybody.covariance).sum()
