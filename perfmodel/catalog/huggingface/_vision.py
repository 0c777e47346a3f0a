"""Configurations of transformers on patches of images: ViT and SigLIP of Hugging Face, DiT of
diffusers."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from perfmodel.catalog.huggingface._llama import Count, Fields, Layers, activation, plain_sizes
from perfmodel.spec.parts import AdaLN, Patches


@dataclass(frozen=True, kw_only=True)
class Vit:
    """ViT; without classes (`id2label`) it has no head, and its pooler is left out."""

    CLASS_TOKENS: ClassVar[int] = 1

    hidden_size: Count = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 12
    intermediate_size: Count = 3072
    image_size: Count = 224
    patch_size: Count = 16
    num_channels: Count = 3
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    id2label: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> Fields:
        patches = Patches(
            image_size=self.image_size,
            patch_size=self.patch_size,
            channels=self.num_channels,
            class_tokens=self.CLASS_TOKENS,
        )
        sizes = plain_sizes(
            self.num_hidden_layers,
            self.hidden_size,
            self.num_attention_heads,
            self.intermediate_size,
            len(self.id2label),
            patches.tokens,
        )
        # Every patch sees every other one.
        return sizes | {
            "patches": patches,
            "causal": False,
            "tied_embeddings": False,
            "activation": activation(self.hidden_act),
            "dropout": self.hidden_dropout_prob > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Siglip(Vit):
    """SigLIP's vision tower as language models use it: without its pooling head."""

    CLASS_TOKENS: ClassVar[int] = 0

    hidden_act: str = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class Dit:
    """DiT on latents, with one embedding of time step and class for all layers, as its authors
    train it (diffusers gives each layer its own)."""

    num_attention_heads: Count = 16
    attention_head_dim: Count = 72
    num_layers: Layers = 28
    in_channels: Count = 4
    out_channels: Count | None = None
    sample_size: Count = 32
    patch_size: Count = 2
    num_embeds_ada_norm: Count = 1000

    def fields(self) -> Fields:
        patches = Patches(
            image_size=self.sample_size,
            patch_size=self.patch_size,
            channels=self.in_channels,
            out_channels=self.out_channels or self.in_channels,
        )
        # Diffusers states the size of a head and not the hidden size.
        hidden = self.num_attention_heads * self.attention_head_dim
        heads = self.num_attention_heads
        return plain_sizes(self.num_layers, hidden, heads, None, 0, patches.tokens) | {
            "patches": patches,
            "adaln": AdaLN(classes=self.num_embeds_ada_norm),
            "causal": False,
            "dropout": False,
            "tied_embeddings": False,
            "positions": "none",
        }
