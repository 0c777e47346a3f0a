"""Named recipes: the settings of recipes of torchtitan, Megatron-Bridge and NeMo 2 that a command or script names.

`recipes.toml` holds the numbers. What stands behind the name on a command line, or is assigned to the recipe in a
script, replaces them. Nothing is executed: of a script the syntax tree is read.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.files import parse_toml
from perfmodel.ingest.launch._arguments import LAUNCHING, followed_script, processes_in_variables
from perfmodel.ingest.launch._entries import Entry, Neighbours, Source, broken
from perfmodel.ingest.launch._format import LaunchFormat
from perfmodel.ingest.launch._hook_file import nemo_entries, torchtitan_entries
from perfmodel.ingest.launch._megatron import scheduled_settings, world_of
from perfmodel.ingest.launch._model import catalog_model
from perfmodel.ingest.launch._nemo import BRIDGE
from perfmodel.ingest.launch._read_entries import read_toml, read_yaml
from perfmodel.ingest.launch._table import Fields
from perfmodel.ingest.launch._xtuner import plain_value
from perfmodel.ingest.launch.shell import Command
from perfmodel.spec import Model

_LOOKS_LIKE_ONE: Final = re.compile(
    r"torchtitan|run_train\.sh|\bnemo\s+llm\s|--recipe\b|/pretrain_\w+\.py[\s\S]*--config-file|\blitgpt\s"
    r"|setup_experiment\.py"
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
    """Settings of a shell script's command that trains from a named recipe; None for scripts without one.

    Args:
        text: the script.
        place: its path.
        arguments: of the script itself.
        variables: set in its environment.

    Raises:
        LaunchFileError: a recipe that is not known.
    """
    # Following a script costs time; most scripts have none of these words.
    if not _LOOKS_LIKE_ONE.search(text):
        return None
    script, job = followed_script(text, place, arguments, variables)
    neighbours = Neighbours(Path(place).parent, script.files)
    readers = [(command, _reader(command, place)) for command in script.commands]
    trainings = [(command, reader) for command, reader in readers if reader is not None]
    if not trainings:
        return None
    # Of several the first that surely runs is read; the same settings in a loop are one.
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
    world = _world(command, job)
    if not source.devices and "note.devices" in world:
        notes.append(world["note.devices"])
    return replace(source, devices=source.devices or world.get("devices"), notes=tuple(notes)), form


def _texts(command: Command) -> tuple[str, ...]:
    """The words of a command."""
    return tuple(word.text for word in command.argv)


_Reader = Callable[[Command, str, Neighbours], tuple[Source, LaunchFormat]]


def _reader(command: Command, place: str) -> _Reader | None:
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
        raise _of_performance_script(command, place)
    if re.search(r"torchtitan[./]\S*train|run_train\.sh", joined):
        return _titan
    if re.search(r"(^|[\s/])nemo\s+llm\s+(pretrain|finetune)\b", joined):
        return _nemo
    return _bridge if _bridge_name(argv) else None


_BENCHMARK: Final = {
    "--model": ("-mr", "--model_recipe_name", "-m", "--model_name", "--model_family_name"),
    "--devices": ("-ng", "--num_gpus"),
    "--dtype": ("-c", "--compute_dtype"),
}
"""Flags of a prediction, with the corresponding options of Megatron-Bridge's performance scripts."""


def _of_performance_script(command: Command, place: str) -> LaunchFileError:
    """The error for Megatron-Bridge's performance scripts, whose settings are in Python files."""
    texts = [word.text for word in command.argv]
    stated = []
    for flag, names in _BENCHMARK.items():
        value = next((texts[texts.index(name) + 1] for name in names if name in texts[:-1]), "")
        if value and "$" not in value:
            stated.append(f"{flag} {value}")
    asked = f" (it asks for {', '.join(stated)})" if stated else ""
    return LaunchFileError(
        f"{place}, line {command.argv[0].line}: setup_experiment.py takes its settings from Megatron-Bridge's "
        f"scripts/performance/configs, which are not read{asked}; give --model, --devices, --global-batch, --layout "
        "and so on, or add the lines that perfmodel hook megatron-bridge prints and give the file that they write"
    )


def _recipes(framework: str) -> dict[str, Any]:
    """All recipes of a framework, of torchtitan by module."""
    return parse_toml(files("perfmodel.ingest.launch").joinpath("recipes.toml").read_text())[framework]


def _recipe(framework: str, *names: str, place: str, line: int) -> dict[str, Entry]:
    """The settings of a recipe.

    Raises:
        LaunchFileError: it is not known; names those that are.
    """
    table = _recipes(framework)
    for name in names:
        if name not in table:
            known = ", ".join(sorted(table))
            remedy = f"or add the lines that perfmodel hook {framework} prints and give the file that they write"
            raise broken(place, line, f"perfmodel knows no {framework} recipe named {name!r}; known: {known}; {remedy}")
        table = table[name]
    return {key: Entry(value, 0) for key, value in table.items()}


