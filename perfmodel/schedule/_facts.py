"""A schedule in figures: time and bubble, memory, staleness; what the papers' comparison tables hold."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.display import frame_html
from perfmodel.errors import PerfModelError
from perfmodel.schedule._memory import peak_live
from perfmodel.schedule._optimise import PassTimes, starts_and_ends
from perfmodel.schedule._registry import Scheduler, get_schedule
from perfmodel.schedule._schedule import Schedule
from perfmodel.schedule._versions import weight_versions

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, kw_only=True)
class ScheduleFacts:
    """One row of a comparison; memory in units of one p-th of the model (its weights, a micro-batch's activations)."""

    schedule: str
    stages: int
    micro_batches: int
    step_s: float
    """Time of one step; without flush between steps, how much later each next one ends."""
    bubble_fraction: float
    """Idle share of the devices during a step."""
    activations: tuple[float, float]
    """Most micro-batches alive on the device that needs least, and on the one that needs most."""
    weights: tuple[int, int]
    """Copies and versions of a stage's weights, likewise."""
    version_difference: int
    """Largest of any device once the pipeline is full; 1 without staleness."""
    update_sequences: int
    """Independent sequences of updates (TiMePReSt, section 4.4)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def to_frame(self) -> "pd.DataFrame":
        """One row; `activations` and `weights` by their least and most, as `activations_least` and so on."""
        import pandas as pd

        row = self.to_dict()
        for name in ("activations", "weights"):
            row[f"{name}_least"], row[f"{name}_most"] = row.pop(name)
        return pd.DataFrame([row])

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def schedule_facts(
    name: str,
    stages: int,
    micro_batches: int,
    *,
    forward_s: float = 1.0,
    backward_s: float = 2.0,
    weight_share: float = 0.5,
    transfer_s: float = 0.0,
    chunks: int = 1,
) -> ScheduleFacts:
    """Figures of a schedule over a model whose p-th part takes given times.

    Args:
        name: registered schedule.
        stages: p, devices of the pipeline; each runs a p-th of the model for every micro-batch.
        micro_batches: of one step.
        forward_s, backward_s: time of a micro-batch on a p-th of the model.
        weight_share: share of the backward that is its weight gradient.
        transfer_s: of a message between neighbouring stages.
        chunks: model chunks per device, for schedules that take any number.

    Raises:
        UnknownNameError, LayoutError: unknown or impossible schedules.
        PerfModelError: times that are no times, or a step that takes none.
    """
    scheduler = get_schedule(name)
    schedule = scheduler(stages, micro_batches, chunks)
    # replicas hold whole p-ths of the model, chunks of one pipeline parts of it; slices parts of a sequence
    part = stages / schedule.n_stages / schedule.slices
    times = PassTimes.uniform(
        schedule.n_stages, forward_s * part, backward_s * part, weight_share=weight_share, transfer_s=transfer_s
    )
    step_s = _step_s(scheduler, schedule, times, micro_batches, chunks)
    if not step_s > 0:
        raise PerfModelError(f"schedule {scheduler.label}: a step without time has no bubble; give times above 0")
    busy_s = float(times.of(schedule).sum()) / stages
    if scheduler.asynchronous:
        schedule = scheduler(stages, micro_batches, chunks, 2 * max(2, stages))
    versions = weight_versions(schedule, scheduler.weights)
    alive = peak_live(schedule, np.ones(schedule.n_stages)) * part
    kept = versions.held * schedule.replicas
    return ScheduleFacts(
        schedule=scheduler.label,
        stages=stages,
        micro_batches=micro_batches,
        step_s=step_s,
        bubble_fraction=max(0.0, 1 - busy_s / step_s),
        activations=(float(alive.min()), float(alive.max())),
        weights=(int(kept.min()), int(kept.max())),
        version_difference=int(versions.steady_difference.max()),
        update_sequences=versions.sequences,
    )


def _step_s(scheduler: Scheduler, schedule: Schedule, times: PassTimes, micro_batches: int, chunks: int) -> float:
    if not (scheduler.asynchronous or scheduler.staggered):
        return float(starts_and_ends(schedule, times)[1].max())
    few = max(2, schedule.devices)
    ends = [
        starts_and_ends(scheduler(schedule.devices, micro_batches, chunks, steps), times)[1].max()
        for steps in (few, 2 * few)
    ]
    return float(ends[1] - ends[0]) / few
