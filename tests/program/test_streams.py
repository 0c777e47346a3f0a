"""Programs of schedules beyond one flush: streams of steps, several micro-batches at once, pairs,
offload."""

import numpy as np
import pytest

from perfmodel.program import N_STREAMS, PAIRED, WHOLE, Kind, ProgramSpec, Stream, Structure, build
from perfmodel.schedule import PassTimes, Phase, get_schedule, schedule_names
from perfmodel.schedule.facts import starts_and_ends
from perfmodel.schedule.memory import alive_at_peak, offloaded_at_peak, offloads
from perfmodel.timeline import memory, times

STREAMS = ["pipedream", "pipedream-2bw", "nf1b", "zb-h2", "zb-v"]
SECONDS = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}


def durations(structure: Structure, **more: float) -> np.ndarray:
    seconds = SECONDS | {Kind[name.upper()]: value for name, value in more.items()}
    of_class = np.array([seconds.get(Kind(kind), 0.0) for kind in structure.class_kind])
    return of_class * np.where(
        np.isin(structure.class_kind, list(SECONDS)), structure.class_span, 1
    )


def chunks_of(name: str) -> int:
    return get_schedule(name).chunks or 2


@pytest.mark.parametrize("transfer", [0.0, 0.25])
@pytest.mark.parametrize("name", [n for n in schedule_names() if n != "forward"])
def test_makespan_equals_a_plain_walk_over_the_schedule(name: str, transfer: float) -> None:
    spec = ProgramSpec(
        schedule=name, stages=4, micro_batches=8, chunks=chunks_of(name), optimizer=False
    )
    schedule = spec.build_schedule()
    ones = np.ones(spec.n_stages)
    start, end = starts_and_ends(schedule, PassTimes(ones, ones, ones, transfer))
    structure = build(spec)
    timeline = times(structure, durations(structure, send_forward=transfer, send_backward=transfer))
    assert timeline.makespan_s == pytest.approx(end.max())
    passes = np.isin(structure.kind, list(SECONDS))
    order = np.lexsort((timeline.start_s[passes], structure.device[passes]))
    np.testing.assert_allclose(timeline.start_s[passes][order], start)


@pytest.mark.parametrize("name", STREAMS)
def test_every_device_updates_once_per_step_after_its_reductions(name: str) -> None:
    steps, m = 3, 8
    spec = ProgramSpec(
        schedule=name,
        stages=4,
        micro_batches=m,
        steps=steps,
        grad_reduce="overlap",
        segments=2,
        param_gather="step",
    )
    structure = build(spec)
    timeline = times(
        structure, durations(structure, grad_reduce=0.5, optimizer=0.25, param_gather=0.125)
    )
    updates = structure.kind == Kind.OPTIMIZER
    per_device = steps * (m if name == "pipedream" else 1)
    assert np.bincount(structure.device[updates]).tolist() == [per_device] * 4
    for device in range(4):
        own = structure.device == device
        update = np.sort(timeline.start_s[own & updates])
        reduced = np.sort(timeline.end_s[own & (structure.kind == Kind.GRAD_REDUCE)])
        assert len(reduced) == per_device * 2 * spec.chunks
        last = reduced.reshape(per_device, -1)[:, -1]
        assert (update >= last - 1e-12).all()


@pytest.mark.parametrize("name", ["1f1b", "chimera", "dualpipe-v", *STREAMS])
@pytest.mark.parametrize("seed", range(5))
def test_gathers_beside_the_passes_never_take_longer_than_before_them(name: str, seed: int) -> None:
    """In a flush and in a stream of steps, whatever passes, reductions and transfers last; every
    device gathers as much in both."""
    random = np.random.default_rng(seed)
    whole_s = {
        (kind, stage): random.exponential(random.choice([0.1, 1.0, 5.0]))
        for kind in Kind
        for stage in range(8)
    }
    whole_s |= {
        (kind, stage): 2.0 for kind in (Kind.OPTIMIZER, Kind.PARAM_GATHER) for stage in range(8)
    }
    spans, gathered = [], []
    for how in ("step", "step_overlap"):
        spec = ProgramSpec(
            schedule=name,
            stages=4,
            micro_batches=8,
            steps=3 if name in STREAMS else 1,
            chunks=chunks_of(name),
            grad_reduce="overlap",
            segments=2,
            param_gather=how,
        )
        structure = build(spec)
        parts = np.where(structure.class_segment == WHOLE, 1, spec.segments)
        classes = zip(structure.class_kind.tolist(), structure.class_stage.tolist(), strict=True)
        seconds = np.array([whole_s[Kind(kind), stage] for kind, stage in classes]) / parts
        seconds[0] = 0.0
        spans.append(times(structure, seconds).makespan_s)
        gathers = structure.kind == Kind.PARAM_GATHER
        of_op = seconds[structure.duration]
        gathered.append(np.bincount(structure.device[gathers], of_op[gathers], minlength=4))
    assert spans[1] <= spans[0] * (1 + 1e-9)
    np.testing.assert_allclose(*gathered)


