"""Any JAX function as an op table, from its jaxpr."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from perfmodel.errors import PerfModelError
from perfmodel.importers._graph import rows_of
from perfmodel.importers._jaxpr import region_of
from perfmodel.importers._table import OpTable


def trace(fn: Callable[..., Any], *args: Any, trip_count: int | None = None, name: str | None = None) -> OpTable:
    """Kernels, FLOPs and bytes of a JAX function; nothing is computed.

    `jit`, `checkpoint`, custom derivatives and `shard_map` are looked into, `scan` counts its body as often as it
    runs. Where an array is spread over a mesh by `jit` alone, the whole of it is counted; `read_sharded` reads
    what one device does.

        step = jax.value_and_grad(loss)
        pm.trace(step, params, jax.ShapeDtypeStruct((8, 1024), "int32")).predict("h100-sxm")

    Args:
        args: arrays, `jax.ShapeDtypeStruct`s, or trees of them.
        trip_count: iterations of `while` loops, which state none; otherwise these are unmapped.
        name: of the table (default: the function's).

    Raises:
        PerfModelError: a dimension that is not a number.
    """
    closed = jax.make_jaxpr(fn)(*args)
    for var in closed.jaxpr.invars:
        shape = getattr(var.aval, "shape", ())
        if not all(isinstance(n, int) for n in shape):
            raise PerfModelError(f"argument of shape {shape} is of unknown size; give every dimension as a number")
    return table_of(closed, trip_count, name or getattr(fn, "__name__", type(fn).__name__))


def table_of(closed: ClosedJaxpr, trip_count: int | None, name: str) -> OpTable:
    """Op table of a jaxpr."""
    rows = rows_of(region_of(closed, trip_count))
    ranks = max((rank for row in rows.collectives for group in row.groups for rank in group), default=0)
    return OpTable(
        name=name, kernels=rows.kernels, collectives=rows.collectives, unmapped=rows.unmapped, n_devices=ranks + 1
    )
