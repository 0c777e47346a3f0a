"""Start and end of every op in double precision, for reports and pictures."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from perfmodel.display import EVENTS, Look, inline_frame, timeline_page
from perfmodel.program import N_STREAMS, Kind, Stream, Structure
from perfmodel.timeline._durations import checked, in_numpy, padded_classes
from perfmodel.timeline._loops import one_lane
from perfmodel.timeline._memory import MemoryTimeline
from perfmodel.timeline._slices import KIND_NAMES, STREAM_NAMES, slices
from perfmodel.timeline._tables import CompiledStructure, OpTables, compile_structure

if TYPE_CHECKING:
    import pandas as pd

_INLINE_UP_TO = 20_000
"""Most events for which a notebook contains the page itself (half a megabyte)."""
_DRAWN = ("device", "stream", "kind", "stage", "micro_batch", "critical")
"""Fields of `Slices` that have the same names on the page."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of every op of a structure."""

    start_s: Float[np.ndarray, " ops"]
    end_s: Float[np.ndarray, " ops"]
    durations_s: Float[np.ndarray, " classes"]
    """Durations of the evaluation, with class 0 set to 0."""
    structure: Structure

    @property
    def makespan_s(self) -> float:
        """End of the last op."""
        return float(self.end_s[-1])

    def device_busy_s(self) -> Float[np.ndarray, " devices"]:
        """Seconds in which each device's compute stream runs an op."""
        # Sends that block a device run on its compute stream too, and count as busy.
        compute = _on_compute_stream(self.structure)
        busy_s = (self.end_s - self.start_s)[compute]
        return np.bincount(self.structure.device[compute], busy_s, minlength=self.structure.devices)

    def idle_fraction(self) -> float:
        """Idle share of the compute streams, over devices and step (0 for an empty one)."""
        if self.makespan_s == 0:
            return 0.0
        return 1 - float(self.device_busy_s().sum()) / (self.structure.devices * self.makespan_s)

    def critical_path(self) -> Int[np.ndarray, " path"]:
        """Ops on the critical path, from the first to the last; ties as in `makespan`."""
        # An op is released by the predecessor that lets it start last; in a tie, by the first.
        first_released_s, second_released_s = _released_s(
            self.structure, self.end_s, self.durations_s
        ).T
        first_pred, second_pred = self.structure.pred.T
        released_by = np.where(second_released_s > first_released_s, second_pred, first_pred)

        # From the end of the step back to an op that waits for nothing.
        op = self.structure.n_ops - 1
        path = []
        while op >= 0:
            path.append(op)
            op = int(released_by[op])
        return np.array(path[::-1])

    def to_frame(self) -> "pd.DataFrame":
        """One row per op: device, stream, kind, stage, segment, micro_batch, start_s, end_s."""
        import pandas as pd

        # Stage and segment are those of an op's duration class.
        structure = self.structure
        kinds = np.array([kind.name.lower() for kind in Kind])
        streams = np.array([stream.name.lower() for stream in Stream])
        return pd.DataFrame(
            {
                "device": structure.device,
                "stream": np.where(structure.stream < 0, "", streams[structure.stream % N_STREAMS]),
                "kind": kinds[structure.kind],
                "stage": structure.class_stage[structure.duration],
                "segment": structure.class_segment[structure.duration],
                "micro_batch": structure.micro_batch,
                "start_s": self.start_s,
                "end_s": self.end_s,
            }
        )

    def to_html(
        self,
        memory: MemoryTimeline | None = None,
        capacity_bytes: float | None = None,
        title: str = "",
        inside: Mapping[int, Sequence[Any]] | None = None,
    ) -> str:
        """An interactive page without network: zoom, move, search, critical path, memory.

        Args:
            memory: memory in use on every device, if it is to be shown.
            capacity_bytes: memory of a device, drawn beside what is in use.
            title: heading of the page.
            inside: blocks and kernels of classes of passes, as `Prediction.pass_parts` has them, to
                be drawn in passes that are wide enough.
        """
        drawn = slices(self)
        devices = self.structure.devices
        inside = inside or {}

        # A slice refers to its entry of `inside` by position, so that the page holds each entry
        # once; -1 is none.
        position_of_class = {
            duration_class: position for position, duration_class in enumerate(inside)
        }
        inside_of_slice = [position_of_class.get(cls, -1) for cls in drawn.duration_class.tolist()]
        columns: dict[str, Any] = {"start": drawn.start_s, "duration": drawn.duration_s}
        columns |= {name: getattr(drawn, name) for name in _DRAWN}
        columns["inside"] = inside_of_slice
        return timeline_page(
            columns,
            kinds=[EVENTS.get(name, Look("#000000", name)) for name in KIND_NAMES],
            streams=STREAM_NAMES,
            devices=devices,
            end_s=max(self.makespan_s, 1e-12),
            memory=memory.steps if memory else (),
            capacity_bytes=capacity_bytes,
            inside=list(inside.values()),
            title=title or f"{devices} pipeline ranks, {self.makespan_s:.4g} s",
        )

    def _repr_html_(self) -> str:
        return timeline_frame(self)