def _module_of(name: str) -> tuple[str, str]:
    """The torchtitan module with a recipe of this name, and the name; empty if there is none."""
    for module, recipes in _recipes("torchtitan").items():
        if name in recipes:
            return module, name
    return "", ""


def _named_model(entries: dict[str, Entry]) -> Model | None:
    """The model of a recipe, which is taken out of its settings."""
    name = entries.pop("model", None)
    return None if name is None else catalog_model(str(name.value))


def _flags(command: Command) -> dict[str, Entry]:
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


def _settings(command: Command) -> dict[str, Entry]:
    """Settings `key=value` of a command, in the notation of Hydra and NeMo-Run."""
    settings: dict[str, Entry] = {}
    # Before the program stand variables of containers (`docker run -e NCCL_DEBUG=INFO`).
    programs = [i for i, word in enumerate(command.argv) if word.text.endswith(".py")]
    for word in command.argv[programs[-1] if programs else 0 :]:
        setting = _SETTING.fullmatch(word.text)
        if setting and not word.text.startswith("-"):
            settings[setting[1]] = Entry(plain_value(setting[2]), word.line)
    return settings


def _world(command: Command, job: Mapping[str, int]) -> Fields:
    """Devices of the job, by the launcher before the program, variables or the scheduler, or why they are unknown."""
    settings: dict[str, Any] = {}
    for name, entry in _flags(command).items():
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


def _titan(command: Command, place: str, neighbours: Neighbours) -> tuple[Source, LaunchFormat]:
    """A torchtitan command: since 2026 `--module` and `--config` name a recipe, earlier ones use a TOML file."""
    line = command.argv[0].line
    flags = _flags(command)
    # Settings have a table in their names (`--training.local_batch_size 4`), flags of launchers have none.
    stated = {name: entry for name, entry in flags.items() if "." in name and name not in _TITAN_FILE}
    file = next((str(flags[name].value) for name in _TITAN_FILE if name in flags), "")
    file = file or command.variables.get("CONFIG_FILE", "")
    notes: tuple[str, ...] = ()
    if file:
        named = neighbours.find(file)
        if named is None:
            module, name = _module_of(Path(file).stem)
            if not module:
                raise broken(place, line, f"the recipe {file} was not found beside the script; put it there")
            # Files of torchtitan's own have the names that its recipes have since.
            entries = _recipe("torchtitan", module, name, place=place, line=line)
            notes = (f"{file} was not found beside the script; torchtitan's recipe {name} of 2026 is used instead",)
        else:
            entries = dict(read_toml(named.text, str(named.path)).entries)
    else:
        # Flags win over variables, and these over the defaults of run_train.sh.
        names = {}
        for variable, usual in _TITAN_DEFAULTS.items():
            flag = flags.get(variable.lower())
            names[variable] = str(flag.value) if flag else command.variables.get(variable, usual)
        entries = _recipe("torchtitan", names["MODULE"], names["CONFIG"], place=place, line=line)
    source = Source(place=place, entries=entries | stated, notes=notes)
    return torchtitan_entries(source)


_CALL: Final = re.compile(r"(\w+)(?:\.\w+)?(?:\((.*)\))?", re.DOTALL)
"""A factory of NeMo-Run: `llama3_8b`, or `llama3_8b(num_nodes=4)`."""
_NEMO_ARGUMENTS: Final = {"num_nodes": "trainer.num_nodes", "num_gpus_per_node": "trainer.devices"}
"""Arguments of a recipe's function, with the settings that they set."""


def _nemo(command: Command, place: str, neighbours: Neighbours) -> tuple[Source, LaunchFormat]:
    """NeMo 2: `nemo llm pretrain --factory NAME key=value ...`."""
    line = command.argv[0].line
    factory = _flags(command).get("factory", Entry("", line))
    called = _CALL.fullmatch(str(factory.value).strip())
    if called is None:
        raise broken(place, factory.line, f"--factory must name a recipe, got {factory.value!r}")
    arguments: dict[str, Entry] = {}
    for argument in (called[2] or "").split(","):
        name, _, value = (part.strip() for part in argument.partition("="))
        if name in _NEMO_ARGUMENTS:
            arguments[_NEMO_ARGUMENTS[name]] = Entry(plain_value(value), factory.line)
    return _of_nemo(called[1], arguments | _settings(command), place, line)


def _of_nemo(name: str, changes: Mapping[str, Entry], place: str, line: int) -> tuple[Source, LaunchFormat]:
    # A recipe is a function with defaults: what the command or script states
    # replaces them, and the model is named by it.
    entries = _recipe("nemo", name, place=place, line=line)
    model = _named_model(entries)
    entries |= changes
    devices = 1
    for key in ("trainer.devices", "trainer.num_nodes"):
        count = entries[key]
        if isinstance(count.value, bool) or not isinstance(count.value, int) or count.value < 1:
            raise broken(place, count.line, f"{key} must be a whole number of at least 1, got {count.value!r}")
        devices *= count.value
    source, form = nemo_entries(Source(place=place, entries=entries))
    return replace(source, recipe_model=model, devices=devices), form


