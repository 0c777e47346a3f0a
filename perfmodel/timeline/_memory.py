"""Memory of every device over time, by live ranges (DistIR, section 3.3)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

from perfmodel.display import frame_html
from perfmodel.errors import PerfModelError
from perfmodel.program import Structure
from perfmodel.units import GIB

if TYPE_CHECKING:
    import pandas as pd

    from perfmodel.timeline._timeline import Timeline


@dataclass(frozen=True, eq=False)
class MemorySteps:
    """Memory in use on one device, constant between the times."""

    time_s: Float[np.ndarray, " steps"]
    in_use_bytes: Float[np.ndarray, " steps"]
    """Bytes in use from each time to the next; the first entry, at time 0, is the static state."""


@dataclass(frozen=True, eq=False)
class MemoryTimeline:
    """Memory in use on every device."""

    peak_bytes: Float[np.ndarray, " devices"]
    steps: tuple[MemorySteps, ...]
    """Memory over time, one entry per device."""

    def to_frame(self) -> "pd.DataFrame":
        """One row per change: device, time_s, in_use_bytes."""
        import pandas as pd

        parts = []
        for device, device_steps in enumerate(self.steps):
            parts.append(pd.DataFrame({"device": device, **vars(device_steps)}))
        return pd.concat(parts, ignore_index=True)

    def _repr_html_(self) -> str:
        import pandas as pd

        peaks = {"device": range(len(self.steps)), "peak GiB": self.peak_bytes / GIB}
        return frame_html(pd.DataFrame(peaks))


def memory(
    timeline: "Timeline",
    class_bytes: Float[np.ndarray, " memory_classes"],
    static_bytes: Float[np.ndarray, " devices"],
) -> MemoryTimeline:
    """Compute memory over time: ops allocate at their start and free at their end.

    At equal times, bytes are freed before others are allocated.

    Args:
        timeline: `alloc` and `free` of its structure name the memory class of each op (global stage
            + 1, 0 for none).
        class_bytes: bytes of each memory class, shape (stages + 1,); entry 0 is not used.
        static_bytes: bytes that every device holds throughout, shape (devices,).

    Raises:
        PerfModelError: arrays of another shape, or an op of no device that takes or gives back
            memory.
    """
    structure = timeline.structure
    class_bytes = np.asarray(class_bytes, float)
    static_bytes = np.asarray(static_bytes, float)
    _check(structure, class_bytes, static_bytes)

    # Every change on every device: frees at the ends of ops, then allocations at their starts.
    frees = np.flatnonzero(structure.free)
    allocates = np.flatnonzero(structure.alloc)
    time_s = np.concatenate([timeline.end_s[frees], timeline.start_s[allocates]])
    span = structure.class_span[structure.duration]
    freed_bytes = class_bytes[structure.free[frees]] * span[frees]
    allocated_bytes = class_bytes[structure.alloc[allocates]] * span[allocates]
    change = np.concatenate([-freed_bytes, allocated_bytes])
    device = structure.device[np.concatenate([frees, allocates])]

    # By device, then by time; at equal times memory is freed before it is allocated.
    is_allocation = np.arange(len(device)) >= len(frees)
    order = np.lexsort((is_allocation, time_s, device))
    bounds = np.searchsorted(device[order], np.arange(structure.devices + 1))

    # A device's memory in use is its static state and the running total of its changes.
    steps = []
    for rank, (first, end) in enumerate(pairwise(bounds.tolist())):
        events = order[first:end]
        in_use_bytes = static_bytes[rank] + np.cumsum(change[events])
        steps.append(
            MemorySteps(np.r_[0.0, time_s[events]], np.r_[static_bytes[rank], in_use_bytes])
        )
    peak_bytes = np.array([device_steps.in_use_bytes.max() for device_steps in steps])
    return MemoryTimeline(peak_bytes, tuple(steps))


def _check(structure: Structure, class_bytes: np.ndarray, static_bytes: np.ndarray) -> None:
    """Raise `PerfModelError` unless arrays fit the structure and memory has a device."""
    # Memory classes count from 1, as 0 stands for none.
    n_tables = int(max(structure.alloc.max(), structure.free.max())) + 1
    if class_bytes.ndim != 1 or len(class_bytes) < n_tables:
        raise PerfModelError(
            f"memory: class_bytes needs {n_tables} entries (stages + 1), got shape {class_bytes.shape}"
        )
    if static_bytes.shape != (structure.devices,):
        raise PerfModelError(
            f"memory: static_bytes needs one entry for each of {structure.devices} devices, "
            f"got shape {static_bytes.shape}"
        )
    homeless = (structure.device < 0) & ((structure.alloc > 0) | (structure.free > 0))
    if homeless.any():
        raise PerfModelError(
            f"memory: op {int(np.argmax(homeless))} allocates or frees memory but has no device"
        )
