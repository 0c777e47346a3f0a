"""How far apart the ranks of a group reach a collective, where hosts drive them one operator at a time.

A collective begins when the last of its ranks is there. Tables time it with all ranks at hand; in a step each rank
comes from kernels and a host of its own. What published runs show of it differs between sites, so a prediction takes
the median over the sources, with 0 among them, as for the clock under load (`_sustained`).
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from statistics import median
from types import MappingProxyType

from perfmodel.prediction._sustained import source_group

FILE_NAME = "skew.json"


@lru_cache
def source_skews() -> Mapping[str, float]:
    """By source the median spread in seconds that makes its runs take what was measured; made by
    `perfmodel fit --sites`."""
    return MappingProxyType(json.loads((files("perfmodel.prediction") / FILE_NAME).read_text()))


@lru_cache
def skew_s(without: str = "") -> float:
    """The spread that all published sources show but the group that `without` is of."""
    return skew_from(source_skews(), without)


def skew_from(skews: Mapping[str, float], without: str = "") -> float:
    """The median over groups of sources, and 0, of spreads by source (as `source_skews`), without a group."""
    by_group: dict[str, list[float]] = defaultdict(list)
    for name, value in skews.items():
        by_group[source_group(name)].append(value)
    by_group.pop(source_group(without) if without else "", None)
    return max(0.0, median([0.0, *(median(values) for values in by_group.values())]))
