"""Priors of open choices: counts by team, smoothed from general to special contexts."""

import json
from importlib.resources import files

import numpy as np
import pytest

from perfmodel.validation.unstated import OPEN_CHOICES
from perfmodel.validation.unstated.mixture import Tuning
from perfmodel.validation.unstated.priors import (
    DEFAULT,
    EVERYWHERE,
    PRIORS_FILE,
    ChoicePriors,
    Observation,
    choice_priors,
    count_teams,
    likeliest_tuning,
)


def priors_of(*observations: Observation, strength: float = 1.0, without: str = "") -> ChoicePriors:
    return ChoicePriors(count_teams(observations), {"recompute": strength}, without)


def seen(team: str, value: str, *contexts: str) -> Observation:
    return Observation(team, "recompute", (EVERYWHERE, *contexts), value)


def test_a_team_counts_once_however_many_runs_it_has():
    many = [seen("sweep", "full")] * 1000
    priors = priors_of(*many, seen("other", "none"))
    assert priors.probabilities("recompute", (EVERYWHERE,), ("full", "none")) == pytest.approx(
        [0.5, 0.5]
    )
    divided = priors_of(seen("a", "full"), seen("a", "full"), seen("a", "none"), seen("a", "none"))
    assert divided.counts["recompute"][EVERYWHERE]["full"]["a"] == 0.5


def test_without_counts_every_value_is_as_likely():
    assert priors_of().probabilities("recompute", ("",), ("a", "b", "c", "d")) == pytest.approx(
        [0.25] * 4
    )


def test_counts_are_smoothed_towards_the_more_general_context():
    priors = priors_of(seen("a", "full"), seen("b", "full"), seen("c", "none", "size up to 2B"))
    general = priors.probabilities("recompute", (EVERYWHERE,), ("full", "none"))
    assert general == pytest.approx([(2 + 0.5) / 4, (1 + 0.5) / 4])
    special = priors.probabilities("recompute", (EVERYWHERE, "size up to 2B"), ("full", "none"))
    assert special == pytest.approx([general[0] / 2, (1 + general[1]) / 2])
    unknown = priors.probabilities("recompute", (EVERYWHERE, "size of nobody"), ("full", "none"))
    assert unknown == pytest.approx(general)


def test_a_team_is_left_out():
    told = (seen("a", "full"), seen("b", "none"))
    assert priors_of(*told, without="a").probabilities("recompute", ("",), ("full", "none"))[
        0
    ] == pytest.approx(0.25)


def test_values_that_are_not_possible_do_not_count():
    priors = priors_of(seen("a", "full"), seen("b", "selective"))
    assert priors.probabilities("recompute", ("",), ("full", "none")) == pytest.approx([0.75, 0.25])


def test_a_framework_s_default_counts_as_often_as_it_is_used():
    used = [Observation(team, f"recompute: {DEFAULT}", (EVERYWHERE,), "yes") for team in "abc"]
    other = Observation("d", f"recompute: {DEFAULT}", (EVERYWHERE,), "no")
    priors = priors_of(*used, other)
    plain = priors.probabilities("recompute", ("", "framework x"), ("full", "none"))
    usual = priors.probabilities("recompute", ("", "framework x"), ("full", "none"), default="none")
    share = 3.5 / 5
    assert usual == pytest.approx(share * np.array([0, 1]) + (1 - share) * plain)


def test_tuning_is_where_the_other_teams_are_likeliest():
    log_likelihood = {"a": [-1.0, -3.0], "b": [-2.0, -1.0]}
    tunings = (Tuning(), Tuning(choices=4.0))
    assert likeliest_tuning(tunings, log_likelihood, "") == tunings[0]
    assert likeliest_tuning(tunings, log_likelihood, "a") == tunings[1]
    assert likeliest_tuning(tunings, {}, "") == Tuning()


def test_the_shipped_priors_are_whole():
    shipped = json.loads((files("perfmodel.validation") / PRIORS_FILE).read_text())
    assert "validate/fit_priors.py" in shipped["made_by"]
    assert sum(shipped["rows"].values()) > 3000
    names = {choice.name for choice in OPEN_CHOICES}
    counted = {name.partition(":")[0] for name in shipped["counts"]}
    cells = {"parallelism", "micro_batch", "accumulation", "tp", "pp", "cp", "ep", "vpp", "dtype"}
    assert counted <= names | {"framework", "version"} | cells
    assert {"recompute", "zero", "network", "framework"} <= counted
    for by_context in shipped["counts"].values():
        teams: dict[str, float] = {}
        for by_team in by_context[EVERYWHERE].values():
            for team, part in by_team.items():
                teams[team] = teams.get(team, 0.0) + part
        # Every team counts once.
        assert list(teams.values()) == pytest.approx([1.0] * len(teams), abs=2e-3)


def test_leaving_a_team_out_of_the_shipped_priors_changes_what_it_states():
    values = ("0", "1", "2", "3")
    with_all = choice_priors().probabilities("zero", ("", "framework nanotron"), values)
    without = choice_priors("hugging face").probabilities(
        "zero", ("", "framework nanotron"), values
    )
    assert not np.allclose(with_all, without)
