"""Measures time and CPU time of torch's gloo collectives on this machine, for price tables.

A rank of such a measurement is `python -m perfmodel.emulate._measure OUT KINDS SIZES CALLS`. As in
training, every call follows some computation, so that caches are cold, ranks not quite together and
the library's threads asleep. Calls in a tight loop take less of the core, and do not show its
stalls.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from perfmodel.emulate._clock import Core
from perfmodel.emulate._launch import Emulation, emulate
from perfmodel.emulate._prices import COLUMNS, Prices
from perfmodel.emulate.wire import Network
from perfmodel.measure import usable_cores
from perfmodel.measure.ranks import Host

if TYPE_CHECKING:
    import pandas as pd

MEASURED: Final = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
)
SIZES: Final = (64, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
_WARM_UP: Final = 3
_COMPUTE_S: Final = 0.015
_SKEW_S: Final = 0.002
_JITTER_ROUNDS: Final = 20
_JITTER_WORK: Final = 10
_PRODUCTS: Final = 12
_KEPT: Final = 0.95
"""Share of the calls that count, the shortest ones, because longer ones were disturbed by the
machine."""


def measure_prices(
    world_size: int,
    kinds: Sequence[str] = MEASURED,
    sizes: Sequence[int] = SIZES,
    *,
    calls: int = 30,
    hosts: Sequence[Host] = (),
    prices: Prices | None = None,
    wire: Network | None = None,
) -> "pd.DataFrame":
    """Measure collectives between local processes, each on its own core if possible.

    Args:
        world_size: number of ranks.
        kinds: kinds of collectives to measure.
        sizes: sizes in bytes, as in `perfmodel.ops.Collective`.
        calls: number of calls of each kind and size; every call follows some computation.
        hosts: one host per rank; by default all share this one.
        prices: prices of an emulated cluster; then rank 0 alone is real, and the emulation itself
            is measured.
        wire: network to emulated ranks that exchange real messages; then, too, rank 0 alone is
            real.

    Returns:
        A row per kind and size: `collective`, `ranks`, `bytes`; means over calls of `time_s` and
        `core_s` (processor time of rank 0's process); `jitter` (standard deviation of the log of a
        rank's time for the same work); and `copies_per_s` (speed of the core, `_clock.Core`: all
        processor times are converted to its median).
    """
    import pandas as pd

    # Real ranks measure the library; one real rank with prices or a wire measures the emulation
    # itself, for comparison.
    on_this_machine = prices is not None or wire is not None
    with tempfile.TemporaryDirectory(prefix="perfmodel-") as folder:
        out = Path(folder) / "rows.json"
        emulate(
            Emulation(
                command=(
                    sys.executable,
                    "-m",
                    f"{__package__}._measure",
                    str(out),
                    ",".join(kinds),
                    ",".join(map(str, sizes)),
                    str(calls),
                ),
                world_size=world_size,
                real_ranks=(0,) if on_this_machine else tuple(range(world_size)),
                prices=prices,
                wire=wire,
                cores=usable_cores(),
                hosts=tuple(hosts),
            )
        )
        table = pd.DataFrame(
            json.loads(out.read_text()), columns=[*COLUMNS, "core_s", "jitter", "copies_per_s"]
        )
    return table if on_this_machine else at_one_speed(table)


def at_one_speed(table: "pd.DataFrame") -> "pd.DataFrame":
    """Normalise CPU times to the median core speed, because a shared machine's speed drifts.

    Args:
        table: time_s, core_s, and copies_per_s when each row was measured.

    Returns:
        The same with one copies_per_s; what a call waits is left alone.
    """
    # A core that ran faster at a row's time needed less processor time than one of median speed
    # would have.
    median_copies_per_s = float(table.copies_per_s.median())
    faster = table.copies_per_s / median_copies_per_s
    works_s = table[["core_s", "time_s"]].min(axis=1)
    return table.assign(
        time_s=table.time_s + works_s * (faster - 1),
        core_s=table.core_s * faster,
        copies_per_s=median_copies_per_s,
    )


def main(out: str, kinds: str, sizes: str, calls: str) -> None:
    """Mean seconds and processor seconds of a call, by kind and size; rank 0 writes them."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]

    # A rank has one core.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, rates = [], []
    random = Random(dist.get_rank())
    core = Core(torch)
    for kind in kinds.split(","):
        for nbytes in map(int, sizes.split(",")):
            call = _call(dist, torch, kind, nbytes)
            timed = _timed(dist, torch, call, int(calls), random, core)
            rows.append([kind, dist.get_world_size(), nbytes, timed.time_s, timed.core_s])
            rates.append(timed.copies_per_s)
    jitter = _jitter(dist, torch)
    if dist.get_rank() == 0:
        Path(out).write_text(
            json.dumps([[*row, jitter, rate] for row, rate in zip(rows, rates, strict=True)])
        )
    dist.barrier()
    dist.destroy_process_group()


