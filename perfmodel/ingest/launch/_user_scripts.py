"""Python scripts of users that hold the settings of a training."""

from collections.abc import Mapping, Sequence

from perfmodel.ingest.launch._entries import Source
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._recipe_scripts import makes_recipe, recipe_script
from perfmodel.ingest.launch._trainer_scripts import is_trainer_script, trainer_script


def may_be_read(text: str) -> bool:
    """Whether a Python script may hold settings."""
    return makes_recipe(text) or is_trainer_script(text)


def user_script(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> tuple[Source, LaunchFormat] | None:
    """Settings of a Python script, with the format that they are in; None for scripts that hold
    none.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments.
        variables: environment variables of the script.
    """
    recipe_source = recipe_script(text, place, arguments, variables)
    return (
        recipe_source
        if recipe_source is not None
        else trainer_script(text, place, arguments, variables)
    )
