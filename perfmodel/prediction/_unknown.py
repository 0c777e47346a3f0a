"""What of a step time no kernel table knows, for its 90 % interval: sites, frameworks, networks, host.

A published run errs by what its site and framework have in common with no other (clocks, libraries, settings that go
unsaid) and by what the model knows worst in it. Both are read off the residuals of other sources: on either side the
half-width of log(measured / predicted) is a constant plus a slope for each share of the step that rests on little, and
the numbers are those at which 5 % of the runs lie beyond, every source counting the same however many runs it has. The
spread between sources so enters as the spread of one mixture, which is what a run of a new source is drawn from.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from perfmodel.prediction._sustained import source_group

TERMS = ("constant", "extrapolated", "host", "network", "unstated")
"""`extrapolated`: share of the critical path's kernels and collectives timed beyond what was measured; `host`: share of
the step that the device waits for launches; `network`: share in collectives between nodes; `unstated`: share of a run's
settings that had to be assumed."""
FILE_NAME = "unknown.json"
Shares = Mapping[str, float]
"""Of `TERMS`; the constant's is 1, those left out are 0."""


@dataclass(frozen=True)
class Unknown:
    """Log half-widths per share of each of `TERMS`."""

    faster: tuple[float, ...]
    """For runs that take less time than predicted."""
    slower: tuple[float, ...]

    def half_widths(self, shares: Shares) -> tuple[float, float]:
        """Log half-widths of a run, below and above."""
        at = [1.0, *(shares.get(name, 0.0) for name in TERMS[1:])]
        lower, upper = (sum(c * x for c, x in zip(side, at, strict=True)) for side in (self.faster, self.slower))
        return lower, upper


@lru_cache
def fitted() -> Mapping[str, Any]:
    """By group of sources that was left out ("" for none) the numbers; made by `perfmodel fit --sites`."""
    return MappingProxyType(json.loads((files("perfmodel.prediction") / FILE_NAME).read_text()))


@lru_cache
def unknown(without: str = "") -> Unknown:
    """Fitted on all published sources but the group that `without` is of."""
    found = fitted()
    sides = found.get(source_group(without) if without else "", found[""])
    return Unknown(tuple(sides["faster"]), tuple(sides["slower"]))
