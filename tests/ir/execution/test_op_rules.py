"""Every op: its type rule, its gradient rule and its work against its JAX implementation."""

import jax
import numpy as np
import pytest
from thinned import one_in

from perfmodel.ir import OPS, Builder, Function, Tensor, attributes, gradient
from perfmodel.ir.execution import KERNELS, KernelCall, execute_function
from perfmodel.timeline import double_precision

X, ROW, TABLE, IDS = (3, 4, 6), (6,), (5, 6), (3, 4)
IMAGE = (2, 4, 5, 6)
F64, F32, I32 = "fp64", "fp32", "int32"
CASES: dict[str, tuple[list[tuple[str, tuple[int, ...]]], dict[str, object]]] = {
    "add": ([(F64, X), (F64, ROW)], {}),
    "sub": ([(F64, ROW), (F64, X)], {}),
    "mul": ([(F64, X), (F64, (3, 1, 6))], {}),
    "div": ([(F64, X), (F64, (4, 1))], {}),
    "accumulate": ([(F64, X), (F64, X)], {}),
    "scale": ([(F64, X)], {"factor": -0.5}),
    "exp": ([(F64, X)], {}),
    "log": ([(F64, X)], {}),
    "relu": ([(F64, X)], {}),
    "gelu": ([(F64, X)], {}),
    "sqrt": ([(F64, X)], {}),
    "tanh": ([(F64, X)], {}),
    "sigmoid": ([(F64, X)], {}),
    "erf": ([(F64, X)], {}),
    "sum": ([(F64, X)], {"axes": (0, 2)}),
    "broadcast_like": ([(F64, (4, 1)), (F64, X)], {}),
    "unequal": ([(I32, IDS)], {"value": 1}),
    "running_sum": ([(I32, X)], {"axis": 1}),
    "cast": ([(F32, X)], {"dtype": F64}),
    "matmul": ([(F64, X), (F64, (6, 2))], {}),
    "matmul_weight_grad": ([(F64, X), (F64, (3, 4, 2))], {}),
    "reshape": ([(F64, X)], {"shape": (12, -1)}),
    "transpose": ([(F64, X)], {"permutation": (2, 0, 1)}),
    "split": ([(F64, X)], {"axis": 2, "parts": 3}),
    "concat": ([(F64, X), (F64, (3, 1, 6))], {"axis": 1}),
    "slice": ([(F64, X)], {"axis": 1, "start": 1, "stop": 3}),
    "pad": ([(F64, X)], {"axis": 1, "before": 2, "after": 1}),
    "take": ([(F64, X), (I32, (2, 2))], {"axis": 1}),
    "unsqueeze": ([(F64, X)], {"axes": (0, 2)}),
    "layer_norm": ([(F64, X), (F64, ROW), (F64, ROW)], {"epsilon": 1e-3}),
    "softmax": ([(F64, X)], {}),
    "attention": ([(F64, (2, 3, 12))], {"heads": 2, "causal": True}),
    "conv2d": (
        [(F64, IMAGE), (F64, (4, 4, 3, 2))],
        {"stride": (2, 1), "padding": (1, 0), "groups": 1},
    ),
    "pool2d": (
        [(F64, IMAGE)],
        {"kind": "max", "kernel": (3, 2), "stride": (2, 2), "padding": (1, 0)},
    ),
    "embedding": ([(F64, TABLE), (I32, IDS)], {}),
    "row_max": ([(F64, X)], {}),
    "pick": ([(F64, X), (I32, IDS)], {}),
    "argmax": ([(F64, X)], {}),
    "top_k": ([(F64, X)], {"k": 2}),
    "dispatch": ([(F64, X), (I32, IDS)], {"experts": 4, "capacity": 12}),
    "collect": ([(F64, (4, 12, 6)), (I32, IDS)], {}),
    "sgd": ([(F64, X), (F64, X)], {"rate": 0.1}),
    "adam": (
        [(F64, X)] * 4,
        {"rate": 0.1, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "step": 3},
    ),
    "constant": ([], {"dtype": F64, "value": (1.0, 2.0)}),
    "shape": ([(F64, X)], {}),
}
"""Operand types and attributes; the ops of backward passes are covered by the gradient tests."""

OPTIONS = {
    "add": [([(F64, X), (F64, X)], {})],
    "gelu": [([(F64, X)], {"exact": True})],
    "matmul": [
        ([(F64, (4, 6)), (F64, (4, 2))], {"transpose_a": True}),
        ([(F64, X), (F64, (2, 6))], {"transpose_b": True}),
        ([(F64, (3, 6, 4)), (F64, (3, 2, 6))], {"transpose_a": True, "transpose_b": True}),
        ([(F64, X), (F64, (3, 6, 5))], {}),
    ],
    "sum": [([(F64, X)], {"axes": axes}) for axes in ((1,), (2,), (1, 2), (0, 1))]
    + [([(F64, X)], {"axes": (2,), "keep": True})],
    "pad": [([(F64, X)], {"axis": -1, "before": 0, "after": 2, "value": -1.5})],
    "attention": [
        ([(F64, (2, 3, 12))], {"heads": 2}),
        ([(F64, (2, 2, 12)), (F64, (2, 3, 12))], {"heads": 2, "causal": True}),
    ],
    "conv2d": [
        ([(F64, IMAGE), (F64, (6, 2, 1, 1))], {"stride": (1, 1), "padding": (0, 0), "groups": 2})
    ],
    "pool2d": [
        ([(F64, IMAGE)], {"kind": "mean", "kernel": (2, 2), "stride": (2, 1), "padding": (1, 1)})
    ],
    "embedding": [([(F64, TABLE), (I32, IDS)], {"offset": 2})],
    "pick": [([(F64, X), (I32, IDS)], {"offset": 1})],
    "dispatch": [([(F64, X), (I32, IDS)], {"experts": 4, "capacity": 2})],
}
ALL = [(op, *case) for op in CASES for case in (CASES[op], *OPTIONS.get(op, []))]
DIFFERENTIABLE = [case for case in ALL if OPS[case[0]].gradient is not None]


