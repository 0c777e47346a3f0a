"""What Hugging Face configurations of all families share: kinds of values, and sizes that follow from others."""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le

from perfmodel.errors import PerfModelError

MOST = 10**9
Count = Annotated[int, Ge(1), Le(MOST)]
Layers = Annotated[int, Ge(1), Le(10**5)]
CountOrNone = Annotated[int, Ge(0), Le(MOST)]
"""0 for a part that is not there."""
Share = Annotated[float, Ge(0), Le(1)]
Fields = dict[str, Any]
"""Arguments of `perfmodel.spec.Transformer`."""


def plain_sizes(layers: int, hidden: int, heads: int, ffn: int | None, vocab: int, seq_len: int) -> Fields:
    """Sizes of a stack whose heads share the hidden size evenly; four times as wide inside unless `ffn` says."""
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "head_dim": per_head(hidden, heads),
        "ffn_hidden": ffn or 4 * hidden, "vocab": vocab, "seq_len": seq_len,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What most families call by the same names."""

    hidden_size: Count
    num_attention_heads: Count
    num_hidden_layers: Layers
    vocab_size: Count

    def sizes(self, ffn: int | None, seq_len: int) -> Fields:
        """As `plain_sizes`."""
        return plain_sizes(
            self.num_hidden_layers, self.hidden_size, self.num_attention_heads, ffn, self.vocab_size, seq_len
        )  # fmt: skip


def per_head(hidden: int, heads: int) -> int:
    """Elements of a head where heads share the hidden size evenly."""
    if hidden % heads:
        raise PerfModelError(f"hidden size {hidden} is not divisible by {heads} attention heads; give head_dim")
    return hidden // heads


def activation(name: str) -> str:
    """The catalog's word for an activation function."""
    if name in ("relu2", "squared_relu"):
        return "relu2"
    for known in ("gelu", "silu", "relu"):
        if known in name or (known == "silu" and name == "swish"):
            return known
    raise PerfModelError(f"activation {name!r} is not known; known: gelu, silu, relu, relu2")
