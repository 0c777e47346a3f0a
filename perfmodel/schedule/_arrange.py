"""A greedy machine in whole slots of time: every device runs, slot by slot, the best of what is ready."""

from dataclasses import replace

import numpy as np
from jaxtyping import Int

from perfmodel.errors import LayoutError
from perfmodel.schedule._memory import taken
from perfmodel.schedule._schedule import NEVER, Schedule


def arrange(
    pool: Schedule,
    queue: Int[np.ndarray, " instructions"],
    priority: Int[np.ndarray, " instructions"],
    limit: int | None = None,
    reserve: Int[np.ndarray, " instructions"] | None = None,
    length: Int[np.ndarray, " instructions"] | None = None,
) -> Schedule:
    """The order in which devices would run a pool of work if instructions took whole numbers of slots.

    Each device holds several queues, which are run in the order in which the pool lists their work. In
    every slot it takes, of the heads of its queues that are ready, the one with the lowest priority
    number. All devices advance together: the cost is one vector step per slot.

    Args:
        pool: the work; its own order matters only inside each queue.
        queue: queue of each instruction, numbers from 0.
        priority: lower is better; ties go to the lower queue.
        limit: most micro-batches whose activations a device may hold (from the forward to the end of the
            backward); None: no limit.
        reserve: for each forward, how many further micro-batches must still fit when it runs (default 0).
        length: slots that each instruction takes (default 1).

    Raises:
        LayoutError: nothing can run any more, because queues or the limit stand in the way.
    """
    n, devices = pool.n_instructions, pool.devices
    queues = int(queue.max()) + 1
    items, count = _queues(pool, queue, queues)
    needs = np.stack([np.append(np.where(need == NEVER, n, need), n) for need in pool.dependencies])
    score = np.append(priority, 0)
    change = np.append(taken(pool, pool.span), 0)
    never = np.iinfo(np.int64).max
    room = np.full(n + 1, never)
    if limit is not None:
        takes = np.flatnonzero(change > 0)
        room[takes] = limit - change[takes] - (0 if reserve is None else reserve[takes])
    slots = np.ones(n, np.int64) if length is None else length
    start, end = np.full(n, never), np.full(n + 1, never)
    end[n] = 0  # nothing to wait for
    free = np.zeros(devices, np.int64)
    here, alive = np.zeros((devices, queues), np.int64), np.zeros(devices, np.int64)
    every, every_queue = np.arange(devices), np.arange(queues)
    now = done = 0
    while done < n:
        more = here < count
        head = np.where(more, items[every[:, None], every_queue, np.minimum(here, items.shape[2] - 1)], n)
        ready = more & (end[needs[:, head]] <= now).all(axis=0) & (free <= now)[:, None]
        ready &= alive[:, None] <= room[head]
        best = np.where(ready, score[head], never).argmin(axis=1)
        runs = np.flatnonzero(ready.any(axis=1))
        which = head[runs, best[runs]]
        if not len(runs) and not (free > now).any():
            stuck = pool[int(head[head < n].min())]
            raise LayoutError(f"schedule {pool.name}: {stuck} can never run; allow more micro-batches in flight")
        start[which], end[which] = now, now + slots[which]
        free[runs] = end[which]
        here[runs, best[runs]] += 1
        alive[runs] += change[which]
        done += len(runs)
        now = now + 1 if length is None else int(free[free > now].min(initial=never))
    return _in_order_of(pool, start, length)


def _queues(
    pool: Schedule, queue: Int[np.ndarray, " instructions"], queues: int
) -> tuple[Int[np.ndarray, "devices queues places"], Int[np.ndarray, "devices queues"]]:
    """Instructions of every queue of every device in order, and how many there are."""
    which = pool.device * queues + queue
    length = np.bincount(which, minlength=pool.devices * queues)
    order = np.argsort(which, kind="stable")
    place = np.arange(len(order)) - np.repeat(np.cumsum(length) - length, length)
    items = np.zeros((pool.devices * queues, max(1, int(length.max()))), np.int64)
    items[which[order], place] = order
    return items.reshape(pool.devices, queues, -1), length.reshape(pool.devices, queues)


def _in_order_of(
    pool: Schedule, slot: Int[np.ndarray, " instructions"], length: Int[np.ndarray, " instructions"] | None
) -> Schedule:
    """The pool's instructions, those of each device in the order of their slots."""
    order = np.lexsort((slot, pool.device))
    lengths = None if length is None else length[order]
    return replace(pool, **pool.picked(order), slot=slot[order], length=lengths)
