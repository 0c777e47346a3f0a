"""Results in notebooks: their tables hold the results' figures, and progress shows only where it is
seen."""

import sys
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

import perfmodel as pm
from perfmodel.display import frame_html, progress, shows_progress
from perfmodel.planning.what_if import Curve
from perfmodel.schedule import schedule_facts
from perfmodel.timeline import timeline_frame
from perfmodel.validation import ValidationReport


class Reader(HTMLParser):
    """Text cells, summaries, and whether every element is closed."""

    VOID = ("br", "input", "meta")

    def __init__(self, html):
        super().__init__()
        self.open, self.cells, self.summaries = [], [], []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)
        if self.open and self.open[-1] == "summary":
            self.summaries.append(data)


def test_prediction_folds_its_breakdown_memory_and_critical_path(prediction):
    html = prediction._repr_html_()
    read = Reader(html)
    assert read.summaries == [
        "breakdown",
        "memory per pipeline rank as generic reports it, GiB",
        "critical path",
        "where the times come from",
        "timeline",
    ]
    assert (
        f"{prediction.mfu:.1%}, {prediction.tflops_per_device:.0f} TFLOP/s per device" in read.cells
    )
    assert prediction.critical_path[0].event in read.cells
    assert "srcdoc" in html
    assert "srcdoc" not in pm.predict("gpt3-1.3b", "dgx-a100", "dp=8", global_batch=8)._repr_html_()


def test_search_and_what_if():
    found = pm.search("gpt3-1.3b", "dgx-a100", devices=8, global_batch=16, top=3)
    read = Reader(found._repr_html_())
    assert all(p.layout_notation in read.cells for p in found.layouts)
    assert "the recommended layout" in read.summaries
    what = pm.whatif("gpt3-1.3b", "dgx-a100", "tp=2,dp=4", ["compute_rate=2x"], global_batch=16)
    assert "compute_rate=2x" in Reader(what._repr_html_()).cells
    assert Reader(Curve("x", (1.0, 2.0), True, (0.5, 0.25), None)._repr_html_()).cells[-1] == "0.25"


def test_frames_hold_what_they_are_made_from(prediction):
    memory = prediction.memory_over_time()
    frame = memory.to_frame()
    assert len(frame) == sum(len(steps.time_s) for steps in memory.steps)
    assert frame["in_use_bytes"].max() == memory.peak_bytes.max()
    Reader(memory._repr_html_())
    figures = {
        "n": 2,
        "median_ape": 0.1,
        "mean_ape": 0.1,
        "p90_ape": 0.2,
        "bias": 0.0,
        "coverage_90": 1.0,
    }
    report = ValidationReport(
        families={"gemm": {"all": figures}}, provenance={}, skipped={"no <shape>": 3}
    )
    assert report.to_frame()["median_ape"].tolist() == [0.1]
    assert "no &lt;shape&gt;" in report._repr_html_()


def test_long_tables_and_timelines_are_cut_with_a_word(prediction, monkeypatch):
    assert "100 rows, the first 30 shown" in frame_html(pd.DataFrame({"a": np.arange(100)}))
    monkeypatch.setattr("perfmodel.timeline._timeline._INLINE_UP_TO", 10)
    assert "to_html()" in timeline_frame(prediction.timeline)


def test_progress_is_silent_where_nobody_looks(capsys):
    with progress("work") as report:
        report("half", 1, 2)
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal_and_not_if_silent(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("work", silent=True) as report:
        report("half", 1, 2)
    assert capsys.readouterr() == ("", "")
    with progress("work") as report:
        report("half", 1, 2)
    assert "work: half" in capsys.readouterr().err


def test_progress_in_a_notebook_goes_away(monkeypatch):
    ipython = pytest.importorskip("IPython")
    shown = []

    class Handle:
        def update(self, html):
            shown.append(html.data)

    monkeypatch.setattr(ipython, "get_ipython", lambda: type("Shell", (), {"kernel": True})())
    monkeypatch.setattr(
        "IPython.display.display", lambda html, display_id: shown.append(html.data) or Handle()
    )
    monkeypatch.setattr("perfmodel.display._progress._BEGINS_AFTER_S", 0.0)
    monkeypatch.setattr("perfmodel.display._progress._EVERY_S", 0.0)
    with progress("work") as report:
        report("half", 1, 2)
        report("all <of> it", 2, 2)
    assert 'value="1" max="2"' in shown[0]
    assert "all &lt;of&gt; it" in shown[1]
    assert shown[-1] == ""


def test_a_function_that_shows_progress_gets_a_report_unless_it_has_one():
    @shows_progress("work")
    def work(x, *, progress=None):
        progress("one", 1, 1)
        return x

    seen = []
    assert work(3) == 3
    assert work(4, progress=lambda *a: seen.append(a)) == 4
    assert seen == [("one", 1, 1)]


def test_schedules_of_a_layout_side_by_side():
    found = pm.compare_schedules(
        "gpt3-1.3b", "dgx-a100", "tp=2,pp=4", schedules=["1f1b", "gpipe", "gems"], global_batch=9
    )
    frame = found.to_frame()
    assert frame["schedule"].tolist() == [one.schedule for one in found]
    assert frame["step_time_s"].dropna().is_monotonic_increasing
    read = Reader(found._repr_html_())
    assert {"1f1b", "gpipe"} <= set(read.summaries)
    assert all(one.reason in read.cells for one in found if not one.prediction)
    assert [Reader(one._repr_html_()) for one in found]


def test_facts_of_a_schedule():
    facts = schedule_facts("chimera", 4, 8)
    (row,) = facts.to_frame().to_dict("records")
    assert (row["activations_least"], row["activations_most"]) == facts.activations
    assert "chimera" in Reader(facts._repr_html_()).cells
