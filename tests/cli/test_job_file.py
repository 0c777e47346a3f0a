"""Job files: one TOML says what flags and words say, and says it to the shell and to Python
alike."""

import json
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from command_line import run

import perfmodel as pm
from perfmodel.catalog import job_files
from perfmodel.cli import complete_from_job, given, parser, samples
from perfmodel.errors import PerfModelError
from perfmodel.planning.layouts.search_words import SEARCH_WORDS
from perfmodel.spec import Job, Layout, key_fields

JOB = """\
model = "gpt3-1.3b"
cluster = "dgx-a100"
devices = 16
[job]
global_batch = 32
optimizer = "sgd"
[layout]
tp = 2
pp = 2
dp = 4
[search]
fix = "tp=2,recompute=none"
schedules = ["1f1b"]
top = 3
price_per_device_hour = 2.0
"""
FLAGS = ("--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--global-batch", "32", "--devices", "16")


@pytest.fixture
def job(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    return "job.toml"


def predicted(capsys, *argv: str) -> dict:
    status, out, err = run(capsys, "predict", *argv, "--json")
    assert status == 0, err
    return json.loads(out)


def plain(value: dict) -> dict:
    """As it comes back from JSON, without what the clock says."""
    return json.loads(json.dumps(value)) | ({"seconds": 0} if "seconds" in value else {})


def test_file_flags_and_python_say_the_same(capsys, job):
    of_file = predicted(capsys, job)
    of_flags = predicted(capsys, *FLAGS, "--layout", "tp=2,pp=2,dp=4", "--set", "job.optimizer=sgd")
    of_python = pm.predict(job).to_dict()
    assert of_file == of_flags
    # what was left to defaults is known of words alone, not of a prediction
    assert of_file.pop("not_stated")
    assert of_file == plain(of_python)
    assert pm.problem(job).job.optimizer == "sgd"
    assert pm.problem(job) == pm.problem(
        "gpt3-1.3b", "dgx-a100", global_batch=32, devices=16, optimizer="sgd"
    )


def test_flags_win_over_set_and_set_over_the_file(capsys, job):
    changed = predicted(
        capsys, job, "--set", "layout.tp=4", "--set", "layout.dp=2", "--set", "job.seq_len=512"
    )
    assert (changed["layout"], changed["seq_len"]) == ("tp=4,pp=2,dp=2", 512)
    flagged = predicted(
        capsys, job, "--set", "job.seq_len=512", "--seq-len", "1024", "--layout", "tp=8,dp=2"
    )
    assert (flagged["layout"], flagged["seq_len"]) == ("tp=8,pp=1,dp=2", 1024)
    del flagged["not_stated"]
    assert plain(pm.predict(job, layout="tp=8,dp=2", seq_len=1024).to_dict()) == flagged


def test_a_search_takes_its_words_from_the_file(capsys, job):
    status, out, _ = run(capsys, "search", job, "--json", "--method", "enumerate")
    found = json.loads(out)
    assert status == 0
    assert len(found["layouts"]) == 3
    assert all("tp=2" in p["layout"] for p in found["layouts"])
    assert plain(pm.search(job, method="enumerate").to_dict()) == plain(found)
    assert len(json.loads(run(capsys, "search", job, "--json", "--top", "1")[1])["layouts"]) == 1
    assert len(pm.search(job, top=1).layouts) == 1


def test_a_search_from_a_file_names_a_command_that_goes_on_from_it(capsys, job):
    _, out, _ = run(capsys, "search", job, "--set", "job.seq_len=1024", "--top", "1")
    (following,) = (
        line.removeprefix("next: perfmodel ")
        for line in out.splitlines()
        if line.startswith("next: ")
    )
    assert following.startswith("predict job.toml --set job.seq_len=1024")
    assert run(capsys, *following.split())[0] == 0


def test_other_questions_take_the_file_too(capsys, job):
    for argv in (
        [
            "whatif",
            job,
            "--set",
            "inter_node_bandwidth=2x",
            "--set",
            "layout.dp=2",
            "--set",
            "layout.tp=4",
        ],
        ["design", "memory", job],
        ["plot", "gantt", job, "--out", "step.png"],
        ["timeline", job, "--out", "step.json"],
    ):
        status, _, err = run(capsys, *argv)
        assert status == 0, err
    assert pm.whatif(job, settings=["inter_node_bandwidth=2x"]).after_s > 0
    assert {one.schedule for one in pm.compare_schedules(job, schedules=["1f1b", "gpipe"])} == {
        "1f1b",
        "gpipe",
    }


def test_model_and_cluster_may_be_tables_and_paths_are_beside_the_file(tmp_path):
    parts = samples()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "cluster.toml").write_text(parts["cluster.toml"])
    model = "\n".join(line for line in parts["model.toml"].splitlines() if not line.startswith("#"))
    path = tmp_path / "sub" / "job.toml"
    path.write_text(
        f'cluster = "cluster.toml"\nlayout = "tp=2,dp=4"\ndevices = 8\n[job]\nglobal_batch = 8\n[model]\n{model}\n'
    )
    assert pm.predict(path).model == "mine-3b"
    assert pm.problem(path).cluster.levels[1].name == "RoCE 400G"
    changed = job_files.read_job(path, ["model.layers=16", "layout.tp=1"])
    assert changed.problem_fields["model"].layers == 16
    assert changed.layout == "tp=1,dp=4"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("job.seqlen=3", "did you mean 'seq_len'"),
        ("serch.top=3", "did you mean .*'search'"),
        ("global_batch=3", r"belongs under \[job\]"),
        ("layout.tpp=3", "unknown layout key 'tpp'"),
        ("layout.tp=2.5", "tp must be a whole number"),
        ("job.seq_len=many", "seq_len.*must be a whole number"),
        ("job.mode=sleep", "'train' or 'inference'"),
        ("model=4", "model must be a name"),
        ("model.layers=3", "not a table"),
        ("job=3", "must be a table"),
        ("devices=1.5", "devices must be a whole number"),
        ("=3", "not KEY=VALUE"),
        ("layout", "not KEY=VALUE"),
        ("search.tops=3", "did you mean .*'top'"),
        ("search.top=x", "top.*must be a whole number"),
        ("search.strict=1", "strict.*must be true or false"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(capsys, job, change, said):
    status, out, err = run(capsys, "search", job, "--set", change)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert re.search(said, err)


TOLD = [
    ["predict"],
    ["search"],
    ["whatif"],
    ["timeline", "--out", "trace.json"],
    ["schedules"],
    ["compare-clusters", "--devices", "16"],
    ["report", "--html", "page.html"],
    ["plot", "gantt", "--out", "plot.png"],
    ["design", "memory"],
]


@pytest.mark.parametrize("command", TOLD, ids=lambda argv: argv[0])
def test_no_question_trains_from_the_middle_of_sequences(capsys, job, command):
    """Their beginnings are in no cache."""
    status, out, err = run(capsys, *command, job, "--set", "job.cached_tokens=512")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "cached_tokens apply only to inference; set mode=inference" in err


def test_init_writes_every_key_and_replaces_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(capsys, "init")[0] == 0
    text = Path("job.toml").read_text()
    # A placeholder such as <number> stands for a value that is to be filled in.
    filled = re.sub(r"(?m)^(# \w+ = )<.*>$", r"\g<1>1", text.replace("[<numbers>]", "[1]"))
    said = tomllib.loads(re.sub(r"(?m)^# (\w+ = )", r"\1", filled))
    assert set(said) == set(job_files.JOB_FILE_KEYS)
    assert set(said["job"]) == set(key_fields(Job)) - {"assumed"}
    assert set(said["layout"]) == set(key_fields(Layout))
    assert set(said["search"]) == set(SEARCH_WORDS)
    assert run(capsys, "predict", "job.toml")[0] == 0
    status, _, err = run(capsys, "init")
    assert status == 2
    assert "--force" in err
    assert run(capsys, "init", "--force")[0] == 0
    assert max(map(len, text.splitlines())) <= 100


def test_every_command_with_the_flags_of_a_job_takes_a_file():
    from perfmodel.cli import parsers

    for one in parsers(parser()):
        names = {action.dest for action in one._actions}
        if {"model", "strict", "global_batch", "calibration"} <= names:
            assert {"job_file", "set"} <= names | set(one._defaults), one.prog


def test_what_the_command_line_gives_is_told_from_defaults():
    assert given(["search", "x.toml", "--top", "10"]) == {"command", "job_file", "top"}
    arguments = parser().parse_args(["predict", "none.txt"])
    with pytest.raises(PerfModelError, match=r"ends in \.toml"):
        complete_from_job(arguments, ())


SERVED = """\
model = "llama3-8b"
cluster = "dgx-h100"
[layout]
tp = 2
[serving]
prompt_tokens = 512
output_tokens = 64
batch = 8
"""


def test_a_server_is_said_by_a_file_too(capsys, job):
    Path("served.toml").write_text(SERVED)
    status, out, _ = run(
        capsys,
        "serve",
        "served.toml",
        "--set",
        "serving.batch=16",
        "--output-tokens",
        "32",
        "--json",
    )
    found = json.loads(out)
    assert (status, found["batch"], found["output_tokens"], found["devices"]) == (0, 16, 32, 2)
    assert found["tpot_s"] == pm.serve("served.toml", batch=16, output_tokens=32).tpot_s
    assert (
        "did you mean 'batch'" in run(capsys, "serve", "served.toml", "--set", "serving.bach=1")[2]
    )
    tokens = ("--prompt-tokens", "8", "--output-tokens", "8")
    _, _, err = run(capsys, "serve", job, *tokens, "--set", "layout.zero=1")
    assert "serve does not use layout.zero, job.global_batch" in " ".join(err.split())


def test_other_commands_take_the_job_where_a_model_or_a_name_stands(capsys, job):
    status, out, err = run(capsys, "schedules", "1f1b", job, "--json")
    assert status == 0, err
    step_s = predicted(capsys, job)["step_time_s"]
    assert [row["step_time_s"] for row in json.loads(out)["rows"]] == [pytest.approx(step_s)]
    planned = json.loads(run(capsys, "calibrate", "--model", job, "--dry-run", "--json")[1])
    assert [one["layout"] for one in planned["saving"]["per_layout"]] == ["tp=2,pp=2,dp=4"]
    other = json.loads(
        run(capsys, "calibrate", "--model", job, "--set", "layout.tp=4", "--dry-run", "--json")[1]
    )
    assert other["saving"]["per_layout"][0]["devices"] == 32
    assert (
        "--model belongs to --profile"
        in run(capsys, "fit", job, "tables.csv", "--out", "fitted")[2]
    )
    # the world is that of the file's layout; the script never joins it
    status, _, err = run(capsys, "emulate", "--model", job, "--", "true")
    assert (status, "without initialising torch.distributed" in err) == (2, True)


@pytest.mark.parametrize(
    "argv",
    [
        ("whatif",),
        ("design", "memory"),
        ("plot", "gantt", "--out", "step.png"),
        ("design", "devices", "--below", "9"),
    ],
)
def test_strict_is_kept_or_refused(capsys, job, argv):
    # nothing of this optimizer was ever measured
    status, _, err = run(capsys, *argv, job, "--strict", "--set", "job.optimizer=muon")
    assert (status, len(err.strip().splitlines()[-1]) > 0) == (2, True)
    assert "--strict" in err


def test_a_report_on_a_calibration_takes_the_layout_of_the_job_file(job: str) -> None:
    """It covers the events of that step; a report on a search ignores the layout of the file."""
    for flags, layout in (
        (("--tables", "kernels.csv"), "tp=2,pp=2,dp=4"),
        (("--html", "page.html"), None),
    ):
        argv = ("report", job, *flags)
        arguments = parser().parse_args(argv)
        complete_from_job(arguments, given(argv))
        assert arguments.layout == layout


def test_commented_keys_of_a_new_job_file_show_their_defaults() -> None:
    # Without its comment signs, a line that shows a default changes nothing; one without a default
    # says in <> what to write.
    text = samples()["job.toml"]
    lines = [
        line.removeprefix("# ") if re.match(r"# \w+ = [^<]*$", line) else line
        for line in text.splitlines()
    ]
    uncommented, as_written = tomllib.loads("\n".join(lines)), tomllib.loads(text)
    for section in ("job", "layout"):
        added = uncommented[section].keys() - as_written[section].keys()
        assert len(added) > 15
        for name in added:
            home = key_fields(Job)[name].home if section == "job" else key_fields(Layout)[name].home
            (default,) = [f.default for f in fields(home) if f.name == name]
            shown = uncommented[section][name]
            assert default is MISSING or shown == (
                list(default) if isinstance(default, tuple) else default
            )
    assert "# tokens = <number>" in text
    assert not re.search(r"^# (etp|partition|price_per_device_hour) = \[?\d", text, re.MULTILINE)
