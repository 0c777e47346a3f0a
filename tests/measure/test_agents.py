"""Calibrations of several started processes: as torchrun, mpirun and srun number them, on 'nodes'
of this machine."""

import argparse
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_collectives import collective

from perfmodel.errors import CalibrationError
from perfmodel.ingest.tables import read_table
from perfmodel.measure.ranks import (
    KEY,
    NAME,
    Agent,
    EmulatedHosts,
    Hello,
    Launch,
    Meeting,
    Server,
    _launch,
    find_launch,
    forget_launcher,
    free_port,
    gathered,
    members,
    serve_agent,
    unavailable,
)
from perfmodel.measure.tables import read_card

ROOT = Path(__file__).parents[2]
PLAN = """
device = "box"
interconnect = "two names for one machine"
attempts = 1
[collective_rule]
half_width = 0.5
min_repeats = 2
max_repeats = 2
max_s = 0.2
interference_limit = 0.999
[[collectives]]
"num_ranks,ranks_per_node" = [[2, 1]]
collective = "all_reduce"
bytes = [1024, 65536]
"""
PATIENCE_S = 300.0
"""Longer than anything takes, even on a machine that does much else."""
COMMAND = [sys.executable, "-m", "perfmodel.cli", "calibrate"]


_started: list[subprocess.Popen[str]] = []


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate()


def arguments(out: Path) -> list[str]:
    return ["--plan", str(out / "plan.toml"), "--out", str(out), "--launch-timeout", "200"]


def started(words: list[str], environ: Mapping[str, str] = {}) -> subprocess.Popen[str]:
    forward = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    _started.append(
        subprocess.Popen(
            words, env=forward, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    )
    return _started[-1]


def check_table(out: Path, nodes: int, ranks_per_node: int) -> None:
    table, card = read_table(out / "collectives.csv"), read_card(out / "collectives.csv")
    assert (
        table[["num_ranks", "num_nodes", "ranks_per_node"]].to_numpy().tolist()
        == [[2, nodes, ranks_per_node]] * 2
    )
    assert table["bytes"].tolist() == [1024, 65536]
    assert (table["time_us"] > 0).all()
    assert (card.method["nodes"], card.method["processes"]) == (nodes, 2)
    assert not (out / NAME).exists()


@pytest.mark.slow
def test_a_killed_agent_is_named_and_the_run_goes_on_where_it_was(out: Path):
    def launch() -> list[subprocess.Popen[str]]:
        return [
            started(
                [*COMMAND, *arguments(out), "--launched"],
                {
                    "RANK": str(i),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "PERFMODEL_NODE": f"node-{'ab'[i]}",
                },
            )
            for i in (1, 0)
        ]

    (out / "plan.toml").write_text(
        PLAN.replace("[1024, 65536]", f"[1024, {', '.join(['65536'] * 500)}]")
    )
    agent, driver = launch()
    partial = out / ".collectives.csv.partial"
    until(
        lambda: (
            driver.poll() is not None or (partial.exists() and partial.read_text().count("\n") >= 2)
        )
    )
    agent.send_signal(signal.SIGKILL)
    error = driver.communicate(timeout=PATIENCE_S)[1]
    agent.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 2, error
    assert re.search(r"perfmodel: rank [01] \(process [01] on node-[ab]\)", error)
    (out / "plan.toml").write_text(PLAN)
    first = json.loads(partial.read_text().splitlines()[1])["row"]
    agent, driver = launch()
    words, notes = driver.communicate(timeout=PATIENCE_S)
    assert agent.communicate(timeout=PATIENCE_S) == ("", "")
    assert (agent.returncode, driver.returncode) == (0, 0), notes
    assert "2 rows" in words
    assert "2 processes on 2 nodes" in notes
    check_table(out, 2, 1)
    assert read_table(out / "collectives.csv")["time_us"][0] == first["time_us"]


@pytest.mark.slow
def test_torchrun(out: Path):
    pytest.importorskip("torch", reason="torch is not installed (extra: torch)")
    (out / "plan.toml").write_text(PLAN.replace("[[2, 1]]", "[[2, 2]]"))
    words = [
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "0",
    ]
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *words,
        "--no-python",
        *COMMAND,
        *arguments(out),
    ]
    done = started([*run, "--launched", "--backend", "torch"])
    _, notes = done.communicate(timeout=PATIENCE_S)
    assert done.returncode == 0, notes
    check_table(out, 1, 2)
    assert read_table(out / "collectives.csv")["software"].str.startswith("torch").all()


