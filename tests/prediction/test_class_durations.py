"""Seconds of a program's classes, one by one: passes through blocks, copies to the host, what
overlap costs them."""

from dataclasses import replace
from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.prediction import (
    EAGER,
    LayoutBatch,
    StepProblem,
    block_times,
    durations,
    layout_batches,
    pass_times,
    step_problem,
    step_times_s,
)
from perfmodel.prediction.composition import Overlap, overlap_loss, slowed_s, stage_costs
from perfmodel.prediction.overlap import CHANNELS_OF_STATES
from perfmodel.prediction.phases import Phase
from perfmodel.program import WHOLE, Kind, Structure, build
from perfmodel.session import Session
from perfmodel.spec import Framework, Job, Layout

LLAMA = replace(catalog.model("llama3-8b"), layers=12)
QUIET = EAGER.replace(contends=False)
"""Overlap costs nothing, steps have no overhead and ranks no stragglers: classes last as long as
their events."""


def problem_of(framework: Framework = QUIET, **job: Any) -> StepProblem:
    work = Job(**({"global_batch": 32, "seq_len": 2048, "flash_attention": False} | job))
    return step_problem(LLAMA, catalog.cluster("dgx-a100"), work, None, framework)


def batch_of(problem: StepProblem, layout: Layout) -> LayoutBatch:
    (batch,) = layout_batches(problem, [layout])
    return batch


def blocks_of(counts: np.ndarray, structure: Structure, number: int) -> list[float]:
    """Blocks that a class passes: those of its segment, or of all segments of its stage."""
    stage, segment = structure.class_stage[number], structure.class_segment[number]
    return (counts[stage].sum(axis=0) if segment == WHOLE else counts[stage, segment]).tolist()


def pass_by_hand(
    kind: Kind, blocks: list[float], full: list[float], phase_s: np.ndarray, recompute: str
) -> float:
    """A pass runs its phases in every block; an input gradient repeats what the layout recomputes,
    and the whole forward in blocks that are recomputed in full against that."""
    seconds = 0.0
    for n, n_full, block_s in zip(blocks, full, phase_s.tolist(), strict=True):
        again_s = {
            "none": 0.0,
            "selective": block_s[Phase.RECOMPUTE_SELECTIVE],
            "full": block_s[Phase.RECOMPUTE_FULL],
        }[recompute]
        input_s = (
            n * block_s[Phase.BACKWARD_INPUT]
            + (n - n_full) * again_s
            + n_full * block_s[Phase.RECOMPUTE_FULL]
        )
        weight_s = n * block_s[Phase.BACKWARD_WEIGHT]
        seconds += {
            Kind.FORWARD: n * block_s[Phase.FORWARD],
            Kind.BACKWARD: input_s + weight_s,
            Kind.BACKWARD_INPUT: input_s,
            Kind.BACKWARD_WEIGHT: weight_s,
        }[kind]
    return seconds


PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
LAYOUTS = (
    "tp=2,pp=2,dp=2",
    "tp=2,pp=2,dp=2,recompute=selective",
    "tp=2,pp=2,dp=2,recompute=full",
    "tp=2,pp=2,dp=2,recompute_full_layers=2-5",
    "tp=2,pp=2,dp=2,recompute=selective,recompute_full_layers=6-1",
    "tp=2,pp=2,dp=2,partition=5-7,schedule=zb-h1",
    "tp=2,pp=2,dp=2,vpp=3",
    "tp=2,dp=4,zero=3",
    "tp=2,pp=2,dp=2,zero=1",
    "tp=2,pp=4,offload=true",
    "tp=2,pp=4,offload=true,recompute=full",
)


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_pass_lasts_as_long_as_the_phases_of_its_blocks(text: str) -> None:
    problem, layout = problem_of(), Layout.parse(text)
    batch = batch_of(problem, layout)
    structure, seconds = batch.program.structure, durations(problem, batch)[0]
    phase_s = block_times(problem, layout).phase_s
    kinds = set()
    for number, kind in enumerate(structure.class_kind.tolist()):
        if kind not in PASSES:
            continue
        kinds.add(kind)
        blocks = blocks_of(batch.program.counts, structure, number)
        full = blocks_of(batch.program.full, structure, number)
        expected = pass_by_hand(Kind(kind), blocks, full, phase_s, layout.recompute)
        assert seconds[number] == pytest.approx(expected, rel=1e-9), (number, Kind(kind).name)
    assert Kind.FORWARD in kinds
    assert len(kinds) > 1


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "seq1f1b"])
def test_activations_are_copied_to_the_host_and_back_at_the_rate_of_its_link(
    schedule: str, recompute: str
) -> None:
    """Those of one micro-batch, or of its slice of the sequence."""
    problem = problem_of(flash_attention=True)
    layout = Layout.parse(f"tp=2,pp=4,offload=true,recompute={recompute},schedule={schedule}")
    batch = batch_of(problem, layout)
    structure, seconds = batch.program.structure, durations(problem, batch)[0]
    rate = problem.cluster.device.host_bandwidth_bytes_per_s
    assert rate is not None
    table = block_times(problem, layout)
    saved_bytes = [getattr(block.activation_bytes, recompute) for block in table.blocks]
    copies = np.flatnonzero(np.isin(structure.class_kind, (Kind.OFFLOAD, Kind.RELOAD))).tolist()
    assert {structure.class_kind[number] for number in copies} == {Kind.OFFLOAD, Kind.RELOAD}
    slices = 2 if schedule == "seq1f1b" else 1
    for number in copies:
        blocks = batch.program.counts[structure.class_stage[number]].sum(axis=0)
        assert seconds[number] == pytest.approx(blocks @ saved_bytes / slices / rate)


