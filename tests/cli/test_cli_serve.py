"""`perfmodel serve`."""

import json

import pytest
from command_line import run

from perfmodel.cli import main

SERVE = [
    "serve",
    "--model",
    "llama3-8b",
    "--cluster",
    "dgx-h100",
    "--prompt-tokens",
    "512",
    "--output-tokens",
    "64",
]


def test_json_of_a_server(capsys: pytest.CaptureFixture[str]):
    assert main([*SERVE, "--layout", "tp=2", "--batch", "16", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"] == 2
    assert report["batch"] == 16
    assert report["ttft_lo_s"] < report["ttft_s"] < report["ttft_hi_s"]
    assert report["tokens_per_s_per_device"] == pytest.approx(report["tokens_per_s"] / 2)
    assert report["fits"] is True


def test_text_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*SERVE, "--tpot-limit", "10ms"]) == 0
    assert main([*SERVE, "--sweep", "--devices", "2", "--tpot-limit", "0.02"]) == 0
    text = capsys.readouterr().out
    # A command to copy is never broken.
    assert max(len(line) for line in text.splitlines() if not line.startswith("next:")) <= 80
    assert "time per output token" in text
    assert "tp=2,pp=1,dp=1" in text


def test_a_token_takes_a_decode_step_and_the_prompts_that_come_between(
    capsys: pytest.CaptureFixture[str],
):
    server = json.loads(run(capsys, *SERVE, "--json").out)
    lines = [line.split() for line in run(capsys, *SERVE).out.splitlines()]
    (step,) = (words for words in lines if words[:3] == ["a", "decode", "step"])
    (prompts,) = (words for words in lines if words[:2] == ["prompts", "of"])
    assert step[-1] == prompts[-1] == "ms"
    assert float(step[-2]) + float(prompts[-2]) == pytest.approx(server["tpot_s"] * 1e3, rel=1e-3)
    # Where nothing comes between the tokens they are decode steps.
    assert "prompts of other" not in run(capsys, *SERVE, "--batching", "static").out


def test_sweep_as_json(capsys: pytest.CaptureFixture[str]):
    assert main([*SERVE, "--sweep", "--layout", "tp=1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    per_user = [one["tokens_per_s_per_user"] for one in report["pareto"]]
    assert per_user == sorted(per_user, reverse=True)
    assert report["evaluated"] >= len(report["pareto"])


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--sweep"], "--sweep needs --devices"),
        (["--sweep", "--devices", "2", "--batch", "4"], "leave out --batch"),
        (["--sweep", "--devices", "0"], "devices=0"),
        (["--devices", "2"], "--devices needs --sweep"),
        (["--layout", "tp=3"], "not divisible by tp=3"),
        (["--tpot-limit", "0"], "above zero"),
        (["--model", "no-such"], "unknown model"),
    ],
)
def test_bad_input_is_one_line(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert main([*SERVE, *flags]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "flags", [["--ttft-limit", "soon"], ["--batching", "orca"], ["--batch", "many"]]
)
def test_flags_that_do_not_parse(flags: list[str], capsys: pytest.CaptureFixture[str]):
    printed = run(capsys, *SERVE, *flags)
    assert printed.status == 2
    assert len(printed.err.splitlines()) == 1
