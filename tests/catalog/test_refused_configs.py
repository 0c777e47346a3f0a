"""Configurations that strangers keep in public repositories: what is refused comes with a TOML to
complete, and a head that is not the counted one is named."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from mutations import mutations
from test_mutated_files import CONFIGS, LLAMA, MIXTRAL

from perfmodel.catalog import model, model_from_config
from perfmodel.errors import PerfModelError
from perfmodel.workload import parameter_count

BERT = {
    "model_type": "bert",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}
WITHOUT_FAMILY: dict[str, dict[str, Any]] = {
    "a GPT-2 of 2019": {"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12},
    "a DistilBERT of 2020": {"dim": 768, "hidden_dim": 3072, "n_heads": 12, "n_layers": 6},
    "the original LLaMA's parameters": {"dim": 768, "n_layers": 8, "n_heads": 16},
    "a program of one's own": {"num_hidden_layers": 4, "hidden_size": 768, "pad_token_id": 0},
    "sizes in a part": {"architecture": {"hidden_size": 768, "num_hidden_layers": 12}},
}
"""Files without `model_type`, each with a hidden size of 768."""
NO_MODELS = {
    "a classifier's thresholds": {"novelty_threshold": 0.99, "rule_version": "1.0"},
    "an LSTM": {"eng_vocab_size": 202, "lstm_units": 128, "embed_dim": 64},
    "a network of Keras": {"module": "keras.src.models", "class_name": "Functional"},
}


def _refusal(config: dict[str, Any]) -> PerfModelError:
    with pytest.raises(PerfModelError) as refused:
        model_from_config(config)
    return refused.value


def _toml(error: PerfModelError) -> dict[str, Any]:
    """What the TOML of an error states."""
    return tomllib.loads("".join(error.__notes__))


@pytest.mark.parametrize("name", WITHOUT_FAMILY)
def test_sizes_without_a_family_are_filled_in(name: str) -> None:
    error = _refusal(WITHOUT_FAMILY[name])
    assert "model_type: missing" in str(error)
    assert "--model mine.toml" in str(error)
    assert _toml(error)["hidden"] == 768


@pytest.mark.parametrize("name", NO_MODELS)
def test_what_describes_no_transformer_is_said_to(name: str) -> None:
    error = _refusal(NO_MODELS[name])
    assert "no size of a model is stated" in str(error)
    assert not hasattr(error, "__notes__")


def test_a_model_of_two_models_is_filled_in_from_its_decoder() -> None:
    error = _refusal(
        {
            "model_type": "vision-encoder-decoder",
            "encoder": {"model_type": "vit", "hidden_size": 384, "num_hidden_layers": 6},
            "decoder": {"model_type": "bart", "d_model": 512, "decoder_layers": 3},
        }
    )
    assert "it names two models" in str(error)
    assert _toml(error)["hidden"] == 512
    assert _toml(error)["layers"] == 3


@pytest.mark.parametrize("family", ["llama", "mixtral", "not-known"])
def test_every_refusal_has_a_toml_that_states_what_the_configuration_does(family: str) -> None:
    """Whatever one key holds: the other sizes are filled in, and the TOML can be read."""
    config = MIXTRAL | {"model_type": family} if family != "llama" else LLAMA
    refused = 0
    for change, changed in mutations(config):
        try:
            model_from_config(changed)
        except PerfModelError as error:
            refused += 1
            stated = _toml(error)
            if not change.startswith("hidden_size"):
                assert stated["hidden"] == LLAMA["hidden_size"], change
            assert all(stated[size] > 0 for size in ("layers", "hidden", "heads") if size in stated)
    assert refused > 20


def test_a_completed_toml_is_a_model(tmp_path: Path) -> None:
    lines = "".join(_refusal(MIXTRAL | {"model_type": "not-known"}).__notes__)
    path = tmp_path / "mine.toml"
    path.write_text(lines)
    known = model_from_config(MIXTRAL | {"model_type": "mixtral"})
    assert parameter_count(model(path)) == parameter_count(known)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("BertForQuestionAnswering", "job.head=token_labels"),
        ("BertForTokenClassification", "job.head=token_labels"),
        ("BertForSequenceClassification", "job.head=sequence_label"),
        ("BertModel", "BertModel has no head"),
        ("BertForMaskedLM", ""),
        ("BertForPreTraining", ""),
    ],
)
def test_a_class_with_another_head_is_named(name: str, said: str) -> None:
    plain = model_from_config(BERT)
    named = model_from_config(BERT | {"architectures": [name]})
    assert parameter_count(named) == parameter_count(plain)
    assert said in named.left_out
    assert bool(named.left_out) == bool(said)


def test_classes_of_decoders_that_end_in_model_have_a_head() -> None:
    assert model_from_config(LLAMA | {"architectures": ["OtherModel"]}).left_out == ""


@pytest.mark.parametrize("key", ["mlp_bias", "lm_head_bias", "mamba_proj_bias", "use_bias"])
def test_biases_that_are_not_counted_are_named(key: str) -> None:
    assert model_from_config(LLAMA | {key: False}).left_out == ""
    assert f"{key}=true is left out" in model_from_config(LLAMA | {key: True}).left_out


def test_biases_of_all_products_are_counted() -> None:
    """Granite's models of code (model_type llama) state both keys."""
    plain = model_from_config(LLAMA)
    biased = model_from_config(LLAMA | {"attention_bias": True, "mlp_bias": True})
    per_layer = (4 + 2 * 2) * 16 + 64 + 2 * 172 + 64
    assert parameter_count(biased) - parameter_count(plain) == 2 * per_layer
    assert biased.left_out == ""


