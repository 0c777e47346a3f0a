"""Hugging Face configurations of decoders with GPT-2's layers, or its names of sizes: GPT-J,
GPT-Neo, StarCoder, BLOOM, MPT."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Le

from perfmodel.catalog.huggingface._layers import mixer_words
from perfmodel.catalog.huggingface._llama import (
    Count,
    Fields,
    Layers,
    Share,
    Stack,
    activation,
    plain_sizes,
)
from perfmodel.errors import PerfModelError


@dataclass(frozen=True, kw_only=True)
class Gpt2:
    """GPT-2."""

    n_embd: Count
    n_head: Count
    n_layer: Layers
    vocab_size: Count
    n_inner: Count | None = None
    n_positions: Count = 1024
    activation_function: str = "gelu"
    tie_word_embeddings: bool = True
    resid_pdrop: Share = 0.1

    def fields(self) -> Fields:
        return plain_sizes(
            self.n_layer, self.n_embd, self.n_head, self.n_inner, self.vocab_size, self.n_positions
        ) | {
            "activation": activation(self.activation_function),
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": self.resid_pdrop > 0,
        }


@dataclass(frozen=True, kw_only=True)
class GptJ(Gpt2):
    """Attention and feed-forward side by side on one norm. Its attention projections have no
    biases; the few that remain (feed-forward, head) are left out."""

    n_positions: Count = 2048
    tie_word_embeddings: bool = False
    resid_pdrop: Share = 0.0

    def fields(self) -> Fields:
        return super().fields() | {
            "activation": "gelu",
            "positions": "rope",
            "bias": False,
            "norm_bias": True,
            "parallel_blocks": "one_norm",
        }


@dataclass(frozen=True, kw_only=True)
class GptBigCode(Gpt2):
    """StarCoder and SantaCoder: GPT-2 whose heads share keys and values."""

    activation_function: str = "gelu_pytorch_tanh"
    multi_query: bool = True

    def fields(self) -> Fields:
        return super().fields() | {"kv_heads": 1 if self.multi_query else self.n_head}


@dataclass(frozen=True, kw_only=True)
class GptNeo:
    """GPT-Neo: every second layer attends in a window. In attention, only the output projection has
    a bias."""

    hidden_size: Count
    num_layers: Layers
    vocab_size: Count
    num_heads: Count = 16
    intermediate_size: Count | None = None
    max_position_embeddings: Count = 2048
    window_size: Count = 256
    attention_layers: tuple[Literal["global", "local"], ...] = ()
    activation_function: str = "gelu_new"
    resid_dropout: Share = 0.0

    def fields(self) -> Fields:
        # The original `attention_types` is written out layer by layer in most
        # files; without either the two kinds alternate.
        kinds = self.attention_layers or ("global", "local")
        layers = ["*-" if kind == "global" else "W-" for kind in kinds]
        sizes = plain_sizes(
            self.num_layers,
            self.hidden_size,
            self.num_heads,
            self.intermediate_size,
            self.vocab_size,
            self.max_position_embeddings,
        )
        return sizes | {
            "activation": activation(self.activation_function),
            "unbiased_projections": ("query", "key", "value"),
            "window": self.window_size,
            "mixers": mixer_words(layers),
            "dropout": self.resid_dropout > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Bloom(Stack):
    """BLOOM."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    }

    seq_length: Count = 2048
    hidden_dropout: Share = 0.0

    def fields(self) -> Fields:
        # BLOOM has no key for its inner size: it is always four hidden sizes.
        return self.sizes(None, self.seq_length) | {
            "positions": "alibi",
            "embedding_norm": True,
            "dropout": self.hidden_dropout > 0,
        }


@dataclass(frozen=True, kw_only=True)
class MptAttention:
    """`attn_config` of MPT."""

    attn_type: str = ""
    kv_n_heads: Count | None = None
    alibi: bool = False
    rope: bool = False


@dataclass(frozen=True, kw_only=True)
class Mpt:
    """MPT."""

    d_model: Count
    n_heads: Count
    n_layers: Layers
    vocab_size: Count
    expansion_ratio: Annotated[float, Gt(0), Le(1000)] = 4
    max_seq_len: Count = 2048
    # Hugging Face's class has no positions but ALiBi.
    attn_config: MptAttention = MptAttention(alibi=True)
    no_bias: bool = False
    resid_pdrop: Share = 0.0

    def fields(self) -> Fields:
        attention = self.attn_config
        inner = self.expansion_ratio * self.d_model
        # A ratio such as 2.6667 must not give a size that no matrix has.
        if inner != int(inner) or inner < 1:
            raise PerfModelError(
                f"expansion_ratio {self.expansion_ratio} times d_model {self.d_model} is not whole"
            )
        sizes = plain_sizes(
            self.n_layers, self.d_model, self.n_heads, int(inner), self.vocab_size, self.max_seq_len
        )
        positions = "rope" if attention.rope else "learned"
        if attention.alibi:
            positions = "alibi"
        usual_kv_heads = 1 if attention.attn_type == "multiquery_attention" else self.n_heads
        return sizes | {
            "kv_heads": attention.kv_n_heads or usual_kv_heads,
            "positions": positions,
            "bias": not self.no_bias,
            "dropout": self.resid_pdrop > 0,
        }
