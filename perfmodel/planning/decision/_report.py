"""The report of a search or of one layout, as one page."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Unpack

import numpy as np

from perfmodel import catalog
from perfmodel.calibration import ProfileReport
from perfmodel.catalog import job_files
from perfmodel.display import Report, decision_page, inline_frame, shows_progress
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch import FORMATS, export_launch
from perfmodel.ingest.tables import write_text
from perfmodel.planning.decision._rows import rows
from perfmodel.planning.decision._scenarios import CHECKED, Turned, turned
from perfmodel.planning.goodput import Reliability
from perfmodel.planning.layouts import SearchOptions, SearchResult, SearchSpace, search
from perfmodel.planning.layouts.search_words import SearchKeywords, apply_search_keywords
from perfmodel.planning.training_run import training_run
from perfmodel.prediction import Prediction, explain, layout_of, step_problem_of
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem
from perfmodel.viz import interactive

TOP: Final = 100
"""Number of layouts that a search returns for the report, by default."""
TIMELINES: Final = 3
"""Number of layouts, from the first, whose timeline is in the page."""
LAUNCHED: Final = 20
"""Number of layouts, from the first, whose launch files are in the page."""
MOST_OPS: Final = 60_000
"""Most ops of a timeline in the page, at about 40 bytes each."""
_CALIBRATE: Final = (
    "--from",
    "--model",
    "--cluster",
    "--seq-len",
    "--dtype",
    "--framework",
)
HEIGHT_PX: Final = 900
"""Height of the page in a notebook."""


@dataclass(frozen=True, eq=False)
class DecisionReport:
    """The report to decide between layouts; notebooks show it as the page that `write` writes."""

    data: dict[str, Any]
    """Plain values that the page shows: `rows` are the layouts, the best first."""

    def with_clusters(self, records: Sequence[Mapping[str, Any]]) -> "DecisionReport":
        """This report with a comparison of clusters.

        Args:
            records: one per cluster, in any order, as in the `clusters` of
                `ClusterComparison.to_dict`: `cluster`, `layout` (its best) and `devices`, and those
                of `step_time_s`, `tokens_per_s`, `mfu`, `usd_per_million_tokens`,
                `energy_per_million_tokens_j`, `days` and `cost_usd` that are known; or `cluster`
                and the reason `why` it has no layout.
        """
        return replace(self, data=self.data | {"clusters": [dict(record) for record in records]})

    def with_profile(self, profile: ProfileReport) -> "DecisionReport":
        """This report with a profile of the first layout's step beside its prediction."""
        return replace(self, data=self.data | {"profile": profile.to_dict()})

    def to_html(self) -> str:
        """Return the page as a single file that needs no network."""
        return decision_page(self.data)

    def write(self, path: Path | str) -> None:
        """Write the page atomically."""
        write_text(path, self.to_html())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the HTML."""
        return {name: value for name, value in self.data.items() if name != "timelines"}

    def _repr_html_(self) -> str:
        return inline_frame(self.to_html(), HEIGHT_PX, title="report")


@shows_progress("report")
def report(
    model: Problem | Model | str,
    cluster: Cluster | str | None = None,
    layout: catalog.StatedLayout = "",
    *,
    space: SearchSpace | Callable[[Problem], SearchSpace] | None = None,
    options: SearchOptions | None = None,
    calibration: Path | str | None = None,
    reliability: Reliability | None = None,
    pue: float = 1.0,
    flags: Sequence[str] = (),
    progress: Report | None = None,
    global_batch: int | Sequence[int] | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
    **fields: Unpack[SearchKeywords],
) -> DecisionReport:
    """Make the report for the layouts that a search finds, or for one layout.

        report("gpt3-175b", "dgx-a100", devices=64, global_batch=64).write("report.html")

    Args:
        model, cluster, calibration: as `predict` and `search` take them.
        layout: report on this layout alone, without a search.
        space, options: as `search` takes them; `top` is 100 if neither `options` nor `fields` set
            it.
        reliability, pue: as `training_run` takes them.
        flags: flags of the command line that state the same job (except its batch), for commands on
            the page.
        progress: called with the name of each stage and how far it is.
        global_batch, seq_len, dtype, devices, job, framework, fields: as `search` takes them.

    Raises:
        PerfModelError: as `predict` and `search`; no layout is possible (the message says what
            would make one so).
    """
    # Separate the keywords of the search from those of the problem, as `search` does.
    report_progress = progress or (lambda *_: None)
    options, space, problem_fields = apply_search_keywords(
        fields, options or SearchOptions(top=TOP), space
    )
    if isinstance(global_batch, Sequence) and global_batch:
        # A search ranks layouts of several batches together. The first batch represents the job.
        options = replace(options, batches=tuple(global_batch))
        global_batch = global_batch[0]
    problem_fields |= {
        "global_batch": global_batch,
        "seq_len": seq_len,
        "dtype": dtype,
        "devices": devices,
    }
    problem = catalog.problem(model, cluster, job=job, framework=framework, **problem_fields)
    if layout:
        chosen = _one_layout(problem, layout, calibration, strict=options.strict)
    else:
        chosen = _searched(problem, space, options, calibration, progress)
    predictions = chosen.predictions

    # For each layout: its sensitivity to the machine's parameters, and the cost of training with
    # it.
    machine, checked = _turned_by_batch(problem, calibration, predictions, report_progress)
    jobs = [problem.replace(global_batch=p.global_batch) for p in predictions]
    runs = []
    for i, (prediction, batch_problem) in enumerate(zip(predictions, jobs, strict=True)):
        report_progress("cost and failures", i, len(predictions))
        run = training_run(
            prediction,
            batch_problem,
            tariff=options.tariff,
            reliability=reliability,
            pue=pue,
            calibration=calibration,
        )
        runs.append(run)

    # The page shows commands, for which it needs the job as flags. Callers from Python have none,
    # so they are derived from the problem.
    flags = flags or _flags(problem)
    return DecisionReport(
        chosen.account
        | rows(predictions, runs, machine, chosen.probability_best)
        | {
            "machine": machine.to_dict() | {"checked": checked},
            "job": _job(problem, predictions[0]),
            "recommended": chosen.recommended,
            "price": runs[0].usd_per_device_hour,
            "price_source": runs[0].price_source,
            "tokens": runs[0].tokens,
            "flags": shlex.join(flags),
            "measured_by": shlex.join(_calibrate_flags(flags)),
            "launch": _launch_files_of_first(jobs, predictions, report_progress),
            "timelines": _timelines_of_first(jobs, predictions, calibration, report_progress),
            "clusters": [],
            "profile": None,
        }
    )


@dataclass(frozen=True, kw_only=True)
class _Layouts:
    """The layouts of a report, and where they come from."""

    predictions: tuple[Prediction, ...]
    account: dict[str, Any]
    """The part of the page that says how they were chosen."""
    probability_best: Sequence[float] = ()
    """Probability of each layout to be the best; empty for a single layout."""
    recommended: int = 0
    """Place of the recommended layout."""


def _one_layout(
    problem: Problem, layout: catalog.StatedLayout, calibration: Path | str | None, *, strict: bool
) -> _Layouts:
    """Predict the layout that the user states."""
    complete_layout, _ = layout_of(problem, layout)
    prediction = explain(step_problem_of(problem, calibration), complete_layout, strict=strict)
    return _Layouts(predictions=(prediction,), account={"kind": "prediction"})


def _searched(
    problem: Problem,
    space: SearchSpace | Callable[[Problem], SearchSpace] | None,
    options: SearchOptions,
    calibration: Path | str | None,
    progress: Report | None,
) -> _Layouts:
    """Search for the best layouts.

    Raises:
        PerfModelError: no layout is possible.
    """
    result = search(
        problem, space=space, options=options, calibration=calibration, progress=progress
    )
    if not result.layouts:
        raise PerfModelError(str(result.impossible or f"report: {result.certificate}"))
    predictions = result.layouts
    probability_best = result.robustness.best.tolist() if result.robustness else []

    # The recommended layout may be slower than all of these, but likelier to fit.
    if result.first_to_try not in predictions:
        predictions = (*predictions, result.first_to_try)
        if probability_best:
            probability_best.append(0.0)
    return _Layouts(
        predictions=predictions,
        account=_account(result),
        probability_best=probability_best,
        recommended=predictions.index(result.first_to_try),
    )


def _launch_files_of_first(
    jobs: Sequence[Problem], predictions: Sequence[Prediction], report_progress: Report
) -> list[list[dict[str, str]]]:
    """Launch files of the first layouts only, because they are large."""
    launched = predictions[:LAUNCHED]
    files = []
    for i, (batch_problem, prediction) in enumerate(zip(jobs, launched, strict=False)):
        report_progress("launch files", i, len(launched))
        files.append(launch_files(batch_problem, prediction.layout))
    return files


def _timelines_of_first(
    jobs: Sequence[Problem],
    predictions: Sequence[Prediction],
    calibration: Path | str | None,
    report_progress: Report,
) -> list[str]:
    """Pages of the timelines of the first layouts only, because they are large."""
    timelines = []
    for i, (batch_problem, prediction) in enumerate(
        zip(jobs, predictions[:TIMELINES], strict=False)
    ):
        report_progress("timelines", i, TIMELINES)
        timelines.append(_timeline(batch_problem, calibration, prediction))
    return timelines


def _turned_by_batch(
    problem: Problem,
    calibration: Path | str | None,
    predictions: Sequence[Prediction],
    report_progress: Report,
) -> tuple[Turned, list[int]]:
    """Return how each layout follows the machine's parameters, by its global batch."""
    batches = dict.fromkeys(p.global_batch for p in predictions)
    places: list[list[int]] = []
    batch_problem: list[Turned] = []
    for batch in batches:
        indices = [
            i for i, prediction in enumerate(predictions) if prediction.global_batch == batch
        ]
        step_problem = step_problem_of(problem.replace(global_batch=batch), calibration)
        batch_problem.append(
            turned(step_problem, [predictions[i].layout for i in indices], report_progress)
        )
        places.append(indices)

    # From batch by batch back to the order of the predictions.
    order = np.argsort(np.concatenate([np.array(indices) for indices in places]))
    elasticity = np.concatenate([batch.elasticity for batch in batch_problem])[order]
    ratio = np.concatenate([batch.ratio for batch in batch_problem])[order]
    return replace(batch_problem[0], elasticity=elasticity, ratio=ratio), places[0][:CHECKED]


