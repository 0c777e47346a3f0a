"""Model states sharded, copied between groups and kept on the host: laws of time and memory."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.cost import KernelModel
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.ops import Collective, Op
from perfmodel.prediction import evaluate, explain, layout_batches, step_problem
from perfmodel.prediction.composition import bundle_events
from perfmodel.prediction.grids import LayoutGrid, lower_bounds_s, price_grids
from perfmodel.prediction.host import host_bytes_per_parameter, host_update_s, node_memory_bandwidth
from perfmodel.prediction.memory import peak_memory
from perfmodel.program import Kind
from perfmodel.spec import Framework, Job, Layout, Recompute
from perfmodel.workload import optimizer_op

MODELS = ("gpt3-1.3b", "llama3-8b", "mixtral-8x7b")
SLOW = 1 + 1e-5


@st.composite
def steps(draw):
    model, cluster = draw(st.sampled_from(MODELS)), draw(st.sampled_from(["dgx-a100", "dgx-h100"]))
    pp, dp, micro_batch = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([2, 4, 16])),
        draw(st.integers(1, 2)),
    )
    layout = Layout(
        tp=draw(st.sampled_from([1, 2])),
        pp=pp,
        dp=dp,
        micro_batch=micro_batch,
        replicate=draw(st.sampled_from([1, 2])),
        recompute=draw(st.sampled_from(["none", "full"])),
    )
    whole = draw(st.booleans())
    job = Job(
        global_batch=dp * micro_batch * pp * draw(st.sampled_from([1, 2])),
        seq_len=2048,
        whole_gradients_in_pipelines=whole,
    )
    return step_problem(catalog.model(model), catalog.cluster(cluster), job), layout


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps())
def test_sharding_more_and_overlapping_less_are_never_faster(step):
    """At equal overlap every stage of ZeRO does what the one before it does and more; what overlaps
    waits for less."""
    problem, layout = step
    choices = list(product((1, 2, 3), (True, False), (True, False)))
    names = ("zero", "overlap_grad_reduce", "overlap_param_gather")
    layouts = [layout.replace(**dict(zip(names, choice, strict=True))) for choice in choices]
    time_s = dict(zip(choices, evaluate(problem, layouts).step_time_s.tolist(), strict=True))
    for zero, reduces, gathers in choices:
        own = time_s[zero, reduces, gathers]
        if zero < 3:
            assert own <= time_s[zero + 1, reduces, gathers] * SLOW
        assert time_s[zero, True, gathers] <= own * SLOW
        assert time_s[zero, reduces, True] <= own * SLOW


def test_gradients_that_pipelines_keep_whole_are_those_of_zero_1():
    """torch's pipelining reduces once, whatever is sharded: whole gradients in memory, and none of
    the traffic of every micro-batch."""
    asked = catalog.problem("llama3-8b", "dgx-h100", global_batch=64, framework="torchtitan")
    problem, each = (
        step_problem(
            asked.model, asked.cluster, replace(asked.job, whole_gradients_in_pipelines=whole)
        )
        for whole in (asked.job.gradients.whole_gradients_in_pipelines, False)
    )
    one = Layout(pp=4, dp=8, zero=1)
    exposed = "data_parallel_communication_exposed"
    for zero in (2, 3):
        more = one.replace(zero=zero)
        assert explain(problem, more).memory.gradients == explain(problem, one).memory.gradients
        assert explain(problem, more).memory.gradients == pytest.approx(
            8 * explain(each, more).memory.gradients
        )
        alone = Layout(dp=8, zero=zero)
        assert explain(problem, alone).memory.gradients == explain(each, alone).memory.gradients
        assert explain(problem, alone).step_time_s == explain(each, alone).step_time_s
        apart = more.replace(overlap_grad_reduce=False)
        reduced_each_s = (
            explain(each, apart).breakdown_s[exposed] - explain(problem, apart).breakdown_s[exposed]
        )
        # Gathers of ZeRO 3 stay; of 8 reductions one is left.
        assert reduced_each_s > 0
        if zero == 2:
            assert (
                explain(each, apart).breakdown_s[exposed]
                > 4 * explain(problem, apart).breakdown_s[exposed]
            )


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_accumulate_whole_are_reduced_once(zero: int) -> None:
    """As torch's `no_sync`: whole gradients in memory, one reduction however many micro-batches
    there are, and no difference where there is only one."""
    asked = catalog.problem("llama3-8b", "dgx-h100", global_batch=64)
    layout = Layout(dp=8, zero=zero, overlap_grad_reduce=False, overlap_param_gather=False)

    def explained(global_batch: int, whole: bool):
        job = replace(asked.job, global_batch=global_batch, whole_gradients_in_accumulation=whole)
        return explain(step_problem(asked.model, asked.cluster, job), layout)

    once, each = (explained(64, whole) for whole in (True, False))
    assert once.memory.gradients == pytest.approx(8 * each.memory.gradients)
    assert once.step_time_s < each.step_time_s
    single, as_before = (explained(8, whole) for whole in (True, False))
    assert single.memory == as_before.memory
    assert single.step_time_s == pytest.approx(as_before.step_time_s, rel=1e-9)


@pytest.mark.parametrize("zero", [2, 3])
def test_copies_of_shards_are_reduced_once_where_pipelines_defer_it(zero: int) -> None:
    """Between the copies of hybrid sharding gradients are reduced after the last micro-batch alone:
    four times the micro-batches take no more of it."""
    asked = catalog.problem("llama3-8b", "dgx-h100", global_batch=64, framework="torchtitan")

    def copies_s(global_batch: int) -> float:
        problem = step_problem(
            asked.model, asked.cluster, replace(asked.job, global_batch=global_batch)
        )
        layout = Layout(
            pp=4, dp=16, zero=zero, overlap_grad_reduce=False, overlap_param_gather=False
        )
        apart, together = (
            explain(problem, layout.replace(replicate=n)).step_time_s for n in (2, 1)
        )
        return apart - together

    assert copies_s(256) <= copies_s(64) * (1 + 1e-3) + 1e-4


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps(),
    st.integers(1, 3),
    st.sampled_from(["none", "optimizer", "weights"]),
    st.sampled_from([1, 2, 4]),
)
def test_bounds_hold_and_memory_is_exact_for_states_in_groups_and_on_the_host(
    step, zero, offload, prefetch
):
    problem, layout = step
    assume(offload != "weights" or zero == 3)
    states = layout.replace(zero=zero, offload_states=offload, prefetch=prefetch)
    either = product((True, False), (True, False))
    layouts = [states.replace(overlap_grad_reduce=r, overlap_param_gather=g) for r, g in either]
    bound, exact = lower_bounds_s(problem, layouts), evaluate(problem, layouts).step_time_s
    assert (bound <= exact * SLOW).all()
    costs = list(price_grids(problem, [LayoutGrid.of(one) for one in layouts]))
    assert [cost.peak_bytes.item() for cost in costs] == pytest.approx(
        peak_memory(problem, layouts)[0].tolist()
    )


def _slow_network():
    cluster = catalog.cluster("dgx-a100")
    slowed = lambda one: replace(one, bandwidth_bytes_per_s=one.bandwidth_bytes_per_s / 8)  # noqa: E731
    inside, *outside = cluster.levels
    return replace(cluster, levels=(inside, *(slowed(one) for one in outside)))


def _found(cluster=None, mode="train", **changes):
    job = Job(global_batch=64, seq_len=4096, mode=mode)
    problem = step_problem(catalog.model("llama2-13b"), cluster or catalog.cluster("dgx-a100"), job)
    return explain(problem, Layout(dp=32, zero=3, micro_batch=2).replace(**changes), timeline=True)


def test_hybrid_sharding_lies_between_replicas_and_shards_over_all():
    """Groups of a node: more memory than shards over 32 ranks, less than whole states, and no
    traffic between nodes but one reduction of each shard."""
    everywhere, in_node, replicated = _found(), _found(replicate=4), _found(zero=0)
    assert everywhere.memory.peak < in_node.memory.peak < replicated.memory.peak
    assert in_node.memory.optimizer == pytest.approx(4 * everywhere.memory.optimizer)
    assert in_node.memory.weights == pytest.approx(4 * everywhere.memory.weights)
    assert _found(zero=1, replicate=4).step_time_s <= in_node.step_time_s * SLOW
    slow = _slow_network()
    # weights are gathered inside nodes
    assert (
        _found(slow, "inference", replicate=4).step_time_s
        < 0.9 * _found(slow, "inference").step_time_s
    )


def test_every_layer_is_gathered_and_reduced_by_itself():
    """The timeline has a gather before each use and a reduction after each backward, in both
    passes."""
    found = _found(micro_batch=1)
    kinds = found.timeline.structure.kind
    groups, micro_batches = 16, 2
    for kind in (Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD, Kind.GRAD_REDUCE):
        assert (kinds == kind).sum() == groups * micro_batches


def test_states_on_the_host_free_memory_and_cost_copies_and_updates():
    asked = step_problem(
        catalog.model("llama2-13b"), catalog.cluster("dgx-a100"), Job(global_batch=32, seq_len=2048)
    )
    usual, optimizer, weights = (
        _found(offload_states=where) for where in ("none", "optimizer", "weights")
    )
    assert optimizer.memory.optimizer == optimizer.memory.gradients == 0 < usual.memory.optimizer
    assert optimizer.memory.weights == usual.memory.weights
    assert weights.memory.weights == 0
    assert weights.memory.buffers == usual.memory.buffers
    params = usual.memory.optimizer / 12
    # eight devices share a host; 16-bit weights cross the link while others are updated
    device = catalog.device("a100-sxm-80gb")
    update_s = max(
        params * host_update_s(asked.setting, 8), 2 * params / device.host_bandwidth_bytes_per_s
    )
    # and what a step takes that updates next to nothing
    least_s = (
        KernelModel.load()
        .times(device, [optimizer_op(1, Job(global_batch=32, seq_len=2048))])
        .time_s.item()
    )
    assert optimizer.breakdown_s["optimizer"] == pytest.approx(update_s + least_s, rel=1e-6)
    assert usual.step_time_s < optimizer.step_time_s <= weights.step_time_s * SLOW


def _update_s(cluster: str, ranks: int, framework: Framework | None = None, **job) -> float:
    """Seconds in which every of so many ranks of a node has one parameter updated on the host."""
    problem = step_problem(
        catalog.model("llama3-8b"),
        catalog.cluster(cluster),
        Job(global_batch=64, seq_len=2048, **job),
        None,
        framework or Framework(),
    )
    return host_update_s(problem.setting, ranks)


def test_ranks_of_a_node_share_the_memory_of_their_host():
    """On PCIe; every Grace brings memory of its own."""
    assert _update_s("dgx-a100", 8) == pytest.approx(4 * _update_s("dgx-a100", 2))
    assert _update_s("gb200-nvl72", 72) == pytest.approx(_update_s("gb200-nvl72", 4))
    bandwidths = [
        node_memory_bandwidth(catalog.device(name), 8)
        for name in ("V100", "A100", "H100", "GH200-96GB")
    ]
    assert bandwidths == sorted(bandwidths)


PCIE_3, PCIE_4, PCIE_5, PCIE_6 = 15.75e9, 31.5e9, 63e9, 126e9
TWO_PROCESSORS = {
    PCIE_3: 2 * 6 * 2666e6 * 8,  # Xeon Skylake, DDR4-2666
    PCIE_4: 2 * 8 * 3200e6 * 8,  # EPYC Rome, DDR4-3200
    PCIE_5: 2 * 8 * 4800e6 * 8,  # Xeon Sapphire Rapids, DDR5-4800
    PCIE_6: 2 * 8 * 6400e6 * 8,  # Xeon Granite Rapids, DDR5-6400
}
"""Rate of a link of 16 lanes one way, and memory bandwidth of the processors that came with it."""


def test_the_link_tells_the_generation_of_the_host():
    device = catalog.device("H100")
    for link, bandwidth in TWO_PROCESSORS.items():
        for rate in (link, link * 1.9 if link < PCIE_6 else link):  # up to the next generation
            host = replace(device, host_bandwidth_bytes_per_s=rate)
            assert node_memory_bandwidth(host, 8) == node_memory_bandwidth(host, 1) == bandwidth
    # half the lanes, and a device that does not say, have the oldest; what is faster is coherent, a
    # Grace for 450 GB/s
    for rate in (PCIE_3 / 2, None):
        host = replace(device, host_bandwidth_bytes_per_s=rate)
        assert node_memory_bandwidth(host, 8) == TWO_PROCESSORS[PCIE_3]
    coherent = replace(device, host_bandwidth_bytes_per_s=225e9)
    assert node_memory_bandwidth(coherent, 4) == pytest.approx(2 * 512e9)


def test_what_moves_more_bytes_takes_the_host_longer():
    plain = _update_s("dgx-h100", 8)
    assert (
        _update_s("dgx-h100", 8, optimizer="adam8bit")
        < plain
        < _update_s("dgx-h100", 8, dtype="fp16")
    )
    eager = Framework(eager_host_updates=True)
    job = Job(global_batch=64, seq_len=2048)
    moved = [host_bytes_per_parameter(job, eager=is_eager) for is_eager in (True, False)]
    assert _update_s("dgx-h100", 8, eager) == pytest.approx(plain * moved[0] / moved[1])
    # operator by operator in fp32: decay, first moment, two for the second, root, division, sum,
    # update; or one loop
    assert moved[0] - moved[1] == (8 + 12 + 8 + 16 + 8 + 8 + 8 + 16) - 28


def test_few_threads_update_as_fast_as_they_stream():
    """Until the memory's bandwidth is used up."""
    seconds = [
        _update_s("dgx-h100", 8, Framework(host_threads=threads)) for threads in (1, 2, 64, 128, 0)
    ]
    assert seconds[0] == pytest.approx(2 * seconds[1])
    assert seconds[2] == seconds[3] == seconds[4]
    # a process that has a node to itself takes all of its cores
    assert _update_s("dgx-h100", 1, Framework(host_threads=1)) == _update_s(
        "dgx-h100", 1, Framework()
    )
    assert _update_s("dgx-h100", 8, Framework(host_updates_per_s=1e9)) == 8e-9
    with pytest.raises(PerfModelError, match="host_threads"):
        Framework(host_threads=-1)


