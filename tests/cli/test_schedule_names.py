"""Schedules by the names of papers, in any case, wherever one is taken."""

from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel.cli import main
from perfmodel.ir import to_text
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.models import mlp, training_step
from perfmodel.planning.layouts import SearchSpace, restrict, with_schedules
from perfmodel.schedule import get_schedule
from perfmodel.spec import Layout
from perfmodel.validation import read_case

PAPERS = {
    "dapple": "1f1b",
    "DAPPLE": "1f1b",
    "1F1B": "1f1b",
    "PipeDream-Flush": "1f1b",
    "timeprest": "nf1b",
    "TiMePReSt": "nf1b",
    "nF1B": "nf1b",
    "GPipe": "gpipe",
    "Chimera:4": "chimera:4",
    "PipeDream_2BW": "pipedream-2bw",
    "ZB-H1": "zb-h1",
    "ZBH1": "zb-h1",
    "Seq1F1B:4": "seq1f1b:4",
    "DualPipeV": "dualpipe-v",
}
names = pytest.mark.parametrize(("said", "meant"), PAPERS.items())
MODEL = ("--model", "gpt2-345m", "--cluster", "dgx-a100", "--global-batch", "16")


@names
def test_python_takes_them(said: str, meant: str) -> None:
    assert get_schedule(said).label == meant
    assert pm.schedule_facts(said, 4, 8) == pm.schedule_facts(meant, 4, 8)
    assert Layout(pp=4, schedule=said).effective_schedule == meant
    assert pm.Layout.parse(f"pp=4,schedule={said}").effective_schedule == meant
    one = (1,)
    space = SearchSpace(tp=one, pp=one, cp=one, ep=one, vpp=one, micro_batch=one)
    assert restrict(space, f"schedule={said}") == restrict(space, f"schedule={meant}")
    assert with_schedules(space, f"zb-v,{said}") == with_schedules(space, f"zb-v,{meant}")


@names
def test_a_prediction_is_the_same(said: str, meant: str) -> None:
    found, want = (
        pm.predict("gpt2-345m", "dgx-a100", f"pp=4,schedule={name}", global_batch=16, seq_len=1024)
        for name in (said, meant)
    )
    assert found.step_time_s == want.step_time_s


@pytest.mark.parametrize(
    ("said", "meant"), [("DAPPLE", "1f1b"), ("TIMEPREST", "nf1b"), ("GPipe", "gpipe")]
)
def test_programs_frameworks_and_published_runs_take_them(said: str, meant: str) -> None:
    step = training_step(mlp(8, (4, 4, 4), "fp64"))
    texts = {
        to_text(distribute(step, Degrees.parse(f"pp=2,micro_batches=2,schedule={name}")))
        for name in (said, meant)
    }
    assert len(texts) == 1
    row = {
        "model": "gpt2-345m",
        "device": "A100",
        "num_devices": 8,
        "tp": 1,
        "pp": 4,
        "dp": 2,
        "global_batch": 16,
        "micro_batch": 1,
        "seq_len": 1024,
        "dtype": "bf16",
    }
    assert read_case(row | {"schedule": said}) == read_case(row | {"schedule": meant})


@pytest.mark.parametrize("command", ["predict", "timeline", "whatif", "schedules", "simulate"])
@pytest.mark.parametrize(("said", "meant"), [("DAPPLE", "1f1b"), ("TiMePReSt", "nf1b")])
def test_commands_take_them(command: str, said: str, meant: str, capsys, tmp_path: Path) -> None:
    def output(name: str) -> str:
        arguments = {
            "predict": [*MODEL, "--layout", f"pp=4,schedule={name}", "--json"],
            "timeline": [
                *MODEL,
                "--layout",
                f"pp=4,schedule={name}",
                "--out",
                str(tmp_path / f"{name}.json"),
            ],
            "whatif": [*MODEL, "--layout", "pp=4", "--set", f"layout.schedule={name}", "--json"],
            "schedules": [name, "--stages", "4", "--micro-batches", "8", "--json"],
            "simulate": [
                "mlp-1b",
                "--global-batch",
                "8",
                "--cluster",
                "dgx-a100",
                "--json",
                "--layout",
                f"pp=2,micro_batches=4,schedule={name}",
            ],
        }
        assert main([command, *arguments[command]]) == 0
        if command == "timeline":
            return (tmp_path / f"{name}.json").read_text()
        return capsys.readouterr().out

    assert output(said).replace(said, meant) == output(meant)


def test_job_files_take_them(capsys, tmp_path: Path) -> None:
    for name in ("DAPPLE", "1f1b"):
        (tmp_path / f"{name}.toml").write_text(
            'model = "gpt2-345m"\ncluster = "dgx-a100"\n[job]\nglobal_batch = 16\n'
            f'[layout]\npp = 4\ndp = 1\nschedule = "{name}"\n'
        )
    outputs = []
    for name in ("DAPPLE", "1f1b"):
        assert main(["predict", str(tmp_path / f"{name}.toml"), "--json"]) == 0
        outputs.append(capsys.readouterr().out.replace("DAPPLE", "1f1b"))
    assert outputs[0] == outputs[1]
