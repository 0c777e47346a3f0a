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
    runs = SiteRuns(
        log=0.05 + site + noise, shares=rng.dirichlet(np.ones(len(CLASSES)), of * each),
        degrees=np.zeros((of * each, 3)), events=np.full(of * each, 0.03), at=rng.standard_normal((of * each, 8)) * 3,
        layout=np.arange(of * each),
        labels={
            "framework": np.array([f"f{at % 2}" for at in source]), "architecture": np.full(len(source), "X"),
            "source": named, "group": named,
        },
    )  # fmt: skip
    found = compared(runs, np.log(np.concatenate([*START.values()])))
    assert found.names == ("f0|X", "f1|X")
    assert found.furthest_mean < 1 / 3
    assert found.furthest_sd < np.log(1.25)
