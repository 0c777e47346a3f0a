"""The distinct events of programs on ranks (kernels and transfers), and sessions that time them.

Equal instructions on any rank are one event (DistSim, section 4.1). A collective's event is known
by what its ranks send, so that one measured between two ranks tells of the same collective between
more (`_CARRIED_BY`).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.display import shorten_reprs
from perfmodel.ir import (
    INTEGER_DTYPES,
    ITEM_BYTES,
    OPS,
    Function,
    Instruction,
    Tensor,
    instruction_devices,
)
from perfmodel.ir.execution._reference import is_double
from perfmodel.ir.execution._session import ProgramSession, RankCode
from perfmodel.spec import Cluster


@dataclass(frozen=True)
class Kernel:
    """Work of one rank."""

    instruction: Instruction
    """The instruction, with its values named by position."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Transfer:
    """A collective between ranks."""

    kind: str
    """Kind of the library's call that carries it out: `send`, `all_reduce`, `all_gather`,
    `all_to_all`."""
    bytes: float
    """Size of one rank's operand."""
    dtype: str
    ranks: int
    across_hosts: bool
    concurrent: int = 1
    """Groups that share each host's link at the same time."""


RankEvent = Kernel | Transfer

_CARRIED_BY: Final = dict.fromkeys(
    ("broadcast", "reduce", "reduce_scatter", "scatter"), "all_reduce"
) | {"gather": "all_gather"}
"""Collective with which ranks on CPUs carry out each of the others."""


def rank_events(function: Function, cluster: Cluster) -> list[RankEvent]:
    """Event of each instruction, on a cluster whose nodes the devices fill in order."""
    groups = instruction_devices(function)
    return [
        _event(instruction, group, function, cluster)
        for instruction, group in zip(function.instructions, groups, strict=True)
    ]


def _event(
    instruction: Instruction, group: tuple[int, ...], function: Function, cluster: Cluster
) -> RankEvent:
    """The kernel or transfer that an instruction costs a rank."""
    types = function.types
    # known contents do not change how long a kernel takes
    inputs = tuple(replace(types[name], device=0, value=None) for name in instruction.inputs)
    # Ranks of one node and of several differ in reach, and groups beside it share each host's link.
    if OPS[instruction.op].collective and len(group) > 1:
        operand = inputs[0]
        place = cluster.reach(group, function.n_devices)
        across_hosts = place.ranks_per_node < len(group)
        kind = _CARRIED_BY.get(instruction.op, instruction.op)
        return Transfer(
            kind, operand.n_bytes, operand.dtype, len(group), across_hosts, place.concurrent
        )
    outputs = tuple(replace(types[name], device=0, value=None) for name in instruction.outputs)
    # Values are named by position, so that equal kernels of different layers compare equal.
    input_names = tuple(f"x{i}" for i in range(len(inputs)))
    output_names = tuple(f"y{i}" for i in range(len(outputs)))
    return Kernel(
        Instruction(instruction.op, input_names, output_names, instruction.attributes),
        inputs,
        outputs,
    )


class CallTime(NamedTuple):
    """Seconds that one call took."""

    wall_s: float
    work_s: float
    """Processor time of this process, with the threads of the library that copy and add up
    messages."""


class EventSession(ProgramSession):
    """Times loaded kernels or a transfer, called as a program's instructions are called."""

    def load_kernels(self, kernels: Sequence[Kernel]) -> None:
        """Prepare kernels on every rank."""
        self._calls = [self._prepared_call(*_kernel(kernel, self.rank)) for kernel in kernels]
        # The first round compiles and warms up.
        self.time_round()

    def load_transfer(self, transfer: Transfer, calls: int) -> None:
        """Prepare a sequence of equal transfers between all ranks."""
        self._calls = [self._prepared_call(*_transfer(transfer))] * calls
        self.time_round()

    def time_round(self) -> list[float]:
        """Call everything loaded once, in sequence; returns the seconds of each."""
        # Ranks start together, as a rank that waits for another would have that wait in its time.
        self._line_up()
        wall_s = []
        for call in self._calls:
            start_s = time.perf_counter()
            self.finished(call())
            wall_s.append(time.perf_counter() - start_s)
        return wall_s

    def time_work_round(self) -> list[CallTime]:
        """Call everything loaded once, in sequence; return wall and processor time of each."""
        self._line_up()
        call_times = []
        for call in self._calls:
            start_s = time.perf_counter()
            start_work_s = time.process_time()
            self.finished(call())
            wall_s = time.perf_counter() - start_s
            call_times.append(CallTime(wall_s, time.process_time() - start_work_s))
        return call_times

    def _prepared_call(
        self, instruction: Instruction, group: tuple[int, ...], types: dict[str, Tensor]
    ) -> Callable[[], Any]:
        """Load a program of one instruction, and return the call that executes it."""
        # A one-instruction program goes the same way as a whole one, so its call carries the same
        # overhead.
        local_types = {n: types[n] for n in instruction.inputs if types[n].device == self.rank}
        arguments = {name: _some_values(tensor) for name, tensor in local_types.items()}
        groups = (group,) if len(group) > 1 else ()
        self.load(
            RankCode(
                instructions=(instruction,),
                groups=(group,),
                types=types,
                arguments=arguments,
                parameters=local_types,
                outputs=(),
                all_groups=groups,
                double=is_double(types.values()),
            )
        )
        (step,) = self._steps
        return partial(step.call, *(self._arguments[name] for name in step.inputs))


Called = tuple[Instruction, tuple[int, ...], dict[str, Tensor]]
"""An instruction, the devices that it runs on, and the types of its values."""


def _kernel(event: Kernel, rank: int) -> Called:
    """Return what a kernel event calls: its instruction, its rank alone, and types by name."""
    instruction = event.instruction
    names = (*instruction.inputs, *instruction.outputs)
    tensors = (*event.inputs, *event.outputs)
    return (
        instruction,
        (rank,),
        {name: tensor.on(rank) for name, tensor in zip(names, tensors, strict=True)},
    )


def _transfer(event: Transfer) -> Called:
    """The call of a transfer between its ranks, with a one-dimensional operand."""
    ranks = event.ranks
    # A multiple of the ranks, so that an all-to-all can cut it.
    elements = max(1, round(event.bytes / ITEM_BYTES[event.dtype] / ranks)) * ranks
    received = elements * ranks if event.kind == "all_gather" else elements
    one_way = event.kind == "send"
    senders = range(1) if one_way else range(ranks)
    receivers = range(1, ranks) if one_way else range(ranks)
    inputs = {f"x{rank}": Tensor(event.dtype, (elements,), rank) for rank in senders}
    outputs = {f"y{rank}": Tensor(event.dtype, (received,), rank) for rank in receivers}
    instruction = Instruction(event.kind, tuple(inputs), tuple(outputs), _ATTRIBUTES[event.kind])
    return instruction, tuple(range(ranks)), inputs | outputs


_ATTRIBUTES: Final = {
    "send": (("to", 1),),
    "all_to_all": (("concat_axis", 0), ("split_axis", 0)),
    "all_gather": (("axis", 0),),
    "all_reduce": (),
}


def _some_values(tensor: Tensor) -> np.ndarray:
    """Ordinary positive numbers, or indices that are valid everywhere."""
    # Positive, because kernels take roots and logarithms; denormals and NaN would change their
    # speed.
    if tensor.dtype in INTEGER_DTYPES:
        return np.zeros(tensor.shape, np.int32)
    return np.random.default_rng(0).uniform(0.5, 1.0, tensor.shape)


shorten_reprs(__name__)
