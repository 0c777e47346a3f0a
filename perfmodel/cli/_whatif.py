"""`perfmodel whatif`: the same step on a changed machine; `perfmodel design QUESTION`: the machine
that a goal needs."""

import argparse
from pathlib import Path
from typing import Any

from perfmodel.cli._flags import (
    add_job,
    add_layout,
    layout_of,
    price_of,
    problem_of,
    refuse_strict,
    require_measured,
)
from perfmodel.cli._search_flags import add_space, space_of
from perfmodel.cli._show import note, reporting, written
from perfmodel.display import new_console, progress, say, table
from perfmodel.errors import PerfModelError
from perfmodel.units import GIB, MIN_FIT, duration, figure, fit_words, number_of


def add_whatif(commands: Any) -> None:
    """Register the command `whatif` and its flags."""
    command: argparse.ArgumentParser = commands.add_parser(
        "whatif", help="predict the same step with other hardware, network delays or a slow rank"
    )
    add_job(
        command,
        settings="e.g. inter_node_bandwidth=2x, memory_bandwidth=+10%%, power_limit=2x, all_reduce_delay_s=0.002; or ",
    )
    add_layout(command)
    command.add_argument(
        "--sweep",
        metavar="NAME=FIRST:LAST:COUNT",
        help="compute a curve, e.g. all_reduce_delay_s=0:0.01:11",
    )
    command.add_argument("--png", type=Path, metavar="FILE", help="picture of the curve")
    command.set_defaults(run=reporting(_whatif, _show_whatif))


def _whatif(arguments: argparse.Namespace) -> dict[str, Any]:
    """Predictions in the changed scenarios, as values.

    Raises:
        PerfModelError: unknown parameters, impossible values or layouts.
    """
    from perfmodel.planning.what_if import Scenario, in_scenario, parse_sweep, sweep
    from perfmodel.prediction import step_problem_of

    if arguments.png and not arguments.sweep:
        raise PerfModelError("whatif: --png draws a curve; give --sweep NAME=FIRST:LAST:COUNT too")
    # Settings and sweeps are parsed before anything is computed, so that a wrong one costs no time.
    scenario = Scenario.parse(arguments.set)
    settings = parse_sweep(arguments.sweep) if arguments.sweep else []
    problem = problem_of(arguments)
    step_problem = step_problem_of(problem, arguments.calibration)
    layout = layout_of(problem, arguments.layout)
    note(layout.remarks)
    require_measured(arguments, step_problem, layout)
    report = in_scenario(step_problem, layout, scenario).to_dict()
    if settings:
        curve = sweep(step_problem, layout, scenario, settings)
        report["curve"] = curve.to_dict()
        if arguments.png:
            from perfmodel import viz

            viz.save_figure(viz.draw_curves([curve]), arguments.png)
            report["written"] = [str(arguments.png)]
    return report


def _show_whatif(report: dict[str, Any]) -> None:
    """The report as text."""
    console = new_console()
    before, after = report["before"], report["after"]
    if report["settings"]:
        console.print(f"with {', '.join(report['settings'])}:")
    # A sweep alone changes nothing before its curve.
    before_text = duration(before["step_time_s"])
    if report["settings"]:
        console.print(
            f"step time {before_text} to {duration(after['step_time_s'])}, {report['change']:+.1%}"
        )
    else:
        console.print(f"step time {before_text}")
    fit_before = fit_words(before["fits_probability"])
    fit_after = fit_words(after["fits_probability"])
    console.print(
        f"memory: {fit_before if fit_before == fit_after else f'{fit_before} before, {fit_after} after'}"
    )
    sensitivity = sorted(report["sensitivity"].items(), key=lambda item: -abs(item[1]))
    for line in report["notes"]:
        console.print(line, markup=False)
    # Rounded first, so that there is no -0.00 %.
    rows = [(name, f"{round(1.1**value - 1, 4) + 0.0:+.2%}") for name, value in sensitivity]
    console.print(table("", ("10 % more of", "changes the step by"), rows))
    curve = report.get("curve")
    if curve:
        points = [
            (figure(value) + "x" * curve["multiple"], duration(seconds))
            for value, seconds in zip(curve["values"], curve["step_s"], strict=True)
        ]
        console.print(table("", (curve["name"], "step"), points))
        if curve["hidden_up_to"]:
            hidden = duration(curve["hidden_up_to"])
            console.print(f"hidden behind compute: {curve['name']} of up to {hidden}")
    written(report.get("written", ()))


