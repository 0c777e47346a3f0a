"""Convolutions of images and the norms beside them."""

from dataclasses import replace

from perfmodel.errors import LayoutError, Reason
from perfmodel.ops import Convolution, KernelOp
from perfmodel.spec import BLOCK_KEYS, ConvLayer, Model
from perfmodel.units import dtype_bytes
from perfmodel.workload._block import Shard
from perfmodel.workload._local import Precision
from perfmodel.workload._piece import Piece, memory


def require_unsplit_images(model: Model, shard: Shard) -> None:
    """Raise `LayoutError` if a layout divides a convolutional network by tensor, context or expert
    parallelism."""
    # `etp` may be left open.
    for name in BLOCK_KEYS:
        if (getattr(shard, name) or 1) > 1:
            raise LayoutError(
                f"{model.name}: {name}={getattr(shard, name)} must be 1 for a convolutional network, which has no "
                "sequence or experts to split",
                Reason.UNSPLIT,
                "tp, cp or ep",
            )


def norm_at_bandwidth(
    norm: Piece, precision: Precision, rows: int, area: int, inputs: int
) -> Piece:
    """A batch norm as cuDNN's kernels of NHWC images run it, at the rate of the memory."""
    # Forward reads its input twice (for the statistics and for the result) and writes the result, 3
    # tensors; backward reads input and gradient twice and writes one, 5 tensors.
    summed = memory(precision, "add", rows, area, 1 + inputs)
    statistics = memory(precision, "mul_scalar", rows, area)
    applied = memory(precision, "add", rows, area, 2)
    return replace(norm, forward=(summed,), backward_input=(statistics, applied))


def convolution(layer: ConvLayer, precision: Precision, batch: int) -> Piece:
    """A convolution with its gradients; it keeps its input."""

    def op(pass_: str) -> KernelOp:
        return Convolution(
            dtype=precision.dtype,
            batch=batch,
            c_in=layer.c_in,
            h_in=layer.size_in,
            w_in=layer.size_in,
            c_out=layer.c_out,
            k_h=layer.kernel,
            k_w=layer.kernel,
            stride_h=layer.stride,
            stride_w=layer.stride,
            pad_h=layer.pad,
            pad_w=layer.pad,
            pass_=pass_,  # pyright: ignore[reportArgumentType]
        )

    # The first layer's input are images of three colours, which need no gradient.
    takes_images = layer.c_in == 3
    return Piece(
        forward=(op("fwd"),),
        backward_input=() if takes_images else (op("dgrad"),),
        backward_weight=(op("wgrad"),),
        params=layer.weights + (0 if layer.batch_norm else layer.c_out),
        saved_bytes=float(batch * layer.c_in * layer.size_in**2 * dtype_bytes(precision.dtype)),
    )
