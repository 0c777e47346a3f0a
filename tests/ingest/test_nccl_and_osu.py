"""Tables of nccl-tests and OSU: their layouts, what is kept of them and what is refused."""

import json
from pathlib import Path

import pandas as pd
import pytest
import reader_cases as cases
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import TableError
from perfmodel.ingest import ReadOptions, detect_format, import_measurements, read_measurements
from perfmodel.ingest.tables import read_table, write_table

ROWS = {1024: (20.0, 21.0), 1048576: (50.0, 55.5), 134217728: (1234.5, 1250.0)}


def text_file(tmp_path: Path, text: str, name: str = "log.txt") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def times(table: pd.DataFrame, layout: str) -> dict[int, float]:
    chosen = table[table["variant"].str.startswith(layout)]
    return dict(zip(chosen["bytes"].tolist(), chosen["time_us"].tolist(), strict=True))


@pytest.mark.parametrize("layout", ["new", "per-iteration", "old"])
def test_text_layouts(layout: str, tmp_path: Path) -> None:
    path = text_file(tmp_path, cases.nccl_text(ROWS, ranks=16, nodes=2, layout=layout))
    assert detect_format(path) == "nccl-tests"
    table = read_measurements("nccl-tests", [path])
    assert times(table, "out_of_place") == {size: pair[0] for size, pair in ROWS.items()}
    assert times(table, "in_place") == {size: pair[1] for size, pair in ROWS.items()}
    row = table.iloc[0]
    assert (row["collective"], row["num_ranks"], row["num_nodes"], row["ranks_per_node"]) == (
        "all_reduce",
        16,
        2,
        8,
    )
    assert (row["device"], row["dtype"], row["n_repeats"], row["algorithm"]) == (
        "A100-SXM4-80GB",
        "fp32",
        20,
        "ring",
    )
    assert row["variant"] == "out_of_place;NCCL_ALGO=Ring"
    assert row["software"] == ("nccl-tests" if layout == "old" else "nccl-2.28.9")


LABELS = {
    "none": lambda line: line,
    "srun --label": lambda line: f"0: {line}",
    "docker compose": lambda line: f"nccl-test-1  | {line}",
    "stern": lambda line: f"nccl-launcher-x7k2 launcher | {line}",
    "srun --label of many": lambda line: f"{12:3d}: {line}",
    "mpirun --tag-output": lambda line: f"        [1,0]<stdout>:{line}",
    "mpirun of OpenMPI 5": lambda line: f"[prterun-node-1-77@1,0]<stdout>: {line}",
    "MPICH": lambda line: f"[0] {line}",
    "clock of a container": lambda line: f"2026-03-01T10:00:00.123456789Z stdout F {line}",
    "clock": lambda line: f"[2026-03-01 10:00:00] {line}",
    "clock before mpirun": lambda line: f"2026-03-01T10:00:00+0100 [1,0]<stdout>:{line}",
    "host and rank": lambda line: f"(node-1:0) {line}",
    "pdsh": lambda line: f"node-a17: {line}",
    "kubectl --prefix": lambda line: f"[pod/nccl-test-0/worker] {line}",
    "container": lambda line: f"worker-0.nccl[1]: {line}",
    "pod and container": lambda line: f"pod/nccl-worker-0 launcher: {line}",
    "Ray in colours": lambda line: f"\033[32m(Worker pid=417)\033[0m {line}",
    "a tool that nobody listed": lambda line: f"job 17 > {line}",
    "no sign of comments": lambda line: line.lstrip("# ") if line.startswith("#") else line,
}


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("layout", ["new", "old"])
def test_what_launchers_put_before_lines_is_no_part_of_them(
    label: str, layout: str, tmp_path: Path
) -> None:
    text = cases.nccl_text(ROWS, ranks=16, nodes=2, layout=layout)
    plain = read_measurements("nccl-tests", [text_file(tmp_path, text)])
    labelled = "\n".join(map(LABELS[label], text.splitlines())) + "\n"
    pd.testing.assert_frame_equal(
        read_measurements("nccl-tests", [text_file(tmp_path, labelled, "other.txt")]), plain
    )


