"""Whatever is wrong in a file of the user's: a sound description, or one line that says what is
wrong."""

import json
import math
from dataclasses import fields, is_dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import pytest
from mutations import mutations, refusal, toml_text
from test_diffusion_configs import PUBLISHED as DIFFUSION
from test_huggingface import FAMILY_COUNTS, LONGCAT_FLASH, NAS, PUBLISHED
from test_recent_models import NEMOTRON, NEMOTRON_H, RECENT, SIGLIP

from perfmodel.catalog import cluster, model, model_from_config
from perfmodel.catalog.huggingface import FAMILIES, known_family
from perfmodel.errors import PerfModelError
from perfmodel.files import parse_json
from perfmodel.workload import parameter_count

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 16,
    "sliding_window": 64,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "_name_or_path": "tiny",
}
MIXTRAL = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
_RECENT = [config.get("text_config", config) for config, _ in RECENT.values()]
CONFIGS = {family: entry["config"] for family, entry in FAMILY_COUNTS.items() if family in FAMILIES}
CONFIGS |= (
    {known_family(config["model_type"]): config for config, _, _ in PUBLISHED.values()}
    | {
        known_family(config.get("model_type", config.get("_class_name"))): config
        for config in [*_RECENT, *DIFFUSION.values(), NEMOTRON, NEMOTRON_H, SIGLIP]
    }
    | {
        "llama": LLAMA,
        "longcat": LONGCAT_FLASH,
        "gemma3n": FAMILY_COUNTS["gemma3n_text"]["config"],
        "nemotron-nas": NAS,
        "mt5": PUBLISHED["t5-small"][0]
        | {"model_type": "mt5", "feed_forward_proj": "gated-gelu", "num_decoder_layers": 3},
        "qwen2_moe": LLAMA
        | {
            "model_type": "qwen2_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        "llama_with_experts": MIXTRAL | {"model_type": "llama_with_experts"},
        "qwen3": LLAMA | {"model_type": "qwen3"},
        "gpt_oss": MIXTRAL | {"model_type": "gpt_oss"},
        "cohere2": PUBLISHED["aya-expanse-8b"][0] | {"model_type": "cohere2"},
        "vit": RECENT["vit-l-16"][0]
        | {"id2label": {"0": "a", "1": "b"}},  # each of a thousand classes would be changed
    }
)
SERVER = {
    "name": "server",
    "device": {
        "name": "chip",
        "vendor": "V",
        "architecture": "A",
        "memory_gib": 24,
        "memory_bandwidth_gb_per_s": 600.0,
        "peak_tflops": {"fp32": 31.2, "bf16": 125.0},
        "compute_units": 72,
        "clock_mhz": 1695,
        "l2_mib": 6.0,
        "link_gb_per_s": 31.5,
        "host_gb_per_s": 31.5,
        "power_w": 150.0,
        "idle_power_w": 20.0,
        "source": "S",
        "aliases": ["c"],
    },
    "levels": [
        {
            "name": "bus",
            "size": 4,
            "bandwidth_gb_per_s": 31.5,
            "latency_us": 5.0,
            "source": "S",
            "contention": 0.1,
        },
        {"name": "net", "size": 16, "bandwidth_gb_per_s": 3.0, "latency_us": 5.0},
    ],
    "max_devices": 8,
    "price_per_device_hour": 2.0,
    "source": "S",
    "aliases": ["s"],
}
MODELS = {
    "transformer": {
        "name": "t",
        "kind": "transformer",
        "layers": 4,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn_hidden": 128,
        "vocab": 320,
        "seq_len": 32,
        "decoder_layers": 2,
        "decoder_seq_len": 16,
        "window": 8,
        "full_attention_every": 2,
        "activation": "silu",
        "gated_ffn": True,
        "experts": {
            "count": 4,
            "topk": 2,
            "ffn_hidden": 32,
            "shared_ffn_hidden": 32,
            "first_dense_layers": 1,
        },
        "latent_attention": {
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
    },
    "mlp": {"name": "m", "kind": "mlp", "layers": 4, "hidden": 64, "seq_len": 1},
    "convnet": {
        "name": "c",
        "kind": "convnet",
        "image_size": 32,
        "stack": [
            {
                "name": "a",
                "op": "conv",
                "c_in": 3,
                "size_in": 32,
                "c_out": 8,
                "kernel": 3,
                "stride": 2,
                "pad": 1,
            },
            {"name": "b", "op": "linear", "c_in": 8, "size_in": 16, "c_out": 10},
        ],
    },
}

SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "seq_len")
"""Sizes that every transformer has."""


def _numbers(description: Any) -> list[int | float]:
    """All numbers in a description and in its parts."""
    if isinstance(description, tuple):
        parts = description
    else:
        parts = [getattr(description, f.name) for f in fields(description)]
    numbers: list[int | float] = []
    for part in parts:
        if is_dataclass(part) or isinstance(part, tuple):
            numbers += _numbers(part)
        elif isinstance(part, int | float) and not isinstance(part, bool):
            numbers.append(part)
    return numbers


def _read_soundly(content: Any, change: str, read: Any, integers: bool) -> Any:
    """Read a file: its description, or None if it is refused. Fails for an unsound description.

    Args:
        change: what was changed in the file, for messages.
        read: the reader.
        integers: whether all numbers of a description must be integers.
    """
    try:
        description = read(content)
    except PerfModelError as error:
        refusal(error, change)
        return None
    for number in _numbers(description):
        assert 0 <= number < math.inf, (change, number)
        if integers:
            assert isinstance(number, Integral), (change, number)
            assert number <= 10**9, (change, number)
    return description


def test_every_family_of_hugging_face_is_tried():
    assert set(CONFIGS) >= set(FAMILIES)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_mutated_hugging_face_configuration_is_a_sound_model_or_refused(family: str):
    accepted = 0
    for what, config in mutations(CONFIGS[family] | {"architectures": ["Any"]}):
        # As a file is read, but without writing 40,000 of them.
        parsed = parse_json(json.dumps(config))
        found = _read_soundly(parsed, f"{family}: {what}", model_from_config, integers=True)
        if found is not None:
            assert parameter_count(found) > 0, what
            for size in SIZES:
                assert getattr(found, size) > 0, (what, size)
            assert found.vocab > 0 or found.inputs.patches, what
            accepted += 1
    assert accepted  # without the key that nothing follows from


@pytest.mark.parametrize("kind", MODELS)
def test_a_mutated_model_is_sound_or_refused(kind: str, tmp_path: Path):
    path = tmp_path / "model.toml"
    for what, data in mutations(MODELS[kind]):
        path.write_text(toml_text(data))
        found = _read_soundly(path, f"{kind}: {what}", model, integers=True)
        if found is not None and kind != "convnet":
            assert parameter_count(found) > 0, what


def test_a_mutated_cluster_or_device_is_sound_or_refused(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    path.write_text(toml_text(SERVER))
    assert cluster(path).capacity == 8
    for what, data in mutations(SERVER):
        path.write_text(toml_text(data))
        found = _read_soundly(path, what, cluster, integers=False)
        if found is not None:
            assert 1 <= found.capacity <= found.levels[-1].size, what


def test_all_errors_of_a_configuration_are_in_one_line(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(LLAMA | {"hidden_size": 0, "vocab_size": "many", "num_hidden_layers": 2.5})
    )
    with pytest.raises(
        PerfModelError, match=r"hidden_size: .*; num_hidden_layers: .*; vocab_size: "
    ):
        model(path)


def test_positions_are_no_sequence_length(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"max_position_embeddings": 131072}))
    found = model(path)
    assert (found.seq_len, found.inputs.longest_seq_len) == (8192, 131072)
    path.write_text(json.dumps(LLAMA | {"max_position_embeddings": 8192}))
    assert (model(path).seq_len, model(path).inputs.longest_seq_len) == (8192, 0)
