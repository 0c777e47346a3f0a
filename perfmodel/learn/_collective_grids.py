"""Measured corrections on a grid of sizes, so that cluster predictions need no kriging."""

from typing import Final

import numpy as np

from perfmodel.learn._collective_predict import physical_curves, predict_rows
from perfmodel.learn._collective_table import CollectiveRows
from perfmodel.learn._collective_weights import CollectiveWeights, ReferenceGrid

STEP: Final = 0.5
"""Octaves between grid sizes."""
PREFERRED_DTYPES: Final = ("bf16", "fp16", "fp32")


def reference_grids(weights: CollectiveWeights, rows: CollectiveRows) -> dict[str, ReferenceGrid]:
    """One grid per series of the reference sources that ran inside one node: its newest software, 16 bit."""
    inside = rows.ranks <= rows.ranks_per_node
    grids = {}
    for series in weights.series:
        source, _, _, _, algorithm, _ = series.name.split("|")
        if source not in weights.reference_sources or algorithm != "auto" or not series.ranks:
            continue
        own = rows.take((rows.series == series.name) & inside)
        dtype = next((d for d in PREFERRED_DTYPES if d in own.dtype), own.dtype[0])
        stack = max(own.stack[own.dtype == dtype])
        size = np.arange(np.log2(own.buffer_bytes.min()), np.log2(own.buffer_bytes.max()) + STEP, STEP)
        ranks = np.unique(own.ranks)
        n, s = np.meshgrid(ranks, size, indexing="ij")
        query = _query(series.name, series.name.split("|")[3], stack, dtype, 2.0 ** s.ravel(), n.ravel())
        time_s, _, _ = predict_rows(weights, query)
        curve_s, _ = physical_curves(query, weights.series)
        grids[series.name] = ReferenceGrid(ranks, size, np.log(time_s / curve_s).reshape(n.shape))
    return grids


def _query(series: str, kind: str, stack: str, dtype: str, size: np.ndarray, ranks: np.ndarray) -> CollectiveRows:
    def text(value: str) -> np.ndarray:
        return np.full(len(size), value, dtype=object)

    return CollectiveRows(
        kind=text(kind), series=text(series), stack=text(stack), dtype=text(dtype), buffer_bytes=size,
        ranks=ranks, ranks_per_node=ranks, time_s=np.full(len(size), np.nan), skipped=text(""),
    )  # fmt: skip
