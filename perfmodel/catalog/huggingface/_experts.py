"""Hugging Face configurations of mixtures of experts.

One reader serves all families whose layers are LLaMA's attention and experts, whatever names each
gives to the numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

from annotated_types import Ge

from perfmodel.catalog.huggingface._layers import (
    ATTENTION_LETTERS,
    feed_forward_letters,
    letters_of,
    mixer_words,
    mixers_of,
)
from perfmodel.catalog.huggingface._llama import (
    Count,
    CountOrNone,
    Fields,
    LatentLlama,
    Layers,
    Llama,
    Share,
    plain_sizes,
)
from perfmodel.errors import PerfModelError
from perfmodel.spec.parts import Experts

EXPERT_KEYS: Final[Mapping[str, str]] = {
    # experts of a layer
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "moe_num_experts": "num_experts",
    # experts that a token goes to
    "num_experts_per_token": "num_experts_per_tok",
    "num_experts_per_topk": "num_experts_per_tok",
    "experts_per_token": "num_experts_per_tok",
    "moe_topk": "num_experts_per_tok",
    "moe_k": "num_experts_per_tok",
    "moe_top_k": "num_experts_per_tok",
    "top_k_experts": "num_experts_per_tok",
    # inner size of an expert
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    # experts that every token goes to
    "num_shared_experts": "n_shared_experts",
    "num_shared_expert": "n_shared_experts",
    "moe_num_shared_experts": "n_shared_experts",
    "shared_intermediate_size": "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
    # groups of experts
    "num_expert_group": "n_group",
    # leading layers without experts
    "moe_layer_start_index": "first_k_dense_replace",
    "num_dense_layers": "first_k_dense_replace",
    # every n-th layer has experts
    "interleave_moe_layer_step": "decoder_sparse_step",
    "moe_layer_interval": "decoder_sparse_step",
}
"""Names of the same number in different families, with the common name used here."""


@dataclass(frozen=True, kw_only=True)
class LlamaWithExperts(Llama):
    """LLaMA's attention with experts (Mixtral, Qwen3-MoE, OLMoE, GLM-4.5, dots.llm1, ERNIE 4.5,
    MiniMax-M2, ...)."""

    ALIASES: ClassVar[Mapping[str, str]] = EXPERT_KEYS

    intermediate_size: Count | None = None
    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count | None = None
    n_shared_experts: CountOrNone = 0
    shared_expert_intermediate_size: CountOrNone = 0
    first_k_dense_replace: CountOrNone = 0
    decoder_sparse_step: Count = 1
    n_group: CountOrNone = 1
    topk_group: CountOrNone = 1
    num_nextn_predict_layers: CountOrNone = 0
    use_qk_norm: bool = False

    @property
    def expert_inner(self) -> int:
        """Inner size of a routed expert: its own, or that of a dense layer if the family has only
        one size."""
        # Mixtral has no dense layers: its only inner size is that of an expert.
        inner = self.moe_intermediate_size or self.intermediate_size
        if inner is None:
            raise PerfModelError(
                "moe_intermediate_size: missing; it is the inner size of an expert"
            )
        return inner

    def experts(self) -> Experts:
        """Its routed and shared experts."""
        return Experts(
            count=self.num_experts,
            topk=self.num_experts_per_tok,
            ffn_hidden=self.expert_inner,
            # Families state the size of the shared expert (Qwen) or how many of
            # a routed one's size there are (DeepSeek).
            shared_ffn_hidden=self.shared_expert_intermediate_size
            or self.n_shared_experts * self.expert_inner,
            first_dense_layers=self.first_k_dense_replace,
            every=self.decoder_sparse_step,
            groups=self.n_group or 1,
            groups_kept=self.topk_group or 1,
        )

    def fields(self) -> Fields:
        return super().fields() | {
            "ffn_hidden": self.intermediate_size or self.expert_inner,
            "qk_norm": self.use_qk_norm,
            "mtp_layers": self.num_nextn_predict_layers,
            "experts": self.experts(),
        }


@dataclass(frozen=True, kw_only=True)
class GptOss(LlamaWithExperts):
    """GPT-OSS: every second layer attends in full, heads have sinks, inputs of activations are cut
    at a limit."""

    def experts(self) -> Experts:
        return replace(super().experts(), router_bias=True)

    def fields(self) -> Fields:
        return super().fields() | {
            # Every layer has biases, and heads have sinks, whatever the configuration says
            # (transformers models/gpt_oss/modeling_gpt_oss.py).
            "bias": True,
            "qkv_bias": False,
            "output_bias": False,
            "full_attention_every": 2,
            "attention_sinks": True,
            "clamped_glu": True,
        }


@dataclass(frozen=True, kw_only=True)
class Qwen2Moe(LlamaWithExperts):
    """Qwen2 with experts: a shared one behind a gate, biases in the projections of attention."""

    use_sliding_window: bool = False

    def experts(self) -> Experts:
        # A sigmoid of the token weighs what the shared expert adds.
        return replace(super().experts(), shared_gate=self.shared_expert_intermediate_size > 0)

    def fields(self) -> Fields:
        return super().fields() | {"qkv_bias": True}


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(LlamaWithExperts):
    """Qwen3 with experts: queries and keys are normalised."""

    use_sliding_window: bool = False
    use_qk_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class Glm4Moe(LlamaWithExperts):
    """GLM-4.5: biases in the projections of attention except the output."""

    BIASED_OUTPUT: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Llama4(LlamaWithExperts):
    """Llama 4: attention in chunks except in every fourth layer; a shared expert and routed experts
    in all layers or every second one. Its norm of queries and keys, which has no parameters, is
    left out."""

    intermediate_size: Count | None = 8192
    intermediate_size_mlp: Count = 16384
    num_experts: Count = 16
    num_experts_per_tok: Count = 1
    n_shared_experts: CountOrNone = 1
    attention_chunk_size: CountOrNone = 8192
    no_rope_layer_interval: Count = 4

    def fields(self) -> Fields:
        return super().fields() | {
            # `intermediate_size` is that of an expert; dense layers are wider.
            "ffn_hidden": self.intermediate_size_mlp,
            "window": self.attention_chunk_size,
            "chunked_window": True,
            "full_attention_every": self.no_rope_layer_interval,
            "qk_norm": False,
        }


@dataclass(frozen=True, kw_only=True)
class Cohere2Moe(LlamaWithExperts):
    """Command A with experts: attention and experts read the same norm and run in parallel. The
    dense layers that come first have another attention pattern (transformers
    models/cohere2_moe/configuration_cohere2_moe.py)."""

    READS_LAYER_TYPES: ClassVar[bool] = True

    max_position_embeddings: Count = 8192
    tie_word_embeddings: bool = True
    sliding_window: CountOrNone = 4096
    sliding_window_pattern: Count = 4
    prefix_dense_sliding_window_pattern: Count = 1
    prefix_dense_intermediate_size: Count | None = None
    rms_norm_eps: Annotated[float, Ge(0)] | None = None
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None

    def attention(self) -> list[str]:
        """The kind of attention of each layer, as its letter in `MIXERS`."""
        if self.layer_types is not None:
            return letters_of(
                self.layer_types, ATTENTION_LETTERS, "layer_types", self.num_hidden_layers
            )
        letters = []
        for layer in range(self.num_hidden_layers):
            number = layer + 1
            pattern = self.prefix_dense_sliding_window_pattern
            if layer >= self.first_k_dense_replace:
                number = number - self.first_k_dense_replace
                pattern = self.sliding_window_pattern
            letters.append("*" if number % pattern == 0 else "W")
        return letters

    def fields(self) -> Fields:
        behind = feed_forward_letters(
            self.mlp_layer_types, self.num_hidden_layers, self.first_k_dense_replace
        )
        return super().fields() | {
            "ffn_hidden": self.prefix_dense_intermediate_size or self.expert_inner,
            "norm": "layer_norm" if self.rms_norm_eps is None else "rms_norm",
            "parallel_blocks": "one_norm",
            "mixers": mixers_of(self.attention(), behind),
        }


@dataclass(frozen=True, kw_only=True)
class DbrxAttention:
    """`attn_config` of DBRX."""

    kv_n_heads: Count = 1


@dataclass(frozen=True, kw_only=True)
class DbrxExperts:
    """`ffn_config` of DBRX."""

    ffn_hidden_size: Count = 3584
    moe_num_experts: Count = 4
    moe_top_k: Count = 1


@dataclass(frozen=True, kw_only=True)
class Dbrx:
    """DBRX: experts in every layer, layer norms without shifts."""

    d_model: Count = 2048
    n_heads: Count = 16
    n_layers: Layers = 24
    vocab_size: Count = 32000
    max_seq_len: Count = 2048
    attn_config: DbrxAttention = DbrxAttention()
    ffn_config: DbrxExperts = DbrxExperts()
    tie_word_embeddings: bool = False
    resid_pdrop: Share = 0.0

    def fields(self) -> Fields:
        # Each expert has a gate, and no layer is dense.
        inner = self.ffn_config.ffn_hidden_size
        sizes = plain_sizes(
            self.n_layers, self.d_model, self.n_heads, inner, self.vocab_size, self.max_seq_len
        )
        return sizes | {
            "kv_heads": self.attn_config.kv_n_heads,
            "activation": "silu",
            "gated_ffn": True,
            "positions": "rope",
            "bias": False,
            "tied_embeddings": self.tie_word_embeddings,
            "dropout": self.resid_pdrop > 0,
            "experts": Experts(
                count=self.ffn_config.moe_num_experts,
                topk=self.ffn_config.moe_top_k,
                ffn_hidden=inner,
            ),
        }


@dataclass(frozen=True, kw_only=True)
class Arctic(LlamaWithExperts):
    """Snowflake Arctic: beside the experts of a layer runs a dense feed-forward as wide inside as
    the hidden size (`ArcticMLP(is_residual_mlp=True)` of its own modeling_arctic.py), which is a
    shared expert."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        **LlamaWithExperts.ALIASES,
        "moe_layer_frequency": "decoder_sparse_step",
    }

    parallel_attn_mlp_res: bool = True

    def experts(self) -> Experts:
        if not self.parallel_attn_mlp_res:
            return super().experts()
        return replace(super().experts(), shared_ffn_hidden=self.hidden_size)