@pytest.mark.parametrize(
    "layout", ["dp=16", "dp=16,zero=1", "dp=16,overlap_grad_reduce=false", "tp=2,pp=2,dp=4"]
)
def test_reducing_every_micro_batch_costs_a_reduction_each_and_no_memory(layout):
    def found(global_batch, every):
        job = Job(global_batch=global_batch, seq_len=1024, reduce_every_micro_batch=every)
        problem = step_problem(catalog.model("gpt3-1.3b"), catalog.cluster("generic"), job)
        parsed = Layout.parse(layout)
        p = explain(problem, parsed)
        (bound_s,) = lower_bounds_s(problem, [parsed])
        assert bound_s <= p.step_time_s * SLOW
        return p

    replicas = Layout.parse(layout).dp
    once, every = found(8 * replicas, False), found(8 * replicas, True)
    name = "data_parallel_communication_exposed"
    # a pipeline hides them in its bubble
    least = 1 - 1e-6 if "pp" in layout else 3
    assert every.breakdown_s[name] > least * once.breakdown_s[name]
    assert every.memory == once.memory
    assert found(replicas, True).step_time_s == pytest.approx(
        found(replicas, False).step_time_s, rel=1e-6
    )


def test_gradients_that_lie_sharded_are_reduced_every_micro_batch_anyway():
    job = Job(global_batch=64, seq_len=1024)
    layout = Layout(dp=16, zero=2)
    times = [
        explain(
            step_problem(catalog.model("gpt3-1.3b"), catalog.cluster("dgx-a100"), each), layout
        ).step_time_s
        for each in (job, replace(job, reduce_every_micro_batch=True))
    ]
    assert times[0] == times[1]


