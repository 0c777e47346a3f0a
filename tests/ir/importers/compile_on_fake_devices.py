"""Run with `--xla_force_host_platform_device_count=8`: writes compiled modules and XLA's counts to
a folder."""

import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import sharded_gpt
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MESH = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def every_collective():
    @jax.jit
    @partial(
        jax.shard_map, mesh=MESH, in_specs=P("dp", "tp"), out_specs=P("dp", "tp"), check_vma=False
    )
    def f(x):
        gathered = jax.lax.all_gather(x, "tp")
        scattered = jax.lax.psum_scatter(gathered, "tp", scatter_dimension=0)
        exchanged = jax.lax.all_to_all(gathered, "dp", 0, 0, tiled=True).sum(0)
        passed_on = jax.lax.ppermute(x, "tp", [(i, (i + 1) % 4) for i in range(4)])
        return (
            jax.lax.psum(x, "tp")
            + scattered
            + exchanged
            + passed_on
            + jax.lax.pmax(x, ("dp", "tp"))
        )

    return f.lower(jax.ShapeDtypeStruct((64, 128), jnp.float32)).compile()


def half_precision_scan():
    """Tensor-parallel feed-forward layers in bf16 under `scan`, trained with data parallelism."""

    def sharding(*axes):
        return NamedSharding(MESH, P(*axes))

    def loss(w, x):
        x, _ = jax.lax.scan(lambda h, ab: (h + jax.nn.gelu(h @ ab[0]) @ ab[1], None), x, w)
        return (x.astype(jnp.float32) ** 2).mean()

    def step(w, x):
        value, gradients = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, gradients), value

    shapes = ((3, 64, 256), sharding(None, None, "tp")), ((3, 256, 64), sharding(None, "tp", None))
    w = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=s) for shape, s in shapes)
    x = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16, sharding=sharding("dp", None))
    return jax.jit(step, out_shardings=(tuple(s for _, s in shapes), None)).lower(w, x).compile()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    counted = {}
    for name, compiled in (
        ("gpt", sharded_gpt.compiled_step()),
        ("every_collective", every_collective()),
        ("half_precision_scan", half_precision_scan()),
    ):
        (folder / f"{name}.hlo").write_text(compiled.as_text())
        counted[name] = compiled.cost_analysis()["flops"]
    (folder / "flops.json").write_text(json.dumps(counted))
