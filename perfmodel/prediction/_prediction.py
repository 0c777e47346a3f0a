"""The records of a prediction."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.display import prediction_html, printed_text
from perfmodel.errors import PerfModelError
from perfmodel.prediction._memory import CATEGORIES
from perfmodel.spec import Layout
from perfmodel.spec.sample_units import SampleUnit
from perfmodel.timeline import MemoryTimeline, Timeline, memory, timeline_frame

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Peak memory per device of one pipeline rank, in bytes by category."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Saved for backward, for all micro-batches in flight."""
    buffers: float
    """Transient workspace, communication buckets, gathered weights, framework context."""
    allocator: float = 0.0
    """Memory that the allocator holds between tensors, if the framework's reports count it."""

    @property
    def peak(self) -> float:
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.buffers
            + self.allocator
        )

    def to_dict(self) -> dict[str, float]:
        return {"peak": self.peak} | {k: getattr(self, k) for k in (*CATEGORIES, "allocator")}


@dataclass(frozen=True, kw_only=True)
class CriticalEvent:
    """An event's share of the critical path."""

    event: str
    count: float
    """Occurrences on the critical path: d(step time) / d(event time)."""
    time_s: float


@dataclass(frozen=True)
class PassEvent:
    """The exposed part of a kernel or collective inside a block."""

    name: str
    group: str
    """Process group of a collective, empty for kernels."""
    count: float
    time_s: float
    """Seconds of all `count` of them."""


@dataclass(frozen=True)
class PassPart:
    """A block in a pass; the time not taken by its events is gaps and waits."""

    name: str
    time_s: float
    events: tuple[PassEvent, ...]


@dataclass(frozen=True, kw_only=True)
class TimeAccount:
    """Where the time of a step goes."""

    breakdown_s: dict[str, float]
    """Mean over pipeline ranks of the step's seconds by activity, none negative; sums to the step
    time (`_account.Account.breakdown_s`)."""
    critical_path: tuple[CriticalEvent, ...]
    """Events on the longest path through the step, and how often each lies on it."""
    provenance: dict[str, float]
    """Share of the critical path's time by origin of the event times."""
    bubble_fraction: float
    """Share of the step that is `bubble` in `breakdown_s`: time in which compute streams idle only
    because of the order of passes and the imbalance of stages; mean over pipeline ranks."""
    busy_fraction: float
    """Share of the step in which compute streams run passes, communication inside them, the
    optimizer, or the generation of samples, mean over pipeline ranks; the rest is the bubble, and
    waits for communication outside passes."""
    kernels_alone_s: float
    """Lower bound of the step: kernels of the pipeline rank that runs them longest, each at the
    lower end of its interval and at the clock at which it was timed alone."""


