"""Every op's sharding rule: however operands are sharded, the spread program computes the same."""

from itertools import product

import numpy as np
import pytest
from thinned import one_in

from perfmodel.ir import OPS, Builder, Program, Tensor, attributes, undistributed
from perfmodel.ir.distribute import Plan, spread
from perfmodel.ir.execution import execute, random_inputs
from perfmodel.ir.op_definition import REPLICATED, Sharded, Sharding

F64, I32 = "fp64", "int32"
X, Y, W = (2, 4, 8), (2, 4, 6), (8, 6)
IMAGE = (2, 4, 4, 6)
WINDOW = {"stride": (1, 1), "padding": (1, 1), "groups": 1}
POOL = {"kind": "max", "kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}
CASES: list[tuple[str, list[tuple[str, tuple[int, ...]]], dict[str, object]]] = [
    ("add", [(F64, X), (F64, (8,))], {}),
    ("sub", [(F64, (4, 1)), (F64, X)], {}),
    ("mul", [(F64, X), (F64, X)], {}),
    ("div", [(F64, X), (F64, (2, 1, 8))], {}),
    ("scale", [(F64, X)], {"factor": 2.0}),
    ("exp", [(F64, X)], {}),
    *((op, [(F64, X)], {}) for op in ("tanh", "sigmoid", "erf")),
    ("relu_grad", [(F64, X), (F64, X)], {}),
    ("gelu_grad", [(F64, X), (F64, X)], {}),
    ("sum", [(F64, X)], {"axes": (0, 2)}),
    ("sum", [(F64, X)], {"axes": (1,), "keep": True}),
    ("broadcast_like", [(F64, (4, 1)), (F64, X)], {}),
    ("unequal", [(I32, X)], {"value": 1}),
    ("running_sum", [(I32, X)], {"axis": 1}),
    ("cast", [(F64, X)], {"dtype": "fp32"}),
    ("accumulate", [(F64, X), (F64, X)], {}),
    ("matmul", [(F64, X), (F64, W)], {}),
    ("matmul", [(F64, X), (F64, (6, 8))], {"transpose_b": True}),
    ("matmul", [(F64, (2, 8, 4)), (F64, (2, 8, 6))], {"transpose_a": True}),
    ("matmul_weight_grad", [(F64, X), (F64, Y)], {}),
    ("constant", [], {"dtype": F64, "value": (1.0, 2.0)}),
    ("shape", [(F64, X)], {}),
    ("reshape", [(F64, X)], {"shape": (8, 8)}),
    ("reshape", [(F64, X)], {"shape": (2, 2, 2, 8)}),
    ("transpose", [(F64, X)], {"permutation": (2, 0, 1)}),
    ("split", [(F64, X)], {"axis": 1, "parts": 2}),
    ("concat", [(F64, X), (F64, X)], {"axis": 1}),
    ("slice", [(F64, X)], {"axis": 2, "start": 2, "stop": 6}),
    ("pad", [(F64, X)], {"axis": 1, "before": 1, "after": 3}),
    ("take", [(F64, X), (I32, (2,))], {"axis": 1}),
    ("unsqueeze", [(F64, X)], {"axes": (1,)}),
    ("layer_norm", [(F64, X), (F64, (8,)), (F64, (8,))], {}),
    ("layer_norm_grad", [(F64, X), (F64, (8,)), (F64, X)], {}),
    ("softmax", [(F64, X)], {}),
    ("softmax_grad", [(F64, X), (F64, X)], {}),
    ("attention", [(F64, (2, 4, 24))], {"heads": 4, "causal": True}),
    ("attention", [(F64, (2, 4, 24))], {"heads": 1}),
    ("attention_grad", [(F64, (2, 4, 24)), (F64, X)], {"heads": 4}),
    ("attention", [(F64, (2, 2, 24)), (F64, (2, 4, 24))], {"heads": 4, "causal": True}),
    (
        "attention_grad",
        [(F64, (2, 2, 24)), (F64, (2, 4, 24)), (F64, X)],
        {"heads": 4, "causal": True},
    ),
    ("conv2d", [(F64, IMAGE), (F64, (6, 4, 3, 3))], WINDOW),
    ("conv2d", [(F64, IMAGE), (F64, (4, 2, 3, 3))], WINDOW | {"groups": 2}),
    ("conv2d_input_grad", [(F64, (6, 4, 3, 3)), (F64, (2, 6, 4, 6))], WINDOW | {"image": (4, 6)}),
    ("conv2d_weight_grad", [(F64, IMAGE), (F64, (2, 6, 4, 6))], WINDOW | {"kernel": (3, 3)}),
    ("pool2d", [(F64, IMAGE)], POOL),
    ("pool2d_grad", [(F64, IMAGE), (F64, (2, 4, 2, 3))], POOL),
    ("embedding", [(F64, (4, 6)), (I32, (2, 4))], {}),
    ("embedding_grad", [(F64, (4, 6)), (I32, (2, 4)), (F64, (2, 4, 6))], {}),
    ("row_max", [(F64, X)], {}),
    ("pick", [(F64, X), (I32, (2, 4))], {}),
    ("pick_grad", [(F64, X), (I32, (2, 4)), (F64, (2, 4, 1))], {}),
    ("argmax", [(F64, X)], {}),
    ("top_k", [(F64, X)], {"k": 3}),
    ("top_k_grad", [(F64, X), (I32, (2, 4, 2)), (F64, (2, 4, 2))], {}),
    ("sgd", [(F64, X), (F64, X)], {"rate": 0.1}),
    (
        "adam",
        [(F64, X)] * 4,
        {"rate": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "step": 1},
    ),
]
BY_OTHER_TESTS = {"log", "sqrt", "relu", "gelu", "dispatch", "collect"}


def test_every_op_is_here() -> None:
    assert {op for op, *_ in CASES} | BY_OTHER_TESTS == {
        name for name, d in OPS.items() if not d.collective
    }


def choices(shape: tuple[int, ...]) -> list[Sharding]:
    return [REPLICATED, *(Sharded(axis) for axis, n in enumerate(shape) if n % 2 == 0)]


def one_op(
    op: str, operands: list[tuple[str, tuple[int, ...]]], values: dict[str, object]
) -> Program:
    b = Builder(op)
    names = [
        b.parameter(f"x{k}", Tensor(dtype, shape)) for k, (dtype, shape) in enumerate(operands)
    ]
    types = OPS[op].infer(tuple(b.types[n] for n in names), dict(attributes(**values)))
    function = b.build(
        b.emit(op, names, [f"y{k}" for k in range(len(types))], attributes(**values))
    )
    return undistributed(function)


@pytest.mark.parametrize(("op", "operands", "values"), one_in(2, CASES), ids=[c[0] for c in CASES])
@pytest.mark.parametrize("sequence_axis", [None, 1])
def test_spread_over_two(
    op: str, operands: list, values: dict[str, object], sequence_axis: int | None
) -> None:
    program = one_op(op, operands, values)
    x = random_inputs(program)
    want = execute(program, x)
    for shardings in product(*(choices(shape) for _, shape in operands)):
        plan = Plan(
            parts=2,
            suffix="s",
            inputs={f"x{k}": sharding for k, sharding in enumerate(shardings)},
            sequence_axis=sequence_axis,
        )
        found = execute(spread(program, plan), x)
        for name, value in want.items():
            np.testing.assert_allclose(
                found[name], value, rtol=1e-12, atol=1e-13, err_msg=str(shardings)
            )


@pytest.mark.parametrize("axes", list(product([None, 0, 1, 2], repeat=2)), ids=str)
def test_chains_of_linear_layers_with_partial_sums(axes: tuple[int | None, int | None]) -> None:
    """Weights sharded anyhow, so that partial sums meet additions, broadcasts, norms and
    collectives."""
    b = Builder("chain")
    x, v, w = (b.parameter(n, Tensor(F64, s)) for n, s in (("x", X), ("v", (8, 4)), ("w", (4, 8))))
    h = b.op("matmul", x, v)
    y = b.op("add", b.op("matmul", h, w), x)
    z = b.op("add", b.op("scale", b.op("matmul", h, w), factor=2.0), b.op("matmul", h, w))
    norm = b.op(
        "layer_norm", y, b.op("sum", z, axes=(0, 1)), b.op("sum", b.op("matmul", h, w), axes=(0, 1))
    )
    program = undistributed(
        b.build([norm, b.op("broadcast_like", b.op("sum", z, axes=(0, 1, 2)), z), z])
    )
    x_values = random_inputs(program)
    first, second = axes
    inputs: dict[str, Sharding] = {"x": Sharded(first)} if first is not None else {}
    if second is not None:
        inputs |= {"v": Sharded(second % 2), "w": Sharded(1 - second % 2)}
    want = execute(program, x_values)
    for sequence_axis in (None, 1):
        spread_program = spread(
            program, Plan(parts=2, suffix="s", inputs=inputs, sequence_axis=sequence_axis)
        )
        found = execute(spread_program, x_values)
        for name, value in want.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-11, atol=1e-12)


