"""`perfmodel calibrate --for-decision`: finds the run that helps most to choose a layout."""

import argparse
import shlex
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from perfmodel.cli._files import flags_of, lacking
from perfmodel.cli._flags import add_calibration, job_flags, predict_command, problem_of
from perfmodel.cli._search_flags import add_space, space_of
from perfmodel.cli._show import emit
from perfmodel.display import new_console, progress
from perfmodel.errors import PerfModelError
from perfmodel.spec import Problem
from perfmodel.units import duration, number_of

if TYPE_CHECKING:
    from perfmodel.planning.layouts import SearchResult
    from perfmodel.prediction import Prediction

TOP: Final = 24
"""Default number of layouts to choose from, which is also how many the robust order considers."""
SHOWN: Final = 3
"""Measurements of a kind that are listed."""
_OWN: Final = ("devices", "top", "calibration", "fix", "schedules", "vary", "fewer_devices")
"""Flags that only a decision uses."""
_NOT_OWN: Final = (
    "plan",
    "out",
    "backend",
    "resume",
    "dry_run",
    "launched",
    "process",
    "processes",
    "coordinator",
    "launch_timeout",
    "layouts",
    "device",
)
"""Flags that only a measurement on this machine uses."""


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags of the decision and of the layouts that it is between."""
    group = command.add_argument_group(
        "instead of measuring, suggest which run to make before choosing a layout; needs the model's flags"
    )
    group.add_argument(
        "--for-decision",
        action="store_true",
        help="find the run or profile that helps most to choose among the best layouts (lowers the expected regret most)",
    )
    group.add_argument(
        "--top",
        type=int,
        default=TOP,
        metavar="K",
        help=f"number of layouts to choose from (default {TOP})",
    )
    add_space(group)
    add_calibration(group)


def is_for_decision(arguments: argparse.Namespace) -> bool:
    """Whether --for-decision is given.

    Raises:
        PerfModelError: flags of a decision together with those of measuring here.
    """
    # The same command also measures this machine. Each of the two uses refuses the flags of the
    # other.
    wrong = [
        name for name in (_NOT_OWN if arguments.for_decision else _OWN) if name in arguments.given
    ]
    if wrong:
        verb = "goes without" if arguments.for_decision else "is needed with"
        raise PerfModelError(f"calibrate: --for-decision {verb} {flags_of(wrong)}")
    return arguments.for_decision


def execute(arguments: argparse.Namespace) -> int:
    """Search, value the measurements, and show them."""
    from perfmodel.planning.layouts import ask
    from perfmodel.planning.layouts.measurement_values import telling

    problem = _problem(arguments)
    result = _searched(arguments, problem)
    question = ask(problem, space=result.space, calibration=arguments.calibration)
    value_of_information = telling(question.step_problem, result.layouts)
    report = value_of_information.to_dict()
    report |= _next_commands(arguments, report, result.layouts[0])
    emit(arguments, report, lambda: _show(report, result))
    return 0


def _problem(arguments: argparse.Namespace) -> Problem:
    """Return the problem that the flags state, which must have a single global batch."""
    flags = lacking(arguments, "model", "cluster", "global_batch")
    if flags:
        raise PerfModelError(f"calibrate: --for-decision needs {flags} too")
    if isinstance(arguments.global_batch, list) and len(arguments.global_batch) > 1:
        raise PerfModelError(
            "calibrate: --for-decision takes one global batch; give a single --global-batch"
        )
    problem = problem_of(arguments)
    problem.require_devices()
    return problem


def _searched(arguments: argparse.Namespace, problem: Problem) -> "SearchResult":
    """The layouts that are chosen from."""
    from perfmodel.planning.layouts import SearchOptions, search

    # Only options of the search are taken from the job file; its space comes through flags
    # (`space_of`).
    option_names = {f.name for f in fields(SearchOptions)}
    file_options = {
        word: value for word, value in arguments.of_search.items() if word in option_names
    }
    options = SearchOptions(**{"top": arguments.top, **file_options})
    if options.objective not in (None, "step_time"):
        raise PerfModelError(
            f"calibrate: --for-decision looks for the fastest layout and ignores the objective {options.objective}: "
            "remove the objective from the job file"
        )
    with progress("search", silent=arguments.json) as report:
        space = space_of(arguments, problem)
        result = search(
            problem,
            space=space,
            options=options,
            calibration=arguments.calibration,
            progress=report,
        )
    if not result.complete:
        raise KeyboardInterrupt(result.certificate)
    if not result.layouts:
        raise PerfModelError(str(result.impossible))
    return result


def _next_commands(
    arguments: argparse.Namespace, report: dict[str, Any], best: "Prediction"
) -> dict[str, str]:
    """The measurement to make first, and the command that fits to it; without a measurement that
    would change the choice, the command that predicts the best layout."""
    # Measurements are sorted by what they save. If the first would not change the choice, none
    # would.
    first = next(iter(report["measurements"]), None)
    if first is None or not first["choice_moves"]:
        return {"measure": "", "next": predict_command(arguments, best)}
    kind = "profile" if first["measure"] == "profile" else "run"
    if kind == "run":
        fit_flags = ["--runs", "runs.csv"]
    else:
        job = [
            "--global-batch",
            str(arguments.global_batch),
            "--layout",
            first["layouts"][0],
        ]
        fit_flags = [*job_flags(arguments), *job, "--profile", "rank0.json"]
    return {
        "measure": " and ".join(f"a {kind} of {layout}" for layout in first["layouts"]),
        "next": f"perfmodel fit {shlex.join([*fit_flags, '--out', 'mine'])}",
    }


def _cells(row: dict[str, Any], now_s: float) -> tuple[str, ...]:
    """Return the table row of one suggested run, `now_s` being the expected regret without it."""
    return (
        " + ".join(map(str, row["ranks"])),
        row["measure"],
        duration(now_s),
        duration(row["regret_after_s"]),
        duration(row["saved_s"]),
        f"{row['choice_moves']:.0%}",
        "" if row["mostly_to_rank"] is None else f"#{row['mostly_to_rank']}",
        row["layouts"][-1],
    )


def _show(report: dict[str, Any], result: "SearchResult") -> None:
    """Print the measurements that would save most, and how sure the present choice is."""
    from perfmodel.planning.layouts import layout_last

    console = new_console()
    best, rows = result.layouts[0], report["measurements"]
    now_s, first = report["regret_now_s"], report["layouts"][0]
    console.print(
        f"{best.model} on {number_of(best.devices, 'device')} of {best.cluster}, global batch {best.global_batch}: "
        f"{number_of(len(report['layouts']), 'layout')}"
    )
    console.print(f"#1: {best.layout_notation}", soft_wrap=True, markup=False)
    console.print(
        f"is the fastest with probability {first['probability_best']:.0%}; expected regret "
        f"{duration(now_s)} per step, {now_s / best.step_time_s:.1%}"
    )
    if not report["measure"]:
        console.print("no run of these layouts would change the choice; use #1")
        console.print(f"next: {report['next']}", soft_wrap=True, markup=False)
        return
    heads = ("#", "measure", "regret now", "after", "saves", "choice moves", "mostly to")

    # Only the first few of each kind: a long list hides that they are much alike.
    cells = []
    count_of_kind: Counter[str] = Counter()
    for row in rows:
        count_of_kind[row["measure"]] += 1
        if count_of_kind[row["measure"]] <= SHOWN:
            cells.append(_cells(row, now_s))
    layout_last(console, heads, cells)
    console.print(
        f"measure first: {report['measure']}".replace(" and a", "\n           and a"),
        soft_wrap=True,
        markup=False,
    )
    reason = (
        f"  it shows whether #{rows[0]['mostly_to_rank']} is faster than #1: {rows[0]['mostly_to']}"
    )
    console.print(reason, soft_wrap=True, markup=False)
    console.print(f"next: {report['next']}", soft_wrap=True, markup=False)
