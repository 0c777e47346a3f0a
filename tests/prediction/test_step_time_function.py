"""The differentiable step time against the public prediction: value, derivatives, whole choices,
compilation."""

import os
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import perfmodel as pm
from perfmodel.errors import PerfModelError
from perfmodel.prediction import layout_of, step_problem_of, step_times_s
from perfmodel.prediction.differentiable import _function, greatest, step_time_function_of
from perfmodel.prediction.memory import needed_memory
from perfmodel.prediction.sites import Adjustment
from perfmodel.timeline import double_precision

_H = 1e-5
MODELS = {
    "gpt2-345m": ("dgx-a100", 2048),
    "gpt3-6.7b": ("dgx-a100", 2048),
    "llama3-8b": ("dgx-h100", 2048),
    "mixtral-8x7b": ("dgx-h100", 2048),
    "gpt-oss-20b": ("dgx-h100", 2048),
}
SCHEDULES = (
    "gpipe",
    "1f1b",
    "interleaved,vpp=2",
    "zb-h1",
    "zb-v",
    "chimera",
    "dualpipe",
    "pipedream",
)


def predicted_s(problem, layout):
    return float(step_times_s(problem, [layout])[0])


def moves(problem, families):
    """By parameter, the problem with it `by` times as large, and where its derivative is in
    `StepParameters`."""
    cluster, device, framework = problem.cluster, problem.cluster.device, problem.framework

    def on(**changes):
        return replace(problem, cluster=replace(cluster, **changes))

    def level(i, name, by):
        moved = replace(cluster.levels[i], **{name: getattr(cluster.levels[i], name) * by})
        return on(levels=(*cluster.levels[:i], moved, *cluster.levels[i + 1 :]))

    def peak(name, by):
        return on(
            device=replace(
                device, peak=replace(device.peak, **{name: getattr(device.peak, name) * by})
            )
        )

    memory_s = device.memory_bandwidth_bytes_per_s
    adjustment = problem.adjustment or Adjustment(device=device.name, values=())
    found = {
        "memory": (
            lambda by: on(device=replace(device, memory_bandwidth_bytes_per_s=memory_s * by)),
            lambda g: g.memory_bytes_per_s,
        )
    }
    for name in ("bf16", "fp32"):
        found[name] = lambda by, n=name: peak(n, by), lambda g, n=name: g.compute_flops_per_s[n]
    for i in range(2):
        found[f"bandwidth {i}"] = (
            lambda by, i=i: level(i, "bandwidth_bytes_per_s", by),
            lambda g, i=i: g.link_bytes_per_s[i],
        )
        found[f"latency {i}"] = (
            lambda by, i=i: level(i, "latency_s", by),
            lambda g, i=i: g.link_latency_s[i],
        )
    for name in ("host_op_s", "kernel_gap_s"):
        found[name] = (
            lambda by, n=name: replace(
                problem, framework=framework.replace(**{n: framework.value(n) * by})
            ),
            lambda g, n=name: getattr(g, n),
        )
    for name in families:
        found[f"{name} kernels"] = (
            lambda by, n=name: problem.adjusted(adjustment.moved(n, float(np.log(by)))),
            lambda g, n=name: g.kernel_factor[n],
        )
    return found


