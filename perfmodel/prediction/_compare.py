"""All schedules on one's own model, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from perfmodel import catalog
from perfmodel.display import Report, folded, frame_html, paragraph, shows_progress
from perfmodel.errors import LayoutError
from perfmodel.prediction._predict import predict
from perfmodel.prediction._prediction import Prediction
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Cluster, Layout, Model, Problem

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS: Final = ("step_time_s", "step_time_lo_s", "step_time_hi_s", "bubble_fraction")


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

    def _repr_html_(self) -> str:
        return self.prediction._repr_html_() if self.prediction else paragraph(f"{self.schedule}: {self.reason}")


class Comparison(list[Compared]):
    """Schedules of one layout, the fastest first."""

    def __repr__(self) -> str:
        run = [one for one in self if one.prediction]
        fastest = f", fastest={run[0].schedule!r}" if run else ""
        return f"{type(self).__name__}(schedules={len(self)}, can_run={len(run)}{fastest})"

    def to_frame(self) -> "pd.DataFrame":
        """One row per schedule: step_time_s with its interval, bubble_fraction, peak_memory_bytes, fits, reason."""
        import pandas as pd

        rows = []
        for one in self:
            row: dict[str, Any] = {"schedule": one.schedule}
            if one.prediction:
                values = one.prediction.to_dict()
                row |= {name: values[name] for name in _COLUMNS}
                row |= {"peak_memory_bytes": values["memory_bytes"]["peak"], "fits": values["fits"]}
            rows.append(row | {"reason": one.reason})
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame()) + "".join(
            folded(one.schedule, one._repr_html_()) for one in self if one.prediction
        )


@shows_progress("schedules")
def compare_schedules(
    model: "str | Model | Problem",
    cluster: "str | Cluster | None" = None,
    layout: "str | Layout" = "",
    *,
    schedules: Sequence[str] = (),
    progress: Report | None = None,
    **words: Any,
) -> Comparison:
    """Predict a layout under many schedules, fastest first; those that cannot run come last.

    Args:
        model, cluster: as in `predict`.
        layout: everything but the schedule and the number of chunks (schedules that take any number of
            chunks get the layout's own, or 2).
        schedules: names; all that train if empty.
        progress: called per schedule; without one, a bar where there is somebody to see it.
        words: further arguments of `predict`.
    """
    if not layout and (file := catalog.unfiled(model)) is not None:
        layout = file.layout
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    found = []
    names = schedules or [n for n in schedule_names() if n != "forward"]
    for done, name in enumerate(names):
        if progress:
            progress(name, done, len(names))
        try:
            own = layout.replace(schedule=name, vpp=max(2, layout.vpp) if get_schedule(name).looped else 1)
            found.append(Compared(name, predict(model, cluster, own, **words)))
        except LayoutError as error:
            found.append(Compared(name, None, str(error)))
    return Comparison(sorted(found, key=lambda c: c.prediction.step_time_s if c.prediction else float("inf")))
