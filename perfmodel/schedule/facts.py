"""Figures of schedules, as in the papers' comparison tables: bubble, memory, staleness."""

from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from math import isclose, lcm
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.display import frame_html, shorten_reprs
from perfmodel.errors import PerfModelError
from perfmodel.schedule._asynchronous import weight_versions
from perfmodel.schedule._registry import MOST_PASSES, Scheduler, get_schedule
from perfmodel.schedule._schedule import NEVER, Phase, Schedule
from perfmodel.schedule.memory import peak_live

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class PassTimes:
    """Seconds of one micro-batch's passes on every stage, and of a transfer between stages.

    Raises:
        PerfModelError: arrays of different lengths or none, or times that are negative or not
            finite.
    """

    forward_s: Float[np.ndarray, " stages"]
    backward_input_s: Float[np.ndarray, " stages"]
    backward_weight_s: Float[np.ndarray, " stages"]
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        shapes = {
            np.shape(self.forward_s),
            np.shape(self.backward_input_s),
            np.shape(self.backward_weight_s),
        }
        equal_vectors = len(shapes) == 1 and len(next(iter(shapes))) == 1
        if not equal_vectors or shapes == {(0,)}:
            raise PerfModelError(
                f"pass times need one entry per stage each, got shapes {sorted(shapes)}"
            )
        everything = np.concatenate([*self.by_phase.values(), [self.transfer_s]])
        if not (np.isfinite(everything) & (everything >= 0)).all():
            raise PerfModelError("pass times must be finite and not negative")

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward_s: float,
        backward_s: float,
        *,
        weight_share: float = 0.5,
        transfer_s: float = 0.0,
    ) -> "PassTimes":
        """Times of equal stages; `weight_share` of the backward is its weight gradient."""
        ones = np.ones(max(stages, 0))
        weight_s = backward_s * weight_share
        return cls(forward_s * ones, (backward_s - weight_s) * ones, weight_s * ones, transfer_s)

    @property
    def by_phase(self) -> dict[Phase, Float[np.ndarray, " stages"]]:
        """Times of each phase; a whole backward is the sum of its halves."""
        backward_s = np.asarray(self.backward_input_s) + np.asarray(self.backward_weight_s)
        return {
            Phase.FORWARD: np.asarray(self.forward_s),
            Phase.BACKWARD: backward_s,
            Phase.BACKWARD_INPUT: np.asarray(self.backward_input_s),
            Phase.BACKWARD_WEIGHT: np.asarray(self.backward_weight_s),
        }

    def instruction_s(self, schedule: Schedule) -> Float[np.ndarray, " instructions"]:
        """Seconds of every instruction of a schedule."""
        # Several micro-batches in one go take as long as one after another.
        table = np.stack([self.by_phase[phase] for phase in Phase])
        return table[schedule.phase, schedule.instruction_stage] * schedule.span


def starts_and_ends(
    schedule: Schedule, times: PassTimes
) -> tuple[Float[np.ndarray, " instructions"], Float[np.ndarray, " instructions"]]:
    """Start and end of each instruction, as early as possible; transfers do not queue."""
    # Lists, as the loop below reads single numbers.
    seconds = times.instruction_s(schedule).tolist()
    device = schedule.device.tolist()
    needs = [need.tolist() for need in schedule.waits]
    start = [0.0] * len(device)
    end = [0.0] * len(device)
    free_from = [0.0] * schedule.devices

    # In the order of slots everything that an instruction waits for comes before it.
    for i in np.argsort(schedule.slot, kind="stable").tolist():
        begin = free_from[device[i]]
        for need in needs:
            j = need[i]
            if j != NEVER:
                transfer_s = times.transfer_s if device[j] != device[i] else 0.0
                begin = max(begin, end[j] + transfer_s)
        start[i], end[i] = begin, begin + seconds[i]
        free_from[device[i]] = end[i]
    return np.array(start), np.array(end)


def equal_parts(
    schedule: Schedule,
    forward_s: float,
    backward_s: float,
    *,
    weight_share: float = 0.5,
    transfer_s: float = 0.0,
) -> PassTimes:
    """Times of a schedule's stages, from the times of 1/p of the model.

    Args:
        schedule: schedule of p devices.
        forward_s, backward_s: time of a micro-batch on a p-th of the model.
        weight_share: share of the backward that is its weight gradient.
        transfer_s: seconds of a message between neighbouring stages.
    """
    # Replicas hold whole p-ths of the model, chunks of one pipeline parts of it; slices are parts
    # of a sequence.
    part = schedule.devices / schedule.n_stages / schedule.slices
    return PassTimes.uniform(
        schedule.n_stages,
        forward_s * part,
        backward_s * part,
        weight_share=weight_share,
        transfer_s=transfer_s,
    )


