"""The step time of a layout as a pure JAX function.

Its memory (`_memory.py`) is a function of the same parameters.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.prediction._check import check_layout
from perfmodel.prediction._compose import LayoutBatch, layout_batches
from perfmodel.prediction._predict import layout_of
from perfmodel.prediction._problem import StepProblem, step_problem_of
from perfmodel.prediction._step_costs import step_factors
from perfmodel.prediction.differentiable._composed import composed
from perfmodel.prediction.differentiable._memory import Memory, memory_bytes
from perfmodel.prediction.differentiable._prices import (
    Bounds,
    StepParameters,
    machine_rates,
    relative_rates,
)
from perfmodel.prediction.differentiable._program import Programs, Tables, Times
from perfmodel.prediction.sites import Site
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem
from perfmodel.spec.keywords import JobKeywords
from perfmodel.timeline import being_traced, keep_long_compilations

FACTOR: Final = 4.0
"""Rates, latencies, host times and corrections may move by this factor either way."""
_BELOW_LAYERS: Final = 1e-3
"""Distance below a whole number of layers at which the slope from below is taken."""
QUICK_COMPILE: Final = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Compiler options of `StepTimeFunction.value_and_grad`: XLA then takes a quarter of the time to
compile for the CPU and a call five times as long, so that both together take less up to about a
thousand calls (`benchmarks`)."""
_OTHER_TYPE: Final = {"bf16": "fp8", "fp16": "fp8", "fp8": "bf16"}
"""Element type that products may have instead."""


def between_sizes(
    of_sizes: Float[Array, " sizes"],
    micro_batch: Float[Array, ""],
    log_sizes: Float[Array, " sizes"],
) -> Float[Array, ""]:
    """Interpolate between whole micro-batches, by the polynomial in the logarithm of their size
    (Lagrange's form).

    Args:
        of_sizes: values at the sizes.
        micro_batch: size at which the value is wanted.
        log_sizes: logarithms of the sizes.
    """
    log_size = jnp.log(micro_batch)
    n = log_sizes.shape[0]
    weights = []
    for i in range(n):
        other_sizes = log_sizes[np.delete(np.arange(n), i)]
        weights.append(((log_size - other_sizes) / (log_sizes[i] - other_sizes)).prod())
    return jnp.stack(weights) @ of_sizes


def _step_s(programs: Programs, tables: Any, x: StepParameters) -> Float[Array, ""]:
    """Seconds of a step at some values of its parameters."""
    program_tables, nominal, log_sizes = tables
    rates = jnp.log(relative_rates(x, nominal))
    # Collectives have no factor: their family is the one behind all others.
    factors = jnp.stack([*x.kernel_factor.values(), jnp.ones_like(rates[0])])
    times = programs.times(program_tables, x, rates, factors)
    durations = programs.durations(program_tables, x, times)
    return between_sizes(programs.step_s(durations), jnp.asarray(x.micro_batch), log_sizes)


_compiled_step_s = jax.jit(_step_s, static_argnums=0)
_step_and_grad = jax.value_and_grad(_step_s, argnums=2)
_compiled_step_and_grad = jax.jit(_step_and_grad, static_argnums=0)
_quickly_compiled_step_and_grad = jax.jit(
    _step_and_grad, static_argnums=0, compiler_options=QUICK_COMPILE
)


class LayerSlopes(NamedTuple):
    """Derivatives of the step time with respect to the layers of each stage, in seconds per
    layer."""

    below: Float[Array, " stages"]
    """Slope towards fewer layers: the time of the stage's last layer."""
    above: Float[Array, " stages"]
    """Slope towards more layers: the time that another layer would add. `jax.grad` returns these
    slopes."""


