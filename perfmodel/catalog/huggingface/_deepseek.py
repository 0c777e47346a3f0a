"""DeepSeek's families of mixtures of experts: latent, sparse and compressed attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from annotated_types import Ge, Le

from perfmodel.catalog.huggingface._experts import LlamaWithExperts
from perfmodel.catalog.huggingface._layers import (
    feed_forward_letters,
    letters_of,
    mixer_words,
    mixers_of,
)
from perfmodel.catalog.huggingface._llama import (
    Count,
    CountOrNone,
    Fields,
    LatentLlama,
    Share,
)
from perfmodel.spec.parts import CompressedAttention, HyperConnections, Indexer


@dataclass(frozen=True, kw_only=True)
class DeepSeek(LatentLlama, LlamaWithExperts):
    """DeepSeek-V2 and V3, Kimi K2: multi-head latent attention and experts."""


@dataclass(frozen=True, kw_only=True)
class DeepSeekSparse(DeepSeek):
    """DeepSeek-V3.2 and GLM-5: an indexer before each attention, or before some, selects the keys
    that queries see (transformers models/glm_moe_dsa/configuration_glm_moe_dsa.py)."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    left_out: ClassVar[str] = (
        "attention is counted over all keys, of which the indexer selects some"
    )

    index_n_heads: Count
    index_head_dim: Count = 128
    indexer_types: tuple[str, ...] | None = None
    index_topk_pattern: str | tuple[str, ...] | None = None
    index_topk_freq: CountOrNone = 1
    index_skip_topk_offset: CountOrNone = 2
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    moe_layer_freq: Annotated[int, Ge(1), Le(1)] = 1

    def attention(self) -> list[str]:
        """Letters of `MIXERS` per layer for its attention, and its indexer if it has one."""
        n_layers = self.num_hidden_layers
        known = {"full": "I*", "shared": "*", "F": "I*", "S": "*"}
        if self.indexer_types is not None:
            return letters_of(self.indexer_types, known, "indexer_types", n_layers)
        if self.index_topk_pattern:
            return letters_of(tuple(self.index_topk_pattern), known, "index_topk_pattern", n_layers)
        # Every n-th layer, and the first ones.
        period = max(self.index_topk_freq, 1)
        letters = []
        for layer in range(n_layers):
            in_turn = max(layer - self.index_skip_topk_offset + 1, 0) % period == 0
            letters.append("I*" if in_turn else "*")
        return letters

    def fields(self) -> Fields:
        behind = feed_forward_letters(
            self.mlp_layer_types, self.num_hidden_layers, self.first_k_dense_replace
        )
        return super().fields() | {
            "mixers": mixers_of(self.attention(), behind),
            "indexer": Indexer(heads=self.index_n_heads, head_dim=self.index_head_dim),
        }


@dataclass(frozen=True, kw_only=True)
class HyV4(DeepSeekSparse):
    """HY 4: latent attention behind indexers, as of DeepSeek-V3.2, with a gate for each element of
    its result and a sink for each head; residual streams with hyper-connections that do not mix
    them (transformers models/hy_v4/modeling_hy_v4.py)."""

    num_key_value_heads: Count | None = None
    index_n_heads: Count = 16
    first_k_dense_replace: CountOrNone = 1
    hc_mult: Count = 4

    def attention(self) -> list[str]:
        if self.indexer_types is None and not self.index_topk_pattern:
            letters = []
            for layer in range(self.num_hidden_layers):
                letters.append("I*" if layer == 0 or (layer - 1) % 4 == 0 else "*")
            return letters
        return super().attention()

    def fields(self) -> Fields:
        fields = super().fields()
        behind = feed_forward_letters(
            self.mlp_layer_types, self.num_hidden_layers, self.first_k_dense_replace
        )
        layers = []
        for attention, feed_forward in zip(self.attention(), behind, strict=True):
            layers.append(f"H{attention}H{feed_forward}")
        return fields | {
            "mixers": mixer_words(layers),
            "attention_gate": True,
            "attention_sinks": True,
            "clamped_glu": True,
            "hyper_connections": HyperConnections(count=self.hc_mult, mixed=False),
        }


@dataclass(frozen=True, kw_only=True)
class DeepSeekV4(LlamaWithExperts):
    """DeepSeek-V4: attention in the window and to compressed keys, residual streams with
    hyper-connections, and experts in all layers; those of the first layers are chosen by the token
    itself (transformers models/deepseek_v4/configuration_deepseek_v4.py). The module for further
    tokens is left out."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    q_lora_rank: Count
    head_dim: Count = 512
    qk_rope_head_dim: Count | None = None
    partial_rotary_factor: Share | None = None
    num_key_value_heads: Annotated[int, Ge(1), Le(1)] = 1
    sliding_window: Count = 128
    o_groups: Count = 8
    o_lora_rank: Count = 1024
    index_n_heads: Count = 64
    index_head_dim: Count = 128
    index_topk: Count = 512
    hc_mult: Count = 4
    layer_types: tuple[str, ...] | None = None
    compress_ratios: tuple[CountOrNone, ...] | None = None
    compress_rates: Mapping[str, Count] | None = None
    compress_rate_csa: Count | None = None
    compress_rate_hca: Count | None = None

    def attention(self) -> list[str]:
        """The attention of each layer, as its letter in `MIXERS`."""
        n_layers = self.num_hidden_layers
        if self.layer_types is not None:
            return letters_of(self.layer_types[:n_layers], _V4_LETTERS, "layer_types", n_layers)
        # Older files list the tokens of a compressed key, of the modules for further tokens too.
        if self.compress_ratios is not None:
            ratios = [str(ratio) for ratio in self.compress_ratios[:n_layers]]
            known = {"0": "Y", "4": "F", "128": "G"}
            return letters_of(ratios, known, "compress_ratios", n_layers)
        return ["F" if layer >= 2 and layer % 2 else "G" for layer in range(n_layers)]

    def compressed(self) -> CompressedAttention:
        """Read the sizes of attention over compressed keys."""
        rates = self.compress_rates or {}
        rope_dim = self.qk_rope_head_dim or round(
            self.head_dim * (self.partial_rotary_factor or 64 / 512)
        )
        return CompressedAttention(
            q_lora_rank=self.q_lora_rank,
            output_groups=self.o_groups,
            output_rank=self.o_lora_rank,
            rope_dim=max(1, rope_dim),
            sparse_rate=self.compress_rate_csa or rates.get("compressed_sparse_attention", 4),
            heavy_rate=self.compress_rate_hca or rates.get("heavily_compressed_attention", 128),
            index_heads=self.index_n_heads,
            index_dim=self.index_head_dim,
            index_topk=self.index_topk,
        )

    def fields(self) -> Fields:
        return super().fields() | {
            "mixers": mixer_words([f"H{letter}HE" for letter in self.attention()]),
            "compressed_attention": self.compressed(),
            "hyper_connections": HyperConnections(count=self.hc_mult),
            "clamped_glu": True,
            "mtp_layers": 0,
        }


_V4_LETTERS: Final[Mapping[str, str]] = {
    "sliding_attention": "Y",
    "compressed_sparse_attention": "F",
    "heavily_compressed_attention": "G",
}
"""Letters of `MIXERS` for the words of DeepSeek-V4's `layer_types`."""
