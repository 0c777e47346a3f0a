"""Model programs on one device, which the transforms of `perfmodel.ir.distribute` distribute.

Multi-layer perceptrons (DistIR, table 1: training of a synthetic MLP), GPT-2 style transformers
(training with cross-entropy, inference, and a mixture-of-experts variant), and models of the
catalog as such programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from perfmodel.display import shorten_reprs
from perfmodel.errors import PerfModelError
from perfmodel.ir._builder import Builder, ModelBuilder
from perfmodel.ir._gradient import Adam as Adam
from perfmodel.ir._gradient import Sgd as Sgd
from perfmodel.ir._gradient import training_step
from perfmodel.ir._program import Program
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
    """Return the program of `mlp`'s forward pass alone, whose result is the last layer's output."""
    m = ModelBuilder("mlp", dtype)
    return m.program([(_layers(m, batch, sizes), "output")])


def _layers(m: ModelBuilder, batch: int, sizes: Sequence[int]) -> str:
    """Write the layers of an MLP; returns the name of the last output."""
    if len(sizes) < 2 or min(*sizes, batch) < 1:
        raise PerfModelError(
            f"an MLP needs a batch and at least 2 sizes above zero, got {batch} and {list(sizes)}"
        )
    h = m.data("x", (batch, sizes[0]))
    last = len(sizes) - 2
    for layer, (n_in, n_out) in enumerate(pairwise(sizes)):
        # Megatron's pairing: a layer sliced by columns, then one sliced by rows
        columns = layer % 2 == 0
        # Between the two the activation stays sliced and only the second product needs an
        # all-reduce.
        w = m.weight(f"w{layer}", (n_in, n_out), tensor_axis=1 if columns else 0)
        bias = m.weight(f"b{layer}", (n_out,), tensor_axis=0 if columns else None)
        with m.tagged(phase="forward", layer=layer):
            # A row-sliced layer's bias is replicated: it is added once, after the partial products
            # are summed.
            h = m.op("add", m.op("matmul", h, w, name=f"p{layer}"), bias, name=f"z{layer}")
            if layer < last:
                h = m.op("relu", h, name=f"h{layer}")
    return h


@dataclass(frozen=True, kw_only=True)
class TransformerSize:
    """Shape of a decoder-only transformer.

    Raises:
        PerfModelError: heads that do not divide the hidden size, or a number below one.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int
    experts: int = 0
    """Feed-forward networks of every layer, of which each token visits one; 0 for a dense model."""
    tied: bool = False
    """Whether the head shares the embedding table."""
    parallel_blocks: Literal["none", "one_norm", "two_norms"] = "none"
    """Whether attention and feed-forward run in parallel, as in `perfmodel.spec.Transformer`; dense
    models only."""

    def __post_init__(self) -> None:
        if (
            min(self.layers, self.hidden, self.heads, self.vocab, self.seq_len, self.experts + 1)
            < 1
        ):
            raise PerfModelError(f"every size of a transformer must be at least 1, got {self}")
        # Attention slices the hidden size by heads.
        if self.hidden % self.heads:
            raise PerfModelError(
                f"hidden size {self.hidden} is not divisible by {self.heads} heads"
            )
        if self.experts and self.parallel_blocks != "none":
            raise PerfModelError(
                f"parallel_blocks={self.parallel_blocks} works with dense layers only; use experts=0"
            )

    @property
    def n_parameters(self) -> int:
        """Weights and biases."""
        h = self.hidden
        ffn = 4 * self.hidden
        # Norm, joint query-key-value projection with bias, output projection with bias.
        attention = 2 * h + (h + 1) * 3 * h + (h + 1) * h
        dense = (h + 1) * ffn + (ffn + 1) * h
        expert = self.experts * 2 * h * ffn + h * self.experts
        second_norm = 0 if self.parallel_blocks == "one_norm" else 2 * h
        block = attention + second_norm + (expert if self.experts else dense)
        # Beside the layers: table and head (one matrix where tied), learned positions, and the
        # final norm's gain and shift.
        return self.layers * block + ((2 - self.tied) * self.vocab + self.seq_len + 2) * h


GPT2_175B = TransformerSize(layers=96, hidden=12288, heads=96, vocab=51200, seq_len=2048)
"""DistIR's largest inference model (table 1): GPT-2's architecture in GPT-3's size."""


