"""What a step time is a function of; and times of events as functions of the machine: exact where it is, with the slope
that the cost models have there.

The regressors and measured curves behind a price are NumPy and tables. What of them a step time needs is how long an
event takes on the machine as it is, and its elasticities e_i = - d log t / d log rate_i, which are central differences
of the price itself, once for a step-time function. Between them stands the law of the event's kind,

    t = t_0 (1 - g + g (sum_i a_i x_i^-p)^(1/p)),    g = sum_i e_i,  a_i = e_i / g,  x_i = rate_i / nominal

a fixed part, and work joined by a power norm: kernels p = 3 (the roofline of `perfmodel.cost.roofline_time`),
collectives p = 1 (latency + volume / bandwidth, Hockney 1994; of a latency x is the inverse). Both derivatives and
value are exact at x = 1. What does not fit the law (an elasticity below 0, or more than 1 in all) is a power of x.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.cost import EventTimes, PricesCollectives, PricesKernels
from perfmodel.ops import Collective, KernelOp, Op
from perfmodel.prediction._adjustment import factors_of
from perfmodel.prediction._price import priced_events
from perfmodel.prediction._problem import StepProblem
from perfmodel.session import Session
from perfmodel.spec import Cluster, Device

_STEP: Final = 1e-6
"""Change of the logarithm of a rate by which prices are differentiated."""
_ROOFLINE: Final = 3.0


class StepParameters(NamedTuple):
    """Parameters of a step, a pytree of real numbers: `jax.grad` gives another of the same shape.

    SI units throughout. Where a layout cannot vary one, its bounds are equal.
    """

    compute_flops_per_s: dict[str, Float[Any, ""]]
    """Dense peak rate of the device by element type (`PeakRates`) [FLOP/s]."""
    memory_bytes_per_s: Float[Any, ""]
    """Memory bandwidth of the device [bytes/s]."""
    link_bytes_per_s: Float[Any, " levels"]
    """One-way bandwidth per device of every network level, innermost first [bytes/s]."""
    link_latency_s: Float[Any, " levels"]
    """Latency of every network level [s]."""
    host_op_s: Float[Any, ""]
    """Host time to issue an operator (`Framework.host_op_s`) [s]."""
    kernel_gap_s: Float[Any, ""]
    """Idle time after a kernel (`Framework.kernel_gap_s`) [s]."""
    kernel_factor: dict[str, Float[Any, ""]]
    """By op family, the time of its kernels relative to what the cost models say."""
    layers: Float[Any, " stages"]
    """Layers of every pipeline stage, in model order; should add up to the model's."""
    micro_batch: Float[Any, ""]
    """Sequences per micro-batch; the global batch stays."""
    recompute: Float[Any, " stages"]
    """Share of every stage's layers that recompute all of their forward, the first ones; the others do as the layout
    says (`selective` where it says `full`)."""
    offload: Float[Any, ""]
    """Share of saved activations that wait in host memory, where the layout offloads them."""
    fp8: Float[Any, ""]
    """Share of the layers whose products are in 8 bits rather than in 16."""


class Bounds(NamedTuple):
    """Least and greatest values; of an optimiser that projects: `optax.projections.projection_box(x, *bounds)`."""

    low: StepParameters
    high: StepParameters


def machine_rates(device: Device) -> dict[str, float]:
    """Peak rates that a device has, by element type in the order in which JAX flattens a dict."""
    return {name: rate for name, rate in sorted(vars(device.peak).items()) if rate is not None}


class Prices(NamedTuple):
    """Times of `n` events as functions of `r` rates."""

    time_s: Float[Any, " n"]
    """On the machine as it is."""
    joined: Float[Any, " n"]
    """Share of it that depends on rates (g)."""
    share: Float[Any, "n r"]
    """Of each rate in that (a)."""
    beyond: Float[Any, "n r"]
    """Elasticity that does not fit the law."""
    power: Float[Any, " n"]
    """Of the norm (p)."""
    family: Int[Any, " n"]
    """Place of the event's op family among the corrected ones, after them all for collectives."""

    def seconds(self, log_rates: Float[Any, " r"], factors: Float[Any, " families"]) -> Float[Any, " n"]:
        """Times at other rates.

        Args:
            log_rates: log of every rate relative to the machine's.
            factors: of every op family, and 1.
        """
        xp = log_rates.__array_namespace__()
        norm = (self.share * xp.exp(-self.power[:, None] * log_rates)).sum(axis=1) ** (1 / self.power)
        law = (1 - self.joined + self.joined * norm) * xp.exp(-self.beyond @ log_rates)
        return self.time_s * law * factors[self.family]


