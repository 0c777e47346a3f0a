"""The layouts of Megatron-LM's weak scaling (Narayanan et al. 2021, arXiv 2104.04473, table 1) in searches of ours."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from studies.search_rank import USUAL, Ranked, rank

from perfmodel.errors import PerfModelError
from perfmodel.spec import Layout, Transformer
from perfmodel.validation import Case, read_case, read_rows

TOP: Final = 0.05
WITHIN: Final = 0.05
ROWS: Final = "megatron-sc21-t1"
NODE: Final = 8


def megatron_table(data: Path) -> pd.DataFrame:
    """Each row of table 1: where its layout ranks, and what it takes more than our best, in two spaces.

    `all`: tp up to a node, pp, dp, micro-batch up to 16 and interleaving, with what the authors always had (full
    recompute, no ZeRO, reductions after the last backward). `rule`: of these, what their takeaway 1 leaves (section
    3.2): tensor parallelism up to the devices of a node, pipelines only beyond. The authors did not search (section
    1 says so) but followed such rules.
    """
    runs = read_rows(data / "published" / "megatron.csv")
    chosen = runs[runs["case_id"].str.startswith(ROWS)]
    rows_of: Any = chosen.astype(object).where(chosen.notna(), None)
    cases = [read_case(row) for row in rows_of.to_dict("records")]
    rows = []
    for case, measured_s in zip(cases, chosen["measured_iter_time_s"], strict=True):
        found = megatron_search(case)
        place = found.place(case.layout)
        row: dict[str, Any] = {
            "model": case.model.name, "devices": case.layout.devices, "paper t, p, v, b": _short(case.layout),
            "measured_s": float(measured_s), "predicted_s": np.nan if place is None else float(found.step_s[place]),
            "our best": _short(found.layouts[0]),
        }  # fmt: skip
        for name, some in (("all", found), ("rule", by_rule(found))):
            row |= {f"{name}, {key}": value for key, value in _standing(some, case.layout).items()}
        rows.append(row)
    return pd.DataFrame(rows)


def megatron_search(case: Case) -> Ranked:
    """All layouts of a case's model and devices that fit, fastest first.

    Raises:
        PerfModelError: the model is no transformer.
    """
    if not isinstance(case.model, Transformer):
        raise PerfModelError(f"{case.case_id}: Megatron-LM trains transformers, {case.model.name} is none")
    divisors = tuple(n for n in range(1, case.model.layers + 1) if case.model.layers % n == 0)
    space = replace(
        USUAL, tp=(1, 2, 4, 8), pp=divisors, vpp=divisors, micro_batch=(1, 2, 4, 8, 16), recompute=("full",),
        overlap_grad_reduce=(False,), overlap_param_gather=(False,),
    )  # fmt: skip
    return rank(case.model, case.cluster, case.job, case.layout.devices, space)


def by_rule(found: Ranked) -> Ranked:
    """What takeaway 1 leaves of layouts that fit: pp > 1 only with a full node of tp."""
    return found.only([layout.pp == 1 or layout.tp == NODE for layout in found.layouts])


def _standing(found: Ranked, layout: Layout) -> dict[str, Any]:
    place = found.place(layout)
    if place is None:
        return {"rank": None, "of": len(found.layouts), "over best": np.inf, "held": False}
    over = float(found.step_s[place] / found.step_s[0] - 1)
    # the first is in the top however few there are
    top = place == 0 or place + 1 <= TOP * len(found.layouts)
    return {"rank": place + 1, "of": len(found.layouts), "over best": over, "held": bool(top and over <= WITHIN)}


def _short(layout: Layout) -> str:
    return f"{layout.tp}, {layout.pp}, {layout.vpp}, {layout.micro_batch}"
