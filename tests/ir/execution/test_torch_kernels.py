"""Every kernel of PyTorch against JAX's: the same ops, the same numbers."""

import numpy as np
import pytest
from test_op_rules import CASES, OPTIONS, arrays, one_op

from perfmodel.ir import OPS, Builder, Function, Tensor, gradient
from perfmodel.ir.execution import KERNELS, execute_function
from perfmodel.ir.execution.torch_kernels import TORCH_KERNELS, torch_dtype, torch_kernel

ALL = [(op, *case) for op in CASES for case in (CASES[op], *OPTIONS.get(op, []))]


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed (extra: torch)")


def test_every_op_has_a_kernel() -> None:
    assert set(TORCH_KERNELS) == set(KERNELS)


def by_torch(torch, function: Function, arguments: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    types = function.types
    values = {n: torch.tensor(a, dtype=torch_dtype(types[n])) for n, a in arguments.items()}
    for i in function.instructions:
        kernel = torch_kernel(i, [types[n] for n in i.outputs], torch.device("cpu"))
        values.update(zip(i.outputs, kernel(*(values[n] for n in i.inputs)), strict=True))
    return {n: values[n].numpy() for n in function.outputs}


@pytest.mark.parametrize(("op", "operands", "values"), ALL, ids=[c[0] for c in ALL])
def test_it_computes_what_jax_does(
    torch, op: str, operands: list, values: dict[str, object]
) -> None:
    """Forward, and of what is differentiable the ops of its gradient."""
    function = one_op(op, operands, values)
    b = Builder(op)
    for p in function.parameters:
        assert p.type is not None
        b.parameter(p.name, p.type)
    outputs = list(
        next(b.emit(i.op, i.inputs, i.outputs, i.attributes) for i in function.instructions)
    )
    wrt = [p.name for p in function.parameters if p.type is not None and p.type.dtype != "int32"]
    if OPS[op].gradient is not None and op != "broadcast_like":
        terms = []
        for k, name in enumerate(outputs):
            # Indices, such as those of `top_k`, have no gradient and do not enter a loss.
            if b.types[name].dtype == "int32":
                continue
            weight = b.parameter(f"weight{k}", Tensor("fp64", b.types[name].shape))
            terms.append(
                b.op("sum", b.op("mul", name, weight), axes=tuple(range(b.types[name].rank)))
            )
        loss = terms[0]
        for term in terms[1:]:
            loss = b.op("add", loss, term)
        function = gradient(b.build([loss]), loss, wrt)
    arguments = arrays(function)
    expected = execute_function(function, arguments)
    for name, value in by_torch(torch, function, arguments).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-11)
