"""Hugging Face configurations of models whose windowed attention has different heads from full
attention, or whose values differ in size from keys: Gemma 4, MiMo-V2, Step 3.5 and Laguna."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

from annotated_types import Ge

from perfmodel.catalog.huggingface._dense import Gemma
from perfmodel.catalog.huggingface._experts import EXPERT_KEYS, LlamaWithExperts
from perfmodel.catalog.huggingface._layers import (
    ATTENTION_LETTERS,
    FEED_FORWARD_LETTERS,
    feed_forward_letters,
    letters_of,
    mixer_words,
    mixers_of,
)
from perfmodel.catalog.huggingface._llama import Count, CountOrNone, Fields
from perfmodel.catalog.huggingface._unknown import CannotDescribeError
from perfmodel.spec.parts import Experts, LayerEmbedding, Streams, WindowHeads


@dataclass(frozen=True, kw_only=True)
class PerLayerSizes:
    """An entry of `per_layer_config`: sizes of one layer that differ from those of all."""

    head_dim: Count | None = None
    num_key_value_heads: Count | None = None


@dataclass(frozen=True, kw_only=True)
class SmallGemmaKeys:
    """Keys of Gemma's small models: an embedding of the token in every layer, and last layers that
    use the keys and values of earlier ones."""

    hidden_size_per_layer_input: CountOrNone = 256
    vocab_size_per_layer_input: Count = 262_144
    num_kv_shared_layers: CountOrNone = 0

    def layer_embedding(self) -> LayerEmbedding | None:
        """The embedding that every layer adds; None if the model has none."""
        if not self.hidden_size_per_layer_input:
            return None
        return LayerEmbedding(
            width=self.hidden_size_per_layer_input, vocab=self.vocab_size_per_layer_input
        )

    def first_layer_with_shared_keys(self, layers: int) -> int:
        """Number of the first of the last layers that have no keys and values of their own."""
        return layers - min(self.num_kv_shared_layers, layers)


@dataclass(frozen=True, kw_only=True)
class Gemma4(LlamaWithExperts, SmallGemmaKeys):
    """Gemma 4: full attention has wider heads and, if configured, values from the projection of
    keys; routed experts beside the dense feed-forward have norms of their own (26B-A4B). In the
    small models every layer has an embedding of the token of its own, and the last ones use the
    keys and values of earlier ones (transformers models/gemma4/modeling_gemma4.py). Configurations
    omit what equals the defaults of the Hugging Face class."""

    READS_LAYER_TYPES: ClassVar[bool] = True
    ALIASES: ClassVar[Mapping[str, str]] = {**EXPERT_KEYS, "hidden_activation": "hidden_act"}

    hidden_size: Count = 2304
    intermediate_size: Count = 9216
    num_attention_heads: Count = 8
    num_hidden_layers: Count = 30
    num_key_value_heads: Count = 4
    vocab_size: Count = 262_144
    head_dim: Count = 256
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Count = 131_072
    tie_word_embeddings: bool = True
    sliding_window: CountOrNone = 512
    final_logit_softcapping: Annotated[float, Ge(0)] = 0.0
    layer_types: tuple[str, ...] | None = None
    global_head_dim: Count = 512
    num_global_key_value_heads: Count | None = None
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: CountOrNone = 0
    num_experts_per_tok: CountOrNone = 0
    per_layer_config: Mapping[str, PerLayerSizes] | None = None
    use_bidirectional_attention: str | None = None

    def attention_letters(self) -> list[str]:
        """The kind of attention of each layer, as its letter in `MIXERS`."""
        n_layers = self.num_hidden_layers
        if self.layer_types is None:
            letters = ["*" if (layer + 1) % 6 == 0 else "W" for layer in range(n_layers)]
        else:
            letters = letters_of(self.layer_types, ATTENTION_LETTERS, "layer_types", n_layers)
        # The class makes the last layer attend in full whatever the list says.
        return [*letters[:-1], "*"]

    def full_heads(self, letters: Sequence[str]) -> tuple[int, int]:
        """Heads of keys and values of full attention, and their size."""
        kv_heads = self.num_key_value_heads
        if self.attention_k_eq_v:
            kv_heads = self.num_global_key_value_heads or kv_heads
        # transformers writes these sizes layer by layer.
        by_layer = self.per_layer_config
        if not by_layer:
            return kv_heads, self.global_head_dim
        for layer in by_layer:
            if not layer.isdecimal():
                raise CannotDescribeError(
                    f"per_layer_config has the key {layer!r}, which is not a layer number"
                )
        # Numbers are padded to equal lengths: "05" among "11".
        sizes_of_layer = {int(layer): sizes for layer, sizes in by_layer.items()}
        stated = sizes_of_layer.get(letters.index("*"), PerLayerSizes())
        return stated.num_key_value_heads or kv_heads, stated.head_dim or self.head_dim

    def moe_fields(self) -> Fields:
        """Fields of experts beside the dense feed-forward; empty for a model without."""
        if not self.enable_moe_block:
            return {"experts": None}
        experts = Experts(
            count=self.num_experts,
            topk=self.num_experts_per_tok,
            ffn_hidden=self.expert_inner,
            shared_ffn_hidden=self.intermediate_size,
            branch_norms=True,
        )
        return {"experts": experts}

    def small_model_fields(self, letters: Sequence[str]) -> Fields:
        """Fields of what small models have besides: embeddings in every layer, and layers that use
        the keys and values of earlier ones, whose feed-forwards may be twice as wide."""
        first_shared = self.first_layer_with_shared_keys(len(letters))
        layer_words = []
        sizes = []
        for layer, letter in enumerate(letters):
            is_shared = layer >= first_shared
            attention = SHARED_KEYS[letter] if is_shared else letter
            layer_words.append(
                attention
                + ("E" if self.enable_moe_block else "-")
                + ("P" if self.hidden_size_per_layer_input else "")
            )
            sizes.append(
                self.intermediate_size * (2 if self.use_double_wide_mlp and is_shared else 1)
            )
        return {
            "mixers": mixer_words(layer_words),
            "ffn_sizes": tuple(sizes) if len(set(sizes)) > 1 else (),
            "layer_embedding": self.layer_embedding(),
        }

    def fields(self) -> Fields:
        letters = self.attention_letters()
        kv_heads, head_dim = self.full_heads(letters)
        heads = self.num_attention_heads
        window_heads = WindowHeads(
            heads=heads, kv_heads=self.num_key_value_heads, head_dim=self.head_dim
        )
        dense = super(LlamaWithExperts, self).fields()
        return dense | {
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "window_heads": window_heads if "W" in letters else None,
            "keys_as_values": self.attention_k_eq_v,
            "causal": self.use_bidirectional_attention != "all",
            "norm_at": "both",
            "qk_norm": True,
            "logit_softcap": self.final_logit_softcapping > 0,
            **self.small_model_fields(letters),
            **self.moe_fields(),
        }


@dataclass(frozen=True, kw_only=True)
class Gemma3n(Gemma, SmallGemmaKeys):
    """Gemma 3n: four residual streams, embeddings of its own in every layer, and last layers that
    use the keys and values of earlier ones (transformers models/gemma3n/modeling_gemma3n.py).
    Configurations omit what equals the defaults of the Hugging Face class."""

    READS_LAYER_TYPES: ClassVar[bool] = True
    ALIASES: ClassVar[Mapping[str, str]] = {"hidden_activation": "hidden_act"}

    hidden_size: Count = 2048
    intermediate_size: Count | tuple[Count, ...] = 16_384
    num_attention_heads: Count = 8
    num_hidden_layers: Count = 35
    num_key_value_heads: Count | None = 2
    vocab_size: Count = 262_400
    max_position_embeddings: Count = 32_768
    sliding_window: CountOrNone = 512
    final_logit_softcapping: Annotated[float, Ge(0)] = 30.0
    layer_types: tuple[str, ...] | None = None
    hidden_size_per_layer_input: Count = 256
    num_kv_shared_layers: CountOrNone = 15
    altup_num_inputs: Count = 4
    laurel_rank: Count = 64

    def fields(self) -> Fields:
        n_layers = self.num_hidden_layers
        if self.layer_types is None:
            letters = ["*" if (layer + 1) % 5 == 0 else "W" for layer in range(n_layers)]
        else:
            letters = letters_of(self.layer_types, ATTENTION_LETTERS, "layer_types", n_layers)
        first_shared = self.first_layer_with_shared_keys(n_layers)
        letters = [
            *letters[:first_shared],
            *(SHARED_KEYS[letter] for letter in letters[first_shared:]),
        ]
        listed = self.intermediate_size
        sizes = listed if isinstance(listed, tuple) else ()
        if isinstance(listed, tuple) and len(sizes) != n_layers:
            raise CannotDescribeError(
                f"intermediate_size has {len(sizes)} numbers for {n_layers} layers"
            )
        inner = max(sizes) if isinstance(listed, tuple) else listed
        return replace(self, intermediate_size=inner).dense_fields() | {
            "norm_at": "both",
            "qk_norm": True,
            "logit_softcap": self.final_logit_softcapping > 0,
            "mixers": mixer_words([f"U{letter}-P" for letter in letters]),
            "ffn_sizes": sizes,
            "layer_embedding": self.layer_embedding(),
            "streams": Streams(count=self.altup_num_inputs, low_rank=self.laurel_rank),
        }

    def dense_fields(self) -> Fields:
        """Fields of Gemma with these sizes."""
        return super().fields()


SHARED_KEYS: Final[Mapping[str, str]] = {"*": "Q", "W": "V"}
"""Letters of attention, and those of the same with the keys and values of an earlier layer."""


@dataclass(frozen=True, kw_only=True)
class MiMoV2(LlamaWithExperts):
    """MiMo-V2: attention in the window has more heads of keys and values and a sink for each head;
    heads of values are narrower than those of keys. The module that predicts further tokens is left
    out."""

    READS_LAYER_TYPES: ClassVar[bool] = True
    BIASED_OUTPUT: ClassVar[bool] = False

    head_dim: Count = 192
    v_head_dim: Count = 128
    swa_num_attention_heads: Count | None = None
    swa_num_key_value_heads: Count | None = None
    swa_head_dim: Count | None = None
    swa_v_head_dim: Count | None = None
    sliding_window: CountOrNone = 129
    sliding_window_size: Count | None = None
    hybrid_layer_pattern: tuple[CountOrNone, ...] | None = None
    moe_layer_freq: tuple[CountOrNone, ...] | None = None
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    add_full_attention_sink_bias: bool = False
    add_swa_attention_sink_bias: bool = True

    def attention_letters(self) -> list[str]:
        """The kind of attention of each layer, as its letter in `MIXERS`."""
        n_layers = self.num_hidden_layers
        if self.layer_types is not None:
            return letters_of(self.layer_types, ATTENTION_LETTERS, "layer_types", n_layers)
        # Its own code lists a 1 for each layer in the window.
        if self.hybrid_layer_pattern is not None:
            flags = [str(flag) for flag in self.hybrid_layer_pattern]
            return letters_of(flags, {"0": "*", "1": "W"}, "hybrid_layer_pattern", n_layers)
        return ["*" if layer == 0 or (layer + 1) % 6 == 0 else "W" for layer in range(n_layers)]

    def feed_forward_letters(self) -> list[str]:
        """The feed-forward of each layer, as its letter in `MIXERS`."""
        n_layers = self.num_hidden_layers
        if self.mlp_layer_types is None and self.moe_layer_freq is not None:
            flags = [str(flag) for flag in self.moe_layer_freq]
            return letters_of(flags, {"0": "-", "1": "E"}, "moe_layer_freq", n_layers)
        return feed_forward_letters(self.mlp_layer_types, n_layers, first_dense_layers=1)

    def fields(self) -> Fields:
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        window_heads = WindowHeads(
            heads=self.swa_num_attention_heads or heads,
            # The Hugging Face class has no key for it: twice as many.
            kv_heads=self.swa_num_key_value_heads or 2 * kv_heads,
            head_dim=self.swa_head_dim or self.head_dim,
            value_dim=self.swa_v_head_dim or self.v_head_dim,
            attention_sinks=self.add_swa_attention_sink_bias,
        )
        # `window` is one more than `sliding_window_size`, which leaves out the query's own key.
        window = self.sliding_window
        if self.sliding_window_size is not None:
            window = self.sliding_window_size + 1
        return super().fields() | {
            "value_dim": self.v_head_dim,
            "window": window,
            "window_heads": window_heads,
            "attention_sinks": self.add_full_attention_sink_bias,
            "mixers": mixers_of(self.attention_letters(), self.feed_forward_letters()),
        }


@dataclass(frozen=True, kw_only=True)
class Step35(LlamaWithExperts):
    """Step 3.5 and 3.7: attention in the window has more heads, and every head a gate (transformers
    models/step3p7/modeling_step3p7.py)."""

    READS_LAYER_TYPES: ClassVar[bool] = True
    ALIASES: ClassVar[Mapping[str, str]] = {
        **EXPERT_KEYS,
        "num_attention_groups": "num_key_value_heads",
        "share_expert_dim": "shared_expert_intermediate_size",
        "share_expert_dims": "shared_expert_intermediate_size",
        "num_mtp_layers": "num_nextn_predict_layers",
    }

    num_key_value_heads: Count = 8
    head_dim: Count = 128
    sliding_window: CountOrNone = 0
    num_sliding_attention_heads: Count | None = None
    attention_other_setting: Mapping[str, Any] | None = None
    moe_layers_enum: str | tuple[CountOrNone, ...] | None = None
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None

    def attention_letters(self) -> list[str]:
        """The kind of attention of each layer, as its letter in `MIXERS`."""
        n_layers = self.num_hidden_layers
        if self.layer_types is None:
            return ["*"] * n_layers
        # Layers of modules for further tokens stand at the end of the list.
        return letters_of(self.layer_types[:n_layers], ATTENTION_LETTERS, "layer_types", n_layers)

    def feed_forward_letters(self) -> list[str]:
        """The feed-forward of each layer, as its letter in `MIXERS`."""
        n_layers = self.num_hidden_layers
        if self.mlp_layer_types is not None:
            return letters_of(
                self.mlp_layer_types[:n_layers], FEED_FORWARD_LETTERS, "mlp_layer_types", n_layers
            )
        with_experts = set(range(3, n_layers))
        if self.moe_layers_enum is not None:
            listed = self.moe_layers_enum
            numbers = (
                listed.split(",") if isinstance(listed, str) else [str(number) for number in listed]
            )
            if not all(number.strip().isdecimal() for number in numbers):
                raise CannotDescribeError(
                    f"moe_layers_enum={listed!r} does not list numbers of layers"
                )
            with_experts = {int(number) for number in numbers}
        return ["E" if layer in with_experts else "-" for layer in range(n_layers)]

    def window_heads(self) -> WindowHeads:
        """Heads of attention in the window."""
        stated = self.attention_other_setting or {}
        heads = self.num_sliding_attention_heads or stated.get(
            "num_attention_heads", self.num_attention_heads
        )
        kv_heads = stated.get(
            "num_attention_groups", stated.get("num_key_value_heads", self.num_key_value_heads)
        )
        return WindowHeads(
            heads=heads, kv_heads=kv_heads, head_dim=stated.get("head_dim", self.head_dim)
        )

    def fields(self) -> Fields:
        letters = self.attention_letters()
        return super().fields() | {
            "window_heads": self.window_heads() if "W" in letters else None,
            "window": self.sliding_window if "W" in letters else 0,
            "qk_norm": True,
            "head_gate": True,
            "mixers": mixers_of(letters, self.feed_forward_letters()),
        }


@dataclass(frozen=True, kw_only=True)
class Laguna(LlamaWithExperts):
    """Laguna: numbers of heads may differ between layers, here only between windowed and full
    attention; every head has a gate (transformers models/laguna/modeling_laguna.py)."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    head_dim: Count = 128
    num_key_value_heads: Count = 8
    sliding_window: CountOrNone = 512
    gating: bool | str = True
    num_attention_heads_per_layer: tuple[Count, ...] | Count | None = None
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None

    def heads_of(self, letter: str, letters: Sequence[str]) -> int:
        """Heads of the layers whose attention has this letter.

        Raises:
            CannotDescribeError: they have different numbers.
        """
        listed = self.num_attention_heads_per_layer
        if not isinstance(listed, tuple):
            return listed or self.num_attention_heads
        numbers = {
            heads for heads, of_layer in zip(listed, letters, strict=False) if of_layer == letter
        }
        if len(numbers) > 1:
            raise CannotDescribeError("its layers of one kind have different numbers of heads")
        return numbers.pop() if numbers else self.num_attention_heads

    def experts(self) -> Experts:
        return replace(super().experts(), shared_gate=False)

    def fields(self) -> Fields:
        n_layers = self.num_hidden_layers
        letters = ["*"] * n_layers
        if self.layer_types is not None:
            letters = letters_of(self.layer_types, ATTENTION_LETTERS, "layer_types", n_layers)
        window_heads = None
        if "W" in letters:
            window_heads = WindowHeads(
                heads=self.heads_of("W", letters),
                kv_heads=self.num_key_value_heads,
                head_dim=self.head_dim,
            )
        per_head = self.gating in (True, "per-head")
        return super().fields() | {
            "heads": self.heads_of("*", letters),
            "window": self.sliding_window if "W" in letters else 0,
            "window_heads": window_heads,
            "qk_norm": True,
            "head_gate": per_head,
            "attention_gate": not per_head,
            "mixers": mixers_of(
                letters, feed_forward_letters(self.mlp_layer_types, n_layers, first_dense_layers=1)
            ),
        }
