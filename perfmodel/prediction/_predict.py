"""The public prediction: one layout, fully explained."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from jaxtyping import Float

from perfmodel import catalog
from perfmodel.cost import CollectiveModel, KernelModel
from perfmodel.errors import NoDataError
from perfmodel.prediction._adjustment import Adjustment, load_adjustments
from perfmodel.prediction._bundle import Bundle, Prepared
from perfmodel.prediction._check import check_layout
from perfmodel.prediction._end_to_end import GAUSS_90, end_to_end_interval
from perfmodel.prediction._explain import CriticalPath, breakdown
from perfmodel.prediction._framework import EAGER, Framework
from perfmodel.prediction._memory import CATEGORIES, saved_per_stage
from perfmodel.prediction._prediction import Prediction, StageMemory
from perfmodel.prediction._step_model import StepModel
from perfmodel.program import Kind, Structure
from perfmodel.spec import Cluster, Job, Layout, Model
from perfmodel.timeline import makespan, makespan_and_grad, times
from perfmodel.units import GIB
from perfmodel.workload import step_flops

_DP_KINDS = (Kind.GRAD_REDUCE, Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD, Kind.EMBEDDING_REDUCE)
_SEND_KINDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
Term = tuple[Prepared, Float[np.ndarray, " classes"], float]
"""A program, the durations of its classes, and the weight of its makespan in the step time."""


def step_model(
    model: Model,
    cluster: Cluster,
    job: Job,
    calibration: Path | None = None,
    framework: Framework = EAGER,
) -> StepModel:
    """The step model of a model, cluster and job, kept for later calls with the same arguments.

    Raises:
        CalibrationError: `calibration` holds unreadable weights or parameters of runs.
    """
    adjustment = load_adjustments(calibration).get(cluster.device.name)
    return _step_model(model, cluster, job, calibration, framework, adjustment)


@lru_cache(maxsize=64)
def _step_model(
    model: Model,
    cluster: Cluster,
    job: Job,
    calibration: Path | None,
    framework: Framework,
    adjustment: Adjustment | None,
) -> StepModel:
    return StepModel(
        model=model,
        job=job,
        cluster=cluster,
        kernels=KernelModel.load(calibration),
        collectives=CollectiveModel.load(calibration),
        framework=framework,
        adjustment=adjustment,
    )


def predict(
    model: Model | str,
    cluster: Cluster | str,
    layout: Layout | str,
    *,
    global_batch: int,
    seq_len: int | None = None,
    devices: int | None = None,
    job: Job | None = None,
    calibration: Path | str | None = None,
    framework: Framework | None = None,
    timeline: bool = False,
    strict: bool = False,
) -> Prediction:
    """Predict one training (or inference) step.

    Args:
        model: catalog name, path of a Hugging Face `config.json` or TOML, or a `Model`.
        cluster: catalog name, path of a TOML, or a `Cluster`.
        layout: a `Layout` or its notation, e.g. `"tp=8,pp=16,dp=8"` or `"8M16P8D"`.
        global_batch: sequences (images) per step over all replicas.
        seq_len: tokens per sequence; the model's own if not given.
        devices: checked against the layout's degrees if given.
        job: dtype, attention kind and so on; overrides `global_batch` and `seq_len` if given.
        calibration: directory made by `perfmodel fit` that replaces the shipped one.
        framework: host and allocator constants; `EAGER` (the default) or `COMPILED`.
        timeline: also keep start and end of every event (`Prediction.timeline`).
        strict: refuse to extrapolate.

    Raises:
        UnknownNameError, LayoutError: for names or layouts that are not possible.
        NoDataError: under `strict`, if part of the step rests on extrapolation.
    """
    model = catalog.model(model) if isinstance(model, str) else model
    cluster = catalog.cluster(cluster) if isinstance(cluster, str) else cluster
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    job = job or Job(global_batch=global_batch, seq_len=seq_len or model.seq_len)
    check_layout(model, cluster, job, layout, devices)
    path = Path(calibration) if calibration is not None else None
    fixed = step_model(model, cluster, job, path, framework or EAGER)
    return explain(fixed, layout, timeline=timeline, strict=strict)


def explain(fixed: StepModel, layout: Layout, *, timeline: bool = False, strict: bool = False) -> Prediction:
    """The full prediction of one layout from its step model."""
    (bundle,) = fixed.bundles([layout])
    terms = step_terms(fixed, bundle)
    prepared, durations, _ = terms[0]
    step_s, gradient, compute_count = per_step(terms)
    path = CriticalPath(fixed, bundle, durations, gradient)
    (lower, upper), error_sources = _interval(fixed, layout, path)
    memory = stage_memory(fixed, bundle)
    capacity = fixed.cluster.device.memory_bytes
    provenance = path.provenance_shares()
    if strict and provenance["extrapolated"] + provenance["analytical"] > 0:
        raise NoDataError(
            f"{provenance['extrapolated'] + provenance['analytical']:.0%} of the step's time is extrapolated beyond "
            f"the measurements for {fixed.cluster.device.name}; measure it (perfmodel calibrate) or drop --strict"
        )
    reasons = fit_reasons(memory, capacity, fixed.framework)
    flops = step_flops(fixed.model, fixed.job).total
    per_device = flops / step_s / layout.devices
    busy_s = float(durations @ compute_count)
    ranks = prepared.structure.devices
    return Prediction(
        model=fixed.model.name,
        cluster=fixed.cluster.name,
        devices=layout.devices,
        layout=layout,
        global_batch=fixed.job.global_batch,
        seq_len=fixed.job.seq_len,
        step_time_s=step_s,
        step_time_lo_s=step_s * lower,
        step_time_hi_s=step_s * upper,
        tokens_per_s_per_device=fixed.job.global_batch * fixed.job.seq_len / step_s / layout.devices,
        tflops_per_device=per_device / 1e12,
        mfu=per_device / fixed.cluster.device.peak.flops_per_s(fixed.job.dtype),
        bubble_fraction=max(0.0, 1 - busy_s / (ranks * step_s)),
        memory_per_stage=memory,
        memory_capacity_bytes=capacity,
        breakdown_s=breakdown(fixed, bundle, durations, compute_count, step_s, *_without_communication(terms)),
        critical_path=path.events(),
        provenance=provenance,
        fits=not reasons,
        reasons=reasons,
        error_sources=error_sources,
        unknown_shares=path.shares(),
        warnings=_warnings(provenance, fixed),
        saved_bytes_per_stage=tuple(saved_per_stage([layout], bundle.tables, bundle.counts, bundle.full)[0].tolist()),
        timeline=times(prepared.compiled, durations) if timeline else None,
    )


def _interval(fixed: StepModel, layout: Layout, path: CriticalPath) -> tuple[tuple[float, float], dict[str, float]]:
    """Ends of the 90 % interval as factors of the step time, and where it comes from."""
    if fixed.adjustment is not None:
        return end_to_end_interval(fixed, fixed.adjustment, layout, path)
    sources = {f"events: {name}": half / GAUSS_90 for name, half in path.family_half_widths().items()}
    framework = fixed.framework
    own = framework.half_widths(path.shares())
    return path.interval(framework), sources | {"unknown": sum(own) / 2 / GAUSS_90}


def stage_memory(fixed: StepModel, bundle: Bundle) -> tuple[StageMemory, ...]:
    """Memory of every pipeline rank of a bundle's first layout."""
    memory = fixed.memory(bundle)
    rows = zip(*(getattr(memory, name)[0].tolist() for name in CATEGORIES), strict=True)
    return tuple(StageMemory(**dict(zip(CATEGORIES, row, strict=True))) for row in rows)


