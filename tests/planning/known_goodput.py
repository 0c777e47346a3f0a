"""Goodput, checkpoints, cost and energy of runs of several kinds, kept in `known_goodput.csv`.

Step times are given, so that no prediction is among what is stored. A change that is meant to move
it is followed by

    PYTHONPATH=tests python tests/planning/known_goodput.py
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.planning.goodput import Reliability, best_interval_s, goodput, goodput_fraction
from perfmodel.planning.layouts import Tariff
from perfmodel.planning.training_run import TrainingRun, run_lines, training_run
from perfmodel.prediction import Prediction, predict
from perfmodel.spec import Cluster, Job, Layout, Problem

TABLE = Path(__file__).with_suffix(".csv")
MIXED = Cluster.of_kinds(
    "mixed",
    [
        replace(catalog.cluster(name), name=name[-4:], max_devices=512)
        for name in ("dgx-a100", "dgx-h100")
    ],
)
JOB = Job(global_batch=256, seq_len=4096)
RUNS: dict[str, tuple[str, Cluster, Layout]] = {
    "dense": ("llama3-8b", catalog.cluster("dgx-h100"), Layout(tp=2, pp=4, dp=32, zero=1)),
    "experts": ("mixtral-8x7b", catalog.cluster("dgx-a100"), Layout(pp=4, dp=64, ep=8)),
    "asynchronous": (
        "gpt3-1.3b",
        catalog.cluster("dgx-a100"),
        Layout(pp=8, dp=2, schedule="pipedream"),
    ),
    "two kinds of nodes": ("llama3-8b", MIXED, Layout(tp=4, pp=2, dp=8)),
}
RELIABILITIES: dict[str, dict[str, Any]] = {
    "fails often": {"device_mtbf_s": 3e6},
    "fails before it restarts": {"device_mtbf_s": 1e3},
    "restarts slowly": {"restart_s": 7200.0},
    "restarts at once": {"restart_s": 0.0},
    "slow storage": {"storage_bytes_per_s": 2e8},
    "asynchronous": {"asynchronous": True},
    "asynchronous, slow storage": {"asynchronous": True, "storage_bytes_per_s": 2e8},
    "stated interval": {"interval_s": 900.0},
    "short interval": {"interval_s": 1.0},
    "by stage": {"by_stage": True},
    "by stage, asynchronous": {"by_stage": True, "asynchronous": True, "storage_bytes_per_s": 1e9},
}
TARIFFS: dict[str, dict[str, Any]] = {
    "tokens": {"tokens": 1e12},
    "price": {"tokens": 3e11, "price_per_device_hour": 2.5},
    "power": {"tokens": 3e11, "power_w": 650.0, "idle_power_w": 120.0},
    "power alone": {"power_w": 400.0},
}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers of a record and of the records in it, by their path; without those that are 0."""
    figures: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            figures |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            figures |= _flat({str(i): entry for i, entry in enumerate(value)}, f"{prefix}{name}.")
        elif isinstance(value, int | float) and value:
            figures[f"{prefix}{name}"] = float(value)
    return figures


def cases() -> Iterator[StoredCase]:
    """Closed forms, then every run with every reliability and tariff."""
    for stall_s, mtbf_s in product((0.1, 30.0, 2000.0), (500.0, 1e5)):
        best_s = best_interval_s(stall_s, mtbf_s)
        fractions = {
            f"{hidden_s:g}": goodput_fraction(best_s, stall_s, hidden_s, 100.0, mtbf_s)
            for hidden_s in (0.0, 90.0)
        }
        name = f"stall {stall_s:g} mtbf {mtbf_s:g}"
        yield StoredCase(name, name, {"best": best_s} | fractions)
    for base, (model, cluster, layout) in RUNS.items():
        problem = Problem(
            model=catalog.model(model), cluster=cluster, job=JOB, devices=layout.devices
        )
        for name, fields in ({base: {}} | RELIABILITIES).items():
            try:
                figures = goodput(problem, layout, 12.5, Reliability(**fields)).to_dict()
            except PerfModelError:
                continue
            yield StoredCase(base, name, _flat(figures))
    model, cluster, layout = RUNS["dense"]
    problem = Problem(model=catalog.model(model), cluster=cluster, job=JOB, devices=layout.devices)
    prediction = replace(
        predict(problem, layout=layout), step_time_s=10.0, step_time_lo_s=8.0, step_time_hi_s=13.0
    )
    prediction = replace(
        prediction, time_account=replace(prediction.time_account, busy_fraction=0.75)
    )
    for name, fields in TARIFFS.items():
        run = training_run(prediction, problem, tariff=Tariff(**fields), pue=1.2)
        yield StoredCase("tokens", name, _figures_of_run(run, prediction))
    by_stage = training_run(
        prediction,
        problem,
        tariff=Tariff(**TARIFFS["tokens"]),
        reliability=Reliability(by_stage=True, device_mtbf_s=4e7, storage_bytes_per_s=3e9),
    )
    yield StoredCase("tokens", "checkpoints by stage", _figures_of_run(by_stage, prediction))


def _figures_of_run(run: TrainingRun, prediction: Prediction) -> dict[str, float]:
    """Numbers of a run, and its lines as a name that counts one each."""
    figures = _flat(vars(run) | {"goodput": run.goodput.to_dict(), "mwh": run.energy_mwh})
    for line in run_lines(run, prediction):
        figures[f"line.{'-'.join(line.replace('=', ':').split())}"] = 1.0
    return figures | {f"price.{run.price_source}".replace(" ", "-"): 1.0}


if __name__ == "__main__":
    write_cases(TABLE, cases())
