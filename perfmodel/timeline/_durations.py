"""Prepares duration vectors for JAX: checks, padding to shared shapes, evaluation.

NumPy in gives NumPy out, in the precision of the input and without touching JAX's global settings.
Each trace costs a compilation, so that a search must get by with few: `count_traces` tells how
many.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import jax
import jax.core
import jax.monitoring
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from perfmodel.errors import PerfModelError
from perfmodel.timeline._tables import bucket

SMALLEST_CLASSES: Final = 1024

Durations: TypeAlias = np.ndarray | Array


def checked(durations: ArrayLike, n_classes: int, ndim: int) -> Durations:
    """Return `durations` as a floating-point array of `ndim` dimensions, the last of `n_classes`.

    float32 stays float32; whatever else NumPy brings becomes float64.

    Raises:
        PerfModelError: another shape, or (for NumPy input) values that are not finite.
    """
    array = durations if isinstance(durations, jax.Array) else np.asarray(durations)
    if array.ndim != ndim or array.shape[-1] != n_classes:
        expected = f"({n_classes},)" if ndim == 1 else f"(lanes, {n_classes})"
        raise PerfModelError(
            f"durations: the shape must be {expected} (one value per class), got {tuple(array.shape)}"
        )

    # JAX's values may be tracers, which can be converted but not looked at.
    if isinstance(array, jax.Array):
        return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)
    if array.dtype.kind not in "fiu":
        raise PerfModelError(f"durations: must be numbers in seconds, got dtype {array.dtype}")
    if not np.isfinite(array).all():
        index = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
        raise PerfModelError(f"durations: must be finite seconds, got {array[index]} at {index}")
    return array if array.dtype == np.float32 else array.astype(np.float64)


def padded_classes(
    durations: Float[Durations, "*lanes classes"],
) -> Float[Durations, "*lanes padded"]:
    """Pad the last axis to a bucket, and set class 0 to zero."""
    *lanes, n_classes = durations.shape
    size = bucket(n_classes, SMALLEST_CLASSES)
    if isinstance(durations, jax.Array):
        # Class 0 is cut off and padded back as a 0, so that no derivative flows into it.
        no_padding = [(0, 0)] * len(lanes)
        return jnp.pad(durations[..., 1:], [*no_padding, (1, size - n_classes)])

    # Takes a fifth of the time of `np.pad`.
    padded = np.zeros((*lanes, size), durations.dtype)
    padded[..., 1:n_classes] = durations[..., 1:]
    return padded


def padded_lanes(
    durations: Float[Durations, "lanes classes"], tile: int
) -> Float[Durations, "padded classes"]:
    """The first axis padded to `tile` times a power of two, by lanes of zeros."""
    lanes = durations.shape[0]
    n_tiles = -(-lanes // tile)
    padded_lanes = tile * bucket(n_tiles, 1)
    xp = np if isinstance(durations, np.ndarray) else jnp
    return xp.pad(durations, [(0, padded_lanes - lanes), (0, 0)])


def double_precision() -> AbstractContextManager:
    """JAX's `enable_x64` context, in any installed version."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)

    # Older versions have it among the experiments.
    from jax.experimental import enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    return enable_x64()


def in_numpy(function: Callable[..., Any], dtype: np.dtype, *arguments: Any) -> Any:
    """`function(*arguments)` evaluated at once, in the precision of `dtype`, as NumPy arrays."""
    with double_precision() if dtype == np.float64 else nullcontext():
        result = function(*arguments)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(result)):
            # The caller is being traced. `function` is traced by now, so that this only runs it.
            with jax.ensure_compile_time_eval():
                result = function(*arguments)
        return jax.tree.map(np.asarray, result)


def being_traced(values: Any = ()) -> bool:
    """Whether JAX is tracing (even constants become tracers), or a pytree holds a tracer."""
    # Any operation shows it: inside a trace, its result is a tracer.
    return any(
        isinstance(value, jax.core.Tracer) for value in (jnp.add(0, 0), *jax.tree.leaves(values))
    )


_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""Name of JAX's event that occurs once per trace of a called function, but not for functions traced
inside it."""


@dataclass
class TraceCount:
    """Traces so far inside a `count_traces` block."""

    total: int = 0


@contextmanager
def count_traces() -> Iterator[TraceCount]:
    """Count how often JAX traces and lowers a function (of any library) inside the block."""
    count = TraceCount()
    active = True

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        count.total += active and event == _LOWERED

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        active = False
        # Older versions of JAX cannot unregister; the listener then stays, inactive.
        unregister = getattr(jax.monitoring, "unregister_event_duration_listener", lambda _: None)
        unregister(listen)
