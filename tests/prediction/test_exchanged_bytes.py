"""What ranks exchange between blocks, and what they update, against a count by hand."""

from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any, NamedTuple

import pytest

from perfmodel import catalog
from perfmodel.ops import Collective, OptimizerStep
from perfmodel.prediction import StepProblem, explain, layout_batches, step_problem
from perfmodel.prediction.composition import Placement, bundle_events
from perfmodel.prediction.host import host_update_s
from perfmodel.program import Kind
from perfmodel.spec import OPTIMIZERS, Job, Layout
from perfmodel.units import dtype_bytes
from perfmodel.workload import ExpertChoice, Shard, blocks, optimizer_op

CLUSTER = catalog.cluster("dgx-h100")
LLAMA = replace(catalog.model("llama3-8b"), layers=8)
MIXTRAL = replace(catalog.model("mixtral-8x7b"), layers=8)
GPT = catalog.model("gpt3-1.3b")
GATHERS = (Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD)


def problem_of(model: Any = LLAMA, **fields: Any) -> StepProblem:
    return step_problem(model, CLUSTER, Job(**({"global_batch": 64, "seq_len": 1024} | fields)))


class Exchanged(NamedTuple):
    """A collective of a stage, all its parts together."""

    collective: str
    ranks: int
    n_bytes: float
    parts: int


def exchanged(
    problem: StepProblem, layout: Layout, *kinds: Kind, stage: int = 0
) -> list[Exchanged]:
    """What a stage exchanges in events of these kinds, in their order."""
    (batch,) = layout_batches(problem, [layout])
    events = bundle_events(problem, batch, 0)
    ops = list(events.ops)
    found = []
    for table in events.tables:
        if table.kind not in kinds:
            continue
        parts = [
            (ops[index], times)
            for index, times in zip(
                table.index[stage].tolist(), table.times[stage].tolist(), strict=True
            )
            if index >= 0
        ]
        if parts and all(isinstance(op, Collective) for op, _ in parts):
            n_bytes = sum(op.bytes * times for op, times in parts)
            found.append(
                Exchanged(
                    parts[0][0].collective, parts[0][0].num_ranks, n_bytes, sum(n for _, n in parts)
                )
            )
    return found


def params_of(problem: StepProblem, layout: Layout) -> tuple[float, float]:
    """Parameters of a rank outside routed experts and inside them, one pipeline stage."""
    held = blocks(problem.model, problem.job, Shard.of(layout))
    experts = sum(n * block.expert_params for block, n in held)
    return float(sum(n * block.params for block, n in held) - experts), float(experts)


def approx(*expected: tuple[str, int, float]) -> list[tuple[str, int, Any]]:
    return [(kind, ranks, pytest.approx(n_bytes)) for kind, ranks, n_bytes in expected]


def without_parts(found: list[Exchanged]) -> list[tuple[str, int, float]]:
    return [one[:3] for one in found]


@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_replicas_reduce_all_gradients_on_all_ranks_that_hold_them(
    tp: int, cp: int, grad_dtype: str
) -> None:
    problem, layout = problem_of(grad_dtype=grad_dtype), Layout(tp=tp, cp=cp, dp=4, zero=0)
    params, _ = params_of(problem, layout)
    of_gradients = ("all_reduce", 4 * cp, params * dtype_bytes(grad_dtype))
    assert without_parts(exchanged(problem, layout, Kind.GRAD_REDUCE)) == approx(of_gradients)
    assert exchanged(problem, layout, *GATHERS) == []


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("cp", [1, 2])
def test_sharded_states_are_scattered_to_and_gathered_from_where_they_lie(
    zero: int, cp: int
) -> None:
    problem, layout = problem_of(), Layout(dp=4, cp=cp, zero=zero)
    params, _ = params_of(problem, layout)
    reduced = exchanged(problem, layout, Kind.GRAD_REDUCE)
    assert without_parts(reduced) == approx(("reduce_scatter", 4 * cp, 4 * params))
    gathered = exchanged(problem, layout, Kind.PARAM_GATHER)
    assert without_parts(gathered) == approx(("all_gather", 4 * cp, 2 * params))


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("replicate", [2, 4, 8])
def test_hybrid_sharding_reduces_over_copies_no_more_than_a_shard(
    zero: int, replicate: int
) -> None:
    problem, layout = problem_of(), Layout(dp=8, zero=zero, replicate=replicate)
    params, _ = params_of(problem, layout)
    shards = 8 // replicate
    among_copies = ("all_reduce", replicate, 4 * params / shards)
    among_shards = ("reduce_scatter", shards, 4 * params)
    expected = [among_shards, among_copies] if shards > 1 else [among_copies]
    assert without_parts(exchanged(problem, layout, Kind.GRAD_REDUCE)) == approx(*expected)
    gathered = [("all_gather", shards, 2 * params)] if shards > 1 else []
    assert without_parts(exchanged(problem, layout, Kind.PARAM_GATHER)) == approx(*gathered)


