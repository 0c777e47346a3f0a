"""Constants of an unknown site, from all published runs: clocks under load, and the spread of peak
memory.

What the sources show differs between sites and frameworks. So a constant is the median over teams,
including the tables' own 0 (for memory, where it is not a correction, the spread counts too). One
source cannot move it far, and a source can be left out of the constant that predicts its own rows.
"""

import tomllib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from math import erf, exp, inf, log, sqrt
from statistics import NormalDist, mean, median
from types import MappingProxyType
from typing import Any, Final

from perfmodel.display import shorten_reprs
from perfmodel.files import parse_json, read_checked

# --- teams
# ---------------------------------------------------------------------------------------------
#
# The teams behind published sources; runs that share a team are left out of a fit together.


Teams = frozenset[str]
TEAMS_FILE = "teams.toml"


@lru_cache
def team_patterns() -> Mapping[str, Teams]:
    """Teams by pattern of a source's name, in lower case; the first pattern that matches counts."""
    content = tomllib.loads((files("perfmodel.prediction.sites") / TEAMS_FILE).read_text())
    return MappingProxyType(
        {pattern.lower(): frozenset(teams) for pattern, teams in content["teams"].items()}
    )


@lru_cache
def kind_patterns() -> Mapping[str, tuple[str, ...]]:
    """Lower-case name patterns of sources by their kind: `reports_of_problems` and
    `competitions`."""
    content = tomllib.loads((files("perfmodel.prediction.sites") / TEAMS_FILE).read_text())
    patterns = {}
    for kind in ("reports_of_problems", "competitions"):
        patterns[kind] = tuple(pattern.lower() for pattern in content[kind])
    return MappingProxyType(patterns)


def reports_a_problem(source: str) -> bool:
    """Whether a source reports slow or failing runs, which are not typical."""
    return _is_of_kind(source, "reports_of_problems")


def is_competition(source: str) -> bool:
    """Whether a source is a benchmark to which teams submit the fastest run that they can make."""
    return _is_of_kind(source, "competitions")


def _is_of_kind(source: str, kind: str) -> bool:
    return any(fnmatchcase(source.lower(), pattern) for pattern in kind_patterns()[kind])


@lru_cache
def teams_of(source: str) -> Teams:
    """Teams that measured a source; an unlisted source is its own team."""
    name = source.lower()
    for pattern, teams in team_patterns().items():
        if fnmatchcase(name, pattern):
            return teams
    return frozenset({name})


def team_key(source: str) -> str:
    """Name of the teams of a source, the same for all sources with the same teams."""
    return "+".join(sorted(teams_of(source)))


def keys_share_a_team(key: str, other_key: str) -> bool:
    """Whether two results of `team_key` have a team in common; empty keys have none."""
    return bool(key and other_key and set(key.split("+")) & set(other_key.split("+")))


def share_a_team(source: str, other_source: str) -> bool:
    """Whether some team measured both sources; an empty name is not a source."""
    return bool(source and other_source and teams_of(source) & teams_of(other_source))


def source_of_submitter(source: str, submitter: str) -> str:
    """Name of the part of a source that a submitter measured.

    The rounds of a benchmark hold the runs of many submitters. Submitters that also have sources of
    their own are separate parts: `MLPerf Training v5.0 (NVIDIA)`. All others are one source.
    """
    if not submitter:
        return source
    name = f"{source} ({submitter})"
    return name if teams_of(name) not in (teams_of(source), {name.lower()}) else source


# --- constants
# -----------------------------------------------------------------------------------------


Sustained = tuple[tuple[str, float], ...]
"""(architecture, log of the time in training over the time alone)."""
Figures = Mapping[str, tuple[float, float]]
"""Median and median absolute deviation of log(measured / predicted) peak memory, by source."""
SUSTAINED_FILE: Final = "sustained.json"
"""File of clocks under load."""
MEMORY_FILE: Final = "memory.json"
"""File of measured over predicted peaks of memory."""
_NORMAL_MAD: Final = 1.4826
"""Standard deviation of a normal distribution divided by its median absolute deviation."""
_FEWEST: Final = 3
"""Fewest sources from which a spread between sources is estimated."""


