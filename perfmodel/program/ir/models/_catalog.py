"""Models of the catalog as programs."""

from typing import Literal

from perfmodel.errors import PerfModelError
from perfmodel.program.ir._program import Program
from perfmodel.program.ir.models._mlp import mlp, mlp_inference
from perfmodel.program.ir.models._training import training_step
from perfmodel.program.ir.models._transformer import TransformerSize, transformer_inference, transformer_loss
from perfmodel.spec import Mlp, Model, Transformer


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
