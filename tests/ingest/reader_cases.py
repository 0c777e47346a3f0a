"""Small files of every format, written as their tools write them."""

import json
import sqlite3
from pathlib import Path
from typing import Any

Timing = tuple[float, float]
"""Microseconds out of place and in place."""
SECRETS = ("node-a17", "/home/alice", "alice", "10.1.2.3")
"""What must not come out of a file: host, path, user, address."""


def bus_factor(test: str, ranks: int) -> float:
    """Bus over algorithm bandwidth (doc/PERFORMANCE.md of nccl-tests)."""
    if test == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if test in ("all_gather", "reduce_scatter", "alltoall") else 1.0


def nccl_text(
    rows: dict[int, Timing],
    test: str = "all_reduce",
    ranks: int = 8,
    nodes: int = 1,
    *,
    layout: str = "new",
    dtype: str = "float",
    units: str = "(us)",
    wrong: int = 0,
    footer: bool = True,
    named: bool = True,
) -> str:
    """The printed table (util.cu and common.cu of nccl-tests); `layout` new, per-iteration or old
    (2019)."""
    per_node = ranks // nodes
    root = "0" if test == "broadcast" else "-1"
    group = "" if layout == "old" else " Group  0"
    lines = ["mpirun -np 8 ./build/" + f"{test}_perf -b 8 -e 128M -f 2"] if named else []
    if layout != "old":
        lines += ["# nccl-tests version 2.18.3 nccl-headers=22809 nccl-library=22809"]
        lines += [f"# Collective test starting: {test}_perf"] if named else []
    lines += [
        "# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 "
        "validation: 1 graph: 0",
        "#",
        "# Using devices",
        *(
            f"#  Rank {r:2d}{group} Pid {100 + r:6d} on {SECRETS[0]}-{r // per_node} device {r % per_node:2d} "
            "[0000:07:00] NVIDIA A100-SXM4-80GB"
            for r in range(ranks)
        ),
        f"{SECRETS[0]}:100:100 [0] NCCL INFO NCCL_ALGO set by environment to Ring.",
        f"{SECRETS[0]}:100:100 [0] NCCL INFO NCCL_TOPO_FILE set by environment to {SECRETS[1]}/topo.xml",
        "#",
    ]
    block = {
        "new": (["time", "algbw", "busbw", "#wrong"], [units, "(GB/s)", "(GB/s)", ""]),
        "old": (["time", "algbw", "busbw", "error"], [units, "(GB/s)", "(GB/s)", ""]),
        "per-iteration": (
            ["time", "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%"],
            [units, "(GB/s)", "(GB/s)", "", "(us)", "(us)", "(us)", "(%)"],
        ),
    }[layout]
    names = ["size", "count", "type", "redop"] + ([] if layout == "old" else ["root"])
    lines += [
        "#" + " " * 40 + "out-of-place" + " " * 20 + "in-place",
        "# " + "  ".join(f"{name:>10}" for name in names + 2 * block[0]),
        "# "
        + "  ".join(
            f"{name:>10}" for name in ["(B)", "(elements)"] + [""] * (len(names) - 2) + 2 * block[1]
        ),
    ]
    for size, times in rows.items():
        # old versions leave the column empty where nothing is reduced
        redop = "" if layout == "old" else "none"
        if test in ("all_reduce", "reduce_scatter"):
            redop = "sum"
        cells = [str(size), str(size // 4), dtype, redop] + ([] if layout == "old" else [root])
        for time_us in times:
            algorithm = size / time_us / 1e3
            bandwidths = [f"{algorithm:.2f}", f"{algorithm * bus_factor(test, ranks):.2f}"]
            cells += [f"{time_us:.2f}", *bandwidths, "2e-07" if layout == "old" else str(wrong)]
            cells += [f"{time_us:.2f}"] * 3 + ["1.00"] if layout == "per-iteration" else []
        lines.append("  ".join(f"{cell:>12}" for cell in cells))
    if footer:
        lines += [
            f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}",
            "# Avg bus bandwidth    : 12.3",
            "#",
        ]
    return "\n".join(lines) + "\n"


def nccl_json(
    rows: dict[int, Timing], test: str = "all_reduce", processes: int = 4, gpus: int = 2
) -> dict[str, Any]:
    """Text of nccl-tests' `-J FILE` (file version 2), which lists the first rank of every
    process."""

    def timing(size: int, time_us: float) -> dict[str, Any]:
        return {
            "time": time_us,
            "alg_bw": size / time_us / 1e3,
            "bus_bw": size / time_us / 1e3,
            "nwrong": 0.0,
        }

    return {
        "version": 2,
        "start_time": "2026-01-01 00:00:00",
        "args": [f"{SECRETS[1]}/nccl-tests/build/{test}_perf", "-b", "8"],
        "env": [
            "NCCL_PROTO=Simple",
            f"HOME={SECRETS[1]}",
            f"USER={SECRETS[2]}",
            f"NCCL_ALGO={SECRETS[3]}/x",
            f"NCCL_SOCKET_IFNAME={SECRETS[0]}",
        ],
        "nccl_version": 22809,
        "config": {
            "nthreads": 1,
            "ngpus": gpus,
            "iterations": 20,
            "devices": [
                {
                    "rank": p * gpus,
                    "group": 0,
                    "pid": 1,
                    "hostname": f"{SECRETS[0]}-{p // 2}",
                    "device": 0,
                    "device_hex": "0000:07:00",
                    "device_info": "NVIDIA H100 80GB HBM3",
                }
                for p in range(processes)
            ],
        },
        "results": [
            {
                "size": size,
                "count": size // 4,
                "type": "float",
                "redop": "sum",
                "root": "    -1",
                "out_of_place": timing(size, out),
                "in_place": timing(size, in_),
                "actual_iterations": 20,
                "experiment_name": f"{test}_perf",
            }
            for size, (out, in_) in rows.items()
        ],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 12.3, "okay": "unchecked"},
        "errors": [],
    }