def compare(model, text, global_batch=22, **words):
    """Of 11 micro-batches a replica: no other size divides them, so that one program is compiled
    and not three."""
    cluster, seq_len = MODELS[model]
    problem = pm.problem(model, cluster, global_batch=global_batch, seq_len=seq_len, **words)
    step, layout = step_problem_of(problem), layout_of(problem, text)[0]
    function = step_time_function_of(step, layout)
    nominal = function.nominal
    with double_precision():
        value, gradient = jax.tree.map(np.asarray, jax.value_and_grad(function)(nominal))
        quick_value, quick_gradient = function.value_and_grad(nominal)

    # Other compiler options change no more than the order of sums.
    assert float(quick_value) == pytest.approx(float(value), rel=1e-12)
    for quick, full in zip(jax.tree.leaves(quick_gradient), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(quick, full, rtol=1e-9, atol=1e-12 * np.abs(full).max())
    expected_s = predicted_s(step, layout)
    assert float(value) == pytest.approx(expected_s, rel=1e-12)
    parameters = moves(step, nominal.kernel_factor)
    assert len(parameters) >= 12
    for name, (moved, of) in parameters.items():
        up_s, down_s = (predicted_s(moved(by), layout) for by in (np.exp(_H), np.exp(-_H)))
        elasticity = float(of(gradient)) * float(of(nominal)) / expected_s
        assert elasticity == pytest.approx((up_s - down_s) / (2 * _H) / expected_s, abs=1e-6), name


def test_gradient_is_that_of_the_prediction():
    compare("gpt2-345m", "tp=2,pp=2,dp=2,zero=1")


@pytest.mark.skipif(
    "PERFMODEL_FULL_GRID" not in os.environ, reason="minutes of compiling: make grid"
)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_gradient_is_that_of_the_prediction_everywhere(model, schedule):
    compare(model, f"pp=4,dp=2,tp=2,sequence_parallel=true,schedule={schedule}", global_batch=24)


@pytest.mark.parametrize(
    ("model", "more_layers", "dtypes"),
    [
        ("gpt2-345m", ",partition=9-15", ("bf16",)),
        pytest.param("llama3-8b", ",partition=14-18", ("bf16", "fp8"), marks=pytest.mark.slow),
    ],
)
def test_whole_choices_are_those_of_the_prediction(model, more_layers, dtypes):
    cluster, _ = MODELS[model]
    job = {"global_batch": 16, "seq_len": 1024}
    text = "tp=2,pp=2,dp=2,zero=1,offload_states=optimizer"
    function = pm.step_time_function(model, cluster, text, **job)
    half = int(function.nominal.layers[0])
    whole = {
        "": {},
        more_layers: {"layers": np.array(more_layers.partition("=")[2].split("-"), float)},
        ",recompute_full_layers=4-0": {"recompute": np.array([4 / half, 0.0])},
        ",recompute=full": {"recompute": np.ones(2)},
        ",micro_batch=2": {"micro_batch": 2.0},
    }
    for more, changed in whole.items():
        for dtype in dtypes:
            expected = pm.predict(model, cluster, text + more, dtype=dtype, **job)
            there = function.nominal._replace(**changed, fp8=float(dtype == "fp8"))
            with double_precision():
                found_s, found_bytes = (
                    float(function(there)),
                    np.asarray(function.memory_bytes(there)),
                )
            assert found_s == pytest.approx(expected.step_time_s, rel=1e-9), (more, dtype)
            assert found_bytes.max() == pytest.approx(expected.memory_needed_bytes, rel=1e-12), (
                more,
                dtype,
            )
    inside = function.bounds
    assert (inside.low.micro_batch, inside.high.micro_batch) == (1, 2)
    assert inside.high.offload == 0
    assert jax.tree.all(
        jax.tree.map(
            lambda a, x, b: (a <= x).all() and (x <= b).all(),
            inside.low,
            function.nominal,
            inside.high,
        )
    )


@pytest.mark.slow
def test_the_derivative_by_layers_is_that_of_the_next_layer_where_layers_differ():
    """Four dense layers, then experts: the cut between the stages lies where they change."""
    experts = replace(pm.model("qwen3-30b-a3b").experts, first_dense_layers=4)
    model = replace(pm.model("qwen3-30b-a3b"), name="two kinds", layers=8, experts=experts)
    job = {"global_batch": 22, "seq_len": 512}
    function = pm.step_time_function(model, "dgx-h100", "tp=2,pp=2,dp=2", **job)
    x, h = function.nominal, 0.01
    assert x.layers.tolist() == [4.0, 4.0]

    def moved_s(by):
        return float(function(x._replace(layers=x.layers + by * np.array([1.0, 0.0]))))

    with double_precision():
        above, below = (moved_s(h) - moved_s(0.0)) / h, (moved_s(0.0) - moved_s(-h)) / h
        slopes = jax.tree.map(np.asarray, function.layer_slopes(x))
        gradient = np.asarray(jax.grad(function)(x).layers)
    assert abs(above / below - 1) > 0.05  # an expert layer and a dense one
    assert slopes.above[0] == gradient[0] == pytest.approx(above, rel=1e-6)
    assert slopes.below[0] == pytest.approx(below, rel=1e-6)


def test_transforms_and_one_compilation():
    job = {"global_batch": 22, "seq_len": 1024}
    function = pm.step_time_function("gpt2-345m", "dgx-a100", "tp=2,pp=2,dp=2", **job)
    value_s = float(function(function.nominal))
    predicted = pm.predict("gpt2-345m", "dgx-a100", "tp=2,pp=2,dp=2", **job)
    assert value_s == pytest.approx(predicted.step_time_s, rel=1e-5)  # in single precision
    before = _function._compiled_step_s._cache_size()
    assert float(function(function.nominal._replace(kernel_gap_s=np.float64(0.0)))) < value_s
    # the same programs on another cluster, for longer sequences
    slower = replace(pm.cluster("dgx-a100"), levels=pm.cluster("v100-100g").levels)
    for other in (
        pm.step_time_function(
            "gpt2-345m", "dgx-a100", "tp=2,pp=2,dp=2", global_batch=22, seq_len=512
        ),
        pm.step_time_function("gpt2-345m", slower, "tp=2,pp=2,dp=2", **job),
    ):
        assert float(other(other.nominal)) != value_s
    assert _function._compiled_step_s._cache_size() == before

    x = function.nominal
    many = jax.tree.map(lambda v: np.stack([v, v]), x)
    np.testing.assert_allclose(jax.vmap(function)(many), value_s, rtol=1e-6)

    def in_rates(log):
        rates = x.link_bytes_per_s * jnp.exp(log[:2])
        return function(
            x._replace(
                link_bytes_per_s=rates, memory_bytes_per_s=x.memory_bytes_per_s * jnp.exp(log[2])
            )
        )

    hessian = jax.jit(jax.hessian(in_rates))(jnp.zeros(3))
    assert np.isfinite(hessian).all()
    assert hessian[0, 0] > 0  # volume / bandwidth is convex
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-3, atol=1e-6)


