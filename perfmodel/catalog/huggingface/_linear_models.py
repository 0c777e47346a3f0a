"""Hugging Face configurations of models whose layers all have linear attention: xLSTM, and those of
flash-linear-attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt, Le

from perfmodel.catalog.huggingface._layers import mixer_words
from perfmodel.catalog.huggingface._llama import (
    Count,
    CountOrNone,
    Fields,
    Layers,
    activation,
    per_head,
    plain_sizes,
)
from perfmodel.catalog.huggingface._unknown import CannotDescribeError
from perfmodel.spec.parts import DeltaNet

Ratio = Annotated[float, Gt(0), Le(1000)]


def _stack(layers: int, hidden: int, ffn: int, vocab: int, seq_len: int, net: DeltaNet) -> Fields:
    """Fields of layers of linear attention and a gated feed-forward."""
    # There is no attention; what stands for its heads only has to be shared out.
    sizes = plain_sizes(layers, hidden, net.heads, ffn, vocab, seq_len, head_dim=net.head_dim)
    return sizes | {
        "gated_ffn": True,
        "activation": "silu",
        "norm": "rms_norm",
        "positions": "none",
        "bias": False,
        "dropout": False,
        "mixers": mixer_words(["L-"]),
        "delta_net": net,
    }


def _rounded_up(size: float, multiple: int) -> int:
    """The next multiple of a number."""
    return -(-int(size) // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class XLstm:
    """xLSTM of mLSTM blocks alone, such as that of 7 B parameters (transformers
    models/xlstm/modeling_xlstm.py, which always has the norm behind the last layer). Sequences are
    of 8,192 tokens (arXiv 2503.13427)."""

    hidden_size: Count = 4096
    num_hidden_layers: Layers = 32
    num_heads: Count = 8
    vocab_size: Count = 50_304
    qk_dim_factor: Ratio = 0.5
    v_dim_factor: Ratio = 1.0
    ffn_proj_factor: Ratio = 2.667
    ffn_round_up_to_multiple_of: Count = 64
    chunk_size: Count = 64
    use_bias: bool = False
    tie_word_embeddings: bool = False

    def fields(self) -> Fields:
        if self.use_bias:
            raise CannotDescribeError("use_bias=true gives its mixers biases")
        hidden = self.hidden_size
        net = DeltaNet(
            heads=self.num_heads,
            key_heads=self.num_heads,
            head_dim=per_head(int(hidden * self.v_dim_factor), self.num_heads),
            key_dim=per_head(int(hidden * self.qk_dim_factor), self.num_heads),
            conv_kernel=0,
            chunk=self.chunk_size,
            delta_rule=False,
            input_gates=True,
            norm_of_all_heads=True,
        )
        inner = _rounded_up(hidden * self.ffn_proj_factor, self.ffn_round_up_to_multiple_of)
        stack = _stack(self.num_hidden_layers, hidden, inner, self.vocab_size, 8192, net)
        return stack | {
            "logit_softcap": True,
            "tied_embeddings": self.tie_word_embeddings,
        }


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetKeys:
    """Keys that models of flash-linear-attention have in common."""

    hidden_size: Count = 2048
    num_hidden_layers: Layers = 24
    vocab_size: Count = 32_000
    max_position_embeddings: Count = 2048
    hidden_ratio: Ratio = 4
    intermediate_size: Count | None = None
    hidden_act: str = "swish"
    conv_size: Count = 4
    attn: Mapping[str, Any] | None = None
    attnres_block_size: CountOrNone = 0
    tie_word_embeddings: bool = False

    def stack(self, net: DeltaNet) -> Fields:
        """Fields of the model with this linear attention in all layers."""
        if self.attn:
            raise CannotDescribeError("attn puts attention in place of some of its layers")
        if self.attnres_block_size:
            raise CannotDescribeError("attnres_block_size adds attention over layers")
        # fla/modules/mlp.py: two thirds of the ratio, because there are three matrices.
        inner = self.intermediate_size or _rounded_up(
            int(self.hidden_size * self.hidden_ratio * 2 / 3), 256
        )
        stack = _stack(
            self.num_hidden_layers,
            self.hidden_size,
            inner,
            self.vocab_size,
            self.max_position_embeddings,
            net,
        )
        return stack | {
            "activation": activation(self.hidden_act),
            "tied_embeddings": self.tie_word_embeddings,
        }


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(GatedDeltaNetKeys):
    """Gated DeltaNet (fla/models/gated_deltanet/configuration_gated_deltanet.py and
    fla/layers/gated_deltanet.py)."""

    num_hidden_layers: Layers = 21
    expand_v: Ratio = 2.0
    head_dim: Count = 256
    num_heads: Count = 6
    num_v_heads: Count | None = None
    use_gate: bool = True
    use_short_conv: bool = True

    def fields(self) -> Fields:
        if not self.use_gate:
            raise CannotDescribeError("use_gate=false leaves out the output gate")
        net = DeltaNet(
            heads=self.num_v_heads or self.num_heads,
            key_heads=self.num_heads,
            head_dim=max(1, int(self.head_dim * self.expand_v)),
            key_dim=self.head_dim,
            conv_kernel=self.conv_size if self.use_short_conv else 0,
        )
        return self.stack(net)


@dataclass(frozen=True, kw_only=True)
class RetNet(GatedDeltaNetKeys):
    """RetNet (arXiv 2307.08621; fla/models/retnet/modeling_retnet.py, whose layers have no
    convolutions whatever the configuration says, and fla/layers/multiscale_retention.py)."""

    expand_k: Ratio = 1.0
    expand_v: Ratio = 2.0
    hidden_ratio: Ratio = 2
    num_heads: Count = 8
    num_kv_heads: Count | None = None
    use_output_gate: bool = True

    def fields(self) -> Fields:
        if self.num_kv_heads not in (None, self.num_heads):
            raise CannotDescribeError("num_kv_heads shares keys among its heads of queries")
        if not self.use_output_gate:
            raise CannotDescribeError("use_output_gate=false leaves out the output gate")
        net = DeltaNet(
            heads=self.num_heads,
            key_heads=self.num_heads,
            head_dim=per_head(round(self.hidden_size * self.expand_v), self.num_heads),
            key_dim=per_head(round(self.hidden_size * self.expand_k), self.num_heads),
            conv_kernel=0,
            delta_rule=False,
            fixed_decays=True,
        )
        return self.stack(net)
