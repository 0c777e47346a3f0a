"""Errors by operator on shapes that a regressor of one source and device never saw."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.cost.learn._intervals import figures_of_errors
from perfmodel.cost.learn._recipe import Recipe, Stages
from perfmodel.cost.learn._rows import KindCode
from perfmodel.cost.learn._tables import Samples, gather, may_be_fitted
from perfmodel.ingest import clean_kernels
from perfmodel.ingest.tables import text

CHECK_SHARE: Final = 0.05
"""Share of the shapes trained on that only stop training early."""


def operator_errors(
    tables: Sequence[pd.DataFrame], recipe: Recipe, *, column: str = "op", share: float = 0.2, seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Train on a random share of the shapes and report the errors on the rest, operator by operator.

    A shape is drawn with all its passes: none of them is trained on if it is kept out. Rows of one
    shape under several names of an operator count under each.

    Args:
        tables: measurements of one op family (other rows, and those not to be trusted, are ignored).
        recipe: sizes and steps of the network.
        column: what names the operator.
        share: of the shapes, kept out.

    Returns:
        One row per operator and pass: `family`, `operator`, `pass`, `n` (shapes kept out), `mean_ape`,
        `median_ape`, `p90_ape`, `bias` (per cent).

    Raises:
        TableError: for a malformed table or no usable row.
    """
    from perfmodel.cost.learn._evaluate import Trials, log_errors  # JAX on use only

    samples = gather(tables, recipe.family, recipe.dtypes)
    drawn = _drawn(samples, share, seed)
    kept_out = samples.shape_key[drawn == 2]
    trials = Trials(samples, recipe, KindCode.of(samples.rows.kinds), seed, Stages(recipe.name, progress=progress))
    regressor = trials.fit("operators", "", np.flatnonzero(drawn == 0), np.flatnonzero(drawn == 1))
    rows = []
    stated = pd.concat(list(tables), ignore_index=True)
    every: Any = clean_kernels(stated)
    usable = (text(every, "op_family") == recipe.family) & may_be_fitted(every)
    names = (text(stated, column) + "\t" + text(stated, "pass"))[usable]
    every = every[usable]
    for name in sorted(set(names)):
        part: Any = every[names == name]
        mine = _on_stacks(gather([part], recipe.family, recipe.dtypes), samples)
        error, _ = log_errors(regressor, mine, np.flatnonzero(np.isin(mine.shape_key, kept_out)))
        operator, _, which = name.partition("\t")
        rows.append({"family": recipe.family, "operator": operator, "pass": which, **figures_of_errors(error)})
    return pd.DataFrame(rows)


def _drawn(samples: Samples, share: float, seed: int) -> np.ndarray:
    """Of every sample, whether its shape is trained on (0), stops training (1) or is kept out (2)."""
    keys, index = np.unique(samples.shape_key, return_inverse=True)
    place = np.random.default_rng(seed).permutation(len(keys)) / len(keys)
    return np.where(place < share, 2, np.where(place < share + CHECK_SHARE, 1, 0))[index]


def _on_stacks(part: Samples, whole: Samples) -> Samples:
    """`part` with the stacks of `whole`, which a regressor of `whole` knows by index."""
    place = {s.key: i for i, s in enumerate(whole.stacks)}
    stack = np.array([place[s.key] for s in part.stacks])[part.stack]
    return replace(part, stack=stack, stacks=whole.stacks)
