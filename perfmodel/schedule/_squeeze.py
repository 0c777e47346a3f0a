"""Turns a building block into a schedule, and removes idle time of warm-up and cool-down (Qi et al.
2024b, section 3 and appendix).

The block is repeated once per micro-batch. In between it leaves slots idle at both ends of the
step, where fewer micro-batches overlap than in the middle; squeezing fills them with passes that
could have run earlier, as long as no device holds more than the repeated block does.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.schedule._construct import earliest_slots, from_keys
from perfmodel.schedule._registry import v_stages
from perfmodel.schedule._schedule import Phase, Schedule

Slots = Int[np.ndarray, "devices chunks micro_batches"]
"""Slot of every pass of one kind."""
DeviceSlots = Int[np.ndarray, "chunks micro_batches"]
"""Slots of one device's passes of one kind."""
_FIRST, _BACK = 0, 1
"""Chunks of a V: towards the last device, and back."""


def squeezed(name: str, forward: Slots, backward: Slots) -> Schedule:
    """The schedule of a repeated block of a V with two chunks, and weight gradients.

    Passes keep the order of their device's queue of each kind. Two rounds: in the first weight
    gradients have slots of their own and move along; in the second the input gradients of the
    cool-down go before them.

    Args:
        name: the schedule's name.
        forward, backward: slots of forwards and input gradients of the repeated block, no two of a
            device alike.
    """
    # No device may hold more than any does in the repeated block.
    limit = 0
    for device_forward, device_backward in zip(forward, backward, strict=True):
        limit = max(limit, int(_alive(device_forward, device_backward).max()))

    # The steady middle stays as it is, from the first micro-batch's last pass to the last one's
    # first. After each round all passes run as early as their new order allows.
    for with_weights in (True, False):
        steady = range(int(backward[0, _FIRST, 0]), int(forward[0, _FIRST, -1]))
        forward, backward, weight = _earlier(forward, backward, limit, steady, with_weights)
        schedule = _schedule_of_slots(name, forward, backward, weight)
        forward = _slots_of(schedule, Phase.FORWARD)
        backward = _slots_of(schedule, Phase.BACKWARD_INPUT)
    return schedule


def _schedule_of_slots(name: str, forward: Slots, backward: Slots, weight: Slots) -> Schedule:
    """Start the passes in the order of their slots, each as early as possible."""
    keys = {Phase.FORWARD: forward, Phase.BACKWARD_INPUT: backward, Phase.BACKWARD_WEIGHT: weight}
    schedule = from_keys(name, v_stages(len(forward), 2), keys)
    return replace(schedule, slot=earliest_slots(schedule))


def _slots_of(schedule: Schedule, phase: Phase) -> Slots:
    """Slots of a phase's instructions, by device, chunk and micro-batch."""
    in_phase = schedule.phase == phase
    work = schedule.device[in_phase], schedule.chunk[in_phase], schedule.micro_batch[in_phase]
    slots = np.empty((schedule.devices, schedule.chunks, schedule.micro_batches), np.int64)
    slots[work] = schedule.slot[in_phase]
    return slots


def _free(forward: Slots, backward: Slots) -> Int[np.ndarray, " slots"]:
    """Slots without a forward pass or input gradient on a device, including enough slots for all
    weight gradients at the end."""
    idle = np.ones(int(max(forward.max(), backward.max())) + 2 + backward.size, bool)
    idle[forward.ravel()] = idle[backward.ravel()] = False
    return np.flatnonzero(idle)


def _weights(forward: DeviceSlots, backward: DeviceSlots) -> DeviceSlots:
    """Slots of a device's weight gradients: the first free slot after the input gradient and the
    previous weight gradient."""
    # Number the free slots. The k-th weight gradient takes number max(first after its input
    # gradient, number of the one before + 1); less k, that recurrence is a running maximum.
    free = _free(forward, backward)
    k = np.arange(backward.size)
    first_after = np.searchsorted(free, np.sort(backward, axis=None), side="right")
    number = np.maximum.accumulate(first_after - k) + k
    return _in_order_of_inputs(backward, free[number])


def _in_order_of_inputs(backward: DeviceSlots, weight: Int[np.ndarray, " passes"]) -> DeviceSlots:
    """Ascending slots of weight gradients, assigned in the order of the input gradients."""
    assigned = np.empty(backward.size, np.int64)
    assigned[np.argsort(backward.ravel(), kind="stable")] = weight
    return assigned.reshape(backward.shape)


