"""DistIR's grid searches (arXiv 2111.05426, tables 2 and 3): D/T/P/K on the 16 V100 of a DGX-2."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

import numpy as np
import pandas as pd
from studies.search_rank import USUAL, Ranked, rank

from perfmodel import catalog
from perfmodel.cost import EventTimes, PricesKernels
from perfmodel.ops import KernelOp
from perfmodel.planning.layouts import SearchSpace
from perfmodel.prediction import EAGER
from perfmodel.spec import Device, Framework, Job, Layout

CLUSTER: Final = "dgx-2"
DEVICES: Final = 16
PAPER_SPEEDUPS: Final[dict[str, dict[int, tuple[float | None, float | None, float | None]]]] = {
    "mlp-1b": {
        128: (7.5, 1.1, 21.7),
        256: (6.3, 1.1, 21.2),
        512: (4.1, 1.0, 12.9),
        1024: (2.9, 1.0, 9.5),
        2048: (2.2, 1.2, 7.2),
        4096: (1.7, 1.4, 5.1),
        8192: (1.3, 1.6, 3.6),
        16384: (1.1, 1.9, 2.7),
        32768: (1.0, 2.1, 2.3),
        65536: (1.0, None, 2.3),
        131072: (1.0, None, 2.4),
        262144: (1.0, None, 2.4),
    },
    "mlp-17b": {
        128: (None, 1.1, 43.8),
        256: (None, 1.0, 35.3),
        512: (None, 1.0, 22.4),
        1024: (None, 1.0, 15.6),
        2048: (None, 1.0, 10.0),
        4096: (None, 1.1, 6.1),
        8192: (None, 1.2, 3.7),
        16384: (None, None, 2.4),
        32768: (None, None, 1.5),
        65536: (None, None, 1.3),
        131072: (None, None, None),
    },
    "mlp-103b": {
        128: (None, 1.0, 61.7),
        256: (None, 1.0, None),
        512: (None, 1.0, None),
        1024: (None, 1.0, None),
    },
    "gpt2-1.6b": {32768: (1.0, 3.7, 2.9)},
    "gpt2-13b": {16384: (1.0, 2.6, 2.0)},
    "gpt2-175b": {1024: (None, 1.3, 5.6)},
}
"""Tables 2 and 3: throughput of the choice over that of pure data, tensor and pipeline parallelism,
as measured; None where the baseline did not fit."""
BASELINES: Final = {"D": "16/1/1/1", "T": "1/16/1/1", "P": "1/1/16/128"}
"""The pure layouts; the pipeline's K is fixed at 8 P = 128 (section 5.2)."""
MICRO_BATCHES: Final = tuple(1 << i for i in range(1, 8))
"""Section 5.1: 2 to 128 for layouts with a pipeline, 1 for others: 75 layouts of a batch, as table
1 counts."""
COUNTS: Final = (
    "micro_batches >= min(pp, 2)",
    f"micro_batches <= 1 + {MICRO_BATCHES[-1] - 1} * (min(pp, 2) - 1)",
)
TOLERANCE: Final = 0.03
DISTIR: Final = Framework().replace(
    tp_overlap_loss=1.0, blocking_sends=True, contends=False, context_bytes=0.0, memory_margin=0.0
)
"""Section 2.1: a device executes one operation at a time, so that nothing hides behind kernels.
Section 3.3 and 5.2: the search leaves out what the values of a program alone make larger than 32
GB."""
TRAINING: Final[dict[str, dict[int, str]]] = {
    "mlp-1b": {
        128: "1/16/1/1",
        256: "1/16/1/1",
        512: "1/16/1/1",
        1024: "1/16/1/1",
        2048: "2/8/1/1",
        4096: "4/4/1/1",
        8192: "4/4/1/1",
        16384: "8/2/1/1",
        32768: "8/2/1/1",
        65536: "16/1/1/1",
        131072: "16/1/1/1",
        262144: "16/1/1/1",
    },
    "mlp-17b": {
        128: "1/16/1/1",
        256: "1/16/1/1",
        512: "1/16/1/1",
        1024: "1/16/1/1",
        2048: "1/16/1/1",
        4096: "2/8/1/1",
        8192: "4/4/1/1",
        16384: "4/4/1/1",
        32768: "2/4/2/8",
        65536: "4/2/2/8",
        131072: "4/2/2/32",
    },
    "mlp-103b": {128: "1/16/1/1", 256: "1/16/1/1", 512: "1/16/1/1", 1024: "1/16/1/1"},
}
"""Table 2: the best D/T/P/K by model and batch."""
INFERENCE: Final = {
    "gpt2-1.6b": (32768, "16/1/1/1"),
    "gpt2-13b": (16384, "16/1/1/1"),
    "gpt2-175b": (1024, "1/8/2/2"),
}
"""Table 3: batch and D/T/P/K."""
BATCHES: Final = tuple(1 << i for i in range(7, 21))
"""Figure 6: powers of two between 128 and 1,048,576."""
TOKENS: Final = 8
"""Tokens of a sequence: GPT-2's input in figure 4 is (batch, 8, hidden)."""


@dataclass(frozen=True)
class AdditiveProducts:
    """Kernels priced by the form of the paper's regressions (section 4), so that memory and compute
    time add up.

    At nominal rates: the paper prints no coefficients, and nothing is fitted.
    """

    def times(self, device: Device, ops: Sequence[KernelOp]) -> EventTimes:
        """Seconds of each kernel: bytes over bandwidth plus FLOPs over the peak rate."""
        # The two are added, where our kernels overlap them.
        memory_s = np.array([op.bytes for op in ops]) / device.memory_bandwidth_bytes_per_s
        time_s = memory_s + np.array([op.flops / device.peak.flops_per_s(op.dtype) for op in ops])
        return EventTimes(time_s, time_s, time_s, ("analytical",) * len(ops))


