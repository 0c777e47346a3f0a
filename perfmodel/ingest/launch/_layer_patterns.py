"""Patterns of layers: lists as in Megatron-Core's arguments, and its Mamba hybrids."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from perfmodel.ingest.launch._table import BadValue, Fields

MOST_LAYERS: Final = 10_000
"""Longest list of layers that is accepted."""


def layer_list(text: Any) -> list[int]:
    """The numbers of a Python expression of lists: `[0]*3+[1]*58`, `([0,1]*2)`; raises `BadValue`
    for others."""
    # Megatron-Core gives the text to `eval` (megatron/training/arguments.py); a stranger's file is
    # only parsed here, and of Python's expressions sums and repetitions of lists are all that
    # patterns need.
    try:
        value = _evaluated_list(ast.parse(str(text).strip().strip("'\""), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        value = None
    if not isinstance(value, list):
        raise BadValue(f"must be a whole number or a list like ([0]*3+[1]*58), got {text!r}")
    return value


_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[int, int], int]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def _repeated(node: ast.ListComp) -> list[int]:
    """The list of a comprehension that repeats one number (`[1 for _ in range(6)]`)."""
    match node:
        case ast.ListComp(
            elt=ast.Constant(value=int() as number),
            generators=[
                ast.comprehension(
                    iter=ast.Call(func=ast.Name(id="range"), args=[length], keywords=[]), ifs=[]
                )
            ],
        ):
            count = _evaluated_list(length)
            if isinstance(count, int) and 0 <= count <= MOST_LAYERS:
                return [int(number)] * count
    raise ValueError("not a repetition")


def _evaluated_list(node: ast.AST) -> list[int] | int:
    """The value of an expression of numbers and lists."""
    # Only the syntax of patterns: numbers, lists, sums and repetitions of lists. Anything else is
    # no pattern.
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return int(node.value)
    if isinstance(node, ast.List):
        numbers = [_evaluated_list(element) for element in node.elts]
        return [number for number in numbers if isinstance(number, int)]
    if isinstance(node, ast.ListComp):
        return _repeated(node)
    if isinstance(node, ast.BinOp):
        lhs = _evaluated_list(node.left)
        rhs = _evaluated_list(node.right)
        operation = _OPERATIONS.get(type(node.op))
        if operation is not None and isinstance(lhs, int) and isinstance(rhs, int):
            if max(abs(lhs), abs(rhs)) > MOST_LAYERS:
                raise ValueError("more layers than any model has")
            return operation(lhs, rhs)
        if isinstance(node.op, ast.Add) and isinstance(lhs, list) and isinstance(rhs, list):
            return lhs + rhs
        if isinstance(node.op, ast.Mult):
            if isinstance(rhs, list):
                lhs, rhs = rhs, lhs
            if (
                isinstance(lhs, list)
                and isinstance(rhs, int)
                and 0 <= len(lhs) * rhs <= MOST_LAYERS
            ):
                return lhs * rhs
    raise ValueError("not a list")


def expert_layers(frequency: Any, layers: int) -> list[bool]:
    """Whether each layer has experts: every n-th, or as in a list (Megatron-Core
    `megatron/core/models/gpt/gpt_layer_specs.py`); raises `BadValue`."""
    # The shell may have divided an expression at its blanks.
    text = " ".join(map(str, frequency)) if isinstance(frequency, list) else str(frequency).strip()
    if text.lstrip("-").isdigit():
        period = int(text)
        if period == -1:  # MindSpeed: all of them
            return [True] * layers
        if period < 1:
            raise BadValue(f"must be at least 1, or -1 for all layers; got {frequency!r}")
        return [layer % period == 0 for layer in range(layers)]
    pattern = layer_list(text)
    if len(pattern) != layers:
        raise BadValue(
            f"describes {len(pattern)} layers, but the model has {layers}; got {frequency!r}"
        )
    return [number == 1 for number in pattern]


def expert_fields(has_experts: Sequence[bool]) -> dict[str, Any]:
    """Fields that say which layers have experts; an irregular pattern is spelled out layer by
    layer."""
    # `Experts` says regular patterns by two numbers, dense layers first and then every n-th one
    # with experts.
    layers = len(has_experts)
    if not any(has_experts):
        return {"experts.count": 1}
    for period in range(1, layers + 1):
        for dense in range(layers):
            if all(_regular(layer, dense, period) == has_experts[layer] for layer in range(layers)):
                return {"experts.first_dense_layers": dense, "experts.every": period}
        if (
            period > 1
            and layers % period == 0
            and all(has_experts[i] == (i % period == 0) for i in range(layers))
        ):
            # Layers 0, n, 2 n, ... in place of n - 1, 2 n - 1, ...: the same work in each group of
            # n.
            return {"experts.first_dense_layers": 0, "experts.every": period}
    return {"model.mixers": " ".join("*E" if experts else "*-" for experts in has_experts)}


def _regular(layer: int, dense: int, period: int) -> bool:
    """Whether `Experts.first_dense_layers` and `Experts.every` give a layer experts."""
    return layer >= dense and (layer - dense + 1) % period == 0


def hybrid_layers(layers: int, attention_ratio: float, mlp_ratio: float) -> str:
    """The letter of `Transformer.mixers` for each layer of a hybrid: attention and feed-forward
    layers are spread evenly among Mamba layers (Megatron-Core
    `megatron/core/ssm/mamba_hybrid_layer_allocation.py`)."""
    # Rounding and order are Megatron-Core's: attention layers are placed first, and the remaining
    # Mamba layers are shared with feed-forwards. Another order gives other stages on a pipeline, so
    # that it is followed to the letter.
    attention = round(layers * attention_ratio)
    feed_forward = round(layers * mlp_ratio)
    kinds = _spaced_layers(["M"] * layers, "*", (layers - attention) / (attention + 1))
    if feed_forward:
        kinds = _spaced_layers(kinds, "-", (layers - attention - feed_forward) / feed_forward)
    return "".join(kinds)


def _spaced_layers(kinds: list[str], kind: str, distance: float) -> list[str]:
    """Replace Mamba layers by another kind, with this many Mamba layers in between."""
    spread = list(kinds)
    until_next = distance
    for i, before in enumerate(kinds):
        if before != "M":
            continue
        if until_next < 0.5:
            spread[i] = kind
            until_next += distance
        else:
            until_next -= 1
    return spread


_OTHER_LAYERS: Final = re.compile(r"griffin|jamba|mamba|hyena|retro|rwkv", re.IGNORECASE)


def kind_by_name(settings: Mapping[str, Any]) -> Fields:
    """The doubt about a file whose name suggests a model with kinds of layers that the file does
    not state."""
    name = str(settings.get("name", ""))
    if _OTHER_LAYERS.search(name) is None or "model.hybrid_override_pattern" in settings:
        return {}
    return {
        "doubt.layers": f"the model may be wrong: {name} has layers of kinds that the file does not state"
    }
