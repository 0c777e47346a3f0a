"""Ctrl-C at any moment of a real process: one line on stderr, status 130, and nothing claimed that
is not certain."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from thinned import one_in

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="there are no process groups to interrupt"
)

UP = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the shell of the tests ignores
class Up:
    def find_spec(self, name, *_):
        if name == "perfmodel.cli._main":
            print("up", flush=True)
sys.meta_path.insert(0, Up())
from perfmodel.cli import main
sys.exit(main())
"""
"""The command, which says when it begins to import what it needs; before, it is the interpreter
that is interrupted."""
SEARCH = [
    "search",
    "--model",
    "gpt3-1.3b",
    "--cluster",
    "dgx-a100",
    "--devices",
    "8",
    "--global-batch",
    "16",
    "--fix",
    "tp=1",
    "--top",
    "3",
    "--json",
]
FRACTIONS = [
    0.0,
    0.03,
    0.06,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.38,
    0.46,
    0.54,
    0.62,
    0.7,
    0.78,
    0.86,
    0.92,
    0.98,
]


def start(arguments: list[str], cache) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", UP, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PERFMODEL_CACHE": str(cache), "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def interrupted_after(seconds: float, arguments: list[str], cache) -> tuple[int, str, str]:
    process = start(arguments, cache)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers hear it too
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def takes_s(cache) -> float:
    """Seconds of the whole command with its caches filled."""
    taken = 0.0
    for _ in range(2):
        process, began_s = start(SEARCH, cache), time.monotonic()
        process.communicate(timeout=600)
        taken = time.monotonic() - began_s
    return taken


def check(status: int, out: str, err: str) -> None:
    if status == 0:  # it was done before
        assert not err
        return
    assert status == 130, err
    assert err.startswith("perfmodel: interrupted") or "interrupted" in err, err
    assert err.count("\n") == 1, err
    try:
        result = json.loads(out)
    except json.JSONDecodeError:  # before it was printed, or while
        assert err == "perfmodel: interrupted\n"
        return
    if result["complete"]:  # all was done and told when the interrupt came
        return
    assert result["certificate"] != "exact"
    if not result["layouts"]:
        assert result["gap"] is None
    elif result["unresolved"]:
        assert result["lower_bound"] <= result["layouts"][0]["step_time_s"]
        assert "so far" in result["certificate"]


@pytest.mark.parametrize("fraction", one_in(9, FRACTIONS))
def test_an_interrupt_at_any_moment_ends_in_one_line(fraction, takes_s, cache):
    check(*interrupted_after(fraction * takes_s, SEARCH, cache))


@pytest.mark.parametrize(
    "module",
    [
        pytest.param("multiprocessing.context", marks=pytest.mark.slow),
        "numpy",
        pytest.param("jax", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_while_a_package_is_half_imported(module, cache):
    interrupt = f'os.kill(os.getpid(), signal.SIGINT) if name == "{module}" else None'
    code = UP.replace("import signal", "import os, signal").replace(
        "        if name ==", f"        {interrupt}\n        if name =="
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *SEARCH],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PERFMODEL_CACHE": str(cache), "JAX_PLATFORMS": "cpu"},
    )
    assert (process.returncode, process.stderr) == (130, "perfmodel: interrupted\n")


@pytest.mark.parametrize("fraction", one_in(3, [0.4, 0.8, 1.2]))
def test_an_interrupt_while_functions_are_compiled(fraction, takes_s, tmp_path):
    check(*interrupted_after(fraction * takes_s, SEARCH, tmp_path))


@pytest.mark.parametrize("fraction", one_in(3, [0.4, 0.7, 1.0, 1.4]))
def test_an_interrupt_of_a_search_with_workers(fraction, takes_s, cache):
    check(*interrupted_after(fraction * takes_s, [*SEARCH, "--workers", "2"], cache))


def test_impatience_ends_a_process_at_once(cache, takes_s):
    process = start(SEARCH, cache)
    time.sleep(0.5 * takes_s)
    for _ in range(20):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.02)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert err.count("\n") <= 1
    assert "Traceback" not in err


def test_other_commands_end_in_one_line_too(cache):
    predict = [
        "predict",
        "--model",
        "llama3-70b",
        "--cluster",
        "dgx-h100",
        "--layout",
        "tp=8,pp=4,dp=8",
        "--global-batch",
        "512",
    ]
    for seconds in (0.05, 0.8):
        status, _, err = interrupted_after(seconds, predict, cache)
        assert status in (0, 130)
        assert "Traceback" not in err
        assert err.count("\n") <= 1, err


@pytest.mark.parametrize(
    ("warnings", "heard"),
    [
        ("", "SIG_IGN"),
        ("default", "default_int_handler"),
        ("ignore:resource_tracker,default", "default_int_handler"),
    ],
)
def test_what_an_ended_process_left_is_removed_in_silence(warnings: str, heard: str):
    # the semaphores of the queue are removed by a process that outlives this one, and shares its
    # stderr
    leaves = (
        "import multiprocessing, os, signal\n"
        f"signal.signal(signal.SIGINT, signal.{heard})\n"
        "from perfmodel.cli._interrupts import interruptible\n"
        "def command():\n"
        "    queue = multiprocessing.get_context('spawn').Queue()\n"
        "    os._exit(0)\n"
        "interruptible(command)\n"
    )
    environment = {**os.environ, "PYTHONWARNINGS": warnings}
    done = subprocess.run(
        [sys.executable, "-c", leaves],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [["catalog"], ["catalog", "models"], ["catalog", "--json"], ["hook", "nemo"], ["doctor"]],
    ids=" ".join,
)
def test_a_reader_that_stops_is_no_error(arguments: list[str]) -> None:
    """`perfmodel catalog | true`: tables, lines and JSON all end quietly."""
    command = [sys.executable, "-m", "perfmodel", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=120)) == ("", 0)
