"""DistIR through programs: tables 2 and 3, and table 4 on the ranks of this machine; writes
validate/distir.md.

python validate/distir.py [tables] [ranks] [--minutes M]: what was computed before is kept, so that
an interrupted run goes on where it stopped; without a section only the page is written.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd
from studies.distir_ranks import measure_round, ranks_text
from studies.search_distir import (
    BASELINES,
    CLUSTER,
    DEVICES,
    INFERENCE,
    PAPER_SPEEDUPS,
    TOKENS,
    TOLERANCE,
    TRAINING,
    AdditiveProducts,
)
from studies.tables import markdown_table

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.ingest.tables import write_text
from perfmodel.ir import Program, live_memory
from perfmodel.ir.distribute import Degrees, distribute, on_one_stream, pad_vocabulary
from perfmodel.ir.execution import Timer, cluster_timer, program_structure, simulate
from perfmodel.ir.models import model_program
from perfmodel.ir.program_search import MICRO_BATCHES, ProgramSearch, search_programs
from perfmodel.ops import Collective, KernelOp, Op

HERE = Path(__file__).parent
ROWS = HERE / "distir_tables.json"
RUNS = HERE / "distir_ranks.csv"
FIXED = "gpt2-175b fixed costs"
PAPER_ROWS: list[tuple[str, int]] = []
"""Model and batch of the rows of the paper's table 2."""
for _model, _batches in TRAINING.items():
    PAPER_ROWS += [(_model, _batch) for _batch in _batches]
TO_32: Final = MICRO_BATCHES[:5]
"""K of the larger models: 2 to 32, the largest that the paper chooses."""
NEAR: Final = (0.5, 1, 2)
"""Batches of table 3 that are tried, as multiples of the paper's choice."""
BASELINE_BATCHES: Final = tuple(128 << 2 * k for k in range(6))
FIXED_COSTS_S: Final = (0.0, 1e-4, 2e-4, 4e-4, 1e-3, 2e-3)
FIXED_COST_CHOICES: Final = ("1/8/2/2", "1/8/2/4", "1/8/2/8", "1/16/1/1", "1/1/16/128")
"""The paper's choice, more micro-batches, tensor parallelism alone, and the pipeline that the paper
compares with."""


def main() -> None:
    """Compute the sections that are asked for, then write the page of all that is known."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "sections", nargs="*", choices=("tables", "ranks", []), help="what to compute"
    )
    arguments.add_argument("--minutes", type=float, default=9.0, help="of measuring on ranks")
    options = arguments.parse_args()
    if "tables" in options.sections:
        tables()
    if "ranks" in options.sections:
        ranks(options.minutes)
    write_text(HERE / "distir.md", page())
    print((HERE / "distir.md").read_text())


def tables() -> None:
    """Compute what is missing of tables 2 and 3, and write it down after every row.

    A search takes minutes: each stage below looks for rows that lack its figures alone.
    """
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    _add_choices(rows)
    _add_baselines(rows)
    _add_explanations(rows)
    if FIXED not in rows:
        rows[FIXED] = {"rows": fixed_cost_rows("gpt2-175b")}
        _write_rows(rows)


def _write_rows(rows: dict[str, Any]) -> None:
    """Keep all rows that were computed so far."""
    write_text(ROWS, json.dumps(rows, indent=1) + "\n")


def _add_choices(rows: dict[str, Any]) -> None:
    """Search for the best layout of every row that has none yet."""
    # Inference comes first, in which the batch is free; it is marked by a batch of 0.
    for model, batch in [*((model, 0) for model in INFERENCE), *PAPER_ROWS]:
        key = f"{model} {batch or 'inference'}"
        if key in rows:
            continue
        start = time.perf_counter()
        rows[key] = training_row(model, batch) if batch else inference_row(model)
        took_s = time.perf_counter() - start
        print(f"{key}: {rows[key]['ours']} (paper {rows[key]['paper']}), {took_s:.0f} s")
        _write_rows(rows)


def _add_baselines(rows: dict[str, Any]) -> None:
    """Add how much faster each row's choice is than the pure layouts."""
    for key, row in rows.items():
        if key == FIXED or "baselines" in row:
            continue
        baselines = training_baselines if row["model"] in TRAINING else inference_baselines
        row["baselines"] = baselines(row)
        # Files of earlier versions have the speed-ups in columns of their own.
        for old_column in ("vs D", "vs T", "vs P"):
            row.pop(old_column, None)
        paper = PAPER_SPEEDUPS[row["model"]][row["batch"]]
        print(f"{key}: over pure layouts {row['baselines']} (paper {paper})")
        _write_rows(rows)


