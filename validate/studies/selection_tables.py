"""The tables that `selection_study` measures by, and layouts whose studied kernels all stand in
them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from studies.selection_study import Case, Entry

from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import read_table
from perfmodel.ops import Attention, Gemm, Op
from perfmodel.prediction import step_problem
from perfmodel.spec import Job, Layout, Model, Transformer
from perfmodel.workload import Shard, blocks

LAYOUTS: Final = 6
"""Layouts of interest of a case."""
TRAINING_DEVICES: Final = {"A100-SXM4-80GB": "dgx-a100", "GH200-96GB": "dgx-h100"}
"""Devices of estimate_train_time, and a cluster whose network stands in; collectives are the same
on both sides."""
TRAINING_WIDTHS: Final = (2560, 3584, 6144)
PREFILL_DEVICES: Final = {"H100-SXM-80GB": "vllm", "A100-SXM4-80GB": "sglang", "L40S": "vllm"}
"""Devices of aiconfigurator, and whose kernels."""
PREFILL_MODELS: Final = ("gpt3-6.7b", "qwen3-8b", "nemotron-4-15b")
_SEQUENCES: Final = (1024, 1536, 2048, 2560, 3072, 3584, 4096, 4608, 5120, 8192)


def training_case(data: Path, device: str, width: int, seed: int) -> Case:
    """Training steps of a 16-layer GPT: linear layers, forward and backward (fp16,
    estimate_train_time)."""
    table = _gemms(read_table(data / "estimate_train_time" / "gemm.csv.gz"), device, "fp16")
    heads = 32
    model = Transformer(
        name=f"gpt-{width}",
        layers=16,
        hidden=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        ffn_hidden=4 * width,
        vocab=50257,
        seq_len=2048,
    )
    return _case(model, TRAINING_DEVICES[device], device, table, halved_backward, seed, "train")


def prefill_case(data: Path, device: str, model: str, seed: int) -> Case:
    """Forward steps of a published model: linear layers and causal attention (bf16,
    aiconfigurator)."""
    gemms = read_table(data / "aiconfigurator" / "gemm.csv.gz")
    # The table has several servers' kernels of one device.
    software = PREFILL_DEVICES[device]
    table: dict[Op, float] = {
        **_gemms(gemms[gemms.software.str.startswith(software)], device, "bf16")
    }
    attention: Any = read_table(data / "aiconfigurator" / "attention_prefill.csv.gz")
    attention = attention[
        (attention.device == device) & attention.software.str.startswith(software)
    ]
    sizes = ["batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim"]
    # Windows are another kernel; repeats of a shape count by their median.
    full_attention = attention[attention.window == 0]
    for key, time_us in full_attention.groupby(sizes).time_us.median().items():
        shape: dict[str, Any] = dict(zip(sizes, map(int, key), strict=True))
        table[Attention(op="flash_attention", phase="", **shape)] = time_us * 1e-6
    cluster = "dgx-h100" if device.startswith("H100") else "dgx-a100"
    return _case(catalog.model(model), cluster, device, table, as_is, seed, "inference")


def _gemms(table: Any, device: str, dtype: str) -> dict[Op, float]:
    """Median seconds of the linear layers of one device."""
    linear_layers = table[
        (table.device == device) & (table.op == "linear") & (table.dtype == dtype)
    ]
    times = linear_layers.groupby(["m", "n", "k", "pass"]).time_us.median()
    return {
        Gemm(dtype=dtype, m=int(m), n=int(n), k=int(k), pass_=name): time_us * 1e-6
        for (m, n, k, name), time_us in times.items()
    }


def as_is(op: Op) -> Entry | None:
    """The event's own row; the vocabulary projection is not studied, because the grids lack its
    widths."""
    if isinstance(op, Gemm) and op.op == "linear":
        return Entry(replace(op, accumulate=False), 1.0)
    if isinstance(op, Attention):
        return Entry(replace(op, phase="", head_dim_v=0), 1.0)
    return None


def halved_backward(op: Op) -> Entry | None:
    """The event's share in a table that times both gradient products of a linear layer together:
    half of the row for each."""
    if not (isinstance(op, Gemm) and op.op == "linear"):
        return None
    # No row of the table accumulates into its output.
    plain = replace(op, accumulate=False)
    if op.pass_ == "dgrad":  # [m, n] = [m, k] [k, n]: the forward product has n and k exchanged
        return Entry(replace(plain, n=op.k, k=op.n, pass_="bwd"), 0.5)
    if op.pass_ == "wgrad":
        # [m, n] = [m, k] [k, n]: its m is the forward's n, its k the forward's m
        return Entry(replace(plain, m=op.k, n=op.m, k=op.n, pass_="bwd"), 0.5)
    return Entry(plain, 1.0)


def _case(
    model: Model,
    cluster_name: str,
    device: str,
    table: Mapping[Op, float],
    entry: Callable[[Op], Entry | None],
    seed: int,
    mode: Any,
) -> Case:
    """Layouts of a model drawn from those whose studied kernels stand in a table."""
    cluster = replace(catalog.cluster(cluster_name), device=catalog.device(device))
    dtype = next(iter(table)).dtype  # pyright: ignore[reportAttributeAccessIssue]
    shards = list(_in_table(model, table, entry, dtype, mode))
    # The seed draws layouts, so that two runs are of different ones.
    rng = np.random.default_rng(seed)
    layouts = []
    for i in rng.choice(len(shards), min(LAYOUTS, len(shards)), replace=False):
        tp, micro_batch, seq_len = shards[i]
        # Stages change what is exposed, but no kernel's shape.
        pp = int(rng.choice([1, 2, 4]))
        job = Job(global_batch=2 * micro_batch * 4 * pp, seq_len=seq_len, dtype=dtype, mode=mode)
        layouts.append(
            (step_problem(model, cluster, job), Layout(tp=tp, pp=pp, dp=2, micro_batch=micro_batch))
        )

    def studied(op: Op) -> Entry | None:
        """The row of an event, where the table has it."""
        known = entry(op)
        return known if known and known.op in table else None

    return Case(cluster.device, tuple(layouts), table, studied)


def _in_table(
    model: Model,
    table: Mapping[Op, float],
    entry: Callable[[Op], Entry | None],
    dtype: str,
    mode: Any,
) -> Iterator[tuple[int, int, int]]:
    """Tensor-parallel degree, micro-batch and sequence length of shards whose layers stand in the
    table."""
    for tp, micro_batch, seq_len in product((1, 2, 4, 8), (1, 2, 4, 8, 16), _SEQUENCES):
        job = Job(global_batch=16, seq_len=seq_len, dtype=dtype, mode=mode)
        layout = Layout(tp=tp, micro_batch=micro_batch)
        try:
            blocks_of_shard = blocks(model, job, Shard.of(layout))
        except PerfModelError:  # the model does not divide
            continue
        kernels: list[Op] = []
        for block, _ in blocks_of_shard:
            # The head is not studied in inference: the table lacks its widths.
            if mode != "train" and "head" in block.name:
                continue
            for events in (block.forward, block.backward_input, block.backward_weight):
                kernels += [op for op, _ in events]
        studied = [known.op for op in kernels if (known := entry(op))]
        if all(op in table for op in studied):
            yield tp, micro_batch, seq_len
