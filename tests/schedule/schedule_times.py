"""Uniform stages: shorthand for the tests of schedules."""

import numpy as np

from perfmodel.schedule import PassTimes, Schedule
from perfmodel.schedule.facts import starts_and_ends
from perfmodel.schedule.memory import peak_live


def uniform(
    stages: int, forward: float, backward: float, weight: float | None = None, transfer: float = 0.0
) -> PassTimes:
    """Equal stages; a backward of which half, or `weight`, is the weight gradient."""
    weight_gradient = backward / 2 if weight is None else weight
    ones = np.ones(stages)
    return PassTimes(
        forward * ones, (backward - weight_gradient) * ones, weight_gradient * ones, transfer
    )


def makespan(schedule: Schedule, times: PassTimes) -> float:
    return float(starts_and_ends(schedule, times)[1].max())


def longest_device_span(schedule: Schedule, times: PassTimes) -> float:
    """Longest time from a device's first to its last pass."""
    start, end = starts_and_ends(schedule, times)
    return float((end[schedule.offsets[1:] - 1] - start[schedule.offsets[:-1]]).max())


def bubble_fraction(schedule: Schedule, times: PassTimes) -> float:
    start, end = starts_and_ends(schedule, times)
    return 1 - float((end - start).sum()) / (schedule.devices * float(end.max()))


def live_micro_batches(schedule: Schedule) -> np.ndarray:
    """Peak activations per device, in micro-batches of one p-th of the model."""
    return (
        peak_live(schedule, np.ones(schedule.n_stages))
        * schedule.replicas
        / schedule.chunks
        / schedule.slices
    )
