"""Time of collectives: a physical curve with fitted constants, a learned residual, measured corrections."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from perfmodel.cost._alpha_beta import Groups
from perfmodel.cost._coll_reference import Reference
from perfmodel.cost._events import EventTimes
from perfmodel.learn import CollectiveWeights, load_collective_weights, predict_collective_table
from perfmodel.spec import Cluster, Collective

INTERVALS: Final = {"measured": 0.12, "learned": 0.3, "analytical": 0.5, "extrapolated": 0.7}
"""Half-width of the 90 % interval in log time by provenance. `measured`: tables of one machine differ by this
between library versions and boards; `learned`: at least this, else what rank counts left out taught. Between
nodes (`analytical`, `extrapolated`): what covers 85 to 90 % of two machines never fitted, Alps (4 to 1024 GH200)
and an H100 cluster on EFA (8 to 512), whose own runs spread by factors of 2 to 5."""


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
        """Time of each op, alone on the network but for its `concurrent` groups; 0 for one rank.

        The constants are those measured on the cluster's device or, where it was not measured, those of its
        link class and then of relatives, scaled to the stated bandwidths; latencies move with the stated
        ones. Provenance: `measured` (this device, kind, rank count and size range), `learned` (this link
        class), `analytical` (between nodes, and links of a class never measured), `extrapolated` (more ranks
        than were ever measured on such links).
        """
        n = len(ops)
        time_s, half = np.zeros(n), np.zeros(n)
        provenance = np.full(n, "measured", dtype=object)
        by_kind: dict[str, list[int]] = {}
        for i, op in enumerate(ops):
            by_kind.setdefault(op.collective, []).append(i)
        for kind, members in by_kind.items():
            index = np.array(members)
            reference = self._reference(kind, cluster)
            groups = Groups.of([ops[i] for i in members], reference.tiers)
            time_s[index], source = reference.times(groups)
            provenance[index] = source
            for name in set(source.tolist()):
                half[index[source == name]] = self._half_width(kind, name)
        return EventTimes(time_s, time_s * np.exp(-half), time_s * np.exp(half), tuple(provenance.tolist()))

    def table_times(self, table: pd.DataFrame) -> EventTimes:
        """Times of the rows of a collective table (columns of the data README, also `moe_alltoall`).

        Rows it cannot price get NaN and `skipped: reason`; nothing is raised for them.
        """
        prediction = predict_collective_table(self.weights, table)
        return EventTimes(prediction.time_s, prediction.lo_s, prediction.hi_s, prediction.provenance)

    def _fresh_reference(self, kind: str, cluster: Cluster) -> Reference:
        return Reference.of(self.weights, kind, cluster)

    def _half_width(self, kind: str, provenance: str) -> float:
        if provenance == "learned" and self.weights.spread:
            return max(INTERVALS[provenance], self.weights.spread_of("ranks", kind))
        return INTERVALS[provenance]
