"""Mixtures of log-normal step times: weights, quantiles, and effects of open choices.

A run that leaves choices open has several completions. Each completion has a prior weight, a
probability that it fits in memory, and a step time with a 90 % interval of its own. The run's step
time is the mixture of the completions.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, pi, sqrt
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import shorten_reprs
from perfmodel.normal import normal_cdf
from perfmodel.units import span

_GAUSS_95: Final = 1.6448536269514722
"""95 % quantile of the normal distribution."""
_BISECTIONS: Final = 80
"""Bisection steps for a quantile, more than a double has digits."""
_NOTICEABLE: Final = 0.05
"""Posterior weight from which a value of a choice counts in the choice's range."""


def posterior_weights(
    prior: Float[np.ndarray, " completions"], likelihood: Float[np.ndarray, " completions"]
) -> Float[np.ndarray, " completions"]:
    """Weights proportional to prior times likelihood, which sum to 1.

    If every likelihood is 0, the evidence contradicts all completions and the prior is returned.
    """
    weight = prior * likelihood
    if weight.sum() <= 0:
        weight = np.asarray(prior, float)
    return weight / weight.sum()


def fits_after_tries(
    weight: Float[np.ndarray, " completions"],
    fits: Float[np.ndarray, " completions"],
    group_of: Sequence[Hashable],
    tries: int,
) -> float:
    """Probability that one of the first completions that somebody tries fits.

    The uncertainty of memory is common to all completions: the smaller the unknown part of the
    need, the more of them fit. If completions with a share F of a group's weight fit, at least one
    of n tries fits with probability 1 - (1 - F) ** n.

    Args:
        weight: weights of the completions, which sum to 1.
        fits: probability of each to fit.
        group_of: group of every completion: settings that the user who runs the job cannot choose.
        tries: number of completions of a group that are tried; with 1 the answer is the mean over
            completions.
    """
    total = 0.0
    for group in dict.fromkeys(group_of):
        inside = np.array([member == group for member in group_of])
        group_weight = float(weight[inside].sum())
        if group_weight <= 0:
            continue

        # From the completion that hardly fits to the one that surely does: between two of them, all
        # from the second on fit.
        order = np.argsort(fits[inside], kind="stable")
        thresholds = fits[inside][order]
        fitting_share = np.cumsum(weight[inside][order][::-1])[::-1] / group_weight
        steps = np.diff(thresholds, prepend=0.0)
        total += group_weight * float(steps @ (1 - np.maximum(1 - fitting_share, 0.0) ** tries))
    # Rounding may carry a sum of probabilities past 1.
    return min(1.0, total)


@dataclass(frozen=True)
class Tuning:
    """Preference for faster completions, as exponents of the step time; 0 for none."""

    choices: float = 0.0
    """Exponent between completions that the operator of the job chooses from, such as layouts."""
    sites: float = 0.0
    """Exponent between groups of completions with different surroundings, such as the network: jobs
    are run, and their times are reported, where they run well."""


def tuned_weights(
    weight: Float[np.ndarray, " completions"],
    time: Float[np.ndarray, " completions"],
    group_of: Sequence[Hashable],
    tuning: Tuning,
) -> Float[np.ndarray, " completions"]:
    """Weights that prefer faster completions, by a negative power of the step time.

    A nested logit model of discrete choice (McFadden 1978): times divide the weight of a group
    among its completions, and mean times divide all weight among groups.

    Args:
        weight: weights of the completions, which sum to 1.
        time: step time of every completion.
        group_of: group of every completion: settings that the user who runs the job cannot choose.
        tuning: the exponents inside groups and between them.
    """
    groups = []
    for group in dict.fromkeys(group_of):
        groups.append(np.array([member == group for member in group_of]))
    groups = [inside for inside in groups if weight[inside].sum() > 0]
    tuned = np.zeros(len(weight))
    group_weights, group_log_times = [], []
    for inside in groups:
        # Relative to the fastest of the group, so that no power of a time overflows.
        preferred = weight[inside] * (time[inside] / time[inside].min()) ** -tuning.choices
        tuned[inside] = preferred / preferred.sum()
        group_weights.append(weight[inside].sum())
        group_log_times.append(tuned[inside] @ np.log(time[inside]))
    log_time = np.array(group_log_times)
    group_weight = np.array(group_weights) * np.exp(-tuning.sites * (log_time - log_time.min()))
    for inside, total in zip(groups, group_weight / group_weight.sum(), strict=True):
        tuned[inside] *= total
    return tuned


@dataclass(frozen=True, eq=False)
class LogNormalMixture:
    """A mixture of log-normals, each with its own width below and above its median."""

    weight: Float[np.ndarray, " components"]
    """Weight of every component; they sum to 1."""
    median: Float[np.ndarray, " components"]
    """Median of every component."""
    lo: Float[np.ndarray, " components"]
    """5 % quantile of every component."""
    hi: Float[np.ndarray, " components"]
    """95 % quantile of every component."""

    def below(self, value: float) -> float:
        """Probability that the quantity is smaller than `value`."""
        distance, deviation = self._distances(value)
        return float(self.weight @ normal_cdf(distance / deviation))

    def density(self, value: float) -> float:
        """Probability density of the quantity's logarithm at log(`value`)."""
        distance, deviation = self._distances(value)
        components = np.exp(-0.5 * (distance / deviation) ** 2) / (deviation * sqrt(2 * pi))
        return float(self.weight @ components)

    def _distances(
        self, value: float
    ) -> tuple[Float[np.ndarray, " components"], Float[np.ndarray, " components"]]:
        """Distance of a value's log from each median, and the standard deviation on that side."""
        distance = log(value) - np.log(self.median)
        # A component's lower end may be cut off at what its kernels take, so both sides have their
        # own deviation.
        lower_sd = np.log(self.median / self.lo) / _GAUSS_95
        upper_sd = np.log(self.hi / self.median) / _GAUSS_95
        return distance, np.maximum(np.where(distance < 0, lower_sd, upper_sd), 1e-12)

    def quantile(self, share: float) -> float:
        """The quantile of the mixture at a share, by bisection in the logarithm.

        Args:
            share: quantile from 0.05 to 0.95. The ends of the components then bracket the answer.
        """
        # With one component these are its own figures to the last digit, which bisection would not
        # give.
        if len(self.weight) == 1:
            exact = {0.05: self.lo, 0.5: self.median, 0.95: self.hi}
            if share in exact:
                return float(exact[share][0])
        lower = log(self.lo.min())
        upper = log(self.hi.max())
        for _ in range(_BISECTIONS):
            middle = 0.5 * (lower + upper)
            if self.below(exp(middle)) < share:
                lower = middle
            else:
                upper = middle
        return exp(0.5 * (lower + upper))


