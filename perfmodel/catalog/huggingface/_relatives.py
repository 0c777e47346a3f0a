"""Hugging Face families that equal a known one, or differ from it in a few fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class Relative:
    """A family that is read as another one."""

    family: str
    """The known family (`FAMILIES`) whose reader takes its configuration."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of keys in this family -> their names in the known family."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values of keys that differ from the known family's."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Transformer` in which its layers differ."""
    left_out: str = ""
    """Parts of the model that are not counted, in a sentence."""


# Differences that several families share.
_UNGATED: Final = {"gated_ffn": False}
_QK_NORM: Final = {"qk_norm": True}
_QK_NORM_OF_ALL_HEADS: Final = {"qk_norm": True, "qk_norm_of_all_heads": True}
_NORMS_AT_OUTPUT: Final = {"norm_at": "output", "qk_norm": True}
_LAYER_NORM: Final = {"norm": "layer_norm", "norm_bias": True}
_EXAONE_KEYS: Final = {"num_layers": "num_hidden_layers", "activation_function": "hidden_act"}
_ONE_DENSE: Final = {"first_k_dense_replace": 1}
_LEARNED: Final = {"positions": "learned"}
_BLOCK_SPARSE: Final = (
    "attention is counted over all keys, of which block-sparse attention sees a part"
)
_FALCON_KEYS: Final = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
}
_INDEXER: Final = (
    "the indexer that selects keys for each query is left out; attention is counted over all keys"
)

_CROSS_LAYERS: Final = "layers that attend to images are counted as attending to the text"

_MINIMAX_M3: Final = Relative(
    family="llama_with_experts",
    aliases={
        "intermediate_size": "moe_intermediate_size",
        "dense_intermediate_size": "intermediate_size",
    },
    fields=_QK_NORM | {"clamped_glu": True},
    left_out=_INDEXER,
)

