"""What commands accept: never more devices than there are, nor element types that they lack, nor
silently something else than was asked for."""

import json
from pathlib import Path

import pytest
from command_line import run

from perfmodel import catalog, predict
from perfmodel.errors import PerfModelError
from perfmodel.prediction import check_layout
from perfmodel.spec import Cluster, Job, Layout
from perfmodel.units import DTYPE_BYTES

FOUR = """\
device = "A100-SXM4-80GB"
levels = [
  { name = "NVLink3", size = 2, bandwidth_gb_per_s = 300, latency_us = 2.0 },
  { name = "InfiniBand HDR", size = 4, bandwidth_gb_per_s = 25, latency_us = 5.0 },
]
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}
OF_EIGHT = ("--layout", "tp=2,dp=4")
COMMANDS = {
    "predict": OF_EIGHT,
    "timeline": (*OF_EIGHT, "--out", "OUT.json"),
    "whatif": (*OF_EIGHT, "--set", "compute_rate=2x"),
    "search": ("--devices", "8"),
    "search --fewer-devices": ("--devices", "8", "--fewer-devices"),
    "search --pareto time,memory": ("--devices", "8"),
    "plot gantt": (*OF_EIGHT, "--out", "OUT.png"),
    "plot memory": (*OF_EIGHT, "--out", "OUT.png"),
    "plot links": (*OF_EIGHT, "--out", "OUT.png"),
    "plot breakdown": ("--layouts", "tp=2,dp=4", "--out", "OUT.png"),
    "plot whatif": (*OF_EIGHT, "--sweep", "compute_rate=1x:2x:2", "--out", "OUT.png"),
    "plot pareto": ("--devices", "8", "--out", "OUT.png"),
    "design memory": OF_EIGHT,
    "design upgrade": ("--devices", "8"),
}


def _four(tmp_path: Path) -> str:
    path = tmp_path / "four.toml"
    path.write_text(FOUR)
    return str(path)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_uses_more_devices_than_the_outermost_level_joins(command, capsys, tmp_path):
    rest = [word.replace("OUT", str(tmp_path / "out")) for word in COMMANDS[command]]
    job = ["--model", "gpt3-1.3b", "--cluster", _four(tmp_path), "--global-batch", "32"]
    status, out, err = run(capsys, *command.split(), *job, *rest)
    assert (status, out) == (2, "")
    assert "8 devices; cluster four has 4" in err
    assert err.count("\n") == 1


def test_emulation_and_programs_stay_inside_the_cluster(capsys, tmp_path):
    status, _, err = run(
        capsys,
        "emulate",
        "--world-size",
        "8",
        "--cluster",
        _four(tmp_path),
        "--",
        "python",
        "train.py",
    )
    assert status == 2
    assert "the emulated world needs 8 devices; cluster four has 4" in err


def test_a_search_beyond_the_cluster_names_what_would_do(capsys, tmp_path):
    _, _, err = run(
        capsys,
        "search",
        "--model",
        "gpt3-1.3b",
        "--cluster",
        _four(tmp_path),
        "--devices",
        "512",
        "--global-batch",
        "32",
    )
    assert "possible with 4 devices" in err


@pytest.mark.parametrize("devices", [0, 5, 8])
def test_a_cluster_has_no_more_devices_than_it_joins(devices, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(FOUR + f"max_devices = {devices}\n")
    with pytest.raises(
        PerfModelError, match=f"max_devices={devices} must be between 1 and the 4 devices"
    ):
        catalog.cluster(path)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_device_computes_in_what_it_has_and_nothing_else(dtype):
    model, layout = catalog.model("gpt3-1.3b"), Layout()
    for name in catalog.devices():
        device = catalog.device(name)
        cluster = Cluster(name="one", device=device, levels=catalog.cluster("dgx-a100").levels)
        job = Job(global_batch=1, seq_len=model.seq_len, dtype=dtype)
        if getattr(device.peak, dtype) is not None:
            check_layout(model, cluster, job, layout)
            continue
        with pytest.raises(
            PerfModelError, match=f"has no {dtype}; choose a dtype among .*fp32"
        ) as refused:
            check_layout(model, cluster, job, layout)
        assert ", ".join(device.dtypes) in str(refused.value)


@pytest.mark.parametrize("cluster", catalog.clusters())
def test_the_dtype_that_nobody_chose_is_one_that_the_device_has(cluster):
    device = catalog.cluster(cluster).device
    job = Job.of(catalog.model("gpt3-1.3b"), device, global_batch=1)
    device.require(job.dtype)
    assert bool(job.assumed) == (job.dtype != "bf16")


def test_what_is_assumed_stands_in_the_result_and_on_stderr(capsys, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    job = ["--model", str(config), "--cluster", "v100-100g", "--global-batch", "8"]
    status, out, err = run(capsys, "predict", *job, "--layout", "tp=8", "--json")
    result = json.loads(out)
    assert (status, result["seq_len"]) == (0, 8192)
    for told in ("seq_len=8,192 is assumed", "dtype fp16 is assumed"):
        assert any(told in warning for warning in result["warnings"])
        assert told in err
    given = ["--seq-len", "2048", "--dtype", "fp16"]
    status, out, err = run(capsys, "predict", *job, *given, "--layout", "tp=8", "--json")
    assert err == ""
    assert not any("assumed" in warning for warning in json.loads(out)["warnings"])
    status, out, err = run(capsys, "search", *job, "--devices", "8", "--fix", "tp=8", "--json")
    assert any(
        "seq_len=8,192 is assumed" in warning
        for warning in json.loads(out)["layouts"][0]["warnings"]
    )
    assert "seq_len=8,192 is assumed" in err


TOO_LARGE = [
    "--model",
    "gpt3-175b",
    "--cluster",
    "dgx-a100",
    "--global-batch",
    "16",
    "--layout",
    "tp=8,pp=2",
]
DRAWN = {
    "timeline": "OUT.json",
    "plot gantt": "OUT.png",
    "plot memory": "OUT.png",
    "plot links": "OUT.png",
}


@pytest.mark.parametrize("command", DRAWN)
@pytest.mark.parametrize("as_json", [False, True])
def test_pictures_of_what_does_not_fit_say_so(command, as_json, capsys, tmp_path):
    out_file = DRAWN[command].replace("OUT", str(tmp_path / "out"))
    status, out, err = run(
        capsys, *command.split(), *TOO_LARGE, "--out", out_file, *(["--json"] if as_json else [])
    )
    assert status == 0
    assert "layout tp=8,pp=2,dp=1: out of memory" in err
    if as_json:
        report = json.loads(out)
        assert report["fits"] is False
        assert "out of memory" in report["reasons"][0]


@pytest.mark.parametrize("kind", ["breakdown", "whatif"])
def test_figures_of_what_does_not_fit_say_so(kind, capsys, tmp_path):
    words = TOO_LARGE[:-2]
    rest = {
        "breakdown": ["--layouts", "tp=8,pp=2;tp=8,pp=16"],
        "whatif": ["--layout", "tp=8,pp=2", "--sweep", "compute_rate=1x:2x:2"],
    }[kind]
    _, out, err = run(
        capsys, "plot", kind, *words, *rest, "--out", str(tmp_path / "o.png"), "--json"
    )
    assert err.count("out of memory") == 1
    assert (json.loads(out)["fits"], len(json.loads(out)["reasons"])) == (False, 1)


def test_what_runs_otherwise_than_written_is_said():
    job = {"global_batch": 64}
    written = predict(
        "gpt3-1.3b", "dgx-a100", "tp=1,pp=4,vpp=2,schedule=1f1b,sequence_parallel=true", **job
    )
    runs = predict("gpt3-1.3b", "dgx-a100", "tp=1,pp=4,vpp=2,schedule=interleaved", **job)
    assert written.step_time_s == runs.step_time_s
    assert written.memory == runs.memory
    assert written.layout.schedule == "1f1b"
    assert [w for w in written.warnings if w not in runs.warnings] == list(written.layout.remarks)
    assert len(written.layout.remarks) == 2
