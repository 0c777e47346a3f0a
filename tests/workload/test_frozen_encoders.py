"""Frozen encoders in front of a diffusion model: their sizes, and what they add to a step."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import UnknownNameError
from perfmodel.prediction import explain, step_problem
from perfmodel.spec import Job, Layout
from perfmodel.spec.encoders import AUTOENCODERS, TEXT_ENCODERS, encoders_of
from perfmodel.spec.parts import FrozenEncoder
from perfmodel.workload import BlockOps, Shard, blocks, matmul_flops, parameter_count

MODELS = ("sd-1.5", "sdxl", "sd3-medium", "flux-dev", "pixart-alpha", "wan2.1-1.3b")


def first_block(name: str, micro_batch: int = 1, **job: Any) -> BlockOps:
    model = catalog.model(name)
    stated = Job(global_batch=8, seq_len=model.seq_len, **job)
    return blocks(model, stated, Shard(micro_batch=micro_batch))[0][0]


# Parameters of diffusers' `AutoencoderKL` are 83,653,863 and 83,819,683, of which 49,490,179 + 20
# and 49,545,475 are the decoder's.
@pytest.mark.parametrize(
    ("encoder", "params"),
    [
        ("clip-l", 123_060_480),
        ("openclip-h", 340_387_840),
        ("openclip-bigg", 694_659_840 - 1280**2),
        ("t5-xxl", 4_762_310_656),
        ("umt5-xxl", 5_680_910_336 - 23 * 32 * 64),
        ("sd-vae", 83_653_863 - 49_490_179 - 20),
        ("flux-vae", 83_819_683 - 49_545_475),
    ],
)
def test_an_encoder_has_the_parameters_of_its_checkpoint(encoder: str, params: int) -> None:
    model: Any = catalog.model("sd-1.5")
    alone: Any = replace(model, encoders=(FrozenEncoder(name=encoder),))  # pyright: ignore[reportArgumentType]
    job = Job(global_batch=1, seq_len=1)
    encoding = replace(
        job, fine_tuning=replace(job.fine_tuning, cached_latents=False, cached_text=False)
    )
    block, cached = (blocks(alone, each, Shard())[0][0] for each in (encoding, job))
    assert block.params - cached.params == params
    if encoder in TEXT_ENCODERS:
        assert parameter_count(TEXT_ENCODERS[encoder]) == params


@pytest.mark.parametrize("name", ["clip-l", "openclip-bigg", "t5-xxl"])
def test_sizes_are_those_of_the_class_of_transformers(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    encoder = TEXT_ENCODERS[name]
    sizes = {"vocab_size": encoder.vocab}
    if name.startswith("t5"):
        config = transformers.T5Config(
            d_model=encoder.hidden,
            d_kv=encoder.head_dim,
            d_ff=encoder.ffn_hidden,
            num_layers=encoder.layers,
            num_heads=encoder.heads,
            feed_forward_proj="gated-gelu",
            **sizes,
        )
        kind = transformers.T5EncoderModel
    else:
        config = transformers.CLIPTextConfig(
            hidden_size=encoder.hidden,
            intermediate_size=encoder.ffn_hidden,
            num_hidden_layers=encoder.layers,
            num_attention_heads=encoder.heads,
            **sizes,
        )
        kind = transformers.CLIPTextModel
    with torch.device("meta"):
        built = kind(config)
    assert sum(weight.numel() for weight in built.parameters()) == parameter_count(encoder)


@settings(deadline=None)
@given(
    name=st.sampled_from(MODELS),
    micro_batch=st.integers(1, 4),
    latents=st.booleans(),
    text=st.booleans(),
)
def test_encoders_add_forward_work_and_frozen_weights_alone(
    name: str, micro_batch: int, latents: bool, text: bool
) -> None:
    cached = first_block(name, micro_batch)
    block = first_block(name, micro_batch, cached_latents=not latents, cached_text=not text)
    runs = any(text if each.is_of_text else latents for each in encoders_of(catalog.model(name)))
    assert (matmul_flops(block.forward) > matmul_flops(cached.forward)) is runs
    assert block.frozen_params - cached.frozen_params == block.params - cached.params
    assert (block.params > cached.params) is runs
    # Nothing of an encoder is repeated, kept or has gradients.
    for field in ("backward_input", "backward_weight", "recompute_full", "activation_bytes"):
        assert getattr(block, field) == getattr(cached, field)
    # Its work grows with the micro-batch, and so does nothing of its weights.
    one, one_cached = first_block(name, 1, cached_text=not text), first_block(name, 1)
    many, many_cached = first_block(name, 4, cached_text=not text), first_block(name, 4)
    extra = matmul_flops(one.forward) - matmul_flops(one_cached.forward)
    assert matmul_flops(many.forward) - matmul_flops(many_cached.forward) == pytest.approx(
        4 * extra
    )
    assert many.params - many_cached.params == one.params - one_cached.params


@pytest.mark.parametrize("name", ["sd-1.5", "pixart-alpha"])
def test_caching_never_slows_a_step(name: str) -> None:
    model, cluster = catalog.model(name), catalog.cluster("dgx-a100")
    layout = Layout(dp=8, micro_batch=4)

    def step(**job: bool) -> Any:
        stated = Job(global_batch=64, seq_len=model.seq_len, **job)
        return explain(step_problem(model, cluster, stated), layout)

    cached, text = step(), step(cached_text=False)
    both = step(cached_text=False, cached_latents=False)
    assert cached.step_time_s < text.step_time_s < both.step_time_s
    weights = [p.to_dict()["memory_bytes"]["weights"] for p in (cached, text, both)]
    assert weights == sorted(weights)
    assert weights[0] < weights[1]
    optimizer = {p.to_dict()["memory_bytes"]["optimizer"] for p in (cached, text, both)}
    assert len(optimizer) == 1
    # Frozen work is no part of the model's FLOPs, and what is assumed of it is said.
    assert cached.mfu > text.mfu > both.mfu
    assert sum("job.cached_" in warning for warning in cached.warnings) == 2
    assert not any("job.cached_" in warning for warning in both.warnings)


def test_autoencoders_halve_images_as_often_as_their_latents_say() -> None:
    assert {encoder.reduction for encoder in AUTOENCODERS.values()} == {8}
    with pytest.raises(UnknownNameError, match="encoder"):
        FrozenEncoder(name="clip")  # pyright: ignore[reportArgumentType]
