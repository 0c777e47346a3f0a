"""The collective models beside three baselines on the same rows kept out.

    python benchmarks/collective_baselines.py [--data DIR] [--report FILE] [--quick]

Alpha-beta: steps x alpha + volume / beta of the ring (pairwise, direct), both constants fitted per measured
series, software and dtype. Trees: gradient boosting (scikit-learn) of log time on log sizes, ranks, nominal
link rates and category codes. Interpolation: log-log between the nearest sizes of the same series, software,
dtype and rank count. `shapes` keeps out whole (device, kind, ranks, size) shapes, `ranks` rank counts between
others, `devices` every third device. Hyperparameters of the corrections are those of the shipped weights.
"""

import argparse
import hashlib
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from perfmodel.io import read_table, write_text
from perfmodel.learn import (
    TERMS,
    collective_rows,
    fit_collectives,
    link_class,
    load_collective_weights,
    moe_rows,
    predict_collective_table,
    ranks_fold,
)

ROOT = Path(__file__).parents[1]
ALGORITHM = {"all_to_all": "pairwise", "send_recv": "direct"}
KEPT_OUT = 0.1


def read(data: Path) -> pd.DataFrame:
    """Every training table, with canonical columns for the baselines."""
    plan = tomllib.loads((ROOT / "training" / "collectives.toml").read_text())
    table = pd.concat([read_table(data / name) for name in plan["tables"]], ignore_index=True)
    rows, moe = collective_rows(table), moe_rows(table)
    is_moe = table["collective"].str.startswith("moe").to_numpy()
    table["entry"] = np.where(is_moe, _moe_entry(moe), rows.series + "|" + rows.stack + "|" + rows.dtype)
    table["size"] = np.where(is_moe, moe.tokens, rows.buffer_bytes)
    table["ranks"] = np.where(is_moe, moe.ranks, rows.ranks)
    table["per_node"] = np.where(is_moe, 8, rows.ranks_per_node)
    table["is_moe"] = is_moe
    return table


def _moe_entry(moe: Any) -> np.ndarray:
    names = ("series", "hidden", "topk", "experts", "sms", "nodes")
    return _joined(pd.DataFrame({name: getattr(moe, name) for name in names}))


def _joined(frame: pd.DataFrame) -> np.ndarray:
    rows = zip(*(frame[name].tolist() for name in frame), strict=True)
    return np.array(["|".join(map(str, row)) for row in rows], dtype=object)


def shapes_out(table: pd.DataFrame) -> np.ndarray:
    """Rows of the shapes that a stable hash keeps out."""
    columns = ["source", "device", "collective", "ranks", "per_node", "size", "hidden", "topk", "experts"]
    keys, inverse = np.unique(_joined(table[columns]).astype(str), return_inverse=True)
    fraction = [int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) / 2**32 for key in keys]
    return np.array(fraction)[inverse] < KEPT_OUT


