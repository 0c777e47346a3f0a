"""One format of launch files: how it is recognised, and the table of what its keys mean."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Literal

from perfmodel.ingest.launch._entries import Entries, broken
from perfmodel.ingest.launch._table import BadValue, Fields, Rule, unsaid

_OFF: Final = (None, [], {}, "", False, "none")
"""Values of keys that ask for nothing."""
Syntax = Literal["arguments", "json", "toml", "yaml"]


@dataclass(frozen=True, kw_only=True)
class Stated:
    """What a file says in fields."""

    fields: Fields
    defaults: Fields
    """What the framework fills in."""


@dataclass(frozen=True, kw_only=True)
class LaunchFormat:
    """A format of launch files. A further one is a module with one of these, listed in `_read.FORMATS`."""

    name: str
    syntax: Syntax
    frameworks: tuple[str, ...]
    """Names of the frameworks that are launched with it, the usual one first."""
    marks: tuple[str, ...]
    """Keys (patterns) of which every file of this format has one and no other format's has."""
    table: tuple[Rule, ...]
    harmless: tuple[str, ...]
    """Keys (patterns) that say nothing of time or memory of a step, or only what every run does."""
    always: Mapping[str, object] = field(default_factory=dict)
    """Fields that the framework does not leave open."""
    elsewhere: tuple[str, ...] = ()
    """Fields of `Layout` that the training script sets, not the file: comments of the file keep them."""
    framework: Callable[[Fields, Entries], str] | None = None
    """Name of the framework of one file, where the format serves several."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Why fields of `Layout` cannot be had, for the refusal of what has no notation."""

    def recognises(self, entries: Entries) -> bool:
        """Whether a file of the right syntax is of this format."""
        return any(_matches(key, self.marks) for key in entries)

    def read(self, entries: Entries, where: str) -> tuple[Stated, tuple[str, ...]]:
        """What a file says, and its keys that are neither understood nor harmless, each with its line.

        Raises:
            LaunchFileError: a value that its key cannot have.
        """
        fields, defaults = dict(self.always), {}
        understood: set[str] = set()
        for rule in self.table:
            stated = {name: entries[name] for name in rule.keys if name in entries}
            understood |= set(stated)
            defaults |= rule.defaults
            fields |= _read_rule(rule, stated, where)
        unknown = tuple(
            f"{key} (line {entry.line})" if entry.line else key
            for key, entry in entries.items()
            if key not in understood and not _matches(key, self.harmless) and entry.value not in _OFF
        )
        return Stated(fields=fields, defaults=defaults), unknown

    def framework_of(self, stated: Stated, entries: Entries) -> str:
        """Name of the framework that the file launches."""
        return self.frameworks[0] if self.framework is None else self.framework(stated.fields, entries)

    def write(self, fields: Fields) -> dict[str, object]:
        """Values of the format's keys that say the fields.

        Raises:
            LaunchFileError: a field that the framework cannot do; says why.
        """
        values: dict[str, object] = {}
        for rule in self.table:
            said = rule.write(fields).items()
            values |= {name: value for name, value in said if value is not None and name not in values}
        return values


def _read_rule(rule: Rule, stated: Entries, where: str) -> Fields:
    """Fields that a rule reads from those of its keys that the file has; none where they leave it to the framework."""
    found = {name: entry.value for name, entry in stated.items() if not unsaid(entry.value)}
    for name, value in found.items():
        if isinstance(value, str) and ("${" in value or "$(" in value):
            message = f"{name} is {value!r}, which the file does not define; set it, or give the flag"
            raise broken(where, stated[name].line, message)
    try:
        return rule.read(found) if found else {}
    except BadValue as error:
        # messages end with the value that they are about
        guilty = (name for name, value in found.items() if str(error).endswith(f"got {value!r}"))
        name = next(guilty, next(iter(found)))
        raise broken(where, stated[name].line, f"{name} {error}") from None


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
