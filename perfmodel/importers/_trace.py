"""Op tables of JAX functions, from their jaxprs or from what XLA compiles for one device of many."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from perfmodel.errors import PerfModelError
from perfmodel.importers._graph import rows_of
from perfmodel.importers._hlo_graph import region_of as region_of_module
from perfmodel.importers._hlo_text import parse_module
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


def read_sharded(program: Any, *args: Any, trip_count: int | None = None, name: str | None = None) -> OpTable:
    """Kernels of one device and every collective, with its groups, of a partitioned program.

    The mesh may be of fake devices: with `--xla_force_host_platform_device_count=256` in `XLA_FLAGS` a laptop
    compiles the step of 256 accelerators, and nothing runs. Where the CPU compiler widened 16-bit arithmetic to
    32 bits, what was narrow in the program is counted as narrow.

        step = jax.jit(train_step, in_shardings=..., out_shardings=...)
        pm.read_sharded(step, params, batch).predict("dgx-h100")

    Args:
        program: a jitted function (with `args` to lower it for), what `lower` or `compile` returned, or the text
            of the compiled module (or the path of a file with it).
        args: arrays or `jax.ShapeDtypeStruct`s (with shardings, unless the function states them).
        trip_count: iterations of loops whose count the compiler did not find; otherwise these are unmapped.
        name: of the table (default: the module's).

    Raises:
        PerfModelError: something else than such a program, text that is no HLO module, a dynamic dimension, or
            replica groups in an unknown notation.
    """
    text, memory_bytes = _module_text(program, args)
    module = parse_module(text)
    rows = rows_of(region_of_module(module, trip_count))
    return OpTable(
        name=name or module.name, kernels=rows.kernels, collectives=rows.collectives, unmapped=rows.unmapped,
        n_devices=module.n_devices, memory_bytes=memory_bytes,
    )  # fmt: skip


def _module_text(program: Any, args: tuple[Any, ...]) -> tuple[str, float | None]:
    if isinstance(program, Path):
        return program.read_text(), None
    if isinstance(program, str):
        return program, None
    lowered = program.lower(*args) if hasattr(program, "lower") else program
    compiled = lowered.compile() if hasattr(lowered, "compile") else lowered
    if not hasattr(compiled, "as_text"):
        raise PerfModelError(
            f"{type(program).__name__} is no sharded program; pass a jitted function, its lowered or compiled form, "
            "or the text of the compiled module"
        )
    memory = compiled.memory_analysis()
    if memory is None:
        return compiled.as_text(), None
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
    return compiled.as_text(), float(sum(sizes) - memory.alias_size_in_bytes)
