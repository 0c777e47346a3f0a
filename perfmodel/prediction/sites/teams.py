"""The teams behind published sources; runs that share a team are left out of a fit together."""

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType

Teams = frozenset[str]
TEAMS_FILE = "teams.toml"


@lru_cache
def team_patterns() -> Mapping[str, Teams]:
    """Teams by pattern of a source's name, in lower case; the first pattern that matches counts."""
    content = tomllib.loads((files("perfmodel.prediction.sites") / TEAMS_FILE).read_text())
    return MappingProxyType({pattern.lower(): frozenset(teams) for pattern, teams in content["teams"].items()})


@lru_cache
def problem_patterns() -> tuple[str, ...]:
    """Lower-case name patterns of sources that report a slow or failing run."""
    content = tomllib.loads((files("perfmodel.prediction.sites") / TEAMS_FILE).read_text())
    return tuple(pattern.lower() for pattern in content["reports_of_problems"])


def reports_a_problem(source: str) -> bool:
    """Whether a source reports slow or failing runs, which are not typical."""
    return any(fnmatchcase(source.lower(), pattern) for pattern in problem_patterns())


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
    """Whether some team measured both sources; an empty name is no source."""
    return bool(source and other_source and teams_of(source) & teams_of(other_source))


def source_of_submitter(source: str, submitter: str) -> str:
    """Name of the part of a source that a submitter measured.

    The rounds of a benchmark hold the runs of many submitters. Those whose other runs are known, as sources of their
    own, are told apart: `MLPerf Training v5.0 (NVIDIA)`. All others stay one source.
    """
    if not submitter:
        return source
    name = f"{source} ({submitter})"
    return name if teams_of(name) not in (teams_of(source), {name.lower()}) else source
