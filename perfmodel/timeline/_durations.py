"""Checking duration vectors, and padding them to shapes that share a trace."""

from typing import Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from perfmodel.errors import PerfModelError
from perfmodel.timeline._tables import bucket

SMALLEST_CLASSES: Final = 1024

Durations: TypeAlias = np.ndarray | Array


def checked(durations: ArrayLike, n_classes: int, ndim: int) -> Durations:
    """`durations` as a floating-point array of `ndim` dimensions, the last of `n_classes`.

    Raises:
        PerfModelError: another shape, or (for NumPy input) values that are not finite.
    """
    array = durations if isinstance(durations, jax.Array) else np.asarray(durations)
    if array.ndim != ndim or array.shape[-1] != n_classes:
        expected = f"({n_classes},)" if ndim == 1 else f"(lanes, {n_classes})"
        raise PerfModelError(f"durations: shape {expected} is needed, a value per class; got {tuple(array.shape)}")
    if isinstance(array, jax.Array):
        return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(float)
    if array.dtype.kind not in "fiu":
        raise PerfModelError(f"durations: numbers in seconds are needed, got dtype {array.dtype}")
    if not np.isfinite(array).all():
        where = tuple(np.argwhere(~np.isfinite(array))[0].tolist())
        raise PerfModelError(f"durations: finite seconds are needed, got {array[where]} at {where}")
    return array if array.dtype == np.float32 else array.astype(np.float64)


def padded_classes(durations: Float[Durations, "*lanes classes"]) -> Float[Durations, "*lanes padded"]:
    """The last axis padded to a bucket, and class 0 set to the 0 that it stands for."""
    *lanes, n = durations.shape
    size = bucket(n, SMALLEST_CLASSES)
    if isinstance(durations, jax.Array):
        return jnp.pad(durations[..., 1:], [*((0, 0) for _ in lanes), (1, size - n)])
    padded = np.zeros((*lanes, size), durations.dtype)  # a fifth of the time that `pad` takes
    padded[..., 1:n] = durations[..., 1:]
    return padded


def padded_lanes(durations: Float[Durations, "lanes classes"], tile: int) -> Float[Durations, "padded classes"]:
    """The first axis padded to `tile` times a power of two, by lanes of zeros."""
    lanes = durations.shape[0]
    xp = _namespace(durations)
    return xp.pad(durations, [(0, tile * bucket(-(-lanes // tile), 1) - lanes), (0, 0)])


def _namespace(array: Durations) -> Any:
    return np if isinstance(array, np.ndarray) else jnp
