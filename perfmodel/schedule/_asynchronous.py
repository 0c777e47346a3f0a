"""Pipelines without flushes: PipeDream, PipeDream-2BW, TiMePReSt's nF1B. Streams over many mini-batches."""

from dataclasses import replace

import numpy as np

from perfmodel.schedule._arrange import arrange
from perfmodel.schedule._construct import from_keys, looped_stages
from perfmodel.schedule._registry import register
from perfmodel.schedule._schedule import Phase, Schedule
from perfmodel.schedule._synchronous import one_forward_one_backward


@register("pipedream", chunks=1, weights="stashing")
def pipedream(devices: int, micro_batches: int, chunks: int, per_step: int) -> Schedule:
    """1F1B in which every micro-batch is a mini-batch: weights are updated after each backward
    (Narayanan et al. 2019)."""
    return _one_by_one("pipedream", devices, micro_batches, 1)


@register("pipedream-vertical-sync", chunks=1, weights="vertical_sync")
def pipedream_vertical_sync(devices: int, micro_batches: int, chunks: int, per_step: int) -> Schedule:
    """PipeDream with one weight version per micro-batch on all stages (section 3.3, vertical sync)."""
    return _one_by_one("pipedream-vertical-sync", devices, micro_batches, 1)


@register("pipedream-2bw", chunks=1, weights="double_buffering")
def pipedream_2bw(devices: int, micro_batches: int, chunks: int, per_step: int) -> Schedule:
    """1F1B with gradients of `per_step` micro-batches accumulated before each update (Narayanan et al. 2021)."""
    return _one_by_one("pipedream-2bw", devices, micro_batches, per_step)


def version_difference(workers: int, micro_batches: int) -> int:
    """Version difference of nF1B in the unit time of the paper's figures: v = ceil(W / (N + 1)).

    Backward k starts at W + N - 1 + (k - 1)(N + 1) on the last of W workers and takes W slots to the first. The paper's
    floor((W + N - 2) / N) counts N slots per mini-batch and forgets the one of the backward (section 4.4).
    """
    return -(-workers // (micro_batches + 1))


@register("nf1b", chunks=1, number="slots", plain=False, weights="latest", period=version_difference)
def nf1b(devices: int, micro_batches: int, chunks: int, per_step: int, slots: int = 0) -> Schedule:
    """TiMePReSt's nF1B (section 4.2): N forwards, one per micro-batch, then one backward of the mini-batch.

    A backward that is ready goes before forwards. In the paper's figures 7, 9 and 10 a backward lasts one slot, as a
    forward of one micro-batch does, and its gradients are v = `version_difference` updates late. A backward of N
    micro-batches lasts 2 N slots, in which more mini-batches would come in and v would rise. So the default holds the
    last forward of a mini-batch back until the mini-batch v before it is done: at most (v + 1) N - 1 micro-batches
    are in flight, which for v = 1 is the paper's own condition, that a mini-batch's forward is not complete before the
    backward of the one before is over (section 4.4, case 1).

    Args:
        per_step: N, the micro-batches of a mini-batch.
        slots: how many forwards a backward lasts as long as, with any number in flight: 1 for the order of the
            paper's figures, 2 N for that of real durations. Not given: 2 N, bounded as above.
    """
    i = np.broadcast_to(np.arange(micro_batches), (devices, 1, micro_batches))
    pool = from_keys(
        "nf1b",
        looped_stages(devices, 1),
        {Phase.FORWARD: i, Phase.BACKWARD: np.where(i % per_step == 0, micro_batches + i, -1)},
        spans={Phase.BACKWARD: per_step},
    )
    forward = (pool.phase == Phase.FORWARD).astype(np.int64)
    length = np.where(forward, 1, slots or 2 * per_step)
    limit = None if slots else (version_difference(devices, per_step) + 1) * per_step - 1
    return _updating_every(1, arrange(pool, forward, forward, limit=limit, length=length))


def _one_by_one(name: str, devices: int, micro_batches: int, per_update: int) -> Schedule:
    """1F1B without flushes."""
    return replace(_updating_every(per_update, one_forward_one_backward(devices, micro_batches)), name=name)


def _updating_every(backwards: int, schedule: Schedule) -> Schedule:
    """The schedule with weights updated after so many backwards of each device."""
    ends = schedule.ends_backward
    return replace(schedule, updates=ends & (schedule.running_total(ends) % backwards == 0))
