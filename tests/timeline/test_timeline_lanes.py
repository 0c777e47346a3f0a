"""Many duration vectors and many structures at once equal one at a time."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thinned import one_in
from timeline_cases import distinct_durations, pipeline_1f1b, structures

from perfmodel.errors import PerfModelError
from perfmodel.program import ProgramSpec, build
from perfmodel.timeline import (
    ProgramBatch,
    compile_structure,
    count_traces,
    makespan,
    makespan_and_grad,
    makespan_lanes,
    makespan_lanes_and_grad,
    makespan_many,
)
from perfmodel.timeline._lanes import _many
from perfmodel.timeline._loops import LANES, TILE
from perfmodel.timeline._many import LEAST_DIVIDED, _divided

PIPELINE = pipeline_1f1b(4, 12)
LAGGED = build(ProgramSpec(stages=4, micro_batches=8))


def lanes_of(structure, lanes, seed=0):
    return np.stack([distinct_durations(structure, seed + i) for i in range(lanes)]).astype(
        np.float32
    )


def one_by_one(compiled, lanes):
    pairs = [makespan_and_grad(compiled, lane) for lane in lanes]
    return np.array([span for span, _ in pairs]), np.array([gradient for _, gradient in pairs])


@pytest.mark.parametrize("structure", [PIPELINE, LAGGED], ids=["sends", "lags"])
@pytest.mark.parametrize("lanes", one_in(2, [1, 16, 17, 128, 129, 300]))
def test_lanes_equal_singles(structure, lanes):
    compiled, durations = compile_structure(structure), lanes_of(structure, lanes)
    spans, gradients = one_by_one(compiled, durations)
    np.testing.assert_array_equal(makespan_lanes(compiled, durations), spans)
    both = makespan_lanes_and_grad(compiled, durations)
    np.testing.assert_array_equal(both[0], spans)
    np.testing.assert_array_equal(both[1], gradients)


@settings(max_examples=25)
@given(structures(), st.integers(0, 99))
def test_any_structure_by_bundles(structure, seed):
    compiled, durations = compile_structure(structure), lanes_of(structure, 20, seed)
    np.testing.assert_array_equal(
        makespan_lanes(compiled, durations), one_by_one(compiled, durations)[0]
    )


@pytest.mark.parametrize("lanes", [5, 40])
def test_derivatives_of_lanes(lanes):
    compiled, durations = compile_structure(PIPELINE), lanes_of(PIPELINE, lanes)
    spans, gradients = one_by_one(compiled, durations)
    weights = jnp.arange(1.0, lanes + 1)
    batch = jnp.asarray(durations)
    value, reverse = jax.value_and_grad(lambda d: makespan_lanes(compiled, d) @ weights)(batch)
    np.testing.assert_allclose(value, spans @ np.asarray(weights), rtol=1e-5)
    np.testing.assert_allclose(reverse, gradients * np.asarray(weights)[:, None], rtol=1e-6)
    value, forward = jax.jvp(lambda d: makespan_lanes(compiled, d), (batch,), (batch,))
    np.testing.assert_allclose(value, spans, rtol=1e-6)
    np.testing.assert_allclose(forward, (gradients * durations).sum(axis=1), rtol=1e-5)


def test_many_structures_equal_each_alone():
    specs = [
        ProgramSpec(stages=1, micro_batches=3),
        ProgramSpec(stages=4, micro_batches=8, sends="op"),
        ProgramSpec(schedule="interleaved", stages=4, micro_batches=8, chunks=3),
    ]
    programs = [compile_structure(s) for s in [PIPELINE, *map(build, specs)]]
    durations = [lanes_of(c.structure, n) for c, n in zip(programs, (5, 16, 1, 37), strict=True)]
    for batch in (programs, ProgramBatch(tuple(programs))):
        for compiled, of_program, spans in zip(
            programs, durations, makespan_many(batch, durations), strict=True
        ):
            np.testing.assert_array_equal(spans, one_by_one(compiled, of_program)[0])


@settings(max_examples=25)
@given(st.lists(structures(max_ops=25), min_size=1, max_size=5), st.integers(0, 99))
def test_many_of_any_structures(these, seed):
    programs = [compile_structure(s) for s in these]
    durations = [lanes_of(s, 1 + (seed + i) % 20, seed) for i, s in enumerate(these)]
    for compiled, of_program, spans in zip(
        programs, durations, makespan_many(programs, durations), strict=True
    ):
        np.testing.assert_array_equal(spans, [makespan(compiled, lane) for lane in of_program])


@pytest.mark.parametrize("lanes", [1, 16, 17, 1300])
def test_many_structures_equal_each_alone_however_large_their_tables_are(lanes: int):
    """Beyond the smallest sizes that tables are padded to: in lanes, in classes, in ops, and in
    values kept at once."""
    wide = build(ProgramSpec(schedule="interleaved", stages=16, micro_batches=32, chunks=4))
    deep = build(ProgramSpec(schedule="zb-h2", stages=64, micro_batches=128))
    programs = [compile_structure(s) for s in (LAGGED, wide, deep, PIPELINE)]
    durations = [lanes_of(c.structure, lanes, seed) for seed, c in enumerate(programs)]
    for compiled, of_program, spans in zip(
        programs, durations, makespan_many(programs, durations), strict=True
    ):
        np.testing.assert_array_equal(spans, makespan_lanes(compiled, of_program))
        np.testing.assert_array_equal(spans[-1], makespan(compiled, of_program[-1]))


@given(
    st.lists(
        st.tuples(st.sampled_from([PIPELINE, LAGGED]), st.integers(1, 3000)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_threads_share_out_programs_evenly(asked, parts: int):
    """Neighbouring programs in each part, none left out, and no part with more than its share and
    one program."""
    programs, lanes = (
        [compile_structure(structure) for structure, _ in asked],
        [n for _, n in asked],
    )
    work = [compiled.n_ops * -(-n // LANES) for compiled, n in zip(programs, lanes, strict=True)]
    bounds = _divided(programs, lanes, parts)
    assert [place for begin, end in bounds for place in range(begin, end)] == list(
        range(len(programs))
    )
    if sum(work) >= LEAST_DIVIDED and len(programs) >= parts:
        assert max(sum(work[begin:end]) for begin, end in bounds) <= sum(work) / parts + max(work)
    else:
        assert len(bounds) == 1


@pytest.mark.parametrize("lanes", [1, LANES, LANES + 1])
def test_a_batch_is_divided_from_its_least_work_on(
    lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is ops times rows of lanes."""
    programs = [compile_structure(PIPELINE)] * 3
    work = 3 * programs[0].n_ops * -(-lanes // LANES)
    monkeypatch.setattr("perfmodel.timeline._many.LEAST_DIVIDED", work)
    assert _divided(programs, [lanes] * 3, 3) == [(0, 1), (1, 2), (2, 3)]
    assert _divided(programs, [lanes] * 3, 4) == _divided(programs, [lanes] * 3, 1) == [(0, 3)]
    monkeypatch.setattr("perfmodel.timeline._many.LEAST_DIVIDED", work + 1)
    assert _divided(programs, [lanes] * 3, 3) == [(0, 3)]


@pytest.mark.parametrize(("cores", "parts"), [(7, 7), (None, 1)])
def test_a_batch_is_divided_among_all_cores(
    cores: int | None, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system does not say how many there are, JAX's devices count alone."""
    parts_of_call = []

    def undivided(programs: Sequence[Any], lanes: Sequence[int], parts: int) -> Any:
        parts_of_call.append(parts)
        return [(0, len(programs))]

    monkeypatch.setattr("perfmodel.timeline._many.os.cpu_count", lambda: cores)
    monkeypatch.setattr("perfmodel.timeline._many.n_cpu_devices", lambda: 1)
    monkeypatch.setattr("perfmodel.timeline._many._divided", undivided)
    makespan_many([compile_structure(PIPELINE)], [lanes_of(PIPELINE, 1)])
    assert parts_of_call == [parts]


def test_derivatives_of_many():
    programs = [compile_structure(PIPELINE), compile_structure(LAGGED)]
    durations = [lanes_of(PIPELINE, 20), lanes_of(LAGGED, 3)]

    def total(values):
        return sum((i + 1.0) * s.sum() for i, s in enumerate(makespan_many(programs, values)))

    gradients = jax.grad(total)([jnp.asarray(d) for d in durations])
    for i, (compiled, of_program) in enumerate(zip(programs, durations, strict=True)):
        np.testing.assert_allclose(
            gradients[i], (i + 1) * one_by_one(compiled, of_program)[1], rtol=1e-6
        )
    arrays = [jnp.asarray(d) for d in durations]
    values, tangents = jax.jvp(lambda values: makespan_many(programs, values), (arrays,), (arrays,))
    for of_program, value, tangent, compiled in zip(
        durations, values, tangents, programs, strict=True
    ):
        spans, _ = one_by_one(compiled, of_program)
        np.testing.assert_allclose(value, spans, rtol=1e-6)
        np.testing.assert_allclose(tangent, spans, rtol=1e-5)


@pytest.mark.parametrize("traced", [0, 1])
def test_durations_of_one_program_are_differentiated_beside_fixed_ones(traced: int):
    programs = [compile_structure(PIPELINE), compile_structure(LAGGED)]
    durations = [lanes_of(PIPELINE, 20), lanes_of(LAGGED, 3)]

    def total(value):
        values = [value if place == traced else fixed for place, fixed in enumerate(durations)]
        return sum(spans.sum() for spans in makespan_many(programs, values))

    gradient = jax.grad(total)(jnp.asarray(durations[traced]))
    np.testing.assert_allclose(
        gradient, one_by_one(programs[traced], durations[traced])[1], rtol=1e-6
    )


def test_many_of_none():
    assert makespan_many([], []) == []


def test_a_search_needs_few_traces():
    programs = [
        compile_structure(
            build(ProgramSpec(schedule=schedule, stages=p, micro_batches=m, chunks=v))
        )
        for schedule, v in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 4))
        for p in (2, 4, 8)
        for m in (8, 16, 32)
    ]
    with count_traces() as traces:
        for n in range(1, len(programs), 3):
            makespan_many(programs[:n], [lanes_of(c.structure, 1 + n % 9) for c in programs[:n]])
        for compiled in programs[:9]:
            makespan_and_grad(compiled, distinct_durations(compiled.structure))
    assert traces.total <= 16


