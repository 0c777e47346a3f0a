"""U-Nets of latent diffusion: parameters, FLOPs, memory and what a pipeline sends."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.spec import Job
from perfmodel.spec.unet import UNet
from perfmodel.workload import Shard, blocks, matmul_flops, parameter_count, step_flops

NAMES = ("stable-diffusion-1.5", "stable-diffusion-2", "stable-diffusion-xl")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # `sum(p.numel() for p in unet.parameters())` of diffusers' classes.
        ("stable-diffusion-1.5", 859_520_964),
        ("stable-diffusion-2-base", 865_910_724),
        ("stable-diffusion-xl", 2_567_463_684),
    ],
)
def test_parameters_are_those_of_diffusers(name: str, parameters: int) -> None:
    model = unet(name)
    assert parameter_count(model) == parameters
    held = sum(block.params * n for block, n in blocks(model, job(), Shard()))
    assert held == parameters


@st.composite
def networks(draw: st.DrawFn) -> UNet:
    scales = draw(st.integers(1, 3))
    heads = draw(st.tuples(*[st.sampled_from((1, 2, 4))] * scales))
    return UNet(
        name="drawn",
        channels=tuple(8 * h * draw(st.integers(1, 4)) for h in heads),
        heads_by_scale=heads,
        layers_by_scale=draw(st.tuples(*[st.integers(0, 2)] * scales)),
        middle_layers=draw(st.integers(0, 2)),
        units=draw(st.integers(1, 3)),
        latent_size=draw(st.sampled_from((8, 16))),
        latent_channels=draw(st.sampled_from((4, 16))),
        text_tokens=draw(st.integers(1, 20)),
        text_width=draw(st.integers(1, 64)),
        added_width=draw(st.sampled_from((0, 24))),
    )


@given(
    networks(),
    st.integers(1, 4),
    st.sampled_from([("core_attn",), ("mlp",), ("core_attn", "mlp"), ("second_products",)]),
    st.sampled_from((0, 4)),
)
@settings(max_examples=40)
def test_blocks_hold_and_multiply_what_the_formulas_say(
    model: UNet, images: int, modules: tuple[str, ...], rank: int
) -> None:
    # Adapters repeat little, which the formula leaves out there.
    assume(not rank or modules != ("second_products",))
    step = job().replace(
        global_batch=images, recompute_modules=modules, frozen=rank > 0, adapter_rank=rank
    )
    made = blocks(model, step, Shard(micro_batch=images))
    flops = step_flops(model, step)
    if not rank:
        assert sum(block.params for block, _ in made) == parameter_count(model)
    assert sum(matmul_flops(block.forward) for block, _ in made) == pytest.approx(flops.forward)
    for recompute in ("selective", "full"):
        repeated = sum(matmul_flops(getattr(block, f"recompute_{recompute}")) for block, _ in made)
        assert repeated == pytest.approx(flops.hardware(recompute) - flops.total)


@given(networks())
@settings(max_examples=25)
def test_the_way_up_reads_everything_that_the_way_down_left(model: UNet) -> None:
    left = [part.c_out for part in model.parts if part.is_read_again]
    read = [part.skip for part in model.parts if part.skip]
    assert read == left[::-1]
    assert len(model.parts) == 2 + 2 + len(left) - 1 + len(read) + len(model.channels) - 1
    # Each part takes what the one before it made, beside what the way down left.
    for before, part in zip(model.parts, model.parts[1:], strict=False):
        assert part.c_in - part.skip == before.c_out
        assert part.size_in == before.size_out
    assert model.parts[-1].size_out == model.latent_size


def test_a_cut_sends_the_image_and_all_skip_connections_that_cross_it() -> None:
    model, size = unet("stable-diffusion-1.5"), 64
    sent = [block.boundary_bytes for block, _ in blocks(model, job(), Shard())]
    # After the first convolution its output is both; after two units there are three of 320
    # channels.
    assert sent[0] == 2 * 320 * size**2
    assert sent[2] == 3 * 2 * 320 * size**2
    # At the coarsest scale everything that was left waits: 4 images of 64, 3 of 32, 3 of 16 and 2
    # of 8 pixels, and the output itself.
    waiting = [(320, 64)] * 3 + [(320, 32)] + [(640, 32)] * 2 + [(640, 16)] + [(1280, 16)] * 2
    waiting += [(1280, 8)] * 3
    middle = [part.name for part in model.parts].index("middle.1")
    assert sent[middle] == 2 * (sum(c * s**2 for c, s in waiting) + 1280 * 8**2)
    assert sent[-1] == 0


def test_activations_of_the_first_convolutions_by_hand() -> None:
    """A residual unit without transformer layers keeps the inputs of two norms, two SiLUs and two
    convolutions, and those of the time step's product."""
    model = replace(unet("stable-diffusion-1.5"), layers_by_scale=(0, 0, 0, 0))
    unit = {block.name: block for block, _ in blocks(model, job(), Shard())}["down_0.0"]
    image, time_step = 2 * 320 * 64**2, 2 * 1280
    assert unit.activation_bytes.none == 6 * image + 2 * time_step
    assert unit.activation_bytes.full == image


