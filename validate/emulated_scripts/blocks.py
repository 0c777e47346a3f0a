"""Collectives in blocks of calls, each when it is this world's turn: two worlds pass a token to
each other.

`blocks.py OUT WAIT PASS KIND,... BYTES,...`: rank 0 takes a byte from the pipe WAIT before each
block and writes one to PASS after it; the other ranks wait in their first collective meanwhile.
OUT: seconds of a call in each block, by kind and bytes, a JSON list.
"""

import json
import os
import sys
import time

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

WARM_UP = 3
AMOUNTS = ((1 << 30, 1, 4), (1 << 27, 2, 16), (1 << 24, 10, 30), (1 << 21, 100, 40), (0, 100, 60))
"""Calls of a block, and blocks, of sizes from so many bytes on: 100 calls one after another as in
the paper."""


def main(out, wait, send, kinds, sizes):
    """Run all blocks in turn with the other world, and write the seconds of rank 0."""
    # One thread, as a rank has one core.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    pipes = [os.open(path, os.O_RDWR) for path in (wait, send)] if first else []
    rows = []
    for kind in kinds.split(","):
        for nbytes in map(int, sizes.split(",")):
            call, (calls, blocks) = call_of(kind, nbytes), amount(nbytes)
            # Block -1 warms up: memory, buffers and connections; it is not reported.
            for block in range(-1, blocks):
                if first:
                    os.read(pipes[0], 1)
                # Of a large size one call warms up enough.
                for _ in range(min(WARM_UP, calls)):
                    call()
                begin_s = time.perf_counter()
                for _ in range(calls):
                    call()
                if first:
                    rows.append((kind, nbytes, block, (time.perf_counter() - begin_s) / calls))
                    os.write(pipes[1], b"1")
    if first:
        with open(out, "w") as file:
            json.dump([row for row in rows if row[2] >= 0], file)
    dist.barrier()
    dist.destroy_process_group()


def amount(nbytes):
    """Calls of a block, and blocks."""
    return next((calls, blocks) for least, calls, blocks in AMOUNTS if nbytes >= least)


def call_of(kind, nbytes):
    """Make a call on buffers of this size; it takes maxima instead of sums, so that numbers stay
    ones."""
    ranks = dist.get_world_size()
    full = torch.ones(max(ranks, nbytes // 4))
    if kind == "all_reduce":
        return lambda: dist.all_reduce(full, dist.ReduceOp.MAX)
    share = torch.ones(len(full) // ranks)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return lambda: gather(full, share)


if __name__ == "__main__":
    main(*sys.argv[1:])
