"""The interactive timeline, driven in a real headless browser; skipped where there is none."""

import re

import numpy as np
import pytest

from perfmodel.display import Look, inline_frame, timeline_page
from perfmodel.timeline import MemorySteps, slices
from perfmodel.viz import interactive


def state(page):
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate("perfmodelTimeline.state()")


def move_to(page, event):
    at = page.evaluate(f"perfmodelTimeline.centre({event})")
    page.mouse.move(at["x"], at["y"])
    return at


def test_zoom_hover_search_and_critical_path(prediction, open_page):
    page = open_page(interactive(prediction))
    drawn = slices(prediction.timeline)
    # as the page holds them
    drawn = drawn.select(np.lexsort((drawn.start_s, drawn.stream, drawn.device)))
    assert page.evaluate("perfmodelTimeline.count") == len(drawn)
    whole = state(page)
    assert (whole["from"], whole["to"], whole["drawn"]) == (
        0,
        pytest.approx(prediction.step_time_s),
        len(drawn),
    )
    event = int(
        np.flatnonzero((drawn.device == 2) & (drawn.stream == 0) & (drawn.micro_batch == 5))[0]
    )
    move_to(page, event)
    for _ in range(4):
        page.mouse.wheel(0, -400)
    near = state(page)
    assert near["to"] - near["from"] < 0.2 * whole["to"]
    assert near["from"] < drawn.start_s[event] < near["to"]
    assert near["drawn"] < whole["drawn"]
    move_to(page, event)
    assert state(page)["hovered"] == event
    tip = page.inner_text("#tip")
    assert "forward 5" in tip
    assert "rank 2, compute, stage 2" in tip
    assert "micro-batch 5" in tip
    shown = re.search(r"([\d.]+) ms, from ([\d.]+) ms", tip)
    assert shown
    assert float(shown[1]) == pytest.approx(1e3 * drawn.duration_s[event], rel=1e-3)
    assert float(shown[2]) == pytest.approx(1e3 * drawn.start_s[event], rel=1e-3)
    at = move_to(page, event)
    page.mouse.down()
    page.mouse.move(at["x"] + 200, at["y"])
    page.mouse.up()
    assert state(page)["from"] < near["from"]
    page.click("#fit")
    assert state(page)["to"] == whole["to"]
    page.fill("#search", "backward mb:3 rank:1")
    matching = (drawn.kind == 2) & (drawn.micro_batch == 3) & (drawn.device == 1)
    assert state(page)["found"] == matching.sum() > 0
    page.press("#search", "Enter")
    found = state(page)
    assert matching[found["current"]]
    assert found["from"] <= drawn.start_s[found["current"]] <= found["to"]
    page.fill("#search", "")
    before = page.locator("#rows").screenshot()
    page.check("#critical")
    state(page)
    assert page.locator("#rows").screenshot() != before
    box = page.locator("#memory").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert re.search(r"rank \d: [\d.]+ GiB", page.inner_text("#tip"))


def test_a_wide_pass_shows_its_blocks_and_kernels(prediction, open_page):
    page = open_page(interactive(prediction))
    drawn = slices(prediction.timeline)
    drawn = drawn.select(np.lexsort((drawn.start_s, drawn.stream, drawn.device)))
    event = int(
        np.flatnonzero((drawn.device == 1) & (drawn.stream == 0) & (drawn.micro_batch == 3))[0]
    )
    parts = prediction.pass_parts[int(drawn.duration_class[event])]
    assert sum(part.time_s for part in parts) == pytest.approx(drawn.duration_s[event])
    before = page.locator("#rows").screenshot()
    at = move_to(page, event)
    page.mouse.dblclick(at["x"], at["y"])
    state(page)
    assert page.locator("#rows").screenshot() != before
    kernel = parts[1].events[2]
    inside_s = parts[0].time_s + sum(one.time_s for one in parts[1].events[:2]) + kernel.time_s / 2
    told = page.evaluate(
        f"perfmodelTimeline.describe({event}, {drawn.start_s[event] + inside_s})"
    ).splitlines()
    assert any(line.startswith(parts[1].name.replace("_", " ")) for line in told)
    assert kernel.name.replace("_", " ") in told[-1]


def test_many_events_are_drawn_as_pixels_and_found_again(open_page):
    n, devices = 120_000, 8
    device = np.repeat(np.arange(devices), n // devices)
    start = np.tile(np.arange(n // devices), devices) * 1e-3
    html = timeline_page(
        {
            "start": start,
            "duration": np.full(n, 8e-4),
            "device": device,
            "stream": np.zeros(n),
            "kind": np.zeros(n),
            "stage": device,
            "micro_batch": np.tile(np.arange(n // devices), devices),
            "critical": np.zeros(n),
        },
        kinds=[Look("#56B4E9", "forward")],
        streams=["compute"],
        devices=devices,
        end_s=float(start[-1] + 1e-3),
        memory=[MemorySteps(time_s=start[: n // devices], in_use_bytes=np.full(n // devices, 1e9))]
        * devices,
        title="a <b>title</b> & more",
    )
    page = open_page(html)
    assert page.inner_text("h1") == "a <b>title</b> & more"
    assert state(page)["drawn"] == n
    page.fill("#search", "mb:7777 device:6")
    page.press("#search", "Enter")
    found = state(page)
    assert found["found"] == 1
    assert found["current"] == 6 * (n // devices) + 7777
    assert found["drawn"] < 1000
    move_to(page, found["current"])
    assert state(page)["hovered"] == found["current"]
    assert "forward 7777" in page.inner_text("#tip")


def test_frame_of_a_notebook_works_too(prediction, open_page):
    page = open_page(f"<html><body>{inline_frame(prediction.timeline.to_html())}</body></html>")
    frame = page.frames[1]
    frame.wait_for_function("window.perfmodelTimeline")
    assert frame.evaluate("perfmodelTimeline.count") == len(slices(prediction.timeline))
    assert not frame.is_visible("#memory")  # a timeline alone tells none


def test_page_needs_nothing_from_outside(prediction):
    page = interactive(prediction)
    assert not re.search(r"(src|href)\s*=|@import|url\(", page.replace("srcdoc", ""))
    assert "@DATA@" not in page
