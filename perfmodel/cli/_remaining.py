"""What is left of a calibration, on stderr: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfmodel.measure import Point, RemainingTime

Remaining = Callable[["Point"], None]

LINE_EVERY_S = 30.0


@contextmanager
def remaining(left: "RemainingTime", rows: int) -> Iterator[Remaining]:
    """To be called with each point before it is measured.

    Args:
        rows: of the plan, those measured earlier too.
    """
    if not sys.stderr.isatty():
        yield _lines(left, rows)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    left_column = TextColumn("{task.fields[left]:.1f} device-minutes left")
    with Progress(*columns, left_column, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("calibrate", total=rows, completed=rows - left.rows_left, left=left.device_s() / 60)

        def begin(point: "Point") -> None:
            done = rows - left.rows_left
            left.start(point)
            bar.update(task, description=point.op.family, completed=done, left=left.device_s() / 60)

        yield begin


def _lines(left: "RemainingTime", rows: int) -> Remaining:
    last_s = time.monotonic() - LINE_EVERY_S

    def begin(point: "Point") -> None:
        nonlocal last_s
        done = rows - left.rows_left
        left.start(point)
        if time.monotonic() - last_s >= LINE_EVERY_S:
            last_s = time.monotonic()
            print(
                f"{done} of {rows} rows, {left.device_s() / 60:.1f} device-minutes left, now {point.op.family}",
                file=sys.stderr,
            )

    return begin
