"""`perfmodel check`: checks whether a run is healthy, from its launch script and log."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._files import add_job_file, require
from perfmodel.cli._flags import (
    add_calibration,
    add_json,
    add_layout,
    add_problem,
    problem_of,
    search_command,
)
from perfmodel.cli._show import emit, written
from perfmodel.display import progress, say, say_verbatim

if TYPE_CHECKING:
    from perfmodel.ingest.launch import Launch
    from perfmodel.planning.health import RunHealth


class _OneLog(argparse.Action):
    """Takes a single log; argparse would silently take the last of several."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(
                self,
                "one log is checked at a time; 'perfmodel fit --log SCRIPT=LOG' takes several",
            )
        setattr(namespace, self.dest, values)


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "check",
        help="check whether a run is healthy: compare its log with a prediction, and show the likeliest causes",
    )
    add_job_file(command)
    add_problem(command)
    add_layout(command)
    command.add_argument(
        "--log",
        action=_OneLog,
        type=Path,
        metavar="FILE",
        help="the job's log, from Megatron-LM, Megatron-Bridge, NeMo, torchtitan, nanotron, DeepSpeed, Hugging Face's "
        "Trainer, MaxText, llm-foundry, levanter or a fine-tuning front end",
    )
    require(command, "model", "cluster", "global_batch", "log")
    command.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="also write the result as a page with a picture of the steps",
    )
    add_calibration(command)
    add_json(command)
    command.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    """Compare a log with the prediction of its launch script, and show the result."""
    from perfmodel.planning.health import check_run

    with progress("check", silent=arguments.json) as report:
        health = check_run(
            problem_of(arguments),
            arguments.layout,
            arguments.log,
            calibration=arguments.calibration,
            save_every=_save_every(arguments.launch),
            progress=report,
        )
    files = []
    if arguments.html:
        health.write(arguments.html)
        files.append(str(arguments.html))
    command = search_command(arguments, health.prediction)
    emit(arguments, health.to_dict() | {"written": files}, lambda: _show(health, files, command))
    return 0


def _show(health: "RunHealth", files: list[str], next_command: str) -> None:
    say(*str(health).splitlines())
    written(files)
    # A run without a cause to look into may still have a faster layout.
    if not any(line.startswith("next") for line in str(health).splitlines()):
        say_verbatim(f"next: {next_command}")


def _save_every(launch: "Launch | None") -> int | None:
    """Steps between checkpoints, from the launch script."""
    from perfmodel.ingest.launch import save_every

    return None if launch is None else save_every(Path(launch.path).read_text(errors="replace"))
