"""Experts on ranks of their own: every folding computes the same, on the ranks that Megatron-Core
gives it."""

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from perfmodel import catalog, predict
from perfmodel.errors import LayoutError
from perfmodel.ops import Collective
from perfmodel.prediction import check_layout, explain, layout_batches, step_problem
from perfmodel.prediction.composition import bundle_events
from perfmodel.prediction.placement import Placement
from perfmodel.spec import BLOCK_KEYS, DEVICE_KEYS, DIMENSIONS, Job, Layout, Transformer
from perfmodel.spec.parts import Experts
from perfmodel.workload import Shard, blocks, matmul_flops

NET = Transformer(
    name="experts",
    layers=4,
    hidden=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn_hidden=4096,
    vocab=32000,
    seq_len=2048,
    gated_ffn=True,
    bias=False,
    experts=Experts(count=16, topk=2, ffn_hidden=2048),
)
JOB = Job(global_batch=64, seq_len=2048)
CLUSTER = catalog.cluster("dgx-h100")
FOLDED = Layout(tp=8, dp=2, ep=8, etp=1, sequence_parallel=True)
SHARDED = Layout(tp=8, dp=2, sequence_parallel=True)


@st.composite
def foldings(draw) -> Layout:
    tp, cp, dp, pp = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    etp = draw(st.sampled_from([1, 2, 4]))
    assume(tp * cp * dp >= etp)
    ep = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16) if tp * cp * dp % (n * etp) == 0]))
    return Layout(
        tp=tp,
        cp=cp,
        dp=dp,
        pp=pp,
        ep=ep,
        etp=etp,
        sequence_parallel=tp > 1,
        zero=draw(st.integers(0, 3)),
    )


def moe_layer(layout: Layout):
    return next(b for b, _ in blocks(NET, JOB, Shard.of(layout)) if b.name == "moe_layer")


def megatron_group(order: str, degrees: dict[str, int], over: tuple[str, ...]) -> set[int]:
    """Ranks of the group of rank 0: all that differ from it in `over` only, numbered along `order`
    (its `RankGenerator`, which numbers dense layers with ep=1, and experts with etp, edp and
    cp=1)."""
    names, strides = order.split("-"), {}
    for i, name in enumerate(names):
        strides[name] = prod(degrees[n] for n in names[:i])
    return {
        sum(strides[name] * at for name, at in zip(over, place, strict=True))
        for place in product(*(range(degrees[name]) for name in over))
    }


def ranks(group: str, layout: Layout) -> set[int]:
    axes = Placement.of(group, layout).axes  # pyright: ignore[reportArgumentType]
    places = product(*(range(n) for n, _ in axes))
    return {sum(i * stride for i, (_, stride) in zip(at, axes, strict=True)) for at in places}


@settings(max_examples=200, deadline=None)
@given(
    foldings(),
    st.sampled_from(["tp-cp-ep-dp-pp", "tp-ep-dp-cp-pp", "tp-cp-pp-ep-dp", "tp-pp-ep-dp-cp"]),
)
def test_groups_are_those_of_megatron(layout, order):
    if not order.endswith("pp"):  # Megatron-Core wants the stages of experts where the others are
        layout = layout.replace(cp=1, etp=None, ep=1)
    layout = layout.replace(order=order)
    dense = {"tp": layout.tp, "cp": layout.cp, "ep": 1, "dp": layout.dp, "pp": layout.pp}
    experts = {"tp": layout.expert_tp, "cp": 1, "ep": layout.ep, "dp": layout.edp, "pp": layout.pp}
    for group, over in {"tp": ("tp",), "cp": ("cp",), "dp": ("cp", "dp"), "pp": ("pp",)}.items():
        assert ranks(group, layout) == megatron_group(order, dense, over), group
    for group, over in {"etp": ("tp",), "ep": ("ep",), "expert_dp": ("dp",)}.items():
        assert ranks(group, layout) == megatron_group(order, experts, over), group


@settings(max_examples=100, deadline=None)
@given(foldings())
def test_every_folding_computes_and_holds_the_same(layout):
    """Products and parameters summed over the ranks of a stage, for one micro-batch of every
    replica."""
    assert layout.ep * layout.expert_tp * layout.edp * layout.pp == layout.devices
    whole, one = moe_layer(Layout()), moe_layer(layout)
    shards = layout.tp * layout.cp
    assert shards * matmul_flops(one.forward) == pytest.approx(matmul_flops(whole.forward))
    assert shards * matmul_flops(one.backward_weight) == pytest.approx(
        matmul_flops(whole.backward_weight)
    )
    assert one.expert_params * layout.ep * layout.expert_tp == whole.expert_params


@settings(max_examples=60, deadline=None)
@given(foldings())
def test_sharded_states_add_up_to_the_model(layout):
    """Under ZeRO 1 all ranks together hold every optimizer state once, however experts are
    folded."""
    layout = layout.replace(zero=1, pp=1)
    held = explain(step_problem(NET, CLUSTER, JOB), layout).memory.optimizer * layout.devices
    plain = explain(
        step_problem(NET, CLUSTER, JOB),
        Layout(tp=layout.tp, sequence_parallel=layout.tp > 1, zero=1),
    )
    # norms and routers are on every tensor-parallel rank
    assert held == pytest.approx(plain.memory.optimizer * layout.tp, rel=1e-9)