def _back_first(forward: DeviceSlots, backward: DeviceSlots) -> DeviceSlots:
    """Weight gradients of a device in the slots of `_weights`, those of the back chunk first."""
    assigned = np.empty_like(backward)
    inputs = np.sort(backward, axis=1)
    n_assigned = [0, 0]
    for slot in np.sort(_weights(forward, backward), axis=None).tolist():
        # Chunks with a weight gradient whose input gradient has run; there is one for each of these
        # slots.
        waiting = []
        for chunk in (_BACK, _FIRST):
            following = n_assigned[chunk]
            if following < inputs.shape[1] and inputs[chunk, following] < slot:
                waiting.append(chunk)
        chunk = waiting[0]
        assigned[chunk, n_assigned[chunk]] = slot
        n_assigned[chunk] += 1
    return assigned


def _alive(forward: DeviceSlots, backward: DeviceSlots) -> Int[np.ndarray, " slots"]:
    """Micro-batches (of one chunk) that a device holds in every slot."""
    weight = _weights(forward, backward)
    change = np.zeros(int(weight.max()) + 1, np.int64)
    change[forward.ravel()] += 1
    change[weight.ravel()] -= 1
    return np.cumsum(change)


@dataclass
class _Device:
    """One device while its passes move."""

    idle: Bool[np.ndarray, " slots"]
    """Whether the device runs nothing in a slot."""
    alive: Int[np.ndarray, " slots"]
    """Micro-batches held; only used if weight gradients have slots."""

    def first_idle(self, after: int, before: int) -> int:
        """Return the first idle slot from `after` to `before`, which itself counts as idle."""
        idle_slots = np.flatnonzero(self.idle[after:before])
        return after + int(idle_slots[0]) if len(idle_slots) else before

    def move(self, source: int, target: int, change: int) -> None:
        """Let a pass run earlier; `change` is how many more micro-batches are then held."""
        self.idle[source], self.idle[target] = True, False
        self.alive[target:source] += change


class _Queue(IntEnum):
    """Passes of one kind on a device, which keep their order among themselves."""

    FORWARD_DOWN = 0
    """Forwards of the first chunk, on the way to the last device."""
    FORWARD_UP = 1
    """Forwards of the second chunk, on the way back."""
    INPUT_DOWN = 2
    """Input gradients of the second chunk, on the way to the last device."""
    INPUT_UP = 3
    """Input gradients of the first chunk, on the way back."""
    WEIGHT = 4
    """Weight-gradient passes of both chunks."""


_ADDS_ALIVE = {
    _Queue.FORWARD_DOWN: 1,
    _Queue.FORWARD_UP: 1,
    _Queue.INPUT_DOWN: 0,
    _Queue.INPUT_UP: 0,
    _Queue.WEIGHT: -1,
}
"""Change that a pass makes to the number of micro-batches that a device holds."""


class _SlotsOfPasses(NamedTuple):
    """Slots in which passes run, by device, chunk and micro-batch."""

    forward: Slots
    input_gradient: Slots
    weight_gradient: Slots


def _slots_until_room(alive: Int[np.ndarray, " slots"], limit: int) -> int:
    """Number of slots up to the last one in which `limit` micro-batches are alive."""
    full = np.flatnonzero(alive >= limit)
    return int(full[-1]) + 1 if len(full) else 0