def osu_text(
    rows: dict[int, float],
    title: str = "Allreduce Latency Test",
    *,
    full: bool = True,
    unit: str = "us",
) -> str:
    """A table of version 7; `full` as with option -f."""
    lines = [f"# OSU MPI-CUDA {title} v7.4", "# Datatype: MPI_FLOAT."]
    if "Bandwidth" in title:
        lines += [
            f"# Size      Bandwidth ({unit})",
            *(f"{size:<10d}{value:>20.4f}" for size, value in rows.items()),
        ]
    elif not full:
        lines += [
            f"# Size       Avg Latency({unit})",
            *(f"{size:<10d}{value:>20.4f}" for size, value in rows.items()),
        ]
    else:
        lines += [
            f"# Size       Avg Latency({unit})   Min Latency({unit})   Max Latency({unit})  Iterations"
        ]
        lines += [
            f"{s:<10d}{v:>20.4f}{0.5 * v:>18.4f}{2 * v:>18.4f}{1000:>12d}" for s, v in rows.items()
        ]
    return "\n".join(lines) + "\n"


def kineto_json(
    rank: int = 0, ranks: int = 2, steps: int = 2, late_us: float = 0.0
) -> dict[str, Any]:
    """A rank's GPU trace: per step a forward product, a backward product and an all-reduce in
    annotated passes."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}}
    ]
    number = 0

    def event(
        category: str, name: str, start: float, duration: float, thread: int, **args: Any
    ) -> None:
        pid = 0 if category in ("kernel", "gpu_memcpy") else 100
        events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": pid,
                "tid": thread,
                "ts": start + late_us,
                "dur": duration,
                "args": args,
            }
        )

    def launch(
        op: str, kernels: list[tuple[str, float]], at: float, start: float, **args: Any
    ) -> None:
        nonlocal number
        number += 1
        event("cpu_op", op, at, 10.0, 1, **{"External id": number}, **args)
        for i, (kernel, duration) in enumerate(kernels):
            correlation = 1000 * number + i
            event("cuda_runtime", "cudaLaunchKernel", at + 1 + i, 1.0, 1, correlation=correlation)
            event(
                "kernel",
                kernel,
                start,
                duration,
                7,
                **{"External id": number},
                correlation=correlation,
                device=rank,
                stream=7,
            )
            start += duration

    for step in range(steps):
        at = 1e6 + 1000.0 * step
        event("user_annotation", f"ProfilerStep#{step + 5}", at, 900.0, 1)
        event("user_annotation", "forward stage=0 micro_batch=0", at + 10, 50.0, 1)
        shapes = {"Input Dims": [[32], [64, 16], [16, 32]], "Input type": ["c10::BFloat16"] * 3}
        launch(
            "aten::addmm",
            [("sm90_gemm", 100.0 + step), ("splitK_reduce", 20.0)],
            at + 20,
            at + 100,
            **shapes,
        )
        launch("aten::unknown", [("odd_kernel", 5.0)], at + 40, at + 240)
        event("user_annotation", "backward stage=0 micro_batch=0", at + 70, 60.0, 1)
        event(
            "cpu_op",
            "autograd::engine::evaluate_function: AddmmBackward0",
            at + 75,
            40.0,
            1,
            **{"External id": 900},
        )
        strides = {"Input Strides": [[1, 32], [16, 1]]}
        launch(
            "aten::mm",
            [("sm90_gemm", 150.0)],
            at + 80,
            at + 300,
            **{"Input Dims": [[32, 64], [64, 16]], "Input type": ["c10::BFloat16"] * 2},
            **strides,
        )
        event(
            "kernel",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            at + 500 - late_us,
            100.0 + 50 * rank,
            20,
            correlation=99,
            device=rank,
            stream=20,
            **{
                "Collective name": "allreduce",
                "In msg nelems": 1024,
                "Out msg nelems": 1024,
                "Group size": ranks,
                "dtype": "BFloat16",
                "Process Group Name": "0",
            },
        )
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": events,
    }


def nsys_file(
    path: Path, *, old: bool = False, epoch_ns: int | None = 10**18, shift_ns: int = 0
) -> Path:
    """An exported report: an `aten::mm` under emit_nvtx's range, a copy and an NCCL kernel in
    annotated passes."""
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path)
    name = "name INTEGER" if old else "demangledName INTEGER, shortName INTEGER"
    text = "text TEXT" if old else "text TEXT, textId INTEGER"
    db.executescript(f"""
        CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
            streamId INTEGER, correlationId INTEGER, globalPid INTEGER, {name});
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
            streamId INTEGER, correlationId INTEGER, globalPid INTEGER, bytes INTEGER, copyKind INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
            correlationId INTEGER, nameId INTEGER);
        CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, {text}, globalTid INTEGER);
        CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
        INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA A100-SXM4-80GB');
        INSERT INTO StringIds VALUES (1, 'ampere_bf16_s16816gemm_bf16_128x128'), (2, 'ncclDevKernel_AllReduce'),
            (3, 'forward stage=1 micro_batch=2');
    """)
    if not old:
        db.executescript("""
            CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT);
            INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.13.1');
        """)
        if epoch_ns is not None:
            db.execute("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER)")
            db.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?)", (epoch_ns,))
    thread = (77 << 24) + 5
    label = (
        "aten::mm, seq = 3, op_id = 9, sizes = [[64, 16], [16, 32]], input_op_ids = [(1,0), (2,0)]"
    )
    for start, end, written, number in ((0, 900, None, 3), (100, 400, label, None)):
        shown = written or "forward stage=1 micro_batch=2"
        values = (
            (start, end, 59, shown, thread) if old else (start, end, 59, written, number, thread)
        )
        db.execute(f"INSERT INTO NVTX_EVENTS VALUES ({', '.join('?' * len(values))})", values)
    for correlation, at in ((1, 200), (2, 500), (3, 600)):
        db.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 0)",
            (at, at + 50, thread, correlation),
        )
    names = lambda number: (number,) if old else (number, number)  # noqa: E731
    for start, end, stream, correlation, number in ((1000, 6000, 7, 1, 1), (7000, 9000, 20, 2, 2)):
        values = (
            start + shift_ns,
            end + shift_ns,
            0,
            1,
            stream,
            correlation,
            77 << 24,
            *names(number),
        )
        db.execute(
            f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({', '.join('?' * len(values))})",
            values,
        )
    db.execute(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (9500, 9600, 0, 1, 7, 3, ?, 64, 1)",
        (77 << 24,),
    )
    db.commit()
    db.close()
    return path


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A protocol buffer of whole numbers, texts and messages."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += varint(number << 3 | 2) + varint(len(data)) + data
    return out


def gpu_xspace(start_ps: int = 5_000_000, duration_ps: int = 7_000_000) -> bytes:
    """A GPU's profile: a product and an all-reduce of a module that the profile carries, in an
    annotated pass."""

    def shape(kind: int, *dims: int) -> bytes:
        return message((2, kind), (3, b"".join(map(varint, dims))))

    def operand(number: int, name: str, *dims: int) -> bytes:
        return message((1, name), (2, "parameter"), (3, shape(16, *dims)), (35, number))

    dot = message(
        (1, "dot.3"),
        (2, "dot"),
        (3, shape(16, 4, 64, 32)),
        (35, 3),
        (36, 1),
        (36, 2),
        (30, message((1, 2), (2, 1), (3, 0), (4, 0))),
    )
    groups = message((1, b"\0\1\2\3")), message((1, b"\4\5\6\7"))
    reduce = message(
        (1, "all-reduce.4"),
        (2, "all-reduce"),
        (3, shape(16, 4, 64, 32)),
        (35, 4),
        (36, 3),
        *((49, group) for group in groups),
    )
    computation = message(
        (1, "main"),
        (2, operand(1, "a", 4, 64, 16)),
        (2, operand(2, "b", 4, 16, 32)),
        (2, dot),
        (2, reduce),
        (5, 1),
    )
    hlo = message((1, message((1, "jit_f"), (3, computation))))
    stat = lambda number, value: message((1, number), (5, value))  # noqa: E731
    kinds = [
        (
            4,
            message(
                (1, n), (2, message((1, n), (2, name), (5, stat(1, "jit_f")), (5, stat(2, op))))
            ),
        )
        for n, name, op in (
            (1, "cublas_gemm", "dot.3"),
            (2, "ncclDevKernel_AllReduce", "all-reduce.4"),
        )
    ]
    stats = [
        (5, message((1, n), (2, message((1, n), (2, s)))))
        for n, s in ((1, "hlo_module"), (2, "hlo_op"))
    ]
    events = [
        message((1, 1), (2, start_ps), (3, duration_ps)),
        message((1, 2), (2, start_ps + duration_ps), (3, 3_000_000)),
    ]
    line = message((1, 13), (2, "Stream #13(Compute)"), (3, 2), *((4, event) for event in events))
    device = message((1, 1), (2, "/device:GPU:0"), (3, line), *kinds, *stats)
    facts = (
        4,
        message((1, 9), (2, message((1, 9), (2, "jit_f(9)"), (5, message((1, 3), (6, hlo)))))),
    )
    metadata = message(
        (2, "/host:metadata"), facts, (5, message((1, 3), (2, message((1, 3), (2, "Hlo Proto")))))
    )
    mark = message((1, 1), (2, 0), (3, 10**9))
    names = [(4, message((1, 1), (2, message((1, 1), (2, "backward stage=2 micro_batch=1")))))]
    host = message((2, "/host:CPU"), (3, message((2, "python"), (3, 1), (4, mark))), *names)
    return message((1, device), (1, metadata), (1, host))


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path
