"""Clusters side by side: figures that follow from one another, orders, prices, and clear
refusals."""

import json

import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.planning.compare_clusters import clusters_named, compare_clusters
from perfmodel.planning.goodput import Reliability
from perfmodel.planning.layouts import Tariff
from perfmodel.planning.training_run import training_run

WORDS = {"devices": 8, "global_batch": 32, "tokens": 1e11}


@pytest.fixture(scope="module")
def compared():
    return compare_clusters(
        "gpt3-1.3b", ["h100", "b200", "mi300x", "tpu-v5p"], prices={"mi300x": 2.5}, pue=1.2, **WORDS
    )


def test_every_kind_of_accelerator_has_its_best_layout(compared):
    assert {plan.prediction.cluster for plan in compared.plans} == {
        "dgx-h100",
        "hgx-b200",
        "mi300x-platform",
        "tpu-v5p-pod",
    }
    assert not compared.impossible
    for plan in compared.plans:
        best = pm.search(
            "gpt3-1.3b", plan.prediction.cluster, devices=8, global_batch=32, top=1
        ).layouts[0]
        assert (plan.prediction.layout, plan.prediction.step_time_s) == (
            best.layout,
            best.step_time_s,
        )


def test_figures_follow_from_the_step_time(compared):
    for plan in compared.plans:
        row, p = plan.to_dict(), plan.prediction
        steps = 1e11 / (32 * 2048)
        days = steps * p.step_time_s / row["goodput"]["fraction"] / 86400
        assert row["days"] == pytest.approx(days)
        assert row["days_lo"] / days == pytest.approx(p.step_time_lo_s / p.step_time_s)
        assert row["days_hi"] / days == pytest.approx(p.step_time_hi_s / p.step_time_s)
        assert row["cost_usd"] == pytest.approx(days * 24 * 8 * row["usd_per_device_hour"])
        assert row["usd_per_million_tokens"] == pytest.approx(row["cost_usd"] / 1e5)
        device = catalog.cluster(p.cluster).device
        if device.power_w is None:
            assert row["energy_j"] is None
            continue
        idle_w = device.power_w if row["energy_is_bound"] else device.idle_power_w
        mean_w = idle_w + (device.power_w - idle_w) * p.time_account.busy_fraction
        assert row["energy_mwh"] == pytest.approx(1.2 * 8 * mean_w * days * 24 / 1e6)
        assert row["energy_is_bound"] == (device.idle_power_w is None)


def test_prices_are_given_listed_or_not_there(compared):
    prices = {
        plan.prediction.cluster: (plan.run.usd_per_device_hour, plan.run.price_source)
        for plan in compared.plans
    }
    assert prices["mi300x-platform"] == (2.5, "given")
    assert prices["dgx-h100"] == (10.0, catalog.device("h100").price_source)
    unpriced = compare_clusters("gpt3-1.3b", ["mi325x", "a100"], **WORDS)
    assert [plan.run.cost_usd for plan in unpriced.plans][1] is None  # comes last
    assert unpriced.plans[1].run.price_source == ""


@pytest.mark.parametrize(
    ("by", "key"),
    [
        ("cost", "usd_per_million_tokens"),
        ("time", "days"),
        ("energy", "energy_per_million_tokens_j"),
    ],
)
def test_the_order_is_that_of_what_was_asked(by, key):
    rows = compare_clusters(
        "gpt3-1.3b", ["tpu-v5p", "a100", "h100", "b200"], by=by, **WORDS
    ).to_dict()["clusters"]
    known = [row[key] for row in rows if row[key] is not None]
    assert known == sorted(known)
    assert all(row[key] is None for row in rows[len(known) :])


def test_every_list_price_has_its_source():
    for name in catalog.devices():
        device = catalog.device(name)
        assert (device.usd_per_hour is None) == (not device.price_source)


def test_clusters_have_numbers_of_devices():
    found = clusters_named(["h100:16", "aws-p5", "H100-SXM5-80GB:16"], [8, 32])
    assert [(cluster.name, n) for cluster, n in found] == [
        ("dgx-h100", 16),
        ("aws-p5", 8),
        ("aws-p5", 32),
        ("H100-SXM5-80GB", 16),
    ]


@pytest.mark.parametrize(
    ("clusters", "words", "error", "message"),
    [
        (["h100"], {"by": "price"}, UnknownNameError, "unknown order of clusters 'price'.*cost"),
        (
            ["h100"],
            {"prices": {"b200": 3.0}},
            UnknownNameError,
            "unknown cluster or device of a price 'b200'",
        ),
        (["h1000"], {}, UnknownNameError, "unknown cluster 'h1000'.*h100"),
        (["h100"], {"devices": None}, PerfModelError, "number of devices of dgx-h100 is missing"),
        ([], {}, PerfModelError, "no cluster is named"),
        (["h100:8", "h100:8"], {}, PerfModelError, "dgx-h100 with 8 devices is named 2 times"),
        (["dgx-h100", "h100"], {}, PerfModelError, "dgx-h100 with 8 devices is named 2 times"),
        (["h100"], {"devices": [8, 4, 8]}, PerfModelError, "named 2 times"),
        (["h100"], {"pue": 0.9}, PerfModelError, "pue .* at least 1"),
        (["h100"], {"tokens": 0}, PerfModelError, "tokens must be above 0"),
        (["v100-100g:1"], {}, LayoutError, "v100-100g:1: .*memory"),
    ],
)
def test_what_cannot_be_compared_is_said(clusters, words, error, message):
    with pytest.raises(error, match=message):
        compare_clusters("gpt3-1.3b", clusters, **WORDS | words)


