"""From a structure to the flat program that the evaluator's loops run.

The end times of ops live in a small file of *slots* (register allocation), not in an array as long
as the program: the live set of a pipeline schedule is a few values per device. Ops are put in level
order and cut into bundles of independent ops; a bundle writes one contiguous block of slots, so
that the same allocation serves a loop over single ops (one or few lanes) and a loop over bundles
(many lanes).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Int, UInt

from perfmodel.program import Structure

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


@dataclass(frozen=True, eq=False)
class CompiledStructure:
    """A `Structure` as a flat program over slots; "position" counts ops in the program's own order."""

    order: Int[np.ndarray, " ops"]
    """Op of the structure at each position; the last position holds the last op."""
    bundle: Int[np.ndarray, " ops"]
    """Bundle of each position, not descending; ops of one bundle do not depend on each other."""
    source: UInt[np.ndarray, "ops 2"]
    """Slots of the two predecessors' end times."""
    destination: UInt[np.ndarray, " ops"]
    """Slot of the op's own end time, never one of its sources."""
    duration: UInt[np.ndarray, " ops"]
    """Class of the op's duration."""
    lag: UInt[np.ndarray, "ops 2"]
    """Classes of the delays between predecessors' ends and the op's start; 0 rows if there are none."""
    pred: Int[np.ndarray, "ops 2"]
    """Positions of the two predecessors, -1 for none."""
    n_slots: int
    n_classes: int

    @property
    def n_ops(self) -> int:
        return len(self.order)

    @property
    def n_bundles(self) -> int:
        return int(self.bundle[-1]) + 1

    @property
    def has_lags(self) -> bool:
        return len(self.lag) > 0

    @cached_property
    def position(self) -> Int[np.ndarray, " ops"]:
        """Position of each op of the structure."""
        position = np.empty(self.n_ops, np.int32)
        position[self.order] = np.arange(self.n_ops, dtype=np.int32)
        return position


def compile_structure(structure: Structure) -> CompiledStructure:
    """Order, bundle and allocate `structure` (130,000 ops take some 50 ms).

    The decision between two predecessors that end at the same time falls to the first
    (`structure.pred[:, 0]`), whatever the order of ops here.
    """
    pred, lag = _normalised_edges(structure)
    level = _levels(pred)
    order = _level_order(level, pred)
    position = np.empty(len(order) + 1, np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    position[-1] = -1
    pred = position[pred[order]]
    bundle, rank = _bundles(level[order])
    destination = BUNDLE * _blocks(bundle, pred) + rank
    n_slots = int(destination.max()) + 1
    destination[-1] = RESULT_SLOT
    source = np.where(pred < 0, [ZERO_SLOT, NEVER_SLOT], destination[pred])
    return CompiledStructure(
        order=order.astype(np.int32),
        bundle=bundle.astype(np.int32),
        source=source.astype(np.uint32),
        destination=destination.astype(np.uint32),
        duration=structure.duration[order].astype(np.uint32),
        lag=lag[order].astype(np.uint32) if lag.any() else np.zeros((0, 2), np.uint32),
        pred=pred,
        n_slots=n_slots,
        n_classes=structure.n_classes,
    )


def _normalised_edges(structure: Structure) -> tuple[Int[np.ndarray, "ops 2"], Int[np.ndarray, "ops 2"]]:
    """Predecessors and lags with a lone predecessor in the first column and no lag without an edge."""
    pred = structure.pred.astype(np.int64)
    lag = structure.lag.astype(np.int64)
    twice = (pred[:, 0] == pred[:, 1]) & (lag[:, 0] == lag[:, 1])
    pred[twice, 1] = -1
    lone_second = (pred[:, 0] < 0) & (pred[:, 1] >= 0)
    pred[lone_second] = pred[lone_second, ::-1]
    lag[lone_second] = lag[lone_second, ::-1]
    lag[pred < 0] = 0
    return pred, lag


def _levels(pred: Int[np.ndarray, "ops 2"]) -> Int[np.ndarray, " ops"]:
    """Length in ops of the longest path that ends in each op; the last op comes after all others.

    A plain loop over lists: the recurrence does not vectorise (a pipeline has thousands of levels of
    some tens of ops each).
    """
    levels = [0]
    append = levels.append
    for a, b in zip((pred[:, 0] + 1).tolist(), (pred[:, 1] + 1).tolist(), strict=True):
        x = levels[a]
        y = levels[b]
        append(x + 1 if x > y else y + 1)
    level = np.array(levels[1:], dtype=np.int64)
    level[-1] = level.max() + 1
    return level


def _level_order(level: Int[np.ndarray, " ops"], pred: Int[np.ndarray, "ops 2"]) -> Int[np.ndarray, " ops"]:
    """Ops by level, inside a level by the level of their last reader, so that blocks die together."""
    last_read = np.zeros(len(level) + 1, np.int64)
    np.maximum.at(last_read, pred[:, 0], level)
    np.maximum.at(last_read, pred[:, 1], level)
    return np.argsort(level * (level[-1] + 1) + last_read[:-1], kind="stable")


def _bundles(level: Int[np.ndarray, " ops"]) -> tuple[Int[np.ndarray, " ops"], Int[np.ndarray, " ops"]]:
    """Bundle of each position and rank in it, cutting each level into runs of `BUNDLE` ops."""
    new_level = np.r_[True, level[1:] != level[:-1]]
    starts = np.flatnonzero(new_level)
    in_level = np.arange(len(level)) - starts[np.cumsum(new_level) - 1]
    rank = in_level % BUNDLE
    return np.cumsum(rank == 0) - 1, rank


def _blocks(bundle: Int[np.ndarray, " ops"], pred: Int[np.ndarray, "ops 2"]) -> Int[np.ndarray, " ops"]:
    """Block of slots of each position; a bundle's block is reused once all its values were read."""
    n = len(bundle)
    last_reader = np.arange(n + 1)
    np.maximum.at(last_reader, pred[:, 0], np.arange(n))
    np.maximum.at(last_reader, pred[:, 1], np.arange(n))
    start = np.flatnonzero(np.r_[True, bundle[1:] != bundle[:-1]])
    last_read = np.maximum.reduceat(last_reader[:-1], start)
    reusable_from = np.searchsorted(start, (last_read // GROUP + 1) * GROUP)
    released: list[list[int]] = [[] for _ in range(len(start) + 1)]
    free: list[int] = []
    n_blocks = _FIRST_BLOCK
    blocks = []
    for k, until in enumerate(reusable_from.tolist()):
        free += released[k]
        if free:
            block = free.pop()
        else:
            block = n_blocks
            n_blocks += 1
        blocks.append(block)
        released[until].append(block)
    return np.array(blocks)[bundle]
