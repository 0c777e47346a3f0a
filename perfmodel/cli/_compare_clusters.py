"""`perfmodel compare-clusters`: one job on several clusters, each with its best layout, in days,
money and energy."""

import argparse
from typing import TYPE_CHECKING, Any

from perfmodel.cli._flags import add_job, predict_command, price_of, problem_on, token_count
from perfmodel.cli._search_flags import (
    add_min_fit,
    add_reliability,
    add_space,
    reliability_of,
    space_of,
)
from perfmodel.cli._show import emit
from perfmodel.display import new_console, progress, say, say_verbatim
from perfmodel.units import batch_words, counted, duration, figure

if TYPE_CHECKING:
    from perfmodel.planning.compare_clusters import ClusterComparison, ClusterPlan


def add_command(commands: Any) -> None:
    """Register the command."""
    command: argparse.ArgumentParser = commands.add_parser(
        "compare-clusters",
        help="find the best layout of a job on each of several clusters, with days, money and energy",
    )
    command.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="the model, as for --model",
    )
    add_job(command, clusters=True)
    add_space(command)
    command.add_argument(
        "--by",
        default="cost",
        metavar="ORDER",
        help="sort the clusters by cost (default), time or energy",
    )
    command.add_argument(
        "--tokens",
        type=token_count,
        metavar="N",
        help="number of tokens to train on; adds days and total cost",
    )
    command.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="NAME=USD",
        help="US dollars per device and hour, for one cluster or device: h100=2.5; may be "
        "repeated (default: list prices)",
    )
    add_reliability(command)
    add_min_fit(command)
    command.set_defaults(run=_execute)


def _execute(arguments: argparse.Namespace) -> int:
    result = run(arguments)
    emit(arguments, result.to_dict(), lambda: show(result, _next_command(arguments, result)))
    return 0


def run(arguments: argparse.Namespace) -> "ClusterComparison":
    """Run the comparison described by the flags.

    Raises:
        PerfModelError: bad input; no cluster can run the job.
    """
    from perfmodel.planning.compare_clusters import clusters_named, compare_problems

    # A cluster may state its number of devices; the others are tried with each of --devices.
    names = [name for name in arguments.clusters.split(",") if name.strip()]
    named = clusters_named(names, arguments.device_counts)
    problems = [problem_on(arguments, cluster, devices) for cluster, devices in named]
    with progress("compare-clusters", silent=arguments.json) as report:
        return compare_problems(
            problems,
            by=arguments.by,
            tokens=arguments.tokens,
            prices=dict(price_of(text, "NAME=USD, like h100=2.5") for text in arguments.price),
            pue=arguments.pue,
            reliability=reliability_of(arguments),
            space=lambda problem: space_of(arguments, problem),
            calibration=arguments.calibration,
            strict=arguments.strict,
            min_fit=arguments.min_fit,
            progress=report,
        )


def _next_command(arguments: argparse.Namespace, result: "ClusterComparison") -> str:
    """The command line that predicts the best cluster's layout again."""
    from perfmodel import catalog
    from perfmodel.planning.compare_clusters import split_count

    # Name the best cluster as the user wrote it, so that a file stays a file.
    best = result.plans[0].prediction
    for text in arguments.clusters.split(","):
        name, _ = split_count(text)
        if name and catalog.cluster(name).name == best.cluster:
            return predict_command(arguments, best, name)
    return predict_command(arguments, best, best.cluster)


def show(result: "ClusterComparison", command: str) -> None:
    """Print figures and layout of each cluster, the assumptions, and the `command` for the best."""
    from perfmodel.planning.compare_clusters import ORDERS
    from perfmodel.planning.training_run import failures
    from perfmodel.prediction.text import memory_words, throughput_words

    console = new_console()
    best = result.plans[0]
    tokens = best.run.tokens
    unit = best.prediction.sample_unit
    tokens_text = ""
    if tokens:
        samples = counted(tokens / best.prediction.tokens_per_counted_sample)
        in_tokens = "" if samples == counted(tokens) else f" ({counted(tokens)} tokens)"
        tokens_text = f", {samples} {unit}{in_tokens}"
    batch = batch_words(result.global_batch, result.seq_len, unit)
    console.print(f"{result.model}, {batch}{tokens_text}; {ORDERS[result.by]} first")
    whole_run = ("days", "cost") if tokens else ()
    energy = "MWh" if tokens else f"J/{unit.removesuffix('s')}"
    price = "$/Mtok" if unit == "tokens" else f"$/M {unit}"
    heads = ("cluster", "devices", "step", "90 % interval", *whole_run, price, energy)

    # Tables of `rich` would break the layout; here, each cluster has further lines below its
    # figures.
    rows = [heads, *map(_cells, result.plans)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, plan in zip(rows, (None, *result.plans), strict=True):
        first, *further = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        say_verbatim("  ".join((first.strip().ljust(widths[0]), *further)))
        if plan is not None:
            p = plan.prediction
            say(
                f"  {throughput_words(p)}, MFU {p.mfu:.1%}, goodput {plan.run.goodput.fraction:.1%}"
            )
            say(f"  {memory_words(p)}")
            say_verbatim(f"  {p.layout_notation}")
    p = best.prediction

    # Reasons why some cannot run, then the sources of the figures; equal lines once.
    notes = [f"{name}: {why}" for name, why in result.impossible.items()]
    notes += [f"{p.cluster}: {failures(best.run.goodput)}", *map(_rests_on, result.plans)]
    for line in dict.fromkeys(notes):
        console.print(line, markup=False)
    say_verbatim(f"next: {command}")


def _rests_on(plan: "ClusterPlan") -> str:
    """Price of a device with its source, and whether its power is known."""
    run = plan.run
    price = "the price is not known; give --price NAME=USD"
    if run.usd_per_device_hour is not None:
        price = f"${run.usd_per_device_hour:,.2f} per device and hour ({run.price_source})"
    if run.energy_per_million_tokens_j is None:
        price += "; power is not known"
    elif run.energy_is_bound:
        price += "; idle power is not known, so full power is assumed"
    return f"{plan.prediction.cluster}: {price}"


def _cells(plan: "ClusterPlan") -> tuple[str, ...]:
    """Return the cells of a cluster's row."""
    from perfmodel.planning.layouts import interval

    p, run = plan.prediction, plan.run
    energy = "-"
    # Models of images and videos are priced per image or video.
    tokens = p.tokens_per_counted_sample
    if run.energy_per_million_tokens_j is not None:
        shown = run.energy_mwh
        if shown is None:
            shown = run.energy_per_million_tokens_j / 1e6 * tokens
        energy = "<" * run.energy_is_bound + figure(shown, 3)
    # Days and cost are known only for a run of a stated number of tokens.
    whole_run = ()
    if run.days is not None:
        cost = "-" if run.cost_usd is None else f"${counted(run.cost_usd)}"
        whole_run = (f"{run.days:,.3g}", cost)
    price = "-"
    if run.usd_per_million_tokens is not None:
        price = figure(run.usd_per_million_tokens * tokens, 3)
    return (
        p.cluster,
        str(p.devices),
        duration(p.step_time_s),
        interval(p.step_time_lo_s, p.step_time_hi_s),
        *whole_run,
        price,
        energy,
    )