def test_prefetching_more_layers_holds_more_of_them():
    one, three = _found(), _found(prefetch=3)
    layer = 2 * 4 * 5120**2 + 2 * 3 * 5120 * 13824 + 2 * 2 * 5120
    assert three.memory.buffers - one.memory.buffers == pytest.approx(2 * layer)
    assert three.step_time_s <= one.step_time_s * SLOW


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replicate": 3}, "must divide dp=32"),
        ({"offload_states": "weights", "zero": 2}, "needs zero=3"),
        ({"offload_states": "optimizer", "zero": 0}, "needs sharded states"),
        ({"offload_states": "disk"}, "none, optimizer or weights"),
        ({"prefetch": 0}, "prefetch must be a whole number of at least 1"),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(changes, words):
    with pytest.raises(LayoutError, match=words):
        Layout(dp=32, zero=3).replace(**changes)


def test_the_notation_holds_all_of_it():
    layout = Layout(dp=32, zero=3, replicate=4, prefetch=2, offload_states="weights")
    assert layout.label == "tp=1,pp=1,dp=32,zero=3,replicate=4,prefetch=2,offload_states=weights"
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("model", ["gpt3-1.3b", "llama3-8b"])
def test_lists_of_partitions_cost_time_for_every_rank_and_weight(model: str) -> None:
    """DeepSpeed of 2021 cut and copied each rank's part of each weight by itself: the host's time
    grows with ranks."""
    listing = Framework(
        overlap_param_gather=False, overlap_grad_reduce=False, partition_copy_s=10e-6
    )
    buffers = listing.replace(partition_copy_s=0.0)

    def step_s(framework: Framework, dp: int, zero: int) -> float:
        layout = Layout(
            dp=dp,
            zero=zero,
            recompute="full",
            overlap_param_gather=False,
            overlap_grad_reduce=False,
        )
        job = Job(global_batch=dp, seq_len=2048)
        problem = step_problem(
            catalog.model(model), catalog.cluster("dgx-a100"), job, framework=framework
        )
        return explain(problem, layout).step_time_s

    def copies_s(dp: int, zero: int = 3) -> float:
        return step_s(listing, dp, zero) - step_s(buffers, dp, zero)

    assert copies_s(8, zero=0) == copies_s(8, zero=1) == copies_s(8, zero=2) == 0
    assert copies_s(64) == pytest.approx(8 * copies_s(8), rel=1e-6)
    # A layer gathers its matrices twice and reduces them, its biases and its norms once.
    transformer = catalog.model(model)
    matrices = 4
    vectors = 4 * transformer.block.bias + (4 if transformer.norms.norm == "layer_norm" else 2)
    layers = transformer.layers * 8 * (3 * matrices + vectors) * 10e-6
    # The head is the only product outside layers.
    assert copies_s(8) == pytest.approx(layers + 8 * 3 * 10e-6, rel=0.01)


