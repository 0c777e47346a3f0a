"""Settings of the named recipes of torchtitan, Megatron-Bridge and NeMo 2, from `recipes.toml`."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.files import parse_toml
from perfmodel.ingest.launch._bridge import BRIDGE
from perfmodel.ingest.launch._entries import Entry, Source, broken
from perfmodel.ingest.launch._format import LaunchFormat, undefined
from perfmodel.ingest.launch._hook_file import nemo_entries
from perfmodel.ingest.launch._model import catalog_model
from perfmodel.ingest.launch._torchtitan_precision import BY_OPERATOR, SELECTIVE_OPTION
from perfmodel.spec import Model


def recipe_tables(framework: str) -> dict[str, Any]:
    """Settings of all recipes of a framework; those of torchtitan are grouped by module."""
    # A copy, because a script may change the lists of its recipe.
    recipes = deepcopy(_file_of_recipes()[framework])
    if framework == "nemo":
        # One function of NeMo 2 fine-tunes with adapters or without: here these are two recipes.
        common, *by_name = deepcopy(_file_of_recipes()["nemo-finetuning"]).items()
        for name, kinds in by_name:
            for kind, changes in kinds.items():
                recipes[f"{name}_{kind}"] = {"model": recipes[name]["model"]} | common[1] | changes
    return recipes


@cache
def _file_of_recipes() -> dict[str, Any]:
    """The tables of `recipes.toml` by framework, read once: it takes as long as a whole script."""
    return parse_toml(files("perfmodel.ingest.launch").joinpath("recipes.toml").read_text())


def recipe_entries(framework: str, *names: str, place: str, line: int) -> dict[str, Entry]:
    """The settings of a recipe.

    Raises:
        LaunchFileError: it is not known; names those that are.
    """
    table = recipe_tables(framework)
    for name in names:
        if name not in table:
            raise unknown_recipe(framework, name, sorted(table), place, line)
        table = table[name]
    entries = {key: Entry(value, 0) for key, value in table.items()}
    if framework == "torchtitan":
        # Recipes are of 2026, when recompute of every n-th layer was no longer to be had.
        entries.setdefault(SELECTIVE_OPTION, Entry(BY_OPERATOR, 0))
    return entries


def known_entries(
    framework: str, *names: str, place: str, line: int
) -> tuple[dict[str, Entry], LaunchFileError | None]:
    """Return the settings of a recipe and no error, or for an unknown recipe no settings and the
    error."""
    try:
        return recipe_entries(framework, *names, place=place, line=line), None
    except LaunchFileError as error:
        return {}, error


def with_unknown_recipe(source: Source, framework: str, error: LaunchFileError) -> Source:
    """Add a doubt and an error to the settings that a command or script states beside an unknown
    recipe: they can be read if the caller gives the model, but what the recipe itself sets stays
    unknown."""
    doubt = (
        f"the layout, the batch and the precision may be wrong: the settings of this {framework} recipe are not known, "
        "so only the settings that the command adds are read"
    )
    return replace(source, doubts=(doubt, *source.doubts), without_model=error)


def unknown_recipe(
    framework: str, name: str, known: Sequence[str], place: str, line: int
) -> LaunchFileError:
    """The error for a recipe that is not known, which names those that are."""
    remedy = (
        f"or add the lines that perfmodel hook {framework} prints and give the file that they write"
    )
    return broken(
        place,
        line,
        f"perfmodel knows no {framework} recipe named {name!r}; known: {', '.join(known)}; give "
        f"--model to read the other settings of the command, {remedy}",
    )


def nemo_name(name: str, is_fine_tuning: bool, peft_scheme: object) -> str:
    """Name in the tables of a recipe of NeMo 2.

    Args:
        name: name of the recipe's model.
        is_fine_tuning: whether it is the model's recipe of fine-tuning.
        peft_scheme: value of the recipe's argument of this name.
    """
    if not is_fine_tuning:
        return name
    is_whole = peft_scheme is None or (
        isinstance(peft_scheme, str) and peft_scheme.lower() == "none"
    )
    return f"{name}_{'sft' if is_whole else 'peft'}"


def module_of(name: str) -> tuple[str, str]:
    """The torchtitan module with a recipe of this name, and the name; empty if there is none."""
    for module, recipes in recipe_tables("torchtitan").items():
        if name in recipes:
            return module, name
    return "", ""


_DEVICES: Final = ("trainer.devices", "trainer.num_nodes")


def whole_devices(entries: Mapping[str, Entry], place: str) -> int | None:
    """Devices of a recipe of NeMo 2; None if the script does not tell them.

    Raises:
        LaunchFileError: a number that is none.
    """
    devices = 1
    for key in _DEVICES:
        count = entries.get(key)
        if count is None or count.value == "auto" or undefined(count.value):
            return None
        if isinstance(count.value, bool) or not isinstance(count.value, int) or count.value < 1:
            raise broken(
                place,
                count.line,
                f"{key} must be a whole number of at least 1, got {count.value!r}",
            )
        devices *= count.value
    return devices


def nemo_recipe(
    name: str, changes: Mapping[str, Entry], place: str, line: int
) -> tuple[Source, LaunchFormat]:
    """A recipe of NeMo 2 with the changes of a command."""
    entries, error = known_entries("nemo", name, place=place, line=line)
    model = _named_model(entries)
    entries |= changes
    devices = whole_devices(entries, place)
    source, form = nemo_entries(Source(place=place, entries=entries))
    source = replace(source, recipe_model=model, devices=devices)
    return (source if error is None else with_unknown_recipe(source, "nemo", error)), form


def bridge_recipe(
    name: str, changes: Mapping[str, Entry], place: str, line: int
) -> tuple[Source, LaunchFormat]:
    """A recipe of Megatron-Bridge with the changes of a command."""
    entries, error = known_entries("megatron-bridge", name, place=place, line=line)
    model = _named_model(entries)
    source = Source(place=place, entries=entries | dict(changes), recipe_model=model)
    return (
        source if error is None else with_unknown_recipe(source, "megatron-bridge", error)
    ), BRIDGE


def _named_model(entries: dict[str, Entry]) -> Model | None:
    """The model of a recipe, which is taken out of its settings."""
    name = entries.pop("model", None)
    return None if name is None else catalog_model(str(name.value))
