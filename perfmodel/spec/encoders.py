"""Frozen encoders whose outputs a diffusion model is trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfmodel.spec._model import Model, Transformer
from perfmodel.spec.parts import FrozenEncoder
from perfmodel.spec.unet import UNet


def _clip(name: str, layers: int, hidden: int, heads: int, source: str) -> Transformer:
    """CLIP's text encoder: causal layers with biases, and a table of 77 positions."""
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=64,
        ffn_hidden=4 * hidden,
        vocab=49408,
        seq_len=77,
        dropout=False,
        source=source,
    )


def _t5_xxl(name: str, vocab: int, source: str) -> Transformer:
    """The encoder of T5 v1.1 XXL, with a table of `vocab` tokens."""
    return Transformer(
        name=name,
        layers=24,
        hidden=4096,
        heads=64,
        kv_heads=64,
        head_dim=64,
        ffn_hidden=10240,
        vocab=vocab,
        seq_len=512,
        causal=False,
        norm="rms_norm",
        gated_ffn=True,
        bias=False,
        dropout=False,
        positions="relative",
        source=source,
    )


TEXT_ENCODERS: Final[Mapping[str, Transformer]] = {
    "clip-l": _clip("clip-l", 12, 768, 12, "openai/clip-vit-large-patch14 config, text_config"),
    "openclip-h": _clip(
        "openclip-h", 23, 1024, 16, "stabilityai/stable-diffusion-2 text_encoder/config.json"
    ),
    "openclip-bigg": _clip(
        "openclip-bigg",
        32,
        1280,
        20,
        "stabilityai/stable-diffusion-xl-base-1.0 text_encoder_2/config.json",
    ),
    "t5-xxl": _t5_xxl("t5-xxl", 32128, "google/t5-v1_1-xxl config"),
    "umt5-xxl": _t5_xxl("umt5-xxl", 256384, "google/umt5-xxl config"),
}
"""Encoders of texts by name, as models whose head is not computed. UMT5 has its biases of relative
positions in every layer, T5 in the first alone; here both have them once (0.001 % of UMT5)."""


@dataclass(frozen=True, kw_only=True)
class Autoencoder:
    """The encoder of a variational autoencoder of images (Rombach et al., arXiv 2112.10752,
    appendix D.2; diffusers `AutoencoderKL`)."""

    channels: tuple[int, ...] = (128, 256, 512, 512)
    """Channels at each scale, from that of the image; every further one halves it."""
    units: int = 2
    """Residual units of a scale."""
    latent_channels: int
    """Channels of the latents; the encoder makes a mean and a variance of each."""
    quantisation: bool = False
    """A convolution of single pixels follows the encoder (Stable Diffusion up to XL)."""
    source: str

    @property
    def reduction(self) -> int:
        """Height of the image over that of its latents."""
        return int(2 ** (len(self.channels) - 1))


AUTOENCODERS: Final[Mapping[str, Autoencoder]] = {
    "sd-vae": Autoencoder(
        latent_channels=4,
        quantisation=True,
        source="stable-diffusion-v1-5/stable-diffusion-v1-5 vae/config.json; that of XL has the same sizes",
    ),
    "flux-vae": Autoencoder(
        latent_channels=16,
        source="black-forest-labs/FLUX.1-dev vae/config.json; that of Stable Diffusion 3 has the same sizes",
    ),
}
"""Encoders of images by name."""


def encoders_of(model: Model) -> tuple[FrozenEncoder, ...]:
    """Frozen encoders that make the inputs of a model; none for most models."""
    if isinstance(model, Transformer):
        return model.inputs.encoders
    return model.encoders if isinstance(model, UNet) else ()
