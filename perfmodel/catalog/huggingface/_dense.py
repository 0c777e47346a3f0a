"""Hugging Face configurations of dense models other than LLaMA's: OPT, Gemma, OLMo, StarCoder, GLM,
Nemotron; and of those whose attention and feed-forward run side by side: GPT-NeoX, Falcon, Phi,
StableLM and Command R (GPT-J stands with GPT-2)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from perfmodel.catalog.huggingface._llama import (
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
from perfmodel.spec.parts import NarrowEmbedding


@dataclass(frozen=True, kw_only=True)
class Opt(Stack):
    """OPT and Galactica. OPT of 350 M parameters has a narrow table of tokens, and layers that end
    with their norms; Galactica has no biases (transformers models/opt/modeling_opt.py
    `OPTDecoder`)."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "_remove_final_layer_norm": "remove_final_layer_norm",
    }

    ffn_dim: Count
    max_position_embeddings: Count = 2048
    activation_function: str = "relu"
    tie_word_embeddings: bool = True
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    remove_final_layer_norm: bool = False
    word_embed_proj_dim: Count | None = None
    do_layer_norm_before: bool = True
    dropout: Share = 0.1

    def fields(self) -> Fields:
        # Norms are GPT-2's, the defaults of `Transformer`, and positions but for two rows before
        # the first.
        table_width = self.word_embed_proj_dim or self.hidden_size
        narrow_embedding = (
            None if table_width == self.hidden_size else NarrowEmbedding(width=table_width)
        )
        return self.sizes(self.ffn_dim, self.max_position_embeddings) | {
            "activation": activation(self.activation_function),
            "position_offset": 2,
            "narrow_embedding": narrow_embedding,
            "final_norm": self.do_layer_norm_before and not self.remove_final_layer_norm,
            "tied_embeddings": self.tie_word_embeddings,
            "bias": self.enable_bias,
            # Norms keep their shifts without biases elsewhere.
            "norm_bias": True,
            "norm_parameters": self.layer_norm_elementwise_affine,
            "dropout": self.dropout > 0,
        }


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
    """Gemma 2: every second layer attends in full, norms at both ends, bounded scores and
    logits."""

    sliding_window: CountOrNone = 4096
    attn_logit_softcapping: Annotated[float, Ge(0)] = 50.0
    final_logit_softcapping: Annotated[float, Ge(0)] = 30.0

    def fields(self) -> Fields:
        return super().fields() | {
            # Layers alternate (transformers models/gemma2/modeling_gemma2.py): the configuration
            # has no key for it.
            "full_attention_every": 2,
            "norm_at": "both",
            "attention_softcap": self.attn_logit_softcapping > 0,
            "logit_softcap": self.final_logit_softcapping > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Gemma3(Gemma):
    """Gemma 3: every sixth layer attends in full; queries and keys are normalised. Configurations
    omit what equals the defaults of the Hugging Face class."""

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
        return super().fields() | {
            "full_attention_every": self.sliding_window_pattern,
            "norm_at": "both",
            "qk_norm": True,
        }


@dataclass(frozen=True, kw_only=True)
class Olmo2(Llama):
    """OLMo 2: the outputs of sub-layers are normalised instead of their inputs, and so are the
    queries and keys of all heads."""

    def fields(self) -> Fields:
        # Queries are normalised before they are divided into heads, with a scale for every element.
        return super().fields() | {
            "norm_at": "output",
            "qk_norm": True,
            "qk_norm_of_all_heads": True,
        }


@dataclass(frozen=True, kw_only=True)
class Glm(Llama):
    """GLM-4 (`glm`)."""

    BIASED_OUTPUT: ClassVar[bool] = False

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
    """Nemotron-4, Minitron: squared ReLU without a gate, layer norms with a shift in a model
    without biases."""

    hidden_act: str = "relu2"

    def fields(self) -> Fields:
        return super().fields() | {"gated_ffn": False, "norm": "layer_norm", "norm_bias": True}


@dataclass(frozen=True, kw_only=True)
class Starcoder2(Stack):
    """StarCoder 2."""

    intermediate_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count = 4096
    hidden_act: str = "gelu_pytorch_tanh"
    use_bias: bool = True
    tie_word_embeddings: bool = True
    sliding_window: CountOrNone = 0
    residual_dropout: Share = 0.0

    def fields(self) -> Fields:
        return self.sizes(self.intermediate_size, self.max_position_embeddings, self.head_dim) | {
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "activation": activation(self.hidden_act),
            "positions": "rope",
            "bias": self.use_bias,
            # Its layer norms keep their shifts also where `use_bias` is off.
            "norm_bias": None if self.use_bias else True,
            "tied_embeddings": self.tie_word_embeddings,
            "window": self.sliding_window,
            "dropout": self.residual_dropout > 0,
        }


@dataclass(frozen=True, kw_only=True)
class GptNeoX(Stack):
    """GPT-NeoX, Pythia: attention and feed-forward side by side, each on a norm of its own."""

    intermediate_size: Count
    use_parallel_residual: bool = True
    max_position_embeddings: Count = 2048
    hidden_act: str = "gelu"
    tie_word_embeddings: bool = False
    hidden_dropout: Share = 0.0

    def fields(self) -> Fields:
        return self.sizes(self.intermediate_size, self.max_position_embeddings) | {
            "activation": activation(self.hidden_act),
            "positions": "rope",
            # Attention and feed-forward read norms of their own, though from the same input.
            "parallel_blocks": "two_norms" if self.use_parallel_residual else "none",
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": self.hidden_dropout > 0,
        }


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
        # The new architecture (40B, 180B) groups keys and values; the old one
        # has one pair for all heads, or one for each.
        heads = self.num_attention_heads
        kv_heads = 1 if self.multi_query else heads
        if self.new_decoder_architecture:
            kv_heads = self.num_kv_heads or heads
        norms = self.num_ln_in_parallel_attn or (2 if self.new_decoder_architecture else 1)
        parallel_blocks = "none"
        if self.parallel_attn:
            parallel_blocks = "one_norm" if norms == 1 else "two_norms"
        return self.sizes(self.ffn_hidden_size, 2048) | {
            "kv_heads": kv_heads,
            "positions": "alibi" if self.alibi else "rope",
            "parallel_blocks": parallel_blocks,
            "bias": self.bias,
            "norm_bias": True,
            "dropout": self.hidden_dropout > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Phi(Stack):
    """Phi-1, 1.5 and 2. The head's bias is left out."""

    intermediate_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count = 2048
    hidden_act: str = "gelu_new"
    tie_word_embeddings: bool = False
    qk_layernorm: bool = False
    resid_pdrop: Share = 0.0

    def fields(self) -> Fields:
        return self.sizes(self.intermediate_size, self.max_position_embeddings, self.head_dim) | {
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
    """StableLM 2 and 3B: layer norms with shifts, side by side where the configuration says so.
    Norms of queries and keys have a scale for every head."""

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
    """Command R: layer norms without shifts. Norms of queries and keys (Command R+) have a scale
    for every head."""

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
    """Command R7B and A: every fourth layer attends in full (and without rotation, which is counted
    all the same)."""

    sliding_window: CountOrNone = 4096
    sliding_window_pattern: Count = 4

    def fields(self) -> Fields:
        return super().fields() | {"full_attention_every": self.sliding_window_pattern}


@dataclass(frozen=True, kw_only=True)
class ChatGlm:
    """ChatGLM 2 and 3, and GLM-4 by its own code: grouped keys and values, biases in their
    projections."""

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
            self.num_layers,
            self.hidden_size,
            heads,
            self.ffn_hidden_size,
            self.padded_vocab_size,
            self.seq_length,
        )
        return sizes | {
            "kv_heads": self.multi_query_group_num if self.multi_query_attention else heads,
            # Its own modelling code takes Megatron-LM's names of sizes.
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
    """The first Qwen: biases in the projections of attention; its inner size counts gate and value
    together."""

    seq_length: Count = 8192

    def fields(self) -> Fields:
        return super().fields() | {
            # modeling_qwen.py makes two projections of half of `intermediate_size` each.
            "ffn_hidden": self.intermediate_size // 2,
            "qkv_bias": True,
            "seq_len": self.seq_length,
        }
