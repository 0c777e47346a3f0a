"""Time to build structures: the vectorised builder against one that walks op by op in plain Python;
and every schedule, and how it grows: 32 stages, 512 micro-batches."""

from collections import deque
from itertools import pairwise
from typing import Any

from timing import best_s

from perfmodel.program import ProgramSpec, build
from perfmodel.schedule import Phase, Schedule, get_schedule, schedule_names

LARGE = "1f1b_p64_m512_sends"
CASES = {
    LARGE: ProgramSpec(stages=64, micro_batches=512, sends="op"),
    "1f1b_p64_m512": ProgramSpec(stages=64, micro_batches=512),
    "1f1b_p16_m192": ProgramSpec(stages=16, micro_batches=192),
    "interleaved_p16_m192_v6": ProgramSpec(
        schedule="interleaved", stages=16, micro_batches=192, chunks=6
    ),
}
STAGES, MICRO_BATCHES = 32, 512


def plain_build(spec: ProgramSpec) -> list[tuple[int, Phase, int, int, int]]:
    """Ops (device, phase, stage, previous on the device, previous stage) in an executable order."""
    schedule = spec.build_schedule()
    queues = _queues(schedule)
    place: dict[tuple[bool, int, int], int] = {}
    last = [-1] * spec.stages
    ops: list[tuple[int, Phase, int, int, int]] = []
    ready = deque(range(spec.stages))
    waiting: dict[tuple[bool, int, int], int] = {}
    while ready:
        device = ready.popleft()
        queue = queues[device]
        while queue:
            # A pass waits for the same pass of the stage before it, in its own direction.
            phase, stage, micro_batch = queue[0]
            forward = phase == Phase.FORWARD
            source = stage - 1 if forward else stage + 1
            need = (forward, source, micro_batch)
            if 0 <= source < schedule.n_stages and need not in place:
                waiting[need] = device
                break
            queue.popleft()
            ops.append((device, phase, stage, last[device], place.get(need, -1)))
            last[device] = len(ops) - 1

            # A send is an op of its own, on no device's queue.
            receiver = stage + 1 if forward else stage - 1
            if spec.sends == "op" and 0 <= receiver < schedule.n_stages:
                ops.append((device, phase, stage, last[device], -1))

            # Whoever waited for this pass can go on.
            done = (forward, stage, micro_batch)
            place[done] = len(ops) - 1
            if done in waiting:
                ready.append(waiting.pop(done))
    return ops


def _queues(schedule: Schedule) -> list[deque[tuple[Phase, int, int]]]:
    """The passes (phase, stage and micro-batch) of every device, in order."""
    columns = (schedule.phase, schedule.instruction_stage, schedule.micro_batch)
    work = list(zip(*(column.tolist() for column in columns), strict=True))
    offsets = schedule.offsets.tolist()
    return [deque(work[a:b]) for a, b in pairwise(offsets)]


def run() -> dict[str, dict[str, Any]]:
    """Speed of `build` relative to the plain builder, and its time relative to the limit."""
    results: dict[str, dict[str, Any]] = {}
    for name, spec in CASES.items():
        build_s = best_s(lambda spec=spec: build(spec), 5)
        plain_s = best_s(lambda spec=spec: plain_build(spec), 3)
        results[f"structures/{name}"] = {
            "ratio": plain_s / build_s,
            "baseline": "op-by-op Python builder",
            "unit": "x faster",
            "seconds": build_s,
            "ops": build(spec).n_ops,
        }
    results["structures/large_limit"] = {
        "ratio": results[f"structures/{LARGE}"]["seconds"] / 0.35,
        "baseline": "0.35 s",
        "unit": "x",
        "target": "<= 1",
    }
    return results | of_schedules()


def seconds(name: str, micro_batches: int) -> tuple[float, int]:
    """Least of three builds, and the ops of the structure."""
    chunks = get_schedule(name).chunks or 2
    spec = ProgramSpec(schedule=name, stages=STAGES, micro_batches=micro_batches, chunks=chunks)
    return best_s(lambda: build(spec), 3), build(spec).n_ops


def of_schedules() -> dict[str, dict[str, object]]:
    """For each schedule the seconds of a build, and the time per op against a build of half as many
    micro-batches."""
    results: dict[str, dict[str, object]] = {}
    for name in schedule_names():
        # Time per op stays the same where building grows with the ops and no faster.
        half_s, half_ops = seconds(name, MICRO_BATCHES // 2)
        build_s, ops = seconds(name, MICRO_BATCHES)
        results[f"schedule_{name}_build"] = {
            "ratio": build_s,
            "baseline": f"nothing; {ops:,} ops",
            "unit": "s",
            "target": "<= 1",
        }
        results[f"schedule_{name}_growth"] = {
            "ratio": build_s / ops / (half_s / half_ops),
            "baseline": "half as many micro-batches",
            "unit": "x time per op",
            "target": "<= 1.5",
        }
    return results