def add_design(commands: Any) -> None:
    """Register `design` and its questions."""
    command: argparse.ArgumentParser = commands.add_parser(
        "design",
        help=(
            "answer which part to upgrade first, how much memory or how many devices are needed, or when one "
            "layout overtakes another"
        ),
    )
    questions = command.add_subparsers(dest="question", required=True, metavar="QUESTION")

    def ask(name: str, text: str) -> argparse.ArgumentParser:
        question = questions.add_parser(name, help=text)
        add_job(question)
        question.set_defaults(run=reporting(_design, _show_design))
        return question

    # Which part is worth an upgrade, with the best layout of each machine.
    upgrade = ask(
        "upgrade",
        "find the part of the machine to upgrade first, with the best layout for each upgrade",
    )
    add_space(upgrade)
    upgrade.add_argument(
        "--share",
        type=float,
        default=0.1,
        metavar="X",
        help="relative size of each upgrade (default 0.1: 10 %% better)",
    )
    upgrade.add_argument(
        "--upgrade-price",
        action="append",
        default=[],
        metavar="NAME=MONEY",
        help="price of one upgrade, e.g. inter_node_bandwidth=1000; may be repeated",
    )
    # The other questions turn one figure until the answer changes: memory, devices, or a parameter
    # of the machine.
    memory = ask("memory", "find the device memory that a layout needs to fit")
    add_layout(memory)
    devices = ask("devices", "find the fewest devices, up to --devices, that reach a step time")
    add_space(devices)
    devices.add_argument(
        "--below",
        type=float,
        required=True,
        metavar="S",
        help="longest step time, in seconds",
    )
    overtake = ask(
        "overtake", "find the factor on a parameter at which one layout overtakes another"
    )
    add_layout(overtake)
    overtake.add_argument("--against", required=True, metavar="LAYOUT", help="the layout to beat")
    overtake.add_argument(
        "--parameter",
        default="inter_node_bandwidth",
        metavar="NAME",
        help="parameter of the machine, named as in whatif",
    )


def _design(arguments: argparse.Namespace) -> dict[str, Any]:
    """The answer to the question of `design`, as values.

    Raises:
        PerfModelError: bad input.
    """
    from perfmodel.planning import design
    from perfmodel.planning.layouts import ask
    from perfmodel.prediction import step_problem_of

    problem = problem_of(arguments)
    if arguments.question in ("memory", "overtake"):
        step_problem = step_problem_of(problem, arguments.calibration)
        layout = layout_of(problem, arguments.layout)
        require_measured(arguments, step_problem, layout)
        if arguments.question == "memory":
            return {"question": "memory"} | design.memory_to_fit(step_problem, layout).to_dict()
        against = layout_of(problem, arguments.against)
        require_measured(arguments, step_problem, against)
        return {"question": "overtake"} | design.overtake(
            step_problem, layout, against, arguments.parameter
        ).to_dict()

    # Questions about one layout are answered above. The others search, for which --strict has no
    # meaning.
    refuse_strict(arguments, f"design {arguments.question}")
    problem.require_devices()

    # "How many devices" has to be allowed to use fewer.
    arguments.fewer_devices = arguments.fewer_devices or arguments.question == "devices"
    question = ask(problem, space=space_of(arguments, problem), calibration=arguments.calibration)
    if arguments.question == "devices":
        if not arguments.below > 0:
            raise PerfModelError(
                f"design devices: --below must be above 0, got {arguments.below:g}"
            )
        return {"question": "devices"} | design.devices_for(question, arguments.below).to_dict()
    with progress("design") as report:
        prices = dict(
            price_of(text, "NAME=MONEY, like memory_bytes=500") for text in arguments.upgrade_price
        )
        upgrades = design.rank_upgrades(
            question, share=arguments.share, prices=prices, progress=report
        )
    return {"question": "upgrade"} | upgrades.to_dict()


