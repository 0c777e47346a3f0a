"""Command lines of Primus: a file of YAML, and flags that change its overrides.

`EXP=examples/megatron/configs/MI300X/llama3.1_8B-pretrain.yaml bash examples/run_pretrain.sh
--micro_batch_size 4`, or `primus-cli direct -- train pretrain --config FILE ...` (`runner/` and
`examples/` of AMD-AGI/Primus).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._arguments import (
    LAUNCHING,
    command_entries,
    followed_script,
    processes_in_variables,
)
from perfmodel.ingest.launch._entries import Entry, Neighbours, Source, included_entries, yaml_value
from perfmodel.ingest.launch._megatron import scheduled_settings, world_of
from perfmodel.ingest.launch._megatron_forks import ABSENT_FILE
from perfmodel.ingest.launch._megatron_yaml import (
    ON_MEGATRON,
    PRIMUS_NAMES,
    as_arguments,
    megatron_arguments,
    primus_arguments,
    primus_framework,
    value_with_defaults,
)
from perfmodel.ingest.launch._model import catalog_model
from perfmodel.ingest.launch._read_entries import read_yaml
from perfmodel.ingest.launch.shell import Command

_LOOKS_LIKE_ONE: Final = re.compile(r"primus|\bEXP=\S*\.ya?ml", re.IGNORECASE)
_STARTERS: Final = re.compile(
    r"primus-cli(\.sh)?|(run_)?((slurm|local|k8s|direct|container)_)?(pre|post)train(_cli)?\.sh"
)
"""Names of programs that train with a Primus file."""
_FILE: Final = (".yaml", ".yml")
_KIND: Final = re.compile(
    r"([-_](BF16|FP8|FP16|FP4|MXFP8|MXFP4))?[-_](pretrain|sft|posttrain|lora_posttrain)$", re.I
)
"""End of the name of a file of Primus behind that of its model."""
_OVERRIDES: Final = re.compile(r"modules\.\w+\.overrides\.")
_MODEL_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "torchtitan": ("model.name", "model.flavor"),
    "maxtext": ("model_name",),
}
"""Keys by which frameworks beside Megatron name their model."""
_BESIDE_MEGATRON: Final = tuple(_MODEL_KEYS)
_USUAL_DEVICES: Final = 8
"""Default devices of a node (`GPUS_PER_NODE` of `examples/run_pretrain.sh`)."""


def primus_overrides(source: Source) -> tuple[str, Source] | None:
    """The framework other than Megatron that a Primus file trains with, and its settings.

    None of another file, and of one whose settings are Megatron's arguments.

    Raises:
        LaunchFileError: Primus trains on a framework that is not read.
    """
    framework = primus_framework(source.entries)
    if not framework or framework in ON_MEGATRON:
        return None
    if framework not in _BESIDE_MEGATRON:
        readable = ", ".join((*ON_MEGATRON, *_BESIDE_MEGATRON))
        raise LaunchFileError(
            f"{source.place}: Primus runs this file with {framework}, which perfmodel does not read (only "
            f"{readable}); give --model, --layout and so on instead"
        )
    stated: dict[str, Entry] = {}
    model = None
    unknown: Entry | None = None
    for key, entry in source.entries.items():
        table = _OVERRIDES.match(key)
        if table:
            # `none` is a word of torchtitan's and MaxText's, and nothing that is left out.
            is_word = isinstance(entry.value, str) and entry.value.lower() == "none"
            value = entry.value if is_word else value_with_defaults(entry.value)
            stated[key.removeprefix(table[0])] = replace(entry, value=value)
        elif re.fullmatch(r"modules\.\w+\.model", key):
            name = str(value_with_defaults(entry.value)).removesuffix(".yaml")
            # Its files of models are named after their precision too: `llama3.1_8B-fp8`.
            model = catalog_model(PRIMUS_NAMES.get(name.lower(), name)) or catalog_model(
                name.rpartition("-")[0]
            )
            unknown = replace(entry, value=name) if model is None else None
    # A model that nobody knows is asked for: it is not that of the framework's defaults.
    if unknown and not any(key in stated for key in _MODEL_KEYS[framework]):
        name_key, *empty_keys = _MODEL_KEYS[framework]
        stated |= {name_key: unknown} | {key: replace(unknown, value="") for key in empty_keys}
    if framework == "maxtext":
        # Primus is AMD's, and trains on its GPUs.
        stated.setdefault("hardware", Entry("gpu", 0))
    return framework, replace(source, entries=stated, model=source.model or model)


def primus_command(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Source | None:
    """Megatron's arguments of the command that trains with Primus in a shell script; None for
    scripts without one.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments.
        variables: environment variables of the script.

    Raises:
        LaunchFileError: the command trains on another framework than Megatron.
    """
    # Following a script costs time, and scripts of every kind come by here.
    if not _LOOKS_LIKE_ONE.search(text):
        return None
    script, job = followed_script(text, place, arguments, variables)
    for command in script.commands:
        file = _file_of(command)
        if not file:
            continue
        stated, notes = _entries_of_file(file, place, Neighbours(Path(place).parent, script.files))
        stated |= _overrides(command)
        entries = as_arguments(stated) | _world(command, job)
        return Source(place=place, entries=entries, notes=(*script.notes, *notes))
    return None


def _file_of(command: Command) -> str:
    """The file that a command of Primus trains with; empty for other commands."""
    texts = [word.text for word in command.argv]
    if not any(_STARTERS.fullmatch(PurePosixPath(text).name) for text in texts):
        return ""
    for i, text in enumerate(texts):
        name, sign, value = text.partition("=")
        if name == "--config" and (sign or i + 1 < len(texts)):
            return value if sign else texts[i + 1]
    file = command.variables.get("EXP", "")
    return file if file.endswith(_FILE) else ""


def _entries_of_file(
    name: str, place: str, neighbours: Neighbours
) -> tuple[dict[str, Entry], list[str]]:
    """Arguments that a Primus file states, or those implied by its name if the file is missing."""
    file = neighbours.find(name)
    if file is not None:
        source = read_yaml(file.text, str(file.path), file.path.parent)
        if primus_overrides(source) is not None:
            raise LaunchFileError(
                f"{place}: its flags change settings of {name}, which does not train with Megatron; make these changes "
                "in that file, and give the file itself"
            )
        arguments = megatron_arguments(source)
        if arguments is None:
            raise LaunchFileError(
                f"{place}: it trains with {name}, whose settings are not Megatron's; give the file"
            )
        return included_entries(arguments.entries, file.path, 0), list(arguments.notes)
    # Examples lie in folders of their framework, and are called after their model.
    if "/megatron/" not in f"/{name}":
        raise LaunchFileError(
            f"{place}: it trains with {name}, which is not in the same folder; put it there, or "
            "give that file"
        )
    stem = PurePosixPath(name).stem
    stated = primus_arguments(_KIND.sub("", stem)) | {ABSENT_FILE: Entry(name, 0)}
    if "fp8" in stem.lower():
        stated["fp8-format"] = Entry("hybrid", 0)
    return stated, []


def _overrides(command: Command) -> dict[str, Entry]:
    """Flags of a command that change overrides of its file, by the names of Megatron's
    arguments."""
    texts = [word.text for word in command.argv]
    # Launchers of containers and schedulers have options of their own in front.
    start = max(
        (
            i
            for i, text in enumerate(texts)
            if _STARTERS.fullmatch(PurePosixPath(text).name) or text == "--"
        )
    )
    flags = command_entries(command.argv[start + 1 :], frozenset(), frozenset())
    stated: dict[str, Entry] = {}
    for name, entry in flags.items():
        if name in ("config", *LAUNCHING):
            continue
        value: Any = yaml_value(entry.value) if isinstance(entry.value, str) else entry.value
        # Layouts of pipelines are quoted twice.
        value = value.strip("'\"") if isinstance(value, str) else value
        stated[name] = replace(entry, value=value)
    return stated


def _world(command: Command, job: Mapping[str, int]) -> dict[str, Entry]:
    """Devices of the job: nodes from variables or the scheduler, times the devices per node (eight
    by default)."""
    settings: dict[str, Any] = {**processes_in_variables(command), **scheduled_settings(job)}
    per_node = command.variables.get("GPUS_PER_NODE", "")
    settings.setdefault("nproc-per-node", per_node if per_node.isdecimal() else str(_USUAL_DEVICES))
    texts = [word.text for word in command.argv]
    for i, text in enumerate(texts[:-1]):
        if text in ("-N", "--nodes") and texts[i + 1].isdecimal():
            settings["nnodes"] = texts[i + 1]
    line = command.argv[0].line
    # Where the nodes are not known, the argument that says so is refused like every other one.
    devices = world_of(settings).get("devices")
    if devices is None:
        return {"nnodes": Entry(settings["nnodes"], line)}
    return {"num-processes": Entry(str(devices), line)}
