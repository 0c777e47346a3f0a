"""Convolutional networks: one block per named group of layers (VGG stage layer, residual unit)."""

from collections.abc import Iterator
from itertools import groupby

from perfmodel.errors import LayoutError, Reason
from perfmodel.ops import Convolution, KernelOp
from perfmodel.spec import BLOCK_KEYS, ConvLayer, ConvNet, Job
from perfmodel.units import dtype_bytes
from perfmodel.workload._block import BlockOps, Shard
from perfmodel.workload._linear import linear
from perfmodel.workload._local import Precision
from perfmodel.workload._piece import Piece, assemble, memory, pointwise


def convnet_blocks(model: ConvNet, job: Job, shard: Shard) -> tuple[tuple[BlockOps, int], ...]:
    """Blocks in execution order; equal neighbours (repeated residual units) count as one block.

    A residual unit ends with the layer that adds the shortcut, so that a pipeline cut between
    blocks sends one activation.

    Raises:
        LayoutError: for tensor, context or expert parallelism, which convolutions do not have here.
    """
    for name in BLOCK_KEYS:
        if (getattr(shard, name) or 1) > 1:
            raise LayoutError(
                f"{model.name}: {name}={getattr(shard, name)} must be 1 for a convolutional network, which has no "
                "sequence or experts to split",
                Reason.UNSPLIT, "tp, cp or ep",
            )  # fmt: skip
    precision = Precision.of(job)
    train = job.mode == "train"
    return tuple(
        (_block(unit, precision, shard.micro_batch, job, train=train), sum(1 for _ in equal))
        for unit, equal in groupby(_units(model))
    )


def _units(model: ConvNet) -> Iterator[list[ConvLayer]]:
    """Layers with one name before the dot, split where a shortcut closes."""
    for _, group in groupby(model.stack, key=lambda layer: layer.name.split(".")[0]):
        layers = list(group)
        if not any(layer.residual for layer in layers):
            yield from ([layer] for layer in layers)
            continue
        unit: list[ConvLayer] = []
        for layer in layers:
            unit.append(layer)
            if layer.residual:
                yield unit
                unit = []
        if unit:
            yield unit


def _block(layers: list[ConvLayer], precision: Precision, batch: int, job: Job, *, train: bool) -> BlockOps:
    pieces = [piece for layer in layers for piece in _layer(layer, precision, batch, job)]
    first, last = layers[0], layers[-1]
    input_bytes = float(batch * first.c_in * first.size_in**2 * precision.act_bytes)
    output_bytes = float(batch * last.c_out * last.size_out**2 * precision.act_bytes)
    name = first.name if len(layers) == 1 else first.name.split(".")[0]
    return assemble(name, pieces, train=train, input_bytes=input_bytes,
                    workspace_bytes=input_bytes + output_bytes, boundary_bytes=output_bytes)  # fmt: skip


def _layer(layer: ConvLayer, precision: Precision, batch: int, job: Job) -> Iterator[Piece]:
    """The layer itself, then its batch norm, shortcut addition and ReLU, each a kernel of its own or all one."""
    rows, area = batch * layer.c_out, layer.size_out**2
    tensor = float(rows * area * precision.act_bytes)
    if layer.op == "conv":
        yield _convolution(layer, precision, batch)
    elif layer.op == "linear":
        yield linear(precision, batch, layer.c_out, layer.c_in * layer.size_in**2, bias=layer.c_out)
    else:
        name = "max_pool3x3s2" if (layer.op, layer.kernel, layer.stride) == ("max_pool", 3, 2) else layer.op
        yield pointwise(precision, [(name, 1)], batch * layer.c_in, layer.size_in**2, saved_bytes=tensor)
    fused = layer.batch_norm and job.fused_batch_norm
    if layer.batch_norm:
        ops = [("batch_norm", 2 if fused and layer.residual else 1)]
        yield pointwise(precision, ops, rows, area, params=2 * layer.c_out, saved_bytes=tensor)
    if layer.residual and not fused:
        add = memory(precision, "add", rows, area, 2)
        yield Piece(forward=(add,), backward_input=(add,))
    if layer.relu and not fused:
        # in place: its output is the next layer's kept input
        yield pointwise(precision, [("relu", 1)], rows, area)


def _convolution(layer: ConvLayer, precision: Precision, batch: int) -> Piece:
    def op(pass_: str) -> KernelOp:
        return Convolution(
            dtype=precision.dtype, batch=batch, c_in=layer.c_in, h_in=layer.size_in, w_in=layer.size_in,
            c_out=layer.c_out, k_h=layer.kernel, k_w=layer.kernel, stride_h=layer.stride, stride_w=layer.stride,
            pad_h=layer.pad, pad_w=layer.pad, pass_=pass_,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    first = layer.c_in == 3
    return Piece(
        forward=(op("fwd"),),
        backward_input=() if first else (op("dgrad"),),  # images need no gradient
        backward_weight=(op("wgrad"),),
        params=layer.weights + (0 if layer.batch_norm else layer.c_out),
        saved_bytes=float(batch * layer.c_in * layer.size_in**2 * dtype_bytes(precision.dtype)),
    )
