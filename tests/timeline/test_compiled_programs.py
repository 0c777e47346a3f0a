"""Compiled programs, entry by entry: order, bundles, slots and padding against a slow and plain
compiler."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timeline_cases import distinct_durations, pipeline_1f1b, structure_of, structures

from perfmodel.program import ProgramSpec, Structure, build
from perfmodel.timeline import CompiledStructure, ProgramBatch, compile_structure
from perfmodel.timeline._lanes import _prepared
from perfmodel.timeline._many import _items, _rows, _rows_traced
from perfmodel.timeline._tables import BUNDLE, GROUP, bucket, join, n_cpu_devices

ZERO, NEVER, RESULT, SPARE = range(4)
"""Special slots: the start of the step, a time that never comes, the end of the step, and what
nobody reads."""
WIDE = structure_of(
    [(-1, -1)] * 40 + [(i, 39 - i) for i in range(40)] + [(40, 79)],
    [1 + i % 3 for i in range(80)] + [0],
    [(0, 0)] * 40 + [(i % 4, 0 if i % 3 else 2) for i in range(40)] + [(0, 3)],
    n_classes=4,
)
"""Levels of more than two bundles, with lags."""
LONE_LAGS = structure_of(
    [(-1, -1), (0, -1), (0, 1), (1, 2), (-1, 3)],
    [1, 2, 1, 2, 1],
    [(0, 0), (2, 0), (0, 2), (1, 0), (1, 2)],
)
"""An edge with a lag for every op at most, before either predecessor."""
FIXED = (
    pipeline_1f1b(4, 12),
    build(ProgramSpec(stages=4, micro_batches=8)),
    build(ProgramSpec(schedule="interleaved", stages=4, micro_batches=8, chunks=2, sends="op")),
    WIDE,
    LONE_LAGS,
)


def edges_of(structure: Structure) -> list[list[tuple[int, int]]]:
    """Predecessors of every op with the lags behind them, each once, as the program reads them."""
    edges = []
    for preds, lags in zip(structure.pred.tolist(), structure.lag.tolist(), strict=True):
        of_op = [(pred, lag) for pred, lag in zip(preds, lags, strict=True) if pred >= 0]
        edges.append(of_op[:1] if len(set(of_op)) == 1 else of_op)
    return edges


def plainly_compiled(structure: Structure) -> tuple[list[int], list[int], list[list[int]], int]:
    """Order, bundles, slots (both sources, destination) and their number by the rules, one op after
    the other."""
    n, edges = structure.n_ops, edges_of(structure)
    level: list[int] = []
    for op in range(n):
        level.append(1 + max((level[pred] for pred, _ in edges[op]), default=0))
    level[-1] = max(level) + 1

    # Inside a level those are first whose values are read last in the lowest level.
    read_last = [0] * n
    for op in range(n):
        for pred, _ in edges[op]:
            read_last[pred] = max(read_last[pred], level[op])
    order = sorted(range(n), key=lambda op: (level[op], read_last[op]))
    position = {op: place for place, op in enumerate(order)}

    bundle: list[int] = []
    rank: list[int] = []
    for place, op in enumerate(order):
        is_new_level = place == 0 or level[op] != level[order[place - 1]]
        starts_bundle = is_new_level or rank[-1] == BUNDLE - 1
        bundle.append((bundle[-1] if bundle else -1) + starts_bundle)
        rank.append(0 if starts_bundle else rank[-1] + 1)

    # A block is free for the first bundle that begins behind the group of positions with its last
    # reader.
    last_reader = list(range(n))
    for place, op in enumerate(order):
        for pred, _ in edges[op]:
            last_reader[position[pred]] = max(last_reader[position[pred]], place)
    first_place = {b: place for place, b in reversed(list(enumerate(bundle)))}
    freed: dict[int, list[int]] = {}
    free: list[int] = []
    block: list[int] = []
    blocks = 1
    for b in range(bundle[-1] + 1):
        free += freed.get(b, [])
        if free:
            block.append(free.pop())
        else:
            block.append(blocks)
            blocks += 1
        last = max(last_reader[place] for place in range(n) if bundle[place] == b)
        after = last - last % GROUP + GROUP
        reusable = next(
            (c for c in range(bundle[-1] + 1) if first_place[c] >= after), bundle[-1] + 1
        )
        freed.setdefault(reusable, []).append(block[b])

    slots = [BUNDLE * block[b] + r for b, r in zip(bundle, rank, strict=True)]
    rows: list[list[int]] = []
    for place, op in enumerate(order):
        sources = [slots[position[pred]] for pred, _ in edges[op]] or [ZERO]
        destination = RESULT if place == n - 1 else slots[place]
        rows.append([*[*sources, NEVER][:2], destination])
    return order, bundle, rows, max(slots) + 1


def compare(structure: Structure) -> None:
    compiled = compile_structure(structure)
    order, bundle, slots, n_slots = plainly_compiled(structure)
    assert compiled.order.tolist() == order
    assert compiled.bundle.tolist() == bundle
    assert compiled.n_bundles == bundle[-1] + 1
    assert compiled.n_slots == n_slots
    edges = edges_of(structure)
    has_lags = any(lag for of_op in edges for _, lag in of_op)
    assert compiled.program.shape == (structure.n_ops, 6 if has_lags else 4)
    position = {op: place for place, op in enumerate(order)}
    for place, op in enumerate(order):
        row = compiled.program[place].tolist()
        lags = ([lag for _, lag in edges[op]] + [0, 0])[:2] if has_lags else []
        assert row == [*slots[place], structure.duration[op], *lags]
        preds = ([position[pred] for pred, _ in edges[op]] + [-1, -1])[:2]
        assert compiled.pred[place].tolist() == preds


@settings(max_examples=60, deadline=None)
@given(structures(max_ops=60))
def test_any_structure_compiles_as_the_plain_compiler_does(structure: Structure) -> None:
    compare(structure)


@pytest.mark.parametrize("case", range(len(FIXED)))
def test_pipelines_compile_as_the_plain_compiler_does(case: int) -> None:
    compare(FIXED[case])


@given(st.integers(0, 5000), st.sampled_from((1, 64, 1024, 4096)))
def test_a_bucket_is_the_least_power_of_two_that_holds_both(n: int, smallest: int) -> None:
    size = bucket(n, smallest)
    assert size >= n
    assert size >= smallest
    assert size & (size - 1) == 0
    assert size == smallest or size < 2 * n


def test_small_programs_share_their_sizes() -> None:
    """Each size is a compilation more: up to these sizes there is one."""
    compiled = compile_structure(LONE_LAGS)
    tables, joined = compiled.op_tables, ProgramBatch((compiled,)).tables(0, 1, 0)
    assert (tables.width, tables.program.shape, tables.program.dtype) == (6, (4096 * 6,), np.uint32)
    assert (tables.pred.shape, tables.longest, tables.n_slots, int(tables.n_ops)) == (
        (4096 * 2,),
        4096,
        1024,
        5,
    )
    # No edge beside another one has a lag, so that one column holds them all.
    assert (joined.width, joined.program.shape, joined.program.dtype) == (
        5,
        ((1 << 17) * 5,),
        np.uint16,
    )
    assert (joined.pred.shape, joined.longest, joined.n_slots, int(joined.n_ops)) == (
        (0,),
        0,
        1024,
        5,
    )
    both = join([compiled, compiled])
    assert (both.width, both.program.shape, both.longest, int(both.n_ops)) == (
        6,
        ((1 << 17) * 6,),
        4096,
        5,
    )
    rows = compiled.bundle_tables
    assert (rows.rows.shape, rows.n_slots, rows.has_lags) == ((64, 5 * BUNDLE + 1), 256, True)
    assert not compile_structure(FIXED[0]).bundle_tables.has_lags
    items = _items([compiled, compiled], [1, 33])
    assert [len(column) for column in items[:3]] == [256] * 3
    durations = np.ones((33, 3))
    assert _rows([durations]).shape == _rows_traced([durations]).shape == (1 << 14, 16)
    assert [_prepared(compiled, np.ones((n, 3)), 16)[0].shape for n in (1, 16, 17, 33, 65)] == [
        (lanes, 1024) for lanes in (16, 16, 32, 64, 128)
    ]
    assert [int(_prepared(compiled, np.ones((n, 3)), 16)[1]) for n in (1, 16, 17, 33)] == [
        1,
        1,
        2,
        3,
    ]


def test_tables_of_several_programs_lie_end_to_end() -> None:
    programs = [compile_structure(structure) for structure in FIXED]
    tables = join(programs)
    rows = np.asarray(tables.program).reshape(-1, tables.width)
    preds = np.asarray(tables.pred).reshape(-1, 2)
    first = 0
    for compiled in programs:
        here = slice(first, first + compiled.n_ops)
        columns = compiled.program.shape[1]
        np.testing.assert_array_equal(rows[here, :columns], compiled.program)
        assert not rows[here, columns:].any()
        np.testing.assert_array_equal(preds[here], compiled.pred)
        first += compiled.n_ops
    # What is behind them changes nothing: it adds 0 to the start and writes to the slot that nobody
    # reads.
    assert (rows[first:] == [ZERO, NEVER, SPARE, 0, 0, 0]).all()
    assert (preds[first:] == -1).all()
    assert int(tables.n_ops) == max(compiled.n_ops for compiled in programs)
    assert tables.n_slots == bucket(max(compiled.n_slots for compiled in programs), 1024)


def ends_by_rows(rows: np.ndarray, durations: np.ndarray) -> np.ndarray:
    """End of every row of a program that is run one row after the other."""
    slots: dict[int, float] = {ZERO: 0.0, NEVER: -np.inf}
    ends = []
    for source_a, source_b, destination, duration, *lags in rows.tolist():
        lag_a, lag_b = [*lags, 0, 0][:2]
        start = max(slots[source_a] + durations[lag_a], slots[source_b] + durations[lag_b])
        slots[destination] = float(start + durations[duration])
        ends.append(slots[destination])
    return np.array(ends)


@pytest.mark.parametrize(
    "structure", FIXED, ids=["sends", "lags", "interleaved", "two lags", "lone lags"]
)
def test_a_lone_lag_stands_at_the_first_predecessor_of_a_batch(structure: Structure) -> None:
    compiled, durations = compile_structure(structure), distinct_durations(structure)
    tables = ProgramBatch((compiled,)).tables(0, 1, 0)
    rows = np.asarray(tables.program).reshape(-1, tables.width)[: compiled.n_ops]
    np.testing.assert_array_equal(
        ends_by_rows(rows, durations), ends_by_rows(compiled.program, durations)
    )
    has_two = compiled.program.shape[1] == 6 and (compiled.program[:, 4:] > 0).all(axis=1).any()
    assert tables.width == (6 if has_two else min(5, compiled.program.shape[1]))


@pytest.mark.parametrize(
    "structure", FIXED, ids=["sends", "lags", "interleaved", "two lags", "lone lags"]
)
def test_bundles_are_rows_of_columns(structure: Structure) -> None:
    compiled = compile_structure(structure)
    tables = compiled.bundle_tables
    assert int(tables.n_bundles) == compiled.n_bundles
    columns = [i for i in range(compiled.program.shape[1]) if i != 2]
    nothing = [[ZERO, NEVER, SPARE, 0, 0, 0][i] for i in columns]
    block_before = BUNDLE
    rows = np.asarray(tables.rows)
    for number, row in enumerate(rows):
        ops = compiled.program[compiled.bundle == number]
        assert row[-1] == (block_before if number < compiled.n_bundles else BUNDLE)
        entries = row[:-1].reshape(len(columns), BUNDLE).T
        np.testing.assert_array_equal(entries[: len(ops)], ops[:, columns])
        assert (entries[len(ops) :] == nothing).all()
        if len(ops):
            block_before = ops[0, 2] // BUNDLE * BUNDLE
    assert len(rows) == bucket(compiled.n_bundles, 64)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5))
def test_items_are_rows_of_16_lanes_of_each_program(lanes: list[int]) -> None:
    programs: list[CompiledStructure] = [
        compile_structure(FIXED[i % len(FIXED)]) for i in range(len(lanes))
    ]
    items = _items(programs, lanes)
    expected = []
    first_op = first_class = 0
    for compiled, n in zip(programs, lanes, strict=True):
        for _ in range(-(-n // 16)):
            expected.append((first_op, compiled.n_ops, first_class))
            first_class += compiled.structure.n_classes
        first_op += compiled.n_ops
    assert int(items.count) == len(expected)
    columns = zip(
        items.first_op.tolist(), items.n_ops.tolist(), items.first_class.tolist(), strict=True
    )
    padding = [(0, 0, first_class)] * (256 - len(expected))
    assert list(columns) == expected + padding


@pytest.mark.parametrize("devices", [0, 1, 3])
def test_work_is_shared_among_the_cpu_devices_of_jax(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`JAX_PLATFORMS` may leave out the CPU, which then counts as one all the same."""

    def local_devices(backend: str) -> list[str]:
        if not devices:
            raise RuntimeError(f"no {backend}")
        return [backend] * devices

    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert n_cpu_devices() == max(devices, 1)
