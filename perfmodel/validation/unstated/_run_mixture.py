"""Predicts a described run as the mixture over its completions.

Every completion of the description (`_completions`) has a prior probability, learned from how
people run. A run that ended well has fitted into memory, so each completion is weighted by its
probability to fit: what cannot have fitted vanishes. A run that ran out of memory is not
conditioned on anything. People tune: the faster a completion is, the likelier (`tuned_weights`).
The step time is the median of the mixture of the completions' log-normal distributions, and the
interval its 5 % and 95 % quantiles.

Two probabilities to fit must not be mixed up. `fits_probability` is that of the description, before
the run is known to have fitted: it may be scored against whether runs fitted. Who is out of memory
tries other choices, where they are open. The weights of the mixture use that the run fitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.errors import PerfModelError
from perfmodel.prediction import Prediction, Site, StepProblem, explain, step_problem
from perfmodel.prediction.memory import fullness, needed_memory, rank_devices
from perfmodel.spec import Framework
from perfmodel.units import GIB
from perfmodel.validation.rows import Case, Row, framework_of
from perfmodel.validation.unstated._completions import (
    Completion,
    completions,
    open_choices,
    thinned,
    with_open_choices,
)
from perfmodel.validation.unstated._described_run import DescribedRun, RowRun
from perfmodel.validation.unstated._features import LARGEST_SCALE, scale_of
from perfmodel.validation.unstated.mixture import (
    ChoiceEffect,
    LogNormalMixture,
    Tuning,
    choice_effects,
    fits_after_tries,
    posterior_weights,
    tuned_weights,
    weighted_median,
)
from perfmodel.validation.unstated.priors import ChoicePriors, choice_priors

MOST_MEMORY: Final = 96
"""Most completions that differ in memory and are timed. People strongly prefer faster settings, so
that the few fastest decide: with 16 of them the answer for a run of an unnamed framework moved by a
third with the draw."""
MOST_TIMED: Final = 128
"""Most ways of completing a run that are predicted."""
UNLIKELY_TO_FIT: Final = 0.1
"""Probability of fitting below which a run that did fit contradicts its description; the result
then says so."""
TRIES: Final = 4
"""Assumed number of open choices that somebody tries until one fits. It cannot be fitted, because
nearly all published failures belong to one sweep, which states its choices."""
IMPOSSIBLE: Final = 1e-3
"""Probability of fitting at which the description of a run that did fit counts as fully
contradictory."""
HELD_BACK: Final = 0.05
"""Assumed share of published runs slowed by causes outside this model; without it a few of them
would dominate the estimate of tuning."""
HELD_BACK_DENSITY: Final = 0.2
"""Probability density of the log of their step times, uniform over a factor of 150."""
_NOTICEABLE: Final = 0.005
"""Relative change of the step time below which the figure of an open choice is not shown."""


@dataclass(frozen=True, eq=False)
class RunPrediction:
    """Step time and memory of a described run."""

    case: Case
    """The likeliest completion, which represents the run."""
    prediction: Prediction
    """Prediction of `case`."""
    step_time_s: float
    """Median of the mixture."""
    step_time_lo_s: float
    """5 % quantile of the step time."""
    step_time_hi_s: float
    """95 % quantile of the step time."""
    memory_counted_bytes: dict[str, float]
    """Weighted median peak by counter (`Prediction.memory_counted_bytes`)."""
    fits: bool
    """Whether the completions that fit have more prior weight than the others."""
    fits_probability: float
    """Probability of fitting before it is known whether the run fitted."""
    contradicts: float
    """Degree of contradiction in the description (`Site.contradictions`)."""
    effects: tuple[ChoiceEffect, ...]
    """Effects of the open choices on the step time, the largest first."""
    assumed: tuple[str, ...]
    """Assumptions about what the description leaves open, the largest effect first, and
    contradictions last."""
    completions: tuple[Case, ...]
    weights: Float[np.ndarray, " completions"]
    """Posterior probabilities of `completions`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the likeliest completion with the mixture's time and memory."""
        return self.prediction.to_dict() | {
            "step_time_s": self.step_time_s,
            "step_time_lo_s": self.step_time_lo_s,
            "step_time_hi_s": self.step_time_hi_s,
            "memory_counted_bytes": self.memory_counted_bytes,
            "fits": self.fits,
            "fits_probability": self.fits_probability,
            "assumed": list(self.assumed),
            "completions": len(self.completions),
            "open_choices": [vars(effect) for effect in self.effects],
        }

    @property
    def open_deviation(self) -> float:
        """Standard deviation of the log step time between completions."""
        return float(sum(effect.variance for effect in self.effects) ** 0.5)


