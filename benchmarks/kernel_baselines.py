"""Baselines of the kernel regressors on the same kept-out shapes.

    python benchmarks/kernel_baselines.py [FAMILY ...]      (PERFMODEL_DATA names the tables' folder)

Plain roofline: max(FLOPs / peak, bytes / bandwidth). Trees: gradient boosting (scikit-learn) of
log time on log shapes, FLOPs, bytes, device figures and kind; once as is, once told the software.
"""

import os
import sys
from typing import Any

import numpy as np

from perfmodel.io import read_table
from perfmodel.learn import (
    Samples,
    absolute_percent,
    default_recipes,
    figures_lookup,
    gather,
    kernel_table_paths,
    roofline_log_time,
    split,
    tree_features,
)

MOST_ROWS = 150_000
"""Rows that the trees are grown on (sampled), to keep a family under about two minutes."""


def baselines(samples: Samples, holdout: float) -> dict[str, float]:
    """Mean absolute percentage error of each baseline on the kept-out shapes."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    fit_on, check_on, test = split(samples, holdout)
    log_time = np.log(samples.time_s)
    roofline = roofline_log_time(samples)[test]
    result = {"roofline": float(absolute_percent(log_time[test] - roofline).mean())}
    rng = np.random.default_rng(0)
    seen = np.concatenate([fit_on, check_on]).astype(np.int64)
    seen = rng.choice(seen, min(len(seen), MOST_ROWS), replace=False)
    for label, with_software in (("trees", False), ("trees, told the software", True)):
        x = tree_features(samples, with_software=with_software)
        trees = HistGradientBoostingRegressor(
            max_iter=500, learning_rate=0.1, max_leaf_nodes=63, min_samples_leaf=10, random_state=0
        )
        trees.fit(x[seen], log_time[seen])
        result[label] = float(absolute_percent(log_time[test] - trees.predict(x[test])).mean())
    return {k: round(v, 2) for k, v in result.items()}


def main(names: list[str]) -> dict[str, Any]:
    """Baselines of the named regressors (all by default)."""
    frames = [read_table(path) for path in kernel_table_paths(os.environ["PERFMODEL_DATA"])]
    report = {}
    for recipe in default_recipes():
        if not names or recipe.name in names or recipe.family in names:
            samples = gather(frames, recipe.family, recipe.dtypes, figures_lookup())
            report[recipe.name] = baselines(samples, recipe.holdout)
            print(recipe.name, report[recipe.name], flush=True)
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
