"""Records a real rank's collectives, iterations, CPU time and memory."""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from perfmodel.emulate.environment import Orders

_STATUS: Final = Path("/proc/self/status")
_CLEAR_REFS: Final = Path("/proc/self/clear_refs")
_LOOK_BACK: Final = 64
MARK_COLUMNS: Final = ("name", "wall_s", "thread_s", "process_s")


@dataclass(slots=True)
class CollectiveNote:
    """One collective; times are on the host's monotonic clock, 0 if not recorded."""

    group: str
    lane: str
    """Peers and tag of a message, empty for the group's collectives; calls of one lane run one
    after another."""
    ranks: int
    sequence: int
    kind: str
    bytes: int
    iteration: int
    issued_s: float
    thread_s: float = 0.0
    """Processor time of the calling thread so far, for the script's own work."""
    start_s: float = 0.0
    end_s: float = 0.0
    delay_s: float = 0.0
    core_s: float = 0.0
    wait_start_s: float = 0.0
    wait_end_s: float = 0.0


COLLECTIVE_COLUMNS: Final = tuple(f.name for f in fields(CollectiveNote))


def record_of(folder: Path, rank: int) -> Path:
    """Path of a rank's record, written when its script ends."""
    return folder / f"rank{rank}.json"


class Record:
    """Record of one process, written when it ends."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.collectives: list[CollectiveNote] = []
        self.marks: list[tuple[str, float, float, float]] = []
        self.iteration = 0
        self.overhead_s = 0.0
        self._served_s: dict[int, float] = {}

        _reset_peak()
        self._resident_at_start, self._code_at_start = _peak_bytes(), _code_bytes()
        self._progress = Path(orders.out) / f"rank{orders.rank}.progress"
        # Progress goes to a file of fixed length by one `pwrite`: no lock, no thread, no blocking
        # call in the script.
        self._handle = os.open(self._progress, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._optimizer: Any = None
        self._parameters: list[list[int]] = []
        self.on_optimizer: Callable[[float], None] = lambda _: None
        """Called with the time at which the last collective before the optimizer ended, when all
        collectives of the backward pass are done."""
        self.mark("start")

    def mark(self, name: str) -> None:
        """Record a moment of the script's thread."""
        self.marks.append((name, time.perf_counter(), self.thread_s(), time.process_time()))

    def thread_s(self) -> float:
        """Processor time of the calling thread, without its time on emulated collectives."""
        return time.thread_time() - self._served_s.get(threading.get_ident(), 0.0)

    def served(self, core_s: float) -> None:
        """Record processor time that the caller spent in place of the collective library."""
        thread = threading.get_ident()
        self._served_s[thread] = self._served_s.get(thread, 0.0) + core_s

    def tell(self, text: str) -> None:
        """Publish the rank's progress for the watchdog."""
        os.pwrite(self._handle, text.encode().ljust(200)[:200], 0)

    def watch_training(self, torch: Any) -> None:
        """Mark each backward pass, and each step of the first optimizer, which ends iterations."""
        # Hooks of torch see every script's training loop: backward, and the step of the optimizer.
        backward: Callable[..., Any] = torch.autograd.backward

        def marked(*arguments: Any, **named: Any) -> Any:
            self.mark("backward")
            try:
                return backward(*arguments, **named)
            finally:
                self.mark("backward_end")

        torch.autograd.backward = marked
        from torch.optim import optimizer as optim  # pyright: ignore

        def before(optimizer: Any, arguments: Any, named: Any) -> None:
            # Scripts with several optimizers (of a GAN) are cut into iterations by the first.
            if self._optimizer is None:
                self._optimizer = optimizer
                for group in optimizer.param_groups:
                    self._parameters += [[*parameter.shape] for parameter in group["params"]]
            if optimizer is self._optimizer:
                self.mark("optimizer")
                self.on_optimizer(
                    max((n.end_s for n in self.collectives[-_LOOK_BACK:]), default=0.0)
                )

        def after(optimizer: Any, arguments: Any, named: Any) -> None:
            if optimizer is self._optimizer:
                self.mark("iteration_end")
                self.iteration += 1
                self.tell(f"finished iteration {self.iteration}")
                if self.iteration == self.orders.stop_after:
                    raise SystemExit(0)

        optim.register_optimizer_step_pre_hook(before)
        optim.register_optimizer_step_post_hook(after)

    def write(self) -> None:
        """Write the record as JSON."""
        self.mark("end")
        collectives = {}
        for name in COLLECTIVE_COLUMNS:
            collectives[name] = [getattr(noted, name) for noted in self.collectives]
        marks = {}
        for i, name in enumerate(MARK_COLUMNS):
            marks[name] = [mark[i] for mark in self.marks]
        data = {
            "rank": self.orders.rank,
            "world_size": self.orders.world_size,
            "collectives": collectives,
            "marks": marks,
            "peak_bytes": _peak_bytes(),
            "start_bytes": self._resident_at_start,
            "overhead_s": self.overhead_s,
            "parameters": self._parameters,
            "code_bytes": max(0, _code_bytes() - self._code_at_start),
        }
        # Renamed when it is complete: the watchdog takes a record that exists for a script that has
        # ended well.
        path = record_of(Path(self.orders.out), self.orders.rank)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(data))
        partial.replace(path)


def _peak_bytes() -> int:
    """Largest resident memory of this process since it was last reset, else so far."""
    high_water_bytes = _status_bytes("VmHWM:")
    if high_water_bytes is not None:
        return high_water_bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def _code_bytes() -> int:
    """Resident pages of files, that is, code of libraries, which is loaded when it is first run."""
    return _status_bytes("RssFile:") or 0


def _status_bytes(name: str) -> int | None:
    """A line of this process's status; None if the system has none."""
    with suppress(OSError, ValueError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


def _reset_peak() -> None:
    """Reset the peak, because memory for imports is not part of training (proc(5): clear_refs)."""
    with suppress(OSError):
        _CLEAR_REFS.write_text("5")
