"""MaxText's command lines:
`python3 -m MaxText.train configs/base.yml model_name=llama2-7b ici_fsdp_parallelism=16`."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path, PurePosixPath
from typing import Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._arguments import followed_script, trains_nothing
from perfmodel.ingest.launch._entries import Entry, Neighbours, Source, included_entries, yaml_value
from perfmodel.ingest.launch._maxtext import HALF_CHIPS, MAXTEXT
from perfmodel.ingest.launch._read_entries import read_yaml
from perfmodel.ingest.launch.shell import SETTING_PREFIX, Command

_LOOKS_LIKE_ONE: Final = re.compile(
    r"(?=[\s\S]*\.ya?ml\b)[\s\S]*(maxtext|\b(per_device_batch_size|max_target_length|model_name|ici_\w+)=)"
    r"|maxtext[./]\S*train",
    re.IGNORECASE,
)
"""Pattern of a YAML file next to a MaxText setting, or of a program of MaxText that trains, which
few other scripts match."""
_ENDS: Final = ("|", "||", "&&", ";", "&", ">", "2>&1")
"""Words that end a command."""
_SETTING: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def maxtext_command(
    text: str, place: str, arguments: Sequence[str] = (), variables: Mapping[str, str] | None = None
) -> Source | None:
    """Settings of the command that trains with MaxText in a shell script; None for scripts without
    one.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments.
        variables: environment variables of the script.
    """
    if "benchmark_runner" in text:
        _refuse_benchmark(text, place, arguments, variables)
    # Following a script costs time, and every script that is not fine-tuning comes by here.
    if not _LOOKS_LIKE_ONE.search(text):
        return None
    script, _ = followed_script(text, place, arguments, variables)
    best: dict[str, Entry] = {}
    base = idle_program = ""
    for command in script.commands:
        line = command.argv[0].line
        for argv in _commands_within([word.text for word in command.argv]):
            file, settings = _settings(argv, line)
            if file:
                settings = _from_environment(command, line) | settings
            program = _program(argv)
            # `base.yml` has a default for every setting, its model and its batch too.
            if not MAXTEXT.recognises(settings) and not (settings and _is_of_maxtext(program)):
                continue
            # A script may also decode or convert checkpoints with the same settings.
            if trains_nothing(program):
                idle_program = idle_program or f"line {line}: {program.name} of MaxText"
            elif len(settings) > len(best):
                best, base = settings, file
    if not best and idle_program:
        raise LaunchFileError(
            f"{place}, {idle_program} does not train: it decodes, serves or converts; give the command that trains, or "
            "use perfmodel serve for inference"
        )
    if not best:
        return None
    entries, notes = _entries_of_file(base, Neighbours(Path(place).parent, script.files))
    chips, slices = _chips_and_slices(script.commands)
    best = over_slices(best, slices)
    for command in script.commands:
        if any(f"{_TWO_DEVICES}-" in word.text for word in command.argv):
            best[HALF_CHIPS] = Entry(True, 0)
    source = Source(
        place=place,
        entries=entries | best,
        notes=(*script.notes, *notes),
        devices=chips * slices if chips else None,
    )
    return source if chips else with_compiled_slices(source)


def _program(argv: Sequence[str]) -> PurePosixPath:
    """The program of a command, of which the file of settings is an argument."""
    for i, word in enumerate(argv):
        if word == "-m" and i + 1 < len(argv):
            return PurePosixPath(f"{argv[i + 1].replace('.', '/')}.py")
        if word.endswith(".py"):
            return PurePosixPath(word)
    return PurePosixPath()


def _is_of_maxtext(program: PurePosixPath) -> bool:
    """Whether a program is one of MaxText that trains: `MaxText.train`, or since 2026
    `maxtext.trainers.pre_train.train`."""
    return "maxtext" in program.as_posix().lower().split("/") and program.stem.startswith("train")


def over_slices(settings: Mapping[str, Entry], slices: int) -> dict[str, Entry]:
    """Settings of a job on several slices; where no axis spans slices, each further slice holds a
    copy."""
    is_open = settings.get(_COPIES, Entry(-1, 0)).value == -1 and not _spans_slices(settings)
    return {**settings, _COPIES: Entry(slices, 0)} if slices > 1 and is_open else dict(settings)


_COPIES: Final = "dcn_data_parallelism"
_TWO_DEVICES: Final = "tpu7x"
"""The generation of which a chip is two devices of JAX."""


def _refuse_benchmark(
    text: str, place: str, arguments: Sequence[str], variables: Mapping[str, str] | None
) -> None:
    """Raise `LaunchFileError` for a run of one of MaxText's benchmarks: its settings are not in the
    script."""
    script, _ = followed_script(text, place, arguments, variables)
    for command in script.commands:
        # A whole command may stand in one word, as for `xpk workload create --command "..."`.
        line = " ".join(part.text for part in command.argv)
        if not any(re.search(r"(^|[./])benchmark_runner(\.py)?$", word) for word in line.split()):
            continue
        options = line.replace("=", " ").split()
        name = next(
            (after for word, after in pairwise(options) if word == "--model_name"), "the benchmark"
        )
        raise LaunchFileError(
            f"{place}, line {command.argv[0].line}: benchmark_runner looks {name} up in MaxText's "
            "benchmarks/maxtext_*_model_configs.py, which is not read; give the settings that stand there (model_name, "
            "per_device_batch_size, max_target_length, ici_* and dcn_*) in YAML, or --model, --layout and so on"
        )


def _spans_slices(settings: Mapping[str, Entry]) -> bool:
    """Whether an axis other than data is divided between slices."""
    axes = [name for name in settings if name.startswith("dcn_") and name != _COPIES]
    return any(settings[name].value not in (1, "1") for name in axes)


def _chips_and_slices(commands: Sequence[Command]) -> tuple[int, int]:
    """Chips of a slice and number of slices, from the first command that requests them; 0 chips if
    none does."""
    for command in commands:
        requested = _slices(command)
        if requested is not None:
            return requested
    return 0, 1


def _slices(command: Command) -> tuple[int, int] | None:
    """Chips of a slice and number of slices that a command requests
    (`xpk workload create --tpu-type=v6e-256 --num-slices=2`).

    A chip is one device of JAX in these generations, but two in TPU7x. Names of slices count chips,
    but for v4, v5p and TPU7x: these count cores, of which a chip has two (Cloud TPU documentation,
    "TPU configurations").
    """
    options: dict[str, str] = {}
    for i, word in enumerate(command.argv):
        name, sign, value = word.text.partition("=")
        if name.startswith("--"):
            following = command.argv[i + 1].text if i + 1 < len(command.argv) else ""
            options[name.replace("_", "-")] = value if sign else following
    kind = options.get("--tpu-type", options.get("--device-type", ""))
    return _chips_of(kind, options.get("--num-slices", "1"))


def with_compiled_slices(source: Source) -> Source:
    """The settings with the devices of the slices that they compile for ahead of time
    (`compile_topology=v5e-256 compile_topology_num_slices=2`, MaxText train_compile.py); unchanged
    if they name none."""
    kind = source.entries.get(_TOPOLOGY, Entry("", 0)).value
    n_slices = source.entries.get(f"{_TOPOLOGY}_num_slices", Entry(1, 0)).value
    # MaxText's own file has defaults for both that state nothing: an empty name, and -1 slices.
    compiled = _chips_of(str(kind), "1" if n_slices in (-1, "-1") else str(n_slices))
    if compiled is None:
        return source
    chips, slices = compiled
    entries = over_slices(source.entries, slices)
    if str(kind).startswith(f"{_TWO_DEVICES}-"):
        entries[HALF_CHIPS] = Entry(True, 0)
    return replace(source, entries=entries, devices=chips * slices)


_TOPOLOGY: Final = "compile_topology"


def _chips_of(kind: str, slices: str) -> tuple[int, int] | None:
    """Chips of a slice by its name, and the number of slices; None where either is not read."""
    named = re.fullmatch(r"(v4|v5p|v5e|v5litepod|v6e|tpu7x)-(\d+(?:x\d+)*)", kind)
    if named is None or not slices.isdecimal():
        return None
    # A topology counts chips; a plain number counts chips or cores as the generation's names do.
    number = prod(map(int, named[2].split("x")))
    if "x" in named[2]:
        return number * (2 if named[1] == _TWO_DEVICES else 1), int(slices)
    cores_of_a_chip = 2 if named[1] in ("v4", "v5p") else 1
    return number // cores_of_a_chip, int(slices)


def _commands_within(argv: list[str]) -> list[list[str]]:
    """A command, and any whole commands inside one of its words, as for
    `xpk workload create --command "..."`."""
    commands = [argv]
    for word in argv:
        if re.search(r"\.ya?ml\s", word):
            try:
                commands.append(shlex.split(word))
            except ValueError:
                continue
    return commands


def _from_environment(command: Command, line: int) -> dict[str, Entry]:
    """Settings that variables such as `M_MAX_TARGET_LENGTH` make (MaxText pyconfig.py)."""
    settings = {}
    for name, value in command.variables.items():
        if name.startswith(SETTING_PREFIX):
            settings[name.removeprefix(SETTING_PREFIX).lower()] = Entry(yaml_value(value), line)
    return settings


def _settings(argv: Sequence[str], line: int) -> tuple[str, dict[str, Entry]]:
    """The file of settings that a command names, and the settings `key=value` behind it."""
    file = ""
    settings: dict[str, Entry] = {}
    begun = False
    module = _program(argv)
    for word in argv:
        if begun and word in _ENDS:
            break
        # Assignments before the file are variables of the environment
        # (`LIBTPU_INIT_ARGS=... python3 ...`). A program of MaxText needs no file since 2026.
        setting = _SETTING.fullmatch(word)
        is_program = _is_of_maxtext(module) and _names(word, module)
        begun = begun or word.endswith((".yml", ".yaml")) or is_program
        if setting and begun:
            settings[setting[1]] = Entry(yaml_value(setting[2].removesuffix(";")), line)
        elif word.endswith((".yml", ".yaml")):
            file = word
    return file, settings


def _names(word: str, program: PurePosixPath) -> bool:
    """Whether a word of a command is its program, as a file or as a module."""
    return program.as_posix() in (word, f"{word.replace('.', '/')}.py")


def _entries_of_file(name: str, neighbours: Neighbours) -> tuple[dict[str, Entry], list[str]]:
    """The entries of the file that a command names, if it is in the script's folder; else a note,
    unless it holds MaxText's own defaults."""
    file = neighbours.find(name) if name else None
    if file is not None:
        source = read_yaml(file.text, str(file.path), file.path.parent)
        return included_entries(source.entries, file.path, 0), list(source.notes)
    if not name or Path(name).name == MAXTEXT.defaults_file:
        return {}, []
    note = (
        f"the command names {name}, which was not found in the script's folder; its settings are "
        "missing here"
    )
    return {}, [note]