def _call(dist: Any, torch: Any, kind: str, nbytes: int) -> Callable[[], Any]:
    """The torch call of a collective on buffers of this size."""
    # Maxima instead of sums, so that numbers stay ones however often the buffers are reduced.
    n = dist.get_world_size()
    rank = dist.get_rank()
    full = torch.ones(max(n, nbytes // 4 // n * n))
    share = full[: len(full) // n].clone()
    received = torch.empty_like(full)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def shift() -> None:
        # Everybody sends to the next, so that all links are used at once as by a pipeline.
        requests = [dist.isend(full, (rank + 1) % n), dist.irecv(received, (rank - 1) % n)]
        for request in requests:
            request.wait()

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(full, dist.ReduceOp.MAX),
        "all_gather": lambda: gather(received, share),
        "reduce_scatter": lambda: scatter(share, full, dist.ReduceOp.MAX),
        "all_to_all": lambda: dist.all_to_all_single(received, full),
        "broadcast": lambda: dist.broadcast(full, 0),
        "send_recv": shift,
    }
    return calls[kind]


class _CallTimes(NamedTuple):
    """Times of a collective on this rank."""

    time_s: float
    """Mean seconds of a call, counted from the last rank's arrival."""
    core_s: float
    """Mean processor time of the calls in which this rank was the last."""
    copies_per_s: float
    """Median speed of the core."""


def _timed(
    dist: Any, torch: Any, call: Callable[[], Any], calls: int, random: Random, core: Core
) -> _CallTimes:
    """Time a collective again and again between computations, as in training."""
    matrix = torch.ones(256, 256)
    memory = torch.ones(1 << 22)
    times_s, cores_s, rates = [], [], []
    for number in range(calls + _WARM_UP):
        # Compute on memory and caches for a while, each rank a little longer or shorter, as in
        # training.
        until_s = time.perf_counter() + _COMPUTE_S + random.uniform(0.0, _SKEW_S)
        memory.add_(1.0)
        while time.perf_counter() < until_s:
            torch.mm(matrix, matrix)
        start_s = time.perf_counter()
        own_s = time.process_time()
        call()
        end_s = time.perf_counter()
        core_s = time.process_time() - own_s
        # Waiting for late ranks is not the collective's time, so it counts from the last rank's
        # start; ranks share a clock.
        own_start = torch.tensor([start_s], dtype=torch.double)
        starts = [torch.zeros_like(own_start) for _ in range(dist.get_world_size())]
        dist.all_gather(starts, own_start)
        last_s = max(map(float, starts))
        if number >= _WARM_UP:
            # A sender may be done before the last rank has come.
            times_s.append(max(0.0, end_s - last_s))
            # Only the last rank waits for nobody, so only its processor time is the call's own.
            if last_s == start_s:
                cores_s.append(core_s)
            rates.append(core.copies_per_s())
    return _CallTimes(_mean(times_s), _mean(cores_s or [0.0]), median(rates))


def _jitter(dist: Any, torch: Any) -> float:
    """Standard deviation of the log of a rank's time for the same work between rounds, relative to
    the other ranks.

    It leaves out constant slowness of one rank and slowness of all ranks at once. The median of the
    deviations is not moved by a few rounds that the machine disturbed.
    """
    matrix = torch.ones(256, 256)
    memory = torch.ones(1 << 22)
    rounds = []
    for _ in range(_JITTER_ROUNDS):
        start_s = time.perf_counter()
        for _ in range(_JITTER_WORK):
            memory.add_(1.0)
            for _ in range(_PRODUCTS):
                torch.mm(matrix, matrix)
        own_log = torch.tensor([time.perf_counter() - start_s], dtype=torch.double).log()
        logs = [torch.zeros_like(own_log) for _ in range(dist.get_world_size())]
        dist.all_gather(logs, own_log)
        rounds.append(torch.cat(logs))
    return spread(torch.stack(rounds).tolist())


def spread(rounds: Sequence[Sequence[float]]) -> float:
    """Standard deviation after the mean of each row and the median of each column are subtracted.

    Of n values less their mean the variance is (n - 1) / n of theirs; 0.6745: median deviation of a
    normal variable.
    """
    # Subtracting the mean of rows removes slowness of all ranks at once; subtracting the median of
    # columns removes constant slowness of one rank.
    ranks = len(rounds[0])
    centred = []
    for row in rounds:
        mean = sum(row) / ranks
        centred.append([value - mean for value in row])
    medians = [median(column) for column in zip(*centred, strict=True)]
    deviations = []
    for row in centred:
        deviations += [abs(value - median_s) for value, median_s in zip(row, medians, strict=True)]
    return median(deviations) / 0.6745 * (ranks / (ranks - 1)) ** 0.5


def _mean(values: list[float]) -> float:
    # A mean of most: the median would hide the stalls that calls really have.
    shortest = sorted(values)[: max(1, int(_KEPT * len(values)))]
    return sum(shortest) / len(shortest)


if __name__ == "__main__":
    main(*sys.argv[1:])
