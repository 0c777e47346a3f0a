"""Converts a program to a `Structure`: an op per instruction and device, a class per event.

Instructions of a stream of a device run one after another; an instruction of several devices starts
on all of them when the last is ready (DistIR, section 2.1). Instructions that do the same work on
groups placed alike are one event (DistSim, section 4.1), so that costs are few even where
instructions are millions.
"""

from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import numpy as np
from jaxtyping import Int

from perfmodel.errors import PerfModelError
from perfmodel.ir import OPS, STREAMS, Function, Instruction, Tensor, instruction_devices
from perfmodel.ops import Collective, Op
from perfmodel.program import N_STREAMS, Edges, Kind, Stream, Structure, binary_joins
from perfmodel.spec import Cluster

Event = tuple[Kind, tuple[Op, ...]]
"""Event of a class: its kind, and the kernels or collectives that run one after another."""

_STREAM: Final = {name: int(Stream[name.upper()]) for name in STREAMS}
_JOIN: Final = -1
_NOTHING: Final[Event] = (Kind.ZERO, ())


@dataclass(frozen=True, eq=False)
class ProgramStructure:
    """A structure, with the instruction of each of its ops and the event of each of its classes."""

    function: Function
    structure: Structure
    instruction: Int[np.ndarray, " ops"]
    """Number of the instruction that each op belongs to, -1 for joins."""
    events: tuple[Event, ...]
    """Events of each class of instructions."""


def program_structure(function: Function, cluster: Cluster | None = None) -> ProgramStructure:
    """The structure of a function, in time linear in its instructions.

    Args:
        function: typed, without calls.
        cluster: cluster whose nodes the devices fill in order of their numbers; None: one node
            holds all.

    Raises:
        PerfModelError: a function without instructions, or for more devices than the cluster has.
    """
    if not function.instructions:
        raise PerfModelError(f"@{function.name} has no instructions to run")
    if cluster is not None:
        cluster.require(function.n_devices, f"@{function.name}")
    # Arrays throughout: programs of a search have millions of instructions, and Python objects per
    # edge would dominate.
    nodes = _Nodes(function, cluster)
    source, destination = nodes.edges()
    edges = Edges(source, destination, np.zeros_like(source))
    # One more node stands for the end of the program.
    position, pred, _ = binary_joins(len(nodes.device) + 1, [edges])
    return nodes.assemble(position[:-1], pred)


class _Nodes:
    """One node per instruction and device, preceded by a join node if there are several devices."""

    def __init__(self, function: Function, cluster: Cluster | None) -> None:
        self._function = function
        instructions = function.instructions
        groups = instruction_devices(function)

        # Node numbers: an instruction of one device is one node; one of g devices is a meeting node
        # followed by g nodes, so that 2 g edges replace the g x g "everybody waits for everybody".
        n_devices = np.array([len(group) for group in groups], np.int64)
        has_meeting = n_devices > 1
        width = n_devices + has_meeting
        first = np.cumsum(width) - width
        n_nodes = int(width.sum())
        is_instruction = np.ones(n_nodes, bool)
        is_instruction[first[has_meeting]] = False

        # Columns that nodes take from their instructions; meetings run nowhere and take no time.
        events = _Events(function, cluster)
        numbers, streams = [], []
        for instruction, group in zip(instructions, groups, strict=True):
            numbers.append(events.number(instruction, group))
            streams.append(_STREAM[instruction.tag.stream])
        instruction_of_node = np.repeat(np.arange(len(instructions), dtype=np.int32), width)
        event_of_node = np.array(numbers, np.int32)[instruction_of_node]
        stream_of_node = np.array(streams, np.int32)[instruction_of_node]
        self.device = np.full(n_nodes, _JOIN, np.int32)
        self.device[is_instruction] = np.fromiter(
            chain.from_iterable(groups), np.int32, int(n_devices.sum())
        )
        self.instruction = np.where(is_instruction, instruction_of_node, _JOIN).astype(np.int32)
        self.event = np.where(is_instruction, event_of_node, 0)
        self.stream = np.where(
            is_instruction, self.device * N_STREAMS + stream_of_node, _JOIN
        ).astype(np.int32)

        # Predecessors of a node lead to the meeting of its devices.
        meets = has_meeting[instruction_of_node]
        self.entry = np.where(meets, first[instruction_of_node], np.arange(n_nodes))
        self._events = events
        self._groups = groups
        self._first = first

    def edges(self) -> tuple[Int[np.ndarray, " edges"], Int[np.ndarray, " edges"]]:
        """Edges from each node to those that wait for it, as node numbers; the last node is the end
        of the program."""
        entry = self.entry
        n = len(self.device)
        # A stable sort by stream keeps program order inside each stream, so neighbours are
        # consecutive work of one stream.
        order = np.argsort(self.stream, kind="stable")
        order = order[self.stream[order] >= 0]
        follows = self.stream[order[1:]] == self.stream[order[:-1]]
        last = order[np.append(~follows, True)]
        meeting = np.flatnonzero(entry != np.arange(n))
        makers, users = self._across_streams()
        # Four kinds of edges: next of a stream, from a meeting to its members, between streams by
        # data, and from every stream's last node to the end.
        sources = [order[:-1][follows], entry[meeting], makers, last]
        destinations = [entry[order[1:][follows]], meeting, entry[users], np.full(len(last), n)]
        return np.concatenate(sources), np.concatenate(destinations)

    def _across_streams(self) -> tuple[Int[np.ndarray, " edges"], Int[np.ndarray, " edges"]]:
        """Producer and user nodes of values used on a stream other than the one that makes them."""
        instructions = self._function.instructions
        # On a single stream program order implies data order.
        if len({i.tag.stream for i in instructions}) < 2:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        types = self._function.types
        maker: dict[str, int] = {}
        sources, users = [], []
        for index, (instruction, group) in enumerate(zip(instructions, self._groups, strict=True)):
            # The meeting of several devices stands before their own nodes.
            first_node = int(self._first[index]) + (len(group) > 1)
            node_on = {device: first_node + k for k, device in enumerate(group)}
            for name in instruction.inputs:
                user = node_on[types[name].device]
                if name in maker and self.stream[maker[name]] != self.stream[user]:
                    sources.append(maker[name])
                    users.append(user)
            for name in instruction.outputs:
                maker[name] = node_on[types[name].device]
        return np.array(sources, np.int64), np.array(users, np.int64)

    def assemble(
        self, position: Int[np.ndarray, " nodes"], pred: Int[np.ndarray, "ops 2"]
    ) -> ProgramStructure:
        """All ops with joins as a structure, from the nodes' positions and all predecessors."""

        def spread(column: Int[np.ndarray, " nodes"], join: int) -> Int[np.ndarray, " ops"]:
            out = np.full(len(pred), join, np.int32)
            out[position] = column
            return out

        batches = np.array([i.tag.micro_batch for i in self._function.instructions], np.int32)
        events = tuple(self._events.numbers)
        structure = Structure(
            duration=spread(self.event, 0),
            pred=pred,
            lag=np.zeros_like(pred),
            stream=spread(self.stream, _JOIN),
            micro_batch=spread(
                np.where(self.instruction < 0, _JOIN, batches[self.instruction]), _JOIN
            ),
            class_kind=np.array([kind for kind, _ in events], np.int32),
            class_stage=np.zeros(len(events), np.int32),
            class_segment=np.zeros(len(events), np.int32),
            alloc=np.zeros(len(pred), np.int32),
            free=np.zeros(len(pred), np.int32),
            devices=self._function.n_devices,
        )
        return ProgramStructure(self._function, structure, spread(self.instruction, _JOIN), events)


