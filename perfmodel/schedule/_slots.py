"""Unit-time slots: do given ones respect the schedule, and which are the earliest?"""

import numpy as np
from jaxtyping import Int

from perfmodel.schedule._schedule import NEVER, Schedule


def slots_hold(schedule: Schedule) -> bool:
    """Whether the schedule's slots grow along every device's order and every data dependency."""
    slot = schedule.slot
    same_device = np.diff(schedule.device) == 0
    if (np.diff(slot)[same_device] <= 0).any():
        return False
    return all(((need == NEVER) | (slot[need] < slot)).all() for need in waits(schedule))


def waits(schedule: Schedule) -> list[Int[np.ndarray, " instructions"]]:
    """What each instruction waits for: its own needs, and for the first of a pair those of its partner.

    What a pair computes is there when both have run: whoever needs the first waits for the second.
    """
    needs = list(schedule.dependencies)
    if schedule.paired.any():
        needs = [need + ((need != NEVER) & schedule.paired[need]) for need in needs]
        first = np.flatnonzero(schedule.paired)
        for need in needs[:3]:
            partner = np.full_like(need, NEVER)
            partner[first] = need[first + 1]
            needs.append(partner)
    return needs


def earliest_slots(schedule: Schedule) -> Int[np.ndarray, " instructions"]:
    """Earliest starts if every instruction took one slot and transfers none; `NEVER` in a deadlock.

    All devices advance together, one slot at a time, so the cost is one vector step per slot.
    """
    n = schedule.n_instructions
    unknown = np.iinfo(np.int32).max
    slot = np.append(np.full(n, unknown, np.int32), np.int32(-1))  # last entry: nothing to wait for
    needs = np.stack([np.where(need == NEVER, n, need) for need in waits(schedule)])
    here, end = schedule.offsets[:-1].copy(), schedule.offsets[1:]
    now = 0
    while True:
        active = np.flatnonzero(here < end)
        candidate = here[active]
        ready = (slot[needs[:, candidate]] < now).all(axis=0)
        if not ready.any():
            break
        slot[candidate[ready]] = now
        here[active[ready]] += 1
        now += 1
    return np.where(slot[:-1] == unknown, NEVER, slot[:-1])
