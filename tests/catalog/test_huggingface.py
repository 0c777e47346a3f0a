"""Published configurations of each family against published parameter counts."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfmodel.catalog import huggingface, model, model_from_config
from perfmodel.catalog.huggingface import RELATIVES, Relative
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.prediction import predict
from perfmodel.spec import Job
from perfmodel.workload import Shard, blocks, matmul_flops, parameter_count, parameters, step_flops

LLAMA2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
LLAMA32_1B = LLAMA2_7B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "head_dim": 64,
}
MISTRAL = LLAMA2_7B | {
    "model_type": "mistral",
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
MIXTRAL = MISTRAL | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN2_7B = LLAMA2_7B | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "use_sliding_window": False,
    "sliding_window": 131072,
}
QWEN3_30B = LLAMA2_7B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = DEEPSEEK_V2_LITE | {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "intermediate_size": 24576,
    "vocab_size": 50432,
    "max_position_embeddings": 2048,
}
GPTJ = {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "vocab_size": 50400}
OPT = {
    "model_type": "opt",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
}
OPT_350M = OPT | {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "ffn_dim": 4096,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
BIOGPT = {
    "model_type": "biogpt",
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "intermediate_size": 4096,
    "vocab_size": 42_384,
}
XGLM = {
    "model_type": "xglm",
    "d_model": 1024,
    "attention_heads": 16,
    "num_layers": 24,
    "ffn_dim": 4096,
    "vocab_size": 256_008,
}
BLOOM = {
    "model_type": "bloom",
    "n_embed": 1024,
    "n_layer": 24,
    "num_attention_heads": 16,
    "vocab_size": 250880,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
}
T5 = {
    "model_type": "t5",
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 32128,
}
MPT = {
    "model_type": "mpt",
    "d_model": 4096,
    "n_heads": 32,
    "n_layers": 32,
    "expansion_ratio": 4,
    "vocab_size": 50432,
    "no_bias": True,
    "attn_config": {"alibi": True},
}
FALCON = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "vocab_size": 65024,
    "multi_query": True,
    "bias": False,
}
FALCON_180B = {
    "model_type": "falcon",
    "hidden_size": 14848,
    "num_attention_heads": 232,
    "num_hidden_layers": 80,
    "num_kv_heads": 8,
    "vocab_size": 65024,
    "new_decoder_architecture": True,
}
PYTHIA = NEOX | {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 16384,
    "use_parallel_residual": True,
}
PHI_2 = {
    "model_type": "phi",
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 10240,
    "vocab_size": 51200,
    "hidden_act": "gelu_new",
}
STABLELM = {
    "model_type": "stablelm",
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "intermediate_size": 6912,
    "vocab_size": 50304,
    "num_key_value_heads": 32,
}
COMMAND_R = {
    "model_type": "cohere",
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "vocab_size": 256_000,
    "max_position_embeddings": 131_072,
}
AYA_8B = {
    "model_type": "cohere",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 256_000,
}

CHATGLM = {
    "model_type": "chatglm",
    "hidden_size": 4096,
    "ffn_hidden_size": 13_696,
    "num_layers": 28,
    "num_attention_heads": 32,
    "padded_vocab_size": 65_024,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "kv_channels": 128,
    "add_qkv_bias": True,
}
QWEN_7B = LLAMA2_7B | {"model_type": "qwen", "intermediate_size": 22_016, "vocab_size": 151_936}
REFINED_WEB = {
    "model_type": "RefinedWebModel",
    "hidden_size": 4544,
    "n_head": 71,
    "n_layer": 32,
    "vocab_size": 65_024,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
}
DBRX = {
    "model_type": "dbrx",
    "d_model": 6144,
    "n_heads": 48,
    "n_layers": 40,
    "vocab_size": 100_352,
    "max_seq_len": 32_768,
    "attn_config": {"kv_n_heads": 8, "clip_qkv": 8},
    "ffn_config": {"ffn_hidden_size": 10_752, "moe_num_experts": 16, "moe_top_k": 4},
}
ARCTIC = {
    "model_type": "arctic",
    "hidden_size": 7168,
    "intermediate_size": 4864,
    "num_hidden_layers": 35,
    "num_attention_heads": 56,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "num_local_experts": 128,
    "num_experts_per_tok": 2,
    "moe_layer_frequency": 1,
    "max_position_embeddings": 4096,
}
BART_BASE = {
    "model_type": "bart",
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "vocab_size": 50_265,
    "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_attention_heads": 12,
    "decoder_ffn_dim": 3072,
}
BART_LARGE = BART_BASE | {
    "d_model": 1024,
    "encoder_layers": 12,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
}
WHISPER_TINY = {
    "model_type": "whisper",
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "num_mel_bins": 80,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "vocab_size": 51_865,
}
WHISPER_LARGE_V3 = WHISPER_TINY | {
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "num_mel_bins": 128,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "vocab_size": 51_866,
}
GPT_NEO_1B = {
    "model_type": "gpt_neo",
    "hidden_size": 2048,
    "num_layers": 24,
    "num_heads": 16,
    "vocab_size": 50_257,
}

PUBLISHED = {
    "llama-2-7b": (LLAMA2_7B, 6_738_415_616, 0),
    "llama-3.2-1b": (LLAMA32_1B, 1_235_814_400, 0),
    "mistral-7b": (MISTRAL, 7_241_732_096, 0),
    "mixtral-8x7b": (MIXTRAL, 46_702_792_704, 0),
    "qwen2-7b": (QWEN2_7B, 7_615_616_512, 0),
    "qwen3-30b-a3b": (QWEN3_30B, 30_532_122_624, 0),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 15_706_484_224, 0),
    # the router's balancing biases are not trained
    "deepseek-v3": (
        DEEPSEEK_V3,
        671_026_419_200,
        58 * 256,
    ),
    "gpt2": (GPT2, 124_439_808, 0),
    "gpt-neox-20b": (NEOX, 20_554_567_680, 0),
    "gpt-j-6b": (GPTJ, 6_050_882_784, 700_000),  # biases of feed-forward and head
    "opt-125m": (OPT, 125_239_296, 0),
    "opt-350m": (OPT_350M, 331_196_416, 0),
    # 42,384 rows of tokens and 1,026 of positions, and for XGLM 256,008 of tokens alone; then 24
    # layers of 12 x 1,024^2 + 13 x 1,024 each, and a norm (`BioGptModel`, `XGLMModel`)
    "biogpt": (BIOGPT, 346_763_264, 0),
    "xglm-564m": (XGLM, 564_463_616, 0),
    "bloom-560m": (BLOOM, 559_214_592, 0),
    "bert-base": (BERT, 110_106_428, 0),
    "bart-base": (BART_BASE, 139_420_416, 0),
    "bart-large": (BART_LARGE, 406_291_456, 0),
    "mbart-large-cc25": (
        BART_LARGE | {"model_type": "mbart", "vocab_size": 250_027},
        610_851_840,
        0,
    ),
    "whisper-tiny": (WHISPER_TINY, 37_760_640, 0),
    "whisper-large-v3": (WHISPER_LARGE_V3, 1_543_490_560, 0),
    "gpt-neo-1.3b": (GPT_NEO_1B, 1_315_575_808, 0),
    "t5-small": (T5, 60_506_624, 0),
    "mpt-7b": (MPT, 6_649_286_656, 0),
    "falcon-7b": (FALCON, 6_921_720_704, 0),
    # less the head, which is not tied
    "falcon-180b": (
        FALCON_180B,
        179_522_565_120 - 65024 * 14848,
        0,
    ),
    "pythia-6.9b": (PYTHIA, 6_857_302_016, 0),
    "phi-2": (PHI_2, 2_779_683_840, 51200),  # bias of the head
    "stablelm-3b-4e1t": (STABLELM, 2_795_443_200, 0),
    "command-r-v01": (COMMAND_R, 34_980_831_232, 0),
    "chatglm3-6b": (CHATGLM, 6_243_584_000, 0),
    "qwen-7b": (QWEN_7B, 7_721_324_544, 0),
    "falcon-7b-of-2023": (REFINED_WEB, 6_921_720_704, 0),
    "dbrx": (DBRX, 131_596_523_520, 0),
    # 480 B, of which 10 B are dense and 128 x 3.66 B experts, as its authors round them
    "arctic": (ARCTIC, 479_000_000_000, 500_000_000),
    "aya-expanse-8b": (AYA_8B, 8_028_033_024, 0),
}


FAMILY_COUNTS = json.loads((Path(__file__).parent / "huggingface_parameters.json").read_text())
"""By `model_type`, a configuration and the parameters of the model that transformers 5.24 builds
from it."""
NOT_COUNTED = {
    "afmoe": 7 * 64,  # biases that balance experts, which are not trained
    "apertus": 8 * 2,  # parameters of the activation
    "axk1": 3 * 7168,  # norms of what experts give
    "beam": 5 * 48,  # biases of attention's gates
    # its masked-LM class has no head that tells whether sentences follow one another
    "big_bird": -(2 * 768 + 2),
    "ctrl": 246_534,  # bias of the head
    "gte": 12 * 2 * 768,  # biases of what attention and feed-forward give
    "marian": 2 * 1024 * 1024,  # positions, which are not trained
    "modernbert": -768,  # the first layer has no norm
    "mpnet": 32 * 12,  # relative positions
    "pegasus": 2 * 1024 * 1024,  # positions, which are not trained
    "bert": -(768 * 768 + 768 + 2 * 768 + 2),  # its masked-LM class has no pooler
    "codegen": 214_240,  # biases of feed-forward and head, as of GPT-J
    "gptj": 214_240,
    "laguna": 7 * 32,  # biases that balance experts, which are not trained
    "ernie4_5_moe": 7 * 64,  # biases that balance experts, which are not trained
    "esm": 33 * 20 + 1,  # the head that tells contacts of attention's weights
    "modernbert-decoder": -768,  # the first layer has no norm
    "roformer": 1536 * 64,  # sines of positions, which are not trained
    "longcat_flash": 3
    * 4
    * 2
    * 32
    * 64,  # two of the matrices of experts that compute nothing, which are not used
    "molmo2": 128 * 4096,  # embeddings of tokens for images
    "phi": 51_200,  # bias of the head
    "umt5": (2 * 8 - 2) * 32 * 6,  # relative positions of its own in every layer
}
"""Parameters that a family has and we do not count, in the fixture's sizes."""
WITH_PARTS_LEFT_OUT = ("gemma3",)