def transformer_loss(size: TransformerSize, batch: int, dtype: str = "fp32") -> Program:
    """Mean cross-entropy of the next token, over `batch` whole sequences.

    Layer i is tagged `layer=i`, the embedding as the first, the head as the last layer.
    `tensor_axis` of the weights is Megatron-LM's (Shoeybi et al. 2019, section 3).
    """
    m = ModelBuilder("transformer", dtype)
    logits = _logits(m, size, batch)
    labels = m.data("labels", (batch, size.seq_len), "int32")
    with m.tagged(phase="forward", layer=size.layers - 1):
        return m.program([(cross_entropy(m, logits, labels), "loss")])


def cross_entropy(m: Builder, logits: str, labels: str) -> str:
    """Mean over all labels of `surprise`."""
    total = m.op("sum", surprise(m, logits, labels), axes=tuple(range(m.types[logits].rank)))
    return m.op("scale", total, factor=1.0 / m.types[labels].n_elements, name="loss")


def surprise(m: Builder, logits: str, labels: str) -> str:
    """log(sum(exp(logits))) - logits[label] along the last axis, which stays with size 1; the
    maximum is subtracted first, so that nothing overflows."""
    last = m.types[logits].rank - 1
    # The maximum keeps exp in range and cancels in the result. In these pieces each step can run on
    # a slice of the vocabulary (maximum and sum are all-reduced), as in Megatron-LM's
    # vocabulary-parallel loss.
    top = m.op("row_max", logits)
    weights = m.op("exp", m.op("sub", logits, top))
    log_sum = m.op("log", m.op("sum", weights, axes=(last,), keep=True))
    normaliser = m.op("add", log_sum, top, name="normaliser")
    return m.op("sub", normaliser, m.op("pick", logits, labels), name="surprise")


def transformer_inference(size: TransformerSize, batch: int, dtype: str = "fp32") -> Program:
    """Logits of every position of `batch` sequences (DistIR, section 5: GPT-2 inference)."""
    m = ModelBuilder("gpt2", dtype)
    return m.program([(_logits(m, size, batch), "output")])


def _logits(m: ModelBuilder, size: TransformerSize, batch: int) -> str:
    """Write a decoder up to its logits, and return their name."""
    h = size.hidden
    tokens = m.data("tokens", (batch, size.seq_len), "int32")
    table = m.weight("wte", (size.vocab, h), tensor_axis=0)
    positions = m.weight("wpe", (size.seq_len, h))
    with m.tagged(phase="forward", layer=0):
        x = m.op("add", m.op("embedding", table, tokens), positions, name="x")
    for layer in range(size.layers):
        with m.tagged(phase="forward", layer=layer):
            x = _layer(m, f"l{layer}", x, size, batch)
    with m.tagged(phase="forward", layer=size.layers - 1):
        x = _norm(m, "final", x, h)
        # A tied head reads the table transposed, so its vocabulary axis stays the sliced one.
        if size.tied:
            return m.op("matmul", x, table, transpose_b=True, name="logits")
        return m.op("matmul", x, m.weight("head", (h, size.vocab), tensor_axis=1), name="logits")


def _norm(m: ModelBuilder, name: str, x: str, h: int) -> str:
    gain = m.weight(f"{name}.gain", (h,))
    shift = m.weight(f"{name}.shift", (h,))
    return m.op("layer_norm", x, gain, shift, epsilon=1e-5, name=f"{name}.norm")


def _layer(m: ModelBuilder, name: str, x: str, size: TransformerSize, batch: int) -> str:
    """Write one layer of the transformer, and return the name of its output."""
    h, heads = size.hidden, size.heads
    y = _norm(m, f"{name}.attn", x, h)
    out, bias = _attention(m, name, y, h, heads)
    # Attention and feed-forward read the same input and are summed with the residual at once, so
    # that tensor parallelism all-reduces one partial sum per layer instead of two. Biases come
    # after it: they are replicated.
    if size.parallel_blocks != "none":
        y = y if size.parallel_blocks == "one_norm" else _norm(m, f"{name}.ffn", x, h)
        inner, inner_bias = _feed_forward(m, name, y, h)
        # Both products are partial sums, added before the replicated residual completes them.
        out = m.op("add", m.op("add", m.op("add", out, inner), x), bias, name=f"{name}.x")
        return m.op("add", out, inner_bias, name=f"{name}.y")
    x = m.op("add", m.op("add", out, x), bias, name=f"{name}.x")
    y = _norm(m, f"{name}.ffn", x, h)
    if size.experts:
        return m.op("add", _experts(m, name, y, size, batch), x, name=f"{name}.y")
    out, bias = _feed_forward(m, name, y, h)
    return m.op("add", m.op("add", out, x), bias, name=f"{name}.y")


