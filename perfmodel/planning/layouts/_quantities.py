"""Quantities that objectives and constraints may name, as intervals for each layout."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Float

from perfmodel.errors import PerfModelError
from perfmodel.planning.layouts.expressions import Interval
from perfmodel.planning.layouts.search_words import Tariff
from perfmodel.spec import DIMENSIONS
from perfmodel.units import GIB

if TYPE_CHECKING:
    from perfmodel.prediction import StepProblem

DEGREES: Final = (*(d.key for d in DIMENSIONS), "vpp", "micro_batch", "zero", "devices")
MEMORY: Final = ("memory_bytes", "memory_gib")
TIMES: Final = (
    *("step_time_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "cost", "energy_j"),
    *("power_w", "train_time_s"),
)
NAMES: Final = (*TIMES, *MEMORY, *DEGREES, "micro_batches", "global_batch")
"""Everything that a formula may name."""
MILLION: Final = 1e6


@dataclass(frozen=True, eq=False)
class Quantities:
    """Named quantities of some layouts of one job."""

    step_problem: "StepProblem"
    tariff: Tariff
    """Tariff, completed from the catalog."""
    column: Callable[[str], Float[np.ndarray, " layouts"]]
    """Values of each layout that are known before evaluation: `DEGREES` and `memory_bytes`."""
    step_s: Interval
    busy_s: Callable[[], Interval]
    """Seconds of a step in which the compute stream of a device is busy, mean over devices; a
    function, because it is rarely needed."""

    @cached_property
    def tokens_per_step(self) -> float:
        """Tokens of one step."""
        return float(self.step_problem.job.global_batch * self.step_problem.job.tokens_per_sequence)

    @property
    def _share(self) -> float:
        """Number of steps that cost and energy are for: those of `tokens`, or of a million."""
        return (self.tariff.tokens or MILLION) / self.tokens_per_step

    def __call__(self, name: str) -> Interval:
        """The interval that a quantity lies in.

        Raises:
            PerfModelError: a price, a power or a number of tokens that is not known.
        """
        exactly = Interval.exactly
        if name in MEMORY:
            return exactly(self.column("memory_bytes") / (GIB if name == "memory_gib" else 1.0))
        if name in DEGREES:
            return exactly(self.column(name))
        match name:
            case "global_batch":
                return exactly(float(self.step_problem.job.global_batch))
            case "step_time_s":
                return self.step_s
            case "train_time_s":
                tokens = self._needed(
                    "tokens", "a number of tokens to train on", "--tokens (tokens=)"
                )
                return self.step_s * exactly(tokens / self.tokens_per_step)
            case "micro_batches":
                return exactly(
                    self.step_problem.job.global_batch
                    / (self.column("dp") * self.column("micro_batch"))
                )
        devices = exactly(self.column("devices"))
        match name:
            case "tokens_per_s":
                return exactly(self.tokens_per_step) / self.step_s
            case "tokens_per_s_per_device":
                return exactly(self.tokens_per_step) / (self.step_s * devices)
            case "mfu":
                # MFU relates to the peak of one device type.
                self.step_problem.cluster.require_one_kind()
                flops = self.step_problem.flops
                peak = self.step_problem.cluster.device.flops_per_s(self.step_problem.job.dtype)
                return exactly(flops / peak) / (self.step_s * devices)
            case "cost":
                price = self._needed(
                    "price_per_device_hour",
                    "a price per device and hour",
                    "--price (price=)",
                )
                return self.step_s * devices * exactly(price / 3600 * self._share)
            case "energy_j":
                return self._drawn_j() * exactly(self._share)
            case "power_w":
                return self._drawn_j() / self.step_s
        raise AssertionError(name)

    def _drawn_j(self) -> Interval:
        """Energy of all devices in a step: devices * (idle power * step time + (power - idle power)
        * busy time)."""
        power = self._needed("power_w", "the power of a busy device in watts", "--power (power_w=)")
        idle = self._needed(
            "idle_power_w",
            "the power of an idle device in watts",
            "--idle-power (idle_power_w=)",
        )
        if power < idle:
            raise PerfModelError(
                f"a busy device cannot draw {power:g} W, less than the {idle:g} W of an idle one; give a higher --power"
            )
        exactly = Interval.exactly

        # Both factors are at least 0, so that lower bounds of step and busy time give one of the
        # energy.
        per_device_j = self.step_s * exactly(idle) + self.busy_s() * exactly(power - idle)
        return per_device_j * exactly(self.column("devices"))

    def _needed(self, field: str, description: str, flag: str) -> float:
        """Return a figure of the tariff; raise an error that names its flag if it is not known."""
        value = getattr(self.tariff, field)
        if value is None:
            raise PerfModelError(
                f"{self.step_problem.cluster.name} does not state {description}; give {flag}"
            )
        return value
