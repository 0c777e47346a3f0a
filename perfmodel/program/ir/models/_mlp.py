"""Multi-layer perceptrons (DistIR, table 1: training of a synthetic MLP)."""

from collections.abc import Sequence
from itertools import pairwise

from perfmodel.errors import PerfModelError
from perfmodel.program.ir._program import Program
from perfmodel.program.ir.models._model_builder import ModelBuilder


def mlp(batch: int, sizes: Sequence[int], dtype: str = "fp32") -> Program:
    """Dense layers with ReLU between them and the mean squared error as loss.

    Args:
        batch: samples of the whole batch, over which the loss is averaged.
        sizes: features of the input and of every layer's output; layer i is tagged `layer=i`.
        dtype: element type of everything.
    """
    m = ModelBuilder("mlp", dtype)
    h = _layers(m, batch, sizes)
    y = m.data("y", (batch, sizes[-1]))
    with m.tagged(phase="forward", layer=len(sizes) - 2):
        error = m.op("sub", h, y, name="error")
        total = m.op("sum", m.op("mul", error, error), axes=(0, 1))
        loss = m.op("scale", total, factor=1.0 / (batch * sizes[-1]), name="loss")
    return m.program([(loss, "loss")])


def mlp_inference(batch: int, sizes: Sequence[int], dtype: str = "fp32") -> Program:
    """What the last layer of `mlp` gives."""
    m = ModelBuilder("mlp", dtype)
    return m.program([(_layers(m, batch, sizes), "output")])


def _layers(m: ModelBuilder, batch: int, sizes: Sequence[int]) -> str:
    if len(sizes) < 2 or min(*sizes, batch) < 1:
        raise PerfModelError(f"an MLP needs a batch and at least 2 sizes above zero, got {batch} and {list(sizes)}")
    h = m.data("x", (batch, sizes[0]))
    last = len(sizes) - 2
    for layer, (n_in, n_out) in enumerate(pairwise(sizes)):
        # Megatron's pairing: a layer sliced by columns, then one sliced by rows
        columns = layer % 2 == 0
        w = m.weight(f"w{layer}", (n_in, n_out), tensor_axis=1 if columns else 0)
        bias = m.weight(f"b{layer}", (n_out,), tensor_axis=0 if columns else None)
        with m.tagged(phase="forward", layer=layer):
            h = m.op("add", m.op("matmul", h, w, name=f"p{layer}"), bias, name=f"z{layer}")
            if layer < last:
                h = m.op("relu", h, name=f"h{layer}")
    return h
