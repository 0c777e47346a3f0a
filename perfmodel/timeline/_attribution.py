"""Which durations the step time rests on, averaged over noise."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from perfmodel.errors import PerfModelError
from perfmodel.timeline._compile import CompiledStructure
from perfmodel.timeline._durations import checked
from perfmodel.timeline._lanes import makespan_lanes_and_grad


@dataclass(frozen=True, eq=False)
class Attribution:
    """Step time and its sensitivity under noisy durations."""

    criticality: Float[np.ndarray, " classes"]
    """Mean number of times that each class lies on the critical path: the derivative of the expected
    step time, to first order in the noise."""
    expected_makespan_s: float
    makespan_std_s: float


def attribution(
    compiled: CompiledStructure,
    durations: Float[ArrayLike, " classes"],
    key: Array,
    lanes: int = 64,
    sigma: float = 0.01,
) -> Attribution:
    """Mean gradient and makespan over `lanes` copies of `durations` with log-normal noise of mean 1.

    The gradient of a single makespan jumps where paths tie, and in a balanced pipeline they all do;
    the mean over a little noise shares such ties out.

    Args:
        compiled: what `compile_structure` returned.
        durations: seconds of each class, shape (classes,).
        key: of `jax.random`.
        lanes: number of noisy copies.
        sigma: standard deviation of the logarithm of the noise; classes are independent.

    Raises:
        PerfModelError: durations of another shape or not finite, fewer than 1 lane, negative sigma.
    """
    if lanes < 1:
        raise PerfModelError(f"attribution: at least 1 lane is needed, got {lanes}")
    if not 0 <= sigma < float("inf"):
        raise PerfModelError(f"attribution: sigma must be finite and not negative, got {sigma}")
    durations = np.asarray(checked(durations, compiled.n_classes, ndim=1))
    noise = np.asarray(jax.random.normal(key, (lanes, compiled.n_classes), jnp.float32))
    noisy = durations * np.exp(sigma * noise - sigma**2 / 2)
    spans, counts = makespan_lanes_and_grad(compiled, noisy)
    return Attribution(counts.mean(axis=0), float(spans.mean()), float(spans.std()))
