"""The loop closed on the machine at hand: calibrate on two ranks, predict, run on up to eight,
compare."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, compress, groupby
from time import perf_counter
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float
from studies.live_cases import CollectiveCase, LiveCase, check_cases, live_cases
from studies.tables import rows_table

from perfmodel import catalog
from perfmodel.ir import Program
from perfmodel.ir.execution import PairTimes, Run, program_ranks, random_inputs
from perfmodel.ir.execution import run as run_program
from perfmodel.ir.execution.events import rank_events
from perfmodel.ir.execution.pair_times import measure_pair, predict_ranks
from perfmodel.measure import usable_cores
from perfmodel.measure.ranks import EmulatedHosts, Host, RankGroup
from perfmodel.measure.timing import wait_until_quiet
from perfmodel.spec import Cluster, NetworkLevel
from perfmodel.timeline import Timeline
from perfmodel.validation import compare_timelines

INTERFERENCE_LIMIT: Final = 0.06
"""Share of the processor time that others may take during an iteration before it is set aside."""
_CALIBRATION_RANKS: Final = 2
_ATTEMPTS: Final = 3
_FACTORS: Final = (0.5, 8.0)
"""Between which work on cores may take longer than measured."""
_BARS: Final = (
    ("mean_step_error", "step time, mean error", 0.04, "at most"),
    ("largest_step_error", "step time, largest error", 0.10, "at most"),
    ("mean_device_error", "activity of a device, mean error", 0.05, "at most"),
    ("median_stage_error", "start and end of a stage, median error", 0.02, "at most"),
    ("spearman", "rank correlation of step times", 0.98, "at least"),
    ("coverage_90", "inside the 90 % interval", 0.85, "at least"),
)
Progress = Callable[[str, int, int], None]
Case = LiveCase | CollectiveCase


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """Links of the emulated cluster, and the number of runs of each configuration."""

    bandwidth_bytes_per_s: float = 5e6
    """Of each host's link, one way."""
    iterations: int = 3
    """Of each of the two measurements of a configuration."""
    patience_s: float = 20.0
    """How long to wait for a quiet machine before a disturbed run is repeated."""
    at_once: bool = False
    """Whether ranks run at real-time priority, so that what else runs does not disturb them."""


@dataclass(frozen=True, kw_only=True)
class LiveResult:
    """One configuration, predicted and measured."""

    case: str
    ranks: int
    predicted_s: float
    lo_s: float
    """90 % interval."""
    hi_s: float
    measured_s: float
    """Median over the undisturbed iterations of both measurements."""
    noise: float
    """How far apart the two measurements' medians are, as a share of their mean."""
    device_error: float
    """Mean over the devices of the activity error (DistSim, section 5.3)."""
    stage_error: float
    """Median over stages and micro-batches (DistSim, section 5.4)."""
    set_aside: int
    """Iterations left out for interference."""
    disturbed: bool
    """Whether no undisturbed iteration came, so that disturbed ones are all there is."""

    @property
    def error(self) -> float:
        """Relative error of the step time."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class LiveReport:
    """Results of all configurations."""

    results: tuple[LiveResult, ...]
    check_errors: tuple[float, ...]
    """Relative errors of the calibration's own two-rank programs."""
    half_width: float
    """Of the 90 % interval, in log time."""
    calibration: PairTimes
    calibration_s: float
    """Wall-clock time of the whole calibration, its two-rank programs and any wait for a quiet
    machine included."""
    at_once: bool = False
    """Whether ranks ran at real-time priority."""

    def to_dict(self) -> dict[str, Any]:
        """Figures over all configurations, and a row for each."""
        from scipy.stats import spearmanr

        # Everything a report prints is computed here, so that page and JSON agree.
        rows = self.results
        errors = np.abs([r.error for r in rows])
        noise = [r.noise for r in rows]
        # Whether the faster of two configurations is predicted to be so.
        ranks = spearmanr([r.predicted_s for r in rows], [r.measured_s for r in rows])
        # The paper compares device-seconds of profiling with those of running.
        calibration_device_s = _CALIBRATION_RANKS * self.calibration_s
        step_of_each_device_s = sum(r.ranks * r.measured_s for r in rows)
        return {
            "configurations": len(rows),
            "mean_step_error": float(errors.mean()),
            "largest_step_error": float(errors.max()),
            "mean_device_error": float(np.mean([r.device_error for r in rows])),
            "median_stage_error": float(np.nanmedian([r.stage_error for r in rows])),
            "spearman": float(ranks[0]),  # pyright: ignore[reportArgumentType]
            "coverage_90": float(np.mean([r.lo_s <= r.measured_s <= r.hi_s for r in rows])),
            "mean_noise": float(np.mean(noise)),
            "largest_noise": float(np.max(noise)),
            "iterations_set_aside": sum(r.set_aside for r in rows),
            "disturbed_configurations": sum(r.disturbed for r in rows),
            "check_errors": list(self.check_errors),
            "ran_at_once": self.at_once,
            "core_factor": self.calibration.core_factor,
            "interval_half_width": self.half_width,
            "calibration_device_s": calibration_device_s,
            "step_of_each_device_s": step_of_each_device_s,
            "calibration_in_steps_of_each": calibration_device_s / step_of_each_device_s,
            "results": [asdict(r) | {"error": r.error} for r in rows],
        }


