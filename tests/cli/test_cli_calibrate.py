"""`perfmodel calibrate` as users call it: estimates, bad input, plans made for models, nccl-tests,
diff."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from command_line import run

from perfmodel.measure import read_plan
from perfmodel.spec import Job, Layout

ROOT = Path(__file__).parents[2]
TINY = """
device = "EPYC-Genoa-core"
attempts = 1
[rule]
half_width = 0.5
max_s = 0.02
min_repeats = 2
interference_limit = 0.999
[[kernels]]
family = "gemm"
m = [4, 8]
"n,k" = [[4, 4]]
dtype = "fp32"
cache = ["warm", "cold"]
"""
FAKE = ROOT / "tests" / "measure" / "fake_nccl_tests.py"
NCCL = f"""
device = "A100-SXM4-80GB"
[nccl_tests]
launcher = "{sys.executable} {FAKE} -np {{num_ranks}}"
[[collectives]]
num_ranks = 4
collective = "all_reduce"
bytes = [1024, 2048, 4096]
dtype = "bf16"
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(params=["jax", "torch"])
def measured(
    request: pytest.FixtureRequest, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[Path, dict[str, Any], str]:
    """Folder, JSON and standard error of a run."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    out = tiny.parent / request.param
    done = run(
        capsys, "calibrate", "--plan", tiny, "--out", out, "--backend", request.param, "--json"
    )
    assert done.status == 0, done.err
    return out, json.loads(done.out), done.err


def test_a_plan_becomes_a_table_with_its_card(
    measured: tuple[Path, dict[str, Any], str], capsys, tiny: Path
):
    out, report, err = measured
    (table,) = report["tables"]
    assert (table["path"], table["rows"]) == (str(out / "kernels.csv"), 4)
    assert report["backend"] in table["software"]
    assert "device-minutes left" in err
    # nothing is left to do, and diff finds nothing
    status, text, _ = run(
        capsys,
        "calibrate",
        "--plan",
        tiny,
        "--out",
        out,
        "--backend",
        report["backend"],
        "--dry-run",
        "--json",
    )
    assert (status, json.loads(text)["rows"], json.loads(text)["rows_kept"]) == (0, 0, 4)
    status, text, _ = run(capsys, "calibrate", "diff", out, out / "kernels.csv", "--json")
    assert status == 0
    assert json.loads(text)["families"]["gemm"]["rows"] == 4 - table["suspect_rows"]
    status, text, _ = run(capsys, "calibrate", "diff", out, out)
    assert "machine, software and measuring tool are the same" in text


def test_dry_run_says_what_each_family_takes_and_writes_nothing(capsys, tiny: Path):
    status, text, err = run(
        capsys, "calibrate", "--plan", tiny, "--out", tiny.parent / "o", "--dry-run"
    )
    assert (status, err) == (0, "")
    assert "4 rows to measure on EPYC-Genoa-core by jax" in text
    assert "device-minutes" in text
    assert not (tiny.parent / "o").exists()
    status, text, _ = run(capsys, "calibrate", "--plan", tiny, "--dry-run", "--json")
    report = json.loads(text)
    assert report["families"]["gemm"]["rows"] == report["rows"] == 4
    assert 0 < report["device_minutes"] < 1


def test_what_is_saved_is_printed_as_a_table(capsys):
    flags = [
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--global-batch",
        32,
        "--layouts",
        "tp=2,dp=4;tp=4,pp=2",
    ]
    status, text, _ = run(capsys, "calibrate", *flags, "--dry-run")
    assert status == 0
    assert "tp=4,pp=2,dp=1" in text
    assert not set("{}[]") & set(text)
    text = " ".join(text.split())
    assert (
        "this machine cannot measure the plan: the plan's device is A100-SXM4-80GB, but this machine has a CPU"
        in text
    )


WRONG = {
    "fp8 multiples": (
        '[[kernels]]\nfamily = "gemm"\ndtype = "fp8"\nm = 16\nn = 24\nk = 16',
        "torch",
        "multiples of 16",
    ),
    "element type": (
        '[[kernels]]\nfamily = "gemm"\ndtype = "int4"\nm = 16\nn = 24\nk = 16',
        "torch",
        "int4",
    ),
    "bytes": (
        '[[collectives]]\ncollective = "all_reduce"\nbytes = 4\nnum_ranks = 2',
        "jax",
        "0 bytes is not divisible",
    ),
    "ranks": (
        '[[collectives]]\ncollective = "all_reduce"\nbytes = 4096\nnum_ranks = 65',
        "jax",
        "2 to 64 ranks",
    ),
    "unnamed network": (
        '[[collectives]]\ncollective = "all_reduce"\nbytes = 4096\nnum_ranks = 4\nranks_per_node = 2',
        "jax",
        "name the network in the plan",
    ),
    "nothing": ("", "jax", "has nothing to measure"),
    "kernels of nccl-tests": (
        '[[kernels]]\nfamily = "gemm"\ndtype = "bf16"\nm = 16\nn = 24\nk = 16',
        "nccl-tests",
        "only collectives",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_dry_run_refuses_what_the_run_refuses(capsys, tmp_path: Path, name: str):
    text, backend, message = WRONG[name]
    if backend == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "plan.toml").write_text(f'device = "box"\n{text}\n')
    argv = ["--plan", tmp_path / "plan.toml", "--out", tmp_path / "o", "--backend", backend]
    dry = run(capsys, "calibrate", *argv, "--dry-run")
    assert dry[0] == 2
    assert message in dry[2]
    if name != "unnamed network":  # which only processes of a launcher get as far as
        assert run(capsys, "calibrate", *argv) == dry
    assert not (tmp_path / "o" / "kernels.csv").exists()


def test_a_dry_run_looks_at_the_folder(capsys, tiny: Path):
    out = tiny.parent / "o"
    out.mkdir()
    (out / "kernels.csv").write_text("device,op_family\nbox,gemm\n")
    status, _, err = run(capsys, "calibrate", "--plan", tiny, "--out", out, "--dry-run")
    assert (status, "the table's card" in err) == (2, True)


def test_collectives_over_nodes_are_estimated_without_their_launcher(capsys):
    status, text, _ = run(
        capsys,
        "calibrate",
        "--plan",
        ROOT / "calibrate" / "two_nodes_cpu.toml",
        "--dry-run",
        "--json",
    )
    assert status == 0
    assert "start perfmodel on all of them with a launcher" in json.loads(text)["refused_here"]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("cpu.toml", "jax"),
        ("cpu_torch.toml", "torch"),
        ("gpu.toml", "torch"),
        ("gpus_in_training.toml", "torch"),
        ("two_nodes.toml", "nccl-tests"),
    ],
)
def test_shipped_plans_can_be_estimated(capsys, name: str, backend: str):
    status, text, _ = run(
        capsys,
        "calibrate",
        "--plan",
        ROOT / "calibrate" / name,
        "--backend",
        backend,
        "--dry-run",
        "--json",
    )
    assert status == 0
    report = json.loads(text)
    plan = read_plan(ROOT / "calibrate" / name)
    assert report["rows"] == len(plan.kernel_points) + len(plan.beside_points) + len(
        plan.collectives
    )
    if name.startswith("cpu"):
        assert report["minutes"] < 8


def test_nccl_tests_output_is_read(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("perfmodel.ingest", reason="no readers")
    (tmp_path / "plan.toml").write_text(NCCL)
    status, text, err = run(
        capsys,
        "calibrate",
        "--plan",
        tmp_path / "plan.toml",
        "--out",
        tmp_path / "o",
        "--backend",
        "nccl-tests",
        "--json",
    )
    assert status == 0, err
    table = pd.read_csv(tmp_path / "o" / "collectives.csv")
    assert table["time_us"].tolist() == [11.02, 12.05, 14.1]
    assert json.loads(text)["tables"][0]["device"] == "A100-SXM4-80GB"


def test_a_plan_can_be_made_for_a_model(capsys, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def model_plan(
        model: Any, cluster: Any, job: Job, layouts: list[Layout], *, device: str, framework: Any
    ) -> Any:
        asked.extend([model.name, cluster.name, job, layouts, device])
        assert framework.name == "generic"
        return SimpleNamespace(plan=read_plan(tiny), to_dict=lambda: {"rows_saved": 7})

    stub = ModuleType("perfmodel.calibration")
    stub.model_plan = model_plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "perfmodel.calibration", stub)
    flags = [
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--global-batch",
        32,
        "--seq-len",
        1024,
    ]
    status, text, _ = run(
        capsys,
        "calibrate",
        *flags,
        "--layouts",
        "tp=2,dp=4;tp=4,dp=2",
        "--layouts",
        "pp=8",
        "--dry-run",
        "--json",
    )
    assert status == 0
    assert json.loads(text)["saving"] == {"rows_saved": 7}
    assert json.loads(text)["rows"] == 4
    assert asked[2:] == [
        Job(global_batch=32, seq_len=1024, dtype="bf16"),
        [Layout.parse("tp=2,dp=4"), Layout.parse("tp=4,dp=2"), Layout.parse("pp=8")],
        "A100-SXM4-80GB",
    ]


DECISION = [
    "--for-decision",
    "--model",
    "gpt3-125m",
    "--cluster",
    "dgx-a100",
    "--global-batch",
    8,
    "--devices",
    8,
    "--fix",
    "recompute=none,micro_batch=1",
]


def test_what_to_measure_before_a_layout_is_chosen(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, text, err = run(capsys, "calibrate", *DECISION, "--top", 4, "--json")
    assert status == 0, err
    report = json.loads(text)
    assert len(report["layouts"]) == 4
    assert sum(row["probability_best"] for row in report["layouts"]) == pytest.approx(1)
    rows = report["measurements"]
    assert {row["measure"] for row in rows} == {"run", "profile", "two runs"}
    for row in rows:
        assert row["regret_now_s"] == report["regret_now_s"] >= row["regret_after_s"] >= 0
        assert row["saved_s"] == pytest.approx(row["regret_now_s"] - row["regret_after_s"])
        assert row["layouts"] == [report["layouts"][rank - 1]["layout"] for rank in row["ranks"]]
    status, shown, _ = run(capsys, "calibrate", *DECISION, "--top", 4)
    assert status == 0
    assert f"measure first: {report['measure']}" in " ".join(shown.split())
    assert f"next: {report['next']}" in shown
    assert report["next"].startswith("perfmodel fit --")
    assert max(map(len, shown.split("measure first")[0].splitlines())) <= 80
    status, shown, _ = run(capsys, "calibrate", *DECISION, "--top", 1)
    assert (status, "use #1" in shown) == (0, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            [*DECISION, "--plan", "p.toml", "--dry-run"],
            "--for-decision goes without --plan, --dry-run",
        ),
        (
            ["--plan", "{tiny}", "--out", "x", "--fix", "tp=2"],
            "--for-decision is needed with --fix",
        ),
        (
            ["--for-decision", "--model", "gpt3-125m"],
            "--for-decision needs --cluster, --global-batch too",
        ),
        (DECISION[:-4], "devices"),
        ([*DECISION, "--set", "search.objective=mfu"], "looks for the fastest layout"),
        ([*DECISION, "--top", "0"], "top must be at least 1"),
        (["--out", "x"], "give --plan FILE, or --model"),
        (["--plan", "nowhere.toml", "--out", "x"], "nowhere.toml: not a readable plan"),
        (["--plan", "{tiny}"], "give --out DIR"),
        (
            ["--plan", "{tiny}", "--model", "gpt3-1.3b", "--out", "x"],
            "give --plan FILE, or --model",
        ),
        (
            ["--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--out", "x"],
            "--model needs --layouts, --global-batch",
        ),
        (["--plan", "{tiny}", "--out", "x", "--backend", "tensorflow"], "invalid choice"),
        (["--plan", "{tiny}", "--out", "{tiny}"], "plan.toml"),
        (["--plan", "{tiny}", "--out", "x", "--backend", "nccl-tests"], "only collectives"),
        (["diff", "absent.csv", "absent.csv"], "absent.csv: no such"),
        (["diff", "absent.csv"], "required: B"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    capsys, tiny: Path, monkeypatch: pytest.MonkeyPatch, argv, message
):
    monkeypatch.chdir(tiny.parent)
    monkeypatch.setattr(
        "perfmodel.cli._calibrate.guess_s", lambda device, points: [float("nan")] * len(points)
    )
    status, out, err = run(capsys, "calibrate", *(str(word).format(tiny=tiny) for word in argv))
    assert status == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert message in err


def test_a_dry_run_names_the_launcher_that_is_not_here(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    plan = ROOT / "calibrate" / "two_nodes.toml"
    status, text, _ = run(
        capsys, "calibrate", "--plan", plan, "--backend", "nccl-tests", "--dry-run", "--json"
    )
    assert status == 0
    assert json.loads(text)["refused_here"].startswith("mpirun: no such program")
