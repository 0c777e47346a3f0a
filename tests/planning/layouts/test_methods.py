"""What `auto` and `relax` add to enumeration, and what they say of it."""

import pytest

from perfmodel import catalog
from perfmodel.planning.layouts import default_space, restrict, search
from perfmodel.prediction import evaluate, step_problem
from perfmodel.spec import Job, Problem

MODEL, CLUSTER, JOB = (
    catalog.model("gpt3-1.3b"),
    catalog.cluster("dgx-a100"),
    Job(global_batch=16, seq_len=2048),
)


def found(method, fix="tp=1,micro_batch=1,schedule=1f1b,vpp=1", devices=7, **options):
    space = restrict(
        default_space(Problem(model=MODEL, cluster=CLUSTER, job=JOB, devices=devices)), fix
    )
    return search(
        MODEL,
        CLUSTER,
        devices=devices,
        global_batch=16,
        job=JOB,
        space=space,
        method=method,
        top=3,
        **options,
    )


@pytest.mark.parametrize("method", ["auto", "relax"])
def test_uneven_stages_win_where_layers_do_not_divide(method):
    """24 layers on 7 stages."""
    plain, improved = found("enumerate"), found(method)
    best = improved.layouts[0]
    assert best.layout.partition is not None
    assert best.step_time_s < 0.95 * plain.layouts[0].step_time_s
    assert best.step_time_s == pytest.approx(
        evaluate(step_problem(MODEL, CLUSTER, JOB), [best.layout]).step_time_s[0], 1e-5
    )
    (gain,) = {i.result.layout: i for i in improved.improvements}.values()
    assert gain.how == {"auto": "dynamic programming", "relax": "relaxation"}[method]
    assert gain.how in improved.method
    assert "exact for even stages" in improved.certificate
    assert plain.method == "enumerate"
    assert plain.certificate == "exact"
    assert improved.to_dict()["improvements"][0]["certificate"]["gap"] >= 0
    # the space has one micro-batch
    assert set(gain.changed) <= {
        "partition",
        "recompute",
        "recompute_full_layers",
    }
    assert gain.changed["partition"] == (None, best.layout.partition)


def test_nothing_is_cut_where_nothing_can_be_gained():
    result = found("auto", fix="tp=1,pp=1", devices=4)
    assert result.method == "enumerate"
    assert "none of the best layouts would gain" in result.why
    assert not result.improvements


def test_constraints_hold_for_cut_stages_too():
    free = found("auto").layouts[0]
    limit = f"memory_bytes < {free.memory.peak * 0.999}"
    tight = found("auto", constraints=[limit])
    assert all(p.memory.peak < free.memory.peak for p in tight.layouts)
