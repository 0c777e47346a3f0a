"""Low-rank adapters on tensor-parallel ranks: what they send, compute and hold."""

from collections import Counter
from dataclasses import replace

import pytest

from perfmodel.catalog import framework, model
from perfmodel.errors import PerfModelError
from perfmodel.ops import Gemm
from perfmodel.prediction import predict
from perfmodel.spec import Job
from perfmodel.workload import Shard, blocks, is_cast, step_flops

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
        [
            (c.collective, c.bytes)
            for c in getattr(layer(**how, **job), phase)
            for _ in range(c.count)
        ]
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
    # whole rows on every rank: nothing is gathered back, but the gradient of the column-parallel
    # input is summed
    alone = {"sequence_parallel": False}
    assert added("forward_comm", **alone) == sorted([*low, ("all_gather", FULL_BYTES)])
    assert added("backward_comm", **alone) == sorted([*sums, ("all_reduce", FULL_BYTES)])


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_an_all_to_all_sends_a_share_of_what_is_gathered(tp):
    job = Job(
        global_batch=1, seq_len=TOKENS, frozen=True, adapter_rank=RANK, adapter_all_to_all=True
    )
    found = next(
        b
        for b, _ in blocks(NET, job, Shard(tp=tp, sequence_parallel=True))
        if b.name == "dense_layer"
    )
    for comms in (found.forward_comm, found.backward_comm):
        assert [c.bytes for c in comms if c.collective == "all_to_all"] == [FULL_BYTES / tp]
        assert not [
            c for c in comms if c.collective == "all_gather" and c.bytes == FULL_BYTES and c.follows
        ]


@pytest.mark.parametrize("exchanges", [False, True])
def test_ranks_share_the_adapters_weights_and_products(exchanges):
    def held(tp):
        return layer(tp, adapter_rank=RANK, adapter_all_to_all=exchanges)

    def flops(block):
        passes = (*block.forward, *block.backward_input)
        low = [
            (op, n) for op, n in passes if isinstance(op, Gemm) and min(op.m, op.n, op.k) <= RANK
        ]
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

    for layout in (
        "tp=4,dp=2,sequence_parallel=true",
        "tp=4,dp=2,sequence_parallel=true,tp_overlap=true",
    ):
        gathered_s, exchanged_s = step_s(layout), step_s(layout, adapter_all_to_all=True)
        assert step_s(layout, adapter_rank=0) < exchanged_s < gathered_s


def test_ranks_that_have_just_met_wait_for_none_of_them():
    """Collectives of adapters follow those of their layers: ranks wait for no larger a share of
    their kernels."""
    job = Job(global_batch=8, seq_len=TOKENS, frozen=True)
    shares = []
    for rank in (0, RANK):
        adapted = replace(job, adapter_rank=rank)
        prediction = predict(
            NET,
            "dgx-h100",
            "tp=4,dp=2,sequence_parallel=true",
            job=adapted,
            framework=framework("nemo@2024"),
        )
        parts_s = prediction.breakdown_s
        shares.append(
            parts_s["waiting_for_slowest_rank"] / (parts_s["forward"] + parts_s["backward"])
        )
    without, with_adapters = shares
    assert 0 < with_adapters <= without
    assert with_adapters == pytest.approx(without, rel=0.05)


def _trained(modules, **job):
    """Parameters of adapters of a layer, and FLOPs of their forward products."""
    job = {"adapter_rank": RANK, "adapter_modules": modules} | job
    bare, adapted = layer(tp=1), layer(tp=1, **job)
    flops = [
        sum(op.flops * n for op, n in block.forward if isinstance(op, Gemm))
        for block in (bare, adapted)
    ]
    return adapted.params - bare.params, flops[1] - flops[0]


HIDDEN, KEYS, FFN = NET.hidden, NET.kv_heads * NET.head_dim, NET.ffn_hidden
SIDES = {
    "linear_qkv": 2 * HIDDEN + 2 * KEYS,
    "q_proj": 2 * HIDDEN,
    "k_proj": HIDDEN + KEYS,
    "v_proj": HIDDEN + KEYS,
    "linear_proj": 2 * HIDDEN,
    "linear_fc1": HIDDEN + 2 * FFN,
    "gate_proj": HIDDEN + FFN,
    "up_proj": HIDDEN + FFN,
    "linear_fc2": FFN + HIDDEN,
}
"""Inputs and outputs of every product of a layer."""


@pytest.mark.parametrize(
    "modules", [(name,) for name in SIDES] + [("q_proj", "v_proj"), ("linear_proj", "linear_fc2")]
)
def test_adapters_stand_beside_the_products_that_are_named(modules):
    """Each has a matrix of its rank on either side, which every token passes."""
    params, flops = _trained(modules)
    sides = sum(SIDES[name] for name in modules)
    assert params == RANK * sides
    assert flops == 2 * TOKENS * params
    job = Job(
        global_batch=1, seq_len=TOKENS, frozen=True, adapter_rank=RANK, adapter_modules=modules
    )
    assert step_flops(NET, job).adapters_forward == pytest.approx(NET.layers * flops)


def test_adapters_without_dropout_keep_their_shared_input_once():
    three = ("q_proj", "k_proj", "v_proj")

    def kept_bytes(modules, drops):
        job = {"adapter_rank": RANK, "adapter_modules": modules, "adapter_dropout": drops}
        return layer(tp=1, **job).activation_bytes.none - layer(tp=1).activation_bytes.none

    assert kept_bytes(three, False) == kept_bytes(three[:1], False) == FULL_BYTES
    assert kept_bytes(three, True) == 3 * kept_bytes(three[:1], True) == 3 * 1.5 * FULL_BYTES
    names = [op.op for op, _ in layer(tp=1, adapter_rank=RANK, adapter_dropout=False).forward]
    assert "dropout" not in names


