"""Blocks of models of every kind are those of the table as it was last written."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from known_blocks import BASES, SECTIONS, TABLE, cases, varied_models
from stored_figures import moved_figures

from perfmodel.spec import Transformer

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/workload/known_blocks.py` and review it"


def test_blocks_of_every_kind_are_those_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"


def test_every_field_of_a_model_and_of_its_parts_is_varied() -> None:
    """A formula of a field that is the same in all of the table could be wrong unnoticed."""
    values_of_field: dict[str, set[str]] = {}
    for base in BASES.values():
        for model in varied_models(base):
            if isinstance(model, Transformer):
                for name, value in _leaves(model):
                    values_of_field.setdefault(name, set()).add(value)
    alike = [name for name, values in values_of_field.items() if len(values) == 1]
    assert not alike


def _leaves(record: Any) -> Iterator[tuple[str, str]]:
    """Fields of a record and of the records in it, by the kind of record."""
    for field in fields(record):
        value = getattr(record, field.name)
        if field.name not in SECTIONS:
            yield f"{type(record).__name__}.{field.name}", str(value)
        if is_dataclass(value):
            yield from _leaves(value)
