"""Asynchronous pipelines, which never flush: PipeDream, PipeDream-2BW, TiMePReSt's nF1B.

Also which version of the weights every pass of them computes with, how stale that is, and how many
are kept.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from perfmodel.errors import PerfModelError
from perfmodel.schedule._construct import arrange, from_keys
from perfmodel.schedule._registry import WeightPolicy, looped_stages, register
from perfmodel.schedule._schedule import Phase, Schedule
from perfmodel.schedule._synchronous import one_forward_one_backward


@register("pipedream", chunks=1, weights="stashing")
def pipedream(devices: int, micro_batches: int, chunks: int, per_step: int) -> Schedule:
    """1F1B in which every micro-batch is a mini-batch: weights are updated after each backward
    (Narayanan et al. 2019)."""
    return _one_by_one("pipedream", devices, micro_batches, 1)


@register("pipedream-vertical-sync", chunks=1, weights="vertical_sync")
def pipedream_vertical_sync(
    devices: int, micro_batches: int, chunks: int, per_step: int
) -> Schedule:
    """PipeDream with one weight version per micro-batch on all stages (section 3.3, vertical
    sync)."""
    return _one_by_one("pipedream-vertical-sync", devices, micro_batches, 1)


@register("pipedream-2bw", chunks=1, weights="double_buffering")
def pipedream_2bw(devices: int, micro_batches: int, chunks: int, per_step: int) -> Schedule:
    """1F1B with gradients of `per_step` micro-batches accumulated before each update (Narayanan et
    al. 2021)."""
    return _one_by_one("pipedream-2bw", devices, micro_batches, per_step)


def version_difference(workers: int, micro_batches: int) -> int:
    """Version difference of nF1B in the unit time of the paper's figures: v = ceil(W / (N + 1)).

    Backward k starts at W + N - 1 + (k - 1)(N + 1) on the last of W workers and takes W slots to
    the first. The paper's floor((W + N - 2) / N) counts N slots per mini-batch and forgets the one
    of the backward (section 4.4).
    """
    return -(-workers // (micro_batches + 1))


def natural_slots(workers: int, micro_batches: int) -> int:
    """The longest backward pass (in forwards of a micro-batch) whose gradients are no later than in
    the paper's figures.

    Backwards that last b slots start N + b slots apart on the last worker and take W b slots to the
    first, so gradients are ceil(W b / (N + b)) updates late. That stays at most v, the
    `version_difference`, while b <= v N / (W - v). No more than 2 N is needed, which is how long a
    backward really takes.
    """
    difference = version_difference(workers, micro_batches)
    longest = 2 * micro_batches
    if workers <= difference:
        return longest
    return min(longest, difference * micro_batches // (workers - difference))


@register(
    "nf1b", chunks=1, number="slots", plain=False, weights="latest", period=version_difference
)
def nf1b(devices: int, micro_batches: int, chunks: int, per_step: int, slots: int = 0) -> Schedule:
    """TiMePReSt's nF1B (section 4.2): N forwards, one per micro-batch, then one backward of the
    mini-batch.

    A backward that is ready goes before forwards. How far a stage runs ahead with forwards follows
    from how long a backward lasts in the order. The longer it lasts, the less a stage idles at real
    durations, where it takes as long as 2 N forwards; but the more mini-batches are under way, and
    the later gradients are. By default the order is the one that idles least while gradients are no
    later than in the paper's figures (`natural_slots`). On two workers that is `F F (B F)*` on the
    first and `(F B)*` on the second, in mini-batches: no stage ever idles.

    Args:
        per_step: N, the micro-batches of a mini-batch.
        slots: number of forwards that last as long as a backward, with any number of micro-batches
            under way: 1 in the order of the paper's figures 7, 9 and 10, 2 N in that of real
            durations. Not given: the default.
    """
    # The work: a backward stands at the first micro-batch of its mini-batch.
    i = np.broadcast_to(np.arange(micro_batches), (devices, 1, micro_batches))
    pool = from_keys(
        "nf1b",
        looped_stages(devices, 1),
        {Phase.FORWARD: i, Phase.BACKWARD: np.where(i % per_step == 0, micro_batches + i, -1)},
        spans={Phase.BACKWARD: per_step},
    )
    # A queue of backwards (0) and one of forwards (1), which is also their priority. As many
    # mini-batches as there are workers are enough to keep all of them busy.
    is_forward = (pool.phase == Phase.FORWARD).astype(np.int64)
    length = np.where(is_forward, 1, slots or natural_slots(devices, per_step))
    limit = None if slots else devices * per_step
    order = arrange(pool, is_forward, is_forward, limit=limit, length=length)
    return _updating_every(1, order)


def _one_by_one(name: str, devices: int, micro_batches: int, per_update: int) -> Schedule:
    """1F1B without flushes, with an update after a number of backwards."""
    stream = _updating_every(per_update, one_forward_one_backward(devices, micro_batches))
    return replace(stream, name=name)


def _updating_every(backwards: int, schedule: Schedule) -> Schedule:
    """The schedule with weights updated after a number of backwards of each device."""
    ends = schedule.ends_backward
    return replace(schedule, updates=ends & (schedule.running_total(ends) % backwards == 0))


@dataclass(frozen=True, eq=False)
class WeightVersions:
    """Weight versions that the passes of a stream use.

    Versions are counted by updates: version 0 is the initial one, version k has seen k updates.
    """

    used: Int[np.ndarray, " instructions"]
    """Version that each instruction computes with."""
    read: Int[np.ndarray, "devices updates"]
    """Oldest version that the backward passes of each update (from 1 on) compute with on each
    device."""
    stored: Int[np.ndarray, " devices"]
    """Most versions that a device keeps at once."""

    @property
    def difference(self) -> Int[np.ndarray, "devices updates"]:
        """Staleness of each update: its number minus the version used for its gradient.

        It is 1 without staleness (TiMePReSt, section 4.4).
        """
        return np.arange(1, self.read.shape[1] + 1) - self.read

    @property
    def steady_difference(self) -> Int[np.ndarray, " devices"]:
        """Version difference of every device in the steady state."""
        return self.difference[:, -1]

    @property
    def sequences(self) -> int:
        """Number of independent sequences of updates.

        Each begins with an update that reads version 0 on every device (TiMePReSt, section 4.4,
        multiple sequence problem).
        """
        return int((self.read == 0).all(axis=0).sum())


def weight_versions(schedule: Schedule, policy: WeightPolicy) -> WeightVersions:
    """Determine the weight versions that a schedule's passes use under a policy.

    Raises:
        PerfModelError: the schedule never updates weights, or deadlocks, or devices hold several
            stages.
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
    used = _used_versions(schedule, policy)

    # An update's gradient is as old as the oldest version that any of its backwards computed with.
    # An update that the stream ends before, on the last device, is left out.
    ends = schedule.ends_backward
    update = schedule.updates_before
    read = np.full((schedule.devices, int(update.max()) + 1), np.iinfo(np.int64).max)
    np.minimum.at(read, (schedule.device[ends], update[ends]), used[ends])
    on_last_device = schedule.device == schedule.devices - 1
    complete = int((on_last_device & schedule.updates).sum())
    return WeightVersions(used, read[:, :complete], _most_stored(schedule, used))