@pytest.mark.skipif(bool(unavailable()), reason=f"hosts cannot be emulated here: {unavailable()}")
def test_two_hosts_that_reach_each_other_by_network_only(out: Path):
    bandwidth = 2e6
    with EmulatedHosts(2, bandwidth) as cluster:
        on = [
            [
                "ip",
                "netns",
                "exec",
                host.namespace,
                "unshare",
                "--uts",
                "sh",
                "-c",
                'hostname "$0" && exec "$@"',
            ]
            for host in cluster.hosts
        ]
        running = [
            started(
                [*on[i], cluster.hosts[i].address, *COMMAND, *arguments(out), "--launched"],
                {"OMPI_COMM_WORLD_RANK": str(i), "OMPI_COMM_WORLD_SIZE": "2"},
            )
            for i in (0, 1)
        ]
        errors = [process.communicate(timeout=PATIENCE_S)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    check_table(out, 2, 1)
    # at least half of the buffer leaves each host
    assert read_table(out / "collectives.csv")["time_us"].max() > 65536 / 2 / bandwidth * 1e6 * 0.8


def test_submitit(out: Path):
    pytest.importorskip("submitit", reason="submitit is not installed (extra: cluster)")
    (out / "plan.toml").write_text(PLAN.replace("[[2, 1]]", "[[2, 2]]"))
    script = [
        sys.executable,
        str(ROOT / "calibrate/launch/slurm.py"),
        str(out / "plan.toml"),
        str(out),
    ]
    done = started(
        [
            *script,
            "--cluster",
            "local",
            "--nodes",
            "1",
            "--per-node",
            "2",
            "--launch-timeout",
            "200",
        ]
    )
    _, error = done.communicate(timeout=PATIENCE_S)
    assert done.returncode == 0, error
    check_table(out, 1, 2)


def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def launch(index: int, count: int = 2, **changes) -> Launch:
    return Launch(
        launcher="test", index=index, count=count, node=f"node-{index}", host="127.0.0.1", **changes
    )


def come(folder: Path, joiners: list[Launch], timeout_s: float = 20.0) -> tuple[str, list[str]]:
    """Process 0 of two and others in threads: what process 0 is refused with, and each of the
    others."""
    ends: dict[int, str] = {}

    def join(number: int) -> None:
        try:
            serve_agent(joiners[number], folder, timeout_s)
        except CalibrationError as error:
            ends[number] = str(error)

    threads = [threading.Thread(target=join, args=(number,)) for number in range(len(joiners))]
    for thread in threads:
        thread.start()
    try:
        with gathered(launch(0, 3 if len(joiners) > 1 else 2), folder, timeout_s) as agents:
            assert [agent.hello.index for agent in agents] == list(range(len(agents)))
            assert 0 < agents[-1].free_port() < 65536
        refused = ""
    except CalibrationError as error:
        refused = str(error)
    for thread in threads:
        thread.join(timeout_s)
    assert not any(thread.is_alive() for thread in threads)
    return refused, [ends.get(number, "") for number in range(len(joiners))]


def test_processes_come_and_go_home(tmp_path: Path):
    (tmp_path / NAME).write_text(
        json.dumps({"host": "127.0.0.1", "port": 9, "key": "of a killed run"})
    )
    assert come(tmp_path, [launch(1)]) == ("", [""])
    assert list(tmp_path.iterdir()) == []


def test_the_secret_is_for_the_user_alone_or_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    watch = threading.Thread(
        target=lambda: (
            until((tmp_path / NAME).exists),
            seen.append((tmp_path / NAME).stat().st_mode & 0o777),
        )
    )
    watch.start()
    refused, _ = come(tmp_path, [], 0.5)
    watch.join()
    assert seen == [0o600]
    assert re.search("process 1 of 2 did not connect to 127.0.0.1 within 0.5 s", refused)
    monkeypatch.setenv(KEY, "short")
    with pytest.raises(CalibrationError, match="at least 16"):
        serve_agent(launch(1), tmp_path, 1.0)


def test_without_a_shared_folder_address_and_secret_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(KEY, "s" * 32)
    port = free_port()
    agent = threading.Thread(
        target=serve_agent, args=(launch(1, port=port), tmp_path / "elsewhere", 20.0)
    )
    agent.start()
    with gathered(launch(0, port=port), tmp_path, 20.0) as agents:
        assert [agent.hello.node for agent in agents] == ["node-0", "node-1"]
    agent.join(20.0)
    assert not agent.is_alive()


def test_two_processes_of_one_number_are_refused(tmp_path: Path):
    refused, ends = come(tmp_path, [launch(1, 3), replace(launch(1, 3), node="node-x")])
    assert re.search("two processes have number 1, on node-[1x] and node-[1x]", refused)
    assert all("two processes have number 1" in end for end in ends)


def test_other_counts_and_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    refused, (end,) = come(tmp_path, [launch(1, 5)])
    assert (
        "process 1 on node-1 was started as one of 5 processes, but process 0 as one of 2"
        in refused
    )
    assert refused in end
    versions = iter([{"jax": "1.0"}, {"jax": "2.0"}])
    monkeypatch.setattr("perfmodel.measure.ranks._agents.software", lambda packages: next(versions))
    refused, (end,) = come(tmp_path, [launch(1)])
    assert re.search(
        r"process 1 on node-1 has jax \d.0, but process 0 on node-0 has \d.0; install the same",
        refused,
    )
    assert refused in end


def test_without_process_0_or_with_another_secret_an_agent_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(
        CalibrationError, match=r"could not connect to process 0 .* all nodes share"
    ):
        serve_agent(launch(1), tmp_path, 0.3)
    found = {"host": "127.0.0.1", "port": 9, "key": "k" * 20}
    (tmp_path / NAME).write_text(json.dumps(found))
    with pytest.raises(CalibrationError, match=r"127.0.0.1:9: .*refused"):
        serve_agent(launch(1), tmp_path, 0.3)

    def stranger() -> None:
        until((tmp_path / "b" / NAME).exists)
        there = json.loads((tmp_path / "b" / NAME).read_text())
        (tmp_path / NAME).write_text(json.dumps({**there, "key": "x" * 20}))
        with pytest.raises(CalibrationError, match="another secret"):
            serve_agent(launch(1), tmp_path, 0.3)

    (tmp_path / "b").mkdir()
    thread = threading.Thread(target=stranger)
    thread.start()
    refused, _ = come(tmp_path / "b", [], 1.5)
    thread.join()
    assert re.search("did not connect .* connections used another secret", refused)


def agents(*nodes: str) -> list[Agent]:
    return [
        Agent(Pipe()[0], Hello(i, len(nodes), node, "", (0,), {})) for i, node in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "ranks", "ranks_per_node", "expected"),
    [
        ("aabb", 4, 2, [0, 1, 2, 3]),
        ("abab", 4, 2, [0, 2, 1, 3]),
        ("abab", 2, 1, [0, 1]),
        ("abab", 2, 2, [0, 2]),
        ("abbcc", 4, 2, [1, 2, 3, 4]),
    ],
)
def test_ranks_are_spread_as_the_collective_asks(
    nodes: str, ranks: int, ranks_per_node: int, expected: list[int]
):
    op = collective("all_reduce", num_ranks=ranks, ranks_per_node=ranks_per_node)
    assert [agent.hello.index for agent in members(agents(*nodes), op)] == expected


