"""Double precision for one evaluation, without touching the process's setting."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import jax
import numpy as np


def double_precision() -> AbstractContextManager:
    """JAX's `enable_x64` context, under the name that the installed version has for it."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    return enable_x64()


@contextmanager
def evaluation_of(durations: np.ndarray | jax.Array) -> Iterator[None]:
    """Where to evaluate `durations`: NumPy input at once and in its own precision, JAX input as it comes."""
    with ExitStack() as stack:
        if isinstance(durations, np.ndarray):
            stack.enter_context(jax.ensure_compile_time_eval())
            if durations.dtype == np.float64:
                stack.enter_context(double_precision())
        yield
