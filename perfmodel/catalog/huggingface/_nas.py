"""Hugging Face configurations of Nemotron-NAS: LLaMA whose layers differ, as an architecture search
left them."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from perfmodel.catalog.huggingface._layers import mixer_words
from perfmodel.catalog.huggingface._llama import Count, Fields, Llama
from perfmodel.catalog.huggingface._unknown import CannotDescribeError

MULTIPLE = 256
"""Inner sizes are rounded up to a multiple of this (`_ffn_mult_to_intermediate_size` of its
modeling_decilm.py)."""


@dataclass(frozen=True, kw_only=True)
class NasAttention:
    """`attention` of an entry of `block_configs`."""

    no_op: bool = False
    n_heads_in_group: Count | None = None
    replace_with_linear: bool = False


@dataclass(frozen=True, kw_only=True)
class NasFeedForward:
    """`ffn` of an entry of `block_configs`."""

    no_op: bool = False
    ffn_mult: Annotated[float, Ge(0), Le(1000)] | None = None
    intermediate_size: Count | None = None
    replace_with_linear: bool = False

    def inner(self, hidden: int) -> int:
        """Inner size: stated, or a stated share of the hidden size."""
        if self.intermediate_size:
            return self.intermediate_size
        if self.ffn_mult is None:
            raise CannotDescribeError(
                "an entry of block_configs states neither ffn_mult nor intermediate_size"
            )
        size = int(2 * self.ffn_mult * hidden / 3)
        return -(-size // MULTIPLE) * MULTIPLE


@dataclass(frozen=True, kw_only=True)
class NasLayer:
    """An entry of `block_configs`: one layer."""

    attention: NasAttention = NasAttention()
    ffn: NasFeedForward = NasFeedForward()


@dataclass(frozen=True, kw_only=True)
class NemotronNas(Llama):
    """Llama-Nemotron Super and Ultra (arXiv 2505.00949, section 2): layers without attention or
    without a feed-forward, and feed-forwards of different sizes."""

    intermediate_size: Count | None = None
    block_configs: tuple[NasLayer, ...]

    def kv_heads(self) -> int:
        """Heads of keys and values, the same in all layers that attend."""
        groups = {
            layer.attention.n_heads_in_group
            for layer in self.block_configs
            if not layer.attention.no_op
        }
        if len(groups) > 1:
            raise CannotDescribeError(
                "its layers differ in their heads of keys and values (n_heads_in_group)"
            )
        group = groups.pop() if groups else None
        if group is None:
            return self.num_key_value_heads or self.num_attention_heads
        return max(1, self.num_attention_heads // group)

    def fields(self) -> Fields:
        if len(self.block_configs) != self.num_hidden_layers:
            raise CannotDescribeError(
                f"block_configs has {len(self.block_configs)} entries for {self.num_hidden_layers} layers"
            )
        layer_words: list[str] = []
        sizes: list[int] = []
        for layer in self.block_configs:
            if layer.attention.replace_with_linear or layer.ffn.replace_with_linear:
                raise CannotDescribeError(
                    "a linear layer replaces one of its sub-layers (replace_with_linear)"
                )
            word = ("" if layer.attention.no_op else "*") + ("" if layer.ffn.no_op else "-")
            # A layer without either passes its input on.
            if word:
                layer_words.append(word)
                sizes.append(0 if layer.ffn.no_op else layer.ffn.inner(self.hidden_size))
        if not any(sizes):
            raise CannotDescribeError("none of its layers has a feed-forward")
        largest = max(sizes)
        return Llama.fields(self) | {
            "layers": len(layer_words),
            "kv_heads": self.kv_heads(),
            "ffn_hidden": largest,
            "mixers": mixer_words(layer_words),
            "ffn_sizes": tuple(size or largest for size in sizes),
        }
