"""Published configurations of each family against published parameter counts."""

import json

import pytest

from perfmodel.catalog import model
from perfmodel.catalog._models import from_config
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.workload import parameter_count, parameters

LLAMA2_7B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "hidden_act": "silu",
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA32_1B = LLAMA2_7B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": True, "head_dim": 64,
}  # fmt: skip
MISTRAL = LLAMA2_7B | {"model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8,
                       "sliding_window": 4096}  # fmt: skip
MIXTRAL = MISTRAL | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2,
                     "sliding_window": None}  # fmt: skip
QWEN2_7B = LLAMA2_7B | {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
                        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
                        "vocab_size": 152064, "use_sliding_window": False, "sliding_window": 131072}  # fmt: skip
QWEN3_30B = LLAMA2_7B | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
                         "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
                         "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 129280, "q_lora_rank": 1536,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257}
NEOX = {"model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44,
        "intermediate_size": 24576, "vocab_size": 50432, "max_position_embeddings": 2048}  # fmt: skip
GPTJ = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "vocab_size": 50400}
OPT = {"model_type": "opt", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
       "ffn_dim": 3072, "vocab_size": 50272, "max_position_embeddings": 2048}  # fmt: skip
BLOOM = {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250880}
BERT = {"model_type": "bert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
        "intermediate_size": 3072, "vocab_size": 30522}  # fmt: skip
T5 = {
    "model_type": "t5",
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 32128,
}
MPT = {"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4,
       "vocab_size": 50432, "no_bias": True, "attn_config": {"alibi": True}}  # fmt: skip
FALCON = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
          "vocab_size": 65024, "multi_query": True, "bias": False}  # fmt: skip
FALCON_180B = {"model_type": "falcon", "hidden_size": 14848, "num_attention_heads": 232, "num_hidden_layers": 80,
               "num_kv_heads": 8, "vocab_size": 65024, "new_decoder_architecture": True}  # fmt: skip
PYTHIA = NEOX | {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "intermediate_size": 16384,
                 "use_parallel_residual": True}  # fmt: skip
PHI_2 = {"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32,
         "intermediate_size": 10240, "vocab_size": 51200, "hidden_act": "gelu_new"}  # fmt: skip
STABLELM = {"model_type": "stablelm", "hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32,
            "intermediate_size": 6912, "vocab_size": 50304, "num_key_value_heads": 32}  # fmt: skip
COMMAND_R = {"model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
             "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 256_000,
             "max_position_embeddings": 131_072}  # fmt: skip
AYA_8B = {"model_type": "cohere", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 256_000}  # fmt: skip

PUBLISHED = {
    "llama-2-7b": (LLAMA2_7B, 6_738_415_616, 0),
    "llama-3.2-1b": (LLAMA32_1B, 1_235_814_400, 0),
    "mistral-7b": (MISTRAL, 7_241_732_096, 0),
    "mixtral-8x7b": (MIXTRAL, 46_702_792_704, 0),
    "qwen2-7b": (QWEN2_7B, 7_615_616_512, 0),
    "qwen3-30b-a3b": (QWEN3_30B, 30_532_122_624, 0),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 15_706_484_224, 0),
    "deepseek-v3": (DEEPSEEK_V3, 671_026_419_200, 58 * 256),  # the router's balancing biases are not trained
    "gpt2": (GPT2, 124_439_808, 0),
    "gpt-neox-20b": (NEOX, 20_554_567_680, 0),
    "gpt-j-6b": (GPTJ, 6_050_882_784, 700_000),  # biases of feed-forward and head
    "opt-125m": (OPT, 125_239_296, 2 * 768),  # two unused positions
    "bloom-560m": (BLOOM, 559_214_592, 2 * 1024),  # norm after the embedding
    "bert-base": (BERT, 110_106_428, 0),
    "t5-small": (T5, 60_506_624, 0),
    "mpt-7b": (MPT, 6_649_286_656, 0),
    "falcon-7b": (FALCON, 6_921_720_704, 0),
    "falcon-180b": (FALCON_180B, 179_522_565_120 - 65024 * 14848, 0),  # less the head, which is not tied
    "pythia-6.9b": (PYTHIA, 6_857_302_016, 0),
    "phi-2": (PHI_2, 2_779_683_840, 51200),  # bias of the head
    "stablelm-3b-4e1t": (STABLELM, 2_795_443_200, 0),
    "command-r-v01": (COMMAND_R, 34_980_831_232, 0),
    "aya-expanse-8b": (AYA_8B, 8_028_033_024, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_a_published_configuration(tmp_path, name):
    config, published, left_out = PUBLISHED[name]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert abs(parameter_count(model(path)) - published) <= left_out
    assert model(tmp_path) == model(path)


@pytest.mark.parametrize(
    ("config", "blocks", "norms"),
    [
        (GPTJ, "one_norm", 1),
        (NEOX, "two_norms", 2),
        (NEOX | {"use_parallel_residual": False}, "none", 2),
        (FALCON, "one_norm", 1),
        (FALCON | {"parallel_attn": False}, "none", 2),
        (FALCON_180B, "two_norms", 2),
        (FALCON_180B | {"num_ln_in_parallel_attn": 1}, "one_norm", 1),  # Falcon 2 11B
        (PHI_2, "one_norm", 1),
        (STABLELM, "none", 2),
        (STABLELM | {"use_parallel_residual": True}, "one_norm", 1),
        (COMMAND_R, "one_norm", 1),
        (COMMAND_R | {"model_type": "cohere2"}, "one_norm", 1),
        (LLAMA2_7B, "none", 2),
    ],
)
def test_sub_layers_side_by_side_are_read(config, blocks, norms):
    """How they follow one another, and how many norms a layer has for that (the final one has as many parameters as
    each of them)."""
    net = from_config(config)
    assert net.parallel_blocks == blocks
    size = net.hidden * (1 if "cohere" in config["model_type"] or net.norm == "rms_norm" else 2)
    assert parameters(net).norms == (norms * net.layers + 1) * size


def test_command_r7b_attends_in_full_in_every_fourth_layer():
    assert from_config(AYA_8B | {"model_type": "cohere2"}).stack[:5] == ("W-", "W-", "W-", "*-", "W-")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", PerfModelError, "not valid JSON"),
        ("[]", PerfModelError, "must hold one JSON object"),
        ("{}", PerfModelError, "model_type: missing"),
        ('{"model_type": "lama"}', UnknownNameError, "did you mean .*'llama'"),
        ('{"model_type": "llama"}', PerfModelError, "model_type 'llama': hidden_size: missing; .*vocab_size: missing"),
    ],
)
def test_a_bad_configuration_is_refused(tmp_path, text, error, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(error, match=message):
        model(path)
