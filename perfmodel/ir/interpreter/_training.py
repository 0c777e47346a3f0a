"""Training under a schedule's weight versions: loss against predicted wall-clock time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import frame_html
from perfmodel.errors import PerfModelError
from perfmodel.ir.interpreter._layers import LayeredModel, Params
from perfmodel.ir.interpreter._run import ScheduleRun, run_schedule
from perfmodel.program import Kind, ProgramSpec, build
from perfmodel.schedule import PassTimes, get_schedule, weight_versions
from perfmodel.timeline import times as event_times

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class TrainingCurve:
    """Loss of a model trained under one schedule, update by update."""

    schedule: str
    time_s: Float[np.ndarray, " updates"]
    """Time at which every device has made the update, in the predicted timeline."""
    loss: Float[np.ndarray, " updates"]
    """Mean loss over the micro-batches of the update, as its forward passes saw it."""
    version_difference: Int[np.ndarray, " updates"]
    """Version difference of the update, the largest over the devices (1: no staleness)."""
    versions_held: Int[np.ndarray, " devices"]
    """Most weight versions held at once."""

    def to_frame(self) -> "pd.DataFrame":
        """One row per update: schedule, update, time_s, loss, version_difference."""
        import pandas as pd

        columns = {
            "time_s": self.time_s,
            "loss": self.loss,
            "version_difference": self.version_difference,
        }
        return pd.DataFrame(
            {"schedule": self.schedule, "update": np.arange(1, len(self.loss) + 1), **columns}
        )

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def train(
    name: str,
    model: LayeredModel,
    params: list[Params],
    inputs: Float[np.ndarray, "micro_batches ..."],
    targets: Float[np.ndarray, "micro_batches ..."],
    *,
    stages: int,
    per_step: int,
    learning_rate: float,
    keep_every: int = 0,
) -> ScheduleRun:
    """Train by gradient descent under a schedule, one update per step of `per_step` micro-batches.

    Schedules with a flush run one step after another; the others run as one stream over all
    micro-batches. PipeDream's updates are one per micro-batch (`as_mini_batches` makes mini-batches
    of them). Weights are kept as `run_schedule` keeps them.

    Raises:
        PerfModelError: inputs for less than one step.
    """
    scheduler = get_schedule(name)
    steps = _whole_steps(len(inputs), per_step)
    # Without flushes steps run into one another, so all of them are one schedule.
    if scheduler.asynchronous:
        schedule = scheduler(stages, per_step, 1, steps)
        per_update = schedule.micro_batches // int(schedule.updates[schedule.device == 0].sum())
        return run_schedule(
            schedule,
            model,
            params,
            inputs,
            targets,
            policy=scheduler.weights,
            learning_rate=learning_rate,
            per_update=per_update,
            keep_every=keep_every,
        )
    # With a flush every step starts from the same weights everywhere, so steps are separate runs
    # and the update happens between them.
    schedule = scheduler(stages, per_step)
    runs: list[ScheduleRun] = []
    weights_after: dict[int, list[Params]] = {}
    for step in range(steps):
        step_batches = slice(step * per_step, (step + 1) * per_step)
        runs.append(
            run_schedule(schedule, model, params, inputs[step_batches], targets[step_batches])
        )
        params = jax.tree.map(lambda w, g: w - learning_rate * g, params, runs[-1].gradients)
        if keep_every and (step + 1) % keep_every == 0:
            weights_after[step + 1] = params
    losses = np.concatenate([run.losses for run in runs])
    return ScheduleRun(losses, runs[-1].gradients, params, runs[-1].versions_held, weights_after)


def training_curve(
    name: str,
    model: LayeredModel,
    params: list[Params],
    inputs: Float[np.ndarray, "micro_batches ..."],
    targets: Float[np.ndarray, "micro_batches ..."],
    passes: PassTimes,
    *,
    per_step: int,
    learning_rate: float,
) -> TrainingCurve:
    """Loss after each update, with the time of the update on the predicted timeline.

    Args:
        name: registered schedule.
        model, params, inputs, targets: as for `run_schedule`.
        passes: seconds of the passes of one micro-batch on each stage.
        per_step: micro-batches per step (of a mini-batch).
        learning_rate: step size of plain gradient descent.

    Raises:
        PerfModelError: inputs for less than one step.
    """
    # Losses come from the interpreter and times from the predicted timeline: the two meet update by
    # update.
    scheduler = get_schedule(name)
    stages = len(passes.forward_s)
    steps = _whole_steps(len(inputs), per_step)
    run = train(
        name,
        model,
        params,
        inputs,
        targets,
        stages=stages,
        per_step=per_step,
        learning_rate=learning_rate,
    )
    time_s = update_times(name, stages, per_step, steps, passes)
    loss = run.losses.reshape(len(time_s), -1).mean(axis=1)
    if not scheduler.asynchronous:
        return TrainingCurve(name, time_s, loss, np.ones(steps, np.int64), run.versions_held)
    stream = scheduler(stages, per_step, 1, steps)
    difference = weight_versions(stream, scheduler.weights).difference.max(axis=0)
    return TrainingCurve(name, time_s, loss, difference, run.versions_held)


def _whole_steps(micro_batches: int, per_step: int) -> int:
    if not 0 < per_step <= micro_batches:
        raise PerfModelError(
            f"training needs at least {per_step} micro-batches (one step), got {micro_batches}; give more inputs"
        )
    return micro_batches // per_step


def update_times(
    name: str, stages: int, per_step: int, steps: int, passes: PassTimes
) -> Float[np.ndarray, " updates"]:
    """Return when the last device makes each update; updates themselves take no time."""
    scheduler = get_schedule(name)
    flush = not scheduler.asynchronous
    # Steps with a flush are all alike: one is timed and repeated.
    spec = ProgramSpec(
        schedule=name, stages=stages, micro_batches=per_step, steps=1 if flush else steps
    )
    structure = build(spec)
    durations = np.zeros(structure.n_classes)
    for phase, stage_s in passes.by_phase.items():
        in_phase = structure.class_kind == Kind[phase.name]
        durations[in_phase] = (
            stage_s[structure.class_stage[in_phase]] * structure.class_span[in_phase]
        )
    durations[np.isin(structure.class_kind, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))] = (
        passes.transfer_s
    )
    timeline = event_times(structure, durations)
    optimizer = structure.kind == Kind.OPTIMIZER
    ends, device = timeline.end_s[optimizer], structure.device[optimizer]
    if flush:
        return float(ends.max()) * np.arange(1, steps + 1)
    # Devices update at different times; an update counts as made when the last of them has.
    by_device = [np.sort(ends[device == d]) for d in range(stages)]
    return np.max(by_device, axis=0)


class MiniBatches(NamedTuple):
    """Data by micro-batch, as a schedule takes them."""

    per_step: int
    """Micro-batches between two updates."""
    inputs: np.ndarray
    targets: np.ndarray
    passes: PassTimes
    """Times of the passes of one micro-batch."""


def as_mini_batches(
    name: str, per_step: int, inputs: np.ndarray, targets: np.ndarray, passes: PassTimes
) -> MiniBatches:
    """Regroup micro-batches for a schedule that updates after every one of them (PipeDream).

    Each mini-batch becomes one micro-batch, which takes as long as its micro-batches did. Other
    schedules keep what they are given.
    """
    scheduler = get_schedule(name)
    # Asked on a small case (two steps of two micro-batches): does this schedule update after every
    # micro-batch?
    if not scheduler.asynchronous or int(scheduler(1, 2, 1, 2).updates.sum()) < 4:
        return MiniBatches(per_step, inputs, targets, passes)
    inputs = inputs[: len(inputs) // per_step * per_step]
    targets = targets[: len(targets) // per_step * per_step]
    inputs = inputs.reshape(-1, per_step * inputs.shape[1], *inputs.shape[2:])
    targets = targets.reshape(-1, per_step * targets.shape[1], *targets.shape[2:])
    mini_batch_passes = PassTimes(
        per_step * passes.forward_s,
        per_step * passes.backward_input_s,
        per_step * passes.backward_weight_s,
        transfer_s=per_step * passes.transfer_s,
    )
    return MiniBatches(1, inputs, targets, mini_batch_passes)


def teacher_data(
    model: LayeredModel, micro_batches: int, *, examples: int, width: int, seed: int
) -> tuple[
    Float[np.ndarray, "micro_batches examples width"],
    Float[np.ndarray, "micro_batches examples width"],
]:
    """Random inputs, with the outputs of the model under other weights as targets.

    Raises:
        PerfModelError: fewer than one micro-batch.
    """
    if micro_batches < 1:
        raise PerfModelError(
            f"data for training needs at least one micro-batch, got {micro_batches}"
        )
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(micro_batches, examples, width))
    targets = model.output(model.initial(seed + 1000), jnp.asarray(inputs.reshape(-1, width)))
    return inputs, np.asarray(targets).reshape(inputs.shape)
