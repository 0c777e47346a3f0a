"""A line of an answer says what to do next: every command on it runs as it is printed, and
gives what it promises, also with blanks and quotes in the names of files."""

import json
import os
import shlex
from pathlib import Path

import pytest
from command_line import Printed
from command_line import run as run_command

from perfmodel.cli import samples

FILES = {
    "job.toml": "my own job's.toml",
    "train.sh": 'a "train" run.sh',
    "train.log": "the log's.log",
    "cluster.toml": "my cluster.toml",
    "nccl.txt": "nccl $HOME.txt",
    "profile.json": "rank 0.json",
}
"""Samples, by names that a shell would take apart."""
OF_A_JOB = ("--model", "llama3-8b", "--cluster", "dgx-h100", "--global-batch", "16")
LAYOUT = ("--layout", "tp=4,pp=2,dp=1,zero=1")
SERVE = (
    "serve", "--model", "llama3-8b", "--cluster", "dgx-h100",
    "--prompt-tokens", "512", "--output-tokens", "64", "--tpot-limit", "50ms",
)  # fmt: skip
JOB, SCRIPT, LOG = FILES["job.toml"], FILES["train.sh"], FILES["train.log"]
ON_DGX = ("--cluster", "dgx-h100")
OWN = ("--cluster", FILES["cluster.toml"])
COMMANDS: dict[str, tuple[str, ...]] = {
    "init": ("init", "another one.toml"),
    "samples": ("samples", "try them"),
    "predict": ("predict", *OF_A_JOB, *LAYOUT),
    "predict job": ("predict", JOB, *OWN, "--set", "layout.tp=8", "--set", "layout.dp=4"),
    "predict script": ("predict", "--from", SCRIPT, *ON_DGX),
    "predict open": ("predict", *OF_A_JOB, "--devices", "8", "--open"),
    "search": ("search", *OF_A_JOB, "--devices", "8", "--top", "2"),
    "search script": ("search", "--from", SCRIPT, *ON_DGX, "--top", "2"),
    "search job": ("search", JOB, "--devices", "8", "--top", "2"),
    "compare-clusters": (
        "compare-clusters", JOB, "--clusters", f"h100:8,{FILES['cluster.toml']}:8",
    ),
    "serve": SERVE,
    "serve sweep": (*SERVE, "--sweep", "--devices", "2"),
    "serve job": ("serve", JOB),
    "serve job sweep": ("serve", JOB, "--sweep"),
    "schedules": ("schedules", "1f1b", "zb-h1", *OF_A_JOB, *LAYOUT),
    "schedules job": ("schedules", "1f1b", "zb-h1", JOB),
    "schedules script": ("schedules", "1f1b", "gpipe", "--from", SCRIPT, *ON_DGX),
    "check": ("check", "--from", SCRIPT, "--log", LOG, *ON_DGX),
    "import": (
        "import", "nccl-tests", FILES["nccl.txt"], *ON_DGX, "--out", "my collectives.csv",
    ),
    "fit log": ("fit", "--log", f"{SCRIPT}={LOG}", *ON_DGX, "--out", "of my site"),
    "for decision": (
        "calibrate", "--for-decision", *OF_A_JOB, "--devices", "8", "--top", "2",
    ),
    "hook": ("hook",),
}  # fmt: skip
ADVICE = {
    "check": "next, to distinguish them: ",
    "fit log": "next: add --calibration 'of my site' to ",
    "hook": "next: perfmodel hook FRAMEWORK prints the lines",
}
"""Last lines that are advice instead of a command."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the samples under names that have to be quoted."""
    for name, text in samples().items():
        (tmp_path / FILES.get(name, name)).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def next_line(printed: Printed) -> str:
    """The line of an answer that says what to do next; there is exactly one."""
    assert printed.status == 0, printed.err
    (line,) = (line for line in printed.out.splitlines() if line.startswith("next"))
    return line


def follow(capsys: pytest.CaptureFixture[str], line: str) -> Printed:
    """Run the command of a `next:` line as a shell would."""
    words = shlex.split(line.removeprefix("next: "))
    if words[0] == "cd":
        os.chdir(words[1])
        words = words[3:]
    assert words[0] == "perfmodel", line
    return run_command(capsys, *words[1:])


@pytest.mark.parametrize("name", COMMANDS)
def test_the_next_command_runs_as_printed(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = next_line(run_command(capsys, *COMMANDS[name]))
    if name in ADVICE:
        assert line.startswith(ADVICE[name])
        return
    answer = follow(capsys, line)
    assert answer.status == 0, (line, answer.err)
    assert answer.out


@pytest.mark.parametrize("name", ["serve sweep", "schedules", "schedules job", "schedules script"])
def test_the_next_command_repeats_the_best_row(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep and a comparison of schedules end with the command of the row that won."""
    line = next_line(run_command(capsys, *COMMANDS[name]))
    report = json.loads(run_command(capsys, *COMMANDS[name], "--json").out)
    again = json.loads(follow(capsys, f"{line} --json").out)
    if name.startswith("serve"):
        best = report["pareto"][-1]
        assert again["tokens_per_s"] == pytest.approx(best["tokens_per_s"], rel=1e-9)
        return
    best = min(report["rows"], key=lambda row: (not row["fits"], row["step_time_s"]))
    assert again["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-9)


def test_a_job_file_of_training_is_served(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What only training has is named, and the rest of the layout is served."""
    printed = run_command(capsys, "serve", JOB, "--json")
    assert json.loads(printed.out)["layout"] == "tp=4,pp=2,dp=8"
    assert "serve does not use layout.zero, job.global_batch" in " ".join(printed.err.split())

    # A number of devices asks for all layouts on them, not for the file's.
    swept = json.loads(run_command(capsys, "serve", JOB, "--sweep", "--devices", "2", "--json").out)
    assert {server["devices"] for server in swept["pareto"]} == {2}


@pytest.mark.parametrize(
    ("words", "flag", "ending"),
    [
        (("timeline", *OF_A_JOB, *LAYOUT), "out", ".json or .json.gz"),
        (("timeline", *OF_A_JOB, *LAYOUT), "html", ".html or .htm"),
        (("search", *OF_A_JOB, "--devices", "8"), "trace", ".json or .json.gz"),
        (("search", *OF_A_JOB, "--devices", "8"), "out", ".json"),
        (("simulate", "gpt.ir", *ON_DGX), "trace", ".json or .json.gz"),
        (("run", "gpt.ir"), "out", ".json or .json.gz"),
        (("import", "kineto", FILES["profile.json"]), "timeline", ".json or .json.gz"),
        (("report", *OF_A_JOB, "--devices", "8"), "html", ".html or .htm"),
        (("check", "--from", SCRIPT, "--log", LOG, *ON_DGX), "html", ".html or .htm"),
        (("distribute", "gpt2-345m", "--layout", "dp=2"), "out", ".ir"),
        (("schedules", "--train"), "out", ".csv"),
    ],
)
def test_an_ending_that_says_another_kind_of_file_is_refused(
    words: tuple[str, ...],
    flag: str,
    ending: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is computed, and nothing is written."""
    before = sorted(folder.iterdir())
    printed = run_command(capsys, *words, f"--{flag}", "a.txt")
    assert printed.status == 2
    assert printed.out == ""
    assert ending in " ".join(printed.err.split())
    assert sorted(folder.iterdir()) == before
