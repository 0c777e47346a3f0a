"""Sequence-sliced 1F1B (Seq1F1B, Sun et al. 2024)."""

import numpy as np

from perfmodel.errors import LayoutError
from perfmodel.schedule._construct import from_keys, looped_stages
from perfmodel.schedule._registry import DEFAULT_SLICES, register
from perfmodel.schedule._schedule import Phase, Schedule


@register("seq1f1b", chunks=1, number="slices", plain=False)
def seq1f1b(devices: int, micro_batches: int, chunks: int, slices: int = DEFAULT_SLICES) -> Schedule:
    """1F1B on slices of the sequence: forwards in order, backwards of each sequence last slice first.

    Causal attention lets slice j run once slices before it have left their keys and values; the backward
    of slice j needs those after it. p - 2 - d + k warm-up forwards of k slices each (section 3.2), so
    that about 1 / k as many activations are in flight.

    Args:
        micro_batches: whole sequences; the schedule's own micro-batches are their slices.
    """
    if slices < 1:
        raise LayoutError(f"schedule seq1f1b: slices must be at least 1, got {slices}")
    d, _, i = np.ogrid[:devices, :1, : micro_batches * slices]
    reverse = i // slices * slices + slices - 1 - i % slices
    forward = d + 2 * i
    backward = 2 * devices - 1 - d + 2 * (reverse + slices - 1)
    keys = {Phase.FORWARD: forward, Phase.BACKWARD: backward}
    return from_keys("seq1f1b", looped_stages(devices, 1), keys, slices=slices)
