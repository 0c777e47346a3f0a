"""Fills in flags from a job file (`JOB.toml`, `--set KEY=VALUE`) or launch file (`--from`)."""

import argparse
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.catalog.job_files import JOB_FILE_KEYS, JOB_WORDS, JobFile, is_job_file, read_job
from perfmodel.cli._show import note
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.spec import Layout, Model

if TYPE_CHECKING:
    from perfmodel.ingest.launch import Launch

MOST_NAMED = 12
"""Most keys, or reasons, that a note names."""
PROGRAM_HELP = (
    "program.ir, a catalog model, FILE.onnx, FILE.pt2 (torch.export), or FILE.py:FUNCTION, which returns a PyTorch "
    "module and the tuple of its arguments, or a JAX loss and the tuple of its weights and data"
)


def add_job_file(
    command: argparse.ArgumentParser,
    settings: str = "",
    positional: bool = True,
    program: bool = False,
    layout: bool = False,
) -> None:
    """Add the job file and `--set`.

    Args:
        settings: help on the settings of the machine that --set takes besides keys of the file.
        positional: whether the file has a place of its own; else it may stand for the model.
        program: whether a program may stand in its place: what does not end in .toml is one
            (`arguments.program`).
        layout: whether the file's layout counts also if the command does not need one.
    """
    # Commands whose first argument is something else (a script, a picture) have no job file.
    if positional:
        text = "job file ('perfmodel init' writes one); flags override it"
        command.add_argument(
            "job_file",
            nargs="?",
            type=Path,
            metavar="JOB.toml | PROGRAM" if program else "JOB.toml",
            help=f"{text}; or {PROGRAM_HELP}" if program else text,
        )
        if program:
            command.set_defaults(program=None)
    else:
        command.set_defaults(job_file=None)
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE" if not settings else "NAME=VALUE",
        help=settings
        + "override a key of the job file: layout.tp=4, job.optimizer=sgd; may be repeated",
    )
    command.set_defaults(takes_settings=bool(settings), takes_layout=layout)


def add_from(command: argparse._ActionsContainer) -> None:
    """Add the flag `--from`."""
    command.add_argument(
        "--from",
        dest="launch_file",
        metavar="FILE",
        help="read model, layout, job and devices from a launch file of Megatron-LM, NeMo, Megatron-Bridge, DeepSpeed, "
        "torchtitan, nanotron, llm-foundry, MaxText, levanter, Accelerate, Hugging Face's Trainer, LLaMA-Factory, "
        "axolotl, torchtune, MS-Swift, XTuner or verl: a script, configuration or command line, a Python recipe of "
        "NeMo or Megatron-Bridge, the args.json of perfmodel hook, or a Kubernetes manifest or SkyPilot task that runs "
        'one; flags override it. Write a script\'s own arguments after its name: "run.sh 8 24 2"',
    )


def require(command: argparse._ActionsContainer, *needed: str) -> None:
    """Require flags that neither the command line nor a launch file gives."""
    needed_before = command.get_default("needed") or ()
    command.set_defaults(needed=(*needed_before, *needed))


