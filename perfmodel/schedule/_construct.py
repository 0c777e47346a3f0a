"""Constructors of schedules: from sort keys, from lists of orders, or from rules for a greedy
simulation; and transforms of schedules."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.schedule._schedule import NEVER, Phase, Schedule


class Work(NamedTuple):
    """One entry of a device's order."""

    phase: Phase
    chunk: int
    micro_batch: int
    span: int = 1
    """Consecutive micro-batches computed in one go."""
    paired: bool = False
    """Runs together with the next entry."""
    updates: bool = False
    """The device's weights are updated right after."""


def from_keys(
    name: str,
    stage: Int[np.ndarray, "devices chunks"],
    keys: Mapping[Phase, Int[np.ndarray, "devices chunks micro_batches"]],
    *,
    spans: Mapping[Phase, int] | None = None,
    slices: int = 1,
) -> Schedule:
    """A schedule in which each device runs its work in the order of integer keys.

    Args:
        name: name shown in messages.
        stage: global stage of each device's chunks.
        keys: for each phase, the sort key of every piece of work, below zero where the device does
            not do it. Keys that also grow along data dependencies (start slots in closed form) are
            kept as slots; otherwise slots are found by simulation.
        spans: micro-batches that one instruction of a phase computes (default 1); its key stands at
            the first of them. Fewer where micro-batches run out.
        slices: slices per sequence, see `Schedule.slices`.
    """
    # Keys of all phases side by side for each device: shape (devices, phases, chunks,
    # micro-batches).
    shapes = {phase: np.shape(key) for phase, key in keys.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 3:
        raise PerfModelError(
            f"schedule {name}: keys must share one shape (devices, chunks, micro-batches), got {shapes}"
        )
    shape = next(iter(shapes.values()))
    devices, _, micro_batches = shape
    by_phase = np.stack([np.broadcast_to(phase_keys, shape) for phase_keys in keys.values()])
    key = by_phase.transpose(1, 0, 2, 3)
    flat = key.reshape(devices, -1)

    # Sort each device's work. Work of other devices sorts last and is cut off.
    is_done = flat >= 0
    count = is_done.sum(axis=1)
    order = np.argsort(np.where(is_done, flat, np.iinfo(np.int64).max), axis=1, kind="stable")
    is_work = np.arange(flat.shape[1]) < count[:, None]

    # A place in the sorted order is a phase (by its place in `keys`), a chunk and a micro-batch.
    phase_place, chunk, micro_batch = np.unravel_index(order[is_work], key.shape[1:])
    phase = np.array([int(phase) for phase in keys], np.int8)[phase_place]
    spans = spans or {}
    span = np.array([spans.get(phase, 1) for phase in keys])[phase_place]
    schedule = _schedule(
        name,
        stage,
        micro_batches,
        np.append(0, np.cumsum(count)),
        phase,
        chunk,
        micro_batch,
        span=np.minimum(span, micro_batches - micro_batch),
        slot=np.take_along_axis(flat, order, axis=1)[is_work],
        slices=slices,
    )
    return with_slots(schedule)


def from_orders(
    name: str,
    stage: Int[np.ndarray, "devices chunks"],
    micro_batches: int,
    orders: Sequence[Iterable[tuple[Any, ...]]],
    *,
    slices: int = 1,
) -> Schedule:
    """A schedule from each device's list of `Work`, or of plain tuples of its first fields.

    Deadlocks are let through, with slot `NEVER`; `check` names them.
    """
    # Through `Work`, whose defaults complete short tuples.
    rows = []
    for order in orders:
        works = [Work(*work) for work in order]
        rows.append(np.array(works, np.int32).reshape(-1, len(Work._fields)))
    if len(rows) != len(stage):
        raise PerfModelError(
            f"schedule {name}: give one order per device, got {len(rows)} orders for {len(stage)} devices"
        )
    phase, chunk, micro_batch, span, paired, updates = np.concatenate(rows).T
    schedule = _schedule(
        name,
        stage,
        micro_batches,
        np.append(0, np.cumsum([len(row) for row in rows])),
        phase.astype(np.int8),
        chunk,
        micro_batch,
        span=span,
        paired=paired.astype(bool),
        updates=updates.astype(bool),
        slices=slices,
    )
    return with_slots(schedule)


def arrange(
    pool: Schedule,
    queue: Int[np.ndarray, " instructions"],
    priority: Int[np.ndarray, " instructions"],
    limit: int | None = None,
    length: Int[np.ndarray, " instructions"] | None = None,
) -> Schedule:
    """Arrange a pool of work by greedy simulation with whole slots of time.

    Each device holds several queues, which are run in the order in which the pool lists their work.
    In every slot it takes, of the heads of its queues that are ready, the one with the lowest
    priority number. All devices advance together: the cost is one vector step per slot.

    Args:
        pool: the work; its own order matters only inside each queue.
        queue: queue of each instruction, numbers from 0.
        priority: lower is better; ties go to the lower queue.
        limit: most micro-batches whose activations a device may hold (from the forward to the end
            of the backward); None: no limit.
        length: slots that each instruction takes (default 1).

    Raises:
        LayoutError: nothing can run any more, because queues or the limit stand in the way.
    """
    n, devices = pool.n_instructions, pool.devices
    queues = int(queue.max()) + 1
    items, count = _queues(pool, queue, queues)

    # Instruction n stands for none: it needs nothing, takes no memory and has ended at slot 0.
    never = np.iinfo(np.int64).max
    needs = np.stack([np.append(np.where(need == NEVER, n, need), n) for need in pool.dependencies])
    score = np.append(priority, 0)
    slots = np.ones(n, np.int64) if length is None else length
    start = np.full(n, never)
    end = np.full(n + 1, never)
    end[n] = 0

    change, most_alive = _live_limits(pool, limit)

    # Advance all devices together, from slot to slot.
    free_from = np.zeros(devices, np.int64)
    alive = np.zeros(devices, np.int64)
    place = np.zeros((devices, queues), np.int64)
    every_device = np.arange(devices)[:, None]
    every_queue = np.arange(queues)
    now = n_done = 0
    while n_done < n:
        # The next instruction of every queue; it is ready if its device is free, its inputs are
        # there and its activations fit.
        has_next = place < count
        following = items[every_device, every_queue, np.minimum(place, items.shape[2] - 1)]
        head = np.where(has_next, following, n)
        ready = has_next & (end[needs[:, head]] <= now).all(axis=0) & (free_from <= now)[:, None]
        ready &= alive[:, None] <= most_alive[head]

        # Each device runs the ready one with the lowest number, if it has any.
        best_queue = np.where(ready, score[head], never).argmin(axis=1)
        running = np.flatnonzero(ready.any(axis=1))
        chosen = head[running, best_queue[running]]
        if not len(running) and not (free_from > now).any():
            stuck = pool[int(head[head < n].min())]
            raise LayoutError(
                f"schedule {pool.name}: {stuck} can never run; allow more micro-batches in flight"
            )
        start[chosen], end[chosen] = now, now + slots[chosen]
        free_from[running] = end[chosen]
        place[running, best_queue[running]] += 1
        alive[running] += change[chosen]
        n_done += len(running)

        # With lengths nothing can change before the next device gets free.
        now = now + 1 if length is None else int(free_from[free_from > now].min(initial=never))

    order = np.lexsort((start, pool.device))
    lengths = None if length is None else length[order]
    return replace(pool, **pool.picked(order), slot=start[order], length=lengths)


class _LiveLimits(NamedTuple):
    """Live micro-batches on the device of each instruction, and of the one behind all that stands
    for none."""

    change: Int[np.ndarray, " instructions+1"]
    """By how much the instruction changes their number."""
    most_alive: Int[np.ndarray, " instructions+1"]
    """How many may be live when it starts."""


def _live_limits(pool: Schedule, limit: int | None) -> _LiveLimits:
    """Hold up forwards alone, which take memory, where the limit would be passed."""
    change = np.append(pool.taken(pool.span), 0)
    most_alive = np.full(len(change), np.iinfo(np.int64).max)
    if limit is not None:
        takes = np.flatnonzero(change > 0)
        most_alive[takes] = limit - change[takes]
    return _LiveLimits(change, most_alive)


def _queues(
    pool: Schedule, queue: Int[np.ndarray, " instructions"], queues: int
) -> tuple[Int[np.ndarray, "devices queues places"], Int[np.ndarray, "devices queues"]]:
    """Instructions of every queue of every device in order, with their number."""
    queue_of_all = pool.device * queues + queue
    length = np.bincount(queue_of_all, minlength=pool.devices * queues)

    # A stable sort puts queues one after another and keeps the order inside each.
    order = np.argsort(queue_of_all, kind="stable")
    first_of_queue = np.cumsum(length) - length
    place = np.arange(len(order)) - np.repeat(first_of_queue, length)
    items = np.zeros((pool.devices * queues, max(1, int(length.max()))), np.int64)
    items[queue_of_all[order], place] = order
    return items.reshape(pool.devices, queues, -1), length.reshape(pool.devices, queues)


def forward_part(schedule: Schedule) -> Schedule:
    """The schedule without its backward passes (inference)."""
    is_forward = schedule.phase == Phase.FORWARD
    forwards = np.bincount(schedule.device[is_forward], minlength=schedule.devices)
    offsets = np.append(0, np.cumsum(forwards))

    # Partners of paired forwards are dropped, and no instruction updates weights.
    flags = {"paired": np.zeros(forwards.sum(), bool), "updates": np.zeros(forwards.sum(), bool)}
    work = schedule.picked(is_forward) | flags
    return replace(schedule, **work, offsets=offsets, slot=schedule.slot[is_forward], length=None)


def repeated(schedule: Schedule, steps: int, *, updates: bool = True) -> Schedule:
    """Repeat a step several times without a flush; each device updates its weights and continues.

    A device's next step follows its own last instruction, so that steps overlap over the devices.

    Args:
        updates: False where all repetitions are of one step, whose gradients are added up.
    """
    # The stretches of the new order: all steps of the first device, then all of the second, and so
    # on.
    length = np.diff(schedule.offsets)
    step, device = np.divmod(np.arange(steps * schedule.devices), schedule.devices)
    by_device = np.lexsort((step, device))
    step, device = step[by_device], device[by_device]

    # Each stretch is a copy of its device's instructions, with micro-batches that count on from
    # step to step.
    count = length[device]
    offsets = np.append(0, np.cumsum(count))
    index = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - schedule.offsets[device], count)
    work = schedule.picked(index)
    work["micro_batch"] = work["micro_batch"] + np.repeat(step, count) * schedule.micro_batches

    # Each step ends with an update of the device's weights.
    if updates:
        last_of_step = offsets[1:][count > 0] - 1
        work["updates"][last_of_step] = True
    many = _schedule(
        schedule.name,
        schedule.stage,
        schedule.micro_batches * steps,
        schedule.offsets * steps,
        **work,
        slices=schedule.slices,
    )
    return with_slots(many)


