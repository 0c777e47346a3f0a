"""Steps drawn from the whole catalog: models, clusters, frameworks and layouts that are possible together."""

import os
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Final, get_args

from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Prediction, StepProblem, check_layout, explain, step_problem, step_times_s
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Cluster, ContextParallel, Framework, Job, Layout, Model

EXPLORES: Final = "PERFMODEL_EXPLORE" in os.environ
ROUNDING: Final = 1e-4
"""Networks of kernels compute in float32."""


def some(examples: int) -> settings:
    """So many examples in a gate, fifty times as many where others are explored."""
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    return settings(max_examples=examples * (50 if EXPLORES else 1), deadline=None, suppress_health_check=slow)


@dataclass(frozen=True, repr=False)
class Case:
    """One step, and how long it takes; variants of it by `laid`, `on_device`, `on_level` and `dataclasses.replace`."""

    model: Model
    cluster: Cluster
    framework: Framework
    layout: Layout
    rounds: int
    """Micro-batches of every replica."""
    seq_len: int
    dtype: str

    def __repr__(self) -> str:
        device = self.cluster.device.name
        machine = f"{self.cluster.name} ({device})"
        work = f"{self.rounds} micro-batches of {self.seq_len} tokens in {self.dtype}"
        return f"<{self.model.name} on {machine} by {self.framework.label}, {self.layout}, {work}>"

    @cached_property
    def job(self) -> Job:
        batch = self.layout.dp * self.layout.micro_batch * self.rounds
        device = self.cluster.device
        return self.framework.job(self.model, device, global_batch=batch, seq_len=self.seq_len, dtype=self.dtype)

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
        return replace(self, cluster=replace(self.cluster, device=replace(self.cluster.device, **changes)))

    def on_level(self, index: int, **changes: Any) -> "Case":
        levels = list(self.cluster.levels)
        levels[index] = replace(levels[index], **changes)
        return replace(self, cluster=replace(self.cluster, levels=tuple(levels)))

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


def assert_between(shorter: Case, longer: Case, most: float = float("inf"), least: float = 1.0) -> None:
    """The longer step takes at least as long as the shorter one (`least` times), and at most `most` times as long;
    nothing where one of them is not possible."""
    if shorter.possible and longer.possible:
        ratio = longer.step_s / shorter.step_s
        assert least * (1 - ROUNDING) <= ratio <= most * (1 + ROUNDING), (ratio, shorter, longer)


SCHEDULES: Final = [name for name in schedule_names() if name != "forward"]
FLUSHED: Final = [name for name in SCHEDULES if not (get_schedule(name).asynchronous or get_schedule(name).staggered)]

_CLUSTERS = [name for name in catalog.clusters() if name != "localhost"]
_FRAMEWORKS = [version for name in catalog.frameworks() for version in catalog.framework_versions(name)]
_DEVICES = [
    "V100-SXM2-32GB", "A100-SXM4-80GB", "A100-PCIE-80GB", "H100-SXM5-80GB", "H100-PCIE-80GB", "H200-SXM-141GB",
    "GH200-96GB", "B200-SXM-180GB", "B300-SXM", "GB200-NVL72", "GB300-NVL72", "MI300X", "MI325X", "MI355X", "L40S",
    "TPU-v4", "TPU-v5p", "TPU-v6e",
]  # fmt: skip
"""Devices that a cluster's networks are drawn with besides its own."""
_DTYPES = ("bf16", "fp16", "fp8", "fp32", "tf32")
_LAYOUTS = [
    Layout(tp=tp, pp=pp, dp=dp, cp=cp, ep=ep)
    for tp, pp, dp, cp, ep in product((1, 2, 8), (1, 4), (1, 4, 16), (1, 2), (1, 4))
    if (dp * cp) % ep == 0
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Of any model, cluster, framework, schedule and layout that are possible together."""
    cluster = catalog.cluster(draw(st.sampled_from(_CLUSTERS)))
    if draw(st.booleans()):
        cluster = replace(cluster, device=catalog.device(draw(st.sampled_from(_DEVICES))))
    model = catalog.model(draw(st.sampled_from(catalog.models())))
    framework = draw(st.sampled_from(_FRAMEWORKS))
    dtypes = [dtype for dtype in _DTYPES if dtype in cluster.device.dtypes] or list(cluster.device.dtypes)
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
        for chunks in {changes["vpp"] if layout.pp > 1 else 1: None, 1: None}:  # few schedules have two
            case = replace(start, layout=layout.replace(**changes | {"vpp": chunks}))
            if case.possible:
                return case
    return reject()
