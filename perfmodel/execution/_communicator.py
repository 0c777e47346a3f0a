"""Collectives between processes: each compiled for the group of devices that takes part in it.

One process holds one device; only the processes of a group call its collectives. On CPUs the data travels
by gloo, on GPUs by NCCL, as JAX is configured.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from perfmodel.execution._kernels import jax_dtype
from perfmodel.program.ir import Instruction, Tensor

_AXIS: Final = "rank"
Local = Callable[[jax.Array | None], tuple[jax.Array, ...]]
"""From a rank's operand (None where it has none) to what the collective leaves on it: its result comes first."""


def communicator(instruction: Instruction, group: tuple[int, ...], whole_input: Tensor, rank: int) -> Local:
    """What rank `rank` calls to take part in a collective.

    Args:
        instruction: the collective.
        group: its devices, in the order of its operands and results.
        whole_input: type of an operand.
        rank: this process's device.
    """
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
    shape = (len(group), *whole_input.shape)
    nothing = jnp.zeros(whole_input.shape, jax_dtype(whole_input))
    here = devices[rank]

    def call(operand: jax.Array | None) -> tuple[jax.Array, ...]:
        local = jax.device_put((nothing if operand is None else operand)[None], here)
        results = mapped(jax.make_array_from_single_device_arrays(shape, sharding, [local]))
        return tuple(result.addressable_shards[0].data[0] for result in jax.tree.leaves(results))

    return call


def _reduced(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> jax.Array:
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


def _send(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """With an acknowledgement, so that the sender too is done when the message has arrived, not when the system has
    taken a copy of it: an instruction of several devices runs on all of them at once (DistIR, section 2.1)."""
    received = lax.ppermute(x, _AXIS, [(0, 1)])
    return received, lax.ppermute(received.ravel()[:1], _AXIS, [(1, 0)])


def _broadcast(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> jax.Array:
    """The first device of the group has the value, the others zeros."""
    return lax.psum(x, _AXIS)


def _scatter(x: jax.Array, values: Mapping[str, Any], group: tuple[int, ...]) -> jax.Array:
    to = values["to"]
    mine = jnp.array([to.index(member) if member in to else 0 for member in group])[lax.axis_index(_AXIS)]
    return _slice(lax.psum(x, _AXIS), values["axis"], len(to), mine)


def _slice(x: jax.Array, axis: int, parts: int, index: jax.Array) -> jax.Array:
    size = x.shape[axis] // parts
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


_BODIES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType({
    "send": _send,
    "broadcast": _broadcast,
    "all_reduce": _reduced,
    "reduce": _reduced,
    "all_gather": _all_gather,
    "gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "scatter": _scatter,
})  # fmt: skip
