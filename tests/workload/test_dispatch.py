"""How tokens reach their experts: how many ranks a token goes to, what is exchanged, copied and
waited for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.catalog import cluster, model
from perfmodel.cost import CollectiveModel, KernelModel, event_times
from perfmodel.errors import LayoutError
from perfmodel.ops import Collective
from perfmodel.prediction import predict
from perfmodel.spec import Job, Layout
from perfmodel.workload import ExpertChoice, Shard, blocks, matmul_flops

QWEN = model("qwen3-30b-a3b")


def layer(shard=None, net=QWEN, **job):
    job = Job(global_batch=1, seq_len=4096, **job)
    return next(b for b, _ in blocks(net, job, shard or Shard(ep=8)) if b.name == "moe_layer")


def drawn(parts, choice, seed=0, tokens=20_000):
    """Mean number of parts that random choices reach; the slow, obvious way."""
    random, experts = np.random.default_rng(seed), 64 * parts * choice.groups
    of_group = experts // choice.groups
    reached = []
    for _ in range(tokens):
        kept = random.choice(choice.groups, choice.groups_kept, replace=False)
        chosen = kept[random.integers(0, len(kept), choice.topk)] * of_group + random.integers(
            0, of_group, choice.topk
        )
        reached.append(len(set((chosen * parts // experts).tolist())))
    return np.mean(reached)


@pytest.mark.parametrize(
    ("parts", "choice"),
    [
        (8, ExpertChoice(8)),
        (16, ExpertChoice(2)),
        (2, ExpertChoice(8)),
        (8, ExpertChoice(8, 8, 4)),
        (4, ExpertChoice(8, 4, 2)),
        (2, ExpertChoice(6, 8, 3)),
    ],
)
def test_ranks_that_a_token_reaches(parts, choice):
    assert choice.reached(parts) == pytest.approx(drawn(parts, choice), rel=0.03)


@given(
    parts=st.integers(1, 512),
    topk=st.integers(1, 16),
    groups=st.sampled_from([1, 2, 4, 8]),
    kept=st.integers(1, 8),
)
def test_a_token_reaches_no_more_than_its_choices_and_no_more_than_there_are(
    parts, topk, groups, kept
):
    kept = min(kept, groups)
    reached = ExpertChoice(topk, groups, kept).reached(parts)
    assert reached <= min(parts, topk) * (1 + 1e-12)
    assert reached <= ExpertChoice(topk).reached(parts) * (1 + 1e-12)
    assert ExpertChoice(topk).reached(parts) >= min(1.0, topk) * (1 - 1e-12)


def test_dispatchers_exchange_and_copy():
    exchanged = {
        name: [c for c in layer(expert_dispatcher=name).forward_comm if c.group == "ep"]
        for name in ("alltoall", "deepep", "hybridep")
    }
    tokens = 4096 * 2048 * 2
    assert [c.bytes for c in exchanged["alltoall"]] == [8 * tokens] * 2
    for name in ("deepep", "hybridep"):
        assert [(c.bytes, c.choice) for c in exchanged[name]] == [(tokens, ExpertChoice(8))] * 2
        ways = [(name, "dispatch"), (name, "combine")]
        assert [c.exchange for c in exchanged[name]] == ways
        back = [c.exchange for c in layer(expert_dispatcher=name).backward_comm if c.group == "ep"]
        assert sorted(back) == sorted(ways)
    assert {c.exchange for c in exchanged["alltoall"]} == {None}

    def moved(name):
        copies = [
            (op.bytes, n)
            for op, n in layer(expert_dispatcher=name).forward
            if getattr(op, "op", "") == "add"
        ]
        return sum(size * n for size, n in copies)

    assert moved("alltoall") > moved("deepep") == moved("hybridep") > 0


@settings(max_examples=20, deadline=None)
@given(load=st.floats(1, 8), ep=st.sampled_from([2, 4, 8]))
def test_the_busiest_rank_counts(load, ep):
    shard = Shard(ep=ep)
    even, busy = layer(shard), layer(shard, expert_imbalance=load)
    experts = lambda block: matmul_flops([(op, n) for op, n in block.forward if op.family == "moe"])  # noqa: E731
    assert experts(busy) == pytest.approx(min(load, ep) * experts(even), rel=1e-3)
    sent = lambda block: sum(c.bytes for c in block.forward_comm if c.group == "ep")  # noqa: E731
    assert sent(busy) == pytest.approx(min(load, ep) * sent(even))
    assert matmul_flops(layer(Shard(), expert_imbalance=load).forward) == matmul_flops(
        layer(Shard()).forward
    )


def test_places_of_experts_bound_the_load():
    full, even = layer(expert_capacity_factor=1.5, expert_imbalance=3.0), layer()
    experts = [
        matmul_flops([(op, n) for op, n in b.forward if op.family == "moe"]) for b in (full, even)
    ]
    assert experts[0] == pytest.approx(1.5 * experts[1], rel=1e-3)
    for wrong in (
        {"expert_capacity_factor": 0.0},
        {"expert_imbalance": 0.5},
        {"expert_dispatcher": "post"},
    ):
        with pytest.raises(LayoutError, match=next(iter(wrong))):
            Job(global_batch=1, seq_len=8, **wrong)


def test_a_relayed_exchange_takes_as_long_as_its_longer_part():
    machine, kernels, prices = cluster("dgx-h100"), KernelModel.load(), CollectiveModel.load()
    over = Collective(collective="all_to_all", bytes=1e7, num_ranks=16, ranks_per_node=8, level=1)
    inside = Collective(collective="all_to_all", bytes=4e8, num_ranks=8, ranks_per_node=8)
    short, longer, relayed, no_more = (
        event_times([op], machine, kernels, prices).time_s.item()
        for op in (
            over,
            inside,
            Collective(**vars_of(over) | {"relayed_bytes": 4e8}),
            Collective(**vars_of(over) | {"relayed_bytes": 1.0}),
        )
    )
    assert longer > short
    assert relayed == longer
    assert no_more == short


def vars_of(op):
    return {name: getattr(op, name) for name in op.__slots__}


def test_sending_tokens_once_is_faster_over_nodes_and_overlap_faster_still():
    def step_s(layout="dp=16,ep=16", **job):
        return predict(
            QWEN, "dgx-h100", layout, job=Job(global_batch=64, seq_len=4096, **job)
        ).step_time_s

    plain, once = step_s(), step_s(expert_dispatcher="hybridep")
    assert once < 0.8 * plain
    assert step_s("dp=16,ep=16,ep_overlap=true", expert_dispatcher="hybridep") < once
    assert step_s(expert_imbalance=1.5) > plain


def test_layouts_with_overlapped_experts_are_read_and_written():
    layout = Layout.parse("dp=16,ep=16,ep_overlap=true,cp=2,cp_kind=all_gather,cp_balanced=false")
    assert (layout.overlap.ep_overlap, layout.cp_kind, layout.cp_balanced) == (
        True,
        "all_gather",
        False,
    )
    assert Layout.parse(str(layout)) == layout


def test_output_biases_of_experts_are_added_expert_by_expert():
    kernels = {}
    for bias in (False, True):
        found = layer(net=replace(QWEN, bias=bias))
        passes = (*found.forward, *found.backward_input)
        kernels[bias] = [op for op, times in passes if op.dtype == "fp32" for _ in range(times)]
    more = kernels[True][:]
    for op in kernels[False]:
        more.remove(op)
    assert more
    assert {op.rows for op in more} == {4096 * 8}


def test_fused_experts_leave_out_what_lies_between_their_products():
    def passes(net=QWEN, **job):
        found = layer(net=net, **job)
        return [op for op, times in (*found.forward, *found.backward_input) for _ in range(times)]

    narrow = {"dtype": "fp8", "fp8_recipe": "mxfp8"}
    apart, fused = passes(**narrow), passes(fused_experts=True, **narrow)
    left_out = apart[:]
    for op in fused:
        left_out.remove(op)
    rows, inner = 4096 * 8, QWEN.experts.ffn_hidden
    casts, activations = (
        [op for op in left_out if op.op.startswith("quantize") == is_cast]
        for is_cast in (True, False)
    )
    # of the activation, and of its gradient
    assert sorted(op.hidden for op in casts) == [
        inner,
        2 * inner,
    ]
    assert [(op.rows, op.hidden) for op in activations] == [(rows, inner)] * 2
    # other recipes and biases are not fused
    for other in (
        {"dtype": "bf16"},
        {"dtype": "fp8", "fp8_recipe": "current"},
        {"net": replace(QWEN, bias=True)} | narrow,
    ):
        assert passes(fused_experts=True, **other) == passes(**other)


@settings(deadline=None, max_examples=20)
@given(
    capacity=st.sampled_from([0.5, 1.0, 1.25]),
    sequences=st.integers(1, 4),
    length=st.sampled_from([512, 4096]),
)
def test_masks_multiply_every_token_with_every_place_of_its_sequence(capacity, sequences, length):
    """Dispatch and combine are products whose work grows with the square of the length; the
    router's weights need the gradient of one mask. Without a capacity there are no places, and
    nothing is multiplied."""

    def of(**more):
        job = Job(global_batch=sequences, seq_len=length, expert_capacity_factor=capacity, **more)
        return next(
            b for b, _ in blocks(QWEN, job, Shard(micro_batch=sequences)) if b.name == "moe_layer"
        )

    copied, multiplied = of(), of(einsum_dispatch=True)
    places = round(length * QWEN.experts.topk * capacity)
    product = 2 * sequences * length * places * QWEN.hidden
    assert matmul_flops(multiplied.forward) - matmul_flops(copied.forward) == pytest.approx(
        2 * product
    )
    both = (*multiplied.backward_input, *multiplied.backward_weight)
    before = (*copied.backward_input, *copied.backward_weight)
    assert matmul_flops(both) - matmul_flops(before) == pytest.approx(3 * product)
    assert layer(einsum_dispatch=True) == layer()
