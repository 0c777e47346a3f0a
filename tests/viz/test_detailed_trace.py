"""Traces of all ranks, with the operators of all passes."""

import json
from pathlib import Path
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.cli import main
from perfmodel.spec import Problem
from perfmodel.viz import trace_events

LAYOUT = "tp=2,pp=2,dp=2,micro_batch=1,recompute=full"


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    problem = Problem(
        model=pm.catalog.model("gpt3-125m"),
        cluster=pm.catalog.cluster("dgx-a100"),
        job=pm.Job(global_batch=4, seq_len=512),
        devices=8,
    )
    found = pm.predict(problem, layout=LAYOUT, timeline=True)
    return trace_events(found, every_pass=True, every_rank=True)["traceEvents"]


def _passes(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    return [
        e
        for e in events
        if e["ph"] == "X" and e["pid"] == rank and e["cat"] in ("forward", "backward")
    ]


def _inside(events: list[dict[str, Any]], one: dict[str, Any]) -> list[dict[str, Any]]:
    end, slack = one["ts"] + one["dur"], 1e-6 * (one["ts"] + one["dur"])
    return [
        e
        for e in events
        if e.get("cat") == "inside"
        and e["pid"] == one["pid"]
        and one["ts"] - slack <= e["ts"]
        and e["ts"] + e["dur"] <= end + slack
    ]


def test_every_rank_does_what_its_stage_does(events: list[dict[str, Any]]) -> None:
    """Ranks in Megatron-LM's order: tensor first, then data, then pipeline."""
    drawn = [e for e in events if e["ph"] == "X"]
    of_rank = [
        [{k: v for k, v in e.items() if k != "pid"} for e in drawn if e["pid"] == rank]
        for rank in range(8)
    ]
    assert {e["pid"] for e in drawn} == set(range(8))
    assert of_rank[0] != of_rank[4]
    assert all(mine == of_rank[0 if rank < 4 else 4] for rank, mine in enumerate(of_rank))


def test_every_pass_holds_its_kernels_and_collectives(events: list[dict[str, Any]]) -> None:
    found = _passes(events, 5)
    assert len(found) >= 4  # two micro-batches forward and backward, the last of them in segments
    for one in found:
        inside = _inside(events, one)
        assert any("linear" in e["name"] for e in inside), one
        assert any(e["args"].get("group") == "tp" for e in inside), one


def test_transfers_join_ranks_of_one_pipeline_and_nothing_else(
    events: list[dict[str, Any]],
) -> None:
    begins, ends = ({e["id"]: e["pid"] for e in events if e["ph"] == phase} for phase in "sf")
    assert begins
    assert begins.keys() == ends.keys()
    assert {abs(ends[number] - rank) for number, rank in begins.items()} == {4}


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "timeline",
        "--model",
        "gpt3-125m",
        "--cluster",
        "dgx-a100",
        "--layout",
        LAYOUT,
        "--global-batch",
        "4",
        "--seq-len",
        "512",
    ]
    path = tmp_path / "all.json"
    assert main([*argv, "--out", str(path), "--every-rank", "--every-pass"]) == 0
    names = {
        e["args"]["name"]
        for e in json.loads(path.read_text())["traceEvents"]
        if e["name"] == "process_name"
    }
    assert "rank 7 (pipeline rank 1)" in names
    assert main([*argv, "--png", str(tmp_path / "x.png"), "--every-pass"]) == 2
    assert "give --out FILE" in capsys.readouterr().err
