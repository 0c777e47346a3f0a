"""Orders for a rank's process, its calls, and what-if conditions.

Orders travel from the launching process to the rank. Conditions add delays, late emulated ranks or
a rank that dies (NeuronaBox's what-if analysis, section 3.3).
"""

import json
import math
import os
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import Any, Final, Self

from perfmodel.errors import PerfModelError, UnknownNameError

VARIABLE: Final = "PERFMODEL_EMULATION"
KINDS: Final = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather"),
    *("scatter", "send", "recv", "barrier"),
)

_SIDES: Final = ("send", "recv")
DELAYED: Final = (*(kind for kind in KINDS if kind not in _SIDES), "send_recv")
"""Kinds that may be delayed; a message is delayed as a whole, on both sides."""

_NORMAL: Final = NormalDist()
_LEAST: Final = 1e-12


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Orders for one real rank, passed as JSON in an environment variable."""

    address: str
    """Address of the socket at which the emulated environment answers; empty: only record, on a
    real network."""
    wire: str = ""
    """`HOST:PORT` of the process that answers for the emulated ranks on the wire; empty if there is
    none."""
    wire_key: str = ""
    """Secret of this run; the process on the wire answers only ranks that know it."""
    rank: int
    world_size: int
    real_ranks: tuple[int, ...]
    out: str
    """Folder for the rank's records."""
    apart: bool = False
    """Whether real ranks exchange no data: their calls begin when the last of them has called, and
    take the time in the prices."""
    pinned: bool = False
    """Whether the rank stays on one core, where threads that serve collectives have priority;
    otherwise a message that arrives during computation waits up to 4 ms for the scheduler's next
    tick."""
    delays_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds added to every collective of a kind."""
    swept: str = ""
    """Kind of collective whose added delay changes with the iteration."""
    sweep_s: tuple[float, ...] = ()
    """Delays of the sweep, used one after another and then repeated."""
    sweep_every: int = 1
    """Number of iterations with each delay."""
    straggler: float = 1.0
    """Factor on the compute time of emulated ranks, relative to this one."""
    copies_per_s: float = 0.0
    """Speed of a core where the processor times of collectives were measured, see `_clock.Core`; 0:
    unknown."""
    jitter: float = 0.0
    """Standard deviation of the log of each emulated rank's compute time."""
    fail_rank: int = -1
    """Emulated rank that dies."""
    fail_call: int = 0
    """The collective of the world group at which the rank fails, counted from 1."""
    seed: int = 0
    stop_after: int = 0
    """Number of iterations after which the script is ended; 0: it ends by itself."""

    def __post_init__(self) -> None:
        # Checked where orders are given, since in the rank's process an error would look like the
        # script's.
        for kind, delay_s in (
            *self.delays_s.items(),
            *((self.swept, delay_s) for delay_s in self.sweep_s),
        ):
            check_delay(kind, delay_s)
        if self.swept and (not self.sweep_s or self.sweep_every < 1):
            raise PerfModelError(
                f"emulate: a sweep of {self.swept} needs at least one delay, each for at least 1 iteration; got "
                f"{len(self.sweep_s)}, each for {self.sweep_every}"
            )
        if not (math.isfinite(self.straggler) and self.straggler > 0):
            raise PerfModelError(
                f"emulate: the straggler's factor must be positive and finite, got {self.straggler}"
            )
        if not 0 <= self.jitter < 2:
            raise PerfModelError(
                f"emulate: the jitter must be at least 0 and below 2, got {self.jitter}"
            )

    def without_what_if(self) -> Self:
        """The orders without delays, slow ranks or failures."""
        return replace(
            self, delays_s={}, swept="", sweep_s=(), straggler=1.0, jitter=0.0, fail_rank=-1
        )

    @property
    def exchanging(self) -> tuple[int, ...]:
        """Ranks that exchange data with this one, including itself."""
        return (self.rank,) if self.apart else self.real_ranks

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Self:
        return cls.from_fields(json.loads(os.environ[VARIABLE]))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Read orders from the fields that `to_json` wrote."""
        listed: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()
        }
        return cls(**listed)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective call, on which all participating ranks must agree."""

    kind: str
    """Kind of collective, one of `KINDS`."""
    nbytes: int
    """Sized as nccl-tests does, see `perfmodel.ops.Collective`; for a barrier one element."""
    dtype: str
    detail: str = ""
    """Reduction, root, peer or split sizes."""

    def __str__(self) -> str:
        text = f"{self.kind} of {self.nbytes} bytes of {self.dtype}"
        return f"{text} ({self.detail})" if self.detail else text


