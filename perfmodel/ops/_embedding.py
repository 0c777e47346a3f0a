"""Embedding lookups and their gradients."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perfmodel.ops._op import Axis, Family, KernelOp, Measurement, Pass, Shape, ShapeColumn, Work
from perfmodel.ops.physics import Machine, Physics, divides, log2
from perfmodel.ops.programs import (
    Program,
    Tensors,
    jax_array,
    jax_pass,
    torch_module,
    torch_pass,
)


def _work(xp: Any, x: Shape) -> Work:
    """One operation per element, as element-wise kernels; rows gathered and written, `bwd` reads,
    adds and writes."""
    elements = x["tokens"] * x["hidden"]
    return Work(elements, elements * x["element_bytes"] * (2.0 + x["bwd"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding(KernelOp):
    """Table lookup of `tokens` rows (forward) or scatter-add of their gradients (`bwd`)."""

    op: str = "embedding"
    dtype: str = "bf16"
    tokens: int
    hidden: int
    vocab: int
    pass_: Pass = "fwd"

    family = "embedding"
    samples_field = "tokens"
    work = staticmethod(_work)

    @property
    def label(self) -> str:
        return f"embedding {self.tokens}x{self.hidden} {self.pass_}"


def _physics(xp: Any, x: Shape, machine: Machine) -> Physics:
    """Rows gathered and written, or their gradients scattered."""
    tokens, hidden, vocab = x["tokens"], x["hidden"], x["vocab"]
    elements, traffic = _work(xp, x)
    moved = elements * x["element_bytes"]
    table = vocab * hidden * x["element_bytes"]
    features = [
        log2(xp, tokens),
        log2(xp, hidden),
        log2(xp, vocab),
        log2(xp, moved / machine.l2),
        log2(xp, table / machine.l2),
        # how often a row of the table is read: rows that come again are in the cache
        log2(xp, tokens / vocab),
        log2(xp, table / moved),
        divides(xp, hidden, 128),
        divides(xp, hidden, 1024),
    ]
    axes = [log2(xp, v) for v in (tokens, hidden, vocab)]
    return Physics(elements, elements, traffic, features, axes)


def _jax_program(op: Embedding, rng: np.random.Generator) -> Program:
    import jax.numpy as jnp

    table = jax_array(rng, op.dtype, op.vocab, op.hidden)
    tokens = jnp.asarray(rng.integers(0, op.vocab, op.tokens), jnp.int32)
    # the gradient is dense: zeros of the table's size, then a scatter-add
    return jax_pass(op, lambda t, ids: t[ids], (table, tokens), {"bwd": (0,)})


def _torch_program(op: Embedding, make: Tensors) -> Program:
    lookup = torch_module().nn.functional.embedding
    table = make(op.vocab, op.hidden)
    tokens = make.indices(op.vocab, op.tokens)
    return torch_pass(op, lambda table, ids: lookup(ids, table), (table, tokens), {"bwd": (0,)})


EMBEDDING: Final = Family(
    op=Embedding,
    columns={"tokens": ShapeColumn(), "hidden": ShapeColumn(), "vocab": ShapeColumn()},
    axes=(Axis("tokens", 0, 18, 2), Axis("hidden", 6, 15, 2), Axis("vocab", 8, 19, 2)),
    physics=_physics,
    known_op=lambda op: "embedding+dropout" if "dropout" in op else "embedding",
    measurement=Measurement(
        passes=("fwd", "bwd"), jax_program=_jax_program, torch_program=_torch_program
    ),
)
