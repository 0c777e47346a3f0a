"""Words of a search, as Python, the command line and job files have them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.planning.layouts._quantities import Tariff
from perfmodel.planning.layouts._question import SearchOptions
from perfmodel.planning.layouts._space import SearchSpace, default_space, restrict, with_options, with_schedules
from perfmodel.spec import Problem

Space = SearchSpace | Callable[[Problem], SearchSpace]
"""A space, or a function that tells it for a problem."""


@dataclass(frozen=True, kw_only=True)
class SpaceWords:
    """Which layouts are tried, where no `SearchSpace` says it."""

    fix: str = ""
    """Dimensions that are fixed, in the notation of layouts, such as `tp=8,zero=1`."""
    schedules: str | Sequence[str] = ""
    """Names of pipeline schedules, or `all` that flush."""
    vary: str | Sequence[str] = ""
    """What is varied too: names of `OPTIONS`, or `all`."""
    fewer_devices: bool = False
    """Layouts may leave some of the devices unused."""

    def __call__(self, problem: Problem) -> SearchSpace:
        """The space for a problem.

        Raises:
            LayoutError, UnknownNameError: as `restrict`, `with_schedules` and `with_options`.
        """
        every = default_space(problem, fewer_devices=self.fewer_devices)
        every = with_options(every, _listed(self.vary), problem.cluster)
        return restrict(with_schedules(every, _listed(self.schedules)), self.fix)


def _listed(names: str | Sequence[str]) -> str:
    return names if isinstance(names, str) else ",".join(names)


SEARCH_WORDS: Final = MappingProxyType(
    {f.name: home for home in (SpaceWords, SearchOptions, Tariff) for f in fields(home) if f.name != "tariff"}
)
"""Everything that can be said of a search, and the record that has it as a field."""


def file_words(file: catalog.JobFile) -> dict[str, Any]:
    """What `[search]` of a job file says.

    Raises:
        PerfModelError: a word that there is not, or a value that it cannot have; names the file.
    """
    where, found = f"{file.where} [search]", {}
    for word, value in file.search.items():
        found |= catalog.checked_fields(SEARCH_WORDS.get(word, SearchOptions), {word: value}, where, SEARCH_WORDS)
    return found


def worded(
    words: Mapping[str, Any], options: SearchOptions | None, space: Space | None
) -> tuple[SearchOptions, Space | None, dict[str, Any]]:
    """Options and space with what `words` say of them, and the other words.

    Raises:
        PerfModelError: a space beside words for one, or what the records refuse.
    """
    said = {
        home: {w: v for w, v in words.items() if SEARCH_WORDS.get(w) is home} for home in set(SEARCH_WORDS.values())
    }
    words, options = dict(words), replace(options or SearchOptions(), **said[SearchOptions])
    if "tariff" in words:  # a whole one, of which other words change fields
        options = replace(options, tariff=words.pop("tariff"))
    if said[Tariff]:
        options = replace(options, tariff=replace(options.tariff or Tariff(), **said[Tariff]))
    if said[SpaceWords]:
        if space is not None:
            raise PerfModelError(f"search: a space is whole: leave out {', '.join(said[SpaceWords])}, or the space")
        space = SpaceWords(**said[SpaceWords])
    return options, space, {word: value for word, value in words.items() if word not in SEARCH_WORDS}
