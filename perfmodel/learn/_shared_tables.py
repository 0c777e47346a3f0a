"""The public measurement tables: which files hold kernels that may be fitted, and their fingerprints."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd
from jaxtyping import Float64

from perfmodel.errors import TableError
from perfmodel.learn._inputs import machine_of, one_hot, shape_with_flags
from perfmodel.learn._kinds import KindCode
from perfmodel.learn._physics import PHYSICS
from perfmodel.learn._tables import Samples

NOT_KERNELS: Final = (
    "collective", "moe_alltoall", "suspect_", "composite", "layers", "forward_layers", "e2e", "edges", "rnn",
)  # fmt: skip
"""File name prefixes of tables that hold no kernels, or rows not to be fitted."""
UNLICENSED: Final = ("alps_gh200",)
"""Folders whose source states no licence: for validation only."""


def kernel_table_paths(folder: Path | str) -> list[Path]:
    """Licensed kernel tables under a folder of measurement tables (one sub-folder per source), sorted.

    Raises:
        TableError: if there are none.
    """
    found = [p for p in sorted(Path(folder).glob("*/*.csv.gz")) if not p.name.startswith(NOT_KERNELS)]
    paths = [p for p in found if p.parent.name not in (*UNLICENSED, "published")]
    if not paths:
        raise TableError(f"{folder}: no measurement tables found; name the folder that has one sub-folder per source")
    return paths


def table_hashes(tables: Iterable[Path | str | pd.DataFrame]) -> dict[str, str]:
    """SHA-256 of every table by `folder/name` (`frame <index>` for frames), for the weights file's record."""
    hashes = {}
    for index, table in enumerate(tables):
        if isinstance(table, pd.DataFrame):
            hashes[f"frame {index}"] = hashlib.sha256(table.to_csv(index=False).encode()).hexdigest()
        else:
            hashes["/".join(Path(table).parts[-2:])] = hashlib.sha256(Path(table).read_bytes()).hexdigest()
    return hashes


def tree_features(samples: Samples, *, with_software: bool) -> Float64[np.ndarray, "n F"]:
    """Inputs of the tree baseline: log shapes, FLOPs and bytes, device figures, kind (and stack)."""
    machine = machine_of([s.figures for s in samples.stacks], samples.stack, samples.dtypes)
    physics = PHYSICS[samples.rows.family](np, shape_with_flags(samples.rows), machine)
    columns = [np.log2(1.0 + v) for v in samples.rows.shape.values()]
    columns += [np.log2(physics.flops), np.log2(physics.bytes), *(np.log2(figure) for figure in machine)]
    code = one_hot(KindCode.of(sorted(set(samples.rows.kind.tolist()))), samples.rows.kind)
    extra = [samples.stack.astype(np.float64)] if with_software else []
    return np.column_stack([*columns, code, *extra])
