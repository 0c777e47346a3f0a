"""Published servers stay as well predicted as validate/serving.md says."""

import pytest
from serving import compared


@pytest.mark.slow
def test_published_servers():
    table = compared(every=3)
    error = table["error"].abs()
    assert len(table) == 38
    assert error.median() < 0.1
    assert error.mean() < 0.13
    assert table["inside"].mean() > 0.8
    # kernels of today, H200 among them, which no kernel table holds
    recent = table["source"].str.contains("perf-overview")
    assert error[recent].mean() < 0.075
