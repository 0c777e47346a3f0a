"""Hugging Face configurations of dense models beside LLaMA's: Gemma, OLMo, StarCoder, GLM, Nemotron."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge

from perfmodel.catalog._hf_common import Count, CountOrNone, Fields, Share, Stack, activation
from perfmodel.catalog._hf_llama import Llama


@dataclass(frozen=True, kw_only=True)
class Gemma(Llama):
    """Gemma: GELU gates, wide heads, tied tables."""

    head_dim: Count | None = 256
    tie_word_embeddings: bool = True
    max_position_embeddings: Count = 8192

    def fields(self) -> Fields:
        return super().fields() | {"activation": "gelu"}


@dataclass(frozen=True, kw_only=True)
class Gemma2(Gemma):
    """Gemma 2: every second layer attends in full, norms at both ends, bounded scores and logits."""

    sliding_window: CountOrNone = 4096
    attn_logit_softcapping: Annotated[float, Ge(0)] = 50.0
    final_logit_softcapping: Annotated[float, Ge(0)] = 30.0

    def fields(self) -> Fields:
        return super().fields() | {
            "full_attention_every": 2,
            "norm_at": "both",
            "attention_softcap": self.attn_logit_softcapping > 0,
            "logit_softcap": self.final_logit_softcapping > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Gemma3(Gemma):
    """Gemma 3: every sixth layer attends in full, queries and keys are normalised. Configurations leave out what is
    as in the class of Hugging Face."""

    ALIASES: ClassVar[Mapping[str, str]] = {"_sliding_window_pattern": "sliding_window_pattern"}

    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_attention_heads: Count = 8
    num_hidden_layers: Count = 26
    num_key_value_heads: Count | None = 4
    vocab_size: Count = 262_208
    max_position_embeddings: Count = 131_072
    sliding_window: CountOrNone = 4096
    sliding_window_pattern: Count = 6

    def fields(self) -> Fields:
        own = {"full_attention_every": self.sliding_window_pattern, "norm_at": "both", "qk_norm": True}
        return super().fields() | own


@dataclass(frozen=True, kw_only=True)
class Olmo2(Llama):
    """OLMo 2: what sub-layers give is normalised instead of what they get, and queries and keys of all heads."""

    def fields(self) -> Fields:
        return super().fields() | {"norm_at": "output", "qk_norm": True, "qk_norm_of_all_heads": True}


@dataclass(frozen=True, kw_only=True)
class Glm(Llama):
    """GLM-4 (`glm`)."""

    attention_bias: bool = True
    head_dim: Count | None = 128


@dataclass(frozen=True, kw_only=True)
class Glm4(Glm):
    """GLM-4-0414 (`glm4`): norms at both ends."""

    attention_bias: bool = False

    def fields(self) -> Fields:
        return super().fields() | {"norm_at": "both"}


@dataclass(frozen=True, kw_only=True)
class Nemotron(Llama):
    """Nemotron-4, Minitron: squared ReLU without a gate, layer norms with a shift in a model without biases."""

    hidden_act: str = "relu2"

    def fields(self) -> Fields:
        return super().fields() | {"gated_ffn": False, "norm": "layer_norm", "norm_bias": True}


@dataclass(frozen=True, kw_only=True)
class Starcoder2(Stack):
    """StarCoder 2."""

    intermediate_size: Count
    num_key_value_heads: Count | None = None
    max_position_embeddings: Count = 4096
    hidden_act: str = "gelu_pytorch_tanh"
    use_bias: bool = True
    tie_word_embeddings: bool = True
    sliding_window: CountOrNone = 0
    residual_dropout: Share = 0.0

    def fields(self) -> Fields:
        return self.sizes(self.intermediate_size, self.max_position_embeddings) | {
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "activation": activation(self.hidden_act),
            "positions": "rope",
            "bias": self.use_bias,
            "norm_bias": None if self.use_bias else True,
            "tied_embeddings": self.tie_word_embeddings,
            "window": self.sliding_window,
            "dropout": self.residual_dropout > 0,
        }
