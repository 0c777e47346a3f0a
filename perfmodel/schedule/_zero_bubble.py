"""Zero-bubble schedules: weight gradients, split from input gradients, fill the bubbles (Qi et al.
2024); with controllable memory where the pipeline runs in a V: V-Min, V-Half, ZB-V (Qi et al.
2024b).

In a V a device holds two chunks, stages d and 2 p - 1 - d. One micro-batch's forwards and input
gradients form a building block that is repeated every six slots (two chunks of three passes each);
how fast the block moves from device to device decides how long activations live, and so the memory
(section 3).
"""

from itertools import product
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from perfmodel.schedule._construct import arrange, from_keys
from perfmodel.schedule._registry import looped_stages, register, v_stages
from perfmodel.schedule._schedule import Phase, Schedule
from perfmodel.schedule._squeeze import squeezed

_PERIOD = 6
"""Slots from one micro-batch to the next in a V: two chunks of a forward, an input and a weight
gradient each."""


class Steps(NamedTuple):
    """Slots from one device to the next in the four legs of a building block."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


class Turns(NamedTuple):
    """Slots that a micro-batch waits where it turns: on the last device, on the first (which
    computes the loss), and on the last again."""

    forward: int
    loss: int
    backward: int


class Block(NamedTuple):
    """Slots of one micro-batch's passes on every device, by chunk."""

    forward: Int[np.ndarray, "devices 2"]
    backward: Int[np.ndarray, "devices 2"]
    """Slots of the passes that compute gradients of the inputs."""


@register("v-min", stage_map=v_stages, chunks=2)
def v_min(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Every leg continues without delay: about a third of 1F1B's activation memory, the largest
    bubble."""
    # Where p is a multiple of 3, turning round at once would let micro-batches collide (`repeats`).
    turns = Turns(1, 1 if devices % 3 else 3, 1)
    return _squeezed("v-min", _slots(devices, Steps(1, 1, 1, 1), turns), micro_batches)


@register("v-half", stage_map=v_stages, chunks=2)
def v_half(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Passes down the V wait one slot, passes up it continue without delay, which takes about half
    of 1F1B's activation memory."""
    # Where p is even, turning round at once would let micro-batches collide (`repeats`).
    turns = Turns(1, 1 if devices % 2 else 4, 2)
    return _squeezed("v-half", _slots(devices, Steps(2, 1, 2, 1), turns), micro_batches)


@register("zb-v", stage_map=v_stages, chunks=2, staggered=True)
def zb_v(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Passes down the V wait three slots, passes up it one, which takes the activation memory of
    1F1B on every device.

    Where passes are equal there is no bubble from twice as many micro-batches as devices on.
    """
    steps = Steps(4, 2, 4, 2)

    # The shortest way to turn round with which micro-batches do not collide; a longer turn than a
    # period only repeats a shorter one.
    turns = sorted(product(range(1, _PERIOD + 1), repeat=3), key=lambda turn: (sum(turn), turn))
    blocks = (_slots(devices, steps, Turns(*turn)) for turn in turns)
    return _squeezed("zb-v", next(filter(repeats, blocks)), micro_batches)


def _squeezed(name: str, block: Block, micro_batches: int) -> Schedule:
    """The building block repeated and squeezed, weight gradients in the gaps."""
    keys = _keys(block, micro_batches)
    return squeezed(name, keys[Phase.FORWARD], keys[Phase.BACKWARD_INPUT])


def _keys(
    block: Block, micro_batches: int
) -> dict[Phase, Int[np.ndarray, "devices 2 micro_batches"]]:
    """Slots of all forwards and input gradients, the building block repeated."""
    delay = _PERIOD * np.arange(micro_batches)
    return {
        Phase.FORWARD: block.forward[:, :, None] + delay,
        Phase.BACKWARD_INPUT: block.backward[:, :, None] + delay,
    }


def _slots(devices: int, steps: Steps, turns: Turns) -> Block:
    """Slots of one micro-batch's forwards and input gradients on every device."""
    # Four legs, each from where the one before ended: forwards down to the last device and back up
    # to the first, where the loss is, then input gradients down and back up.
    d = np.arange(devices)
    from_last = devices - 1 - d
    forward_down = steps.forward_down * d
    forward_up = forward_down[-1] + turns.forward + steps.forward_up * from_last
    backward_down = forward_up[0] + turns.loss + steps.backward_down * d
    backward_up = backward_down[-1] + turns.backward + steps.backward_up * from_last

    # The first chunk runs the first leg of the forward and the last leg of the backward.
    forward = np.stack([forward_down, forward_up], axis=1)
    backward = np.stack([backward_up, backward_down], axis=1)
    return Block(forward, backward)


def repeats(block: Block) -> bool:
    """Whether the passes of successive micro-batches fall on different slots of every device."""
    place = np.sort(np.concatenate(block, axis=1) % _PERIOD, axis=1)
    return bool((np.diff(place, axis=1) > 0).all())


@register("zb-h1", chunks=1)
def zb_h1(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """ZB-H1 (section 2.1): the activation memory of 1F1B, a third of its bubble where passes are
    equal.

    1F1B in which the weight gradient of micro-batch i follows the input gradient of i + d on device
    d, so that all devices have p micro-batches in flight.
    """
    # 1F1B's slots, doubled to make room for weight gradients on odd ones: micro-batches follow each
    # other every four slots, and d micro-batches later is 4 d slots later.
    d, _, i = np.ogrid[:devices, :1, :micro_batches]
    forward = 2 * (d + 2 * i)
    backward_input = 2 * (2 * devices - 1 - d + 2 * i)
    backward_weight = backward_input + 4 * d + 1
    keys = {
        Phase.FORWARD: forward,
        Phase.BACKWARD_INPUT: backward_input,
        Phase.BACKWARD_WEIGHT: backward_weight,
    }
    return from_keys("zb-h1", looped_stages(devices, 1), keys)


@register("zb-h2", chunks=1, staggered=True)
def zb_h2(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """ZB-H2 (section 2.2): 2 p - 1 micro-batches in flight, and no bubble where passes are equal.

    Input gradients before forwards before weight gradients. Devices go on to the next step without
    waiting for each other (section 4, post-validation).
    """
    # A queue for each phase, in which micro-batches come in order; phases by falling priority.
    i = np.broadcast_to(np.arange(micro_batches), (devices, 1, micro_batches))
    phases = (Phase.BACKWARD_INPUT, Phase.FORWARD, Phase.BACKWARD_WEIGHT)
    pool = from_keys("zb-h2", looped_stages(devices, 1), dict.fromkeys(phases, i))
    rank_of_phase = np.empty(len(Phase), np.int64)
    rank_of_phase[list(phases)] = np.arange(len(phases))
    rank = rank_of_phase[pool.phase]
    return arrange(pool, rank, rank, limit=2 * devices - 1)
