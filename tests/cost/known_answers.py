"""Questions whose answers are kept in `known_answers.csv`: what the shipped weights say of kernels
and collectives.

Regressors have no closed form. What code and weights answered together when they were last judged
against measurements is kept, so that no change of the code moves an answer without anyone knowing.
A change that is meant to, new weights or other figures of a device, is followed by

    python tests/cost/known_answers.py

whose difference in version control shows what moved, and by how much.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from perfmodel import catalog
from perfmodel.cost import (
    CollectiveModel,
    EventTimes,
    KernelModel,
    MonotoneGrid,
    event_times,
    inference_times,
)
from perfmodel.ops import (
    Attention,
    Collective,
    Convolution,
    Embedding,
    Exchange,
    Gemm,
    KernelOp,
    MemoryBound,
    MoE,
    OptimizerStep,
    Recurrence,
)

TABLE = Path(__file__).with_suffix(".csv")
DEVICES = (
    "A100-SXM4-80GB",
    "H100-SXM5-80GB",
    "V100-SXM2-32GB",
    "B200-SXM-180GB",
    "MI300X",
    "L40S",
    "TPU-v5p",
    "Gaudi2",
)
CLUSTERS = ("dgx-a100", "dgx-h100", "gb200-nvl72", "mi300x-platform", "l40s-x8", "tpu-v5p-pod")


@dataclass(frozen=True)
class Answer:
    """Price, interval and provenance of one event."""

    model: str
    machine: str
    event: str
    time_us: float
    lo_us: float
    hi_us: float
    provenance: str


def kernels() -> list[KernelOp]:
    """Kernels of every family and pass, large and small, of round sizes and of others."""
    ops: list[KernelOp] = []
    for (m, n, k), pass_ in product(
        ((8192, 4096, 4096), (300, 1000, 700)), ("fwd", "dgrad", "wgrad", "bwd")
    ):
        ops.append(Gemm(m=m, n=n, k=k, pass_=pass_, accumulate=pass_ == "wgrad"))  # pyright: ignore
    for dtype in ("fp32", "tf32", "fp16", "fp8", "fp4", "int8"):
        ops.append(Gemm(dtype=dtype, m=4096, n=5120, k=2560))
    ops.append(Gemm(op="bmm", m=512, n=512, k=64, batch=96))
    ops.append(Gemm(op="grouped_linear", m=1024, n=2048, k=4096, groups=8))
    for causal, pass_, seq in product((True, False), ("fwd", "bwd"), (512, 8192)):
        fields = {
            "batch": 2,
            "heads": 32,
            "kv_heads": 8,
            "seq_q": seq,
            "seq_kv": seq,
            "head_dim": 128,
        }
        ops.append(Attention(**fields, causal=causal, pass_=pass_))  # pyright: ignore
    shape: dict[str, Any] = {"batch": 16, "heads": 32, "kv_heads": 8, "head_dim": 128}
    ops.append(Attention(**shape, seq_q=1, seq_kv=4096, phase="decode"))
    ops.append(Attention(**shape, seq_q=4096, seq_kv=4096, window=1024))
    ops.append(Attention(**shape, seq_q=1024, seq_kv=1024, dtype="fp32"))
    for name, inputs in (
        ("layer_norm", 1),
        ("rms_norm", 1),
        ("silu_mul", 2),
        ("add", 2),
        ("softmax", 1),
        ("rope", 1),
    ):
        ops += [
            MemoryBound(op=name, rows=8192, hidden=4096, n_inputs=inputs, pass_=p)
            for p in ("fwd", "bwd")
        ]  # pyright: ignore
    ops += [
        Embedding(tokens=8192, hidden=4096, vocab=50304, pass_=pass_) for pass_ in ("fwd", "bwd")
    ]  # pyright: ignore
    ops += [OptimizerStep(n_params=n, bytes_per_param=42.0) for n in (10**6, 10**9)]
    image: dict[str, Any] = {"batch": 32, "c_in": 64, "h_in": 56, "w_in": 56, "c_out": 128}
    for kernel, stride, pass_ in (
        (3, 1, "fwd"),
        (1, 1, "fwd"),
        (3, 2, "dgrad"),
        (3, 1, "wgrad"),
        (7, 2, "bwd"),
    ):
        square = {"k_h": kernel, "k_w": kernel, "stride_h": stride, "stride_w": stride}
        ops.append(
            Convolution(**image, **square, pad_h=kernel // 2, pad_w=kernel // 2, pass_=pass_)
        )  # pyright: ignore
    ops += [
        MoE(tokens=n, hidden=4096, inter=14336, topk=2, experts=8, moe_ep=ep)
        for n, ep in ((16, 1), (4096, 4))
    ]
    ops.append(
        Recurrence(
            op="state_space", tokens=8192, products_per_token=10**6, bytes_per_token=2 * 10**5
        )
    )
    return ops


def collectives() -> list[Collective]:
    """Every kind, inside a node and between nodes, small and large, alone and beside others."""
    ops = []
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    groups = ((8, 8, 0, 1), (4, 4, 0, 1), (16, 8, 1, 1), (64, 1, 1, 8), (256, 8, 1, 1))
    for kind, (ranks, per_node, level, concurrent), size in product(kinds, groups, (1e4, 3e6, 1e9)):
        group = {
            "num_ranks": ranks,
            "ranks_per_node": per_node,
            "level": level,
            "concurrent": concurrent,
        }
        ops.append(Collective(collective=kind, bytes=size, **group))  # pyright: ignore
    for per_node, level, size in ((2, 0, 1e4), (2, 0, 1e8), (1, 1, 1e4), (1, 1, 1e8)):
        group = {
            "num_ranks": 2,
            "ranks_per_node": per_node,
            "level": level,
            "concurrent": 1 + 7 * level,
        }
        ops.append(Collective(collective="send_recv", bytes=size, **group))  # pyright: ignore
    for dispatcher, way, (ranks, per_node, level) in product(
        ("deepep", "hybridep"), ("dispatch", "combine"), ((8, 8, 0), (16, 8, 1), (64, 8, 1))
    ):
        exchange = Exchange(dispatcher, way)  # pyright: ignore
        group = {"num_ranks": ranks, "ranks_per_node": per_node, "level": level}
        ops.append(Collective(collective="all_to_all", bytes=1e8, exchange=exchange, **group))
    return ops


def groups_inside() -> list[Collective]:
    """Gathers over every number of ranks of a node that the model knows."""
    sizes = (*range(2, 9), *range(10, 21, 2), *range(24, 41, 4), *range(48, 73, 8))
    return [
        Collective(collective="all_gather", bytes=3e6, num_ranks=size, ranks_per_node=size)
        for size in sizes
    ]


def groups_between() -> list[Collective]:
    """Gathers over every number of nodes that the model knows, of few ranks and of many."""
    nodes = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 512)
    return [
        Collective(
            collective="all_gather", bytes=3e7, num_ranks=n * each, ranks_per_node=each, level=1
        )
        for n, each in product(nodes, (1, 8))
    ]


UNSAID = ("", "nobody", "nccl", "fp16", "auto")
"""What goes without saying in the table."""
INTERCONNECTS = (
    ("A100-SXM4-80GB", "NVLink3 + InfiniBand HDR"),
    ("A100-SXM4-80GB", "NVSwitch"),
    ("A100-SXM4-80GB", "RoCE"),
    ("H100-SXM5-80GB", "NVLink4 + EFA"),
    ("H100-SXM5-80GB", "NVLink4 + InfiniBand NDR"),
    ("H100-SXM5-80GB", "RDMA-400G"),
    ("GH200", "4xGH200 + Slingshot"),
    ("V100-SXM2-32GB", "NVLink2 + InfiniBand EDR"),
    ("V100-SXM2-32GB", "NVSwitch V100"),
    ("P100", "Aries"),
    ("MI250X", "XGMI + Slingshot"),
    ("MI300X", "Infinity Fabric"),
    ("GB200", "NVL72"),
    ("A40", "NVLink-bridge+PCIe4"),
    ("L40S", "PCIe4 + Ethernet 100GbE"),
    ("TPU-v4", "ICI"),
    ("T4", "PCIe3"),
    ("A100-SXM4-80GB", "A new link@123GB/s + Another@20GB/s"),
    ("Nobody's", "unheard of"),
    ("EPYC-Genoa-core", "gloo"),
    ("EPYC-Genoa-core", "loopback"),
    ("Nobody's", "loopback"),
    ("P100", "NVLink1 + InfiniBand FDR"),
    ("B200", "NVLink5 + InfiniBand XDR"),
    ("MI300X", "XGMI + OmniPath"),
    ("H100-PCIE-80GB", "NVLink bridge + PCIe5"),
    ("A30", "bridge + Ethernet"),
    ("V100-SXM2-32GB", "PCIe + InfiniBand"),
    ("A10", "UPI"),
)
"""Devices and links in the words of tables, known and unknown."""


def table_rows() -> pd.DataFrame:
    """Rows of a table of collectives on all kinds of links, with and without numbers of
    adapters."""
    placements = (
        {"num_ranks": 4, "num_nodes": 1},
        {"num_ranks": 8, "num_nodes": 1, "ranks_per_node": 8},
        {"num_ranks": 32, "num_nodes": 4, "ranks_per_node": 8, "nics_per_node": 8},
        {"num_ranks": 16, "num_nodes": 4, "ranks_per_node": 4, "nics_per_node": 5, "nic_gbit": 200},
        {"num_ranks": 16, "num_nodes": 16, "ranks_per_node": 1, "nic_gbit": 100},
    )
    runs = (
        {"collective": "all_reduce", "bytes": 1e5, "algorithm": "auto"},
        {"collective": "all_reduce", "bytes": 3e8, "algorithm": "tree"},
        {"collective": "all_to_all", "bytes": 1e7, "algorithm": "auto"},
        {"collective": "all_reduce", "bytes": 2e7, "algorithm": "collnet_direct(SHARP)"},
        {"collective": "all_reduce", "bytes": 2e7, "algorithm": "nvls_tree"},
    )
    rows = [
        {
            "source": "nobody",
            "software": "nccl",
            "dtype": "fp16",
            "variant": "",
            "device": device,
            "interconnect": name,
        }
        | placement
        | run
        for (device, name), placement, run in product(INTERCONNECTS, placements, runs)
    ]
    return pd.DataFrame(rows)


def measured_rows(model: CollectiveModel) -> pd.DataFrame:
    """Rows of every series that the weights rest on, inside a node and between nodes, and of every
    exchange."""
    rows: list[dict[str, Any]] = []
    entries = dict.fromkeys(key for key in model.weights.curves if hasattr(key, "software"))
    for source, device, interconnect, kind, algorithm, way in model.weights.series:
        run = {"source": source, "device": device, "interconnect": interconnect, "collective": kind}
        run |= {"algorithm": algorithm, "variant": way, "software": "", "dtype": ""}
        rows.append(run | {"num_ranks": 4, "num_nodes": 1, "ranks_per_node": 4, "bytes": 2e6})
        rows.append(run | {"num_ranks": 16, "num_nodes": 2, "ranks_per_node": 8, "bytes": 5e4})
    for entry in entries:
        run = dict(
            zip(
                ("source", "device", "interconnect", "collective", "algorithm", "variant"),
                entry.series,
                strict=True,
            )
        )
        run |= {"software": entry.software, "dtype": entry.dtype}
        rows.append(run | {"num_ranks": 24, "num_nodes": 3, "ranks_per_node": 8, "bytes": 1.5e8})
    for software, device, interconnect, kind, mode, dtype in model.weights.moe.series:
        run = {
            "software": software,
            "device": device,
            "interconnect": interconnect,
            "collective": kind,
            "mode": mode,
        }
        shape = {"hidden": 7168, "topk": 8, "experts": 256}
        rows.append(run | shape | {"dtype": dtype, "num_ranks": 8, "num_nodes": 1, "tokens": 128})
        rows.append(
            run
            | shape
            | {"dtype": dtype, "num_ranks": 32, "num_nodes": 4, "tokens": 4096, "sms": 20}
        )
    return pd.DataFrame(rows)


def answers() -> Iterator[Answer]:
    """The answers of the present code."""
    kernel_model, collective_model = KernelModel.load(), CollectiveModel.load()
    for name in DEVICES:
        device = catalog.device(name)
        ops = [op for op in kernels() if op.dtype in device.dtypes]
        yield from _answers("kernel", name, ops, kernel_model.times(device, ops))
    for name in CLUSTERS:
        cluster = catalog.cluster(name)
        ops = [op for op in collectives() if op.level < len(cluster.levels)]
        yield from _answers("collective", name, ops, collective_model.times(cluster, ops))
    for name, groups in (("gb200-nvl72", groups_inside()), ("dgx-h100", groups_between())):
        times = collective_model.times(catalog.cluster(name), groups)
        yield from _answers("size of groups", name, groups, times)
    rows = pd.concat([table_rows(), measured_rows(collective_model)], ignore_index=True)
    for row, times in zip(
        rows.to_dict("records"), collective_model.table_times(rows).rows(), strict=True
    ):
        time_s, lo_s, hi_s, provenance = times
        # An empty cell is NaN.
        stated = {key: value for key, value in row.items() if not pd.isna(value)}
        description = " ".join(
            f"{key}={value}" for key, value in stated.items() if value not in UNSAID
        )
        yield Answer(
            "table",
            str(row["device"]),
            description,
            time_s * 1e6,
            lo_s * 1e6,
            hi_s * 1e6,
            provenance,
        )
    for name in ("dgx-a100", "dgx-h100", "hgx-b200"):
        cluster = catalog.cluster(name)
        ops = [
            op
            for op in kernels()
            if op.dtype in cluster.device.dtypes and op.pass_ in ("fwd", "wgrad")
        ]
        in_steps = MonotoneGrid.of(ops)
        alone = event_times(in_steps.ops, cluster, kernel_model, collective_model)
        times_in_steps = in_steps.times(alone)
        place = {op: i for i, op in enumerate(in_steps.ops)}
        at = [place[op] for op in ops]
        chosen = EventTimes(
            times_in_steps.time_s[at],
            times_in_steps.lo_s[at],
            times_in_steps.hi_s[at],
            tuple(times_in_steps.provenance[i] for i in at),
        )
        yield from _answers("step", name, ops, chosen)
        served = [op for op in kernels() if op.dtype in ("bf16", "fp8") and op.pass_ == "fwd"]
        served = [op for op in served if op.dtype in cluster.device.dtypes]
        for n_bytes in (2.0, 0.5):
            stored = [n_bytes] * len(served)
            times = inference_times(served, stored, cluster, kernel_model, collective_model)
            yield from _answers(f"server {n_bytes:g}", name, served, times)


def _answers(model: str, machine: str, ops: list[Any], times: EventTimes) -> Iterator[Answer]:
    for op, (time_s, lo_s, hi_s, provenance) in zip(ops, times.rows(), strict=True):
        yield Answer(model, machine, _event(op), time_s * 1e6, lo_s * 1e6, hi_s * 1e6, provenance)


def _event(op: Any) -> str:
    """An event by all of its fields that are not as usual."""
    if isinstance(op, Collective):
        by = "/".join(op.exchange) if op.exchange else op.collective
        return f"{by} {op.bytes:g} B on {op.num_ranks} ranks, {op.ranks_per_node} a node, x{op.concurrent}"
    fields = " ".join(
        f"{name}={value}"
        for name, value in op.stated().items()
        if value not in (0, 1, False, "balanced")
    )
    return f"{op.family} {fields}"


def read() -> list[Answer]:
    """The stored answers."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = ("time_us", "lo_us", "hi_us")
    return [
        Answer(**{key: float(value) if key in numbers else value for key, value in row.items()})
        for row in rows
    ]


def write() -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(list(Answer.__dataclass_fields__))
        for answer in answers():
            numbers = [f"{value:.6g}" for value in (answer.time_us, answer.lo_us, answer.hi_us)]
            writer.writerow(
                [answer.model, answer.machine, answer.event, *numbers, answer.provenance]
            )


if __name__ == "__main__":
    write()
