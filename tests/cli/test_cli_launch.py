"""`--from` and `--export`: commands that read launch files, and write them."""

import json
import re
import shlex
from pathlib import Path

import pytest
from command_line import run
from thinned import one_in

from perfmodel.cli import main
from perfmodel.errors import LaunchFileError
from perfmodel.ingest.launch import comparable, parse_launch, read_launch
from perfmodel.spec import Layout

FILES = Path(__file__).parents[1] / "ingest" / "launch_files"

MEGATRON = """\
#!/bin/bash
SIZES=(--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --vocab-size 50257 --seq-length 2048)
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py "${SIZES[@]}" --micro-batch-size 2 --global-batch-size 32 \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 --overlap-grad-reduce --lr 1e-4
"""
TITAN = """\
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "full"
"""
FLAGS = {
    "train.sh": """
        --model gpt3-1.3b --global-batch 32 --seq-len 2048 --dtype bf16 --framework megatron-core
        --layout tp=2,pp=2,dp=2,micro_batch=2,overlap_grad_reduce=true,overlap_param_gather=false
    """,
    "run.toml": """
        --model llama3-8b --global-batch 4 --seq-len 4096 --dtype bf16 --framework torchtitan
        --layout tp=2,dp=4,zero=3,recompute=full,micro_batch=1,sequence_parallel=true
    """,
}
"""Flags that state what each file does."""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "train.sh").write_text(MEGATRON)
    (tmp_path / "run.toml").write_text(TITAN)
    return tmp_path


@pytest.mark.parametrize("name", FLAGS)
def test_a_file_predicts_what_its_flags_predict(name: str, files: Path, capsys) -> None:
    of_file = run(
        capsys,
        "predict",
        "--from",
        str(files / name),
        "--devices",
        "8",
        "--cluster",
        "dgx-a100",
        "--json",
    )
    of_flags = run(capsys, "predict", *FLAGS[name].split(), "--cluster", "dgx-a100", "--json")
    assert of_file[0] == of_flags[0] == 0
    assert json.loads(of_file[1]) == json.loads(of_flags[1])
    assert "assumed: " in of_file[2]


def test_flags_win_over_the_file(files: Path, capsys) -> None:
    status, out, _ = run(
        capsys,
        *("predict", "--from", str(files / "train.sh"), "--cluster", "dgx-a100", "--json"),
        *("--seq-len", "1024", "--layout", "tp=4", "--global-batch", "16"),
        *("--model", "gpt3-2.7b"),
    )
    report = json.loads(out)
    assert status == 0
    assert (report["model"], report["seq_len"], report["global_batch"]) == ("gpt3-2.7b", 1024, 16)
    layout = (
        Layout.parse(report["layout"])
        if isinstance(report["layout"], str)
        else Layout(**report["layout"])
    )
    assert (layout.tp, layout.pp, layout.dp, layout.micro_batch) == (4, 2, 1, 2)


def test_every_command_that_predicts_takes_a_file(files: Path, capsys) -> None:
    given = ("--from", str(files / "train.sh"), "--cluster", "dgx-a100", "--json")
    for command in (
        ("timeline", *given, "--out", str(files / "trace.json")),
        ("whatif", *given, "--set", "compute_rate=2x"),
        ("design", "memory", *given),
        ("schedules", *given),
        ("plot", "gantt", *given, "--out", str(files / "gantt.png")),
        ("calibrate", *given[:-1], "--dry-run", "--out", str(files / "tables")),
    ):
        status, out, err = run(capsys, *command)
        assert status == 0, (command, err)
        assert out


def test_what_neither_flags_nor_file_say_is_asked_for(files: Path, capsys) -> None:
    toml = str(files / "run.toml")
    for words, message in (
        (
            ("predict",),
            "predict: the following arguments are required: --model, --cluster, --global-batch, --layout",
        ),
        (
            ("predict", "--from", toml, "--cluster", "dgx-a100"),
            "does not state the number of devices; give --dev",
        ),
        (("predict",), "a launch script given by --from states all but the cluster"),
        (
            ("predict", "--from", toml, "--devices", "8"),
            "the following arguments are required: --cluster",
        ),
        (
            ("search", "--from", str(files / "none.sh"), "--cluster", "dgx-a100"),
            "none.sh: cannot be read",
        ),
        (
            ("predict", "--from", toml, "--devices", "9", "--cluster", "dgx-a100"),
            "9 devices are not a multiple",
        ),
    ):
        status, out, err = run(capsys, *words)
        assert (status, out) == (2, "")
        assert message in err.splitlines()[-1]
        assert "Traceback" not in err


