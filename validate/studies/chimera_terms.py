"""Which terms of Piz Daint decide what Chimera's paper found: added one after another, and varied."""

from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd
from studies.chimera import STUDIES, Conditions, chimera_table

from perfmodel import catalog
from perfmodel.prediction import EAGER

RATES: Final = (1.2e9, 2.4e9, 5.0e9, 10.2e9)
"""From gloo on one core over two of its threads to the network's own rate."""
MARGINS: Final = (0.04, 0.12, 0.2, 0.25)
"""From what is always lost to what DeepSpeed saw with PyTorch of 2019: more than 30 % at worst (ZeRO, arXiv 1910.02054,
section 3.2)."""


def cumulative_terms() -> list[tuple[str, Conditions]]:
    """From the description that knows the hardware alone to that of the software that ran."""
    hardware = Conditions(
        cluster=catalog.cluster("piz-daint"), framework=EAGER, formula_gelu=False, stashes=False, full_pipelines=False
    )
    eager = replace(hardware, framework=replace(catalog.framework("chimera@2021"), memory_margin=EAGER.memory_margin))
    gelu = replace(eager, formula_gelu=True)
    pipelines = replace(gelu, full_pipelines=True)
    stashes = replace(pipelines, stashes=True)
    allocator = replace(stashes, framework=catalog.framework("chimera@2021"))
    gloo = replace(allocator, cluster=catalog.cluster("piz-daint-gloo"))
    return [
        ("hardware alone, today's kernels", hardware), ("+ kernels of their code", eager), ("+ GELU written out", gelu),
        ("+ full pipelines", pipelines), ("+ 2BW's copies and loads", stashes), ("+ allocator of 2020", allocator),
        ("+ gloo over TCP", gloo),
    ]  # fmt: skip


def agreement(conditions: Conditions) -> dict[str, Any]:
    """Of both models' choices: how many are the same, and the same in depth; by how much throughputs are off that the
    paper states (mean of |ours / paper's - 1|), and those of DAPPLE and PipeDream-2BW."""
    found: dict[str, Any] = {}
    tables = [chimera_table(study, conditions) for study in STUDIES]
    both = pd.concat(tables)
    found["choices"] = f"{both['same'].sum()} of {len(both)}"
    found["depths"] = f"{both['same p'].sum()} of {len(both)}"
    others = both[both["scheme"] != "chimera"].dropna()
    ratio = np.asarray(others["ours, of Chimera's"] / others["paper, of Chimera's"])
    found["throughputs off"] = float(np.abs(ratio - 1).mean())
    for study, table in zip(STUDIES, tables, strict=True):
        rows = table.set_index("scheme")["ours, of Chimera's"]
        for scheme, name in (("1f1b", "DAPPLE"), ("pipedream-2bw", "2BW")):
            found[f"{study.model}, over {name}"] = float(1 / rows[scheme])
    return found


PAPER: Final = {
    "choices": "", "depths": "", "throughputs off": np.nan, "bert-48, over DAPPLE": 1.19, "bert-48, over 2BW": 1.17,
    "gpt2-1.3b, over DAPPLE": 1.38, "gpt2-1.3b, over 2BW": 1.16,
}  # fmt: skip


def terms_table() -> pd.DataFrame:
    """Agreement as terms are added, the paper's own figures last."""
    rows = [{"term": name} | agreement(on) for name, on in cumulative_terms()]
    return pd.DataFrame([*rows, {"term": "paper"} | PAPER])


def sensitivity_table() -> pd.DataFrame:
    """Agreement over the two figures of the description that are least known: the rate at which gloo carried data, and
    the memory that was lost."""
    rows = []
    for rate in RATES:
        for margin in MARGINS:
            on = Conditions().at_rate(rate).with_margin(margin)
            rows.append({"GB/s": rate / 1e9, "memory lost": f"{margin:.0%}"} | agreement(on))
    return pd.DataFrame(rows)
