"""Configurations of diffusers' transformers that read text, as published, and the catalog's
entries."""

from typing import Any

import pytest

from perfmodel.catalog import model, model_from_config
from perfmodel.errors import PerfModelError
from perfmodel.spec import Job, Transformer
from perfmodel.workload import parameter_count, step_flops

SD3 = {"_class_name": "SD3Transformer2DModel", "caption_projection_dim": 1536, "sample_size": 128}
FLUX = {"_class_name": "FluxTransformer2DModel", "axes_dims_rope": [16, 56, 56], "patch_size": 1}
WAN: dict[str, Any] = {
    "_class_name": "WanTransformer3DModel",
    "patch_size": [1, 2, 2],
    "image_dim": None,
    "added_kv_proj_dim": None,
    "rope_max_seq_len": 1024,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "stable-diffusion-3-medium": SD3 | {"num_attention_heads": 24, "num_layers": 24},
    "stable-diffusion-3.5-large": SD3
    | {"num_attention_heads": 38, "num_layers": 38, "qk_norm": "rms_norm"},
    "black-forest-labs/FLUX.1-dev": FLUX | {"guidance_embeds": True},
    "black-forest-labs/FLUX.1-schnell": FLUX | {"guidance_embeds": False},
    "Qwen/Qwen-Image": {"_class_name": "QwenImageTransformer2DModel", "guidance_embeds": False},
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": WAN,
    "Wan-AI/Wan2.1-T2V-1.3B": WAN | {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "Lightricks/LTX-Video": {"_class_name": "LTXVideoTransformer3DModel", "patch_size_t": 1},
    "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS": {"_class_name": "PixArtTransformer2DModel"},
    "hunyuanvideo-community/HunyuanVideo": {"_class_name": "HunyuanVideoTransformer3DModel"},
}


def transformer(name: str) -> Transformer:
    known = model(name)
    assert isinstance(known, Transformer)
    return known


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_the_model_of_the_catalog(name: str) -> None:
    """Both have the same layers, parameters and products; lengths of text and image may differ,
    which a configuration does not state."""
    read, known = model_from_config(PUBLISHED[name]), transformer(name)
    assert read.stack == known.stack
    assert parameter_count(read) == parameter_count(known)
    assert read.inputs.text_condition is not None
    assert "VAE" in read.left_out
    # Encoders of the catalog's models can be part of a step; others are left out.
    assert known.inputs.encoders or "VAE" in known.left_out
    job = Job(global_batch=1, seq_len=1024)
    same_text = known.replace(text_condition=read.inputs.text_condition)
    assert step_flops(read, job) == step_flops(same_text, job)


def test_videos_keep_all_their_tokens() -> None:
    """A sequence longer than any of text's is no longest sequence."""
    assert model_from_config(WAN).seq_len == transformer("wan2.1-14b").seq_len == 75_600


def test_parts_without_a_place_are_named() -> None:
    """Of models from an image: the attention to it; of Stable Diffusion 3.5 medium: the second
    attention of its first layers."""
    from_image = model_from_config(WAN | {"image_dim": 1280, "added_kv_proj_dim": 5120})
    assert "cross-attention to a first image" in from_image.left_out
    conditions = model_from_config(
        {"_class_name": "PixArtTransformer2DModel", "use_additional_conditions": True}
    )
    assert "resolution and aspect ratio" in conditions.left_out
    with pytest.raises(PerfModelError, match="some layers attend to the image twice"):
        model_from_config(SD3 | {"dual_attention_layers": [0, 1, 2]})
    with pytest.raises(PerfModelError, match="not square"):
        model_from_config(WAN | {"patch_size": [2, 2, 2]})


def test_diffusion_models_have_their_usual_names() -> None:
    for name in ("flux-dev", "FLUX.1-dev", "flux_dev", "sd3", "sd3.5-large", "wan2.1-1.3b"):
        assert transformer(name).inputs.text_condition is not None
