"""One format of launch files: how it is recognised, and what its keys mean."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal

from perfmodel.ingest.launch._entries import Entries, broken_at
from perfmodel.ingest.launch._harm import Harm, Unread, harm_of, is_harmless
from perfmodel.ingest.launch._table import BadValue, Fields, Rule, unsaid
from perfmodel.ingest.launch.shell import ABSENT

_OFF: Final = (None, [], {}, "", False, "none")
"""Values that switch a key off."""
_ALIKE: Final = 0.93
"""Least likeness of a misspelt setting to the one that is meant (`difflib.SequenceMatcher`)."""
Syntax = Literal["arguments", "json", "python", "toml", "yaml"]


@dataclass(frozen=True, kw_only=True)
class Stated:
    """The fields that a file states, and the format's defaults for the others."""

    fields: Fields
    defaults: Fields
    """Fields that the framework fills in if the file does not set them."""


@dataclass(frozen=True, kw_only=True)
class LaunchFormat:
    """A format of launch files. To add one, write a module with a `LaunchFormat` and list it in
    `_read.FORMATS`."""

    name: str
    syntax: Syntax
    frameworks: tuple[str, ...]
    """Names of the frameworks that are launched with it, the usual one first."""
    marks: tuple[str, ...]
    """Keys (patterns) that identify the format: each of its files has one of them, and no file of
    another format has any."""
    table: tuple[Rule, ...]
    harmless: tuple[str, ...]
    """Keys (patterns) that do not affect the time or memory of a step, or that every run sets
    alike."""
    always: Mapping[str, object] = field(default_factory=dict)
    """Fields with a fixed value in this framework."""
    switches: frozenset[str] = frozenset()
    """Arguments of a command line that take no value."""
    elsewhere: tuple[str, ...] = ()
    """Fields of `Layout` that the training script sets instead of the file; exported files keep
    them in comments."""
    defaults_file: str = ""
    """Name of the file with all of the framework's defaults, which other files include."""
    framework: Callable[[Fields, Entries], str] | None = None
    """Function that returns the framework of a file, if the format serves several."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Reasons why fields of `Layout` cannot be expressed, for error messages."""
    in_script: Mapping[str, str] = field(default_factory=dict)
    """Fields of `Layout` that the framework runs but only the training script can set, and how it
    does."""

    def recognises(self, entries: Entries) -> bool:
        """Whether a file of the right syntax is of this format."""
        return any(_matches(key, self.marks) for key in entries)

    @property
    def noun(self) -> str:
        """Noun for one of its settings: argument or key."""
        return "flag" if self.syntax == "arguments" else "key"

    def read(
        self,
        entries: Entries,
        place: str,
        settled: Callable[[str], bool] = lambda field: False,
        notes: Sequence[str] = (),
    ) -> tuple[Stated, tuple[Unread, ...]]:
        """Fields of a file, and the unread settings that could matter, worst first.

        Args:
            entries: settings of the file.
            place: path of the file, for messages.
            settled: whether the caller states a field. A value that only the shell knows is then
                not needed.
            notes: remarks on parts of the file that were not read.

        Raises:
            LaunchFileError: a value that its key cannot have, or that the file does not define and
                nobody states.
        """
        # Each rule takes the keys that it knows. Later rules win where two state one field, so that
        # tables list the general key first and the particular one after it.
        entries = self._with_names_of_models(entries)
        fields = dict(self.always)
        defaults = {}
        understood: set[str] = set()
        undefined_keys = self._undefined(entries, place, settled, notes)
        for rule in self.table:
            stated = {name: entries[name] for name in rule.keys if name in entries}
            understood |= set(stated)
            defaults |= rule.defaults
            defined = {name: entry for name, entry in stated.items() if name not in undefined_keys}
            fields |= _read_rule(rule, defined, place)
        # The rest is what nobody understood. It is shown unless it is off, known to be harmless, or
        # a default.
        unread = []
        for key, entry in entries.items():
            # Settings of a framework's defaults file that are not read here describe its usual
            # behaviour.
            if entry.included and Path(entry.included[0]).name == self.defaults_file:
                continue
            if entry.is_default:
                continue
            # Command lines write the word where files have the value.
            value = False if str(entry.value).lower() == "false" else entry.value
            is_off = value in _OFF and not _takes_away(key, value)
            if key in understood or is_off or key in self.harmless:
                continue
            # Patterns of harmless settings (`*_steps`) fit misspelt ones too.
            meant = self._spelled_alike(key, entries)
            if meant or not is_harmless(key, self.harmless):
                unread.append(Unread(key, entry.line, harm_of(key), meant))
        unread.sort(key=lambda setting: setting.harm)
        return Stated(fields=fields, defaults=defaults), tuple(unread)

    def _spelled_alike(self, key: str, entries: Entries) -> str:
        """The setting that a misspelt key may stand for; empty if none is close enough."""
        known = {name for rule in self.table for name in rule.keys} - set(entries)
        # Frameworks have many flags that share most of their words: only a letter or two may
        # differ.
        close = get_close_matches(key, known, n=1, cutoff=_ALIKE)
        return close[0] if close else ""

    def _undefined(
        self,
        entries: Entries,
        place: str,
        settled: Callable[[str], bool],
        notes: Sequence[str],
    ) -> set[str]:
        """Keys whose value the file does not define and whose fields the caller states instead.

        Raises:
            LaunchFileError: nobody states the fields of such a key.
        """
        # A name (of a checkpoint, a tokenizer) may hold a variable that only the cluster knows; a
        # number may not.
        keys = [
            name
            for name, entry in entries.items()
            if undefined(entry.value) and not unsaid(entry.value)
        ]
        keys = [name for name in keys if not self._is_optional(name)]
        for name in keys:
            rules = [rule for rule in self.table if name in rule.keys]
            stated = [rule for rule in rules if rule.fields and all(map(settled, rule.fields))]
            if rules and not stated:
                # Several rules may read a key; the one that reads little else is about this key.
                flag = _flag_for(min(rules, key=lambda rule: (not rule.fields, len(rule.keys))))
                value = entries[name].value
                remedy = f"set it, or give {flag}"
                # `$1` is not a variable of the environment: only the script's caller can set it.
                if re.search(r"\$\{[1-9]\}", value):
                    remedy = f"write the script's own arguments after its name, or give {flag}"
                message = f"{name} is {value!r}, which the file does not define; {remedy}"
                # What is not defined may stand in a file that the script sources.
                absent = [note for note in notes if note.endswith(ABSENT)]
                raise broken_at(place, entries[name], "; ".join([message, *absent]))
        return set(keys)

    def _with_names_of_models(self, entries: Entries) -> Entries:
        """Settings in which a model's path without known folders (`${SCRATCH}/Qwen3-8B`) is the
        name of its last folder, which no machine changes."""
        of_models: set[str] = set()
        for rule in self.table:
            of_models |= set(rule.keys) if rule.fields == ("model",) else set()
        named = dict(entries)
        for name in of_models & entries.keys():
            folder = _BEHIND_UNDEFINED.search(str(entries[name].value))
            if undefined(entries[name].value) and folder is not None:
                named[name] = replace(entries[name], value=folder[1])
        return named

    def _is_optional(self, name: str) -> bool:
        """Whether every rule that reads a key accepts it as written."""
        return all(name in rule.optional for rule in self.table if name in rule.keys)

    def framework_of(self, stated: Stated, entries: Entries) -> str:
        """Name of the framework that the file is for."""
        return (
            self.frameworks[0] if self.framework is None else self.framework(stated.fields, entries)
        )

    def write(self, fields: Fields) -> dict[str, object]:
        """Values of the format's keys that state the fields.

        Raises:
            LaunchFileError: a field that the framework cannot do; says why.
        """
        values: dict[str, object] = {}
        for rule in self.table:
            written = rule.write(fields).items()
            # Two rules may write one key; the first is the one that the field is about.
            values |= {
                name: value for name, value in written if value is not None and name not in values
            }
        return values