def test_a_step_that_waits_for_its_samples_has_no_gradient() -> None:
    """Also where the quickly compiled one is traced inside another function, which takes no
    compiler options."""
    job = {"global_batch": 22, "seq_len": 512}
    late = pm.step_time_function(
        "gpt2-345m", "dgx-a100", "pp=2,dp=2", input_samples_per_s=1.0, **job
    )
    step_s, gradient = late.value_and_grad(late.nominal)
    assert float(step_s) == 22.0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    traced_s, traced_gradient = jax.eval_shape(late.value_and_grad, late.nominal)
    assert traced_s.shape == ()
    assert jax.tree.map(np.shape, traced_gradient) == jax.tree.map(np.shape, gradient)


def test_generation_moves_the_step_and_none_of_its_gradients() -> None:
    job = {"global_batch": 16, "seq_len": 512}
    training = pm.step_time_function("gpt2-345m", "dgx-a100", "dp=4", **job)
    both = pm.step_time_function("gpt2-345m", "dgx-a100", "dp=4", generation_s=7.0, **job)
    training_s, gradient = training.value_and_grad(training.nominal)
    step_s, same_gradient = both.value_and_grad(both.nominal)
    assert float(step_s) == pytest.approx(float(training_s) + 7.0)
    assert float(both(both.nominal)) == pytest.approx(float(step_s))
    jax.tree.map(np.testing.assert_array_equal, gradient, same_gradient)


