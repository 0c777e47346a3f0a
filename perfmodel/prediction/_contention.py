"""Kernels beside a collective: it runs on multiprocessors of its own, and they make do with the others.

A collective that hides behind kernels holds a thread block per channel, each on a multiprocessor, for as long as it
lasts. Kernels of many waves then run at (SM - held) / SM of their speed; a product of one wave that no longer fits
takes two. Overlap so costs a share of what it hides, less than not to overlap would, but never nothing.

Measured, an H100 with 24 blocks of an all-gather beside products of 132 tiles: 1.70 times as long (NVIDIA developer
forum, thread 337991); an H800 whose expert exchange holds 20 of 132 multiprocessors: 1.06 to 1.26, median 1.15, over
kernels of element-wise work (deepseek-ai/profile-data, train trace; `contention` among the public measurements), where
132 / 112 is 1.18; over whole steps 1.19 (arXiv:2507.03114).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.ops import Gemm, Op
from perfmodel.spec import Device, Framework

CHANNELS: Final = 24
"""Thread blocks of a collective inside a node: what NCCL starts among NVLink devices (the all-gather above; its own
limit is 32)."""
CHANNELS_BETWEEN_NODES: Final = 16
"""The same between nodes, where it starts two for each NIC, of eight."""
TILE: Final = (128, 256)
"""Rows and columns of a product that a thread block computes: cuBLAS' largest tile on tensor cores."""
ONE_WAVE_LOST: Final = 0.5
"""Of the time beside a collective, for a product that takes two waves instead of one."""
MOST_HELD: Final = 0.25
"""Of a small device, on which fewer channels are started. Assumed."""
_WITH_MULTIPROCESSORS: Final = ("NVIDIA", "AMD")


def held_share(device: Device, framework: Framework, channels: int = CHANNELS) -> float:
    """Share of a device's multiprocessors that a collective of so many thread blocks holds; 0 where engines of their
    own drive the links (TPUs) and on processors, which have no rate in fp16."""
    if device.vendor not in _WITH_MULTIPROCESSORS or device.peak.fp16 is None or not framework.contends:
        return 0.0
    return min(channels / device.compute_units, MOST_HELD)


def lost_shares(ops: Sequence[Op], device: Device, held: float) -> Float[np.ndarray, " ops"]:
    """Share of the time beside a collective by which each kernel runs longer; no meaning for collectives.

    `held`: `held_share`, or 0 where nothing contends.
    """
    if not held:
        return np.zeros(len(ops))
    free = round(device.compute_units * (1 - held))
    fits_no_more = [isinstance(op, Gemm) and free < _tiles(op) <= device.compute_units for op in ops]
    return np.where(fits_no_more, max(held, ONE_WAVE_LOST), held)


def _tiles(op: Gemm) -> int:
    return op.batch * op.groups * -(-op.m // TILE[0]) * -(-op.n // TILE[1])