def delayed_as(kind: str) -> str:
    """Map a call's kind to the kind of `DELAYED` whose delay applies to it."""
    return "send_recv" if kind in _SIDES else kind


def check_delay(kind: str, delay_s: float) -> None:
    """Refuse invalid delays.

    Raises:
        UnknownNameError: no kind of collective, or one side of a message.
        PerfModelError: a delay that is negative or no number.
    """
    if kind not in DELAYED:
        raise UnknownNameError("collective", kind, DELAYED)
    if not 0 <= delay_s < float("inf"):
        raise PerfModelError(
            f"emulate: the delay of {kind} must be finite and at least 0 s, got {delay_s!r}"
        )


class EmulationError(PerfModelError, RuntimeError):
    """Raised when the emulated cluster cannot do what a script asks for; names the rank, the call
    and its number."""


class Conditions:
    """What-if conditions of one rank, and the state that they need."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._random = random.Random(orders.seed)
        self._together_s = 0.0
        self._factors: dict[int, float] = {}
        self._calls = 0

    def extra_s(self, kind: str, iteration: int) -> float:
        """Additional seconds of the network for a call of a kind."""
        # A sweep changes the delay with the iteration while the script runs, so that one run gives
        # a whole curve.
        orders = self._orders
        kind = delayed_as(kind)
        delay_s = orders.delays_s.get(kind, 0.0)
        if kind == orders.swept:
            delay_s += orders.sweep_s[iteration // orders.sweep_every % len(orders.sweep_s)]
        return delay_s

    def late_s(self, issued_s: float, emulated: int) -> float:
        """Seconds by which the last emulated member arrives after this rank.

        Emulated members have computed the same work since the last common collective, `straggler`
        times as slowly, each with its own log-normal factor. The largest of n factors is drawn by
        making the n-th power of the distribution function uniform.
        """
        # Before the first common moment nobody can be late.
        if emulated == 0 or self._together_s == 0:
            return 0.0
        if emulated not in self._factors:
            factor = self._orders.straggler
            if self._orders.jitter:
                # One draw instead of n: if U is uniform, U^(1/n) is distributed as the largest of n
                # uniforms. The quantile function turns it into the largest of n normal deviates;
                # clipping keeps that finite.
                level = min(max(self._random.random() ** (1 / emulated), _LEAST), 1 - _LEAST)
                factor *= math.exp(self._orders.jitter * _NORMAL.inv_cdf(level))
            self._factors[emulated] = factor
        return max(0.0, (self._factors[emulated] - 1) * (issued_s - self._together_s))

    def together(self, end_s: float) -> None:
        """Record that all ranks met in a collective, after which compute times are redrawn."""
        # Each stretch between common moments draws new factors.
        if end_s > self._together_s:
            self._together_s = end_s
            self._factors.clear()

    def check_alive(self, members: tuple[int, ...], call: str) -> None:
        """Raise `EmulationError` if an emulated rank of the collective has died."""
        orders = self._orders
        if orders.fail_rank < 0:
            return
        # Calls are counted on the world group, which all ranks share, so `fail_call` means the same
        # everywhere.
        self._calls += len(members) == orders.world_size
        if self._calls >= orders.fail_call and orders.fail_rank in members:
            raise EmulationError(
                f"{call}: emulated rank {orders.fail_rank} failed, as requested by --fail"
            )
