"""Settings that would explain a step far outside its interval, if the run had other values of them
than the script."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any, Final, NamedTuple

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.planning.what_if import Scenario, step_s
from perfmodel.prediction import check_layout, step_problem_of
from perfmodel.spec import Cluster, Layout, Problem, Transformer

_FACTORS: Final = (2, 4, 8)
"""Factors by which a number in a script is usually wrong."""
_DTYPES: Final = ("fp32", "tf32", "bf16", "fp8", "fp4")
_DEVICES_TRIED: Final = 3
"""Devices that are predicted, of those whose peak rate would explain the step best."""
_WINDOWS: Final = (4096, 1024)
"""Sliding windows of attention, in tokens, that published models have."""
_ADAPTER_RANK: Final = 16
_MOST_NAMED: Final = 5


@dataclass(frozen=True, kw_only=True)
class OtherSetting:
    """A setting with another value than the script's, with which the step would be as measured."""

    setting: str
    """The setting, in the words of a script."""
    script: str
    """Its value in the script."""
    run: str
    """The value that would explain the step."""
    step_time_s: float
    """Predicted step with this value."""


class _OtherJob(NamedTuple):
    """The job with one setting changed."""

    setting: str
    script: str
    run: str
    problem: Problem
    layout: Layout
    steps_share: float = 1.0
    """Share of the predicted step that one line of the log stands for."""


def other_settings(
    problem: Problem,
    layout: Layout,
    measured_s: float,
    half_width: float,
    stated: Collection[str],
    calibration: Path | str | None = None,
) -> tuple[OtherSetting, ...]:
    """Settings that would bring the prediction to the measured step, the nearest first.

    Args:
        measured_s: the run's usual step.
        half_width: half of the 90 % interval of the log step time.
        stated: fields of job and layout that the log states, so that the prediction has them.
        calibration: directory that replaces the shipped one.
    """
    expected_s = step_s(step_problem_of(problem, calibration), layout, Scenario())
    nearest: dict[str, OtherSetting] = {}
    for job in _other_jobs(problem, layout, measured_s / expected_s, stated):
        try:
            check_layout(job.problem.model, job.problem.cluster, job.problem.job, job.layout)
            changed = step_problem_of(job.problem, calibration)
            seconds = step_s(changed, job.layout, Scenario()) * job.steps_share
        except PerfModelError:
            # A value that this job cannot have explains nothing.
            continue
        before = nearest.get(job.setting)
        if before is None or _distance(seconds, measured_s) < _distance(
            before.step_time_s, measured_s
        ):
            nearest[job.setting] = OtherSetting(
                setting=job.setting, script=job.script, run=job.run, step_time_s=seconds
            )
    explaining = [
        other
        for other in nearest.values()
        if _distance(other.step_time_s, measured_s) <= half_width
    ]
    explaining.sort(key=lambda other: _distance(other.step_time_s, measured_s))
    return tuple(explaining[:_MOST_NAMED])


def _distance(predicted_s: float, measured_s: float) -> float:
    return abs(log(measured_s / predicted_s))


def _other_jobs(
    problem: Problem, layout: Layout, ratio: float, stated: Collection[str]
) -> Iterator[_OtherJob]:
    """The job with one other setting each, of those that the log does not state.

    Args:
        ratio: measured over predicted step.
    """
    if "devices" not in stated and "dp" not in stated:
        yield from _other_replicas(problem, layout, ratio)
    if "global_batch" not in stated:
        yield from _other_numbers(problem, layout, ratio, "global batch", "global_batch")
    if "seq_len" not in stated:
        yield from _other_numbers(problem, layout, ratio, "sequence length", "seq_len")
    if "recompute" not in stated:
        for recompute in ("none", "selective", "full"):
            changed = {"recompute": recompute, "recompute_full_layers": None}
            if recompute != layout.recompute:
                yield _OtherJob(
                    "recompute", layout.recompute, recompute, problem, replace(layout, **changed)
                )
    job = problem.job
    for dtype in _DTYPES:
        if dtype != job.dtype:
            yield _OtherJob("precision", job.dtype, dtype, _with_job(problem, dtype=dtype), layout)
    yield from _other_data(problem, layout)
    yield from _other_machines(problem, layout, ratio)

    # Trainers that accumulate gradients may print a line for each micro-batch.
    micro_batches = job.num_microbatches(layout)
    if micro_batches > 1:
        yield _OtherJob(
            "a line of the log",
            "a step",
            f"one of its {micro_batches} micro-batches",
            problem,
            layout,
            1 / micro_batches,
        )


