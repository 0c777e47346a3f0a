"""Progress of long fits on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(quiet: bool) -> Iterator[Callable[[str, int, int, float], None] | None]:
    """A callback `(stage, step, steps, held-out error)` that moves one bar per stage; `None` if quiet."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[error]}"), TimeElapsedColumn(), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip
    tasks: dict[str, int] = {}
    with bar:

        def report(stage: str, now: int, steps: int, error: float) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=steps, error="")
            shown = f"held-out {100 * error:.2f} %" if error == error else ""
            bar.update(tasks[stage], completed=now, error=shown)  # type: ignore[arg-type]

        yield report
