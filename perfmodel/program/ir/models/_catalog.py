"""Multi-layer perceptrons (DistIR, table 1: training of a synthetic MLP), and models of the catalog as programs."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from perfmodel.errors import PerfModelError
from perfmodel.program.ir._builder import ModelBuilder
from perfmodel.program.ir._program import Program
from perfmodel.program.ir.models._training import training_step
from perfmodel.program.ir.models._transformer import TransformerSize, transformer_inference, transformer_loss
from perfmodel.spec import Mlp, Model, Transformer


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


def model_program(
    model: Model, batch: int, *, seq_len: int = 0, dtype: str = "fp32", mode: Literal["train", "inference"] = "train"
) -> Program:
    """A multi-layer perceptron or a transformer of GPT-2's architecture, one training step or one forward pass.

    Args:
        model: of the catalog.
        batch: samples, or sequences of `seq_len` tokens (default: the model's).
        dtype: element type of everything.

    Raises:
        PerfModelError: a model of another architecture.
    """
    if isinstance(model, Mlp):
        sizes = (model.hidden,) * (model.layers + 1)
        return training_step(mlp(batch, sizes, dtype)) if mode == "train" else mlp_inference(batch, sizes, dtype)
    like_gpt2 = isinstance(model, Transformer) and (
        model.norm == "layer_norm" and model.activation == "gelu" and model.positions == "learned" and model.causal
        and model.bias and not (model.gated_ffn or model.experts or model.decoder_layers or model.mixers)
        and model.kv_heads * model.head_dim == model.hidden and model.ffn_hidden == 4 * model.hidden
    )  # fmt: skip
    if not isinstance(model, Transformer) or not like_gpt2:
        raise PerfModelError(
            f"model {model.name}: only MLPs and GPT-2's architecture are written as programs; "
            "give an ONNX file or FILE.py:FUNCTION instead"
        )
    size = TransformerSize(
        layers=model.layers, hidden=model.hidden, heads=model.heads, vocab=model.vocab,
        seq_len=seq_len or model.seq_len, tied=model.tied_embeddings, parallel_blocks=model.parallel_blocks,
    )  # fmt: skip
    if mode == "inference":
        return transformer_inference(size, batch, dtype)
    return training_step(transformer_loss(size, batch, dtype))