@pytest.mark.parametrize(
    ("nodes", "ranks", "ranks_per_node", "message"),
    [
        ("ab", 4, 2, "needs 2 nodes with 2 started processes each; there are 1 on a, 1 on b"),
        ("aaaa", 4, 2, "there are 4 on a"),
        ("aab", 3, 2, "there are 2 on a, 1 on b"),
        ("a", 2, 2, "needs 1 node with 2 started processes each; there are 1 on a"),
    ],
)
def test_too_few_processes_or_nodes_are_refused(
    nodes: str, ranks: int, ranks_per_node: int, message: str
):
    with pytest.raises(CalibrationError, match=message):
        members(
            agents(*nodes), collective("all_reduce", num_ranks=ranks, ranks_per_node=ranks_per_node)
        )


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a"}, ("torchrun", 3, 4, "a")),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0"},
            ("mpirun", 1, 2, None),
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ("mpirun", 0, 2, None)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, ("srun", 5, 8, None)),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"},
            ("srun", 1, 2, None),
        ),
    ],
)
def test_launchers_tell_each_process_its_number(
    environ: dict[str, str], expected: tuple[object, ...]
):
    found = find_launch(environ)
    assert found is not None
    assert (found.launcher, found.index, found.count, found.host) == expected


def test_arguments_go_before_the_environment():
    found = find_launch(
        {"RANK": "3", "WORLD_SIZE": "4", "PERFMODEL_NODE": "n"},
        process=0,
        processes=2,
        coordinator="a:29600",
    )
    assert found == Launch(launcher="--process", index=0, count=2, node="n", host="a", port=29600)
    assert find_launch({}) is None


