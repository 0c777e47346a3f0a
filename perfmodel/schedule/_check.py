"""Checks that a schedule can run and does all work exactly once.

Also what its instructions wait for, and slots in unit time that respect it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

from perfmodel.errors import PerfModelError
from perfmodel.schedule._schedule import NEVER, Instruction, Phase, Schedule

ProblemKind = Literal["missing", "duplicate", "placement", "order", "deadlock"]


@dataclass(frozen=True)
class Problem:
    """One problem of a schedule, at one instruction."""

    kind: ProblemKind
    instruction: Instruction
    """Location of the problem; for missing work, the device and chunk that could do it, at position -1."""
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def check(schedule: Schedule) -> tuple[Problem, ...]:
    """Find all problems of a schedule; empty if it does all work exactly once and cannot deadlock.

    - missing / duplicate: a stage must run each micro-batch forward once and backward once (whole, or
      as input and weight gradient); a schedule without any backward pass is inference and complete.
    - placement: a backward runs on another device or chunk than its forward.
    - order: an instruction stands before one of the same device that it depends on.
    - deadlock: the first instruction of a device that waits for ever, and what it waits for.
    """
    problems = _work(schedule) + _placement_and_order(schedule)
    return tuple(problems) if problems else tuple(_deadlocks(schedule))


def require_valid(schedule: Schedule) -> None:
    """Raise `PerfModelError` naming the first problem of the schedule, if it has any."""
    problems = check(schedule)
    if problems:
        first, *further = problems
        more = f" (and {len(further)} more)" if further else ""
        raise PerfModelError(f"schedule {schedule.name}: {first}{more}")


def _work(schedule: Schedule) -> list[Problem]:
    """Work that no instruction does, and instructions whose work another one does already."""
    # How often each piece of work is done, by phase, stage and micro-batch.
    m, n_stages = schedule.micro_batches, schedule.n_stages
    index, batch = schedule.covers
    phase, stage = schedule.phase[index].astype(np.int64), schedule.instruction_stage[index]
    work = (phase * n_stages + stage) * m + batch
    count = np.bincount(work, minlength=len(Phase) * n_stages * m).reshape(-1, n_stages, m)

    # How often it should be, by phase; a backward that is both whole and split shows as a whole one too many.
    split = (count[Phase.BACKWARD_INPUT] > 0) | (count[Phase.BACKWARD_WEIGHT] > 0)
    trained = not schedule.forward_only
    expected = np.stack([np.ones_like(split), trained & ~split, trained & split, trained & split])
    problems = []
    for phase, stage, micro_batch in np.argwhere(count < expected).tolist():
        device, chunk = next(iter(np.argwhere(schedule.stage == stage).tolist()), (-1, -1))
        instruction = Instruction(device, -1, Phase(phase), chunk, micro_batch)
        message = f"no device runs {instruction.phase.symbol} of stage {stage} for micro-batch {micro_batch}"
        problems.append(Problem("missing", instruction, message))
    # Of instructions that do the same work all but the first are surplus; where none should do it, all are.
    surplus = (count > expected).ravel()[work]
    if surplus.any():
        is_first = np.zeros(len(work), bool)
        is_first[np.unique(work, return_index=True)[1]] = True
        is_first &= expected.ravel()[work]
        for repeated in np.unique(index[surplus & ~is_first]).tolist():
            instruction = schedule[repeated]
            message = f"{instruction} repeats work that another instruction does"
            problems.append(Problem("duplicate", instruction, message))
    return problems


def _placement_and_order(schedule: Schedule) -> list[Problem]:
    """Backwards on another device or chunk than their forwards, and instructions that stand before their needs."""
    # A backward needs the activations that its forward left on one chunk of one device.
    problems = []
    device = schedule.device
    place = device * schedule.chunks + schedule.chunk
    for i, j in _pairs(schedule.dependencies.same_stage, lambda here, there: place[here] != place[there]):
        message = f"{schedule[i]} must run on the same device as {schedule[j]}"
        problems.append(Problem("placement", schedule[i], message))

    # A device runs its instructions in order, so that waiting for a later one never ends.
    for need in waits(schedule):
        for i, j in _pairs(need, lambda here, there: (device[here] == device[there]) & (there > here)):
            message = f"{schedule[i]} comes before {schedule[j]}, on which it depends"
            problems.append(Problem("order", schedule[i], message))
    return problems


def _pairs(
    need: Int[np.ndarray, " instructions"], wrong: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Iterator[tuple[int, int]]:
    """Instructions and what they need, where `wrong` says so of the two index arrays."""
    here = np.flatnonzero(need != NEVER)
    bad = wrong(here, need[here])
    return zip(here[bad].tolist(), need[here[bad]].tolist(), strict=True)


def _deadlocks(schedule: Schedule) -> list[Problem]:
    """The first instruction of each device that never starts; all later ones are stuck behind it."""
    stuck = schedule.slot == NEVER
    one_before_is_stuck = np.append(False, stuck[:-1]) & (schedule.position > 0)
    problems = []
    for index in np.flatnonzero(stuck & ~one_before_is_stuck).tolist():
        needs = [int(need[index]) for need in waits(schedule)]
        cause = next(schedule[need] for need in needs if need != NEVER and stuck[need])
        message = f"{schedule[index]} waits for {cause}, which never starts"
        problems.append(Problem("deadlock", schedule[index], message))
    return problems


def slots_hold(schedule: Schedule) -> bool:
    """Whether the schedule's slots respect device orders and data dependencies."""
    slot = schedule.slot
    same_device = np.diff(schedule.device) == 0
    if (np.diff(slot)[same_device] <= 0).any():
        return False
    return all(((need == NEVER) | (slot[need] < slot)).all() for need in waits(schedule))


def waits(schedule: Schedule) -> list[Int[np.ndarray, " instructions"]]:
    """The dependencies of each instruction; the first of a pair also waits for its partner's.

    What a pair computes is there when both have run: whoever needs the first waits for the second.
    """
    needs = list(schedule.dependencies)
    if not schedule.paired.any():
        return needs

    # A pair's second instruction directly follows its first, so waiting for it is an index one higher.
    needs = [need + ((need != NEVER) & schedule.paired[need]) for need in needs]

    # Both start together: the first also waits for what the second needs.
    first_of_pair = np.flatnonzero(schedule.paired)
    for need in list(needs):
        need_of_partner = np.full_like(need, NEVER)
        need_of_partner[first_of_pair] = need[first_of_pair + 1]
        needs.append(need_of_partner)
    return needs


def earliest_slots(schedule: Schedule) -> Int[np.ndarray, " instructions"]:
    """Earliest starts if every instruction took one slot and transfers none; `NEVER` in a deadlock.

    All devices advance together, one slot at a time, so the cost is one vector step per slot.
    """
    # Instruction n stands for none: it ran before the first slot.
    n = schedule.n_instructions
    unknown = np.iinfo(np.int32).max
    slot = np.append(np.full(n, unknown, np.int32), np.int32(-1))
    needs = np.stack([np.where(need == NEVER, n, need) for need in waits(schedule)])

    # Each device runs its next instruction if all of its needs ran in earlier slots. A slot in which no
    # device can is the end, or a deadlock.
    following, end = schedule.offsets[:-1].copy(), schedule.offsets[1:]
    now = 0
    while True:
        active = np.flatnonzero(following < end)
        candidate = following[active]
        ready = (slot[needs[:, candidate]] < now).all(axis=0)
        if not ready.any():
            break
        slot[candidate[ready]] = now
        following[active[ready]] += 1
        now += 1
    return np.where(slot[:-1] == unknown, NEVER, slot[:-1])
