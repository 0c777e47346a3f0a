"""Hugging Face configurations of hybrids of attention and gated delta nets or linear attention:
Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear, Bailing and MiniMax-01."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

from annotated_types import Ge, Le

from perfmodel.catalog.huggingface._deepseek import DeepSeek
from perfmodel.catalog.huggingface._experts import EXPERT_KEYS, LlamaWithExperts, Qwen2Moe
from perfmodel.catalog.huggingface._layers import (
    feed_forward_letters,
    letters_of,
    mixer_words,
    mixers_of,
)
from perfmodel.catalog.huggingface._llama import Count, CountOrNone, Fields, Llama
from perfmodel.spec.parts import DeltaNet, Experts


@dataclass(frozen=True, kw_only=True)
class DeltaNetKeys:
    """Keys of Qwen3-Next and Qwen3.5 for the sizes of their gated delta nets."""

    linear_num_value_heads: Count
    linear_num_key_heads: Count
    linear_value_head_dim: Count
    linear_key_head_dim: Count
    linear_conv_kernel_dim: Count = 4
    full_attention_interval: Annotated[int, Ge(1), Le(1000)] = 4

    def delta_nets(self, feed_forward: str) -> Fields:
        """Fields of a stack of these delta nets, with the letter of `MIXERS` for what follows in
        every layer."""
        delta_net = DeltaNet(
            heads=self.linear_num_value_heads,
            key_heads=self.linear_num_key_heads,
            head_dim=self.linear_value_head_dim,
            key_dim=self.linear_key_head_dim,
            conv_kernel=self.linear_conv_kernel_dim,
        )
        return _stack_of_delta_nets(delta_net, self.full_attention_interval, feed_forward)


def _stack_of_delta_nets(delta_net: DeltaNet, period: int, feed_forward: str) -> Fields:
    """Fields of a stack in which every n-th layer attends and the others have a gated delta net.

    Args:
        delta_net: sizes of a delta net.
        period: n.
        feed_forward: the letter of `MIXERS` for what follows in every layer.
    """
    # `Transformer.mixers` repeats a pattern over the layers.
    layers = ["L" + feed_forward] * (period - 1) + ["*" + feed_forward]
    return {
        "qk_norm": True,
        "attention_gate": True,
        "mixers": mixer_words(layers),
        "delta_net": delta_net,
    }


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(Qwen2Moe, DeltaNetKeys):
    """Qwen3-Next and Qwen3.5 with experts: three gated delta nets, then gated attention; experts in
    every layer."""

    decoder_sparse_step: Annotated[int, Ge(1), Le(1)] = 1

    def fields(self) -> Fields:
        return super().fields() | {"qkv_bias": self.attention_bias} | self.delta_nets("E")


@dataclass(frozen=True, kw_only=True)
class LaraMini(Qwen3Next):
    """Lara mini: delta nets among attentions in a window and full ones, without gates on attention
    or on the shared expert (transformers models/lara_mini/modeling_lara_mini.py)."""

    sliding_window: CountOrNone = 512
    use_sliding_window: bool = True

    def experts(self) -> Experts:
        return replace(super().experts(), shared_gate=False)

    def fields(self) -> Fields:
        # The layers that the class repeats where a configuration does not list them.
        period = ["LE", "WE", "LE", "*E", "WE"]
        return super().fields() | {"attention_gate": False, "mixers": mixer_words(period)}


@dataclass(frozen=True, kw_only=True)
class Qwen35(Llama, DeltaNetKeys):
    """Qwen3.5 without experts."""

    def fields(self) -> Fields:
        return super().fields() | self.delta_nets("-")


@dataclass(frozen=True, kw_only=True)
class OlmoHybrid(Llama):
    """OLMo Hybrid: gated delta nets in place of three of four attentions. Those normalise queries
    and keys of all heads (transformers models/olmo_hybrid/modeling_olmo_hybrid.py); their norms are
    counted at the input, as the others'."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    layer_types: tuple[str, ...] = ()
    linear_num_value_heads: Count | None = None
    linear_num_key_heads: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_conv_kernel_dim: Count = 4

    def delta_net(self) -> DeltaNet:
        """Sizes of a delta net: unless stated, as many heads as attention has, keys of three
        quarters of the hidden size, and values twice as wide."""
        key_heads = self.linear_num_key_heads or self.num_attention_heads
        key_dim = self.linear_key_head_dim or 3 * self.hidden_size // (4 * key_heads)
        return DeltaNet(
            heads=self.linear_num_value_heads or self.num_attention_heads,
            key_heads=key_heads,
            head_dim=self.linear_value_head_dim or 2 * key_dim,
            key_dim=key_dim,
            conv_kernel=self.linear_conv_kernel_dim,
        )

    def fields(self) -> Fields:
        fields = super().fields() | _stack_of_delta_nets(self.delta_net(), 4, "-")
        if self.layer_types:
            letters = letters_of(
                self.layer_types, _DELTA_LETTERS, "layer_types", self.num_hidden_layers
            )
            fields["mixers"] = mixer_words([letter + "-" for letter in letters])
        return fields | {"attention_gate": False, "qk_norm_of_all_heads": True}


@dataclass(frozen=True, kw_only=True)
class KimiDeltaLayers:
    """`linear_attn_config` of Kimi Linear: numbers of the layers of each kind, from 1, and sizes of
    delta nets."""

    full_attn_layers: tuple[Count, ...] = ()
    kda_layers: tuple[Count, ...] = ()
    num_heads: Count = 32
    head_dim: Count = 128
    short_conv_kernel_size: Count = 4


