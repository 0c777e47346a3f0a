"""Further parts of transformers: experts, mixers, adaptive norms, and what they read instead of
tokens."""

from dataclasses import dataclass
from typing import Final, Literal

from perfmodel.errors import PerfModelError
from perfmodel.spec._documented import Stated
from perfmodel.spec._input_parts import FrozenEncoder as FrozenEncoder
from perfmodel.spec._input_parts import NarrowEmbedding as NarrowEmbedding
from perfmodel.spec._input_parts import Patches as Patches
from perfmodel.spec._input_parts import Spectrogram as Spectrogram
from perfmodel.spec._input_parts import TextCondition as TextCondition
from perfmodel.units import require_whole

STREAM_LAYERS: Final = "DON"
"""Letters of `MIXERS` for layers that hold text and image side by side, each a whole layer."""
TEXT_LAYERS: Final = f"X{STREAM_LAYERS}"
"""Letters of `MIXERS` for layers that read the text."""


@dataclass(frozen=True, kw_only=True)
class Experts(Stated):
    """Mixture-of-experts feed-forward."""

    count: int
    """Routed experts of a layer."""
    topk: int
    """Routed experts that each token chooses."""
    ffn_hidden: int
    """Inner size of one routed expert."""
    shared_ffn_hidden: int = 0
    """Inner size of the always-active shared expert(s) together; 0 for none."""
    first_dense_layers: int = 0
    """Leading layers that keep a dense feed-forward (DeepSeek)."""
    every: int = 1
    """After these, every n-th layer has experts and the others a dense feed-forward (Llama 4
    Maverick: 2)."""
    shared_gate: bool = False
    """A separate gate weights the shared expert's output (Qwen2-MoE)."""
    router_bias: bool = False
    """The router's product has a trained bias (GPT-OSS)."""
    groups: int = 1
    """Groups that the experts are divided into, of which a token chooses `groups_kept` before it
    chooses its experts among theirs (node-limited routing of DeepSeek-V3, arXiv 2412.19437, section
    2.1.2)."""
    groups_kept: int = 1
    """Groups that a token may choose its experts from."""
    branch_norms: bool = False
    """Routed experts have norms of their own at both ends, the shared one has one behind it, and
    the router has one before it and a scale for every expert (Gemma 4)."""
    idle: int = 0
    """Further experts that the router may choose and that compute nothing (LongCat-Flash, arXiv
    2509.01322, section 2.1); `topk` counts the others alone."""
    latent: int = 0
    """Elements that a token is projected to before it is sent to routed experts, and back from
    after (LatentMoE of Nemotron 3, arXiv 2604.12374); 0: the hidden size, without projections."""

    def __post_init__(self) -> None:
        positive = ("count", "topk", "ffn_hidden", "groups", "groups_kept", "every")
        require_whole("experts", {name: getattr(self, name) for name in positive})
        none_or_more = ("shared_ffn_hidden", "first_dense_layers", "idle", "latent")
        require_whole("experts", {name: getattr(self, name) for name in none_or_more}, least=0)

        # A token cannot choose more than there are; groups are equally large.
        if self.topk > self.count:
            raise PerfModelError(f"experts: topk={self.topk} must not exceed count={self.count}")
        if self.groups_kept > self.groups or self.count % self.groups:
            raise PerfModelError(
                f"experts: groups={self.groups} must divide count={self.count}, and groups_kept={self.groups_kept} "
                "must not exceed groups"
            )


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Stated):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1)."""

    q_lora_rank: int
    """Rank of the query compression; 0 for none."""
    kv_lora_rank: int
    """Rank of the compression of keys and values, which is what the cache holds."""
    qk_nope_head_dim: int
    """Elements of a head's queries and keys without positions."""
    qk_rope_head_dim: int
    """Elements of a head's queries and keys that are rotated by their position; all heads share
    those of keys."""
    v_head_dim: int
    """Elements of a head's values."""

    def __post_init__(self) -> None:
        # Queries need not be compressed.
        sizes = dict(vars(self))
        require_whole("latent attention", {"q_lora_rank": sizes.pop("q_lora_rank")}, least=0)
        require_whole("latent attention", sizes)


@dataclass(frozen=True, kw_only=True)
class Indexer(Stated):
    """The indexer of DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556, section 2.1):
    small heads score all keys for each query of the latent attention behind it, which then sees the
    best ones. Attention is counted over all keys nevertheless."""

    heads: int
    """Heads of the indexer's queries, made from the compressed queries of attention; all share one
    key."""
    head_dim: int
    """Elements of such a query, and of the key."""

    def __post_init__(self) -> None:
        require_whole("indexer", vars(self))


