"""`perfmodel plot KIND`: one picture per kind, all with the same --out and --width."""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perfmodel.cli._compare import add_picture, draw_picture
from perfmodel.cli._equal_stages import (
    add_pipeline,
    facts_by_micro_batches,
    schedules_with_facts,
)
from perfmodel.cli._flags import (
    add_calibration,
    add_job,
    add_json,
    add_layout,
    layout_of,
    layouts_of,
    problem_of,
    refuse_strict,
    require_measured,
)
from perfmodel.cli._predict import note_layout, with_timeline
from perfmodel.cli._show import reporting, written
from perfmodel.display import progress
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.spec import Layout, Problem
from perfmodel.units import number_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perfmodel.prediction import Prediction, StepProblem


class Kind(NamedTuple):
    """A kind of picture."""

    about: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    """Function that adds the picture's flags other than --out and --width."""
    draw: "Callable[[argparse.Namespace, dict[str, Any]], Picture]"
    """Function of the flags, and of `width` as a keyword argument if it is given."""


class Picture(NamedTuple):
    """A drawn figure, and the layouts in it whose fit the command reports."""

    figure: "Figure"
    layouts: "list[Prediction]"
    """The few layouts that the picture is about; empty if it shows none, or a whole space."""


def add_command(commands: Any) -> None:
    """Register the command and its kinds."""
    command: argparse.ArgumentParser = commands.add_parser(
        "plot", help="draw pictures for papers, as PNG, PDF or SVG"
    )
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND")
    for name, kind in KINDS.items():
        kind_command = kinds.add_parser(name, help=kind.about)
        kind.add_flags(kind_command)
        kind_command.add_argument(
            "--out",
            type=Path,
            required=True,
            metavar="FILE",
            help="picture: .png, .pdf or .svg",
        )
        kind_command.add_argument(
            "--width",
            choices=("column", "page"),
            help="width of a paper's column or page (default: depends on the picture)",
        )
        kind_command.set_defaults(run=reporting(run, lambda report: written(report["written"])))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw and write one picture.

    Raises:
        PerfModelError: what the picture needs is missing, or impossible.
    """
    from perfmodel import viz

    # Pictures differ in their usual width, so that only a stated width is passed on.
    width_keyword = {} if arguments.width is None else {"width": arguments.width}
    picture = KINDS[arguments.kind].draw(arguments, width_keyword)
    viz.save_figure(picture.figure, arguments.out)
    report = {"kind": arguments.kind, "written": [str(arguments.out)]}

    # Only pictures of layouts that the user chose tell of these whether they fit.
    if not picture.layouts:
        return report
    for prediction in picture.layouts:
        note_layout(prediction)
    reasons = []
    for prediction in picture.layouts:
        reasons += [
            f"layout {prediction.layout_notation}: {reason}" for reason in prediction.reasons
        ]
    return report | {"fits": all(p.fits for p in picture.layouts), "reasons": reasons}


def _add_step(command: argparse.ArgumentParser) -> None:
    add_job(command)
    add_layout(command)


def _draw_step(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> Picture:
    """Draw the timeline, memory or links of the step that the flags describe."""
    from perfmodel import viz

    drawings = {
        "gantt": viz.gantt,
        "memory": viz.draw_memory,
        "links": viz.draw_link_utilisation,
    }
    draw = drawings[arguments.kind]
    step = with_timeline(arguments)
    return Picture(draw(step, **width_keyword), [step])


def _add_breakdown(command: argparse.ArgumentParser) -> None:
    """Add the flags of the layouts to draw."""
    add_job(command)
    command.add_argument(
        "--layouts",
        metavar="LIST",
        help="layouts to draw, separated by ';' (default: the best for each tp, pp, dp)",
    )
    command.add_argument(
        "--top",
        type=int,
        default=12,
        metavar="K",
        help="number of layouts to draw if --layouts is not given (default 12)",
    )


def _draw_breakdown(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> Picture:
    """Draw the named layouts, or else the best of each (tp, pp, dp), limited to the fastest."""
    from perfmodel import viz
    from perfmodel.prediction import explain

    problem = _step_problem(arguments)
    if arguments.layouts:
        chosen = layouts_of(problem, arguments.layouts)
        for layout in chosen:
            require_measured(arguments, problem, layout)
        layouts = [_explained(problem, layout, arguments.devices) for layout in chosen]
        return Picture(viz.draw_breakdown(layouts, **width_keyword), layouts)
    refuse_strict(arguments, "plot breakdown")
    if arguments.devices is None:
        raise PerfModelError(
            "plot breakdown: give --layouts 'LAYOUT;LAYOUT', or --devices N for the best of each degree"
        )

    # The fastest layout of every (tp, pp, dp), of these the fastest, in the order of their degrees.
    step_s_of = {
        layout: step_s for layout, step_s, _ in _scored(problem, arguments.devices, arguments.json)
    }
    by_speed = sorted(step_s_of, key=step_s_of.__getitem__)
    best_of_degrees: dict[tuple[int, int, int], Layout] = {}
    for layout in by_speed:
        best_of_degrees.setdefault((layout.tp, layout.pp, layout.dp), layout)
    fastest = sorted(list(best_of_degrees)[: arguments.top])
    layouts = [explain(problem, best_of_degrees[degrees]) for degrees in fastest]
    return Picture(viz.draw_breakdown(layouts, **width_keyword), layouts)


def _add_pareto(command: argparse.ArgumentParser) -> None:
    """Add the flags of a job on one or several numbers of devices."""
    add_job(command)
    command.add_argument(
        "--device-counts",
        metavar="LIST",
        help="device counts, such as 64,128,256, instead of --devices",
    )
    command.add_argument(
        "--price", type=float, metavar="P", help="price of a device-hour, to show the cost in money"
    )


def _draw_pareto(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> Picture:
    """Draw every layout that fits on each number of devices, with its cost."""
    import pandas as pd

    from perfmodel import viz

    if arguments.price is not None and not 0 <= arguments.price < inf:
        raise PerfModelError(
            f"plot pareto: --price must be a finite number of at least 0, got {arguments.price}"
        )
    if arguments.device_counts:
        counts = _numbers(arguments.device_counts, "--device-counts")
    elif arguments.devices is not None:
        counts = [arguments.devices]
    else:
        raise PerfModelError("plot pareto: give --devices N, or --device-counts N,N,...")
    refuse_strict(arguments, "plot pareto")
    problem = _step_problem(arguments)
    rows = []
    for devices in counts:
        for layout, step_s, peak_bytes in _scored(problem, devices, arguments.json):
            rows.append(
                {
                    "layout": problem.notation(layout),
                    "devices": devices,
                    "step_time_s": step_s,
                    "peak_bytes": peak_bytes,
                }
            )
    table = pd.DataFrame(rows)

    # Without a price the cost of a step is the time for which it holds devices.
    price = 1.0 if arguments.price is None else arguments.price
    label = "device-hours per step" if arguments.price is None else "price of a step"
    table["cost"] = table["devices"] * table["step_time_s"] / 3600 * price
    # On one number of devices cost is but another unit of time.
    cost_column = "cost" if len(set(table["devices"])) > 1 else ""
    return Picture(viz.draw_pareto(table, cost_column, label, **width_keyword), [])


def _add_whatif(command: argparse.ArgumentParser) -> None:
    """Add the flags of a job, its layout and the parameters to vary."""
    add_job(command, settings="as for whatif; or ")
    add_layout(command)
    command.add_argument(
        "--sweep",
        action="append",
        required=True,
        metavar="NAME=FIRST:LAST:COUNT",
        help="curve to draw, as for whatif; may be repeated",
    )


def _draw_whatif(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> Picture:
    """Draw a curve per --sweep; the layout is the one for the unchanged machine."""
    from perfmodel import viz
    from perfmodel.planning.what_if import Scenario, parse_sweep, sweep

    # Sweeps are parsed before the first is computed, so that a wrong one costs no time.
    problem = _step_problem(arguments)
    scenario = Scenario.parse(arguments.set)
    layout = layout_of(problem, arguments.layout)
    require_measured(arguments, problem, layout)
    sweeps = [parse_sweep(text) for text in arguments.sweep]
    curves = []
    with progress("sweeps", silent=arguments.json) as report:
        for done, settings in enumerate(sweeps):
            report(settings[0].name, done, len(sweeps))
            curves.append(sweep(problem, layout, scenario, settings))
    return Picture(
        viz.draw_curves(curves, **width_keyword), [_explained(problem, layout, arguments.devices)]
    )


def _add_bubble(command: argparse.ArgumentParser) -> None:
    """Add the flags of schedules and of several numbers of micro-batches."""
    add_json(command)
    add_pipeline(command)
    command.add_argument(
        "--micro-batches",
        default="8,16,32,64",
        metavar="LIST",
        help="micro-batches per step (default 8,16,32,64)",
    )


def _draw_bubble(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> Picture:
    """Draw the bubble of schedules over the number of micro-batches."""
    from perfmodel import viz

    counts = _numbers(arguments.micro_batches, "--micro-batches")
    return Picture(
        viz.draw_bubble_curves(facts_by_micro_batches(arguments, counts), **width_keyword), []
    )


def _add_schedules(command: argparse.ArgumentParser) -> None:
    """Add the flags of schedules and of one number of micro-batches."""
    add_json(command)
    add_pipeline(command)
    command.add_argument(
        "--micro-batches",
        type=int,
        default=16,
        metavar="M",
        help="micro-batches per step (default 16)",
    )


def _draw_schedules(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> Picture:
    """Draw the passes of schedules on equal stages."""
    from perfmodel import viz

    return Picture(viz.draw_schedules(schedules_with_facts(arguments)[0], **width_keyword), [])


def _add_roofline(command: argparse.ArgumentParser) -> None:
    """Flags of `plot roofline`."""
    _add_tables(command)
    command.add_argument(
        "--device",
        required=True,
        help="device of the kernels and of the roofline: catalog name or alias",
    )


def _draw_roofline(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> Picture:
    """Draw measured kernels under the roofline of their device."""
    import pandas as pd

    from perfmodel import catalog, viz
    from perfmodel.cost import measured_work
    from perfmodel.ingest.tables import read_table, table_kind

    device = catalog.device(arguments.device)
    tables = [(read_table(path), path) for path in arguments.files]
    wrong = [path for table, path in tables if table_kind(table, path) != "compute"]
    if wrong:
        raise PerfModelError(
            f"plot roofline: {wrong[0]} is not a table of kernels; give only tables of kernels"
        )
    kernels = pd.concat([measured_work(table, device) for table, _ in tables], ignore_index=True)
    return Picture(viz.draw_roofline(device, kernels, **width_keyword), [])


def _add_parity(command: argparse.ArgumentParser) -> None:
    _add_tables(command)
    add_calibration(command)


def _draw_parity(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> Picture:
    """Draw predicted against measured times of the rows of tables."""
    from perfmodel import viz
    from perfmodel.validation import parity_rows

    with progress("parity", silent=arguments.json) as report:
        rows = parity_rows(arguments.files, arguments.calibration, progress=report)
    return Picture(viz.draw_parity(rows, **width_keyword), [])


def _draw_compare(arguments: argparse.Namespace, width_keyword: dict[str, Any]) -> Picture:
    """Draw a predicted timeline above a measured one."""
    return Picture(draw_picture(arguments, width_keyword), [])


KINDS: Final = {
    "gantt": Kind(
        "timeline of every pipeline rank, with micro-batch numbers and the critical path",
        _add_step,
        _draw_step,
    ),
    "memory": Kind("memory in use on every pipeline rank over the step", _add_step, _draw_step),
    "links": Kind("use of the links of every pipeline rank over the step", _add_step, _draw_step),
    "breakdown": Kind(
        "breakdown of the step time, layout by layout", _add_breakdown, _draw_breakdown
    ),
    "pareto": Kind("Pareto front of step time, memory and cost", _add_pareto, _draw_pareto),
    "whatif": Kind("step time against parameters of the machine", _add_whatif, _draw_whatif),
    "bubble": Kind(
        "pipeline bubble against micro-batches, for each schedule", _add_bubble, _draw_bubble
    ),
    "schedules": Kind(
        "pipeline schedules, drawn as in the papers", _add_schedules, _draw_schedules
    ),
    "roofline": Kind("measured kernels in a device's roofline", _add_roofline, _draw_roofline),
    "parity": Kind("predicted against measured times, with intervals", _add_parity, _draw_parity),
    "compare": Kind("a predicted timeline above a measured one", add_picture, _draw_compare),
}


def _add_tables(command: argparse.ArgumentParser) -> None:
    """Add the flags that name measured tables."""
    add_json(command)
    command.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="TABLE",
        help="tables of measured kernels, collectives or runs",
    )


def _step_problem(arguments: argparse.Namespace) -> "StepProblem":
    from perfmodel.prediction import step_problem_of

    return step_problem_of(problem_of(arguments), arguments.calibration)


def _explained(problem: "StepProblem", layout: Layout, devices: int | None) -> "Prediction":
    from perfmodel.prediction import check_layout, explain

    check_layout(problem.model, problem.cluster, problem.job, layout, devices)
    return explain(problem, layout)


def _scored(
    problem: "StepProblem", devices: int, silent: bool
) -> Iterator[tuple[Layout, float, float]]:
    """Layouts that fit, with step time and peak memory."""
    from perfmodel.planning.layouts import default_space, enumerate_layouts
    from perfmodel.prediction import evaluate
    from perfmodel.prediction.memory import peak_memory

    asked = Problem(
        model=problem.model,
        cluster=problem.cluster,
        job=problem.job,
        framework=problem.framework,
        devices=devices,
    )

    # Memory is cheap and rules out most layouts before step times are evaluated.
    candidates = list(enumerate_layouts(default_space(asked), asked, Counter()))
    with progress("layouts", silent) as report:
        report("memory", 0, len(candidates))
        memory_bytes = peak_memory(problem, candidates)[0].tolist() if candidates else []
        layouts: list[Layout] = []
        peaks_bytes: list[float] = []
        for layout, peak_bytes in zip(candidates, memory_bytes, strict=True):
            if peak_bytes <= problem.usable_bytes:
                layouts.append(layout)
                peaks_bytes.append(peak_bytes)
        if not layouts:
            raise LayoutError(
                f"no layout of {problem.model.name} fits on {number_of(devices, 'device')}; give more devices"
            )
        report("step times", 0, len(layouts))
        steps_s = evaluate(problem, layouts).step_time_s.tolist()
    yield from zip(layouts, steps_s, peaks_bytes, strict=True)


def _numbers(text: str, flag: str) -> list[int]:
    """Parse a list of whole numbers above zero, the value of a flag."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise PerfModelError(
            f"plot: {flag} takes whole numbers above zero separated by commas, got {text!r}"
        )
    return numbers