@pytest.mark.parametrize(
    ("model", "recompute", "kept", "again"),
    [
        ("gpt3-175b", "full", 1e9, 1 - 1e9 / (2 * 12 * 12288**2)),
        ("gpt3-175b", "full", 1.0, 1.0),
        ("gpt3-175b", "full", 1e10, 0.0),
        ("gpt3-175b", "full", 0.0, 0.0),
        ("gpt3-175b", "none", 1e9, 0.0),
        ("gpt3-175b", "selective", 1e9, 0.0),
        ("gpt3-1.3b", "full", 1e9, 0.0),
    ],
)
def test_weights_released_in_recompute_are_gathered_a_third_time(
    model: str, recompute: Recompute, kept: float, again: float
) -> None:
    """A layer's backward gathers once more what its recompute has used too many parameters ago
    (DeepSpeed); FSDP keeps what it gathered, and layers that are not recomputed use each weight
    once. The search's bound holds."""
    framework = Framework(overlap_param_gather=False, overlap_grad_reduce=False, live_params=kept)
    layout = Layout(
        dp=64, zero=3, recompute=recompute, overlap_param_gather=False, overlap_grad_reduce=False
    )
    problem = step_problem(
        catalog.model(model),
        catalog.cluster("dgx-a100"),
        Job(global_batch=64, seq_len=2048),
        framework=framework,
    )
    (batch,) = layout_batches(problem, [layout])
    events = bundle_events(problem, batch, 0)

    def layer_bytes(kind: Kind) -> float:
        tables = [table for table in events.tables if table.kind == kind]
        ops = [op for table in tables for op in gathered(events.ops, table.index[0, 1])]
        return sum(op.bytes for op in ops)

    def gathered(ops: dict[Op, int], number: int) -> list[Collective]:
        return [op for op, place in ops.items() if place == number and isinstance(op, Collective)]

    forward, backward = layer_bytes(Kind.PARAM_GATHER), layer_bytes(Kind.PARAM_GATHER_BACKWARD)
    assert forward > 0
    assert backward == pytest.approx((1 + again) * forward, rel=1e-3)
    assert lower_bounds_s(problem, [layout])[0] <= explain(problem, layout).step_time_s * SLOW


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("overlaps", [True, False])
def test_backward_passes_gather_from_secondary_shards(overlaps, recompute):
    """ZeRO++'s hpZ: over eight nodes the backward passes of ranks with a copy in every node gather
    inside it, forward passes as before. It is faster, and the search's bound holds."""
    layout = Layout(
        dp=64,
        zero=3,
        recompute=recompute,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
    )
    plain, copied = (
        step_problem(
            catalog.model("llama3-8b"),
            catalog.cluster("dgx-h100"),
            Job(global_batch=64, seq_len=2048, secondary_shards=shards),
        )
        for shards in (0, 8)
    )
    gathered_over = {}
    for problem in (plain, copied):
        step = explain(problem, layout)
        assert lower_bounds_s(problem, [layout])[0] <= step.step_time_s * SLOW
        (batch,) = layout_batches(problem, [layout])
        gathers = [
            op
            for op in bundle_events(problem, batch, 0).ops
            if getattr(op, "collective", "") == "all_gather"
        ]
        gathered_over[problem.job.gradients.secondary_shards] = {op.num_ranks for op in gathers}
    assert gathered_over == {0: {64}, 8: {64, 8}}
    assert explain(copied, layout).step_time_s < explain(plain, layout).step_time_s
