"""Command lines of launch scripts as entries, and scripts that launch."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Final

from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch._entries import Entry, Neighbours, Source, as_list
from perfmodel.ingest.launch.shell import (
    Command,
    Script,
    Word,
    mpi_numbers,
    requested,
    run_script,
    slurm_numbers,
    slurm_variables,
)

LAUNCHER: Final = ("nproc-per-node", "nnodes")
"""Arguments of torchrun, before the script's name."""
SCRIPT: Final = "<script>"
"""The entry of the Python program that runs: its file or module."""
_TRAINS: Final = frozenset(
    ("pretrain", "train", "training", "finetune", "sft", "dpo", "grpo", "ppo")
)
_TRAINS_NOT: Final = frozenset(
    (
        "convert",
        "converter",
        "convertor",
        "hf2mcore",
        "mcore2hf",
        "hf2mg",
        "mg2hf",
        "preprocess",
        "merge",
        "inference",
        "generation",
        "generate",
        "server",
        "decode",
        "maxengine",
        "microbenchmark",
        "ckpt",
        "quantize",
        "evaluate",
        "eval",
    )
)
"""Words in the names of programs that accept the same arguments but do not train."""
LAUNCHING: Final = (
    "nproc-per-node",
    "nnodes",
    "num-gpus",
    "num-nodes",
    "num-processes",
    "num-machines",
    "hostfile",
    "worker-num",
    "local-worker-num",
)
"""Arguments of torchrun and of the launchers of DeepSpeed and Accelerate that state the number of
processes or their hosts."""
_OFF: Final = ("false", "no", "f", "n", "0")
"""Words that turn a switch off (transformers hf_argparser.py `string_to_bool`)."""
_LAUNCHERS: Final = (
    "run.py",
    "launch.py",
    "launcher.py",
    "torchrun",
    "deepspeed",
    "accelerate",
    "msrun",
)
_SLURM: Final = ("srun", "sbatch", "salloc")
_MPI: Final = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prun", "aprun")
FEWEST: Final = 4
"""Least number of known arguments of a command that counts as one of several training commands."""


def followed_script(
    text: str, place: str, arguments: Sequence[str], variables: Mapping[str, str] | None
) -> tuple[Script, dict[str, int]]:
    """Follow a script as its scheduler would run it, without executing it; also returns the
    numbers requested.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: the script's own arguments.
        variables: environment variables of the script.
    """
    text, broken_lines = _joined(text)
    job = requested(text)
    environment = {**os.environ, **(variables or {})}
    script = run_script(
        text, place, environment, arguments=arguments, variables=slurm_variables(job)
    )
    if broken_lines:
        lines = ", ".join(map(str, broken_lines))
        note = (
            f"line {lines}: the backslash is not the last character, so a shell ends the command there; perfmodel "
            "reads on"
        )
        script = replace(script, notes=(*script.notes, note))
    return script, job


_AFTER_BACKSLASH: Final = re.compile(r"(?<=[ \t])\\[ \t]+(#.*)?$")


def _joined(text: str) -> tuple[str, list[int]]:
    """A script with lines that go on although blanks or a comment follow their backslash, and the
    numbers of these lines.

    In a shell the backslash stands for the blank behind it, and the command ends with the line. No
    program takes such arguments, so that the script means its lines to be one command: it does if
    the next line begins with an argument.
    """
    lines = text.split("\n")
    broken = []
    for i, (line, next_line) in enumerate(pairwise(lines)):
        behind = _AFTER_BACKSLASH.search(line)
        if behind and next_line.lstrip().startswith("--") and not line.lstrip().startswith("#"):
            lines[i] = line[: behind.start()] + "\\"
            broken.append(i + 1)
    return "\n".join(lines), broken


def processes_in_variables(command: Command) -> dict[str, str]:
    """Process counts set by a command's variables, under the torchrun argument for each.

    A count that depends on an unset variable stays as it is written.
    """
    numbers: dict[str, str] = {}
    for variable, name in (("NPROC_PER_NODE", "nproc-per-node"), ("NNODES", "nnodes")):
        number = command.variables.get(variable, "")
        if number.isdecimal() or re.search(r"\$[({]", number):
            numbers[name] = number
    return numbers


