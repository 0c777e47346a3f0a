"""Kinds of context parallelism: the same visible pairs however they are spread, and who waits for
whom."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.catalog import model
from perfmodel.errors import LayoutError
from perfmodel.spec import Job, Layout
from perfmodel.workload import Shard, blocks, undivided

LLAMA = model("llama3-8b")


def attention_flops(job=None, net=LLAMA, **shard):
    job = job or Job(global_batch=1, seq_len=8192)
    layer = next(b for b, _ in blocks(net, job, Shard(**shard)) if "layer" in b.name)
    return sum(op.flops * count for op, count in layer.forward if op.family == "attention")


@settings(max_examples=40, deadline=None)
@given(
    cp=st.sampled_from([2, 4, 8]),
    kind=st.sampled_from(["ring", "all_gather", "gathered_ring", "ulysses"]),
    tp=st.sampled_from([1, 2]),
    seq=st.sampled_from([1024, 8192, 65536]),
)
def test_balanced_ranks_share_the_visible_pairs(cp, kind, tp, seq):
    job = Job(global_batch=1, seq_len=seq)
    whole, part = attention_flops(job, tp=tp), attention_flops(job, tp=tp, cp=cp, cp_kind=kind)
    assert cp * part == pytest.approx(whole, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    cp=st.sampled_from([1, 2, 4]),
    kind=st.sampled_from(["ring", "all_gather", "gathered_ring", "ulysses"]),
    slices=st.sampled_from([2, 4]),
    seq=st.sampled_from([1024, 8192]),
)
def test_slices_share_the_visible_pairs_too(cp, kind, slices, seq):
    """Keys of the slices before are spread over ranks as a slice's own are."""
    tokens = seq // slices
    jobs = [Job(global_batch=1, seq_len=tokens, cached_tokens=i * tokens) for i in range(slices)]
    parts = [attention_flops(job, cp=cp, cp_kind=kind) for job in jobs]
    assert cp * sum(parts) == pytest.approx(
        attention_flops(Job(global_batch=1, seq_len=seq)), rel=1e-9
    )


@pytest.mark.parametrize("kind", ["ring", "all_gather", "gathered_ring"])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_last_rank_of_a_contiguous_split_sees_nearly_twice_the_mean(kind, cp):
    mean = attention_flops() / cp
    last = attention_flops(cp=cp, cp_kind=kind, cp_balanced=False)
    assert last == pytest.approx((2 - 1 / cp) * mean, rel=1e-3)


def test_steps_are_merged_and_eager_merges_are_chains():
    def merges(**job):
        plain, ring = (
            [
                op
                for op, n in blocks(
                    LLAMA, Job(global_batch=1, seq_len=8192, **job), Shard(cp=4, cp_kind=kind)
                )[1][0].forward
                for _ in range(n)
                if op.family == "memory"
            ]
            for kind in ("all_gather", "ring")
        )
        return len(ring) - len(plain)

    assert merges() == 3
    assert merges(eager_kernels=("attention_merge",)) == 3 * 4


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_bytes_that_ranks_exchange_by_hand(tp, cp, micro_batch):
    """Keys and values hop around a ring (arXiv 2310.01889), are gathered whole, or are exchanged
    for heads together with queries, as results are (arXiv 2309.14509); in backward they are
    exchanged again, and their gradients."""
    seq = 8192
    tokens, d, element = micro_batch * seq, LLAMA.head_dim, 2
    heads, kv_heads = LLAMA.heads // tp, LLAMA.kv_heads // tp
    all_keys = tokens * kv_heads * 2 * d * element
    hop = all_keys / cp
    # copied where there are fewer than ranks
    exchanged = tokens / cp * (heads + 2 * max(kv_heads, cp)) * d * element
    results = tokens / cp * heads * d * element
    hops, last = ("send_recv", hop, cp - 1, True), ("send_recv", hop, 1, False)
    gather, scatter = ("all_gather", all_keys, 1, False), ("reduce_scatter", all_keys, 1, False)
    there, back = ("all_to_all", exchanged, 1, False), ("all_to_all", results, 1, False)
    by_hand = {
        "ring": ([hops], [hops, hops, last]),
        "all_gather": ([gather], [gather, scatter]),
        "gathered_ring": ([gather], [gather, hops, last]),
        "ulysses": ([there, back], [back, there]),
    }
    for kind, (forward, backward) in by_hand.items():
        shard = Shard(tp=tp, cp=cp, cp_kind=kind, micro_batch=micro_batch)
        layer = next(
            b
            for b, _ in blocks(LLAMA, Job(global_batch=3, seq_len=seq), shard)
            if "layer" in b.name
        )
        for comms, expected in ((layer.forward_comm, forward), (layer.backward_comm, backward)):
            of_context = [
                (c.collective, c.bytes, c.count, c.beside_attention)
                for c in comms
                if c.group == "cp"
            ]
            assert of_context == expected, kind


