"""What Hugging Face configurations of all families share: kinds of values, and sizes that follow from others; and those
of LLaMA and what follows its shape: Mistral, Qwen, Mixtral, GPT-OSS, DeepSeek."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import Ge, Le

from perfmodel.errors import PerfModelError
from perfmodel.spec import Experts, LatentAttention

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


@dataclass(frozen=True, kw_only=True)
class Llama(Stack):
    """LLaMA, Mistral: RMS norm, rotary positions, gated feed-forward, no biases."""

    intermediate_size: Count
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    max_position_embeddings: Count = 2048
    hidden_act: str = "silu"
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: CountOrNone = 0
    use_sliding_window: bool = True

    def fields(self) -> Fields:
        return {
            "layers": self.num_hidden_layers,
            "hidden": self.hidden_size,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads or self.num_attention_heads,
            "head_dim": self.head_dim or per_head(self.hidden_size, self.num_attention_heads),
            "ffn_hidden": self.intermediate_size,
            "vocab": self.vocab_size,
            "seq_len": self.max_position_embeddings,
            "activation": activation(self.hidden_act),
            "gated_ffn": True,
            "norm": "rms_norm",
            "positions": "rope",
            "bias": False,
            "qkv_bias": self.attention_bias,
            "dropout": False,
            "tied_embeddings": self.tie_word_embeddings,
            "window": self.sliding_window if self.use_sliding_window else 0,
        }


@dataclass(frozen=True, kw_only=True)
class Qwen2(Llama):
    """Qwen2: biases in the projections of attention."""

    use_sliding_window: bool = False

    def fields(self) -> Fields:
        return super().fields() | {"qkv_bias": True}


@dataclass(frozen=True, kw_only=True)
class Qwen3(Llama):
    """Qwen3: queries and keys are normalised."""

    use_sliding_window: bool = False

    def fields(self) -> Fields:
        return super().fields() | {"qk_norm": True}


@dataclass(frozen=True, kw_only=True)
class Mixtral(Llama):
    """Mixtral."""

    num_local_experts: Count
    num_experts_per_tok: Count

    def fields(self) -> Fields:
        return super().fields() | {
            "experts": Experts(
                count=self.num_local_experts, topk=self.num_experts_per_tok, ffn_hidden=self.intermediate_size
            )
        }


@dataclass(frozen=True, kw_only=True)
class GptOss(Mixtral):
    """GPT-OSS: every second layer attends in full, heads have sinks, inputs of activations are cut at a limit."""

    def fields(self) -> Fields:
        found = super().fields()
        own = {"bias": True, "full_attention_every": 2, "attention_sinks": True, "clamped_glu": True}
        return found | own | {"experts": replace(found["experts"], router_bias=True)}


@dataclass(frozen=True, kw_only=True)
class Qwen2Moe(Qwen2):
    """Qwen2 with experts."""

    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    shared_expert_intermediate_size: CountOrNone = 0
    decoder_sparse_step: Count = 1

    def fields(self) -> Fields:
        return super().fields() | {
            "experts": Experts(
                count=self.num_experts, topk=self.num_experts_per_tok, ffn_hidden=self.moe_intermediate_size,
                shared_ffn_hidden=self.shared_expert_intermediate_size, every=self.decoder_sparse_step,
                shared_gate=self.shared_expert_intermediate_size > 0,
            )
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(Qwen3):
    """Qwen3 with experts."""

    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    decoder_sparse_step: Count = 1

    def fields(self) -> Fields:
        return super().fields() | {
            "experts": Experts(
                count=self.num_experts,
                topk=self.num_experts_per_tok,
                ffn_hidden=self.moe_intermediate_size,
                every=self.decoder_sparse_step,
            )
        }


def routed_experts(config: Any) -> Experts:
    """Experts of a configuration that calls them as DeepSeek's do."""
    return Experts(
        count=config.n_routed_experts, topk=config.num_experts_per_tok, ffn_hidden=config.moe_intermediate_size,
        shared_ffn_hidden=config.moe_intermediate_size * config.n_shared_experts,
        first_dense_layers=config.first_k_dense_replace, groups=config.n_group or 1,
        groups_kept=config.topk_group or 1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DeepSeek(Llama):
    """DeepSeek-V2 and V3: multi-head latent attention and mixture of experts."""

    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    moe_intermediate_size: Count
    n_routed_experts: Count
    num_experts_per_tok: Count
    q_lora_rank: CountOrNone = 0
    n_shared_experts: CountOrNone = 0
    first_k_dense_replace: CountOrNone = 0
    n_group: CountOrNone = 1
    topk_group: CountOrNone = 1
    num_nextn_predict_layers: CountOrNone = 0

    def fields(self) -> Fields:
        latent = LatentAttention(
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        own = {"kv_heads": self.num_attention_heads, "head_dim": self.v_head_dim}
        return super().fields() | own | {
            "latent_attention": latent, "experts": routed_experts(self), "mtp_layers": self.num_nextn_predict_layers,
        }  # fmt: skip
