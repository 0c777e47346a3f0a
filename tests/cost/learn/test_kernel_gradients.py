"""The regressors differentiate with respect to shapes and device figures.

Sizes are odd: alignment flags and tile counts are constant around them, as differentiation takes
them.
"""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thinned import one_in

from perfmodel.catalog import device
from perfmodel.cost.learn import PriceQuery, Query, Regressor, load_regressor, shipped_folder
from perfmodel.cost.learn.parameters import Inputs, log_time_and_positions
from perfmodel.cost.learn.rows import machine_of, one_hot, rows_from_ops, shape_with_flags
from perfmodel.cost.learn.stack import Figures
from perfmodel.ops import Attention, Gemm, KernelOp, MemoryBound

CASES = {
    "gemm_half": (Gemm(m=1001, n=3001, k=3001), ("m", "n", "k")),
    "attention": (
        Attention(batch=2, heads=32, kv_heads=8, seq_q=2040, seq_kv=2040, head_dim=128),
        ("seq_kv", "batch"),
    ),
    "memory": (MemoryBound(op="add", rows=3001, hidden=1501, n_inputs=2), ("rows", "hidden")),
}


def regressor_inputs(name: str, op: KernelOp) -> tuple[Regressor, Inputs]:
    """A shipped regressor and one op on a device that it was fitted on."""
    regressor = load_regressor(Path(shipped_folder()) / f"{name}.safetensors")
    rows = rows_from_ops([op])
    stack = next(
        s
        for s, kind in regressor.groups
        if kind == rows.kinds[0] and "A100" in regressor.stacks[s].key
    )
    machine = machine_of([regressor.stacks[stack].figures], np.zeros(1, int), rows.dtypes)
    group = regressor.groups.index((stack, rows.kinds[0]))
    code = one_hot(regressor.code, rows)
    return regressor, Inputs(
        shape_with_flags(rows), machine, code, np.array([stack]), np.array([group])
    )


@pytest.mark.parametrize("name", one_in(3, CASES))
def test_gradients_equal_finite_differences(name: str) -> None:
    op, columns = CASES[name]
    regressor, inputs = regressor_inputs(name, op)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), regressor.params)

        @jax.jit
        def log_time(shape: dict, machine: tuple) -> jax.Array:
            changed = inputs._replace(
                shape={**inputs.shape, **shape}, machine=type(inputs.machine)(*machine)
            )
            return log_time_and_positions(params, changed, family=regressor.family, xp=jnp)[0][0]

        shape = {c: jnp.asarray(inputs.shape[c], jnp.float64) for c in columns}
        machine = tuple(jnp.asarray(m, jnp.float64).reshape(-1) for m in inputs.machine)
        by_shape, by_machine = jax.grad(log_time, argnums=(0, 1))(shape, machine)
        for column in columns:
            step = 1e-5 * shape[column]
            up, down = ({**shape, column: shape[column] + sign * step} for sign in (1, -1))
            slope = (log_time(up, machine) - log_time(down, machine)) / (2 * step[0])
            np.testing.assert_allclose(by_shape[column][0], slope, rtol=1e-3, atol=1e-9)
        for i in range(2):  # peak rate and bandwidth
            step = 1e-5 * machine[i]
            up, down = (
                tuple(m + sign * step if j == i else m for j, m in enumerate(machine))
                for sign in (1, -1)
            )
            slope = (log_time(shape, up) - log_time(shape, down)) / (2 * step[0])
            np.testing.assert_allclose(
                by_machine[i][0] * machine[i][0], slope * machine[i][0], rtol=1e-3, atol=1e-8
            )


@pytest.mark.parametrize("name", one_in(3, CASES))
def test_jax_and_numpy_predict_alike(name: str) -> None:
    op, _ = CASES[name]
    regressor, inputs = regressor_inputs(name, op)
    ours = log_time_and_positions(regressor.params, inputs, family=regressor.family)[0]
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, regressor.params)
        theirs = log_time_and_positions(params, inputs, family=regressor.family, xp=jnp)[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_one_trace_serves_every_batch_of_a_size() -> None:
    regressor, inputs = regressor_inputs("gemm_half", CASES["gemm_half"][0])
    params = jax.tree.map(jnp.asarray, regressor.params)
    traces = []

    @jax.jit
    def log_time(shape: dict) -> jax.Array:
        traces.append(1)
        return log_time_and_positions(params, inputs._replace(shape=shape), family="gemm", xp=jnp)[
            0
        ]

    for m in (128.0, 256.0, 1000.0):
        log_time({**inputs.shape, "m": np.array([m])})
    assert len(traces) == 1


def test_more_bandwidth_never_slows_a_memory_bound_kernel() -> None:
    a = Figures.of(device("A100-SXM4-40GB"))
    regressor, inputs = regressor_inputs("memory", CASES["memory"][0])
    faster = inputs._replace(machine=inputs.machine._replace(bandwidth=np.array([2 * a.bandwidth])))
    slower = inputs._replace(machine=inputs.machine._replace(bandwidth=np.array([a.bandwidth / 2])))
    fast = log_time_and_positions(regressor.params, faster, family="memory")[0]
    slow = log_time_and_positions(regressor.params, slower, family="memory")[0]
    assert fast < slow


def test_measured_shapes_alone_are_answered_where_few_backward_rows_exist() -> None:
    """Of A100 PCIe few backward passes of attention are measured: those answer for themselves,
    others by their die."""
    regressor = load_regressor(Path(shipped_folder()) / "attention.safetensors")
    stack = next(s for s in regressor.stacks if s.key.startswith("A100-PCIE-80GB|simumax"))
    query = Query(stack.figures, stack.source, stack.software)
    measured = Attention(
        batch=1, heads=32, kv_heads=8, seq_q=4096, seq_kv=4096, head_dim=128, pass_="bwd"
    )
    far = replace(measured, batch=40, seq_q=640, seq_kv=640)
    alone = regressor.predict(PriceQuery(rows_from_ops([measured]), (query,), np.zeros(1, int)))
    both = regressor.predict(PriceQuery(rows_from_ops([measured, far]), (query,), np.zeros(2, int)))
    assert alone.provenance[0] == 0 < both.provenance[1]
    np.testing.assert_allclose(both.log_time[0], alone.log_time[0])
