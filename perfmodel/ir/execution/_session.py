"""One rank of a real run: executes its program and records times.

Collectives are compiled for the group of devices that takes part in them. One process holds one
device; only the processes of a group call its collectives. On CPUs the data travels by gloo, on
GPUs by NCCL, as JAX is configured.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from perfmodel.ir import OPS, Instruction, Tensor
from perfmodel.ir.execution._kernels import compiled_kernel, jax_dtype
from perfmodel.ir.execution._reference import argument
from perfmodel.measure.ranks import RankSession
from perfmodel.timeline import double_precision

_AXIS: Final = "rank"
Local = Callable[[jax.Array | None], tuple[jax.Array, ...]]
"""Function for a collective on one rank: takes the rank's operand (None if it has none) and returns
its values, the result first."""


def _reduced(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> jax.Array:
    # Inside `shard_map` a collective names the mesh's axis, of which this group is the whole.
    reduce = lax.pmax if values.get("op", "sum") == "max" else lax.psum
    return reduce(x, _AXIS)


def _reduce_scatter(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> jax.Array:
    # gloo's own spins while it waits, which takes the core from ranks that share it
    if values.get("op", "sum") == "max" or jax.default_backend() == "cpu":
        return _slice(_reduced(x, values, group), values["axis"], len(group), lax.axis_index(_AXIS))
    return lax.psum_scatter(x, _AXIS, scatter_dimension=values["axis"], tiled=True)


def _all_to_all(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> jax.Array:
    return lax.all_to_all(x, _AXIS, values["split_axis"], values["concat_axis"], tiled=True)


def _all_gather(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> jax.Array:
    return lax.all_gather(x, _AXIS, axis=values["axis"], tiled=True)


def _send(
    x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Send and acknowledge, so that the sender also finishes when the message has arrived, not when
    the system has copied it: an instruction of several devices runs on all of them at once (DistIR,
    section 2.1)."""
    received = lax.ppermute(x, _AXIS, [(0, 1)])
    return received, lax.ppermute(received.ravel()[:1], _AXIS, [(1, 0)])


def _broadcast(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> jax.Array:
    """The first device of the group has the value, the others zeros."""
    return lax.psum(x, _AXIS)


def _scatter(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> jax.Array:
    """Give each receiver of a group its part of the operand."""
    # The others add zeros, so the sum brings the whole operand to everybody; each receiver keeps
    # its part.
    receivers = values["to"]
    # A rank that receives nothing takes the first part, which it does not use.
    places = [receivers.index(member) if member in receivers else 0 for member in group]
    part = jnp.array(places)[lax.axis_index(_AXIS)]
    return _slice(lax.psum(x, _AXIS), values["axis"], len(receivers), part)


def _slice(x: jax.Array, axis: int, parts: int, index: jax.Array) -> jax.Array:
    size = x.shape[axis] // parts
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


_BODIES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "send": _send,
        "broadcast": _broadcast,
        "all_reduce": _reduced,
        "reduce": _reduced,
        "all_gather": _all_gather,
        "gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "scatter": _scatter,
    }
)


@dataclass(frozen=True)
class RankCode:
    """The code of one rank: instructions with types, groups and arguments."""

    instructions: tuple[Instruction, ...]
    groups: tuple[tuple[int, ...], ...]
    """Devices that each instruction runs on."""
    types: Mapping[str, Tensor]
    """Type of every value that the instructions name, on all devices."""
    arguments: Mapping[str, np.ndarray]
    """This rank's parameters."""
    parameters: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    """Returned values that live on this rank."""
    all_groups: tuple[tuple[int, ...], ...]
    """Groups of devices that collectives of any rank run on, in an order that all ranks share."""
    double: bool


