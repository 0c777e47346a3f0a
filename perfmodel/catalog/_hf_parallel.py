"""Hugging Face configurations of models whose attention and feed-forward run side by side: Falcon, Phi, StableLM and
Command R. GPT-J's and GPT-NeoX's stand with those of their time."""

from dataclasses import dataclass
from typing import Literal

from perfmodel.catalog._hf_common import Count, CountOrNone, Fields, Share, Stack, activation
from perfmodel.catalog._hf_llama import Llama


@dataclass(frozen=True, kw_only=True)
class Falcon(Stack):
    """Falcon. The norms of its layers have shifts though nothing else has biases (transformers
    models/falcon/modeling_falcon.py `FalconDecoderLayer`)."""

    num_kv_heads: Count | None = None
    ffn_hidden_size: Count | None = None
    new_decoder_architecture: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    num_ln_in_parallel_attn: Literal[1, 2] | None = None
    alibi: bool = False
    bias: bool = False
    hidden_dropout: Share = 0.0

    def fields(self) -> Fields:
        heads = self.num_attention_heads
        old = 1 if self.multi_query else heads
        norms = self.num_ln_in_parallel_attn or (2 if self.new_decoder_architecture else 1)
        return self.sizes(self.ffn_hidden_size, 2048) | {
            "kv_heads": self.num_kv_heads or heads if self.new_decoder_architecture else old,
            "positions": "alibi" if self.alibi else "rope",
            "parallel_blocks": ("one_norm" if norms == 1 else "two_norms") if self.parallel_attn else "none",
            "bias": self.bias,
            "norm_bias": True,
            "dropout": self.hidden_dropout > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Phi(Stack):
    """Phi-1, 1.5 and 2. The head's bias is left out."""

    intermediate_size: Count
    num_key_value_heads: Count | None = None
    max_position_embeddings: Count = 2048
    hidden_act: str = "gelu_new"
    tie_word_embeddings: bool = False
    qk_layernorm: bool = False
    resid_pdrop: Share = 0.0

    def fields(self) -> Fields:
        return self.sizes(self.intermediate_size, self.max_position_embeddings) | {
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "activation": activation(self.hidden_act),
            "positions": "rope",
            "parallel_blocks": "one_norm",
            "qk_norm": self.qk_layernorm,
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": self.resid_pdrop > 0,
        }


@dataclass(frozen=True, kw_only=True)
class StableLm(Llama):
    """StableLM 2 and 3B: layer norms with shifts, side by side where the configuration says so. Norms of queries and
    keys have a scale for every head."""

    max_position_embeddings: Count = 4096
    use_qkv_bias: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False

    def fields(self) -> Fields:
        return super().fields() | {
            "norm": "layer_norm",
            "norm_bias": True,
            "parallel_blocks": "one_norm" if self.use_parallel_residual else "none",
            "qkv_bias": self.use_qkv_bias,
            "qk_norm": self.qk_layernorm,
            "qk_norm_of_all_heads": self.qk_layernorm,
        }


@dataclass(frozen=True, kw_only=True)
class Cohere(Llama):
    """Command R: layer norms without shifts. Norms of queries and keys (Command R+) have a scale for every head."""

    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    use_qk_norm: bool = False

    def fields(self) -> Fields:
        return super().fields() | {
            "norm": "layer_norm",
            "parallel_blocks": "one_norm",
            "qk_norm": self.use_qk_norm,
            "qk_norm_of_all_heads": self.use_qk_norm,
        }


@dataclass(frozen=True, kw_only=True)
class Cohere2(Cohere):
    """Command R7B and A: every fourth layer attends in full (and without rotation, which is counted all the same)."""

    sliding_window: CountOrNone = 4096
    sliding_window_pattern: Count = 4

    def fields(self) -> Fields:
        return super().fields() | {"full_attention_every": self.sliding_window_pattern}
