"""Hugging Face configurations of RWKV."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from perfmodel.catalog.huggingface._layers import mixer_words
from perfmodel.catalog.huggingface._llama import Count, Fields, Layers, plain_sizes
from perfmodel.spec.parts import TimeMix


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
