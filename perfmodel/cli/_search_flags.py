"""Flags of a search: layouts to try, objective, constraints, prices and failures."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.cli._flags import token_count
from perfmodel.spec import Problem
from perfmodel.units import MIN_FIT

if TYPE_CHECKING:
    from perfmodel.planning.goodput import Reliability
    from perfmodel.planning.layouts import SearchOptions, SearchSpace, Tariff
    from perfmodel.planning.training_run import TrainingRun
    from perfmodel.prediction import Prediction


def add_search(command: argparse.ArgumentParser, top: int = 10) -> None:
    """Add the flags for extent, method and output of a search."""
    command.add_argument(
        "--top",
        type=int,
        default=top,
        metavar="K",
        help=f"layouts to report (default {top})",
    )
    command.add_argument(
        "--method",
        default="auto",
        help="enumerate (exact for even stages), auto (also uneven stages where they help; default), or relax (also "
        "moves stages, recompute and micro-batch together, by gradients; slower)",
    )
    add_space(command)
    add_goal(command)
    add_reliability(command)
    add_min_fit(command)
    # Layouts may be ranked by the loss if the prediction is wrong, instead of by the prediction.
    command.add_argument(
        "--robust",
        nargs="?",
        const="regret",
        default="",
        metavar="ORDER",
        help="regret: expected regret (default); upper: end of the 90 %% interval; best: probability of being best",
    )
    # Long searches: several processes, several machines, and going on after an interrupt.
    command.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="number of processes (default 1)",
    )
    command.add_argument(
        "--dask",
        default="",
        metavar="ADDRESS",
        help="evaluate on the workers of a Dask scheduler",
    )
    command.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="save progress to this file; if it exists, continue from it",
    )


def add_min_fit(command: argparse.ArgumentParser) -> None:
    """Add the flag for the least probability that a recommended layout fits into memory."""
    command.add_argument(
        "--min-fit",
        type=float,
        default=MIN_FIT,
        metavar="P",
        help=f"recommend only layouts that fit into memory with at least this probability (default {MIN_FIT})",
    )


def add_space(command: argparse._ActionsContainer) -> None:
    """Add the flags for the layouts to try."""
    command.add_argument(
        "--fix",
        default="",
        metavar="LAYOUT",
        help='fix some fields of the layout, e.g. "tp=8,zero=1"',
    )
    command.add_argument(
        "--schedules",
        default="",
        metavar="NAMES",
        help="pipeline schedules to try, such as 1f1b,zb-h1,chimera; all: every synchronous schedule",
    )
    command.add_argument(
        "--options",
        "--vary",
        dest="vary",
        default="",
        metavar="NAMES",
        help="also vary overlap, tp_overlap, recompute (layers per stage), offload, order (of ranks), folding (experts "
        "over tp); or all",
    )
    command.add_argument(
        "--fewer-devices",
        action="store_true",
        help="also try layouts that use fewer devices",
    )


def add_goal(command: argparse.ArgumentParser) -> None:
    """Add the flags for objective, constraints and prices."""
    command.add_argument(
        "--objective",
        metavar="NAME",
        help="step_time (default), tokens_per_s (default of several batches), tokens_per_s_per_device, mfu, cost, "
        "energy, train_time, memory, devices, or a formula to minimise",
    )
    command.add_argument(
        "--constraint",
        dest="constraints",
        action="append",
        default=[],
        metavar="COMPARISON",
        help='e.g. "memory_bytes<70e9" or "step_time_s<2"; may be repeated',
    )
    # Objectives in money or energy need figures that no catalog knows for certain.
    command.add_argument(
        "--price",
        dest="price_per_device_hour",
        type=float,
        metavar="MONEY",
        help="US dollars per device and hour (default: the list price)",
    )
    command.add_argument(
        "--power",
        dest="power_w",
        type=float,
        metavar="W",
        help="power of a busy device in watts (default: its nominal power)",
    )
    command.add_argument(
        "--idle-power",
        dest="idle_power_w",
        type=float,
        metavar="W",
        help="power of an idle device in watts (default: the catalog's)",
    )
    command.add_argument(
        "--tokens",
        type=token_count,
        metavar="N",
        help="number of tokens to train on; without it, cost and energy are per million tokens",
    )


def add_reliability(command: argparse.ArgumentParser) -> None:
    """Add the flags of failures, checkpoints, restarts and power."""
    group = command.add_argument_group("failures and energy of a whole run (with --tokens)")
    group.add_argument(
        "--mtbf",
        type=float,
        metavar="HOURS",
        help="mean time between failures of one device (default 50,700, as on the 16,384 H100 of Llama 3)",
    )
    group.add_argument(
        "--restart",
        type=float,
        metavar="MINUTES",
        help="minutes from a failure until training continues (default 10)",
    )
    group.add_argument(
        "--storage",
        type=float,
        metavar="GB/S",
        help="write rate of checkpoints, all devices together (default 0.122 per device)",
    )
    group.add_argument(
        "--checkpoint-every",
        type=float,
        metavar="MINUTES",
        help="minutes between checkpoints (default: the interval with the least lost time)",
    )
    group.add_argument(
        "--async-checkpoints",
        action="store_true",
        help="training continues while a checkpoint is written",
    )
    group.add_argument(
        "--stage-checkpoints",
        action="store_true",
        help="every pipeline stage writes and reads its own checkpoint",
    )
    group.add_argument(
        "--pue",
        type=float,
        default=1.0,
        metavar="X",
        help="power usage effectiveness: site energy / device energy",
    )


def space_of(arguments: argparse.Namespace, problem: Problem) -> "SearchSpace":
    """The search space that the flags describe."""
    from perfmodel.planning.layouts.search_words import SpaceWords

    return SpaceWords(**{f.name: getattr(arguments, f.name) for f in fields(SpaceWords)})(problem)


def options_of(arguments: argparse.Namespace) -> "SearchOptions":
    """Options of the search from the flags.

    Read them before `problem_of`, which keeps the first of several batches.
    """
    from perfmodel.planning.layouts import SearchOptions

    batches: list[int] = arguments.global_batch
    return SearchOptions(
        method=arguments.method,
        objective=arguments.objective,
        constraints=arguments.constraints,
        tariff=tariff_of(arguments),
        robust=arguments.robust,
        batches=batches if len(batches) > 1 else (),
        top=arguments.top,
        min_fit=arguments.min_fit,
        strict=arguments.strict,
        workers=arguments.workers,
        dask=arguments.dask,
        resume=arguments.resume,
        **arguments.of_search,
    )


def reliability_of(arguments: argparse.Namespace) -> "Reliability":
    """Failures and checkpoints from the flags of `add_reliability`, in SI units.

    Raises:
        PerfModelError: times and rates that are not above 0.
    """
    from perfmodel.planning.goodput import Reliability

    # Flags are in hours, minutes and GB/s as people count them, records in SI units. Flags that are
    # not given keep the record's defaults.
    stated = {
        "device_mtbf_s": arguments.mtbf and arguments.mtbf * 3600,
        "restart_s": arguments.restart and arguments.restart * 60,
        "storage_bytes_per_s": arguments.storage and arguments.storage * 1e9,
        "interval_s": arguments.checkpoint_every and arguments.checkpoint_every * 60,
    }
    stated = {name: value for name, value in stated.items() if value is not None}
    return Reliability(
        **stated,
        asynchronous=arguments.async_checkpoints,
        by_stage=arguments.stage_checkpoints,
    )


def tariff_of(arguments: argparse.Namespace) -> "Tariff":
    """Prices, powers and tokens from the flags."""
    from perfmodel.planning.layouts import Tariff

    return Tariff(**{f.name: getattr(arguments, f.name, None) for f in fields(Tariff)})


def run_of(
    arguments: argparse.Namespace, problem: Problem, prediction: "Prediction"
) -> "TrainingRun | None":
    """Return the whole training run if `--tokens` is given."""
    from perfmodel.planning.training_run import training_run

    if arguments.tokens is None:
        return None
    return training_run(
        prediction,
        problem,
        tariff=tariff_of(arguments),
        reliability=reliability_of(arguments),
        pue=arguments.pue,
        calibration=arguments.calibration,
    )
