"""Collectives against Megatron's counting (arXiv 1909.08053 section 3, 2205.05198 section
4.2.2)."""

from collections import Counter
from dataclasses import replace

import pytest

from perfmodel.catalog import model
from perfmodel.ops import MemoryBound
from perfmodel.spec import Job
from perfmodel.workload import Shard, blocks

GPT = model("gpt-22b")
B, S, H = 4, GPT.seq_len, GPT.hidden
JOB = Job(global_batch=B, seq_len=S, dtype="fp16")
WIRE = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""Bytes a ring moves per byte of buffer, in units of (t - 1) / t."""


def layer(net=GPT, job=JOB, **shard):
    return next(b for b, _ in blocks(net, job, Shard(**shard)) if "layer" in b.name)


def kinds(comms):
    return Counter(c.collective for c in comms for _ in range(c.count))


def volume(comms):
    return sum(WIRE[c.collective] * c.bytes * c.count for c in comms)


def test_one_device_communicates_nothing():
    for block, _ in blocks(GPT, JOB, Shard(micro_batch=B)):
        assert not block.forward_comm
        assert not block.backward_comm
        assert not block.boundary_comm


def test_tensor_parallelism_has_four_all_reduces_per_layer():
    block = layer(tp=8, micro_batch=B)
    comms = [*block.forward_comm, *block.backward_comm]
    assert kinds(comms) == {"all_reduce": 4}
    assert all(c.bytes == 2 * B * S * H for c in comms)
    assert kinds(block.recompute_full_comm) == {"all_reduce": 2}


def test_sequence_parallelism_moves_the_same_bytes():
    """An all-reduce is a reduce-scatter and an all-gather; one gather per product is repeated in
    backward."""
    plain = layer(tp=8, micro_batch=B)
    sharded = layer(tp=8, micro_batch=B, sequence_parallel=True)
    assert kinds(sharded.forward_comm) == {"all_gather": 2, "reduce_scatter": 2}
    assert kinds(sharded.backward_comm) == {"all_gather": 4, "reduce_scatter": 2}
    assert volume(sharded.forward_comm) == volume(plain.forward_comm)
    repeated = sum(
        c.bytes for c in sharded.backward_comm if c.collective == "all_gather" and c.overlappable
    )
    assert volume(sharded.backward_comm) - repeated == volume(plain.backward_comm)


def block_named(place, job, micro_batch):
    sharded = blocks(GPT, job, Shard(tp=8, micro_batch=micro_batch, sequence_parallel=True))
    return next(block for block, _ in sharded if place in block.name)


def counted(kernels):
    return Counter(op for op, count in kernels for _ in range(count))


def copied_bytes(kernels, usual):
    """Bytes copied by kernels that are not among the usual ones."""
    added = counted(kernels) - counted(usual)
    assert all(isinstance(op, MemoryBound) and (op.op, op.n_inputs) == ("add", 1) for op in added)
    return sum(2 * op.rows * op.hidden * count for op, count in added.items())


@pytest.mark.parametrize("micro_batch", [1, B])
def test_copies_along_the_sequence_are_of_all_that_is_scattered_and_of_what_several_sequences_gather(
    micro_batch,
):
    """Of one sequence, what ranks gathered lies in order; parts of several alternate. Scattered
    parts never do."""
    kept = replace(JOB, keep_gathered=True)
    copying = replace(kept, eager_kernels=("sequence_copy",))
    for place in ("embedding", "layer", "head"):
        usual, more = (block_named(place, job, micro_batch) for job in (kept, copying))
        for phase in ("forward", "backward"):
            comms = [
                c
                for c in getattr(more, f"{phase}_comm")
                if c.collective in ("all_gather", "reduce_scatter")
            ]
            sent = Counter()
            for comm in comms:
                sent[comm.collective] += comm.count * comm.bytes
            kernels = "backward_input" if phase == "backward" else phase
            copied = copied_bytes(getattr(more, kernels), getattr(usual, kernels))
            assert copied == sent["reduce_scatter"] + (micro_batch > 1) * sent["all_gather"], (
                place,
                phase,
            )
        assert more.backward_weight == usual.backward_weight
        assert more.activation_bytes == usual.activation_bytes


def test_checkpoints_that_keep_what_is_scattered_repeat_the_copies_of_what_is_gathered_alone():
    repeating = replace(JOB, keep_gathered=True, recompute_modules=("second_products",))
    copying = replace(repeating, eager_kernels=("sequence_copy",))
    usual, more = (block_named("layer", job, B) for job in (repeating, copying))
    assert kinds(more.recompute_selective_comm) == {"all_gather": 2}
    copied = copied_bytes(more.recompute_selective, usual.recompute_selective)
    assert copied == sum(c.bytes * c.count for c in more.recompute_selective_comm)


@pytest.mark.parametrize("shard", [{"tp": 1}, {"tp": 8}, {"tp": 1, "sequence_parallel": True}])
def test_nothing_is_copied_where_the_sequence_is_not_divided(shard):
    copying = replace(JOB, eager_kernels=("sequence_copy",))
    assert layer(job=copying, micro_batch=B, **shard) == layer(micro_batch=B, **shard)


def test_boundary_is_sharded_and_completed():
    whole = 2 * B * S * H
    alone = layer(micro_batch=B)
    assert (alone.boundary_bytes, alone.boundary_comm) == (whole, ())
    sharded = layer(tp=8, micro_batch=B, sequence_parallel=True)
    assert (sharded.boundary_bytes, sharded.boundary_comm) == (whole / 8, ())
    scattered = layer(tp=8, micro_batch=B)
    assert scattered.boundary_bytes == whole / 8
    assert [(c.collective, c.bytes) for c in scattered.boundary_comm] == [("all_gather", whole)]


def test_vocabulary_parallel_ends():
    parts = {b.name: b for b, _ in blocks(GPT, JOB, Shard(tp=8, micro_batch=B))}
    assert kinds(parts["embedding"].forward_comm) == {"all_reduce": 1}
    small = [c for c in parts["head"].forward_comm if c.bytes == 4 * B * S]
    assert sum(c.count for c in small) == 3
    assert kinds(parts["head"].backward_comm) == {"all_reduce": 1}


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ring(cp):
    block = layer(cp=cp, tp=2, micro_batch=B)
    (hop,) = (c for c in block.forward_comm if c.group == "cp")
    assert (hop.collective, hop.count, hop.beside_attention) == ("send_recv", cp - 1, True)
    assert hop.bytes == 2 * B * (S // cp) * 2 * H / 2  # keys and values of half the heads
    back = [c for c in block.backward_comm if c.group == "cp"]
    assert {(c.collective, c.bytes) for c in back} == {("send_recv", hop.bytes)}
    # keys and values as forward; their gradients go on to where they belong, the last time with
    # nothing beside
    assert [(c.count, c.beside_attention) for c in back] == [
        (cp - 1, True),
        (cp - 1, True),
        (1, False),
    ]


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_gathers(cp):
    whole = 2 * B * S * 2 * H / 2
    for kind, backward in (
        ("all_gather", {"all_gather": 1, "reduce_scatter": 1}),
        ("gathered_ring", {"all_gather": 1, "send_recv": cp}),
    ):
        block = layer(cp=cp, cp_kind=kind, tp=2, micro_batch=B)
        (gather,) = (c for c in block.forward_comm if c.group == "cp")
        assert (gather.collective, gather.bytes, gather.count) == ("all_gather", whole, 1)
        assert kinds(c for c in block.backward_comm if c.group == "cp") == backward


def test_ulysses_exchanges_heads_for_tokens():
    block = layer(cp=4, cp_kind="ulysses", tp=2, micro_batch=B)
    there, back = (c for c in block.forward_comm if c.group == "cp")
    own = 2 * B * (S // 4) * H / 2
    assert (there.collective, there.bytes, back.bytes) == ("all_to_all", 3 * own, own)
    assert [c.bytes for c in block.backward_comm if c.group == "cp"] == [own, 3 * own]


def test_expert_parallelism_sends_each_token_to_its_experts_and_back():
    net = model("mixtral-8x7b")
    job = Job(global_batch=1, seq_len=4096)
    block = next(b for b, _ in blocks(net, job, Shard(ep=8)) if b.name == "moe_layer")
    sent = [c for c in block.forward_comm if c.group == "ep"]
    assert [c.collective for c in sent] == ["all_to_all"] * 2
    assert all(c.bytes == 4096 * 2 * 4096 * 2 for c in sent)  # tokens, choices, hidden, bytes
    assert kinds(c for c in block.backward_comm if c.group == "ep") == {"all_to_all": 2}


def test_tensor_parallel_experts_gather_dispatched_tokens():
    net = model("mixtral-8x7b")
    job = Job(global_batch=1, seq_len=4096)
    with_tp = next(
        b
        for b, _ in blocks(net, job, Shard(ep=4, tp=2, sequence_parallel=True))
        if b.name == "moe_layer"
    )
    copies = 4096 * 2 * 4096 * 2
    assert [c.bytes for c in with_tp.forward_comm if c.group == "ep"] == [copies / 2] * 2
    gathers = [c for c in with_tp.forward_comm if c.bytes == copies]
    assert kinds(gathers) == {"all_gather": 1, "reduce_scatter": 1}
    whole_experts = next(
        b
        for b, _ in blocks(net, job, Shard(ep=4, tp=2, etp=1, sequence_parallel=True))
        if b.name == "moe_layer"
    )
    assert [c.bytes for c in whole_experts.forward_comm if c.group == "ep"] == [copies / 2] * 2
    assert not [c for c in whole_experts.forward_comm if c.bytes == copies]


def test_tensor_parallel_experts_without_sequence_parallelism_sum_partial_results():
    net = model("mixtral-8x7b")
    block = layer(net, Job(global_batch=1, seq_len=4096), tp=2)
    assert kinds(block.forward_comm) == kinds(block.backward_comm) == {"all_reduce": 2}


@pytest.mark.parametrize(
    "job", [{}, {"frozen": True, "adapter_rank": 8}, {"dtype": "fp8", "fp8_recipe": "current"}]
)
@pytest.mark.parametrize(
    "name", ["gpt3-1.3b", "mixtral-8x7b", "deepseek-v2-lite", "gpt-oss-20b", "nemotron-3-nano"]
)
def test_one_rank_sends_nothing(name, job):
    """Whatever was asked of groups that it is alone in."""
    net = model(name)
    for shard in (Shard(), Shard(sequence_parallel=True), Shard(cp_kind="all_gather")):
        for block, _ in blocks(net, Job(global_batch=1, seq_len=2048, **job), shard):
            passes = (block.forward_comm, block.backward_comm, block.recompute_full_comm)
            assert passes == ((), (), ()), block.name
            assert block.recompute_selective_comm == ()


def test_decoder_stages_pass_the_encoder_on():
    t5 = model("t5-large")
    parts = {b.name: b for b, _ in blocks(t5, Job(global_batch=1, seq_len=512), Shard())}
    assert parts["decoder_layer"].boundary_bytes == 2 * parts["encoder_layer"].boundary_bytes


def test_mlp_pairs_reduce_once_each_way():
    block = layer(model("mlp-1b"), Job(global_batch=8, seq_len=1, dtype="fp16"), micro_batch=8)
    assert block.name == "mlp_layer"
    ((pair, n),) = blocks(
        model("mlp-1b"), Job(global_batch=8, seq_len=1, dtype="fp16"), Shard(tp=4, micro_batch=8)
    )
    assert (pair.name, n) == ("mlp_pair", 8)
    assert kinds([*pair.forward_comm, *pair.backward_comm]) == {"all_reduce": 2}
    assert pair.params == 2 * 8192 * 8192 // 4
