"""Hugging Face configurations, family by family: which keys each has, what they may hold, and the model they mean.

Keys that are null count as absent, as in Hugging Face's own classes; keys that are not listed do not change shapes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol

from annotated_types import Gt, Le

from perfmodel.catalog._hf_dense import (
    Cohere,
    Cohere2,
    Falcon,
    Gemma,
    Gemma2,
    Gemma3,
    Glm,
    Glm4,
    GptNeoX,
    Nemotron,
    Olmo2,
    Opt,
    Phi,
    StableLm,
    Starcoder2,
)
from perfmodel.catalog._hf_experts import DeepSeek, GptOss, LlamaWithExperts, Qwen2Moe, Qwen3Moe
from perfmodel.catalog._hf_hybrids import (
    Bamba,
    FirstMamba,
    GraniteHybrid,
    Jamba,
    Llama4,
    Mamba2,
    NemotronH,
    Qwen3Next,
    Qwen35,
)
from perfmodel.catalog._hf_llama import (
    Count,
    CountOrNone,
    Fields,
    LatentLlama,
    Layers,
    Llama,
    Qwen2,
    Qwen3,
    Share,
    Stack,
    activation,
    plain_sizes,
)
from perfmodel.catalog._hf_more import (
    Arctic,
    ChatGlm,
    Dbrx,
    Electra,
    EncoderDecoder,
    FalconH1,
    FirstQwen,
    GptBigCode,
    GptNeo,
    Lfm2,
    Lfm2Moe,
    ModernBert,
    Whisper,
)
from perfmodel.errors import PerfModelError
from perfmodel.spec import AdaLN, Patches


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
        return plain_sizes(self.n_layer, self.n_embd, self.n_head, self.n_inner, self.vocab_size, self.n_positions) | {
            "activation": activation(self.activation_function),
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": self.resid_pdrop > 0,
        }


@dataclass(frozen=True, kw_only=True)
class GptJ(Gpt2):
    """Attention and feed-forward side by side on one norm. Its attention projections have no biases; the few that
    remain (feed-forward, head) are left out."""

    n_positions: Count = 2048
    tie_word_embeddings: bool = False
    resid_pdrop: Share = 0.0

    def fields(self) -> Fields:
        own = {"activation": "gelu", "positions": "rope", "bias": False, "norm_bias": True}
        return super().fields() | own | {"parallel_blocks": "one_norm"}


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
        return self.sizes(None, self.seq_length) | {"positions": "alibi", "dropout": self.hidden_dropout > 0}


@dataclass(frozen=True, kw_only=True)
class Bert(Stack):
    """BERT."""

    intermediate_size: Count
    max_position_embeddings: Count = 512
    hidden_act: str = "gelu"
    type_vocab_size: CountOrNone = 2
    hidden_dropout_prob: Share = 0.1

    def fields(self) -> Fields:
        return self.sizes(self.intermediate_size, self.max_position_embeddings) | {
            "activation": activation(self.hidden_act),
            "causal": False,
            "token_types": self.type_vocab_size,
            "pooler_and_mlm_head": True,
            "dropout": self.hidden_dropout_prob > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Roberta(Bert):
    """RoBERTa: BERT without the pooler and the head that tells whether sentences follow one another."""

    def fields(self) -> Fields:
        return super().fields() | {"pooler": False}


@dataclass(frozen=True, kw_only=True)
class T5:
    """T5 and mT5."""

    d_model: Count
    d_kv: Count
    d_ff: Count
    num_layers: Layers
    num_heads: Count
    vocab_size: Count
    num_decoder_layers: Layers | None = None
    n_positions: Count = 512
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    dropout_rate: Share = 0.1

    def fields(self) -> Fields:
        return {
            "layers": self.num_layers,
            "decoder_layers": self.num_decoder_layers or self.num_layers,
            "hidden": self.d_model,
            "heads": self.num_heads,
            "kv_heads": self.num_heads,
            "head_dim": self.d_kv,
            "ffn_hidden": self.d_ff,
            "vocab": self.vocab_size,
            "seq_len": self.n_positions,
            "gated_ffn": self.feed_forward_proj.startswith("gated"),
            "activation": activation(self.feed_forward_proj.removeprefix("gated-")),
            "norm": "rms_norm",
            "positions": "relative",
            "bias": False,
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": self.dropout_rate > 0,
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
    attn_config: MptAttention = MptAttention()
    no_bias: bool = False
    resid_pdrop: Share = 0.0

    def fields(self) -> Fields:
        attention = self.attn_config
        inner = self.expansion_ratio * self.d_model
        # A ratio such as 2.6667 must not give a size that no matrix has.
        if inner != int(inner) or inner < 1:
            raise PerfModelError(f"expansion_ratio {self.expansion_ratio} times d_model {self.d_model} is not whole")
        sizes = plain_sizes(self.n_layers, self.d_model, self.n_heads, int(inner), self.vocab_size, self.max_seq_len)
        one = 1 if attention.attn_type == "multiquery_attention" else self.n_heads
        return sizes | {
            "kv_heads": attention.kv_n_heads or one,
            "positions": "alibi" if attention.alibi else "rope" if attention.rope else "learned",
            "bias": not self.no_bias,
            "dropout": self.resid_pdrop > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Vit:
    """ViT; without classes (`id2label`) it has no head, and its pooler is left out."""

    CLASS_TOKENS: ClassVar[int] = 1

    hidden_size: Count = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Count = 12
    intermediate_size: Count = 3072
    image_size: Count = 224
    patch_size: Count = 16
    num_channels: Count = 3
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    id2label: dict[str, Any] = field(default_factory=dict)

    def fields(self) -> Fields:
        patches = Patches(
            image_size=self.image_size,
            patch_size=self.patch_size,
            channels=self.num_channels,
            class_tokens=self.CLASS_TOKENS,
        )
        sizes = plain_sizes(
            self.num_hidden_layers,
            self.hidden_size,
            self.num_attention_heads,
            self.intermediate_size,
            len(self.id2label),
            patches.tokens,
        )
        return sizes | {
            "patches": patches,
            "causal": False,
            "tied_embeddings": False,
            "activation": activation(self.hidden_act),
            "dropout": self.hidden_dropout_prob > 0,
        }


@dataclass(frozen=True, kw_only=True)
class Siglip(Vit):
    """SigLIP's vision tower as language models use it: without its pooling head."""

    CLASS_TOKENS: ClassVar[int] = 0

    hidden_act: str = "gelu_pytorch_tanh"