def _add_explanations(rows: dict[str, Any]) -> None:
    """Add figures that may explain why our choice differs from the paper's."""
    # Inference: whether prices of the paper's own form lead to its choice.
    for model in INFERENCE:
        row = rows[f"{model} inference"]
        if not row["held"] and "additive" not in row:
            row["additive"] = additive_choice(model)
            _write_rows(rows)

    # Training: whether our choice fills the memory so far that theirs may have run out of it.
    for key, row in rows.items():
        is_training = key != FIXED and row["model"] in TRAINING
        if is_training and not row["held"] and "memory share" not in row:
            program = model_program(catalog.model(row["model"]), row["batch"], dtype="fp16")
            row["memory share"] = _memory_share(program, row["ours"])
            _write_rows(rows)


def ranks(minutes: float) -> None:
    """Measure layouts of table 4 on the ranks of this machine for some minutes."""
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        measure_round(RUNS, until)


def training_row(model: str, batch: int) -> dict[str, Any]:
    """Search one row of table 2."""
    program = model_program(catalog.model(model), batch, dtype="fp16")
    counts = MICRO_BATCHES if model == "mlp-1b" else TO_32
    search = search_programs(program, catalog.cluster(CLUSTER), DEVICES, micro_batches=counts)
    paper = TRAINING[model][batch]
    return {"model": model, "batch": batch, "paper": paper, **_beside(search, paper)}


def inference_row(model: str) -> dict[str, Any]:
    """Search one row of table 3, where the batch is free."""
    paper_batch, paper = INFERENCE[model]
    searches = []
    for batch in (int(paper_batch * factor) for factor in NEAR):
        search = search_programs(
            inference_program(model, batch), catalog.cluster(CLUSTER), DEVICES, micro_batches=TO_32
        )
        if search.candidates:
            searches.append(search)
    best = max(searches, key=lambda s: s.candidates[0].samples_per_s)
    # The paper's choice is looked up at the paper's batch, which may not be our best.
    theirs = next((s for s in searches if s.batch == paper_batch), best)
    paper_rate = next((c.samples_per_s for c in theirs.candidates if c.dtpk == paper), 0.0)
    # A choice of the paper's that does not fit here is infinitely slower than ours.
    ratio = best.candidates[0].samples_per_s / paper_rate if paper_rate else float("inf")
    row = {"model": model, "batch": paper_batch, "paper": f"{paper_batch} / {paper}"}
    return row | {
        "ours": f"{best.batch} / {best.candidates[0].dtpk}",
        "paper's/ours": ratio,
        "held": ratio <= 1 + TOLERANCE,
        "evaluated": sum(s.evaluated for s in searches),
        "fit": sum(len(s.candidates) for s in searches),
    }


def inference_program(model: str, batch: int) -> Program:
    """The one-device program of a row of table 3."""
    program = model_program(
        catalog.model(model), batch, seq_len=TOKENS, dtype="fp16", mode="inference"
    )
    return pad_vocabulary(program, DEVICES)  # 50,257 divides over no number of tensor ranks


def additive_choice(model: str) -> str:
    """The best layout of a row of table 3 when kernels have the paper's regression form, and its
    speed-up over the paper's choice."""
    batch, paper = INFERENCE[model]
    search = search_programs(
        inference_program(model, batch),
        catalog.cluster(CLUSTER),
        DEVICES,
        micro_batches=TO_32,
        timer=_additive_timer(0.0),
    )
    best = search.candidates[0]
    theirs = next((c.step_time_s for c in search.candidates if c.dtpk == paper), float("inf"))
    return f"{best.dtpk} ({theirs / best.step_time_s:.2f})"


