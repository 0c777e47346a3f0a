"""The sections of `Transformer`, by subject."""

from dataclasses import dataclass
from typing import Final, Literal

from perfmodel.spec._documented import Stated
from perfmodel.spec.parts import (
    AdaLN,
    CompressedAttention,
    DeltaNet,
    Distances,
    FrozenEncoder,
    HyperConnections,
    Indexer,
    LayerEmbedding,
    Mamba,
    NarrowEmbedding,
    Patches,
    SelectiveScan,
    SharedBlock,
    ShortConv,
    Spectrogram,
    Streams,
    TextCondition,
    TimeMix,
    WindowHeads,
)

MIXERS: Final = {
    "*": "attention",
    "W": "attention in the window",
    "Q": "attention with the keys and values of an earlier layer",
    "V": "attention in the window, with the keys and values of an earlier layer",
    "I": "an indexer that selects keys for the attention behind it",
    "Y": "attention in the window to a key that all heads share",
    "F": "the same, and to compressed keys that an indexer selects",
    "G": "the same, and to heavily compressed keys",
    "H": "hyper-connections around the sub-layer behind it",
    "A": "a block shared with other layers",
    "M": "mamba",
    "S": "selective scan (the first Mamba)",
    "L": "gated delta net, or linear attention",
    "C": "gated short convolution",
    "R": "time mixing (RWKV)",
    "T": "time mixing that adds values of the first layer (RWKV-7)",
    "K": "channel mixing (RWKV's feed-forward)",
    "E": "experts",
    "-": "a dense feed-forward",
    "P": "the layer's own embedding of the token",
    "U": "updates of further residual streams",
    "X": "cross-attention to the text",
    "D": "a layer of two streams, text and image (MMDiT)",
    "O": "the last layer of two streams, of which only the image stream continues",
    "N": "attention and feed-forward in parallel, on text and image as one stream",
}
"""Kinds of layers by letter of `HybridStack.mixers`."""


@dataclass(frozen=True, kw_only=True)
class AttentionForm(Stated):
    """The form of attention: what tokens attend to, and operations besides its matrix products."""

    causal: bool = True
    """Causal attention: tokens attend only to earlier ones."""
    window: int = 0
    """Sliding-window attention in tokens; 0 for none."""
    chunked_window: bool = False
    """Chunked attention: tokens attend to earlier ones in the same chunk of this size (Llama 4)."""
    full_attention_every: int = 0
    """With a window: every n-th layer has full attention (GPT-OSS: 2); 0 for none."""
    window_heads: WindowHeads | None = None
    """Heads of attention in the window, if they differ from those of full attention, which the
    other fields state."""
    value_dim: int = 0
    """Elements of a head's values, if they are fewer than those of its queries and keys (MiMo-V2);
    else 0."""
    keys_as_values: bool = False
    """Values are made by the projection of keys, which are then normalised and rotated (Gemma
    4)."""
    qkv_bias: bool = False
    """Biases in the query, key and value projections even where `bias` is off (Qwen2)."""
    output_bias: bool = False
    """A bias in attention's output projection even where `bias` is off (InternLM)."""
    unbiased_projections: tuple[Literal["query", "key", "value"], ...] = ()
    """Projections of attention that have no bias even where `bias` is on (Whisper's keys)."""
    distances: Distances | None = None
    """Projections of a table of distances in every layer (DeBERTa); scores of distances are not
    counted."""
    qk_norm: bool = False
    """Queries and keys are normalised, each head by itself (Qwen3)."""
    qk_norm_of_all_heads: bool = False
    """With `qk_norm`, queries and keys are normalised over all heads at once (OLMo 2)."""
    attention_gate: bool = False
    """Attention's result is multiplied by a gate, which the query projection also computes
    (Qwen3-Next)."""
    head_gate: bool = False
    """The result of every head is multiplied by one gate of its own (Step 3.5, Laguna)."""
    attention_sinks: bool = False
    """Every head has a learned score that takes part in its softmax (GPT-OSS)."""
    attention_softcap: bool = False
    """Scores are bounded by a tanh (Gemma 2), inside the fused kernel where there is one."""


@dataclass(frozen=True, kw_only=True)
class BlockForm(Stated):
    """The rest of a layer besides attention: feed-forward, biases and dropout."""

    parallel_blocks: Literal["none", "one_norm", "two_norms"] = "none"
    """Attention and feed-forward run in parallel on the same input, x + Attn(N(x)) + FFN(N(x)):
    after one norm (GPT-J; PaLM, arXiv 2204.02311, section 2; Falcon-7B; Command R; MegaScale, arXiv
    2402.15627, section 3.1) or each of its own (GPT-NeoX, Falcon-40B)."""
    gated_ffn: bool = False
    """The feed-forward multiplies two projections of its input, one of them activated (SwiGLU and
    its like)."""
    activation: Literal["gelu", "silu", "relu", "relu2"] = "gelu"
    """`relu2`: squared ReLU (Nemotron, arXiv 2402.16819)."""
    clamped_glu: bool = False
    """Both inputs of a gated feed-forward's activation are cut at a limit (GPT-OSS,
    `swiglu_limit`)."""
    bias: bool = True
    """Biases in all linear layers and layer norms."""
    dropout: bool = True
    """Whether the model is trained with dropout."""


