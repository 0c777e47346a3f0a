"""Selective recompute by modules: what is freed and what is repeated, by hand."""

from dataclasses import replace

import pytest

from perfmodel import catalog, predict
from perfmodel.errors import UnknownNameError
from perfmodel.spec import Job
from perfmodel.workload import Shard, blocks, matmul_flops, step_flops

LLAMA = catalog.model("llama2-7b")
JOB = Job(global_batch=1, seq_len=2048)
TOKENS, H, FFN = 2048, 4096, 11008


def _layer(net, *modules, job=JOB, shard=Shard()):  # noqa: B008
    found = blocks(net, replace(job, recompute_modules=modules), shard)
    return next(
        block
        for block, _ in found
        if block.name in ("dense_layer", "moe_layer") and block.params > 1e6
    )


def _freed(net, *modules, **others):
    bytes_ = _layer(net, *modules, **others).activation_bytes
    return bytes_.none - bytes_.selective


@pytest.mark.parametrize(
    ("module", "freed", "flops"),
    [
        # flash attention's statistics
        ("core_attn", 4 * TOKENS * 32, None),
        # inputs of both column-parallel products
        ("layernorm", 2 * 2 * TOKENS * H, 0.0),
        # gate, value and their product
        ("mlp", 3 * 2 * TOKENS * FFN, 2 * TOKENS * 3 * H * FFN),
        # gate and value
        ("mlp_act", 2 * 2 * TOKENS * FFN, 0.0),
    ],
)
def test_a_module_of_a_dense_layer(module, freed, flops):
    layer = _layer(LLAMA, module)
    assert _freed(LLAMA, module) == freed
    if flops is not None:
        assert matmul_flops(layer.recompute_selective) == flops
    backward = step_flops(LLAMA, replace(JOB, recompute_modules=(module,)))
    counted = backward.hardware("selective") - backward.total
    assert counted == (backward.attention_forward if flops is None else LLAMA.layers * flops)


def test_modules_add_up():
    all_three = ("core_attn", "layernorm", "mlp")
    assert _freed(LLAMA, *all_three) == sum(_freed(LLAMA, one) for one in all_three)
    assert _layer(LLAMA).recompute_selective == ()
    assert _freed(LLAMA) == 0
    assert _layer(LLAMA, "mlp", "mlp_act") == _layer(LLAMA, "mlp")  # the whole has its part
    sharded = Shard(tp=4, sequence_parallel=True)
    assert _freed(LLAMA, "layernorm", shard=sharded) == _freed(LLAMA, "layernorm") / 4


def test_a_feed_forward_that_stops_early_leaves_out_its_last_product():
    early = replace(JOB, stops_recompute=True)
    assert _freed(LLAMA, "mlp", job=early) == _freed(LLAMA, "mlp")
    assert (
        matmul_flops(_layer(LLAMA, "mlp", job=early).recompute_selective)
        == 2 * TOKENS * 2 * H * FFN
    )
    assert (
        _layer(LLAMA, "core_attn", job=early).recompute_selective
        == _layer(LLAMA, "core_attn").recompute_selective
    )


@pytest.mark.parametrize("weighted", [True, False])
def test_experts_repeat_what_their_gradients_need(weighted):
    """Recompute that stops leaves out the experts' second product alone, and not even that where
    the router's weights multiply what it gives."""
    net = catalog.model("mixtral-8x7b")
    job = replace(JOB, weighted_experts=weighted)
    whole, early = (
        _layer(net, job=replace(job, stops_recompute=stops)).recompute_full
        for stops in (False, True)
    )
    second = 2 * TOKENS * 2 * net.hidden * net.experts.ffn_hidden
    assert matmul_flops(whole) - matmul_flops(early) == (second if weighted else 0)
    assert sum(n for _, n in early) < sum(n for _, n in whole)


def test_recompute_reaches_a_product_that_is_normalised():
    plain = replace(LLAMA, norm_at="input")
    for net, left_out in ((plain, 2 * TOKENS * H * FFN), (replace(LLAMA, norm_at="both"), 0)):
        whole, early = (
            _layer(net, job=replace(JOB, stops_recompute=stops)) for stops in (False, True)
        )
        assert matmul_flops(whole.recompute_full) - matmul_flops(early.recompute_full) == left_out


def test_modules_of_experts():
    net = catalog.model("qwen1.5-moe-a2.7b")
    copies, inner, shared = TOKENS * 4, 1408, 5632
    assert _freed(net, "moe_act") == 2 * copies * inner
    assert matmul_flops(_layer(net, "moe_act").recompute_selective) == 0
    products = 2 * TOKENS * 3 * H // 2 * shared
    assert matmul_flops(_layer(net, "shared_experts").recompute_selective) == products
    whole = _layer(net, "moe")
    assert matmul_flops(whole.recompute_selective) == pytest.approx(
        2 * TOKENS * (3 * 2048 * (4 * inner + shared) + 2048 * 60), rel=1e-2
    )
    # the whole has its parts
    assert _layer(net, "moe", "moe_act", "shared_experts") == whole
    assert (
        whole.activation_bytes.selective
        < _layer(net, "moe_act", "shared_experts").activation_bytes.selective
    )


def test_up_projections_of_latent_attention():
    net = catalog.model("deepseek-v3")
    job = replace(JOB, recompute_modules=("mla_up_proj",))
    flops = step_flops(net, job)
    up = 128 * (1536 * 192 + 512 * 256)
    assert flops.hardware("selective") - flops.total == 2.0 * TOKENS * 61 * up
    layer = next(block for block, _ in blocks(net, job, Shard()) if block.name == "dense_layer")
    assert matmul_flops(layer.recompute_selective) == 2.0 * TOKENS * up


def test_more_modules_take_longer_and_less_memory():
    found = [
        predict(
            LLAMA,
            "dgx-h100",
            "tp=2,dp=4,zero=1,recompute=selective",
            job=replace(JOB, global_batch=8, recompute_modules=modules),
        )
        for modules in (
            (),
            ("core_attn",),
            ("core_attn", "layernorm"),
            ("core_attn", "layernorm", "mlp"),
        )
    ]
    times, memory = [p.step_time_s for p in found], [p.memory.activations for p in found]
    assert times == sorted(times)
    assert len(set(times)) == 4
    assert memory == sorted(memory, reverse=True)


def test_an_unknown_module_is_refused():
    with pytest.raises(UnknownNameError, match="did you mean 'layernorm'"):
        replace(JOB, recompute_modules=("layer_norm",))
