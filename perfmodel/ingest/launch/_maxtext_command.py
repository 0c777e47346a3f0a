"""MaxText's command lines: `python3 -m MaxText.train configs/base.yml model_name=llama2-7b ici_fsdp_parallelism=16`."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from perfmodel.files import read_text
from perfmodel.ingest.launch._entries import Entry, Source, read_yaml
from perfmodel.ingest.launch._maxtext import MAXTEXT
from perfmodel.ingest.launch._scheduler import requested, slurm_variables
from perfmodel.ingest.launch._shell import run_script

_LOOKS_LIKE_ONE: Final = re.compile(r"\.ya?ml\b[\s\S]*?\b[A-Za-z_]\w*=", re.IGNORECASE)
"""A file of YAML and settings behind it, as only few scripts have them."""
_SETTING: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def maxtext_command(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Source | None:
    """Settings of the command of a shell script that trains with MaxText; None of a script without one.

    Args:
        text: the script.
        place: its path.
        arguments: of the script itself.
        variables: set in its environment.
    """
    # Following a script costs time, and every script that is no fine-tuning comes by here.
    if not _LOOKS_LIKE_ONE.search(text):
        return None
    environment = {**os.environ, **(variables or {})}
    job = slurm_variables(requested(text))
    script = run_script(text, place, environment, arguments=arguments, variables=job)
    best: dict[str, Entry] = {}
    base = ""
    for command in script.commands:
        line = command.argv[0].line
        for argv in _commands_within([word.text for word in command.argv]):
            file, settings = _settings(argv, line)
            # A script may also decode or convert checkpoints with a few settings; training has the most.
            if len(settings) > len(best) and MAXTEXT.recognises(settings):
                best, base = settings, file
    if not best:
        return None
    entries, notes = _of_file(base, Path(place).parent)
    return Source(place=place, entries=entries | best, notes=(*script.notes, *notes))


def _commands_within(argv: list[str]) -> list[list[str]]:
    """A command, and those that stand whole in one of its words, as for `xpk workload create --command "..."`."""
    commands = [argv]
    for word in argv:
        if re.search(r"\.ya?ml\s", word):
            try:
                commands.append(shlex.split(word))
            except ValueError:
                continue
    return commands


def _settings(argv: Sequence[str], line: int) -> tuple[str, dict[str, Entry]]:
    """The file of settings that a command names, and the settings `key=value` behind it."""
    file = ""
    settings: dict[str, Entry] = {}
    for word in argv:
        # Assignments before the file are variables of the environment (`LIBTPU_INIT_ARGS=... python3 ...`).
        setting = _SETTING.fullmatch(word)
        if setting and file:
            settings[setting[1]] = Entry(_value(setting[2]), line)
        elif word.endswith((".yml", ".yaml")):
            file = word
    return file, settings


def _value(text: str) -> Any:
    """A value as MaxText takes it from a command line: as YAML reads it."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _of_file(name: str, folder: Path) -> tuple[dict[str, Entry], list[str]]:
    """The entries of the file that a command names, if it is beside the script; else a note, unless it is of MaxText's
    own defaults."""
    for path in (folder / name, folder / Path(name).name):
        if path.is_file():
            source = read_yaml(read_text(path), str(path), path.parent)
            named = {
                key: Entry(entry.value, 0, entry.included or (str(path), entry.line))
                for key, entry in source.entries.items()
            }
            return named, list(source.notes)
    if Path(name).name == MAXTEXT.defaults_file:
        return {}, []
    return {}, [f"{name}, which the command names, is not beside the script"]
