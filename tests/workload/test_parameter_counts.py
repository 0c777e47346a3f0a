"""Parameter counts against what papers and model cards print."""

from dataclasses import replace

import pytest

from perfmodel.catalog import model, models
from perfmodel.spec import Job, Transformer
from perfmodel.spec.parts import AdaLN, NarrowEmbedding, Spectrogram
from perfmodel.workload import Shard, blocks, padded_vocab, parameter_count, parameters, step_flops

EXACT = {
    "gpt2-117m": 124_439_808,
    "gpt2-345m": 354_823_168,
    "gpt2-1.5b": 1_557_611_200,
    "gpt2-1.3b": 1_389_327_360,
    "bert-48": 669_790_012,  # Chimera, table 4
    "bert-large": 336_226_108,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "mt5-3b": 3_742_619_648,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-235b-a22b": 235_093_634_560,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "falcon-7b": 6_921_720_704,
    "falcon-180b": 179_522_565_120,
    "command-r-35b": 34_980_831_232,
    "phi-2": 2_779_683_840 - 51_200,  # the head's bias
    "gpt-j-6b": 6_050_882_784 - 28 * 5 * 4096 - 50_400,  # biases of feed-forwards and head
    # Sums over the modules of the models' own code, by hand.
    "wan2.1-14b": 14_288_491_584,
    "wan2.1-1.3b": 1_418_996_800,
    "wan2.2-t2v-a14b": 14_288_491_584,
    "flux-dev": 11_901_408_320,
    "flux-schnell": 11_891_178_560,
    "sd3-medium": 2_028_328_000,
    "sd3.5-large": 8_056_627_520,
    "pixart-alpha": 610_856_096,
    "pixart-sigma": 610_856_096,
    "ltx-video": 1_923_385_472,
    "qwen-image": 20_430_401_088,
    "hunyuan-video": 12_821_012_544 - 30 * 3072**2 - 4386 * 3072,  # the refiner of text tokens
    "vgg-16": 138_357_544,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
}
"""Names on the left, sums of tensor sizes of the published checkpoints on the right."""

ROUNDED = {
    "gpt-1.7b": 1.7,
    "gpt-3.6b": 3.6,
    "gpt-7.5b": 7.5,
    "gpt-18.4b": 18.4,
    "gpt-39.1b": 39.1,
    "gpt-76.1b": 76.1,
    "gpt-145.6b": 145.6,
    "gpt-310.1b": 310.1,
    "gpt-530b": 529.6,
    "gpt-1t": 1008.0,
    "gpt3-175b": 174.6,
    "gpt-22b": 22.1,
    "deepseek-v3": 671.0,
    "bloom-176b": 176.2,
    "mixtral-8x22b": 140.6,
    "nemotron-4-340b": 341.0,
    "maxtext-16b": 15.8,
    "maxtext-128b": 125.1,
    "maxtext-1024b": 997.5,
    "llama-like-80b": 80.0,
    "mlp-17b": 17.2,
    "mlp-103b": 103.1,
    "mpt-7b": 6.7,
    "mpt-70b": 64.9,
    "qwen3-30b-a3b": 30.5,
    "kimi-k2": 1026.4,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "palm-8b": 8.63,
    "palm-62b": 62.50,
    "palm-540b": 540.35,
    "falcon-40b": 41.3,
    "command-r-plus-104b": 103.8,
}
"""Billions as printed in the sources of the catalog."""


@pytest.mark.parametrize("name", EXACT)
def test_count_of_a_published_checkpoint(name):
    assert parameter_count(model(name)) == EXACT[name]


def transformer(name: str) -> Transformer:
    known = model(name)
    assert isinstance(known, Transformer)
    return known


def test_positions_of_opt_begin_behind_two_rows() -> None:
    """Published checkpoints of OPT have two rows of positions before the first
    (`OPTLearnedPositionalEmbedding`), and that of 350 M parameters a narrow table of tokens."""
    assert parameter_count(model("opt-125m")) == 125_239_296
    assert parameter_count(model("opt-350m")) == 331_196_416
    sizes = ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "175b")
    assert all(transformer(f"opt-{size}").inputs.position_offset == 2 for size in sizes)


def test_versions_of_mistral_differ_in_window_and_vocabulary() -> None:
    """Their `config.json`: the window went with v0.2, and v0.3 has 768 tokens more."""
    first, second, third = (
        transformer(f"mistralai/Mistral-7B-{v}") for v in ("v0.1", "Instruct-v0.2", "v0.3")
    )
    assert [each.attention.window for each in (first, second, third)] == [4096, 0, 0]
    assert [each.vocab for each in (first, second, third)] == [32_000, 32_000, 32_768]
    assert parameter_count(third) == 7_248_023_552


@pytest.mark.parametrize("name", ROUNDED)
def test_count_as_printed(name):
    digits = 1
    assert round(parameter_count(model(name)) / 1e9, digits) == pytest.approx(
        ROUNDED[name], abs=0.051
    )


@pytest.mark.parametrize("name", ["gpt-1.7b", "gpt-39.1b", "gpt3-175b", "gpt-1t"])
def test_megatron_equation_2(name):
    """SC21 equation 2: 12 l h^2 (1 + 13/12h + (V + s)/12lh), which leaves out the final norm's
    2h."""
    gpt = model(name)
    n, h = gpt.layers, gpt.hidden
    assert (
        parameter_count(gpt) - 2 * h == 12 * n * h**2 + 13 * n * h + (gpt.vocab + gpt.seq_len) * h
    )


