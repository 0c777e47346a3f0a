"""Listings of a structure for people."""

import numpy as np
from hypothesis import given, settings
from test_build import specs

from perfmodel.program import Kind, ProgramSpec, Stream, build, instructions, to_frame, to_text


def test_text_of_a_small_program() -> None:
    assert to_text(build(ProgramSpec(stages=2, micro_batches=1))).splitlines() == [
        "     0  device 0   COMPUTE    FORWARD stage 0 segment 0 micro-batch 0",
        "     1  device 1   COMPUTE    FORWARD stage 1 segment 0 micro-batch 0  after 0 + SEND_FORWARD of stage 0",
        "     2  device 1   COMPUTE    BACKWARD stage 1 segment 0 micro-batch 0  after 1",
        "     3  device 0   COMPUTE    BACKWARD stage 0 segment 0 micro-batch 0  after 2 + SEND_BACKWARD of stage 1, 0",
        "     4  join                  ZERO  after 3, 2",
        "     5  device 0   COMPUTE    OPTIMIZER stage 0 segment 0  after 4, 3",
        "     6  device 1   COMPUTE    OPTIMIZER stage 1 segment 0  after 4, 2",
        "     7  join                  ZERO  after 5, 6",
    ]


@settings(max_examples=40, deadline=None)
@given(spec=specs())
def test_list_and_frame_agree_with_the_structure(spec: ProgramSpec) -> None:
    structure = build(spec)
    frame, listed = to_frame(structure), instructions(structure)
    assert len(frame) == len(listed) == structure.n_ops
    for row, item in zip(frame.to_dict("records"), listed, strict=True):
        assert (row["op"], row["device"], row["position"]) == (item.op, item.device, item.position)
        assert row["stream"] == ("-" if item.stream is None else item.stream.name)
        assert (row["stage"], row["segment"], row["micro_batch"]) == (
            item.stage,
            item.segment,
            item.micro_batch,
        )
        assert row["kind"] == item.kind.name
        before = [(row[f"pred_{k}"], row[f"lag_{k}"]) for k in (0, 1) if row[f"pred_{k}"] >= 0]
        assert before == [(p.op, p.lag.name) for p in item.predecessors]
    for _, ops in frame[frame["stream"] != "-"].groupby(["device", "stream"], observed=True):
        np.testing.assert_array_equal(ops["position"], np.arange(len(ops)))


def test_joins_belong_to_no_stream() -> None:
    last = instructions(build(ProgramSpec(stages=2, micro_batches=2)))[-1]
    assert (last.kind, last.stream, last.device, last.stage) == (Kind.ZERO, None, -1, -1)
    assert instructions(build(ProgramSpec(stages=1, micro_batches=1)))[0].stream is Stream.COMPUTE
