"""Laws of layouts that any step obeys, and of what its prediction says, whatever the model, cluster
and framework."""

from dataclasses import replace
from itertools import pairwise, product
from typing import get_args

import pytest
from drawn_cases import (
    FEATURES,
    FLUSHED,
    ROUNDING,
    SCHEDULES,
    Case,
    assert_between,
    cases,
    featured_cases,
    some,
)
from hypothesis import given
from hypothesis import strategies as st
from thinned import one_in

from perfmodel import catalog
from perfmodel.cost.learn.collectives import Fabric
from perfmodel.planning.layouts import search
from perfmodel.prediction import STEP_TERMS, step_times_s, without
from perfmodel.prediction.memory import communicators
from perfmodel.schedule import get_schedule
from perfmodel.session import Session
from perfmodel.spec import ContextParallel, StateOffload

# --- layouts --------------------------------------------------------------------------------------


@some(5)
@given(cases())
def test_every_stage_of_zero_is_no_faster_than_the_one_before(case: Case) -> None:
    """At equal overlap, where all reduce alike."""
    alike = replace(case, framework=replace(case.framework, all_reduce_gradients=False))
    for overlaps, (fewer, more) in product((True, False), [(1, 2), (2, 3), (1, 3)]):
        same = alike.laid(overlap_grad_reduce=overlaps, overlap_param_gather=overlaps)
        assert_between(same.laid(zero=fewer), same.laid(zero=more))


