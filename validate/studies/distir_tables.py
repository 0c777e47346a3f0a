"""DistIR's tables 2 and 3 through programs: every D/T/P/K written down, simulated and ranked."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pandas as pd
from studies.search_distir import CLUSTER, DEVICES, INFERENCE, TOKENS, TOLERANCE, TRAINING, AdditiveProducts

from perfmodel import catalog
from perfmodel.execution import Timer, cluster_timer, program_structure, simulate
from perfmodel.ops import Collective, KernelOp, Op
from perfmodel.planning.program_search import MICRO_BATCHES, ProgramSearch, search_programs
from perfmodel.program.distribute import Degrees, distribute, on_one_stream, pad_vocabulary
from perfmodel.program.ir.models import model_program

TO_32: Final = MICRO_BATCHES[:5]
"""K of the larger models: 2 to 32, the largest that the paper chooses."""
NEAR: Final = (0.5, 1, 2)
"""Batches of table 3 that are tried, as multiples of the paper's choice."""
FIXED_COSTS_S: Final = (0.0, 1e-4, 2e-4, 4e-4, 1e-3, 2e-3)
FIXED_COST_CHOICES: Final = ("1/8/2/2", "1/8/2/4", "1/8/2/8", "1/16/1/1", "1/1/16/128")
"""The paper's choice, more micro-batches, tensor parallelism alone, and the pipeline that the paper compares with."""


def training_row(model: str, batch: int) -> dict[str, Any]:
    """One row of table 2."""
    program = model_program(catalog.model(model), batch, dtype="fp16")
    counts = MICRO_BATCHES if model == "mlp-1b" else TO_32
    found = search_programs(program, catalog.cluster(CLUSTER), DEVICES, micro_batches=counts)
    paper = TRAINING[model][batch]
    return {"model": model, "batch": batch, "paper": paper, **_beside(found, paper)} | _baselines(found)


def inference_row(model: str) -> dict[str, Any]:
    """One row of table 3: the batch is free."""
    paper_batch, paper = INFERENCE[model]
    searches = []
    for batch in (int(paper_batch * factor) for factor in NEAR):
        program = model_program(catalog.model(model), batch, seq_len=TOKENS, dtype="fp16", mode="inference")
        program = pad_vocabulary(program, DEVICES)  # 50,257 divides over no number of tensor ranks
        found = search_programs(program, catalog.cluster(CLUSTER), DEVICES, micro_batches=TO_32)
        if found.candidates:
            searches.append(found)
    best = max(searches, key=lambda s: s.candidates[0].samples_per_s)
    theirs = next((s for s in searches if s.batch == paper_batch), best)
    rate = next((c.samples_per_s for c in theirs.candidates if c.dtpk == paper), 0.0)
    ratio = best.candidates[0].samples_per_s / rate if rate else float("inf")
    row = {"model": model, "batch": paper_batch, "paper": f"{paper_batch} / {paper}"}
    return row | {
        "ours": f"{best.batch} / {best.candidates[0].dtpk}", "paper's/ours": ratio, "held": ratio <= 1 + TOLERANCE,
        "evaluated": sum(s.evaluated for s in searches), "fit": sum(len(s.candidates) for s in searches),
    } | _baselines(best)  # fmt: skip


def additive_choice(model: str) -> str:
    """The best layout of a row of table 3 at the paper's batch, with kernels priced as the paper prices them; and how
    much faster than the paper's choice that makes it."""
    batch, paper = INFERENCE[model]
    program = model_program(catalog.model(model), batch, seq_len=TOKENS, dtype="fp16", mode="inference")
    program = pad_vocabulary(program, DEVICES)
    found = search_programs(program, catalog.cluster(CLUSTER), DEVICES, micro_batches=TO_32, timer=_additive_timer(0.0))
    best = found.candidates[0]
    theirs = next((c.step_time_s for c in found.candidates if c.dtpk == paper), float("inf"))
    return f"{best.dtpk} ({theirs / best.step_time_s:.2f})"


def fixed_cost_rows(model: str = "gpt2-175b") -> list[dict[str, Any]]:
    """How long choices of a row of table 3 take over the paper's (1: as long), by a fixed cost of every kernel and
    collective beside the paper's prices: what a regression's constant and PyTorch's dispatch add."""
    batch, paper = INFERENCE[model]
    program = model_program(catalog.model(model), batch, seq_len=TOKENS, dtype="fp16", mode="inference")
    program = pad_vocabulary(program, DEVICES)
    found: dict[str, list[float]] = {}
    for degrees in map(Degrees.parse, FIXED_COST_CHOICES):
        spread = on_one_stream(distribute(program, degrees, representative=True))
        structure = program_structure(spread.function, catalog.cluster(CLUSTER))
        name = f"{degrees.data}/{degrees.tensor}/{degrees.pipeline}/{degrees.micro_batches}"
        found[name] = [simulate(structure, _additive_timer(cost)).makespan_s for cost in FIXED_COSTS_S]
    return [
        {"fixed cost us": round(1e6 * cost)} | {name: times[i] / found[paper][i] for name, times in found.items()}
        for i, cost in enumerate(FIXED_COSTS_S)
    ]


def _additive_timer(fixed_s: float) -> Timer:
    """Kernels as the paper prices them, collectives as measured, each with a fixed cost; messages without."""
    hardware = catalog.cluster(CLUSTER)
    measured, additive = cluster_timer(hardware), AdditiveProducts()

    def timer(ops: Sequence[Op]) -> np.ndarray:
        kernels = [op for op in ops if isinstance(op, KernelOp)]
        time_s = measured([op for op in ops if not isinstance(op, KernelOp)]).tolist()
        of_kernels = additive.times(hardware.device, kernels).time_s.tolist()
        found = [(of_kernels if isinstance(op, KernelOp) else time_s).pop(0) for op in ops]
        free = [isinstance(op, Collective) and op.collective == "send_recv" for op in ops]
        return np.array(found) + fixed_s * ~np.array(free, bool)

    return timer


def _beside(found: ProgramSearch, paper: str) -> dict[str, Any]:
    best = found.candidates[0]
    theirs = next((c.step_time_s for c in found.candidates if c.dtpk == paper), float("inf"))
    ratio = theirs / best.step_time_s
    return {
        "ours": best.dtpk, "paper's/ours": ratio, "held": ratio <= 1 + TOLERANCE, "evaluated": found.evaluated,
        "fit": len(found.candidates),
    }  # fmt: skip


def _baselines(found: ProgramSearch) -> dict[str, float]:
    """Speedup of the best over pure data, tensor and pipeline parallelism, infinite where that does not fit."""
    best = found.candidates[0].step_time_s
    pure = {"vs D": ("data", DEVICES), "vs T": ("tensor", DEVICES), "vs P": ("pipeline", DEVICES)}
    return {
        name: min(
            (c.step_time_s for c in found.candidates if getattr(c.degrees, field) == n), default=float("inf")
        ) / best
        for name, (field, n) in pure.items()
    }  # fmt: skip


def as_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as the page prints them."""
    table = pd.DataFrame(rows)
    if "additive" in table:
        table["additive"] = table["additive"].fillna("")
    for name in ("paper's/ours", "vs D", "vs T", "vs P"):
        table[name] = ["-" if not np.isfinite(x) else f"{x:.2f}" for x in table[name].astype(float)]
    return table
