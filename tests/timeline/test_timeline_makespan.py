"""One duration vector at a time: against the event loop, and its derivatives in every mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timeline_cases import (
    counts_on,
    distinct_durations,
    event_loop,
    first_path,
    pipeline_1f1b,
    structure_of,
    structures,
    tied_durations,
)

from perfmodel.errors import PerfModelError
from perfmodel.timeline import compile_structure, double_precision, makespan, makespan_and_grad
from perfmodel.timeline._tables import DESTINATION, GROUP, SOURCE_A, SOURCE_B

PIPELINE = pipeline_1f1b(8, 24)


@given(structures(), st.integers(0, 99), st.booleans())
def test_equals_event_loop(structure, seed, tied):
    durations = tied_durations(structure, seed) if tied else distinct_durations(structure, seed)
    _, end = event_loop(structure, durations)
    assert makespan(compile_structure(structure), durations) == end[-1]


@given(structures(), st.integers(0, 99), st.booleans())
def test_gradient_counts_classes_on_the_first_critical_path(structure, seed, tied):
    durations = tied_durations(structure, seed) if tied else distinct_durations(structure, seed)
    _, end = event_loop(structure, durations)
    expected = counts_on(structure, first_path(structure, end, durations), end, durations)
    span, gradient = makespan_and_grad(compile_structure(structure), durations)
    assert span == end[-1]
    np.testing.assert_array_equal(gradient, expected)
    np.testing.assert_allclose(gradient @ durations, span, rtol=1e-14)


@settings(max_examples=10)
@given(structures(), st.integers(0, 99))
def test_forward_reverse_and_finite_differences_agree(structure, seed):
    compiled = compile_structure(structure)
    durations = distinct_durations(structure, seed)
    _, explicit = makespan_and_grad(compiled, durations)
    step = 1e-6
    basis = np.eye(len(durations))
    basis[0] = 0
    numeric = [
        (makespan(compiled, durations + step * e) - makespan(compiled, durations - step * e))
        / (2 * step)
        for e in basis
    ]
    np.testing.assert_allclose(numeric, explicit, atol=1e-6)
    with double_precision():
        at = jnp.asarray(durations)
        np.testing.assert_array_equal(jax.grad(lambda d: makespan(compiled, d))(at), explicit)
        np.testing.assert_array_equal(jax.jacfwd(lambda d: makespan(compiled, d))(at), explicit)


def test_a_tie_goes_to_the_first_predecessor():
    for first, second in ((0, 1), (1, 0)):
        structure = structure_of([(-1, -1), (-1, -1), (first, second)], [1, 2, 3])
        _, gradient = makespan_and_grad(compile_structure(structure), np.array([0, 5.0, 5.0, 1.0]))
        assert gradient.tolist() == [0, first == 0, first == 1, 1]


def test_the_last_op_counts_even_if_others_do_not_lead_to_it():
    structure = structure_of([(-1, -1), (0, -1), (0, -1)], [1, 2, 3])
    assert makespan(compile_structure(structure), np.array([0, 1.0, 10.0, 2.0])) == 3.0


def test_a_single_op():
    span, gradient = makespan_and_grad(
        compile_structure(structure_of([(-1, -1)], [1])), np.array([0, 3.0])
    )
    assert (span, gradient.tolist()) == (3.0, [0, 1])


def test_class_0_is_the_constant_0():
    structure = structure_of([(-1, -1), (0, -1)], [0, 1])
    span, gradient = makespan_and_grad(compile_structure(structure), np.array([7.0, 3.0]))
    assert (span, gradient.tolist()) == (3.0, [0, 1])


def test_second_derivative_of_a_function_of_the_makespan():
    compiled = compile_structure(PIPELINE)
    durations = distinct_durations(PIPELINE)
    _, gradient = makespan_and_grad(compiled, durations)
    with double_precision():
        at = jnp.asarray(durations)
        hessian = jax.hessian(lambda d: makespan(compiled, d) ** 2)(at)
    np.testing.assert_allclose(hessian, 2 * np.outer(gradient, gradient), rtol=1e-12)


def test_jit_and_vmap_and_their_compositions():
    compiled = compile_structure(PIPELINE)
    lanes = np.stack([distinct_durations(PIPELINE, seed) for seed in range(20)]).astype(np.float32)
    singles = [makespan_and_grad(compiled, lane) for lane in lanes]
    spans, gradients = np.array([s for s, _ in singles]), np.array([g for _, g in singles])

    def span(durations):
        return makespan(compiled, durations)

    batch = jnp.asarray(lanes)
    np.testing.assert_allclose(jax.vmap(span)(batch), spans, rtol=1e-6)
    np.testing.assert_array_equal(jax.vmap(jax.grad(span))(batch), gradients)
    np.testing.assert_array_equal(jax.grad(lambda b: jax.vmap(span)(b).sum())(batch), gradients)
    np.testing.assert_allclose(jax.jit(span)(batch[0]), spans[0], rtol=1e-6)
    nested = jax.vmap(jax.vmap(span))(batch.reshape(4, 5, -1))
    np.testing.assert_allclose(nested.reshape(-1), spans, rtol=1e-6)
    nested = jax.vmap(jax.vmap(jax.grad(span)))(batch.reshape(4, 5, -1))
    np.testing.assert_array_equal(nested.reshape(gradients.shape), gradients)
    tangents = jax.jvp(jax.vmap(span), (batch,), (batch,))[1]
    np.testing.assert_allclose(tangents, spans, rtol=1e-5)


def test_numpy_keeps_its_precision_and_no_global_state_changes():
    compiled = compile_structure(PIPELINE)
    durations = distinct_durations(PIPELINE)
    double, single = makespan(compiled, durations), makespan(compiled, durations.astype(np.float32))
    assert (double.dtype, single.dtype) == (np.float64, np.float32)
    assert makespan(compiled, jnp.asarray(durations)).dtype == jnp.float32
    assert abs(single / double - 1) < 1e-5
    assert jnp.zeros(1).dtype == jnp.float32
    inside = jax.jit(lambda x: x * makespan(compiled, durations))(1.0)
    assert abs(inside / double - 1) < 1e-6


@given(structures(max_ops=80))
def test_slots_keep_a_value_until_the_group_that_reads_it_last_is_over(structure):
    compiled = compile_structure(structure)
    program = compiled.program.astype(int)
    holder: dict[int, int] = {}
    for first in range(0, compiled.n_ops, GROUP):
        group = range(first, min(first + GROUP, compiled.n_ops))
        for position in group:
            holder[program[position, DESTINATION]] = position
        for position in group:
            for side, column in enumerate((SOURCE_A, SOURCE_B)):
                if (pred := compiled.pred[position, side]) >= 0:
                    assert holder[program[position, column]] == pred
    within = compiled.bundle[compiled.pred] == compiled.bundle[:, None]
    assert not (within & (compiled.pred >= 0)).any()


@pytest.mark.usefixtures("compiled_anew")
def test_loops_over_single_ops_compile_to_one_function():
    """The whole speed of these loops rests on it; see `_loops`."""
    from perfmodel.timeline._durations import padded_classes
    from perfmodel.timeline._makespan import _span_and_counts

    for structure in (PIPELINE, structure_of([(-1, -1), (0, -1)], [1, 1], [(0, 0), (1, 0)])):
        compiled = compile_structure(structure)
        durations = padded_classes(np.ones(compiled.structure.n_classes, np.float32))
        text = _span_and_counts.lower(compiled.op_tables, durations).compile().as_text() or ""
        assert text.count("xla_cpu_small_call") == 2


def test_many_ops():
    structure = pipeline_1f1b(16, 300)
    durations = tied_durations(structure, 1) + 1.25
    durations[0] = 0
    _, end = event_loop(structure, durations)
    assert makespan(compile_structure(structure), durations) == end[-1]


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        (np.ones(3), r"shape must be \(4,\)"),
        (np.ones((2, 4)), r"shape must be \(4,\)"),
        (np.array([0, 1, np.nan, 1]), "finite seconds.*nan at"),
        (np.array([0, 1, 1, np.inf]), "finite seconds.*inf at"),
        (np.array(["a"] * 4), "numbers in seconds"),
    ],
)
def test_bad_durations(durations, message):
    with pytest.raises(PerfModelError, match=message):
        makespan(compile_structure(PIPELINE), durations)
