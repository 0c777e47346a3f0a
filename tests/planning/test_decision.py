"""What the page of a decision holds: exact where it says so."""

import json

import numpy as np
import pytest

from perfmodel.catalog import problem
from perfmodel.cli import main
from perfmodel.errors import PerfModelError
from perfmodel.ingest.launch import parse_launch
from perfmodel.planning.decision import KNOBS, report, turned
from perfmodel.planning.layouts import search
from perfmodel.planning.layouts.search_words import SpaceWords
from perfmodel.planning.what_if import Scenario, step_s
from perfmodel.prediction import step_problem_of
from perfmodel.spec import Layout
from perfmodel.units import fit_words

JOB = {"model": "gpt3-1.3b", "cluster": "dgx-a100", "global_batch": 32}


@pytest.fixture(scope="module")
def made():
    return report(**JOB, devices=16, top=4)


@pytest.mark.parametrize("framework", ["megatron-core", "nanotron", "fsdp"])
def test_bars_of_memory_show_the_need_that_the_page_states(framework):
    """Reports of these frameworks count other memory than what must fit."""
    page = report(**JOB, layout="tp=2,dp=8", framework=framework)
    (row,) = page.data["rows"]
    assert max(map(sum, row["memory"])) == pytest.approx(row["memory_bytes"], rel=1e-4)


def test_sources_of_error_are_named_in_words(made):
    for row in made.data["rows"]:
        names = [name for name, _ in row["sources"]]
        assert names
        assert not any(":" in name or "_" in name or name == "own" for name in names)


def test_rows_are_the_searchs_layouts(made):
    found = search(**JOB, devices=16, top=4)
    rows = made.data["rows"]
    assert [row["layout"] for row in rows] == [p.layout_notation for p in found.layouts]
    for row, p in zip(rows, found.layouts, strict=True):
        assert row["step_s"] == pytest.approx(p.step_time_s, rel=1e-5)
        assert sum(row["breakdown_s"]) == pytest.approx(p.step_time_s, rel=1e-4)
        assert sum(row["origins"]) == pytest.approx(1, rel=1e-4)
        assert max(map(sum, row["memory"])) == pytest.approx(p.memory_needed_bytes, rel=1e-4)


def test_turned_is_the_step_of_whatif():
    model = step_problem_of(problem(**JOB))
    layouts = [Layout(tp=2, pp=2, dp=4, zero=1), Layout(tp=1, pp=4, dp=4, micro_batch=2)]
    found = turned(model, layouts)
    for at, layout in enumerate(layouts):
        here_s = step_s(model, layout, Scenario())
        for i, name in enumerate(found.knobs):
            half_s, near_s = (
                step_s(model, layout, KNOBS[name].scenario(factor)) for factor in (0.5, 1.001)
            )
            assert found.ratio[at, i, 0] == pytest.approx(half_s / here_s, rel=1e-4)
            assert found.elasticity[at, i] == pytest.approx(1e3 * np.log(near_s / here_s), abs=1e-3)


def test_more_of_a_rate_never_lengthens_the_step():
    found = turned(step_problem_of(problem(**JOB)), [Layout(tp=2, pp=2, dp=4, zero=1)])
    for i, name in enumerate(found.knobs):
        steps = np.array([*found.ratio[0, i, :2], 1.0, *found.ratio[0, i, 2:]])
        assert np.all(np.diff(steps if KNOBS[name].is_rate else -steps) < 1e-4)


def test_launch_files_give_the_layout_back(made):
    for row, files in zip(made.data["rows"], made.data["launch"], strict=True):
        layout = Layout.parse(row["layout"])
        for one in files:
            assert ("text" in one) != ("why" in one)
        text = next(one["text"] for one in files if one["name"] == "megatron" and "text" in one)
        back = parse_launch(text, "x.sh", devices=layout.devices)
        assert (back.layout.tp, back.layout.pp, back.layout.dp) == (layout.tp, layout.pp, layout.dp)


