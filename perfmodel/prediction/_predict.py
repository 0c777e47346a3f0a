"""The public functions that predict one layout."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Unpack

from perfmodel import catalog
from perfmodel.catalog import job_files
from perfmodel.errors import NoDataError
from perfmodel.prediction._account import Account, step_account
from perfmodel.prediction._check import check_layout
from perfmodel.prediction._compose import layout_batches
from perfmodel.prediction._durations import programs_of_step
from perfmodel.prediction._evaluate import per_step
from perfmodel.prediction._explain import CriticalPath, pass_parts
from perfmodel.prediction._fits import rank_devices, step_memory
from perfmodel.prediction._interval import step_interval
from perfmodel.prediction._prediction import CriticalEvent, Prediction, TimeAccount, Uncertainty
from perfmodel.prediction._problem import StepProblem, step_problem_of
from perfmodel.prediction._programs import prepared, program_live
from perfmodel.prediction.sites import Site
from perfmodel.spec import (
    Cluster,
    Device,
    Framework,
    Job,
    Layout,
    Model,
    Problem,
    Transformer,
)
from perfmodel.spec.encoders import encoders_of
from perfmodel.spec.keywords import StepKeywords
from perfmodel.spec.sample_units import sample_unit
from perfmodel.spec.unet import UNet
from perfmodel.timeline import times


def predict(
    model: Problem | Model | str,
    cluster: Cluster | str | None = None,
    layout: catalog.StatedLayout = "",
    *,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
    calibration: Path | str | None = None,
    site: Site | None = None,
    timeline: bool = False,
    strict: bool = False,
    **fields: Unpack[StepKeywords],
) -> Prediction:
    """Predict one training (or inference) step.

        predict("gpt3-175b", "dgx-a100", "tp=8,pp=16,dp=8", global_batch=1536)
        predict("gpt3-175b", "dgx-a100", tp=8, pp=16, dp=8, global_batch=1536)
        predict(problem, layout={"tp": 8, "pp": 16, "dp": 8})

    Args:
        model: catalog name, path of a Hugging Face `config.json` or TOML, or a `Model`; or a whole
            `Problem`.
        cluster: catalog name, path of a TOML, or a `Cluster`.
        layout: a `Layout`, or its notation, e.g. `"tp=8,pp=16,dp=8"` or `"8M16P8D"`, or its fields
            by name. The framework supplies what the last two leave out.
        global_batch: sequences (images) per step over all replicas.
        seq_len: tokens per sequence (default: the model's).
        dtype: element type (default: the first of bf16, fp16 and fp32 that the device has).
        devices: number of devices that the layout's degrees must multiply to.
        job: a `Job`, or some of its fields by name.
        framework: `name`, `name@year`, path of a TOML, or a `Framework` (default: `generic`).
        calibration: directory made by `perfmodel fit` that replaces the shipped one.
        site: constants of the place where the step runs; by default those of an unknown site.
        timeline: also keep start and end of every event (`Prediction.timeline`).
        strict: refuse to extrapolate.
        fields: fields of the layout, in place of `layout` (`tp=8`), and of the job
            (`optimizer="muon"`), by name.

    Raises:
        UnknownNameError, LayoutError: for names or layouts that are not possible.
        PerfModelError: a field that has no default is missing.
        NoDataError: under `strict`, if part of the step rests on extrapolation.
    """
    stated = {"global_batch": global_batch, "seq_len": seq_len, "dtype": dtype, "devices": devices}
    stated |= {"job": job, "framework": framework}
    problem, layout = catalog.problem_and_layout(model, cluster, layout, **stated, **fields)
    laid_out, assumed = layout_of(problem, layout)
    step_problem = step_problem_of(problem, calibration, site)
    prediction = explain(step_problem, laid_out, timeline=timeline, strict=strict)
    if not assumed:
        return prediction
    return replace(prediction, warnings=(*assumed, *prediction.warnings))


def layout_of(problem: Problem, layout: catalog.StatedLayout) -> tuple[Layout, tuple[str, ...]]:
    """Check a layout and fill in the fields that the problem determines.

    Args:
        layout: a `Layout`, which is used unchanged, or its notation or its fields by name, which
            the framework's defaults complete.

    Returns:
        The layout, and sentences on what was assumed and what its framework cannot run.

    Raises:
        LayoutError, UnknownNameError: as `Layout.parse` and `check_layout`.
    """
    model = problem.model
    sentences = []
    layout = job_files.layout_in_words(layout)
    if isinstance(layout, str):
        layout, assumed = problem.framework.layout(layout, model)
        if assumed:
            sentences.append(assumed)
    check_layout(model, problem.cluster, problem.job, layout, problem.devices)

    # Megatron-LM and Hugging Face reduce each part of a layer whose parts run side by side.
    # Experts beside attention return their results by collectives of their own.
    reduces_once = (
        isinstance(model, Transformer)
        and model.block.parallel_blocks != "none"
        and model.experts is None
    )
    if layout.tp > 1 and reduces_once:
        sentences.append(
            f"{model.name}: attention and feed-forward run in parallel, so a single reduction over the {layout.tp} "
            "tensor-parallel ranks is assumed; software that reduces each separately takes longer"
        )
    return layout, (*sentences, *problem.framework.cannot_run(layout))


def explain(
    problem: StepProblem, layout: Layout, *, timeline: bool = False, strict: bool = False
) -> Prediction:
    """The full prediction of one layout of a problem; docs/explanation/one_prediction.md walks
    through it."""
    # Shard, price, phases, program: what one rank computes in each block, how long that takes, and
    # the program in which the blocks run: what its schedule keeps alive on each rank, and its
    # structure.
    (batch,) = layout_batches(problem, [layout])
    layout = batch.layouts[0]
    live = program_live(problem.setting, batch.spec)
    program = prepared(batch.spec)

    # Durations: how long each class of the program's events takes. Without a flush between steps, a
    # step is the difference between a longer and a shorter program.
    programs = programs_of_step(problem, batch)
    first = programs[0]
    durations_s = first.timed.durations_s

    # Timeline: the longest path through the program, and how often each class lies on it. Input
    # pipelines run ahead of the steps: whichever takes longer sets the pace.
    computed_s, gradient, compute_count = per_step([program.timed for program in programs])
    # Before that, all devices may generate the samples together.
    input_s, generation_s = problem.job.input_s, problem.job.generation_s
    step_s = problem.job.paced_s(computed_s)
    mean_busy_s = float(durations_s @ compute_count) / program.structure.devices + generation_s

    # Memory of every rank, and whether it fits.
    memory = step_memory(problem, batch, live)

    # Summary: the parts of the step, and the events on its longest path.
    account = step_account(problem, programs, computed_s)
    path = CriticalPath(first, gradient)
    waits_s = WaitsForSamples(
        input_s=max(0.0, input_s - computed_s) if input_s else None, generation_s=generation_s
    )
    time_account = _time_account(account, path, step_s, waits_s, mean_busy_s / step_s)

    # How far the measured step may be from this one.
    shares = path.shares()
    degrees = {
        "unstated": problem.site.unstated,
        "extrapolated": shares["extrapolated"],
        "bubble": time_account.bubble_fraction,
    }
    interval = step_interval(problem, layout, path, degrees)
    devices = rank_devices(problem, layout)
    if strict:
        _refuse_extrapolation(path.provenance_shares, devices)

    return Prediction(
        **_request(problem, layout),
        warnings=_warnings(problem, layout, path.provenance_shares, devices),
        **_rates(problem, layout, step_s, devices),
        step_time_s=step_s,
        step_time_lo_s=problem.job.paced_s(max(computed_s * interval.lower, account.kernels_s)),
        step_time_hi_s=problem.job.paced_s(computed_s * interval.upper),
        fits=not memory.reasons,
        fits_probability=memory.fits_probability,
        reasons=memory.reasons,
        time_account=time_account,
        memory_account=memory.account,
        uncertainty=Uncertainty(
            by_source=interval.sources, unknown_shares=shares, class_shares=path.class_shares
        ),
        timeline=times(program.compiled, durations_s) if timeline else None,
        pass_parts=pass_parts(first) if timeline else {},
    )


class WaitsForSamples(NamedTuple):
    """Seconds of a step before its samples are there."""

    input_s: float | None
    """Wait for the input pipeline; None if nothing is stated of it."""
    generation_s: float
    """Generation of the samples on the same devices (`Job.generation_s`)."""


def _time_account(
    account: Account,
    path: CriticalPath,
    step_s: float,
    waits: WaitsForSamples,
    busy_fraction: float,
) -> TimeAccount:
    """Account of a step's time, including its waits for samples.

    Args:
        account: parts of the step before it waits for samples.
        step_s: the step with these waits.
        waits: the waits.
        busy_fraction: share of the step in which devices compute or generate.
    """
    breakdown_s = dict(account.breakdown_s)
    critical_path = path.events()
    if waits.input_s is not None:
        breakdown_s["waiting_for_input"] = waits.input_s
    if waits.input_s:
        waiting = CriticalEvent(event="waiting for input", count=1.0, time_s=waits.input_s)
        critical_path = (*critical_path, waiting)
    if waits.generation_s:
        breakdown_s["generation"] = waits.generation_s
        generation = CriticalEvent(event="generation", count=1.0, time_s=waits.generation_s)
        critical_path = (*critical_path, generation)
    return TimeAccount(
        breakdown_s=breakdown_s,
        critical_path=critical_path,
        provenance=path.provenance_shares,
        bubble_fraction=breakdown_s["bubble"] / step_s,
        busy_fraction=busy_fraction,
        kernels_alone_s=account.kernels_s,
    )


def _request(problem: StepProblem, layout: Layout) -> dict[str, Any]:
    """The fields of a prediction that say what was predicted."""
    return {
        "model": problem.model.name,
        "framework": problem.framework.label,
        "notation": problem.notation(layout),
        "cluster": problem.cluster.name,
        "devices": layout.devices,
        "layout": layout,
        "global_batch": problem.job.global_batch,
        "seq_len": problem.job.seq_len,
        "sample_unit": sample_unit(problem.model),
    }


def _rates(
    problem: StepProblem, layout: Layout, step_s: float, devices: Sequence[Device]
) -> dict[str, Any]:
    """The fields of a prediction that say how fast its devices work, and which devices these are.

    Args:
        devices: device of each pipeline rank.
    """
    tokens = problem.job.global_batch * problem.job.tokens_per_sequence
    flops_per_s = problem.flops / step_s / layout.devices
    kinds = []
    for kind, device in zip(layout.kinds or (), devices, strict=bool(layout.kinds)):
        kinds.append(
            {"kind": kind, "device": device.name, "memory_capacity_bytes": device.memory_bytes}
        )
    return {
        "tokens_per_s_per_device": tokens / step_s / layout.devices,
        "tflops_per_device": flops_per_s / 1e12,
        "mfu": flops_per_s / fmean(device.flops_per_s(problem.job.dtype) for device in devices),
        "kinds": tuple(kinds),
    }


def _refuse_extrapolation(provenance: dict[str, float], devices: Sequence[Device]) -> None:
    """Raise `NoDataError` if part of the critical path rests on no measurement."""
    if provenance["extrapolated"] + provenance["analytical"] > 0:
        raise NoDataError(
            f"{_without_measurement(provenance, devices)}; measure it (perfmodel calibrate), or leave --strict out"
        )


def _warnings(
    problem: StepProblem, layout: Layout, provenance: dict[str, float], devices: Sequence[Device]
) -> tuple[str, ...]:
    """Warnings about parts that the figures leave out, about assumptions, and about times without a
    measurement (unless negligible)."""
    model = problem.model
    left_out: tuple[str, ...] = ()
    if isinstance(model, Transformer | UNet) and model.left_out:
        left_out = (f"{model.name}: {model.left_out}",)
    left_out += _cached_encoders(model, problem.job)
    warnings = (*left_out, *layout.remarks, *problem.job.assumed)
    if provenance["extrapolated"] + provenance["analytical"] < 0.01:
        return warnings
    return (*warnings, f"{_without_measurement(provenance, devices)}, which widens the interval")


def _cached_encoders(model: Model, job: Job) -> tuple[str, ...]:
    """Sentences on frozen encoders whose outputs are assumed to be computed before the step."""
    cached: dict[str, list[str]] = {}
    for encoder in encoders_of(model):
        key = "cached_text" if encoder.is_of_text else "cached_latents"
        if getattr(job.fine_tuning, key):
            cached.setdefault(key, []).append(encoder.name)
    return tuple(
        f"{model.name}: outputs of {' and '.join(names)} are taken to be computed before the step; if the step "
        f"computes them, set job.{key}=false"
        for key, names in cached.items()
    )


def _without_measurement(provenance: dict[str, float], devices: Sequence[Device]) -> str:
    """A sentence on the share of the critical path that rests on no measurement of its device."""
    shares = {name: provenance[name] for name in ("analytical", "extrapolated")}
    named = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share > 0)
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    return f"{sum(shares.values()):.1%} of the critical path rests on no measurement of {names} ({named})"