def test_search_writes_the_best_layout_that_the_framework_can_run(files: Path, capsys) -> None:
    best = files / "best.sh"
    status, out, err = run(
        capsys,
        *("search", "--from", str(files / "train.sh"), "--cluster", "dgx-a100", "--json"),
        *("--export", str(best), "--fix", "vpp=1", "--top", "40"),
    )
    assert status == 0, err
    launch = read_launch(best)
    assert launch.model is not None
    assert (launch.model.name, launch.global_batch, launch.devices) == ("gpt3-1.3b", 32, 8)
    assert launch.layout is not None
    ranked = [
        Layout.parse(one["layout"]) if isinstance(one["layout"], str) else Layout(**one["layout"])
        for one in json.loads(out)["layouts"]
    ]
    found = [comparable(layout) for layout in ranked].index(comparable(launch.layout))
    assert err.count("skipped:  ") == min(found, 12)
    # the second of the two commands: the exported file predicts
    status, out, _ = run(capsys, "predict", "--from", str(best), "--cluster", "dgx-a100", "--json")
    assert status == 0
    first = json.loads(out)["step_time_s"]
    run_before = run(
        capsys, "predict", "--from", str(files / "train.sh"), "--cluster", "dgx-a100", "--json"
    )
    assert first < json.loads(run_before[1])["step_time_s"]


def test_names_of_exported_files_tell_the_framework(files: Path, capsys) -> None:
    job = (
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--global-batch",
        "16",
    )
    narrow = ("--fix", "tp=1,pp=1,zero=3,recompute=full,micro_batch=1")
    status, _, err = run(capsys, "search", *job, *narrow, "--export", str(files / "best.yaml"))
    assert status == 2
    assert "put one of them into the file name, as in best.nemo.yaml" in err
    for name, framework in (("best.nanotron.yaml", "nanotron"), ("best.maxtext.yml", "maxtext")):
        status, out, err = run(capsys, "search", *job, *narrow, "--export", str(files / name))
        if framework == "nanotron":
            assert status == 2
            assert "nanotron@2024 cannot run zero=3" in err
        else:
            assert status == 0, err
            assert f"wrote {files / name}" in out
            assert read_launch(files / name).framework == framework


SMALL = (
    "--model",
    "gpt3-1.3b",
    "--cluster",
    "dgx-h100",
    "--devices",
    "4",
    "--global-batch",
    "8",
    "--top",
    "2",
)


@pytest.mark.parametrize(
    ("name", "framework"),
    [("best.sh", "megatron-core"), ("best.toml", "torchtitan"), ("best.json", "deepspeed")],
)
def test_an_export_searches_for_the_framework_that_its_file_is_of(
    tmp_path: Path, capsys, name: str, framework: str
) -> None:
    file = tmp_path / name
    status, out, err = run(capsys, "search", *SMALL, "--export", str(file))
    assert status == 0, err
    assert f"only layouts that {framework}@" in out
    assert f"wrote {file}" in out
    (command,) = (line for line in out.splitlines() if line.startswith("next: "))
    _, again, _ = run(capsys, *shlex.split(command)[2:], "--json")
    _, exported, _ = run(capsys, "predict", "--from", str(file), *SMALL[:4], "--json")
    assert json.loads(exported)["step_time_s"] == pytest.approx(
        json.loads(again)["step_time_s"], rel=1e-6
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--framework", "chimera"), "launch files"),
        (("--framework", "generic"), "launch files"),
        ((), "several frameworks use"),
    ],
)
def test_an_export_that_no_framework_writes_is_refused_before_the_search(
    tmp_path: Path, capsys, monkeypatch, flags: tuple[str, ...], reason: str
) -> None:
    def searched(*_: object, **__: object) -> None:
        raise AssertionError("it was searched")

    monkeypatch.setattr("perfmodel.planning.layouts.search", searched)
    status, out, err = run(
        capsys, "search", *SMALL, *flags, "--export", str(tmp_path / "best.yaml")
    )
    assert (status, out) == (2, "")
    assert reason in err


