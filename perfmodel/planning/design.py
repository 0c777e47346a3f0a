"""Inverse questions: devices or memory needed, best upgrades, when one layout overtakes another."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from perfmodel import catalog
from perfmodel.display import Report, frame_html, shorten_reprs
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.planning.layouts import Goal
from perfmodel.planning.layouts.evaluation import fastest
from perfmodel.planning.layouts.questions import Question
from perfmodel.planning.what_if import HARDWARE, Scenario, Setting, in_scenario, step_s
from perfmodel.prediction import StepProblem, check_layout
from perfmodel.prediction.memory import fit_probabilities, fullness, needed_memory
from perfmodel.spec import Layout
from perfmodel.units import MIN_FIT, number_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class DevicesNeeded:
    """The fewest devices that reach a step time."""

    below_s: float
    devices: int | None
    """The fewest devices whose step is short enough; None if even all devices are too slow."""
    layout: str
    """The best layout on this number of devices; the fastest layout if none is fast enough."""
    step_time_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dict(vars(self))


def devices_for(question: Question, below_s: float) -> DevicesNeeded:
    """Find the fewest devices, up to the question's number, on which some layout takes less than
    `below_s` per step.

    Exact over the question's space, which has to offer fewer devices
    (`default_space(..., fewer_devices=True)`).

    Raises:
        LayoutError: no layout fits on any number of devices.
    """
    # "Fewest devices" is the objective, "fast enough" a constraint: one exact search answers.
    smallest = fastest(
        question,
        Goal.parse(question.step_problem, "devices", [f"step_time_s < {below_s!r}"]),
    )
    if smallest is None:
        best = fastest(question, Goal.parse(question.step_problem))
        if best is None:
            raise LayoutError(
                f"no layout of {question.problem.model.name} fits on {question.devices} devices or fewer"
            )
        return DevicesNeeded(
            below_s, None, question.problem.notation(best.layout), best.step_time_s
        )
    return DevicesNeeded(
        below_s,
        smallest.layout.devices,
        question.problem.notation(smallest.layout),
        smallest.step_time_s,
    )


@dataclass(frozen=True)
class MemoryNeeded:
    """The device memory that a layout needs to fit."""

    layout: str
    memory_bytes: float
    """Least memory of a device: the fullest rank's peak over the share that fragmentation leaves
    usable."""
    likely_bytes: float
    """Device memory with which the layout fits with probability `MIN_FIT`, which searches require
    of a recommended layout."""
    fits_probability: float
    """Probability that it fits into the cluster's device."""
    peak_bytes: float
    """Peak of the fullest pipeline rank."""
    has_bytes: float
    """Memory that the cluster's device has."""
    parts_bytes: dict[str, float]
    """Parts of the fullest rank's peak."""
    devices: tuple[str, ...]
    """Catalog devices with `likely_bytes`, the smallest first."""

    @property
    def fits(self) -> bool:
        """Whether the layout fits the device's present memory."""
        return self.memory_bytes <= self.has_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"fits": self.fits}


def memory_to_fit(problem: StepProblem, layout: Layout) -> MemoryNeeded:
    """Find the least device memory with which a layout fits by the memory model, and with which it
    is likely to fit.

    peak <= memory (1 - margin), so memory = peak / (1 - margin). Measured peaks scatter about
    predicted ones, so a device that just holds the predicted peak is large enough in about half of
    the cases.

    Raises:
        LayoutError: a layout that cannot run with any amount of memory.
    """
    check_layout(problem.model, problem.cluster, problem.job, layout)
    stages = needed_memory(problem, layout)
    memory = max(stages, key=lambda stage: stage.peak)
    need = problem.framework.memory.memory_to_hold(memory.peak)
    has_bytes = problem.cluster.device.memory_bytes

    # A likely fit asks for more: measured peaks scatter about predictions, by `memory_spread`,
    # relative to what the framework's own counter would show.
    shown_bytes = fullness(problem, layout, stages) * has_bytes
    likely_bytes = max(need, shown_bytes / problem.site.memory_spread().share_that_fits(MIN_FIT))
    parts = {name: value for name, value in memory.to_dict().items() if name != "peak"}
    known = [catalog.device(name) for name in catalog.devices() if name != "cpu"]
    large_enough = [device for device in known if device.memory_bytes >= likely_bytes]
    enough = sorted((device.memory_bytes, device.name) for device in large_enough)
    return MemoryNeeded(
        layout=problem.notation(layout),
        memory_bytes=need,
        likely_bytes=likely_bytes,
        fits_probability=fit_probabilities(problem, [layout])[0],
        peak_bytes=memory.peak,
        has_bytes=has_bytes,
        parts_bytes=parts,
        devices=tuple(name for _, name in enough),
    )


