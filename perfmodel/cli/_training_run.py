"""Flags of a whole run: tokens, prices and failures; and how what it takes is said."""

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

from perfmodel.units import counted, figure, long_duration, scaled

if TYPE_CHECKING:
    from perfmodel.planning.goodput import Goodput, Reliability
    from perfmodel.planning.layouts import Tariff
    from perfmodel.planning.training_run import TrainingRun
    from perfmodel.prediction import Prediction
    from perfmodel.spec import Problem


def add_reliability(command: argparse.ArgumentParser) -> None:
    """How often devices fail, what checkpoints and restarts take, and what a site draws."""
    group = command.add_argument_group("failures and energy of a whole run (with --tokens)")
    group.add_argument(
        "--mtbf", type=float, metavar="HOURS",
        help="mean time between failures of one device (default 50,700, as on the 16,384 H100 of Llama 3)",
    )  # fmt: skip
    group.add_argument("--restart", type=float, metavar="MINUTES", help="until a failed run goes on (default 10)")
    group.add_argument(
        "--storage", type=float, metavar="GB/S", help="of checkpoints, all devices together (default 0.122 per device)"
    )
    group.add_argument(
        "--checkpoint-every", type=float, metavar="MINUTES", help="time between checkpoints (default: the best)"
    )
    group.add_argument(
        "--async-checkpoints", action="store_true", help="training goes on while a checkpoint is written"
    )
    group.add_argument(
        "--stage-checkpoints", action="store_true", help="every pipeline stage writes and reads a checkpoint of its own"
    )
    group.add_argument(
        "--pue", type=float, default=1.0, metavar="X", help="energy of the site over its devices' (default 1)"
    )


def reliability_of(arguments: argparse.Namespace) -> "Reliability":
    """As the flags of `add_reliability` have it.

    Raises:
        PerfModelError: times and rates that are not above 0.
    """
    from perfmodel.planning.goodput import Reliability

    given = {
        "device_mtbf_s": arguments.mtbf and arguments.mtbf * 3600,
        "restart_s": arguments.restart and arguments.restart * 60,
        "storage_bytes_per_s": arguments.storage and arguments.storage * 1e9,
        "interval_s": arguments.checkpoint_every and arguments.checkpoint_every * 60,
    }
    said = {name: value for name, value in given.items() if value is not None}
    return Reliability(**said, asynchronous=arguments.async_checkpoints, by_stage=arguments.stage_checkpoints)


def tariff_of(arguments: argparse.Namespace) -> "Tariff":
    """Prices, powers and tokens as given."""
    from perfmodel.planning.layouts import Tariff

    return Tariff(**{f.name: getattr(arguments, f.name, None) for f in fields(Tariff)})


def run_of(arguments: argparse.Namespace, problem: "Problem", prediction: "Prediction") -> "TrainingRun | None":
    """The run that `--tokens` asks for, if it does."""
    from perfmodel.planning.training_run import training_run

    if arguments.tokens is None:
        return None
    return training_run(
        prediction, problem, tariff=tariff_of(arguments), reliability=reliability_of(arguments), pue=arguments.pue,
        calibration=arguments.calibration,
    )  # fmt: skip


def lines(run: "TrainingRun") -> list[str]:
    """Days with their interval and goodput, then money and energy."""
    if run.tokens is None or run.days is None or run.days_lo is None or run.days_hi is None:
        return []
    days = f"{long_duration(run.days * 86400)} for all tokens"
    priced = "no price is known; give --price"
    if run.cost_usd is not None:
        priced = f"${counted(run.cost_usd)} at ${run.usd_per_device_hour:,.2f} per device and hour ({run.price_source})"
    energy = []
    if run.energy_mwh is not None:
        energy = [f"{'at most ' * run.energy_is_bound}{figure(run.energy_mwh, 3)} MWh"]
    return [
        f"{days} ({counted(run.tokens)}; 90 %: {figure(run.days_lo, 3)} to {figure(run.days_hi, 3)} days), "
        f"{', '.join([priced, *energy])}",
        f"goodput {run.goodput.fraction:.1%}: {failures(run.goodput)}",
    ]


def failures(goodput: "Goodput") -> str:
    """What interrupts a run, in one line."""
    told = f"a failure every {long_duration(goodput.mtbf_s)}, {long_duration(goodput.restart_s)} to go on"
    if not goodput.checkpoint_bytes:
        return told
    by_stage = ""
    if goodput.stages:
        sizes = [scaled(end(stage.bytes for stage in goodput.stages), "B") for end in (min, max)]
        by_stage = f" by stage ({sizes[0]} to {sizes[1]})"
    return (
        f"{told}, {figure(goodput.lost_steps, 3)} steps lost, a checkpoint of {scaled(goodput.checkpoint_bytes, 'B')}"
        f"{by_stage} every {long_duration(goodput.interval_s)} ({long_duration(goodput.stall_s)} each)"
    )
