"""Both ends of transformers on patches: the embedding of an image and of what it is conditioned
on, and the prediction for every patch."""

from dataclasses import replace
from typing import Final

from perfmodel.spec import Transformer
from perfmodel.spec.parts import AdaLN, Patches
from perfmodel.workload._linear import linear
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._lookup import lookup
from perfmodel.workload._piece import Piece, pointwise
from perfmodel.workload._pointwise import conditioning

SHARED_VECTORS: Final = 6
"""Conditioning vectors that all layers share: scale, shift and gate of attention and of the
feed-forward."""


def patch_pieces(model: Transformer, local: ShardSizes, patches: Patches) -> list[Piece]:
    """Embedding of patches by one product over the rank's tokens, with positions added.

    With conditioning, also the embeddings of time step and class.
    """
    # Images need no gradient. Class tokens are learned rows beside those of patches.
    h, rows = local.hidden, local.norm_tokens
    projection = linear(local.precision, rows, h, patches.elements, bias=h)
    pieces = [
        replace(projection, backward_input=(), params=projection.params + patches.class_tokens * h)
    ]
    positions = max(model.seq_len, local.seq_len) * h if model.inputs.positions == "learned" else 0
    pieces.append(pointwise(local.precision, [("add", 2)], rows, h, params=positions))

    if model.norms.adaln:
        pieces += _condition_pieces(model, local, model.norms.adaln)
    return pieces


def _condition_pieces(model: Transformer, local: ShardSizes, adaln: AdaLN) -> list[Piece]:
    """Embeddings of what images are conditioned on, a row for each image, and the product that
    makes all layers' vectors of their sum where layers share one."""
    images, h = local.shard.micro_batch, local.hidden

    def embedded(width: int) -> list[Piece]:
        return [
            linear(local.precision, images, h, width, bias=h),
            pointwise(local.precision, [("silu", 1)], images, h),
            linear(local.precision, images, h, h, bias=h),
        ]

    # The time step passes two products, and so do the strength of guidance and the pooled text; the
    # class has a table, with a row for "no class".
    pieces = embedded(adaln.frequencies)
    if adaln.guidance:
        pieces += embedded(adaln.frequencies)
    text = model.inputs.text_condition
    if text and text.pooled:
        pieces += embedded(text.pooled)
    if adaln.classes:
        rows = adaln.classes + 1
        pieces.append(replace(lookup(local, images, rows), params=rows * h))
    if adaln.shared:
        vectors = SHARED_VECTORS * h
        pieces += [
            pointwise(local.precision, [("silu", 1)], images, h),
            linear(local.precision, images, vectors, h, bias=vectors),
        ]
    return pieces


def condition_weights(model: Transformer, adaln: AdaLN) -> tuple[int, int]:
    """Elements of the weight matrices that embed a sample's conditions; elements of their biases
    and of the table of classes."""
    h, text = model.hidden, model.inputs.text_condition
    widths = [adaln.frequencies]
    if adaln.guidance:
        widths.append(adaln.frequencies)
    if text and text.pooled:
        widths.append(text.pooled)
    weights = sum(width * h + h * h for width in widths)
    others = 2 * h * len(widths)
    if adaln.classes:
        others += (adaln.classes + 1) * h
    if adaln.shared:
        weights += SHARED_VECTORS * h * h
        others += SHARED_VECTORS * h
    return weights, others


def patch_head(model: Transformer, local: ShardSizes, patches: Patches) -> list[Piece]:
    """Head on patches, with its loss: classes of an image's pooled token, or the diffusion output
    of every patch."""
    h = local.hidden
    pieces = []
    if model.norms.adaln:
        pieces += conditioning(model, local, 2, [("mul", 2), ("add", 2)])

    # Classes are of images, predictions of patches, and an encoder has neither.
    rows, width = local.shard.micro_batch, model.vocab
    if patches.out_elements:
        rows, width = local.norm_tokens, patches.out_elements
    if not width:
        return pieces
    loss = "sub" if patches.out_elements else "softmax"
    return [
        *pieces,
        linear(local.precision, rows, width, h, bias=width),
        pointwise(local.precision, [(loss, 2)], rows, width, saved_bytes=4.0 * rows * width),
    ]
