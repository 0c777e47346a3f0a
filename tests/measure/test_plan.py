from pathlib import Path

import pytest

from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.measure import check_plan, expand, read_plan, write_plan
from perfmodel.measure.tables import Point, point_key
from perfmodel.ops import Collective, Gemm, MemoryBound

PLAN = """
device = "box"
[rule]
half_width = 0.1
[[kernels]]
family = "gemm"
pass = ["fwd", "dgrad"]
m = [8, 16]
"n,k" = [[4, 2], [6, 3]]
dtype = "fp32"
[[kernels]]
family = "memory"
op = "relu"
"rows,hidden" = [[2, 3]]
[[collectives]]
collective = "all_reduce"
num_ranks = [2, 3]
bytes = 1024
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return path


def test_grids_become_ops(tmp_path: Path):
    plan = read_plan(write(tmp_path, PLAN))
    assert len(plan.kernels) == 9
    assert plan.kernels[:3] == (
        Gemm(m=8, n=4, k=2, dtype="fp32"),
        Gemm(m=8, n=6, k=3, dtype="fp32"),
        Gemm(m=16, n=4, k=2, dtype="fp32"),
    )
    assert plan.kernels[-1] == MemoryBound(op="relu", rows=2, hidden=3)
    assert plan.rule.half_width == plan.collective_rule.half_width == 0.1
    # 1024 bytes do not split over three ranks: the next smaller size that does
    assert plan.collectives == (
        Collective(
            collective="all_reduce", bytes=1024, num_ranks=2, ranks_per_node=2, dtype="fp32"
        ),
        Collective(
            collective="all_reduce", bytes=1020, num_ranks=3, ranks_per_node=3, dtype="fp32"
        ),
    )


def test_joint_keys_vary_together():
    assert expand({"a": [1, 2], "b, c": [[3, 4]], "d": 5}) == [
        {"a": 1, "b": 3, "c": 4, "d": 5},
        {"a": 2, "b": 3, "c": 4, "d": 5},
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('device = "box"', "", "device is missing"),
        ("[rule]", "[rules]", "unknown keys rules"),
        ("half_width = 0.1", "half_width = -1", "half_width"),
        ("half_width = 0.1", "width = 1", "width"),
        ('family = "gemm"', 'family = "gem"', "gemm"),
        ("m = [8, 16]", "mm = [8, 16]", "mm"),
        ("m = [8, 16]", "m = [8, -16]", "m must be"),
        ("m = [8, 16]", "", "m: missing"),
        ("[[4, 2], [6, 3]]", "[[4, 2], [6]]", "list of 2"),
        ("num_ranks = [2, 3]", "", "num_ranks"),
        ("[rule]", "[rule", "not a readable plan"),
    ],
)
def test_bad_plans_are_refused_by_name(tmp_path: Path, old: str, new: str, message: str):
    with pytest.raises(CalibrationError, match=message) as error:
        read_plan(write(tmp_path, PLAN.replace(old, new)))
    assert "plan.toml" in str(error.value)


def test_a_missing_plan_is_named(tmp_path: Path):
    with pytest.raises(CalibrationError, match=r"none\.toml"):
        read_plan(tmp_path / "none.toml")


def test_a_point_is_a_kernels_or_a_collectives():
    gemm, reduce = (
        Gemm(m=2, n=2, k=2),
        Collective(collective="all_reduce", bytes=8.0, num_ranks=2, ranks_per_node=2),
    )
    assert Point(gemm).kernel == gemm
    assert Point(reduce).collective == reduce
    with pytest.raises(PerfModelError, match="all_reduce is a collective, not a kernel"):
        _ = Point(reduce).kernel
    with pytest.raises(PerfModelError, match="gemm is a kernel, not a collective"):
        _ = Point(gemm).collective


BESIDE = """
device = "box"
[[kernels]]
family = "gemm"
dtype = "fp32"
m = [16, 32]
n = 16
k = 16
beside = [
  {collective = "all_reduce", bytes = 1024, num_ranks = 2},
  {collective = "all_gather", bytes = 64, num_ranks = 2}]
"""


def test_kernels_beside_collectives_are_measured_alone_too(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path, BESIDE))
    assert plan.kernel_points == ()
    alone = [point for point in plan.beside_points if point.beside is None]
    beside = [point for point in plan.beside_points if point.beside is not None]
    assert (len(alone), len(beside)) == (2, 4)
    assert len({point_key(point) for point in plan.beside_points}) == 6
    assert {point.kernel for point in beside} == {point.kernel for point in alone}
    write_plan(tmp_path / "again.toml", plan)
    assert read_plan(tmp_path / "again.toml") == plan


@pytest.mark.parametrize(
    ("text", "backend", "started", "match"),
    [
        (BESIDE, "jax", False, "measure with --backend torch"),
        (BESIDE, "torch", True, "leave it out of a launched run"),
        (
            BESIDE.replace("64, num_ranks = 2}]", "260, num_ranks = 65}]"),
            "torch",
            False,
            "2 to 64 ranks",
        ),
    ],
)
def test_kernels_that_cannot_run_beside_collectives_are_refused(
    tmp_path: Path, text: str, backend: str, started: bool, match: str
) -> None:
    plan = read_plan(write(tmp_path, text))
    with pytest.raises(PerfModelError, match=match):
        check_plan(plan, backend, started=started)


@pytest.mark.parametrize(
    ("beside", "match"),
    [
        ('"all_reduce"', "beside must be a table"),
        ('{collective = "all_reduce", size = 8}', "key of kernels"),
    ],
)
def test_what_is_no_collective_is_refused_beside_a_kernel(
    tmp_path: Path, beside: str, match: str
) -> None:
    text = PLAN.replace('family = "memory"', f'family = "memory"\nbeside = {beside}')
    with pytest.raises(CalibrationError, match=match):
        read_plan(write(tmp_path, text))


def test_loaded_kernels_are_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    kernels = 'family = "gemm"\ndtype = "fp32"\nm = 16\nn = 16\nk = 16\ncache = ["warm", "loaded"]'
    path.write_text(f'device = "box"\nload_s = 1.5\n[[kernels]]\n{kernels}\n')
    plan = read_plan(path)
    warm, loaded = plan.kernel_points
    assert (warm.op, warm.state, loaded.state, plan.load_s) == (loaded.op, "", "loaded", 1.5)
    assert point_key(warm) != point_key(loaded)
    write_plan(tmp_path / "again.toml", plan)
    assert read_plan(tmp_path / "again.toml") == plan
