"""Records in sections are made, changed, read and stated by flat keys."""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import pytest

from perfmodel import catalog
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Framework, Sectioned, documented, key_fields, nested

RECORDS: list[type[Sectioned]] = [Framework]
MOST_FIELDS = 31


def sections_of(kind: type) -> list[type]:
    """The record and all records that its keys lie in."""
    return [kind, *{entry.home for entry in key_fields(kind).values()} - {kind}]


def of_catalog() -> list[Framework]:
    return [version for name in catalog.frameworks() for version in catalog.framework_versions(name)]


@pytest.mark.parametrize("kind", RECORDS)
def test_no_section_is_too_wide_to_hold_in_mind(kind: type) -> None:
    for home in sections_of(kind):
        keys = [key for key, entry in key_fields(kind).items() if entry.home is home]
        assert len(keys) <= MOST_FIELDS, home


@pytest.mark.parametrize("kind", RECORDS)
def test_every_key_says_what_it_is_and_no_two_fields_share_one(kind: type) -> None:
    names: list[str] = []
    for home in sections_of(kind):
        names += [f.name for f in fields(home) if key_fields(kind).get(f.name, None) and not is_dataclass(f.default)]
    assert sorted(names) == sorted(set(names))
    for key, entry in key_fields(kind).items():
        assert documented(entry.home)[key] or entry.home is kind, key


@pytest.mark.parametrize("framework", of_catalog(), ids=lambda framework: framework.label)
def test_a_record_is_made_of_its_values(framework: Framework) -> None:
    values = framework.values()
    assert Framework.from_fields(**values) == framework == Framework().replace(**values)
    assert all(framework.value(key) == value for key, value in values.items())


def test_a_key_changes_its_own_value_alone() -> None:
    framework = Framework()
    for key, entry in key_fields(Framework).items():
        other: Any = {bool: lambda value: not value, int: lambda value: value + 1}.get(entry.hint, lambda value: value)
        changed = framework.replace(**{key: other(framework.value(key))})
        assert changed.values() == framework.values() | {key: other(framework.value(key))}


def test_defaults_are_those_of_the_sections() -> None:
    for key, value in Framework().values().items():
        assert key_fields(Framework)[key].default in (value, MISSING)


def test_files_and_keywords_name_keys_and_no_sections() -> None:
    assert nested(Framework, {"bucket_bytes": 1.0, "florp": 2}) == {"memory": {"bucket_bytes": 1.0}}
    with pytest.raises(UnknownNameError, match=r"field of Framework 'bucket_byte'; did you mean 'bucket_bytes'"):
        Framework.from_fields(bucket_byte=1.0)
    with pytest.raises(UnknownNameError, match="field of Framework 'memory'"):
        Framework().replace(memory=1.0)
    with pytest.raises(PerfModelError, match=r"here: bucket_bytes: .*; memory: unknown key"):
        catalog.checked(Framework, {"bucket_bytes": "many", "memory": {"bucket_bytes": 1.0}}, "here")
