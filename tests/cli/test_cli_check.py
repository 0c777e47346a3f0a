"""`perfmodel check`: a launch script and a log on one screen, as JSON, and what is refused."""

import json
from pathlib import Path

import pytest
from written_logs import WrittenRun, write_log

from perfmodel.cli import main

SCRIPT = Path(__file__).parents[1] / "ingest" / "launch_files" / "torchtitan_8b.toml"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    run = WrittenRun(
        step_s=[9.0] + [1.2] * 20, devices=64, global_batch=64, seq_len=8192, flops_per_token=5.8e10
    )
    path.write_text(write_log("torchtitan", run))
    return path


def command(log: Path, *more: str) -> list[str]:
    return [
        "check",
        "--from",
        str(SCRIPT),
        "--devices",
        "64",
        "--log",
        str(log),
        "--cluster",
        "dgx-h100",
        *more,
    ]


def test_one_screen(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(log)) == 0
    out = capsys.readouterr().out
    assert out.startswith("healthy: ")
    assert "measured 1.2 s, predicted" in out
    assert "the fastest tenth takes at most" in " ".join(out.split())
    assert len(out.splitlines()) < 40


def test_json(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(log, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "torchtitan"
    assert report["healthy"]
    assert report["measured"]["step_time_s"] == pytest.approx(1.2, rel=1e-3)


def test_flags_instead_of_a_script(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--global-batch",
        "64",
        "--layout",
        "dp=64,zero=3",
    ]
    assert main(["check", *flags, "--log", str(log)]) == 0
    assert "llama3-8b on 64 devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--log", "nowhere.log"], "nowhere.log"),
        ([], "the following arguments are required: --log"),
        (["--log", str(SCRIPT)], "no line about a training step"),
    ],
)
def test_what_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["check", "--from", str(SCRIPT), "--devices", "64", "--cluster", "dgx-h100", *argv])
        == 2
    )
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error


def test_a_fit_to_scripts_and_logs(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--cluster", "dgx-h100", "--devices", "64", "--out", str(tmp_path / "mine"), "--json"]
    assert main(["fit", "--log", f"{SCRIPT}={log}", *words]) == 0
    (fitted,) = json.loads(capsys.readouterr().out)["end_to_end"].values()
    assert fitted["runs"] == 1
    assert (tmp_path / "mine").is_dir()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--log", "train.log", "--cluster", "dgx-h100"], "--log takes SCRIPT=LOG"),
        (["--log", "train.sh=train.log"], "--log needs --cluster"),
        (
            ["--log", f"{SCRIPT}=nowhere.log", "--cluster", "dgx-h100", "--devices", "64"],
            "nowhere.log",
        ),
    ],
)
def test_logs_that_cannot_be_fitted_to(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *argv, "--out", str(tmp_path / "mine")]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_second_log_is_refused(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse takes the last of several values, and the first log would not be read."""
    with pytest.raises(SystemExit) as stop:
        main(command(log, "--log", str(log)))
    assert stop.value.code == 2
    assert "fit --log SCRIPT=LOG" in capsys.readouterr().err