@pytest.mark.usefixtures("compiled_anew")
def test_working_memory_does_not_grow_with_lanes():
    compiled = compile_structure(PIPELINE)

    def temporary_bytes(lanes):
        shape = jax.ShapeDtypeStruct((lanes, TILE), jnp.float32)
        lowered = _many.lower(
            shape, np.int32(lanes // TILE), compiled.op_tables, compiled.bundle_tables
        )
        analysis = lowered.compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary_bytes(1024 * TILE) == temporary_bytes(4 * TILE)


@pytest.mark.usefixtures("compiled_anew")
def test_no_step_of_the_loop_over_bundles_is_split_among_threads():
    """XLA splits what it takes for heavy work; see `tile_of_lanes`."""
    compiled = compile_structure(build(ProgramSpec(stages=32, micro_batches=64, sends="op")))
    shape = jax.ShapeDtypeStruct((TILE, 512), jnp.float32)
    lowered = _many.lower(shape, np.int32(1), compiled.op_tables, compiled.bundle_tables)
    steps = [
        line
        for line in (lowered.compile().as_text() or "").splitlines()
        if "while/body/while/body" in line
    ]
    assert steps
    assert not any('"outer_dimension_partitions":["' in line for line in steps)


def test_bad_lanes():
    compiled = compile_structure(PIPELINE)
    with pytest.raises(PerfModelError, match=r"shape must be \(lanes, 4\)"):
        makespan_lanes(compiled, np.ones(4))
    with pytest.raises(PerfModelError, match="got 1 for 2 programs"):
        makespan_many([compiled, compiled], [np.ones((1, 4))])


@pytest.mark.parametrize(
    "call", [lambda c, d: makespan_lanes(c, d), lambda c, d: makespan_many([c], [d])[0]]
)
def test_numpy_durations_inside_a_traced_function(call):
    """What is compiled with options of its own alone is compiled without them inside another
    function."""
    compiled, lanes = compile_structure(PIPELINE), lanes_of(PIPELINE, 3)
    jax.clear_caches()
    inside = jax.jit(lambda x: x * call(compiled, lanes))(1.0)
    np.testing.assert_array_equal(inside, call(compiled, lanes))
