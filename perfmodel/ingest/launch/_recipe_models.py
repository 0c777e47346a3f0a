"""Models that Python scripts of NeMo 2 and Megatron-Bridge configure."""

import re
from collections.abc import Iterator
from typing import Final

from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._model import catalog_model
from perfmodel.ingest.launch._python_values import ScriptObject, Symbol
from perfmodel.spec import Model

MODEL_OF_CATALOG: Final = "perfmodel.model"
"""Maker of the model that a recipe has by itself."""


def class_of(instance: ScriptObject) -> str:
    """Name of the class that an object has: `run.Config(llm.MockDataModule, ...)` makes a
    `MockDataModule`."""
    is_lazy = instance.maker.rpartition(".")[2] in ("Config", "Partial")
    made = instance.positional[0] if is_lazy and instance.positional else None
    return (made.path if isinstance(made, Symbol) else instance.maker).rpartition(".")[2]


def model_of_recipe(recipe: ScriptObject, entries: Entries) -> tuple[Model | None, list[str]]:
    """The model of a recipe in a script; a note if the script's own model is not known.

    Args:
        recipe: an object with the recipe's settings.
        entries: the same settings by their names.
    """
    part = recipe.fields.get("model")
    if not isinstance(part, ScriptObject):
        return None, []
    name = _model_name(part)
    model = catalog_model(name) if name else None
    states_layers = any(key.startswith("model.") and key.endswith("num_layers") for key in entries)
    if model is None and not states_layers:
        note = f"line {part.line}: perfmodel does not know the model that {class_of(part)} makes"
        return None, [note]
    return model, []


def _model_name(part: ScriptObject) -> str:
    """Name in the catalog of the model that an object configures; empty if it has none."""
    if part.maker == MODEL_OF_CATALOG:
        return str(part.positional[0])
    for instance in _with_owners(part):
        # `AutoBridge.from_hf_pretrained("meta-llama/Llama-3.2-1B").to_megatron_provider()`
        if (
            instance.maker.endswith(("from_hf_pretrained", "from_auto_config"))
            and instance.positional
        ):
            return str(instance.positional[0])
    for candidate in _configurations(part):
        # Classes are called after models: `Llama3Config8B`, `Llama31ModelProvider70B`.
        named = re.fullmatch(r"([A-Za-z]+)(\d*)(?:Config|ModelProvider)(\w*)", class_of(candidate))
        if named is None:
            continue
        family = named[1].lower()
        version = ".".join(named[2])
        size = named[3].lower()
        for name in (f"{family}{version}-{size}", f"{family}-{version}-{size}", f"{family}-{size}"):
            if catalog_model(name) is not None:
                return name
    return ""


def _configurations(part: ScriptObject) -> Iterator[ScriptObject]:
    """The configuration of a model, which is an argument of the model, or the model itself."""
    yield part
    for value in (part.fields.get("config"), *part.positional):
        if isinstance(value, ScriptObject):
            yield value


def _with_owners(instance: ScriptObject) -> Iterator[ScriptObject]:
    current: ScriptObject | None = instance
    while current is not None:
        yield current
        current = current.owner