def alpha_beta(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray:
    """Non-negative least squares of relative error; NaN where the entry was never measured."""
    from scipy.optimize import nnls

    def terms(rows: pd.DataFrame) -> np.ndarray:
        kind = rows["collective"].iloc[0]
        if rows["is_moe"].iloc[0]:
            return np.stack([np.ones(len(rows)), rows["size"].to_numpy() * rows["hidden"].to_numpy()], axis=1)
        form = TERMS[kind, ALGORITHM.get(kind, "ring")]
        ranks = rows["ranks"].to_numpy(float)
        return np.stack([form.steps(ranks), form.volume(ranks) * rows["size"].to_numpy()], axis=1)

    fitted = {}
    for entry, rows in train.groupby("entry"):
        x = terms(rows) / rows["time_us"].to_numpy()[:, None]
        scale = x.max(axis=0)
        fitted[entry] = nnls(x / scale, np.ones(len(rows)))[0] / scale
    result = np.full(len(test), np.nan)
    for entry, index in test.groupby("entry").indices.items():
        if entry in fitted:
            result[index] = terms(test.iloc[index]) @ fitted[entry]
    return result


def trees(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray:
    """Gradient-boosted trees of log time."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    names = ["source", "device", "interconnect", "collective", "algorithm", "mode", "software", "variant", "dtype"]
    codes = {n: {v: i for i, v in enumerate(sorted({str(v) for v in train[n]}))} for n in names}

    def features(rows: pd.DataFrame) -> np.ndarray:
        link = [link_class(i, d, False) for i, d in zip(rows["interconnect"], rows["device"], strict=True)]
        numbers = [rows[n].to_numpy(float) for n in ("size", "ranks", "per_node", "hidden", "topk", "experts", "sms")]
        numbers += [rows["size"].to_numpy() / rows["ranks"].to_numpy()]
        numbers.append(np.array([x.bandwidth_bytes_per_s for x in link]))
        columns = [np.log2(x) for x in numbers]
        columns += [np.array([codes[n].get(str(v), np.nan) for v in rows[n]]) for n in names]
        return np.stack(columns, axis=1)

    model = HistGradientBoostingRegressor(
        max_iter=500, learning_rate=0.1, max_leaf_nodes=63, min_samples_leaf=10, random_state=0
    )
    x = features(train)
    varies = np.nanmax(x, axis=0, initial=-np.inf) > np.nanmin(x, axis=0, initial=np.inf)
    model.fit(x[:, varies], np.log(train["time_us"]))
    return np.exp(model.predict(features(test)[:, varies]))


def interpolation(train: pd.DataFrame, test: pd.DataFrame) -> np.ndarray:
    """Log-log within an entry and placement, the last slope beyond its ends; NaN for unmeasured ones."""
    keys = ["entry", "ranks", "per_node"]
    known = {k: rows.groupby("size")["time_us"].median() for k, rows in train.groupby(keys)}
    result = np.full(len(test), np.nan)
    for key, index in test.groupby(keys).indices.items():
        if key in known and len(known[key]) > 1:
            x, y = np.log(known[key].index.to_numpy(float)), np.log(known[key].to_numpy())
            q = np.log(test["size"].to_numpy(float)[index])
            value = np.interp(q, x, y)
            low, high = q < x[0], q > x[-1]
            value[low] = y[0] + (q[low] - x[0]) * (y[1] - y[0]) / (x[1] - x[0])
            value[high] = y[-1] + (q[high] - x[-1]) * (y[-1] - y[-2]) / (x[-1] - x[-2])
            result[index] = np.exp(value)
    return result


def compare(train: pd.DataFrame, test: pd.DataFrame) -> pd.DataFrame:
    """Absolute relative errors of every method, whether our interval covers, one row per test row."""
    shipped = load_collective_weights()
    with tempfile.TemporaryDirectory() as folder:
        weights = fit_collectives([train], Path(folder), start=shipped, studies=False)
    ours = predict_collective_table(weights, test)
    truth = test["time_us"].to_numpy()
    methods = {"ours": ours.time_s * 1e6}
    methods |= {f.__name__: f(train, test) for f in (alpha_beta, trees, interpolation)}
    errors = pd.DataFrame({name: np.abs(value / truth - 1) for name, value in methods.items()})
    errors["covered"] = (ours.lo_s * 1e6 <= truth) & (truth <= ours.hi_s * 1e6)
    errors["family"] = np.where(test["is_moe"], "moe dispatch and combine", test["collective"])
    errors["source"] = test["source"].to_numpy()
    return errors


def lines(title: str, errors: pd.DataFrame, column: str = "family") -> list[str]:
    """Markdown rows: mean absolute error of every method and the coverage."""
    result = []
    for name, part in [*errors.groupby(column), ("all", errors)]:
        figures = [part[m].mean() for m in ("ours", "alpha_beta", "trees", "interpolation")]
        shown = " | ".join("-" if np.isnan(f) else f"{100 * f:.1f}" for f in figures)
        bold = shown.split(" | ", 1)
        result.append(
            f"| {title} | {name} | {len(part)} | **{bold[0]}** | {bold[1]} | {100 * part['covered'].mean():.0f} |"
        )
    return result


def main() -> None:
    """Print the comparison and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("PERFMODEL_DATA", ROOT.parent / "shared" / "data")
    parser.add_argument("--data", type=Path, default=Path(default))
    parser.add_argument("--report", type=Path, help="write the tables to this Markdown file")
    parser.add_argument("--quick", action="store_true", help="shapes kept out only")
    arguments = parser.parse_args()
    table = read(arguments.data)
    plain = table[~table["is_moe"]].reset_index(drop=True)
    rows = collective_rows(plain)
    splits = {"shapes": (table, shapes_out(table))}
    if not arguments.quick:
        splits["ranks"] = (plain, ranks_fold(rows) == 0)
        splits["devices"] = (table, device_out(table))
    head = "| kept out | collective | rows | this model | alpha-beta | trees | interpolation | 90 % coverage |"
    text = [head, "|---|---|--:|--:|--:|--:|--:|--:|"]
    detail: list[str] = []
    for title, (frame, out) in splits.items():
        errors = compare(frame[~out].reset_index(drop=True), frame[out].reset_index(drop=True))
        text += lines(title, errors)
        detail += lines(title, errors, "source")
        print("\n".join(text[-8:]), flush=True)
        print("\n".join(detail[-14:]), flush=True)
    if arguments.report:
        note = "Mean absolute error in per cent on rows kept out, `python benchmarks/collective_baselines.py`.\n"
        body = ["# Collectives", "", note, *text, "", "By source:", "", head.replace("collective", "source"), text[1]]
        write_text(arguments.report, "\n".join([*body, *detail]) + "\n")


def device_out(table: pd.DataFrame) -> np.ndarray:
    """Rows of every third device."""
    return table["device"].isin(sorted(table["device"].unique())[1::3]).to_numpy()


if __name__ == "__main__":
    main()
