"""The completions of a described run, each with a prior probability.

A description states some settings of a run. A completion states all of them. Choices are filled in
one after another: the framework, the degrees and the batch (`_open_cells`), then the others
(`_open_choices`). Wherever there are more possibilities than can be predicted, a few stand for all
of them (`representatives`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.spec import Device, Framework, Layout, Transformer
from perfmodel.validation.rows import Case, framework_of, number
from perfmodel.validation.unstated._choice import OpenChoice
from perfmodel.validation.unstated._described_run import DescribedRun
from perfmodel.validation.unstated._features import case_features, model_features, scale_of
from perfmodel.validation.unstated._open_cells import (
    DEGREE_CHAIN,
    MICRO_BATCH_CHAIN,
    PARALLELISM,
    PARALLELISM_CHAIN,
    PARALLELISMS,
    FilledRow,
    filled_rows,
    parallelism_of,
    powers_of_two,
    stated_degrees,
)
from perfmodel.validation.unstated._open_choices import OPEN_CHOICES
from perfmodel.validation.unstated.mixture import representatives
from perfmodel.validation.unstated.priors import EVERYWHERE, ChoicePriors

FRAMEWORK_CHAIN: Final = (
    ("vendor",),
    ("vendor", "kind"),
    ("vendor", "era"),
    ("vendor", "kind", "era"),
    ("vendor", "scale"),
)
MOST_FRAMEWORKS: Final = 8
"""Most frameworks that represent an unnamed one."""
MOST_WEIGHED: Final = 192
"""Most completions whose memory is computed."""
GENERIC: Final = Framework().name
VERSION: Final = "version"
"""Choice between the versions of a framework, by their years."""


_TUNABLE_CELLS: Final = ("degrees", "ep", "micro_batch", "vpp", "replicate")
"""Choices of `_open_cells` that the user of a framework makes freely."""
TUNABLE: Final = frozenset(
    {*_TUNABLE_CELLS, *(choice.name for choice in OPEN_CHOICES if choice.tunable)}
)


@dataclass(frozen=True, eq=False)
class Completion:
    """A run with all settings filled in."""

    case: Case
    prior: float
    """Probability of the completion given only the description."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Values that were filled in, by open choice."""

    @property
    def untunable(self) -> tuple[tuple[str, str], ...]:
        """The choices among `chosen` that users cannot tune."""
        return tuple((name, value) for name, value in self.chosen.items() if name not in TUNABLE)


def completions(
    run: DescribedRun, framework: Framework | None, priors: ChoicePriors
) -> tuple[list[Completion], list[str]]:
    """Completions of a run over the choices that affect memory, at most `MOST_WEIGHED`, and why
    others are impossible.

    Args:
        framework: instead of the run's own, if given.

    Raises:
        Unusable, PerfModelError: the run cannot be read under any framework.
    """
    frameworks = [(framework, 1.0)] if framework is not None else frameworks_of(run, priors)
    candidates: list[Completion] = []
    # Some candidate frameworks may refuse the run: it fails only where all of them do, with the
    # first reason.
    refused: list[PerfModelError] = []
    for run_framework, weight in frameworks:
        chosen = {"framework": run_framework.label} if len(frameworks) > 1 else {}
        try:
            for completion in _read(run, run_framework, priors, refused):
                prior = weight * completion.prior
                candidates.append(Completion(completion.case, prior, chosen | completion.chosen))
        except PerfModelError as error:
            refused.append(error)
    if not candidates:
        raise refused[0]

    # Where the framework itself is open, that is an assumption of every completion.
    if len(frameworks) > 1:
        candidates = [
            replace(completed, case=_assuming(completed.case, "framework"))
            for completed in candidates
        ]

    # Thin out before multiplying by further choices, so that the number of completions stays
    # bounded.
    with_choices = with_open_choices(
        thinned(candidates, MOST_WEIGHED), run.year, priors, takes_memory=True
    )
    return with_choices, list(dict.fromkeys(str(error) for error in refused))


def open_choices(run: DescribedRun, framework: Framework, priors: ChoicePriors) -> list[str]:
    """Names of a run's open choices; first the framework, if the run does not name it.

    Raises:
        Unusable, PerfModelError: the run cannot be read.
    """
    names = [] if run.framework_name else ["framework"]
    readings = _read(run, framework, priors, [])
    for completion in readings:
        names += [name for name in completion.chosen if name not in names]
    likeliest = max(readings, key=lambda completion: completion.prior)
    for choice in OPEN_CHOICES:
        if len(_expanded(likeliest, choice, run.year, priors)) > 1:
            names.append(choice.name)
    return names


def _assuming(case: Case, name: str) -> Case:
    return case if name in case.assumed else replace(case, assumed=(*case.assumed, name))


def thinned(candidates: Sequence[Completion], limit: int) -> list[Completion]:
    """Return a limited number of representative completions, with priors that sum to 1."""
    chosen, weight = representatives(np.array([candidate.prior for candidate in candidates]), limit)
    return [
        replace(candidates[i], prior=share)
        for i, share in zip(chosen.tolist(), weight.tolist(), strict=True)
    ]