@dataclass(frozen=True, kw_only=True)
class CompressedAttention(Stated):
    """Attention of DeepSeek-V4 (transformers models/deepseek_v4/modeling_deepseek_v4.py): all heads
    share one key of their size, which is also the value. Queries see the keys of the window, and in
    most layers a compressed key for each block of earlier tokens."""

    q_lora_rank: int
    """Rank of the query compression."""
    output_groups: int
    """Groups of heads whose results are projected each by itself."""
    output_rank: int
    """Elements that the results of a group are projected to, before one product joins all."""
    rope_dim: int = 64
    """Elements of queries and of the key that are rotated by their position."""
    sparse_rate: int = 4
    """Tokens of a compressed key in layers with letter F, which overlaps with the one before it."""
    heavy_rate: int = 128
    """Tokens of a compressed key in layers with letter G, where queries see all of them."""
    index_heads: int = 64
    """Heads of the indexer in layers with letter F."""
    index_dim: int = 128
    """Elements of the indexer's queries and compressed keys."""
    index_topk: int = 512
    """Compressed keys that the indexer selects for each query."""

    def __post_init__(self) -> None:
        require_whole("compressed_attention", vars(self))


@dataclass(frozen=True, kw_only=True)
class HyperConnections(Stated):
    """Several residual streams, which every sub-layer reads as one weighted sum and whose mixture
    its result is added to; the weights are made of all streams (manifold-constrained
    hyper-connections of DeepSeek-V4)."""

    count: int
    """Residual streams."""
    mixed: bool = True
    """A sub-layer's result is added to mixtures of the streams, not to the streams themselves (as
    in HY 4)."""

    def __post_init__(self) -> None:
        require_whole("hyper_connections", {"count": self.count})

    @property
    def weights(self) -> int:
        """Weights of a token around one sub-layer: into it, out of it, and between streams."""
        return (2 + self.count * self.mixed) * self.count

    @property
    def scales(self) -> int:
        """Scales, one for each kind of these weights."""
        return 2 + self.mixed


@dataclass(frozen=True, kw_only=True)
class Distances(Stated):
    """Projections of a table of distances between tokens that every layer has of its own (DeBERTa,
    arXiv 2006.03654, section 3.1). The table itself counts as rows of positions."""

    rows: int
    """Rows of the table."""
    projections: tuple[Literal["query", "key"], ...]
    """What rows are projected to; each with a bias where tokens' projection has one."""

    def __post_init__(self) -> None:
        require_whole("distances", {"rows": self.rows})


@dataclass(frozen=True, kw_only=True)
class WindowHeads(Stated):
    """Heads of attention in the window, where they differ from those of full attention (Step 3.5,
    Gemma 4, MiMo-V2)."""

    heads: int
    """Heads of queries."""
    kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Elements of a head's queries and keys."""
    value_dim: int = 0
    """Elements of a head's values; 0: as many as of queries."""
    attention_sinks: bool = False
    """Every head has a learned score that takes part in its softmax."""
    keys_as_values: bool = False
    """Values are made by the projection of keys."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("heads", "kv_heads", "head_dim")}
        require_whole("window_heads", sizes)
        require_whole("window_heads", {"value_dim": self.value_dim}, least=0)
        if self.heads % self.kv_heads:
            raise PerfModelError(
                f"window_heads: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class Mamba(Stated):
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
    gated_norm: bool = True
    """The gated result is normalised before the output projection (not in Falcon-H1)."""

    def __post_init__(self) -> None:
        sizes = dict(vars(self))
        del sizes["gated_norm"]
        require_whole("mamba", sizes)
        if self.heads % self.groups:
            raise PerfModelError(
                f"mamba: heads={self.heads} must be a multiple of groups={self.groups}"
            )

    @property
    def inner(self) -> int:
        """Elements per token inside the mixer, over all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: the inner elements, and inputs and outputs of the state."""
        return self.inner + 2 * self.groups * self.state


@dataclass(frozen=True, kw_only=True)
class SelectiveScan(Stated):
    """Mixers of the first Mamba (Gu and Dao, arXiv 2312.00752, section 3): a state per channel,
    scanned over tokens."""

    inner: int
    """Channels of the mixer."""
    state: int
    """Elements of a channel's state."""
    step_rank: int
    """Elements that the step sizes of all channels are projected from."""
    conv_kernel: int = 4
    inner_norms: bool = False
    """Step sizes, inputs and outputs of the state are normalised each by itself (Jamba, arXiv
    2403.19887)."""

    def __post_init__(self) -> None:
        sizes = dict(vars(self))
        del sizes["inner_norms"]
        require_whole("selective_scan", sizes)


