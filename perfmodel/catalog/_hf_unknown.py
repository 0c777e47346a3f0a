"""What is said of a Hugging Face family that is not known: the model as TOML, as far as its configuration tells."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from perfmodel.errors import UnknownNameError

KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim", "model_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads", "num_query_groups"),
    "head_dim": ("head_dim", "attention_head_dim", "kv_channels"),
    "ffn_hidden": ("intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "n_inner", "hidden_dim"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "seq_len": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length"),
}
"""Sizes of a transformer, and what configurations call them."""
ASK: Final = "?"
"""Stands in the TOML where the configuration does not tell a size."""


def unknown_model_type(family: str, known: Iterable[str], config: Mapping[str, Any]) -> UnknownNameError:
    """The error for a `model_type` that no reader knows; its note is the model as TOML, to complete."""
    remedy = "or describe the model in a TOML file, which is begun below, and give --model mine.toml"
    error = UnknownNameError("Hugging Face model_type", family, known, remedy=f"{remedy} (docs/howto/add_a_model.md)")
    error.add_note(toml_from_config(config))
    return error


def toml_from_config(config: Mapping[str, Any]) -> str:
    """A model as TOML, of the sizes that a configuration of an unknown family tells; a decoder like LLaMA."""
    lines = []
    for size, keys in KEYS.items():
        value = next((config[key] for key in keys if isinstance(config.get(key), int)), None)
        if value is not None:
            lines.append(f"{size} = {value}")
        elif size not in ("kv_heads", "head_dim"):  # these follow from the others
            lines.append(f"# {size} = {ASK}  # the configuration does not tell it")
    tied = config.get("tie_word_embeddings")
    activation = next((str(config[key]) for key in ("hidden_act", "activation_function") if config.get(key)), "silu")
    lines += [
        f"activation = {_activation(activation)}",
        "gated_ffn = true  # false where a feed-forward has two matrices instead of three",
        'norm = "rms_norm"',
        'positions = "rope"',
        "bias = false",
        "dropout = false",
        f"tied_embeddings = {'true' if tied else 'false'}",
    ]
    experts = next((key for key in config if "expert" in key and isinstance(config[key], int)), None)
    if experts is not None:
        lines.append(
            f"# it has experts ({experts} = {config[experts]}): add a table [experts] with count, topk, ffn_hidden"
        )
    return "\n".join(lines)


def _activation(name: str) -> str:
    known = next((word for word in ("gelu", "silu", "relu2", "relu") if word in name.lower()), "silu")
    return f'"{known}"'