@dataclass(frozen=True, kw_only=True)
class Norms(Stated):
    """The kind and placement of norms."""

    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    """Layer norms subtract the mean, RMS norms do not."""
    norm_at: Literal["input", "output", "both"] = "input"
    """Where every sub-layer is normalised: `output` in OLMo 2 (arXiv 2501.00656), `both` in Gemma
    2."""
    norm_bias: bool | None = None
    """Layer norms have a shift; None: as `bias` says."""
    norm_parameters: bool = True
    """Norms have parameters; those of OLMo 1 have none (arXiv 2402.00838, section 2.1)."""
    sub_norms: bool = False
    """Attention's result and the activations of feed-forwards are normalised before the last
    product (BitNet b1.58 2B4T, arXiv 2504.12285, section 2)."""
    embedding_norm: bool = False
    """Embeddings are normalised before the first layer (BLOOM, BART)."""
    final_norm: bool = True
    """There is a norm after the last layer; not in GPT-1 or if layers end with a norm (BART)."""
    adaln: AdaLN | None = None
    """Conditioning of a diffusion transformer, which replaces the norms' own parameters."""


@dataclass(frozen=True, kw_only=True)
class Inputs(Stated):
    """The input: text, patches or audio, and positions."""

    positions: Literal["learned", "rope", "alibi", "relative", "none"] = "learned"
    """Position encoding: a learned table, rotary embeddings, or biases of attention scores."""
    position_offset: int = 0
    """Rows of the table of positions before that of the first token (OPT, BART: 2)."""
    longest_seq_len: int = 0
    """Maximum sequence length, if the training length is not stated and `seq_len` is shorter; else
    0."""
    token_types: int = 0
    """Rows of BERT's segment embedding; 0 for none."""
    narrow_embedding: NarrowEmbedding | None = None
    """A token embedding narrower than the hidden size."""
    patches: Patches | None = None
    """Image patches as input; `vocab` is then the number of classes of the head, 0 for none."""
    spectrogram: Spectrogram | None = None
    """A spectrogram as the encoder's input; text goes only to the decoder."""
    text_condition: TextCondition | None = None
    """Text that a diffusion transformer is conditioned on, in layers with letters X, D, O and N;
    sequence lengths count tokens of the image alone."""
    encoders: tuple[FrozenEncoder, ...] = ()
    """Frozen encoders that make the latents and the text of a diffusion transformer; part of a step
    unless their outputs are cached (`Job.cached_latents`, `Job.cached_text`)."""


@dataclass(frozen=True, kw_only=True)
class OutputHead(Stated):
    """The output head after the last layer."""

    tied_embeddings: bool = True
    """The vocabulary projection shares the weights of the token embedding."""
    logit_softcap: bool = False
    """Logits are bounded by a tanh (Gemma 2)."""
    pooler_and_mlm_head: bool = False
    """BERT's pooler and masked-LM transform before the vocabulary projection."""
    pooler: bool = True
    """With `pooler_and_mlm_head`: BERT's pooler and next-sentence head, which RoBERTa does not
    have."""


@dataclass(frozen=True, kw_only=True)
class HybridStack(Stated):
    """Layers other than attention plus feed-forward, and the sizes of their parts."""

    mixers: str = ""
    """Sub-layers of the layers, letters of `MIXERS`: a letter per layer (Nemotron-H, arXiv
    2504.03624), or a word per layer, repeated over the layers (Qwen3-Next: `LE LE LE *E`). Empty:
    attention and a feed-forward in each."""
    parallel_mixers: bool = False
    """Attention and Mamba of a layer, `*M` in its word, take the same normed input side by side
    (Falcon-H1, arXiv 2507.22448, section 2.1)."""
    mamba: Mamba | None = None
    """Sizes of the layers with letter M."""
    selective_scan: SelectiveScan | None = None
    """Sizes of the layers with letter S."""
    delta_net: DeltaNet | None = None
    """Sizes of the layers with letter L."""
    short_conv: ShortConv | None = None
    """Sizes of the layers with letter C."""
    time_mix: TimeMix | None = None
    """Sizes of the layers with letter R or T."""
    shared_block: SharedBlock | None = None
    """Sizes of the layers with letter A."""
    indexer: Indexer | None = None
    """Sizes of the layers with letter I."""
    compressed_attention: CompressedAttention | None = None
    """Sizes of the layers with letter Y, F or G."""
    hyper_connections: HyperConnections | None = None
    """Residual streams of the layers with letter H."""
    layer_embedding: LayerEmbedding | None = None
    """Sizes of the layers with letter P."""
    streams: Streams | None = None
    """Residual streams of the layers with letter U."""
    ffn_sizes: tuple[int, ...] = ()
    """Inner size of the dense feed-forward of each layer, where layers differ in it (Nemotron-NAS);
    any number where a layer has none. Empty: `ffn_hidden` in all."""
    shortcut_experts: bool = False
    """Experts right behind a dense feed-forward, `-E`, take the same normed input
    (LongCat-Flash)."""


@dataclass(frozen=True, kw_only=True)
class FurtherTokens(Stated):
    """Modules that predict further tokens (multi-token prediction)."""

    mtp_layers: int = 0
    """Number of multi-token-prediction modules, each a layer and a use of the head (DeepSeek-V3,
    arXiv 2412.19437, section 2.2)."""
    mtp_mixers: str = ""
    """Sub-layers of such a module's layer, a word of `MIXERS` (Nemotron 3 Super: `*E`); empty:
    those of the model's last layer."""
    mtp_repeated: bool = False
    """All these modules share their weights (Nemotron 3, arXiv 2604.12374)."""
