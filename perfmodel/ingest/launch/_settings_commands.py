"""Commands whose program takes its settings from a file beside the script: those of nanotron,
llm-foundry, levanter, GPT-NeoX and NeMo 1.

What the command sets itself wins over the file.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from perfmodel.ingest.launch._arguments import followed_script
from perfmodel.ingest.launch._entries import Entry, Neighbours, Source, included_entries
from perfmodel.ingest.launch._read_entries import read_json, read_yaml
from perfmodel.ingest.launch._recipes import devices_of_job, flags_of, settings_in
from perfmodel.ingest.launch.shell import Command

_FILE: Final = re.compile(r"[^\s=]+\.(?:ya?ml|json)")
_PROGRAM: Final = re.compile(r"(?:.*/)?(?:[\w-]+\.py|composer)|[\w.]*(?:levanter|llmfoundry)[\w.]*")
"""A program that may take a file of settings: a Python file, or a module behind `-m`."""
_HYDRA_NAME: Final = "config-name"


def settings_command(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Source | None:
    """Settings of the first command of a script that names a file of settings beside it, with those
    of the command itself; None for scripts without one.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments.
        variables: environment variables of the script.

    Raises:
        LaunchFileError: a file that cannot be read.
    """
    if _FILE.search(text) is None and _HYDRA_NAME not in text:
        return None
    script, job = followed_script(text, place, arguments, variables)
    neighbours = Neighbours(Path(place).parent, script.files)
    certain = [command for command in script.commands if command.certain]
    for command in certain or script.commands:
        entries: dict[str, Entry] = {}
        notes = list(script.notes)
        for name in _files_of(command):
            file = neighbours.find(name)
            if file is None:
                continue
            is_json = file.path.suffix == ".json"
            source = (
                read_json(file.text, str(file.path))
                if is_json
                else read_yaml(file.text, str(file.path), file.path.parent)
            )
            entries |= included_entries(source.entries, file.path, command.argv[0].line)
            notes += source.notes
        if entries:
            devices = devices_of_job(command, job)
            if "note.devices" in devices:
                notes.append(str(devices["note.devices"]))
            return Source(
                place=place,
                entries=entries | _changes(command),
                notes=tuple(notes),
                devices=devices.get("devices"),
            )
    return None


def _files_of(command: Command) -> list[str]:
    """Names of files of settings behind the program of a command, in the order in which later ones
    win."""
    texts = [word.text for word in command.argv]
    program = next((i for i, text in enumerate(texts) if _PROGRAM.fullmatch(text)), None)
    if program is None:
        return []
    names: list[str] = []
    for text in texts[program + 1 :]:
        value = text.partition("=")[2] if text.startswith("--") and "=" in text else text
        if _FILE.fullmatch(value):
            names.append(value)
    hydra_name = flags_of(command).get(_HYDRA_NAME)
    if hydra_name is not None and not names:
        names.append(f"{str(hydra_name.value).removesuffix('.yaml')}.yaml")
    return names


def _changes(command: Command) -> dict[str, Entry]:
    """Settings that the command states itself: `a.b=value`, or `--a.b value`."""
    dotted = {name: entry for name, entry in flags_of(command).items() if "." in name}
    return dotted | settings_in(command)
