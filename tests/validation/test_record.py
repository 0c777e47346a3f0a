"""The record of published runs: naive rate, ranking, fits, bars, text, and the residual
explorer."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from published_rows import SMALL_GPT
from studies.pairs import ranking
from studies.record import naive_times_s, published_record
from studies.record_html import record_html
from studies.record_text import record_text

from perfmodel.errors import PerfModelError, TableError
from perfmodel.validation import explain_case, explain_cases, fit_figures

LIVE = Path(__file__).parents[2] / "validate" / "live.json"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layouts of a small model under the names of a source with a bar."""
    rows = []
    for tp, dp, micro_batch in (
        (1, 8, 1),
        (1, 8, 2),
        (2, 4, 1),
        (2, 4, 2),
        (4, 2, 1),
        (4, 2, 2),
        (8, 1, 2),
        (8, 1, 4),
    ):
        rows.append(
            SMALL_GPT
            | {
                "case_id": f"vtrain-single-{tp}-{dp}-{micro_batch}",
                "source": "vTrain validation measurements",
                "framework": "megatron-deepspeed@2022",
                "tp": tp,
                "dp": dp,
                "micro_batch": micro_batch,
                "measured_iter_time_s": 0.3 + 0.02 * tp,
                "measured_peak_memory_gb": 20.0,
                "memory_unit": "GiB",
            }
        )
    failed = {
        "case_id": "vtrain-single-oom",
        "micro_batch": 8,
        "status": "oom",
        "measured_iter_time_s": None,
    }
    rows.append(rows[0] | failed)
    path = tmp_path_factory.mktemp("runs") / "runs.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_naive_rate_is_the_median_of_the_others() -> None:
    runs = pd.DataFrame({"source": ["a"] * 3 + ["b"], "device": "x"})
    flops, measured = np.array([10.0, 20.0, 30.0, 5.0]), np.array([1.0, 1.0, 2.0, 1.0])
    # rates 10, 20, 15: the first is told the median of 20 and 15
    found = naive_times_s(runs, measured, flops)
    np.testing.assert_allclose(found[:3], [10 / 17.5, 20 / 12.5, 30 / 15.0])
    assert np.isnan(found[3])


def test_naive_rate_is_exact_where_every_run_has_one_rate() -> None:
    runs = pd.DataFrame({"source": ["a"] * 4, "device": "x"})
    flops = np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(naive_times_s(runs, flops / 7, flops), flops / 7)


def test_ranking_and_regret() -> None:
    runs = pd.DataFrame({"source": ["a"] * 5, "model": "m", "n_devices": 8})
    measured = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert ranking(runs, measured, 2 * measured)["a"] == pytest.approx(
        {"groups": 1, "spearman": 1.0, "regret": 0.0, "worst_regret": 0.0}
    )
    found = ranking(runs, measured, measured[::-1])["a"]
    assert (found["spearman"], found["regret"]) == pytest.approx((-1.0, 4.0))
    assert ranking(runs.head(4), measured[:4], measured[:4]) == {}


def test_fits_counts_runs_of_sources_where_some_did_not_fit() -> None:
    status = ["ok", "oom", "oom_or_crash", "ok", "suspect", "ok"]
    runs = pd.DataFrame({"source": ["a", "a", "a", "b", "a", "b"], "status": status})
    found = fit_figures(
        runs, pd.Series([True, False, True, True, True, None]), [0.9, 0.1, 0.8, 0.4, 1.0, np.nan]
    )
    assert set(found["sources"]) == {"a"}
    of = found["sources"]["a"]
    assert (of["ran"], of["did_not_run"], of["precision"]) == (1, 2, 0.5)
    assert (
        of["ran_likely"],
        of["ran_told"],
        of["did_not_run_unlikely"],
        of["did_not_run_told"],
    ) == (1, 1, 0.5, 0.5)
    assert of["brier"] == pytest.approx((0.1**2 + 0.1**2 + 0.8**2) / 3)
    assert (found["all"]["ran"], found["all"]["ran_likely"], found["all"]["ran_told"]) == (
        2,
        0.5,
        1,
    )
    # neither what is suspect nor what is not predicted
    assert sum(of["n"] for of in found["reliability"]) == 4
    (top,) = [of for of in found["reliability"] if of["from"] == 0.75]
    assert (top["n"], top["said"], top["ran"]) == (2, pytest.approx(0.85), 0.5)