@some(5)
@given(cases(), st.sampled_from(FLUSHED))
def test_no_stage_of_zero_is_faster_than_the_first_under_any_schedule(
    case: Case, schedule: str
) -> None:
    """Which flushes, at equal overlap, where all reduce alike."""
    alike = replace(case, framework=replace(case.framework, all_reduce_gradients=False))
    same = alike.laid(
        schedule=schedule,
        pp=max(case.layout.pp, 2),
        vpp=1,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    for fewer, more in ((1, 2), (2, 3)):
        assert_between(same.laid(zero=fewer), same.laid(zero=more))


@some(5)
@given(cases(), st.sampled_from([0, 1, 2, 3]))
def test_overlap_never_hurts(case: Case, zero: int) -> None:
    for name in ("overlap_grad_reduce", "overlap_param_gather", "tp_overlap"):
        alike = case.laid(zero=zero)
        assert_between(alike.laid(**{name: True}), alike.laid(**{name: False}))


@some(5)
@given(cases(), st.sampled_from(SCHEDULES), st.sampled_from([1, 3]))
def test_overlap_never_hurts_under_any_schedule(case: Case, schedule: str, zero: int) -> None:
    alike = case.laid(schedule=schedule, pp=max(case.layout.pp, 2), vpp=1, zero=zero)
    for name in ("overlap_grad_reduce", "overlap_param_gather", "tp_overlap"):
        assert_between(alike.laid(**{name: True}), alike.laid(**{name: False}))


@some(5)
@given(cases(), st.sampled_from(SCHEDULES), st.booleans())
def test_gathers_further_ahead_never_hurt(case: Case, schedule: str, overlaps: bool) -> None:
    """Whether or not the next pass waits for reductions, which a gather that nobody waits for does
    not hold up."""
    pipelines = case.layout.pp if case.layout.pp > 1 else 2
    for pp in (1, pipelines):
        alike = case.laid(schedule=schedule, pp=pp, vpp=1, zero=3, overlap_grad_reduce=overlaps)
        not_ahead = alike.laid(overlap_param_gather=False)
        ahead = [alike.laid(overlap_param_gather=True, prefetch=layers) for layers in (1, 2, 4)]
        for further, less in pairwise((*reversed(ahead), not_ahead)):
            assert_between(further, less)


@some(5)
@given(cases(), st.sampled_from(["dualpipe", "dualpipe-v"]))
def test_pairs_of_longer_passes_take_longer_and_ring_steps_none(case: Case, schedule: str) -> None:
    """One host issues both passes of a pair, whatever hides behind them."""
    pair = case.laid(schedule=schedule, pp=max(case.layout.pp, 2), vpp=1)
    assert_between(pair, pair.laid(micro_batch=2 * case.layout.micro_batch), most=2.05)
    assert_between(pair.laid(tp_overlap=True), pair.laid(tp_overlap=False))


@some(5)
@given(cases(), st.booleans(), st.sampled_from([8, 512]))
def test_the_more_is_on_the_host_the_longer_a_step_takes(
    case: Case, overlaps: bool, dp: int
) -> None:
    """However few parameters a rank updates. Of weights on the host every gather copies them first;
    what updates send back, they send back while the host updates others."""
    if case.cluster.device.host_bandwidth_bytes_per_s:
        for zero in (1, 2, 3):
            sharded = case.laid(
                zero=zero, dp=dp, overlap_grad_reduce=overlaps, overlap_param_gather=overlaps
            )
            assert_between(sharded, sharded.laid(offload_states="optimizer"))
        assert_between(
            sharded.laid(offload_states="optimizer"), sharded.laid(offload_states="weights")
        )


def assert_costs_device_seconds(fewer: Case, more: Case, measured_apart: float = 0.01) -> None:
    """A layout on more devices takes as many device-seconds at least, to a percent: kernels of
    fewer heads are told by other measurements."""
    assert_between(
        fewer, more, least=(1 - measured_apart) * fewer.layout.devices / more.layout.devices
    )


@some(5)
@given(cases(), st.sampled_from([1, 16]))
def test_context_parallelism_costs_device_seconds(case: Case, longer: int) -> None:
    """Of sequences that kernels were measured of, and of those that one device could hardly
    hold."""
    of_length = replace(case, seq_len=longer * case.seq_len)
    for cp in (1, 2, 4):
        assert_costs_device_seconds(of_length.laid(cp=cp), of_length.laid(cp=2 * cp))


@some(5)
@given(cases(), st.sampled_from(get_args(ContextParallel)))
def test_slices_of_a_sequence_attend_to_those_before_them_on_every_rank(
    case: Case, kind: ContextParallel
) -> None:
    sliced = case.laid(schedule="seq1f1b", vpp=1, cp_kind=kind)
    for cp in (1, 2):
        assert_costs_device_seconds(sliced.laid(cp=cp), sliced.laid(cp=2 * cp))


@some(5)
@given(cases(), st.sampled_from(list(catalog.devices())), st.sampled_from(["fp32", "fp16", "int8"]))
def test_tensor_parallelism_over_nodes_costs_device_seconds(
    case: Case, device: str, dtype: str
) -> None:
    """On devices, too, in whose types products of whole matrices were hardly measured."""
    on = replace(case.cluster, device=catalog.device(device))
    other = replace(case, cluster=on, dtype=dtype if dtype in on.device.dtypes else case.dtype)
    for one in (case, other):
        node = one.cluster.devices_per_node
        assert_costs_device_seconds(one.laid(tp=node), one.laid(tp=2 * node))


PCIE_NODE = catalog.cluster("l40s-x8")
PCIE_DEVICES = ("L40S", "A100-PCIE-80GB", "H100-PCIE-80GB", "RTX-PRO-6000-Server")


@some(5)
@given(cases(), st.sampled_from(PCIE_DEVICES), st.sampled_from(["PCIe4", "PCIe5"]))
def test_tensor_parallelism_on_a_host_bridge_costs_device_seconds(
    case: Case, device: str, link: str
) -> None:
    """Groups of data-parallel ranks lie in turn and share the bridge, in a node and where they
    leave it: twice the devices, whose jobs are half as large each, halve a step at most. Rings in
    one node and over two rest on curves that were measured on different machines, whose largest
    messages differ by some per cent."""
    inside, network = PCIE_NODE.levels
    of_node = replace(
        PCIE_NODE, device=catalog.device(device), levels=(replace(inside, name=link), network)
    )
    on_bridge = replace(case, cluster=of_node, dtype="fp16")
    for tp, dp in ((1, 2), (2, 2), (1, 4), (1, 8), (2, 8), (4, 8)):
        fewer, more = on_bridge.laid(tp=tp, dp=dp), on_bridge.laid(tp=2 * tp, dp=dp)
        assert_costs_device_seconds(fewer, more, measured_apart=0.07)


@some(5)
@given(cases())
def test_replicas_cost_device_seconds(case: Case) -> None:
    """The same batch on twice the devices; without a flush it would be updates of other batches."""
    if not get_schedule(case.layout.schedule).asynchronous:
        fewer = replace(case, rounds=2 * case.rounds)
        assert_costs_device_seconds(fewer, case.laid(dp=2 * case.layout.dp))


BOTH_WAYS = ("chimera", "chimera-doubling", "chimera-halving", "gems", "dualpipe")
"""Schedules whose replicas of a stage lie on other nodes: twice the data-parallel ones, and half as
many groups of them share the adapters of a node."""


@some(5)
@given(cases(), st.sampled_from([1, 4]))
def test_more_replicas_of_equal_work_are_never_faster(case: Case, dp: int) -> None:
    """But for what each has to update, where it holds a shard; more ranks of a mesh have more
    links."""
    mesh = Fabric.of(case.cluster).inside.link_class.mesh
    if (
        case.layout.schedule not in BOTH_WAYS
        and not mesh
        and (dp * case.layout.cp) % case.layout.ep == 0
    ):
        fewer, more = case.laid(dp=dp), case.laid(dp=2 * dp)
        if fewer.possible and more.possible and more.step_s < fewer.step_s:
            shard_s = fewer.prediction.breakdown_s["optimizer"] if case.layout.zero else 0.0
            assert more.step_s >= (fewer.step_s - shard_s) * (1 - ROUNDING)


@some(5)
@given(cases())
def test_the_bubble_of_a_micro_batch_shrinks_with_their_number(case: Case) -> None:
    """What fills and drains the pipeline is shared by more of them; what imbalance leaves idle
    grows as they do."""
    if case.layout.pp > 1:
        few_s, many_s = (
            one.prediction.breakdown_s["bubble"]
            for one in (case, replace(case, rounds=2 * case.rounds))
        )
        assert many_s <= 2 * few_s * (1 + ROUNDING) + 1e-9


@some(6)
@given(cases(), st.sampled_from([term.name for term in STEP_TERMS]))
def test_no_term_of_the_physics_makes_a_step_shorter(case: Case, term: str) -> None:
    bare_s = float(step_times_s(without(case.problem, [term]), [case.layout])[0])
    assert bare_s <= case.step_s * (1 + ROUNDING)


# --- what a prediction says -----------------------------------------------------------------------


@some(8)
@given(cases())
def test_a_prediction_is_consistent(case: Case) -> None:
    p, device = case.prediction, case.cluster.device
    assert p.step_time_s == pytest.approx(case.step_s, rel=1e-9)
    assert p.step_time_lo_s <= p.step_time_s <= p.step_time_hi_s
    assert 0 < p.time_account.kernels_alone_s <= p.step_time_lo_s
    assert min(p.breakdown_s.values()) >= 0
    assert sum(p.breakdown_s.values()) == pytest.approx(p.step_time_s, rel=1e-9)
    assert sum(event.time_s for event in p.critical_path) == pytest.approx(p.step_time_s, rel=1e-6)
    assert sum(p.provenance.values()) == pytest.approx(1.0)
    tokens = p.global_batch * p.seq_len
    assert p.tokens_per_s_per_device * p.step_time_s * p.devices == pytest.approx(tokens, rel=1e-9)
    if not case.cluster.kinds:  # else of the devices of all kinds that compute
        assert p.mfu == pytest.approx(
            p.tflops_per_device * 1e12 / device.flops_per_s(case.dtype), rel=1e-9
        )
    assert 0 < p.mfu < 1


@pytest.mark.parametrize("feature", FEATURES)
@some(3)
@given(data=st.data())
def test_a_prediction_with_any_feature_is_consistent(feature: str, data: st.DataObject) -> None:
    """Breakdown and critical path, its table too, sum to the step; the notation is read back as the
    layout."""
    case = data.draw(featured_cases(feature))
    p = case.prediction
    assert p.step_time_s == pytest.approx(case.step_s, rel=1e-9)
    assert min(p.breakdown_s.values()) >= 0
    assert sum(p.breakdown_s.values()) == pytest.approx(p.step_time_s, rel=1e-9)
    assert sum(event.time_s for event in p.critical_path) == pytest.approx(p.step_time_s, rel=1e-6)
    assert all(event.time_s > 0 for event in p.critical_path)
    assert p.to_frame()["share"].sum() == pytest.approx(1.0, rel=1e-6)
    for version in catalog.framework_versions("torchtitan") + catalog.framework_versions(
        "nanotron"
    ):
        assert version.layout(version.notation(p.layout, case.model), case.model)[0] == p.layout
        assert version.layout(str(p.layout), case.model)[0] == p.layout


@pytest.mark.parametrize("feature", one_in(2, FEATURES))
@some(2)
@given(data=st.data())
def test_twice_of_everything_is_at_most_twice_as_fast_with_any_feature(
    feature: str, data: st.DataObject
) -> None:
    case = data.draw(featured_cases(feature))
    assert_between(case.with_twice_of_everything(), case, most=2.0)


@some(3)
@given(cases())
def test_memory_falls_with_what_is_sharded_and_recomputed_and_grows_with_the_work(
    case: Case,
) -> None:
    def peak(one: Case) -> float | None:
        """But for the buffers of communicators, of which more dimensions have more."""
        if not one.possible:
            return None
        return one.prediction.memory.peak - one.framework.memory.communicator_bytes * communicators(
            one.layout
        )

    # where nothing is sharded, gathered weights are a copy more
    stages = range(4 if case.layout.dp * case.layout.cp > 4 else 3)
    if case.layout.pp > 1 and case.framework.default_job.gradients.whole_gradients_in_pipelines:
        # pipelines of torch put off the reductions of ZeRO 2, and add gradients up in the type of
        # the reduction
        stages = range(2)
    held = get_args(StateOffload) if case.cluster.device.host_bandwidth_bytes_per_s else ()
    falling = [
        [case.laid(zero=stage) for stage in stages],
        [case.laid(tp=tp) for tp in (1, 2, 4)],
        # gradients that ZeRO 2 shards lie whole in a pipeline
        [
            case.laid(pp=pp, vpp=1, schedule="1f1b", zero=min(case.layout.zero, 1))
            for pp in (1, 2, 4)
        ],
        [case.laid(recompute=what) for what in ("none", "selective", "full")],
        [case.laid(zero=3, offload_states=states) for states in held],
        [case.laid(micro_batch=size * case.layout.micro_batch) for size in (2, 1)],
        [replace(case, seq_len=times * case.seq_len) for times in (2, 1)],
    ]
    for chain in falling:
        peaks = [bytes_ for bytes_ in map(peak, chain) if bytes_ is not None]
        # where one layer of a few is nearly all, its recomputed activations lie beside its saved
        # input
        assert all(b <= a * 1.005 for a, b in pairwise(peaks)), (peaks, chain)


@some(3)
@given(cases(), cases())
def test_the_order_of_calls_does_not_matter(one: Case, other: Case) -> None:
    def asked(*order: Case) -> dict[Case, float]:
        with Session():
            return {case: replace(case).prediction.step_time_s for case in order}

    assert asked(one, other) == asked(other, one)


@some(2)
@given(
    st.sampled_from(["gpt3-1.3b", "bert-large", "llama-like-1b"]),
    st.sampled_from(["dgx-a100", "hgx-h200", "alps"]),
)
def test_the_best_layout_of_a_search_is_the_fastest_of_its_list(model: str, cluster: str) -> None:
    found = search(model, cluster, devices=16, global_batch=64, top=10)
    times_s = [p.step_time_s for p in found.layouts]
    assert times_s == sorted(times_s)
    assert all(p.fits for p in found.layouts)
