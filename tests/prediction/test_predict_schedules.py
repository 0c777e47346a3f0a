"""Every schedule on a real model: explained consistently, alone and in batches."""

from dataclasses import replace

import numpy as np
import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.errors import LayoutError, UnknownNameError
from perfmodel.planning.layouts import default_space, restrict, with_schedules
from perfmodel.prediction import evaluate, step_problem
from perfmodel.prediction.grids import LayoutGrid, price_grids
from perfmodel.schedule import schedule_names
from perfmodel.spec import Job, Layout, Problem

NAMES = [name for name in schedule_names() if name != "forward"] + ["chimera:4", "seq1f1b:4"]
BASE = "tp=8,pp=4,dp=2,recompute=selective,sequence_parallel=true"


def predict(name: str, more: str = "", **options) -> pm.Prediction:
    return pm.predict(
        "gpt3-6.7b", "dgx-a100", f"{BASE},schedule={name}{more}", global_batch=32, **options
    )


@pytest.fixture(scope="module")
def predictions() -> dict[str, pm.Prediction]:
    return {name: predict(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_parts_add_up(predictions, name: str) -> None:
    p = predictions[name]
    assert sum(p.breakdown_s.values()) == pytest.approx(p.step_time_s, rel=1e-6)
    assert sum(event.time_s for event in p.critical_path) == pytest.approx(p.step_time_s, rel=1e-3)
    assert 0 <= p.bubble_fraction < 1
    assert sum(p.provenance.values()) == pytest.approx(1)


def test_order_of_schedules(predictions) -> None:
    step = {name: p.step_time_s for name, p in predictions.items()}
    memory = {
        name: max(stage.activations for stage in p.memory_per_stage)
        for name, p in predictions.items()
    }
    assert step["zb-h2"] < step["zb-h1"] < step["1f1b"] == pytest.approx(step["gpipe"], rel=0.02)
    assert step["pipedream-2bw"] < step["zb-h1"]
    assert step["gems"] == max(step[name] for name in ("gems", "1f1b", "chimera", "dualpipe"))
    assert memory["v-min"] < memory["v-half"] < memory["zb-v"] < memory["zb-h2"] < memory["gpipe"]
    assert memory["seq1f1b:4"] < memory["seq1f1b"] < memory["1f1b"]
    weights = {
        name: max(stage.weights for stage in p.memory_per_stage) for name, p in predictions.items()
    }
    assert weights["chimera:4"] > 1.5 * weights["chimera"] > 2 * weights["1f1b"]
    assert weights["pipedream"] > 3 * weights["1f1b"]
    assert weights["pipedream-2bw"] == pytest.approx(2 * weights["1f1b"])


def test_batches_agree_with_single_predictions(predictions) -> None:
    model, cluster = catalog.model("gpt3-6.7b"), catalog.cluster("dgx-a100")
    problem = step_problem(model, cluster, Job(global_batch=32, seq_len=model.seq_len))
    layouts = [Layout.parse(f"{BASE},schedule={name}") for name in NAMES]
    ours = evaluate(problem, layouts).step_time_s
    np.testing.assert_allclose(ours, [predictions[name].step_time_s for name in NAMES], rtol=2e-4)
    bounds = [
        cost.bound_s.item()
        for cost in price_grids(problem, [LayoutGrid.of(layout) for layout in layouts])
    ]
    assert (np.array(bounds) <= ours * (1 + 1e-5)).all()


def test_offload_trades_time_for_memory() -> None:
    kept, moved = predict("gpipe"), predict("gpipe", ",offload=true", timeline=True)
    assert max(s.activations for s in moved.memory_per_stage) < 0.4 * max(
        s.activations for s in kept.memory_per_stage
    )
    assert moved.step_time_s >= kept.step_time_s
    over_time = moved.memory_over_time()
    planned = np.array([stage.peak for stage in moved.memory_per_stage])
    assert (over_time.peak_bytes <= planned * 1.001).all()


def test_offload_needs_a_host_link() -> None:
    pod = catalog.cluster("tpu-v5p-pod")
    unlinked = replace(pod, device=replace(pod.device, host_bandwidth_bytes_per_s=None))
    with pytest.raises(LayoutError, match="host_gb_per_s"):
        pm.predict("gpt3-1.3b", unlinked, "pp=4,schedule=gpipe,offload=true", global_batch=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp=3,dp=1,tp=1,schedule=chimera", "even number"),
        ("pp=4,schedule=1f1b:2", "takes no number"),
        ("pp=4,schedule=chimera,vpp=3", "leave vpp out"),
        ("pp=4,schedule=seq1f1b:3", "not divisible by 3 slices"),
        ("pp=4,schedule=dualpipe,micro_batch=16", "even number of at least 4"),
        ("pp=32,schedule=zb-v", "pipeline stages; use a smaller pp"),
    ],
)
def test_impossible_schedules_are_named(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        pm.predict("gpt3-6.7b", "dgx-a100", text, global_batch=32)


IDLE = [
    *(f"schedule={name}" for name in NAMES),
    "partition=24",
    "replicate=2",
    "zero=2,prefetch=2",
    "zero=3,overlap_param_gather=false,prefetch=2",
    "sequence_parallel=true",
    "tp_overlap=true",
    "cp_kind=ulysses",
    "cp_balanced=false",
    "ep_overlap=true",
]


@pytest.mark.parametrize("more", IDLE)
def test_what_is_said_to_have_no_effect_has_none(more: str) -> None:
    """On a single stage, under every schedule: neither time nor memory nor what the critical path
    consists of."""
    layout = Layout.parse(f"dp=2,{more}")
    field = more.rpartition(",")[2].partition("=")[0]
    plain = replace(layout, **{field: Layout().value(field)})
    assert plain == layout or any(remark.startswith(f"{field}=") for remark in layout.remarks)
    with_field, without = (
        pm.predict("gpt3-1.3b", "dgx-a100", one, global_batch=8) for one in (layout, plain)
    )
    assert with_field.step_time_s == without.step_time_s
    assert with_field.memory_needed_bytes == without.memory_needed_bytes
    assert with_field.critical_path == without.critical_path


def test_a_schedule_that_nobody_knows_is_refused_on_one_stage_too() -> None:
    with pytest.raises(UnknownNameError, match="zb-h9"):
        pm.predict("gpt3-1.3b", "dgx-a100", "dp=2,schedule=zb-h9", global_batch=8)


def test_a_schedule_file_is_read_anew_when_it_changes(tmp_path) -> None:
    path = tmp_path / "order.txt"
    orders = ("F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")
    steps = []
    for order in orders:
        path.write_text(f"stages 0 | 1\n{order}\n{order}\n")
        p = pm.predict(
            "gpt3-1.3b", "dgx-a100", f"pp=2,micro_batch=2,schedule=file:{path}", global_batch=8
        )
        steps.append(p.step_time_s)
    assert steps[1] > 1.2 * steps[0]  # one micro-batch at a time keeps the other device waiting


def test_search_may_be_held_to_a_schedule() -> None:
    result = pm.search(
        "gpt3-1.3b",
        "dgx-a100",
        devices=12,
        global_batch=24,
        top=3,
        space=restrict(default_space(_problem()), "schedule=chimera"),
    )
    assert {p.layout.schedule for p in result.layouts} <= {"chimera", "1f1b"}
    assert any("chimera" in reason for reason in result.rejected)


def _problem() -> Problem:
    return catalog.problem("gpt3-1.3b", "dgx-a100", devices=12, global_batch=24)


@pytest.mark.slow
def test_search_over_schedules_never_loses_to_fewer() -> None:
    few = default_space(_problem())
    many = with_schedules(few, "all")
    assert set(few.schedule) < set(many.schedule)
    assert not {"nf1b", "pipedream", "forward"} & set(many.schedule)
    best = [
        pm.search(_problem(), space=space, top=1).layouts[0].step_time_s
        for space in (with_schedules(few, "interleaved"), few, many)
    ]
    assert best[2] <= best[1] * (1 + 1e-6) <= best[0] * (1 + 2e-6)
    with pytest.raises(UnknownNameError, match="zb-h1"):
        with_schedules(few, "zb-h9")
