"""A timeline as drawable slices: the ops of every stream, and transfers folded into lags."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.program import N_STREAMS, Kind, Stream

if TYPE_CHECKING:
    from perfmodel.timeline._timeline import Timeline

KIND_NAMES = tuple(kind.name.lower() for kind in Kind)
"""Names of the kinds as in `display.EVENTS`, in the order of `Kind`."""


@dataclass(frozen=True)
class Slices:
    """Parallel arrays, one entry per slice, sorted by start."""

    start_s: Float[np.ndarray, " slices"]
    duration_s: Float[np.ndarray, " slices"]
    device: Int[np.ndarray, " slices"]
    stream: Int[np.ndarray, " slices"]
    """A `Stream`, the same numbers on every device."""
    kind: Int[np.ndarray, " slices"]
    """`Kind` of each slice."""
    stage: Int[np.ndarray, " slices"]
    micro_batch: Int[np.ndarray, " slices"]
    critical: Bool[np.ndarray, " slices"]
    """Whether the slice is on the critical path."""
    duration_class: Int[np.ndarray, " slices"]
    """Duration class of the structure; slices that were joined have that of the first."""

    @property
    def end_s(self) -> Float[np.ndarray, " slices"]:
        return self.start_s + self.duration_s

    def __len__(self) -> int:
        return len(self.start_s)

    def __iter__(self) -> Iterator[tuple[float, float, int, int, int, int, int, bool, int]]:
        columns = (getattr(self, name) for name in self.__dataclass_fields__)
        return iter(zip(*(c.tolist() for c in columns), strict=True))

    def select(
        self, chosen: "Bool[np.ndarray, ' slices'] | Int[np.ndarray, ' chosen']"
    ) -> "Slices":
        """The slices at some positions."""
        return Slices(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})

    def joined(self) -> "Slices":
        """Merge adjacent slices that are otherwise equal (segments of a pass)."""
        # Sort by everything but time first, so that slices that may be joined lie beside each
        # other.
        tags = np.stack(
            [self.device, self.stream, self.kind, self.stage, self.micro_batch, self.critical]
        )
        order = np.lexsort((self.start_s, *tags))
        tags = tags[:, order]
        start_s = self.start_s[order]
        end_s = self.end_s[order]

        # A run of joined slices begins where there is a gap or where a tag changes. A gap is longer
        # than the rounding error between an end and the next start.
        gap_s = 1e-9 * max(float(self.end_s.max(initial=0)), 1e-12)
        has_gap = np.abs(start_s[1:] - end_s[:-1]) > gap_s
        differs = (tags[:, 1:] != tags[:, :-1]).any(axis=0)
        begins = np.r_[True, has_gap | differs][: len(order)]
        first = np.flatnonzero(begins)
        last = np.r_[first[1:], len(order)][: len(first)] - 1

        runs = self.select(order[first])
        runs = Slices(**{**vars(runs), "duration_s": end_s[last] - start_s[first]})
        return runs.select(np.lexsort((runs.stream, runs.device, runs.start_s)))


def slices(timeline: "Timeline") -> Slices:
    """All ops that take time, and all transfers, as drawable slices."""
    structure = timeline.structure
    start_s, end_s = timeline.start_s, timeline.end_s
    on_path = np.zeros(structure.n_ops, bool)
    on_path[timeline.critical_path()] = True

    # Ops that take time on a stream.
    ops = np.flatnonzero(
        (structure.stream >= 0) & (end_s > start_s) & (structure.kind != Kind.ZERO)
    )

    # Transfers are not ops but lags of the edge to the receiver: they begin where the sender ends
    # and are drawn on the sender's device.
    receiver, side_index = np.nonzero((structure.lag > 0) & (structure.pred >= 0))
    lag_class = structure.lag[receiver, side_index]
    takes_time = timeline.durations_s[lag_class] > 0
    receiver, side_index, lag_class = (
        receiver[takes_time],
        side_index[takes_time],
        lag_class[takes_time],
    )
    sender = structure.pred[receiver, side_index]

    unsorted = Slices(
        start_s=np.concatenate([start_s[ops], end_s[sender]]),
        duration_s=np.concatenate([(end_s - start_s)[ops], timeline.durations_s[lag_class]]),
        device=np.concatenate([structure.device[ops], structure.device[sender]]),
        stream=np.concatenate(
            [structure.stream[ops] % N_STREAMS, np.full(len(receiver), Stream.SEND)]
        ),
        kind=np.concatenate([structure.kind[ops], structure.class_kind[lag_class]]),
        stage=np.concatenate(
            [structure.class_stage[structure.duration[ops]], structure.class_stage[lag_class]]
        ),
        micro_batch=np.concatenate([structure.micro_batch[ops], structure.micro_batch[receiver]]),
        # A transfer counts as critical if both of its ops are.
        critical=np.concatenate([on_path[ops], on_path[receiver] & on_path[sender]]),
        duration_class=np.concatenate([structure.duration[ops], lag_class]),
    )
    return unsorted.select(np.lexsort((unsorted.stream, unsorted.device, unsorted.start_s)))


STREAM_NAMES: Final = (
    "compute",
    "data-parallel communication",
    "pipeline sends",
    "offload to host",
    "reload from host",
)
"""Names of streams as people read them, in the order of `program.Stream`."""
