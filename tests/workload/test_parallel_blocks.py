"""Attention and feed-forward side by side on one input, against closed forms and against one after
the other."""

from collections import Counter
from dataclasses import replace

import pytest

from perfmodel import predict
from perfmodel.catalog import model
from perfmodel.errors import PerfModelError
from perfmodel.ops import MemoryBound
from perfmodel.spec import Job
from perfmodel.spec.parts import AdaLN, Experts, LatentAttention
from perfmodel.workload import Shard, blocks, matmul_flops, parameter_count, step_flops

B, TP = 2, 2
GPT = replace(model("gpt-22b"), dropout=False)
S, H, A, L = GPT.seq_len, GPT.hidden, GPT.heads, GPT.layers
JOB = Job(global_batch=B, seq_len=S, dtype="fp16", flash_attention=False)
WIRE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Bytes a ring moves per byte of buffer, in units of (t - 1) / t."""
KINDS = ("one_norm", "two_norms")


def layer(kind="none", job=JOB, **shard):
    net = replace(GPT, parallel_blocks=kind)
    return next(b for b, _ in blocks(net, job, Shard(micro_batch=B, **shard)) if "layer" in b.name)


def kinds(comms):
    return Counter(c.collective for c in comms for _ in range(c.count))


def wire_bytes(comms):
    return sum(WIRE[c.collective] * c.bytes * c.count for c in comms)


def norms(kernels):
    return sum(n for op, n in kernels if isinstance(op, MemoryBound) and op.op == "layer_norm")


def test_of_one_norm_a_layer_has_half_the_collectives():
    """Korthikanti et al., arXiv 2205.05198, section 4.2.2, counts twice as many for sub-layers in
    turn."""
    plain = layer("one_norm", tp=TP)
    assert kinds(plain.forward_comm) == kinds(plain.backward_comm) == {"all_reduce": 1}
    assert all(c.bytes == 2 * B * S * H for c in (*plain.forward_comm, *plain.backward_comm))
    scattered = layer("one_norm", tp=TP, sequence_parallel=True)
    assert kinds(scattered.forward_comm) == {"all_gather": 1, "reduce_scatter": 1}
    # of the result's gradient, of the input once more, and of its gradient
    assert kinds(scattered.backward_comm) == {"all_gather": 2, "reduce_scatter": 1}
    for sequence_parallel in (False, True):
        in_turn = layer(tp=TP, sequence_parallel=sequence_parallel)
        beside = layer("one_norm", tp=TP, sequence_parallel=sequence_parallel)
        for where in ("forward_comm", "backward_comm", "recompute_full_comm"):
            found, whole = getattr(beside, where), getattr(in_turn, where)
            assert 2 * wire_bytes(found) == wire_bytes(whole)
            assert kinds([*found, *found]) == kinds(whole)
            assert sum(c.overlappable for c in whole) == 2 * sum(c.overlappable for c in found)


def test_of_two_norms_results_are_reduced_once_and_gradients_twice():
    plain = layer("two_norms", tp=TP)
    assert (kinds(plain.forward_comm), kinds(plain.backward_comm)) == (
        {"all_reduce": 1},
        {"all_reduce": 2},
    )
    scattered = layer("two_norms", tp=TP, sequence_parallel=True)
    assert kinds(scattered.forward_comm) == {"all_gather": 2, "reduce_scatter": 1}
    assert kinds(scattered.backward_comm) == {"all_gather": 3, "reduce_scatter": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_communicates_nothing(kind):
    assert not layer(kind).forward_comm
    assert not layer(kind).backward_comm


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_the_same_and_norms_as_many_as_said(kind, sequence_parallel):
    found = layer(kind, tp=TP, sequence_parallel=sequence_parallel)
    in_turn = layer(tp=TP, sequence_parallel=sequence_parallel)
    for phase in ("forward", "backward_input", "backward_weight"):
        assert matmul_flops(getattr(found, phase)) == matmul_flops(getattr(in_turn, phase))
    assert norms(found.forward) == norms(found.backward_input) == KINDS.index(kind) + 1
    assert step_flops(replace(GPT, parallel_blocks=kind), JOB) == step_flops(GPT, JOB)
    assert parameter_count(GPT) - parameter_count(replace(GPT, parallel_blocks=kind)) == (
        2 - norms(found.forward)
    ) * (2 * H * L)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_one_input_is_kept_once(t):
    """Of Korthikanti's 34 s b h (section 4.1, here without the 3 of dropout) the second sub-layer's
    input, 2 before its norm and 2 after: the norm's input is that of both."""
    scores = 2 * A * S / H  # of attention, without dropout, over t
    for kind, left_out, gathered in (("none", 0, 0), ("one_norm", 4, 2), ("two_norms", 2, 0)):
        plain = layer(kind, tp=t).activation_bytes.none
        # outside tensor-parallel regions: inputs of the norms, and what products are given whole
        assert plain == pytest.approx(S * B * H * (8 - left_out + (24 + scores) / t))
        scattered = layer(kind, tp=t, sequence_parallel=True).activation_bytes.none
        assert scattered == pytest.approx(S * B * H / t * (32 - left_out + scores))
        kept = layer(
            kind, replace(JOB, keep_gathered=True), tp=t, sequence_parallel=True
        ).activation_bytes.none
        assert kept - scattered == pytest.approx((4 - gathered) * S * B * H * (1 - 1 / t))


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_norms_that_are_repeated_need_not_keep_what_they_gave(kind):
    job = replace(JOB, recompute_modules=("layernorm",))
    found = layer(kind, job).activation_bytes
    assert found.none - found.selective == (1 if kind == "one_norm" else 2) * 2 * S * B * H


