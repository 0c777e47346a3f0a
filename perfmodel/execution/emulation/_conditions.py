"""What a what-if adds to a collective: delays, late emulated ranks, a rank that dies."""

import math
import random
from statistics import NormalDist
from typing import Final

from perfmodel.execution.emulation._orders import Call, EmulationError, Orders, delayed_as

_NORMAL: Final = NormalDist()
_LEAST: Final = 1e-12


class Conditions:
    """The what-if of one rank."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._random = random.Random(orders.seed)
        self._together_s = 0.0
        self._factors: dict[int, float] = {}
        self._calls = 0

    def extra_s(self, call: Call, iteration: int) -> float:
        """Seconds by which the network takes longer."""
        orders = self._orders
        kind = delayed_as(call.kind)
        delay_s = orders.delays_s.get(kind, 0.0)
        if kind == orders.swept:
            delay_s += orders.sweep_s[iteration // orders.sweep_every % len(orders.sweep_s)]
        return delay_s

    def late_s(self, issued_s: float, emulated: int) -> float:
        """By how much the last of the emulated members comes after this rank.

        They have computed the same since all were last together, `straggler` times as long and each with a log-normal
        factor of its own: the largest of n of these is where the n-th power of the distribution function is uniform.
        """
        if emulated == 0 or self._together_s == 0:
            return 0.0
        if emulated not in self._factors:
            factor = self._orders.straggler
            if self._orders.jitter:
                level = min(max(self._random.random() ** (1 / emulated), _LEAST), 1 - _LEAST)
                factor *= math.exp(self._orders.jitter * _NORMAL.inv_cdf(level))
            self._factors[emulated] = factor
        return max(0.0, (self._factors[emulated] - 1) * (issued_s - self._together_s))

    def together(self, end_s: float) -> None:
        """Note that this rank has waited for a collective: all ranks are at one point, and compute anew."""
        if end_s > self._together_s:
            self._together_s = end_s
            self._factors.clear()

    def check_alive(self, members: tuple[int, ...], what: str) -> None:
        """Raises `EmulationError` for a collective with an emulated rank that has died by then."""
        orders = self._orders
        if orders.fail_rank < 0:
            return
        self._calls += len(members) == orders.world_size
        if self._calls >= orders.fail_call and orders.fail_rank in members:
            raise EmulationError(f"{what}: emulated rank {orders.fail_rank} has failed, as was asked for")