def test_a_cluster_that_cannot_run_the_job_leaves_the_others():
    found = compare_clusters(
        "gpt3-1.3b", ["v100-100g:1", "v100-100g:8", "h100:8"], dtype="bf16", global_batch=32
    )
    assert [plan.prediction.cluster for plan in found.plans] == ["dgx-h100"]
    assert list(found.impossible) == ["v100-100g:1", "v100-100g:8"]
    assert "has no bf16" in found.impossible["v100-100g:8"]
    assert found.plans[0].run.days is None


def test_failures_make_a_run_dearer():
    problem = pm.problem("gpt3-1.3b", "h100", global_batch=32)
    p = pm.predict(problem, layout="dp=8")
    of = {"tariff": Tariff(tokens=1e12)}
    usual = training_run(p, problem, **of)
    worse = training_run(p, problem, **of, reliability=Reliability(device_mtbf_s=86400.0))
    assert usual.cost_usd is not None
    assert worse.cost_usd == pytest.approx(
        usual.cost_usd * usual.goodput.fraction / worse.goodput.fraction
    )
    assert worse.cost_usd > 1.1 * usual.cost_usd


JOB = ["--global-batch", "32", "--tokens", "1e11"]


def test_the_command_prints_for_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        main(["compare-clusters", "gpt3-1.3b", "--clusters", "h100,mi300x", "--devices", "8", *JOB])
        == 0
    )
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("next: "))
    for words in (
        "cheapest first",
        "$/Mtok",
        "MWh",
        "a failure every",
        "Oracle Cloud",
        "next: perfmodel predict --model gpt3-1.3b",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("model", "heading", "heads"),
    [
        ("resnet-50", "global batch of 512 images, 1B images; cheapest", ("$/M images", "MWh")),
        ("vit-b-16", "global batch of 512 images (197 tokens each), 5.08M images (1B tokens)", ()),
    ],
)
def test_models_of_images_are_compared_by_images(model, heading, heads, capsys):
    flags = ["--devices", "8", "--global-batch", "512", "--tokens", "1e9"]
    assert main(["compare-clusters", model, "--clusters", "h100,a100", *flags]) == 0
    out = capsys.readouterr().out
    # The head wraps at the width of the terminal.
    assert " ".join(out.split()).startswith(f"{model}, {heading}")
    assert all(head in out for head in heads)
    assert "images/s" in out
    assert "Mtok" not in out

    # The price of a million images is that of their tokens; JSON counts tokens.
    assert main(["compare-clusters", model, "--clusters", "h100", *flags, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["clusters"]
    images_per_s = 512 / record["step_time_s"]
    assert record["tokens_per_s"] == pytest.approx(images_per_s * (197 if model[0] == "v" else 1))


def test_the_command_takes_job_flags_and_json(capsys):
    argv = [
        "compare-clusters",
        "--model",
        "gpt3-1.3b",
        "--clusters",
        "h100:8",
        "--fix",
        "tp=2",
        "--price",
        "h100=2.5",
    ]
    assert main([*argv, *JOB, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["clusters"]
    assert row["layout"].startswith("tp=2,")
    assert row["usd_per_device_hour"] == 2.5
    assert 0 < row["goodput"]["fraction"] < 1


@pytest.mark.parametrize(
    "flag", [["--price", "h100"], ["--mtbf", "-1"], ["--storage", "0"], ["--pue", "0.5"]]
)
def test_bad_flags_are_one_line(flag, capsys):
    assert main(["compare-clusters", "gpt3-1.3b", "--clusters", "h100:8", *JOB, *flag]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_number_of_devices_that_is_none_is_named(capsys):
    assert main(["compare-clusters", "gpt3-1.3b", "--clusters", "h100:x", *JOB]) == 2
    assert (
        "'h100:x': no number of devices after the colon; write h100:256" in capsys.readouterr().err
    )


def test_predict_and_search_say_days_and_cost(capsys):
    where = ["--model", "gpt3-1.3b", "--cluster", "h100", *JOB]
    assert main(["predict", *where, "--layout", "dp=8", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert (
        main(
            [
                "search",
                *where,
                "--devices",
                "8",
                "--fix",
                "tp=1,pp=1,zero=0,recompute=none",
                "--json",
            ]
        )
        == 0
    )
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    same = next(found for found in layouts if found["step_time_s"] == one["step_time_s"])
    assert {k: same[k] for k in ("days", "cost_usd", "goodput")} == {
        k: one[k] for k in ("days", "cost_usd", "goodput")
    }
    assert main(["predict", *where, "--layout", "dp=8"]) == 0
    assert "for all tokens (100B; 90 %: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "images"),
    [("resnet-50", "1B images (90 %"), ("vit-b-16", "5.08M images (1B tokens;")],
)
def test_runs_of_models_of_images_are_counted_in_images(model, images, capsys):
    job = ["--model", model, "--cluster", "dgx-h100"]
    run = [*job, "--global-batch", "512", "--layout", "dp=8", "--tokens", "1e9"]
    assert main(["predict", *run]) == 0
    assert f"for {images}" in " ".join(capsys.readouterr().out.split())

    # The table has images; JSON keeps its quantities, which count tokens.
    search = ["search", *job, "--devices", "8", "--top", "1", "--fix", "micro_batch=8"]
    several = [*search, "--global-batch", "256,512"]
    assert main(several) == 0
    out = capsys.readouterr().out
    (heads,) = (line for line in out.splitlines() if line.startswith("#"))
    assert "images/s" in heads
    assert "tokens/s" not in out
    assert main([*search, "--global-batch", "512", "--objective", "cost"]) == 0
    assert "those of a million images" in " ".join(capsys.readouterr().out.split())
