"""Kernels timed on the local JAX device."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from perfmodel.measure._harness import Sample, SampleCalls, StoppingRule, Timing, time_calls
from perfmodel.measure._machine import software_label
from perfmodel.measure._meter import Meter, NoMeter, host_meter
from perfmodel.measure._programs import Program, program
from perfmodel.measure._rows import SOURCE, Row, op_columns, timing_columns
from perfmodel.spec import Attention, KernelOp

if TYPE_CHECKING:
    import pandas as pd


def measure_ops(
    ops: Iterable[KernelOp],
    device_name: str,
    *,
    rule: StoppingRule | None = None,
    progress: Callable[[int, KernelOp], None] | None = None,
) -> "pd.DataFrame":
    """Time ops on the default JAX device, one after the other.

    A time is that of one call of the jitted op with its inputs in memory (warm caches where they
    fit) and the output allocated anew, dispatch included; calls wait for one another on a CPU and
    are queued on an accelerator.

    Args:
        device_name: what the `device` column says; a catalog name, for tables that are to be fitted.
        progress: called with the index and the op before each measurement.

    Returns:
        One row per op with the columns of a measurement table (times in microseconds).

    Raises:
        PerfModelError: for an op without a JAX program.
    """
    import pandas as pd

    rule = rule or StoppingRule()
    meter = device_meter()
    rows = []
    for index, op in enumerate(ops):
        if progress is not None:
            progress(index, op)
        rows.append(kernel_row(op, device_name, rule, meter))
    return pd.DataFrame(rows)


def kernel_row(op: KernelOp, device_name: str, rule: StoppingRule, meter: Meter) -> Row:
    """Measure one op: its row of the table."""
    timing = time_program(program(op), rule, meter)
    variant = "unfused" if isinstance(op, Attention) else ""
    return {
        "source": SOURCE,
        "device": device_name,
        **op_columns(op),
        **timing_columns(timing, rule, variant),
        "software": software_label(),
    }


def time_program(timed: Program, rule: StoppingRule, meter: Meter) -> Timing:
    """Median time of one call of a program."""
    import jax

    on_cpu = jax.default_backend() == "cpu"
    return time_calls(_sampler(timed, meter, jax.block_until_ready, every_call=on_cpu), rule.resolved_by(meter))


def device_meter() -> Meter:
    """Interference as seen by the default JAX device: a CPU shares its cores, an accelerator is ours alone."""
    import jax

    return host_meter() if jax.default_backend() == "cpu" else NoMeter()


def call_overhead_s(rule: StoppingRule, meter: Meter) -> float:
    """Time of a jitted call that does nothing, which every measured time contains on a CPU."""
    import jax
    import jax.numpy as jnp

    return time_program(Program(jax.jit(lambda x: x + 1), (jnp.zeros(()),)), rule, meter).median_s


def _sampler(timed: Program, meter: Meter, wait: Callable[[Any], Any], *, every_call: bool) -> SampleCalls:
    """Calls run one by one: a CPU would otherwise run independent calls at the same time."""
    arguments: Sequence[Any] = timed.arguments

    def sample(calls: int) -> Sample:
        nonlocal arguments
        output: Any = None
        before = meter.read()
        for _ in range(calls):
            output = timed.function(*arguments)
            if every_call:
                wait(output)
            if timed.carried:
                arguments = (*output[: timed.carried], *arguments[timed.carried :])
        wait(output)
        after = meter.read()
        return Sample(calls, after.wall_s - before.wall_s, meter.interference(before, after))

    return sample
