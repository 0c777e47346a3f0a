"""The evidence of what pipelined runs take beyond their prediction finds what was put in."""

import pandas as pd
import pytest
from studies.excess import by_devices, pipeline_excess


def runs(**columns: object) -> pd.DataFrame:
    frame = pd.DataFrame({"model": "m", "layers": 24, "num_microbatches": 16, **columns})
    frame["predicted_iter_time_s"] = 2.0
    per_layer_s = 1e-3 * frame["tp"] * (frame["pp"] > 1)
    beyond_s = frame.pop("slow") * 1.2 if "slow" in frame else 0.0
    frame["measured_s"] = 2.0 + frame["num_microbatches"] * (
        per_layer_s * frame["layers"] / frame["pp"] + beyond_s
    )
    return frame


def test_time_per_layer_and_slow_runs_are_found() -> None:
    several = runs(tp=[2] * 5 + [8] * 5, pp=4, slow=[0, 0, 0, 0, 1] * 2)
    found = pipeline_excess(pd.concat([several, runs(tp=[2, 8], pp=1)]))
    assert [row["several_stages_ms"] for row in found["by_tp"]] == pytest.approx([2, 8])
    assert [row["one_stage_ms"] for row in found["by_tp"]] == pytest.approx([0, 0])
    one, four = found["by_pp"]
    assert (one["slow"], one["more_s"], four["slow"]) == (0, None, 2)
    assert four["more_s"] == pytest.approx(1.2)


def test_runs_of_few_micro_batches_or_without_a_prediction_say_nothing() -> None:
    frame = runs(tp=[1, 2, 4], pp=2)
    frame.loc[1, "predicted_iter_time_s"] = None
    frame.loc[2, "num_microbatches"] = 4
    assert [row["tp"] for row in pipeline_excess(frame)["by_tp"]] == [1]
    assert pipeline_excess(pd.DataFrame({"case_id": []})) == {"by_tp": [], "by_pp": []}


def test_slow_runs_and_regret_are_counted_by_devices() -> None:
    few = pd.DataFrame(
        {"n_devices": 8, "pp": [1, 1, 1, 2, 2], "measured_s": [1.0, 2.0, 3.0, 4.0, 5.0]}
    )
    few["predicted_iter_time_s"] = [1.0, 2.0, 3.0, 3.5, 5.0]
    many = few.assign(n_devices=64, measured_s=[5.0, 2.0, 3.0, 4.0, 15.0])
    first, last = by_devices(pd.concat([few, many]).assign(source="s"))
    assert (first["devices"], first["runs"], first["slow"], first["regret"]) == (
        8,
        [3, 2],
        [0.0, 0.0],
        0.0,
    )
    assert last["slow"] == pytest.approx([1 / 3, 1 / 2])
    assert last["regret"] == last["worst_regret"] == pytest.approx(1.5)
    assert by_devices(pd.DataFrame({"case_id": []})) == []
