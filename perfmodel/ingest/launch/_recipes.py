"""Named recipes: the settings of recipes of torchtitan, Megatron-Bridge and NeMo 2 that a command
names.

Arguments behind the name on a command line replace the recipe's own settings (`_recipe_tables`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._arguments import LAUNCHING, followed_script, processes_in_variables
from perfmodel.ingest.launch._entries import Entry, Neighbours, Source, broken, included_entries
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._hook_file import torchtitan_entries
from perfmodel.ingest.launch._megatron import scheduled_settings, world_of
from perfmodel.ingest.launch._nemo import NEMO
from perfmodel.ingest.launch._read_entries import read_toml, read_yaml
from perfmodel.ingest.launch._recipe_tables import (
    bridge_recipe,
    known_entries,
    module_of,
    nemo_name,
    nemo_recipe,
    recipe_entries,
    with_unknown_recipe,
)
from perfmodel.ingest.launch._table import Fields
from perfmodel.ingest.launch._user_scripts import may_be_read, user_script
from perfmodel.ingest.launch._xtuner import plain_value
from perfmodel.ingest.launch.shell import Command

_NAMES_A_RECIPE: Final = re.compile(
    r"torchtitan|run_train\.sh|\bnemo\s+llm\s|--recipe\b|/pretrain_\w+\.py[\s\S]*--config-file|\blitgpt\s"
    r"|setup_experiment\.py|--config-name"
)
"""Patterns of which every script that names a recipe matches at least one."""
_SETTING: Final = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)
_TITAN_FILE: Final = ("job.config_file", "job.config-file")
_TITAN_DEFAULTS: Final = {"MODULE": "llama3", "CONFIG": "llama3_debugmodel"}
"""Default module and configuration of `run_train.sh`."""
_USUAL_DEVICES: Final = "8"
"""Default number of processes of `run_train.sh` (`NGPU`)."""


def recipe_command(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> tuple[Source, LaunchFormat] | None:
    """Settings of a shell script's command that trains from a named recipe; None for scripts
    without one.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments.
        variables: environment variables of the script.

    Raises:
        LaunchFileError: a recipe that is not known.
    """
    # Following a script costs time; most scripts have none of these words.
    beside = Neighbours(Path(place).parent)
    programs = dict.fromkeys(_PROGRAM.findall(text))
    runs_a_recipe = bool(_NAMES_A_RECIPE.search(text)) or any(
        _is_read_script(name, beside) for name in programs
    )
    if not runs_a_recipe:
        return None
    script, job = followed_script(text, place, arguments, variables)
    neighbours = Neighbours(Path(place).parent, script.files)
    readers = [(command, _reader(command, place, neighbours)) for command in script.commands]
    trainings = [(command, reader) for command, reader in readers if reader is not None]
    if not trainings:
        return None
    # If there are several, the first that certainly runs is read; equal settings in a loop count
    # once.
    certain = [training for training in trainings if training[0].certain]
    command, reader = (certain or trainings)[0]
    source, form = reader(command, place, neighbours)
    notes = [*script.notes, *source.notes]
    arguments_of_runs = {_texts(run) for run, _ in certain or trainings}
    if len(arguments_of_runs) > 1:
        line = command.argv[0].line
        notes.append(
            f"{len(arguments_of_runs)} training commands have different arguments; perfmodel reads the first, "
            f"on line {line}"
        )
    job_devices = devices_of_job(command, job)
    if not source.devices and "note.devices" in job_devices:
        notes.append(job_devices["note.devices"])
    devices = source.devices or job_devices.get("devices")
    return replace(source, devices=devices, notes=tuple(notes)), form


def _texts(command: Command) -> tuple[str, ...]:
    """The words of a command."""
    return tuple(word.text for word in command.argv)


_Reader = Callable[[Command, str, Neighbours], tuple[Source, LaunchFormat]]


_PROGRAM: Final = re.compile(r"[\w./-]+\.py\b")


def _is_read_script(name: str, neighbours: Neighbours) -> bool:
    """Whether a program is a Python script beside the launch file that may hold the settings."""
    file = neighbours.find(name)
    return file is not None and may_be_read(file.text)


def _reader(command: Command, place: str, neighbours: Neighbours) -> _Reader | None:
    """The reader for a command that trains from a named recipe; None for other commands.

    Raises:
        LaunchFileError: the command is of a tool that is not read.
    """
    argv = [word.text for word in command.argv]
    joined = " ".join(argv)
    if re.search(r"(^|[\s/])litgpt\s", joined):
        raise LaunchFileError(
            f"{place}: looks like litgpt, which perfmodel does not read; give --model, --layout and so on instead"
        )
    if re.search(r"(^|[\s/])setup_experiment\.py\s", joined):
        raise _performance_script_error(command, place)
    if re.search(r"torchtitan[./]\S*train|run_train\.sh", joined):
        return _titan
    # Others that train on Lightning have the same trainer; only NeMo's language models have
    # Megatron's batches.
    is_hydra = any(text.startswith("--config-name") for text in argv)
    if is_hydra and any(name in settings_in(command) for name in _MEGATRON_KEYS):
        return _nemo_1
    if re.search(r"(^|[\s/])nemo\s+llm\s+(pretrain|finetune)\b", joined):
        return _nemo
    if _bridge_name(argv):
        return _bridge
    is_own = any(_is_read_script(word, neighbours) for word in argv if word.endswith(".py"))
    return _own_script if is_own else None


def _own_script(
    command: Command, place: str, neighbours: Neighbours
) -> tuple[Source, LaunchFormat]:
    """A Python script of the user's own that holds the settings, with its arguments."""
    argv = [word.text for word in command.argv]
    at = next(
        i
        for i, word in enumerate(argv)
        if word.endswith(".py") and _is_read_script(word, neighbours)
    )
    file = neighbours.find(argv[at])
    if file is not None:
        read = user_script(file.text, str(file.path), argv[at + 1 :], command.variables)
    else:
        read = None
    if read is None:
        raise broken(
            place,
            command.argv[at].line,
            f"{argv[at]} holds no settings that perfmodel can read; give the file that does",
        )
    return read


