"""Structures against the event-loop simulator and against what every structure must satisfy."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from program_oracle import end_times

from perfmodel.errors import PerfModelError
from perfmodel.program import N_STREAMS, WHOLE, Kind, ProgramSpec, Stream, Structure, build
from perfmodel.schedule import Phase, Schedule, from_keys, from_orders, looped_stages


@st.composite
def specs(draw: st.DrawFn, most: int = 4) -> ProgramSpec:
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "forward"]))
    forward_only = schedule == "forward" or draw(st.integers(0, 5)) == 0
    grad_reduce = draw(st.sampled_from(["none", "end", "overlap"]))
    gathers = ["none", "layer", "layer_serial"] + ["step", "step_overlap"] * (not forward_only)
    return ProgramSpec(
        schedule=schedule,
        stages=draw(st.integers(1, most)),
        micro_batches=draw(st.integers(1, 6)),
        chunks=1 if schedule == "1f1b" else draw(st.integers(1, 3)),
        forward_only=forward_only,
        sends=draw(st.sampled_from(["lag", "op", "blocking"])),
        grad_reduce="none" if forward_only else grad_reduce,
        reduce_every_micro_batch=not forward_only and grad_reduce != "none" and draw(st.booleans()),
        param_gather=draw(st.sampled_from(gathers)),
        prefetch=draw(st.integers(1, 3)),
        segments=draw(st.integers(1, 3)),
        tied_embedding=draw(st.booleans()),
        optimizer=draw(st.booleans()),
        grad_norm_barrier=draw(st.booleans()),
    )


def evaluate(structure: Structure, duration: np.ndarray) -> np.ndarray:
    """End times by the recurrence of `Structure`'s docstring, one op at a time."""
    end = np.zeros(structure.n_ops)
    for op in range(structure.n_ops):
        before = [
            end[p] + duration[lag]
            for p, lag in zip(structure.pred[op], structure.lag[op], strict=True)
            if p >= 0
        ]
        end[op] = max(before, default=0.0) + duration[structure.duration[op]]
    return end


