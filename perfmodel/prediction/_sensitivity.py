"""Derivatives of step times by the parameters of runs, through the timeline.

d T / d parameter = sum over classes of (d T / d duration) (d duration / d parameter). The first factor is the
gradient of the makespan; the second, of the arithmetic that composes durations from events, is a difference quotient:
that arithmetic is smooth but for switches between compute-bound, launch-bound and hidden, which a step that
small does not meet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._adjustment import Adjustment
from perfmodel.prediction._bundle import Prepared
from perfmodel.prediction._step_model import StepModel
from perfmodel.spec import Layout
from perfmodel.timeline import makespan, makespan_and_grad

_STEP = 1e-6


@dataclass(frozen=True, eq=False)
class StepDerivatives:
    """Step times of layouts and how they move with parameters."""

    step_s: Float[np.ndarray, " layouts"]
    by_parameter: Float[np.ndarray, "layouts parameters"]
    """d step time / d parameter [s]."""
    prepared: tuple[Prepared, ...]
    """Program of each layout."""
    durations_s: tuple[Float[np.ndarray, " classes"], ...]
    durations_by_parameter: tuple[Float[np.ndarray, "parameters classes"], ...]


@dataclass(frozen=True, eq=False)
class _Term:
    lane: int
    prepared: Prepared
    weight: float
    durations_s: Float[np.ndarray, " classes"]


def _terms(model: StepModel, layouts: Sequence[Layout]) -> list[_Term]:
    """Programs of all layouts, the first of each layout before its others."""
    found: list[_Term] = []
    for bundle in model.bundles(layouts):
        for term, weight in model.terms(bundle):
            prepared, durations = model.prepared(term.spec), model.durations(term)
            found += [_Term(lane, prepared, weight, durations[i]) for i, lane in enumerate(bundle.lanes)]
    return found


def step_times_s(model: StepModel, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """Step time of every layout in float64, one by one (`StepModel.evaluate` is for thousands)."""
    step_s = np.zeros(len(layouts))
    for term in _terms(model, layouts):
        step_s[term.lane] += term.weight * float(makespan(term.prepared.compiled, term.durations_s))
    return step_s


def step_derivatives(model: StepModel, layouts: Sequence[Layout], names: Sequence[str]) -> StepDerivatives:
    """Step times, and their derivatives by the named parameters, where the model's adjustment stands."""
    here = _terms(model, layouts)
    step_s, by_parameter = np.zeros(len(layouts)), np.zeros((len(layouts), len(names)))
    gradients = []
    for term in here:
        span, gradient = makespan_and_grad(term.prepared.compiled, term.durations_s)
        step_s[term.lane] += term.weight * float(span)
        gradients.append(gradient)
    of_class = [np.zeros((len(names), len(term.durations_s))) for term in here]
    adjustment = model.adjustment or Adjustment(device=model.cluster.device.name, values=())
    for i, name in enumerate(names):
        there = _terms(model.adjusted(adjustment.moved(name, _STEP)), layouts)
        for at, (term, moved) in enumerate(zip(here, there, strict=True)):
            of_class[at][i] = (moved.durations_s - term.durations_s) / _STEP
            by_parameter[term.lane, i] += term.weight * float(gradients[at] @ of_class[at][i])
    first = {term.lane: at for at, term in reversed([*enumerate(here)])}
    order = [first[lane] for lane in range(len(layouts))]
    return StepDerivatives(
        step_s,
        by_parameter,
        tuple(here[at].prepared for at in order),
        tuple(here[at].durations_s for at in order),
        tuple(of_class[at] for at in order),
    )
