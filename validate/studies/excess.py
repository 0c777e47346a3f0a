"""What pipelined runs of one framework take beyond their prediction, by tensor parallel degree and
pipeline stages.

Evidence of a term that is missing, not a part of any prediction.
"""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool
from studies.pairs import ranking
from studies.tables import percent, rows_table

LEAST_MICRO_BATCHES = 8
"""From here on filling the pipeline and the optimizer are a small part of the step."""
QUARTILE = 0.25
SLOW_S = 0.4
"""Of a micro-batch, beyond its prediction: no layer's excess adds up to so much, transfers that
wait do."""
FAR = 2.0
"""Times its prediction from which a run of few micro-batches, too, is counted as slow."""


def by_devices(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Figures by number of devices: shares of runs that took `FAR` times their prediction or more,
    with one stage and with several, and the regret of the layouts predicted fastest.

    Args:
        runs: as of `pipeline_excess`.
    """
    known = runs.reindex(
        columns=[*runs.columns.union(["measured_s", "predicted_iter_time_s", "n_devices", "pp"])]
    )
    known = known.dropna(subset=["measured_s", "predicted_iter_time_s", "n_devices", "pp"])
    rows = []
    for devices, members in known.groupby("n_devices"):
        measured_s = np.asarray(members["measured_s"], float)
        predicted_s = np.asarray(members["predicted_iter_time_s"], float)
        several = np.asarray(members["pp"] > 1)
        slow = measured_s >= FAR * predicted_s
        slow_shares = []
        for of_depth in (~several, several):
            slow_shares.append(float(slow[of_depth].mean()) if of_depth.any() else None)
        # The runs are of one source, whose ranking is the only one.
        rankings = [*ranking(members, measured_s, predicted_s).values()]
        figures = rankings[0] if rankings else {"groups": 0}
        rows.append(
            {
                "devices": int(devices),  # pyright: ignore[reportArgumentType]
                "runs": [int((~several).sum()), int(several.sum())],
                "slow": slow_shares,
                "groups": figures["groups"],
                "regret": figures.get("regret"),
                "worst_regret": figures.get("worst_regret"),
            }
        )
    return rows


def pipeline_excess(runs: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """Measured less predicted time of each micro-batch, in two tables.

    Args:
        runs: of one framework, with `measured_s` and `predicted_iter_time_s`, seconds per step.

    Returns:
        `by_tp`: per tp, milliseconds per micro-batch and layer of a stage that three quarters of
        the runs exceed, with one stage and with several, those apart that take `SLOW_S` more.
        `by_pp`: per number of stages, how many do, and the median of what they take more per
        micro-batch than a quarter of those alike but for micro-batch and devices that do not, or
        than predicted where there are none, seconds.
    """
    names = ["tp", "pp", "layers", "num_microbatches", "measured_s", "predicted_iter_time_s"]
    known = runs.reindex(columns=[*names, "model"]).dropna()
    frame = known[names].astype(float).assign(model=known["model"])
    # In short steps what is not per micro-batch would count as excess.
    frame = frame[frame["num_microbatches"] >= LEAST_MICRO_BATCHES]
    extra_s = (frame["measured_s"] - frame["predicted_iter_time_s"]) / frame["num_microbatches"]
    frame["per_layer_s"] = extra_s * frame["pp"] / frame["layers"]

    # Slow runs are held against usual ones of the same degrees and model: what these take more
    # than predicted is not what makes the others slow.
    frame["usual_s"] = extra_s.where(extra_s <= SLOW_S)
    similar = frame.groupby(["tp", "pp", "model"])["usual_s"]
    frame["beyond_s"] = extra_s - similar.transform("quantile", QUARTILE).fillna(0.0)
    # Slow runs are a kind of their own, and told apart in every figure.
    is_slow = np.asarray(extra_s > SLOW_S)

    tp, pp, per_layer_s, beyond_s = (
        np.asarray(frame[k], float) for k in ("tp", "pp", "per_layer_s", "beyond_s")
    )

    def quartile_ms(chosen: Bool[np.ndarray, " runs"]) -> float | None:
        """Milliseconds per layer and micro-batch that three quarters of some runs exceed."""
        return float(1e3 * np.quantile(per_layer_s[chosen], QUARTILE)) if chosen.any() else None

    by_tp = [
        {
            "tp": int(n),
            "runs": int((tp == n).sum()),
            "one_stage_ms": quartile_ms((tp == n) & (pp == 1) & ~is_slow),
            "several_stages_ms": quartile_ms((tp == n) & (pp > 1) & ~is_slow),
        }
        for n in np.unique(tp)
    ]
    by_pp = []
    for n in np.unique(pp):
        slow_s = beyond_s[(pp == n) & is_slow]
        more_s = float(np.median(slow_s)) if len(slow_s) else None
        by_pp.append(
            {"pp": int(n), "runs": int((pp == n).sum()), "slow": len(slow_s), "more_s": more_s}
        )
    return {"by_tp": by_tp, "by_pp": by_pp}


def excess_text(excess: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Section on how much longer than predicted the playbook's runs take, which is most of the
    sweep's error."""
    if not excess["by_tp"]:
        return []
    return [
        "## Pipelines of nanotron",
        "Most of the playbook's time error, of its ranking and of its coverage comes from pipelined runs that take "
        "much longer than others of the same layout, by the same time per micro-batch whatever its size, the model and "
        "tp: as if every transfer between stages waited a quarter of a second (stages within have twice the transfers "
        "of the first and the last). The more devices, the more runs do; those on most devices, and pipelines of the "
        "largest tp, all. Where memory tells the two versions of the framework apart, they are of the one that gathers "
        "inputs again in backward, and nearly none is of the other. Nothing else in a row tells which will, and no "
        "other source has it, so that no term for it can be held against rows that it was not fitted on.",
        _stages_table(excess["by_pp"]),
        "The others, measured less predicted, runs of at least 8 micro-batches: a layer takes so many milliseconds "
        "more per micro-batch that three quarters of the runs take still more. Hosts of pipelines check every "
        "collective, and so do those of some runs of one stage, which are among the slow ones above where tp is high.",
        _layers_table(excess["by_tp"]),
        "What choosing by prediction costs on so many devices: most of it on the most, where runs of any layout are "
        "slow or not whatever it is, so that which is the fastest measured is chance.",
        _devices_table(excess["by_devices"]),
    ]


def _stages_table(by_pp: list[dict[str, Any]]) -> str:
    """Table by number of stages: how many runs are slow, and by how much."""
    rows = []
    for row in by_pp:
        more = "-" if row["more_s"] is None else f"{row['more_s']:.2f} s"
        rows.append((row["pp"], row["runs"], row["slow"], more))
    return rows_table(("stages", "runs", "slow ones", "more per micro-batch"), rows)


def _layers_table(by_tp: list[dict[str, Any]]) -> str:
    """Table by tensor-parallel degree: excess per layer, with one stage and with several."""
    rows = []
    for row in by_tp:
        one_stage = _ms(row["one_stage_ms"])
        several_stages = _ms(row["several_stages_ms"])
        rows.append((row["tp"], row["runs"], one_stage, several_stages))
    return rows_table(("tp", "runs", "one stage", "several stages"), rows)


def _ms(value_ms: float | None) -> str:
    """Format milliseconds; a dash for none."""
    return "-" if value_ms is None else f"{value_ms:.1f} ms"


def _devices_table(by_devices_rows: list[dict[str, Any]]) -> str:
    """Table by number of devices: runs, slow runs, and the regret of choosing by prediction."""
    head = (
        "devices",
        "one stage",
        "several",
        "slow, one stage",
        "slow, several",
        "groups",
        "regret",
        "largest",
    )
    rows = []
    for row in by_devices_rows:
        slow = [percent(share) for share in row["slow"]]
        regret = percent(row["regret"])
        worst = percent(row["worst_regret"])
        rows.append((row["devices"], *row["runs"], *slow, row["groups"], regret, worst))
    return rows_table(head, rows)
