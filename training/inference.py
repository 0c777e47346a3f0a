"""Fit the one-shot all-reduce of `perfmodel.cost` (latency, share of the link) on A100 and H100,
and hold it against devices that the fit does not see:
`PERFMODEL_DATA=DIR python training/inference.py` writes training/cards/inference.md.
"""

import os
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from perfmodel import catalog

TABLE = Path("aiconfigurator") / "collective_custom_allreduce.csv.gz"
CARD = Path(__file__).parent / "cards" / "inference.md"
FITTED = ("A100-SXM4-80GB", "H100-SXM-80GB")
HELD_OUT = ("B300-SXM", "GB300-NVL72")
MOST_BYTES = 2**17
"""Messages up to which kernels read directly; beyond, they share the sum out (two-shot)."""


def rows(data: Path) -> pd.DataFrame:
    """TensorRT-LLM's kernels in CUDA graphs, with the link rate of their device."""
    table = pd.read_csv(data / TABLE, low_memory=False).replace(
        {"device": {"GB300-NVL": "GB300-NVL72"}}
    )
    one_shot = table[table.software.str.startswith("trtllm") & (table.bytes <= MOST_BYTES)]
    one_shot = one_shot[one_shot.device.isin([*FITTED, *HELD_OUT])]
    links = [catalog.device(name).link_bandwidth_bytes_per_s for name in one_shot.device]
    return one_shot.assign(link=links)


def seconds(constants: np.ndarray, table: pd.DataFrame) -> np.ndarray:
    """latency + (n - 1) bytes / (share link), of log constants."""
    latency_s, share = np.exp(constants)
    return (latency_s + (table.num_ranks - 1) * table.bytes / (share * table.link)).to_numpy()


def main() -> None:
    """Fit both constants, and write their errors on devices seen and not seen."""
    table = rows(Path(os.environ["PERFMODEL_DATA"]))
    seen = table[table.device.isin(FITTED)]
    # Every device counts the same, however many rows it has.
    weight = seen.groupby("device").time_us.transform("size").to_numpy() ** -0.5

    def weighted_log_error(constants: np.ndarray) -> np.ndarray:
        """Residuals of the fit."""
        return weight * np.log(seconds(constants, seen) / (seen.time_us * 1e-6))

    constants = least_squares(weighted_log_error, np.log([4e-6, 0.5])).x
    latency_s, share = np.exp(constants)
    error = (seconds(constants, table) / (table.time_us * 1e-6) - 1).abs()
    by_device = error.groupby(table.device).agg(["size", "mean", "median"])
    lines = [
        f"| {row.Index} | {'held out' if row.Index in HELD_OUT else 'fitted'} | {row.n} | {row.mean:.1%} | "
        f"{row.median:.1%} |"
        for row in by_device.rename(columns={"size": "n"}).itertuples()
    ]
    CARD.write_text(
        "# Constants of inference\n\n"
        "One-shot all-reduce (`ONE_SHOT_S`, `ONE_SHOT_SHARE` of `perfmodel/cost/_inference.py`): "
        f"{latency_s * 1e6:.1f} us + (n - 1) bytes / ({share:.2f} of the link), on TensorRT-LLM's kernels of up to "
        f"{MOST_BYTES // 1024} KiB on 2, 4 and 8 ranks (aiconfigurator, Apache-2.0).\n\n"
        "| device | | rows | mean | median |\n|---|---|--:|--:|--:|\n"
        + "\n".join(lines)
        + "\n\nAttention over a compressed cache: the two rates that FlashMLA states for H800; no table holds it.\n"
    )
    print(CARD.read_text())


if __name__ == "__main__":
    main()
