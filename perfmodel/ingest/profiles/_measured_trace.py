"""A timeline of devices, independent of the recording tool: computation, communication and copies,
and the pass of each.

That is said by ranges around them with names such as `forward stage=1 micro_batch=3`, `step=7` or
`optimizer`, written by `torch.profiler.record_function`, NVTX ranges or
`jax.profiler.TraceAnnotation`; steps are also taken from the profilers' own marks
(`ProfilerStep#7`, `step_num`).
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.display import frame_html
from perfmodel.errors import TableError

if TYPE_CHECKING:
    import pandas as pd


class ActivityKind(IntEnum):
    """Kind of work that keeps a stream busy."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    """Between host and device, or within a device."""


PHASES: Final = (
    "",
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "send_backward",
    "grad_reduce",
    "param_gather",
    "param_gather_backward",
    "embedding_reduce",
    "optimizer",
    "offload",
    "reload",
)
"""Parts of a step that an activity may belong to, in the order of `program.Kind`; the first means
unknown."""


@dataclass(frozen=True, eq=False)
class MeasuredTrace:
    """Activities as flat arrays, sorted by start; -1 for unknown tags. It also stores predicted
    timelines."""

    device: Int[np.ndarray, " activities"]
    """Number of the device, counted over all files of the trace from 0."""
    stream: Int[np.ndarray, " activities"]
    start_s: Float[np.ndarray, " activities"]
    """Seconds from the start of the first activity, on one clock for all devices."""
    end_s: Float[np.ndarray, " activities"]
    name: Int[np.ndarray, " activities"]
    """Position of each activity's name in `names`."""
    names: tuple[str, ...]
    kind: Int[np.ndarray, " activities"]
    """`ActivityKind` of each activity."""
    phase: Int[np.ndarray, " activities"]
    """Index in `PHASES`; 0 if unknown."""
    stage: Int[np.ndarray, " activities"]
    micro_batch: Int[np.ndarray, " activities"]
    step: Int[np.ndarray, " activities"]
    """Number of the training step, as the profiler marks it."""

    def __post_init__(self) -> None:
        if not self.n:
            raise TableError("trace: no device has any activity; record at least one step")
        for field in self._arrays():
            if len(getattr(self, field)) != self.n:
                raise TableError(
                    f"trace: {field} has {len(getattr(self, field))} entries, device has {self.n}"
                )
        if not (
            np.isfinite(self.start_s).all()
            and (self.end_s >= self.start_s).all()
            and np.isfinite(self.end_s).all()
        ):
            raise TableError("trace: activities must end at or after their start, at finite times")

    @property
    def n(self) -> int:
        """Number of activities."""
        return len(self.device)

    @property
    def devices(self) -> int:
        return int(self.device.max()) + 1

    @property
    def batch_time_s(self) -> float:
        """Seconds from the first start to the last end."""
        return float(self.end_s.max() - self.start_s.min())

    def select(
        self, chosen: "Bool[np.ndarray, ' activities'] | Int[np.ndarray, ' chosen']"
    ) -> "MeasuredTrace":
        """A trace of the selected activities (raises `TableError` if there are none)."""
        return MeasuredTrace(
            names=self.names, **{name: getattr(self, name)[chosen] for name in self._arrays()}
        )

    def steps(self) -> "list[MeasuredTrace]":
        """One trace per step that every device took part in; the trace itself if no step is
        marked."""
        marked = np.unique(self.step[self.step >= 0]).tolist()
        parts = [self.select(self.step == step) for step in marked]
        # A step that only some devices recorded has no step time.
        all_devices = len(np.unique(self.device))
        return [part for part in parts if len(np.unique(part.device)) == all_devices] or [self]

    def to_frame(self) -> "pd.DataFrame":
        """One row per activity, with names in place of numbers."""
        import pandas as pd

        return pd.DataFrame(
            {
                "device": self.device,
                "stream": self.stream,
                # Codes index into their names, for all rows at once.
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
    """One activity in a file; times are on the file's own clock."""

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
    # Sorted by start, a new interval begins wherever all before have ended: no loop over millions
    # of kernels.
    order = np.argsort(start_s, kind="stable")
    start_s = start_s[order]
    reached_s = np.maximum.accumulate(end_s[order])
    first = start_s > np.append(-np.inf, reached_s)[:-1]  # all before it have ended
    return start_s[first], reached_s[np.roll(first, -1)]


def numbered(keyed: Iterable[tuple[tuple[int, ...], Activity]]) -> list[Activity]:
    """Activities with their devices numbered from 0.

    Args:
        keyed: key of a device (such as rank and device of the rank), and an activity; keys are
            numbered in their order.
    """
    keyed = list(keyed)
    # Sorted, so that ranks are in order whatever order their files are given in.
    keys = sorted({key for key, _ in keyed})
    numbers = {key: number for number, key in enumerate(keys)}
    return [replace(activity, device=numbers[key]) for key, activity in keyed]


def trace_of(activities: Sequence[Activity], place: object) -> MeasuredTrace:
    """Activities as arrays, on a clock that starts with the first.

    Raises:
        TableError: none at all.
    """
    if not activities:
        raise TableError(
            f"{place}: no device has any activity; record at least one step with device events enabled"
        )
    ordered = sorted(activities, key=lambda a: (a.start_s, a.device, a.stream))
    distinct_names = dict.fromkeys(a.name for a in ordered)
    names = {name: number for number, name in enumerate(distinct_names)}

    def column(field: str) -> np.ndarray:
        return np.array([getattr(a, field) for a in ordered])

    # Clocks count from an epoch: as floats, times near zero keep their nanoseconds.
    origin_s = ordered[0].start_s
    return MeasuredTrace(
        device=column("device"),
        stream=column("stream"),
        start_s=column("start_s") - origin_s,
        end_s=column("end_s") - origin_s,
        name=np.array([names[a.name] for a in ordered]),
        names=tuple(names),
        kind=column("kind"),
        phase=np.array([PHASES.index(a.phase) for a in ordered]),
        stage=column("stage"),
        micro_batch=column("micro_batch"),
        step=column("step"),
    )


_PREFIXES: Final = ("nccl", "rccl", "hccl", "gloo:", "c10d::")
_HLO: Final = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|send|recv)"
    r"(-start|-done)?(\.\d+)?"
)
_COPIES: Final = ("Memcpy", "Memset", "memcpy", "memset", "copy-start", "copy-done")