def training_search(
    model: str, batch: int, kernels: PricesKernels | None = None, *, usual: bool = False
) -> Ranked:
    """Layouts of one row of table 2 that fit, fastest first; `kernels` instead of the calibrated
    prices.

    Half precision throughout and an update without states (figure 2); gradients of ReLU are taken
    of its input, as in the authors' code (microsoft/dist-ir, examples/mlp.py). `usual`: ReLU in
    place, and transfers and collectives beside kernels, as this library has them unless told
    otherwise.
    """
    job = Job(
        global_batch=batch,
        seq_len=1,
        dtype="fp16",
        grad_dtype="fp16",
        optimizer="plain-sgd",
        fused_kernels=usual,
    )
    # The rules of the paper's simulator, or this library's own.
    framework = EAGER if usual else DISTIR
    return _rank(model, job, "1f1b", framework, kernels)


def training_table() -> pd.DataFrame:
    """Table 2 row by row: the paper's layout, ours, and the ratio of their times by our evaluation;
    beside it the same with `AdditiveProducts` instead of measured kernels."""
    rows = []
    for model, batches in TRAINING.items():
        for batch, paper in batches.items():
            row = _compare(training_search(model, batch), batch, paper)
            usual = _compare(training_search(model, batch, usual=True), batch, paper)
            additive = _compare(training_search(model, batch, AdditiveProducts()), batch, paper)
            row = {"model": model, "batch": batch, "paper": paper} | row
            # Two searches under other rules tell which of them decide a choice.
            for prefix, variant in (("additive", additive), ("usual", usual)):
                for key in ("ours", "paper's/ours", "held"):
                    row[f"{prefix}, {key}"] = variant[key]
            rows.append(row)
    return pd.DataFrame(rows)


def _compare(ranked: Ranked, batch: int, paper: str) -> dict[str, object]:
    """Our choice for a row, and how much longer the paper's takes."""
    names = [name(layout, batch) for layout in ranked.layouts]
    # A choice that does not fit here takes infinitely long.
    ratio = ranked.step_s[names.index(paper)] / ranked.step_s[0] if paper in names else np.inf
    return {
        "ours": names[0],
        "same": names[0] == paper,
        "paper's/ours": float(ratio),
        "held": names[0] == paper or bool(ratio <= 1 + TOLERANCE),
    }


def inference_search(model: str) -> pd.DataFrame:
    """Evaluate every batch and layout that fits for one row of table 3, highest throughput
    first."""
    parts = []
    # The batch is free, so that throughputs are compared instead of times.
    for batch in BATCHES:
        job = Job(
            global_batch=batch,
            seq_len=TOKENS,
            dtype="fp16",
            mode="inference",
            flash_attention=False,
            fused_kernels=False,
        )
        ranked = _rank(model, job, "gpipe", DISTIR)
        parts.append(
            pd.DataFrame(
                {
                    "batch": batch,
                    "layout": [name(layout, batch) for layout in ranked.layouts],
                    "per_s": batch / ranked.step_s,
                }
            )
        )
    return pd.concat(parts).sort_values("per_s", ascending=False, kind="stable", ignore_index=True)


def inference_table() -> pd.DataFrame:
    """Table 3: batch and D/T/P/K of the paper and ours, and how much throughput the paper's gives
    up by our model."""
    rows = []
    for model, (batch, paper) in INFERENCE.items():
        ranked = inference_search(model)
        best = ranked.iloc[0]
        is_theirs = (ranked["batch"] == batch) & (ranked["layout"] == paper)
        theirs = np.asarray(ranked["per_s"])[is_theirs]
        lost = best["per_s"] / theirs[0] if len(theirs) else np.inf
        rows.append(
            {
                "model": model,
                "paper": f"{batch} / {paper}",
                "ours": f"{best['batch']} / {best['layout']}",
                "same layout": best["layout"] == paper,
                "ours/paper's": float(lost),
                "held": lost <= 1 + TOLERANCE,
            }
        )
    return pd.DataFrame(rows)


def name(layout: Layout, batch: int) -> str:
    """D/T/P/K of a layout."""
    return f"{layout.dp}/{layout.tp}/{layout.pp}/{batch // (layout.dp * layout.micro_batch)}"


def _rank(
    model: str, job: Job, schedule: str, framework: Framework, kernels: PricesKernels | None = None
) -> Ranked:
    """Evaluate layouts of the paper's space on its machine, fastest first."""
    return rank(
        catalog.model(model),
        catalog.cluster(CLUSTER),
        job,
        DEVICES,
        space(job, schedule),
        constraints=COUNTS,
        framework=framework,
        kernels=kernels,
    )


def space(job: Job, schedule: str) -> SearchSpace:
    """All D/T/P/K of 16 devices that divide the batch; `COUNTS` holds K to section 5.1's."""
    powers = tuple(1 << i for i in range(5))
    # The space is of sizes, the paper's of counts: a micro-batch is the batch over all counts of
    # all replicas.
    counts = {dp * count for dp, count in product(powers, (1, *MICRO_BATCHES))}
    return replace(
        USUAL,
        tp=powers,
        pp=powers,
        schedule=(schedule,),
        overlap_grad_reduce=(False,),
        micro_batch=tuple(
            job.global_batch // n for n in sorted(counts, reverse=True) if job.global_batch % n == 0
        ),
    )
