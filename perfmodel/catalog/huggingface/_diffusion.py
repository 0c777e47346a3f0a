"""Configurations of diffusers' transformers that read text.

They state neither the size of images nor the number of text tokens: lengths are those of the
images that the first of each family were released for.
"""

from dataclasses import dataclass
from typing import ClassVar

from perfmodel.catalog.huggingface._layers import mixer_words
from perfmodel.catalog.huggingface._llama import Count, CountOrNone, Fields, Layers, plain_sizes
from perfmodel.catalog.huggingface._unknown import CannotDescribeError
from perfmodel.spec.parts import AdaLN, Patches, TextCondition

LEFT_OUT = (
    "text encoders and the VAE are left out; their outputs are taken to be computed before the step"
)
"""What the step of a diffusion transformer does not have."""


@dataclass(frozen=True, kw_only=True)
class TextToImage:
    """Sizes that the transformers of all text-to-image models name alike."""

    TEXT_TOKENS: ClassVar[int]
    """Tokens of text."""
    CROSS_ATTENTION: ClassVar[str] = mixer_words(["*X-"])
    """Layers with cross-attention to text."""

    num_attention_heads: Count
    attention_head_dim: Count
    num_layers: Layers
    in_channels: Count
    out_channels: Count | None = None

    @property
    def left_out(self) -> str:
        """Parts of the model that are not counted, in words."""
        return LEFT_OUT

    def image(self, side: int, patch: int, *, width: int = 0, frames: int = 1) -> Patches:
        """Patches of latents of this size."""
        return Patches(
            image_size=side,
            image_width=width,
            frames=frames,
            patch_size=patch,
            channels=self.in_channels,
            out_channels=self.out_channels or self.in_channels,
        )

    def conditioned(
        self,
        patches: Patches,
        text: TextCondition,
        adaln: AdaLN,
        mixers: str,
        *,
        layers: int = 0,
        ffn: int | None = None,
        qk_norm: bool = False,
    ) -> Fields:
        """Fields of a model with these parts.

        Args:
            layers: number of layers of all kinds; 0: as `num_layers`.
            ffn: inner size of the feed-forward; None: four times the hidden size.
            qk_norm: queries and keys are normalised.
        """
        heads = self.num_attention_heads
        hidden = heads * self.attention_head_dim
        sizes = plain_sizes(layers or self.num_layers, hidden, heads, ffn, 0, patches.tokens)
        return sizes | {
            "patches": patches,
            "text_condition": text,
            "adaln": adaln,
            "mixers": mixers,
            "qk_norm": qk_norm,
            "causal": False,
            "dropout": False,
            "tied_embeddings": False,
            "positions": "rope",
        }


@dataclass(frozen=True, kw_only=True)
class Wan(TextToImage):
    """Wan 2.1 and 2.2, with 81 frames of 1280 x 720."""

    TEXT_TOKENS: ClassVar[int] = 512

    num_attention_heads: Count = 40
    attention_head_dim: Count = 128
    num_layers: Layers = 40
    in_channels: Count = 16
    patch_size: tuple[Count, Count, Count] | Count = (1, 2, 2)
    text_dim: Count = 4096
    freq_dim: Count = 256
    ffn_dim: Count = 13824
    cross_attn_norm: bool = True
    qk_norm: str | None = "rms_norm_across_heads"
    image_dim: CountOrNone = 0
    added_kv_proj_dim: CountOrNone = 0

    @property
    def left_out(self) -> str:
        if not (self.image_dim or self.added_kv_proj_dim):
            return LEFT_OUT
        return f"{LEFT_OUT}; the cross-attention to a first image is left out too"

    def fields(self) -> Fields:
        frames, rows, columns = (
            (self.patch_size,) * 3 if isinstance(self.patch_size, int) else self.patch_size
        )
        if (frames, rows) != (1, columns):
            raise CannotDescribeError("its patches are not square and one frame deep")
        text = TextCondition(
            tokens=self.TEXT_TOKENS,
            width=self.text_dim,
            projections=2,
            cross_norm=self.cross_attn_norm,
        )
        fields = self.conditioned(
            self.image(90, rows, width=160, frames=21),
            text,
            AdaLN(frequencies=self.freq_dim, shared=True),
            self.CROSS_ATTENTION,
            ffn=self.ffn_dim,
            qk_norm=bool(self.qk_norm),
        )
        return fields | {"qk_norm_of_all_heads": self.qk_norm == "rms_norm_across_heads"}


@dataclass(frozen=True, kw_only=True)
class LtxVideo(TextToImage):
    """LTX-Video, with 121 frames of 768 x 512."""

    TEXT_TOKENS: ClassVar[int] = 128

    num_attention_heads: Count = 32
    attention_head_dim: Count = 64
    num_layers: Layers = 28
    in_channels: Count = 128
    patch_size: Count = 1
    caption_channels: Count = 4096

    def fields(self) -> Fields:
        text = TextCondition(tokens=self.TEXT_TOKENS, width=self.caption_channels, projections=2)
        patches = self.image(16, self.patch_size, width=24, frames=16)
        fields = self.conditioned(
            patches, text, AdaLN(shared=True), self.CROSS_ATTENTION, qk_norm=True
        )
        return fields | {"norm": "rms_norm", "qk_norm_of_all_heads": True}


