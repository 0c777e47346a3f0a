"""Per-layer lists of Hugging Face configurations: which layers attend in a window, and which have
experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from perfmodel.catalog.entries import checked
from perfmodel.catalog.huggingface._llama import Count, CountOrNone, Fields
from perfmodel.errors import PerfModelError
from perfmodel.spec import Transformer
from perfmodel.spec.parts import Experts

ATTENTION_LETTERS: Final[Mapping[str, str]] = {
    "full_attention": "*",
    "attention": "*",
    "hybrid": "*",
    # which keys a query sees is chosen by an indexer; the layer attends like any other
    "indexed_attention": "*",
    "deepseek_sparse_attention": "*",
    "sparse_attention": "*",
    "sliding_attention": "W",
    "chunked_attention": "W",
    "linear_attention": "L",
    "mamba": "M",
    "mamba2": "M",
}
"""Letter of `MIXERS` for a word of `layer_types`."""
LAST: Final = -1
"""Stands for the last layer."""
FEED_FORWARD_LETTERS: Final[Mapping[str, str]] = {
    "dense": "-",
    "mlp": "-",
    "sparse": "E",
    "moe": "E",
}
"""Letter of `MIXERS` for a word of `mlp_layer_types`."""


def mixer_words(layers: Sequence[str]) -> str:
    """The text of `Transformer.mixers` for one word per layer, whose letters are the layer's
    sub-layers.

    A text without blanks means a letter per layer; the blank at the end marks a single word as one
    layer.
    """
    return " ".join(layers) + " "


def mixers_of(attention: Sequence[str], feed_forward: Sequence[str]) -> str:
    """`Transformer.mixers` of layers with these attentions and feed-forwards, a letter per layer
    each."""
    return mixer_words(
        [mixer + behind for mixer, behind in zip(attention, feed_forward, strict=True)]
    )


def feed_forward_letters(
    listed: Sequence[str] | None, layers: int, first_dense_layers: int
) -> list[str]:
    """The feed-forward of each layer, as its letter in `MIXERS`: as listed, else experts in all but
    the first layers.

    Args:
        listed: `mlp_layer_types`; None where the configuration has no such list.

    Raises:
        PerfModelError: as `letters_of`.
    """
    if listed is not None:
        return letters_of(listed, FEED_FORWARD_LETTERS, "mlp_layer_types", layers)
    return ["-" if layer < first_dense_layers else "E" for layer in range(layers)]


def letters_of(kinds: Sequence[str], known: Mapping[str, str], key: str, layers: int) -> list[str]:
    """Letters of `MIXERS` for a list that says what kind each layer is.

    Raises:
        PerfModelError: the list has another length than there are layers, or a word that is not
            known.
    """
    if len(kinds) != layers:
        raise PerfModelError(
            f"{key} must have an entry for each of {layers} layers, got {len(kinds)}"
        )
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise PerfModelError(
            f"{key} has {', '.join(map(repr, unknown))}; known: {', '.join(known)}"
        )
    return [known[kind] for kind in kinds]


def with_layer_lists(
    fields: Fields,
    attention: Sequence[str] | None = None,
    feed_forward: Sequence[str] | None = None,
) -> Fields:
    """Replace the layer rules in `fields` by lists.

    A list that a rule describes (a window in all layers but every n-th, dense layers first) becomes
    that rule, so that configurations of one model agree however they spell it; only an irregular
    list becomes `mixers`.

    Args:
        fields: arguments of `Transformer` without a name.
        attention: a letter of `MIXERS` per layer.
        feed_forward: the same.
    """
    # A first guess at the rules that the lists follow.
    if attention is not None:
        # Lists name sliding layers also where the window is off.
        if not fields.get("window"):
            attention = ["*" if letter == "W" else letter for letter in attention]
        fields = fields | _window_rule(attention)
    experts = fields.get("experts")
    if feed_forward is not None and isinstance(experts, Experts):
        fields = fields | {"experts": _expert_rule(experts, feed_forward)}

    # The guess holds if its rules give the same stack as the lists.
    by_rule = Transformer(name="by rule", **fields).stack
    lists = []
    for layer, sublayers in enumerate(by_rule):
        mixer = sublayers[0] if attention is None else attention[layer]
        behind = sublayers[1:] if feed_forward is None else feed_forward[layer]
        lists.append(mixer + behind)
    if tuple(lists) == by_rule:
        return fields
    return fields | {"mixers": mixer_words(lists)}


def _window_rule(attention: Sequence[str]) -> Fields:
    """Fields for a stack in which every n-th layer attends in full, n being the first that does;
    without a W no layer has a window."""
    if "W" not in attention:
        return {"window": 0, "full_attention_every": 0}
    return {"full_attention_every": attention.index("*") + 1 if "*" in attention else 0}


def _expert_rule(experts: Experts, feed_forward: Sequence[str]) -> Experts | None:
    """Experts in all layers from the first that has them; None if no layer has experts."""
    if "E" not in feed_forward:
        return None
    return replace(experts, first_dense_layers=feed_forward.index("E"), every=1)


@dataclass(frozen=True, kw_only=True)
class LayerLists:
    """Keys with one entry per layer, common to all families."""

    layer_types: tuple[str, ...] | None = None
    """How each layer attends."""
    mlp_layer_types: tuple[str, ...] | None = None
    """Feed-forward of each layer: dense, or experts."""
    moe_layers: tuple[CountOrNone, ...] | None = None
    """Numbers of layers with experts (Llama 4)."""
    mlp_only_layers: tuple[CountOrNone, ...] = ()
    """Numbers of layers without experts (Qwen)."""
    moe_layer_freq: Count | tuple[CountOrNone, ...] = 1
    """Every n-th layer has experts, counted from the first (DeepSeek; `decoder_sparse_step` counts
    from the last of each n), or a list with 1 for each layer with experts."""
    moe_layer_interval: Count = 1
    """Every n-th layer has experts, the last of each n layers of the stack (ERNIE 4.5)."""
    moe_layer_end_index: int = LAST
    """Number of the last layer that may have experts (ERNIE 4.5)."""

    def attention(self, layers: int, recurrent: str) -> list[str] | None:
        """The attention of each layer as its letter in `MIXERS`, or `recurrent` for a mixer in its
        place; None if the configuration has no such list."""
        if self.layer_types is None:
            return None
        letters = letters_of(self.layer_types, ATTENTION_LETTERS, "layer_types", layers)
        return [recurrent if letter in "LM" else letter for letter in letters]

    def feed_forward(self, layers: int, experts: Experts | None) -> list[str] | None:
        """The feed-forward of each layer, as its letter in `MIXERS`; None where the configuration
        has no such list."""
        if experts is None:
            return None
        if self.mlp_layer_types is not None:
            return letters_of(self.mlp_layer_types, FEED_FORWARD_LETTERS, "mlp_layer_types", layers)
        if self.moe_layers is not None:
            return ["E" if layer in self.moe_layers else "-" for layer in range(layers)]
        frequency = self.moe_layer_freq
        if isinstance(frequency, tuple):
            flags = [str(has_experts) for has_experts in frequency]
            return letters_of(flags, {"0": "-", "1": "E"}, "moe_layer_freq", layers)
        end = layers - 1 if self.moe_layer_end_index == LAST else self.moe_layer_end_index
        by_rule = frequency == 1 and self.moe_layer_interval == 1
        if by_rule and not self.mlp_only_layers and end >= layers - 1:
            return None
        # Both ways of counting are in use: DeepSeek's frequency starts with the
        # first layer, Qwen's step with the last of each.
        letters = ["-"] * layers
        for layer in range(experts.first_dense_layers, min(end + 1, layers)):
            in_turn = layer % frequency == 0 if frequency > 1 else (layer + 1) % experts.every == 0
            if in_turn and layer not in self.mlp_only_layers:
                letters[layer] = "E"
        return letters


def listed_layers(config: Mapping[str, Any], fields: Fields, place: str) -> Fields:
    """Read the per-layer lists of a configuration, which every family may have, as fields of a
    model.

    Raises:
        PerfModelError: a list is malformed, has another length than there are layers, or a word
            that is not known.
    """
    stated = {key: value for key, value in config.items() if value is not None}
    lists = checked(LayerLists, stated, place)
    # "Linear attention" is Mamba-2 in some families and a delta net in others: the sizes tell which
    # there is.
    attention = lists.attention(fields["layers"], "M" if fields.get("mamba") else "L")
    feed_forward = lists.feed_forward(fields["layers"], fields.get("experts"))
    if attention is None and feed_forward is None:
        return fields
    return with_layer_lists(fields, attention, feed_forward)


def one_number(value: Any) -> Any:
    """The single number of a list that repeats it for every layer (Hunyuan's `moe_topk`); other
    values unchanged."""
    # Shapes of other things are lists too, and stay.
    if not isinstance(value, list) or not value or not isinstance(value[0], int):
        return value
    return value[0] if value.count(value[0]) == len(value) else value