def test_galactica_is_opt_without_biases_and_norm_parameters() -> None:
    opt = {
        "model_type": "opt",
        "hidden_size": 64,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "max_position_embeddings": 128,
    }
    plain = parameter_count(model_from_config(opt))
    biases, norms = 2 * (4 * 64 + 256 + 64), 5 * 2 * 64
    without = parameter_count(model_from_config(opt | {"enable_bias": False}))
    assert plain - without == biases
    bare = opt | {"enable_bias": False, "layer_norm_elementwise_affine": False}
    assert plain - parameter_count(model_from_config(bare)) == biases + norms
    headless = model_from_config(opt | {"_remove_final_layer_norm": True})
    assert plain - parameter_count(headless) == 2 * 64


def test_numbers_of_layers_with_experts_win_over_their_step() -> None:
    llama4 = MIXTRAL | {"model_type": "llama4_text", "interleave_moe_layer_step": 1}
    every_second = model_from_config(llama4 | {"interleave_moe_layer_step": 2})
    assert model_from_config(llama4 | {"moe_layers": [1]}).stack == every_second.stack
    all_layers = model_from_config(llama4 | {"moe_layers": [0, 1]})
    assert all_layers == model_from_config(llama4)


def test_large_models_of_rwkv_6_make_mixtures_through_more_elements() -> None:
    """llama.cpp's conversion, `Rwkv6Model`: twice as many at a hidden size of 4,096."""

    def of_mixing(hidden: int) -> int:
        config = {"model_type": "rwkv6", "hidden_size": hidden, "num_hidden_layers": 1}
        channels = 2 * hidden * (hidden * 7 // 2 // 32 * 32) + hidden * hidden + 2 * hidden
        tables, norms = 2 * 65_536 * hidden, 4 * 2 * hidden
        return parameter_count(model_from_config(config)) - channels - tables - norms

    for hidden, mix, decay in ((2048, 32, 64), (4096, 64, 128)):
        full = 5 * hidden * hidden
        narrow = 2 * 5 * mix * hidden + 2 * decay * hidden
        assert of_mixing(hidden) == full + narrow + 6 * hidden + 4 * hidden


def test_rwkv_7_is_the_same_under_the_names_of_its_own_class() -> None:
    sizes = {"model_type": "rwkv7", "hidden_size": 256, "num_hidden_layers": 2}
    ranks = {"decay_low_rank_dim": 32, "gate_low_rank_dim": 96, "a_low_rank_dim": 48}
    own_names = {"lora_rank_decay": 32, "lora_rank_gate": 96, "lora_rank_iclr": 48}
    one = sizes | ranks | {"v_low_rank_dim": 24, "head_dim": 32}
    other = sizes | own_names | {"lora_rank_value_residual_mix": 24, "head_size": 32}
    assert model_from_config(one) == model_from_config(other)
    assert parameter_count(model_from_config(one)) != parameter_count(model_from_config(sizes))


def test_ernie_3_embeds_tasks() -> None:
    ernie = BERT | {"model_type": "ernie"}
    with_tasks = ernie | {"use_task_id": True, "task_type_vocab_size": 3}
    plain, tasks = (parameter_count(model_from_config(c)) for c in (ernie, with_tasks))
    assert tasks - plain == 3 * 256


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1725\n")
    with pytest.raises(PerfModelError, match=r"a pointer of Git LFS, .*run git lfs pull"):
        model(path)


EXPERTS = {
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 64,
    "moe_num_experts": [0, 16],
    "ffn_config": {"moe_num_experts": 4},
    "moe": {"num_experts": 4},
}
LATENT = {"kv_lora_rank": 32}
PATTERNS = ("nemotron_h",)
"""Families whose patterns of letters say which layers have experts, if any."""


def _with_language_keys(config: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """The configuration with keys of its language model, which may stand in a part of it."""
    if "text_config" in config:
        return config | {"text_config": config["text_config"] | keys}
    return config | keys


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - set(PATTERNS)))
def test_parts_that_a_family_lacks_are_refused_and_not_dropped(family: str) -> None:
    """A configuration of a dense family that states experts describes another model than the
    family's class builds."""
    described = model_from_config(CONFIGS[family])
    n_refused = 0
    for key, value in (EXPERTS | LATENT).items():
        part = "latent_attention" if key in LATENT else "experts"
        if getattr(described, part) is not None:
            continue
        changed = _with_language_keys(CONFIGS[family], {key: value})
        with pytest.raises(PerfModelError) as refused:
            model_from_config(changed)
        assert refused.value.__notes__, key
        n_refused += 1
    assert n_refused or (described.experts and described.latent_attention)


