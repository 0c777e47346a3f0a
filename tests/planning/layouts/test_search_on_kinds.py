"""Searches over nodes of several kinds: against every layout, order of kinds and cut; and from the
command line."""

import json
from dataclasses import replace
from itertools import permutations, product
from typing import Any

import numpy as np
import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.prediction import evaluate, step_problem
from perfmodel.prediction.memory import fitting
from perfmodel.spec import Cluster, Job

MODEL = replace(catalog.model("gpt3-1.3b"), layers=6)


def mixed(first: int = 2, second: int = 2) -> Cluster:
    kinds = [
        replace(catalog.cluster(like), name=name, max_devices=n)
        for name, like, n in (("slow", "dgx-a100", first), ("fast", "dgx-h100", second))
    ]
    return Cluster.of_kinds("mixed", kinds)


def test_no_layout_order_or_cut_is_faster_than_the_best_found() -> None:
    cluster, job = mixed(1, 2), Job(global_batch=12, seq_len=1024)
    found = pm.search(MODEL, cluster, job=job, devices=3, top=3)
    problem = step_problem(MODEL, cluster, job)
    cuts = [(a, b, 6 - a - b) for a in range(7) for b in range(1, 7 - a)]
    orders = sorted(set(permutations(("slow", "fast", "fast"))))
    every = [
        pm.Layout(pp=3, micro_batch=n, schedule=schedule, partition=sizes, kinds=kinds)
        for n, schedule, sizes, kinds in product(
            (1, 2, 3, 4, 6, 12), ("1f1b", "gpipe"), cuts, orders
        )
    ]
    every = [layout for layout, fits in zip(every, fitting(problem, every), strict=True) if fits]
    best_s = evaluate(problem, every).step_time_s.min()
    assert found.layouts[0].step_time_s == pytest.approx(best_s, rel=1e-5)
    assert found.lower_bound_s <= best_s * (1 + 1e-5)
    assert found.gap == pytest.approx(
        found.layouts[0].step_time_s / found.lower_bound_s - 1, rel=1e-4
    )
    assert [p.step_time_s for p in found.layouts] == sorted(p.step_time_s for p in found.layouts)
    assert all(set(p.layout.kinds or ()) == {"slow", "fast"} for p in found.layouts)
    assert found.certificate.startswith("within ")


def test_every_found_layout_predicts_the_same() -> None:
    found = pm.search(MODEL, mixed(), global_batch=16, seq_len=1024, devices=4, top=4)
    assert len({str(p.layout) for p in found.layouts}) == 4
    for p in found.layouts:
        again = pm.predict(MODEL, mixed(), str(p.layout), global_batch=16, seq_len=1024, devices=4)
        assert again.step_time_s == p.step_time_s
        assert again.fits


def test_the_same_nodes_twice_are_searched_as_one_kind() -> None:
    alike = [replace(catalog.cluster("dgx-a100"), name=name, max_devices=8) for name in "ab"]
    words: dict[str, Any] = {
        "global_batch": 16,
        "seq_len": 1024,
        "devices": 16,
        "fix": "tp=4,pp=4,vpp=1",
    }
    both = pm.search(MODEL, Cluster.of_kinds("alike", alike), **words)
    alone = pm.search(MODEL, "dgx-a100", method="auto", **words)
    assert both.layouts[0].step_time_s == pytest.approx(alone.layouts[0].step_time_s, rel=1e-6)


def test_fewer_devices_may_leave_a_kind_out() -> None:
    cluster = mixed(1, 1)
    slow = replace(cluster.kinds[0], device=replace(cluster.kinds[0].device, memory_bytes=2e9))
    found = pm.search(
        MODEL,
        Cluster.of_kinds("tiny", [slow, cluster.kinds[1]]),
        global_batch=8,
        seq_len=1024,
        devices=2,
        fewer_devices=True,
    )
    assert found.layouts[0].layout.kinds == ("fast",)
    assert any(str(why).startswith("out of memory") for why in found.rejected)


def test_objectives_of_one_device_are_refused_and_others_hold() -> None:
    words: dict[str, Any] = {"global_batch": 8, "seq_len": 1024, "devices": 4, "top": 2}
    with pytest.raises(PerfModelError, match="several kinds of nodes"):
        pm.search(MODEL, mixed(), objective="mfu", **words)
    with pytest.raises(PerfModelError, match="price"):
        pm.search(MODEL, mixed(), objective="cost", **words)
    found = pm.search(MODEL, mixed(), constraints=["memory_gib < 16"], **words)
    assert all(p.memory_needed_bytes < 16 * 2**30 for p in found.layouts)
    assert found.layouts


def test_schedules_of_several_stages_per_rank_are_counted_out() -> None:
    found = pm.search(
        MODEL, mixed(), global_batch=8, seq_len=1024, devices=4, schedules="1f1b,zb-v"
    )
    assert all(p.layout.schedule == "1f1b" for p in found.layouts)
    assert any("zb-v cannot be searched over several kinds" in why for why in found.rejected)
    with pytest.raises(LayoutError, match="no layout"):
        pm.search(MODEL, mixed(), global_batch=8, seq_len=1024, devices=4, fix="pp=1")


def test_timeprests_schedule_is_cut_as_well_as_it_can_be() -> None:
    """Its backward passes are of several micro-batches, which dynamic programming does not know."""
    words: dict[str, Any] = {"global_batch": 128, "dtype": "fp32"}
    found = pm.search(
        "vgg-16", "timeprest", devices=2, schedules="nf1b", fix="pp=2,micro_batch=32", **words
    )
    question = pm.ask("vgg-16", "timeprest", devices=2, **words)
    every = [
        pm.Layout(pp=2, micro_batch=32, schedule="nf1b", partition=(n, 21 - n), kinds=kinds)
        for n, kinds in product(range(1, 21), (("rtx6000", "rtx2080"), ("rtx2080", "rtx6000")))
    ]
    every = [
        layout
        for layout, fits in zip(every, fitting(question.step_problem, every), strict=True)
        if fits
    ]
    best_s = evaluate(question.step_problem, every).step_time_s.min()
    assert found.layouts[0].step_time_s == pytest.approx(best_s, rel=1e-5)
    assert found.layouts[0].layout.schedule == "nf1b"


def test_search_on_timeprests_machines_from_the_command_line(capsys) -> None:
    said = [
        "search",
        "--model",
        "vgg-16",
        "--cluster",
        "timeprest",
        "--devices",
        "2",
        "--global-batch",
        "128",
    ]
    assert main([*said, "--dtype", "fp32", "--schedules", "1f1b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["layouts"][0]
    layout = pm.Layout.parse(best["layout"])
    assert sum(layout.partition or ()) == 21
    assert sorted(layout.kinds or ()) == ["rtx2080", "rtx6000"]
    assert {kind["device"] for kind in best["kinds"]} == {"Quadro-RTX-6000", "RTX-2080"}
    assert np.isfinite(found["gap"])
    assert main([*said, "--fix", "pp=1"]) == 2
    assert "several kinds of nodes" in capsys.readouterr().err
