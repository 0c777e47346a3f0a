"""Step times of layouts on a machine with scaled rates, bandwidths and times."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.display import Report
from perfmodel.planning.what_if import Scenario, Setting, model_in_scenario
from perfmodel.prediction import StepProblem, evaluate
from perfmodel.prediction.composition import derivatives_towards
from perfmodel.spec import Layout

FACTORS: Final = (0.5, 2**-0.5, 2**0.5, 2.0)
"""Multiples of a parameter at which step times are computed."""
CHECKED: Final = 16
"""Number of layouts, from the first, whose step times are also computed between the multiples, to
check the interpolation."""
_BETWEEN: Final = (0.6, 0.85, 1.2)
_TOGETHER: Final = (0.7, 1.4)
FELT: Final = 2e-3
"""Relative change of the step below which a parameter has no effect."""
_STEP: Final = 1e-3
"""Relative change of a parameter in difference quotients of durations; learned prices are of single
precision."""


@dataclass(frozen=True)
class Knob:
    """A parameter of the machine that can be scaled."""

    label: str
    settings: tuple[str, ...]
    """Settings of a `Scenario` that the knob multiplies together."""
    is_rate: bool = True
    """Whether more of it makes the step shorter."""

    def scenario(self, factor: float) -> Scenario:
        """The machine with this parameter multiplied by a factor."""
        return Scenario(tuple(Setting(name, "times", factor) for name in self.settings))


KNOBS: Final = {
    "inter_node_bandwidth": Knob("bandwidth between nodes", ("inter_node_bandwidth",)),
    "intra_node_bandwidth": Knob("bandwidth inside nodes", ("intra_node_bandwidth",)),
    "compute_rate": Knob("computing rate", ("compute_rate",)),
    "memory_bandwidth": Knob("memory bandwidth", ("memory_bandwidth",)),
    "latency": Knob("network latency", ("intra_node_latency", "inter_node_latency"), is_rate=False),
    "host_op_s": Knob("host time per kernel", ("host_op_s",), is_rate=False),
    "kernel_gap_s": Knob("gap between kernels", ("kernel_gap_s",), is_rate=False),
}
"""Every knob by its name."""


@dataclass(frozen=True, eq=False)
class Turned:
    """Step times of layouts relative to those on the unchanged machine, by parameter."""

    knobs: tuple[str, ...]
    """Names of the `KNOBS` that the machine has."""
    elasticity: Float[np.ndarray, "layouts knobs"]
    """d log(step time) / d log(parameter), through the timeline."""
    ratio: Float[np.ndarray, "layouts knobs factors"]
    """Step time at `FACTORS`, relative to that on the unchanged machine."""
    checks: tuple[tuple[dict[str, float], Float[np.ndarray, " checked"]], ...]
    """Multiples of parameters, between `FACTORS` or together, and the ratios of the first layouts
    there."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the page."""
        return {
            "factors": list(FACTORS),
            "felt": FELT,
            "knobs": [
                {"name": n, "label": KNOBS[n].label, "is_rate": KNOBS[n].is_rate}
                for n in self.knobs
            ],
            "checks": [{"at": at, "ratio": ratio.tolist()} for at, ratio in self.checks],
        }


def turned(
    problem: StepProblem, layouts: Sequence[Layout], report: Report = lambda *_: None
) -> Turned:
    """Compute step times of layouts as functions of the machine's parameters.

    Args:
        report: called with the parameter that is being scaled, because a hundred layouts take
            seconds.
    """
    base_s = evaluate(problem, layouts).step_time_s

    def ratios_in(scenario: Scenario, count: int) -> Float[np.ndarray, " count"]:
        """Step times of the first layouts in a scenario, relative to the unchanged machine."""
        changed = model_in_scenario(problem, scenario)
        return evaluate(changed, layouts[:count]).step_time_s / base_s[:count]

    # A parameter that leaves the machine as it is (a network inside nodes of one device) is left
    # out.
    unchanged = model_in_scenario(problem, Scenario())
    nudged: dict[str, StepProblem] = {}
    for name, knob in KNOBS.items():
        nudged_problem = model_in_scenario(problem, knob.scenario(1 + _STEP))
        if nudged_problem != unchanged:
            nudged[name] = nudged_problem
    derivatives = derivatives_towards(problem, layouts, list(nudged.values()), _STEP)

    # One parameter after the other, at every factor.
    ratio = np.empty((len(layouts), len(nudged), len(FACTORS)))
    for k, name in enumerate(nudged):
        report(f"what if: {KNOBS[name].label}", k, len(nudged))
        for j, factor in enumerate(FACTORS):
            ratio[:, k, j] = ratios_in(KNOBS[name].scenario(factor), len(layouts))

    # The page multiplies the ratios of single parameters. Checks at values between the factors,
    # and with all parameters at once, show how far that carries.
    report("what if: several at once", len(nudged), len(nudged))
    felt = [name for k, name in enumerate(nudged) if np.abs(ratio[:, k] - 1).max() > FELT]
    points = [{name: factor} for name, factor in product(felt, _BETWEEN)]
    if felt:
        points += [dict.fromkeys(felt, factor) for factor in _TOGETHER]
    return Turned(
        knobs=tuple(nudged),
        elasticity=derivatives.by_parameter / derivatives.step_s[:, None],
        ratio=ratio,
        checks=tuple((point, ratios_in(_joint(point), CHECKED)) for point in points),
    )


def _joint(point: dict[str, float]) -> Scenario:
    """The machine with several parameters multiplied, each by its own factor."""
    settings: list[Setting] = []
    for name, factor in point.items():
        settings += KNOBS[name].scenario(factor).settings
    return Scenario(tuple(settings))
