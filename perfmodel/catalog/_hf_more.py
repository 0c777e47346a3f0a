"""Hugging Face configurations of further shapes.

Encoder-decoders, gated short convolutions, latent attention without experts, and some older decoders and encoders.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from annotated_types import Ge, Le

from perfmodel.catalog._hf_experts import LlamaWithExperts
from perfmodel.catalog._hf_hybrids import MambaKeys
from perfmodel.catalog._hf_llama import (
    Count,
    CountOrNone,
    Fields,
    Layers,
    Llama,
    Share,
    Stack,
    activation,
    plain_sizes,
)
from perfmodel.errors import PerfModelError
from perfmodel.spec import Experts, ShortConv


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """BART, mBART, Pegasus, Marian and their like: an encoder and a decoder with biases and layer norms."""

    d_model: Count
    encoder_layers: Layers
    decoder_layers: Layers
    encoder_attention_heads: Count
    encoder_ffn_dim: Count
    vocab_size: Count
    decoder_attention_heads: Count | None = None
    decoder_ffn_dim: Count | None = None
    max_position_embeddings: Count = 1024
    activation_function: str = "gelu"
    tie_word_embeddings: bool = True
    dropout: Share = 0.1

    def lengths(self) -> Fields:
        """Tokens that the encoder and the decoder are given."""
        return {"seq_len": self.max_position_embeddings}

    def fields(self) -> Fields:
        heads, inner = self.encoder_attention_heads, self.encoder_ffn_dim
        # `Transformer` has one set of sizes for both stacks, as nearly all of these models do.
        if (self.decoder_attention_heads or heads, self.decoder_ffn_dim or inner) != (heads, inner):
            raise PerfModelError("decoder_attention_heads and decoder_ffn_dim must be those of the encoder")
        sizes = plain_sizes(self.encoder_layers, self.d_model, heads, inner, self.vocab_size, 1)
        return (
            sizes
            | {
                "decoder_layers": self.decoder_layers,
                "activation": activation(self.activation_function),
                "tied_embeddings": self.tie_word_embeddings,
                "dropout": self.dropout > 0,
            }
            | self.lengths()
        )


@dataclass(frozen=True, kw_only=True)
class Whisper(EncoderDecoder):
    """Whisper: the encoder is given frames of sound, which two convolutions make of a spectrum."""

    max_source_positions: Count = 1500
    max_target_positions: Count = 448
    dropout: Share = 0.0

    def lengths(self) -> Fields:
        return {"seq_len": self.max_source_positions, "decoder_seq_len": self.max_target_positions}


@dataclass(frozen=True, kw_only=True)
class GptBigCode:
    """StarCoder and SantaCoder: GPT-2 whose heads share keys and values."""

    n_embd: Count
    n_head: Count
    n_layer: Layers
    vocab_size: Count
    n_inner: Count | None = None
    n_positions: Count = 1024
    activation_function: str = "gelu_pytorch_tanh"
    multi_query: bool = True
    tie_word_embeddings: bool = True
    resid_pdrop: Share = 0.1

    def fields(self) -> Fields:
        sizes = plain_sizes(self.n_layer, self.n_embd, self.n_head, self.n_inner, self.vocab_size, self.n_positions)
        return sizes | {
            "kv_heads": 1 if self.multi_query else self.n_head,
            "activation": activation(self.activation_function),
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": self.resid_pdrop > 0,
        }


@dataclass(frozen=True, kw_only=True)
class GptNeo:
    """GPT-Neo: every second layer attends in a window. Biases of queries, keys and values are counted, though it has
    none."""

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
        kinds = self.attention_layers or ("global", "local")
        words = ["*-" if kind == "global" else "W-" for kind in kinds]
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
            "window": self.window_size,
            "mixers": " ".join(words) + " ",
            "dropout": self.resid_dropout > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Electra(Stack):
    """ELECTRA's discriminator with embeddings as wide as its layers, counted with the head of its generator."""

    intermediate_size: Count
    embedding_size: Count = 128
    max_position_embeddings: Count = 512
    hidden_act: str = "gelu"
    type_vocab_size: CountOrNone = 2
    hidden_dropout_prob: Share = 0.1

    def fields(self) -> Fields:
        if self.embedding_size != self.hidden_size:
            raise PerfModelError(
                f"embedding_size {self.embedding_size} is projected to hidden_size {self.hidden_size}, which is not "
                "described here; give a TOML file of its layers with --model"
            )
        return self.sizes(self.intermediate_size, self.max_position_embeddings) | {
            "activation": activation(self.hidden_act),
            "causal": False,
            "token_types": self.type_vocab_size,
            "pooler_and_mlm_head": True,
            "pooler": False,
            "dropout": self.hidden_dropout_prob > 0,
        }


