"""Models: the architecture, which determines every shape, FLOP and parameter."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final, Unpack

from perfmodel.errors import PerfModelError
from perfmodel.spec._conv_net import ConvNet
from perfmodel.spec._documented import Stated
from perfmodel.spec._model_sections import (
    MIXERS,
    AttentionForm,
    BlockForm,
    FurtherTokens,
    HybridStack,
    Inputs,
    Norms,
    OutputHead,
)
from perfmodel.spec._sections import Sectioned, flat_keywords, section
from perfmodel.spec._text_layers import require_text_layers
from perfmodel.spec.parts import Experts, LatentAttention
from perfmodel.spec.unet import UNet
from perfmodel.units import require_whole

if TYPE_CHECKING:
    from perfmodel.spec.keywords import TransformerKeywords

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
    "layer_groups",
    "decoder_layers",
    "decoder_seq_len",
    "longest_seq_len",
    "window",
    "full_attention_every",
    "value_dim",
    "token_types",
    "mtp_layers",
    "position_offset",
)
_PART_OF_LETTER: Final = {
    "M": "mamba",
    "S": "selective_scan",
    "L": "delta_net",
    "C": "short_conv",
    "RT": "time_mix",
    "A": "shared_block",
    "I": "indexer",
    "YFG": "compressed_attention",
    "H": "hyper_connections",
    "P": "layer_embedding",
    "U": "streams",
}
"""The field of `HybridStack` with the sizes of each mixer, by its letter or letters."""


@flat_keywords
@dataclass(frozen=True, kw_only=True)
class Transformer(Stated, Sectioned):
    """A decoder-only, encoder-only or (with `decoder_layers`) encoder-decoder transformer, on text
    or image patches."""

    name: str
    layers: int
    """Layers of the stack (of the encoder, for encoder-decoder models)."""
    hidden: int
    """Hidden size."""
    heads: int
    """Attention heads of queries."""
    kv_heads: int
    """Heads of keys and values, fewer than `heads` in grouped-query attention."""
    head_dim: int
    """Size of a head."""
    ffn_hidden: int
    """Inner size of the dense feed-forward."""
    vocab: int
    """Vocabulary size, without padding."""
    seq_len: int
    """Default sequence length."""
    layer_groups: int = 0
    """Number of groups of consecutive layers that share the weights of their first layer (ALBERT,
    arXiv 1909.11942, section 3.1); every pipeline stage with layers of a group has a copy. 0: no
    layers share weights."""
    decoder_layers: int = 0
    """Decoder layers with cross-attention (T5); 0 for a single stack."""
    decoder_seq_len: int = 0
    """Decoder sequence length; 0 means equal to the encoder's."""
    experts: Experts | None = None
    """Experts, which replace the dense feed-forward of some layers."""
    latent_attention: LatentAttention | None = None
    """Sizes of multi-head latent attention, for compressed keys and values."""
    attention: AttentionForm = field(default=AttentionForm(), metadata=section())
    """Form of the attention."""
    block: BlockForm = field(default=BlockForm(), metadata=section())
    """Form of the layers: order of sub-layers, feed-forward, biases."""
    norms: Norms = field(default=Norms(), metadata=section())
    """Kind and placement of norms."""
    inputs: Inputs = field(default=Inputs(), metadata=section())
    """Embeddings and positions."""
    head: OutputHead = field(default=OutputHead(), metadata=section())
    """Form of the output head."""
    hybrid: HybridStack = field(default=HybridStack(), metadata=section())
    """Layers other than attention plus feed-forward."""
    mtp: FurtherTokens = field(default=FurtherTokens(), metadata=section())
    """Modules that predict further tokens (multi-token prediction)."""
    left_out: str = ""
    """Parts of the model that are not counted, in words: a vision tower, an indexer."""
    source: str = ""
    """Source of the figures."""
    aliases: tuple[str, ...] = ()
    """Other names of the model in the catalog."""

    kind = "transformer"

    if TYPE_CHECKING:
        # Editors and type checkers complete the keys of sections too (`flat_keywords`).
        def __init__(
            self,
            *,
            name: str,
            layers: int,
            hidden: int,
            heads: int,
            kv_heads: int,
            head_dim: int,
            ffn_hidden: int,
            vocab: int,
            seq_len: int,
            **others: Unpack[TransformerKeywords],
        ) -> None: ...

    def __post_init__(self) -> None:
        # Each figure by itself. On patches there may be no classes.
        owner = f"model {self.name}"
        positive_sizes = [name for name in _SIZES if name != "vocab" or self.inputs.patches is None]
        require_whole(owner, {name: self.value(name) for name in positive_sizes})
        require_whole(
            owner, {name: self.value(name) for name in (*_SIZES_OR_NONE, "vocab")}, least=0
        )
        numbers_of_layers = {"layers": self.layers, "decoder_layers": self.decoder_layers}
        require_whole(owner, numbers_of_layers, least=0, most=MOST_LAYERS)
        if self.heads % self.kv_heads:
            raise PerfModelError(
                f"{owner}: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}"
            )

        # Then checks of several fields together.
        if self.hybrid != HybridStack() or self.mtp.mtp_mixers:
            self._check_mixers(owner)
        if self.hybrid.mixers or self.mtp.mtp_mixers or self.inputs.text_condition is not None:
            require_text_layers(self)
        self._check_combinations(owner)

    def _check_mixers(self, owner: str) -> None:
        """Raise `PerfModelError` unless mixers are known letters, and each has the sizes that it
        needs."""
        hybrid = self.hybrid
        mixers = hybrid.mixers
        letters = set(mixers + self.mtp.mtp_mixers) - {" "}
        wrong_number = " " not in mixers and len(mixers) != self.layers
        if letters - set(MIXERS) or (mixers and (not letters or wrong_number)):
            known = ", ".join(
                [f"{letter} ({description})" for letter, description in MIXERS.items()]
            )
            raise PerfModelError(
                f"{owner}: mixers must be a letter per layer, or a word per layer, among {known}; got {mixers!r} "
                f"for {self.layers} layers"
            )
        for letters_of_part, part in _PART_OF_LETTER.items():
            # Sizes of a mixer that no layer has are a mistake too.
            has_part = getattr(hybrid, part) is not None
            if has_part != bool(letters & set(letters_of_part)):
                letter = " or ".join(letters_of_part)
                raise PerfModelError(
                    f"{owner}: give {part} if mixers has a {letter}, or else leave it out; mixers={mixers!r}"
                )
        window = self.attention.window
        for letter, part, stated in (
            ("E", "experts", self.experts),
            ("W", "window", window),
            ("V", "window", window),
            ("Y", "window", window),
            ("F", "window", window),
            ("G", "window", window),
        ):
            if letter in letters and not stated:
                raise PerfModelError(f"{owner}: mixers={mixers!r} needs {part} for {letter}")
        self._check_neighbours(owner)

        # A mixer beside attention stands right behind it, at the start of a layer.
        layers_with_mamba = [layer for layer in mixers.split() if "M" in layer]
        together = all(
            layer.startswith("*M") and layer.count("M") == 1 for layer in layers_with_mamba
        )
        can_be_parallel = hybrid.mamba and together and self.norms.norm_at == "input"
        if hybrid.parallel_mixers and not can_be_parallel:
            raise PerfModelError(
                f"{owner}: parallel_mixers needs every M in mixers to be written as *M at the start of its layer, "
                f"and norms at the input; got {mixers!r}"
            )

    def _check_neighbours(self, owner: str) -> None:
        """Raise `PerfModelError` unless sub-layers that belong together stand together, and sizes
        by layer fit."""
        hybrid, latent = self.hybrid, self.latent_attention
        letters = " ".join(self.stack)
        if hybrid.indexer and (
            letters.count("I") != letters.count("I*") or latent is None or not latent.q_lora_rank
        ):
            raise PerfModelError(
                f"{owner}: an indexer needs every I in mixers to stand right before a *, and latent_attention with a "
                f"q_lora_rank; got {hybrid.mixers!r}"
            )
        parts = hybrid.compressed_attention
        if parts and (self.kv_heads != 1 or self.heads % parts.output_groups or self.block.bias):
            raise PerfModelError(
                f"{owner}: compressed_attention needs kv_heads=1, bias=false, and heads={self.heads} divisible by "
                f"output_groups={parts.output_groups}"
            )
        # An indexer is a part of the attention behind it.
        without_indexers = [layer.replace("I", "") for layer in self.stack]
        every_second = all(
            set(layer[::2]) == {"H"} and len(layer) == 2 * layer.count("H")
            for layer in without_indexers
        )
        if hybrid.hyper_connections and (not every_second or self.norms.norm_at != "input"):
            raise PerfModelError(
                f"{owner}: hyper_connections need an H in mixers right before each sub-layer, and norms at "
                f"the input; got {hybrid.mixers!r}"
            )
        # The first layer's values are its own: only those behind it can add them.
        mixing = "".join(letter for letter in letters if letter in "RT")
        value_rank = hybrid.time_mix.value_rank if hybrid.time_mix else 0
        if mixing.startswith("T") or ("T" in mixing) != (value_rank > 0):
            raise PerfModelError(
                f"{owner}: give time_mix a value_rank if mixers has a T, with an R before the first one, or else "
                f"leave it out; mixers={hybrid.mixers!r}"
            )
        if hybrid.shortcut_experts and letters.count("E") != letters.count("-E"):
            raise PerfModelError(
                f"{owner}: shortcut_experts needs every E in mixers to stand right behind a -; got {hybrid.mixers!r}"
            )
        reused = set(letters) & set("QV")
        if reused and (latent is not None or self.decoder_layers):
            raise PerfModelError(
                f"{owner}: Q and V in mixers cannot be combined with latent_attention"
            )
        if hybrid.ffn_sizes:
            require_whole(
                owner, {f"ffn_sizes[{i}]": size for i, size in enumerate(hybrid.ffn_sizes)}
            )
            others = [
                name for name in ("layer_groups", "decoder_layers", "sub_norms") if self.value(name)
            ]
            if len(hybrid.ffn_sizes) != self.layers or others:
                raise PerfModelError(
                    f"{owner}: ffn_sizes must have a number for each of {self.layers} layers, got "
                    f"{len(hybrid.ffn_sizes)}, and cannot be combined with layer_groups, decoder_layers or sub_norms"
                )

    def _check_combinations(self, owner: str) -> None:
        """Raise `PerfModelError` for parts that do not go together."""
        self._check_inputs(owner)
        self._check_heads_and_norms(owner)
        self._check_parallel_blocks(owner)
        has_other_layers = bool(self.hybrid.mixers or self.experts)
        if self.layer_groups > self.layers or (self.layer_groups and has_other_layers):
            raise PerfModelError(
                f"{owner}: layer_groups={self.layer_groups} must be at most layers={self.layers}, and all layers "
                "must be of one kind; leave out mixers and experts"
            )
        if self.experts is not None and self.experts.first_dense_layers > self.layers:
            raise PerfModelError(
                f"model {self.name}: first_dense_layers={self.experts.first_dense_layers} of {self.layers} layers; "
                "give at most as many as there are"
            )

    def _check_inputs(self, owner: str) -> None:
        """Raise `PerfModelError` for parts that the input of the model excludes."""
        inputs = self.inputs
        mixers = self.hybrid.mixers
        mtp_layers = self.mtp.mtp_layers
        if self.decoder_layers and (mixers or mtp_layers or inputs.patches or self.norms.adaln):
            raise PerfModelError(
                f"{owner}: decoder_layers cannot be combined with mixers, mtp_layers, patches or adaln"
            )
        # Patches have no order in which one could be predicted from those before it.
        if inputs.patches and (self.attention.causal or mtp_layers):
            raise PerfModelError(f"{owner}: patches need causal=false and no mtp_layers")

        if inputs.narrow_embedding and (self.decoder_layers or inputs.patches or mtp_layers):
            raise PerfModelError(
                f"{owner}: narrow_embedding cannot be combined with decoder_layers, patches or mtp_layers"
            )
        if inputs.spectrogram and not self.decoder_layers:
            raise PerfModelError(
                f"{owner}: spectrogram needs decoder_layers, because tokens are the input of the decoder"
            )

    def _check_heads_and_norms(self, owner: str) -> None:
        """Raise `PerfModelError` for heads or norms that other parts exclude."""
        attention = self.attention
        if attention.window_heads is not None and not attention.window:
            raise PerfModelError(f"{owner}: window_heads needs window, or leave it out")
        has_own_heads = [
            name for name in ("window_heads", "value_dim", "keys_as_values") if self.value(name)
        ]
        if has_own_heads and (self.latent_attention is not None or self.decoder_layers):
            raise PerfModelError(
                f"{owner}: {' and '.join(has_own_heads)} cannot be combined with latent_attention or decoder_layers"
            )

        # Of other parts nobody has said whether they have such norms.
        others = [
            name for name in ("experts", "latent_attention", "decoder_layers") if self.value(name)
        ]
        if self.norms.sub_norms and others:
            raise PerfModelError(
                f"{owner}: sub_norms cannot be combined with {' and '.join(others)}"
            )

    def _check_parallel_blocks(self, owner: str) -> None:
        """Raise `PerfModelError` if attention and feed-forward run side by side and cannot."""
        # They are two sub-layers of one input, and nothing else.
        sequential = ("latent_attention", "decoder_layers", "mtp_layers", "adaln")
        incompatible = [name for name in sequential if self.value(name)]
        if self.norms.norm_at != "input":
            incompatible.append("norm_at")
        if any(
            len(layer) != 2 or layer[0] not in "*W" or layer[1] not in "-E" for layer in self.stack
        ):
            incompatible.append("mixers")
        parallel_blocks = self.block.parallel_blocks
        if parallel_blocks == "two_norms" and self.experts is not None:
            incompatible.append("experts")
        if parallel_blocks != "none" and incompatible:
            raise PerfModelError(
                f"{owner}: parallel_blocks={parallel_blocks} needs layers of attention and a feed-forward, "
                f"with norms at the input; leave out {' and '.join(incompatible)}"
            )

    @cached_property
    def stack(self) -> tuple[str, ...]:
        """Sub-layers of each layer (of the encoder, for encoder-decoder models), as strings of
        `MIXERS` letters."""
        # Words repeat over the layers; letters stand for a layer each.
        mixers = self.hybrid.mixers
        if mixers:
            sublayers_of_layer = mixers.split() if " " in mixers else list(mixers)
            return tuple(
                sublayers_of_layer[i % len(sublayers_of_layer)] for i in range(self.layers)
            )

        # Without mixers, each layer has attention and a feed-forward. Attention is windowed except
        # in every n-th layer; feed-forwards have experts in every n-th layer after the dense ones.
        attention, experts = self.attention, self.experts
        period = attention.full_attention_every
        stack = []
        for layer in range(self.layers):
            sees_all = not attention.window or (period and (layer + 1) % period == 0)
            layer_of_experts = 0 if experts is None else layer - experts.first_dense_layers + 1
            has_experts = (
                experts is not None
                and layer_of_experts >= 1
                and layer_of_experts % experts.every == 0
            )
            stack.append(("*" if sees_all else "W") + ("E" if has_experts else "-"))
        return tuple(stack)

    @cached_property
    def in_window(self) -> "Transformer":
        """A copy of the model whose attention heads are those of its sliding-window layers."""
        heads = self.attention.window_heads
        if heads is None:
            return self

        # In the copy these heads are the model's own, so that it has no other kind.
        attention = replace(
            self.attention,
            window_heads=None,
            value_dim=heads.value_dim,
            attention_sinks=heads.attention_sinks,
            keys_as_values=heads.keys_as_values,
        )
        return replace(
            self,
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            attention=attention,
        )

    @property
    def value_dim(self) -> int:
        """Elements of a head's values, without latent attention."""
        return self.attention.value_dim or self.head_dim

    @cached_property
    def inner_sizes(self) -> tuple[int, ...]:
        """Inner size of the dense feed-forward of each layer."""
        return self.hybrid.ffn_sizes or (self.ffn_hidden,) * self.layers

    @cached_property
    def uneven_inner(self) -> int:
        """Inner elements that the dense feed-forwards of all layers have more, or fewer, than if
        each had `ffn_hidden`."""
        further = 0
        for word, size in zip(self.stack, self.inner_sizes, strict=True):
            further += word.count("-") * (size - self.ffn_hidden)
        return further

    @property
    def inner_projections(self) -> int:
        """Number of projections from the input of a feed-forward to its inner width: 1, or 2 with a
        gate."""
        return 2 if self.block.gated_ffn else 1

    @property
    def mtp_stack(self) -> tuple[str, ...]:
        """Sub-layers of each multi-token-prediction module, as strings of `MIXERS` letters."""
        # Unless said otherwise such a layer is like the last of the stack.
        return (self.mtp.mtp_mixers or self.stack[-1],) * self.mtp.mtp_layers


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
        require_whole(f"model {self.name}", {"hidden": self.hidden, "seq_len": self.seq_len})
        require_whole(f"model {self.name}", {"layers": self.layers}, most=MOST_LAYERS)


Model = Transformer | Mlp | ConvNet | UNet
