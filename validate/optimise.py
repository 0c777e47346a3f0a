"""What `perfmodel.planning.optimise` finds beside exact answers and other methods: writes
validate/optimise.md.

python validate/optimise.py [SECTION ...]: only these (models, launches, devices, partition,
continuous, mixed, sizes, hardware).
"""

import sys
from pathlib import Path

import pandas as pd
from studies.optimise_tables import (
    LAUNCHED_MICRO_BATCHES,
    brute_force_agrees,
    continuous_study,
    hardware_table,
    launch_table,
    mixed_device_table,
    mixed_study,
    model_partitions,
    partition_study,
    size_table,
)
from studies.optimisers import OPTIMISERS
from studies.tables import frame_table

from perfmodel.ingest.tables import write_text

OUT = Path(__file__).parent / "optimise.md"
PARTS = Path(__file__).parent.parent / "out" / "optimise"
CLOSE = 0.01
"""Makespan above the exact one that counts as equal."""
SAME = 1e-3
"""Relative difference of step times that counts as none."""


def main(chosen: list[str]) -> None:
    """Compute sections, each into a file of its own, and join all that there are to the page."""
    for name in chosen or SECTIONS:
        write_text(PARTS / f"{name}.md", SECTIONS[name]())
    # Sections that were not computed now are taken as they were last time.
    done = [PARTS / f"{name}.md" for name in SECTIONS]
    head = "# Optimisation beyond enumeration\n\nWritten by `python validate/optimise.py`; seconds on two cores.\n\n"
    write_text(OUT, head + "\n".join(part.read_text() for part in done if part.exists()))
    print(OUT.read_text())


def models() -> str:
    """Table of how much uneven stages shorten the step, for layouts of the catalog's models."""
    table = model_partitions()
    table["gain"] = 1 - table.found_s / table.even_s
    return (
        "## Uneven stages of real layouts\n\n`even_s`: the layout as given (nan: does not fit); `gap`: to the lower "
        "bound over all partitions and recompute choices. ZeRO-3's gathers are not in the bound.\n\n"
        + frame_table(table, ".4g")
    )


def launches() -> str:
    """Table of what gradients gain over dynamic programming when every choice of a launch is
    free."""
    table = launch_table()
    wins = (table.gain > SAME).sum()
    ties = (table.gain.abs() <= SAME).sum()
    # The extremes are named with their layouts, so that they can be looked at.
    best = table.iloc[int(table.gain.argmax())]
    worst = table.iloc[int(table.gain.argmin())]
    # The sentence says what came out, for better or worse, whatever the next run finds.
    verdict = (
        f"Relaxation ends faster on {wins} of {len(table)} layouts, equal to {SAME:.1%} on {ties}"
    )
    if wins:
        verdict += f"; at best by {best.gain:.1%} ({best.model}, {best.layout})"
    if worst.gain < -SAME:
        verdict += f"; at worst it is {-worst.gain:.1%} slower ({worst.model}, {worst.layout})"
    if not wins:
        verdict += ". On real layouts gradients thus gain nothing over dynamic programming"
    return (
        "## What a launch states: gradients beside dynamic programming\n\nStages, recompute by stage and a micro-batch "
        f"of {', '.join(map(str, LAUNCHED_MICRO_BATCHES))} sequences. `even_s`: even stages at the best micro-batch; "
        "`cut_s`: dynamic programming (moves of layers where a rank has two stages) for every micro-batch and kind of "
        "recompute; `relaxed_s`: gradients and single changes, without the comparison with dynamic programming that "
        f"`search --method relax` adds (nan and inf: nothing fits).\n\n{verdict}.\n\n"
        + frame_table(table, ".4g")
    )


def devices() -> str:
    """Stages on clusters of several kinds of devices."""
    return "## Stages on devices of several kinds\n\n" + frame_table(mixed_device_table(), ".4g")


