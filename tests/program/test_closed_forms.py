"""Makespans against the formulas of the papers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_build import evaluate

from perfmodel.program import Kind, ProgramSpec, Structure, build

f, b, c = 1.25, 2.75, 0.375
"""Forward, backward and transfer of one stage."""

EXACT = settings(max_examples=40, deadline=None)


def makespan(structure: Structure, times: dict[Kind, float]) -> float:
    duration = np.array([times.get(Kind(kind), 0.0) for kind in structure.class_kind])
    return float(evaluate(structure, duration)[-1])


@EXACT
@given(name=st.sampled_from(["gpipe", "1f1b"]), p=st.integers(1, 7), m=st.integers(1, 12))
def test_gpipe_and_1f1b(name: str, p: int, m: int) -> None:
    structure = build(ProgramSpec(schedule=name, stages=p, micro_batches=m))
    span = makespan(structure, {Kind.FORWARD: f, Kind.BACKWARD: b})
    assert span == pytest.approx((m + p - 1) * (f + b), rel=1e-12)


@EXACT
@given(p=st.integers(1, 7), m=st.integers(1, 12))
def test_gpipe_pays_each_transfer_once_each_way(p: int, m: int) -> None:
    structure = build(ProgramSpec(schedule="gpipe", stages=p, micro_batches=m))
    times = {Kind.FORWARD: f, Kind.BACKWARD: b, Kind.SEND_FORWARD: c, Kind.SEND_BACKWARD: c}
    assert makespan(structure, times) == pytest.approx(
        (m + p - 1) * (f + b) + 2 * (p - 1) * c, rel=1e-12
    )


@EXACT
@given(p=st.integers(1, 7), m=st.integers(1, 15), transfer=st.floats(0, 10))
def test_1f1b_pays_a_round_trip_every_p_micro_batches(p: int, m: int, transfer: float) -> None:
    """Device 0 keeps p micro-batches in flight, so that p of them take a round trip of 2 (p - 1)
    hops; the first pays its own on top."""
    structure = build(ProgramSpec(schedule="1f1b", stages=p, micro_batches=m))
    times = {
        Kind.FORWARD: f,
        Kind.BACKWARD: b,
        Kind.SEND_FORWARD: transfer,
        Kind.SEND_BACKWARD: transfer,
    }
    hops = 2 * (p - 1 + (m - 1) * (p - 1) // p)
    assert makespan(structure, times) == pytest.approx(
        (m + p - 1) * (f + b) + hops * transfer, rel=1e-12
    )


@EXACT
@given(p=st.integers(2, 6), rounds=st.integers(1, 3), v=st.integers(1, 4))
def test_interleaving_divides_the_bubble(p: int, rounds: int, v: int) -> None:
    """Narayanan et al. 2021, section 2.2.2: bubble (p - 1) (t_f + t_b) / v."""
    m = p * rounds
    structure = build(ProgramSpec(schedule="interleaved", stages=p, micro_batches=m, chunks=v))
    span = makespan(structure, {Kind.FORWARD: f / v, Kind.BACKWARD: b / v})
    assert span == pytest.approx(m * (f + b) + (p - 1) * (f + b) / v, rel=1e-12)


@EXACT
@given(p=st.integers(1, 6), m=st.integers(1, 10), v=st.integers(1, 3))
def test_inference_fills_the_pipeline_once(p: int, m: int, v: int) -> None:
    structure = build(ProgramSpec(schedule="forward", stages=p, micro_batches=m, chunks=v))
    span = makespan(structure, {Kind.FORWARD: f})
    last = (v - 1 + (m - 1) // p * v) * p + (m - 1) % p  # gaps of a short last group are waited for
    assert span <= (p + last) * f + 1e-9
    if m % p == 0 or v == 1:
        assert span == pytest.approx((m * v + p - 1) * f, rel=1e-12)


def test_blocking_sends_add_to_the_sender() -> None:
    times = {Kind.FORWARD: f, Kind.SEND_FORWARD: c}
    for sends, expected in (("op", 3 * f + f + c), ("blocking", 3 * (f + c) + f)):
        structure = build(ProgramSpec(schedule="forward", stages=2, micro_batches=3, sends=sends))
        assert makespan(structure, times) == pytest.approx(expected)


@pytest.mark.parametrize(("reduce_s", "hidden"), [(0.5, True), (4.0, False)])
def test_overlapped_reduction_hides_all_but_the_last_bucket(reduce_s: float, hidden: bool) -> None:
    """One device, 4 segments: reductions of b / 4 or less hide behind the next segment's
    backward."""
    spec = ProgramSpec(
        stages=1, micro_batches=2, grad_reduce="overlap", segments=4, optimizer=False
    )
    structure = build(spec)
    duration = np.zeros(structure.n_classes)
    whole = structure.class_segment < 0
    for kind, value in ((Kind.FORWARD, f), (Kind.BACKWARD, b), (Kind.GRAD_REDUCE, reduce_s * 4)):
        of_kind = structure.class_kind == kind
        duration[of_kind] = np.where(whole[of_kind], value, value / 4)
    exposed = reduce_s if hidden else 4 * reduce_s - 3 * b / 4
    assert evaluate(structure, duration)[-1] == pytest.approx(2 * (f + b) + exposed)


def test_layer_gathers_hide_behind_compute_when_prefetched() -> None:
    """ZeRO 3 on one device: only the first gather shows if a gather is shorter than a segment's
    pass."""
    times = {
        Kind.FORWARD: f,
        Kind.BACKWARD: b,
        Kind.PARAM_GATHER: 1.0,
        Kind.PARAM_GATHER_BACKWARD: 1.0,
    }
    spans = {
        gather: makespan(
            build(ProgramSpec(stages=1, micro_batches=2, segments=3, param_gather=gather)), times
        )
        for gather in ("layer", "layer_serial")
    }
    assert spans["layer"] == pytest.approx(6 * (f + b) + 1.0)
    assert spans["layer_serial"] == pytest.approx(6 * (f + b) + 12.0)


def test_step_gathers_delay_only_the_first_micro_batch() -> None:
    times = {Kind.FORWARD: f, Kind.BACKWARD: b, Kind.PARAM_GATHER: 1.0, Kind.OPTIMIZER: 0.5}
    base = 4 * (f + b) + 0.5
    spans = {
        gather: makespan(build(ProgramSpec(stages=1, micro_batches=4, param_gather=gather)), times)
        for gather in ("step", "step_overlap")
    }
    assert spans == {"step": pytest.approx(base + 1.0), "step_overlap": pytest.approx(base + 1.0)}


def test_gradient_norm_makes_optimizers_wait_for_the_last_device() -> None:
    times = {Kind.FORWARD: f, Kind.BACKWARD: b, Kind.OPTIMIZER: 10.0}
    spec = {"stages": 3, "micro_batches": 4}
    assert makespan(build(ProgramSpec(**spec)), times) == pytest.approx(6 * (f + b) + 10.0)
    free = build(ProgramSpec(**spec, grad_norm_barrier=False))
    duration = np.array([times.get(Kind(kind), 0.0) for kind in free.class_kind])
    end = evaluate(free, duration)[free.kind == Kind.OPTIMIZER]
    np.testing.assert_allclose(end, [6 * (f + b) + 10.0 - d * b for d in range(3)])