@dataclass(frozen=True, kw_only=True)
class LongcatFlash(LatentLlama):
    """LongCat-Flash (arXiv 2509.01322, section 2): a layer has two latent attentions, two dense
    feed-forwards, and experts that run beside the first of these. The router also chooses experts
    that do nothing."""

    ALIASES: ClassVar[Mapping[str, str]] = {"ffn_hidden_size": "intermediate_size"}

    num_hidden_layers: CountOrNone = 0
    """Counts each layer for both of its attentions where `num_layers` stands beside it
    (transformers models/longcat_flash/configuration_longcat_flash.py)."""
    num_layers: CountOrNone = 0
    n_routed_experts: Count
    moe_topk: Count
    expert_ffn_hidden_size: Count
    zero_expert_num: CountOrNone = 0

    def fields(self) -> Fields:
        # Routers are trained to choose each expert equally often, those that do nothing too.
        share_of_real_experts = self.n_routed_experts / (
            self.n_routed_experts + self.zero_expert_num
        )
        experts = Experts(
            count=self.n_routed_experts,
            topk=max(1, round(self.moe_topk * share_of_real_experts)),
            ffn_hidden=self.expert_ffn_hidden_size,
            idle=self.zero_expert_num,
        )
        layers = self.num_layers or self.num_hidden_layers
        return super().fields() | {
            "layers": layers,
            "experts": experts,
            "mixers": mixer_words(["*-E*-"]),
            "shortcut_experts": True,
        }
