"""Scenarios: settings that change cluster, device, collectives, framework or a rank, and event
times derived from the unchanged machine's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from jaxtyping import Float

from perfmodel.cost import (
    EventTimes,
    PricesCollectives,
    PricesKernels,
    has_power_law,
    roofline_seconds,
)
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.ops import Collective, KernelOp
from perfmodel.spec import Cluster, Device, Framework
from perfmodel.units import parse_quantity, quantity_text

_COLLECTIVES: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)
NETWORK: Final = (
    "intra_node_bandwidth",
    "inter_node_bandwidth",
    "intra_node_latency",
    "inter_node_latency",
)
"""Parameters of the links."""
HARDWARE: Final = ("compute_rate", "memory_bandwidth", *NETWORK)
"""Parameters of the machine whose sensitivities are reported, as multiples of their present
values."""
_FRAMEWORK: Final = ("host_op_s", "kernel_gap_s")
NAMES: Final = (
    *HARDWARE,
    "power_limit",
    "memory_bytes",
    "host_bandwidth",
    *_FRAMEWORK,
    *(f"{kind}_delay_s" for kind in _COLLECTIVES),
    "slow_rank",
    "slow_factor",
)
"""Everything that may be set."""
_KINDS: Final = {
    "_bandwidth": "bandwidth",
    "_latency": "time",
    "_s": "time",
    "memory_bytes": "memory",
    "power_limit": "power",
}
"""Kind of quantity (`perfmodel.units.QUANTITY_KINDS`) of a parameter, by the ending of its name."""


@dataclass(frozen=True)
class Setting:
    """One parameter, multiplied by a factor or set to a value."""

    name: str
    how: Literal["times", "to"]
    value: float

    def applied_to(self, before: float) -> float:
        """Return the parameter's new value."""
        return before * self.value if self.how == "times" else self.value

    def __str__(self) -> str:
        """The setting as users write it: `NAME=2x`, or `NAME=VALUE` with the value's unit."""
        if self.how == "times":
            return f"{self.name}={self.value:g}x"
        kind = _kind_of(self.name)
        if kind is None:
            return f"{self.name}={self.value:g}"
        return f"{self.name}={quantity_text(self.value, kind)}"


def parse_setting(text: str) -> Setting:
    """Parse `name=2x` (doubled), `name=+10%` (a tenth more) or `name=0.002` (a value in SI units).

    Raises:
        UnknownNameError: no such parameter.
        PerfModelError: a value that is not a number, not finite or negative.
    """
    name, sign, raw = (part.strip() for part in text.partition("="))
    if name not in NAMES:
        raise UnknownNameError("what-if parameter", name, NAMES)
    if not sign:
        raise PerfModelError(
            f"what-if: {text!r} has no value; write {name}=2x, {name}=+10% or {name}=0.002"
        )
    relative = raw.endswith(("x", "%"))
    try:
        value = float(raw.rstrip("x%"))
    except ValueError:
        value = _with_unit(name, raw)
    if raw.endswith("%"):
        value = 1 + value / 100

    # A delay of 0 and rank 0 are values; nothing multiplied by 0 would run.
    allowed_zero = not relative and (name.endswith("_s") or name == "slow_rank")
    if not (0 < value < float("inf") or (value == 0 and allowed_zero)):
        raise PerfModelError(f"what-if: {name} must be positive and finite, got {raw!r}")
    return Setting(name, "times" if relative else "to", value)


def _kind_of(name: str) -> str | None:
    """Kind of quantity of a parameter; None where it is a number."""
    return next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), None)


def _with_unit(name: str, raw: str) -> float:
    """Parse a value with its unit into SI units.

    Raises:
        PerfModelError: a parameter without a unit, or a unit of another quantity.
    """
    kind = _kind_of(name)
    if kind is None:
        raise PerfModelError(f"what-if: {name} must be like 2x, +10% or 0.002, got {raw!r}")
    try:
        return parse_quantity(raw, kind)
    except PerfModelError as error:
        raise PerfModelError(
            f"what-if: {name} must be like 2x or +10%, or a value: {error}"
        ) from None


