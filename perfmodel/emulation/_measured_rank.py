"""One rank of a measurement of collectives: `python -m perfmodel.emulation._measured_rank OUT KINDS SIZES CALLS`.

As in training, every call comes after some computing, when caches are cold, ranks not quite together and the
library's threads asleep: calls in a tight loop take less of the core, and do not show its stalls.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

_WARM_UP: Final = 3
_COMPUTE_S: Final = 0.015
_SKEW_S: Final = 0.002
_JITTER_ROUNDS: Final = 20
_JITTER_WORK: Final = 10
_PRODUCTS: Final = 12
_KEPT: Final = 0.95
"""Share of the calls that count, the shortest: others are the machine's doing."""


def main(out: str, kinds: str, sizes: str, calls: str) -> None:
    """Mean seconds and processor seconds of a call, by kind and size; rank 0 writes them."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    random = Random(dist.get_rank())
    for kind in kinds.split(","):
        for nbytes in map(int, sizes.split(",")):
            call = _call(dist, torch, kind, nbytes)
            rows.append([kind, dist.get_world_size(), nbytes, *_timed(dist, torch, call, int(calls), random)])
    jitter = _jitter(dist, torch)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps([[*row, jitter] for row in rows]))
    dist.barrier()
    dist.destroy_process_group()


def _call(dist: Any, torch: Any, kind: str, nbytes: int) -> Callable[[], Any]:
    n, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.ones(max(n, nbytes // 4 // n * n))
    share = whole[: len(whole) // n].clone()
    other = torch.empty_like(whole)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def shift() -> None:
        requests = [dist.isend(whole, (rank + 1) % n), dist.irecv(other, (rank - 1) % n)]
        for request in requests:
            request.wait()

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX),
        "all_gather": lambda: gather(other, share),
        "reduce_scatter": lambda: scatter(share, whole, dist.ReduceOp.MAX),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "send_recv": shift,
    }
    return calls[kind]


def _timed(dist: Any, torch: Any, call: Callable[[], Any], calls: int, random: Random) -> tuple[float, float]:
    """From the last rank's call to the end, and of the core where this rank is the last."""
    matrix, memory = torch.ones(256, 256), torch.ones(1 << 22)
    times_s, cores_s = [], []
    for number in range(calls + _WARM_UP):
        until_s = time.perf_counter() + _COMPUTE_S + random.uniform(0.0, _SKEW_S)
        memory.add_(1.0)
        while time.perf_counter() < until_s:
            torch.mm(matrix, matrix)
        start_s, own_s = time.perf_counter(), time.process_time()
        call()
        end_s, core_s = time.perf_counter(), time.process_time() - own_s
        mine = torch.tensor([start_s], dtype=torch.double)
        starts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(starts, mine)
        last_s = max(map(float, starts))
        if number >= _WARM_UP:
            times_s.append(max(0.0, end_s - last_s))  # a sender may be done before the last has come
            if last_s == start_s:
                cores_s.append(core_s)
    return _mean(times_s), _mean(cores_s or [0.0])


def _jitter(dist: Any, torch: Any) -> float:
    """Standard deviation of the log of a rank's time for the same work, beside the others'."""
    matrix, memory = torch.ones(256, 256), torch.ones(1 << 22)
    squares = []
    for _ in range(_JITTER_ROUNDS):
        start_s = time.perf_counter()
        for _ in range(_JITTER_WORK):
            memory.add_(1.0)
            for _ in range(_PRODUCTS):
                torch.mm(matrix, matrix)
        mine = torch.tensor([time.perf_counter() - start_s], dtype=torch.double).log()
        logs = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(logs, mine)
        squares.append(float(torch.cat(logs).var()))
    return _mean(squares) ** 0.5


def _mean(values: list[float]) -> float:
    kept = sorted(values)[: max(1, round(_KEPT * len(values)))]
    return sum(kept) / len(kept)


if __name__ == "__main__":
    main(*sys.argv[1:])
