"""`perfmodel search`: finds the best layouts under an objective and constraints."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._files import MOST_NAMED
from perfmodel.cli._flags import add_job, predict_command, problem_of, whole_numbers
from perfmodel.cli._predict import predicted, write_pictures
from perfmodel.cli._programs import add_values, search_program
from perfmodel.cli._search_flags import add_search, options_of, run_of, space_of, tariff_of
from perfmodel.cli._show import emit, note, written
from perfmodel.cli._yours import advice, predict_user_layout
from perfmodel.display import new_console, progress, say, say_verbatim
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.spec import Problem

if TYPE_CHECKING:
    from perfmodel.ingest.launch import Launch
    from perfmodel.planning.layouts import SearchResult
    from perfmodel.planning.training_run import TrainingRun
    from perfmodel.prediction import Prediction


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "search", help="rank the layouts of a model on a cluster"
    )
    machine = "change the machine, as in whatif: inter_node_bandwidth=2x; or "
    add_job(command, batches=True, settings=machine, program=True)
    add_values(command)
    command.add_argument(
        "--micro-batches",
        type=whole_numbers,
        metavar="K[,K...]",
        help="numbers of micro-batches to try for pipelines of PROGRAM (default: 2 to 128)",
    )
    add_search(command)
    command.add_argument(
        "--pareto",
        metavar="A,B[,C]",
        help="show the Pareto front of these objectives instead, e.g. time,memory,cost",
    )
    command.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="also show how the search went, why layouts were rejected, and where the step's time goes",
    )
    command.add_argument(
        "--script",
        action="store_true",
        help="end with the launch script of the recommended layout, for the framework of --framework or --from",
    )
    # The best layout in other forms: a launch file, a trace, a picture.
    command.add_argument("--out", type=Path, metavar="FILE", help="also write the result as JSON")
    command.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write the recommended layout as a launch file of the framework of --framework or --from; without these "
        "the file's name decides the framework: best.sh (Megatron), best.toml (torchtitan), best.json "
        "(DeepSpeed), best.nanotron.yaml",
    )
    command.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="Chrome trace of the best layout (json or json.gz)",
    )
    command.add_argument("--png", type=Path, metavar="FILE", help="Gantt chart of the best layout")
    command.set_defaults(run=_execute)


@dataclass(frozen=True)
class _Script:
    """The launch script requested by --script; empty if not requested or not available."""

    text: str = ""
    error: LaunchFileError | None = None
    """Reason why no layout can be written as a launch file."""


def _execute(arguments: argparse.Namespace) -> int:
    """Search, show the ranking, and write the requested files.

    Raises:
        PerfModelError: what stands in the way of every layout.
        KeyboardInterrupt: the search was interrupted; what it reached is shown before.
    """
    # A program and a Pareto front are searches of their own.
    if arguments.program:
        return search_program(arguments)
    if arguments.pareto:
        return _pareto(arguments)
    if arguments.export:
        _take_framework_of_export(arguments)
    if arguments.script:
        _require_launch_format(arguments)

    # The search, then the user's own layout to compare it with.
    result = _searched(arguments)
    report = result.to_dict()
    problem = problem_of(arguments, quiet=True)
    user_layout = predict_user_layout(arguments)
    change = None
    if user_layout is not None:
        report["yours"] = user_layout.to_dict()
        change = advice(arguments, problem, user_layout, result)
    if change is not None:
        report["change"] = change.to_dict()

    # A framework may be unable to run any of the best layouts. The ranking is shown before that
    # error is raised.
    script = _script_of_recommended(arguments, result)
    if script.text:
        report["launch_script"] = script.text
    run_summary = _add_training_runs(arguments, problem, result, report)

    # The ranking comes first: nothing that goes wrong with a file may lose it.
    has_answer = bool(result.layouts) or (result.complete and not result.impossible)
    files = _write_files(arguments, report)
    if arguments.json or has_answer:
        command = predict_command(arguments, result.first_to_try) if result.layouts else ""
        head = "" if user_layout is None else user_layout.line
        emit(
            arguments, report, partial(_show, arguments, result, head, command, run_summary, files)
        )

    # Files of an interrupted search's best layout would be mistaken for those of the best.
    if result.complete and result.layouts:
        further = _write_recommended(arguments, result)
        if not arguments.json:
            written(further)
    if script.error is not None:
        raise script.error
    if script.text and not arguments.json:
        say_verbatim(f"launch script:\n\n{script.text.rstrip()}")
    if change is not None and not arguments.json:
        say_verbatim(*change.lines)

    # The exit status comes last: no layout at all, or an interrupt.
    if result.impossible:
        raise PerfModelError(str(result.impossible))
    if not result.complete:
        raise KeyboardInterrupt(result.certificate)
    return 0


def _show(
    arguments: argparse.Namespace,
    result: "SearchResult",
    head: str,
    command: str,
    run_summary: Sequence[str],
    files: Sequence[str],
) -> None:
    """Print a line on the user's own layout, if there is one, the ranking, and the files."""
    from perfmodel.planning.layouts import print_search

    if head:
        say(head)
    print_search(new_console(), result, command, run_summary, verbose=arguments.verbose)
    written(files)


