"""The result of a search, with a proof of how close to optimal it is."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import printed_text, search_html
from perfmodel.errors import Rejection
from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.planning.layouts._impossible import Impossible
from perfmodel.planning.layouts._improve import Improvement
from perfmodel.planning.layouts._objective import Objective
from perfmodel.planning.layouts._robust import Robustness
from perfmodel.planning.layouts._space import SearchSpace
from perfmodel.prediction import Prediction
from perfmodel.spec import Layout
from perfmodel.units import MIN_FIT

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class Beyond:
    """The gain from a framework that could run every layout of the space."""

    layout: Layout
    """The best of even stages, which the framework cannot run."""
    notation: str
    """The layout in the notation of the framework."""
    value: float
    """Value of the search's objective."""
    step_time_s: float
    gain: float
    """Gain in the objective relative to the best layout that the framework can run; infinite if it
    can run none."""
    cannot_run: tuple[str, ...]
    """Sentences about the parts of the layout that the framework cannot run."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "layout": self.notation,
            "objective_value": self.value,
            "step_time_s": self.step_time_s,
            "gain": _finite(self.gain),
            "cannot_run": list(self.cannot_run),
        }


@dataclass(frozen=True, kw_only=True)
class EvaluatedLayouts:
    """Every layout of the space, with the step times of those that were fully evaluated."""

    candidates: Candidates
    """Every layout with its memory and bound."""
    number: Int[np.ndarray, " evaluated"]
    """Numbers of the evaluated layouts among the candidates, in the order of `step_time_s`."""
    step_time_s: Float[np.ndarray, " evaluated"]
    """Step times of all evaluated layouts, the best first (ascending, unless the objective is
    another)."""
    alike: int = 0
    """Evaluated layouts that are equivalent to a better one (see `Candidates.distinct`)."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The layout to try first."""

    prediction: Prediction | None = None
    """The best layout that fits with a probability of at least `min_fit`, which may be slower than
    all layouts shown; if there is none, the layout most likely to fit; None without any layout."""
    value: float = float("nan")
    """The objective of the layout."""
    min_fit: float = MIN_FIT
    """Probability of fitting into memory that a layout needs to be recommended."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a search."""

    complete: bool = True
    """False if the search was interrupted; it then has the best layouts so far."""
    unresolved: int = 0
    """Number of layouts not evaluated because of an interrupt that may still be better than the
    best found, by their bounds."""
    unsearched: tuple[int, ...] = ()
    """Global batches that were not searched because of an interrupt."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The ranked layouts, and the reasons why others were rejected."""

    evaluated: int
    """Number of layouts that were fully evaluated."""
    feasible: int
    """Number of layouts that fit into memory. The bounds of those that were not evaluated are above
    the best step."""
    seconds: float
    layouts: tuple[Prediction, ...]
    """Explained layouts, the best first."""
    objective: str = "step_time"
    """Name of the objective that is minimised or maximised (`OBJECTIVES`), or its formula."""
    values: tuple[float, ...] = ()
    """The objective of each layout."""
    quantities: tuple[dict[str, float], ...] = ()
    """Other quantities of each layout: those that objective and constraints name, and money and
    energy if the tariff has their prices."""
    lower_bound: float = 0.0
    """Bound on the objective: no layout in the space has a better value."""
    constraints: tuple[str, ...] = ()
    framework: str = "generic"
    """Framework that all tried layouts run on, unless the space says `any_framework`."""
    beyond: Beyond | None = None
    """The best layout that the framework cannot run, if it beats every layout that the framework
    can run."""
    impossible: Impossible | None = None
    """Reason why no layout exists, with changes that would make one possible."""
    recommendation: Recommendation = field(default=Recommendation(), repr=False)
    """The layout to try first."""
    robust: str = ""
    """Name of the robust order that ranks the layouts instead of the objective; empty if none
    does."""
    robustness: Robustness | None = None
    """How sure the ranking is, given the errors of predictions."""
    method: str = "enumerate"
    """Method of the search."""
    why: str = ""
    """Reason for the method."""
    improvements: tuple[Improvement, ...] = ()
    """Layouts with uneven stages, each with its gain and the largest distance from the best
    division."""
    bounds_s: tuple[float, ...]
    """A lower bound on the step time of each layout, from its passes and collectives alone."""
    rejections: dict[Rejection, int]
    """Number of combinations that are not ranked, by reason, the most frequent first."""
    evaluation: EvaluatedLayouts
    """All layouts, with the step times of those that were evaluated."""
    lower_bound_s: float
    """No layout of the space that fits is faster than this."""
    batches: "tuple[SearchResult, ...]" = ()
    """One search for each global batch, where several were tried; `evaluation` is that of the batch
    of the best layout."""
    progress: Progress = Progress()
    """How far the search came."""
    space: SearchSpace
    """Space that was searched; the result says nothing about layouts outside of it."""

    @property
    def complete(self) -> bool:
        """False if the search was interrupted; it then has the best layouts so far."""
        return self.progress.complete

    @property
    def rejected(self) -> dict[str, int]:
        """Number of rejected combinations by reason."""
        return {str(why): count for why, count in self.rejections.items()}

    @property
    def first_to_try(self) -> Prediction:
        """The layout to try first: the recommended one.

        Raises:
            IndexError: there is no layout.
        """
        recommended = self.recommendation.prediction
        return self.layouts[0] if recommended is None else recommended

    @property
    def riskier(self) -> Prediction | None:
        """The fastest layout, if it is not recommended because it may not fit."""
        if not self.layouts or self.layouts[0].layout == self.first_to_try.layout:
            return None
        return self.layouts[0]

    @property
    def gap(self) -> float:
        """Largest relative distance of the best layout found from the optimum of the space;
        infinite without a bound."""
        # A batch that was not searched could hold anything, and so could a search without any
        # layout.
        if self.progress.unsearched or not (self.layouts or self.complete):
            return np.inf
        return self._gap(self.values[0]) if self.layouts else 0.0

    def _gap(self, value: float) -> float:
        if value == self.lower_bound:
            return 0.0
        return abs(value - self.lower_bound) / abs(self.lower_bound) if self.lower_bound else np.inf

    @property
    def certificate(self) -> str:
        """`exact` if the best layout is proved to be the optimum of the space under this model;
        otherwise the weaker statement that is proved."""
        if not self.complete:
            return self._interrupted
        if self.layouts and self.layouts[0].kinds:
            if np.isinf(self.gap):
                return (
                    "the best order of kinds and division into stages that was found; others may be better by an "
                    "unknown amount"
                )
            return f"within {self.gap:.2%} of the best order of kinds and division into stages of any layout"

        # Enumeration is exact for even stages. A cut is proved only as far as its own certificate
        # goes.
        best = self.layouts[0].layout if self.layouts else None
        for improvement in self.improvements:
            if improvement.result.layout == best:
                gap = improvement.result.gap
                if np.isinf(gap):
                    return "exact for even stages; other uneven stages may be better by an unknown amount"
                return f"exact for even stages; the uneven stages are within {gap:.2%} of the best for this layout"
        if self.layouts and self.layouts[0].layout.partition is not None:
            return (
                f"exact for even stages; times are for the stages that {self.framework} chooses, which may "
                "not be optimal"
            )
        return "exact"

    @property
    def _interrupted(self) -> str:
        """The statement that is proved after an interrupt, in words."""
        progress = self.progress
        if progress.unsearched:
            batches = ", ".join(map(str, progress.unsearched))
            return f"interrupted: global batch {batches} was not searched"
        if not self.layouts:
            return (
                f"interrupted before any layout was evaluated: {self.objective} cannot be better than "
                f"{self.lower_bound:.4g}"
            )
        if not progress.unresolved:
            return (
                "interrupted: the first layout is proved to be the best with even stages; the order of the "
                "others is not proved"
            )
        not_evaluated = f"interrupted: {progress.unresolved:,} layouts were not evaluated"
        if np.isinf(self.gap):
            return f"{not_evaluated}; they may be better by an unknown amount"
        return (
            f"{not_evaluated}, and their {self.objective} cannot be better than {self.lower_bound:.4g}; the best "
            f"so far is within {self.gap:.2%} of the optimum"
        )

    @property
    def best(self) -> Prediction:
        """The fastest layout, even if it is unlikely to fit; `first_to_try` is the recommended one.

        Raises:
            IndexError: there is no layout.
        """
        return self.layouts[0]

    def __len__(self) -> int:
        return len(self.layouts)

    def __getitem__(self, place: int) -> Prediction:
        return self.layouts[place]

    def __str__(self) -> str:
        """Return what `perfmodel search` prints, without the suggested next command."""
        from perfmodel.planning.layouts._text import print_search

        return printed_text(lambda console: print_search(console, self))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are part of the command-line contract."""
        layouts = []
        columns = zip(self.layouts, self.bounds_s, self.values, self.quantities, strict=True)
        for place, (prediction, bound_s, value, quantities) in enumerate(columns):
            row = prediction.to_dict() | {
                "lower_bound_s": bound_s,
                "gap": _finite(self._gap(value)),
                "objective_value": value,
                "quantities": quantities,
            }
            if self.robustness:
                row |= self.robustness.figures_of(place)
            layouts.append(row)
        return {
            "evaluated": self.evaluated,
            "feasible": self.feasible,
            "seconds": self.seconds,
            "layouts": layouts,
            "rejected": self.rejected,
            "objective": self.objective,
            "constraints": list(self.constraints),
            "framework": self.framework,
            "beyond_framework": self.beyond and self.beyond.to_dict(),
            "lower_bound": _finite(self.lower_bound),
            "impossible": self.impossible and self.impossible.to_dict(),
            "min_fit": self.recommendation.min_fit,
            "recommended": self._recommended_dict(),
            "robust": self.robust,
            "probability_better": self.robustness.better.tolist() if self.robustness else [],
            "method": self.method,
            "why": self.why,
            "improvements": [improvement.to_dict() for improvement in self.improvements],
            "lower_bound_s": _finite(self.lower_bound_s),
            "gap": _finite(self.gap),
            "certificate": self.certificate,
            "complete": self.complete,
            "space": self.space.to_dict(),
            "unresolved": self.progress.unresolved,
            "unsearched": list(self.progress.unsearched),
            "alike": self.evaluation.alike,
        }

    def _recommended_dict(self) -> dict[str, Any] | None:
        recommendation = self.recommendation
        if recommendation.prediction is None:
            return None
        return recommendation.prediction.to_dict() | {"objective_value": recommendation.value}

    def to_frame(self) -> "pd.DataFrame":
        """One row per ranked layout, with its notation, its fields (`Layout.columns`), the figures
        of `Prediction` and `peak_memory_bytes`."""
        import pandas as pd

        rows = []
        for p in self.layouts:
            row = {
                "layout": p.layout_notation,
                "devices": p.devices,
                "global_batch": p.global_batch,
                "step_time_s": p.step_time_s,
                "step_time_lo_s": p.step_time_lo_s,
                "step_time_hi_s": p.step_time_hi_s,
                "mfu": p.mfu,
                "bubble_fraction": p.bubble_fraction,
                "tokens_per_s_per_device": p.tokens_per_s_per_device,
                "fits_probability": p.fits_probability,
                "peak_memory_bytes": p.memory_needed_bytes,
            }
            rows.append(row | p.layout.columns)
        return pd.DataFrame(rows)

    def ranking(self) -> list[tuple[Layout, float]]:
        """Every evaluated layout with even stages and its step time, in the order of the search."""
        evaluation = self.evaluation
        layouts = evaluation.candidates.layouts(evaluation.number)
        return list(zip(layouts, evaluation.step_time_s.tolist(), strict=True))

    def frame(self) -> "pd.DataFrame":
        """One row per layout that fits, with its fields, `peak_bytes`, `bound_s`, and `step_time_s`
        if evaluated."""
        evaluation = self.evaluation
        frame = evaluation.candidates.frame()
        step_s = np.full(len(evaluation.candidates.bound_s), np.nan)
        step_s[evaluation.number] = evaluation.step_time_s
        return frame.assign(step_time_s=step_s[frame["number"].to_numpy()])

    def _repr_html_(self) -> str:
        return search_html(self.to_dict())


def _finite(value: float) -> float | None:
    """The value for JSON, which has no infinity."""
    return value if np.isfinite(value) else None


def _recommended_of_batches(
    results: Sequence[SearchResult], objective: Objective
) -> SearchResult | None:
    """The batch with the best recommended layout among those that are likely to fit, or else with
    the layout most likely to fit."""

    def order(result: SearchResult) -> tuple[bool, float, float]:
        """Sort key of a batch's result: likely fits first, by value; the others by how likely."""
        # Batches with a layout that fits likely enough come first, by value; the others by how
        # likely theirs fits.
        probability = result.first_to_try.fits_probability
        fits = probability >= result.recommendation.min_fit
        return (
            not fits,
            0.0 if fits else -probability,
            objective.display_value(result.recommendation.value),
        )

    return min(
        (result for result in results if result.recommendation.prediction is not None),
        key=order,
        default=None,
    )


