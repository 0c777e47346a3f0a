"""Converts between models and fields of launch files, and looks models up in the catalog by name or
shape."""

from dataclasses import fields, replace
from functools import lru_cache
from typing import Final

from perfmodel import catalog
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch._entries import Entries
from perfmodel.ingest.launch._table import Fields
from perfmodel.spec import Model, Transformer
from perfmodel.spec.parts import DeltaNet, Experts, LatentAttention, Mamba

LATENT_DEFAULTS: Final = {
    "q_lora_rank": 0,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Sizes of latent attention if a file does not state them (Megatron-Core
`MLATransformerConfig`)."""
LLAMA_LAYERS: Final[Fields] = {
    "model.norm": "rms_norm",
    "model.positions": "rope",
    "model.gated_ffn": True,
    "model.activation": "silu",
    "model.bias": False,
    "model.dropout": False,
}
"""Layers of LLaMA, which many frameworks build unless told otherwise."""
PARTS_OF_MODEL: Final = ("model.", "experts.", "latent.", "mamba.", "delta.")
"""Prefixes of fields that describe the model."""


def model_of(known: Fields, place: str, name: str) -> Model | None:
    """The model stated by `model.*` fields, or the catalog's model of the same shape; None if the
    fields state none.

    Raises:
        LaunchFileError: sizes that contradict one another.
    """
    named = known.get("model")
    if named:
        return catalog_model(named)
    sizes = _of(known, "model.")
    needed = ("layers", "hidden", "heads", "vocab")
    if not all(field in sizes for field in needed):
        return None
    # Megatron-Core's defaults where arguments leave them out: as many key/value heads as heads,
    # heads that divide the hidden size, feed-forwards four times as wide
    # (megatron/training/arguments.py `validate_args`).
    sizes.setdefault("kv_heads", sizes["heads"])
    sizes.setdefault("head_dim", max(1, sizes["hidden"] // sizes["heads"]))
    sizes.setdefault("ffn_hidden", 4 * sizes["hidden"])
    sizes["seq_len"] = known.get("seq_len") or sizes.get("seq_len") or 2048
    try:
        experts = _of(known, "experts.")
        latent = _of(known, "latent.")
        if experts.get("count", 1) > 1:
            sizes["experts"] = Experts(**({"ffn_hidden": sizes["ffn_hidden"], "topk": 1} | experts))
        if latent.get("kv_lora_rank"):
            sizes["latent_attention"] = LatentAttention(**(LATENT_DEFAULTS | latent))
            # Latent attention expands its compressed keys and values to every head: no groups share
            # them.
            sizes |= {"kv_heads": sizes["heads"], "head_dim": sizes["latent_attention"].v_head_dim}
        mamba = _of(known, "mamba.")
        delta_net = _of(known, "delta.")
        if mamba:
            sizes["mamba"] = Mamba(**mamba)
        if delta_net:
            sizes["delta_net"] = DeltaNet(**delta_net)
        model = Transformer(name=name, source=f"launch file {place}", **sizes)
    except PerfModelError as error:
        raise LaunchFileError(f"{place}: {error}") from None
    except TypeError:
        raise LaunchFileError(
            f"{place}: the file does not state all sizes of the model; give --model"
        ) from None
    # The catalog's entry knows more (its name, longest sequence, source), and published runs are
    # found by its name.
    return _from_catalog(model) or model


def gated_width(hidden: int) -> int:
    """Width of LLaMA's gated feed-forward if nothing states it: two thirds of four times the hidden
    size, rounded up to a multiple of 256."""
    return -(-(8 * hidden // 3) // 256) * 256


_WITH_WIDTH_OF_HEADS: Final = ("qwen3", "gemma", "mistral-nemo", "gpt-oss", "nemotron-h")
"""Families whose configurations in NeMo 2 and Megatron-Bridge state the width of heads."""


def changed_model(recipe_model: Model, known: Fields, entries: Entries, place: str) -> Model:
    """The model of a recipe with the sizes changed by a command or script; unchanged if there are
    none.

    Raises:
        LaunchFileError: sizes that contradict one another, or that this kind of model does not
            have.
    """
    recipe_fields = model_fields(recipe_model)
    changes: Fields = {}
    for key, value in known.items():
        if key.startswith(PARTS_OF_MODEL) and recipe_fields.get(key) != value:
            changes[key] = value
    # A recipe's vocabulary is the model's; the tokenizer of its data does not change it.
    if "model.vocab_size" not in entries:
        changes.pop("model.vocab", None)
    if not changes:
        return recipe_model
    # Most recipes state no width of heads, which then follows from those that are changed
    # (`kv_channels` of Megatron-Core).
    widens = "model.hidden" in changes or "model.heads" in changes
    if (
        widens
        and "model.head_dim" not in changes
        and not recipe_model.name.startswith(_WITH_WIDTH_OF_HEADS)
    ):
        recipe_fields.pop("model.head_dim", None)
    # Layers that are listed one by one cannot be more or fewer than the list.
    model = model_of(recipe_fields | changes, place, f"changed-{recipe_model.name}")
    if model is None:
        raise LaunchFileError(
            f"{place}: {recipe_model.name} has none of {', '.join(changes)}; give --model"
        )
    return model


def _of(known: Fields, prefix: str) -> Fields:
    return {
        key.removeprefix(prefix): value for key, value in known.items() if key.startswith(prefix)
    }


def model_fields(model: Model) -> Fields:
    """Fields that describe a transformer; none of other models."""
    if not isinstance(model, Transformer):
        return {}
    stated = {f"model.{key}": value for key, value in model.values().items()}
    for prefix, part in (
        ("experts.", model.experts),
        ("latent.", model.latent_attention),
        ("mamba.", model.hybrid.mamba),
        ("delta.", model.hybrid.delta_net),
    ):
        if part is not None:
            stated |= {prefix + f.name: getattr(part, f.name) for f in fields(part)}
    for key in ("experts", "latent_attention", "mamba", "delta_net", "name", "source", "aliases"):
        del stated[f"model.{key}"]
    return stated


@lru_cache(maxsize=512)
def shape(model: Model | None) -> Model | None:
    """A model without its names and default lengths, so that models with the same computation are
    equal."""
    if not isinstance(model, Transformer):
        return model
    return replace(model, name="", source="", aliases=(), seq_len=1, longest_seq_len=0)


def catalog_model(name: str) -> Model | None:
    """The catalog's model for a name used by a hub or framework; None if the catalog has none."""
    for candidate in (name, *catalog.hub_names(name)):
        try:
            return catalog.model(candidate)
        except PerfModelError:
            continue
    return None


def _from_catalog(model: Transformer) -> Model | None:
    expected = shape(model)
    same_shape = []
    for candidate in catalog.every_model():
        if not isinstance(candidate, Transformer):
            continue
        # Sizes first: the shape of a whole model is slow to compare.
        # The cheap comparison comes first.
        if (candidate.layers, candidate.hidden) != (model.layers, model.hidden):
            continue
        if shape(candidate) == expected:
            same_shape.append(candidate)
    # Versions of one model may differ in the length of their sequences alone.
    return min(same_shape, key=lambda candidate: candidate.seq_len != model.seq_len, default=None)
