"""A user's own file with another layout in it: settings that say nothing of layouts, and those that already say what
they should, stay as they are."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._launch import catalog_model, model_of, shape
from perfmodel.ingest.launch._read import recognised, text_of, wrapper_of
from perfmodel.ingest.launch._table import BadValue, Fields, Rule, unsaid


def merged(form: LaunchFormat, fields: Fields, like: Path | str, *, stays: bool) -> dict[str, Any]:
    """Values of a file that says the fields, made from another of the same format.

    Args:
        stays: keys that already say the fields keep their values, and models their names.

    Raises:
        LaunchFileError: the file is of another format, or the format cannot say the fields.
    """
    source, other = recognised(text_of(Path(like)), str(like))
    if other is not form:
        raise LaunchFileError(f"{like}: a launch file of {other.name}, not of {form.name}; leave it out")
    places = {key.removeprefix(wrapper_of(key)): key for key in source.written}
    wrapper = next(filter(None, map(wrapper_of, source.written)), "")
    found = {key: entry.value for key, entry in source.entries.items()}
    fields = without_model(fields) if stays and _names_model(form, found, fields) else fields
    values = form.write(fields)
    if stays:
        owners = Counter(key for rule in form.table for key in rule.keys)
        for rule in form.table:
            own = {key for key in rule.keys if owners[key] == 1}
            stated = {key: value for key, value in found.items() if key in rule.keys}
            if own & set(stated) and _says(rule, stated, fields):
                values = {key: value for key, value in values.items() if key not in own}
                values |= {key: source.written[places[key]] for key in own & set(stated) & set(places)}
    # values in the place of the file's, without what else it says of layouts
    ours = {places.get(key, wrapper + key): value for key, value in values.items()}
    meant = {places.get(key, key) for rule in form.table for key in rule.keys}
    parents = {key[:at] for key in ours for at, char in enumerate(key) if char == "."}
    kept = {
        key: ours.get(key, value)
        for key, value in source.written.items()
        if key in ours or (key not in meant and key not in parents)
    }
    return kept | ours


def without_model(fields: Fields) -> Fields:
    """The fields that say nothing of the model."""
    return {key: value for key, value in fields.items() if not key.startswith(("model.", "experts.", "latent."))}


def _said(rule: Rule, stated: Mapping[str, Any]) -> Fields:
    found = {key: value for key, value in stated.items() if not unsaid(value)}
    try:
        return rule.read(found) if found else {}
    except BadValue:
        return {}


def _says(rule: Rule, stated: Mapping[str, Any], fields: Fields) -> bool:
    """Whether values already say what the fields are, of which they say any."""
    said = _said(rule, stated)
    if "model" in said:
        return _same_model(said["model"], fields)
    return bool(said) and all(fields.get(key) == value for key, value in said.items() if not key.startswith("note."))


def _names_model(form: LaunchFormat, found: Mapping[str, Any], fields: Fields) -> bool:
    """Whether the file names the model of the fields instead of describing it."""
    for rule in form.table:
        said = _said(rule, {key: value for key, value in found.items() if key in rule.keys})
        if "model" in said and _same_model(said["model"], fields):
            return True
    return False


def _same_model(name: str, fields: Fields) -> bool:
    named = catalog_model(name)
    wanted = catalog_model(fields["named"]) if "named" in fields else None
    return named is not None and shape(named) == shape(wanted or model_of(fields, "", ""))
