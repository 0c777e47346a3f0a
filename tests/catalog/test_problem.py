"""Problems of names and words are those of objects, and every question takes either."""

from dataclasses import replace
from pathlib import Path

import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.catalog.job_files import job_from_toml, read_job
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Job, Problem


def test_words_make_the_problem_of_their_objects():
    model, cluster = catalog.model("gpt3-1.3b"), catalog.cluster("dgx-a100")
    job = Job.of(model, cluster.device, global_batch=16)
    framework = catalog.framework("generic")
    expected = Problem(model=model, cluster=cluster, job=job, framework=framework, devices=8)
    assert catalog.problem("gpt3-1.3b", "dgx-a100", global_batch=16, devices=8) == expected
    assert catalog.problem(model, cluster, job=job, devices=8) == expected
    assert catalog.problem(expected) is expected
    assert hash(expected) == hash(expected.replace(devices=8))
    assert expected.replace(global_batch=32).job == replace(job, global_batch=32)


def test_a_framework_is_taken_by_name():
    found = catalog.problem("gpt3-1.3b", "dgx-a100", global_batch=16, framework="megatron-core")
    assert found.framework == catalog.framework("megatron-core")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"model": "gpt3-1.3b", "global_batch": 16}, "the cluster is missing"),
        ({"model": "gpt3-1.3b", "cluster": "dgx-a100"}, "global_batch is missing"),
        (
            {"model": "gpt3-1.3b", "cluster": "dgx-a100", "global_batch": 16, "devices": 0},
            "devices must be at least 1",
        ),
        (
            {"model": "gpt3-1.3b", "cluster": "dgx-a100", "global_batch": 16, "cached_tokens": 8},
            "apply only to inference",
        ),
        ({"model": "gpt3-1", "cluster": "dgx-a100", "global_batch": 16}, "unknown model"),
    ],
)
def test_what_is_missing_is_named(words, said):
    with pytest.raises(PerfModelError, match=said):
        catalog.problem(**words)


def test_a_whole_problem_takes_no_words_besides():
    problem = catalog.problem("gpt3-1.3b", "dgx-a100", global_batch=16)
    with pytest.raises(PerfModelError, match="seq_len"):
        catalog.problem(problem, seq_len=1024)
    with pytest.raises(PerfModelError, match="--devices N"):
        pm.search(problem)
    with pytest.raises(UnknownNameError, match="did you mean 'objective'"):
        pm.search(problem.replace(devices=8), objectve="mfu")


def test_a_search_of_a_problem_is_the_search_of_its_words():
    problem = catalog.problem("gpt2-345m", "dgx-a100", global_batch=16, seq_len=512, devices=4)
    given = pm.search(problem, options=pm.SearchOptions(top=3))
    words = pm.search("gpt2-345m", "dgx-a100", global_batch=16, seq_len=512, devices=4, top=3)
    assert given.to_dict() | {"seconds": 0} == words.to_dict() | {"seconds": 0}


@pytest.mark.parametrize("as_table", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../order.txt",
        "a/../../order.txt",
        "link.txt",
        " /etc/passwd",
        "File:/etc/passwd",
    ],
)
def test_a_job_file_names_no_schedule_outside_its_folder(
    as_table: bool, name: str, tmp_path: Path
) -> None:
    """Whoever writes a job file does not choose what else is read, by links neither."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    (tmp_path / "order.txt").write_text("secret\n")
    (folder / "link.txt").symlink_to(tmp_path / "order.txt")
    schedule = name if name.startswith("File:") else f"file:{name}"
    layout = (
        f'[layout]\nschedule = "{schedule}"\n'
        if as_table
        else f'layout = "pp=2,schedule={schedule}"\n'
    )
    file = folder / "job.toml"
    file.write_text(layout)
    with pytest.raises(PerfModelError, match="is not in"):
        read_job(file)


def test_a_schedule_below_a_job_file_is_read_beside_it(tmp_path: Path) -> None:
    (tmp_path / "orders").mkdir()
    order = tmp_path / "orders" / "mine.txt"
    order.write_text("F0 B0\nF0 B0\n")
    for layout in (
        'layout = "pp=2,schedule=file:orders/mine.txt"\n',
        '[layout]\nschedule = "file:orders/mine.txt"\n',
    ):
        file = tmp_path / "job.toml"
        file.write_text(layout)
        assert f"schedule=file:{order}" in read_job(file).layout
    # the command line may name any file
    assert "file:/elsewhere" in read_job(file, ["layout.schedule=file:/elsewhere"]).layout


def test_a_row_of_a_table_names_no_schedule_in_a_file() -> None:
    with pytest.raises(
        PerfModelError, match="a schedule file can be given only on the command line"
    ):
        job_from_toml({"layout": {"schedule": "file:order.txt"}}, "row 0")
