"""Rows measured with cold caches are neither fitted nor judged: the regressors' measurements are
warm."""

import pandas as pd

from perfmodel.cost.learn import table_rows
from perfmodel.cost.learn.training import may_be_fitted
from perfmodel.ingest import clean_kernels

TABLE = pd.DataFrame(
    {
        "source": "perfmodel",
        "device": "A100-SXM4-80GB",
        "op_family": "gemm",
        "op": "linear",
        "dtype": "bf16",
        "pass": "fwd",
        "m": 64,
        "n": 64,
        "k": 64,
        "time_us": 10.0,
        "software": "x",
        "origin_split": "",
        "variant": [
            "",
            "cold",
            "unfused",
            "unfused_cold",
            "suspect_interference",
            "suspect_interference_cold",
        ],
    }
)
WARM = [True, False, True, False, False, False]


def test_cold_rows_are_not_fitted() -> None:
    assert may_be_fitted(clean_kernels(TABLE)).tolist() == WARM


def test_cold_rows_are_skipped_with_their_reason() -> None:
    reasons = table_rows(TABLE, "gemm").reasons.tolist()
    assert [reason == "" for reason in reasons] == WARM
    assert reasons[1] == "skipped: measured with cold caches"
