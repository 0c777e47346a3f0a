"""Models: architecture figures from which every shape, FLOP and parameter follows."""

from dataclasses import dataclass
from typing import Final, Literal

from perfmodel.errors import PerfModelError
from perfmodel.units import whole

MOST_LAYERS: Final = 10**5
_SIZES: Final = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn_hidden", "vocab", "seq_len")
_SIZES_OR_NONE: Final = (
    "decoder_layers", "decoder_seq_len", "longest_seq_len", "window", "full_attention_every", "token_types",
)  # fmt: skip


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
    groups: int = 1
    """Groups that the experts are divided into, of which a token chooses `groups_kept` before it chooses its experts
    among theirs (node-limited routing of DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    groups_kept: int = 1
    latent: int = 0
    """Elements that a token is projected to before it is sent to routed experts, and back from after (LatentMoE of
    Nemotron 3, arXiv 2604.12374); 0: the hidden size, without projections."""

    def __post_init__(self) -> None:
        whole("experts", {n: getattr(self, n) for n in ("count", "topk", "ffn_hidden", "groups", "groups_kept")})
        whole("experts", {name: getattr(self, name) for name in ("shared_ffn_hidden", "first_dense_layers", "latent")},
              least=0)  # fmt: skip
        if self.topk > self.count:
            raise PerfModelError(f"experts: topk={self.topk} are more than there are (count={self.count})")
        if self.groups_kept > self.groups or self.count % self.groups:
            raise PerfModelError(
                f"experts: groups={self.groups} must divide count={self.count}, and groups_kept={self.groups_kept} "
                "must be no more than there are"
            )


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    q_lora_rank: int
    """Rank of the query compression; 0 for none."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        sizes = dict(vars(self))
        whole("latent attention", {"q_lora_rank": sizes.pop("q_lora_rank")}, least=0)
        whole("latent attention", sizes)


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """Mamba-2 mixers (Dao and Gu, arXiv 2405.21060) of a hybrid model."""

    heads: int
    head_dim: int
    state: int
    """Elements of the state per element of a head."""
    groups: int
    """Groups of heads that share their input and output projections of the state."""
    conv_kernel: int = 4
    chunk: int = 128
    """Tokens that are computed as one block of matrix products (section 6)."""

    def __post_init__(self) -> None:
        whole("mamba", vars(self))
        if self.heads % self.groups:
            raise PerfModelError(f"mamba: heads={self.heads} must be a multiple of groups={self.groups}")


MIXERS: Final = {"*": "attention", "M": "mamba", "E": "experts", "-": "a dense feed-forward"}
"""What a letter of `Transformer.mixers` stands for."""


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
    longest_seq_len: int = 0
    """What its positions allow, where nobody stated the length it is trained with and `seq_len` is less; else 0."""
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
    mixers: str = ""
    """Of a hybrid, whose layers hold one of `MIXERS` each: a letter per layer (Nemotron-H, arXiv 2504.03624)."""
    mamba: Mamba | None = None
    source: str = ""
    aliases: tuple[str, ...] = ()

    kind = "transformer"

    def __post_init__(self) -> None:
        owner, sizes = f"model {self.name}", vars(self)
        whole(owner, {name: sizes[name] for name in _SIZES})
        whole(owner, {name: sizes[name] for name in _SIZES_OR_NONE}, least=0)
        whole(owner, {"layers": self.layers, "decoder_layers": self.decoder_layers}, least=0, most=MOST_LAYERS)
        if self.heads % self.kv_heads:
            raise PerfModelError(
                f"model {self.name}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
            )
        if self.mixers and (len(self.mixers) != self.layers or set(self.mixers) - set(MIXERS)):
            raise PerfModelError(
                f"model {self.name}: mixers must be a letter per layer among "
                f"{', '.join(f'{letter} ({what})' for letter, what in MIXERS.items())}; got {self.mixers!r} for "
                f"{self.layers} layers"
            )
        if ("M" in self.mixers) != (self.mamba is not None) or ("E" in self.mixers and self.experts is None):
            raise PerfModelError(f"model {self.name}: mixers={self.mixers!r} needs mamba for M, experts for E")
        if self.experts is not None and self.experts.first_dense_layers > self.layers:
            raise PerfModelError(
                f"model {self.name}: first_dense_layers={self.experts.first_dense_layers} of {self.layers} layers; "
                "give at most as many as there are"
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
        whole(f"model {self.name}", {"hidden": self.hidden, "seq_len": self.seq_len})
        whole(f"model {self.name}", {"layers": self.layers}, most=MOST_LAYERS)


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

    def __post_init__(self) -> None:
        owner = f"layer {self.name}"
        whole(owner, {name: getattr(self, name) for name in ("c_in", "size_in", "c_out", "kernel", "stride")})
        whole(owner, {"pad": self.pad}, least=0)
        if self.op != "linear" and self.kernel > self.size_in + 2 * self.pad:
            raise PerfModelError(
                f"{owner}: a kernel of {self.kernel} is larger than its input of {self.size_in} padded by {self.pad}"
            )


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

    def __post_init__(self) -> None:
        whole(f"model {self.name}", {"image_size": self.image_size, "seq_len": self.seq_len})
        if not self.stack:
            raise PerfModelError(f"model {self.name}: stack: at least one layer is needed")


Model = Transformer | Mlp | ConvNet