def test_zero_1_may_reduce_all_gradients_on_all_ranks() -> None:
    problem, layout = problem_of(all_reduce_gradients=True), Layout(dp=8, zero=1, replicate=2)
    params, _ = params_of(problem, layout)
    assert without_parts(exchanged(problem, layout, Kind.GRAD_REDUCE)) == approx(
        ("all_reduce", 8, 4 * params)
    )
    assert without_parts(exchanged(problem, layout, Kind.PARAM_GATHER)) == approx(
        ("all_gather", 4, 2 * params)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_weights_are_gathered_as_they_are_stored(dtype: str) -> None:
    """8-bit runs keep 16-bit weights."""
    problem, layout = problem_of(dtype=dtype), Layout(dp=8, zero=1)
    params, _ = params_of(problem, layout)
    ((_, _, n_bytes, _),) = exchanged(problem, layout, Kind.PARAM_GATHER)
    assert n_bytes == pytest.approx(params * {"fp32": 4, "bf16": 2, "fp8": 2}[dtype])


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_experts_are_exchanged_among_their_own_replicas(zero: int) -> None:
    problem, layout = problem_of(MIXTRAL), Layout(dp=8, ep=2, zero=zero)
    params, experts = params_of(problem, layout)
    reduce = "all_reduce" if zero == 0 else "reduce_scatter"
    expected = [(reduce, 8, 4 * params), (reduce, 4, 4 * experts)]
    assert without_parts(exchanged(problem, layout, Kind.GRAD_REDUCE)) == approx(*expected)
    gathered = [("all_gather", 8, 2 * params), ("all_gather", 4, 2 * experts)] if zero else []
    assert without_parts(exchanged(problem, layout, Kind.PARAM_GATHER)) == approx(*gathered)


def test_zero_3_gathers_layer_by_layer_and_zero_1_segment_by_segment() -> None:
    for zero, by_layer in ((1, False), (3, True)):
        problem, layout = problem_of(), Layout(dp=8, zero=zero)
        ((*_, parts),) = exchanged(problem, layout, Kind.PARAM_GATHER)
        (batch,) = layout_batches(problem, [layout])
        assert parts == (LLAMA.layers if by_layer else batch.spec.segments)


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["tied", "untied"])
def test_a_tied_table_is_gathered_once_on_every_stage_that_has_it(model: Any, pp: int) -> None:
    """All stages together gather all parameters, and of a tied table one copy more where head and
    embedding are apart; what they reduce is the same, but for the copies, whose sum is the business
    of both stages."""
    problem, layout = problem_of(model), Layout(pp=pp, dp=8, zero=3)
    rows = next(
        block.tied_params
        for block, _ in blocks(model, problem.job, Shard())
        if block.name == "head"
    )
    copies, (params, _) = rows * (pp > 1), params_of(problem, layout)
    assert (rows > 0) == (model is GPT)
    for kinds, width in ((GATHERS[:1], 2), ((Kind.GRAD_REDUCE,), 4)):
        of_stages = [exchanged(problem, layout, *kinds, stage=stage) for stage in range(pp)]
        n_bytes = sum(one.n_bytes for found in of_stages for one in found)
        assert n_bytes == pytest.approx(width * (params + copies))


def test_what_is_not_trained_is_gathered_and_not_reduced() -> None:
    layout = Layout(dp=8, zero=3)
    for problem in (problem_of(frozen=True), problem_of(mode="inference")):
        params, _ = params_of(problem, layout)
        assert exchanged(problem, layout, Kind.GRAD_REDUCE) == []
        assert without_parts(exchanged(problem, layout, Kind.PARAM_GATHER)) == approx(
            ("all_gather", 8, 2 * params)
        )
        assert exchanged(problem, layout.replace(zero=1), *GATHERS) == []


def updated(problem: StepProblem, layout: Layout) -> int:
    """Parameters that a rank of the first stage updates."""
    (batch,) = layout_batches(problem, [layout])
    return sum(
        op.n_params for op in bundle_events(problem, batch, 0).ops if isinstance(op, OptimizerStep)
    )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_updates_its_shard(zero: int) -> None:
    for dp, cp, replicate in ((1, 1, 1), (8, 1, 1), (4, 2, 1), (8, 1, 2)):
        problem, layout = problem_of(), Layout(dp=dp, cp=cp, zero=zero, replicate=replicate)
        params, _ = params_of(problem, layout)
        shards = dp * cp // replicate if zero else 1
        assert updated(problem, layout) == ceil(params / shards)


NORM_AND_CLIP, UNSCALE = 4 + 8, 6 + 8


