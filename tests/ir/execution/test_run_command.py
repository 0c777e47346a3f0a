"""`perfmodel run`."""

import json
from pathlib import Path

import numpy as np
import pytest
from execution_cases import PROGRAMS

from perfmodel.cli import main
from perfmodel.ir import execution, parse_program

PIPELINE = str(PROGRAMS / "pipeline_mlp.ir")


def test_run_checks_times_and_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    arrays = {"w1": (8, 8), "w2": (8, 8), "x": (4, 8), "y": (4, 8)}
    np.savez(
        tmp_path / "inputs.npz",
        **{name: rng.standard_normal(shape) for name, shape in arrays.items()},
    )
    trace = tmp_path / "trace.json"
    arguments = [
        "run",
        PIPELINE,
        "--ranks",
        "2",
        "--inputs",
        str(tmp_path / "inputs.npz"),
        "--repeats",
        "2",
    ]
    assert main([*arguments, "--cluster", "localhost", "--out", str(trace), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["agrees_with_reference"] is True
    assert report["largest_relative_error"] < 1e-12
    assert report["ranks"] == 2
    assert len(report["makespans_s"]) == 2
    assert report["makespan_s"] > 0
    assert report["predicted_s"] > 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([PIPELINE, "--ranks", "3"], "the program is for 2 devices, not 3; use --ranks 2"),
        (["nowhere.ir", "--ranks", "2"], "nowhere.ir: No such file"),
        ([PIPELINE, "--ranks", "2", "--inputs", PIPELINE], "not a readable npz file"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_bad_program_names_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.ir"
    path.write_text("func @f(%a: fp32[2] @0) {\n  %b = relu(%c)\n  return %b\n}")
    assert main(["run", str(path), "--ranks", "1"]) == 2
    assert "@f line 2: %c: is used by relu before it is defined" in capsys.readouterr().err


def test_rounding_of_inputs_grows_where_the_program_cancels() -> None:
    program = parse_program(
        "func @f(%a: fp32[64] @0, %b: fp32[64] @0) {\n  %c = add(%a, %b)\n  return %c\n}"
    )
    a = np.random.default_rng(0).uniform(1, 2, 64)
    inputs = {"a": a, "b": -a * (1 + 2.0**-10)}  # differ by a thousandth: ten bits are lost
    rounded = execution.rounded_inputs(program, inputs)
    assert all(
        0 < abs(rounded[name] / value - 1).max() <= 2.0**-23 for name, value in inputs.items()
    )
    before, after = (execution.execute(program, arrays)["c"] for arrays in (inputs, rounded))
    change = abs(after - before).max() / abs(before).max()
    assert 2.0**-16 < change < 2.0**-11