@dataclass(frozen=True, kw_only=True)
class ShortConv(Stated):
    """Gated short convolutions (LFM2, arXiv 2511.23404): a causal convolution over a few tokens
    between two gates."""

    kernel: int
    """Tokens that the convolution sees."""

    def __post_init__(self) -> None:
        require_whole("short_conv", vars(self))


@dataclass(frozen=True, kw_only=True)
class TimeMix(Stated):
    """Time mixing of RWKV. By default that of RWKV-4 (Peng et al., arXiv 2305.13048, section
    3.1.2): a weighted mean of earlier values, whose weights decay at a rate of their own in every
    channel, scanned over tokens. With `heads` it is linear attention (RWKV-5 and 6, arXiv
    2404.05892), with `rate_rank` under a delta rule (RWKV-7, arXiv 2503.14456)."""

    inner: int
    """Channels of values; of receptances, keys and decays too, unless `keys` says otherwise."""
    heads: int = 0
    """Heads, each with a matrix as its state; 0: every channel has a state of its own (RWKV-4)."""
    keys: int = 0
    """Channels of receptances, keys and decays; 0: as many as of values."""
    chunk: int = 64
    """With heads: tokens that are computed as one block of matrix products."""
    gate: bool = False
    """The result is multiplied by a gate, which a full projection makes (RWKV-5 and 6)."""
    gate_rank: int = 0
    """Rank of the projections that make such a gate instead (RWKV-7); 0 for none."""
    mix_rank: int = 0
    """Rank of the projections that make the shares in which a token is mixed with the one before
    it (RWKV-6); 0: these are trained numbers."""
    decay_rank: int = 0
    """Rank of the projections that make the decays (RWKV-6 and 7); 0: these are trained numbers."""
    rate_rank: int = 0
    """Rank of the projections to the rates at which a token's value replaces what the state holds
    (RWKV-7); 0: the state only decays."""
    value_rank: int = 0
    """Rank of the projections to the shares of the first layer's values, in layers with letter T
    (RWKV-7)."""
    channel_receptance: bool = True
    """Channel mixing has a receptance, which gates its result (not in RWKV-7)."""

    def __post_init__(self) -> None:
        require_whole("time_mix", {"inner": self.inner, "chunk": self.chunk})
        none_or_more = ("heads", "keys", "gate_rank", "mix_rank", "decay_rank", "rate_rank")
        sizes = {name: getattr(self, name) for name in (*none_or_more, "value_rank")}
        require_whole("time_mix", sizes, least=0)
        if self.heads and (self.inner % self.heads or self.keys % self.heads):
            raise PerfModelError(
                f"time_mix: inner={self.inner} and keys={self.keys} must be multiples of "
                f"heads={self.heads}"
            )
        if not self.heads and (self.keys or self.rate_rank):
            raise PerfModelError("time_mix: keys and rate_rank need heads")

    @property
    def key_channels(self) -> int:
        """Channels of receptances, keys and decays."""
        return self.keys or self.inner

    @property
    def mixtures(self) -> int:
        """Trained vectors of shares in which a token is mixed with the one before it: for
        receptances, keys and values, and for gates, decays and rates if projections make them."""
        has_gate = self.gate or self.gate_rank > 0
        # Shares made by projections start from one further mixture.
        return 3 + has_gate + sum(map(bool, (self.decay_rank, self.rate_rank, self.mix_rank)))


@dataclass(frozen=True, kw_only=True)
class SharedBlock(Stated):
    """Transformer blocks whose weights several layers share (Zamba, arXiv 2405.16712, section 2):
    attention over the hidden state beside the token's embedding, a feed-forward, and a projection
    that each layer has of its own. Heads and inner size are those of the model."""

    copies: int = 1
    """Blocks with weights of their own, which layers use in turn (Zamba 2)."""
    adapter_rank: int = 0
    """Rank of adapters beside the feed-forward's first product, trained with the model, that each
    layer has of its own (Zamba 2); 0 for none."""
    attention_adapters: bool = False
    """There are such adapters beside the projections of queries, keys and values too."""

    def __post_init__(self) -> None:
        require_whole("shared_block", {"copies": self.copies})
        require_whole("shared_block", {"adapter_rank": self.adapter_rank}, least=0)
        if self.attention_adapters and not self.adapter_rank:
            raise PerfModelError("shared_block: attention_adapters needs adapter_rank")


@dataclass(frozen=True, kw_only=True)
class LayerEmbedding(Stated):
    """Token embeddings for every layer by itself (Gemma 3n and Gemma 4, per-layer embeddings): a
    row for each layer, to which a projection of the token's embedding is added, gated by the
    layer's hidden state."""

    width: int
    """Elements of a row."""
    vocab: int
    """Rows of the table."""

    def __post_init__(self) -> None:
        require_whole("layer_embedding", vars(self))