@given(
    test=st.sampled_from(
        ["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "sendrecv"]
    ),
    nodes=st.sampled_from([1, 2, 4, 8]),
    layout=st.sampled_from(["new", "old"]),
)
@settings(max_examples=30, deadline=None)
def test_bandwidths_say_what_a_log_has_lost(
    test: str, nodes: int, layout: str, tmp_path_factory
) -> None:
    """Without the test's name: it, or those that nothing tells apart. Without all ranks but the
    last: their number."""
    tmp_path = tmp_path_factory.mktemp("logs")
    ranks = 2 if test == "sendrecv" else 8 * nodes
    whole = cases.nccl_text(ROWS, test, ranks, 1 if test == "sendrecv" else nodes, layout=layout)
    expected = read_measurements("nccl-tests", [text_file(tmp_path, whole)])
    unnamed = cases.nccl_text(
        ROWS, test, ranks, 1 if test == "sendrecv" else nodes, layout=layout, named=False
    )
    path = text_file(tmp_path, unnamed, "unnamed.txt")
    # nothing tells these apart from one another; old versions print no root, which tells broadcasts
    if test in ("all_gather", "alltoall") or (
        test in ("broadcast", "sendrecv") and layout == "old"
    ):
        with pytest.raises(TableError, match="--collective NAME"):
            read_measurements("nccl-tests", [path])
    else:
        found = read_measurements("nccl-tests", [path])
        assert found["collective"].tolist() == expected["collective"].tolist()
    if test in ("broadcast", "sendrecv"):
        return
    excerpt = [
        line
        for line in whole.splitlines()
        if "# " not in line or f"Rank {ranks - 1:2d}" in line or "Rank" not in line
    ]
    found = read_measurements(
        "nccl-tests", [text_file(tmp_path, "\n".join(excerpt) + "\n", "excerpt.txt")]
    )
    columns = ["collective", "num_ranks", "num_nodes", "ranks_per_node", "bytes", "time_us"]
    pd.testing.assert_frame_equal(found[columns], expected[columns])


def test_json(tmp_path: Path) -> None:
    path = cases.write_json(tmp_path / "out.json", cases.nccl_json(ROWS, "alltoall"))
    table = read_measurements("auto", [path])
    assert times(table, "out_of_place") == {size: pair[0] for size, pair in ROWS.items()}
    row = table.iloc[0]
    assert (row["collective"], row["num_ranks"], row["num_nodes"], row["ranks_per_node"]) == (
        "all_to_all",
        8,
        2,
        4,
    )
    assert (row["device"], row["software"]) == ("H100-SXM5-80GB", "nccl-2.28.9")
    assert row["variant"] == "out_of_place;NCCL_PROTO=Simple"


def test_json_with_every_iteration(tmp_path: Path) -> None:
    data = cases.nccl_json({1024: (20.0, 21.0)})
    data["results"][0]["out_of_place_per_iter"] = {
        "p50_us": 19.0,
        "stdev_us": 1.5,
        "times_us": [18.0, 19.0, 23.0],
    }
    table = read_measurements("nccl-tests", [cases.write_json(tmp_path / "out.json", data)])
    assert table.iloc[0][["time_us", "time_us_std", "n_repeats"]].tolist() == [19.0, 1.5, 3]


def test_nothing_of_the_environment_leaks(tmp_path: Path) -> None:
    text = text_file(tmp_path, cases.nccl_text(ROWS))
    data = cases.write_json(tmp_path / "out.json", cases.nccl_json(ROWS))
    for path in (text, data):
        written = tmp_path / "table.csv"
        write_table(written, read_measurements("nccl-tests", [path]))
        assert not any(secret in written.read_text() for secret in cases.SECRETS)


def test_tests_of_one_log_and_repeats(tmp_path: Path) -> None:
    """Tests follow one another in a log; files of one setting become medians."""
    both = cases.nccl_text({1024: (20.0, 21.0)}) + cases.nccl_text(
        {4096: (9.0, 9.5)}, "sendrecv", ranks=2
    )
    table = read_measurements("nccl-tests", [text_file(tmp_path, both)])
    assert table[["collective", "num_ranks"]].drop_duplicates().to_numpy().tolist() == [
        ["all_reduce", 8],
        ["send_recv", 2],
    ]
    paths = [
        text_file(tmp_path, cases.nccl_text({1024: (t, t)}), f"{t}.txt") for t in (10.0, 14.0, 30.0)
    ]
    row = read_measurements("nccl-tests", paths).iloc[0]
    assert (row["time_us"], row["n_repeats"]) == (14.0, 60)
    assert row["time_us_std"] == pytest.approx(pd.Series([10.0, 14.0, 30.0]).std())


def test_what_has_no_row_is_counted(tmp_path: Path) -> None:
    text = cases.nccl_text(ROWS, "hypercube") + cases.nccl_text({8: (5.0, 5.0)}, dtype="int32")
    found = import_measurements("nccl-tests", [text_file(tmp_path, text)])
    assert found.skipped == {
        "no such collective in the tables: hypercube": 6,
        "no such element type in the tables: int32": 2,
    }
    with pytest.raises(TableError, match="hypercube: 6"):
        read_measurements("nccl-tests", [text_file(tmp_path, text)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (cases.nccl_text(ROWS, footer=False), "no 'Out of bounds values' line"),
        (cases.nccl_text(ROWS, wrong=3), "3 wrong values out_of_place"),
        (cases.nccl_text(ROWS, layout="old", wrong=3), "computed 3 wrong values"),
        (cases.nccl_text(ROWS, units="(ms)"), r"times in \(us\), but the header has \(ms\)"),
        (cases.nccl_text(ROWS).replace("1234.50", "1.23"), "are units mixed"),
        (
            cases.nccl_text(ROWS).replace("1234.50", "-1234.50"),
            "time must be a finite number of at least 0",
        ),
        (cases.nccl_text(ROWS).replace("1234.50", "nan"), "time must be a finite number"),
        (cases.nccl_text(ROWS).replace("1234.50", ""), "columns, the header"),
        (
            cases.nccl_text(ROWS, "all_gather", named=False),
            "fit all_gather or all_to_all; say which with --coll",
        ),
        (
            cases.nccl_text({1024: (20.0, 21.0)}, named=False),
            "the log does not name the collective",
        ),
        (
            "\n".join(
                x
                for x in cases.nccl_text(ROWS, "sendrecv", ranks=2).splitlines()
                if "Rank" not in x
            ),
            "say how many with --ranks N",
        ),
        (
            cases.nccl_text(ROWS).replace("all_reduce_perf", "all_gather_perf"),
            r"is 1\.750, .* names all_gather_perf",
        ),
        (
            cases.nccl_text(ROWS).replace("#  Rank  7", "# Lost  7"),
            "fits 8 ranks, but .* all_reduce_perf on 7 ranks",
        ),
        (
            cases.nccl_text(ROWS).replace("A100-SXM4-80GB", "V100", 1),
            "the ranks are on different devices",
        ),
        ("hello\n", "no table of nccl-tests"),
        ("", "the file is empty"),
    ],
)
def test_refused_texts(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=message) as caught:
        read_measurements("nccl-tests", [text_file(tmp_path, text)])
    assert "\n" not in str(caught.value)
    assert "log.txt" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "this is version 9 of nccl-tests' JSON"),
        ({"out_of_bounds": {"count": 2}}, "computed 2 wrong values"),
        ({"results": []}, "the file has no results"),
        ({"config": None}, "config must be an object"),
        (
            {"results": [{"size": -1, "type": "float", "out_of_place": {"time": 1, "alg_bw": 1}}]},
            "size must be",
        ),
    ],
)
def test_refused_json(change: dict[str, object], message: str, tmp_path: Path) -> None:
    path = cases.write_json(tmp_path / "out.json", cases.nccl_json(ROWS) | change)
    with pytest.raises(TableError, match=message):
        read_measurements("nccl-tests", [path])
    (tmp_path / "half.json").write_text(json.dumps(cases.nccl_json(ROWS))[:-40])
    with pytest.raises(TableError, match="not complete JSON"):
        read_measurements("nccl-tests", [tmp_path / "half.json"])