def test_collectives_of_an_inner_dimension_take_slices_and_partial_sums_along() -> None:
    """A second dimension over every collective: its groups are repeated for each part."""
    b = Builder("inner")
    p, q = b.parameter("p", Tensor(F64, (4, 8), 0)), b.parameter("q", Tensor(F64, (4, 8), 1))
    outputs = [
        *b.emit("all_reduce", (p, q), ("r", "r"), attributes(op="sum")),
        *b.emit("all_reduce", (p, q), ("m", "m"), attributes(op="max")),
        *b.emit("all_gather", (p, q), ("g", "g"), attributes(axis=0)),
        *b.emit("reduce_scatter", (p, q), ("s", "s"), attributes(axis=1)),
        *b.emit("all_to_all", (p, q), ("t", "t"), attributes(split_axis=0, concat_axis=1)),
        b.op("gather", p, q, axis=1, to=1),
        b.op("reduce", p, q, to=0),
        *b.emit("broadcast", (p,), ("c", "c"), attributes(to=(1, 2))),
        *b.emit("scatter", (q,), ("k", "k"), attributes(axis=0, to=(0, 2))),
        b.op("send", b.op("sum", p, axes=(0,)), to=1),
    ]
    program = undistributed(b.build(outputs))
    x = random_inputs(program)
    want = execute(program, x)
    for shardings in product(choices((4, 8)), repeat=2):
        for stride in (1, 3):
            plan = Plan(
                parts=2, suffix="s", inputs=dict(zip("pq", shardings, strict=True)), stride=stride
            )
            found = execute(spread(program, plan), x)
            for name, value in want.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-12)
