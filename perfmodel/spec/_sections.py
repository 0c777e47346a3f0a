"""Wide records in sections, whose keys stay flat.

Code reads `framework.memory.bucket_bytes`; files, columns of tables and keywords say `bucket_bytes` alone. Which
section a key belongs to follows from the dataclasses.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Self, get_type_hints

from perfmodel.errors import UnknownNameError

_SECTION: Final = "keys of a section"


@dataclass(frozen=True)
class KeyField:
    """The field that a flat key names."""

    path: tuple[str, ...]
    """Names of the sections that it lies in, from the outermost, and its own."""
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
        """Default of the field; `dataclasses.MISSING` where it has none."""
        return next(f.default for f in fields(self.home) if f.name == self.name)


def section(*keys: str) -> dict[str, Any]:
    """Metadata of a field whose default is a record of its own: `field(default=Memory(), metadata=section())`.

    Args:
        keys: fields of the section that are keys of the whole record; all of them where none is named.
    """
    return {_SECTION: keys}


@cache
def key_fields(kind: type) -> Mapping[str, KeyField]:
    """The fields of a record by flat key, those of its sections among them; sections themselves have no key."""
    by_key: dict[str, KeyField] = {}
    for outer in fields(kind):
        if _SECTION not in outer.metadata:
            by_key[outer.name] = KeyField((outer.name,), kind)
            continue
        inner_fields = key_fields(type(outer.default))
        for key in outer.metadata[_SECTION] or inner_fields:
            inner = inner_fields[key]
            by_key[key] = KeyField((outer.name, *inner.path), inner.home)
    return MappingProxyType(by_key)


class Sectioned:
    """A frozen dataclass, some of whose fields are sections: made, changed and read by flat keys too."""

    @classmethod
    def from_fields(cls, **values: Any) -> Self:
        """A record by flat keys; what is left out has its default.

        Raises:
            UnknownNameError: a key that the record does not have.
        """
        defaults = {outer.name: outer.default for outer in fields(cls) if _SECTION in outer.metadata}  # pyright: ignore[reportArgumentType]
        return cls(**_arguments(cls, values, defaults))

    def replace(self, **changes: Any) -> Self:
        """A copy with other values of some flat keys.

        Raises:
            UnknownNameError: a key that the record does not have.
        """
        return replace(self, **_arguments(type(self), changes, vars(self)))  # pyright: ignore[reportArgumentType]

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
    """Values by flat key as tables in tables, one for each section that has any of them. Unknown keys are left out."""
    tables: dict[str, Any] = {}
    by_key = key_fields(kind)
    for key, value in values.items():
        if key not in by_key:
            continue
        *outer, name = by_key[key].path
        table = tables
        for section_name in outer:
            table = table.setdefault(section_name, {})
        table[name] = value
    return tables


def flat_location(kind: type, location: Iterable[str | int]) -> tuple[str | int, ...]:
    """Where a value lies in `nested` tables, without the sections: the flat key, and what lies inside its value."""
    left = tuple(location)
    sections = {outer.name: type(outer.default) for outer in fields(kind) if _SECTION in outer.metadata}
    if left and left[0] in sections:
        return flat_location(sections[str(left[0])], left[1:])
    return left


def _arguments(kind: type, values: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the constructor for values by flat key; `sections` are those that are changed."""
    arguments: dict[str, Any] = {}
    changes: dict[str, dict[str, Any]] = {}
    by_key = key_fields(kind)
    for key, value in values.items():
        if key not in by_key:
            raise UnknownNameError(f"field of {kind.__name__}", key, by_key)
        outer, *inner = by_key[key].path
        if inner:
            changes.setdefault(outer, {})[key] = value
        else:
            arguments[outer] = value
    for name, changed in changes.items():
        before = sections[name]
        arguments[name] = before.replace(**changed) if isinstance(before, Sectioned) else replace(before, **changed)
    return arguments