@pytest.mark.parametrize("kind", ["ring", "all_gather", "gathered_ring"])
@pytest.mark.parametrize("tp", [1, 8])
def test_copied_keys_are_exchanged_as_often_as_heads_share_them(kind, tp):
    """Copies change neither FLOPs nor what a model without shared keys exchanges."""

    def exchanged(net, copied):
        job = Job(global_batch=1, seq_len=8192, repeated_keys=copied)
        layer = next(
            b for b, _ in blocks(net, job, Shard(tp=tp, cp=4, cp_kind=kind)) if "layer" in b.name
        )
        passes = (layer.forward_comm, layer.backward_comm)
        return [
            sum(comm.bytes * comm.count for comm in each if comm.group == "cp") for each in passes
        ]

    for whole, copies in zip(exchanged(LLAMA, False), exchanged(LLAMA, True), strict=True):
        assert copies == pytest.approx(LLAMA.heads / LLAMA.kv_heads * whole)
        assert whole > 0
    alone = model("llama2-7b")
    assert exchanged(alone, True) == exchanged(alone, False)
    copied = Job(global_batch=1, seq_len=8192, repeated_keys=True)
    assert attention_flops(copied, tp=tp, cp=4, cp_kind=kind) == attention_flops(
        tp=tp, cp=4, cp_kind=kind
    )


def test_ulysses_divides_heads():
    with pytest.raises(LayoutError, match="attention heads"):
        attention_flops(cp=64, cp_kind="ulysses")
    # four ranks share each of the two key and value heads that tensor parallelism leaves
    assert attention_flops(tp=4, cp=8, cp_kind="ulysses") > 0


def test_kinds_say_nothing_without_context_parallelism():
    assert Shard.of(Layout(cp_kind="ulysses", cp_balanced=False, ep_overlap=True)) == Shard.of(
        Layout()
    )
    with pytest.raises(LayoutError, match="cp_kind must be one of ring"):
        Layout(cp=2, cp_kind="star")


@pytest.mark.parametrize("kind", ["ring", "all_gather", "gathered_ring", "ulysses"])
def test_every_part_of_an_attention_names_the_one_over_the_whole_sequence(kind):
    def kernels(cp):
        layer = next(
            b for b, _ in blocks(LLAMA, job, Shard(cp=cp, cp_kind=kind)) if "layer" in b.name
        )
        return [op for op, _ in (*layer.forward, *layer.backward_input) if op.family == "attention"]

    job = Job(global_batch=1, seq_len=8192)
    whole = {op.pass_: op for op in kernels(1)}
    assert all(undivided(LLAMA, job, op) is None for op in whole.values())
    of = [undivided(LLAMA, job, op) for op in kernels(4)]
    if kind == "ulysses":  # fewer heads of whole sequences
        assert set(of) == {None}
    else:
        assert of == [whole[op.pass_] for op in kernels(4)]
    assert undivided(LLAMA, replace(job, mode="inference"), kernels(4)[0]) is None
