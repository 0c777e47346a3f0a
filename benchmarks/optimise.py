"""Optimisers of `perfmodel.planning.optimise`: time of the exact partition, and of gradients
against other methods."""

import numpy as np
from studies.optimise_tables import continuous_study, mixed_study, partition_study
from studies.optimisers import OPTIMISERS
from timing import entry


def run() -> dict[str, dict[str, object]]:
    """Dynamic programming on 50 instances, relaxed against exact partitions, time to the same
    value, mixed spaces."""
    parts = partition_study()
    above = parts.relaxed_s / parts.exact_s - 1
    results: dict[str, dict[str, object]] = {
        "optimise_partition_longest": entry(
            parts.exact_ms.max(), "nothing; 96 layers, 16 stages", "ms", "<= 100"
        ),
        "optimise_partition_relaxed_above_exact": entry(
            above.median(), "dynamic programming", "share", "<= 0.01"
        ),
    }
    for row in continuous_study(limit_s=5.0).to_dict("records"):
        problem = str(row["problem"]).replace(", ", "_").replace(" ", "_")
        for optimiser in OPTIMISERS:
            key = f"optimise_{problem}_{optimiser.lower()}"
            # One that did not get there in its time would have taken longer.
            unit = "x time" if np.isfinite(row[optimiser]) else "x time, at least"
            ratio = min(row[optimiser], 5.0) / row["relaxation"]
            results[key] = entry(ratio, "the relaxation, to the same value", unit, ">= 5")
    mixed = mixed_study(range(3), patience=1.0)
    for name in ("uniform_s", "annealed_s"):
        share = (1 - mixed.found_s / mixed[name]).mean()
        results[f"optimise_mixed_below_{name[:-2]}"] = entry(
            share, f"{name[:-2]} layouts", "share", ">= 0.03"
        )
    return results
