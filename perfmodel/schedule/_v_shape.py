"""V-shaped schedules with controllable memory: V-Min, V-Half, ZB-V (Qi et al. 2024b).

A device holds two chunks, stages d and 2 p - 1 - d. One micro-batch's forwards and input gradients form a
building block that is repeated every six slots (two chunks of three passes each); how fast the block moves
from device to device decides how long activations live, and so the memory (section 3).
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from perfmodel.errors import PerfModelError
from perfmodel.schedule._arrange import arrange
from perfmodel.schedule._construct import from_keys, v_stages
from perfmodel.schedule._registry import register
from perfmodel.schedule._schedule import Phase, Schedule

_PERIOD = 6


class Steps(NamedTuple):
    """Slots from one device to the next in the four legs of a building block."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


@register("v-min", stage_map=v_stages, chunks=2)
def v_min(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Every leg moves on at once: about a third of 1F1B's activation memory, the largest bubble."""
    return _v_schedule("v-min", devices, micro_batches, (Steps(1, 1, 1, 1),))


@register("v-half", stage_map=v_stages, chunks=2)
def v_half(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Two legs move on at once, two wait a slot: about half of 1F1B's activation memory."""
    legs = [(1, 2), (2, 1)]
    return _v_schedule("v-half", devices, micro_batches, [Steps(a, c, d, b) for (a, b), (c, d) in product(legs, legs)])


@register("zb-v", stage_map=v_stages, chunks=2, staggered=True)
def zb_v(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """As much memory as 1F1B and half a micro-batch, balanced over the devices, and next to no bubble where
    passes are equal (none up to p = 8, a tenth of 1F1B's at p = 16).

    Forwards move slowly and input gradients at once. A device that would be idle runs first forwards ahead
    of their turn as long as 2 p + 1 chunks, and two in reserve, fit; then weight gradients.
    """
    keys = _keys(*_building_block(devices, (Steps(5, 5, 1, 1), Steps(4, 4, 2, 2))), micro_batches)
    last = keys[Phase.BACKWARD_INPUT].max() + 1
    keys[Phase.BACKWARD_WEIGHT] = keys[Phase.BACKWARD_INPUT] + last
    pool = from_keys("zb-v", v_stages(devices, 2), keys)
    kind = np.searchsorted(sorted(keys), pool.phase)
    priority = np.stack(list(keys.values()))[kind, pool.device, pool.chunk, pool.micro_batch]
    early = (pool.phase == Phase.FORWARD) & (pool.chunk == 0)
    return arrange(pool, 2 * kind + pool.chunk, priority, limit=2 * devices + 1, reserve=2 * early)


def _v_schedule(name: str, devices: int, micro_batches: int, choices: Sequence[Steps]) -> Schedule:
    """Forwards and input gradients in the order of the building block, weight gradients in the gaps."""
    forward, backward = _building_block(devices, choices)
    keys = _keys(forward, backward, micro_batches)
    pool = from_keys(name, v_stages(devices, 2), keys | {Phase.BACKWARD_WEIGHT: keys[Phase.BACKWARD_INPUT]})
    weight = (pool.phase == Phase.BACKWARD_WEIGHT).astype(np.int64)
    return arrange(pool, weight, weight, _in_flight(forward, backward))


def _keys(
    forward: Int[np.ndarray, "devices 2"], backward: Int[np.ndarray, "devices 2"], micro_batches: int
) -> dict[Phase, Int[np.ndarray, "devices 2 micro_batches"]]:
    """Slots of all forwards and input gradients, the building block repeated."""
    again = _PERIOD * np.arange(micro_batches)
    return {Phase.FORWARD: forward[:, :, None] + again, Phase.BACKWARD_INPUT: backward[:, :, None] + again}


def _building_block(
    devices: int, choices: Sequence[Steps]
) -> tuple[Int[np.ndarray, "devices 2"], Int[np.ndarray, "devices 2"]]:
    """Slots of one micro-batch's forwards and input gradients on every device.

    Of all ways to turn round between legs, the shortest in which the passes of successive micro-batches
    fall on different slots of every device.
    """
    d = np.arange(devices)
    up = devices - 1 - d
    turns = sorted(product(range(1, _PERIOD + 1), repeat=3), key=lambda turn: (sum(turn), turn))
    for turn, steps in product(turns, choices):
        forward_down = steps.forward_down * d
        forward_up = forward_down[-1] + turn[0] + steps.forward_up * up
        backward_down = forward_up[0] + turn[1] + steps.backward_down * d
        backward_up = backward_down[-1] + turn[2] + steps.backward_up * up
        slots = np.stack([forward_down, forward_up, backward_up, backward_down])
        place = np.sort(slots % _PERIOD, axis=0)
        if (np.diff(place, axis=0) > 0).all():
            return slots[:2].T, slots[2:].T
    raise PerfModelError(f"no building block of {choices} repeats every {_PERIOD} slots on {devices} devices")


def _in_flight(forward: Int[np.ndarray, "devices 2"], backward: Int[np.ndarray, "devices 2"]) -> int:
    """Most micro-batches (of one chunk) alive at once when the block is repeated for ever.

    The weight gradient follows the input gradient by up to two slots, the free ones of a period.
    """
    slot = np.arange(_PERIOD)[:, None, None]
    alive = (backward + 2 - forward[None] + (forward[None] - slot) % _PERIOD) // _PERIOD + 1
    return int(alive.sum(axis=2).max())
