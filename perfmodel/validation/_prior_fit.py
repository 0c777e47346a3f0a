"""Fits priors of open choices: counts of stated choices, and the strength of smoothing."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.catalog import frameworks
from perfmodel.display import Report, shows_progress
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Site
from perfmodel.prediction.sites.constants import team_key
from perfmodel.spec import Transformer
from perfmodel.validation._cases import unstated_share
from perfmodel.validation._run_sources import source_of_run
from perfmodel.validation.rows import (
    Case,
    Row,
    framework_name,
    framework_of,
    layout_switches,
    number,
    read_case,
    read_tables,
    rows_of,
    text,
)
from perfmodel.validation.unstated import (
    ACCUMULATION,
    ACCUMULATION_CHAIN,
    CHUNKS_CHAIN,
    DEGREE_CHAIN,
    DTYPE_CHAIN,
    FRAMEWORK_CHAIN,
    GENERIC,
    IN_PARTS,
    MICRO_BATCH_CHAIN,
    OPEN_CHOICES,
    PARALLELISM,
    PARALLELISM_CHAIN,
    VERSION,
    WHOLE_SHARE,
    Chain,
    DataParallelOverlap,
    RowRun,
    case_features,
    chunks_of,
    log_likelihoods,
    nearest_power_of_two,
    parallelism_of,
    stated_degrees,
)
from perfmodel.validation.unstated.mixture import Tuning
from perfmodel.validation.unstated.priors import (
    DEFAULT,
    EVERYWHERE,
    ChoicePriors,
    Observation,
    count_teams,
)

STRENGTHS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Strengths of a prior that the fit tries."""
_USUAL: Final = 2.0
"""Strength of a choice that fewer than `_FEWEST` teams state, which are too few to fit it."""
_FEWEST: Final = 5


TUNINGS: Final = tuple(
    Tuning(*exponents) for exponents in product((0, 1, 2, 4, 8, 16, 32), (0, 1, 2, 4, 8))
)
"""Preferences for fast settings that the fit tries."""
ROWS_OF_SOURCE: Final = 6
"""Most rows of a source that are used to learn how strongly people prefer fast settings."""
_TRIED: Final = 40
"""Most runs of a source that are examined; many leave nothing open."""


@shows_progress("priors")
def fit_choice_priors(files: Sequence[Path], *, progress: Report | None = None) -> dict[str, Any]:
    """Count the choices that published runs state, and fit how strongly they are smoothed.

    Returns:
        `counts` and `strength` (`ChoicePriors`); `tunings` and `log_likelihood`
            (`likeliest_tuning`); `teams`: by choice, how many teams state it; `rows`: by table, how
            many rows were read; `made_by`.

    Raises:
        TableError: a file is missing or unreadable, or no file is a table of runs.
    """
    seen: list[tuple[Observation, str | None]] = []
    timed: list[Row] = []
    read: Counter[str] = Counter()
    for file in files:
        try:
            runs, _ = read_tables([file])
        except PerfModelError:
            # Another kind of table.
            continue
        # Runs that failed do not show how people run.
        rows = [row for row in rows_of(runs) if text(row, "status") in ("", "ok")]
        for row in rows:
            observations = list(_observations(row))
            read[file.name] += bool(observations)
            seen += observations
        timed += [row for row in rows if number(row, "measured_iter_time_s") is not None]

    # How often people keep a framework's default is counted as a separate choice.
    counts = count_teams([observation for observation, _ in seen] + list(_observed_defaults(seen)))
    choices = [choice for choice in counts if DEFAULT not in choice]
    strength = {choice: _strength(choice, counts, seen) for choice in choices}
    teams_by_choice: dict[str, set[str]] = {choice: set() for choice in choices}
    for observation, _ in seen:
        if observation.choice in teams_by_choice:
            teams_by_choice[observation.choice].add(observation.team)
    made_by = "validate/fit_priors.py, fitted to the published runs that state each choice"
    priors = ChoicePriors(counts=counts, strength=strength)
    return {
        "made_by": made_by,
        "strength": strength,
        "tunings": [[tuning.choices, tuning.sites] for tuning in TUNINGS],
        "log_likelihood": _log_likelihood(timed, priors, progress),
        "teams": {choice: len(teams) for choice, teams in teams_by_choice.items()},
        "rows": dict(read),
        "counts": counts,
    }


