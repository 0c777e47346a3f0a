"""From a structure to the flat program that the evaluator's loops run."""

import numpy as np
from jaxtyping import Int

from perfmodel.program import Structure
from perfmodel.timeline._allocate import (
    BUNDLE,
    NEVER_SLOT,
    RESULT_SLOT,
    ZERO_SLOT,
    blocks,
    bundles,
    level_order,
    levels,
)
from perfmodel.timeline._tables import CompiledStructure


def compile_structure(structure: Structure) -> CompiledStructure:
    """Order, bundle and allocate `structure` (130,000 ops take some 50 ms).

    Where an op's two predecessors release it at the same time, the first (`structure.pred[:, 0]`)
    counts as the one that did, whatever the order of ops in the program.
    """
    pred, lag = _normalised_edges(structure)
    level = levels(pred)
    order = level_order(level, pred)
    position = np.empty(len(order) + 1, np.int32)
    position[order] = np.arange(len(order), dtype=np.int32)
    position[-1] = -1
    pred = position[pred[order]]
    bundle, rank = bundles(level[order])
    destination = BUNDLE * blocks(bundle, pred) + rank
    n_slots = int(destination.max()) + 1
    destination[-1] = RESULT_SLOT
    source = np.where(pred < 0, [ZERO_SLOT, NEVER_SLOT], destination[pred])
    columns = [source, destination[:, None], structure.duration[order][:, None]]
    if lag.any():
        columns.append(lag[order])
    program = np.concatenate(columns, axis=1)
    return CompiledStructure(
        structure=structure,
        order=order.astype(np.int32),
        bundle=bundle.astype(np.int32),
        program=program.astype(np.uint16 if program.max() < 1 << 16 else np.uint32),
        pred=pred,
        n_slots=n_slots,
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
