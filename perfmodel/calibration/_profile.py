"""Compares a profile of one layout with its prediction, and corrects the cost models by it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from perfmodel.calibration._corrections import Correction, corrections
from perfmodel.calibration._end_to_end import EndToEnd, calibrate_end_to_end
from perfmodel.calibration._profile_events import (
    GAPS,
    WAITS,
    SideBySide,
    Total,
    idle_s,
    side_by_side,
)
from perfmodel.calibration._runs import Run, arithmetic_s
from perfmodel.display import frame_html, paragraph
from perfmodel.errors import PerfModelError
from perfmodel.ingest import Profile, read_profile
from perfmodel.prediction import StepProblem, layout_of, step_problem_of
from perfmodel.prediction.sites import KERNEL_FACTORS, LOSSES, SKEW, loss_text
from perfmodel.spec import Layout, Problem
from perfmodel.units import duration, figure, relative

if TYPE_CHECKING:
    import pandas as pd

SHOWN: Final = 20
"""Number of differences that are named."""
LEAST_MATCHED: Final = 0.05
"""Least share of the time of a profile's products that match predicted ones; below it the profile
belongs to another run."""
_PRODUCTS: Final = "gemm"
Files = Profile | Path | str | Sequence[Path | str]
"""A profile that is read already, or the files to read it from."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An event whose prediction and measurement differ; seconds per device and step."""

    event: str
    """Name of the event."""
    family: str
    """Family of kernels or kind of collective; empty if the event's name identifies none."""
    predicted_s: float
    measured_s: float
    predicted_calls: float
    measured_calls: float
    effect_s: float
    """Measured minus predicted seconds that lengthen the step; for a collective, only the exposed
    share."""
    remedy: str
    """Change that would remove the difference."""


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """A prediction compared with a profile of the same step."""

    layout: str
    devices: int
    """Number of devices that the profile recorded."""
    steps: int
    """Number of steps that the profile recorded."""
    predicted_step_s: float
    measured_step_s: float
    """Median over the recorded steps, or the stated time of a step without the profiler."""
    matched_share: float
    """Share of the measured seconds that belongs to events with a prediction."""
    differences: tuple[Difference, ...]
    """Differences, the largest first."""
    corrections: tuple[Correction, ...]
    """Corrections of the parameters by the profile."""
    unread: tuple[tuple[str, int], ...]
    """Facts that the profile does not record, each with the number of calls that cannot be compared
    for this reason."""

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        values["differences"] = [vars(record) for record in self.differences]
        values["corrections"] = [vars(record) for record in self.corrections]
        return values | {"unread": dict(self.unread)}

    def to_frame(self) -> "pd.DataFrame":
        """One row per difference."""
        import pandas as pd

        return pd.DataFrame([vars(difference) for difference in self.differences])

    def _repr_html_(self) -> str:
        step = (
            f"step: {self.predicted_step_s:.4g} s predicted, {self.measured_step_s:.4g} s measured"
        )
        return paragraph(step) + frame_html(self.to_frame())


@dataclass(frozen=True, kw_only=True)
class ProfileFit:
    """A fit to a profile, and the comparison before the fit."""

    report: ProfileReport
    """Comparison of prediction and profile before the fit."""
    fit: EndToEnd
    """Parameters after the profile and its step time."""


def explain_profile(
    problem: Problem,
    layout: Layout | str,
    profile: Files,
    *,
    format: str = "auto",
    calibration: Path | str | None = None,
    most: int = SHOWN,
) -> ProfileReport:
    """Compare a prediction and a profile of the same layout's step, event by event.

    Args:
        problem: model, cluster and job that were profiled, as `catalog.problem` makes it.
        layout: the layout that ran.
        profile: the result of `read_profile`, or files of all ranks of a job, or of some.
        format: format of the files.
        calibration: directory made by `perfmodel fit` whose prediction it is.
        most: number of differences to name at most.

    Raises:
        TableError: files that cannot be read.
        PerfModelError: a profile of more devices than the layout has, or a layout that is not
            possible.
    """
    laid_out = layout_of(problem, layout)[0]
    model = step_problem_of(problem, calibration)
    read = _read(profile, format)
    return _report(model, laid_out, read, side_by_side(model, laid_out, read), most)


