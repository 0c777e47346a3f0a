"""What `perfmodel plot` draws, from its arguments."""

import argparse
from collections import Counter
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Any

from perfmodel.cli._flags import layout_of, layouts_of, problem_of, refuse_strict, require_measured
from perfmodel.cli._schedule_facts import chunks_of, named
from perfmodel.display import progress
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.spec import Device, Layout, Problem

if TYPE_CHECKING:
    import pandas as pd

    from perfmodel.ingest import MeasuredTrace
    from perfmodel.planning.what_if import Curve
    from perfmodel.prediction import Prediction, StepProblem
    from perfmodel.schedule import ScheduleFacts


def step_problem(arguments: argparse.Namespace) -> "StepProblem":
    """The model, cluster and job of the arguments."""
    from perfmodel import prediction

    return prediction.step_problem_of(problem_of(arguments), arguments.calibration)


def _explained(problem: "StepProblem", layout: Layout, devices: int | None) -> "Prediction":
    from perfmodel.prediction import check_layout, explain

    check_layout(problem.model, problem.cluster, problem.job, layout, devices)
    return explain(problem, layout)


def layouts_of_degrees(arguments: argparse.Namespace) -> "list[Prediction]":
    """The layouts that are named; else the best of every (tp, pp, dp) that fits, the fastest of them."""
    from perfmodel.prediction import explain

    problem = step_problem(arguments)
    if arguments.layouts:
        chosen = layouts_of(arguments, arguments.layouts, problem.model)
        for layout in chosen:
            require_measured(arguments, problem, layout)
        return [_explained(problem, layout, arguments.devices) for layout in chosen]
    refuse_strict(arguments, "plot breakdown")
    if arguments.devices is None:
        raise PerfModelError(
            "plot breakdown: give --layouts 'LAYOUT;LAYOUT', or --devices N for the best of each degree"
        )
    best: dict[tuple[int, int, int], tuple[float, Layout]] = {}
    for layout, step_s, _ in _scored(problem, arguments.devices, arguments.json):
        key = (layout.tp, layout.pp, layout.dp)
        if key not in best or step_s < best[key][0]:
            best[key] = (step_s, layout)
    fastest = sorted(best.items(), key=lambda item: item[1][0])[: arguments.top]
    return [explain(problem, layout) for _, (_, layout) in sorted(fastest, key=lambda item: item[0])]


def all_layouts(arguments: argparse.Namespace) -> "tuple[pd.DataFrame, str]":
    """Every layout that fits on each number of devices, with its cost; and what the cost is in."""
    import pandas as pd

    if arguments.price is not None and not 0 <= arguments.price < inf:
        raise PerfModelError(f"plot pareto: --price must be a finite number of at least 0, got {arguments.price}")
    counts = _numbers(arguments.device_counts, "--device-counts") if arguments.device_counts else [arguments.devices]
    if counts == [None]:
        raise PerfModelError("plot pareto: give --devices N, or --device-counts N,N,...")
    refuse_strict(arguments, "plot pareto")
    problem = step_problem(arguments)
    rows = []
    for devices in counts:
        rows += [
            {"layout": str(layout), "devices": devices, "step_time_s": step_s, "peak_bytes": peak_bytes}
            for layout, step_s, peak_bytes in _scored(problem, devices, arguments.json)
        ]
    table = pd.DataFrame(rows, columns=["layout", "devices", "step_time_s", "peak_bytes"])
    device_hours = table["devices"] * table["step_time_s"] / 3600
    if arguments.price is None:
        return table.assign(cost=device_hours), "device-hours per step"
    return table.assign(cost=device_hours * arguments.price), "price of a step"