@pytest.mark.parametrize("count", [0, 1, None, [0, 0], False])
def test_experts_of_which_there_is_one_or_none_are_no_experts(count: Any) -> None:
    plain = model_from_config(LLAMA)
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        assert model_from_config(LLAMA | {key: count}) == plain


def test_null_ranks_of_rwkv_7_are_those_that_its_layer_chooses() -> None:
    """Ranks that are null follow from the width (fla/layers/rwkv7.py), absent ones do not."""
    sizes = {"model_type": "rwkv7", "num_hidden_layers": 2}
    ranks = ("decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim")
    # Widths and sizes of heads: multiples of 32 nearest to 2.5, 5, 2.5 and 1.7 times the root of
    # the width; all but the gate's grow with the heads.
    by_width = {
        (1024, 64): (64, 160, 64, 64),
        (2048, 64): (128, 224, 128, 64),
        (2560, 64): (128, 256, 128, 96),
        (2048, 128): (224, 224, 224, 160),
        (64, 64): (32, 32, 32, 32),
    }
    for (hidden, head), of_width in by_width.items():
        config = sizes | {"hidden_size": hidden, "head_dim": head}
        by_layer = model_from_config(config | dict.fromkeys(ranks))
        assert by_layer == model_from_config(config | dict(zip(ranks, of_width, strict=True)))
        assert by_layer != model_from_config(config)


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_attention_of_zamba_sees_twice_the_hidden_size(family: str) -> None:
    config = CONFIGS[family]
    twice = 2 * config["hidden_size"]
    assert model_from_config(config | {"attention_hidden_size": twice}) == model_from_config(config)
    refusal = _refusal(config | {"attention_hidden_size": twice - 32})
    assert "is not twice the hidden size" in str(refusal)
