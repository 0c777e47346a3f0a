"""What each instruction waits for, and the earliest unit-time slots that follow from it."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.schedule._schedule import NEVER, Phase, Schedule

_ROLE = np.array([0, 1, 1, 2])
"""By phase: forward, input gradient (alone or in a full backward), weight gradient alone."""
FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(3)


class Dependencies(NamedTuple):
    """Indices of the instructions that each instruction waits for, `NEVER` for none."""

    upstream: Int[np.ndarray, " instructions"]
    """The neighbouring stage's: forward of the stage before, input gradient of the stage after."""
    own: Int[np.ndarray, " instructions"]
    """The same stage's: forward before backward, input gradient before weight gradient."""


def lookup(schedule: Schedule) -> Int[np.ndarray, "roles stages micro_batches"]:
    """Instruction that does a role's work for a stage and micro-batch (the last one if several do)."""
    found = np.full((3, schedule.n_stages, schedule.micro_batches), NEVER, np.int32)
    role = _ROLE[schedule.phase]
    found[role, schedule.instruction_stage, schedule.micro_batch] = np.arange(schedule.n_instructions)
    return found


def dependencies(schedule: Schedule) -> Dependencies:
    """Data dependencies of every instruction; work that no instruction does is waited for by none."""
    found = lookup(schedule)
    role, stage, batch = _ROLE[schedule.phase], schedule.instruction_stage, schedule.micro_batch
    padded = np.full((3, schedule.n_stages + 2, schedule.micro_batches), NEVER, np.int32)
    padded[:, 1:-1] = found
    padded[WEIGHT_GRADIENT] = NEVER  # weight gradients are of use to no other stage
    towards = np.where(role == FORWARD, stage, stage + 2)  # stage - 1 or stage + 1 in padded rows
    upstream = padded[role, towards, batch]
    own = np.where(role == FORWARD, NEVER, found[np.maximum(role - 1, 0), stage, batch])
    return Dependencies(upstream, own)


def respects(
    schedule: Schedule, slot: Int[np.ndarray, " instructions"], needs: Dependencies
) -> Bool[np.ndarray, ""] | bool:
    """Whether `slot` grows along every device's order and every data dependency."""
    same_device = np.diff(schedule.device) == 0
    if (np.diff(slot)[same_device] <= 0).any():
        return False
    return all(((slot[need] < slot) | (need == NEVER)).all() for need in needs)


def earliest_slots(schedule: Schedule, needs: Dependencies) -> Int[np.ndarray, " instructions"]:
    """Earliest starts if every instruction took one slot and transfers none; `NEVER` in a deadlock.

    All devices advance together, one slot at a time, so the cost is one vector step per slot.
    """
    n = schedule.n_instructions
    unknown = np.iinfo(np.int32).max
    slot = np.append(np.full(n, unknown, np.int32), np.int32(-1))  # last entry: nothing to wait for
    waits = np.stack([np.where(need == NEVER, n, need) for need in needs])
    here, end = schedule.offsets[:-1].copy(), schedule.offsets[1:]
    now = 0
    while True:
        active = np.flatnonzero(here < end)
        candidate = here[active]
        ready = (slot[waits[:, candidate]] < now).all(axis=0)
        if not ready.any():
            break
        slot[candidate[ready]] = now
        here[active[ready]] += 1
        now += 1
    return np.where(slot[:-1] == unknown, NEVER, slot[:-1])


def is_backward_end(schedule: Schedule) -> Bool[np.ndarray, " instructions"]:
    """Instructions that end a micro-batch's work on a stage: they complete its weight gradient."""
    return (schedule.phase == Phase.BACKWARD) | (schedule.phase == Phase.BACKWARD_WEIGHT)
