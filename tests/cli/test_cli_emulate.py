"""`perfmodel emulate` from the shell: what it refuses without torch, and what it writes with it."""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from perfmodel.cli import _emulate, _emulate_settings, main
from perfmodel.emulate.environment import DELAYED

SCRIPT = Path(__file__).parents[1] / "emulate" / "scripts" / "sharded.py"
PROGRAM = Path(__file__).parents[1] / "ir" / "execution" / "programs" / "pipeline_mlp.ir"
BASE = ("emulate", "--world-size", "8", "--cluster", "dgx-a100")
COMMAND = ("--", sys.executable, str(SCRIPT))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--delay", "all_reduce=soon", *COMMAND), "'soon' is not a valid time"),
        (("--delay", "all_reduced=1ms", *COMMAND), "did you mean 'all_reduce'"),
        (("--real-ranks", "8", *COMMAND), "distinct and within 0 to 7"),
        (("--real-ranks", "a", *COMMAND), "like 0 or 0,8"),
        (("--delay", "all_reduce=-1ms", *COMMAND), "'-1ms' is not a valid time"),
        (("--delay", "all_reduce=nan", *COMMAND), "'nan' is not a valid time"),
        (("--delay", "all_reduce=inf", *COMMAND), "'inf' is not a valid time"),
        (("--delay", "all_reduce", *COMMAND), "'' is not a valid time"),
        (("--delay", "send=1ms", *COMMAND), "did you mean 'send_recv'"),
        (("--delay", "gather=1ms", "--delay", "gather=2ms", *COMMAND), "gather is given twice"),
        (
            ("--delay", "all_reduce=1ms", "--set", "all_reduce_delay_s=0.1", *COMMAND),
            "all_reduce is given twice",
        ),
        (("--set", "all_reduce_delay_s=nan", *COMMAND), "positive and finite"),
        (("--set", "compute_rate=2x", *COMMAND), "compute_rate cannot be set"),
        (
            ("--set", "inter_node_bandwidth=2x", "--prices", "p.csv", *COMMAND),
            "inter_node_bandwidth does not change --prices",
        ),
        (("--sweep", "recv=0:1ms:3", *COMMAND), "'send_recv'?"),
        (("--sweep", "all_reduce=nan:1ms:3", *COMMAND), "'nan' is not a valid time"),
        (("--sweep", "all_reduce=0:-1ms:3", *COMMAND), "'-1ms' is not a valid time"),
        (
            (
                "--sweep",
                "all_reduce=0:1ms:3",
                "--model",
                "gpt3-125m",
                "--layout",
                "dp=8",
                "--global-batch",
                "8",
                *COMMAND,
            ),
            "--sweep changes the delay between iterations",
        ),
        (
            (
                "--model",
                "gpt3-125m",
                "--layout",
                "pp=2,dp=4",
                "--global-batch",
                "8",
                "--straggler",
                "2",
                *COMMAND,
            ),
            "--straggler cannot be compared with --model",
        ),
        (("--fail", "0@3", *COMMAND), "with an emulated rank"),
        (("--fail", "3@0", *COMMAND), "with an emulated rank"),
        (("--every", "0", "--sweep", "all_reduce=0:1ms:3", *COMMAND), "--every must be at least 1"),
        (
            ("--model", "gpt3-125m", "--layout", "dp=4", "--global-batch", "8", *COMMAND),
            "has 4 devices",
        ),
        (("--jitter", "0.1", "--", str(PROGRAM)), "--jitter works only with scripts"),
        (("--sweep", "all_reduce=1ms", *COMMAND), "KIND=FIRST:LAST:COUNT"),
        (("--png", "x.png", *COMMAND), "no effect without --sweep"),
        (
            ("--wire", "--sweep", "all_reduce=0:1ms:3", *COMMAND),
            "--sweep cannot be combined with --wire",
        ),
        (("--wire", "--", str(PROGRAM)), "sends no messages"),
        (("--classes", "1", "--out", "x", *COMMAND), "--out needs a single run"),
        (("--classes", "0", *COMMAND), "at least 1 rank"),
        (("--jitter", "-1", *COMMAND), "between 0 and 2"),
        (("--straggler", "0", *COMMAND), "must be positive"),
        (("--prices", "no_such_module:f", *COMMAND), "module:function"),
        (("--model", "gpt3-125m", *COMMAND), "--layout and --global-batch"),
        ((), "give it after --"),
        (("--", "no-such-command"), "'no-such-command' not found"),
        (("--", str(PROGRAM)), "for 2 devices, not 8"),
    ],
)
def test_bad_input_is_one_line(
    more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BASE, *more]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_program_of_jax_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "emulate",
        "--world-size",
        "2",
        "--cluster",
        "localhost",
        "--real-ranks",
        "0,1",
        "--json",
    ]
    more = ["--delay", "send_recv=2ms", "--delay", "gather=1", "--out", str(tmp_path / "out")]
    assert main([*arguments, *more, "--", str(PROGRAM)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["rank"] for r in report["ranks"]] == [0, 1]
    assert all(r["step_s"] > r["communication_s"] > 0 for r in report["ranks"])
    assert report["never_called"] == ["gather"]
    table = pd.read_csv(report["written"][0])
    assert len(table) == sum(r["instructions"] for r in report["ranks"])
    sends = table[table.collective]
    assert len(sends) > 0
    assert (sends.repeat0_s > 0.002).all()


def asked_for(*more: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    _emulate.add_command(parser.add_subparsers())
    words = [*BASE, "--model", "gpt3-125m", "--layout", "dp=8", "--global-batch", "8", *more]
    return parser.parse_args(words, argparse.Namespace(of_job={}, launch=None))  # no file


def test_the_prediction_beside_an_emulation_has_the_same_delays() -> None:
    """Each delay of each kind, and none for kinds that the step does not have; a straggler is felt
    by all."""

    def step_s(*more: str) -> float:
        arguments = asked_for(*more)
        delays_s, scenario = _emulate_settings.delays_and_network(arguments)
        return _emulate_settings.predicted_step(arguments, scenario, delays_s)[0]

    plain_s = step_s()
    for kind in DELAYED:
        more_s = step_s("--delay", f"{kind}=1") - plain_s
        assert more_s > 0.95 if kind == "all_reduce" else more_s == 0
    assert step_s("--set", "all_reduce_delay_s=1") == step_s("--delay", "all_reduce=1s")
    assert step_s("--set", "intra_node_bandwidth=0.1x") > plain_s
    assert plain_s < step_s("--straggler", "3") < 3.5 * plain_s


def test_what_a_launch_file_says_of_the_job_counts() -> None:
    def step_s(launch: SimpleNamespace | None) -> float:
        arguments = asked_for()
        arguments.launch = launch
        delays_s, scenario = _emulate_settings.delays_and_network(arguments)
        return _emulate_settings.predicted_step(arguments, scenario, delays_s)[0]

    assert step_s(SimpleNamespace(job_fields={"flash_attention": True})) < step_s(None)


def test_script_leaves_tables_and_a_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
    out = tmp_path / "out"
    assert (
        main([*BASE, "--json", "--set", "intra_node_bandwidth=0.5x", "--out", str(out), *COMMAND])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["world_size"] == 8
    assert report["slack_s"]["all_gather"]["count"] > 0
    assert {Path(p).name for p in report["written"]} == {
        "collectives.csv",
        "iterations.csv",
        "timeline.json.gz",
    }
    assert (
        main(
            [
                "compare",
                "--predicted",
                report["written"][2],
                "--measured",
                report["written"][2],
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["runs"] == 3
