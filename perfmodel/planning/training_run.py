"""What training on so many tokens takes with one layout: days, money and energy, failures included."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.planning.goodput import Goodput, Reliability, goodput
from perfmodel.planning.layouts import MILLION, Goal, Interval, Tariff
from perfmodel.prediction import Prediction, step_problem_of
from perfmodel.spec import Problem
from perfmodel.units import positive

DAY_S = 86400.0
JOULES_PER_MWH = 3.6e9


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """A run of steps with its failures; `_lo` and `_hi` are the ends of the step time's 90 % interval."""

    tokens: float | None
    """To train on; None: not said, and only what a million tokens take is known."""
    goodput: Goodput
    days: float | None
    days_lo: float | None
    days_hi: float | None
    usd_per_device_hour: float | None
    price_source: str
    """Whose list price that is; `given` where the user said it."""
    cost_usd: float | None
    """Of all tokens."""
    usd_per_million_tokens: float | None
    usd_per_million_tokens_lo: float | None
    usd_per_million_tokens_hi: float | None
    energy_j: float | None
    """Of the devices times the power usage effectiveness, for all tokens; None where the device's power is not known.
    While work is lost and the run restarts, devices draw what they draw in steps."""
    energy_per_million_tokens_j: float | None
    energy_is_bound: bool
    """Whether the power of a waiting device is not known, and that of a busy one stands for it."""

    @property
    def energy_mwh(self) -> float | None:
        """The energy of all tokens in megawatt hours."""
        return None if self.energy_j is None else self.energy_j / JOULES_PER_MWH

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"goodput": self.goodput.to_dict(), "energy_mwh": self.energy_mwh}


def training_run(
    prediction: Prediction,
    problem: Problem,
    *,
    tariff: Tariff | None = None,
    reliability: Reliability | None = None,
    pue: float = 1.0,
    calibration: Path | str | None = None,
) -> TrainingRun:
    """What training takes whose steps are as predicted.

    Args:
        prediction: of one step, for `problem` on `calibration`.
        problem: what was predicted.
        tariff: prices, powers and tokens, where they are not the catalog's.
        reliability: of the devices; that of published runs if not given.
        pue: power usage effectiveness, energy that the site draws over that of the devices.

    Raises:
        PerfModelError: a power usage effectiveness below 1; a tariff that is none.
    """
    positive("pue", pue)
    if pue < 1:
        raise PerfModelError(f"pue is the site's energy over the devices', at least 1; got {pue:g}")
    step_problem = step_problem_of(problem.replace(global_batch=prediction.global_batch), calibration)
    given = tariff or Tariff()
    known = given.completed(step_problem)
    is_bound = known.power_w is not None and known.idle_power_w is None
    priced = replace(known, tokens=MILLION, idle_power_w=known.power_w if is_bound else known.idle_power_w)
    step_s = [prediction.step_time_s, prediction.step_time_lo_s, prediction.step_time_hi_s]
    quantity = Goal(step_problem, tariff=priced).of([prediction], Interval.exactly(np.array(step_s)))
    lasting = goodput(problem, prediction.layout, prediction.step_time_s, reliability)

    def of_a_million(name: str) -> list[float]:
        """At the predicted step time and the ends of its interval, with failures."""
        return (np.asarray(quantity(name).lo, float) / lasting.fraction).tolist()

    nothing: list[float | None] = [None] * 3
    millions = None if known.tokens is None else known.tokens / MILLION
    days = nothing if millions is None else [millions * s / DAY_S for s in of_a_million("train_time_s")]
    usd = nothing if known.price_per_device_hour is None else of_a_million("cost")
    energy_j = None if known.power_w is None else pue * of_a_million("energy_j")[0]
    return TrainingRun(
        tokens=known.tokens,
        goodput=lasting,
        days=days[0],
        days_lo=days[1],
        days_hi=days[2],
        usd_per_device_hour=known.price_per_device_hour,
        price_source="given" if given.price_per_device_hour is not None else problem.cluster.list_price[1],
        cost_usd=None if millions is None or usd[0] is None else millions * usd[0],
        usd_per_million_tokens=usd[0],
        usd_per_million_tokens_lo=usd[1],
        usd_per_million_tokens_hi=usd[2],
        energy_j=None if millions is None or energy_j is None else millions * energy_j,
        energy_per_million_tokens_j=energy_j,
        energy_is_bound=is_bound,
    )
