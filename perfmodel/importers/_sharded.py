"""Programs that are sharded already, from the module that the compiler partitioned."""

from pathlib import Path
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.importers._graph import rows_of
from perfmodel.importers._hlo_graph import region_of
from perfmodel.importers._hlo_text import parse_module
from perfmodel.importers._table import OpTable


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
    rows = rows_of(region_of(module, trip_count))
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
