"""What `import perfmodel` and commands leave unimported: their speed, without a clock.

One process does all that is asked, the lightest first, and says after each step which modules it
has: to start one for each would load the same modules again and again.
"""

import json
import subprocess
import sys

import pytest

HEAVY = {
    "jax",
    "flax",
    "optax",
    "torch",
    "matplotlib",
    "pandas",
    "pyarrow",
    "scipy",
    "numpy",
    "pydantic",
    "rich",
}
WITHOUT_PREDICTION = {"jax", "flax", "torch", "matplotlib", "scipy"}
BESIDE_PREDICTION = {"flax", "optax", "pandas", "matplotlib", "torch", "scipy"}

JOB = "predict --model llama3-8b --cluster dgx-h100 --layout tp=4,dp=2 --global-batch 8"
STEPS = {
    "import perfmodel": HEAVY,
    "command('--help')": HEAVY,
    "command('search --help')": HEAVY,
    "command('catalog')": WITHOUT_PREDICTION,
    "command('catalog devices')": WITHOUT_PREDICTION,
    "command('catalog models --json')": WITHOUT_PREDICTION,
    "command('hook')": WITHOUT_PREDICTION,
    "command('completion bash')": WITHOUT_PREDICTION,
    f"command({JOB!r})": BESIDE_PREDICTION,
    "command('search --model llama3-8b --cluster dgx-h100 --devices 8 --global-batch 8')": BESIDE_PREDICTION,
    "perfmodel.predict('llama3-8b', 'dgx-h100', tp=4, dp=2, global_batch=8)": BESIDE_PREDICTION,
    "perfmodel.step_time_function('llama3-8b', 'dgx-h100', 'tp=4,dp=2', global_batch=8)": BESIDE_PREDICTION,
}
"""What the process does, and what it must not have loaded by then."""

PROGRAM = """
import sys

def command(words):
    from perfmodel.cli import main
    try:
        assert not main(words.split())
    except SystemExit as stop:
        assert not stop.code

loaded = {}
for step in STEPS:
    exec(step)
    loaded[step] = list(sys.modules)
import json
print("loaded", json.dumps(loaded))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """Modules of a process after each step."""
    code = PROGRAM.replace("STEPS", repr(list(STEPS)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rsplit("loaded", 1)[1])


@pytest.mark.parametrize("step", STEPS)
def test_heavy_modules_stay_out(step: str, loaded: dict[str, list[str]]) -> None:
    assert "perfmodel" in loaded[step]
    assert not STEPS[step] & {*loaded[step]}


def test_a_prediction_loads_jax(loaded: dict[str, list[str]]) -> None:
    """Or nothing would be seen of what else it loads."""
    assert "jax" in loaded[f"command({JOB!r})"]
