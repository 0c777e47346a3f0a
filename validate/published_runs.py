"""Public training runs outside the record, predicted: writes validate/published_runs.md.

python validate/published_runs.py

Reported figures, with what their pages say of the layout, are in published_runs.csv; nothing is
fitted to them. Where the record of published runs has runs of the same team, the model of sites is
the one without them.

A row is blind until something was mended after its prediction had been seen: `seen` names what,
`first_s` keeps what was predicted before. Rows of a new source begin with both empty.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel import catalog, predict
from perfmodel.catalog import job_files
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Prediction, Site
from perfmodel.spec import Cluster, Model
from perfmodel.workload import step_flops

HERE = Path(__file__).parent
LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "megascale-175b": ("gpt3-175b", {"vocab": 64_000, "parallel_blocks": "one_norm"}),
    "glm-130b": (
        "llama2-70b",
        {
            "layers": 70,
            "hidden": 12288,
            "heads": 96,
            "kv_heads": 96,
            "head_dim": 128,
            "ffn_hidden": 32768,
            "vocab": 150_528,
        },
    ),
    "tinyllama-1.1b": (
        "llama2-70b",
        {
            "layers": 22,
            "hidden": 2048,
            "heads": 32,
            "kv_heads": 4,
            "head_dim": 64,
            "ffn_hidden": 5632,
            "vocab": 32_000,
        },
    ),
}
"""Models that the catalog lacks: one that it has, and what they have otherwise."""
REPEATED = 4 / 3
"""FLOPs of a step with full recompute, a second forward, over those without (Korthikanti et al.
2022, section 6.3)."""
HEAD = """# Public runs outside the record

Made by `python validate/published_runs.py` from `published_runs.csv`: what papers and pages report of a step, beside
its prediction from what they say of the layout. Steps of runs that report a rate are its FLOPs, as counted here, or
their tokens over it; OPT and GLM count what full recompute repeats, a third more. Sources end with how papers' figures
were confirmed, or that they were written down from memory; pages were read. OPT's micro-batch is its batch over its
replicas (it accumulates none).

A row is blind where `seen` is empty: nothing was changed after its prediction was seen. Else `seen` names what was
mended or stated after (none of it a figure fitted: facts of the framework, read in its code), and `first` is what was
predicted before:

- keys: torchtitan copies keys and values for every head of queries; compile: with `torch.compile` its loss and the sum
  of partial attention stay eager; cuDNN: its attention on Blackwell.
- attention: FlashAttention-2 takes what its authors published, and training's kernels fill no cache.
- pipelines: FSDP in torch's pipelines gathers and reduces once (`first` is after this mend); micro-batches: of 2024's
  torchtitan one per stage.
- products: of MI325X, MI350X and MI355X, which no table times, they reach what the best product of such a device is
  known to (`reached_share` of the catalog; of MI350X what MI355X reaches, the same die).
- recompute, overlap, CUDA graph, launches, batch: stated for the run after the first look (batches as the log prints
  them; hosts of BLOOM wait for every kernel, as its launch script says).
- blocks, replicas, sharding, fused attention: stated by the paper of a run and taken down after the first look.
  Attention and feed-forward of PaLM and MegaScale run side by side. PaLM shards states inside each of its two pods,
  takes its batch at once, keeps one activation per layer and repeats the rest (three quarters of a forward by its
  count, two thirds by the rule here); that this activation is sharded over 12 ranks too, along the hidden size, has
  no notation. MegaScale's data-parallel ranks scatter and gather, its collectives run beside kernels and products,
  and its attention has a window of an unnamed size, which is left out.

