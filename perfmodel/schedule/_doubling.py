"""Chimera's forward doubling and backward halving (section 3.5): one order for both."""

from dataclasses import replace

import numpy as np

from perfmodel.schedule._arrange import arrange
from perfmodel.schedule._bidirectional import bidirectional_stages, chimera, even_pipelines
from perfmodel.schedule._construct import from_keys
from perfmodel.schedule._registry import register
from perfmodel.schedule._schedule import Phase, Schedule


@register("chimera-doubling", stage_map=bidirectional_stages, chunks=2, plain=False, demands=even_pipelines)
def forward_doubling(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Forwards of two micro-batches at once, so that they last about as long as a backward of one.

    Forwards come first, those of later stages before those of earlier ones, as long as the device holds no
    more than p pairs of micro-batches; otherwise backwards. Of a device's 3 m / 2 + p - 2 slots p - 2 are
    idle: the middle bubbles of direct concatenation are gone. Activations are doubled, so this goes with
    recomputation. Up to p micro-batches are one unit, which has no middle and stays as it is.
    """
    return _doubled("chimera-doubling", devices, micro_batches, chunks)


@register("chimera-halving", stage_map=bidirectional_stages, chunks=2, plain=False, demands=even_pipelines)
def backward_halving(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """The order of forward doubling, where a micro-batch is half of what a forward takes: backwards run on
    halves, and activations are not doubled. `micro_batches` counts the halves."""
    return _doubled("chimera-halving", devices, micro_batches, chunks)


def _doubled(name: str, devices: int, micro_batches: int, chunks: int) -> Schedule:
    if micro_batches <= devices:
        return replace(chimera(devices, micro_batches, chunks), name=name)
    stage = bidirectional_stages(devices, chunks)
    i = np.arange(micro_batches)
    own = np.broadcast_to(i // 2 % chunks == np.arange(chunks)[:, None], (devices, chunks, micro_batches))
    pool = from_keys(
        name,
        stage,
        {Phase.FORWARD: np.where(own & (i % 2 == 0), i, -1), Phase.BACKWARD: np.where(own, micro_batches + i, -1)},
        spans={Phase.FORWARD: 2},
    )
    backward = pool.phase == Phase.BACKWARD
    latest_first = stage.shape[0] - 1 - pool.instruction_stage
    priority = (backward * len(stage) + latest_first) * micro_batches + pool.micro_batch
    return arrange(pool, pool.chunk + backward * chunks, priority, limit=2 * devices)