def fixed_cost_rows(model: str) -> list[dict[str, Any]]:
    """Relative time of each choice in a row of table 3 against the paper's choice (1: equal), by a
    fixed cost of every kernel and collective beside the paper's prices."""
    batch, paper = INFERENCE[model]
    program = inference_program(model, batch)
    times_s: dict[str, list[float]] = {}
    # The program of a layout does not depend on prices: it is written down once for all costs.
    for degrees in map(Degrees.parse, FIXED_COST_CHOICES):
        spread = on_one_stream(distribute(program, degrees, representative=True))
        structure = program_structure(spread.function, catalog.cluster(CLUSTER))
        name = f"{degrees.data}/{degrees.tensor}/{degrees.pipeline}/{degrees.micro_batches}"
        times_s[name] = [
            simulate(structure, _additive_timer(cost_s)).makespan_s for cost_s in FIXED_COSTS_S
        ]

    rows = []
    for i, cost_s in enumerate(FIXED_COSTS_S):
        row: dict[str, Any] = {"fixed cost us": round(1e6 * cost_s)}
        for name, of_costs_s in times_s.items():
            row[name] = of_costs_s[i] / times_s[paper][i]
        rows.append(row)
    return rows


def _additive_timer(fixed_s: float) -> Timer:
    """Kernels by the form of the paper's regressions, collectives as measured, each with a fixed
    cost; messages without."""
    hardware = catalog.cluster(CLUSTER)
    measured = cluster_timer(hardware)
    additive = AdditiveProducts()

    def timer(ops: Sequence[Op]) -> np.ndarray:
        """Seconds of operations, in their order."""
        is_kernel = np.array([isinstance(op, KernelOp) for op in ops], bool)
        kernels = [op for op in ops if isinstance(op, KernelOp)]
        communication = [op for op in ops if not isinstance(op, KernelOp)]

        # Each kind is priced by its own model in one call; masks bring them back into order.
        time_s = np.empty(len(ops))
        time_s[is_kernel] = additive.times(hardware.device, kernels).time_s
        time_s[~is_kernel] = measured(communication)
        is_message = [isinstance(op, Collective) and op.collective == "send_recv" for op in ops]
        return time_s + fixed_s * ~np.array(is_message, bool)

    return timer


def _beside(search: ProgramSearch, paper: str) -> dict[str, Any]:
    """Our choice in our simulation beside the paper's, and the number of layouts that were
    tried."""
    best = search.candidates[0]
    theirs = next((c.step_time_s for c in search.candidates if c.dtpk == paper), float("inf"))
    ratio = theirs / best.step_time_s
    return {
        "ours": best.dtpk,
        "paper's/ours": ratio,
        "held": ratio <= 1 + TOLERANCE,
        "evaluated": search.evaluated,
        "fit": len(search.candidates),
    }


def training_baselines(row: dict[str, Any]) -> dict[str, float]:
    """Time of each pure layout over that of our choice, of a row of table 2; infinite where it does
    not fit."""
    program = model_program(catalog.model(row["model"]), row["batch"], dtype="fp16")
    choice_s = _step_time_s(program, row["ours"])
    return {name: _step_time_s(program, layout) / choice_s for name, layout in BASELINES.items()}


def inference_baselines(row: dict[str, Any]) -> dict[str, float]:
    """Throughput of our choice over the best of each pure layout, of a row of table 3.

    The best is that over batches from 128 on in steps of 4, as far as they fit.
    """
    batch, choice = row["ours"].split(" / ")
    rate = int(batch) / _step_time_s(inference_program(row["model"], int(batch)), choice)
    speedups: dict[str, float] = {}
    for name, layout in BASELINES.items():
        # A batch that does not fit takes infinitely long, so that its rate is 0.
        rates = [
            size / _step_time_s(inference_program(row["model"], size), layout)
            for size in BASELINE_BATCHES
        ]
        speedups[name] = rate / max(rates) if max(rates) else float("inf")
    return speedups


