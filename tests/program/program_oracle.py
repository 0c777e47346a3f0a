"""A slow, obvious simulator of a step: queues of tasks per device and stream that block on events.

Written from the meaning of `ProgramSpec`'s fields, one task at a time, straight from the schedule's
order; shares no code with the builder.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from perfmodel.program import Kind, ProgramSpec, Stream
from perfmodel.schedule import Instruction, Phase, Schedule

Name = tuple[Kind, int, int, int, int]
"""Kind, global stage, segment, micro-batch, device."""
Duration = Callable[[Kind, int, int], float]
KIND = {
    Phase.FORWARD: Kind.FORWARD,
    Phase.BACKWARD: Kind.BACKWARD,
    Phase.BACKWARD_INPUT: Kind.BACKWARD_INPUT,
    Phase.BACKWARD_WEIGHT: Kind.BACKWARD_WEIGHT,
}


@dataclass
class Task:
    name: Name
    waits: list[tuple[Name, float]]
    """Tasks that must end first, and the delay after each."""


@dataclass
class Simulator:
    spec: ProgramSpec
    schedule: Schedule
    duration: Duration
    queues: dict[tuple[int, Stream], list[Task]] = field(default_factory=lambda: defaultdict(list))
    transfers: dict[tuple[bool, int, int], tuple[Name, float, int]] = field(default_factory=dict)
    """(forward, receiving stage, micro-batch) -> task that delivers, delay after it, sender's
    device."""
    blocking: dict[int, Name] = field(default_factory=dict)
    """Reduction that the next pass of a device waits for."""

    def run(self) -> tuple[dict[Name, float], float]:
        """End time of every task, and of the step."""
        for device in range(self.schedule.devices):
            self._enqueue_gathers_of_the_step(device)
            self._enqueue_device(device)
        self._resolve_transfers()
        end = self._simulate({})
        if self.schedule.forward_only:
            return end, max(end.values())
        self._enqueue_step_end()
        end = self._simulate({})
        return end, max(end.values())

    @property
    def late(self) -> bool:
        """Whether reductions come after the passes, of ZeRO 2 those that are left."""
        by_layer = self.spec.param_gather in ("layer", "layer_serial")
        return self.spec.grad_reduce == "end" and not (
            self.spec.reduce_every_micro_batch and by_layer
        )

    @property
    def whole(self) -> int:
        return -1 if self.spec.segments > 1 else 0

    def _segments(self, instruction: Instruction, device: int) -> list[int]:
        spec = self.spec
        if spec.segments == 1:
            return [0]
        order = list(self.schedule.order(device))
        same = [i for i in order if i.chunk == instruction.chunk]
        forward = instruction.phase == Phase.FORWARD
        split = spec.param_gather in ("layer", "layer_serial")
        if spec.param_gather == "step_overlap" and forward:
            split |= instruction == next(i for i in same if i.phase == Phase.FORWARD)
        if spec.grad_reduce == "overlap" and instruction.phase in (
            Phase.BACKWARD,
            Phase.BACKWARD_WEIGHT,
        ):
            split |= spec.reduce_every_micro_batch or instruction == self._last_reduced(same)
        if not split:
            return [-1]
        segments = list(range(spec.segments))
        return segments if forward else segments[::-1]

    @staticmethod
    def _last_reduced(same: list[Instruction]) -> Instruction:
        return [i for i in same if i.phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)][-1]

    def _enqueue_gathers_of_the_step(self, device: int) -> None:
        if self.spec.param_gather != "step_overlap":
            return
        seen = set()
        for i in self.schedule.order(device):
            if i.phase == Phase.FORWARD and i.chunk not in seen:
                seen.add(i.chunk)
                for segment in self._segments(i, device):
                    name = (Kind.PARAM_GATHER, self._stage(i), segment, -1, device)
                    self.queues[device, Stream.DATA_COMM].append(Task(name, []))

    def _stage(self, i: Instruction) -> int:
        return int(self.schedule.stage[i.device, i.chunk])

    def _enqueue_device(self, device: int) -> None:
        spec = self.spec
        order = list(self.schedule.order(device))
        compute, comm = self.queues[device, Stream.COMPUTE], self.queues[device, Stream.DATA_COMM]
        work = [(i, s) for i in order for s in self._segments(i, device)]
        using = [w for w in work if w[0].phase != Phase.BACKWARD_WEIGHT]
        ahead = {"layer": spec.prefetch, "layer_serial": 0}.get(spec.param_gather)
        # no gather overtakes a reduction that the next op waits for, but the next op's own
        queued = min(ahead or 0, 1) if spec.grad_reduce == "end" else ahead or 0
        gathered = 0

        def name_of(item: tuple[Instruction, int]) -> Name:
            i, segment = item
            return (KIND[i.phase], self._stage(i), segment, i.micro_batch, device)

        def gather_name(item: tuple[Instruction, int]) -> Name:
            i, segment = item
            kind = Kind.PARAM_GATHER if i.phase == Phase.FORWARD else Kind.PARAM_GATHER_BACKWARD
            return (kind, self._stage(i), segment, i.micro_batch, device)

        for item in work:
            i, segment = item
            stage = self._stage(i)
            waits = []
            if ahead is not None and item in using:
                k = using.index(item)
                while gathered <= min(k + queued, len(using) - 1):
                    before = gathered - 1 - ahead
                    gate = [(name_of(using[before]), 0.0)] if before >= 0 else []
                    if not ahead and segment == self._segments(i, device)[0]:
                        gate.append(
                            (
                                (
                                    "upstream",
                                    i.phase == Phase.FORWARD,
                                    stage,
                                    i.micro_batch,
                                    device,
                                ),
                                0.0,
                            )
                        )
                    comm.append(Task(gather_name(using[gathered]), gate))
                    gathered += 1
                waits.append((gather_name(item), 0.0))
            if spec.param_gather == "step_overlap" and i.phase == Phase.FORWARD:
                first = i.micro_batch == min(o.micro_batch for o in order if o.chunk == i.chunk)
                if first:
                    waits.append(((Kind.PARAM_GATHER, stage, segment, -1, device), 0.0))
            if segment == self._segments(i, device)[0] and i.phase != Phase.BACKWARD_WEIGHT:
                waits.append(
                    (("upstream", i.phase == Phase.FORWARD, stage, i.micro_batch, device), 0.0)
                )
            if device in self.blocking:
                waits.append((self.blocking.pop(device), 0.0))
            task = Task(name_of(item), waits)
            compute.append(task)
            self._enqueue_reduction(i, segment, task.name, device, order)
            if segment == self._segments(i, device)[-1]:
                self._enqueue_send(i, task.name, device)

    def _enqueue_reduction(
        self, i: Instruction, segment: int, after: Name, device: int, order: list[Instruction]
    ) -> None:
        spec = self.spec
        if spec.grad_reduce == "none" or i.phase not in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT):
            return
        every = spec.reduce_every_micro_batch
        if spec.grad_reduce == "end" and not every:
            return
        last = i == self._last_reduced([o for o in order if o.chunk == i.chunk])
        if (last and self.late) if every else not last:
            return
        name = (Kind.GRAD_REDUCE, self._stage(i), segment, i.micro_batch if every else -1, device)
        waits = [(after, 0.0)]
        if not every:  # replicas of the stage on other devices take part
            for other in range(self.schedule.devices):
                same = [o for o in self.schedule.order(other) if self._stage(o) == self._stage(i)]
                if other != device and same:
                    last = self._last_reduced(same)
                    waits.append(
                        ((KIND[last.phase], self._stage(i), segment, last.micro_batch, other), 0.0)
                    )
        self.queues[device, Stream.DATA_COMM].append(Task(name, waits))
        if spec.grad_reduce == "end":
            self.blocking[device] = name

    def _enqueue_send(self, i: Instruction, after: Name, device: int) -> None:
        if i.phase == Phase.BACKWARD_WEIGHT:
            return
        forward = i.phase == Phase.FORWARD
        stage = self._stage(i)
        target = stage + 1 if forward else stage - 1
        if not 0 <= target < self.schedule.n_stages:
            return
        kind = Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD
        receiver = self._device_of(target, i.micro_batch)
        delivered, delay = after, 0.0
        if receiver != device:
            if self.spec.sends == "lag":
                delay = self.duration(kind, stage, self.whole)
            else:
                delivered = (kind, stage, self.whole, i.micro_batch, device)
                stream = Stream.SEND if self.spec.sends == "op" else Stream.COMPUTE
                self.queues[device, stream].append(Task(delivered, [(after, 0.0)]))
        self.transfers[forward, target, i.micro_batch] = (delivered, delay, device)

    def _device_of(self, stage: int, micro_batch: int) -> int:
        for device in range(self.schedule.devices):
            for i in self.schedule.order(device):
                if (self._stage(i), i.micro_batch, i.phase) == (stage, micro_batch, Phase.FORWARD):
                    return device
        raise LookupError(stage, micro_batch)

    def _resolve_transfers(self) -> None:
        for queue in self.queues.values():
            for task in queue:
                resolved = []
                for name, delay in task.waits:
                    if name[0] != "upstream":
                        resolved.append((name, delay))
                    elif name[1:4] in self.transfers:
                        delivered, lag, _ = self.transfers[name[1:4]]
                        resolved.append((delivered, lag))
                task.waits = resolved

    def _simulate(self, end: dict[Name, float]) -> dict[Name, float]:
        free: dict[tuple[int, Stream], float] = defaultdict(float)
        queues = {key: list(queue) for key, queue in self.queues.items()}
        moved = True
        while moved:
            moved = False
            for key, queue in queues.items():
                while queue and all(name in end for name, _ in queue[0].waits):
                    task = queue.pop(0)
                    start = max([free[key], *(end[name] + delay for name, delay in task.waits)])
                    assert task.name not in end
                    end[task.name] = free[key] = start + self.duration(*task.name[:3])
                    moved = True
        assert not any(queues.values()), "the simulated step deadlocks"
        return end

    def _enqueue_step_end(self) -> None:
        """Tasks after the passes; what they wait for is read off the queues as they stand."""
        spec, schedule = self.spec, self.schedule
        compute = [self.queues[d, Stream.COMPUTE] for d in range(schedule.devices)]
        comm = [self.queues[d, Stream.DATA_COMM] for d in range(schedule.devices)]

        def busy(d: int) -> list[tuple[Name, float]]:
            return [(queue[-1].name, 0.0) for queue in (compute[d], comm[d]) if queue]

        devices = range(schedule.devices)
        if self.late:
            for d in devices:
                for chunk in reversed(range(schedule.chunks)):
                    name = (Kind.GRAD_REDUCE, int(schedule.stage[d, chunk]), self.whole, -1, d)
                    holders = [o for o in devices if schedule.stage[d, chunk] in schedule.stage[o]]
                    comm[d].append(Task(name, [(compute[o][-1].name, 0.0) for o in holders]))
        first, last = (
            next(d for d in devices if stage in schedule.stage[d])
            for stage in (0, schedule.n_stages - 1)
        )
        if spec.tied_embedding and first != last:
            waits = busy(first) + busy(last)
            for d, stage in ((first, 0), (last, schedule.n_stages - 1)):
                comm[d].append(Task((Kind.EMBEDDING_REDUCE, stage, self.whole, -1, d), list(waits)))
        if spec.optimizer:
            everyone = [wait for d in devices for wait in busy(d)]
            own = [busy(d) for d in devices]
            for d in devices:
                name = (Kind.OPTIMIZER, int(schedule.stage[d, 0]), self.whole, -1, d)
                compute[d].append(Task(name, everyone if spec.grad_norm_barrier else own[d]))
        if spec.param_gather == "step":
            for d in devices:
                for chunk in range(schedule.chunks):
                    name = (Kind.PARAM_GATHER, int(schedule.stage[d, chunk]), self.whole, -1, d)
                    comm[d].append(Task(name, [(compute[d][-1].name, 0.0)]))


def end_times(
    spec: ProgramSpec, schedule: Schedule, duration: Duration
) -> tuple[dict[Name, float], float]:
    """End time of every task, and of the step."""
    return Simulator(spec, schedule, duration).run()
