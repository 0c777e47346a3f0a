"""Layers of diffusion transformers that read text, and the models that they can stand in."""

from typing import TYPE_CHECKING

from perfmodel.errors import PerfModelError
from perfmodel.spec.parts import STREAM_LAYERS, TEXT_LAYERS

if TYPE_CHECKING:
    from perfmodel.spec._model import Transformer


def require_text_layers(model: "Transformer") -> None:
    """Raise `PerfModelError` unless layers that read text have one, in an order that they can have.

    Layers of two streams come first, then those of one; text that only the keys and values of
    cross-attention are made of stays as it is.
    """
    owner = f"model {model.name}"
    letters = set("".join(model.stack) + model.mtp.mtp_mixers)
    mixers = model.hybrid.mixers
    if letters.isdisjoint(TEXT_LAYERS) != (model.inputs.text_condition is None):
        raise PerfModelError(
            f"{owner}: give text_condition if mixers has one of {', '.join(TEXT_LAYERS)}, or else leave it out; "
            f"mixers={mixers!r}"
        )
    if model.inputs.text_condition is None:
        return
    if model.inputs.patches is None or model.norms.adaln is None:
        raise PerfModelError(f"{owner}: text_condition needs patches and adaln")
    others = [
        name
        for name in ("latent_attention", "window", "layer_groups", "ffn_sizes")
        if model.value(name)
    ]
    if others:
        raise PerfModelError(
            f"{owner}: text_condition cannot be combined with {' and '.join(others)}"
        )
    if letters.isdisjoint(STREAM_LAYERS):
        return

    # Positions in the order of the docstring; -1 for a layer that reads no text, or is joined with
    # another one.
    order = [STREAM_LAYERS.find(word) for word in model.stack]
    if -1 in order or order != sorted(order) or order.count(1) > 1 or {1, 2} <= set(order):
        raise PerfModelError(
            f"{owner}: layers with D, O and N are layers by themselves, D before an O at the end or before N; "
            f"got {mixers!r}"
        )