@pytest.mark.parametrize(
    ("environ", "given", "message"),
    [
        ({"RANK": "4", "WORLD_SIZE": "4"}, {}, "process 4 of 4"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, {}, "RANK='x'"),
        ({}, {"process": 1}, "give both"),
        ({}, {"process": 0, "processes": 2, "coordinator": "node-a"}, "must be HOST:PORT"),
        ({}, {"process": 0, "processes": 2, "coordinator": "a:99999"}, "must be HOST:PORT"),
    ],
)
def test_impossible_places_are_refused(
    environ: dict[str, str], given: dict[str, object], message: str
):
    with pytest.raises(CalibrationError, match=message):
        find_launch(environ, **given)  # pyright: ignore[reportArgumentType]


def test_ranks_do_not_see_the_launcher(monkeypatch: pytest.MonkeyPatch):
    for name in (
        "RANK",
        "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE",
        "SLURM_JOB_ID",
        "OMPI_COMM_WORLD_RANK",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    forget_launcher()
    assert os.environ.get("NCCL_SOCKET_IFNAME") == "ib0"
    assert not {
        name
        for name in os.environ
        if name.startswith(("TORCHELASTIC", "SLURM", "OMPI", "RANK", "MASTER"))
    }


@pytest.mark.parametrize(
    ("environ", "more", "status", "message"),
    [
        ({}, ["--launched"], 2, "--launched needs a start by torchrun, mpirun or srun"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            ["--launched", "--dry-run"],
            2,
            "--dry-run cannot be used with a launcher",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            ["--dry-run"],
            0,
            "process 1 of 2 of torchrun measures alone",
        ),
    ],
)
def test_the_command_says_whether_it_measures_together(
    out: Path,
    environ: dict[str, str],
    more: list[str],
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    from perfmodel.cli import main

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", *arguments(out), *more]) == status
    assert message in capsys.readouterr().err


def test_collectives_between_nodes_name_their_network(out: Path):
    from perfmodel.measure import read_plan, run_plan

    (out / "plan.toml").write_text(PLAN.replace("interconnect", "# interconnect"))
    with pytest.raises(CalibrationError, match="name the network in the plan"):
        run_plan(read_plan(out / "plan.toml"), out, agents=agents("a", "b"))


def test_process_0_listens_on_the_address_that_it_is_given_alone(tmp_path: Path) -> None:
    meeting = Meeting("127.0.0.1", 0, "k" * 20)
    with Server(meeting, tmp_path) as server:
        assert server._socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(CalibrationError, match="give an address of this node"):
        Server(replace(meeting, host="192.0.2.1"), tmp_path).__enter__()


def test_connections_without_the_secret_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_launch, "MOST_TURNED_AWAY", 3)
    meeting = Meeting("127.0.0.1", 0, "k" * 20)
    with Server(meeting, tmp_path) as server:
        strangers = [socket.create_connection(server._socket.getsockname()) for _ in range(3)]
        for stranger in strangers:
            stranger.close()
        with pytest.raises(CalibrationError, match=r"3 connections to .* used a wrong secret"):
            server.accept([1], launch(0), 5.0)


def test_slurm_is_told_whom_to_charge_and_which_container_to_run(monkeypatch: pytest.MonkeyPatch):
    submitit = SimpleNamespace(helpers=SimpleNamespace(DelayedSubmission=object))
    monkeypatch.setitem(sys.modules, "submitit", submitit)
    slurm = runpy.run_path(str(ROOT / "calibrate/launch/slurm.py"))["slurm_options"]
    names = ("partition", "account", "qos", "constraint", "container", "mounts")
    nothing = dict.fromkeys(names)
    assert slurm(argparse.Namespace(**nothing)) == {}
    chosen = {
        "partition": "gpu",
        "account": "project",
        "container": "/shared/p.sqsh",
        "mounts": "/shared:/shared",
    }
    assert slurm(argparse.Namespace(**nothing | chosen)) == {
        "slurm_partition": "gpu",
        "slurm_account": "project",
        "slurm_srun_args": [
            "--container-image=/shared/p.sqsh",
            "--no-container-mount-home",
            "--container-mounts=/shared:/shared",
        ],
    }


@pytest.mark.parametrize("container", ["", "/shared/p.sqsh"])
def test_the_batch_script_starts_the_command_in_the_container_that_is_named(
    tmp_path: Path, container: str
):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "CONTAINER": container,
        "MOUNTS": "/a b:/c",
    }
    script = ROOT / "calibrate/launch/slurm.sh"
    done = subprocess.run(
        ["bash", script, "plan.toml", "out", "--backend", "torch"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert words[-8:] == [
        "calibrate",
        "--plan",
        "plan.toml",
        "--out",
        "out",
        "--launched",
        "--backend",
        "torch",
    ]
    assert ("--container-image=/shared/p.sqsh" in words) == bool(container)
    assert ("--container-mounts=/a b:/c" in words) == bool(container)
