"""Fitting of collective models from measurement tables."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from perfmodel.errors import TableError
from perfmodel.learn._collective_constants import fit_series
from perfmodel.learn._collective_table import collective_rows
from perfmodel.learn._collective_weights import FILE_NAME, CollectiveWeights, save_collective_weights


def fit_collectives(
    tables: Sequence[pd.DataFrame],
    out: Path,
    seed: int = 0,
    *,
    reference_sources: Sequence[str] = (),
    unhealthy: Sequence[str] = (),
) -> CollectiveWeights:
    """Fit constants, residual and corrections to tables of collectives and write `out/collectives.safetensors`.

    Raises:
        TableError: if no row of the tables can be used.
    """
    table = pd.concat([t for t in tables], ignore_index=True)
    rows = collective_rows(table)
    usable = (rows.skipped == "") & np.isfinite(rows.time_s) & (rows.time_s > 0) & (rows.ranks > 1)
    if not usable.any():
        raise TableError("no usable collective row: bytes, num_ranks and time_us are needed in each")
    rows = rows.take(usable)
    sources = tuple(reference_sources) or tuple(pd.Series(rows.part(0)).value_counts().index)
    weights = CollectiveWeights(
        series=fit_series(rows), reference_sources=sources, unhealthy=tuple(unhealthy), notes={"seed": seed}
    )
    save_collective_weights(weights, Path(out) / FILE_NAME)
    return weights