@dataclass(frozen=True)
class ChunkTimes:
    """Times of one micro-batch on one chunk; all chunks are equal.

    Raises:
        PerfModelError: times that are negative, or all zero.
    """

    forward: Fraction
    backward_input: Fraction
    backward_weight: Fraction
    transfer: Fraction = Fraction(0)

    def __post_init__(self) -> None:
        passes = (self.forward, self.backward_input, self.backward_weight)
        if min(*passes, self.transfer) < 0 or not any(passes):
            shown = ",".join(f"{float(time):g}" for time in passes)
            raise PerfModelError(
                f"times of a chunk must be at least 0, and one of them above 0, got {shown}"
            )

    def pass_times(self, schedule: Schedule, unit: int = 1) -> PassTimes:
        """Times of a schedule's stages, in `unit`-ths; a slice of a sequence takes its share."""
        # A transfer takes as long as a message, whatever it carries.
        ones = np.ones(schedule.n_stages)
        part = Fraction(unit, schedule.slices)
        return PassTimes(
            float(self.forward * part) * ones,
            float(self.backward_input * part) * ones,
            float(self.backward_weight * part) * ones,
            float(self.transfer * unit),
        )

    def whole_unit(self, schedule: Schedule) -> int:
        """Parts per second in which all times are whole numbers, so that sums are exact."""
        times = (self.forward, self.backward_input, self.backward_weight, self.transfer)
        return lcm(*(time.denominator for time in times)) * schedule.slices


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """Figures of a schedule; memory in units of a p-th of the model or of its activations."""

    schedule: str
    stages: int
    micro_batches: int
    makespan_s: float
    """Time of one step alone, from its first pass to its last, warm-up and cool-down included."""
    steady_interval_s: float
    """Time between the ends of successive steps: the makespan if every step ends with a flush, less
    if steps overlap."""
    bubble_fraction: float
    """Idle share of the steady interval, averaged over devices, if transfers took no time."""
    makespan_bubble_fraction: float
    """Idle share of the makespan, averaged over devices, if transfers took no time."""
    activations: tuple[float, float]
    """Most micro-batches alive at once, on the device with the fewest and on the one with the
    most."""
    weights: tuple[int, int]
    """Copies and versions of a stage's weights, on the device with the fewest and on the one with
    the most."""
    version_difference: int
    """Largest version difference of any device once the pipeline is full; 1 without staleness."""
    update_sequences: int
    """Independent sequences of updates (TiMePReSt, section 4.4)."""

    @property
    def step_s(self) -> float:
        """Time of a training step: the steady interval."""
        return self.steady_interval_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"step_s": self.step_s}

    def to_frame(self) -> "pd.DataFrame":
        """One row; `activations` and `weights` by least and most (`activations_least`, ..)."""
        import pandas as pd

        row = self.to_dict()
        for name in ("activations", "weights"):
            row[f"{name}_least"], row[f"{name}_most"] = row.pop(name)
        return pd.DataFrame([row])

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def schedule_facts(
    name: str,
    stages: int,
    micro_batches: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weight_share: float = 0.5,
    transfer_s: float = 0.0,
    chunks: int = 1,
) -> ScheduleFacts:
    """Compute figures of a schedule, from the times of 1/p of the model.

    Args:
        name: registered schedule.
        stages: p, devices of the pipeline; each runs a p-th of the model for every micro-batch.
        micro_batches: micro-batches of one step.
        forward_s, backward_s: time of a micro-batch on a p-th of the model.
        weight_share: share of the backward that is its weight gradient.
        transfer_s: seconds of a message between neighbouring stages.
        chunks: model chunks per device, for schedules that take any number.

    Raises:
        UnknownNameError, LayoutError: unknown or impossible schedules.
        PerfModelError: times that are not times, or a step that takes none.
    """
    schedule = get_schedule(name)(stages, micro_batches, chunks)
    times = equal_parts(
        schedule, forward_s, backward_s, weight_share=weight_share, transfer_s=transfer_s
    )
    return _facts(name, schedule, times, micro_batches, chunks)


