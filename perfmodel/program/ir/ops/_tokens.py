"""Embeddings, and the pieces of a cross-entropy that vocabularies spread over devices allow.

The `offset` of a table's or row's first entry is 0 unless the vocabulary is sharded (Megatron-LM's
vocabulary-parallel embedding and loss, Shoeybi et al. 2019, section 3).
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from perfmodel.ops import Embedding, Op
from perfmodel.program.ir._instruction import Instruction, RuleError, Tensor
from perfmodel.program.ir._op import (
    REPLICATED,
    Answer,
    Emitter,
    InferRule,
    Names,
    OpDefinition,
    Partial,
    Question,
    Sharded,
    kernel_dtype,
    memory_bound,
    operands,
    table,
)


def _integers(tensor: Tensor) -> None:
    if not tensor.dtype.startswith("int"):
        raise RuleError(f"token numbers must be integers, got {tensor.dtype}")


def _embedding(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    operands(2, given)
    rows, ids = given
    _integers(ids)
    if rows.rank != 2:
        raise RuleError(f"the table must be a matrix, got shape {rows.shape}")
    return (rows.with_shape((*ids.shape, rows.shape[1])),)


def _embedding_gradient(b: Emitter, i: Instruction, gradients: Names) -> Names:
    return _first_gradient("embedding_grad", b, i, gradients)


def _first_gradient(op: str, b: Emitter, i: Instruction, gradients: Names) -> Names:
    """The first operand's gradient by an op of its own; token numbers have none."""
    (dy,) = gradients
    if dy is None:
        return None, None
    return b.emit(op, (*i.inputs, dy), (f"grad_{i.inputs[0]}",), i.attributes)[0], None


def _first_grad(forward: InferRule) -> InferRule:
    """Type of that op: the first operand's, where the last has the type of what `forward` gives."""

    def infer(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
        operands(3, given)
        (out,) = forward(given[:2], attributes)
        if given[2].shape != out.shape:
            raise RuleError(f"the gradient must have shape {out.shape}, got {given[2].shape}")
        return given[:1]

    return infer


def _shard_embedding(question: Question) -> Answer:
    question = question.settled()
    by_row, by_token = question.sharded_axis(0), question.sharded_axis(1)
    rows = question.operands[0]
    if by_row == 0:
        local = rows.shape[0] // question.parts
        return Answer((Sharded(0), REPLICATED), (Partial("sum"),), offset_step=local)
    if by_row == 1:
        return Answer((Sharded(1), REPLICATED), (Sharded(question.outputs[0].rank - 1),))
    if by_token is not None:
        return Answer((REPLICATED, Sharded(by_token)), (Sharded(by_token),))
    return question.replicated()


def _shard_embedding_grad(question: Question) -> Answer:
    question = question.settled()
    rows, _, dy = question.operands
    by_row, by_token, by_gradient = map(question.sharded_axis, range(3))
    if by_row == 0:
        local = rows.shape[0] // question.parts
        return Answer((Sharded(0), REPLICATED, REPLICATED), (Sharded(0),), offset_step=local)
    if by_row == 1 or by_gradient == dy.rank - 1:
        return Answer((Sharded(1), REPLICATED, Sharded(dy.rank - 1)), (Sharded(1),))
    axis = by_token if by_token is not None else by_gradient
    if axis is not None:
        return Answer((REPLICATED, Sharded(axis), Sharded(axis)), (Partial("sum"),))
    return question.replicated()


def _row_max(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    operands(1, given)
    (x,) = given
    if x.rank < 1:
        raise RuleError("a tensor of at least one dimension is needed")
    return (x.with_shape((*x.shape[:-1], 1)),)


def _shard_row_max(question: Question) -> Answer:
    question = question.settled()
    axis = question.sharded_axis(0)
    if axis is None:
        return question.replicated()
    if axis == question.operands[0].rank - 1:
        return Answer((Sharded(axis),), (Partial("max"),))
    return Answer((Sharded(axis),), (Sharded(axis),))


def _pick(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    operands(2, given)
    x, labels = given
    _integers(labels)
    if labels.shape != x.shape[:-1]:
        raise RuleError(f"labels must have shape {x.shape[:-1]}, got {labels.shape}")
    return (x.with_shape((*labels.shape, 1)),)


def _pick_gradient(b: Emitter, i: Instruction, gradients: Names) -> Names:
    return _first_gradient("pick_grad", b, i, gradients)


def _shard_pick(question: Question) -> Answer:
    question = question.settled()
    x = question.operands[0]
    others = len(question.operands) - 1
    axis = next((a for a in map(question.sharded_axis, range(others + 1)) if a is not None), None)
    if axis is None:
        return question.replicated()
    if axis < x.rank - 1:
        return Answer((Sharded(axis),) * (others + 1), (Sharded(axis),))
    local = x.shape[-1] // question.parts
    out = Partial("sum") if others == 1 else Sharded(axis)
    return Answer((Sharded(axis), *((REPLICATED,) * others)), (out,), offset_step=local)


def _embedding_work(backward: bool) -> Any:
    def work(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Op, ...]:
        rows, ids = inputs[:2]
        kernel = Embedding(
            dtype=kernel_dtype(rows), tokens=prod(ids.shape), hidden=rows.shape[1], vocab=rows.shape[0],
            pass_="bwd" if backward else "fwd",
        )  # fmt: skip
        return (kernel,)

    return work


TOKENS = table(
    OpDefinition(
        name="embedding", infer=_embedding, work=_embedding_work(backward=False), gradient=_embedding_gradient,
        shard=_shard_embedding,
    ),
    OpDefinition(
        name="embedding_grad", infer=_first_grad(_embedding), work=_embedding_work(backward=True),
        shard=_shard_embedding_grad,
    ),
    # a shift that keeps exponentials in range: what depends on it cancels, so it counts as a constant
    OpDefinition(name="row_max", infer=_row_max, work=memory_bound("row_max"), shard=_shard_row_max),
    OpDefinition(name="pick", infer=_pick, work=memory_bound("row_max"), gradient=_pick_gradient, shard=_shard_pick),
    OpDefinition(name="pick_grad", infer=_first_grad(_pick), work=memory_bound("copy"), shard=_shard_pick),
)  # fmt: skip
