"""Learning of priors: counts of the choices that published runs state, and the strength of their smoothing."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.catalog import frameworks
from perfmodel.display import Report, shows_progress
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Site, team_key
from perfmodel.spec import Transformer
from perfmodel.validation._case_rows import Case, framework_of, read_case
from perfmodel.validation._completions import FRAMEWORK_CHAIN, GENERIC, VERSION
from perfmodel.validation._described_run import RowRun
from perfmodel.validation._open_cells import (
    CHUNKS_CHAIN,
    DEGREE_CHAIN,
    DTYPE_CHAIN,
    MICRO_BATCH_CHAIN,
    PARALLELISM,
    PARALLELISM_CHAIN,
    chunks_of,
    parallelism_of,
    stated_degrees,
)
from perfmodel.validation._open_choices import OPEN_CHOICES, Chain, DataParallelOverlap
from perfmodel.validation._priors import DEFAULT, EVERYWHERE, ChoicePriors, Observation, count_teams
from perfmodel.validation._row_cells import Row, read_tables, text
from perfmodel.validation._row_keys import rows_of
from perfmodel.validation._row_words import framework_name, layout_switches
from perfmodel.validation._run_features import case_features
from perfmodel.validation._run_mixture import probability_of_value
from perfmodel.validation._run_sources import source_of_run

STRENGTHS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)
"""That are tried."""
_USUAL: Final = 2.0
"""Strength of a choice that fewer than `_FEWEST` teams state: too few to tell it."""
_FEWEST: Final = 5


TUNINGS: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Exponents that are tried."""
ROWS_OF_TEAM: Final = 3
"""From which it is learned how much people prefer what is faster."""
MASKED: Final = {
    "recompute": ("recompute", "recompute_detail"),
    "micro_batch": ("micro_batch", "num_microbatches"),
    "degrees": ("tp", "pp", "dp", "cp"),
}
"""Choices that are learned from, and the cells that state them; the first one must."""


@shows_progress("priors")
def fit_choice_priors(files: Sequence[Path], *, progress: Report | None = None) -> dict[str, Any]:
    """Count the choices that the rows of published tables state, and fit how strongly they are smoothed.

    Returns:
        `counts` and `strength` (`ChoicePriors`); `tunings` and `tuning_log_likelihood` (`likeliest_tuning`);
            `teams`: by choice, how many teams state it; `rows`: by table, how many rows were read; `made_by`.

    Raises:
        TableError: a file is missing or unreadable, or no file is a table of runs.
    """
    seen: list[tuple[Observation, str | None]] = []
    stating: list[Row] = []
    read: Counter[str] = Counter()
    for file in files:
        try:
            runs, _ = read_tables([file])
        except PerfModelError:  # another kind of table
            continue
        for row in rows_of(runs):
            if text(row, "status") in ("", "ok"):
                observations = list(_observations(row))
                read[file.parent.name + "/" + file.name] += bool(observations)
                seen += observations
                stating += [row] if observations else []
    counts = count_teams([observation for observation, _ in seen] + list(_of_defaults(seen)))
    choices = [choice for choice in counts if DEFAULT not in choice]
    strength = {choice: _strength(choice, counts, seen) for choice in choices}
    teams = {choice: len({each.team for each, _ in seen if each.choice == choice}) for choice in choices}
    made_by = "validate/fit_priors.py, from the rows of both collections that state each choice"
    log_likelihood = _tuning_log_likelihood(stating, counts, strength, progress)
    return {
        "made_by": made_by,
        "strength": strength,
        "tunings": list(TUNINGS),
        "tuning_log_likelihood": log_likelihood,
        "teams": teams,
        "rows": dict(read),
        "counts": counts,
    }


def _tuning_log_likelihood(
    rows: Sequence[Row], counts: dict[str, Any], strength: dict[str, float], progress: Report | None
) -> dict[str, list[float]]:
    """By team, the log-likelihood of what its rows state under each of `TUNINGS`.

    Of up to `ROWS_OF_TEAM` rows of every team, each of `MASKED` that a row states is emptied in turn, and the mixture
    of what it may have been is asked for the probability of what it was. A team counts once.
    """
    by_team: dict[str, list[Row]] = {}
    for row in rows:
        by_team.setdefault(team_key(source_of_run(row)), []).append(row)
    found: dict[str, list[float]] = {}
    for done, (team, own) in enumerate(sorted(by_team.items())):
        if progress:
            progress("tuning", done, len(by_team))
        priors = ChoicePriors(counts=counts, strength=strength, without=team)
        drawn = np.random.default_rng(0).permutation(len(own))[:ROWS_OF_TEAM].tolist()
        logs = []
        for i in drawn:
            for choice, cells in MASKED.items():
                log = _masked_log_likelihood(own[i], choice, cells, priors)
                if log is not None:
                    logs.append(log)
        if logs:
            found[team] = np.mean(logs, axis=0).round(4).tolist()
    return found


