"""How many devices a deadline needs."""

from dataclasses import dataclass
from typing import Any

from perfmodel.errors import LayoutError
from perfmodel.planning.layouts import Goal, Question, fastest


@dataclass(frozen=True)
class DevicesNeeded:
    """The fewest devices with a step short enough."""

    below_s: float
    devices: int | None
    """None where not even all devices do."""
    layout: str
    """On so few devices; of the fastest where none is fast enough."""
    step_time_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dict(vars(self))


def devices_for(question: Question, below_s: float) -> DevicesNeeded:
    """The fewest devices, up to the question's, on which some layout takes less than `below_s` a step.

    Exact over the question's space, which has to offer fewer devices (`default_space(..., fewer_devices=True)`).

    Raises:
        LayoutError: no layout fits on any number of devices.
    """
    found = fastest(question, Goal.parse(question.step_problem, "devices", [f"step_time_s < {below_s!r}"]))
    if found is None:
        best = fastest(question, Goal.parse(question.step_problem))
        if best is None:
            raise LayoutError(f"no layout of {question.problem.model.name} fits on {question.devices} devices or fewer")
        return DevicesNeeded(below_s, None, str(best.layout), best.step_time_s)
    return DevicesNeeded(below_s, found.layout.devices, str(found.layout), found.step_time_s)