def timeline_frame(
    timeline: Timeline, memory: MemoryTimeline | None = None, capacity_bytes: float | None = None
) -> str:
    """The timeline's page inside another one; instructions if it is too long for a notebook."""
    n_ops = timeline.structure.n_ops
    if n_ops > _INLINE_UP_TO:
        facts = f"{n_ops:,} ops, {timeline.makespan_s:.4g} s, idle {timeline.idle_fraction():.1%}"
        return f"<p>{html.escape(facts)}; too long to show here: write <code>to_html()</code> to a file and open it.</p>"
    return inline_frame(timeline.to_html(memory, capacity_bytes))


def times(
    program: CompiledStructure | Structure, durations: Float[ArrayLike, " classes"]
) -> Timeline:
    """Start and end of every op in float64, at the earliest that its predecessors allow.

    Args:
        program: a compiled structure, or a structure (compiled on the spot, about 50 ms per 130,000
            ops).
        durations: seconds of each class, shape (classes,).

    Raises:
        PerfModelError: durations of another shape, or not finite.
    """
    compiled = program if isinstance(program, CompiledStructure) else compile_structure(program)
    structure = compiled.structure
    durations_s = np.asarray(checked(durations, structure.n_classes, ndim=1), np.float64).copy()
    durations_s[0] = 0

    # The compiled program orders ops differently; end times are put back into the structure's
    # order.
    ends = in_numpy(_ends, durations_s.dtype, compiled.op_tables, padded_classes(durations_s))
    end_s = np.empty(structure.n_ops)
    end_s[compiled.order] = ends[: structure.n_ops]

    # Starts are recomputed from the ends: `end - duration` would differ from them by rounding.
    start_s = _released_s(structure, end_s, durations_s).max(axis=1)
    start_s[structure.pred.max(axis=1) < 0] = 0
    return Timeline(start_s, end_s, durations_s, structure)


def _released_s(
    structure: Structure,
    end_s: Float[np.ndarray, " ops"],
    durations_s: Float[np.ndarray, " classes"],
) -> Float[np.ndarray, "ops 2"]:
    """Times in seconds at which two predecessors let an op start; -inf without one."""
    return np.where(structure.pred < 0, -np.inf, end_s[structure.pred] + durations_s[structure.lag])


def _on_compute_stream(structure: Structure) -> np.ndarray:
    """Whether each op runs on its device's compute stream; joins are on no stream (-1)."""
    return (structure.stream >= 0) & (structure.stream % N_STREAMS == Stream.COMPUTE)


@jax.jit
def _ends(tables: OpTables, durations: Float[Array, " classes"]) -> Float[Array, " positions"]:
    """End time at every position of the program."""
    return one_lane(tables, durations, keep_ends=True)[1]
