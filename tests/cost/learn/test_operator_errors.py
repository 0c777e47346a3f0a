"""Errors by operator: only of shapes kept out, with all their passes."""

from dataclasses import replace

import numpy as np
import pytest
from studies.operator_errors import operator_errors
from test_kernel_fit import TINY, gemm_table

from perfmodel.errors import TableError

RECIPE = replace(TINY, steps=400)


def measured(noise: float):
    """Products of one device under two names and passes, each shape off by its own factor."""
    table = gemm_table(400).drop_duplicates(["m", "n", "k"], ignore_index=True)
    table["device"] = "A100-SXM4-80GB"
    off = np.exp(noise * np.random.default_rng(1).standard_normal(len(table)))
    table["time_us"] = (5 + 2.0 * table["m"] * table["n"] * table["k"] / 218e12 * 1e6) * off
    table["layer_op"] = np.where(np.arange(len(table)) % 2, "up", "down")
    return table


def test_errors_are_of_a_fifth_of_the_shapes_by_operator():
    table = measured(0.0)
    errors = operator_errors([table], RECIPE, column="layer_op")
    assert errors["operator"].tolist() == ["down", "up"]
    assert errors["n"].sum() == pytest.approx(len(table) / 5, abs=1)
    assert errors["mean_ape"].max() < 25


def test_what_only_the_kept_out_rows_know_is_not_learned():
    """Factors drawn for every shape cannot be foreseen: e**0.8 either way on the typical kept-out shape."""
    assert operator_errors([measured(0.8)], RECIPE, column="layer_op")["median_ape"].min() > 20


def test_no_usable_row_is_named():
    with pytest.raises(TableError, match="no usable attention row"):
        operator_errors([measured(0.0)], replace(RECIPE, family="attention"))
