"""Traces of profilers: hand-written ones of devices, and real ones that torch and JAX record
here."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reader_cases as cases
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import TableError, UnknownNameError
from perfmodel.ingest import (
    MeasuredTrace,
    ReadOptions,
    detect_format,
    import_measurements,
    read_measurements,
    read_trace,
)
from perfmodel.ingest.profiles import (
    AUTOGRAD,
    PHASES,
    Tags,
    TorchOp,
    merged_intervals,
    op_row,
    parse_tags,
    read_xspace,
)
from perfmodel.ingest.profiles.chrome import write_measured_trace
from perfmodel.program import Kind


def kineto_files(folder: Path, ranks: int = 2) -> list[Path]:
    return [
        cases.write_json(folder / f"rank{r}.json", cases.kineto_json(r, ranks, late_us=40.0 * r))
        for r in range(ranks)
    ]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8))
def test_merged_intervals_cover_the_same_time_and_never_meet(spans: list[tuple[int, int]]) -> None:
    start_s, end_s = (
        np.array([(start, start + length) for start, length in spans], float).reshape(-1, 2).T
    )
    found = np.array(merged_intervals(start_s, end_s)).T
    assert (found[1:, 0] > found[:-1, 1]).all()
    halves = np.arange(0, 40, 0.5)

    def covers(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        is_inside = (starts <= halves[:, None]) & (halves[:, None] <= ends)
        return is_inside.any(axis=1)

    np.testing.assert_array_equal(covers(start_s, end_s), covers(*found.T))


def test_phases_are_the_kinds_of_programs() -> None:
    assert PHASES[1:] == tuple(kind.name.lower() for kind in Kind if kind)
    assert [int(kind) for kind in Kind] == list(range(len(PHASES)))


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("forward stage=1 micro_batch=3", Tags("forward", 1, 3)),
        ("bwd, mb=2", Tags("backward", -1, 2)),
        ("dgrad|stage=0|microbatch=7", Tags("backward_input", 0, 7)),
        ("forward", Tags("forward")),
        ("step=4", Tags(step=4)),
        ("ProfilerStep#12", Tags(step=12)),
        ("Optimizer.step#Adam.step", Tags("optimizer")),
        ("forward of something", Tags()),
        ("my function stage=x", Tags()),
    ],
)
def test_names_of_ranges(name: str, tags: Tags) -> None:
    assert parse_tags(name) == tags


def test_kineto_timeline_of_two_ranks(tmp_path: Path) -> None:
    files = kineto_files(tmp_path)
    assert detect_format(files[0]) == "kineto"
    frame = read_trace("kineto", files).to_frame()
    assert len(frame) == 2 * 2 * 5
    one = frame[(frame["device"] == 1) & (frame["step"] == 6)]
    assert one["name"].tolist() == [
        "sm90_gemm",
        "splitK_reduce",
        "odd_kernel",
        "sm90_gemm",
        one["name"].iloc[-1],
    ]
    assert one["phase"].tolist()[:4] == ["forward", "forward", "forward", "backward"]
    assert one["kind"].tolist() == ["compute"] * 4 + ["communication"]
    assert one["stage"].tolist()[:4] == one["micro_batch"].tolist()[:4] == [0] * 4
    # rank 1 runs 40 us late, its second step 1 ms after the first
    assert one["start_s"].iloc[0] == pytest.approx(1e-3 + 40e-6, abs=1e-9)
    assert one["end_s"].iloc[0] - one["start_s"].iloc[0] == pytest.approx(101e-6, abs=1e-9)
    assert len(read_trace("kineto", files).steps()) == 2


def test_kineto_rows(tmp_path: Path) -> None:
    found = import_measurements("kineto", kineto_files(tmp_path), ReadOptions(ranks_per_node=8))
    kernels = found.kernels
    assert kernels[["pass", "m", "n", "k"]].to_numpy().tolist() == [
        ["fwd", 64, 32, 16],
        ["wgrad", 32, 16, 64],
    ]
    # all kernels of a call count: 100 + 20 in the first step, 101 + 20 in the second
    assert kernels["time_us"].tolist() == pytest.approx([120.5, 150.0])
    assert kernels["n_repeats"].tolist() == [4, 4]
    assert set(kernels["dtype"]) == {"bf16"}
    assert set(kernels["device"]) == {"A100-SXM4-80GB"}
    assert found.skipped == {"no row for operator aten::unknown": 4}
    (row,) = found.collectives.to_dict(orient="records")
    # rank 0 arrives last: its kernel does not wait
    assert (row["collective"], row["bytes"], row["num_ranks"], row["time_us"]) == (
        "all_reduce",
        2048,
        2,
        100.0,
    )
    assert (row["num_nodes"], row["ranks_per_node"], row["n_repeats"]) == (1, 2, 2)
    assert row["variant"] == "kernel of the last rank to arrive"
    alone = read_measurements("kineto", kineto_files(tmp_path)[1:], kind="collective").iloc[0]
    assert (alone["time_us"], alone["variant"]) == (150.0, "kernel with the wait for other ranks")


def test_a_trace_may_be_a_list_of_events(tmp_path: Path) -> None:
    data = cases.kineto_json()
    whole = cases.write_json(tmp_path / "whole.json", data)
    bare = cases.write_json(tmp_path / "bare.json", data["traceEvents"])
    assert detect_format(bare) == "kineto"
    name = ReadOptions(device="A100-SXM4-80GB")
    tables = [
        read_measurements("kineto", [path], name, kind="compute").to_csv() for path in (whole, bare)
    ]
    assert tables[0] == tables[1]


def test_kineto_without_shapes_says_so(tmp_path: Path) -> None:
    data = cases.kineto_json()
    for event in data["traceEvents"]:
        event.get("args", {}).pop("Input Dims", None)
    found = import_measurements("kineto", [cases.write_json(tmp_path / "a.json", data)])
    assert found.kernels.empty
    assert any("record_shapes=True" in reason for reason in found.skipped)


@pytest.mark.parametrize("late_us", [0.0, 1.0, 2.5])
def test_launches_that_overlap_by_rounding_belong_to_their_operators(
    late_us: float, tmp_path: Path
) -> None:
    """Times of a trace are rounded: a launch may begin before the one before it ends, and is still
    no part of it."""
    shapes = {"Input Dims": [[256, 256], [256, 256]], "Input type": ["float", "float"]}
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "ts": 10, "dur": 60, "tid": 100, "args": shapes},
        {"cat": "cpu_op", "name": "aten::add", "ts": 80, "dur": 40, "tid": 100, "args": shapes},
    ]
    for number, (start_us, kernel_us) in enumerate(((30, 200), (42 - late_us, 260), (90, 300))):
        tie = {"correlation": number, "External id": 9000 + number}
        launch = {
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": start_us,
            "dur": 12,
            "tid": 100,
            "args": tie,
        }
        kernel = {
            "cat": "kernel",
            "name": f"k{number}",
            "ts": kernel_us,
            "dur": 30,
            "tid": 7,
            "args": tie,
        }
        events += [launch, kernel]
    trace = {
        "schemaVersion": 1,
        "traceEvents": [{"ph": "X", "pid": 1, **event} for event in events],
    }
    table = read_measurements("kineto", [cases.write_json(tmp_path / "trace.json", trace)])
    assert table[["op_family", "time_us"]].to_numpy().tolist() == [["gemm", 60.0], ["memory", 30.0]]


def test_real_kineto_trace(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    layer, x = torch.nn.Linear(24, 40), torch.randn(16, 24, requires_grad=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for step in range(3):
            with record_function(f"step={step}"):
                with record_function("forward stage=0 micro_batch=0"):
                    loss = torch.nn.functional.gelu(layer(x)).sum()
                loss.backward()
                optimizer.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    table = read_measurements("auto", [tmp_path / "trace.json"], ReadOptions(device="cpu-test"))
    products = (
        table[table["op_family"] == "gemm"][["pass", "m", "n", "k", "dtype"]].to_numpy().tolist()
    )
    assert ["fwd", 16, 40, 24, "fp32"] in products
    assert ["dgrad", 16, 24, 40, "fp32"] in products
    assert ["wgrad", 40, 24, 16, "fp32"] in products
    gelu = table[(table["op"] == "gelu") & (table["pass"] == "fwd")]
    assert gelu[["rows", "hidden", "n_repeats"]].to_numpy().tolist() == [[16, 40, 3]]
    frame = read_trace("kineto", [tmp_path / "trace.json"]).to_frame()
    assert sorted(set(frame["step"])) == [0, 1, 2]
    order = frame.groupby("step")["phase"].agg(lambda phases: list(dict.fromkeys(phases)))
    assert order.tolist() == [["forward", "backward", "optimizer"]] * 3
    assert frame[frame["name"] == "aten::linear"]["micro_batch"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("old", [False, True])
def test_nsys(old: bool, tmp_path: Path) -> None:
    path = cases.nsys_file(tmp_path / "report.sqlite", old=old)
    assert detect_format(path) == "nsys"
    frame = read_trace("nsys", [path]).to_frame()
    assert frame["kind"].tolist() == ["compute", "communication", "copy"]
    assert frame["name"].tolist()[1] == "ncclDevKernel_AllReduce"
    assert frame["start_s"].tolist() == pytest.approx([0, 6e-6, 8.5e-6])
    assert set(frame["phase"]) == {"forward"}
    assert set(frame["stage"]) == {1}
    assert set(frame["micro_batch"]) == {2}
    found = import_measurements("nsys", [path])
    (row,) = found.kernels.to_dict(orient="records")
    assert (row["m"], row["n"], row["k"], row["dtype"], row["time_us"]) == (64, 32, 16, "bf16", 5.0)
    assert row["device"] == "A100-SXM4-80GB"
    assert list(found.skipped) == ["communication kernel: Nsight Systems does not record its size"]


def test_nsys_reports_share_a_clock(tmp_path: Path) -> None:
    paths = [
        cases.nsys_file(tmp_path / f"{n}.sqlite", epoch_ns=10**18 + 3000 * n, shift_ns=0)
        for n in range(2)
    ]
    frame = read_trace("nsys", paths).to_frame()
    first = frame.groupby("device")["start_s"].min().tolist()
    assert first == pytest.approx([0, 3e-6])
    old = cases.nsys_file(tmp_path / "old.sqlite", old=True)
    with pytest.raises(TableError, match=r"old.sqlite.*clock cannot be aligned"):
        read_trace("nsys", [paths[0], old])


def test_nsys_of_another_schema(tmp_path: Path) -> None:
    import sqlite3

    path = cases.nsys_file(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as db:
        db.execute("ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL RENAME COLUMN streamId TO queue")
    with pytest.raises(TableError, match=r"has no column streamId \(schema version 3.13.1"):
        read_trace("nsys", [path])
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
    with pytest.raises(TableError, match=r"no table CUPTI_ACTIVITY_KIND_KERNEL"):
        read_trace("nsys", [path])


@pytest.mark.parametrize("column", ["start", "end", "deviceId", "streamId"])
def test_nsys_with_a_blob_of_digits_for_a_number(column: str, tmp_path: Path) -> None:
    import sqlite3

    path = cases.nsys_file(tmp_path / "report.sqlite")
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET \"{column}\" = x'30'")
    options = ReadOptions(device="A100-SXM4-80GB")
    for read in (
        lambda: read_trace("nsys", [path]),
        lambda: import_measurements("nsys", [path], options),
    ):
        with pytest.raises(
            TableError, match=r"row 0: (start|end|\w+Id) must be a finite number.*got b'0'"
        ):
            read()


def test_xplane_of_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(cases.gpu_xspace())
    frame = read_trace("xplane", [path]).to_frame()
    assert frame["name"].tolist() == ["dot.3", "all-reduce.4"]
    assert frame["kind"].tolist() == ["compute", "communication"]
    assert frame["end_s"].tolist() == pytest.approx([7e-6, 10e-6])
    assert set(frame["phase"]) == {"backward"}
    assert (set(frame["stage"]), set(frame["micro_batch"])) == ({2}, {1})
    found = import_measurements("xplane", [path], ReadOptions(device="H100-SXM5-80GB"))
    (product,), (collective,) = (
        t.to_dict(orient="records") for t in (found.kernels, found.collectives)
    )
    assert {name: product[name] for name in ("op", "dtype", "batch", "m", "n", "k")} == {
        "op": "bmm",
        "dtype": "bf16",
        "batch": 4,
        "m": 64,
        "n": 32,
        "k": 16,
    }
    assert product["time_us"] == pytest.approx(7.0)
    assert (collective["collective"], collective["num_ranks"], collective["bytes"]) == (
        "all_reduce",
        4,
        4 * 64 * 32 * 2,
    )


def test_real_jax_profile(tmp_path: Path) -> None:
    import jax
    import jax.numpy as jnp

    f = jax.jit(lambda a, b: jnp.tanh(a @ b).sum())
    a, b = jnp.ones((48, 32)), jnp.ones((32, 80))
    f(a, b).block_until_ready()
    with jax.profiler.trace(tmp_path / "log", create_perfetto_trace=False):
        for step in range(3):
            with (
                jax.profiler.StepTraceAnnotation("train", step_num=step),
                jax.profiler.TraceAnnotation("forward stage=0 micro_batch=1"),
            ):
                f(a, b).block_until_ready()
    trace = read_trace("auto", [tmp_path / "log"])
    frame = trace.to_frame()
    assert sorted(set(frame["step"])) == [0, 1, 2]
    assert set(frame["phase"]) == {"forward"}
    assert len(trace.steps()) == 3
    table = read_measurements("xplane", [tmp_path / "log"])
    assert [48, 80, 32] in table[["m", "n", "k"]].to_numpy().tolist()
    # the same events as JAX's own reader finds
    (path,) = (tmp_path / "log").rglob("*.xplane.pb")
    want = [
        (plane.name, line.name, event.name, event.start_ns, event.duration_ns)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    ]
    found = [
        (plane.name, line.name, event.name, event.start_ps / 1e3, event.duration_ps / 1e3)
        for plane in read_xspace(path)
        for line in plane.lines
        for event in line.events
    ]
    assert [x[:3] for x in found] == [x[:3] for x in want]
    np.testing.assert_allclose([x[3:] for x in found], [x[3:] for x in want], atol=1)
    # and as the trace for people shows
    (shown,) = (tmp_path / "log").rglob("*.trace.json.gz")
    assert detect_format(shown) == "jax-trace"
    other = read_trace("auto", [shown]).to_frame()
    assert other["name"].tolist() == frame["name"].tolist()
    np.testing.assert_allclose(other["start_s"], frame["start_s"], atol=2e-9)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match=r"has no \*.xplane.pb"):
        read_trace("xplane", [tmp_path / "empty"])


def test_own_traces_round_trip(tmp_path: Path) -> None:
    trace = read_trace("kineto", kineto_files(tmp_path))
    for name in ("trace.json", "trace.json.gz"):
        write_measured_trace(trace, tmp_path / name, "kineto")
        again = read_trace("auto", [tmp_path / name])
        assert again.names == trace.names
        for field in ("device", "stream", "name", "kind", "phase", "stage", "micro_batch", "step"):
            np.testing.assert_array_equal(getattr(again, field), getattr(trace, field))
        np.testing.assert_allclose(again.start_s, trace.start_s, rtol=1e-12, atol=1e-15)
    assert (
        json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["displayTimeUnit"]
        == "ms"
    )


def test_unknown_formats_and_files(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'kineto'"):
        read_trace("kinetto", [tmp_path / "x"])
    with pytest.raises(TableError, match="no such file"):
        read_trace("auto", [tmp_path / "x"])
    (tmp_path / "x").write_text("what is this")
    with pytest.raises(TableError, match="does not recognise the format"):
        read_trace("auto", [tmp_path / "x"])
    with pytest.raises(TableError, match="not an SQLite file"):
        read_trace("nsys", [tmp_path / "x"])
    with pytest.raises(TableError, match="no device has any activity"):
        MeasuredTrace(*[np.zeros(0, int)] * 5, (), *[np.zeros(0, int)] * 5)


@pytest.mark.parametrize(
    ("strides", "gradient"),
    [
        (((1, 32), (16, 1)), "wgrad"),
        (((64, 1), (16, 1)), "dgrad"),
        (((0, 0), (16, 1)), ""),
        ((), ""),
    ],
)
def test_which_gradient_a_product_is(strides: tuple[tuple[int, int], ...], gradient: str) -> None:
    """A sum's incoming gradient is expanded (strides 0): it does not tell."""
    call = TorchOp(
        "aten::mm",
        ((32, 64), (64, 16)),
        ("float", "float"),
        (),
        strides,
        (f"{AUTOGRAD}: AddmmBackward0",),
    )
    row = op_row(call)
    assert row is not None
    assert (row["pass"], row["m"], row["n"], row["k"]) == (gradient, 32, 16, 64)


@pytest.mark.parametrize(
    "shapes",
    [
        ((32, 64), (63, 16)),
        ((32, "a"), (64, 16)),
        ((32, -1), (64, 16)),
        ((32,), ()),
        ((0, 64), (64, 16)),
    ],
)
def test_products_of_impossible_shapes_have_no_row(shapes: tuple[Any, ...]) -> None:
    assert op_row(TorchOp("aten::mm", shapes, ("float", "float"))) is None
