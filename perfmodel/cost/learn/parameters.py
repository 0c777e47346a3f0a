"""The regressor as a pure function of arrays: base time times the exponential of a residual."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.cost.learn.plans import Term
from perfmodel.cost.learn.stack import Figures, Stack
from perfmodel.ops import FAMILIES, KernelKind, Physics
from perfmodel.ops.physics import Machine, compute_seconds, log2, memory_seconds, vector_rate

JOINT_POWER: Final = 3.0
"""Power of the norm that joins compute and memory time: between a sum (1) and a maximum (inf)."""
FLOOR_POWER: Final = 8.0
"""Power of the norm that joins a kernel with the host-side launch floor it hides behind."""
FEATURE_CLIP: Final = 6.0
"""Standard deviations at which features are clipped."""


_BLOCK: Final = 512
"""Rows that networks take at once: the outputs of a layer for them are 400 kB."""


LAYERED: Final = ("kernels", "biases", "tables")
"""Fields of `Parameters` that are tuples of arrays."""


class Parameters(NamedTuple):
    """All fitted parameters (a pytree). G groups (stack and kind), S stacks, F features, A axes."""

    log_fixed_s: Float[Any, "G"]
    """Log of the time of an empty kernel."""
    log_compute: Float[Any, "G"]
    """Log of the share of the peak rate reached."""
    log_memory: Float[Any, "G"]
    """Log of the share of the memory bandwidth reached."""
    log_floor_s: Float[Any, "G"]
    """Log of the host-side launch floor; tiny where kernels were timed without the host."""
    mean: Float[Any, "F"]
    """Mean of each feature in training."""
    scale: Float[Any, "F"]
    """Standard deviation of each feature in training; 1 where it never varied."""
    low: Float[Any, "F"]
    """Smallest value of each feature in training; inputs are clipped to it."""
    high: Float[Any, "F"]
    """Largest value of each feature in training."""
    kernels: tuple[Float[Any, "*M in out"], ...]
    """Weights of the networks of M members, or of one network without that axis."""
    biases: tuple[Float[Any, "*M out"], ...]
    """Biases of the networks, layer by layer."""
    stack_embedding: Float[Any, "*M S E"]
    """Embedding that the networks learned for each software stack."""
    tables: tuple[Float[Any, "*M S nodes R"], ...]
    """One table per axis: what a stack learned at each node, interpolated between nodes."""
    table_low: Float[Any, "S A"]
    """Log2 of the smallest shapes that a stack was measured on; positions are clipped to the
    range."""
    table_high: Float[Any, "S A"]
    """Log2 of the largest shapes that a stack was measured on."""


class Inputs(NamedTuple):
    """`n` kernels as input of the regressor."""

    shape: dict[str, Any]
    """Shape columns and flags by name, arrays [n]."""
    machine: Machine
    kind: Float[Any, "n K"]
    """One-hot dtype class, op and pass."""
    stack: Any
    """Index of the stack (device and software), int [n]."""
    group: Any
    """Index of the stack-and-kind group whose base constants apply, int [n]."""


def base_time(xp: Any, params: Parameters, physics: Physics, machine: Machine, group: Any) -> Any:
    """Roofline with fitted efficiencies: fixed + (compute^p + memory^p)^(1/p), seconds [n].

    Compute time is the wave-quantised work over the reached share of the peak rate; memory time
    the compulsory traffic over the reached share of the bandwidth (Williams et al., CACM 2009,
    with Daydream-style fixed cost). Smooth in every figure except where a wave fills.
    """
    # efficiencies of the stack and kind: shares of the nominal rates
    compute = compute_seconds(xp, physics, machine) / xp.exp(params.log_compute[group])
    memory = memory_seconds(xp, physics, machine) / xp.exp(params.log_memory[group])
    return xp.exp(params.log_fixed_s[group]) + power_join(xp, compute, memory, JOINT_POWER)


def power_join(xp: Any, a: Any, b: Any, power: float) -> Any:
    """(a^p + b^p)^(1/p) of positive times, without overflow."""
    # only the ratio is raised to the power, which is at most 1
    larger = xp.maximum(a, b)
    smaller = xp.minimum(a, b)
    return larger * (1.0 + (smaller / larger) ** power) ** (1.0 / power)


def feature_matrix(xp: Any, family: str, inputs: Inputs) -> tuple[Physics, Any, Any]:
    """Physics, raw features [n, F] and table positions [n, A] of the inputs."""
    physics = FAMILIES[family].physics(xp, inputs.shape, inputs.machine)

    # Inputs that every family has: work, its time at the nominal rates, and their balance. The
    # times ignore tiles and waves, whose effect is a separate feature (the ratio of FLOPs below),
    # so that the regressor can weigh it.
    compute_s = physics.flops / inputs.machine.peak + physics.vector_ops / vector_rate(
        xp, inputs.machine
    )
    memory_s = physics.bytes / inputs.machine.bandwidth
    common_features = [
        log2(xp, physics.flops),
        log2(xp, physics.bytes),
        log2(xp, compute_s * 1e6),
        log2(xp, memory_s * 1e6),
        log2(xp, compute_s / memory_s),
        log2(xp, physics.quantised_flops / physics.flops),
        log2(xp, physics.bytes / inputs.machine.l2),
    ]
    columns = common_features + physics.features
    n = inputs.kind.shape[0]
    stacked = xp.stack([xp.broadcast_to(c, (n,)) for c in columns], axis=1)
    positions = xp.stack([xp.broadcast_to(a, (n,)) for a in physics.axes], axis=1)
    return physics, xp.concatenate([stacked, inputs.kind], axis=1), positions


def standardise(xp: Any, params: Parameters, raw: Any) -> Any:
    """Features clipped to the training range, centred and scaled."""
    # beyond its training range a network answers as at the edge: there only the base time grows, by
    # physics
    clipped = xp.clip(raw, params.low, params.high)
    return xp.clip((clipped - params.mean) / params.scale, -FEATURE_CLIP, FEATURE_CLIP)


def residual(xp: Any, family: str, params: Parameters, z: Any, positions: Any, stack: Any) -> Any:
    """Log of true over base time [n]: an MLP on features, stack embedding and table read-outs; the
    mean of members.

    Networks that differ in their random start alone agree where kernels were measured and scatter
    where they were not; their mean scatters least (Lakshminarayanan et al., NeurIPS 2017, deep
    ensembles).
    """
    if xp is np and len(z) > _BLOCK:
        # Block by block, so that what one layer leaves for the next stays in the processor's cache.
        # No row depends on the others (`_each_by`).
        log_factor = np.empty(len(z), z.dtype)
        for start in range(0, len(z), _BLOCK):
            block = slice(start, start + _BLOCK)
            log_factor[block] = residual(
                xp, family, params, z[block], positions[block], stack[block]
            )
        return log_factor

    clipped = xp.clip(positions, params.table_low[stack], params.table_high[stack])
    embedding = params.stack_embedding[..., stack, :]
    parts = [xp.broadcast_to(z, (*embedding.shape[:-1], z.shape[1])), embedding]

    # For each axis, interpolate linearly between the stack's values at the two nodes on either side
    # of the shape. The upper end is cut a little so that a node lies above it.
    for number, axis in enumerate(FAMILIES[family].axes):
        place = (
            xp.clip(clipped[:, number], axis.low, axis.high - 1e-3) - axis.low
        ) * axis.nodes_per_doubling
        node = xp.floor(place).astype(np.int32)
        weight = (place - node).astype(z.dtype)[:, None]
        table = params.tables[number]
        below = table[..., stack, node, :]
        above = table[..., stack, node + 1, :]
        parts.append(below * (1 - weight) + above * weight)

    hidden = xp.concatenate(parts, axis=-1)
    for kernel, bias in zip(params.kernels[:-1], params.biases[:-1], strict=True):
        hidden = _each_by(xp, hidden, kernel) + bias[..., None, :]
        hidden = hidden * (0.5 + 0.5 * xp.tanh(0.5 * hidden))  # SiLU, finite at both ends
    log_factor = (_each_by(xp, hidden, params.kernels[-1]) + params.biases[-1][..., None, :])[
        ..., 0
    ]
    has_members = log_factor.ndim == 2
    return log_factor.mean(axis=0) if has_members else log_factor


def _each_by(xp: Any, rows: Any, matrix: Any) -> Any:
    """`rows @ matrix`; in NumPy row by row, so that no row's rounding depends on how many others
    there are.

    A matrix product uses different kernels, with another order of additions, for different numbers
    of rows. A time would then depend on the other queries of the same call, and so on what was
    cached from earlier ones.
    """
    if xp is not np:
        return rows @ matrix
    return (rows[..., None, :] @ matrix[..., None, :, :])[..., 0, :]


class Elsewhere(NamedTuple):
    """The device of kernels that are evaluated on another part of the same die."""

    machine: Machine
    log_memory: Float[Any, "G"]
    """Log of the share of the memory bandwidth reached there."""
    log_floor_s: Float[Any, "G"]
    """Log of the host-side launch floor there."""


def log_time_and_positions(
    params: Parameters,
    inputs: Inputs,
    *,
    family: str,
    host_launch: bool = False,
    xp: Any = np,
    elsewhere: Elsewhere | None = None,
) -> tuple[Any, Any]:
    """Log seconds [n] of every kernel, and where the shapes lie on the family's axes [n, A].

    With `xp=jax.numpy` the result is differentiable with respect to the shape columns and the
    device figures in `inputs` (and the parameters). With `host_launch` the software's launch floor
    is added, as eager measurements have it. On another part of the die (`Elsewhere`), the base time
    follows the figures of that part and the residual stays, so that a higher rate never makes a
    kernel slower.
    """
    physics, raw, positions = feature_matrix(xp, family, inputs)
    dtype = params.kernels[0].dtype
    z = standardise(xp, params, raw).astype(dtype)

    # time = roofline with fitted efficiencies x exp(what the network learned beside it)
    log_base = xp.log(base_time(xp, params, physics, inputs.machine, inputs.group))
    correction = residual(xp, family, params, z, positions, inputs.stack)
    log_kernel = log_base + correction
    log_floor = params.log_floor_s[inputs.group]

    # If the host's launch hides the kernel, measurements do not show its time, and the base time is
    # used.
    trust = kernel_share_of_time(xp, log_kernel, log_floor)

    # On another part of the die the correction stays: clocks and bandwidth change the base time
    # alone.
    if elsewhere is not None:
        params_elsewhere = params._replace(
            log_memory=elsewhere.log_memory, log_floor_s=elsewhere.log_floor_s
        )
        log_base = xp.log(base_time(xp, params_elsewhere, physics, elsewhere.machine, inputs.group))
        log_kernel = log_base + correction
        log_floor = params_elsewhere.log_floor_s[inputs.group]

    # Eager measurements hold the host's launch, so errors on them are of the two together; a step
    # has its own host.
    if host_launch:
        return join_floor(xp, log_kernel, log_floor), positions
    return log_base + correction * trust, positions


def kernel_share_of_time(xp: Any, log_kernel: Any, log_floor: Any) -> Any:
    """Derivative of `join_floor`: the sensitivity of the measured log time to the kernel's (0 to
    1)."""
    return 0.5 + 0.5 * xp.tanh(0.5 * FLOOR_POWER * (log_kernel - log_floor))


def join_floor(xp: Any, log_kernel: Any, log_floor: Any) -> Any:
    """Log time of a kernel behind its launch floor: a power norm in log space."""
    return xp.logaddexp(FLOOR_POWER * log_kernel, FLOOR_POWER * log_floor) / FLOOR_POWER


_BOUND: Final = 0.40
"""Least share of the bandwidth at which a kernel counts as limited by it."""
_UNBOUND: Final = 0.15
"""Share of the bandwidth from which the issue rate of multiprocessors is taken to be the limit."""
_FOLLOWS_ISSUE: Final = 0.75
"""How far the slowest kernels follow the issue rate; the rest is bandwidth (log scale)."""


def term_constants(
    params: Parameters,
    stacks: Sequence[Stack],
    groups: Sequence[tuple[int, KernelKind]],
    terms: Sequence[Term],
) -> Parameters:
    """Replace the base constants of groups [G] by those of each term [T].

    A term on its donor's own device keeps the donor's constants.
    """
    index = {group: i for i, group in enumerate(groups)}
    groups_of_source: dict[tuple[str, KernelKind], list[int]] = {}
    for (stack, kind), i in index.items():
        groups_of_source.setdefault((stacks[stack].source, kind), []).append(i)
    at = np.array([index[(term.stack, term.kind)] for term in terms])
    log_memory = params.log_memory[at]
    log_floor = params.log_floor_s[at].copy()
    for i, term in enumerate(terms):
        donor = stacks[term.stack]
        if donor.figures == term.figures:
            continue

        # An op of several unfused kernels keeps its share of the bandwidth where bandwidth limits
        # it. A smaller share scales so that the time follows clock and multiprocessors instead,
        # which can be compared between devices of one vendor only. Fused kernels keep it: they were
        # seen to follow the bandwidth.
        if "unfused" in term.kind.op and donor.figures.vendor == term.figures.vendor:
            log_memory[i] += _unbound(log_memory[i]) * _issue_over_bandwidth(
                donor.figures, term.figures
            )

        # hosts set the launch floor, not devices: the mean of the source's floors for the kind
        if donor.host_launch:
            log_floor[i] = params.log_floor_s[groups_of_source[donor.source, term.kind]].mean()
    return params._replace(
        log_fixed_s=params.log_fixed_s[at],
        log_compute=params.log_compute[at],
        log_memory=log_memory,
        log_floor_s=log_floor,
    )


def _unbound(log_share: float) -> float:
    """Exponent with which a kernel that reaches this share of the bandwidth follows the issue rate:
    0 for kernels bound by memory, `_FOLLOWS_ISSUE` far below, linear in the logarithm between."""
    place = (np.log(_BOUND) - log_share) / np.log(_BOUND / _UNBOUND)
    return _FOLLOWS_ISSUE * float(np.clip(place, 0.0, 1.0))


def _issue_over_bandwidth(donor: Figures, target: Figures) -> float:
    """Log growth of the issue rate over that of the bandwidth from one device to another."""
    issue = target.units * target.clock / (donor.units * donor.clock)
    return float(np.log(issue / (target.bandwidth / donor.bandwidth)))
