"""The normal distribution without SciPy, against SciPy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from perfmodel.normal import normal_cdf, normal_quantile


@given(z=st.lists(st.floats(-37.0, 40.0), max_size=20))
def test_probabilities_are_scipys(z: list[float]) -> None:
    assert normal_cdf(np.array(z)) == pytest.approx(ndtr(z), rel=1e-13, abs=0)


@given(probability=st.floats(1e-300, 1.0, exclude_max=True))
def test_quantiles_are_scipys(probability: float) -> None:
    assert normal_quantile(probability) == pytest.approx(ndtri(probability), rel=1e-12, abs=1e-15)


def test_ends_and_shapes() -> None:
    assert normal_cdf(np.array([-np.inf, -1e9, 0.0, 1e9, np.inf])).tolist() == [
        0.0,
        0.0,
        0.5,
        1.0,
        1.0,
    ]
    assert np.isnan(normal_cdf(np.nan))
    assert normal_cdf(np.zeros((2, 0, 3))).shape == (2, 0, 3)
    assert normal_quantile(np.array([[0.5, 0.975]]))[0] == pytest.approx([0.0, 1.959963984540054])