@dataclass(frozen=True)
class Scenario:
    """A set of settings."""

    settings: tuple[Setting, ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Scenario":
        """Parse settings with `parse_setting`; each parameter may be set once."""
        settings = tuple(map(parse_setting, texts))
        names = [setting.name for setting in settings]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise PerfModelError(f"what-if: {twice} is set twice; give it once")
        return cls(settings)

    def and_also(self, setting: Setting) -> "Scenario":
        """Add a setting to the scenario, replacing an earlier one of the same name."""
        return Scenario((*(s for s in self.settings if s.name != setting.name), setting))

    def scaled(self, name: str, factor: float) -> "Scenario":
        """Multiply a parameter of the scenario by a factor."""
        earlier = next((s for s in self.settings if s.name == name), Setting(name, "times", 1.0))
        return self.and_also(replace(earlier, value=earlier.value * factor))

    def _of(self, name: str, before: float) -> float:
        return next((s.applied_to(before) for s in self.settings if s.name == name), before)

    def device(self, device: Device) -> Device:
        """The device in this scenario."""
        # One factor for all precisions: peaks differ by dtype, so that there is no single value
        # to set.
        rate = self._factor("compute_rate")
        peak = {k: None if v is None else v * rate for k, v in vars(device.peak).items()}
        host = device.host_bandwidth_bytes_per_s
        return replace(
            device,
            peak=replace(device.peak, **peak),
            memory_bandwidth_bytes_per_s=self._of(
                "memory_bandwidth", device.memory_bandwidth_bytes_per_s
            ),
            memory_bytes=self._of("memory_bytes", device.memory_bytes),
            power_w=self._power_w(device),
            host_bandwidth_bytes_per_s=None if host is None else self._of("host_bandwidth", host),
        )

    def _power_w(self, device: Device) -> float | None:
        """The power limit in watts.

        Raises:
            PerfModelError: nothing that it changes is known of the device.
        """
        # A power limit without its law would silently change nothing.
        if any(s.name == "power_limit" for s in self.settings) and not has_power_law(device):
            raise PerfModelError(
                f"what-if: the effect of a power limit on {device.name} is not known; leave power_limit out"
            )
        return device.power_w if device.power_w is None else self._of("power_limit", device.power_w)

    def _factor(self, name: str) -> float:
        """The factor that a setting of the scenario has; 1 if it is not set."""
        setting = next((s for s in self.settings if s.name == name), None)
        if setting and setting.how == "to":
            raise PerfModelError(
                f"what-if: {name} is set as a multiple; write {name}={setting.value:g}x"
            )
        return setting.value if setting else 1.0

    def cluster(self, cluster: Cluster) -> Cluster:
        """The cluster in this scenario; its device differs only in the power limit, see `device`.

        The first network level is inside a node, unless every device is a node of its own.
        """
        levels = []
        for i, level in enumerate(cluster.levels):
            # A first level of size 1 means nodes of one device, which have no network inside.
            tier = "intra_node" if i == 0 and level.size > 1 else "inter_node"
            levels.append(
                replace(
                    level,
                    bandwidth_bytes_per_s=self._of(
                        f"{tier}_bandwidth", level.bandwidth_bytes_per_s
                    ),
                    latency_s=self._of(f"{tier}_latency", level.latency_s),
                )
            )
        device = replace(cluster.device, power_w=self._power_w(cluster.device))
        return replace(cluster, levels=tuple(levels), device=device)

    def framework(self, framework: Framework) -> Framework:
        """The framework with the host costs of this scenario."""
        return framework.replace(
            **{name: self._of(name, framework.value(name)) for name in _FRAMEWORK}
        )

    @property
    def delays_s(self) -> dict[str, float]:
        """Seconds added to each collective, by kind."""
        by_kind = {kind: self._of(f"{kind}_delay_s", 0.0) for kind in _COLLECTIVES}
        return {kind: delay for kind, delay in by_kind.items() if delay}

    def slowed(self, ranks: int) -> tuple[int, float] | None:
        """The slow pipeline rank, and its factor.

        Raises:
            LayoutError: there is no such rank.
        """
        factor = self._factor("slow_factor")
        if factor == 1:
            return None
        rank = self._of("slow_rank", 0.0)
        if rank != int(rank) or not 0 <= rank < ranks:
            raise LayoutError(
                f"what-if: slow_rank must be one of the pipeline ranks 0 to {ranks - 1}, got {rank:g}"
            )
        return int(rank), factor


@dataclass(frozen=True)
class ScaledKernels:
    """Kernel times scaled from a device to a variant of it.

    A measurement does not tell how long the kernel takes on a faster device; the roofline does.
    Times scale by the ratio of the analytical bounds after and before the change.
    """

    kernels: PricesKernels
    variant: Device

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        """Times on the variant of `device`."""
        # Roofline of the variant over roofline of the device as it is: 1 for kernels that the
        # change does not touch.
        measured = self.kernels.times(device, ops)
        return _times(
            measured,
            roofline_seconds(self.variant, ops) / roofline_seconds(device, ops),
            0.0,
        )


@dataclass(frozen=True)
class DelayedCollectives:
    """Collective times with delays added by kind."""

    collectives: PricesCollectives
    delays_s: Mapping[str, float]

    def times(self, cluster: Cluster, ops: Sequence[Collective]) -> EventTimes:
        """Times of `ops` and their delays."""
        # A collective of one rank sends nothing, so that nothing delays it.
        delay_s = np.array(
            [self.delays_s.get(op.collective, 0.0) if op.num_ranks > 1 else 0.0 for op in ops]
        )
        return _times(self.collectives.times(cluster, ops), 1.0, delay_s)


def _times(
    times: EventTimes,
    factor: Float[np.ndarray, " n"] | float,
    delay_s: Float[np.ndarray, " n"] | float,
) -> EventTimes:
    """Times and their intervals multiplied by a factor, then delayed."""
    scaled = {name: getattr(times, name) * factor + delay_s for name in ("time_s", "lo_s", "hi_s")}
    return replace(times, **scaled)
