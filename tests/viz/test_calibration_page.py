"""The page of a calibration in a real headless browser: how far off, how sure, what to measure
next."""

import json

import pytest

from perfmodel import catalog
from perfmodel.cli import samples
from perfmodel.errors import CalibrationError
from perfmodel.measure import read_plan
from perfmodel.planning.decision import report
from perfmodel.spec import Job, Problem
from perfmodel.validation import calibration_report, validate_kernels


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    for name in ("kernels.csv", "collectives.csv"):
        (folder / name).write_text(samples()[name])
    return [folder / "kernels.csv", folder / "collectives.csv"]


@pytest.fixture(scope="module")
def made(tables):
    return calibration_report(tables)


def test_errors_are_those_of_validate_kernels(made, tables):
    told = validate_kernels(tables)["families"]
    for group in made.data["groups"]:
        expected = told[group["group"]][group["device"]]
        assert {name: group[name] for name in expected} == pytest.approx(expected)
    assert json.loads(json.dumps(made.to_dict())) == made.to_dict()


def test_what_is_wide_is_measured_next_by_a_plan_that_reads_back(made, tables, tmp_path):
    half = [one["half_width"] for one in made.data["next"]]
    assert half == sorted(half, reverse=True)
    measured = set(made.data["rows"]["what"])
    assert half
    assert not measured & {one["what"] for one in made.data["next"]}
    (tmp_path / "next.toml").write_text(made.data["plan"])
    plan = read_plan(tmp_path / "next.toml")
    assert len(plan.kernels) + len(plan.collectives) == len(half)


def test_what_a_step_leaves_open_is_measured_next(tables):
    model, cluster = catalog.model("gpt3-125m"), catalog.cluster("dgx-a100")
    problem = Problem(model=model, cluster=cluster, job=Job(global_batch=8, seq_len=2048))
    found = calibration_report(tables[:1], problem=problem, layout="tp=2,dp=4").data["next"]
    weights = [one["step_share"] * one["half_width"] for one in found]
    assert 0 < sum(one["step_share"] for one in found) <= 1
    assert weights[0] > 2 * weights[-1] > 0


def test_nothing_to_show_is_refused():
    with pytest.raises(CalibrationError, match="give tables"):
        calibration_report()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 420)])
def test_the_page_answers_and_its_parts_follow_the_chosen_group(
    made, browser, tmp_path, scheme, width
):
    (tmp_path / "c.html").write_text(made.to_html(), encoding="utf-8")
    context = browser.new_context(
        viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
    )
    page, trouble = context.new_page(), []
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.goto((tmp_path / "c.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    answer = page.inner_text("#answer")
    assert "off by" in answer
    assert made.data["next"][0]["what"] in answer
    groups = made.data["groups"]
    assert page.locator("#groups tbody tr").count() == len(groups)
    page.keyboard.press("ArrowDown")
    shown = page.evaluate("perfmodelCalibration.shown()")
    assert {made.data["rows"]["group"][i] for i in shown} == {groups[0]["group"]}
    assert page.inner_text("#chosen").startswith(groups[0]["group"])
    page.locator("#scatter canvas").scroll_into_view_if_needed()
    at = page.evaluate("perfmodelCalibration.point(0)")
    box = page.locator("#scatter canvas").bounding_box()
    page.mouse.move(box["x"] + at["x"], box["y"] + at["y"])
    assert "predicted" in page.inner_text("#tip")
    page.keyboard.press("Escape")
    assert len(page.evaluate("perfmodelCalibration.shown()")) == made.data["rows"]["of"]
    context.close()
    assert not trouble


def test_a_notebook_shows_the_pages(made):
    assert made._repr_html_().startswith("<iframe")
    assert len(made.to_frame()) == len(made.data["groups"])
    assert (
        report("gpt3-125m", "dgx-a100", "tp=2,dp=4", global_batch=8)
        ._repr_html_()
        .startswith("<iframe")
    )