def _bridge_name(argv: Sequence[str]) -> str:
    """The recipe of Megatron-Bridge that a command names, by `--recipe` or by an example's own program."""
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
    """Megatron-Bridge: `run_recipe.py --recipe NAME key=value ...`, with a file of YAML between the two."""
    name = _bridge_name([word.text for word in command.argv])
    file = str(_flags(command).get("config-file", Entry("", 0)).value)
    of_file: dict[str, Entry] = {}
    notes: tuple[str, ...] = ()
    if file:
        named = neighbours.find(file)
        if named is None:
            notes = (f"the command names {file}, which was not found beside the script; its settings are missing here",)
        else:
            of_file = dict(read_yaml(named.text, str(named.path), named.path.parent).entries)
    changes = of_file | _runner_options(command) | _settings(command)
    source, form = _of_bridge(name, changes, place, command.argv[0].line)
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
                settings[setting] = Entry(plain_value(value if sign else " ".join(texts[i + 1 : i + 2])), 0)
    return settings


def _of_bridge(name: str, changes: Mapping[str, Entry], place: str, line: int) -> tuple[Source, LaunchFormat]:
    entries = _recipe("megatron-bridge", name, place=place, line=line)
    model = _named_model(entries)
    return Source(place=place, entries=entries | dict(changes), recipe_model=model), BRIDGE


_RECIPE_CALL: Final = re.compile(r"\b(pretrain_recipe|\w+_(pretrain|sft|peft)_config)\s*\(")
"""Calls that make a recipe in a script of NeMo 2 or Megatron-Bridge."""


def recipe_script(text: str, place: str) -> tuple[Source, LaunchFormat] | None:
    """Settings of a Python script that takes a recipe and changes it; None for other scripts.

    Statements are read in the order of the text, also inside functions. Values that depend on anything but numbers and
    words stay unknown.

    Raises:
        LaunchFileError: no Python, or a recipe that is not known.
    """
    if not _RECIPE_CALL.search(text):
        return None
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", 0) or 0
        raise broken(place, line, "not valid Python; fix the script") from None
    # Values of names are followed from top to bottom, and attributes of the recipe's
    # variable are its settings. Without executing anything, branches and calls stay
    # unknown, and a value that depends on them is refused where it is needed.
    known: dict[str, Any] = {}
    variable = name = framework = ""
    line = 0
    changes: dict[str, Entry] = {}
    for node in _in_order(module):
        if isinstance(node, ast.FunctionDef):
            known |= _defaults(node)
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Call):
            made = _made_by(node.value)
            if made is not None:
                # A script may make several recipes; the last one is that which it runs.
                (framework, name), variable, line = made, target.id, node.lineno
                changes = _arguments(node.value, known) if framework == "nemo" else {}
        elif isinstance(target, ast.Name):
            known[target.id] = plain_value(node.value, known)
        elif isinstance(target, ast.Attribute) and ast.unparse(target).startswith(f"{variable}."):
            setting = ast.unparse(target).removeprefix(f"{variable}.")
            changes[setting] = Entry(plain_value(node.value, known), node.lineno)
    if not name:
        return None
    if framework == "nemo":
        return _of_nemo(name, changes, place, line)
    return _of_bridge(name, changes, place, line)


_OF_BRIDGE: Final = ("_pretrain_config", "_sft_config", "_peft_config")
"""Endings of the names of Megatron-Bridge's recipes."""


def _in_order(module: ast.Module) -> list[ast.stmt]:
    """All statements in order of their lines."""
    statements = [node for node in ast.walk(module) if isinstance(node, ast.stmt)]
    return sorted(statements, key=lambda statement: statement.lineno)


def _made_by(call: ast.Call) -> tuple[str, str] | None:
    """Framework and name of the recipe that a call makes; None for other calls."""
    called = ast.unparse(call.func).split(".")
    if called[-1] == "pretrain_recipe" and len(called) > 1:
        return "nemo", called[-2]
    if called[-1].endswith(_OF_BRIDGE):
        return "megatron-bridge", called[-1]
    return None


def _arguments(call: ast.Call, known: Mapping[str, Any]) -> dict[str, Entry]:
    """Settings that the arguments of a recipe's function set."""
    settings: dict[str, Entry] = {}
    for word in call.keywords:
        if word.arg in _NEMO_ARGUMENTS:
            settings[_NEMO_ARGUMENTS[word.arg]] = Entry(plain_value(word.value, known), call.lineno)
    return settings


def _defaults(function: ast.FunctionDef) -> dict[str, Any]:
    """Default values of a function's arguments."""
    names = [argument.arg for argument in function.args.args]
    values = function.args.defaults
    return {name: plain_value(value, {}) for name, value in zip(names[len(names) - len(values) :], values, strict=True)}
