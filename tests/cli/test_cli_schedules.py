"""`perfmodel schedules`."""

import json

import pytest

from perfmodel.cli import main
from perfmodel.schedule import check, get_schedule


def run_json(capsys, *arguments: str) -> dict:
    assert main(["schedules", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_all_schedules_side_by_side(capsys) -> None:
    report = run_json(capsys, "--stages", "4", "--micro-batches", "8")
    step = {row["schedule"]: row["step_s"] for row in report["rows"]}
    assert len(step) >= 20
    assert step["1f1b"] == 33
    assert step["zb-h2"] == 24
    assert main(["schedules", "gpipe", "chimera:4", "--stages", "8"]) == 0
    assert "chimera:4" in capsys.readouterr().out


def test_makespan_and_steady_interval_of_all_in_json_and_table(capsys) -> None:
    report = run_json(capsys, "--stages", "8", "--micro-batches", "24", "--times", "1,1,1")
    found = {one["name"]: one for one in report["schedules"]}
    assert len(found) == len(report["rows"]) >= 20
    assert all({"makespan", "steady_interval", "bubble"} <= set(one) for one in found.values())
    assert {name for name, one in found.items() if one["makespan"] != one["steady_interval"]} == {
        "nf1b",
        "pipedream",
        "pipedream-2bw",
        "pipedream-vertical-sync",
        "zb-h2",
        "zb-v",
    }
    assert (
        found["zb-h2"]["makespan"],
        found["zb-h2"]["steady_interval"],
        found["zb-h2"]["bubble"],
    ) == (79, 72, 0)
    assert (found["1f1b"]["makespan"], found["1f1b"]["bubble"]) == (93, pytest.approx(7 / 31))
    assert found["v-half"]["makespan"] == 161
    assert found["interleaved"]["makespan"] == 3 * (2 * 24 + 7)  # per chunk, of which there are two
    assert (
        main(["schedules", "zb-h2", "--stages", "8", "--micro-batches", "24", "--times", "1,1,1"])
        == 0
    )
    table = capsys.readouterr().out
    assert "makespan" in table
    assert "steady" in table
    assert "interval" in table
    assert " 79 " in table
    assert " 72 " in table


def test_what_backward_halving_counts_is_said(capsys) -> None:
    """Chimera, section 3.5: halving idles half as long as doubling, and keeps half of the
    activations."""
    names, stages = ("chimera-doubling", "chimera-halving"), ("--stages", "4")
    together = run_json(capsys, *names, *stages, "--micro-batches", "8")
    doubling, alike = together["rows"]
    assert doubling["step_s"] == alike["step_s"]
    (note,) = together["notes"]
    assert "twice the --micro-batches and half the times" in note
    assert main(["schedules", *names, *stages]) == 0
    assert "its micro-batches are halves" in capsys.readouterr().out

    as_noted = ("--micro-batches", "16", "--forward", "0.5", "--backward", "1")
    halving = run_json(capsys, "chimera-halving", *stages, *as_noted)["rows"][0]
    assert doubling["step_s"] - 24 == 2 * (halving["step_s"] - 24)
    assert max(halving["activations"]) == max(doubling["activations"])  # in halves
    assert run_json(capsys, "chimera-doubling", *stages)["notes"] == []


def test_times_per_chunk_are_said_with_who_runs_more_of_them(capsys) -> None:
    flags = ("--stages", "4", "--micro-batches", "8", "--times", "1,2,1")
    report = run_json(capsys, *flags)
    assert report["title"].endswith(
        "times: forward 1, input gradient 2, weight gradient 1 per chunk"
    )
    work = {row["schedule"]: row["step_s"] * (1 - row["bubble_fraction"]) for row in report["rows"]}
    # Bubbles of schedules with a steady state beyond one step are those of the interval.
    more, remainder = report["notes"][0].split(": ")
    assert remainder.startswith("2 times the work of the others")
    for name in more.split(", "):
        assert work[name] == pytest.approx(2 * work["1f1b"])
    assert "chimera" not in more.split(", ")
    assert work["chimera"] == pytest.approx(work["1f1b"])
    assert run_json(capsys, "1f1b", "zb-h1", *flags)["notes"] == []
    assert run_json(capsys, "1f1b", "interleaved", *flags[:4])["notes"] == []


def test_times_of_tenths_are_exact(capsys) -> None:
    report = run_json(
        capsys, "1f1b", "--stages", "8", "--micro-batches", "7", "--times", "0.1,0.1,0.1"
    )
    assert report["schedules"][0]["makespan"] == 4.2


def test_odd_depths_skip_what_needs_even_ones(capsys) -> None:
    report = run_json(capsys, "--stages", "3", "--micro-batches", "6")
    assert any("chimera" in line and "even number" in line for line in report["skipped"])


def test_own_model(capsys) -> None:
    report = run_json(
        capsys,
        "1f1b",
        "zb-h1",
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--layout",
        "pp=4,dp=2",
        "--global-batch",
        "32",
    )
    assert [row["schedule"] for row in report["rows"]] == ["zb-h1", "1f1b"]


def test_pictures_curves_and_orders(capsys, tmp_path) -> None:
    picture, curves, order = tmp_path / "s.png", tmp_path / "c.csv", tmp_path / "o.txt"
    run_json(capsys, "chimera", "--stages", "4", "--micro-batches", "4", "--png", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    trained = run_json(
        capsys,
        "1f1b",
        "nf1b",
        "--train",
        "--steps",
        "4",
        "--stages",
        "2",
        "--micro-batches",
        "2",
        "--out",
        str(curves),
        "--png",
        str(tmp_path / "t.png"),
    )
    assert [row["updates"] for row in trained["rows"]] == [4, 4]
    assert curves.read_text().startswith("schedule,update,time_s,loss,version_difference")
    run_json(
        capsys, "--optimise", "3", "--stages", "3", "--micro-batches", "6", "--out", str(order)
    )
    assert check(get_schedule(f"file:{order}")(3, 6)) == ()
    table = run_json(capsys, f"file:{order}", "--stages", "3", "--micro-batches", "6")
    assert table["rows"][0]["activations"][1] <= 3


def test_an_order_made_for_a_model_is_used_by_its_layout(capsys, tmp_path) -> None:
    order = tmp_path / "o.txt"
    job = [
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--layout",
        "pp=4,dp=2",
        "--global-batch",
        "16",
    ]
    made = run_json(capsys, "--optimise", "4", *job, "--out", str(order))
    step = {row["schedule"]: row["step_s"] for row in made["rows"]}
    assert step["optimised"] <= step["zb-h1"] < step["1f1b"]
    used = run_json(capsys, f"file:{order}", "1f1b", *job)
    assert used["rows"][0]["schedule"] == f"file:{order}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zigzag"], "unknown schedule"),
        (["chimera", "--stages", "5"], "even number"),
        (["--model", "gpt3-1.3b"], "--model needs --cluster"),
        (["--optimise", "4"], "needs --out"),
        (["file:nowhere.txt"], "cannot be read"),
        (["gpipe", "--forward-s", "-1"], "not negative"),
        (["gpipe", "--micro-batches", "0"], "at least 1"),
        (["gpipe", "--forward-s", "0", "--backward-s", "0"], "gpipe: a step of zero length"),
        (["--optimise", "4", "--stages", "0", "--out", "unwritten.txt"], "one entry per stage"),
        (["gpipe", "--times", "1,2"], "--times must be three numbers"),
        (["gpipe", "--times", "1,x,2"], "--times must be three numbers"),
        (["gpipe", "--times", "1,nan,2"], "--times must be three numbers"),
        (["gpipe", "--times=-1,1,1"], "must be at least 0"),
        (["gpipe", "--times", "0,0,0"], "one of them above 0"),
        (
            ["gpipe", "--times", "1,1,1", "--backward-s", "3"],
            "--times cannot be combined with --backward-s",
        ),
        (["gpipe", "--times", "1,1,1", "--train"], "--times cannot be combined with --train"),
        (["--stages", "0"], "--stages must be at least 1, got 0"),
        (["--micro-batches", "-3"], "--micro-batches must be at least 1, got -3"),
        (["chimera-doubling", "--stages", "5", "--png", "unwritten.png"], "even"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments: list[str], message: str) -> None:
    assert main(["schedules", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_deadlocked_file_is_named(capsys, tmp_path) -> None:
    path = tmp_path / "stuck.txt"
    path.write_text("stages 0 | 1\nF0 B0 F1 B1\nF0 F1 B0 B1\n")
    assert main(["schedules", f"file:{path}", "--stages", "2", "--micro-batches", "2"]) == 2
    assert "deadlock: device 0 position 1" in capsys.readouterr().err