@pytest.mark.parametrize("pp", [1, 4])
def test_passes_for_a_scheduler_have_the_longest_transfer(pp: int) -> None:
    problem, layout = problem_of(), Layout(tp=2, pp=pp)
    batch = batch_of(problem, layout.replace(schedule="zb-h1"))
    structure, seconds = batch.program.structure, durations(problem, batch)[0]
    sends = np.isin(structure.class_kind, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
    assert pass_times(problem, layout).transfer_s == max(seconds[sends], default=0.0)
    assert sends.any() == (pp > 1)


SAME_PROGRAM = {
    "one stage": (
        "dp=8,zero=3",
        "dp=8,zero=3,offload_layers=3",
        "dp=8,zero=3,offload_layers=5",
        "dp=8,zero=3,offload_states=optimizer",
        "dp=8,zero=3,offload_states=weights",
        "dp=8,zero=3,recompute=selective",
        "dp=8,zero=3,recompute=full",
        "tp=2,dp=4,zero=3,micro_batch=2",
    ),
    "pipeline": (
        "pp=2,dp=4,zero=1",
        "pp=2,dp=4,zero=1,offload_states=optimizer",
        "pp=2,dp=4,zero=1,recompute=full",
        "pp=2,tp=2,dp=2,zero=1,micro_batch=2",
        "pp=2,tp=2,dp=2,zero=1,micro_batch=2,sequence_parallel=true",
    ),
}


@pytest.mark.parametrize("name", SAME_PROGRAM)
@pytest.mark.parametrize("partition_copy_s", [0.0, 1e-5])
def test_layouts_take_together_as_long_as_each_by_itself(
    name: str, partition_copy_s: float
) -> None:
    """Whatever the others of a batch have on the host, recompute or divide."""
    problem = problem_of(EAGER.replace(partition_copy_s=partition_copy_s))
    layouts = [Layout.parse(text) for text in SAME_PROGRAM[name]]
    alone_s = [step_times_s(problem, [layout]).item() for layout in layouts]
    for order in (layouts, layouts[::-1]):
        # What was remembered of each by itself does not count.
        with Session():
            together_s = step_times_s(problem, order).tolist()
        assert together_s == pytest.approx(
            [alone_s[layouts.index(layout)] for layout in order], rel=1e-6
        )
    assert len(set(alone_s)) == len(layouts)


# --- overlap
# ---------------------------------------------------------------------------------------------


def beside_by_hand(structure: Structure, comm: int, serial: bool) -> list[int]:
    """Passes of the same stage that a reduction or gather of a segment runs beside.

    A segment's gradients are reduced while those of the one before it are computed; its weights are
    gathered while the one computes that comes before it, in the order of the pass. Where gathers
    wait, only weight gradients go on.
    """
    steps = {
        Kind.GRAD_REDUCE: (-1, [Kind.BACKWARD, Kind.BACKWARD_WEIGHT]),
        Kind.PARAM_GATHER: (-1, [Kind.FORWARD]),
        Kind.PARAM_GATHER_BACKWARD: (1, [Kind.BACKWARD, Kind.BACKWARD_INPUT]),
    }
    step, passes = steps[structure.class_kind[comm]]
    if serial:
        passes = [kind for kind in passes if kind == Kind.BACKWARD_WEIGHT]
    stage, segment = structure.class_stage[comm], structure.class_segment[comm] + step
    found = []
    for number, kind in enumerate(structure.class_kind.tolist()):
        place = structure.class_stage[number], structure.class_segment[number]
        if kind in passes and place == (stage, segment) and segment >= 0:
            found.append(number)
    return found


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        # without ZeRO gathers have no bytes
        ("dp=8", {Kind.GRAD_REDUCE, Kind.PARAM_GATHER}),
        ("dp=8,zero=1", {Kind.GRAD_REDUCE, Kind.PARAM_GATHER}),
        ("dp=8,zero=2", {Kind.GRAD_REDUCE, Kind.PARAM_GATHER}),
        ("dp=8,zero=1,overlap_param_gather=false", {Kind.GRAD_REDUCE}),
        ("dp=8,zero=1,overlap_grad_reduce=false", {Kind.PARAM_GATHER}),
        ("dp=8,zero=3", {Kind.GRAD_REDUCE, Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD}),
        ("dp=8,zero=3,overlap_param_gather=false", set()),
        ("dp=8,overlap_grad_reduce=false", {Kind.PARAM_GATHER}),
        ("dp=8,overlap_grad_reduce=false,overlap_param_gather=false", set()),
        ("pp=2,dp=4,zero=3,schedule=zb-h1,overlap_param_gather=false", {Kind.GRAD_REDUCE}),
        (
            "pp=2,dp=4,zero=3,schedule=zb-h1",
            {Kind.GRAD_REDUCE, Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD},
        ),
        ("pp=2,dp=4,zero=1", {Kind.GRAD_REDUCE, Kind.PARAM_GATHER}),
        ("pp=2,dp=4,zero=1,vpp=2", {Kind.GRAD_REDUCE, Kind.PARAM_GATHER}),
    ],
)
def test_reductions_and_gathers_run_beside_the_passes_next_to_their_segment(
    text: str, kinds: set[Kind]
) -> None:
    """On the first stage alone, whose exchanges delay a step once for all of them."""
    problem = problem_of()
    batch = batch_of(problem, Layout.parse(text))
    structure, beside = batch.program.structure, batch.program.overlap
    occurrences = np.bincount(structure.duration, minlength=structure.n_classes)
    serial = batch.spec.param_gather == "layer_serial"
    pairs: dict[tuple[int, int], float] = {}
    for comm, kind in enumerate(structure.class_kind.tolist()):
        overlaps = kind in kinds or (serial and kind == Kind.GRAD_REDUCE)
        if (
            not overlaps
            or structure.class_stage[comm] != 0
            or structure.class_segment[comm] == WHOLE
        ):
            continue
        passes = beside_by_hand(structure, comm, serial)
        for number in passes:
            pairs[comm, number] = occurrences[comm] / sum(occurrences[passes])
    found = {}
    for comm, place, share in zip(
        beside.comm.tolist(), beside.place.tolist(), beside.share.tolist(), strict=True
    ):
        found[comm, int(beside.slowed[place])] = share
    assert found == pytest.approx(pairs)
    assert {structure.class_kind[comm] for comm, _ in found} == kinds
    assert beside.slowed.tolist() == sorted({number for _, number in pairs})


