"""Records divided into sections whose keys stay flat.

Code reads `framework.memory.bucket_bytes`; files, columns of tables and keywords say `bucket_bytes`
alone, as in `Framework(bucket_bytes=1e6)` and `replace(framework, bucket_bytes=1e6)`. Which section
a key belongs to follows from the dataclasses.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, wraps
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, Self, TypeVar, get_type_hints

from perfmodel.errors import LayoutError, UnknownNameError

Record = TypeVar("Record")
_SECTION: Final = "keys of a section"


@dataclass(frozen=True)
class KeyField:
    """The field that a flat key names."""

    path: tuple[str, ...]
    """Names of the enclosing sections, outermost first, then the field's own name."""
    home: type
    """Record that has the field."""

    @property
    def name(self) -> str:
        """Name of the field in its record, which is the key."""
        return self.path[-1]

    @property
    def hint(self) -> Any:
        """Type of the values."""
        return get_type_hints(self.home)[self.name]

    @property
    def default(self) -> Any:
        """Default of the field; `dataclasses.MISSING` if it has none."""
        return next(f.default for f in fields(self.home) if f.name == self.name)


def section(*keys: str) -> dict[str, Any]:
    """Metadata that marks a field as a section: `field(default=Memory(), metadata=section())`.

    Args:
        keys: fields of the section that are keys of the whole record; all of them where none is
            named.
    """
    return {_SECTION: keys}


@cache
def key_fields(kind: type) -> Mapping[str, KeyField]:
    """The fields of a record and its sections by flat key; sections themselves have no key.

    Raises:
        ValueError: two fields have the same key.
    """
    by_key: dict[str, KeyField] = {}
    for outer in fields(kind):
        entries = {outer.name: KeyField((outer.name,), kind)}
        # A section stands for its keys, or for those of them that it names.
        if _SECTION in outer.metadata:
            inner_fields = key_fields(type(outer.default))
            keys = outer.metadata[_SECTION] or inner_fields
            entries = {
                key: KeyField((outer.name, *inner_fields[key].path), inner_fields[key].home)
                for key in keys
            }
        shared = by_key.keys() & entries.keys()
        if shared:
            raise ValueError(f"{kind.__name__} has two fields with the key {min(shared)}")
        by_key |= entries
    return MappingProxyType(by_key)


def flat_keywords(kind: type[Record]) -> type[Record]:
    """Let the constructor of a dataclass, and `dataclasses.replace`, accept keys of its sections
    too.

    `Framework(bucket_bytes=1e6)` is `Framework(memory=MemoryCosts(bucket_bytes=1e6))`. A section
    and keys of it together are this section with these values, which is what `dataclasses.replace`
    passes.
    """
    # A dataclass makes its constructor itself, so that it is wrapped afterwards.
    plain_init = kind.__init__
    names = _field_names(kind)

    @wraps(plain_init)
    def init(self: Record, **values: Any) -> None:
        # Most records are made of their own fields alone, millions of layouts in a search.
        if not names.issuperset(values):
            values = _into_sections(kind, values)
        plain_init(self, **values)

    kind.__init__ = init
    return kind


def _field_names(kind: type) -> frozenset[str]:
    """Names of a record's own fields."""
    return frozenset(kind.__dataclass_fields__)


class Sectioned:
    """A frozen dataclass with sections, whose values can also be accessed by flat key."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields, or keys of sections, changed."""
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def value(self, key: str) -> Any:
        """The value of a flat key."""
        record: Any = self
        for name in key_fields(type(self))[key].path:
            record = getattr(record, name)
        return record

    def values(self) -> dict[str, Any]:
        """All values by flat key."""
        return {key: self.value(key) for key in key_fields(type(self))}


def nested(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest values given by flat key into tables, one per section used. Unknown keys are left
    out."""
    tables: dict[str, Any] = {}
    by_key = key_fields(kind)
    for key, value in values.items():
        if key not in by_key:
            continue
        # A path names the sections from the outermost to the innermost, then the field.
        *outer, name = by_key[key].path
        table = tables
        for section_name in outer:
            table = table.setdefault(section_name, {})
        table[name] = value
    return tables


def flat_location(kind: type, location: Iterable[str | int]) -> tuple[str | int, ...]:
    """Convert a location in `nested` tables to a flat key and the location inside its value."""
    steps = tuple(location)
    sections = {
        outer.name: type(outer.default) for outer in fields(kind) if _SECTION in outer.metadata
    }
    if steps and steps[0] in sections:
        return flat_location(sections[str(steps[0])], steps[1:])
    return steps


def _into_sections(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    """Convert values by flat key into arguments of the plain constructor.

    Raises:
        UnknownNameError: a keyword that is neither a field nor a key of a section.
    """
    names = kind.__dataclass_fields__
    by_key = key_fields(kind)
    arguments: dict[str, Any] = {}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name in names:
            arguments[name] = value
        elif name in by_key:
            changes.setdefault(by_key[name].path[0], {})[name] = value
        else:
            raise UnknownNameError(f"field of {kind.__name__}", name, {*names, *by_key})

    # The section that is passed is changed, or else the default one.
    for section_name, changed in changes.items():
        before = arguments.get(section_name, names[section_name].default)
        arguments[section_name] = replace(before, **changed)
    return arguments


def require_switches(owner: str, record: Any) -> None:
    """Raise `LayoutError` unless every field of type bool, in sections too, is true or false.

    Any other value, such as the text "no", would count as true.
    """
    names, values_of = _switches(type(record))
    for name, value in zip(names, values_of(record), strict=True):
        if type(value) is not bool:
            raise LayoutError(f"{owner}: {name} must be true or false, got {value!r}"[:200])


@cache
def _switches(kind: type) -> tuple[tuple[str, ...], attrgetter]:
    """Keys of all fields of type bool, and a function that returns their values."""
    switches = {
        key: ".".join(field.path) for key, field in key_fields(kind).items() if field.hint is bool
    }
    return tuple(switches), attrgetter(*switches.values())