def test_a_stream_takes_one_period_per_step() -> None:
    """PipeDream-2BW is 1F1B without flushes: m (F + B) per step, whatever the depth."""
    spans = []
    for steps in (4, 6):
        structure = build(
            ProgramSpec(schedule="pipedream-2bw", stages=4, micro_batches=8, steps=steps)
        )
        spans.append(times(structure, durations(structure)).makespan_s)
    assert spans[1] - spans[0] == 2 * 8 * 3


def test_zero_bubble_streams_have_none() -> None:
    for name, work in (("zb-h2", 3), ("zb-v", 6)):
        spans = []
        for steps in (2, 3):
            structure = build(ProgramSpec(schedule=name, stages=4, micro_batches=8, steps=steps))
            spans.append(times(structure, durations(structure)).makespan_s)
        assert spans[1] - spans[0] == 8 * work


def test_pairs_give_their_outputs_together() -> None:
    spec = ProgramSpec(schedule="dualpipe", stages=4, micro_batches=8, optimizer=False)
    structure, schedule = build(spec), spec.build_schedule()
    paired = structure.variants[structure.class_variant, 2][structure.duration] == PAIRED
    assert paired.sum() == 2 * schedule.paired.sum()
    timeline = times(structure, durations(structure))
    first = np.flatnonzero(paired & (structure.kind == Kind.FORWARD))
    for op in first.tolist():
        stage, batch = structure.class_stage[structure.duration[op]], structure.micro_batch[op]
        later = (structure.kind == Kind.FORWARD) & (structure.micro_batch == batch)
        later &= structure.class_stage[structure.duration] == stage + 1
        if later.any():
            # its backward partner ends then
            assert timeline.start_s[later].min() >= timeline.end_s[op] + 2.0 - 1e-12


def test_variants_price_spans_and_slices_apart() -> None:
    doubled = build(ProgramSpec(schedule="chimera-doubling", stages=4, micro_batches=8))
    forward = doubled.class_kind == Kind.FORWARD
    assert set(doubled.class_span[forward].tolist()) == {2}
    assert set(doubled.class_span[doubled.class_kind == Kind.BACKWARD].tolist()) == {1}
    sliced = build(ProgramSpec(schedule="seq1f1b:4", stages=2, micro_batches=2))
    assert set(
        sliced.variants[sliced.class_variant, 1][sliced.class_kind == Kind.FORWARD].tolist()
    ) == {0, 1, 2, 3}


@pytest.mark.parametrize("copy_s", [0.0, 0.4, 3.0])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "chimera", "dualpipe-v"])
def test_offload_lowers_memory_to_what_order_alone_says(name: str, copy_s: float) -> None:
    spec = ProgramSpec(
        schedule=name,
        stages=4,
        micro_batches=16,
        chunks=chunks_of(name),
        offload=True,
        optimizer=False,
    )
    structure, schedule = build(spec), spec.build_schedule()
    timeline = times(structure, durations(structure, offload=copy_s, reload=copy_s))
    one = np.ones(spec.n_stages + 1)
    peak = memory(timeline, one, np.zeros(4)).peak_bytes
    counted = offloaded_at_peak(schedule).sum(axis=1)
    assert (peak <= counted).all()
    assert (counted <= alive_at_peak(schedule).sum(axis=1) + 1).all()
    if name == "gpipe":
        assert counted.max() <= 4 < alive_at_peak(schedule).max()
    copies = structure.kind == Kind.OFFLOAD
    assert copies.sum() == len(offloads(schedule).forward) == (structure.kind == Kind.RELOAD).sum()
    assert (structure.stream[copies] % N_STREAMS == Stream.OFFLOAD).all()


def test_slow_copies_hold_up_the_step() -> None:
    spans = []
    for copy_s in (0.5, 4.0):
        structure = build(
            ProgramSpec(schedule="gpipe", stages=2, micro_batches=16, offload=True, optimizer=False)
        )
        spans.append(
            times(structure, durations(structure, offload=copy_s, reload=copy_s)).makespan_s
        )
    assert spans[0] == (16 + 1) * 3
    assert spans[1] > 2 * spans[0]


def test_phases_are_those_of_the_schedule() -> None:
    assert [Kind[phase.name] for phase in Phase] == list(SECONDS)
