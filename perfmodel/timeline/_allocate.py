"""Register allocation: assigns each op's end time to a small set of slots.

The live set of a pipeline schedule is a few values per device, so the evaluator keeps end times in
*slots* that are reused, not in an array as long as the program. Ops are put in level order and cut
into bundles of independent ops, each of which writes one contiguous block of slots: the same
allocation serves a loop over single ops (one or few lanes) and a loop over bundles (many lanes).
"""

from typing import Final

import numpy as np
from jaxtyping import Int

BUNDLE: Final = 16
"""Ops of a bundle at most, and slots of a block."""

GROUP: Final = 4
"""No slot is written again before the end of the aligned group of this many positions that reads it
last, so that a loop may process a group and then still read every source of the group."""

ZERO_SLOT: Final = 0
"""Holds 0, the start of an op without predecessors."""
NEVER_SLOT: Final = 1
"""Holds `NEVER_S`, the end of a predecessor that does not exist."""
RESULT_SLOT: Final = 2
"""Where the last op, the end of the step, puts its end time."""
SPARE_SLOT: Final = 3
"""Where padding writes."""
NEVER_S: Final = -1e15
"""Earlier than any event, yet finite, so that smooth maxima have finite gradients."""

_FIRST_BLOCK: Final = 1
"""Block 0 is the one that holds the four special slots."""


def levels(pred: Int[np.ndarray, "ops 2"]) -> Int[np.ndarray, " ops"]:
    """Length in ops of the longest path ending in each op; the last op comes after all others.

    A plain loop over lists: the recurrence does not vectorise (a pipeline has thousands of levels of
    some tens of ops each).
    """
    # A virtual op at index 0 has level 0. Shifting predecessors by one maps "none" (-1) to it, so that
    # the loop needs no test for missing predecessors.
    level_of = [0]
    first_pred = (pred[:, 0] + 1).tolist()
    second_pred = (pred[:, 1] + 1).tolist()
    append = level_of.append
    for a, b in zip(first_pred, second_pred, strict=True):
        level_a = level_of[a]
        level_b = level_of[b]
        append(level_a + 1 if level_a > level_b else level_b + 1)
    level = np.array(level_of[1:], dtype=np.int64)

    # The end of the step gets a level of its own: it is then the last op of the program, alone in its
    # bundle, and the loops find the makespan at a place that they know.
    level[-1] = level.max() + 1
    return level


def level_order(level: Int[np.ndarray, " ops"], pred: Int[np.ndarray, "ops 2"]) -> Int[np.ndarray, " ops"]:
    """Order the ops by level, and inside a level by the level of their last reader.

    Ops that are last read at about the same time then share a bundle, and its block of slots, which is
    free only when all of its values were read, is free early.
    """
    # The extra entry at the end collects what missing predecessors (index -1) write.
    last_read = np.zeros(len(level) + 1, np.int64)
    np.maximum.at(last_read, pred[:, 0], level)
    np.maximum.at(last_read, pred[:, 1], level)
    return np.argsort(level * (level[-1] + 1) + last_read[:-1], kind="stable")


def bundles(level: Int[np.ndarray, " ops"]) -> tuple[Int[np.ndarray, " ops"], Int[np.ndarray, " ops"]]:
    """Divide each level into bundles of `BUNDLE` ops: the bundle of each position, and its rank in it.

    `level` is in level order. Ops of one level do not depend on each other, so those of a bundle may run at once.
    """
    new_level = np.r_[True, level[1:] != level[:-1]]
    starts = np.flatnonzero(new_level)
    in_level = np.arange(len(level)) - starts[np.cumsum(new_level) - 1]
    rank = in_level % BUNDLE
    return np.cumsum(rank == 0) - 1, rank


def blocks(bundle: Int[np.ndarray, " ops"], pred: Int[np.ndarray, "ops 2"]) -> Int[np.ndarray, " ops"]:
    """The block of slots that each position writes to; a block is reused after all its values were read.

    This is linear-scan register allocation, with bundles as the values and blocks as the registers.
    """
    # Live ranges: the last position that reads any value of a bundle.
    n_ops = len(bundle)
    last_reader = np.arange(n_ops + 1)
    np.maximum.at(last_reader, pred[:, 0], np.arange(n_ops))
    np.maximum.at(last_reader, pred[:, 1], np.arange(n_ops))
    start = np.flatnonzero(np.r_[True, bundle[1:] != bundle[:-1]])
    last_read = np.maximum.reduceat(last_reader[:-1], start)

    # The first bundle that begins after the aligned group of `GROUP` positions with the last read: until then
    # the loop over single ops may still look into the slot, after it has written all of the group's ends.
    reusable_from = np.searchsorted(start, (last_read // GROUP + 1) * GROUP)

    # Scan the bundles in order. The block freed last is taken first, and a new one only if none is free.
    released: list[list[int]] = [[] for _ in range(len(start) + 1)]
    free: list[int] = []
    n_blocks = _FIRST_BLOCK
    block_of_bundle = []
    for bundle_index, released_at in enumerate(reusable_from.tolist()):
        free += released[bundle_index]
        if free:
            block = free.pop()
        else:
            block = n_blocks
            n_blocks += 1
        block_of_bundle.append(block)
        released[released_at].append(block)
    return np.array(block_of_bundle)[bundle]
