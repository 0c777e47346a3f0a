"""Python scripts of NeMo 2 and Megatron-Bridge that take a recipe and change it.

The script is followed without being executed (`python_script`). This module finds the calls that
make a recipe, and the one recipe of several that is run; `_recipe_settings` reads its settings.
What only an undecided condition changes is read as if the condition did not hold, and said at the
head of the answer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from perfmodel.ingest.launch._bridge import BRIDGE
from perfmodel.ingest.launch._entries import Entry, Neighbours, Source
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._hook_file import nemo_entries, with_precision
from perfmodel.ingest.launch._python_values import ScriptObject
from perfmodel.ingest.launch._recipe_models import model_of_recipe
from perfmodel.ingest.launch._recipe_settings import (
    RECIPE_NAME,
    RecipeSettings,
    add_attributes,
    recipe_fields,
    setting_doubts,
)
from perfmodel.ingest.launch._recipe_tables import (
    nemo_name,
    recipe_tables,
    unknown_recipe,
    whole_devices,
    with_unknown_recipe,
)
from perfmodel.ingest.launch._xtuner import plain_value
from perfmodel.ingest.launch.python_script import Followed, follow, module_beside

_RECIPE_CALL: Final = re.compile(
    r"\b((pretrain|finetune)_recipe|\w+_(pretrain|finetune|sft|peft)_config)\b"
)
"""Functions of NeMo 2 and Megatron-Bridge that make a recipe."""
_OF_BRIDGE: Final = ("_pretrain_config", "_sft_config", "_peft_config", "_finetune_config")
_RUN: Final = re.compile(r"(^|\.)(run|add|pretrain|finetune|train|distill|build|main)$")
"""Calls that a script hands the recipe to that it runs."""
_CHANGES_NOTHING: Final = re.compile(
    r"(^|[._])(print\w*|pprint|log\w*|info|debug|warning|save\w*|dump\w*|write\w*|to_yaml|to_dict|asdict|validate\w*"
    r"|check\w*|verify\w*|show\w*|display\w*|isinstance|hasattr|len|str|repr|type|id|deepcopy|copy|fiddle[\w.]*"
    r"|\w*omegaconf\w*|OmegaConf[\w.]*|\w*overrides?|get_\w*|append|items|dryrun|\w*executor\w*|\w*plugins?)$",
    re.IGNORECASE,
)
"""Calls of code from outside that get a recipe and leave its settings alone."""


@dataclass(frozen=True)
class _Recipe:
    """A recipe that a script makes."""

    instance: ScriptObject
    framework: str
    name: str
    line: int
    function: str = ""
    """The script's function that makes it, if nothing in the script calls that function."""


def makes_recipe(text: str) -> bool:
    """Whether a Python script may call a function that makes a recipe."""
    return _RECIPE_CALL.search(text) is not None


