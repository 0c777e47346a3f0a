"""What transformers read beside rows of a token table: patches of images, spectrograms, narrow
embeddings, texts, and outputs of frozen encoders."""

from dataclasses import dataclass
from typing import Literal, get_args

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec._documented import Stated
from perfmodel.units import require_whole


@dataclass(frozen=True, kw_only=True)
class Patches(Stated):
    """Input of a vision encoder or diffusion transformer: images or videos (or latents of these)
    in square patches."""

    image_size: int
    """Height in pixels, and width where no other is stated."""
    patch_size: int
    """Height and width of a patch in pixels."""
    image_width: int = 0
    """Width in pixels; 0: as high."""
    frames: int = 1
    """Images of a video."""
    patch_frames: int = 1
    """Images that a patch goes through."""
    channels: int = 3
    """Numbers of a pixel."""
    class_tokens: int = 0
    """Learned tokens beside the patches (ViT: 1)."""
    out_channels: int = 0
    """Channels that are predicted for every pixel (diffusion: noise, and its variance); 0 for
    encoders."""

    def __post_init__(self) -> None:
        require_whole(
            "patches",
            {
                name: getattr(self, name)
                for name in ("image_size", "patch_size", "frames", "patch_frames", "channels")
            },
        )
        require_whole(
            "patches",
            {name: getattr(self, name) for name in ("image_width", "class_tokens", "out_channels")},
            least=0,
        )
        # At least one patch in every direction.
        for size, patch in (
            ("image_size", "patch_size"),
            ("image_width", "patch_size"),
            ("frames", "patch_frames"),
        ):
            stated = getattr(self, size)
            if stated and stated < getattr(self, patch):
                raise PerfModelError(
                    f"patches: {patch}={getattr(self, patch)} exceeds {size}={stated}"
                )

    @property
    def tokens(self) -> int:
        """Number of tokens per image or video."""
        rows = self.image_size // self.patch_size
        columns = (self.image_width or self.image_size) // self.patch_size
        return rows * columns * (self.frames // self.patch_frames) + self.class_tokens

    @property
    def pixels(self) -> int:
        """Number of pixels per patch."""
        return self.patch_size**2 * self.patch_frames

    @property
    def elements(self) -> int:
        """Number of elements per patch."""
        return self.pixels * self.channels

    @property
    def out_elements(self) -> int:
        """Output elements per patch."""
        return self.pixels * self.out_channels


@dataclass(frozen=True, kw_only=True)
class Spectrogram(Stated):
    """Input of a speech encoder (Whisper, arXiv 2212.04356, section 2.2): a spectrogram, turned
    into tokens by two convolutions over time, the second with a stride."""

    channels: int
    """Frequencies of a spectrum."""
    kernel: int = 3
    """Instants that each convolution sees."""
    stride: int = 2
    """Instants that become one token."""

    def __post_init__(self) -> None:
        require_whole("spectrogram", vars(self))


@dataclass(frozen=True, kw_only=True)
class NarrowEmbedding(Stated):
    """A token embedding narrower than the layers: one matrix product widens it to the hidden size,
    and another narrows the hidden states before the vocabulary projection."""

    width: int
    """Elements of a row."""
    all_tables: bool = False
    """Positions and segments are equally narrow, and the sum of all embeddings is normalised before
    the product (ELECTRA)."""
    bias: bool = False
    """The products have biases (ELECTRA; not OPT-350M)."""

    def __post_init__(self) -> None:
        require_whole("narrow_embedding", {"width": self.width})


@dataclass(frozen=True, kw_only=True)
class TextCondition(Stated):
    """Text that a diffusion transformer makes images or videos of: the outputs of text encoders,
    which are computed before the step."""

    tokens: int
    """Tokens of text for every image or video."""
    width: int
    """Elements of a token as it comes from the encoders."""
    input_norm: bool = False
    """An RMS norm of these elements stands before the first product (Qwen-Image)."""
    projections: int = 1
    """Products that make a hidden state of a token; after each but the last stands a GELU (PixArt
    and Wan have two)."""
    pooled: int = 0
    """Elements of one embedding of the whole text, which passes two products and is added to that
    of the time step (Stable Diffusion 3, arXiv 2403.03206, section 4); 0 for none."""
    cross_norm: bool = False
    """Cross-attention to the text has a norm before it, with parameters of its own (Wan)."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("tokens", "width", "projections")}
        require_whole("text_condition", sizes)
        require_whole("text_condition", {"pooled": self.pooled}, least=0)


EncoderName = Literal[
    "clip-l", "openclip-h", "openclip-bigg", "t5-xxl", "umt5-xxl", "sd-vae", "flux-vae"
]
"""Frozen encoders of texts and images; `perfmodel.spec.encoders` has their sizes."""


@dataclass(frozen=True, kw_only=True)
class FrozenEncoder(Stated):
    """An encoder that makes the inputs of a diffusion model, without gradients."""

    name: EncoderName
    """The encoder's name."""
    tokens: int = 77
    """Tokens of each text; without meaning for images."""

    @property
    def is_of_text(self) -> bool:
        """Whether it encodes texts, not images."""
        return not self.name.endswith("-vae")

    def __post_init__(self) -> None:
        require_whole("encoders", {"tokens": self.tokens})
        if self.name not in get_args(EncoderName):
            raise UnknownNameError("encoder", str(self.name), get_args(EncoderName))
