"""Constants of an unknown site: clocks under load from runs, half-widths of intervals from residuals of others."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perfmodel.cli import main
from perfmodel.prediction import TERMS, Site, Unknown, step_problem, step_times_s, unknown
from perfmodel.validation import fit_unknown, read_case
from perfmodel.validation._site_fit import fit_sustained
from perfmodel.validation._skew_fit import fit_skew

ROW = {
    "source": "our lab", "framework": "megatron-lm@2022", "model": "gpt-22B", "family": "gpt", "params_b": 22.1,
    "layers": 48, "hidden": 6144, "heads": 64, "ffn_hidden": 24576, "vocab": 51200, "seq_len": 2048,
    "device": "V100-SXM2-32GB", "n_devices": 8, "devices_per_node": 8, "dtype": "fp16", "tp": 8, "pp": 1, "dp": 1,
    "num_microbatches": 1, "zero_stage": 0, "recompute": "full", "sequence_parallel": 0, "flash_attention": 0,
    "status": "ok",
}  # fmt: skip
SLOWER = 0.2
"""Log by which products of these runs take longer than alone."""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs as predicted with slower products, of a source that says all and one that does not."""
    rows = []
    for source in ("our lab", "their recipes"):
        for batch in (2, 4, 8):
            row = ROW | {"case_id": f"{source} {batch}", "source": source, "micro_batch": batch, "global_batch": batch}
            case = read_case(row)
            site = Site(sustained=(("Volta", SLOWER),))
            model = step_problem(case.model, case.cluster, case.job, None, case.framework, site)
            rows.append(row | {"measured_iter_time_s": float(step_times_s(model, [case.layout])[0])})
    path = tmp_path / "runs.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_slower_products_of_runs_are_found_again(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = ["fit", "--sites", str(runs), "--unstated", "their", "--out", str(tmp_path / "out"), "--json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["sustained"]) == ["Volta"]
    # a share of the step, so that the log is of first order
    assert report["sustained"]["Volta"] == {"our lab": pytest.approx(SLOWER, abs=0.02)}
    assert json.loads((tmp_path / "out" / "sustained.json").read_text()) == report["sustained"]
    assert json.loads((tmp_path / "out" / "unknown.json").read_text()) == report["unknown"]
    assert set(report["unknown"]) == {"", "our", "their"}


def test_the_spread_at_which_ranks_of_runs_meet_is_found_again():
    rows = []
    for tokens in (512, 1024, 2048):
        row = ROW | {"case_id": str(tokens), "micro_batch": 1, "global_batch": 1, "seq_len": tokens}
        case = read_case(row)
        late = step_problem(case.model, case.cluster, case.job, None, case.framework, Site(sustained=(), skew_s=8e-5))
        rows.append(row | {"measured_iter_time_s": float(step_times_s(late, [case.layout])[0])})
    runs = pd.DataFrame(rows)
    found = fit_skew(runs, unstated=(), site_of=lambda _: Site(sustained=()))
    assert found == {"our lab": pytest.approx(8e-5, rel=0.02)}
    assert fit_skew(runs, unstated=("our",), site_of=lambda _: Site(sustained=())) == {}


def test_runs_say_nothing_of_products_whose_power_is_known(runs: Path) -> None:
    table = pd.read_csv(runs)
    assert list(fit_sustained(table)) == ["Volta"]
    assert fit_sustained(table.assign(device="A100-SXM4-80GB")) == {}


def test_half_widths_cover_nine_tenths_and_leave_groups_out():
    rng = np.random.default_rng(0)
    n = 2000
    runs = pd.DataFrame({"source": ["alpha one"] * n + ["beta two"] * n, "status": "ok"})
    network = rng.uniform(0, 0.5, 2 * n)
    # the second group errs by twice the first, both by more the more they spend between nodes
    sd = np.repeat([0.05, 0.1], n) + 0.2 * network
    runs["measured_iter_time_s"] = np.exp(rng.normal(0, sd))
    predicted = pd.DataFrame({"predicted_iter_time_s": 1.0, "events_half_width": 0.0, "network_share": network})
    for name in ("extrapolated_share", "host_share", "unstated_share"):
        predicted[name] = 0.0
    found = fit_unknown(runs, predicted)
    assert set(found) == {"", "alpha", "beta"}
    for group, base in (("beta", 0.05), ("alpha", 0.1)):
        for side in found[group].values():
            terms = dict(zip(TERMS, side, strict=True))
            # the penalty takes some of the slope for the constant
            assert terms["constant"] == pytest.approx(1.645 * base, abs=0.06)
            assert 0.1 < terms["network"] < 1.645 * 0.2 + 0.1
            assert terms["host"] < 0.02
    everything = Unknown(tuple(found[""]["faster"]), tuple(found[""]["slower"]))
    log = np.log(runs["measured_iter_time_s"].to_numpy())
    ends = np.array([everything.half_widths({"network": share}) for share in network])
    inside = (log >= -ends[:, 0]) & (log <= ends[:, 1])
    assert 0.87 < inside.mean() < 0.93


def test_a_source_is_left_out_with_its_group():
    assert unknown("vTrain validation measurements") != unknown()
    assert unknown("NVIDIA NeMo performance summary") == unknown("NVIDIA Megatron-Bridge performance summary")
    assert unknown("nobody's runs") == unknown()