def _step_time_s(program: Program, layout: str) -> float:
    """Simulated time of one layout; infinite where its values do not fit."""
    degrees = Degrees.parse(layout)
    cluster = catalog.cluster(CLUSTER)
    # Weights that do not fit even if they divide evenly rule a layout out before it is written
    # down.
    weights_bytes = sum(program.types[name].n_bytes for name in program.values_of("parameter"))
    if weights_bytes / (degrees.tensor * degrees.pipeline) > cluster.device.memory_bytes:
        return float("inf")
    try:
        spread = on_one_stream(distribute(program, degrees, representative=True))
    except LayoutError:
        return float("inf")
    if live_memory(spread.function).peak_bytes.max() > cluster.device.memory_bytes:
        return float("inf")
    return simulate(program_structure(spread.function, cluster), cluster_timer(cluster)).makespan_s


def _memory_share(program: Program, layout: str) -> float:
    """Share of a device's memory that the values of a layout need at their peak."""
    spread = on_one_stream(distribute(program, Degrees.parse(layout), representative=True))
    return float(
        live_memory(spread.function).peak_bytes.max() / catalog.cluster(CLUSTER).device.memory_bytes
    )


def with_speedups(row: dict[str, Any]) -> dict[str, Any]:
    """A row with the choice's speed-up over each baseline, ours and the paper's."""
    columns = {}
    for name, paper in zip(BASELINES, PAPER_SPEEDUPS[row["model"]][int(row["batch"])], strict=True):
        ours = row.get("baselines", {}).get(name, float("nan"))
        columns[f"vs {name}"] = f"{_ratio(ours)} ({_ratio(paper)})"
    # These are said in sentences, or in the columns that were just made.
    not_columns = ("baselines", "memory share", "vs D", "vs T", "vs P")
    return {key: value for key, value in row.items() if key not in not_columns} | columns


def _ratio(value: float | None) -> str:
    """Format a ratio as the tables do: `-` where a layout does not fit, `?` where it is not
    computed yet."""
    if value is not None and np.isnan(value):
        return "?"
    return "-" if value is None or np.isinf(value) else f"{value:.1f}"


def as_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Format rows as the page prints them."""
    table = pd.DataFrame([with_speedups(row) for row in rows])
    if "additive" in table:
        table["additive"] = table["additive"].fillna("")
    table["paper's/ours"] = [
        "-" if not np.isfinite(x) else f"{x:.2f}" for x in table["paper's/ours"].astype(float)
    ]
    return table


_, TENSOR_ALONE, PIPELINE_ALONE = (
    times or float("nan") for times in PAPER_SPEEDUPS["gpt2-175b"][1024]
)
"""Of GPT-2 175B, times over that of the choice."""


def speedup_text(rows: list[dict[str, Any]]) -> str:
    """Sentence on how far our speed-ups of table 2 are from the measured ones, by batch."""
    sentences = []
    for baseline, parallelism in (("T", "tensor"), ("D", "data"), ("P", "pipeline")):
        # What the paper's runs paid per operation weighs more in short steps, hence two ranges.
        for is_small in (True, False):
            ratios = _speedup_ratios(rows, baseline, is_small)
            if ratios:
                size = "below" if is_small else "from"
                sentences.append(
                    f"{parallelism} {size} {_LARGE_BATCH:,}: {min(ratios):.2f} to {max(ratios):.2f}"
                )
    return f"Ours over the paper's: {'; '.join(sentences)}."


def _speedup_ratios(rows: list[dict[str, Any]], baseline: str, is_small: bool) -> list[float]:
    """Our speed-up over a baseline divided by the paper's, for rows below or from `_LARGE_BATCH`
    on."""
    ratios = []
    for row in rows:
        if (row["batch"] < _LARGE_BATCH) != is_small:
            continue
        paper = PAPER_SPEEDUPS[row["model"]][row["batch"]]["DTP".index(baseline)]
        ours = row.get("baselines", {}).get(baseline, float("inf"))
        # What does not fit has no speed: `None` in the paper's table, infinity in ours.
        if paper is not None and np.isfinite(ours):
            ratios.append(ours / paper)
    return ratios


def not_held_text(rows: list[dict[str, Any]]) -> str:
    """Sentence on how our choices of table 2 differ from the paper's in rows that miss the bar."""
    sentences = []
    for row in rows:
        if row["held"]:
            continue
        *ours, our_count = str(row["ours"]).split("/")
        *paper, paper_count = str(row["paper"]).split("/")
        if ours == paper:
            how = f"differs in K alone ({our_count} for {paper_count})"
        else:
            how = f"is {row['ours']} for the paper's {row['paper']}"
        if "memory share" in row:
            how += f" and fills {row['memory share']:.0%} of a device"
        sentences.append(f"at {row['batch']:,} of {row['model']} our choice {how}")
    return (
        f"Of the rows not held, {'; '.join(sentences)}. Why the paper chose otherwise is not shown."
        if sentences
        else ""
    )


