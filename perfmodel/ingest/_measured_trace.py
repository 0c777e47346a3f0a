"""What devices did when, in one form whatever tool recorded it; which kernels compute, communicate or copy."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.display import frame_html
from perfmodel.errors import TableError

if TYPE_CHECKING:
    import pandas as pd


class ActivityKind(IntEnum):
    """What keeps a stream busy."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    """Between host and device, or within a device."""


PHASES: Final = (
    "", "forward", "backward", "backward_input", "backward_weight", "send_forward", "send_backward", "grad_reduce",
    "param_gather", "param_gather_backward", "embedding_reduce", "optimizer", "offload", "reload",
)  # fmt: skip
"""What of a step an activity belongs to, in the order of `program.Kind`; the first is for not known."""


@dataclass(frozen=True, eq=False)
class MeasuredTrace:
    """Activities as flat arrays, sorted by start; -1 where a tag is not known. Predictions are held in it too."""

    device: Int[np.ndarray, " activities"]
    """Number of the device, counted over all files of the trace from 0."""
    stream: Int[np.ndarray, " activities"]
    start_s: Float[np.ndarray, " activities"]
    """On one clock for all devices, from the start of the first activity."""
    end_s: Float[np.ndarray, " activities"]
    name: Int[np.ndarray, " activities"]
    """Number in `names`."""
    names: tuple[str, ...]
    kind: Int[np.ndarray, " activities"]
    """`ActivityKind`."""
    phase: Int[np.ndarray, " activities"]
    """Number in `PHASES`, 0 where it is not known."""
    stage: Int[np.ndarray, " activities"]
    micro_batch: Int[np.ndarray, " activities"]
    step: Int[np.ndarray, " activities"]
    """Number of the training step, as the profiler marks it."""

    def __post_init__(self) -> None:
        if not self.n:
            raise TableError("trace: it holds no activity of a device; record some steps")
        for field in self._arrays():
            if len(getattr(self, field)) != self.n:
                raise TableError(f"trace: {field} has {len(getattr(self, field))} entries, device has {self.n}")
        if not (
            np.isfinite(self.start_s).all() and (self.end_s >= self.start_s).all() and np.isfinite(self.end_s).all()
        ):
            raise TableError("trace: activities must end at or after their start, at finite times")

    @property
    def n(self) -> int:
        """Activities."""
        return len(self.device)

    @property
    def devices(self) -> int:
        return int(self.device.max()) + 1

    @property
    def batch_time_s(self) -> float:
        """From the first start to the last end."""
        return float(self.end_s.max() - self.start_s.min())

    def select(self, chosen: "Bool[np.ndarray, ' activities'] | Int[np.ndarray, ' chosen']") -> "MeasuredTrace":
        """Some of the activities (raises `TableError` for none)."""
        return MeasuredTrace(names=self.names, **{name: getattr(self, name)[chosen] for name in self._arrays()})

    def steps(self) -> "list[MeasuredTrace]":
        """One trace per step that every device took part in; the whole, where no steps are marked."""
        marked = np.unique(self.step[self.step >= 0]).tolist()
        parts = [self.select(self.step == step) for step in marked]
        whole = len(np.unique(self.device))
        return [part for part in parts if len(np.unique(part.device)) == whole] or [self]

    def to_frame(self) -> "pd.DataFrame":
        """One row per activity, with names in place of numbers."""
        import pandas as pd

        return pd.DataFrame(
            {
                "device": self.device,
                "stream": self.stream,
                "kind": np.array([k.name.lower() for k in ActivityKind])[self.kind],
                "name": np.array(self.names, object)[self.name],
                "phase": np.array(PHASES)[self.phase],
                "stage": self.stage,
                "micro_batch": self.micro_batch,
                "step": self.step,
                "start_s": self.start_s,
                "end_s": self.end_s,
            }
        )

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())

    def _arrays(self) -> tuple[str, ...]:
        return tuple(name for name in self.__dataclass_fields__ if name != "names")


@dataclass(frozen=True)
class Activity:
    """One activity as a reader finds it; times on the file's own clock."""

    device: int
    stream: int
    start_s: float
    end_s: float
    name: str
    kind: ActivityKind
    phase: str = ""
    stage: int = -1
    micro_batch: int = -1
    step: int = -1


def merged_intervals(
    start_s: Float[np.ndarray, " intervals"], end_s: Float[np.ndarray, " intervals"]
) -> "tuple[Float[np.ndarray, ' merged'], Float[np.ndarray, ' merged']]":
    """Starts and ends of the fewest intervals that cover the same time, in order."""
    order = np.argsort(start_s, kind="stable")
    start_s, reached_s = start_s[order], np.maximum.accumulate(end_s[order])
    first = start_s > np.append(-np.inf, reached_s)[:-1]  # all before it have ended
    return start_s[first], reached_s[np.roll(first, -1)]


def numbered(found: Iterable[tuple[tuple[int, ...], Activity]]) -> list[Activity]:
    """Activities with devices numbered from 0 in the order of the keys that tell them apart."""
    found = list(found)
    numbers = {key: number for number, key in enumerate(sorted({key for key, _ in found}))}
    return [replace(activity, device=numbers[key]) for key, activity in found]


def trace_of(activities: Sequence[Activity], where: object) -> MeasuredTrace:
    """Activities as arrays, on a clock that starts with the first.

    Raises:
        TableError: none at all.
    """
    if not activities:
        raise TableError(f"{where}: no activity of a device in it; record some steps with the device's events on")
    ordered = sorted(activities, key=lambda a: (a.start_s, a.device, a.stream))
    names = {name: number for number, name in enumerate(dict.fromkeys(a.name for a in ordered))}

    def column(field: str) -> np.ndarray:
        return np.array([getattr(a, field) for a in ordered])

    origin_s = ordered[0].start_s
    return MeasuredTrace(
        device=column("device"), stream=column("stream"), start_s=column("start_s") - origin_s,
        end_s=column("end_s") - origin_s, name=np.array([names[a.name] for a in ordered]), names=tuple(names),
        kind=column("kind"), phase=np.array([PHASES.index(a.phase) for a in ordered]), stage=column("stage"),
        micro_batch=column("micro_batch"), step=column("step"),
    )  # fmt: skip


_PREFIXES: Final = ("nccl", "rccl", "hccl", "gloo:", "c10d::")
_HLO: Final = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|send|recv)"
    r"(-start|-done)?(\.\d+)?"
)
_COPIES: Final = ("Memcpy", "Memset", "memcpy", "memset", "copy-start", "copy-done")


def is_communication(name: str) -> bool:
    """Whether a kernel or operator moves data between devices."""
    return name.lower().startswith(_PREFIXES) or "nccl" in name.lower() or bool(_HLO.fullmatch(name))


def kind_of(*names: str) -> ActivityKind:
    """Of an activity with these names."""
    if any(map(is_communication, names)):
        return ActivityKind.COMMUNICATION
    return ActivityKind.COPY if names[0].startswith(_COPIES) else ActivityKind.COMPUTE