def _fitted(name: str) -> Mapping[str, Any]:
    """Read a file that `perfmodel fit --sites` makes."""
    return parse_json(read_checked(files("perfmodel.prediction.sites"), name))


# --- clocks under load
# --------------------------------------------------------------------------------


@lru_cache
def source_medians() -> Mapping[str, Mapping[str, float]]:
    """Median, by architecture and source, of log(measured / predicted) over the share of products
    in the step."""
    return MappingProxyType(_fitted(SUSTAINED_FILE))


@lru_cache
def sustained(without: str = "") -> Sustained:
    """Slowdown of matrix products in training relative to isolated kernels, by architecture, for
    devices without a power law.

    Kernel tables time a kernel by itself, on a cool device and at its highest clock. A training
    step runs products one after another, and the power limit lowers the clock under them:
    `perfmodel.cost.sustained_seconds` where power and energy of a die were measured. For other
    devices the slowdown comes from published runs, except those of the teams of the source
    `without`.
    """
    return sustained_from(source_medians(), without)


def sustained_from(medians: Mapping[str, Mapping[str, float]], without: str = "") -> Sustained:
    """Compute `sustained` from medians by architecture and source, leaving out the teams of one
    source."""
    by_architecture = []
    for architecture, by_source in sorted(medians.items()):
        # The median over teams, with 0 among them, never below 0.
        by_team: dict[str, list[float]] = defaultdict(list)
        for name, value in by_source.items():
            if not share_a_team(name, without):
                by_team[team_key(name)].append(value)
        team_medians = [median(values) for values in by_team.values()]
        by_architecture.append((architecture, max(0.0, median([0.0, *team_medians]))))
    return tuple(by_architecture)


# --- peaks of memory
# ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemorySpread:
    """A normal distribution of log(measured / predicted)."""

    bias: float
    """Mean of the logarithm."""
    deviation: float
    """Standard deviation of the logarithm."""

    def probability(self, needed: float, capacity: float) -> float:
        """Probability that a layout with a predicted need fits into a capacity (both in bytes, or
        both as shares)."""
        z = (log(capacity / needed) - self.bias) / self.deviation
        return 0.5 * (1 + erf(z / sqrt(2)))

    def share_that_fits(self, probability: float) -> float:
        """The largest predicted share of device memory at which a layout fits with this
        probability.

        The inverse of `probability` for a capacity of 1: infinite for probability 0, and 0 for
        probability 1.
        """
        if probability <= 0:
            return inf
        if probability >= 1:
            return 0.0
        return exp(-self.bias - self.deviation * NormalDist().inv_cdf(probability))


@lru_cache
def source_figures() -> Figures:
    """Figures of all published sources with measured peaks."""
    figures = {}
    for name, (center, deviation) in _fitted(MEMORY_FILE).items():
        figures[name] = (float(center), float(deviation))
    return MappingProxyType(figures)


@lru_cache
def memory_spread(without: str = "") -> MemorySpread:
    """Spread of measured over predicted peak memory for a new source, fitted without the teams of
    `without`."""
    return spread_from(source_figures(), without)


def spread_from(figures: Figures, without: str = "") -> MemorySpread:
    """Median bias of the sources, their spread, and the mean spread within a source; every source
    counts the same.

    Args:
        figures: median and median absolute deviation of every source.
        without: a source whose teams are left out.
    """
    remaining = list(figures.values())
    if without:
        remaining = [figure for name, figure in figures.items() if not share_a_team(name, without)]
    medians = [center for center, _ in remaining]
    bias = median(medians)

    # The spread between sources is the median absolute deviation, as it is inside them: a few
    # sources count something else than they state, and would make all others look uncertain.
    between_medians = max(abs(center) for center in medians)
    if len(remaining) >= _FEWEST:
        between_medians = _NORMAL_MAD * median(abs(center - bias) for center in medians)
    within_variance = mean((_NORMAL_MAD * deviation) ** 2 for _, deviation in remaining)
    return MemorySpread(bias, sqrt(between_medians**2 + within_variance))


shorten_reprs(__name__)
