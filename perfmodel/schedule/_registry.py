"""Schedules by name, and how stages lie on devices and hold layers."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.errors import LayoutError, PerfModelError, Reason, UnknownNameError
from perfmodel.schedule._construct import repeated
from perfmodel.schedule._schedule import Schedule
from perfmodel.schedule._text import read_schedule, schedule_text
from perfmodel.spec.notation import schedule_and_drains, schedule_name, with_drains

MOST_PASSES: Final = 2**23
"""Largest product of micro-batches and chunks of all devices; beyond it a schedule's order would
take gigabytes."""
WeightPolicy = Literal["flush", "stashing", "vertical_sync", "double_buffering", "latest"]
"""How weight versions are chosen.

- flush: one version; updated when all work of a step is done.
- stashing: a forward takes the newest version of its device, the backward the same one (PipeDream).
- vertical_sync: both take the version that was newest on the first stage when the micro-batch
  entered.
- double_buffering: micro-batches of update k take version k - 1 everywhere (PipeDream-2BW).
- latest: a forward takes the version that was newest on the first stage when the micro-batch
  entered, a backward the newest one that all stages had when it began on the last stage (TiMePReSt:
  vertical but no horizontal stashing, section 4.1).
"""
Demands = Callable[[int, int, int], None]
"""Function (devices, micro_batches, chunks) that raises `LayoutError` for impossible numbers."""
StageMap = Callable[[int, int], Int[np.ndarray, "devices chunks"]]
"""Function (devices, chunks) that returns the global stage of each device's chunks."""

ENDS: Final = 2
"""Stages that may hold no layer: the first with the embedding alone, the last with the head
alone."""
Builder = Callable[..., Schedule]
"""Function (devices, micro_batches, chunks) that returns a schedule; a number in its name
(`chimera:4`) is a further argument, and asynchronous schedules get the micro-batches of one
step."""


def leading_layers(
    counts: Float[Any, "stages *segments blocks"],
    layers: Bool[Any, " blocks"],
    per_stage: Int[Any, "#stages"] | Float[Any, "#stages"],
) -> Float[Any, "stages *segments blocks"]:
    """Blocks that are among the first layers of every stage.

    Args:
        counts: blocks of every stage.
        layers: which blocks are layers.
        per_stage: number of layers to take from each stage; fractions take part of a layer.
    """
    xp = counts.__array_namespace__()
    # Segments and blocks of a stage in model order: each segment takes its share of the remaining
    # blocks.
    in_order = xp.where(layers, counts, 0.0).reshape(len(counts), -1)
    before = xp.cumsum(in_order, axis=1) - in_order
    return xp.clip(per_stage[:, None] - before, 0.0, in_order).reshape(counts.shape)


