"""What measuring the events only saves against running every layout, beside DistSim's table 3.

python validate/distsim_profiling.py
"""

from itertools import product
from pathlib import Path

from studies.tables import rows_table

from perfmodel.calibration import ModelPlan, model_plan
from perfmodel.ingest.tables import write_text
from perfmodel.spec import Job

HERE = Path(__file__).parent
PAPER = {"profiling": 49.18, "direct": 380.35, "scale": 0.1296}
"""DistSim, arXiv 2306.08423, table 3: GPU-seconds of profiling and of running directly, and their
ratio."""
SEARCH = [
    f"{tp}M{pp}P{16 // tp // pp}D"
    for tp, pp in product((1, 2, 4, 8, 16), repeat=2)
    if tp * pp <= 16
]
"""The 15 layouts of 16 devices that its section 6 searches."""
HYBRID = ["1M2P2D", "2M2P1D", "2M2P2D", "2M4P1D", "2M2P4D", "2M4P2D", "4M2P2D"]
"""Layouts of 4, 8 and 16 devices in the notation of its section 5."""
CASES = (
    (
        "search of section 6",
        "bert-exlarge",
        "a10x4",
        SEARCH,
        Job(global_batch=16, seq_len=512, dtype="fp16"),
    ),
    (
        "BERT-Large, section 5",
        "bert-large",
        "a40x4",
        HYBRID,
        Job(global_batch=64, seq_len=512, dtype="fp16"),
    ),
    (
        "GPT-2-345M, section 5",
        "gpt2-345m",
        "a40x4",
        HYBRID,
        Job(global_batch=64, seq_len=1024, dtype="fp16"),
    ),
    ("T5, section 5", "t5-base", "a40x4", HYBRID, Job(global_batch=64, seq_len=512, dtype="fp16")),
    (
        "GPT 145B, section 5.5",
        "gpt-145b",
        "dgx-a100",
        ["8M16P1D"],
        Job(global_batch=16, seq_len=2048),
    ),
)


def main() -> None:
    """Plan what each case has to measure, and write the page."""
    plans = {
        title: model_plan(model, cluster, job, layouts)
        for title, model, cluster, layouts, job in CASES
    }

    # The paper gives device-seconds of running directly, but no number of steps: over those of one
    # of our steps of every layout they say how many it took.
    search = plans["search of section 6"]
    per_step_s = search.run_device_s / search.iterations
    text = HEAD.format(
        **PAPER,
        ours=search.relative_scale,
        steps=PAPER["direct"] / per_step_s,
        per_step_s=per_step_s,
    )
    text += f"{saving(plans)}\n\n## The search, layout by layout\n\n{layouts(search)}\n"
    write_text(HERE / "distsim_profiling.md", text)
    print(text)


def saving(plans: dict[str, ModelPlan]) -> str:
    """Markdown table of what each case has to measure, and what that saves."""
    head = (
        "case",
        "layouts",
        "events of a step of each, in all",
        "measurements",
        "extrapolated",
        "without a collector",
        "relative scale",
        "measuring, device-s",
        "running 100 steps of each, device-s",
        "saving",
    )
    rows = []
    for title, plan in plans.items():
        figures = plan.to_dict()
        rows.append(
            (
                title,
                figures["layouts"],
                f"{figures['executions']:,.0f}",
                figures["measurements"],
                figures["extrapolated"],
                f"{figures['unmeasured']} ({figures['unmeasured_share']:.0%} of the step)",
                f"{figures['relative_scale']:.4f}",
                f"{figures['measure_device_s']:,.0f} to {figures['measure_device_most_s']:,.0f}",
                f"{figures['run_device_s']:,.0f}",
                f"{figures['saving']:.1%}",
            )
        )
    return rows_table(head, rows)


def layouts(plan: ModelPlan) -> str:
    """Markdown table of what each layout of the search adds to the measurements."""
    head = ("layout", "step, s", "events run", "distinct", "new to measure", "device-s")
    # The plan states every layout in full; the paper's notation is shorter.
    rows = []
    for name, cost in zip(SEARCH, plan.layouts, strict=True):
        least_s, most_s = cost.measure_device_s
        # From a quiet machine to one on which every measurement takes its longest.
        measuring = f"{least_s:.1f} to {most_s:.1f}"
        rows.append(
            (
                name,
                f"{cost.step_time_s:.3f}",
                f"{cost.executions:,.0f}",
                cost.distinct,
                cost.new,
                measuring,
            )
        )
    return rows_table(head, rows)


HEAD = """# What measuring events only saves (DistSim, table 3)

Written by `python validate/distsim_profiling.py`. Times are predicted with the shipped calibration.

| | GPU-seconds of profiling | of running directly | relative scale |
|---|--:|--:|--:|
| DistSim, table 3 | {profiling} | {direct} | {scale} |
| ours, every event and every step once | | {per_step_s:.1f} | {ours:.4f} |

The paper does not say how many steps its direct run took (its batch times are means of 100 iterations, section 5.2); at
our predicted step times its GPU-seconds are {steps:.1f} steps of each of the 15 layouts. *Relative scale*:
device-seconds of running every distinct event once (on all ranks of a collective) over those of one step of every
layout, so that both sides repeat equally often. *Measuring*: by the
stopping rule, from a quiet machine (8 samples of at least 2 ms each) to every measurement at its cap of a second.
Sequence length, micro-batch (1) and cluster network are ours where the paper states none. Events without a collector
(`ModelPlan.unmeasured`) count in the relative scale, but no measuring time is stated for them.

"""


if __name__ == "__main__":
    main()