def _scored(problem: "StepProblem", devices: int, silent: bool) -> Iterator[tuple[Layout, float, float]]:
    """Layouts that fit, with step time and peak memory."""
    from perfmodel.planning.layouts import default_space, enumerate_layouts
    from perfmodel.prediction import evaluate, peak_memory

    asked = Problem(model=problem.model, cluster=problem.cluster, job=problem.job, devices=devices)
    found = list(enumerate_layouts(default_space(asked), asked, Counter()))
    with progress("layouts", silent) as report:
        report("memory", 0, len(found))
        peak_bytes = peak_memory(problem, found)[0] if found else []
        fitting = [(layout, float(p)) for layout, p in zip(found, peak_bytes, strict=True) if p <= problem.usable_bytes]
        if not fitting:
            raise LayoutError(f"no layout of {problem.model.name} fits on {devices} devices; give more of them")
        report("step times", 0, len(fitting))
        step_s = evaluate(problem, [layout for layout, _ in fitting]).step_time_s.tolist()
    yield from ((layout, s, p) for (layout, p), s in zip(fitting, step_s, strict=True))


def curves(arguments: argparse.Namespace) -> "tuple[list[Curve], Prediction]":
    """A curve per --sweep, and the layout on the machine as it is."""
    from perfmodel.planning.what_if import Scenario, parse_sweep, sweep

    problem, scenario = step_problem(arguments), Scenario.parse(arguments.set)
    layout = layout_of(arguments, arguments.layout, problem.model)
    require_measured(arguments, problem, layout)
    sweeps = [parse_sweep(text) for text in arguments.sweep]
    found = []
    with progress("sweeps", silent=arguments.json) as report:
        for done, settings in enumerate(sweeps):
            report(settings[0].name, done, len(sweeps))
            found.append(sweep(problem, layout, scenario, settings))
    return found, _explained(problem, layout, arguments.devices)


def bubbles(arguments: argparse.Namespace) -> "list[ScheduleFacts]":
    """Facts of every schedule at every number of micro-batches that it can run with."""
    from perfmodel.schedule import schedule_facts

    found, times = [], {name: getattr(arguments, name) for name in ("forward_s", "backward_s", "transfer_s")}
    for name in named(arguments):
        for micro_batches in _numbers(arguments.micro_batches, "--micro-batches"):
            try:
                facts = schedule_facts(
                    name, arguments.stages, micro_batches, chunks=chunks_of(arguments, name), **times
                )
            except LayoutError:  # such as micro-batches that a schedule cannot divide
                continue
            found.append(facts)
    return found


def device_and_kernels(arguments: argparse.Namespace) -> "tuple[Device, pd.DataFrame]":
    """The device, and work and time of its kernels in the tables."""
    import pandas as pd

    from perfmodel import catalog
    from perfmodel.cost import measured_work
    from perfmodel.ingest.tables import read_table, table_kind

    device = catalog.device(arguments.device)
    tables = [(read_table(path), path) for path in arguments.files]
    if wrong := [path for table, path in tables if table_kind(table, path) != "compute"]:
        raise PerfModelError(f"plot roofline: {wrong[0]} is not a table of kernels; give only such")
    return device, pd.concat([measured_work(table, device) for table, _ in tables], ignore_index=True)


def parity(arguments: argparse.Namespace) -> "pd.DataFrame":
    """Rows of the tables with their predictions."""
    from perfmodel.validation import parity_rows

    with progress("parity", silent=arguments.json) as report:
        return parity_rows(arguments.files, arguments.calibration, progress=report)


def traces(arguments: argparse.Namespace) -> "tuple[MeasuredTrace, MeasuredTrace, str]":
    """Both traces and the title."""
    from perfmodel import ingest
    from perfmodel.validation import compare_traces

    predicted = ingest.read_trace("auto", [arguments.predicted])
    measured = ingest.read_trace(arguments.format, arguments.measured)
    if measured.devices % predicted.devices:
        raise PerfModelError(
            f"plot compare: {measured.devices} devices measured, {predicted.devices} predicted; record all ranks"
        )
    errors = compare_traces(predicted, measured, measured.devices // predicted.devices).errors
    return predicted, measured, f"batch time {errors.batch_time_error:.2%} off"


def _numbers(text: Any, flag: str) -> list[int]:
    try:
        found = [int(part) for part in str(text).split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise PerfModelError(f"plot: {flag} takes whole numbers above zero separated by commas, got {text!r}")
    return found
