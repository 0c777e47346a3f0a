"""Time of collectives: one model, asked by clusters and ops or by the rows of tables."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel.cost._events import EventTimes
from perfmodel.cost.learn import (
    MOE_KINDS,
    CollectivePrices,
    CollectiveRequest,
    CollectiveWeights,
    Fabric,
    Groups,
    WeightFiles,
    collective_rows,
    collective_weights,
    is_flat,
    is_known,
    link_class,
    moe_rows,
    predict_collective_rows,
    predict_moe,
    weight_files,
)
from perfmodel.ops import Collective
from perfmodel.session import current_session
from perfmodel.spec import Cluster


class CollectiveModel:
    """Predicts all_reduce, all_gather, reduce_scatter, all_to_all, send_recv and broadcast.

    A cluster is a fabric: a device, link classes and their rates; so is a row of a table. A row that names a measured
    series (source, software and so on) gets that series' times; any other row, and every op on a cluster, the usual
    times of its fabric. Rows and ops that mean the same get the same.
    """

    def __init__(self, weights: CollectiveWeights) -> None:
        self.weights = weights
        self._prices = CollectivePrices(weights)

    @classmethod
    def load(cls, calibration: Path | str | None = None) -> "CollectiveModel":
        """The shipped model, or the one that `perfmodel fit` left in folder `calibration`, as it is now.

        Raises:
            CalibrationError: if the weights are missing, truncated or of another schema version.
        """
        return cls.of(weight_files(calibration))

    @classmethod
    def of(cls, weights: WeightFiles) -> "CollectiveModel":
        """The model of some weights, kept by the session."""
        return current_session().cost_models.once((cls, weights), lambda: cls(collective_weights(weights)))

    def times(self, cluster: Cluster, ops: Sequence[Collective]) -> EventTimes:
        """Time of each op, alone on the network but for its `concurrent` groups; 0 for one rank.

        Never falls with bytes, ranks (inside a switched node, and with the nodes), latency or sharing, nor rises
        with bandwidth. Provenance: `measured` (this die, fabric, kind, rank count and size range), `learned`
        (this fabric, or these links on other devices), `analytical` (physics of a link class that was measured
        elsewhere), `extrapolated` (physics of links or rank counts never measured).
        """
        n = len(ops)
        time_s, half, least_s, provenance = np.zeros(n), np.zeros(n), np.zeros(n), np.full(n, "measured", dtype=object)
        fabric = Fabric.of(cluster)
        columns = np.array(
            [(op.bytes, op.num_ranks, op.ranks_per_node, op.level, op.concurrent) for op in ops], np.float64
        ).reshape(-1, 5)
        by_kind: dict[str, list[int]] = {}
        for i, op in enumerate(ops):
            by_kind.setdefault(op.collective, []).append(i)
        for kind, members in by_kind.items():
            index = np.array(members)
            priced = self._prices.price(CollectiveRequest(kind, fabric), _groups(columns[index], fabric))
            time_s[index], half[index], provenance[index] = priced.time_s, priced.half_width, priced.provenance
            least_s[index] = priced.least_s
        return _event_times(time_s, half, provenance, least_s)

    def table_times(self, table: pd.DataFrame) -> EventTimes:
        """Times of the rows of a collective table (columns of the data README, also `moe_alltoall`).

        Rows it cannot price get NaN and `skipped: reason`; nothing is raised for them.
        """
        n = len(table)
        time_s, half, provenance = np.full(n, np.nan), np.full(n, np.nan), np.full(n, "", dtype=object)
        least_s = np.zeros(n)
        is_moe = table["collective"].isin(MOE_KINDS).to_numpy() if "collective" in table else np.zeros(n, dtype=bool)
        for exchange in (False, True):
            index = np.flatnonzero(is_moe == exchange)
            if not len(index):
                continue
            rows = moe_rows(table.iloc[index]) if exchange else collective_rows(table.iloc[index])
            provenance[index] = np.array([f"skipped: {reason}" for reason in rows.skipped], dtype=object)
            at = np.flatnonzero(rows.skipped == "")
            if exchange:
                found = predict_moe(self.weights.moe, moe_rows(table.iloc[index[at]]))
            else:
                priced = predict_collective_rows(self._prices, collective_rows(table.iloc[index[at]]))
                found = priced.time_s, priced.half_width, priced.provenance
                least_s[index[at]] = priced.least_s
            time_s[index[at]], half[index[at]], provenance[index[at]] = found
        return _event_times(time_s, half, provenance, least_s)


def _event_times(time_s: np.ndarray, half: np.ndarray, provenance: np.ndarray, least_s: np.ndarray) -> EventTimes:
    lo_s = np.maximum(time_s * np.exp(-half), least_s)
    return EventTimes(time_s, lo_s, time_s * np.exp(half), tuple(provenance.tolist()))


def _groups(columns: np.ndarray, fabric: Fabric) -> Groups:
    """Groups of ops on a cluster: over at least its first network level where they leave a node."""
    size, ranks, per_node, reached, concurrent = columns.T
    last = len(fabric.levels) - 1
    level = np.clip(reached.astype(np.int64), 0, last)
    if fabric.flat:
        per_node = np.ones(len(ranks))
    else:
        per_node = np.clip(per_node, 1, ranks)
        level = np.where(ranks > per_node, np.maximum(level, min(1, last)), 0)
    return Groups(size, ranks, per_node, level, np.maximum(concurrent, 1.0))


def interconnect_of(cluster: Cluster) -> str:
    """Its links in the words of tables, with the rate where it differs from what the name says.

    Between nodes a name says the rate of an adapter, which devices may share; only a higher rate is stated.
    """
    device, words = cluster.device.name, []
    flat = is_flat([level.name for level in cluster.levels], device)
    for index, level in enumerate(cluster.levels[:2]):
        between = flat or index > 0
        nominal = link_class(level.name, device, between).bandwidth_bytes_per_s
        shared = between and is_known(level.name, device, between)
        rate = max(level.bandwidth_bytes_per_s, nominal) if shared else level.bandwidth_bytes_per_s
        name = level.name.replace("+", " ").replace("@", " ")
        told = rate == nominal and is_known(level.name, device, between)
        words.append(name if told else f"{name}@{rate / 1e9:g}GB/s")
    return " + ".join(words)