@dataclass(frozen=True, eq=False)
class _Weighed:
    """A completion with its memory."""

    completion: Completion
    problem: StepProblem
    can_fit: float
    """Probability that the needed memory fits, fragmentation aside. An allocator frees fragmented
    memory before it fails, so a run that succeeded shows no more than this."""
    fits_probability: float
    """As `Prediction.fits_probability`."""


def predict_run(
    run: DescribedRun | Row,
    calibration: Path | None = None,
    site: Site | None = None,
    framework: Framework | None = None,
) -> RunPrediction:
    """Predict a partly described run as the mixture over its completions.

        predict_run(described_job("llama3-8b", "dgx-h100", devices=64, global_batch=256))

    Args:
        run: a job (`described_job`), or the cells of one run as `validate cases` reads them.
        calibration: directory made by `perfmodel fit`.
        site: constants of the place, which also say what source the priors are learned without.
        framework: instead of the run's.

    Raises:
        PerfModelError: the run cannot be read, or none of its completions can be laid out.
    """
    run = run if isinstance(run, DescribedRun) else RowRun(run)
    site = site or Site()
    priors = choice_priors(site.left_out)

    # All completions timed, then weighted by how people tune machines of this size.
    timed = _timed(run, calibration, site, framework, priors)
    mixture = timed.mixture(priors.tuning.get(timed.scale, Tuning()))
    weight = mixture.weight
    step_s = mixture.quantile(0.5)
    effects = choice_effects(
        weight, mixture.median, [completion.chosen for completion in timed.completions], step_s
    )
    cases = [completion.case for completion in timed.completions]
    likeliest = int(np.argmax(weight))
    fits_probability = timed.memory.fits_probability

    # A run that leaves nothing open fits as its only completion does, with the margin of memory
    # that its framework has; a mixture by the probability.
    fits = fits_probability >= 0.5
    if len(timed.memory.completions) == 1:
        fits = timed.predictions[0].fits
    return RunPrediction(
        case=cases[likeliest],
        prediction=timed.predictions[likeliest],
        step_time_s=step_s,
        step_time_lo_s=mixture.quantile(0.05),
        step_time_hi_s=mixture.quantile(0.95),
        memory_counted_bytes=_median_peaks(timed.predictions, weight),
        fits=fits,
        fits_probability=fits_probability,
        contradicts=timed.memory.contradicts(cases[likeliest]),
        effects=tuple(effects),
        assumed=(
            *_assumed(cases, effects),
            *cases[likeliest].contradictions,
            *timed.memory.contradiction,
        ),
        completions=tuple(cases),
        weights=weight,
    )


def name_open_choices(run: DescribedRun) -> list[str]:
    """Names of a run's open choices, under its framework or `generic`.

    Raises:
        PerfModelError: the run cannot be read.
    """
    framework, _ = framework_of(run.framework_name)
    return open_choices(run, framework, choice_priors())


@dataclass(frozen=True, eq=False)
class _TimedRun:
    """Completions of a run with their step times."""

    completions: list[Completion]
    predictions: list[Prediction]
    weight: Float[np.ndarray, " completions"]
    """Weights of the completions given that they fitted, before the preference for faster ones."""
    memory: "_MemoryOfRun"
    competes: bool
    """Whether the run was submitted to a competition."""

    @property
    def scale(self) -> str:
        """Class of the machine by its devices, which determines how much people tune the run.

        People tune the more, the more a run costs. A submission to a competition is tuned as the
        dearest runs are, whatever its size.
        """
        if self.competes:
            return LARGEST_SCALE
        case = self.completions[0].case
        return scale_of(case.layout.devices)

    def mixture(self, tuning: Tuning) -> LogNormalMixture:
        """Mixture of the step times."""
        times_s = np.array([prediction.step_time_s for prediction in self.predictions])
        prior_given_fit = [completion.untunable for completion in self.completions]
        return LogNormalMixture(
            weight=tuned_weights(self.weight, times_s, prior_given_fit, tuning),
            median=times_s,
            lo=np.array([prediction.step_time_lo_s for prediction in self.predictions]),
            hi=np.array([prediction.step_time_hi_s for prediction in self.predictions]),
        )


