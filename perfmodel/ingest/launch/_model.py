"""The model that fields say, the fields that say a model, and the catalog's model of a name or shape."""

from dataclasses import fields, replace
from typing import Final

from perfmodel import catalog
from perfmodel.errors import LaunchFileError, PerfModelError
from perfmodel.ingest.launch._table import Fields
from perfmodel.spec import Experts, LatentAttention, Mamba, Model, Transformer

LATENT_DEFAULTS: Final = {
    "q_lora_rank": 0,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""Sizes of latent attention where nobody says them (Megatron-Core `MLATransformerConfig`)."""


def model_of(known: Fields, place: str, name: str) -> Model | None:
    """The model of `model.*` fields, as the catalog has it if it has one of this shape; None where none is stated.

    Raises:
        LaunchFileError: sizes that contradict one another.
    """
    if named := known.get("model"):
        return catalog_model(named)
    own = _of(known, "model.")
    needed = ("layers", "hidden", "heads", "vocab")
    if not all(field in own for field in needed):
        return None
    own.setdefault("kv_heads", own["heads"])
    own.setdefault("head_dim", max(1, own["hidden"] // own["heads"]))
    own.setdefault("ffn_hidden", 4 * own["hidden"])
    own["seq_len"] = known.get("seq_len") or own.get("seq_len") or 2048
    try:
        experts, latent = _of(known, "experts."), _of(known, "latent.")
        if experts.get("count", 1) > 1:
            own["experts"] = Experts(**({"ffn_hidden": own["ffn_hidden"], "topk": 1} | experts))
        if latent.get("kv_lora_rank"):
            own["latent_attention"] = LatentAttention(**(LATENT_DEFAULTS | latent))
            own |= {"kv_heads": own["heads"], "head_dim": own["latent_attention"].v_head_dim}
        if mamba := _of(known, "mamba."):
            own["mamba"] = Mamba(**mamba)
        model = Transformer(name=name, source=f"launch file {place}", **own)
    except PerfModelError as error:
        raise LaunchFileError(f"{place}: {error}") from None
    except TypeError:
        raise LaunchFileError(f"{place}: sizes of the model are missing; give --model") from None
    return _of_catalog(model) or model


def _of(known: Fields, prefix: str) -> Fields:
    return {key.removeprefix(prefix): value for key, value in known.items() if key.startswith(prefix)}


def model_fields(model: Model) -> Fields:
    """The fields that say a model; none of models that are no transformers."""
    if not isinstance(model, Transformer):
        return {}
    found = {f"model.{f.name}": getattr(model, f.name) for f in fields(model)}
    for prefix, part in (("experts.", model.experts), ("latent.", model.latent_attention), ("mamba.", model.mamba)):
        if part is not None:
            found |= {prefix + f.name: getattr(part, f.name) for f in fields(part)}
    for key in ("experts", "latent_attention", "mamba", "name", "source", "aliases"):
        del found[f"model.{key}"]
    return found


def shape(model: Model | None) -> Model | None:
    """A model without its names and default lengths: models that compute alike are equal in this form."""
    if not isinstance(model, Transformer):
        return model
    return replace(model, name="", source="", aliases=(), seq_len=1, longest_seq_len=0)


def catalog_model(name: str) -> Model | None:
    """The catalog's model that a name of a hub or framework stands for; None where it has none."""
    for one in (name, *catalog.hub_names(name)):
        try:
            return catalog.model(one)
        except PerfModelError:
            continue
    return None


def _of_catalog(model: Transformer) -> Model | None:
    sizes, wanted = (model.layers, model.hidden), shape(model)
    known = [one for one in map(catalog.model, catalog.models()) if isinstance(one, Transformer)]
    alike = [one for one in known if (one.layers, one.hidden) == sizes and shape(one) == wanted]
    return min(alike, key=lambda one: one.seq_len != model.seq_len, default=None)