def fit_profile(
    problem: Problem,
    layout: Layout | str,
    profile: Files,
    *,
    format: str = "auto",
    base: Path | str | None = None,
    out: Path | str | None = None,
    step_s: float | None = None,
) -> ProfileFit:
    """Correct the cost models by a profile of one layout, for predictions of others.

    Each part of the profile sets the parameters that it shows. Kernels set the factor of their
    family. Collectives, without their waits, set those of the links, and the waits the skew of the
    ranks. Gaps between kernels set the host's time, and kernels beside collectives how much these
    slow them. The step time sets the rest.

    Args:
        problem, layout, profile, format: as for `explain_profile`.
        base: calibration directory whose cost models are corrected; the shipped one by default.
        out: calibration directory to write, for `calibration=` of every prediction.
        step_s: seconds of a step without the profiler, if known. The time that recording added is
            subtracted from the host's time between operators.

    Raises:
        TableError, PerfModelError: as `explain_profile`; an implausible step time; a profile whose
            shapes match almost none of the predicted matrix products.
    """
    laid_out = layout_of(problem, layout)[0]
    read = _read(profile, format)

    # Corrections are relative to the cost models alone, so that a fit does not depend on the fits
    # before it.
    model = step_problem_of(problem, base).adjusted(None)
    sides = side_by_side(model, laid_out, read)
    report = _report(model, laid_out, read, sides, SHOWN, step_s)
    # A profile of another model or layout would be fitted without complaint, so its products must
    # be predicted ones.
    known = sides.matched(_PRODUCTS)
    _, products_s = sides.families().get(_PRODUCTS, (0.0, 0.0))
    if known < LEAST_MATCHED and not report.unread and products_s > 0:
        raise PerfModelError(
            f"profile: {known:.0%} of its matrix products match {problem.model.name} with {laid_out.label}; give "
            "the model, job and layout that were recorded (`perfmodel explain --profile` shows the differences)"
        )

    # The profiled step is also a run. It determines the parameters that no part of the profile
    # shows.
    run = Run(
        name="profile",
        model=problem.model,
        cluster=problem.cluster,
        job=problem.job,
        layout=laid_out,
        measured_s=report.measured_step_s,
        framework=problem.framework,
    )
    least_s = arithmetic_s(run)
    if run.measured_s < least_s:
        raise PerfModelError(
            f"profile: a step of {duration(run.measured_s)} is shorter than {duration(least_s)}, the time that "
            f"the FLOPs of {problem.model.name} take at the peak rate of {run.cluster.device.name}; give the model, "
            "job and layout that were recorded"
        )
    fits = calibrate_end_to_end([run], out=out, base=base, profiled=report.corrections)
    return ProfileFit(report=report, fit=fits[problem.cluster.device.name])


def _read(profile: Files, format: str) -> Profile:
    if isinstance(profile, Profile):
        return profile
    files = [profile] if isinstance(profile, (str, Path)) else profile
    return read_profile(format, files)


def _report(
    problem: StepProblem,
    layout: Layout,
    profile: Profile,
    sides: SideBySide,
    most: int,
    step_s: float | None = None,
) -> ProfileReport:
    """Compare a prediction with a profile: differences by event, corrected parameters."""
    # Recording slows the host. With the step's time without the profiler known, the difference is
    # what recording added.
    recorded_s = float(np.median(profile.step_s()))
    # Corrections are relative to the cost models, so those of an earlier fit are left out.
    bare = (
        sides if problem.adjustment is None else side_by_side(problem.unadjusted, layout, profile)
    )
    slowed_s = max(recorded_s - (step_s or recorded_s), 0.0)
    profile_corrections = corrections(problem.unadjusted, layout, profile, bare, slowed_s)
    differences = [*_events(sides), *_idle(sides, profile)]

    # The share of the measured time whose events are predicted too: where it is low, the
    # prediction is of another program.
    measured_s = sum(total.measured_s for total in sides.events.values())
    both_s = sum(total.measured_s for total in sides.events.values() if total.predicted_s > 0)
    return ProfileReport(
        layout=problem.notation(layout),
        devices=profile.devices,
        steps=sides.steps,
        predicted_step_s=sides.predicted_step_s,
        measured_step_s=step_s or recorded_s,
        matched_share=both_s / max(measured_s, 1e-300),
        differences=tuple(sorted(differences, key=lambda d: -abs(d.effect_s))[:most]),
        corrections=profile_corrections,
        unread=tuple(profile.unread.items()),
    )


