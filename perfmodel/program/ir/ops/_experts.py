"""Mixture of experts: routing of each token to its best expert (Fedus et al. 2021, section 2.1).

Experts take their tokens from buffers of fixed capacity; a token beyond it is dropped (zeros come back).
Sharding tokens shards the capacity: each part fills its own share of every buffer, in its own order.
"""

from collections.abc import Mapping
from typing import Any

from perfmodel.program.ir._instruction import Instruction, RuleError, Tensor
from perfmodel.program.ir._op import (
    Answer,
    Emitter,
    Names,
    OpDefinition,
    Question,
    Sharded,
    memory_bound,
    operands,
    required,
    table,
)


def _argmax(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    operands(1, given)
    (x,) = given
    if x.rank < 1:
        raise RuleError("a tensor of at least one dimension is needed")
    return (Tensor("int32", x.shape[:-1], x.device),)


def _shard_argmax(question: Question) -> Answer:
    question = question.settled()
    axis = question.sharded_axis(0)
    if axis is None or axis == question.operands[0].rank - 1:
        return question.replicated()
    return Answer((Sharded(axis),), (Sharded(axis),))


def _dispatch(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Tokens [.., hidden] and their experts [..] to buffers [experts, capacity, hidden]."""
    operands(2, given)
    x, chosen = given
    experts, capacity = required(attributes, "experts", int), required(attributes, "capacity", int)
    if chosen.shape != x.shape[:-1] or not chosen.dtype.startswith("int"):
        raise RuleError(f"an expert number for each of {x.shape[:-1]} tokens is needed, got {chosen}")
    return (x.with_shape((experts, capacity, x.shape[-1])),)


def _dispatch_gradient(b: Emitter, i: Instruction, gradients: Names) -> Names:
    (dy,) = gradients
    return (b.op("collect", dy, i.inputs[1]) if dy else None), None


def _shard_dispatch(question: Question) -> Answer:
    question = question.settled()
    tokens = [a for a in map(question.sharded_axis, (0, 1)) if a is not None and a < question.operands[1].rank]
    capacity = question.attributes["capacity"]
    if not tokens:
        return question.replicated()
    if capacity % question.parts:
        raise RuleError(f"capacity {capacity} does not divide over {question.parts} parts")
    spread = Sharded(tokens[0])
    return Answer((spread, spread), (Sharded(1),), (("capacity", capacity // question.parts),))


def _collect(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Buffers [experts, capacity, hidden] and the tokens' experts [..] back to tokens [.., hidden]."""
    operands(2, given)
    buffers, chosen = given
    if buffers.rank != 3 or not chosen.dtype.startswith("int"):
        raise RuleError(f"buffers [experts, capacity, hidden] and expert numbers are needed, got {buffers}, {chosen}")
    return (buffers.with_shape((*chosen.shape, buffers.shape[2])),)


def _collect_gradient(b: Emitter, i: Instruction, gradients: Names) -> Names:
    (dy,) = gradients
    experts, capacity, _ = b.types[i.inputs[0]].shape
    return (b.op("dispatch", dy, i.inputs[1], experts=experts, capacity=capacity) if dy else None), None


def _shard_collect(question: Question) -> Answer:
    question = question.settled()
    axis = question.sharded_axis(1)
    if axis is None:
        return question.replicated()
    return Answer((Sharded(1), Sharded(axis)), (Sharded(axis),))


EXPERTS = table(
    OpDefinition(name="argmax", infer=_argmax, work=memory_bound("row_max"), shard=_shard_argmax),
    OpDefinition(
        name="dispatch", infer=_dispatch, work=memory_bound("copy"), gradient=_dispatch_gradient, shard=_shard_dispatch
    ),
    OpDefinition(
        name="collect", infer=_collect, work=memory_bound("copy"), gradient=_collect_gradient, shard=_shard_collect
    ),
)
