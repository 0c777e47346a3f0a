"""Recognises the format of a launch file by its name, its syntax and its keys."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import LaunchFileError, UnknownNameError
from perfmodel.files import parse_json
from perfmodel.ingest.launch._accelerate import ACCELERATE, with_deepspeed_file
from perfmodel.ingest.launch._arguments import read_arguments
from perfmodel.ingest.launch._bridge import BRIDGE
from perfmodel.ingest.launch._deepspeed import DEEPSPEED
from perfmodel.ingest.launch._entries import Neighbours, Source
from perfmodel.ingest.launch._finetuning_command import finetuning_command, may_fine_tune
from perfmodel.ingest.launch._finetuning_files import (
    FINETUNING,
    finetuning_format,
    with_named_files,
)
from perfmodel.ingest.launch._format import LaunchFormat, Syntax
from perfmodel.ingest.launch._hook_file import KIND, hook_settings, torchtitan_entries
from perfmodel.ingest.launch._kubernetes import job_script
from perfmodel.ingest.launch._levanter import LEVANTER
from perfmodel.ingest.launch._llama_factory import LLAMA_FACTORY
from perfmodel.ingest.launch._llm_foundry import LLM_FOUNDRY
from perfmodel.ingest.launch._maxtext import MAXTEXT
from perfmodel.ingest.launch._maxtext_command import (
    maxtext_command,
    over_slices,
    with_compiled_slices,
)
from perfmodel.ingest.launch._megatron import MEGATRON, is_of_megatron
from perfmodel.ingest.launch._megatron_forks import in_known_names
from perfmodel.ingest.launch._megatron_yaml import factory_arguments, megatron_arguments
from perfmodel.ingest.launch._nanotron import NANOTRON
from perfmodel.ingest.launch._nemo import NEMO
from perfmodel.ingest.launch._nemo_rl import NEMO_RL
from perfmodel.ingest.launch._neox import neox_arguments
from perfmodel.ingest.launch._not_read import (
    refuse_other_tools,
    refuse_plain_lightning,
    refuse_python,
    refuse_script,
)
from perfmodel.ingest.launch._primus import primus_command, primus_overrides
from perfmodel.ingest.launch._read_entries import read_json, read_toml, read_yaml
from perfmodel.ingest.launch._recipes import recipe_command
from perfmodel.ingest.launch._roll import roll_settings
from perfmodel.ingest.launch._settings_commands import settings_command
from perfmodel.ingest.launch._task_files import task_script
from perfmodel.ingest.launch._torchtitan import TORCHTITAN
from perfmodel.ingest.launch._user_scripts import user_script
from perfmodel.ingest.launch._xtuner import read_python

FORMATS: Final = (
    MEGATRON,
    NEMO,
    NANOTRON,
    LLM_FOUNDRY,
    MAXTEXT,
    ACCELERATE,
    BRIDGE,
    DEEPSPEED,
    TORCHTITAN,
)
"""All formats that are read and written. Among formats of one syntax, the first that recognises a
file reads it. Formats of fine-tuning front ends (`FINETUNING`) and levanter are tried first, and
are only read."""
_SYNTAXES: Final[dict[str, Syntax]] = {
    ".json": "json",
    ".toml": "toml",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".py": "python",
}
_SCRIPTS: Final = (".sh", ".bash", ".sbatch", ".slurm")
"""File endings for written scripts; when reading, any file with a command is accepted."""


def launch_format(name: str) -> LaunchFormat:
    """The launch-file format of a framework (`torchtitan@2025`), or the format of this name.

    Raises:
        UnknownNameError: no format serves it.
    """
    # Formats that are only read get a refusal with what to do instead, not "unknown".
    framework = name.partition("@")[0].strip().lower()
    for form in FORMATS:
        if framework == form.name or framework in form.frameworks:
            return form
    if framework == LEVANTER.name:
        raise LaunchFileError(
            f"{framework}: perfmodel reads its files but does not write them; set the keys of the layout by hand"
        )
    if framework in [form.name for form in FINETUNING]:
        raise LaunchFileError(
            f"{framework}: perfmodel reads its files but does not write them; give --framework deepspeed and a "
            "file name that ends in .json"
        )
    frameworks: list[str] = []
    for form in FORMATS:
        frameworks += form.frameworks
    raise UnknownNameError("framework with launch files", name, frameworks)


def format_of_path(path: Path) -> LaunchFormat:
    """The format that a file name implies: by the framework in it (`best.nanotron.yaml`), else by
    the ending.

    Raises:
        LaunchFileError: the ending is that of several.
    """
    # The user's word in the name wins; an ending that several formats have decides nothing.
    parts = path.name.lower().split(".")
    for part in parts:
        for form in FORMATS:
            if part in (form.name, *form.frameworks):
                return form
    syntax = _SYNTAXES.get(path.suffix.lower(), "arguments")
    fitting = [form for form in FORMATS if form.syntax == syntax]
    known_ending = path.suffix.lower() in ("", *_SYNTAXES, *_SCRIPTS)
    if not fitting or not known_ending:
        raise LaunchFileError(
            f"{path}: no launch file can be written with this ending; use .sh, .yaml, .json or .toml"
        )
    if len(fitting) > 1:
        names = ", ".join(form.name for form in fitting)
        raise LaunchFileError(
            f"{path}: several frameworks use this ending ({names}); put one of them into the file name, as in "
            f"{path.stem}.{fitting[0].name}{path.suffix}"
        )
    return fitting[0]


def recognised(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> tuple[Source, LaunchFormat]:
    """Entries of a file, and its format; raises `LaunchFileError` if no known format fits."""
    # The syntax follows from the ending, and the format from the keys. Scripts have any ending or
    # none.
    syntax = _SYNTAXES.get(Path(place).suffix.lower())
    if syntax is None:
        syntax = "json" if text.lstrip().startswith("{") else "arguments"
    if syntax == "arguments":
        recognised_file = _from_script(text, place, arguments, variables)
    elif syntax == "python":
        recognised_file = _from_python(text, place, arguments, variables)
    else:
        recognised_file = _from_configuration(text, place, syntax)
    if recognised_file is not None:
        return recognised_file

    if syntax == "python":
        refuse_python(text, place)
        readable = (
            "the only Python files that perfmodel reads are configurations of XTuner, recipes of NeMo 2 and "
            "Megatron-Bridge, and scripts with arguments of Hugging Face's Trainer"
        )
        remedy = (
            "add the lines that perfmodel hook prints and give the file that they write, or give "
            "--model, --layout and so on"
        )
        raise LaunchFileError(f"{place}: {readable}; {remedy}")
    formats_of_syntax = [
        form for form in (*FORMATS, LEVANTER, NEMO_RL, *FINETUNING) if form.syntax == syntax
    ]
    if not text.strip():
        raise LaunchFileError(f"{place}: the file is empty; give a launch file")
    needed = "; ".join(
        f"files of {form.name} set {' or '.join(form.marks[:2])}" for form in formats_of_syntax
    )
    raise LaunchFileError(
        f"{place}: not a launch file that perfmodel can read ({needed}); give --model, --layout and so on instead"
    )


def _from_script(
    text: str, place: str, arguments: Sequence[str], variables: Mapping[str, str] | None
) -> tuple[Source, LaunchFormat] | None:
    """Entries and format of a shell script or a list of arguments; None if it has no training
    command.

    A command tells its framework by the program that it starts. Most tell it exactly; Megatron's
    flags are passed to programs of any name, so that they come last.
    """
    is_likely = may_fine_tune(text)
    front_end_source = finetuning_command(text, place, arguments, variables) if is_likely else None
    if front_end_source is not None:
        return front_end_source
    with_inner_scripts = _with_words_of_inner_scripts(text, place)
    maxtext_source = maxtext_command(with_inner_scripts, place, arguments, variables)
    if maxtext_source is not None:
        return maxtext_source, MAXTEXT
    by_recipe = recipe_command(with_inner_scripts, place, arguments, variables)
    if by_recipe is not None:
        return by_recipe
    primus_source = primus_command(with_inner_scripts, place, arguments, variables)
    if primus_source is not None:
        return primus_source, MEGATRON
    megatron_keys: set[str] = set()
    for rule in MEGATRON.table:
        megatron_keys |= {key for key in rule.keys if not key.startswith("sbatch")}
    source = read_arguments(
        text, place, frozenset(megatron_keys), MEGATRON.switches, arguments, variables
    )
    source = replace(source, entries=in_known_names(source.entries))
    if is_of_megatron(source.entries):
        return source, MEGATRON
    # The command may stand in a file that the script sources.
    if not is_likely:
        front_end_source = finetuning_command(text, place, arguments, variables)
        if front_end_source is not None:
            return front_end_source
    settings_source = settings_command(text, place, arguments, variables)
    by_file = None if settings_source is None else _of_configuration(settings_source, "yaml")
    if by_file is not None:
        return by_file
    refuse_script(text, place, arguments, variables, frozenset(megatron_keys))
    return None


_INNER_SCRIPT: Final = re.compile(r"[\w./-]+\.(?:sh|slurm|sbatch)\b")


def _with_words_of_inner_scripts(text: str, place: str) -> str:
    """A script with the scripts that it runs behind it as comments.

    Readers of commands look for the words of their programs before they follow a script, which
    takes long; the words of a wrapper stand in the script that it runs.
    """
    neighbours = Neighbours(Path(place).parent)
    comments: list[str] = []
    for name in dict.fromkeys(_INNER_SCRIPT.findall(text)):
        inner = neighbours.find(name)
        if inner is not None and inner.path != Path(place):
            comments += [f"# {line}" for line in inner.text.splitlines()]
    return "\n".join([text, *comments]) if comments else text


def _from_python(
    text: str, place: str, arguments: Sequence[str], variables: Mapping[str, str] | None
) -> tuple[Source, LaunchFormat] | None:
    """Entries and format of a Python file that changes a recipe, or of a configuration with
    assignments only."""
    user_source = user_script(text, place, arguments, variables)
    if user_source is not None:
        return user_source
    return _from_front_end(read_python(text, place))


def _from_front_end(source: Source) -> tuple[Source, LaunchFormat] | None:
    """Entries and format of a front end's file; raises an error for files of unsupported tools.

    Front ends come first, as their files share keys with those of DeepSpeed and Accelerate that
    they hold or name.
    """
    roll_source = roll_settings(source)
    if roll_source is not None:
        return roll_source
    refuse_other_tools(source.entries, source.place)
    front_end = finetuning_format(source.entries)
    factory_source = factory_arguments(source) if front_end is LLAMA_FACTORY else None
    if factory_source is not None:
        return factory_source, MEGATRON
    if front_end is None:
        return None
    return with_named_files(source, front_end, Neighbours(Path(source.place).parent))


def _from_configuration(
    text: str, place: str, syntax: Syntax
) -> tuple[Source, LaunchFormat] | None:
    """Entries and format of a file of JSON, TOML or YAML."""
    if syntax == "json":
        source = read_json(text, place)
        if KIND in source.entries:
            return hook_settings(source, _model_config(text))
    elif syntax == "toml":
        source = read_toml(text, place)
    else:
        job_source = _from_job(text, place)
        if job_source is not None:
            return job_source
        source = read_yaml(text, place, Path(place).parent)
    return _of_configuration(source, syntax)


def _of_configuration(source: Source, syntax: Syntax) -> tuple[Source, LaunchFormat] | None:
    """Entries and format of the settings of a configuration.

    Formats whose keys no other has come before those that share theirs, and Megatron's arguments as
    a table, which may stand anywhere in a file, come last.
    """
    place = source.place
    folder = Path(place).parent
    front_end_source = _from_front_end(source)
    if front_end_source is not None:
        return front_end_source
    if syntax == "yaml":
        primus_source = primus_overrides(source)
        if primus_source is not None:
            framework, settings = primus_source
            return (
                torchtitan_entries(settings) if framework == "torchtitan" else (settings, MAXTEXT)
            )
        for form in (LEVANTER, NEMO_RL):
            if form.recognises(source.entries):
                return source, form
    if syntax in ("json", "yaml"):
        neox_source = neox_arguments(source)
        if neox_source is not None:
            return neox_source, MEGATRON
    for form in FORMATS:
        if form.syntax != syntax or not form.recognises(source.entries):
            continue
        if form is NEMO:
            refuse_plain_lightning(source.entries, place, NEMO.table)
        if form is MAXTEXT:
            source = with_compiled_slices(source)
        # A file of Accelerate may leave everything but the processes to one of DeepSpeed.
        return with_deepspeed_file(source, folder) if form is ACCELERATE else (source, form)
    if syntax in ("json", "yaml"):
        table_source = megatron_arguments(source)
        if table_source is not None:
            return replace(table_source, entries=in_known_names(table_source.entries)), MEGATRON
    return None


def _from_job(text: str, place: str) -> tuple[Source, LaunchFormat] | None:
    """Entries and format of what a Kubernetes manifest or a task of SkyPilot runs; None for other
    files."""
    job = job_script(text)
    if job is None:
        job = task_script(text)
    if job is None:
        return None
    command_source = _from_script(job.text, place, (), {})
    if command_source is None:
        raise LaunchFileError(
            f"{place}: the commands of this {job.kind} run no training that perfmodel can read; give the script that "
            "they run, or --model, --layout and so on"
        )
    source, form = command_source
    if form is MAXTEXT:
        source = replace(source, entries=over_slices(source.entries, job.slices))
    # The job has the devices that all its pods or nodes request, whatever the launcher of each
    # says.
    return replace(source, devices=job.devices or source.devices), form


def _model_config(text: str) -> dict[str, Any]:
    """The model's configuration that a file of a hook holds; empty if it holds none."""
    config = parse_json(text).get("model_config")
    return config if isinstance(config, dict) else {}
