"""Keywords, options and space of a search, as Python, the command line and job files state them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from perfmodel import catalog
from perfmodel.catalog import job_files
from perfmodel.display import shorten_reprs
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Problem
from perfmodel.spec.keywords import JobKeywords
from perfmodel.units import MIN_FIT

# `perfmodel catalog` lists the words without the modules that they are for, which import JAX.
if TYPE_CHECKING:
    from perfmodel.planning.layouts._space import SearchSpace, Space
    from perfmodel.prediction import StepProblem


class SearchKeywords(JobKeywords, total=False):
    """Keywords of `search` in addition to those of the problem, for editors and type checkers: the
    fields of `SpaceWords`, `SearchOptions` and `Tariff`."""

    fix: str
    schedules: str | Sequence[str]
    vary: str | Sequence[str]
    fewer_devices: bool
    method: str
    objective: str | None
    constraints: Sequence[str]
    robust: str
    batches: Sequence[int]
    top: int
    distinct: bool
    every: bool
    min_fit: float
    strict: bool
    workers: int
    dask: str
    resume: Path | str | None
    price_per_device_hour: float | None
    power_w: float | None
    idle_power_w: float | None
    tokens: float | None


METHODS: Final = ("enumerate", "relax", "auto")
"""Search methods."""
ORDERS: Final = ("regret", "upper", "best")
"""Robust orders: by expected regret, by the upper end of the 90 % interval, by the probability to
be the best."""


@dataclass(frozen=True, kw_only=True)
class Tariff:
    """Price and power of devices, by default the catalog's, and tokens to train on."""

    price_per_device_hour: float | None = None
    """Price per device and hour. The catalog has list prices with their source and date."""
    power_w: float | None = None
    """Power of a busy device; by default the vendor's nominal (thermal design) power."""
    idle_power_w: float | None = None
    """Power of an idle device."""
    tokens: float | None = None
    """Tokens (samples, where a model has no sequence) to train on."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise PerfModelError(f"{name} must be a finite number of at least 0, got {value!r}")
        if self.tokens == 0:
            raise PerfModelError("tokens must be above 0")

    def completed(self, problem: "StepProblem") -> "Tariff":
        """The tariff, completed from the catalog's entries for cluster and device."""
        # One power would be that of one kind only, so that tariffs of mixed clusters stay as the
        # user gave them.
        if problem.cluster.kinds:
            return self
        device = problem.cluster.device
        list_price, _ = problem.cluster.list_price
        completed = {
            "price_per_device_hour": list_price,
            "power_w": device.power_w,
            "idle_power_w": device.idle_power_w,
        }
        for name in completed:
            stated = getattr(self, name)
            if stated is not None:
                completed[name] = stated
        return replace(self, **completed)


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of a search: objective, extent and amount of output."""

    method: str = "enumerate"
    """`enumerate` (even stages, exact), `auto` (then, by dynamic programming, uneven stages and
    recompute by stage for layouts whose bound promises a gain), or `relax` (also by gradients,
    which move stages, recompute and micro-batch together). The result says what was done and
    why."""
    objective: str | None = None
    """Objective by name (step_time, tokens_per_s, tokens_per_s_per_device, mfu, cost, energy,
    train_time, memory, devices), or a formula over `QUANTITIES` to minimise; default: `step_time`,
    or `tokens_per_s` for several batches."""
    constraints: Sequence[str] = ()
    """Comparisons of such formulas that layouts must satisfy, such as `"memory_bytes < 70e9"`."""
    tariff: Tariff | None = None
    """Prices, powers and tokens to train on, instead of the catalog's."""
    robust: str = ""
    """Order the best layouts so that prediction errors count: by expected `regret`, by the `upper`
    end of the 90 % interval, or by the probability to be the `best`. See `Robustness`."""
    batches: Sequence[int] = ()
    """Global batches to try and rank together, instead of the problem's."""
    top: int = 10
    """Number of layouts to rank."""
    distinct: bool = True
    """Rank only the best of layouts that differ only in recompute, offload or options without
    effect. See `Candidates.distinct`."""
    every: bool = False
    """Evaluate every layout that fits, even if its bound rules it out. See
    `SearchResult.ranking`."""
    min_fit: float = MIN_FIT
    """Least probability of fitting into memory for a recommended layout."""
    strict: bool = False
    """Refuse to extrapolate beyond the measurements."""
    workers: int = 1
    """Number of processes."""
    dask: str = ""
    """Address of a Dask scheduler whose workers evaluate layouts."""
    resume: Path | str | None = None
    """File to save progress to; if it exists, the search continues from it."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UnknownNameError("search method", self.method, METHODS)
        if self.robust and self.robust not in ORDERS:
            raise UnknownNameError("robust order", self.robust, ORDERS)
        if not 0 <= self.min_fit < 1:
            raise PerfModelError(
                f"search: min_fit must be a probability from 0 to below 1, got {self.min_fit}"
            )
        if self.top < 1:
            raise PerfModelError(f"search: top must be at least 1 layout, got {self.top}")


@dataclass(frozen=True, kw_only=True)
class SpaceWords:
    """Keywords that describe the search space, used if no `SearchSpace` is given."""

    fix: str = ""
    """Fixed fields in the notation of layouts, such as `tp=8,zero=1`."""
    schedules: str | Sequence[str] = ""
    """Names of pipeline schedules, or `all` synchronous ones."""
    vary: str | Sequence[str] = ""
    """Further options to vary: overlap, tp_overlap, recompute, offload, order, folding, or all."""
    fewer_devices: bool = False
    """Layouts may use fewer devices."""

    def __call__(self, problem: Problem) -> "SearchSpace":
        """Build the space for a problem.

        Raises:
            LayoutError, UnknownNameError: as `restrict`, `with_schedules` and `with_options`.
        """
        from perfmodel.planning.layouts._space import (
            default_space,
            restrict,
            with_options,
            with_schedules,
        )

        default = default_space(problem, fewer_devices=self.fewer_devices)
        default = with_options(default, _comma_separated(self.vary), problem.cluster)
        return restrict(with_schedules(default, _comma_separated(self.schedules)), self.fix)


def _comma_separated(names: str | Sequence[str]) -> str:
    return names if isinstance(names, str) else ",".join(names)


def _search_words() -> dict[str, type]:
    """Names of the fields of a search, and the record that has each."""
    homes = {}
    for record in (SpaceWords, SearchOptions, Tariff):
        for name in [item.name for item in fields(record)]:
            if name != "tariff":
                homes[name] = record
    return homes


SEARCH_WORDS: Final = MappingProxyType(_search_words())
"""Every option of a search, with the record that has it as a field."""


def file_words(file: job_files.JobFile) -> dict[str, Any]:
    """The settings in the notation of `[search]` in a job file.

    Raises:
        PerfModelError: an unknown word, or a value that it cannot have; names the file.
    """
    place = f"{file.place} [search]"
    stated = {}
    for word, value in file.search.items():
        stated |= catalog.checked_fields(
            SEARCH_WORDS.get(word, SearchOptions), {word: value}, place, SEARCH_WORDS
        )
    return stated


def apply_search_keywords(
    keywords: Mapping[str, Any], options: SearchOptions | None, space: "Space | None"
) -> "tuple[SearchOptions, Space | None, dict[str, Any]]":
    """Apply `keywords` to options and space; return the rest, which are the problem's.

    Raises:
        PerfModelError: a space beside keywords of one, or what the records refuse.
    """
    # Sort the keywords by the record that has them as a field. A record given beside them
    # supplies the rest.
    by_record: dict[type, dict[str, Any]] = {home: {} for home in SEARCH_WORDS.values()}
    for word, value in keywords.items():
        if word in SEARCH_WORDS:
            by_record[SEARCH_WORDS[word]][word] = value
    keywords = dict(keywords)
    options = replace(options or SearchOptions(), **by_record[SearchOptions])
    # Words of a tariff change fields of one that is given as a record.
    if "tariff" in keywords:
        options = replace(options, tariff=keywords.pop("tariff"))
    if by_record[Tariff]:
        options = replace(options, tariff=replace(options.tariff or Tariff(), **by_record[Tariff]))
    if by_record[SpaceWords]:
        if space is not None:
            raise PerfModelError(
                "search: space= already defines what to try; leave out either space= or "
                f"{', '.join(by_record[SpaceWords])}"
            )
        space = SpaceWords(**by_record[SpaceWords])
    return (
        options,
        space,
        {word: value for word, value in keywords.items() if word not in SEARCH_WORDS},
    )


shorten_reprs(__name__)
