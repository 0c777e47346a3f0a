"""NumPy in, NumPy out, in the precision of the input and without touching JAX's global settings."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np


def double_precision() -> AbstractContextManager:
    """JAX's `enable_x64` context, under the name that the installed version has for it."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
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


def being_traced() -> bool:
    """Whether JAX is tracing a function of the caller's, so that even constants become tracers."""
    return isinstance(jnp.add(0, 0), jax.core.Tracer)
