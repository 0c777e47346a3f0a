"""What else predicts the published runs: other tools' figures, and one rate of FLOPs per source."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

REFERENCE_FILE = "predictor_reference.csv"


def naive_times_s(
    runs: pd.DataFrame, measured_s: Float[np.ndarray, " n"], flops: Float[np.ndarray, " n"]
) -> np.ndarray:
    """Step time at the median rate of model FLOPs per device over the other runs of the same source, device and dtype.

    Leave-one-out; NaN where a run has no others.
    """
    rate = flops / measured_s
    found = np.full(len(runs), np.nan)
    keys = [runs[name].astype(str) for name in ("source", "device", "dtype") if name in runs]
    for members in runs.reset_index(drop=True).groupby([key.to_numpy() for key in keys]).indices.values():
        known = members[np.isfinite(rate[members])]
        for i in known:
            others = known[known != i]
            if len(others):
                found[i] = flops[i] / np.median(rate[others])
    return found


def reference_predictions(folder: Path, case_ids: Any) -> dict[str, pd.DataFrame]:
    """By predictor, `time_s` and `peak_bytes` for each case (NaN where it has none); empty without the table."""
    path = folder / REFERENCE_FILE
    if not path.is_file():
        return {}
    table = pd.read_csv(path)
    unit = np.where(table["memory_unit"] == "GiB", 2.0**30, 1e9)
    cells = {"case_id": table["case_id"], "predictor": table["predictor"], "time_s": table["predicted_iter_time_s"]}
    frame = pd.DataFrame(cells | {"peak_bytes": table["predicted_memory"] * unit})
    columns = ["time_s", "peak_bytes"]
    return {
        str(name): pd.DataFrame(part.set_index("case_id")[columns].reindex(case_ids))
        for name, part in frame.groupby("predictor")
    }
