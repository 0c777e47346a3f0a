"""Hugging Face configurations of Zamba: layers of Mamba, some of which begin with a transformer
block they share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from perfmodel.catalog.huggingface._layers import letters_of, mixer_words
from perfmodel.catalog.huggingface._llama import (
    Count,
    CountOrNone,
    Fields,
    Stack,
    activation,
    per_head,
    plain_sizes,
)
from perfmodel.catalog.huggingface._unknown import CannotDescribeError
from perfmodel.spec.parts import Mamba, SelectiveScan, SharedBlock

_WORDS: Final[Mapping[str, str]] = {
    "linear_attention": "",
    "mamba": "",
    "mamba2": "",
    "hybrid": "A",
}
"""What stands before the Mamba of a layer, by the words of `layers_block_type`."""


@dataclass(frozen=True, kw_only=True)
class Zamba(Stack):
    """Zamba (transformers models/zamba/modeling_zamba.py). Configurations omit what equals the
    defaults of the Hugging Face class."""

    READS_LAYER_TYPES: ClassVar[bool] = True
    ALIASES: ClassVar[Mapping[str, str]] = {
        "layer_types": "layers_block_type",
        "head_dim": "attention_head_dim",
    }

    hidden_size: Count = 3712
    num_attention_heads: Count = 16
    num_hidden_layers: Count = 76
    vocab_size: Count = 32_000
    intermediate_size: Count | None = 14_848
    num_key_value_heads: Count | None = None
    attention_head_dim: Count | None = None
    attention_hidden_size: Count | None = None
    max_position_embeddings: Count = 4096
    hidden_act: str = "gelu"
    tie_word_embeddings: bool = True
    layers_block_type: tuple[str, ...] | None = None
    attn_layer_period: Count = 6
    attn_layer_offset: CountOrNone = 4
    mamba_d_state: Count = 16
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_dt_rank: Count | Literal["auto"] = "auto"
    mamba_proj_bias: bool = False

    def with_block(self) -> list[str]:
        """An A for each layer that begins with the shared block, or nothing."""
        n_layers = self.num_hidden_layers
        if self.layers_block_type is not None:
            return letters_of(self.layers_block_type, _WORDS, "layers_block_type", n_layers)
        listed = ["", "", "A"]
        for layer in range(n_layers - 3):
            listed.append("A" if layer % self.attn_layer_period == self.attn_layer_offset else "")
        return listed[:n_layers]

    def mixer(self) -> tuple[str, Fields]:
        """Letter and sizes of the Mamba of every layer."""
        if self.mamba_proj_bias:
            raise CannotDescribeError("its Mamba projections have biases (mamba_proj_bias)")
        # Heads of Mamba have projections of their own to step sizes, and to inputs and outputs of
        # the state; together they have as many weights as one head would (`x_proj_weight`,
        # `dt_proj_weight`).
        rank = -(-self.hidden_size // 16) if self.mamba_dt_rank == "auto" else self.mamba_dt_rank
        scan = SelectiveScan(
            inner=self.mamba_expand * self.hidden_size,
            state=self.mamba_d_state,
            step_rank=rank,
            conv_kernel=self.mamba_d_conv,
        )
        return "S", {"selective_scan": scan}

    def block(self) -> SharedBlock:
        """The shared block."""
        return SharedBlock()

    def has_rotation(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return False

    def fields(self) -> Fields:
        # Queries, keys and values are projected from the hidden state beside the token's embedding:
        # a class of any other input size is built, but fails at the first pass.
        input_size = self.attention_hidden_size
        if input_size is not None and input_size != 2 * self.hidden_size:
            raise CannotDescribeError(
                f"attention_hidden_size={input_size} is not twice the hidden size {self.hidden_size}"
            )
        letter, mixer = self.mixer()
        layer_words = [before + letter for before in self.with_block()]
        heads = self.num_attention_heads
        sizes = plain_sizes(
            self.num_hidden_layers,
            self.hidden_size,
            heads,
            self.intermediate_size,
            self.vocab_size,
            self.max_position_embeddings,
            # Attention sees the token's embedding beside the hidden state.
            self.attention_head_dim or per_head(2 * self.hidden_size, heads),
        )
        return sizes | {
            "kv_heads": self.num_key_value_heads or heads,
            "activation": activation(self.hidden_act),
            "gated_ffn": True,
            "norm": "rms_norm",
            "positions": "rope" if self.has_rotation() else "none",
            "bias": False,
            "dropout": False,
            "tied_embeddings": self.tie_word_embeddings,
            "mixers": mixer_words(layer_words),
            "shared_block": self.block() if any("A" in word for word in layer_words) else None,
            **mixer,
        }


@dataclass(frozen=True, kw_only=True)
class Zamba2(Zamba):
    """Zamba 2: Mamba-2, several shared blocks in turn, and adapters of each layer beside their
    products (transformers models/zamba2/modeling_zamba2.py)."""

    hidden_size: Count = 2560
    num_attention_heads: Count = 32
    num_hidden_layers: Count = 54
    intermediate_size: Count | None = None
    mamba_d_state: Count = 64
    n_mamba_heads: Count = 8
    mamba_ngroups: Count = 1
    chunk_size: Count = 256
    num_mem_blocks: Count = 1
    adapter_rank: Count = 128
    use_shared_attention_adapter: bool = False
    use_mem_rope: bool = False
    add_bias_linear: bool = False

    def with_block(self) -> list[str]:
        if self.layers_block_type is not None:
            return super().with_block()
        # The pattern of the Hugging Face class, which is that of 54 layers.
        before = [
            "",
            *(["", "", "", "", "", "A"] * 7),
            "",
            "",
            "",
            "",
            "A",
            "",
            "",
            "",
            "A",
            "",
            "",
        ]
        return letters_of(
            before, {"": "", "A": "A"}, "the default of layers_block_type", self.num_hidden_layers
        )

    def mixer(self) -> tuple[str, Fields]:
        if self.add_bias_linear:
            raise CannotDescribeError("its projections have biases (add_bias_linear)")
        mamba = Mamba(
            heads=self.n_mamba_heads,
            head_dim=per_head(self.mamba_expand * self.hidden_size, self.n_mamba_heads),
            state=self.mamba_d_state,
            groups=self.mamba_ngroups,
            conv_kernel=self.mamba_d_conv,
            chunk=self.chunk_size,
        )
        return "M", {"mamba": mamba}

    def block(self) -> SharedBlock:
        return SharedBlock(
            copies=self.num_mem_blocks,
            adapter_rank=self.adapter_rank,
            attention_adapters=self.use_shared_attention_adapter,
        )

    def has_rotation(self) -> bool:
        return self.use_mem_rope