| run | first | predicted | 90 % interval | reported | reported / predicted | inside | seen | source |
|---|--:|--:|--:|--:|--:|---|---|---|
"""


def model_of(name: str) -> Model:
    """A model of the catalog, or one of `LIKE`."""
    if name not in LIKE:
        return catalog.model(name)
    base, differences = LIKE[name]
    return replace(catalog.model(base), name=name, **differences)


def cluster_of(name: str) -> Cluster:
    """A cluster of the catalog, changed where a page states other facts."""
    h100 = catalog.cluster("dgx-h100")
    node, fabric = h100.levels
    if name == "h800":
        return replace(h100, name=name, device=catalog.device("H800-SXM5-80GB"))
    if name == "grand-teton":  # HBM2e of 2.4 TB/s, limited to 500 W
        return replace(
            h100, name=name, device=replace(catalog.device("H100-SXM5-94GB"), power_w=500.0)
        )
    if name == "h100x4":
        return replace(h100, name=name, levels=(replace(node, size=4), fabric))
    if name == "aws-p4de":
        return replace(
            catalog.cluster("aws-p4d"), name=name, device=catalog.device("A100-SXM4-80GB")
        )
    if name == "tpu-v4-3072":  # PaLM's pods, of fewer chips than the largest
        pods = catalog.cluster("tpu-v4-pod")
        inside, between = pods.levels
        return replace(
            pods, name=name, levels=(replace(inside, size=3072), replace(between, size=6144))
        )
    return catalog.cluster(name)


def predicted(row: Any) -> tuple[Prediction, float]:
    """The prediction and the reported step in seconds."""
    settings = row.job.split(",") if isinstance(row.job, str) else []
    job = job_files.read_job(None, [f"job.{setting}" for setting in settings]).problem_fields
    problem = catalog.problem(
        model_of(row.model),
        cluster_of(row.cluster),
        global_batch=row.global_batch,
        seq_len=row.seq_len,
        dtype=row.dtype,
        framework=row.framework,
        **job,
    )
    # Constants of sites were fitted to runs of the same team, where the record has some.
    site = Site.without(row.left_out) if isinstance(row.left_out, str) else Site()
    prediction = predict(problem, layout=row.layout, site=site)
    if np.isfinite(row.reported_s):
        return prediction, float(row.reported_s)
    if np.isfinite(row.reported_tokens_per_s):
        return (
            prediction,
            row.global_batch * row.seq_len / prediction.devices / row.reported_tokens_per_s,
        )
    # Sites that report FLOP/s count those of the step by the formulas of their papers, as here.
    flops = step_flops(problem.model, problem.job).total
    counted = flops * (REPEATED if row.rate_counts == "recompute" else 1)
    return prediction, counted / prediction.devices / (row.reported_tflops * 1e12)


def main() -> None:
    """Predict every run and write the page."""
    lines: list[str] = []
    # Of each run: reported over predicted, and whether the interval holds what was reported.
    blind: list[tuple[float, bool]] = []
    seen: list[tuple[float, bool]] = []
    looks: list[float] = []
    rows: Any = pd.read_csv(HERE / "published_runs.csv").itertuples()
    for row in rows:
        try:
            prediction, reported_s = predicted(row)
        except PerfModelError as error:
            raise SystemExit(f"{row.run}: {error}") from None
        ratio = reported_s / prediction.step_time_s
        is_inside = prediction.step_time_lo_s <= reported_s <= prediction.step_time_hi_s
        mended = isinstance(row.seen, str)
        (seen if mended else blind).append((ratio, is_inside))
        # The first prediction counts, whatever was mended after it was seen.
        has_first = np.isfinite(row.first_s)
        looks.append(reported_s / (row.first_s if has_first else prediction.step_time_s))
        first = f"{row.first_s:.2f} s" if has_first else ""
        lines.append(
            f"| {row.run} | {first} | {prediction.step_time_s:.2f} s | "
            f"{prediction.step_time_lo_s:.2f} to {prediction.step_time_hi_s:.2f} s | {reported_s:.2f} s | {ratio:.2f} | "
            f"{'yes' if is_inside else 'no'} | {row.seen if mended else ''} | {row.source} |"
        )
    # Runs that something was mended for say less: they are summed up apart.
    tail = "".join(_summary(name, part) for name, part in (("Blind", blind), ("Seen", seen)))
    off = 100 * np.expm1(np.median(np.abs(np.log(looks))))
    tail += f"\nAll {len(looks)} as first predicted: median of {np.median(looks):.2f}, median error {off:.0f} %.\n"
    (HERE / "published_runs.md").write_text(HEAD + "\n".join(lines) + "\n" + tail)
    print((HERE / "published_runs.md").read_text())


def _summary(name: str, part: list[tuple[float, bool]]) -> str:
    """Paragraph on some of the runs: how many are inside their interval, and the errors."""
    ratios = [ratio for ratio, _ in part]
    # The median of logarithms takes twice as long and half as long as equally wrong.
    off = 100 * np.expm1(np.median(np.abs(np.log(ratios))))
    return (
        f"\n{name}: {sum(is_inside for _, is_inside in part)} of {len(part)} inside their interval; median of reported / "
        f"predicted {np.median(ratios):.2f}, median error {off:.0f} %.\n"
    )


if __name__ == "__main__":
    main()
