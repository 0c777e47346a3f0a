"""Pictures and traces show what the timeline holds."""

import gzip
import json

import numpy as np
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.prediction import predict
from perfmodel.program import Kind, Stream
from perfmodel.viz import gantt, trace_events, write_gantt, write_trace
from perfmodel.viz._events import slices


@pytest.fixture(scope="module")
def prediction():
    return predict("gpt3-1.3b", "dgx-a100", "tp=2,pp=4,dp=4,zero=1", global_batch=32, timeline=True)


def test_slices_cover_every_op_that_takes_time_and_every_transfer(prediction):
    s = prediction.timeline.structure
    drawn = slices(prediction.timeline)
    took = (prediction.timeline.end_s > prediction.timeline.start_s) & (s.stream >= 0)
    transfers = (s.lag > 0) & (prediction.timeline.durations_s[s.lag] > 0)
    assert len(drawn.start_s) == took.sum() + transfers.sum()
    compute = drawn.stream == Stream.COMPUTE
    np.testing.assert_allclose(
        np.bincount(drawn.device[compute], drawn.duration_s[compute]), prediction.timeline.device_busy_s()
    )


def test_slices_of_one_compute_stream_never_overlap(prediction):
    drawn = slices(prediction.timeline)
    for device in range(4):
        own = (drawn.device == device) & (drawn.stream == Stream.COMPUTE)
        ends = drawn.start_s[own] + drawn.duration_s[own]
        assert (drawn.start_s[own][1:] >= ends[:-1] - 1e-12).all()


def test_trace_has_every_micro_batch_on_every_rank(prediction):
    events = [e for e in trace_events(prediction)["traceEvents"] if e["ph"] == "X"]
    for rank in range(4):
        for what in ("forward", "backward"):
            own = [e["args"]["micro_batch"] for e in events if e["pid"] == rank and e["cat"] == what]
            assert sorted(set(own)) == list(range(8))
    assert any(e["cat"] == "gradient reduction" for e in events)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(prediction.step_time_s * 1e6)


def test_files_are_written(prediction, tmp_path):
    write_trace(prediction, tmp_path / "t.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    write_gantt(prediction, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_gantt_draws_each_rank_and_names_each_kind(prediction):
    figure = gantt(prediction)
    assert len(figure.axes) in (2, 3)
    labels = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert {"forward", "backward", "gradient reduction"} <= labels
    kinds = {Kind(k) for k in np.unique(slices(prediction.timeline).kind).tolist()}
    assert Kind.SEND_FORWARD in kinds


def test_without_a_timeline_the_error_says_how():
    with pytest.raises(PerfModelError, match="timeline=True"):
        gantt(predict("gpt3-1.3b", "dgx-a100", "dp=8", global_batch=8))
