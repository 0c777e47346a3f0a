"""What published runs and cluster measurements say of sustained clocks and network contention.

python validate/fit_frameworks.py --data DIR

Writes perfmodel/prediction/sustained.json: by architecture and source, the median of log(measured / predicted) over
the share of the step that 16-bit products take. Predictions take the median over sources; the validation of a source
leaves its own out. Prints what collectives say of AWS EFA and Omni-Path (`perfmodel/catalog/_words.py`).
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel import catalog
from perfmodel.cost import CollectiveModel
from perfmodel.errors import PerfModelError
from perfmodel.io import write_json
from perfmodel.prediction import step_model, step_times_s
from perfmodel.spec import Collective
from perfmodel.validation import framework_of, read_case

OUT = Path(__file__).parents[1] / "perfmodel" / "prediction" / "sustained.json"
STEP = 0.1
LEAST_SHARE = 0.5
"""Of the step in 16-bit products, from which a run says something of them."""
MOST_NODES = 64
"""Up to here networks and stragglers take less of a step than products."""
LEAST_ROWS = 3
MOST_ROWS = 150
"""Of a source that are drawn (seed 0)."""
OMNI_PATH_NODE_GB = 4 * 12.5
"""Four links of 100 Gbit/s."""
UNSTATED = ("NVIDIA", "NeMo", "OneFlow DLPerf v1.0", "MaxText")
"""Sources whose tables leave recompute or the kernels to recipes, or whose device was never measured."""


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    data = arguments.parse_args().data / "published"
    runs = pd.concat([runs_of(file) for file in sorted(data.glob("*.csv"))])
    found: dict[str, dict[str, float]] = {}
    for source, rows in runs.groupby("source"):
        if str(source).startswith(UNSTATED):
            continue
        said = pd.DataFrame(evidence(rows), columns=["architecture", "log"])
        for architecture, logs in said.groupby("architecture")["log"]:
            if len(logs) >= LEAST_ROWS:
                found.setdefault(str(architecture), {})[str(source)] = round(float(logs.median()), 4)
                print(f"{architecture:10s} {source!s:50s} {len(logs):4d} {logs.median():+.3f}", flush=True)
    write_json(OUT, {name: found[name] for name in sorted(found)})
    print(f"EFA contention: {contention(data / 'collectives.csv'):.2f}")
    share, exponent = omni_path(data / "collectives.csv")
    print(f"Omni-Path: share delivered {share:.2f}, contention {exponent:.2f}")


def runs_of(file: Path) -> pd.DataFrame:
    table = pd.read_csv(file, low_memory=False)
    if "micro_batch" not in table:
        return pd.DataFrame()
    table = table[(table["status"] == "ok") & table["measured_iter_time_s"].notna()]
    table = table[table["n_devices"] <= MOST_NODES * table["devices_per_node"].fillna(8)]
    return table.groupby("source").sample(frac=1, random_state=0).groupby("source").head(MOST_ROWS)


def evidence(rows: pd.DataFrame) -> list[tuple[str, float]]:
    """(architecture, log of measured over predicted per share of products) of every run that says something."""
    said = []
    for row in rows.astype(object).where(rows.notna(), None).to_dict("records"):
        try:
            case = read_case(row)
        except PerfModelError:
            continue
        name = case.cluster.device.architecture
        framework = framework_of(str(row["source"]), case.cluster.device)
        alone, slower = (
            float(
                step_times_s(
                    step_model(case.model, case.cluster, case.job, None, replace(framework, sustained=((name, log),))),
                    [case.layout],
                )[0]
            )
            for log in (0.0, STEP)
        )
        share = np.log(slower / alone) / STEP
        if share >= LEAST_SHARE:
            said.append((name, float(np.log(float(row["measured_iter_time_s"]) / alone) / share)))
    return said


def contention(file: Path) -> float:
    """Least squares of log(predicted / measured bus bandwidth) on the log of nodes, through 1 node."""
    table = pd.read_csv(file)
    table = table[table["id"].str.endswith("-centre") & (table["n_nodes"] > 1) & table["link"].str.contains("EFA")]
    cluster = catalog.cluster_for("H100-SXM5-80GB", 8, "NVLink4", "AWS EFA")
    ops = [
        Collective(
            collective=row.collective, bytes=float(row.size_bytes), num_ranks=row.n_devices, ranks_per_node=8, level=1
        )
        for row in table.itertuples()
    ]
    ranks = table["n_devices"].to_numpy(float)
    bus = np.where(table["collective"] == "all_reduce", 2, 1) * (ranks - 1) / ranks * table["size_bytes"] / 1e9
    beyond = np.log(bus / CollectiveModel.load().times(cluster, ops).time_s / table["busbw_GBps"])
    nodes = np.log(table["n_nodes"].to_numpy(float))
    return float(nodes @ beyond / (nodes @ nodes))


def omni_path(file: Path) -> tuple[float, float]:
    """Share of the links' rate and exponent of the nodes: the exponent of the one pair that differs in nodes alone,
    and the median over all of the share that is left."""
    table = pd.read_csv(file)
    table = table[table["link"].str.contains("Omni-Path") & (table["collective"] == "all_reduce")]
    nodes, rate = table["n_nodes"].to_numpy(float), table["busbw_GBps"].to_numpy(float) / OMNI_PATH_NODE_GB
    (few, many) = (rate[(table["id"] == name).to_numpy()][0] for name in ("jz-v100-n4", "jz-v100-n16"))
    exponent = float(np.log(few / many) / np.log(16 / 4))
    return float(np.median(rate * nodes**exponent)), exponent


if __name__ == "__main__":
    main()