def even_split(items: int, parts: int) -> Int[np.ndarray, " parts"]:
    """Sizes of a contiguous, even split; the middle parts get the remainder.

    First and last stage also carry embedding and head, so they are the ones to keep short
    (Megatron and zero-bubble runs do the same with L = k p - 2 layers).
    """
    if items < parts - ENDS:
        raise LayoutError(
            f"{items} layers are too few for {parts} pipeline stages (pp * vpp); use at most {items}",
            Reason.STAGES,
        )
    sizes = np.full(parts, items // parts)
    remainder = items % parts
    first = (parts - remainder) // 2
    sizes[first : first + remainder] += 1
    return sizes


def looped_stages(devices: int, chunks: int) -> Int[np.ndarray, "devices chunks"]:
    """Stage map of looped pipelines: chunk c of device d is stage c * devices + d."""
    return np.arange(chunks) * devices + np.arange(devices)[:, None]


def v_stages(devices: int, chunks: int) -> Int[np.ndarray, "devices chunks"]:
    """Stage map of pipelines that go forth and back over the devices, chunk by chunk."""
    going_down = np.arange(devices)[:, None]
    going_up = devices - 1 - going_down
    return np.arange(chunks) * devices + np.where(np.arange(chunks) % 2, going_up, going_down)


@dataclass(frozen=True)
class Scheduler:
    """A named family of schedules, for any number of devices, micro-batches and chunks."""

    name: str
    build: Builder
    stage_map: StageMap = looped_stages
    """Stages of the devices, without building the schedule."""
    chunks: int | None = None
    """The number of chunks per device that the schedule is made for; None: any."""
    number: Literal["", "pipelines", "slices", "slots"] = ""
    """Meaning of a number after the name (`name:number`); `pipelines` gives chunks per device.
    Empty if the schedule takes none."""
    arguments: tuple[int, ...] = ()
    """The number after the name; empty without one."""
    drains: int = 1
    """How often a step runs through the schedule, each time with its part of the micro-batches and
    a pipeline that fills and drains (`name*drains`)."""
    plain: bool = True
    """Whether every pass computes one whole micro-batch alone, without slices or pairs."""
    weights: WeightPolicy = "flush"
    """How weight versions are chosen; every policy except `flush` updates them while other
    micro-batches are in flight, without a flush at the end of a step."""
    demands: Demands | None = None
    """Function that raises `LayoutError` for numbers of devices, micro-batches or chunks that the
    schedule does not support."""
    digest: str | None = ""
    """Distinguishes structures of schedules with the same name: empty for those of this package, a
    hash for a file; None if they cannot be distinguished and must not be cached beyond the
    process."""
    looped: bool = False
    """Whether it is made for several chunks per device, in any number."""
    staggered: bool = False
    """Whether a device starts its next step without waiting for the others to end theirs (the
    zero-bubble schedules' post-validated optimizer step)."""
    period: Callable[[int, int], int] | None = None
    """Function (devices, micro-batches of a step) that returns the number of steps after which the
    order repeats; None: 1."""

    @property
    def slices(self) -> int:
        """Number of slices per sequence."""
        if self.number != "slices":
            return 1
        return self.arguments[0] if self.arguments else DEFAULT_SLICES

    def chunks_for(self, virtual_stages: int) -> int:
        """Chunks per device for a layout's vpp; 1 means the schedule's default.

        Raises:
            LayoutError: the schedule has another number of chunks.
        """
        # `chimera:4` has as many chunks per device as it has pipelines.
        fixed_chunks = (
            self.arguments[0] if self.number == "pipelines" and self.arguments else self.chunks
        )
        if fixed_chunks is None or virtual_stages == fixed_chunks:
            return virtual_stages
        if virtual_stages != 1:
            chunks = "1 chunk" if fixed_chunks == 1 else f"{fixed_chunks} chunks"
            remedy = "leave vpp out"
            if self.name == "1f1b":
                remedy += "; or use schedule=interleaved"
            message = f"schedule {self.label} uses {chunks} per device, got vpp={virtual_stages}; {remedy}"
            raise LayoutError(message, Reason.CHUNKS, self.label)
        return fixed_chunks

    def require(self, devices: int, micro_batches: int, chunks: int) -> None:
        """Raise `LayoutError` if the schedule does not support these numbers."""
        if micro_batches % self.drains:
            raise LayoutError(
                f"schedule {self.label} runs {self.drains} times in a step, which does not divide its "
                f"{micro_batches} micro-batches; use another number after the *",
                Reason.SCHEDULE,
                self.label,
            )
        if self.demands is None:
            return
        try:
            self.demands(devices, micro_batches // self.drains, chunks)
        except LayoutError as error:
            raise LayoutError(str(error), Reason.SCHEDULE, self.label) from None

    def steady_steps(self, devices: int, micro_batches: int) -> int:
        """Number of steps until the pipeline is in its steady state, in whole periods.

        The time of one step is then (time of 2 n steps - time of n steps) / n.
        """
        # The pipeline is full once the first micro-batch is back, 2 p passes later. A backward of
        # all micro-batches of a step delays it most: then each of the p stages takes a step.
        filling = -(-2 * devices // micro_batches) if self.plain else devices
        filling = max(2, filling)

        # Where no flush ever lets devices meet, one that is ahead takes as long again to be held up
        # by the slowest.
        if self.asynchronous:
            filling *= 2

        period = 1 if self.period is None else self.period(devices, micro_batches)
        return -(-filling // period) * period

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule is asynchronous (no flush between steps)."""
        return self.weights != "flush"

    @property
    def label(self) -> str:
        """The name with its number, as `get_schedule` takes it."""
        return with_drains(":".join([self.name, *map(str, self.arguments)]), self.drains)

    def __call__(
        self, devices: int, micro_batches: int, chunks: int = 1, steps: int = 1
    ) -> Schedule:
        """The schedule of `steps` steps of `micro_batches` each.

        Raises:
            LayoutError: a count below 1, or one that the schedule cannot do.
        """
        counts = {
            "devices": devices,
            "micro_batches": micro_batches,
            "chunks": chunks,
            "steps": steps,
        }
        for what, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise LayoutError(
                    f"schedule {self.label}: {what} must be a whole number of at least 1, got {count!r}"
                )
        chunks = self.chunks_for(chunks)
        passes = devices * micro_batches * chunks * steps
        if passes > MOST_PASSES:
            raise LayoutError(
                f"schedule {self.label}: {micro_batches} micro-batches on {devices} devices have {passes:,} "
                f"passes, more than the limit of {MOST_PASSES:,}; use a smaller batch or larger micro-batches"
            )
        self.require(devices, micro_batches, chunks)

        # An asynchronous schedule is one stream over all steps; others are the same step again and
        # again.
        if self.asynchronous:
            return self.build(
                devices, micro_batches * steps, chunks, micro_batches, *self.arguments
            )
        schedule = self.build(devices, micro_batches // self.drains, chunks, *self.arguments)
        if self.drains > 1:
            schedule = repeated(schedule, self.drains, updates=False)
        return schedule if steps == 1 else repeated(schedule, steps)


DEFAULT_SLICES = 2
"""Slices per sequence if the name has no number."""
_SCHEDULERS: dict[str, Scheduler] = {}


def register(name: str, **traits: Any) -> Callable[[Builder], Scheduler]:
    """Decorator that registers a builder under `name`; `traits` are fields of `Scheduler`."""

    def add(build: Builder) -> Scheduler:
        if name in _SCHEDULERS:
            raise PerfModelError(f"schedule {name!r} is already registered; choose another name")
        # A user's function may change between two runs without notice.
        digest = "" if build.__module__.startswith("perfmodel.") else None
        _SCHEDULERS[name] = scheduler = Scheduler(name, build, digest=digest, **traits)
        return scheduler

    return add


def get_schedule(name: str) -> Scheduler:
    """The scheduler registered as `name`: call it with (devices, micro_batches, chunks).

    Some schedules take a number after a colon (`chimera:4`, `seq1f1b:2`); `file:PATH` reads a
    schedule from a text file. `1f1b*4` runs through 1F1B four times in a step, as torchtitan does
    where it accumulates gradients over pipelines. Names are not case-sensitive, and the papers'
    names are known too (`DAPPLE`, `TiMePReSt`).

    Raises:
        UnknownNameError: no schedule has this name.
        LayoutError: a number where none is taken, or an invalid one.
    """
    one_run, drains = schedule_and_drains(schedule_name(name))
    if drains > 1:
        scheduler = get_schedule(one_run)
        if scheduler.asynchronous:
            raise LayoutError(
                f"schedule {name!r}: {one_run} never drains its pipeline; use schedule={one_run}"
            )
        return replace(scheduler, drains=drains)

    # A path may hold colons itself, so what follows the first one is all of it.
    head, colon, tail = one_run.partition(":")
    if head == "file" and colon:
        return _from_file(f"file:{tail}", tail)
    try:
        scheduler = _SCHEDULERS[head]
    except KeyError:
        raise UnknownNameError("schedule", name, _SCHEDULERS) from None
    if not colon:
        return scheduler
    if not scheduler.number:
        raise LayoutError(f"schedule {head} takes no number, got {name!r}; use schedule={head}")
    if not tail.isdecimal() or int(tail) < 1:
        raise LayoutError(
            f"schedule {name!r}: {scheduler.number} must be a whole number of at least 1, as in {head}:2"
        )
    return replace(scheduler, arguments=(int(tail),))


def _from_file(name: str, path: str) -> Scheduler:
    """The schedule of a text file as a scheduler for exactly its devices and micro-batches."""
    # Structures are identified by the hash of the file's content, because the file may change.
    schedule = read_schedule(Path(path))

    def demands(devices: int, micro_batches: int, chunks: int) -> None:
        if (devices, micro_batches) != (schedule.devices, schedule.micro_batches):
            raise LayoutError(
                f"schedule {name} is for {schedule.devices} devices and {schedule.micro_batches} micro-batches, "
                f"not {devices} and {micro_batches}"
            )

    return Scheduler(
        name,
        lambda devices, micro_batches, chunks: schedule,
        lambda devices, chunks: schedule.stage,
        schedule.chunks,
        demands=demands,
        digest=hashlib.sha256(schedule_text(schedule).encode()).hexdigest()[:16],
    )


def schedule_names() -> tuple[str, ...]:
    """Names of all registered schedules, sorted."""
    return tuple(sorted(_SCHEDULERS))
