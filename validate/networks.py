"""What collectives of cluster measurements say of contention on AWS EFA and Omni-Path.

python validate/networks.py --data DIR

Prints the constants of `perfmodel/catalog/_words.py`.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import catalog
from perfmodel.cost import CollectiveModel
from perfmodel.ops import Collective

OMNI_PATH_NODE_GB = 4 * 12.5
"""Four links of 100 Gbit/s."""


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    file = arguments.parse_args().data / "published" / "collectives.csv"
    print(f"EFA contention: {contention(file):.2f}")
    share, exponent = omni_path(file)
    print(f"Omni-Path: share delivered {share:.2f}, contention {exponent:.2f}")


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
    """Share of the links' rate and exponent of the nodes, both beside what the collective model says of these links:
    the exponent of the one pair that differs in nodes alone, and the median over all of the share that is left."""
    table = pd.read_csv(file)
    table = table[table["link"].str.contains("Omni-Path") & (table["collective"] == "all_reduce")]
    table = table[table["n_nodes"] > 1]
    rate = table["busbw_GBps"].to_numpy(float) / [_omni_path_bus_gb(row) for row in table.itertuples()]
    nodes = table["n_nodes"].to_numpy(float)
    (few, many) = (rate[(table["id"] == name).to_numpy()][0] for name in ("jz-v100-n4", "jz-v100-n16"))
    exponent = float(np.log(few / many) / np.log(16 / 4))
    return float(np.median(rate * nodes**exponent)), exponent


def _omni_path_bus_gb(row: Any) -> float:
    """Bus bandwidth of a measured all-reduce by the collective model, over links at their nominal rate."""
    per_node = row.n_devices // row.n_nodes
    shared = catalog.cluster_for(row.device, per_node, "", "Omni-Path, 4 links per node")
    link = replace(shared.levels[1], bandwidth_bytes_per_s=OMNI_PATH_NODE_GB * 1e9 / per_node, contention=0.0)
    op = Collective(
        collective="all_reduce", bytes=float(row.size_bytes), num_ranks=row.n_devices, ranks_per_node=per_node, level=1
    )
    time_s = CollectiveModel.load().times(replace(shared, levels=(shared.levels[0], link)), [op]).time_s[0]
    return 2 * (row.n_devices - 1) / row.n_devices * row.size_bytes / 1e9 / time_s


if __name__ == "__main__":
    main()