_BENCHMARK: Final = {
    "--model": ("-mr", "--model_recipe_name", "-m", "--model_name", "--model_family_name"),
    "--devices": ("-ng", "--num_gpus"),
    "--dtype": ("-c", "--compute_dtype"),
}
"""Flags of a prediction, with the corresponding options of Megatron-Bridge's performance
scripts."""


def _performance_script_error(command: Command, place: str) -> LaunchFileError:
    """The error for Megatron-Bridge's performance scripts, whose settings are in Python files."""
    texts = [word.text for word in command.argv]
    stated = []
    for flag, names in _BENCHMARK.items():
        value = next((texts[texts.index(name) + 1] for name in names if name in texts[:-1]), "")
        if value and "$" not in value:
            stated.append(f"{flag} {value}")
    request = f" (it asks for {', '.join(stated)})" if stated else ""
    return LaunchFileError(
        f"{place}, line {command.argv[0].line}: setup_experiment.py takes its settings from Megatron-Bridge's "
        f"scripts/performance/configs, which are not read{request}; give --model, --devices, --global-batch, --layout "
        "and so on, or add the lines that perfmodel hook megatron-bridge prints and give the file that they write"
    )


def flags_of(command: Command) -> dict[str, Entry]:
    """Flags of a command by their names without dashes; a flag without a value is on."""
    flags: dict[str, Entry] = {}
    for i, word in enumerate(command.argv):
        name, sign, value = word.text.partition("=")
        if not name.startswith("--"):
            continue
        # A flag at the end, or before another one, is a switch.
        behind = command.argv[i + 1].text if i + 1 < len(command.argv) else "--"
        if not sign:
            value = "true" if behind.startswith("--") else behind
        flags[name.removeprefix("--")] = Entry(plain_value(value), word.line)
    return flags


def settings_in(command: Command) -> dict[str, Entry]:
    """Settings `key=value` of a command, in the notation of Hydra and NeMo-Run."""
    settings: dict[str, Entry] = {}
    # Before the program stand variables of containers (`docker run -e NCCL_DEBUG=INFO`).
    programs = [i for i, word in enumerate(command.argv) if word.text.endswith(".py")]
    for word in command.argv[programs[-1] if programs else 0 :]:
        setting = _SETTING.fullmatch(word.text)
        if setting and not word.text.startswith("-"):
            settings[setting[1]] = Entry(plain_value(setting[2]), word.line)
    return settings


