"""Time of collectives: a physical curve with fitted constants, a learned residual, measured corrections."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel.cost._alpha_beta import Groups, share_between_nodes, shifted_hops
from perfmodel.cost._events import EventTimes
from perfmodel.learn import (
    CollectiveWeights,
    LinkConstants,
    collective_curve,
    link_class,
    load_collective_weights,
    predict_collective_table,
    reference_vectors,
)
from perfmodel.spec import Cluster, Collective


class CollectiveModel:
    """Predicts all_reduce, all_gather, reduce_scatter, all_to_all, send_recv and broadcast."""

    def __init__(self, weights: CollectiveWeights) -> None:
        self.weights = weights
        self._reference = lru_cache(maxsize=256)(self._fresh_reference)

    @classmethod
    def load(cls, calibration: Path | None = None) -> "CollectiveModel":
        """The shipped model, or the one that `perfmodel fit` left in folder `calibration`.

        Raises:
            CalibrationError: if the weights are missing, truncated or of another schema version.
        """
        return cls(load_collective_weights(calibration))

    def times(self, cluster: Cluster, ops: Sequence[Collective]) -> EventTimes:
        """Time of each op alone on the network but for its `concurrent` groups; 0 for one rank.

        The constants are those measured on the cluster's device or, where it was not measured, those of its
        link class and then of relatives, scaled to the stated bandwidths; latencies move with the stated
        ones. Provenance: `measured` (this device, kind, rank count and size range), `learned` (this link
        class), `analytical` (between nodes and links of a class never measured), `extrapolated` (more ranks
        than were ever measured on such links).
        """
        n = len(ops)
        time_s, lo_s, hi_s = np.zeros(n), np.zeros(n), np.zeros(n)
        provenance = np.full(n, "measured", dtype=object)
        kinds = np.array([op.collective for op in ops], dtype=object)
        for kind in dict.fromkeys(kinds.tolist()):
            index = np.flatnonzero(kinds == kind)
            groups = Groups.of([ops[i] for i in index], cluster)
            reference = self._reference(kind, cluster)
            value, source = reference.times(groups)
            time_s[index] = value
            provenance[index] = source
            lo, hi = self._factors(source)
            lo_s[index], hi_s[index] = value * lo, value * hi
        return EventTimes(time_s, lo_s, hi_s, tuple(provenance.tolist()))

    def table_times(self, table: pd.DataFrame) -> EventTimes:
        """Times of the rows of a collective table (columns of the data README, also `moe_alltoall`).

        Rows it cannot price get NaN and `skipped: reason`; nothing is raised for them.
        """
        prediction = predict_collective_table(self.weights, table)
        return EventTimes(prediction.time_s, prediction.lo_s, prediction.hi_s, prediction.provenance)

    def _fresh_reference(self, kind: str, cluster: Cluster) -> "_Reference":
        return _Reference.of(self.weights, kind, cluster)

    def _factors(self, provenance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        factors = self.weights.notes.get("interval_factors", {})
        pairs = {name: tuple(factors.get(name, default)) for name, default in DEFAULT_INTERVALS.items()}
        table = np.array([pairs[p] for p in provenance.tolist()]).reshape(-1, 2)
        return table[:, 0], table[:, 1]


DEFAULT_INTERVALS = {
    "measured": (0.9, 1.12),
    "learned": (0.75, 1.35),
    "analytical": (0.6, 1.8),
    "extrapolated": (0.5, 2.2),
}
"""90 % interval as factors of the time where the weights hold no measured ones."""


class _Reference:
    """Constants of one kind on one cluster, per network level."""

    def __init__(self, kind: str, cluster: Cluster, intra: np.ndarray, inter: np.ndarray, known: dict) -> None:
        self.kind, self.cluster, self.intra, self.inter, self.known = kind, cluster, intra, inter, known

    @classmethod
    def of(cls, weights: CollectiveWeights, kind: str, cluster: Cluster) -> "_Reference":
        names = (cluster.device.name, *cluster.device.aliases)
        found = reference_vectors(weights, kind, names, tuple(level.name for level in cluster.levels))
        return cls(kind, cluster, found.intra, found.inter, found.known)

    def times(self, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
        """Time [s] and provenance of every group."""
        cluster, device = self.cluster, self.cluster.device.name
        inner = cluster.levels[0]
        log_class = [
            np.log(link_class(level.name, device, i > 0).bandwidth_bytes_per_s)
            for i, level in enumerate(cluster.levels)
        ]
        base = LinkConstants.from_vector(self.intra)
        efficiency = np.exp(self.inter[:, 4] - np.array(log_class))
        hops = shifted_hops(cluster, np.concatenate([[base.hop_intra_s], np.exp(self.inter[1:, 2])]))
        constants = LinkConstants(
            launch_s=base.launch_s,
            hop_intra_s=hops[0],
            hop_inter_s=hops[groups.level],
            bandwidth_intra=base.bandwidth_intra * inner.bandwidth_bytes_per_s / np.exp(log_class[0]),
            bandwidth_inter=share_between_nodes(groups, cluster) * efficiency[groups.level],
            low_latency_share=base.low_latency_share,
            bandwidth_hop_ratio=base.bandwidth_hop_ratio,
            peer_exponent=base.peer_exponent,
        )
        time_s = np.asarray(
            collective_curve(self.kind, groups.buffer_bytes, groups.ranks, groups.ranks_per_node, constants)
        )
        return time_s * (groups.ranks > 1), self._provenance(groups)

    def _provenance(self, groups: Groups) -> np.ndarray:
        inside = groups.ranks <= groups.ranks_per_node
        size = groups.buffer_bytes
        exact = (
            inside
            & np.isin(groups.ranks, self.known["ranks"])
            & (size >= self.known["low_bytes"])
            & (size <= self.known["high_bytes"])
        )
        result = np.full(len(size), "extrapolated", dtype=object)
        result[groups.ranks <= self.known["most_ranks_between"]] = "analytical"
        result[inside] = "learned" if self.known["link"] else "analytical"
        result[exact] = "measured"
        result[groups.ranks <= 1] = "measured"
        return result
