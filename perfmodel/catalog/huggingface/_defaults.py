"""Defaults of Hugging Face's own classes, for keys that a configuration leaves out."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from perfmodel.catalog.huggingface._families import FAMILIES
from perfmodel.catalog.huggingface._layers import LayerLists
from perfmodel.catalog.huggingface._relatives import RELATIVES, Relative


def with_class_defaults(
    config: Mapping[str, Any], family: str, *, is_part: bool
) -> Mapping[str, Any]:
    """A configuration with what the class of its family takes for keys that are left out.

    transformers writes every key of a model, but of a part (`text_config`) only those that differ
    from the class (`PretrainedConfig.to_diff_dict`): LLaVA's language model has no sizes at all,
    as they are LLaMA's. A whole model without its sizes is a damaged file, and stays without.

    Args:
        config: configuration of one model; a null is stated, not left out.
        family: name of a known family.
        is_part: whether the configuration is a part of another one.
    """
    aliases = _aliases(family)
    stated = {aliases.get(key, key) for key in config}
    if not is_part:
        stated |= _needed_keys(family)
    defaults = {}
    for key, value in _declared().get(family, {}).items():
        if aliases.get(key, key) not in stated:
            defaults[key] = value
    return {**defaults, **config}


def keys_read(family: str) -> frozenset[str]:
    """Keys of a family's configuration that its description depends on."""
    relative = RELATIVES.get(family, Relative(family=family))
    reader = FAMILIES[relative.family]
    own = [field.name for field in fields(reader)]
    listed = [field.name for field in fields(LayerLists)]
    return frozenset((*own, *listed, *_aliases(family)))


def _aliases(family: str) -> Mapping[str, str]:
    """Names of keys in a family -> their names in its reader."""
    relative = RELATIVES.get(family, Relative(family=family))
    return {**getattr(FAMILIES[relative.family], "ALIASES", {}), **relative.aliases}


def _needed_keys(family: str) -> frozenset[str]:
    """Keys that a whole configuration of a family must state, as its reader calls them."""
    relative = RELATIVES.get(family, Relative(family=family))
    return frozenset(
        field.name
        for field in fields(FAMILIES[relative.family])
        if field.default is MISSING and field.default_factory is MISSING
    )


@cache
def _declared() -> Mapping[str, Mapping[str, Any]]:
    """The defaults that classes declare, by family (`training/huggingface_defaults.py`)."""
    path = files("perfmodel.catalog") / "data" / "huggingface" / "defaults.json"
    return MappingProxyType(json.loads(path.read_text("utf-8")))
