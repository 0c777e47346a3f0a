"""`perfmodel fit`: trains cost models from tables, steps or a profile; fits unknown sites."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from math import expm1, inf, log
from pathlib import Path
from typing import Any

from perfmodel.cli._compare import add_profile
from perfmodel.cli._files import add_job_file, flags_of, lacking
from perfmodel.cli._flags import add_json, add_problem, problem_of
from perfmodel.cli._show import emit, error_figure, error_head, written
from perfmodel.display import Report, new_console, progress, say, table
from perfmodel.errors import PerfModelError
from perfmodel.units import duration, figure, plural

_SHOWN = 8
"""Most runs that are named as exceptions."""
_SETTINGS_SHOWN = 3
"""Most open settings of a run that are shown."""
_MOVED_SHOWN = 0.005
"""Smallest change of a parameter that is shown although the runs do not narrow its interval."""
_OVERALL_SHOWN = 0.02
"""Smallest logarithm of the overall factor that is shown."""


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "fit",
        help="fit cost models to measured kernels and collectives, to whole runs, or to a profile",
    )
    _add_measurements(command)
    # Runs and profiles correct a calibration; tables make one.
    command.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="calibration that --runs, --log or --profile corrects (default: the one fitted to "
        "TABLE, else the shipped one)",
    )
    _add_site_fit(command)
    command.add_argument(
        "--strict", action="store_true", help="refuse runs that contradict the tables"
    )
    command.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="calibration directory to write",
    )
    command.add_argument("--family", metavar="F", help="fit only this op family")
    command.add_argument("--seed", type=int, default=0, help="seed of random choices (default 0)")
    add_job_file(command, positional=False, layout=True)
    add_problem(command)
    add_json(command)
    command.set_defaults(run=_execute)


def _add_measurements(command: argparse.ArgumentParser) -> None:
    """Add the flags of measurements to fit to: tables, whole runs, logs, a profile."""
    command.add_argument(
        "tables",
        nargs="*",
        type=Path,
        metavar="TABLE",
        help="table of measurements (csv, csv.gz or parquet)",
    )
    command.add_argument(
        "--runs",
        type=Path,
        metavar="RUNS.csv",
        help="measured steps of whole runs (columns of validate cases)",
    )
    command.add_argument(
        "--log",
        dest="logs",
        action="append",
        default=[],
        metavar="SCRIPT=LOG",
        help="launch script and log of a run on --cluster, used like a row of --runs; repeatable",
    )
    add_profile(command)
    command.add_argument(
        "--layout",
        help="with --profile: the layout that ran, together with the job's flags or --from",
    )
    command.add_argument(
        "--step-time",
        type=float,
        metavar="SECONDS",
        help="with --profile: seconds of a step without the profiler",
    )


def _add_site_fit(command: argparse.ArgumentParser) -> None:
    """Add the flags of a fit to published runs, for sites that nobody has measured."""
    command.add_argument(
        "--sites",
        action="store_true",
        help="fit clocks under load and the prior of unknown sites to published runs; each TABLE "
        "holds such runs",
    )
    command.add_argument(
        "--unstated",
        action="append",
        default=[],
        metavar="SOURCE",
        help="with --sites: source (name or prefix) that does not state its settings; repeatable",
    )


def _execute(arguments: argparse.Namespace) -> int:
    """Fit to tables, runs, logs or a profile, and show what was fitted."""
    from perfmodel.cost.learn import fit_calibration

    _check(arguments)
    summary: dict[str, Any] = {}

    # Sites and profiles are fits of their own. Tables and runs may come together: tables first,
    # and the runs correct them.
    if arguments.sites:
        return _sites(arguments)
    if arguments.profile:
        return _to_profile(arguments)
    with progress("fit", silent=arguments.json) as report:
        if arguments.tables:
            summary = fit_calibration(
                arguments.tables,
                arguments.out,
                family=arguments.family,
                seed=arguments.seed,
                progress=report,
            )
        runs = _to_runs(arguments, report) if arguments.runs or arguments.logs else {}

    def show() -> None:
        if summary:
            _show_fit(summary, arguments.out)
        if runs:
            _show_runs(runs, arguments.out)

    emit(arguments, summary | runs, show)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse contradictory or missing arguments.

    Raises:
        PerfModelError: naming them.
    """
    # Every refused combination of flags has its own message, with a remedy.
    has_runs = bool(arguments.runs or arguments.logs)
    if not (arguments.tables or has_runs or arguments.sites or arguments.profile):
        raise PerfModelError(
            "fit: nothing to fit to; give TABLE... (kernels, collectives), --runs RUNS.csv, --log SCRIPT=LOG or "
            "--profile FILE..."
        )
    if arguments.logs:
        _check_logs(arguments)
    if arguments.profile:
        _check_profile(arguments)
    else:
        _check_no_job(arguments)
    if arguments.step_time is not None and not 0 < arguments.step_time < inf:
        raise PerfModelError(f"fit: --step-time must be seconds above 0, got {arguments.step_time}")

    # Constants of unknown sites are fitted to tables of published runs alone.
    beside_tables = arguments.runs or arguments.base or arguments.family
    if arguments.sites and (beside_tables or not arguments.tables):
        raise PerfModelError(
            "fit: --sites takes published runs as TABLE...; give no --runs, --base or --family with it"
        )
    if arguments.unstated and not arguments.sites:
        raise PerfModelError("fit: --unstated SOURCE belongs to --sites; give both or neither")

    # Tables make a calibration of their own; runs, logs and profiles correct one that is there.
    corrects = has_runs or arguments.profile
    if arguments.base and (arguments.tables or not corrects):
        raise PerfModelError(
            "fit: --base DIR is the calibration that --runs, --log or --profile corrects; "
            "give exactly one of these, and no TABLE"
        )


