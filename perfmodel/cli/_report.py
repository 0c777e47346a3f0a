"""`perfmodel report`: writes a page about a search, a layout or a calibration."""

import argparse
from pathlib import Path
from typing import Any, Final

from perfmodel.cli._compare import add_profile
from perfmodel.cli._files import of_calibration
from perfmodel.cli._flags import add_job, job_flags, problem_of, problem_on
from perfmodel.cli._search_flags import add_search, options_of, reliability_of, space_of
from perfmodel.cli._show import emit, written
from perfmodel.display import new_console, say, say_verbatim, table
from perfmodel.errors import PerfModelError
from perfmodel.units import duration, figure, span

TOP: Final = 100
"""Number of layouts on the page."""


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="write an HTML page for a decision: ranked layouts, what-if sliders, launch files",
    )
    add_job(command, batches=True)
    command.add_argument("--layout", help="report on only this layout, without a search")
    command.add_argument(
        "--tables",
        nargs="+",
        type=Path,
        metavar="TABLE",
        help="report on the calibration instead: compare its predictions with these measured kernels, collectives or "
        "runs, show where it is uncertain, and suggest what to measure next (with a job and --layout: for that "
        "step)",
    )
    add_profile(command)
    add_search(command, TOP)
    command.add_argument(
        "--compare-clusters",
        default="",
        metavar="C[:N],...",
        help="also find the job's best layout on these clusters, as in compare-clusters",
    )
    command.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write the page here; it opens in any browser, offline",
    )
    command.set_defaults(run=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    """Write the page of a calibration, of a search or of one layout."""
    if not (arguments.html or arguments.json):
        raise PerfModelError("report: nothing to write; give --html FILE")
    if of_calibration(arguments):
        return _calibration(arguments)
    if arguments.profile and not arguments.layout:
        raise PerfModelError("report: --profile needs the layout that ran; give --layout L")

    # Imports come after the checks, so that bad flags are refused at once.
    from perfmodel.calibration import explain_profile
    from perfmodel.planning.decision import report

    flags = job_flags(arguments)
    options = options_of(arguments)
    problem = problem_of(arguments)
    if not arguments.layout:
        problem.require_devices()

    # A profile is read first: unreadable files are refused before anything is searched.
    profile = None
    if arguments.profile:
        profile = explain_profile(
            problem,
            arguments.layout,
            arguments.profile,
            format=arguments.format,
            calibration=arguments.calibration,
        )
    made = report(
        problem,
        layout=arguments.layout or "",
        space=lambda problem: space_of(arguments, problem),
        options=options,
        calibration=arguments.calibration,
        reliability=reliability_of(arguments),
        pue=arguments.pue,
        flags=flags,
    )
    if profile:
        made = made.with_profile(profile)
    if arguments.compare_clusters:
        made = made.with_clusters(_clusters(arguments, made.data["job"]["devices"]))
    if arguments.html:
        made.write(arguments.html)
    files = [str(arguments.html)] if arguments.html else []
    emit(arguments, made.to_dict() | {"written": files}, lambda: _show(made.data, files))

    # The page of an interrupted search is written, and the exit status says that it is not the
    # whole.
    if not made.data.get("complete", True):
        raise KeyboardInterrupt(made.data["certificate"])
    return 0


def _calibration(arguments: argparse.Namespace) -> int:
    """The page of a calibration."""
    from perfmodel.validation import calibration_report

    if arguments.profile or arguments.compare_clusters:
        flag = "--profile" if arguments.profile else "--compare-clusters"
        raise PerfModelError(
            f"report: {flag} is for reports on a layout or a search; leave out {flag} or --tables"
        )

    # A calibration's page takes a whole step or none.
    given_flags = [
        name for name in ("model", "cluster", "global_batch", "layout") if getattr(arguments, name)
    ]
    if given_flags and len(given_flags) < 4:
        raise PerfModelError(
            "report: to suggest what to measure for a step, give all of --model, --cluster, --global-batch and "
            "--layout (or a job file); or give none"
        )
    made = calibration_report(
        arguments.tables or (),
        arguments.calibration,
        problem=problem_of(arguments) if given_flags else None,
        layout=arguments.layout or "",
    )
    if arguments.html:
        made.write(arguments.html)
    files = [str(arguments.html)] if arguments.html else []
    emit(
        arguments,
        made.to_dict() | {"written": files},
        lambda: _show_calibration(made.data, files),
    )
    return 0


def _show_calibration(data: dict[str, Any], files: list[str]) -> None:
    """Print errors by group, the first measurement to make, and the file of the page."""
    if data["groups"]:
        heads = ("group", "device", "rows", "mean error", "inside 90 %")
        lines = [
            (
                group["group"],
                group["device"],
                f"{group['n']:,}",
                f"{group['mean_ape']:.1%}",
                f"{group['coverage_90']:.0%}",
            )
            for group in data["groups"]
        ]
        new_console().print(table("Predicted against measured", heads, lines))
    if data["next"]:
        first = data["next"][0]
        half_width = first["half_width"]
        # Wide intervals are factors: one of +-150 % would end below zero.
        known = f"{half_width:.0%}" if half_width < 0.5 else f"a factor of {1 + half_width:.2g}"
        say(f"measure next: {first['what']} on {first['device']}, now predicted within {known}")
    written(files)


def _clusters(arguments: argparse.Namespace, devices: int) -> list[dict[str, Any]]:
    """Time and cost of training on the job's cluster and on each of the others, or the reason why
    one has no layout."""
    from perfmodel import catalog
    from perfmodel.planning.compare_clusters import clusters_named, compare_problems

    # The job's own cluster is compared on the same terms as the others.
    own_cluster = catalog.cluster(arguments.cluster)
    named = clusters_named([own_cluster, *arguments.compare_clusters.split(",")], devices)
    comparison = compare_problems(
        [problem_on(arguments, cluster, count, quiet=True) for cluster, count in named],
        tokens=arguments.tokens,
        pue=arguments.pue,
        reliability=reliability_of(arguments),
        space=lambda problem: space_of(arguments, problem),
        calibration=arguments.calibration,
        min_fit=arguments.min_fit,
    ).to_dict()
    return [
        *comparison["clusters"],
        *({"cluster": name, "why": why} for name, why in comparison["impossible"].items()),
    ]


def _show(data: dict[str, Any], files: list[str]) -> None:
    """Print the recommended layout, and the file of the page."""
    best = data["rows"][data["recommended"]]
    interval = span(duration(best["lo_s"]), duration(best["hi_s"]))
    is_search = data["kind"] == "search"
    say_verbatim(f"{'recommended' if is_search else 'layout'}: {best['layout']}")
    per_s = best["tokens_per_s"] / data["tokens_per_unit"]
    rate = f"{per_s:,.0f}" if data["unit"] == "tokens" else figure(per_s, 3)
    say(f"  {duration(best['step_s'])} per step (90 %: {interval}), {rate} {data['unit']}/s")
    say(f"  memory: {best['fit_words']}")
    say(f"{len(data['rows']):,} layouts on the page" if is_search else "one layout on the page")
    written(files)