def devices_of_job(command: Command, job: Mapping[str, int]) -> Fields:
    """Devices of the job, by the launcher before the program, variables or the scheduler, or why
    they are unknown."""
    settings: dict[str, Any] = {}
    for name, entry in flags_of(command).items():
        if name.replace("_", "-") in LAUNCHING:
            settings[name.replace("_", "-")] = entry.value
    # torchtitan's run_train.sh calls it NGPU.
    if command.variables.get("NGPU", "").isdecimal():
        settings.setdefault("nproc-per-node", command.variables["NGPU"])
    for name, number in processes_in_variables(command).items():
        settings.setdefault(name, number)
    settings |= scheduled_settings(job)
    if not settings and any("run_train.sh" in word.text for word in command.argv):
        settings["nproc-per-node"] = _USUAL_DEVICES
    return world_of(settings)


def _titan_names(flags: Mapping[str, Entry], command: Command) -> dict[str, str]:
    """Module and config that a torchtitan command names by a flag or a variable."""
    names = {}
    for variable in _TITAN_DEFAULTS:
        flag = flags.get(variable.lower())
        name = str(flag.value) if flag else command.variables.get(variable)
        if name is not None:
            names[variable] = name
    return names


def _titan(command: Command, place: str, neighbours: Neighbours) -> tuple[Source, LaunchFormat]:
    """A torchtitan command: since 2026 `--module` and `--config` name a recipe, earlier ones use a
    TOML file."""
    line = command.argv[0].line
    flags = flags_of(command)
    # Settings have a table in their names (`--training.local_batch_size 4`), flags of launchers
    # have none. Its parser takes hyphens for underscores.
    stated = {
        name.replace("-", "_"): entry
        for name, entry in flags.items()
        if "." in name and name not in _TITAN_FILE
    }
    file = next((str(flags[name].value) for name in _TITAN_FILE if name in flags), "")
    file = file or command.variables.get("CONFIG_FILE", "")
    # Scripts around it call a file of settings `--config` too, which has an ending where a recipe
    # has none.
    named_config = flags.get("config")
    if not file and named_config and str(named_config.value).endswith(".toml"):
        file = str(named_config.value)
    notes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    error: LaunchFileError | None = None
    if file:
        named = neighbours.find(file)
        if named is None:
            module, name = module_of(Path(file).stem)
            if not module:
                raise broken(
                    place,
                    line,
                    f"the recipe {file} was not found in the script's folder; put it there",
                )
            # Files of torchtitan's own have the names that its recipes have since.
            entries = recipe_entries("torchtitan", module, name, place=place, line=line)
            notes = (
                f"{file} was not found in the script's folder; torchtitan's recipe {name} of "
                "2026 is used instead",
            )
        else:
            entries = dict(read_toml(named.text, str(named.path)).entries)
    else:
        # Flags win over variables, and these over the defaults of run_train.sh.
        names = _titan_names(flags, command)
        if not names:
            doubts = (
                "everything that the command does not state may be wrong: it names no recipe "
                "(--module, --config), so the one of run_train.sh is assumed, "
                f"{_TITAN_DEFAULTS['CONFIG']}",
            )
        names = _TITAN_DEFAULTS | names
        entries, error = known_entries(
            "torchtitan", names["MODULE"], names["CONFIG"], place=place, line=line
        )
    source, form = torchtitan_entries(
        Source(place=place, entries=entries | stated, notes=notes, doubts=doubts)
    )
    return (source if error is None else with_unknown_recipe(source, "torchtitan", error)), form


_CALL: Final = re.compile(r"(\w+)(?:\.\w+)?(?:\((.*)\))?", re.DOTALL)
"""A factory of NeMo-Run: `llama3_8b`, or `llama3_8b(num_nodes=4)`."""
_NEMO_ARGUMENTS: Final = {"num_nodes": "trainer.num_nodes", "num_gpus_per_node": "trainer.devices"}
"""Arguments of a recipe's function, with the settings that they set."""


def _nemo(command: Command, place: str, neighbours: Neighbours) -> tuple[Source, LaunchFormat]:
    """NeMo 2: `nemo llm pretrain --factory NAME key=value ...`."""
    line = command.argv[0].line
    factory = flags_of(command).get("factory", Entry("", line))
    called = _CALL.fullmatch(str(factory.value).strip())
    if called is None:
        raise broken(place, factory.line, f"--factory must name a recipe, got {factory.value!r}")
    arguments: dict[str, Entry] = {}
    scheme: object = "lora"
    for argument in (called[2] or "").split(","):
        name, _, value = (part.strip() for part in argument.partition("="))
        if name in _NEMO_ARGUMENTS:
            arguments[_NEMO_ARGUMENTS[name]] = Entry(plain_value(value), factory.line)
        elif name == "peft_scheme":
            scheme = plain_value(value.strip("'\""))
    is_fine_tuning = any(word.text == "finetune" for word in command.argv)
    return nemo_recipe(
        nemo_name(called[1], is_fine_tuning, scheme), arguments | settings_in(command), place, line
    )


