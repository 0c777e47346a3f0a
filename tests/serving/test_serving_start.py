"""Operating points that are chosen, and the commands that start a predicted server."""

import shlex
from dataclasses import replace
from typing import Any

import pytest

import perfmodel as pm
from perfmodel.errors import PerfModelError
from perfmodel.serving import engine_commands, folded

ASKED: dict[str, Any] = {"prompt_tokens": 1024, "output_tokens": 256}


def test_the_layout_is_the_smallest_with_room() -> None:
    small = pm.starting_point("llama3-8b", "dgx-h100", **ASKED)
    large = pm.starting_point("llama3-70b", "dgx-h100", **ASKED)
    assert small.serving.layout.devices == 1
    assert large.serving.layout.devices > 1
    fewer = pm.serve(
        "llama3-70b", "dgx-h100", f"tp={large.serving.layout.tp // 2}", batch=1, **ASKED
    )
    assert fewer.memory.most_requests < 64 <= large.serving.memory.most_requests


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b", "mixtral-8x7b"])
def test_the_batch_holds_the_limits_of_an_interactive_service(model: str) -> None:
    start = pm.starting_point(model, "dgx-h100", **ASKED)
    assert start.serving.ttft_s <= 1.0
    assert start.serving.tpot_s <= 0.05
    assert start.serving.fits
    assert len(start.chosen) == 2
    more = start.serving.requests.batch + start.serving.layout.dp
    beyond = pm.serve(model, "dgx-h100", start.serving.layout, batch=more, **ASKED)
    assert not beyond.fits or beyond.ttft_s > 1.0 or beyond.tpot_s > 0.05


def test_what_is_said_is_kept() -> None:
    start = pm.starting_point("llama3-8b", "dgx-h100", "tp=2", batch=7, **ASKED)
    assert (start.serving.layout.tp, start.serving.requests.batch) == (2, 7)
    assert not start.chosen
    limited = pm.starting_point("llama3-8b", "dgx-h100", "tp=2", tpot_limit_s=0.01, **ASKED)
    assert limited.serving == pm.serve("llama3-8b", "dgx-h100", "tp=2", tpot_limit_s=0.01, **ASKED)


def test_requests_that_no_batch_serves_in_time_get_all_that_fit() -> None:
    long = {"prompt_tokens": 120_000, "output_tokens": 256}
    start = pm.starting_point("llama3.1-8b", "dgx-h100", "tp=1", **long)
    assert "no batch meets" in start.chosen[-1]
    assert start.serving == pm.serve("llama3.1-8b", "dgx-h100", "tp=1", **long)


def small_devices() -> pm.Cluster:
    cluster = pm.cluster("dgx-h100")
    return replace(cluster, device=replace(cluster.device, memory_bytes=2e9))


def test_a_model_that_nothing_holds_is_refused() -> None:
    with pytest.raises(PerfModelError, match="does not fit on"):
        pm.starting_point("llama3-70b", small_devices(), **ASKED)


@pytest.mark.parametrize(
    ("model", "layout", "words", "engine", "flags"),
    [
        (
            "llama3-70b",
            "tp=4,dp=2",
            {"batch": 64, "dtype": "fp8", "kv_dtype": "fp8"},
            "vllm",
            {
                "--tensor-parallel-size": "4",
                "--data-parallel-size": "2",
                "--max-num-seqs": "32",
                "--max-model-len": "1280",
                "--quantization": "fp8",
                "--kv-cache-dtype": "fp8",
            },
        ),
        (
            "llama3-70b",
            "tp=4,pp=2",
            {"batch": 64},
            "vllm",
            {"--pipeline-parallel-size": "2", "--max-num-seqs": "64", "--dtype": "bfloat16"},
        ),
        (
            "mixtral-8x7b",
            "dp=8,ep=8",
            {"batch": 64},
            "sglang",
            {"--tp-size": "8", "--dp-size": "8", "--ep-size": "8", "--max-running-requests": "64"},
        ),
        (
            "llama3-8b",
            "tp=2",
            {"batch": 16, "kv_dtype": "fp8"},
            "sglang",
            {"--tp-size": "2", "--kv-cache-dtype": "fp8_e4m3", "--context-length": "1280"},
        ),
        (
            "mixtral-8x7b",
            "tp=8,ep=8,etp=1",
            {"batch": 64},
            "tensorrt-llm",
            {"--tp_size": "8", "--ep_size": "8", "--max_batch_size": "64", "--max_seq_len": "1280"},
        ),
    ],
)
def test_commands_say_the_server(
    model: str, layout: str, words: dict[str, Any], engine: str, flags: dict[str, str]
) -> None:
    serving = pm.serve(model, "dgx-h100", layout, **ASKED, **words)
    command = engine_commands(serving, "my/model")[engine]
    parsed = shlex.split(command)
    assert "my/model" in parsed
    for flag, value in flags.items():
        assert parsed[parsed.index(flag) + 1] == value
    text = folded(command)
    assert shlex.split(text.replace("\\\n", " ")) == parsed
    assert max(map(len, text.splitlines())) <= 80