def flags_of(names: Iterable[str]) -> str:
    """Names of arguments as flags, in one line."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def lacking(arguments: argparse.Namespace, *names: str) -> str:
    """The missing flags, as text; empty if all are given on the command line or in a file."""
    return flags_of(name for name in names if getattr(arguments, name) in (None, [], ""))


def complete_from_job(arguments: argparse.Namespace, stated: Collection[str]) -> None:
    """Fill in flags from a job file and --set.

    Fields of the job that no flag has stay in `arguments.of_job`, those of the search in
    `arguments.of_search`.

    Args:
        stated: names of the flags that the command line states.

    Raises:
        PerfModelError: a broken file, an unknown key, a value that it cannot have.
    """
    arguments.of_job, arguments.of_search, arguments.given = {}, {}, stated
    if not hasattr(arguments, "job_file"):
        return

    # --set changes a key of the job file or, in some commands, a setting of the machine.
    path = _take_job_file(arguments, stated)
    job_changes = [text for text in arguments.set if _is_key(text) or not arguments.takes_settings]
    arguments.set = [text for text in arguments.set if text not in job_changes]
    arguments.job_changes = job_changes
    if path is None and not job_changes:
        return
    file = read_job(path, job_changes)

    # The command line wins: only what is still open is filled in.
    for word, value in file.problem_fields.items():
        if word == "global_batch" and takes_several(arguments):
            value = [value]
        _fill(arguments, arguments.of_job if word in JOB_WORDS else {}, word, value)
    if isinstance(file.problem_fields.get("cluster"), str) and hasattr(arguments, "clusters"):
        _fill(arguments, {}, "clusters", file.problem_fields["cluster"])
    # A report searches unless a layout is given, but of a calibration it needs one for the step.
    of_step = arguments.command == "report" and of_calibration(arguments)
    needs_layout = "layout" in getattr(arguments, "needed", ()) or arguments.takes_layout or of_step
    if arguments.command == "serve":
        file = _of_server(arguments, file)
    if file.layout and needs_layout:
        if getattr(arguments, "layouts", None) == []:
            arguments.layouts = [file.layout]
        _fill(arguments, {}, "layout", file.layout)
    if arguments.command == "serve":
        _fill_serving(arguments, file, stated)
    if file.search and hasattr(arguments, "fix"):
        _fill_search(arguments, file, stated)


def _take_job_file(arguments: argparse.Namespace, stated: Collection[str]) -> Path | None:
    """Take the job file out of the arguments, wherever it stands.

    Raises:
        PerfModelError: a file that is not a job file.
    """
    # A job file may stand where a model is expected.
    if arguments.job_file is None and is_job_file(arguments.model):
        arguments.job_file, arguments.model = Path(arguments.model), None
        arguments.given = frozenset(stated) - {"model"}

    # A job file may stand among the names that a command takes.
    for several in ("names", "tables"):
        listed = getattr(arguments, several, None) or []
        files = [
            name
            for name in listed
            if str(name).endswith(".toml") and not str(name).startswith("file:")
        ]
        if arguments.job_file is None and len(files) == 1:
            arguments.job_file = Path(files[0])
            setattr(arguments, several, [name for name in listed if name not in files])

    path: Path | None = arguments.job_file
    if path is not None and path.suffix != ".toml" and hasattr(arguments, "program"):
        arguments.program, arguments.job_file, path = str(path), None, None
    if path is not None and path.suffix != ".toml":
        raise PerfModelError(
            f"{path}: a job file ends in .toml ('perfmodel init' writes one); give models with --model"
        )
    return path


def _is_key(change: str) -> bool:
    """Whether a change belongs to the job file: its key has dots, or is a key of the file."""
    key, sign, _ = change.partition("=")
    # A change without key or without `=` is wrong; the reader of the job file says why.
    if not key.strip() or not sign:
        return True
    return "." in key or key.strip() in (*JOB_FILE_KEYS, *JOB_WORDS)


def _fill(arguments: argparse.Namespace, unclaimed: dict[str, Any], name: str, value: Any) -> None:
    if not hasattr(arguments, name):
        unclaimed[name] = value
    elif getattr(arguments, name) is None:
        setattr(arguments, name, value)


def _of_server(arguments: argparse.Namespace, file: JobFile) -> JobFile:
    """The file without what only training has; prints a note that names it."""
    from perfmodel.serving import server_layout

    layout, unused_fields = server_layout(file.layout) if file.layout else ("", ())
    unused = [f"layout.{name}" for name in unused_fields]
    unused += [
        f"job.{name}"
        for name in file.problem_fields
        if name in JOB_WORDS and not hasattr(arguments, name)
    ]
    if unused:
        note([f"{file.place}: serve does not use {', '.join(unused)}"])
    return replace(file, layout=layout)


def _fill_serving(arguments: argparse.Namespace, file: JobFile, stated: Collection[str]) -> None:
    """Fill in the flags of a server that are not given."""
    from perfmodel.serving import serving_options

    for word, value in serving_options(file).items():
        flag = word.removesuffix("_s")
        if flag not in stated:
            setattr(arguments, flag, value)


def _fill_search(arguments: argparse.Namespace, file: JobFile, stated: Collection[str]) -> None:
    """Fill in a search's flags that are not given; settings without a flag stay separate."""
    from perfmodel.planning.layouts.search_words import file_words

    for word, value in file_words(file).items():
        if word == "batches":
            arguments.global_batch = arguments.global_batch if "global_batch" in stated else value
        elif not hasattr(arguments, word):
            arguments.of_search[word] = value
        elif word not in stated:
            setattr(arguments, word, value)


def takes_several(arguments: argparse.Namespace) -> bool:
    """Whether a command accepts several global batches."""
    return arguments.command in ("search", "report")


