"""Times of events with intervals and provenance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float64

from perfmodel.spec import Cluster, Collective, Device, KernelOp


@dataclass(frozen=True)
class EventTimes:
    """Predicted times of `n` events."""

    time_s: Float64[np.ndarray, "n"]
    lo_s: Float64[np.ndarray, "n"]
    """Lower end of the 90 % interval."""
    hi_s: Float64[np.ndarray, "n"]
    """Upper end of the 90 % interval."""
    provenance: tuple[str, ...]
    """`measured`, `learned`, `analytical`, `extrapolated`, or `skipped: reason`."""


class PricesKernels(Protocol):
    """Whatever tells kernel times: the calibrated model, or a variation of it."""

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        """Time of each op on a device."""
        ...


class PricesCollectives(Protocol):
    """Whatever tells times of collectives."""

    def times(self, cluster: Cluster, ops: Sequence[Collective]) -> EventTimes:
        """Time of each op on a cluster."""
        ...
