"""Uneven stages and recompute by stage: against the even layouts that they generalise."""

import numpy as np
import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.errors import LayoutError
from perfmodel.prediction import evaluate, step_problem
from perfmodel.prediction.grids import lower_bounds_s
from perfmodel.spec import Job, Layout

EVEN = Layout.parse("tp=2,pp=4,dp=2,zero=1")


@pytest.fixture(scope="module")
def problem():
    return step_problem(
        catalog.model("llama3-8b"),
        catalog.cluster("dgx-a100"),
        Job(global_batch=64, seq_len=2048, flash_attention=False),
    )


def predicted(layout: Layout | str) -> pm.Prediction:
    return pm.predict("llama3-8b", "dgx-a100", layout, global_batch=64, seq_len=2048)


def test_text_form_round_trips() -> None:
    layout = Layout.parse(
        "pp=4,partition=7-9-9-7,recompute=selective,recompute_full_layers=2-1-0-0"
    )
    assert layout.partition == (7, 9, 9, 7)
    assert Layout.parse(str(layout)) == layout


def test_even_partition_written_out_is_the_default() -> None:
    one, other = predicted(EVEN), predicted(EVEN.replace(partition=(8, 8, 8, 8)))
    assert other.step_time_s == one.step_time_s
    assert other.memory == one.memory
    assert other.breakdown_s == one.breakdown_s


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "gpipe"])
def test_all_layers_in_full_is_full_recompute(schedule: str) -> None:
    layout = EVEN.replace(schedule=schedule)
    one = predicted(layout.replace(recompute="full"))
    for rest in ("none", "selective"):
        other = predicted(layout.replace(recompute=rest, recompute_full_layers=(8, 8, 8, 8)))
        assert other.step_time_s == pytest.approx(one.step_time_s, rel=1e-6)
        assert other.memory.peak == pytest.approx(one.memory.peak, rel=1e-9)
        assert other.memory_account.saved_bytes_per_stage == pytest.approx(
            one.memory_account.saved_bytes_per_stage
        )
        assert other.breakdown_s == pytest.approx(one.breakdown_s, rel=1e-5, abs=1e-6)


def test_every_recomputed_layer_costs_time_and_saves_memory(problem) -> None:
    layouts = [EVEN.replace(recompute_full_layers=(k, 0, 0, 0)) for k in range(9)]
    step_s = evaluate(problem, layouts).step_time_s
    assert (np.diff(step_s) >= 0).all()
    assert step_s[-1] > step_s[0]
    saved = [
        pm.prediction.explain(problem, layout).memory_account.saved_bytes_per_stage
        for layout in layouts
    ]
    assert (np.diff([s[0] for s in saved]) < 0).all()
    assert {s[1:] for s in saved} == {saved[0][1:]}


def test_one_number_of_recomputed_layers_holds_for_all_stages_as_far_as_they_have_them() -> None:
    """A stage with fewer layers recomputes all of its own."""
    uneven = EVEN.replace(partition=(3, 14, 13, 2))
    of_all, stated = (
        predicted(uneven.replace(recompute_full_layers=layers)) for layers in ((5,), (3, 5, 5, 2))
    )
    assert of_all.step_time_s == stated.step_time_s
    assert of_all.memory == stated.memory
    assert of_all.breakdown_s == stated.breakdown_s


def test_a_short_last_stage_pays_for_a_large_head(problem) -> None:
    """Llama 3's vocabulary makes the head worth about two layers."""
    layouts = [EVEN, EVEN.replace(partition=(9, 9, 8, 6)), EVEN.replace(partition=(6, 8, 9, 9))]
    even_s, short_s, long_s = evaluate(problem, layouts).step_time_s
    assert short_s < even_s < long_s
    assert lower_bounds_s(problem, [EVEN])[0] <= even_s
    with pytest.raises(LayoutError, match="uneven stages"):
        lower_bounds_s(problem, layouts)


def test_batches_of_divisions_equal_single_ones(problem) -> None:
    layouts = [
        EVEN.replace(partition=p, recompute_full_layers=r)
        for p in (None, (9, 8, 8, 7))
        for r in (None, (1, 2, 3, 4))
    ]
    together = evaluate(problem, layouts).step_time_s
    assert together == pytest.approx(
        [evaluate(problem, [layout]).step_time_s[0] for layout in layouts], rel=1e-6
    )
    assert len(set(together.tolist())) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=4,partition=8-8-8", "4 pipeline stages"),
        ("pp=4,partition=8-8-8-9", "32 layers"),
        ("pp=4,partition=8-0-16-8", "at least one layer each"),
        ("pp=4,partition=8-x-16-8", "whole number per stage"),
        ("pp=4,recompute_full_layers=9-0-0-0", "8-8-8-8"),
        ("pp=4,recompute=full,recompute_full_layers=1-0-0-0", "already recomputes every layer"),
    ],
)
def test_impossible_divisions_are_refused(
    text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LayoutError, match=words):
        predicted(f"tp=2,dp=2,{text}")
    arguments = ["--model", "llama3-8b", "--cluster", "dgx-a100", "--global-batch", "64"]
    assert main(["predict", *arguments, "--layout", f"tp=2,dp=2,{text}"]) == 2
    assert words in capsys.readouterr().err