def _used_versions(schedule: Schedule, policy: WeightPolicy) -> Int[np.ndarray, " instructions"]:
    """Version that each instruction computes with, by the rules of `WeightPolicy`."""
    newest = schedule.updates_before
    is_forward = schedule.phase == Phase.FORWARD
    micro_batch, m = schedule.micro_batch, schedule.micro_batches
    on_first_device = schedule.device == 0
    on_last_device = schedule.device == schedule.devices - 1

    # The newest version on the first stage when a micro-batch enters.
    enters = on_first_device & is_forward
    newest_at_entry = np.zeros(m, np.int64)
    newest_at_entry[micro_batch[enters]] = newest[enters]
    if policy == "vertical_sync":
        return newest_at_entry[micro_batch]

    # A backward on the last stage belongs to the update that follows it there.
    ends_on_last = on_last_device & schedule.ends_backward
    if policy == "double_buffering":
        update_of_micro_batch = np.zeros(m, np.int64)
        update_of_micro_batch[micro_batch[ends_on_last]] = newest[ends_on_last]
        return np.maximum(update_of_micro_batch[micro_batch] - 1, 0)

    # The first stage is the last to update, so its updates tell which version all stages have.
    if policy == "latest":
        complete_from_slot = schedule.end_slot[on_first_device & schedule.updates]
        newest_of_all = np.zeros(m, np.int64)
        newest_of_all[micro_batch[ends_on_last]] = np.searchsorted(
            complete_from_slot, schedule.slot[ends_on_last], side="right"
        )
        return np.where(is_forward, newest_at_entry[micro_batch], newest_of_all[micro_batch])

    # Stashing: each device remembers the version of a micro-batch's forward.
    stashed = np.zeros((schedule.devices, m), np.int64)
    index, covered = schedule.covers
    by_forward = is_forward[index]
    stashed[schedule.device[index][by_forward], covered[by_forward]] = newest[index][by_forward]
    return stashed[schedule.device, micro_batch]


def _most_stored(
    schedule: Schedule, used: Int[np.ndarray, " instructions"]
) -> Int[np.ndarray, " devices"]:
    """Most versions kept at once; each lives from the update that makes it until its last use, or
    until the next is made."""
    most = np.ones(schedule.devices, np.int64)
    for device in range(schedule.devices):
        on_device = slice(schedule.offsets[device], schedule.offsets[device + 1])
        updates, used_here = schedule.updates[on_device], used[on_device]
        n = len(updates)

        # Live range of each version, as positions in the device's order; version 0 is there from
        # the start.
        made = np.append(-1, np.flatnonzero(updates))
        last_used = np.append(made[1:], n)
        np.maximum.at(last_used, used_here, np.arange(n))

        # How many ranges overlap: one more where a range begins, one less after its end.
        change = np.zeros(n + 2, np.int64)
        np.add.at(change, made + 1, 1)
        np.add.at(change, last_used + 1, -1)
        most[device] = int(np.cumsum(change).max())
    return most
