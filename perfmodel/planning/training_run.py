"""Computes days, cost and energy of training on a number of tokens, failures included."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perfmodel.display import shorten_reprs
from perfmodel.errors import PerfModelError
from perfmodel.planning.goodput import Goodput, Reliability, goodput
from perfmodel.planning.layouts import MILLION, Goal, Tariff
from perfmodel.planning.layouts.expressions import Interval
from perfmodel.prediction import Prediction, StepProblem, step_problem_of
from perfmodel.spec import Problem
from perfmodel.units import counted, figure, long_duration, positive, scaled, span

DAY_S = 86400.0
JOULES_PER_MWH = 3.6e9


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A training run with failures. Fields in `_lo` and `_hi` belong to the ends of the step time's
    90 % interval."""

    tokens: float | None
    """Tokens to train on; None if not stated, so that results are per million tokens."""
    goodput: Goodput
    days: float | None
    days_lo: float | None
    days_hi: float | None
    usd_per_device_hour: float | None
    price_source: str
    """Provider of the list price; `given` if the user states the price."""
    cost_usd: float | None
    """Cost of training on all tokens."""
    usd_per_million_tokens: float | None
    usd_per_million_tokens_lo: float | None
    usd_per_million_tokens_hi: float | None
    energy_j: float | None
    """Energy of the devices times the power usage effectiveness, for all tokens; None where their
    power is not known. While work is repeated and the run restarts, devices are assumed to draw the
    power of a training step."""
    energy_per_million_tokens_j: float | None
    energy_is_bound: bool
    """Whether the energy is an upper bound, because the power of waiting devices is unknown and
    that of busy ones is used."""

    @property
    def energy_mwh(self) -> float | None:
        """The energy of the run in megawatt hours."""
        return None if self.energy_j is None else self.energy_j / JOULES_PER_MWH

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {
            "goodput": self.goodput.to_dict(),
            "energy_mwh": self.energy_mwh,
        }


def training_run(
    prediction: Prediction,
    problem: Problem,
    *,
    tariff: Tariff | None = None,
    reliability: Reliability | None = None,
    pue: float = 1.0,
    calibration: Path | str | None = None,
) -> TrainingRun:
    """Compute time, cost and energy of a training run from a prediction.

    Args:
        prediction: prediction of one step, for `problem` on `calibration`.
        problem: problem of the prediction.
        tariff: prices, powers and tokens, where they are not the catalog's.
        reliability: failure rates of devices; those of published runs if not given.
        pue: power usage effectiveness, energy that the site draws over that of the devices.

    Raises:
        PerfModelError: a power usage effectiveness below 1; an invalid tariff.
    """
    positive("pue", pue)
    if pue < 1:
        raise PerfModelError(
            f"pue must be at least 1, because it is the site's energy divided by the devices'; got {pue:g}"
        )
    step_problem = step_problem_of(
        problem.replace(global_batch=prediction.global_batch), calibration
    )
    stated = tariff or Tariff()
    known = stated.completed(step_problem)

    run_goodput = goodput(problem, prediction.layout, prediction.step_time_s, reliability)
    per_million = _per_million_tokens(step_problem, prediction, known, run_goodput)

    # Quantities of all tokens are multiples of those of a million.
    millions = None if known.tokens is None else known.tokens / MILLION
    days: list[float | None] = [None, None, None]
    if millions is not None:
        days = [millions * seconds / DAY_S for seconds in per_million.train_time_s]
    usd = per_million.cost_usd
    energy_j = None if per_million.energy_j is None else pue * per_million.energy_j
    price_source = problem.cluster.list_price[1]
    if stated.price_per_device_hour is not None:
        price_source = "given"
    return TrainingRun(
        tokens=known.tokens,
        goodput=run_goodput,
        days=days[0],
        days_lo=days[1],
        days_hi=days[2],
        usd_per_device_hour=known.price_per_device_hour,
        price_source=price_source,
        cost_usd=None if millions is None or usd[0] is None else millions * usd[0],
        usd_per_million_tokens=usd[0],
        usd_per_million_tokens_lo=usd[1],
        usd_per_million_tokens_hi=usd[2],
        energy_j=None if millions is None or energy_j is None else millions * energy_j,
        energy_per_million_tokens_j=energy_j,
        energy_is_bound=_energy_is_bound(known),
    )