class _Step(NamedTuple):
    call: Callable[..., Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dead: tuple[str, ...]
    """Values that no later step needs."""


class ProgramSession(RankSession):
    """Runs a rank's code when the group asks for it."""

    def load(self, code: RankCode) -> None:
        """Place the arguments and prepare every instruction."""
        with double_precision() if code.double else nullcontext():
            self._arguments = {
                n: self.place(n, tensor, code.arguments) for n, tensor in code.parameters.items()
            }
            self._steps = self._prepared(code)
        self._outputs = code.outputs

    def run(self) -> tuple[list[float], list[float]]:
        """Execute once; return when each instruction was reached and finished, on this clock."""
        # Values die after their last use, so that memory in use is that of the program's live
        # analysis.
        values = dict(self._arguments)
        reached_s, done_s = [], []
        self._line_up()
        for step in self._steps:
            operands = [values[name] for name in step.inputs]
            reached_s.append(time.perf_counter())
            results = self.finished(step.call(*operands))
            done_s.append(time.perf_counter())
            # A sender has nothing to name, and acknowledgements have no name.
            values.update(zip(step.outputs, results, strict=False))
            for name in step.dead:
                del values[name]
        self._values = {name: values[name] for name in self._outputs}
        return reached_s, done_s

    def values(self) -> dict[str, np.ndarray]:
        """Values returned by the last run on this rank."""
        return {name: self.array(value) for name, value in self._values.items()}

    def clock_s(self) -> float:
        """This process's clock."""
        return time.perf_counter()

    def communicator(
        self, instruction: Instruction, group: tuple[int, ...], operand: Tensor
    ) -> Local:
        """Return the function that this rank calls to take part in a collective.

        Args:
            instruction: the collective.
            group: devices of the collective, in the order of its operands and results.
            operand: type of one.
        """
        # One process holds one device. Every member contributes a slice of one global array along
        # the group's axis; the mesh has the group's order, so slices are joined as the program
        # says.
        devices = jax.devices()
        mesh = Mesh(np.array([devices[member] for member in group]), (_AXIS,))
        sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
        body = partial(_BODIES[instruction.op], values=dict(instruction.attributes), group=group)
        mapped = jax.jit(
            jax.shard_map(
                lambda x: jax.tree.map(lambda y: y[None], body(x[0])),
                mesh=mesh,
                in_specs=PartitionSpec(_AXIS),
                out_specs=PartitionSpec(_AXIS),
                check_vma=False,
            )
        )
        shape = (len(group), *operand.shape)
        nothing = jnp.zeros(operand.shape, jax_dtype(operand))
        own_device = devices[self.rank]

        def call(operand: jax.Array | None) -> tuple[jax.Array, ...]:
            # A member without an operand (of a broadcast, say) takes part with zeros.
            operand = nothing if operand is None else operand
            local = jax.device_put(operand[None], own_device)
            results = mapped(jax.make_array_from_single_device_arrays(shape, sharding, [local]))
            return tuple(
                result.addressable_shards[0].data[0] for result in jax.tree.leaves(results)
            )

        return call

    def place(self, name: str, tensor: Tensor, arguments: Mapping[str, np.ndarray]) -> Any:
        """A parameter's value on this rank's device."""
        return argument(name, tensor, arguments)

    def kernel(
        self, instruction: Instruction, outputs: Sequence[Tensor]
    ) -> Callable[..., Sequence[Any]]:
        """Return the function that runs an instruction of this rank alone."""
        return compiled_kernel(instruction, outputs)

    def finished(self, results: Sequence[Any]) -> Sequence[Any]:
        """Wait for results."""
        return jax.block_until_ready(results)

    def array(self, value: Any) -> np.ndarray:
        """A value of the program for the caller."""
        return np.asarray(value)

    def _line_up(self) -> None:
        multihost_utils.sync_global_devices("start")

    def _prepared(self, code: RankCode) -> list[_Step]:
        """This rank's steps: what each calls, reads, writes, and which values end with it."""
        # Backwards, since a value is dead after the last instruction that reads it.
        needed = set(code.outputs)
        steps: list[_Step] = []
        for instruction, group in zip(
            reversed(code.instructions), reversed(code.groups), strict=True
        ):
            inputs = tuple(n for n in instruction.inputs if code.types[n].device == self.rank)
            outputs = tuple(n for n in instruction.outputs if code.types[n].device == self.rank)
            dead = tuple({n for n in (*inputs, *outputs) if n not in needed})
            needed.update(inputs)
            call = self._call(instruction, group, code)
            prepared_call = _in_double(call) if code.double else call
            steps.append(_Step(prepared_call, inputs, outputs, dead))
        return steps[::-1]

    def _call(
        self, instruction: Instruction, group: tuple[int, ...], code: RankCode
    ) -> Callable[..., Sequence[Any]]:
        """Return the call that executes an instruction on this rank."""
        # A collective of one device runs like a kernel.
        if not OPS[instruction.op].collective or len(group) == 1:
            return self.kernel(instruction, [code.types[n] for n in instruction.outputs])
        local = self.communicator(instruction, group, code.types[instruction.inputs[0]])

        def call(*operands: Any) -> Sequence[Any]:
            # A member of a broadcast that only receives has no operand.
            return local(*operands) if operands else local(None)

        return call


def _in_double(call: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
    """Run the call in 64 bits, without changing the precision of the user's process."""

    def in_double(*operands: Any) -> Sequence[Any]:
        with double_precision():
            return call(*operands)

    return in_double