def with_open_choices(
    candidates: Sequence[Completion],
    year: int | None,
    priors: ChoicePriors,
    *,
    takes_memory: bool,
    limit: int = MOST_WEIGHED,
) -> list[Completion]:
    """Fill in choices that affect memory, or those that do not; at most `limit` results."""
    for choice in OPEN_CHOICES:
        if choice.takes_memory == takes_memory:
            expanded = []
            for completion in candidates:
                expanded += _expanded(completion, choice, year, priors)
            candidates = thinned(expanded, limit)
    return list(candidates)


def _expanded(
    completion: Completion, choice: OpenChoice, year: int | None, priors: ChoicePriors
) -> list[Completion]:
    """Copies of a completion with every possible value of an open choice; the completion itself if
    there is none.

    A single value that it can have is not a choice, and so nothing that is assumed.
    """
    case = completion.case

    # Values that the run cannot have lose their probability to the others.
    features = case_features(case, year)
    possible: list[Completion] = []
    for variant, chance in choice.weighted(case, features, priors):
        try:
            filled = variant.applied(case)
        except PerfModelError:
            continue
        chosen = completion.chosen | {choice.name: variant.value}
        possible.append(Completion(_assuming(filled, choice.name), chance, chosen))
    total = sum(completed.prior for completed in possible)
    if not possible or total <= 0:
        return [completion]
    if len(possible) == 1:
        return [replace(completion, case=replace(possible[0].case, assumed=case.assumed))]
    return [
        replace(completed, prior=completion.prior * completed.prior / total)
        for completed in possible
    ]


def _read(
    run: DescribedRun,
    framework: Framework,
    priors: ChoicePriors,
    refused: list[PerfModelError],
) -> list[Completion]:
    """Complete degrees and batch of a run under one framework; priors sum to 1."""
    # A micro-batch that the framework sets is not an open cell.
    device = run.device()
    model = run.model(framework)
    features = model_features(model, device, run.seq_len(model), framework, run.year)
    micro_batch = framework.default_layout.micro_batch
    stated_micro_batch = micro_batch if micro_batch != Layout.micro_batch else None
    experts = model.experts if isinstance(model, Transformer) else None
    rows = filled_rows(
        run.cells_for(framework),
        features,
        priors,
        stated_micro_batch,
        _narrow_dtype(device, framework),
        names_schedules=framework.launch.names_schedules,
        experts=experts.count if experts else 0,
    )
    # A row is read before it is known whether its layout is possible, so more are read than are
    # kept.
    read_first, weight = representatives(
        np.array([candidate.weight for candidate in rows]), 2 * MOST_WEIGHED
    )
    readable: list[Completion] = []
    for i, prior in zip(read_first.tolist(), weight.tolist(), strict=True):
        try:
            case = _read_filled(run, rows[i], framework)
        except PerfModelError as error:
            refused.append(error)
            continue
        readable.append(Completion(case, prior, rows[i].chosen))
    # Values that the framework cannot run are not considered, unless the run states them.
    able = [
        candidate for candidate in readable if not framework.cannot_run(candidate.case.layout)
    ] or readable
    # Frameworks are weighed elsewhere: completions that one of them cannot run must not lower its
    # weight.
    total = sum(candidate.prior for candidate in able)
    return [replace(candidate, prior=candidate.prior / total) for candidate in able]


def _read_filled(run: DescribedRun, filled: FilledRow, framework: Framework) -> Case:
    case = run.read(filled.cells, framework)
    for name in filled.chosen:
        case = _assuming(case, name)
    return case


def _narrow_dtype(device: Device, framework: Framework) -> str | None:
    """The 8-bit type that framework and device support together; None if there is none."""
    for dtype in ("fp8", "int8"):
        if dtype in device.dtypes and framework.job_defaults(dtype)["fp8_recipe"]:
            return dtype
    return None


# --- the framework
# ---------------------------------------------------------------------------------


