"""The blind record: predicted once, never changed, and scored against what was measured."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from studies.blind_record import (
    ADAPTERS,
    FOLDER,
    RECORDED,
    Change,
    KnownSources,
    Look,
    blind_figures,
    blind_page,
    collections,
    looked_at,
    not_predicted,
    predicted_today,
    record_first_looks,
    recorded_looks,
    runs_of,
)
from studies.reliability import interval_scores, width_deciles

from perfmodel.errors import PerfModelError

RUNS = pd.DataFrame(
    {
        "case_id": ["a1", "a2", "b1"],
        "source": ["a", "a", "b"],
        "measured_iter_time_s": [1.0, 2.0, 4.0],
        "status": "ok",
    }
)
KNOWN = KnownSources(
    before_first_look=("b*",), changes=(Change(sources=("a",), what="networks are read"),)
)


def predicted(seconds: float):
    """Predict every row to take so long, half as long at least and twice as long at most."""

    def predict(rows: pd.DataFrame) -> pd.DataFrame:
        at = pd.Series(seconds, index=rows.index)
        return pd.DataFrame(
            {"predicted_iter_time_s": at, "lo_s": at / 2, "hi_s": at * 2, "skipped_reason": None},
            index=rows.index,
        )

    return predict


def test_a_first_look_is_kept_whatever_is_predicted_later(tmp_path: Path) -> None:
    first = RUNS[RUNS["source"] == "a"].reset_index(drop=True)
    assert record_first_looks("later", first, "c0ffee", predicted(1.0), tmp_path) == (["a"], [])
    kept = (tmp_path / "later.csv").read_bytes()
    assert record_first_looks("later", first, "decade", predicted(9.0), tmp_path) == ([], [])
    assert (tmp_path / "later.csv").read_bytes() == kept
    # a source that came later is recorded with its own commit, and nothing else moves
    assert record_first_looks("later", RUNS, "decade", predicted(9.0), tmp_path) == (["b"], [])
    assert (tmp_path / "later.csv").read_bytes().startswith(kept)
    looks = recorded_looks("later", tmp_path)
    assert tuple(looks) == RECORDED
    assert looks["commit"].tolist() == ["c0ffee", "c0ffee", "decade"]


def test_rows_that_come_after_their_sources_look_stay_without_one(tmp_path: Path) -> None:
    record_first_looks("later", RUNS.head(1), "c0ffee", predicted(1.0), tmp_path)
    assert record_first_looks("later", RUNS.head(2), "decade", predicted(1.0), tmp_path) == (
        [],
        ["a2"],
    )
    assert recorded_looks("later", tmp_path)["case_id"].tolist() == ["a1"]


def test_a_record_without_its_rows_and_rows_of_one_name_are_refused(tmp_path: Path) -> None:
    record_first_looks("later", RUNS, "c0ffee", predicted(1.0), tmp_path)
    with pytest.raises(PerfModelError, match="b1 has a first look"):
        record_first_looks("later", RUNS.head(2), "decade", predicted(1.0), tmp_path)
    with pytest.raises(PerfModelError, match="two rows are named a1"):
        record_first_looks(
            "later", pd.concat([RUNS, RUNS.head(1)]), "decade", predicted(1.0), tmp_path
        )


def test_scores_are_means_over_sources_median_rows_and_shares_inside() -> None:
    look = Look.of(RUNS, predicted(2.0)(RUNS))
    score = look.score()
    # errors 100 %, 0 %, 50 %: a source's mean first
    assert score["mean_over_sources"] == pytest.approx((0.5 + 0.5) / 2)
    assert score["median_row"] == pytest.approx(0.5)
    assert (score["rows"], score["predicted"], score["sources"]) == (3, 3, 2)
    assert score["inside"] == 1.0
    assert score["ratio"] == pytest.approx(4)
    none = predicted(2.0)(RUNS).assign(predicted_iter_time_s=np.nan)
    assert Look.of(RUNS, none).score() == {"rows": 3, "predicted": 0}


def test_sources_seen_before_their_first_look_count_for_no_blind_figure() -> None:
    first, today = Look.of(RUNS, predicted(2.0)(RUNS)), Look.of(RUNS, predicted(1.0)(RUNS))
    figures = blind_figures(first, today, KNOWN)
    assert figures["first"]["sources"] == 1
    assert figures["first"]["rows"] == 2
    assert set(figures["sources"]) == {"a", "b"}
    nothing = blind_figures(first, Look.of(RUNS, not_predicted(RUNS)), KNOWN)
    looks = [RUNS[["source"]].assign(commit="c0ffee")]
    assert (
        "today |"
        not in blind_page(nothing, looks, today, KNOWN).partition("## Source by source")[0]
    )
    page = blind_page(figures, looks, today, KNOWN)
    (line,) = [line for line in page.splitlines() if line.startswith("| a |")]
    assert "| c0ffee |" in line
    assert line.endswith("| after its first look | networks are read |")
    assert [
        looked_at(*of, KNOWN) for of in (("b1", "later"), ("c", "later"), ("c", "published"))
    ] == [
        "before its first look",
        "never",
        "from the beginning",
    ]


def test_the_first_collection_has_no_look(tmp_path: Path) -> None:
    for name in ("published", "published2", "published3", "other"):
        (tmp_path / name).mkdir()
        if name != "published3":
            (tmp_path / name / "runs.csv").write_text("case_id\n")
    assert [folder.name for folder in collections(tmp_path)] == ["published2"]


def test_wide_intervals_are_told_from_narrow_ones() -> None:
    rng = np.random.default_rng(0)
    half = np.exp(rng.uniform(-3, -0.5, 4000))
    measured = np.exp(rng.standard_normal(4000) * half / 1.645)
    one = np.ones(4000)
    deciles = width_deciles(measured, one, np.exp(-half), np.exp(half))
    assert sum(decile.n for decile in deciles) == 4000
    assert [decile.error for decile in deciles] == sorted(decile.error for decile in deciles)
    assert all(0.85 < decile.inside < 0.95 for decile in deciles)
    source = np.arange(4000) % 7
    scores = interval_scores(source, measured, one, np.exp(-half), np.exp(half))
    assert scores["ours"] < 0.8 * scores["fixed"]
    # what one fixed interval is told cannot be bettered by another fixed one
    same = interval_scores(source, measured, one, one * np.exp(-0.25), one * np.exp(0.25))
    assert same["ours"] >= same["fixed"] - 1e-9


def test_today_knows_the_settings_that_notes_state() -> None:
    """The compiled step of a script whose table has the word in its notes alone."""
    runs = pd.DataFrame(
        [{"case_id": "a", "source": "s", "status": "ok", "measured_iter_time_s": 1.0}]
    )
    runs["notes"] = "from 250 ms to 135 ms by torch.compile"
    asked = []

    def predict(rows: pd.DataFrame) -> pd.DataFrame:
        asked.append(rows)
        return not_predicted(rows)

    predicted_today(runs, predict)
    assert asked[0]["launch_and_overlap"].tolist() == ["compile=1"]
    assert "launch_and_overlap" not in runs


def test_first_looks_of_the_second_collection_are_as_they_were_given(data_dir: Path) -> None:
    collection = data_dir / "published2"
    runs, looks = runs_of(collection), recorded_looks("published2")
    assert looks["case_id"].tolist() == runs["case_id"].tolist()
    given = pd.concat(
        [pd.read_csv(file) for file in sorted((collection / "first_look").glob("*.csv"))]
    )
    given = given.set_index("case_id").loc[runs["case_id"]]
    for name in ("predicted_iter_time_s", "lo_s", "hi_s"):
        np.testing.assert_allclose(
            looks[name].to_numpy(float), given[name].to_numpy(float), rtol=1e-5
        )
    known = KnownSources.read(FOLDER / "sources.toml")
    blind = np.array([known.was_blind(source) for source in runs["source"]])
    score = Look.of(runs, looks).take(blind).score()
    # as the collection's own page counts them, but for two pages that it takes for one source
    assert score["predicted"] == 423
    assert score["mean_over_sources"] == pytest.approx(0.403, abs=0.01)
    assert score["median_row"] == pytest.approx(0.189, abs=5e-4)
    assert score["inside"] == pytest.approx(0.46, abs=0.005)


def test_rows_that_leave_nothing_open_and_those_told_not_to_fit_are_counted() -> None:
    predictions = predicted(2.0)(RUNS).assign(
        open_deviation=[0.0, 0.3, 0.01], fits_probability=[0.05, 1.0, 0.5]
    )
    look = Look.of(RUNS, predictions)
    assert look.described().source.tolist() == ["a", "b"]
    assert look.unlikely_to_fit() == 1
    # first looks do not say either
    unknown = Look.of(RUNS, predicted(2.0)(RUNS))
    assert len(unknown.described().source) == 0
    assert unknown.unlikely_to_fit() == 0


def test_the_narrower_half_has_the_narrowest_intervals() -> None:
    predictions = predicted(2.0)(RUNS).assign(hi_s=[4.0, 8.0, 16.0])
    assert Look.of(RUNS, predictions).narrower_half().hi_s.tolist() == [4.0, 8.0]


def test_errors_are_told_apart_by_device_and_kind_every_source_counting_the_same() -> None:
    predictions = predicted(2.0)(RUNS).assign(
        device_generation=["Hopper", "Hopper", "Volta"], model_kind="decoder"
    )
    look = Look.of(RUNS, predictions)
    by_device = look.by_group("device_generation")
    assert by_device["Hopper"]["rows"] == 2
    assert by_device["Hopper"]["bias"] == pytest.approx(2**0.5 - 1)
    assert by_device["Volta"]["mean_over_sources"] == pytest.approx(0.5)
    # source a is twice as slow as told in one of two rows, source b in all
    assert look.by_group("model_kind")["decoder"]["bias"] == pytest.approx(2 ** (0.25 - 0.5) - 1)
    assert Look.of(RUNS, predicted(2.0)(RUNS)).by_group("model_kind") == {}


def test_errors_are_told_apart_by_framework_and_by_adapters() -> None:
    """Of the runs themselves: the framework without its year, and LoRA where a row has a rank, even
    an open one."""
    runs = RUNS.assign(framework=["nemo@2024", "nemo@2025", None]).assign(
        **{ADAPTERS: [16, None, 0]}
    )
    look = Look.of(runs, predicted(2.0)(runs))
    by_framework = look.by_group("framework")
    assert by_framework.keys() == {"nemo"}
    assert (by_framework["nemo"]["rows"], by_framework["nemo"]["slower"]) == (2, 1)
    assert look.by_group("trained")["adapters (LoRA)"]["rows"] == 2
    assert Look.of(RUNS, predicted(2.0)(RUNS)).by_group("trained") == {}
