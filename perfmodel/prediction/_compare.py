"""All schedules on one's own model, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perfmodel.errors import LayoutError
from perfmodel.prediction._predict import predict
from perfmodel.prediction._prediction import Prediction
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Cluster, Layout, Model


@dataclass(frozen=True)
class Compared:
    """A schedule's prediction, or why it cannot run."""

    schedule: str
    prediction: Prediction | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = self.prediction.to_dict() if self.prediction else None
        return {"schedule": self.schedule, "prediction": found, "reason": self.reason}


def compare_schedules(
    model: "str | Model",
    cluster: "str | Cluster",
    layout: "str | Layout",
    *,
    schedules: Sequence[str] = (),
    **options: Any,
) -> list[Compared]:
    """Predict a layout under many schedules, fastest first; those that cannot run come last.

    Args:
        model, cluster: as in `predict`.
        layout: everything but the schedule and the number of chunks (schedules that take any number of
            chunks get the layout's own, or 2).
        schedules: names; all that train if empty.
        options: further arguments of `predict`.
    """
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    found = []
    for name in schedules or [n for n in schedule_names() if n != "forward"]:
        looped = name in ("interleaved", "breadth-first")
        try:
            get_schedule(name)
            own = layout.replace(schedule=name, vpp=max(2, layout.vpp) if looped else 1)
            found.append(Compared(name, predict(model, cluster, own, **options)))
        except LayoutError as error:
            found.append(Compared(name, None, str(error)))
    return sorted(found, key=lambda c: c.prediction.step_time_s if c.prediction else float("inf"))
