"""`--framework` on every command that predicts: it fills what is unsaid, says so, and what is said
wins."""

import json

import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.cli import main

JOB = ["--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--global-batch", "32"]
LAYOUT = ["--layout", "tp=2,pp=2,dp=2"]


def told(capsys, *arguments: str) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_without_a_framework_it_is_generic(capsys) -> None:
    plain = told(capsys, "predict", *JOB, *LAYOUT)
    named = told(capsys, "predict", *JOB, *LAYOUT, "--framework", "generic")
    assert set(plain.pop("not_stated")) - set(named.pop("not_stated")) == {"framework"}
    assert plain == named
    assert plain["framework"] == "generic"
    assert plain["layout"] == "tp=2,pp=2,dp=2"
    assert not any("assumed" in line for line in plain["warnings"])


def test_defaults_fill_what_is_unsaid_and_are_said(capsys) -> None:
    found = told(capsys, "predict", *JOB, *LAYOUT, "--framework", "nemo@2024")
    assert found["framework"] == "nemo@2024"
    assert found["layout"] == "tp=2,pp=2,dp=2,zero=1,sequence_parallel=true,tp_overlap=true"
    assert any(
        "nemo@2024" in line and "zero=1, sequence_parallel=true" in line
        for line in found["warnings"]
    )
    said = told(
        capsys, "predict", *JOB, "--layout", "tp=2,pp=2,dp=2,zero=0", "--framework", "nemo@2024"
    )
    assert "zero=0" in said["layout"]
    assert said["memory_bytes"]["optimizer"] == pytest.approx(
        2 * found["memory_bytes"]["optimizer"], rel=0.01
    )
    again = told(capsys, "predict", *JOB, "--layout", said["layout"], "--framework", "nemo@2024")
    assert again["layout"] == said["layout"]
    assert again["step_time_s"] == said["step_time_s"]


def test_the_command_line_and_python_say_the_same(capsys) -> None:
    found = told(capsys, "predict", *JOB, *LAYOUT, "--framework", "megatron-lm@2021")
    p = pm.predict(
        "gpt3-1.3b", "dgx-a100", LAYOUT[1], global_batch=32, framework="megatron-lm@2021"
    )
    assert found.pop("not_stated")  # known of flags alone
    assert found == p.to_dict()
    record = pm.framework("megatron-lm@2021")
    assert p == pm.predict("gpt3-1.3b", "dgx-a100", LAYOUT[1], global_batch=32, framework=record)
    assert (
        p.step_time_s > pm.predict("gpt3-1.3b", "dgx-a100", LAYOUT[1], global_batch=32).step_time_s
    )


def test_attention_that_is_said_wins(capsys) -> None:
    old = ["predict", *JOB, *LAYOUT, "--framework", "megatron-lm@2021"]
    assert (
        told(capsys, *old, "--attention", "flash")["step_time_s"]
        < told(capsys, *old)["step_time_s"]
    )


def test_what_it_cannot_run_is_said(capsys) -> None:
    layout = ["--layout", "tp=2,pp=2,dp=2,zero=2"]
    found = told(capsys, "predict", *JOB, *layout, "--framework", "megatron-core@2025")
    assert "megatron-core@2025 cannot run zero=2 in a pipeline" in found["warnings"]


@pytest.mark.parametrize(
    "command",
    [
        ["whatif", *JOB, *LAYOUT],
        ["design", "memory", *JOB, *LAYOUT],
        [
            "search",
            *JOB,
            "--devices",
            "8",
            "--fix",
            "tp=2,pp=2,vpp=1,recompute=none,micro_batch=2,zero=0",
            "--top",
            "1",
        ],
        ["schedules", "1f1b", *JOB, *LAYOUT],
        ["timeline", *JOB, *LAYOUT, "--out", "OUT.json"],
        ["plot", "gantt", *JOB, *LAYOUT, "--out", "OUT.png"],
        ["calibrate", *JOB, "--layouts", LAYOUT[1], "--dry-run"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_predicts_takes_it(capsys, tmp_path, command) -> None:
    command = [word.replace("OUT", str(tmp_path / "x")) for word in command]
    numbers = []
    for framework in ("generic", "megatron-lm@2021"):
        assert main([*command, "--framework", framework, "--json"]) == 0
        captured = capsys.readouterr()
        numbers.append(captured.out)
        assert ("megatron-lm@2021" in captured.err + captured.out) == (framework != "generic")
    assert numbers[0] != numbers[1] or command[0] == "plot"
    assert main([*command, "--framework", "megatorn"]) == 2
    assert "unknown framework 'megatorn'" in capsys.readouterr().err


def test_emulate_and_validate_take_it(capsys) -> None:
    from perfmodel.cli import parser

    for command in (
        ["emulate", "--world-size", "4", "--cluster", "dgx-a100", "--framework", "pytorch"],
        ["validate", "cases", "x.csv", "--framework", "generic"],
    ):
        assert parser().parse_args(command).framework == command[-1]
    assert main(["validate", "cases", "x.csv", "--framework", "nobody"]) == 2
    assert "x.csv" in capsys.readouterr().err


def test_layouts_of_a_search_are_read_back_by_the_framework() -> None:
    found = pm.search(
        "gpt3-1.3b", "dgx-a100", devices=8, global_batch=32, top=3, framework="nemo@2025"
    )
    nemo = catalog.framework("nemo@2025")
    for p in found.layouts:
        assert nemo.layout(p.to_dict()["layout"])[0] == p.layout