def _log_likelihood(
    rows: Sequence[Row], priors: ChoicePriors, progress: Report | None
) -> dict[str, dict[str, list[float]]]:
    """Return the mean log-likelihood of the step times of each source under each of `TUNINGS`, by
    scale and source.

    Up to `ROWS_OF_SOURCE` runs that leave something open are asked of every source and scale,
    predicted without its teams. A source counts once.
    """
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(source_of_run(row), []).append(row)
    by_scale: dict[str, dict[str, list[float]]] = {}
    for done, (source, rows_of_source) in enumerate(sorted(by_source.items())):
        if progress:
            progress("tuning", done, len(by_source))
        without = replace(priors, without=team_key(source))
        for scale, logs in _source_log_likelihoods(rows_of_source, without).items():
            by_scale.setdefault(scale, {})[source] = np.mean(logs, axis=0).round(4).tolist()
    return by_scale


def _source_log_likelihoods(
    rows: Sequence[Row], priors: ChoicePriors
) -> dict[str, list[Float[np.ndarray, " tunings"]]]:
    """Return the log-likelihoods of the runs of one source, in no order, by scale."""
    by_scale: dict[str, list[Float[np.ndarray, " tunings"]]] = {}

    # A random order, so that the first rows of a table do not stand for all of it.
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    for i in order[:_TRIED]:
        run_log_likelihood = _run_log_likelihood(rows[i], priors)
        if run_log_likelihood is None:
            continue
        scale, log = run_log_likelihood
        logs = by_scale.setdefault(scale, [])
        if len(logs) < ROWS_OF_SOURCE:
            logs.append(log)
    return by_scale


def _run_log_likelihood(
    row: Row, priors: ChoicePriors
) -> tuple[str, Float[np.ndarray, " tunings"]] | None:
    """The scale of one run and the log-likelihoods of its step time; None if it leaves nothing open
    or cannot be predicted."""
    site = replace(Site.without(source_of_run(row)), unstated=unstated_share(row))
    measured_s = number(row, "measured_iter_time_s")
    if measured_s is None:
        return None
    try:
        return log_likelihoods(RowRun(row), measured_s, TUNINGS, site, priors)
    except PerfModelError:
        return None


def _observations(row: Row) -> Iterator[tuple[Observation, str | None]]:
    """Choices that a row states, each with the framework's default where that is known."""
    try:
        case = read_case(row)
    except PerfModelError:
        return
    team = team_key(source_of_run(row))
    features = case_features(case, RowRun(row).year)

    def observed(choice: str, chain: Chain, value: str) -> Observation:
        return Observation(team, choice, features.contexts(chain), value)

    known = _names_framework(row, case)
    if known:
        yield observed("framework", FRAMEWORK_CHAIN, case.framework.name), None
        yield observed(VERSION, (("framework",),), str(case.framework.since)), None
    else:
        # Without a framework's name the run counts in general contexts only.
        features = replace(features, framework="")
    overlaps_by_launch = bool(layout_switches(row))
    for choice in OPEN_CHOICES:
        # Recipes of the catalog state overlap where it is off alone, which says nothing of how
        # often it is on.
        if choice.name == DataParallelOverlap.name and not overlaps_by_launch:
            continue
        try:
            if choice.matters(case) and choice.stated(case):
                default = _default(choice.name, case) if known else None
                yield observed(choice.name, choice.chain, choice.value(case)), default
        except PerfModelError:
            continue
    yield (
        observed(PARALLELISM, PARALLELISM_CHAIN, parallelism_of(case.layout.tp, case.layout.pp)),
        None,
    )
    for name, value in stated_degrees(row).items():
        yield (
            observed(name, MICRO_BATCH_CHAIN if name == "micro_batch" else DEGREE_CHAIN, value),
            None,
        )

    # Rows of dense models state a degree of 1, which says nothing of mixtures of experts.
    has_experts = isinstance(case.model, Transformer) and case.model.experts is not None
    if has_experts and number(row, "ep") is not None:
        yield observed("ep", DEGREE_CHAIN, str(nearest_power_of_two(case.layout.ep))), None

    # Whether a run accumulates gradients is a choice where a replica gets more than one sequence.
    share = case.job.global_batch // case.layout.dp
    states_batch = text(row, "micro_batch") and text(row, "global_batch")
    if states_batch and case.layout.pp == 1 and share > 1:
        in_parts = case.layout.micro_batch < share
        yield (
            observed(ACCUMULATION, ACCUMULATION_CHAIN, IN_PARTS if in_parts else WHOLE_SHARE),
            None,
        )

    # Model chunks and element types are counted only where the row states them and had a choice.
    if case.layout.pp > 1 and text(row, "vpp") and isinstance(case.model, Transformer):
        per_stage = case.model.layers // case.layout.pp
        yield observed("vpp", CHUNKS_CHAIN, chunks_of(case.layout.vpp, per_stage)), None
    if (text(row, "dtype") or text(row, "dtype_recipe")) and "fp8" in case.cluster.device.dtypes:
        wide = case.job.dtype not in ("fp8", "fp4", "int8")
        yield observed("dtype", DTYPE_CHAIN, "16 bits" if wide else "8 bits"), None


