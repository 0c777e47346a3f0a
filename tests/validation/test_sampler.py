"""The fitted posterior of the model of sites against NUTS."""

import numpy as np
import pytest

from perfmodel.prediction.sites import CLASSES
from perfmodel.validation.population import START, SiteRuns

pytest.importorskip("numpyro")


@pytest.mark.slow
def test_the_posterior_is_that_of_a_sampler():
    """Means within a third of a standard deviation, standard deviations within a quarter: the fit
    puts scatter of sources and weights of runs at one value each; one source scatters three times
    as much, and two runs lie far off."""
    from studies.sampler import compared

    rng, of, each = np.random.default_rng(0), 4, 6
    source = np.repeat(np.arange(of), each)
    site = np.array([0.05, -0.03, 0.1, 0.0])[source]
    noise = 0.04 * np.array([1.0, 1.0, 3.0, 1.0])[source] * rng.standard_normal(of * each)
    noise[[2, 20]] += [0.5, -0.4]
    named = np.array([f"s{at} lab" for at in source])
    n_runs = of * each
    log = 0.05 + site + noise
    runs = SiteRuns(
        log=log,
        log_undone=log,
        looked_at=np.zeros(n_runs, bool),
        shares=rng.dirichlet(np.ones(len(CLASSES)), n_runs),
        degrees=np.zeros((n_runs, 3)),
        events=np.full(n_runs, 0.03),
        at=rng.standard_normal((n_runs, 8)) * 3,
        layout=np.arange(n_runs),
        open_deviation=np.zeros(n_runs),
        contradictions=np.zeros(n_runs),
        labels={
            "framework": np.array([f"f{at % 2}" for at in source]),
            "architecture": np.full(n_runs, "X"),
            "source": named,
            "group": named,
        },
    )
    found = compared(runs, np.log(np.concatenate([*START.values()])))
    assert found.names == ("f0|X", "f1|X")
    assert found.furthest_mean < 1 / 3
    assert found.furthest_sd < np.log(1.25)
