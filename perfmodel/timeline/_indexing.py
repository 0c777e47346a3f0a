"""Reads and writes by unsigned index, the forms that XLA:CPU compiles to single instructions.

Unsigned indices need no test for negative ones, and in-place updates by `dynamic_update` stay in place.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt


def unsigned(i: Int[Array, "..."]) -> UInt[Array, "..."]:
    """An index that is known not to be negative."""
    return i.astype(jnp.uint32)


def read(array: Array, i: UInt[Array, ""]) -> Array:
    """`array[i]`."""
    return lax.dynamic_index_in_dim(array, i, keepdims=False)  # pyright: ignore[reportArgumentType]


def write(array: Array, value: Array, i: UInt[Array, ""]) -> Array:
    """`array` with `value` at `i`."""
    return lax.dynamic_update_index_in_dim(array, value, i, 0)  # pyright: ignore[reportArgumentType]


def gather(rows: Float[Array, "n lanes"], i: UInt[Array, " m"]) -> Float[Array, "m lanes"]:
    """`rows[i]`, indices within bounds."""
    return rows.at[i].get(mode="promise_in_bounds", wrap_negative_indices=False)
