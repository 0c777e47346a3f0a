"""The error for an unknown Hugging Face family, with a partly filled TOML of the model."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from perfmodel.catalog.huggingface._experts import EXPERT_KEYS
from perfmodel.errors import PerfModelError, UnknownNameError

KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "depth",
        "encoder_layers",
        "decoder_layers",
    ),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    "kv_heads": (
        "num_key_value_heads",
        "n_kv_heads",
        "num_kv_heads",
        "kv_n_heads",
        "num_query_groups",
    ),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "ffn_hidden": (
        "intermediate_size",
        "ffn_dim",
        "ffn_hidden_size",
        "d_ff",
        "n_inner",
        "hidden_dim",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
    ),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "seq_len": (
        "max_position_embeddings",
        "n_positions",
        "block_size",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
    ),
}
"""Sizes of a transformer, with the keys of configurations that hold them."""


def _all_keys(size: str) -> tuple[str, ...]:
    """Keys of configurations for a size of experts: its common name, and the names in different
    families."""
    return (size, *(key for key, known in EXPERT_KEYS.items() if known == size))


EXPERTS: Final[Mapping[str, tuple[str, ...]]] = {
    "count": _all_keys("num_experts"),
    "topk": _all_keys("num_experts_per_tok"),
    "ffn_hidden": (*_all_keys("moe_intermediate_size"), "intermediate_size"),
    "shared_ffn_hidden": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "first_dense_layers": _all_keys("first_k_dense_replace"),
}
"""Sizes of experts, with the keys of configurations that hold them."""
LATENT: Final[Mapping[str, tuple[str, ...]]] = {
    "kv_lora_rank": ("kv_lora_rank",),
    "q_lora_rank": ("q_lora_rank",),
    "qk_nope_head_dim": ("qk_nope_head_dim",),
    "qk_rope_head_dim": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
"""Sizes of multi-head latent attention, which have the same names in all configurations."""
OPTIONAL: Final = ("shared_ffn_hidden", "first_dense_layers")
"""Sizes that are absent from the model if a configuration leaves them out."""
_HEAD_GATES: Final = "each of its attention heads has a gate"
_STREAMS: Final = "it has several residual streams, which every layer mixes"
_INKLING: Final = (
    "it applies convolutions to queries, keys and sub-layers, and projects positions separately"
)
_XLM: Final = "it has the attention and feed-forward of XLM, and embeddings of languages"
_BLOCK_TABLES: Final = "it adds embeddings of positions on the page"
_LOCAL_PROJECTIONS: Final = "its global tokens have separate projections"
_SOUND: Final = (
    "it has an audio model and a language model, and its configuration does not say which is which"
)
_TWO_MODELS: Final = "it names two models; give the configuration of one of them"
_SPARSE_T5: Final = "its encoder and decoder have experts in some of their layers"


class CannotDescribeError(PerfModelError):
    """A configuration of a known family has a feature that `Transformer` lacks; the message names
    it."""


REASONS: Final[Mapping[str, str]] = {
    # --- decoders ---
    "axk2": "its norms have low-rank gates, and its latent attention has a gate",
    "blt": "byte-level models precede and follow its layers",
    "cpmant": "its scores have a learned bias for pairs of segments",
    "diffllama": "its attention is the difference of two attentions",
    "doge": "it learns its attention mask, and weights its residuals",
    "dory": "it has no norms: scales of its projections and residuals are trained instead",
    "dots3_note": _HEAD_GATES,
    "gemma4_assistant": "the heads of its full attention and of its windowed attention differ in size",
    "gemma4_unified_assistant": "the heads of its full attention and of its windowed attention differ in size",
    "gpt_neox_japanese": "only its last layer has a bias after attention",
    "hrm": "its layers run several times, in two loops",
    "inkling": _INKLING,
    "inkling2": _INKLING,
    "inkling2_loop": _INKLING,
    "jetmoe": "its attention projections are experts",
    "moshi": "a second model predicts several audio streams",
    "phi4_multimodal": "it has adapters for images and for speech in every layer",
    "qwen4_exp": _STREAMS,
    "recurrent_gemma": "its recurrent blocks are not supported",
    "xlnet": "it projects positions separately, and has two streams of attention",
    "zaya": "convolutions mix its queries and keys, and its router is a neural network",
    # --- encoders ---
    "bert-generation": "it has BERT's layers without the pooler, and its head adds only a bias",
    "convbert": "convolutions replace half of its attention heads",
    "esmc": "its norms and projections are those of ESM C, which differ from ESM-2's",
    "flaubert": _XLM,
    "fnet": "its layers mix tokens by Fourier transforms",
    "funnel": "its stack shortens the sequence between its blocks",
    "layoutlm": _BLOCK_TABLES,
    "longformer": _LOCAL_PROJECTIONS,
    "led": _LOCAL_PROJECTIONS,
    "luke": "entities have separate embeddings and projections",
    "mobilebert": "its layers are narrower than its residual stream, and have several feed-forwards each",
    "mra": "its attention is an approximation that sees a part of the keys",
    "nystromformer": "its attention is an approximation that sees a part of the keys",
    "perceiver": "its layers attend from a fixed number of latent vectors",
    "reformer": "its layers are reversible, and attention sees hashed neighbours",
    "rembert": "its output head is wider than its token embedding",
    "roc_bert": "it adds embeddings of the shapes and sounds of characters",
    "squeezebert": "its projections are grouped convolutions",
    "tapas": "it adds embeddings of rows, columns and ranks",
    "ultrabert": "its head is divided into two products of low rank",
    "xlm": _XLM,
    "xmod": "every layer has an adapter for each language",
    "yoso": "its attention is an approximation that sees a part of the keys",
    # --- encoders and decoders ---
    "bigbird_pegasus": "its encoder attends to blocks, and places norms and biases differently from Pegasus",
    "encoder-decoder": _TWO_MODELS,
    "speech-encoder-decoder": _TWO_MODELS,
    "vision-encoder-decoder": _TWO_MODELS,
    "vision-text-dual-encoder": _TWO_MODELS,
    "fsmt": "its two vocabularies have separate embeddings",
    "nllb-moe": _SPARSE_T5,
    "pegasus_x": "its encoder attends to blocks and to global tokens",
    "prophetnet": "it predicts several tokens at once, by streams of attention",
    "seamless_m4t": _SOUND,
    "seamless_m4t_v2": _SOUND,
    "switch_transformers": _SPARSE_T5,
    "t5gemma": "its encoder and decoder are two stacks of Gemma of different sizes",
    "t5gemma2": "its encoder and decoder are two stacks of Gemma of different sizes",
    "trocr": "it is a decoder that attends to an image's encoder of another width",
    # --- models of several parts whose language model is not described by itself ---
    "fuyu": "patches of images enter its language model without an encoder",
    "git": "it is a decoder over an image's encoder, with BERT's layers",
    "musicgen": _SOUND,
    "musicgen_melody": _SOUND,
}
"""Families that `Transformer` cannot describe exactly, and the features that it lacks."""
_ALSO: Final = {
    "hrm_text": "hrm",
}
"""Families that need the same missing features as another one."""
ASK: Final = "?"
"""Placeholder in the TOML for a size that the configuration does not state."""


def unknown_model_type(
    family: str, known: Iterable[str], config: Mapping[str, Any]
) -> PerfModelError:
    """The error for an unknown `model_type`; its note is a TOML of the model to complete."""
    family_name = family.removesuffix("_text")
    reason = REASONS.get(family_name, REASONS.get(_ALSO.get(family_name, ""), ""))
    if reason:
        return cannot_describe(family, reason, config)
    remedy = "or complete the TOML below, save it and give --model mine.toml"
    error = UnknownNameError(
        "Hugging Face model_type", family, known, remedy=f"{remedy} (docs/howto/add_a_model.md)"
    )
    error.add_note(toml_from_config(config))
    return error


def cannot_describe(family: str, reason: str, config: Mapping[str, Any]) -> PerfModelError:
    """The error for a model that `Transformer` lacks a feature of; its note is a TOML of a near one
    to complete."""
    error = PerfModelError(
        f"Hugging Face model_type {family!r} cannot be described exactly: {reason}; for a model near to it, complete "
        "the TOML below, save it and give --model mine.toml (docs/howto/add_a_model.md)"
    )
    error.add_note(toml_from_config(config))
    return error


def with_toml(error: PerfModelError, config: Mapping[str, Any]) -> PerfModelError:
    """The error of a configuration that cannot be read, with a TOML of the model to complete where
    the configuration states any of its sizes."""
    part = _part_with_sizes(config)
    if not part:
        return PerfModelError(
            f"{error}; no size of a model is stated either, so it may be the configuration of something else"
        )
    with_remedy = PerfModelError(
        f"{error}; or complete the TOML below, save it and give --model mine.toml (docs/howto/add_a_model.md)"
    )
    with_remedy.add_note(toml_from_config(config))
    return with_remedy


def _first_size(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    """The first of some keys that holds a size."""
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


_PARTS: Final = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "decoder",
    "architecture",
    "model",
)
"""Keys that may hold the sizes of a language model, where they do not stand at the top."""
_TELLING: Final = ("layers", "hidden", "heads")
"""Sizes that only the configuration of a transformer states."""


def _part_with_sizes(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration, or the part of it, that states sizes of a transformer; empty if none
    does."""
    candidates = [config, *(config.get(key) for key in _PARTS)]
    for part in candidates:
        if isinstance(part, dict):
            stated = [_first_size(part, KEYS[size]) for size in _TELLING]
            if sum(size is not None for size in stated) > 1:
                return part
    return {}


