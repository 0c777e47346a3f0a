"""Element-wise chains as kernels: which tensors they read and write."""

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.ir.importers import trace

X = jax.ShapeDtypeStruct((64, 128), jnp.float32)
SIZE = 64 * 128 * 4


def traffic(fn, *args):
    return [k.bytes for k in trace(fn, *args).kernels for _ in range(int(k.count))]


@given(
    st.lists(
        st.sampled_from([jnp.sin, jnp.tanh, jnp.abs, jnp.negative, lambda x: x * 2 + 1]),
        min_size=1,
        max_size=9,
    )
)
def test_a_chain_reads_once_and_writes_once(steps):
    def chain(x):
        for step in steps:
            x = step(x)
        return x

    (n_bytes,) = traffic(chain, X)
    assert n_bytes == 2 * SIZE


def test_a_tensor_used_twice_is_read_once_and_a_bias_costs_its_own_size():
    bias = jax.ShapeDtypeStruct((128,), jnp.float32)
    assert traffic(lambda x, b: jnp.sin(x) * x + b, X, bias) == [2 * SIZE + 128 * 4]


def test_views_are_free():
    assert traffic(lambda x: jnp.tanh(x.reshape(128, 64).T)[:, :64], X) == [2 * SIZE]
    assert traffic(lambda x: x.T, X) == []
    half = traffic(lambda x: jnp.sin(x[:32]), X)
    assert half == [SIZE]


def test_softmax_is_three_passes():
    """Maximum; exponentials and their sum; quotient."""
    row = 64 * 4
    passes = sorted(traffic(lambda x: jax.nn.softmax(x), X))
    assert passes == sorted([SIZE + row, 2 * SIZE + 2 * row, 2 * SIZE + row])


def test_chains_do_not_reach_across_a_product():
    """sin(x) feeds both the product and what follows it: one kernel before, one after."""
    w = jax.ShapeDtypeStruct((128, 128), jnp.float32)

    def f(x, w):
        y = jnp.sin(x)
        return (y @ w) * y

    kernels = trace(f, X, w).kernels
    assert sorted(k.source for k in kernels) == ["dot_general", "mul", "sin"]
    assert [k.bytes for k in kernels if k.source == "mul"] == [3 * SIZE]


def test_what_only_a_late_chain_needs_is_computed_there():
    """x * 2 waits for the product: it never goes to memory."""
    w = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    sources = {k.source for k in trace(lambda x, w: (x @ w) + x * 2, X, w).kernels}
    assert sources == {"dot_general", "mul+add"} or sources == {"dot_general", "add+mul"}


def test_dead_code_is_not_counted():
    def f(x):
        jnp.dot(x.T, x)
        return x + 1

    assert traffic(f, X) == [2 * SIZE]


def test_the_timed_kernel_moves_the_bytes_of_the_chain():
    for kernel in trace(lambda x: jax.nn.softmax(jnp.sin(x)), X).kernels:
        assert abs(kernel.op.bytes - kernel.bytes) <= 2 * 128 * 4
