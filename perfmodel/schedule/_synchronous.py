"""Schedules that flush the pipeline every step: GPipe, 1F1B, interleaved 1F1B, 1F1B on slices of
the sequence (Seq1F1B, Sun et al. 2024); and forward only.

Each is one formula: the start slot of micro-batch i of chunk c on device d, for forwards and for
backwards. Slots grow along every data dependency, so that sorting a device's work by slot gives an
order that cannot deadlock, for any number of micro-batches.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Int

from perfmodel.errors import LayoutError
from perfmodel.schedule._construct import from_keys
from perfmodel.schedule._registry import DEFAULT_SLICES, looped_stages, register
from perfmodel.schedule._schedule import Phase, Schedule

Grid = Int[np.ndarray, "..."]
"""Whole numbers that broadcast to [devices, chunks, micro_batches]."""


def _rounds(p: int, v: int, chunk: Grid, i: Grid) -> Grid:
    """Place in Megatron's sequence: groups of p micro-batches, each through all chunks in turn.

    A last group of fewer than p leaves gaps, as if the missing micro-batches had been struck out.
    """
    return (i // p * v + chunk) * p + i % p


@register("gpipe")
def gpipe(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, figure 2c).

    With several chunks this is the breadth-first looped pipeline.
    """
    p, m, v = devices, micro_batches, chunks
    d, c, i = np.ogrid[:p, :v, :m]

    # A chunk starts when the first device is done with the chunk before, and when its input is back
    # from the last device.
    lap = max(p, m)
    forward = d + c * lap + i

    # Backwards mirror the forwards, from the slot in which the last forward has ended.
    forwards_end = (v - 1) * lap + m + p - 1
    backward = forwards_end + (p - 1 - d) + (v - 1 - c) * lap + i
    keys = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
    return from_keys("gpipe", looped_stages(p, v), keys)


@register("breadth-first", looped=True)
def breadth_first(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Looped pipeline, each chunk run for all micro-batches before the next (Lamy-Poirier 2023,
    section 4).

    It is GPipe's order over several chunks.
    """
    return replace(gpipe(devices, micro_batches, chunks), name="breadth-first")


@register("1f1b", chunks=1)
def one_forward_one_backward(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """p - 1 - d warm-up forwards on device d, then one forward, one backward (DAPPLE, Fan et al.
    2021)."""
    # A micro-batch moves on by one device a slot, down to the last and back up. The next follows
    # two slots later, so that forwards fall on slots of one parity on every device and backwards on
    # the other.
    d, _, i = np.ogrid[:devices, :1, :micro_batches]
    forward = d + 2 * i
    backward = 2 * devices - 1 - d + 2 * i
    keys = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
    return from_keys("1f1b", looped_stages(devices, 1), keys)


@register("interleaved", looped=True)
def interleaved(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2).

    2 (p - 1 - d) + (v - 1) p warm-up forwards on device d, then one forward, one backward, chunks
    taking turns every p micro-batches. The micro-batch count need not be a multiple of p: the order
    is that of the next multiple with the missing micro-batches struck out, which cannot deadlock.
    One chunk per device is plain 1F1B, as in Megatron.
    """
    p, m, v = devices, micro_batches, chunks
    if v == 1:
        return one_forward_one_backward(p, m, 1)
    # Forwards on even slots, backwards on odd ones, which pass the chunks in the opposite order.
    # The first backward waits for the forward of the first micro-batch through all v p stages.
    d, c, i = np.ogrid[:p, :v, :m]
    forward = 2 * (d + _rounds(p, v, c, i))
    backward = 2 * (_rounds(p, v, v - 1 - c, i) + (p - 1 - d) + v * p - 1) + 1
    keys = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
    return from_keys("interleaved", looped_stages(p, v), keys)


@register("forward")
def forward_only(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Forward passes alone (inference), chunks taking turns every p micro-batches."""
    d, c, i = np.ogrid[:devices, :chunks, :micro_batches]
    key = d + _rounds(devices, chunks, c, i)
    return from_keys("forward", looped_stages(devices, chunks), {Phase.FORWARD: key})


@register("seq1f1b", chunks=1, number="slices", plain=False)
def seq1f1b(
    devices: int, micro_batches: int, chunks: int, slices: int = DEFAULT_SLICES
) -> Schedule:
    """1F1B on slices of the sequence: forwards in order, backwards of each sequence last slice
    first.

    Causal attention lets slice j run once slices before it have left their keys and values; the
    backward of slice j needs those after it. p - 2 - d + k warm-up forwards of k slices each
    (section 3.2), so that about 1 / k as many activations are in flight.

    Args:
        micro_batches: whole sequences; the schedule's own micro-batches are their slices.
    """
    if slices < 1:
        raise LayoutError(f"schedule seq1f1b: slices must be at least 1, got {slices}")
    # 1F1B over slices; in the backward slice j of a sequence takes the turn of slice k - 1 - j, and
    # all turns are k - 1 later, when the sequence's last forward is through.
    d, _, i = np.ogrid[:devices, :1, : micro_batches * slices]
    reverse = i // slices * slices + slices - 1 - i % slices
    forward = d + 2 * i
    backward = 2 * devices - 1 - d + 2 * (reverse + slices - 1)
    keys = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
    return from_keys("seq1f1b", looped_stages(devices, 1), keys, slices=slices)