def _masked_log_likelihood(
    row: Row, choice: str, cells: tuple[str, ...], priors: ChoicePriors
) -> Float[np.ndarray, " tunings"] | None:
    """Log-likelihood of what a row states of a choice under each of `TUNINGS`; None where it does not state it or where
    what it states is not among what it may have been."""
    if text(row, cells[0]) == "":
        return None
    masked = {**row, **dict.fromkeys(cells)}
    try:
        case = read_case(row)
        value = _value_of(choice, case)
        site = Site.without(source_of_run(row))
        probability = probability_of_value(RowRun(masked), choice, value, TUNINGS, site, priors)
    except PerfModelError:
        return None
    return np.log(probability) if (probability > 0).all() and (probability < 1 - 1e-9).all() else None


def _value_of(choice: str, case: Case) -> str:
    """The value of one of `MASKED` that a row states, as completions name it."""
    layout = case.layout
    if choice == "degrees":
        return f"tp={layout.tp},pp={layout.pp},cp={layout.cp}"
    if choice == "micro_batch":
        return str(layout.micro_batch)
    return "full" if layout.recompute_full_layers else layout.recompute


def _observations(row: Row) -> Iterator[tuple[Observation, str | None]]:
    """Choices that a row states, each with the framework's default where that is known."""
    try:
        case = read_case(row)
    except PerfModelError:
        return
    team = team_key(source_of_run(row))
    features = case_features(case, RowRun(row).year)

    def seen(choice: str, chain: Chain, value: str) -> Observation:
        return Observation(team, choice, features.contexts(chain), value)

    known = _names_framework(row, case)
    if known:
        yield seen("framework", FRAMEWORK_CHAIN, case.framework.name), None
        yield seen(VERSION, (("framework",),), str(case.framework.since)), None
    else:
        features = replace(features, framework="")  # no context of a framework counts it
    overlaps_by_launch = bool(layout_switches(row))
    for choice in OPEN_CHOICES:
        # Recipes of the catalog state overlap where it is off alone, which says nothing of how often it is on.
        if choice.name == DataParallelOverlap.name and not overlaps_by_launch:
            continue
        try:
            if choice.matters(case) and choice.stated(case):
                default = _default(choice.name, case) if known else None
                yield seen(choice.name, choice.chain, choice.value(case)), default
        except PerfModelError:
            continue
    yield seen(PARALLELISM, PARALLELISM_CHAIN, parallelism_of(case.layout.tp, case.layout.pp)), None
    for name, value in stated_degrees(row).items():
        yield seen(name, MICRO_BATCH_CHAIN if name == "micro_batch" else DEGREE_CHAIN, value), None
    if case.layout.pp > 1 and text(row, "vpp") and isinstance(case.model, Transformer):
        per_stage = case.model.layers // case.layout.pp
        yield seen("vpp", CHUNKS_CHAIN, chunks_of(case.layout.vpp, per_stage)), None
    if (text(row, "dtype") or text(row, "dtype_recipe")) and "fp8" in case.cluster.device.dtypes:
        wide = case.job.dtype not in ("fp8", "fp4", "int8")
        yield seen("dtype", DTYPE_CHAIN, "16 bits" if wide else "8 bits"), None


def _names_framework(row: Row, case: Case) -> bool:
    plain = framework_name(row).partition("@")[0]
    return case.framework.name != GENERIC and (plain in frameworks() or framework_of(plain)[0].name == plain)


def _default(choice: str, case: Case) -> str | None:
    """What the framework of a case does where nobody says anything."""
    field = {
        "zero": "zero", "recompute": "recompute", "sequence_parallel": "sequence_parallel", "tp_overlap": "tp_overlap",
    }.get(choice)  # fmt: skip
    if field is None:
        if choice == "flash_attention":
            return "on" if case.framework.job_defaults(case.job.dtype)["flash_attention"] else "off"
        return {"dp_overlap": "on", "cuda_graphs": "none", "etp": "tp"}.get(choice)
    degrees = {"tp": case.layout.tp, "pp": case.layout.pp, "dp": case.layout.dp}
    value = case.framework.layout_defaults(degrees)[field]
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _of_defaults(seen: Sequence[tuple[Observation, str | None]]) -> Iterator[Observation]:
    """Whether stated choices are their framework's defaults."""
    for observation, default in seen:
        if default is not None:
            used = "yes" if observation.value == default else "no"
            yield Observation(observation.team, f"{observation.choice}: {DEFAULT}", (EVERYWHERE,), used)


def _strength(choice: str, counts: dict[str, Any], seen: Sequence[tuple[Observation, str | None]]) -> float:
    """The strength with which the choices of teams are likeliest, each team left out of the counts in turn."""
    own: dict[str, list[tuple[Observation, str | None]]] = {}
    for observation, default in seen:
        if observation.choice == choice:
            own.setdefault(observation.team, []).append((observation, default))
    if len(own) < _FEWEST:
        return _USUAL
    values = tuple(sorted({each.value for all_ in own.values() for each, _ in all_}))

    def log_likelihood(strength: float) -> float:
        total = 0.0
        for team, observations in own.items():
            priors = ChoicePriors(counts=counts, strength={choice: strength}, without=team)
            # A team counts once, however many runs it has.
            logs = []
            for observation, default in observations:
                chances = priors.probabilities(choice, observation.contexts, values, default)
                logs.append(np.log(max(float(chances[values.index(observation.value)]), 1e-12)))
            total += float(np.mean(logs))
        return total

    return max(STRENGTHS, key=log_likelihood)
