"""Models: architecture figures from which every shape, FLOP and parameter follows."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from perfmodel.errors import PerfModelError
from perfmodel.spec._documented import Stated
from perfmodel.spec._parts import (
    AdaLN,
    DeltaNet,
    Experts,
    LatentAttention,
    Mamba,
    NarrowEmbedding,
    Patches,
    SelectiveScan,
    ShortConv,
    Spectrogram,
)
from perfmodel.units import whole

MOST_LAYERS: Final = 10**5
"""More layers than any model has: a typing error."""
_SIZES: Final = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_hidden",
    "vocab",
    "seq_len",
)
_SIZES_OR_NONE: Final = (
    "decoder_layers",
    "decoder_seq_len",
    "longest_seq_len",
    "window",
    "full_attention_every",
    "token_types",
    "mtp_layers",
    "position_offset",
)


MIXERS: Final = {
    "*": "attention",
    "W": "attention in the window",
    "M": "mamba",
    "S": "selective scan (the first Mamba)",
    "L": "gated delta net",
    "C": "gated short convolution",
    "E": "experts",
    "-": "a dense feed-forward",
}
"""What a letter of `Transformer.mixers` stands for."""


_PART_OF_LETTER: Final = {"M": "mamba", "S": "selective_scan", "L": "delta_net", "C": "short_conv"}
"""The field of `Transformer` that says the sizes of a mixer."""


@dataclass(frozen=True, kw_only=True)
class Transformer(Stated):
    """Decoder-only, encoder-only or (with `decoder_layers`) encoder-decoder transformer, on words or on patches."""

    name: str
    layers: int
    """Layers of the stack (of the encoder, for encoder-decoder models)."""
    hidden: int
    """Elements of a token's hidden state."""
    heads: int
    """Attention heads of queries."""
    kv_heads: int
    """Heads of keys and values, fewer than `heads` in grouped-query attention."""
    head_dim: int
    """Elements of a head."""
    ffn_hidden: int
    """Inner size of the dense feed-forward."""
    vocab: int
    """Tokens of the vocabulary, not padded."""
    seq_len: int
    """Default sequence length."""
    longest_seq_len: int = 0
    """What its positions allow, where nobody stated the length it is trained with and `seq_len` is less; else 0."""
    decoder_layers: int = 0
    """Decoder layers with cross-attention (T5); 0 for a single stack."""
    decoder_seq_len: int = 0
    """Decoder sequence length; 0 means equal to the encoder's."""
    gated_ffn: bool = False
    """The feed-forward multiplies two projections of its input, one of them activated (SwiGLU and its like)."""
    activation: Literal["gelu", "silu", "relu", "relu2"] = "gelu"
    """`relu2`: squared ReLU (Nemotron, arXiv 2402.16819)."""
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_at: Literal["input", "output", "both"] = "input"
    """Which end of every sub-layer is normalised: `output` in OLMo 2 (arXiv 2501.00656), `both` in Gemma 2."""
    parallel_blocks: Literal["none", "one_norm", "two_norms"] = "none"
    """Attention and feed-forward of a layer take the same input side by side, x + Attn(N(x)) + FFN(N(x)), instead of
    one after the other: of one norm (GPT-J; PaLM, arXiv 2204.02311, section 2; Falcon-7B; Command R; MegaScale, arXiv
    2402.15627, section 3.1) or each of its own (GPT-NeoX, Falcon-40B)."""
    norm_bias: bool | None = None
    """Layer norms have a shift; None: as `bias` says."""
    norm_parameters: bool = True
    """Norms have parameters; those of OLMo 1 have none (arXiv 2402.00838, section 2.1)."""
    embedding_norm: bool = False
    """Embeddings are normalised before the first layer (BLOOM, BART)."""
    final_norm: bool = True
    """What the last layer gives is normalised; not so in GPT-1, nor where layers themselves end with a norm (BART)."""
    positions: Literal["learned", "rope", "alibi", "relative", "none"] = "learned"
    """How positions are told: a table, rotations of queries and keys, or biases of scores."""
    position_offset: int = 0
    """Rows of the table of positions before that of the first token (OPT, BART: 2)."""
    tied_embeddings: bool = True
    """The vocabulary projection has the weights of the token embedding."""
    bias: bool = True
    """Biases in all linear layers and layer norms."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections even where `bias` is off (Qwen2)."""
    unbiased_projections: tuple[Literal["query", "key", "value"], ...] = ()
    """Projections of attention that have no bias even where `bias` is on (Whisper's keys)."""
    qk_norm: bool = False
    """Queries and keys are normalised, each head by itself (Qwen3)."""
    qk_norm_of_all_heads: bool = False
    """With `qk_norm`, queries and keys are normalised over all heads at once (OLMo 2)."""
    attention_gate: bool = False
    """Attention's result is multiplied by a gate of its size that the query projection makes too (Qwen3-Next)."""
    attention_sinks: bool = False
    """Every head has a learned score that takes part in its softmax (GPT-OSS)."""
    clamped_glu: bool = False
    """Both inputs of a gated feed-forward's activation are cut at a limit (GPT-OSS, `swiglu_limit`)."""
    attention_softcap: bool = False
    """Scores are bounded by a tanh (Gemma 2), inside the fused kernel where there is one."""
    logit_softcap: bool = False
    """Logits are bounded by a tanh (Gemma 2)."""
    causal: bool = True
    """Tokens attend to those before them alone."""
    dropout: bool = True
    """It is trained with dropout."""
    window: int = 0
    """Sliding-window attention in tokens; 0 for none."""
    chunked_window: bool = False
    """The window does not slide: tokens see those before them in the same chunk of so many (Llama 4)."""
    full_attention_every: int = 0
    """With a window: every n-th layer attends in full (GPT-OSS: 2); 0 for none."""
    token_types: int = 0
    """Rows of BERT's segment embedding; 0 for none."""
    pooler_and_mlm_head: bool = False
    """BERT's pooler and masked-LM transform before the vocabulary projection."""
    pooler: bool = True
    """Beside that transform: BERT's pooler and the head that tells whether sentences follow one another. RoBERTa has
    neither."""
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    mixers: str = ""
    """Sub-layers of the layers, letters of `MIXERS`: a letter per layer (Nemotron-H, arXiv 2504.03624), or a word per
    layer, repeated over the layers (Qwen3-Next: `LE LE LE *E`). Empty: attention and a feed-forward in each."""
    parallel_mixers: bool = False
    """Attention and Mamba of a layer, `*M` in its word, take the same normed input side by side (Falcon-H1, arXiv
    2507.22448, section 2.1)."""
    mamba: Mamba | None = None
    selective_scan: SelectiveScan | None = None
    delta_net: DeltaNet | None = None
    short_conv: ShortConv | None = None
    mtp_layers: int = 0
    """Modules that predict one token further each, a layer and a use of the head (DeepSeek-V3, arXiv 2412.19437,
    section 2.2)."""
    mtp_mixers: str = ""
    """Sub-layers of such a module's layer, a word of `MIXERS` (Nemotron 3 Super: `*E`); empty: those of the last."""
    mtp_repeated: bool = False
    """All such modules have the same weights (Nemotron 3, arXiv 2604.12374)."""
    patches: Patches | None = None
    """What the input is cut into, in place of words; `vocab` is then the classes of the head, 0 for none."""
    narrow_embedding: NarrowEmbedding | None = None
    spectrogram: Spectrogram | None = None
    """What the encoder is given, in place of words; those are the decoder's alone."""
    adaln: AdaLN | None = None
    left_out: str = ""
    """What the model has that these figures do not count, in words for its user: a vision tower, an indexer."""
    source: str = ""
    aliases: tuple[str, ...] = ()

    kind = "transformer"

    def __post_init__(self) -> None:
        # Each figure by itself. On patches there may be no classes.
        owner, sizes = f"model {self.name}", vars(self)
        positive_sizes = [name for name in _SIZES if name != "vocab" or self.patches is None]
        whole(owner, {name: sizes[name] for name in positive_sizes})
        whole(owner, {name: sizes[name] for name in (*_SIZES_OR_NONE, "vocab")}, least=0)
        numbers_of_layers = {"layers": self.layers, "decoder_layers": self.decoder_layers}
        whole(owner, numbers_of_layers, least=0, most=MOST_LAYERS)
        if self.heads % self.kv_heads:
            raise PerfModelError(f"{owner}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")

        # Then what they are together.
        self._check_mixers(owner)
        self._check_combinations(owner)

    def _check_mixers(self, owner: str) -> None:
        """Raise `PerfModelError` unless mixers are known letters, and each has the sizes that it needs."""
        sizes = vars(self)
        letters = set(self.mixers + self.mtp_mixers) - {" "}
        wrong_number = " " not in self.mixers and len(self.mixers) != self.layers
        if letters - set(MIXERS) or (self.mixers and (not letters or wrong_number)):
            known = ", ".join([f"{letter} ({what})" for letter, what in MIXERS.items()])
            raise PerfModelError(
                f"{owner}: mixers must be a letter per layer, or a word per layer, among {known}; got {self.mixers!r} "
                f"for {self.layers} layers"
            )
        for letter, field in _PART_OF_LETTER.items():
            # Sizes of a mixer that no layer has are a mistake too.
            if (letter in letters) != (sizes[field] is not None):
                raise PerfModelError(
                    f"{owner}: give {field} if mixers has a {letter}, or else leave it out; mixers={self.mixers!r}"
                )
        for letter, field in {"E": "experts", "W": "window"}.items():
            if letter in letters and not sizes[field]:
                raise PerfModelError(f"{owner}: mixers={self.mixers!r} needs {field} for {letter}")

        words = self.mixers.split()
        together = all(word.startswith("*M") and word.count("M") == 1 for word in words if "M" in word)
        if self.parallel_mixers and not (self.mamba and together and self.norm_at == "input"):
            raise PerfModelError(
                f"{owner}: parallel_mixers needs words of mixers that begin with *M where they have an M, and norms at "
                f"the input; got {self.mixers!r}"
            )

    def _check_combinations(self, owner: str) -> None:
        """Raise `PerfModelError` for parts that do not go together."""
        sizes = vars(self)
        if self.decoder_layers and (self.mixers or self.mtp_layers or self.patches or self.adaln):
            raise PerfModelError(
                f"{owner}: decoder_layers cannot be combined with mixers, mtp_layers, patches or adaln"
            )
        if self.patches and (self.causal or self.mtp_layers):
            raise PerfModelError(f"{owner}: patches need causal=false and no mtp_layers")

        if self.narrow_embedding and (self.decoder_layers or self.patches or self.mtp_layers):
            raise PerfModelError(
                f"{owner}: narrow_embedding cannot be combined with decoder_layers, patches or mtp_layers"
            )
        if self.spectrogram and not self.decoder_layers:
            raise PerfModelError(
                f"{owner}: spectrogram needs decoder_layers, because tokens are the input of the decoder"
            )

        # Attention and feed-forward side by side are two sub-layers of one input, and nothing else.
        sequential = ("experts", "mixers", "latent_attention", "decoder_layers", "mtp_layers", "adaln")
        incompatible = [name for name in sequential if sizes[name]]
        if self.norm_at != "input":
            incompatible.append("norm_at")
        if self.parallel_blocks != "none" and incompatible:
            raise PerfModelError(
                f"{owner}: parallel_blocks={self.parallel_blocks} needs layers of attention and a dense feed-forward, "
                f"normalised at their input; leave out {' and '.join(incompatible)}"
            )
        if self.experts is not None and self.experts.first_dense_layers > self.layers:
            raise PerfModelError(
                f"model {self.name}: first_dense_layers={self.experts.first_dense_layers} of {self.layers} layers; "
                "give at most as many as there are"
            )

    @cached_property
    def stack(self) -> tuple[str, ...]:
        """Sub-layers of every layer (of the encoder, for encoder-decoder models), a word of `MIXERS` each."""
        # Words repeat over the layers; letters stand for a layer each.
        if self.mixers:
            sublayers_of_layer = self.mixers.split() if " " in self.mixers else list(self.mixers)
            return tuple(sublayers_of_layer[i % len(sublayers_of_layer)] for i in range(self.layers))

        # Without mixers each layer is an attention and a feed-forward.
        return tuple(self._attention_of(i) + self._feed_forward_of(i) for i in range(self.layers))

    @property
    def mtp_stack(self) -> tuple[str, ...]:
        """Sub-layers of the layer of every module for a further token, a word of `MIXERS` each."""
        # Unless said otherwise such a layer is like the last of the stack.
        return (self.mtp_mixers or self.stack[-1],) * self.mtp_layers

    def _attention_of(self, layer: int) -> str:
        """Attention in the window, but for every n-th layer."""
        every = self.full_attention_every
        full = not self.window or (every and (layer + 1) % every == 0)
        return "*" if full else "W"

    def _feed_forward_of(self, layer: int) -> str:
        """Experts in every n-th layer after the dense ones."""
        experts = self.experts
        if experts is None or layer < experts.first_dense_layers:
            return "-"
        nth = layer - experts.first_dense_layers + 1
        return "E" if nth % experts.every == 0 else "-"


@dataclass(frozen=True, kw_only=True)
class Mlp(Stated):
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
class ConvLayer(Stated):
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
        whole(
            owner,
            {name: getattr(self, name) for name in ("c_in", "size_in", "c_out", "kernel", "stride")},
        )
        whole(owner, {"pad": self.pad}, least=0)

        # Of a dense layer `kernel` means nothing.
        if self.op != "linear" and self.kernel > self.size_in + 2 * self.pad:
            raise PerfModelError(
                f"{owner}: a kernel of {self.kernel} is larger than its input of {self.size_in} padded by {self.pad}"
            )

    @property
    def size_out(self) -> int:
        """Output height = width; 1 of a dense layer."""
        return 1 if self.op == "linear" else (self.size_in + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def weights(self) -> int:
        """Elements of its weights, biases apart."""
        # A dense layer is a convolution whose kernel is as large as its input.
        if self.op == "conv":
            area = self.kernel**2
        elif self.op == "linear":
            area = self.size_in**2
        else:
            area = 0
        return area * self.c_in * self.c_out


@dataclass(frozen=True, kw_only=True)
class ConvNet(Stated):
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