def _attention(m: ModelBuilder, name: str, y: str, h: int, heads: int) -> tuple[str, str]:
    """Return the output projection's product, and its bias.

    The bias is left to the caller because the product of a row-sliced weight is a partial sum:
    adding a replicated bias before it is complete would add it once per rank.
    """
    w = m.weight(f"{name}.qkv", (h, 3 * h), tensor_axis=1)
    bias = m.weight(f"{name}.qkv_bias", (3 * h,), tensor_axis=0)
    qkv = m.op("add", m.op("matmul", y, w), bias)
    context = m.op("attention", qkv, heads=heads, causal=True)
    out = m.op("matmul", context, m.weight(f"{name}.proj", (h, h), tensor_axis=0))
    return out, m.weight(f"{name}.proj_bias", (h,))


def _feed_forward(m: ModelBuilder, name: str, y: str, h: int) -> tuple[str, str]:
    """Return the second product of a feed-forward network, and its bias for the caller to add."""
    w = m.weight(f"{name}.fc", (h, 4 * h), tensor_axis=1)
    bias = m.weight(f"{name}.fc_bias", (4 * h,), tensor_axis=0)
    inner = m.op("gelu", m.op("add", m.op("matmul", y, w), bias))
    out = m.op("matmul", inner, m.weight(f"{name}.out", (4 * h, h), tensor_axis=0))
    return out, m.weight(f"{name}.out_bias", (h,))


def _experts(m: ModelBuilder, name: str, y: str, size: TransformerSize, batch: int) -> str:
    """Pass each token through its best expert, scaled by the router; drop no token."""
    h, experts = size.hidden, size.experts
    # Switch routing (Fedus et al. 2021, section 2.1): one expert per token, whose probability
    # scales the result and so carries the router's gradient. Buffers for all tokens per expert mean
    # that none is dropped.
    router = m.weight(f"{name}.router", (h, experts))
    shares = m.op("softmax", m.op("matmul", y, router))
    chosen = m.op("argmax", shares)
    buffers = m.op("dispatch", y, chosen, experts=experts, capacity=batch * size.seq_len)
    widening = m.weight(f"{name}.fc", (experts, h, 4 * h), expert_axis=0)
    inner = m.op("gelu", m.op("matmul", buffers, widening))
    narrowing = m.weight(f"{name}.out", (experts, 4 * h, h), expert_axis=0)
    outer = m.op("matmul", inner, narrowing)
    return m.op("mul", m.op("collect", outer, chosen), m.op("pick", shares, chosen))


def model_program(
    model: Model,
    batch: int,
    *,
    seq_len: int = 0,
    dtype: str = "fp32",
    mode: Literal["train", "inference"] = "train",
) -> Program:
    """A training step or forward pass of a perceptron or a transformer like GPT-2.

    Args:
        model: model of the catalog.
        batch: samples, or sequences of `seq_len` tokens (default: the model's).
        dtype: element type of everything.

    Raises:
        PerfModelError: a model of another architecture.
    """
    if isinstance(model, Mlp):
        sizes = (model.hidden,) * (model.layers + 1)
        if mode == "train":
            return training_step(mlp(batch, sizes, dtype))
        return mlp_inference(batch, sizes, dtype)
    # The written architecture has one attention and one feed-forward kernel; whatever it cannot
    # express is refused rather than approximated.
    if not isinstance(model, Transformer) or not _is_like_gpt2(model):
        raise PerfModelError(
            f"model {model.name}: only MLPs and GPT-2's architecture can be written as programs; give an ONNX "
            "file or FILE.py:FUNCTION instead"
        )
    size = TransformerSize(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        vocab=model.vocab,
        seq_len=seq_len or model.seq_len,
        tied=model.head.tied_embeddings,
        parallel_blocks=model.block.parallel_blocks,
    )
    if mode == "inference":
        return transformer_inference(size, batch, dtype)
    return training_step(transformer_loss(size, batch, dtype))


def _is_like_gpt2(model: Transformer) -> bool:
    """Whether a transformer is GPT-2, up to sizes and which sub-layers run side by side."""
    has_gated_ffn_or_others = (
        model.block.gated_ffn or model.experts or model.decoder_layers or model.hybrid.mixers
    )
    return (
        model.norms.norm == "layer_norm"
        and model.block.activation == "gelu"
        and model.inputs.positions == "learned"
        and model.attention.causal
        and model.block.bias
        and not has_gated_ffn_or_others
        and model.kv_heads * model.head_dim == model.hidden
        and model.ffn_hidden == 4 * model.hidden
    )


shorten_reprs(__name__)
