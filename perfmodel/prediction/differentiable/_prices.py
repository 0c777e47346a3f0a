"""Parameters of a step time, and times of events as functions of the machine.

The regressors and measured curves behind a price are NumPy and tables, which JAX cannot trace. A
step-time function takes two things from them, once: how long an event takes on the machine as it
is, and its elasticities e_i = - d log t / d log rate_i, which are central differences of the price
itself. Away from there holds the law of the event's kind,

    t = t_0 (1 - g + g (sum_i a_i x_i^-p)^(1/p))
    with g = sum_i e_i,  a_i = e_i / g,  x_i = rate_i / nominal:

a fixed part, and work joined by a power norm: kernels p = 3 (the roofline of
`perfmodel.cost.roofline_seconds`), collectives p = 1 (latency + volume / bandwidth, Hockney 1994;
of a latency x is the inverse). Both derivatives and value are exact at x = 1. Events that do not
fit the law (an elasticity below 0, or more than 1 in all) follow a power of x.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfmodel.cost import EventTimes, PricesCollectives, PricesKernels
from perfmodel.ops import Collective, KernelOp, Op
from perfmodel.prediction._price import NO_PRICES, PriceTable, price_table
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction.sites import factors_of
from perfmodel.session import Session
from perfmodel.spec import Cluster, Device

_STEP: Final = 1e-6
"""Change of the logarithm of a rate in finite differences of prices."""
_ROOFLINE: Final = 3.0
"""Power of the norm that joins compute and memory time of a kernel."""


class StepParameters(NamedTuple):
    """Parameters of a step, as a pytree of real numbers.

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
    """Time of kernels relative to the cost models, by op family."""
    layers: Float[Any, " stages"]
    """Layers of every pipeline stage, in model order; should add up to the model's."""
    micro_batch: Float[Any, ""]
    """Sequences per micro-batch; the global batch stays."""
    recompute: Float[Any, " stages"]
    """Share of every stage's layers that recompute all of their forward, counted from the first;
    the others follow the layout (`selective` if it says `full`)."""
    offload: Float[Any, ""]
    """Share of saved activations that wait in host memory, where the layout offloads them."""
    fp8: Float[Any, ""]
    """Share of the layers whose products are in 8 bits rather than in 16."""


class Bounds(NamedTuple):
    """Lower and upper bounds, for example for `optax.projections.projection_box(x, *bounds)`."""

    low: StepParameters
    high: StepParameters


def machine_rates(device: Device) -> dict[str, float]:
    """A device's peak rates by element type, in JAX's dict order."""
    return {name: rate for name, rate in sorted(vars(device.peak).items()) if rate is not None}


class Prices(NamedTuple):
    """Times of `n` events as functions of `r` rates."""

    time_s: Float[Any, " n"]
    """Seconds on the machine as it is."""
    joined: Float[Any, " n"]
    """Share of the time that depends on rates (g)."""
    share: Float[Any, "n r"]
    """Share of each rate in the part that depends on rates (a)."""
    beyond: Float[Any, "n r"]
    """Elasticity by each rate that the law leaves out."""
    power: Float[Any, " n"]
    """Power of the norm (p)."""
    family: Int[Any, " n"]
    """Index of the event's op family among the corrected ones; the index after the last for
    collectives."""

    def seconds(
        self, log_rates: Float[Any, " r"], factors: Float[Any, " families"]
    ) -> Float[Any, " n"]:
        """Times at other rates.

        Args:
            log_rates: log of every rate relative to the machine's.
            factors: factors of every op family, and 1.
        """
        xp = log_rates.__array_namespace__()
        norm = (self.share * xp.exp(-self.power[:, None] * log_rates)).sum(axis=1) ** (
            1 / self.power
        )
        law = (1 - self.joined + self.joined * norm) * xp.exp(-self.beyond @ log_rates)
        return self.time_s * law * factors[self.family]


def relative_rates(parameters: StepParameters, nominal: StepParameters) -> Float[Array, " rates"]:
    """Rates relative to the nominal ones, in the order of `machines` (of latencies the inverse)."""
    # One quotient of all rates: a compiler makes a kernel for each operation on a single number.
    ratios = _rates(parameters) / _rates(nominal)
    return jnp.concatenate([ratios, nominal.link_latency_s / parameters.link_latency_s])


def _rates(parameters: StepParameters) -> Float[Array, " rates"]:
    """Peak rates by element type, memory bandwidth, and bandwidths of the network's levels."""
    by_type = [
        parameters.compute_flops_per_s[name] for name in sorted(parameters.compute_flops_per_s)
    ]
    return jnp.hstack([*by_type, parameters.memory_bytes_per_s, parameters.link_bytes_per_s])


def machines(cluster: Cluster, factor: float) -> Iterator[Cluster]:
    """Clusters with one rate each multiplied by `factor` (latencies divided by it)."""
    device = cluster.device
    for name, rate in machine_rates(device).items():
        peak = replace(device.peak, **{name: rate * factor})
        yield replace(cluster, device=replace(device, peak=peak))
    faster = device.memory_bandwidth_bytes_per_s * factor
    yield replace(cluster, device=replace(device, memory_bandwidth_bytes_per_s=faster))
    for change in ("bandwidth_bytes_per_s", "latency_s"):
        multiplier = factor if change == "bandwidth_bytes_per_s" else 1 / factor
        for i, level in enumerate(cluster.levels):
            changed_level = replace(level, **{change: getattr(level, change) * multiplier})
            yield replace(
                cluster, levels=(*cluster.levels[:i], changed_level, *cluster.levels[i + 1 :])
            )