def _account(result: SearchResult) -> dict[str, Any]:
    """Account of the search: its counts, and the proof of its best layout."""
    return {
        "kind": "search",
        "evaluated": result.evaluated,
        "feasible": result.feasible,
        "seconds": result.seconds,
        "objective": result.objective,
        "constraints": list(result.constraints),
        "certificate": result.certificate,
        "complete": result.complete,
        "rejected": [[why, count] for why, count in result.rejected.items()],
        "beyond": result.beyond and result.beyond.to_dict(),
    }


def _job(problem: Problem, first: Prediction) -> dict[str, Any]:
    """Facts about the job on the page: model, machine and settings that all layouts share."""
    levels = problem.cluster.levels
    return {
        "model": problem.model.name,
        "cluster": problem.cluster.name,
        "device": problem.cluster.device.name,
        "network": levels[-1].name if levels else "",
        "devices": problem.devices or first.devices,
        "devices_per_node": problem.cluster.devices_per_node,
        "framework": problem.framework.label,
        "seq_len": problem.job.seq_len,
        "dtype": problem.job.dtype,
    }


def _flags(problem: Problem) -> list[str]:
    """Command-line flags of a problem stated in Python, if the catalog has its names."""
    job, framework = problem.job, problem.framework
    stated: dict[str, Any] = {
        "--model": problem.model.name,
        "--cluster": problem.cluster.name,
        "--seq-len": job.seq_len,
        "--dtype": job.dtype,
    }
    if framework.name != "generic":
        stated["--framework"] = framework.label
    flags = []
    for flag, value in stated.items():
        if value is not None:
            flags += [flag, str(value)]

    # Further fields of the job that differ from the framework's defaults.
    default_job = framework.job(
        problem.model,
        problem.cluster.device,
        global_batch=job.global_batch,
        seq_len=job.seq_len,
        dtype=job.dtype,
    )
    for name in job_files.JOB_WORDS:
        value = job.value(name)
        if name != "global_batch" and value != default_job.value(name):
            flags += ["--set", f"job.{name}={_toml(value)}"]
    return flags


