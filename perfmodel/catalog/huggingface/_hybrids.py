"""Hugging Face configurations of layers that differ: Qwen3-Next, Mamba, Jamba, Nemotron-H and other
hybrids."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Annotated, ClassVar, Final

from annotated_types import Ge, Le, Len

from perfmodel.catalog.huggingface._experts import EXPERT_KEYS, DeepSeek, LlamaWithExperts, Qwen2Moe
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
    Layers,
    Llama,
    Stack,
    activation,
    plain_sizes,
)
from perfmodel.errors import PerfModelError
from perfmodel.spec.parts import DeltaNet, Experts, Mamba, SelectiveScan


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
        """Fields of a stack in which every n-th layer attends and the others have a gated delta
        net.

        Args:
            feed_forward: the letter of `MIXERS` for what follows in every layer.
        """
        # `Transformer.mixers` repeats a pattern over the layers.
        period = ["L" + feed_forward] * (self.full_attention_interval - 1) + ["*" + feed_forward]
        return {
            "qk_norm": True,
            "attention_gate": True,
            "mixers": mixer_words(period),
            "delta_net": DeltaNet(
                heads=self.linear_num_value_heads,
                key_heads=self.linear_num_key_heads,
                head_dim=self.linear_value_head_dim,
                key_dim=self.linear_key_head_dim,
                conv_kernel=self.linear_conv_kernel_dim,
            ),
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(Qwen2Moe, DeltaNetKeys):
    """Qwen3-Next and Qwen3.5 with experts: three gated delta nets, then gated attention; experts in
    every layer."""

    decoder_sparse_step: Annotated[int, Ge(1), Le(1)] = 1

    def fields(self) -> Fields:
        return super().fields() | {"qkv_bias": False} | self.delta_nets("E")


@dataclass(frozen=True, kw_only=True)
class LaraMini(Qwen3Next):
    """Lara mini: delta nets among attentions in a window and full ones, without gates on attention
    or on the shared expert (transformers models/lara_mini/modeling_lara_mini.py)."""

    sliding_window: CountOrNone = 512
    use_sliding_window: bool = True

    def experts(self) -> Experts:
        return replace(super().experts(), shared_gate=False)

    def fields(self) -> Fields:
        return super().fields() | {"attention_gate": False}


@dataclass(frozen=True, kw_only=True)
class Qwen35(Llama, DeltaNetKeys):
    """Qwen3.5 without experts."""

    def fields(self) -> Fields:
        return super().fields() | self.delta_nets("-")


@dataclass(frozen=True, kw_only=True)
class OlmoHybrid(Llama, DeltaNetKeys):
    """OLMo Hybrid: gated delta nets in place of three of four attentions. Those normalise queries
    and keys of all heads (transformers models/olmo_hybrid/modeling_olmo_hybrid.py); their norms are
    counted at the input, as the others'."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    layer_types: tuple[str, ...] = ()

    def fields(self) -> Fields:
        fields = super().fields() | self.delta_nets("-")
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
    linear_num_heads: Count = 32
    linear_head_dim: Count | None = 128
    linear_conv_kernel_dim: Count = 4

    def attention(self) -> list[str]:
        """A letter of `MIXERS` per layer for its attention or delta net."""
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
                num_heads=self.linear_num_heads,
                head_dim=self.linear_head_dim or 128,
                short_conv_kernel_size=self.linear_conv_kernel_dim,
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
    linear_head_dim: Count | None = None
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
        # As many heads as attention has. transformers writes their size under a key of its own,
        # because it keeps that of rotated elements under `head_dim`.
        heads, head_dim = self.num_attention_heads, self.linear_head_dim or self.head_dim or 128
        return DeltaNet(
            heads=heads,
            key_heads=heads,
            head_dim=head_dim,
            key_dim=head_dim,
            conv_kernel=self.short_conv_kernel_size,
            channel_decays=True,
        )

    def fields(self) -> Fields:
        fields = super().fields() | {"head_gate": True}
        return fields | {"mtp_layers": self.num_mtp_layers or self.num_nextn_predict_layers}


