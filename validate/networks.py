"""What collectives of cluster measurements say of rings on AWS EFA and of contention on Omni-Path.

python validate/networks.py --data DIR

Prints the constants of `perfmodel/catalog/networks/_clusters.py`.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel import catalog
from perfmodel.cost import CollectiveModel
from perfmodel.ingest import published_collectives
from perfmodel.ops import Collective

OMNI_PATH_NODE_GB = 4 * 12.5
"""Four links of 100 Gbit/s."""


def main() -> None:
    """Print the constants."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    # All kinds of links are in one table.
    file = arguments.parse_args().data / "published" / "collectives.csv"
    print(f"EFA latency per rank: {rank_latency_s(file) * 1e6:.0f} us")
    share, exponent = omni_path(file)
    print(f"Omni-Path: share delivered {share:.2f}, contention {exponent:.2f}")


def rank_latency_s(file: Path) -> float:
    """Median of what collectives take beyond the collective model for each rank but one."""
    table = _table(file, "EFA")
    # The collective model as it is without this constant.
    cluster = catalog.cluster_for("H100-SXM5-80GB", 8, "NVLink4", "AWS EFA")
    modelled_s = CollectiveModel.load().times(cluster, _ops(table)).time_s
    # A ring of n ranks passes n - 1 messages on one after another, each with a latency.
    beyond_s = table["time_us"] * 1e-6 - modelled_s
    return float(np.median(beyond_s / (table["num_ranks"] - 1)))


def omni_path(file: Path) -> tuple[float, float]:
    """Share of the links' rate and exponent of the nodes, both beside what the collective model
    says of these links: the exponent of the one pair that differs in nodes alone, and the median
    over all of the share that is left."""
    table = _table(file, "Omni-Path")
    predicted_s = np.array([_predicted_s(table.loc[[row]]) for row in table.index])
    rate = predicted_s / (table["time_us"].to_numpy() * 1e-6)
    nodes = table["num_nodes"].to_numpy(float)

    # Contention as a power of the number of nodes: its exponent is the slope between two points.
    rate_of_4_nodes = rate[(table["variant"] == "jz-v100-n4").to_numpy()][0]
    rate_of_16_nodes = rate[(table["variant"] == "jz-v100-n16").to_numpy()][0]
    exponent = float(np.log(rate_of_4_nodes / rate_of_16_nodes) / np.log(16 / 4))
    return float(np.median(rate * nodes**exponent)), exponent


def _table(file: Path, link: str) -> pd.DataFrame:
    """Collectives between nodes over a kind of link."""
    table = published_collectives(pd.read_csv(file))
    return table.loc[
        (table["num_nodes"] > 1) & table["interconnect"].str.contains(link)
    ].reset_index(drop=True)


def _ops(table: pd.DataFrame) -> list[Collective]:
    """The rows of a table as operations that the collective model prices."""
    columns = zip(
        table["collective"],
        table["bytes"],
        table["num_ranks"],
        table["ranks_per_node"],
        strict=True,
    )
    return [
        Collective(
            collective=kind,
            bytes=float(size),
            num_ranks=int(ranks),
            ranks_per_node=int(per_node),
            level=1,
        )
        for kind, size, ranks, per_node in columns
    ]


def _predicted_s(row: pd.DataFrame) -> float:
    """Time of one measured all-reduce by the collective model, over links at their nominal rate."""
    per_node = int(row["ranks_per_node"].iloc[0])
    shared = catalog.cluster_for(row["device"].iloc[0], per_node, "", "Omni-Path, 4 links per node")
    # Nominal: what is asked is what share of it arrives.
    link = replace(
        shared.levels[1], bandwidth_bytes_per_s=OMNI_PATH_NODE_GB * 1e9 / per_node, contention=0.0
    )
    nominal = replace(shared, levels=(shared.levels[0], link))
    return float(CollectiveModel.load().times(nominal, _ops(row)).time_s[0])


if __name__ == "__main__":
    main()