@pytest.mark.parametrize(
    ("text", "contends", "loss"),
    [
        ("dp=8", True, 0.0),
        ("dp=8,zero=1", True, 0.1),
        ("dp=8,zero=3", True, 0.1),
        ("tp=2,pp=2,dp=2,zero=1", False, 0.1),
        ("tp=2,dp=4,zero=3", False, 0.1),
        ("tp=2,dp=4,zero=3", False, 0.0),
        ("tp=2,pp=4", False, 0.0),
    ],
)
def test_a_step_costs_slowed_passes_stragglers_and_an_overhead(
    text: str, contends: bool, loss: float
) -> None:
    """Everything takes as much longer as the slowest of all ranks; the overhead comes once, with
    the optimizer."""
    straggling, overhead_s = 0.02, 7e-3
    layout, plain = Layout.parse(text), problem_of()
    framework = EAGER.replace(contends=contends, dp_overlap_loss=loss)
    costly = problem_of(framework.replace(straggling=straggling, step_overhead_s=overhead_s))
    batch = batch_of(plain, layout)
    structure, beside = batch.program.structure, batch.program.overlap
    expected = durations(plain, batch)[0].copy()
    longer_s = slowed_s(expected[None], loss + contends * CHANNELS_OF_STATES / 108, beside)[0]
    assert longer_s.max(initial=0.0) > 0 or not (contends or loss)
    for number, slowed in zip(beside.slowed.tolist(), longer_s.tolist(), strict=True):
        expected[number] += slowed
    expected *= exp(straggling * sqrt(2 * log(layout.devices)))
    expected[structure.class_kind == Kind.OPTIMIZER] += overhead_s
    np.testing.assert_allclose(durations(costly, batch_of(costly, layout))[0], expected)


def test_the_loss_beside_reductions_is_no_more_than_all() -> None:
    assert overlap_loss(problem_of(EAGER.replace(dp_overlap_loss=2.0))) == 1.0
    assert overlap_loss(problem_of(QUIET.replace(dp_overlap_loss=0.3))) == pytest.approx(0.3)
    # then a pass runs on as long as what is beside it
    durations_s = np.array([[3.0, 5.0]])
    alone = Overlap(np.array([0]), np.array([0]), np.array([1.0]), np.array([1]))
    np.testing.assert_allclose(slowed_s(durations_s, 1.0, alone), [[3.0]])


# --- transfers between stages
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["tp=2,pp=4,dp=1", "tp=2,pp=4,dp=4", "tp=8,pp=4,dp=1", "pp=4,dp=2,micro_batch=2"]
)
@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (0, 5, 5, 2)])
def test_a_stage_sends_forward_and_gets_gradients_back(text: str, sizes: tuple[int, ...]) -> None:
    """As long as the layout that has this stage takes for both transfers across its end."""
    problem, layout = problem_of(), Layout.parse(text)
    costs = stage_costs(problem, layout, recompute_to_fit=False)
    uneven = layout.replace(partition=sizes)
    batch = batch_of(problem, uneven)
    structure, seconds = batch.program.structure, durations(problem, batch)[0]
    for stage, end in enumerate(np.cumsum(sizes)[:-1].tolist()):
        both_s = 0.0
        for kind, of_stage in ((Kind.SEND_FORWARD, stage), (Kind.SEND_BACKWARD, stage + 1)):
            (number,) = np.flatnonzero(
                (structure.class_kind == kind) & (structure.class_stage == of_stage)
            ).tolist()
            assert seconds[number] > 0
            both_s += seconds[number]
        assert costs.sends_s[stage, end] == pytest.approx(both_s)
    assert not costs.sends_s[-1].any()


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_a_table_of_embeddings_is_reduced_between_stages_that_train_it_on_both_ends(
    pp: int, tied: bool, mode: str
) -> None:
    """Nowhere else has a program such a class, whatever it would last."""
    name = "gpt3-1.3b" if tied else "llama3-8b"
    model = replace(catalog.model(name), layers=12)
    problem = replace(problem_of(mode=mode), model=model)
    batch = batch_of(problem, Layout(pp=pp, dp=2))
    has_class = Kind.EMBEDDING_REDUCE in build(batch.spec).class_kind.tolist()
    assert batch.spec.tied_embedding == has_class == (tied and pp > 1 and mode == "train")


def test_one_stage_sends_nothing_and_inference_sends_forward_alone() -> None:
    assert not stage_costs(problem_of(), Layout(tp=4, dp=2)).sends_s.any()
    layout = Layout(tp=2, pp=4)
    trained = stage_costs(problem_of(), layout, recompute_to_fit=False)
    served = stage_costs(problem_of(mode="inference"), layout, recompute_to_fit=False)
    np.testing.assert_allclose(served.sends_s[:-1], trained.sends_s[:-1] / 2, rtol=0.01)
    possible = np.isfinite(served.forward_s)
    assert not served.backward_s[possible].any()
