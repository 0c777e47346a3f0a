"""How much faster (or slower) a part of the machine must be for one layout to beat another."""

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from perfmodel.planning.what_if import Scenario, Setting, step_s
from perfmodel.prediction import StepProblem, check_layout
from perfmodel.spec import Layout

MOST: Final = 1000.0
"""Multiples, and fractions, of the parameter that are looked at."""
POINTS: Final = 25
_CLOSE: Final = 1e-3


@dataclass(frozen=True)
class Overtaking:
    """Where two layouts change places along one parameter."""

    parameter: str
    first: str
    second: str
    first_s: float
    """Step times on the machine as it is."""
    second_s: float
    multiple: float | None
    """Of the parameter, the nearest to 1, at which they are equal; None where one stays ahead up to `MOST` times and
    down to a `MOST`-th."""
    equal_s: float | None
    """Step time there."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def overtake(
    problem: StepProblem, first: Layout, second: Layout, parameter: str = "inter_node_bandwidth"
) -> Overtaking:
    """The multiple of a parameter of the machine at which two layouts take equally long.

    The difference of step times is taken at multiples spread evenly in their logarithm; between those next to 1 where
    its sign changes it is bisected. Two crossings between neighbouring multiples (1.3 times apart) would be missed.

    Args:
        problem: model, job, cluster and cost models.
        first, second: layouts; whichever is behind now.
        parameter: as `perfmodel whatif` names it.

    Raises:
        LayoutError: a layout that cannot run.
        UnknownNameError: no such parameter.
    """
    Scenario.parse([f"{parameter}=2x"])
    for layout in (first, second):
        check_layout(problem.model, problem.cluster, problem.job, layout)

    def difference_s(log_multiple: float) -> float:
        scenario = Scenario((Setting(parameter, "times", float(np.exp(log_multiple))),))
        return step_s(problem, first, scenario) - step_s(problem, second, scenario)

    first_s, second_s = (step_s(problem, layout, Scenario()) for layout in (first, second))
    grid = np.linspace(0, np.log(MOST), POINTS)
    crossing = None
    for at, before in zip(grid[1:], grid[:-1], strict=True):  # outwards, both ways in turn
        for way in (1, -1):
            low, high = way * before, way * at
            at_low = difference_s(low)
            if at_low * difference_s(high) <= 0 and at_low != 0:
                crossing = _bisected(difference_s, low, high)
                break
        if crossing is not None:
            break
    if crossing is None:
        return Overtaking(parameter, str(first), str(second), first_s, second_s, None, None)
    there = Scenario((Setting(parameter, "times", float(np.exp(crossing))),))
    multiple = float(np.exp(crossing))
    return Overtaking(parameter, str(first), str(second), first_s, second_s, multiple, step_s(problem, first, there))


def _bisected(difference_s, low: float, high: float) -> float:
    """Where the sign changes; the far end of the last interval, at which the change has happened."""
    at_low = difference_s(low)
    while abs(high - low) > _CLOSE:
        middle = (low + high) / 2
        low, high = (middle, high) if difference_s(middle) * at_low > 0 else (low, middle)
    return high
