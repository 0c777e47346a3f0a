"""Weight updates: gradient descent and Adam (Kingma and Ba 2015, algorithm 1)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from perfmodel.ops import Op
from perfmodel.program.ir._instruction import RuleError, Tensor
from perfmodel.program.ir._op import (
    Answer,
    OpDefinition,
    Question,
    Sharded,
    WorkRule,
    memory_bound,
    operands,
    required,
    table,
)


def _same_shape(given: tuple[Tensor, ...]) -> None:
    if len({(tensor.dtype, tensor.shape) for tensor in given}) > 1:
        raise RuleError("weight, gradient and moments must share dtype and shape")


def _sgd(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Weight and gradient to the new weight."""
    operands(2, given)
    _same_shape(given)
    required(attributes, "rate", float)
    return given[:1]


def _adam(given: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Weight, gradient, first and second moment to the new weight and moments."""
    operands(4, given)
    _same_shape(given)
    for name in ("rate", "beta1", "beta2", "epsilon"):
        required(attributes, name, float)
    if required(attributes, "step", int) < 1:
        raise RuleError("steps count from 1")
    return given[0], given[2], given[3]


def _shard_update(question: Question) -> Answer:
    """A sharded operand (the optimizer's state, under ZeRO) has every operand sharded like it."""
    question = question.settled()
    axis = next((a for a in map(question.sharded_axis, range(len(question.operands))) if a is not None), None)
    if axis is None:
        return question.replicated()
    return Answer((Sharded(axis),) * len(question.operands), (Sharded(axis),) * len(question.outputs))


def _streams(op: str, tensors: int) -> WorkRule:
    """One kernel per weight that reads and writes so many tensors of its size in all."""

    def work(inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], attributes: Mapping[str, Any]) -> tuple[Op, ...]:
        (kernel,) = memory_bound(op)(inputs, outputs, attributes)
        return (replace(kernel, n_inputs=tensors - 1),)

    return work


OPTIMIZER = table(
    OpDefinition(name="sgd", infer=_sgd, work=_streams("sgd", 3), shard=_shard_update),
    OpDefinition(name="adam", infer=_adam, work=_streams("adam", 7), shard=_shard_update),
)