RELATIVES: Final[Mapping[str, Relative]] = {
    # --- LLaMA in all but name: what differs are scalars, or which layers rotate ---
    "arcee": Relative(family="llama", fields=_UNGATED, defaults={"hidden_act": "relu2"}),
    "aquila": Relative(family="llama"),
    "baichuan": Relative(family="llama"),
    "cosmos3_edge": Relative(family="llama", fields=_UNGATED, defaults={"hidden_act": "relu2"}),
    "cwm": Relative(family="llama"),
    "deepseek": Relative(family="qwen3_moe", fields={"qk_norm": False}),
    "deepseek_ocr2": Relative(family="qwen3_moe", fields={"qk_norm": False}),
    "emu3": Relative(family="llama"),
    "ernie4_5": Relative(family="llama", defaults={"tie_word_embeddings": True}),
    "exaone": Relative(family="llama", aliases=_EXAONE_KEYS),
    "glm_ocr": Relative(family="llama", fields={"norm_at": "both"}),
    "granite": Relative(family="llama"),
    "granite4_vision": Relative(family="llama"),
    "granite_docling": Relative(family="llama", defaults={"tie_word_embeddings": True}),
    "helium": Relative(family="llama", fields={"output_bias": False}),
    "hunyuan_v1_dense": Relative(family="llama", fields=_QK_NORM),
    "hunyuan_vl": Relative(family="llama", fields=_QK_NORM, defaults={"tie_word_embeddings": True}),
    "internlm": Relative(family="llama", aliases={"bias": "attention_bias"}),
    "internlm2": Relative(family="llama", aliases={"bias": "attention_bias"}),
    "internlm3": Relative(family="llama", aliases={"qkv_bias": "attention_bias"}),
    "iquestcoder": Relative(family="llama"),
    "minicpm": Relative(family="llama"),
    "ministral": Relative(family="llama"),
    "ministral3": Relative(family="llama"),
    "orion": Relative(family="llama", fields=_LAYER_NORM),
    "seed_oss": Relative(family="llama", fields={"output_bias": False}),
    "smollm3": Relative(family="llama"),
    "xverse": Relative(family="llama"),
    "yi": Relative(family="llama"),
    "bitnet": Relative(
        family="llama", defaults={"hidden_act": "relu2"}, fields={"sub_norms": True}
    ),
    "granite_swa": Relative(family="llama", fields={"attention_sinks": True}),
    "mimo": Relative(family="qwen2"),
    "molmo2": Relative(family="qwen3", left_out="embeddings of tokens for images are left out"),
    "muse_glimmer": Relative(
        family="llama",
        aliases={"hidden_activation": "hidden_act"},
        fields={"attention_gate": True, "norm_at": "both", "logit_softcap": True},
    ),
    "mllama": Relative(family="llama", left_out=_CROSS_LAYERS),
    "nanochat": Relative(
        family="llama",
        fields=_UNGATED | {"norm_parameters": False},
        defaults={"hidden_act": "relu2"},
    ),
    "eurobert": Relative(family="llama", fields={"causal": False}),
    "vaultgemma": Relative(family="gemma2", fields={"norm_at": "input"}),
    # --- other dense families ---
    # Cohere 2, whose layers all attend in full unless `layer_types` says otherwise.
    "cohere_compass": Relative(family="cohere2", defaults={"sliding_window_pattern": 1}),
    "apertus": Relative(
        family="llama", fields=_UNGATED | _QK_NORM, defaults={"hidden_act": "xielu"}
    ),
    "exaone4": Relative(family="llama", fields=_NORMS_AT_OUTPUT),
    "olmo": Relative(family="llama", fields={"norm": "layer_norm", "norm_parameters": False}),
    "olmo3": Relative(family="olmo2"),
    "jais2": Relative(
        family="starcoder2", defaults={"tie_word_embeddings": False, "hidden_act": "relu2"}
    ),
    "apertus1p5": Relative(
        family="llama", fields=_UNGATED | _QK_NORM, defaults={"hidden_act": "xielu"}
    ),
    "glm4v": Relative(family="glm4", fields={"qkv_bias": True}),
    "paddleocr_vl": Relative(family="llama", defaults={"tie_word_embeddings": True}),
    "qwen2_5_omni": Relative(family="qwen2"),
    "RefinedWeb": Relative(
        family="falcon", aliases=_FALCON_KEYS, defaults={"new_decoder_architecture": True}
    ),
    "RefinedWebModel": Relative(family="falcon", aliases=_FALCON_KEYS),
    "qwen2_vl": Relative(family="qwen2"),
    "qwen2_5_vl": Relative(family="qwen2"),
    "qwen3_vl": Relative(family="qwen3"),
    "biogpt": Relative(
        family="opt",
        aliases={
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
            "hidden_dropout_prob": "dropout",
        },
        defaults={"activation_function": "gelu", "max_position_embeddings": 1024},
    ),
    "gpt-sw3": Relative(family="gpt2"),
    "codegen": Relative(family="gptj"),
    "openai-gpt": Relative(
        family="gpt2", aliases={"afn": "activation_function"}, fields={"final_norm": False}
    ),
    "persimmon": Relative(
        family="gpt_neox",
        defaults={"use_parallel_residual": False, "hidden_act": "relu2"},
        fields=_QK_NORM,
    ),
    "xglm": Relative(
        family="opt",
        aliases={
            "d_model": "hidden_size",
            "num_layers": "num_hidden_layers",
            "attention_heads": "num_attention_heads",
        },
        defaults={"activation_function": "gelu"},
        # Sines, which are not trained.
        fields={"positions": "none", "position_offset": 0},
    ),
    "youtu": Relative(family="minicpm3", defaults={"tie_word_embeddings": True}),
    # Sines, which are not trained.
    "ctrl": Relative(family="gpt2", aliases={"dff": "n_inner"}, fields={"positions": "none"}),
    # --- experts on LLaMA's or Qwen's attention ---
    "aria": Relative(family="llama_with_experts"),
    "beam": Relative(
        family="llama_with_experts",
        defaults={"first_k_dense_replace": 3},
        fields=_QK_NORM | {"attention_gate": True, "norm_at": "both", "logit_softcap": True},
    ),
    "bailing_moe": Relative(
        family="llama_with_experts", aliases={"use_qkv_bias": "attention_bias"}
    ),
    "bailing_moe_v2": Relative(
        family="llama_with_experts", aliases={"use_qkv_bias": "attention_bias"}
    ),
    "dots1": Relative(family="llama_with_experts", fields=_QK_NORM),
    "ernie4_5_moe": Relative(family="llama_with_experts", defaults={"tie_word_embeddings": True}),
    "exaone_moe": Relative(family="llama_with_experts", fields=_QK_NORM),
    "afmoe": Relative(
        family="llama_with_experts", fields=_QK_NORM | {"attention_gate": True, "norm_at": "both"}
    ),
    "flex_olmo": Relative(
        family="llama_with_experts", fields=_QK_NORM_OF_ALL_HEADS | {"norm_at": "output"}
    ),
    "flint": Relative(family="llama_with_experts", fields=_QK_NORM | {"attention_sinks": True}),
    "granitemoe": Relative(family="llama_with_experts"),
    "granitemoe_swa": Relative(family="llama_with_experts", fields={"attention_sinks": True}),
    "granitemoeshared": Relative(family="llama_with_experts"),
    "glm4v_moe": Relative(family="glm4_moe"),
    "hunyuan_v1_moe": Relative(
        family="llama_with_experts", fields=_QK_NORM, defaults={"n_shared_experts": 1}
    ),
    "hy_v3": Relative(family="llama_with_experts", fields=_QK_NORM, defaults=_ONE_DENSE),
    "kolibri1": Relative(family="llama_with_experts", fields=_QK_NORM | {"norm_at": "both"}),
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_vl": _MINIMAX_M3,
    "mellum": Relative(family="llama_with_experts", fields=_QK_NORM),
    "mixtral": Relative(family="llama_with_experts"),
    "minimax_m2": Relative(family="llama_with_experts", fields=_QK_NORM_OF_ALL_HEADS),
    "olmoe": Relative(family="llama_with_experts", fields=_QK_NORM_OF_ALL_HEADS),
    "phimoe": Relative(family="llama_with_experts", fields=_LAYER_NORM),
    "qwen2_5_vl_moe": Relative(family="qwen2_moe"),
    "qwen3_omni_moe": Relative(family="qwen3_moe"),
    "qwen3_vl_moe": Relative(family="qwen3_moe"),
    "sarvam_moe": Relative(family="llama_with_experts", fields={"output_bias": False}),
    "unlimited_ocr": Relative(family="qwen3_moe", fields={"qk_norm": False}),
    "solar_open": Relative(family="llama_with_experts", fields={"output_bias": False}),
    # --- experts on latent attention ---
    "axk1": Relative(family="deepseek_v3", defaults=_ONE_DENSE),
    "deci": Relative(family="nemotron-nas"),
    "glm_moe_dsa": Relative(family="deepseek_v32", defaults={"index_n_heads": 32}),
    "glm4_moe_lite": Relative(family="deepseek_v3", defaults=_ONE_DENSE),
    "longcat_flash": Relative(family="longcat"),
    "kimi_k2": Relative(family="deepseek_v3"),
    "mistral4": Relative(family="deepseek_v3"),
    "sarvam_mla": Relative(family="deepseek_v3"),
    # --- hybrids ---
    "minimax_m1": Relative(family="minimax"),
    "minimax_text_01": Relative(family="minimax"),
    "qwen3_5_moe": Relative(family="qwen3_next"),
    # --- other heads in the window ---
    # Gemma 4 without embeddings of tokens in every layer and without experts.
    "gemma4_unified": Relative(
        family="gemma4",
        defaults={
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "max_position_embeddings": 262_144,
        },
    ),
    "mimo_v2": Relative(family="mimo_v2_flash"),
    "step3p7": Relative(family="step3p5"),
    # --- encoders with BERT's layers ---
    "big_bird": Relative(
        family="bert", defaults={"max_position_embeddings": 4096}, left_out=_BLOCK_SPARSE
    ),
    "camembert": Relative(family="roberta"),
    "data2vec-text": Relative(family="roberta"),
    "distilbert": Relative(
        family="bert",
        aliases={
            "dim": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "hidden_dim": "intermediate_size",
            "activation": "hidden_act",
        },
        fields={"token_types": 0, "pooler": False},
    ),
    "gte": Relative(
        family="nomic_bert", defaults={"hidden_act": "gelu"}, fields={"qkv_bias": True}
    ),
    "ibert": Relative(family="roberta"),
    "jina_embeddings_v3": Relative(family="roformer"),
    "megatron-bert": Relative(family="bert", fields={"pooler": False}),
    "mpnet": Relative(family="roberta", fields={"token_types": 0}),
    "roberta-prelayernorm": Relative(family="roberta", fields={"embedding_norm": True}),
    "xlm-roberta": Relative(family="roberta"),
    "xlm-roberta-xl": Relative(family="roberta"),
    # --- encoder-decoders with BART's layers ---
    "blenderbot": Relative(family="pegasus", fields=_LEARNED),
    "blenderbot-small": Relative(
        family="pegasus", fields=_LEARNED | {"embedding_norm": True, "final_norm": False}
    ),
    "m2m_100": Relative(family="pegasus"),
    "marian": Relative(family="pegasus", fields={"final_norm": False}),
    "mbart": Relative(family="bart", fields={"final_norm": True}),
    "mvp": Relative(family="bart"),
    "plbart": Relative(family="bart"),
    "umt5": Relative(family="t5"),
    "longt5": Relative(family="t5"),
}
"""Families by `model_type`. Each was compared with the parameters of Hugging Face's own class."""
