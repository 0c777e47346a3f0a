"""DistSim's use-case (arXiv 2306.08423, section 6): BERT-exLarge on 16 A10, every xM xP xD with 16 sequences a step."""

from dataclasses import replace
from typing import Any, Final

import pandas as pd
from studies.search_rank import USUAL, Ranked, rank

from perfmodel import catalog
from perfmodel.spec import Job, Layout

DEVICES: Final = 16
WITHIN: Final = 0.15
ASSUMED: Final = Job(global_batch=16, seq_len=512, dtype="fp16", flash_attention=False, grad_dtype="fp16")
"""The batch is the paper's; BERT's usual length and element type, and Megatron-LM's kernels (the paper generates its
models with Megatron-LM), are assumed: it states none of them."""
PAPER: Final = {
    "best": "1M8P2D",
    "worst": "16M1P1D",
    "best/worst": 7.488,
    "best/second": 2.97 / 2.90,
    "iterations_per_s": 2.97,
}
"""Table 2, measured; section 6 names the two layouts. The second-best is not named."""


def distsim_search(job: Job = ASSUMED, order: str = Layout().order) -> Ranked:
    """All 15 strategies. A micro-batch is one sequence: the only size that all of them, 16D too, can run."""
    powers = tuple(1 << i for i in range(5))
    # Dapple's schedule; Megatron-LM of the time reduced gradients after the last backward
    space = replace(USUAL, tp=powers, pp=powers, overlap_grad_reduce=(False,), order=(order,))
    return rank(catalog.model("bert-exlarge"), catalog.cluster("a10x4"), job, DEVICES, space)


def distsim_table() -> tuple[pd.DataFrame, dict[str, Any]]:
    """Strategies by predicted throughput, and the paper's figures beside ours."""
    found = distsim_search()
    table = pd.DataFrame(
        {"strategy": [strategy(layout) for layout in found.layouts], "iterations_per_s": 1 / found.step_s}
    )
    return table, _figures(found)


def distsim_sensitivity() -> pd.DataFrame:
    """The same search under other readings of what the paper leaves open."""
    readings = {
        "as assumed": ASSUMED,
        "eager kernels": replace(ASSUMED, fused_kernels=False),
        "128 tokens": replace(ASSUMED, seq_len=128),
        "fp32": replace(ASSUMED, dtype="fp32", grad_dtype="fp32"),
        "fp32, eager kernels": replace(ASSUMED, dtype="fp32", grad_dtype="fp32", fused_kernels=False),
    }
    found = {name: distsim_search(job) for name, job in readings.items()}
    found["pipeline ranks adjacent"] = distsim_search(order="tp-cp-pp-ep-dp")
    return pd.DataFrame([{"reading": name} | _figures(ranked) for name, ranked in found.items()])


def _figures(found: Ranked) -> dict[str, Any]:
    step_s = found.step_s
    return {
        "best": strategy(found.layouts[0]),
        "second": strategy(found.layouts[1]),
        "worst": strategy(found.layouts[-1]),
        "best/second": float(step_s[1] / step_s[0]),
        "best/worst": float(step_s[-1] / step_s[0]),
        "iterations_per_s": float(1 / step_s[0]),
    }


def strategy(layout: Layout) -> str:
    """DistSim's name of a layout (section 5.1)."""
    return f"{layout.tp}M{layout.pp}P{layout.dp}D"