@pytest.mark.parametrize("family", FAMILY_COUNTS)
def test_every_family_has_the_parameters_of_its_own_class(family):
    """Modules for further tokens apart, which the classes leave away though configurations tell of
    them."""
    net = model_from_config(FAMILY_COUNTS[family]["config"])
    counted, published = parameters(net), FAMILY_COUNTS[family]["parameters"]
    if family in WITH_PARTS_LEFT_OUT:
        assert net.left_out
        assert 0.95 * published < counted.total - counted.further_tokens < published
    else:
        assert counted.total - counted.further_tokens == published - NOT_COUNTED.get(family, 0)


@pytest.mark.parametrize(
    "family", sorted({"kimi_k2", "mistral3", "qwen2_5_vl", "qwen3_vl_moe", "yi"})
)
def test_a_family_under_another_name_is_the_known_one(family):
    relative = RELATIVES.get(family, Relative(family="mistral"))
    config = dict(FAMILY_COUNTS.get(relative.family, FAMILY_COUNTS["mistral"])["config"])
    known = model_from_config(config)
    renamed = model_from_config(
        config | {"model_type": family}
        if family in RELATIVES
        else {"model_type": family, "text_config": config}
    )
    assert replace(renamed, name=known.name, source=known.source) == known


@pytest.mark.parametrize("inside", [True, False, None])
@pytest.mark.parametrize("outside", [True, False, None])
@pytest.mark.parametrize(
    ("whole", "text", "has_old_files"), [("internvl", "qwen2", False), ("llava", "llama", True)]
)
def test_the_whole_model_says_whether_its_head_is_tied(
    whole: str, text: str, has_old_files: bool, outside: bool | None, inside: bool | None
):
    """Since transformers 5. Where it says nothing its language model does; some families have
    always said it there."""
    config = {
        key: value
        for key, value in FAMILY_COUNTS[text]["config"].items()
        if key != "tie_word_embeddings"
    }
    stated = {} if inside is None else {"tie_word_embeddings": inside}
    outer = {} if outside is None else {"tie_word_embeddings": outside}
    whole_config = {
        "model_type": whole,
        "transformers_version": "5.2.0",
        "text_config": config | stated,
    } | outer
    net = model_from_config(whole_config)
    tied = outside if outside is not None else bool(inside)
    assert net.head.tied_embeddings == (tied or (has_old_files and inside is True))