@dataclass(frozen=True, kw_only=True)
class Streams(Stated):
    """Several residual streams, of which a layer computes on one and predicts and corrects the
    others (alternating updates, arXiv 2301.13310), with a low-rank residual beside attention
    (LAuReL, arXiv 2411.07501); both in Gemma 3n."""

    count: int
    """Streams, the one that layers compute on included."""
    low_rank: int
    """Rank of the residual beside attention."""

    def __post_init__(self) -> None:
        require_whole("streams", vars(self))


@dataclass(frozen=True, kw_only=True)
class DeltaNet(Stated):
    """Linear attention of a hybrid model, whose state decays: by default a gated delta net (Yang et
    al., arXiv 2412.06464; Qwen3-Next), without `delta_rule` plain linear attention (lightning
    attention of MiniMax-01, arXiv 2501.08313)."""

    heads: int
    """Heads of values, which are also those of states."""
    key_heads: int
    """Heads of queries and keys; each serves heads / key_heads of the values'."""
    head_dim: int
    """Elements of a value."""
    key_dim: int
    """Elements of a query or key."""
    conv_kernel: int = 4
    """Tokens that the convolution of queries, keys and values sees; 0 for none."""
    chunk: int = 64
    """Tokens that are computed as one block of matrix products (section 3.3)."""
    delta_rule: bool = True
    """A token's value replaces what the state holds under its key; without, it is added to the
    state, and queries and keys are not normalised."""
    fixed_decays: bool = False
    """Decays are constants of the heads, neither trained nor made of the token."""
    input_gates: bool = False
    """Without `delta_rule`: each head's values are scaled by a gate made of the token, and queries,
    keys and values are not activated (mLSTM of xLSTM, arXiv 2405.04517)."""
    norm_of_all_heads: bool = False
    """The result is normalised over all heads at once, with a scale for each element."""
    channel_decays: bool = False
    """Every element of a key has a decay of its own (Kimi Delta Attention, arXiv 2510.26692), not
    one for each head."""
    gate_rank: int = 0
    """Rank of the projections to the output gate and to the decays (Kimi Linear); 0 for full
    ones."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("heads", "key_heads", "head_dim")}
        require_whole("delta_net", {**sizes, "key_dim": self.key_dim, "chunk": self.chunk})
        none_or_more = {"conv_kernel": self.conv_kernel, "gate_rank": self.gate_rank}
        require_whole("delta_net", none_or_more, least=0)
        if self.input_gates and (self.delta_rule or self.fixed_decays or self.conv_kernel):
            raise PerfModelError(
                "delta_net: input_gates needs delta_rule=false, fixed_decays=false and conv_kernel=0"
            )
        if self.fixed_decays and (self.channel_decays or self.gate_rank):
            raise PerfModelError(
                "delta_net: fixed_decays cannot be combined with channel_decays or gate_rank, which compute decays"
            )
        if self.heads % self.key_heads:
            raise PerfModelError(
                f"delta_net: heads={self.heads} must be a multiple of key_heads={self.key_heads}"
            )

    @property
    def values(self) -> int:
        """Elements of a token's values, over all heads."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """Channels of the convolution: values, queries and keys."""
        return self.values + 2 * self.key_heads * self.key_dim

    @property
    def decays(self) -> int:
        """Decays that are made of a token, over all heads."""
        if self.fixed_decays:
            return 0
        return self.heads * (self.key_dim if self.channel_decays else 1)

    @property
    def steps(self) -> int:
        """Step sizes of the delta rule, or input gates, for a token, over all heads."""
        return self.heads if self.delta_rule or self.input_gates else 0


@dataclass(frozen=True, kw_only=True)
class AdaLN(Stated):
    """Adaptive norms: scale, shift and gate of each sub-layer, computed from time step and class.

    adaLN-Zero of DiT, Peebles and Xie, arXiv 2212.09748, section 3.2. Norms have no parameters of
    their own; those of queries and keys have a scale each.
    """

    classes: int = 0
    """Classes of images; one more stands for no class (classifier-free guidance). 0: images have
    none."""
    frequencies: int = 256
    """Number of sines and cosines that encode a time step."""
    guidance: bool = False
    """The strength of guidance is encoded and embedded as time steps are (FLUX.1-dev)."""
    shared: bool = False
    """One product makes the vectors of all layers, which each layer adds its own learned ones to
    (adaLN-single of PixArt-alpha, arXiv 2310.00426, section 2.3)."""

    def __post_init__(self) -> None:
        require_whole("adaln", {"classes": self.classes}, least=0)
        require_whole("adaln", {"frequencies": self.frequencies})