def toml_from_config(config: Mapping[str, Any]) -> str:
    """A TOML with the sizes stated by an unknown family's configuration, assuming a decoder like
    LLaMA."""
    # Values that the configuration states are filled in, the others are comments to complete:
    # instead of a bare refusal the user gets a file that is nearly done.
    config = _part_with_sizes(config) or config
    lines = []
    for size, keys in KEYS.items():
        value = _first_size(config, keys)
        if value is not None:
            lines.append(f"{size} = {value}")
        elif size not in ("kv_heads", "head_dim"):  # these follow from the others
            lines.append(f"# {size} = {ASK}  # the configuration does not tell it")
    # Values without a key are those of LLaMA, which most of today's families follow; comments say
    # what to check.
    tied = config.get("tie_word_embeddings")
    activation = next(
        (str(config[key]) for key in ("hidden_act", "activation_function") if config.get(key)),
        "silu",
    )
    lines += [
        f"activation = {_activation(activation)}",
        "gated_ffn = true  # false where a feed-forward has two matrices instead of three",
        'norm = "rms_norm"',
        'positions = "rope"',
        "bias = false",
        "dropout = false",
        f"tied_embeddings = {'true' if tied else 'false'}",
    ]
    window = _first_size(config, ("sliding_window",))
    if window is not None and config.get("use_sliding_window") is not False:
        lines.append(
            f"window = {window}  # of every layer, unless full_attention_every says that every n-th has none"
        )
    return "\n".join(
        [*lines, *_table("experts", EXPERTS, config), *_table("latent_attention", LATENT, config)]
    )


def _table(name: str, keys: Mapping[str, tuple[str, ...]], config: Mapping[str, Any]) -> list[str]:
    """A table of the TOML; empty if the configuration does not state the first of its sizes."""
    sizes = {}
    for size, names in keys.items():
        sizes[size] = _first_size(config, names)
    # Without the first size (experts, the rank of keys) the model has no such part.
    if sizes[next(iter(keys))] is None:
        return []
    # Queries that are not compressed have no rank.
    if sizes.get("q_lora_rank", 0) is None:
        sizes["q_lora_rank"] = 0
    lines = ["", f"[{name}]"]
    # Sizes that the configuration does not tell are comments to complete; those that may be none
    # are left out.
    for size, value in sizes.items():
        if value is not None:
            lines.append(f"{size} = {value}")
        elif size not in OPTIONAL:
            lines.append(f"# {size} = {ASK}  # the configuration does not tell it")
    return lines


def _activation(name: str) -> str:
    known = next(
        (word for word in ("gelu", "silu", "relu2", "relu") if word in name.lower()), "silu"
    )
    return f'"{known}"'