def test_a_node_holds_eight_whole_experts():
    """ep=8, etp=1 under tp=8: tokens stay where the sequence is sharded, and travel once there and
    once back."""
    net = replace(NET, experts=Experts(count=8, topk=2, ffn_hidden=2048))
    job = Job(global_batch=2, seq_len=2048)
    folded = next(b for b, _ in blocks(net, job, Shard.of(FOLDED)) if b.name == "moe_layer")
    sharded = next(b for b, _ in blocks(net, job, Shard.of(SHARDED)) if b.name == "moe_layer")
    copies = 2048 * 2 * 1024 * 2.0  # tokens, top-2, hidden, bf16
    for comms in (folded.forward_comm, folded.backward_comm):
        assert [(c.collective, c.bytes) for c in comms if c.group == "ep"] == [
            ("all_to_all", copies / 8)
        ] * 2
        assert not [c for c in comms if c.group == "etp"]
    assert [(c.collective, c.bytes) for c in sharded.forward_comm if c.group == "etp"] == [
        ("all_gather", copies),
        ("reduce_scatter", copies),
    ]
    assert not [c for c in sharded.forward_comm if c.group == "ep"]
    assert folded.expert_params == sharded.expert_params == 8 * 3 * 1024 * 2048 // 8
    one_node = Placement.of("ep", FOLDED)
    assert one_node == Placement.of("tp", FOLDED) == Placement.of("etp", SHARDED)
    assert one_node.on_network(CLUSTER)[:2] == (8, 8)
    # an expert's replica is the same device of the other node
    assert (
        Placement.of("expert_dp", FOLDED)
        == Placement.of("expert_dp", SHARDED)
        == Placement(((2, 8),))
    )


def test_experts_reduce_their_gradients_over_their_own_replicas():
    problem = step_problem(NET, CLUSTER, Job(global_batch=16, seq_len=2048))
    # edp=8, on other ranks than dp=4
    layout = Layout(tp=4, dp=4, ep=2, etp=1, sequence_parallel=True)
    (layout_batch,) = layout_batches(problem, [layout])
    sizes = {
        op.num_ranks: op.bytes
        for op in bundle_events(problem, layout_batch, 0).ops
        if isinstance(op, Collective)
    }
    expert = 4 * 16 * 3 * 1024 * 2048 / 2 * 4  # layers, experts, products; half of them in fp32
    assert set(sizes) == {4, 8}
    segments = layout_batch.spec.segments
    assert sizes[8] == pytest.approx(expert / segments)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_of_experts_alone_are_reduced(zero):
    """tp=4 without data parallelism: only experts have replicas, and their gradients and states are
    sharded."""
    layout = Layout(tp=4, ep=2, etp=1, sequence_parallel=True, zero=zero)
    problem = step_problem(NET, CLUSTER, Job(global_batch=16, seq_len=2048))
    found, alone = explain(problem, layout), explain(problem, layout.replace(ep=4))
    assert layout.replicated
    assert layout.edp == 2
    assert found.breakdown_s["data_parallel_communication_exposed"] > 0
    assert alone.breakdown_s["data_parallel_communication_exposed"] == 0
    experts = sum(b.expert_params * n for b, n in blocks(NET, problem.job, Shard.of(layout)))
    saved = explain(problem, layout.replace(zero=0)).memory.optimizer - found.memory.optimizer
    assert saved == pytest.approx(12 * experts / 2 if zero else 0)


@settings(max_examples=30, deadline=None)
@given(foldings())
def test_the_default_is_the_degree_of_tensor_parallelism(layout):
    """What `etp` says and what it leaves out when it is `tp` is predicted alike, to the bit."""
    assume(layout.dp * layout.cp % layout.ep == 0)
    said, unsaid = layout.replace(etp=layout.tp), layout.replace(etp=None)
    assert said.canonical == unsaid.canonical == unsaid
    problem = step_problem(NET, CLUSTER, JOB)
    try:
        check_layout(NET, CLUSTER, JOB, said)
    except LayoutError:
        assume(False)
    a, b = explain(problem, said), explain(problem, unsaid)
    assert (a.step_time_s, a.memory, a.breakdown_s) == (b.step_time_s, b.memory, b.breakdown_s)


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("tp=4,dp=2,ep=4", r"ep=4 must divide dp\*cp=2; with etp=1"),
        ("tp=4,dp=4,ep=3,etp=1,sequence_parallel=true", r"ep\*etp=3\*1 must divide tp\*cp\*dp=16"),
        ("tp=4,dp=4,ep=4,etp=1", "ep=4 and etp=1 with tp=4 need sequence_parallel=true"),
        ("dp=32,ep=32,sequence_parallel=true", "16 experts are not divisible by ep=32"),
        ("dp=3,etp=3", r"ffn_hidden.*2048.* is not divisible by etp=3"),
        ("dp=4,etp=0", "etp must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_folded_is_refused(layout, says):
    with pytest.raises(LayoutError, match=says):
        predict(NET, CLUSTER, layout, global_batch=96, seq_len=1024)


@pytest.mark.parametrize("name", ["gpt3-125m", "mlp-1b", "resnet-50"])
def test_models_without_experts_shard_none(name):
    with pytest.raises(LayoutError, match="etp"):
        predict(name, CLUSTER, "tp=1,dp=4,etp=2", global_batch=16)


def test_the_table_says_which_degrees_make_up_the_devices():
    layout = Layout(tp=2, cp=2, dp=8, pp=2, ep=4, etp=1)
    assert layout.devices == prod(getattr(layout, key) for key in DEVICE_KEYS) == 64
    assert dict(zip((d.key for d in DIMENSIONS), layout.degrees, strict=True)) == {
        "tp": 2,
        "cp": 2,
        "ep": 4,
        "etp": 1,
        "dp": 8,
        "pp": 2,
    }
    assert {f for f in BLOCK_KEYS if not hasattr(Shard(), f)} == set()