def _names_framework(row: Row, case: Case) -> bool:
    if case.framework.name == GENERIC:
        return False
    name = framework_name(row).partition("@")[0]
    return name in frameworks() or framework_of(name)[0].name == name


def _default(choice: str, case: Case) -> str | None:
    """The default of a case's framework for a choice."""
    if choice not in ("zero", "recompute", "sequence_parallel", "tp_overlap"):
        if choice == "flash_attention":
            return "on" if case.framework.job_defaults(case.job.dtype)["flash_attention"] else "off"
        if choice == "ep_overlap":
            return "on" if case.framework.default_layout.overlap.ep_overlap else "off"
        return {"dp_overlap": "on", "cuda_graphs": "none", "etp": "tp"}.get(choice)

    # Defaults may depend on the degrees (ZeRO beside a pipeline, sequence parallelism beside tp).
    degrees = {"tp": case.layout.tp, "pp": case.layout.pp, "dp": case.layout.dp}
    value = case.framework.layout_defaults(degrees)[choice]
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _observed_defaults(
    observations: Sequence[tuple[Observation, str | None]],
) -> Iterator[Observation]:
    """Whether stated choices are their framework's defaults."""
    for observation, default in observations:
        if default is not None:
            used = "yes" if observation.value == default else "no"
            yield Observation(
                observation.team, f"{observation.choice}: {DEFAULT}", (EVERYWHERE,), used
            )


def _strength(
    choice: str, counts: dict[str, Any], observations: Sequence[tuple[Observation, str | None]]
) -> float:
    """The strength that maximises the likelihood of the teams' choices, with each team left out of
    the counts in turn."""
    by_team: dict[str, list[tuple[Observation, str | None]]] = {}
    for observation, default in observations:
        if observation.choice == choice:
            by_team.setdefault(observation.team, []).append((observation, default))
    if len(by_team) < _FEWEST:
        return _USUAL

    # Leave each team out of the counts in turn, and ask how likely its own choices are under the
    # others' counts.
    stated_values: set[str] = set()
    for observations in by_team.values():
        stated_values |= {observation.value for observation, _ in observations}
    values = tuple(sorted(stated_values))

    def log_likelihood(strength: float) -> float:
        total = 0.0
        for team, observations in by_team.items():
            priors = ChoicePriors(counts=counts, strength={choice: strength}, without=team)
            # A team counts once, however many runs it has.
            logs = []
            for observation, default in observations:
                chances = priors.probabilities(choice, observation.contexts, values, default)
                logs.append(np.log(max(float(chances[values.index(observation.value)]), 1e-12)))
            total += float(np.mean(logs))
        return total

    return max(STRENGTHS, key=log_likelihood)
