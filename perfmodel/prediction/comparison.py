"""Compares pipeline schedules on one model; also has Chimera's own performance model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

import numpy as np

from perfmodel import catalog
from perfmodel.display import Report, folded, frame_html, paragraph, shorten_reprs, shows_progress
from perfmodel.errors import LayoutError
from perfmodel.prediction._durations import pass_times
from perfmodel.prediction._fits import needed_memory
from perfmodel.prediction._predict import predict
from perfmodel.prediction._prediction import Prediction
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction.sites import Site
from perfmodel.schedule import (
    ChimeraModel,
    chimera_model,
    get_schedule,
    rabenseifner_s,
    schedule_names,
)
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem
from perfmodel.spec.keywords import JobKeywords

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS: Final = ("step_time_s", "step_time_lo_s", "step_time_hi_s", "bubble_fraction")


@dataclass(frozen=True)
class Compared:
    """A schedule's prediction, or why it cannot run."""

    schedule: str
    """Name of the pipeline schedule."""
    prediction: Prediction | None
    """Its prediction; None if it cannot run."""
    reason: str = ""
    """Reason why it cannot run."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        prediction = self.prediction.to_dict() if self.prediction else None
        return {"schedule": self.schedule, "prediction": prediction, "reason": self.reason}

    def _repr_html_(self) -> str:
        if self.prediction:
            return self.prediction._repr_html_()
        return paragraph(f"{self.schedule}: {self.reason}")


class Comparison(list[Compared]):
    """Predictions of one layout under several schedules, fastest first."""

    def __repr__(self) -> str:
        can_run = [compared for compared in self if compared.prediction]
        fastest = f", fastest={can_run[0].schedule!r}" if can_run else ""
        return f"{type(self).__name__}(schedules={len(self)}, can_run={len(can_run)}{fastest})"

    def to_frame(self) -> "pd.DataFrame":
        """One row per schedule: step_time_s with its interval, bubble_fraction, peak_memory_bytes,
        fits, reason."""
        import pandas as pd

        rows = []
        for compared in self:
            row: dict[str, Any] = {"schedule": compared.schedule}
            if compared.prediction:
                values = compared.prediction.to_dict()
                row |= {name: values[name] for name in _COLUMNS}
                row |= {"peak_memory_bytes": values["memory_bytes"]["peak"], "fits": values["fits"]}
            rows.append(row | {"reason": compared.reason})
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        details = [
            folded(compared.schedule, compared._repr_html_())
            for compared in self
            if compared.prediction
        ]
        return frame_html(self.to_frame()) + "".join(details)


@shows_progress("schedules")
def compare_schedules(
    model: "str | Model | Problem",
    cluster: "str | Cluster | None" = None,
    layout: "str | Layout" = "",
    *,
    schedules: Sequence[str] = (),
    calibration: Path | str | None = None,
    site: Site | None = None,
    strict: bool = False,
    progress: Report | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: "Job | Mapping[str, Any] | None" = None,
    framework: "Framework | str | None" = None,
    **of_job: "Unpack[JobKeywords]",
) -> Comparison:
    """Predict a layout under many schedules, fastest first; those that cannot run come last.

    Args:
        model, cluster: as in `predict`.
        layout: everything but the schedule and the number of chunks (schedules that take any number
            of chunks get the layout's, or 2).
        schedules: names; all that train if empty.
        progress: called per schedule; without one, a bar where there is somebody to see it.
        calibration, site, strict: as in `predict`.
        global_batch, seq_len, dtype, devices, job, framework, of_job: as in `problem`.
    """
    # A job file in place of a model may bring its layout; the schedules to compare replace the one
    # in it.
    if not layout:
        file = catalog.unfiled(model)
        layout = layout if file is None else file.layout
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    compared = []
    # `forward` is the order of inference, which has no backward to compare.
    names = schedules or [n for n in schedule_names() if n != "forward"]
    for done, name in enumerate(names):
        if progress:
            progress(name, done, len(names))
        try:
            vpp = max(2, layout.vpp) if get_schedule(name).looped else 1
            scheduled = layout.replace(schedule=name, vpp=vpp)
            prediction = predict(
                model,
                cluster,
                scheduled,
                global_batch=global_batch,
                seq_len=seq_len,
                dtype=dtype,
                devices=devices,
                job=job,
                framework=framework,
                calibration=calibration,
                site=site,
                strict=strict,
                **of_job,
            )
            compared.append(Compared(name, prediction))
        except LayoutError as error:
            compared.append(Compared(name, None, str(error)))

    def step_s(schedule: Compared) -> float:
        return schedule.prediction.step_time_s if schedule.prediction else inf

    return Comparison(sorted(compared, key=step_s))


def chimera_closed_form(problem: StepProblem, layout: Layout) -> dict[str, ChimeraModel]:
    """Chimera's own performance model (Li and Hoefler 2021, section 3.4) with the times of a
    layout's stages.

    The paper has one T_f and one T_b, of equal stages: `mean` takes all stages to be as long as the
    mean of them, `longest` as the longest.

    Raises:
        LayoutError: the layout's schedule is none of Chimera's, or one for which the paper has no
            closed form.
    """
    name, _, pipelines = layout.effective_schedule.partition(":")
    if name != "chimera":
        raise LayoutError(
            f"schedule {layout.schedule}: Chimera's closed form exists only for schedule=chimera and chimera:N; "
            "use one of these"
        )
    count = int(pipelines or 2)
    passes = pass_times(problem, layout)
    backward_s = passes.backward_input_s + passes.backward_weight_s

    # Gradients of the fullest stage go between a stage's replicas, over the outermost level of the
    # network.
    gradients = max(rank.gradients for rank in needed_memory(problem, layout)) / count
    level = problem.cluster.levels[-1]
    reduce_s = rabenseifner_s(
        gradients, count * layout.dp, level.latency_s, level.bandwidth_bytes_per_s
    )
    models = {}
    for kind, of_stages in (("mean", np.mean), ("longest", np.max)):
        models[kind] = chimera_model(
            layout.pp,
            problem.job.num_microbatches(layout),
            forward_s=float(of_stages(passes.forward_s)),
            backward_s=float(of_stages(backward_s)),
            transfer_s=passes.transfer_s,
            all_reduce_s=reduce_s,
            pipelines=count,
        )
    return models


shorten_reprs(__name__)