SIZES = st.dictionaries(
    st.integers(1, 2**33).map(lambda n: 4 * n),
    st.tuples(*[st.floats(0.5, 9e4).map(lambda t: round(t, 2))] * 2),
    min_size=1,
    max_size=6,
)


@settings(max_examples=40)
@given(
    SIZES, st.sampled_from(["new", "old", "per-iteration"]), st.integers(1, 4), st.integers(1, 8)
)
def test_round_trip(tmp_path_factory, rows, layout, nodes, per_node) -> None:  # type: ignore[no-untyped-def]
    """What is printed is what is read, through a table file and back."""
    folder = tmp_path_factory.mktemp("nccl")
    path = text_file(
        folder, cases.nccl_text(rows, ranks=nodes * per_node, nodes=nodes, layout=layout)
    )
    write_table(folder / "table.csv", read_measurements("nccl-tests", [path]))
    table = read_table(folder / "table.csv")
    assert times(table, "out_of_place") == {size: pair[0] for size, pair in rows.items()}
    assert times(table, "in_place") == {size: pair[1] for size, pair in rows.items()}
    assert set(table["num_ranks"]) == {nodes * per_node}
    assert set(table["ranks_per_node"]) == {per_node}


@pytest.mark.parametrize(
    ("title", "collective", "factor"),
    [
        ("Allreduce Latency Test", "all_reduce", 1),
        ("Allgather Latency Test", "all_gather", 4),
        ("All-to-All Personalized Exchange Latency Test", "all_to_all", 4),
        ("Reduce_scatter Latency Test", "reduce_scatter", 1),
        ("Broadcast Latency Test", "broadcast", 1),
        ("Latency Test", "send_recv", 1),
    ],
)
@pytest.mark.parametrize("full", [True, False])
def test_osu_latencies(
    title: str, collective: str, factor: int, full: bool, tmp_path: Path
) -> None:
    path = text_file(tmp_path, cases.osu_text({4: 2.5, 1024: 8.0}, title, full=full))
    table = read_measurements(
        "auto", [path], ReadOptions(device="A100-SXM4-80GB", ranks=4, ranks_per_node=2)
    )
    assert table["collective"].tolist() == [collective] * 2
    assert table["bytes"].tolist() == [4 * factor, 1024 * factor]
    assert table["time_us"].tolist() == [2.5, 8.0]
    assert table["num_ranks"].tolist() == [2 if collective == "send_recv" else 4] * 2
    assert (table["dtype"][0], table["software"][0]) == ("fp32", "osu-7.4-cuda")
    assert table["n_repeats"][0] == (1000 if full else 1)


