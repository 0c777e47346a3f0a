"""Faults that lengthen a step, with the predicted step time at several severities."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from perfmodel.cost import has_power_law
from perfmodel.errors import PerfModelError
from perfmodel.planning.what_if import Scenario, Setting, model_in_scenario, step_s
from perfmodel.prediction import Prediction, StepProblem, check_layout, explain
from perfmodel.spec import Layout

DATA_LOADING: Final = "data_loading"
SLOW_RANK: Final = "slow_rank"
LOW_CLOCKS: Final = "low_clocks"
CHECKPOINTS: Final = "checkpoints"
EVALUATIONS: Final = "evaluations"
PERIODIC_STALLS: Final = "periodic_stalls"
SLOWS_DOWN: Final = "slows_down"
SKIPPED_STEPS: Final = "skipped_steps"
REPORTED: Final = frozenset({CHECKPOINTS, EVALUATIONS, SKIPPED_STEPS})
"""Causes that the log reports by name, so that no measurement has to confirm them."""


@dataclass(frozen=True, kw_only=True)
class Severity:
    """One fault of a run at one severity, with its effect on the step."""

    description: str
    """The severity in words, such as `at 25 % of its bandwidth`."""
    weight: float
    """How likely this severity is if the fault occurs."""
    step_s: float
    gradient_sync_s: float | None = None
    """Time of reductions and gathers of weights that the step waits for; None where it was not
    predicted."""
    small_batch_s: float | None = None
    """The step with the smallest batch in the log; None where the batch is always the same."""
    passes_s: float | None = None
    """Seconds of passes without waiting between pipeline stages, on the fastest rank; None where
    not predicted."""
    clock_share: float = 1.0
    """Clock of all devices relative to the usual one."""
    peak_bytes: Mapping[str, float] | None = None
    """Peak of memory by counter; None if the fault does not change it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A possible cause that the log alone cannot show."""

    name: str
    title: str
    prior: float
    """How often the fault occurs, relative to the others."""
    severities: tuple[Severity, ...]
    remedy: str
    setting: str = ""
    """The field of the layout or job that differs from the script, where the fault is a setting."""

    @property
    def may_begin_later(self) -> bool:
        """Whether the fault can begin during a run: settings hold from its start."""
        return not self.setting


@dataclass(frozen=True, kw_only=True)
class _MachineFault:
    """A fault of the machine, as settings of a what-if."""

    name: str
    title: str
    prior: float
    settings: Callable[[StepProblem, Layout, float], Sequence[Setting]]
    values: Mapping[float, float]
    """Weight of every value of the settings."""
    description: str
    """Sentence about a severity, with its value in place of `{}`."""
    remedy: str
    applies: Callable[[StepProblem, Layout], bool] = lambda problem, layout: True


@dataclass(frozen=True, kw_only=True)
class _SettingFault:
    """A setting whose effective value may differ from the script's."""

    name: str
    title: str
    prior: float
    fields: Mapping[str, Any]
    """Fields of the layout or job with the fault."""
    remedy: str

    def differs(self, stated: Mapping[str, Any]) -> bool:
        """Whether the script's layout or job differs in any of these fields."""
        return any(stated[field] != value for field, value in self.fields.items())


def _times(name: str) -> Callable[[StepProblem, Layout, float], Sequence[Setting]]:
    return lambda problem, layout, value: [Setting(name, "times", value)]


