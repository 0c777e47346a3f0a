"""Stages on nodes of several kinds: kinds alike are one kind; stages are timed, and fit, as on
their own; bad ones are refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.cost import EventTimes
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.ops import Collective
from perfmodel.prediction import evaluate, explain, pass_times, step_problem
from perfmodel.prediction.memory import fitting
from perfmodel.spec import Cluster, Framework, Job, Layout, NetworkLevel

LAYERS = 12
MODEL = replace(catalog.model("llama3-8b"), layers=LAYERS)
JOB = Job(global_batch=16, seq_len=2048)


def of_kinds(
    *named: tuple[str, str], devices: int = 8, between: NetworkLevel | None = None
) -> Cluster:
    """Some devices of each of several clusters, named."""
    kinds = [
        replace(catalog.cluster(cluster), name=name, max_devices=devices) for name, cluster in named
    ]
    return Cluster.of_kinds("mixed", kinds, between)


MIXED = of_kinds(("slow", "dgx-a100"), ("fast", "dgx-h100"))


@pytest.mark.parametrize(
    "text",
    [
        "tp=4,pp=4",
        "tp=2,pp=2,dp=4,zero=1,overlap_grad_reduce=false",
        "tp=8,pp=2,vpp=2,sequence_parallel=true,recompute=selective",
        "tp=1,pp=4,dp=4,zero=3,schedule=gpipe",
        "tp=2,pp=8,schedule=zb-h1,partition=1-1-2-2-2-2-1-1",
        "tp=2,pp=8,offload=true",
        "tp=2,pp=2,dp=4,zero=1,offload_states=optimizer",
        "tp=4,pp=4,schedule=nf1b",
    ],
)
def test_two_kinds_of_the_same_nodes_are_one_kind(text: str) -> None:
    # first and last stage, on different kinds, share weights
    model = replace(MODEL, tied_embeddings=True)
    alone = pm.predict(model, "dgx-a100", text, job=JOB)
    both = pm.predict(model, of_kinds(("a", "dgx-a100"), ("b", "dgx-a100")), text, job=JOB)
    assert both.step_time_s == alone.step_time_s
    assert both.memory_per_stage == alone.memory_per_stage
    assert both.breakdown_s == pytest.approx(alone.breakdown_s, rel=1e-9, abs=1e-12)
    assert (both.step_time_lo_s, both.step_time_hi_s) == pytest.approx(
        (alone.step_time_lo_s, alone.step_time_hi_s)
    )
    assert both.provenance == pytest.approx(alone.provenance, abs=1e-9)
    assert both.uncertainty.class_shares == pytest.approx(alone.uncertainty.class_shares, abs=1e-9)
    assert both.mfu == pytest.approx(alone.mfu)
    assert both.fits_probability == alone.fits_probability
    assert [kind["kind"] for kind in both.kinds] == ["a"] * (both.layout.pp // 2) + ["b"] * (
        both.layout.pp // 2
    )


def gpipe_s(forward_s, backward_s, send_s, micro_batches: int) -> float:
    """A GPipe step without an optimizer, event by event: `send_s` of the boundary after each
    stage."""
    stages = len(forward_s)
    done = np.zeros((micro_batches, stages))
    for m in range(micro_batches):
        for s in range(stages):
            before = done[m, s - 1] + send_s[s - 1] if s else 0.0
            done[m, s] = max(before, done[m - 1, s] if m else 0.0) + forward_s[s]
    back, free = np.zeros((micro_batches, stages)), done[-1].copy()
    for m in reversed(range(micro_batches)):
        for s in reversed(range(stages)):
            after = back[m, s + 1] + send_s[s] if s + 1 < stages else 0.0
            back[m, s] = free[s] = max(after, free[s]) + backward_s[s]
    return float(free.max())


@pytest.mark.parametrize(
    ("kinds", "sizes"), [("fast-slow", (8, 4)), ("slow-fast", (4, 8)), ("slow-fast", (6, 6))]
)
def test_a_step_is_that_of_its_stages_each_on_its_own_kind(
    kinds: str, sizes: tuple[int, int]
) -> None:
    """The recursion of GPipe over what each kind's own problem says of its stage, and the slower
    end of the link."""
    link = NetworkLevel(name="Ethernet", size=16, bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    problem = step_problem(MODEL, replace(MIXED, between=link), JOB)
    layout = Layout(pp=2, schedule="gpipe", partition=sizes, kinds=tuple(kinds.split("-")))
    own = [
        next(one for one in problem.kinds if one.cluster.name == kind) for kind in kinds.split("-")
    ]
    times = [pass_times(one, layout.replace(kinds=None)) for one in own]
    forward = [of.forward_s[s] for s, of in enumerate(times)]
    backward = [of.backward_input_s[s] + of.backward_weight_s[s] for s, of in enumerate(times)]
    send = Collective(collective="send_recv", bytes=2048 * 4096 * 2, num_ranks=2, ranks_per_node=2)
    send_s = max(one.collectives.times(one.cluster, [send]).time_s.item() for one in problem.links)
    assert send_s > 2048 * 4096 * 2 / 1e9
    found = explain(problem, layout)
    rest_s = found.step_time_s - gpipe_s(forward, backward, [send_s], 16)
    updates = [e.time_s for e in found.critical_path if e.event.startswith("adam")]
    assert 0 < rest_s == pytest.approx(sum(updates), rel=1e-6)
    names = {e.event.rpartition(" on ")[2] for e in found.critical_path if " on " in e.event}
    assert names == {"fast", "slow"}


class OneSpeed:
    """Kernels that take a second each on a device of speed 1, whatever they are."""

    def __init__(self, speeds: dict[str, float]) -> None:
        self.speeds = speeds

    def times(self, device, ops) -> EventTimes:
        seconds = np.full(len(ops), 1 / self.speeds[device.name])
        return EventTimes(seconds, seconds, seconds, ("measured",) * len(ops))


class NoTime:
    """Networks that take no time."""

    def times(self, cluster, ops) -> EventTimes:
        nothing = np.zeros(len(ops))
        return EventTimes(nothing, nothing, nothing, ("measured",) * len(ops))


def at_speeds(slow: float, fast: float):
    kernels = OneSpeed({"A100-SXM4-80GB": slow, "H100-SXM5-80GB": fast})
    mlp = catalog.model("mlp-8192x8") if "mlp-8192x8" in catalog.models() else MODEL
    return step_problem(mlp, MIXED, JOB).repriced(kernels, NoTime())


def test_a_kind_twice_as_fast_takes_twice_the_layers() -> None:
    """Passes that take as long on every rank: the step is (m + p - 1) of them, in proportion to the
    split."""
    problem = at_speeds(1.0, 2.0)
    layout = Layout(tp=8, pp=2, schedule="gpipe", kinds=("fast", "slow"))
    of_split = {
        n: explain(problem, layout.replace(partition=(n, LAYERS - n))).step_time_s
        for n in range(1, LAYERS)
    }
    best = min(of_split, key=of_split.__getitem__)
    assert best == 8  # embedding and head are small beside layers
    even = at_speeds(1.5, 1.5)
    alike = explain(even, layout.replace(partition=(6, 6))).step_time_s
    assert of_split[8] == pytest.approx(alike, rel=0.05)  # as fast as two of the mean speed
    assert of_split[6] > 1.25 * of_split[8]


@given(
    st.floats(0.2, 5.0),
    st.floats(0.2, 5.0),
    st.floats(1.01, 4.0),
    st.sampled_from(["slow-fast", "fast-slow"]),
)
@settings(max_examples=15, deadline=None)
def test_a_faster_kind_never_makes_a_step_longer(
    slow: float, fast: float, factor: float, kinds: str
) -> None:
    layout = Layout(tp=8, pp=2, partition=(7, 5), kinds=tuple(kinds.split("-")))
    before = evaluate(at_speeds(slow, fast), [layout]).step_time_s[0]
    faster = [at_speeds(slow * factor, fast), at_speeds(slow, fast * factor)]
    assert all(evaluate(one, [layout]).step_time_s[0] <= before * (1 + 1e-5) for one in faster)


def test_every_rank_has_to_fit_into_its_own_device() -> None:
    wide, narrow = (
        Layout(tp=8, pp=2, partition=cut, kinds=("fast", "slow")) for cut in ((11, 1), (1, 11))
    )
    peaks = [
        explain(step_problem(MODEL, MIXED, JOB), layout).memory_per_stage[1].peak
        for layout in (wide, narrow)
    ]
    between = sum(peaks) / 2 / (1 - Framework().memory.memory_margin)
    slow, fast = MIXED.kinds
    tiny = replace(slow, device=replace(slow.device, name="tiny", memory_bytes=between))
    mixed = Cluster.of_kinds("mixed", [tiny, fast])
    problem = step_problem(MODEL, mixed, JOB)
    assert fitting(problem, [wide, narrow]).tolist() == [True, False]
    fits, does_not = (explain(problem, layout) for layout in (wide, narrow))
    assert fits.fits
    assert not does_not.fits
    assert "pipeline rank 1" in does_not.reasons[0]
    assert does_not.memory_capacity_bytes == between
    assert does_not.memory_needed_bytes == does_not.memory_per_stage[1].peak
    needed = explain(
        step_problem(MODEL, catalog.cluster("dgx-h100"), JOB), narrow.replace(kinds=None)
    )
    assert [stage.peak for stage in does_not.memory_per_stage] == [
        stage.peak for stage in needed.memory_per_stage
    ]


def test_kinds_are_part_of_a_layouts_notation() -> None:
    layout = Layout.parse("tp=2,pp=3,kinds=Fast-fast-slow_1.b")
    assert layout.kinds == ("fast", "fast", "slow_1.b")
    assert Layout.parse(str(layout)) == layout
    assert layout.columns["kinds"] == "fast-fast-slow_1.b"


@pytest.mark.parametrize(
    ("text", "cluster", "words"),
    [
        ("tp=8,pp=2,kinds=fast", MIXED, "2 pipeline ranks"),
        ("tp=8,pp=2,kinds=fast-fast", MIXED, "room on slow .8 devices. for 1"),
        ("tp=8,pp=2,kinds=slow-quick", MIXED, "known: fast, slow"),
        ("tp=1,dp=16", MIXED, "devices .tp.cp.dp. of one kind"),
        ("tp=2,pp=4,dp=2,order=tp-cp-pp-ep-dp", MIXED, "end with pp"),
        ("tp=8,pp=2,schedule=chimera", MIXED, "replicas of stage 0 on different kinds"),
        ("tp=8,pp=2,kinds=fast-slow", catalog.cluster("dgx-a100"), "leave kinds= out"),
    ],
)
def test_what_cannot_lie_on_the_kinds_is_refused(text: str, cluster: Cluster, words: str) -> None:
    with pytest.raises((LayoutError, UnknownNameError), match=words):
        pm.predict(MODEL, cluster, text, job=JOB)


def test_replicas_of_a_stage_may_lie_on_one_kind() -> None:
    layout = "tp=4,pp=4,schedule=chimera,kinds=fast-slow-slow-fast"
    assert pm.predict(MODEL, MIXED, layout, job=JOB).fits


def test_what_is_worked_out_for_one_kind_says_so() -> None:
    with pytest.raises(PerfModelError, match="several kinds of nodes"):
        pm.whatif(MODEL, MIXED, "tp=8,pp=2", ["inter_node_bandwidth=2x"], job=JOB)
    with pytest.raises(PerfModelError, match="several kinds of nodes"):
        pm.step_time_function(MODEL, MIXED, "tp=8,pp=2", job=JOB)


def test_clusters_of_kinds_in_toml(tmp_path, capsys) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text(
        'kinds = [{ name = "fast", cluster = "dgx-h100", devices = 8 }, { name = "slow", devices = 8, '
        'device = "A40", levels = [{ name = "PCIe4", size = 8, bandwidth_gb_per_s = 31.5, latency_us = 5 }] }]\n'
        'between = { name = "Ethernet", bandwidth_gb_per_s = 12.5, latency_us = 10 }\n'
    )
    said = [
        "predict",
        "--model",
        "gpt3-1.3b",
        "--cluster",
        str(file),
        "--global-batch",
        "8",
        "--devices",
        "16",
    ]
    assert main([*said, "--layout", "tp=8,pp=2,kinds=slow-fast", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [kind["device"] for kind in found["kinds"]] == ["A40", "H100-SXM5-80GB"]
    assert len(found["memory_bytes"]["per_stage"]) == 2
    assert main([*said, "--layout", "tp=16"]) == 2
    assert "of one kind" in capsys.readouterr().err


A8, B8, BAD, NESTED = (
    f"{{ name = '{name}', cluster = '{cluster}', devices = 8 }}"
    for name, cluster in (
        ("a", "dgx-a100"),
        ("b", "dgx-a100"),
        ("A-1", "dgx-a100"),
        ("a", "timeprest"),
    )
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"kinds = [{A8}]", "at least two"),
        (f"kinds = [{A8}, {A8}]", "at least two kinds of nodes with different names"),
        (f"kinds = [{{ name = 'a', devices = 8 }}, {B8}]", "give either"),
        (f"kinds = [{BAD}, {B8}]", "lower-case"),
        (f"device = 'A40'\nkinds = [{A8}, {B8}]", "state this in each kind"),
        ("device = 'A40'\nlevels = []", "levels: missing"),
        (
            "between = { name = 'Ethernet', bandwidth_gb_per_s = 1, latency_us = 1 }",
            "between is for clusters",
        ),
        (f"kinds = [{NESTED}, {B8}]", "has several kinds itself"),
    ],
)
def test_broken_clusters_of_kinds_are_refused(tmp_path, text: str, words: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    with pytest.raises(PerfModelError, match=words):
        catalog.cluster(file)


def test_timeprests_machines_are_in_the_catalog() -> None:
    found = pm.predict(
        "vgg-16", "timeprest", "pp=2,schedule=nf1b,micro_batch=32", global_batch=128, dtype="fp32"
    )
    assert [kind["device"] for kind in found.kinds] == ["Quadro-RTX-6000", "RTX-2080"]
    assert [kind["memory_capacity_bytes"] / 2**30 for kind in found.kinds] == [24, 8]
    swapped = pm.predict(
        "vgg-16",
        "timeprest",
        "pp=2,schedule=nf1b,micro_batch=32,kinds=rtx2080-rtx6000",
        global_batch=128,
        dtype="fp32",
    )
    assert swapped.step_time_s != found.step_time_s
