"""Chimera's searches on Piz Daint (Li and Hoefler, arXiv 2107.06925, section 4.2): schemes, depth and micro-batch."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pandas as pd
from studies.search_rank import USUAL, Ranked, rank

from perfmodel import catalog
from perfmodel.spec import Job

Choice = tuple[int, int, str]
"""Pipeline depth, micro-batch and recompute."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model on so many nodes of one P100."""

    model: str
    nodes: int
    batch: int
    seq_len: int
    best: dict[str, Choice]
    """Best depth and micro-batch of every scheme, best scheme first (figures 13 to 15)."""
    throughput: dict[str, float]
    """Relative to Chimera, at the largest scale of the weak-scaling figure (section 4.2.3)."""


STUDIES: Final = (
    Study(
        model="bert-48", nodes=32, batch=512, seq_len=128,
        best={
            "chimera": (4, 8, "none"), "pipedream-2bw": (4, 16, "full"), "1f1b": (4, 4, "none"),
            "gpipe": (4, 4, "full"), "gems": (4, 32, "none"),
        },
        throughput={"pipedream-2bw": 1 / 1.17, "1f1b": 1 / 1.19, "gems": 1 / 2.41},
    ),
    Study(
        model="gpt2-1.3b", nodes=512, batch=512, seq_len=632,
        best={
            "chimera": (32, 1, "none"), "pipedream-2bw": (16, 1, "full"), "1f1b": (16, 1, "full"),
            "gpipe": (8, 1, "full"), "gems": (8, 2, "none"),
        },
        throughput={"pipedream-2bw": 1 / 1.16, "1f1b": 1 / 1.38, "gpipe": 1 / 1.42, "gems": 1 / 2.34},
    ),
)  # fmt: skip
"""`1f1b` is DAPPLE. PipeDream is left out: the paper gives it smaller batches than the others."""
RATIO: Final = "paper's/ours"
"""Column: time of the paper's choice over that of ours."""
SHARES: Final = (1.0, 0.5, 0.25, 0.125)
"""Of the nominal bandwidth."""
MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32)


def chimera_search(study: Study, scheme: str, bandwidth: float = 1.0) -> Ranked:
    """Every depth, micro-batch and recompute (none or full) of a scheme that fits, fastest first.

    fp32 and Adam in eager PyTorch, as the authors' code has it. Chimera reduces the gradients of outer stages in
    bubbles (`eager_opt`), the others after the last backward. `bandwidth`: share of the network's nominal one.
    """
    model = catalog.model(study.model)
    job = Job(global_batch=study.batch, seq_len=study.seq_len, dtype="fp32", flash_attention=False, fused_kernels=False)
    stages = [pp for pp in (2, 4, 8, 16, 32, 64) if model.layers % pp == 0]  # pyright: ignore[reportAttributeAccessIssue]
    space = replace(
        USUAL, pp=tuple(stages), micro_batch=MICRO_BATCHES, schedule=(scheme,), recompute=("none", "full"),
        overlap_grad_reduce=(scheme == "chimera",),
    )  # fmt: skip
    cluster = catalog.cluster("piz-daint")
    level = cluster.levels[0]
    slower = replace(level, bandwidth_bytes_per_s=bandwidth * level.bandwidth_bytes_per_s)
    return rank(model, replace(cluster, levels=(slower,)), job, study.nodes, space)


def chimera_table(study: Study) -> pd.DataFrame:
    """Schemes in the paper's order: its choice and ours, what its choice takes more by our evaluation, and what each
    scheme does of Chimera's throughput, all at the paper's choices."""
    rows = []
    for scheme, choice in study.best.items():
        found = chimera_search(study, scheme)
        choices = [(layout.pp, layout.micro_batch, layout.recompute) for layout in found.layouts]
        theirs = found.step_s[choices.index(choice)] if choice in choices else np.inf
        rows.append(
            {
                "scheme": scheme, "paper p, b": _written(choice), "ours p, b": _written(choices[0]),
                "same": choices[0] == choice, RATIO: float(theirs / found.step_s[0]),
                "our best, sequences/s": float(study.batch / found.step_s[0]),
                "at the paper's choice": float(study.batch / theirs),
                "paper, of Chimera's": study.throughput.get(scheme, 1.0 if scheme == "chimera" else np.nan),
            }
        )  # fmt: skip
    table = pd.DataFrame(rows)
    at_choice = table["at the paper's choice"]
    table.insert(7, "ours, of Chimera's", at_choice / at_choice.iloc[0])
    return table


def bandwidth_table(study: Study) -> pd.DataFrame:
    """Chimera's own choice where the software gets only a share of the network."""
    rows = []
    for share in SHARES:
        found = chimera_search(study, "chimera", share)
        choices = [(layout.pp, layout.micro_batch, layout.recompute) for layout in found.layouts]
        theirs = found.step_s[choices.index(study.best["chimera"])]
        rows.append({"of 10.2 GB/s": share, "ours p, b": _written(choices[0]), RATIO: float(theirs / found.step_s[0])})
    return pd.DataFrame(rows)


def _written(choice: Choice) -> str:
    """As in the paper's figures: R for recompute."""
    return f"{choice[0]}, {choice[1]}" + (", R" if choice[2] == "full" else "")