HELD_BY_RANKS = (
    "afmoe",
    "bailing_hybrid",
    "cohere2_moe",
    "gemma4",
    "kimi_linear",
    "laguna",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mimo_v2_flash",
    "minicpm3",
    "step3p5",
)


@pytest.mark.parametrize("family", HELD_BY_RANKS)
def test_ranks_hold_what_a_family_has(family):
    """Blocks have all parameters, and products are shared out over ranks of tensor parallelism."""
    net = replace(
        model_from_config(FAMILY_COUNTS[family]["config"]), seq_len=1024, longest_seq_len=0
    )
    job = Job(global_batch=1, seq_len=1024)
    held = sum(block.params * n for block, n in blocks(net, job, Shard()))
    assert held == pytest.approx(parameters(replace(net, seq_len=1024)).total, rel=2e-3)
    whole = sum(matmul_flops(block.forward) * n for block, n in blocks(net, job, Shard()))
    half = sum(matmul_flops(block.forward) * n for block, n in blocks(net, job, Shard(tp=2)))
    assert half < 0.6 * whole


WITH_PARTS_BESIDE_LAYERS = {
    family: FAMILY_COUNTS[family]["config"]
    for family in (
        "albert",
        "bart",
        "bloom",
        "esm",
        "gpt_neo",
        "mbart",
        "nomic_bert",
        "openai-gpt",
        "opt",
        "pegasus",
        "roformer",
        "whisper",
    )
} | {
    "opt-350m": OPT_350M,
    "electra-small": FAMILY_COUNTS["electra"]["config"] | {"embedding_size": 128},
}


@pytest.mark.parametrize("family", WITH_PARTS_BESIDE_LAYERS)
def test_blocks_are_those_of_the_counted_parameters_and_products(family):
    """Whatever a family has beside its layers: offsets of positions, norms at the ends,
    convolutions of sound."""
    # Rows that ranks of tensor parallelism pad the vocabulary with are no parameters of the model.
    # An operation counts a sliding window as a full rectangle, hence none.
    net = replace(
        model_from_config(WITH_PARTS_BESIDE_LAYERS[family]), vocab=1024, window=0, mixers=""
    )
    job = Job(global_batch=1, seq_len=net.seq_len)
    layers = blocks(net, job, Shard())
    assert sum(block.params * n for block, n in layers) == parameters(net).total
    products = sum(matmul_flops(block.forward) * n for block, n in layers)
    assert products == pytest.approx(step_flops(net, job).total_causal / 3, rel=1e-9)


def test_a_spectrogram_is_read_by_an_encoder_alone():
    net = model_from_config(WHISPER_TINY)
    with pytest.raises(PerfModelError, match="spectrogram needs decoder_layers"):
        replace(net, decoder_layers=0)
    # Words are the decoder's input: its block has their table, which the encoder's has not.
    encoder, _, decoder, *_ = (
        block for block, _ in blocks(net, Job(global_batch=1, seq_len=1500), Shard())
    )
    assert encoder.params < net.vocab * net.hidden <= decoder.params
    assert decoder.tied_params == 0