def weighted_median(values: Float[np.ndarray, " n"], weight: Float[np.ndarray, " n"]) -> float:
    """The smallest of the values at or below which half of the weight lies."""
    order = np.argsort(values, kind="stable")
    cumulated = np.cumsum(weight[order])
    # Rounding of the sum must not pass over a value at exactly one half.
    middle = int(np.searchsorted(cumulated, 0.5 * cumulated[-1] * (1 - 1e-12)))
    return float(values[order[middle]])


@dataclass(frozen=True)
class ChoiceEffect:
    """The effect of one open choice on the step time."""

    name: str
    """Name of the choice."""
    variance: float
    """Variance of the mean log step time between the values of the choice."""
    lowest: float
    """Step time with the fastest value, relative to the answer, minus 1."""
    highest: float
    """Step time with the slowest value, relative to the answer, minus 1."""

    @property
    def text(self) -> str:
        """The effect in words, such as `recompute (-12% to +18%)`."""
        return f"{self.name} ({span(f'{self.lowest:+.0%}', f'{self.highest:+.0%}')})"


def choice_effects(
    weight: Float[np.ndarray, " completions"],
    median: Float[np.ndarray, " completions"],
    chosen: Sequence[Mapping[str, str]],
    answer: float,
) -> list[ChoiceEffect]:
    """Effects of the open choices, the largest first.

    Args:
        weight: weights of the completions, which sum to 1.
        median: step times of the completions.
        chosen: value of each open choice by name, of every completion.
        answer: step time that effects are relative to.
    """
    log_time = np.log(median)
    overall = float(weight @ log_time)
    names: dict[str, None] = {}
    for values in chosen:
        names |= dict.fromkeys(values)

    # The variance of log step time over completions is, for every choice, the variance between its
    # values and the mean variance inside them. Choices that are independent of one another and
    # multiply the time add up to all of it.
    effects = []
    for name in names:
        labels = np.array([values.get(name, "") for values in chosen])
        variance = 0.0
        means = []
        for label in dict.fromkeys(labels.tolist()):
            share = float(weight[labels == label].sum())
            if share <= 0:
                continue
            mean = float(weight[labels == label] @ log_time[labels == label]) / share
            variance += share * (mean - overall) ** 2
            if share >= _NOTICEABLE:
                means.append(mean)
        means = means or [overall]
        effects.append(
            ChoiceEffect(name, variance, exp(min(means)) / answer - 1, exp(max(means)) / answer - 1)
        )
    return sorted(effects, key=lambda effect: -effect.variance)


def representatives(
    weight: Float[np.ndarray, " n"], limit: int
) -> tuple[Int[np.ndarray, " kept"], Float[np.ndarray, " kept"]]:
    """Indices of at most `limit` representative items, and their new weights.

    Nothing is random: the same weights give the same items (after Fearnhead and Clifford, J. R.
    Stat. Soc. B 65, 2003).
    """
    share = np.asarray(weight, float) / np.sum(weight)
    if len(share) <= limit:
        return np.arange(len(share)), share

    # Items that weigh at least an equal share are kept with their own weight, and the heaviest item
    # always is.
    heavy = share >= 1 / limit
    heavy[np.argmax(share)] = True
    light = np.flatnonzero(~heavy)
    draws = limit - int(heavy.sum())
    new_share = np.where(heavy, share, 0.0)

    # Light items are thinned: each that is left has an equal part of what the light ones weigh
    # together, and is left in proportion to its weight. One point is taken from each of equal parts
    # of their cumulated weight, so that neighbours are not drawn together. Inside its part a point
    # lies where van der Corput's sequence puts it, so that an order with a period favours none of
    # its values.
    light_share = float(share[light].sum())
    if draws > 0 and light_share > 0:
        cumulated = np.cumsum(share[light]) / light_share
        points = (np.arange(draws) + _van_der_corput(draws)) / draws
        drawn = np.minimum(np.searchsorted(cumulated, points, side="right"), len(light) - 1)
        np.add.at(new_share, light[drawn], light_share / draws)
    index = np.flatnonzero(new_share)
    return index, new_share[index] / new_share[index].sum()


def _van_der_corput(count: int) -> Float[np.ndarray, " count"]:
    """The first numbers of the sequence in base 2, which fills the unit interval evenly in any
    order of reading."""
    sequence = np.zeros(count)
    for i in range(count):
        # The binary digits of the index, mirrored at the point.
        digit = 0.5
        number = i + 1
        while number:
            sequence[i] += digit * (number & 1)
            number >>= 1
            digit /= 2
    return sequence


shorten_reprs(__name__)