def test_several_batches_each_follow_their_own_job():
    both = report(**JOB | {"global_batch": [16, 32]}, devices=8, top=2)
    rows = both.data["rows"]
    batches = {row["global_batch"] for row in rows}
    assert batches <= {16, 32}
    for row in rows:
        found = turned(
            step_problem_of(problem(**JOB | {"global_batch": row["global_batch"]})),
            [Layout.parse(row["layout"])],
        )
        assert row["ratio"] == [
            pytest.approx(of_knob.tolist(), rel=1e-4) for of_knob in found.ratio[0]
        ]


def test_bad_input_is_one_line_and_no_file(tmp_path, capsys):
    page = tmp_path / "r.html"
    job = ["report", "--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--global-batch", "32"]
    for more, said in (
        (["--html", str(page)], "devices"),
        (["--devices", "16"], "--html"),
        (["--devices", "16", "--html", str(tmp_path)], "folder"),
        (["--layout", "tp=3", "--html", str(page)], "tp"),
        (["--devices", "16", "--profile", "rank0.json", "--html", str(page)], "--layout"),
        (["--layout", "tp=1", "--profile", "rank0.json", "--html", str(page)], "rank0.json"),
    ):
        assert main([*job, *more]) == 2, more
        err = capsys.readouterr().err
        assert said in err
        assert len(err.strip().splitlines()) == 1
    assert not page.exists()
    with pytest.raises(PerfModelError, match="no layout fits"):
        report("gpt3-175b", "dgx-a100", devices=8, global_batch=8)


def test_the_command_writes_the_page(tmp_path, capsys):
    page = tmp_path / "r.html"
    argv = [
        "report",
        "--model",
        "gpt3-1.3b",
        "--cluster",
        "dgx-a100",
        "--global-batch",
        "32",
        "--html",
        str(page),
    ]
    assert (
        main([*argv, "--devices", "8", "--top", "1", "--fix", "tp=2", "--compare-clusters", "h100"])
        == 0
    )
    assert "dgx-h100" in page.read_text()
    out = capsys.readouterr().out
    assert out.startswith("recommended: tp=")
    assert f"wrote {page}" in out
    assert "perfmodelReport" in page.read_text()


def test_a_page_of_images_counts_images(tmp_path, capsys):
    flags = ["--cluster", "dgx-h100", "--layout", "dp=8", "--global-batch", "64"]
    page = tmp_path / "page.html"
    assert main(["report", "--model", "vit-b-16", *flags, "--html", str(page)]) == 0
    assert " images/s" in capsys.readouterr().out
    assert main(["report", "--model", "vit-b-16", *flags, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["unit"], data["tokens_per_unit"]) == ("images", pytest.approx(197))
    heads = {q["label"] for q in data["quantities"]}
    assert {"images/s", "cost of a million images"} <= heads
    # Records keep counting tokens; the page divides by the tokens of an image.
    (row,) = data["rows"]
    images_per_s = row["tokens_per_s"] / data["tokens_per_unit"]
    assert images_per_s == pytest.approx(64 / row["step_s"], rel=1e-4)


def test_the_page_opens_on_the_layout_that_likely_fits(tmp_path):
    words = {
        "cluster": "dgx-h100",
        "devices": 8,
        "global_batch": 32,
        "fix": "micro_batch=1,schedule=1f1b,vpp=1",
    }
    found = search("llama3-8b", top=2, **words)
    assert found.layouts[0].fits_probability < 0.9  # or the case shows nothing
    data = report("llama3-8b", top=2, space=SpaceWords(fix=words.pop("fix")), **words).data
    row = data["rows"][data["recommended"]]
    assert row["layout"] == found.first_to_try.layout_notation
    assert row["fit_words"] == fit_words(found.first_to_try.fits_probability)
    assert row["step_s"] > data["rows"][0]["step_s"]