def patterns(*themes: str) -> tuple[str, ...]:
    """Split texts of blank-separated key patterns."""
    return tuple(" ".join(themes).split())


_BEHIND_UNDEFINED: Final = re.compile(r"/([A-Za-z0-9][\w.-]*)/?$")
"""The last folder of a path, in which nothing is left open."""


def undefined(value: object) -> bool:
    """Whether a value depends on a variable or command that the file does not define."""
    return isinstance(value, str) and ("${" in value or "$(" in value)


def _read_rule(rule: Rule, stated: Entries, place: str) -> Fields:
    """Fields that a rule reads from its keys in the file; none if these leave the choice to the
    framework."""
    values = rule.said({name: entry.value for name, entry in stated.items()})
    try:
        return rule.read(values) if values else {}
    except BadValue as error:
        # Messages end with the value that they are about.
        guilty = (name for name, value in values.items() if str(error).endswith(f"got {value!r}"))
        name = next(guilty, next(iter(values)))
        raise broken_at(place, stated[name], f"{name} {error}") from None


_FLAGS: Final = {
    "model": "--model",
    "experts.": "--model",
    "latent.": "--model",
    "devices": "--devices",
    "global_batch": "--global-batch",
    "seq_len": "--seq-len",
    "dtype": "--dtype",
}
"""Command-line flags that state fields, by prefix of the fields' names."""


def _flag_for(rule: Rule) -> str:
    """The flag that replaces the fields of a rule."""
    if not rule.fields:
        return "the flag"
    field = rule.fields[0]
    for start, flag in _FLAGS.items():
        if field.startswith(start):
            return flag
    return f"--layout {field}=..."


_EXTRAS: Final = re.compile(
    r"flash|sdpa|spda|emha|legacy|fuse|kernel|cache|(^|[._-])(use|enable|with)[_-](?!bias|norm)"
)
"""Names of switches that add something: kernels, caches and the like, and words for adding."""


def _takes_away(key: str, value: object) -> bool:
    """Whether a setting takes a part of the model away that its framework may have by default
    (`moe_glu: false`)."""
    return value is False and harm_of(key) is Harm.MODEL and _EXTRAS.search(key.lower()) is None


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