def chunk_facts(
    name: str, stages: int, micro_batches: int, times: ChunkTimes, *, chunks: int = 1
) -> ScheduleFacts:
    """Compute figures of a schedule from the times of a chunk, without rounding.

    Raises:
        UnknownNameError, LayoutError: unknown or impossible schedules.
        PerfModelError: times of so many digits that sums are not exact.
    """
    schedule = get_schedule(name)(stages, micro_batches, chunks)
    unit = times.whole_unit(schedule)
    in_units = times.pass_times(schedule, unit)

    # The largest sum that can arise: all passes and transfers of a step one after another, of as
    # many steps as are ever laid out.
    passes = in_units.instruction_s(schedule).sum()
    longest_step = float(passes + in_units.transfer_s * schedule.n_instructions)
    if longest_step * _MOST_STEPS > _EXACT_UP_TO:
        raise PerfModelError(
            f"schedule {name}: times with this many digits cannot be added exactly; round them"
        )
    return _facts(name, schedule, in_units, micro_batches, chunks, unit)


_MOST_STEPS: Final = 4096
"""Most steps of a stream that are laid out."""
_EXACT_UP_TO: Final = 2.0**53
"""Largest whole number up to which floating-point sums are exact."""


def _facts(
    name: str, schedule: Schedule, times: PassTimes, micro_batches: int, chunks: int, unit: int = 1
) -> ScheduleFacts:
    """Figures of a schedule with times in `unit`-ths of a second."""
    scheduler = get_schedule(name)
    stages = schedule.devices
    makespan = _makespan(schedule, times)
    if not makespan > 0:
        raise PerfModelError(
            f"schedule {scheduler.label}: a step of zero length has no bubble; give times above 0"
        )
    steps, interval = _steady_interval(scheduler, schedule, times, micro_batches, chunks)

    # A bubble is idle time that would be there without transfers, as a share of the step with them.
    bare_makespan, bare_steps, bare_interval = makespan, steps, interval
    if times.transfer_s:
        without_transfers = replace(times, transfer_s=0.0)
        bare_makespan = _makespan(schedule, without_transfers)
        bare_steps, bare_interval = _steady_interval(
            scheduler, schedule, without_transfers, micro_batches, chunks
        )
    work = float(times.instruction_s(schedule).sum()) / stages

    # Staleness and memory of a stream show once the pipeline is full.
    if scheduler.asynchronous:
        schedule = scheduler(stages, micro_batches, chunks, 2 * max(2, stages))
    versions = weight_versions(schedule, scheduler.weights)
    weight_copies = versions.stored * schedule.replicas

    # In p-ths of the model: a stage of several chunks per device is less than one.
    part_of_model = stages / schedule.n_stages / schedule.slices
    alive = peak_live(schedule, np.ones(schedule.n_stages)) * part_of_model
    return ScheduleFacts(
        schedule=scheduler.label,
        stages=stages,
        micro_batches=micro_batches,
        makespan_s=makespan / unit,
        steady_interval_s=interval / (steps * unit),
        bubble_fraction=max(0.0, (bare_interval / bare_steps - work) / (interval / steps)),
        makespan_bubble_fraction=max(0.0, (bare_makespan - work) / makespan),
        activations=(float(alive.min()), float(alive.max())),
        weights=(int(weight_copies.min()), int(weight_copies.max())),
        version_difference=int(versions.steady_difference.max()),
        update_sequences=versions.sequences,
    )


def _makespan(schedule: Schedule, times: PassTimes) -> float:
    """End of the last pass, in the unit of the times."""
    _, end = starts_and_ends(schedule, times)
    return float(end.max())


def _steady_interval(
    scheduler: Scheduler, schedule: Schedule, times: PassTimes, micro_batches: int, chunks: int
) -> tuple[int, float]:
    """A number of steps of a full pipeline, and how long they take together.

    The second half of a stream counts. Streams are doubled until twice as many steps take twice as
    long.
    """
    if not (scheduler.asynchronous or scheduler.staggered):
        return 1, _makespan(schedule, times)

    def stream_makespan(steps: int) -> float:
        stream = scheduler(schedule.devices, micro_batches, chunks, steps)
        return _makespan(stream, times)

    steps = scheduler.steady_steps(schedule.devices, micro_batches)
    makespan_before = stream_makespan(steps)
    makespan = stream_makespan(2 * steps)
    while True:
        # `steps` of the stream of `2 * steps` came after the pipeline was full.
        interval = makespan - makespan_before

        # Stop before a stream that would exceed the largest schedule.
        passes = 2 * steps * micro_batches * schedule.devices * chunks
        if 4 * steps > _MOST_STEPS or passes > MOST_PASSES // 2:
            return steps, interval
        makespan_before = makespan
        makespan = stream_makespan(4 * steps)
        if isclose(makespan - makespan_before, 2 * interval, rel_tol=1e-12):
            return steps, interval
        steps *= 2


shorten_reprs(__name__)
