"""Adapters in launch files: the matrix products that get them, and options of the peft library."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast, get_args

from perfmodel.ingest.launch._table import BadValue, Fields
from perfmodel.spec import AdapterModule

_BY_NAME: Final[dict[str, tuple[AdapterModule, ...]]] = {
    # Megatron-Core, and the generation before it
    "linear_qkv": ("linear_qkv",),
    "query_key_value": ("linear_qkv",),
    "dense": ("linear_proj",),
    "linear_q": ("q_proj",),
    "linear_kv": ("k_proj", "v_proj"),
    "dense_h_to_4h": ("linear_fc1",),
    "dense_4h_to_h": ("linear_fc2",),
    # MPT
    "Wqkv": ("linear_qkv",),
    "out_proj": ("linear_proj",),
    # Hugging Face
    "o_proj": ("linear_proj",),
    "down_proj": ("linear_fc2",),
    "qkv_proj": ("linear_qkv",),
    "c_attn": ("linear_qkv",),
    "W_pack": ("linear_qkv",),
    "gate_up_proj": ("linear_fc1",),
    "fc1": ("linear_fc1",),
    "fc2": ("linear_fc2",),
    # InternLM, and LLaMA's own names
    "wqkv": ("linear_qkv",),
    "wo": ("linear_proj",),
    "w1": ("gate_proj",),
    "w3": ("up_proj",),
    "w2": ("linear_fc2",),
    # torchtune
    "output_proj": ("linear_proj",),
}
_ALL_LINEAR: Final[tuple[AdapterModule, ...]] = (
    "q_proj",
    "k_proj",
    "v_proj",
    "linear_proj",
    "gate_proj",
    "up_proj",
    "linear_fc2",
)
"""The modules of a Llama that peft's `all-linear` and LLaMA-Factory's `all` stand for."""


_PREFIXES: Final = (
    "model.layers.{}.",
    "model.language_model.layers.{}.",
    "language_model.model.layers.{}.",
    "model.text_model.layers.{}.",
    "model.model.layers.{}.",
)
"""Prefixes of the names of a layer's products in Transformers' language models, with and without a
tower."""
_MOST_LAYERS: Final = 100
"""Layers by which a pattern is tried: their numbers have one digit or two."""
_PRODUCTS: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_FEED_FORWARDS: Final = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_OF_PATTERN: Final = re.compile(r"[\\\[\](){}|*+?^$]")
"""Characters of patterns that do not occur in names."""
_SLOW: Final = re.compile(r"[*+}][^()]*\)[*+{]|\\[1-9]")
"""A repetition inside a repeated group, or a reference to a group: such patterns can take
forever."""
_LONGEST_PATTERN: Final = 1000


def _matching_layers(pattern: re.Pattern[str], product: str) -> int:
    """Number of layers, of `_MOST_LAYERS`, in which a pattern matches a product's whole name."""
    most = 0
    for prefix in _PREFIXES:
        names = [prefix.format(layer) + product for layer in range(_MOST_LAYERS)]
        most = max(most, sum(pattern.fullmatch(name) is not None for name in names))
    return most


def _fields_of_pattern(pattern: str) -> Fields:
    """The products whose whole names a regular expression matches, as in peft, and a doubt where it
    matches them in some layers only; empty if it matches none or is not an expression."""
    if len(pattern) > _LONGEST_PATTERN or _SLOW.search(pattern):
        return {}
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return {}
    modules: list[AdapterModule] = []
    partly: list[str] = []
    for product in (*_PRODUCTS, *_FEED_FORWARDS):
        layers = _matching_layers(compiled, product)
        if not layers:
            continue
        module = product.rpartition(".")[2]
        # Products that the table lacks are called in launch files as in `AdapterModule`.
        modules += _BY_NAME[module] if module in _BY_NAME else (cast("AdapterModule", module),)
        if layers < _MOST_LAYERS:
            partly.append(module)
    if not modules:
        return {}
    fields: Fields = {"adapter_modules": tuple(modules)}
    if partly:
        fields["doubt.adapters"] = (
            f"the training method may be wrong: {', '.join(partly)} have adapters in some layers only, but the "
            "prediction has them in every layer"
        )
    return fields


def adapter_modules(targets: str | Iterable[str] | None) -> Fields:
    """The field `adapter_modules` for the layers named, and a doubt about names that perfmodel does
    not know; empty without names.

    A product that is named with its parts stands for them.
    """
    if isinstance(targets, str) and _OF_PATTERN.search(targets):
        pattern_fields = _fields_of_pattern(targets)
        if pattern_fields:
            return pattern_fields
        targets = [targets]
    elif isinstance(targets, str):
        targets = targets.replace(",", " ").split()
    if targets and not isinstance(targets, Iterable):
        raise BadValue(f"must be names of modules, got {targets!r}")
    names = list(targets or ())
    if not names:
        return {}
    modules: list[AdapterModule] = []
    unknown = []
    for name in names:
        # peft also takes paths (`model.layers.0.self_attn.q_proj`): the last part is the product.
        module = str(name).rpartition(".")[2]
        if module in ("all-linear", "all"):
            modules += _ALL_LINEAR
        elif module in _BY_NAME:
            modules += _BY_NAME[module]
        elif module in get_args(AdapterModule):
            modules.append(module)  # pyright: ignore[reportArgumentType]
        else:
            unknown.append(str(name))
    fields: Fields = {}
    if modules:
        fields["adapter_modules"] = tuple(dict.fromkeys(modules))
    if unknown:
        fields["doubt.adapters"] = (
            f"the training method may be wrong: adapters on {', '.join(unknown)} are left out, because no matrix "
            "multiplication of that name is known"
        )
    return fields


PEFT_OPTIONS: Final = ("use_dora", "modules_to_save", "layers_to_transform")
"""Options of peft's `LoraConfig` that change what is trained or what a step costs."""
_PEFT_OF_LORA: Final = ("lora", "adalora")


def peft_fields(settings: Mapping[str, Any]) -> Fields:
    """Doubts that options of the peft library raise beside a rank and targets (`LoraConfig`).

    Args:
        settings: keys of `LoraConfig`, without a prefix.
    """
    fields: Fields = {}
    kind = settings.get("peft_type")
    if kind is not None and str(kind).lower().rpartition(".")[2] not in _PEFT_OF_LORA:
        fields["doubt.trained"] = (
            f"the training method may be wrong: peft_type {kind} is predicted as LoRA"
        )
    if str(settings.get("use_dora", False)).lower() not in ("false", "none", "0"):
        # Every product also takes the norm of its merged weight, in both directions
        # (arXiv 2402.09353).
        fields["doubt.trained"] = (
            "the training method may be wrong: use_dora is predicted as LoRA, and takes longer"
        )
    saved = settings.get("modules_to_save", settings.get("lora_modules_to_save"))
    if saved not in (None, [], ""):
        names = ", ".join(map(str, saved)) if isinstance(saved, list) else saved
        fields["doubt.saved"] = (
            f"the training method may be wrong: modules_to_save trains {names} whole, but the prediction freezes them"
        )
    layers = settings.get("layers_to_transform")
    if layers is not None:
        fields["doubt.layers"] = (
            "the training method may be wrong: layers_to_transform gives adapters to some layers only, but the prediction "
            "has them in every layer"
        )
    return fields
