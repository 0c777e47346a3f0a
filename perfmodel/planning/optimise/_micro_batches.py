"""Micro-batches of unequal sizes: small ones where the pipeline fills and drains, large ones between."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._pipeline import descend, neighbours
from perfmodel.planning.optimise._relax import Relaxation, Values, relax
from perfmodel.planning.optimise._variables import WholeShares
from perfmodel.prediction import Bundle, StepProblem, bundles, durations, evaluate, fitting, in_program_of, prepared
from perfmodel.program import Kind, Structure
from perfmodel.spec import Layout
from perfmodel.timeline import compile_structure, makespan, makespan_lanes
from perfmodel.units import divisors

_OF_SIZE: Final = (
    Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.SEND_FORWARD, Kind.SEND_BACKWARD,
)  # fmt: skip
"""Kinds whose time depends on the size of their micro-batch."""


@dataclass(frozen=True)
class MicroBatchResult:
    """Sizes of a step's micro-batches."""

    sizes: tuple[int, ...]
    """Sequences of each micro-batch, in the order in which they enter the pipeline."""
    step_time_s: float
    uniform_s: float
    """Step time with equal sizes and as many micro-batches."""
    best_uniform_s: float
    """Step time with equal sizes of any number that fits."""
    best_uniform: int
    """Their size."""
    evaluated: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dict(vars(self))


def size_micro_batches(problem: StepProblem, layout: Layout, *, largest: int | None = None) -> MicroBatchResult:
    """The best sizes for as many micro-batches as the layout has, by relaxation, rounding and moves of sequences.

    Times of sizes between those that the batch divides into are interpolated; no size exceeds the largest that
    fits into memory when all micro-batches have it (and `largest`).

    Args:
        problem: model, job, cluster and cost models, for training.
        layout: the layout; its `micro_batch` gives the number of micro-batches.
        largest: of a micro-batch, in sequences; 16 by default.

    Raises:
        LayoutError: one micro-batch, or a schedule with passes of several kinds or without a flush.
    """
    began = time.perf_counter()
    (bundle,) = bundles(problem, [layout])
    spec = bundle.spec
    if spec.micro_batches < 2 or not spec.scheduler.plain or spec.steps > 1:
        raise LayoutError(
            f"sizes of micro-batches need several of them and a plain schedule that flushes, not {layout.schedule} "
            f"with {spec.micro_batches}"
        )
    uniform = _uniform_step_s(problem, layout, largest or 16)
    if layout.micro_batch not in uniform:
        raise LayoutError(f"layout {layout} does not fit into memory, so that no sizes of its micro-batches are sought")
    refined, of_class, of_micro_batch = by_micro_batch(prepared(spec).structure)
    sizes = np.array(sorted({1, *uniform}))
    by_size = np.stack([_durations_at(problem, bundle, int(size)) for size in sizes])
    scaled = of_micro_batch >= 0
    constants = {
        "sizes": sizes, "by_size": by_size[:, of_class], "of": np.maximum(of_micro_batch, 0), "scaled": scaled,
        "base": durations(problem, bundle)[0][of_class], "largest": float(sizes[-1]),
    }  # fmt: skip
    program = compile_structure(refined)
    total = spec.micro_batches * layout.micro_batch
    variables = {"batch": WholeShares(spec.micro_batches, total, least=1)}
    relaxation = Relaxation(variables, (program,), _durations, constants, limits=_limits)

    def step_s(some: Any) -> Float[np.ndarray, " n"]:
        some = np.array(some)
        return np.where(some.max(axis=1) <= sizes[-1], makespan_lanes(program, _of_sizes(constants, some)), np.inf)

    equal = (layout.micro_batch,) * spec.micro_batches
    starts = [equal, *(tuple(int(n) for n in v["batch"]) for v, *_ in relax(relaxation, steps=400).starts)]
    best, _, evaluated = descend(list(dict.fromkeys(starts)), _moved, step_s)
    exact = [float(makespan(program, _of_sizes(constants, np.array([some]))[0])) for some in (best, equal)]
    size = min(uniform, key=uniform.__getitem__)
    return MicroBatchResult(best, exact[0], exact[1], uniform[size], size, evaluated, time.perf_counter() - began)


def by_micro_batch(
    structure: Structure,
) -> tuple[Structure, Int[np.ndarray, " refined"], Int[np.ndarray, " refined"]]:
    """The structure with classes of its own for every micro-batch of passes and transfers.

    Returns:
        It, and for every new class the old one and the micro-batch (-1 for kinds that do not depend on it).
    """
    columns = int(structure.micro_batch.max()) + 2
    of_size = np.isin(structure.class_kind, _OF_SIZE)

    def code(classes: np.ndarray, micro_batch: np.ndarray) -> np.ndarray:
        return classes * columns + np.where(of_size[classes], micro_batch + 1, 0)

    own = code(structure.duration, structure.micro_batch)
    lag = code(structure.lag, structure.micro_batch[:, None])
    codes, number = np.unique(np.concatenate([[0], own, lag.ravel()]), return_inverse=True)
    old, micro_batch = np.divmod(codes, columns)
    columns_of_class = ("class_kind", "class_stage", "class_segment", "class_variant")
    refined = replace(
        structure,
        duration=number[1 : 1 + len(own)],
        lag=number[1 + len(own) :].reshape(lag.shape),
        **{name: getattr(structure, name)[old] for name in columns_of_class},
    )
    return refined, old, micro_batch - 1


def _moved(at: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    return (sizes for sizes in neighbours(at, 2) if min(sizes) >= 1)


def _durations(values: Values) -> tuple[Float[Array, " classes"]]:
    return (_between(jnp, values, values["batch"][values["of"]]),)


def _limits(values: Values) -> Float[Array, " micro_batches"]:
    return values["batch"] / values["largest"] - 1


def _of_sizes(constants: Values, some: Int[np.ndarray, "n micro_batches"]) -> Float[np.ndarray, "n classes"]:
    """`_durations` of whole sizes, many at once, in double precision."""
    return _between(np, constants, np.minimum(some[:, constants["of"]], constants["sizes"][-1]))


def _between(xp: Any, constants: Values, size: Any) -> Any:
    """Seconds of classes whose micro-batches have some size [..., classes], between those of the sizes that are known,
    by `jax.numpy` or `numpy`."""
    sizes, by_size = constants["sizes"], constants["by_size"]
    upper = xp.clip(xp.searchsorted(sizes, size), 1, len(sizes) - 1)
    share = (size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    at = xp.arange(size.shape[-1])
    between = by_size[upper - 1, at] * (1 - share) + by_size[upper, at] * share
    return xp.where(constants["scaled"], between, constants["base"])


def _durations_at(problem: StepProblem, bundle: Bundle, size: int) -> Float[np.ndarray, " classes"]:
    """Seconds of the program's classes where all micro-batches have a size."""
    layout = bundle.layouts[0].replace(micro_batch=size)
    return durations(problem, in_program_of(problem, bundle, layout))[0]


def _uniform_step_s(problem: StepProblem, layout: Layout, largest: int) -> dict[int, float]:
    """Step times of all equal sizes that divide the batch and fit."""
    per_replica = problem.job.global_batch // layout.dp
    sizes = divisors(per_replica, largest)
    layouts = [layout.replace(micro_batch=size) for size in sizes]
    fits = fitting(problem, layouts)
    step_s = evaluate(problem, layouts).step_time_s
    return {size: float(s) for size, s, ok in zip(sizes, step_s, fits, strict=True) if ok}
