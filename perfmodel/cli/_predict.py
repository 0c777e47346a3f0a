"""`perfmodel predict` and `perfmodel timeline`: one layout in figures, and what every device does when."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._emit import emit
from perfmodel.cli._flags import add_job, job_of
from perfmodel.errors import PerfModelError
from perfmodel.spec import Layout

if TYPE_CHECKING:
    from perfmodel.prediction import Prediction


def add_predict(commands: Any) -> None:
    """Register `predict`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "predict", help="step time, memory and critical path of one layout"
    )
    add_job(command)
    command.add_argument(
        "--layout",
        required=True,
        help='e.g. "tp=8,pp=16,dp=8,zero=1,recompute=selective" or DistSim\'s 8M16P8D',
    )
    command.set_defaults(run=_predict)


def add_timeline(commands: Any) -> None:
    """Register `timeline`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "timeline", help="what every device does when: Chrome trace and Gantt chart"
    )
    add_job(command)
    command.add_argument("--layout", required=True, help="as for predict")
    command.add_argument("--out", type=Path, metavar="FILE", help="Chrome trace, opens in Perfetto (json or json.gz)")
    command.add_argument("--png", type=Path, metavar="FILE", help="Gantt chart")
    command.add_argument("--html", type=Path, metavar="FILE", help="interactive timeline, opens in any browser")
    command.set_defaults(run=_timeline)


def predicted(arguments: argparse.Namespace, *, timeline: bool = False) -> "Prediction":
    """The prediction that the flags ask for.

    Raises:
        PerfModelError: bad input.
    """
    from perfmodel import catalog, prediction

    model = catalog.model(arguments.model)
    return prediction.predict(
        model,
        arguments.cluster,
        Layout.parse(arguments.layout),
        global_batch=arguments.global_batch,
        devices=arguments.devices,
        job=job_of(arguments, model.seq_len),
        calibration=arguments.calibration,
        timeline=timeline,
        strict=arguments.strict,
    )


def write_pictures(
    prediction: "Prediction", trace: Path | None, png: Path | None, html: Path | None = None
) -> list[str]:
    """Write those that are asked for; names of the files."""
    from perfmodel import viz

    wanted = ((viz.write_trace, trace), (viz.write_gantt, png), (viz.write_interactive, html))
    for write, path in wanted:
        if path:
            write(prediction, path)
    return [str(path) for _, path in wanted if path]


def _predict(arguments: argparse.Namespace) -> int:
    from perfmodel.cli import _show

    result = predicted(arguments)
    emit(arguments, result.to_dict(), lambda: _show.prediction(result))
    return 0


def _timeline(arguments: argparse.Namespace) -> int:
    from perfmodel.cli import _show

    if not (arguments.out or arguments.png or arguments.html):
        raise PerfModelError(
            "timeline: nothing to write; give --out FILE (trace), --png FILE (Gantt chart) or --html FILE (interactive)"
        )
    result = predicted(arguments, timeline=True)
    written = write_pictures(result, arguments.out, arguments.png, arguments.html)
    emit(arguments, result.to_dict() | {"written": written}, lambda: _show.written(written))
    return 0
