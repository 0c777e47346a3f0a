"""Times of events with intervals and provenance."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64


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
