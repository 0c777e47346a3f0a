"""Merges new values into a user's launch file, whose other settings stay."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._model import PARTS_OF_MODEL, catalog_model, model_of, shape
from perfmodel.ingest.launch._read import text_of
from perfmodel.ingest.launch._read_entries import wrapper_of
from perfmodel.ingest.launch._recognise import recognised
from perfmodel.ingest.launch._table import BadValue, Fields, Rule


def merged(
    form: LaunchFormat, fields: Fields, template: Path | str, *, stays: bool
) -> dict[str, Any]:
    """Values that state the fields, merged into another file of the same format.

    Args:
        template: path of the other file.
        stays: keys that already say the fields keep their values, and models their names.

    Raises:
        LaunchFileError: the file is of another format, or the format cannot say the fields.
    """
    source, template_form = recognised(text_of(Path(template)), str(template))
    if template_form is not form:
        raise LaunchFileError(
            f"{template}: this is a launch file of {template_form.name}, not of {form.name}; give a file of "
            f"{form.name}, or leave it out"
        )
    # Values are computed under plain names, and stand in the user's file perhaps inside a wrapping
    # table.
    places = {key.removeprefix(wrapper_of(key)): key for key in source.written}
    wrapper = next(filter(None, map(wrapper_of, source.written)), "")
    settings = {key: entry.value for key, entry in source.entries.items()}
    if stays and _names_model(form, settings, fields):
        fields = without_model(fields)
    values = form.write(fields)
    if stays:
        own_notation = {key: source.written[place] for key, place in places.items()}
        values = _with_own_notation(form, fields, values, settings, own_notation)

    # The values replace those of the file. Its other settings stay, except those of layouts and
    # models.
    placed = {places.get(key, wrapper + key): value for key, value in values.items()}
    replaced: set[str] = set()
    for rule in form.table:
        replaced |= {places.get(key, key) for key in rule.keys}
    # A table written as dotted keys replaces one that stands as a whole.
    for key in placed:
        replaced |= _parents(key)
    merged_values = {}
    for key, value in source.written.items():
        if key in placed or key not in replaced:
            merged_values[key] = placed.get(key, value)
    return merged_values | placed


def _with_own_notation(
    form: LaunchFormat,
    fields: Fields,
    values: dict[str, Any],
    settings: Mapping[str, Any],
    own_notation: Mapping[str, Any],
) -> dict[str, Any]:
    """Values in the file's own notation (a list in place of a number, an alias) where it already
    states the same fields.

    So the difference to a user's file stays small.

    Args:
        values: values of the keys that the format writes for the fields.
        settings: settings of the file, references and included files resolved.
        own_notation: notation of the file's keys, as they are written in it.
    """
    owners: Counter[str] = Counter()
    for rule in form.table:
        owners.update(rule.keys)

    # First the keys that are already right.
    for rule in form.table:
        # A key that several rules read may mean more than this rule knows of: only its exclusive
        # keys stay.
        exclusive = {key for key in rule.keys if owners[key] == 1}
        stated = {key: value for key, value in settings.items() if key in rule.keys}
        if exclusive & set(stated) and _says(rule, stated, fields):
            values = {key: value for key, value in values.items() if key not in exclusive}
            values |= {
                key: own_notation[key] for key in exclusive & set(stated) & set(own_notation)
            }

    # Then keys that are read and never written, where they contradict nothing.
    agreed = {}
    for key in settings:
        if key in own_notation and key not in values and _agrees(form, key, settings, fields):
            agreed[key] = own_notation[key]
    return values | agreed


def _parents(key: str) -> set[str]:
    """Tables that contain a key: `a` and `a.b` for `a.b.c`."""
    return {key[:position] for position, char in enumerate(key) if char == "."}


def without_model(fields: Fields) -> Fields:
    """All fields but those of the model."""
    return {key: value for key, value in fields.items() if not key.startswith(PARTS_OF_MODEL)}


def _fields_written(rule: Rule, stated: Mapping[str, Any]) -> Fields:
    settings = rule.said(stated)
    try:
        return rule.read(settings) if settings else {}
    except BadValue:
        return {}


def _says(rule: Rule, stated: Mapping[str, Any], fields: Fields) -> bool:
    """Whether a rule's settings agree with all fields that they state, and state at least one."""
    written = _fields_written(rule, stated)
    if "model" in written:
        return _same_model(written["model"], fields)
    return bool(written) and all(
        fields.get(key) == value for key, value in written.items() if not key.startswith("note.")
    )


_NOT_WRITTEN: Final = ("note.", "doubt.", "bucket_bytes")
"""Prefixes of fields that no format writes; a file's keys for them stay unchanged."""


def _agrees(form: LaunchFormat, key: str, settings: Mapping[str, Any], fields: Fields) -> bool:
    """Whether a key that the format reads but does not write agrees with the fields."""
    owners = [rule for rule in form.table if key in rule.keys]
    for rule in owners:
        written = _fields_written(
            rule, {name: value for name, value in settings.items() if name in rule.keys}
        )
        claimed = {
            name: value for name, value in written.items() if not name.startswith(_NOT_WRITTEN)
        }
        if any(fields.get(name) != value for name, value in claimed.items()):
            return False
    return bool(owners)


def _names_model(form: LaunchFormat, settings: Mapping[str, Any], fields: Fields) -> bool:
    """Whether the file names the model of the fields instead of describing it."""
    for rule in form.table:
        written = _fields_written(
            rule, {key: value for key, value in settings.items() if key in rule.keys}
        )
        if "model" in written and _same_model(written["model"], fields):
            return True
    return False


def _same_model(name: str, fields: Fields) -> bool:
    named = catalog_model(name)
    expected = catalog_model(fields["named"]) if "named" in fields else None
    return named is not None and shape(named) == shape(expected or model_of(fields, "", ""))
