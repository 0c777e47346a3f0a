"""Steps drawn from the whole catalog: models, clusters, frameworks and layouts that are possible
together."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Final, get_args

from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.prediction import (
    Prediction,
    StepProblem,
    check_layout,
    explain,
    step_problem,
    step_times_s,
)
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Cluster, ContextParallel, Framework, Job, Layout, Model

EXPLORES: Final = "PERFMODEL_EXPLORE" in os.environ
ROUNDING: Final = 1e-4
"""Networks of kernels compute in float32."""


def some(examples: int) -> settings:
    """So many examples in a gate, fifty times as many where others are explored."""
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(
        max_examples=examples * (50 if EXPLORES else 1), deadline=None, suppress_health_check=slow
    )


@dataclass(frozen=True, repr=False)
class Case:
    """One step, and how long it takes; variants of it by `laid`, `on_device`, `on_level` and
    `dataclasses.replace`."""

    model: Model
    cluster: Cluster
    framework: Framework
    layout: Layout
    rounds: int
    """Micro-batches of every replica."""
    seq_len: int
    dtype: str
    job_fields: tuple[tuple[str, Any], ...] = ()
    """What else the job says."""

    def __repr__(self) -> str:
        device = self.cluster.device.name
        machine = f"{self.cluster.name} ({device})"
        work = f"{self.rounds} micro-batches of {self.seq_len} tokens in {self.dtype}"
        more = "".join(f", {name}={value}" for name, value in self.job_fields)
        return f"<{self.model.name} on {machine} by {self.framework.label}, {self.layout.label}, {work}{more}>"

    @cached_property
    def job(self) -> Job:
        batch = self.layout.dp * self.layout.micro_batch * self.rounds
        device = self.cluster.device
        said = dict(self.job_fields)
        return self.framework.job(
            self.model, device, global_batch=batch, seq_len=self.seq_len, dtype=self.dtype, **said
        )

    @cached_property
    def problem(self) -> StepProblem:
        check_layout(self.model, self.cluster, self.job, self.layout)
        return step_problem(self.model, self.cluster, self.job, None, self.framework)

    @cached_property
    def step_s(self) -> float:
        return float(step_times_s(self.problem, [self.layout])[0])

    @cached_property
    def prediction(self) -> Prediction:
        return explain(self.problem, self.layout)

    @cached_property
    def possible(self) -> bool:
        try:
            return bool(self.problem) and not self.framework.refused(self.layout)
        except PerfModelError:
            return False

    def laid(self, **changes: Any) -> "Case":
        return replace(self, layout=self.layout.replace(**changes))

    def on_device(self, **changes: Any) -> "Case":
        return replace(
            self, cluster=replace(self.cluster, device=replace(self.cluster.device, **changes))
        )

    def on_level(self, index: int, **changes: Any) -> "Case":
        levels = list(self.cluster.levels)
        levels[index] = replace(levels[index], **changes)
        return replace(self, cluster=replace(self.cluster, levels=tuple(levels)))

    def on_every_kind(self, change: Callable[[Cluster], Cluster]) -> "Case":
        """On a cluster whose nodes, of every kind, are changed."""
        kinds = tuple(change(kind) for kind in self.cluster.kinds)
        return replace(self, cluster=replace(change(self.cluster), kinds=kinds))

    def with_twice_of_everything(self) -> "Case":
        """Twice the peaks and bandwidths, half the latencies, of devices, links and hosts of every
        kind of nodes."""

        def doubled(cluster: Cluster) -> Cluster:
            device = cluster.device
            peak = replace(
                device.peak, **{name: rate and 2 * rate for name, rate in vars(device.peak).items()}
            )
            host = device.host_bandwidth_bytes_per_s
            device = replace(
                device,
                peak=peak,
                memory_bandwidth_bytes_per_s=2 * device.memory_bandwidth_bytes_per_s,
                host_bandwidth_bytes_per_s=host and 2 * host,
            )
            levels = tuple(
                replace(
                    level,
                    bandwidth_bytes_per_s=2 * level.bandwidth_bytes_per_s,
                    latency_s=level.latency_s / 2,
                )
                for level in cluster.levels
            )
            return replace(cluster, device=device, levels=levels)

        return self.on_every_kind(doubled)

    def with_peak(self, times: float) -> "Case":
        peak = self.cluster.device.peak
        rates = {name: None if rate is None else rate * times for name, rate in vars(peak).items()}
        return self.on_device(peak=replace(peak, **rates))

    def with_memory_bandwidth(self, times: float) -> "Case":
        rate = self.cluster.device.memory_bandwidth_bytes_per_s
        return self.on_device(memory_bandwidth_bytes_per_s=rate * times)

    def with_link(self, index: int, bandwidth: float = 1.0, latency: float = 1.0) -> "Case":
        level = self.cluster.levels[index]
        return self.on_level(
            index,
            bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * bandwidth,
            latency_s=level.latency_s * latency,
        )


def assert_between(
    shorter: Case, longer: Case, most: float = float("inf"), least: float = 1.0
) -> None:
    """The longer step takes at least as long as the shorter one (`least` times), and at most `most`
    times as long; nothing where one of them is not possible."""
    if shorter.possible and longer.possible:
        ratio = longer.step_s / shorter.step_s
        assert least * (1 - ROUNDING) <= ratio <= most * (1 + ROUNDING), (ratio, shorter, longer)


SCHEDULES: Final = [name for name in schedule_names() if name != "forward"]
FLUSHED: Final = [
    name
    for name in SCHEDULES
    if not (get_schedule(name).asynchronous or get_schedule(name).staggered)
]

_CLUSTERS = [name for name in catalog.clusters() if name != "localhost"]
_FRAMEWORKS = [
    version for name in catalog.frameworks() for version in catalog.framework_versions(name)
]
_DEVICES = [
    "V100-SXM2-32GB",
    "A100-SXM4-80GB",
    "A100-PCIE-80GB",
    "H100-SXM5-80GB",
    "H100-PCIE-80GB",
    "H200-SXM-141GB",
    "GH200-96GB",
    "B200-SXM-180GB",
    "B300-SXM",
    "GB200-NVL72",
    "GB300-NVL72",
    "MI300X",
    "MI325X",
    "MI355X",
    "L40S",
    "TPU-v4",
    "TPU-v5p",
    "TPU-v6e",
]
"""Devices that a cluster's networks are drawn with besides its own."""
_DTYPES = ("bf16", "fp16", "fp8", "fp32", "tf32")
_LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
    for tp, pp, dp, cp, ep in product((1, 2, 8), (1, 4), (1, 4, 16), (1, 2), (1, 4))
    if (dp * cp) % ep == 0
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a model, cluster, framework, schedule and layout that are possible together."""
    cluster = catalog.cluster(draw(st.sampled_from(_CLUSTERS)))
    if draw(st.booleans()):
        cluster = replace(cluster, device=catalog.device(draw(st.sampled_from(_DEVICES))))
    model = catalog.model(draw(st.sampled_from(catalog.models())))
    framework = draw(st.sampled_from(_FRAMEWORKS))
    dtypes = [dtype for dtype in _DTYPES if dtype in cluster.device.dtypes] or list(
        cluster.device.dtypes
    )
    start = Case(
        model=model,
        cluster=cluster,
        framework=framework,
        layout=Layout(),
        rounds=draw(st.sampled_from([1, 4, 8, 16])),
        seq_len=draw(st.sampled_from([1024, 2048, 8192])),
        dtype=draw(st.sampled_from(dtypes)),
    )
    changes = {
        "micro_batch": draw(st.sampled_from([1, 1, 2, 4])),
        "zero": draw(st.sampled_from([0, 1, 2, 3])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "sequence_parallel": draw(st.booleans()),
        "tp_overlap": draw(st.sampled_from([False, False, True])),
        "schedule": draw(st.sampled_from(["1f1b", "gpipe", "zb-h1"]) | st.sampled_from(SCHEDULES)),
        "cp_kind": draw(st.sampled_from(get_args(ContextParallel))),
        "vpp": draw(st.sampled_from([1, 1, 2])),
    }
    offset = draw(st.integers(0, len(_LAYOUTS) - 1))
    for layout in _LAYOUTS[offset:] + _LAYOUTS[:offset]:
        # few schedules have two
        for chunks in {
            changes["vpp"] if layout.pp > 1 else 1: None,
            1: None,
        }:
            case = replace(start, layout=layout.replace(**changes | {"vpp": chunks}))
            if case.possible:
                return case
    return reject()


_MIXED: Final = Cluster.of_kinds(
    "mixed",
    [
        replace(catalog.cluster(name), name=name[-4:], max_devices=64)
        for name in ("dgx-a100", "dgx-h100")
    ],
)


def _with_offload(case: Case) -> Case:
    return case.laid(offload=True)


def _with_offloaded_layers(case: Case) -> Case:
    plain = case.layout.replace(pp=1, vpp=1, schedule="1f1b", recompute="none", offload=False)
    return replace(case, layout=plain.replace(offload_layers=1))


def _with_optimizer_on_host(case: Case) -> Case:
    return case.laid(zero=max(1, case.layout.zero), offload_states="optimizer")


def _with_weights_on_host(case: Case) -> Case:
    return case.laid(zero=3, offload_states="weights")


def _with_adapters(case: Case) -> Case:
    return replace(case, job_fields=(("frozen", True), ("adapter_rank", 16)))


def _with_experts(case: Case) -> Case:
    return replace(
        case, model=catalog.model("mixtral-8x7b"), layout=case.layout.replace(ep=2, dp=4)
    )


def _with_context_parallelism(case: Case) -> Case:
    return case.laid(cp=2)


def _with_kinds_of_nodes(case: Case) -> Case:
    layout = case.layout.replace(pp=4, vpp=1, schedule="1f1b", tp=4, dp=4, cp=1)
    return replace(case, cluster=_MIXED, layout=layout, dtype="bf16")


FEATURES: Final = {
    "activations on the host": _with_offload,
    "layers on the host": _with_offloaded_layers,
    "optimizer on the host": _with_optimizer_on_host,
    "weights on the host": _with_weights_on_host,
    "adapters": _with_adapters,
    "experts": _with_experts,
    "context parallelism": _with_context_parallelism,
    "kinds of nodes": _with_kinds_of_nodes,
}
"""Optional features of layouts, jobs and clusters, and what turns each on."""


@st.composite
def featured_cases(draw: st.DrawFn, feature: str) -> Case:
    """Cases with one optional feature, and with others as far as they go together with it."""
    generic = replace(draw(cases()), framework=Framework())  # runs everything
    case = _featured(generic, feature)
    if case is None:
        return reject()
    for other in sorted(draw(st.sets(st.sampled_from(sorted(FEATURES)), max_size=3)) - {feature}):
        with_other = _featured(case, other)
        if with_other is not None and _featured(with_other, feature) == with_other:
            case = with_other
    return case


def _featured(case: Case, feature: str) -> Case | None:
    """The case with a feature; None where it is not possible."""
    try:
        featured = FEATURES[feature](case)
        return featured if featured.possible and featured.step_s > 0 else None
    except PerfModelError:
        return None
