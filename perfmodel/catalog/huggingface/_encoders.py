"""Hugging Face configurations of encoders (BERT and what follows it) and of encoder-decoders (T5,
BART, Whisper)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from perfmodel.catalog.huggingface._layers import mixer_words
from perfmodel.catalog.huggingface._llama import (
    Count,
    CountOrNone,
    Fields,
    Layers,
    Share,
    Stack,
    activation,
    plain_sizes,
)
from perfmodel.errors import PerfModelError
from perfmodel.spec.parts import Distances, NarrowEmbedding, Spectrogram


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
class WithoutPooler(Bert):
    """BERT without the pooler and the head that tells whether sentences follow one another."""

    def fields(self) -> Fields:
        return super().fields() | {"pooler": False}


@dataclass(frozen=True, kw_only=True)
class Roberta(WithoutPooler):
    """RoBERTa: positions are counted from the number of the padding token, 1, so that 514 rows of
    the table are 512 tokens (transformers models/roberta/modeling_roberta.py
    `create_position_ids_from_input_ids`)."""

    def fields(self) -> Fields:
        rows = self.max_position_embeddings
        tokens = max(1, rows - 2)
        return super().fields() | {"seq_len": tokens, "position_offset": rows - tokens}


@dataclass(frozen=True, kw_only=True)
class Ernie(WithoutPooler):
    """ERNIE: BERT's layers; ERNIE 3 adds an embedding of the task to each token (transformers
    models/ernie/modeling_ernie.py)."""

    use_task_id: bool = False
    task_type_vocab_size: Count = 3

    def fields(self) -> Fields:
        task_types = self.task_type_vocab_size if self.use_task_id else 0
        return super().fields() | {"token_types": self.type_vocab_size + task_types}


@dataclass(frozen=True, kw_only=True)
class DebertaV2(WithoutPooler):
    """DeBERTa v2 and v3: attention also scores relative positions, whose embeddings come from a
    table and may be normalised (transformers models/deberta_v2/modeling_deberta_v2.py
    `DebertaV2Encoder`). Scores of relative positions are left out."""

    type_vocab_size: CountOrNone = 0
    relative_attention: bool = False
    position_buckets: int = -1
    max_relative_positions: int = -1
    position_biased_input: bool = True
    share_att_key: bool = False
    pos_att_type: str | tuple[str, ...] = ()
    norm_rel_ebd: str = "none"
    conv_kernel_size: CountOrNone = 0

    @property
    def left_out(self) -> str:
        """Parts of the model that are not counted, in a sentence."""
        parts = ["the position scores of disentangled attention are left out"]
        if self.conv_kernel_size:
            parts.append("the convolution parallel to the first layer is left out")
        return "; ".join(parts)

    def distances(self) -> int:
        """Rows of the table of distances, to the left and to the right; 0 for none."""
        if not self.relative_attention:
            return 0
        numbers = [self.position_buckets, self.max_relative_positions, self.max_position_embeddings]
        return 2 * next(number for number in numbers if number > 0)

    def distance_fields(self) -> Fields:
        """Fields of projections of distances that each layer has of its own."""
        projections: list[Literal["query", "key"]] = []
        if "c2p" in self.pos_att_type:
            projections.append("key")
        if "p2c" in self.pos_att_type:
            projections.append("query")
        if self.share_att_key or not (self.distances() and projections):
            return {}
        return {"distances": Distances(rows=self.distances(), projections=tuple(projections))}

    def fields(self) -> Fields:
        # One table holds the rows of positions, of distances to the left and to the right, and of
        # the norm.
        positions = self.max_position_embeddings
        rows = (positions if self.position_biased_input else 0) + self.distances()
        if "layer_norm" in self.norm_rel_ebd.lower():
            rows += 2
        fields = super().fields() | self.distance_fields()
        if not rows:
            return fields | {"positions": "none"}
        return fields | {
            "seq_len": min(positions, rows),
            "position_offset": max(0, rows - positions),
        }


@dataclass(frozen=True, kw_only=True)
class Deberta(DebertaV2):
    """The first DeBERTa: keys have no biases, nor have those of distances (transformers
    models/deberta/modeling_deberta.py `DisentangledSelfAttention`)."""

    def fields(self) -> Fields:
        return super().fields() | {"unbiased_projections": ("key",)}


@dataclass(frozen=True, kw_only=True)
class Electra(WithoutPooler):
    """ELECTRA's discriminator, counted with the head of its generator. Small ones have embeddings
    that are narrower than their layers (transformers models/electra/modeling_electra.py
    `ElectraEmbeddings`)."""

    embedding_size: Count = 128

    def fields(self) -> Fields:
        if self.embedding_size == self.hidden_size:
            return super().fields()
        # Layers end with their norms, so the only other norm is that of the embeddings.
        return super().fields() | {
            "narrow_embedding": NarrowEmbedding(
                width=self.embedding_size, all_tables=True, bias=True
            ),
            "embedding_norm": True,
            "final_norm": False,
        }


@dataclass(frozen=True, kw_only=True)
class Albert(Bert):
    """ALBERT: all layers of a group have the same weights, and embeddings are narrower than layers
    (transformers models/albert/modeling_albert.py `AlbertTransformer`)."""

    intermediate_size: Count = 16_384
    embedding_size: Count = 128
    num_hidden_groups: Count = 1
    inner_group_num: Count = 1
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: Share = 0.0

    def fields(self) -> Fields:
        if self.inner_group_num > 1:
            raise PerfModelError(
                "inner_group_num must be 1, because groups of layers with different weights are not supported"
            )
        return super().fields() | {
            "pooler": False,
            "layer_groups": self.num_hidden_groups,
            "narrow_embedding": NarrowEmbedding(
                width=self.embedding_size, all_tables=True, bias=True
            ),
            "embedding_norm": True,
            "final_norm": False,
        }


@dataclass(frozen=True, kw_only=True)
class RoFormer(Bert):
    """RoFormer: BERT with rotary positions, without a pooler. Small ones have narrower embeddings
    (transformers models/roformer/modeling_roformer.py `RoFormerModel`)."""

    embedding_size: Count | None = None
    max_position_embeddings: Count = 1536

    def fields(self) -> Fields:
        fields = super().fields() | {"pooler": False, "positions": "rope"}
        if self.embedding_size in (None, self.hidden_size):
            return fields
        return fields | {
            "narrow_embedding": NarrowEmbedding(
                width=self.embedding_size, all_tables=True, bias=True
            ),
            "embedding_norm": True,
            "final_norm": False,
        }


@dataclass(frozen=True, kw_only=True)
class NomicBert(WithoutPooler):
    """Nomic BERT: rotary positions and gated feed-forwards, no biases but those of norms and
    head."""

    hidden_act: str = "silu"
    hidden_dropout_prob: Share = 0.0
    head_dim: Count | None = None

    def fields(self) -> Fields:
        fields = super().fields()
        return fields | {
            "head_dim": self.head_dim or fields["head_dim"],
            "positions": "rope",
            "gated_ffn": True,
            "bias": False,
            "norm_bias": True,
        }


@dataclass(frozen=True, kw_only=True)
class Esm(Stack):
    """ESM-1b and ESM-2, on proteins: norms before each sub-layer and behind the last (transformers
    models/esm/modeling_esm.py `EsmEncoder`). The head that tells contacts is not counted."""

    intermediate_size: Count
    max_position_embeddings: Count = 1026
    position_embedding_type: str = "absolute"
    emb_layer_norm_before: bool = False
    hidden_dropout_prob: Share = 0.1

    def fields(self) -> Fields:
        is_rotary = self.position_embedding_type == "rotary"
        return self.sizes(self.intermediate_size, self.max_position_embeddings) | {
            "causal": False,
            "positions": "rope" if is_rotary else "learned",
            "embedding_norm": self.emb_layer_norm_before,
            "pooler_and_mlm_head": True,
            "pooler": False,
            "dropout": self.hidden_dropout_prob > 0,
        }


@dataclass(frozen=True, kw_only=True)
class ModernBert(Stack):
    """ModernBERT: rotary positions, gated feed-forwards without biases, a window in two of three
    layers."""

    intermediate_size: Count
    max_position_embeddings: Count = 8192
    hidden_activation: str = "gelu"
    global_attn_every_n_layers: Count = 3
    local_attention: Count = 128

    def fields(self) -> Fields:
        # The first layer of each period attends in full.
        period = ["*-"] + ["W-"] * (self.global_attn_every_n_layers - 1)
        return self.sizes(self.intermediate_size, self.max_position_embeddings) | {
            "activation": activation(self.hidden_activation),
            "gated_ffn": True,
            "norm": "layer_norm",
            "norm_bias": False,
            "positions": "rope",
            "bias": False,
            "causal": False,
            "window": self.local_attention,
            "mixers": mixer_words(period),
            "pooler_and_mlm_head": True,
            "pooler": False,
            "dropout": False,
        }


@dataclass(frozen=True, kw_only=True)
class ModernBertDecoder(ModernBert):
    """ModernBERT as a decoder (Ettin): tokens attend to those before them alone."""

    def fields(self) -> Fields:
        return super().fields() | {"causal": True}


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
            # Heads of T5 need not share the hidden size out (11B: 128 heads of 128 beside 1,024).
            "kv_heads": self.num_heads,
            "head_dim": self.d_kv,
            "ffn_hidden": self.d_ff,
            "vocab": self.vocab_size,
            "seq_len": self.n_positions,
            # T5 1.1 and later say `gated-gelu`, the first T5 plain `relu`.
            "gated_ffn": self.feed_forward_proj.startswith("gated"),
            "activation": activation(self.feed_forward_proj.removeprefix("gated-")),
            "norm": "rms_norm",
            "positions": "relative",
            "bias": False,
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": self.dropout_rate > 0,
        }


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """Pegasus, Blenderbot, Marian and their like: an encoder and a decoder with biases and layer
    norms. Positions are sines, which are not trained."""

    POSITIONS: ClassVar[str] = "none"

    d_model: Count
    encoder_layers: Layers
    decoder_layers: Layers
    encoder_attention_heads: Count
    encoder_ffn_dim: Count
    vocab_size: Count
    decoder_attention_heads: Count | None = None
    decoder_ffn_dim: Count | None = None
    max_position_embeddings: Count = 1024
    activation_function: str = "gelu"
    tie_word_embeddings: bool = True
    dropout: Share = 0.1

    def lengths(self) -> Fields:
        """Numbers of input tokens of encoder and decoder."""
        return {"seq_len": self.max_position_embeddings}

    def fields(self) -> Fields:
        heads, inner = self.encoder_attention_heads, self.encoder_ffn_dim
        # `Transformer` has one set of sizes for both stacks, as nearly all of these models do.
        if (self.decoder_attention_heads or heads, self.decoder_ffn_dim or inner) != (heads, inner):
            raise PerfModelError(
                "decoder_attention_heads and decoder_ffn_dim must equal those of the encoder"
            )
        # The length comes with `lengths`, which differs where the encoder is not given text.
        sizes = plain_sizes(self.encoder_layers, self.d_model, heads, inner, self.vocab_size, 1)
        return (
            sizes
            | {
                "decoder_layers": self.decoder_layers,
                "positions": self.POSITIONS,
                "activation": activation(self.activation_function),
                "tied_embeddings": self.tie_word_embeddings,
                "dropout": self.dropout > 0,
            }
            | self.lengths()
        )


@dataclass(frozen=True, kw_only=True)
class Bart(EncoderDecoder):
    """BART: tables of positions begin with two rows that no token has (transformers
    models/bart/modeling_bart.py `BartLearnedPositionalEmbedding`); embeddings are normalised, and
    layers end with their norms."""

    POSITIONS: ClassVar[str] = "learned"

    def fields(self) -> Fields:
        return super().fields() | {
            "position_offset": 2,
            "embedding_norm": True,
            "final_norm": False,
        }


@dataclass(frozen=True, kw_only=True)
class Whisper(EncoderDecoder):
    """Whisper: the encoder is given frames of sound, which two convolutions make of a spectrum.
    Keys have no bias. Positions are tables on both sides; the encoder's holds sines."""

    POSITIONS: ClassVar[str] = "learned"

    num_mel_bins: Count = 80

    max_source_positions: Count = 1500
    max_target_positions: Count = 448
    dropout: Share = 0.0

    def lengths(self) -> Fields:
        return {"seq_len": self.max_source_positions, "decoder_seq_len": self.max_target_positions}

    def fields(self) -> Fields:
        return super().fields() | {
            "spectrogram": Spectrogram(channels=self.num_mel_bins),
            "unbiased_projections": ("key",),
        }