def _timed(
    run: DescribedRun,
    calibration: Path | None,
    site: Site,
    framework: Framework | None,
    priors: ChoicePriors,
) -> _TimedRun:
    """Representative completions of a run, with their step times.

    Raises:
        PerfModelError: as `predict_run`.
    """
    # First fill in the choices that affect memory, which decide which completions can have fitted.
    # The others are filled in only for those that remain.
    candidates, _ = completions(run, framework, priors)

    # A run that ran, or is meant to run, fits into memory, so completions that need too much are
    # ruled out. If the run is known to have run out of memory, all completions stay.
    memory = _memory_of_run(candidates, calibration, site, ran_out=run.ran_out_of_memory)
    likely = []
    for weighed, weight in zip(memory.completions, memory.posterior.tolist(), strict=True):
        if weight > 0:
            likely.append(replace(weighed.completion, prior=weight))
    chosen = with_open_choices(
        thinned(likely, MOST_MEMORY), run.year, priors, takes_memory=False, limit=MOST_TIMED
    )
    predictions = []
    for completion in chosen:
        # Contradictions in a description widen the interval.
        case = completion.case
        case_site = replace(site, contradictions=memory.contradicts(case))
        problem = step_problem(
            case.model, case.cluster, case.job, calibration, case.framework, case_site
        )
        predictions.append(explain(problem, case.layout))
    weight = np.array([completion.prior for completion in chosen])
    return _TimedRun(chosen, predictions, weight, memory, competes=run.competes)


def log_likelihoods(
    run: DescribedRun,
    measured_s: float,
    tunings: Sequence[Tuning],
    site: Site,
    priors: ChoicePriors,
) -> tuple[str, Float[np.ndarray, " tunings"]] | None:
    """A run's scale, and log-likelihood of its step under each tuning; None if none is open.

    Raises:
        PerfModelError: as `predict_run`.
    """
    timed = _timed(run, None, site, None, priors)
    if len(timed.completions) < 2:
        return None

    # A run may be held back by something that no completion has. A flat density on top keeps it
    # from deciding the tuning alone.
    densities = np.array([timed.mixture(tuning).density(measured_s) for tuning in tunings])
    return timed.scale, np.log((1 - HELD_BACK) * densities + HELD_BACK * HELD_BACK_DENSITY)


# --- memory
# ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _MemoryOfRun:
    """Memory of a run over its completions."""

    completions: list["_Weighed"]
    """Completions that can be laid out."""
    posterior: Float[np.ndarray, " completions"]
    """Posterior probabilities of the completions if the run fitted, else their priors."""
    fits_probability: float
    """Probability that the description fits, before it is known whether the run did."""
    surprise: float
    """Degree to which the success of the run contradicts its description: 0 for a probability of
    fitting of `UNLIKELY_TO_FIT` or more, 1 at `IMPOSSIBLE`, linear in the logarithm."""
    contradiction: tuple[str, ...]
    """A sentence if a run that fitted is predicted not to fit."""

    def contradicts(self, case: Case) -> float:
        """Degree of contradiction in the description of the run, under one of its completions."""
        return 1.0 if case.contradictions else self.surprise


def _memory_of_run(
    candidates: list[Completion], calibration: Path | None, site: Site, *, ran_out: bool
) -> _MemoryOfRun:
    """Weight completions by their probability of fitting.

    Raises:
        PerfModelError: none can be laid out.
    """
    weighed, refused = _weighed(candidates, calibration, site)
    if not weighed:
        raise refused[0]
    prior = np.array([candidate.completion.prior for candidate in weighed])
    prior = prior / prior.sum()
    group_of = [candidate.completion.untunable for candidate in weighed]
    fits_probabilities = np.array([candidate.fits_probability for candidate in weighed])
    fits_probability = fits_after_tries(prior, fits_probabilities, group_of, TRIES)
    # Completions that cannot have fitted vanish, those that hardly fit lose weight.
    can_fit = np.array([1.0 if ran_out else candidate.can_fit for candidate in weighed])
    could_fit = fits_after_tries(prior, can_fit, group_of, TRIES)
    likely = min(fits_probability, could_fit) >= UNLIKELY_TO_FIT
    return _MemoryOfRun(
        completions=weighed,
        posterior=posterior_weights(prior, can_fit),
        fits_probability=fits_probability,
        surprise=_surprise(could_fit),
        contradiction=() if likely or ran_out else (_memory_contradiction(weighed),),
    )


