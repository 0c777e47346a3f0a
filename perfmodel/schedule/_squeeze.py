"""From a building block to a schedule without idle warm-up and cool-down (Qi et al. 2024b, section 3 and appendix).

The block is repeated once per micro-batch. In between it leaves slots idle at both ends of the step, where fewer
micro-batches overlap than in the middle; squeezing fills them with passes that could have run earlier, as long as
no device holds more than the repeated block does.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.schedule._check import earliest_slots
from perfmodel.schedule._construct import from_keys, v_stages
from perfmodel.schedule._schedule import Phase, Schedule

Slots = Int[np.ndarray, "devices chunks micro_batches"]
_FIRST, _BACK = 0, 1
"""Chunks of a V: the way to the last device, and the way back."""


def squeezed(name: str, forward: Slots, backward: Slots) -> Schedule:
    """The schedule that a repeated block of a V of two chunks per device becomes, weight gradients added.

    Passes keep the order of their device's queue of each kind. Two rounds: in the first weight gradients have
    slots of their own and move along; in the second the input gradients of the cool-down go before them.

    Args:
        name: the schedule's name.
        forward, backward: slots of forwards and input gradients of the repeated block, no two of a device alike.
    """
    limit = max(int(_alive(*one).max()) for one in zip(forward, backward, strict=True))
    for with_weights in (True, False):
        steady = range(int(backward[0, _FIRST, 0]), int(forward[0, _FIRST, -1]))
        forward, backward, weight = _earlier(forward, backward, limit, steady, with_weights)
        schedule = _in_order(name, forward, backward, weight)
        forward, backward = (_slots_of(schedule, phase) for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT))
    return schedule


def _in_order(name: str, forward: Slots, backward: Slots, weight: Slots) -> Schedule:
    """The passes in the order of their slots, each as early as that allows."""
    keys = {Phase.FORWARD: forward, Phase.BACKWARD_INPUT: backward, Phase.BACKWARD_WEIGHT: weight}
    schedule = from_keys(name, v_stages(len(forward), 2), keys)
    return replace(schedule, slot=earliest_slots(schedule))


def _slots_of(schedule: Schedule, phase: Phase) -> Slots:
    of = schedule.phase == phase
    out = np.empty((schedule.devices, schedule.chunks, schedule.micro_batches), np.int64)
    out[schedule.device[of], schedule.chunk[of], schedule.micro_batch[of]] = schedule.slot[of]
    return out


def _free(forward: Slots, backward: Slots) -> Int[np.ndarray, " slots"]:
    """Slots in which a device runs no forward and no input gradient, with room for all weight gradients at the end."""
    idle = np.ones(int(max(forward.max(), backward.max())) + 2 + backward.size, bool)
    idle[forward.ravel()] = idle[backward.ravel()] = False
    return np.flatnonzero(idle)


def _weights(forward: Int[np.ndarray, "2 m"], backward: Int[np.ndarray, "2 m"]) -> Int[np.ndarray, "2 m"]:
    """Weight gradients of a device: each in the first free slot after its input gradient and the one before it."""
    free = _free(forward, backward)
    turn = np.arange(backward.size)
    at = np.searchsorted(free, np.sort(backward, axis=None), side="right")
    return _dealt(backward, free[np.maximum.accumulate(at - turn) + turn])


def _dealt(backward: Int[np.ndarray, "2 m"], weight: Int[np.ndarray, " 2m"]) -> Int[np.ndarray, "2 m"]:
    """Slots of weight gradients, dealt in the order of the input gradients."""
    out = np.empty(backward.size, np.int64)
    out[np.argsort(backward.ravel(), kind="stable")] = weight
    return out.reshape(backward.shape)


def _back_first(forward: Int[np.ndarray, "2 m"], backward: Int[np.ndarray, "2 m"]) -> Int[np.ndarray, "2 m"]:
    """The same slots; of the weight gradients that wait for one, those of the way back first."""
    out, ready = np.empty_like(backward), np.sort(backward, axis=1)
    done = [0, 0]
    for at in np.sort(_weights(forward, backward), axis=None).tolist():
        waiting = [c for c in (_BACK, _FIRST) if done[c] < ready.shape[1] and ready[c, done[c]] < at]
        out[waiting[0], done[waiting[0]]] = at
        done[waiting[0]] += 1
    return out


def _alive(forward: Int[np.ndarray, "2 m"], backward: Int[np.ndarray, "2 m"]) -> Int[np.ndarray, " slots"]:
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
    alive: Int[np.ndarray, " slots"]
    """Micro-batches held; of no use where weight gradients have no slots."""

    def first_idle(self, after: int, before: int) -> int:
        """The first idle slot from `after` up to `before`, which itself is taken for idle."""
        found = np.flatnonzero(self.idle[after:before])
        return after + int(found[0]) if len(found) else before

    def move(self, source: int, target: int, change: int) -> None:
        """Let a pass run earlier; `change` is what it adds to the micro-batches held."""
        self.idle[source], self.idle[target] = True, False
        self.alive[target:source] += change


def _earlier(
    forward: Slots, backward: Slots, limit: int, steady: range, with_weights: bool
) -> tuple[Slots, Slots, Slots]:
    """Move passes outside of the steady middle to the first idle slot that their inputs and the limit allow.

    Without weight gradients in slots of their own only the cool-down moves, and `limit` holds for the weight
    gradients that idle slots would take.
    """
    p = len(forward)
    # forwards down and up, input gradients down and up, weight gradients in turn
    slot = [forward[:, _FIRST].copy(), forward[:, _BACK].copy(), backward[:, _BACK].copy(), backward[:, _FIRST].copy()]
    weight = np.stack([np.sort(_weights(*one), axis=None) for one in zip(forward, backward, strict=True)])
    passes = [(int(at), d, kind, i) for kind, s in enumerate(slot) for (d, i), at in np.ndenumerate(s)]
    if with_weights:
        passes += [(int(at), d, 4, i) for (d, i), at in np.ndenumerate(weight)]
    devices = [_device(forward[d], backward[d], weight[d], with_weights) for d in range(p)]
    slot.append(weight)
    for at, d, kind, i in sorted(passes):
        if at in steady or (not with_weights and at < steady.start):
            continue
        after = _inputs_done(slot, d, kind, i, p)
        if with_weights:
            if kind < 2:  # a forward that moves holds its micro-batch from there on
                full = np.flatnonzero(devices[d].alive[after:at] >= limit)
                after += int(full[-1]) + 1 if len(full) else 0
            slot[kind][d, i] = target = devices[d].first_idle(after, at)
            devices[d].move(at, target, (1, 1, 0, 0, -1)[kind])
        else:
            slot[kind][d, i] = target = _first_within(devices[d], slot, d, kind, i, after, at, limit)
            devices[d].move(at, target, 0)
    forward, backward = np.stack(slot[:2], axis=1), np.stack([slot[3], slot[2]], axis=1)
    if with_weights:
        return forward, backward, np.stack([_dealt(*one) for one in zip(backward, weight, strict=True)])
    return forward, backward, np.stack([_back_first(*one) for one in zip(forward, backward, strict=True)])


def _device(forward: np.ndarray, backward: np.ndarray, weight: np.ndarray, with_weights: bool) -> _Device:
    alive = _alive(forward, backward)
    idle = np.ones(max(len(alive), int(weight.max()) + 1), bool)
    for taken in (forward, backward, *([weight] if with_weights else [])):
        idle[taken.ravel()] = False
    return _Device(idle, alive)


def _inputs_done(slot: list[np.ndarray], d: int, kind: int, i: int, p: int) -> int:
    """First slot after everything that a pass needs, and after the pass of its kind before it."""
    needs = [-1] if i == 0 else [int(slot[kind][d, i - 1])]
    if kind == 4:
        needs.append(int(np.partition(np.concatenate([slot[2][d], slot[3][d]]), i)[i]))
    else:
        before = d - 1 if kind in (0, 2) else d + 1
        if 0 <= before < p:
            needs.append(int(slot[kind][before, i]))
        if kind:
            needs.append(int(slot[kind - 1][d, i]))
        if kind == 3:
            needs.append(int(slot[0][d, i]))
    return max(needs) + 1


def _first_within(
    device: _Device, slot: list[np.ndarray], d: int, kind: int, i: int, after: int, before: int, limit: int
) -> int:
    """The first idle slot in which a pass leaves the device within its limit."""
    here = [s[d].copy() for s in slot[:4]]
    for target in (after + np.flatnonzero(device.idle[after:before])).tolist():
        here[kind][i] = target
        if _alive(np.stack(here[:2]), np.stack([here[3], here[2]])).max() <= limit:
            return target
    return before
