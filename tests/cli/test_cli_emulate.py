"""`perfmodel emulate` from the shell: what it refuses without torch, and what it writes with it."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from perfmodel.cli import main

SCRIPT = Path(__file__).parents[1] / "emulation" / "scripts" / "sharded.py"
PROGRAM = Path(__file__).parents[1] / "execution" / "programs" / "pipeline_mlp.ir"
BASE = ("emulate", "--world-size", "8", "--cluster", "dgx-a100")
COMMAND = ("--", sys.executable, str(SCRIPT))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--delay", "all_reduce=soon", *COMMAND), "'soon' is no time"),
        (("--delay", "all_reduced=1ms", *COMMAND), "did you mean 'all_reduce'"),
        (("--real-ranks", "8", *COMMAND), "different ones of 0 to 7"),
        (("--real-ranks", "a", *COMMAND), "like 0 or 0,8"),
        (("--fail", "0@3", *COMMAND), "with an emulated rank"),
        (("--fail", "3@0", *COMMAND), "with an emulated rank"),
        (("--every", "0", "--sweep", "all_reduce=0:1ms:3", *COMMAND), "--every must be at least 1"),
        (("--model", "gpt3-125m", "--layout", "dp=4", "--global-batch", "8", *COMMAND), "is for 4 devices"),
        (("--jitter", "0.1", "--", str(PROGRAM)), "--jitter is for scripts"),
        (("--sweep", "all_reduce=1ms", *COMMAND), "KIND=FIRST:LAST:COUNT"),
        (("--png", "x.png", *COMMAND), "give --sweep"),
        (("--jitter", "-1", *COMMAND), "between 0 and 2"),
        (("--straggler", "0", *COMMAND), "must be positive"),
        (("--prices", "no_such_module:f", *COMMAND), "module:function"),
        (("--model", "gpt3-125m", *COMMAND), "--layout and --global-batch"),
        ((), "give it after --"),
        (("--", "no-such-command"), "'no-such-command' not found"),
        (("--", str(PROGRAM)), "for 2 devices, not 8"),
    ],
)
def test_bad_input_is_one_line(more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, *more]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_program_of_jax_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["emulate", "--world-size", "2", "--cluster", "localhost", "--real-ranks", "0,1", "--json"]
    more = ["--delay", "send_recv=2ms", "--out", str(tmp_path / "out")]
    assert main([*arguments, *more, "--", str(PROGRAM)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert all(r["step_s"] > r["communication_s"] > 0 for r in report["ranks"])
    table = pd.read_csv(report["written"][0])
    assert len(table) == sum(r["instructions"] for r in report["ranks"])
    sends = table[table.collective]
    assert len(sends) > 0
    assert (sends.repeat0_s > 0.002).all()


def test_script_leaves_tables_and_a_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
    out = tmp_path / "out"
    assert main([*BASE, "--json", "--set", "intra_node_bandwidth=0.5x", "--out", str(out), *COMMAND]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["world_size"] == 8
    assert report["slack_s"]["all_gather"]["count"] > 0
    assert {Path(p).name for p in report["written"]} == {"collectives.csv", "iterations.csv", "timeline.json.gz"}
    assert main(["compare", "--predicted", report["written"][2], "--measured", report["written"][2], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 3
