"""Configurations of diffusers' U-Nets."""

from dataclasses import dataclass
from typing import Any, ClassVar

from perfmodel.catalog.huggingface._llama import Count
from perfmodel.errors import PerfModelError

_WITH_LAYERS = "CrossAttnDownBlock2D"
_WITHOUT_LAYERS = "DownBlock2D"


@dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """`UNet2DConditionModel`, the network of Stable Diffusion."""

    CLASS_NAME: ClassVar[str] = "UNet2DConditionModel"

    block_out_channels: tuple[Count, ...] = (320, 640, 1280, 1280)
    down_block_types: tuple[str, ...] = (_WITH_LAYERS, _WITH_LAYERS, _WITH_LAYERS, _WITHOUT_LAYERS)
    layers_per_block: Count = 2
    attention_head_dim: Count | tuple[Count, ...] = 8
    """In spite of its name the number of heads (diffusers, `UNet2DConditionModel.__init__`)."""
    num_attention_heads: Count | tuple[Count, ...] | None = None
    transformer_layers_per_block: Count | tuple[Count, ...] = 1
    cross_attention_dim: Count = 1280
    sample_size: Count = 64
    in_channels: Count = 4
    out_channels: Count = 4
    addition_embed_type: str | None = None
    projection_class_embeddings_input_dim: Count | None = None

    def fields(self) -> dict[str, Any]:
        """Fields of `perfmodel.spec.UNet`.

        Raises:
            PerfModelError: for blocks of another kind, or other channels at the end.
        """
        scales = len(self.block_out_channels)
        if len(self.down_block_types) != scales:
            raise PerfModelError(
                f"it has {scales} block_out_channels and {len(self.down_block_types)} down_block_types"
            )
        unknown = {*self.down_block_types} - {_WITH_LAYERS, _WITHOUT_LAYERS}
        if unknown:
            raise PerfModelError(f"it has blocks of the kind {', '.join(sorted(unknown))}")
        if self.in_channels != self.out_channels:
            raise PerfModelError(
                f"it has {self.in_channels} channels at its input and {self.out_channels} at its output"
            )
        layers = _by_scale(self.transformer_layers_per_block, scales)
        with_layers = [kind == _WITH_LAYERS for kind in self.down_block_types]
        adds = self.addition_embed_type == "text_time"
        return {
            "channels": self.block_out_channels,
            "layers_by_scale": tuple(
                n if has else 0 for n, has in zip(layers, with_layers, strict=True)
            ),
            "heads_by_scale": _by_scale(
                self.num_attention_heads or self.attention_head_dim, scales
            ),
            "middle_layers": layers[-1],
            "units": self.layers_per_block,
            "latent_size": self.sample_size,
            "latent_channels": self.in_channels,
            "text_width": self.cross_attention_dim,
            "added_width": (self.projection_class_embeddings_input_dim or 0) if adds else 0,
        }


def _by_scale(numbers: int | tuple[int, ...], scales: int) -> tuple[int, ...]:
    """A number for each scale, of one for all or of a list."""
    return numbers if isinstance(numbers, tuple) else (numbers,) * scales
