"""Zero-bubble schedules: weight gradients, split from input gradients, fill the bubbles (Qi et al. 2024)."""

import numpy as np

from perfmodel.schedule._arrange import arrange
from perfmodel.schedule._construct import from_keys, looped_stages
from perfmodel.schedule._registry import register
from perfmodel.schedule._schedule import Phase, Schedule


@register("zb-h1", chunks=1)
def zb_h1(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """ZB-H1 (section 2.1): the activation memory of 1F1B, a third of its bubble where passes are equal.

    1F1B in which the weight gradient of micro-batch i follows the input gradient of i + d on device d, so
    that all devices have p micro-batches in flight.
    """
    d, _, i = np.ogrid[:devices, :1, :micro_batches]
    forward = 2 * (d + 2 * i)
    backward = 2 * (2 * devices - 1 - d + 2 * i)
    keys = {Phase.FORWARD: forward, Phase.BACKWARD_INPUT: backward, Phase.BACKWARD_WEIGHT: backward + 4 * d + 1}
    return from_keys("zb-h1", looped_stages(devices, 1), keys)


@register("zb-h2", chunks=1, staggered=True)
def zb_h2(devices: int, micro_batches: int, chunks: int) -> Schedule:
    """ZB-H2 (section 2.2): 2 p - 1 micro-batches in flight, and no bubble where passes are equal.

    Input gradients before forwards before weight gradients. Devices go on to the next step without waiting
    for each other (section 4, post-validation).
    """
    i = np.broadcast_to(np.arange(micro_batches), (devices, 1, micro_batches))
    phases = (Phase.BACKWARD_INPUT, Phase.FORWARD, Phase.BACKWARD_WEIGHT)
    pool = from_keys("zb-h2", looped_stages(devices, 1), dict.fromkeys(phases, i))
    rank = np.empty(len(Phase), np.int64)
    rank[list(phases)] = np.arange(len(phases))
    return arrange(pool, rank[pool.phase], rank[pool.phase], limit=2 * devices - 1)