def stages_text(rows: dict[str, dict[str, Any]]) -> str:
    """Sentence on why pipeline stages beat data parallelism in inference, where they do."""
    row = rows.get("gpt2-13b inference")
    if row is None or row["held"] or "/1/1/1" in row["ours"]:
        return ""
    faster = row["paper's/ours"] - 1
    return (
        f"For 13B stages with many micro-batches come out {faster:.0%} faster than data parallelism "
        "alone: each device reads its own stage's weights alone, and a stage idles little of the time. "
    )


def additive_text(rows: dict[str, dict[str, Any]]) -> str:
    """Sentence on whether prices of the paper's form lead to its choice for GPT-2 175B."""
    row = rows.get("gpt2-175b inference", {})
    if "additive" not in row:
        return ""
    *ours, our_count = row["additive"].split(" ")[0].split("/")
    *paper, paper_count = row["paper"].rpartition(" ")[2].split("/")
    if ours != paper:
        return "For 175B these prices do not lead to the paper's D/T/P. "
    if our_count == paper_count:
        return "For 175B these prices lead to the paper's choice. "
    # A pipeline of p stages idles p - 1 slots of the m + p - 1 that m micro-batches take.
    stages = int(paper[2])
    idle = (stages - 1) / (int(paper_count) + stages - 1)
    our_idle = (stages - 1) / (int(our_count) + stages - 1)
    return (
        f"For 175B these prices lead to the paper's D/T/P, but not to its K of {paper_count}, with which {stages} "
        f"stages idle {idle:.0%} of the time (of {our_count} micro-batches {our_idle:.0%}). "
    )


def fixed_cost_text(fixed: pd.DataFrame) -> str:
    """Sentence on the fixed cost from which the paper's choice of K beats more micro-batches on the
    same devices."""
    # Choices that differ from the paper's in the number of micro-batches alone.
    paper_choice, *alternatives = FIXED_COST_CHOICES
    degrees, _, paper_count = paper_choice.rpartition("/")
    same_devices = [name for name in alternatives if name.rpartition("/")[0] == degrees]
    counts = " or ".join(name.rpartition("/")[2] for name in same_devices)

    # Columns are times over the paper's choice: 1 and more is no faster.
    paper_wins = fixed[(fixed[same_devices] >= 1).all(axis=1)]
    if paper_wins.empty:
        return f"At none of these costs {paper_count} micro-batches are better than {counts}."
    cost_us = paper_wins["fixed cost us"].min()
    return f"From {cost_us:,.0f} us on {paper_count} micro-batches are better than {counts}."


_LARGE_BATCH: Final = 2048
SMALL_BATCHES = """Below 2,048 samples a pipeline of 128 micro-batches works on a handful of samples at a time: it takes
as long as reading weights and adding up their gradients for each of them. What the paper's runs paid beside, such as
Python's dispatch of every operation, would lengthen the short step of the choice more than the long one of the
pipeline; whether it explains the gap is not shown.
"""