def validate_live(
    settings: LiveSettings | None = None,
    cases: Sequence[Case] | None = None,
    checks: Sequence[Case] | None = None,
    progress: Progress = lambda *_: None,
) -> LiveReport:
    """Calibrate on two ranks, predict every configuration, then measure it on emulated hosts.

    Two-rank programs belong to the calibration. They tell how much longer work on cores takes
    between messages than when it was measured by itself (caches have gone cold), and what remains
    of their log errors is a sample of what any prediction may be off by: a further one lies within
    t * s * sqrt(1 + 1/k) of zero with a probability of 90 %, by Student's t of the k - 1 degrees of
    freedom that the one fitted factor leaves.

    Raises:
        CalibrationError: hosts cannot be emulated here (Linux, root, iproute2), or a rank failed.
    """
    settings = settings or LiveSettings()
    cases = live_cases() if cases is None else list(cases)
    checks = check_cases() if checks is None else list(checks)
    programs: dict[Case, Program] = {case: case.program() for case in (*checks, *cases)}
    to_check = {case: programs[case] for case in checks}
    to_predict = {case: programs[case] for case in cases}
    n_hosts = max(2, *(case.hosts for case in programs))
    with EmulatedHosts(n_hosts, settings.bandwidth_bytes_per_s) as emulated:
        events = []
        for case, program in programs.items():
            events += rank_events(program.function, _cluster(case, settings))

        # Two ranks measure every event of all programs, and run the check programs.
        start_s = perf_counter()
        pair = measure_pair(events, emulated.hosts, progress)
        checked = _measure(to_check, emulated.hosts, settings, progress)
        calibration_s = perf_counter() - start_s
        pair, log_errors = _fit_core_factor(pair, programs, checked, settings)

        # Everything is predicted before anything of it is measured.
        predicted = {case: _predict(case, programs[case], pair, settings) for case in cases}
        runs = _measure(to_predict, emulated.hosts, settings, progress)
    half_width = _interval(log_errors)
    return LiveReport(
        results=tuple(
            _result(case, predicted[case], runs[case], half_width, settings) for case in cases
        ),
        check_errors=tuple(np.expm1(log_errors).tolist()),
        half_width=half_width,
        calibration=pair,
        calibration_s=calibration_s,
        at_once=settings.at_once,
    )


def _fit_core_factor(
    pair: PairTimes,
    programs: dict[Case, Program],
    checked: dict[Case, list[Run]],
    settings: LiveSettings,
) -> tuple[PairTimes, Float[np.ndarray, " checks"]]:
    """Fit the core factor by least squares of log(predicted / measured); returns it with the
    residuals."""
    from scipy.optimize import minimize_scalar

    measured_s = np.array([_result_s(runs, settings) for runs in checked.values()])

    def log_errors(factor: float) -> Float[np.ndarray, " checks"]:
        """Log of predicted over measured where work on cores takes a factor longer."""
        scaled = replace(pair, core_factor=factor)
        predicted_s = [
            _predict(case, programs[case], scaled, settings).makespan_s for case in checked
        ]
        return np.log(predicted_s / measured_s)

    # One factor for all work on cores: fewer programs than that cannot fit more.
    fitted = minimize_scalar(
        lambda f: float((log_errors(f) ** 2).sum()), bounds=_FACTORS, method="bounded"
    )
    factor = float(fitted.x)  # pyright: ignore[reportAttributeAccessIssue]
    return replace(pair, core_factor=factor), log_errors(factor)


