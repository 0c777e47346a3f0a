"""What each command does: read arguments, call the library, show the result."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from perfmodel.cli import (
    _calibrate,
    _catalog,
    _compare,
    _design,
    _emulate,
    _import_model,
    _import_table,
    _plot,
    _run,
    _schedules,
    _search,
    _show,
    _whatif,
)
from perfmodel.display import progress
from perfmodel.errors import PerfModelError
from perfmodel.spec import Job, Layout

IMPOSSIBLE = 2
"""Exit status of a search that no layout can satisfy."""
INTERRUPTED = 130
"""Exit status of a search that was ended by Ctrl-C, after it has shown the best so far."""


def predict(arguments: argparse.Namespace) -> int:
    prediction = _predict(arguments, timeline=False)
    _emit(arguments, prediction.to_dict(), lambda: _show.prediction(prediction))
    return 0


def timeline(arguments: argparse.Namespace) -> int:
    if not (arguments.out or arguments.png or arguments.html):
        raise PerfModelError(
            "timeline: nothing to write; give --out FILE (trace), --png FILE (Gantt chart) or --html FILE (interactive)"
        )
    prediction = _predict(arguments, timeline=True)
    written = _pictures(prediction, arguments.out, arguments.png, arguments.html)
    _emit(arguments, prediction.to_dict() | {"written": written}, lambda: _show.written(written))
    return 0


def search(arguments: argparse.Namespace) -> int:
    arguments.calibration = _calibration(arguments)
    if arguments.pareto:
        front = _search.run_pareto(arguments, lambda seq_len: _job(arguments, seq_len))
        if not front.layouts:
            raise PerfModelError("search: no layout fits and satisfies the constraints; without --pareto it says why")
        files = _search.write(arguments, front)
        _emit(arguments, front.to_dict(), lambda: (_search.show_pareto(front), _show.written(files)))
        return 0
    result = _search.run(arguments, lambda seq_len: _job(arguments, seq_len))
    written = _search.write(arguments, result)
    if result.layouts and (arguments.trace or arguments.png):
        best = result.layouts[0]
        arguments.layout, arguments.devices, arguments.global_batch = str(best.layout), None, best.global_batch
        written += _pictures(_predict(arguments, timeline=True), arguments.trace, arguments.png)

    def show() -> None:
        _search.show(result)
        _show.written(written)

    if result.impossible and not arguments.json:
        raise PerfModelError(str(result.impossible))
    _emit(arguments, result.to_dict(), show)
    if result.impossible:
        print(f"perfmodel: {result.impossible}", file=sys.stderr)
        return IMPOSSIBLE
    return 0 if result.complete else INTERRUPTED


def fit(arguments: argparse.Namespace) -> int:
    from perfmodel.cli import _fit_runs
    from perfmodel.learn import fit_calibration

    _fit_runs.check(arguments)
    summary: dict[str, Any] = {}
    with progress("fit", silent=arguments.json) as report:
        if arguments.tables:
            summary = fit_calibration(
                arguments.tables, arguments.out, family=arguments.family, seed=arguments.seed, progress=report
            )
        runs = _fit_runs.run(arguments, report) if arguments.runs else {}

    def show() -> None:
        if summary:
            _show.fit(summary, arguments.out)
        if runs:
            _fit_runs.show(runs, arguments.out)

    _emit(arguments, summary | runs, show)
    return 0


def validate_kernels(arguments: argparse.Namespace) -> int:
    from perfmodel.validation import validate_kernels

    report = validate_kernels(arguments.files, _calibration(arguments), arguments.out)
    _emit(arguments, report, lambda: _show.kernels(report))
    return 0


def validate_cases(arguments: argparse.Namespace) -> int:
    from perfmodel.validation import explain_cases, validate_cases

    if arguments.explain is not None:
        found = explain_cases(arguments.files, arguments.explain or None, _calibration(arguments), arguments.tables)
        _emit(arguments, {"cases": [one.to_dict() for one in found]}, lambda: _show.residuals(found))
        return 0
    with progress("cases", silent=arguments.json) as report:
        result = validate_cases(arguments.files, _calibration(arguments), arguments.out, progress=report)
    _emit(arguments, result, lambda: _show.cases(result))
    return 0


def whatif(arguments: argparse.Namespace) -> int:
    arguments.calibration = _calibration(arguments)
    report = _whatif.run(arguments, lambda seq_len: _job(arguments, seq_len))
    _emit(arguments, report, lambda: _whatif.show(report))
    return 0


def design(arguments: argparse.Namespace) -> int:
    arguments.calibration = _calibration(arguments)
    report = _design.run(arguments, lambda seq_len: _job(arguments, seq_len))
    _emit(arguments, report, lambda: _design.show(report))
    return 0


def plot(arguments: argparse.Namespace) -> int:
    calibration = _calibration(arguments) if hasattr(arguments, "calibration") else None
    report = _plot.run(arguments, _job, calibration)
    _emit(arguments, report, lambda: _show.written(report["written"]))
    return 0


def schedules(arguments: argparse.Namespace) -> int:
    report = _schedules.run(arguments)
    _emit(arguments, report, lambda: _schedules.show(report))
    return 0


def run(arguments: argparse.Namespace) -> int:
    report, status = _run.run(arguments)
    _emit(arguments, report, lambda: _run.show(report))
    return status


def import_model(arguments: argparse.Namespace) -> int:
    report = _import_model.run(arguments)
    _emit(arguments, report, lambda: _import_model.show(report))
    return 0


def import_table(arguments: argparse.Namespace) -> int:
    report = _import_table.run(arguments)
    _emit(arguments, report, lambda: _import_table.show(report))
    return 0


def compare(arguments: argparse.Namespace) -> int:
    report = _compare.run(arguments)
    _emit(arguments, report, lambda: _compare.show(report))
    return 0


def emulate(arguments: argparse.Namespace) -> int:
    report = _emulate.run(arguments)
    _emit(arguments, report, lambda: _emulate.show(report))
    return 0


def calibrate(arguments: argparse.Namespace) -> int:
    report = _calibrate.run(arguments)
    if "process" in report:  # one of several: process 0 reports
        return 0
    _emit(arguments, report, lambda: _calibrate.show(report))
    return 0


def catalog(arguments: argparse.Namespace) -> int:
    records = _catalog.entries(arguments.kind, arguments.word)
    if not records:
        raise PerfModelError(f"catalog: none of the {arguments.kind} has {arguments.word!r} in its name")
    heads, rows = _catalog.rows(arguments.kind, records)
    _emit(arguments, {arguments.kind: records}, lambda: _show.new_console().print(_show.table("", heads, rows)))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    from perfmodel.cli._doctor import examine

    report = examine(arguments.calibration, clear_cache=arguments.clear_cache)
    _emit(arguments, report, lambda: _show.doctor(report))
    return 0


def _calibration(arguments: argparse.Namespace) -> Path | None:
    chosen = arguments.calibration
    return None if chosen is None or str(chosen) == "default" else chosen


def _job(arguments: argparse.Namespace, seq_len: int) -> Job:
    return Job(
        global_batch=arguments.global_batch,
        seq_len=seq_len if arguments.seq_len is None else arguments.seq_len,
        dtype=arguments.dtype,
        mode=arguments.mode,
        flash_attention=arguments.attention == "flash",
    )


def _predict(arguments: argparse.Namespace, timeline: bool) -> Any:
    from perfmodel import catalog
    from perfmodel.prediction import predict

    model = catalog.model(arguments.model)
    return predict(
        model,
        arguments.cluster,
        Layout.parse(arguments.layout),
        global_batch=arguments.global_batch,
        devices=arguments.devices,
        job=_job(arguments, model.seq_len),
        calibration=_calibration(arguments),
        timeline=timeline,
        strict=arguments.strict,
    )


def _pictures(prediction: Any, trace: Path | None, png: Path | None, html: Path | None = None) -> list[str]:
    from perfmodel import viz

    written = []
    if trace:
        viz.write_trace(prediction, trace)
        written.append(str(trace))
    if png:
        viz.write_gantt(prediction, png)
        written.append(str(png))
    if html:
        viz.write_interactive(prediction, html)
        written.append(str(html))
    return written


def _emit(arguments: argparse.Namespace, value: dict[str, Any], show: Any) -> None:
    if arguments.json:
        json.dump(value, sys.stdout)
        sys.stdout.write("\n")
    else:
        show()