_DELTA_LETTERS: Final[Mapping[str, str]] = {"linear_attention": "L", "full_attention": "*"}
"""Letters of `MIXERS` for the words of OLMo Hybrid's `layer_types`."""
_ONLY: Fields = {"norm": "rms_norm", "positions": "none", "bias": False, "dropout": False}
"""Fields that all models of Mamba layers have in common."""


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """Mamba-2. Sequences are of 2,048 tokens, as in its paper (arXiv 2405.21060, section 9.2)."""

    hidden_size: Count
    num_hidden_layers: Layers
    vocab_size: Count
    num_heads: Count
    head_dim: Count
    state_size: Count
    n_groups: Count = 8
    conv_kernel: Count = 4
    chunk_size: Count = 256
    tie_word_embeddings: bool = False

    def fields(self) -> Fields:
        # Heads of the scan stand for those of an attention that there is not; tensor parallelism
        # shares them out.
        return _ONLY | {
            "layers": self.num_hidden_layers,
            "hidden": self.hidden_size,
            "heads": self.num_heads,
            "kv_heads": self.num_heads,
            "head_dim": self.head_dim,
            "ffn_hidden": self.num_heads * self.head_dim,
            "vocab": self.vocab_size,
            "seq_len": 2048,
            "tied_embeddings": self.tie_word_embeddings,
            "mixers": "M" * self.num_hidden_layers,
            "mamba": Mamba(
                heads=self.num_heads,
                head_dim=self.head_dim,
                state=self.state_size,
                groups=self.n_groups,
                conv_kernel=self.conv_kernel,
                chunk=self.chunk_size,
            ),
        }


