"""U-Nets of latent diffusion, by their scales."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from perfmodel.errors import PerfModelError
from perfmodel.spec._documented import Stated
from perfmodel.spec.parts import FrozenEncoder
from perfmodel.units import require_whole


class UNetPart(NamedTuple):
    """One part of a U-Net in execution order, on square images."""

    name: str
    kind: Literal["convolution", "unit", "halving", "doubling"]
    """A residual unit, or a convolution that keeps, halves or doubles the image."""
    c_in: int
    """Channels of its input, with those of the skip connection."""
    c_out: int
    size_in: int
    """Input height = width."""
    skip: int = 0
    """Channels of its input that come from the way down, 0 for none."""
    is_read_again: bool = False
    """Whether the way up reads its output through a skip connection."""
    layers: int = 0
    """Transformer layers behind a residual unit."""
    heads: int = 0
    """Attention heads of these layers."""

    @property
    def size_out(self) -> int:
        """Output height = width."""
        if self.kind == "halving":
            return -(-self.size_in // 2)
        return 2 * self.size_in if self.kind == "doubling" else self.size_in


@dataclass(frozen=True, kw_only=True)
class UNet(Stated):
    """A U-Net that removes noise from the latents of images under a text (Stable Diffusion).

    Residual units with transformer layers behind them, at ever coarser scales and back, each unit
    of the way up beside what the way down left (Rombach et al., arXiv 2112.10752, section 3.3;
    diffusers `UNet2DConditionModel`).
    """

    name: str
    channels: tuple[int, ...]
    """Channels at each scale, from the finest."""
    layers_by_scale: tuple[int, ...]
    """Transformer layers behind each residual unit of a scale; 0 for none."""
    heads_by_scale: tuple[int, ...]
    """Attention heads of these layers."""
    middle_layers: int = 1
    """Transformer layers at the coarsest scale, between the ways down and up."""
    units: int = 2
    """Residual units of a scale on the way down; the way up has one more."""
    latent_size: int = 64
    """Height and width of the latents, an eighth of the image's."""
    latent_channels: int = 4
    """Channels of the latents."""
    text_tokens: int = 77
    """Tokens of a text."""
    text_width: int = 768
    """Elements that the encoder of texts makes of each token."""
    added_width: int = 0
    """Elements of further conditions, embedded like the time step (Stable Diffusion XL: sizes and
    the pooled text); 0 for none."""
    encoders: tuple[FrozenEncoder, ...] = ()
    """Frozen encoders that make latents and text; part of a step unless their outputs are cached
    (`Job.cached_latents`, `Job.cached_text`)."""
    seq_len: int = 1
    left_out: str = ""
    """Parts that are not counted."""
    source: str = ""
    aliases: tuple[str, ...] = ()

    kind = "unet"

    def __post_init__(self) -> None:
        owner = f"model {self.name}"
        positive = (
            "units",
            "latent_size",
            "latent_channels",
            "text_tokens",
            "text_width",
            "seq_len",
        )
        require_whole(owner, {name: getattr(self, name) for name in positive})
        require_whole(
            owner,
            {"middle_layers": self.middle_layers, "added_width": self.added_width},
            least=0,
        )
        if not self.channels:
            raise PerfModelError(f"{owner}: channels: at least one scale is needed")
        for name in ("layers_by_scale", "heads_by_scale"):
            if len(getattr(self, name)) != len(self.channels):
                raise PerfModelError(
                    f"{owner}: {name} needs a number for each of the {len(self.channels)} scales of channels"
                )
        for c, layers, heads in zip(
            self.channels, self.layers_by_scale, self.heads_by_scale, strict=True
        ):
            require_whole(owner, {"channels": c, "heads_by_scale": heads})
            require_whole(owner, {"layers_by_scale": layers}, least=0)
            if c % heads:
                raise PerfModelError(f"{owner}: {c} channels are not a multiple of {heads} heads")
        if self.latent_size % 2 ** (len(self.channels) - 1):
            raise PerfModelError(
                f"{owner}: latent_size={self.latent_size} cannot be halved {len(self.channels) - 1} times"
            )

    @property
    def embedding_width(self) -> int:
        """Elements of the embedded time step, which every residual unit adds to its image."""
        return 4 * self.channels[0]

    @cached_property
    def parts(self) -> tuple[UNetPart, ...]:
        """All parts in execution order, from the first convolution to the last."""
        size = self.latent_size
        c = self.channels[0]
        parts = [
            UNetPart("conv_in", "convolution", self.latent_channels, c, size, is_read_again=True)
        ]
        last = len(self.channels) - 1

        # Down: units of each scale, then a convolution that halves the image.
        for scale, width in enumerate(self.channels):
            for unit in range(self.units):
                parts.append(self._unit(f"down_{scale}.{unit}", scale, c, size, is_read_again=True))
                c = width
            if scale < last:
                halving = UNetPart(f"down_{scale}.half", "halving", c, c, size, is_read_again=True)
                parts.append(halving)
                size = halving.size_out
        skips = [part.c_out for part in parts]

        # At the coarsest scale: a unit with transformer layers, and one without.
        middle = UNetPart("middle.0", "unit", c, c, size)
        with_layers = middle._replace(layers=self.middle_layers, heads=self.heads_by_scale[last])
        parts += [with_layers, middle._replace(name="middle.1")]

        # Up: every unit reads beside its input what a part of the way down left, the last first.
        for scale in range(last, -1, -1):
            for unit in range(self.units + 1):
                skip = skips.pop()
                parts.append(self._unit(f"up_{scale}.{unit}", scale, c + skip, size, skip=skip))
                c = self.channels[scale]
            if scale:
                doubling = UNetPart(f"up_{scale}.double", "doubling", c, c, size)
                parts.append(doubling)
                size = doubling.size_out
        return (*parts, UNetPart("conv_out", "convolution", c, self.latent_channels, size))

    def _unit(
        self,
        name: str,
        scale: int,
        c_in: int,
        size: int,
        *,
        skip: int = 0,
        is_read_again: bool = False,
    ) -> UNetPart:
        """A residual unit of a scale with its transformer layers."""
        return UNetPart(
            name,
            "unit",
            c_in,
            self.channels[scale],
            size,
            skip,
            is_read_again,
            self.layers_by_scale[scale],
            self.heads_by_scale[scale],
        )
