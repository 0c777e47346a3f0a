"""Which version of the weights every pass computes with, how stale that is, and how many are kept."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

from perfmodel.errors import PerfModelError
from perfmodel.schedule._schedule import Phase, Schedule

WeightPolicy = Literal["flush", "stashing", "vertical_sync", "double_buffering", "latest"]
"""How weight versions are chosen.

- flush: one version; updated when all work of a step is done.
- stashing: a forward takes the newest version of its device, the backward the same one (PipeDream).
- vertical_sync: both take the version that was newest on the first stage when the micro-batch entered.
- double_buffering: micro-batches of update k take version k - 1 everywhere (PipeDream-2BW).
- latest: a forward takes the version that was newest on the first stage when the micro-batch entered, a
  backward the newest one that all stages had when it began on the last stage (TiMePReSt: vertical but no
  horizontal stashing, section 4.1).
"""


@dataclass(frozen=True, eq=False)
class WeightVersions:
    """Versions are counted by updates: version 0 is the initial one, version k has seen k updates."""

    used: Int[np.ndarray, " instructions"]
    """Version that each instruction computes with."""
    read: Int[np.ndarray, "devices updates"]
    """Oldest version that the backward passes of each update (from 1 on) compute with on each device."""
    held: Int[np.ndarray, " devices"]
    """Most versions that a device keeps at once."""

    @property
    def difference(self) -> Int[np.ndarray, "devices updates"]:
        """Version difference: number of the update less the version that its gradient was computed with
        (1 without staleness; TiMePReSt, section 4.4)."""
        return np.arange(1, self.read.shape[1] + 1) - self.read

    @property
    def steady_difference(self) -> Int[np.ndarray, " devices"]:
        """Version difference of every device once the pipeline is full: that of the last update."""
        return self.difference[:, -1]

    @property
    def sequences(self) -> int:
        """Independent sequences of updates, whose gradients never see each other's weights: each begins with
        an update that reads version 0 on every device (TiMePReSt, section 4.4, multiple sequence problem)."""
        return int((self.read == 0).all(axis=0).sum())


def weight_versions(schedule: Schedule, policy: WeightPolicy) -> WeightVersions:
    """The versions that a schedule's passes use under a policy.

    Raises:
        PerfModelError: the schedule never updates weights, or deadlocks, or devices hold several stages.
    """
    if policy == "flush" or not schedule.updates.any():
        return WeightVersions(
            np.zeros(schedule.n_instructions, np.int64),
            np.zeros((schedule.devices, 1), np.int64),
            np.ones(schedule.devices, np.int64),
        )
    if schedule.chunks != 1 or (schedule.stage[:, 0] != np.arange(schedule.devices)).any():
        raise PerfModelError(
            f"schedule {schedule.name}: weight versions are defined for one stage per device, in order"
        )
    local = schedule.updates_before
    forward = schedule.phase == Phase.FORWARD
    first, last = schedule.device == 0, schedule.device == schedule.devices - 1
    batch, m = schedule.micro_batch, schedule.micro_batches
    entered = np.zeros(m, np.int64)
    entered[batch[first & forward]] = local[first & forward]
    ends = schedule.ends_backward
    if policy == "double_buffering":
        update_of = np.zeros(m, np.int64)
        update_of[batch[last & ends]] = local[last & ends]
        used = np.maximum(update_of[batch] - 1, 0)
    elif policy == "latest":
        done = schedule.end_slot[first & schedule.updates]
        begun = np.zeros(m, np.int64)
        begun[batch[last & ends]] = np.searchsorted(done, schedule.slot[last & ends], side="right")
        used = np.where(forward, entered[batch], begun[batch])
    elif policy == "vertical_sync":
        used = entered[batch]
    else:
        taken = np.zeros((schedule.devices, m), np.int64)
        index, covered = schedule.covers
        of_forward = forward[index]
        taken[schedule.device[index][of_forward], covered[of_forward]] = local[index][of_forward]
        used = taken[schedule.device, batch]
    read = np.full((schedule.devices, int(local.max()) + 1), np.iinfo(np.int64).max)
    np.minimum.at(read, (schedule.device[ends], local[ends]), used[ends])
    complete = int((last & schedule.updates).sum())
    return WeightVersions(used, read[:, :complete], _held(schedule, local, used))


def _held(
    schedule: Schedule, local: Int[np.ndarray, " instructions"], used: Int[np.ndarray, " instructions"]
) -> Int[np.ndarray, " devices"]:
    """Most versions kept at once: from the update that makes one until its last use, or until the next is made."""
    held = np.ones(schedule.devices, np.int64)
    for device in range(schedule.devices):
        own = slice(schedule.offsets[device], schedule.offsets[device + 1])
        made = np.append(-1, np.flatnonzero(schedule.updates[own]))
        until = np.append(made[1:], len(local[own]))
        np.maximum.at(until, used[own], np.arange(len(local[own])))
        change = np.zeros(len(local[own]) + 2, np.int64)
        np.add.at(change, made + 1, 1)
        np.add.at(change, until + 1, -1)
        held[device] = int(np.cumsum(change).max())
    return held