def _show_design(report: dict[str, Any]) -> None:
    """Print the answer to a question of design."""
    print_answer = {
        "memory": _memory,
        "devices": _devices,
        "overtake": _overtake,
        "upgrade": _upgrade,
    }
    print_answer[report["question"]](report)


def _memory(report: dict[str, Any]) -> None:
    """Print the memory that a layout needs, and the smallest devices with that much."""
    parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in report["parts_bytes"].items())
    peak = report["peak_bytes"] / GIB
    needed = report["memory_bytes"] / GIB
    has = report["has_bytes"] / GIB
    say(
        f"{report['layout']}: needs {peak:.1f} of {has:.1f} GiB on the fullest device: "
        f"{fit_words(report['fits_probability'])}"
    )
    say(f"parts of the {peak:.1f} GiB: {parts}")
    say(
        f"it needs a device of at least {needed:.1f} GiB, as fragmentation takes a part; with "
        f"{report['likely_bytes'] / GIB:.1f} GiB it fits with a probability of {MIN_FIT:g}"
    )
    say(f"smallest such devices in the catalog: {', '.join(report['devices'][:6]) or 'none'}")


def _devices(report: dict[str, Any]) -> None:
    """Print the number of devices that a step time takes."""
    if report["devices"] is None:
        say(
            f"no layout takes less than {duration(report['below_s'])}; the fastest takes "
            f"{duration(report['step_time_s'])}: {report['layout']}"
        )
    else:
        say(
            f"{number_of(report['devices'], 'device')}: {report['layout']} takes {duration(report['step_time_s'])}"
        )


def _overtake(report: dict[str, Any]) -> None:
    """Print at which value of a parameter one of two layouts overtakes the other."""
    first, second = report["first"], report["second"]
    say(f"now {first} takes {duration(report['first_s'])}, {second} {duration(report['second_s'])}")
    if report["multiple"] is None:
        ahead = first if report["first_s"] < report["second_s"] else second
        say(f"{ahead} is faster for every {report['parameter']} from 0.001 to 1000 times today's")
    else:
        say(
            f"both take {duration(report['equal_s'])} with {report['multiple']:.3g} times the {report['parameter']}"
        )


def _upgrade_cells(row: dict[str, Any], priced: bool) -> tuple[str, ...]:
    """The cells of one upgrade in the table of upgrades."""
    cells = [
        row["parameter"],
        row["change"],
        f"{row['kept_gain']:.2%}",
        f"{row['gain']:.2%}",
    ]
    if priced:
        gain_per_price = figure(row["gain_per_price"], 3) if row["price"] else "-"
        cells.append(gain_per_price)
    new_layout = row["layout"] if row["changes_layout"] else "the same"
    cells.append(new_layout)
    return tuple(cells)


def _upgrade(report: dict[str, Any]) -> None:
    """Print what upgrades save, with today's best layout and with the best one after each."""
    console = new_console()
    console.print(f"best layout {report['layout']}: {duration(report['step_time_s'])}")
    priced = any(row["price"] is not None for row in report["upgrades"])
    rows = [_upgrade_cells(row, priced) for row in report["upgrades"]]
    heads = (
        "upgrade",
        "by",
        "saves",
        "saves with\nits best layout",
        *["share per money"] * priced,
        "its best layout",
    )
    console.print(table("", heads, rows))