@dataclass(frozen=True, kw_only=True)
class FirstMamba:
    """The first Mamba and Falcon Mamba. Sequences are of 2,048 tokens, as in its paper (arXiv
    2312.00752, appendix E.2)."""

    hidden_size: Count
    num_hidden_layers: Layers
    vocab_size: Count
    intermediate_size: Count | None = None
    expand: Count = 2
    state_size: Count = 16
    time_step_rank: Count | None = None
    conv_kernel: Count = 4
    tie_word_embeddings: bool = True

    def fields(self) -> Fields:
        inner = self.intermediate_size or self.expand * self.hidden_size
        # it has no heads; what stands for them must not hinder tensor parallelism, which shares out
        # channels
        parts = gcd(self.hidden_size, 64)
        sizes = plain_sizes(
            self.num_hidden_layers, self.hidden_size, parts, inner, self.vocab_size, 2048
        )
        return (
            sizes
            | _ONLY
            | {
                "tied_embeddings": self.tie_word_embeddings,
                "mixers": "S" * self.num_hidden_layers,
                "selective_scan": SelectiveScan(
                    inner=inner,
                    state=self.state_size,
                    step_rank=self.time_step_rank or -(-self.hidden_size // 16),
                    conv_kernel=self.conv_kernel,
                ),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Jamba(LlamaWithExperts):
    """Jamba: the first Mamba in place of most attentions, experts in every second layer."""

    mamba_d_state: Count = 16
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_dt_rank: Count | None = None
    attn_layer_offset: CountOrNone = 4
    attn_layer_period: Count = 8
    expert_layer_offset: CountOrNone = 1
    expert_layer_period: Count = 2

    def sublayers(self, layer: int) -> str:
        """Sub-layers of a layer, letters of `MIXERS`."""
        # A period and an offset each for attention and for experts (transformers
        # models/jamba/modeling_jamba.py).
        attends = layer % self.attn_layer_period == self.attn_layer_offset
        has_experts = (
            self.num_experts > 1 and layer % self.expert_layer_period == self.expert_layer_offset
        )
        return ("*" if attends else "S") + ("E" if has_experts else "-")

    def fields(self) -> Fields:
        layers = [self.sublayers(layer) for layer in range(self.num_hidden_layers)]
        scan = SelectiveScan(
            inner=self.mamba_expand * self.hidden_size,
            state=self.mamba_d_state,
            step_rank=self.mamba_dt_rank or -(-self.hidden_size // 16),
            conv_kernel=self.mamba_d_conv,
            inner_norms=True,
        )
        return super().fields() | {
            "positions": "none",
            "mixers": mixer_words(layers),
            "selective_scan": scan,
        }


@dataclass(frozen=True, kw_only=True)
class MambaKeys:
    """Keys of Bamba, Granite 4 and Falcon-H1 for the sizes of their Mamba-2 mixers."""

    mamba_n_heads: Count
    mamba_d_head: Count
    mamba_d_state: Count
    mamba_n_groups: Count = 1
    mamba_d_conv: Count = 4
    mamba_chunk_size: Count = 256

    def mamba(self) -> Mamba:
        """Sizes of a mixer."""
        return Mamba(
            heads=self.mamba_n_heads,
            head_dim=self.mamba_d_head,
            state=self.mamba_d_state,
            groups=self.mamba_n_groups,
            conv_kernel=self.mamba_d_conv,
            chunk=self.mamba_chunk_size,
        )

    def mixers(self, layers: int, attending: Collection[int], feed_forward: str) -> Fields:
        """Fields of a stack of Mamba-2 layers, some of which attend instead."""
        by_layer = [("*" if layer in attending else "M") + feed_forward for layer in range(layers)]
        return {"mixers": mixer_words(by_layer), "mamba": self.mamba()}


@dataclass(frozen=True, kw_only=True)
class Bamba(Llama, MambaKeys):
    """Bamba: LLaMA with Mamba-2 in place of most attentions."""

    attn_layer_indices: tuple[CountOrNone, ...] = ()

    def fields(self) -> Fields:
        return super().fields() | self.mixers(self.num_hidden_layers, self.attn_layer_indices, "-")


@dataclass(frozen=True, kw_only=True)
class GraniteHybrid(LlamaWithExperts, MambaKeys):
    """Granite 4: Mamba-2 in place of most attentions (`layer_types` says which stay), experts
    beside a shared one, or the shared one alone."""

    num_experts: CountOrNone = 0
    num_experts_per_tok: CountOrNone = 0

    def fields(self) -> Fields:
        # The small models of the family have no experts: their feed-forward is called the shared
        # expert.
        if self.num_experts:
            return super().fields() | self.mixers(self.num_hidden_layers, (), "E")
        dense = {"ffn_hidden": self.shared_expert_intermediate_size or self.expert_inner}
        return Llama.fields(self) | dense | self.mixers(self.num_hidden_layers, (), "-")


@dataclass(frozen=True, kw_only=True)
class FalconH1(Llama, MambaKeys):
    """Falcon-H1: every layer has attention and Mamba-2 side by side on one norm; its mixers end
    without a norm unless `mamba_rms_norm` says so."""

    mamba_rms_norm: bool = False

    def fields(self) -> Fields:
        # One pattern for all layers; the blank at its end makes it a word.
        return super().fields() | {
            "mixers": "*M- ",
            "parallel_mixers": True,
            "mamba": replace(self.mamba(), gated_norm=self.mamba_rms_norm),
        }


BLOCK_LETTERS: Final[Mapping[str, str]] = {
    "linear_attention": "M",
    "mamba": "M",
    "moe": "E",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
}
"""Letter of `MIXERS` for a word of Nemotron-H's `layers_block_type`."""


@dataclass(frozen=True, kw_only=True)
class NemotronH(Stack):
    """Nemotron-H and Nemotron 3: a mixer per layer, as letters or as a list of words."""

    ALIASES: ClassVar[Mapping[str, str]] = {**EXPERT_KEYS, "attention_head_dim": "head_dim"}

    num_hidden_layers: Layers | None = None
    hybrid_override_pattern: Annotated[str, Len(1, 10**5)] | None = None
    layers_block_type: tuple[str, ...] | None = None
    intermediate_size: Count
    mamba_num_heads: Count
    mamba_head_dim: Count
    ssm_state_size: Count
    num_key_value_heads: Count
    n_groups: Count = 8
    conv_kernel: Count = 4
    chunk_size: Count = 128
    head_dim: Count = 128
    mlp_hidden_act: str = "relu2"
    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = False
    num_experts: CountOrNone = 0
    num_experts_per_tok: Count = 1
    moe_intermediate_size: Count = 1
    shared_expert_intermediate_size: CountOrNone = 0
    moe_latent_size: CountOrNone = 0

    def letters(self) -> str:
        """A letter of `MIXERS` per layer."""
        # NVIDIA's own files give letters, those of transformers a list of words.
        if self.hybrid_override_pattern is not None:
            return self.hybrid_override_pattern
        if self.layers_block_type is None:
            raise PerfModelError(
                "hybrid_override_pattern: missing; it says what each layer is (or layers_block_type)"
            )
        blocks = self.layers_block_type
        return "".join(
            letters_of(
                blocks, BLOCK_LETTERS, "layers_block_type", self.num_hidden_layers or len(blocks)
            )
        )

    def experts(self) -> Experts:
        """Its routed experts, which may work on fewer elements than the hidden size, and the shared
        one."""
        if not self.num_experts:
            raise PerfModelError("hybrid_override_pattern has E; n_routed_experts is missing")
        return Experts(
            count=self.num_experts,
            topk=self.num_experts_per_tok,
            ffn_hidden=self.moe_intermediate_size,
            shared_ffn_hidden=self.shared_expert_intermediate_size,
            latent=self.moe_latent_size,
        )

    def fields(self) -> Fields:
        letters = self.letters()
        sizes = plain_sizes(
            self.num_hidden_layers or len(letters),
            self.hidden_size,
            self.num_attention_heads,
            self.intermediate_size,
            self.vocab_size,
            self.max_position_embeddings,
        )
        return (
            sizes
            | _ONLY
            | {
                "kv_heads": self.num_key_value_heads,
                "head_dim": self.head_dim,
                "activation": activation(self.mlp_hidden_act),
                "tied_embeddings": self.tie_word_embeddings,
                "mixers": letters,
                "mamba": Mamba(
                    heads=self.mamba_num_heads,
                    head_dim=self.mamba_head_dim,
                    state=self.ssm_state_size,
                    groups=self.n_groups,
                    conv_kernel=self.conv_kernel,
                    chunk=self.chunk_size,
                ),
                # Configurations of dense models keep sizes of experts that they do not have.
                "experts": self.experts() if "E" in letters else None,
            }
        )