def with_slots(schedule: Schedule) -> Schedule:
    """The schedule with valid slots, simulated if necessary."""
    return schedule if slots_hold(schedule) else replace(schedule, slot=earliest_slots(schedule))


def slots_hold(schedule: Schedule) -> bool:
    """Whether the schedule's slots respect device orders and data dependencies."""
    slot = schedule.slot
    same_device = np.diff(schedule.device) == 0
    if (np.diff(slot)[same_device] <= 0).any():
        return False
    return all(((need == NEVER) | (slot[need] < slot)).all() for need in schedule.waits)


def earliest_slots(schedule: Schedule) -> Int[np.ndarray, " instructions"]:
    """Earliest starts if every instruction took one slot and transfers none; `NEVER` in a deadlock.

    All devices advance together, one slot at a time, so the cost is one vector step per slot.
    """
    # Instruction n stands for none: it ran before the first slot.
    n = schedule.n_instructions
    unknown = np.iinfo(np.int32).max
    slot = np.append(np.full(n, unknown, np.int32), np.int32(-1))
    needs = np.stack([np.where(need == NEVER, n, need) for need in schedule.waits])

    # Each device runs its next instruction if all of its needs ran in earlier slots. A slot in
    # which no device can is the end, or a deadlock.
    following = schedule.offsets[:-1].copy()
    end = schedule.offsets[1:]
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


