"""Sections of the report on searches: each gives its text and its figures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from studies import search_distir as distir
from studies import search_groups as groups
from studies import search_megatron as megatron
from studies.search_report import held, markdown_table, percent

Section = tuple[str, dict[str, Any]]


def _distir(_data: Path) -> Section:
    training, inference = distir.training_table(), distir.inference_table()
    text = f"""## DistIR: D/T/P/K on 16 V100

One operation at a time per device, 75 layouts of a batch, 32 GB, as in the paper (sections 2.1, 5.1, 5.2); updates
without states and ReLU's gradient of its input, as in the authors' code. These rules of theirs were put in after a run
under this library's own (collectives and sends beside kernels, ReLU in place) had been seen: columns `usual`.

### Table 2: training of MLPs

The same layout, or the paper's within {distir.TOLERANCE:.0%} of ours by our evaluation: {held(training["held"])} rows;
{held(training["same"])} the same.

{markdown_table(training)}
Where we differ, we cut a large batch into more micro-batches on deeper pipelines. The paper prices products by a linear
regression in sizes (section 4), which adds the time of reading the weights to that of computing; kernels as measured
overlap the two, so that small micro-batches lose less. `additive`: the same search with kernels priced that way, at
nominal rates: {held(training["additive, held"])}. `usual` rules: {held(training["usual, held"])}.

### Table 3: inference of GPT-2, {distir.TOKENS} tokens, batch free

The paper's choice within {distir.TOLERANCE:.0%} of our best throughput: {held(inference["held"])}.

{markdown_table(inference)}
At 175B two micro-batches on two stages leave a third of each device idle, whatever the kernels: more of them are faster
by our evaluation, unless every kernel has a fixed cost (`validate/distir.md`). The paper's own ranking is weakest there
(table 4: 0.84).
"""
    return text, {"training": _records(training), "inference": _records(inference)}


def _megatron(data: Path) -> Section:
    table = megatron.megatron_table(data)
    error = np.abs(np.asarray(table["predicted_s"]) / np.asarray(table["measured_s"]) - 1)
    within = {name: np.sum(np.asarray(table[f"{name}, over best"]) <= megatron.WITHIN) for name in ("all", "rule")}
    text = f"""## Megatron-LM: the layouts of table 1 (SC21)

In the top {megatron.TOP:.0%} and within {megatron.WITHIN:.0%} of our best: {held(table["all, held"])} rows of the whole
space, {held(table["rule, held"])} of what takeaway 1 leaves; within {megatron.WITHIN:.0%} alone: {within["all"]} and
{within["rule"]}. Space `all`: tp up to 8, pp and interleaving that divide the layers, dp, micro-batch up to 16, full
recompute, no ZeRO; `rule`: pipelines only with tp=8. From 76B on so few fit that the top is the first alone.

{markdown_table(table)}
This is not met. The authors did not search (section 1: they suggest heuristics): for 18B and 39B their rule takes tp=8,
where tp=2 with an interleaved pipeline needs the same memory and, by our evaluation, a fifth less time. Their own
layouts' times are predicted within {percent(float(np.median(error)))} (median) of what they measured. No run of another
layout of these models is in our tables, so that the difference is not tested.
"""
    return text, {"rows": _records(table)}


def _groups(data: Path) -> Section:
    runs = groups.predicted_runs(data)
    table = groups.group_table(runs)
    rows, fits = [], []
    for source in [*table["source"].unique(), "all"]:
        some, ran = (frame if source == "all" else frame.query("source == @source") for frame in (table, runs))
        rows.append({"source": source} | groups.group_summary(some))
        fits.append({"source": source} | groups.fit_figures(ran))
    whole, fit = rows[-1], fits[-1]
    sweep = table[table["source"].str.startswith("ultrascale")]
    few = np.asarray(sweep["n_devices"]) < 128
    small, large = (float(np.mean(np.asarray(sweep["regret"])[part])) for part in (few, ~few))
    text = f"""## Choices among published runs

Groups of at least two timed runs of the same model, batch and devices (`regret`: measured time of the run predicted
fastest over that of the fastest, less one). Median regret {percent(whole["regret, median"])} (bar 3 %), fits or not
right in {percent(fit["accuracy"])} (bar 90 %). `any run`: what the slowest run costs.

{markdown_table(pd.DataFrame(rows))}
{markdown_table(pd.DataFrame(fits))}
The median regret of all groups is below the bar; the mean is not. In the playbook's sweep it is
{percent(small)} over groups below 128 devices and {percent(large)} from there on, where we take steps to
be up to several times faster than that software ran them. The sweep's failed runs "crashed or ran out of memory";
all that ran are said to fit. vTrain has no failed runs, so that its share is no
merit. Most of BLOOM's groups are two or three runs within a few per cent of one another.
"""
    return text, {"choice": rows, "fits": fits, "groups": _records(table)}


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows for JSON, which has no infinity and no NaN."""
    finite = table.replace([np.inf, -np.inf], np.nan).astype(object)
    return finite.where(finite.notna(), None).to_dict("records")  # pyright: ignore[reportReturnType]


SEARCH_SECTIONS: Final[dict[str, Callable[[Path], Section]]] = {
    "distir": _distir, "megatron": _megatron, "groups": _groups,
}  # fmt: skip
"""Section -> what writes it from the folder of measurement tables."""