def _interval(log_errors: Float[np.ndarray, " checks"]) -> float:
    """Half-width of the 90 % prediction interval of a further log error."""
    from scipy.stats import t

    k = len(log_errors)
    return float(t.ppf(0.95, k - 1) * np.sqrt((log_errors**2).sum() / (k - 1) * (1 + 1 / k)))


def _cluster(case: Case, settings: LiveSettings) -> Cluster:
    """The emulated hosts of a case as a cluster, which tells levels apart and prices nothing."""
    inner = NetworkLevel(
        name="loopback", size=case.ranks_per_host, bandwidth_bytes_per_s=1e9, latency_s=1e-5
    )
    outer = NetworkLevel(
        name="emulated",
        size=case.ranks,
        bandwidth_bytes_per_s=settings.bandwidth_bytes_per_s,
        latency_s=1e-4,
    )
    return Cluster(name="emulated hosts", device=catalog.device("cpu"), levels=(inner, outer))


def _predict(case: Case, program: Program, pair: PairTimes, settings: LiveSettings) -> Timeline:
    """The timeline of a case from measurements of two ranks, cores shared as ranks share them."""
    cores = usable_cores()
    core_of_rank = [cores[rank % len(cores)] for rank in range(case.ranks)]
    return predict_ranks(program.function, _cluster(case, settings), pair, core_of_rank)


def _measure(
    programs: dict[Case, Program], hosts: Sequence[Host], settings: LiveSettings, progress: Progress
) -> dict[Case, list[Run]]:
    """Measure every configuration twice, on ranks that are started once per number of ranks and
    hosts."""
    runs: dict[Case, list[Run]] = {}
    # Ranks are started once for all programs of a size: starting takes seconds.
    ordered = sorted(programs, key=lambda case: (case.ranks, case.hosts))
    for (ranks, n_hosts), members in groupby(ordered, key=lambda case: (case.ranks, case.hosts)):
        with program_ranks(ranks, hosts=hosts[:n_hosts]) as group:
            for case in members:
                progress(case.name, len(runs), len(programs))
                runs[case] = [_undisturbed(programs[case], group, settings) for _ in range(2)]
    return runs


def _undisturbed(program: Program, group: RankGroup, settings: LiveSettings) -> Run:
    """A run of which at least half of the iterations are undisturbed, or the last attempt."""
    inputs = random_inputs(program)
    for attempts_left in reversed(range(_ATTEMPTS)):
        result = run_program(program, inputs, repeats=settings.iterations, ranks=group)
        if not attempts_left or np.mean(_is_undisturbed(result, settings)) >= 0.5:
            return result
        # Whatever disturbed the run may be over soon.
        wait_until_quiet(INTERFERENCE_LIMIT, settings.patience_s)
    raise AssertionError("unreachable")


def _is_undisturbed(result: Run, settings: LiveSettings) -> Bool[np.ndarray, " runs"]:
    """Whether other work took little processor time from each iteration."""
    return settings.at_once | (result.interference <= INTERFERENCE_LIMIT)


def _clean(runs: Sequence[Run], settings: LiveSettings) -> tuple[list[list[Timeline]], bool]:
    """Undisturbed iterations of each measurement; all iterations, and True, if a measurement has
    none."""
    # An iteration that others disturbed says nothing of a prediction.
    clean = [list(compress(r.timelines, _is_undisturbed(r, settings))) for r in runs]
    return (clean, False) if all(clean) else ([list(r.timelines) for r in runs], True)


def _result_s(runs: Sequence[Run], settings: LiveSettings) -> float:
    """Median step time over the iterations of both measurements that count."""
    used, _ = _clean(runs, settings)
    return _median_s(list(chain(*used)))