@dataclass(frozen=True, kw_only=True)
class ModernBert(Stack):
    """ModernBERT: rotary positions, gated feed-forwards without biases, a window in two of three layers."""

    intermediate_size: Count
    max_position_embeddings: Count = 8192
    hidden_activation: str = "gelu"
    global_attn_every_n_layers: Count = 3
    local_attention: Count = 128

    def fields(self) -> Fields:
        words = ["*-"] + ["W-"] * (self.global_attn_every_n_layers - 1)
        return self.sizes(self.intermediate_size, self.max_position_embeddings) | {
            "activation": activation(self.hidden_activation),
            "gated_ffn": True,
            "norm": "layer_norm",
            "norm_bias": False,
            "positions": "rope",
            "bias": False,
            "causal": False,
            "window": self.local_attention,
            "mixers": " ".join(words) + " ",
            "pooler_and_mlm_head": True,
            "pooler": False,
            "dropout": False,
        }


@dataclass(frozen=True, kw_only=True)
class ChatGlm:
    """ChatGLM 2 and 3, and GLM-4 by its own code: grouped keys and values, biases in their projections."""

    hidden_size: Count
    num_layers: Layers
    num_attention_heads: Count
    ffn_hidden_size: Count
    padded_vocab_size: Count
    kv_channels: Count = 128
    multi_query_attention: bool = False
    multi_query_group_num: Count = 1
    seq_length: Count = 2048
    add_qkv_bias: bool = False
    add_bias_linear: bool = False
    tie_word_embeddings: bool = False

    def fields(self) -> Fields:
        heads = self.num_attention_heads
        sizes = plain_sizes(
            self.num_layers, self.hidden_size, heads, self.ffn_hidden_size, self.padded_vocab_size, self.seq_length
        )
        return sizes | {
            "kv_heads": self.multi_query_group_num if self.multi_query_attention else heads,
            "head_dim": self.kv_channels,
            "activation": "silu",
            "gated_ffn": True,
            "norm": "rms_norm",
            "positions": "rope",
            "bias": self.add_bias_linear,
            "qkv_bias": self.add_qkv_bias,
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": False,
        }


@dataclass(frozen=True, kw_only=True)
class FirstQwen(Llama):
    """The first Qwen: biases in the projections of attention; its inner size counts gate and value together."""

    seq_length: Count = 8192

    def fields(self) -> Fields:
        return super().fields() | {
            "ffn_hidden": self.intermediate_size // 2,
            "qkv_bias": True,
            "seq_len": self.seq_length,
        }


@dataclass(frozen=True, kw_only=True)
class FalconH1(Llama, MambaKeys):
    """Falcon-H1: every layer has attention and Mamba-2 on one input, here one after the other with a norm each; its
    mixers end without a norm unless `mamba_rms_norm` says so."""

    def fields(self) -> Fields:
        return super().fields() | {"mixers": "*M- ", "mamba": self.mamba()}


CONVOLUTION_LETTERS: Final[Mapping[str, str]] = {"conv": "C", "full_attention": "*"}
"""Letters of `MIXERS` for the words of LFM2's `layer_types`."""


def _convolution_words(kinds: tuple[str, ...], layers: int) -> list[str]:
    unknown = sorted(set(kinds) - set(CONVOLUTION_LETTERS))
    if unknown or len(kinds) != layers:
        raise PerfModelError(f"layer_types must be {layers} of {', '.join(CONVOLUTION_LETTERS)}; got {len(kinds)}")
    return [CONVOLUTION_LETTERS[kind] for kind in kinds]