def assert_equals_simulator(
    spec: ProgramSpec, structure: Structure, schedule: Schedule, seed: int
) -> None:
    duration = np.random.default_rng(seed).uniform(0.1, 2.0, structure.n_classes)
    duration[0] = 0
    names = zip(structure.class_kind, structure.class_stage, structure.class_segment, strict=True)
    by_name = {tuple(map(int, name)): float(d) for name, d in zip(names, duration, strict=True)}
    expected, makespan = end_times(spec, schedule, lambda *name: by_name[tuple(map(int, name))])
    end = evaluate(structure, duration)
    columns = (
        structure.kind,
        structure.class_stage[structure.duration],
        structure.class_segment[structure.duration],
        structure.micro_batch,
        structure.device,
    )
    names_of_ops = np.stack(columns, axis=1)
    found = {
        tuple(name): time
        for name, time in zip(names_of_ops.tolist(), end, strict=True)
        if name[0] != Kind.ZERO
    }
    assert len(found) == (structure.kind != Kind.ZERO).sum()  # names are unique
    assert found.keys() == expected.keys()
    for name, time in found.items():
        assert time == pytest.approx(expected[name], rel=1e-12)
    assert end[-1] == pytest.approx(makespan, rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(spec=specs(), seed=st.integers(0, 1000))
def test_end_times_equal_the_event_loop(spec: ProgramSpec, seed: int) -> None:
    assert_equals_simulator(spec, build(spec), spec.build_schedule(), seed)


@settings(max_examples=80, deadline=None)
@given(spec=specs(most=6))
def test_structures_are_well_formed(spec: ProgramSpec) -> None:
    s, schedule = build(spec), spec.build_schedule()
    assert s.pred.shape == s.lag.shape == (s.n_ops, 2)
    assert (s.pred < np.arange(s.n_ops)[:, None]).all()
    reached = np.zeros(s.n_ops, bool)
    reached[-1] = True
    for op in reversed(range(s.n_ops)):
        if reached[op]:
            reached[s.pred[op][s.pred[op] >= 0]] = True
    assert reached.all()
    assert s.kind[-1] == Kind.ZERO
    assert s.stream[-1] == -1
    for stream in range(spec.stages * N_STREAMS):
        ops = np.flatnonzero(s.stream == stream)
        for before, op in pairwise(ops):
            assert before in _ancestors_until(s, op, before)
    passes = np.isin(s.kind, (Kind.FORWARD, Kind.BACKWARD))
    assert (s.stream[passes] % N_STREAMS == Stream.COMPUTE).all()
    stage, segment = s.class_stage[s.duration], s.class_segment[s.duration]
    for kind, count in ((Kind.FORWARD, 1), (Kind.BACKWARD, 0 if schedule.forward_only else 1)):
        opens = (s.kind == kind) & ((segment == WHOLE) | (segment == 0))
        work = stage[opens] * spec.micro_batches + s.micro_batch[opens]
        np.testing.assert_array_equal(
            np.bincount(work, minlength=schedule.n_stages * spec.micro_batches), count
        )
        np.testing.assert_array_equal(s.device[opens], stage[opens] % spec.stages)
    for columns in (s.alloc, s.free):  # every activation is taken once and given back once
        np.testing.assert_array_equal(
            np.bincount(columns, minlength=schedule.n_stages + 1)[1:], spec.micro_batches
        )
    assert (s.class_kind[1:] != Kind.ZERO).all()
    names = np.stack([s.class_kind, s.class_stage, s.class_segment])
    assert np.unique(names, axis=1).shape == names.shape
    used = np.union1d(s.duration, s.lag)
    np.testing.assert_array_equal(np.union1d(used, [0]), np.arange(s.n_classes))


def _ancestors_until(s: Structure, op: int, floor: int) -> set[int]:
    """Ops with numbers from `floor` on that `op` waits for."""
    found: set[int] = set()
    open_ops = [op]
    while open_ops:
        for before in s.pred[open_ops.pop()].tolist():
            if before >= floor and before not in found:
                found.add(before)
                open_ops.append(before)
    return found


@settings(max_examples=60, deadline=None)
@given(spec=specs())
def test_transfers_join_neighbouring_stages_on_different_devices(spec: ProgramSpec) -> None:
    s = build(replace(spec, param_gather="none"))  # gathers would put joins before the receivers
    stage, kind = s.class_stage[s.duration], s.kind
    hops = (spec.stages * spec.chunks - 1) * spec.micro_batches if spec.stages > 1 else 0
    directions = [(Kind.SEND_FORWARD, Kind.FORWARD, 1), (Kind.SEND_BACKWARD, Kind.BACKWARD, -1)]
    for send, received_by, step in directions:
        if spec.sends == "lag":
            receiver, side = np.nonzero(s.class_kind[s.lag] == send)
            sender = s.pred[receiver, side]
            np.testing.assert_array_equal(s.class_stage[s.lag[receiver, side]], stage[sender])
        else:
            on_pass = np.isin(kind[s.pred], send) & (s.pred >= 0) & (kind == received_by)[:, None]
            receiver, side = np.nonzero(on_pass & (s.device[s.pred] != s.device[:, None]))
            sender = s.pred[receiver, side]
            assert (kind == send).sum() == len(sender)
        assert len(sender) == (0 if step < 0 and spec.is_forward_only else hops)
        np.testing.assert_array_equal(stage[receiver], stage[sender] + step)
        np.testing.assert_array_equal(s.micro_batch[receiver], s.micro_batch[sender])
        np.testing.assert_array_equal((s.device[sender] + step) % spec.stages, s.device[receiver])


def _custom(name: str) -> Schedule:
    f, b, bi, bw = Phase
    if name == "split backward":
        first = [(f, 0, 0), (f, 0, 1), (bi, 0, 0), (f, 0, 2), (bi, 0, 1), (bw, 0, 0), (bi, 0, 2)]
        second = [(f, 0, 0), (bi, 0, 0), (f, 0, 1), (bi, 0, 1), (bw, 0, 0), (f, 0, 2), (bi, 0, 2)]
        rest = [(bw, 0, 1), (bw, 0, 2)]
        return from_orders(name, looped_stages(2, 1), 3, [first + rest, second + rest])
    if name == "V":  # device d holds stages d and 2p - 1 - d
        d, c, i = np.ogrid[:3, :2, :4]
        stage = np.where(np.arange(2) == 0, np.arange(3)[:, None], 5 - np.arange(3)[:, None])
        depth = np.where(c == 0, d, 5 - d)
        return from_keys(name, stage, {f: depth + 10 * i, b: 11 - depth + 10 * i})
    p = m = 4  # Chimera: every stage on two devices
    d, i = np.arange(p)[:, None], np.arange(m)
    depth = np.stack([np.broadcast_to(d, (p, m)), np.broadcast_to(p - 1 - d, (p, m))], axis=1)
    here = np.stack([i < m // 2, i >= m // 2])[None]
    start = depth + 2 * (i % (m // 2))
    back = 2 * p - 1 - depth + 2 * (i % (m // 2))
    keys = {f: np.where(here, start, -1), b: np.where(here, back, -1)}
    return from_keys(name, np.concatenate([d, p - 1 - d], axis=1), keys)


@pytest.mark.parametrize("name", ["split backward", "V", "bidirectional"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_schedules_of_ones_own_equal_the_event_loop(name: str, data: st.DataObject) -> None:
    schedule = _custom(name)
    spec = ProgramSpec(
        schedule="gpipe",  # any that takes so many chunks; the order is the one given
        stages=schedule.devices,
        micro_batches=schedule.micro_batches,
        chunks=schedule.chunks,
        segments=data.draw(st.integers(1, 2)),
        sends=data.draw(st.sampled_from(["lag", "op", "blocking"])),
        grad_reduce=data.draw(st.sampled_from(["none", "end", "overlap"])),
        param_gather=data.draw(st.sampled_from(["none", "step", "layer"])),
    )
    assert_equals_simulator(spec, build(spec, schedule), schedule, data.draw(st.integers(0, 99)))


def test_a_schedule_that_deadlocks_is_refused_by_name() -> None:
    f, b, _, _ = Phase
    orders = [
        [(f, 0, 0), (b, 0, 0), (f, 0, 1), (b, 0, 1)],
        [(f, 0, 0), (f, 0, 1), (b, 0, 0), (b, 0, 1)],
    ]
    stuck = from_orders("stuck", looped_stages(2, 1), 2, orders)
    with pytest.raises(
        PerfModelError, match=r"schedule stuck: deadlock: device 0 position 1 \(B chunk 0"
    ):
        build(ProgramSpec(stages=2, micro_batches=2), stuck)


def test_large_structure_has_the_expected_ops() -> None:
    p, m = 64, 512
    s = build(ProgramSpec(stages=p, micro_batches=m, sends="op"))
    passes, sends = 2 * p * m, 2 * (p - 1) * m
    joins = (p - 2) + 1 + (p - 2) + 1  # barrier and its tree, end and its tree
    assert s.n_ops == passes + sends + p + joins
    assert s.n_classes == 1 + 2 * p + 2 * (p - 1) + p