def test_record_of_a_table(table: Path) -> None:
    record, frame = published_record([table])
    assert record["bars"]["vTrain, one node"]["time"]["n"] == 8
    assert set(record["others"]) == {"one FLOP rate"}
    own = record["sources"]["vTrain validation measurements"]
    predicted = frame["predicted_iter_time_s"].astype(float)[:8]
    error = np.abs(predicted / frame["measured_s"][:8] - 1).mean()
    assert own["mean_ape"] == pytest.approx(error)
    assert record["bars"]["vTrain, one node"]["time"]["error"] == pytest.approx(error)
    assert record["over_sources"]["mean_ape"] == pytest.approx(error)  # of one source
    assert (
        record["generic"]["sources"]["vTrain validation measurements"]["mean_ape"]
        != own["mean_ape"]
    )
    assert (own["frameworks"], own["width_90"] > 1) == (["megatron-deepspeed@2022"], True)
    assert record["fits"]["sources"]["vTrain validation measurements"]["did_not_run"] == 1
    assert record["groups"]["every source"]["error"] == pytest.approx(error)
    # terms are switched off on the likeliest of what a run may have been, which is near the median
    # of all
    assert record["terms"]["over_sources"]["mean_ape"] == pytest.approx(error, rel=0.05)
    json.dumps(record)
    text = record_text(record, {"families": {}}, json.loads(LIVE.read_text()))
    assert "| vTrain, one node | time | 8 | mean |" in text
    assert "| mean over 1 sources | " in text
    assert "## Pairs of layouts of one site" in text
    html = record_html(text, frame, record["pairs"])
    assert html.count("data:image/png") == 4
    assert "<td>vTrain, one node</td>" in html


def test_explanation_adds_up_and_its_terms_explain_the_error(table: Path) -> None:
    (found,) = explain_cases([table], "vtrain-single-2-4-1")
    assert sum(found.breakdown_s.values()) == pytest.approx(found.predicted_s)
    assert found.events
    assert found.events[0].time_s <= found.predicted_s
    gap = np.log(found.measured_s / found.predicted_s)
    for term in found.terms:
        assert term.share * term.needed == pytest.approx(gap, rel=1e-6)
    sizes = [abs(term.deviations) for term in found.terms]
    assert sizes == sorted(sizes)
    json.dumps(found.to_dict())


def test_nearest_measured_kernel_is_the_same_shape_where_it_was_measured(table: Path) -> None:
    row = pd.read_csv(table).iloc[0]
    shape = {"m": 1024, "n": 8192, "k": 2048}
    kernels = pd.DataFrame(
        [
            {
                "device": "A100-SXM4-80GB",
                "op_family": "gemm",
                "op": "linear",
                "pass": "fwd",
                "time_us": us,
                **at,
            }
            for us, at in ((7.0, shape), (9.0, {"m": 64, "n": 64, "k": 64}))
        ]
    )
    cells = {name: None if pd.isna(value) else value for name, value in row.items()}
    events = explain_case(cells, tables=[kernels]).events
    nearest = [e for e in events if e.event == "linear 1024x8192x2048 fwd"]
    assert [(e.nearest_us, e.doublings) for e in nearest] == [(7.0, 0.0)]


def test_what_cannot_be_explained_is_refused(table: Path) -> None:
    with pytest.raises(TableError, match="no run 'x'"):
        explain_cases([table], "x")
    with pytest.raises(PerfModelError, match="no measured step time"):
        explain_cases([table], "vtrain-single-oom")