def _events(sides: SideBySide) -> list[Difference]:
    """Return the difference of every event."""
    # A remedy depends on whether the other side has the event's family at all, perhaps in other
    # shapes.
    families = sides.families()
    return [
        Difference(
            event=total.label,
            family=total.family,
            predicted_s=total.predicted_s,
            measured_s=total.measured_s,
            predicted_calls=total.predicted_calls,
            measured_calls=total.measured_calls,
            effect_s=(total.measured_s - total.predicted_s) * _shows(total),
            remedy=_remedy(total, families),
        )
        for total in sides.events.values()
    ]


def _shows(total: Total) -> float:
    # A kernel that is not where it was predicted shows in full; a collective shows as far as it
    # was on the critical path.
    if total.family in KERNEL_FACTORS or total.predicted_s <= 0:
        return 1.0
    return min(1.0, total.critical_s / total.predicted_s)


def _remedy(total: Total, families: dict[str, tuple[float, float]]) -> str:
    """Describe what would remove the difference of an event."""
    predicted_s, measured_s = families[total.family]
    if not total.family:
        return "the kernel's name does not identify what it computes; profile with record_shapes=True and operators"

    # The event on both sides, only its family on both sides, or only one side: each asks for
    # another remedy.
    if total.predicted_s > 0 and total.measured_s > 0:
        change = expm1(np.log(total.measured_s / total.predicted_s))
        calls = total.measured_calls / total.predicted_calls
        call_text = f", {figure(calls, 2)} times as many calls" if abs(calls - 1) > 0.1 else ""
        return f"fit --profile: {total.family} {relative(change)} here{call_text}"
    if predicted_s > 0 and measured_s > 0:
        side, other_side = (
            ("profile", "prediction") if total.measured_s > 0 else ("prediction", "profile")
        )
        return (
            f"only in the {side}; the {other_side} has {total.family} of other shapes or fusions. fit --profile "
            f"rescales all {total.family}"
        )
    if total.measured_s > 0:
        return f"the prediction has no {total.family}; enable it in the layout, job or framework"
    return f"the profile has no {total.family}; check that this layout ran and that all its ranks are included"


def _idle(sides: SideBySide, profile: Profile) -> list[Difference]:
    """Return the time without kernels: predicted on the critical path, measured on average."""
    # The remedy for idle time depends on what the device waits for.
    idle = idle_s(profile, sides)
    device_steps = sides.steps * profile.devices
    waited_s = sum(collective.wait_s for collective in sides.collectives) / device_steps
    rows = (
        (
            "host issues too late",
            idle["host late"],
            ("fit --profile adjusts host_op_s; or use CUDA graphs or larger kernels"),
        ),
        (GAPS, idle["between kernels"], "fit --profile adjusts kernel_gap_s"),
        (WAITS, waited_s, "fit --profile adjusts the skew of ranks; or balance the ranks"),
        (
            "idle (bubble, other ranks, copies)",
            idle["waits"],
            "compare the timelines with perfmodel compare",
        ),
    )
    predicted = dict.fromkeys((name for name, _, _ in rows), 0.0) | sides.predicted_idle_s
    return [
        Difference(
            event=name,
            family="idle",
            predicted_s=predicted[name],
            measured_s=measured_s,
            predicted_calls=0.0,
            measured_calls=0.0,
            effect_s=measured_s - predicted[name],
            remedy=remedy,
        )
        for name, measured_s, remedy in rows
    ]


def amount(correction: Correction) -> str:
    """Format a correction with its standard error: a relative change, a share, or a time."""
    if correction.name in (*LOSSES, SKEW):
        sign = "+" if correction.value > 0 else ""
        value, sd = (loss_text(correction.name, v) for v in (correction.value, correction.sd))
        return f"{sign}{value} ± {sd}"
    return f"{relative(expm1(correction.value), 1)} ± {correction.sd:.1%}"