def _median_s(timelines: Sequence[Timeline]) -> float:
    """Median step time of some iterations."""
    return float(np.median([timeline.makespan_s for timeline in timelines]))


def _result(
    case: Case, predicted: Timeline, runs: Sequence[Run], half_width: float, settings: LiveSettings
) -> LiveResult:
    """The result of one case: predicted and measured."""
    used, disturbed = _clean(runs, settings)
    # The same configuration measured twice: the difference is noise.
    first_s, second_s = map(_median_s, used)
    timelines = list(chain(*used))
    errors = compare_timelines(predicted, timelines)
    return LiveResult(
        case=case.name,
        ranks=case.ranks,
        predicted_s=predicted.makespan_s,
        lo_s=predicted.makespan_s * float(np.exp(-half_width)),
        hi_s=predicted.makespan_s * float(np.exp(half_width)),
        measured_s=_result_s(runs, settings),
        noise=abs(first_s - second_s) / float(np.mean([first_s, second_s])),
        device_error=float(np.nanmean(errors.activity_error)),
        stage_error=errors.median_stage_error,
        set_aside=sum(len(r.timelines) for r in runs) - len(timelines),
        disturbed=disturbed,
    )


def live_report(report: LiveReport) -> str:
    """The report as Markdown."""
    figures = report.to_dict()
    lines = [
        "# Live validation",
        "",
        f"Calibrated on two ranks, then {figures['configurations']} configurations predicted and run on 2 to 8 ranks "
        "in network namespaces (`make live`).",
        "",
        "| figure | reached | to reach | |",
        "|---|--:|--:|---|",
    ]
    # Every bar is told, met or not.
    for key, name, bar, sense in _BARS:
        reached = figures[key]
        met = reached <= bar if sense == "at most" else reached >= bar
        # A rank correlation is no share.
        digits = ".3f" if key == "spearman" else ".1%"
        verdict = "met" if met else "not met"
        lines.append(f"| {name} | {reached:{digits}} | {sense} {bar:{digits}} | {verdict} |")
    checks = ", ".join(f"{error:+.1%}" for error in figures["check_errors"])
    lines += [
        "",
        f"Noise floor, the same configuration measured twice: mean {figures['mean_noise']:.1%}, largest "
        f"{figures['largest_noise']:.1%}. {_disturbances_text(figures)}",
        f"The calibration's own two-rank programs say that work on cores takes {figures['core_factor']:.2f} times as "
        f"long as by itself; they are then off by {checks}, which gives the 90 % interval of "
        f"±{figures['interval_half_width']:.1%}.",
        "",
        f"Profiling cost, measured on both sides (DistSim, table 3): the calibration took "
        f"{figures['calibration_device_s']:,.0f} device-seconds on two ranks; one step of every configuration takes "
        f"{figures['step_of_each_device_s']:,.0f}. Calibrating therefore costs as much as "
        f"{figures['calibration_in_steps_of_each']:,.1f} steps of each.",
        "",
    ]
    head = (
        "configuration",
        "ranks",
        "predicted ms",
        "measured ms",
        "error",
        "noise",
        "device",
        "stage",
        "set aside",
    )
    rows = [
        (
            r.case,
            r.ranks,
            f"{1e3 * r.predicted_s:.1f}",
            f"{1e3 * r.measured_s:.1f}",
            f"{r.error:+.1%}",
            f"{r.noise:.1%}",
            f"{r.device_error:.1%}",
            "" if np.isnan(r.stage_error) else f"{r.stage_error:.1%}",
            r.set_aside,
        )
        for r in report.results
    ]
    return "\n".join([*lines, rows_table(head, rows)]) + "\n"


def _disturbances_text(figures: Mapping[str, Any]) -> str:
    """Sentence on how other work was kept away from the figures, or how much of it there was."""
    if figures["ran_at_once"]:
        return "Ranks ran at real-time priority, so that other work waited for them."
    return (
        f"Iterations set aside for interference: {figures['iterations_set_aside']}; configurations without an "
        f"undisturbed one: {figures['disturbed_configurations']}."
    )
