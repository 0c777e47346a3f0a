"""Low-rank adapters on tensor-parallel ranks: what they send, compute and hold."""

from dataclasses import replace

import pytest

from perfmodel.catalog import framework, model
from perfmodel.ops import Gemm
from perfmodel.prediction import predict
from perfmodel.spec import Job
from perfmodel.workload import Shard, blocks

NET, RANK, TOKENS = model("llama3-8b"), 16, 8192
FULL_BYTES = TOKENS * NET.hidden * 2
LOW_BYTES = TOKENS * RANK * 2


def layer(tp=4, sequence_parallel=True, **job):
    job = Job(global_batch=1, seq_len=TOKENS, frozen=True, **job)
    shard = Shard(tp=tp, sequence_parallel=sequence_parallel and tp > 1)
    return next(b for b, _ in blocks(NET, job, shard) if b.name == "dense_layer")


def added(phase, **how):
    """Collectives of the adapters: those that a layer without them does not have."""
    of = [
        [(c.collective, c.bytes) for c in getattr(layer(**how, **job), phase) for _ in range(c.count)]
        for job in ({}, {"adapter_rank": RANK})
    ]
    for one in of[0]:
        of[1].remove(one)
    return sorted(of[1])


def test_one_rank_sends_nothing():
    assert added("forward_comm", tp=1) == added("backward_comm", tp=1) == []


def test_ranks_gather_and_sum_rows_of_the_low_rank_and_gather_results():
    low = [("all_gather", LOW_BYTES), ("all_reduce", LOW_BYTES)]
    sums = [("all_reduce", LOW_BYTES)] * 2
    assert added("forward_comm") == sorted([*low, ("all_gather", FULL_BYTES)])
    assert added("backward_comm") == sorted([*sums, ("all_gather", FULL_BYTES)])
    # whole rows on every rank: nothing is gathered back, but the gradient of the column-parallel input is summed
    alone = {"sequence_parallel": False}
    assert added("forward_comm", **alone) == sorted([*low, ("all_gather", FULL_BYTES)])
    assert added("backward_comm", **alone) == sorted([*sums, ("all_reduce", FULL_BYTES)])


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_an_all_to_all_sends_a_share_of_what_is_gathered(tp):
    job = Job(global_batch=1, seq_len=TOKENS, frozen=True, adapter_rank=RANK, adapter_all_to_all=True)
    found = next(b for b, _ in blocks(NET, job, Shard(tp=tp, sequence_parallel=True)) if b.name == "dense_layer")
    for comms in (found.forward_comm, found.backward_comm):
        assert [c.bytes for c in comms if c.collective == "all_to_all"] == [FULL_BYTES / tp]
        assert not [c for c in comms if c.collective == "all_gather" and c.bytes == FULL_BYTES and c.follows]


@pytest.mark.parametrize("exchanges", [False, True])
def test_ranks_share_the_adapters_weights_and_products(exchanges):
    def held(tp):
        return layer(tp, adapter_rank=RANK, adapter_all_to_all=exchanges)

    def flops(block):
        passes = (*block.forward, *block.backward_input)
        low = [(op, n) for op, n in passes if isinstance(op, Gemm) and min(op.m, op.n, op.k) <= RANK]
        return sum(2 * op.m * op.n * op.k * n for op, n in low)

    width = (NET.heads + 2 * NET.kv_heads) * NET.head_dim
    whole = RANK * (NET.hidden + width) + RANK * (NET.heads * NET.head_dim + NET.hidden)
    for tp in (1, 2, 4):
        assert held(tp).params - layer(tp).params == whole / tp
        assert flops(held(tp)) * tp == flops(held(1))


def test_adapters_of_one_device_do_not_depend_on_how_results_are_sent():
    plain, exchanged = (layer(1, adapter_rank=RANK, adapter_all_to_all=on) for on in (False, True))
    assert plain == exchanged


def test_an_exchange_is_faster_than_a_gather_and_ring_steps_hide_neither():
    job = Job(global_batch=8, seq_len=TOKENS, frozen=True, adapter_rank=RANK)

    def step_s(layout, **more):
        return predict(NET, "dgx-h100", layout, job=replace(job, **more)).step_time_s

    for layout in ("tp=4,dp=2,sequence_parallel=true", "tp=4,dp=2,sequence_parallel=true,tp_overlap=true"):
        gathered_s, exchanged_s = step_s(layout), step_s(layout, adapter_all_to_all=True)
        assert step_s(layout, adapter_rank=0) < exchanged_s < gathered_s


def test_ranks_that_have_just_met_wait_for_none_of_them():
    job = Job(global_batch=8, seq_len=TOKENS, frozen=True)
    waits_s = [
        predict(
            NET, "dgx-h100", "tp=4,dp=2,sequence_parallel=true", job=replace(job, adapter_rank=rank),
            framework=framework("nemo@2024"),
        ).breakdown_s["waiting_for_slowest_rank"]
        for rank in (0, RANK)
    ]  # fmt: skip
    assert waits_s[0] == pytest.approx(waits_s[1])
    assert waits_s[0] > 0