@pytest.mark.parametrize("width", [64, 128])
def test_narrow_embeddings_are_projected_to_the_layers(width):
    """ELECTRA's small models: every table, the norm behind them, and what the head compares with
    are narrow."""
    config = FAMILY_COUNTS["electra"]["config"]
    wide, narrow = model_from_config(config), model_from_config(config | {"embedding_size": width})
    hidden = wide.hidden
    # `ElectraEmbeddings`: rows of tokens, positions and segments, and a norm of a scale and a shift
    # each.
    rows = wide.vocab + wide.seq_len + wide.inputs.token_types + 2
    # `embeddings_project`, and instead of [hidden, hidden] with its bias the dense layer and norm
    # of `ElectraGeneratorPredictions`.
    projection = (width + 1) * hidden
    head = (hidden + 3) * (hidden - width)
    assert (
        parameter_count(narrow)
        == parameter_count(wide) - rows * (hidden - width) + projection - head
    )


def test_parts_that_do_not_go_with_narrow_embeddings_are_refused():
    opt = model_from_config(OPT_350M)
    with pytest.raises(PerfModelError, match="narrow_embedding cannot be combined with"):
        replace(opt, mtp_layers=1)


def test_mixers_side_by_side_have_one_norm():
    """Falcon-H1: the norm of Mamba, which attention's serves too, and the addition behind it are
    not there."""
    together = model_from_config(FAMILY_COUNTS["falcon_h1"]["config"])
    apart = replace(together, parallel_mixers=False)
    assert parameter_count(apart) - parameter_count(together) == together.layers * together.hidden
    job = Job(global_batch=1, seq_len=1024)
    for tp in (1, 2):
        shard = Shard(tp=tp) if tp == 1 else Shard(tp=tp, sequence_parallel=True)
        if tp > 1:  # the groups of its mixers cannot be divided
            together, apart = (
                replace(net, mamba=replace(net.hybrid.mamba, groups=2)) for net in (together, apart)
            )
        layers = [blocks(net, job, shard)[1][0] for net in (together, apart)]
        assert layers[0].params < layers[1].params
        assert matmul_flops(layers[0].forward) == matmul_flops(layers[1].forward)
        assert len(layers[0].forward) < len(layers[1].forward)
    with pytest.raises(PerfModelError, match="parallel_mixers needs every M"):
        replace(together, mixers="M*- ")


def test_the_first_notation_of_lfm2_is_read_as_the_second():
    """`block_ff_dim` is the size of the feed-forward, and `full_attn_idxs` numbers attentions."""
    config = FAMILY_COUNTS["lfm2"]["config"]
    kinds = config["layer_types"]
    first = {key: config[key] for key in config if key not in ("intermediate_size", "layer_types")}
    first |= {
        "block_ff_dim": config["intermediate_size"],
        "full_attn_idxs": [i for i, kind in enumerate(kinds) if kind == "full_attention"],
    }
    assert model_from_config(first).layer_groups == model_from_config(config).layer_groups
    assert parameter_count(model_from_config(first)) == FAMILY_COUNTS["lfm2"]["parameters"]


def test_a_layer_of_an_unknown_kind_is_refused():
    config = FAMILY_COUNTS["lfm2"]["config"] | {"layer_types": ["conv", "retention"] * 4}
    with pytest.raises(PerfModelError, match="layer_types must be 8 of conv, full_attention"):
        model_from_config(config)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "qwen3_moe"])
def test_toml_of_an_unknown_family_has_its_experts(family, tmp_path):
    config = FAMILY_COUNTS[family]["config"]
    with pytest.raises(UnknownNameError) as error:
        model_from_config(config | {"model_type": "zzz"})
    path = tmp_path / "mine.toml"
    path.write_text(error.value.__notes__[0])
    known, begun = model_from_config(config), model(path)
    assert (begun.experts.count, begun.experts.topk) == (known.experts.count, known.experts.topk)
    assert begun.experts.ffn_hidden == known.experts.ffn_hidden
    assert begun.latent_attention == known.latent_attention


@pytest.mark.parametrize(
    "key", ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"]
)
def test_experts_are_found_under_every_name_for_their_number(key):
    config = FAMILY_COUNTS["olmoe"]["config"]
    renamed = {name: value for name, value in config.items() if name != "num_experts"} | {key: 64}
    assert model_from_config(renamed) == model_from_config(config)


def test_lists_of_layers_say_the_same_as_rules():
    """Dense layers first, a window in all but every fourth: spelled as lists or as numbers."""
    plain = MIXTRAL | {
        "model_type": "exaone_moe",
        "num_hidden_layers": 8,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 64,
        "sliding_window": 128,
    }
    by_lists = plain | {
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
        "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
    }
    net = model_from_config(by_lists)
    assert net.stack == ("W-", "W-", "WE", "*E", "WE", "WE", "WE", "*E")
    assert net.hybrid.mixers == ""
    assert net.attention.full_attention_every == 4
    irregular = by_lists | {"mlp_layer_types": ["sparse", "dense"] * 4}
    assert model_from_config(irregular).stack == ("WE", "W-", "WE", "*-", "WE", "W-", "WE", "*-")
    assert model_from_config(plain | {"mlp_only_layers": [1]}).stack[:3] == ("WE", "W-", "WE")
    assert (
        model_from_config(
            plain | {"moe_layer_freq": [0, 0, 1, 1, 1, 1, 1, 1]}
        ).experts.first_dense_layers
        == 2
    )
    with pytest.raises(
        PerfModelError, match="layer_types must have an entry for each of 8 layers, got 2"
    ):
        model_from_config(plain | {"layer_types": ["full_attention"] * 2})


