"""Arithmetic on intervals: what a formula can come to, given between which values its quantities lie."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float


@dataclass(frozen=True, eq=False)
class Interval:
    """All values between two ends, which may be infinite; element by element.

    Every operation contains all results that values inside its operands can have (Moore, Interval Analysis, 1966,
    fundamental theorem): that is what makes bounds of formulas sound, whatever the formula.
    """

    lo: Float[np.ndarray, "*shape"]
    hi: Float[np.ndarray, "*shape"]

    @classmethod
    def exactly(cls, value: Float[np.ndarray, "*shape"] | float) -> "Interval":
        """One value alone."""
        array = np.asarray(value, float)
        return cls(array, array)

    def __neg__(self) -> "Interval":
        return Interval(-self.hi, -self.lo)

    def __add__(self, other: "Interval") -> "Interval":
        return Interval(self.lo + other.lo, self.hi + other.hi)

    def __sub__(self, other: "Interval") -> "Interval":
        return self + (-other)

    def __mul__(self, other: "Interval") -> "Interval":
        ends = np.broadcast_arrays(*(_times(a, b) for a in (self.lo, self.hi) for b in (other.lo, other.hi)))
        return Interval(np.minimum.reduce(ends), np.maximum.reduce(ends))

    def __truediv__(self, other: "Interval") -> "Interval":
        holds_zero = (other.lo <= 0) & (other.hi >= 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient = self * Interval(1 / np.where(holds_zero, 1.0, other.hi), 1 / np.where(holds_zero, 1.0, other.lo))
        return Interval(np.where(holds_zero, -np.inf, quotient.lo), np.where(holds_zero, np.inf, quotient.hi))

    def __pow__(self, power: float) -> "Interval":
        """A constant power: of anything if it is a whole number, else of values from 0."""
        if power != int(power):
            return _monotone(np.maximum(self.lo, 0.0), np.maximum(self.hi, 0.0), lambda x: x**power)
        if power < 0:
            return Interval.exactly(1.0) / self**-power
        ends = _monotone(self.lo, self.hi, lambda x: x**power)
        inside = (self.lo < 0) & (self.hi > 0) & (power % 2 == 0) & (power > 0)
        return Interval(np.where(inside, 0.0, ends.lo), ends.hi)

    def least(self, other: "Interval") -> "Interval":
        """The smaller of two."""
        return Interval(np.minimum(self.lo, other.lo), np.minimum(self.hi, other.hi))

    def most(self, other: "Interval") -> "Interval":
        """The larger of two."""
        return Interval(np.maximum(self.lo, other.lo), np.maximum(self.hi, other.hi))

    def can_be(self, sign: str, other: "Interval") -> Bool[np.ndarray, "*shape"]:
        """Whether the comparison `sign` (`<`, `<=`, `>`, `>=`, `==`) holds for some values; of exact ones, whether
        it holds."""
        if sign in (">", ">="):
            return other.can_be(sign.replace(">", "<"), self)
        if sign == "==":
            return (self.lo <= other.hi) & (other.lo <= self.hi)
        return self.lo < other.hi if sign == "<" else self.lo <= other.hi


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A product in which an end that is 0 stays 0 beside one that is infinite."""
    with np.errstate(invalid="ignore"):
        return np.where((a == 0) | (b == 0), 0.0, a * b)


def _monotone(lo: np.ndarray, hi: np.ndarray, function: Callable[[np.ndarray], np.ndarray]) -> Interval:
    with np.errstate(divide="ignore", over="ignore"):
        ends = function(lo), function(hi)
    return Interval(np.minimum(*ends), np.maximum(*ends))
