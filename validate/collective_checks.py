"""What hosts that agree on a collective first hold it up
(`perfmodel.prediction.blocks.COLLECTIVE_CHECK_S`).

python validate/collective_checks.py [--ranks 2] [--calls 400]

With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps process groups: each collective begins with a
barrier and two gathers over TCP. Times an all-reduce of one number over gloo with and without, on
processes of this machine (no more than it has cores), and prints the difference per call and rank
at the fifth percentile: what is left when nothing else runs.
"""

import argparse
import os
import socket
from time import perf_counter
from typing import Any


def _rank(rank: int, ranks: int, calls: int, port: int, results: Any) -> None:
    """Run as one rank; rank 0 puts the fifth percentile of its calls' seconds into `results`."""
    import torch  # pyright: ignore[reportMissingImports]
    from torch import distributed  # pyright: ignore[reportMissingImports]

    # One thread each: ranks share the cores of this machine.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    number = torch.ones(1)
    took_s = []
    for _ in range(calls):
        start_s = perf_counter()
        distributed.all_reduce(number)
        took_s.append(perf_counter() - start_s)
    # Other programs only ever make a call longer, so that a low percentile is the machine's own.
    if rank == 0:
        results.put(sorted(took_s)[calls // 20])
    distributed.destroy_process_group()


def seconds(ranks: int, calls: int, level: str) -> float:
    """Seconds of an all-reduce at a debugging level of torch, at the fifth percentile of calls."""
    from torch import multiprocessing  # pyright: ignore[reportMissingImports]

    # The level is read when a process imports torch, hence the environment and new processes.
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = level
    # The system names a port that nobody uses.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, calls, port, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    took_s = results.get()
    for process in processes:
        process.join()
    return took_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=400)
    chosen = parser.parse_args()
    plain_s = seconds(chosen.ranks, chosen.calls, "OFF")
    checked_s = seconds(chosen.ranks, chosen.calls, "DETAIL")
    per_rank_s = (checked_s - plain_s) / chosen.ranks
    print(
        f"{1e3 * plain_s:.2f} ms, checked {1e3 * checked_s:.2f} ms: {1e3 * per_rank_s:.2f} ms per rank"
    )
