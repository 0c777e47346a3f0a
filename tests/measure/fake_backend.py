"""A backend on a made-up clock: every op takes a time of its own, some are disturbed; each
measurement is logged."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perfmodel.errors import PerfModelError
from perfmodel.measure.tables import Point, Row, point_key
from perfmodel.measure.timing import NoMeter, Sample, SampleCalls
from perfmodel.ops import KernelOp

PLAN = """
device = "box"
attempts = 2
[rule]
max_s = 1.0
[[kernels]]
family = "optimizer"
n_params = [1, 2, 3, 5, 7, 8]
bytes_per_param = 28.0
cache = ["warm", "cold"]
"""
ROWS = 12


def call_s(op: KernelOp) -> float:
    """Seconds of a call of an optimizer step on this backend."""
    return 1e-3 * op.n_params  # pyright: ignore[reportAttributeAccessIssue]


class FakeBackend:
    """Steps of 5 parameters are disturbed the first time, those of 7 until the log has a `quiet`
    beside it."""

    accelerator = None
    software = "fake1.0-cpu"
    packages = ("numpy",)
    method: Row = {"calls": "none"}  # noqa: RUF012
    meter = NoMeter()

    def __init__(self, log: Path) -> None:
        self.log = log

    def check(self, op: KernelOp, *, cold: bool = False) -> None:
        if op.family != "optimizer":
            raise PerfModelError(f"the fake measures no {op.family}")

    def variant(self, op: KernelOp) -> str:
        return ""

    def sampler(self, op: KernelOp, *, cold: bool = False) -> SampleCalls:
        key = point_key(Point(op, cold))
        before = measured(self.log).count(key)
        with self.log.open("a") as file:
            file.write(json.dumps(key) + "\n")
        n = op.n_params  # pyright: ignore[reportAttributeAccessIssue]
        disturbed = (n == 5 and before < 1) or (n == 7 and not self.log.with_name("quiet").exists())
        return lambda calls: Sample(calls, calls * call_s(op), 0.5 if disturbed else 0.0)

    def overhead_sampler(self) -> SampleCalls:
        return lambda calls: Sample(calls, calls * 1e-6, 0.0)

    @contextmanager
    def opened(self, name: str = "jax") -> Iterator["FakeBackend"]:
        """In place of `open_backend`."""
        yield self


def measured(log: Path) -> list[str]:
    """Keys of all measurements begun so far, in order."""
    if not log.exists():
        return []
    return [
        json.loads(line)
        for line in log.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


def install(fake: FakeBackend) -> None:
    """Make it the backend of `perfmodel calibrate` in this process, and guess no times, which would
    import JAX."""
    import perfmodel.cli._calibrate
    import perfmodel.measure._run

    perfmodel.measure.open_backend = perfmodel.measure._run.open_backend = fake.opened
    perfmodel.cli._calibrate.guess_s = lambda device, points: [float("nan")] * len(points)
    os.environ["JAX_PLATFORMS"] = "cpu"