def _slow_rank(problem: StepProblem, layout: Layout, value: float) -> Sequence[Setting]:
    # A device fails on any stage alike; one in the middle stands for all.
    return [
        Setting("slow_rank", "to", float(layout.pp // 2)),
        Setting("slow_factor", "times", value),
    ]


def _low_clocks(problem: StepProblem, layout: Layout, value: float) -> Sequence[Setting]:
    """Settings of a machine whose devices run at a share of their clock."""
    # Where a power limit decides the clock, a lower peak rate alone changes little.
    device = problem.cluster.device
    settings = [Setting("compute_rate", "times", value)]
    if has_power_law(device) and device.power_w is not None:
        settings.append(Setting("power_limit", "times", value))
    return settings


# Priors and severities are an engineer's judgement, not fitted: a slow device or link is common, a
# whole machine at low clocks is rare, and small deviations of devices and hosts are more frequent
# than large ones. Links fail in large steps just as often: rails that are down leave a half to an
# eighth, a fall back from RDMA to sockets a twentieth.
_MACHINE_FAULTS: Final = (
    _MachineFault(
        name="slow_inter_node_link",
        title="network between nodes below its rate",
        prior=1.0,
        settings=_times("inter_node_bandwidth"),
        values={0.7: 1, 0.5: 1, 0.35: 1, 0.25: 1, 0.12: 1, 0.05: 1},
        description="at {:.0%} of its bandwidth",
        remedy="check link errors and rates (ibstat, NCCL_DEBUG=INFO for the adapters in use), and GPUDirect RDMA",
        applies=lambda problem, layout: layout.devices > problem.cluster.devices_per_node,
    ),
    _MachineFault(
        name="slow_intra_node_link",
        title="links inside a node below their rate",
        prior=0.4,
        settings=_times("intra_node_bandwidth"),
        values={0.5: 1, 0.25: 1, 0.1: 1},
        description="at {:.0%} of their bandwidth",
        remedy="check nvidia-smi topo -m and nvlink --status: a link that is down falls back to PCIe",
    ),
    _MachineFault(
        name=SLOW_RANK,
        title="one slow device that all others wait for",
        prior=1.0,
        settings=_slow_rank,
        values={1.1: 7, 1.2: 6, 1.35: 4, 1.6: 2, 2.0: 1},
        description="it takes {:.2g} times as long as the others",
        remedy="drain the node of that rank; look for thermal throttling, ECC errors or another process on it",
        applies=lambda problem, layout: layout.devices > 1,
    ),
    _MachineFault(
        name=LOW_CLOCKS,
        title="all devices at low clocks",
        prior=0.3,
        settings=_low_clocks,
        values={0.85: 2, 0.7: 2, 0.55: 1},
        description="at {:.0%} of their rate and power limit",
        remedy="check power limits and throttle reasons (nvidia-smi -q -d POWER,CLOCK,PERFORMANCE)",
    ),
    _MachineFault(
        name="host_bound",
        title="hosts too slow to launch kernels in time",
        prior=0.8,
        settings=_times("host_op_s"),
        values={1.5: 7, 2.0: 4, 3.0: 2, 5.0: 1},
        description="each operator takes {:.2g} times as long to launch",
        remedy="unset CUDA_LAUNCH_BLOCKING and debug switches, pin processes to cores, use CUDA graphs or compile",
    ),
)
_LAYOUT_SETTINGS: Final = (
    _SettingFault(
        name="overlap_off",
        title="communication of gradients and weights is not overlapped",
        prior=0.6,
        fields={"overlap_grad_reduce": False, "overlap_param_gather": False},
        remedy="check that the overlap flags reach the run (its arguments in the log), and CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    _SettingFault(
        name="tp_overlap_off",
        title="communication of tensor parallelism is not overlapped",
        prior=0.3,
        fields={"tp_overlap": False},
        remedy="check in the log that the run has the flags for overlapping tensor parallelism, and could allocate its buffers",
    ),
    _SettingFault(
        name="full_recompute",
        title="whole layers are recomputed",
        prior=0.3,
        fields={"recompute": "full", "recompute_full_layers": None},
        remedy="check the recompute flags in the arguments that the log prints",
    ),
)
_JOB_SETTINGS: Final = (
    _SettingFault(
        name="unfused_attention",
        title="attention is not fused",
        prior=0.2,
        fields={"flash_attention": False},
        remedy="check that the log names the fused attention kernel that the script asks for",
    ),
    _SettingFault(
        name="blocking_launches",
        title="the host waits for every kernel",
        prior=0.1,
        fields={"blocking_launches": True},
        remedy="unset CUDA_LAUNCH_BLOCKING",
    ),
)
_BETWEEN: Final = 4
"""Number of steps in which severities between two predicted ones are interpolated."""
_LEAST_EFFECT: Final = 0.005
"""Least effect of a fault that is worth naming, relative to the step."""
_SYNC_PARTS: Final = ("data_parallel_communication_exposed",)
_BESIDE_PASSES: Final = (
    *_SYNC_PARTS,
    "optimizer",
    "pipeline_communication_exposed",
    "host_copies_exposed",
    "bubble",
    "waiting_for_input",
    "generation",
    "step_overhead",
    "stragglers",
    "beyond_all_parameters",
)
"""Activities of `Prediction.breakdown_s` outside of passes."""


def sync_seconds(prediction: Prediction) -> float:
    """Seconds that a predicted step waits for gradient reductions and weight gathers."""
    return sum(prediction.breakdown_s.get(part, 0.0) for part in _SYNC_PARTS)


def passes_seconds(prediction: Prediction) -> float:
    """Predicted seconds of passes in a step, without waiting between stages; mean over ranks."""
    return sum(
        seconds for part, seconds in prediction.breakdown_s.items() if part not in _BESIDE_PASSES
    )


def faults(
    problem: StepProblem,
    layout: Layout,
    expected_s: float,
    *,
    has_timers: bool = False,
    small_batch: int | None = None,
) -> list[Fault]:
    """The faults that could lengthen this layout's step, with the step time at each severity.

    Args:
        problem: the job as it ran.
        layout: layout of the launch script.
        expected_s: the step without a fault.
        has_timers: whether the log times passes or reductions of gradients, which are then
            predicted too.
        small_batch: the smallest batch of a log whose batch grows, at which the step is predicted
            too.
    """
    # Options and job settings can only be a cause if the script asks for something else.
    applicable = [fault for fault in _MACHINE_FAULTS if fault.applies(problem, layout)]
    candidates = [
        _machine_fault(problem, layout, fault, has_timers, small_batch) for fault in applicable
    ]
    for setting in _LAYOUT_SETTINGS:
        if setting.differs(layout.values()):
            candidates.append(
                _setting_fault(problem, replace(layout, **setting.fields), setting, small_batch)
            )
    for setting in _JOB_SETTINGS:
        if setting.differs(problem.job.values()):
            changed = replace(problem, job=replace(problem.job, **setting.fields))
            candidates.append(_setting_fault(changed, layout, setting, small_batch))
    if small_batch is None:
        small_batch_s = None
    else:
        small_batch_s = step_s(with_batch(problem, small_batch), layout, Scenario())
    candidates.append(_data_loading(expected_s, small_batch_s))
    return [fault for fault in candidates if fault is not None and _has_effect(fault, expected_s)]


def with_batch(problem: StepProblem, global_batch: int) -> StepProblem:
    """The problem with another global batch."""
    return replace(problem, job=replace(problem.job, global_batch=global_batch))


def _has_effect(fault: Fault, expected_s: float) -> bool:
    return any(severity.step_s > expected_s * (1 + _LEAST_EFFECT) for severity in fault.severities)


def _machine_fault(
    problem: StepProblem,
    layout: Layout,
    fault: _MachineFault,
    has_timers: bool,
    small_batch: int | None,
) -> Fault | None:
    """Predict the step under a machine fault at each severity; None if it cannot occur."""
    severities = []
    for value, weight in fault.values.items():
        scenario = Scenario(tuple(fault.settings(problem, layout, value)))
        try:
            seconds = step_s(problem, layout, scenario)
        except PerfModelError:
            # A schedule whose stages have replicas has no single slow rank.
            return None

        # Timers of gradient synchronisation tell links from other faults. A slow rank does not slow
        # reductions: its effect on timers depends on where the others wait.
        sync_s = passes_s = None
        if has_timers and fault.name != SLOW_RANK:
            changed = explain(model_in_scenario(problem, scenario), layout)
            sync_s = sync_seconds(changed)
            passes_s = passes_seconds(changed)
        small_batch_s = None
        if small_batch is not None:
            small_batch_s = step_s(with_batch(problem, small_batch), layout, scenario)
        severities.append(
            Severity(
                description=fault.description.format(value),
                weight=weight,
                step_s=seconds,
                gradient_sync_s=sync_s,
                passes_s=passes_s,
                clock_share=value if fault.name == LOW_CLOCKS else 1.0,
                small_batch_s=small_batch_s,
            )
        )
    return Fault(
        name=fault.name,
        title=fault.title,
        prior=fault.prior,
        severities=_refined(fault, severities),
        remedy=fault.remedy,
    )


def _refined(fault: _MachineFault, severities: Sequence[Severity]) -> tuple[Severity, ...]:
    """Interpolate severities between the predicted ones, whose steps can differ greatly in length.

    Between two, times follow a power of the value, and weights a straight line.
    """
    refined = []
    values = list(fault.values)

    # A few predicted severities, interpolated: each prediction takes a step's evaluation.
    for (low, low_value), (high, high_value) in pairwise(zip(severities, values, strict=True)):
        for part in range(_BETWEEN):
            share = part / _BETWEEN
            value = _geometric_mean(low_value, high_value, share)
            sync_s = None
            if low.gradient_sync_s is not None and high.gradient_sync_s is not None:
                sync_s = (1 - share) * low.gradient_sync_s + share * high.gradient_sync_s
            small_batch_s = passes_s = None
            if low.small_batch_s is not None and high.small_batch_s is not None:
                small_batch_s = _geometric_mean(low.small_batch_s, high.small_batch_s, share)
            if low.passes_s is not None and high.passes_s is not None:
                passes_s = _geometric_mean(low.passes_s, high.passes_s, share)
            refined.append(
                Severity(
                    description=fault.description.format(value),
                    weight=(1 - share) * low.weight + share * high.weight,
                    step_s=_geometric_mean(low.step_s, high.step_s, share),
                    gradient_sync_s=sync_s,
                    passes_s=passes_s,
                    clock_share=_geometric_mean(low.clock_share, high.clock_share, share),
                    small_batch_s=small_batch_s,
                )
            )
    refined.append(severities[-1])
    total = sum(severity.weight for severity in refined)
    return tuple(replace(severity, weight=severity.weight / total) for severity in refined)


def _geometric_mean(low: float, high: float, share: float) -> float:
    return low ** (1 - share) * high**share


def _setting_fault(
    problem: StepProblem, layout: Layout, setting: _SettingFault, small_batch: int | None
) -> Fault | None:
    """Predict the step of a problem and layout to which the setting was applied; None if they
    cannot run with it."""
    try:
        check_layout(problem.model, problem.cluster, problem.job, layout)
        changed = explain(problem, layout)
        if small_batch is None:
            small_batch_s = None
        else:
            small_batch_s = step_s(with_batch(problem, small_batch), layout, Scenario())
    except PerfModelError:
        # A setting that this layout cannot have is not the cause.
        return None
    severity = Severity(
        description="",
        weight=1.0,
        step_s=changed.step_time_s,
        gradient_sync_s=sync_seconds(changed),
        passes_s=passes_seconds(changed),
        small_batch_s=small_batch_s,
        peak_bytes=changed.memory_counted_bytes,
    )
    return Fault(
        name=setting.name,
        title=setting.title,
        prior=setting.prior,
        severities=(severity,),
        remedy=setting.remedy,
        setting=", ".join(setting.fields),
    )


def _data_loading(expected_s: float, small_batch_s: float | None) -> Fault:
    """A data loader that every step waits for, at several waiting times.

    Args:
        expected_s: the step that does not wait.
        small_batch_s: step with the smallest batch in the log, if the batch grows.
    """
    # Small delays are more frequent than large ones, by judgement as for faults of the machine.
    weights = {0.1: 3, 0.25: 2, 0.5: 1, 1.0: 1}
    severities = []
    for share, weight in weights.items():
        # A smaller batch may be loaded in less time, or after the same wait.
        waits_s: tuple[float | None, ...] = (None,)
        if small_batch_s is not None:
            waits_s = (small_batch_s * share, expected_s * share)
        for wait_s in waits_s:
            waiting_batch_s = None
            if small_batch_s is not None and wait_s is not None:
                waiting_batch_s = small_batch_s + wait_s
            severities.append(
                Severity(
                    description="",
                    weight=weight / 7 / len(waits_s),
                    step_s=expected_s * (1 + share),
                    small_batch_s=waiting_batch_s,
                )
            )
    return Fault(
        name=DATA_LOADING,
        title="every step waits for its data",
        prior=0.4,
        severities=tuple(severities),
        remedy="use more loader workers, prefetch, and data on local disks",
    )
