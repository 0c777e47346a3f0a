"""JAX functions: FLOPs against XLA's own count, loops, custom derivatives, collectives, what cannot
be mapped."""

import flax_gpt
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.ir.importers import read_sharded, trace
from perfmodel.spec import Job, Transformer
from perfmodel.workload import step_flops


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def counted(fn, *args):
    return jax.jit(fn).lower(*args).cost_analysis()["flops"]


@pytest.mark.usefixtures("compiled_anew")
def test_flax_training_step():
    step, args = flax_gpt.training_step()
    table = trace(step, *args)
    compiled = jax.jit(step).lower(*args).compile()
    assert table.flops == pytest.approx(compiled.cost_analysis()["flops"], rel=5e-3)
    assert table.matmul_flops == read_sharded(compiled).matmul_flops
    net = Transformer(
        name="gpt",
        layers=2,
        hidden=128,
        heads=4,
        kv_heads=4,
        head_dim=32,
        ffn_hidden=512,
        vocab=512,
        seq_len=64,
    )
    assert table.matmul_flops == step_flops(net, Job(global_batch=4, seq_len=64)).total
    assert table.unmapped == ()
    assert sum(k.op.family == "embedding" for k in table.kernels) == 4  # both tables, both ways


@pytest.mark.usefixtures("compiled_anew")
def test_compiled_module_counts_like_xla():
    step, args = flax_gpt.training_step(hidden=64, layers=1)
    compiled = jax.jit(step).lower(*args).compile()
    assert read_sharded(compiled).flops == pytest.approx(
        compiled.cost_analysis()["flops"], rel=1e-5
    )


def test_prediction():
    step, args = flax_gpt.training_step()
    estimate = trace(step, *args).predict("h100-sxm")
    assert 0 < estimate.step_time_lo_s < estimate.step_time_s < estimate.step_time_hi_s
    assert estimate.collective_time_s == 0
    with pytest.raises(UnknownNameError, match="unknown cluster or device"):
        trace(step, *args).predict("h1000")


def test_scan_counts_its_body_as_often_as_it_runs():
    def step(w, x):
        return jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0]

    def unrolled(w, x):
        for a in w:
            x = jnp.tanh(x @ a)
        return x

    args = struct(5, 16, 16), struct(8, 16)
    assert (
        trace(step, *args).matmul_flops
        == trace(unrolled, *args).matmul_flops
        == 5 * 2 * 8 * 16 * 16
    )
    gradient = jax.grad(lambda w, x: step(w, x).sum())
    assert trace(gradient, *args).matmul_flops == 3 * 5 * 2 * 8 * 16 * 16


def test_rematerialisation_repeats_the_forward_products():
    def layer(w, x):
        return jnp.sin(jnp.sin(x @ w[0]) @ w[1])

    args = struct(2, 16, 16), struct(8, 16)
    product = 2 * 8 * 16 * 16

    def gradient(f):
        return jax.value_and_grad(lambda w, x: f(w, x).sum())

    assert trace(gradient(layer), *args).matmul_flops == 5 * product
    assert trace(gradient(jax.checkpoint(layer)), *args).matmul_flops == 7 * product


def test_custom_derivatives_are_looked_into():
    @jax.custom_vjp
    def f(x, w):
        return x @ w

    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, dy: (dy @ kept[1].T, kept[0].T @ dy))
    args = struct(8, 16), struct(16, 4)
    assert trace(f, *args).matmul_flops == 2 * 8 * 16 * 4
    assert (
        trace(jax.grad(lambda x, w: f(x, w).sum(), argnums=(0, 1)), *args).matmul_flops
        == 2 * 2 * 8 * 16 * 4
    )
    assert trace(jax.nn.relu, struct(8, 16)).kernels[0].bytes == 2 * 8 * 16 * 4


