"""Hugging Face configurations of layers that differ: Qwen3-Next, Mamba, Jamba, Nemotron-H and other
hybrids."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Annotated, ClassVar, Final

from annotated_types import Len

from perfmodel.catalog.huggingface._experts import EXPERT_KEYS, LlamaWithExperts
from perfmodel.catalog.huggingface._layers import letters_of, mixer_words
from perfmodel.catalog.huggingface._llama import (
    Count,
    CountOrNone,
    Fields,
    Layers,
    Llama,
    Stack,
    activation,
    per_head,
    plain_sizes,
)
from perfmodel.errors import PerfModelError
from perfmodel.spec.parts import Experts, Mamba, SelectiveScan

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

    hidden_size: Count
    mamba_n_heads: Count
    mamba_d_head: Count | None = None
    mamba_d_ssm: Count | None = None
    mamba_expand: Count = 2
    mamba_d_state: Count
    mamba_n_groups: Count = 1
    mamba_d_conv: Count = 4
    mamba_chunk_size: Count = 256

    def mamba(self) -> Mamba:
        """Sizes of a mixer, whose heads share its width evenly unless they state their size."""
        width = self.mamba_d_ssm or self.mamba_expand * self.hidden_size
        return Mamba(
            heads=self.mamba_n_heads,
            head_dim=self.mamba_d_head or per_head(width, self.mamba_n_heads),
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
        """The mixer of each layer, as its letter in `MIXERS`."""
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
