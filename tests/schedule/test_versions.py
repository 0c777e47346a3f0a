"""Staleness: versions that passes use, against the papers' statements (TiMePReSt section 4.4,
PipeDream, 2BW)."""

from functools import cache
from typing import get_args

import numpy as np
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.schedule import (
    Phase,
    WeightPolicy,
    get_schedule,
    repeated,
    schedule_facts,
    version_difference,
    weight_versions,
)
from perfmodel.schedule.memory import peak_live


@cache
def timeprest(workers: int, micro_batches: int):
    """nF1B in the unit time of the paper's figures, 30 mini-batches."""
    return weight_versions(get_schedule("nf1b:1")(workers, micro_batches, 1, 30), "latest")


GRID = [(w, n) for w in range(2, 17) for n in range(2, 17)]


def test_version_difference_has_a_closed_form() -> None:
    """Backward k starts at W + N - 1 + (k - 1)(N + 1) on the last worker and takes W slots to the
    first, so v = ceil(W / (N + 1)): the paper counts N slots per mini-batch and forgets the one of
    the backward."""
    for workers, n in GRID:
        difference = timeprest(workers, n).difference
        assert (difference[:, 15:] == -(-workers // (n + 1))).all()


def test_papers_formula_holds_but_for_few_workers_and_micro_batches() -> None:
    wrong = [(w, n) for w, n in GRID if timeprest(w, n).steady_difference[0] != (w + n - 2) // n]
    assert len(wrong) == 22
    assert min(wrong) == (6, 2)  # the smallest counterexample: 3 by the formula, 2 in the schedule
    assert timeprest(6, 2).steady_difference[0] == 2


def test_single_update_sequence_iff_few_workers() -> None:
    for workers, n in GRID:
        assert (timeprest(workers, n).sequences == 1) == (workers <= n + 1)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8, 12])
def test_default_nf1b_is_no_later_than_the_papers_and_idles_no_longer(workers: int) -> None:
    """Gradients are as late as in unit time. At real durations (a backward of a mini-batch lasts as
    long as its forwards twice) no stage idles longer than in the order of the figures; without a
    bound gradients are later."""
    for n in (1, 2, 3, 4, 8, 12):
        schedule, law = get_schedule("nf1b")(workers, n, 1, 14), version_difference(workers, n)
        versions = weight_versions(schedule, "latest")
        assert versions.difference.max() == versions.sequences == law
        assert peak_live(schedule, np.ones(workers)).max() <= workers * n
        free = weight_versions(get_schedule(f"nf1b:{2 * n}")(workers, n, 1, 14), "latest")
        assert (free.difference[:, -1] >= versions.difference[:, -1]).all()
        default_s, figures_s = (
            schedule_facts(name, workers, n).steady_interval_s for name in ("nf1b", "nf1b:1")
        )
        assert 3 * n - 1e-9 <= default_s <= figures_s + 1e-9


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16])
def test_nf1b_of_two_workers_never_idles(n: int) -> None:
    """`F F (B F)*` and `(F B)*` in mini-batches: PipeDream's interval, one version late, 2 N and N
    in flight."""
    schedule = get_schedule("nf1b")(2, n, 1, 8)
    orders = []
    for device in range(2):
        phases = schedule.phase[schedule.offsets[device] : schedule.offsets[device + 1]]
        orders.append("".join("F" if phase == Phase.FORWARD else "B" for phase in phases))
    forward = "F" * n
    # at the end of the stream nothing is left to run ahead with
    assert orders[0].startswith(2 * forward + 5 * f"B{forward}")
    assert orders[1] == 8 * f"{forward}B"
    assert peak_live(schedule, np.ones(2)).tolist() == [2 * n, n]
    facts = schedule_facts("nf1b", 2, n)
    assert (facts.version_difference, facts.update_sequences, facts.bubble_fraction) == (1, 1, 0.0)
    assert facts.steady_interval_s == schedule_facts("pipedream", 2, n).steady_interval_s == 3 * n


def test_default_nf1b_at_four_workers_and_micro_batches_has_one_sequence() -> None:
    """Figure 7b: version difference 1, one sequence. Unbounded, backwards of real length
    overlap."""
    facts = schedule_facts("nf1b", 4, 4)
    assert (facts.version_difference, facts.update_sequences) == (1, 1)
    free = schedule_facts("nf1b:8", 4, 4)
    assert (free.version_difference, free.update_sequences) == (3, 3)
    assert free.steady_interval_s < facts.steady_interval_s


def test_figure_7() -> None:
    # sequences {1, 3, 5, ..} and {2, 4, ..}
    assert timeprest(4, 2).read[0, :6].tolist() == [
        0,
        0,
        1,
        2,
        3,
        4,
    ]
    assert timeprest(4, 4).read[0, :4].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_pipedream_versions(p: int) -> None:
    stashing = weight_versions(get_schedule("pipedream")(p, 1, 1, 4 * p), "stashing")
    assert stashing.stored.tolist() == list(range(p, 0, -1))
    assert stashing.steady_difference.tolist() == list(range(p, 0, -1))
    vertical = weight_versions(
        get_schedule("pipedream-vertical-sync")(p, 1, 1, 4 * p), "vertical_sync"
    )
    assert vertical.steady_difference.tolist() == [p] * p  # W(t + 1) = W(t) - f(W(t - p + 1))
    assert vertical.sequences == p


@pytest.mark.parametrize("p", [2, 4, 8])
def test_2bw_needs_two_versions_and_is_one_step_late(p: int) -> None:
    versions = weight_versions(get_schedule("pipedream-2bw")(p, p, 1, 5), "double_buffering")
    assert versions.stored.tolist() == [2] * p
    assert (versions.difference[:, 1:] == 2).all()


@pytest.mark.parametrize("policy", get_args(WeightPolicy))
def test_a_step_without_updates_inside_has_one_version(policy: WeightPolicy) -> None:
    for name in ("1f1b", "zb-v", "chimera"):
        versions = weight_versions(get_schedule(name)(4, 8), policy)
        assert not versions.used.any()
        assert versions.stored.tolist() == [1] * 4
        assert versions.steady_difference.tolist() == [1] * 4


def test_steps_that_flush_have_one_version_however_many_follow_one_another() -> None:
    versions = weight_versions(repeated(get_schedule("1f1b")(4, 8), 3), "flush")
    assert not versions.used.any()
    assert versions.stored.tolist() == [1] * 4
    assert versions.sequences == 1


def test_versions_need_one_stage_per_device() -> None:
    schedule = repeated(get_schedule("interleaved")(2, 4, 2), 2)
    with pytest.raises(PerfModelError, match="one stage per device"):
        weight_versions(schedule, "stashing")
    assert np.diff(schedule.offsets).tolist() == [32, 32]
