"""`perfmodel plot KIND`: one picture per kind, all with the same --out and --width."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfmodel.cli import _plot_data
from perfmodel.cli._flags import add_calibration, add_job, add_json, add_layout
from perfmodel.cli._predict import note_layout, with_timeline
from perfmodel.cli._schedule_facts import add_pipeline, facts_and_drawings
from perfmodel.cli._show import reporting, written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from perfmodel.prediction import Prediction

KINDS: Final = {
    "gantt": "what every pipeline rank does when, with micro-batch numbers and the critical path",
    "memory": "memory in use on every pipeline rank over the step",
    "links": "how busy the links of every pipeline rank are over the step",
    "breakdown": "where the step goes, layout by layout",
    "pareto": "layouts between step time, memory and cost",
    "whatif": "step time against parameters of the machine",
    "bubble": "bubble against micro-batches, schedule by schedule",
    "schedules": "pipeline schedules, drawn as in the papers",
    "roofline": "measured kernels under a device's roofs",
    "parity": "predicted against measured times, with intervals",
    "compare": "a predicted timeline above a measured one",
}
_OF_A_STEP: Final = ("gantt", "memory", "links")


def add_command(commands: Any) -> None:
    """Register the command and its kinds."""
    command: argparse.ArgumentParser = commands.add_parser("plot", help="pictures for papers, as PNG, PDF or SVG")
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, text in KINDS.items():
        one = kinds.add_parser(kind, help=text)
        if kind in (*_OF_A_STEP, "breakdown", "pareto", "whatif"):
            add_job(one, settings="as for whatif; or " if kind == "whatif" else "")
        else:
            add_json(one)
        if kind in ("roofline", "parity"):
            add_calibration(one) if kind == "parity" else None
            one.add_argument("files", nargs="+", type=Path, metavar="TABLE", help="measured kernels, collectives, runs")
        _own_flags(kind, one)
        one.add_argument("--out", type=Path, required=True, metavar="FILE", help="picture: .png, .pdf or .svg")
        one.add_argument(
            "--width", choices=("column", "page"), help="as wide as a paper's column or page (default: by kind)"
        )
        one.set_defaults(run=reporting(run, lambda report: written(report["written"])))


def _own_flags(kind: str, one: argparse.ArgumentParser) -> None:
    if kind in (*_OF_A_STEP, "whatif"):
        add_layout(one)
    if kind == "whatif":
        one.add_argument("--sweep", action="append", required=True, metavar="NAME=FIRST:LAST:COUNT",
                         help="as for whatif; may be repeated")  # fmt: skip
    if kind == "breakdown":
        one.add_argument("--layouts", metavar="LIST", help="separated by ';' (default: the best of every tp, pp, dp)")
        one.add_argument("--top", type=int, default=12, metavar="K", help="bars at most without --layouts (default 12)")
    if kind == "pareto":
        one.add_argument("--device-counts", metavar="LIST", help="such as 64,128,256, instead of --devices")
        one.add_argument("--price", type=float, metavar="P", help="of a device-hour, to show cost in money")
    if kind in ("bubble", "schedules"):
        add_pipeline(one)
    if kind == "schedules":
        one.add_argument("--micro-batches", type=int, default=16, metavar="M", help="of a step (default 16)")
    if kind == "bubble":
        one.add_argument("--micro-batches", default="8,16,32,64", metavar="LIST", help="default 8,16,32,64")
    if kind == "roofline":
        one.add_argument("--device", required=True, help="catalog name or alias: whose kernels and roofs")
    if kind == "compare":
        one.add_argument("--predicted", type=Path, required=True, metavar="TRACE", help="from 'timeline --out'")
        one.add_argument("--measured", type=Path, nargs="+", required=True, metavar="TRACE", help="as for compare")
        one.add_argument("--format", default="auto", metavar="F", help="of the measured trace (default: by content)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw and write one picture.

    Raises:
        PerfModelError: what the picture needs is missing, or impossible.
    """
    from perfmodel import viz

    figure, layouts = _draw(arguments)
    viz.save_figure(figure, arguments.out)
    report = {"kind": arguments.kind, "written": [str(arguments.out)]}
    if not layouts:
        return report
    for prediction in layouts:
        note_layout(prediction)
    reasons = [f"layout {p.layout}: {reason}" for p in layouts for reason in p.reasons]
    return report | {"fits": all(p.fits for p in layouts), "reasons": reasons}


def _draw(arguments: argparse.Namespace) -> "tuple[Figure, list[Prediction]]":
    """The picture, and the layouts in it that were chosen by the user."""
    from perfmodel import viz

    wide: dict[str, Any] = {} if arguments.width is None else {"width": arguments.width}
    if arguments.kind in _OF_A_STEP:
        draw = {"gantt": viz.gantt, "memory": viz.draw_memory, "links": viz.draw_link_utilisation}[arguments.kind]
        step = with_timeline(arguments)
        return draw(step, **wide), [step]
    if arguments.kind == "breakdown":
        layouts = _plot_data.layouts_of_degrees(arguments)
        return viz.draw_breakdown(layouts, **wide), layouts
    if arguments.kind == "whatif":
        curves, step = _plot_data.curves(arguments)
        return viz.draw_curves(curves, **wide), [step]
    return _draw_other(arguments, wide), []


def _draw_other(arguments: argparse.Namespace, wide: dict[str, Any]) -> "Figure":
    from perfmodel import viz

    kind: str = arguments.kind
    if kind == "pareto":
        table, cost_label = _plot_data.all_layouts(arguments)
        # on one number of devices cost is but another unit of time
        cost = "cost" if len(set(table["devices"])) > 1 else ""
        return viz.draw_pareto(table, cost, cost_label, **wide)
    if kind == "bubble":
        return viz.draw_bubble_curves(_plot_data.bubbles(arguments), **wide)
    if kind == "schedules":
        return viz.draw_schedules(facts_and_drawings(arguments)[0], **wide)
    if kind == "roofline":
        return viz.draw_roofline(*_plot_data.device_and_kernels(arguments), **wide)
    if kind == "parity":
        return viz.draw_parity(_plot_data.parity(arguments), **wide)
    return viz.draw_comparison(*_plot_data.traces(arguments), **wide)