def test_active_parameters_of_a_mixture():
    assert parameters(model("mixtral-8x7b")).active == pytest.approx(12.88e9, rel=1e-3)  # 12.9B
    assert parameters(model("deepseek-v3")).active == pytest.approx(37.5e9, rel=0.02)  # 37B
    assert parameters(model("qwen3-235b-a22b")).active == pytest.approx(22e9, rel=0.02)
    dense = parameters(model("llama2-7b"))
    assert dense.active == dense.total


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_narrow_tables_of_tokens_are_joined_to_the_layers_by_two_products(
    tied: bool, bias: bool
) -> None:
    """Rows of a table, and what is compared with them, are as wide as it; positions as the layers
    (OPT-350M)."""
    wide, width = replace(model("gpt3-125m"), tied_embeddings=tied), 96
    narrow = replace(wide, narrow_embedding=NarrowEmbedding(width=width, bias=bias))
    tables, h = (1 if tied else 2), wide.hidden
    projections = 2 * h * width + (h + width) * bias
    assert (
        parameter_count(narrow)
        == parameter_count(wide) - tables * wide.vocab * (h - width) + projections
    )


def test_diffusion_transformers_make_scales_shifts_and_gates_of_time_and_class() -> None:
    """DiT (arXiv 2212.09748): layer norms without parameters, three vectors for every sub-layer,
    two for the head."""
    dit = replace(model("dit-b-2"), adaln=AdaLN(classes=10, frequencies=30))
    h, patches = dit.hidden, dit.inputs.patches
    assert patches is not None
    vectors = h * h + h
    conditioned = (30 + 1) * h + vectors + (10 + 1) * h
    pixels = (patches.elements + 1) * h + (h + 1) * patches.out_elements
    layer = 4 * vectors + (h + 1) * dit.ffn_hidden + (dit.ffn_hidden + 1) * h + 6 * vectors
    assert parameter_count(dit) == conditioned + pixels + dit.layers * layer + 2 * vectors


@pytest.mark.parametrize(("kernel", "stride"), [(3, 2), (5, 4)])
def test_two_convolutions_over_time_make_tokens_of_a_spectrogram(kernel: int, stride: int) -> None:
    """Whisper (arXiv 2212.04356, section 2.2): the first at every instant, the second once a token,
    with biases."""
    plain = model("t5-base")
    spoken = replace(plain, spectrogram=Spectrogram(channels=80, kernel=kernel, stride=stride))
    h, job = plain.hidden, Job(global_batch=2, seq_len=64)
    first, second = kernel * 80 * h, kernel * h * h
    assert parameter_count(spoken) == parameter_count(plain) + first + h + second + h
    added = step_flops(spoken, job).forward - step_flops(plain, job).forward
    assert added == 2 * 2 * 64 * (stride * first + second)
    held = sum(b.params * n for b, n in blocks(spoken, job, Shard()))
    assert held == parameter_count(spoken) + (padded_vocab(spoken.vocab, 1) - spoken.vocab) * h


@pytest.mark.parametrize("name", models())
def test_blocks_hold_all_parameters(name):
    """On one device, but for the padding of the vocabulary."""
    net = model(name)
    held = sum(
        b.params * n for b, n in blocks(net, Job(global_batch=1, seq_len=net.seq_len), Shard())
    )
    pad = 0
    if isinstance(net, Transformer) and not net.inputs.patches:
        tables = 1 if net.head.tied_embeddings else 2
        narrow = net.inputs.narrow_embedding
        width = narrow.width if narrow else net.hidden
        pad = (padded_vocab(net.vocab, 1) - net.vocab) * (
            tables * width + net.head.pooler_and_mlm_head
        )
    assert held == parameter_count(net) + pad


def test_tied_tables_are_counted_beside():
    tied = {
        b.name: b
        for b, _ in blocks(model("gpt3-175b"), Job(global_batch=1, seq_len=2048), Shard(tp=8))
    }
    assert tied["head"].tied_params == 51200 // 8 * 12288
    assert tied["head"].params == 2 * 12288
    loose = {
        b.name: b for b, _ in blocks(model("llama2-7b"), Job(global_batch=1, seq_len=2048), Shard())
    }
    assert loose["head"].tied_params == 0


def test_experts_are_divided_by_expert_and_tensor_parallelism():
    net, job = model("mixtral-8x7b"), Job(global_batch=1, seq_len=4096)

    def held(**shard):
        return blocks(net, job, Shard(sequence_parallel=True, **shard))[1][0].expert_params

    whole = held()
    assert whole == 8 * 3 * 4096 * 14336
    assert held(ep=8) == whole // 8
    assert held(ep=4, tp=2) == whole // 8
    assert held(ep=4, tp=2, etp=1) == whole // 4


def test_matrices_of_a_layer_are_those_of_its_products() -> None:
    """By rows and columns; experts apart, a matrix each."""
    llama, mixtral = model("llama3-8b"), model("mixtral-8x7b")
    job = Job(global_batch=1, seq_len=512)
    dense, sparse = (
        next(b for b, _ in blocks(m, job, Shard()) if "layer" in b.name) for m in (llama, mixtral)
    )
    h, kv, ffn = 4096, 1024, 14336
    attention = {(h + 2 * kv, h): 1, (h, h): 1}
    found = {frozenset(shape): n for shape, n in dense.weight_shapes(experts=False).items()}
    expected = {**attention, (2 * ffn, h): 1, (h, ffn): 1}
    assert found == {frozenset(shape): n for shape, n in expected.items()}
    assert not dense.weight_shapes(experts=True)
    experts = {frozenset(shape): n for shape, n in sparse.weight_shapes(experts=True).items()}
    assert experts == {frozenset((2 * ffn, h)): 8, frozenset((h, ffn)): 8}
    others = {frozenset(shape): n for shape, n in sparse.weight_shapes(experts=False).items()}
    assert others == {frozenset(shape): n for shape, n in {**attention, (8, h): 1}.items()}
