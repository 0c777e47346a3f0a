"""Hugging Face configurations of layers that differ: Llama 4, GLM-4.5, Qwen3-Next, Mamba-2, Nemotron-H."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le, Len

from perfmodel.catalog._hf_llama import (
    Count,
    CountOrNone,
    Fields,
    Layers,
    Llama,
    Stack,
    activation,
    routed_experts,
)
from perfmodel.errors import PerfModelError
from perfmodel.spec import DeltaNet, Experts, Mamba


@dataclass(frozen=True, kw_only=True)
class Llama4(Llama):
    """Llama 4: attention in chunks but for every fourth layer, experts in all or every second one beside a shared one.
    Its norm of queries and keys, which has no parameters, is left out."""

    intermediate_size: Count = 8192
    intermediate_size_mlp: Count = 16384
    num_local_experts: Count = 16
    num_experts_per_tok: Count = 1
    interleave_moe_layer_step: Count = 1
    attention_chunk_size: CountOrNone = 8192
    no_rope_layer_interval: Count = 4

    def fields(self) -> Fields:
        inner = self.intermediate_size
        return super().fields() | {
            "ffn_hidden": self.intermediate_size_mlp,
            "window": self.attention_chunk_size,
            "chunked_window": True,
            "full_attention_every": self.no_rope_layer_interval,
            "experts": Experts(
                count=self.num_local_experts, topk=self.num_experts_per_tok, ffn_hidden=inner, shared_ffn_hidden=inner,
                every=self.interleave_moe_layer_step,
            ),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(Llama):
    """GLM-4.5: DeepSeek's experts and further tokens with grouped-query attention."""

    moe_intermediate_size: Count
    n_routed_experts: Count
    num_experts_per_tok: Count
    n_shared_experts: CountOrNone = 1
    first_k_dense_replace: CountOrNone = 1
    n_group: Count = 1
    topk_group: Count = 1
    use_qk_norm: bool = False
    num_nextn_predict_layers: CountOrNone = 0

    def fields(self) -> Fields:
        return super().fields() | {
            "qk_norm": self.use_qk_norm,
            "mtp_layers": self.num_nextn_predict_layers,
            "experts": routed_experts(self),
        }


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(Llama):
    """Qwen3-Next: three gated delta nets, then gated attention; experts in every layer."""

    moe_intermediate_size: Count
    num_experts: Count
    num_experts_per_tok: Count
    shared_expert_intermediate_size: Count
    linear_num_value_heads: Count
    linear_num_key_heads: Count
    linear_value_head_dim: Count
    linear_key_head_dim: Count
    linear_conv_kernel_dim: Count = 4
    full_attention_interval: Annotated[int, Ge(1), Le(1000)] = 4
    decoder_sparse_step: Annotated[int, Ge(1), Le(1)] = 1

    def fields(self) -> Fields:
        return super().fields() | {
            "qk_norm": True,
            "attention_gate": True,
            "mixers": " ".join(["LE"] * (self.full_attention_interval - 1) + ["*E"]) + " ",
            "delta_net": DeltaNet(
                heads=self.linear_num_value_heads, key_heads=self.linear_num_key_heads,
                head_dim=self.linear_value_head_dim, key_dim=self.linear_key_head_dim,
                conv_kernel=self.linear_conv_kernel_dim,
            ),
            "experts": Experts(
                count=self.num_experts, topk=self.num_experts_per_tok, ffn_hidden=self.moe_intermediate_size,
                shared_ffn_hidden=self.shared_expert_intermediate_size, shared_gate=True,
            ),
        }  # fmt: skip


_ONLY: Fields = {"norm": "rms_norm", "positions": "none", "bias": False, "dropout": False}
"""What hybrids of Mamba-2 have in common."""


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
        return _ONLY | {
            "layers": self.num_hidden_layers, "hidden": self.hidden_size, "heads": self.num_heads,
            "kv_heads": self.num_heads, "head_dim": self.head_dim, "ffn_hidden": self.num_heads * self.head_dim,
            "vocab": self.vocab_size, "seq_len": 2048, "tied_embeddings": self.tie_word_embeddings,
            "mixers": "M" * self.num_hidden_layers,
            "mamba": Mamba(heads=self.num_heads, head_dim=self.head_dim, state=self.state_size, groups=self.n_groups,
                           conv_kernel=self.conv_kernel, chunk=self.chunk_size),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class NemotronH(Stack):
    """Nemotron-H and Nemotron 3: a mixer per layer."""

    ALIASES: ClassVar[Mapping[str, str]] = {"attention_head_dim": "head_dim"}

    hybrid_override_pattern: Annotated[str, Len(1, 10**5)]
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
    n_routed_experts: CountOrNone = 0
    num_experts_per_tok: Count = 1
    moe_intermediate_size: Count = 1
    moe_shared_expert_intermediate_size: CountOrNone = 0

    def fields(self) -> Fields:
        letters = self.hybrid_override_pattern
        if "E" in letters and not self.n_routed_experts:
            raise PerfModelError("hybrid_override_pattern has E; n_routed_experts is missing")
        return self.sizes(self.intermediate_size, self.max_position_embeddings) | _ONLY | {
            "kv_heads": self.num_key_value_heads, "head_dim": self.head_dim,
            "activation": activation(self.mlp_hidden_act), "tied_embeddings": self.tie_word_embeddings,
            "mixers": letters,
            "mamba": Mamba(heads=self.mamba_num_heads, head_dim=self.mamba_head_dim, state=self.ssm_state_size,
                           groups=self.n_groups, conv_kernel=self.conv_kernel, chunk=self.chunk_size),
            "experts": Experts(
                count=self.n_routed_experts, topk=self.num_experts_per_tok, ffn_hidden=self.moe_intermediate_size,
                shared_ffn_hidden=self.moe_shared_expert_intermediate_size,
            ) if "E" in letters else None,
        }  # fmt: skip
