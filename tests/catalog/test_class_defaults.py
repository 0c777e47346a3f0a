"""Keys that a Hugging Face configuration leaves out have the values of the family's own class."""

import json
from typing import Any

import pytest
from test_transformers_classes import DECODERS_ALONE

from perfmodel.catalog import model_from_config
from perfmodel.errors import PerfModelError
from perfmodel.workload import parameters

LATENT = {
    "model_type": "deepseek_v3",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
PARTS = {
    # Without the tower, the projection to the language model, and the rows for images.
    "llava-1.5-7b": (
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32_064}},
        6_738_415_616 + 2 * 64 * 4096,
    ),
    "pixtral-12b": (
        {
            "model_type": "llava",
            "text_config": {
                "model_type": "mistral",
                "head_dim": 128,
                "hidden_size": 5120,
                "num_hidden_layers": 40,
                "sliding_window": None,
                "vocab_size": 131_072,
            },
        },
        12_247_782_400,
    ),
    "llava-1.6-mistral-7b": (
        {
            "model_type": "llava_next",
            "text_config": {"model_type": "mistral", "vocab_size": 32_064, "sliding_window": None},
        },
        7_241_732_096 + 2 * 64 * 4096,
    ),
}
"""Models of several parts as they are published, and the parameters of their language models."""


def _count(config: dict[str, Any]) -> int:
    counted = parameters(model_from_config(config))
    return counted.total - counted.further_tokens


@pytest.mark.parametrize("name", PARTS)
def test_a_part_without_sizes_has_those_of_its_class(name: str) -> None:
    config, published = PARTS[name]
    assert _count(config) == published


def test_a_whole_model_without_its_sizes_is_refused() -> None:
    """transformers writes every key of a whole model: a file without them is damaged."""
    with pytest.raises(PerfModelError, match="hidden_size: missing"):
        model_from_config({"model_type": "llama", "vocab_size": 32_000})


def test_a_null_is_stated_and_not_left_out() -> None:
    """DeepSeek-V2-Lite does not compress queries, and says so by a null."""
    left_out = model_from_config(LATENT).latent_attention
    stated = model_from_config({**LATENT, "q_lora_rank": 1536}).latent_attention
    null = model_from_config({**LATENT, "q_lora_rank": None}).latent_attention
    assert left_out == stated
    assert null is not None
    assert null.q_lora_rank == 0


def test_another_name_of_a_key_is_that_key() -> None:
    """A count of experts under its name in another family replaces the class's own."""
    renamed = {**LATENT, "num_experts": 16}
    del renamed["n_routed_experts"]
    assert _count(renamed) == _count({**LATENT, "n_routed_experts": 16})


@pytest.mark.parametrize("family", ["bamba", "falcon_h1", "granitemoehybrid"])
def test_sizes_that_a_class_derives_are_derived(family: str) -> None:
    """Heads of Mamba-2 share its width, whether the size is left out, null or "auto"."""
    config = {
        "model_type": family,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "mamba_n_heads": 8,
        "mamba_d_ssm": None,
        "mamba_expand": 2,
        "mamba_d_state": 16,
        "num_local_experts": 0,
    }
    derived = _count({**config, "mamba_d_head": 64})
    assert _count(config) == _count({**config, "mamba_d_head": None}) == derived
    assert _count({**config, "mamba_d_head": "auto"}) == derived


def test_the_heads_of_minicpm3_share_its_width() -> None:
    """Its published configuration does not state the size of its values."""
    config = {
        "model_type": "minicpm3",
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_hidden_layers": 62,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 73_448,
        "tie_word_embeddings": True,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
    }
    assert _count(config) == _count({**config, "v_head_dim": 64})


WRITTEN_OTHERWISE = {
    # transformers writes the size of heads of delta nets under a key of its own
    ("bailing_hybrid", "linear_head_dim"),
    # a list that the class makes, and always writes
    ("flint", "mlp_only_layers"),
    # the tie of the whole model decides from the fifth version on
    ("moss_transcribe_diarize", "transformers_version"),
    ("moss_transcribe_diarize", "tie_word_embeddings"),
}
"""Keys that files of these families always have."""


@pytest.mark.slow
def test_every_key_that_is_left_out_has_the_value_of_the_class() -> None:
    """No key of any causal family may go missing in silence: the count stays, or it is refused."""
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra: zoo)"
    )
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    silent: set[tuple[str, str]] = set()
    n_tried = 0
    for family in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - DECODERS_ALONE):
        try:
            config = transformers.CONFIG_MAPPING[family]().to_dict()
            stated = json.loads(json.dumps({**config, "model_type": family}, default=str))
            count = _count(stated)
        except Exception:
            # No defaults that belong together, or a family that is refused.
            continue
        for left_out in stated:
            shortened = {key: value for key, value in stated.items() if key != left_out}
            try:
                differs = _count(shortened) != count
            except PerfModelError:
                continue
            n_tried += 1
            if differs:
                silent.add((family, left_out))
    assert silent == WRITTEN_OTHERWISE
    assert n_tried > 3000
