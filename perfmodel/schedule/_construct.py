"""Ways to write a schedule down: sort keys in closed form, or each device's order as a list."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int

from perfmodel.errors import PerfModelError
from perfmodel.schedule._schedule import Phase, Schedule
from perfmodel.schedule._slots import earliest_slots, slots_hold


def looped_stages(devices: int, chunks: int) -> Int[np.ndarray, "devices chunks"]:
    """Stage map of looped pipelines: chunk c of device d is stage c * devices + d."""
    return np.arange(chunks) * devices + np.arange(devices)[:, None]


def from_keys(
    name: str,
    stage: Int[np.ndarray, "devices chunks"],
    keys: Mapping[Phase, Int[np.ndarray, "devices chunks micro_batches"]],
) -> Schedule:
    """A schedule in which each device runs its work in the order of integer keys.

    Args:
        name: name shown in messages.
        stage: global stage of each device's chunks.
        keys: for each phase, the sort key of every piece of work, below zero where the device does
            not do it. Keys that also grow along data dependencies (start slots in closed form) are
            kept as slots; otherwise slots are found by simulation.
    """
    shapes = {phase: np.shape(key) for phase, key in keys.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 3:
        raise PerfModelError(
            f"schedule {name}: keys must share one shape (devices, chunks, micro-batches), got {shapes}"
        )
    shape = next(iter(shapes.values()))
    key = np.stack([np.broadcast_to(k, shape) for k in keys.values()]).transpose(1, 0, 2, 3)
    flat = key.reshape(shape[0], -1)
    done = flat >= 0
    # Work not done sorts last on its device and is cut off.
    order = np.argsort(np.where(done, flat, np.iinfo(np.int64).max), axis=1, kind="stable")
    kept = np.arange(flat.shape[1]) < done.sum(axis=1)[:, None]
    which, chunk, micro_batch = np.unravel_index(order[kept], key.shape[1:])
    schedule = Schedule(
        name=name,
        stage=np.asarray(stage, np.int32),
        micro_batches=shape[2],
        offsets=np.append(0, np.cumsum(done.sum(axis=1))),
        phase=np.array([int(phase) for phase in keys], np.int8)[which],
        chunk=chunk.astype(np.int32),
        micro_batch=micro_batch.astype(np.int32),
        slot=np.take_along_axis(flat, order, axis=1)[kept],
    )
    return _with_slots(schedule)


def from_orders(
    name: str,
    stage: Int[np.ndarray, "devices chunks"],
    micro_batches: int,
    orders: Sequence[Iterable[tuple[Phase, int, int]]],
) -> Schedule:
    """A schedule from each device's list of (phase, chunk, micro-batch).

    Deadlocks are let through, with slot `NEVER`; `check` names them.
    """
    rows = [np.array([(int(f), c, b) for f, c, b in order], np.int32).reshape(-1, 3) for order in orders]
    if len(rows) != len(stage):
        raise PerfModelError(f"schedule {name}: {len(rows)} orders for {len(stage)} devices")
    flat = np.concatenate(rows)
    schedule = Schedule(
        name=name,
        stage=np.asarray(stage, np.int32),
        micro_batches=micro_batches,
        offsets=np.append(0, np.cumsum([len(row) for row in rows])),
        phase=flat[:, 0].astype(np.int8),
        chunk=flat[:, 1],
        micro_batch=flat[:, 2],
        slot=np.zeros(len(flat), np.int64),
    )
    return _with_slots(schedule)


def forward_part(schedule: Schedule) -> Schedule:
    """The schedule without its backward passes (inference)."""
    keep = schedule.phase == Phase.FORWARD
    counts = np.bincount(schedule.device[keep], minlength=schedule.devices)
    return Schedule(
        name=schedule.name,
        stage=schedule.stage,
        micro_batches=schedule.micro_batches,
        offsets=np.append(0, np.cumsum(counts)),
        phase=schedule.phase[keep],
        chunk=schedule.chunk[keep],
        micro_batch=schedule.micro_batch[keep],
        slot=schedule.slot[keep],
    )


def _with_slots(schedule: Schedule) -> Schedule:
    return schedule if slots_hold(schedule) else replace(schedule, slot=earliest_slots(schedule))