_HOST: Final = re.compile(r"^[ \t]*[^#\s]\S*[ \t]+slots=(\d+)", re.MULTILINE)
"""A line of DeepSpeed's hostfile, with the number of devices of a node."""


def listed_hosts(entries: Mapping[str, Entry], neighbours: Neighbours) -> dict[str, Entry]:
    """Nodes and devices per node that DeepSpeed's hostfile lists, under its launcher's arguments
    for them; empty if it is not beside the script or its nodes differ.

    Args:
        entries: arguments of the command, by names with hyphens.
        neighbours: files that it may name.
    """
    named = entries.get("hostfile")
    if named is None or not isinstance(named.value, str):
        return {}
    file = neighbours.find(named.value)
    slots = [int(number) for number in _HOST.findall(file.text)] if file is not None else []
    # Options that choose among the hosts leave open how many are used.
    if len(set(slots)) != 1 or {"include", "exclude", "i", "e"} & set(entries):
        return {}
    return {
        "num-nodes": Entry(len(slots), named.line),
        "num-gpus": Entry(slots[0], named.line),
    }


def _candidates(commands: Sequence[Command], known: frozenset[str]) -> list[Command]:
    """The commands of a script among which the one that trains is looked for."""
    programs = [command for command in commands if not command.argv[0].text.startswith("--")]
    # Commands in branches that cannot be judged count only where no command that surely runs
    # trains.
    for certain in (True, False):
        candidates = [command for command in programs if command.certain == certain]
        if any(_known(command, known) for command in candidates):
            return candidates

    # A list of arguments alone: every line of it looks like a command.
    bare_arguments: list[Word] = []
    for command in commands:
        if command.argv[0].text.startswith("--"):
            bare_arguments += command.argv
    return [Command(tuple(bare_arguments))]


