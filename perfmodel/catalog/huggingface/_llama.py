"""Kinds of values and sizes that Hugging Face configurations of all families share, and the
configurations of LLaMA and what follows its shape without experts: Mistral, Qwen."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from perfmodel.errors import PerfModelError
from perfmodel.spec.parts import LatentAttention

MOST = 10**9
Count = Annotated[int, Ge(1), Le(MOST)]
Layers = Annotated[int, Ge(1), Le(10**5)]
CountOrNone = Annotated[int, Ge(0), Le(MOST)]
"""A count; 0 if the part is absent."""
Share = Annotated[float, Ge(0), Le(1)]
Fields = dict[str, Any]
"""Arguments of `perfmodel.spec.Transformer`."""


def plain_sizes(
    layers: int,
    hidden: int,
    heads: int,
    ffn: int | None,
    vocab: int,
    seq_len: int,
    head_dim: int | None = None,
) -> Fields:
    """Sizes of a stack; by default heads share the hidden size evenly (`head_dim`), and the inner
    size is four times the hidden size (`ffn`)."""
    # Fields that are left out here have `Transformer`'s defaults, which are GPT-2's: layer norms,
    # learned positions, biases.
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": head_dim or per_head(hidden, heads),
        "ffn_hidden": ffn or 4 * hidden,
        "vocab": vocab,
        "seq_len": seq_len,
    }


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Sizes that most families call by the same names."""

    hidden_size: Count
    num_attention_heads: Count
    num_hidden_layers: Layers
    vocab_size: Count

    def sizes(self, ffn: int | None, seq_len: int, head_dim: int | None = None) -> Fields:
        """Sizes of the stack, with the usual widths of layers and heads unless these are given
        (`plain_sizes`)."""
        return plain_sizes(
            self.num_hidden_layers,
            self.hidden_size,
            self.num_attention_heads,
            ffn,
            self.vocab_size,
            seq_len,
            head_dim,
        )


def per_head(hidden: int, heads: int) -> int:
    """Elements of a head where heads share the hidden size evenly."""
    if hidden % heads:
        raise PerfModelError(
            f"hidden size {hidden} is not divisible by {heads} attention heads; give head_dim"
        )
    return hidden // heads


def activation(name: str) -> str:
    """The catalog's word for an activation function."""
    # xIELU of Apertus is squared on one side too (arXiv 2411.13010)
    if name in ("relu2", "squared_relu", "xielu"):
        return "relu2"
    # GPT-OSS's SwiGLU, which cuts its inputs at a limit; see `clamped_glu`.
    if name == "swigluoai":
        return "silu"
    # Names have endings for approximations (`gelu_pytorch_tanh`, `gelu_new`), which cost alike.
    for known in ("gelu", "silu", "relu"):
        if known in name or (known == "silu" and name == "swish"):
            return known
    raise PerfModelError(f"activation {name!r} is not supported; use gelu, silu, relu or relu2")


@dataclass(frozen=True, kw_only=True)
class Llama(Stack):
    """LLaMA, Mistral: RMS norm, rotary positions, gated feed-forward, no biases."""

    BIASED_OUTPUT: ClassVar[bool] = True
    """Whether `attention_bias` also applies to the output projection."""

    intermediate_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: CountOrNone = 0
    use_sliding_window: bool = True

    def head_size(self) -> int:
        """Elements of a head."""
        # Newer models have heads that do not share the hidden size out evenly, and state their
        # size.
        return self.head_dim or per_head(self.hidden_size, self.num_attention_heads)

    def fields(self) -> Fields:
        return {
            "layers": self.num_hidden_layers,
            "hidden": self.hidden_size,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_size(),
            "ffn_hidden": self.intermediate_size,
            "vocab": self.vocab_size,
            "seq_len": self.max_position_embeddings,
            "activation": activation(self.hidden_act),
            "gated_ffn": True,
            "norm": "rms_norm",
            "positions": "rope",
            # Biases in all products, as in Granite's models of code; RMS norms have no shifts.
            "bias": self.attention_bias and self.mlp_bias and self.BIASED_OUTPUT,
            "qkv_bias": self.attention_bias,
            "output_bias": self.attention_bias and self.BIASED_OUTPUT,
            "dropout": False,
            "tied_embeddings": self.tie_word_embeddings,
            # Qwen's configurations state a window and turn it off beside it.
            "window": self.sliding_window if self.use_sliding_window else 0,
        }


@dataclass(frozen=True, kw_only=True)
class Qwen2(Llama):
    """Qwen2: biases in the projections of attention."""

    use_sliding_window: bool = False

    def fields(self) -> Fields:
        return super().fields() | {"qkv_bias": True}


@dataclass(frozen=True, kw_only=True)
class Qwen3(Llama):
    """Qwen3: queries and keys are normalised."""

    use_sliding_window: bool = False

    def fields(self) -> Fields:
        return super().fields() | {"qk_norm": True}


@dataclass(frozen=True, kw_only=True)
class HyperClovaX(Llama):
    """HyperCLOVA X: norms at both ends of sub-layers, unless it states none behind them."""

    use_post_norm: bool = True

    def fields(self) -> Fields:
        return super().fields() | {"norm_at": "both" if self.use_post_norm else "input"}


@dataclass(frozen=True, kw_only=True)
class LatentLlama(Llama):
    """LLaMA with multi-head latent attention and no experts: MiniCPM3, Youtu-LLM."""

    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count | None = None
    q_lora_rank: CountOrNone = 0

    def head_size(self) -> int:
        # Queries and keys have other sizes than values: those are stated in the latent attention
        # itself. MiniCPM3's values share the hidden size evenly.
        return self.v_head_dim or per_head(self.hidden_size, self.num_attention_heads)

    def fields(self) -> Fields:
        latent = LatentAttention(
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.head_size(),
        )
        return super().fields() | {"kv_heads": self.num_attention_heads, "latent_attention": latent}
