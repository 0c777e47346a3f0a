"""How good a result is at worst."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Certificate:
    """A bound that nothing in the space can beat, and what it rests on."""

    lower_bound_s: float
    """No member of the space is faster."""
    exact_in: str
    """The objective in which the result is proven best; empty where in none."""
    how: str
    """Where the bound comes from, in words."""

    def gap(self, value_s: float) -> float:
        """By what share the result is above the bound at most: 0 is optimal, and so nearly."""
        return max(0.0, value_s / self.lower_bound_s - 1) if self.lower_bound_s > 0 else float("inf")

    def to_dict(self, value_s: float) -> dict[str, Any]:
        """Plain values, for JSON."""
        return vars(self) | {"gap": self.gap(value_s)}
