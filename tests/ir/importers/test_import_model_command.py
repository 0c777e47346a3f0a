"""`perfmodel import-model`, run as the command line does, apart from its parser."""

import argparse
import json

import pytest

from perfmodel.cli import _import_model as command
from perfmodel.errors import PerfModelError

MODULE = """
import jax, jax.numpy as jnp

def step():
    struct = jax.ShapeDtypeStruct
    return jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (struct((8, 16), "float32"), struct((4, 8), "float32"))

def nothing():
    return 3
"""


def run(*arguments):
    top = argparse.ArgumentParser()
    command.add_command(top.add_subparsers())
    return command.run(top.parse_args(["import-model", *map(str, arguments)]))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODULE)
    return path


def test_a_jax_function_is_traced_predicted_and_written(source, tmp_path, capsys):
    report = run(f"{source}:step", "--target", "h100-sxm", "--out", tmp_path / "rows.csv")
    assert report["matmul_flops"] == 2 * 2 * 4 * 8 * 16
    assert report["prediction"]["step_time_s"] > 0
    assert json.loads(json.dumps(report))["n_devices"] == 1
    assert (tmp_path / "rows.csv").read_text().startswith("family,source,count,time_s")
    command.show(report)
    shown = capsys.readouterr().out
    assert "predicted" in shown
    assert "dot_general" in shown


def test_the_text_of_a_compiled_module(fake_devices, tmp_path):
    texts, _ = fake_devices
    path = tmp_path / "gpt.hlo"
    path.write_text(texts["gpt"])
    report = run(path)
    assert report["n_devices"] == 8
    assert report["collectives"] == 13


@pytest.mark.parametrize(
    ("source_of", "message"),
    [
        ("{}:other", "no function 'other'"),
        ("{}:nothing", "must return a JAX function"),
        ("{}", "not FILE.py:FUNCTION"),
        ("gone.py:step", "no such file"),
    ],
)
def test_bad_sources(source, source_of, message):
    with pytest.raises(PerfModelError, match=message):
        run(source_of.format(source))


def test_bad_dimension(tmp_path):
    with pytest.raises(PerfModelError, match="--dim 'batch' is not NAME=SIZE"):
        run(tmp_path / "m.onnx", "--dim", "batch")
