"""Measured collectives of public tables and benchmarks: what their cells mean, made plain once, on reading."""

import re
from typing import Final

import numpy as np
import pandas as pd

from perfmodel.ingest.tables import number, relabel, text

_HELD_TO: Final = (
    ("collnet", re.compile(r"collnet|sharp", re.IGNORECASE)),
    ("nvls_tree", re.compile(r"^nvls_?tree$", re.IGNORECASE)),
    ("nvls", re.compile(r"^nvls$", re.IGNORECASE)),
    ("tree", re.compile(r"^tree$", re.IGNORECASE)),
    ("ring", re.compile(r"^ring$", re.IGNORECASE)),
)
"""Algorithms that a run may be held to, as NCCL names them, with the cells that say so."""
_REPEATED: Final = re.compile(r"(^|;)(in_place|out_of_place)$|^\d+_concurrent_groups$|^allreduce(_large)?$")
"""Variants, or ends of them, that name how a run was repeated, not another way of communicating."""
_HARMLESS: Final = ("", "rounded_busbw", "above_nic_rate_by_in_network_reduction", "device_inferred")
"""Checks that leave a row fit for use."""
_BY_LIBRARY: Final = ("", "auto")


def clean_collectives(table: pd.DataFrame) -> pd.DataFrame:
    """A table of collectives (columns of the data README) with these columns beside; once cleaned, itself.

    - `way`: how it was run, where that is another way of communicating; else `""`
    - `doubtful`: whether it counts a test for a second time (`in_place`) or a `check` names a defect
    - `held_to`: the algorithm that the library was held to (`ring`, `tree`, `nvls`, `nvls_tree`, `collnet`), else `""`
    - `library_chose`: whether the algorithm was left to the library
    """
    if "way" in table:
        return table
    algorithm = text(table, "algorithm")
    return table.assign(
        way=relabel(text(table, "variant"), lambda variant: _REPEATED.sub("", variant)),
        doubtful=(number(table, "in_place", 0.0) != 0) | relabel(text(table, "check"), _defective).astype(bool),
        held_to=relabel(algorithm, _held_to),
        library_chose=np.isin(algorithm, _BY_LIBRARY),
    )


def published_collectives(table: pd.DataFrame) -> pd.DataFrame:
    """Published bus bandwidths (`busbw_GBps`, `n_devices`, `n_nodes`, `link`) with the columns of a collective table.

    Percentiles (`id` ends in `5th` or `95th`) are dropped.
    """
    table = table.loc[~table["id"].str.contains(r"-(?:5|95)th$")]
    ranks, size = table["n_devices"].astype(float), table["size_bytes"].astype(float)
    moved = np.where(table["collective"] == "all_reduce", 2, 1) * (ranks - 1) / ranks * size
    adapters = table["link"].str.extract(r"(\d+) links per node", expand=False).astype(float)
    return pd.DataFrame({
        "source": "published", "device": table["device"], "interconnect": table["link"],
        "collective": table["collective"], "algorithm": "auto", "num_ranks": ranks, "num_nodes": table["n_nodes"],
        "ranks_per_node": ranks / table["n_nodes"], "bytes": size, "time_us": moved / table["busbw_GBps"] / 1e3,
        "nics_per_node": adapters, "variant": table["id"],
    }).reset_index(drop=True)  # fmt: skip


def _defective(check: str) -> bool:
    return not all(part in _HARMLESS for part in check.split(";"))


def _held_to(name: str) -> str:
    return next((known for known, cell in _HELD_TO if cell.search(name)), "")