def _script_of_recommended(arguments: argparse.Namespace, result: "SearchResult") -> _Script:
    """Return the launch script of the best layout that can run, if --script requests it."""
    if not arguments.script or not result.layouts:
        return _Script()
    try:
        return _Script(_launch_text(arguments, result, arguments.framework, template=None))
    except LaunchFileError as error:
        return _Script(error=error)


def _add_training_runs(
    arguments: argparse.Namespace,
    problem: Problem,
    result: "SearchResult",
    report: dict[str, Any],
) -> tuple[str, ...]:
    """Add days, money and energy of a whole run to every layout of a report, if --tokens is given.

    Returns:
        Lines that say these of the recommended layout; none without --tokens.
    """
    from perfmodel.planning.training_run import run_lines

    def training_run(prediction: "Prediction") -> "TrainingRun | None":
        return run_of(arguments, problem.replace(global_batch=prediction.global_batch), prediction)

    for row, prediction in zip(report["layouts"], result.layouts, strict=True):
        training = training_run(prediction)
        if training:
            row |= training.to_dict()
    recommended = training_run(result.first_to_try) if result.layouts else None
    if recommended is None:
        return ()
    report["recommended"] |= recommended.to_dict()
    return tuple(run_lines(recommended, result.first_to_try))


def _write_recommended(arguments: argparse.Namespace, result: "SearchResult") -> list[str]:
    """Write the requested launch file, trace and picture; return the names of the files."""
    files = []
    if arguments.export:
        _export(arguments, result)
        files.append(str(arguments.export))
    if arguments.trace or arguments.png:
        best = result.first_to_try
        arguments.devices, arguments.global_batch = None, best.global_batch
        drawn = predicted(arguments, best.layout, timeline=True, quiet=True)
        files += write_pictures(drawn, arguments.trace, arguments.png)
    return files


def _take_framework_of_export(arguments: argparse.Namespace) -> None:
    """Use the framework of the requested launch file for the search, if no flag names one.

    Raises:
        PerfModelError: the file's name leaves the framework open, or the framework has no launch
            files.
    """
    from perfmodel.ingest.launch import launch_format

    framework = _export_framework(arguments)
    launch_format(framework)
    if arguments.framework is None:
        arguments.framework = framework
        arguments.given = frozenset({*arguments.given, "framework"})


def _export_framework(arguments: argparse.Namespace) -> str:
    """The framework whose launch file `--export` writes.

    Raises:
        PerfModelError: the file's name leaves it open.
    """
    from perfmodel.ingest.launch import format_of_path, launch_format

    path: Path = arguments.export
    launch: Launch | None = arguments.launch
    if launch is not None and Path(launch.path).suffix == path.suffix:
        # Accelerate launches frameworks that have files of their own.
        if launch_format(launch.framework).name == launch.format:
            return launch.framework
        return launch.format
    if launch is None and arguments.framework is not None:
        return arguments.framework
    return format_of_path(path).frameworks[0]


