"""Pipeline parallelism and micro-batching: a program's passes in the order of a schedule."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby

import numpy as np

from perfmodel.errors import LayoutError
from perfmodel.ir import (
    Function,
    GlobalTensor,
    Instruction,
    Parameter,
    Piece,
    Program,
    Stream,
    Tag,
    attributes,
)
from perfmodel.ir.distribute._passes import (
    batch_shardings,
    default_stages,
    for_micro_batch,
    n_layers,
    passes_of,
    places,
    summed_at_once,
)
from perfmodel.ir.distribute._versions import Versions
from perfmodel.ir.op_definition import REPLICATED, Sharded, Sharding
from perfmodel.schedule import Phase, Schedule, WeightPolicy, get_schedule, require_valid


def micro_batches(program: Program, count: int) -> Program:
    """Run `count` micro-batches on one device, each forward and backward, with one update."""
    name = "1f1b" if program.trains else "forward"
    return pipeline(program, get_schedule(name)(1, count, 1)) if count > 1 else program


def pipeline(
    program: Program,
    schedule: Schedule,
    *,
    stage_of_layer: Sequence[int] | None = None,
    send_stream: Stream = "compute",
    weights: WeightPolicy = "flush",
) -> Program:
    """Divide a one-device program into stages and micro-batches, in a schedule's order.

    Passes are told apart by the instructions' tags. Values that cross stages are sent once to every
    device that needs them, when the pass that makes them ends. Gradients and the loss are
    accumulated in the schedule's order; where a stage sits on several devices, they are summed over
    these.

    A schedule that updates weights before the step ends states where each stage is updated. An
    update uses the mean gradient of the micro-batches since the last update, and the policy chooses
    the version of the weights for each pass. Such a program returns no gradients; its loss is the
    mean over the versions of the weights.

    Args:
        program: tagged by phase and layer; for a schedule of slices cut by `sequence_slices` into
            as many.
        schedule: any schedule over the stages; its micro-batches divide the batch.
        stage_of_layer: global stage of each layer; by default layers are dealt out evenly.
        weights: policy of weight versions (PipeDream, 2BW, nF1B), for schedules that update on the
            way.
        send_stream: `compute`: a send holds up both devices (DistIR); `send`: it runs beside their
            passes.

    Raises:
        LayoutError: the program is distributed already, has too few layers, mixes samples of a
            batch, or, updating on the way, has a weight on several stages.
        PerfModelError: the schedule is not valid.
    """
    _check(program, schedule)
    # Stages follow the tags of layers, so a program whose layers are not tagged cannot be cut.
    layers = n_layers(program.function)
    stages = tuple(stage_of_layer or default_stages(layers, schedule.n_stages))
    if len(stages) != layers or set(stages) != set(range(schedule.n_stages)):
        raise LayoutError(
            f"stage_of_layer must give each of {layers} layers one of {schedule.n_stages} stages"
        )
    return _Pipeline(program, schedule, stages, send_stream, weights).run()


def _check(program: Program, schedule: Schedule) -> None:
    """Raise `LayoutError` unless the schedule can run the program."""
    require_valid(schedule)
    if program.n_devices > 1:
        raise LayoutError(
            "apply pipeline parallelism before other dimensions, to a program on one device"
        )
    slices = max((i.tag.micro_batch for i in program.function.instructions), default=0) + 1
    if max(slices, 1) != schedule.slices:
        raise LayoutError(
            f"schedule {schedule.name} has {schedule.slices} slices of a sequence, the program has "
            f"{max(slices, 1)}; apply sequence_slices first"
        )
    if program.trains and schedule.forward_only:
        raise LayoutError(
            f"schedule {schedule.name} has no backward passes, which this program needs"
        )


class _Pipeline:
    """State of the construction of a pipelined program.

    A value of the original program is known as (name, micro-batch of whole sequences); -1 stands
    for what all of these share. `_holders` has the new value that holds it on each device.
    """

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        stages: tuple[int, ...],
        stream: Stream,
        weights: WeightPolicy,
    ) -> None:
        self._program = program
        self._schedule = schedule
        self._weights = Versions(program, schedule, weights) if schedule.updates.any() else None
        self._stream: Stream = stream
        # A schedule counts slices of sequences as micro-batches; values are cut by whole sequences.
        self._count = schedule.micro_batches // schedule.slices
        self._sharding, self._function = batch_shardings(program, self._count)
        self._total_of, self._function = summed_at_once(self._function, self._sharding)
        self._passes = passes_of(self._function, stages)
        self._device_of = places(schedule)
        self._holders: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
        self._written: list[Instruction] = []
        self._parameters: list[Parameter] = []
        self._summed = set(self._total_of.values())

    def run(self) -> Program:
        """The pipelined program."""
        inputs = self._place_inputs()
        # Program order is the schedule's order of slots: on each device the passes come as the
        # schedule says, and instructions of different devices in one slot may run in parallel
        # (DistIR, section 2.1).
        order = np.lexsort((self._schedule.device, self._schedule.slot))
        for _, indices in groupby(order.tolist(), key=lambda i: int(self._schedule.slot[i])):
            # Passes of one slot run at once, so what they make is sent only when all are written.
            values: list[tuple[str, int]] = []
            for index in indices:
                values += self._updated_pass(index)
            for name, micro_batch in values:
                self._send(name, micro_batch)
        for instruction in () if self._weights else self._passes.update:
            self._update(instruction)

        # A schedule that updates on the way has used up its gradients.
        outputs: list[GlobalTensor] = []
        returned: dict[str, None] = {}
        for tensor in self._program.outputs:
            if self._weights and tensor.role == "gradient":
                continue
            pieces: list[Piece] = []
            for piece in tensor.pieces:
                pieces += self._returned(piece)
            outputs.append(replace(tensor, pieces=tuple(pieces)))
            returned |= dict.fromkeys(piece.value for piece in pieces)
        function = Function(
            self._function.name, tuple(self._parameters), tuple(self._written), tuple(returned)
        )
        return Program(function, inputs, tuple(outputs))

    def _place_inputs(self) -> tuple[GlobalTensor, ...]:
        """Copy every input to each device that uses it; data is divided into micro-batches."""
        # A weight used by two stages (tied embeddings) and a stage that two devices have
        # (bidirectional schedules) need copies.
        devices = self._input_devices()
        placed: dict[str, list[Piece]] = {}
        for parameter in self._function.parameters:
            name = parameter.name
            devices_of_input = devices[parameter.name] or {0: None}
            copies = {
                device: name if len(devices_of_input) == 1 else f"{name}.p{device}"
                for device in devices_of_input
            }
            placed[name] = []
            for device, copy in copies.items():
                placed[name] += self._placed(name, copy, device)
        inputs = []
        for tensor in self._program.inputs:
            pieces: list[Piece] = []
            for piece in tensor.pieces:
                pieces += [_moved_piece(new, piece.start) for new in placed[piece.value]]
            inputs.append(replace(tensor, pieces=tuple(pieces)))
        return tuple(inputs)

    def _placed(self, name: str, copy: str, device: int) -> list[Piece]:
        """A copy's parameters on a device: the value, or a part per micro-batch."""
        tensor = self._program.types[name].on(device)
        spread = self._sharding[name]
        # Only data are cut by micro-batch; weights, states and constants are shared by all.
        if not isinstance(spread, Sharded):
            self._parameters.append(Parameter(copy, tensor))
            self._holders[name, -1][device] = copy
            return [Piece(copy, (0,) * tensor.rank)]
        # A parameter per micro-batch: data arrive cut, as a data loader would give them.
        size = tensor.shape[spread.axis] // self._count
        pieces = [
            Piece(f"{copy}.m{k}", _start(tensor.rank, spread.axis, k * size))
            for k in range(self._count)
        ]
        for k, piece in enumerate(pieces):
            self._parameters.append(Parameter(piece.value, tensor.with_size(spread.axis, size)))
            self._holders[name, k][device] = piece.value
        return pieces

    def _input_devices(self) -> dict[str, dict[int, None]]:
        """Devices that use each parameter; states are where the weights are that they update."""
        devices: dict[str, dict[int, None]] = {p.name: {} for p in self._function.parameters}
        # Dictionaries of None are sets that keep their order, and with it the order of parameters
        # and sends.
        for (phase, stage, m), device in self._device_of.items():
            body = self._passes.body(phase, stage, m % self._schedule.slices)
            for name in chain.from_iterable(instruction.inputs for instruction in body):
                if name in devices:
                    devices[name][device] = None
        # An update runs where its weight is, and takes the weight's states along.
        for instruction in self._passes.update:
            # Inputs of an update that no pass uses (moments) have no device of their own yet.
            devices_of_update: dict[int, None] = {}
            for name in instruction.inputs:
                devices_of_update |= devices.get(name, {})
            for name in instruction.inputs:
                if name in devices:
                    devices[name] |= devices_of_update
        return devices

    def _updated_pass(self, index: int) -> list[tuple[str, int]]:
        """Write a pass, and the update of its device's weights if the schedule has one after it."""
        if self._weights is None:
            return self._pass(index)
        # Which version of the weights a pass reads was decided when it entered the pipeline.
        self._weights.enter(index, self._holders)
        values = self._pass(index)
        if self._schedule.updates[index]:
            device = int(self._schedule.device[index])
            self._written += self._weights.update(self._passes.update, device, self._holders)
        return values

    def _pass(self, index: int) -> list[tuple[str, int]]:
        """Write one pass; returns the values that it makes."""
        schedule = self._schedule
        phase = Phase(schedule.phase[index])
        first = int(schedule.micro_batch[index])
        stage = int(schedule.instruction_stage[index])
        device = int(schedule.device[index])
        values: list[tuple[str, int]] = []
        # A pass of a double (Chimera's forward doubling) covers several micro-batches at once.
        for m in range(first, first + int(schedule.span[index])):
            for instruction in self._passes.body(phase, stage, m % schedule.slices):
                values += self._write(instruction, m, device)
        return values

    def _write(self, instruction: Instruction, m: int, device: int) -> list[tuple[str, int]]:
        """Write an instruction for micro-batch m of the schedule."""
        k = m // self._schedule.slices
        inputs = tuple([self._fetch(name, k, device) for name in instruction.inputs])
        # Each micro-batch has values of its own; one micro-batch keeps the program's names.
        suffix = f".m{k}" if self._count > 1 else ""
        outputs = tuple([f"{name}{suffix}" for name in instruction.outputs])
        tag = Tag(instruction.tag.phase, instruction.tag.layer, m, instruction.tag.stream)
        values = for_micro_batch(instruction, self._sharding, k)
        # An instruction without operands needs an explicit device.
        if not instruction.inputs or (values and instruction.attribute("device") is not None):
            values = attributes(**dict(values) | {"device": device})
        self._written.append(Instruction(instruction.op, inputs, outputs, values, tag))
        for name, output in zip(instruction.outputs, outputs, strict=True):
            self._holders[name, k][device] = output
            if name in self._total_of:
                self._accumulate(self._total_of[name], output, device, tag)
        return [(name, k) for name in instruction.outputs]

    def _accumulate(self, name: str, output: str, device: int, tag: Tag) -> None:
        """Add a micro-batch's output to the running sum on its device."""
        # One running sum per device, extended as soon as a micro-batch's share is there: the share
        # is not kept alive.
        sofar = self._holders[name, -1].get(device)
        if sofar is not None:
            total = f"{name}.sum{tag.micro_batch}"
            self._written.append(Instruction("accumulate", (sofar, output), (total,), (), tag))
            output = total
        self._holders[name, -1][device] = output

    def _send(self, name: str, k: int) -> None:
        """Send a value to every device whose passes use it."""
        # Written right after the pass that makes the value, not before the one that uses it: on the
        # `send` stream the transfer then runs beside what the receiver does in between.
        for phase, stage, part in self._passes.users.get(name, ()):
            self._fetch(name, k, self._device_of[phase, stage, k * self._schedule.slices + part])

    def _fetch(self, name: str, k: int, device: int) -> str:
        """The value that holds `name` of micro-batch k on a device, sent there if necessary."""
        if self._weights is not None and name in self._weights:
            return self._weights.value(name, device)
        return self._value_on(
            name, k, self._holders.get((name, k)) or self._holders[name, -1], device
        )

    def _value_on(self, name: str, k: int, holders: dict[int, str], device: int) -> str:
        if device not in holders:
            # A second reader on the same device finds the copy of the first.
            value = next(iter(holders.values()))
            self._written.append(self._transfer(name, k, device, value))
            holders[device] = self._written[-1].outputs[0]
        return holders[device]

    def _transfer(self, name: str, k: int, device: int, value: str) -> Instruction:
        """The instruction that sends a value to another device in micro-batch k."""
        # A transfer belongs to the phase and layer of what it carries, which is how timelines
        # account for it. Inputs are made by no pass.
        tag = Tag("forward", -1, k, self._stream)
        maker = self._passes.maker.get(name)
        if maker is not None:
            phase, _, part = maker
            makers = [i for i in self._passes.body(*maker) if name in i.outputs]
            tag = Tag(
                phase="forward" if phase == Phase.FORWARD else "backward",
                layer=makers[0].tag.layer if makers else -1,
                micro_batch=k * self._schedule.slices + part,
                stream=self._stream,
            )
        return Instruction("send", (value,), (f"{value}.p{device}",), attributes(to=device), tag)

    def _total(self, name: str) -> dict[int, str]:
        """Return a value for updates: summed over devices if several hold partial sums."""
        # Values that are neither summed nor shared exist only with a single micro-batch.
        key = (name, -1) if name in self._summed or (name, -1) in self._holders else (name, 0)
        holders = self._holders[key]
        # A stage on several devices (of a bidirectional schedule) has a sum on each.
        if name in self._summed and len(holders) > 1:
            totals = tuple(f"{value}.total" for value in holders.values())
            tag = Tag("update", stream="data_comm")
            self._written.append(
                Instruction(
                    "all_reduce", tuple(holders.values()), totals, attributes(op="sum"), tag
                )
            )
            self._holders[name, -1] = dict(zip(holders, totals, strict=True))
        self._summed.discard(name)
        return self._holders[key]

    def _update(self, instruction: Instruction) -> None:
        """Run an update wherever the parameters that it updates are."""
        parameters = {p.name for p in self._function.parameters}
        holders = {name: self._total(name) for name in instruction.inputs}
        # Gradients of a replicated stage are all-reduced above, so every copy of the weight gets
        # the same update.
        anchors = [holder for name, holder in holders.items() if name in parameters]
        if not anchors:
            anchors = list(holders.values())[:1]
        devices = list(dict.fromkeys(chain.from_iterable(anchors)))
        for device in devices:
            inputs = tuple(
                self._value_on(name, -1, holders[name], device) for name in instruction.inputs
            )
            outputs = tuple(
                f"{n}.p{device}" if len(devices) > 1 else n for n in instruction.outputs
            )
            self._written.append(replace(instruction, inputs=inputs, outputs=outputs))
            for name, output in zip(instruction.outputs, outputs, strict=True):
                self._holders[name, -1][device] = output

    def _returned(self, piece: Piece) -> list[Piece]:
        """Pieces of a returned value: its replicas, or its slices by micro-batch."""
        spread: Sharding = self._sharding.get(piece.value, REPLICATED)
        if not isinstance(spread, Sharded):
            return [Piece(value, piece.start) for value in self._total(piece.value).values()]
        axis, count = spread.axis, self._count
        size = self._program.types[piece.value].shape[axis] // count
        # Slices of a returned value are pieces of one tensor, in the order of micro-batches.
        slices = []
        for k in range(count):
            offset = _start(len(piece.start), axis, k * size)
            slices += [
                _moved_piece(Piece(value, offset), piece.start)
                for value in self._holders[piece.value, k].values()
            ]
        return slices


def _start(rank: int, axis: int, offset: int) -> tuple[int, ...]:
    """First element of a part that is cut along one axis."""
    return tuple(offset if i == axis else 0 for i in range(rank))


def _moved_piece(piece: Piece, start: Sequence[int]) -> Piece:
    """A piece with its start moved by that of the enclosing piece."""
    return Piece(piece.value, tuple(a + b for a, b in zip(piece.start, start, strict=True)))