@pytest.mark.parametrize(
    ("fields", "n_bytes"),
    [
        # gradient read; master copy and states read and written; the weight in its own type
        # written; norm and clip
        ({}, 4 + 2 * (4 + 8) + 2 + NORM_AND_CLIP),
        ({"dtype": "fp16"}, 4 + 2 * (4 + 8) + 2 + NORM_AND_CLIP + UNSCALE),
        ({"dtype": "fp32"}, 4 + 2 * (4 + 8)),
        ({"dtype": "fp8"}, 4 + 2 * (4 + 8) + 2 + NORM_AND_CLIP),
        ({"grad_dtype": "bf16"}, 2 + 2 * (4 + 8) + 2 + NORM_AND_CLIP),
        ({"optimizer": "lion"}, 4 + 2 * (4 + 4) + 2 + NORM_AND_CLIP),
        ({"optimizer": "sgd"}, 4 + 2 * (4 + 4) + 2),
        ({"optimizer": "adafactor"}, 3 * 4 + 2 * 4 + 2),
        # no master copy: the weight itself is read and written, and the gradient has its type
        ({"optimizer": "plain-sgd"}, 2 + 2 * 2),
        ({"optimizer": "adam16bit"}, 2 + 2 * (2 + 4) + NORM_AND_CLIP / 2),
        ({"optimizer": "adam16bit", "grad_dtype": "bf16"}, 2 + 2 * (2 + 4) + NORM_AND_CLIP / 2),
        ({"optimizer": "adam16bit", "dtype": "fp32"}, 4 + 2 * (4 + 4)),
    ],
)
def test_an_update_moves_gradient_master_states_and_weight(
    fields: dict[str, Any], n_bytes: float
) -> None:
    op = optimizer_op(1000, Job(**({"global_batch": 1, "seq_len": 1} | fields)))
    assert op.bytes == pytest.approx(1000 * n_bytes)
    assert op.op == (
        "sgd" if "sgd" in OPTIMIZERS[fields.get("optimizer", "adam")].kernel else "adam"
    )


# --- where groups lie
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "dp", "pp"), [*product((1, 2, 8), (1, 2, 4), (2, 4, 8))])
def test_first_and_last_stage_lie_all_other_stages_apart(tp: int, dp: int, pp: int) -> None:
    layout = Layout(tp=tp, dp=dp, pp=pp)
    stage = tp * dp
    place = Placement.of("embedding", layout)
    assert place.size == 2
    assert [tuple(axis) for axis in place.axes] == [(2, stage * (pp - 1))]
    inside_a_node = stage * (pp - 1) < 8
    assert place.on_network(CLUSTER).ranks_per_node == (2 if inside_a_node else 1)


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 4), (8, 2)])
def test_tied_tables_are_reduced_between_first_and_last_stage(tp: int, pp: int) -> None:
    problem, layout = problem_of(GPT), Layout(tp=tp, pp=pp, dp=2)
    table = ceil(GPT.vocab / (128 * tp)) * 128 * GPT.hidden  # padded, a tensor-parallel rank's part
    expected = approx(("all_reduce", 2, 4 * table))
    for stage in (0, pp - 1):
        assert (
            without_parts(exchanged(problem, layout, Kind.EMBEDDING_REDUCE, stage=stage))
            == expected
        )
    for stage in range(1, pp - 1):
        assert exchanged(problem, layout, Kind.EMBEDDING_REDUCE, stage=stage) == []
    for fields in ({"frozen": True}, {"frozen_embedding": True}, {"mode": "inference"}):
        assert exchanged(problem_of(GPT, **fields), layout, Kind.EMBEDDING_REDUCE) == []
    # which has a table of its own
    assert exchanged(problem_of(LLAMA), layout, Kind.EMBEDDING_REDUCE) == []


@pytest.mark.parametrize(
    ("order", "axes"),
    [
        ("tp-cp-ep-dp-pp", ((8, 2),)),  # both axes continue one another
        ("tp-cp-pp-ep-dp", ((2, 2), (4, 8))),  # stages of two lie between
        ("ep-dp-cp-tp-pp", ((8, 1),)),
        ("cp-tp-ep-dp-pp", ((2, 1), (4, 4))),
    ],
)
def test_axes_of_a_group_join_where_one_continues_the_other(order: str, axes: tuple) -> None:
    assert Placement.of("dp", Layout(tp=2, cp=2, dp=4, pp=2, order=order)).axes == axes