def _require_launch_format(arguments: argparse.Namespace) -> None:
    """Refuse --script if no framework is named, or if it has no launch files.

    Raises:
        PerfModelError: naming what is missing.
    """
    from perfmodel.ingest.launch import launch_format

    if arguments.framework is None:
        raise PerfModelError(
            "search: --script needs --framework or --from to know which framework's launch script to write"
        )
    launch_format(arguments.framework)


def _export(arguments: argparse.Namespace, result: "SearchResult") -> None:
    """Write the launch file of `_launch_text` if --export is given."""
    from perfmodel.ingest.launch import launch_format, write_launch

    framework = _export_framework(arguments)
    launch: Launch | None = arguments.launch

    # A file of the same format is the template: settings that the layout does not determine stay as
    # they are.
    if launch is not None and launch.format == launch_format(framework).name:
        template = launch.path
    else:
        template = None
    write_launch(arguments.export, _launch_text(arguments, result, framework, template))


def _launch_text(
    arguments: argparse.Namespace,
    result: "SearchResult",
    framework: str,
    template: str | None,
) -> str:
    """The launch file of the recommended layout, or of the first that a file can state.

    Layouts that are passed over are noted with the reason, and so is what the file leaves to the
    training script.

    Raises:
        LaunchFileError: none of them can be written; with the reason for the first.
    """
    from perfmodel.ingest.launch import launch_file

    problem = problem_of(arguments, quiet=True)
    node = problem.cluster.devices_per_node

    # The recommended layout first, then the ranking, until a file can state one.
    refused: list[str] = []
    ranked = [p for p in result.layouts if p is not result.first_to_try]
    for p in [result.first_to_try, *ranked]:
        job = replace(problem.job, global_batch=p.global_batch)
        try:
            file = launch_file(
                p.layout,
                framework,
                model=problem.model,
                job=job,
                devices_per_node=node,
                like=template,
            )
        except LaunchFileError as error:
            refused.append(str(error))
            continue
        note(f"skipped: {line}" for line in refused[:MOST_NAMED])
        if refused:
            note([f"exported: {p.layout_notation}"])
        note(file.left_to_script)
        if file.by_script:
            note([f"to predict the file as it will run, also give --layout {file.by_script}"])
        return file.text
    raise LaunchFileError(
        f"search: none of the {len(result.layouts)} best layouts can be written as a launch file: {refused[0]}; "
        "increase --top, or fix these settings with --fix"
    )


def _searched(arguments: argparse.Namespace) -> "SearchResult":
    """Run the search that the command line describes."""
    from perfmodel.planning import layouts

    options = options_of(arguments)
    problem = problem_of(arguments)
    problem.require_devices()
    with progress("search") as report:
        return layouts.search(
            problem,
            space=lambda problem: space_of(arguments, problem),
            options=options,
            calibration=arguments.calibration,
            settings=arguments.set,
            progress=report,
        )


def _pareto(arguments: argparse.Namespace) -> int:
    """Search for the Pareto front of --pareto, and show it."""
    from perfmodel.planning import layouts

    # Step times of different batches are of different work, so that one front cannot hold them.
    if len(arguments.global_batch) > 1:
        raise PerfModelError("search: --pareto needs a single --global-batch")
    problem = problem_of(arguments)
    problem.require_devices()
    question = layouts.ask(
        problem,
        space=space_of(arguments, problem),
        calibration=arguments.calibration,
        settings=arguments.set,
    )
    with progress("pareto") as report:
        front = layouts.pareto(
            question,
            [name.strip() for name in arguments.pareto.split(",") if name.strip()],
            constraints=arguments.constraints,
            tariff=tariff_of(arguments),
            progress=report,
            workers=arguments.workers,
            dask=arguments.dask,
        )
    if not front.layouts:
        raise PerfModelError(
            "search: no layout fits and satisfies the constraints; search without --pareto explains why"
        )
    files = _write_files(arguments, front.to_dict())
    emit(
        arguments,
        front.to_dict(),
        lambda: (layouts.print_pareto(new_console(), front), written(files)),
    )
    return 0


def _write_files(arguments: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Write the report as JSON if asked for; names of the files."""
    from perfmodel.ingest.tables import write_json

    if not arguments.out:
        return []
    write_json(arguments.out, report)
    return [str(arguments.out)]
