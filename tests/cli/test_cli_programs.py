"""`perfmodel distribute`, `simulate` and `search PROGRAM`."""

import json
from pathlib import Path

import numpy as np
import pytest

from perfmodel.cli import main
from perfmodel.ir import parse_program
from perfmodel.ir.execution import execute, random_inputs
from perfmodel.ir.importers import read_program
from perfmodel.ir.program_search import dtpk_grid

MODEL = """
import jax, jax.numpy as jnp
def loss(w, x):
    for layer in w:
        x = jnp.tanh(x @ layer)
    return jnp.mean(x * x)
def small():
    return loss, ([jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 4, jax.ShapeDtypeStruct((16, 8), jnp.float32))
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(MODEL)
    return f"{tmp_path}/model.py:small"


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_distributed_computes_the_same_and_is_simulated(source, tmp_path, capsys) -> None:
    out = str(tmp_path / "program.ir")
    report = said(
        capsys, "distribute", source, "--layout", "dp=2,tp=2,pp=2,micro_batches=2", "--out", out
    )
    assert (report["devices"], report["parameters"]) == (8, 4 * 64)
    assert report["collectives"]["all_reduce"] > 0
    program = parse_program(Path(out).read_text())
    assert [w.name for w in program.inputs_of("parameter")] == ["0", "1", "2", "3"]
    arrays = random_inputs(program)
    for name, value in execute(read_program(source), arrays).items():
        assert execute(program, arrays)[name] == pytest.approx(value, rel=1e-4, abs=1e-6)
    at_once = said(capsys, "simulate", source, "--layout", "2/2/2/2", "--cluster", "dgx-a100")
    report = said(
        capsys, "simulate", out, "--cluster", "dgx-a100", "--trace", str(tmp_path / "t.json")
    )
    assert report["step_time_s"] == at_once["step_time_s"] > 0
    assert report["fits"] is True
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_search_ranks_every_distribution_as_simulate_times_it(source, capsys) -> None:
    found = said(
        capsys,
        "search",
        source,
        "--cluster",
        "dgx-a100",
        "--devices",
        "4",
        "--micro-batches",
        "2,32",
        "--top",
        "99",
    )
    assert found["evaluated"] == len(list(dtpk_grid(4, (2, 32)))) == 9
    assert found["rejected"] == {"batch is not divisible": 3}
    times_s = [layout["step_time_s"] for layout in found["layouts"]]
    assert times_s == sorted(times_s)
    best = next(layout for layout in found["layouts"] if layout["dtpk"].startswith("1/2/2"))
    alone = said(capsys, "simulate", source, "--layout", best["layout"], "--cluster", "dgx-a100")
    assert alone["step_time_s"] == pytest.approx(best["step_time_s"], rel=1e-9)


STAGE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
class Stage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(2))
    def forward(self, x):
        y = torch.relu(x @ self.up) @ self.down
        dist.all_reduce(y)
        return y
def make():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return Stage(), (torch.zeros(3, 4),)
"""


def test_one_rank_of_a_module_is_written_for_all(tmp_path, capsys) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
    (tmp_path / "stage.py").write_text(STAGE)
    out = str(tmp_path / "all.ir")
    of_ranks = ["--ranks", "2", "--sharded", "up=1", "--sharded", "down=0"]
    try:
        report = said(capsys, "distribute", f"{tmp_path}/stage.py:make", *of_ranks, "--out", out)
    finally:
        torch.distributed.destroy_process_group()
    assert (report["devices"], report["parameters"]) == (2, 2 * 2 * 16)
    assert report["collectives"] == {"all_reduce": 1}
    program = parse_program(Path(out).read_text())
    x = random_inputs(program)
    (found,) = execute(program, x).values()
    np.testing.assert_allclose(found, np.maximum(x["x"] @ x["up"], 0) @ x["down"], rtol=1e-5)
    assert said(capsys, "simulate", out, "--cluster", "dgx-a100")["devices"] == 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["distribute", "SOURCE", "--ranks", "2", "--out", "x.ir"],
            "only a PyTorch module can be one of 2 ranks",
        ),
        (["distribute", "SOURCE", "--ranks", "0", "--out", "x.ir"], "--ranks must be at least 1"),
        (
            ["distribute", "SOURCE", "--sharded", "w=0", "--out", "x.ir"],
            "give their number with --ranks",
        ),
        (
            ["distribute", "SOURCE", "--ranks", "2", "--sharded", "w", "--out", "x.ir"],
            "'w' is not NAME=AXIS",
        ),
        (["distribute", "SOURCE", "--layout", "dp=3", "--out", "x.ir"], "16 is not divisible"),
        (
            ["distribute", "SOURCE", "--layout", "ddp=2", "--out", "x.ir"],
            "'ddp=2' is not NAME=VALUE; names: dp, tp",
        ),
        (
            ["distribute", "SOURCE", "--layout", "dp=two", "--out", "x.ir"],
            ("'dp=two'; write a value such as the default, dp=1"),
        ),
        (["distribute", "no.ir", "--out", "x.ir"], "no.ir: No such file"),
        (
            ["simulate", "mlp-1b", "--cluster", "dgx-a100"],
            "mlp-1b: a catalog model does not state a batch",
        ),
        (["simulate", "SOURCE", "--cluster", "nowhere"], "nowhere"),
        (
            [
                "search",
                "SOURCE",
                "--cluster",
                "dgx-a100",
                "--devices",
                "4",
                "--global-batch",
                "2,4",
            ],
            "for one global batch",
        ),
        (["search", "SOURCE"], "required: --cluster"),
    ],
)
def test_bad_input_is_one_line(argv, says, source, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([source if word == "SOURCE" else word for word in argv]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
