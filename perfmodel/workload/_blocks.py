"""Divides any kind of model into blocks.

Multi-layer perceptrons are square dense layers with ReLU (DistIR, arXiv 2111.05426, section 5). A
convolutional network has one block per named group of layers (VGG stage layer, residual unit).
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import singledispatch
from itertools import groupby

from perfmodel.errors import LayoutError, Reason
from perfmodel.spec import ConvLayer, ConvNet, Job, Mlp, Model, Transformer
from perfmodel.spec.unet import UNet
from perfmodel.workload._block import BlockOps, Blocks, Comm, Shard
from perfmodel.workload._convolution import convolution, norm_at_bandwidth, require_unsplit_images
from perfmodel.workload._frozen_encoders import with_encoders
from perfmodel.workload._linear import linear
from perfmodel.workload._local import Precision, divide
from perfmodel.workload._piece import Piece, assemble, memory, pointwise
from perfmodel.workload._transformer import transformer_blocks
from perfmodel.workload._unet import unet_blocks


@singledispatch
def blocks(model: Model, job: Job, shard: Shard) -> Blocks:
    """Blocks of `model` in order with repeat counts, for one micro-batch on one device.

    A pipeline may be cut between any two of them.

    Raises:
        LayoutError: if the shard does not divide the model; the message names the remedy.
    """
    raise TypeError(f"not a model: {model!r}")


@blocks.register
def _transformer_blocks(model: Transformer, job: Job, shard: Shard) -> Blocks:
    """Blocks of a transformer, the first with the encoders of a diffusion transformer."""
    latent_size = model.inputs.patches.image_size if model.inputs.patches else 0
    return with_encoders(
        transformer_blocks(model, job, shard), model.inputs.encoders, latent_size, job, shard
    )


@blocks.register
def _unet_blocks(model: UNet, job: Job, shard: Shard) -> Blocks:
    """Blocks of a U-Net, the first with the encoders of its image and text."""
    return with_encoders(
        unet_blocks(model, job, shard), model.encoders, model.latent_size, job, shard
    )


@blocks.register
def _mlp_blocks(model: Mlp, job: Job, shard: Shard) -> Blocks:
    """One block per layer; under tensor parallelism one per column- and row-parallel pair of
    layers.

    Raises:
        LayoutError: if tp does not divide the hidden size or leaves an unpaired layer.
    """
    tp = shard.tp
    hidden = model.hidden
    precision = Precision.of(job)
    rows = shard.micro_batch * job.seq_len
    divide(model, Reason.HIDDEN, f"hidden={hidden} is", hidden, "tp", tp)
    if tp > 1 and model.layers % 2:
        raise LayoutError(
            f"{model.name}: tp={tp} needs an even number of layers, but the model has {model.layers}; use tp=1",
            Reason.PAIRED_LAYERS,
        )
    if shard.cp > 1 or shard.ep > 1 or shard.expert_tp != tp:
        raise LayoutError(
            f"{model.name}: cp={shard.cp} and ep={shard.ep} must be 1 and etp={shard.expert_tp} left out, because "
            "the model has no sequence or experts to split",
            Reason.UNSPLIT,
            "cp or ep",
        )
    n_bytes = float(rows) * hidden * precision.act_bytes

    def layer(name: str, pieces: list[Piece]) -> BlockOps:
        return assemble(
            name,
            pieces,
            train=job.mode == "train",
            input_bytes=n_bytes,
            workspace_bytes=n_bytes,
            boundary_bytes=n_bytes,
        )

    # In place, its output is all that is kept, as the next layer's input; else its gradient is
    # taken of its input.
    def relu(width: int) -> Piece:
        saved = 0.0 if job.kernels.fused_kernels else float(rows) * width * precision.act_bytes
        return pointwise(precision, [("relu", 1)], rows, width, saved_bytes=saved)

    if tp == 1:
        pieces = [linear(precision, rows, hidden, hidden), relu(hidden)]
        return ((layer("mlp_layer", pieces), model.layers),)

    # A column-parallel layer, whose output stays divided, then a row-parallel one, whose output is
    # summed (Megatron, arXiv 1909.08053, section 3). Backward sums the gradient of the pair's
    # input.
    reduce = Comm(collective="all_reduce", bytes=n_bytes, group="tp")
    inner = hidden // tp
    pair = [
        linear(
            precision,
            rows,
            inner,
            hidden,
            backward_comm=(replace(reduce, overlappable=True),),
        ),
        relu(inner),
        linear(precision, rows, hidden, inner, forward_comm=(reduce,)),
        relu(hidden),
    ]
    return ((layer("mlp_pair", pair), model.layers // 2),)


@blocks.register
def _convnet_blocks(model: ConvNet, job: Job, shard: Shard) -> Blocks:
    """Blocks in execution order; equal neighbours (repeated residual units) count as one block.

    A residual unit ends with the layer that adds the shortcut, so that a pipeline cut between
    blocks sends one activation.

    Raises:
        LayoutError: for tensor, context or expert parallelism, which convolutions do not have here.
    """
    require_unsplit_images(model, shard)
    precision = Precision.of(job)
    train = job.mode == "train"
    blocks = []
    for unit, equal_units in groupby(_units(model)):
        block = _block(unit, precision, shard.micro_batch, job, train=train)
        blocks.append((block, len(list(equal_units))))
    return tuple(blocks)


def _units(model: ConvNet) -> Iterator[list[ConvLayer]]:
    """Layers with one name before the dot, split where a shortcut closes."""
    for _, group in groupby(model.stack, key=lambda layer: layer.name.split(".")[0]):
        layers = list(group)

        # Without a shortcut a pipeline may be cut after every layer.
        if not any(layer.residual for layer in layers):
            yield from ([layer] for layer in layers)
            continue

        # A residual stream would have to be sent too, so the unit ends where it is added.
        unit: list[ConvLayer] = []
        for layer in layers:
            unit.append(layer)
            if layer.residual:
                yield unit
                unit = []
        if unit:
            yield unit


def _block(
    layers: list[ConvLayer], precision: Precision, batch: int, job: Job, *, train: bool
) -> BlockOps:
    """A block of consecutive layers, with its input and output images."""
    pieces: list[Piece] = []
    for layer in layers:
        pieces += _layer(layer, precision, batch, job)
    first, last = layers[0], layers[-1]
    input_bytes = float(batch * first.c_in * first.size_in**2 * precision.act_bytes)
    output_bytes = float(batch * last.c_out * last.size_out**2 * precision.act_bytes)
    name = first.name if len(layers) == 1 else first.name.split(".")[0]
    return assemble(
        name,
        pieces,
        train=train,
        input_bytes=input_bytes,
        workspace_bytes=input_bytes + output_bytes,
        boundary_bytes=output_bytes,
    )


def _layer(layer: ConvLayer, precision: Precision, batch: int, job: Job) -> Iterator[Piece]:
    """The layer itself, then its batch norm, shortcut addition and ReLU, as separate kernels or as
    one."""
    # The layer itself.
    rows = batch * layer.c_out
    area = layer.size_out**2
    tensor = float(rows * area * precision.act_bytes)
    if layer.op == "conv":
        yield convolution(layer, precision, batch)
    elif layer.op == "linear":
        yield linear(precision, batch, layer.c_out, layer.c_in * layer.size_in**2, bias=layer.c_out)
    else:
        if (layer.op, layer.kernel, layer.stride) == ("max_pool", 3, 2):
            name = "max_pool3x3s2"
        else:
            name = layer.op
        yield pointwise(
            precision, [(name, 1)], batch * layer.c_in, layer.size_in**2, saved_bytes=tensor
        )

    # Its batch norm, which fused reads the shortcut as a second input.
    fused = layer.batch_norm and job.kernels.fused_batch_norm
    if layer.batch_norm:
        inputs = 2 if fused and layer.residual else 1
        norm = pointwise(
            precision,
            [("batch_norm", inputs)],
            rows,
            area,
            params=2 * layer.c_out,
            saved_bytes=tensor,
        )
        if job.kernels.channels_last and precision.act_bytes == 2:
            norm = norm_at_bandwidth(norm, precision, rows, area, inputs)
        yield norm

    # Shortcut and ReLU as kernels of their own. ReLU works in place: its output is the next layer's
    # kept input.
    if layer.residual and not fused:
        add = memory(precision, "add", rows, area, 2)
        yield Piece(forward=(add,), backward_input=(add,))
    if layer.relu and not fused:
        yield pointwise(precision, [("relu", 1)], rows, area)
