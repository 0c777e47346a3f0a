"""Uniform pipelines against formulas, from an independent generator and from
`perfmodel.program`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timeline_cases import pipeline_1f1b

from perfmodel.program import Kind, ProgramSpec, build
from perfmodel.timeline import compile_structure, makespan, makespan_and_grad, times

SECONDS = st.integers(1, 1000).map(lambda n: n / 64)
"""Times that add without rounding."""


def seconds_by_kind(structure, **seconds):
    durations = np.zeros(structure.n_classes)
    for kind, value in seconds.items():
        durations[structure.class_kind == Kind[kind.upper()]] = value
    return durations


@settings(max_examples=40)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 24), SECONDS, SECONDS)
def test_no_communication(schedule, stages, micro_batches, forward_s, backward_s):
    """(m + p - 1)(f + b), and a bubble of (p - 1) / (m + p - 1) (GPipe; Megatron SC21, eq. 1)."""
    structure = build(ProgramSpec(schedule=schedule, stages=stages, micro_batches=micro_batches))
    timeline = times(structure, seconds_by_kind(structure, forward=forward_s, backward=backward_s))
    slots = micro_batches + stages - 1
    assert timeline.makespan_s == slots * (forward_s + backward_s)
    assert timeline.idle_fraction() == pytest.approx((stages - 1) / slots)


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 24), SECONDS, SECONDS, SECONDS)
def test_gpipe_with_sends(stages, micro_batches, forward_s, backward_s, send_s):
    """Each hop of the first and of the last micro-batch is paid once: 2 (p - 1) c more."""
    structure = build(ProgramSpec(schedule="gpipe", stages=stages, micro_batches=micro_batches))
    durations = seconds_by_kind(
        structure, forward=forward_s, backward=backward_s, send_forward=send_s, send_backward=send_s
    )
    expected = (micro_batches + stages - 1) * (forward_s + backward_s) + 2 * (stages - 1) * send_s
    assert makespan(compile_structure(structure), durations) == expected


def makespan_1f1b(stages, micro_batches, forward_s, backward_s, send_s):
    """Strict alternation puts a hop there and back on the path for every micro-batch but each
    p-th."""
    more = micro_batches - 1
    hops = (stages - 1) + more - -(-more // stages)
    return (micro_batches + stages - 1) * (forward_s + backward_s) + 2 * hops * send_s


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(1, 40), SECONDS, SECONDS, SECONDS)
def test_1f1b_with_sends(stages, micro_batches, forward_s, backward_s, send_s):
    structure = build(ProgramSpec(stages=stages, micro_batches=micro_batches))
    durations = seconds_by_kind(
        structure, forward=forward_s, backward=backward_s, send_forward=send_s, send_backward=send_s
    )
    expected = makespan_1f1b(stages, micro_batches, forward_s, backward_s, send_s)
    assert makespan(compile_structure(structure), durations) == expected


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 40), SECONDS, SECONDS, SECONDS)
def test_1f1b_with_send_ops(stages, micro_batches, forward_s, backward_s, send_s):
    compiled = compile_structure(pipeline_1f1b(stages, micro_batches))
    expected = makespan_1f1b(stages, micro_batches, forward_s, backward_s, send_s)
    assert makespan(compiled, np.array([0, forward_s, backward_s, send_s])) == expected


def test_half_a_million_ops():
    spec = ProgramSpec(stages=64, micro_batches=2048, sends="op")
    compiled = compile_structure(build(spec))
    assert compiled.n_ops > 500_000
    kinds = {"forward": 1.0, "backward": 2.0, "send_forward": 1 / 8, "send_backward": 1 / 8}
    durations = seconds_by_kind(compiled.structure, **kinds)
    expected = makespan_1f1b(64, 2048, 1.0, 2.0, 1 / 8)
    span, gradient = makespan_and_grad(compiled, durations)
    assert span == gradient @ durations == expected
    assert makespan(compiled, durations.astype(np.float32)) == pytest.approx(expected, rel=3e-5)


def test_gradient_of_gpipe_is_chimeras_counts():
    """n_f = n_b = m + p - 1 forward and backward passes lie on the critical path (Chimera, section
    3.4)."""
    structure = build(ProgramSpec(schedule="gpipe", stages=4, micro_batches=10))
    durations = seconds_by_kind(structure, forward=1.0, backward=2.0)
    _, gradient = makespan_and_grad(compile_structure(structure), durations)
    assert gradient[structure.class_kind == Kind.FORWARD].sum() == 13
    assert gradient[structure.class_kind == Kind.BACKWARD].sum() == 13
