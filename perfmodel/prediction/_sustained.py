"""How much longer matrix products take in training than alone, by architecture, where no power law says it.

Kernel tables time a kernel by itself, on a cool device and at its highest clock. A training step runs products one
after another, and the power limit lowers the clock under them: `perfmodel.cost.sustained_seconds` where power and
energy of a die were measured. Elsewhere published runs show something of it, which differs between sites and
frameworks, so that a prediction takes the median over the sources, with the tables' own 0 among them: one source
cannot move it far, and a source can be left out of the constant that its own rows are held against.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from statistics import median
from types import MappingProxyType

Sustained = tuple[tuple[str, float], ...]
"""(architecture, log of the time in training over the time alone)."""
FILE_NAME = "sustained.json"


@lru_cache
def source_medians() -> Mapping[str, Mapping[str, float]]:
    """By architecture and source, the median of log(measured / predicted) over the share of products in the
    step; made by `perfmodel fit --sites`."""
    text = (files("perfmodel.prediction") / FILE_NAME).read_text()
    return MappingProxyType(json.loads(text))


@lru_cache
def sustained(without: str = "") -> Sustained:
    """Constants from all published sources but the group that `without` is of."""
    return sustained_from(source_medians(), without)


def sustained_from(medians: Mapping[str, Mapping[str, float]], without: str = "") -> Sustained:
    """Constants from medians by architecture and source (as `source_medians`), without a group of sources."""
    left_out = source_group(without) if without else None
    found = []
    for architecture, of in sorted(medians.items()):
        by_group: dict[str, list[float]] = defaultdict(list)
        for name, value in of.items():
            by_group[source_group(name)].append(value)
        by_group.pop(left_out or "", None)
        found.append((architecture, max(0.0, median([0.0, *(median(values) for values in by_group.values())]))))
    return tuple(found)


def source_group(source: str) -> str:
    """Sources of one team and framework, which count as one: they are named by the first word of the title."""
    return source.lower().replace("-", " ").split()[0]