def test_osu_bandwidth(tmp_path: Path) -> None:
    path = text_file(tmp_path, cases.osu_text({1_000_000: 25_000.0}, "Bandwidth Test", unit="MB/s"))
    table = read_measurements("osu", [path])
    assert table[["collective", "num_ranks", "time_us"]].iloc[0].tolist() == ["send_recv", 2, 40.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (cases.osu_text({4: 2.5}), "give --ranks N"),
        (
            cases.osu_text({4: 2.5}, "Latency Test", unit="ms"),
            r"must be in \(us\), but the header says \(ms\)",
        ),
        (
            cases.osu_text({4: 2.5}, "Latency Test").replace("2.5000", "-2.5"),
            "finite number of at least 0",
        ),
        (cases.osu_text({4: 2.5}, "Latency Test").replace("2.5000", "9999"), "must be between"),
        (cases.osu_text({4: 2.5}, "Latency Test").replace("1000", ""), "columns, the header"),
        ("# OSU MPI Latency Test v7.4\n", "no table of an OSU benchmark"),
    ],
)
def test_refused_osu(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=message):
        read_measurements("osu", [text_file(tmp_path, text)])


EXCERPT = """\
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 8589934592 step: 2(factor) iters: 20
# Using devices
#  Rank  0 Group  0 Pid 1 on a device  0 [0000:75:00] AMD Instinct MI300X
#  Rank  1 Group  0 Pid 1 on a device  1 [0000:05:00] AMD Instinct MI300X
{dots}
#       size    count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#        (B) (elements)                     (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
  8589934592 2147483648 float   {reduction}    -1  41644 206.27 {bus} 0  40903 210.01 {bus_in_place} 0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 111.827
{end}
"""
LINKS = ReadOptions(device="MI300X")


@pytest.mark.parametrize("dots", ["...", "[...]", "#  ...", "…"])
def test_dots_in_a_list_of_ranks_stand_for_more_ranks(dots: str, tmp_path: Path) -> None:
    lines = EXCERPT.format(dots=dots, reduction="sum", bus=360.97, bus_in_place=367.52, end="")
    text = f"# Collective test starting: all_reduce_perf\n{lines}"
    table = read_measurements("nccl-tests", [text_file(tmp_path, text)], LINKS)
    assert set(table["num_ranks"]) == {8}
    assert set(table["collective"]) == {"all_reduce"}
    whole = text_file(tmp_path, text.replace(dots, "#"))
    with pytest.raises(TableError, match="fits 8 ranks"):
        read_measurements("nccl-tests", [whole], LINKS)


@pytest.mark.parametrize(("test", "kind"), [("alltoall", "all_to_all"), ("all_gather",) * 2])
def test_the_end_of_a_section_names_the_test(test: str, kind: str, tmp_path: Path) -> None:
    """Bandwidths of these two are alike."""
    numbers = {"reduction": "none", "bus": 180.49, "bus_in_place": 183.76}
    ending = f"# Collective test concluded: {test}_perf"
    text = EXCERPT.format(dots="...", end=ending, **numbers)
    table = read_measurements("nccl-tests", [text_file(tmp_path, text)], LINKS)
    assert set(table["collective"]) == {kind}
    # The end of the next section says nothing about the one before it.
    following = text_file(tmp_path, EXCERPT.format(dots="...", end=text, **numbers))
    with pytest.raises(TableError, match="all_gather or all_to_all"):
        read_measurements("nccl-tests", [following], LINKS)
