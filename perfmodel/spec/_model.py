"""Models: architecture figures from which every shape, FLOP and parameter follows."""

from dataclasses import dataclass
from typing import Literal

from perfmodel.errors import PerfModelError
from perfmodel.units import positive


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture-of-experts feed-forward."""

    count: int
    topk: int
    ffn_hidden: int
    """Inner size of one routed expert."""
    shared_ffn_hidden: int = 0
    """Inner size of the always-active shared expert(s) together; 0 for none."""
    first_dense_layers: int = 0
    """Leading layers that keep a dense feed-forward (DeepSeek)."""


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    q_lora_rank: int
    """Rank of the query compression; 0 for none."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Decoder-only, encoder-only or (with `decoder_layers`) encoder-decoder transformer."""

    name: str
    layers: int
    """Layers of the stack (of the encoder, for encoder-decoder models)."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    seq_len: int
    """Default sequence length."""
    decoder_layers: int = 0
    """Decoder layers with cross-attention (T5); 0 for a single stack."""
    decoder_seq_len: int = 0
    """Decoder sequence length; 0 means equal to the encoder's."""
    gated_ffn: bool = False
    activation: Literal["gelu", "silu", "relu"] = "gelu"
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    positions: Literal["learned", "rope", "alibi", "relative", "none"] = "learned"
    tied_embeddings: bool = True
    bias: bool = True
    """Biases in all linear layers and layer norms."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections even where `bias` is off (Qwen2)."""
    qk_norm: bool = False
    """Queries and keys normalised per head (Qwen3)."""
    causal: bool = True
    dropout: bool = True
    window: int = 0
    """Sliding-window attention in tokens; 0 for none."""
    full_attention_every: int = 0
    """With a window: every n-th layer attends in full (GPT-OSS: 2); 0 for none."""
    token_types: int = 0
    """Rows of BERT's segment embedding; 0 for none."""
    pooler_and_mlm_head: bool = False
    """BERT's pooler and masked-LM transform before the vocabulary projection."""
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    source: str = ""
    aliases: tuple[str, ...] = ()

    kind = "transformer"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "seq_len"):
            positive(f"model {self.name}: {name}", getattr(self, name))
        if self.heads % self.kv_heads:
            raise PerfModelError(
                f"model {self.name}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A stack of square dense layers with ReLU (DistIR section 5: MLP 1B, 17B, 103B)."""

    name: str
    layers: int
    hidden: int
    seq_len: int = 1
    source: str = ""
    aliases: tuple[str, ...] = ()

    kind = "mlp"

    def __post_init__(self) -> None:
        positive(f"model {self.name}: layers", self.layers)
        positive(f"model {self.name}: hidden", self.hidden)


@dataclass(frozen=True, kw_only=True)
class ConvLayer:
    """One layer of a convolutional network in execution order."""

    name: str
    op: Literal["conv", "max_pool", "avg_pool", "linear"]
    c_in: int
    size_in: int
    """Input height = width."""
    c_out: int
    kernel: int = 1
    stride: int = 1
    pad: int = 0
    batch_norm: bool = False
    relu: bool = False
    residual: bool = False
    """The output is added to a skip connection."""


@dataclass(frozen=True, kw_only=True)
class ConvNet:
    """A convolutional network as an ordered list of layers (VGG, ResNet)."""

    name: str
    stack: tuple[ConvLayer, ...]
    image_size: int = 224
    seq_len: int = 1
    source: str = ""
    aliases: tuple[str, ...] = ()

    kind = "convnet"


Model = Transformer | Mlp | ConvNet