def _surprise(could_fit: float) -> float:
    """Surprise at a run's fitting in memory, given its predicted probability to fit."""
    beyond = log(UNLIKELY_TO_FIT / max(could_fit, IMPOSSIBLE)) / log(UNLIKELY_TO_FIT / IMPOSSIBLE)
    return max(0.0, beyond)


def _weighed(
    candidates: list[Completion], calibration: Path | None, site: Site
) -> tuple[list[_Weighed], list[PerfModelError]]:
    """The completions that can be laid out, with their memory, and why others cannot."""
    weighed: list[_Weighed] = []
    refused: list[PerfModelError] = []
    for completion in candidates:
        case = completion.case
        try:
            problem = step_problem(
                case.model, case.cluster, case.job, calibration, case.framework, site
            )

            # Two questions: whether the tensors fit once the allocator has given back all it can,
            # and whether they fit with its usual losses.
            memory = needed_memory(problem, case.layout)
            devices = rank_devices(problem, case.layout)
            spread = site.memory_spread()
            needed = max(
                rank.peak / device.memory_bytes
                for rank, device in zip(memory, devices, strict=True)
            )
            shown = fullness(problem, case.layout, memory)
        except PerfModelError as error:
            refused.append(error)
            continue
        weighed.append(
            _Weighed(
                completion,
                problem,
                spread.probability(needed, 1.0),
                spread.probability(shown, 1.0),
            )
        )
    return weighed, refused


def _median_peaks(
    predictions: list[Prediction], weight: Float[np.ndarray, " completions"]
) -> dict[str, float]:
    """Weighted medians of the completions' peak memory, by what each peak counts."""
    counters: tuple[str, ...] = tuple(predictions[0].memory_counted_bytes)
    medians = {}
    for counter in counters:
        peaks = np.array([prediction.memory_counted_bytes[counter] for prediction in predictions])
        medians[counter] = weighted_median(peaks, weight)
    return medians


def _assumed(cases: list[Case], effects: list[ChoiceEffect]) -> list[str]:
    """Names of the open settings with figures, the largest effect on the step first."""
    by_name = {effect.name: effect for effect in effects}
    names = [effect.name for effect in effects]
    for case in cases:
        names += case.assumed
    # Effects come first, the largest before the others; a setting that several cases assume is
    # named once.
    names = list(dict.fromkeys(names))
    sentences = []
    for name in names:
        effect = by_name.get(name)
        moves = effect is not None and max(abs(effect.lowest), abs(effect.highest)) >= _NOTICEABLE
        sentence = effect.text if effect is not None and moves else name
        sentences.append(sentence)
    return sentences


def _memory_contradiction(weighed: list[_Weighed]) -> str:
    """A sentence if even the best-fitting completion of a successful run hardly fits, which
    contradicts its description."""
    best = max(weighed, key=lambda candidate: candidate.can_fit)
    case = best.completion.case
    memory = needed_memory(best.problem, case.layout)
    fullest = max(memory, key=lambda rank: rank.peak)
    capacity = case.cluster.device.memory_bytes
    shown = fullness(best.problem, case.layout, memory) * capacity

    # The largest category shows where the description or the prediction is wrong.
    by_category = {name: n_bytes for name, n_bytes in fullest.to_dict().items() if name != "peak"}
    largest = max(by_category, key=by_category.__getitem__)
    return (
        f"memory: predicted to need {fullest.peak / GIB:.0f} GiB ({shown / GIB:.0f} including allocator losses) of "
        f"{capacity / GIB:.0f} GiB, although the run fitted; the largest part, {largest}, takes "
        f"{by_category[largest] / GIB:.0f} GiB"
    )