@pytest.mark.parametrize(
    ("group", "ranks_per_node", "concurrent"),
    [
        # tp=2 in neighbours; cp=2 next; dp=4 every fourth rank, two to a node of eight; pp=2 half
        # the ranks apart
        ("tp", 2, 1),
        ("cp", 2, 1),
        ("dp", 4, 2),
        ("pp", 1, 8),
    ],
)
def test_groups_of_a_layout_on_nodes_of_eight(
    group: str, ranks_per_node: int, concurrent: int
) -> None:
    layout = Layout(tp=2, cp=2, dp=4, pp=2)
    network = Placement.of(group, layout).on_network(CLUSTER)  # pyright: ignore[reportArgumentType]
    ranks = {"tp": 2, "cp": 2, "dp": 8, "pp": 2}[group]
    assert (network.ranks, network.ranks_per_node, network.concurrent) == (
        ranks,
        ranks_per_node,
        concurrent,
    )
    assert network.level == (0 if ranks == ranks_per_node else 1)
    # nothing is relayed, and no library of experts' exchanges carries it out
    assert network.collective("all_gather", 1e6, "bf16") == Collective(
        collective="all_gather",
        bytes=1e6,
        num_ranks=ranks,
        ranks_per_node=ranks_per_node,
        dtype="bf16",
        level=network.level,
        concurrent=concurrent,
        interleaved=network.interleaved,
    )


@pytest.mark.parametrize(("ranks", "nodes"), [(8, 1), (16, 2), (64, 8)])
def test_tokens_go_once_to_a_node_and_from_there_to_its_ranks(ranks: int, nodes: int) -> None:
    """With balanced routing to k of N places a token reaches N (1 - (1 - 1/N)^k) of them."""
    choice, n_bytes = ExpertChoice(topk=4), 1e6
    network = Placement.of("ep", Layout(dp=ranks, ep=ranks)).on_network(CLUSTER)
    op = network.collective("all_to_all", n_bytes, "bf16", choice)
    assert (op.num_ranks, op.num_nodes) == (ranks, nodes)
    to_ranks, to_nodes = n_bytes * choice.reached(ranks), n_bytes * choice.reached(nodes)
    assert op.bytes == pytest.approx(to_ranks if nodes == 1 else to_nodes)
    assert op.relayed_bytes == pytest.approx(0.0 if nodes == 1 else to_ranks)


@pytest.mark.parametrize(
    ("pp", "tp", "crosses"), [(2, 4, [False]), (4, 4, [False, True, False]), (2, 8, [True])]
)
def test_stages_send_inside_a_node_where_their_ranks_share_it(
    pp: int, tp: int, crosses: list[bool]
) -> None:
    """Tensor-parallel ranks send a part each, which the receivers gather (scatter-gather of arXiv
    2104.04473)."""
    problem, layout = problem_of(), Layout(tp=tp, pp=pp)
    activation = 1024 * LLAMA.hidden * 2
    (batch,) = layout_batches(problem, [layout])
    events = bundle_events(problem, batch, 0)
    sends = next(table for table in events.tables if table.kind == Kind.SEND_FORWARD)
    for stage, leaves in enumerate(crosses):
        found = without_parts(exchanged(problem, layout, Kind.SEND_FORWARD, stage=stage))
        assert found == approx(("send_recv", 2, activation / tp), ("all_gather", tp, activation))
        send = list(events.ops)[sends.index[stage, 0]]
        assert (send.ranks_per_node, send.concurrent) == ((1, 8) if leaves else (2, 1))
        # no gradients are reduced
        assert {op.dtype for op in events.ops if isinstance(op, Collective)} == {"bf16"}
    assert exchanged(problem, layout, Kind.SEND_FORWARD, stage=pp - 1) == []
    assert exchanged(problem, layout, Kind.SEND_BACKWARD, stage=0) == []


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tp=8), Layout(tp=2, dp=4, zero=3), Layout(dp=16, cp=2)], ids=str
)
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_without_a_pipeline_nothing_is_sent(layout: Layout, mode: str) -> None:
    problem = problem_of(mode=mode)
    (batch,) = layout_batches(problem, [layout])
    kinds = {table.kind for table in bundle_events(problem, batch, 0).tables}
    assert not kinds & {Kind.SEND_FORWARD, Kind.SEND_BACKWARD}


# --- states on the host
# --------------------------------------------------------------------------------


def test_states_on_the_host_take_the_link_and_the_processors() -> None:
    """Gradients down the link, an update by the node's processors, weights up again beside it."""
    problem, layout = (
        problem_of(),
        Layout(dp=8, zero=1, overlap_grad_reduce=False, overlap_param_gather=False),
    )
    params, _ = params_of(problem, layout)
    resident, on_host = (
        explain(problem, layout.replace(offload_states=where)) for where in ("none", "optimizer")
    )
    rate = CLUSTER.device.host_bandwidth_bytes_per_s
    assert rate is not None
    shard = params / 8
    copied_s = shard * 4 / rate
    updated_s = shard * max(host_update_s(problem.setting, 8), 2 / rate)
    device_update_s = resident.breakdown_s["optimizer"]
    longer_s = on_host.step_time_s - resident.step_time_s
    assert longer_s == pytest.approx(copied_s + updated_s - device_update_s, rel=0.02)
