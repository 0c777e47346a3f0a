"""Searches of DistIR and Megatron-LM: writes validate/search.md.

python validate/search.py --data DIR [SECTION ...]: only these (distir, megatron); the others stay as they are.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from studies import search_distir as distir
from studies import search_megatron as megatron
from studies.tables import held, markdown_table

from perfmodel.ingest.tables import write_text

PAGE = Path(__file__).parent / "search.md"
HEAD = (
    "# Searches of papers\n\nWritten by `python validate/search.py --data DIR`. "
    "Nothing is fitted on what is compared here: kernels and collectives are priced by the shipped calibration "
    "(devices never measured through their nearest relatives), clusters and models are catalog entries.\n\n"
)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("sections", nargs="*", metavar="SECTION", help=", ".join(SECTIONS))
    given = arguments.parse_args()
    if unknown := set(given.sections) - set(SECTIONS):
        arguments.error(f"no section {', '.join(sorted(unknown))}; known: {', '.join(SECTIONS)}")
    for name in given.sections or SECTIONS:
        before = PAGE.read_text().split("\n## ")[1:]
        parts = dict(zip(SECTIONS, (f"## {text}" for text in before), strict=True)) | {name: SECTIONS[name](given.data)}
        write_text(PAGE, HEAD + "\n".join(parts.values()))
    print(PAGE.read_text())


def _distir(_data: Path) -> str:
    training, inference = distir.training_table(), distir.inference_table()
    return f"""## DistIR: D/T/P/K on 16 V100

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


def _megatron(data: Path) -> str:
    table = megatron.megatron_table(data)
    error = np.abs(np.asarray(table["predicted_s"]) / np.asarray(table["measured_s"]) - 1)
    within = {name: np.sum(np.asarray(table[f"{name}, over best"]) <= megatron.WITHIN) for name in ("all", "rule")}
    return f"""## Megatron-LM: the layouts of table 1 (SC21)

In the top {megatron.TOP:.0%} and within {megatron.WITHIN:.0%} of our best: {held(table["all, held"])} rows of the whole
space, {held(table["rule, held"])} of what takeaway 1 leaves; within {megatron.WITHIN:.0%} alone: {within["all"]} and
{within["rule"]}. Space `all`: tp up to 8, pp and interleaving that divide the layers, dp, micro-batch up to 16, full
recompute, no ZeRO; `rule`: pipelines only with tp=8. From 76B on so few fit that the top is the first alone.

{markdown_table(table)}
This is not met. The authors did not search (section 1: they suggest heuristics): for 18B and 39B their rule takes tp=8,
where tp=2 with an interleaved pipeline needs the same memory and, by our evaluation, a fifth less time. Their own
layouts' times are predicted within {np.median(error):.1%} (median) of what they measured. No run of another
layout of these models is in our tables, so that the difference is not tested.
"""


SECTIONS: Final[dict[str, Callable[[Path], str]]] = {"distir": _distir, "megatron": _megatron}
"""Section -> its text, from the folder of measurement tables."""

if __name__ == "__main__":
    main()
