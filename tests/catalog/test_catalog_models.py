import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.catalog import every_model, model, models
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import ConvNet, Mlp, Transformer
from perfmodel.spec.parts import Experts
from perfmodel.workload import parameter_count


def test_every_listed_model_loads_and_names_its_source():
    for name in models():
        found = model(name)
        assert found.name == name
        assert found.source


def test_names_ignore_case_and_have_aliases():
    assert model("GPT-175B") is model("gpt3-175b")
    assert model("Llama 2 70B") is model("llama2-70b")
    assert model("gpt-1008.0B") is model("gpt-1t")
    assert isinstance(model("VGG16"), ConvNet)
    assert isinstance(model("mlp-17b"), Mlp)


def names_of_models() -> list[str]:
    return [name for known in every_model() for name in (known.name, *known.aliases)]


@given(st.sampled_from(names_of_models()))
def test_a_hyphen_between_a_letter_and_a_number_is_optional(name: str) -> None:
    joined = re.sub(r"(?<=[A-Za-z])-(?=\d)", "", name)
    apart = re.sub(r"(?<=[A-Za-z])(?=\d)", "-", name)
    meant = model(name).name
    assert (model(joined).name, model(apart).name) == (meant, meant)


def test_a_hyphen_between_two_numbers_is_not_optional() -> None:
    assert model("gpt-3-6.7b").name == "gpt3-6.7b"
    with pytest.raises(UnknownNameError):
        model("gpt-36.7b")


PARAMETERS_OF_CONFIGS = {
    # as counted in the published checkpoints
    "roberta-base": 124_697_433,
    "xlm-roberta-large": 560_142_482,
    "distilbert-base": 66_985_530,
    "whisper-large-v3": 1_543_490_560,
    "dbrx": 131_596_523_520,
    "olmoe-1b-7b": 6_919_161_856,
    "vit-s-16": 22_050_664,
    "vit-ti-16": 5_717_416,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS_OF_CONFIGS.items())
def test_models_described_by_configurations_have_their_published_parameters(
    name: str, parameters: int
) -> None:
    assert parameter_count(model(name)) == parameters


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert", "mpnet", "ibert"])
def test_two_rows_of_roberta_s_positions_are_of_no_token(tmp_path: Path, family: str) -> None:
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 1000,
    }

    def read(model_type: str, rows: int) -> Transformer:
        path = tmp_path / f"{model_type}.json"
        path.write_text(
            json.dumps(sizes | {"model_type": model_type, "max_position_embeddings": rows})
        )
        return model(path)

    shifted, plain = read(family, 514), read("megatron-bert", 512)
    assert (shifted.seq_len, plain.seq_len) == (512, 512)
    token_types = 0 if family == "mpnet" else 2
    rows_more = 2 + token_types - 2
    assert parameter_count(shifted) == parameter_count(plain) + 64 * rows_more


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(UnknownNameError, match=r"unknown model 'llama3-7b'.*llama") as unknown:
        model("llama3-7b")
    # as a worker sends it
    assert str(pickle.loads(pickle.dumps(unknown.value))) == str(unknown.value)


PUBLISHED_NAMES = """
    mpt-125m mpt-70b gpt3-126M gpt3-5B llama2-7b deepseekv3 qwen3-235b-a22b t5-3b
    llama-like-80B maxtext-1024B gpt-28.3B bert-base-pretrain resnet50-v1.5 internlm-7B
    llama3.1-405B nemotron-22b kimi-k2
"""


def test_published_model_names_resolve():
    for name in PUBLISHED_NAMES.split():
        model(name)


MINIMAL = "layers = 2\nhidden = 64\nheads = 4\nvocab = 100\nseq_len = 16\n"


def test_what_follows_from_the_rest_may_be_left_out(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(MINIMAL)
    found = model(path)
    assert isinstance(found, Transformer)
    assert (found.name, found.kv_heads, found.head_dim, found.ffn_hidden) == ("tiny", 4, 16, 256)


def test_experts_come_from_a_nested_table(tmp_path):
    path = tmp_path / "moe.toml"
    path.write_text(MINIMAL + "[experts]\ncount = 8\ntopk = 2\nffn_hidden = 32\n")
    found = model(path)
    assert isinstance(found, Transformer)
    assert found.experts == Experts(count=8, topk=2, ffn_hidden=32)


def test_a_convolutional_network_comes_from_toml(tmp_path):
    path = tmp_path / "net.toml"
    path.write_text(
        'kind = "convnet"\n[[stack]]\nname = "c"\nop = "conv"\nc_in = 3\nsize_in = 8\nc_out = 4\nkernel = 3\n'
    )
    found = model(path)
    assert isinstance(found, ConvNet)
    assert found.stack[0].c_out == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL.replace("heads = 4\n", ""), r"heads: missing"),
        (MINIMAL + "head = 3\n", r"head: unknown key"),
        (MINIMAL + "kv_heads = 3\n", r"heads=4 must be a multiple of kv_heads=3"),
        (MINIMAL.replace("64", "'64'"), r"hidden: must be a whole number"),
        (MINIMAL.replace("layers = 2", "layers = -2"), r"layers=-2 must be a whole number from 1"),
        (MINIMAL + 'activation = "tanh"\n', r"activation: "),
        (
            MINIMAL + "[experts]\ncount = 8\ntop = 2\n",
            r"experts\.topk: missing; .*experts\.top: unknown key",
        ),
        ('kind = "rnn"\n', r"kind: must be transformer, mlp, convnet or unet"),
    ],
)
def test_a_bad_file_is_refused_with_all_its_faults(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(PerfModelError, match=message):
        model(path)


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("meta-llama/Llama-3.1-70B-Instruct", "llama3.1-70b"),
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
    ],
)
def test_an_id_of_hugging_face_names_the_entry(hub_id: str, name: str) -> None:
    assert model(hub_id) == model(name)


def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("torchrun train.py")
    with pytest.raises(
        PerfModelError, match=r"train.sh: not a model; give .* or a launch script with --from"
    ):
        model(str(script))


def test_an_unknown_id_is_refused_with_names_that_are_near() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown model 'meta-llama/Llama-9-8B'; did you mean"
    ):
        model("meta-llama/Llama-9-8B")
