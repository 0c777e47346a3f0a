"""Half-widths of intervals from residuals of other sources."""

import numpy as np
import pandas as pd
import pytest

from perfmodel.prediction import TERMS, Unknown, unknown
from perfmodel.validation import fit_unknown


def test_half_widths_cover_nine_tenths_and_leave_groups_out():
    rng = np.random.default_rng(0)
    n = 2000
    runs = pd.DataFrame({"source": ["alpha one"] * n + ["beta two"] * n, "status": "ok"})
    network = rng.uniform(0, 0.5, 2 * n)
    # the second group errs by twice the first, both by more the more they spend between nodes
    sd = np.repeat([0.05, 0.1], n) + 0.2 * network
    runs["measured_iter_time_s"] = np.exp(rng.normal(0, sd))
    predicted = pd.DataFrame({"predicted_iter_time_s": 1.0, "events_half_width": 0.0, "network_share": network})
    for name in ("extrapolated_share", "host_share", "unstated_share"):
        predicted[name] = 0.0
    found = fit_unknown(runs, predicted)
    assert set(found) == {"", "alpha", "beta"}
    for group, base in (("beta", 0.05), ("alpha", 0.1)):
        for side in found[group].values():
            terms = dict(zip(TERMS, side, strict=True))
            # the penalty takes some of the slope for the constant
            assert terms["constant"] == pytest.approx(1.645 * base, abs=0.06)
            assert 0.1 < terms["network"] < 1.645 * 0.2 + 0.1
            assert terms["host"] < 0.02
    everything = Unknown(tuple(found[""]["faster"]), tuple(found[""]["slower"]))
    log = np.log(runs["measured_iter_time_s"].to_numpy())
    ends = np.array([everything.half_widths({"network": share}) for share in network])
    inside = (log >= -ends[:, 0]) & (log <= ends[:, 1])
    assert 0.87 < inside.mean() < 0.93


def test_a_source_is_left_out_with_its_group():
    assert unknown("vTrain validation measurements") != unknown()
    assert unknown("NVIDIA NeMo performance summary") == unknown("NVIDIA Megatron-Bridge performance summary")
    assert unknown("nobody's runs") == unknown()
