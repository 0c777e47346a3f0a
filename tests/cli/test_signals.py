"""Commands that start processes leave none behind, by whatever signal they end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from uuid import uuid4

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends children")

MARK = "PERFMODEL_TEST_MARK"
"""Environment variable that all descendants of a command inherit."""
SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL]
WAIT_S = 60.0
# a rank with a worker of its own, as data loaders are
RANK = """
import os, subprocess, sys, time
worker = subprocess.Popen(["sleep", "300"])
open(os.path.join(sys.argv[1], f"up{os.environ.get('RANK', 0)}"), "w").close()
time.sleep(300)
"""
SHELL = 'sleep 300 &\npython="$1"\n"$python" "$2" "$3"\n'
PLAN = """
device = "A100-SXM4-80GB"
any_device = true
[nccl_tests]
launcher = "{python} {rank} {folder}"
[[collectives]]
num_ranks = 4
collective = "all_reduce"
bytes = [1024]
dtype = "bf16"
"""
RANKS_OF_JAX = """
device = "A100-SXM4-80GB"
any_device = true
[rule]
half_width = 0.5
max_s = 0.02
[[collectives]]
num_ranks = 2
collective = "all_reduce"
bytes = [1024]
dtype = "fp32"
"""


def all_pairs(kinds: Sequence[str], always: Sequence[tuple[str, signal.Signals]]) -> list:
    """Every kind of ranks with every signal. Each pair starts a command anew, so that `make test`
    takes a few.

    A handler ends the children after every signal that can be handled, and the kernel does after
    SIGKILL: with one of each, whatever the kind, both ways are gone.
    """
    pairs = []
    for kind, number in product(kinds, SIGNALS):
        marks = () if (kind, number) in always else (pytest.mark.slow,)
        pairs.append(pytest.param(kind, number, marks=marks, id=f"{kind}-{number.name}"))
    return pairs


def marked(mark: str) -> set[int]:
    """Processes that run and have the mark in their environment."""
    running = set()
    for folder in Path("/proc").iterdir():
        try:
            if not folder.name.isdigit() or mark.encode() not in (folder / "environ").read_bytes():
                continue
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            running.add(int(folder.name))
    return running


@contextmanager
def command(arguments: list[str]) -> Iterator[tuple[subprocess.Popen, str]]:
    mark = f"mark-{uuid4()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "perfmodel.cli", *arguments],
        env=os.environ | {MARK: mark, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, mark
    finally:
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)
        process.wait(WAIT_S)
        if process.stderr is not None:
            process.stderr.close()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "not in time"
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.02)


def require_none_left(process: subprocess.Popen, mark: str, number: signal.Signals) -> None:
    os.kill(process.pid, number)
    process.wait(WAIT_S)
    end_s = time.monotonic() + WAIT_S
    while (left := marked(mark)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not left


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    (tmp_path / "rank.sh").write_text(SHELL)
    return script


@pytest.mark.parametrize(
    ("kind", "number"),
    all_pairs(["python", "shell"], [("python", signal.SIGKILL), ("shell", signal.SIGHUP)]),
)
def test_ranks_of_an_emulation_end_with_it(kind: str, number: signal.Signals, rank: Path) -> None:
    folder = rank.parent
    script = [sys.executable, str(rank), str(folder)]
    if kind == "shell":
        script = ["bash", str(folder / "rank.sh"), *script]
    emulate = [
        "emulate",
        "--world-size",
        "4",
        "--cluster",
        "dgx-a100",
        "--real-ranks",
        "0,1",
        "--",
        *script,
    ]
    with command(emulate) as (process, mark):
        wait_until(lambda: (folder / "up0").exists() and (folder / "up1").exists(), process)
        assert len(marked(mark)) >= 5
        require_none_left(process, mark, number)


@pytest.mark.parametrize(
    ("kind", "number"), all_pairs(["nccl-tests"], [("nccl-tests", signal.SIGINT)])
)
def test_a_launcher_of_nccl_tests_ends_with_the_calibration(
    kind: str, number: signal.Signals, rank: Path
) -> None:
    folder = rank.parent
    plan = folder / "plan.toml"
    plan.write_text(PLAN.format(python=sys.executable, rank=rank, folder=folder))
    calibrate = ["calibrate", "--backend", kind, "--plan", str(plan), "--out", str(folder / "out")]
    with command(calibrate) as (process, mark):
        wait_until((folder / "up0").exists, process)
        assert len(marked(mark)) >= 3
        require_none_left(process, mark, number)


@pytest.mark.parametrize(
    ("kind", "number"), all_pairs(["jax"], [("jax", signal.SIGTERM), ("jax", signal.SIGKILL)])
)
def test_ranks_of_a_calibration_end_with_it(
    kind: str, number: signal.Signals, tmp_path: Path
) -> None:
    """At the moment when they are started, before they are ready for anything."""
    plan = tmp_path / "plan.toml"
    plan.write_text(RANKS_OF_JAX)
    with command(
        ["calibrate", "--backend", kind, "--plan", str(plan), "--out", str(tmp_path / "out")]
    ) as (
        process,
        mark,
    ):
        wait_until(lambda: len(marked(mark)) >= 3, process)
        require_none_left(process, mark, number)
