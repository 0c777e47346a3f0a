"""Unknowns of a relaxation: maps from free real numbers to feasible values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from perfmodel.errors import PerfModelError


class Variable(Protocol):
    """An unknown array."""

    @property
    def free_shape(self) -> tuple[int, ...]:
        """Shape of the free real numbers."""
        ...

    def relaxed(self, free: Float[Array, "..."], temperature: Float[Array, ""]) -> Array:
        """The differentiable value; close to a rounded one at low temperature."""
        ...

    def rounded(self, free: Float[np.ndarray, "..."]) -> np.ndarray:
        """The final, rounded value."""
        ...

    @property
    def polytope(self) -> "Polytope | None":
        """The set of all values, if it is convex."""
        ...


@dataclass(frozen=True)
class Polytope:
    """Numbers between bounds, optionally with a fixed sum."""

    low: float
    high: float
    total: float | None = None


@dataclass(frozen=True)
class Box:
    """Maps real numbers to values between bounds by a logistic, on a log scale if `log` is set."""

    shape: tuple[int, ...]
    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise PerfModelError(
                f"box: low must be below high (and above 0 with log), got {self.low} and {self.high}"
            )

    @property
    def polytope(self) -> Polytope | None:
        return Polytope(self.low, self.high)

    @property
    def free_shape(self) -> tuple[int, ...]:
        return self.shape

    def relaxed(self, free: Float[Array, "..."], temperature: Float[Array, ""]) -> Array:
        del temperature
        share = jax.nn.sigmoid(free)
        if self.log:
            return self.low * (self.high / self.low) ** share
        return self.low + (self.high - self.low) * share

    def rounded(self, free: Float[np.ndarray, "..."]) -> np.ndarray:
        return _as_python(self, free)


@dataclass(frozen=True)
class _Parts:
    """`n` real parts of a total, none below `least`, by a softmax."""

    n: int
    total: float
    least: float

    @property
    def polytope(self) -> Polytope | None:
        return Polytope(self.least, self.total, self.total)

    @property
    def free_shape(self) -> tuple[int, ...]:
        return (self.n,)

    def relaxed(
        self, free: Float[Array, " n"], temperature: Float[Array, ""]
    ) -> Float[Array, " n"]:
        del temperature
        return self.least + (self.total - self.least * self.n) * jax.nn.softmax(free)


@dataclass(frozen=True)
class Shares(_Parts):
    """`n` parts of a total, none below `least`."""

    total: float = 1.0
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.n < 1 or self.least < 0 or self.least * self.n >= self.total:
            raise PerfModelError(
                f"shares: {self.n} parts of at least {self.least} do not fit into {self.total}"
            )

    def rounded(self, free: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        return _as_python(self, free)


@dataclass(frozen=True)
class WholeShares(_Parts):
    """A whole total divided into `n` whole parts of at least `least`, such as stages.

    Relaxed to real parts; rounded at the running sums, so that parts stay near and keep their
    total.
    """

    total: int
    least: int = 0

    def __post_init__(self) -> None:
        if self.n < 1 or self.least < 0 or self.least * self.n > self.total:
            raise PerfModelError(
                f"whole shares: {self.n} parts of at least {self.least} do not fit into {self.total}"
            )

    def rounded(self, free: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
        # Round the running sums and take their differences: each sum is off by half a unit at
        # most, so that errors do not add up, and the last one is the total.
        excess = np.asarray(_as_python(self, free), float) - self.least
        ends = np.rint(np.cumsum(excess)).astype(int)
        ends[-1] = self.total - self.least * self.n
        return np.diff(np.append(0, ends)) + self.least


@dataclass(frozen=True)
class Choices:
    """One of `options` for each of `n` places, by a softmax that hardens with cooling."""

    n: int
    options: int

    @property
    def polytope(self) -> Polytope | None:
        return None

    @property
    def free_shape(self) -> tuple[int, ...]:
        return (self.n, self.options)

    def relaxed(
        self, free: Float[Array, "n options"], temperature: Float[Array, ""]
    ) -> Float[Array, "n options"]:
        return jax.nn.softmax(free / temperature, axis=-1)

    def rounded(self, free: Float[np.ndarray, "n options"]) -> Float[np.ndarray, "n options"]:
        return np.eye(self.options)[np.asarray(free).argmax(axis=-1)]


def starts(
    variables: Mapping[str, Variable], n: int, spread: float, key: Array
) -> dict[str, Float[Array, "starts ..."]]:
    """Free numbers for `n` starts: the first at the centre, the others random around it."""
    # Free numbers of 0 are the middle of a box, equal shares, and equally likely choices.
    keys = jax.random.split(key, len(variables))
    return {
        name: spread * jax.random.normal(k, (n, *variable.free_shape)).at[0].set(0.0)
        for k, (name, variable) in zip(keys, variables.items(), strict=True)
    }


def _as_python(variable: Any, free: np.ndarray) -> np.ndarray:
    return np.asarray(variable.relaxed(jnp.asarray(free), jnp.asarray(1.0)))
