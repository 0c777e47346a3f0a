"""The prediction of a described run: the mixture of all that it may have been.

Every completion of the description (`_completions`) has a prior probability, learned from how people run. A run that
ended well has fitted into memory, so each completion is weighted by its probability to fit: what cannot have fitted
vanishes. A run that ran out of memory is not conditioned on anything. The step time is the median of the mixture of the
completions' log-normal distributions, and the interval its 5 % and 95 % quantiles.

Two probabilities to fit must not be mixed up. `fits_probability` is that of the description, before the run is known to
have fitted: it may be scored against whether runs fitted. The weights of the mixture use that the run fitted.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.errors import PerfModelError
from perfmodel.prediction import (
    ChoiceEffect,
    LogNormalMixture,
    Prediction,
    Site,
    StepProblem,
    choice_effects,
    explain,
    fullness,
    needed_memory,
    posterior_weights,
    rank_devices,
    step_problem,
    weighted_median,
)
from perfmodel.spec import Framework
from perfmodel.units import GIB
from perfmodel.validation._case_rows import Case
from perfmodel.validation._completions import Completion, completions, thinned, with_open_choices
from perfmodel.validation._priors import choice_priors
from perfmodel.validation._row_cells import Row, text

MOST_MEMORY: Final = 12
"""Completions that differ in memory and are timed."""
MOST_TIMED: Final = 16
"""Completions that are timed."""
UNLIKELY_TO_FIT: Final = 0.1
"""Probability to fit below which a run that fitted contradicts its description, which is said."""
_RAN_OUT: Final = ("oom", "oom_or_crash")
_NOTICEABLE: Final = 0.005
"""Relative change of the step time below which an open choice is not worth a figure."""


@dataclass(frozen=True, eq=False)
class RunPrediction:
    """What is predicted of a described run."""

    case: Case
    """The completion that stands for the run: the likeliest one."""
    prediction: Prediction
    """Of `case`."""
    step_time_s: float
    """Median of the mixture."""
    step_time_lo_s: float
    """Its 5 % quantile."""
    step_time_hi_s: float
    """Its 95 % quantile."""
    memory_counted_bytes: dict[str, float]
    """Weighted median peak by what counts it (`Prediction.memory_counted_bytes`)."""
    fits: bool
    """Whether the completions that fit weigh more than the others, a priori."""
    fits_probability: float
    """Of the description, before it is known whether the run fitted."""
    effects: tuple[ChoiceEffect, ...]
    """Of the open choices on the step time, the largest first."""
    assumed: tuple[str, ...]
    """What the description leaves open, with its effect where it has one; the largest first. Contradictions last."""
    completions: tuple[Case, ...]
    weights: Float[np.ndarray, " completions"]
    """Posterior probabilities of `completions`."""

    @property
    def open_deviation(self) -> float:
        """Standard deviation of the log step time between completions."""
        return float(sum(effect.variance for effect in self.effects) ** 0.5)


@dataclass(frozen=True, eq=False)
class _Weighed:
    """A completion with what is known of its memory."""

    completion: Completion
    problem: StepProblem
    can_fit: float
    """Probability that what it needs fits, fragmentation aside: an allocator gives back what it loses between tensors
    before it gives up, so this is what a run that ran tells."""
    fits_probability: float
    """As `Prediction.fits_probability`."""


def predict_run(
    row: Row, calibration: Path | None = None, site: Site | None = None, framework: Framework | None = None
) -> RunPrediction:
    """Predict the run that a row describes.

    Args:
        row: cells of one run, as `validate cases` reads them.
        calibration: directory made by `perfmodel fit`.
        site: constants of the place, which also say what source the priors are learned without.
        framework: instead of the row's.

    Raises:
        PerfModelError: the row cannot be read, or none of its completions can be laid out.
    """
    site = site or Site()
    priors = choice_priors(site.left_out)
    found, _ = completions(row, framework, priors)
    weighed, refused = _weighed(found, calibration, site)
    if not weighed:
        raise refused[0]
    prior = np.array([each.completion.prior for each in weighed])
    prior = prior / prior.sum()
    # Rounding may carry a sum of probabilities past 1.
    fits_probability = min(1.0, float(prior @ np.array([each.fits_probability for each in weighed])))

    # Completions that cannot have fitted vanish, those that hardly fit lose weight.
    ran_out = text(row, "status") in _RAN_OUT
    can_fit = np.array([1.0 if ran_out else each.can_fit for each in weighed])
    posterior = posterior_weights(prior, can_fit)
    likely = [replace(each.completion, prior=weight) for each, weight in zip(weighed, posterior.tolist(), strict=True)]
    timed = with_open_choices(
        thinned([each for each in likely if each.prior > 0], MOST_MEMORY), row, priors, takes_memory=False,
        most=MOST_TIMED,
    )  # fmt: skip
    cases, predictions = [], []
    for completion in timed:
        case = completion.case
        problem = step_problem(case.model, case.cluster, case.job, calibration, case.framework, site)
        cases.append(case)
        predictions.append(explain(problem, case.layout))
    weight = np.array([each.prior for each in timed])

    mixture = LogNormalMixture(
        weight=weight,
        median=np.array([each.step_time_s for each in predictions]),
        lo=np.array([each.step_time_lo_s for each in predictions]),
        hi=np.array([each.step_time_hi_s for each in predictions]),
    )
    step_s = mixture.quantile(0.5)
    effects = choice_effects(weight, mixture.median, [each.chosen for each in timed], step_s)
    chosen = int(np.argmax(weight))
    return RunPrediction(
        case=cases[chosen],
        prediction=predictions[chosen],
        step_time_s=step_s,
        step_time_lo_s=mixture.quantile(0.05),
        step_time_hi_s=mixture.quantile(0.95),
        memory_counted_bytes=_median_peaks(predictions, weight),
        fits=predictions[0].fits if len(weighed) == 1 else fits_probability >= 0.5,
        fits_probability=fits_probability,
        effects=tuple(effects),
        assumed=(
            *_assumed(cases, effects),
            *cases[chosen].contradictions,
            *_memory_contradiction(weighed, can_fit, prior, ran_out),
        ),
        completions=tuple(cases),
        weights=weight,
    )


def _weighed(
    found: list[Completion], calibration: Path | None, site: Site
) -> tuple[list[_Weighed], list[PerfModelError]]:
    """The completions that can be laid out, with their memory, and why others cannot."""
    weighed: list[_Weighed] = []
    refused: list[PerfModelError] = []
    for completion in found:
        case = completion.case
        try:
            problem = step_problem(case.model, case.cluster, case.job, calibration, case.framework, site)
            memory = needed_memory(problem, case.layout)
            devices = rank_devices(problem, case.layout)
            spread = site.memory_spread()
            needed = max(rank.peak / device.memory_bytes for rank, device in zip(memory, devices, strict=True))
            shown = fullness(problem, case.layout, memory)
        except PerfModelError as error:
            refused.append(error)
            continue
        weighed.append(_Weighed(completion, problem, spread.probability(needed, 1.0), spread.probability(shown, 1.0)))
    return weighed, refused


def _median_peaks(predictions: list[Prediction], weight: Float[np.ndarray, " completions"]) -> dict[str, float]:
    counters: tuple[str, ...] = tuple(predictions[0].memory_counted_bytes)
    found = {}
    for counter in counters:
        peaks = np.array([each.memory_counted_bytes[counter] for each in predictions])
        found[counter] = weighted_median(peaks, weight)
    return found


def _assumed(cases: list[Case], effects: list[ChoiceEffect]) -> list[str]:
    """Names of what was open, those that move the step time first, with figures."""
    by_name = {effect.name: effect for effect in effects}
    names = list(dict.fromkeys([effect.name for effect in effects] + [name for case in cases for name in case.assumed]))
    found = []
    for name in names:
        effect = by_name.get(name)
        moves = effect is not None and max(abs(effect.lowest), abs(effect.highest)) >= _NOTICEABLE
        found.append(effect.text if effect is not None and moves else name)
    return found


def _memory_contradiction(
    weighed: list[_Weighed], can_fit: Float[np.ndarray, " n"], prior: Float[np.ndarray, " n"], ran_out: bool
) -> list[str]:
    """What in the description cannot be, in words: a run that ran, but is not predicted to have fitted."""
    likeliest_fit = float(prior @ can_fit)
    if ran_out or likeliest_fit >= UNLIKELY_TO_FIT:
        return []
    best = max(weighed, key=lambda each: each.can_fit)
    case = best.completion.case
    memory = needed_memory(best.problem, case.layout)
    peak, capacity = max(rank.peak for rank in memory), case.cluster.device.memory_bytes
    return [f"memory: predicted to need {peak / GIB:.0f} of {capacity / GIB:.0f} GiB although the run fitted"]
