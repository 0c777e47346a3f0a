"""What the fits say of a cluster's links: constants per network level for one collective kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perfmodel.learn._collective_constants import Series
from perfmodel.learn._collective_links import link_class
from perfmodel.learn._collective_relatives import relative_vector
from perfmodel.learn._collective_weights import CollectiveWeights


@dataclass(frozen=True)
class ReferenceVectors:
    """Constants of one kind on one cluster."""

    intra: np.ndarray
    """Constants inside the node, float64[8] (see `LinkConstants.from_vector`)."""
    inter: np.ndarray
    """Constants of each level taken as the one between nodes, float64[levels, 8]."""
    known: dict[str, Any]
    """What was measured: `ranks`, `low_bytes`, `high_bytes` on this very device; `link`, whether its link
    class was; `most_ranks_between`."""


def reference_vectors(
    weights: CollectiveWeights, kind: str, device_names: Sequence[str], level_names: Sequence[str]
) -> ReferenceVectors:
    """Constants for a device (any of its names) and its network levels, innermost first.

    Stands on the reference sources (timed on the device, without dispatch cost) wherever one has the kind.
    Between nodes only series count whose links ran near their nominal rate.
    """
    series = _of_reference_sources(weights, kind)
    measured = {s.name.split("|")[1] for s in series}
    device = next((name for name in device_names if name in measured), device_names[0])
    source = series[0].name.split("|") if series else ["", "", "", kind, "auto", ""]
    name = "|".join([source[0], device, level_names[0], kind, source[4], source[5]])
    intra, _ = relative_vector(name, series)
    healthy = [s for s in weights.series if s.ranks_between and not s.name.startswith(tuple(weights.unhealthy))]
    inter = []
    for level in level_names:
        vector, _ = relative_vector("|".join(["", device, level, kind, "auto", ""]), healthy, True)
        inter.append(vector)
    own = [s for s in series if s.name.split("|")[1] == device and s.name.split("|")[3] == kind]
    classes = {link_class(s.name.split("|")[2], s.name.split("|")[1], False).name for s in series}
    return ReferenceVectors(
        intra=intra,
        inter=np.array(inter),
        known={
            "ranks": np.array(sorted({r for s in own for r in s.ranks}), float),
            "low_bytes": min((s.low_bytes for s in own), default=np.inf),
            "high_bytes": max((s.high_bytes for s in own), default=0.0),
            "link": link_class(level_names[0], device, False).name in classes,
            "most_ranks_between": max((r for s in healthy for r in s.ranks_between), default=0),
        },
    )


def _of_reference_sources(weights: CollectiveWeights, kind: str) -> list[Series]:
    for source in weights.reference_sources:
        for wanted in (kind, "all_reduce" if kind == "broadcast" else kind):
            found = [
                s for s in weights.series if s.ranks and s.name.split("|")[0] == source
                and s.name.split("|")[3] == wanted and s.name.split("|")[4] == "auto"
            ]  # fmt: skip
            if found:
                return found
    return [s for s in weights.series if s.ranks]