def test_a_selective_scan_is_shared_out_by_channels():
    net = model_from_config(FAMILY_COUNTS["mamba"]["config"])
    job = Job(global_batch=1, seq_len=2048)
    whole, half = (blocks(net, job, Shard(tp=tp))[1][0] for tp in (1, 2))
    scans = [
        next(op for op, _ in block.forward if getattr(op, "op", "") == "selective_scan")
        for block in (whole, half)
    ]
    assert 1.9 < scans[0].bytes_per_token / scans[1].bytes_per_token <= 2
    assert step_flops(net, job).forward == pytest.approx(
        sum(n * matmul_flops(block.forward) for block, n in blocks(net, job, Shard())), rel=1e-3
    )


@pytest.mark.parametrize(
    "vision",
    [
        {
            "vision_config": {
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 24,
                "patch_size": 14,
                "image_size": 336,
            }
        },
        {"audio_config": {"d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120}},
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_towers_beside_the_language_model_are_told(vision, nested):
    text = FAMILY_COUNTS["qwen2"]["config"]
    config = (
        {"model_type": "qwen2_5_vl", "text_config": text}
        if nested
        else text | {"model_type": "qwen2_5_vl"}
    )
    net = model_from_config(config | vision)
    size = r"0\.30" if "vision_config" in vision else r"0\.63"
    assert re.search(
        rf"the \w+ tower of about {size} B parameters is left out; only the language model is counted",
        net.left_out,
    )
    warnings = predict(net, "dgx-h100", "dp=8,zero=3", global_batch=8).warnings
    assert any("left out" in warning for warning in warnings)


LONGCAT_FLASH = {
    "model_type": "longcat_flash",
    "hidden_size": 6144,
    "num_layers": 28,
    "num_attention_heads": 64,
    "ffn_hidden_size": 12_288,
    "vocab_size": 131_072,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "moe_topk": 12,
    "expert_ffn_hidden_size": 2048,
}


def test_layers_of_longcat_have_two_attentions_and_experts_beside():
    """Parameters by the shapes of transformers models/longcat_flash/modeling_longcat_flash.py,
    where experts that do nothing have rows of the router alone. Its card says 560 billion."""
    net = model_from_config(LONGCAT_FLASH)
    hidden = 6144
    queries = hidden * 1536 + 1536 + 1536 * 64 * (128 + 64)
    keys_and_values = hidden * (512 + 64) + 512 + 512 * 64 * (128 + 128)
    attention = queries + keys_and_values + 64 * 128 * hidden
    dense = 3 * hidden * 12_288
    experts = 512 * 3 * hidden * 2048 + 512 * hidden
    layer = 2 * attention + 2 * dense + experts + 4 * hidden + 256 * hidden
    assert parameters(net).total == 28 * layer + hidden + 2 * 131_072 * hidden
    assert parameters(net).total == pytest.approx(560e9, rel=3e-3)
    # Of twelve choices among 768, eight fall on experts that compute.
    assert net.experts is not None
    assert (net.experts.topk, net.experts.idle) == (8, 256)


@pytest.mark.parametrize("further", [{}, {"num_hidden_layers": 56}])
def test_layers_of_longcat_are_counted_once(further: dict[str, int]) -> None:
    """transformers' class makes `num_hidden_layers` twice `num_layers`, for the cache of both
    attentions."""
    assert model_from_config(LONGCAT_FLASH | further).layers == 28


DEBERTA = {
    "model_type": "deberta-v2",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 40,
}
SHARED = {"relative_attention": True, "position_biased_input": False, "share_att_key": True}


@pytest.mark.parametrize(
    ("stated", "published"),
    [
        ({}, 160_008),
        ({"position_biased_input": False}, 157_448),
        ({"relative_attention": True}, 165_128),
        (
            {
                **SHARED,
                "max_relative_positions": 50,
                "norm_rel_ebd": "layer_norm",
                "pos_att_type": "c2p|p2c",
            },
            163_976,
        ),
        ({**SHARED, "position_buckets": 8, "pos_att_type": ["c2p"]}, 158_472),
    ],
)
def test_tables_of_distances_of_deberta(stated: dict[str, Any], published: int) -> None:
    """Parameters of transformers' `DebertaV2ForMaskedLM` (5.24) of these sizes."""
    net = model_from_config(DEBERTA | stated)
    assert parameters(net).total == published
    assert "disentangled attention" in net.left_out


def test_other_parts_of_deberta_are_named() -> None:
    assert "convolution" in model_from_config(DEBERTA | {"conv_kernel_size": 3}).left_out


@pytest.mark.parametrize("layers", [1, 4])
def test_each_further_attention_of_a_layer_adds_products(layers):
    """Two attentions and two feed-forwards a layer are twice those of a layer with one each."""
    net = model_from_config(LONGCAT_FLASH | {"num_layers": layers})
    single = replace(net, mixers="*-E ")
    counted, halved = parameters(net), parameters(single)
    assert (counted.attention, counted.feed_forward) == (
        2 * halved.attention,
        2 * halved.feed_forward,
    )
    assert (counted.experts, counted.router) == (halved.experts, halved.router)


@pytest.mark.parametrize("family", sorted(FAMILY_COUNTS))
def test_a_family_that_is_not_known_is_written_as_toml(family, tmp_path):
    """Whatever its keys are called: of LLaMA's sizes nothing is asked again, and the text is a
    model that loads."""
    config = FAMILY_COUNTS[family]["config"]
    with pytest.raises(
        UnknownNameError, match=r"model_type 'zzz'.* complete the TOML below"
    ) as error:
        model_from_config(
            {key: value for key, value in config.items() if key != "text_config"}
            | {"model_type": "zzz"}
        )
    (toml,) = error.value.__notes__
    path = tmp_path / "mine.toml"
    path.write_text(toml)
    sizes = {
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
    }
    if config.keys() >= sizes | {"max_position_embeddings"}:
        assert model(path).hidden == config["hidden_size"]
    else:
        assert "# " in toml


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
    """How they follow one another, and how many norms a layer has for that (the final one has as
    many parameters as each of them)."""
    net = model_from_config(config)
    assert net.block.parallel_blocks == blocks
    size = net.hidden * (
        1 if "cohere" in config["model_type"] or net.norms.norm == "rms_norm" else 2
    )
    assert parameters(net).norms == (norms * net.layers + 1) * size


def test_command_r7b_attends_in_full_in_every_fourth_layer():
    assert model_from_config(AYA_8B | {"model_type": "cohere2"}).stack[:5] == (
        "W-",
        "W-",
        "W-",
        "*-",
        "W-",
    )


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", PerfModelError, "not valid JSON"),
        ("[]", PerfModelError, "must hold one JSON object"),
        ("{}", PerfModelError, "model_type: missing"),
        ('{"model_type": "lama"}', UnknownNameError, "did you mean .*'llama'"),
        (
            '{"model_type": "llama"}',
            PerfModelError,
            "model_type 'llama': hidden_size: missing; .*vocab_size: missing",
        ),
    ],
)
def test_a_bad_configuration_is_refused(tmp_path, text, error, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(error, match=message):
        model(path)


@pytest.mark.parametrize("groups", [1, 2, 12])
def test_layers_of_albert_share_weights_and_not_work(groups: int) -> None:
    config = FAMILY_COUNTS["albert"]["config"]
    net = model_from_config(config | {"num_hidden_groups": groups})
    plain = replace(net, layer_groups=0)
    # A layer: four products of attention and two of the feed-forward, with biases and two norms.
    h, inner = net.hidden, net.ffn_hidden
    layer = 4 * (h * h + h) + 2 * h * inner + inner + h + 4 * h
    assert parameter_count(plain) - parameter_count(net) == (net.layers - groups) * layer
    job = Job(global_batch=8, seq_len=512)
    assert step_flops(net, job) == step_flops(plain, job)
    both = [predict(model, "dgx-a100", "dp=8", global_batch=8) for model in (net, plain)]
    assert both[0].memory.weights < both[1].memory.weights or groups == net.layers


def test_groups_of_layers_are_of_one_kind() -> None:
    net = model_from_config(FAMILY_COUNTS["albert"]["config"])
    with pytest.raises(PerfModelError, match="layer_groups=13 must be at most layers=12"):
        replace(net, layer_groups=13)
    with pytest.raises(PerfModelError, match="inner_group_num must be 1"):
        model_from_config(FAMILY_COUNTS["albert"]["config"] | {"inner_group_num": 2})


TABLES_BESIDE_LAYERS = (
    "bert",
    "bloom",
    "distilbert",
    "electra",
    "falcon",
    "gpt_neo",
    "modernbert",
    "mpt",
    "phi",
    "t5",
)


@pytest.mark.parametrize("family", TABLES_BESIDE_LAYERS)
def test_a_head_that_shares_no_table_is_one_more(family: str) -> None:
    """Whether families name the key or leave it out: what a configuration says of its head is
    obeyed."""
    config = FAMILY_COUNTS[family]["config"]
    tied, untied = (
        model_from_config({**config, "tie_word_embeddings": value}) for value in (True, False)
    )
    narrow = tied.inputs.narrow_embedding
    width = narrow.width if narrow else tied.hidden
    assert parameter_count(untied) - parameter_count(tied) == tied.vocab * width


@pytest.mark.parametrize("stated_by_text", [True, False, None])
@pytest.mark.parametrize("stated_by_all", [True, False, None])
def test_before_that_the_language_model_says_first_whether_its_head_is_tied(
    stated_by_text: bool | None, stated_by_all: bool | None
) -> None:
    text = {key: value for key, value in LLAMA2_7B.items() if key != "tie_word_embeddings"}
    read = model_from_config(
        {
            "model_type": "llava",
            "text_config": {**text, "tie_word_embeddings": stated_by_text},
            "tie_word_embeddings": stated_by_all,
        }
    )
    first_stated = next(
        (tied for tied in (stated_by_text, stated_by_all) if tied is not None), False
    )
    assert read.head.tied_embeddings == first_stated


@pytest.mark.parametrize("family", ["jais2", "nomic_bert", "phi", "starcoder2"])
def test_heads_need_not_share_the_hidden_size_out(family: str) -> None:
    config = FAMILY_COUNTS[family]["config"]
    usual = model_from_config({**config, "head_dim": None})
    assert (
        model_from_config({**config, "head_dim": 2 * usual.head_dim}).head_dim == 2 * usual.head_dim
    )


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("end", [-1, 3, 5])
@pytest.mark.parametrize("start", [0, 1, 4])
def test_experts_between_two_layers(start: int, end: int, interval: int) -> None:
    """The rule of transformers models/ernie4_5_moe/modeling_ernie4_5_moe.py
    `Ernie4_5_MoeDecoderLayer`."""
    config = FAMILY_COUNTS["ernie4_5_moe"]["config"]
    layers = config["num_hidden_layers"]
    read = model_from_config(
        {
            **config,
            "moe_layer_start_index": start,
            "moe_layer_end_index": end,
            "moe_layer_interval": interval,
        }
    )
    last = layers - 1 if end == -1 else end
    expected = [
        "E" if (i + 1) % interval == 0 and start <= i <= last else "-" for i in range(layers)
    ]
    assert [sublayers[1] for sublayers in read.stack] == expected


TEXT_PARTS = {
    # Without a head: the parameters of the classes of transformers 5.24 for these texts.
    "granite_docling": (
        LLAMA2_7B
        | {
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 133_800,
            "tie_word_embeddings": True,
        },
        386_630_656,
    ),
    "glm_ocr": (
        LLAMA2_7B
        | {
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "vocab_size": 59_392,
            "tie_word_embeddings": True,
        },
        312_542_208,
    ),
}
"""Language models of files that see, with the configuration of their part and its parameters."""


@pytest.mark.parametrize("family", TEXT_PARTS)
def test_language_models_of_files_that_see(family: str) -> None:
    text, published = TEXT_PARTS[family]
    read = model_from_config(
        {"model_type": family, "text_config": text | {"model_type": f"{family}_text"}}
    )
    assert parameter_count(read) == published


def test_layers_that_attend_to_images_are_named() -> None:
    """Llama 3.2 Vision: 8 of 40 layers attend to the image; their sizes are those of the others but
    for a few norms."""
    text = LLAMA2_7B | {
        "model_type": "mllama_text_model",
        "num_hidden_layers": 40,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    }
    read = model_from_config({"model_type": "mllama", "text_config": text})
    assert "attending to the text" in read.left_out
    assert read.layers == 40


TEXT_CLASSES = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)
OF_PARTS = (
    "audio",
    "speech",
    "asr",
    "voxtral",
    "musicflamingo",
    "moss_transcribe",
    "got_ocr2",
    "vbert",
    "neomme",
)
"""Parts of the names of models of several parts, whose language model is read by its own family."""


@pytest.mark.parametrize("classes", TEXT_CLASSES)
def test_every_family_of_transformers_is_read_or_says_what_it_lacks(classes: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (extra: zoo)")
    from transformers.models.auto import modeling_auto

    unnamed = []
    for family in getattr(modeling_auto, classes):
        known = huggingface.known_family(family)
        if known in huggingface.FAMILIES or known in huggingface.RELATIVES:
            continue
        error = huggingface.unknown_model_type(
            family, (), {"num_hidden_layers": 2, "hidden_size": 64}
        )
        is_named = "cannot be described exactly: " in str(error)
        assert any("hidden = 64" in note for note in error.__notes__)
        if not is_named and not any(part in family for part in OF_PARTS):
            unnamed.append(family)
    assert unnamed == []


@pytest.mark.parametrize(
    "family",
    [
        "qwen4_exp",
        "recurrent_gemma",
        "switch_transformers",
        "xlnet",
    ],
)
def test_a_family_that_cannot_be_described_says_why_in_one_line(family: str) -> None:
    with pytest.raises(
        PerfModelError, match=r"cannot be described exactly: .*add_a_model"
    ) as refusal:
        model_from_config({"model_type": family, "hidden_size": 512, "num_hidden_layers": 4})
    assert "\n" not in str(refusal.value)
    assert any("hidden = 512" in note for note in refusal.value.__notes__)


@pytest.mark.parametrize("family", ["gemma4_assistant", "gemma4_unified_assistant"])
def test_a_drafter_is_not_the_model_that_it_names(family: str) -> None:
    text = FAMILY_COUNTS["gemma4_unified"]["config"]
    with pytest.raises(PerfModelError, match="cannot be described exactly: "):
        model_from_config({"model_type": family, "text_config": text})


OTHER_NAMES = {
    "gemma4": {"per_layer_config": None, "global_head_dim": 512, "num_global_key_value_heads": 2},
    "kimi_linear": {
        "layer_types": None,
        "mlp_layer_types": None,
        "linear_attn_config": {
            "full_attn_layers": [5],
            "kda_layers": [1, 2, 3, 4, 6, 7, 8],
            "num_heads": 32,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
    "mimo_v2_flash": {
        "layer_types": None,
        "mlp_layer_types": None,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0],
        "moe_layer_freq": [0] + [1] * 11,
        "swa_num_key_value_heads": 8,
        "sliding_window": None,
        "sliding_window_size": 128,
    },
    "step3p5": {
        "num_sliding_attention_heads": None,
        "mlp_layer_types": None,
        "moe_layers_enum": "3,4,5,6,7",
        "attention_other_setting": {
            "num_attention_heads": 96,
            "num_attention_groups": 8,
            "head_dim": 128,
        },
    },
}
"""Keys that the authors' own configurations have in place of those that transformers writes."""


@pytest.mark.parametrize("family", OTHER_NAMES)
def test_keys_of_the_authors_mean_what_those_of_transformers_mean(family: str) -> None:
    config = FAMILY_COUNTS[family]["config"]
    assert model_from_config(config | OTHER_NAMES[family]) == model_from_config(config)


@pytest.mark.parametrize(
    ("family", "changed", "lacks"),
    [
        (
            "laguna",
            {"num_attention_heads_per_layer": [48, 64, 64, 48] * 2},
            "different numbers of heads",
        ),
    ],
)
def test_a_feature_of_a_known_family_that_is_lacking_is_named(
    family: str, changed: dict, lacks: str
) -> None:
    with pytest.raises(PerfModelError, match=f"cannot be described exactly: .*{lacks}"):
        model_from_config(FAMILY_COUNTS[family]["config"] | changed)


@pytest.mark.parametrize(
    ("family", "changed", "named"),
    [
        ("gemma4", {"per_layer_config": {"x": {"head_dim": 512}}}, "per_layer_config"),
        ("step3p5", {"mlp_layer_types": None, "moe_layers_enum": "3,x"}, "moe_layers_enum"),
        *(
            (
                "step3p5",
                {"num_sliding_attention_heads": None, "attention_other_setting": {key: "x"}},
                "window_heads",
            )
            for key in ("num_attention_heads", "num_attention_groups", "head_dim")
        ),
    ],
)
def test_entries_by_layer_that_are_no_numbers_are_refused_by_name(
    family: str, changed: dict, named: str
) -> None:
    with pytest.raises(PerfModelError, match=named):
        model_from_config(FAMILY_COUNTS[family]["config"] | changed)


def test_attention_in_the_window_is_predicted_with_its_own_heads() -> None:
    """More heads in the window take longer and hold more; those of full attention stay."""
    config = FAMILY_COUNTS["step3p5"]["config"]
    alike, wider = (
        model_from_config(config | {"num_sliding_attention_heads": heads}) for heads in (64, 96)
    )
    assert replace(alike, window_heads=None) == replace(wider, window_heads=None)
    layout = {"layout": "dp=8,ep=8,zero=1", "global_batch": 8, "seq_len": 4096}
    fewer, more = (predict(model, "dgx-h100", **layout) for model in (alike, wider))
    assert more.step_time_s > fewer.step_time_s
    assert more.memory.weights > fewer.memory.weights
    by_formula = 6 * 2 * 4096 * 32 * 128 + 6 * 4096 * 32
    assert parameter_count(wider) - parameter_count(alike) == by_formula


@pytest.mark.parametrize("padded", ["{}", "{:02}", "{:04}"])
def test_layers_of_gemma_with_other_heads_are_found_by_number(padded: str) -> None:
    """transformers pads the numbers of layers with zeros when it writes more than ten of them."""
    config: dict[str, Any] = FAMILY_COUNTS["gemma4_text"]["config"]
    heads = {padded.format(layer): {"head_dim": 32} for layer in (5, 11)}
    assert model_from_config(
        config | {"global_head_dim": None, "per_layer_config": heads}
    ) == model_from_config(config)


def nas_layer(attends: bool, ratio: float | None, group: int | None = 4) -> dict[str, Any]:
    """An entry of `block_configs`."""
    return {
        "attention": {"no_op": not attends, "n_heads_in_group": group if attends else None},
        "ffn": {"no_op": ratio is None, "ffn_mult": ratio},
    }


NAS = {
    "model_type": "nemotron-nas",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "block_configs": [
        nas_layer(True, 1.5),
        nas_layer(False, 3.0),
        nas_layer(True, None),
        nas_layer(False, None),
    ],
}


def test_layers_that_a_search_changed_have_the_parameters_that_they_keep() -> None:
    """Sizes are 2/3 of the stated share of the hidden size, in steps of 256."""
    attention = 512 * (8 + 2 + 2) * 64 + 512 * 512 + 512
    inner = 3 * 512 * (512 + 1024) + 2 * 512
    net = model_from_config(NAS)
    assert parameters(net).total == 2 * attention + inner + 2 * 1000 * 512 + 512
    assert net.layers == 3
    assert (net.kv_heads, net.ffn_hidden) == (2, 1024)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ([nas_layer(True, 1.5), nas_layer(True, 1.5, group=2)] * 2, "n_heads_in_group"),
        (
            [{"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.5}}] * 4,
            "replace_with_linear",
        ),
        ([nas_layer(True, 1.5)] * 3, "3 entries for 4 layers"),
        ([nas_layer(True, None)] * 4, "feed-forward"),
        ([{"ffn": {}}] * 4, "ffn_mult"),
    ],
)
def test_what_a_search_changed_and_cannot_be_described_is_named(
    changed: list[dict[str, Any]], named: str
) -> None:
    with pytest.raises(PerfModelError, match=f"cannot be described exactly: .*{named}"):
        model_from_config(NAS | {"block_configs": changed})


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"use_mtp": True, "num_mtp_modules": 3}, "3 modules that predict further tokens are"),
        ({"num_mtp_modules": 1}, "the module that predicts a further token is"),
        ({"use_mtp": False, "num_mtp_modules": 3}, ""),
        ({}, ""),
    ],
)
def test_modules_for_further_tokens_are_counted_or_named(
    stated: dict[str, Any], words: str
) -> None:
    config = {"model_type": "minimax_m2", "hidden_size": 256, "num_hidden_layers": 2}
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
    model = model_from_config({**config, **sizes, **experts, **stated})
    assert bool(words) == bool(model.left_out)
    assert words in model.left_out
