"""The largest public training runs, predicted: writes validate/large_runs.md.

python validate/large_runs.py

Reported figures, with what their papers say of the layout, are in large_runs.csv; nothing is fitted to them. Where the
record of published runs has runs of the same team, the model of sites is the one without them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import catalog, predict
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Prediction, Site
from perfmodel.spec import Cluster, Model
from perfmodel.workload import step_flops

HERE = Path(__file__).parent
LIKE_LLAMA: dict[str, dict[str, Any]] = {
    "palm-540b": {
        "layers": 118, "hidden": 18432, "heads": 48, "kv_heads": 1, "head_dim": 256, "ffn_hidden": 73728,
        "vocab": 256_000,
    },
    "glm-130b": {
        "layers": 70, "hidden": 12288, "heads": 96, "kv_heads": 96, "head_dim": 128, "ffn_hidden": 32768,
        "vocab": 150_528,
    },
}  # fmt: skip
"""Models that the catalog lacks, by what they have otherwise than Llama 2."""
REPEATED = 4 / 3
"""FLOPs of a step with full recompute, a second forward, over those without (Korthikanti et al. 2022, section 6.3)."""
HEAD = """# The largest public runs

Made by `python validate/large_runs.py` from `large_runs.csv`: what papers report of a step, beside its prediction.
Steps of runs that report a rate are its FLOPs, as counted here, over that rate; OPT and GLM count what full recompute
repeats, a third more. Reported figures and layouts were written down from memory of the papers and not looked up again.
OPT's micro-batch is its batch over its replicas (it accumulates none); what OPT and DeepSeek-V3 overlap was set after
first results were seen.

| run | predicted | 90 % interval | reported | reported / predicted | inside | source |
|---|--:|--:|--:|--:|--:|---|
"""


def model_of(name: str) -> Model:
    if name not in LIKE_LLAMA:
        return catalog.model(name)
    return replace(catalog.model("llama2-70b"), name=name, **LIKE_LLAMA[name])


def cluster_of(name: str) -> Cluster:
    if name != "h800":
        return catalog.cluster(name)
    return replace(catalog.cluster("dgx-h100"), name=name, device=catalog.device("H800-SXM5-80GB"))


def predicted(row: Any) -> tuple[Prediction, float]:
    """The prediction and the reported step in seconds."""
    problem = catalog.problem(
        model_of(row.model), cluster_of(row.cluster), global_batch=row.global_batch, seq_len=row.seq_len,
        dtype=row.dtype, framework=row.framework,
    )  # fmt: skip
    site = Site.without(row.left_out) if isinstance(row.left_out, str) else Site()
    found = predict(problem, layout=row.layout, site=site)
    if np.isfinite(row.reported_s):
        return found, float(row.reported_s)
    flops = step_flops(problem.model, problem.job).total
    counted = flops * (REPEATED if row.rate_counts == "recompute" else 1)
    return found, counted / found.devices / (row.reported_tflops * 1e12)


def main() -> None:
    lines, ratios, inside = [], [], 0
    rows: Any = pd.read_csv(HERE / "large_runs.csv").itertuples()
    for row in rows:
        try:
            found, reported_s = predicted(row)
        except PerfModelError as error:
            raise SystemExit(f"{row.run}: {error}") from None
        ratio = reported_s / found.step_time_s
        held = found.step_time_lo_s <= reported_s <= found.step_time_hi_s
        ratios.append(ratio)
        inside += held
        lines.append(
            f"| {row.run} | {found.step_time_s:.2f} s | {found.step_time_lo_s:.2f} to {found.step_time_hi_s:.2f} s | "
            f"{reported_s:.2f} s | {ratio:.2f} | {'yes' if held else 'no'} | {row.source} |"
        )
    tail = (
        f"\n\n{inside} of {len(lines)} inside their interval; median of reported / predicted {np.median(ratios):.2f}.\n"
    )
    (HERE / "large_runs.md").write_text(HEAD + "\n".join(lines) + tail)
    print((HERE / "large_runs.md").read_text())


if __name__ == "__main__":
    main()