@dataclass(frozen=True, eq=False)
class StepTimeFunction:
    """Step time of a layout as a pure function of `StepParameters`, differentiable by JAX to any
    order.

    At `nominal` it is `predict(...).step_time_s`: to 1e-12 of it in double precision
    (`jax.enable_x64`), to 1e-5 in JAX's usual single one. So it is at whole layers that add up to
    the model's, at shares of recompute that are whole layers, at whole micro-batches between the
    bounds, and with `fp8` 0 or 1; in between these are interpolated. Derivatives with respect to
    rates, latencies and host times are those of `predict`; far from `nominal` kernels and
    collectives follow the laws of `perfmodel.prediction.differentiable._prices`.

    Derivatives with respect to `layers` at whole numbers, and of memory with respect to
    `micro_batch` at a whole size, are one-sided: those from above, towards the next layer or size.
    Where the layers of a network differ, those from below are others (`layer_slopes` gives both).

    Layouts whose programs are alike share one compilation. `memory_bytes` is a function of the same
    parameters.
    """

    nominal: StepParameters
    """Present values of all parameters: float64 arrays with the shapes in `StepParameters`."""
    bounds: Bounds
    layout: Layout
    usable_bytes: float
    """Bytes that a device may hold for the layout to fit: the limit of `memory_bytes`."""
    programs: Programs = field(repr=False)
    """The compiled part of the function; a relaxation also traces its durations."""
    tables: Tables = field(repr=False)
    times: Times = field(repr=False)
    """Times on the machine as it is."""
    input_s: float
    """Least time of a step until its samples have arrived (`Job.input_samples_per_s`)."""
    generation_s: float
    """Time of a step in which its devices generate the samples (`Job.generation_s`)."""
    log_sizes: Float[np.ndarray, " sizes"] = field(repr=False)
    """Logarithms of the programs' micro-batch sizes."""
    memory: Memory = field(repr=False)
    """Memory model that `memory_bytes` evaluates."""

    def __call__(self, parameters: StepParameters) -> Float[Array, ""]:
        """Seconds of the step."""
        computed_s = _compiled_step_s(self.programs, self._data, parameters)
        trained_s = jnp.maximum(computed_s, self.input_s) if self.input_s else computed_s
        return trained_s + self.generation_s if self.generation_s else trained_s

    @property
    def _data(self) -> tuple[Tables, StepParameters, Float[np.ndarray, " sizes"]]:
        """The data of the programs, which do not enter the compilation."""
        return self.tables, self.nominal, self.log_sizes

    def value_and_grad(self, parameters: StepParameters) -> tuple[Float[Array, ""], StepParameters]:
        """Return the step time in seconds and its gradient with respect to all parameters.

        This returns what `jax.value_and_grad` of this function returns. It compiles several times
        faster, but each call is slower: for more than about a thousand calls, use
        `jax.jit(jax.value_and_grad(...))` instead. Inside a function that JAX traces, both are the
        same.
        """
        # JAX takes no compiler options for a function that is traced inside another.
        if being_traced(parameters):
            return jax.value_and_grad(self)(parameters)
        try:
            computed_s, gradient = _quickly_compiled_step_and_grad(
                self.programs, self._data, parameters
            )
        except jax.errors.JaxRuntimeError:
            # A version of JAX whose compiler no longer has these options.
            computed_s, gradient = _compiled_step_and_grad(self.programs, self._data, parameters)
        if computed_s >= self.input_s:
            return computed_s + self.generation_s, gradient
        # The step waits for its samples, whatever the parameters are.
        waiting_s = jnp.full_like(computed_s, self.input_s + self.generation_s)
        return waiting_s, jax.tree.map(jnp.zeros_like, gradient)

    def layer_slopes(self, parameters: StepParameters) -> LayerSlopes:
        """Both one-sided derivatives with respect to the layers of each stage."""
        slope = jax.grad(lambda layers: self(parameters._replace(layers=layers)))
        layers = jnp.asarray(parameters.layers)
        # So little below that no other knot is passed, and far more than rounding.
        fewer = layers - _BELOW_LAYERS * jnp.eye(len(layers), dtype=layers.dtype)
        return LayerSlopes(jnp.diagonal(jax.vmap(slope)(fewer)), slope(layers))

    def memory_bytes(self, parameters: StepParameters) -> Float[Array, " ranks"]:
        """Bytes that every pipeline rank needs at its peak.

        The greatest is `predict(...).memory_needed_bytes`, wherever the step time is `predict`'s;
        layers, micro-batch, recompute, offload and `fp8` move it. It jumps where a stage gets its
        first layer, or its first one that recomputes all: the largest block while it runs counts
        whole.
        """
        return memory_bytes(self.memory, parameters)


