"""Records of a training log, in SI units and in the terms of this package."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

LOG_FORMATS: Final = (
    "megatron",
    "nemo",
    "torchtitan",
    "nanotron",
    "deepspeed",
    "hf-trainer",
    "maxtext",
    "composer",
    "olmo-core",
    "levanter",
    "nemo-automodel",
    "torchtune",
    "xtuner",
    "nanogpt",
    "llm.c",
    "fairseq",
    "paddlenlp",
)
"""Names of the formats that are read. Megatron-Core and Megatron-Bridge print the lines of
Megatron-LM; `composer` is what llm-foundry prints; `hf-trainer` is also axolotl, LLaMA-Factory and
MS-Swift, `nanogpt` also llama2.c, and `fairseq` also metaseq."""
EventKind = Literal["checkpoint", "evaluation", "restart", "overflow", "allocator_retry"]
Phase = Literal["data", "forward", "compute", "gradient_sync", "weight_gather", "optimizer"]
"""`compute`: forward and backward passes without waiting between pipeline stages; `forward`:
forward passes alone."""


@dataclass(frozen=True, kw_only=True)
class LoggedStep:
    """One line about one step, or about all steps since the line before it."""

    step: int
    seconds: float | None = None
    """Seconds per step, averaged over the steps since the previous line; None if the log states
    only a throughput."""
    tokens_per_s_per_device: float | None = None
    samples_per_s: float | None = None
    """Sequences per second of all devices together."""
    tflops_per_device: float | None = None
    global_batch: int | None = None
    """Sequences per step."""
    loss_scale: float | None = None
    skipped_steps: int = 0
    """Steps since the line before it whose update was skipped because gradients overflowed."""
    clock_s: float | None = None
    """Time at which the line was written, in seconds since an arbitrary origin."""

    def seconds_of(self, tokens_per_step: float, devices: int, global_batch: int) -> float | None:
        """Seconds per step, from the throughput where the line gives no time; None where it gives
        neither."""
        if self.seconds is not None:
            return self.seconds
        if self.tokens_per_s_per_device:
            return tokens_per_step / devices / self.tokens_per_s_per_device
        if self.samples_per_s:
            return global_batch / self.samples_per_s
        return None


@dataclass(frozen=True, kw_only=True)
class LogEvent:
    """Something that the log reports between steps."""

    kind: EventKind
    after_step: int
    """The last step that the log named before it; 0 before the first."""
    seconds: float | None = None
    """Duration of the event; None if the log does not state it."""


@dataclass(frozen=True, kw_only=True)
class PhaseTimer:
    """Duration of one phase of a step, on the fastest and on the slowest rank."""

    least_s: float
    most_s: float


@dataclass(frozen=True, kw_only=True)
class ClockRange:
    """Clocks of the devices during training, on the slowest and on the fastest rank."""

    least_hz: float
    most_hz: float


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """A log of one training run."""

    path: str
    format: str
    """Name of the log's format, one of `LOG_FORMATS`."""
    steps: tuple[LoggedStep, ...]
    events: tuple[LogEvent, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the log says were run: `devices`, `global_batch`, `seq_len`, fields of
    `Layout`, `dtype`."""
    timers: Mapping[str, PhaseTimer] = field(default_factory=dict)
    """Medians over the steps, by phase (`Phase`); empty where the log has no timers."""
    clocks: ClockRange | None = None
    """Clocks that a straggler detector reports; None without such reports."""
    allocated_bytes: float | None = None
    """Peak of the tensors on the fullest rank that reports it."""
    reserved_bytes: float | None = None
    """Peak bytes reserved by the allocator."""

    def count(self, kind: EventKind) -> int:
        """Number of events of a kind."""
        return sum(event.kind == kind for event in self.events)