MOST: Final = 1000.0
"""Largest multiple of the parameter that is considered, and inverse of the smallest."""
POINTS: Final = 25
_CLOSE: Final = 1e-3


@dataclass(frozen=True)
class Overtaking:
    """The value of a parameter at which two layouts are equally fast."""

    parameter: str
    """Name of the parameter."""
    first: str
    """Notation of one layout."""
    second: str
    """Notation of the other."""
    first_s: float
    """Step time of the first on the machine as it is."""
    second_s: float
    """Step time of the second on the machine as it is."""
    multiple: float | None
    """Multiple of the parameter nearest to 1 at which they are equal; None if one layout stays
    ahead from 1 / `MOST` to `MOST` times the parameter."""
    equal_s: float | None
    """Step time at which they are equal."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def overtake(
    problem: StepProblem,
    first: Layout,
    second: Layout,
    parameter: str = "inter_node_bandwidth",
) -> Overtaking:
    """Find the factor on a machine parameter at which two layouts are equally fast.

    The difference of the step times is computed at multiples that are 1.3 times apart. Where its
    sign changes nearest to 1, the crossing is found by bisection. Two crossings between
    neighbouring multiples would be missed.

    Args:
        problem: model, job, cluster and cost models.
        first, second: layouts, in any order.
        parameter: as `perfmodel whatif` names it.

    Raises:
        LayoutError: a layout that cannot run.
        UnknownNameError: no such parameter.
    """
    # Refuse an unknown parameter before pricing anything.
    Scenario.parse([f"{parameter}=2x"])
    for layout in (first, second):
        check_layout(problem.model, problem.cluster, problem.job, layout)

    def difference_s(log_multiple: float) -> float:
        scenario = Scenario((Setting(parameter, "times", float(np.exp(log_multiple))),))
        return step_s(problem, first, scenario) - step_s(problem, second, scenario)

    first_s = step_s(problem, first, Scenario())
    second_s = step_s(problem, second, Scenario())
    grid = np.linspace(0, np.log(MOST), POINTS)
    crossing = None

    # Search outwards from 1 in both directions in turn, so that the crossing nearest to today's
    # machine is found first.
    for near, far in pairwise(grid):
        for direction in (1, -1):
            low, high = direction * near, direction * far
            difference_at_low_s = difference_s(low)
            if difference_at_low_s * difference_s(high) <= 0 and difference_at_low_s != 0:
                crossing = _bisected(difference_s, low, high)
                break
        if crossing is not None:
            break
    if crossing is None:
        return Overtaking(parameter, str(first), str(second), first_s, second_s, None, None)
    multiple = float(np.exp(crossing))
    scenario_of_crossing = Scenario((Setting(parameter, "times", multiple),))
    return Overtaking(
        parameter,
        str(first),
        str(second),
        first_s,
        second_s,
        multiple,
        step_s(problem, first, scenario_of_crossing),
    )


def _bisected(difference_s, low: float, high: float) -> float:
    """Find a change of sign by bisection; return the far end of the last interval."""
    at_low = difference_s(low)
    while abs(high - low) > _CLOSE:
        middle = (low + high) / 2
        low, high = (middle, high) if difference_s(middle) * at_low > 0 else (low, middle)
    return high


PARAMETERS: Final = (*HARDWARE, "memory_bytes")


@dataclass(frozen=True)
class Upgrade:
    """The gain from improving one parameter."""

    parameter: str
    change: str
    """Change, such as `+10%`; latencies are lowered instead."""
    elasticity: float
    """d log(step time) / d log(parameter) at the best layout. By the envelope theorem also that of
    the best step time over all layouts, wherever the best layout is unique."""
    kept_gain: float
    """Share of the step time saved with the same layout."""
    gain: float
    """Share of the step time saved with the layout that is best after the upgrade."""
    layout: str
    """Notation of the best layout after the upgrade."""
    changes_layout: bool
    price: float | None = None
    """Price of the change."""
    gain_per_price: float | None = None


@dataclass(frozen=True)
class Upgrades:
    """The gains from improving each parameter, largest first."""

    layout: str
    """The best layout of the machine as it is."""
    step_time_s: float
    share: float
    upgrades: tuple[Upgrade, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def to_frame(self) -> "pd.DataFrame":
        """One row per parameter."""
        import pandas as pd

        return pd.DataFrame([asdict(upgrade) for upgrade in self.upgrades])

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def rank_upgrades(
    question: Question,
    *,
    share: float = 0.1,
    prices: Mapping[str, float] | None = None,
    progress: Report | None = None,
) -> Upgrades:
    """Compute the time saved by improving each parameter of the machine on its own.

    Args:
        question: job and layouts; its space is searched again on every machine, exactly.
        share: share by which a bandwidth, a rate or the memory is raised, and a latency lowered.
        prices: price of each such upgrade, in any unit; upgrades without a price are not ranked by
            money.
        progress: called with the name of each stage and how far it is.

    Raises:
        LayoutError: no layout fits on the machine as it is.
        PerfModelError: a share outside 0 to 1, a price of 0 or less, or an unknown parameter.
    """
    if not 0 < share < 1:
        raise PerfModelError(f"design: the share must be between 0 and 1, got {share:g}")
    prices = prices or {}
    for name, price in prices.items():
        if name not in PARAMETERS:
            raise UnknownNameError("parameter", name, PARAMETERS)
        if not price > 0:
            raise PerfModelError(f"design: the price of {name} must be above 0, got {price:g}")
    problem = question.step_problem
    now = fastest(question, Goal.parse(problem))
    if now is None:
        name = question.problem.model.name
        raise LayoutError(
            f"no layout of {name} fits on {number_of(question.devices, 'device')}; run `search` to see why"
        )
    before_s = step_s(problem, now.layout, Scenario())
    slopes = in_scenario(problem, now.layout, Scenario()).sensitivity
    upgrades = []
    for done, name in enumerate(PARAMETERS):
        if progress:
            progress(f"search with better {name}", done, len(PARAMETERS))

        # More of a rate is better, less of a latency.
        change = -share if name.endswith("latency") else share
        scenario = Scenario((Setting(name, "times", 1 + change),))

        # Memory changes no duration of a layout that already fits. Its gain comes from layouts that
        # now fit.
        kept_s = before_s if name == "memory_bytes" else step_s(problem, now.layout, scenario)
        best = _best_on(question.in_scenario(scenario), _Choice(now.layout, kept_s))
        gain = 1 - best.step_s / before_s
        price = prices.get(name)
        upgrade = Upgrade(
            name,
            f"{change:+.0%}",
            slopes.get(name, 0.0),
            1 - kept_s / before_s,
            gain,
            question.problem.notation(best.layout),
            best.layout != now.layout,
            price,
            price and gain / price,
        )
        upgrades.append(upgrade)
    if prices:
        upgrades.sort(key=lambda upgrade: (-(upgrade.gain_per_price or 0.0), -upgrade.gain))
    else:
        upgrades.sort(key=lambda upgrade: -upgrade.gain)
    return Upgrades(question.problem.notation(now.layout), before_s, share, tuple(upgrades))


class _Choice(NamedTuple):
    """A layout and its step time."""

    layout: Layout
    step_s: float


def _best_on(question: Question, current: _Choice) -> _Choice:
    """The fastest layout on a machine, or the current one if it is as fast there."""
    challenger = fastest(question, Goal.parse(question.step_problem))
    if challenger is None or challenger.layout == current.layout:
        return current
    # `fastest` works in single precision. Compare both layouts by the same exact step time, so
    # that rounding is not a gain.
    challenger_s = step_s(question.step_problem, challenger.layout, Scenario())
    if challenger_s < current.step_s:
        return _Choice(challenger.layout, challenger_s)
    return current


shorten_reprs(__name__)
