"""What each command does: read arguments, call the library, show the result."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from perfmodel.cli import _calibrate, _compare, _import_model, _import_table, _run, _schedules, _show, _whatif
from perfmodel.cli._progress import progress
from perfmodel.errors import PerfModelError
from perfmodel.spec import Job, Layout


def predict(arguments: argparse.Namespace) -> int:
    prediction = _predict(arguments, timeline=False)
    _emit(arguments, prediction.to_dict(), lambda: _show.prediction(prediction))
    return 0


def timeline(arguments: argparse.Namespace) -> int:
    if not (arguments.out or arguments.png):
        raise PerfModelError("timeline: nothing to write; give --out FILE (trace) or --png FILE (Gantt chart)")
    prediction = _predict(arguments, timeline=True)
    written = _pictures(prediction, arguments.out, arguments.png)
    _emit(arguments, prediction.to_dict() | {"written": written}, lambda: _show.written(written))
    return 0


def search(arguments: argparse.Namespace) -> int:
    from perfmodel import catalog, layout_search
    from perfmodel.io import write_json

    if arguments.devices is None:
        raise PerfModelError("search: --devices N is needed (how many devices to lay the model out on)")
    model, cluster = catalog.model(arguments.model), catalog.cluster(arguments.cluster)
    job = _job(arguments, model.seq_len)
    space = layout_search.default_space(model, cluster, job, arguments.devices)
    with progress("search") as report:
        result = layout_search.search(
            model,
            cluster,
            devices=arguments.devices,
            global_batch=arguments.global_batch,
            method=arguments.method,
            top=arguments.top,
            job=job,
            space=layout_search.restrict(layout_search.with_schedules(space, arguments.schedules), arguments.fix),
            calibration=_calibration(arguments),
            strict=arguments.strict,
            progress=report,
        )
    if arguments.out:
        write_json(arguments.out, result.to_dict())
    written = [str(arguments.out)] if arguments.out else []
    if result.layouts and (arguments.trace or arguments.png):
        arguments.layout = str(result.layouts[0].layout)
        written += _pictures(_predict(arguments, timeline=True), arguments.trace, arguments.png)

    def show() -> None:
        _show.search(result)
        _show.written(written)

    _emit(arguments, result.to_dict(), show)
    return 0


def fit(arguments: argparse.Namespace) -> int:
    from perfmodel.cli import _fit_runs
    from perfmodel.learn import fit_calibration

    _fit_runs.check(arguments)
    summary: dict[str, Any] = {}
    with progress("fit") as report:
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
    from perfmodel.validation import validate_cases

    with progress("cases") as report:
        result = validate_cases(arguments.files, _calibration(arguments), arguments.out, progress=report)
    _emit(arguments, result, lambda: _show.cases(result))
    return 0


def whatif(arguments: argparse.Namespace) -> int:
    arguments.calibration = _calibration(arguments)
    report = _whatif.run(arguments, lambda seq_len: _job(arguments, seq_len))
    _emit(arguments, report, lambda: _whatif.show(report))
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


def calibrate(arguments: argparse.Namespace) -> int:
    report = _calibrate.run(arguments)
    if "process" in report:  # one of several: process 0 reports
        return 0
    _emit(arguments, report, lambda: _calibrate.show(report))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    from perfmodel.cli._doctor import examine

    report = examine()
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


def _pictures(prediction: Any, trace: Path | None, png: Path | None) -> list[str]:
    from perfmodel import viz

    written = []
    if trace:
        viz.write_trace(prediction, trace)
        written.append(str(trace))
    if png:
        viz.write_gantt(prediction, png)
        written.append(str(png))
    return written


def _emit(arguments: argparse.Namespace, value: dict[str, Any], show: Any) -> None:
    if arguments.json:
        json.dump(value, sys.stdout)
        sys.stdout.write("\n")
    else:
        show()
