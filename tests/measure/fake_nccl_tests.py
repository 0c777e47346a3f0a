"""Stands in for a launcher and nccl-tests: prints what the programs print, a time of 10 us + 1 ns
per byte."""

import sys
from pathlib import Path

words = sys.argv[1:]


def value(name: str) -> str | None:
    return words[words.index(name) + 1] if name in words else None


if calls := value("--calls"):
    rest = words[words.index("--calls") + 2 :]
    with Path(calls).open("a") as file:
        file.write(" ".join(rest) + "\n")
program = next(Path(word).name for word in words if word.endswith("_perf"))
if (value("--fail") or "-") in program:
    print(f"{value('--fail')}: unhandled system error", file=sys.stderr)
    raise SystemExit(3)
ranks = int(value("-np") or 2)
low = int(value("-b") or 0)
high = int(value("-e") or 0)
factor = int(value("-f") or 0)
rank_line = "#  Rank {r:2} Group  0 Pid  {pid} on node-{node} device {d:2} [0x{bus:02x}] NVIDIA A100-SXM4-80GB"
print(f"# Collective test starting: {program}")
print(
    f"# nThread 1 nGpus 1 minBytes {low} maxBytes {high} step: {factor}(factor) warmup iters: 5 iters: 20 "
    "agg iters: 1 validation: 1 graph: 0"
)
print("#\n# Using devices")
for r in range(ranks):
    print(rank_line.format(r=r, pid=1000 + r, node=r // 8, d=r % 8, bus=7 + r % 8))
print(
    "#\n#                                                              out-of-place                       in-place"
)
print(
    "#       size         count      type   redop    root" + 2 * "     time   algbw   busbw #wrong"
)
print(
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"
)
shares = (ranks - 1) / ranks
bus_factor = {"all_reduce_perf": 2 * shares, "sendrecv_perf": 1.0, "broadcast_perf": 1.0}.get(
    program, shares
)
size = low
while size <= high:
    time_us = 10 + size / 1000
    bandwidth = size / time_us / 1e3
    block = f"{time_us:8.2f} {bandwidth:7.2f} {bandwidth * bus_factor:7.2f}      0"
    print(f"{size:12}  {size // 2:12}  bfloat16     sum      -1 {block} {block}")
    size *= factor
print("# Out of bounds values : 0 OK")
print("# Avg bus bandwidth    : 1.0\n#")