def read_arguments(
    text: str,
    place: str,
    known: frozenset[str],
    switches: frozenset[str] = frozenset(),
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Source:
    """Arguments of the command in a shell script (or bare argument list) that has the most `known`
    ones.

    Names are written with hyphens, without the leading ones; an argument without a value is True,
    one with several a list. Numbers that a scheduler is asked for are entries `sbatch-NAME`.

    Args:
        text: the script.
        place: path of the script, for messages.
        known: arguments that say something.
        switches: arguments that take no value.
        arguments: the script's own arguments.
        variables: environment variables of the script.
    """
    # The shell is followed first: `$ARGS` may hold all flags, and loops or functions may build
    # them.
    script, job = followed_script(text, place, arguments, variables)
    commands = _candidates(script.commands, known)
    notes = [
        *script.notes,
        *(
            f"{setting} was taken from your shell's environment, which may differ from the cluster's"
            for setting in script.from_environment
            # Variables that the caller writes before the script's name do not come from the
            # environment.
            if setting.partition("=")[0] not in (variables or {})
        ),
    ]
    # A script also prepares data and converts checkpoints; the command that trains knows most of
    # the framework's flags.
    training = [command for command in commands if not trains_nothing(_program(command, known))]
    commands = training if any(_known(command, known) for command in training) else commands
    best = max(commands, key=lambda command: len(_known(command, known)), default=Command(()))
    notes += _note_on_others(best, commands, known, switches)
    entries = command_entries(best.argv, _spelled(best, known), switches)
    started = _numbers_of(best.argv, bool({"nodes", "ntasks"} & set(job)))
    if "ntasks-per-node" in started:
        # The job's number of tasks is that of the whole job, and this command runs only part of it.
        job.pop("ntasks", None)
    for option, number in (job | started).items():
        entries[f"sbatch-{option}"] = Entry(str(number), 0)
    # `megatron sft` starts torchrun by itself, with NPROC_PER_NODE and NNODES from the environment
    # (swift/cli/main.py).
    if _starts_processes_itself(best):
        entries.setdefault(SCRIPT, Entry("megatron", best.argv[0].line))
        for name, number in processes_in_variables(best).items():
            entries.setdefault(name, Entry(number, 0))
    # Megatron-DeepSpeed takes the ZeRO stage from DeepSpeed's file when no flag repeats it.
    neighbours = Neighbours(Path(place).parent, script.files)
    if "deepspeed-config" in entries:
        config = entries["deepspeed-config"]
        if "zero-stage" not in entries:
            entries |= _from_configuration(config, neighbours)
        # Its name may hold a variable that only the cluster sets (the job's number); that there is
        # such a file is all that is asked from here on.
        entries["deepspeed-config"] = replace(config, value=True)
    entries = listed_hosts(entries, neighbours) | entries
    return Source(
        place=place, entries=entries, notes=tuple(notes), doubts=_doubts_on_wrapper(best, known)
    )


_SHELL_SCRIPT: Final = re.compile(r"[\w./{}$-]+\.(sh|bash|sbatch|slurm)")


def _doubts_on_wrapper(command: Command, known: frozenset[str]) -> tuple[str, ...]:
    """A doubt about a command that passes its arguments to a script that is not there: the script
    may add others, such as the precision.

    Scripts that are there have been followed, and the command is the one that they run.
    """
    if script_at(command.argv, known) is not None:
        return ()
    for word in command.argv:
        if word.text.startswith("--"):
            break
        if _SHELL_SCRIPT.fullmatch(word.text):
            name = PurePosixPath(word.text).name
            return (
                f"everything that the command does not state may be wrong: it passes its arguments to {name} (line "
                f"{word.line}), which is not in the same folder",
            )
    return ()


_FEWEST_SPELLED: Final = 3
"""Fewest arguments in full that tell a framework's program from others."""


def _spelled(command: Command, known: frozenset[str]) -> frozenset[str]:
    """Arguments of which a command may have abbreviations: all, if it has some in full.

    `--seq-len` and `--micro-batch` begin like a framework's arguments, but are those of many other
    programs too.
    """
    names = {_name(word.text) for word in command.argv if word.text.startswith("--")}
    spelled = frozenset(names & known - set(LAUNCHING))
    return known if len(spelled) >= _FEWEST_SPELLED else spelled | frozenset(LAUNCHING)


def _program(command: Command, known: frozenset[str]) -> PurePosixPath:
    """The Python program of a command; empty if it has none."""
    position = script_at(command.argv, known)
    return PurePosixPath("" if position is None else command.argv[position].text)


def trains_nothing(program: PurePosixPath) -> bool:
    """Whether a program converts checkpoints, generates or evaluates, by its name."""
    parts = set(program.stem.lower().replace("-", "_").split("_"))
    converts_checkpoints = program.parent.parts[-2:] == ("tools", "checkpoint")
    return converts_checkpoints or bool(parts & _TRAINS_NOT and not parts & _TRAINS)


def _starts_processes_itself(command: Command) -> bool:
    """Whether a command is Megatron-SWIFT's, which takes the number of processes from variables."""
    return any(Path(word.text).name == "megatron" for word in command.argv[:1])


def _from_configuration(config: Entry, neighbours: Neighbours) -> dict[str, Entry]:
    """ZeRO settings of DeepSpeed's JSON, if the script writes this file or it is in the same
    folder."""
    # A file that cannot be read leaves the stage open.
    try:
        file = neighbours.find(str(config.value))
        zero = json.loads("" if file is None else file.text)["zero_optimization"]
        stage = zero["stage"]
        offload = zero.get("offload_optimizer") or {}
    except (LaunchFileError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    entries = {"zero-stage": Entry(str(stage), config.line)}
    if isinstance(offload, dict) and offload.get("device") in ("cpu", "nvme"):
        entries["cpu-optimizer"] = Entry(True, config.line)
    return entries


def _known(command: Command, known: frozenset[str]) -> set[str]:
    """Known arguments of a command."""
    return {
        _in_full(_name(word.text), known) for word in command.argv if word.text.startswith("--")
    } & known


def _name(text: str) -> str:
    """An argument's name with hyphens: `--num_layers=4` is `num-layers`."""
    return text[2:].partition("=")[0].replace("_", "-")


def _in_full(name: str, known: frozenset[str]) -> str:
    """Full name of an abbreviated argument, which argparse accepts (`--micro-batch`) if only one
    argument begins with it.

    Words without a hyphen are too many things: `--output` is of srun, and no part of
    `--output-logit-softcapping`. The degrees of parallelism, `-size`, are older than other
    arguments that begin as they do, so that scripts cut them short.
    """
    if name in known or "-" not in name:
        return name
    if f"{name}-size" in known:
        return f"{name}-size"
    longer = [full_name for full_name in known if full_name.startswith(name)]
    return longer[0] if len(longer) == 1 else name


def _note_on_others(
    best: Command, commands: Sequence[Command], known: frozenset[str], switches: frozenset[str]
) -> list[str]:
    """A note on further commands that train with other arguments."""
    read = _known_values(best, known, switches)
    stated = [_known_values(command, known, switches) for command in commands]
    differing = [
        arguments for arguments in stated if len(arguments) >= FEWEST and arguments != read
    ]
    if not differing:
        return []
    line = best.argv[0].line
    return [
        f"{len(differing) + 1} training commands have different arguments; perfmodel reads the one on line {line}"
    ]


def _known_values(
    command: Command, known: frozenset[str], switches: frozenset[str]
) -> dict[str, Any]:
    """Known arguments of a command with their values."""
    entries = command_entries(command.argv, known, switches)
    return {name: entry.value for name, entry in entries.items() if name in known}


def _numbers_of(argv: Sequence[Word], has_nodes: bool) -> dict[str, int]:
    """Numbers of nodes, tasks and processes in the options of the schedulers that start a command.

    Args:
        argv: words of the command.
        has_nodes: whether the job around it says on how many nodes it runs.
    """
    texts = [word.text for word in argv]
    names = [Path(text).name for text in texts]
    # Schedulers may start one another (`sbatch ... srun ... python`); the options of each end where
    # the next begins.
    starts = [i for i, name in enumerate(names) if name in (*_SLURM, *_MPI)]
    script = script_at(argv, frozenset())
    numbers = _numbers_of_hosts(texts[:script])
    for i, start in enumerate(starts):
        end = starts[i + 1] if i + 1 < len(starts) else script or len(texts)
        options = texts[start + 1 : max(start + 1, _end_of_options(names, start, end))]
        if names[start] in _SLURM:
            numbers |= slurm_numbers(options)
        else:
            numbers |= mpi_numbers(options, has_nodes or "nodes" in numbers)
    return numbers


def _numbers_of_hosts(texts: Sequence[str]) -> dict[str, int]:
    """Numbers that follow from the hosts in a launcher's options, by the names of a scheduler's
    options.

    `colossalai run --host a,b` names nodes, and DeepSpeed's `--include a:0,1@b:0,1` devices on
    them.
    """
    names = [Path(text).name for text in texts]
    numbers: dict[str, int] = {}
    for i, text in enumerate(texts):
        name, sign, value = text.partition("=")
        hosts = value if sign else " ".join(texts[i + 1 : i + 2])
        if name == "--host" and "colossalai" in names and hosts and "$" not in hosts:
            numbers["nodes"] = hosts.count(",") + 1
        elif name in ("--include", "-i") and "deepspeed" in names:
            parts = hosts.strip("'\"").split("@")
            # A host without a list has all of its devices.
            if all(re.fullmatch(r"[^:$]+:\d+(,\d+)*", part) for part in parts):
                numbers |= {
                    "nodes": len(parts),
                    "ntasks": sum(part.count(",") + 1 for part in parts),
                }
    return numbers


def _end_of_options(names: Sequence[str], start: int, end: int) -> int:
    """Position of the program that a scheduler starts, where its own options end."""
    programs = (
        *_LAUNCHERS,
        "python",
        "python3",
        "singularity",
        "apptainer",
        "docker",
        "numactl",
        "env",
    )
    return next((i for i in range(start + 1, end) if names[i] in programs), end)


def script_at(argv: Sequence[Word], known: frozenset[str]) -> int | None:
    """Position of the Python program in a training command; None if it has none.

    Launchers are Python programs too (`python launch.py ... pretrain_gpt.py`), and values of
    arguments may end in .py: it is the last one before the first known argument.
    """
    last = None
    has_python = False
    for i, word in enumerate(argv):
        if (
            word.text.startswith("--")
            and _name(word.text) in known
            and _name(word.text) not in LAUNCHING
        ):
            break
        is_module = i > 0 and argv[i - 1].text == "-m" and _is_module(word.text, has_python)
        has_python = has_python or Path(word.text).name.startswith(("python", "torchrun"))
        is_file = word.text.endswith(".py") and not word.text.startswith("-")
        # Hydra's settings (`env_path=env.py`), and files of settings behind a program, are none.
        is_setting = re.match(r"[\w.+]+=", word.text) is not None
        is_config = last == i - 1 and "config" in word.text
        if (is_file and not is_setting and not is_config) or is_module:
            last = i
    return last


def _is_module(text: str, has_python: bool) -> bool:
    """Whether the word behind `-m` names a module that trains; behind other programs only if it has
    a dot."""
    if "torch.distributed" in text:
        return False
    return "." in text or (has_python and re.fullmatch(r"[A-Za-z_][\w-]*", text) is not None)


def command_entries(
    argv: Sequence[Word], known: frozenset[str], switches: frozenset[str]
) -> dict[str, Entry]:
    """Arguments of one command, by names with hyphens.

    Args:
        argv: words of the command.
        known: arguments that say something.
        switches: arguments that take no value.
    """
    entries: dict[str, Entry] = {}
    script = script_at(argv, known)
    if script is not None:
        # Only the folder may depend on a variable that nobody set.
        entries[SCRIPT] = Entry(re.sub(r"^.*[})]/", "", argv[script].text), argv[script].line)
    name = ""
    for i, word in enumerate(argv):
        is_launcher_flag = script is not None and i < script
        if word.text.startswith("--") and len(word.text) > 2:
            name = _in_full(_name(word.text), known)
            # Options of schedulers and containers may precede the script.
            if is_launcher_flag and name not in LAUNCHING:
                name = ""
                continue
            _, sign, value = word.text.partition("=")
            entries[name] = Entry(value if sign else True, word.line)
            name = "" if sign else name
        elif i == script or re.match(r"-[A-Za-z]", word.text):
            # The script's own name and a short option end the values of an argument.
            name = ""
        elif name in switches:
            # A switch needs no value: another word is a variable that nobody set, or the like.
            if word.text.lower() in _OFF:
                entries[name] = Entry("false", entries[name].line)
            name = ""
        elif name and word.text:
            before = entries[name]
            # An empty first value (`--fsdp ""`) is one that other values replace.
            is_first = before.value is True or before.value == ""
            values = word.text if is_first else [*as_list(before.value), word.text]
            entries[name] = Entry(values, before.line)
        elif name and entries[name].value is True:
            entries[name] = Entry("", entries[name].line)
    return entries


def write_arguments(values: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    """Write a bash script that launches with these arguments, followed by the script's own
    arguments."""
    rows = [(name, "" if value is True else f" {value}") for name, value in values.items()]
    launcher = "".join(
        f" --{name.replace('-', '_')}{value}" for name, value in rows if name in LAUNCHER
    )
    lines = ["#!/bin/bash", *(f"# {comment}" for comment in comments)]
    lines.append("# data, tokenizer, optimizer and checkpoints are the script's own arguments")
    lines.append(f"torchrun{launcher} pretrain_gpt.py \\")
    lines += [f"    --{name}{value} \\" for name, value in rows if name not in LAUNCHER]
    return "\n".join([*lines, '    "$@"']) + "\n"