def complete_from_launch(arguments: argparse.Namespace) -> None:
    """Fill in the settings of the `--from` launch file, print assumptions and unread settings, and
    require what is missing.

    Raises:
        PerfModelError: a broken file, or a flag that neither the command line nor the file gives.
    """
    arguments.launch = None
    missing: tuple[str, ...] = ()
    if getattr(arguments, "launch_file", None) is not None:
        missing = _fill_from_launch(arguments)
    if arguments.command == "emulate" and arguments.world_size is None:
        arguments.world_size = (
            Layout.parse(arguments.layout).devices if arguments.layout else arguments.devices
        )

    # Some commands need less, by what else is given.
    needed: tuple[str, ...] = getattr(arguments, "needed", ())
    if arguments.command == "search" and arguments.program:  # says its model and batch itself
        needed = ("cluster",)
    if arguments.command == "report" and of_calibration(arguments):
        needed = ()
    if getattr(arguments, "open", False) and arguments.devices is not None:
        needed = tuple(name for name in needed if name != "layout")
    flags = lacking(arguments, *needed)

    # The error of an incomplete launch file names the missing settings best.
    if flags and missing:
        raise LaunchFileError(f"{arguments.launch_file}: {'; '.join(missing)}")
    if flags:
        reads_scripts = getattr(arguments, "launch_file", "none") is None and "--model" in flags
        from_script = (
            "; a launch script given by --from states all but the cluster" if reads_scripts else ""
        )
        raise PerfModelError(
            f"{arguments.command}: the following arguments are required: {flags}{from_script}; see 'perfmodel "
            f"{arguments.command} --help'"
        )
    if arguments.launch is not None:
        _say(arguments.launch)


def of_calibration(arguments: argparse.Namespace) -> bool:
    """Whether `report` describes a calibration instead of a job: it is given tables, or a
    calibration and no model."""
    return bool(arguments.tables) or (arguments.calibration is not None and arguments.model is None)


def _fill_from_launch(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Fill in flags from the launch file; return sentences on settings that it leaves open."""
    from perfmodel.ingest.launch import read_launch

    # Flags are passed to the reader of the file, because settings that a script leaves open may
    # follow from them.
    batches = arguments.global_batch
    launch = read_launch(
        arguments.launch_file,
        devices=getattr(arguments, "devices", None),
        global_batch=batches[0] if isinstance(batches, list) else batches,
        layout=getattr(arguments, "layout", None) or "",
        model=arguments.model,
        seq_len=arguments.seq_len,
        dtype=arguments.dtype,
        needs_layout=hasattr(arguments, "layout"),
    )
    arguments.launch = launch
    if arguments.model is None:
        arguments.model = launch.model
    if batches is None and launch.global_batch is not None:
        arguments.global_batch = (
            [launch.global_batch] if takes_several(arguments) else launch.global_batch
        )
    arguments.framework = arguments.framework or launch.framework
    if launch.layout is not None:
        _fill_layout(arguments, launch.layout, launch.model)
    arguments.seq_len = launch.seq_len if arguments.seq_len is None else arguments.seq_len
    arguments.dtype = launch.job_fields.get("dtype") if arguments.dtype is None else arguments.dtype
    return launch.missing


def _fill_layout(arguments: argparse.Namespace, layout: Layout, model: Model | None) -> None:
    """Fill in the layout in the notation of the command's framework."""
    from perfmodel import catalog

    # Commands take layouts as text. Written in the framework's notation, the text reads back as
    # exactly this layout.
    text = catalog.framework(arguments.framework).notation(layout, model)
    if hasattr(arguments, "layout"):
        arguments.layout = text
    elif getattr(arguments, "devices", 0) is None:
        arguments.devices = layout.devices
    if arguments.command == "calibrate" and not arguments.layouts:
        arguments.layouts = [text]


def _say(launch: "Launch") -> None:
    """Print on stderr the assumptions and the settings that were not understood; `emit` prints what
    may be wrong."""
    from perfmodel.ingest.launch import listed

    name = Path(launch.path).name
    note(f"{name}: assumed: {line}" for line in launch.assumed)
    if launch.ignored:
        note([f"{name}: these settings were not read and could matter: {listed(launch.ignored)}"])


def job_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of the job that the launch file states and that have no flag."""
    launch: Launch | None = arguments.launch
    if launch is None:
        return {}
    return {name: value for name, value in launch.job_fields.items() if name != "dtype"}
