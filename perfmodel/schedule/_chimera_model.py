"""Chimera's performance model (Li and Hoefler 2021, section 3.4), a closed form."""

from dataclasses import dataclass
from math import log2

import numpy as np

from perfmodel.schedule._registry import get_schedule
from perfmodel.schedule._schedule import NEVER, Phase, Schedule
from perfmodel.schedule.facts import PassTimes, starts_and_ends


@dataclass(frozen=True)
class ChimeraModel:
    """Step time by the paper's formula, term by term."""

    forwards: int
    """n_f, forwards on the critical path."""
    backwards: int
    """n_b, backwards on it."""
    compute_s: float
    """n_f T_f + n_b T_b."""
    transfers_s: float
    """(n_f + n_b) T_p2p; transfers that middle bubbles could hide count too."""
    unoverlapped_s: float
    """Time of the gradients' all-reduce that does not fit into the free regions of the worst
    device."""

    @property
    def step_s(self) -> float:
        """T_iter, the sum of the three."""
        return self.compute_s + self.transfers_s + self.unoverlapped_s


def rabenseifner_s(n_bytes: float, ranks: int, latency_s: float, bytes_per_s: float) -> float:
    """Time of an all-reduce: 2 log2(r) alpha + 2 (r - 1) / r S / bandwidth (section 3.4)."""
    if ranks == 1:
        return 0.0
    return 2 * log2(ranks) * latency_s + 2 * (ranks - 1) / ranks * n_bytes / bytes_per_s


def chimera_model(
    devices: int,
    micro_batches: int,
    *,
    forward_s: float,
    backward_s: float,
    transfer_s: float = 0.0,
    all_reduce_s: float = 0.0,
    pipelines: int = 2,
) -> ChimeraModel:
    """The paper's step time.

    Args:
        devices: p.
        micro_batches: m, any number.
        forward_s, backward_s: seconds of a micro-batch on a stage (T_f, T_b).
        transfer_s: seconds of a message between neighbouring stages (T_p2p).
        all_reduce_s: all-reduce of one stage's gradients over all its replicas (T_allreduce, see
            `rabenseifner_s`).
        pipelines: 2k.

    Raises:
        LayoutError: pipelines that do not fit the devices.
    """
    # The paper counts passes on the critical path of the order without transfers, then adds a
    # transfer to each.
    schedule = get_schedule(f"chimera:{pipelines}")(devices, micro_batches)
    times = PassTimes.uniform(devices, forward_s, backward_s)
    start, end = starts_and_ends(schedule, times)
    path = _critical_path(schedule, start, end)
    forwards = int((schedule.phase[path] == Phase.FORWARD).sum())
    backwards = len(path) - forwards
    unoverlapped_s = [
        _unoverlapped_s(schedule, start, end, device, all_reduce_s) for device in range(devices)
    ]
    return ChimeraModel(
        forwards=forwards,
        backwards=backwards,
        compute_s=forwards * forward_s + backwards * backward_s,
        transfers_s=(forwards + backwards) * transfer_s,
        unoverlapped_s=max(unoverlapped_s),
    )


def _critical_path(schedule: Schedule, start: np.ndarray, end: np.ndarray) -> list[int]:
    """Instructions from the last one back to the first; ties go to the device's order."""
    needs = schedule.dependencies
    instruction = int(end.argmax())
    path = []
    while instruction != NEVER:
        path.append(instruction)

        # The one before is what ended just when this one started.
        before = [instruction - 1] if schedule.position[instruction] else []
        before += [int(need[instruction]) for need in needs if need[instruction] != NEVER]
        released_by = [i for i in before if np.isclose(end[i], start[instruction])]
        instruction = released_by[0] if released_by else NEVER
    return path


def _unoverlapped_s(
    schedule: Schedule, start: np.ndarray, end: np.ndarray, device: int, all_reduce_s: float
) -> float:
    """Seconds of a device's all-reduces that its idle time does not hold (figure 6).

    A stage's all-reduce may use the device's idle time after the stage's last backward, one
    all-reduce after another; only the time after the end of all computation counts.
    """
    on_device = slice(schedule.offsets[device], schedule.offsets[device + 1])
    start_s = start[on_device]
    end_s = end[on_device]
    chunk = schedule.chunk[on_device]
    ready = sorted(float(end_s[chunk == c].max()) for c in np.unique(chunk))

    # From one stage's gradients to the next, all-reduces get on by the time in which the device is
    # idle.
    unfinished_s = 0.0
    for ready_s, next_ready_s in zip(ready, [*ready[1:], float(end.max())], strict=True):
        overlap_s = np.minimum(end_s, next_ready_s) - np.maximum(start_s, ready_s)
        computing_s = float(np.clip(overlap_s, 0, None).sum())
        unfinished_s = max(
            0.0, unfinished_s + all_reduce_s - (next_ready_s - ready_s - computing_s)
        )
    return unfinished_s