@dataclass(frozen=True)
class _Kernels:
    """A cost model that prices all kernels on one fixed device."""

    kernels: PricesKernels
    device: Device

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        return self.kernels.times(self.device, ops)


@dataclass(frozen=True)
class _Collectives:
    """A cost model that prices all collectives on one fixed cluster."""

    collectives: PricesCollectives
    cluster: Cluster

    def times(self, cluster: Cluster, ops: Sequence[Collective]) -> EventTimes:
        return self.collectives.times(self.cluster, ops)


def _on_cluster(problem: StepProblem, cluster: Cluster) -> StepProblem:
    """The problem with the prices of another cluster; its events stay the same, because they do not
    depend on rates."""
    return problem.repriced(
        _Kernels(problem.kernels, cluster.device), _Collectives(problem.collectives, cluster)
    )


class PriceRequest(NamedTuple):
    """Events whose prices are asked for."""

    problem: StepProblem
    """Problem on the machine as it is."""
    ops: tuple[Op, ...]
    """Events to price."""
    time_s: Callable[[StepProblem, PriceTable], Float[np.ndarray, " n"]]
    """Seconds of the events in a problem, from prices of that problem."""


def prices(
    requests: Sequence[PriceRequest], families: Sequence[str], *, elastic: bool = True
) -> list[Prices]:
    """Compute prices of several lists of events on one machine.

    Args:
        families: names of the op families that have a factor.
        elastic: whether prices follow the machine's rates; else they hold on the machine as it is
            alone.
    """
    index = {name: i for i, name in enumerate(families)}
    rates = len(list(machines(requests[0].problem.cluster, 1.0)))
    slower = faster = [np.zeros(1)] * len(requests)
    if elastic:
        slower = _log_s(requests, -_STEP)
        faster = _log_s(requests, _STEP)
    priced = []
    for request, low, high in zip(requests, slower, faster, strict=True):
        elasticity = np.broadcast_to((low - high) / (2 * _STEP), (len(request.ops), rates))
        priced.append(
            _power_laws(request.ops, request.time_s(request.problem, NO_PRICES), elasticity, index)
        )
    return priced


def joined_prices(parts: Sequence[Prices]) -> Prices:
    """Prices of several lists of events, one list after another."""
    columns = {}
    for name in Prices._fields:
        columns[name] = np.concatenate([getattr(part, name) for part in parts])
    return Prices(**columns)


def _log_s(requests: Sequence[PriceRequest], log_factor: float) -> list[Float[np.ndarray, "n r"]]:
    """Logarithm of the events' times with the logarithm of each rate in turn increased by this
    amount."""
    columns: list[list[np.ndarray]] = [[] for _ in requests]
    # A separate session, because no later call can use these times.
    with Session():
        for cluster in machines(requests[0].problem.cluster, float(np.exp(log_factor))):
            times_s = _times_on(cluster, requests)
            for column, seconds in zip(columns, times_s, strict=True):
                column.append(np.log(np.maximum(seconds, 1e-300)))
    return [np.stack(column, axis=1) for column in columns]


def _times_on(cluster: Cluster, requests: Sequence[PriceRequest]) -> list[Float[np.ndarray, " n"]]:
    """Seconds of the requests' events at the prices of another cluster."""
    # Regressors are faster on all events of a problem together than list by list.
    problems: dict[int, StepProblem] = {}
    ops_of_problem: dict[int, list[Op]] = defaultdict(list)
    for request in requests:
        number = id(request.problem)
        if number not in problems:
            problems[number] = _on_cluster(request.problem, cluster)
        ops_of_problem[number] += request.ops
    tables = {number: price_table(problems[number], ops) for number, ops in ops_of_problem.items()}

    times_s = []
    for request in requests:
        number = id(request.problem)
        times_s.append(request.time_s(problems[number], tables[number]))
    return times_s


def _power_laws(
    ops: Sequence[Op],
    time_s: Float[np.ndarray, " n"],
    elasticity: Float[np.ndarray, "n r"],
    index: dict[str, int],
) -> Prices:
    """Fit the law to the times and elasticities of events.

    Args:
        index: place of the op families that have a factor.
    """
    # Elasticities of a power norm are shares: not negative, and no more than 1 in all. The rest is
    # a power of the rate.
    fitting = np.maximum(elasticity, 0.0)
    fitting /= np.maximum(fitting.sum(axis=1, keepdims=True), 1.0)
    combined = fitting.sum(axis=1)
    even = np.full_like(fitting, 1 / fitting.shape[1])
    share = np.where(combined[:, None] > 0, fitting / np.maximum(combined, 1e-300)[:, None], even)
    kernel = np.array([not isinstance(op, Collective) for op in ops], bool)
    family = np.array([index.get(factors_of(op)[1], len(index)) for op in ops], int)
    return Prices(
        time_s, combined, share, elasticity - fitting, np.where(kernel, _ROOFLINE, 1.0), family
    )
