"""Serving against published tables: writes validate/serving.md.

python validate/serving.py
"""

from pathlib import Path

import numpy as np
import pandas as pd

import perfmodel as pm
from perfmodel.errors import PerfModelError

HERE = Path(__file__).parent
SAME = ["model", "cluster", "layout", "prompt_tokens", "output_tokens", "batching", "dtype", "weight_dtype", "kv_dtype"]


def predicted(row: pd.Series) -> tuple[float, float, float, bool]:
    """The quantity of a published row with its interval, and whether the server fits; as many requests as fit where
    the row says none."""
    words = row[SAME].to_dict()
    model, cluster, layout = (words.pop(name) for name in SAME[:3])
    batch = int(row["batch"]) or pm.serve(model, cluster, layout, batch=1, **words).memory.most_requests
    found = pm.serve(model, cluster, layout, batch=batch, **words)
    whole = found.tokens_per_s
    low, high = found.tokens_per_s_interval
    tokens = batch * row["output_tokens"]
    return {
        "tokens_per_s_per_device": (found.tokens_per_s_per_device, low / found.devices, high / found.devices),
        "latency_s": (tokens / whole, tokens / high, tokens / low),
        "ttft_s": (found.ttft_s, *found.ttft_interval_s),
        "tpot_s": (found.tpot_s, *found.tpot_interval_s),
    }[row["quantity"]] + (found.fits,)


def compared() -> pd.DataFrame:
    """Published rows with their predictions."""
    table = pd.read_csv(HERE / "serving_published.csv", keep_default_na=False)
    found = [predicted(row) for _, row in table.iterrows()]
    table[["predicted", "low", "high", "fits"]] = found
    table["error"] = table["predicted"] / table["value"] - 1
    return table


if __name__ == "__main__":
    pd.set_option("display.width", 250, "display.max_rows", 500, "display.max_columns", 50)
    t = compared()
    t["src"]=t.source.str[:12]
    t["in"]=(t.value>=t.low)&(t.value<=t.high)
    print(t[["src","model","cluster","layout","prompt_tokens","output_tokens","batch","dtype","quantity","value","predicted","error","in","fits"]].to_string())
    t["ape"]=t.error.abs()
    print(t.groupby(["src","cluster","quantity"])[["ape","error","in"]].agg({"ape":["size","mean","median"],"error":"median","in":"mean"}))
