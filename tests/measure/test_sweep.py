"""Sweeps that are interrupted, resumed and disturbed; nothing here takes real time."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import CalibrationError
from perfmodel.measure.tables import PartialFile, Point, Record, Row, point_key, sweep
from perfmodel.ops import OptimizerStep

HEADER = {"device": "cpu", "collector": "c0"}


def point(size: int) -> Point:
    return Point(OptimizerStep(n_params=size))


class Bench:
    """Measures numbers; is interrupted after `budget` of them; some ops are disturbed at first."""

    def __init__(self, budget: int = 10**9, disturbed: dict[int, int] | None = None) -> None:
        self.measured: list[int] = []
        self._budget, self._disturbed = budget, dict(disturbed or {})

    def __call__(self, points: Sequence[Point]) -> Iterator[Row]:
        for op in (p.op.n_params for p in points):
            if len(self.measured) == self._budget:
                raise KeyboardInterrupt
            self.measured.append(op)
            left = self._disturbed.get(op, 0)
            self._disturbed[op] = left - 1
            yield {
                "n_params": op,
                "time_us": 10.0 * op + 1,
                "interference": 0.1 * left if left > 0 else 0.01,
            }


def run(path: Path, ops: Sequence[int], bench: Bench, attempts: int = 3) -> list[Row]:
    points = list(map(point, ops))
    return sweep(
        points, bench, PartialFile(path, HEADER), interference_limit=0.06, attempts=attempts
    )


def test_rows_come_in_order_and_once_per_distinct_op(tmp_path: Path):
    bench = Bench()
    rows = run(tmp_path / "p", [3, 1, 2, 1], bench)
    assert [row["n_params"] for row in rows] == [3, 1, 2]
    assert bench.measured == [3, 1, 2]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_an_interrupted_sweep_goes_on_with_the_next_row(budgets: list[int], data: st.DataObject):
    ops = list(range(1, 9))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p"
        done: list[int] = []
        for budget in budgets:
            bench = Bench(budget)
            with suppress(KeyboardInterrupt):
                run(path, ops, bench)
            done += bench.measured
            # a crash may tear the line being written, anywhere in it
            cut = data.draw(st.integers(0, 20))
            with path.open("ab") as file:
                file.write(b'{"key": "{\\"size\\": 5}", "row": {'[:cut])
        bench = Bench()
        rows = run(path, ops, bench)
        assert sorted(done + bench.measured) == ops  # nothing lost, nothing measured twice
        assert [row["time_us"] for row in rows] == [10.0 * op + 1 for op in ops]


def test_disturbed_rows_are_measured_again_and_the_least_disturbed_kept(tmp_path: Path):
    bench = Bench(disturbed={1: 1, 2: 5})
    rows = run(tmp_path / "p", [1, 2, 3], bench)
    assert bench.measured == [1, 2, 3, 1, 2, 2]
    assert [row["interference"] for row in rows] == pytest.approx([0.01, 0.3, 0.01])


def test_attempts_before_an_interruption_count(tmp_path: Path):
    bench = Bench(budget=4, disturbed={1: 9, 2: 9})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "p", [1, 2], bench)
    again = Bench(disturbed={1: 9, 2: 9})
    run(tmp_path / "p", [1, 2], again)
    assert bench.measured + again.measured == [1, 2, 1, 2, 1, 2]


def test_earlier_rows_stand_for_their_ops(tmp_path: Path):
    bench = Bench()
    earlier = [
        Record(
            point_key(point(size)),
            {"n_params": size, "time_us": 5.0, "interference": taken},
            earlier=True,
        )
        for size, taken in ((2, 0.0), (3, 0.9), (7, 0.0))
    ]
    partial = PartialFile(tmp_path / "p", HEADER)
    points = list(map(point, [1, 2, 3]))
    rows = sweep(
        points, bench, partial, interference_limit=0.06, attempts=1, earlier=lambda: earlier
    )
    # a disturbed one is measured again however few attempts there are, one not asked for stays
    assert bench.measured == [1, 3]
    assert [row["time_us"] for row in rows] == [11.0, 5.0, 31.0, 5.0]
    # kept with the new ones: the table may be rewritten at any moment
    assert partial.open()[:3] == earlier


def test_earlier_rows_are_not_asked_for_where_an_interrupted_run_is_found(tmp_path: Path):
    bench = Bench(budget=1)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "p", [1, 2], bench)

    def never() -> list[Record]:
        raise AssertionError

    rest = Bench()
    partial = PartialFile(tmp_path / "p", HEADER)
    sweep(list(map(point, [1, 2])), rest, partial, interference_limit=0.06, earlier=never)
    assert rest.measured == [2]


def test_rows_of_another_collector_or_device_are_not_mixed_in(tmp_path: Path):
    path = tmp_path / "p"
    PartialFile(path, HEADER).open()
    with pytest.raises(CalibrationError, match="another collector"):
        PartialFile(path, {**HEADER, "collector": "c1"}).open()


def test_a_file_that_is_no_partial_table_is_left_alone(tmp_path: Path):
    path = tmp_path / "p"
    path.write_text("hello\nworld\n")
    with pytest.raises(CalibrationError, match="not a partial table"):
        PartialFile(path, HEADER).open()
    assert path.read_text() == "hello\nworld\n"


def test_records_survive_and_the_file_goes_when_done(tmp_path: Path):
    partial = PartialFile(tmp_path / "p", HEADER)
    assert partial.open() == []
    record = Record("k", {"time_us": 1.5, "variant": "µ"})
    partial.append(record)
    assert partial.open() == [record]
    partial.remove()
    assert not (tmp_path / "p").exists()