@pytest.mark.parametrize(("base", "n_bytes"), [("nf4", 4.127 / 8), ("int8", 1.0), ("fp32", 4.0)])
def test_stored_weights_take_their_bytes_and_a_pass_before_every_product(base, n_bytes):
    """Embedding and head stay as they are; ZeRO 3 gathers weights as they are stored."""
    job = Job(global_batch=8, seq_len=2048, frozen=True, adapter_rank=RANK)
    narrow = replace(job, base_weights=base)
    of_layers = NET.layers * layer(tp=1).params
    outside = 2 * NET.vocab * NET.hidden
    found = {
        each.fine_tuning.base_weights: predict(
            "llama3-8b", "dgx-a100", "dp=8", global_batch=8, job=each
        )
        for each in (job, narrow)
    }
    assert found[base].memory.weights == pytest.approx(2 * outside + n_bytes * of_layers, rel=0.01)
    assert found[""].memory.weights == pytest.approx(2 * (outside + of_layers), rel=0.01)
    assert found[base].step_time_s > found[""].step_time_s
    sharded = [
        predict("llama3-8b", "dgx-a100", "dp=8,zero=3", global_batch=8, job=each).memory
        for each in (job, narrow)
    ]
    assert (sharded[1].buffers < sharded[0].buffers) == (n_bytes < 2)
    # what comes out wide is read as often as products read their weights
    block = layer(tp=1, base_weights=base)
    passes = [
        op
        for op, n in (*block.forward, *block.backward_input)
        for _ in range(n)
        if op.op == "mul_scalar"
    ]
    assert sum(op.rows * op.hidden for op in passes) == pytest.approx(
        2 * layer(tp=1).params * (n_bytes + 2) / 4, rel=0.01
    )


def test_a_gather_of_stored_weights_sends_their_bytes():
    def step_s(cluster, **job):
        job = Job(global_batch=64, seq_len=512, frozen=True, adapter_rank=RANK, **job)
        return predict("llama2-70b", cluster, "dp=64,zero=3", global_batch=64, job=job).step_time_s

    assert step_s("generic", base_weights="nf4") < 0.7 * step_s("generic")


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"adapter_modules": ("linear_qkv", "k_proj")}, "linear_qkv and its part k_proj"),
        ({"adapter_modules": ("lm_head",)}, "adapter module"),
        ({"base_weights": "nf4"}, "needs frozen weights"),
        ({"base_weights": "int3", "frozen": True}, "base_weights must be nf4, int8"),
        ({"base_weights": "nf4", "frozen": True, "dtype": "fp8"}, "16-bit or wider"),
    ],
)
def test_what_adapters_cannot_be_is_refused(job, message):
    with pytest.raises(PerfModelError, match=message):
        Job(global_batch=1, seq_len=TOKENS, **job)


def test_the_operation_fuser_leaves_products_and_takes_their_neighbours():
    """Fused, the same products remain; scales and sums of adapters are part of them."""

    def kernels(phase, **job):
        counts = Counter()
        for op, n in getattr(layer(1, adapter_rank=RANK, adapter_dropout=False, **job), phase):
            counts[op] += n
        return counts

    for phase in ("forward", "backward_input"):
        apart, fused = kernels(phase), kernels(phase, operation_fuser=True)
        assert not fused - apart
        gone = Counter()
        for op, n in (apart - fused).items():
            gone[op.op] += n
        # two adapters a layer: one scale and one sum each, forward and backward
        assert gone == {"mul_scalar": 2, "add": 2}
    # tensor-parallel products keep theirs
    assert layer(4, adapter_rank=RANK) == layer(4, adapter_rank=RANK, operation_fuser=True)


@pytest.mark.parametrize(
    ("recipe", "fewer"), [("delayed", 1), ("mxfp8", 1), ("current", 0), ("nvfp4", 0), ("", 0)]
)
def test_the_operation_fuser_casts_in_activations_where_scales_are_known(recipe, fewer):
    job = {"dtype": "fp4" if recipe == "nvfp4" else "fp8", "fp8_recipe": recipe}
    for phase in ("forward", "backward_input"):
        casts = [
            sum(n for op, n in getattr(layer(1, **job, operation_fuser=on), phase) if is_cast(op))
            for on in (False, True)
        ]
        assert casts[0] - casts[1] == fewer
    adapted = job | {
        "adapter_rank": RANK,
        "adapter_modules": ("linear_fc1", "linear_fc2"),
        "operation_fuser": True,
    }
    casts = sum(n for op, n in layer(1, **adapted).forward if is_cast(op))
    assert casts == sum(n for op, n in layer(1, **job).forward if is_cast(op))


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "mxfp8"])
def test_frozen_weights_need_no_transposed_operands(recipe):
    trained, frozen = (
        next(
            block
            for block, _ in blocks(
                NET,
                Job(global_batch=1, seq_len=TOKENS, dtype="fp8", fp8_recipe=recipe, frozen=frozen),
                Shard(),
            )
            if block.name == "dense_layer"
        )
        for frozen in (False, True)
    )
    casts = [[op for op, _ in block.forward if is_cast(op)] for block in (trained, frozen)]
    for wide, narrow in zip(*casts, strict=True):
        # a byte fewer for every element: the rows of the measured kernel stand for 3 bytes each
        assert 3 * (wide.rows - narrow.rows) == pytest.approx(TOKENS, abs=3)
