"""Prior probabilities of open choices, from how published runs are made.

The prior is a table of counts. Published runs that state a choice are counted by team: in each
context, such as models of 2 to 15 billion parameters, a team counts once, divided over the values
that its runs have. So the 2,000 runs of one sweep weigh as much as one run of another team. A team
can be left out, for reports that predict its own runs.

A context with few teams says little, so probabilities are smoothed along a chain of contexts from
the most general to the most special: with n teams in a context, its counts weigh n and the context
before it weighs `strength` (Dirichlet smoothing; the strength of every choice maximises the
likelihood of the teams left out in turn).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.display import shorten_reprs
from perfmodel.files import parse_json, read_checked
from perfmodel.prediction.sites.constants import keys_share_a_team, team_key
from perfmodel.validation.unstated.mixture import Tuning

PRIORS_FILE: Final = "choice_priors.json"
"""File of priors, written by `validate/fit_priors.py`."""
EVERYWHERE: Final = ""
"""The context that every run is in."""
DEFAULT: Final = "as the framework's default"
"""Name of the table that counts how often a stated choice is its framework's default."""

TeamCounts = Mapping[str, float]
"""Counts by team, or by teams joined by `+` that measured together."""
Counts = Mapping[str, Mapping[str, TeamCounts]]
"""Counts by context and value."""


@dataclass(frozen=True, eq=False)
class ChoicePriors:
    """Prior probabilities of choices, from counts of teams."""

    counts: Mapping[str, Counts]
    """Counts by choice. A choice named `NAME: as the framework's default` has the values `yes` and
    `no`."""
    strength: Mapping[str, float]
    """Number of teams that a context's parent counts as, by choice."""
    without: str = ""
    """Teams that are left out, joined by `+` (`perfmodel.prediction.sites.constants.team_key`)."""
    tuning: Mapping[str, Tuning] = field(default_factory=dict)
    """Preference for what is faster (`tuned_weights`), by scale of the run (`scale_of`), because
    expensive runs are tuned more. Scales that are missing are not tuned."""
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def probabilities(
        self,
        choice: str,
        contexts: Sequence[str],
        values: Sequence[str],
        default: str | None = None,
    ) -> Float[np.ndarray, " values"]:
        """Probabilities of values, which sum to 1.

        Args:
            choice: name of the choice.
            contexts: contexts from the most general to the most special. The last one is that of
                the framework.
            values: possible values. Counts of others are left out.
            default: the framework's default value, if that is known. Its prior probability is the
                share of stated choices that equal their framework's default; counts of this
                framework are added to it.
        """
        key = (choice, tuple(contexts), tuple(values), default)
        if key not in self._known:
            self._known[key] = self._smoothed(choice, contexts, values, default)
        return self._known[key]

    def _smoothed(
        self,
        choice: str,
        contexts: Sequence[str],
        values: Sequence[str],
        default: str | None,
    ) -> Float[np.ndarray, " values"]:
        """Return probabilities of values, smoothed from the most general context on."""
        strength = self.strength.get(choice, 1.0)

        # Start from equal chances, and blend in the counts of ever more special contexts.
        probability = np.full(len(values), 1.0 / len(values))
        for i, context in enumerate(contexts):
            # The framework's default is known even where few of its runs are. Counts of its own
            # runs come after it, and outweigh it as they grow.
            if i == len(contexts) - 1 and default in values:
                usual = np.array([float(value == default) for value in values])
                share = self._usual_share(choice)
                probability = share * usual + (1 - share) * probability
            counted = self._counted(choice, context, values)
            probability = (counted + strength * probability) / (counted.sum() + strength)
        return probability

    def _counted(
        self, choice: str, context: str, values: Sequence[str]
    ) -> Float[np.ndarray, " values"]:
        """Count the runs with each value in a context, without the left-out teams."""
        by_value = self.counts.get(choice, {}).get(context, {})
        totals = []
        for value in values:
            total = 0
            for team, count in by_value.get(value, {}).items():
                if not keys_share_a_team(team, self.without):
                    total += count
            totals.append(total)
        return np.array(totals)

    def _usual_share(self, choice: str) -> float:
        """Share of stated choices that are their framework's default; one half before any team is
        counted."""
        used, unused = self._counted(f"{choice}: {DEFAULT}", EVERYWHERE, ("yes", "no"))
        return float((used + 0.5) / (used + unused + 1.0))


@dataclass(frozen=True)
class Observation:
    """One stated choice of one run."""

    team: str
    """Team that published the run."""
    choice: str
    """Name of the choice."""
    contexts: tuple[str, ...]
    """Contexts of the run, from the most general to the most special."""
    value: str
    """Value that the run states."""


def count_teams(
    observations: Iterable[Observation],
) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Counts of teams by choice, context and value, as `ChoicePriors` takes them."""
    runs: dict[tuple[str, str, str], dict[str, float]] = {}
    for seen in observations:
        for context in seen.contexts:
            # A team's runs share one vote in each context, in proportion to their values.
            team_counts = runs.setdefault((seen.choice, context, seen.team), {})
            team_counts[seen.value] = team_counts.get(seen.value, 0.0) + 1.0
    counts: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for (choice, context, team), by_value in sorted(runs.items()):
        total = sum(by_value.values())
        for value, number in sorted(by_value.items()):
            teams = counts.setdefault(choice, {}).setdefault(context, {}).setdefault(value, {})
            teams[team] = round(number / total, 4)
    return counts


@lru_cache
def _shipped() -> dict[str, Any]:
    return parse_json(read_checked(files("perfmodel.validation"), PRIORS_FILE))


@lru_cache
def choice_priors(without: str = "") -> ChoicePriors:
    """Priors from both collections of published runs, without teams that `without` names."""
    shipped = _shipped()
    tunings = [Tuning(*exponents) for exponents in shipped["tunings"]]
    tuning = {
        scale: likeliest_tuning(tunings, log_likelihood, without)
        for scale, log_likelihood in shipped["log_likelihood"].items()
    }
    return ChoicePriors(shipped["counts"], shipped["strength"], without, tuning)


def likeliest_tuning(
    tunings: Sequence[Tuning], log_likelihood: Mapping[str, Sequence[float]], without: str
) -> Tuning:
    """The maximum-likelihood tuning for reported step times, without some teams.

    Args:
        tunings: tunings that were tried.
        log_likelihood: log likelihood of each source's reports under each tuning.
        without: teams that are left out, joined by `+`.
    """
    # Sums over sources, each of which stands for one mean, so that a source counts once.
    likelihoods = [
        values
        for source, values in log_likelihood.items()
        if not keys_share_a_team(team_key(source), without)
    ]
    return tunings[int(np.argmax(np.sum(likelihoods, axis=0)))] if likelihoods else Tuning()


shorten_reprs(__name__)