_MEGATRON_KEYS: Final = (
    "model.micro_batch_size",
    "model.global_batch_size",
    "model.tensor_model_parallel_size",
)


def _nemo_1(command: Command, place: str, neighbours: Neighbours) -> tuple[Source, LaunchFormat]:
    """NeMo 1: `megatron_gpt_pretraining.py --config-path=conf --config-name=NAME key=value ...`, on
    Hydra."""
    flags = flags_of(command)
    name = str(flags["config-name"].value).removesuffix(".yaml")
    folder = str(flags["config-path"].value) if "config-path" in flags else "."
    file = neighbours.find(f"{folder}/{name}.yaml")
    stated = settings_in(command)
    if file is None:
        doubt = (
            f"the model, the layout and the batch may be wrong: {name}.yaml was not found in the "
            "script's folder, and its "
            "settings are missing here"
        )
        return Source(place=place, entries=stated, doubts=(doubt,)), NEMO
    of_file = read_yaml(file.text, str(file.path), file.path.parent)
    entries = included_entries(of_file.entries, file.path, command.argv[0].line) | stated
    return Source(place=place, entries=entries, notes=of_file.notes), NEMO


def _bridge_name(argv: Sequence[str]) -> str:
    """The recipe of Megatron-Bridge that a command names, by `--recipe` or by an example's own
    program."""
    for i, word in enumerate(argv):
        name, sign, value = word.partition("=")
        if name == "--recipe":
            return value if sign else " ".join(argv[i + 1 : i + 2])
    if not any(word.startswith("--config-file") for word in argv):
        return ""
    # Examples of Megatron-Bridge build the recipe of their own name and read a file of changes.
    programs = [re.fullmatch(r"(?:.*/)?pretrain_(\w+)\.py", word) for word in argv]
    return next((f"{program[1]}_pretrain_config" for program in programs if program), "")


def _bridge(command: Command, place: str, neighbours: Neighbours) -> tuple[Source, LaunchFormat]:
    """Megatron-Bridge: `run_recipe.py --recipe NAME key=value ...`, with a file of YAML between the
    two."""
    name = _bridge_name([word.text for word in command.argv])
    file = str(flags_of(command).get("config-file", Entry("", 0)).value)
    of_file: dict[str, Entry] = {}
    notes: tuple[str, ...] = ()
    if file:
        named = neighbours.find(file)
        if named is None:
            notes = (
                f"the command names {file}, which was not found in the script's folder; its "
                "settings are missing here",
            )
        else:
            of_file = dict(read_yaml(named.text, str(named.path), named.path.parent).entries)
    changes = of_file | _runner_options(command) | settings_in(command)
    source, form = bridge_recipe(name, changes, place, command.argv[0].line)
    return replace(source, notes=notes), form


_RUNNER_OPTIONS: Final = {
    "train.micro_batch_size": ("-mb", "--micro_batch_size"),
    "train.global_batch_size": ("-gb", "--global_batch_size"),
    "dataset.seq_length": ("-sl", "--seq_length"),
    "model.seq_length": ("-sl", "--seq_length"),
    "model.tensor_model_parallel_size": ("-tp", "--tensor_model_parallel_size"),
    "model.pipeline_model_parallel_size": ("-pp", "--pipeline_model_parallel_size"),
    "model.context_parallel_size": ("-cp", "--context_parallel_size"),
    "model.virtual_pipeline_model_parallel_size": ("-vp", "--virtual_pipeline_model_parallel_size"),
    "model.expert_model_parallel_size": ("-ep", "--expert_model_parallel_size"),
    "model.expert_tensor_parallel_size": ("-et", "--expert_tensor_parallel_size"),
}
"""Settings for which `scripts/training/run_recipe.py` also has options."""


def _runner_options(command: Command) -> dict[str, Entry]:
    """Settings that a command states by options of the runner."""
    settings: dict[str, Entry] = {}
    texts = [word.text for word in command.argv]
    for i, text in enumerate(texts):
        name, sign, value = text.partition("=")
        for setting, options in _RUNNER_OPTIONS.items():
            if name in options:
                settings[setting] = Entry(
                    plain_value(value if sign else " ".join(texts[i + 1 : i + 2])), 0
                )
    return settings
