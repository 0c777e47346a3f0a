"""The distinct events of programs as ranks run them: kernels, and collectives between processes.

Equal instructions on any rank are one event (DistSim, section 4.1). A collective's event is known by what its ranks
send, so that one measured between two ranks tells of the same collective between more (`_wire`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from perfmodel.program.ir import OPS, Function, Instruction, Tensor, instruction_devices
from perfmodel.spec import Cluster


@dataclass(frozen=True)
class Kernel:
    """Work of one rank."""

    instruction: Instruction
    """With the values named by position."""
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Transfer:
    """A collective between ranks."""

    kind: str
    """Of the library's call that carries it out: `send`, `all_reduce`, `all_gather`, `all_to_all`."""
    bytes: float
    """Of one rank's operand."""
    dtype: str
    ranks: int
    across_hosts: bool
    concurrent: int = 1
    """Groups that share each host's link at the same time."""


RankEvent = Kernel | Transfer

_CARRIED_BY: Final = dict.fromkeys(("broadcast", "reduce", "reduce_scatter", "scatter"), "all_reduce") | {
    "gather": "all_gather"
}
"""How ranks on CPUs carry out the other collectives."""


def rank_events(function: Function, cluster: Cluster) -> list[RankEvent]:
    """Event of each instruction, on a cluster whose nodes the devices fill in order."""
    groups = instruction_devices(function)
    return [
        _event(instruction, group, function, cluster)
        for instruction, group in zip(function.instructions, groups, strict=True)
    ]


def _event(instruction: Instruction, group: tuple[int, ...], function: Function, cluster: Cluster) -> RankEvent:
    types = function.types
    # known contents do not change how long a kernel takes
    inputs = tuple(replace(types[name], device=0, value=None) for name in instruction.inputs)
    if OPS[instruction.op].collective and len(group) > 1:
        return _transfer(instruction, group, inputs, function.n_devices, cluster)
    outputs = tuple(replace(types[name], device=0, value=None) for name in instruction.outputs)
    named = tuple(f"x{i}" for i in range(len(inputs))), tuple(f"y{i}" for i in range(len(outputs)))
    return Kernel(Instruction(instruction.op, *named, instruction.attributes), inputs, outputs)


def _transfer(
    instruction: Instruction, group: tuple[int, ...], inputs: Sequence[Tensor], n_devices: int, cluster: Cluster
) -> Transfer:
    operand = inputs[0]
    kind = _CARRIED_BY.get(instruction.op, instruction.op)
    place = cluster.reach(group, n_devices)
    across_hosts = place.ranks_per_node < len(group)
    return Transfer(kind, operand.n_bytes, operand.dtype, len(group), across_hosts, place.concurrent)