def _check_logs(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go with logs, which state what ran but not on which machine."""
    for text in arguments.logs:
        _script_and_log(text)
    if arguments.cluster is None:
        raise PerfModelError("fit: --log needs --cluster, the cluster that the job ran on")
    if arguments.profile or arguments.sites:
        raise PerfModelError(
            "fit: --log cannot be combined with --profile or --sites; fit in two steps, the second with --base"
        )


def _check_profile(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go with a profile, which corrects one calibration by one step."""
    if arguments.tables or arguments.runs or arguments.sites or arguments.family:
        raise PerfModelError(
            "fit: --profile cannot be combined with TABLEs, --runs, --sites or --family; fit in two steps, the second "
            "with --base"
        )
    flags = lacking(arguments, "model", "cluster", "global_batch", "layout")
    if flags:
        raise PerfModelError(
            f"fit: --profile needs {flags} (or --from FILE, or JOB.toml) of the run that was profiled"
        )


def _check_no_job(arguments: argparse.Namespace) -> None:
    """Refuse flags of a job without a profile, because runs and logs state what ran."""
    # A launch file fills in the flags of a job, which nobody has typed then.
    for name in ("launch_file", "model", "layout", "step_time"):
        if getattr(arguments, name) is not None:
            flag = "--from" if name == "launch_file" else flags_of([name])
            raise PerfModelError(f"fit: {flag} belongs to --profile FILE...; give both or neither")


def _show_fit(summary: dict[str, Any], out: Path) -> None:
    """Print fitted families and their errors; for collectives, the series that they replace and the
    rows set aside."""
    # Families may have different figures: columns are those that any of them has.
    heads: list[str] = []
    for figures in summary.values():
        heads += [
            key
            for key, value in figures.items()
            if not isinstance(value, dict) and key not in heads
        ]
    rows = []
    for family, figures in summary.items():
        errors = [error_figure(key, figures.get(key)) for key in heads]
        rows.append((family, *errors))
    new_console().print(
        table(
            "Fitted models, with errors on held-out rows", ["family", *map(error_head, heads)], rows
        )
    )
    collectives = summary.get("collectives", {})
    for fabric, names in collectives.get("replaced", {}).items():
        say(f"replaces {len(names)} shipped series: {fabric}")
    for case, longer in collectives.get("groups_at_once", {}).items():
        say(f"{case}: {longer:.2f} times as long as alone")
    for case, exponent in collectives.get("sharing", {}).items():
        say(
            f"{case} between nodes: n groups at once are predicted to take n^{exponent:.2f} "
            "times as long as a single one, except for latency"
        )
    for family, figures in summary.items():
        for state, longer in figures.get("longer", {}).items():
            say(f"{family}, {state}: {longer:.2f} times as long as usual")
    for family, figures in summary.items():
        for reason, count in figures.get("set_aside", {}).items():
            say(f"set aside: {count:,} {plural('row', count)} of {family} ({reason})")
    _print_written_folder(out)


def _sites(arguments: argparse.Namespace) -> int:
    """Fit, write and show the constants of an unknown site."""
    from perfmodel.prediction.sites import CLASSES
    from perfmodel.validation import fit_sites

    with progress("fit", silent=arguments.json) as report:
        fitted = fit_sites(
            arguments.tables,
            arguments.out,
            unstated=arguments.unstated,
            progress=report,
        )

    def show() -> None:
        console = new_console()

        # Fitted constants are logs of factors, shown as percentages.
        heads = ("architecture", "source", "products slower by")
        rows = []
        for architecture, logs in fitted["sustained"].items():
            rows += [(architecture, source, f"{expm1(log):+.1%}") for source, log in logs.items()]
        console.print(table("Products in training relative to alone", heads, rows))
        heads = ("framework", "architecture", *CLASSES)
        rows = []
        for key, group in fitted["population"][""]["of"].items():
            framework, architecture = key.split("|")
            rows.append((framework, architecture, *(f"{expm1(log):+.1%}" for log in group["mean"])))
        console.print(
            table("Slowdown of events at the median site, relative to the physics", heads, rows)
        )
        for file, why in fitted["skipped_files"].items():
            console.print(f"{file}: {why}")
        written([arguments.out])

    emit(arguments, fitted, show)
    return 0


def _to_runs(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Fit to runs and save; return parameters by device, and the rows that were not used."""
    from perfmodel.calibration import calibrate_end_to_end
    from perfmodel.validation import read_runs, run_assumptions

    runs, skipped = read_runs(arguments.runs) if arguments.runs else ([], {})
    if arguments.logs:
        from perfmodel.planning.health import runs_of_logs

        pairs = [_script_and_log(text) for text in arguments.logs]
        runs = [*runs, *runs_of_logs(pairs, arguments.cluster, devices=arguments.devices)]

    # Runs correct the tables that were just fitted, or a calibration that is there already.
    base = arguments.out if arguments.tables else arguments.base
    fits = calibrate_end_to_end(
        runs, out=arguments.out, base=base, strict=arguments.strict, progress=report
    )
    assumptions = run_assumptions(arguments.runs, base, report) if arguments.runs else []
    return {
        "end_to_end": {device: fitted.to_dict() for device, fitted in fits.items()},
        "skipped_runs": skipped,
        "assumptions": [asdict(run) for run in assumptions],
    }


def _script_and_log(text: str) -> tuple[str, Path]:
    """The two files of --log; a script's variables may stand before it, as in `TP=4 train.sh`.

    Raises:
        PerfModelError: no two files.
    """
    script, _, log_path = text.rpartition("=")
    if not script.strip() or not log_path.strip():
        raise PerfModelError(
            f"fit: --log takes SCRIPT=LOG, such as train.sh=train.log; got {text!r}"
        )
    return script, Path(log_path)


def _to_profile(arguments: argparse.Namespace) -> int:
    """Fit the parameters to a profiled step, save them and show the result."""
    from perfmodel.calibration import amount, fit_profile

    problem = problem_of(arguments)
    profile_fit = fit_profile(
        problem,
        arguments.layout,
        arguments.profile,
        format=arguments.format,
        base=arguments.base,
        out=arguments.out,
        step_s=arguments.step_time,
    )

    # In the form of a fit to runs, so that both are shown by the same function.
    device = problem.cluster.device.name
    fitted: dict[str, Any] = {
        "end_to_end": {device: profile_fit.fit.to_dict()},
        "skipped_runs": {},
        "assumptions": [],
    }

    def show() -> None:
        heads = ("parameter", "profile", "measured time", "calls")
        rows = [
            (c.name, amount(c), duration(c.seconds), figure(c.calls))
            for c in profile_fit.report.corrections
        ]
        new_console().print(table("Results of the profile, per device and step", heads, rows))
        _show_runs(fitted, arguments.out, profiled=True)

    emit(arguments, fitted | {"profile": profile_fit.report.to_dict()}, show)
    return 0


def _show_runs(report: dict[str, Any], out: Path, *, profiled: bool = False) -> None:
    """Parameters before and after, then contradictions; `profiled`: a profile set them before."""
    console = new_console()
    for device, fitted in report["end_to_end"].items():
        # Only parameters that the runs say something of get a row.
        changed = [p for p in fitted["parameters"] if p["informed"] or p["contradiction"]]
        heads = ("parameter", "prior, 90 %", "posterior, 90 %", "runs")
        console.print(
            f"{device}, {fitted['runs']} {plural('run', fitted['runs'])}: corrections of the costs in the base "
            "calibration"
        )
        if changed:
            console.print(table("", heads, [_parameter_row(p) for p in changed]))
        uninformed = [p for p in fitted["parameters"] if p not in changed]
        # Sites are slow or fast as a whole, so that a run moves also what it does not tell apart.
        moved = [p for p in uninformed if abs(p["value"]) > _MOVED_SHOWN]
        if moved:
            values = ", ".join(f"{p['name']} {_value_words(p, p['value'])}" for p in moved)
            console.print(
                f"moved together, because your runs do not constrain them one by one: {values}"
            )
        unmoved = [p["name"] for p in uninformed if p not in moved]
        if unmoved:
            why = "unchanged (your runs do not constrain them)"
            if profiled:
                why = "not changed any further by the step time"
            console.print(f"{why}: {', '.join(unmoved)}")
        if abs(log(fitted["overall_factor"])) > _OVERALL_SHOWN:
            console.print(
                "your runs agree with each other but not with the published record: besides the parameters, every step "
                f"time is multiplied by {fitted['overall_factor']:.3g}"
            )
        for text in fitted["contradictions"]:
            console.print(f"warning: {text}")
        for name, excess in [*fitted["unexplained"].items()][:_SHOWN]:
            console.print(
                f"{name} took {figure(1 + excess, 2)} times as long as the fit predicts, which no parameter explains: "
                "check its model, batch and devices, and its log for a fault"
            )
        console.print(
            f"mean error of your runs: {fitted['error_before']:.1%} before the fit, {fitted['error_after']:.1%} after; "
            f"run-to-run noise {fitted['noise']:.1%}"
        )
    _show_assumptions(report["assumptions"])
    for reason, count in report["skipped_runs"].items():
        console.print(f"not used: {count} {plural('row', count)} ({reason})")
    _print_written_folder(out)


def _show_assumptions(assumptions: Sequence[dict[str, Any]]) -> None:
    """Print what a table's rows leave open, first the runs whose step depends most on it."""
    if not assumptions:
        return
    runs = "1 run leaves" if len(assumptions) == 1 else f"{len(assumptions)} runs leave"
    uses = "The fit uses the framework's defaults; in brackets: how far other values would move the step time"
    say(f"{runs} settings open. {uses}")
    for run in assumptions[:_SHOWN]:
        shown = ", ".join(run["assumed"][:_SETTINGS_SHOWN])
        further = len(run["assumed"]) - _SETTINGS_SHOWN
        more = f" and {further} more" if further > 0 else ""
        say(f"  {run['run']}: {shown}{more}")
    if len(assumptions) > _SHOWN:
        say(f"  and {len(assumptions) - _SHOWN} more runs (--json lists them all)")


def _print_written_folder(out: Path) -> None:
    """Print where a calibration is, and how to use it."""
    say(
        f"wrote {out}\nnext: add --calibration {shlex.quote(str(out))} to predict, search or any other command"
    )


def _value_words(p: dict[str, Any], value: float) -> str:
    """A value of a fitted parameter: losses are shares or seconds, all others log factors."""
    from perfmodel.prediction.sites import LOSSES, loss_text

    return loss_text(p["name"], value) if p["name"] in LOSSES else f"{expm1(value):+.0%}"


def _parameter_row(p: dict[str, Any]) -> tuple[str, ...]:
    """One fitted parameter as the cells of a printed table."""
    from perfmodel.prediction import GAUSS_90
    from perfmodel.prediction.sites import LOSSES

    # Losses are shares or seconds from 0 on, all others log factors around 0.
    is_loss = p["name"] in LOSSES
    edge = GAUSS_90 * p["prior_sd"]

    def word(value: float) -> str:
        return _value_words(p, value)

    value = word(p["value"]) if is_loss else f"{expm1(p['value']):+.1%}"
    return (
        p["name"],
        f"{word(0.0 if is_loss else -edge)} .. {word(edge)}",
        f"{value} ({word(p['lo'])} .. {word(p['hi'])})",
        str(p["runs"]),
    )