@pytest.mark.parametrize("option", ["--export", "--trace", "--png"])
def test_the_ranking_is_printed_though_a_file_cannot_be_written(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    # The folder goes after it was checked, while the search runs.
    monkeypatch.setattr("perfmodel.cli._main._require_outputs", lambda arguments: None)
    suffix = {"--export": ".sh", "--trace": ".json", "--png": ".png"}[option]
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    status, out, err = run(capsys, "search", *SMALL, option, str(blocked / f"best{suffix}"))
    assert status == 2
    assert str(blocked) in err
    assert "recommended: tp=" in out
    assert "next: perfmodel predict" in out


# ---- the user's own layout beside the recommended one ----


@pytest.mark.parametrize(
    ("name", "changed"),
    one_in(
        3,
        [
            ("nanotron_3d.yaml", r"- parallelism\.\w+: "),
            ("torchtitan_8b.toml", r"\+ parallelism\.\w+ = "),
            ("nemo_llama.yaml", r"- model\.\w+: "),
        ],
    ),
)
def test_a_search_begins_with_the_own_layout_and_ends_with_what_to_change(
    name: str, changed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "search",
        "--from",
        str(FILES / name),
        "--cluster",
        "dgx-h100",
        "--devices",
        "16",
        "--top",
        "2",
    ]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"yours: [\d.]+ m?s per step \(90 %: .* to .*\)", lines[0])
    assert re.match(r"  needs [\d.]+ of [\d.]+ GiB", lines[1])
    assert max(map(len, lines[:2])) <= 80
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    gain = 1 - report["recommended"]["step_time_s"] / report["yours"]["step_time_s"]
    assert report["change"]["gain"] == pytest.approx(gain)
    if gain < 0.005:
        assert lines[-1].startswith("keep yours")
        return
    assert any(re.match(rf"  {changed}", line) for line in lines)
    assert any(line.startswith("change, which saves") for line in lines)
    for setting in report["change"]["settings"]:
        assert setting["before"] != setting["after"]


def test_the_ranking_is_printed_though_no_script_can_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise LaunchFileError("cannot run it")

    monkeypatch.setattr("perfmodel.ingest.launch.launch_file", refuse)
    words = [
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--global-batch",
        "64",
        "--top",
        "1",
    ]
    assert main(["search", *words, "--framework", "megatron-core", "--script"]) == 2
    out, err = capsys.readouterr()
    assert "recommended: " in out
    assert "cannot run it" in err.splitlines()[-1]


def test_a_search_ends_with_the_launch_script(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model",
        "llama3-8b",
        "--cluster",
        "dgx-h100",
        "--devices",
        "16",
        "--global-batch",
        "64",
        "--top",
        "1",
    ]
    assert main(["search", *words, "--framework", "megatron-core", "--script"]) == 0
    out = capsys.readouterr().out
    script = out.partition("launch script:\n\n")[2]
    assert script.startswith("#!")
    assert parse_launch(script, "best.sh").layout is not None
    assert main(["search", *words, "--script"]) == 2
    assert "--script needs --framework or --from" in capsys.readouterr().err


def test_settings_of_the_file_are_not_listed_as_defaults(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A micro-batch of 1 and no recomputation are defaults too, but this file states them.
    script = files / "train.sh"
    text = script.read_text().replace("--micro-batch-size 2", "--micro-batch-size 1")
    script.write_text(text.replace("--overlap-grad-reduce", ""))
    status, out, _ = run(capsys, "predict", "--from", script, "--cluster", "dgx-a100", "--json")
    assert status == 0
    not_stated = json.loads(out)["not_stated"]
    assert "micro_batch" not in not_stated
    assert "recompute" in not_stated