def _earlier(
    forward: Slots, backward: Slots, limit: int, steady: range, with_weights: bool
) -> _SlotsOfPasses:
    """Move passes outside the steady middle to the first idle slot that is allowed.

    Without weight gradients in slots of their own only the cool-down moves, and `limit` holds for
    the weight gradients that idle slots would take.
    """
    # Slots of every queue, by device; only these change below.
    p = len(forward)
    weight = np.stack([np.sort(_weights(forward[d], backward[d]), axis=None) for d in range(p)])
    slot = {
        _Queue.FORWARD_DOWN: forward[:, _FIRST].copy(),
        _Queue.FORWARD_UP: forward[:, _BACK].copy(),
        _Queue.INPUT_DOWN: backward[:, _BACK].copy(),
        _Queue.INPUT_UP: backward[:, _FIRST].copy(),
        _Queue.WEIGHT: weight,
    }
    passes = []
    for queue in _Queue:
        if queue is _Queue.WEIGHT and not with_weights:
            continue
        for (d, i), source in np.ndenumerate(slot[queue]):
            passes.append((int(source), d, queue, i))

    # Earlier passes move first, so that dependent ones can follow.
    devices = [_device(forward[d], backward[d], weight[d], with_weights) for d in range(p)]
    for source, d, queue, i in sorted(passes):
        if source in steady or (not with_weights and source < steady.start):
            continue
        earliest = _inputs_done(slot, d, queue, i, p)
        if with_weights:
            # A forward that moves holds its micro-batch from there on: not before the device last
            # is full.
            if _ADDS_ALIVE[queue] > 0:
                earliest += _slots_until_room(devices[d].alive[earliest:source], limit)
            target = devices[d].first_idle(earliest, source)
            devices[d].move(source, target, _ADDS_ALIVE[queue])
        else:
            slots_on_device = {kind: slots[d] for kind, slots in slot.items()}
            window = range(earliest, source)
            target = _first_within(devices[d], slots_on_device, queue, i, window, limit)
            devices[d].move(source, target, 0)
        slot[queue][d, i] = target

    # Weight gradients follow the input gradients to where these have moved.
    forward = np.stack([slot[_Queue.FORWARD_DOWN], slot[_Queue.FORWARD_UP]], axis=1)
    backward = np.stack([slot[_Queue.INPUT_UP], slot[_Queue.INPUT_DOWN]], axis=1)
    if with_weights:
        weights = [_in_order_of_inputs(backward[d], weight[d]) for d in range(p)]
    else:
        weights = [_back_first(forward[d], backward[d]) for d in range(p)]
    return _SlotsOfPasses(forward, backward, np.stack(weights))


def _device(
    forward: DeviceSlots,
    backward: DeviceSlots,
    weight: Int[np.ndarray, " passes"],
    with_weights: bool,
) -> _Device:
    """A device with the slots of its passes, and of separate weight gradients."""
    alive = _alive(forward, backward)
    idle = np.ones(max(len(alive), int(weight.max()) + 1), bool)
    idle[forward.ravel()] = False
    idle[backward.ravel()] = False
    if with_weights:
        idle[weight.ravel()] = False
    return _Device(idle, alive)


def _inputs_done(slot: dict[_Queue, np.ndarray], d: int, queue: _Queue, i: int, p: int) -> int:
    """First slot after all dependencies of a pass and after the previous pass of its kind."""
    # Passes of a queue keep their order.
    needs = [-1] if i == 0 else [int(slot[queue][d, i - 1])]
    if queue is _Queue.WEIGHT:
        # The i-th weight gradient follows the i-th input gradient of the device, of whichever
        # chunk.
        inputs = np.concatenate([slot[_Queue.INPUT_DOWN][d], slot[_Queue.INPUT_UP][d]])
        needs.append(int(np.partition(inputs, i)[i]))
        return max(needs) + 1

    # The same micro-batch's pass on the device that it comes from.
    neighbour = d - 1 if queue in (_Queue.FORWARD_DOWN, _Queue.INPUT_DOWN) else d + 1
    if 0 <= neighbour < p:
        needs.append(int(slot[queue][neighbour, i]))
    # The four ways follow one another, and the last needs the activations of the first chunk's
    # forward too.
    if queue is not _Queue.FORWARD_DOWN:
        needs.append(int(slot[_Queue(queue - 1)][d, i]))
    if queue is _Queue.INPUT_UP:
        needs.append(int(slot[_Queue.FORWARD_DOWN][d, i]))
    return max(needs) + 1


def _first_within(
    device: _Device,
    slots_on_device: dict[_Queue, Int[np.ndarray, " passes"]],
    queue: _Queue,
    micro_batch: int,
    window: range,
    limit: int,
) -> int:
    """The first idle slot of a window in which a device's pass, and later weight gradients, keep
    the limit; the end of the window if there is none."""
    moved = {kind: slots.copy() for kind, slots in slots_on_device.items()}
    for idle in np.flatnonzero(device.idle[window.start : window.stop]).tolist():
        target = window.start + idle
        moved[queue][micro_batch] = target
        forward = np.stack([moved[_Queue.FORWARD_DOWN], moved[_Queue.FORWARD_UP]])
        backward = np.stack([moved[_Queue.INPUT_UP], moved[_Queue.INPUT_DOWN]])
        if _alive(forward, backward).max() <= limit:
            return target
    return window.stop
