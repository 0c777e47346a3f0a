"""The command line: the contract's names and keys, one JSON object, one error line, exit status
2."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run
from rich.console import Console

from perfmodel.cli import _search
from perfmodel.spec import Layout

JOB = ["--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--global-batch", "32"]


def test_predict_prints_one_json_object(capsys):
    status, out, err = run(
        capsys, "predict", *JOB, "--devices", "16", "--layout", "tp=2,pp=2,dp=4", "--json"
    )
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert result["devices"] == 16
    assert result["step_time_lo_s"] < result["step_time_s"] < result["step_time_hi_s"]


def test_predict_prints_a_summary(capsys):
    status, out, _ = run(capsys, "predict", *JOB, "--layout", "2M2P4D,zero=1")
    assert status == 0
    for words in ("step time", "MFU", "memory", "critical path", "where the times come from"):
        assert words in out


def test_search_writes_everything(capsys, tmp_path):
    files = [tmp_path / "plan.json", tmp_path / "plan.trace.json.gz", tmp_path / "plan.png"]
    status, out, _ = run(
        capsys,
        "search",
        *JOB,
        "--devices",
        "16",
        "--top",
        "3",
        "--fix",
        "tp=2,recompute=none",
        "--out",
        str(files[0]),
        "--trace",
        str(files[1]),
        "--png",
        str(files[2]),
    )
    assert status == 0
    assert "of them were fully evaluated" in " ".join(out.split())
    assert len(json.loads(files[0].read_text())["layouts"]) == 3
    trace = json.loads(gzip.decompress(files[1].read_bytes()))
    assert {e["ph"] for e in trace["traceEvents"]} >= {"M", "X", "C"}
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("picture", ["breakdown", "pareto"])
def test_pictures_of_all_layouts_are_drawn(capsys, tmp_path, picture):
    file = tmp_path / "all.png"
    assert run(capsys, "plot", picture, *JOB, "--devices", "4", "--out", str(file))[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [80, 150])
def test_a_search_is_read_and_gone_on_from_in_any_terminal(capsys, monkeypatch, width):
    console = Console(width=width, highlight=False)
    monkeypatch.setattr(_search, "new_console", lambda: console)
    argv = ["search", *JOB, "--devices", "16", "--top", "4", "--tokens", "3e11", "--fix", "pp=2"]
    status, out, _ = run(capsys, *argv)
    assert status == 0
    layouts = [word for line in out.splitlines() for word in line.split() if word.startswith("tp=")]
    assert len(layouts) == 4 + 1 + 1  # in the table, the recommended one, and what to do next
    assert all(Layout.parse(text).devices == 16 for text in layouts)
    figures = [
        line for line in out.splitlines() if "90 % interval" in line or re.match(r" ?\d+=?  ", line)
    ]
    assert len(figures) == 5
    assert all(len(line) <= width for line in figures)
    assert "days for all tokens" in " ".join(out.split())
    (following,) = (
        line.removeprefix("next: perfmodel ")
        for line in out.splitlines()
        if line.startswith("next: ")
    )
    status, predicted, _ = run(capsys, *shlex.split(following), "--json")
    status_json, searched, _ = run(capsys, *argv, "--json")
    assert status == status_json == 0
    assert json.loads(predicted)["step_time_s"] == json.loads(searched)["layouts"][0]["step_time_s"]


def test_timeline_is_a_chrome_trace(capsys, tmp_path):
    path = tmp_path / "t.json"
    status, out, _ = run(
        capsys, "timeline", *JOB, "--layout", "tp=2,pp=4,dp=2", "--out", str(path), "--json"
    )
    assert status == 0
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    step_us = json.loads(out)["step_time_s"] * 1e6
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(step_us, rel=1e-6)
    assert {e["pid"] for e in events} == {0, 1, 2, 3}
    forwards = [e for e in events if e["cat"] == "forward"]
    assert {e["args"]["micro_batch"] for e in forwards} == set(range(16))


def test_doctor(capsys):
    status, out, _ = run(capsys, "doctor", "--json")
    assert status == 0
    assert json.loads(out)["packages"]["jax"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["predict", *JOB, "--layout", "tp=3"], "attention heads are not divisible by tp=3"),
        (["predict", *JOB, "--layout", "tp=2", "--devices", "3"], "use tp, pp|3 devices|choose tp"),
        (["predict", *JOB], "--layout"),
        (
            [
                "predict",
                "--model",
                "gpt5",
                "--cluster",
                "dgx-a100",
                "--global-batch",
                "8",
                "--layout",
                "dp=8",
            ],
            "gpt5",
        ),
        (["search", *JOB], r"the number of devices is missing; give --devices N"),
        (["search", *JOB, "--devices", "16", "--method", "magic"], "unknown search method"),
        (["timeline", *JOB, "--layout", "dp=8"], "nothing to write"),
        (["validate", "kernels", "absent.csv"], "absent.csv"),
        (["validate", "cases", "absent.csv"], "absent.csv"),
        (["predict", *JOB, "--layout", "dp=8", "--calibration", "nowhere"], "nowhere"),
        (["frobnicate"], "invalid choice"),
        (
            ["predict", *JOB[:4], "--global-batch", "9" * 9, "--layout", "dp=1"],
            "use a smaller batch",
        ),
        (["search", *JOB, "--devices", "8", "--top", "0"], "top must be at least 1 layout, got 0"),
        (["search", *JOB, "--devices", "-4"], "devices must be at least 1, got -4"),
        (
            ["search", *JOB, "--devices", "8", "--objective", "1/0"],
            "no layout that fits has a finite value of the objective '1/0'",
        ),
        (
            ["search", *JOB, "--devices", "8", "--png", "best.bmp"],
            "best.bmp: a picture's file name must end in .png",
        ),
        (
            ["timeline", *JOB, "--layout", "dp=8", "--png", "taken.png"],
            "is a folder; give another --png",
        ),
        (["fit", "absent.csv", "--out", __file__], "is a file, not a folder; give another --out"),
        (["fit", "--sites", "--out", "x"], "--sites takes published runs as TABLE"),
        (["fit", "--sites", "absent.csv", "--out", "x"], "absent.csv"),
        (
            ["fit", "absent.csv", "--unstated", "lab", "--out", "x"],
            "--unstated SOURCE belongs to --sites",
        ),
        (
            ["timeline", *JOB, "--layout", "dp=8", "--out", f"{__file__}/t.json"],
            "test_cli.py is a file; give another --out",
        ),
        # A table's ending is checked before its rows are computed.
        *(
            ([*command, "--out", "rows.json"], "rows.json: the file name of a table must end in")
            for command in (
                ["validate", "cases", "absent.csv"],
                ["validate", "kernels", "absent.csv"],
                ["import", "nccl-tests", "absent.log"],
                ["import-model", "absent.py:step"],
                ["compare", "--predicted", "absent.json", "--measured", "absent.json"],
            )
        ),
        (
            ["plot", "pareto", *JOB, "--devices", "8", "--price", "nan", "--out", "x.png"],
            "argument --price: 'nan' is not a finite number",
        ),
        (
            ["whatif", *JOB, "--layout", "dp=8", "--sweep", "compute_rate=1x:2x:99999"],
            "at most 10,000 points",
        ),
        (["run", "BINARY", "--ranks", "2"], "not a program in text form"),
        (["calibrate", "--plan", "BINARY", "--out", "x"], "BINARY"),
        (
            ["import-model", "broken.py:step", "--target", "dgx-h100"],
            "broken.py, line 4: ZeroDivisionError",
        ),
        (
            ["import-model", "broken.py:lacking", "--target", "dgx-h100"],
            "broken.py: TypeError: lacking.. missing",
        ),
        (["import-model", "cut.py:step", "--target", "dgx-h100"], "cut.py, line 1: SyntaxError"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("BINARY").write_bytes(bytes(range(128, 256)))
    Path("broken.py").write_text(
        "def lacking(x):\n    return x\ndef step():\n    return (lambda x: 1 / 0), (1.0,)\n"
    )
    Path("taken.png").mkdir()
    Path("cut.py").write_text("def step(:")
    status, out, err = run(capsys, *argv)
    assert status == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert re.search(message, err)


def test_pictures_without_matplotlib_are_refused_before_anything_is_computed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = run(
        capsys, "timeline", "--model", "gpt5", *JOB[2:], "--layout", "dp=8", "--png", "x.png"
    )
    assert (status, out) == (2, "")
    assert re.fullmatch(
        r"perfmodel: pictures need matplotlib .* pip install 'perfmodel\[viz\]'", err.strip()
    )


def test_help_imports_no_jax():
    code = "import sys; from perfmodel.cli._main import parser; parser().format_help(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_the_package_imports_no_jax():
    code = "import sys, perfmodel as pm; pm.Layout(tp=2); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "perfmodel", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("perfmodel ")
