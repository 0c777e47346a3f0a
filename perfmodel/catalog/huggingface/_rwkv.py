"""Hugging Face configurations of RWKV-4 to 7."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Annotated, Any, ClassVar

from annotated_types import Gt, Le

from perfmodel.catalog.huggingface._layers import mixer_words
from perfmodel.catalog.huggingface._llama import Count, Fields, Layers, plain_sizes
from perfmodel.catalog.huggingface._unknown import CannotDescribeError
from perfmodel.errors import PerfModelError
from perfmodel.spec.parts import TimeMix

Ratio = Annotated[float, Gt(0), Le(1000)]


@dataclass(frozen=True, kw_only=True)
class Rwkv:
    """RWKV-4: time mixing in place of attention, channel mixing in place of the feed-forward
    (transformers models/rwkv/modeling_rwkv.py)."""

    ALIASES: ClassVar[Mapping[str, str]] = {"max_position_embeddings": "context_length"}

    hidden_size: Count = 4096
    num_hidden_layers: Layers = 32
    vocab_size: Count = 50_277
    context_length: Count = 1024
    attention_hidden_size: Count | None = None
    intermediate_size: Count | None = None
    tie_word_embeddings: bool = False

    def fields(self) -> Fields:
        # It has no heads; what stands for them must not hinder tensor parallelism, which shares out
        # channels.
        parts = gcd(self.hidden_size, 64)
        sizes = plain_sizes(
            self.num_hidden_layers,
            self.hidden_size,
            parts,
            self.intermediate_size,
            self.vocab_size,
            self.context_length,
        )
        return sizes | {
            "positions": "none",
            "bias": False,
            "norm_bias": True,
            "dropout": False,
            # The first layer begins with a norm of the embeddings (`pre_ln`).
            "embedding_norm": True,
            "tied_embeddings": self.tie_word_embeddings,
            "mixers": mixer_words(["RK"]),
            "time_mix": TimeMix(inner=self.attention_hidden_size or self.hidden_size),
        }


@dataclass(frozen=True, kw_only=True)
class Rwkv5:
    """RWKV-5 World (version 5.2) and RWKV-6 World: linear attention in place of RWKV-4's scan
    (rwkv5_model/modeling_rwkv5.py and rwkv6_model/modeling_rwkv6.py of
    BBuf/RWKV-World-HF-Tokenizer)."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "max_position_embeddings": "context_length",
        "max_context_length": "context_length",
    }

    hidden_size: Count = 768
    num_hidden_layers: Layers = 24
    vocab_size: Count = 65_536
    context_length: Count = 4096
    attention_hidden_size: Count | None = None
    head_size: Count = 64
    intermediate_size: Count | None = None
    model_version: str = "5_2"
    tie_word_embeddings: bool = False

    def time_mix(self) -> TimeMix:
        """Sizes of the time mixing."""
        if self.model_version.replace("_", ".") not in ("5.2", "6.0"):
            raise CannotDescribeError(f"model_version={self.model_version} is not supported")
        inner = self.attention_hidden_size or self.hidden_size
        return TimeMix(inner=inner, heads=heads_of(inner, self.head_size), gate=True)

    def fields(self) -> Fields:
        # The class itself ignores a stated inner size only in RWKV-6; published files state none.
        inner = self.intermediate_size or int(self.hidden_size * 3.5) // 32 * 32
        mix = self.time_mix()
        return stack_of(self, mix, mix.heads, inner)


@dataclass(frozen=True, kw_only=True)
class Rwkv6(Rwkv5):
    """RWKV-6: mixtures and decays are made of the token. A configuration has the keys of RWKV's own
    class, or those of flash-linear-attention (fla/models/rwkv6/configuration_rwkv6.py and
    fla/layers/rwkv6.py)."""

    model_version: str = "6.0"
    num_heads: Count | None = None
    expand_k: Ratio = 0.5
    expand_v: Ratio = 1.0
    hidden_ratio: Ratio = 3.5
    proj_low_rank_dim: Count = 32
    gate_low_rank_dim: Count = 64
    norm_first: bool = True
    norm_bias: bool = True
    attn: Mapping[str, Any] | None = None

    def time_mix(self) -> TimeMix:
        if self.num_heads is None:
            inner = self.attention_hidden_size or self.hidden_size
            # Models of this hidden size, 7 B and 14 B, have wider ones (llama.cpp's conversion,
            # `Rwkv6Model.set_gguf_parameters`).
            wider = 2 if self.hidden_size == 4096 else 1
            return TimeMix(
                inner=inner,
                heads=heads_of(inner, self.head_size),
                gate=True,
                mix_rank=32 * wider,
                decay_rank=64 * wider,
            )
        refuse_attention(self.attn)
        return TimeMix(
            inner=round(self.hidden_size * self.expand_v),
            keys=round(self.hidden_size * self.expand_k),
            heads=self.num_heads,
            gate=True,
            mix_rank=self.proj_low_rank_dim,
            decay_rank=self.gate_low_rank_dim,
        )

    def fields(self) -> Fields:
        if self.num_heads is None:
            return super().fields()
        inner = self.intermediate_size or round_up_32(self.hidden_size * self.hidden_ratio)
        return stack_of(self, self.time_mix(), self.num_heads, inner) | {
            "embedding_norm": self.norm_first,
            "norm_bias": self.norm_bias,
        }