@dataclass(frozen=True, kw_only=True)
class Dit:
    """DiT on latents, with one embedding of time step and class for all layers, as its authors train it (diffusers
    gives each layer its own)."""

    num_attention_heads: Count = 16
    attention_head_dim: Count = 72
    num_layers: Layers = 28
    in_channels: Count = 4
    out_channels: Count | None = None
    sample_size: Count = 32
    patch_size: Count = 2
    num_embeds_ada_norm: Count = 1000

    def fields(self) -> Fields:
        patches = Patches(
            image_size=self.sample_size,
            patch_size=self.patch_size,
            channels=self.in_channels,
            out_channels=self.out_channels or self.in_channels,
        )
        hidden, heads = self.num_attention_heads * self.attention_head_dim, self.num_attention_heads
        return plain_sizes(self.num_layers, hidden, heads, None, 0, patches.tokens) | {
            "patches": patches,
            "adaln": AdaLN(classes=self.num_embeds_ada_norm),
            "causal": False,
            "dropout": False,
            "tied_embeddings": False,
            "positions": "none",
        }


class Family(Protocol):
    """A family's configuration."""

    def fields(self) -> Fields:
        """Of the model that it means."""
        ...


FAMILIES: Mapping[str, type[Family]] = {
    "arctic": Arctic,
    "bamba": Bamba,
    "bart": EncoderDecoder,
    "bert": Bert,
    "bloom": Bloom,
    "chatglm": ChatGlm,
    "cohere": Cohere,
    "cohere2": Cohere2,
    "dbrx": Dbrx,
    "deepseek_v2": DeepSeek,
    "deepseek_v3": DeepSeek,
    "DiTTransformer2DModel": Dit,
    "electra": Electra,
    "falcon": Falcon,
    "falcon_h1": FalconH1,
    "falcon_mamba": FirstMamba,
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3": Gemma3,
    "glm": Glm,
    "glm4": Glm4,
    "glm4_moe": LlamaWithExperts,
    "gpt2": Gpt2,
    "gpt_bigcode": GptBigCode,
    "gpt_neo": GptNeo,
    "gpt_neox": GptNeoX,
    "gpt_oss": GptOss,
    "gptj": GptJ,
    "granitemoehybrid": GraniteHybrid,
    "jamba": Jamba,
    "lfm2": Lfm2,
    "lfm2_moe": Lfm2Moe,
    "llama": Llama,
    "llama4": Llama4,
    "llama_with_experts": LlamaWithExperts,
    "mamba": FirstMamba,
    "mamba2": Mamba2,
    "minicpm3": LatentLlama,
    "mistral": Llama,
    "modernbert": ModernBert,
    "mpt": Mpt,
    "mt5": T5,
    "nemotron": Nemotron,
    "nemotron_h": NemotronH,
    "olmo2": Olmo2,
    "opt": Opt,
    "phi": Phi,
    "phi3": Llama,
    "qwen": FirstQwen,
    "qwen2": Qwen2,
    "qwen2_moe": Qwen2Moe,
    "qwen3": Qwen3,
    "qwen3_5": Qwen35,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
    "roberta": Roberta,
    "siglip_vision_model": Siglip,
    "stablelm": StableLm,
    "starcoder2": Starcoder2,
    "t5": T5,
    "vit": Vit,
    "whisper": Whisper,
}
"""Families by `model_type`, each with the class that reads its configuration; see also `RELATIVES`."""
