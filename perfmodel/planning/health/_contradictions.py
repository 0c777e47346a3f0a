"""Finds contradictions between a job's log and its launch script, and derives what really ran."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from perfmodel.errors import PerfModelError
from perfmodel.ingest.logs import TrainingLog
from perfmodel.spec import Layout, Problem
from perfmodel.spec.notation import written
from perfmodel.units import figure

_OF_JOB: Final = ("global_batch", "seq_len")
_DEGREES: Final = ("tp", "pp", "cp", "ep", "dp")
"""Settings that define the job; where log and script differ, the log's values are predicted."""
_OPTIONS: Final = (
    "sequence_parallel",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "tp_overlap",
    "recompute",
)
"""Options of the job; where log and script differ, the cost is reported as a cause."""
_SHARDED: Final = ("overlap_param_gather",)
_FLOPS_RANGE: Final = (0.65, 1.55)
"""Range of the log's FLOPs per token relative to the model's that different ways of counting can
explain."""


@dataclass(frozen=True, kw_only=True)
class Contradiction:
    """A setting that has different values in the log and in the script."""

    setting: str
    script: str
    log: str
    is_option: bool
    """True for an option of the same job, False for another job."""

    @property
    def sentence(self) -> str:
        """The contradiction as one sentence."""
        return f"{self.setting} is {self.log} in the log and {self.script} in the script"


@dataclass(frozen=True, kw_only=True)
class WhatRan:
    """The job in the script, corrected by the log."""

    problem: Problem
    intended: Layout
    """The script's layout, with the structure that ran."""
    options: Mapping[str, Any]
    """Options whose values in the log differ from the script's, by field of the layout."""
    contradictions: tuple[Contradiction, ...]

    @property
    def ran(self) -> Layout:
        """The layout with the options that ran."""
        return replace(self.intended, **self.options)


def what_ran(problem: Problem, layout: Layout, log: TrainingLog) -> WhatRan:
    """Compare the settings in a log with those in the script.

    Raises:
        PerfModelError: the log states a job that this layout cannot be changed into.
    """
    stated = dict(log.settings)

    # A ramped-up batch ends at its final value.
    batches = [step.global_batch for step in log.steps if step.global_batch]
    if batches:
        stated["global_batch"] = batches[-1]
    script: dict[str, Any] = {
        "devices": layout.devices,
        "global_batch": problem.job.global_batch,
        "seq_len": problem.job.seq_len,
    }
    script |= {name: layout.value(name) for name in (*_DEGREES, "micro_batch", *_OPTIONS)}

    # Another structure is another job, and is predicted as it ran. Options stay as in the script,
    # so that their cost shows up as a cause.
    contradictions = []
    options = {}
    for name, value in stated.items():
        if name not in script or script[name] == value or not _matters(name, layout):
            continue
        is_option = name in _OPTIONS
        contradictions.append(
            Contradiction(
                setting=name,
                script=written(script[name]),
                log=written(value),
                is_option=is_option,
            )
        )
        if is_option:
            options[name] = value
    return WhatRan(
        problem=_with_batch(problem, stated),
        intended=_with_structure(layout, stated, log.path),
        options=options,
        contradictions=tuple(contradictions),
    )


def _matters(name: str, layout: Layout) -> bool:
    """Whether a setting has an effect on a layout with these degrees."""
    if name in ("sequence_parallel", "tp_overlap"):
        return layout.tp > 1
    if name in _SHARDED:
        return layout.dp > 1 and layout.zero > 0
    if name == "overlap_grad_reduce":
        return layout.dp > 1
    # Some frameworks recompute a number of whole layers, which this package writes in a field of
    # its own.
    return name != "recompute" or layout.recompute_full_layers is None


def _with_batch(problem: Problem, stated: Mapping[str, Any]) -> Problem:
    changes = {name: stated[name] for name in _OF_JOB if name in stated}
    devices = stated.get("devices", problem.devices)
    return replace(problem, job=replace(problem.job, **changes), devices=devices)


def _with_structure(layout: Layout, stated: Mapping[str, Any], place: str) -> Layout:
    """The layout with the degrees that ran; if the log does not state the replicas, they follow
    from the devices."""
    changes = {name: stated[name] for name in (*_DEGREES, "micro_batch") if name in stated}
    changes = {name: value for name, value in changes.items() if value != layout.value(name)}
    devices = stated.get("devices", layout.devices)
    group = 1
    for name in ("tp", "pp", "cp"):
        group *= changes.get(name, getattr(layout, name))
    if devices % group:
        raise PerfModelError(
            f"{place}: {devices} devices are not a multiple of tp*pp*cp = {group}; check that the log belongs "
            "to this script"
        )

    # The number of replicas is that of the devices over the size of a model-parallel group.
    # Unchanged degrees are not passed, since the record checks combinations of them.
    changes["dp"] = changes.get("dp", devices // group)
    if changes["dp"] == layout.dp:
        del changes["dp"]
    try:
        return replace(layout, **changes) if changes else layout
    except PerfModelError as error:
        raise PerfModelError(
            f"{place}: the log is of a different job than the script: {error}"
        ) from None


def flops_remark(problem: Problem, log: TrainingLog, model_flops: float, devices: int) -> str:
    """A warning if the log's own TFLOP/s imply another model or batch; empty if they agree.

    Args:
        model_flops: FLOPs of a step, as this package counts them.
    """
    # Log lines give FLOP/s per device and either tokens/s or seconds of a step. Both lead to
    # FLOPs per token, which depends on the model alone. The first line holds compilation.
    tokens = problem.job.global_batch * problem.job.seq_len
    per_token = []
    for step in log.steps[1:]:
        if not step.tflops_per_device:
            continue
        if step.tokens_per_s_per_device:
            per_token.append(step.tflops_per_device * 1e12 / step.tokens_per_s_per_device)
        elif step.seconds:
            per_token.append(step.tflops_per_device * 1e12 * step.seconds * devices / tokens)
    if not per_token:
        return ""
    ratio = sorted(per_token)[len(per_token) // 2] / (model_flops / tokens)
    if _FLOPS_RANGE[0] <= ratio <= _FLOPS_RANGE[1]:
        return ""
    return (
        f"the TFLOP/s in the log imply {figure(ratio, 2)} times the FLOPs per token of {problem.model.name}; check that "
        "model, batch and number of devices are those of the log"
    )