def _toml(value: Any) -> str:
    """Format the value of a job's field for `--set`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _calibrate_flags(flags: Sequence[str]) -> list[str]:
    """Return a job's flags that `calibrate` also accepts, with values; a job file comes first."""
    kept_flags = []
    for flag, value in pairwise(flags):
        if flag in _CALIBRATE:
            kept_flags += [flag, value]
    return kept_flags


def _timeline(problem: Problem, calibration: Path | str | None, prediction: Prediction) -> str:
    """The page of a layout's timeline; empty if it is too long."""
    explained = explain(step_problem_of(problem, calibration), prediction.layout, timeline=True)
    fits = explained.timeline is not None and explained.timeline.structure.n_ops <= MOST_OPS
    return interactive(explained) if fits else ""


def launch_files(problem: Problem, layout: Layout) -> list[dict[str, str]]:
    """The launch files of a layout: for each format its `name` and `text`, or `why` it cannot run
    the layout; only the problem's framework if that has a format."""
    name = problem.framework.name
    framework_formats = [form for form in FORMATS if name in (form.name, *form.frameworks)]
    files = []
    for form in framework_formats or FORMATS:
        # A framework with a format of its own is asked alone. Otherwise the page offers every
        # format that can run the layout.
        framework_label = problem.framework.label if framework_formats else form.frameworks[0]
        try:
            text = export_launch(
                layout,
                framework_label,
                model=problem.model,
                job=problem.job,
                devices_per_node=problem.cluster.devices_per_node,
            )
            files.append({"name": form.name, "text": text})
        except LaunchFileError as error:
            files.append(
                {
                    "name": form.name,
                    "why": str(error).removeprefix(
                        f"a {form.name} file cannot state {layout.label}: "
                    ),
                }
            )
    return sorted(files, key=lambda file: "why" in file)
