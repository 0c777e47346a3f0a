"""Pictures: what is drawn equals what is told, and no text lies outside or over other text."""

import itertools

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from perfmodel import catalog, viz
from perfmodel.cost import measured_work
from perfmodel.display import EVENTS, PARTS, shade, text_colour
from perfmodel.errors import PerfModelError
from perfmodel.planning.what_if import Curve
from perfmodel.prediction import predict
from perfmodel.program import Stream
from perfmodel.schedule import PassTimes, get_schedule, schedule_facts
from perfmodel.schedule.facts import equal_parts, starts_and_ends
from perfmodel.timeline import KIND_NAMES, MemorySteps, slices
from perfmodel.units import GIB
from perfmodel.viz import WIDTHS_IN
from perfmodel.viz.over_time import busy_share, drawn_ranks, highs


def texts(figure):
    """Every text that is seen, with its box in pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    found = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip()]
    ticks = {
        t
        for axis in figure.axes
        for side in (axis.xaxis, axis.yaxis)
        for tick in (*side.get_major_ticks(), *side.get_minor_ticks())
        for t in (tick.label1, tick.label2)
        if not side.get_view_interval()[0] - 1e-9
        <= tick.get_loc()
        <= side.get_view_interval()[1] + 1e-9
    }
    return [(t.get_text(), t.get_window_extent(renderer)) for t in found if t not in ticks]


def assert_legible(figure, numbers_may_touch=False):
    seen = texts(figure)
    width, height = figure.get_size_inches() * figure.dpi
    for text, box in seen:
        assert min(box.x0, box.y0) >= -1.5, text
        assert max(box.x1 - width, box.y1 - height) <= 1.5, text
    for (one, a), (other, b) in itertools.combinations(seen, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1.5 or along <= 1.5, (one, other)


def boxes_of(axis):
    collection = next(c for c in axis.collections if isinstance(c, PolyCollection))
    corners = np.array([path.get_extents().get_points() for path in collection.get_paths()])
    return corners, [to_hex(c).upper() for c in collection.get_facecolors()]


@pytest.mark.parametrize("width", ["column", "page"])
def test_gantt_boxes_lie_where_the_timeline_says_in_the_colour_of_their_kind(prediction, width):
    figure = viz.gantt(prediction, width)
    assert figure.get_figwidth() == WIDTHS_IN[width]
    drawn = slices(prediction.timeline).joined()
    drawn = drawn.select(np.isin(drawn.stream, (Stream.COMPUTE, Stream.DATA_COMM)))
    corners, colours = boxes_of(figure.axes[0])
    np.testing.assert_allclose(corners[:, 0, 0], drawn.start_s * 1e3, rtol=1e-9)
    np.testing.assert_allclose(corners[:, 1, 0], drawn.end_s * 1e3, rtol=1e-9)
    np.testing.assert_array_equal(np.floor(corners[:, :, 1].mean(axis=1)), drawn.device)
    assert colours == [EVENTS[KIND_NAMES[k]].colour for k in drawn.kind.tolist()]
    numbers = {t.get_text() for t in figure.axes[0].texts} | {
        t.get_text() for t in figure.axes[1].texts
    }
    assert {str(m) for m in range(8)} <= numbers
    labels = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
    assert {"forward", "backward", "gradient reduction"} <= labels
    assert_legible(figure)


def test_critical_path_is_marked_under_the_boxes_on_it(prediction):
    drawn = slices(prediction.timeline).joined()
    drawn = drawn.select(np.isin(drawn.stream, (Stream.COMPUTE, Stream.DATA_COMM)))
    axis = viz.gantt(prediction).axes[0]
    strips = [c for c in axis.collections if isinstance(c, PolyCollection)][1]
    left = np.array([path.get_extents().x0 for path in strips.get_paths()])
    np.testing.assert_allclose(left, drawn.start_s[drawn.critical] * 1e3)


def test_directions_of_a_bidirectional_pipeline_differ_in_shade(bidirectional):
    figure = viz.gantt(bidirectional)
    corners, colours = boxes_of(figure.axes[0])
    forward = EVENTS["forward"].colour
    up = shade(forward, 0.6)
    first = {}
    for (low, _), colour in zip(corners, colours, strict=True):
        if colour in (forward, up):
            first.setdefault((int(low[1]), colour), low[0])
    # down runs from the first rank to the last, up the other way
    assert [first[d, forward] for d in range(4)] == sorted(first[d, forward] for d in range(4))
    assert [first[d, up] for d in range(4)] == sorted(
        (first[d, up] for d in range(4)), reverse=True
    )
    assert any("down, up" in t.get_text() for t in figure.legends[0].get_texts())
    assert_legible(figure)


@pytest.mark.parametrize("width", ["column", "page"])
def test_memory_lines_are_the_memory_over_time(prediction, width):
    figure = viz.draw_memory(prediction, width)
    steps = prediction.memory_over_time().steps
    lines = figure.axes[0].get_lines()
    for own, line in zip(steps, lines, strict=False):
        np.testing.assert_allclose(line.get_ydata()[:-1], own.in_use_bytes / GIB)
    assert lines[len(steps)].get_ydata()[0] == prediction.memory_capacity_bytes / GIB
    assert_legible(figure)


@pytest.mark.parametrize("width", ["column", "page"])
def test_bars_sum_to_the_step_time(width):
    layouts = ("tp=1,pp=4,dp=8", "tp=2,pp=4,dp=4,zero=1", "tp=8,pp=1,dp=4")
    found = [predict("gpt3-1.3b", "dgx-a100", layout, global_batch=64) for layout in layouts]
    figure = viz.draw_breakdown(found, width)
    axis = figure.axes[0]
    heights = np.array(
        [
            [bar.get_height() for bar in group]
            for group in axis.containers
            if hasattr(group, "patches")
        ]
    )
    np.testing.assert_allclose(heights.sum(axis=0), [1e3 * p.step_time_s for p in found])
    assert to_hex(axis.containers[0].patches[0].get_facecolor()).upper() == PARTS["forward"].colour
    assert [t.get_text().split("\n")[0] for t in axis.get_xticklabels()] == ["1", "2", "8"]
    assert_legible(figure)


@given(arrays(int, st.tuples(st.integers(1, 25), st.integers(1, 3)), elements=st.integers(0, 5)))
def test_non_dominated_points_are_those_that_no_other_beats(points):
    beaten = [
        any((other <= point).all() and (other < point).any() for other in points)
        for point in points
    ]
    np.testing.assert_array_equal(viz.non_dominated(points.astype(float)), ~np.array(beaten))


@pytest.mark.parametrize("width", ["column", "page"])
def test_pareto_names_layouts_of_the_front(width):
    rng = np.random.default_rng(0)
    time_s = rng.uniform(1, 3, 200)
    table = pd.DataFrame(
        {
            "layout": [
                f"tp=8,pp={i},dp=8,zero=1,recompute=selective,sequence_parallel=true"
                for i in range(200)
            ],
            "step_time_s": time_s,
            "peak_bytes": GIB * (80 / time_s + rng.uniform(0, 20, 200)),
            "cost": time_s * rng.choice([1, 2], 200),
        }
    )
    figure = viz.draw_pareto(table, "cost", "device-hours per step", width)
    front = viz.non_dominated(table[["step_time_s", "peak_bytes"]].to_numpy())
    axis = figure.axes[0]
    marked = next(line for line in axis.get_lines() if line.get_marker() == "o")
    assert sorted(marked.get_xdata()) == pytest.approx(sorted(time_s[front]))
    assert [t.get_text() for t in axis.texts] == list("ABCD")
    assert_legible(figure)
    with pytest.raises(PerfModelError, match="peak_bytes"):
        viz.draw_pareto(table.drop(columns="peak_bytes"))


@pytest.mark.parametrize("width", ["column", "page"])
def test_roofline_holds_every_kernel_under_its_roof(width):
    device = catalog.device("a100-sxm4-80gb")
    table = pd.DataFrame(
        {
            "device": device.name,
            "op_family": "gemm",
            "op": "linear",
            "dtype": "bf16",
            "source": "x",
            "m": [128, 4096],
            "n": [4096, 4096],
            "k": [4096, 4096],
            "time_us": [30.0, 600.0],
        }
    )
    work = measured_work(table, device)
    np.testing.assert_allclose(work["flops"], [2 * 128 * 4096**2, 2 * 4096**3])
    figure = viz.draw_roofline(device, work, width)
    axis = figure.axes[0]
    points = next(c for c in axis.collections if isinstance(c, PathCollection)).get_offsets()
    np.testing.assert_allclose(points[:, 1], work["flops"] / work["time_s"])
    roof = axis.get_lines()[0]
    assert roof.get_ydata()[-1] == device.peak.flops_per_s("bf16")
    np.testing.assert_allclose(
        roof.get_ydata()[0] / roof.get_xdata()[0], device.memory_bandwidth_bytes_per_s
    )
    assert_legible(figure)
    with pytest.raises(PerfModelError, match="no measured kernel"):
        viz.draw_roofline(catalog.device("t4"), measured_work(table, catalog.device("t4")))


@pytest.mark.parametrize("width", ["column", "page"])
def test_parity_draws_every_row_with_its_interval(width):
    measured = np.geomspace(1e-5, 1e-1, 40)
    rows = pd.DataFrame(
        {
            "group": np.repeat(["gemm", "memory"], 20),
            "measured_s": measured,
            "predicted_s": 1.1 * measured,
            "lo_s": 0.95 * measured,
            "hi_s": 1.3 * measured,
        }
    )
    figure = viz.draw_parity(rows, width)
    for axis, part in zip(figure.axes, (measured[:20], measured[20:]), strict=False):
        points = next(c for c in axis.collections if isinstance(c, PathCollection)).get_offsets()
        np.testing.assert_allclose(points, np.stack([part, 1.1 * part], axis=1))
        assert "MAPE 10.0%" in axis.get_title("left")
        assert "100% inside" in axis.get_title("left")
    assert_legible(figure)


@pytest.mark.parametrize("width", ["column", "page"])
def test_bubble_curves_are_the_facts(width):
    facts = [
        schedule_facts(name, 4, m)
        for name in ("gpipe", "1f1b", "zb-h1", "chimera")
        for m in (4, 8, 16)
    ]
    figure = viz.draw_bubble_curves(facts, width)
    by_name = {line.get_label(): line for line in figure.axes[0].get_lines()}
    # GPipe and 1F1B: (p - 1) / (m + p - 1)
    np.testing.assert_allclose(
        by_name["gpipe, 1f1b"].get_ydata(), [100 * 3 / (m + 3) for m in (4, 8, 16)]
    )
    assert_legible(figure)


@pytest.mark.parametrize("width", ["column", "page"])
def test_curves_share_a_panel_if_they_are_multiples(width):
    values = (0.5, 1.0, 2.0)
    curves = [
        Curve("compute_rate", values, True, (2.0, 1.0, 0.6), None),
        Curve("memory_bandwidth", values, True, (1.3, 1.0, 0.9), None),
        Curve("all_reduce_delay_s", (0.0, 0.001, 0.002), False, (1.0, 1.0, 1.2), 0.0012),
    ]
    figure = viz.draw_curves(curves, width)
    shared, own = figure.axes
    np.testing.assert_allclose(
        [line.get_ydata() for line in shared.get_lines()], [c.step_s for c in curves[:2]]
    )
    assert own.get_title("left") == "hidden up to 1.2 ms"
    np.testing.assert_allclose(own.get_lines()[0].get_xdata(), [0, 1, 2])
    assert_legible(figure)
    with pytest.raises(PerfModelError, match="sweep"):
        viz.draw_curves([])


@pytest.mark.parametrize("width", ["column", "page"])
def test_links_are_busy_as_long_as_their_slices(prediction, width):
    drawn = slices(prediction.timeline)
    end_s = prediction.timeline.makespan_s
    edges_s = np.linspace(0, end_s, 101)
    own = drawn.select(drawn.stream == Stream.DATA_COMM)  # collectives of one rank queue
    share = busy_share(own, 4, edges_s)
    assert share.min() >= 0
    assert share.max() <= 1 + 1e-9
    np.testing.assert_allclose(
        share.sum(axis=1) * end_s / 100,
        np.bincount(own.device, own.duration_s, minlength=4),
        rtol=1e-9,
    )
    figure = viz.draw_link_utilisation(prediction, width)
    assert [axis.get_title("left").split(":")[0] for axis in figure.axes[:2]] == [
        "pipeline transfers",
        "data-parallel collectives",
    ]
    assert_legible(figure)


def test_overlapping_transfers_count_once():
    slices_of = slices(
        predict("gpt3-1.3b", "dgx-a100", "pp=2", global_batch=4, timeline=True).timeline
    ).select(np.array([0, 0]))
    edges_s = np.array([0.0, slices_of.end_s[0]])
    assert busy_share(slices_of, 2, edges_s)[slices_of.device[0], 0] == pytest.approx(
        slices_of.duration_s[0] / edges_s[1]
    )


@pytest.mark.parametrize("width", ["column", "page"])
def test_schedules_are_drawn_at_their_starts(width):
    schedule = get_schedule("zb-h1")(4, 6, 1)
    times = PassTimes.uniform(4, 1.0, 2.0)
    figure = viz.draw_schedules([(schedule, times)], width)
    corners, _ = boxes_of(figure.axes[0])
    np.testing.assert_allclose(corners[:, :, 0], np.stack(starts_and_ends(schedule, times), axis=1))
    assert_legible(figure)


def test_pictures_of_schedules_say_what_the_table_says():
    """Also of those without a flush, of which one step is drawn."""
    for name in ("zb-h2", "zb-v", "pipedream", "nf1b", "1f1b"):
        facts = schedule_facts(name, 4, 8)
        schedule = get_schedule(name)(4, 8)
        figure = viz.draw_schedules([(schedule, equal_parts(schedule, 1.0, 2.0), facts)])
        title = figure.axes[0].get_title("left")
        assert f"{facts.schedule}: makespan {facts.makespan_s:.4g} s" in title
        assert f"bubble {facts.bubble_fraction:.1%}" in title
        assert (f"steady interval {facts.steady_interval_s:.4g} s" in title) == (name != "1f1b")
        corners, _ = boxes_of(figure.axes[0])
        assert corners[:, :, 0].max() == pytest.approx(facts.makespan_s)


def test_files_of_every_kind_and_refusals(prediction, tmp_path):
    figure = viz.draw_memory(prediction)
    for suffix, first in ((".png", b"\x89PNG"), (".pdf", b"%PDF"), (".svg", b"<?xml")):
        viz.save_figure(figure, tmp_path / f"p{suffix}")
        assert (tmp_path / f"p{suffix}").read_bytes().startswith(first)
    with pytest.raises(PerfModelError, match=r"\.png, \.pdf, \.svg"):
        viz.save_figure(figure, tmp_path / "p.jpeg")
    with pytest.raises(PerfModelError, match="column, page"):
        viz.draw_memory(prediction, "wide")


def test_notebooks_show_pictures_by_themselves(prediction):
    assert viz.draw_memory(prediction)._repr_png_().startswith(b"\x89PNG")


def test_colours_of_events_are_apart_and_text_on_them_is_seen():
    named = (
        "forward",
        "backward",
        "backward_weight",
        "grad_reduce",
        "param_gather",
        "embedding_reduce",
        "optimizer",
    )
    rgb = np.array([[int(EVENTS[n].colour[i : i + 2], 16) for i in (1, 3, 5)] for n in named])
    apart = np.linalg.norm(rgb[:, None] - rgb[None], axis=-1) + 1e3 * np.eye(len(named))
    assert apart.min() > 60
    assert text_colour("#FFFFFF") == "#000000"
    assert text_colour("#0072B2") == "#FFFFFF"


@pytest.fixture(scope="module")
def crowded():
    return predict(
        "gpt3-1.3b", "dgx-a100", "tp=2,pp=4,dp=4,zero=1", global_batch=4096, timeline=True
    )


def test_passes_too_short_to_be_seen_are_shares_of_the_time(crowded):
    figure = viz.gantt(crowded, "column")
    colours = {EVENTS[name].colour for name in ("forward", "backward")}
    _, *filled, _ = (c for c in figure.axes[0].collections if isinstance(c, PolyCollection))
    shares = [c for c in filled if to_hex(c.get_facecolor()[0]).upper() in colours]
    assert len(shares) == 4 * 2  # ranks and kinds of pass
    # steady 1F1B leaves the last rank hardly a gap: its passes fill the lane's height, each by its
    # share
    drawn = slices(crowded.timeline)
    for share, name in zip(shares[-2:], ("forward", "backward"), strict=True):
        own = (drawn.device == 3) & (drawn.kind == KIND_NAMES.index(name))
        x, y = share.get_paths()[0].vertices.T
        middle = np.abs(x - np.median(x)) < 0.2 * np.ptp(x)
        assert np.ptp(y[middle]) == pytest.approx(
            0.62 * drawn.duration_s[own].sum() / crowded.step_time_s, rel=0.1
        )
    assert not figure.axes[0].texts
    assert {"0", "1", "2"} <= {t.get_text() for t in figure.axes[1].texts}
    assert_legible(figure)


def test_memory_of_many_micro_batches_is_its_highs(crowded):
    figure = viz.draw_memory(crowded)
    axis = figure.axes[0]
    assert "highest of every" in axis.get_xlabel()
    for own, line in zip(crowded.memory_over_time().steps, axis.get_lines(), strict=False):
        assert max(line.get_ydata()) * GIB == pytest.approx(own.in_use_bytes.max())
        assert len(line.get_ydata()) < 100
    assert "(above)" in axis.get_lines()[-1].get_label()
    assert_legible(figure)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=20), st.integers(1, 12), st.randoms())
def test_highs_are_the_most_in_use_within_each_bin(at, bins, random):
    time_s = np.unique([0.0, *at])
    held = np.array([random.random() for _ in time_s])
    edges_s = np.linspace(0, 10, bins + 1)
    want = [
        max(
            h
            for h, a, b in zip(held, time_s, [*time_s[1:], np.inf], strict=True)
            if a < hi and b > lo
        )
        for lo, hi in itertools.pairwise(edges_s)
    ]
    np.testing.assert_array_equal(
        highs(MemorySteps(time_s=time_s, in_use_bytes=held), edges_s), want
    )


def test_of_many_ranks_some_have_a_line_and_the_fullest():
    steps = [
        MemorySteps(time_s=np.zeros(1), in_use_bytes=np.array([1.0 + (rank == 37)]))
        for rank in range(64)
    ]
    found = drawn_ranks(steps)
    assert {0, 37, 63} <= set(found)
    assert len(found) < 16
    assert drawn_ranks(steps[:16]) == list(range(16))
