"""Children end with the process that started them, whatever ends it."""

import os
import signal
import subprocess
import sys
import time

import pytest

SUBPROCESS = """
import subprocess, sys, time
work = "from perfmodel.processes import end_with_parent as end; end(); print(flush=True); import time; time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", work], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
SPAWNED = """
import multiprocessing, time
from perfmodel.processes import end_with_parent

def work(pipe):
    end_with_parent()
    pipe.send("ready")
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=work, args=(theirs,), daemon=True)
    child.start()
    ours.recv()
    print(child.pid, flush=True)
    time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends children")
@pytest.mark.parametrize("program", [SUBPROCESS, SPAWNED], ids=["subprocess", "spawned"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL])
def test_no_child_outlives_its_parent(program: str, number: signal.Signals, tmp_path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(program)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_running(child)
        os.kill(parent.pid, number)
        parent.wait(20)
    end_s = time.monotonic() + 20
    while is_running(child) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not is_running(child)