def step_time_function(
    model: Problem | Model | str,
    cluster: Cluster | str | None = None,
    layout: catalog.StatedLayout = "",
    *,
    calibration: Path | str | None = None,
    site: Site | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
    **of_job: Unpack[JobKeywords],
) -> StepTimeFunction:
    """Make the step time of a layout a function that JAX can differentiate, vectorise and compile.

        step = ("gpt3-175b", "dgx-a100", "tp=8,pp=16,dp=8")
        step_time = step_time_function(*step, global_batch=1536)
        seconds, gradient = step_time.value_and_grad(step_time.nominal)
        gradient.link_bytes_per_s  # seconds per byte/s, by network level
        gradient = jax.jit(jax.grad(step_time))  # for thousands of calls

    JAX takes some seconds to compile the last line, and one second for `value_and_grad`, whose
    calls take longer. What took longer than a second is kept on disk for the next process, in the
    package's cache folder or wherever `jax_compilation_cache_dir` says.

    Args:
        model, cluster, layout, calibration, site: as in `perfmodel.predict`.
        global_batch, seq_len, dtype, devices, job, framework, of_job: as in `perfmodel.problem`.

    Raises:
        UnknownNameError, LayoutError, PerfModelError: as `perfmodel.predict`.
    """
    keep_long_compilations()
    problem = catalog.problem(
        model,
        cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        dtype=dtype,
        devices=devices,
        job=job,
        framework=framework,
        **of_job,
    )
    laid_out, _ = layout_of(problem, layout)
    return step_time_function_of(step_problem_of(problem, calibration, site), laid_out)


def step_time_function_of(
    problem: StepProblem,
    layout: Layout,
    vary: Literal["all", "layout"] = "all",
    micro_batches: Sequence[int] | None = None,
) -> StepTimeFunction:
    """`step_time_function` for a `StepProblem` and a `Layout`.

    Args:
        vary: with `layout` the machine and the element type must stay `nominal`, which leaves less
            to price and to compile.
        micro_batches: sizes of micro-batches between which the function interpolates, the layout's
            own among them; None: that and the next smaller and larger ones that are possible.
    """
    problems = [problem] if vary == "layout" else _by_element_type(problem)

    # Full recompute is a share of each stage's layers, a parameter: the programs themselves
    # recompute none in full.
    full = layout.recompute == "full"
    base = layout.replace(
        recompute_full_layers=None, recompute="selective" if full else layout.recompute
    )
    layout_batch = layout_batches(problem, [layout])[0]
    layers = _layers(layout_batch, layout_batch.program.counts)
    recomputed = _layers(layout_batch, layout_batch.program.full)

    # The layout with every micro-batch size, under every element type.
    sizes = (
        possible_micro_batches(problem, layout) if micro_batches is None else list(micro_batches)
    )
    steps, scales = [], []
    for size in sizes:
        sized = base.replace(micro_batch=size)
        steps.append([layout_batches(type_problem, [sized])[0] for type_problem in problems])
        scales.append(prod(step_factors(problem, layout.replace(micro_batch=size))))
    programs, tables, times, families = composed(
        problems, steps, layers, scales, elastic=vary == "all"
    )
    share = np.where(layers > 0, (layers if full else recomputed) / np.maximum(layers, 1), 0.0)
    nominal = StepParameters(
        **nominal_machine(problem),
        kernel_factor=dict.fromkeys(families, np.float64(1.0)),
        layers=layers.astype(float),
        micro_batch=np.float64(layout.micro_batch),
        recompute=share,
        offload=np.float64(layout.offload and problem.job.mode == "train"),
        fp8=np.float64(problem.job.dtype == "fp8" and len(problems) > 1),
    )
    bounds = _bounds(nominal, problem, sizes, len(problems) > 1, copies=programs.offloads_layers)
    memory = Memory.of(problems, steps, tables.cuts, sizes)
    return StepTimeFunction(
        nominal,
        bounds,
        layout,
        problem.usable_bytes,
        programs,
        tables,
        times,
        problem.job.input_s,
        problem.job.generation_s,
        np.log(sizes),
        memory,
    )


