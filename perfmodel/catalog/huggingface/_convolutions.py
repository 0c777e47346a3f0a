"""Hugging Face configurations of LFM2: gated short convolutions in place of most attentions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from annotated_types import Ge, Le

from perfmodel.catalog.huggingface._experts import LlamaWithExperts
from perfmodel.catalog.huggingface._layers import mixer_words
from perfmodel.catalog.huggingface._llama import Count, CountOrNone, Fields, Llama
from perfmodel.errors import PerfModelError
from perfmodel.spec.parts import ShortConv

CONVOLUTION_LETTERS: Final[Mapping[str, str]] = {
    "conv": "C",
    "full_attention": "*",
    "sliding_attention": "W",
}
"""Letters of `MIXERS` for the words of `layer_types` of LFM2 and 3."""


def _convolution_letters(kinds: tuple[str, ...], layers: int) -> list[str]:
    """The mixer of each layer, as its letter in `MIXERS`, from the words of `layer_types`."""
    unknown = sorted(set(kinds) - set(CONVOLUTION_LETTERS))
    if unknown or len(kinds) != layers:
        raise PerfModelError(
            f"layer_types must be {layers} of {', '.join(CONVOLUTION_LETTERS)}; got {len(kinds)}"
        )
    return [CONVOLUTION_LETTERS[kind] for kind in kinds]


@dataclass(frozen=True, kw_only=True)
class Lfm2(Llama):
    """LFM2: gated short convolutions in place of most attentions."""

    READS_LAYER_TYPES: ClassVar[bool] = True
    # The first configurations on the hub name sizes of blocks, not of layers.
    ALIASES: ClassVar[Mapping[str, str]] = {"block_ff_dim": "intermediate_size"}

    layer_types: tuple[str, ...] = ()
    full_attn_idxs: tuple[CountOrNone, ...] | None = None
    conv_L_cache: Count = 3
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: Annotated[float, Ge(0), Le(1000)] = 1.0
    block_multiple_of: Count = 256
    tie_word_embeddings: bool = True

    def inner(self) -> int:
        """Two thirds of the stated size, rounded up (`Lfm2MLP`), unless the configuration turns
        that off."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        # The arithmetic of LLaMA's reference code: a gated feed-forward with as many weights as an
        # ungated one has.
        size = int(self.block_ffn_dim_multiplier * int(2 * self.intermediate_size / 3))
        return -(-size // self.block_multiple_of) * self.block_multiple_of

    def kinds(self) -> tuple[str, ...]:
        """Kind of each layer: convolution or attention."""
        if self.layer_types:
            return self.layer_types
        # The older notation numbers the layers that attend.
        attending = (
            range(self.num_hidden_layers) if self.full_attn_idxs is None else self.full_attn_idxs
        )
        return tuple(
            "full_attention" if i in attending else "conv" for i in range(self.num_hidden_layers)
        )

    def fields(self) -> Fields:
        letters = _convolution_letters(self.kinds(), self.num_hidden_layers)
        layers = [letter + "-" for letter in letters]
        return super().fields() | {
            "ffn_hidden": self.inner(),
            "qk_norm": True,
            "mixers": mixer_words(layers),
            "short_conv": ShortConv(kernel=self.conv_L_cache) if "C" in letters else None,
        }


@dataclass(frozen=True, kw_only=True)
class Lfm3(Llama):
    """LFM3: attention in a window and in full among gated short convolutions, gates on heads, norms
    at both ends."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    layer_types: tuple[str, ...] | None = None
    conv_L_cache: Count = 7
    head_dim: Count | None = 128
    sliding_window: CountOrNone = 256
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True
    tie_word_embeddings: bool = True

    def letters(self) -> list[str]:
        """The mixer of each layer, as its letter in `MIXERS`."""
        if self.layer_types is not None:
            return _convolution_letters(self.layer_types, self.num_hidden_layers)
        in_turn = ["W", "C", "*", "C"]
        # The default of the Hugging Face class.
        return [
            "C" if layer == 0 else in_turn[layer % 4] for layer in range(self.num_hidden_layers)
        ]

    def fields(self) -> Fields:
        letters = self.letters()
        return super().fields() | {
            "qk_norm": True,
            "head_gate": self.use_attention_gate,
            "norm_at": "both" if self.use_sandwich_norm else "input",
            "mixers": mixer_words([letter + "-" for letter in letters]),
            "short_conv": ShortConv(kernel=self.conv_L_cache) if "C" in letters else None,
        }


@dataclass(frozen=True, kw_only=True)
class Lfm2Moe(LlamaWithExperts):
    """LFM2 with experts in all but the first layers."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    layer_types: tuple[str, ...]
    conv_L_cache: Count = 3
    tie_word_embeddings: bool = True

    def fields(self) -> Fields:
        letters = _convolution_letters(self.layer_types, self.num_hidden_layers)
        dense = self.first_k_dense_replace
        layers = [letter + ("-" if i < dense else "E") for i, letter in enumerate(letters)]
        return super().fields() | {
            "qk_norm": True,
            "mixers": mixer_words(layers),
            "short_conv": ShortConv(kernel=self.conv_L_cache) if "C" in letters else None,
        }