def one_op(
    op: str, operands: list[tuple[str, tuple[int, ...]]], values: dict[str, object]
) -> Function:
    b = Builder(op)
    names = [
        b.parameter(f"x{k}", Tensor(dtype, shape)) for k, (dtype, shape) in enumerate(operands)
    ]
    types = OPS[op].infer(tuple(b.types[n] for n in names), dict(attributes(**values)))
    return b.build(b.emit(op, names, [f"y{k}" for k in range(len(types))], attributes(**values)))


def arrays(function: Function) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        p.name: rng.integers(0, 4, p.type.shape)
        if p.type.dtype == I32
        else rng.uniform(0.2, 2.0, p.type.shape)
        for p in function.parameters
        if p.type is not None
    }


def test_every_op_has_an_implementation() -> None:
    assert {name for name, op in OPS.items() if not op.collective} == set(KERNELS)


@pytest.mark.parametrize(("op", "operands", "values"), ALL, ids=[c[0] for c in ALL])
def test_types_are_those_of_the_results(op: str, operands: list, values: dict[str, object]) -> None:
    function = one_op(op, operands, values)
    found = execute_function(function, arrays(function))
    for name in function.outputs:
        assert found[name].shape == function.types[name].shape
        assert found[name].dtype.itemsize * found[name].size == function.types[name].n_bytes


@pytest.mark.parametrize(
    ("op", "operands", "values"), one_in(2, DIFFERENTIABLE), ids=[c[0] for c in DIFFERENTIABLE]
)
def test_gradients_are_jax_s(op: str, operands: list, values: dict[str, object]) -> None:
    function = one_op(op, operands, values)
    b = Builder("loss")
    for p in function.parameters:
        assert p.type is not None
        b.parameter(p.name, p.type)
    outputs = next(b.emit(i.op, i.inputs, i.outputs, i.attributes) for i in function.instructions)
    # weights that tell the elements of all outputs apart
    terms = []
    for k, name in enumerate(outputs):
        weight = b.parameter(f"weight{k}", Tensor(F64, b.types[name].shape))
        if b.types[name].dtype == I32:
            continue  # places have no gradient
        terms.append(b.op("sum", b.op("mul", name, weight), axes=tuple(range(b.types[name].rank))))
    loss = terms[0]
    for term in terms[1:]:
        loss = b.op("add", loss, term)
    forward = b.build([loss])
    wrt = [p.name for p in function.parameters if p.type is not None and p.type.dtype != I32]
    wrt = [name for name in wrt if not (op == "broadcast_like" and name == "x1")]
    values_of = arrays(forward)
    backward = gradient(forward, loss, wrt)
    found = execute_function(backward, values_of)

    types = tuple(function.types[n] for n in function.outputs)
    kernel, call = KERNELS[op], KernelCall(dict(attributes(**values)), types)
    with double_precision():

        def total(operand_values: dict[str, jax.Array]) -> jax.Array:
            own = [operand_values.get(p.name, values_of[p.name]) for p in function.parameters]
            result = kernel(*map(jax.numpy.asarray, own), call=call)
            results = result if isinstance(result, tuple) else (result,)
            return sum((r * values_of[f"weight{k}"]).sum() for k, r in enumerate(results))

        expected = jax.grad(total)({name: jax.numpy.asarray(values_of[name]) for name in wrt})
    for name, of in zip(backward.outputs[1:], wrt, strict=True):
        rtol = 1e-6 if backward.types[name].dtype == F32 else 1e-10
        np.testing.assert_allclose(found[name], expected[of], rtol=rtol, atol=1e-12)


def test_adam_is_optax_s() -> None:
    import optax

    function = one_op("adam", *CASES["adam"])
    v = arrays(function)
    found = execute_function(function, v)
    with double_precision():
        adam = optax.scale_by_adam(b1=0.9, b2=0.99, eps=1e-8)
        state = optax.ScaleByAdamState(count=jax.numpy.asarray(2), mu=v["x2"], nu=v["x3"])
        update, new = adam.update(jax.numpy.asarray(v["x1"]), state)
        new_weight = v["x0"] - np.float64(0.1) * update
    np.testing.assert_allclose(found["y0"], new_weight, rtol=1e-12)
    np.testing.assert_allclose(found["y1"], new.mu, rtol=1e-12)
    np.testing.assert_allclose(found["y2"], new.nu, rtol=1e-12)


def test_tokens_beyond_an_expert_s_capacity_are_dropped() -> None:
    b = Builder("drop")
    x, chosen = b.parameter("x", Tensor(F64, (4, 1))), b.parameter("chosen", Tensor(I32, (4,)))
    buffers = b.op("dispatch", x, chosen, experts=2, capacity=2)
    function = b.build([buffers, b.op("collect", buffers, chosen)])
    values = {"x": np.array([[1.0], [2.0], [3.0], [4.0]]), "chosen": np.array([1, 1, 0, 1])}
    found = execute_function(function, values)
    np.testing.assert_array_equal(found["dispatch"][:, :, 0], [[3, 0], [1, 2]])
    np.testing.assert_array_equal(found["collect"][:, 0], [1, 2, 3, 0])