def _by_element_type(problem: StepProblem) -> list[StepProblem]:
    """The problem in 16 bits and in 8, where its device has both; else as it is."""
    job, framework = problem.job, problem.framework
    other_dtype = _OTHER_TYPE.get(job.dtype)
    if other_dtype not in problem.cluster.device.dtypes:
        return [problem]
    # Fields that the job has as its framework's default change with the type; those that it states
    # do not.
    defaults = framework.job_defaults(job.dtype)
    other_defaults = framework.job_defaults(other_dtype)
    changed = {
        name: value for name, value in other_defaults.items() if job.value(name) == defaults[name]
    }
    in_other_type = replace(problem, job=replace(job, dtype=other_dtype, **changed))
    return [in_other_type, problem] if job.dtype == "fp8" else [problem, in_other_type]


def _layers(
    layout_batch: LayoutBatch, counts: Float[np.ndarray, "stages segments blocks"]
) -> Int[np.ndarray, " stages"]:
    """Number of layers among the blocks of every stage."""
    return (counts * layout_batch.composed[0].events.layers).sum(axis=(1, 2)).astype(int)


def possible_micro_batches(
    problem: StepProblem, layout: Layout, allowed: Container[int] | None = None
) -> list[int]:
    """The layout's micro-batch size, and the next smaller and larger possible sizes.

    Args:
        allowed: sizes that come into question; None: all.
    """
    per_replica = problem.job.global_batch // layout.dp
    smaller = range(layout.micro_batch - 1, 0, -1)
    larger = range(layout.micro_batch + 1, min(per_replica, 8 * layout.micro_batch) + 1)
    sizes = [layout.micro_batch]
    for candidates in (smaller, larger):
        for size in candidates:
            if (allowed is None or size in allowed) and _possible(problem, layout, size):
                sizes.append(size)
                break
    return sorted(sizes)


def _possible(problem: StepProblem, layout: Layout, size: int) -> bool:
    """Whether the layout may have micro-batches of some size."""
    try:
        check_layout(problem.model, problem.cluster, problem.job, layout.replace(micro_batch=size))
    except LayoutError:
        return False
    return True


def _bounds(
    nominal: StepParameters,
    problem: StepProblem,
    sizes: Sequence[int],
    in_8_bits: bool,
    *,
    copies: bool,
) -> Bounds:
    """Bounds of the parameters: rates, times and corrections within `FACTOR`, shares from 0 to 1.

    Args:
        sizes: micro-batch sizes.
        in_8_bits: whether products may be in 8 bits.
        copies: whether single layers are copied to the host.
    """
    # Copies of single layers are planned for a fixed number of layers without recompute, so these
    # layers must not move.
    low = jax.tree.map(lambda x: x / FACTOR, nominal)
    high = jax.tree.map(lambda x: x * FACTOR, nominal)
    no_layers = np.zeros_like(nominal.layers)
    train = problem.job.mode == "train"
    offloads = nominal.offload > 0
    low = low._replace(
        layers=nominal.layers if copies else np.floor(nominal.layers / 2),
        micro_batch=np.float64(sizes[0]),
        recompute=no_layers,
        offload=np.float64(0.0),
        fp8=np.float64(0.0),
    )
    high = high._replace(
        layers=np.minimum(2 * nominal.layers, nominal.layers.sum()),
        micro_batch=np.float64(sizes[-1]),
        recompute=no_layers + (train and not copies),
        offload=np.float64(offloads),
        fp8=np.float64(in_8_bits),
    )
    return Bounds(low, high)


def nominal_machine(problem: StepProblem) -> dict[str, Any]:
    """The machine and host fields of `StepParameters` at their nominal values."""
    device = problem.cluster.device
    levels = problem.cluster.levels
    framework = problem.framework
    return {
        "compute_flops_per_s": {
            name: np.float64(rate) for name, rate in machine_rates(device).items()
        },
        "memory_bytes_per_s": np.float64(device.memory_bandwidth_bytes_per_s),
        "link_bytes_per_s": np.array([level.bandwidth_bytes_per_s for level in levels]),
        "link_latency_s": np.array([level.latency_s for level in levels]),
        "host_op_s": np.float64(framework.host.host_op_s),
        "kernel_gap_s": np.float64(framework.host.kernel_gap_s),
    }
