"""Kinds of kernels hidden from the plan, one at a time:
`PERFMODEL_DATA=DIR python training/kinds_left_out.py`.

Where a device's own measurements lack a kind, its time is either a ratio to a measured kind or that
of devices of the same silicon. Every kind that a device and another one of its silicon have is
hidden on the device, and predicted both ways from what is left. (The regressors have seen the rows:
what is compared is the plan, not the network.) Writes training/kinds_left_out.md.
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.cost.learn import (
    PriceQuery,
    Query,
    Regressor,
    kernel_records,
    load_regressor,
    shipped_folder,
)
from perfmodel.cost.learn.intervals import absolute_percent
from perfmodel.cost.learn.plans import KernelRequest, Plan, ratio_plan
from perfmodel.cost.learn.stack import Stack
from perfmodel.cost.learn.training import Samples, gather
from perfmodel.ingest import kernel_table_paths
from perfmodel.ingest.tables import read_table, write_text
from perfmodel.ops import KernelKind
from perfmodel.session import Cache

HERE = Path(__file__).parent
FEWEST = 10
PLANS = 4096
"""Remembered of each regressor."""
MOST = 400
"""Rows of a kind that are predicted."""
TITLE = "# Kinds hidden on a device: mean of the kinds' median absolute errors in per cent"


class RatioOnly(Regressor):
    """Answers by a ratio to another kind where there is one, never by a sibling."""

    def plan(self, query: Query, kind: KernelKind, *, direct: bool = True) -> Plan:
        """The regressor's plan for a kind of kernel, without siblings."""
        of_device = [
            i for i, stack in enumerate(self.stacks) if stack.figures.same_kernels(query.figures)
        ]
        ratio = ratio_plan(KernelRequest(self.stacks, query.figures, kind), of_device)
        return ratio or super().plan(query, kind, direct=direct)


def main() -> None:
    """Predict kinds of kernels that are left out, print the errors and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", default=os.environ.get("PERFMODEL_DATA"), help="folder with the public tables"
    )
    data = parser.parse_args().data
    if data is None:
        parser.error("name the folder of the tables with --data or PERFMODEL_DATA")
    frames = [read_table(path) for path in kernel_table_paths(data)]
    rows: list[dict[str, Any]] = []
    for name in kernel_records():
        regressor = load_regressor(shipped_folder() / f"{name}.safetensors")
        samples = gather(frames, regressor.family, regressor.dtypes)
        rows += hidden_kinds(regressor, samples)
    table = pd.DataFrame(rows)
    # Where no sibling answers, both ways are the same and nothing is compared.
    by_sibling: Any = table[table["mode"] == "sibling"].groupby("regressor")
    summary = by_sibling.agg(
        kinds=("kind", "size"), ratio=("ratio", "mean"), sibling=("ours", "mean")
    ).reset_index()
    hidden: Any = table.groupby("regressor")["kind"].size()
    lines = [
        TITLE,
        "",
        "| regressor | kinds hidden | answered by a sibling | those by a ratio | by the sibling |",
    ]
    lines.append("|---|--:|--:|--:|--:|")
    for name, kinds, ratio, sibling in summary.itertuples(index=False):
        lines.append(f"| {name} | {hidden[name]} | {kinds} | {ratio:.1f} | **{sibling:.1f}** |")
    text = "\n".join(lines) + "\n"
    write_text(HERE / "kinds_left_out.md", text)
    print(table.to_string(index=False, float_format="%.1f"))
    print(text)


def hidden_kinds(regressor: Regressor, samples: Samples) -> Iterator[dict[str, Any]]:
    """One row per stack and kind that some device of the same silicon has too."""
    keys = np.array([s.key for s in samples.stacks], object)[samples.stack]
    for stack in regressor.stacks:
        figures = stack.figures
        siblings = [
            candidate
            for candidate in regressor.stacks
            if candidate.figures.same_silicon(figures)
            and not candidate.figures.same_kernels(figures)
        ]
        for kind in sorted(stack.kinds):
            is_kind = samples.rows.by_kind(lambda row_kind, kind=kind: row_kind == kind)
            index = np.flatnonzero((keys == stack.key) & is_kind)
            if len(index) < FEWEST or not any(kind in sibling.kinds for sibling in siblings):
                continue
            # Evenly over the rows, which tables sort by shape.
            index = index[:: max(1, len(index) // MOST)]

            # Hidden from all software of the device, whose kernels would tell.
            stacks = []
            for member in regressor.stacks:
                same_device = member.figures.same_kernels(figures)
                stacks.append(without(member, kind) if same_device else member)
            # Plans were made with the kind in view: each regressor begins without any.
            ours = replace(regressor, stacks=tuple(stacks), _plans=Cache(PLANS))
            ratio = RatioOnly(**vars(replace(ours, _plans=Cache(PLANS))))
            query = Query(figures)
            yield {
                "regressor": regressor.name,
                "device": figures.name,
                "source": stack.source,
                "kind": str(kind),
                "n": len(index),
                "mode": ours.plan(query, kind).mode,
                "ratio": error(ratio, samples, index, query),
                "ours": error(ours, samples, index, query),
            }


def without(stack: Stack, kind: KernelKind) -> Stack:
    """A stack that was not asked for `kind`."""
    kinds = {name: count for name, count in stack.kinds.items() if name != kind}
    return replace(stack, kinds=kinds)


def error(regressor: Regressor, samples: Samples, index: np.ndarray, query: Query) -> float:
    """Median absolute error of a query's rows, in per cent."""
    # All rows are of one query, and were launched in one way.
    query_of_row = np.zeros(len(index), np.int64)
    host_launch = samples.stacks[samples.stack[index[0]]].host_launch
    rows = samples.rows.take(index)
    predicted = regressor.predict(PriceQuery(rows, (query,), query_of_row, host_launch=host_launch))
    return float(np.median(absolute_percent(np.log(samples.time_s[index]) - predicted.log_time)))


if __name__ == "__main__":
    main()
