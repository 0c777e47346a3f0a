"""Progress bars on a terminal or in a notebook; silent elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from perfmodel.display._html import escaped

Report = Callable[[str, int, int], None]
"""Function called with the name of a stage, the number done and the total."""
_BEGINS_AFTER_S: Final = 1.0
_EVERY_S: Final = 0.1

P = ParamSpec("P")
R = TypeVar("R")


def shows_progress(title: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate functions with a keyword `progress: Report | None`: by default they show a progress
    bar on a terminal or in a notebook."""

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            # A caller that passes its own report function gets no second bar.
            if kwargs.get("progress") is not None:
                return function(*args, **kwargs)
            with progress(title) as report:
                return function(*args, **{**kwargs, "progress": report})  # pyright: ignore[reportCallIssue]

        return called

    return wrap


@contextmanager
def progress(title: str, silent: bool = False) -> Iterator[Report]:
    """Context that gives a callable to draw a progress bar.

    Args:
        silent: draw none, as where a command prints JSON only.
    """
    if not silent and _in_notebook():
        with _notebook_bar(title) as report:
            yield report
    elif not silent and sys.stderr.isatty():
        with _terminal_bar(title) as report:
            yield report
    else:
        yield lambda *_: None


def _in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel, without importing anything."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def _terminal_bar(title: str) -> Iterator[Report]:
    """Show a bar on standard error while the work goes on."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {stage}", completed=done, total=total)

        yield report


@contextmanager
def _notebook_bar(title: str) -> Iterator[Report]:
    """Show a bar below a notebook's cell while the work goes on."""
    from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

    handle: Any = None
    began_s = last_s = time.monotonic()
    # The amount done, with the time and the amount at the start.
    stage = ("", began_s, 0)

    def report(what: str, done: int, total: int) -> None:
        nonlocal handle, last_s, stage
        now_s = time.monotonic()

        # Short tasks show nothing, and long ones are redrawn a few times a second.
        if now_s - began_s < _BEGINS_AFTER_S or now_s - last_s < _EVERY_S:
            return
        last_s = now_s
        if what != stage[0] or done < stage[2]:
            stage = (what, now_s, done)

        # Time left follows from the rate of the present stage alone, since stages differ in
        # speed.
        rate = (done - stage[2]) / (now_s - stage[1]) if now_s > stage[1] else 0.0
        remaining = f", about {(total - done) / rate:.0f} s left" if rate > 0 else ""
        shown = HTML(
            f'<progress value="{done}" max="{max(total, 1)}"></progress> '
            f"{escaped(title)}: {escaped(what)}, {done:,} of {total:,}, {now_s - began_s:.0f} s{remaining}"
        )
        if handle is None:
            handle = display(shown, display_id=True)
        else:
            handle.update(shown)

    yield report

    # The bar disappears when the work is done.
    if handle is not None:
        handle.update(HTML(""))
