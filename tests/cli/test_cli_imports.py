"""What `import perfmodel` and `--help` leave unimported: their speed, without a clock."""

import subprocess
import sys

import pytest

HEAVY = {"jax", "flax", "optax", "torch", "matplotlib", "pandas", "pyarrow", "scipy", "numpy", "pydantic", "rich"}


@pytest.mark.parametrize(
    "code",
    [
        "import perfmodel",
        "from perfmodel.cli import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass",
        "from perfmodel.cli import main\ntry:\n    main(['search', '--help'])\nexcept SystemExit:\n    pass",
    ],
    ids=["import", "help", "search help"],
)
def test_heavy_modules_stay_out(code):
    asked = f"{code}\nimport sys; print('modules', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    modules = set(done.stdout.rsplit("modules", 1)[1].split())
    assert "perfmodel" in modules
    assert not modules & HEAVY


@pytest.mark.parametrize(
    "argv",
    [["catalog"], ["catalog", "devices"], ["catalog", "models", "--json"], ["hook"], ["completion", "bash"]],
)
def test_commands_that_predict_nothing_do_without_jax(argv: list[str]) -> None:
    code = f"from perfmodel.cli import main\nmain({argv!r})\nimport sys; print('modules', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.rsplit("modules", 1)[1].split())
    assert not modules & {"jax", "flax", "torch", "matplotlib", "scipy"}


@pytest.mark.parametrize(
    "code",
    [
        "from perfmodel.cli import main\n"
        "assert not main('predict --model llama3-8b --cluster dgx-h100 --layout tp=4,dp=2 --global-batch 8'.split())",
        "import perfmodel as pm\nprint(pm.predict('llama3-8b', 'dgx-h100', tp=4, dp=2, global_batch=8))",
        "import perfmodel as pm\npm.step_time_function('llama3-8b', 'dgx-h100', 'tp=4,dp=2', global_batch=8)",
    ],
    ids=["shell", "Python", "gradient"],
)
def test_a_prediction_loads_neither_tables_nor_optimisers(code: str) -> None:
    code = f"{code}\nimport sys; print('modules', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stdout.rsplit("modules", 1)[1].split())
    heavy = {"flax", "optax", "pandas", "matplotlib", "torch", "scipy.linalg", "scipy.optimize", "scipy.stats"}
    assert "jax" in modules
    assert not modules & heavy
