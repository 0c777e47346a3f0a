"""Training frameworks by name and year, every fact with its source.

A TOML file holds the versions of one framework: a table per year, in it a fact per field of `perfmodel.spec.Framework`
as `field = { value = ..., source = "..." }`, and perhaps `based_on = "NAME@YEAR"`, whose facts hold where the version
has none of its own.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perfmodel.catalog._toml import checked, index, package_tables, read_toml, resolve
from perfmodel.errors import PerfModelError
from perfmodel.spec import Framework

Versions = MappingProxyType[int, Framework]
"""By year, from the oldest on."""


def framework(name: str | Framework) -> Framework:
    """A framework as `name`, its newest version, or `name@year`, the version of that year or the nearest earlier one;
    or the path of a TOML of one's own, `path.toml` or `path.toml@year`; a framework is itself.

    Raises:
        UnknownNameError: for a name that is neither in the catalog nor a file.
        PerfModelError: for a year that is none or before the first version, or a malformed file.
    """
    if isinstance(name, Framework):
        return name
    plain, at, year = name.strip().rpartition("@") if "@" in name else (name.strip(), "", "")
    if at and not (year.isdecimal() and len(year) == 4):
        raise PerfModelError(f"framework {name!r}: what follows @ must be a year, as in {plain}@2024")
    own = plain.endswith(".toml")
    versions = _versions(read_toml(Path(plain)), plain, Path(plain).stem) if own else _named(plain)
    known = [since for since in versions if not at or since <= int(year)]
    if not known:
        raise PerfModelError(f"framework {name!r}: the earliest version known is {plain}@{min(versions)}")
    return versions[max(known)]


def frameworks() -> tuple[str, ...]:
    """Names of all frameworks in the catalog."""
    return tuple(sorted(_files()))


def framework_versions(name: str) -> tuple[Framework, ...]:
    """All versions of a framework of the catalog, from the oldest on.

    Raises:
        UnknownNameError: for a name that is not in the catalog.
    """
    return tuple(_named(name).values())


def _named(name: str) -> Versions:
    """The versions of a framework of the catalog by its name or alias (raises `UnknownNameError`)."""
    return _of_catalog(resolve("framework", name, _names(), {known: known for known in _files()}))


def _versions(content: dict[str, Any], where: str, name: str) -> Versions:
    """The versions that a file states."""
    content = {word: entry for word, entry in content.items() if word != "aliases"}
    years = sorted(content)
    if not years or not all(year.isdecimal() and isinstance(content[year], dict) for year in years):
        raise PerfModelError(f"{where}: a framework has a table of facts per year, such as [2024]")
    found: dict[int, Framework] = {}
    for year in sorted(years, key=int):
        facts, sources = _facts(content[year], f"{where} [{year}]", found, name)
        stated = checked(Framework, facts | {"name": name, "since": int(year)}, f"{where} [{year}]")
        found[int(year)] = replace(stated, sources=sources)
    return MappingProxyType(found)


def _facts(
    entry: dict[str, Any], where: str, earlier: Mapping[int, Framework], name: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Values and sources of a version: its own facts over those that it is based on."""
    entry = dict(entry)
    values: dict[str, Any] = {}
    sources: tuple[str, ...] = ()
    if (based_on := entry.pop("based_on", "")) and isinstance(based_on, str):
        of, _, year = based_on.partition("@")
        others = earlier if of == name else _of_catalog(of) if of in _files() else {}
        if not year.isdecimal() or int(year) not in others:
            raise PerfModelError(f"{where}: based_on: there is no earlier version {based_on!r}; name one as NAME@YEAR")
        base = others[int(year)]
        values = {f.name: getattr(base, f.name) for f in fields(Framework)}
        sources = base.sources
    for fact, stated in entry.items():
        if not isinstance(stated, dict) or set(stated) != {"value", "source"} or not isinstance(stated["source"], str):
            raise PerfModelError(f'{where}: {fact}: must be {{ value = ..., source = "where it is from" }}')
        values[fact] = stated["value"]
    return values, tuple(dict.fromkeys([*sources, *(stated["source"] for stated in entry.values())]))


@cache
def _files() -> MappingProxyType[str, dict[str, Any]]:
    """Contents of the catalog's files, by name of the framework."""
    return MappingProxyType({f.removesuffix(".toml"): of for f, of in package_tables("frameworks").items()})


@cache
def _names() -> MappingProxyType[str, str]:
    """What frameworks are called, and which that is."""
    return MappingProxyType(index((name, content.get("aliases", ())) for name, content in _files().items()))


@cache
def _of_catalog(name: str) -> Versions:
    """The versions of one framework of the catalog."""
    return _versions(_files()[name], f"{name}.toml", name)
