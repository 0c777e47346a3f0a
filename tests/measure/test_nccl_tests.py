"""nccl-tests are started, read and resumed; a script stands in for the programs."""

import sys
from pathlib import Path

import pytest

from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.ingest.tables import read_table
from perfmodel.measure import Plan, read_plan, run_plan
from perfmodel.measure.backends import NcclTests, check_nccl_tests, geometric_runs, nccl_tests_rows
from perfmodel.measure.tables import Point, read_card
from perfmodel.ops import Collective

FAKE = Path(__file__).with_name("fake_nccl_tests.py")
PLAN = """
device = "A100-SXM4-80GB"
interconnect = "infiniband"
collective_table = "nccl.csv"
[nccl_tests]
launcher = "{python} {fake} --calls {calls} -np {{num_ranks}} -N {{num_nodes}}"
folder = "/opt/nccl-tests/build"
[[collectives]]
num_ranks = 16
ranks_per_node = 8
collective = ["all_reduce", "all_gather"]
bytes = [1024, 4096, 16384, 20480]
dtype = "bf16"
"""


def plan_in(folder: Path, old: str = "", new: str = "") -> Plan:
    text = PLAN.format(python=sys.executable, fake=FAKE, calls=folder / "calls").replace(old, new)
    (folder / "plan.toml").write_text(text)
    return read_plan(folder / "plan.toml")


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def test_one_program_measures_sizes_that_grow_by_one_factor(tmp_path: Path):
    (card,) = run_plan(plan_in(tmp_path), tmp_path, "nccl-tests")
    assert calls(tmp_path) == [
        f"-np 16 -N 2 /opt/nccl-tests/build/{name}_perf -b {low} -e {high} -f {factor} -d bfloat16 -g 1 -w 5 -n 20 -N 8"
        for name in ("all_reduce", "all_gather")
        for low, high, factor in ((1024, 16384, 4), (20480, 20480, 2))
    ]
    table = read_table(tmp_path / "nccl.csv")
    assert (card.rows, len(table)) == (8, 8)
    assert table["time_us"].tolist() == [11.02, 14.1, 26.38, 30.48] * 2
    assert set(table["interconnect"]) == {"infiniband"}
    assert table[
        ["num_ranks", "num_nodes", "ranks_per_node"]
    ].drop_duplicates().to_numpy().tolist() == [[16, 2, 8]]
    assert read_card(tmp_path / "nccl.csv").method["nccl_tests"] == "-w 5 -n 20 -N 8"


def test_a_program_that_fails_is_named_and_what_was_measured_kept(tmp_path: Path):
    failing = plan_in(tmp_path, "--calls", "--fail all_gather --calls")
    with pytest.raises(
        CalibrationError,
        match=r"exit status 3 \(all_gather: unhandled system error\) from: .*-b 1024",
    ):
        run_plan(failing, tmp_path, "nccl-tests")
    assert len(calls(tmp_path)) == 3
    run_plan(plan_in(tmp_path), tmp_path, "nccl-tests")
    assert [line.split()[4].rpartition("/")[2] for line in calls(tmp_path)[3:]] == [
        "all_gather_perf"
    ] * 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{{num_ranks}}", "{{ranks}}", "is not a valid template"),
        ("{python}", "no-such-launcher", "no such program; set launcher and folder"),
        (
            "[nccl_tests]",
            "[[kernels]]\nfamily = 'gemm'\nm = 1\nn = 1\nk = 1\n[nccl_tests]",
            "only collectives",
        ),
        ('launcher = "', 'luncher = "', "luncher"),
    ],
)
def test_bad_plans_are_refused(tmp_path: Path, old: str, new: str, message: str):
    text = PLAN.replace(old, new).format(python=sys.executable, fake=FAKE, calls=tmp_path / "calls")
    (tmp_path / "plan.toml").write_text(text)
    with pytest.raises(CalibrationError, match=message):
        run_plan(read_plan(tmp_path / "plan.toml"), tmp_path, "nccl-tests")


def test_a_size_that_was_not_printed_is_an_error():
    # of two the first counts here
    tests = NcclTests(launcher=f"{sys.executable} {FAKE} -b 16 -e 32 -f 2")
    point = Point(Collective(collective="all_reduce", bytes=1024, num_ranks=2, ranks_per_node=2))
    rows = nccl_tests_rows([point], tests, "x", "nvlink", lambda point: None)
    with pytest.raises(CalibrationError, match="printed no time of all_reduce of 1024 bytes"):
        next(rows)


def test_programs_end_in_time():
    tests = NcclTests(launcher=f"{sys.executable} -c 'import time; time.sleep(60)'", timeout_s=0.2)
    point = Point(Collective(collective="all_reduce", bytes=1024, num_ranks=2, ranks_per_node=2))
    with pytest.raises(CalibrationError, match=r"not finished after 0\.2 s"):
        next(nccl_tests_rows([point], tests, "x", "nvlink", lambda point: None))


def test_sizes_that_nccl_tests_would_round_are_refused_and_plans_round_them(tmp_path: Path):
    with pytest.raises(PerfModelError, match="multiples of 16 bytes per rank"):
        check_nccl_tests(
            Collective(collective="all_gather", bytes=1000, num_ranks=3, ranks_per_node=3)
        )
    plan = plan_in(tmp_path, "num_ranks = 16", "num_ranks = 12")
    assert [op.bytes for op in plan.collectives[:4]] == [960, 4032, 16320, 20352]


def test_runs_cover_all_sizes_in_order():
    points = [
        Point(Collective(collective="all_reduce", bytes=size, num_ranks=2, ranks_per_node=2))
        for size in (8, 16, 32, 96, 288, 300, 200)
    ]
    runs = geometric_runs(points)
    assert [p for run, _ in runs for p in run] == points
    assert [([int(p.op.bytes) for p in run], factor) for run, factor in runs] == [
        ([8, 16, 32], 2),
        ([96, 288], 3),
        ([300], 2),
        ([200], 2),
    ]


def test_the_gpus_that_nccl_tests_lists_must_be_the_plans(tmp_path: Path):
    with pytest.raises(
        CalibrationError,
        match="the plan's device is H100-SXM5-80GB, but this machine has A100-SXM4-80GB",
    ):
        run_plan(plan_in(tmp_path, "A100-SXM4", "H100-SXM5"), tmp_path, "nccl-tests")


def test_gloo_between_cpus_is_not_filed_under_a_gpu(tmp_path: Path):
    with pytest.raises(CalibrationError, match="A100-SXM4-80GB, but this machine has a CPU"):
        run_plan(plan_in(tmp_path, "ranks_per_node = 8", ""), tmp_path, "jax")
