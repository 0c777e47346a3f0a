"""Checks that a schedule can run and does all work exactly once."""

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
    """Location of the problem; for missing work, the device and chunk that could do it, at position
    -1."""
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def check(schedule: Schedule) -> tuple[Problem, ...]:
    """Find all problems of a schedule; empty if it does all work exactly once and cannot deadlock.

    - missing / duplicate: a stage must run each micro-batch forward once and backward once (whole,
      or as input and weight gradient); a schedule without any backward pass is inference and
      complete.
    - placement: a backward runs on another device or chunk than its forward.
    - order: an instruction stands before one of the same device that it depends on.
    - deadlock: the first instruction of a device that waits for ever, and what it waits for.
    """
    problems = _work(schedule)

    # A backward needs the activations that its forward left on one chunk of one device.
    device, chunk = schedule.device, schedule.chunk
    for i, j in _pairs(
        schedule.dependencies.same_stage,
        lambda i, j: (device[i] != device[j]) | (chunk[i] != chunk[j]),
    ):
        message = f"{schedule[i]} must run on the same device as {schedule[j]}"
        problems.append(Problem("placement", schedule[i], message))

    # A device runs its instructions in order, so that waiting for a later one never ends.
    for need in schedule.waits:
        for i, j in _pairs(need, lambda i, j: (device[i] == device[j]) & (j > i)):
            message = f"{schedule[i]} comes before {schedule[j]}, on which it depends"
            problems.append(Problem("order", schedule[i], message))
    return tuple(problems) if problems else tuple(_deadlocks(schedule))


def require_valid(schedule: Schedule) -> None:
    """Raise `PerfModelError` naming the first problem of the schedule, if it has any."""
    problems = check(schedule)
    if problems:
        first, *further = problems
        more = f" (and {len(further)} more)" if further else ""
        raise PerfModelError(f"schedule {schedule.name}: {first}{more}")


def _work(schedule: Schedule) -> list[Problem]:
    """Problems: work that no instruction does, and instructions that repeat work."""
    # How often each piece of work is done, by phase, stage and micro-batch.
    m, n_stages = schedule.micro_batches, schedule.n_stages
    index, batch = schedule.covers
    phase = schedule.phase[index].astype(np.int64)
    stage = schedule.instruction_stage[index]
    work = (phase * n_stages + stage) * m + batch
    count = np.bincount(work, minlength=len(Phase) * n_stages * m).reshape(-1, n_stages, m)

    # How often it should be, by phase; a backward that is both whole and split shows as a whole one
    # too many.
    split = (count[Phase.BACKWARD_INPUT] > 0) | (count[Phase.BACKWARD_WEIGHT] > 0)
    trained = not schedule.forward_only
    expected = np.stack([np.ones_like(split), trained & ~split, trained & split, trained & split])
    problems = []
    for phase, stage, micro_batch in np.argwhere(count < expected).tolist():
        device, chunk = next(iter(np.argwhere(schedule.stage == stage).tolist()), (-1, -1))
        instruction = Instruction(device, -1, Phase(phase), chunk, micro_batch)
        message = f"no device runs {instruction.phase.symbol} of stage {stage} for micro-batch {micro_batch}"
        problems.append(Problem("missing", instruction, message))
    # If several instructions do the same work, all but the first are surplus; if no instruction
    # should do it, all are.
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


def _pairs(
    dependency: Int[np.ndarray, " instructions"],
    is_wrong: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Iterator[tuple[int, int]]:
    """Each instruction with its dependency for which `is_wrong` holds.

    Args:
        dependency: the instruction that each instruction waits for; `NEVER` if for none.
        is_wrong: tells for arrays of instructions and their dependencies which pairs are wrong.
    """
    dependents = np.flatnonzero(dependency != NEVER)
    wrong = dependents[is_wrong(dependents, dependency[dependents])]
    return zip(wrong.tolist(), dependency[wrong].tolist(), strict=True)


def _deadlocks(schedule: Schedule) -> list[Problem]:
    """The first instruction of each device that never starts, and blocks all later ones."""
    stuck = schedule.slot == NEVER
    one_before_is_stuck = np.append(False, stuck[:-1]) & (schedule.position > 0)
    problems = []
    for index in np.flatnonzero(stuck & ~one_before_is_stuck).tolist():
        needs = [int(need[index]) for need in schedule.waits]
        cause = next(schedule[need] for need in needs if need != NEVER and stuck[need])
        message = f"{schedule[index]} waits for {cause}, which never starts"
        problems.append(Problem("deadlock", schedule[index], message))
    return problems
