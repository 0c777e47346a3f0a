"""Events of blocks against a count one by one: how often each occurs, what launches and issues it,
what may overlap."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.ops import Collective, Gemm
from perfmodel.prediction import EAGER, step_problem
from perfmodel.prediction.blocks import (
    COLLECTIVE_CHECK_S,
    GRAPH_OPERATORS,
    ShardBlocks,
    block_events,
    count_events,
    shard_events,
)
from perfmodel.prediction.overlap import BlockEvents
from perfmodel.prediction.phases import Phase
from perfmodel.prediction.placement import Network
from perfmodel.spec import Framework, Job, Layout, Transformer
from perfmodel.workload import Shard, blocks, is_cast

LLAMA, QWEN = catalog.model("llama3-8b"), catalog.model("qwen3-30b-a3b")
GPT = catalog.model("gpt3-1.3b")
DEVICE = catalog.device("H100-SXM5-80GB")
JOB = Job(global_batch=4, seq_len=2048)
NETWORKS = {
    "tp": Network(4, 4, 0, 1),
    "cp": Network(2, 2, 0, 1),
    "ep": Network(8, 4, 1, 2),
    "etp": Network(2, 2, 0, 1),
}
PHASES = {
    Phase.FORWARD: ("forward", "forward_comm"),
    Phase.BACKWARD_INPUT: ("backward_input", "backward_comm"),
    Phase.BACKWARD_WEIGHT: ("backward_weight", ""),
    Phase.RECOMPUTE_SELECTIVE: ("recompute_selective", "recompute_selective_comm"),
    Phase.RECOMPUTE_FULL: ("recompute_full", "recompute_full_comm"),
}
CASES: list[tuple[Transformer, Shard, dict[str, Any]]] = [
    (LLAMA, Shard(), {}),
    (LLAMA, Shard(tp=4), {"frozen": True}),
    (LLAMA, Shard(tp=4, cp=2, sequence_parallel=True), {"recompute_modules": ("core_attn", "mlp")}),
    (QWEN, Shard(ep=8), {"dtype": "fp8", "fp8_recipe": "current"}),
    (QWEN, Shard(tp=4, ep=8, etp=2, sequence_parallel=True), {}),
    (LLAMA, Shard(tp=4, sequence_parallel=True), {"frozen": True, "adapter_rank": 8}),
]


def counted(net: Transformer, shard: Shard, **job: Any) -> ShardBlocks:
    work = replace(JOB, **job)
    return count_events(blocks(net, work, shard), NETWORKS, work)


def events_of(
    counted_events: ShardBlocks, framework: Framework = EAGER, **flags: Any
) -> BlockEvents:
    return block_events(counted_events, framework, DEVICE, 1, **flags)


@pytest.mark.parametrize(("net", "shard", "job"), CASES)
def test_every_event_of_a_block_is_counted_in_its_phase(
    net: Transformer, shard: Shard, job: dict[str, Any]
) -> None:
    """Kernels by themselves, collectives by their group and what they overlap with; frozen weights
    have no gradients, and a group of one rank exchanges nothing."""
    work = replace(JOB, **job)
    events = counted(net, shard, **job)
    for number, (block, repeats) in enumerate(blocks(net, work, shard)):
        assert events.blocks[number] == block
        assert events.repeats[number] == repeats
        for phase, (kernels_name, comms_name) in PHASES.items():
            expected: Counter[Any] = Counter()
            if not (work.fine_tuning.frozen and phase == Phase.BACKWARD_WEIGHT):
                for op, count in getattr(block, kernels_name):
                    expected[op, "", False, False, False] += count
            for comm in getattr(block, comms_name) if comms_name else ():
                op = NETWORKS[comm.group].collective(
                    comm.collective, comm.bytes, work.dtype, comm.choice, comm.exchange
                )
                expected[
                    op, comm.group, comm.overlappable, comm.beside_attention, comm.follows
                ] += comm.count
            columns = (
                events.ops,
                events.groups,
                events.overlappable,
                events.beside_attention,
                events.follows,
            )
            found: Counter[Any] = Counter()
            for *event, count in zip(*columns, events.counts[number, phase], strict=True):
                if count:
                    op, group, *flags = event
                    found[op, group, *map(bool, flags)] += count
            assert found == expected, (block.name, phase.name)
    assert events.kinds == tuple(
        (block.is_layer, repeats) for block, repeats in blocks(net, work, shard)
    )


def test_groups_of_one_rank_have_no_events() -> None:
    alone = {group: Network(1, 1, 0, 1) for group in NETWORKS}
    shard = Shard(tp=4, ep=8, etp=2, sequence_parallel=True)
    found = count_events(blocks(QWEN, JOB, shard), alone, JOB)
    assert not any(isinstance(op, Collective) for op in found.ops)
    assert set(found.groups) == {""}


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize(
    ("net", "frozen"), [(GPT, False), (GPT, True), (LLAMA, False), (LLAMA, True), (QWEN, False)]
)
def test_parameters_outside_experts_count_tied_tables_where_stages_hold_them_again(
    net: Transformer, frozen: bool, pipelined: bool
) -> None:
    job = {"frozen_embedding": frozen}
    events = counted(net, Shard(), **job)
    held = [block for block, _ in blocks(net, replace(JOB, **job), Shard())]
    tied = [block.tied_params * pipelined for block in held]
    dense = [
        block.params - block.expert_params + copies
        for block, copies in zip(held, tied, strict=True)
    ]
    assert events.dense_params(pipelined).tolist() == dense
    frozen_params = [
        block.frozen_params + copies * frozen for block, copies in zip(held, tied, strict=True)
    ]
    assert events.frozen_params(pipelined, replace(JOB, **job)).tolist() == frozen_params
    assert events.tied_params == (50_304 * net.hidden if net is GPT else 0)
    assert events.expert_params.tolist() == [block.expert_params for block in held]


# --- what hosts issue
# ------------------------------------------------------------------------------------------

BOOKKEEPING = EAGER.replace(
    host_op_s=1e-5,
    forward_bookkeeping=11,
    backward_bookkeeping=13,
    routing_forward_bookkeeping=50,
    routing_backward_bookkeeping=20,
)


@pytest.mark.parametrize("execution", ["eager", "layer_graphs"])
@pytest.mark.parametrize(("net", "shard", "job"), CASES)
def test_hosts_issue_every_event_and_what_layers_and_routing_need_besides(
    net: Transformer, shard: Shard, job: dict[str, Any], execution: str
) -> None:
    """Routing again where a layer of experts is recomputed; of a layer in a graph, experts'
    products and their exchanges, and a few operators to launch it."""
    events = counted(net, shard, **job)
    framework = BOOKKEEPING if execution == "eager" else BOOKKEEPING.replace(execution=execution)
    made = events_of(events, framework)
    for number, block in enumerate(events.blocks):
        for phase in Phase:
            launched = outside = 0.0
            columns = (events.ops, events.groups, events.counts[number, phase].tolist())
            for op, group, count in zip(*columns, strict=True):
                launched += count
                if (isinstance(op, Gemm) and op.op == "grouped_linear") or group in ("ep", "etp"):
                    outside += count
            is_forward, is_backward = phase == Phase.FORWARD, phase == Phase.BACKWARD_INPUT
            issued = launched
            if block.is_layer:
                issued += 11 * is_forward + 13 * is_backward
                if block.expert_params:
                    issued += 50 * (is_forward or phase == Phase.RECOMPUTE_FULL) + 20 * is_backward
                if execution == "layer_graphs":
                    issued = outside + GRAPH_OPERATORS * (is_forward or is_backward)
            assert made.launches[number, phase] == launched
            assert made.issued[number, phase] == issued, (block.name, phase.name)


def test_casts_without_a_recipe_are_part_of_their_product() -> None:
    """Of integers, or of 8 bits by no known recipe, no kernel casts by itself; others do, for the
    share that a layout asks for."""
    plain, recipe = (
        counted(LLAMA, Shard(), dtype="fp8", fp8_recipe=name) for name in ("", "delayed")
    )
    for events, launched in ((plain, 0.0), (recipe, 1.0)):
        casts = [number for number, op in enumerate(events.ops) if is_cast(op)]
        assert casts
        expected = np.ones(len(events.ops))
        expected[casts] = launched
        np.testing.assert_array_equal(events.launched, expected)
        half = events.casting(np.full(len(events.ops), 0.5), replace(JOB, dtype="fp8"))
        expected[casts] = launched / 2
        np.testing.assert_array_equal(half.launched, expected)


@pytest.mark.parametrize(
    ("recipe", "casts"), [("delayed", 1), ("current", 2), ("nvfp4", 2), ("mxfp8", 1)]
)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_products_of_experts_are_launched_with_a_share_of_their_casts(
    recipe: str, casts: int, share: float
) -> None:
    dtype = "fp4" if recipe == "nvfp4" else "fp8"
    job = {"dtype": dtype, "fp8_recipe": recipe}
    events = counted(QWEN, Shard(ep=8), **job)
    with_share = events.casting(np.full(len(events.ops), share), replace(JOB, **job))
    for op, further in zip(with_share.ops, with_share.further_launches.tolist(), strict=True):
        expected = 0.0
        if isinstance(op, Gemm) and op.op == "grouped_linear":
            kernels = 1.0 if op.pass_ == "wgrad" else 1.0 + share * casts
            expected = kernels * 16 - 1
        assert further == expected, op


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("host_op_s", [0.0, 1e-5])
def test_hosts_take_time_to_agree_and_to_launch_experts_one_by_one(
    checked: bool, host_op_s: float
) -> None:
    """Every rank of a collective reports, and every further kernel of a group is launched; none
    takes time where the host is taken to issue in no time."""
    events = counted(QWEN, Shard(tp=4, ep=8, etp=2, sequence_parallel=True))
    framework = EAGER.replace(host_op_s=host_op_s, grouped_launch_s=3e-5)
    made = events_of(events, framework, checked=checked)
    for number in range(len(events.blocks)):
        for phase in Phase:
            seconds = 0.0
            columns = (events.ops, events.groups, events.counts[number, phase].tolist())
            for op, group, count in zip(*columns, strict=True):
                if group and checked:
                    seconds += count * NETWORKS[group].ranks * COLLECTIVE_CHECK_S
                if isinstance(op, Gemm) and op.op == "grouped_linear" and host_op_s:
                    seconds += count * (op.groups - 1) * 3e-5
            assert made.beyond_operators_s[number, phase] == pytest.approx(seconds), (
                number,
                phase.name,
            )


# --- what overlaps
# -----------------------------------------------------------------------------------------------


def test_a_pass_alone_hides_no_exchange_of_experts() -> None:
    """Those hide behind another micro-batch; collectives of tensor parallelism behind weight
    gradients as ever."""
    events = counted(QWEN, Shard(tp=4, ep=8, etp=1, sequence_parallel=True, ep_overlap=True))
    groups = np.array(events.groups)
    assert events.overlappable[groups == "ep"].all()
    np.testing.assert_array_equal(events.alone.overlappable, events.overlappable & (groups != "ep"))
    assert events.alone.overlappable.any()
    plain = counted(QWEN, Shard(ep=8))
    assert plain.alone is plain


def test_tensor_parallel_gradients_in_order_hide_behind_nothing() -> None:
    events = counted(QWEN, Shard(tp=4, ep=8, etp=1, sequence_parallel=True, ep_overlap=True))
    groups = np.array(events.groups)
    assert (events.overlappable & (groups == "tp")).any()
    np.testing.assert_array_equal(
        events.in_order.overlappable, events.overlappable & (groups != "tp")
    )


@pytest.mark.parametrize(("net", "shard", "job"), CASES)
def test_rings_are_of_tensor_parallel_collectives_that_kernels_wait_for(
    net: Transformer, shard: Shard, job: dict[str, Any]
) -> None:
    events = counted(net, shard, **job)
    made = events_of(events)
    for number, (op, group) in enumerate(zip(events.ops, events.groups, strict=True)):
        free = (
            events.overlappable[number] or events.beside_attention[number] or events.follows[number]
        )
        assert made.in_rings[number] == (group == "tp" and not free)
        assert made.kernel[number] == (group == "")
        assert made.ring_product[number] == (isinstance(op, Gemm) and op.op != "grouped_linear")
        ranks = NETWORKS[group].ranks if group else 1
        assert made.lateness[number] == pytest.approx(np.sqrt(2 * np.log(ranks)))


@pytest.mark.parametrize(
    ("dispatcher", "overlap", "multiprocessors"),
    [("deepep", True, 20), ("hybridep", True, 32), ("deepep", False, 24), ("alltoall", True, 24)],
)
def test_only_hidden_exchanges_hold_the_multiprocessors_of_their_library(
    dispatcher: str, overlap: bool, multiprocessors: int
) -> None:
    events = counted(QWEN, Shard(ep=8, ep_overlap=overlap), expert_dispatcher=dispatcher)
    assert events_of(events).sm_share == pytest.approx(multiprocessors / DEVICE.compute_units)


def test_a_layout_counts_the_events_of_its_shard_on_its_networks() -> None:
    problem = step_problem(QWEN, catalog.cluster("dgx-h100"), replace(JOB, global_batch=64))
    layout = Layout(tp=2, dp=8, ep=8, etp=1, sequence_parallel=True)
    events = shard_events(problem.setting, layout)
    ranks: dict[str, set[int]] = {}
    for op, group in zip(events.ops, events.groups, strict=True):
        if isinstance(op, Collective):
            ranks.setdefault(group, set()).add(op.num_ranks)
    assert ranks == {"tp": {2}, "ep": {8}}
    half = shard_events(problem.setting, layout, slices=2, index=1)
    tokens = {op.seq_kv - op.seq_q for op in half.ops if op.family == "attention"}
    assert tokens == {1024}
