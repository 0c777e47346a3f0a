"""`--from FILE`: flags that are not given come from a launch file; `--export FILE`: the best layout as one."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._show import note
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.spec import Job, Layout, Model

if TYPE_CHECKING:
    from perfmodel.ingest.launch import Launch

MOST_NAMED = 12
"""Keys that a note names."""


def add_from(command: argparse._ActionsContainer) -> None:
    """The flag."""
    command.add_argument(
        "--from", dest="launch_file", type=Path, metavar="FILE",
        help="launch file of Megatron-LM, NeMo, Megatron-Bridge, DeepSpeed, torchtitan, nanotron, llm-foundry, MaxText "
        "or Accelerate: model, layout, job and devices that are not given otherwise",
    )  # fmt: skip


def require(command: argparse._ActionsContainer, *needed: str) -> None:
    """These flags must be given, on the command line or by a launch file."""
    command.set_defaults(needed=(*(command.get_default("needed") or ()), *needed))


def flags_of(names: Iterable[str]) -> str:
    """Names of arguments as a command line has them, in one line."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def lacking(arguments: argparse.Namespace, *names: str) -> str:
    """Those of the flags that neither the command line nor a file gives; empty where all are given."""
    return flags_of(name for name in names if getattr(arguments, name) in (None, [], ""))


def complete(arguments: argparse.Namespace) -> None:
    """Fill in what the launch file of `--from` says, say what it assumes and what it does not understand, and require
    the rest.

    Raises:
        PerfModelError: a broken file, or a flag that neither the command line nor the file gives.
    """
    missing: tuple[str, ...] = ()
    if getattr(arguments, "launch_file", None) is not None:
        missing = _fill(arguments)
    if arguments.command == "emulate" and arguments.world_size is None:
        arguments.world_size = Layout.parse(arguments.layout).devices if arguments.layout else arguments.devices
    needed: tuple[str, ...] = getattr(arguments, "needed", ())
    if arguments.command == "search" and arguments.program:  # says its model and batch itself
        needed = ("cluster",)
    if arguments.command == "report" and of_calibration(arguments):
        needed = ()
    flags = lacking(arguments, *needed)
    if flags and missing:
        raise LaunchFileError(f"{arguments.launch_file}: {'; '.join(missing)}")
    if flags:
        raise PerfModelError(
            f"{arguments.command}: the following arguments are required: {flags}; see 'perfmodel {arguments.command} "
            "--help'"
        )


def of_calibration(arguments: argparse.Namespace) -> bool:
    """Whether the page of `report` is of a calibration, which needs no job: tables to hold it against, or a folder and
    no job."""
    return bool(arguments.tables) or (arguments.calibration is not None and arguments.model is None)


def _fill(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Flags from the file; sentences for what it leaves open."""
    from perfmodel.ingest.launch import read_launch

    batches = getattr(arguments, "global_batch", None)
    given = getattr(arguments, "layout", None)
    launch = read_launch(
        arguments.launch_file,
        devices=getattr(arguments, "devices", None),
        global_batch=batches[0] if isinstance(batches, list) else batches,
        layout=given or "",
        model=arguments.model,
    )
    arguments.launch = launch
    _say(launch)
    if arguments.model is None:
        arguments.model = launch.model
    if batches is None and launch.global_batch is not None:
        arguments.global_batch = [launch.global_batch] if takes_several(arguments) else launch.global_batch
    arguments.framework = arguments.framework or launch.framework
    if launch.layout is not None:
        _fill_layout(arguments, launch.layout, launch.model)
    for name in ("seq_len", "dtype"):
        if getattr(arguments, name, 0) is None:
            setattr(arguments, name, launch.seq_len if name == "seq_len" else launch.job_fields.get("dtype"))
    return launch.missing


def _fill_layout(arguments: argparse.Namespace, layout: Layout, model: Model | None) -> None:
    """The layout in the notation from which the framework of the command reads this very layout."""
    from perfmodel import catalog

    text = catalog.framework(arguments.framework).notation(layout, model)
    if hasattr(arguments, "layout"):
        arguments.layout = text
    elif getattr(arguments, "devices", 0) is None:
        arguments.devices = layout.devices
    if getattr(arguments, "layouts", 0) in (None, []) and arguments.command == "calibrate":
        arguments.layouts = [text]


def takes_several(arguments: argparse.Namespace) -> bool:
    """Whether a command tries several global batches."""
    return arguments.command in ("search", "report")


def _say(launch: "Launch") -> None:
    name = Path(launch.path).name
    note(f"{name}: assumed: {line}" for line in launch.assumed)
    if launch.ignored:
        more = len(launch.ignored) - MOST_NAMED
        named = ", ".join(launch.ignored[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        note([f"{name}: not understood, and could matter: {named}"])


def job_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of the job that the launch file says beside those that have flags of their own."""
    launch: Launch | None = getattr(arguments, "launch", None)
    return {} if launch is None else {name: said for name, said in launch.job_fields.items() if name != "dtype"}


def add_export(command: argparse.ArgumentParser) -> None:
    """The flag of `search`."""
    command.add_argument(
        "--export", type=Path, metavar="FILE",
        help="write the best layout that the framework can run as its launch file; the framework is that of --from, or "
        "follows from the file's name: best.sh (Megatron), best.toml (torchtitan), best.json (DeepSpeed), "
        "best.nanotron.yaml",
    )  # fmt: skip


def export_framework(arguments: argparse.Namespace) -> str:
    """Whose launch file `--export` writes.

    Raises:
        PerfModelError: the file's name leaves it open.
    """
    from perfmodel.ingest.launch import format_of_path, launch_format

    path: Path = arguments.export
    launch: Launch | None = getattr(arguments, "launch", None)
    framework: str | None = getattr(arguments, "framework", None)
    if launch is not None and Path(launch.path).suffix == path.suffix:
        # Accelerate launches frameworks that have files of their own
        return launch.framework if launch_format(launch.framework).name == launch.format else launch.format
    if framework is not None and launch is None:
        return framework
    return format_of_path(path).frameworks[0]


def export_best(
    arguments: argparse.Namespace,
    layouts: Sequence[Layout],
    jobs: Iterable[Job],
    model: Model,
    devices_per_node: int,
) -> tuple[Path, Layout]:
    """Write the first of the layouts that the framework can run; says why those before it were passed over.

    Raises:
        LaunchFileError: it can run none of them; with the reason for the first.
    """
    from perfmodel.ingest.launch import export_launch, launch_format, write_launch

    framework, refused = export_framework(arguments), []
    launch: Launch | None = getattr(arguments, "launch", None)
    like = launch.path if launch is not None and launch.format == launch_format(framework).name else None
    for rank, (layout, job) in enumerate(zip(layouts, jobs, strict=True), 1):
        try:
            text = export_launch(layout, framework, model=model, job=job, devices_per_node=devices_per_node, like=like)
        except LaunchFileError as error:
            refused.append(str(error))
            continue
        note(f"passed over: {line}" for line in refused[:MOST_NAMED])
        if rank > 1:
            note([f"exported: layout {rank}, {layout}"])
        write_launch(arguments.export, text)
        return arguments.export, layout
    raise LaunchFileError(
        f"search: {framework} can run none of the {len(layouts)} best layouts: {refused[0]}; take a larger --top, or "
        "--fix"
    )