class _PerMillionTokens(NamedTuple):
    """Quantities of a million tokens, failures included. Lists hold the value at the predicted step
    time, then those at the lower and the upper end of its interval."""

    train_time_s: list[float]
    cost_usd: list[float] | list[None]
    """None where no price is known."""
    energy_j: float | None
    """Energy of the devices at the predicted step time; None where their power is not known."""


def _energy_is_bound(tariff: Tariff) -> bool:
    """Whether the idle power is not known, so that waiting devices are taken to draw full power,
    which makes the energy an upper bound."""
    return tariff.power_w is not None and tariff.idle_power_w is None


def _per_million_tokens(
    problem: StepProblem, prediction: Prediction, tariff: Tariff, run_goodput: Goodput
) -> _PerMillionTokens:
    """Time, cost and energy of a million tokens."""
    idle_power_w = tariff.power_w if _energy_is_bound(tariff) else tariff.idle_power_w
    priced = replace(tariff, tokens=MILLION, idle_power_w=idle_power_w)
    step_s = [prediction.step_time_s, prediction.step_time_lo_s, prediction.step_time_hi_s]
    quantity = Goal(problem, tariff=priced).quantities_of(
        [prediction], Interval.exactly(np.array(step_s))
    )

    def with_failures(name: str) -> list[float]:
        # Failures stretch time, and with it money and energy, by 1 / goodput.
        return (np.asarray(quantity(name).lo, float) / run_goodput.fraction).tolist()

    return _PerMillionTokens(
        train_time_s=with_failures("train_time_s"),
        cost_usd=(
            [None, None, None] if tariff.price_per_device_hour is None else with_failures("cost")
        ),
        energy_j=None if tariff.power_w is None else with_failures("energy_j")[0],
    )


def run_lines(run: TrainingRun, prediction: Prediction) -> list[str]:
    """Format days with their interval, goodput, cost and energy of a run with the prediction's
    step."""
    if run.tokens is None or run.days is None or run.days_lo is None or run.days_hi is None:
        return []
    samples = f"all tokens ({counted(run.tokens)}; "
    if prediction.sample_unit != "tokens":
        # Convolutional networks have one token per image.
        count = counted(run.tokens / prediction.tokens_per_counted_sample)
        tokens = counted(run.tokens)
        in_tokens = "" if count == tokens else f"{tokens} tokens; "
        samples = f"{count} {prediction.sample_unit} ({in_tokens}"
    priced = "no price is known; give --price"
    if run.cost_usd is not None:
        priced = f"${counted(run.cost_usd)} at ${run.usd_per_device_hour:,.2f} per device and hour ({run.price_source})"
    energy = []
    if run.energy_mwh is not None:
        energy = [f"{'at most ' * run.energy_is_bound}{figure(run.energy_mwh, 3)} MWh"]
    return [
        f"{long_duration(run.days * 86400)} for {samples}90 %: {span(figure(run.days_lo, 3), figure(run.days_hi, 3))} days), "
        f"{', '.join([priced, *energy])}",
        f"goodput {run.goodput.fraction:.1%}: {failures(run.goodput)}",
    ]


def failures(goodput: Goodput) -> str:
    """One line about failures and checkpoints."""
    interruptions = (
        f"expect a failure every {long_duration(goodput.mtbf_s)}; each costs {long_duration(goodput.restart_s)} to "
        "restart"
    )
    if not goodput.checkpoint_bytes:
        return interruptions
    by_stage = ""
    if goodput.stages:
        stage_bytes = [stage.bytes for stage in goodput.stages]
        by_stage = (
            f" by stage ({span(scaled(min(stage_bytes), 'B'), scaled(max(stage_bytes), 'B'))})"
        )
    size = scaled(goodput.checkpoint_bytes, "B")
    return (
        f"{interruptions} and {figure(goodput.lost_steps, 3)} steps to repeat; a checkpoint of {size}{by_stage} every "
        f"{long_duration(goodput.interval_s)} ({long_duration(goodput.stall_s)} each)"
    )


shorten_reprs(__name__)
