"""The differentiable step time: descent on a layout's continuous parameters, and gradients against
predictions.

GPT-3 175B on 1,024 A100: 16 stages of 8-way tensor parallelism, 192 micro-batches; unknown are the
layers of every stage, the size of a micro-batch, and how a budget is spent on the links inside and
between nodes.
"""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import entry

import perfmodel as pm

MODEL = "gpt3-175b"
CLUSTER = "dgx-a100"
LAYOUT = "tp=8,pp=16,dp=8"
BATCH = 1536
STEPS = 2000
LAYERS = 96


def run() -> dict[str, dict[str, object]]:
    """Seconds to compile and to run 2,000 steps, what they save, and one gradient against the
    predictions of central differences."""
    began = time.perf_counter()
    function = pm.step_time_function(MODEL, CLUSTER, LAYOUT, global_batch=BATCH)
    prices_s = time.perf_counter() - began
    nominal, (low, high) = function.nominal, function.bounds

    def parameters(free):
        """Layers that add up, a size between its bounds, bandwidths whose multiples add up to 2."""
        # Free coordinates, so that descent needs no constraints.
        span = high.micro_batch - low.micro_batch
        links = 2 * jax.nn.softmax(free["links"])
        return nominal._replace(
            layers=LAYERS * jax.nn.softmax(free["layers"]),
            micro_batch=low.micro_batch + span * jax.nn.sigmoid(free["micro_batch"]),
            link_bytes_per_s=nominal.link_bytes_per_s * links,
        )

    optimizer = optax.adam(optax.cosine_decay_schedule(0.02, STEPS))
    free = {"layers": jnp.zeros(16), "micro_batch": jnp.zeros(()), "links": jnp.zeros(2)}

    @jax.jit
    def descend(free):
        """Coordinates after all steps, in one compiled loop."""

        def step(_, carry):
            """One step of Adam."""
            free, state = carry
            gradient = jax.grad(lambda f: function(parameters(f)))(free)
            update, state = optimizer.update(gradient, state)
            return optax.apply_updates(free, update), state

        return jax.lax.fori_loop(0, STEPS, step, (free, optimizer.init(free)))[0]

    # Compiling and running are timed apart: a user waits for the first once.
    began = time.perf_counter()
    began_cpu = time.process_time()
    compiled = descend.lower(free).compile()
    compile_s = time.perf_counter() - began
    compile_cpu_s = time.process_time() - began_cpu
    began = time.perf_counter()
    best = jax.block_until_ready(compiled(free))
    descent_s = time.perf_counter() - began
    nominal_s = float(function(nominal))
    best_s = float(function(parameters(best)))

    # Each prediction is of a machine of its own, as differences need it.
    began = time.perf_counter()
    for factor in np.linspace(0.9, 1.1, 5):
        cluster = pm.cluster(CLUSTER)
        inner, outer = cluster.levels
        slower = replace(outer, latency_s=outer.latency_s * float(factor))
        machine = replace(cluster, levels=(inner, slower))
        pm.predict(MODEL, machine, LAYOUT, global_batch=BATCH)
    predict_s = (time.perf_counter() - began) / 5
    n = sum(np.size(leaf) for leaf in jax.tree.leaves(nominal))
    gradient_s = descent_s / STEPS
    return {
        "step_function_prices": entry(prices_s, "nothing known before", "s", "<= 5"),
        "step_function_compile": entry(
            compile_s, f"{compile_cpu_s:.1f} s of processors", "s", "<= 20"
        ),
        "step_function_2000_steps": entry(descent_s, f"{n} parameters, 19 unknowns", "s", "<= 10"),
        "step_function_descent_saves": entry(
            1 - best_s / nominal_s, "even stages, links as they are", "share", ">= 0"
        ),
        # Central differences take two predictions for each parameter.
        "step_function_gradient": entry(
            2 * n * predict_s / gradient_s,
            f"central differences of predict, {n} parameters",
            "x time",
            ">= 100",
        ),
    }