def frameworks_of(run: DescribedRun, priors: ChoicePriors) -> list[tuple[Framework, float]]:
    """The possible frameworks of a run, with their probabilities.

    A framework of the catalog has one candidate: its version of the stated year, else of the run's
    year, or its first version for an earlier year. Where no year is known, all its versions are
    candidates. A name that begins with one of the catalog's and a hyphen (`pytorch-rocm`) is a kind
    of that. Any other name, and none, may be any framework of the catalog that published runs have
    used: how likely each is follows from the hardware, the kind of network and the year, and from
    what the run states beside (one that states ZeRO 3 is likelier one of a framework whose runs
    mostly use it).
    """
    name_only, _, stated_year = run.framework_name.partition("@")
    year = stated_year or (str(run.year) if run.year else "")
    known = _catalog_name(name_only, year)
    successor, since = _SUCCESSORS.get(known, ("", 0))
    if successor and not stated_year and year and int(year) >= since:
        known = successor
    if known and year:
        return [(framework_of(f"{known}@{year}")[0], 1.0)]
    if known:
        return _versions_of(known, priors)
    # Any framework that published runs have used may have run it, and the run's statements
    # distinguish them.
    used = priors.counts.get("framework", {}).get(EVERYWHERE, {})
    names = [
        name for name in catalog.frameworks() if name != GENERIC and (name in used or not used)
    ]
    generic = catalog.framework(GENERIC)
    model = run.model(generic)
    features = model_features(model, run.device(), run.seq_len(model), generic, run.year)
    devices = number(run.cells, "n_devices")
    if devices is not None:
        features = replace(features, scale=scale_of(int(devices)))
    weights = priors.probabilities("framework", features.contexts(FRAMEWORK_CHAIN), tuple(names))
    candidates = []
    for candidate_name, weight in zip(names, weights.tolist(), strict=True):
        candidate = framework_of(f"{candidate_name}@{year}" if year else candidate_name)[0]
        candidates.append((candidate, weight * _likelihood(run, candidate, priors)))
    likeliest, shares = representatives(
        np.array([weight for _, weight in candidates]), MOST_FRAMEWORKS
    )
    return [
        (candidates[i][0], share)
        for i, share in zip(likeliest.tolist(), shares.tolist(), strict=True)
    ]


def _versions_of(name: str, priors: ChoicePriors) -> list[tuple[Framework, float]]:
    """The versions of a framework of unknown year, by their frequency in published runs."""
    versions = catalog.framework_versions(name)
    years = tuple(str(version.since) for version in versions)
    chances = priors.probabilities(VERSION, (EVERYWHERE, f"framework {name}"), years)
    return list(zip(versions, chances.tolist(), strict=True))


def _catalog_name(name_only: str, year: str) -> str:
    """The catalog's framework for a name, by year if one is known; empty if there is none.

    Words around the name, such as a version (`NeMo 25.04`), a switch (`torchtitan (compile)`) or
    what it runs on (`JAX (MaxText)`), are left out: the longest name from the first word on counts,
    else that from the second, and so on.
    """
    words = [word for word in _BETWEEN_WORDS.split(name_only) if word]
    for first in range(len(words)):
        for end in range(len(words), first, -1):
            name = "-".join(words[first:end])
            try:
                newest = catalog.framework_versions(name)[0].name
            except PerfModelError:
                continue
            # A name may mean an earlier framework in earlier years (`framework_names.toml`).
            try:
                return catalog.framework(f"{name}@{year}").name if year else newest
            except PerfModelError:
                return newest
    return ""


_SUCCESSORS: Final = {"megatron-lm": ("megatron-core", 2025)}
"""Frameworks whose programs train another's models from a year on, if the name states no year of
its own: Megatron-LM's use Megatron-Core since `--use-mcore-models` became their default in 2024."""
_BETWEEN_WORDS: Final = re.compile(r"[-\s/+,;:()\[\]]+")
"""What stands between the words of a framework's name; points and underscores are part of them."""
_LARGEST_DEGREE: Final = 1 << 12
_IMPOSSIBLE: Final = 1e-6
"""Likelihood of a framework under which a run cannot be read."""
_REFUSED: Final = 0.05
"""Factor on the likelihood of a framework for each setting of the run that it cannot run. Assumed:
forks add features, and a table's words may be misread."""


def _likelihood(run: DescribedRun, framework: Framework, priors: ChoicePriors) -> float:
    """Probability that runs of a framework state the settings of this run."""
    try:
        completion = max(_read(run, framework, priors, []), key=lambda completion: completion.prior)
    except (PerfModelError, ValueError):
        return _IMPOSSIBLE
    case = completion.case
    features = case_features(case, run.year)
    refused = framework.refused(case.layout)
    likelihood = _REFUSED ** len(refused)
    for choice in OPEN_CHOICES:
        # A value that the framework refuses has counted already: published runs never state it.
        if choice.name in refused or not choice.matters(case) or not choice.stated(case):
            continue
        value = choice.value(case)
        variant_values = [variant.counted_as or variant.value for variant in choice.variants(case)]
        values = tuple(dict.fromkeys([value, *variant_values]))
        chances = priors.probabilities(choice.name, features.contexts(choice.chain), values)
        likelihood *= float(chances[0])

    # Which kinds of parallelism a run uses, and in which degrees, distinguishes frameworks, too.
    kind = parallelism_of(case.layout.tp, case.layout.pp)
    chances = priors.probabilities(PARALLELISM, features.contexts(PARALLELISM_CHAIN), PARALLELISMS)
    likelihood *= float(chances[PARALLELISMS.index(kind)])
    degrees = tuple(map(str, powers_of_two(_LARGEST_DEGREE)))
    for name, value in stated_degrees(run.cells).items():
        chain = MICRO_BATCH_CHAIN if name == "micro_batch" else DEGREE_CHAIN
        if value in degrees:
            chances = priors.probabilities(name, features.contexts(chain), degrees)
            likelihood *= float(chances[degrees.index(value)])
    return likelihood
