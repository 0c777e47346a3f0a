"""Training frameworks by name and year, every fact with its source.

A TOML file holds the versions of one framework: a table per year, in it a fact per key of
`perfmodel.spec.Framework` as `field = { value = ..., source = "..." }`, and perhaps
`based_on = "NAME@YEAR"`, whose facts hold where the version has none of its own. What else people
call a framework is in `data/framework_names.toml`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perfmodel.catalog.entries import checked, key, package_tables, read_toml
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Framework

Versions = MappingProxyType[int, Framework]
"""Versions of a framework by year, from the oldest on."""


def framework(name: str | Framework) -> Framework:
    """Look up a framework: `name` gives its newest version, `name@year` that of the year or the
    nearest earlier one.

    `path.toml` and `path.toml@year` read your own TOML. A `Framework` is returned as it is.

    Raises:
        UnknownNameError: for a name that is neither in the catalog nor a file.
        PerfModelError: for a malformed year or file, or a year before the first version or after
            the newest framework that is known.
    """
    if isinstance(name, Framework):
        return name
    # From the right, as the path of a file may have an @ too.
    before, separator, year_text = name.strip().rpartition("@")
    name_only = before if separator else name.strip()
    if separator and not (year_text.isdecimal() and len(year_text) == 4):
        raise PerfModelError(
            f"framework {name!r}: the part after @ must be a year, as in {name_only}@2024"
        )
    if separator and not name_only:
        raise PerfModelError(
            f"unknown framework {name!r}: the name before @ is missing; write NAME{name}"
        )
    year = int(year_text) if separator else None
    if name_only.endswith(".toml"):
        versions = _versions(read_toml(Path(name_only)), name_only, Path(name_only).stem)
    else:
        versions = _version_named(name_only, year)

    # The newest version by the end of the year, or of all.
    newest = max(versions)
    if year is None:
        return versions[newest]
    # A version holds until the next one, but nobody knows what frameworks do years after the
    # catalog was written.
    latest_known = max(newest, _latest_year())
    if year > latest_known:
        raise PerfModelError(
            f"framework {name!r}: the catalog ends in {latest_known}; the newest version of this framework is "
            f"{versions[newest].label}"
        )
    by_then = [since for since in versions if since <= year]
    if not by_then:
        raise PerfModelError(
            f"framework {name!r}: the earliest version in the catalog is {versions[min(versions)].label}"
        )
    return versions[max(by_then)]


def frameworks() -> tuple[str, ...]:
    """Names of all frameworks in the catalog."""
    return tuple(sorted(_files()))


def framework_versions(name: str) -> tuple[Framework, ...]:
    """All versions of a framework in the catalog, oldest first.

    Raises:
        UnknownNameError: for a name that is not in the catalog.
    """
    return tuple(_version_named(name).values())


def framework_years(name: str) -> tuple[int, ...]:
    """Years for which the catalog has a version of a framework, oldest first. The versions' files
    are not read."""
    return tuple(sorted(int(year) for year in _files()[name]))


def _version_named(name: str, year: int | None = None) -> Versions:
    """The versions of a framework by one of its names; if several frameworks had the name in turn,
    those of the first that existed in `year` (raises `UnknownNameError`)."""
    candidates = _names().get(key(name))
    if candidates is None:
        raise UnknownNameError("framework", name, _names())
    for candidate in candidates:
        versions = _from_catalog(candidate)
        if year is None or min(versions) <= year:
            return versions
    return _from_catalog(candidates[-1])


def _versions(content: dict[str, Any], place: str, name: str) -> Versions:
    """The versions that a file states."""
    years = sorted(content)
    if not years or not all(year.isdecimal() and isinstance(content[year], dict) for year in years):
        raise PerfModelError(f"{place}: a framework has a table of facts per year, such as [2024]")
    versions: dict[int, Framework] = {}
    # From the oldest on, so that a version may be based on an earlier one of the same file.
    for year in sorted(years, key=int):
        facts, sources = _facts(content[year], f"{place} [{year}]", versions, name)
        stated = checked(Framework, facts | {"name": name, "since": int(year)}, f"{place} [{year}]")
        versions[int(year)] = replace(stated, sources=sources)
    return MappingProxyType(versions)


def _facts(
    entry: dict[str, Any], place: str, earlier: Mapping[int, Framework], name: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Values and sources of a version: its own facts, which override those of the version it is
    based on."""
    entry = dict(entry)
    values: dict[str, Any] = {}
    sources: tuple[str, ...] = ()
    based_on = entry.pop("based_on", "")
    if based_on and isinstance(based_on, str):
        base_name, _, year = based_on.partition("@")
        # Based on an earlier version of its own, or on one of another framework (forks of
        # Megatron-LM).
        base_versions: Mapping[int, Framework] = {}
        if base_name == name:
            base_versions = earlier
        elif base_name in _files():
            base_versions = _from_catalog(base_name)
        if not year.isdecimal() or int(year) not in base_versions:
            raise PerfModelError(
                f"{place}: based_on: there is no earlier version {based_on!r}; name one as NAME@YEAR"
            )
        base = base_versions[int(year)]
        values = base.values()
        sources = base.sources
    for fact, stated in entry.items():
        # No fact without its source: what a framework does by default is known from its code alone.
        if (
            not isinstance(stated, dict)
            or set(stated) != {"value", "source"}
            or not isinstance(stated["source"], str)
        ):
            raise PerfModelError(
                f'{place}: {fact}: must be {{ value = ..., source = "where it is from" }}'
            )
        values[fact] = stated["value"]
    all_sources = [*sources, *(stated["source"] for stated in entry.values())]
    return values, tuple(dict.fromkeys(all_sources))


@cache
def _files() -> MappingProxyType[str, dict[str, Any]]:
    """Contents of the catalog's files, by name of the framework."""
    tables = package_tables("frameworks")
    return MappingProxyType(
        {file.removesuffix(".toml"): content for file, content in tables.items()}
    )


@cache
def _names() -> MappingProxyType[str, tuple[str, ...]]:
    """Names of frameworks by `key`, each with the framework that it means."""
    # Several frameworks may have had one alias in turn. The year decides between them.
    names = {name: (name,) for name in _files()}
    aliases = files("perfmodel.catalog") / "data" / "framework_names.toml"
    for alias, candidates in tomllib.loads(aliases.read_text("utf-8"))["names"].items():
        if alias in names:
            raise PerfModelError(
                f"framework_names.toml: {alias!r} is already the name of a framework"
            )
        names[alias] = tuple(candidates)
    return MappingProxyType(names)


@cache
def _latest_year() -> int:
    """The year of the newest version of any framework of the catalog."""
    return max(max(_from_catalog(name)) for name in _files())


@cache
def _from_catalog(name: str) -> Versions:
    """The versions of one framework of the catalog."""
    return _versions(_files()[name], f"{name}.toml", name)