@pytest.mark.parametrize(
    ("stride", "padding", "groups"), [(1, "SAME", 1), (2, "VALID", 1), (2, "SAME", 4)]
)
def test_convolutions_count_like_xla_padding_and_holes_left_out(stride, padding, groups):
    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (stride, stride),
            padding,
            feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

    args = struct(2, 9, 9, 8), struct(3, 3, 8 // groups, 16)
    assert trace(conv, *args).matmul_flops == counted(conv, *args)
    gradients = jax.grad(lambda x, w: conv(x, w).sum(), argnums=(0, 1))
    table = trace(gradients, *args)
    assert table.flops == pytest.approx(counted(gradients, *args), rel=1e-3)
    forward = trace(conv, *args).kernels[0].op
    assert (forward.c_in, forward.c_out, forward.k_h, forward.stride_h) == (8, 16, 3, stride)
    if stride > 1:
        passes = {k.op.pass_: k.op for k in table.kernels if k.op.family == "conv"}
        assert passes["dgrad"].stride_h == passes["wgrad"].stride_h == stride
        assert (passes["wgrad"].c_out, passes["wgrad"].k_h) == (16, 3)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.sort(x).sum(),
        jax.nn.softmax,
        lambda x: jax.nn.logsumexp(x, axis=-1),
        lambda x: x**3 / x,
        lambda x: jnp.where(x > 0, x, 2 * x),
        lambda x: jnp.var(x, axis=0),
        lambda x: jnp.argmax(x, axis=-1),
    ],
)
def test_element_wise_work_counts_like_xla(fn):
    x = struct(64, 32)
    assert trace(fn, x).flops == pytest.approx(counted(fn, x), rel=0.02, abs=64)


def test_products_of_fp32_run_on_tf32_units_unless_told_otherwise():
    args = struct(8, 16), struct(16, 4)
    dtype = {
        p: trace(lambda a, b, p=p: jnp.matmul(a, b, precision=p), *args).kernels[0].op.dtype
        for p in (None, "highest")
    }
    assert dtype == {None: "tf32", "highest": "fp32"}
    half = (struct(8, 16, dtype=jnp.bfloat16), struct(16, 4, dtype=jnp.bfloat16))
    assert trace(jnp.matmul, *half).kernels[0].op.dtype == "bf16"


def test_what_cannot_be_mapped_is_named_with_its_share():
    def f(x):
        y = jax.lax.while_loop(lambda a: a.sum() < 1e6, lambda a: a @ a, x)
        z = jax.lax.cond(x[0, 0] > 0, lambda a: a @ a + 1, lambda a: a, y)
        return jnp.linalg.cholesky(z) @ x

    table = trace(f, struct(32, 32))
    product = 2 * 32**3
    found = {u.name: u.flops for u in table.unmapped}
    assert found["while"] == product
    assert found["cond"] == product + 32 * 32
    assert found["cholesky"] == pytest.approx(32**3 / 3)
    assert table.matmul_flops == product
    assert table.unmapped_share == pytest.approx(sum(found.values()) / table.flops)
    assert set(table.to_frame().query("role == 'unmapped'")["source"].str.split(":").str[0]) >= set(
        found
    )
    assert "while" not in {u.name for u in trace(f, struct(32, 32), trip_count=7).unmapped}
    assert trace(f, struct(32, 32), trip_count=7).matmul_flops == 8 * product


def test_collectives_inside_shard_map():
    mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "tp"))
    spec = jax.sharding.PartitionSpec

    def f(x, w):
        y = jax.lax.psum(x @ w, "tp")
        return jax.lax.ppermute(y, "dp", [(0, 1), (1, 0)])

    sharded = jax.shard_map(
        f,
        mesh=mesh,
        in_specs=(spec("dp", "tp"), spec("tp", None)),
        out_specs=spec("dp", None),
        check_vma=False,
    )
    table = trace(sharded, struct(16, 32), struct(32, 8))
    assert table.matmul_flops == 2 * 8 * 8 * 8  # of one device
    assert {(c.collective, c.bytes, c.num_ranks, len(c.groups)) for c in table.collectives} == {
        ("all_reduce", 8 * 8 * 4, 4, 2),
        ("send_recv", 8 * 8 * 4, 2, 8),
    }
    assert table.n_devices == 8


def test_dimensions_must_be_numbers():
    (n,) = jax.export.symbolic_shape("n")
    with pytest.raises(PerfModelError, match="every dimension as a number"):
        trace(jnp.sin, jax.ShapeDtypeStruct((n, 4), np.float32))


def test_callbacks_are_named_though_nothing_uses_them():
    def f(x):
        jax.debug.callback(lambda a: None, x)
        return x + 1

    assert [u.name for u in trace(f, struct(4)).unmapped] == ["debug_callback"]