@dataclass(frozen=True, kw_only=True)
class Rwkv7:
    """RWKV-7: linear attention under a delta rule whose rates, decays and gates are made through a
    few elements; layers but the first add values of the first
    (fla/models/rwkv7/configuration_rwkv7.py and fla/layers/rwkv7.py of flash-linear-attention)."""

    # RWKV's own class has other names for the same sizes (llama.cpp's conversion, `Rwkv7Model`).
    ALIASES: ClassVar[Mapping[str, str]] = {
        "max_position_embeddings": "context_length",
        "head_size": "head_dim",
        "lora_rank_decay": "decay_low_rank_dim",
        "lora_rank_gate": "gate_low_rank_dim",
        "lora_rank_iclr": "a_low_rank_dim",
        "lora_rank_value_residual_mix": "v_low_rank_dim",
    }
    NULLS_READ: ClassVar[frozenset[str]] = frozenset(
        {"decay_low_rank_dim", "gate_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim"}
    )
    """Keys whose null is not the default, but makes the layer choose a rank by its width."""

    hidden_size: Count = 2048
    num_hidden_layers: Layers = 24
    vocab_size: Count = 32_000
    context_length: Count = 2048
    head_dim: Count | None = None
    num_heads: Count | None = None
    value_dim: Count | tuple[Count, ...] | None = None
    hidden_ratio: Ratio = 4
    intermediate_size: Count | None = None
    decay_low_rank_dim: Count | None = 64
    gate_low_rank_dim: Count | None = 128
    a_low_rank_dim: Count | None = 64
    v_low_rank_dim: Count | None = 16
    norm_first: bool = True
    norm_bias: bool = True
    attn: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False

    def rank(self, scale: float) -> int:
        """The rank that the layer itself chooses: it grows with the root of the width, in steps of
        32."""
        return max(32, round(scale * self.hidden_size**0.5 / 32) * 32)

    def fields(self) -> Fields:
        refuse_attention(self.attn)
        # A list that repeats one number has become that number.
        if isinstance(self.value_dim, tuple):
            raise CannotDescribeError("value_dim differs between layers")
        if self.head_dim or not self.num_heads:
            heads = heads_of(self.hidden_size, self.head_dim or 64)
        else:
            heads = self.num_heads
        # Wider heads than 64 have wider rates and decays, gates do not (fla/layers/rwkv7.py).
        wider = self.hidden_size // heads / 64
        value_rank = self.v_low_rank_dim or self.rank(1.7 * wider)
        mix = TimeMix(
            inner=self.value_dim or self.hidden_size,
            keys=self.hidden_size,
            heads=heads,
            # Kernels that compute it by chunks take 16 tokens (fla/ops/rwkv7/chunk.py).
            chunk=16,
            gate_rank=self.gate_low_rank_dim or self.rank(5.0),
            decay_rank=self.decay_low_rank_dim or self.rank(2.5 * wider),
            rate_rank=self.a_low_rank_dim or self.rank(2.5 * wider),
            value_rank=value_rank if self.num_hidden_layers > 1 else 0,
            channel_receptance=False,
        )
        inner = self.intermediate_size or round_up_32(self.hidden_size * self.hidden_ratio)
        further_layers = ["TK"] * (self.num_hidden_layers - 1)
        return stack_of(self, mix, heads, inner) | {
            "mixers": mixer_words(["RK", *further_layers]),
            "embedding_norm": self.norm_first,
            "norm_bias": self.norm_bias,
        }


def heads_of(inner: int, head_size: int) -> int:
    """Number of heads of this size that share `inner` elements."""
    if inner % head_size:
        raise PerfModelError(f"{inner} channels are not divisible by heads of {head_size} elements")
    return inner // head_size


def round_up_32(size: float) -> int:
    """The next multiple of 32."""
    return -(-int(size) // 32) * 32


def refuse_attention(attn: Mapping[str, Any] | None) -> None:
    """Raise `CannotDescribeError` where some layers attend (hybrids of flash-linear-attention)."""
    if attn:
        raise CannotDescribeError("attn puts attention in place of some of its layers")


def stack_of(config: Rwkv5 | Rwkv7, mix: TimeMix, heads: int, inner: int) -> Fields:
    """Fields that RWKV-5 to 7 have in common."""
    sizes = plain_sizes(
        config.num_hidden_layers,
        config.hidden_size,
        heads,
        inner,
        config.vocab_size,
        config.context_length,
        # There is no attention; what stands for its heads only has to be shared out.
        head_dim=mix.inner // heads,
    )
    return sizes | {
        "positions": "none",
        "bias": False,
        "norm_bias": True,
        "dropout": False,
        # The first layer begins with a norm of the embeddings.
        "embedding_norm": True,
        "tied_embeddings": config.tie_word_embeddings,
        "mixers": mixer_words(["RK"]),
        "time_mix": mix,
    }