@dataclass(frozen=True, kw_only=True)
class Lfm2(Llama):
    """LFM2: gated short convolutions in place of most attentions."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    layer_types: tuple[str, ...] = ()
    full_attn_idxs: tuple[CountOrNone, ...] | None = None
    conv_L_cache: Count = 3
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: Annotated[float, Ge(0), Le(1000)] = 1.0
    block_multiple_of: Count = 256
    tie_word_embeddings: bool = True

    def inner(self) -> int:
        """Two thirds of the stated size, rounded up (`Lfm2MLP`), unless the configuration turns that off."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size = int(self.block_ffn_dim_multiplier * int(2 * self.intermediate_size / 3))
        return -(-size // self.block_multiple_of) * self.block_multiple_of

    def kinds(self) -> tuple[str, ...]:
        """What each layer is."""
        if self.layer_types:
            return self.layer_types
        attending = range(self.num_hidden_layers) if self.full_attn_idxs is None else self.full_attn_idxs
        return tuple("full_attention" if i in attending else "conv" for i in range(self.num_hidden_layers))

    def fields(self) -> Fields:
        letters = _convolution_words(self.kinds(), self.num_hidden_layers)
        words = [letter + "-" for letter in letters]
        return super().fields() | {
            "ffn_hidden": self.inner(),
            "qk_norm": True,
            "mixers": " ".join(words) + " ",
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
        letters = _convolution_words(self.layer_types, self.num_hidden_layers)
        dense = self.first_k_dense_replace
        words = [letter + ("-" if at < dense else "E") for at, letter in enumerate(letters)]
        return super().fields() | {
            "qk_norm": True,
            "mixers": " ".join(words) + " ",
            "short_conv": ShortConv(kernel=self.conv_L_cache) if "C" in letters else None,
        }


@dataclass(frozen=True, kw_only=True)
class DbrxAttention:
    """`attn_config` of DBRX."""

    kv_n_heads: Count = 1


@dataclass(frozen=True, kw_only=True)
class DbrxExperts:
    """`ffn_config` of DBRX."""

    ffn_hidden_size: Count = 3584
    moe_num_experts: Count = 4
    moe_top_k: Count = 1


@dataclass(frozen=True, kw_only=True)
class Dbrx:
    """DBRX: experts in every layer, layer norms without shifts."""

    d_model: Count = 2048
    n_heads: Count = 16
    n_layers: Layers = 24
    vocab_size: Count = 32000
    max_seq_len: Count = 2048
    attn_config: DbrxAttention = DbrxAttention()
    ffn_config: DbrxExperts = DbrxExperts()
    tie_word_embeddings: bool = False
    resid_pdrop: Share = 0.0

    def fields(self) -> Fields:
        inner = self.ffn_config.ffn_hidden_size
        sizes = plain_sizes(self.n_layers, self.d_model, self.n_heads, inner, self.vocab_size, self.max_seq_len)
        return sizes | {
            "kv_heads": self.attn_config.kv_n_heads,
            "activation": "silu",
            "gated_ffn": True,
            "positions": "rope",
            "bias": False,
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": self.resid_pdrop > 0,
            "experts": Experts(count=self.ffn_config.moe_num_experts, topk=self.ffn_config.moe_top_k, ffn_hidden=inner),
        }


@dataclass(frozen=True, kw_only=True)
class Arctic(LlamaWithExperts):
    """Snowflake Arctic: beside the experts of a layer runs a dense feed-forward as wide inside as the hidden size
    (`ArcticMLP(is_residual_mlp=True)` of its own modeling_arctic.py), which is a shared expert."""

    ALIASES: ClassVar[Mapping[str, str]] = {**LlamaWithExperts.ALIASES, "moe_layer_frequency": "decoder_sparse_step"}

    parallel_attn_mlp_res: bool = True

    def fields(self) -> Fields:
        fields: dict[str, Any] = super().fields()
        if not self.parallel_attn_mlp_res:
            return fields
        residual = {"shared_ffn_hidden": self.hidden_size}
        return fields | {"experts": Experts(**(vars(fields["experts"]) | residual))}
