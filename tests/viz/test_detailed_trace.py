"""Traces of all ranks, with the operators of every pass."""

import json
from pathlib import Path
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.cli import main
from perfmodel.prediction import pass_operators, step_problem_of
from perfmodel.viz import trace_events

LAYOUT = "tp=2,pp=2,dp=2,micro_batch=1,recompute=full"


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    problem = pm.Problem(
        model=pm.catalog.model("gpt3-125m"), cluster=pm.catalog.cluster("dgx-a100"),
        job=pm.Job(global_batch=4, seq_len=512), devices=8,
    )  # fmt: skip
    found = pm.predict(problem, layout=LAYOUT, timeline=True)
    operators = pass_operators(step_problem_of(problem), found.layout)
    return [e for e in trace_events(found, operators, every_rank=True)["traceEvents"] if e["ph"] == "X"]


def _of(events: list[dict[str, Any]], rank: int, *cats: str) -> list[dict[str, Any]]:
    return [e for e in events if e["pid"] == rank and e["cat"] in cats]


def test_every_rank_does_what_its_stage_does(events: list[dict[str, Any]]) -> None:
    """Ranks in Megatron-LM's order: tensor first, then data, then pipeline."""
    assert {e["pid"] for e in events} == set(range(8))
    first, second = (
        [{k: v for k, v in e.items() if k != "pid"} for e in events if e["pid"] == rank] for rank in (0, 4)
    )
    assert first != second
    for rank in range(1, 8):
        mine = [{k: v for k, v in e.items() if k != "pid"} for e in events if e["pid"] == rank]
        assert mine == (first if rank < 4 else second)


def test_blocks_fill_their_pass_and_operators_lie_in_their_block(events: list[dict[str, Any]]) -> None:
    for outer, inner in ((("forward", "backward"), ("block",)), (("block",), ("kernel", "tp collective"))):
        for one in _of(events, 5, *outer):
            start, end = one["ts"], one["ts"] + one["dur"]
            slack = 1e-6 * end
            inside = [
                e for e in _of(events, 5, *inner) if start - slack <= e["ts"] and e["ts"] + e["dur"] <= end + slack
            ]
            total = sum(e["dur"] for e in inside)
            assert inside
            assert total <= one["dur"] * (1 + 1e-6)
            if outer == ("forward", "backward"):
                assert total == pytest.approx(one["dur"], rel=1e-6)


def test_a_full_recompute_runs_the_forward_in_the_backward(events: list[dict[str, Any]]) -> None:
    backward = min(_of(events, 0, "backward"), key=lambda e: e["ts"])
    inside = [
        e["name"] for e in _of(events, 0, "kernel") if backward["ts"] <= e["ts"] < backward["ts"] + backward["dur"]
    ]
    assert any(name.endswith("fwd") for name in inside)
    assert any(name.endswith("dgrad") for name in inside)
    assert _of(events, 0, "tp collective")


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["timeline", "--model", "gpt3-125m", "--cluster", "dgx-a100", "--layout", LAYOUT, "--global-batch", "4",
            "--seq-len", "512"]  # fmt: skip
    path = tmp_path / "all.json"
    assert main([*argv, "--out", str(path), "--every-rank", "--operators"]) == 0
    names = {e["args"]["name"] for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "process_name"}
    assert "rank 7 (stage 1)" in names
    assert main([*argv, "--png", str(tmp_path / "x.png"), "--operators"]) == 2
    assert "give --out FILE" in capsys.readouterr().err