def _other_replicas(problem: Problem, layout: Layout, ratio: float) -> Iterator[_OtherJob]:
    """The same batch on more or fewer replicas."""
    for factor in _FACTORS:
        if ratio > 1 and layout.dp % factor:
            continue
        dp = layout.dp * factor if ratio < 1 else layout.dp // factor
        try:
            changed = replace(layout, dp=dp)
        except PerfModelError:
            continue
        yield _OtherJob("devices", f"{layout.devices:,}", f"{changed.devices:,}", problem, changed)


def _other_numbers(
    problem: Problem, layout: Layout, ratio: float, setting: str, field: str
) -> Iterator[_OtherJob]:
    """A number of the job, a few times as large or as small."""
    value: int = getattr(problem.job, field)
    for factor in _FACTORS:
        if ratio > 1:
            other = value * factor
        elif value % factor:
            continue
        else:
            other = value // factor
        changed = _with_job(problem, **{field: other})
        yield _OtherJob(setting, f"{value:,}", f"{other:,}", changed, layout)


def _other_data(problem: Problem, layout: Layout) -> Iterator[_OtherJob]:
    """Sequences without padding, and other weights or tokens that the passes leave out."""
    job = problem.job
    if job.mean_tokens is None:
        for factor in _FACTORS:
            shorter = job.seq_len // factor
            yield _OtherJob(
                "mean length of the sequences",
                f"{job.seq_len:,} tokens",
                f"{shorter:,} tokens, without padding",
                _with_job(problem, mean_tokens=float(shorter)),
                layout,
            )
    tuning = job.fine_tuning
    if job.mode == "train" and not tuning.adapter_rank and not tuning.frozen:
        adapters = _with_job(problem, adapter_rank=_ADAPTER_RANK, frozen=True)
        yield _OtherJob("trained weights", "all", "LoRA adapters", adapters, layout)

    # Attention in a window costs less, and only of longer sequences.
    model = problem.model
    if not isinstance(model, Transformer):
        return
    window = model.attention.window
    changed_windows = [0] if window else [size for size in _WINDOWS if size < job.seq_len]
    for size in changed_windows:
        try:
            changed = replace(model, window=size)
        except PerfModelError:
            continue
        yield _OtherJob(
            "sliding window of attention",
            f"{window:,} tokens" if window else "none",
            f"{size:,} tokens" if size else "none",
            replace(problem, model=changed),
            layout,
        )


def _other_machines(problem: Problem, layout: Layout, ratio: float) -> Iterator[_OtherJob]:
    """The same nodes with other devices, of catalog clusters with nodes of this size."""
    cluster, dtype = problem.cluster, problem.job.dtype
    rate = cluster.device.peak.flops_per_s(dtype)

    # Every prediction on another device takes a while: only the likeliest are tried.
    candidates: dict[str, tuple[float, Cluster]] = {}
    for name in catalog.clusters():
        other = catalog.cluster(name)
        if other.device == cluster.device or other.devices_per_node != cluster.devices_per_node:
            continue
        try:
            other_rate = other.device.peak.flops_per_s(dtype)
        except PerfModelError:
            continue
        distance = abs(log(ratio * other_rate / rate))
        candidates.setdefault(other.device.name, (distance, other))
    likeliest = sorted(candidates.values(), key=lambda candidate: candidate[0])
    for _, other in likeliest[:_DEVICES_TRIED]:
        changed = replace(problem, cluster=other)
        yield _OtherJob("cluster", cluster.name, other.name, changed, layout)


def _with_job(problem: Problem, **fields: Any) -> Problem:
    return replace(problem, job=replace(problem.job, **fields))
