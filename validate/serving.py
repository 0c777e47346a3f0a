"""Serving against published tables, and decode attention that its regressor has not seen: writes validate/serving.md.

python validate/serving.py [--decode]: `--decode` first fits the regressor of attention to decode rows alone, with
shapes and whole devices kept out (half an hour on two cores; PERFMODEL_DATA names the folder of the tables).
"""

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd

import perfmodel as pm
from perfmodel.cost.learn import Recipe, fit
from perfmodel.ingest.tables import write_text

HERE = Path(__file__).parent
PUBLISHED = HERE / "serving_published.csv"
DECODE = HERE / "serving_decode.json"
WORDS = [
    "model",
    "cluster",
    "layout",
    "prompt_tokens",
    "output_tokens",
    "batching",
    "dtype",
    "weight_dtype",
    "kv_dtype",
]
DEVICES_OUT = ("GB300-NVL72", "H100-SXM5-80GB", "L40S", "RTX-PRO-6000-Server")


def compared() -> pd.DataFrame:
    """Published rows with what is predicted for them, and its interval."""
    table = pd.read_csv(PUBLISHED, keep_default_na=False)
    table[["predicted", "low", "high"]] = [predicted(row) for _, row in table.iterrows()]
    table["error"] = table["predicted"] / table["value"] - 1
    table["inside"] = table["value"].between(table["low"], table["high"])
    return table


def predicted(row: pd.Series) -> tuple[float, float, float]:
    """The quantity of a published row with its interval; with as many requests as fit where the row says none."""
    words = row[WORDS].to_dict()
    model, cluster, layout = (words.pop(name) for name in WORDS[:3])
    found = pm.serve(model, cluster, layout, batch=int(row["batch"]) or None, **words)
    low, high = found.tokens_per_s_interval
    tokens = found.requests.batch * found.requests.output_tokens
    match row["quantity"]:
        case "tokens_per_s_per_device":
            return found.tokens_per_s_per_device, low / found.devices, high / found.devices
        case "latency_s":
            return tokens / found.tokens_per_s, tokens / high, tokens / low
        case "ttft_s":
            return found.ttft_s, *found.ttft_interval_s
        case _:
            return found.tpot_s, *found.tpot_interval_s


def published() -> str:
    """Errors by source, and the rows that are furthest off."""
    table = compared()
    table["ape"] = table["error"].abs()
    by = table.groupby(["source", "cluster", "quantity"], sort=False)
    rows = by.agg(rows=("ape", "size"), mean=("ape", "mean"), median=("ape", "median"), bias=("error", "median"),
                  inside=("inside", "mean")).reset_index()  # fmt: skip
    worst = table[table["ape"] > 0.3]
    shown = worst[["model", "cluster", "layout", "prompt_tokens", "output_tokens", "batch", "quantity", "error"]]
    return (
        "## Published servers\n\nRows of `serving_published.csv`, to which nothing is fitted; `inside`: within the "
        f"90 % interval. All {len(table)}: mean {table.ape.mean():.1%}, median {table.ape.median():.1%}, "
        f"{table.inside.mean():.0%} inside.\n\n{markdown(rows)}\n"
        "Rows that are more than 30 % off:\n\n" + markdown(shown)
    )


def decode() -> None:
    """Errors of the regressor of attention on decode rows that its training did not see."""
    recipe = Recipe(
        name="attention", family="attention", steps=6000, refit_steps=1, left_out_steps=2500, devices_out=DEVICES_OUT
    )
    tables = [Path(os.environ["PERFMODEL_DATA"]) / "aiconfigurator" / "attention_decode.csv.gz"]
    with TemporaryDirectory() as folder:
        found = fit(tables, Path(folder), family="attention", recipes=[recipe], seed=0)
    write_text(DECODE, json.dumps(found["attention"], indent=1))


def kernels() -> str:
    """The same as a table."""
    found = json.loads(DECODE.read_text())
    return "## Decode attention\n\n" + json.dumps(found)


def markdown(table: pd.DataFrame) -> str:
    """A table with shares as percentages."""
    shares = {"mean", "median", "bias", "inside", "error"} & set(table)
    text = table.assign(**{name: table[name].map(lambda v: f"{v:.1%}") for name in shares})
    lines = [" | ".join(map(str, row)) for row in (text.columns, ["---"] * len(text.columns), *text.to_numpy())]
    return "".join(f"| {line} |\n" for line in lines)


if __name__ == "__main__":
    if "--decode" in sys.argv:
        decode()
    text = "# Serving\n\nWritten by `python validate/serving.py`.\n\n" + published()
    write_text(HERE / "serving.md", text)
    print(text)
