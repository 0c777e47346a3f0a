"""Slices and traces show what the timeline holds."""

import gzip
import json

import numpy as np
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.prediction import predict
from perfmodel.program import Stream
from perfmodel.timeline import slices
from perfmodel.viz import (
    gantt,
    interactive,
    trace_events,
    write_gantt,
    write_interactive,
    write_trace,
)


def test_slices_cover_every_op_that_takes_time_and_every_transfer(prediction):
    s = prediction.timeline.structure
    drawn = slices(prediction.timeline)
    took = (prediction.timeline.end_s > prediction.timeline.start_s) & (s.stream >= 0)
    transfers = (s.lag > 0) & (prediction.timeline.durations_s[s.lag] > 0)
    assert len(drawn) == took.sum() + transfers.sum()
    compute = drawn.stream == Stream.COMPUTE
    np.testing.assert_allclose(
        np.bincount(drawn.device[compute], drawn.duration_s[compute]),
        prediction.timeline.device_busy_s(),
    )


def test_slices_of_one_compute_stream_never_overlap(prediction):
    drawn = slices(prediction.timeline)
    for device in range(4):
        own = (drawn.device == device) & (drawn.stream == Stream.COMPUTE)
        assert (drawn.start_s[own][1:] >= drawn.end_s[own][:-1] - 1e-12).all()


def test_joined_slices_are_fewer_and_take_the_same_time(prediction):
    drawn = slices(prediction.timeline)
    joined = drawn.joined()
    assert len(joined) < len(drawn)
    for kind in np.unique(drawn.kind):
        of_all, of_joined = (float(d.duration_s[d.kind == kind].sum()) for d in (drawn, joined))
        assert of_joined == pytest.approx(of_all)
    # a forward of one micro-batch on one rank is one pass
    passes = joined.select((joined.stream == Stream.COMPUTE) & (joined.micro_batch >= 0))
    tags = np.stack([passes.device, passes.kind, passes.micro_batch], axis=1)
    assert len(np.unique(tags, axis=0)) == len(passes) == 4 * 8 * 2


def test_trace_has_every_micro_batch_on_every_rank(prediction):
    events = [
        e
        for e in trace_events(prediction)["traceEvents"]
        if e["ph"] == "X" and e["cat"] != "inside"
    ]
    for rank in range(4):
        for what in ("forward", "backward"):
            own = [
                e["args"]["micro_batch"] for e in events if e["pid"] == rank and e["cat"] == what
            ]
            assert sorted(set(own)) == list(range(8))
    assert any(e["cat"] == "gradient reduction" for e in events)
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(prediction.step_time_s * 1e6)


def test_kernels_lie_in_blocks_and_blocks_in_passes(prediction):
    events = [e for e in trace_events(prediction)["traceEvents"] if e["ph"] == "X"]
    passes = [e for e in events if e["cat"] in ("forward", "backward")]
    inside = [e for e in events if e["cat"] == "inside"]
    blocks = [e for e in inside if "count" not in e["args"]]
    assert {e["pid"] for e in blocks} == set(range(4))
    held = []
    for one in blocks:
        (own,) = [
            e
            for e in passes
            if e["pid"] == one["pid"] and e["ts"] <= one["ts"] < e["ts"] + e["dur"] - 1e-9
        ]
        assert one["args"]["inside"] == own["args"]["event"]
        assert one["ts"] + one["dur"] <= own["ts"] + own["dur"] * (1 + 1e-12)
        kernels = [
            e
            for e in inside
            if "count" in e["args"]
            and e["pid"] == one["pid"]
            and one["ts"] <= e["ts"] < one["ts"] + one["dur"] - 1e-9
        ]
        assert kernels
        assert sum(e["dur"] for e in kernels) <= one["dur"] * (1 + 1e-9)
        held.append(own["ts"])
    filled = [e for e in passes if e["ts"] in held]
    assert sum(e["dur"] for e in blocks) == pytest.approx(sum(e["dur"] for e in filled))
    assert any(e["args"].get("group") == "tp" for e in inside)


def test_arrows_go_from_sends_to_the_passes_that_wait_for_them(prediction):
    events = trace_events(prediction)["traceEvents"]
    sends = [e for e in events if e["ph"] == "X" and e["cat"].startswith("send")]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in ("s", "f"))
    assert starts.keys() == ends.keys()
    # both ways between four ranks, for eight micro-batches
    assert len(starts) == len(sends) == 2 * 3 * 8
    left = {(e["pid"], e["tid"], e["ts"]): e for e in sends}
    began = {
        (e["pid"], e["tid"], e["ts"])
        for e in events
        if e["ph"] == "X" and e["cat"] in ("forward", "backward")
    }
    for number, start in starts.items():
        send, end = left[start["pid"], start["tid"], start["ts"]], ends[number]
        assert abs(end["pid"] - start["pid"]) == 1
        assert (end["pid"], end["tid"], end["ts"]) in began
        assert end["ts"] >= (send["ts"] + send["dur"]) * (1 - 1e-12)


def test_every_send_has_its_arrow_where_passes_overlap():
    p = predict(
        "gpt3-1.3b", "dgx-a100", "tp=1,pp=4,dp=2,schedule=dualpipe", global_batch=16, timeline=True
    )
    events = trace_events(p)["traceEvents"]
    sends = sum(e["ph"] == "X" and e["cat"].startswith("send") for e in events)
    assert sends == sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events) > 0


def test_files_are_written(prediction, tmp_path):
    write_trace(prediction, tmp_path / "t.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    write_gantt(prediction, tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
    write_interactive(prediction, tmp_path / "t.html")
    assert (tmp_path / "t.html").read_text() == interactive(prediction)


@pytest.mark.parametrize("show", [gantt, interactive, trace_events])
def test_without_a_timeline_the_error_says_how(show):
    with pytest.raises(PerfModelError, match="timeline=True"):
        show(predict("gpt3-1.3b", "dgx-a100", "dp=8", global_batch=8))
