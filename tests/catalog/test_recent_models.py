"""Recent families: configurations as published, the catalog's entries, and sums of tensor sizes of
the checkpoints."""

from dataclasses import replace

import pytest

from perfmodel.catalog import model, model_from_config
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Job
from perfmodel.spec.parts import DeltaNet, Patches
from perfmodel.workload import Shard, blocks, matmul_flops, parameter_count, parameters, step_flops


def _config(family, hidden, inner, layers, heads, kv_heads, vocab, **others):
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    } | others


def _gemma3(hidden, inner, layers, **others):
    """As Google publishes them: what is as in the class of Hugging Face is left out."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "sliding_window": 1024,
    } | others
    return {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }


def _gemma2(hidden, inner, layers, heads, kv_heads, **others):
    soft = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "head_dim": 256,
    }
    return _config("gemma2", hidden, inner, layers, heads, kv_heads, 256_000, **(soft | others))


def _llama4(**others):
    return {
        "model_type": "llama4",
        "text_config": _config(
            "llama4_text",
            5120,
            8192,
            48,
            40,
            8,
            202_048,
            intermediate_size_mlp=16384,
            head_dim=128,
            attention_chunk_size=8192,
            num_experts_per_tok=1,
            **others,
        ),
    }


GLM45 = {"head_dim": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "attention_bias": True}
GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}
TOWER = 416_866_032  # SigLIP's of Gemma 3, at 896 pixels
VIT = {"model_type": "vit", "id2label": {str(i): "" for i in range(1000)}}
DIT = {"_class_name": "DiTTransformer2DModel", "out_channels": 8}

RECENT = {
    "gemma-2b": (_config("gemma", 2048, 16384, 18, 8, 1, 256_000, head_dim=256), 2_506_172_416),
    "gemma-7b": (_config("gemma", 3072, 24576, 28, 16, 16, 256_000, head_dim=256), 8_537_680_896),
    "gemma-2-2b": (_gemma2(2304, 9216, 26, 8, 4), 2_614_341_888),
    "gemma-2-9b": (_gemma2(3584, 14336, 42, 16, 8), 9_241_705_984),
    "gemma-2-27b": (_gemma2(4608, 36864, 46, 32, 16, head_dim=128), 27_227_128_320),
    "gemma-3-1b": (
        _config("gemma3_text", 1152, 6912, 26, 4, 1, 262_144, sliding_window=512),
        999_885_952,
    ),
    # less the vision tower and the projection to the language model, with its norm
    "gemma-3-4b": (_gemma3(2560, 10240, 34), 4_300_079_472 - TOWER - 1152 * 2561),
    "gemma-3-12b": (
        _gemma3(3840, 15360, 48, num_attention_heads=16, num_key_value_heads=8),
        12_187_325_040 - TOWER - 1152 * 3841,
    ),
    "gemma-3-27b": (
        _gemma3(5376, 21504, 62, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
        27_432_406_640 - TOWER - 1152 * 5377,
    ),
    "phi-3-mini": (
        _config("phi3", 3072, 8192, 32, 32, 32, 32064, sliding_window=2047),
        3_821_079_552,
    ),
    "phi-3-medium": (
        _config("phi3", 5120, 17920, 40, 40, 10, 32064, sliding_window=2047),
        13_960_238_080,
    ),
    "phi-4": (
        _config("phi3", 5120, 17920, 40, 40, 10, 100_352, sliding_window=None),
        14_659_507_200,
    ),
    "phi-4-mini": (
        _config("phi3", 3072, 8192, 32, 24, 8, 200_064, tie_word_embeddings=True),
        3_836_021_760,
    ),
    "olmo-2-1b": (_config("olmo2", 2048, 8192, 16, 16, 16, 100_352), 1_484_916_736),
    "olmo-2-7b": (_config("olmo2", 4096, 11008, 32, 32, 32, 100_352), 7_298_617_344),
    "olmo-2-13b": (_config("olmo2", 5120, 13824, 40, 40, 40, 100_352), 13_716_198_400),
    "olmo-2-32b": (_config("olmo2", 5120, 27648, 64, 40, 8, 100_352), 32_234_279_936),
    "starcoder2-3b": (
        _config("starcoder2", 3072, 12288, 30, 24, 2, 49152, sliding_window=4096),
        3_030_371_328,
    ),
    "starcoder2-7b": (
        _config("starcoder2", 4608, 18432, 32, 36, 4, 49152, sliding_window=4096),
        7_173_923_840,
    ),
    "starcoder2-15b": (
        _config(
            "starcoder2",
            6144,
            24576,
            40,
            48,
            4,
            49152,
            sliding_window=4096,
            tie_word_embeddings=False,
        ),
        15_957_889_024,
    ),
    "glm-4-9b": (_config("glm", 4096, 13696, 40, 32, 2, 151_552), 9_399_951_360),
    "glm-4-32b": (
        _config("glm4", 6144, 23040, 61, 48, 2, 151_552, head_dim=128, attention_bias=False),
        32_566_081_536,
    ),
    # less the biases that balance experts, which are not trained
    "glm-4.5-air": (
        _config(
            "glm4_moe",
            4096,
            10944,
            46,
            96,
            8,
            151_552,
            n_routed_experts=128,
            first_k_dense_replace=1,
            moe_intermediate_size=1408,
            **GLM45,
        ),
        106_852_251_264 - 45 * 128,
    ),
    "llama-4-scout": (_llama4(), 107_769_861_120),
    "llama-4-maverick": (
        _llama4(num_local_experts=128, interleave_moe_layer_step=2),
        400_711_848_960,
    ),
    "qwen1.5-moe-a2.7b": (
        _config(
            "qwen2_moe",
            2048,
            5632,
            24,
            16,
            16,
            151_936,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
        ),
        14_315_784_192,
    ),
    "qwen3-next-80b-a3b": (
        _config(
            "qwen3_next",
            2048,
            5120,
            48,
            16,
            2,
            151_936,
            head_dim=256,
            linear_num_value_heads=32,
            linear_num_key_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_conv_kernel_dim=4,
            moe_intermediate_size=512,
            num_experts=512,
            num_experts_per_tok=10,
            full_attention_interval=4,
            shared_expert_intermediate_size=512,
        ),
        79_674_391_296,
    ),
    "gpt-oss-20b": (
        _config("gpt_oss", 2880, 2880, 24, 64, 8, 201_088, num_local_experts=32, **GPT_OSS),
        20_914_757_184,
    ),
    "gpt-oss-120b": (
        _config("gpt_oss", 2880, 2880, 36, 64, 8, 201_088, num_local_experts=128, **GPT_OSS),
        116_829_156_672,
    ),
    "codestral-mamba-7b": (
        {
            "model_type": "mamba2",
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "vocab_size": 32768,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
        },
        7_285_403_648,
    ),
    "vit-b-16": (VIT, 86_567_656),
    "vit-l-16": (
        VIT
        | {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
        304_326_632,
    ),
    "dit-xl-2": (DIT, 675_129_632 - 256 * 1152),  # positions are fixed
}
"""Configuration, and parameters of the checkpoint."""
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
}
NEMOTRON = _config("nemotron", 256, 1024, 2, 4, 2, 512, hidden_act="relu2")
NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*-",
    "hidden_size": 256,
    "num_hidden_layers": 5,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 16,
    "n_groups": 4,
    "vocab_size": 1024,
}


@pytest.mark.parametrize("name", RECENT)
def test_configuration_catalog_and_checkpoint_agree(name):
    config, published = RECENT[name]
    read, listed = model_from_config(config), model(name)
    assert parameter_count(read) == parameter_count(listed) == published
    in_words = ("name", "source", "aliases", "seq_len", "longest_seq_len", "left_out")
    assert replace(read, **{field: listed.value(field) for field in in_words}) == listed
    assert bool(listed.left_out) >= bool(read.left_out)


def test_of_a_model_that_sees_the_language_model_is_read():
    config, published = RECENT["olmo-2-1b"]
    assert (
        parameter_count(model_from_config({"model_type": "llava", "text_config": config}))
        == published
    )
    text = {key: value for key, value in RECENT["phi-4"][0].items() if key != "model_type"}
    assert (
        parameter_count(model_from_config({"model_type": "mistral3", "text_config": text}))
        == RECENT["phi-4"][1]
    )


def test_a_vision_tower_counted_from_its_modules():
    """SigLIP so400m/14 with 4,096 patches: convolution, positions, layers of four projections and
    two products."""
    h, inner, layers = 1152, 4304, 27
    layer = 4 * (h * h + h) + (h * inner + inner) + (inner * h + h) + 2 * 2 * h
    counted = (14 * 14 * 3 * h + h) + 64 * 64 * h + layers * layer + 2 * h
    tower = model_from_config({"model_type": "siglip", "vision_config": SIGLIP})
    assert parameter_count(tower) == counted == TOWER


def test_a_nemotron_hybrid_counted_from_its_modules():
    h, inner, state, heads = 256, 8 * 64, 2 * 4 * 16, 8
    mamba = h * (2 * inner + state + heads) + (inner + state) * 5 + 3 * heads + inner + inner * h
    attention, feed_forward = h * (4 + 2 * 2) * 64 + 4 * 64 * h, 2 * h * 512
    counted = 2 * 1024 * h + 2 * mamba + attention + 2 * feed_forward + (5 + 1) * h
    hybrid = model_from_config(NEMOTRON_H)
    assert parameter_count(hybrid) == counted
    assert hybrid.block.activation == "relu2"
    with pytest.raises(PerfModelError, match="n_routed_experts is missing"):
        model_from_config(
            NEMOTRON_H | {"hybrid_override_pattern": "M-E*-", "n_routed_experts": None}
        )


def test_nemotron_norms_have_a_shift_though_products_have_no_bias():
    attention, feed_forward = 256 * (4 + 2 * 2) * 64 + 256 * 256, 2 * 256 * 1024
    assert (
        parameter_count(model_from_config(NEMOTRON))
        == 2 * 512 * 256 + 2 * (attention + feed_forward) + 5 * 2 * 256
    )


def test_a_module_for_further_tokens():
    """11.5 B beside embedding and head, which it shares (DeepSeek-V3's README_WEIGHTS); its work by
    hand."""
    plain, further = model("deepseek-v3"), model("deepseek-v3-mtp")
    found = parameters(further)
    assert found.further_tokens / 1e9 == pytest.approx(11.6, abs=0.11)
    assert found.total - found.further_tokens == parameter_count(plain)
    job = Job(global_batch=1, seq_len=4096)
    more = step_flops(further, job).head_forward - step_flops(plain, job).head_forward
    assert more == 2 * 4096 * 7168 * 129280
    named = [(block.name, n) for block, n in blocks(further, job, Shard())]
    assert named == [
        ("embedding", 1),
        ("dense_layer", 3),
        ("moe_layer", 58),
        ("further_token_head", 1),
        ("head", 1),
    ]


def test_layers_of_several_kinds():
    assert model("gemma-2-2b").stack[:4] == ("W-", "*-", "W-", "*-")
    assert model("gemma-3-4b").stack[4:8] == ("W-", "*-", "W-", "W-")
    assert model("llama-4-maverick").stack[:4] == ("W-", "WE", "W-", "*E")
    assert model("qwen3-next-80b-a3b").stack[-4:] == ("LE", "LE", "LE", "*E")
    assert model("qwen1.5-moe-a2.7b").stack == ("*E",) * 24


def test_chunks_are_sequences_of_their_own():
    """Attention over chunks of c tokens costs what s / c sequences of c tokens cost."""
    scout = replace(model("llama-4-scout"), full_attention_every=0, window=1024)
    whole = replace(scout, window=0, chunked_window=False)
    chunked = step_flops(scout, Job(global_batch=1, seq_len=4096))
    assert (
        chunked.attention_causal_forward
        == step_flops(whole, Job(global_batch=4, seq_len=1024)).attention_causal_forward
    )
    layer, short = (
        blocks(net, Job(global_batch=1, seq_len=s), Shard(micro_batch=m))[1][0]
        for net, s, m in ((scout, 4096, 1), (whole, 1024, 4))
    )
    assert layer.forward == short.forward


def test_flops_of_published_diffusion_transformers():
    """Table 1 of DiT counts a multiplication and an addition as one: 118.64 G for XL/2, and so
    on."""
    for name, published in (
        ("dit-xl-2", 118.64),
        ("dit-l-2", 80.71),
        ("dit-b-2", 23.01),
        ("dit-s-2", 6.06),
    ):
        found = (
            step_flops(model(name), Job(global_batch=1, seq_len=256, mode="inference")).total / 2e9
        )
        assert found == pytest.approx(published, rel=2e-3)


def test_flops_of_kernels_are_those_of_the_closed_form():
    """Forward products of one device, attention in full where kernels compute it in full."""
    for name, seq_len in (
        ("qwen3-next-80b-a3b", 4096),
        ("dit-b-2", 256),
        ("vit-b-16", 197),
        ("olmo-2-1b", 4096),
    ):
        net, job = model(name), Job(global_batch=1, seq_len=seq_len)
        counted = sum(n * matmul_flops(block.forward) for block, n in blocks(net, job, Shard()))
        flops = step_flops(net, job)
        expected = flops.forward - flops.attention_forward + flops.attention_causal_forward
        assert counted == pytest.approx(expected, rel=2e-3), name


@pytest.mark.parametrize(
    "name",
    [
        "gemma-2-2b",
        "qwen3-next-80b-a3b",
        "dit-b-2",
        "vit-b-16",
        "llama-4-scout",
        "mamba2-130m",
        "deepseek-v3-mtp",
    ],
)
def test_tensor_parallel_ranks_share_out_the_work(name):
    net = model(name)
    if net.hybrid.mamba:  # one group of heads
        net = replace(net, mamba=replace(net.hybrid.mamba, groups=2))
    job = Job(
        global_batch=1,
        seq_len=net.seq_len if net.inputs.patches is None else net.inputs.patches.tokens,
    )
    whole, part = (
        sum(
            n * matmul_flops(b.forward)
            for b, n in blocks(
                net, job, Shard(tp=tp, sequence_parallel=tp > 1 and net.seq_len % 2 == 0)
            )
        )
        for tp in (1, 2)
    )
    assert whole / 2 <= part * 1.001 <= whole / 2 * 1.1


def test_an_unknown_family_is_told_how_to_be_described():
    with pytest.raises(UnknownNameError, match="complete the TOML below") as error:
        model_from_config({"model_type": "zzz"})
    assert "# hidden = ?" in error.value.__notes__[0]
    with pytest.raises(PerfModelError, match="text_config: missing"):
        model_from_config({"model_type": "llama4"})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mixers": "L"}, "give delta_net if mixers has a L"),
        ({"mixers": "W- *-"}, "needs window"),
        ({"patches": Patches(image_size=32, patch_size=2)}, "causal=false"),
        ({"vocab": 0}, "vocab=0"),
        (
            {"delta_net": DeltaNet(heads=2, key_heads=2, head_dim=8, key_dim=8)},
            "give delta_net if mixers has a L",
        ),
    ],
)
def test_models_that_do_not_exist(changes, says):
    with pytest.raises(PerfModelError, match=says):
        replace(model("llama2-7b"), layers=1, **changes)
    with pytest.raises(PerfModelError, match="multiple of key_heads"):
        DeltaNet(heads=3, key_heads=2, head_dim=8, key_dim=8)
    with pytest.raises(PerfModelError, match="exceeds image_size"):
        Patches(image_size=8, patch_size=16)


@pytest.mark.parametrize("model_type", ["minimax_m3", "minimax_m3_vl"])
def test_a_key_that_means_another_size_in_a_family_is_taken_as_that(model_type: str) -> None:
    """MiniMax-M3 calls the inner size of an expert `intermediate_size`, and has a size of its own
    for dense layers."""
    config = {
        "model_type": model_type,
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "moe_intermediate_size": 3072,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "vocab_size": 200064,
        "hidden_act": "swigluoai",
        "moe_layer_freq": [0, 0, 0] + [1] * 57,
    }
    model = model_from_config(config)
    assert model.experts is not None
    assert (model.ffn_hidden, model.experts.ffn_hidden, model.experts.first_dense_layers) == (
        12288,
        3072,
        3,
    )
    assert (model.block.activation, model.block.clamped_glu) == ("silu", True)
    assert "indexer" in model.left_out


def test_layers_whose_keys_an_indexer_selects_attend_like_others() -> None:
    config = {
        "model_type": "glm_moe_dsa",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    }
    plain = model_from_config(config)
    for word in (
        "deepseek_sparse_attention",
        "sparse_attention",
        "indexed_attention",
        "full_attention",
    ):
        assert model_from_config({**config, "layer_types": [word] * 4}) == plain


@pytest.mark.parametrize("model_type", ["qwen4_exp", "recurrent_gemma", "xlnet", "hrm_text"])
def test_a_family_that_cannot_be_described_says_why_and_gives_the_nearest(model_type: str) -> None:
    config = {
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 100,
    }
    with pytest.raises(PerfModelError, match="cannot be described exactly: ") as e:
        model_from_config(config)
    assert "--model mine.toml" in str(e.value)
    assert "hidden = 64" in "".join(e.value.__notes__)


PUBLISHED = {
    "codellama/CodeLlama-7b-hf": 6_738_546_688,
    "codellama/CodeLlama-13b-hf": 13_016_028_160,
    "codellama/CodeLlama-70b-Instruct-hf": 68_976_910_336,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "01-ai/Yi-6B": 6_061_035_520,
    "01-ai/Yi-1.5-9B-Chat": 8_829_407_232,
    "01-ai/Yi-34B-Chat": 34_388_917_248,
    "internlm/internlm2-1_8b": 1_889_110_016,
    "internlm/internlm2_5-7b-chat": 7_737_708_544,
    "internlm/internlm2-chat-20b": 19_861_149_696,
    "baichuan-inc/Baichuan-7B": 7_000_559_616,
    "baichuan-inc/Baichuan2-7B-Chat": 7_505_973_248,
    "deepseek-ai/deepseek-llm-7b-chat": 6_910_365_696,
    "lmsys/vicuna-7b-v1.5": 6_738_415_616,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "THUDM/chatglm3-6b-base": 6_243_584_000,
    "deepseek-ai/deepseek-coder-6.7b-instruct": 6_740_512_768,
    "deepseek-ai/deepseek-moe-16b-chat": 16_375_728_128,
    "openbmb/MiniCPM-2B-sft-bf16": 2_724_880_896,
    "internlm/internlm2-chat-1_8b-sft": 1_889_110_016,
    "HuggingFaceH4/zephyr-7b-beta": 7_241_732_096,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "Qwen/Qwen-7B-Chat": 7_721_324_544,
    "Qwen/Qwen1.5-0.5B": 463_987_712,
    "Qwen/Qwen1.5-1.8B-Chat": 1_836_828_672,
    "Qwen/Qwen1.5-4B": 3_950_369_280,
    "Qwen/Qwen1.5-14B-Chat": 14_167_290_880,
    "Qwen/Qwen1.5-32B": 32_512_218_112,
    "Qwen/Qwen1.5-72B": 72_287_920_128,
    "Qwen/Qwen1.5-110B": 111_209_914_368,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200,
    "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "mistralai/Codestral-22B-v0.1": 22_247_282_688,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": 1_711_376_384,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m-deduped": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "facebook/opt-2.7b": 2_651_596_800,
    "bigscience/bloom-560m": 559_214_592,
    "bigscience/bloom-1b7": 1_722_408_960,
    "bigscience/bloom-3b": 3_002_557_440,
    "distilbert/distilgpt2": 81_912_576,
    "allenai/OLMo-2-1124-7B-Instruct": 7_298_617_344,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/Llama-3.1-Tulu-3-8B-SFT": 8_030_261_248,
    "Qwen/Qwen2.5-Math-7B-Instruct": 7_615_616_512,
    "Qwen/QwQ-32B": 32_763_876_352,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30_532_122_624,
    "microsoft/Phi-3.5-mini-instruct": 3_821_079_552,
    "microsoft/Phi-3-medium-128k-instruct": 13_960_238_080,
    "google/codegemma-7b-it": 8_537_680_896,
}
"""Tensor sizes of checkpoints that launch files name."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_of_the_hub_have_the_published_number_of_parameters(name):
    assert parameter_count(model(name)) == PUBLISHED[name]
