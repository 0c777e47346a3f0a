"""Choosing among published runs of one model on the same devices: is what we would choose what was fastest?"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.validation import errors, predict_cases, read_rows

FILES: Final = ("ultrascale_playbook.csv", "vtrain.csv", "bloom.csv")
GROUP: Final = (
    "source", "model", "layers", "hidden", "seq_len", "dtype", "device", "n_devices", "global_batch",
)  # fmt: skip
"""What runs of one group share: a choice of layout is between runs of the same job."""


def predicted_runs(
    data: Path, files: Sequence[str] = FILES, progress: Callable[[str, int, int], None] | None = None
) -> pd.DataFrame:
    """Rows of the files with their predictions beside them."""
    runs = pd.concat([read_rows(data / "published" / name) for name in files], ignore_index=True)
    predicted = predict_cases(runs, None, progress)
    return runs.join(predicted.drop(columns="case_id"))


def group_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Per group of at least two timed runs that are predicted: Spearman, and what our choice costs.

    `regret`: measured time of the run that is predicted fastest, over that of the fastest, less one. Repeats of one
    layout are one run, of their median time.
    """
    timed = runs[(runs["status"] == "ok") & runs["measured_iter_time_s"].notna() & runs["skipped_reason"].isna()]
    layout = ["tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch", "zero_stage", "recompute", "sequence_parallel"]
    times = ["measured_iter_time_s", "predicted_iter_time_s"]
    once = timed.groupby([*GROUP, *layout], dropna=False)[times].median().reset_index()
    rows = []
    for _, group in once.groupby(list(GROUP), dropna=False):
        if len(group) < 2:
            continue
        measured_s, predicted_s = (np.asarray(group[name], float) for name in times)
        chosen = int(np.argmin(predicted_s))
        rows.append(
            group[list(GROUP)].iloc[0].to_dict()
            | {
                "runs": len(group),
                "spearman": errors(measured_s, predicted_s)["spearman"],
                "regret": float(measured_s[chosen] / measured_s.min() - 1),
                "worst": float(measured_s.max() / measured_s.min() - 1),
            }
        )
    return pd.DataFrame(rows)


def fit_figures(runs: pd.DataFrame) -> dict[str, Any]:
    """How often "fits" agrees with whether a run was timed or ran out of memory.

    Rows whose failure may have had another cause (`oom_or_crash`) count as out of memory.
    """
    known = runs[runs["skipped_reason"].isna() & runs["status"].isin(("ok", "oom", "oom_or_crash"))]
    ran, fits = np.asarray(known["status"] == "ok"), np.asarray(known["fits"], bool)
    return {
        "n": len(known),
        "accuracy": float((ran == fits).mean()) if len(known) else None,
        "ran, said to fit": int((ran & fits).sum()),
        "ran, said not to": int((ran & ~fits).sum()),
        "failed, said to fit": int((~ran & fits).sum()),
        "failed, said not to": int((~ran & ~fits).sum()),
    }


def group_summary(table: pd.DataFrame) -> dict[str, Any]:
    """Medians over groups; Spearman over those of at least five runs."""
    regret, worst = np.asarray(table["regret"], float), np.asarray(table["worst"], float)
    spearman = np.array(table["spearman"], float)[np.asarray(table["runs"]) >= 5]
    spearman = spearman[~np.isnan(spearman)]
    return {
        "groups": len(table),
        "regret, median": float(np.median(regret)),
        "regret, mean": float(np.mean(regret)),
        "regret, p90": float(np.quantile(regret, 0.9)),
        "best chosen": float(np.mean(regret == 0)),
        "any run, median": float(np.median(worst)),
        "groups of 5 and more": len(spearman),
        "spearman, median": float(np.median(spearman)) if len(spearman) else None,
        "spearman, least": float(np.min(spearman)) if len(spearman) else None,
    }