@dataclass(frozen=True, kw_only=True)
class PixArt(TextToImage):
    """PixArt-sigma."""

    TEXT_TOKENS: ClassVar[int] = 300

    num_attention_heads: Count = 16
    attention_head_dim: Count = 72
    num_layers: Layers = 28
    in_channels: Count = 4
    out_channels: Count | None = 8
    sample_size: Count = 128
    patch_size: Count = 2
    caption_channels: Count = 4096
    use_additional_conditions: bool = False

    @property
    def left_out(self) -> str:
        if not self.use_additional_conditions:
            return LEFT_OUT
        return f"{LEFT_OUT}; embeddings of resolution and aspect ratio are left out too"

    def fields(self) -> Fields:
        text = TextCondition(tokens=self.TEXT_TOKENS, width=self.caption_channels, projections=2)
        patches = self.image(self.sample_size, self.patch_size)
        fields = self.conditioned(patches, text, AdaLN(shared=True), self.CROSS_ATTENTION)
        return fields | {"positions": "none"}


@dataclass(frozen=True, kw_only=True)
class StableDiffusion3(TextToImage):
    """Stable Diffusion 3 and 3.5 large, with 77 tokens of CLIP and 77 of T5."""

    TEXT_TOKENS: ClassVar[int] = 154

    num_attention_heads: Count = 18
    attention_head_dim: Count = 64
    num_layers: Layers = 18
    in_channels: Count = 16
    out_channels: Count | None = 16
    sample_size: Count = 128
    patch_size: Count = 2
    joint_attention_dim: Count = 4096
    pooled_projection_dim: Count = 2048
    qk_norm: str | None = None
    dual_attention_layers: tuple[CountOrNone, ...] = ()

    def fields(self) -> Fields:
        if self.dual_attention_layers:
            raise CannotDescribeError("some layers attend to the image twice")
        text = TextCondition(
            tokens=self.TEXT_TOKENS,
            width=self.joint_attention_dim,
            pooled=self.pooled_projection_dim,
        )
        # The text ends in the last layer.
        fields = self.conditioned(
            self.image(self.sample_size, self.patch_size),
            text,
            AdaLN(),
            mixer_words(["D"] * (self.num_layers - 1) + ["O"]),
            qk_norm=bool(self.qk_norm),
        )
        return fields | {"positions": "none"}


@dataclass(frozen=True, kw_only=True)
class TwoStreamsThenOne(TextToImage):
    """Layers of two streams, and then of one, with the pooled text as a further condition."""

    TEXT_TOKENS: ClassVar[int]

    num_attention_heads: Count = 24
    attention_head_dim: Count = 128
    num_layers: Layers = 19
    num_single_layers: CountOrNone = 38
    pooled_projection_dim: Count = 768
    guidance_embeds: bool = False

    def two_streams_then_one(self, patches: Patches, text_width: int) -> Fields:
        """Fields of the described model, whose encoder makes `text_width` elements of a token."""
        text = TextCondition(
            tokens=self.TEXT_TOKENS, width=text_width, pooled=self.pooled_projection_dim
        )
        return self.conditioned(
            patches,
            text,
            AdaLN(guidance=self.guidance_embeds),
            mixer_words(["D"] * self.num_layers + ["N"] * self.num_single_layers),
            layers=self.num_layers + self.num_single_layers,
            qk_norm=True,
        )


@dataclass(frozen=True, kw_only=True)
class Flux(TwoStreamsThenOne):
    """FLUX.1, with images of 1024 x 1024 whose patches of 2 x 2 latents are channels already."""

    TEXT_TOKENS: ClassVar[int] = 512

    in_channels: Count = 64
    patch_size: Count = 1
    joint_attention_dim: Count = 4096

    def fields(self) -> Fields:
        patches = self.image(64, self.patch_size)
        return self.two_streams_then_one(patches, self.joint_attention_dim)


@dataclass(frozen=True, kw_only=True)
class HunyuanVideo(TwoStreamsThenOne):
    """HunyuanVideo, with 129 frames of 1280 x 720."""

    TEXT_TOKENS: ClassVar[int] = 256

    num_layers: Layers = 20
    num_single_layers: CountOrNone = 40
    num_refiner_layers: CountOrNone = 2
    in_channels: Count = 16
    patch_size: Count = 2
    text_embed_dim: Count = 4096
    guidance_embeds: bool = True

    @property
    def left_out(self) -> str:
        return f"{LEFT_OUT}; the refiner of text tokens ({self.num_refiner_layers} layers) is left out too"

    def fields(self) -> Fields:
        patches = self.image(90, self.patch_size, width=160, frames=33)
        return self.two_streams_then_one(patches, self.text_embed_dim)


@dataclass(frozen=True, kw_only=True)
class QwenImage(TextToImage):
    """Qwen-Image, with images of 1024 x 1024 whose patches of 2 x 2 latents are channels of the
    input already."""

    TEXT_TOKENS: ClassVar[int] = 512

    num_attention_heads: Count = 24
    attention_head_dim: Count = 128
    num_layers: Layers = 60
    in_channels: Count = 64
    out_channels: Count | None = 16
    patch_size: Count = 2
    joint_attention_dim: Count = 3584

    def fields(self) -> Fields:
        # Input channels are those of a patch, output channels those of a latent.
        patches = Patches(
            image_size=128,
            patch_size=self.patch_size,
            channels=self.in_channels // self.patch_size**2,
            out_channels=self.out_channels or self.in_channels,
        )
        text = TextCondition(
            tokens=self.TEXT_TOKENS, width=self.joint_attention_dim, input_norm=True
        )
        mixers = mixer_words(["D"] * self.num_layers)
        return self.conditioned(patches, text, AdaLN(), mixers, qk_norm=True)