def test_dropout_of_the_sum_has_one_mask():
    with_dropout = replace(GPT, dropout=True)
    masks = []
    for kind in ("none", "one_norm"):
        nets = [replace(net, parallel_blocks=kind) for net in (with_dropout, GPT)]
        job = replace(JOB, flash_attention=True)
        kept = [blocks(net, job, Shard(micro_batch=B))[1][0].activation_bytes.none for net in nets]
        masks.append((kept[0] - kept[1]) / (S * B * H))
    assert masks == [2, 1]


def test_recompute_that_stops_repeats_no_product_whose_result_is_only_added():
    job = replace(JOB, stops_recompute=True)
    for kind, outputs in (("none", 4 * H), ("one_norm", H + 4 * H)):
        left_out = layer(kind).recompute_full, layer(kind, job).recompute_full
        assert matmul_flops(left_out[0]) - matmul_flops(left_out[1]) == 2 * B * S * H * outputs


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mixers": "**-"}, "mixers"),
        ({"mixers": "-*"}, "mixers"),
        ({"decoder_layers": 2}, "decoder_layers"),
        ({"norm_at": "both"}, "norm_at"),
        ({"mtp_layers": 1}, "mtp_layers"),
        ({"adaln": AdaLN(classes=10), "norm_at": "output"}, "adaln and norm_at"),
        (
            {
                "latent_attention": LatentAttention(
                    q_lora_rank=0,
                    kv_lora_rank=8,
                    qk_nope_head_dim=8,
                    qk_rope_head_dim=8,
                    v_head_dim=8,
                )
            },
            "latent_attention",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(changed, named):
    if "mixers" in changed:
        changed = {"mixers": f"{changed['mixers']} " * L}
    with pytest.raises(PerfModelError, match=f"parallel_blocks=one_norm .* leave out {named}"):
        replace(GPT, parallel_blocks="one_norm", **changed)


def test_experts_stand_beside_attention_on_one_norm_alone():
    """Command A with experts: one norm less than in turn; products and collectives are the same,
    because each branch returns its result by itself."""
    experts = Experts(count=8, topk=2, ffn_hidden=64)
    with pytest.raises(PerfModelError, match=r"parallel_blocks=two_norms .* leave out experts"):
        replace(GPT, parallel_blocks="two_norms", experts=experts)
    for shard in (Shard(micro_batch=B), Shard(micro_batch=B, tp=TP, ep=2, sequence_parallel=True)):
        in_turn, beside = (
            next(
                b
                for b, _ in blocks(replace(GPT, experts=experts, parallel_blocks=kind), JOB, shard)
                if b.is_layer
            )
            for kind in ("none", "one_norm")
        )
        assert norms(in_turn.forward) - norms(beside.forward) == 1
        assert matmul_flops(beside.forward) == matmul_flops(in_turn.forward)
        assert kinds(beside.forward_comm) == kinds(in_turn.forward_comm)
        assert in_turn.params - beside.params == 2 * H
        assert beside.activation_bytes.none < in_turn.activation_bytes.none


def test_a_prediction_says_that_results_are_assumed_to_be_added_before_they_are_reduced():
    assert any(
        "single reduction" in one
        for one in predict("pythia-6.9b", "dgx-a100", "tp=8", global_batch=8).warnings
    )
    for name, layout in (("pythia-6.9b", "dp=8"), ("llama2-7b", "tp=8")):
        assert not any(
            "single reduction" in one
            for one in predict(name, "dgx-a100", layout, global_batch=8).warnings
        )


def test_side_by_side_is_never_slower_than_in_turn():
    in_turn = replace(model("gpt3-175b"), dropout=False)
    for layout in (
        "tp=8,pp=8,dp=1",
        "tp=8,pp=8,dp=1,sequence_parallel=true",
        "tp=8,pp=8,dp=1,recompute=full",
    ):
        found = [
            predict(replace(in_turn, parallel_blocks=kind), "dgx-a100", layout, global_batch=32)
            for kind in ("none", "two_norms", "one_norm")
        ]
        times = [one.step_time_s for one in found]
        assert times == sorted(times, reverse=True)
        peaks = [max(one.memory_account.saved_bytes_per_stage) for one in found]
        assert peaks == sorted(peaks, reverse=True)