class _Events:
    """Numbers the distinct events of a program; number 0 takes no time."""

    def __init__(self, function: Function, cluster: Cluster | None) -> None:
        self.numbers: dict[Event, int] = {_NOTHING: 0}
        """Class of each event, in the order of first occurrence."""
        self._types, self._cluster = function.types, cluster
        # Ranks that are not written down are there nevertheless.
        # How far a group reaches over nodes depends on how many devices there are in all.
        replicas = {i.attribute("replicas") for i in function.instructions} - {None}
        # Each dimension adds (n - 1) * stride to the highest device number.
        self._n_devices = function.n_devices + sum((n - 1) * stride for n, stride in replicas)
        self._known: dict[tuple[object, ...], int] = {}

    def number(self, instruction: Instruction, group: tuple[int, ...]) -> int:
        """Class of an instruction on a group of devices."""
        inputs = [self._types[name] for name in instruction.inputs]
        outputs = [self._types[name] for name in instruction.outputs]
        # A kernel takes as long on any device; a collective's time depends on where its group lies.
        members = group if len(group) > 1 or instruction.attribute("replicas") else ()
        key = (
            instruction.op,
            instruction.attributes,
            instruction.tag.phase,
            instruction.tag.stream,
            members,
            tuple([(tensor.dtype, tensor.shape) for tensor in inputs]),
            tuple([(tensor.dtype, tensor.shape) for tensor in outputs]),
        )
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = self._new(instruction, group, tuple(inputs), tuple(outputs))
        return number

    def _new(
        self,
        instruction: Instruction,
        group: tuple[int, ...],
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
    ) -> int:
        """Return the class of a new instruction; different instructions may share one."""
        # The devices that the written one stands for: its group as it would be written out.
        n, stride = instruction.attribute("replicas", (1, 1))
        group = group if n == 1 else tuple(range(group[0], group[0] + n * stride, stride))
        work = OPS[instruction.op].work(inputs, outputs, dict(instruction.attributes))
        ops = tuple(placed(op, group, self._cluster, self._n_devices) for op in work)
        event_class = (_kind(instruction), ops) if ops else _NOTHING
        return self.numbers.setdefault(event_class, len(self.numbers))


def placed(op: Op, group: tuple[int, ...], cluster: Cluster | None, n_devices: int) -> Op:
    """A collective with the nodes and network level of its group; kernels stay as they are."""
    if not isinstance(op, Collective) or cluster is None:
        return op
    return replace(op, **cluster.reach(group, n_devices)._asdict())


_REDUCTIONS: Final = ("all_reduce", "reduce_scatter", "reduce")


def _kind(instruction: Instruction) -> Kind:
    """Kind of an instruction's events; collectives off the compute stream are data-parallel."""
    op, tag = instruction.op, instruction.tag
    backward = tag.phase == "backward"
    # Tensor-parallel collectives stay on the compute stream, as parts of the passes that wait for
    # them.
    if op == "send":
        return Kind.SEND_BACKWARD if backward else Kind.SEND_FORWARD
    if OPS[op].collective and tag.stream == "data_comm":
        if op in _REDUCTIONS:
            return Kind.GRAD_REDUCE
        return Kind.PARAM_GATHER_BACKWARD if backward else Kind.PARAM_GATHER
    if tag.phase == "update":
        return Kind.OPTIMIZER
    return Kind.BACKWARD if backward else Kind.FORWARD
