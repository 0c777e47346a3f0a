"""Serving: closed forms, laws, limits, memory; published servers stay as well predicted as
validate/serving.md says."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import compared

import perfmodel as pm
from perfmodel import catalog
from perfmodel.serving import Serving
from perfmodel.spec import Framework
from perfmodel.workload import layer_cache_bytes, parameter_count

SERVED: dict[str, Any] = {"prompt_tokens": 1000, "output_tokens": 100}
SCATTER = 1.05
"""Measured kernels next to each other are not in perfect order."""


def serve(
    model: str = "llama3-8b", cluster: Any = "dgx-h100", layout: str = "tp=1", **words: Any
) -> Serving:
    return pm.serve(model, cluster, layout, **(SERVED | words))


def read_bytes(serving: Serving) -> float:
    """What a device has to read for one token of every request: its weights but for the embedding's
    table, and the cache."""
    model, requests = catalog.model(serving.model), serving.requests
    assert isinstance(model, pm.Transformer)
    tp = serving.layout.tp
    weights = (
        parameter_count(model) - model.vocab * model.hidden * (1 + (not model.head.tied_embeddings))
    ) / tp
    context = requests.prompt_tokens + requests.output_tokens // 2
    return weights * 2.0 + requests.batch * sum(layer_cache_bytes(model, tp, context, 2.0))


@pytest.mark.parametrize(
    ("model", "cluster", "layout"),
    [
        ("llama3-8b", "dgx-h100", "tp=1"),
        ("llama3-70b", "dgx-h100", "tp=8"),
        ("llama2-7b", "dgx-a100", "tp=1"),
        ("llama3-8b", "l40s-x8", "tp=1"),
        ("llama3-8b", "hgx-b200", "tp=1"),
        ("llama3-8b", "mi300x-platform", "tp=1"),
    ],
)
@pytest.mark.parametrize("batch", [1, 16])
def test_a_token_takes_no_less_than_reading_weights_and_cache(
    model: str, cluster: str, layout: str, batch: int
):
    found = serve(model, cluster, layout, batch=batch)
    least_s = read_bytes(found) / catalog.cluster(cluster).device.memory_bandwidth_bytes_per_s
    assert found.decode_step_s >= least_s
    # batch 1 is bound by memory: within what kernels reach of the bandwidth, launches and small
    # collectives
    assert found.decode_step_s < 3.5 * least_s


def test_cache_of_known_models():
    """Llama 3 8B: 2 * 8 heads * 128 * 2 bytes * 32 layers = 128 KiB a token; DeepSeek-V3: (512 +
    64) * 2 bytes * 61 = 68.6 KiB, a rank of tensor parallelism holding all of it (arXiv 2412.19437,
    section 2.1.1)."""
    llama, deepseek = catalog.model("llama3-8b"), catalog.model("deepseek-v3")
    assert isinstance(llama, pm.Transformer)
    assert isinstance(deepseek, pm.Transformer)
    assert sum(layer_cache_bytes(llama, 1, 1, 2.0)) == 128 * 1024
    assert sum(layer_cache_bytes(llama, 8, 1, 2.0)) == 16 * 1024
    assert sum(layer_cache_bytes(llama, 16, 1, 2.0)) == 16 * 1024  # heads are copied
    assert sum(layer_cache_bytes(deepseek, 8, 1, 2.0)) == 576 * 2 * 61


def test_a_window_bounds_the_cache():
    model = catalog.model("gpt-oss-20b")  # every other layer slides over 128 tokens
    assert isinstance(model, pm.Transformer)
    per_layer = layer_cache_bytes(model, 1, 4096, 1.0)
    assert per_layer[0] == per_layer[1] * 128 / 4096
    assert len(per_layer) == model.layers


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["llama3-8b", "gpt-oss-20b", "mixtral-8x7b"]),
    st.integers(1, 200),
    st.integers(1, 200),
)
def test_more_requests_give_more_tokens_and_wait_longer(model: str, batch: int, more: int):
    one, both = (serve(model, "hgx-h200", "tp=2", batch=b) for b in (batch, batch + more))
    assert both.tokens_per_s > one.tokens_per_s / SCATTER
    assert both.decode_step_s > one.decode_step_s / SCATTER
    assert both.ttft_s > one.ttft_s / SCATTER


@pytest.mark.parametrize(
    ("model", "cluster", "layout"),
    [
        ("mpt-1b", "gcp-a2", "tp=2"),
        ("llama-4-scout", "alps", "tp=4"),
        ("pythia-6.9b", "jean-zay-a100", "tp=4"),
        ("olmo-2-32b", "tpu-v6e-pod", "tp=4"),
        ("gemma-2b", "mi300x-platform", "tp=2"),
    ],
)
def test_twice_the_requests_never_take_less_time_a_token(model: str, cluster: str, layout: str):
    """Nor more than twice as much, where no prompts are read between tokens."""
    steps_s = [serve(model, cluster, layout, batch=1 << n).decode_step_s for n in range(8)]
    for one, twice in pairwise(steps_s):
        assert one <= twice * 1.001  # kernels with no number of samples are left as they are
        assert twice <= 2 * one


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 64), st.integers(1, 30_000), st.integers(1, 30_000))
def test_longer_contexts_are_never_faster(batch: int, tokens: int, more: int):
    short, long = (serve(batch=batch, prompt_tokens=n) for n in (tokens, tokens + more))
    assert long.decode_step_s > short.decode_step_s / SCATTER
    assert long.ttft_s > short.ttft_s / SCATTER
    assert long.memory.most_requests <= short.memory.most_requests


def test_more_bandwidth_is_never_slower():
    cluster = catalog.cluster("mi300x-platform")
    times = []
    for by in (1.0, 1.5, 2.0):
        device = replace(
            cluster.device,
            name=f"other-{by}",
            memory_bandwidth_bytes_per_s=by * cluster.device.memory_bandwidth_bytes_per_s,
        )
        times.append(serve(cluster=replace(cluster, device=device), batch=32).decode_step_s)
    assert times == sorted(times, reverse=True)


def test_narrow_weights_and_cache_are_faster_and_leave_more_room():
    wide, weights = serve(batch=8), serve(batch=8, weight_dtype="int4")
    assert 0.3 < weights.decode_step_s / wide.decode_step_s < 0.75
    assert serve(batch=1, weight_dtype="int4").ttft_s < serve(batch=1).ttft_s
    assert weights.memory.weights_bytes < 0.5 * wide.memory.weights_bytes
    cache = serve(batch=8, kv_dtype="fp8")
    assert cache.memory.cache_bytes == wide.memory.cache_bytes / 2
    assert cache.decode_step_s < wide.decode_step_s
    assert cache.memory.most_requests in (
        2 * wide.memory.most_requests,
        2 * wide.memory.most_requests + 1,
    )


def test_static_batches_read_all_prompts_first():
    continuous, static = serve(batch=32), serve(batch=32, batching="static")
    assert static.ttft_s > continuous.ttft_s
    assert static.tpot_s == pytest.approx(static.decode_step_s)
    assert static.tpot_s < continuous.tpot_s
    whole_s = static.ttft_s + 99 * static.tpot_s
    assert static.tokens_per_s == pytest.approx(32 * 100 / whole_s)
    # the work is the same, but for how prompts are packed into steps
    assert continuous.tokens_per_s == pytest.approx(static.tokens_per_s, rel=0.1)


@pytest.mark.parametrize("batch", [1, 2, 32, 400])
@pytest.mark.parametrize("prompt_tokens", [300, 1000, 20_000])
def test_a_request_sees_every_other_prompt_once_before_its_own_or_between_its_tokens(
    batch: int, prompt_tokens: int
):
    """Little's law, and Pollaczek and Khinchine's wait r S / (2 (1 - r)) for prompts that are read
    one at a time."""
    output_tokens = 100
    words: dict[str, Any] = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    found = serve(batch=batch, **words)
    own_s = serve(batch=1, batching="static", **words).ttft_s
    each_s = serve(batch=batch, batching="static", **words).ttft_s / batch
    others_s = (batch - 1) * each_s
    decoding_s = (output_tokens - 1) * found.decode_step_s
    request_s = own_s + decoding_s + others_s
    utilisation = others_s / request_s
    waiting_s = min(others_s, utilisation * each_s / (2 * (1 - utilisation)))
    assert found.ttft_s == pytest.approx(own_s + waiting_s)
    assert found.tpot_s == pytest.approx((decoding_s + others_s - waiting_s) / (output_tokens - 1))
    assert found.tokens_per_s == pytest.approx(batch * output_tokens / request_s)
    assert found.tokens_per_s_per_user == 1 / found.tpot_s


@pytest.mark.parametrize("output_tokens", [1, 2, 7, 100])
def test_a_token_halfway_through_the_output_stands_for_all(output_tokens: int):
    found = serve(batch=16, output_tokens=output_tokens)
    halfway = 1000 + (output_tokens + 1) // 2
    last = serve(batch=16, prompt_tokens=halfway - 1, output_tokens=1)
    assert found.decode_step_s == last.decode_step_s
    assert last.tpot_s == last.decode_step_s  # of which there is none after the first


def test_replicas_multiply_throughput():
    one, four = serve(batch=8), serve(layout="dp=4", batch=32)
    assert four.tokens_per_s == pytest.approx(4 * one.tokens_per_s)
    assert four.tpot_s == pytest.approx(one.tpot_s)


def test_pipeline_stages_share_memory_and_give_throughput():
    one, two = (
        serve("llama3-70b", "hgx-h200", "tp=2", batch=64),
        serve("llama3-70b", "hgx-h200", "tp=2,pp=2", batch=64),
    )
    assert two.memory.weights_bytes == pytest.approx(one.memory.weights_bytes / 2, rel=0.05)
    assert two.tokens_per_s > one.tokens_per_s
    single = serve("llama3-70b", "hgx-h200", "tp=2,pp=2", batch=1)
    assert single.decode_step_s > serve("llama3-70b", "hgx-h200", "tp=2", batch=1).decode_step_s


def test_experts_over_tensor_parallel_ranks_hold_whole_experts():
    sharded, whole = (
        serve("mixtral-8x7b", "dgx-h100", layout, batch=64)
        for layout in ("tp=4", "tp=4,ep=4,etp=1")
    )
    assert whole.memory.weights_bytes == pytest.approx(sharded.memory.weights_bytes, rel=1e-6)
    assert whole.breakdown_s["communication"] == pytest.approx(sharded.breakdown_s["communication"])


def test_intervals_hold_the_prediction():
    found = serve("llama3-70b", "dgx-h100", "tp=8", batch=32)
    for value, (low, high) in (
        (found.ttft_s, found.ttft_interval_s),
        (found.tpot_s, found.tpot_interval_s),
        (found.tokens_per_s, found.tokens_per_s_interval),
    ):
        assert low < value < high
        # As many per cent more as less, in logs.
        assert low * high == pytest.approx(value**2)
    assert sum(found.breakdown_s.values()) == pytest.approx(found.decode_step_s)


def test_largest_batch_holds_the_limits_and_the_next_does_not():
    limit_s = 0.02
    best = serve("llama3-8b", "dgx-h100", "dp=2", tpot_limit_s=limit_s)
    assert best.requests.batch % 2 == 0
    assert best.tpot_s <= limit_s
    assert serve("llama3-8b", "dgx-h100", "dp=2", batch=best.requests.batch + 2).tpot_s > limit_s
    without = serve("llama3-8b")
    assert without.requests.batch == without.memory.most_requests
    assert without.fits
    assert not serve(batch=without.memory.most_requests + 1).fits


@pytest.mark.parametrize("prompt_tokens", [400_000, 200_000, 130_000, 100_000])
def test_one_or_two_requests_fit_where_their_caches_are_as_long(prompt_tokens: int):
    found = serve(prompt_tokens=prompt_tokens)
    assert found.requests.batch == found.memory.most_requests == round(430_000 / prompt_tokens)
    assert not serve(prompt_tokens=prompt_tokens, batch=found.requests.batch + 1).fits


@pytest.mark.parametrize(("tp", "collectives"), [(1, 0), (2, 1 + 32 * 2)])
def test_a_gap_follows_every_kernel_and_engines_add_residuals_in_the_next_norm(
    tp: int, collectives: int
):
    """Of a layer two norms, four products, rotation, attention and activation; lookup; the last
    norm and the head."""
    kernels = 1 + 32 * (2 + 4 + 1 + 1 + 1) + 2
    for gap_s, overhead_s in ((1e-6, 0.0), (2e-6, 1e-3)):
        framework = Framework().replace(kernel_gap_s=gap_s, step_overhead_s=overhead_s)
        found = serve(layout=f"tp={tp}", batch=8, framework=framework)
        assert found.breakdown_s["gaps"] == pytest.approx(
            (kernels + collectives) * gap_s + overhead_s
        )


def test_json_says_what_was_served():
    found = serve(batch=4, layout="dp=2", weight_dtype="int4", kv_dtype="fp8")
    values, plain = found.to_dict(), serve(batch=4).to_dict()
    assert (values["dtype"], values["weight_dtype"], values["kv_dtype"]) == ("bf16", "int4", "fp8")
    assert (plain["dtype"], plain["weight_dtype"], plain["kv_dtype"]) == ("bf16", "bf16", None)
    assert (values["devices"], values["batch"], values["fits"]) == (2, 4, True)
    for name in ("ttft", "tpot"):
        ends = getattr(found, f"{name}_interval_s")
        assert (values[f"{name}_lo_s"], values[f"{name}_hi_s"]) == ends
        assert values[f"{name}_s"] == getattr(found, f"{name}_s")
    assert (values["tokens_per_s_lo"], values["tokens_per_s_hi"]) == found.tokens_per_s_interval
    assert values["tokens_per_s_per_device"] == found.tokens_per_s / 2
    assert (
        values["memory_bytes"]["available"] == 0.9 * catalog.cluster("dgx-h100").device.memory_bytes
    )


def test_sweep_keeps_what_nothing_beats():
    swept = pm.serve_sweep("llama3-8b", "dgx-h100", devices=4, tpot_limit_s=0.02, **SERVED)
    front = swept.pareto
    assert {s.layout.label for s in swept.servings} >= {
        "tp=4,pp=1,dp=1",
        "tp=1,pp=1,dp=4",
        "tp=1,pp=4,dp=1",
    }
    for one in swept.servings:
        assert one.tpot_s <= 0.02
        assert any(
            f.tokens_per_s_per_user >= one.tokens_per_s_per_user
            and f.tokens_per_s_per_device >= one.tokens_per_s_per_device
            for f in front
        )
    assert swept.best.tokens_per_s_per_device == max(
        s.tokens_per_s_per_device for s in swept.servings
    )
    assert len(swept.to_frame()) == len(swept.servings)


def test_a_sweep_serves_every_batch_once() -> None:
    """Also where the largest batch that meets the limit is one of the powers of two."""
    limit_s = serve(batch=32).tpot_s * (1 + 1e-9)
    swept = pm.serve_sweep(
        "llama3-8b", "dgx-h100", layouts=["tp=1"], tpot_limit_s=limit_s, **SERVED
    )
    assert [serving.requests.batch for serving in swept.servings] == [1, 2, 4, 8, 16, 32]


def test_a_sweep_tries_experts_sharded_like_the_rest_and_whole_on_ranks_of_either_kind():
    """By hand for four devices: all of tp * pp * dp = 4, and experts apart where ranks are of one
    kind."""
    swept = pm.serve_sweep("mixtral-8x7b", "dgx-h100", devices=4, **SERVED)
    degrees = {
        (s.layout.tp, s.layout.pp, s.layout.dp, s.layout.ep, s.layout.expert_tp)
        for s in swept.servings
    }
    sharded = {
        (4, 1, 1, 1, 4),
        (2, 2, 1, 1, 2),
        (2, 1, 2, 1, 2),
        (1, 4, 1, 1, 1),
        (1, 2, 2, 1, 1),
        (1, 1, 4, 1, 1),
    }
    whole = {(4, 1, 1, 4, 1), (2, 2, 1, 2, 1), (1, 1, 4, 4, 1), (1, 2, 2, 2, 1)}
    assert degrees <= sharded | whole
    assert degrees >= {(4, 1, 1, 1, 4), (4, 1, 1, 4, 1), (2, 2, 1, 2, 1)}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"model": "bert-base"}, "bert-base generates no text"),
        ({"model": "resnet50"}, "resnet-50 generates no text"),
        ({"model": "gpt2-1.5b"}, "has only 1,024 positions"),
        ({"layout": "tp=2,cp=2"}, "leave cp out of tp=2"),
        ({"layout": "tp=2,zero=3,recompute=full"}, "leave zero, recompute out of"),
        ({"layout": "dp=4", "batch": 6}, "the nearest is 8"),
        ({"batch": 0}, "batch=0"),
        ({"prompt_tokens": 0}, "prompt_tokens=0"),
        ({"output_tokens": 1.5}, "output_tokens=1.5"),
        ({"weight_dtype": "int3"}, "unknown weight dtype 'int3'"),
        ({"weight_dtype": "fp32"}, "is wider than dtype"),
        ({"kv_dtype": "fp4"}, "unknown cache dtype"),
        ({"batching": "orca"}, "continuous or static"),
        ({"cluster": "dgx-a100", "dtype": "fp8"}, "has no fp8"),
        ({"layout": "tp=3"}, "not divisible by tp=3"),
        ({"layout": "pp=99"}, "pp=99 is more than that"),
        ({"batch": None, "tpot_limit_s": 1e-4}, "time per output token is"),
        ({"batch": None, "ttft_limit_s": 1e-4}, "time to first token is"),
        ({"batch": None, "ttft_limit_s": -1.0}, "above zero"),
        ({"model": "llama3-70b", "batch": None}, "use more tp or pp"),
    ],
)
def test_bad_input_names_the_remedy(words: dict[str, Any], told: str):
    with pytest.raises(pm.PerfModelError, match=told):
        serve(**({"batch": 1} | words))


def test_a_sweep_takes_a_job_file_and_no_batch(tmp_path: Path):
    file = tmp_path / "served.toml"
    file.write_text(
        'model = "llama3-8b"\ncluster = "dgx-h100"\n[serving]\nprompt_tokens = 1000\noutput_tokens = 100\n'
        "tpot_limit_s = 0.02\n"
    )
    swept = pm.serve_sweep(str(file), layouts=["tp=2"])
    assert (
        swept.best
        == pm.serve_sweep(
            "llama3-8b", "dgx-h100", layouts=["tp=2"], tpot_limit_s=0.02, **SERVED
        ).best
    )
    with pytest.raises(pm.PerfModelError, match="leave out --batch"):
        pm.serve_sweep(str(file), layouts=["tp=2"], batch=4)
    with pytest.raises(pm.PerfModelError, match="promt_tokens"):
        serve(promt_tokens=3)


@pytest.mark.slow
def test_published_servers():
    table = compared(every=3)
    error = table["error"].abs()
    assert len(table) == 38
    assert error.median() < 0.1
    assert error.mean() < 0.13
    assert table["inside"].mean() > 0.8
    # kernels of today, H200 among them, which no kernel table holds
    recent = table["source"].str.contains("perf-overview")
    assert error[recent].mean() < 0.075