def log_rates(parameters: StepParameters, nominal: StepParameters) -> list[Any]:
    """Logarithms of the rates relative to the nominal ones, in the order of `machines`; to be joined."""
    ratios = [parameters.compute_flops_per_s[name] / rate for name, rate in nominal.compute_flops_per_s.items()]
    ratios.append(parameters.memory_bytes_per_s / nominal.memory_bytes_per_s)
    return [*ratios, *(parameters.link_bytes_per_s / nominal.link_bytes_per_s),
            *(nominal.link_latency_s / parameters.link_latency_s)]  # fmt: skip


def machines(cluster: Cluster, factor: float) -> Iterator[Cluster]:
    """The cluster with one rate after another `factor` times as high (of latencies: as low)."""
    device = cluster.device
    for name, rate in machine_rates(device).items():
        peak = replace(device.peak, **{name: rate * factor})
        yield replace(cluster, device=replace(device, peak=peak))
    faster = device.memory_bandwidth_bytes_per_s * factor
    yield replace(cluster, device=replace(device, memory_bandwidth_bytes_per_s=faster))
    for change in ("bandwidth_bytes_per_s", "latency_s"):
        by = factor if change == "bandwidth_bytes_per_s" else 1 / factor
        for i, level in enumerate(cluster.levels):
            moved = replace(level, **{change: getattr(level, change) * by})
            yield replace(cluster, levels=(*cluster.levels[:i], moved, *cluster.levels[i + 1 :]))


@dataclass(frozen=True)
class _Kernels:
    """Kernel times of a device for which another one is asked."""

    kernels: PricesKernels
    device: Device

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        return self.kernels.times(self.device, ops)


@dataclass(frozen=True)
class _Collectives:
    """The same of the collectives of a cluster."""

    collectives: PricesCollectives
    cluster: Cluster

    def times(self, cluster: Cluster, ops: Sequence[Collective]) -> EventTimes:
        return self.collectives.times(self.cluster, ops)


def _on(problem: StepProblem, cluster: Cluster) -> StepProblem:
    """The problem at the prices of another cluster; its events stay, as no rate decides which there are."""
    return problem.repriced(_Kernels(problem.kernels, cluster.device), _Collectives(problem.collectives, cluster))


class Priced(NamedTuple):
    """Events whose prices are asked for."""

    problem: StepProblem
    ops: tuple[Op, ...]
    time_s: Callable[[StepProblem], Float[np.ndarray, " n"]]
    """Of the ops, given what to price them by."""


def prices(asked: Sequence[Priced], families: Sequence[str], *, elastic: bool = True) -> list[Prices]:
    """Prices of several lists of events on one machine; where not `elastic`, of that machine alone."""
    slower, faster = (_log_s(asked, sign * _STEP) if elastic else [np.zeros(1)] * len(asked) for sign in (-1, 1))
    index = {name: i for i, name in enumerate(families)}
    rates = len(list(machines(asked[0].problem.cluster, 1.0)))
    found = []
    for one, low, high in zip(asked, slower, faster, strict=True):
        elasticity = np.broadcast_to((low - high) / (2 * _STEP), (len(one.ops), rates))
        found.append(_lawful(one.ops, one.time_s(one.problem), elasticity, index))
    return found


def _log_s(asked: Sequence[Priced], by: float) -> list[Float[np.ndarray, "n r"]]:
    """Logarithm of the events' times where the logarithm of one rate after another is larger by so much."""
    found: list[list[np.ndarray]] = [[] for _ in asked]
    with Session():  # what no later call can use is not remembered
        for cluster in machines(asked[0].problem.cluster, float(np.exp(by))):
            there = {id(one.problem): _on(one.problem, cluster) for one in asked}
            for problem in {id(one.problem): one.problem for one in asked}.values():
                ops = [op for one in asked if one.problem is problem for op in one.ops]
                priced_events(there[id(problem)], ops)  # together is faster than list by list
            for mine, one in zip(found, asked, strict=True):
                mine.append(np.log(np.maximum(one.time_s(there[id(one.problem)]), 1e-300)))
    return [np.stack(mine, axis=1) for mine in found]


def _lawful(
    ops: Sequence[Op], time_s: Float[np.ndarray, " n"], elasticity: Float[np.ndarray, "n r"], index: dict[str, int]
) -> Prices:
    fitting = np.maximum(elasticity, 0.0)
    fitting /= np.maximum(fitting.sum(axis=1, keepdims=True), 1.0)
    joined = fitting.sum(axis=1)
    even = np.full_like(fitting, 1 / fitting.shape[1])
    share = np.where(joined[:, None] > 0, fitting / np.maximum(joined, 1e-300)[:, None], even)
    kernel = np.array([not isinstance(op, Collective) for op in ops], bool)
    family = np.array([index.get(factors_of(op)[1], len(index)) for op in ops], int)
    return Prices(time_s, joined, share, elasticity - fitting, np.where(kernel, _ROOFLINE, 1.0), family)
