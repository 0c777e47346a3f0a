"""Simulation against a line-by-line event loop, and exports."""

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from execution_cases import event_loop, listing, unit_timer

from perfmodel import catalog
from perfmodel.ir import Function, live_memory, parse_function
from perfmodel.ir.distribute import Degrees, distribute, on_one_stream
from perfmodel.ir.execution import (
    Timer,
    chrome_trace,
    cluster_timer,
    program_structure,
    simulate,
    write_chrome_trace,
)
from perfmodel.ir.models import Adam, TransformerSize, training_step, transformer_loss
from perfmodel.ops import Collective
from perfmodel.program import Kind

SIZE = TransformerSize(layers=4, hidden=16, heads=4, vocab=16, seq_len=4)
STEP = training_step(transformer_loss(SIZE, 16), Adam())


def random_timer(seed: int) -> Timer:
    """Different times for different kernels, the same each time."""
    return lambda ops: np.array(
        [zlib.crc32(f"{seed} {op}".encode()) % 1000 / 1000 + 0.1 for op in ops]
    )


def functions() -> list[Function]:
    made = [listing("pipeline_mlp"), listing("zero_mlp"), STEP.function]
    for degrees in (
        Degrees(data=2, tensor=2, pipeline=2, micro_batches=4, zero=3),
        Degrees(data=4, zero=1),
        Degrees(pipeline=4, micro_batches=8, send_stream="send", checkpoint=True),
        Degrees(tensor=4, sequence_parallel=True),
    ):
        made.append(distribute(STEP, degrees).function)
    return made


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,tp=2,pp=2,micro_batches=4",
        "dp=2,tp=2,pp=2,micro_batches=4,zero=1",
        "dp=2,tp=2,sequence_parallel=true,zero=3",
        "dp=4,pp=2,micro_batches=2,zero=2,checkpoint=true",
        "tp=4,pp=2,micro_batches=4",
    ],
)
@pytest.mark.parametrize("one_stream", [False, True])
def test_one_rank_of_each_group_takes_as_long_as_all(text: str, one_stream: bool) -> None:
    """On nodes of four devices, so that some groups leave their node."""
    cluster, timer = catalog.cluster("a10x4"), random_timer(2)
    spans_s, peaks_bytes = [], []
    for representative in (False, True):
        program = distribute(STEP, Degrees.parse(text), representative=representative)
        program = on_one_stream(program) if one_stream else program
        spans_s.append(simulate(program_structure(program.function, cluster), timer).makespan_s)
        peaks_bytes.append(live_memory(program.function).peak_bytes.max())
    assert spans_s[1] == pytest.approx(spans_s[0], rel=1e-12)
    assert peaks_bytes[1] == peaks_bytes[0]


@pytest.mark.parametrize("function", functions(), ids=lambda f: f"{f.name}-{len(f.instructions)}")
def test_times_are_those_of_the_event_loop(function: Function) -> None:
    timer = random_timer(1)
    program = program_structure(function)
    timeline = simulate(program, timer)
    want = event_loop(function, timer)
    own = np.flatnonzero(program.instruction >= 0)
    found = dict(
        zip(
            zip(
                program.instruction[own].tolist(),
                program.structure.device[own].tolist(),
                strict=True,
            ),
            timeline.end_s[own].tolist(),
            strict=True,
        )
    )
    assert found.keys() == want.keys()
    for key, end_s in want.items():
        assert found[key] == pytest.approx(end_s, rel=1e-12)
    assert timeline.makespan_s == pytest.approx(max(want.values()), rel=1e-12)


def test_collectives_on_their_own_stream_overlap() -> None:
    text = """func @f(%a: fp32[8] @0, %b: fp32[8] @1) {{
      %s_0, %s_1 = all_reduce(%a, %b){stream}
      %c = relu(%a)
      %d = relu(%c)
      %e = add(%d, %s_0)
      return %e
    }}"""
    serial = simulate(parse_function(text.format(stream="")), unit_timer).makespan_s
    beside = simulate(
        parse_function(text.format(stream=" | stream=data_comm")), unit_timer
    ).makespan_s
    assert (serial, beside) == (3.5, 3.0)


def test_equal_work_is_one_event() -> None:
    small = program_structure(
        distribute(STEP, Degrees(data=2, pipeline=2, micro_batches=2)).function
    )
    large = program_structure(
        distribute(STEP, Degrees(data=2, pipeline=2, micro_batches=8)).function
    )
    assert large.structure.n_ops > 2 * small.structure.n_ops
    assert large.structure.n_classes < small.structure.n_classes + 5


def test_kinds_follow_phases_and_streams() -> None:
    program = program_structure(
        distribute(STEP, Degrees(data=2, pipeline=2, micro_batches=2, zero=3)).function
    )
    kinds = {Kind(k) for k in program.structure.kind.tolist()}
    assert kinds == {
        Kind.ZERO,
        Kind.FORWARD,
        Kind.BACKWARD,
        Kind.SEND_FORWARD,
        Kind.SEND_BACKWARD,
        Kind.GRAD_REDUCE,
        Kind.PARAM_GATHER,
        Kind.PARAM_GATHER_BACKWARD,
        Kind.OPTIMIZER,
    }


def test_groups_are_placed_on_the_cluster() -> None:
    """Two nodes of 8: tensor ranks share a node, data ranks do not, and eight of their groups share
    its links."""
    cluster = catalog.cluster("dgx-a100")
    spread = distribute(STEP, Degrees(data=4, tensor=4))
    program = program_structure(spread.function, cluster)
    groups = {
        (op.ranks_per_node, op.level, op.concurrent)
        for _, work in program.events
        for op in work
        if isinstance(op, Collective)
    }
    assert groups == {(4, 0, 1), (2, 1, 4)}


def test_cost_models_predict_a_training_step() -> None:
    cluster = catalog.cluster("dgx-a100")
    timer = cluster_timer(cluster)
    size = TransformerSize(layers=4, hidden=1024, heads=16, vocab=8192, seq_len=1024)
    step = training_step(transformer_loss(size, 8, "bf16"), Adam())
    alone = simulate(program_structure(step.function, cluster), timer).makespan_s
    spread = distribute(step, Degrees(data=8, zero=1)).function
    shared = simulate(program_structure(spread, cluster), timer).makespan_s
    assert 2.5 < alone / shared < 8


def test_chrome_trace_has_an_event_per_instruction_and_device(tmp_path: Path) -> None:
    function = listing("pipeline_mlp")
    program = program_structure(function)
    timeline = simulate(program, unit_timer)
    trace = chrome_trace(program, timeline)
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in events if e["pid"] == 1} >= {"%ar_1", "%p_1", "%w2_new"}
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(timeline.makespan_s * 1e6)
    write_chrome_trace(program, timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