def partition() -> str:
    """The relaxed partition beside the exact one and even stages, on random instances."""
    table = partition_study()
    agreeing, small_instances = brute_force_agrees()
    ratio = {
        "relaxation, rounded": table.rounded_s / table.exact_s - 1,
        "and improved by moves": table.relaxed_s / table.exact_s - 1,
        "even stages": table.even_s / table.exact_s - 1,
    }
    rows = [
        {"method": method, "median above": above.median(), "largest above": above.max()}
        for method, above in ratio.items()
    ]
    within = (ratio["and improved by moves"] <= CLOSE).sum()
    return (
        "## Contiguous partition: 96 unequal layers on 16 unequal stages, recompute by stage under memory\n\n"
        f"{len(table)} random instances. Dynamic programming (exact in sum + (m - 1) max): median "
        f"{table.exact_ms.median():.1f} ms, longest {table.exact_ms.max():.1f} ms; it equals brute force on {agreeing} "
        f"of {small_instances} small instances. Makespans below are relative to it (both improved by the same moves); "
        f"relaxation takes "
        f"{table.relax_seconds.median():.2f} s (median), {table.relax_seconds.max():.1f} s with compilation, and is "
        f"within {CLOSE:.0%} in {within} of {len(table)}. `auto` uses dynamic programming.\n\n"
        + frame_table(pd.DataFrame(rows), ".4g")
    )


def continuous() -> str:
    """Seconds that methods with and without gradients take to split bandwidth well."""
    table = continuous_study()
    # Seconds and shares are two tables: one is too wide to read.
    times = table[["problem", "gain", "gap", "relaxation", "with compilation", *OPTIMISERS]]
    shares = table[["problem", *(f"{name}, share of the gain" for name in OPTIMISERS)]]
    return (
        "## Continuous unknowns: bandwidth split over links\n\nSeconds until 99 % of the relaxation's gain over equal "
        "shares (inf: not in 10 s); `gap` to the certified bound. All evaluate the same compiled timeline; CMA-ES its "
        "population in one call.\n\n"
        + frame_table(times, ".4g")
        + "\n"
        + frame_table(shares, ".4g")
    )


def mixed() -> str:
    """Table of how much choosing cuts, recompute and bandwidth together shortens the step."""
    table = mixed_study(range(4), patience=3)
    names = {
        "uniform_s": "even, equal",
        "cuts_alone_s": "cuts and recompute alone (exact)",
        "annealed_s": "annealing, same time",
        "annealed_longer_s": "annealing, 3 times as long",
    }
    # A share of the other method's step, instance by instance.
    shorter = {text: 1 - table.found_s / table[column] for column, text in names.items()}
    better = [
        {"against": text, "mean": share.mean(), "least": share.min()}
        for text, share in shorter.items()
    ]
    return (
        "## Cuts, recompute and bandwidth together: 192 layers, 32 stages\n\nHow much shorter the step is "
        f"({len(table)} random instances, {table.seconds.median():.1f} s each; gap to a bound that leaves bandwidth "
        f"nearly free {table.gap.median():.0%}).\n\n"
        + frame_table(pd.DataFrame(better), ".4g")
        + "\n"
        + frame_table(table, ".4g")
    )


def sizes() -> str:
    """Table of what unequal micro-batches and gradient buckets save."""
    return (
        "## Unequal micro-batches and gradient buckets\n\n`usual_s`: the best equal micro-batches of any size; equal "
        "buckets, at most four per stage.\n\n" + frame_table(size_table(), ".4g")
    )


def hardware() -> str:
    """The machine that gradients find for two training runs at a price."""
    return (
        "## A machine for two training runs\n\nMultiples of a DGX A100 for gpt3-13b and llama3-8b, against all "
        "parameters grown alike at the same price.\n\n" + frame_table(hardware_table(), ".4g")
    )


SECTIONS = {
    "models": models,
    "launches": launches,
    "devices": devices,
    "partition": partition,
    "continuous": continuous,
    "mixed": mixed,
    "sizes": sizes,
    "hardware": hardware,
}

if __name__ == "__main__":
    main(sys.argv[1:])