def test_a_unet_is_not_split_inside_an_image() -> None:
    with pytest.raises(LayoutError, match="tp=2 must be 1 for a convolutional network"):
        pm.predict("sdxl", "dgx-h100", "tp=2,dp=4", global_batch=8)
    with pytest.raises(LayoutError, match="leave mean_tokens out"):
        blocks(unet("sdxl"), replace(job(), mean_tokens=0.5), Shard())


def test_a_search_finds_a_layout_and_a_prediction_says_what_is_left_out() -> None:
    found = pm.search("sdxl", "dgx-h100", devices=8, global_batch=64)
    best = found.best
    assert best.layout.tp == best.layout.cp == best.layout.ep == 1
    assert any("outputs of sd-vae are taken" in warning for warning in best.warnings)


# The networks' own config.json, without what is the class's default or of no weight.
SD_2 = {
    "_class_name": "UNet2DConditionModel",
    "attention_head_dim": [5, 10, 20, 20],
    "cross_attention_dim": 1024,
    "use_linear_projection": True,
}
SD_XL = {
    "_class_name": "UNet2DConditionModel",
    "addition_embed_type": "text_time",
    "attention_head_dim": [5, 10, 20],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "num_attention_heads": None,
    "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128,
    "transformer_layers_per_block": [1, 2, 10],
}


@pytest.mark.parametrize(
    ("config", "name"), [(SD_2, "stable-diffusion-2-base"), (SD_XL, "stable-diffusion-xl")]
)
def test_configurations_of_diffusers_are_the_catalogs(
    config: dict[str, Any], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    read, known = pm.model(path), unet(name)
    assert isinstance(read, UNet)
    assert read.parts == known.parts
    assert (read.text_width, read.added_width) == (known.text_width, known.added_width)
    assert parameter_count(read) == parameter_count(known)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"down_block_types": ["AttnDownBlock2D"] * 4}, "blocks of the kind AttnDownBlock2D"),
        ({"down_block_types": ["DownBlock2D"]}, "4 block_out_channels and 1 down_block_types"),
        ({"in_channels": 9}, "9 channels at its input and 4 at its output"),
        ({"sample_size": 20}, "latent_size=20 cannot be halved 3 times"),
        ({"attention_head_dim": 7}, "320 channels are not a multiple of 7 heads"),
    ],
)
def test_other_networks_are_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SD_2 | change))
    with pytest.raises(PerfModelError, match=message):
        pm.model(path)


def unet(name: str) -> UNet:
    model = pm.model(name)
    assert isinstance(model, UNet)
    return model


def job() -> Job:
    return Job(global_batch=1, seq_len=1, dtype="bf16")


@given(networks(), st.integers(1, 4), st.sampled_from(("fp16", "bf16", "fp8")), st.booleans())
@settings(max_examples=30, deadline=None)
def test_wide_norms_cost_casts_and_twice_the_bytes(
    model: UNet, micro_batch: int, dtype: str, channels_last: bool
) -> None:
    narrow = job().replace(dtype=dtype, channels_last=channels_last)
    shard = Shard(micro_batch=micro_batch)
    plain = blocks(model, narrow, shard)
    wide = blocks(model, narrow.replace(wide_norms=True), shard)
    for (before, _), (after, _) in zip(plain, wide, strict=True):
        assert after.params == before.params
        assert after.backward_weight == before.backward_weight
        for name in ("forward", "backward_input"):
            kernels, others = getattr(before, name), getattr(after, name)
            # Products stay in 16 bits; each kernel of a norm moves fp32, and casts come with it.
            assert matmul_flops(others) == matmul_flops(kernels)
            added = moved_bytes(others) - moved_bytes(kernels)
            in_fp32 = sum(moved_bytes([(op, n)]) for op, n in others if is_wide(op))
            assert added >= in_fp32 / 2
        assert after.activation_bytes.none >= before.activation_bytes.none
    assert any(is_wide(op) for block, _ in wide for op, _ in block.forward)


def test_wide_norms_of_fp32_steps_are_their_own() -> None:
    model = unet("stable-diffusion-1.5")
    in_fp32 = job().replace(dtype="fp32")
    assert blocks(model, in_fp32.replace(wide_norms=True), Shard()) == blocks(
        model, in_fp32, Shard()
    )


@pytest.mark.parametrize(("name", "changes"), [("gpt3-1.3b", True), ("llama3-8b", False)])
def test_of_transformers_layer_norms_alone_are_wide(name: str, changes: bool) -> None:
    model = pm.model(name)
    narrow = Job(global_batch=8, seq_len=256)
    wide = blocks(model, narrow.replace(wide_norms=True), Shard())
    assert (wide != blocks(model, narrow, Shard())) == changes


def is_wide(op: Any) -> bool:
    """Whether a kernel is an element-wise one in fp32."""
    return getattr(op, "dtype", "") == "fp32" and not op.is_matmul


def moved_bytes(kernels: Any) -> float:
    """Bytes that kernels move."""
    return sum(op.bytes * n for op, n in kernels)