def is_communication(name: str) -> bool:
    """Whether a kernel or operator moves data between devices."""
    return (
        name.lower().startswith(_PREFIXES) or "nccl" in name.lower() or bool(_HLO.fullmatch(name))
    )


def kind_of(*names: str) -> ActivityKind:
    """The kind of an activity, from the names of its event and instruction."""
    # XLA gives fusions and copies names of their own, so that either name may tell a collective.
    if any(map(is_communication, names)):
        return ActivityKind.COMMUNICATION
    return ActivityKind.COPY if names[0].startswith(_COPIES) else ActivityKind.COMPUTE


_PHASE_NAMES: Final = {name: name for name in PHASES if name} | {
    # Short forms that people write in their ranges.
    "fwd": "forward",
    "bwd": "backward",
    "update": "optimizer",
    "dgrad": "backward_input",
    "wgrad": "backward_weight",
}
_SEPARATOR: Final = re.compile(r"[\s,:;/|]+")
_TAG: Final = re.compile(r"(stage|micro_batch|microbatch|mb|step)[=#](\d{1,9})", re.I)
_TAG_NAMES: Final = {"microbatch": "micro_batch", "mb": "micro_batch"}


class Tags(NamedTuple):
    """Phase, stage, micro-batch and step named by a range; empty or -1 where not named.

    The order is that of the last fields of `Activity`.
    """

    phase: str = ""
    stage: int = -1
    micro_batch: int = -1
    step: int = -1


@dataclass(frozen=True)
class Range:
    """A range of time on the file's clock."""

    start_s: float
    end_s: float
    tags: Tags


def parse_tags(name: str) -> Tags:
    """Tags in the name of a range, such as `backward stage=1 micro_batch=3`; other words are
    ignored."""
    profiler_step = re.fullmatch(r"ProfilerStep#(\d{1,9})", name)
    # Marks of torch.profiler and of its hook around optimizers need no words of ours.
    if profiler_step:
        return Tags(step=int(profiler_step[1]))
    if name.startswith("Optimizer.step"):
        return Tags(phase="optimizer")
    tokens = [token for token in _SEPARATOR.split(name) if token]
    numbers = {}
    for token in tokens:
        tag = _TAG.fullmatch(token)
        if tag:
            field = tag[1].lower()
            numbers[_TAG_NAMES.get(field, field)] = int(tag[2])
    # A phase is the first word, so that functions that happen to be called "forward" somewhere are
    # none.
    phase = ""
    if tokens and (numbers or len(tokens) == 1):
        phase = _PHASE_NAMES.get(tokens[0].lower(), "")
    return Tags(phase=phase, **numbers)


def tags_at(ranges: Iterable[Range], at_s: Float[np.ndarray, " events"]) -> list[Tags]:
    """Tags of the ranges around each time; an inner range overrides an outer one."""
    tagged = [tag for tag in ranges if tag.tags != Tags()]
    # Ranges nest: written from the longest to the shortest, the innermost is the last to be
    # written.
    tagged.sort(key=lambda tag: tag.start_s - tag.end_s)
    order = np.argsort(at_s, kind="stable")
    ordered = at_s[order]
    columns: dict[str, Int[np.ndarray, " events"]] = {
        name: np.full(len(at_s), -1) for name in ("phase", "stage", "micro_batch", "step")
    }
    for tag in tagged:
        # All events inside a range are a slice of the sorted times.
        first = np.searchsorted(ordered, tag.start_s)
        end = np.searchsorted(ordered, tag.end_s, side="right")
        inside = order[first:end]
        # A range overrides only the tags that it names: `step=7` around `forward` leaves both
        # standing.
        if tag.tags.phase:
            columns["phase"][inside] = PHASES.index(tag.tags.phase)
        for name in ("stage", "micro_batch", "step"):
            value = getattr(tag.tags, name)
            if value >= 0:
                columns[name][inside] = value
    return [
        Tags(PHASES[max(phase, 0)], stage, micro_batch, step)
        for phase, stage, micro_batch, step in zip(
            columns["phase"].tolist(),
            columns["stage"].tolist(),
            columns["micro_batch"].tolist(),
            columns["step"].tolist(),
            strict=True,
        )
    ]
