"""Matrix products that get adapters, by the names used in launch files."""

from collections.abc import Iterable
from typing import Final, get_args

from perfmodel.ingest.launch._table import Fields
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


def adapter_modules(targets: str | Iterable[str] | None) -> Fields:
    """The field `adapter_modules` for the layers named, and a note on names that perfmodel does not know; empty without
    names.

    A product that is named with its parts stands for them.
    """
    if isinstance(targets, str):
        targets = targets.replace(",", " ").split()
    names = list(targets or ())
    if not names:
        return {}
    modules: list[AdapterModule] = []
    unknown = []
    for name in names:
        # peft also takes paths (`model.layers.0.self_attn.q_proj`): the last part is the product.
        plain = str(name).rpartition(".")[2]
        if plain in ("all-linear", "all"):
            modules += _ALL_LINEAR
        elif plain in _BY_NAME:
            modules += _BY_NAME[plain]
        elif plain in get_args(AdapterModule):
            modules.append(plain)  # pyright: ignore[reportArgumentType]
        else:
            unknown.append(str(name))
    fields: Fields = {}
    if modules:
        fields["adapter_modules"] = tuple(dict.fromkeys(modules))
    if unknown:
        fields["note.adapters"] = (
            f"adapters on {', '.join(unknown)} are left out, because a layer has no matrix multiplication of that name"
        )
    return fields
