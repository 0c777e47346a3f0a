"""Baselines of the kernel regressors on the same kept-out shapes.

    PERFMODEL_DATA=DIR python training/baselines.py [RECIPE ...]

Plain roofline: max(FLOPs / peak, bytes / bandwidth). Trees: gradient boosting (scikit-learn) of log
time on log shapes, FLOPs, bytes, device figures and kind; once as is, once told the software.
Writes training/baselines.json, which training/report.py prints beside our own errors.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn.intervals import absolute_percent
from perfmodel.cost.learn.rows import KindCode, one_hot
from perfmodel.cost.learn.training import Samples, gather, read_recipe, split
from perfmodel.ingest import kernel_table_paths
from perfmodel.ingest.tables import read_table, write_json

TRAINING = Path(__file__).parent
OUT = TRAINING / "baselines.json"
MOST_ROWS = 150_000
"""Rows that the trees are grown on (sampled), to keep a family under about two minutes."""


def baselines(samples: Samples, holdout: float) -> dict[str, float]:
    """Mean absolute percentage error of each baseline on the kept-out shapes."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # pyright: ignore[reportMissingImports]

    fit_on, check_on, test = split(samples, holdout)
    log_time = np.log(samples.time_s)
    result = {
        "roofline": float(
            absolute_percent(log_time[test] - roofline_log_time(samples)[test]).mean()
        )
    }
    # Trees need no part to stop early by: they learn from both that our training has.
    seen = np.concatenate([fit_on, check_on]).astype(np.int64)
    seen = np.random.default_rng(0).choice(seen, min(len(seen), MOST_ROWS), replace=False)
    for label, with_software in (("trees", False), ("trees_told_software", True)):
        x = tree_features(samples, with_software=with_software)
        trees = HistGradientBoostingRegressor(
            max_iter=500, learning_rate=0.1, max_leaf_nodes=63, min_samples_leaf=10, random_state=0
        )
        trees.fit(x[seen], log_time[seen])
        result[label] = float(absolute_percent(log_time[test] - trees.predict(x[test])).mean())
    return {name: round(percent, 2) for name, percent in result.items()}


def roofline_log_time(samples: Samples) -> Float64[np.ndarray, "n"]:
    """Log seconds of the plain roofline max(FLOPs / peak, bytes / bandwidth): the first
    baseline."""
    physics, machine = samples.physics()
    return np.log(np.maximum(physics.flops / machine.peak, physics.bytes / machine.bandwidth))


def tree_features(samples: Samples, *, with_software: bool) -> Float64[np.ndarray, "n F"]:
    """Inputs of the tree baseline: log shapes, FLOPs and bytes, device figures, kind (and
    stack)."""
    physics, machine = samples.physics()
    # Trees split one column at a time: without FLOPs and bytes they would have to find products.
    columns = [np.log2(1.0 + v) for v in samples.rows.shape.values()]
    columns += [
        np.log2(physics.flops),
        np.log2(physics.bytes),
        *(np.log2(figure) for figure in machine),
    ]
    code = one_hot(KindCode.of(samples.rows.kinds), samples.rows)
    extra = [samples.stack.astype(np.float64)] if with_software else []
    return np.column_stack([*columns, code, *extra])


def main(names: list[str]) -> None:
    """Baselines of the named recipes (all by default)."""
    paths = kernel_table_paths(os.environ["PERFMODEL_DATA"])
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    for name in names or [p.stem for p in sorted((TRAINING / "recipes").glob("*.toml"))]:
        recipe = read_recipe(TRAINING / "recipes" / f"{name}.toml")
        frames = [read_table(p) for p in paths if p.name.startswith(recipe.family)]
        samples = gather(frames, recipe.family, recipe.dtypes)
        known[name] = baselines(samples, recipe.holdout)
        print(name, known[name], flush=True)
        # After every recipe, as each takes minutes.
        write_json(OUT, dict(sorted(known.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
