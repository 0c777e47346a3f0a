"""Impossible requests name what stands in the way, and what they suggest does make them
possible."""

import json
from dataclasses import replace

import pytest

from perfmodel.cli import main
from perfmodel.errors import LayoutError
from perfmodel.planning.layouts import default_space, restrict, search, with_options
from perfmodel.units import GIB


def found(case, *, devices=None, constraints=(), fix="", memory_bytes=None, space=None):
    cluster = case.cluster
    if memory_bytes:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))
    devices = devices or case.devices
    space = space or restrict(default_space(case.replace(cluster=cluster, devices=devices)), fix)
    return search(
        case.model,
        cluster,
        devices=devices,
        global_batch=case.job.global_batch,
        job=case.job,
        space=space,
        constraints=constraints,
        top=1,
    )


def changes(result, name):
    assert result.impossible is not None
    assert not result.layouts
    return [change.to[name] for change in result.impossible.changes if name in change.to]


def test_memory_that_is_short_is_told_exactly(case):
    short = {"memory_bytes": 4 * GIB, "fix": "micro_batch=1,schedule=1f1b,vpp=1"}
    result = found(case, **short)
    assert "memory: no layout fits" in result.impossible.binding
    (enough,) = changes(result, "memory_bytes")
    assert found(case, **short | {"memory_bytes": enough}).layouts
    assert not found(case, **short | {"memory_bytes": 0.999 * enough}).layouts
    (devices,) = changes(result, "devices")
    assert found(case, devices=devices, **short).layouts


def test_options_that_are_fixed_are_offered_free(case):
    short = {"memory_bytes": 10 * GIB, "fix": "zero=0,tp=1,pp=1,micro_batch=1"}
    result = found(case, **short)
    freed = changes(result, "free")
    assert {"zero", "tp", "pp"} <= set(freed)
    space = restrict(default_space(case), short["fix"])
    for name in freed:
        usual = getattr(default_space(case), name)
        free = found(case, memory_bytes=10 * GIB, space=replace(space, **{name: usual}))
        assert free.layouts, name
    for name in changes(result, "options"):
        free = found(case, memory_bytes=10 * GIB, space=with_options(space, name, case.cluster))
        assert free.layouts, name


@pytest.mark.parametrize(
    "constraints",
    [
        ["step_time_s < 0.1", "memory_bytes < 2e10"],
        ["tokens_per_s > 1e6"],
        ["memory_gib * 8 <= tp"],
        ["step_time_s < memory_gib / 100", "memory_gib < 12"],
    ],
)
def test_a_loosened_constraint_is_satisfied_and_is_the_nearest(case, constraints):
    result = found(case, constraints=constraints, fix="micro_batch=1")
    texts = [change for change in result.impossible.changes if "constraint" in change.to]
    assert texts
    for change in texts:
        which = next(
            i
            for i, text in enumerate(constraints)
            if f"(for {' '.join(text.split())})" in change.what
        )
        loosened = [*constraints[:which], change.to["constraint"], *constraints[which + 1 :]]
        assert found(case, constraints=loosened, fix="micro_batch=1").layouts, change
        head, _, threshold = change.to["constraint"].rpartition(" ")
        if "memory_gib /" not in head:
            tighter = f"{head} {float(threshold) * (0.998 if '<' in head else 1.002)}"
            again = [*constraints[:which], tighter, *constraints[which + 1 :]]
            assert not found(case, constraints=again, fix="micro_batch=1").layouts, change


def test_contradictory_constraints_are_named(case):
    result = found(
        case, constraints=["devices > 8", "devices < 8", "memory_bytes < 7e10"], fix="micro_batch=1"
    )
    assert changes(result, "without") == [["devices > 8", "devices < 8"]]
    assert "possible with neither devices > 8 nor devices < 8" in str(result.impossible)
    assert "memory" not in result.impossible.binding
    assert found(case, constraints=["memory_bytes < 7e10"], fix="micro_batch=1").layouts


def test_where_nothing_divides_the_nearest_devices_and_batch_are_offered(case):
    fix = "tp=2,pp=2,micro_batch=1"
    with pytest.raises(
        LayoutError, match=r"no layout of gpt3-1\.3b is possible on 7 devices"
    ) as error:
        found(case, devices=7, fix=fix)
    assert "8 devices" in str(error.value)
    assert found(case, devices=8, fix=fix).layouts
    odd = replace(case, job=replace(case.job, global_batch=15))
    with pytest.raises(LayoutError, match="global batch of 16"):
        found(odd, fix="tp=1,pp=1,micro_batch=1")
    assert found(case, fix="tp=1,pp=1,micro_batch=1").layouts


def test_command(capsys):
    command = [
        "search",
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--devices",
        "8",
        "--global-batch",
        "16",
        "--fix",
        "micro_batch=1",
        "--constraint",
        "step_time_s<0.1",
    ]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "step_time_s<0.1 cannot be satisfied; it would be possible with step_time_s < 0." in err
    assert err.count("\n") == 1
    assert main([*command, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["impossible"]["changes"]
