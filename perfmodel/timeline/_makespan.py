"""Makespan of a structure as a differentiable function of one vector of class durations."""

from typing import overload

import jax
import numpy as np
from jax import custom_batching, lax
from jaxtyping import Array, Float

from perfmodel.timeline._durations import checked, in_numpy, padded_classes
from perfmodel.timeline._lanes import counts_of_lanes, spans_of_lanes
from perfmodel.timeline._loops import counts_of_one_lane, one_lane
from perfmodel.timeline._tables import CompiledStructure, OpTables


@overload
def makespan(
    compiled: CompiledStructure, durations: Float[np.ndarray, " classes"]
) -> np.floating: ...
@overload
def makespan(
    compiled: CompiledStructure, durations: Float[Array, " classes"]
) -> Float[Array, ""]: ...
def makespan(compiled, durations):
    """Time from the start of the step to the end of its last op, in seconds.

    Solves `end[i] = max_j(end[pred[i, j]] + d[lag[i, j]]) + d[duration[i]]`, the longest path.
    NumPy in gives NumPy out in the precision of the input; JAX in gives JAX out, under `jit`,
    `grad`, `jvp` and `vmap` over durations. The derivative with respect to a class is how often the
    class lies on the critical path; where both predecessors release an op at the same time, the
    first in `Structure.pred` is on the path. `d[0]` counts as the constant 0. The second derivative
    is 0, as it is almost everywhere.

    Args:
        compiled: result of `compile_structure`.
        durations: seconds of each class, shape (classes,).

    Raises:
        PerfModelError: durations of another shape, or not finite.
    """
    durations = checked(durations, compiled.structure.n_classes, ndim=1)
    padded = padded_classes(durations)
    if isinstance(durations, np.ndarray):
        return in_numpy(_span, durations.dtype, compiled.op_tables, padded)[()]
    return _span(compiled.op_tables, padded)


@overload
def makespan_and_grad(
    compiled: CompiledStructure, durations: Float[np.ndarray, " classes"]
) -> tuple[np.floating, Float[np.ndarray, " classes"]]: ...
@overload
def makespan_and_grad(
    compiled: CompiledStructure, durations: Float[Array, " classes"]
) -> tuple[Float[Array, ""], Float[Array, " classes"]]: ...
def makespan_and_grad(compiled, durations):
    """Makespan and its gradient: occurrences of each class on the critical path (0 for class 0).

    The gradient comes from a walk back along the critical path and costs less than the makespan
    itself. Arguments and errors are those of `makespan`.
    """
    durations = checked(durations, compiled.structure.n_classes, ndim=1)
    padded = padded_classes(durations)
    if isinstance(durations, np.ndarray):
        span, counts = in_numpy(_span_and_counts, durations.dtype, compiled.op_tables, padded)
        return span[()], counts[: compiled.structure.n_classes]
    span, counts = _span_and_counts(compiled.op_tables, padded)
    return span, counts[: compiled.structure.n_classes]


# One vector runs in the loop over single ops. A `vmap` over either function below becomes a run of
# lanes, so that mapping costs what `makespan_lanes` does.


@custom_batching.custom_vmap
def _run(tables: OpTables, durations: Float[Array, " classes"]) -> Float[Array, ""]:
    """Makespan of one vector of durations."""
    return one_lane(tables, durations, keep_ends=False)[0]


@_run.def_vmap
def _run_lanes(
    axis_size: int, in_batched, tables: OpTables, durations: Float[Array, "lanes classes"]
):
    # Tables are never batched: they are kept with their structure.
    del axis_size, in_batched
    return spans_of_lanes(tables, durations), True


@custom_batching.custom_vmap
def _run_and_walk(
    tables: OpTables, durations: Float[Array, " classes"]
) -> tuple[Float[Array, ""], Float[Array, " classes"]]:
    """Makespan of one vector of durations, and counts of classes on its critical path."""
    span, ends = one_lane(tables, durations, keep_ends=True)
    return span, counts_of_one_lane(tables, durations, ends).at[0].set(0)


@_run_and_walk.def_vmap
def _run_and_walk_lanes(
    axis_size: int, in_batched, tables: OpTables, durations: Float[Array, "lanes classes"]
):
    del axis_size, in_batched
    return counts_of_lanes(tables, durations), (True, True)


@jax.custom_jvp
def _differentiable(tables: OpTables, durations: Float[Array, " classes"]) -> Float[Array, ""]:
    """Makespan of one vector, with derivative `_jvp`, not that of thousands of maxima."""
    return _run(tables, durations)


@_differentiable.defjvp
def _jvp(primals, tangents):
    """Makespan, and its derivative in the direction of the tangents."""
    tables, durations = primals
    # The makespan is piecewise linear: its derivative in a direction is the counts on the critical
    # path times that direction. Counts are constants to JAX, as they are almost everywhere.
    primal = lax.stop_gradient(durations)
    span, counts = _run_and_walk(tables, primal)

    # The added 0 carries the first derivative of the primal output into higher orders.
    zero = counts @ (durations - primal)
    return span + zero, counts @ tangents[1]


_span = jax.jit(_differentiable)
_span_and_counts = jax.jit(_run_and_walk)