def recipe_script(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> tuple[Source, LaunchFormat] | None:
    """Settings of a Python script that takes a recipe and changes it; None for other scripts.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments, or the name of its function whose recipe is wanted.
        variables: environment variables of the script.

    Raises:
        LaunchFileError: no Python, or a recipe that is not known.
    """
    if not makes_recipe(text):
        return None
    neighbours = Neighbours(Path(place).parent)

    def fields_of(maker: str, positional: list[Any], keywords: dict[str, Any]) -> dict[str, Any]:
        named = _named_by(maker, keywords)
        if named is None:
            return {}
        return {RECIPE_NAME: named} | recipe_fields(*named, keywords)

    followed = follow(
        text,
        place,
        arguments=arguments,
        variables=variables,
        fields_of=fields_of,
        module_text=lambda name: module_beside(name, neighbours),
    )
    recipes = _recipes_made(followed)
    run = _that_runs(followed, recipes)
    notes: list[str] = []
    if run is None:
        unused = _in_unused_functions(followed)
        if not unused:
            return None
        wanted = [recipe for recipe in unused if recipe.function in arguments[:1]]
        run = (wanted or unused)[0]
        if len(unused) > 1 and not wanted:
            alternatives = ", ".join(recipe.function for recipe in unused[1:4])
            notes.append(
                f"the script runs none of its {len(unused)} functions that make a recipe; perfmodel reads "
                f"{run.function}; give another one's name after the file ({alternatives})"
            )
    return _read(run, followed, place, arguments, notes)


# --- recipes and the one that runs
# ---------------------------------------------------------------------


def _named_by(maker: str, keywords: Mapping[str, Any]) -> tuple[str, str] | None:
    """Framework and name of the recipe that a call makes; None for other calls."""
    *outer, last = maker.split(".")
    if last == "pretrain_recipe" and outer:
        return "nemo", outer[-1]
    if last == "finetune_recipe" and outer:
        return "nemo", nemo_name(outer[-1], True, keywords.get("peft_scheme", "lora"))
    if last.endswith("_finetune_config"):
        # Until release 0.2 one function made both kinds.
        kind = "sft" if keywords.get("peft", "lora") in (None, "none") else "peft"
        return "megatron-bridge", f"{last.removesuffix('_finetune_config')}_{kind}_config"
    return ("megatron-bridge", last) if last.endswith(_OF_BRIDGE) else None


def _recipes_made(followed: Followed) -> list[_Recipe]:
    recipes = []
    for call in followed.calls:
        named = call.made.fields.get(RECIPE_NAME) if isinstance(call.made, ScriptObject) else None
        if named is not None:
            recipes.append(_Recipe(call.made, str(named[0]), str(named[1]), call.line))
    return recipes


def _that_runs(followed: Followed, recipes: Sequence[_Recipe]) -> _Recipe | None:
    """The recipe that a script runs: the first that surely is handed to a runner, or else the last
    one made."""
    by_instance = {id(recipe.instance): recipe for recipe in recipes}
    handed = []
    for call in followed.calls:
        if _RUN.search(call.path):
            handed += [
                (call.is_certain, by_instance[id(instance)])
                for instance in call.instances
                if id(instance) in by_instance
            ]
    certain = [recipe for is_certain, recipe in handed if is_certain]
    if handed:
        return certain[0] if certain else handed[0][1]
    return recipes[-1] if recipes else None


def _in_unused_functions(followed: Followed) -> list[_Recipe]:
    """Recipes of functions that nothing in the script calls, such as factories of a command
    line."""
    recipes: list[_Recipe] = []
    for name in followed.unused_functions:
        known = {id(recipe.instance) for recipe in _recipes_made(followed)}
        result = followed.call(name)
        made = [recipe for recipe in _recipes_made(followed) if id(recipe.instance) not in known]
        returned = [recipe for recipe in made if recipe.instance is result]
        chosen = returned or made[-1:]
        recipes += [replace(recipe, function=name) for recipe in chosen[:1]]
    return recipes


def _read(
    recipe: _Recipe, followed: Followed, place: str, arguments: Sequence[str], notes: Sequence[str]
) -> tuple[Source, LaunchFormat]:
    """Settings and format of a recipe with the script's changes to it."""
    settings = RecipeSettings(notes=list(notes))
    add_attributes(recipe.instance, "", settings)
    overrides = _overrides(followed, arguments)
    settings.entries |= overrides
    model, model_notes = model_of_recipe(recipe.instance, settings.entries)
    source = Source(place=place, entries=settings.entries, recipe_model=model)
    if recipe.framework == "nemo":
        source, form = nemo_entries(source)
        devices = whole_devices(settings.entries, place)
    else:
        source = replace(source, entries=with_precision(source.entries))
        form = BRIDGE
        devices = _devices_of_executor(followed)
    doubts = [*setting_doubts(settings, form), *_handed_over(recipe, followed)]
    source = replace(
        source, devices=devices, notes=(*settings.notes, *model_notes), doubts=tuple(doubts)
    )
    known = recipe_tables(recipe.framework)
    if recipe.name in known:
        return source, form
    error = unknown_recipe(recipe.framework, recipe.name, sorted(known), place, recipe.line)
    return with_unknown_recipe(source, recipe.framework, error), form


def _overrides(followed: Followed, arguments: Sequence[str]) -> dict[str, Entry]:
    """Settings `a.b=c` behind the script's name, if the script hands these to the recipe."""
    if not any(re.search(r"overrides?", call.path) for call in followed.calls):
        return {}
    settings = {}
    for word in arguments:
        setting = re.fullmatch(r"\+{0,2}([A-Za-z_]\w*\.[\w.]+)=(.*)", word, re.DOTALL)
        if setting:
            settings[setting[1]] = Entry(plain_value(setting[2]), 0)
    return settings


def _devices_of_executor(followed: Followed) -> int | None:
    """Devices of the job that NeMo-Run's executor asks for; None if there is none."""
    for call in followed.calls:
        if isinstance(call.made, ScriptObject) and call.path.endswith(
            ("SlurmExecutor", "LocalExecutor")
        ):
            nodes = call.made.fields.get("nodes", 1)
            each = call.made.fields.get("ntasks_per_node", call.made.fields.get("gpus_per_node"))
            if isinstance(nodes, int) and isinstance(each, int):
                return nodes * each
    return None


def _handed_over(recipe: _Recipe, followed: Followed) -> list[str]:
    """Sentences on functions from outside that get the recipe and may change it before it runs."""
    parts = {id(instance) for instance in _all_parts(recipe.instance)}
    sentences = []
    for call in followed.calls:
        gets_it = [instance for instance in call.instances if id(instance) in parts]
        if not gets_it or call.made is recipe.instance:
            continue
        if _RUN.search(call.path):
            break
        if not _CHANGES_NOTHING.search(call.path) and not call.path.startswith(
            ("torch.", "nemo_run.", "run.")
        ):
            sentences.append(
                f"the layout may be wrong: line {call.line} hands the recipe to {call.text}, which is not in this "
                "file; put the file that defines it into the script's folder"
            )
    return list(dict.fromkeys(sentences))


def _all_parts(instance: ScriptObject, seen: set[int] | None = None) -> Iterator[ScriptObject]:
    seen = set() if seen is None else seen
    if id(instance) in seen:
        return
    seen.add(id(instance))
    yield instance
    for value in instance.fields.values():
        if isinstance(value, ScriptObject) and not value.maker:
            yield from _all_parts(value, seen)