@dataclass(frozen=True, kw_only=True)
class KimiLinear(DeepSeek):
    """Kimi Linear (arXiv 2510.26692): Kimi Delta Attention, with latent attention in every fourth
    layer, and experts. Configurations omit what equals the defaults of the Hugging Face class."""

    READS_LAYER_TYPES: ClassVar[bool] = True
    ALIASES: ClassVar[Mapping[str, str]] = {
        **EXPERT_KEYS,
        "model_max_length": "max_position_embeddings",
    }

    first_k_dense_replace: CountOrNone = 1
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    linear_attn_config: KimiDeltaLayers | None = None
    linear_num_heads: Count | None = 32
    linear_head_dim: Count | None = 128
    linear_conv_kernel_dim: Count | None = 4

    def attention(self) -> list[str]:
        """The attention or delta net of each layer, as its letter in `MIXERS`."""
        n_layers = self.num_hidden_layers
        if self.layer_types is not None:
            return letters_of(self.layer_types, _DELTA_LETTERS, "layer_types", n_layers)
        listed = self.linear_attn_config
        if listed is not None and listed.full_attn_layers:
            return [
                "*" if layer + 1 in listed.full_attn_layers else "L" for layer in range(n_layers)
            ]
        return ["*" if layer and layer % 4 == 0 else "L" for layer in range(n_layers)]

    def delta_net(self) -> DeltaNet:
        """Sizes of a delta net, whose gates and decays are made through as many elements as a head
        has."""
        listed = self.linear_attn_config
        if listed is None:
            listed = KimiDeltaLayers(
                num_heads=self.linear_num_heads or 32,
                head_dim=self.linear_head_dim or 128,
                short_conv_kernel_size=self.linear_conv_kernel_dim or 4,
            )
        return DeltaNet(
            heads=listed.num_heads,
            key_heads=listed.num_heads,
            head_dim=listed.head_dim,
            key_dim=listed.head_dim,
            conv_kernel=listed.short_conv_kernel_size,
            channel_decays=True,
            gate_rank=listed.head_dim,
        )

    def fields(self) -> Fields:
        behind = feed_forward_letters(
            self.mlp_layer_types, self.num_hidden_layers, self.first_k_dense_replace
        )
        return super().fields() | {
            "mixers": mixers_of(self.attention(), behind),
            "delta_net": self.delta_net(),
        }


@dataclass(frozen=True, kw_only=True)
class BailingHybrid(KimiLinear):
    """Ling 3: Kimi Delta Attention with full projections to gates and decays; latent attention,
    each head with a gate, ends every group of layers (transformers
    models/bailing_hybrid/modeling_bailing_hybrid.py)."""

    first_k_dense_replace: CountOrNone = 2
    linear_num_heads: Count | None = None
    linear_head_dim: Count | None = None
    linear_conv_kernel_dim: Count | None = None
    short_conv_kernel_size: Count = 4
    layer_group_size: Count = 6
    num_mtp_layers: CountOrNone = 0

    def attention(self) -> list[str]:
        if self.layer_types is not None:
            return super().attention()
        return [
            "*" if (layer + 1) % self.layer_group_size == 0 else "L"
            for layer in range(self.num_hidden_layers)
        ]

    def delta_net(self) -> DeltaNet:
        # As many heads as attention has. transformers writes their number and size under keys of
        # its own, because it keeps that of rotated elements under `head_dim`.
        heads = self.linear_num_heads or self.num_attention_heads
        head_dim = self.linear_head_dim or self.head_dim or 128
        return DeltaNet(
            heads=heads,
            key_heads=heads,
            head_dim=head_dim,
            key_dim=head_dim,
            conv_kernel=self.linear_conv_kernel_dim or self.short_conv_kernel_size,
            channel_decays=True,
        )

    def fields(self) -> Fields:
        fields = super().fields() | {"head_gate": True}
        return fields | {"mtp_layers": self.num_mtp_layers or self.num_nextn_predict_layers}


@dataclass(frozen=True, kw_only=True)
class MiniMax(LlamaWithExperts):
    """MiniMax-01 and M1 (arXiv 2501.08313): lightning attention, whose heads have fixed decays,
    softmax attention in some layers, and experts in all (transformers
    models/minimax/modeling_minimax.py)."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    num_key_value_heads: Count = 8
    max_position_embeddings: Count = 131_072
    block_size: Count = 256
    layer_types: tuple[str, ...] | None = None
    attn_type_list: tuple[CountOrNone, ...] | None = None

    def attention(self) -> list[str]:
        """The attention of each layer, as its letter in `MIXERS`."""
        n_layers = self.num_hidden_layers
        if self.layer_types is not None:
            return letters_of(self.layer_types, _DELTA_LETTERS, "layer_types", n_layers)
        # The authors' own code lists a 1 for each layer with softmax attention.
        if self.attn_type_list is not None:
            flags = [str(flag) for flag in self.attn_type_list]
            return letters_of(flags, {"0": "L", "1": "*"}, "attn_type_list", n_layers)
        return ["*" if layer % 2 == 0 else "L" for layer in range(n_layers)]

    def fields(self) -> Fields:
        letters = self.attention()
        fields = super().fields()
        linear_attention = DeltaNet(
            heads=self.num_attention_heads,
            key_heads=self.num_attention_heads,
            head_dim=self.head_size(),
            key_dim=self.head_size(),
            conv_kernel=0,
            chunk=self.block_size,
            delta_rule=False,
            fixed_decays=True,
            norm_of_all_heads=True,
        )
        return fields | {
            "mixers": mixers_of(letters, ["E"] * len(letters)),
            "delta_net": linear_attention if "L" in letters else None,
        }


_DELTA_LETTERS: Final[Mapping[str, str]] = {"linear_attention": "L", "full_attention": "*"}
"""Letters of `MIXERS` for the words of OLMo Hybrid's `layer_types`."""