def page() -> str:
    """Format the page of tables 2 to 4 from everything computed and measured so far."""
    computed = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    fixed = pd.DataFrame(computed.pop(FIXED, {"rows": []})["rows"])
    rows = list(computed.values())
    # In table 3 the batch is part of the choice: `256 / 1/8/2/2`.
    trained = [row for row in rows if "/ " not in str(row["paper"])]
    training = as_table(trained)
    inference = as_table([row for row in rows if "/ " in str(row["paper"])]).drop(columns="batch")
    held_text = f"{sum(bool(row['held']) for row in trained)} of {len(trained)}"
    keys = [f"{model} {batch}" for model, batch in PAPER_ROWS]
    to_compute = [key for key in keys if key not in computed]
    missing = (
        f"Not computed yet: {', '.join(to_compute)}."
        if to_compute
        else f"All {len(PAPER_ROWS)} rows of the paper are here."
    )
    speedups = speedup_text(trained)
    same = sum(row["ours"] == row["paper"] for row in trained)
    runs = pd.read_csv(RUNS)
    return f"""# DistIR through programs

Written by `python validate/distir.py`. Nothing is fitted on what is compared here.

## Table 2: training of MLPs on 16 V100

The model is a program of the IR; each D/T/P/K is written down by the transforms, one rank of every data- and
tensor-parallel group, and simulated at the times of the shipped calibration, one operation at a time per device.
`held`: the same choice, or the paper's within 3 % of ours by our simulation: {held_text} rows; {same} the same. `vs D`, `T`,
`P`: throughput of the choice over that of pure data, tensor and pipeline parallelism, the pipeline with K = 128 as the
paper fixes it; ours is simulated, the paper's in parentheses was measured (`-`: does not fit; `?`: not
computed yet). {speedups}
K of the two larger models is 2 to 32, the largest that the paper chooses (its grid goes to 128: 75 configurations for
each model, as for mlp-1b here). {missing}
{not_held_text(trained)}

{markdown_table(training)}
{SMALL_BATCHES}
## Table 3: inference of GPT-2, {TOKENS} tokens

The evaluation states no sequence length; {TOKENS} tokens are those of the paper's figure 4. The batch is free within a
factor of 2 of the paper's choice, where the paper tries all powers of two from 128 to 1,048,576; K is 2 to 32, 2 to 128
in the paper; the vocabulary is padded to a multiple of
{DEVICES}, so that tensor ranks can share it. {stages_text(computed)}`additive`:
our best at the paper's batch where a row is not held, with kernels priced by the form of the paper's regressions: bytes
and FLOPs added up, at nominal rates instead of the coefficients that it fitted and does not print; and what the paper's
choice takes beside it. {additive_text(computed)}Baselines
take the best of batches 128, 512, 2,048 and so on to 131,072, as far as they fit; the paper's every power of two. A
ratio below 1 is a baseline at a batch that our choice was not offered, more than a factor of 2 from the paper's.

{markdown_table(inference)}
A K of 2 would follow from a fixed cost per kernel, which every micro-batch pays anew: the constant of the paper's
regressions, and PyTorch's dispatch of one operation after another. Below, what choices take over the paper's at batch
1,024, with such a cost added to every kernel and collective of the additive prices. {fixed_cost_text(fixed)}
That costs per micro-batch were high is in the table itself: the pipeline alone, with K fixed at 128, is said to take
{PIPELINE_ALONE} times as long as the choice; here it takes {_span(fixed["1/1/16/128"])} times. What they do not explain
is tensor parallelism alone, which pays them once and has no bubble: it takes {_span(fixed["1/16/1/1"])} of the time of
the paper's choice here, {TENSOR_ALONE} times in the paper. All-reduces of 16 ranks, or products sliced 16 ways, must
have cost it {_span(TENSOR_ALONE / fixed["1/16/1/1"])} times what the prices here say; the paper gives neither.

{markdown_table(fixed)}
{ranks_text(runs)}"""


def _span(ratios: Any) -> str:
    """The smallest and the largest of some ratios, as text."""
    return f"{ratios.min():.2f} to {ratios.max():.2f}"


if __name__ == "__main__":
    main()
