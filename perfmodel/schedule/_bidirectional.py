"""Pipelines in both directions over the same devices: Chimera, its forward doubling and backward halving, and GEMS."""

from dataclasses import replace

import numpy as np
from jaxtyping import Int

from perfmodel.errors import LayoutError
from perfmodel.schedule._arrange import arrange
from perfmodel.schedule._construct import from_keys
from perfmodel.schedule._registry import register
from perfmodel.schedule._schedule import Phase, Schedule
from perfmodel.units import divisors


def bidirectional_stages(devices: int, chunks: int) -> Int[np.ndarray, "devices chunks"]:
    """Stage maps of 2k pipelines (Chimera, section 3.6): chunk 2i goes down, chunk 2i + 1 up.

    Down pipeline i has stage 0 on device i p / k; up pipeline i maps stages in the opposite order.
    """
    d, i = np.arange(devices)[:, None], np.arange(chunks) // 2
    down = (d - i * (2 * devices // chunks)) % devices
    up = (devices - 1 - d - i * (2 * devices // chunks)) % devices
    return np.where(np.arange(chunks) % 2, up, down)


def even_pipelines(devices: int, micro_batches: int, pipelines: int) -> None:
    """Raise `LayoutError` unless so many pipelines, half in each direction, can run over so many devices."""
    if devices % 2:
        raise LayoutError(f"bidirectional schedules need an even number of pipeline stages, got {devices}")
    if pipelines % 2 or (devices // 2) % (pipelines // 2):
        good = [2 * k for k in divisors(devices // 2)]
        raise LayoutError(
            f"{pipelines} pipelines do not fit {devices} stages; use one of {', '.join(map(str, good))} pipelines"
        )
    if 2 < pipelines > micro_batches:
        raise LayoutError(f"{pipelines} pipelines need as many micro-batches or more, got {micro_batches}")


@register("chimera", stage_map=bidirectional_stages, chunks=2, number="pipelines", demands=even_pipelines)
def chimera(devices: int, micro_batches: int, chunks: int, *_: int) -> Schedule:
    """2k pipelines, half of them in each direction (Li and Hoefler 2021, sections 3.1, 3.5 and 3.6).

    Each runs p / 2k micro-batches of a basic unit of p by 1F1B. Slots of unit time: stage s runs the
    forward of the j-th micro-batch of its pipeline at s + 2 j, and the backward at 2 p - 1 - s + 2 j. On
    every device these of all pipelines fall on different slots, and so do those of the next unit, 2 p slots
    later: units are concatenated directly (section 3.5). Of a unit that is not full (m < p, or a remainder)
    the missing micro-batches are struck out, evenly from all pipelines.
    """
    p, m, pipelines = devices, micro_batches, chunks
    stage = bidirectional_stages(p, pipelines)
    i = np.arange(m)
    unit, place = np.divmod(i, p)
    own = place % pipelines == np.arange(pipelines)[:, None]
    start = 2 * p * unit + 2 * (place // pipelines)
    forward = np.where(own, stage[:, :, None] + start, -1)
    backward = np.where(own, 2 * p - 1 - stage[:, :, None] + start, -1)
    return from_keys("chimera", stage, {Phase.FORWARD: forward, Phase.BACKWARD: backward})


@register("gems", stage_map=bidirectional_stages, chunks=2)
def gems(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Two replicas in opposite directions; the forward of a micro-batch follows the backward of the one
    before, so that a device never holds more than one (Jain et al. 2020, GEMS-MAST)."""
    stage = bidirectional_stages(devices, chunks)
    i = np.arange(micro_batches)
    own = np.broadcast_to(i % chunks == np.arange(chunks)[:, None], (devices, chunks, micro_batches))
    keys = {phase: np.where(own, 2 * i + (phase == Phase.BACKWARD), -1) for phase in (Phase.FORWARD, Phase.BACKWARD)}
    return from_keys("gems", stage, keys)


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