class _RankedOfBatch(NamedTuple):
    """A layout of one batch's result, among those of all batches; sorts as it is ranked."""

    value: float
    """Value of the objective, as it is minimised."""
    step_time_s: float
    result: int
    """Index of the result."""
    place: int
    """Place of the layout in that result's ranking, from 0."""


def best_of_batches(
    results: Sequence[SearchResult],
    batches: Sequence[int],
    objective: Objective,
    top: int,
) -> SearchResult:
    """Merge the results for several batches; the candidates are those of the best layout's batch.

    Batches after the last one found were not searched.
    """
    # Rank the layouts of all batches together, by value and then by step time.
    ranked: list[_RankedOfBatch] = []
    for result_number, result in enumerate(results):
        for place, layout in enumerate(result.layouts):
            value = objective.display_value(result.values[place])
            ranked.append(_RankedOfBatch(value, layout.step_time_s, result_number, place))
    best = sorted(ranked)[:top]
    recommended = _recommended_of_batches(results, objective)
    rejections: Counter[Rejection] = Counter()
    for result in results:
        rejections.update(result.rejections)

    def of_best(name: str) -> tuple:
        return tuple(getattr(results[entry.result], name)[entry.place] for entry in best)

    # `shown` is its own inverse, so that it turns shown values back into minimised ones, and the
    # least of these into a shown one.
    bounds = [objective.display_value(result.lower_bound) for result in results]
    best_batch_result = results[best[0].result if best else 0]
    if recommended:
        recommendation = recommended.recommendation
    else:
        recommendation = replace(
            best_batch_result.recommendation, prediction=None, value=float("nan")
        )

    # Without any layout the last batch that says why speaks for all.
    reasons = [result.impossible for result in results if result.impossible]
    return replace(
        best_batch_result,
        evaluated=sum(result.evaluated for result in results),
        feasible=sum(result.feasible for result in results),
        seconds=sum(result.seconds for result in results),
        layouts=of_best("layouts"),
        values=of_best("values"),
        quantities=of_best("quantities"),
        bounds_s=of_best("bounds_s"),
        rejections=dict(rejections.most_common()),
        lower_bound=objective.display_value(min(bounds)),
        lower_bound_s=min(result.lower_bound_s for result in results),
        progress=Progress(
            complete=all(result.complete for result in results) and len(results) == len(batches),
            unresolved=sum(result.progress.unresolved for result in results),
            unsearched=tuple(batches[len(results) :]),
        ),
        evaluation=replace(
            best_batch_result.evaluation, alike=sum(result.evaluation.alike for result in results)
        ),
        batches=tuple(results),
        robustness=None,
        recommendation=recommendation,
        impossible=reasons[-1] if reasons and not best else None,
    )