def _schedule(
    name: str,
    stage: Int[np.ndarray, "devices chunks"],
    micro_batches: int,
    offsets: Int[np.ndarray, " devices+1"],
    phase: Int[np.ndarray, " instructions"],
    chunk: Int[np.ndarray, " instructions"],
    micro_batch: Int[np.ndarray, " instructions"],
    *,
    span: Int[np.ndarray, " instructions"] | None = None,
    paired: Bool[np.ndarray, " instructions"] | None = None,
    updates: Bool[np.ndarray, " instructions"] | None = None,
    slot: Int[np.ndarray, " instructions"] | None = None,
    slices: int = 1,
) -> Schedule:
    """A schedule from columns, with defaults for those that most schedules do not need."""
    n = len(phase)
    return Schedule(
        name=name,
        stage=np.asarray(stage, np.int32),
        micro_batches=micro_batches,
        offsets=offsets,
        phase=phase,
        chunk=chunk.astype(np.int32),
        micro_batch=micro_batch.astype(np.int32),
        span=np.ones(n, np.int32) if span is None else span.astype(np.int32),
        paired=np.zeros(n, bool) if paired is None else paired,
        updates=np.zeros(n, bool) if updates is None else updates,
        slot=np.zeros(n, np.int64) if slot is None else slot,
        slices=slices,
    )