@dataclass(frozen=True, kw_only=True)
class MemoryAccount:
    """Peak memory of each pipeline rank, as needed to fit and as reported."""

    per_stage: tuple[StageMemory, ...]
    """Memory of each rank as the framework's own reports count it (`MemoryCosts.memory_counter`);
    if it has none, the needed memory."""
    needed_per_stage: tuple[StageMemory, ...]
    """Memory that each rank needs, tensors and context."""
    capacity_bytes: float
    """Memory of a device; where devices differ, of the rank that fills most of its own."""
    needed_bytes: float
    """Memory that the fullest rank needs, tensors and context; it has to fit. Where devices differ,
    this and `capacity_bytes` are those of the rank that fills the largest share of its device."""
    counted_bytes: dict[str, float]
    """Peak of the rank that the framework reports, as counters show it: `allocated`, `reserved`,
    `device`, `resting` (`perfmodel.spec.MemoryCounter`)."""
    reported_stages: int | None
    """Number of pipeline ranks, from the first, whose memory the framework reports; None: all."""
    saved_bytes_per_stage: tuple[float, ...]
    """Bytes of activations that one micro-batch saves for its backward pass on each global
    stage."""

    @cached_property
    def reported(self) -> StageMemory:
        """Memory of the pipeline rank that the framework reports: the fullest rank, among all or
        among the first ones."""
        return max(self.per_stage[: self.reported_stages], key=lambda stage: stage.peak)


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """The sources of the step time's interval."""

    by_source: dict[str, float]
    """Scale of the error of the log step time, by source, without the part that similar layouts
    share; sources of the same name are the same error in other layouts of the machine
    (`joint_errors`)."""
    unknown_shares: dict[str, float]
    """Shares of the step with little evidence: `extrapolated`, `host`, `network`."""
    class_shares: dict[str, float]
    """Shares of the step by class of events (`perfmodel.prediction.sites.CLASSES`)."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Step time and memory of one layout, with their explanation."""

    model: str
    """Name of the model."""
    framework: str = "generic"
    """Framework and its year, as `name@year`."""
    cluster: str
    """Name of the cluster."""
    devices: int
    """Devices that the layout takes."""
    layout: Layout
    """Layout of the step over the devices."""
    notation: str = field(default="", repr=False)
    """The layout as the framework's users write it, see `layout_notation`; empty for the layout's
    own notation."""
    global_batch: int
    """Sequences (or images) per optimizer step."""
    seq_len: int
    """Tokens per sequence."""
    step_time_s: float
    """Seconds of a step."""
    step_time_lo_s: float
    """Lower end of the 90 % interval; never below `TimeAccount.kernels_alone_s`."""
    step_time_hi_s: float
    """Upper end of the interval."""
    tokens_per_s_per_device: float
    """Tokens of the step per second and device."""
    sample_unit: SampleUnit = "tokens"
    """What texts count the throughput in; models of images and videos count whole ones."""
    tflops_per_device: float
    """Model FLOPs (recompute not counted) per second and device, in 10^12."""
    mfu: float
    """Model FLOPs utilisation: model FLOP/s over the device's peak for the job's dtype."""
    kinds: tuple[dict[str, Any], ...] = ()
    """Kind of nodes of every pipeline rank, where there are several: `kind`, `device`,
    `memory_capacity_bytes`."""
    fits: bool
    """Whether the needed memory fits on every rank."""
    fits_probability: float = 1.0
    """Probability that the layout fits: that nvidia-smi would show less than the device's memory on
    the fullest rank, fragmentation included. Its spread is that of measured peaks around predicted
    ones in published runs."""
    reasons: tuple[str, ...] = ()
    """Reasons why the layout does not fit, or why the prediction is less certain."""
    warnings: tuple[str, ...] = ()
    """Sentences on assumptions, extrapolations, parts that are not counted, and settings that run
    otherwise than written."""
    time_account: TimeAccount
    """Where the time of the step goes."""
    memory_account: MemoryAccount
    """Memory of every rank."""
    uncertainty: Uncertainty = field(repr=False)
    """Sources of the interval."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    """When every event of the step runs; None unless it was asked for."""
    pass_parts: dict[int, tuple[PassPart, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Blocks, kernels and collectives inside each class of pass of the timeline's structure."""

    @property
    def samples_per_s(self) -> float:
        """Sequences, images or videos per second on all devices."""
        return self.global_batch / self.step_time_s

    @property
    def tokens_per_counted_sample(self) -> float:
        """Mean tokens in one `sample_unit`: 1 for models of text, whose throughput is in tokens."""
        if self.sample_unit == "tokens":
            return 1.0
        return self.tokens_per_s_per_device * self.devices / self.samples_per_s

    @property
    def layout_notation(self) -> str:
        """The layout's notation, from which the same framework reads this layout again."""
        return self.notation or str(self.layout)

    @property
    def bubble_fraction(self) -> float:
        """Share of the step in which compute streams are idle (`TimeAccount.bubble_fraction`)."""
        return self.time_account.bubble_fraction

    @property
    def breakdown_s(self) -> dict[str, float]:
        """Seconds of the step by activity; they sum to the step time
        (`TimeAccount.breakdown_s`)."""
        return self.time_account.breakdown_s

    @property
    def critical_path(self) -> tuple[CriticalEvent, ...]:
        """Events on the longest path through the step."""
        return self.time_account.critical_path

    @property
    def provenance(self) -> dict[str, float]:
        """Share of the critical path's time by origin of the event times."""
        return self.time_account.provenance

    @property
    def memory(self) -> StageMemory:
        """Memory of the pipeline rank that the framework reports: the fullest rank, among all or
        among the first ones."""
        return self.memory_account.reported

    @property
    def memory_per_stage(self) -> tuple[StageMemory, ...]:
        """Memory of every pipeline rank, as the framework counts it."""
        return self.memory_account.per_stage

    @property
    def memory_capacity_bytes(self) -> float:
        """Memory of a device (`MemoryAccount.capacity_bytes`)."""
        return self.memory_account.capacity_bytes

    @property
    def memory_needed_bytes(self) -> float:
        """The memory that must fit (`MemoryAccount.needed_bytes`)."""
        return self.memory_account.needed_bytes

    @property
    def memory_counted_bytes(self) -> dict[str, float]:
        """Peak of the reported rank, as counters show it."""
        return self.memory_account.counted_bytes

    @property
    def kept_timeline(self) -> Timeline:
        """The timeline, for drawing.

        Raises:
            PerfModelError: if the prediction was made without `timeline=True`.
        """
        if self.timeline is None:
            raise PerfModelError(
                "this prediction has no timeline; call predict(..., timeline=True)"
            )
        return self.timeline

    def memory_over_time(self) -> MemoryTimeline:
        """Bytes in use on each pipeline rank over the step: static memory plus live activations.

        Raises:
            PerfModelError: if the prediction was made without `timeline=True`.
        """
        timeline = self.kept_timeline
        static = np.array([stage.peak - stage.activations for stage in self.memory_per_stage])
        taken_bytes = np.array([0.0, *self.memory_account.saved_bytes_per_stage])
        return memory(timeline, taken_bytes, static)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are part of the command-line contract."""
        return {
            "model": self.model,
            "framework": self.framework,
            "cluster": self.cluster,
            "devices": self.devices,
            "layout": self.layout_notation,
            "global_batch": self.global_batch,
            "seq_len": self.seq_len,
            "step_time_s": self.step_time_s,
            "step_time_lo_s": self.step_time_lo_s,
            "step_time_hi_s": self.step_time_hi_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "samples_per_s": self.samples_per_s,
            "sample_unit": self.sample_unit,
            "tflops_per_device": self.tflops_per_device,
            "mfu": self.mfu,
            "bubble_fraction": self.bubble_fraction,
            "memory_bytes": self.memory.to_dict()
            | {"per_stage": [s.to_dict() for s in self.memory_per_stage]},
            "memory_capacity_bytes": self.memory_capacity_bytes,
            "memory_needed_bytes": self.memory_needed_bytes,
            "memory_counted_bytes": self.memory_counted_bytes,
            "kinds": [dict(kind) for kind in self.kinds],
            "breakdown_s": self.breakdown_s,
            "kernels_alone_s": self.time_account.kernels_alone_s,
            "critical_path": [
                {"event": e.event, "count": e.count, "time_s": e.time_s} for e in self.critical_path
            ],
            "provenance": self.provenance,
            "fits": self.fits,
            "fits_probability": self.fits_probability,
            "reasons": list(self.reasons),
            "warnings": list(self.warnings),
        }

    def to_frame(self) -> "pd.DataFrame":
        """The critical path as a table: event, count, time_s, share."""
        import pandas as pd

        frame = pd.DataFrame(
            [vars(e) for e in self.critical_path], columns=["event", "count", "time_s"]
        )
        return frame.assign(share=frame["time_s"] / self.step_time_s)

    def __str__(self) -> str:
        """The text that `perfmodel predict` prints."""
        from perfmodel.prediction.text import print_prediction

        return printed_text(lambda console: print_prediction(console, self))

    def _repr_html_(self) -> str:
        body = ""
        if self.timeline is not None:
            body = timeline_frame(
                self.timeline, self.memory_over_time(), self.memory_capacity_bytes
            )
        return prediction_html(self.to_dict(), body)