def test_compilers_without_the_quick_options_compile_fully(monkeypatch: pytest.MonkeyPatch) -> None:
    function = pm.step_time_function(
        "gpt2-345m", "dgx-a100", "pp=2,dp=2", global_batch=22, seq_len=512
    )
    unknown = jax.jit(
        lambda programs, data, x: (x.micro_batch, x),
        static_argnums=0,
        compiler_options={"xla_no": 1},
    )
    monkeypatch.setattr(_function, "_quickly_compiled_step_and_grad", unknown)
    monkeypatch.setattr(
        _function, "_compiled_step_and_grad", lambda programs, data, x: (jnp.float32(3.0), x)
    )
    assert function.value_and_grad(function.nominal) == (3.0, function.nominal)


def test_optax_deals_layers_to_a_stage_with_a_head():
    function = pm.step_time_function(
        "gpt2-345m", "dgx-a100", "pp=2,dp=2", global_batch=22, seq_len=512
    )
    x = function.nominal
    optimizer = optax.adam(0.1)

    @jax.jit
    def step(shift, state):
        def loss(shift):
            return function(x._replace(layers=x.layers + shift * np.array([1.0, -1.0])))

        value, gradient = jax.value_and_grad(loss)(shift)
        update, state = optimizer.update(gradient, state)
        return shift + update, state, value

    shift = jnp.zeros(())
    state = optimizer.init(shift)
    for _ in range(60):
        shift, state, value = step(shift, state)
    whole = {
        n: pm.predict(
            "gpt2-345m",
            "dgx-a100",
            f"pp=2,dp=2,partition={n}-{24 - n}",
            global_batch=22,
            seq_len=512,
        ).step_time_s
        for n in range(11, 16)
    }
    assert float(value) < min(whole.values())
    assert abs(12 + float(shift) - min(whole, key=whole.__getitem__)) < 1


def test_recompute_frees_what_the_memory_model_says():
    problem = pm.problem("gpt2-345m", "dgx-a100", global_batch=22, seq_len=512)
    function = pm.step_time_function(problem, layout="pp=2,dp=2")

    def rank_0(share):
        return function.memory_bytes(
            function.nominal._replace(recompute=jnp.stack([share, jnp.zeros(())]))
        )[0]

    four, five = (
        needed_memory(
            step_problem_of(problem),
            layout_of(problem, f"pp=2,dp=2,recompute_full_layers={n}-0")[0],
        )[0].peak
        for n in (4, 5)
    )
    with double_precision():
        slope = jax.grad(rank_0)(jnp.asarray(4.5 / 12))
    assert float(slope) / 12 == pytest.approx(five - four, rel=1e-9)
    assert five < four < function.usable_bytes


@pytest.mark.parametrize(
    "make",
    [
        lambda x: pm.predict("gpt2-345m", "dgx-a100", "dp=8", global_batch=8 * x),
        lambda x: pm.predict("gpt2-345m", "dgx-a100", pm.Layout(micro_batch=x), global_batch=8),
        lambda x: replace(pm.device("A100-SXM4-80GB"), memory_bandwidth_bytes_per_s=x),
        lambda x: replace(pm.cluster("dgx-a100").levels[0], latency_s=x),
    ],
)
def test_what_is_traced_is_told_where_to_go(make):
    with pytest.raises(PerfModelError, match=r"traced by JAX.*step_time_function") as error:
        jax.jit(make)(1.0)
    assert "\n" not in str(error.value)


def test_the_slope_of_the_greatest_value_is_that_of_the_first() -> None:
    values = np.array([1.0, 3.0, 3.0, 2.0])
    value, slope = jax.value_and_grad(greatest)(values)
    assert (value, slope.tolist()) == (3.0, [0.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("chosen", [False, True])
def test_long_compilations_are_kept_where_the_process_has_not_chosen_a_folder(
    chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no setting of JAX beside the folder changes."""
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path))
    before = dict(jax.config.values)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own") if chosen else None)
    try:
        pm.step_time_function("gpt3-125m", "dgx-a100", "dp=8", global_batch=8)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / ("own" if chosen else "xla"))
    finally:
        jax.config.update("jax_compilation_cache_dir", before["jax_compilation_cache_dir"])
    assert dict(jax.config.values) == before
