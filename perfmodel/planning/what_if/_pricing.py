"""Times of events in a scenario, from those that the calibration gives for the machine as it is.

A measured kernel does not tell what a faster device would make of it; the roofline does: times move by the
ratio of the analytical bounds before and after.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from perfmodel.cost import EventTimes, PricesCollectives, PricesKernels, roofline_seconds
from perfmodel.ops import Collective, KernelOp
from perfmodel.spec import Cluster, Device


@dataclass(frozen=True)
class ScaledKernels:
    """Kernel times moved from one device to a variant of it."""

    kernels: PricesKernels
    variant: Device

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        """Times on the variant of `device`."""
        measured = self.kernels.times(device, ops)
        return _times(measured, roofline_seconds(self.variant, ops) / roofline_seconds(device, ops), 0.0)


@dataclass(frozen=True)
class DelayedCollectives:
    """Collective times with seconds added by kind."""

    collectives: PricesCollectives
    delays_s: Mapping[str, float]

    def times(self, cluster: Cluster, ops: Sequence[Collective]) -> EventTimes:
        """Times of `ops` and their delays."""
        delay_s = np.array([self.delays_s.get(op.collective, 0.0) if op.num_ranks > 1 else 0.0 for op in ops])
        return _times(self.collectives.times(cluster, ops), 1.0, delay_s)


def _times(
    given: EventTimes, factor: Float[np.ndarray, " n"] | float, delay_s: Float[np.ndarray, " n"] | float
) -> EventTimes:
    moved = {name: getattr(given, name) * factor + delay_s for name in ("time_s", "lo_s", "hi_s")}
    return replace(given, **moved)