def fit_reasons(memory: Sequence[StageMemory], capacity: float, framework: Framework) -> tuple[str, ...]:
    """Empty if every rank fits, else why the fullest does not and what its largest part is."""
    worst = max(range(len(memory)), key=lambda i: memory[i].peak)
    usable = capacity * (1 - framework.memory_margin)
    if memory[worst].peak <= usable:
        return ()
    parts = {k: v for k, v in memory[worst].to_dict().items() if k != "peak"}
    largest = max(parts, key=parts.__getitem__)
    return (
        f"out of memory: pipeline rank {worst} needs {memory[worst].peak / GIB:.1f} GiB "
        f"of {usable / GIB:.1f} GiB usable; "
        f"{largest} take {parts[largest] / GIB:.1f} GiB ({_REMEDY[largest]})",
    )


_REMEDY = {
    "weights": "use zero=3 or a larger tp or pp",
    "gradients": "use zero=2 or a larger tp or pp",
    "optimizer": "use zero=1 or higher, or a larger tp or pp",
    "activations": "use recompute, a smaller micro_batch, sequence_parallel or a larger tp",
    "buffers": "use a smaller micro_batch or a larger tp",
}


def step_terms(fixed: StepModel, bundle: Bundle) -> list[Term]:
    """Programs that make up the step of a bundle's first layout."""
    return [(fixed.prepared(b.spec), fixed.durations(b)[0], weight) for b, weight in fixed.terms(bundle)]


def per_step(terms: Sequence[Term]) -> tuple[float, Float[np.ndarray, " classes"], Float[np.ndarray, " classes"]]:
    """Step time, its gradient, and the occurrences of each class on compute streams; classes of the first term."""
    step_s, gradient, count = 0.0, 0.0, 0.0
    classes = {key: i for i, key in enumerate(_class_keys(terms[0][0].structure))}
    for prepared, durations, weight in terms:
        span, of_class = makespan_and_grad(prepared.compiled, durations)
        index = [classes[key] for key in _class_keys(prepared.structure)]
        step_s += weight * float(span)
        gradient = gradient + weight * np.bincount(index, np.asarray(of_class, float), len(classes))
        count = count + weight * np.bincount(index, prepared.compute_count, len(classes))
    return step_s, np.asarray(gradient), np.asarray(count)


def _class_keys(structure: Structure) -> list[tuple[int, ...]]:
    variants = structure.variants[structure.class_variant].T
    columns = (structure.class_kind, structure.class_stage, structure.class_segment, *variants)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _without_communication(terms: Sequence[Term]) -> tuple[float, float]:
    """Step times without data-parallel communication, and without sends either."""
    without = []
    for kinds in (_DP_KINDS, (*_DP_KINDS, *_SEND_KINDS)):
        spans = [
            weight * float(makespan(p.compiled, np.where(np.isin(p.structure.class_kind, kinds), 0.0, durations)))
            for p, durations, weight in terms
        ]
        without.append(sum(spans))
    return without[0], without[1]


def _warnings(provenance: dict[str, float], fixed: StepModel) -> tuple[str, ...]:
    beyond = provenance["extrapolated"] + provenance["analytical"]
    if beyond < 0.01:
        return ()
    return (
        f"{beyond:.0%} of the critical path is extrapolated beyond what was measured on {fixed.cluster.device.name}; "
        "the interval is wider for it",
    )
