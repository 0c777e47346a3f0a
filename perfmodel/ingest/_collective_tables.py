"""Measured collectives of public tables and benchmarks: what their cells mean, made plain once, on reading."""

import re
from typing import Final

import numpy as np
import pandas as pd

from perfmodel.ingest.tables import number, relabel, text

_IN_NETWORK: Final = re.compile(r"collnet|sharp", re.IGNORECASE)
"""Algorithms that reduce in the network's switches."""
_REPEATED: Final = re.compile(r"(^|;)(in_place|out_of_place)$|^\d+_concurrent_groups$|^allreduce(_large)?$")
"""Variants, or ends of them, that name how a run was repeated, not another way of communicating."""
_BY_LIBRARY: Final = ("", "auto")


def clean_collectives(table: pd.DataFrame) -> pd.DataFrame:
    """A table of collectives (columns of the data README) with these columns beside; once cleaned, itself.

    - `way`: how it was run, where that is another way of communicating; else `""`
    - `doubtful`: whether it counts a test for a second time (`in_place`) or is marked by a `check`
    - `reduced_in_network`: whether the network's switches add up data
    - `library_chose`: whether the algorithm was left to the library
    """
    if "way" in table:
        return table
    algorithm = text(table, "algorithm")
    return table.assign(
        way=relabel(text(table, "variant"), lambda variant: _REPEATED.sub("", variant)),
        doubtful=(number(table, "in_place", 0.0) != 0) | (text(table, "check") != ""),
        reduced_in_network=relabel(algorithm, lambda name: bool(_IN_NETWORK.search(name))).astype(bool),
        library_chose=np.isin(algorithm, _BY_LIBRARY),
    )
